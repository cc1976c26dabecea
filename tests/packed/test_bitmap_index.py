"""The bitmap index: byte for byte that of Milvus, and always right."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap
from tests.packed import texts
from tests.packed.columns import (
    NUMBERS,
    assert_answers,
    assert_golden,
    columns_of,
    damaged_copies,
    loaded_or_refused,
    number_questions,
    numbers,
)
from tests.packed.fixtures import names
from tests.packed.memory_entries import MemoryEntries, golden_entries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes.bitmap import BitmapKind
from penstock.packed.indexes.roaring import bitmap_of_bits, bitmap_of_rows, serialise

KIND = BitmapKind()
GOLDEN = [n for n in names("b_") if "_json_" not in n and "_hybrid_" not in n]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_file_holds_its_spec_and_is_written_again_byte_for_byte(name: str) -> None:
    assert_golden(KIND, name)


# --- bitmaps as bytes ----------------------------------------------------------------------


def test_bitmaps_made_all_at_once_are_those_made_one_by_one() -> None:
    """Containers of every shape, after heads of every length, odd ones too."""
    source = np.random.default_rng(2)
    everything = np.arange(400_000, dtype=np.uint32)
    groups = [
        everything[70_000:74_096],
        everything[131_072 : 131_072 + 4097],
        np.array([0], np.uint32),
        np.array([65_535, 65_536], np.uint32),
        everything[:200_000:2],
        np.flatnonzero(source.random(400_000) < 0.062).astype(np.uint32),
        everything,
    ]
    heads = [b"x" * n for n in (0, 1, 2, 8, 3, 11, 1)]
    borders = np.append(0, np.cumsum([len(rows) for rows in groups]))
    data, starts, containers = serialise(
        borders,
        np.concatenate(groups),
        np.frombuffer(b"".join(heads), np.uint8),
        np.array([len(head) for head in heads]),
    )
    wanted = b""
    for number, (head, rows) in enumerate(zip(heads, groups, strict=True)):
        wanted += head
        assert starts[number] == len(wanted)
        wanted += BitMap(rows.tolist(), optimize=False).serialize()
    assert data.tobytes() == wanted
    for number, rows in enumerate(groups):
        found = containers.rows(data, np.array([number]), np.array([number + 1]))
        assert np.array_equal(found, rows)
    found = containers.rows(data, np.array([1, 5]), np.array([4, 7]))
    assert np.array_equal(found, np.concatenate(groups[1:4] + groups[5:]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300_000), st.floats(0, 1), st.integers(0, 1 << 32))
def test_a_bitmap_of_rows_has_these_rows(total: int, share: float, seed: int) -> None:
    source = np.random.default_rng(seed)
    rows = np.flatnonzero(source.random(total) < share**4)
    found = bitmap_of_rows(source.permutation(rows), total)
    assert np.array_equal(found.to_array(), rows)
    flags = np.zeros(total, np.bool_)
    flags[rows] = True
    assert bitmap_of_bits(np.packbits(flags, bitorder="little")) == found
    assert BitMap.deserialize(found.serialize()) == found


# --- answers -------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_numbers_are_found_as_by_looking_at_each(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*NUMBERS, pa.uint8(), pa.uint32()]))
    array = pa.array([None, *data.draw(columns_of(kind))], kind)[1:]
    index = KIND.build(array)
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


@pytest.mark.parametrize("distinct", [2, 1000, 200_000])
def test_a_million_numbers(distinct: int) -> None:
    source = np.random.default_rng(distinct)
    values = source.integers(0, distinct, 1_000_000) * 3 - 7
    nulls = source.random(len(values)) < 0.1
    index = texts.reloaded(KIND, KIND.build(pa.array(values, mask=nulls)))
    some, low, high = values[:40], *np.sort(values[:2])
    for op, asked, matches in (
        ("=", int(low), values == low),
        ("in", some, np.isin(values, some)),
        ("range", (int(low), int(high)), (values >= low) & (values <= high)),
        ("<", int(high), values < high),
        ("!=", int(high), values != high),
    ):
        wanted = np.flatnonzero(matches & ~nulls)
        assert np.array_equal(index.query(op, asked).to_array(), wanted)
        assert index.count(op, asked) == len(wanted)
    assert np.array_equal(index.is_null().to_array(), np.flatnonzero(nulls))


def test_a_million_texts() -> None:
    array = texts.many(1_000_000, 3000)
    one, other = array[:10].drop_null().to_pylist()[:2]
    asked = [*texts.questions(one, other, "%river%1_"), ("like", "lake o%"), ("prefix", "turb")]
    texts.assert_answers_at_scale(texts.reloaded(KIND, KIND.build(array)), array, asked)


def test_zero_has_one_key_whatever_its_sign_and_it_is_that_of_the_first_row() -> None:
    for first, sign in ((0.0, 0), (-0.0, 0x80)):
        entries = MemoryEntries()
        KIND.build(pa.array([first, -first, 0.0])).write(entries)
        assert entries.meta["bitmap_index_length"] == 1
        assert entries.entries["bitmap_index_data"][7] == sign
        assert list(KIND.load(entries, pa.float64()).query("=", 0.0)) == [0, 1, 2]


def test_an_answer_may_be_changed_without_changing_the_index() -> None:
    index = KIND.build(pa.array([1, 2, 1, None]))
    for op, value in (("=", 1), ("<=", 2), ("is_null", None), ("is_not_null", None)):
        before = index.query(op, value)
        before.copy().add(9)
        index.query(op, value).clear()
        assert index.query(op, value) == before != BitMap()


# --- nullable or not -----------------------------------------------------------------------


def test_validity_is_written_for_nullable_columns_and_follows_from_the_rest_without() -> None:
    full, gappy = pa.array(["a", "b", "a"]), pa.array(["a", None, "a"])
    for array, options, there in (
        (full, {}, False),
        (full, {"nullable": True}, True),
        (full, {"nullable": False}, False),
        (gappy, {}, True),
        (gappy, {"nullable": True}, True),
    ):
        entries = MemoryEntries()
        KIND.build(array, **options).write(entries)
        assert ("valid_bitset" in entries.entries) == there
        older = KIND.load(entries.replaced(valid_bitset=None), pa.string())
        assert_answers(older, array.to_pylist(), texts.questions("a", "b", "_"))
    with pytest.raises(InvalidInput, match="nullable"):
        KIND.build(gappy, nullable=False)


# --- damage, and input that is wrong -------------------------------------------------------


def test_an_entry_that_contradicts_itself_or_another_is_named() -> None:
    entries = MemoryEntries()
    KIND.build(pa.array([5, 7, None, 5, 7, 5], pa.int8())).write(entries)
    data = entries.entries["bitmap_index_data"]
    assert data[0] == 5
    assert data[23] == 7
    run = BitMap([0, 3, 5]).serialize().replace(struct.pack("<I", 12346), struct.pack("<I", 12347))
    for changed in (
        data[23:] + data[:23],
        data[:-1],
        data + b"\0",
        b"",
        b"\x07" + data[1:],
        data[:17] + b"\x01" + data[18:],
        data[:19] + b"\x05" + data[20:],
        data[:21] + b"\x09" + data[22:],
        data[:1] + run + data[23:],
        data[:5] + b"\x00" + data[6:],
        data[:5] + b"\xff\xff\xff\xff" + data[9:],
    ):
        with pytest.raises(Corruption, match="bitmap_index_data"):
            KIND.load(entries.replaced(bitmap_index_data=changed), pa.int8())
    wide = MemoryEntries()
    KIND.build(pa.array([1] * 70_000, pa.int8())).write(wide)
    data = wide.entries["bitmap_index_data"]
    for at in (9, 13, 17, 21):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(Corruption, match="bitmap_index_data"):
            KIND.load(wide.replaced(bitmap_index_data=changed), pa.int8())
    for changed in (b"\x3f", b"", b"\x3b\0"):
        with pytest.raises(Corruption, match="valid_bitset"):
            KIND.load(entries.replaced(valid_bitset=changed), pa.int8())
    for meta in (
        {"bitmap_index_length": 1},
        {"bitmap_index_length": 1 << 31},
        {"bitmap_index_num_rows": 5},
        {"bitmap_index_num_rows": (1 << 31) - 1},
        {"bitmap_index_num_rows": None},
    ):
        with pytest.raises(Corruption, match="bitmap_index"):
            KIND.load(entries.with_meta(**meta), pa.int8())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("b_int64_n50_nullable", pa.int64()),
        ("b_bool_n50_nullable", pa.bool_()),
        ("b_string_n60_nullable", pa.string()),
        ("b_int8_bitsetcontainer", pa.int8()),
    ],
)
def test_damage_is_refused_or_leaves_an_index_that_still_makes_sense(
    name: str, kind: pa.DataType
) -> None:
    entries = golden_entries(name)
    whole = KIND.load(entries, kind).is_not_null()
    refused = 0
    for copy in damaged_copies(entries, seed=6, copies=250):
        index = loaded_or_refused(KIND, copy, kind)
        if index is None:
            refused += 1
        elif "valid_bitset" in entries.names():
            assert index.query("range", (None, None)) == index.is_not_null() == whole
    assert refused > 100


def test_what_a_bitmap_index_does_not_take_is_refused() -> None:
    for array in (pa.array([1], pa.uint64()), pa.array([[1]]), pa.array([None])):
        with pytest.raises(InvalidInput):
            KIND.build(array)
    with pytest.raises(InvalidInput, match="ties"):
        KIND.build(pa.array([1]), ties="row")
    with pytest.raises(InvalidInput, match="prefix"):
        KIND.build(pa.array([1])).query("prefix", "1")
