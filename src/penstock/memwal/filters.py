"""A user's filter: checked once against a table, then evaluated on rows in memory as Lance would.

The base and the generations are filtered by Lance, MemTables and the WAL tail here, and a row must
not appear or vanish by moving from one to the other. So Lance is the judge of everything: it plans
each filter once, over an empty dataset of the table's schema, and what it refuses is refused.

How data flows: `Filter.parse` checks the text, lets Lance plan it, and reads it a second time with
DataFusion's parser, which Lance uses too, into a small tree of predicates. The tree decides which
regions may match (`pruning`). `Filter.mask` takes the first of three ways that is certain to agree
with Lance:
1. Arrow kernels, when the tree is made of comparisons of columns with constants only;
2. DataFusion, when types and functions are among those both treat alike;
3. Lance itself, on the rows written to memory. It also settles what fails in DataFusion.

Where the dialect surprises: "x" in double quotes is text and `x` in backticks a column, as in
Lance; a double-quoted column name is refused, since most people mean the column. Names are found
regardless of case. NaN is above every number, or below if its sign is set. -0.0 equals 0.0.

Invariants:
- A constant enters the tree only if the column's type holds it exactly, so that it does not matter
  which side Lance casts. Anything else is `Unknown`, which matches no kernel and prunes nothing.
- The rows given may be of any chunking; the mask has one value per row, in order, False for NULL.
- Everything here may be called from many threads; the shared session is only read from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from datafusion import Expr

from penstock.errors import InvalidInput
from penstock.memwal.predicates import (
    CONNECTIVES,
    And,
    Compare,
    Constant,
    IsNull,
    Not,
    OneOf,
    Or,
    Predicate,
    TextMatch,
    Truth,
    Unknown,
    column_name,
    constant_of,
    is_text,
    predicate_of,
    session,
    settled,
    walk,
)

Rows: TypeAlias = "pa.RecordBatch | pa.Table"
Mask: TypeAlias = npt.NDArray[np.bool_]

MAX_SQL_CHARS = 1 << 20
_SCHEMAS = 64
_KNOWN_FILTERS = 256
_SHORT_SQL_CHARS = 4096
"""Filters up to this length are parsed once and kept."""
_FEW_VALUES = 16
_ROW = "_penstock_row"

_TOKEN = re.compile(
    r"""(?P<prefixed>[A-WYZa-wyz]'|[uU]&')|(?P<text>'(?:''|[^'])*'|"(?:""|[^"])*")"""
    r"""|(?P<quoted>`(?:``|[^`])*`)|(?P<name>[^\W\d][\w$]*)"""
    r"""|(?P<bad>--|/\*|\$|;|\?)|(?P<other>\s+|\d[\w.]*|.)""",
    re.DOTALL,
)
# fmt: off
# Never a column unless in backticks, whatever the table's columns are called.
_KEYWORDS = frozenset({
    "and", "array", "as", "between", "bigint", "boolean", "case", "cast", "date", "datetime",
    "distinct", "else", "end", "escape", "false", "from", "ilike", "in", "int", "interval", "is",
    "like", "not", "null", "or", "select", "string", "then", "timestamp", "true", "try_cast",
    "when",
})
# Functions that were compared with Lance, whose DataFusion is another version.
_TRUSTED_FUNCTIONS = frozenset({
    "abs", "btrim", "character_length", "coalesce", "concat", "contains", "date_part", "ends_with",
    "left", "lower", "ltrim", "nullif", "octet_length", "replace", "reverse", "right",
    "rtrim", "starts_with", "strpos", "substr", "upper",
})
_TRUSTED_VARIANTS = frozenset({
    "Alias", "Between", "BinaryExpr", "Column", "InList", "IsFalse", "IsNotFalse", "IsNotNull",
    "IsNotTrue", "IsNull", "IsTrue", "Like", "Literal", "Negative", "Not", "ScalarFunction",
})
# fmt: on
_COMPARISONS: Mapping[str, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


# --- the filter ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """A filter Lance accepts for the table: `sql` as the user gave it, the columns it reads."""

    sql: str
    columns: tuple[str, ...]
    predicate: Predicate
    _trusted: Expr | None = field(repr=False)

    @classmethod
    def parse(cls, sql: str, schema: pa.Schema) -> Filter:
        """Check a filter against a table's columns; `InvalidInput` says what is wrong with it."""
        if not isinstance(sql, str) or not sql.strip() or len(sql) > MAX_SQL_CHARS:
            raise InvalidInput(
                f"a filter is SQL text of 1 to {MAX_SQL_CHARS} characters, such as "
                f"\"price > 3 AND name = 'a'\", not {_shown(sql)}"
            )
        return _remembered(sql, schema) if len(sql) <= _SHORT_SQL_CHARS else _parsed(sql, schema)

    def mask(self, rows: Rows) -> Mask:
        """Which rows Lance would return for this filter."""
        count = rows.num_rows
        if not count:
            return np.zeros(0, np.bool_)
        result = _by_kernels(self.predicate, rows)
        if isinstance(result, pa.ChunkedArray):
            result = result.combine_chunks()
        if result is None and self._trusted is not None:
            result = _by_datafusion(self._trusted, rows.select(list(self.columns)), count)
        if result is not None:
            dense = result.fill_null(False) if result.null_count else result
            mask: Mask = dense.to_numpy(zero_copy_only=False)
            return mask
        return self._by_lance(rows)

    def _by_lance(self, rows: Rows) -> Mask:
        columns = [rows.column(name) for name in self.columns]
        fields = [rows.schema.field(name) for name in self.columns]
        numbers = pa.array(np.arange(rows.num_rows, dtype=np.int64))
        table = pa.table(
            [*columns, numbers], schema=pa.schema([*fields, pa.field(_ROW, pa.int64())])
        )
        try:
            dataset = lance.write_dataset(table, "memory://")
            found = dataset.to_table(columns=[_ROW], filter=f"({self.sql})")
        except Exception as error:  # Lance raises classes of many kinds here
            raise InvalidInput(f"the filter {self.sql!r} failed: {_reason(error)}") from error
        mask = np.zeros(rows.num_rows, np.bool_)
        mask[found.column(_ROW).to_numpy()] = True
        return mask


# --- checking ------------------------------------------------------------------------------


def _tokens(sql: str, schema: pa.Schema, what: str = "the filter") -> list[re.Match[str]]:
    """The words of a filter, refusing what Lance ignores, panics on, or takes for text."""
    tokens = list(_TOKEN.finditer(sql))
    depth = 0
    for position, token in enumerate(tokens):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token["bad"] or token["prefixed"]:
            raise InvalidInput(
                f"{what} {_shown(sql)} contains {token[0]!r}; comments, parameters, prefixed "
                "strings and several statements are not allowed"
            )
        if depth < 0:
            raise InvalidInput(f"{what} {_shown(sql)} closes a parenthesis it did not open")
        if token["text"] and token[0][0] == '"' and token[0][1:-1] in schema.names:
            name = token[0][1:-1]
            raise InvalidInput(
                f"{what} {_shown(sql)}: {token[0]} in double quotes is text; write `{name}` in "
                f"backticks for the column, or '{name}' in single quotes for the text"
            )
        if token["name"] and token["name"] not in schema.names:
            _check_function(sql, token["name"].lower(), _opens(tokens, position + 1), what)
    return tokens


def _check_function(sql: str, name: str, is_call: bool, what: str) -> None:
    kinds = session()[1].get(name)
    if kinds is None or not (is_call or name.startswith("current_")):
        return
    if kinds == "several rows":
        raise InvalidInput(
            f"{what} {_shown(sql)} calls {name}(), which looks at several rows; "
            "it is worked out for each row by itself"
        )
    raise InvalidInput(
        f"{what} {_shown(sql)} calls {name}(), whose answer changes from one call to the next; "
        "compute the value first and put it in as a constant"
    )


_LITERAL_HINTS = {
    "Timestamp": "Write timestamp '2021-06-01 00:00:00'. ",
    "Date": "Write date '2021-06-01'. ",
    "Decimal": "Write cast(2.50 as decimal(10, 2)). ",
}


def _parsed(sql: str, schema: pa.Schema) -> Filter:
    tokens = _tokens(sql, schema)
    _plan_in_lance(sql, schema)
    expr = _parse(_resolved(tokens, schema), schema)
    if expr is None:
        return Filter(sql, _named(tokens, schema), Unknown(), None)
    names = {column_name(part) for part in walk(expr) if part.variant_name() == "Column"}
    columns = tuple(name for name in schema.names if name in names)
    predicate = predicate_of(expr, schema)
    simplified = settled(predicate)
    is_trusted = simplified == predicate and _is_trusted(expr, schema)
    return Filter(sql, columns, simplified, expr if is_trusted else None)


_remembered = lru_cache(maxsize=_KNOWN_FILTERS)(_parsed)


def parse_value(sql: str, schema: pa.Schema, what: str) -> tuple[Expr, tuple[str, ...]]:
    """An SQL expression in the same dialect, and the columns it reads; `what` names it.

    Rows get new values nowhere but here, so DataFusion alone is the judge of it.
    """
    if not sql.strip() or len(sql) > MAX_SQL_CHARS:
        raise InvalidInput(f"{what} is SQL text of 1 to {MAX_SQL_CHARS} characters, not {sql!r}")
    tokens = _tokens(sql, schema, what)
    empty = pa.RecordBatch.from_pylist([], schema=schema.remove_metadata())
    try:
        expr = session()[0].read_batch(empty).parse_sql_expr(_resolved(tokens, schema))
        names = {column_name(part) for part in walk(expr) if part.variant_name() == "Column"}
    except Exception as error:  # DataFusion raises no class of its own
        raise InvalidInput(
            f"{what} {_shown(sql)} is not understood: {_reason(error).partition(' Valid ')[0]} "
            f"The columns are {_columns(schema)}; text is written in 'single quotes'"
        ) from error
    return expr, tuple(name for name in schema.names if name in names)


def value_type(sql: str, schema: pa.Schema, what: str) -> pa.DataType:
    """The type of what an expression comes to, as a column can have it."""
    expr, _ = parse_value(sql, schema, what)
    try:
        kind = evaluated(expr, pa.RecordBatch.from_pylist([], schema=schema.remove_metadata())).type
    except Exception as error:  # DataFusion raises no class of its own
        raise InvalidInput(f"{what} {_shown(sql)} has no type: {_reason(error)}") from error
    if pat.is_null(kind):
        raise InvalidInput(f"{what} {_shown(sql)} is always null; give its type instead")
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return views.get(kind, kind)


def evaluated(expr: Expr, rows: pa.RecordBatch) -> pa.Array:
    """What an expression comes to for each row; raises whatever DataFusion does."""
    frame = session()[0].read_batch(rows).select(expr.alias("value"))
    parts = [part.column(0) for part in frame.collect()]
    if not parts:
        return pa.array([], frame.schema().field(0).type)
    return pa.concat_arrays(parts)


def _plan_in_lance(sql: str, schema: pa.Schema) -> None:
    try:
        _empty_dataset(schema.serialize().to_pybytes()).scanner(filter=f"({sql})").explain_plan()
    except Exception as error:  # Lance raises classes of many kinds here
        reason = _reason(error)
        unknown = re.search(r"No field named \"*([^\".]+(?:\.[^\". ]+)*)", reason)
        if unknown:
            raise _unknown_column(sql, unknown[1], schema) from error
        hint = next(
            (hint for kind, hint in _LITERAL_HINTS.items() if f"type '{kind}" in reason), ""
        )
        raise InvalidInput(
            f"the filter {_shown(sql)} does not fit the table: {reason}. {hint}"
            f"Its columns are {_columns(schema)}"
        ) from error
    for token in _TOKEN.finditer(sql):
        name = token["name"] or (token["quoted"] or "").strip("`")
        if name.lower().startswith("_row") and name not in schema.names:
            raise _unknown_column(sql, name, schema)


def _unknown_column(sql: str, name: str, schema: pa.Schema) -> InvalidInput:
    lowered = {column.lower(): column for column in schema.names}
    near = difflib.get_close_matches(name.lower(), lowered, 1)
    hint = f"; did you mean {lowered[near[0]]!r}?" if near else ";"
    return InvalidInput(
        f"the filter {_shown(sql)} names column {name!r}, which the table does not have{hint} "
        f"its columns are {_columns(schema)}"
    )


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema)


