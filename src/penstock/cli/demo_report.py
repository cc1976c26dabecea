"""What the streaming demo found out, as one value; `render` shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.cli.demo import Comparison
from penstock.table import Table


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of a kind of thing, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Latency:
        if not times_ms:
            return cls(0, 0.0, 0.0, 0.0)
        p50, p99 = np.percentile(times_ms, [50, 99])
        return cls(len(times_ms), float(p50), float(p99), float(max(times_ms)))


@dataclass(frozen=True, slots=True)
class Files:
    """What the table is made of at some moment."""

    log_entries: int
    """Those in no generation yet, fences included."""
    generations: int
    """Flushed so far, those included that are merged and gone."""
    unmerged_generations: int
    fragments: int
    small_fragments: int
    deleted_rows: int
    uncovered_rows: int
    """Rows of the base table that the vector index does not cover."""
    versions: int
    files: int
    megabytes: float

    @classmethod
    def of(cls, table: Table) -> Files:
        status = table.status()
        files, size_bytes = _on_disk(table.uri)
        vectors = [index for index in status.index_lag if index.name == "vector_idx"]
        return cls(
            log_entries=sum(region.wal_lag_entries for region in status.regions),
            generations=sum(region.current_generation - 1 for region in status.regions),
            unmerged_generations=status.unmerged_generations,
            fragments=status.fragments,
            small_fragments=status.small_fragments,
            deleted_rows=status.deleted_rows,
            uncovered_rows=sum(index.uncovered_rows for index in vectors),
            versions=status.versions,
            files=files,
            megabytes=size_bytes / 1e6,
        )


def _on_disk(directory: str) -> tuple[int, int]:
    files = size_bytes = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                size_bytes += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:
                continue  # clean-up was faster
            files += 1
    return files, size_bytes


@dataclass(frozen=True, slots=True)
class Account:
    """What happened, in numbers."""

    documents: int
    regions: int
    loaded: int
    """Documents that were in the table before the stream began."""
    files: int
    upserts: int
    deletes: int
    interval_ms: float
    """Between two files of the steady part."""
    steady_rows_per_second: float
    """As offered: the source waits between two files."""
    burst_rows: int
    burst_files: int
    burst_rows_per_second: float
    """From the first file of the burst in the source until the last one's rows are read."""
    batches: Latency
    """Micro-batches of the steady part, without the first of each driver."""
    burst_batches: Latency
    freshness: Latency
    """Steady part, without what waited for a driver to start or to catch up."""
    start_ms: float
    """From the start of the first driver until rows of the first file were read."""
    restart_ms: float
    """From the kill until rows of the next file were read."""
    freshness_across_kill_ms: float
    """The longest that a file waited which had to wait for the second driver."""
    seen_at_kill: int
    written_at_kill: int
    replayed_batches: int
    """Batches that Spark had begun and not recorded as done, so that they were run again."""
    lost_after_kill: int
    """Keys with a state that they may not have, read before the second driver wrote."""
    reads: dict[str, Latency]
    failed_reads: int
    wrong_reads: int
    """Rows older than what had been seen before, or that were deleted then."""
    first_failure: str
    pipeline_rounds: int
    """Rounds of the second driver's pipeline."""
    maintenance: list[dict[str, Any]]
    at_kill: Files
    before: Files
    after: Files
    recall_before: float
    recall_after: float
    rows: int
    live: Comparison
    """The table against what it has to be, at the end of the stream."""
    plain: Comparison
    """What `lance.dataset(…)` shows after maintenance, against the same."""

    @property
    def lost(self) -> int:
        return max(self.live.lost, self.plain.lost)

    @property
    def changed(self) -> int:
        return max(self.live.changed, self.plain.changed)

    @property
    def duplicates(self) -> int:
        return max(self.live.duplicates, self.plain.duplicates)

    @property
    def came_back(self) -> int:
        return max(self.live.extra, self.plain.extra)

    @property
    def sound(self) -> bool:
        """Nothing lost, changed, twice or back again; and every read was right."""
        ends = (self.lost, self.changed, self.duplicates, self.came_back, self.lost_after_kill)
        return not any(ends) and not self.failed_reads and not self.wrong_reads

    def to_dict(self) -> dict[str, Any]:
        derived = ("lost", "changed", "duplicates", "came_back", "sound")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
