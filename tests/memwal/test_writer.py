"""The writer of a region: what it acknowledges, when it freezes, and how it stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.failures.lake import WAL, Process, ids_of, make_lake, row

from penstock.errors import (
    BackPressure,
    Fenced,
    InvalidInput,
    PenstockError,
    WriterClosed,
    WriterPoisoned,
)
from penstock.memwal.writer import RegionWriter
from penstock.storage.faults import Fault
from penstock.table import Writer

WAIT_SECONDS = 30.0
GENERATION = "*_gen_*"


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until, "it never came to pass"
        time.sleep(0.002)


@contextmanager
def held(process: Process, *, op: str = "sync", key: str = GENERATION) -> Iterator[threading.Event]:
    """Hold matching calls, flushes by default, until the block ends; tells when one is held."""
    go, arrived = threading.Event(), threading.Event()

    def hold(op: str, key: str) -> None:
        arrived.set()
        go.wait(WAIT_SECONDS)

    rule = process.store.hook(op=op, key=key, before=hold)
    try:
        yield arrived
    finally:
        rule.times = 0
        go.set()


def only(writer: Writer) -> RegionWriter:
    (region,) = writer.region_writers()
    return region


def run(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread; the list gets what it returned or raised."""
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append(work())
        except PenstockError as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, outcome


# --- what an acknowledgement means -------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_durable_and_indexed_are_independent(tmp_path: Path, durable: bool, indexed: bool) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    process.table.create_index("value", "btree")
    writer = process.table.writer(
        durable=durable, indexed=indexed, wal_flush_interval_ms=1_000_000_000
    )
    writer.upsert([row(n) for n in range(5)])
    # Visible at once in this process, whatever the options; elsewhere when it is in the WAL.
    assert process.ids() == [0, 1, 2, 3, 4]
    assert ids_of(lake.reader()) == ([0, 1, 2, 3, 4] if durable else [])
    region = only(writer)
    ((memtable, rows),) = region.snapshot().memtables
    assert (rows, len(memtable.indexes.by_name)) == (5, 1)
    assert memtable.fully_indexed is indexed
    # What is not durable becomes so by its time, and by a close that flushes nothing.
    region.drain()
    assert ids_of(lake.reader()) == [0, 1, 2, 3, 4]
    writer.upsert([row(5)])
    writer.close(flush=False)
    assert ids_of(lake.reader()) == [0, 1, 2, 3, 4, 5]
    assert lake.generations() == []


def test_a_buffer_waits_for_its_time_or_its_size_and_no_longer(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    writer = process.table.writer(durable=False, wal_flush_interval_ms=500, wal_buffer_bytes=2000)
    writer.upsert([row(1)])
    region = only(writer)
    region.tick()
    assert ids_of(lake.reader()) == []
    process.clock.advance(501)
    region.tick()
    assert ids_of(lake.reader()) == [1]
    for n in range(2, 12):
        writer.upsert([row(n)])
    eventually(lambda: lake.reader().count() >= 5)

    # A drain that meets another leader, which stops when its own item is done, is made up for.
    writer.close(flush=False)
    writer = process.table.writer(durable=False, wal_flush_interval_ms=500)
    writer.upsert([row(20)])
    region = only(writer)
    with held(process, op="put_if_absent", key=WAL) as arrived:
        thread, _ = run(region.freeze)
        assert arrived.wait(WAIT_SECONDS)
        writer.upsert([row(21)])
        region.drain()
    thread.join(WAIT_SECONDS)
    process.clock.advance(501)
    region.tick()
    assert {20, 21} <= set(ids_of(lake.reader()))
    writer.close()


def test_a_row_cannot_be_changed_after_it_was_handed_in(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    values = np.arange(100, dtype=np.int64)
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values), pa.nulls(100, pa.string())],
        schema=process.table.schema,
    )
    writer = process.table.writer(durable=False)
    writer.upsert(batch)
    values[:] = -1
    assert process.ids() == list(range(100))
    writer.close()
    assert ids_of(lake.reader()) == list(range(100))


