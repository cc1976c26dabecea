"""Bulk loads and overwrites: any number of pieces, one version, each key once, next to anybody."""

from __future__ import annotations

import pickle
import random
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake, Process, make_lake, row
from tests.memwal.changing import KEYS, Model, found, full, key, schema_of
from tests.memwal.indexed_tables import make as indexed_table
from tests.memwal.indexed_tables import rows as indexed_rows
from tests.refusals import GOOD, refuses
from tests.refusals import SCHEMA as REFUSAL_SCHEMA
from tests.s3_server import S3Server

import penstock
from penstock import InvalidInput, PenstockError, Table
from penstock.errors import CommitConflict
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.bulk import (
    BulkPiece,
    BulkPlan,
    BulkReport,
    batches_of,
    commit_bulk,
    plan_bulk,
    write_piece,
)
from penstock.memwal.compact import compact_one, plan_compaction
from penstock.memwal.doctor import Severity
from penstock.memwal.gc_limits import JOB_SECONDS, Outdated
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.storage.faults import Fault
from penstock.storage.open import open_store

NEXT_VERSION = "_versions/[0-9]*.manifest"
Found = dict[int, Any]


def plain(table: Table) -> Found:
    """What a Lance user sees who knows nothing of regions."""
    dataset = lance.dataset(table.uri)
    dataset.validate()
    rows = dataset.to_table().to_pylist()
    by_key = {one["id"]: one["value"] for one in rows}
    assert len(by_key) == len(rows)
    return by_key


def live(table: Table) -> Found:
    rows = table.to_arrow().to_pylist()
    by_key = {one["id"]: one["value"] for one in rows}
    assert len(by_key) == len(rows) == table.count()
    return by_key


def check_health(table: Table) -> None:
    """Nothing is broken; work may be due."""
    findings = table.doctor(deep=True).findings
    assert not [one for one in findings if one.severity is Severity.SICK], findings


def pieces_of(table: Table, plan: BulkPlan, parts: Sequence[Any]) -> list[BulkPiece]:
    """Written as by other processes: what they get and give is sent, and comes in any order."""
    sent: BulkPlan = pickle.loads(pickle.dumps(plan))
    pieces = [
        write_piece(table._base, sent, number, batches_of(part, plan.shape))
        for number, part in enumerate(parts)
    ]
    return list(reversed(pickle.loads(pickle.dumps(pieces))))


def in_pieces(table: Table, parts: Sequence[Any], *, overwrite: bool = False) -> BulkReport:
    plan = plan_bulk(table._base, overwrite=overwrite)
    return commit_bulk(table._base, plan, pieces_of(table, plan, parts), flusher(table))


def flusher(table: Table) -> Callable[[], None]:
    return partial(table.flush, recover=True)


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


def begun(lake: Lake) -> None:
    table = lake.process().table
    table.upsert([row(n, "base") for n in range(6)])
    table.flush()
    table.merge()


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
