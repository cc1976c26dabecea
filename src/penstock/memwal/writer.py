"""The region writer: the one process that may write to a region, from claim to close.

    write --prepare--> queue --group commit--> WAL entry --> MemTable --> acknowledged
                                 freeze at a threshold --> frozen --> flush --> manifest

Writes queue up and whoever leads the queue writes all that wait as one WAL entry, appends them to
the MemTable in the same order and acknowledges them. A freeze is an item of the same queue, so it
falls between two entries and no entry spans two generations. Writes that are not durable enter
the MemTable first and then wait in the same queue for the next entry.

Invariants
- Entry n+1 is begun only when entry n is durable and in the MemTable.
- MemTable order is WAL order.
- A frozen MemTable stays readable until the manifest that lists its generation is visible.
- Generations are flushed one after the other; the replay position moves over nothing unflushed.
- After a failure nothing more is written or read through this writer: it is poisoned, and a new
  claim recovers from the WAL. Fencing is such a failure with a name of its own.
- No acknowledgement rests on a claim that was last verified longer ago than the fence window.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

import pyarrow as pa

from penstock import metrics
from penstock.errors import (
    BackPressure,
    Fenced,
    InvalidInput,
    PenstockError,
    WriterClosed,
    WriterPoisoned,
)
from penstock.memwal import wal as wal_format
from penstock.memwal.claim import ClaimedRegion, standing_manifest
from penstock.memwal.commit_queue import CommitQueue
from penstock.memwal.config import WriterConfig
from penstock.memwal.flusher import Flusher
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.memtable import MemTable, prepare_rows
from penstock.memwal.shape import TableShape
from penstock.memwal.transactions import Transaction, joined
from penstock.memwal.write_items import (
    Kind,
    LoggedRows,
    RegionSnapshot,
    WriteItem,
    WriterStats,
    after_failure,
    write_ids,
)
from penstock.storage.seams import Seams

_BODY_POOL = pa.system_memory_pool()
"""Keeping many buffers costs a quarter in the system's allocator of what it does in mimalloc."""

_MAX_GROUP_WRITES = 1024
_MAX_QUEUED_WRITES = 65_536


