"""Merging: generations become rows of the base table, once, in one version, next to anybody."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake, row
from tests.s3_server import S3Server

import penstock
from penstock import Table
from penstock.errors import CommitConflict
from penstock.index.primary_key import mark_primary_key
from penstock.memwal import adopt
from penstock.memwal.merge import MergePlan, commit_merge, fold, plan_merges
from penstock.memwal.regions import load_manifests
from penstock.storage.faults import Fault

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
Found = dict[Any, Any]


@pytest.fixture(autouse=True, params=["adopted", "rewritten"])
def adopts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files of generations become files of the base table, as those of many rows do."""
    adopted = bool(request.param == "adopted")
    if adopted:
        monkeypatch.setattr(adopt, "ADOPTED_ROWS", 0)
        monkeypatch.setattr(adopt, "DEAD_SHARE", 1.0)
    return adopted


def plain(table: Table) -> Found:
    """What a Lance user sees who knows nothing of regions."""
    return {one["id"]: one["value"] for one in lance.dataset(table.uri).to_table().to_pylist()}


def live(table: Table) -> Found:
    return {one["id"]: one["value"] for one in table.to_arrow().to_pylist()}


def change(table: Table, rng: random.Random, model: Found, step: int) -> None:
    rows = dict.fromkeys(rng.sample(range(60), 20), f"step {step}")
    table.upsert([row(key, value) for key, value in rows.items()])
    model.update(rows)
    gone = rng.sample(range(60), 6)
    table.delete(keys=gone)
    for key in gone:
        model.pop(key, None)


def only_plan(table: Table) -> MergePlan:
    (plan,), waiting = plan_merges(table._base)
    assert waiting == 0
    return plan


# --- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("regions", [1, 3])
def test_after_a_merge_a_lance_user_sees_exactly_the_table(
    tmp_path: Path, stable: bool, regions: int
) -> None:
    schema = mark_primary_key(SCHEMA, ["id"])
    lance.write_dataset(
        schema.empty_table(), str(tmp_path / "t.lance"), enable_stable_row_ids=stable
    )
    table = penstock.connect(tmp_path).open_table("t", adopt=True)
    table.set_regions(penstock.bucket("id", regions))
    other = penstock.connect(tmp_path).open_table("t")
    rng, model = random.Random(regions), {}
    for step in range(12):
        change(table, rng, model, step)
        if step % 3:
            table.flush()
        if step % 4 == 3:
            table.flush()
            before = lance.dataset(table.uri).version
            report = table.merge(max_rows=rng.choice([1, 30, 1000]))
            assert report.generations > 0
            assert plain(table) == live(table) == live(other) == model
            merged = lance.dataset(table.uri)
            merged.validate()
            assert merged.version <= before + report.generations
            assert table.merge().generations == 0
    assert table.count() == len(model)


def test_a_table_without_a_key_keeps_every_row_once(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("value", pa.string())])
    table = penstock.connect(tmp_path).create_table("t", schema)
    for step in range(4):
        table.upsert([{"id": 1, "value": f"{step}"}, {"id": None, "value": f"{step}"}])
        table.flush()
    assert table.merge().rows == 8
    assert table.merge().rows == 0
    values = lance.dataset(table.uri).to_table().column("value").to_pylist()
    assert sorted(values) == sorted(f"{step}" for step in range(4) for _ in range(2))
    assert table.count() == 8


def test_composite_keys_and_indexes(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field("tenant", pa.string(), nullable=False),
            pa.field("id", pa.int32(), nullable=False),
            pa.field("body", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), 8)),
        ]
    )
    rng = np.random.default_rng(3)

    def rows(ids: range, word: str) -> list[dict[str, Any]]:
        return [
            {"tenant": f"t{n % 3}", "id": n, "body": f"{word} {n}", "vector": rng.normal(size=8)}
            for n in ids
        ]

    table = penstock.connect(tmp_path).create_table(
        "t", schema, primary_key=["tenant", "id"], regions=penstock.identity("tenant")
    )
    table.upsert(rows(range(300), "old"))
    table.flush()
    assert table.merge().rows == 300
    table.create_index("vector", "ivf_flat", num_partitions=4)
    table.create_index("body", "fts")
    table.upsert(rows(range(100, 200), "new"))
    table.delete(keys=[("t0", 0), ("t1", 100)])
    table.flush()
    query = rng.normal(size=8)
    before = [table.search(query).nprobes(4).to_list(), table.search("new").limit(300).to_list()]
    assert len(before[1]) == 99
    table.merge()
    after = [table.search(query).nprobes(4).to_list(), table.search("new").limit(300).to_list()]
    for found, again in zip(before, after, strict=True):
        assert _named(found) == _named(again)
    assert lance.dataset(table.uri).count_rows() == table.count() == 298