@lru_cache(maxsize=_SCHEMAS)
def _empty_dataset(schema: bytes) -> lance.LanceDataset:
    table = pa.ipc.read_schema(pa.py_buffer(schema)).empty_table()
    return lance.write_dataset(table, "memory://")


def _shown(sql: object) -> str:
    text = repr(sql)
    return text if len(text) <= 200 else text[:200] + "…"


def _reason(error: Exception) -> str:
    text = re.sub(r", \S*\.rs:\d+:\d+", "", " ".join(str(error).split()))
    text = text.removeprefix("Invalid user input: ").removeprefix("DataFusion error: ")
    return text if len(text) <= 300 else text[:300] + "…"


# --- parsing -------------------------------------------------------------------------------


def _opens(tokens: Sequence[re.Match[str]], position: int) -> bool:
    while position < len(tokens) and tokens[position][0].isspace():
        position += 1
    return position < len(tokens) and tokens[position][0] == "("


def _match_name(name: str, schema: pa.Schema) -> str | None:
    if name in schema.names:
        return name
    lowered = name.lower()
    return next((column for column in schema.names if column.lower() == lowered), None)


def _resolved(tokens: Sequence[re.Match[str]], schema: pa.Schema) -> str:
    """The filter in DataFusion's dialect: column names as the table has them, text in quotes."""
    body: list[str] = []
    for position, token in enumerate(tokens):
        name = token["name"]
        if token["text"] and token[0][0] == '"':
            text = token[0][1:-1].replace('""', '"').replace("'", "''")
            body.append(f"'{text}'")
        elif name and name not in schema.names and name.lower() not in _KEYWORDS:
            following = tokens[position + 1] if position + 1 < len(tokens) else None
            is_part = bool(body) and body[-1] == "."
            is_prefix = following is not None and following["text"] is not None  # X'00', date'…'
            is_name = not (is_part or is_prefix or _opens(tokens, position + 1))
            column = _match_name(name, schema) if is_name else None
            body.append(f"`{column}`" if column else name)
        else:
            body.append(token[0])
    return "".join(body)


