"""Readers and jobs whose ground is taken away by others, step by step.

Each is what a crowd on one table (`tests/crash/crowd.py`) ran into: versions and generations are
merged, replaced and cleaned up while somebody still reads them, and commits lose race after race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from tests.crash import crowd_rows
from tests.failures.lake import Lake, Process, make_lake, row

import penstock
from penstock import Table
from penstock.errors import Corruption
from penstock.memwal import merge as merging
from penstock.memwal import names
from penstock.memwal.build_indexes import build_segment, commit_index_build, plan_index_builds
from penstock.memwal.compact import commit_compaction, compact_piece, plan_compaction
from penstock.memwal.merge import MergePlan, fold, plan_merges

Found = dict[int, str]


def live(table: Table) -> Found:
    return {one["id"]: one["value"] for one in table.to_arrow().to_pylist()}


def plain(lake: Lake) -> Found:
    rows = lance.dataset(lake.store.uri).to_table().to_pylist()
    assert len({one["id"] for one in rows}) == len(rows)
    return {one["id"]: one["value"] for one in rows}


def write(table: Table, value: str, *ids: int) -> None:
    table.upsert([row(one, value) for one in ids])
    table.flush()


def replace_everything(lake: Lake, value: str) -> None:
    """Others merge, compact, and clean up: no file is left of what there was."""
    other = lake.process().table
    write(other, value, 0, 1, 2)
    other.merge()
    other.compact()
    other.gc(retain_seconds=0, orphan_seconds=0)
    other.close()


def once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, event: Callable[[], None]) -> None:
    """Let something happen right before a function is called the next time."""
    work = getattr(where, name)

    def after_that(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(where, name, work)
        event()
        return work(*given, **named)

    monkeypatch.setattr(where, name, after_that)


READS: dict[str, Callable[[Table], Found]] = {
    "scan": live,
    "filter": lambda t: {
        one["id"]: one["value"] for one in t.scan(filter="value <> 'none'").read_all().to_pylist()
    },
    "lookup": lambda t: {one["id"]: one["value"] for one in t.get_many([0, 1, 2, 3]).to_pylist()},
}


@pytest.mark.parametrize("read", READS)
def test_a_version_is_replaced_and_cleaned_up_under_a_strong_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    lake = make_lake(tmp_path)
    write(lake.process().table, "first", 0, 1, 2, 3)
    lake.process().table.merge()
    reader = lake.reader()
    once(monkeypatch, lance.LanceDataset, "scanner", lambda: replace_everything(lake, "second"))
    assert READS[read](reader) == {0: "second", 1: "second", 2: "second", 3: "first"}


def test_a_merge_lands_after_losing_many_races(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer, merger, other = lake.process().table, lake.process(), lake.process().table
    write(writer, "first", 1, 2)
    lost = 20

    def win(*_: str) -> None:
        other.create_index("id", "btree", name=f"index_{win_count.fired}")

    win_count = merger.store.hook(op="put_if_absent", key="_versions/*", before=win, times=lost)
    assert merger.table.merge().generations == 1
    assert win_count.fired == lost
    assert plain(lake) == live(writer) == {1: "first", 2: "first"}


def test_what_a_merge_looks_up_in_the_base_is_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = make_lake(tmp_path)
    writer, merger = lake.process().table, lake.process().table
    write(writer, "first", 0, 1, 2, 3)
    merger.merge()
    write(writer, "second", 3)
    (plan,), _ = plan_merges(merger._base)
    folded = replace(fold(merger._base, plan), superseded={})

    def others() -> None:
        # The base is written anew, without what is to be merged.
        dataset = lance.dataset(lake.store.uri)
        dataset.update({"value": "'edited'"}, where="id < 3")
        lance.dataset(lake.store.uri).optimize.compact_files()
        lake.process().table.gc(retain_seconds=0)

    once(monkeypatch, merging, "look_up", others)
    assert merging.commit_merge(merger._base, folded).generations == 1
    assert plain(lake) == live(writer) == {0: "edited", 1: "edited", 2: "edited", 3: "second"}


def behind(lake: Lake, writer: Table) -> tuple[Process, MergePlan]:
    """A merger that has planned to merge what others have long merged and removed."""
    write(writer, "first", 0, 1)
    slow = lake.process()
    (plan,), _ = plan_merges(slow.table._base)
    lake.process().table.merge()
    write(writer, "second", 1, 2)
    lake.process().table.merge()
    lake.process().table.gc(retain_seconds=0, orphan_seconds=0)
    assert lake.generations() == []
    return slow, plan


def test_generations_are_merged_and_cleaned_up_under_a_merger(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer = lake.process().table
    slow, plan = behind(lake, writer)
    assert merging.merge_piece(slow.table._base, plan).generations == 0
    assert plain(lake) == live(writer) == {0: "first", 1: "second", 2: "second"}


def test_generations_are_merged_and_cleaned_up_while_a_merge_is_planned(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer = lake.process().table
    write(writer, "first", 0, 1)
    slow = lake.process()

    def others(*_: str) -> None:
        lake.process().table.merge()
        write(writer, "second", 1, 2)
        lake.process().table.gc(retain_seconds=0)
        assert lake.generations() == [2]

    # The base was looked at, and now the manifests are.
    slow.store.hook(op="get", key="*/manifest/*", nth=1, before=others)
    (plan,), _ = plan_merges(slow.table._base)
    assert [found.generation for _, found in plan.generations] == [2]
    assert slow.table.merge().generations == 1
    assert plain(lake) == live(writer) == {0: "first", 1: "second", 2: "second"}


def test_a_generation_that_is_lost_before_it_is_merged_is_an_error(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer = lake.process().table
    write(writer, "first", 0, 1)
    (generation,) = lake.manifest().flushed_generations
    home = names.region_dir(lake.manifest().region_id)
    lake.store.delete_prefix(f"{home}/{generation.path}")
    with pytest.raises(Corruption, match=r"not merged yet.*Restore"):
        lake.process().table.merge()


@pytest.mark.parametrize("stable", [True, False], ids=["stable row ids", "addresses"])
def test_fragments_are_rewritten_under_an_index_builder(tmp_path: Path, stable: bool) -> None:
    """Entries of fragments that are gone must not take the places of rows among the nearest."""
    table = penstock.connect(tmp_path).create_table(
        "t", crowd_rows.SCHEMA, primary_key=["part", "id"], stable_row_ids=stable
    )
    expected = np.zeros(crowd_rows.KEYS, dtype=np.int64)

    def merged(first: int, last: int, call: int) -> None:
        table.upsert(crowd_rows.rows(np.arange(first, last), call))
        table.flush()
        table.merge()
        expected[first:last] = call

    merged(0, 100, 1)
    table.create_index("vector", "ivf_flat", num_partitions=2)
    for first in range(100, 180, 20):
        merged(first, first + 20, 1)
    built = [build_segment(table._base, plan) for plan in plan_index_builds(table._base)]
    # One of the new fragments is replaced as a whole, one is rewritten.
    merged(150, 180, 2)
    assert table.compact(target_rows=20).pieces == 1
    (done,) = commit_index_build(table._base, built).builds
    assert done.fragments == 2
    for first in (0, 105):
        merged(first, first + 5, 3)  # leaves deleted rows in fragments that are covered
    table.build_indexes()
    everything = table.search(crowd_rows.QUERY).nprobes(8).limit(crowd_rows.EVERYTHING)
    assert (crowd_rows.seen_in(everything.to_arrow()) == expected).all()
    near = lance.dataset(table.uri).to_table(
        nearest={"column": "vector", "q": crowd_rows.QUERY, "k": 180, "nprobes": 8}
    )
    assert (crowd_rows.seen_in(near) == expected).all()


def test_what_lance_was_writing_when_it_was_killed_is_cleaned_up(tmp_path: Path) -> None:
    """On a local disk Lance writes `name#1` and renames it when it is whole."""
    lake = make_lake(tmp_path)
    writer = lake.process().table
    write(writer, "first", 0, 1)
    writer.merge()
    left = [
        "_versions/d10640585235847896427.manifest#1",
        "_transactions/1-a.txn#2",
        "data/b.lance#1",
    ]
    for key in left:
        (Path(lake.store.uri) / key).write_bytes(b"half")
    report = writer.gc(retain_seconds=0)
    assert report.unknown == ()
    assert all((Path(lake.store.uri) / key).exists() for key in left)
    writer.gc(retain_seconds=0, orphan_seconds=0)
    assert not any((Path(lake.store.uri) / key).exists() for key in left)
    assert live(writer) == {0: "first", 1: "first"}


# --- what random walks ran into (`tests/model`) ------------------------------------------------


def test_a_piece_that_is_committed_twice_keeps_its_files(tmp_path: Path) -> None:
    """As after a commit whose answer was lost: it finds its own work done, and removes nothing."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    write(table, "first", 0, 1, 2)
    (plan,), _ = plan_merges(table._base)
    folded = fold(table._base, plan)
    assert merging.commit_merge(table._base, folded).rows == 3
    assert merging.commit_merge(table._base, folded).rows == 0
    assert plain(lake) == live(table) == dict.fromkeys((0, 1, 2), "first")
    write(table, "second", 3, 4)
    table.merge()
    copied = [compact_piece(table._base, piece) for piece in plan_compaction(table._base)]
    assert commit_compaction(table._base, copied).pieces == 1
    assert commit_compaction(table._base, copied).pieces == 0
    expected = dict.fromkeys((0, 1, 2), "first") | dict.fromkeys((3, 4), "second")
    assert plain(lake) == live(lake.reader()) == expected


def test_a_writer_of_old_columns_takes_a_region_back_and_drops_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    one, other = lake.process().table, lake.process().table
    other.upsert([row(1)])
    one.add_columns({"more": pa.int64()})
    one.upsert([{"id": 2, "value": "two", "more": 22}])
    other.upsert([row(3)])  # claims the region, and replays what was written in new columns
    other.flush()
    assert lake.reader().get(2) == {"id": 2, "value": "two", "more": 22}
    assert lake.reader().get(3) == {**row(3), "more": None}


def test_compaction_after_rows_that_lance_inserted(tmp_path: Path) -> None:
    """Lance's insert-only `merge_insert` enters its fragments in the MemWAL index."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    write(table, "first", 0, 1, 2)
    table.merge()
    base = lance.dataset(lake.store.uri)
    rows = pa.Table.from_pylist([row(10, "lance"), row(11, "lance")], schema=base.schema)
    base.merge_insert("id").when_not_matched_insert_all().execute(rows)
    assert table.compact().pieces == 1
    expected = dict.fromkeys((0, 1, 2), "first") | dict.fromkeys((10, 11), "lance")
    assert plain(lake) == live(table) == expected
