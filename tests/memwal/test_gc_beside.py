"""Clean-up under faults, next to everything else, on S3 and in pieces."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import pytest
from tests.failures.lake import SCHEMA, make_lake, row
from tests.memwal.cleaning import (
    ALONE,
    busy,
    clean,
    clean_all,
    files_of,
    flushed,
    manifest_file,
    reachable,
)
from tests.s3_server import S3Server

import penstock
from penstock import PenstockError, Table
from penstock.memwal.base_table import BaseTable
from penstock.memwal.gc import collect, commit_gc, run_piece
from penstock.memwal.gc_plan import plan_gc
from penstock.memwal.snapshots import build_snapshot
from penstock.memwal.table_versions import list_versions
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.seams import Seams

# --- faults and company ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.BIT_FLIP, Fault.STALE_LIST]
)
def test_a_fault_at_any_call_leaves_the_table_right(tmp_path: Path, fault: Fault) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    model: dict[int, str] = {}
    tagged: dict[int, int] = {}
    nth = failed = 0
    while True:
        nth += 1
        collector = lake.process()
        # Some fail once, some more often than they are repeated. What is listed is older than
        # the next two generations, a merge and a snapshot.
        rule = collector.store.inject(fault, nth=nth, times=(1, 2, 20)[nth % 3])
        for step in range(2):
            model |= dict.fromkeys((nth, 1000 + nth % 3), f"{nth} {step}")
            flushed(table, nth, 1000 + nth % 3, value=f"{nth} {step}")
            if step == 0:
                pinned = table.snapshot()
                table.merge()
        try:
            collect(collector.table._base, retain_seconds=0, orphan_seconds=0)
        except PenstockError:
            failed += 1
        rows = lake.reader().to_arrow().to_pylist()
        assert {one["id"]: one["value"] for one in rows} == model
        lance.dataset(lake.store.uri).to_table()
        for version, count in tagged.items():
            assert lake.reader().count(version=version) == count
        if not rule.fired:
            break
        if nth % 5 == 1 and pinned in list_versions(lake.store):
            lance.dataset(lake.store.uri).tags.create(f"t{nth}", pinned)
            tagged[pinned] = lake.reader().count(version=pinned)
        nth += nth // 4
    assert nth > (3 if fault is Fault.STALE_LIST else 20)
    assert failed > 0 or fault in (Fault.STALE_LIST, Fault.BIT_FLIP)
    clean_all(lake)
    clean_all(lake)
    assert files_of(lake.store) == reachable(lake.store)


class ChosenBit(SystemEntropy):
    """Every bit flip hits the same bit."""

    bit = 0

    def uniform(self, low: float, high: float) -> float:
        return min(float(self.bit), high - 1)


def test_a_wrong_bit_never_dooms_a_file(tmp_path: Path) -> None:
    """Manifests have no checksum, and a name read wrong would be a file that nobody needs."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    for value in ("one", "two"):
        flushed(table, 1, 2, value=value)
        table.merge()
    flushed(table, 3)
    table.upsert([row(4)])
    table.close()
    right = clean(lake, retain_seconds=0, orphan_seconds=0, dry_run=True)
    newest = f"_versions/{2**64 - 1 - list_versions(lake.store)[-1]}.manifest"
    latest = manifest_file(lake, lake.manifest().version)
    outcomes = set()
    for key in (newest, latest):
        bits = 8 * len(lake.store.get(key).data)
        for bit in range(3, bits, bits // 100 + 1):
            entropy = ChosenBit()
            entropy.bit = bit
            store = FaultStore(lake.store, SimulatedClock(), entropy)
            store.inject(Fault.BIT_FLIP, key=key, nth=1 + bit % 2)
            seams = Seams(clock=SimulatedClock(), entropy=SystemEntropy())
            try:
                report = collect(
                    BaseTable(store, None, seams), retain_seconds=0, orphan_seconds=0, dry_run=True
                )
                outcomes.add(report.removed == right.removed)
            except PenstockError:
                continue
    assert outcomes == {True}


def test_next_to_a_writer_a_merger_and_readers(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table(
        "t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2)
    )
    over = threading.Event()
    failures: list[BaseException] = []
    acknowledged = [0]

    def guarded(work: Callable[[Table], None]) -> threading.Thread:
        def run() -> None:
            mine = penstock.connect(tmp_path).open_table("t")
            try:
                while not over.is_set():
                    work(mine)
            except BaseException as error:
                failures.append(error)
                over.set()

        return threading.Thread(target=run)

    def write(mine: Table) -> None:
        number = acknowledged[0] + 1
        table.upsert([row(number), row(number % 7 - 7, f"{number}")])
        acknowledged[0] = number
        if number % 3 == 0:
            table.flush()

    def merge(mine: Table) -> None:
        mine.merge()
        mine.snapshot()

    def read(mine: Table) -> None:
        least = acknowledged[0]
        found = mine.count("id > 0")
        assert least <= found <= acknowledged[0] + 1
        assert mine.count("id > 0", consistency="eventual") <= acknowledged[0] + 1

    def sweep(mine: Table) -> None:
        mine.gc(retain_seconds=2)
        time.sleep(0.02)

    threads = [guarded(work) for work in (write, merge, read, read, sweep)]
    for thread in threads:
        thread.start()
    over.wait(4)
    over.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert acknowledged[0] > 3
    table.flush()
    table.close()
    table.merge()
    for _ in range(2):
        table.gc(retain_seconds=0, orphan_seconds=0)
    assert files_of(table._base.store) == reachable(table._base.store)
    assert table.count("id > 0") == acknowledged[0]
    assert lance.dataset(table.uri).count_rows("id > 0") == acknowledged[0]


def test_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    rng, model = random.Random(4), dict[int, str]()
    for step in range(4):
        chosen = dict.fromkeys(rng.sample(range(20), 8), f"step {step}")
        model |= chosen
        flushed(table, *chosen, value=f"step {step}")
        if step == 1:
            pinned = table.snapshot()
            lance.dataset(table.uri, storage_options=s3.storage_options).tags.create("a", pinned)
            then = dict(model)
        table.merge()
    table.close()
    store = table._base.store
    assert table.gc().files == 0
    report = table.gc(retain_seconds=0, orphan_seconds=0)
    assert report.files > 0
    assert files_of(store) == reachable(store, s3.storage_options)

    def rows(**which: Any) -> dict[int, str]:
        found = db.open_table("t").to_arrow(**which).to_pylist()
        return {one["id"]: one["value"] for one in found}

    assert rows() == model
    assert rows(version=pinned) == then


# --- snapshots of many regions -----------------------------------------------------------------


def test_the_file_of_a_snapshot_outlives_merges_and_lances_clean_up(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 3))
    table = lake.process().table
    flushed(table, *range(9))
    build_snapshot(table._base, inline_regions=2)
    table.merge()
    flushed(table, 100)
    time.sleep(0.01)
    dataset = lance.dataset(lake.store.uri)
    dataset.cleanup_old_versions(older_than=_nothing(), delete_unverified=True)
    assert len(list_versions(lake.store)) == 1
    reader = lake.reader()
    assert reader.count(consistency="eventual") == 9
    assert reader.count() == 10
    # Our own clean-up keeps it, too, and lets it go with its version.
    clean_all(lake)
    assert lake.reader().count(consistency="eventual") == 9
    table.snapshot()
    clean_all(lake)
    assert not any(key.startswith("_indices") for key in files_of(lake.store))
    assert lake.reader().count(consistency="eventual") == 10


def _nothing() -> Any:
    from datetime import timedelta

    return timedelta(0)


def test_pieces_are_small_values_that_run_anywhere(tmp_path: Path) -> None:
    import pickle

    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    busy(lake)
    base = lake.process().table._base
    plan, done = commit_gc(base, pickle.loads(pickle.dumps(plan_gc(base, ALONE))))
    assert [line.what for line in done] == ["versions"]
    assert {piece.region_id for piece in plan.pieces} == {
        None,
        *(manifest.region_id for manifest in lake.manifests()),
    }
    for piece in _shuffled(plan.pieces):
        elsewhere = lake.process().table._base
        run_piece(elsewhere, pickle.loads(pickle.dumps(piece)))
        run_piece(elsewhere, piece)  # twice does no harm
    assert files_of(lake.store) == reachable(lake.store)


def _shuffled(pieces: Any) -> Iterator[Any]:
    yield from random.Random(1).sample(pieces, len(pieces))
