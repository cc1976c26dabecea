"""A table on local disk and any number of processes that use it, each with its own clock.

A `Process` here is what a process has of its own: a store that fails on command, a clock that
moves on command, and a handle of the table. Several of them share nothing but the bytes on disk,
so two writers can be interleaved step by step from one thread, through the hooks of their stores.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from penstock.database import Database
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.region_spec import RegionBy
from penstock.memwal.regions import load_manifests
from penstock.memwal.wal import Wal, WalEntry
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import FaultStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
WAL = "*/wal/*"
MANIFEST = "*/manifest/*.binpb"
WAIT_SECONDS = 30.0
"""Longer than anything here takes; reached only when something hangs."""


def row(identity: int, value: str | None = None) -> dict[str, Any]:
    return {"id": identity, "value": f"row {identity}" if value is None else value}


@dataclass(frozen=True, slots=True)
class Process:
    store: FaultStore
    clock: SimulatedClock
    table: Table

    def ids(self) -> list[int]:
        return ids_of(self.table)


@dataclass(frozen=True, slots=True)
class Lake:
    store: ObjectStore
    """The table's own store, without faults."""

    def process(self) -> Process:
        clock = SimulatedClock()
        entropy = SystemEntropy()
        store = FaultStore(self.store, clock, entropy)
        base = BaseTable(store, None, Seams(clock=clock, entropy=entropy))
        return Process(store, clock, Table("t", base))

    def reader(self) -> Table:
        """A handle that has no writer and so reads what is stored."""
        return self.process().table

    # --- what is really on the disk ----------------------------------------------------------

    def manifests(self) -> list[RegionManifest]:
        return load_manifests(self.store, Seams())

    def manifest(self) -> RegionManifest:
        (only,) = self.manifests()
        return only

    def wal(self) -> Wal:
        return Wal(self.store, self.manifest().region_id, Seams())

    def entry(self, position: int) -> WalEntry | None:
        return self.wal().read(position)

    def clean_up_wal(self, positions: Sequence[int]) -> None:
        """What garbage collection does to entries that are in generations."""
        for position in positions:
            self.store.delete(names.wal_key(self.manifest().region_id, position))

    def generation(self, number: int) -> lance.LanceDataset:
        manifest = self.manifest()
        found = manifest.generation(number)
        assert found is not None, f"the manifest lists no generation {number}"
        return lance.dataset(
            f"{self.store.uri}/{names.region_dir(manifest.region_id)}/{found.path}"
        )

    def generations(self) -> list[int]:
        return [flushed.generation for flushed in self.manifest().flushed_generations]


def make_lake(
    path: Path,
    *,
    schema: pa.Schema = SCHEMA,
    primary_key: str | Sequence[str] | None = "id",
    regions: RegionBy | None = None,
    writer_defaults: Mapping[str, Any] | None = None,
) -> Lake:
    store = open_store(path / uuid.uuid4().hex)
    Database(store, None, Seams()).create_table(
        "t",
        schema,
        primary_key=primary_key,
        regions=regions,
        writer_defaults=writer_defaults,
    )
    return Lake(store.child("t.lance"))


def ids_of(table: Table) -> list[int]:
    """The ids of all rows, sorted, as often as they occur."""
    ids: list[int] = sorted(table.to_arrow().column("id").to_pylist())
    assert len(ids) == table.count()
    return ids