def _named(tokens: Sequence[re.Match[str]], schema: pa.Schema) -> tuple[str, ...]:
    """Every column a filter can refer to, when only Lance understands it."""
    words = [token["name"] or (token["quoted"] or "").strip("`") for token in tokens]
    found = {_match_name(word, schema) for word in words if word}
    return tuple(name for name in schema.names if name in found)


def _parse(sql: str, schema: pa.Schema) -> Expr | None:
    """DataFusion's reading; None for what only Lance knows, such as functions of its own."""
    if len({name.lower() for name in schema.names}) < len(schema.names):
        return None  # which of two columns is meant is Lance's to say
    empty = pa.RecordBatch.from_pylist([], schema=schema.remove_metadata())
    try:
        return session()[0].read_batch(empty).parse_sql_expr(sql)
    except Exception:  # DataFusion raises no class of its own, and Lance has accepted the filter
        return None


# --- building the tree ---------------------------------------------------------------------


# --- evaluating ----------------------------------------------------------------------------


def _by_kernels(predicate: Predicate, rows: Rows) -> pa.Array | None:
    """The predicate by Arrow kernels, NULLs included; None if that might differ from Lance."""
    match predicate:
        case Constant(value):
            return pa.repeat(pa.scalar(value, pa.bool_()), rows.num_rows)
        case Compare(name, op, value):
            column = _steady(rows.column(name))
            return None if column is None else _COMPARISONS[op](column, value)
        case OneOf(name, values, has_null):
            return _is_one_of(rows.column(name), values, has_null)
        case IsNull(name):
            return pc.is_null(rows.column(name))
        case TextMatch(name, kernel, text):
            return getattr(pc, kernel)(rows.column(name), text)
        case And(parts) | Or(parts):
            combine = pc.and_kleene if isinstance(predicate, And) else pc.or_kleene
            results = []
            for part in parts:
                result = _by_kernels(part, rows)
                if result is None:
                    return None
                results.append(result)
            return reduce(combine, results)
        case Not(part):
            inner = _by_kernels(part, rows)
            return None if inner is None else pc.invert(inner)
        case Truth(part, wanted):
            inner = _by_kernels(part, rows)
            if inner is None or wanted is None:
                return None if inner is None else pc.is_null(inner)
            return pc.fill_null(inner if wanted else pc.invert(inner), False)
        case Unknown():
            return None


