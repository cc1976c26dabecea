"""What an update sets: columns, and the constant or the SQL expression each of them gets.

`Assignments.parse` checks everything that can be known without a row: that the columns exist and
are no key, that an expression is understood and gives something of the column's type. `apply`
works the expressions out for a batch, whole columns at a time, all from the values of before. What
only a row can show (a number too large, a null where none may be) is refused there, with the
column's name; whoever calls it does so for every row before the first one is changed.

A string is an SQL expression, as it is in Lance; anything else is a value. Whole numbers are
computed in 64 bits and must fit the column. DataFusion lets sums and products of 64 bits wrap
around without a word, so they are computed a second time as floats, and refused if the two differ
by as much as a wrap does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from datafusion import Expr

from penstock.errors import InvalidInput
from penstock.memwal.filters import evaluated, parse_value
from penstock.memwal.ingest import to_column
from penstock.memwal.predicates import walk
from penstock.memwal.shape import TableShape

_WRAPPED = 2.0**62
"""A sum that wrapped around is off by 2**64; one that was only rounded, by much less than this."""
_ARITHMETIC = {"+", "-", "*"}


@dataclass(frozen=True, slots=True, eq=False)
class _Expression:
    field: pa.Field
    sql: str
    expr: Expr
    reads: tuple[str, ...]
    may_wrap: bool

    def values(self, rows: pa.RecordBatch) -> pa.Array:
        used = _widened(rows.select(list(self.reads)))
        result = self._evaluated(used)
        if self.may_wrap and pat.is_integer(result.type):
            self._check_wrapped(used, result)
        try:
            return to_column(self.field, result)
        except InvalidInput as error:
            raise InvalidInput(f"{_what(self.field.name)} {self.sql!r}: {error}") from error

    def _evaluated(self, rows: pa.RecordBatch) -> pa.Array:
        try:
            return evaluated(self.expr, rows)
        except Exception as error:  # DataFusion raises no class of its own
            raise InvalidInput(
                f"{_what(self.field.name)} {self.sql!r} cannot be worked out: {error}; "
                "nothing was changed. Leave such rows out with where, or write a CASE"
            ) from error

    def _check_wrapped(self, rows: pa.RecordBatch, result: pa.Array) -> None:
        columns = [_rough(c) if pat.is_integer(c.type) else c for c in rows.columns]
        floats = pa.RecordBatch.from_arrays(columns, names=rows.schema.names)
        try:
            rough = _rough(evaluated(self.expr, floats))
        except Exception:  # something that floats cannot do, such as a shift
            return
        off = np.abs(
            rough.fill_null(0).to_numpy(zero_copy_only=False)
            - _rough(result).fill_null(0).to_numpy(zero_copy_only=False)
        )
        if len(off) and float(np.nanmax(off)) > _WRAPPED:
            row = int(np.nanargmax(off))
            raise InvalidInput(
                f"{_what(self.field.name)} {self.sql!r} is too large for {result.type} where "
                f"{rows.slice(row, 1).to_pylist()[0]}; nothing was changed"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Assignments:
    columns: tuple[str, ...]
    """Those that get new values, in the table's order."""
    reads: tuple[str, ...]
    """Those whose values of before are needed."""
    _constants: Mapping[str, pa.Array]
    _expressions: tuple[_Expression, ...]

    @classmethod
    def parse(cls, values: Any, shape: TableShape) -> Assignments:
        if not isinstance(values, Mapping) or not values:
            raise InvalidInput(
                f"values must say what to set, such as {{'price': 'price * 2'}}, not {values!r}"
            )
        names = shape.schema.names
        constants: dict[str, pa.Array] = {}
        expressions = []
        for name, value in values.items():
            if name not in names:
                raise InvalidInput(f"no column {name!r}; the table has {', '.join(names)}")
            if name in shape.key_columns:
                raise InvalidInput(
                    f"column {name!r} is part of the primary key, which is what a row is known "
                    "by; upsert a row with the new key and delete the old one"
                )
            field = shape.schema.field(name)
            if isinstance(value, str):
                parsed = _expression(field, value, shape.schema)
                if parsed.reads:
                    expressions.append(parsed)
                    continue
                one = parsed.expr, pa.RecordBatch.from_pydict({"one": [1]})
                constants[name] = _constant(field, evaluated(*one), value)
            elif isinstance(value, pa.Scalar):
                constants[name] = _constant(field, pa.repeat(value, 1), value)
            else:
                constants[name] = _constant(field, [value], value)
        read = {column for parsed in expressions for column in parsed.reads}
        return cls(
            tuple(name for name in names if name in values),
            tuple(name for name in names if name in read),
            constants,
            tuple(expressions),
        )

    def apply(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """The new values of rows that have at least the columns of `reads`."""
        result = {parsed.field.name: parsed.values(rows) for parsed in self._expressions}
        first = pa.array(np.zeros(rows.num_rows, dtype=np.int64))
        for name, value in self._constants.items():
            result[name] = value.take(first)
        return {name: result[name] for name in self.columns}


def _expression(field: pa.Field, sql: str, schema: pa.Schema) -> _Expression:
    what = _what(field.name)
    expr, reads = parse_value(sql, schema, what)
    parts = [part for part in walk(expr) if part.variant_name() == "BinaryExpr"]
    may_wrap = any(str(part.to_variant().op()) in _ARITHMETIC for part in parts)
    parsed = _Expression(field, sql, expr, reads, may_wrap)
    if reads:
        nothing = pa.RecordBatch.from_pylist([], schema=schema.remove_metadata())
        try:
            parsed.values(nothing)
        except InvalidInput as error:
            raise InvalidInput(
                f"{error}. Convert it: cast(… as …), or write text in 'single quotes'"
            ) from error
    return parsed


def _constant(field: pa.Field, values: Any, given: object) -> pa.Array:
    try:
        return to_column(field, values)
    except InvalidInput as error:
        hint = "; a string is an SQL expression, a text is written \"'text'\""
        raise InvalidInput(
            f"{_what(field.name)} {given!r}: {error}{hint if isinstance(given, str) else ''}"
        ) from error


def _rough(column: pa.Array) -> pa.Array:
    return pc.cast(column, pa.float64(), safe=False)


def _widened(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Whole numbers in 64 bits, in which sums of them have room."""
    narrow = [pat.is_integer(kind) and kind.bit_width < 64 for kind in rows.schema.types]
    if not any(narrow):
        return rows
    columns = [
        pc.cast(column, pa.int64()) if is_narrow else column
        for column, is_narrow in zip(rows.columns, narrow, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def _what(name: str) -> str:
    return f"the new value of column {name!r}"
