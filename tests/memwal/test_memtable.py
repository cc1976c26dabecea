"""The MemTable against a dict: last write wins, in every prefix, before and after batches join."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.index.primary_key import key_array, mark_primary_key, python_keys
from penstock.memwal import memtable as module
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.memtable import MemTable, live_rows, prepare_rows
from penstock.memwal.shape import TableShape

SCHEMA = pa.schema([("tenant", pa.string()), ("id", pa.int64()), ("value", pa.int64())])
NO_INDEXES = LiveIndexes([], pa.schema([]))


def make(key: list[str]) -> MemTable:
    schema = mark_primary_key(SCHEMA, key)
    shape = TableShape.of(schema, {name: n for n, name in enumerate(schema.names)})
    return MemTable(3, shape, NO_INDEXES, 0.0)


def append(table: MemTable, rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=table.shape.wal_schema)
    table.append(prepare_rows(table.shape, NO_INDEXES, batch, batch.nbytes, indexed=True))


row = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["", "a", "a\0", "b"]),
        "id": st.integers(0, 3),
        "value": st.integers(0, 99),
        "_tombstone": st.booleans(),
    }
)
batches = st.lists(st.lists(row, min_size=1, max_size=4), max_size=40)


@settings(max_examples=60, deadline=None)
@given(batches, st.sampled_from([["id"], ["tenant", "id"]]), st.integers(1, 6), st.data())
def test_every_prefix_is_the_dict_it_was(
    written: list[list[dict[str, Any]]], key: list[str], join_at: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_COMBINE_BATCHES", join_at)
        table = make(key)
        for rows in written:
            append(table, rows)
    flat = [one for rows in written for one in rows]
    assert table.rows == len(flat)
    assert table.table().to_pylist() == flat
    seen = data.draw(st.integers(0, len(flat)))
    assert table.table(seen).to_pylist() == flat[:seen]
    for rows in (None, seen):
        model = {tuple(one[name] for name in key): one for one in flat[:rows]}
        asked = pa.RecordBatch.from_pylist(flat, schema=table.shape.wal_schema)
        for one, found_key in zip(flat, python_keys(key_array(asked, key)), strict=True):
            found = table.find(found_key, rows)
            expected = model.get(tuple(one[name] for name in key))
            assert (None if found is None else found.to_pylist()) == (
                None if expected is None else [expected]
            )
    assert table.distinct_keys == len({tuple(one[name] for name in key) for one in flat})
    assert live_rows(table.table()).to_pylist() == [
        {name: one[name] for name in SCHEMA.names} for one in flat if not one["_tombstone"]
    ]


def test_a_table_without_a_key_keeps_every_row() -> None:
    table = make([])
    for _ in range(3):
        append(table, [{"tenant": "a", "id": 1, "value": 1, "_tombstone": False}] * 2)
    assert table.rows == 6
    assert table.distinct_keys == 0


def test_readers_see_whole_batches_while_rows_are_appended() -> None:
    table = make(["id"])
    stop = threading.Event()
    torn: list[tuple[int, list[int]]] = []

    def read() -> None:
        while not stop.is_set():
            rows = table.rows
            values = table.table(rows).column("value").to_pylist()
            pair = [table.find(key, rows) for key in (0, 1)]
            found = [-1 if one is None else one.column("value")[0].as_py() for one in pair]
            last = -1 if not rows else rows // 2 - 1
            if len(values) != rows or found != [last, last]:
                torn.append((rows, found))

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    for n in range(1500):
        append(
            table,
            [{"tenant": "", "id": key, "value": n, "_tombstone": False} for key in (0, 1)],
        )
    stop.set()
    for reader in readers:
        reader.join(30)
    assert torn == []
