"""The hybrid index: a bitmap for few distinct values, sorted for many, and others' choices read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.packed import texts
from tests.packed.columns import assert_answers, assert_golden, assert_holds, number_questions
from tests.packed.fixtures import names, spec
from tests.packed.memory_entries import MemoryEntries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import KINDS, load_index
from penstock.packed.indexes.hybrid import INNER_KINDS, MAX_BITMAP_VALUES, HybridIndex, HybridKind

KIND = HybridKind()
GOLDEN = [name for name in names("") if "_hybrid_" in name]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_file_holds_its_spec_and_is_written_again_byte_for_byte(name: str) -> None:
    assert_golden(KIND, name, inner=INNER_KINDS[spec(name)["hybrid_index_type"]])


@pytest.mark.parametrize("text", [False, True])
def test_more_than_a_hundred_distinct_values_are_sorted(text: bool) -> None:
    for distinct, inner in ((0, 1), (1, 1), (MAX_BITMAP_VALUES, 1), (MAX_BITMAP_VALUES + 1, 2)):
        values: list[int | str | None] = [n % distinct if distinct else None for n in range(7000)]
        values[3] = None
        if text:
            values = [None if value is None else f"v{value}" for value in values]
        array = pa.array(values, pa.string() if text else pa.int64())
        written = MemoryEntries()
        index = KIND.build(array)
        index.write(written)
        assert written.meta["index_type"] == inner
        again = load_index(written)
        assert isinstance(again, HybridIndex)
        assert_holds(again, values)
        asked = texts.questions("v1", "v50", "v_") if text else number_questions(1, 50)
        assert_answers(index, values, asked)
        assert_answers(again, values, asked)


@pytest.mark.parametrize("distinct", [90, 3000])
def test_a_million_texts(distinct: int) -> None:
    array = texts.many(1_000_000, distinct)
    known = array[:50].drop_null().to_pylist()
    index = KIND.build(array)
    assert index.inner.kind == ("bitmap" if distinct == 90 else "stlsort")
    asked = texts.questions(known[0], known[1], "%lake%1_")
    texts.assert_answers_at_scale(texts.reloaded(KIND, index), array, asked)


def test_a_value_beyond_the_hundredth_is_seen_wherever_it_is() -> None:
    values = np.arange(300_000) % MAX_BITMAP_VALUES
    assert KIND.build(pa.array(values)).inner.kind == "bitmap"
    values[-1] = MAX_BITMAP_VALUES
    assert KIND.build(pa.array(values)).inner.kind == "stlsort"


@settings(max_examples=20, deadline=None)
@given(texts.asked_columns())
def test_every_inner_kind_is_read_and_answers_alike(
    drawn: tuple[list[str | None], str, str, str],
) -> None:
    values, one, other, pattern = drawn
    for number, name in INNER_KINDS.items():
        written = MemoryEntries()
        KINDS[name].build(pa.array(values, pa.string())).write(written, described=False)
        written.put_meta("index_type", number)
        index = KIND.load(written, pa.string())
        again = MemoryEntries()
        index.write(again, described=False)
        assert again.meta == written.meta
        texts.assert_answers(index, values, texts.questions(one, other, pattern))


def test_options_go_to_the_inner_index_and_others_are_refused() -> None:
    array = pa.array([1.0, 2.0])
    index = KIND.build(array, nullable=True, ties="std_sort", is_nested=True)
    written = MemoryEntries()
    index.write(written)
    assert written.meta["is_nested"]
    assert "valid_bitset" in written.entries
    for options in ({"inner": "marisa"}, {"inner": "stlsort", "ties": "any"}, {"other": 1}):
        with pytest.raises(InvalidInput):
            KIND.build(array, **options)
    with pytest.raises(InvalidInput):
        KIND.build(pa.array([[1]]))


@pytest.mark.parametrize("index_type", [None, 0, 5, "bitmap", True])
def test_an_inner_kind_that_is_not_known_is_refused(index_type: object) -> None:
    written = MemoryEntries()
    KIND.build(pa.array([1, 2])).write(written)
    with pytest.raises(Corruption, match="index_type"):
        KIND.load(written.with_meta(index_type=index_type), pa.int64())
