"""Deleting and updating by a condition: the same whatever layer a row is in, next to anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lance.optimize import Compaction
from tests.failures.lake import Lake, Process, make_lake
from tests.memwal.changing import KEYS, Layer, Row, bounds, found, layered, layers, merged
from tests.refusals import GOOD, refuses
from tests.refusals import SCHEMA as REFUSAL_SCHEMA
from tests.s3_server import S3Server

import penstock
from penstock import InvalidInput, Table
from penstock.errors import StorageError
from penstock.memwal.base_table import BaseTable
from penstock.storage.faults import Fault
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams

NEXT_VERSION = "_versions/[0-9]*.manifest"
COUNTED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("n", pa.int64()),
        pa.field("body", pa.string()),
    ]
)

# --- what comes out ----------------------------------------------------------------------------

CONDITIONS: list[tuple[str, Callable[[Row], bool]]] = [
    ("true", lambda row: True),
    ("false", lambda row: False),
    ("n > 5", lambda row: row["n"] is not None and row["n"] > 5),
    ("NOT (n > 5)", lambda row: row["n"] is not None and not row["n"] > 5),
    ("price IS NULL OR name = 'it''s'", lambda row: row["price"] is None or row["name"] == "it's"),
    ("name IN ('a', '') AND n % 2 = 0", lambda row: row["name"] in ("a", "") and even(row["n"])),
    (
        "price * 2 < n",
        lambda row: None not in (row["price"], row["n"]) and row["price"] * 2 < row["n"],
    ),
]
VALUES: list[tuple[dict[str, Any], Callable[[Row], Row]]] = [
    ({"n": "n + 1"}, lambda row: {"n": plus(row["n"], 1)}),
    (
        {"price": None, "name": "upper(name)"},
        lambda row: {"price": None, "name": upper(row["name"])},
    ),
    ({"vector": [9, 9], "n": 7}, lambda row: {"vector": [9.0, 9.0], "n": 7}),
    ({"price": "n", "n": "cast(floor(price) AS bigint)"}, lambda row: swapped(row)),
    ({"name": "'it''s'"}, lambda row: {"name": "it's"}),
    (
        {"price": "CASE WHEN n IS NULL THEN -1 ELSE n * 0.5 END", "n": "coalesce(n, 0)"},
        lambda row: {"price": -1.0 if row["n"] is None else row["n"] * 0.5, "n": row["n"] or 0},
    ),
]


def even(n: int | None) -> bool:
    return n is not None and n % 2 == 0


def plus(n: int | None, more: int) -> int | None:
    return None if n is None else n + more


def upper(text: str | None) -> str | None:
    return None if text is None else text.upper()


def swapped(row: Row) -> Row:
    price = row["price"]
    return {
        "price": None if row["n"] is None else float(row["n"]),
        "n": None if price is None else int(np.floor(price)),
    }


change = st.tuples(
    st.sampled_from(CONDITIONS),
    st.none() | st.sampled_from(VALUES),
    st.sampled_from([10_000, 2, 0]),
    st.sampled_from([0.0, 0.4, 2.0]),
)


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    kind=st.sampled_from(sorted(KEYS)), given=layers, steps=st.lists(change, min_size=1, max_size=3)
)
def test_a_change_of_any_layers_is_that_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory, kind: str, given: list[Layer], steps: list[Any]
) -> None:
    table, model = layered(tmp_path_factory.mktemp("t"), kind, given)
    for (sql, matches), values, written_rows, column_share in steps:
        chosen = [key for key, row in model.items() if matches(row)]
        with bounds(written_rows, column_share):
            if values is None:
                changed = table.delete(where=sql)
                model = {key: row for key, row in model.items() if key not in chosen}
            else:
                report = table.update(where=sql, values=values[0])
                changed = report.rows
                assert report.rewritten <= changed
                assert (report.version is None) == (report.rewritten == 0)
                model |= {key: {**model[key], **values[1](model[key])} for key in chosen}
        assert changed == len(chosen)
        assert found(table) == model
    assert merged(table) == model
    assert found(table) == model


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["columns", "rows"])
def test_rows_of_the_base_that_are_superseded_are_left_alone(tmp_path: Path, share: float) -> None:
    table = penstock.connect(tmp_path).create_table("t", COUNTED, primary_key="id")
    table.upsert([{"id": i, "n": i} for i in range(6)])
    table.flush()
    table.merge()
    table.upsert([{"id": 4, "n": 100}])
    table.delete(keys=[5])
    with bounds(0, share):
        report = table.update(where="n < 50", values={"n": "n + 10"})
    assert (report.rows, report.rewritten) == (4, 4)
    # Whoever reads the base alone finds what was there before the row was superseded.
    plain = {row["id"]: row["n"] for row in lance.dataset(table.uri).to_table().to_pylist()}
    assert plain == {i: i + 10 for i in range(4)} | {4: 4, 5: 5}
    with bounds(0, share):
        assert table.delete(where="n < 50") == 4
    assert lance.dataset(table.uri).to_table(columns=["id"])["id"].to_pylist() == [4, 5]
    assert table.to_arrow()["n"].to_pylist() == [100]


def test_a_table_without_a_key_is_merged_and_then_changed(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("n", pa.int64())])
    lake = make_lake(tmp_path, schema=schema, primary_key=None)
    other, table = lake.process().table, lake.process().table
    other.upsert([{"id": i, "n": i} for i in range(6)])
    other.flush()
    other.upsert([{"id": 3, "n": 30}, {"id": 3, "n": 30}])  # in the log of somebody else
    table.upsert([{"id": 7, "n": None}])
    report = table.update(where="id >= 3", values={"n": "n + 1"})
    assert (report.rows, report.rewritten) == (6, 6)
    assert table.delete(where="n < 2 OR n IS NULL") == 3
    expected = [(2, 2), (3, 4), (3, 31), (3, 31), (4, 5), (5, 6)]
    for rows in (table.to_arrow(), lake.reader().to_arrow(), lance.dataset(table.uri).to_table()):
        assert sorted((row["id"], row["n"]) for row in rows.to_pylist()) == expected
    with pytest.raises(InvalidInput, match="primary key"):
        table.delete(keys=[3])


def test_changes_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", COUNTED, primary_key="id")
    table.upsert([{"id": i, "n": i, "body": "old"} for i in range(40)])
    table.flush()
    table.merge()
    table.upsert([{"id": i, "n": i, "body": "newer"} for i in range(30, 50)])
    with bounds(5):
        assert table.update(where="n >= 10", values={"n": "n * 2"}).rewritten == 20
        assert table.delete(where="n < 5") == 5
    assert table.update(where="id = 49", values={"body": "'last'"}).version is None
    expected = {i: (i if i < 10 else 2 * i) for i in range(5, 50)}
    rows = db.open_table("t").to_arrow().to_pylist()
    assert {row["id"]: row["n"] for row in rows} == expected
    assert {row["id"] for row in rows if row["body"] == "last"} == {49}


# --- what is rewritten, and what indexes say of it ---------------------------------------------


def indexed_table(path: Path) -> Table:
    schema = pa.schema([*COUNTED, pa.field("vector", pa.list_(pa.float32(), 4))])
    table = penstock.connect(path).create_table("t", schema, primary_key="id")
    rng = np.random.default_rng(1)
    rows = [
        {"id": i, "n": i, "body": f"river{i} old", "vector": rng.normal(size=4)} for i in range(400)
    ]
    for half in (rows[:200], rows[200:]):
        table.upsert(half)
        table.flush()
        table.merge()
    table.create_index("vector", "ivf_flat", num_partitions=4)
    table.create_index("body", "fts")
    return table


def files(table: Table) -> list[list[tuple[str, list[int]]]]:
    fragments = lance.dataset(table.uri).get_fragments()
    return [[(file.path, list(file.fields)) for file in f.metadata.files] for f in fragments]


def coverage(table: Table) -> dict[str, set[int]]:
    indexes = lance.dataset(table.uri).describe_indices()
    return {i.name: {n for s in i.segments for n in s.fragment_ids} for i in indexes}


def test_only_the_columns_that_change_are_written_anew(tmp_path: Path) -> None:
    table = indexed_table(tmp_path)
    before, covered = files(table), coverage(table)
    with bounds(0):
        report = table.update(where="id < 205", values={"n": "-n"})
    assert report.rewritten == 205
    after = files(table)
    # Most rows of the first fragment: a file with the one column, the other stays for the rest.
    (old, kept), (new, fields) = after[0]
    assert old == before[0][0][0]
    assert kept == [0, -2, 2, 3]
    assert fields == [1]
    assert new not in {path for fragment in before for path, _ in fragment}
    # Five rows of the second: deleted there, and whole in a new fragment.
    assert after[1] == before[1]
    assert len(after) == 3
    assert lance.dataset(table.uri).get_fragments()[1].num_deletions == 5
    assert coverage(table) == covered, "the indexes of the other columns are as good as before"
    assert table.count("n < 0") == 204
    assert table.search(np.zeros(4), "vector").limit(400).to_arrow().num_rows == 400


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["most rows", "few rows"])
def test_searches_find_new_values_and_not_the_old_ones(tmp_path: Path, share: float) -> None:
    table = indexed_table(tmp_path)
    table.create_index("n", "btree")
    new = [100.0, 100.0, 100.0, 100.0]
    old = table.get(10)["vector"]  # type: ignore[index]
    with bounds(0, share):
        table.update(where="n < 50", values={"n": "n + 1000", "body": "'ocean'", "vector": new})

    def check() -> None:
        assert table.count("n = 10") == 0
        assert table.count("n = 1010") == 1
        assert table.search("river10").to_list() == []
        assert table.search("ocean").limit(100).to_arrow().num_rows == 50
        assert table.search("old").limit(400).to_arrow().num_rows == 350
        near = table.search(new, "vector").limit(50).to_arrow()
        assert sorted(near["id"].to_pylist()) == list(range(50))
        assert 10 not in table.search(old, "vector").limit(5).to_arrow()["id"].to_pylist()
        plain = lance.dataset(table.uri)
        assert plain.to_table(filter="n = 10").num_rows == 0
        assert plain.to_table(filter="n = 1010").num_rows == 1
        assert plain.to_table(full_text_query="river10").num_rows == 0
        assert plain.to_table(full_text_query="ocean", limit=100).num_rows == 50

    check()
    # An index that is extended must not find the old values by ids that are still in use.
    lance.dataset(table.uri).optimize.optimize_indices(num_indices_to_merge=0)
    check()


# --- next to others ----------------------------------------------------------------------------


def counted(lake: Lake) -> dict[int, int]:
    return {row["id"]: row["n"] for row in lake.reader().to_arrow().to_pylist()}


def two_fragments(lake: Lake, *, fresh: bool = True) -> Process:
    """Rows 0 to 19 in the base, in two fragments; 18 to 29 in a generation before it."""
    process = lake.process()
    for ids in (range(10), range(10, 20)):
        process.table.upsert([{"id": i, "n": 0, "body": "old"} for i in ids])
        process.table.flush()
        process.table.merge()
    if fresh:
        process.table.upsert([{"id": i, "n": 0, "body": "new"} for i in range(18, 30)])
        process.table.flush()
    return process


def update_other_rows(lake: Lake) -> None:
    lake.reader().update(where="id IN (1, 3)", values={"n": "n + 100"})


def delete_other_rows(lake: Lake) -> None:
    lake.reader().delete(where="id IN (1, 3)")


def merge(lake: Lake) -> None:
    assert lake.reader().merge().generations == 1


def compact(lake: Lake) -> None:
    lance.dataset(lake.store.uri).optimize.compact_files()


def compact_and_merge(lake: Lake) -> None:
    compact(lake)
    merge(lake)


OTHERS = {
    update_other_rows: dict.fromkeys((1, 3), 100),
    delete_other_rows: dict.fromkeys((1, 3)),
    merge: {},
    compact: {},
    compact_and_merge: {},
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
@pytest.mark.parametrize("share", [0.0, 2.0], ids=["columns", "rows"])
def test_whoever_commits_in_between_both_changes_are_there_once(
    tmp_path: Path, other: Callable[[Lake], None], share: float
) -> None:
    """The other one commits in the very moment before ours: to fragments that we change, too."""
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)
    process.store.hook(
        op="put_if_absent", key=NEXT_VERSION, nth=1, times=1, before=lambda *_: other(lake)
    )
    with bounds(0, share):
        report = process.table.update(where="id % 2 = 0", values={"n": "n + 1"})
    assert report.rows == 15
    expected = {i: int(i % 2 == 0) for i in range(30)} | OTHERS[other]
    expected = {i: n for i, n in expected.items() if n is not None}
    assert counted(lake) == expected
    process.table.flush()
    process.table.merge()
    rows = lance.dataset(lake.store.uri).to_table().to_pylist()
    assert len(rows) == len(expected)
    assert {row["id"]: row["n"] for row in rows} == expected == counted(lake)


def test_rows_that_are_merged_after_the_version_is_made_are_still_changed_once(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)

    def merge_and_clean(*_: object) -> None:
        merge(lake)
        for flushed in lake.manifest().flushed_generations:
            lake.store.delete_prefix(f"_mem_wal/{lake.manifest().region_id}/{flushed.path}")

    process.store.hook(op="put_if_absent", key=NEXT_VERSION, nth=1, times=1, after=merge_and_clean)
    with bounds(0):
        report = process.table.update(where="true", values={"n": "n + 1"})
    assert (report.rows, report.rewritten) == (30, 18)
    assert counted(lake) == dict.fromkeys(range(30), 1)


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.FAIL_BEFORE, Fault.DUPLICATE])
def test_a_version_whose_answer_is_lost_is_not_made_twice(tmp_path: Path, fault: Fault) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)
    store = process.store

    def fail_the_look_at_it(*_: object) -> None:
        store.inject(Fault.FAIL_BEFORE, op="exists", key=NEXT_VERSION, times=1)

    store.inject(fault, op="put_if_absent", key=NEXT_VERSION, times=1)
    store.hook(op="put_if_absent", key=NEXT_VERSION, times=1, before=fail_the_look_at_it)
    with bounds(0):
        process.table.update(where="true", values={"n": "n + 1"})
    assert counted(lake) == dict.fromkeys(range(30), 1)


def test_a_change_that_was_cut_short_is_finished_by_doing_it_again(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)
    process.store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key="*/wal/*")
    with bounds(0):
        with pytest.raises((StorageError, penstock.WriterPoisoned)):
            process.table.delete(where="id >= 10")
        assert sorted(counted(lake)) == [*range(10), *range(18, 30)]
        assert lake.reader().delete(where="id >= 10") == 12
    assert sorted(counted(lake)) == list(range(10))


def test_the_last_writer_of_a_row_wins(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)
    other = lake.process().table
    process.store.hook(
        op="put_if_absent",
        key=NEXT_VERSION,
        nth=1,
        times=1,
        before=lambda *_: other.upsert([{"id": 4, "n": 500, "body": "in between"}]),
    )
    with bounds(0):
        process.table.update(where="id < 10", values={"n": "n + 1"})
    assert counted(lake)[4] == 500, "the upsert came after the row was read"
    with bounds(0):
        process.table.update(where="id = 4", values={"n": "n + 1"})
    assert counted(lake)[4] == 501
    process.table.flush()
    process.table.merge()
    assert counted(lake) == {i: int(i < 10) for i in range(30)} | {4: 501}


def test_a_compaction_that_began_before_a_change_gives_way_to_it(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake)
    dataset = lance.dataset(lake.store.uri)
    plan = Compaction.plan(dataset, options={})
    rewrites = [task.execute(dataset) for task in plan.tasks]
    assert rewrites
    with bounds(0):
        process.table.update(where="id < 15", values={"n": "n + 1"})
    with pytest.raises(Exception, match=r"(?i)conflict"):
        Compaction.commit(dataset, rewrites)
    compact(lake)
    assert counted(lake) == {i: int(i < 15) for i in range(30)}


def test_failure_24_many_writers_of_one_fragment_never_see_a_conflict(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    two_fragments(lake)
    patient = Seams(backoff=Backoff(races=200))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            table = Table("t", BaseTable(lake.store, None, patient))
            for _ in range(3):
                table.update(where=f"id % 4 = {number}", values={"n": "n + 1"})
            table.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with bounds(1, 0.3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert counted(lake) == dict.fromkeys(range(30), 3)


def test_what_was_written_in_vain_is_removed(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=COUNTED)
    process = two_fragments(lake, fresh=False)
    process.store.hook(
        op="put_if_absent",
        key=NEXT_VERSION,
        nth=1,
        times=1,
        before=lambda *_: update_other_rows(lake),
    )
    with bounds(0):
        process.table.update(where="id % 2 = 0", values={"n": "n + 1"})
    process.table.flush()
    process.table.merge()
    on_disk = {path.name for path in (Path(lake.store.uri) / "data").iterdir()}
    named = set()
    for version in range(1, lance.dataset(lake.store.uri).version + 1):
        fragments = lance.dataset(lake.store.uri, version=version).get_fragments()
        named |= {file.path for fragment in fragments for file in fragment.metadata.files}
    assert on_disk == named


# --- refusals ----------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("true", {"nope": 1}, ("nope", "the table has")),
    ("true", {"id": 5}, ("id", "primary key", "upsert")),
    ("true", {}, ("values", "price * 2")),
    ("true", [("price", 1)], ("values",)),
    ("true", {"price": None}, ("price", "null")),
    ("true", {"price": "NULL"}, ("price", "null")),
    ("true", {"price": "at"}, ("price", "cast")),
    ("true", {"name": 5}, ("name", "string")),
    ("true", {"name": "hello"}, ("name", "hello", "single quotes")),
    ("true", {"vector": [1.0, 2.0]}, ("vector",)),
    ("true", {"vector": [1.0, 2.0, float("nan")]}, ("vector", "finite")),
    ("true", {"id2": "sum(id)"}, ("id2",)),
    ("true", {"ratio": "sum(ratio)"}, ("ratio", "several rows")),
    ("true", {"at": "now()"}, ("at", "constant")),
    ("true", {"price": "price / ("}, ("price",)),
    ("true", {"name": "'a'; drop"}, ("name", ";")),
    ("true", {"price": "nullif(price, 1.5)"}, ("price", "null")),
    ("true", {"sizes": "[id, 3000000000]"}, ("sizes", "int32")),
    ("nope > 3", {"price": 1.0}, ("nope",)),
    ("", {"price": 1.0}, ("filter",)),
    (None, {"price": 1.0}, ("where", "true")),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("stage", "share"), [("memory", 0.0), ("base", 0.0), ("base", 2.0)])
def test_what_cannot_be_set_is_refused_and_nothing_changes(
    tmp_path: Path, stage: str, share: float
) -> None:
    table = penstock.connect(tmp_path).create_table("t", REFUSAL_SCHEMA, primary_key="id")
    others = [{**GOOD, "id": i, "price": float(i), "name": "two"} for i in range(2, 9)]
    for rows in (others, [GOOD]):  # the one that is wrong comes last
        table.upsert(rows)
        if stage == "base":
            table.flush()
            table.merge()
    with bounds(0, share):
        for where, values, words in REFUSED:
            with refuses(tmp_path, InvalidInput, *words):
                table.update(where=where, values=values)
        with refuses(tmp_path, InvalidInput, "where"):
            table.delete()
        with refuses(tmp_path, InvalidInput, "one of the two"):
            table.delete(keys=[1], where="true")
        with refuses(tmp_path, InvalidInput, "nope"):
            table.delete(where="nope = 1")
    assert table.count() == 8


def test_sums_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fields = [("id", pa.int64()), ("large", pa.int64()), ("small", pa.int8())]
    table = penstock.connect(tmp_path).create_table("t", pa.schema(fields), primary_key="id")
    table.upsert([{"id": i, "large": 2**63 - 2 - i, "small": 100 + i} for i in range(3)])
    with refuses(tmp_path, InvalidInput, "small", "128"):
        table.update(where="true", values={"small": "small + 26"})
    for wrapped in ("large + 2", "large * 2", "-large - large"):
        with refuses(tmp_path, InvalidInput, "large", "too large"):
            table.update(where="true", values={"large": wrapped})
    values = {"small": "small + small - 100", "large": "large + 1"}
    assert table.update(where="true", values=values).rows == 3
    rows = sorted(table.to_arrow().to_pylist(), key=lambda row: int(row["id"]))
    assert [row["small"] for row in rows] == [100, 102, 104]
    assert [row["large"] for row in rows] == [2**63 - 1, 2**63 - 2, 2**63 - 3]
