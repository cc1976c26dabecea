"""What readers and writers of a crowded table did, for the judge."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.crash.crowd_rows import KEYS, Codes, Seen

RETAIN_SECONDS = 2.0
"""So long the collector keeps versions that were replaced."""
CALL_NUMBERS = 1 << 40


@dataclass(frozen=True, slots=True)
class Write:
    """A call that a writer made: which rows are of this call from now on, or are gone."""

    writer: int
    call: int
    kind: str
    codes: Codes
    began: float
    ended: float

    @property
    def deletes(self) -> bool:
        return self.kind.startswith("delete")


@dataclass(frozen=True, slots=True)
class Read:
    """What a reader was told of the keys it asked for.

    Of those, rows of other calls than `calls` were not asked for. A `stamp` says how old the answer
    may be: "now", "snapshot", or nothing that is promised.
    """

    reader: str
    kind: str
    began: float
    ended: float
    seen: Seen
    asked: Codes = field(default_factory=lambda: np.arange(KEYS))
    calls: tuple[int, int] = (1, CALL_NUMBERS)
    stamp: str = "now"
    nearest: int | None = None
    """Only so many rows were asked for, the nearest ones."""


@dataclass(frozen=True, slots=True)
class Count:
    reader: str
    began: float
    ended: float
    rows: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Two answers about one version of the table; None where it was refused."""

    reader: str
    known: float
    """When the version was the newest."""
    ended: tuple[float, float]
    seen: tuple[Seen | None, Seen | None]


Event = Write | Read | Count | Pinned
