"""The inverted index: every scalar type, found by tantivy, and nothing left behind."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

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
from penstock.packed.indexes.inverted import POSTINGS_INDEX, POSTINGS_ROWS, InvertedKind
from penstock.packed.indexes.postings import NULL_OFFSETS
from penstock.packed.indexes.terms import MAX_TEXT_BYTES, PREFIX, Scratch

KIND = InvertedKind()
NEGATIVE_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8 << 48))[0]

numbers = {
    pa.int8(): st.integers(-3, 3) | st.sampled_from([-128, 127]),
    pa.int64(): st.integers(-3, 3) | st.sampled_from([-(1 << 63), (1 << 63) - 1]),
    pa.uint64(): st.integers(0, 3) | st.sampled_from([(1 << 63) + 1, (1 << 64) - 1]),
    pa.float32(): st.sampled_from([-1.5, 0.0, -0.0, 0.25, math.inf, -math.inf]),
    pa.float64(): st.sampled_from(
        [0.1, -0.0, 0.0, 5e-324, math.inf, -math.inf, math.nan, NEGATIVE_NAN, -1e300]
    ),
    pa.bool_(): st.booleans(),
}


@settings(max_examples=40, deadline=None)
@given(asked_columns())
def test_answers_about_text_are_those_of_brute_force(
    column: tuple[list[str | None], str, str, str],
) -> None:
    values, one, other, pattern = column
    index = KIND.build(pa.array(values, pa.string()))
    asked = questions(one, other, pattern)
    assert_answers(index, values, asked)
    assert_answers(reloaded(KIND, index), values, asked[::-1])


@pytest.mark.parametrize("value_type", numbers, ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_answers_about_numbers_are_those_of_brute_force(
    value_type: pa.DataType, data: st.DataObject
) -> None:
    one_value = numbers[value_type]
    values = data.draw(st.lists(st.none() | one_value, max_size=30))
    one, other = data.draw(one_value), data.draw(one_value)
    index = reloaded(KIND, KIND.build(pa.array(values, value_type)))
    asked: list[tuple[str, Any]] = [(op, one) for op in ("=", "<", "<=", ">", ">=")]
    asked += [("in", [one, other]), ("not_in", [one, other]), ("is_null", None)]
    asked += [("range", ends) for ends in ((one, other), (None, one), (one, None), (None, None))]
    assert_answers(index, values, asked)
    with pytest.raises(InvalidInput, match="like"):
        index.query("like", "%")


@pytest.mark.parametrize(("rows", "distinct"), [(100_000, 20_000), (1_000_000, 300)])
def test_many_rows(rows: int, distinct: int) -> None:
    array = many(rows, distinct)
    index = reloaded(KIND, KIND.build(array))
    one, other = array.drop_null()[:2].to_pylist()
    asked = [("in", [one, other]), ("not_in", [one]), ("prefix", one[:8]), ("is_null", None)]
    assert_answers_at_scale(index, array, [*asked, (">", one), ("like", "%漢_ %7")])

    array = pa.array(np.random.default_rng(1).integers(0, distinct, rows))
    index = reloaded(KIND, KIND.build(array))
    assert_answers_at_scale(index, array, [("in", [3, 5, -1]), ("range", (7, distinct // 2))])


@pytest.mark.soak
def test_a_million_distinct_values() -> None:
    array = pa.array(np.random.default_rng(1).permutation(1_000_000))
    index = reloaded(KIND, KIND.build(array))
    assert_answers_at_scale(index, array, [("in", [3, 5]), ("range", (7, 500_000)), ("<", 9)])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process puts temporary files, as if it had put none anywhere yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Scratch, "_home", None)
    return tmp_path


def assert_scratch(temporary: Path, count: int) -> None:
    """Soon at the latest: a thread of tantivy may be in the way for a moment."""
    for _ in range(100):
        gc.collect()
        Scratch.remove()
        left = list(temporary.glob(f"{PREFIX}*/*/"))
        if len(left) == count:
            return
        time.sleep(0.05)
    raise AssertionError(left)


def test_its_files_go_when_it_does(temporary: Path) -> None:
    index = KIND.build(pa.array(["a", None]))
    assert_scratch(temporary, 1)
    entries = MemoryEntries()
    index.write(entries)
    assert entries.meta["file_names"] == sorted(entries.meta["file_names"])
    assert entries.meta["has_null"] is True
    again = KIND.load(entries, pa.string())
    assert_scratch(temporary, 2)
    del index, again
    assert_scratch(temporary, 0)
    with pytest.raises(Corruption):
        KIND.load(entries.replaced(**{"meta.json": b"{}"}), pa.string())
    assert_scratch(temporary, 0)


def test_files_of_processes_that_were_killed_go_too(temporary: Path) -> None:
    left, alive, _young = homes = [temporary / f"{PREFIX}{n}" for n in range(3)]
    for home in homes:
        (home / "some").mkdir(parents=True)
        (home / "lock").touch()
    for home in (left, alive):
        os.utime(home, (0, 0))
    with (alive / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        KIND.build(pa.array(["a"]))
    assert [home.exists() for home in homes] == [False, True, True]
    shutil.rmtree(temporary)  # as systems do with files that are old
    temporary.mkdir()
    assert list(KIND.build(pa.array(["a"])).query("=", "a")) == [0]


def test_what_it_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not binary"):
        KIND.build(pa.array([b"a"]))
    with pytest.raises(InvalidInput, match="no option"):
        KIND.build(pa.array(["a"]), x=1)
    with pytest.raises(InvalidInput, match="marisa or sort"):
        KIND.build(pa.array(["a" * (MAX_TEXT_BYTES + 1)]))
    longest = "é" * (MAX_TEXT_BYTES // 2)
    assert list(KIND.build(pa.array(["a", longest])).query("=", longest)) == [1]


def test_damaged_entries_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    whole = MemoryEntries()
    KIND.build(pa.array(["a", "b", None, "a"])).write(whole)

    def words(kind: str, *values: int) -> bytes:
        return np.array(values, kind).tobytes()

    damaged = [
        {NULL_OFFSETS: None},
        {NULL_OFFSETS: words("<u8", 1)},
        {NULL_OFFSETS: words("<u8", 4)},
        {NULL_OFFSETS: words("<u8", 2, 2)},
        {NULL_OFFSETS: b"1234567"},
        {POSTINGS_INDEX: None},
        {POSTINGS_INDEX: words("<u4", 0, 3)},
        {POSTINGS_INDEX: words("<u4", 0, 2, 4)},
        {POSTINGS_ROWS: None},
        {POSTINGS_ROWS: words("<u4", 3, 0, 1)},
        {POSTINGS_ROWS: words("<u4", 0, 3, 9)},
        {POSTINGS_ROWS: words("<u4", 0, 3, 3)},
    ]
    for name in whole.meta["file_names"]:
        damaged += [{name: None}]
        if name != ".managed.json":
            damaged += [{name: b""}, {name: whole.entries[name][:-20]}]
        if not name.endswith(".json"):  # tantivy has checksums, and would not look at them
            damaged += [{name: b"\x80" + whole.entries[name][1:]}]
    for change in damaged:
        with pytest.raises(Corruption, match="build"):
            KIND.load(whole.replaced(**change), pa.string())
    for meta in (
        {"file_names": None},
        {"file_names": []},
        {"file_names": ["../a"]},
        {"has_null": 1},
    ):
        with pytest.raises(Corruption, match="__meta__"):
            KIND.load(whole.with_meta(**meta), pa.string())
    for other in (pa.int64(), pa.float64(), pa.bool_()):
        with pytest.raises(Corruption, match="build"):
            KIND.load(whole, other)
