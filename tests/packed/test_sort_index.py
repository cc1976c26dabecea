"""The sort index: byte for byte that of Milvus, over numbers and over text, and always right."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed import texts
from tests.packed.brute import ordered
from tests.packed.columns import (
    NEGATIVE_NAN,
    NUMBERS,
    assert_answers,
    assert_golden,
    assert_holds,
    columns_of,
    damaged_copies,
    loaded_or_refused,
    number_questions,
    numbers,
)
from tests.packed.fixtures import names
from tests.packed.memory_entries import MemoryEntries, golden_entries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import order
from penstock.packed.indexes.numeric_sort import NumericSortKind
from penstock.packed.indexes.std_sort import std_sort_order
from penstock.packed.indexes.stlsort import StlSortKind
from penstock.packed.indexes.string_sort import StringSortKind, with_lengths

KIND = StlSortKind()
GOLDEN = [n for n in names("s_") + names("ss_") if "_json_" not in n and "_hybrid_" not in n]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_file_holds_its_spec_and_is_written_again_byte_for_byte(name: str) -> None:
    assert_golden(KIND, name)


def test_equal_values_lie_as_std_sort_leaves_them_even_where_it_gives_up_on_partitioning() -> None:
    """Keys that drive introsort to its limit; the order is the library's own."""
    keys = [19, 0, 18, 1, 17, 2, 16, 3, 18, 4, 16, 5, 20, 6, 15, 7, 17, 8, 10, 9]
    keys += [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 13, 14, 12, 13, 11, 12, 10, 11, 14]
    left = [1, 20, 3, 21, 5, 22, 7, 23, 9, 24, 11, 25, 13, 26, 15, 27, 17, 28, 19, 29]
    left += [18, 37, 35, 38, 36, 33, 31, 34, 39, 32, 14, 30, 6, 10, 16, 4, 2, 8, 0, 12]
    assert std_sort_order(keys) == left
    for keys in ([], [1], [2, 1], [5] * 40):
        assert sorted(std_sort_order(keys)) == list(range(len(keys)))


# --- answers -------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_numbers_are_found_as_by_looking_at_each(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*NUMBERS, pa.uint8(), pa.uint16(), pa.uint32()]))
    values = data.draw(columns_of(kind))
    array = pa.array([None, *values, None], kind)[1:-1]
    ties = data.draw(st.sampled_from(["row", "std_sort"]))
    index = KIND.build(array, ties=ties)
    held = array.to_pylist()
    one, other = pa.array([data.draw(numbers(kind)), data.draw(numbers(kind))], kind).to_pylist()
    asked = number_questions(one, other)
    assert_answers(index, held, asked)
    assert_answers(texts.reloaded(KIND, index), held, asked)


@settings(max_examples=80, deadline=None)
@given(texts.asked_columns(), st.sampled_from([pa.string(), pa.large_string()]))
def test_text_is_found_as_by_looking_at_each(
    drawn: tuple[list[str | None], str, str, str], kind: pa.DataType
) -> None:
    texts.assert_found_as_by_looking(KIND, drawn, kind)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=4), max_size=30), st.binary(max_size=3))
def test_binary_columns_sort_as_text_does_but_know_no_like(
    values: list[bytes | None], one: bytes
) -> None:
    index = texts.reloaded(KIND, KIND.build(pa.array(values, pa.binary())))
    assert_answers(index, values, [("=", one), ("<", one), (">=", one), ("is_null", None)])
    with pytest.raises(InvalidInput, match="like"):
        index.query("like", "a%")


def test_times_are_found_by_what_they_are() -> None:
    noon, day = datetime(2024, 5, 1, 12), date(1969, 12, 31)
    for kind, values in (
        (pa.date32(), [day, None, date(2024, 1, 1), day]),
        (pa.date64(), [day, None, date(2024, 1, 1), day]),
        (pa.timestamp("us"), [noon, None, noon - timedelta(days=30_000), noon]),
        (pa.timestamp("s", "UTC"), [noon, None, noon - timedelta(days=30_000), noon]),
        (pa.time32("s"), [time(1), None, time(23), time(1)]),
        (pa.time64("us"), [time(1), None, time(23), time(1)]),
        (pa.duration("ms"), [timedelta(-1), None, timedelta(5), timedelta(-1)]),
    ):
        held = pa.array(values, kind).to_pylist()
        index = texts.reloaded(KIND, KIND.build(pa.array(values, kind)))
        assert_answers(index, held, number_questions(held[0], held[2]))


