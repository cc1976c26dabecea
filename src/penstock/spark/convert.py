"""Between a table's Arrow types and Spark's, both ways, without loss.

Spark knows fewer types than Arrow, and each of its types has exactly one form in Arrow
(`arrow_schema_for_spark`). Going to Spark a type becomes the narrowest one of Spark's that holds
every value: unsigned integers the next wider signed ones (64 bits: decimal(20, 0)), half floats
floats, vectors `array<float>` or, with `vector_format="binary"`, their bytes as they are in memory
(little-endian), which travels faster. Coming back each value must fit the table's type.

Invariants:
- NULLs stay NULLs at every depth, and rows stay in order.
- A value is kept exactly or refused with an `InvalidInput` that names the column; the one exception
  is double to float, which rounds, as everywhere in Penstock. Ragged vectors are refused.
- No Python work per value: arrays are cast, or taken apart and put together again.
"""

from __future__ import annotations

import difflib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.errors import InvalidInput

t = pa.types
Lengths = npt.NDArray[np.int64]

_DECIMAL_DIGITS = 38
_BINARY = (t.is_binary, t.is_large_binary, t.is_binary_view, t.is_fixed_size_binary)
_LISTS = (
    t.is_list,
    t.is_large_list,
    t.is_fixed_size_list,
    t.is_list_view,
    t.is_large_list_view,
)
_PLAIN: dict[pa.DataType, st.DataType] = {
    pa.bool_(): st.BooleanType(),
    pa.int8(): st.ByteType(),
    pa.int16(): st.ShortType(),
    pa.int32(): st.IntegerType(),
    pa.int64(): st.LongType(),
    pa.uint8(): st.ShortType(),
    pa.uint16(): st.IntegerType(),
    pa.uint32(): st.LongType(),
    pa.uint64(): st.DecimalType(20, 0),
    pa.float16(): st.FloatType(),
    pa.float32(): st.FloatType(),
    pa.float64(): st.DoubleType(),
    pa.date32(): st.DateType(),
    pa.date64(): st.DateType(),
    pa.null(): st.NullType(),
}


# --- schemas -------------------------------------------------------------------------------


def spark_schema(schema: pa.Schema, *, vector_format: str = "array") -> st.StructType:
    """A table's schema as Spark has it."""
    fields = [
        st.StructField(f.name, spark_type(f.type, f.name, vector_format), f.nullable)
        for f in schema
    ]
    return st.StructType(fields)


def arrow_schema_for_spark(
    schema: pa.Schema | st.StructType, *, vector_format: str = "array"
) -> pa.Schema:
    """Spark's own form in Arrow of a schema: the one batches for Spark must have."""
    if isinstance(schema, pa.Schema):
        schema = spark_schema(schema, vector_format=vector_format)
    return to_arrow_schema(schema, timezone="UTC")


