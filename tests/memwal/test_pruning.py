"""Pruning leaves out regions, and never one that holds a row the filter finds."""

from __future__ import annotations

import datetime as dt
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.memwal import region_spec as rs
from penstock.memwal import transforms
from penstock.memwal.filters import Filter
from penstock.memwal.pruning import regions_for

TEXTS = ["", "a", "ab", "abc", "abd", "b", "ba", "é", "éa", "日本語"]
MOMENTS = [
    *(dt.datetime(year, 1, 1) for year in (1969, 1970, 2020, 2021, 2022)),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
    dt.datetime(2020, 12, 31, 23, 59, 59, 999_999),
    dt.datetime(2021, 6, 15, 12, 30),
]
VALUES = {
    "i": pa.array([*range(-12, 13), -(2**31), 2**31 - 1], pa.int32()),
    "k": pa.array([*range(-12, 13), -(2**63), 2**63 - 1], pa.int64()),
    "u": pa.array([*range(13), 2**32 - 1], pa.uint32()),
    "f": pa.array([0.0, -0.0, 1.5, -1.5, 3.0, float("nan"), float("inf")], pa.float64()),
    "s": pa.array(TEXTS),
    "b": pa.array([True, False]),
    "d": pa.array([moment.date() for moment in MOMENTS]),
    "ts": pa.array(MOMENTS, pa.timestamp("us")),
    "utc": pa.array(MOMENTS, pa.timestamp("us", "UTC")),
    "bin": pa.array([b"", b"a", b"ab", b"\xff"]),
}
IDS = {name: index for index, name in enumerate(VALUES)}
NAMES = {index: name for name, index in IDS.items()}


def _rows(count, seed):
    dice = random.Random(seed)

    def pick(values):
        return None if dice.random() < 0.2 else dice.randrange(len(values))

    return pa.table(
        {
            name: values.take(pa.array([pick(values) for _ in range(count)], pa.int64()))
            for name, values in VALUES.items()
        }
    )


ROWS = _rows(500, seed=5)
DATED = ["d", "ts", "utc"]
FIELDS = [
    *(rs.bucket(name, 7) for name in ("i", "k", "u", "f", "s", "b", "d", "ts", "utc")),
    *(rs.identity(name) for name in ("i", "k", "u", "s", "b", "d", "bin")),
    *(rs.truncate("s", width) for width in (1, 2, 3)),
    *(rs.truncate(name, width) for name in ("i", "k", "u") for width in (1, 5, 10)),
    *(make(name) for make in (rs.year, rs.month, rs.day) for name in DATED),
    *(rs.hour(name) for name in ("ts", "utc")),
    rs.multi_bucket(["i", "s"], 5),
    rs.multi_bucket(["f", "b", "d"], 5),
    rs.multi_bucket(["k"], 5),
    rs.expression("abs(murmur3(col0)) % 6", ["i"], "int64"),
    rs.expression("abs(murmur3_multi(col0, col1)) % 6", ["k", "s"], "int64"),
    rs.expression("case when col0 > 3 then 'high' else coalesce(col1, '') end", ["i", "s"], "utf8"),
    rs.expression("cast(col0 as varchar)", ["f"], "utf8"),
]


def bound(by):
    return rs.bind(by, ROWS.schema, IDS, [], 1)


SPECS = st.one_of(
    st.just(bound(rs.unsharded())),
    st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3).map(bound),
)


def _literal(value):
    if isinstance(value, dt.datetime):
        return f"timestamp '{value.replace(tzinfo=None)}'"
    if isinstance(value, dt.date):
        return f"date '{value}'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


CONSTANTS = {
    name: [_literal(v) for v in values.to_pylist() if str(v) not in ("nan", "inf", str(-(2**63)))]
    for name, values in VALUES.items()
}


@st.composite
def leaves(draw):
    name = draw(st.sampled_from(sorted(CONSTANTS)))
    constant = st.sampled_from(CONSTANTS[name])
    negation = draw(st.sampled_from(["", "", "not "]))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(
            st.sampled_from(["b", "i % 2 = 0", "lower(s) = 'a'", "true", "cast(i as int) = 3"])
        )
    if kind == 1:
        return f"{name} is {negation}null"
    if kind in (2, 3):
        listed = draw(st.lists(constant | st.just("null"), min_size=1, max_size=5))
        return f"{name} {negation}in ({', '.join(listed)})"
    if kind == 4:
        return f"{name} {negation}between {draw(constant)} and {draw(constant)}"
    if kind == 5:
        return (
            f"s {negation}like '{draw(st.sampled_from(['a%', 'ab%', 'abc%', '%b', '%a%', 'é%']))}'"
        )
    if kind == 6:
        return f"{draw(constant)} {draw(st.sampled_from(['=', '<', '>=']))} {name}"
    op = draw(st.sampled_from(["=", "=", "!=", "<", "<=", ">", ">="]))
    return f"{name} {op} {draw(constant)}"


FILTERS = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "and", "or"]), inner).map(
            lambda p: f"({p[0]}) {p[1]} ({p[2]})"
        ),
        inner.map(lambda part: f"not ({part})"),
        inner.map(lambda part: f"({part}) is not true"),
    ),
    max_leaves=5,
)


def regions(spec):
    """Each region as its manifest describes it, NULLs left out, with the rows it holds."""
    kinds = [rs.arrow_type(field.result_type) for field in spec.fields]
    for values, held in transforms.group(spec, ROWS, NAMES):
        encoded = map(transforms.encode_value, values, kinds)
        decoded = map(transforms.decode_value, encoded, kinds)
        named = zip((field.field_id for field in spec.fields), decoded, strict=True)
        yield {name: v for name, v in named if v is not None}, held


