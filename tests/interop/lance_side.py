"""Lance's own MemWAL engine, pointed at a table of ours: what these tests compare with.

A model is a dict from key tuple to row; whatever Lance or Penstock returns is brought into the
same form, where a key that comes back twice is an error and not a silent overwrite.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

from penstock.memwal.manifest import RegionManifest
from penstock.memwal.regions import load_manifests
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

Rows = dict[tuple[Any, ...], dict[str, Any]]


def dataset_of(table: Table) -> lance.LanceDataset:
    return lance.dataset(table.uri, storage_options=table._base.storage_options)


def manifests(table: Table) -> list[RegionManifest]:
    return load_manifests(open_store(table.uri, table._base.storage_options), Seams())


def only_region(table: Table) -> RegionManifest:
    (manifest,) = manifests(table)
    return manifest


def by_key(rows: Iterable[dict[str, Any]], key: Sequence[str]) -> Rows:
    found: Rows = {}
    for row in rows:
        name = tuple(row[column] for column in key)
        assert name not in found, f"key {name} came back twice: {found[name]} and {row}"
        found[name] = row
    return found


def our_rows(table: Table) -> Rows:
    return by_key(table.to_arrow().to_pylist(), table.primary_key)


def snapshots(table: Table) -> list[ShardSnapshot]:
    """What the region manifests say, in the form Lance's readers take."""
    found = []
    for manifest in manifests(table):
        snapshot = ShardSnapshot(str(manifest.region_id))
        snapshot = snapshot.with_spec_id(manifest.region_spec_id)
        snapshot = snapshot.with_current_generation(manifest.current_generation)
        for flushed in manifest.flushed_generations:
            snapshot = snapshot.with_sstable(flushed.generation, flushed.path)
        found.append(snapshot)
    return found


def scanner(table: Table) -> LsmScanner:
    return LsmScanner.from_snapshots(dataset_of(table), snapshots(table))


def lance_rows(table: Table) -> Rows:
    """Every row that Lance sees in the base table and in flushed generations."""
    return by_key(scanner(table).to_table().to_pylist(), table.primary_key)


class LanceLookup:
    """Point lookups by Lance's planner."""

    def __init__(self, table: Table) -> None:
        self._schema = table.schema
        self._key = table.primary_key
        self._planner = LsmPointLookupPlanner(dataset_of(table), snapshots(table))

    def __call__(self, key: tuple[Any, ...]) -> dict[str, Any] | None:
        arrays = [
            pa.array([value], self._schema.field(name).type)
            for name, value in zip(self._key, key, strict=True)
        ]
        wanted = arrays[0]
        if len(arrays) > 1:
            wanted = pa.StructArray.from_arrays(arrays, names=list(self._key))
        rows = self._planner.plan_lookup(wanted).to_table().to_pylist()
        assert len(rows) <= 1, f"key {key} was found {len(rows)} times: {rows}"
        return rows[0] if rows else None


def shard_writer(table: Table, region_id: uuid.UUID | str) -> lance.mem_wal.ShardWriter:
    """Lance's writer; claims the region, or creates it."""
    return dataset_of(table).mem_wal_writer(str(region_id))


def written_rows(writer: lance.mem_wal.ShardWriter, table: Table) -> Rows:
    """Every row that Lance's writer sees: base, the region's generations, and its MemTable."""
    mine = [s for s in snapshots(table) if s.shard_id == writer.shard_id]
    rows = writer.lsm_scanner(mine).to_table().to_pylist()
    return by_key(rows, table.primary_key)
