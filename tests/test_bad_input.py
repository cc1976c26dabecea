"""Whatever is wrong at the door: a clear error that says what to do, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from tests.refusals import GOOD, SCHEMA, refuses

import penstock
from penstock import (
    InvalidInput,
    NotATable,
    TableExists,
    TableNotFound,
    WriterClosed,
)
from penstock.table import Table


@pytest.fixture
def db(tmp_path: Path) -> penstock.Database:
    return penstock.connect(tmp_path / "lake")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def table(db: penstock.Database) -> Iterator[Table]:
    made = db.create_table("docs", SCHEMA, primary_key="id")
    made.upsert([GOOD])
    yield made
    made.close()


def rows(**changed: Any) -> list[dict[str, Any]]:
    return [GOOD, {**GOOD, "id": 2, **changed}]


def columns(**changed: Any) -> pa.Table:
    """One good row as an Arrow table, with columns replaced, or left out where None."""
    made = {
        "id": pa.array([2], pa.int64()),
        "name": pa.array(["two"]),
        "vector": pa.array([[1.0, 2.0, 3.0]], pa.list_(pa.float32(), 3)),
        "price": pa.array([2.5]),
        "at": pa.array([None], pa.timestamp("us")),
    }
    made.update(changed)
    return pa.table({name: column for name, column in made.items() if column is not None})


def vectors(values: list[Any], width: int = 3) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values, pa.float32()), width)


NAN, INF = float("nan"), float("inf")
BAD_ROWS: dict[str, tuple[Any, tuple[str, ...]]] = {
    # what it is: (data, what the message must say)
    "a number": (5, ("int", "list of dicts")),
    "a string": ("rows", ("str", "list of dicts")),
    "None": (None, ("NoneType", "list of dicts")),
    "one dict": (GOOD, ("dict", "list of dicts")),
    "a list of lists": ([[1, 2]], ("row 0", "dict")),
    "a dict and a number": ([GOOD, 7], ("row 1", "dict")),
    "a NumPy array": (np.zeros(3), ("ndarray", "list of dicts")),
    "an unknown column": (rows(nmae="x"), ("row 1", "'nmae'", "'name'")),
    "an unknown Arrow column": (columns(extra=pa.array([1])), ("'extra'", "'name'")),
    "the tombstone column": (columns(_tombstone=pa.array([True])), ("'_tombstone'",)),
    "a column twice": (
        pa.Table.from_arrays([pa.array([3]), pa.array([4])], ["id", "id"]),
        ("twice", "id"),
    ),
    "a null key": (rows(id=None), ("'id'", "null", "row 1")),
    "no key": ([{"name": "x", "price": 1.0}], ("'id'", "null")),
    "no Arrow key": (columns(id=None), ("'id'", "lack")),
    "a null Arrow key": (columns(id=pa.array([None], pa.int64())), ("'id'", "null", "row 0")),
    "no value where one is needed": (columns(price=None), ("'price'", "null")),
    "a null where none may be": (rows(price=None), ("'price'", "row 1")),
    "a string for a key": (rows(id="2"), ("'id'", "int64")),
    "a float for a key": (rows(id=2.5), ("'id'", "int64")),
    "a key too large": (rows(id=2**63), ("'id'", "int64")),
    "a number for a string": (rows(name=5), ("'name'", "string")),
    "bytes that are no text": (rows(name=b"\xff\xfe"), ("'name'", "string")),
    "Arrow strings for a key": (columns(id=pa.array(["2"])), ("'id'", "int64", "string")),
    "Arrow floats for a key": (columns(id=pa.array([2.0])), ("'id'", "int64", "double")),
    "Arrow keys too large": (columns(id=pa.array([2**63], pa.uint64())), ("'id'", "int64")),
    "Arrow numbers for a string": (columns(name=pa.array([5])), ("'name'", "string")),
    "Arrow binary for a string": (columns(name=pa.array([b"x"])), ("'name'", "string")),
    "Arrow booleans for numbers": (columns(price=pa.array([True])), ("'price'", "double")),
    "integers no float can hold": (columns(price=pa.array([2**53 + 1])), ("'price'", "double")),
    "a decimal for a key": (rows(id=Decimal("2.5")), ("'id'", "int64", "2.5")),
    "a number too large for float32": (rows(ratio=1e300), ("'ratio'", "float", "row 1")),
    "doubles too large for float32": (columns(ratio=pa.array([1e300])), ("'ratio'", "row 0")),
    "a fraction in a list": (rows(sizes=[1, 2.5]), ("'sizes'", "2.5")),
    "an unknown member": (rows(place={"x": 1, "z": 2}), ("'place'", "'z'")),
    "a fraction in a struct": (rows(place={"x": 1.5}), ("'place'", "1.5")),
    "a time too fine": (
        columns(at=pa.array([1], pa.timestamp("ns"))),
        ("'at'", "timestamp"),
    ),
    "a short vector": (rows(vector=[1.0, 2.0]), ("'vector'", "3")),
    "a long vector": (rows(vector=[1.0] * 4), ("'vector'", "3")),
    "a vector of words": (rows(vector=["a", "b", "c"]), ("'vector'",)),
    "a vector with a hole": (rows(vector=[1.0, None, 3.0]), ("'vector'", "null")),
    "a NaN": (rows(vector=[1.0, NAN, 3.0]), ("'vector'", "row 1", "finite")),
    "an infinity": (rows(vector=[1.0, -INF, 3.0]), ("'vector'", "row 1", "finite")),
    "an overflow to infinity": (rows(vector=[1.0, 1e300, 3.0]), ("'vector'", "finite")),
    "Arrow vectors too wide": (columns(vector=vectors([1, 2, 3, 4], 4)), ("'vector'",)),
    "Arrow lists of another length": (columns(vector=pa.array([[1.0, 2.0]])), ("'vector'", "3")),
    "an Arrow NaN": (columns(vector=vectors([1, NAN, 3])), ("'vector'", "row 0", "finite")),
    "an Arrow hole": (columns(vector=vectors([1, None, 3])), ("'vector'", "null")),
    "doubles beyond float32": (
        columns(vector=pa.array([[1.0, 1e300, 3.0]], pa.list_(pa.float64()))),
        ("'vector'", "finite"),
    ),
    "a frame with another column": (pd.DataFrame({"id": [1], "nope": [2]}), ("'nope'",)),
    "a frame without the key": (pd.DataFrame({"name": ["x"], "price": [1.0]}), ("'id'",)),
    "a frame of mixed types": (pd.DataFrame({"id": [1, "x"], "price": [1.0, 2.0]}), ("id",)),
    "a series": (pl.Series([1, 2]), ("Series", "rows")),
    "polars with wrong types": (pl.DataFrame({"id": ["x"], "price": [1.0]}), ("'id'", "int64")),
}


@pytest.mark.parametrize("case", list(BAD_ROWS))
def test_rows_that_do_not_fit(table: Table, path: Path, case: str) -> None:
    data, words = BAD_ROWS[case]
    with refuses(path, InvalidInput, *words):
        table.upsert(data)
    assert table.count() == 1
    assert table.get(1) == GOOD


BAD_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "one key and no list": (5, ("5", "list")),
    "a string": ("abc", ("'abc'", "list")),
    "None": (None, ("None", "list")),
    "a null": ([1, None], ("'id'", "null")),
    "a string in the list": ([1, "x"], ("'id'", "int64")),
    "a float in the list": ([1.5], ("'id'", "int64")),
    "a key too large": ([2**64], ("'id'", "int64")),
    "tuples for a single key": ([(1, 2)], ("'id'", "int64")),
    "dicts of other columns": ([{"name": "x"}], ("name", "id")),
    "Arrow strings": (pa.array(["1"]), ("'id'", "int64")),
    "Arrow nulls": (pa.array([None], pa.int64()), ("'id'", "null")),
    "a table without the key": (pa.table({"name": ["x"]}), ("'id'",)),
    "a frame without the key": (pd.DataFrame({"name": ["x"]}), ("'id'",)),
}


@pytest.mark.parametrize("case", list(BAD_KEYS))
def test_keys_that_do_not_fit(table: Table, path: Path, case: str) -> None:
    keys, words = BAD_KEYS[case]
    with refuses(path, InvalidInput, *words):
        table.delete(keys=keys)
    with refuses(path, InvalidInput, *words):
        table.get_many(keys)
    assert table.count() == 1


def test_composite_keys_that_do_not_fit(db: penstock.Database, path: Path) -> None:
    schema = pa.schema([("tenant", pa.string()), ("id", pa.int64())])
    table = db.create_table("t", schema, primary_key=["tenant", "id"])
    for key in (1, ("a",), ("a", 1, 2), "a", {"tenant": "a"}, None):
        with refuses(path, InvalidInput, "tenant", "id"):
            table.get(key)
    with refuses(path, InvalidInput, "'id'", "int64"):
        table.get(("a", "b"))
    with refuses(path, InvalidInput, "'tenant'", "null"):
        table.delete(keys=[(None, 1)])
    with refuses(path, InvalidInput, "'tenant'", "null"):
        table.upsert([{"id": 1}])


def test_a_table_without_a_key_has_no_single_rows(db: penstock.Database, path: Path) -> None:
    table = db.create_table("log", pa.schema([("line", pa.string())]))
    table.upsert([{"line": "x"}])
    for act in (lambda: table.delete(keys=["x"]), lambda: table.get("x")):
        with refuses(path, InvalidInput, "no primary key", "primary_key="):
            act()
    table.close()


def test_a_batch_above_the_limit(table: Table, path: Path) -> None:
    table.close()
    with table.writer(max_batch_bytes=4096) as writer:
        writer.upsert([GOOD])
        big = [{**GOOD, "id": i, "name": "x" * 100} for i in range(200)]
        with refuses(path, InvalidInput, "max_batch_bytes = 4096", "fewer rows"):
            writer.upsert(big)
        with refuses(path, InvalidInput, "max_batch_bytes = 4096", "fewer rows"):
            writer.delete(list(range(10_000)))
        assert table.count() == 1
        writer.upsert(big[:10])
    assert table.count() == 10


def test_a_batch_above_the_limit_is_refused_whole(db: penstock.Database, path: Path) -> None:
    """One region's part is too large: the other regions' parts are not written either."""
    schema = pa.schema([("id", pa.int64()), ("body", pa.string())])
    table = db.create_table("t", schema, primary_key="id", regions=penstock.identity("id"))
    with table.writer(max_batch_bytes=4096) as writer:
        writer.upsert([{"id": i, "body": "x"} for i in range(4)])
        with refuses(path, InvalidInput, "max_batch_bytes = 4096", "fewer rows"):
            writer.upsert([{"id": i, "body": "y" * (10_000 if i == 2 else 1)} for i in range(4)])
        assert set(table.to_arrow().column("body").to_pylist()) == {"x"}


BAD_NAMES = ["", ".", "..", "a/b", "../x", "/x", "a\0b", "a\\b", "x" * 129, "ü" * 65, "_x", "-x"]


@pytest.mark.parametrize("name", [*BAD_NAMES, None, 5, b"x", "a b", "a..b", "a\n"])
def test_names_of_tables(db: penstock.Database, path: Path, name: Any) -> None:
    db.create_table("docs", SCHEMA, primary_key="id")
    for act in (
        lambda: db.create_table(name, SCHEMA),
        lambda: db.open_table(name),
        lambda: db.drop_table(name),
    ):
        with refuses(path, InvalidInput, "cannot name a table", "letters"):
            act()
    assert db.list_tables() == ["docs"]


@pytest.mark.parametrize("name", ["", "_tombstone", "_rowid", "a.b", "a\0b", "a`b", "a/b", ".."])
def test_names_of_columns(db: penstock.Database, path: Path, name: str) -> None:
    """A slash is harmless in a column's name; whatever could be misread is refused."""
    schema = pa.schema([("id", pa.int64()), (name, pa.int64())])
    if name == "a/b":
        db.create_table("t", schema, primary_key="id").upsert([{"id": 1, name: 2}])
        assert db.open_table("t").get(1) == {"id": 1, name: 2}
        return
    with refuses(path, InvalidInput, "cannot name a column"):
        db.create_table("t", schema, primary_key="id")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schema": {"id": "int64"}}, ("schema", "pyarrow.Schema")),
        ({"schema": pa.schema([])}, ("at least one column",)),
        ({"schema": pa.schema([("a", pa.int8()), ("a", pa.int8())])}, ("twice",)),
        ({"primary_key": "nope"}, ("'nope'", "id")),
        ({"primary_key": ["id", "id"]}, ("twice",)),
        ({"primary_key": "price"}, ("'price'", "double", "string")),
        ({"primary_key": "vector"}, ("'vector'",)),
        ({"primary_key": 5}, ("primary_key", "name")),
        ({"regions": penstock.bucket("nope", 4)}, ("'nope'", "id")),
        ({"regions": penstock.bucket("name", 4)}, ("name", "primary key")),
        ({"regions": penstock.year("id")}, ("'id'", "date")),
        ({"regions": []}, ("unsharded",)),
        ({"regions": "bucket"}, ("regions", "bucket(")),
        ({"regions": 4}, ("regions", "bucket(")),
        ({"regions": [penstock.unsharded(), penstock.identity("id")]}, ("unsharded",)),
        ({"writer_defaults": {"durabel": True}}, ("durabel", "durable")),
        ({"writer_defaults": {"durable": "yes"}}, ("durable", "True or False")),
        ({"writer_defaults": {"max_memtable_rows": 0}}, ("max_memtable_rows", "positive")),
    ],
)
def test_tables_that_cannot_be(
    db: penstock.Database, path: Path, arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refuses(path, InvalidInput, *words):
        db.create_table("t", **{"schema": SCHEMA, "primary_key": "id", **arguments})
    assert db.list_tables() == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: penstock.bucket("id", 0), ("num_buckets", "1")),
        (lambda: penstock.bucket("id", 2000), ("num_buckets", "1024")),
        (lambda: penstock.bucket("id", "4"), ("num_buckets",)),  # type: ignore[arg-type]
        (lambda: penstock.truncate("name", 0), ("width", "1")),
        (lambda: penstock.multi_bucket("id", 4), ("multi_bucket", "list")),
        (lambda: penstock.expression("col0", [], "int64"), ("expression", "unsharded")),
        (lambda: penstock.expression("col0", ["id"], "float64"), ("float64", "int64")),
    ],
)
def test_region_specs_that_cannot_be(
    path: Path, make: Callable[[], Any], words: tuple[str, ...]
) -> None:
    path.mkdir(exist_ok=True)
    with refuses(path, InvalidInput, *words):
        make()


