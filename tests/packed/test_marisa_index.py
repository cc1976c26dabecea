"""The marisa index: byte for byte that of Milvus, and right about every question."""

from __future__ import annotations

from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.packed.fixtures import names, spec
from tests.packed.memory_entries import MemoryEntries, golden_entries
from tests.packed.texts import (
    asked_columns,
    assert_answers,
    assert_answers_at_scale,
    many,
    questions,
    reloaded,
)

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes.marisa import CSR_INDEX, CSR_OFFSETS, STR_IDS, TRIE, MarisaKind

KIND = MarisaKind()
GOLDEN = names("m_")


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_file_holds_its_spec_and_is_written_again_byte_for_byte(name: str) -> None:
    golden, values = golden_entries(name), spec(name)["values"]
    assert KIND.load(golden, pa.string()).values().to_pylist() == values

    written = MemoryEntries()
    KIND.build(pa.array(values, pa.string())).write(written, described=False)
    assert list(written.entries.items()) == list(golden.entries.items())
    assert written.meta == golden.meta


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_older_writers_lack_the_csr_pair(name: str) -> None:
    golden = golden_entries(name)
    older = golden.replaced(**{CSR_INDEX: None, CSR_OFFSETS: None}).with_meta(
        csr_num_keys=None, marisa_csr_format_version=None
    )
    written = MemoryEntries()
    KIND.load(older, pa.large_string()).write(written, described=False)
    assert (written.entries, written.meta) == (golden.entries, golden.meta)


@settings(max_examples=150, deadline=None)
@given(asked_columns())
def test_answers_are_those_of_brute_force(
    column: tuple[list[str | None], str, str, str],
) -> None:
    values, one, other, pattern = column
    index = KIND.build(pa.array(values, pa.string()))
    asked = questions(one, other, pattern)
    assert_answers(index, values, asked)
    fresh = reloaded(KIND, index)
    # The other way round, so that the whole trie is walked after parts of it, too.
    assert_answers(fresh, values, asked[::-1])
    assert fresh.values().to_pylist() == values


@pytest.mark.parametrize(("rows", "distinct"), [(100_000, 50_000), (1_000_000, 300)])
def test_many_rows(rows: int, distinct: int) -> None:
    array = many(rows, distinct)
    index = reloaded(KIND, KIND.build(array))
    one, other = array.drop_null()[:2].to_pylist()
    asked = [("in", [one, other]), ("not_in", [one]), ("prefix", one[:8]), ("is_null", None)]
    assert_answers_at_scale(index, array, [*asked, ("range", (one, None)), ("like", "%漢_ %7")])


def test_what_is_not_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="string or large_string, not int64"):
        KIND.build(pa.array([1]))
    with pytest.raises(InvalidInput, match="no option 'order'"):
        KIND.build(pa.array(["a"]), order=1)
    with pytest.raises(InvalidInput, match="intersects"):
        KIND.build(pa.array(["a"])).query("intersects", (0, 0, 1, 1))


def test_damaged_entries_are_refused() -> None:
    golden = golden_entries("m_small")
    held = golden.entries

    def numbers(name: str, kind: str, **changed: int) -> bytes:
        array = np.frombuffer(held[name], kind).copy()
        for place, value in changed.items():
            array[int(place[1:])] = value
        return array.tobytes()

    damaged = [
        {TRIE: None},
        {TRIE: b""},
        {STR_IDS: None},
        {STR_IDS: held[STR_IDS][:-1]},
        {STR_IDS: held[STR_IDS][:-8]},
        {STR_IDS: numbers(STR_IDS, "<i8", _1=5)},
        {STR_IDS: numbers(STR_IDS, "<i8", _1=-2)},
        {STR_IDS: numbers(STR_IDS, "<i8", _1=3)},
        {STR_IDS: numbers(STR_IDS, "<i8", _3=3)},
        {CSR_INDEX: None},
        {CSR_OFFSETS: None},
        {CSR_INDEX: held[CSR_INDEX][:-4]},
        {CSR_INDEX: numbers(CSR_INDEX, "<u4", _2=9)},
        {CSR_INDEX: numbers(CSR_INDEX, "<u4", _0=1)},
        {CSR_OFFSETS: numbers(CSR_OFFSETS, "<u4", _0=4, _1=0)},
        {CSR_OFFSETS: numbers(CSR_OFFSETS, "<u4", _0=4)},
        {CSR_OFFSETS: numbers(CSR_OFFSETS, "<u4", _0=1)},
        {CSR_OFFSETS: numbers(CSR_OFFSETS, "<u4", _0=2**31)},
    ]
    for change in damaged:
        with pytest.raises(Corruption, match="entry"):
            KIND.load(golden.replaced(**change), pa.string())
    for meta in ({"csr_num_keys": 6}, {"marisa_csr_format_version": 2}):
        with pytest.raises(Corruption, match="__meta__"):
            KIND.load(golden.with_meta(**meta), pa.string())
    random = Random(1)
    for _ in range(200):
        cut = held[TRIE][: random.randrange(len(held[TRIE]))]
        with pytest.raises(Corruption, match=TRIE):
            KIND.load(golden.replaced(**{TRIE: cut}), pa.string())