def test_each_sign_of_nan_is_a_value_of_its_own_however_many_are_asked_for() -> None:
    values = [NEGATIVE_NAN, 1.0, None, float("nan"), 2.0, -0.0]
    index = KIND.build(pa.array(values))
    others = [float(n) for n in range(3, 200)]
    for nan, row in ((NEGATIVE_NAN, 0), (float("nan"), 3)):
        assert list(index.query("in", [nan, *others])) == [row]
        assert list(index.query("in", [*others, nan, 0.0])) == sorted([row, 5])
    assert list(index.query("range", (float("-inf"), float("inf")))) == [1, 4, 5]


@pytest.mark.parametrize("spread", ["wide", "narrow", "two heaps"])
def test_a_million_numbers(spread: str) -> None:
    source = np.random.default_rng(7)
    values = source.integers(-(1 << 62), 1 << 62, 1_000_000)
    if spread == "narrow":
        values //= 1 << 53
    elif spread == "two heaps":  # so many high bits agree that they alone tell nothing
        values = np.where(values % 2, values >> 50, (1 << 62) + (values >> 50))
    nulls = source.random(len(values)) < 0.1
    array = pa.array(values, mask=nulls)
    index = texts.reloaded(KIND, KIND.build(array))
    some, low, high = values[:300], *np.sort(values[:2])
    for op, asked, matches in (
        ("in", some, np.isin(values, some)),
        ("range", (int(low), int(high)), (values >= low) & (values <= high)),
        ("<", int(high), values < high),
        (">=", int(low), values >= low),
    ):
        wanted = np.flatnonzero(matches & ~nulls)
        assert np.array_equal(index.query(op, asked).to_array(), wanted)
        assert index.count(op, asked) == len(wanted)
    assert np.array_equal(index.is_null().to_array(), np.flatnonzero(nulls))
    written = MemoryEntries()
    index.write(written)
    pairs = np.frombuffer(written.entries["index_data"], "<i8,<i4,<i4")
    stable = np.argsort(np.where(nulls, np.iinfo(np.int64).max, values), kind="stable")
    assert np.array_equal(pairs["f1"], stable[: len(pairs)])


@pytest.mark.parametrize("distinct", [300, 50_000])
def test_a_million_texts(distinct: int) -> None:
    array = texts.many(1_000_000, distinct)
    known = array[:50].drop_null().to_pylist()
    asked = texts.questions(known[0], known[1], "%river%1_")
    asked += [("like", "lake o%"), ("prefix", "turb"), ("in", known)]
    index = KIND.build(array)
    texts.assert_answers_at_scale(texts.reloaded(KIND, index), array, asked)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_of_one_length_are_moved_as_cells(kind: pa.DataType) -> None:
    values = [f"{n * 7919 % 1000:03d}" for n in range(1000)] + ["5", "77"]
    for array in (pa.array(values, kind)[7:1000], pa.array(values, kind)[7:]):
        wanted = array.cast(pa.large_binary()).to_pylist()
        distinct, postings = order.text_groups(array, None)
        distinct.validate(full=True)
        assert distinct.type == kind
        assert distinct.cast(pa.large_binary()).to_pylist() == sorted(wanted)
        assert [wanted[row] for row in postings.rows] == sorted(wanted)
        joined, starts = with_lengths(distinct, 4)
        assert joined.tobytes() == b"".join(
            len(text).to_bytes(4, "little") + text for text in sorted(wanted)
        )
        assert starts[-1] == len(joined)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_texts_that_begin_alike_are_compared_as_text(
    kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "COMPARED_ROWS", 100)
    monkeypatch.setattr(order, "SORT_CHUNK_ROWS", 64)
    stems = [
        "the river of ",
        "the river of stones\0",
        "the riverbed, \u00e9",
        "\U0001f600 the lake ",
    ]
    values = [stems[n % 4] + str(n * 7919 % 900) for n in range(1001)] + [""]
    rows = np.arange(len(values)) * 3 + 1
    for array in (pa.array(values, kind)[5:], pa.array(values[:900:1], kind)):
        assert order._begin_alike(array)
        owners = rows[: len(array)]
        wanted = array.cast(pa.large_binary()).to_pylist()
        distinct, postings = order.text_groups(array, owners)
        assert distinct.type == kind
        assert distinct.cast(pa.large_binary()).to_pylist() == sorted(set(wanted))
        by_text = sorted(range(len(wanted)), key=wanted.__getitem__)
        assert postings.rows.tolist() == owners[by_text].tolist()


