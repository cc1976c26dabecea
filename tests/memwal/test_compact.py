"""Compaction: fewer and larger fragments, and every read gives what it gave before."""

from __future__ import annotations

import json
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake, make_lake
from tests.failures.lake import row as small_row
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
from tests.s3_server import S3Server

import penstock
from penstock.memwal.compact import commit_compaction, compact_piece, plan_compaction
from penstock.memwal.index_details import list_versions, read_details
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.storage.faults import Fault
from penstock.storage.open import open_store
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams
from penstock.table import Table

PATIENCE = 60
MODES = {
    "stable row ids": (True, False),
    "addresses": (False, False),
    "addresses, remap deferred": (False, True),
}
each_mode = pytest.mark.parametrize(("stable", "defer"), MODES.values(), ids=MODES)
either_kind = pytest.mark.parametrize("stable", [True, False], ids=["stable", "addresses"])


def make(path: Path, stable: bool, schema: pa.Schema = SCHEMA) -> Lake:
    penstock.connect(path).create_table("t", schema, primary_key="id", stable_row_ids=stable)
    return Lake(open_store(path).child("t.lance"))


def base(table: Table) -> lance.LanceDataset:
    return lance.dataset(table.uri)


def merged(table: Table, keys: Sequence[int], version: int) -> None:
    """One more fragment in the base."""
    table.upsert(rows(keys, version))
    table.flush()
    table.merge()


def create_indexes(table: Table) -> None:
    table.create_index("vector", "ivf_flat", num_partitions=2)
    table.create_index("value", "fts")
    table.create_index("id", "btree")


def layered(table: Table) -> Rows:
    """Two indexed and three unindexed fragments with deletions, a generation, a log."""
    merged(table, range(40), 0)
    merged(table, range(40, 80), 0)
    create_indexes(table)
    merged(table, range(70, 100), 1)
    merged(table, range(95, 120), 2)
    merged(table, range(30, 45), 3)
    table.upsert(rows([1, 71, 130], 4))
    table.delete(keys=[2, 72])
    table.flush()
    table.upsert(rows([3, 96, 131], 5))
    table.delete(keys=[97])
    expected = at(range(70), 0) | at(range(70, 95), 1) | at(range(95, 120), 2)
    expected |= at(range(30, 45), 3) | at([1, 71, 130], 4) | at([3, 96, 131], 5)
    return {key: value for key, value in expected.items() if key not in (2, 72, 97)}


def coverage(table: Table) -> dict[str, int]:
    """Of each index how many rows of the base it covers."""
    found = {}
    dataset = base(table)
    rows_of = {part.fragment_id: part.count_rows() for part in dataset.get_fragments()}
    for index in dataset.describe_indices():
        if not index.name.startswith("__"):
            numbers = {number for segment in index.segments for number in segment.fragment_ids}
            found[index.name] = sum(rows_of.get(number, 0) for number in numbers)
    return found


def progress(table: Table) -> Any:
    found = read_details(table._base.store, base(table).version)
    assert found is not None
    details = found[0]
    return details.merged_generations, details.index_catchup, details.inline_snapshots


def fragments(table: Table) -> list[tuple[int, int]]:
    return [(part.physical_rows, part.count_rows()) for part in base(table).get_fragments()]


# --- what comes out ----------------------------------------------------------------------------


@each_mode
def test_nothing_that_is_read_changes(tmp_path: Path, stable: bool, defer: bool) -> None:
    lake = make(tmp_path, stable)
    writer, warm = lake.process().table, lake.reader()
    expected = layered(writer)
    pinned = writer.snapshot()
    base(writer).tags.create("before", pinned)
    then = found_rows(writer.to_arrow(version=pinned))
    for table in (writer, warm):
        assert_right(table, expected, QUERY)
    covered, known, segments = coverage(writer), progress(writer), _segments(writer)
    assert known[1]

    report = lake.reader().compact(defer_index_remap=defer)
    assert (report.pieces, report.fragments_before, report.fragments_after) == (2, 5, 2)
    assert report.rows_dropped > 0
    assert report.left == 0
    assert [physical - live for physical, live in fragments(writer)] == [0, 0]
    base(writer).validate()
    assert coverage(writer) == covered
    assert progress(writer) == known
    kept = {"vector_idx", "value_idx", "id_idx"} if defer else {"vector_idx", "value_idx"}
    if stable or defer:
        after = _segments(writer)
        assert {name for name in kept if after[name] == segments[name]} == kept  # not built anew
    for table in (writer, warm, lake.reader()):
        assert_right(table, expected, QUERY)
        assert table.get(257) is None
        few = table.scan(["id"], filter="id < 3").read_all()
        assert sorted(few.column("id").to_pylist()) == [0, 1]
        assert found_rows(table.to_arrow(version=pinned)) == then
        # Those of that version still name its rows as they were then.
        assert found_rows(table.search(QUERY, version=pinned).limit(500).to_arrow()) == then
        assert found_rows(table.search("river", version=pinned).limit(500).to_arrow()) == then
    assert str(warm.compact(defer_index_remap=defer)) == "nothing to compact"

    # Once more over what the first one left, with indexes that were told, not rewritten.
    writer.flush()
    writer.merge()
    assert writer.compact(deletion_share=0.0, defer_index_remap=False).left == 0
    for table in (writer, warm):
        assert_right(table, expected, QUERY)
    base(writer).optimize.optimize_indices()
    for table in (writer, warm):
        assert_right(table, expected, QUERY)
    writer.compact(deletion_share=0.0, defer_index_remap=defer)
    assert len(fragments(writer)) == 1
    for table in (writer, warm):
        assert_right(table, expected, QUERY)
    assert found_rows(base(writer).to_table()) == expected