@settings(max_examples=500, deadline=None)
@given(SPECS, FILTERS)
def test_the_region_of_a_matching_row_is_never_left_out(spec, sql):
    parsed = Filter.parse(sql, ROWS.schema)
    pruner = regions_for(parsed, spec, NAMES, ROWS.schema)
    matching = parsed.mask(ROWS)
    for values, held in regions(spec):
        if not pruner.may_match(values):
            assert not matching[slice(None) if held is None else held].any(), (sql, values)


def read(by, sql):
    """The region values that are left to read, of one field as such and else as tuples."""
    spec = bound(by)
    pruner = regions_for(Filter.parse(sql, ROWS.schema), spec, NAMES, ROWS.schema)
    found = [values for values, _ in regions(spec) if values and pruner.may_match(values)]
    keys = [field.field_id for field in spec.fields]
    left = [tuple(values.get(key) for key in keys) for values in found]
    return {values[0] for values in left} if len(keys) == 1 else set(left)


def test_an_equality_leaves_one_bucket():
    assert len(read(rs.bucket("k", 8), "k = 5")) == 1
    assert len(read(rs.bucket("k", 8), "5 = k AND b")) == 1
    assert len(read(rs.bucket("k", 8), "k IN (5, 5) OR k = 5")) == 1
    assert read(rs.bucket("k", 8), "k IS NULL") == {0}
    assert len(read(rs.bucket("k", 8), "k > 5")) == 8
    assert len(read(rs.expression("abs(murmur3(col0)) % 6", ["i"], "int64"), "i = 5")) == 1


def test_identity_leaves_what_the_comparison_says():
    assert read(rs.identity("s"), "s IN ('a', 'b', 'zz')") == {"a", "b"}
    assert read(rs.identity("i"), "i > 9 AND i < 100") == {10, 11, 12}
    assert read(rs.identity("i"), "NOT (i <= 10) AND i <> 2147483647") == {11, 12}
    assert read(rs.identity("b"), "b") == {True}
    assert read(rs.identity("s"), "s LIKE 'ab%'") == {"ab", "abc", "abd"}


def test_years_follow_ranges_of_time():
    at = "timestamp '{} 00:00:00'".format
    assert read(rs.year("ts"), f"ts >= {at('2021-03-01')}") == {2021, 2022}
    assert read(rs.year("ts"), f"ts < {at('2021-01-01')}") == {1969, 1970, 2020}
    assert read(rs.year("ts"), f"ts BETWEEN {at('2020-05-01')} AND {at('2021-01-01')}") == {
        2020,
        2021,
    }
    assert read(rs.year("utc"), f"utc > {at('2021-12-31')}") == {2021, 2022}
    assert read(rs.year("d"), "d = date '2020-12-31'") == {2020}
    assert read(rs.month("d"), "d = date '2020-12-31'") == {12}


def test_truncation_keeps_the_order_of_numbers_and_of_text():
    assert read(rs.truncate("i", 10), "i > -5 AND i < 5") == {0}
    assert read(rs.truncate("i", 10), "i <= -10 AND i > -100") == {-10}
    assert read(rs.truncate("s", 2), "s >= 'abd' AND s < 'b'") == {"ab"}
    assert read(rs.truncate("s", 2), "s LIKE 'abc%'") == {"ab"}
    assert read(rs.truncate("s", 2), "s < 'ab'") == {"", "a"}


def test_fields_over_several_columns_want_all_of_them():
    assert len(read(rs.multi_bucket(["i", "s"], 5), "i = 3 AND s = 'a'")) == 1
    assert len(read(rs.multi_bucket(["i", "s"], 5), "i = 3 AND s IS NULL AND b")) == 1
    assert len(read(rs.multi_bucket(["i", "s"], 5), "i = 3")) == 5
    assert len(read(rs.multi_bucket(["i", "s"], 5), "(i = 3 OR b) AND s = 'a'")) == 5
    either = rs.expression(
        "case when col0 > 3 then 'high' else coalesce(col1, '') end", ["i", "s"], "utf8"
    )
    assert read(either, "i IN (5, 6) AND s = 'a'") == {"high"}


def test_both_zeros_are_looked_for_where_a_field_tells_them_apart():
    assert read(rs.expression("cast(col0 as varchar)", ["f"], "utf8"), "f = 0") == {"0.0", "-0.0"}


def test_several_fields_prune_together():
    by = [rs.identity("b"), rs.bucket("k", 8)]
    assert {b for b, _ in read(by, "b = true AND k = 5")} == {True}
    assert len(read(by, "b = true AND k = 5")) == 1
    either = read(by, "b = true OR k = 5")
    assert len(either) < len(read(by, "true"))
    assert len({bucket for b, bucket in either if b is not True}) == 1


@pytest.mark.parametrize("sql", ["k = 5", "false", "k IS NULL AND s = 'a'"])
def test_what_cannot_be_told_is_read(sql):
    parsed = Filter.parse(sql, ROWS.schema)
    spec = bound(rs.bucket("k", 8))
    assert regions_for(parsed, spec, NAMES, ROWS.schema).may_match({})
    gone = {field_id: name for field_id, name in NAMES.items() if name != "k"}
    without = regions_for(parsed, spec, gone, ROWS.schema)
    assert np.unique([without.may_match({"bucket": n}) for n in range(8)]).tolist() == [
        sql != "false"
    ]
