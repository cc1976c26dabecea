"""What travels through a region writer's queue, and what the writer says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from penstock.memwal.commit_queue import QueueItem
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.memtable import MemTable, PreparedRows


class Kind(Enum):
    ROWS = "rows"
    FREEZE = "freeze"
    BARRIER = "barrier"


class WriteItem(QueueItem):
    """Rows, a freeze, or a barrier that only waits for what came before it."""

    __slots__ = ("kind", "last", "logged", "memtable", "size_bytes")

    def __init__(self, kind: Kind, *, last: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.last = last
        """Nothing is taken after it: the writer closes."""
        self.size_bytes = 0
        self.logged: LoggedRows | None = None
        self.memtable: MemTable | None = None
        """Set when the rows are in it already, or when it is the one being frozen."""


@dataclass(frozen=True, slots=True)
class LoggedRows:
    """Rows ready for the log and the MemTable: the bytes, and the same bytes as a batch."""

    body: pa.Buffer
    rows: PreparedRows


@dataclass(slots=True)
class WriterStats:
    """What one region writer has done since its claim."""

    writes: int = 0
    rows: int = 0
    wal_entries: int = 0
    wal_bytes: int = 0
    replayed_entries: int = 0
    replayed_rows: int = 0
    flushes: int = 0
    flushed_rows: int = 0
    flush_failures: int = 0
    back_pressure_waits: int = 0


@dataclass(frozen=True, slots=True)
class RegionSnapshot:
    """What a region holds at one moment: MemTables, oldest first, behind the manifest."""

    manifest: RegionManifest
    memtables: tuple[tuple[MemTable, int], ...] = ()
