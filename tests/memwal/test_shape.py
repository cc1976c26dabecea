"""Rows as the WAL holds them, and entries of any age in today's shape."""

from __future__ import annotations

import pyarrow as pa

from penstock.index.primary_key import mark_primary_key
from penstock.memwal.shape import TableShape

PLAIN = pa.schema(
    [pa.field("id", pa.int64()), pa.field("name", pa.string(), nullable=False), ("n", pa.int32())]
)
SCHEMA = mark_primary_key(PLAIN, ["id"])


def shape(schema: pa.Schema = SCHEMA, **ids: int) -> TableShape:
    return TableShape.of(schema, ids or {name: n for n, name in enumerate(schema.names)})


def test_wal_rows_are_table_rows_with_a_tombstone_last() -> None:
    rows = pa.RecordBatch.from_pylist(
        [{"id": n, "name": f"n{n}", "n": n} for n in range(9000)], schema=SCHEMA
    )
    stored = shape().wal_rows(rows)
    assert stored.schema.names == ["id", "name", "n", "_tombstone"]
    assert not any(stored.column("_tombstone").to_pylist())
    assert stored.drop_columns(["_tombstone"]).to_pylist() == rows.to_pylist()
    # A delete keeps its key alone, also where the table allows no null.
    dead = shape().tombstones({"id": pa.array([4, 5])})
    assert dead.to_pylist() == [
        {"id": 4, "name": None, "n": None, "_tombstone": True},
        {"id": 5, "name": None, "n": None, "_tombstone": True},
    ]
    assert dead.schema == stored.schema
    assert [field.nullable for field in dead.schema] == [False, True, True, False]


def test_columns_are_matched_by_id_through_renames_additions_and_drops() -> None:
    old = shape(id=0, name=1, n=2)
    stored = old.wal_rows(
        pa.RecordBatch.from_pylist([{"id": 1, "name": "a", "n": 7}], schema=SCHEMA)
    )
    assert old.align(stored) is stored
    renamed = mark_primary_key(
        pa.schema([("key", pa.int64()), ("more", pa.string()), ("n", pa.int64())]), ["key"]
    )
    today = shape(renamed, key=0, more=5, n=2)
    (row,) = today.align(stored).to_pylist()
    assert row == {"key": 1, "more": None, "n": 7, "_tombstone": False}


def test_a_column_dropped_and_added_again_does_not_bring_its_old_values_back() -> None:
    stored = shape(id=0, name=1, n=2).wal_rows(
        pa.RecordBatch.from_pylist([{"id": 1, "name": "a", "n": 7}], schema=SCHEMA)
    )
    today = shape(id=0, name=1, n=3)
    assert today.align(stored).to_pylist() == [
        {"id": 1, "name": "a", "n": None, "_tombstone": False}
    ]


def test_entries_without_ids_and_without_tombstones_are_matched_by_name() -> None:
    foreign = pa.RecordBatch.from_pylist(
        [{"n": 7, "id": 1, "name": "a"}],
        schema=pa.schema([("n", pa.int32()), ("id", pa.int64()), ("name", pa.string())]),
    )
    aligned = shape().align(foreign)
    assert aligned.to_pylist() == [{"id": 1, "name": "a", "n": 7, "_tombstone": False}]
    assert aligned.schema == shape().wal_schema