# --- thresholds --------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(
    ("limit", "generations"),
    [({"max_memtable_rows": 10}, 3), ({"max_memtable_bytes": 3000}, 2)],
    ids=["rows", "bytes"],
)
def test_a_full_memtable_is_frozen_and_flushed(
    tmp_path: Path, limit: dict[str, int], generations: int, durable: bool
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(durable=durable, **limit)
    for n in range(30):
        writer.upsert([row(n)])
    eventually(lambda: len(lake.manifests()) == 1 and len(lake.generations()) >= generations)
    assert process.ids() == list(range(30))
    writer.close(flush=False)
    assert ids_of(lake.reader()) == list(range(30))
    stats = writer.stats()
    assert stats["flushes"] == len(lake.generations())
    assert stats["rows"] == 30
    assert (stats["regions"], stats["flush_failures"]) == (1, 0)
    if durable:
        assert stats["writes"] == stats["wal_entries"] == 30


def test_an_old_memtable_is_frozen_by_age_counted_from_its_first_row(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(max_memtable_age_ms=1000, fence_window_ms=10**9)
    writer.upsert([row(0)])
    writer.flush()
    region = only(writer)
    process.clock.advance(100_000)
    region.tick()
    assert lake.generations() == [1], "an empty MemTable has no age"
    writer.upsert([row(1)])
    process.clock.advance(900)
    region.tick()
    assert lake.generations() == [1]
    process.clock.advance(200)
    region.tick()
    eventually(lambda: lake.generations() == [1, 2])
    writer.close()
    region.tick()  # a tick that was already on its way finds nothing to do


def test_flush_waits_for_what_was_written_before_it_and_not_for_what_comes(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(max_memtable_rows=1)
    with held(process, key="*_gen_2") as second:
        writer.upsert([row(1)])
        flushing, outcome = run(writer.flush)
        flushing.join(WAIT_SECONDS)
        writer.upsert([row(2)])
        assert second.wait(WAIT_SECONDS)
        assert outcome == [None]
        # All rows stay readable while a generation is in neither place.
        assert process.ids() == ids_of(lake.reader()) == [1, 2]
    writer.close()
    assert lake.generations() == [1, 2]


# --- recovery ----------------------------------------------------------------------------------


def crash(writer: Writer) -> None:
    writer.abandon()


@pytest.mark.parametrize("primary_key", ["id", None])
def test_recovery_in_smaller_memtables_loses_nothing_at_the_next_crash(
    tmp_path: Path, primary_key: str | None
) -> None:
    """Entries say which generation they were written for, and one of a flushed one is skipped."""
    lake = make_lake(tmp_path, primary_key=primary_key)
    first = lake.process().table.writer()
    for n in range(12):
        first.upsert([row(n)])
    crash(first)
    # The next writer has a smaller threshold. Its first flush lands, and then it crashes too.
    second = lake.process()
    second.store.hook(op="put_if_absent", key="*/manifest/*", nth=3, before=_refuse)
    writer = second.table.writer(max_memtable_rows=4)
    writer.upsert([row(12)])
    region = only(writer)
    with suppress(WriterPoisoned):
        for n in range(13, 40):
            writer.upsert([row(n)])
            eventually(lambda: not region._frozen or region.failure is not None)
    assert region.failure is not None
    acknowledged = writer.stats()["rows"] + 12
    crash(writer)
    assert len(lake.generations()) == 1
    assert ids_of(lake.reader())[:acknowledged] == list(range(acknowledged))
    third = lake.process()
    third.table.flush(recover=True)
    assert third.ids()[:acknowledged] == list(range(acknowledged))
    assert len(set(third.ids())) == len(third.ids()), "a row was replayed twice"


def _refuse(op: str, key: str) -> None:
    raise PermissionError("injected")


def test_recovery_after_writers_whose_generations_never_landed(tmp_path: Path) -> None:
    """Stamps fall when a claim starts again at the manifest's generation; none may be skipped."""
    lake = make_lake(tmp_path, primary_key=None)
    expected: list[int] = []
    for turn in range(4):
        process = lake.process()
        # Nothing is ever flushed: every writer leaves entries of several generations behind.
        process.store.inject(Fault.FAIL_BEFORE, op="sync", key=GENERATION)
        with held(process):
            writer = process.table.writer(max_memtable_rows=2)
            for n in range(7):
                writer.upsert([row(turn * 10 + n)])
                expected.append(turn * 10 + n)
            crash(writer)
    assert lake.generations() == []
    stamps = [entry.generation for entry in lake.wal().tail(0) if not entry.is_fence]
    assert stamps != sorted(stamps)
    assert ids_of(lake.reader()) == expected
    process = lake.process()
    writer = process.table.writer(max_memtable_rows=3)
    writer.upsert([row(99)])
    writer.flush()
    assert process.ids() == ids_of(lake.reader()) == [*expected, 99]
    crash(writer)
    lake.clean_up_wal(range(1, lake.manifest().replay_after_wal_entry_position))
    assert ids_of(lake.reader()) == [*expected, 99]


# --- back-pressure -----------------------------------------------------------------------------

TIGHT = {"max_memtable_bytes": 2000, "max_batch_bytes": 2000, "max_unflushed_bytes": 4000}


@pytest.mark.parametrize("durable", [True, False])
def test_back_pressure_blocks_releases_and_gives_up(tmp_path: Path, durable: bool) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(durable=durable, back_pressure_timeout_ms=5000, **TIGHT)
    writer.upsert([row(0)])
    region = only(writer)
    with held(process):
        written = 1
        while region.unflushed_bytes < 3600:
            writer.upsert([row(written)])
            written += 1
            region.drain()
        # The next one waits, and is refused when its time is up; it was never accepted.
        before = region.unflushed_bytes
        big = row(1000, "x" * 1000)
        thread, outcome = run(lambda: writer.upsert([big]))
        eventually(lambda: region.stats.back_pressure_waits > 0)

        def given_up() -> bool:
            process.clock.advance(5001)
            return bool(outcome)

        eventually(given_up)
        assert isinstance(outcome[0], BackPressure)
        assert "max_unflushed_bytes" in str(outcome[0])
        assert region.unflushed_bytes == before
        assert process.table.get(1000) is None
        # Another waits as well, and goes on when a flush makes room.
        waits = region.stats.back_pressure_waits
        thread, outcome = run(lambda: writer.upsert([row(1001, "y" * 1000)]))
        eventually(lambda: region.stats.back_pressure_waits > waits)
        assert outcome == []
    thread.join(WAIT_SECONDS)
    assert outcome == [1]
    assert process.ids() == [*range(written), 1001]
    writer.close()
    assert ids_of(lake.reader()) == [*range(written), 1001]
    assert region._queued_bytes == 0


def test_a_batch_beyond_the_limit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    with process.table.writer(**TIGHT) as writer:
        writer.upsert([row(0)])
        with pytest.raises(InvalidInput, match="max_batch_bytes = 2000"):
            writer.upsert([row(n, "z" * 100) for n in range(100)])
        assert process.ids() == [0]
        writer.upsert([row(1)])
    assert ids_of(lake.reader()) == [0, 1]


# --- stopping ----------------------------------------------------------------------------------


def test_close_is_clean_idempotent_and_final(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(1)])
    region = only(writer)
    writer.close()
    writer.close()
    assert lake.generations() == [1]
    entries = lake.wal().tip(0)
    for call in (
        lambda: writer.upsert([row(2)]),
        lambda: writer.delete([1]),
        writer.flush,
        region.freeze,
        region.snapshot,
        lambda: region.write(region.shape.tombstones({"id": _ids(1)})),
    ):
        with pytest.raises(WriterClosed):
            call()
    assert lake.wal().tip(0) == entries
    # Closing without a flush leaves the rows in the WAL, for whoever comes next.
    writer = process.table.writer(flush_on_close=False)
    writer.upsert([row(2)])
    writer.close()
    assert lake.generations() == [1]
    assert process.ids() == ids_of(lake.reader()) == [1, 2]


def _ids(*values: int) -> pa.Array:
    return pa.array(values, pa.int64())


@pytest.mark.parametrize("durable", [True, False])
def test_writes_that_race_a_close_are_written_or_refused_never_lost(
    tmp_path: Path, durable: bool
) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    acknowledged: list[int] = []

    def write(writer: Writer, start: int) -> None:
        for n in range(start, start + 1000):
            writer.upsert([row(n)])
            acknowledged.append(n)

    for turn in range(3):
        writer = process.table.writer(durable=durable)
        threads = []
        for t in range(3):
            start = turn * 100_000 + t * 10_000
            threads.append(run(lambda start=start, writer=writer: write(writer, start)))  # type: ignore[misc]
        enough = len(acknowledged) + 20
        eventually(lambda enough=enough: len(acknowledged) >= enough)  # type: ignore[misc]
        writer.close(flush=turn == 1)
        for thread, outcome in threads:
            thread.join(WAIT_SECONDS)
            assert outcome == [None] or isinstance(outcome[0], WriterClosed)
        assert ids_of(lake.reader()) == sorted(acknowledged)


def test_rows_stay_visible_while_a_writer_closes(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(durable=False, wal_flush_interval_ms=10**9)
    writer.upsert([row(1)])
    with held(process, op="put_if_absent", key=WAL) as arrived:
        thread, outcome = run(writer.close)
        assert arrived.wait(WAIT_SECONDS)
        assert process.ids() == [1]
    thread.join(WAIT_SECONDS)
    assert outcome == [None]
    assert process.ids() == ids_of(lake.reader()) == [1]


@pytest.mark.parametrize("what", ["log", "flush", "panic", "manifest"])
def test_a_failure_stops_the_writer_and_a_new_one_recovers(tmp_path: Path, what: str) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(1)])

    class Panic(BaseException):
        """What a panic in Rust looks like here: no Exception."""

    def panic(op: str, key: str) -> None:
        raise Panic("injected")

    if what == "log":
        process.store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key=WAL)
        with pytest.raises(WriterPoisoned, match="8 attempts"):
            writer.upsert([row(2)])
    else:
        if what == "panic":
            process.store.hook(op="sync", key=GENERATION, before=panic)
        elif what == "flush":
            process.store.inject(Fault.FAIL_BEFORE, op="sync", key=GENERATION)
        else:
            process.store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key="*/manifest/*")
        with pytest.raises(WriterPoisoned):
            writer.flush()
    process.store.clear()
    for call in (lambda: writer.upsert([row(3)]), writer.flush, only(writer).snapshot):
        with pytest.raises(WriterPoisoned, match="open a new writer"):
            call()
    # Reads through the handle go on from what is stored.
    assert process.ids() == [1]
    with pytest.raises(WriterPoisoned):
        writer.close()
    writer.close()
    with process.table.writer() as successor:
        successor.upsert([row(4)])
        assert successor.stats()["replayed_rows"] == 1
    assert process.ids() == ids_of(lake.reader()) == [1, 4]


