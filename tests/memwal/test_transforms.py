"""Region values: the same in every process, in Lance, and after the column was promoted."""

from __future__ import annotations

import datetime as dt
import random
import struct
import uuid

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.mem_wal import ShardingField, ShardingSpec, evaluate_sharding_spec
from lance.schema import LanceSchema

from penstock.errors import Corruption, InvalidInput
from penstock.memwal import murmur, transforms
from penstock.memwal import region_spec as rs


def bound(by, **columns):
    """The spec of a table with these columns, the batch of them, and their names by id."""
    batch = pa.record_batch(columns)
    ids = {name: index for index, name in enumerate(columns)}
    return rs.bind(by, batch.schema, ids, [], 1), batch, {i: n for n, i in ids.items()}


def values(by, **columns):
    return [array.to_pylist() for array in transforms.evaluate(*bound(by, **columns))]


# --- bucket: Lance is the oracle -----------------------------------------------------------


def _integers(kind):
    unsigned = pa.types.is_unsigned_integer(kind)
    bits = kind.bit_width - (0 if unsigned else 1)
    return st.integers(0 if unsigned else -(1 << bits), (1 << bits) - 1)


STORED_INT = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
TEXT = st.one_of(
    st.text(max_size=12), st.text(st.characters(max_codepoint=127), max_size=50), st.just("é" * 25)
)
BUCKET_TYPES = [
    pa.bool_(),
    *(getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)),
    pa.float32(),
    pa.float64(),
    pa.utf8(),
    pa.large_utf8(),
    pa.date32(),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("us", "UTC"),
    pa.timestamp("ns", "Europe/Berlin"),
]


def _arrays(kind):
    if pa.types.is_boolean(kind):
        element = st.booleans()
    elif pa.types.is_floating(kind):
        element = st.floats(width=kind.bit_width)
    elif pa.types.is_integer(kind):
        element = _integers(kind)
    elif kind in (pa.utf8(), pa.large_utf8()):
        element = TEXT
    else:
        stored = STORED_INT[kind.bit_width]
        return st.lists(st.none() | _integers(stored), max_size=40).map(
            lambda items: pa.array(items, stored).view(kind)
        )
    return st.lists(st.none() | element, max_size=40).map(lambda items: pa.array(items, kind))


def lance_buckets(array, num_buckets):
    batch = pa.record_batch({"x": array})
    field = ShardingField("f", [0], "bucket", None, "int32", {"num_buckets": str(num_buckets)})
    schema = LanceSchema.from_pyarrow(batch.schema)
    return evaluate_sharding_spec(batch, ShardingSpec(1, [field]), schema).column(0).to_pylist()


@pytest.mark.parametrize("kind", BUCKET_TYPES, ids=str)
def test_bucket_is_what_lance_computes(kind):
    @settings(max_examples=30, deadline=None)
    @given(_arrays(kind), st.integers(1, 1024), st.integers(0, 5))
    def run(array, num_buckets, skipped):
        array = array[skipped:]  # a slice: offsets into the buffers are not zero
        assert values(rs.bucket("x", num_buckets), x=array) == [lance_buckets(array, num_buckets)]

    run()


def test_bucket_of_large_batches_of_mixed_strings():
    """Enough rows for the column-of-words path, and single long ones for the other."""
    draw = random.Random(7)
    texts = ["".join(draw.choices("aé日z\0", k=draw.randrange(51))) for _ in range(3000)]
    texts += ["x" * 4001, "é" * 70_001, *(c * length for c in "aé" for length in range(51))]
    array = pa.array([None if i % 97 == 0 else text for i, text in enumerate(texts)])
    for kind in (pa.utf8(), pa.large_utf8()):
        assert values(rs.bucket("x", 1009), x=array.cast(kind)) == [lance_buckets(array, 1009)]
    viewed = transforms.evaluate(*bound(rs.bucket("x", 1009), x=array.cast(pa.string_view())))
    assert viewed[0].to_pylist() == lance_buckets(array, 1009)


