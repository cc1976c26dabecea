"""The state of a table in numbers: what its regions hold, and how far each layer lags.

Manifests and listings are read, never data, so it is cheap enough to ask every few seconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.memwal import tabular
from penstock.memwal.base_parts import FragmentPart, read_fragments, read_indexes
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.region_parts import each, first_unflushed_ms, generation_written_ms
from penstock.memwal.regions import load_manifests
from penstock.memwal.table_versions import list_versions
from penstock.memwal.wal import Wal

SMALL_FRAGMENT_ROWS = 100_000
"""A fragment with fewer rows is small: a tenth of what compaction aims at."""


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
    freshness_seconds: float = 0.0
    """How long ago the oldest of its rows was written, or flushed, that is not merged."""


@dataclass(frozen=True, slots=True)
class IndexState:
    name: str
    covered_rows: int
    uncovered_rows: int
    """Rows of the base table that it does not cover; searches read them one by one."""
    segments: int


@dataclass(frozen=True, slots=True)
class TableStatus:
    uri: str
    version: int
    base_rows: int
    region_specs: int
    indexes: tuple[str, ...]
    regions: tuple[RegionState, ...]
    index_lag: tuple[IndexState, ...] = ()
    fragments: int = 0
    small_fragments: int = 0
    """Those with fewer than 100,000 rows."""
    deleted_rows: int = 0
    """Rows that are still in the base table's files, but hidden."""
    versions: int = 0
    snapshot_age_seconds: float | None = None
    """None if no snapshot was ever taken."""

    @property
    def freshness_seconds(self) -> float:
        """How long rows have waited to be merged: the age of the oldest; 0 if none waits."""
        return max((region.freshness_seconds for region in self.regions), default=0.0)

    @property
    def unmerged_generations(self) -> int:
        return sum(region.unmerged_generations for region in self.regions)

    @property
    def unmerged_rows(self) -> int:
        """Rows of generations that are not merged, superseded ones included."""
        return sum(region.unmerged_rows for region in self.regions)

    @property
    def deletion_share(self) -> float:
        """The share of the base table's stored rows that is deleted."""
        stored = self.base_rows + self.deleted_rows
        return self.deleted_rows / stored if stored else 0.0

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for region in plain["regions"]:
            region["region_id"] = str(region["region_id"])
        derived = ("freshness_seconds", "unmerged_generations", "unmerged_rows", "deletion_share")
        return plain | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        stored = self.base_rows + self.deleted_rows
        taken = self.snapshot_age_seconds
        lines = [
            f"{self.uri} at version {self.version}",
            f"  {tabular.counted(self.base_rows, 'row')} in the base table, "
            f"{tabular.counted(self.fragments, 'fragment')}, {self.small_fragments:,} small, "
            f"{tabular.share(self.deleted_rows, stored)} deleted, "
            f"{tabular.counted(self.versions, 'version')}",
            f"  {tabular.counted(self.unmerged_generations, 'generation')} unmerged with "
            f"{tabular.counted(self.unmerged_rows, 'row')}; the oldest row that is not merged "
            f"has waited {tabular.age(self.freshness_seconds)}",
            f"  {tabular.counted(len(self.regions), 'region')}, "
            f"{tabular.counted(self.region_specs, 'region spec')}, "
            + ("no snapshot" if taken is None else f"snapshot taken {tabular.age(taken)} ago"),
        ]
        if self.index_lag:
            headers = ["index", "covered", "uncovered", "share", "segments"]
            rows = [
                [
                    index.name,
                    index.covered_rows,
                    index.uncovered_rows,
                    tabular.share(index.uncovered_rows, index.covered_rows + index.uncovered_rows),
                    index.segments,
                ]
                for index in self.index_lag
            ]
            lines += ["", tabular.grid(headers, rows)]
        if self.regions:
            headers = ["region", "spec", "epoch", "gen", "unmerged", "rows"]
            headers += ["WAL", "lag", "waited", "status"]
            lines += ["", tabular.grid(headers, [_region_row(region) for region in self.regions])]
        return "\n".join([tabular.cut(lines[0], 1000), *lines[1:]])


def _region_row(region: RegionState) -> list[object]:
    return [
        str(region.region_id),
        region.region_spec_id,
        region.writer_epoch,
        region.current_generation,
        region.unmerged_generations,
        region.unmerged_rows,
        region.wal_position,
        region.wal_lag_entries,
        tabular.age(region.freshness_seconds) if region.freshness_seconds else "-",
        region.status,
    ]


def table_status(table: BaseTable) -> TableStatus:
    base = table.snapshot()
    manifests = load_manifests(table.store, table.seams)
    fragments = read_fragments(base, table.store)
    regions = each(lambda manifest: region_state(table, base, manifest), manifests)
    details = base.details
    return TableStatus(
        uri=table.uri,
        version=base.version,
        base_rows=sum(fragment.rows for fragment in fragments),
        region_specs=len(details.region_specs),
        indexes=(
            *(spec.name for spec in table.index_specs(base)),
            *(packed.name for packed in packed_specs(details)),
        ),
        regions=tuple(sorted(regions, key=lambda r: (r.region_spec_id, str(r.region_id)))),
        index_lag=tuple(
            IndexState(part.name, part.covered_rows, part.uncovered_rows, len(part.segments))
            for part in read_indexes(base, fragments)
        ),
        fragments=len(fragments),
        small_fragments=len(small(fragments)),
        deleted_rows=sum(fragment.deleted_rows for fragment in fragments),
        versions=len(list_versions(table.store)),
        snapshot_age_seconds=(
            None
            if details.inline_snapshots is None
            else seconds_since(table, details.snapshot_ts_millis)
        ),
    )


def region_state(table: BaseTable, base: BaseSnapshot, manifest: RegionManifest) -> RegionState:
    covered = manifest.replay_after_wal_entry_position
    known = max(covered, manifest.wal_entry_position_last_seen)
    tip = Wal(table.store, manifest.region_id, table.seams).tip(known)
    merged = base.details.merged(manifest.region_id)
    unmerged = [g for g in manifest.flushed_generations if g.generation > merged]
    oldest_ms = None
    if unmerged:
        oldest_ms = generation_written_ms(table.store, manifest, unmerged[0].path)
    elif tip > covered:
        oldest_ms = first_unflushed_ms(table, manifest.region_id, covered, tip)
    return RegionState(
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
        freshness_seconds=0.0 if oldest_ms is None else seconds_since(table, oldest_ms),
    )


def seconds_since(table: BaseTable, moment_ms: int) -> float:
    """How long ago that was by our clock; a store's clock may be ahead of it."""
    return max(0, table.seams.clock.now_ms() - moment_ms) / 1000


def small(fragments: Sequence[FragmentPart]) -> list[FragmentPart]:
    return [fragment for fragment in fragments if fragment.rows < SMALL_FRAGMENT_ROWS]
