"""Region expressions: DataFusion SQL over `col0`, `col1`, …, checked once and evaluated fast.

`check` runs when a region spec is made and refuses an expression that could route one key to two
regions: it must parse, use each of its columns and nothing else, contain only scalar expressions
and functions that DataFusion itself declares immutable, take NULLs, give the same answer twice and
for the same value in another numeric or string type, and return what `result_type` says.
`evaluate` runs per batch of rows.

How data flows: calls of `murmur3` and `murmur3_multi` are lifted out of the SQL, since a DataFusion
function from Python has one fixed signature and these take any types. Their arguments are computed
first, hashed by `murmur`, and put beside the source columns as 64-bit columns that hold the signed
32-bit hash; `abs` of the smallest one then cannot overflow. What is left is parsed once into an
`Expr`, kept in a bounded cache, and planned anew for each batch (a few hundred microseconds).
One consequence: arguments of `murmur3` are computed for every row, also inside a CASE.

Invariants:
- Sources are widened before evaluation (integers to 64 bits, floats to double, strings to utf8),
  so promoting a column moves no row, even where the samples of `check` missed a difference.
- Rows come out in the order they went in: one batch, one partition.
- Everything here may be called from many threads; the shared session is only read from.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from datafusion import Expr, SessionConfig, SessionContext

from penstock.errors import InvalidInput
from penstock.memwal.murmur import murmur3_multi

MAX_SQL_CHARS = 4096
_CACHE_ENTRIES = 256
_MAX_NULL_TYPINGS = 512

_HASH_COLUMN = "murmur3_hash_"
_HASHES = frozenset({"murmur3", "murmur3_multi"})
# Immutable by DataFusion's book, but their answer names a type or a version.
_UNSTEADY = frozenset({"arrow_typeof", "arrow_field", "arrow_metadata", "version"})
# fmt: off
_SCALAR_VARIANTS = frozenset({
    "Alias", "Between", "BinaryExpr", "Case", "Cast", "Column", "InList", "IsFalse", "IsNotFalse",
    "IsNotNull", "IsNotTrue", "IsNotUnknown", "IsNull", "IsTrue", "IsUnknown", "Like", "Literal",
    "Negative", "Not", "RLike", "ScalarFunction", "SimilarTo", "TryCast",
})
# fmt: on
_TOKEN = re.compile(
    r"""(?P<string>[eE]'(?:\\.|''|[^'\\])*'|'(?:''|[^'])*'|"(?:""|[^"])*")"""
    r"""|(?P<name>[A-Za-z_]\w*)|(?P<bad>--|/\*|\$|;)|(?P<other>\s+|\d[\w.]*|.)""",
    re.DOTALL,
)
# Tried in turn for a source that is gone: its type is gone too, and NULL is NULL in any of them.
_NULL_TYPES = (
    pa.null(),
    pa.int64(),
    pa.utf8(),
    pa.timestamp("us"),
    pa.date32(),
    pa.float64(),
    pa.bool_(),
)


def evaluate(
    sql: str, sources: Sequence[pa.Array | None], result_type: pa.DataType, rows: int
) -> pa.Array:
    """The expression for each row; None stands for a source column the table no longer has."""
    widened = [None if source is None else _widen(source) for source in sources]
    if any(source is None for source in widened):
        types = _null_typing(sql, tuple(None if s is None else s.type for s in widened))
        widened = [
            pa.nulls(rows, kind) if source is None else source
            for source, kind in zip(widened, types, strict=True)
        ]
    return _fitted(sql, _run(sql, widened, rows), result_type)


def check(sql: str, source_types: Sequence[pa.DataType], result_type: pa.DataType) -> None:
    """Refuse an expression that is not a pure function of its columns."""
    for index, kind in enumerate(source_types):
        if pat.is_nested(kind) or pat.is_dictionary(kind):
            raise InvalidInput(
                f"region expression {sql!r}: col{index} is of type {kind}; "
                "source columns must be plain scalars"
            )
    program = _compile(sql, tuple(source_types))
    used = _check_shape(program)
    unused = [f"col{i}" for i in range(len(source_types)) if f"col{i}" not in used]
    if unused:
        raise InvalidInput(
            f"region expression {sql!r} never uses {', '.join(unused)}; leave its column out"
        )
    nulls = [pa.nulls(2, kind) for kind in source_types]
    try:
        of_nulls = _run(sql, nulls, 2)
    except InvalidInput as error:
        raise InvalidInput(
            f"region expression {sql!r} must take NULLs, as columns may be removed: {error}"
        ) from error
    _check_result_type(sql, of_nulls.type, result_type)
    samples = _samples(source_types)
    first = _outcomes(sql, samples, result_type)
    if _outcomes(sql, samples, result_type) != first:
        raise InvalidInput(
            f"region expression {sql!r} is not deterministic: it gave two answers for the same row"
        )
    for index, kind in enumerate(source_types):
        for other in _equivalent_types(kind):
            _check_promotion(sql, samples, first, result_type, index, other)


