"""Randomness, as a seam: ids, jitter and sampling draw only from an `Entropy`.

`SystemEntropy` keeps no state of its own, so a forked process never repeats its parent's ids.
`SeededEntropy` gives the same run again from the same seed.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from typing import Protocol


class Entropy(Protocol):
    def token_bytes(self, n: int) -> bytes: ...

    def uniform(self, lo: float, hi: float) -> float: ...

    def uuid4(self) -> uuid.UUID: ...

    def hex8(self) -> str:
        """Eight lower-case hexadecimal digits."""


class SystemEntropy:
    def token_bytes(self, n: int) -> bytes:
        return os.urandom(n)

    def uniform(self, lo: float, hi: float) -> float:
        return lo + (hi - lo) * (int.from_bytes(os.urandom(7), "big") >> 3) / (1 << 53)

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(bytes=os.urandom(16), version=4)

    def hex8(self) -> str:
        return os.urandom(4).hex()


class SeededEntropy:
    """Draws that depend on the seed and on the order of the calls, and on nothing else."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lock = threading.Lock()
        self._random = random.Random(seed)

    def token_bytes(self, n: int) -> bytes:
        with self._lock:
            return self._random.randbytes(n)

    def uniform(self, lo: float, hi: float) -> float:
        with self._lock:
            return self._random.uniform(lo, hi)

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(bytes=self.token_bytes(16), version=4)

    def hex8(self) -> str:
        return self.token_bytes(4).hex()
