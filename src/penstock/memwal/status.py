"""The state of a table in numbers: what its regions hold, and how far each layer lags."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import Any

from penstock.memwal.base_table import BaseTable
from penstock.memwal.regions import load_manifests
from penstock.memwal.wal import Wal


@dataclass(frozen=True, slots=True)
class RegionState:
    region_id: uuid.UUID
    region_spec_id: int
    status: str
    writer_epoch: int
    current_generation: int
    merged_generation: int
    unmerged_generations: int
    unmerged_rows: int
    wal_position: int
    """The last WAL entry there is."""
    wal_lag_entries: int
    """Entries that are in no generation yet, fences included."""


@dataclass(frozen=True, slots=True)
class TableStatus:
    uri: str
    version: int
    base_rows: int
    region_specs: int
    indexes: tuple[str, ...]
    regions: tuple[RegionState, ...]

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for region in plain["regions"]:
            region["region_id"] = str(region["region_id"])
        return plain

    def __str__(self) -> str:
        lines = [
            f"{self.uri} at version {self.version}: {self.base_rows:,} rows in the base table, "
            f"{len(self.regions)} regions, indexes: {', '.join(self.indexes) or 'none'}"
        ]
        if self.regions:
            lines.append(
                f"{'region':36}  {'epoch':>5}  {'generation':>10}  {'unmerged':>8}  "
                f"{'rows':>9}  {'WAL lag':>7}  status"
            )
        for region in self.regions:
            lines.append(
                f"{region.region_id}  {region.writer_epoch:>5}  {region.current_generation:>10}  "
                f"{region.unmerged_generations:>8}  {region.unmerged_rows:>9,}  "
                f"{region.wal_lag_entries:>7}  {region.status}"
            )
        return "\n".join(lines)


def table_status(table: BaseTable) -> TableStatus:
    base = table.snapshot()
    regions = []
    for manifest in load_manifests(table.store, table.seams):
        covered = manifest.replay_after_wal_entry_position
        known = max(covered, manifest.wal_entry_position_last_seen)
        tip = Wal(table.store, manifest.region_id, table.seams).tip(known)
        merged = base.details.merged(manifest.region_id)
        unmerged = [g for g in manifest.flushed_generations if g.generation > merged]
        regions.append(
            RegionState(
                region_id=manifest.region_id,
                region_spec_id=manifest.region_spec_id,
                status=manifest.status.name.lower(),
                writer_epoch=manifest.writer_epoch,
                current_generation=manifest.current_generation,
                merged_generation=merged,
                unmerged_generations=len(unmerged),
                unmerged_rows=sum(g.physical_rows or 0 for g in unmerged),
                wal_position=tip,
                wal_lag_entries=tip - covered,
            )
        )
    return TableStatus(
        uri=table.uri,
        version=base.version,
        base_rows=base.dataset.count_rows(),
        region_specs=len(base.details.region_specs),
        indexes=tuple(spec.name for spec in table.index_specs(base)),
        regions=tuple(sorted(regions, key=lambda r: (r.region_spec_id, str(r.region_id)))),
    )
