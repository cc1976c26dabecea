"""What every kind of index makes of the values it is asked about, and what it says it holds."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.packed.memory_entries import MemoryEntries

from penstock.errors import Corruption, InvalidInput
from penstock.packed.indexes import build_index, load_index

TEXT_KINDS = ("stlsort", "bitmap", "hybrid", "marisa", "inverted", "ngram")
NOON = datetime(2020, 1, 1, 12)


@pytest.mark.parametrize(
    ("held", "kind", "near", "same"),
    [
        (
            1,
            pa.int32(),
            [1.5, np.float32(1.5), Decimal("1.5"), pa.scalar(1.5)],
            [1, 1.0, Decimal(1)],
        ),
        (NOON.date(), pa.date32(), [NOON, pa.scalar(NOON)], [NOON.date(), datetime(2020, 1, 1)]),
        (NOON, pa.timestamp("s"), [NOON + timedelta(microseconds=1)], [NOON]),
        (NOON, pa.timestamp("s", "UTC"), [NOON.replace(microsecond=1)], [NOON.replace(tzinfo=UTC)]),
        (time(12), pa.time32("s"), [time(12, 0, 0, 1)], [time(12)]),
        (timedelta(1), pa.duration("s"), [timedelta(1, 0, 1)], [timedelta(1)]),
    ],
)
def test_a_value_between_those_of_the_type_is_refused(
    held: Any, kind: pa.DataType, near: list[Any], same: list[Any]
) -> None:
    """Made a value of the type it would be another question, which has another answer."""
    for name in ("stlsort", "bitmap"):
        index = build_index(name, pa.array([held, None], kind))
        for value in same:
            assert [list(index.query(op, value)) for op in ("=", "<=", "<")] == [[0], [0], []]
        for value in near:
            for op in ("=", "<", ">="):
                for ask in (index.query, index.count):
                    with pytest.raises(InvalidInput, match="not of the index's type"):
                        ask(op, value)
            with pytest.raises(InvalidInput, match="not of the index's type"):
                index.query("in", [held, value])


def test_dates_that_python_does_not_have_are_values_like_others() -> None:
    for kind, days in ((pa.date32(), pa.int32()), (pa.timestamp("us", "UTC"), pa.int64())):
        far = pa.array([np.iinfo(days.to_pandas_dtype()).max, 0, None], days).view(kind)
        for name in ("stlsort", "bitmap", "hybrid"):
            index = build_index(name, far)
            assert list(index.query("=", far[0])) == [0]
            assert list(index.query("<", far[0])) == [1]
            assert list(index.query("range", (far[0], None))) == [0]
            assert index.count(">=", far[0]) == 1


@pytest.mark.parametrize("name", TEXT_KINDS)
def test_what_is_no_text_and_no_list_of_texts_is_refused(name: str) -> None:
    index = build_index(name, pa.array(["a", "b", None]))
    for op, value in (("prefix", "\ud800"), ("like", "\ud800%"), ("=", "\ud800"), ("in", "ab")):
        with pytest.raises(InvalidInput):
            index.query(op, value)


@pytest.mark.parametrize("name", TEXT_KINDS)
def test_an_index_knows_how_much_it_holds(name: str) -> None:
    texts = pa.array([f"text number {n}" for n in range(5000)])
    written = MemoryEntries()
    build_index(name, texts).write(written)
    index = load_index(written)
    before = index.nbytes
    assert before > sum(map(len, written.entries.values())) // 2
    assert len(index.query("range", (None, None))) == 5000
    grown = index.nbytes - before
    assert grown == 0 or grown > texts.nbytes  # kinds that hold all texts from now on


def test_a_file_that_names_a_type_its_kind_does_not_take_is_damaged() -> None:
    for kind, wrong in (("marisa", "int64"), ("stlsort", "uint64"), ("inverted", "binary")):
        written = MemoryEntries()
        build_index(kind, pa.array(["a"])).write(written)
        with pytest.raises(Corruption, match="says of itself"):
            load_index(written.with_meta(penstock={"kind": kind, "type": wrong}))
        with pytest.raises(InvalidInput):
            load_index(written, pa.type_for_alias(wrong))
