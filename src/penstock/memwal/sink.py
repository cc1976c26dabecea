"""One write whose rows come from many tasks.

    task: rows --> few: with the result itself       --> commit: one WAL entry per region
               --> many: staged as generations       --> commit: one manifest per region

Tasks may run anywhere, fail, and run again: what they leave counts only when it is committed, by
one process and for each region at once. Few rows go through the log, as those of any writer do;
many would only pass through it, so tasks write them as generations, and the commit enters these.
With a transaction a commit can be repeated until it is known to be done.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.errors import BackPressure, CommitConflict, RegionSealed
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity
from penstock.memwal.freshness import Mask
from penstock.memwal.ingest import keys_to_arrays, rows_to_batch
from penstock.memwal.manifest import FlushedGeneration
from penstock.memwal.shape import TableShape
from penstock.memwal.staged import Stage, StagedRows, check_staged, in_order
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.transactions import Transaction

INLINE_BYTES = 2 << 20
"""So many bytes of a task's rows go with its result; more are staged."""
COMMIT_BYTES = 32 << 20
"""So many bytes of all tasks' rows go through the log; more are staged by the commit."""
STAGED_BYTES = 64 << 20
"""A generation is written when so much of a region has come."""
MAX_UNMERGED = 1_000
"""Generations of a region that wait for a merge; with more of them a commit waits."""
MERGE_WAIT_SECONDS = 600.0
_PAUSE_MS = 500.0


@dataclass(frozen=True, slots=True)
class TaskRows:
    """What became of a task's rows; a small value that can be pickled."""

    rows: int = 0
    inline: bytes = b""
    staged: tuple[StagedRows, ...] = ()


class Task:
    """Takes the rows of one task."""

    def __init__(self, table: BaseTable) -> None:
        self.shape: TableShape = table.snapshot().shape
        self._table = table
        self._rows = 0
        self._size_bytes = 0
        self._first: list[pa.RecordBatch] = []
        self._stage: Stage | None = None
        self._waiting: dict[RegionIdentity, list[pa.RecordBatch]] = {}
        self._waiting_bytes: dict[uuid.UUID, int] = {}
        self._pool = ThreadPoolExecutor(1, "penstock-stage")
        self._writing: Future[None] | None = None
        self._staged: list[StagedRows] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Take rows in WAL shape."""
        if not rows.num_rows:
            return
        self._rows += rows.num_rows
        self._size_bytes += rows.nbytes
        if self._stage is None:
            self._first.append(rows)
            if self._size_bytes <= INLINE_BYTES:
                return
            self._stage = Stage(self._table)
            first, self._first = self._first, []
            for batch in first:
                self._share_out(self._stage, batch)
        else:
            self._share_out(self._stage, rows)

    def _share_out(self, stage: Stage, rows: pa.RecordBatch) -> None:
        for identity, some in stage.route(rows):
            self._waiting.setdefault(identity, []).append(some)
            waiting = self._waiting_bytes.get(identity.region_id, 0) + some.nbytes
            self._waiting_bytes[identity.region_id] = waiting
            if waiting >= STAGED_BYTES:
                self._write(stage, identity)

    def _write(self, stage: Stage, identity: RegionIdentity) -> None:
        """Begin to write what has come for a region, when what was begun before is done."""
        self._settle()
        rows = self._waiting.pop(identity)
        self._waiting_bytes.pop(identity.region_id)

        def write() -> None:
            self._staged.append(StagedRows(identity, (stage.write(identity, rows),)))

        self._writing = self._pool.submit(write)

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def finish(self) -> TaskRows:
        try:
            if self._stage is None:
                inline = to_ipc(self._first, self.shape.wal_schema) if self._first else b""
                return TaskRows(self._rows, inline)
            for identity in list(self._waiting):
                self._write(self._stage, identity)
            self._settle()
            return TaskRows(self._rows, staged=tuple(in_order(self._staged)))
        finally:
            self._pool.shutdown(wait=True)


def changes(rows: pa.RecordBatch, deleted: Mask | None, shape: TableShape) -> pa.RecordBatch:
    """Rows of the table, some of which are only to be deleted, in WAL shape and in order."""
    if deleted is None or not deleted.any():
        return shape.wal_rows(rows_to_batch(rows, shape))
    dead = rows.take(pa.array(np.flatnonzero(deleted)))
    keys = keys_to_arrays(dead.select(list(shape.key_columns)), shape)
    tombstones = shape.tombstones(keys)
    if deleted.all():
        return tombstones
    live = rows.take(pa.array(np.flatnonzero(~deleted)))
    upserts = shape.wal_rows(rows_to_batch(live, shape))
    places = np.empty(rows.num_rows, dtype=np.int64)
    places[np.flatnonzero(~deleted)] = np.arange(upserts.num_rows)
    places[np.flatnonzero(deleted)] = upserts.num_rows + np.arange(tombstones.num_rows)
    return pa.concat_batches([upserts, tombstones]).take(pa.array(places))


# --- commit --------------------------------------------------------------------------------


def commit_tasks(
    table: BaseTable,
    writer: TableWriter,
    results: Sequence[TaskRows],
    transaction: Transaction | None = None,
) -> int:
    """Make the rows of all tasks count, in the order given; returns how many there were."""
    rows = sum(result.rows for result in results)
    if not rows:
        return 0
    size_bytes = sum(len(result.inline) for result in results)
    if size_bytes <= COMMIT_BYTES and not any(result.staged for result in results):
        batches = [
            writer.shape.align(batch) for result in results for batch in from_ipc(result.inline)
        ]
        writer.write_once(pa.concat_batches(batches), transaction)
        return rows
    stage = Stage(table)
    parts: list[StagedRows] = []
    for result in results:
        parts += result.staged
        for batch in from_ipc(result.inline):
            for identity, some in stage.route(stage.shape.align(batch)):
                parts.append(StagedRows(identity, (stage.write(identity, [some]),)))
    check_staged(table, parts)
    try:
        writer.enter_once(in_order(parts), transaction)
    except RegionSealed as error:
        raise CommitConflict(
            f"{table.uri} was divided anew while rows were written for its former regions; write "
            f"them again ({error})"
        ) from error
    return rows


def await_merges(table: BaseTable, writer: TableWriter, *, limit: int = MAX_UNMERGED) -> None:
    """Wait while generations are waiting to be merged in too great a number."""
    clock = table.seams.clock
    end_ms = clock.monotonic_ms() + MERGE_WAIT_SECONDS * 1000
    while True:
        waiting = max(
            (
                _unmerged(table, one.manifest.flushed_generations, one.region_id)
                for one in writer.region_writers()
            ),
            default=0,
        )
        if waiting <= limit:
            return
        if clock.monotonic_ms() >= end_ms:
            raise BackPressure(
                f"{table.uri}: {waiting} generations of a region wait to be merged, more than "
                f"{limit}, and no fewer after {MERGE_WAIT_SECONDS:.0f} s; run maintain() or a "
                "Pipeline beside it"
            )
        clock.sleep_ms(_PAUSE_MS)


def _unmerged(
    table: BaseTable, generations: Sequence[FlushedGeneration], region_id: uuid.UUID
) -> int:
    if len(generations) <= 1:
        return 0
    merged = table.snapshot().details.merged(region_id)
    return sum(one.generation > merged for one in generations)


# --- rows on their way ---------------------------------------------------------------------


def to_ipc(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> bytes:
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    sent: bytes = target.getvalue().to_pybytes()
    return sent


def from_ipc(data: bytes) -> list[pa.RecordBatch]:
    return list(pa.ipc.open_stream(data)) if data else []
