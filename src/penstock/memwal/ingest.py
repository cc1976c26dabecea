"""The door: everything that wants to become a row is checked here, before anything changes.

Arrow data, pandas and polars frames, anything that exports an Arrow stream, and lists of dicts
become one batch in the table's schema. Types are converted only where no information is lost. A
column that is left out is null. What cannot be stored is refused with an error that names the
column, the row where it helps, and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.memwal.live_indexes import vectors_of
from penstock.memwal.shape import TableShape


def rows_to_batch(data: Any, shape: TableShape) -> pa.RecordBatch:
    """The rows of `data` as one valid batch of the table."""
    if isinstance(data, pa.RecordBatch) and data.schema.types == shape.schema.types:
        batch = data
        if data.schema.names != shape.schema.names:
            batch = _conform(pa.Table.from_batches([data]), shape)
    else:
        batch = _conform(_to_table(data, shape.schema), shape)
    _check_values(batch, shape)
    return batch


def to_column(field: pa.Field, values: Any) -> pa.Array:
    """New values of one column, an Arrow array or Python ones, checked as those of a row are."""
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        values = _python_array(f"column {field.name!r}", list(values), field.type)
    column = _cast(field.name, values, field.type)
    _check_column(field, column, is_key=False)
    return column


def reusable_rows(data: Any) -> Any:
    """The same rows in a form that can be gone through again; a stream is read."""
    if isinstance(data, list | tuple | pa.RecordBatch):
        return data
    return _to_table(data, pa.schema([]))


def some_columns(data: Any, shape: TableShape) -> pa.RecordBatch:
    """The rows of `data` as one valid batch of those of the table's columns that it has."""
    schema = shape.schema
    if isinstance(data, list | tuple) and data:
        named = {name for row in data if isinstance(row, Mapping) for name in row}
        if not named <= set(schema.names):
            _refuse_columns(sorted(str(name) for name in named - set(schema.names)), schema)
        schema = pa.schema([field for field in schema if field.name in named])
    table = _to_table(data, schema)
    names = table.column_names
    unknown = [name for name in names if name not in shape.schema.names]
    if unknown:
        _refuse_columns(unknown, shape.schema)
    if len(set(names)) != len(names):
        raise InvalidInput(f"a column appears twice among {names}")
    fields = [field for field in shape.schema if field.name in names]
    columns = [to_column(field, table.column(field.name)) for field in fields]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def keys_to_arrays(keys: Any, shape: TableShape) -> dict[str, pa.Array]:
    """Key values, in whatever form, as one array per key column."""
    columns = shape.key_columns
    if not columns:
        raise InvalidInput(
            "the table has no primary key, so single rows cannot be named; "
            "create it with primary_key=… to get and delete by key"
        )
    frame = isinstance(keys, pa.RecordBatch | pa.Table) or _is_frame(keys)
    frame = frame and not hasattr(keys, "dtype")  # a series is a list of keys
    if not frame and (isinstance(keys, str | bytes) or not hasattr(keys, "__iter__")):
        raise InvalidInput(f"keys must be a list of keys, not {keys!r}; write [{keys!r}]")
    if frame and not isinstance(keys, pa.Array | pa.ChunkedArray):
        table = _to_table(keys, shape.schema)
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise InvalidInput(f"the keys lack the column {missing[0]!r}; the key is {columns}")
        arrays = [table.column(name) for name in columns]
    elif isinstance(keys, pa.Array | pa.ChunkedArray) and len(columns) == 1:
        arrays = [keys]
    else:
        arrays = _key_columns(list(keys), shape)
    result = {}
    for name, array in zip(columns, arrays, strict=True):
        result[name] = _cast(name, array, shape.schema.field(name).type)
        if result[name].null_count:
            raise InvalidInput(f"key column {name!r} has a null; every key needs a value")
    return result


