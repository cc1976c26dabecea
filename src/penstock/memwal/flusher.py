"""Bringing one frozen MemTable after the other into the region's manifest.

A flush that fails is tried again in a fresh directory, a bounded number of times. Only the
generation that the manifest expects next can be entered, so nothing unflushed is ever skipped;
the replay position moves in the same change. A generation that took too long to be entered is
written again: clean-up may have taken it for one that nobody will enter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock import metrics
from penstock.errors import WriterPoisoned
from penstock.memwal.claim import ClaimedRegion
from penstock.memwal.gc_limits import Outdated, check_age
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.memtable import MemTable
from penstock.memwal.transactions import joined
from penstock.memwal.write_items import WriterStats
from penstock.storage.seams import Seams


class Flusher:
    def __init__(
        self,
        region: ClaimedRegion,
        write_generation: Callable[[MemTable], FlushedGeneration],
        stats: WriterStats,
        seams: Seams,
    ) -> None:
        self._region_id = region.region_id
        self._epoch = region.manifest.writer_epoch
        self._chain = region.chain
        self._write_generation = write_generation
        self._stats = stats
        self._seams = seams

    def flush(self, memtable: MemTable, stopped: Callable[[], bool]) -> RegionManifest | None:
        """Write a generation and enter it; None if the writer stopped before it was written."""
        last: Exception | None = None
        for _ in self._seams.attempts():
            if stopped():
                return None
            started_ms = self._seams.clock.monotonic_ms()
            try:
                flushed = self._write_generation(memtable)
            except Exception as error:  # Lance raises OSError, RuntimeError and ValueError alike
                last = error
                self._stats.flush_failures += 1
                metrics.flush_failures.inc()
                continue
            try:
                manifest = self._publish(memtable, flushed, started_ms)
            except Outdated as error:
                last = error
                self._stats.flush_failures += 1
                metrics.flush_failures.inc()
                continue
            self._stats.flushes += 1
            self._stats.flushed_rows += memtable.rows
            metrics.flushes.inc()
            return manifest
        raise WriterPoisoned(
            f"region {self._region_id}: generation {memtable.generation} could not be flushed "
            f"({last}); its rows are safe in the WAL, open a new writer to try again"
        ) from last

    def enter(
        self, generations: Sequence[FlushedGeneration], done: Mapping[bytes, int]
    ) -> RegionManifest:
        """Enter generations that were written elsewhere, behind all that there are."""
        paths = {generation.path for generation in generations}

        def change(current: RegionManifest) -> RegionManifest:
            first = current.current_generation
            numbered = [
                replace(generation, generation=number)
                for number, generation in enumerate(generations, first)
            ]
            return current.next(
                current_generation=first + len(numbered),
                flushed_generations=(*current.flushed_generations, *numbered),
                transactions=joined(current.transactions, done),
            )

        return self._chain.update(
            self._epoch,
            change,
            landed=lambda m: any(g.path in paths for g in m.flushed_generations),
        )

    def _publish(
        self, memtable: MemTable, flushed: FlushedGeneration, started_ms: float
    ) -> RegionManifest:
        """Enter a generation into the manifest, and with it the replay position."""

        def change(current: RegionManifest) -> RegionManifest:
            check_age(self._seams, started_ms, f"the flush of generation {memtable.generation}")
            if current.current_generation != memtable.generation:
                raise WriterPoisoned(
                    f"region {self._region_id}: generation {memtable.generation} cannot be next, "
                    f"the manifest expects {current.current_generation}"
                )
            return current.next(
                current_generation=memtable.generation + 1,
                replay_after_wal_entry_position=memtable.last_position,
                wal_entry_position_last_seen=max(
                    current.wal_entry_position_last_seen, memtable.last_position
                ),
                flushed_generations=(*current.flushed_generations, flushed),
                transactions=joined(current.transactions, memtable.transactions),
            )

        return self._chain.update(
            self._epoch,
            change,
            landed=lambda m: any(g.path == flushed.path for g in m.flushed_generations),
        )