def test_bucket_special_floats_and_the_documented_vectors():
    for kind, zeros_and_nans in (
        (pa.float32(), np.array([0x80000000, 0, 0x7FC00001, 0xFFC00000], "<u4").view("<f4")),
        (pa.float64(), np.array([1 << 63, 0, (0x7FF8 << 48) + 5, 0xFFF8 << 48], "<u8").view("<f8")),
    ):
        for repeats in (1, 3):  # both sides of the few-rows threshold
            array = pa.array(np.tile(zeros_and_nans, repeats), kind)
            [got] = values(rs.bucket("x", 1024), x=array)
            assert got == lance_buckets(array, 1024)
            assert got[0] == got[1]
            assert got[2] == got[3]
    assert values(rs.bucket("x", 8), x=pa.array([1, 2, 3, None], pa.int32())) == [[2, 7, 1, 0]]
    assert values(rs.bucket("x", 8), x=pa.array(["a", "b"])) == [[1, 5]]
    assert values(rs.bucket("x", 8), x=pa.array([True])) == [[2]]
    assert values(rs.bucket("x", 8), x=pa.array([1.25], pa.float32())) == [[0]]
    assert values(rs.bucket("x", 8), x=pa.array([1.25], pa.float64())) == [[0]]


# --- the standard hash ---------------------------------------------------------------------


