"""Filters on rows in memory find what Lance finds in the same rows on disk."""

from __future__ import annotations

import datetime as dt
import random

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.memwal.filters import Filter
from penstock.memwal.predicates import (
    Unknown,
)

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("i8", pa.int8()),
        ("i32", pa.int32()),
        ("u16", pa.uint16()),
        ("u64", pa.uint64()),
        ("f32", pa.float32()),
        ("f64", pa.float64()),
        ("s", pa.utf8()),
        ("Big Text", pa.large_utf8()),
        ("b", pa.bool_()),
        ("d", pa.date32()),
        ("ts", pa.timestamp("us")),
        ("ms", pa.timestamp("ms")),
        ("utc", pa.timestamp("us", "UTC")),
        ("berlin", pa.timestamp("us", "Europe/Berlin")),
        ("price", pa.decimal128(10, 2)),
        ("bin", pa.binary()),
        ("st", pa.struct([("a", pa.int32()), ("B", pa.utf8())])),
        ("Camel", pa.int32()),
    ]
)
TEXTS = ["", "a", "A", "ab", "a%", "a_b", "b\\", "é", "日本", "it's", 'q"q', "zz\nz"]
FLOATS = [0.0, -0.0, 1.5, -1.5, 0.1, 3.0, float("inf"), float("-inf"), float("nan"), -np.nan]
TIMES = [
    dt.datetime(1969, 12, 31, 23, 59, 59),
    dt.datetime(1970, 1, 1),
    dt.datetime(2021, 1, 1),
    dt.datetime(2021, 6, 1, 12, 30, 0, 500_000),
    dt.datetime(2024, 2, 29, 23),
]
SMALL = st.integers(-4, 12)


def _some_rows(rows, seed):
    """Rows of ordinary and extreme values in every type, a quarter of them NULL."""
    dice = random.Random(seed)

    def some(values, kind):
        stored = (values if isinstance(values, pa.Array) else pa.array(values)).cast(kind)
        return stored.take(pa.array([_pick(dice, len(values)) for _ in range(rows)], pa.int64()))

    small = list(range(-4, 13))
    small_positive = list(range(13))
    days = [moment.date() for moment in TIMES]
    structs = [{"a": a, "B": b} for a in (None, 1, 3) for b in (None, "q", "a")]
    values = {
        "i8": [*small, -128, 127],
        "i32": [*small, -(2**31), 2**31 - 1],
        "u16": small_positive,
        "u64": pa.array([*small_positive, 2**64 - 1], pa.uint64()),
        "f32": FLOATS,
        "f64": FLOATS,
        "s": TEXTS,
        "Big Text": TEXTS,
        "b": [True, False],
        "d": days,
        "price": pa.array(small, pa.int8()).cast(pa.decimal128(5, 2)),
        "bin": [b"", b"a", b"ab", b"\xff"],
        "st": pa.array(structs, SCHEMA.field("st").type),
        "Camel": small,
    }
    columns = [pa.array(range(rows), pa.int64())]
    columns += [some(values.get(field.name, TIMES), field.type) for field in list(SCHEMA)[1:]]
    return pa.table(columns, schema=SCHEMA)


def _pick(dice, count):
    return None if dice.random() < 0.25 else dice.randrange(count)


ROWS = _some_rows(400, seed=7)