# --- order ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=False) | st.sampled_from([NEGATIVE_NAN, float("nan"), -0.0])))
def test_floats_sort_as_tables_compare_them(values: list[float]) -> None:
    found = order.number_order(np.array(values, np.float64)).tolist()
    assert found == sorted(range(len(values)), key=lambda row: ordered(values[row]))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_text_sorts_by_its_bytes_and_equal_text_by_row(data: st.DataObject) -> None:
    """Texts with long beginnings in common, of zeros too, so that windows run out and tie."""
    stems = [b"", b"\0", b"ab", b"a" * 6, b"a" * 7, b"a" * 8, b"\0" * 15, b"a" * 200, b"a" * 113]
    pieces = st.lists(st.sampled_from([*stems, b"\xff", b"b"]), max_size=3).map(b"".join)
    values = data.draw(st.lists(pieces, max_size=40))
    kind = data.draw(st.sampled_from([pa.binary(), pa.large_binary()]))
    positions, begins = order.text_order(pa.array([b"?", *values], kind)[1:])
    wanted = sorted(range(len(values)), key=values.__getitem__)
    assert positions.tolist() == wanted
    assert [values[row] for row in positions[begins]] == sorted(set(values))


def test_words_too_wide_to_sort_at_once_are_still_sorted_stably() -> None:
    source = np.random.default_rng(3)
    for _ in range(30):
        bits = int(source.integers(40, 64))
        keys = source.choice(source.integers(0, 1 << bits, 50), 5000).astype(np.uint64)
        keys |= source.integers(0, 4, 5000).astype(np.uint64)
        keys[:2] = 0, (1 << 64) - 1
        assert np.array_equal(order.stable_order(keys), np.argsort(keys, kind="stable"))


# --- files of others, files that are damaged, input that is wrong --------------------------------


@pytest.mark.parametrize("name", ["s_int64_n12_nulls", "s_bool_n12_nulls", "ss_mixed"])
def test_what_older_writers_left_out_follows_from_the_rest(name: str) -> None:
    entries = golden_entries(name)
    kind = pa.bool_() if "bool" in name else pa.string() if "ss_" in name else pa.int64()
    whole = KIND.load(entries, kind)
    assert entries.meta["num_rows"] > len(whole.is_not_null())
    for left_out in ("idx_to_offsets", "valid_bitset"):
        entries = entries.replaced(**{left_out: None})
        older = KIND.load(entries, kind)
        first, again = MemoryEntries(), MemoryEntries()
        whole.write(first)
        older.write(again)
        assert first.entries == again.entries
        assert first.meta == again.meta


def test_an_entry_that_contradicts_another_is_named() -> None:
    entries = MemoryEntries()
    KIND.build(pa.array([30, 10, None, 20, 10])).write(entries)
    data = entries.entries["index_data"]
    for name, changed in {
        "index_data": data[:-1],
        "idx_to_offsets": bytes(20),
        "valid_bitset": b"\x0f" + bytes(7),
    }.items():
        with pytest.raises(Corruption, match=name):
            KIND.load(entries.replaced(**{name: changed}), pa.int64())
    swapped = data[48:] + data[16:48] + data[:16]
    past = data[:8] + b"\x05\0\0\0" + data[12:]
    twice = data[:8] + b"\x04\0\0\0" + data[12:]
    for changed in (swapped, past, twice, b""):
        with pytest.raises(Corruption, match="index_data"):
            KIND.load(entries.replaced(index_data=changed), pa.int64())
    for meta in ({"num_rows": 3}, {"index_length": 5}, {"num_rows": None}, {"num_rows": -1}):
        with pytest.raises(Corruption, match=r"index_data|num_rows"):
            KIND.load(entries.with_meta(**meta), pa.int64())
    with pytest.raises(Corruption, match="index_data"):
        KIND.load(entries.replaced(index_data=None), pa.int64())
    alone = entries.replaced(idx_to_offsets=None, valid_bitset=None)
    with pytest.raises(Corruption, match="ascending"):
        KIND.load(alone.replaced(index_data=swapped), pa.int64())
    with pytest.raises(Corruption, match="num_rows"):
        KIND.load(alone.with_meta(num_rows=(1 << 31) - 1), pa.int64())


