"""Bulk loads and overwrites: any number of pieces, one version, each key once, next to anybody."""

from __future__ import annotations

import random
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake, make_lake, row
from tests.memwal.changing import KEYS, Model, found, full, key, schema_of
from tests.memwal.indexed_tables import make as indexed_table
from tests.memwal.indexed_tables import rows as indexed_rows
from tests.memwal.loading import (
    begun,
    check_health,
    flusher,
    in_pieces,
    live,
    pieces_of,
    plain,
)
from tests.refusals import GOOD, refuses
from tests.refusals import SCHEMA as REFUSAL_SCHEMA
from tests.s3_server import S3Server

import penstock
from penstock import InvalidInput, PenstockError
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.bulk import (
    batches_of,
    commit_bulk,
    plan_bulk,
    write_piece,
)
from penstock.memwal.gc_limits import JOB_SECONDS, Outdated
from penstock.storage.faults import Fault
from penstock.storage.open import open_store

# --- what comes out ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KEYS))
@pytest.mark.parametrize("stable", [True, False], ids=["stable", "unstable"])
def test_loads_and_overwrites_are_those_of_a_dict(tmp_path: Path, kind: str, stable: bool) -> None:
    names = [field.name for field in KEYS[kind]]
    table = penstock.connect(tmp_path).create_table(
        "t",
        schema_of(kind),
        primary_key=names,
        regions=penstock.bucket("id", 2),
        stable_row_ids=stable,
    )
    rng = random.Random(f"{kind} {stable}")
    model: Model = {}
    for step in range(12):
        numbers = [rng.randrange(40) for _ in range(rng.choice([0, 1, 30]))]
        rows = [full(kind, n, step, place / 2, f"s{step}") for place, n in enumerate(numbers)]
        new = {key(one): one for one in rows}
        version = table.version
        if step % 3 == 2:
            table.upsert(rows)
            table.delete(keys=[{name: one[name] for name in names} for one in rows[:3]])
            model |= new
            for one in rows[:3]:
                model.pop(key(one), None)
            if rng.random() < 0.5:  # an overwrite takes rows wherever they are
                table.flush()
            if rng.random() < 0.5:
                assert table.overwrite([]).rows == 0
                model = {}
            table.flush()
            table.merge()
        else:
            cuts = sorted(rng.randrange(len(rows) + 1) for _ in range(2))
            parts = [rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :]]
            overwrite = step % 4 == 3
            before = len(model)
            gone = len(model.keys() & new.keys())
            report = in_pieces(table, parts, overwrite=overwrite)
            assert report.rows == len(new)
            assert report.duplicates == len(rows) - len(new)
            assert report.replaced == (before if overwrite else gone)
            assert table.version == (version + 1 if rows or (overwrite and before) else version)
            model = new if overwrite else model | new
        assert found(table) == model
        dataset = lance.dataset(table.uri)
        dataset.validate()
        seen = dataset.to_table().to_pylist()
        assert {key(one): one for one in seen} == model
        assert len(seen) == len(model)
    check_health(table)


