"""Time, as a seam: nothing in Penstock reads a clock or sleeps except through a `Clock`.

`now_ms` is the wall clock, for stamps that other machines read; it may jump either way.
`monotonic_ms` only rises and is for deadlines within one process; it goes on while the machine
sleeps, so a writer that wakes up knows how old its claim is. `SimulatedClock` keeps the same
two properties under a test's control, so that every failure that involves time replays exactly.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from penstock.errors import InvalidInput


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since 1970 by the wall clock."""

    def monotonic_ms(self) -> float:
        """Milliseconds from an arbitrary start, never falling."""

    def sleep_ms(self, ms: float) -> None: ...


_RISING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.clock_gettime_ns(_RISING) / 1e6

    def sleep_ms(self, ms: float) -> None:
        if ms > 0:
            time.sleep(ms / 1000)


class SimulatedClock:
    """A clock that moves only when told to: by `advance`, by `jump_wall`, or by being slept on."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._wall_ms = float(start_ms)
        self._monotonic_ms = 0.0

    def now_ms(self) -> int:
        return int(self._wall_ms)

    def monotonic_ms(self) -> float:
        return self._monotonic_ms

    def sleep_ms(self, ms: float) -> None:
        if ms > 0:
            self.advance(ms)

    def advance(self, ms: float) -> None:
        """Let time pass: both clocks move on."""
        if ms < 0:
            raise InvalidInput(f"time cannot pass by {ms} ms; use jump_wall to set a clock back")
        with self._lock:
            self._wall_ms += ms
            self._monotonic_ms += ms

    def jump_wall(self, ms: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP would; no time passes."""
        with self._lock:
            self._wall_ms += ms
