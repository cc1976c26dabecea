"""Types between tables and Spark: everything comes back as it was, or is refused by name."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark_types

from penstock.errors import InvalidInput
from penstock.spark.convert import (
    arrow_schema_for_spark,
    check_from_spark,
    from_spark,
    is_vector,
    spark_schema,
    to_spark,
)

DAY_MS = 86_400_000
MICROSECONDS = {"s": 1, "ms": 1, "us": 1, "ns": 1000}
"""Of nanoseconds only whole microseconds can go to Spark and come back."""


def _scaled(kind: pa.DataType, low: int, high: int, step: int = 1) -> st.SearchStrategy[pa.Array]:
    numbers = st.integers(low // step, high // step).map(lambda n: n * step)
    return _lists(numbers).map(lambda v: pa.array(v, pa.int64()).cast(kind))


def _lists(values: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(st.none() | values, min_size=3, max_size=3)


def _of(kind: pa.DataType, values: st.SearchStrategy[object]) -> st.SearchStrategy[pa.Array]:
    return _lists(values).map(lambda v: pa.array(v, kind))


def _integers(kind: pa.DataType) -> st.SearchStrategy[pa.Array]:
    info = np.iinfo(kind.to_pandas_dtype())
    return _of(kind, st.integers(int(info.min), int(info.max)))


def _floats(width: int) -> st.SearchStrategy[pa.Array]:
    kind = {16: pa.float16(), 32: pa.float32(), 64: pa.float64()}[width]
    values = st.floats(width=width, allow_nan=False).map(np.dtype(f"f{width // 8}").type)
    return _of(kind, values)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
LEAVES = st.one_of(
    *(_integers(k) for k in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *(_integers(k) for k in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
    *(_floats(width) for width in (16, 32, 64)),
    _of(pa.bool_(), st.booleans()),
    *(_of(kind, TEXTS) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *(_of(kind, st.binary(max_size=4)) for kind in (pa.binary(), pa.large_binary())),
    _of(pa.binary(3), st.binary(min_size=3, max_size=3)),
    _lists(TEXTS).map(lambda v: pa.array(v).dictionary_encode()),
    _of(pa.date32(), st.dates()),
    _scaled(pa.date64(), -DAY_MS * 9000, DAY_MS * 9000, DAY_MS),
    *(
        _scaled(pa.timestamp(unit, zone), -(10**10), 10**10, step)
        for unit, step in MICROSECONDS.items()
        for zone in (None, "UTC", "Europe/Berlin")
    ),
    *(_scaled(pa.duration(unit), -(10**9), 10**9, step) for unit, step in MICROSECONDS.items()),
    _scaled(pa.time64("ns"), 0, 86_399 * 10**9, 1000),
    _scaled(pa.time64("us"), 0, 86_399 * 10**6),
    _lists(st.integers(0, 86_399)).map(lambda v: pa.array(v, pa.int32()).cast(pa.time32("s"))),
    _of(pa.decimal128(9, 2), st.decimals(-9999, 9999, places=2)),
    _of(pa.decimal256(30, 4), st.decimals(-9999, 9999, places=4)),
    _of(pa.decimal128(5, -2), st.integers(-999, 999).map(lambda n: Decimal(n) * 100)),
    st.just(pa.nulls(3)),
)


@st.composite
def nested(draw: st.DrawFn, values: pa.Array) -> pa.Array:
    """Three rows made of arrays of three values, in every shape that a column can have."""
    shape = draw(st.sampled_from(["list", "large", "fixed", "struct", "map"]))
    absent = pa.array(draw(st.lists(st.booleans(), min_size=3, max_size=3)))
    if shape == "fixed":
        thrice = pa.concat_arrays([values, values])
        return pa.FixedSizeListArray.from_arrays(thrice, 2, mask=absent)
    if shape == "struct":
        return pa.StructArray.from_arrays(
            [values, pa.array([1, 2, 3])], ["it", "number"], mask=absent
        )
    ends = sorted(draw(st.lists(st.integers(0, 3), min_size=2, max_size=2)))
    offsets = [0, *ends, 3]
    if shape == "map":
        keys = pa.array(["a", "b", "c"])
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, values, mask=absent)
    made = pa.ListArray if shape == "list" else pa.LargeListArray
    kind = pa.int32() if shape == "list" else pa.int64()
    return made.from_arrays(pa.array(offsets, kind), values, mask=absent)


ARRAYS = LEAVES | LEAVES.flatmap(nested) | LEAVES.flatmap(nested).flatmap(nested)


def _has_null_inside_vectors(array: pa.Array) -> bool:
    return is_vector(array.type) and array.flatten().null_count > 0


@settings(max_examples=400, deadline=None)
@given(ARRAYS, st.integers(0, 2), st.sampled_from(["array", "binary"]))
def test_every_value_comes_back_as_it_was(array: pa.Array, first: int, vectors: str) -> None:
    padded = pa.concat_arrays([array[first:], array])  # and what is sliced is read rightly
    rows = pa.record_batch({"value": padded}).slice(1)
    target = arrow_schema_for_spark(rows.schema, vector_format=vectors)
    if vectors == "binary" and _has_null_inside_vectors(rows.column(0)):
        with pytest.raises(InvalidInput, match="a vector contains a null"):
            to_spark(rows, target)
        return
    there = to_spark(rows, target)
    assert there.schema == target
    there.validate(full=True)
    back = from_spark(there, rows.schema)
    back.validate(full=True)
    assert back.column(0).to_pylist() == rows.column(0).to_pylist()
    assert back.schema.types == rows.schema.types


def test_the_types_that_spark_shows() -> None:
    schema = pa.schema(
        {
            "id": pa.uint32(),
            "big": pa.uint64(),
            "half": pa.float16(),
            "vector": pa.list_(pa.float32(), 4),
            "name": pa.large_string(),
            "kind": pa.dictionary(pa.int8(), pa.string()),
            "at": pa.timestamp("ns", "Europe/Berlin"),
            "local": pa.timestamp("ms"),
            "day": pa.date64(),
            "tags": pa.map_(pa.string(), pa.list_(pa.uint8())),
        }
    )
    shown = [field.dataType.simpleString() for field in spark_schema(schema)]
    assert shown == [
        "bigint",
        "decimal(20,0)",
        "float",
        "array<float>",
        "string",
        "string",
        "timestamp",
        "timestamp_ntz",
        "date",
        "map<string,array<smallint>>",
    ]
    assert (
        spark_schema(schema, vector_format="binary")["vector"].dataType.simpleString() == "binary"
    )


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "Spark keeps microseconds"),
        (pa.array([1], pa.int64()).cast(pa.date64(), safe=False), "has a time of day"),
        (pa.array([Decimal(1)], pa.decimal256(60, 2)), "at most 38 digits"),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "it has no such type"),
    ],
)
def test_what_spark_cannot_hold_is_refused_by_name(array: pa.Array, words: str) -> None:
    rows = pa.record_batch({"odd": array})
    with pytest.raises(InvalidInput, match=words) as told:
        to_spark(rows, arrow_schema_for_spark(rows.schema))
    assert "'odd'" in str(told.value)


VECTOR = pa.list_(pa.float32(), 2)
TABLE = pa.schema(
    [pa.field("id", pa.int32(), nullable=False), pa.field("v", VECTOR), pa.field("s", pa.string())]
)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"id": [1, 2], "v": [[1.0, 2.0], [1.0]]}, "'v' has vectors of 2 values, but row 1 has 1"),
        ({"id": [1], "v": [b"\0" * 7]}, "8 bytes in all, but row 0 has 7"),
        ({"id": [1], "vv": [[1.0, 2.0]]}, "unknown column 'vv'; did you mean 'v'"),
        ({"v": [[1.0, 2.0]]}, "lack the column 'id'"),
        ({"id": [1, None]}, "'id' is null in row 1"),
        ({"id": [2**40]}, "'id' is int64 here and int32 there"),
        ({"id": ["1"]}, "'id' is int32, but the data is string"),
        ({"id": [1], "v": [[1.0, 1e300]]}, "too large"),
        ({"id": [1], "s": [dt.date(2020, 1, 1)]}, "'s' is string, but the data is date32"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(
    columns: dict[str, list[object]], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        from_spark(pa.record_batch({k: pa.array(v) for k, v in columns.items()}), TABLE)


def test_columns_that_rows_lack_are_null_and_doubles_become_floats() -> None:
    rows = pa.record_batch({"v": pa.array([[0.1, 0.2], None]), "id": pa.array([1, 2])})
    back = from_spark(rows, TABLE)
    assert back.schema == TABLE
    expected = [np.float32(0.1).item(), np.float32(0.2).item()]
    assert back.to_pylist() == [
        {"id": 1, "v": expected, "s": None},
        {"id": 2, "v": None, "s": None},
    ]


def test_a_frame_is_judged_before_a_row_is_read() -> None:
    vector = spark_types.ArrayType(spark_types.DoubleType())
    fits = spark_types.StructType().add("id", "long").add("v", vector)
    check_from_spark(fits, TABLE)
    with pytest.raises(InvalidInput, match="'s' is string, but the data is int"):
        check_from_spark(fits.add("s", "integer"), TABLE)
