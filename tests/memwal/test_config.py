"""Writer options: checked at the door, stored under Lance's names, read back the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.memwal.config import WriterConfig

_MIB = 1 << 20


@given(
    st.builds(
        WriterConfig,
        durable=st.booleans(),
        indexed=st.booleans(),
        max_memtable_rows=st.integers(1, 10**9),
        max_memtable_bytes=st.integers(1, 256 * _MIB),
        max_batch_bytes=st.integers(1, 64 * _MIB),
        max_unflushed_bytes=st.integers(320 * _MIB, 10**12),
        wal_flush_interval_ms=st.integers(1, 10**6),
        flush_on_close=st.booleans(),
    )
)
def test_defaults_of_a_table_come_back_as_they_were(config: WriterConfig) -> None:
    stored = config.to_defaults()
    assert WriterConfig().with_defaults(stored) == config
    assert all(isinstance(value, str) for value in stored.values())


def test_lance_names_are_used_where_lance_has_one() -> None:
    stored = WriterConfig(durable=False, max_memtable_rows=5, fence_window_ms=7).to_defaults()
    assert stored == {
        "durable_write": "false",
        "max_memtable_rows": "5",
        "penstock.fence_window_ms": "7",
    }


def test_what_others_stored_and_we_cannot_use_is_left_alone() -> None:
    stored = {"max_memtable_rows": "many", "max_memtable_size": "0", "lance_only": "x"}
    assert WriterConfig().with_defaults(stored) == WriterConfig()
    # Lance has no limit on a batch, and may store a smaller allowance than ours has to be.
    roomy = WriterConfig().with_defaults(
        {"max_memtable_size": str(2048 * _MIB), "max_unflushed_memtable_bytes": "1"}
    )
    assert roomy.max_unflushed_bytes == roomy.max_memtable_bytes + roomy.max_batch_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"durable": 1},
        {"max_memtable_rows": 0},
        {"max_memtable_rows": True},
        {"max_batch_bytes": 1.5},
        {"max_unflushed_bytes": 1024},
        {"max_rows": 5},
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        WriterConfig().with_options(options)
