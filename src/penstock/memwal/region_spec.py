"""Region specs: how the rows of a table are divided into regions.

Users say it with column names, `bucket("id", 4)` or `[identity("tenant"), day("at")]`, each a
`RegionBy`. `bind` checks that against a table and turns it into the `RegionSpec` the MemWAL index
stores, which knows columns by field id so that renaming one changes nothing. `transforms`
evaluates a bound spec.

Invariants of a bound spec:
- Every source column belongs to the primary key when there is one. Otherwise two versions of a row
  could fall into different regions, and no order between regions says which is the newer.
- `unsharded`, and a lone `bucket` or `identity`, are exactly what Lance writes for itself: field
  id `bucket` in all three cases. Lance reads every other spec but does not evaluate it.
- `result_type` is fixed when the spec is made. It types the stored region values, so a promoted
  column keeps finding its regions.

`year`, `month`, `day` and `hour` are SQL's `date_part`: `day` is the day of the month and `month`
the month of the year, 12 values and not one per calendar month. Identity by a float is refused:
NaN and -0.0 make equal keys with unequal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.types as pat

from penstock.errors import InvalidInput
from penstock.memwal.murmur import bucket_hashable, murmur3_hashable

MAX_BUCKETS = 1024

_RESULT_TYPES: Mapping[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "utf8": pa.utf8(),
    "large_utf8": pa.large_utf8(),
    "binary": pa.binary(),
    "date32": pa.date32(),
}
_RESULT_NAMES: Mapping[pa.DataType, str] = {kind: name for name, kind in _RESULT_TYPES.items()}


@dataclass(frozen=True, slots=True)
class RegionField:
    """One value of a region, as stored: derived from source columns known by field id."""

    field_id: str
    source_ids: tuple[int, ...]
    transform: str | None
    expression: str | None
    result_type: str
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """How rows are divided into regions: one value per field, one region per tuple of values."""

    spec_id: int
    fields: tuple[RegionField, ...]


@dataclass(frozen=True, slots=True)
class RegionBy:
    """One field of a spec in the making: a transform or an expression over named columns."""

    columns: tuple[str, ...]
    transform: str | None
    expression: str | None = None
    result_type: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)


def unsharded() -> RegionBy:
    """One region for the whole table."""
    return RegionBy((), "unsharded")


def bucket(column: str, num_buckets: int) -> RegionBy:
    """Spread rows over `num_buckets` regions by a hash of the column; NULL is bucket 0."""
    return RegionBy((column,), "bucket", parameters=_num_buckets(num_buckets))


def multi_bucket(columns: Sequence[str], num_buckets: int) -> RegionBy:
    """Spread rows by a hash across several columns; rows where all are NULL share a region."""
    if isinstance(columns, str) or not columns:
        raise InvalidInput(
            f"multi_bucket wants a list of column names, not {columns!r}; "
            "for one column use bucket(column, num_buckets)"
        )
    return RegionBy(tuple(columns), "multi_bucket", parameters=_num_buckets(num_buckets))


def identity(column: str) -> RegionBy:
    """One region per distinct value of the column."""
    return RegionBy((column,), "identity")


def year(column: str) -> RegionBy:
    """One region per year of a date or timestamp."""
    return RegionBy((column,), "year")


def month(column: str) -> RegionBy:
    """One region per month of the year, 1 to 12."""
    return RegionBy((column,), "month")


def day(column: str) -> RegionBy:
    """One region per day of the month, 1 to 31."""
    return RegionBy((column,), "day")


def hour(column: str) -> RegionBy:
    """One region per hour of the day, 0 to 23."""
    return RegionBy((column,), "hour")


def truncate(column: str, width: int) -> RegionBy:
    """By the first `width` characters of a string, or an integer less its remainder by `width`.

    Integers are cut towards zero, as SQL's `col - (col % width)` does: with width 10 the values
    -9 to 9 share region 0.
    """
    if not _is_count(width) or not 1 <= width < 1 << 63:
        raise InvalidInput(f"truncate width is {width!r}; it must be an integer from 1 to 2**63-1")
    return RegionBy((column,), "truncate", parameters={"width": str(width)})


def expression(sql: str, columns: Sequence[str], result_type: str | pa.DataType) -> RegionBy:
    """By a DataFusion SQL expression over `columns`, which it calls `col0`, `col1`, ….

    It may use `murmur3(x)` and `murmur3_multi(x, …)`, and must depend on nothing but its columns.
    """
    if isinstance(columns, str) or not columns:
        raise InvalidInput(
            f"expression wants a list of column names, not {columns!r}; "
            "for a single region use unsharded()"
        )
    name = result_type if isinstance(result_type, str) else result_type_name(result_type)
    arrow_type(name)
    return RegionBy(tuple(columns), None, sql, name)


def bind(
    by: RegionBy | Sequence[RegionBy],
    schema: pa.Schema,
    field_ids: Mapping[str, int],
    primary_key: Sequence[str],
    spec_id: int,
) -> RegionSpec:
    """Check a spec against a table and resolve its columns to field ids."""
    given = list(by) if isinstance(by, list | tuple) else [by]
    parts = [part for part in given if isinstance(part, RegionBy)]
    if len(parts) != len(given):
        raise InvalidInput(
            f"regions must be bucket(…), identity(…) and the like, or a list of them, not {by!r}"
        )
    if not _is_count(spec_id) or not 1 <= spec_id < 1 << 32:
        raise InvalidInput(f"region spec id is {spec_id!r}; it must be from 1 to 2**32-1")
    if not parts:
        raise InvalidInput("a region spec wants at least one field; use unsharded() for one region")
    if len(parts) > 1 and any(part.transform == "unsharded" for part in parts):
        raise InvalidInput("unsharded() means a single region; leave it out beside other fields")
    names = _field_names(parts)
    fields = []
    for name, part in zip(names, parts, strict=True):
        types = _check_columns(part, schema, primary_key)
        unknown = [column for column in part.columns if column not in field_ids]
        if unknown:
            raise InvalidInput(
                f"columns {unknown} have no field id in the table; reopen the table and try again"
            )
        fields.append(
            RegionField(
                field_id=name,
                source_ids=tuple(field_ids[column] for column in part.columns),
                transform=part.transform,
                expression=part.expression,
                result_type=_check_types(part, types),
                parameters=dict(part.parameters),
            )
        )
    return RegionSpec(spec_id, tuple(fields))


def arrow_type(result_type: str) -> pa.DataType:
    """The Arrow type a `result_type` names."""
    kind = _RESULT_TYPES.get(result_type)
    if kind is None:
        raise InvalidInput(
            f"region values cannot be of type {result_type!r}; use one of "
            + ", ".join(_RESULT_TYPES)
        )
    return kind


def result_type_name(kind: pa.DataType) -> str:
    """The `result_type` of region values of an Arrow type."""
    if pat.is_string_view(kind):
        kind = pa.utf8()
    name = _RESULT_NAMES.get(kind)
    if name is None:
        raise InvalidInput(
            f"region values cannot be of type {kind}; use one of " + ", ".join(_RESULT_TYPES)
        )
    return name


# --- checks --------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _num_buckets(num_buckets: int) -> dict[str, str]:
    if not _is_count(num_buckets) or not 1 <= num_buckets <= MAX_BUCKETS:
        raise InvalidInput(
            f"num_buckets is {num_buckets!r}; it must be an integer from 1 to {MAX_BUCKETS}"
        )
    return {"num_buckets": str(num_buckets)}


def _field_names(parts: Sequence[RegionBy]) -> list[str]:
    if len(parts) == 1:
        transform = parts[0].transform or "expression"
        return ["bucket" if transform in ("unsharded", "identity") else transform]
    names: list[str] = []
    for part in parts:
        stem = "_".join((part.transform or "expression", *part.columns))
        name, copies = stem, 1
        while name in names:
            copies += 1
            name = f"{stem}_{copies}"
        names.append(name)
    return names


def _check_columns(
    part: RegionBy, schema: pa.Schema, primary_key: Sequence[str]
) -> list[pa.DataType]:
    kind = part.transform or "expression"
    for column in part.columns:
        if column not in schema.names:
            raise InvalidInput(
                f"region {kind} names column {column!r}, which the table does not have; "
                f"its columns are {', '.join(schema.names)}"
            )
    if len(set(part.columns)) != len(part.columns):
        raise InvalidInput(f"region {kind} names a column twice: {list(part.columns)}")
    outside = [column for column in part.columns if column not in primary_key]
    if primary_key and outside:
        raise InvalidInput(
            f"region {kind} uses {outside}, which is not part of the primary key "
            f"{list(primary_key)}: when such a value changes, the same key would live in two "
            f"regions and its newest row could not be told. Divide by key columns only, or make "
            f"{outside} part of the primary key"
        )
    return [schema.field(column).type for column in part.columns]


def _is_dated(kind: pa.DataType) -> bool:
    return bool(pat.is_date(kind) or pat.is_timestamp(kind))


def _is_clocked(kind: pa.DataType) -> bool:
    return bool(pat.is_timestamp(kind) or pat.is_time(kind))


def _is_identifying(kind: pa.DataType) -> bool:
    return kind in _RESULT_NAMES or bool(pat.is_string_view(kind))


def _is_truncatable(kind: pa.DataType) -> bool:
    return bool(
        pat.is_integer(kind)
        or pat.is_string(kind)
        or pat.is_large_string(kind)
        or pat.is_string_view(kind)
    )


def _is_bucketable(kind: pa.DataType) -> bool:
    return bucket_hashable(kind) or bool(pat.is_string_view(kind))


_ALLOWED: Mapping[str, tuple[Callable[[pa.DataType], bool], str]] = {
    "identity": (_is_identifying, "a boolean, integer, string, binary or date32"),
    "bucket": (
        _is_bucketable,
        "a boolean, number, string, date32, time or timestamp, the types Lance buckets by "
        "(multi_bucket([column], n) also takes binary and date64)",
    ),
    "multi_bucket": (
        murmur3_hashable,
        "a boolean, number, string, binary, date, time, timestamp or duration",
    ),
    "year": (_is_dated, "a date or timestamp"),
    "month": (_is_dated, "a date or timestamp"),
    "day": (_is_dated, "a date or timestamp"),
    "hour": (_is_clocked, "a time or timestamp"),
    "truncate": (_is_truncatable, "a string or integer"),
}


def _check_types(part: RegionBy, types: Sequence[pa.DataType]) -> str:
    """Refuse types the transform does not take, and name the type of its values."""
    if part.expression is not None:
        from penstock.memwal import expressions  # loads DataFusion, which few tables need

        if part.result_type is None:
            raise InvalidInput(f"region expression {part.expression!r} wants a result_type")
        expressions.check(part.expression, types, arrow_type(part.result_type))
        return part.result_type
    if part.transform == "unsharded":
        return "int32"
    if part.transform is None or part.transform not in _ALLOWED:
        raise InvalidInput(
            f"there is no region transform {part.transform!r}; use one of "
            + ", ".join(("unsharded", *_ALLOWED))
        )
    allows, wanted = _ALLOWED[part.transform]
    for column, kind in zip(part.columns, types, strict=True):
        if not allows(kind):
            raise InvalidInput(
                f"region {part.transform} cannot use column {column!r} of type {kind}: "
                f"it wants {wanted}"
            )
    if part.transform in ("identity", "truncate"):
        return result_type_name(types[0])
    return "int32"
