"""How long things are kept, and how jobs stay clear of what clean-up may remove.

Files are written before the commit that names them. Until then nothing tells them from what a
crash left behind but their age, so the two sides agree on times:

- a job publishes nothing that it began to write longer than `JOB_SECONDS` ago (`check_age`), and
  is done again instead;
- clean-up removes no file that was never named before it is `orphan_seconds` old, which is at
  least twice that. Zero is allowed too, for who knows that nothing else is running.

Ages are told by the store's own clock (`store_now_ms`), because those of machines differ. A job
measures its own time, by a clock that only rises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import CommitConflict, InvalidInput
from penstock.memwal import names
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

RETAIN_SECONDS = 3600.0
"""So long a version can be read after a newer one replaced it."""
ORPHAN_SECONDS = 86_400.0
FENCE_SECONDS = 7 * 86_400.0
"""So long a fence keeps its place in the WAL, for writers that know no fence window."""
JOB_SECONDS = ORPHAN_SECONDS / 4
MANIFEST_SECONDS = 3600.0
"""Region manifests are kept at least so long: a late version hint may still point at one."""
BOUNDARY_SECONDS = 60.0
"""Entries stay in the WAL at least so long after a manifest has covered them."""
_CLOCK = f"{names.PRIVATE}/clock-"


class Outdated(CommitConflict):
    """A job took so long that clean-up may have removed what it wrote; it has to be repeated."""


@dataclass(frozen=True, slots=True)
class GcLimits:
    retain_seconds: float = RETAIN_SECONDS
    orphan_seconds: float = ORPHAN_SECONDS
    fence_seconds: float = FENCE_SECONDS

    def __post_init__(self) -> None:
        for name in ("retain_seconds", "orphan_seconds", "fence_seconds"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise InvalidInput(f"{name} must be a number of seconds from 0 on, not {value!r}")
        if 0 < self.orphan_seconds < 2 * JOB_SECONDS:
            raise InvalidInput(
                f"orphan_seconds must be at least {2 * JOB_SECONDS:.0f}, because jobs may take "
                f"{JOB_SECONDS:.0f} s from their first file to their commit; or 0 if nothing else "
                "uses the table"
            )
        if self.fence_seconds < BOUNDARY_SECONDS:
            raise InvalidInput(
                f"fence_seconds must be at least {BOUNDARY_SECONDS:.0f}: a writer that was shut "
                "out has to find the fence"
            )

    @property
    def alone(self) -> bool:
        """Whether the caller says that nothing else uses the table."""
        return self.orphan_seconds == 0

    @property
    def manifest_seconds(self) -> float:
        return max(self.retain_seconds, 0.0 if self.alone else MANIFEST_SECONDS)

    def boundary_seconds(self, fence_window_ms: int) -> float:
        """How long entries stay that are covered: longer than any claim goes unverified."""
        return 0.0 if self.alone else max(BOUNDARY_SECONDS, fence_window_ms * 2 / 1000)


def is_older(modified_ms: int, seconds: float, now_ms: int) -> bool:
    """Whether something was written before so many seconds; with 0 whatever is there."""
    return seconds == 0 or modified_ms < now_ms - seconds * 1000


def check_age(seams: Seams, started_ms: float, what: str) -> None:
    """Raise `Outdated` if a job that began at `started_ms` must not publish what it wrote.

    `started_ms` is `clock.monotonic_ms()` of the process that publishes, from before the first
    file was written. To be asked in each attempt, right before the commit.
    """
    seconds = (seams.clock.monotonic_ms() - started_ms) / 1000
    if seconds > JOB_SECONDS:
        raise Outdated(
            f"{what} took {seconds:.0f} s, and clean-up may have taken its files for those of a "
            f"crash: at most {JOB_SECONDS:.0f} s may pass. Nothing was changed; do it again"
        )


def store_now_ms(store: ObjectStore, seams: Seams) -> int:
    """What time it is where the files are: that of an object written just now."""
    key = f"{_CLOCK}{seams.entropy.hex8()}"
    store.put(key, b"")
    try:
        return store.head(key).modified_ms
    finally:
        store.delete(key)


def is_clock_probe(key: str) -> bool:
    return key.startswith(_CLOCK)
