"""Failures 1 to 10: how logs and MemTables of this design lost rows elsewhere.

Each test sets up the exact interleaving and holds the outcome against one rule: what was
acknowledged is there, and whoever may not write is told so. The wrong design fails the test
named after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import LsmScanner, LsmVectorSearchPlanner, ShardSnapshot
from tests.failures.lake import (
    MANIFEST,
    WAIT_SECONDS,
    WAL,
    Lake,
    Process,
    ids_of,
    make_lake,
    row,
)

from penstock.errors import AmbiguousWrite, Fenced, PenstockError, WriterPoisoned
from penstock.storage.faults import WRITES, Fault
from penstock.table import Writer

FENCE_WINDOW_MS = 5_000


def claim(process: Process) -> Writer:
    """A writer that has taken every region with rows in its log, and written nothing itself."""
    writer = process.table.writer()
    writer.claim_all()
    return writer


# --- 1: fence hole on claim ------------------------------------------------------------------


def test_failure_01_fence_hole_on_claim(tmp_path: Path) -> None:
    # The old writer is idle while another claims. Its next put would find its position free.
    lake = make_lake(tmp_path)
    old = lake.process().table.writer()
    old.upsert([row(1)])
    new = claim(lake.process())
    with pytest.raises(Fenced, match=r"epoch 2.*open a new writer"):
        old.upsert([row(2)])
    new.upsert([row(3)])
    assert ids_of(lake.reader()) == [1, 3]
    with pytest.raises(Fenced):
        old.upsert([row(4)])

    # The old writer is inside its put when the other claims.
    lake = make_lake(tmp_path)
    stalled, other = lake.process(), lake.process()
    old = stalled.table.writer()
    old.upsert([row(1)])
    stalled.store.hook(op="put_if_absent", key=WAL, nth=1, before=lambda *_: claim(other))
    with pytest.raises(Fenced):
        old.upsert([row(2)])
    assert ids_of(lake.reader()) == other.ids() == [1]

    # The old writer is faster: its entry lands where the claimant was about to put its fence.
    # That write is acknowledged, so the claimant has to replay it.
    lake = make_lake(tmp_path)
    quick, claimant = lake.process(), lake.process()
    old = quick.table.writer()
    old.upsert([row(1)])
    claimant.store.hook(
        op="put_if_absent", key=WAL, nth=1, before=lambda *_: old.upsert([row(2), row(3)])
    )
    new = claim(claimant)
    assert claimant.ids() == [1, 2, 3]
    with pytest.raises(Fenced):
        old.upsert([row(4)])
    new.upsert([row(5)])
    new.flush()
    assert claimant.ids() == ids_of(lake.reader()) == [1, 2, 3, 5]


# --- 2: stalled writer and WAL clean-up ------------------------------------------------------


def take_over_and_clean_up(lake: Lake, stalled: Process, stall_ms: float) -> None:
    """While one writer stalls, another claims, writes, flushes, and the log is cleaned."""
    writer = claim(lake.process())
    writer.upsert([row(100)])
    writer.close()
    covered = lake.manifest().replay_after_wal_entry_position
    lake.clean_up_wal(range(1, covered + 1))
    stalled.clock.advance(stall_ms)


@pytest.mark.parametrize("stall", ["before the put arrives", "before its answer comes back"])
def test_failure_02_stalled_writer_and_wal_clean_up(tmp_path: Path, stall: str) -> None:
    lake = make_lake(tmp_path, writer_defaults={"fence_window_ms": FENCE_WINDOW_MS})
    stalled = lake.process()
    old = stalled.table.writer()
    old.upsert([row(1)])

    # Without another claim a long stall is harmless: the claim is verified and the write stands.
    slow = stalled.store.inject(
        Fault.DELAY, op="put_if_absent", key=WAL, nth=1, delay_ms=2 * FENCE_WINDOW_MS
    )
    old.upsert([row(2)])
    assert slow.fired == 1

    late = stalled.store.hook(
        op="put_if_absent",
        key=WAL,
        nth=1,
        before=lambda *_: take_over_and_clean_up(
            lake, stalled, 2 * FENCE_WINDOW_MS if stall.startswith("before the put") else 0
        ),
        after=lambda *_: stalled.clock.advance(2 * FENCE_WINDOW_MS),
    )
    with pytest.raises(Fenced, match="epoch 2"):
        old.upsert([row(3)])
    assert late.fired == 1
    assert lake.entry(3) is not None, "the late entry was meant to land in the hole"
    assert ids_of(lake.reader()) == [1, 2, 100]
    with pytest.raises(Fenced):
        old.upsert([row(4)])

    # The next owner neither trips over the late entry nor takes it for new.
    next_owner = lake.process()
    next_owner.table.upsert([row(5)])
    assert next_owner.ids() == ids_of(lake.reader()) == [1, 2, 5, 100]


def test_failure_02_a_stalled_table_handle_sends_its_rows_again(tmp_path: Path) -> None:
    for primary_key in ("id", None):
        lake = make_lake(tmp_path, primary_key=primary_key)
        stalled = lake.process()
        stalled.table.upsert([row(1)])
        stalled.store.hook(
            op="put_if_absent",
            key=WAL,
            nth=1,
            before=lambda *_, lake=lake, stalled=stalled: take_over_and_clean_up(
                lake, stalled, 10 * FENCE_WINDOW_MS
            ),
        )
        if primary_key is not None:
            stalled.table.upsert([row(2)])
            assert stalled.ids() == ids_of(lake.reader()) == [1, 2, 100]
            continue
        # Rows without a key cannot be sent again blindly, so the caller is told to look.
        with pytest.raises(AmbiguousWrite, match="no key"):
            stalled.table.upsert([row(2)])
        assert stalled.ids() == ids_of(lake.reader()) == [1, 100]


# --- 3: failed flush skipped -----------------------------------------------------------------


def test_failure_03_failed_flush_skipped(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer(max_memtable_rows=2)
    writer.upsert([row(1), row(2)])
    writer.flush()
    covered = lake.manifest().replay_after_wal_entry_position

    # Generation 2 fails whatever is tried, but not before generation 3 waits behind it.
    third_waits = threading.Event()
    process.store.inject(
        Fault.FAIL_BEFORE,
        op="put",
        key="*_gen_2/*",
        before=lambda *_: third_waits.wait(WAIT_SECONDS),
    )
    for first in (3, 5, 7):
        writer.upsert([row(first), row(first + 1)])
    third_waits.set()
    with pytest.raises(WriterPoisoned, match=r"generation 2 .*safe in the WAL"):
        writer.flush()

    assert lake.generations() == [1]
    assert lake.manifest().replay_after_wal_entry_position == covered
    with pytest.raises(WriterPoisoned):
        writer.upsert([row(9)])
    assert ids_of(lake.reader()) == list(range(1, 9))
    recovered = lake.process()
    recovered.table.flush(recover=True)
    assert lake.generations() == [1, 2]
    assert recovered.ids() == ids_of(lake.reader()) == list(range(1, 9))


# --- 4: cursor ambiguity ---------------------------------------------------------------------


def test_failure_04_cursor_ambiguity(tmp_path: Path) -> None:
    # No key: a row replayed twice would be there twice.
    lake = make_lake(tmp_path, primary_key=None)
    crashed = lake.process().table.writer()
    crashed.upsert([row(1)])
    assert lake.manifest().replay_after_wal_entry_position == 0
    assert lake.entry(0) is None
    assert lake.entry(1) is not None

    # Nothing flushed, one entry in the log: it is replayed.
    recovered = lake.process()
    writer = claim(recovered)
    assert writer.stats()["replayed_rows"] == 1
    assert recovered.ids() == ids_of(lake.reader()) == [1]

    # One entry in the log, and flushed: it is not replayed. A fresh lake, so that no fence of the
    # claim above stands between the two.
    lake = make_lake(tmp_path, primary_key=None)
    writer = lake.process().table.writer()
    writer.upsert([row(1)])
    writer.flush()
    assert lake.manifest().replay_after_wal_entry_position == 1
    assert ids_of(lake.reader()) == [1]
    recovered = lake.process()
    successor = recovered.table.writer()
    successor.upsert([row(2)])
    assert successor.stats()["replayed_rows"] == 0
    successor.close()
    assert recovered.ids() == ids_of(lake.reader()) == [1, 2]


# --- 5: a WAL write fails but the writer stays usable ----------------------------------------


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.HTTP_409])
def test_failure_05_wal_write_fails_but_writer_stays_usable(tmp_path: Path, fault: Fault) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(1)])

    # A failure in passing is retried at the same position.
    process.store.inject(fault, op="put_if_absent", key=WAL, nth=1)
    writer.upsert([row(2)])
    entry = lake.entry(2)
    assert entry is not None
    assert [batch.column("id").to_pylist() for batch in entry.batches] == [[2]]

    # One that lasts leaves memory and log apart; nothing goes through this writer any more, even
    # when the store is well again.
    dead = process.store.inject(fault, op=("put_if_absent", "get"), key=WAL)
    with pytest.raises(WriterPoisoned, match=r"stopped after a failure.*open a new writer"):
        writer.upsert([row(3)])
    assert dead.fired > 2
    process.store.clear()
    (region,) = writer.region_writers()
    for refused in (
        lambda: writer.upsert([row(4)]),
        lambda: writer.delete([1]),
        lambda: writer.flush(),
        lambda: region.snapshot(),
        lambda: writer.close(),
    ):
        with pytest.raises(WriterPoisoned):
            refused()

    # The row of unknown fate is there for everybody or for nobody, and the position is not skipped.
    fate = [3] if fault is Fault.FAIL_AFTER else []
    assert process.ids() == ids_of(lake.reader()) == [1, 2, *fate]
    recovered = lake.process()
    recovered.table.upsert([row(5)])
    assert recovered.ids() == ids_of(lake.reader()) == [1, 2, *fate, 5]


# --- 6: lost acknowledgement -----------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.DUPLICATE])
def test_failure_06_lost_acknowledgement(tmp_path: Path, fault: Fault) -> None:
    # Our own entry, met again: neither a fence nor a reason to write the rows once more.
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    writer = process.table.writer()
    for number in range(1, 4):
        process.store.inject(fault, op="put_if_absent", key=WAL, nth=1)
        writer.upsert([row(number)])
    assert process.ids() == ids_of(lake.reader()) == [1, 2, 3]

    # The same for the fence of a claim and for the manifest that lists a generation.
    claimant = lake.process()
    claimant.store.inject(fault, op="put_if_absent", key=WAL, nth=1)
    writer = claim(claimant)
    claimant.store.inject(fault, op="put_if_absent", key=MANIFEST, nth=1)
    writer.upsert([row(4)])
    writer.flush()
    assert lake.generations() == [1]
    assert claimant.ids() == ids_of(lake.reader()) == [1, 2, 3, 4]

    # Another writer's entry at our position is no acknowledgement, although our own put failed
    # without an answer and might have been it.
    writer.upsert([row(5)])
    rival = lake.process()
    claimant.store.inject(
        Fault.FAIL_BEFORE, op="put_if_absent", key=WAL, nth=1, before=lambda *_: claim(rival)
    )
    with pytest.raises(Fenced):
        writer.upsert([row(6)])
    assert rival.ids() == ids_of(lake.reader()) == [1, 2, 3, 4, 5]


# --- 7: freeze-to-commit gap -----------------------------------------------------------------


@pytest.mark.parametrize("primary_key", ["id", None])
def test_failure_07_freeze_to_commit_gap(tmp_path: Path, primary_key: str | None) -> None:
    lake = make_lake(tmp_path, primary_key=primary_key)
    process = lake.process()
    writer = process.table.writer()
    elsewhere = lake.reader()
    written: list[int] = []
    looked: list[str] = []
    wrong: list[str] = []

    def look(moment: str) -> Callable[[str, str], None]:
        def check(op: str, key: str) -> None:
            looked.append(f"{moment} {op} {key.split('/')[-1]}")
            seen = {"here": process.ids(), "elsewhere": ids_of(elsewhere)}
            if primary_key is not None:
                found = process.table.get_many(written).column("id").to_pylist()
                seen["by key"] = sorted(found)
            wrong.extend(
                f"{looked[-1]}: {ids} {where}" for where, ids in seen.items() if ids != written
            )

        return check

    for generation in (1, 2):
        for number in (1, 2, 3):
            writer.upsert([row(10 * generation + number)])
            written.append(10 * generation + number)
        process.store.hook(op=WRITES, before=look("before"), after=look("after"))
        writer.flush()
        process.store.clear()
        look("later")("", "")
    assert not wrong
    assert any("after put_if_absent" in moment for moment in looked)
    assert len(looked) >= 10


# --- 8: duplicates inside one batch or one generation ----------------------------------------

SEARCHED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("body", pa.string()),
    ]
)


def point(identity: int, at: float, body: str) -> dict[str, object]:
    return {"id": identity, "vector": [at, at, 0.0, 1.0], "body": body}


def searched_lake(path: Path) -> tuple[Lake, Process]:
    """A table with a vector, a text and a scalar index, and its training rows in generation 1."""
    lake = make_lake(path, schema=SEARCHED)
    process = lake.process()
    process.table.upsert([point(1000 + n, 50.0 + n, "training ground") for n in range(16)])
    process.table.flush()
    process.table.create_index("vector", "ivf_flat", num_partitions=2)
    process.table.create_index("body", "fts")
    process.table.create_index("id", "btree")
    return lake, process


def test_failure_08_duplicates_inside_one_batch_or_generation(tmp_path: Path) -> None:
    lake, process = searched_lake(tmp_path)
    table = process.table
    writer = table.writer()
    writer.upsert([point(1, 9.0, "old river"), point(2, 0.2, "river"), point(1, 0.1, "new river")])
    writer.upsert([point(2, 9.0, "old river"), point(3, 0.3, "river"), point(4, 0.4, "river")])
    writer.upsert([point(2, 0.2, "new river")])
    writer.delete([4])
    live = {1: "new river", 2: "new river", 3: "river"}

    def fresh() -> dict[int, str]:
        rows = [r for r in table.to_arrow().to_pylist() if r["id"] < 1000]
        assert len(rows) == len({r["id"] for r in rows})
        assert table.count() == len(rows) + 16
        assert sorted(r["id"] for r in table.get_many([1, 2, 3, 4]).to_pylist()) == [1, 2, 3]
        return {r["id"]: r["body"] for r in rows}

    assert fresh() == live
    writer.flush()
    assert fresh() == live

    # The generation alone, the way any Lance reader searches it.
    generation = lake.generation(2)
    rows = generation.to_table(filter="not _tombstone").to_pylist()
    assert sorted((r["id"], r["body"]) for r in rows) == sorted(live.items())
    query = np.array([0.0, 0.0, 0.0, 1.0], dtype=np.float32)
    near = {"column": "vector", "q": query, "k": 10, "nprobes": 2}
    found = generation.scanner(columns=["id"], nearest=near, fast_search=True).to_table()
    assert found.column("id").to_pylist() == [1, 2, 3]
    texts = generation.to_table(columns=["id"], full_text_query="river")
    assert sorted(texts.column("id").to_pylist()) == [1, 2, 3]

    # And Lance's own merged reads over base and generations.
    manifest = lake.manifest()
    snapshot = ShardSnapshot(str(manifest.region_id)).with_spec_id(manifest.region_spec_id)
    snapshot = snapshot.with_current_generation(manifest.current_generation)
    for flushed in manifest.flushed_generations:
        snapshot = snapshot.with_sstable(flushed.generation, flushed.path)
    base = lance_base(lake)
    scanned = LsmScanner.from_snapshots(base, [snapshot]).filter("id < 1000").to_table()
    assert sorted(scanned.column("id").to_pylist()) == [1, 2, 3]
    planner = LsmVectorSearchPlanner(base, [snapshot], "vector")
    nearest = planner.plan_search(pa.array(query), k=3, nprobes=2).to_table()
    assert nearest.column("id").to_pylist() == [1, 2, 3]


def lance_base(lake: Lake) -> object:
    return lake.process().table._base.dataset()


# --- 9: flushed generation without its index -------------------------------------------------


def test_failure_09_flushed_generation_without_its_index(tmp_path: Path) -> None:
    lake, process = searched_lake(tmp_path)
    writer = process.table.writer(max_memtable_rows=64)
    for first in range(0, 192, 32):
        rows = [point(n, float(n), f"stone{n} by the river") for n in range(first, first + 32)]
        writer.upsert(rows)
    writer.close()
    assert lake.generations() == [1, 2, 3, 4]

    # The indexes alone are asked: a row that is in none of them is not found.
    for number in (2, 3, 4):
        generation = lake.generation(number)
        expected = list(range((number - 2) * 64, (number - 1) * 64))
        near = {"column": "vector", "q": np.zeros(4, np.float32), "k": 200, "nprobes": 2}
        found = generation.scanner(columns=["id"], nearest=near, fast_search=True).to_table()
        assert sorted(found.column("id").to_pylist()) == expected
        for identity in (expected[0], expected[-1]):
            texts = generation.scanner(
                columns=["id"], full_text_query=f"stone{identity}", fast_search=True
            ).to_table()
            assert texts.column("id").to_pylist() == [identity]
        indexes = {index.name for index in generation.describe_indices()}
        assert indexes == {"vector_idx", "body_idx", "id_idx"}
        for name in indexes:
            statistics = generation.stats.index_stats(name)
            assert statistics["num_unindexed_rows"] == 0
            assert statistics["num_indexed_rows"] == 64


# --- 10: group-commit leader deadlock --------------------------------------------------------


def crowd(
    process: Process,
    writer: Writer,
    calls: Sequence[Sequence[int]],
    fault: Fault = Fault.NOTHING,
    *,
    interrupt: bool = False,
) -> tuple[list[int], list[BaseException]]:
    """A thread for each call. One leads and is held in its put until the others wait behind it.

    The fault befalls the leader's put and every retry of it. Returns the rows acknowledged, and
    what the other threads were told.
    """
    (region,) = writer.region_writers()
    acknowledged: list[int] = []
    errors: list[BaseException] = []
    leading, crowded = threading.Event(), threading.Event()

    def hold(op: str, key: str) -> None:
        leading.set()
        crowded.wait(WAIT_SECONDS)
        if interrupt:
            raise KeyboardInterrupt

    def write(ids: Sequence[int]) -> None:
        try:
            writer.upsert([row(identity) for identity in ids])
            acknowledged.extend(ids)
        except (PenstockError, KeyboardInterrupt) as error:
            errors.append(error)

    times = 1 if fault is Fault.NOTHING else None
    process.store.inject(fault, op="put_if_absent", key=WAL, times=times, before=hold)
    threads = [threading.Thread(target=write, args=(ids,), daemon=True) for ids in calls]
    threads[0].start()
    assert leading.wait(WAIT_SECONDS)
    for thread in threads[1:]:
        thread.start()
    for _ in range(int(WAIT_SECONDS * 100)):
        if len(writer._small) + len(region._queue) >= len(calls) - 1:
            break
        time.sleep(0.01)
    crowded.set()
    deadline = time.monotonic() + WAIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread waits for itself"
    process.store.clear()
    return sorted(acknowledged), errors


@pytest.mark.parametrize("rows_per_call", [1, 100])
def test_failure_10_group_commit_leader_deadlock(tmp_path: Path, rows_per_call: int) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    starts = range(0, 24 * rows_per_call, rows_per_call)
    calls = [range(first, first + rows_per_call) for first in starts]
    rows = [identity for ids in calls for identity in ids]
    expected: list[int] = []

    # A crowd shares a few entries; where each entry fills the MemTable, a freeze comes between.
    for max_memtable_rows in (100_000, 1):
        writer = process.table.writer(max_memtable_rows=max_memtable_rows)
        writer.upsert([row(-1)])
        assert crowd(process, writer, calls) == (rows, [])
        assert writer.stats()["wal_entries"] <= 8
        writer.flush()
        expected += [-1, *rows]
        assert process.ids() == ids_of(lake.reader()) == sorted(expected)

    # A leader that fails or is interrupted takes everyone who waits with it: nobody hangs, and
    # nobody is acknowledged.
    for fault, interrupt in ((Fault.FAIL_BEFORE, False), (Fault.NOTHING, True)):
        writer = process.table.writer()
        writer.upsert([row(-1)])
        expected.append(-1)
        acknowledged, errors = crowd(process, writer, calls, fault, interrupt=interrupt)
        assert acknowledged == []
        assert len(errors) == len(calls)
        interrupted = [error for error in errors if isinstance(error, KeyboardInterrupt)]
        assert len(interrupted) == interrupt
        assert {type(error) for error in errors} - {KeyboardInterrupt} == {WriterPoisoned}
        assert process.ids() == ids_of(lake.reader()) == sorted(expected)
