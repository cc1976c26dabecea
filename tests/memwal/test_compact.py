"""Compaction: fewer and larger fragments, and every read gives what it gave before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake
from tests.failures.lake import row as small_row
from tests.memwal.compacting import (
    base,
    coverage,
    create_indexes,
    each_mode,
    either_kind,
    fragments,
    layered,
    make,
    merged,
    progress,
)
from tests.memwal.versioned_rows import (
    QUERY,
    SCHEMA,
    assert_right,
    at,
    found_rows,
    rows,
    text,
    vector,
)
from tests.s3_server import S3Server

import penstock
from penstock.memwal.compact import plan_compaction
from penstock.table import Table

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
            ids = [one["id"] for one in found]
            if kind == "ivf_pq" and k == 3:
                # So few are compared exactly that it is the codebook that tells which they are.
                assert len(ids) == k
                assert ids == [one for one in left if one in ids]
            else:
                assert ids == left[:k]
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