def reference_murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32, a byte at a time."""

    def rotl(x, r):
        return ((x << r) | (x >> (32 - r))) & 0xFFFFFFFF

    def mix(k):
        return rotl(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF

    h, whole = seed, len(data) // 4 * 4
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        h = (rotl(h ^ mix(k), 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= mix(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & 0xFFFFFFFF
    return h ^ h >> 16


def test_the_reference_is_murmur3():
    for text, expected in ((b"", 0), (b"test", 0xBA6BD213), (b"Hello, world!", 0xC0363E43)):
        assert reference_murmur3(text) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.none() | st.integers(-(1 << 31), (1 << 31) - 1), st.none() | TEXT)))
def test_multi_bucket_is_the_standard_hash_across_columns(rows):
    def expected(number, text):
        if number is None and text is None:
            return None
        h = 0 if number is None else reference_murmur3(struct.pack("<q", number))
        h = h if text is None else reference_murmur3(text.encode(), h)
        return abs(h - (1 << 32) if h >> 31 else h) % 1000

    numbers, texts = [n for n, _ in rows], [t for _, t in rows]
    want = [expected(n, t) for n, t in rows]
    for number_kind, text_kind in (
        (pa.int32(), pa.utf8()),
        (pa.int64(), pa.large_utf8()),
        (pa.date32(), pa.binary()),
    ):
        by = rs.multi_bucket(["n", "t"], 1000)
        columns = {
            "n": pa.array(numbers, pa.int32()).cast(number_kind),
            "t": pa.array(texts, pa.utf8()).cast(text_kind),
        }
        assert values(by, **columns) == [want]


def test_murmur3_does_not_see_the_width_of_a_number():
    small = [0, 1, 100, None, 7, 8, 9]
    kinds = [getattr(pa, f"{s}int{b}")() for s in ("", "u") for b in (8, 16, 32, 64)]
    hashes = {tuple(murmur.murmur3_multi([pa.array(small, kind)])[0]) for kind in kinds}
    assert len(hashes) == 1
    halves = [0.0, -0.0, 1.5, float("nan"), None, 2.0, 3.0]
    kinds = (pa.float16(), pa.float32(), pa.float64())
    hashes = {tuple(murmur.murmur3_multi([pa.array(halves, kind)])[0]) for kind in kinds}
    assert len(hashes) == 1
    with pytest.raises(InvalidInput, match="cannot hash a value of type decimal"):
        murmur.murmur3(pa.array([None], pa.decimal128(5, 1)))


# --- dates, truncation, identity -----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))))
def test_date_parts_are_those_of_the_calendar(moments):
    moments = [m and m.replace(microsecond=0) for m in moments]
    for part in (rs.year, rs.month, rs.day, rs.hour):
        want = [m and getattr(m, part.__name__) for m in moments]
        for unit in ("s", "ms", "us", "ns"):
            column = pa.array(moments, pa.timestamp("us")).cast(pa.timestamp(unit))
            assert values(part("x"), x=column) == [want]
        if part is not rs.hour:
            days = pa.array([m and m.date() for m in moments], pa.date32())
            assert values(part("x"), x=days) == [want]
            assert values(part("x"), x=days.cast(pa.date64())) == [want]


def test_date_parts_follow_the_zone_of_the_column():
    midnight = pa.array([dt.datetime(2024, 12, 31, 23, 30)] * 2, pa.timestamp("us"))
    berlin = midnight.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Europe/Berlin"))
    assert values([rs.year("x"), rs.day("x"), rs.hour("x")], x=berlin) == [
        [2025, 2025],
        [1, 1],
        [0, 0],
    ]
    assert values(rs.hour("x"), x=pa.array([dt.time(13, 5), None], pa.time32("s"))) == [[13, None]]


@given(st.data(), st.sampled_from([k for k in BUCKET_TYPES if pa.types.is_integer(k)]))
@settings(max_examples=60, deadline=None)
def test_truncate_cuts_integers_towards_zero(data, kind):
    numbers = data.draw(st.lists(st.none() | _integers(kind), max_size=20))
    width = data.draw(st.integers(1, 200) | st.integers(1, (1 << 63) - 1))
    want = [n if n is None else (abs(n) // width * width) * (-1 if n < 0 else 1) for n in numbers]
    assert values(rs.truncate("x", width), x=pa.array(numbers, kind)) == [want]


@given(st.lists(st.none() | TEXT), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_truncate_keeps_leading_characters(texts, width):
    want = [text if text is None else text[:width] for text in texts]
    for kind in (pa.utf8(), pa.large_utf8(), pa.string_view()):
        column = pa.array(texts, pa.utf8()).cast(kind)
        assert values(rs.truncate("x", width), x=column) == [want]


def test_transforms_are_the_expressions_they_stand_for():
    """The format defines each transform by SQL; DataFusion computes it."""
    columns = {
        "n": pa.array([-25, -7, 0, 7, None, 2**40]),
        "s": pa.array(["héllo", "", "日本語", None, "ab", "abcdef"]),
        "t": pa.array([0, -1, 10**15, None, 1, 2**50], pa.timestamp("us")),
    }
    for by, sql, sources in (
        (rs.truncate("n", 10), "col0 - (col0 % 10)", ["n"]),
        (rs.truncate("s", 2), "left(col0, 2)", ["s"]),
        (rs.year("t"), "date_part('year', col0)", ["t"]),
        (rs.month("t"), "date_part('month', col0)", ["t"]),
        (rs.day("t"), "date_part('day', col0)", ["t"]),
        (rs.hour("t"), "date_part('hour', col0)", ["t"]),
        (rs.identity("s"), "col0", ["s"]),
        (rs.multi_bucket(["n", "s"], 16), "abs(murmur3_multi(col0, col1)) % 16", ["n", "s"]),
        (rs.multi_bucket(["t"], 16), "abs(murmur3(col0)) % 16", ["t"]),
    ):
        [direct] = transforms.evaluate(*bound(by, **columns))
        [by_sql] = transforms.evaluate(*bound(rs.expression(sql, sources, direct.type), **columns))
        assert direct.equals(by_sql), sql


def test_identity_keeps_its_type_after_promotion():
    spec, _, names = bound(rs.identity("x"), x=pa.array([5], pa.int32()))
    promoted = pa.record_batch({"x": pa.array([5, None], pa.int64())})
    [array] = transforms.evaluate(spec, promoted, names)
    assert array.type == pa.int32()
    assert array.to_pylist() == [5, None]
    too_wide = pa.record_batch({"x": pa.array([1 << 40], pa.int64())})
    with pytest.raises(InvalidInput, match="does not fit its type int32"):
        transforms.evaluate(spec, too_wide, names)


def test_a_removed_source_column_reads_as_null():
    spec, batch, _ = bound(
        [
            rs.bucket("x", 8),
            rs.multi_bucket(["x"], 8),
            rs.multi_bucket(["x", "y"], 8),
            rs.identity("x"),
            rs.truncate("y", 2),
            rs.expression("coalesce(left(col0, 1), 'none')", ["y"], "utf8"),
            rs.expression("coalesce(col0, 0) + length(coalesce(col1, 'abc'))", ["x", "y"], "int64"),
            rs.expression("abs(murmur3(col0)) % 4", ["y"], "int32"),
        ],
        x=pa.array([1, 2]),
        y=pa.array(["a", "b"]),
    )
    gone = transforms.evaluate(spec, batch.select([]).append_column("z", pa.array([1, 2])), {})
    assert [array[0].as_py() for array in gone] == [0, None, None, None, None, "none", 3, None]
    assert all(len(array) == 2 for array in gone)
    with pytest.raises(InvalidInput, match="the rows lack column 'x', which decides their region"):
        transforms.evaluate(spec, pa.record_batch({"z": [1]}), {0: "x", 1: "y"})


# --- grouping ------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-3, 3) | st.integers(-(1 << 31), (1 << 31) - 1),
            st.none() | st.sampled_from(["", "a", "b"]),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_group_finds_every_region_and_keeps_row_order(rows):
    spec, batch, names = bound(
        [rs.identity("n"), rs.identity("s"), rs.bucket("k", 3)],
        n=pa.array([r[0] for r in rows], pa.int32()),
        s=pa.array([r[1] for r in rows], pa.utf8()),
        k=pa.array([r[2] for r in rows], pa.int64()),
    )
    computed = [array.to_pylist() for array in transforms.evaluate(spec, batch, names)]
    want: dict[tuple[object, ...], list[int]] = {}
    for row, key in enumerate(zip(*computed, strict=True)):
        want.setdefault(key, []).append(row)
    for data in (batch, pa.Table.from_batches([batch[:2], batch[2:]])):
        got = transforms.group(spec, data, names)
        if len(want) == 1:
            assert got == [(next(iter(want)), None)]
        else:
            assert [(key, rows.tolist()) for key, rows in got] == list(want.items())


# --- encoding and ids ----------------------------------------------------------------------


def test_values_are_stored_as_raw_little_endian_scalars():
    for value, kind, data in (
        (5, pa.int32(), b"\x05\0\0\0"),
        (-2, pa.int64(), b"\xfe" + b"\xff" * 7),
        (200, pa.uint8(), b"\xc8"),
        (2**64 - 1, pa.uint64(), b"\xff" * 8),
        (True, pa.bool_(), b"\x01"),
        ("é", pa.utf8(), b"\xc3\xa9"),
        ("", pa.utf8(), b""),
        ("x", pa.large_utf8(), b"x"),
        (b"\0\xff", pa.binary(), b"\0\xff"),
        (dt.date(1970, 1, 3), pa.date32(), b"\x02\0\0\0"),
        (None, pa.int32(), None),
    ):
        assert transforms.encode_value(value, kind) == data
        assert transforms.encode_value(pa.scalar(value, kind), kind) == data
        assert transforms.decode_value(data, kind) == value
    with pytest.raises(Corruption, match="3 bytes, but int32 has 4"):
        transforms.decode_value(b"abc", pa.int32())
    with pytest.raises(Corruption, match="not UTF-8"):
        transforms.decode_value(b"\xff", pa.utf8())
    with pytest.raises(Corruption, match="not a boolean"):
        transforms.decode_value(b"\x02", pa.bool_())


def test_region_ids_never_change():
    """Pinned: another value here means every existing table loses its regions."""
    table = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert (
        str(transforms.region_id(table, 1, [b"\x05\0\0\0"]))
        == "c59617d1-5c09-41bf-8fe1-a2133952a385"
    )
    assert (
        str(transforms.region_id(table, 1, [b"\x05\0\0\0", None, b""]))
        == "7c466bc8-d503-4b70-8821-4e6fb9ed76f8"
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.none() | st.binary(max_size=3), max_size=3)),
        unique_by=lambda item: (item[0], tuple(item[1])),
    )
)
@settings(deadline=None)
def test_region_ids_are_distinct_version_4_uuids(regions):
    table = uuid.UUID(int=1)
    ids = [transforms.region_id(table, spec_id, encoded) for spec_id, encoded in regions]
    assert len(set(ids)) == len(regions)
    assert all(i.version == 4 and i.variant == uuid.RFC_4122 for i in ids)
    assert not set(ids) & {transforms.region_id(uuid.UUID(int=2), s, e) for s, e in regions}


def test_an_unknown_transform_is_named():
    field = rs.RegionField("f", (0,), "zorder", None, "int32")
    with pytest.raises(InvalidInput, match="'zorder', which this version does not know"):
        transforms.evaluate(rs.RegionSpec(1, (field,)), pa.record_batch({"x": [1]}), {0: "x"})
