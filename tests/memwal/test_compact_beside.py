"""Compaction next to others, and crashes in the midst of it."""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.memwal.compacting import (
    base,
    create_indexes,
    either_kind,
    fragments,
    make,
    merged,
    progress,
)
from tests.memwal.versioned_rows import (
    QUERY,
    SCHEMA,
    Rows,
    assert_right,
    at,
    found_rows,
    rows,
    text,
    vector,
)

import penstock
from penstock.memwal.compact import commit_compaction, compact_piece, plan_compaction
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.memwal.table_versions import list_versions
from penstock.storage.faults import Fault
from penstock.table import Table

# --- next to others ----------------------------------------------------------------------------

Edit = Callable[[Table, Rows], None]


def _merge(table: Table, expected: Rows) -> None:
    merged(table, [0, 1, 25, 99], 50)
    expected.update(at([0, 1, 25, 99], 50))


def _merge_away(table: Table, expected: Rows) -> None:
    merged(table, range(10), 50)  # nothing is left of the first fragment
    expected.update(at(range(10), 50))


def _delete(table: Table, expected: Rows) -> None:
    base(table).delete("id in (3, 4, 21)")
    for key in (3, 4, 21):
        del expected[key]


def _delete_all(table: Table, expected: Rows) -> None:
    base(table).delete("true")
    expected.clear()


def _update(table: Table, expected: Rows) -> None:
    base(table).update({"value": f"'{text(5, 51)}'", "vector": f"{vector(5, 51)}"}, where="id = 5")
    expected.update(at([5], 51))


def _upsert(table: Table, expected: Rows) -> None:
    changed = pa.Table.from_pylist(rows([5, 22, 98], 52), base(table).schema)
    upsert = base(table).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    upsert.execute(changed)
    expected.update(at([5, 22, 98], 52))


def _append(table: Table, expected: Rows) -> None:
    base(table).insert(pa.Table.from_pylist(rows([97], 53), base(table).schema))
    expected.update(at([97], 53))


def _snapshot(table: Table, expected: Rows) -> None:
    table.upsert(rows([96], 54))
    table.flush()
    table.snapshot()
    expected.update(at([96], 54))


def _index(table: Table, expected: Rows) -> None:
    base(table).optimize.optimize_indices()


def _compact(table: Table, expected: Rows) -> None:
    base(table).optimize.compact_files()


def _edit_columns(table: Table, expected: Rows) -> None:
    """With an index on the key Lance writes a column anew, and the rows stay where they are."""
    for column in ("value", "vector"):
        changed = pa.Table.from_pylist(rows(expected, 55), base(table).schema)
        changed = changed.select(["id", column])
        base(table).merge_insert("id").when_matched_update_all().execute(changed)
    expected.update(at(expected, 55))


def _index_some(table: Table, expected: Rows) -> None:
    dataset = base(table)
    part = dataset.create_index_uncommitted("value", "BTREE", name="some", fragment_ids=[0, 1])
    dataset.commit_existing_index_segments("some", "value", [part])


def _restore(table: Table, expected: Rows) -> None:
    lance.dataset(table.uri, version=base(table).version - 1).restore()
    expected.update(at([28], 2))


def _add_column(table: Table, expected: Rows) -> None:
    table.add_columns({"extra": pa.int32()})


LANDS = [
    _merge,
    _merge_away,
    _delete,
    _update,
    _upsert,
    _append,
    _snapshot,
    _index,
    _add_column,
]
"""Edits over which a piece that was copied before lands all the same."""
OTHERS = [_delete_all, _compact, _edit_columns, _index_some, _restore]
CASES = [(edit, False) for edit in [*LANDS, *OTHERS]]
CASES += [(_merge, True), (_update, True), (_compact, True)]


def three_fragments(table: Table) -> Rows:
    for step in range(3):
        merged(table, range(10 * step, 10 * step + 10), step)
    return at(range(10), 0) | at(range(10, 20), 1) | at(range(20, 30), 2)