class RegionWriter:
    def __init__(
        self,
        region: ClaimedRegion,
        *,
        shape: TableShape,
        indexes: LiveIndexes,
        flush: Callable[[MemTable], FlushedGeneration],
        config: WriterConfig,
        executor: Executor,
        encode_pool: Executor,
        seams: Seams,
    ) -> None:
        self.region_id: uuid.UUID = region.region_id
        self.epoch = region.manifest.writer_epoch
        self.config = config
        self.shape = shape
        self.stats = WriterStats()
        self._seams = seams
        self._clock = seams.clock
        self._chain = region.chain
        self._wal = region.wal
        self._manifest = region.manifest
        self._verified_ms = region.verified_ms
        self._next_position = region.next_position
        self._flusher = Flusher(region, flush, self.stats, seams)
        self._executor = executor
        self._encode_pool = encode_pool
        self._write_ids = write_ids(seams)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._flushing = threading.Lock()
        self._queue: CommitQueue[WriteItem] = CommitQueue(
            self._take_group, self._write_group, seams.clock, self._interrupted
        )
        self._queued_bytes = 0
        self._buffered_since_ms: float | None = None
        self._drain_due = False
        self._frozen: list[MemTable] = []
        self._failure: PenstockError | None = None
        self._closed = False
        self._released = False
        self._transactions: Mapping[bytes, int] = self._manifest.transactions
        self._active = self._new_memtable(self._manifest.current_generation, indexes)
        self._head = (self._active, self._schema_message(self._active))
        _alive.add(self)
        self._replay(region)

    # --- writing ---------------------------------------------------------------------------

    def write(self, batch: pa.RecordBatch, transaction: Transaction | None = None) -> bool:
        """Write rows in WAL shape, as safely as configured; False if the transaction was there."""
        item = WriteItem(Kind.ROWS)
        item.transaction = transaction
        body = batch.serialize(memory_pool=_BODY_POOL)
        item.size_bytes = body.size
        if item.size_bytes > self.config.max_batch_bytes:
            raise InvalidInput(
                f"{batch.num_rows} rows of {item.size_bytes} bytes for region {self.region_id} "
                f"are more than max_batch_bytes = {self.config.max_batch_bytes}; "
                "send fewer rows at once"
            )
        # From here on the rows are those of the buffer that goes into the log, not the caller's.
        logged = pa.ipc.read_record_batch(body, batch.schema)
        rows = prepare_rows(
            self.shape,
            self._active.indexes,
            logged,
            body.size,
            indexed=self.config.indexed,
            pool=self._encode_pool,
        )
        item.logged = LoggedRows(body, rows)
        if not self.config.durable:
            if transaction is not None:
                raise InvalidInput("a transaction needs a durable writer; open one")
            self._buffer(item)
            return True
        with self._changed:
            self._check_usable()
            self._await_room(item.size_bytes)
            self._queued_bytes += item.size_bytes
        self._queue.run(item)
        return not item.repeated

    def enter(
        self, generations: Sequence[FlushedGeneration], transaction: Transaction | None = None
    ) -> bool:
        """Enter generations that were written elsewhere, as newer than all rows there are.

        All of them are there or none is. False if the transaction was written before.
        """
        item = WriteItem(Kind.ENTER)
        item.generations, item.transaction = tuple(generations), transaction
        with self._changed:
            self._check_usable()
        self._queue.run(item)
        return not item.repeated

    def freeze(self) -> None:
        """Close the active MemTable, and start its flush in the background."""
        with self._changed:
            self._check_usable()
        self._queue_freeze()

    def flush(self) -> None:
        """Freeze, and wait until everything written so far is in generations."""
        self.freeze()
        self._await_flushes()
        with self._changed:
            self._check_usable(closed_is_fine=True)

    def close(self, *, flush: bool | None = None) -> None:
        """Stop taking writes, make what was taken durable, and by default flush it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            if self._failure is None:
                if self.config.flush_on_close if flush is None else flush:
                    self._queue_freeze(last=True)
                else:
                    self._queue.run(WriteItem(Kind.BARRIER, last=True))
                self._await_flushes()
            if self._failure is not None:
                raise self._failure_error()
        finally:
            self._queue.fail(self._closed_error)
            self._release()

    def abandon(self) -> None:
        """Let go without another byte written, as a crash would."""
        with self._changed:
            self._closed = True
        self._fail(WriterClosed(f"the writer of region {self.region_id} was abandoned"))
        self._release()

    # --- reading ---------------------------------------------------------------------------

    def snapshot(self) -> RegionSnapshot:
        """All MemTables and the manifest behind them, as of one moment."""
        with self._lock:
            self._check_usable(closed_is_fine=not self._released)
            # A look at the store may have brought the manifest of a flush that is just finishing.
            unlisted = self._manifest.current_generation
            memtables = [m for m in (*self._frozen, self._active) if m.generation >= unlisted]
            return RegionSnapshot(self._manifest, tuple((m, m.rows) for m in memtables))

    def verify(self) -> None:
        """Ask the store whether the claim still stands; raises `Fenced` if it does not."""
        started_ms = self._clock.monotonic_ms()
        try:
            latest = standing_manifest(self._chain, self._manifest, self._seams)
        except Fenced as error:
            self._fail(error)
            raise
        with self._lock:
            if latest.version > self._manifest.version:
                self._manifest = latest
        self._verified_ms = started_ms

    @property
    def failure(self) -> PenstockError | None:
        return self._failure

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def manifest(self) -> RegionManifest:
        return self._manifest

    @property
    def unflushed_bytes(self) -> int:
        frozen_bytes = sum(memtable.size_bytes for memtable in self._frozen)
        # Rows that are not durable are in a MemTable while they wait for the log.
        queued_bytes = self._queued_bytes if self.config.durable else 0
        return queued_bytes + self._active.size_bytes + frozen_bytes

    # --- group commit ----------------------------------------------------------------------

    def _take_group(self, waiting: deque[WriteItem]) -> list[WriteItem]:
        """The next items that fit into one entry; a freeze or barrier stands alone."""
        group: list[WriteItem] = []
        taken_bytes = 0
        while waiting and len(group) < _MAX_GROUP_WRITES:
            item = waiting[0]
            if item.kind is not Kind.ROWS:
                if not group:
                    group.append(waiting.popleft())
                break
            taken_bytes += item.size_bytes
            full = taken_bytes > self.config.max_batch_bytes
            if group and (full or item.memtable is not group[0].memtable or item.transaction):
                break
            group.append(waiting.popleft())
            if item.transaction:
                break  # it is the entry's name
        return group

    def _write_group(self, group: list[WriteItem]) -> None:
        transaction = group[0].transaction
        write_id = transaction.write_id if transaction else next(self._write_ids)
        position = self._next_position
        try:
            if self._failure is not None:
                raise self._failure_error()
            if group[0].kind is Kind.ROWS:
                self._write_entry(group, position, write_id)
            elif group[0].kind is Kind.FREEZE:
                self._freeze_reached(group[0])
            elif group[0].kind is Kind.ENTER:
                self._enter_reached(group[0])
            if group[0].last:
                # A write that raced the close is refused, not written behind its back.
                self._queue.fail(self._closed_error)
        except PenstockError as error:
            self._fail(error)
            for item in group:
                item.error = self._failure_error()
                if isinstance(item.error, Fenced | WriterPoisoned):
                    item.error.entry = (position, write_id)
        except BaseException as error:
            self._fail(WriterPoisoned(f"region {self.region_id}: {error!r}"))
            for item in group:
                item.error = self._failure_error()
            raise

    def _interrupted(self, error: BaseException) -> None:
        """A group was taken from the queue and not finished: memory may be ahead of the log."""
        self._fail(WriterPoisoned(f"region {self.region_id}: {error!r}"))

    def _write_entry(self, group: list[WriteItem], position: int, write_id: bytes) -> None:
        target = group[0].memtable or self._active
        transaction = group[0].transaction
        if transaction is not None and transaction.is_in(self._transactions):
            group[0].repeated = True
            with self._changed:
                self._queued_bytes -= group[0].size_bytes
                self._changed.notify_all()
            return
        owner, head = self._head
        if owner is not target:
            head = self._schema_message(target)
        forms = [item.logged for item in group if item.logged is not None]
        bodies = [form.body for form in forms]
        named = transaction is not None
        parts = wal_format.encode_entry(head, bodies, write_id, in_transaction=named)
        self._wal.append(position, parts, write_id, self.epoch)
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._verified_ms > self.config.fence_window_ms:
            self.verify()
        self._next_position = position + 1
        if not target.rows:
            target.created_ms = now_ms
        rows = logged_bytes = 0
        for form in forms:
            rows += form.rows.batch.num_rows
            logged_bytes += form.rows.size_bytes
            if group[0].memtable is None:
                target.append(form.rows)
        target.last_position = position
        self._note(transaction, target)
        with self._changed:
            self._queued_bytes -= sum(item.size_bytes for item in group)
            self.stats.writes += len(group)
            self.stats.rows += rows
            self.stats.wal_entries += 1
            self.stats.wal_bytes += logged_bytes
            if group[0].memtable is None and self._is_full(target):
                self._rotate()
                self._start_flush()
            self._changed.notify_all()
        metrics.wal_entries.inc()
        metrics.wal_bytes.inc(logged_bytes)
        metrics.rows_written.inc(rows)

    def _note(self, transaction: Transaction | None, memtable: MemTable) -> None:
        if transaction is not None:
            self._transactions = joined(self._transactions, transaction.done)
            memtable.transactions = joined(memtable.transactions, transaction.done)

    # --- writes that are not durable -------------------------------------------------------

    def _buffer(self, item: WriteItem) -> None:
        """Append to the MemTable at once; the WAL follows in the background."""
        assert item.logged is not None
        with self._changed:
            self._check_usable()
            self._await_room(item.size_bytes)
            item.memtable = self._active
            if not self._active.rows:
                self._active.created_ms = self._clock.monotonic_ms()
            self._active.append(item.logged.rows)
            self._queued_bytes += item.size_bytes
            self._queue.submit(item)
            if self._buffered_since_ms is None:
                self._buffered_since_ms = self._clock.monotonic_ms()
            full = self._is_full(self._active)
            if full:
                self._queue.submit(self._rotate_buffered())
            if full or self._queued_bytes >= self.config.wal_buffer_bytes:
                self._start_drain()

    def _start_drain(self) -> None:
        if not self._drain_due:
            self._drain_due = True
            self._executor.submit(self._drain_in_background)

    def _drain_in_background(self) -> None:
        self._drain_due = False
        self.drain()

    def drain(self) -> None:
        """Write what is buffered to the WAL, unless somebody is at it already."""
        self._buffered_since_ms = None
        self._queue.drain()
        if len(self._queue):
            # Somebody else leads, and stops when its own item is done: look again.
            self._buffered_since_ms = self._clock.monotonic_ms()

    def tick(self) -> None:
        """Called now and then: writes a buffer that has waited, freezes a MemTable that is old."""
        if self._failure is not None or self._closed:
            return
        now_ms = self._clock.monotonic_ms()
        since_ms = self._buffered_since_ms
        if since_ms is not None and now_ms - since_ms >= self.config.wal_flush_interval_ms:
            self.drain()
        active = self._active
        if active.rows and now_ms - active.created_ms > self.config.max_memtable_age_ms:
            self._queue_freeze()

    def _rotate_buffered(self) -> WriteItem:
        """Change MemTables now; the item says when all rows of the old one are durable."""
        item = WriteItem(Kind.FREEZE)
        item.memtable = self._active
        self._rotate(sealed=False)
        return item

    # --- freeze and flush ------------------------------------------------------------------

    def _is_full(self, memtable: MemTable) -> bool:
        return (
            memtable.rows >= self.config.max_memtable_rows
            or memtable.size_bytes >= self.config.max_memtable_bytes
        )

    def _queue_freeze(self, *, last: bool = False) -> None:
        if self.config.durable:
            self._queue.run(WriteItem(Kind.FREEZE, last=last))
            return
        with self._changed:
            if self._active.rows:
                self._queue.submit(self._rotate_buffered())
        self._queue.run(WriteItem(Kind.BARRIER, last=last))

    def _freeze_reached(self, item: WriteItem) -> None:
        """The leader has come to a freeze: all rows before it are durable."""
        with self._changed:
            if item.memtable is not None:
                item.memtable.sealed = True
            elif self._active.rows:
                self._rotate()
            self._start_flush()

    def _enter_reached(self, item: WriteItem) -> None:
        """The leader has come to generations of others: what is older is flushed before them."""
        if item.transaction is not None and item.transaction.is_in(self._transactions):
            item.repeated = True
            return
        self._freeze_reached(WriteItem(Kind.FREEZE))
        self._await_flushes()
        if self._failure is not None:
            raise self._failure_error()
        self._note(item.transaction, self._active)
        manifest = self._flusher.enter(item.generations, self._active.transactions)
        with self._changed:
            if manifest.version > self._manifest.version:
                self._manifest = manifest
            number = manifest.current_generation
            self._active = self._new_memtable(number, self._active.indexes.successor())
            self._head = (self._active, self._schema_message(self._active))

    def _rotate(self, *, sealed: bool = True) -> None:
        self._active.sealed = sealed
        self._frozen.append(self._active)
        self._active = self._successor()
        self._head = (self._active, self._schema_message(self._active))

    def _start_flush(self) -> None:
        if self._frozen:
            self._executor.submit(self._flush_frozen)

    def _flush_frozen(self) -> None:
        """Flush frozen MemTables, oldest first, until none is left."""
        with self._flushing:
            while self._failure is None:
                with self._lock:
                    oldest = self._frozen[0] if self._frozen else None
                if oldest is None or not oldest.sealed:
                    return
                try:
                    self._flush_one(oldest)
                except PenstockError as error:
                    self._fail(error)
                except BaseException as error:
                    # Nobody looks at this thread's result: the failure has to stop the writer.
                    # A panic in Lance is no Exception.
                    self._fail(WriterPoisoned(f"region {self.region_id}: flush: {error!r}"))

    def _flush_one(self, memtable: MemTable) -> None:
        manifest = self._flusher.flush(memtable, lambda: self._failure is not None)
        if manifest is None:
            return
        with self._changed:
            if manifest.version > self._manifest.version:
                self._manifest = manifest
            self._frozen.remove(memtable)
            self._changed.notify_all()

    def _await_flushes(self) -> None:
        """Wait until what is frozen now is flushed, whatever is frozen meanwhile."""
        with self._changed:
            last = self._frozen[-1].generation if self._frozen else 0
            while self._frozen and self._frozen[0].generation <= last and self._failure is None:
                self._changed.wait(1.0)

    # --- state -----------------------------------------------------------------------------

    def _new_memtable(self, generation: int, indexes: LiveIndexes) -> MemTable:
        return MemTable(generation, self.shape, indexes, self._clock.monotonic_ms())

    def _successor(self) -> MemTable:
        return self._new_memtable(self._active.generation + 1, self._active.indexes.successor())

    def _schema_message(self, memtable: MemTable) -> pa.Buffer:
        return wal_format.schema_message(self.shape.wal_schema, self.epoch, memtable.generation)

    def _replay(self, region: ClaimedRegion) -> None:
        for entry in region.replay():
            if entry.writer_epoch > self.epoch:
                raise Fenced(
                    f"region {self.region_id}: epoch {entry.writer_epoch} has written while epoch "
                    f"{self.epoch} was recovering; open a new writer to claim it again"
                )
            self.stats.replayed_entries += 1
            if entry.generation >= self._manifest.current_generation:
                for stored in entry.batches:
                    batch = self.shape.align(stored)
                    rows = prepare_rows(
                        self.shape, self._active.indexes, batch, batch.nbytes, indexed=False
                    )
                    self._active.append(rows)
                    self.stats.replayed_rows += batch.num_rows
            self._active.last_position = entry.position
            self._note(entry.transaction, self._active)
        # Only now: a generation must not be flushed while an entry behind it bears its number or a
        # lower one, because whoever recovers after us would take that entry for flushed.
        with self._changed:
            if self._is_full(self._active):
                self._rotate()
                self._start_flush()

    def _await_room(self, more_bytes: int) -> None:
        """Wait, with the lock held, until unflushed rows leave room for more."""
        limit_bytes = self.config.max_unflushed_bytes

        def is_room() -> bool:
            fits = self.unflushed_bytes + more_bytes <= limit_bytes
            return fits and len(self._queue) < _MAX_QUEUED_WRITES

        if is_room():
            return
        self.stats.back_pressure_waits += 1
        metrics.back_pressure_waits.inc()
        self._start_drain()
        deadline_ms = self._clock.monotonic_ms() + self.config.back_pressure_timeout_ms
        while not is_room():
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                raise BackPressure(
                    f"region {self.region_id}: {self.unflushed_bytes} bytes wait to be flushed "
                    f"(max_unflushed_bytes = {limit_bytes}) and too few left within "
                    f"{self.config.back_pressure_timeout_ms} ms; write more slowly or raise it"
                )
            self._changed.wait(min(left_ms, 1000.0) / 1000)
            self._check_usable()

    def _check_usable(self, *, closed_is_fine: bool = False) -> None:
        if self._failure is not None:
            raise self._failure_error()
        if self._closed and not closed_is_fine:
            raise self._closed_error()

    def _closed_error(self) -> PenstockError:
        return WriterClosed(f"the writer of region {self.region_id} is closed; open a new one")

    def _failure_error(self) -> PenstockError:
        """What every call from now on is told."""
        assert self._failure is not None
        return after_failure(self._failure, self.region_id)

    def _fail(self, error: PenstockError) -> None:
        """Stop for good: everything that waits fails, and everything that comes."""
        with self._changed:
            if self._failure is None:
                self._failure = error
                metrics.poisoned_writers.inc()
            self._changed.notify_all()
        self._queue.fail(self._failure_error)

    def _release(self) -> None:
        with self._changed:
            self._released = True
            self._frozen = []
            self._active = self._successor()
            self._changed.notify_all()


_alive: weakref.WeakSet[RegionWriter] = weakref.WeakSet()


def _memtable_bytes() -> float:
    return float(sum(w.unflushed_bytes - w._queued_bytes for w in list(_alive)))


metrics.memtable_bytes.set_function(_memtable_bytes)
