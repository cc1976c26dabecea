"""Region expressions: any SQL that is a pure function of its columns, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import InvalidInput
from penstock.memwal import expressions

INT, TEXT, TIME = pa.int64(), pa.utf8(), pa.timestamp("us")


def run(sql, *columns, result_type):
    expressions.check(sql, [column.type for column in columns], result_type)
    got = expressions.evaluate(sql, columns, result_type, len(columns[0]))
    assert got.type == result_type
    return got.to_pylist()


def test_expressions_compute():
    numbers = pa.array([1, -7, None, 250])
    texts = pa.array(["eu:1", "US:22", None, "a, (b)"])
    assert run("col0 % 4", numbers, result_type=pa.int32()) == [1, -3, None, 2]
    assert run("COL0 is null", numbers, result_type=pa.bool_()) == [False, False, True, False]
    sql = "coalesce(lower(split_part(col0, ':', 1)), 'none')"
    assert run(sql, texts, result_type=TEXT) == ["eu", "us", "none", "a, (b)"]
    sql = "case when col0 > 100 then 'big' when col1 like 'e%' then 'eu' else '?' end"
    assert run(sql, numbers, texts, result_type=TEXT) == ["eu", "?", "?", "big"]
    unsigned = pa.array([2**64 - 1, 3], pa.uint64())
    assert run("col0 % 4", unsigned, result_type=pa.int32()) == [3, 3]


def test_murmur3_takes_any_types_any_number_and_nests():
    numbers, texts = pa.array([5, None, None]), pa.array(["a,(", "it's", None])
    once = run("murmur3(col0)", numbers, result_type=INT)
    assert once[1:] == [None, None]
    assert -(1 << 31) <= once[0] < 1 << 31
    assert run("MURMUR3_multi ( col0 )", numbers, result_type=INT) == once
    both = run("murmur3_multi(col0, col1)", numbers, texts, result_type=INT)
    assert both[1] == run("murmur3(col0)", texts, result_type=INT)[1]
    assert both[2] is None
    sql = "murmur3(concat(col0, ')', 'murmur3(')) + murmur3(murmur3(lower(col0)))"
    lifted = run(sql, texts, result_type=INT)
    inner = run("murmur3(lower(col0))", texts, result_type=INT)
    outer = run("murmur3(col0)", pa.array(inner), result_type=INT)
    joined = pa.array([f"{text or ''})murmur3(" for text in texts.to_pylist()])
    first = run("murmur3(col0)", joined, result_type=INT)
    assert lifted == [None if b is None else a + b for a, b in zip(first, outer, strict=True)]


def key_hashing_to(target: int) -> int:
    """Murmur3 run backwards: the int64 with low word 0 whose hash is `target`."""

    def inverse(factor):
        return pow(factor, -1, 1 << 32)

    def rotl(x, r):
        return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

    h = target ^ target >> 16
    h = h * inverse(0xC2B2AE35) & 0xFFFFFFFF
    h = (h ^ h >> 13 ^ h >> 26) * inverse(0x85EBCA6B) & 0xFFFFFFFF
    h = (h ^ h >> 16) ^ 8
    k = rotl((h - 0xE6546B64) * inverse(5) & 0xFFFFFFFF, 19) ^ 0xE6546B64
    high = rotl(k * inverse(0x1B873593) & 0xFFFFFFFF, 17) * inverse(0xCC9E2D51) & 0xFFFFFFFF
    return (high << 32) - (1 << 64 if high >> 31 else 0)


def test_the_smallest_hash_has_an_absolute_value():
    """A 32-bit abs would fail for one key in four billion, and only in production."""
    unlucky = pa.array([key_hashing_to(1 << 31)])
    assert run("murmur3(col0)", unlucky, result_type=INT) == [-(1 << 31)]
    assert run("abs(murmur3(col0)) % 1000", unlucky, result_type=pa.int32()) == [(1 << 31) % 1000]


@pytest.mark.parametrize(
    ("sql", "types", "message"),
    [
        ("col0 %", [INT], "not a valid SQL expression over col0"),
        ("", [INT], "1 to 4096 characters"),
        ("col0 + col2", [INT, INT], "not a valid SQL expression over col0, col1.*col2"),
        ("nothing(col0)", [INT], "not a valid SQL expression"),
        ("col0", [INT, INT], "never uses col1"),
        ("7", [INT], "never uses col0"),
        ("sum(col0)", [INT], r"sum\(col0\), a AggregateFunction; aggregates, window"),
        ("col0 + count(*)", [INT], "aggregates, window"),
        ("sum(col0) over ()", [INT], "a WindowFunction"),
        ("row_number() over (order by col0)", [INT], "a WindowFunction"),
        ("(select 1) + col0", [INT], "a ScalarSubquery"),
        ("abs(murmur3((select col0)))", [INT], "a ScalarSubquery"),
        ("exists (select col0)", [INT], "a Exists"),
        ("col0 in (select 1)", [INT], "a InSubquery"),
        ("col0 + random()", [INT], r"calls random\(\).*same row must get the same region"),
        ("concat(col0, uuid())", [TEXT], r"calls uuid\(\)"),
        ("date_part('year', now()) + col0", [INT], r"calls now\(\)"),
        ("murmur3(case when col0 > 0 then now() end)", [INT], r"calls now\(\)"),
        ("col0 < current_timestamp", [TIME], r"calls now\(\)"),
        ("col0 < current_date", [TIME], r"calls current_date\(\)"),
        ("col0 < today()", [TIME], r"calls current_date\(\)"),
        ("concat(col0, current_time)", [TEXT], r"calls current_time\(\)"),
        ("concat(col0, version())", [TEXT], r"calls version\(\)"),
        ("arrow_typeof(col0)", [INT], r"calls arrow_typeof\(\)"),
        ("col0 -- note", [INT], "comments, parameters"),
        ("col0 + $1", [INT], "comments, parameters"),
        ("col0; drop table t", [INT], "comments, parameters"),
        ("murmur3(col0, col1)", [INT, INT], "murmur3 wants one argument"),
        ("murmur3_multi()", [INT], "one argument or more"),
        ("murmur3(col0", [INT], "open parenthesis"),
        ("murmur3_hash_0 + murmur3(col0)", [INT], "reserved name"),
        ("col0 / 2.0", [INT], "returns .*, not int64; cast it"),
        ("concat(col0, 'x')", [TEXT], "returns string, not int64"),
        ("null", [INT], "never uses col0"),
        ("coalesce(col0, cast('x' as bigint))", [INT], "must take NULLs"),
        ("col0 * col0", [INT], r"depends on the type of col0.*cast\(col0 as bigint\)"),
        ("length(cast(col0 as text))", [pa.float32()], "depends on the type of col0.*as double"),
    ],
)
def test_impure_expressions_are_refused_with_the_reason(sql, types, message):
    with pytest.raises(InvalidInput, match=message):
        expressions.check(sql, types, INT)


def test_the_remedy_for_type_dependence_works():
    expressions.check("cast(col0 as bigint) * cast(col0 as bigint)", [pa.int32()], INT)
    expressions.check("length(cast(cast(col0 as double) as text))", [pa.float32()], INT)


@pytest.mark.parametrize(
    "kind",
    [
        pa.bool_(),
        pa.int8(),
        pa.uint32(),
        pa.uint64(),
        pa.float32(),
        pa.large_utf8(),
        pa.string_view(),
        pa.binary(),
        pa.binary(4),
        pa.date32(),
        pa.date64(),
        pa.time32("s"),
        pa.time64("ns"),
        pa.timestamp("s"),
        pa.timestamp("ns", "UTC"),
        pa.duration("us"),
    ],
    ids=str,
)
def test_every_scalar_type_can_be_hashed(kind):
    expressions.check("abs(murmur3(col0)) % 16", [kind], pa.int32())


def test_promoting_a_column_moves_no_row():
    """Even where the answer would overflow the narrow type on values nobody sampled."""
    narrow = pa.array([46341, 5, None], pa.int32())
    for sql in ("col0 * col0 % 1000", "abs(murmur3(col0)) % 1000", "length(cast(col0 as text))"):
        results = [
            expressions.evaluate(sql, [narrow.cast(kind)], pa.int32(), 3).to_pylist()
            for kind in (pa.int32(), pa.int64(), pa.uint32())
        ]
        assert results[0] == results[1] == results[2]


def test_a_row_the_expression_fails_on_is_refused_not_misplaced():
    with pytest.raises(InvalidInput, match=r"failed: .*Divide by zero"):
        expressions.evaluate("10 / col0", [pa.array([1, 0])], INT, 2)
    with pytest.raises(InvalidInput, match="does not fit int32"):
        expressions.evaluate("col0 + 1", [pa.array([1 << 40])], pa.int32(), 1)
    assert expressions.evaluate("10 / col0", [pa.array([], INT)], INT, 0).to_pylist() == []


def test_many_threads_share_one_session_and_keep_row_order():
    def work(seed):
        numbers = np.random.default_rng(seed).integers(-(1 << 62), 1 << 62, 20_000)
        modulus = 3 + seed % 5
        sql = f"abs(murmur3(col0)) % {modulus} + 10 * (abs(col0) % {modulus})"
        got = expressions.evaluate(sql, [pa.array(numbers)], INT, len(numbers)).to_numpy()
        assert (got // 10 == np.abs(numbers) % modulus).all()
        return int((got % 10).sum())

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(work, range(40)))
    assert together == [work(seed) for seed in range(40)]
