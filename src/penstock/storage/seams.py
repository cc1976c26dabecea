"""What the engines get from outside: time, randomness, and how patiently to retry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.storage.clock import Clock, SystemClock
from penstock.storage.entropy import Entropy, SystemEntropy
from penstock.storage.retry import Backoff


@dataclass(frozen=True, slots=True)
class Seams:
    clock: Clock = field(default_factory=SystemClock)
    entropy: Entropy = field(default_factory=SystemEntropy)
    backoff: Backoff = field(default_factory=Backoff)

    def attempts(self) -> Iterator[int]:
        """Attempt numbers from 0, with a jittered pause before each but the first."""
        return self.backoff.pauses(self.clock, self.entropy)

    def races(self) -> Iterator[int]:
        """The same, for those who lose only if somebody else wins."""
        return self.backoff.pauses(self.clock, self.entropy, self.backoff.races)