def _named(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    score = "_distance" if "_distance" in rows[0] else "_score"
    return {(one["tenant"], one["id"]): pytest.approx(one[score], abs=1e-4) for one in rows}


def test_a_merge_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    rng, model = random.Random(2), {}
    for step in range(4):
        change(table, rng, model, step)
        table.flush()
        if step % 2:
            assert table.merge().generations > 0
    rows = lance.dataset(table.uri, storage_options=s3.storage_options).to_table().to_pylist()
    assert {one["id"]: one["value"] for one in rows} == live(db.open_table("t")) == model


def test_bad_input(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    for wrong in (0, -1, True, "many", 1.5):
        with pytest.raises(penstock.InvalidInput, match="max_rows"):
            table.merge(max_rows=wrong)  # type: ignore[arg-type]


# --- 18: two mergers, and a merger that crashed ------------------------------------------------


def test_failure_18_two_mergers_on_one_generation(tmp_path: Path) -> None:
    """Appendix 2, scenario 1: both merge generation 1, and only one of them counts."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(1, "first"), row(2, "first")])
    table.flush()
    a, b = lake.reader(), lake.reader()
    folded_a, folded_b = fold(a._base, only_plan(a)), fold(b._base, only_plan(b))
    assert commit_merge(a._base, folded_a).generations == 1
    version = lance.dataset(table.uri).version
    # Meanwhile a newer generation of the same key is merged: what B has is older than that.
    table.upsert([row(1, "second")])
    table.delete(keys=[2])
    table.flush()
    a.merge()
    assert commit_merge(b._base, folded_b).generations == 0
    assert plain(table) == live(table) == {1: "second"}
    assert lance.dataset(table.uri).version == version + 1
    files = {path.name for path in (Path(table.uri) / "data").iterdir()}
    assert not files & {file.path for part in folded_b.fragments for file in part.files}


def test_failure_18_a_merger_that_crashed_after_its_commit(tmp_path: Path) -> None:
    """Appendix 2, scenario 2: the next merger sees the progress and goes on behind it."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(1, "first")])
    table.flush()
    crashed = lake.reader()
    commit_merge(crashed._base, fold(crashed._base, only_plan(crashed)))
    table.upsert([row(1, "second")])
    table.flush()
    following = lake.reader()
    assert [g.generation for _, g in only_plan(following).generations] == [2]
    assert following.merge().generations == 1
    assert plain(table) == {1: "second"}


# --- 19: one version ---------------------------------------------------------------------------


def test_failure_19_rows_tombstones_and_progress_are_in_one_version(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(key, "old") for key in range(10)])
    table.flush()
    table.merge()
    table.upsert([row(key, "new") for key in range(5)])
    table.delete(keys=[7, 8])
    table.flush()
    before = lance.dataset(table.uri)
    table.merge()
    assert lance.dataset(table.uri).version == before.version + 1
    assert before.count_rows() == 10
    expected = dict.fromkeys(range(5), "new") | dict.fromkeys((5, 6, 9), "old")
    assert plain(table) == live(table) == expected


@pytest.mark.parametrize("kind", [0, 1], ids=["never arrived", "answer lost"])
def test_a_fault_at_any_call_leaves_the_merge_done_or_not_begun(
    tmp_path: Path, kind: int, adopts: bool
) -> None:
    if not adopts and kind == 0:
        pytest.skip("tried with files that are adopted, at the same calls and some more")
    lake = make_lake(tmp_path)
    table = lake.process().table
    model: Found = {}
    rng = random.Random(5)
    nth = faults = 0
    while True:
        nth += 1
        change(table, rng, model, nth)
        table.flush()
        merger = lake.process()
        rule = merger.store.inject(Fault.FAIL_AFTER if kind else Fault.FAIL_BEFORE, nth=nth)
        try:
            merger.table.merge()
        except penstock.PenstockError:
            faults += 1
        merger.store.clear()
        assert live(table) == live(lake.reader()) == model
        merger.table.merge()
        assert plain(table) == live(table) == model
        if not rule.fired:
            break
    assert nth > 8
    assert faults > 0


# --- 20 ----------------------------------------------------------------------------------------


def test_failure_20_a_merged_generation_is_not_newer_than_the_base(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(1, "merged"), row(2, "merged")])
    table.flush()
    table.merge()
    dataset = lance.dataset(table.uri)
    dataset.update({"value": "'edited'"}, where="id = 1")
    lance.dataset(table.uri).delete("id = 2")
    assert len(lake.manifest().flushed_generations) == 1  # still there, and passed over
    assert live(table) == live(lake.reader()) == plain(table) == {1: "edited"}


