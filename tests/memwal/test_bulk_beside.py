"""Bulk loads and overwrites next to writers, merges, compaction, and plain Lance."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake, Process, make_lake, row
from tests.memwal.loading import (
    NEXT_VERSION,
    Found,
    begun,
    check_health,
    in_pieces,
    live,
    plain,
)

import penstock
from penstock import InvalidInput, PenstockError, Table
from penstock.errors import CommitConflict
from penstock.memwal.compact import compact_one, plan_compaction
from penstock.memwal.merge import commit_merge, fold, plan_merges

# --- next to others ----------------------------------------------------------------------------


def once_before_publishing(process: Process, others: Callable[[], object]) -> None:
    process.store.hook(op="put_if_absent", key=NEXT_VERSION, nth=1, before=lambda *_: others())


def _load(lake: Lake) -> None:
    lake.process().table.bulk_load([row(1, "other"), row(50, "other")])


def _overwrite(lake: Lake) -> None:
    lake.process().table.overwrite([row(1, "other"), row(51, "other")])


def _compact(lake: Lake) -> None:
    lake.process().table.compact()


def _merge(lake: Lake) -> None:
    table = lake.process().table
    table.upsert([row(1, "other"), row(50, "other")])
    table.flush()
    table.merge()


def _lance(lake: Lake) -> None:
    dataset = lance.dataset(lake.store.uri)
    rows = pa.table({"id": [1, 50], "value": ["other"] * 2}, schema=dataset.schema)
    dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)


OTHERS: dict[Callable[[Lake], None], Found] = {
    _load: {50: "other"},
    _overwrite: {51: "other"},
    _compact: {},
    _merge: {50: "other"},
    _lance: {50: "other"},
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["load", "overwrite"])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_a_load_comes_after_whoever_commits_first(
    tmp_path: Path, other: Callable[[Lake], None], overwrite: bool
) -> None:
    lake = make_lake(tmp_path)
    begun(lake)
    lake.process().table.bulk_load([row(20, "base")])
    process = lake.process()
    once_before_publishing(process, lambda: other(lake))
    new = {1: "new", 2: "new", 9: "newer"}
    parts = [[row(1, "new"), row(9, "new")], [row(2, "new"), row(9, "newer")]]
    in_pieces(process.table, parts, overwrite=overwrite)
    expected = {} if other is _overwrite else dict.fromkeys([*range(6), 20], "base")
    expected = new if overwrite else expected | OTHERS[other] | new
    table = lake.reader()
    assert live(table) == live(process.table) == expected
    table.flush(recover=True)
    table.merge()
    assert plain(table) == expected


def test_lance_inserts_a_key_that_was_loaded_since_it_looked(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    begun(lake)
    looked = lance.dataset(lake.store.uri)
    lake.process().table.bulk_load([row(50, "loaded")])
    rows = pa.table({"id": [50], "value": ["lance"]}, schema=looked.schema)
    builder = looked.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.execute(rows)
    assert plain(lake.reader())[50] == "lance"


def test_work_that_was_planned_before_an_overwrite_comes_to_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    begun(lake)
    writer = lake.process().table
    writer.bulk_load([row(n, "base") for n in range(10, 14)])
    writer.upsert([row(1, "flushed"), row(30, "flushed")])
    writer.flush()
    other = lake.reader()
    (plan,), _ = plan_merges(other._base)
    folded = fold(other._base, plan)
    pieces = plan_compaction(other._base)
    assert pieces
    writer.overwrite([row(3, "new")])
    assert commit_merge(other._base, folded).generations == 0
    for piece in pieces:
        compact_one(other._base, piece)
    assert other.merge().generations == 0
    assert live(lake.reader()) == plain(other) == {3: "new"}
    other.gc(retain_seconds=0, orphan_seconds=0)
    assert live(lake.reader()) == plain(other) == {3: "new"}


def test_rows_that_come_during_an_overwrite_stay_and_those_of_before_go(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    begun(lake)
    writer = lake.process().table
    writer.upsert([row(40, "before"), row(3, "before")])
    process = lake.process()

    def others() -> None:
        writer.upsert([row(41, "after"), row(3, "after")])

    once_before_publishing(process, others)
    in_pieces(process.table, [[row(3, "new"), row(4, "new")]], overwrite=True)
    expected = {3: "after", 4: "new", 41: "after"}
    assert live(writer) == live(lake.reader()) == expected
    writer.flush()
    writer.merge()
    assert plain(writer) == expected


def test_a_region_that_is_taken_back_before_it_is_flushed_is_claimed_again(tmp_path: Path) -> None:
    """Else rows that were acknowledged before the overwrite would come back after it."""
    lake = make_lake(tmp_path)
    begun(lake)
    writer = lake.process().table
    writer.upsert([row(40, "before")])
    process = lake.process()
    taken = 0

    def take_back(*_: str) -> None:
        nonlocal taken
        taken += 1
        if taken <= 2:
            writer.upsert([row(41, f"during {taken}")])

    # When the claim is complete, and nothing is flushed yet.
    process.store.hook(op="put_if_absent", key="*/wal/*", after=take_back)
    in_pieces(process.table, [[row(4, "new")]], overwrite=True)
    assert taken > 1
    state = live(lake.reader())
    assert 40 not in state
    assert state.keys() <= {4, 41}
    assert live(writer) == state


def test_many_at_once_leave_each_key_once(tmp_path: Path) -> None:
    """Loads and overwrites of several threads beside writers, merges and compaction."""
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    begun(lake)
    errors: list[BaseException] = []
    refused: list[PenstockError] = []

    def run(work: Callable[[Table, int], object]) -> None:
        table = lake.process().table
        for step in range(6):
            try:
                work(table, step)
            except InvalidInput as error:  # rows in front of a load
                refused.append(error)
            except CommitConflict as error:
                refused.append(error)
            except BaseException as error:
                errors.append(error)

    def write(table: Table, step: int) -> None:
        table.upsert([row(n, f"w{step}") for n in range(10)])
        table.flush()

    works: list[Callable[[Table, int], object]] = [
        write,
        lambda table, step: table.bulk_load([row(n, f"b{step}") for n in range(5, 15)]),
        lambda table, step: table.overwrite([row(n, f"o{step}") for n in range(3, 8)]),
        lambda table, step: (table.merge(), table.compact()),
    ]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    last = lake.process().table
    state = live(last)
    last.flush(recover=True)
    last.merge()
    assert plain(last) == live(last) == state
    last.overwrite([row(1, "end")])
    assert plain(last) == live(lake.reader()) == {1: "end"}
    check_health(last)
