"""Bytes from a remote store begin anywhere in memory, and Lance panics at unaligned values."""

from __future__ import annotations

from pathlib import Path

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import SCHEMA

from penstock.memwal.wal import decode_entry, encode_entry, schema_message


@pytest.mark.parametrize("shift", range(8))
def test_lance_takes_a_replayed_entry_wherever_its_bytes_lie(tmp_path: Path, shift: int) -> None:
    rows = pa.record_batch([pa.array([1, 2, 3]), pa.array(["a", "bc", None])], schema=SCHEMA)
    parts = encode_entry(schema_message(SCHEMA, 1, 1), [rows.serialize()], bytes(16))
    stored = b"".join(bytes(part) for part in parts)
    memory = pa.allocate_buffer(shift + len(stored))
    pa.FixedSizeBufferWriter(memory).write(bytes(shift) + stored)
    (replayed,) = decode_entry(memoryview(memory)[shift:], 1, "wal/1").batches
    written = lance.write_dataset(pa.Table.from_batches([replayed]), tmp_path / "generation")
    assert written.to_table().to_batches() == [rows]
