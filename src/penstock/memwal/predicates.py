"""What a filter says, as a small tree: comparisons of columns with constants, and how they join.

The tree is read from DataFusion's parsed expression. A constant enters it only if the column's type
holds it exactly, so that it does not matter which side of a comparison is cast. Whatever is not
certain to mean the same to Lance becomes `Unknown`, which matches nothing and rules nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import pyarrow as pa
import pyarrow.types as pat
from datafusion import Expr, SessionConfig, SessionContext

_MIRRORED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


CONNECTIVES = {"AND", "OR"}


_IS_TRUTH = {"IsTrue": (True, False), "IsFalse": (False, False), "IsUnknown": (None, False)} | {
    "IsNotTrue": (True, True),
    "IsNotFalse": (False, True),
    "IsNotUnknown": (None, True),
}


@dataclass(frozen=True, slots=True)
class Constant:
    value: bool | None


@dataclass(frozen=True, slots=True)
class Compare:
    """A column against a value of its own type, never NULL."""

    column: str
    op: str
    value: pa.Scalar


@dataclass(frozen=True, slots=True)
class OneOf:
    """A column in a list of values of its own type; `has_null` if NULL was listed too."""

    column: str
    values: pa.Array
    has_null: bool


@dataclass(frozen=True, slots=True)
class IsNull:
    column: str


@dataclass(frozen=True, slots=True)
class TextMatch:
    """A LIKE that is no more than `starts_with`, `ends_with` or `match_substring`."""

    column: str
    kernel: str
    text: str


@dataclass(frozen=True, slots=True)
class And:
    parts: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Or:
    parts: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Predicate


@dataclass(frozen=True, slots=True)
class Truth:
    """Whether a predicate is true, false or NULL (None); itself never NULL."""

    part: Predicate
    wanted: bool | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Anything else: it may be true of any row."""


@dataclass(frozen=True, slots=True)
class Like(Unknown):
    """A LIKE with wildcards inside, without escapes: only who has an index can say more of it."""

    column: str
    pattern: str


Predicate: TypeAlias = (
    Constant | Compare | OneOf | IsNull | TextMatch | And | Or | Not | Truth | Unknown
)


def column_name(expr: Expr) -> str:
    return str(expr.to_variant().name())


def walk(expr: Expr) -> Iterator[Expr]:
    pending = [expr]
    while pending:
        part = pending.pop()
        yield part
        if part.variant_name() not in ("Column", "Literal"):
            pending.extend(part.rex_call_operands())


def predicate_of(expr: Expr, schema: pa.Schema) -> Predicate:
    variant = expr.variant_name()
    if variant == "Column":
        name = column_name(expr)
        return (
            Compare(name, "=", pa.scalar(True)) if _is(schema, name, pat.is_boolean) else Unknown()
        )
    if variant == "Literal":
        value = constant_of(expr)
        known = value is not None and (not value.is_valid or pat.is_boolean(value.type))
        return Constant(value.as_py()) if value is not None and known else Unknown()
    operands = expr.rex_call_operands()
    if variant == "Not":
        return Not(predicate_of(operands[0], schema))
    if variant in _IS_TRUTH:
        wanted, negated = _IS_TRUTH[variant]
        return _negated(Truth(predicate_of(operands[0], schema), wanted), negated)
    if variant in ("IsNull", "IsNotNull"):
        inner: Predicate
        if operands[0].variant_name() == "Column":
            inner = IsNull(column_name(operands[0]))
        else:
            inner = Truth(predicate_of(operands[0], schema), None)
        return _negated(inner, variant == "IsNotNull")
    if variant == "BinaryExpr":
        return _binary(str(expr.to_variant().op()), operands, schema)
    if variant == "Between":
        low = _compare(operands[0], ">=", operands[1], schema)
        high = _compare(operands[0], "<=", operands[2], schema)
        return _negated(And((low, high)), expr.to_variant().negated())
    if variant == "InList":
        return _negated(_one_of(operands, schema), expr.to_variant().negated())
    if variant == "Like":
        return _negated(_like(expr, schema), expr.to_variant().negated())
    return Unknown()


def _negated(predicate: Predicate, negated: bool) -> Predicate:
    return Not(predicate) if negated else predicate


def _binary(op: str, operands: Sequence[Expr], schema: pa.Schema) -> Predicate:
    if op in CONNECTIVES:
        kind: type[And] | type[Or] = And if op == "AND" else Or
        parts: list[Predicate] = []
        for operand in operands:
            part = predicate_of(operand, schema)
            parts.extend(part.parts if isinstance(part, kind) else (part,))
        return kind(tuple(parts))
    if op not in _MIRRORED:
        return Unknown()
    left, right = operands
    if right.variant_name() == "Column":
        return _compare(right, _MIRRORED[op], left, schema)
    return _compare(left, op, right, schema)


def _compare(column: Expr, op: str, constant: Expr, schema: pa.Schema) -> Predicate:
    value = _value(column, constant, schema)
    if value is None:
        return Unknown()
    return Compare(column_name(column), op, value) if value.is_valid else Constant(None)


def _one_of(operands: Sequence[Expr], schema: pa.Schema) -> Predicate:
    values = []
    for constant in operands[1:]:
        value = _value(operands[0], constant, schema)
        if value is None:
            return Unknown()
        values.append(value)
    listed = pa.array(values, values[0].type).drop_null()
    return OneOf(column_name(operands[0]), listed, len(listed) < len(values))


