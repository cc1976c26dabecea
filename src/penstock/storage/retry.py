"""Bounded retries with jitter, for races on one object and for stores that fail in passing.

A `Backoff` says how often and how long; `pauses` is the loop:

    for attempt in backoff.pauses(clock, entropy):
        ...                      # return on success, fall through to try again
    raise CommitConflict(...)    # the caller names the object and the remedy

The first attempt comes at once. Before attempt n (from 1) it sleeps a time drawn evenly from
[0, base_ms * 2**(n-1)], at most max_ms, so that losers of one race do not meet again in step.

Of a store that fails again and again not much is to be hoped; `attempts` is for that. Who loses a
race for the next version of a table has seen somebody else win: `races` may be many more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import InvalidInput
from penstock.storage.clock import Clock
from penstock.storage.entropy import Entropy


@dataclass(frozen=True, slots=True)
class Backoff:
    attempts: int = 8
    base_ms: float = 10.0
    max_ms: float = 1000.0
    races: int = 64

    def __post_init__(self) -> None:
        if min(self.attempts, self.races) < 1 or not 0 <= self.base_ms <= self.max_ms:
            raise InvalidInput(f"{self} needs attempts, races >= 1 and 0 <= base_ms <= max_ms")

    def ceiling_ms(self, attempt: int) -> float:
        """The longest pause before the attempt of that number (the first is 0)."""
        if attempt <= 0:
            return 0.0
        return float(min(self.max_ms, self.base_ms * 2.0 ** min(attempt - 1, 60)))

    def pauses(self, clock: Clock, entropy: Entropy, attempts: int | None = None) -> Iterator[int]:
        """Attempt numbers from 0, sleeping before each but the first."""
        for attempt in range(self.attempts if attempts is None else attempts):
            if attempt:
                clock.sleep_ms(entropy.uniform(0.0, self.ceiling_ms(attempt)))
            yield attempt