# --- compiling -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hash:
    """One lifted murmur3 call: its arguments, and the column its result goes to."""

    column: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    sql: str
    hashes: tuple[_Hash, ...]
    result: Expr


@lru_cache(maxsize=1)
def _session() -> tuple[SessionContext, frozenset[str]]:
    """The session every expression is planned in, and the names of its immutable functions."""
    config = SessionConfig().with_target_partitions(1).with_information_schema(True)
    session = SessionContext(config)
    names = session.sql(
        "SELECT DISTINCT routine_name FROM information_schema.routines "
        "WHERE function_type = 'SCALAR' AND is_deterministic"
    ).to_arrow_table()
    return session, frozenset(names.column(0).to_pylist()) - _UNSTEADY


@lru_cache(maxsize=_CACHE_ENTRIES)
def _compile(sql: str, types: tuple[pa.DataType, ...]) -> _Program:
    if not sql.strip() or len(sql) > MAX_SQL_CHARS:
        raise InvalidInput(
            f"a region expression has 1 to {MAX_SQL_CHARS} characters, not {len(sql)}"
        )
    calls: list[list[str]] = []
    body = _lift_hashes(sql, _tokens(sql), calls)
    fields = [pa.field(f"col{i}", kind) for i, kind in enumerate(types)]
    fields += [pa.field(f"{_HASH_COLUMN}{i}", pa.int64()) for i in range(len(calls))]
    empty = pa.RecordBatch.from_pylist([], schema=pa.schema(fields))
    frame = _session()[0].read_batch(empty)

    def parse(text: str) -> Expr:
        try:
            return frame.parse_sql_expr(text)
        except Exception as error:  # DataFusion raises no class of its own
            known = ", ".join(f"col{i}" for i in range(len(types)))
            raise InvalidInput(
                f"region expression {sql!r} is not a valid SQL expression over {known}: "
                f"{_reason(error)}"
            ) from error

    hashes = tuple(
        _Hash(f"{_HASH_COLUMN}{i}", tuple(parse(argument) for argument in call))
        for i, call in enumerate(calls)
    )
    return _Program(sql, hashes, parse(body))


def _tokens(sql: str) -> list[re.Match[str]]:
    tokens = list(_TOKEN.finditer(sql))
    for token in tokens:
        if token["bad"]:
            raise InvalidInput(
                f"region expression {sql!r} contains {token['bad']!r}; comments, parameters and "
                "several statements are not allowed"
            )
        if token["name"] and token["name"].lower().startswith(_HASH_COLUMN):
            raise InvalidInput(f"region expression {sql!r}: {token['name']} is a reserved name")
    return tokens


def _lift_hashes(sql: str, tokens: Sequence[re.Match[str]], calls: list[list[str]]) -> str:
    """The SQL with each murmur3 call replaced by its column; inner calls come first in `calls`."""
    body: list[str] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        name = (token["name"] or "").lower()
        if name not in _HASHES or not _opens(tokens, position):
            body.append(token[0])
            continue
        arguments, position = _arguments(sql, tokens, position)
        texts = [_lift_hashes(sql, argument, calls) for argument in arguments]
        if not all(text.strip() for text in texts) or (name == "murmur3" and len(texts) != 1):
            wanted = "one argument" if name == "murmur3" else "one argument or more"
            raise InvalidInput(f"region expression {sql!r}: {name} wants {wanted}")
        body.append(f" {_HASH_COLUMN}{len(calls)} ")
        calls.append(texts)
    return "".join(body)


def _opens(tokens: Sequence[re.Match[str]], position: int) -> bool:
    while position < len(tokens) and tokens[position][0].isspace():
        position += 1
    return position < len(tokens) and tokens[position][0] == "("


def _arguments(
    sql: str, tokens: Sequence[re.Match[str]], position: int
) -> tuple[list[list[re.Match[str]]], int]:
    """The arguments of the call whose parenthesis comes next, and the position after it."""
    arguments: list[list[re.Match[str]]] = [[]]
    depth = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        text = token[0]
        if text in ("(", "["):
            depth += 1
            if depth == 1:
                continue
        elif text in (")", "]"):
            depth -= 1
            if depth == 0:
                return arguments, position
        elif text == "," and depth == 1:
            arguments.append([])
            continue
        if depth:
            arguments[-1].append(token)
    raise InvalidInput(f"region expression {sql!r} has an open parenthesis")


# --- running -------------------------------------------------------------------------------