OPS = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">=", "=="])
NUMBERS = SMALL.map(str)
REALS = st.one_of(NUMBERS, st.sampled_from(["0.0", "-0.0", "1.5", "-1.5", "0.1", "3.0", "1e2"]))
QUOTED = st.sampled_from(TEXTS).map(lambda text: "'" + text.replace("'", "''") + "'")
MOMENTS = st.sampled_from(TIMES).map(lambda moment: f"timestamp '{moment}'")
DAYS = st.sampled_from(TIMES).map(lambda moment: f"date '{moment.date()}'")
CONSTANTS = {
    "n": NUMBERS,
    "i8": NUMBERS,
    "i32": NUMBERS,
    "u16": st.integers(0, 12).map(str),
    "u64": st.integers(0, 12).map(str),
    "f32": REALS,
    "f64": REALS,
    "s": QUOTED,
    "`Big Text`": QUOTED,
    "b": st.sampled_from(["true", "false"]),
    "d": DAYS,
    "ts": MOMENTS | DAYS,
    "ms": MOMENTS | DAYS,
    "utc": MOMENTS | DAYS,
    "berlin": MOMENTS | DAYS,
    "price": NUMBERS | st.just("cast(2.50 as decimal(10, 2))"),
    "bin": st.sampled_from(["X'61'", "X''", "X'ff'"]),
    "st.a": NUMBERS,
    "st['a']": NUMBERS,
    "st.B": QUOTED,
    "camel": NUMBERS,
    "I32": NUMBERS,
}
PATTERNS = st.sampled_from(
    ["a%", "%b", "%a%", "a", "_b", "a\\%", "%", "a%b", "", "é%", "z_z%", "A%"]
)
SPECIAL = st.sampled_from(
    """
    b; not b; b is true; b is not false; true; false; s is not null and b; i32 % 3 = 1; i32 + 1
    > n; n * 2 <= 8; -n < 3; n / 2 = 1; n between i32 and 9; f64 + 1 > 2; f64 = f64; f64 < n;
    f32 < f64; f32 + 1 > 1.2; f64 = 1 / 2; n = 4 - 1; f64 = n + 1; i8 + 100 > 3; u64 > u16; ts <
    ms; lower(s) = 'a'; upper(s) = s; length(s) > 1; octet_length(s) > 2; starts_with(s, 'a');
    ends_with(s, 'b'); strpos(s, 'b') = 2; s || 'x' = 'ax'; substr(s, 1, 1) = 'a'; coalesce(i32,
    0) = 0; nullif(n, 3) is null; isnan(f64); abs(n) > 2; concat(s, 'q') = 'aq'; left(s, 1) =
    'a'; right(s, 1) = 'b'; replace(s, 'a', 'b') = 'b'; contains(s, 'b'); reverse(s) = 'ba';
    date_part('year', ts) = 2021; date_part('month', d) = 6; date_part('hour', utc) = 12;
    date_part('hour', berlin) = 0; trim(s) = s; ltrim(s) = s; rtrim(s) = s; cast(i32 as string)
    = '3'; cast(f64 as bigint) = 3; try_cast(s as int) is null; n::double > 2.5; i32 is distinct
    from 3; not (f32 = 0.1); (i32 > 3) is null; regexp_match(s, 'a'); is_valid(i32); not (u64 =
    18446744073709551615); contains_tokens(s, 'a'); s = "ab"; d < ts; utc < berlin;
    array_has([1, 2], i32); n > 3 = true; s < `Big Text`; price > n; i32 = 3 is true; not i32 =
    3 or b and s = 'a'
    """.replace("\n    ", " ")
    .strip()
    .split("; ")
)


@st.composite
def leaves(draw):
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(SPECIAL)
    column = draw(st.sampled_from(sorted(CONSTANTS)))
    constant = CONSTANTS[column]
    negation = draw(st.sampled_from(["", "not "]))
    if kind == 1:
        return f"{column} is {negation}null"
    if kind == 2:
        values = draw(st.lists(constant | st.just("null"), min_size=1, max_size=9))
        return f"{column} {negation}in ({', '.join(values)})"
    if kind == 3:
        return f"{column} {negation}between {draw(constant)} and {draw(constant)}"
    if kind == 4:
        text = draw(st.sampled_from(["s", "`Big Text`"]))
        return f"{text} {negation}{draw(st.sampled_from(['like', 'ilike']))} '{draw(PATTERNS)}'"
    if kind == 5:
        return f"{draw(constant)} {draw(OPS)} {column}"
    return f"{column} {draw(OPS)} {draw(constant | st.just('null'))}"


def combined(parts, most):
    joined = ["and", "or"]
    return st.recursive(
        parts,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(joined), inner).map(" ".join),
            inner.map(lambda part: f"not ({part})"),
            st.tuples(inner, st.sampled_from(joined), inner).map(lambda p: f"({' '.join(p)})"),
            st.tuples(inner, st.sampled_from(["true", "not false", "null", "not null"])).map(
                lambda p: f"({p[0]}) is {p[1]}"
            ),
        ),
        max_leaves=most,
    )


FILTERS = combined(leaves(), 6)


def lance_finds(rows, sql):
    return lance.write_dataset(rows, "memory://").to_table(columns=["n"], filter=sql)


@pytest.fixture(scope="module")
def stored():
    return lance.write_dataset(ROWS, "memory://")


@settings(max_examples=500, deadline=None)
@given(FILTERS, st.integers(0, 399), st.integers(1, 400), st.integers(0, 400))
@example("i32 < i32 + 2147483647", 0, 400, 0)
@example("f64 in (0, 1.5, 3, 4)", 0, 400, 0)
@example("f64 + 0 not in (0, 1.5, 3, 4) and n + 0.5 > 3", 0, 400, 0)
def test_a_filter_in_memory_is_the_filter_in_lance(stored, sql, start, count, cut):
    try:
        found = stored.to_table(columns=["n"], filter=sql).column("n").to_numpy()
    except (ValueError, OSError, RuntimeError, NotImplementedError):
        found = None
    try:
        parsed = Filter.parse(sql, SCHEMA)
    except InvalidInput:
        assert found is None, sql
        return
    if found is None:  # it fails on some row
        return
    expected = np.zeros(ROWS.num_rows, np.bool_)
    expected[found] = True
    assert parsed.mask(ROWS).tolist() == expected.tolist(), sql
    rows = ROWS.slice(start, count).select(list(parsed.columns) or ["n"])
    rows = pa.concat_tables([rows.slice(0, cut), rows.slice(cut)])
    assert parsed.mask(rows).tolist() == expected[start : start + count].tolist(), sql
    for batch in rows.to_batches()[:1]:
        found_there = expected[start : start + batch.num_rows].tolist()
        assert parsed.mask(batch).tolist() == found_there, sql