def test_set_regions_on_a_column_outside_the_key(table: Table, path: Path) -> None:
    with refuses(path, InvalidInput, "name", "primary key"):
        table.set_regions(penstock.bucket("name", 4))
    with refuses(path, InvalidInput, "'nope'", "id"):
        table.set_regions(penstock.bucket("nope", 4))
    assert table.get(1) == GOOD


@pytest.mark.parametrize(
    ("column", "kind", "options", "words"),
    [
        ("nope", "btree", {}, ("'nope'", "price")),
        ("price", "hash", {}, ("'hash'", "btree")),
        ("price", "", {}, ("''", "btree")),
        ("price", None, {}, ("None", "btree")),
        ("price", "ivf_pq", {}, ("'price'", "fixed-size list")),
        ("vector", "ivf_flat", {"metric": "manhattan"}, ("'manhattan'", "cosine")),
        ("vector", "ivf_pq", {"num_partitions": 2}, ("256", "more rows")),
        ("vector", "ivf_flat", {"num_partitions": 10}, ("10", "more rows")),
        ("vector", "ivf_flat", {"num_partitions": -1}, ("num_partitions",)),
        ("vector", "ivf_flat", {"num_partitions": "many"}, ("num_partitions",)),
        ("vector", "btree", {}, ("'vector'", "btree")),
        ("price", "fts", {}, ("'price'", "fts")),
        ("name", "fts", {"base_tokenizer": "nonsense"}, ("'name'", "nonsense")),
        ("vector", "ivf_flat", {"nonsense": 1}, ("nonsense", "num_partitions")),
        ("price", "btree", {"nonsense": 1}, ("nonsense", "none")),
        ("name", "fts", {"stemm": True}, ("stemm",)),
        ("price", "btree", {"name": "__lance_mem_wal"}, ("'__lance_mem_wal'", "Lance")),
        ("price", "btree", {"name": ""}, ("''", "empty")),
    ],
)
def test_indexes_that_cannot_be(
    table: Table, path: Path, column: str, kind: Any, options: Any, words: tuple[str, ...]
) -> None:
    with refuses(path, InvalidInput, *words):
        table.create_index(column, kind, **options)
    assert table.status().indexes == ()


