"""Failures 11 and 14 to 17: how merged reads of this design lost or invented rows elsewhere.

Each test lets something happen at every single call that a read makes to the store, or between
its calls, and holds the outcome against one rule: a read answers as of one moment that is not
before it began, or says why it cannot. Failures 12 and 13 are about vector search.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable
from tests.failures.lake import WAIT_SECONDS, Lake, Process, make_lake, row
from tests.memwal.searching import search_text

import penstock
from penstock.errors import Corruption
from penstock.memwal import names
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.regions import load_manifests
from penstock.memwal.table_versions import read_details
from penstock.storage.faults import FaultStore, Rule
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

KEYS = list(range(12))
Found = dict[int, str]


def scanned(table: Table) -> Found:
    return keyed(table.to_arrow())


def filtered(table: Table) -> Found:
    return keyed(table.scan(filter="value LIKE '%'").read_all())


def looked_up(table: Table) -> Found:
    return keyed(table.get_many(KEYS))


def got_one_by_one(table: Table) -> Found:
    found = {key: table.get(key) for key in KEYS}
    return {key: one["value"] for key, one in found.items() if one is not None}


READS: list[Callable[[Table], Found]] = [scanned, filtered, looked_up]
each_read = pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)


def keyed(rows: pa.Table) -> Found:
    found: Found = {}
    for one in rows.to_pylist():
        assert one["id"] not in found, f"{one['id']} came back twice"
        found[one["id"]] = one["value"]
    return found


# --- what a merge job and clean-up do ------------------------------------------------------------


def generation_uri(lake: Lake, region: RegionManifest, flushed: FlushedGeneration) -> str:
    return f"{lake.store.uri}/{names.region_dir(region.region_id)}/{flushed.path}"


def unmerged(lake: Lake, region: RegionManifest) -> list[FlushedGeneration]:
    found = read_details(lake.store, lance.dataset(lake.store.uri).version)
    assert found is not None
    merged = found[0].merged(region.region_id)
    return [flushed for flushed in region.flushed_generations if flushed.generation > merged]


def merge(lake: Lake) -> None:
    """Everything that is flushed goes into the base: deletes first, then rows and progress."""
    for region in load_manifests(lake.store, Seams()):
        for flushed in unmerged(lake, region):
            rows = lance.dataset(generation_uri(lake, region, flushed)).to_table()
            gone = rows.filter(rows.column("_tombstone")).select(["id"])
            live = rows.filter(pa.compute.invert(rows.column("_tombstone")))
            base = lance.dataset(lake.store.uri)
            if gone.num_rows:
                base.merge_insert("id").when_matched_delete().execute(gone)
            upserts = lance.dataset(lake.store.uri).merge_insert("id")
            upserts = upserts.when_matched_update_all().when_not_matched_insert_all()
            mark = CompactedSsTable(str(region.region_id), flushed.generation)
            upserts.mark_sstables_as_compacted([mark]).execute(
                live.drop_columns(["_tombstone"]).cast(base.schema)
            )


def remove_merged(lake: Lake) -> None:
    for region in load_manifests(lake.store, Seams()):
        kept = unmerged(lake, region)
        for flushed in region.flushed_generations:
            if flushed not in kept:
                shutil.rmtree(generation_uri(lake, region, flushed), ignore_errors=True)


def layered(tmp_path: Path) -> tuple[Lake, Process]:
    """Keys 0 to 2 in the base, 2 to 4 in one generation, 4 to 6 in another, 6 to 8 in the log."""
    lake = make_lake(tmp_path)
    process = lake.process()
    process.table.upsert([row(key, "base") for key in (0, 1, 2)])
    process.table.flush()
    merge(lake)
    process.table.upsert([row(key, "first") for key in (2, 3, 4)])
    process.table.flush()
    process.table.upsert([row(key, "second") for key in (4, 5, 6)])
    process.table.flush()
    process.table.upsert([row(key, "log") for key in (6, 7, 8)])
    return lake, process


LAYERED = dict.fromkeys((0, 1), "base") | dict.fromkeys((2, 3), "first")
LAYERED |= dict.fromkeys((4, 5), "second") | dict.fromkeys((6, 7, 8), "log")


def moments(
    make: Callable[[], Process], read: Callable[[Table], Found], happen: Callable[[], None]
) -> Iterator[Found]:
    """What a read finds if something happens just before its first call, its second, and so on."""
    nth = 0
    while True:
        nth += 1
        process = make()
        fired = hook_once(process.store, nth, happen)
        found = read(process.table)
        if not fired.fired:
            return
        yield found


def hook_once(store: FaultStore, nth: int, happen: Callable[[], None]) -> Rule:
    return store.hook(nth=nth, before=lambda op, key: happen())


# --- 11: two-snapshot read -----------------------------------------------------------------------


@each_read
def test_failure_11_two_snapshot_read(tmp_path: Path, read: Callable[[Table], Found]) -> None:
    # A key moves up from the base while a read is under way: it is written anew, flushed, merged.
    # Whoever reads the new place before and the old one after finds it in neither.
    lake, process = layered(tmp_path)
    version = [0]

    def move() -> None:
        version[0] += 1
        process.table.upsert([row(key, f"version {version[0]}") for key in LAYERED])
        if version[0] % 3:
            process.table.flush()
        if version[0] % 3 == 2:
            merge(lake)

    before = LAYERED
    for found in moments(lake.process, read, move):
        after = dict.fromkeys(LAYERED, f"version {version[0]}")
        # All of the batch or nothing of it, and no key twice or gone.
        assert found in (before, after)
        before = after
    assert version[0] >= 3


def test_failure_11_rows_stream_from_the_view_the_read_began_with(tmp_path: Path) -> None:
    lake, process = layered(tmp_path)
    for table in (process.table, lake.reader()):
        streams = [table.scan(), table.scan(filter="value LIKE '%'"), table.scan(["value", "id"])]
        process.table.delete(keys=[0, 4, 7])
        process.table.upsert([row(key, "new") for key in (1, 3, 5, 8, 9)])
        process.table.flush()
        merge(lake)
        for stream in streams:
            assert keyed(stream.read_all()) == LAYERED
        expected = {1: "new", 2: "first", 3: "new", 5: "new", 6: "log", 8: "new", 9: "new"}
        assert scanned(table) == expected
        process.table.delete(keys=[9])
        process.table.upsert([row(key, value) for key, value in LAYERED.items()])


# --- 14: text scores from different statistics ---------------------------------------------------


def texts(table: Table, text: str, k: int | None = None) -> dict[int, float]:
    found = table._reader.read(
        table._region_writers, lambda view: search_text(view, ["value"], text, k)
    )
    return dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))


def test_failure_14_text_scores_from_different_statistics(tmp_path: Path) -> None:
    # The word is rare in the base and in every row of a generation: scored apart, the same
    # document would be worth much in one and nothing in the other. Lengths differ between layers,
    # so that each one's own average would shift its rows too.
    lake = make_lake(tmp_path)
    process = lake.process()
    table = process.table
    table.upsert([row(n, f"long winded prose number{n} " * 4) for n in range(100, 160)])
    table.upsert([row(1, "cold rivers"), row(2, "cold")])
    table.flush()
    merge(lake)
    table.create_index("value", "fts")
    for first in (10, 20):
        table.upsert([row(first + n, "cold " * (n + 1)) for n in range(8)])
        table.upsert([row(first + 8, "cold rivers"), row(first + 9, "cold")])
        if first == 10:
            table.flush()
    table.upsert([row(30, "cold rivers"), row(31, "cold"), row(150, "cold rivers")])
    table.delete(keys=[*range(100, 110), 13])
    whole = lance.write_dataset(table.to_arrow(), str(tmp_path / "whole.lance"))
    whole.create_scalar_index("value", "INVERTED")
    for reader in (table, lake.reader()):
        for text in ("cold", "rivers", "cold rivers", "prose"):
            found = texts(reader, text)
            theirs = whole.to_table(["id"], full_text_query=text, limit=1000)
            expected = dict(
                zip(theirs["id"].to_pylist(), theirs["_score"].to_pylist(), strict=True)
            )
            assert found == pytest.approx(expected, rel=1e-4)
        found = texts(reader, "cold rivers")
        assert len({found[key] for key in (1, 18, 28, 30, 150)}) == 1
        assert len({found[key] for key in (2, 10, 19, 20, 29, 31)}) == 1
        assert set(texts(reader, "cold rivers", 5)) == {1, 18, 28, 30, 150}


# --- 15: tombstones ignored ----------------------------------------------------------------------

LAYERS = ["base", "generation", "frozen", "memory"]


def sink(lake: Lake, process: Process, layer: str) -> None:
    """Bring what was written down to a layer."""
    if layer in ("generation", "base"):
        process.table.flush()
    if layer == "base":
        merge(lake)
    if layer == "frozen":
        for writer in process.table._region_writers():
            writer.freeze()


@pytest.mark.parametrize("live_in", LAYERS)
@pytest.mark.parametrize("deleted_in", LAYERS)
def test_failure_15_tombstones_ignored(tmp_path: Path, live_in: str, deleted_in: str) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    process.table.upsert([row(1, "stays"), row(2, "goes"), row(3, "goes"), row(4, "changes")])
    sink(lake, process, live_in)
    process.table.delete(keys=[2, 3, 77])
    process.table.upsert([row(3, "is back"), row(4, "changed")])
    sink(lake, process, deleted_in)
    expected = {1: "stays", 3: "is back", 4: "changed"}
    for table in (process.table, lake.reader()):
        for read in (*READS, got_one_by_one):
            assert read(table) == expected
        assert table.count() == 3
        # A tombstone matches no filter, and what it hides stays hidden by it all the same.
        for gone in ("value = 'goes'", "value = 'changes'", "id = 2", "value IS NULL", "id > 4"):
            assert table.scan(filter=gone).read_all().num_rows == table.count(gone) == 0
        assert table.count("value = 'is back' OR id = 2") == 1
        assert [len(table.scan(["id"], limit=n).read_all()) for n in (1, 3, 9)] == [1, 3, 3]
        assert len(table.scan(filter="id < 3", offset=1).read_all()) == 0


@pytest.mark.parametrize("live_in", LAYERS)
@pytest.mark.parametrize("deleted_in", LAYERS)
def test_failure_15_tombstones_ignored_by_text_search(
    tmp_path: Path, live_in: str, deleted_in: str
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    process.table.create_index("value", "fts")
    process.table.upsert([row(1, "stays"), row(2, "goes"), row(3, "goes"), row(4, "goes on")])
    sink(lake, process, live_in)
    process.table.delete(keys=[2, 3, 77])
    process.table.upsert([row(3, "it stays"), row(4, "changed")])
    sink(lake, process, deleted_in)
    for table in (process.table, lake.reader()):
        assert texts(table, "goes") == texts(table, "goes", 1) == {}
        assert set(texts(table, "stays")) == {1, 3}
        assert set(texts(table, "changed goes stays", 3)) == {1, 3, 4}
        # One of three documents has the word: nothing that is gone counts any more.
        assert texts(table, "changed") == pytest.approx({4: np.log(1 + 2.5 / 1.5)}, rel=1e-4)


# --- 16: a strong read served from a cache -------------------------------------------------------


@each_read
def test_failure_16_a_strong_read_served_from_a_cache(
    tmp_path: Path, read: Callable[[Table], Found]
) -> None:
    # A handle that remembers everything is asked after every kind of change by somebody else.
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    writer, reader = lake.process().table, lake.reader()
    expected: Found = {}

    def write(values: Found) -> None:
        writer.upsert([row(key, value) for key, value in values.items()])
        expected.update(values)

    def edit_base() -> None:
        base = lance.dataset(lake.store.uri)
        base.update({"value": "'edited'"}, "id = 1")
        expected[1] = "edited"

    def delete() -> None:
        writer.delete(keys=[0])
        del expected[0]

    def third() -> None:
        lake.process().table.upsert([row(5, "by a third")])
        expected[5] = "by a third"

    changes: list[Callable[[], Any]] = [
        lambda: write({0: "a", 1: "a"}),
        lambda: write({1: "b", 2: "b", 3: "b", 4: "b"}),
        writer.flush,
        lambda: write({0: "c", 2: "c"}),
        delete,
        third,
        writer.flush,
        lambda: lake.process().table.flush(recover=True),
        lambda: merge(lake),
        edit_base,
        lambda: remove_merged(lake),
        lambda: writer.set_regions(penstock.bucket("id", 3)),
        lambda: write({6: "d", 0: "d"}),
    ]
    for change in changes:
        assert read(reader) == expected
        change()
        # Twice: the second answer comes from whatever the first one left in memory.
        assert [read(reader), read(reader)] == [expected, expected]


@each_read
def test_failure_16_a_read_does_not_share_the_answer_of_one_that_began_earlier(
    tmp_path: Path, read: Callable[[Table], Found]
) -> None:
    # One read of a handle is at its n-th call when a write is acknowledged and a second read of
    # the same handle begins. The second must see the write, whatever the first is about to keep.
    lake, process = layered(tmp_path)
    reader = lake.process()
    written = dict(LAYERED)
    nth = 0
    while True:
        nth += 1
        later: list[Found] = []
        threads: list[threading.Thread] = []

        def begin_another(
            op: str,
            key: str,
            nth: int = nth,
            later: list[Found] = later,
            threads: list[threading.Thread] = threads,
        ) -> None:
            process.table.upsert([row(nth % len(KEYS), f"during {nth}")])
            written[nth % len(KEYS)] = f"during {nth}"
            if nth % 4 == 0:
                process.table.flush()
            # The first may hold a lock that the second needs, so it is not waited for here.
            threads.append(threading.Thread(target=lambda: later.append(read(reader.table))))
            threads[0].start()

        rule = reader.store.hook(nth=nth, before=begin_another)
        first = read(reader.table)
        assert set(LAYERED) <= set(first)
        if not rule.fired:
            break
        threads[0].join(WAIT_SECONDS)
        assert later == [written]
    assert nth > 3


# --- 17: a generation deleted under a reader -----------------------------------------------------


@each_read
@pytest.mark.parametrize("warm", [False, True], ids=["new reader", "reader with memories"])
def test_failure_17_a_generation_merged_and_deleted_under_a_reader(
    tmp_path: Path, read: Callable[[Table], Found], warm: bool
) -> None:
    original, process = layered(tmp_path)
    process.table.close()
    nth = 0
    while True:
        nth += 1
        copied = shutil.copytree(original.store.uri, tmp_path / f"copy{nth}.lance")
        lake = Lake(open_store(copied))
        reader = lake.process()
        if warm:
            assert read(reader.table) == LAYERED

        def clean_up(lake: Lake = lake) -> None:
            merge(lake)
            remove_merged(lake)

        rule = hook_once(reader.store, nth, clean_up)
        assert read(reader.table) == LAYERED
        assert read(reader.table) == LAYERED
        if not rule.fired:
            break
    assert nth > 3


@each_read
@pytest.mark.parametrize("lost", [1, 2])
def test_failure_17_a_generation_lost_before_it_was_merged(
    tmp_path: Path, read: Callable[[Table], Found], lost: int
) -> None:
    lake, _ = layered(tmp_path)
    warm = lake.reader()
    assert read(warm) == LAYERED
    region = lake.manifest()
    shutil.rmtree(generation_uri(lake, region, region.flushed_generations[lost]))
    with pytest.raises(Corruption, match="not merged"):
        read(lake.reader())
    # A reader that had it in memory may still answer in full; a part of it is no answer.
    with suppress(Corruption):
        assert read(warm) == LAYERED
