"""Merging data in by what it matches: the same as with a dict, whatever layer the rows are in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.failures.lake import make_lake, row
from tests.memwal.changing import (
    KEYS,
    Key,
    Layer,
    Model,
    Row,
    bounds,
    found,
    full,
    key,
    layered,
    layers,
    merged,
    schema_of,
)
from tests.refusals import GOOD, refuses
from tests.refusals import SCHEMA as REFUSAL_SCHEMA
from tests.s3_server import S3Server

import penstock
from penstock import InvalidInput
from penstock.memwal.merge_insert import MergeInsertReport

# --- against a dict ----------------------------------------------------------------------------

CONDITIONS: dict[str | None, Callable[[Row, Row], bool]] = {
    None: lambda source, target: True,
    "source.n > target.n": lambda source, target: (
        None not in (source["n"], target["n"]) and source["n"] > target["n"]
    ),
    "target.name = 'it''s' OR SOURCE.N IS NULL": lambda source, target: (
        target["name"] == "it's" or source["n"] is None
    ),
}
SWEEPS: dict[str | None, Callable[[Row], bool]] = {
    None: lambda row: True,
    "price < 1": lambda row: row["price"] is not None and row["price"] < 1,
}
clauses = st.fixed_dictionaries(
    {
        "matched": st.sampled_from(["keep", "delete", *CONDITIONS]),
        "insert": st.booleans(),
        "sweep": st.sampled_from(["keep", *SWEEPS]),
    }
).filter(lambda chosen: chosen != {"matched": "keep", "insert": False, "sweep": "keep"})
numbers = st.integers(0, 20)
rows = st.lists(
    st.tuples(
        numbers,
        st.none() | st.integers(-5, 20),
        st.none() | st.integers(-8, 8).map(lambda n: n / 2),
        st.sampled_from(["a", "it's"]),
    ),
    max_size=10,
    unique_by=lambda one: one[0],
)


def run(builder: Any, chosen: dict[str, Any], data: Any) -> MergeInsertReport:
    if chosen["matched"] == "delete":
        builder = builder.when_matched_delete()
    elif chosen["matched"] != "keep":
        builder = builder.when_matched_update_all(chosen["matched"])
    if chosen["insert"]:
        builder = builder.when_not_matched_insert_all()
    if chosen["sweep"] != "keep":
        builder = builder.when_not_matched_by_source_delete(chosen["sweep"])
    report: MergeInsertReport = builder.execute(data)
    return report


def expected(
    model: Model, source: list[Row], on: list[str], chosen: dict[str, Any], nulls: Row
) -> tuple[Model, MergeInsertReport]:
    """What has to come of it, row by row."""

    def matches(one: Row, other: Row) -> bool:
        return all(one[name] is not None and one[name] == other[name] for name in on)

    after: Model = dict(model)
    inserted = updated = deleted = 0
    for one in source:
        targets: list[Key] = [k for k, target in model.items() if matches(one, target)]
        for target in targets:
            if chosen["matched"] == "delete":
                del after[target]
                deleted += 1
            elif chosen["matched"] != "keep" and CONDITIONS[chosen["matched"]](one, model[target]):
                after[target] = {**model[target], **one}
                updated += 1
        if not targets and chosen["insert"]:
            after[key(one)] = {**nulls, **one}
            inserted += 1
    if chosen["sweep"] != "keep":
        for k, target in model.items():
            unmatched = not any(matches(one, target) for one in source)
            if unmatched and SWEEPS[chosen["sweep"]](target):
                del after[k]
                deleted += 1
    return after, MergeInsertReport(inserted, updated, deleted)


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    kind=st.sampled_from(sorted(KEYS)),
    given=layers,
    source=rows,
    chosen=clauses,
    subset=st.booleans(),
    written_rows=st.sampled_from([10_000, 0]),
)
def test_a_merge_insert_by_key_is_that_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    given: list[Layer],
    source: list[Any],
    chosen: dict[str, Any],
    subset: bool,
    written_rows: int,
) -> None:
    table, model = layered(tmp_path_factory.mktemp("t"), kind, given)
    data = [full(kind, *one) for one in source]
    lacking = {"price", "vector"} if subset else set()
    data = [{name: value for name, value in one.items() if name not in lacking} for one in data]
    on = [field.name for field in KEYS[kind]]
    names = [name for name in schema_of(kind).names if name not in lacking]
    frame = pa.Table.from_pylist(data, pa.schema([schema_of(kind).field(name) for name in names]))
    after, report = expected(model, data, on, chosen, {"price": None, "vector": None})
    with bounds(written_rows):
        assert run(table.merge_insert(), chosen, frame) == report
    assert found(table) == after
    assert merged(table) == after


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    kind=st.sampled_from(["int", "none"]),
    given=layers,
    source=st.lists(
        st.tuples(st.sampled_from(["a", "b", "it's", "", None]), st.integers(-5, 20)),
        max_size=4,
        unique_by=lambda one: one[0],
    ),
    chosen=clauses,
)
def test_a_merge_insert_by_another_column_is_that_of_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    given: list[Layer],
    source: list[tuple[str | None, int]],
    chosen: dict[str, Any],
) -> None:
    """Several rows may match one of the data; null matches none. With a key and without."""
    path = tmp_path_factory.mktemp("t")
    keyed, model = layered(path, "int", given)
    data: list[Row] = [{"name": name, "n": n} for name, n in source]
    if chosen["insert"]:
        # New rows need a key, and those that match must have theirs.
        names = {row["name"] for row in model.values()}
        data = [
            {**one, "id": 100 + place}
            for place, one in enumerate(data)
            if one["name"] not in names or one["name"] is None
        ]
    after, report = expected(model, data, ["name"], chosen, {"price": None, "vector": None})
    given_names = ["id", "n", "name"] if chosen["insert"] else ["n", "name"]
    schema = pa.schema([schema_of("int").field(name) for name in given_names])
    frame = pa.Table.from_pylist(data, schema)
    if kind == "int":
        assert run(keyed.merge_insert("name"), chosen, frame) == report
        assert found(keyed) == after == merged(keyed)
        return
    table = penstock.connect(path / "keyless").create_table("t", schema_of("int"))
    half = len(model) // 2
    table.upsert(list(model.values())[:half])
    table.flush()
    table.upsert(list(model.values())[half:])
    assert run(table.merge_insert("name"), chosen, frame) == report
    assert found(table) == after == merged(table)


# --- stories -----------------------------------------------------------------------------------


def test_find_or_create_update_and_replace(tmp_path: Path) -> None:
    table = make_lake(tmp_path).process().table
    table.upsert([row(1, "one"), row(2, "two")])
    merge = table.merge_insert("id")
    assert merge.when_not_matched_insert_all().execute([row(2, "2"), row(3, "3")]).inserted == 1
    upsert = merge.when_matched_update_all().when_not_matched_insert_all()
    report = upsert.execute(pa.table({"id": [3, 4], "value": ["three", "four"]}))
    assert str(report) == "1 inserted, 1 updated, 0 deleted"
    replace = upsert.when_not_matched_by_source_delete("id > 1")
    assert replace.execute([row(4, "FOUR")]) == MergeInsertReport(0, 1, 2)
    rows = {one["id"]: one["value"] for one in table.to_arrow().to_pylist()}
    assert rows == {1: "one", 4: "FOUR"}
    assert merge.when_not_matched_by_source_delete().execute([]) == MergeInsertReport(0, 0, 2)
    assert table.count() == 0


def test_what_somebody_deleted_meanwhile_stays_deleted(tmp_path: Path) -> None:
    """Columns that the data lacks are read when a row is written: there may be no row any more."""
    lake = make_lake(tmp_path, schema=schema_of("int"))
    process = lake.process()
    process.table.upsert([full("int", i, i, 1.0, "a") for i in range(4)])
    process.table.flush()
    process.table.merge()
    other = lake.reader()
    reads = 0
    access = process.table.merge_insert().when_matched_update_all()
    read = access._access.read

    def deleting(work: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 2:
            other.delete(keys=[2])
        return read(work)

    access._access.read = deleting  # type: ignore[method-assign]
    report = access.execute(pa.table({"id": [1, 2], "n": [50, 50]}))
    assert report.updated == 1
    rows = {one["id"]: one["n"] for one in process.table.to_arrow().to_pylist()}
    assert rows == {0: 0, 1: 50, 3: 3}


def test_a_merge_insert_on_s3(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("lake"), s3.storage_options)
    table = db.create_table("t", schema_of("int"), primary_key="id")
    table.upsert([full("int", i, i, 1.0, "a") for i in range(10)])
    table.flush()
    table.merge()
    data = pa.table({"id": range(5, 15), "n": range(105, 115)})
    builder = table.merge_insert().when_matched_update_all("source.id > 6 AND target.n < 9")
    report = builder.when_not_matched_insert_all().execute(data)
    assert report == MergeInsertReport(inserted=5, updated=2)
    again = {
        one["id"]: (one["n"], one["price"]) for one in db.open_table("t").to_arrow().to_pylist()
    }
    kept = {i: (i, 1.0) for i in (0, 1, 2, 3, 4, 5, 6, 9)}
    assert again == kept | {7: (107, 1.0), 8: (108, 1.0)} | {
        i: (i + 100, None) for i in range(10, 15)
    }


# --- refusals ----------------------------------------------------------------------------------


def test_what_cannot_be_merged_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", REFUSAL_SCHEMA, primary_key="id")
    table.upsert([GOOD, {**GOOD, "id": 2, "name": "two"}])
    table.flush()
    table.merge()
    upsert = table.merge_insert().when_matched_update_all().when_not_matched_insert_all()
    by_name = table.merge_insert("name").when_matched_update_all().when_not_matched_insert_all()
    refused: list[tuple[Any, Any, tuple[str, ...]]] = [
        (table.merge_insert(), [GOOD], ("nothing to do", "when_matched_update_all")),
        (upsert.when_matched_delete(), [GOOD], ("not both",)),
        (upsert, [GOOD, {**GOOD, "name": "again"}], ("several rows", "'id': 1")),
        (upsert, [{"name": "x", "price": 1.0}], ("lacks column 'id'",)),
        (upsert, [{"id": 1, "name": "x"}], ("lacks column 'price'", "inserted")),
        (upsert, [{**GOOD, "price": None}], ("price", "null")),
        (upsert, [{**GOOD, "id": None}], ("id", "null")),
        (upsert, [{**GOOD, "nope": 1}], ("nope", "the table has")),
        (upsert, pa.table({"id": [1], "price": ["x"]}), ("price", "double")),
        (upsert, 17, ("not understood",)),
        (by_name, [{**GOOD, "id": 3}], ("another key", "leave the key columns out")),
        (by_name, [{**GOOD, "id": 2, "name": "new"}], ("there already", "'id': 2")),
        (by_name, [{**GOOD, "id": 8, "name": n} for n in "xy"], ("there already", "twice")),
        (table.merge_insert("price").when_matched_delete(), [GOOD], ("price", "double")),
        (table.merge_insert("nope").when_matched_delete(), [GOOD], ("nope", "the table has")),
        (table.merge_insert([]).when_matched_delete(), [GOOD], ("on must",)),
    ]
    wrong = {
        "price > 3": ("price", "source.price"),
        "source.nope > 3": ("source has no column 'nope'",),
        "target.price + 1": ("yes or no",),
        "1 = 1": ("source.x",),
        "source.price > now()": ("now()",),
        "source.price >": ("condition",),
    }
    for sql, words in wrong.items():
        refused.append((table.merge_insert().when_matched_update_all(sql), [GOOD], words))
    refused.append(
        (upsert.when_not_matched_by_source_delete("nope = 1"), [GOOD], ("nope", "filter"))
    )
    for builder, data, words in refused:
        with refuses(tmp_path, InvalidInput, *words):
            builder.execute(data)
    keyless = penstock.connect(tmp_path).create_table("keyless", REFUSAL_SCHEMA)
    with refuses(tmp_path, InvalidInput, "no primary key", "on="):
        keyless.merge_insert().when_matched_delete().execute([GOOD])


def test_a_table_without_a_key_takes_rows_from_the_data(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("value", pa.string())])
    lake = make_lake(tmp_path, schema=schema, primary_key=None)
    other, table = lake.process().table, lake.process().table
    other.upsert([row(1, "a"), row(1, "b"), row(2, "c")])
    upsert = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    assert upsert.execute([row(1, "new"), row(3, "d")]) == MergeInsertReport(1, 2, 0)
    assert upsert.execute([row(1, "new"), row(3, "d")]) == MergeInsertReport(0, 3, 0)
    assert table.merge_insert("id").when_matched_delete().execute([row(2)]).deleted == 1
    table.flush()
    table.merge()
    rows = [(one["id"], one["value"]) for one in lance.dataset(table.uri).to_table().to_pylist()]
    assert sorted(rows) == [(1, "new"), (1, "new"), (3, "d")]