def spark_type(kind: pa.DataType, column: str, vector_format: str = "array") -> st.DataType:
    """The type of Spark that holds every value of an Arrow type."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type, column, vector_format)
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return spark_type(kind.value_type, column, vector_format)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return st.StringType()
    if _is_binary(kind):
        return st.BinaryType()
    if t.is_timestamp(kind):
        return st.TimestampNTZType() if kind.tz is None else st.TimestampType()
    if t.is_time(kind):
        return st.TimeType(6)
    if t.is_duration(kind):
        return st.DayTimeIntervalType(0, 3)
    if t.is_decimal(kind):
        digits, scale = kind.precision, kind.scale
        if scale < 0:
            digits, scale = digits - scale, 0
        if max(digits, scale) <= _DECIMAL_DIGITS:
            return st.DecimalType(max(digits, scale), scale)
        raise _no_type(kind, column, f"decimals have at most {_DECIMAL_DIGITS} digits there")
    if vector_format == "binary" and is_vector(kind):
        return st.BinaryType()
    if _is_list(kind):
        of = spark_type(kind.value_type, column)
        return st.ArrayType(of, kind.value_field.nullable)
    if t.is_struct(kind):
        parts = [kind.field(i) for i in range(kind.num_fields)]
        return st.StructType(
            [
                st.StructField(p.name, spark_type(p.type, f"{column}.{p.name}"), p.nullable)
                for p in parts
            ]
        )
    if t.is_map(kind):
        key, item = spark_type(kind.key_type, column), spark_type(kind.item_type, column)
        return st.MapType(key, item, kind.item_field.nullable)
    raise _no_type(kind, column, "it has no such type")


def is_vector(kind: pa.DataType) -> bool:
    """Whether values are vectors, which may travel as bytes."""
    return bool(t.is_fixed_size_list(kind) and t.is_floating(kind.value_type))


def _no_type(kind: pa.DataType, column: str, reason: str) -> InvalidInput:
    return InvalidInput(
        f"column {column!r} is {kind}, which Spark cannot hold: {reason}. Read without it "
        "(columns=…), or change its type with alter_column"
    )


# --- rows to Spark -------------------------------------------------------------------------


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a table in Spark's form; `schema` is one that `arrow_schema_for_spark` gave."""
    columns = [_convert(batch.column(f.name), f.type, f.name) for f in schema]
    if not columns:
        return batch.select([])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- rows from Spark -----------------------------------------------------------------------


def from_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows from Spark in the table's types and order; columns they lack are null."""
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise InvalidInput(f"a column appears twice among {names}")
    for name in names:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise InvalidInput(
                f"unknown column {name!r}{hint} the table has {', '.join(map(repr, schema.names))}"
            )
    columns = []
    for field in schema:
        if field.name not in names:
            if not field.nullable:
                raise InvalidInput(
                    f"the rows lack the column {field.name!r}, which may not be null"
                )
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if column.null_count and not field.nullable:
            row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
            raise InvalidInput(f"column {field.name!r} is null in row {row}; it needs a value")
        columns.append(_convert(column, field.type, field.name))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_from_spark(given: st.StructType, schema: pa.Schema) -> None:
    """Refuse, before a row is read, a frame none of whose rows could be stored."""
    arrow = to_arrow_schema(given, timezone="UTC")
    from_spark(pa.RecordBatch.from_pylist([], schema=arrow), schema)


# --- values --------------------------------------------------------------------------------


def _convert(array: pa.Array, kind: pa.DataType, column: str) -> pa.Array:
    given = array.type
    if given.equals(kind, check_metadata=True):
        return array
    if isinstance(given, pa.BaseExtensionType):
        return _convert(array.storage, kind, column)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _convert(array, kind.storage_type, column))
    if t.is_null(given):
        return pa.nulls(len(array), kind)
    if is_vector(given) and _is_binary(kind):
        return _vectors_to_bytes(array, column)
    if is_vector(kind) and _is_binary(given):
        return _bytes_to_vectors(array, kind, column)
    if t.is_dictionary(given):
        return _convert(array.dictionary_decode(), kind, column)
    if t.is_dictionary(kind):
        return _cast(_convert(array, kind.value_type, column), kind, column)
    if _is_list(given) and _is_list(kind):
        return _convert_list(array, kind, column)
    if t.is_struct(given) and t.is_struct(kind):
        return _convert_struct(array, kind, column)
    if t.is_map(given) and t.is_map(kind):
        return _convert_map(array, kind, column)
    if not _may_cast(given, kind):
        raise InvalidInput(f"column {column!r} is {kind}, but the data is {given}")
    return _cast(array, kind, column)