def test_a_table_without_a_key_gets_every_row_beside_those_in_regions(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    table = lake.process().table
    table.upsert([row(1), row(1)])
    report = in_pieces(table, [[row(1), row(2)], [], [row(2)]])
    assert (report.rows, report.duplicates, report.replaced) == (3, 0, 0)
    assert lake.process().ids() == [1, 1, 1, 2, 2]
    table.flush()
    table.upsert([row(3)])
    assert table.overwrite([row(7), row(7)]).rows == 2
    assert lake.process().ids() == [7, 7]
    table.merge()
    assert lance.dataset(table.uri).to_table().column("id").to_pylist() == [7, 7]


def test_a_stream_is_loaded_and_checked_batch_by_batch(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    schema = pa.schema([("value", pa.large_string()), ("id", pa.int32())])

    def batches(last: int | None) -> pa.RecordBatchReader:
        rows = [[{"id": n, "value": "x"}] for n in range(50)] + [[{"id": last, "value": "y"}]]
        made = (pa.RecordBatch.from_pylist(one, schema) for one in rows)
        return pa.RecordBatchReader.from_batches(schema, made)

    assert table.bulk_load(batches(3)).duplicates == 1
    assert live(table) == dict.fromkeys(range(50), "x") | {3: "y"}
    with pytest.raises(InvalidInput, match="key column 'id' is null in row 0") as caught:
        table.overwrite(batches(None))
    assert "after 50 rows" in caught.value.__notes__[0]
    assert live(table) == dict.fromkeys(range(50), "x") | {3: "y"}
    # A dataset of Lance is read as it is needed, too.
    other = make_lake(tmp_path).process().table
    other.overwrite(lance.dataset(table.uri))
    assert live(other) == live(table)


def test_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    in_pieces(table, [[row(1), row(2)], [row(2, "later"), row(3)]])
    assert table.bulk_load([row(3, "again")]).replaced == 1
    assert live(db.open_table("t")) == {1: "row 1", 2: "later", 3: "again"}
    table.upsert([row(4)])
    table.overwrite([row(5)])
    assert live(db.open_table("t")) == {5: "row 5"}
    dataset = lance.dataset(table.uri, storage_options=s3.storage_options)
    assert dataset.to_table().column("id").to_pylist() == [5]


SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"id": None}, ("'id'", "null")),
        ({"vector": [1.0, float("nan"), 2.0]}, ("'vector'", "finite")),
        ({"vector": [1.0]}, ("'vector'",)),
        ({"price": None}, ("'price'", "null")),
        ({"color": "red"}, ("'color'",)),
        ({"id": 1.5}, ("'id'",)),
        ({"place": {"x": 70_000}}, ("'place'",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rows_are_checked_as_an_upsert_checks_them(
    tmp_path: Path, wrong: dict[str, Any], words: tuple[str, ...]
) -> None:
    table = penstock.connect(tmp_path).create_table("t", REFUSAL_SCHEMA, primary_key="id")
    table.upsert([GOOD])
    for call in (table.upsert, table.overwrite):
        with refuses(tmp_path, InvalidInput, *words):
            call([GOOD | wrong])
    table.flush()
    table.merge()
    with refuses(tmp_path, InvalidInput, *words):
        table.bulk_load([GOOD | wrong])


@pytest.mark.parametrize("flushed", [True, False], ids=["generation", "log"])
def test_rows_in_front_of_the_base_would_hide_a_load(tmp_path: Path, flushed: bool) -> None:
    lake = make_lake(tmp_path)
    table, loader = lake.process().table, lake.process().table
    plan = plan_bulk(loader._base)
    pieces = pieces_of(loader, plan, [[row(1, "loaded"), row(2, "loaded")]])
    table.upsert([row(1, "written")])
    if flushed:
        table.flush()
    for work in (
        lambda: plan_bulk(loader._base),
        lambda: commit_bulk(loader._base, plan, pieces, flusher(loader)),
        lambda: loader.bulk_load([row(1, "loaded")]),
    ):
        with pytest.raises(InvalidInput, match=r"flush\(recover=True\) and merge\(\)"):
            work()
    assert live(lake.reader()) == {1: "written"}
    loader.flush(recover=True)
    loader.merge()
    assert commit_bulk(loader._base, plan, pieces, flusher(loader)).replaced == 1
    assert live(lake.reader()) == plain(table) == {1: "loaded", 2: "loaded"}


def test_a_load_that_clean_up_may_have_taken_for_left_over_is_not_published(tmp_path: Path) -> None:
    table = make_lake(tmp_path).process().table
    for overwrite in (False, True):
        plan = plan_bulk(table._base, overwrite=overwrite)
        pieces = pieces_of(table, plan, [[row(1)]])
        # By the store's clock: the process that commits need not be the one that planned.
        late = replace(plan, started_ms=plan.started_ms - int(JOB_SECONDS * 1000) - 1)
        with pytest.raises(Outdated, match="do it again"):
            commit_bulk(table._base, late, pieces, flusher(table))
        assert live(table) == {}


def test_columns_that_change_under_a_load(tmp_path: Path) -> None:
    table = make_lake(tmp_path).process().table
    plan = plan_bulk(table._base)
    pieces = pieces_of(table, plan, [[row(1)]])
    table.rename_column("value", "text")
    with pytest.raises(InvalidInput, match=r"columns .* have changed"):
        commit_bulk(table._base, plan, pieces, flusher(table))
    with pytest.raises(InvalidInput, match=r"columns .* have changed"):
        write_piece(table._base, plan, 1, batches_of([row(2)], plan.shape))
    assert table.count() == 0


# --- once, or not at all -----------------------------------------------------------------------


class Died(BaseException):
    """The process ends here."""


FAULTS = {
    "before": Fault.FAIL_BEFORE,
    "after": Fault.FAIL_AFTER,
    "twice": Fault.DUPLICATE,
    "conflict": Fault.HTTP_412,
    "death": Fault.NOTHING,
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["load", "overwrite"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_the_table_is_that_of_before_or_after(
    tmp_path: Path, overwrite: bool, fault: str
) -> None:
    """A fault at one call in some, another one for each kind of fault."""
    first = make_lake(tmp_path)
    begun(first)
    before = dict.fromkeys(range(6), "base")
    if overwrite:
        writer = first.process().table
        writer.upsert([row(6, "flushed"), row(1, "flushed")])
        writer.flush()
        writer.upsert([row(7, "log"), row(2, "log")])
        before |= {1: "flushed", 6: "flushed", 2: "log", 7: "log"}
    new = {1: "new", 8: "new", 9: "newer"}
    after = new if overwrite else before | new
    parts = [[row(1, "new"), row(9, "new")], [row(8, "new"), row(9, "newer")]]

    def die(op: str, found: str) -> None:
        raise Died

    stride = 1 if fault == "conflict" else 7 if overwrite else 3
    nth, struck, failed = 1 + 2 * list(FAULTS).index(fault) % stride, True, 0
    while struck:
        path = tmp_path / f"{nth}" / "t.lance"
        shutil.copytree(first.store.uri, path)
        lake = Lake(open_store(path))
        process = lake.process()
        killer = die if fault == "death" else None
        rule = process.store.inject(FAULTS[fault], nth=nth, after=killer)
        done = False
        try:
            in_pieces(process.table, parts, overwrite=overwrite)
            done = True
        except (PenstockError, Died):
            failed += 1
        struck = bool(rule.fired)
        process.store.clear()
        table = lake.reader()
        assert live(table) in ([after] if done else [before, after]), nth
        if not done:
            in_pieces(table, parts, overwrite=overwrite)
        assert live(table) == after
        table.flush(recover=True)
        table.merge()
        assert plain(table) == live(lake.reader()) == after
        nth += stride
    assert failed > 0 or fault in ("twice", "conflict")


def test_pieces_that_are_committed_again_are_there_once(tmp_path: Path) -> None:
    for name in ("id", None):
        table = make_lake(tmp_path, primary_key=name).process().table
        plan = plan_bulk(table._base)
        pieces = pieces_of(table, plan, [[row(1)], [row(2)]])
        first = commit_bulk(table._base, plan, pieces, flusher(table))
        assert first.version == table.version
        table.bulk_load([row(3)])
        again = commit_bulk(table._base, plan, pieces, flusher(table))
        assert again.rows == 2
        assert sorted(table.to_arrow().column("id").to_pylist()) == [1, 2, 3]


# --- indexes, snapshots and older versions -----------------------------------------------------


@pytest.mark.parametrize("stable", [True, False], ids=["stable", "unstable"])
def test_indexes_find_what_is_there_before_and_after_they_are_built(
    tmp_path: Path, stable: bool
) -> None:
    table = indexed_table(tmp_path, stable=stable)
    table.merge()
    table.build_indexes()
    names = {"flat", "fts", "btree", "bitmap"}

    def check(words: dict[str, list[int]]) -> None:
        for built in (False, True):
            if built:
                table.build_indexes()
                assert table.build_indexes().version is None
            for word, ids in words.items():
                assert sorted(one["id"] for one in table.search(word).limit(900).to_list()) == ids
                by_lance = lance.dataset(table.uri).to_table(full_text_query=word, columns=["id"])
                assert sorted(by_lance.column("id").to_pylist()) == ids
            for number in (0, 5, 299, 310):
                expected = [n for ids in words.values() for n in ids if n == number]
                seen = lance.dataset(table.uri).to_table(filter=f"id = {number}").to_pylist()
                assert [one["id"] for one in seen] == expected
                assert table.count(f"id = {number}") == len(expected)
                for one in seen:
                    nearest = table.search(one["v"]).nprobes(3).limit(1).to_list()
                    assert nearest[0]["id"] == number
            details = table._base.snapshot().details
            for name in names:
                assert details.index_catchup[name] == details.merged_generations

    check({"alpha": list(range(300)), "beta": []})
    table.bulk_load(indexed_rows([*range(5, 10), *range(300, 320), 310], "beta", 1))
    beta = [*range(5, 10), *range(300, 320)]
    check({"alpha": [n for n in range(300) if n not in beta], "beta": beta})
    table.upsert(indexed_rows(range(100), "alpha", 2))
    table.overwrite(indexed_rows([5, 6, 310], "gamma", 3))
    check({"alpha": [], "beta": [], "gamma": [5, 6, 310]})
    table.overwrite([])
    check({"alpha": [], "beta": [], "gamma": []})
    table.bulk_load(indexed_rows(range(290, 311), "beta", 4))
    check({"alpha": [], "beta": list(range(290, 311)), "gamma": []})
    table.gc(retain_seconds=0, orphan_seconds=0)
    check({"alpha": [], "beta": list(range(290, 311)), "gamma": []})


def test_older_versions_and_eventual_reads(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    begun(lake)
    table = lake.process().table
    table.upsert([row(30, "flushed")])
    table.flush()
    before = table.snapshot()
    table.overwrite([row(3, "new")])
    old = table.to_arrow(version=before).to_pylist()
    assert {one["id"] for one in old} == {*range(6), 30}
    assert table.to_arrow(consistency="eventual").to_pylist() == [row(3, "new")]
    table.upsert([row(31, "later")])
    table.flush()
    table.snapshot()
    assert table.count(consistency="eventual") == 2
    table.overwrite([])
    assert table.count(consistency="eventual") == table.count() == 0


def test_regions_of_every_spec_are_overwritten(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    writer = lake.process().table
    writer.upsert([row(n, "old spec") for n in range(8)])
    writer.set_regions(penstock.bucket("id", 3))
    other = lake.process().table
    other.upsert([row(n, "new spec") for n in range(4, 12)])
    other.flush()
    assert other.overwrite([row(5, "new")]).rows == 1
    other.upsert([row(6, "later")])
    other.flush()
    other.merge()
    assert live(lake.reader()) == plain(other) == {5: "new", 6: "later"}
    assert mark_primary_key(other.schema, ["id"]).equals(other.schema)
    assert uuid.UUID(str(other.status().regions[0].region_id))