@pytest.mark.parametrize(
    ("at", "word", "said"),
    [
        (0, 3, "offsets of its strings"),
        (0, 1 << 31, "end before"),
        (2, 3, "offsets of its strings"),
        (3, 2, "lengths"),
        (4, int.from_bytes(b"zz00", "little"), "distinct and in ascending"),
        (4, 0xFFFFFFFF, "no string"),
        (5, 1000, "past the entry"),
        (8, 4, "offsets of its rows do not ascend"),
        (9, 1, "numbers and offsets"),
        (10, 4, "rows of one string"),
        (12, 9, "past the 5"),
        (14, 1, "two values"),
        (15, 1, "end mark"),
    ],
)
def test_every_part_of_a_sort_index_of_text_is_checked(at: int, word: int, said: str) -> None:
    """Two strings of four bytes, so that the whole entry is words; one of them is changed."""
    written = MemoryEntries()
    KIND.build(pa.array(["bbbb", "aaaa", None, "aaaa", "aaaa"])).write(written)
    alone = written.replaced(idx_to_offsets=None, valid_bitset=None)
    words = np.frombuffer(alone.entries["index_data"], "<u4").copy()
    assert len(KIND.load(alone, pa.string()).is_not_null()) == 4
    words[at] = word
    with pytest.raises(Corruption, match=said):
        KIND.load(alone.replaced(index_data=words.tobytes()), pa.string())


@pytest.mark.parametrize("name", ["s_int64_n12_nulls", "s_bool_n12_nulls", "ss_mixed", "ss_one"])
def test_damage_is_refused_or_leaves_an_index_that_still_makes_sense(name: str) -> None:
    entries = golden_entries(name)
    kind = pa.bool_() if "bool" in name else pa.string() if "ss_" in name else pa.int64()
    whole = KIND.load(entries, kind).is_not_null()
    refused = 0
    for copy in damaged_copies(entries, seed=5, copies=300):
        index = loaded_or_refused(KIND, copy, kind)
        if index is None:
            refused += 1
        else:
            assert index.query("range", (None, None)) == index.is_not_null() == whole
    assert refused > 100


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (pa.array([1], pa.uint64()), {}),
        (pa.array([[1]]), {}),
        (pa.array([1], pa.decimal128(5)), {}),
        (pa.array([1]), {"ties": "any"}),
        (pa.array([1]), {"nullable": True}),
        (pa.array(["a"]), {"unknown": 1}),
    ],
)
def test_what_a_sort_index_does_not_take_is_refused(array: pa.Array, options: Any) -> None:
    with pytest.raises(InvalidInput):
        KIND.build(array, **options)


def test_a_type_that_the_file_cannot_be_of_and_questions_it_cannot_answer() -> None:
    entries = golden_entries("ss_mixed")
    with pytest.raises(Corruption, match="index_length"):
        KIND.load(entries, pa.int64())
    with pytest.raises(InvalidInput):
        NumericSortKind().load(entries, pa.string())
    with pytest.raises(InvalidInput):
        StringSortKind().load(entries, pa.int64())
    with pytest.raises(Corruption, match="version"):
        KIND.load(entries.with_meta(version=2), pa.string())
    index = KIND.build(pa.array([1, 2]))
    for op, value in (("prefix", "1"), ("like", "1%"), ("=", "one"), ("in", [None]), ("no", 1)):
        with pytest.raises(InvalidInput):
            index.query(op, value)
        with pytest.raises(InvalidInput):
            index.count(op, value)


def test_chunks_and_dictionaries_are_columns_too() -> None:
    values = ["b", None, "a", "b"] * 3
    encoded = pa.array(values).dictionary_encode()
    assert_holds(KIND.build(encoded), values)
    assert_holds(KIND.build(pa.chunked_array([values[:5], values[5:]])), values)
    shuffled = Random(1).sample(range(100), 100)
    assert_holds(KIND.build(pa.chunked_array([shuffled[:50], shuffled[50:]])), shuffled)
