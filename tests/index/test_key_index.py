"""Keys in memory: rows by key, and keys by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.index.key_index import NOT_FOUND, KeyIndex

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.string(), st.text(max_size=4)),
    (pa.binary(), st.binary(max_size=4)),
]


@given(st.data())
def test_a_key_finds_its_row_and_a_row_its_key(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(KINDS))
    keys = data.draw(st.lists(values, unique=True, max_size=40))
    others = [key for key in data.draw(st.lists(values, max_size=10)) if key not in keys]
    row_ids = np.array(data.draw(st.permutations(range(len(keys)))), dtype=np.uint64) * 7
    index = KeyIndex(pa.array(keys, kind), row_ids)
    assert index.find(pa.array(keys, kind)).tolist() == row_ids.tolist()
    assert all(found == NOT_FOUND for found in index.find(pa.array(others, kind)))
    some = data.draw(st.lists(st.sampled_from(range(len(keys))), max_size=10)) if keys else []
    found = index.keys_of(row_ids[some])
    assert (found.type, found.to_pylist()) == (kind, [keys[at] for at in some])


def test_a_row_that_is_not_there_is_refused() -> None:
    index = KeyIndex(pa.array([5, 3]), np.array([10, 20], dtype=np.uint64))
    assert index.keys_of(np.array([20, 10], dtype=np.uint64)).to_pylist() == [3, 5]
    for wrong in (0, 15, 99):
        with pytest.raises(InvalidInput, match="row ids"):
            index.keys_of(np.array([10, wrong], dtype=np.uint64))