def _like(expr: Expr, schema: pa.Schema) -> Predicate:
    column, pattern = expr.rex_call_operands()
    if column.variant_name() != "Column" or not _is(schema, column_name(column), is_text):
        return Unknown()
    name = column.canonical_name()
    is_plain = expr.canonical_name().startswith((f"{name} LIKE ", f"{name} NOT LIKE "))  # no ILIKE
    text = constant_of(pattern)
    if not is_plain or expr.to_variant().escape_char() or text is None or not text.is_valid:
        return Unknown()
    bare = text.as_py().strip("%")
    named = column_name(column)
    if not bare or any(character in bare for character in "%_\\"):
        return Unknown() if not bare or "\\" in bare else Like(named, text.as_py())
    kernels = {
        bare: "equal",
        bare + "%": "starts_with",
        "%" + bare: "ends_with",
        "%" + bare + "%": "match_substring",
    }
    kernel = kernels.get(text.as_py())
    if kernel is None:
        return Unknown()
    if kernel == "equal":
        return Compare(named, "=", pa.scalar(bare, schema.field(named).type))
    return TextMatch(named, kernel, bare)


def _is(schema: pa.Schema, name: str, test: Callable[[pa.DataType], bool]) -> bool:
    return bool(test(schema.field(name).type))


def is_text(kind: pa.DataType) -> bool:
    return bool(pat.is_string(kind) or pat.is_large_string(kind))


def _value(column: Expr, constant: Expr, schema: pa.Schema) -> pa.Scalar | None:
    """The constant in the column's type (NULL stays NULL); None unless that is exact."""
    if column.variant_name() != "Column":
        return None
    value = constant_of(constant)
    kind = schema.field(column_name(column)).type
    if value is None or not _is_comparable(kind):
        return None
    return _exact(value, kind) if value.is_valid else pa.scalar(None, kind)


def constant_of(expr: Expr) -> pa.Scalar | None:
    variant = expr.variant_name()
    try:
        if variant == "Literal":
            value = expr.python_value()
        elif variant == "Cast" and expr.rex_call_operands()[0].variant_name() == "Literal":
            one = pa.RecordBatch.from_pydict({"one": [1]})
            value = session()[0].read_batch(one).select(expr.alias("value")).collect()[0][0][0]
        else:
            return None
    except (
        Exception
    ):  # a constant DataFusion cannot give, or that does not parse: leave it to Lance
        return None
    # Larger numbers are doubles to Lance; so are casts to float of another width.
    if not isinstance(value, pa.Scalar) or pat.is_uint64(value.type):
        return None
    return None if variant == "Cast" and pat.is_floating(value.type) else value


def _is_comparable(kind: pa.DataType) -> bool:
    zone = kind.tz if pat.is_timestamp(kind) else None
    return bool(
        pat.is_boolean(kind)
        or pat.is_integer(kind)
        or pat.is_float32(kind)
        or pat.is_float64(kind)
        or is_text(kind)
        or pat.is_binary(kind)
        or pat.is_large_binary(kind)
        or pat.is_date32(kind)
        or (pat.is_timestamp(kind) and zone in (None, "UTC"))
    )


def _exact(value: pa.Scalar, kind: pa.DataType) -> pa.Scalar | None:
    source = value.type
    if source == kind and not pat.is_timestamp(kind):
        return value
    if pat.is_timestamp(kind):
        if not (pat.is_date32(source) or (pat.is_timestamp(source) and source.tz is None)):
            return None
        steps = [pa.timestamp("ns"), pa.timestamp("us"), pa.timestamp(kind.unit), kind]
    elif pat.is_floating(kind):
        if not (pat.is_floating(source) or pat.is_integer(source)):
            return None
        steps = [pa.float64(), kind]
    else:
        families = (pat.is_boolean, pat.is_integer, is_text, _is_bytes, pat.is_date32)
        if not any(family(kind) and family(source) for family in families):
            return None
        steps = [kind]
    try:
        cast = value
        for step in steps:
            cast = cast.cast(step)
        back = cast.cast(source) if not pat.is_timestamp(kind) else cast
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return cast if pat.is_timestamp(kind) or back.equals(value) else None


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pat.is_binary(kind) or pat.is_large_binary(kind))


def settled(predicate: Predicate) -> Predicate:
    """The tree without what Lance's optimizer may take differently.

    It folds lists on one column, `x IN (0) AND x IN (1)` to false and `x NOT IN (0) OR x NOT IN
    (1)` to true, also where x is NULL. Between the parts of the outermost AND that cannot be seen.
    """
    if isinstance(predicate, And):
        return And(tuple(settled(part) for part in predicate.parts))
    negates = False
    tested: set[str] = set()
    is_twice = False
    pending: list[Predicate] = [predicate]
    while pending:
        match pending.pop():
            case OneOf(column, _, _) | Compare(column, "=" | "!=", _) as leaf:
                is_twice |= column in tested
                tested.add(column)
                negates |= isinstance(leaf, Compare) and leaf.op == "!="
            case And(parts) | Or(parts):
                pending.extend(parts)
            case Not(part) | Truth(part, _):
                negates = True
                pending.append(part)
            case _:
                continue
    return Unknown() if negates and is_twice else predicate


@lru_cache(maxsize=1)
def session() -> tuple[SessionContext, Mapping[str, str]]:
    """The session filters are parsed in, and the functions a filter may not call."""
    config = SessionConfig().with_target_partitions(1).with_information_schema(True)
    session = SessionContext(
        config.set("datafusion.sql_parser.enable_ident_normalization", "false")
    )
    listed = session.sql(
        "SELECT routine_name AS name, bool_or(function_type = 'SCALAR') AS scalar, "
        "bool_and(is_deterministic) AS steady FROM information_schema.routines GROUP BY 1"
    ).to_arrow_table()
    refused = {}
    for row in listed.to_pylist():
        if not row["scalar"]:
            refused[row["name"]] = "several rows"
        elif not row["steady"]:
            refused[row["name"]] = "unsteady"
    return session, refused
