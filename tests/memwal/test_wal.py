"""The WAL: its bytes, its end, and who may write where."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Corruption, Fenced, StorageError
from penstock.memwal import names
from penstock.memwal.wal import (
    Wal,
    WalEntry,
    decode_entry,
    encode_entry,
    encode_fence,
    schema_message,
)
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

REGION = uuid.UUID("0f2b35d4-79cd-4f57-8d8d-2f3a4f0f6d10")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("_tombstone", pa.bool_(), nullable=False),
    ]
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(2**63), 2**63 - 1),
            "tags": st.none() | st.lists(st.none() | st.text(max_size=5), max_size=3),
            "_tombstone": st.booleans(),
        }
    ),
    max_size=6,
)


def batch(values: list[dict[str, object]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(values, schema=SCHEMA)


def entry_bytes(
    batches: list[pa.RecordBatch], write_id: bytes = b"w" * 16, epoch: int = 7, generation: int = 3
) -> bytes:
    head = schema_message(SCHEMA, epoch, generation)
    parts = encode_entry(head, [one.serialize() for one in batches], write_id)
    return b"".join(bytes(memoryview(part)) for part in parts)


ONE = entry_bytes([batch([{"id": 1, "tags": ["a", None], "_tombstone": False}])])
FENCE = b"".join(bytes(memoryview(part)) for part in encode_fence(9, b"f" * 16))


# --- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_wide_values_are_where_lance_can_take_them(ahead: int) -> None:
    """Lance panics at decimals that do not begin at a multiple of 16 bytes."""
    decimal = pa.array([1, 2], pa.decimal128(9, 2))
    nested = pa.array([[1], [2, 3]], pa.list_(pa.decimal256(50, 2)))
    flags = pa.array([False, False])
    wide = pa.record_batch({"a": decimal, "b": nested, "_tombstone": flags})
    head = schema_message(wide.schema, 7, 3)
    parts = encode_entry(head, [wide.serialize()], b"w" * 16)
    data = b" " * ahead + b"".join(bytes(memoryview(part)) for part in parts)
    (read,) = decode_entry(memoryview(data)[ahead:], 1, "wide").batches
    assert read.to_pylist() == wide.to_pylist()
    for values in (read.column("a"), read.column("b").values):
        assert values.buffers()[1].address % 16 == 0


@given(
    st.lists(rows.map(batch), max_size=4),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 2**64 - 1),
    st.integers(1, 2**64 - 1),
)
def test_an_entry_comes_back_whole_and_is_a_plain_arrow_stream(
    batches: list[pa.RecordBatch], write_id: bytes, epoch: int, generation: int
) -> None:
    data = entry_bytes(batches, write_id, epoch, generation)
    entry = decode_entry(data, 5, "k")
    assert (entry.position, entry.writer_epoch, entry.generation) == (5, epoch, generation)
    assert (entry.write_id, entry.is_fence, entry.size_bytes) == (write_id, False, len(data))
    assert list(entry.batches) == batches
    with pa.ipc.open_stream(data) as stream:
        assert list(stream) == batches


def test_a_fence_has_no_rows() -> None:
    entry = decode_entry(FENCE, 1, "k")
    assert (entry.is_fence, entry.writer_epoch, entry.batches) == (True, 9, ())


@pytest.mark.parametrize("data", [ONE, FENCE], ids=["rows", "fence"])
def test_no_flipped_bit_goes_unnoticed(data: bytes) -> None:
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corruption, match="k"):
            decode_entry(bytes(damaged), 1, "k")


@pytest.mark.parametrize("data", [ONE, FENCE], ids=["rows", "fence"])
def test_an_entry_cut_short_anywhere_is_refused(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(Corruption, match="k"):
            decode_entry(data[:length], 1, "k")


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_what_is_no_entry_is_refused(data: bytes) -> None:
    with pytest.raises(Corruption):
        decode_entry(data, 1, "k")


# --- the log ---------------------------------------------------------------------------------


def append(wal: Wal, position: int, epoch: int = 1, write_id: bytes | None = None) -> bytes:
    write_id = write_id or uuid.uuid4().bytes
    head = schema_message(SCHEMA, epoch, 1)
    one = batch([{"id": position, "tags": None, "_tombstone": False}])
    wal.append(position, encode_entry(head, [one.serialize()], write_id), write_id, epoch)
    return write_id


def ids(entries: Iterable[WalEntry]) -> list[int]:
    return [row["id"] for e in entries for b in e.batches for row in b.to_pylist()]


def test_the_tip_is_found_for_every_length_from_every_known_position() -> None:
    store = open_store("memory://")
    wal = Wal(store, REGION, Seams())
    for length in range(71):
        if length:
            append(wal, length)
        for known in {0, length // 3, max(length - 1, 0), length}:
            assert wal.tip(known) == length
    # Clean-up takes the beginning away; what is known to be covered still leads to the end.
    for position in range(1, 51):
        store.delete(names.wal_key(REGION, position))
    for known in range(50, 71):
        assert wal.tip(known) == 70
    assert ids(wal.tail(50)) == list(range(51, 71))
    assert ids(wal.tail(70)) == []
    assert ids(wal.tail(60, 63)) == [61, 62, 63]
    assert ids(wal.replay(50, 70)) == list(range(51, 71))


def test_replay_misses_no_entry_in_silence() -> None:
    store = open_store("memory://")
    wal = Wal(store, REGION, Seams())
    for position in range(1, 41):
        append(wal, position)
    store.delete(names.wal_key(REGION, 23))
    with pytest.raises(Corruption, match="entry 23 is missing although entry 40 exists"):
        list(wal.replay(0, 40))
    with pytest.raises(Corruption, match="entry 41 is missing"):
        list(wal.replay(23, 41))


def test_a_position_belongs_to_who_wrote_it_first(any_store: ObjectStore) -> None:
    wal = Wal(any_store, REGION, Seams())
    write_id = append(wal, 1)
    append(wal, 1, write_id=write_id)  # the same write again: its acknowledgement was lost
    assert wal.fence(0, 2) == 2, "entries of a former owner stay, and the fence moves on"
    with pytest.raises(Fenced, match="epoch 2"):
        append(wal, 2)
    found = wal.read(2)
    assert found is not None
    assert (found.is_fence, found.writer_epoch) == (True, 2)
    with pytest.raises(Fenced, match="epoch 2"):
        wal.fence(1, 1)
    assert wal.fence(0, 3) == 3
    assert [entry.writer_epoch for entry in wal.tail(0)] == [1, 2, 3]
    assert wal.read(9) is None


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.HTTP_409])
def test_an_append_is_retried_at_its_own_position(tmp_path: Path, fault: Fault) -> None:
    clock = SimulatedClock()
    store = FaultStore(LocalStore(tmp_path), clock, SystemEntropy())
    wal = Wal(store, REGION, Seams(clock=clock))
    store.inject(fault, op="put_if_absent", nth=1, times=3)
    append(wal, 1)
    assert ids(wal.tail(0)) == [1]
    # The echo of our own write, and then a store that cannot say whose entry is there.
    store.inject(Fault.FAIL_AFTER, op="put_if_absent", nth=1)
    store.inject(Fault.FAIL_BEFORE, op="get", nth=1, times=2)
    append(wal, 2)
    assert ids(wal.tail(0)) == [1, 2]
    store.inject(fault, op="put_if_absent")
    if fault is Fault.FAIL_AFTER:
        append(wal, 3)  # every answer is lost, and the entry recognised as our own
    else:
        with pytest.raises(StorageError, match="8 attempts"):
            append(wal, 3)
    store.clear()
    assert ids(wal.tail(0)) == ([1, 2, 3] if fault is Fault.FAIL_AFTER else [1, 2])