def _run(sql: str, sources: Sequence[pa.Array], rows: int) -> pa.Array:
    program = _compile(sql, tuple(source.type for source in sources))
    names = [f"col{i}" for i in range(len(sources))]
    batch = pa.RecordBatch.from_arrays(list(sources), names=names)
    try:
        for call in program.hashes:
            arguments = _select(batch, call.arguments)
            hashed, valid = murmur3_multi(arguments)
            signed = hashed.view(np.int32).astype(np.int64)
            column = pa.array(signed, mask=None if valid.all() else ~valid)
            batch = batch.append_column(call.column, column)
        result = _select(batch, (program.result,))[0]
    except InvalidInput:
        raise
    except Exception as error:  # DataFusion raises no class of its own
        raise InvalidInput(f"region expression {sql!r} failed: {_reason(error)}") from error
    if len(result) != rows:
        raise InvalidInput(f"region expression {sql!r} gave {len(result)} values for {rows} rows")
    return result


def _select(batch: pa.RecordBatch, wanted: Sequence[Expr]) -> list[pa.Array]:
    columns = [_plain_column(batch, expr) for expr in wanted]
    if all(column is not None for column in columns):
        return columns
    frame = _session()[0].read_batch(batch)
    selected = frame.select(*(expr.alias(f"r{i}") for i, expr in enumerate(wanted)))
    batches = [part for part in selected.collect() if part.num_rows]
    if len(batches) == 1:
        return list(batches[0].columns)
    table = pa.Table.from_batches(batches, schema=selected.schema())
    return [column.combine_chunks() for column in table.columns]


def _plain_column(batch: pa.RecordBatch, expr: Expr) -> pa.Array | None:
    if expr.variant_name() != "Column":
        return None
    return batch.column(_column_name(expr))


def _column_name(expr: Expr) -> str:
    return expr.canonical_name().rsplit(".", 1)[-1].strip('"')


def _widen(array: pa.Array) -> pa.Array:
    kind = array.type
    if pat.is_integer(kind) and not pat.is_uint64(kind):
        return array.cast(pa.int64())
    if pat.is_floating(kind):
        return array.cast(pa.float64())
    if pat.is_large_string(kind) or pat.is_string_view(kind):
        return array.cast(pa.utf8())
    return array


@lru_cache(maxsize=_CACHE_ENTRIES)
def _null_typing(sql: str, types: tuple[pa.DataType | None, ...]) -> tuple[pa.DataType, ...]:
    """Types for the missing sources (None) under which the expression can be planned."""
    choices = (_NULL_TYPES if kind is None else (kind,) for kind in types)
    failure: InvalidInput | None = None
    for typing in itertools.islice(itertools.product(*choices), _MAX_NULL_TYPINGS):
        try:
            _run(sql, [pa.nulls(1, kind) for kind in typing], 1)
        except InvalidInput as error:
            failure = failure or error
        else:
            return typing
    raise InvalidInput(
        f"region expression {sql!r} cannot be evaluated with its removed source column as NULL; "
        "put the column back"
    ) from failure


def _fitted(sql: str, values: pa.Array, result_type: pa.DataType) -> pa.Array:
    if values.type == result_type:
        return values
    try:
        return values.cast(result_type)
    except pa.ArrowInvalid as error:
        raise InvalidInput(
            f"region expression {sql!r} gave a value that does not fit {result_type}: {error}"
        ) from error


# --- checking ------------------------------------------------------------------------------


def _check_shape(program: _Program) -> set[str]:
    """Walk every expression of the program; the names of the columns they use."""
    immutable = _session()[1]
    pending: list[Expr] = [program.result, *(a for call in program.hashes for a in call.arguments)]
    used: set[str] = set()
    while pending:
        expr = pending.pop()
        variant = expr.variant_name()
        if variant == "Column":
            used.add(_column_name(expr))
        if variant in ("Column", "Literal"):
            continue
        if variant not in _SCALAR_VARIANTS:
            raise InvalidInput(
                f"region expression {program.sql!r} contains {expr.canonical_name()}, a {variant}; "
                "aggregates, window functions and subqueries look at more than one row and cannot "
                "decide a region"
            )
        if variant == "ScalarFunction":
            function = expr.rex_call_operator()
            if function not in immutable:
                raise InvalidInput(
                    f"region expression {program.sql!r} calls {function}(), whose answer depends "
                    "on more than its arguments; the same row must get the same region at any "
                    "time, so use functions of the columns only"
                )
        pending.extend(expr.rex_call_operands())
    return used


def _kind_class(kind: pa.DataType) -> str:
    if pat.is_integer(kind) or (pat.is_decimal(kind) and kind.scale == 0):
        return "integer"
    if pat.is_string(kind) or pat.is_large_string(kind) or pat.is_string_view(kind):
        return "string"
    if pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_binary_view(kind):
        return "binary"
    return str(kind)


