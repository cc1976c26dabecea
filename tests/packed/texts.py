"""Columns of text, and every question about text, for the indexes that hold text."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from tests.packed.brute import expected
from tests.packed.memory_entries import MemoryEntries

from penstock.packed.indexes.base import IndexKind, PackedIndex

LETTERS = "ab%_\\\n\0é漢😀\U0010ffff"

texts = st.text(LETTERS, max_size=6)
columns = st.lists(st.one_of(st.none(), texts), max_size=40)
free_patterns = st.text("ab%_\n\0é漢😀", max_size=6)


@st.composite
def matching_patterns(draw: st.DrawFn, values: list[str | None]) -> str:
    """Mostly a pattern that one of the values matches: some of its characters made wildcards."""
    known = [value for value in values if value is not None]
    if not known or draw(st.integers(0, 4)) == 0:
        return draw(free_patterns)
    parts = [
        draw(st.sampled_from(["_", "%", "\\" + char, "\\" + char, "%\\" + char]))
        for char in draw(st.sampled_from(known))
    ]
    return "".join(parts)


@st.composite
def asked_columns(draw: st.DrawFn) -> tuple[list[str | None], str, str, str]:
    """A column, two texts that it may hold, and a pattern."""
    values = draw(columns)
    some = st.sampled_from([value for value in values if value is not None] or [""]) | texts
    return values, draw(some), draw(some), draw(matching_patterns(values))


def questions(one: str, other: str, pattern: str, *, ranges: bool = True) -> list[tuple[str, Any]]:
    asked: list[tuple[str, Any]] = [
        ("is_null", None),
        ("is_not_null", None),
        ("=", one),
        ("in", [one, other, one]),
        ("in", []),
        ("not_in", [one, other]),
        ("prefix", one[:2]),
        ("prefix", ""),
        ("like", pattern),
    ]
    if ranges:
        low, high = sorted((one, other))
        asked += [(op, one) for op in ("<", "<=", ">", ">=")]
        asked += [("range", ends) for ends in ((low, high), (high, low), (None, low), (None, None))]
    return asked


def assert_answers(
    index: PackedIndex, values: list[str | None], asked: list[tuple[str, Any]]
) -> None:
    for op, value in asked:
        wanted = expected(values, op, value)
        assert list(index.query(op, value)) == wanted, (op, value)
        assert index.count(op, value) == len(wanted), (op, value)


def reloaded(kind: IndexKind, index: PackedIndex) -> PackedIndex:
    entries = MemoryEntries()
    index.write(entries)
    assert entries.meta["penstock"]["kind"] == kind.kind
    return kind.load(entries, index.value_type)


def assert_found_as_by_looking(
    kind: IndexKind, drawn: tuple[list[str | None], str, str, str], value_type: pa.DataType
) -> None:
    """A column of text, part of a longer one, as it is built and as it is loaded again."""
    values, one, other, pattern = drawn
    asked = questions(one, other, pattern)
    index = kind.build(pa.array(["x", *values], value_type)[1:])
    assert_answers(index, values, asked)
    assert_answers(reloaded(kind, index), values, asked)


def many(rows: int, distinct: int, seed: int = 1) -> pa.Array:
    """Text such as people have: words and numbers, a tenth null."""
    random = Random(seed)
    words = ["river", "lake", "valve", "turbine", "ocean", "漢字", "naïve"]
    known = [f"{random.choice(words)} {random.choice(words)} {n}" for n in range(distinct)]
    places = np.random.default_rng(seed).integers(-distinct // 9, distinct, rows)
    return pa.array(known).take(pa.array(places, mask=places < 0))


def assert_answers_at_scale(
    index: PackedIndex, array: pa.Array, asked: list[tuple[str, Any]]
) -> None:
    """As `assert_answers`, looking at every distinct value once."""
    encoded = array.dictionary_encode()
    values = [*encoded.dictionary.to_pylist(), None]
    codes = encoded.indices.fill_null(len(values) - 1).to_numpy()
    assert index.rows == len(array)
    for op, value in asked:
        matches = np.zeros(len(values), np.bool_)
        matches[expected(values, op, value)] = True
        wanted = np.flatnonzero(matches[codes])
        assert np.array_equal(index.query(op, value).to_array(), wanted), (op, value)