def _cast(array: pa.Array, kind: pa.DataType, column: str) -> pa.Array:
    given = array.type
    try:
        if t.is_decimal(given) and t.is_integer(kind):
            array = pc.cast(array, pa.decimal128(_DECIMAL_DIGITS, 0))
        if t.is_date64(given) and t.is_date32(kind):
            _check_whole_days(array, column)
        if t.is_float16(kind) and t.is_float64(given):
            array = pc.cast(array, pa.float32())
        cast = pc.cast(array, kind, safe=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidInput(
            f"column {column!r} is {given} here and {kind} there, and a value does not fit: {error}"
            f"{_hint(given, kind)}"
        ) from error
    if t.is_floating(kind) and t.is_floating(given) and kind.bit_width < given.bit_width:
        overflow = pc.and_(pc.is_inf(cast), pc.is_finite(array))
        if pc.any(overflow).as_py():
            row = pc.index(overflow, True).as_py()
            raise InvalidInput(f"column {column!r} is {kind}, and {array[row]} is too large for it")
    return cast


def _hint(given: pa.DataType, kind: pa.DataType) -> str:
    fine = t.is_timestamp(given) or t.is_time(given) or t.is_duration(given)
    if fine and getattr(given, "unit", "") == "ns":
        return (
            ". Spark keeps microseconds; read without the column (columns=…), or change its type "
            f"to {str(kind).replace('UTC', getattr(given, 'tz', None) or 'UTC')} with alter_column"
        )
    return ""


def _check_whole_days(array: pa.Array, column: str) -> None:
    days = pc.cast(pc.cast(array, pa.date32(), safe=False), pa.date64())
    if not pc.all(pc.equal(days, array), min_count=0).as_py():
        raise InvalidInput(
            f"column {column!r} is date64 and has a time of day, which a date in Spark has not; "
            "change its type to timestamp[ms] with alter_column"
        )


_FAMILIES = (
    (t.is_string, t.is_large_string, t.is_string_view),
    _BINARY,
    (t.is_date,),
    (t.is_time,),
    (t.is_duration,),
    (t.is_decimal, t.is_integer),
    (t.is_boolean,),
)


def _may_cast(given: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a conversion keeps the meaning; whether it keeps the values is checked later."""
    if t.is_timestamp(given) and t.is_timestamp(kind):
        return (given.tz is None) == (kind.tz is None)
    if t.is_floating(kind):
        return bool(t.is_integer(given) or t.is_floating(given))
    for family in _FAMILIES:
        if any(member(kind) for member in family):
            return any(member(given) for member in family)
    return False


# --- nested values -------------------------------------------------------------------------


def _convert_list(array: pa.Array, kind: pa.DataType, column: str) -> pa.Array:
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    if t.is_fixed_size_list(kind):
        values = _convert(_even(array, lengths, kind.list_size, column), kind.value_type, column)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=_mask(array))
    values = _convert(array.flatten(), kind.value_type, column)
    _check_inner_nulls(values, kind.value_field, column)
    wide = t.is_large_list(kind) or t.is_large_list_view(kind)
    ends = np.cumsum(lengths)
    if not wide and len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise InvalidInput(f"column {column!r}: a batch has more than 2^31 list elements")
    starts = np.concatenate([[0], ends]).astype(np.int64 if wide else np.int32)
    if t.is_list_view(kind) or t.is_large_list_view(kind):
        made = pa.LargeListViewArray if wide else pa.ListViewArray
        parts = (pa.array(starts[:-1]), pa.array(lengths.astype(starts.dtype)), values)
        return made.from_arrays(*parts, type=kind, mask=_mask(array))
    made = pa.LargeListArray if wide else pa.ListArray
    return made.from_arrays(pa.array(starts), values, type=kind, mask=_mask(array))


def _even(array: pa.Array, lengths: Lengths, wanted: int, column: str) -> pa.Array:
    """The values of lists that must all be of one length, with room where there is no list."""
    valid = np.asarray(array.is_valid())
    wrong = np.flatnonzero(valid & (lengths != wanted))
    if len(wrong):
        row = int(wrong[0])
        raise InvalidInput(
            f"column {column!r} has vectors of {wanted} values, but row {row} has {lengths[row]}"
        )
    values = array.flatten()
    if not array.null_count:
        return values
    rows = np.cumsum(valid) - 1
    places = (rows[:, None] * wanted + np.arange(wanted)).ravel()
    absent = np.repeat(~valid, wanted)
    return values.take(pa.array(np.where(absent, 0, places), mask=absent))


def _convert_struct(array: pa.StructArray, kind: pa.StructType, column: str) -> pa.Array:
    given = array.type
    here = [given.field(i).name for i in range(given.num_fields)]
    fields = [kind.field(i) for i in range(kind.num_fields)]
    unknown = sorted(set(here) - {field.name for field in fields})
    if unknown:
        raise InvalidInput(f"column {column!r} has no member {unknown[0]!r}; it is {kind}")
    parts = []
    flat = dict(zip(here, array.flatten(), strict=True))
    for field in fields:
        if field.name in flat:
            part = _convert(flat[field.name], field.type, f"{column}.{field.name}")
        else:
            part = pa.nulls(len(array), field.type)
        if not field.nullable and part.null_count > array.null_count:
            raise InvalidInput(f"column {column!r}: member {field.name!r} may not be null")
        parts.append(part)
    if not fields:
        return pa.array([None if x is None else {} for x in array.to_pylist()], kind)
    return pa.StructArray.from_arrays(parts, fields=fields, mask=_mask(array))


def _convert_map(array: pa.MapArray, kind: pa.MapType, column: str) -> pa.Array:
    offsets = np.asarray(array.offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    keys = _convert(array.keys.slice(first, last - first), kind.key_type, f"{column}.key")
    items = _convert(array.items.slice(first, last - first), kind.item_type, f"{column}.value")
    _check_inner_nulls(items, kind.item_field, column)
    starts = pa.array(offsets - first)
    return pa.MapArray.from_arrays(starts, keys, items, type=kind, mask=_mask(array))


def _check_inner_nulls(values: pa.Array, field: pa.Field, column: str) -> None:
    if values.null_count and not field.nullable:
        raise InvalidInput(f"column {column!r}: {field.name!r} may not be null, and one is")


def _mask(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None


# --- vectors as bytes ----------------------------------------------------------------------


def _vectors_to_bytes(array: pa.FixedSizeListArray, column: str) -> pa.Array:
    kind = array.type
    width = kind.list_size * kind.value_type.bit_width // 8
    values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
    if values.null_count and array.flatten().null_count:
        raise InvalidInput(
            f"column {column!r}: a vector contains a null, which bytes cannot say; read it with "
            "vector_format='array'"
        )
    if len(array) * width > np.iinfo(np.int32).max:
        raise InvalidInput(f"column {column!r}: a batch has more than 2 GiB of vectors")
    valid = np.asarray(array.is_valid())
    starts = pa.array(np.concatenate([[0], np.cumsum(np.where(valid, width, 0))]).astype(np.int32))
    if array.null_count:
        values = array.flatten()
    item = kind.value_type.bit_width // 8
    data = values.buffers()[1].slice(values.offset * item, len(values) * item)
    bits = None
    if array.null_count:
        bits = pa.array(valid).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(array), [bits, starts.buffers()[1], data])


def _bytes_to_vectors(array: pa.Array, kind: pa.DataType, column: str) -> pa.Array:
    item = kind.value_type.bit_width // 8
    width = kind.list_size * item
    lengths = np.asarray(pc.fill_null(pc.binary_length(array), width))
    wrong = np.flatnonzero(lengths != width)
    if len(wrong):
        row = int(wrong[0])
        raise InvalidInput(
            f"column {column!r} has vectors of {kind.list_size} values of {item} bytes, "
            f"{width} bytes in all, but row {row} has {lengths[row]} bytes"
        )
    if array.null_count:
        filled = pc.fill_null(array, pa.scalar(b"\0" * width, array.type))
    else:
        filled = array
    fixed = filled.cast(pa.binary(width))
    data = fixed.buffers()[1]
    start, size = fixed.offset * width, len(fixed) * width
    body = data.slice(start, size) if data is not None else pa.py_buffer(b"")
    values = pa.Array.from_buffers(kind.value_type, len(fixed) * kind.list_size, [None, body])
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=_mask(array))


def _is_binary(kind: pa.DataType) -> bool:
    return any(member(kind) for member in _BINARY)


def _is_list(kind: pa.DataType) -> bool:
    return any(member(kind) for member in _LISTS)
