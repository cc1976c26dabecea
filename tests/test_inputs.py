"""Every shape of data that a table takes, and that what is stored is what was given."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("count", pa.int32()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
UTC = dt.UTC
ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "name": "one",
        "vector": [0.5, -1.0],
        "count": 7,
        "at": dt.datetime(2024, 2, 29, 12, 30, 0, 5, UTC),
        "tags": ["a", ""],
    },
    {"id": 2, "name": None, "vector": None, "count": None, "at": None, "tags": None},
    {
        "id": 3,
        "name": "ü日\0",
        "vector": [0.0, 3.0],
        "count": -5,
        "at": dt.datetime(1969, 12, 31, tzinfo=UTC),
        "tags": [],
    },
]
ARROW = pa.Table.from_pylist(ROWS, SCHEMA)


def chunked() -> pa.Table:
    return pa.concat_tables([ARROW.slice(0, 1), ARROW.slice(1, 0), ARROW.slice(1, 2)])


def replaced(name: str, column: Any) -> pa.Table:
    return ARROW.set_column(ARROW.schema.get_field_index(name), name, column)


def sliced() -> pa.RecordBatch:
    """The rows in the middle of a larger batch: every buffer begins before the data does."""
    noise = pa.Table.from_pylist([{**ROWS[0], "id": 90 + i, "name": "noise"} for i in range(5)])
    around = pa.concat_tables([noise.cast(SCHEMA), ARROW, noise.cast(SCHEMA)])
    batch = around.combine_chunks().to_batches()[0].slice(5, 3)
    assert batch.column("vector").offset == 5
    return batch


def pandas_frame() -> pd.DataFrame:
    frame = pd.DataFrame(ROWS)
    frame["count"] = frame["count"].astype("Int32")
    frame["at"] = pd.to_datetime(frame["at"], utc=True).astype("datetime64[us, UTC]")
    return frame


def polars_frame() -> pl.DataFrame:
    frame = pl.from_arrow(ARROW)
    assert isinstance(frame, pl.DataFrame)
    return frame


SHAPES: dict[str, Callable[[], Any]] = {
    "a table": lambda: ARROW,
    "a table in chunks": chunked,
    "a batch": lambda: ARROW.combine_chunks().to_batches()[0],
    "a slice of a batch": sliced,
    "a reader": lambda: chunked().to_reader(),
    "dicts": lambda: ROWS,
    "a tuple of dicts": lambda: tuple(ROWS),
    "dicts without their nulls": lambda: [
        {name: value for name, value in row.items() if value is not None} for row in ROWS
    ],
    "dicts with arrays": lambda: [
        {**row, "vector": np.array(row["vector"]) if row["vector"] else None} for row in ROWS
    ],
    "pandas": pandas_frame,
    "pandas with an index": lambda: pandas_frame().set_index(pd.Index([7, 8, 9])),
    "polars": polars_frame,
    "columns in another order": lambda: ARROW.select(
        ["tags", "at", "id", "vector", "name", "count"]
    ),
    "large strings": lambda: replaced("name", ARROW.column("name").cast(pa.large_string())),
    "string views": lambda: replaced("name", ARROW.column("name").cast(pa.string_view())),
    "encoded strings": lambda: replaced("name", ARROW.column("name").dictionary_encode()),
    "narrow integers": lambda: replaced("id", ARROW.column("id").cast(pa.int8())),
    "unsigned integers": lambda: replaced("id", ARROW.column("id").cast(pa.uint64())),
    "wide integers": lambda: replaced("count", ARROW.column("count").cast(pa.int64())),
    "double vectors": lambda: replaced(
        "vector", pa.array([row["vector"] for row in ROWS], pa.list_(pa.float64()))
    ),
    "half vectors": lambda: replaced(
        "vector", pa.array([row["vector"] for row in ROWS], pa.list_(pa.float16(), 2))
    ),
    "vectors in large lists": lambda: replaced(
        "vector", pa.array([row["vector"] for row in ROWS], pa.large_list(pa.float32()))
    ),
    "times of another zone": lambda: replaced(
        "at",
        pa.array([row["at"] for row in ROWS], pa.timestamp("us", tz="Europe/Paris")),
    ),
    "large lists": lambda: replaced(
        "tags", pa.array([row["tags"] for row in ROWS], pa.large_list(pa.large_string()))
    ),
    "other field metadata": lambda: ARROW.cast(
        pa.schema([field.with_metadata({"note": "x"}) for field in SCHEMA], {"k": "v"})
    ),
}


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    yield made
    made.close()


def stored(table: Table) -> list[dict[str, Any]]:
    return table.to_arrow().sort_by("id").to_pylist()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_shapes(table: Table, tmp_path: Path, shape: str) -> None:
    """In memory, in the log and in a generation the rows are those that were given."""
    assert table.upsert(SHAPES[shape]()) == 3
    assert stored(table) == ROWS
    other = penstock.connect(tmp_path).open_table("t")
    assert stored(other) == ROWS, "as another process reads it from the log"
    table.flush()
    assert stored(table) == stored(other) == ROWS
    assert other.to_arrow().schema.equals(table.schema, check_metadata=True)


@pytest.mark.parametrize(
    "empty",
    [[], (), ARROW.slice(0, 0), ARROW.schema.empty_table().to_reader(), pl.DataFrame({"id": []})],
    ids=["list", "tuple", "slice", "reader", "polars"],
)
def test_nothing_is_a_no_op(table: Table, tmp_path: Path, empty: Any) -> None:
    if isinstance(empty, pl.DataFrame):
        empty = polars_frame().head(0)
    files = sorted(tmp_path.rglob("*"))
    assert table.upsert(empty) == 0
    assert table.delete(keys=[]) == 0
    assert table.get_many([]).num_rows == 0
    table.flush()
    assert sorted(tmp_path.rglob("*")) == files
    assert table.count() == 0


KEYS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 3],
    "tuple": lambda: (1, 3),
    "set": lambda: {1, 3},
    "range": lambda: range(1, 4, 2),
    "generator": lambda: (i for i in (1, 3)),
    "numpy": lambda: np.array([1, 3], np.int16),
    "arrow": lambda: pa.array([1, 3], pa.int32()),
    "arrow chunks": lambda: pa.chunked_array([[1], [3]]),
    "table": lambda: pa.table({"id": [1, 3], "more": ["x", "y"]}),
    "batch": lambda: pa.record_batch({"id": [1, 3]}),
    "dicts": lambda: [{"id": 1}, {"id": 3}],
    "pandas": lambda: pd.DataFrame({"id": [1, 3]}),
    "pandas series": lambda: pd.Series([1, 3]),
    "polars": lambda: pl.DataFrame({"id": [1, 3]}),
    "polars series": lambda: pl.Series([1, 3]),
}


@pytest.mark.parametrize("shape", list(KEYS))
def test_keys(table: Table, shape: str) -> None:
    table.upsert(ROWS)
    assert table.get_many(KEYS[shape]()).sort_by("id").to_pylist() == [ROWS[0], ROWS[2]]
    assert table.delete(keys=KEYS[shape]()) == 2
    assert stored(table) == [ROWS[1]]


def test_composite_keys(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("tenant", pa.string()), ("v", pa.int8())])
    table = penstock.connect(tmp_path).create_table("t", schema, primary_key=["tenant", "id"])
    rows = [{"id": i, "tenant": tenant, "v": i} for i in range(3) for tenant in "ab"]
    table.upsert(rows)
    assert table.get(("a", 1)) == {"id": 1, "tenant": "a", "v": 1}
    assert table.get({"id": 2, "tenant": "b"}) == {"id": 2, "tenant": "b", "v": 2}
    table.delete(keys=[("a", 0), ["b", 0]])
    table.delete(keys=pa.table({"id": [1], "tenant": ["a"]}))
    table.delete(keys=pd.DataFrame({"tenant": ["b"], "id": [1]}))
    assert {(row["tenant"], row["id"]) for row in table.to_arrow().to_pylist()} == {
        ("a", 2),
        ("b", 2),
    }
    table.close()


values = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "name": st.none() | st.text(max_size=8),
        "vector": st.none()
        | st.lists(
            st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2
        ),
        "count": st.none() | st.integers(-(2**31), 2**31 - 1),
        "at": st.none()
        | st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1), timezones=st.just(UTC)),
        "tags": st.none() | st.lists(st.text(max_size=3), max_size=3),
    }
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.lists(values, min_size=1, max_size=8), before=st.integers(0, 3), after=st.integers(0, 3)
)
def test_any_rows_in_any_slice(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], before: int, after: int
) -> None:
    """Slices with offsets into shared buffers, duplicates, nulls: the last row of a key wins."""
    table = penstock.connect(tmp_path_factory.mktemp("any")).create_table(
        "t", SCHEMA, primary_key="id"
    )
    padded = [ROWS[0]] * before + rows + [ROWS[2]] * after
    batch = pa.RecordBatch.from_pylist(padded, SCHEMA).slice(before, len(rows))
    expected = {row["id"]: row for row in batch.to_pylist()}
    table.upsert(batch)
    assert {row["id"]: row for row in stored(table)} == expected
    table.flush()
    assert {row["id"]: row for row in stored(table)} == expected
    table.close()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_durable_and_indexed_are_independent(
    table: Table, tmp_path: Path, durable: bool, indexed: bool
) -> None:
    """Rows are seen at once through the handle that wrote them, and by others once flushed."""
    table.create_index("name", "fts")
    table.create_index("count", "btree")
    other = penstock.connect(tmp_path).open_table("t")
    with table.writer(durable=durable, indexed=indexed, wal_flush_interval_ms=60_000) as writer:
        writer.upsert(ROWS)
        writer.delete([2])
        writer.upsert([{**ROWS[0], "name": "newer"}])
        expected = [{**ROWS[0], "name": "newer"}, ROWS[2]]
        assert stored(table) == expected
        assert table.get(1) == expected[0]
        assert table.get(2) is None
        assert stored(other) == (expected if durable else [])
        writer.flush()
        assert stored(other) == expected
        writer.upsert([{"id": 4}])
        assert table.count() == 3
    assert other.get(4) == {**ROWS[1], "id": 4}
    assert other.count() == 3


@pytest.mark.parametrize("durable", [True, False])
def test_buffers_changed_after_the_call_change_nothing(
    table: Table, tmp_path: Path, durable: bool
) -> None:
    """Arrow shares memory with NumPy; a caller who reuses a buffer must not rewrite history."""
    ids = np.arange(100, dtype=np.int64)
    numbers = np.ones((100, 2), dtype=np.float32)
    batch = pa.record_batch(
        {
            "id": pa.array(ids),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 2),
        }
    )
    rows = pa.RecordBatch.from_arrays(
        [
            batch.column("id"),
            pa.nulls(100, pa.string()),
            batch.column("vector"),
            *(pa.nulls(100, field.type) for field in list(SCHEMA)[3:]),
        ],
        schema=table.schema,
    )
    with table.writer(durable=durable, wal_flush_interval_ms=60_000) as writer:
        writer.upsert(rows)
        ids[:] = -1
        numbers[:] = 99.0
        assert batch.column("id")[0].as_py() == -1, "the batch does share the array's memory"
        for handle in (table, penstock.connect(tmp_path).open_table("t")):
            if handle is not table:
                writer.flush()
            found = handle.to_arrow().sort_by("id")
            assert found.column("id").to_pylist() == list(range(100))
            assert found.column("vector").to_pylist() == [[1.0, 1.0]] * 100
            assert handle.get(50) is not None