def _key_columns(keys: list[Any], shape: TableShape) -> list[pa.Array]:
    columns = shape.key_columns
    if len(columns) == 1 and not any(issubclass(kind, Mapping) for kind in set(map(type, keys))):
        kind = shape.schema.field(columns[0]).type
        return [_python_array(f"key column {columns[0]!r}", keys, kind)]
    rows: list[Sequence[Any]] = []
    for key in keys:
        if isinstance(key, Mapping):
            if set(key) != set(columns):
                raise InvalidInput(f"key {dict(key)!r} must have exactly the columns {columns}")
            rows.append([key[name] for name in columns])
        elif len(columns) == 1:
            rows.append([key])
        elif isinstance(key, tuple | list) and len(key) == len(columns):
            rows.append(key)
        else:
            raise InvalidInput(f"key {key!r} must be a tuple of {len(columns)} values: {columns}")
    arrays = []
    for ordinal, name in enumerate(columns):
        kind = shape.schema.field(name).type
        values = [row[ordinal] for row in rows]
        arrays.append(_python_array(f"key column {name!r}", values, kind))
    return arrays


def _is_frame(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__")


def _to_table(data: Any, schema: pa.Schema) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.RecordBatchReader):
        return data.read_all()
    if isinstance(data, list | tuple):
        return _rows_to_table(data, schema)
    if type(data).__module__.partition(".")[0] == "pandas":
        try:
            return pa.Table.from_pandas(data, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise InvalidInput(f"the frame cannot be read: {error}") from error
    if hasattr(data, "__arrow_c_stream__"):
        try:
            return pa.table(data)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise InvalidInput(f"the {type(data).__name__} has no rows: {error}") from error
    raise InvalidInput(
        f"rows of type {type(data).__name__} are not understood; pass Arrow data, a pandas or "
        "polars frame, or a list of dicts"
    )


def _rows_to_table(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    names = set(schema.names)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidInput(f"row {number} is a {type(row).__name__}; every row must be a dict")
        if not row.keys() <= names:
            _refuse_columns(sorted(str(name) for name in row.keys() - names), schema, number)
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        arrays.append(_python_array(f"column {field.name!r}", values, field.type))
    return pa.Table.from_arrays(arrays, names=schema.names)


def _python_array(what: str, values: list[Any], kind: pa.DataType) -> pa.Array:
    """Python values as an array of that type, or of a wider one that a checked cast narrows."""
    misfit = _misfit(values, kind)
    if misfit is not None:
        raise InvalidInput(f"{what} is {kind}, which the value {misfit!r} does not fit")
    narrow = pa.types.is_floating(kind) and kind != pa.float64()
    try:
        return pa.array(values, pa.float64() if narrow else kind, from_pandas=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError) as error:
        raise InvalidInput(f"{what} is {kind}, which a value does not fit: {error}") from error


def _misfit(values: Sequence[Any], kind: pa.DataType) -> Any:
    """A value that Arrow would take and cut short: a fraction, a member no struct has."""
    t = pa.types
    if t.is_integer(kind) or t.is_temporal(kind):
        fractions = (float, np.floating, Decimal)
        if not any(issubclass(given, fractions) for given in set(map(type, values))):
            return None
        return next(v for v in values if isinstance(v, fractions))
    if t.is_struct(kind):
        members = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        rows = [v for v in values if isinstance(v, Mapping)]
        unknown = next((row for row in rows if not row.keys() <= members.keys()), None)
        found = (_misfit([row.get(n) for row in rows], of) for n, of in members.items())
        return unknown if unknown is not None else next((v for v in found if v is not None), None)
    nested = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    if nested and not t.is_floating(kind.value_type):
        return _misfit([v for row in values if row is not None for v in row], kind.value_type)
    return None


def _refuse_columns(unknown: list[str], schema: pa.Schema, row: int | None = None) -> None:
    where = "" if row is None else f"row {row}: "
    raise InvalidInput(
        f"{where}unknown column {', '.join(map(repr, unknown))}; "
        f"the table has {', '.join(map(repr, schema.names))}"
    )


def _conform(table: pa.Table, shape: TableShape) -> pa.RecordBatch:
    """The table's columns in the schema's order and types."""
    schema = shape.schema
    names = table.column_names
    unknown = [name for name in names if name not in schema.names]
    if unknown:
        _refuse_columns(unknown, schema)
    if len(set(names)) != len(names):
        raise InvalidInput(f"a column appears twice among {names}")
    columns = []
    for field in schema:
        if field.name in names:
            columns.append(_cast(field.name, table.column(field.name), field.type))
        elif field.nullable and field.name not in shape.key_columns:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            what = "key column" if field.name in shape.key_columns else "column"
            raise InvalidInput(f"the rows lack the {what} {field.name!r}, which may not be null")
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(list(schema)))


def _cast(name: str, column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if column.type == kind:
        return column
    if not _may_cast(column.type, kind):
        raise InvalidInput(f"column {name!r} is {kind}, but the data is {column.type}")
    try:
        cast = pc.cast(column, kind, safe=True)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise InvalidInput(
            f"column {name!r} is {kind}, and the data ({column.type}) does not fit: {error}"
        ) from error
    if pa.types.is_floating(kind) and pc.any(pc.is_inf(cast)).as_py():
        overflow = pc.and_(pc.is_inf(cast), pc.is_finite(column))
        if pc.any(overflow).as_py():
            row = pc.index(overflow, True).as_py()
            raise InvalidInput(
                f"column {name!r} is {kind}, and {column[row]} in row {row} is too large for it"
            )
    return cast


def _may_cast(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a conversion keeps the meaning; whether it keeps the values is checked later."""
    t = pa.types
    if t.is_null(given):
        return True
    if t.is_integer(wanted):
        return bool(t.is_integer(given))
    if t.is_floating(wanted):
        return bool(t.is_integer(given) or t.is_floating(given))
    if t.is_fixed_size_list(wanted) or t.is_list(wanted) or t.is_large_list(wanted):
        nested = t.is_list(given) or t.is_large_list(given) or t.is_fixed_size_list(given)
        return bool(nested) and _may_cast(given.value_type, wanted.value_type)
    for family in (
        (t.is_string, t.is_large_string, t.is_string_view),
        (t.is_binary, t.is_large_binary, t.is_binary_view, t.is_fixed_size_binary),
        (t.is_timestamp, t.is_date),
        (t.is_time,),
        (t.is_decimal,),
        (t.is_struct,),
    ):
        if any(member(wanted) for member in family):
            dictionary = t.is_dictionary(given) and _may_cast(given.value_type, wanted)
            return bool(dictionary or any(member(given) for member in family))
    return False


def _check_values(batch: pa.RecordBatch, shape: TableShape) -> None:
    for field, column in zip(shape.schema, batch.columns, strict=True):
        _check_column(field, column, field.name in shape.key_columns)


def _check_column(field: pa.Field, column: pa.Array, is_key: bool) -> None:
    if column.null_count and (is_key or not field.nullable):
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        what = "key column" if is_key else "column"
        raise InvalidInput(f"{what} {field.name!r} is null in row {row}; it needs a value")
    if pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type):
        _check_vectors(field.name, column)


def _check_vectors(name: str, column: pa.Array) -> None:
    if column.values.null_count and column.flatten().null_count:
        raise InvalidInput(f"column {name!r}: a vector contains a null; give every number a value")
    matrix = vectors_of(column)
    if np.isfinite(matrix).all():
        return
    bad = ~np.isfinite(matrix).all(axis=1)
    if column.null_count:
        bad &= np.asarray(column.is_valid())
    if bad.any():
        raise InvalidInput(
            f"column {name!r}: the vector in row {int(np.flatnonzero(bad)[0])} has a value that is "
            "not finite; NaN and infinity have no place in a search"
        )