def test_a_vector_index_whose_dimension_does_not_divide(table: Table, path: Path) -> None:
    chance = np.random.default_rng(0)
    many = vectors(chance.random(3 * 300).tolist())
    table.upsert(pa.table({"id": range(300), "vector": many, "price": np.zeros(300)}))
    with refuses(path, InvalidInput, "'vector'", "ivf_pq"):
        table.create_index("vector", "ivf_pq", num_partitions=1, num_sub_vectors=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"durabel": True}, ("durabel", "durable")),
        ({"durable": 1}, ("durable", "True or False")),
        ({"indexed": "no"}, ("indexed", "True or False")),
        ({"max_memtable_rows": -5}, ("max_memtable_rows", "-5")),
        ({"max_batch_bytes": 1.5}, ("max_batch_bytes", "1.5")),
        ({"max_unflushed_bytes": 1000}, ("max_unflushed_bytes", "at least")),
        ({"region": "not a uuid"}, ("'not a uuid'", "UUID")),
        ({"region": 17}, ("17", "UUID")),
    ],
)
def test_writers_that_cannot_be(
    table: Table, path: Path, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refuses(path, InvalidInput, *words):
        table.writer(**options)


def test_writing_after_close(table: Table, path: Path) -> None:
    table.close()
    writer = table.writer()
    writer.upsert([GOOD])
    writer.close()
    writer.close()
    for act in (
        lambda: writer.upsert([GOOD]),
        lambda: writer.delete([1]),
        lambda: writer.flush(),
    ):
        with refuses(path, WriterClosed, "closed", "open a new one"):
            act()


def test_tables_that_exist_and_tables_that_do_not(
    db: penstock.Database, table: Table, path: Path
) -> None:
    with refuses(path, TableExists, "'docs'", "drop"):
        db.create_table("docs", pa.schema([("x", pa.int8())]))
    for act in (lambda: db.open_table("nope"), lambda: db.drop_table("nope")):
        with refuses(path, TableNotFound, "'nope'"):
            act()
    with refuses(path, TableNotFound, "docs"):
        db.open_table("nope")


def test_a_directory_that_is_not_a_table(db: penstock.Database, path: Path) -> None:
    (path / "junk.lance" / "sub").mkdir(parents=True)
    (path / "junk.lance" / "sub" / "file").write_bytes(b"not a table")
    for adopt in (False, True):
        with refuses(path, NotATable, "junk.lance", "_versions"):
            db.open_table("junk", adopt=adopt)
    with refuses(path, TableExists, "'junk'"):
        db.create_table("junk", SCHEMA)
    (path / "junk.lance" / "_versions").mkdir()
    (path / "junk.lance" / "_versions" / "18446744073709551614.manifest").write_bytes(b"rubbish")
    with refuses(path, NotATable, "junk.lance"):
        db.open_table("junk")


def test_a_plain_lance_table_is_not_changed_by_looking(db: penstock.Database, path: Path) -> None:
    lance.write_dataset(pa.table({"id": [1]}), path / "plain.lance")
    with refuses(path, NotATable, "plain.lance", "adopt=True"):
        db.open_table("plain")


def test_lance_tables_that_cannot_be_adopted(db: penstock.Database, path: Path) -> None:
    key = {"lance-schema:unenforced-primary-key": "true"}
    dated = pa.schema([pa.field("day", pa.date32(), False, key)])
    lance.write_dataset(dated.empty_table(), path / "dated.lance")
    with refuses(path, InvalidInput, "'day'", "date32", "string"):
        db.open_table("dated", adopt=True)
    lance.write_dataset(pa.table({"_tombstone": [True]}), path / "dead.lance")
    with refuses(path, InvalidInput, "_tombstone", "rename"):
        db.open_table("dead", adopt=True)
    # A cast gives a column a new field id, out of order; rows could be logged but never flushed.
    dataset = lance.write_dataset(pa.table({"a": [1], "b": [2]}), path / "cast.lance")
    dataset.alter_columns({"path": "a", "data_type": pa.int32()})
    with refuses(path, NotATable, "'b'", "field id", "rewrite"):
        db.open_table("cast", adopt=True)
    dataset.initialize_mem_wal(unsharded=True)
    table = db.open_table("cast")
    assert table.count() == 1
    with refuses(path, NotATable, "'b'", "field id", "rewrite"):
        table.upsert([{"a": 1, "b": 2}])
