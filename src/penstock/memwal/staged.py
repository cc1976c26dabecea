"""Generations that are written before anybody owns their region.

Many rows for a region need not go through its writer: whoever has them writes them as generations,
on any machine, as a flush would. They count when the region's writer enters them into its manifest
(`RegionWriter.enter`), as newer than all rows it has taken before. What is never entered is a
directory that no manifest names, for clean-up to find.

    rows --> by region --> stage: directories nobody names --> enter_once: one manifest per region
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity
from penstock.memwal.flush import FlushTarget, flush_memtable
from penstock.memwal.gc_limits import JOB_SECONDS, store_now_ms
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.manifest import FlushedGeneration
from penstock.memwal.memtable import MemTable, prepare_rows
from penstock.memwal.regions import RegionRouter, load_manifests
from penstock.memwal.shape import TableShape

_UNNUMBERED = 2**63 - 1
"""Higher than any that is listed, so that clean-up goes by age alone."""


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Generations for one region, oldest first; a small value that can be pickled."""

    identity: RegionIdentity
    generations: tuple[FlushedGeneration, ...]


class Stage:
    """Where a task brings rows to the regions of a table that it does not own."""

    def __init__(self, table: BaseTable) -> None:
        base = table.snapshot()
        spec = base.details.current_spec
        if spec is None:
            raise InvalidInput(
                f"{table.uri} has no region spec; write to a region by id: writer(region=…)"
            )
        self.shape: TableShape = base.shape
        self._target: FlushTarget = table.flush_target(base)
        self._router = RegionRouter(table, spec, load_manifests(table.store, table.seams))

    def route(self, rows: pa.RecordBatch) -> list[tuple[RegionIdentity, pa.RecordBatch]]:
        """Rows in WAL shape, by the region that they belong to."""
        return self._router.route(rows, self.shape)

    def write(self, identity: RegionIdentity, rows: Sequence[pa.RecordBatch]) -> FlushedGeneration:
        """Write rows of a region, in WAL shape and in order, as a generation without a number."""
        memtable = MemTable(_UNNUMBERED, self.shape, LiveIndexes((), self.shape.schema), 0.0)
        for batch in rows:
            prepared = prepare_rows(
                self.shape, memtable.indexes, batch, batch.nbytes, indexed=False
            )
            memtable.append(prepared)
        return flush_memtable(self._target, identity.region_id, memtable)


def in_order(parts: Sequence[StagedRows]) -> list[StagedRows]:
    """The generations of each region together, in the order given."""
    found: dict[uuid.UUID, StagedRows] = {}
    for part in parts:
        known = found.get(part.identity.region_id)
        earlier = known.generations if known is not None else ()
        found[part.identity.region_id] = replace(part, generations=(*earlier, *part.generations))
    return list(found.values())


def check_staged(table: BaseTable, parts: Sequence[StagedRows]) -> None:
    """Refuse generations that clean-up may take for left over before they are entered."""
    now_ms = store_now_ms(table.store, table.seams)
    for part in parts:
        for generation in part.generations:
            key = f"{names.region_dir(part.identity.region_id)}/{generation.path}"
            written = [meta.modified_ms for meta in table.store.list(key)]
            if not written or now_ms - min(written) > JOB_SECONDS * 1000:
                raise InvalidInput(
                    f"{table.uri}: rows that were written to {key} are gone, or older than the "
                    f"{JOB_SECONDS:.0f} s within which a job has to end. Nothing of them counts; "
                    "write them again"
                )
