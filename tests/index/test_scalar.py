"""The in-memory scalar index answers as a filter of Lance does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec
from penstock.index.scalar import ScalarIndex

SPEC = IndexSpec("b", "btree", "x")


def built(values: list[Any], value_type: pa.DataType, batch_rows: int) -> ScalarIndex:
    """An index filled batch by batch, read now and then so that runs form and merge."""
    index = ScalarIndex(SPEC, value_type)
    for first in range(0, len(values), batch_rows):
        chunk = pa.array(values[first : first + batch_rows], value_type)
        index.append(index.encode(chunk), first)
        if first % 3 == 0:
            index.rows_null()
    return index


cases = st.one_of(
    st.tuples(st.just(pa.int16()), st.just(st.integers(-5, 5))),
    st.tuples(st.just(pa.string()), st.just(st.text(alphabet="abé\x00", max_size=2))),
    st.tuples(st.just(pa.bool_()), st.just(st.booleans())),
)


@given(st.data(), cases, st.integers(1, 6))
def test_rows_by_value_range_and_null(data: st.DataObject, case: Any, batch_rows: int) -> None:
    value_type, value = case
    values = data.draw(st.lists(st.none() | value, max_size=40))
    index = built(values, value_type, batch_rows)
    some = data.draw(st.lists(st.none() | value, max_size=4))
    low, high = data.draw(st.none() | value), data.draw(st.none() | value)
    low_in, high_in = data.draw(st.booleans()), data.draw(st.booleans())
    visible = data.draw(st.integers(0, len(values)))

    def inside(x: Any) -> bool:
        key, bottom, top = (v.encode() if isinstance(v, str) else v for v in (x, low, high))
        above = bottom is None or key > bottom or (low_in and key == bottom)
        return above and (top is None or key < top or (high_in and key == top))

    present = [(row, x) for row, x in enumerate(values[:visible]) if x is not None]
    assert index.rows_in(some, visible).tolist() == [row for row, x in present if x in some]
    between = index.rows_between(
        low, high, low_inclusive=low_in, high_inclusive=high_in, visible_rows=visible
    )
    assert between.tolist() == [row for row, x in present if inside(x)]
    nulls = [row for row, x in enumerate(values) if x is None]
    assert index.rows_null().tolist() == nulls


def test_floats_compare_as_in_lance(tmp_path: Path) -> None:
    nan = float("nan")
    values = [1.0, nan, -0.0, None, 0.0, float("inf"), -nan, -2.5, float("-inf"), 1.0]
    table = pa.table({"row": range(len(values)), "x": pa.array(values, pa.float64())})
    dataset = lance.write_dataset(table, str(tmp_path / "t"))
    dataset.create_scalar_index("x", "BTREE")
    index = built(values, pa.float64(), 3)

    def by_lance(condition: str) -> list[int]:
        return dataset.to_table(columns=["row"], filter=condition)["row"].to_pylist()

    assert index.rows_equal(1.0).tolist() == by_lance("x = 1.0")
    assert index.rows_equal(float("inf")).tolist() == by_lance("x = cast('inf' as double)")
    assert index.rows_between(-2.5, 1.0).tolist() == by_lance("x >= -2.5 and x < 1.0")
    assert index.rows_null().tolist() == by_lance("x is null")
    assert index.rows_between(0.5, low_inclusive=False).tolist() == by_lance("x > 0.5")
    assert index.rows_between(None, 0.5).tolist() == by_lance("x < 0.5")
    assert index.rows_between(None, 0.0).tolist() == by_lance("x < 0.0")
    assert index.rows_equal(0.0).tolist() == by_lance("x = 0.0")
    assert index.rows_equal(nan).tolist() == by_lance("x = cast('nan' as double)")
    assert index.rows_in([nan, -nan]).tolist() == [1, 6]


def test_times_are_found_and_odd_values_refused() -> None:
    days = pa.array([19000, 18000, None], pa.int32()).cast(pa.date32())
    index = built(days.to_pylist(), pa.date32(), 2)
    assert index.rows_equal(days[1].as_py()).tolist() == [1]
    with pytest.raises(InvalidInput, match="cannot be compared"):
        index.rows_equal("yesterday")
    with pytest.raises(InvalidInput, match="NaN is no bound"):
        built([1.0], pa.float32(), 1).rows_between(float("nan"))
    with pytest.raises(InvalidInput, match="not kept in memory"):
        ScalarIndex(SPEC, pa.list_(pa.int8()))
    with pytest.raises(InvalidInput, match="appended before"):
        index.append(pa.nulls(1, pa.date32()), 0)
