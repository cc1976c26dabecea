"""A sample of a column, read in shares by several processes, to train models on.

    plan_sample   which rows, evenly spread over the base table and the generations before it
    read_share    the values of one share of them, by any process

The rows are about those that a reader sees: of a key that was written again and again older values
may be among them, and rows that are only in the log are not. A model does not mind.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.memwal.base_table import BaseTable
from penstock.memwal.manifest import FlushedGeneration
from penstock.memwal.regions import load_manifests
from penstock.memwal.sources import GenerationSource

SHARE_ROWS = 8_192
"""Rows of the base table that one share reads."""


@dataclass(frozen=True, slots=True)
class SampleShare:
    """Some rows of the base table, or of a generation: every one from the first on by steps."""

    column: str
    version: int
    first: int
    step: float
    rows: int
    generation: tuple[uuid.UUID, FlushedGeneration] | None = None

    def places(self) -> npt.NDArray[np.int64]:
        return (self.first + self.step * np.arange(self.rows)).astype(np.int64)


def plan_sample(table: BaseTable, column: str, most_rows: int) -> list[SampleShare]:
    """At most so many rows of those that there are."""
    base = table.snapshot()
    unmerged = [
        (manifest.region_id, found)
        for manifest in load_manifests(table.store, table.seams)
        for found in manifest.flushed_generations
        if found.generation > base.details.merged(manifest.region_id) and found.physical_rows
    ]
    total = base.rows + sum(found.physical_rows or 0 for _, found in unmerged)
    step = max(1.0, total / most_rows)
    shares = []
    wanted = int(base.rows / step)
    for done in range(0, wanted, SHARE_ROWS):
        rows = min(SHARE_ROWS, wanted - done)
        shares.append(SampleShare(column, base.version, int(done * step), step, rows))
    for region_id, found in unmerged:
        rows = int((found.physical_rows or 0) / step)
        if rows:
            shares.append(SampleShare(column, base.version, 0, step, rows, (region_id, found)))
    return shares


def read_share(table: BaseTable, share: SampleShare) -> pa.Table:
    """The values of a share, as a table of one column."""
    places = share.places()
    base = table.snapshot(share.version)
    if share.generation is None:
        return base.dataset.take(places.tolist(), columns=[share.column])
    source = GenerationSource(table.store, table.storage_options, *share.generation)
    field = base.shape.schema.field(share.column)
    chosen = [pa.table([pa.array([], field.type)], schema=pa.schema([field]))]
    for batch, numbers, dead in source.scan(base.shape, [share.column], None):
        assert numbers is not None
        wanted = np.isin(numbers, places)
        if dead is not None:
            wanted &= ~dead
        rows = batch.take(pa.array(np.flatnonzero(wanted)))
        chosen.append(pa.table([rows.column(0)], schema=pa.schema([field])))
    return pa.concat_tables(chosen)