def _steady(column: pa.Array) -> pa.Array | None:
    """The column, unless it has NaNs: Lance orders them, the kernels do not."""
    if pat.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
        return None
    return column


def _is_one_of(column: pa.Array, values: pa.Array, has_null: bool) -> pa.Array | None:
    if pat.is_floating(column.type):
        steady = _steady(column)  # and no hashing, which tells -0.0 from 0.0
        if steady is None or not 1 <= len(values) <= _FEW_VALUES:
            return None
        found = reduce(pc.or_kleene, (pc.equal(steady, value) for value in values))
    else:
        found = pc.is_in(column, value_set=values)
        if column.null_count:
            found = pc.if_else(pc.is_valid(column), found, pa.scalar(None, pa.bool_()))
    return pc.or_kleene(found, pa.scalar(None, pa.bool_())) if has_null else found


_TRUSTED_TYPES: Sequence[Callable[[pa.DataType], bool]] = (
    pat.is_boolean,
    pat.is_integer,
    is_text,
    pat.is_date32,
    pat.is_timestamp,
)


def _is_trusted(expr: Expr, schema: pa.Schema) -> bool:
    """Whether DataFusion is certain to agree with Lance.

    Lance casts the constants of a comparison to its column's type, DataFusion both sides to a
    common one; for the types here that is the same, unless there is arithmetic on the constants.
    Floats are not among them: in a list of four values or more it tells -0.0 from 0.0.
    """
    for part in walk(expr):
        variant = part.variant_name()
        if variant not in _TRUSTED_VARIANTS:
            return False
        if variant == "Column":
            kind = schema.field(column_name(part)).type
            if not any(trusts(kind) for trusts in _TRUSTED_TYPES):
                return False
        elif variant == "Literal":
            value = constant_of(part)
            if value is None or pat.is_floating(value.type):
                return False
        elif variant == "ScalarFunction":
            if part.rex_call_operator() not in _TRUSTED_FUNCTIONS:
                return False
        elif variant == "BinaryExpr":
            op = str(part.to_variant().op())
            left, right = part.rex_call_operands()
            if op not in CONNECTIVES and right.variant_name() == "BinaryExpr":
                return False
            if all(side.variant_name() == "Literal" for side in (left, right)):
                return False
    return True


def _by_datafusion(expr: Expr, rows: Rows, count: int) -> pa.Array | None:
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    try:
        results: list[Any] = []
        for batch in table.combine_chunks().to_batches():
            frame = session()[0].read_batch(batch).select(expr.alias("keep"))
            results.extend(part.column(0) for part in frame.collect())
    except Exception:  # DataFusion raises no class of its own; Lance may take another order
        return None
    result = pa.chunked_array(results, pa.bool_()).combine_chunks() if results else None
    return result if result is not None and len(result) == count else None
