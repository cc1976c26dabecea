"""Building indexes on: only what is new is read, nothing is found twice, and credit is earned."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from tests.failures.lake import Lake
from tests.memwal.indexed_tables import (
    DIMENSIONS,
    SCHEMA,
    check,
    credit,
    make,
    merge,
    models,
    rows,
    segments,
)
from tests.s3_server import S3Server

import penstock
from penstock import Table
from penstock.index.base import create_segment, load_index_specs
from penstock.memwal import build_indexes
from penstock.memwal.build_indexes import (
    MAX_SEGMENTS,
    BuiltSegment,
    build_segment,
    commit_index_build,
    plan_index_builds,
)
from penstock.storage.faults import Fault


def built(table: Table, names: Sequence[str] | None = None) -> list[BuiltSegment]:
    """Plans that were sent somewhere, built there, and the results sent back."""
    plans = pickle.loads(pickle.dumps(plan_index_builds(table._base, names)))
    made = [build_segment(table._base, plan) for plan in plans]
    return list(pickle.loads(pickle.dumps(made)))


# --- what is read, and what is kept -----------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
def test_only_new_fragments_are_read_and_no_model_is_trained(tmp_path: Path, stable: bool) -> None:
    table = make(tmp_path, stable=stable, kinds="flat pq sq fts btree bitmap")
    trained = models(table)
    table.merge()
    assert credit(table) == {}
    report = table.build_indexes()
    assert report.behind == []
    assert report.rows == 6 * 300
    check(table)
    before = segments(table)
    assert {fragments for by in before.values() for (fragments,) in by.values()} == {0}

    # Far fewer rows than Lance wants to train anything on.
    merge(table, rows(range(290, 310), "beta"), gone=[5])
    merge(table, rows([400], "gamma"))
    check(table, covered=False)
    report = table.build_indexes()
    assert {(b.rows, b.fragments, b.replaced) for b in report.builds} == {(21, 2, 0)}
    check(table)
    for name, old in before.items():
        (new,) = segments(table)[name].keys() - old.keys()
        assert segments(table)[name] == {**old, new: [1, 2]}
    for name, model in models(table).items():
        assert np.array_equal(model.centroids, trained[name].centroids)
        if model.codebook is not None:
            assert np.array_equal(model.codebook, trained[name].codebook)
    assert credit(table) == {name: [3] for name in before}
    assert "beta" in table.search("beta").to_list()[0]["text"]

    version = table.version
    assert str(table.build_indexes()) == "every index is up to date"
    assert table.version == version


def test_credit_follows_merges_that_add_no_rows(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="fts btree")
    table.merge()
    table.build_indexes()
    before = segments(table)
    merge(table, gone=[1, 2, 3])
    assert credit(table) == {"btree": [1], "fts": [1]}
    report = table.build_indexes(["fts"])
    assert [(build.rows, build.segment, build.caught_up) for build in report.builds] == [
        (0, None, True)
    ]
    assert credit(table) == {"btree": [1], "fts": [2]}
    assert segments(table) == before


def test_many_small_builds_leave_few_segments_and_read_no_row_often(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="fts flat")
    table.merge()
    read = table.build_indexes().rows
    rounds, most = 24, 0
    for number in range(rounds):
        merge(table, rows(range(1000 + 4 * number, 1004 + 4 * number), "beta"))
        report = table.build_indexes()
        assert report.behind == []
        read += report.rows
        most = max(most, *(len(by) for by in segments(table).values()))
        large = [by for by in segments(table)["fts"].values() if 0 in by]
        assert large == [[0]], "the 300 rows were read again for a few"
    assert most == MAX_SEGMENTS
    assert read < 2 * (300 + 4 * rounds * 4)
    check(table)


def test_names_and_kinds_that_cannot_be_built(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="btree")
    table.merge()
    lance.dataset(table.uri).create_scalar_index("text", "NGRAM", name="ngram")
    merge(table, rows([999], "beta"))
    with pytest.raises(penstock.InvalidInput, match="no index nothing; there are: btree"):
        table.build_indexes(["nothing"])
    with pytest.raises(penstock.InvalidInput, match="list"):
        table.build_indexes("btree")
    report = table.build_indexes()
    assert report.behind == ["ngram"]
    assert "ngram: not built" in str(report)
    assert "btree: 301 rows of 2 fragments, caught up" in str(report)
    assert credit(table)["btree"] == [2]


def test_a_build_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(300), "alpha"))
    table.create_index("v", "ivf_pq", num_partitions=2, num_sub_vectors=4)
    table.create_index("text", "fts")
    table.flush(recover=True)
    table.merge()
    assert table.build_indexes().behind == []
    merge(table, rows(range(300, 310), "beta"))
    assert table.build_indexes().rows == 2 * 10
    assert table._base.snapshot().details.index_catchup.keys() == {"text_idx", "v_idx"}
    assert len(db.open_table("t").search("beta").limit(99).to_list()) == 10


# --- Appendix 4 -------------------------------------------------------------------------------


def test_appendix_4_index_catchup(tmp_path: Path) -> None:
    """Generations 1-4 are merged, the index covers 1-3, 5 is flushed, 6 is active."""
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(100), "alpha"))
    table.create_index("v", "ivf_flat", name="ivf", num_partitions=4)
    table.flush(recover=True)  # generation 1
    for generation in (2, 3):
        table.upsert(rows(range(50 * generation, 50 * generation + 60), "beta", generation))
        table.flush()
    table.merge()
    table.build_indexes()
    merge(table, rows(range(20, 40), "gamma", 4))  # generation 4
    table.upsert(rows(range(30, 50), "gamma", 5))
    table.flush()  # generation 5
    table.upsert(rows(range(45, 55), "gamma", 6))  # generation 6, in memory

    details = table._base.snapshot().details
    (region,) = details.merged_generations
    assert details.merged_generations[region] == 4
    assert details.index_catchup["ivf"][region] == 3
    assert [g.generation for g in Lake(table._base.store).manifest().flushed_generations] == [
        1,
        2,
        3,
        4,
        5,
    ]

    def nearest_everywhere() -> None:
        there = table.to_arrow()
        vectors = np.stack(there["v"].to_numpy(zero_copy_only=False))
        for seed in range(5):
            query = np.random.default_rng(seed).normal(size=DIMENSIONS).astype(np.float32)
            best = np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]
            found = table.search(query).nprobes(4).limit(10).to_list()
            assert [row["id"] for row in found] == there["id"].to_numpy()[best].tolist()

    nearest_everywhere()
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert Lake(table._base.store).generations() == [4, 5]

    table.build_indexes()
    assert table._base.snapshot().details.index_catchup["ivf"][region] == 4
    nearest_everywhere()
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert Lake(table._base.store).generations() == [5]
    nearest_everywhere()


# --- next to others ---------------------------------------------------------------------------


def merges(table: Table) -> None:
    merge(table, rows(range(295, 330), "gamma", 9), gone=[7, 301])


def deletes_a_fragment(table: Table) -> None:
    lance.dataset(table.uri).delete("id >= 300 AND id < 320")


def updates_rows(table: Table) -> None:
    lance.dataset(table.uri).update(
        {"text": "'gamma common'", "tag": "'b1'"}, where="id IN (3, 4, 302, 303)"
    )


def rewrites_columns(table: Table) -> None:
    dataset = lance.dataset(table.uri)
    fragment = dataset.get_fragments()[-1]
    ids = fragment.to_table(columns=["id"])["id"].to_pylist()
    new = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": ["gamma common"] * len(ids),
            "tag": ["b1"] * len(ids),
            "v": pa.array(
                [[0.3 + number / 1e4] * DIMENSIONS for number in ids],
                pa.list_(pa.float32(), DIMENSIONS),
            ),
        }
    )
    changed, fields = fragment.update_columns(new, left_on="id", right_on="id")
    lance.LanceDataset.commit(
        table.uri,
        lance.LanceOperation.Update(updated_fragments=[changed], fields_modified=fields),
        read_version=dataset.version,
    )


def compacts(table: Table) -> None:
    lance.dataset(table.uri).optimize.compact_files(target_rows_per_fragment=10_000)


def rewrites_and_compacts(table: Table) -> None:
    rewrites_columns(table)
    compacts(table)


def optimizes(table: Table) -> None:
    lance.dataset(table.uri).optimize.optimize_indices(num_indices_to_merge=0)


EVENTS = [
    merges,
    deletes_a_fragment,
    updates_rows,
    rewrites_columns,
    compacts,
    rewrites_and_compacts,
    optimizes,
]


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("event", EVENTS)
def test_a_build_next_to_what_others_do(
    tmp_path: Path, event: Callable[[Table], None], stable: bool
) -> None:
    table = make(tmp_path, stable=stable)
    table.merge()
    table.build_indexes()
    merge(table, rows(range(300, 320), "beta"))
    merge(table, rows(range(320, 325), "beta"))
    results = built(table)
    event(table)
    commit_index_build(table._base, results)
    check(table, covered=False)
    table.build_indexes()
    check(table)
    # And the other way round: everything is covered when it happens.
    event(table)
    check(table, covered=False)
    assert table.build_indexes().behind == []
    check(table)
    assert set(map(tuple, credit(table).values())) == {
        tuple(table._base.snapshot().details.merged_generations.values())
    }


def test_credit_is_not_given_for_rows_that_were_merged_meanwhile(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="fts flat")
    table.merge()
    table.build_indexes()
    merge(table, rows(range(300, 320), "beta"))
    results = built(table)
    merge(table, rows(range(320, 325), "beta"))
    report = commit_index_build(table._base, results)
    assert [(build.rows, build.caught_up) for build in report.builds] == [(20, False)] * 2
    assert report.behind == ["flat", "fts"]
    assert credit(table) == {"flat": [1], "fts": [1]}
    assert table.build_indexes().rows == 2 * 5
    assert credit(table) == {"flat": [3], "fts": [3]}


def test_a_segment_with_old_values_of_rows_that_others_index_is_not_used(tmp_path: Path) -> None:
    table = make(tmp_path)
    table.merge()
    table.build_indexes()
    merge(table, rows(range(300, 320), "beta"))
    results = built(table)
    dataset = lance.dataset(table.uri)
    dataset.update({"text": "'gamma common'", "tag": "'b1'"}, where="id IN (302, 303)")
    dataset = lance.dataset(table.uri)
    moved = dataset.get_fragments()[-1].fragment_id
    others = [create_segment(spec, dataset, [moved]) for spec in load_index_specs(dataset)]
    operation = lance.LanceOperation.CreateIndex(others, [])
    lance.LanceDataset.commit(table.uri, operation, read_version=dataset.version)
    check(table, covered=False)
    report = commit_index_build(table._base, results)
    # Lance keeps vectors of different segments apart; for the rest it is built again.
    assert [build.name for build in report.builds if build.segment] == ["flat"]
    check(table, covered=False)
    assert table.build_indexes().behind == []
    check(table)


@pytest.mark.parametrize("stable", [True, False])
def test_segments_that_were_compacted_while_they_were_taken_in(
    tmp_path: Path, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_indexes, "MAX_SEGMENTS", 2)
    table = make(tmp_path, stable=stable)
    table.merge()
    table.build_indexes()
    merge(table, rows(range(300, 320), "beta"))
    table.build_indexes()
    merge(table, rows(range(320, 350), "beta"))
    results = built(table)
    assert {result.plan.rows for result in results} == {50}
    lance.dataset(table.uri).delete("id >= 300 AND id < 318")
    lance.dataset(table.uri).optimize.compact_files(target_rows_per_fragment=2)
    left = [part.fragment_id for part in lance.dataset(table.uri).get_fragments()]
    assert left == [0, 2, 3]
    commit_index_build(table._base, results)
    covered = {number for numbers in segments(table)["fts"].values() for number in numbers}
    assert 3 in covered  # what became of fragment 1
    check(table, covered=False)
    assert table.build_indexes().behind == []
    check(table)


def test_an_index_that_was_dropped_meanwhile(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="fts btree")
    table.merge()
    results = built(table)
    table.drop_index("fts")
    report = commit_index_build(table._base, results)
    assert [(build.name, build.skipped) for build in report.builds] == [
        ("btree", None),
        ("fts", "it was dropped"),
    ]
    assert set(segments(table)) == set(credit(table)) == {"btree"}


def test_two_builders_of_one_index_and_two_of_different_ones(tmp_path: Path) -> None:
    table = make(tmp_path)
    table.merge()
    other = penstock.connect(tmp_path).open_table("t")
    first, second = built(table, ["fts", "flat"]), built(other, ["flat", "fts"])
    third = built(other, ["btree", "bitmap"])
    landed = commit_index_build(table._base, first)
    late = commit_index_build(other._base, second)
    beside = commit_index_build(other._base, third)
    assert [build.segment for build in landed.builds] == [result.uuid for result in first]
    assert [(build.segment, build.caught_up) for build in late.builds] == [(None, True)] * 2
    assert [build.segment for build in beside.builds] == [result.uuid for result in third]
    check(table)
    # The same results once more, as if the answer had been lost.
    version = table.version
    again = commit_index_build(table._base, first)
    assert [build.segment for build in again.builds] == [result.uuid for result in first]
    assert table.version == version


def test_builders_and_a_merger_at_once(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="fts flat bitmap")
    failures: list[BaseException] = []

    def run(work: Callable[[Table], object]) -> None:
        handle = penstock.connect(tmp_path).open_table("t")
        try:
            for _ in range(3):
                work(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(Table.build_indexes,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(4):
        merge(table, rows(range(1000 + 4 * number, 1004 + 4 * number), "beta"))
    for thread in threads:
        thread.join(120)
    assert not failures
    assert table.build_indexes().behind == []
    check(table)
    named = {uuid for by in segments(table).values() for uuid in by}
    table.gc(retain_seconds=0, orphan_seconds=0)
    left = {path.name for path in (Path(table.uri) / "_indices").iterdir() if any(path.iterdir())}
    assert named == left


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
def test_a_fault_at_any_call_leaves_the_build_done_or_not_begun(
    tmp_path: Path, fault: Fault
) -> None:
    table = make(tmp_path, kinds="fts flat")
    table.merge()
    table.build_indexes()
    merge(table, rows(range(300, 320), "beta"))
    pristine = tmp_path / "pristine"
    shutil.copytree(tmp_path / "t.lance", pristine)
    faults = nth = 0
    while True:
        nth += 1
        shutil.rmtree(tmp_path / "t.lance")
        shutil.copytree(pristine, tmp_path / "t.lance")
        process = Lake(table._base.store).process()
        rule = process.store.inject(fault, nth=nth)
        try:
            process.table.build_indexes()
        except penstock.PenstockError:
            faults += 1
        process.store.clear()
        there = lance.dataset(table.uri)
        fragments = {part.fragment_id for part in there.get_fragments()}
        for name, by in segments(table).items():
            numbers = [number for covered in by.values() for number in covered]
            assert len(numbers) == len(set(numbers))
            assert credit(table).get(name) in ([1], [2])
            assert (credit(table)[name] == [2]) == (set(numbers) == fragments)
        process.table.build_indexes()
        assert credit(table) == {"flat": [2], "fts": [2]}
        if not rule.fired:
            break
    check(penstock.connect(tmp_path).open_table("t"))
    assert nth > 8
    assert faults > 0


def test_a_deferred_remap_is_done_by_the_next_build(tmp_path: Path) -> None:
    table = make(tmp_path, stable=False)
    table.merge()
    merge(table, rows(range(300, 320), "beta"))
    table.build_indexes()
    dataset = lance.dataset(table.uri)
    dataset.optimize.compact_files(target_rows_per_fragment=10_000, defer_index_remap=True)

    def names() -> set[str]:
        return {index.name for index in lance.dataset(table.uri).describe_indices()}

    assert "__lance_frag_reuse" in names()
    penstock.connect(tmp_path).open_table("t").upsert(rows([7], "alpha"))  # by a new writer
    check(table)
    table.build_indexes(["fts", "flat", "btree"])
    assert "__lance_frag_reuse" in names()  # one index still needs it
    check(table)
    table.build_indexes()
    assert "__lance_frag_reuse" not in names()
    check(table)


# --- versions of rows -------------------------------------------------------------------------


def test_merged_rows_say_which_version_they_came_with(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="")
    table.merge()
    first = table.version
    merge(table, rows([1, 999], "beta"))
    columns = ["id", "_row_created_at_version", "_row_last_updated_at_version"]
    found = {
        row["id"]: (row[columns[1]], row[columns[2]])
        for row in lance.dataset(table.uri).to_table(columns=columns).to_pylist()
    }
    assert found.pop(1) == found.pop(999) == (table.version, table.version)
    assert set(found.values()) == {(first, first)}