@pytest.mark.parametrize(
    ("edit", "early"), CASES, ids=[f"{edit.__name__}{' early' * early}" for edit, early in CASES]
)
def test_somebody_elses_edit_and_a_compaction_both_land(
    tmp_path: Path, edit: Edit, early: bool
) -> None:
    lake = make(tmp_path, True)
    table, compactor = lake.process().table, lake.reader()
    expected = three_fragments(table)
    create_indexes(table)
    base(table).delete("id = 28")
    del expected[28]
    (piece,) = plan_compaction(compactor._base)
    if early:
        edit(table, expected)
    done = pickle.loads(pickle.dumps(compact_piece(compactor._base, piece)))
    if not early:
        edit(table, expected)
    known, count = progress(table), len(fragments(table))
    report = commit_compaction(compactor._base, [done])
    assert (report.pieces, report.left) == ((1, 0) if edit in LANDS else (0, 1))
    if report.pieces:
        assert len(fragments(table)) < max(count, 2)
    else:
        # What did not land is in the way of nobody.
        kept = {path.name for path in (Path(table.uri) / "data").iterdir()}
        assert not kept & {file["path"] for file in _files(done.result)}
    assert progress(table) == known
    base(table).validate()
    compactor.compact(deletion_share=0.0)
    for handle in (table, lake.reader()):
        if edit is _delete_all:
            assert handle.count() == base(table).count_rows() == 0
        else:
            assert_right(handle, expected, QUERY)


def _files(result: str) -> list[dict[str, Any]]:
    return [file for part in json.loads(result)["new_fragments"] for file in part["files"]]


@pytest.mark.parametrize("edit", [_merge, _update, _append, _snapshot, _index, _compact])
def test_without_stable_row_ids_what_was_touched_is_planned_again(
    tmp_path: Path, edit: Edit
) -> None:
    lake = make(tmp_path, False)
    table, compactor = lake.process().table, lake.reader()
    expected = three_fragments(table)
    create_indexes(table)
    (piece,) = plan_compaction(compactor._base)
    done = compact_piece(compactor._base, piece)
    edit(table, expected)
    known = progress(table)
    touched = edit in (_merge, _update, _compact)
    report = commit_compaction(compactor._base, [done])
    assert (report.pieces, report.left) == ((0, 1) if touched else (1, 0))
    assert progress(table) == known
    assert compactor.compact(deletion_share=0.0).left == 0
    for handle in (table, lake.reader()):
        assert_right(handle, expected, QUERY)


@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_what_is_touched_again_and_again_is_left_for_the_next_time(
    tmp_path: Path, times: int | None
) -> None:
    lake = make(tmp_path, False)
    table = lake.process().table
    expected = three_fragments(table)
    create_indexes(table)
    compactor = lake.process()

    def interfere(op: str, key: str) -> None:
        base(table).delete(f"id = {min(expected)}")
        del expected[min(expected)]

    rule = compactor.store.hook(op="sync", key="data/*", times=times, before=interfere)
    report = compactor.table.compact()
    assert (report.pieces, report.left) == ((1, 0) if times else (0, 1))
    assert rule.fired == 1 if times else 1 < rule.fired < 8
    assert_right(table, expected, QUERY)