FEW = (0, 1, 2, None)
PAIRS = pa.table(
    {
        "n": range(len(FEW) ** 2),
        "x": pa.array([x for x in FEW for _ in FEW], pa.int64()),
        "y": pa.array([y for _ in FEW for y in FEW], pa.int64()),
    }
)
LISTS = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(lambda v: f"({str(v)[1:-1]})")
TESTS = st.tuples(
    st.sampled_from(["x", "x", "y"]),
    st.one_of(
        st.tuples(st.sampled_from(["=", "<>", "<"]), st.integers(0, 2).map(str)).map(" ".join),
        st.tuples(st.sampled_from(["in", "not in"]), LISTS).map(" ".join),
    ),
).map(" ".join)


@pytest.fixture(scope="module")
def stored_pairs():
    return lance.write_dataset(PAIRS, "memory://")


@settings(max_examples=300, deadline=None)
@given(combined(TESTS, 5))
@example("not (x in (0) and x in (1))")
@example("x not in (0) or x not in (1)")
@example("((x in (2)) and (x in (1, 0))) is null")
def test_a_null_that_the_optimizer_of_lance_loses_is_lost_here_too(stored_pairs, sql):
    expected = stored_pairs.to_table(columns=["n"], filter=sql).column("n").to_pylist()
    found = np.flatnonzero(Filter.parse(sql, PAIRS.schema).mask(PAIRS)).tolist()
    assert found == expected, sql


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("pirce > 3", ["'pirce'", "did you mean 'price'", "i32 (int32)"]),
        ("st.nope = 1", ["nope", "st (struct"]),
        ("_rowid = 3", ["'_rowid'"]),
        ("i32 = = AND", ["does not fit"]),
        ("i32 + 1", ["boolean"]),
        ("count(i32) > 1", ["count()", "several rows"]),
        ("row_number() over () = 1", ["row_number()", "several rows"]),
        ("random() > 0.5", ["random()", "constant"]),
        ("ts < now()", ["now()", "constant"]),
        ("d < current_date", ["current_date", "constant"]),
        ("i32 in (select 1)", ["not supported"]),
        ("i32 = 1 limit 1", ["limit"]),
        ("i32 = 1) or (true", ["parenthesis"]),
        ("i32 = 1; drop", ["';'"]),
        ("i32 = $1", ["'$'"]),
        ("s = E'a'", ["E'"]),
        ("\"s\" = 'a'", ["backticks", "`s`"]),
        ("ts > '2021-01-01'", ["timestamp '"]),
        ("price > 2.5", ["decimal("]),
        ("i8 = 1000", ["Int8"]),
        ("  ", ["1 to"]),
    ],
)
def test_a_wrong_filter_is_refused_with_a_reason(sql, words):
    with pytest.raises(InvalidInput) as refusal:
        Filter.parse(sql, SCHEMA)
    for word in words:
        assert word in str(refusal.value)


def test_columns_are_those_the_filter_reads():
    def columns(sql):
        return Filter.parse(sql, SCHEMA).columns

    assert columns("s = 'i32' AND (camel > 3 OR st.a = 1)") == ("s", "st", "Camel")
    assert columns("`Big Text` LIKE 'a%'") == ("Big Text",)
    assert columns("contains_tokens(s, 'i32')") == ("s",)
    assert columns("true") == ()


def test_two_columns_that_differ_in_case_are_told_apart_as_lance_does():
    rows = pa.table({"n": [0, 1], "x": [1, 2], "X": [2, 1]})
    for sql in ("x = 1", "X = 1", "`X` = 1"):
        parsed = Filter.parse(sql, rows.schema)
        expected = lance_finds(rows, sql).column("n").to_pylist()
        assert np.flatnonzero(parsed.mask(rows)).tolist() == expected


def test_a_column_may_be_called_like_a_keyword():
    rows = pa.table(
        {"n": [0, 1], "Date": [dt.date(2021, 1, 1), None], "True": [1, 2], "x": [b"a", b""]}
    )
    for sql in ("`Date` = date '2021-01-01'", "`True` = 1", "true", "x = X'61'", "Date is null"):
        parsed = Filter.parse(sql, rows.schema)
        expected = lance_finds(rows, sql).column("n").to_pylist()
        assert np.flatnonzero(parsed.mask(rows)).tolist() == expected


def test_a_failure_on_the_rows_themselves_names_the_filter():
    rows = pa.table({"n": [0, 1]})
    parsed = Filter.parse("10 / n > 3", rows.schema)
    assert isinstance(parsed.predicate, Unknown)
    with pytest.raises(InvalidInput, match=r"10 / n > 3.*[Dd]ivide"):
        parsed.mask(rows)
