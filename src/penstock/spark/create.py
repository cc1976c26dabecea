"""Creating a table for a frame: its columns, which of them are vectors, its key and its regions.

Spark's types become Arrow's as Spark itself would write them. An array of floats may be a vector,
whose length a table fixes; what length that is can be said, or is that of the first row that has
one. Vectors are float32.

From text, for options and SQL, regions are written as in Python: `bucket(id, 4)`, several of them
with commas between, and vectors as `column=length`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as st

from penstock.database import connect
from penstock.errors import InvalidInput, TableExists, TableNotFound
from penstock.memwal import region_spec
from penstock.memwal.region_spec import RegionBy
from penstock.spark.convert import arrow_schema_for_spark
from penstock.spark.options import SourceOptions
from penstock.table import Table

Regions = RegionBy | Sequence[RegionBy] | str
Dimensions = Mapping[str, int | None]

_SUFFIX = ".lance"
_OPERATION = "_op"
"""Says what becomes of a row, and is none of its values."""
_FIELD = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*(,|$)")
_BY: dict[str, Callable[[list[str]], RegionBy]] = {
    "unsharded": lambda words: region_spec.unsharded(*words),
    "bucket": lambda words: region_spec.bucket(words[0], int(words[1])),
    "multi_bucket": lambda words: region_spec.multi_bucket(words[:-1], int(words[-1])),
    "identity": lambda words: region_spec.identity(*words),
    "truncate": lambda words: region_spec.truncate(words[0], int(words[1])),
    "year": lambda words: region_spec.year(*words),
    "month": lambda words: region_spec.month(*words),
    "day": lambda words: region_spec.day(*words),
    "hour": lambda words: region_spec.hour(*words),
}


def create_table(
    frame: DataFrame | st.StructType | pa.Schema,
    uri: str,
    *,
    primary_key: str | Sequence[str] | None = None,
    regions: Regions | None = None,
    vector_dimensions: Dimensions | None = None,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Table:
    """Create an empty table at `uri` with the columns of a frame or schema.

    `vector_dimensions` says which columns are vectors of how many numbers. Arrays of floats that
    it does not name are vectors if a frame is given, as long as in its first row; with None for
    its length a column stays a list. Further options are those of `Database.create_table`.
    """
    given: dict[str, int | None] = dict(vector_dimensions or {})
    if isinstance(frame, DataFrame):
        given = _inferred(frame, given) | given
        frame = frame.schema
    if isinstance(frame, st.StructType):
        frame = arrow_schema_for_spark(frame)
    place = replace(SourceOptions.of({"path": uri}), storage_options=dict(storage_options or {}))
    return _create(place, table_schema(frame, given), primary_key, regions, options)


def create_if_asked(options: SourceOptions, schema: st.StructType) -> None:
    """Create the table that `createTable=true` asks for, unless it is there."""
    if options.create_table:
        kept = st.StructType([field for field in schema if field.name != _OPERATION])
        dimensions = dimensions_of(options.vector_dimensions)
        columns = table_schema(arrow_schema_for_spark(kept), dimensions)
        ensure_table(options, columns, options.primary_key, options.regions)


def ensure_table(
    place: SourceOptions,
    schema: pa.Schema,
    primary_key: str | Sequence[str] | None,
    regions: Regions | None,
) -> None:
    """Create a table, unless there is one; whether rows fit that is seen later."""
    try:
        place.locate()
    except TableNotFound:
        with suppress(TableExists):  # somebody else created it in the same moment
            _create(place, schema, primary_key, regions, {})


def _create(
    place: SourceOptions,
    schema: pa.Schema,
    primary_key: str | Sequence[str] | None,
    regions: Regions | None,
    options: Mapping[str, Any],
) -> Table:
    above, _, name = place.uri.rstrip("/").rpartition("/")
    database = connect(above or "/", place.storage)
    return database.create_table(
        name.removesuffix(_SUFFIX),
        schema,
        primary_key=primary_key,
        regions=regions_of(regions) if isinstance(regions, str) else regions,
        **options,
    )


# --- columns -------------------------------------------------------------------------------


def table_schema(schema: pa.Schema, dimensions: Dimensions) -> pa.Schema:
    """The columns of a table for rows of this schema; all but the key may be null."""
    unknown = sorted(set(dimensions) - set(schema.names))
    if unknown:
        raise InvalidInput(
            f"vector_dimensions names {unknown[0]!r}; the columns are {', '.join(schema.names)}"
        )
    fields = []
    for field in schema:
        length = dimensions.get(field.name)
        if length is not None:
            if not _may_be_vector(field.type) or length < 1:
                raise InvalidInput(
                    f"column {field.name!r} of type {field.type} cannot be a vector of {length} "
                    "numbers; vectors are arrays of floats or bytes"
                )
            field = field.with_type(pa.list_(pa.float32(), length))
        # Whether Spark takes a column for nullable depends on how its frame came about.
        fields.append(pa.field(field.name, _nullable(field.type)))
    return pa.schema(fields)


def _nullable(kind: pa.DataType) -> pa.DataType:
    """A type whose members may be null, too."""
    if pa.types.is_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_struct(kind):
        parts = [kind.field(n) for n in range(kind.num_fields)]
        return pa.struct([pa.field(part.name, _nullable(part.type)) for part in parts])
    return kind


def _may_be_vector(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fixed = pa.types.is_fixed_size_list(kind)
    return bool(
        ((listed or fixed) and pa.types.is_floating(kind.value_type)) or pa.types.is_binary(kind)
    )


def _inferred(frame: DataFrame, given: Dimensions) -> dict[str, int | None]:
    """The lengths of vectors in the first row that has one."""
    found: dict[str, int | None] = {}
    for field in frame.schema:
        kind = field.dataType
        floats = isinstance(kind, st.ArrayType) and isinstance(
            kind.elementType, st.FloatType | st.DoubleType
        )
        if not floats or field.name in given:
            continue
        column = frame[f"`{field.name.replace('`', '``')}`"]
        row = frame.where(column.isNotNull()).select(sf.size(column)).first()
        if row is not None and row[0] > 0:
            found[field.name] = int(row[0])
    return found


# --- from text -----------------------------------------------------------------------------


def regions_of(text: str) -> list[RegionBy]:
    """What divides a table into regions, as text."""
    found: list[RegionBy] = []
    at = 0
    while at < len(text):
        match = _FIELD.match(text, at)
        if match is None or match[1].lower() not in _BY:
            break
        words = [word.strip().strip("`'\"") for word in match[2].split(",") if word.strip()]
        try:
            found.append(_BY[match[1].lower()](words))
        except (TypeError, ValueError, IndexError) as error:
            if isinstance(error, InvalidInput):
                raise
            break
        at = match.end()
        if match[3] == "":
            return found
    raise InvalidInput(
        f"regions {text!r} is not understood; write bucket(column, 4), identity(column), "
        f"or others of {', '.join(_BY)}, with commas between"
    )


def dimensions_of(text: str | None) -> dict[str, int | None]:
    """The lengths of vectors, as text: `vec=32, other=8`."""
    found: dict[str, int | None] = {}
    for part in (text or "").split(","):
        name, _, length = part.rpartition("=")
        if not part.strip():
            continue
        if not name.strip() or not length.strip().isdigit():
            raise InvalidInput(f"vectorDimensions {text!r} is not understood; write vec=32")
        found[name.strip()] = int(length)
    return found
