"""What travels through a region writer's queue, and what the writer says of itself."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from penstock.errors import Fenced, PenstockError, WriterClosed, WriterPoisoned
from penstock.memwal.commit_queue import QueueItem
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.memtable import MemTable, PreparedRows
from penstock.memwal.transactions import Transaction
from penstock.storage.seams import Seams

_MAX_JOINED = 256


class Kind(Enum):
    ROWS = "rows"
    FREEZE = "freeze"
    BARRIER = "barrier"
    ENTER = "enter"


class WriteItem(QueueItem):
    """Rows, a freeze, generations to enter, or a barrier that waits for what came before it."""

    __slots__ = (
        "generations",
        "kind",
        "last",
        "logged",
        "memtable",
        "repeated",
        "size_bytes",
        "transaction",
    )

    def __init__(self, kind: Kind, *, last: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.last = last
        """Nothing is taken after it: the writer closes."""
        self.size_bytes = 0
        self.logged: LoggedRows | None = None
        self.memtable: MemTable | None = None
        """Set when the rows are in it already, or when it is the one being frozen."""
        self.generations: tuple[FlushedGeneration, ...] = ()
        self.transaction: Transaction | None = None
        self.repeated = False
        """Whether the transaction was written before, so that nothing was done."""


def after_failure(failure: PenstockError, region_id: uuid.UUID) -> PenstockError:
    """What every call is told after the one that stopped the writer."""
    if isinstance(failure, Fenced | WriterClosed):
        return type(failure)(str(failure))
    error = WriterPoisoned(
        f"the writer of region {region_id} stopped after a failure: {failure}; open a new writer, "
        "it recovers from the WAL"
    )
    error.__cause__ = failure
    return error


def write_ids(seams: Seams) -> Iterator[bytes]:
    """Ids that no other writer gives to an entry."""
    prefix = seams.entropy.token_bytes(8)
    number = 0
    while True:
        number += 1
        yield prefix + number.to_bytes(8, "big")


class SmallUpsert(QueueItem):
    """A call with few rows, which is written together with others."""

    __slots__ = ("batch", "rows")

    def __init__(self, batch: pa.RecordBatch) -> None:
        super().__init__()
        self.batch = batch
        self.rows = int(batch.num_rows)


def take_small(waiting: deque[SmallUpsert]) -> list[SmallUpsert]:
    return [waiting.popleft() for _ in range(min(len(waiting), _MAX_JOINED))]


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