@either_kind
@pytest.mark.parametrize("edit", [_delete, _update, _upsert], ids=lambda edit: edit.__name__)
def test_a_compaction_that_lands_under_somebody_elses_edit(
    tmp_path: Path, edit: Edit, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lance has read the table when the compaction comes, and must notice."""
    lake = make(tmp_path, stable)
    table = lake.process().table
    expected = three_fragments(table)
    begun = base(table)
    assert lake.reader().compact().pieces == 1
    with monkeypatch.context() as patched:
        patched.setattr(lance, "dataset", lambda *_, **__: begun)
        try:
            edit(table, expected)
        except OSError as error:
            if "conflict" not in str(error).lower():
                raise
    if found_rows(base(table).to_table()) != expected:
        expected = at(range(10), 0) | at(range(10, 20), 1) | at(range(20, 30), 2)
        edit(table, expected)
    assert found_rows(table.to_arrow()) == found_rows(base(table).to_table()) == expected


@either_kind
def test_a_merge_under_which_a_compaction_lands(tmp_path: Path, stable: bool) -> None:
    lake = make(tmp_path, stable)
    table = lake.process().table
    expected = three_fragments(table)
    create_indexes(table)
    table.upsert(rows([5, 15, 40], 9))
    table.delete(keys=[6])
    table.flush()
    (plan,), _ = plan_merges(table._base)
    folded = fold(table._base, plan)
    files = set((Path(table.uri) / "data").iterdir())
    assert lake.reader().compact().pieces == 1
    assert commit_merge(table._base, folded).generations == 1
    assert {path.name for path in files} >= {f.path for p in folded.fragments for f in p.files}
    del expected[6]
    expected |= at([5, 15, 40], 9)
    assert found_rows(base(table).to_table()) == expected
    assert_right(table, expected, QUERY)


@either_kind
def test_mergers_do_not_starve_a_compaction(tmp_path: Path, stable: bool) -> None:
    """A merge that touches every fragment comes between each copy and its commit."""
    lake = make(tmp_path, stable)
    table = lake.process().table
    expected = three_fragments(table)
    if stable:
        create_indexes(table)
    compactor = lake.process()
    merges = 0

    def interfere(op: str, key: str) -> None:
        nonlocal merges
        merges += 1
        keys = [merges, 10 + merges, 20 + merges]
        merged(table, keys, 60 + merges)
        expected.update(at(keys, 60 + merges))

    compactor.store.hook(op="put_if_absent", key="_versions/*", times=3, before=interfere)
    report = compactor.table.compact()
    assert merges == 3
    assert (report.pieces, report.rows, report.left) == (1, 30, 0)
    assert fragments(table)[-1] == (30, 21)
    for handle in (table, lake.reader()):
        assert found_rows(base(table).to_table()) == found_rows(handle.to_arrow()) == expected
        if stable:
            assert_right(handle, expected, QUERY)


def test_failure_24_no_conflict_reaches_a_caller(tmp_path: Path) -> None:
    """Two mergers, a compactor and updates by Lance at once; few commits are tried twice."""
    db = penstock.connect(tmp_path)
    db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    writer = db.open_table("t")
    writer.upsert(rows(range(100), 0))
    writer.flush()
    writer.merge()
    create_indexes(writer)
    expected = at(range(100), 0)
    draw = random.Random(24)
    over = threading.Event()
    failures: list[BaseException] = []
    reports = []

    def work(job: Callable[[Table], Any]) -> None:
        try:
            table = db.open_table("t")
            while not over.is_set():
                job(table)
        except BaseException as error:
            failures.append(error)

    def compact(table: Table) -> None:
        reports.append(table.compact(target_rows=1000, deletion_share=0.0))

    def update(table: Table) -> None:
        """Keys from 90 on are Lance's: their text stays the same, so that nothing is to decide."""
        try:
            base(table).update({"value": "value"}, where=f"id = {draw.randrange(90, 100)}")
        except OSError as error:
            if "conflict" not in str(error).lower():  # Lance's own, which only we never show
                raise
        over.wait(0.02)

    jobs = [Table.merge, Table.merge, compact, update]
    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        for step in range(1, 11):
            keys = draw.sample(range(90), 12)
            writer.upsert(rows(keys, step))
            expected.update(at(keys, step))
            writer.flush()
            if step % 5 == 0:
                assert found_rows(writer.to_arrow()) == expected
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert sum(report.pieces for report in reports) > 0
    store = writer._base.store
    tried = sum(meta.key.endswith(".txn") for meta in store.list("_transactions"))
    assert tried <= 6 * len(list_versions(store))
    writer.merge()
    writer.compact(target_rows=1000)
    assert_right(writer, expected, QUERY)
    assert found_rows(base(writer).to_table()) == expected


# --- crashes -----------------------------------------------------------------------------------


def test_a_crash_between_copy_and_commit_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    lake = make(tmp_path, True)
    table = lake.process().table
    expected = three_fragments(table)
    version = base(table).version
    crashed = lake.reader()
    abandoned = [compact_piece(crashed._base, p) for p in plan_compaction(crashed._base)]
    assert base(table).version == version
    assert found_rows(table.to_arrow()) == found_rows(base(table).to_table()) == expected
    assert table.compact().pieces == 1
    # It comes back, and its fragments are not there any more.
    report = commit_compaction(crashed._base, abandoned)
    assert (report.pieces, report.left) == (0, 1)
    assert found_rows(table.to_arrow()) == found_rows(base(table).to_table()) == expected


@pytest.mark.parametrize("kind", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
def test_a_fault_at_any_call_leaves_the_compaction_done_or_not_begun(
    tmp_path: Path, kind: Fault
) -> None:
    lake = make(tmp_path, True)
    table = lake.process().table
    expected: Rows = {}
    nth = faults = 0
    while True:
        nth += 1
        for half in (range(5), range(5, 12)):
            merged(table, half, nth)
            expected |= at(half, nth)
        if nth == 1:
            table.create_index("id", "btree")
        compactor = lake.process()
        rule = compactor.store.inject(kind, nth=nth)
        before, known = fragments(table), progress(table)
        try:
            compactor.table.compact(deletion_share=0.0)
            assert fragments(table) == [(12, 12)]
        except penstock.PenstockError:
            faults += 1
            assert fragments(table) in (before, [(12, 12)])
        compactor.store.clear()
        assert progress(table) == known
        assert found_rows(table.to_arrow()) == found_rows(base(table).to_table()) == expected
        assert table.count("id < 5") == 5
        table.compact(deletion_share=0.0)
        if not rule.fired:
            break
    assert nth > 8
    assert faults > 0