def _check_result_type(sql: str, actual: pa.DataType, wanted: pa.DataType) -> None:
    if _kind_class(actual) != _kind_class(wanted):
        raise InvalidInput(
            f"region expression {sql!r} returns {actual}, not {wanted}; "
            "cast it in the expression, or state another result_type"
        )


def _outcomes(sql: str, samples: Sequence[pa.Array], result_type: pa.DataType) -> list[Any]:
    """One result per sample row, `_FAILED` where the expression fails: that refuses the row."""
    rows = len(samples[0])
    try:
        whole: list[Any] = _fitted(sql, _run(sql, samples, rows), result_type).to_pylist()
        return whole
    except InvalidInput:
        return [
            _outcome(sql, [sample.slice(row, 1) for sample in samples], result_type)
            for row in range(rows)
        ]


_FAILED = object()


def _outcome(sql: str, row: Sequence[pa.Array], result_type: pa.DataType) -> Any:
    try:
        return _fitted(sql, _run(sql, row, 1), result_type)[0].as_py()
    except InvalidInput:
        return _FAILED


def _check_promotion(
    sql: str,
    samples: Sequence[pa.Array],
    expected: Sequence[Any],
    result_type: pa.DataType,
    index: int,
    other: pa.DataType,
) -> None:
    """Compare with the same values of one column in another type, where it can hold them."""
    original = samples[index]
    there_and_back = original.cast(other, safe=False).cast(original.type, safe=False)
    kept = [row for row, value in enumerate(there_and_back) if value == original[row]]
    others = [pa.array([sample[row] for row in kept], sample.type) for sample in samples]
    others[index] = others[index].cast(other)
    for row, actual in zip(kept, _outcomes(sql, others, result_type), strict=True):
        if _FAILED not in (actual, expected[row]) and actual != expected[row]:
            value = original[row].as_py()
            raise InvalidInput(
                f"region expression {sql!r} depends on the type of col{index}: {value!r} gives "
                f"{expected[row]!r} as {original.type} and {actual!r} as {other}, so promoting "
                f"the column would move rows between regions; cast col{index} to the widest type "
                "first, such as cast(col0 as bigint)"
            )


def _equivalent_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    families = (
        (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
        (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        (pa.float32(), pa.float64()),
        (pa.utf8(), pa.large_utf8(), pa.string_view()),
    )
    for family in families:
        if kind in family:
            yield from (other for other in family if other != kind)
    if kind in (pa.uint8(), pa.uint16(), pa.uint32()):
        yield pa.int64()


_INTEGERS = (0, 1, -1, 7, 42, -100, 100, 1001, 100_003, -3_000_000_019)
_REALS = (0.0, 1.0, -1.5, 0.1, 1e6, 12345.678)
_STRINGS = ("", "a", "42", "héllo wörld", "2024-02-29T12:34:56", "north:17", "-7.5", "ÀÉ")


def _samples(types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Rows of ordinary and extreme values, shifted against each other, with NULLs among them."""
    values = [[*_values_of(kind), None] for kind in types]
    rows = max(len(column) for column in values) * (2 if len(types) > 1 else 1)
    return [
        pa.array([column[(row + shift * (row // 3)) % len(column)] for row in range(rows)], kind)
        for shift, (column, kind) in enumerate(zip(values, types, strict=True))
    ]


def _values_of(kind: pa.DataType) -> list[Any]:
    if pat.is_boolean(kind):
        return [False, True]
    if pat.is_integer(kind):
        unsigned = pat.is_unsigned_integer(kind)
        high = (1 << (kind.bit_width - (0 if unsigned else 1))) - 1
        low = 0 if unsigned else -high - 1
        return [value for value in (*_INTEGERS, low, high) if low <= value <= high]
    if pat.is_floating(kind):
        return list(pa.array(_REALS, pa.float64()).cast(kind, safe=False).to_pylist())
    if pat.is_string(kind) or pat.is_large_string(kind) or pat.is_string_view(kind):
        return list(_STRINGS)
    if pat.is_fixed_size_binary(kind) and not pat.is_decimal(kind):
        return [bytes(kind.byte_width), b"\xff" * kind.byte_width]
    if pat.is_binary(kind) or pat.is_large_binary(kind) or pat.is_binary_view(kind):
        return [text.encode() for text in _STRINGS]
    if pat.is_decimal(kind):
        return list(pa.array([0, 1, -1], pa.int8()).cast(kind, safe=False).to_pylist())
    wide = pa.array([0, 86_400, 1_700_000_000], pa.int64())
    small = wide if kind.bit_width == 64 else pa.array([0, 59, 19_000], pa.int32())
    return list(small.cast(kind, safe=False))


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).removeprefix("DataFusion error: ")
    return text if len(text) <= 300 else text[:300] + "…"
