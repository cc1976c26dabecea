"""The ngram index: narrow first, then exact."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed.memory_entries import MemoryEntries
from tests.packed.texts import (
    asked_columns,
    assert_answers,
    assert_answers_at_scale,
    many,
    questions,
    reloaded,
)

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import ngram
from penstock.packed.indexes.ngram import (
    AVG_ROW_SIZE,
    GRAMS,
    GRAMS_INDEX,
    ROWS,
    ROWS_INDEX,
    VALUES,
    VALUES_INDEX,
    NgramKind,
)

KIND = NgramKind()


@settings(max_examples=40, deadline=None)
@given(asked_columns(), st.sampled_from([(1, 1), (2, 3), (3, 3), (1, 5)]))
def test_answers_are_those_of_brute_force(
    column: tuple[list[str | None], str, str, str], lengths: tuple[int, int]
) -> None:
    values, one, other, pattern = column
    low, high = lengths
    index = KIND.build(pa.array(values, pa.string()), min_gram=low, max_gram=high)
    asked = questions(one, other, pattern)
    assert_answers(index, values, asked)
    assert_answers(reloaded(KIND, index), values, asked)


@pytest.mark.parametrize(("rows", "distinct"), [(200_000, 200_000), (1_000_000, 300)])
def test_many_rows_in_many_blocks(rows: int, distinct: int) -> None:
    array = many(rows, distinct)
    assert distinct < 1000 or array.unique().nbytes > 2 * ngram.BLOCK_BYTES
    index = reloaded(KIND, KIND.build(array))
    one, other = array.drop_null()[:2].to_pylist()
    asked = [("in", [one, other]), ("prefix", one[:8]), ("range", (one, None)), ("is_null", None)]
    asked += [("in", array.drop_null()[:3000].to_pylist())]
    asked += [("like", like) for like in ("%漢_ %7", "%er 12%", "%x%", "river%9", "%7")]
    assert_answers_at_scale(index, array, asked)


def test_long_texts_are_cut_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(array: pa.Array) -> MemoryEntries:
        written = MemoryEntries()
        KIND.build(array).write(written)
        return written

    array = pa.array(["漢字かな river " * 20, "ab", None])
    whole = built(array)
    for block_bytes in (1, 7, 16):
        monkeypatch.setattr(ngram, "BLOCK_BYTES", block_bytes)
        assert built(array).entries[ngram.GRAMS] == whole.entries[ngram.GRAMS]
    monkeypatch.setattr(ngram, "BLOCK_BYTES", 1 << 16)
    tracemalloc.start()
    try:
        built(pa.array([" ".join(map(str, range(100_000)))]))
        assert tracemalloc.get_traced_memory()[1] < 24 << 20  # not a hundred times the text
    finally:
        tracemalloc.stop()


@pytest.mark.soak
def test_a_million_distinct_values() -> None:
    array = many(1_500_000, 1_000_000)
    index = reloaded(KIND, KIND.build(array))
    assert_answers_at_scale(index, array, [("like", "%river 1234%"), ("like", "%漢_ %7")])


def test_grams_leave_few_candidates() -> None:
    array = many(20_000, 20_000)
    index = KIND.build(array)
    found = index.query("like", "%river 123%")
    assert 0 < len(found) <= 60
    assert len(index.candidates(["river 123"])) < 200
    assert len(index.candidates(["12"])) < 2000
    assert len(index.candidates(["r"])) == len(array.unique().drop_null())
    assert len(index.candidates(["xyz"])) == 0


def test_the_mean_size_of_rows_is_kept() -> None:
    entries = MemoryEntries()
    KIND.build(pa.array(["é", "é", None, "abcdef"])).write(entries)
    assert np.frombuffer(entries.entries[AVG_ROW_SIZE], "<u8").tolist() == [10 // 3]
    assert (entries.meta["min_gram"], entries.meta["max_gram"]) == (2, 3)


def test_what_it_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match="string or large_string"):
        KIND.build(pa.array([1]))
    for low, high in ((0, 2), (3, 2), (2, 9), ("2", 3), (True, 2)):
        with pytest.raises(InvalidInput, match="min_gram"):
            KIND.build(pa.array(["a"]), min_gram=low, max_gram=high)
    with pytest.raises(InvalidInput, match="no option"):
        KIND.build(pa.array(["a"]), gram=1)


def test_damaged_entries_are_refused() -> None:
    whole = MemoryEntries()
    KIND.build(pa.array(["abc", "bcd", None, "abc"])).write(whole)

    def words(kind: str, *values: int) -> bytes:
        return np.array(values, kind).tobytes()

    held = whole.entries
    for change in (
        {GRAMS_INDEX: None},
        {GRAMS_INDEX: held[GRAMS_INDEX][:-8]},
        {GRAMS: None},
        {GRAMS: held[GRAMS][:-1]},
        {VALUES: None},
        {VALUES: b"abcabc"},
        {VALUES: b"bcdabc"},
        {VALUES: b"abc\xffcd"},
        {VALUES: b"abcbc"},
        {VALUES_INDEX: words("<u8", 0, 7, 6)},
        {VALUES_INDEX: words("<u8", 0, 3, 2**63)},
        {VALUES_INDEX: b""},
        {ROWS: words("<u4", 0, 3, 2)},
        {ROWS: words("<u4", 3, 0, 1)},
        {ROWS_INDEX: words("<u4", 0, 3)},
    ):
        with pytest.raises(Corruption, match="entry"):
            KIND.load(whole.replaced(**change), pa.string())
    with pytest.raises(Corruption, match="min_gram"):
        KIND.load(whole.with_meta(min_gram=None), pa.string())
    for wrong in (bytes(len(held[GRAMS])), held[GRAMS][::-1]):
        index = KIND.load(whole.replaced(**{GRAMS: wrong}), pa.string())
        with pytest.raises(Corruption, match=GRAMS):
            index.query("like", "%abc%")