def _segments(table: Table) -> dict[str, set[str]]:
    return {i.name: {str(s.uuid) for s in i.segments} for i in base(table).describe_indices()}


@each_mode
def test_failure_23_compaction_next_to_the_mem_wal_index(
    tmp_path: Path, stable: bool, defer: bool
) -> None:
    """It has no fields and covers no fragment, and must come through with all it knows."""
    lake = make(tmp_path, stable)
    table = lake.process().table
    for step in range(3):
        merged(table, range(10 * step, 10 * step + 12), step)
    table.upsert(rows([100], 9))
    table.flush()
    table.snapshot()
    known = progress(table)
    assert known[0]
    assert known[2] is not None
    assert table.compact(defer_index_remap=defer).fragments_after == 1
    assert progress(table) == known
    assert table.merge().generations == 1
    assert len(found_rows(table.to_arrow())) == base(table).count_rows() == 33


@either_kind
def test_rows_that_lance_updates_are_found_as_they_are(tmp_path: Path, stable: bool) -> None:
    """With stable row ids they keep their id, and indexes name them with what they were."""
    lake = make(tmp_path, stable)
    table, warm = lake.process().table, lake.reader()
    merged(table, range(60), 0)
    create_indexes(table)
    expected = at(range(60), 0)

    def check() -> None:
        for handle in (table, warm):
            assert_right(handle, expected, QUERY)

    def update(key: int, version: int) -> None:
        values = {"value": f"'{text(key, version)}'", "vector": f"{vector(key, version)}"}
        base(table).update(values, where=f"id = {key}")
        expected.update(at([key], version))
        check()

    def upsert(keys: Sequence[int], version: int) -> None:
        changed = pa.Table.from_pylist(rows(keys, version), base(table).schema)
        base(table).merge_insert("id").when_matched_update_all().execute(changed)
        expected.update(at(keys, version))
        check()

    def optimize(**options: int) -> None:
        base(table).optimize.optimize_indices(**options)
        check()

    update(5, 1)
    upsert([10, 15, 20], 2)
    optimize(num_indices_to_merge=0)
    update(10, 3)
    assert table.compact(target_rows=1000).pieces
    check()
    optimize()
    upsert([5, 25], 4)
    assert table.compact(deletion_share=0.0).pieces
    check()
    optimize(num_indices_to_merge=10)
    table.compact(deletion_share=0.0)
    check()
    assert len(fragments(table)) == 1


@pytest.mark.parametrize("compact", [Table.compact, lambda t: base(t).optimize.compact_files()])
@pytest.mark.parametrize("kind", ["ivf_flat", "ivf_pq"])
def test_what_was_nearest_and_is_gone_leaves_no_gap_in_an_answer(
    tmp_path: Path, kind: str, compact: Callable[[Table], Any]
) -> None:
    """An index keeps rows that were deleted before a compaction, and Lance still finds them."""
    table = make(tmp_path, True).process().table
    merged(table, range(300), 0)
    options = {"num_sub_vectors": 4} if kind == "ivf_pq" else {}
    table.create_index("vector", kind, num_partitions=3, **options)
    table.create_index("value", "fts")
    ordered = [one["id"] for one in table.search(QUERY).nprobes(3).limit(300).to_list()]
    gone, left = set(ordered[:200]), ordered[200:]
    base(table).delete(f"id in ({', '.join(map(str, gone))})")
    compact(table)
    assert fragments(table) == [(100, 100)]
    for select in (["id"], ["id", "value"]):
        for k in (3, 60, 150):
            found = table.search(QUERY).nprobes(3).select(select).limit(k).to_list()
            assert [one["id"] for one in found] == left[:k]
    assert_right(table, at(left, 0), QUERY)


