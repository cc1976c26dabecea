"""Tables with many small fragments, and what tests of compaction ask of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake
from tests.memwal.versioned_rows import (
    SCHEMA,
    Rows,
    at,
    rows,
)

import penstock
from penstock.memwal.table_versions import read_details
from penstock.storage.open import open_store
from penstock.table import Table

MODES = {
    "stable row ids": (True, False),
    "addresses": (False, False),
    "addresses, remap deferred": (False, True),
}
each_mode = pytest.mark.parametrize(("stable", "defer"), MODES.values(), ids=MODES)
either_kind = pytest.mark.parametrize("stable", [True, False], ids=["stable", "addresses"])


def make(path: Path, stable: bool, schema: pa.Schema = SCHEMA) -> Lake:
    penstock.connect(path).create_table("t", schema, primary_key="id", stable_row_ids=stable)
    return Lake(open_store(path).child("t.lance"))


def base(table: Table) -> lance.LanceDataset:
    return lance.dataset(table.uri)


def merged(table: Table, keys: Sequence[int], version: int) -> None:
    """One more fragment in the base."""
    table.upsert(rows(keys, version))
    table.flush()
    table.merge()


def create_indexes(table: Table) -> None:
    table.create_index("vector", "ivf_flat", num_partitions=2)
    table.create_index("value", "fts")
    table.create_index("id", "btree")


def layered(table: Table) -> Rows:
    """Two indexed and three unindexed fragments with deletions, a generation, a log."""
    merged(table, range(40), 0)
    merged(table, range(40, 80), 0)
    create_indexes(table)
    merged(table, range(70, 100), 1)
    merged(table, range(95, 120), 2)
    merged(table, range(30, 45), 3)
    table.upsert(rows([1, 71, 130], 4))
    table.delete(keys=[2, 72])
    table.flush()
    table.upsert(rows([3, 96, 131], 5))
    table.delete(keys=[97])
    expected = at(range(70), 0) | at(range(70, 95), 1) | at(range(95, 120), 2)
    expected |= at(range(30, 45), 3) | at([1, 71, 130], 4) | at([3, 96, 131], 5)
    return {key: value for key, value in expected.items() if key not in (2, 72, 97)}


def coverage(table: Table) -> dict[str, int]:
    """Of each index how many rows of the base it covers."""
    found = {}
    dataset = base(table)
    rows_of = {part.fragment_id: part.count_rows() for part in dataset.get_fragments()}
    for index in dataset.describe_indices():
        if not index.name.startswith("__"):
            numbers = {number for segment in index.segments for number in segment.fragment_ids}
            found[index.name] = sum(rows_of.get(number, 0) for number in numbers)
    return found


def progress(table: Table) -> Any:
    found = read_details(table._base.store, base(table).version)
    assert found is not None
    details = found[0]
    return details.merged_generations, details.index_catchup, details.inline_snapshots


def fragments(table: Table) -> list[tuple[int, int]]:
    return [(part.physical_rows, part.count_rows()) for part in base(table).get_fragments()]