# --- next to others ----------------------------------------------------------------------------


def _update(dataset: lance.LanceDataset) -> None:
    dataset.update({"value": "'lance'"}, where="id >= 8")


def _delete(dataset: lance.LanceDataset) -> None:
    dataset.delete("id >= 8")


def _upsert(dataset: lance.LanceDataset) -> None:
    rows = pa.table({"id": [8, 9, 30], "value": ["lance"] * 3}, schema=dataset.schema)
    dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(rows)


def _compact(dataset: lance.LanceDataset) -> None:
    dataset.optimize.compact_files()


EDITS = {
    _update: dict.fromkeys((8, 9), "lance"),
    _delete: {8: None, 9: None},
    _upsert: dict.fromkeys((8, 9, 30), "lance"),
    _compact: {},
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("first", ["merge", "edit"])
def test_a_merge_and_somebody_elses_edit_of_the_same_fragment_both_land(
    tmp_path: Path, edit: Callable[[lance.LanceDataset], None], first: str
) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    for half in (range(5), range(5, 10)):
        table.upsert([row(key, "old") for key in half])
        table.flush()
        table.merge()
    table.upsert([row(key, "new") for key in range(6)])
    table.delete(keys=[6, 7])
    table.flush()
    begun = lance.dataset(table.uri)  # what the other one has read when the merge comes
    folded = fold(table._base, only_plan(table))
    if first == "edit":
        edit(begun)
    assert commit_merge(table._base, folded).generations == 1
    if first == "merge":
        try:
            edit(begun)
        except OSError as error:  # Lance may ask for another attempt, but lose nothing
            if "conflict" not in str(error).lower():
                raise
            edit(lance.dataset(table.uri))
    expected: Found = dict.fromkeys(range(6), "new") | dict.fromkeys((8, 9), "old") | EDITS[edit]
    expected = {key: value for key, value in expected.items() if value is not None}
    assert plain(table) == live(table) == expected
    assert lance.dataset(table.uri).count_rows() == len(expected)


def test_many_mergers_on_many_regions(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 6))
    table = lake.process().table
    rng, model = random.Random(11), {}
    for step in range(6):
        change(table, rng, model, step)
        table.flush()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            lake.reader().merge(max_rows=25)
        except CommitConflict:
            lake.reader().merge(max_rows=25)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    table.merge()
    assert plain(table) == live(table) == model
    assert lance.dataset(table.uri).count_rows() == len(model)


def test_regions_of_a_newer_spec_wait_for_those_of_an_older_one(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    old = lake.process().table
    old.upsert([row(key, "old") for key in range(10)])
    old.set_regions(penstock.bucket("id", 3))
    new = lake.process().table
    new.upsert([row(key, "new") for key in range(5)])
    new.flush()
    specs = {m.region_id: m.region_spec_id for m in load_manifests(lake.store, new._base.seams)}
    plans, waiting = plan_merges(new._base)
    (plan,) = plans
    assert [specs[part.region_id] for part in plan.parts] == [min(specs.values())] * 2
    assert waiting == sum(spec == max(specs.values()) for spec in specs.values())
    assert new.merge().waiting == 0
    expected = dict.fromkeys(range(5), "new") | dict.fromkeys(range(5, 10), "old")
    assert plain(new) == live(new) == live(lake.reader()) == expected


def test_regions_are_merged_in_one_version_as_far_as_max_rows_allows(tmp_path: Path) -> None:
    table = make_lake(tmp_path, regions=penstock.bucket("id", 4)).process().table
    for value in ("old", "new"):
        table.upsert([row(key, value) for key in range(40)])
        table.flush()
    version = table.version
    assert table.merge(max_rows=1).generations == 8
    assert table.version == version + 8
    table.upsert([row(key, "newest") for key in range(40)])
    table.flush()
    assert table.merge().generations == 4
    assert table.version == version + 9
    assert plain(table) == live(table) == dict.fromkeys(range(40), "newest")


def test_a_fold_that_clean_up_may_have_taken_for_left_over_is_not_published(
    tmp_path: Path,
) -> None:
    process = make_lake(tmp_path).process()
    table = process.table
    table.upsert([row(1, "one")])
    table.flush()
    folded = fold(table._base, only_plan(table))
    process.clock.advance(7 * 3600 * 1000.0)
    with pytest.raises(penstock.CommitConflict, match="a merge took 25200 s"):
        commit_merge(table._base, folded)
    assert plain(table) == {}
    assert table.merge().rows == 1
    assert plain(table) == {1: "one"}