def test_compaction_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", SCHEMA, primary_key="id")
    merged(table, range(60), 0)
    create_indexes(table)
    for step in (1, 2):
        merged(table, range(20 * step, 20 * step + 30), step)
    expected = at(range(20), 0) | at(range(20, 40), 1) | at(range(40, 70), 2)
    report = table.compact()
    assert (report.fragments_before, report.fragments_after, report.left) == (3, 2, 0)
    for handle in (table, db.open_table("t")):
        assert_right(handle, expected, QUERY)


def test_versions_and_tags_outlive_what_clean_up_removes(tmp_path: Path) -> None:
    table = make(tmp_path, True).process().table
    for step in range(3):
        merged(table, range(10 * step, 10 * step + 15), step)
    tagged = base(table).version
    base(table).tags.create("release", tagged)
    then = found_rows(base(table).to_table())
    table.upsert(rows(range(5), 7))
    table.flush()
    table.merge()
    table.compact(deletion_share=0.0)
    now = found_rows(base(table).to_table())
    files = len(list((Path(table.uri) / "data").iterdir()))
    base(table).cleanup_old_versions(
        timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    assert len(list((Path(table.uri) / "data").iterdir())) < files
    assert found_rows(lance.dataset(table.uri, version="release").to_table()) == then
    assert found_rows(table.to_arrow(version=tagged)) == then
    assert found_rows(table.to_arrow()) == now


# --- what is due -------------------------------------------------------------------------------


def test_what_is_due(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table

    def add(keys: range) -> None:
        table.upsert([small_row(key) for key in keys])
        table.flush()
        table.merge()

    assert str(table.compact()) == "nothing to compact"  # not even a row
    add(range(100))
    assert plan_compaction(table._base) == []  # one fragment is as few as can be
    add(range(100, 110))
    assert plan_compaction(table._base, target_rows=10) == []  # both are large enough
    assert plan_compaction(table._base, gradual=True) == []  # 10 rows are not worth copying 100
    (piece,) = plan_compaction(table._base)
    assert (piece.fragments, piece.rows, piece.deleted_rows) == ((0, 1), 110, 0)
    add(range(110, 120))
    (piece,) = plan_compaction(table._base, gradual=True)
    assert piece.fragments == (1, 2)
    table.delete(keys=range(11))
    table.flush()
    table.merge()
    (piece,) = plan_compaction(table._base, target_rows=10)
    assert (piece.fragments, piece.rows, piece.deleted_rows) == ((0,), 89, 11)
    assert plan_compaction(table._base, target_rows=10, deletion_share=0.2) == []
    report = table.compact(target_rows=100)
    assert (report.rows, report.rows_dropped, report.fragments_after) == (109, 11, 1)
    assert "3 fragments became 1: 109 rows copied, 11 deleted rows dropped" in str(report)
    assert report.bytes_after < report.bytes_before


def test_a_limit_leaves_the_rest_for_the_next_time(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    for step in range(6):
        table.upsert([small_row(key) for key in range(10 * step, 10 * step + 10)])
        table.flush()
        table.merge()
    pieces = plan_compaction(table._base, target_rows=20)
    assert [piece.fragments for piece in pieces] == [(0, 1), (2, 3), (4, 5)]
    assert plan_compaction(table._base, target_rows=20, max_bytes=1) == pieces[:1]
    report = table.compact(target_rows=20, max_bytes=2 * pieces[0].size_bytes + 1)
    assert (report.pieces, report.left) == (2, 1)
    assert str(report).endswith("; 1 left for the next time")
    assert table.compact(target_rows=20).pieces == 1
    assert table.count() == 60


def test_bad_input(tmp_path: Path) -> None:
    table = make_lake(tmp_path).process().table
    for wrong in (0, -1, True, 1.5, "many"):
        with pytest.raises(penstock.InvalidInput, match="target_rows"):
            table.compact(target_rows=wrong)  # type: ignore[arg-type]
        with pytest.raises(penstock.InvalidInput, match="max_bytes"):
            table.compact(max_bytes=wrong)  # type: ignore[arg-type]
    for share in (-0.1, 1.0, True, "half", float("nan")):
        with pytest.raises(penstock.InvalidInput, match="deletion_share"):
            table.compact(deletion_share=share)  # type: ignore[arg-type]


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
    patient = Seams(backoff=Backoff(attempts=PATIENCE, max_ms=200))
    db = penstock.connect(tmp_path, seams=patient)
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
