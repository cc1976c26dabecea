"""The table writer: takes rows for the whole table and brings each to the region it belongs to.

Regions are claimed when the first row for them comes. Rows for several regions are written in
parallel, and the call returns when all of them are acknowledged; it is atomic per region, not
across regions. Small upserts that arrive together are joined into one, so that many threads with
a row each cost little more than one thread. A background thread sees to what is due by time.

A change of the region spec is noticed when a region turns out to be sealed, or to belong to a spec
that was replaced. Regions of older specs are then flushed and sealed before any row goes to a
newer one, and the rows that found no place are routed again.

With `reclaim`, a region that another process has taken is claimed again and the rows that were
not acknowledged are sent again. Whether the lost entry had landed is looked up first, so a table
without a primary key gets no row twice.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from penstock import metrics
from penstock.errors import (
    AmbiguousWrite,
    ClaimContention,
    Fenced,
    InvalidInput,
    PenstockError,
    RegionSealed,
    WriterClosed,
    WriterPoisoned,
)
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.memwal.column_watch import ColumnWatch
from penstock.memwal.commit_queue import CommitQueue
from penstock.memwal.config import WriterConfig
from penstock.memwal.flush import flush_memtable
from penstock.memwal.ingest import keys_to_arrays
from penstock.memwal.landing import has_landed
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.manifest import RegionManifest, RegionStatus
from penstock.memwal.regions import RegionRouter, load_manifests
from penstock.memwal.sealing import check_spec, seal
from penstock.memwal.staged import StagedRows
from penstock.memwal.transactions import Transaction, joined
from penstock.memwal.wal import Wal
from penstock.memwal.write_items import SmallUpsert, WriterStats, take_small
from penstock.memwal.writer import RegionWriter

E = TypeVar("E", bound=Exception)
_FLUSH_THREADS = 2
_WRITE_THREADS = 8
_ENCODE_THREADS = 2
_RECLAIM_ATTEMPTS = 64
_SMALL_ROWS = 64
_ROUTE_ATTEMPTS = 3


class TableWriter:
    def __init__(
        self,
        base: BaseTable,
        config: WriterConfig,
        *,
        region: uuid.UUID | None = None,
        reclaim: bool = False,
    ) -> None:
        self.config = config
        self._base = base
        self._region_id = region
        self._reclaim = reclaim
        self._lock = threading.Lock()
        self._opening: dict[uuid.UUID, threading.Lock] = {}
        self._writers: dict[uuid.UUID, RegionWriter] = {}
        self._past_stats: Counter[str] = Counter()
        self._ticking: set[uuid.UUID] = set()
        self._router: RegionRouter | None = None
        self._loading = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._closed = False
        self._released = False
        self._small: CommitQueue[SmallUpsert] = CommitQueue(
            take_small, self._upsert_together, base.seams.clock
        )
        self._flush_pool = ThreadPoolExecutor(_FLUSH_THREADS, "penstock-flush")
        self._encode_pool = ThreadPoolExecutor(_ENCODE_THREADS, "penstock-encode")
        self._write_pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        # Rows keep the columns of now, and what is flushed the indexes, as long as it is open.
        opened = base.snapshot()
        self.shape = opened.shape
        self._target = base.flush_target(opened)
        self._columns = ColumnWatch(base, opened)
        self._load()
        self._housekeeper = threading.Thread(
            target=_keep_house,
            args=(weakref.ref(self), self._stop, self._tick_seconds()),
            name="penstock-housekeeper",
            daemon=True,
        )
        self._housekeeper.start()

    def _load(self) -> None:
        """Read the table's state: spec and regions."""
        self._snapshot = self._base.snapshot()
        spec = self._snapshot.details.current_spec
        if self._region_id is not None:
            return
        if spec is None:
            raise InvalidInput(
                f"{self._base.uri} has no region spec; write to a region by id: writer(region=…)"
            )
        known = load_manifests(self._base.store, self._base.seams)
        older = [m for m in known if 0 < m.region_spec_id < spec.spec_id]
        for manifest in older:
            self._retire(manifest)
        if older:
            known = load_manifests(self._base.store, self._base.seams)
        done = [m.transactions for m in known if m.region_spec_id < spec.spec_id]
        self._older_transactions = joined(*done)
        self._router = RegionRouter(self._base, spec, known)

    # --- writing ---------------------------------------------------------------------------

    def upsert(self, data: Any) -> int:
        """Insert rows, or replace those with the same key; returns how many were written."""
        data = self._columns.checked(data)
        batch = data if isinstance(data, pa.RecordBatch) else self._columns.conform(data)
        if 0 < batch.num_rows <= _SMALL_ROWS:
            item = SmallUpsert(batch)
            self._small.run(item)
            return item.rows
        return self._upsert(batch)

    def _upsert(self, batch: pa.RecordBatch) -> int:
        return self._write(self.shape.wal_rows(self._columns.conform(batch)))

    def _upsert_together(self, group: list[SmallUpsert]) -> None:
        """Write small upserts as one, or each on its own if together they are not valid."""
        first = group[0].batch
        if len(group) > 1 and all(item.batch.schema.equals(first.schema) for item in group[1:]):
            joined = pa.concat_batches([item.batch for item in group])
            try:
                if joined.nbytes <= self.config.max_batch_bytes:
                    self._upsert(joined)
                    return
            except InvalidInput:
                # One of them is wrong. Nothing was written; find out which.
                metrics.split_groups.inc()
            except PenstockError as error:
                for item in group:
                    item.error = error
                return
        for item in group:
            try:
                self._upsert(item.batch)
            except PenstockError as error:
                item.error = error

    def delete(self, keys: Any) -> int:
        """Delete rows by key, whether they exist or not; returns how many keys were given."""
        arrays = keys_to_arrays(keys, self.shape)
        return self._write(self.shape.tombstones(arrays))

    def write_once(self, rows: pa.RecordBatch, transaction: Transaction | None) -> int:
        """Write rows in WAL shape, to those regions that the transaction has not written to."""
        self._check_place(transaction)
        return self._write(rows, transaction)

    def enter_once(self, parts: Sequence[StagedRows], transaction: Transaction | None) -> None:
        """Enter generations that were written elsewhere; each region's at once, or not at all."""
        self._check_place(transaction)

        def enter(part: StagedRows) -> None:
            generations = part.generations
            self._in_region(
                part.identity, lambda writer: writer.enter(generations, transaction), transaction
            )

        with self._call():
            self._in_parallel([partial(enter, part) for part in parts])

    def _check_place(self, transaction: Transaction | None) -> None:
        keyed = self.shape.key_columns
        if transaction and not keyed and transaction.is_in(self._older_transactions):
            raise AmbiguousWrite(
                f"{self._base.uri} was divided anew since transaction {transaction.number} was "
                "begun, and has no key: rows that are there already would be written twice. Look "
                "which are, and go on with the next number"
            )

    def _write(self, rows: pa.RecordBatch, transaction: Transaction | None = None) -> int:
        with self._call():
            if not rows.num_rows:
                return 0
            waiting = rows
            for attempt in range(_ROUTE_ATTEMPTS):
                router = self._router
                sealed = self._write_parts(self._route(router, waiting), transaction)
                if not sealed:
                    break
                if attempt + 1 == _ROUTE_ATTEMPTS:
                    raise sealed[0][0]
                # The table got a new region spec. What other regions took stays there.
                self._reload(router)
                waiting = pa.concat_batches([part for _, part in sealed])
            return int(rows.num_rows)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call under way: `close` waits for it, and none begins after `close`."""
        with self._idle:
            if self._closed:
                raise WriterClosed(f"the writer of {self._base.uri} is closed; open a new one")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                if self._closed:
                    self._idle.notify_all()

    def _route(
        self, router: RegionRouter | None, rows: pa.RecordBatch
    ) -> list[tuple[RegionIdentity, pa.RecordBatch]]:
        if router is None:
            assert self._region_id is not None
            return [(RegionIdentity(self._region_id, self._manual_spec_id()), rows)]
        return router.route(rows, self.shape)

    def _manual_spec_id(self) -> int:
        """Lance gives the regions it creates the id of the table's spec."""
        spec = self._snapshot.details.current_spec
        return spec.spec_id if spec is not None else 0

    def _write_parts(
        self,
        parts: Sequence[tuple[RegionIdentity, pa.RecordBatch]],
        transaction: Transaction | None,
    ) -> list[tuple[RegionSealed, pa.RecordBatch]]:
        """Write each part to its region; returns those whose region takes no more rows."""
        if len(parts) == 1:
            try:
                self._write_region(*parts[0], transaction)
            except RegionSealed as error:
                return [(error, parts[0][1])]
            return []
        for identity, rows in parts:
            # Before any region takes a row, so that a refusal changes nothing.
            size_bytes = pa.ipc.get_record_batch_size(rows)
            if size_bytes > self.config.max_batch_bytes:
                raise InvalidInput(
                    f"{rows.num_rows} rows of {size_bytes} bytes for region {identity.region_id} "
                    f"are more than max_batch_bytes = {self.config.max_batch_bytes}; "
                    "send fewer rows at once"
                )
        refused = self._in_parallel(
            [partial(self._write_region, *part, transaction) for part in parts],
            but_for=RegionSealed,
        )
        return [(error, parts[number][1]) for number, error in refused.items()]

    def _in_parallel(
        self, works: Sequence[Callable[[], None]], but_for: type[E] | tuple[()] = ()
    ) -> dict[int, E]:
        """Do all of them; returns errors of the kind excepted, by number, and raises others."""
        with self._lock:
            if self._write_pool is None:
                self._write_pool = ThreadPoolExecutor(_WRITE_THREADS, "penstock-write")
            pool = self._write_pool
        outcomes = [future.exception() for future in [pool.submit(work) for work in works]]
        excepted = {n: error for n, error in enumerate(outcomes) if isinstance(error, but_for)}
        errors = [e for e in outcomes if e is not None and not isinstance(e, but_for)]
        if errors:
            done = outcomes.count(None)
            errors[0].add_note(f"the rows of {done} of {len(works)} regions were acknowledged")
            raise errors[0]
        return excepted

    def _write_region(
        self, identity: RegionIdentity, rows: pa.RecordBatch, transaction: Transaction | None
    ) -> None:
        def write(writer: RegionWriter) -> object:
            shaped = rows if writer.shape is self.shape else writer.shape.align(rows)
            return writer.write(shaped, transaction)

        self._in_region(identity, write, transaction)

    def _in_region(
        self,
        identity: RegionIdentity,
        work: Callable[[RegionWriter], object],
        transaction: Transaction | None,
    ) -> None:
        """Do something as the owner of a region, and again if another one takes it meanwhile.

        A transaction is known to the region if it has landed, so that nothing is done then.
        """
        last: PenstockError | None = None
        for attempt in range(_RECLAIM_ATTEMPTS):
            writer: RegionWriter | None = None
            try:
                writer = self._region(identity)
                work(writer)
                return
            except (Fenced, ClaimContention) as error:
                # Of a writer that wrote, or of a claim that lost against another.
                if not self._reclaim:
                    raise
                last = error
                if writer is not None:
                    self._forget(writer)
                    entry = error.entry if isinstance(error, Fenced) and not transaction else None
                    if entry is not None and has_landed(self._base, identity, *entry):
                        return
                self._pause(attempt)
            except WriterPoisoned:
                if self._reclaim and writer is not None:
                    self._forget(writer)
                raise
            except WriterClosed as error:
                if self._closed:
                    raise
                # Another thread retires the region, because the spec changed: let it finish.
                last = error
                with self._loading:
                    pass
        assert last is not None
        raise last

    def _pause(self, attempt: int) -> None:
        pause_ms = self._base.seams.entropy.uniform(0, min(20.0 * (attempt + 1), 500.0))
        self._base.seams.clock.sleep_ms(pause_ms)

    # --- life ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring everything written so far into generations."""
        with self._call():
            self._each(lambda writer: self._unless_taken(writer, writer.flush))

    def claim_all(self, wanted: Callable[[uuid.UUID], bool] = lambda _: True) -> None:
        """Claim every region that has rows in its WAL, of those that are wanted."""
        with self._call():
            for attempt in range(_ROUTE_ATTEMPTS):
                router = self._router
                try:
                    self._claim_all(wanted)
                    return
                except RegionSealed:
                    # The table got a new region spec: taking it up flushes and seals the old.
                    if attempt + 1 == _ROUTE_ATTEMPTS:
                        raise
                    self._reload(router)

    def _claim_all(self, wanted: Callable[[uuid.UUID], bool]) -> None:
        for manifest in load_manifests(self._base.store, self._base.seams):
            covered = manifest.replay_after_wal_entry_position
            wal = Wal(self._base.store, manifest.region_id, self._base.seams)
            active = manifest.status is RegionStatus.ACTIVE
            if active and wanted(manifest.region_id) and wal.exists(covered + 1):
                taken = self._writers.get(manifest.region_id)
                if self._reclaim and taken is not None and taken.failure is not None:
                    self._forget(taken)
                self._region(RegionIdentity(manifest.region_id, manifest.region_spec_id))

    def close(self, *, flush: bool | None = None) -> None:
        """Finish what was begun and let the regions go."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            while self._calls:
                self._idle.wait(1.0)
        self._stop.set()
        try:
            self._each(lambda writer: self._unless_taken(writer, lambda: writer.close(flush=flush)))
        finally:
            if self._write_pool is not None:
                self._write_pool.shutdown(wait=True)
            self._encode_pool.shutdown(wait=True)
            self._flush_pool.shutdown(wait=True)
            self._released = True

    def _unless_taken(self, writer: RegionWriter, work: Callable[[], None]) -> None:
        """With `reclaim`, a region that was taken is its new owner's, who has replayed our rows."""
        try:
            work()
        except Fenced:
            if not self._reclaim:
                raise
            self._forget(writer)

    def abandon(self) -> None:
        """Let go of everything without another byte written, as a crash would."""
        self._closed = True
        self._released = True
        self._stop.set()
        for writer in self.region_writers():
            writer.abandon()
        self._flush_pool.shutdown(wait=False, cancel_futures=True)
        self._encode_pool.shutdown(wait=False)
        if self._write_pool is not None:
            self._write_pool.shutdown(wait=False, cancel_futures=True)

    def region_writers(self) -> list[RegionWriter]:
        with self._lock:
            return list(self._writers.values())

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def outdated(self) -> bool:
        """Whether the table's columns are not those it was opened with any more."""
        return bool(self._columns.changed)

    @property
    def released(self) -> bool:
        """Closed, and nothing left in memory."""
        return self._released

    def stats(self) -> dict[str, int]:
        """What this writer has done, over all regions it has claimed."""
        with self._lock:
            total = Counter(asdict(WriterStats()))
            total.update(self._past_stats)
            for writer in self._writers.values():
                total.update(asdict(writer.stats))
            total["regions"] = len(self._writers)
        return dict(total)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(flush=False)
        except PenstockError as second:
            error.add_note(f"and closing the writer failed: {second}")

    def tick(self) -> None:
        """See to what is due by time, in the background."""
        for writer in self.region_writers():
            with self._lock:
                if writer.region_id in self._ticking:
                    continue  # the last one still waits for a thread
                self._ticking.add(writer.region_id)
            self._flush_pool.submit(self._tick, writer)

    def _tick(self, writer: RegionWriter) -> None:
        with self._lock:
            self._ticking.discard(writer.region_id)
        writer.tick()

    def _tick_seconds(self) -> float:
        if self.config.durable:
            return 1.0
        return min(self.config.wal_flush_interval_ms, 1000) / 1000

    def _each(self, work: Any) -> None:
        errors: list[PenstockError] = []
        writers = self.region_writers()
        if len(writers) <= 1:
            for writer in writers:
                work(writer)
            return
        with ThreadPoolExecutor(min(len(writers), _WRITE_THREADS), "penstock-each") as pool:
            for future in [pool.submit(work, writer) for writer in writers]:
                error = future.exception()
                if isinstance(error, PenstockError):
                    errors.append(error)
                elif error is not None:
                    raise error
        if errors:
            raise errors[0]

    # --- regions ---------------------------------------------------------------------------

    def _region(self, identity: RegionIdentity) -> RegionWriter:
        writer = self._writers.get(identity.region_id)
        if writer is not None:
            return writer
        with self._lock:
            opening = self._opening.setdefault(identity.region_id, threading.Lock())
        with opening:
            writer = self._writers.get(identity.region_id)
            if writer is None:
                writer = self._open(identity)
                with self._lock:
                    self._writers[identity.region_id] = writer
            return writer

    def _open(self, identity: RegionIdentity, *, retiring: bool = False) -> RegionWriter:
        base = self._base
        region = claim_region(base.store, identity, base.seams)
        if self._region_id is None and not retiring:
            check_spec(base, region)
        shape, target = self._columns.for_region(self._target)
        return RegionWriter(
            region,
            shape=shape,
            indexes=LiveIndexes(target.index_specs, shape.schema),
            flush=lambda memtable: flush_memtable(target, identity.region_id, memtable),
            config=self.config,
            executor=self._flush_pool,
            encode_pool=self._encode_pool,
            seams=base.seams,
        )

    def _retire(self, manifest: RegionManifest) -> None:
        """Flush and seal a region of an older spec, so that newer regions outrank it."""
        identity = RegionIdentity(manifest.region_id, manifest.region_spec_id)
        last: PenstockError | None = None
        for attempt in range(_RECLAIM_ATTEMPTS):
            held = self._writers.get(manifest.region_id)
            if held is not None and held.failure is not None:
                held = None
            if held is None and manifest.status is RegionStatus.SEALED:
                return
            try:
                writer = held or self._open(identity, retiring=True)
                writer.close(flush=True)
                seal(self._base, manifest.region_id, writer.epoch)
                self._drop(writer)
                return
            except RegionSealed:
                return
            except (Fenced, ClaimContention) as error:
                # Another process retires it too. A writer of our own may have held rows that
                # were in no log: who asked to be told of that is told.
                if held is not None and held.failure is not None and not self._reclaim:
                    raise
                last = error
                if held is not None:
                    self._drop(held)
                self._pause(attempt)
        assert last is not None
        raise last

    def _drop(self, writer: RegionWriter) -> None:
        with self._lock:
            if self._writers.get(writer.region_id) is writer:
                del self._writers[writer.region_id]
                self._past_stats.update(asdict(writer.stats))

    def _forget(self, writer: RegionWriter) -> None:
        self._drop(writer)
        writer.abandon()

    def _reload(self, stale: RegionRouter | None) -> None:
        """Take up the table's new state, unless another thread has done so."""
        with self._loading:
            if self._router is not stale:
                return
            if self._reclaim:
                for writer in self.region_writers():
                    if writer.failure is not None:
                        self._forget(writer)
            self._load()


def _keep_house(
    owner: weakref.ref[TableWriter], stop: threading.Event, interval_seconds: float
) -> None:
    while not stop.wait(interval_seconds):
        writer = owner()
        if writer is None:
            return
        try:
            writer.tick()
        except RuntimeError:
            if writer.closed:
                return  # and its pool is shut down
            # No thread to be had at the moment; the next round may have better luck.
            metrics.missed_ticks.inc()
        del writer
