"""The MemTable: rows of one generation in memory, readable from the moment they are appended.

Rows keep the order of the WAL, and a row's number counts from 0 within its generation. Appends
come from one thread at a time (the region writer sees to that); reads may come from any. A read
first takes the number of rows, and then sees exactly that prefix whatever is appended meanwhile.
Of several rows with one key the last wins; the key map points at it. A delete is a row too.

Batches are views of the very buffers that went into the WAL, so memory and log cannot differ.
Live indexes lack rows that were not indexed when they were written (`fully_indexed`); readers look
at those one by one, and flushing indexes them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.index.primary_key import key_array, python_keys
from penstock.memwal.live_indexes import IndexDeltas, LiveIndexes
from penstock.memwal.shape import TableShape
from penstock.memwal.wal import TOMBSTONE

_COMBINE_BATCHES = 512
"""Small batches are joined when this many have piled up, so that reads stay fast."""

_KEY_OVERHEAD_BYTES = 120
"""What one entry of the key map costs, roughly."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """A batch with all that can be worked out before its turn comes."""

    batch: pa.RecordBatch
    size_bytes: int
    keys: list[Any] | None
    deltas: IndexDeltas | None


class MemTable:
    def __init__(
        self, generation: int, shape: TableShape, indexes: LiveIndexes, created_ms: float
    ) -> None:
        self.generation = generation
        self.shape = shape
        self.indexes = indexes
        self.created_ms = created_ms
        self.last_position = 0
        """The WAL entry with the newest of these rows."""
        self.sealed = False
        """No more rows will come, and all of them are durable."""
        self.size_bytes = 0
        self._rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._starts: list[int] = []
        self._small_from = 0
        self._newest: dict[Any, int] = {}
        self.transactions: dict[bytes, int] = {}
        """Of each application the number of its last write among these rows."""
        self.fully_indexed = True
        """Whether the live indexes have every row there is."""
        self._lock = threading.Lock()

    # --- writing ---------------------------------------------------------------------------

    def append(self, rows: PreparedRows) -> None:
        """Add rows behind those that are there."""
        count = rows.batch.num_rows
        deltas = rows.deltas.settled() if rows.deltas is not None else None
        if deltas is not None and not self.indexes.understands(deltas):
            # Prepared for the MemTable before this one, whose vocabulary was another.
            deltas = self.indexes.encode(rows.batch)
        with self._lock:
            first = self._rows
            self._batches.append(rows.batch)
            self._starts.append(first)
            if rows.keys is not None:
                self._newest.update(zip(rows.keys, range(first, first + count), strict=True))
            if deltas is not None:
                self.indexes.append(deltas, first)
            elif self.indexes:
                self.fully_indexed = False
            self._rows = first + count
            self.size_bytes += rows.size_bytes + count * _KEY_OVERHEAD_BYTES
            if len(self._batches) - self._small_from >= _COMBINE_BATCHES:
                self._combine()

    def _combine(self) -> None:
        tail = self._batches[self._small_from :]
        table = pa.Table.from_batches(tail, self.shape.wal_schema).combine_chunks()
        joined = table.to_batches()
        starts, first = [], self._starts[self._small_from]
        for batch in joined:
            starts.append(first)
            first += batch.num_rows
        self._batches[self._small_from :] = joined
        self._starts[self._small_from :] = starts
        self._small_from = len(self._batches)

    # --- reading ---------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self._rows

    def find(self, key: Any, rows: int | None = None) -> pa.RecordBatch | None:
        """The newest row with that key, as a batch of one row (a tombstone included).

        With `rows`, the newest among the first so many.
        """
        with self._lock:
            row = self._newest.get(key)
            if row is None:
                return None
            if rows is None or row < rows:
                at = bisect_right(self._starts, row) - 1
                return self._batches[at].slice(row - self._starts[at], 1)
        # Written again since the rows were counted, which the map knows nothing of.
        table = self.table(rows)
        keys = key_array(table, self.shape.key_columns)
        found = pc.index_in(pa.array([key], keys.type), keys.take(_reversed(len(keys))))[0].as_py()
        if found is None:
            return None
        return table.slice(table.num_rows - 1 - found, 1).combine_chunks().to_batches()[0]

    def find_many(self, keys: list[Any], rows: int) -> npt.NDArray[np.int64]:
        """Of each key the number of its newest row among the first `rows`, or -1."""
        newest = self._newest
        with self._lock:
            found = np.array([newest.get(key, -1) for key in keys], dtype=np.int64)
        later = np.flatnonzero(found >= rows)
        if len(later):
            # Written again since the rows were counted, which the map knows nothing of.
            stored = key_array(self.table(rows), self.shape.key_columns)
            wanted = pa.array([keys[at] for at in later.tolist()], stored.type)
            back = pc.index_in(wanted, stored.take(_reversed(len(stored))))
            found[later] = rows - 1 - back.fill_null(rows).to_numpy()
        return found

    def batches_with(self, rows: npt.NDArray[np.int64]) -> tuple[list[pa.RecordBatch], list[int]]:
        """The batches that hold these rows, and the number of the first row of each."""
        with self._lock:
            places = {bisect_right(self._starts, row) - 1 for row in rows.tolist()}
            chosen = sorted(places)
            return [self._batches[at] for at in chosen], [self._starts[at] for at in chosen]

    def table(self, rows: int | None = None, *, first: int = 0) -> pa.Table:
        """The first `rows` rows (all by default), in order, tombstones included.

        With `first`, only from that row on, which costs no more than those.
        """
        with self._lock:
            count = self._rows if rows is None else rows
            at = max(0, bisect_right(self._starts, first) - 1)
            batches = self._batches[at:]
            start = self._starts[at] if batches else 0
        table = pa.Table.from_batches(batches, self.shape.wal_schema)
        return table.slice(first - start, max(0, count - first))

    @property
    def distinct_keys(self) -> int:
        return len(self._newest)


def prepare_rows(
    shape: TableShape,
    indexes: LiveIndexes,
    batch: pa.RecordBatch,
    size_bytes: int,
    *,
    indexed: bool,
    pool: Executor | None = None,
) -> PreparedRows:
    """The costly part of an append; touches no state, so many threads may do it at once."""
    keys = python_keys(key_array(batch, shape.key_columns)) if shape.key_columns else None
    deltas = indexes.encode(batch, pool) if indexed and indexes else None
    return PreparedRows(batch, size_bytes, keys, deltas)


def _reversed(rows: int) -> pa.Array:
    return pa.array(np.arange(rows - 1, -1, -1))


def live_rows(table: pa.Table) -> pa.Table:
    """Rows that are no tombstones, without the tombstone column."""
    kept = table.filter(pc.invert(table.column(TOMBSTONE)))
    return kept.drop_columns([TOMBSTONE])