def test_a_fenced_writer_says_so_until_it_is_closed(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    old, new = lake.process(), lake.process()
    writer = old.table.writer()
    writer.upsert([row(1)])
    new.table.upsert([row(2)])
    with pytest.raises(Fenced, match="epoch 2"):
        writer.upsert([row(3)])
    with pytest.raises(Fenced):
        writer.flush()
    with pytest.raises(Fenced):
        writer.close()
    assert old.ids() == new.ids() == [1, 2]


def test_an_entry_that_lands_behind_a_longer_pause_than_the_fence_window_is_verified(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(fence_window_ms=100)
    writer.upsert([row(1)])
    process.store.reset_log()
    writer.upsert([row(2)])
    looks = [call for call in process.store.log if call.op == "exists"]
    assert looks == []
    process.clock.advance(101)
    writer.upsert([row(3)])
    assert [call for call in process.store.log if "/manifest/" in call.key]
    process.store.inject(Fault.FAIL_BEFORE, op="exists", key="*/manifest/*")
    process.clock.advance(101)
    with pytest.raises(WriterPoisoned, match="cannot be verified"):
        writer.upsert([row(4)])


def test_a_read_during_publication_counts_no_row_twice(tmp_path: Path) -> None:
    """A reader's look at the store may bring the manifest before the flush has let go."""
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(n) for n in range(3)])
    seen: list[list[int]] = []

    def look(op: str, key: str) -> None:
        seen.append(process.ids())

    process.store.hook(op="put_if_absent", key="*/manifest/*", nth=1, after=look)
    writer.flush()
    assert seen == [[0, 1, 2]]
    assert process.ids() == [0, 1, 2]


def test_the_exact_numbers_of_an_ordinary_life(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    with process.table.writer() as writer:
        writer.upsert([row(n) for n in range(10)])
        writer.delete([1, 2])
        writer.flush()
        writer.upsert([row(2)])
        stats = writer.stats()
    assert (stats["writes"], stats["rows"], stats["wal_entries"]) == (3, 13, 3)
    assert (stats["flushes"], stats["flushed_rows"]) == (1, 12)
    manifest = lake.manifest()
    assert (manifest.writer_epoch, manifest.current_generation) == (1, 3)
    assert manifest.replay_after_wal_entry_position == lake.wal().tip(0) == 3
