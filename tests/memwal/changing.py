"""What the tests of changed rows share: a table in random layers beside a dict, and its rows.

A table is a list of layers, oldest first: rows that are upserted, keys that are deleted, and how
far that got: `base` is flushed and merged, `generation` flushed, `memory` neither. The dict has of
each key the row that a reader must see.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import strategies as st

import penstock
from penstock import Table
from penstock.memwal import base_changes, changes

Row = dict[str, Any]
Key = tuple[Any, ...]
Model = dict[Key, Row]

VALUES = [
    pa.field("n", pa.int64()),
    pa.field("price", pa.float64()),
    pa.field("name", pa.string()),
    pa.field("vector", pa.list_(pa.float32(), 2)),
]
KEYS: dict[str, list[pa.Field]] = {
    "int": [pa.field("id", pa.int64(), nullable=False)],
    "string": [pa.field("id", pa.string(), nullable=False)],
    "composite": [
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("id", pa.int32(), nullable=False),
    ],
}
STAGES = ("base", "generation", "memory")


@dataclass(frozen=True, slots=True)
class Layer:
    stage: str
    rows: tuple[tuple[int, int | None, float | None, str | None], ...]
    gone: tuple[int, ...]


numbers = st.integers(0, 15)
layers = st.lists(
    st.builds(
        Layer,
        st.sampled_from(STAGES),
        st.lists(
            st.tuples(
                numbers,
                st.none() | st.integers(-5, 20),
                st.none() | st.integers(-8, 8).map(lambda n: n / 2),
                st.none() | st.sampled_from(["a", "b", "it's", ""]),
            ),
            max_size=12,
        ).map(tuple),
        st.lists(numbers, max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


def key_of(kind: str, number: int) -> Row:
    if kind == "int":
        return {"id": number}
    return {"id": f"k{number}"} if kind == "string" else {"tenant": f"t{number % 2}", "id": number}


def key(row: Row) -> Key:
    return (row.get("tenant"), row["id"])


def full(kind: str, number: int, n: Any, price: Any, name: Any) -> Row:
    vector = [float(number), float(n or 0)]
    return {**key_of(kind, number), "n": n, "price": price, "name": name, "vector": vector}


def schema_of(kind: str) -> pa.Schema:
    return pa.schema([*KEYS[kind], *VALUES])


def layered(path: Path, kind: str, given: Sequence[Layer]) -> tuple[Table, Model]:
    names = [field.name for field in KEYS[kind]]
    table = penstock.connect(path / uuid.uuid4().hex).create_table(
        "t", schema_of(kind), primary_key=names, regions=penstock.bucket("id", 2)
    )
    model: Model = {}
    for layer in given:
        rows = {one[0]: full(kind, *one) for one in layer.rows}
        table.upsert(list(rows.values()))
        model.update({key(one): one for one in rows.values()})
        if layer.gone:
            gone = [key_of(kind, number) for number in layer.gone]
            table.delete(keys=gone)
            for one in gone:
                model.pop(key(one), None)
        if layer.stage != "memory":
            table.flush()
        if layer.stage == "base":
            table.merge()
    return table, model


def found(table: Table) -> Model:
    """What a read finds, each key once."""
    rows = table.to_arrow().to_pylist()
    by_key = {key(one): one for one in rows}
    assert len(by_key) == len(rows) == table.count()
    return by_key


def merged(table: Table) -> Model:
    """What a Lance user sees who knows nothing of regions, when all is merged."""
    table.flush()
    table.merge()
    dataset = lance.dataset(table.uri)
    dataset.validate()
    rows = dataset.to_table().to_pylist()
    by_key = {key(one): one for one in rows}
    assert len(by_key) == len(rows)
    return by_key


@contextmanager
def bounds(written_rows: int, column_share: float = base_changes.COLUMN_SHARE) -> Iterator[None]:
    """Other bounds between the ways to change rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "WRITTEN_ROWS", written_rows)
        patch.setattr(base_changes, "COLUMN_SHARE", column_share)
        yield
