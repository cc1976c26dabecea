"""The rows of regions in the order of their writing: how many there are, and any range of them.

    region manifest, log --RegionFollower--> RegionLog --marks--> RegionRange --read_range--> rows

A row has the same number in the log and in the generation that it is flushed to: a flush keeps all
rows in their order, and hides superseded ones by a deletion vector, which is not looked at here. So
a range is the same rows wherever they are by the time they are read.

Whoever takes a region over puts everything that its log has into one generation. So rows of the log
are counted from the first generation that is not flushed, and only their labels, generation and
row, follow what the log says: entries before a fence are of that first one.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import VersionNotFound
from penstock.memwal.base_table import BaseTable
from penstock.memwal.cache import FewCache
from penstock.memwal.feed_position import Mark
from penstock.memwal.manifest import FlushedGeneration, RegionManifest, manifest_chain
from penstock.memwal.regions import list_region_ids
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import GenerationSource, StaleView
from penstock.memwal.wal import TOMBSTONE, Wal

RESTART = (
    "begin anew from 'earliest' with an empty copy; to let readers of changes lag behind for "
    "longer, keep more with gc(retain_seconds=…)"
)
_ATTEMPTS = 16
_THREADS = 8
_KEPT_SIZES = 1024

Written = tuple[pa.RecordBatch, int, int]
"""Rows with their tombstone flag, the generation they are of, and the number of the first."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """An entry of a log: where it is, and which rows it begins with."""

    position: int
    first: Mark
    """As marks count."""
    label: Mark
    """Its generation, and the row within that."""


@dataclass(frozen=True, slots=True)
class RegionRange:
    """So many rows of a region from a mark on."""

    region_id: uuid.UUID
    first: Mark
    rows: int
    place: LogPlace | None = None
    """Where in the log they begin, if they are there; it spares reading what is before."""
    fence: int = 0
    """Entries up to this one are of the first generation that was not flushed."""


@dataclass(frozen=True, slots=True)
class RegionLog:
    """What there is of a region at one moment."""

    manifest: RegionManifest
    sizes: Mapping[int, int]
    """Rows of the generations that can be read."""
    places: Sequence[LogPlace]
    tail_rows: int
    fence: int
    """The position of the last fence in the log, or 0."""

    @property
    def region_id(self) -> uuid.UUID:
        return self.manifest.region_id

    @property
    def spec_id(self) -> int:
        return self.manifest.region_spec_id

    @property
    def end(self) -> Mark:
        return self.manifest.current_generation, self.tail_rows

    def normal(self, mark: Mark) -> Mark:
        """The mark that counts from the last generation it can count from."""
        generation, row = mark
        while (size := self.sizes.get(generation)) is not None and row >= size:
            generation, row = generation + 1, row - size
        if generation < self.manifest.current_generation and generation not in self.sizes:
            raise VersionNotFound(
                f"generation {generation} of region {self.region_id} is needed from row {row} on, "
                f"and was cleaned up after it was merged; {RESTART}"
            )
        if (generation, row) > self.end:
            raise VersionNotFound(
                f"region {self.region_id} ends at row {self.tail_rows} of generation "
                f"{self.manifest.current_generation}, and changes were read up to row {row} of "
                f"generation {generation}: the table is older than that; {RESTART}"
            )
        return generation, row

    def between(self, first: Mark, last: Mark) -> int:
        """How many rows lie between two marks."""
        generation, row = self.normal(first)
        upto, last_row = self.normal(last)
        if (upto, last_row) <= (generation, row):
            return 0
        return sum(self.sizes[g] for g in range(generation, upto)) + last_row - row

    def after(self, first: Mark, rows: int) -> Mark:
        """The mark so many rows further on."""
        generation, row = self.normal(first)
        return self.normal((generation, row + rows))

    def range(self, first: Mark, rows: int) -> RegionRange:
        generation, row = first = self.normal(first)
        place = None
        if generation == self.manifest.current_generation and self.places:
            at = bisect_right(self.places, row, key=lambda place: place.first[1]) - 1
            place = self.places[max(0, at)]
        return RegionRange(self.region_id, first, rows, place, self.fence)


class RegionFollower:
    """A region as it grows; of its log only what was added is read again."""

    def __init__(self, table: BaseTable, region_id: uuid.UUID) -> None:
        self._table = table
        self._region_id = region_id
        self._chain = manifest_chain(table.store, region_id, table.seams)
        self.wal = Wal(table.store, region_id, table.seams)
        self._manifest: RegionManifest | None = None
        self._sizes: FewCache[int] = FewCache(_KEPT_SIZES)
        self._places: list[LogPlace] = []
        self._rows = 0
        self._fence = 0
        self._read_to = 0

    def look(self) -> RegionLog | None:
        """What there is now; None if there is no such region."""
        for _ in range(_ATTEMPTS):
            manifest = self._latest()
            if manifest is None:
                return None
            self._extend(manifest)
            # What was flushed while the log was read may be missing from both: look again.
            if self._chain.is_latest(manifest.version):
                listed = manifest.flushed_generations
                sizes = {generation.generation: self._size(generation) for generation in listed}
                return RegionLog(manifest, sizes, tuple(self._places), self._rows, self._fence)
        raise StaleView(f"region {self._region_id} keeps changing while it is read")

    def _latest(self) -> RegionManifest | None:
        known = self._manifest
        if known is not None and self._chain.is_latest(known.version):
            return known
        manifest = self._chain.latest()
        before = (0, 0) if known is None else _log_of(known)
        if manifest is not None and (known is None or _log_of(manifest) != before):
            self._places, self._rows, self._fence = [], 0, 0
            self._read_to = manifest.replay_after_wal_entry_position
        self._manifest = manifest
        return manifest

    def _extend(self, manifest: RegionManifest) -> None:
        current = manifest.current_generation
        for entry in self.wal.tail(self._read_to):
            if entry.is_fence:
                self._places = [replace(place, label=place.first) for place in self._places]
                self._fence = entry.position
            elif entry.generation >= current:
                last = self._places[-1].label if self._places else (current, 0)
                label = (current, self._rows)
                if entry.generation > last[0]:
                    label = (entry.generation, 0)
                elif self._places:
                    label = (last[0], last[1] + self._rows - self._places[-1].first[1])
                self._places.append(LogPlace(entry.position, (current, self._rows), label))
                self._rows += sum(batch.num_rows for batch in entry.batches)
            self._read_to = entry.position

    def _size(self, flushed: FlushedGeneration) -> int:
        if flushed.physical_rows is not None:
            return flushed.physical_rows

        def count() -> int:
            source = self.source(flushed)
            fragments = source.guarded(lambda: source.dataset.get_fragments())
            return sum(fragment.physical_rows for fragment in fragments)

        return self._sizes.get(flushed.path, count)

    def source(self, flushed: FlushedGeneration) -> GenerationSource:
        table = self._table
        return GenerationSource(table.store, table.storage_options, self._region_id, flushed)


def _log_of(manifest: RegionManifest) -> tuple[int, int]:
    """Where the log behind a manifest begins."""
    return manifest.replay_after_wal_entry_position, manifest.current_generation


class RegionFollowers:
    """All regions of a table."""

    def __init__(self, table: BaseTable) -> None:
        self._table = table
        self._followers: dict[uuid.UUID, RegionFollower] = {}

    def look(self) -> dict[uuid.UUID, RegionLog]:
        ids = list_region_ids(self._table.store)
        followers = [
            self._followers.setdefault(identity, RegionFollower(self._table, identity))
            for identity in ids
        ]
        if len(ids) <= 1:
            logs = [follower.look() for follower in followers]
        else:
            with ThreadPoolExecutor(_THREADS, "penstock-feed") as pool:
                logs = list(pool.map(RegionFollower.look, followers))
        return {log.region_id: log for log in logs if log is not None}


# --- rows ----------------------------------------------------------------------------------


def read_range(
    table: BaseTable, wanted: RegionRange, shape: TableShape, columns: Sequence[str]
) -> Iterator[Written]:
    """The rows of a range in today's shape, wherever they are."""
    follower = RegionFollower(table, wanted.region_id)
    left = wanted
    if wanted.place is not None:
        for rows in _from_log(follower.wal, wanted, wanted.place, shape, columns):
            left = _without(left, rows[0].num_rows)
            yield rows
    stale: StaleView | None = None
    for _ in table.seams.attempts():
        if not left.rows:
            return
        try:
            log = follower.look()
            if log is None:
                break
            for rows in _from_anywhere(follower, log, left, shape, columns):
                left = _without(left, rows[0].num_rows)
                yield rows
        except StaleView as error:
            stale = error  # flushed, or merged and cleaned up: another look tells
    if left.rows:
        raise VersionNotFound(
            f"{left.rows} rows of region {left.region_id} from row {left.first[1]} of generation "
            f"{left.first[0]} on are gone ({stale}); {RESTART}"
        )


def _without(wanted: RegionRange, rows: int) -> RegionRange:
    generation, row = wanted.first
    return replace(wanted, first=(generation, row + rows), rows=wanted.rows - rows)


def _from_anywhere(
    follower: RegionFollower,
    log: RegionLog,
    wanted: RegionRange,
    shape: TableShape,
    columns: Sequence[str],
) -> Iterator[Written]:
    left = replace(wanted, first=log.normal(wanted.first))
    while left.rows:
        generation, row = left.first
        flushed = log.manifest.generation(generation)
        if flushed is None:
            found = log.range(left.first, left.rows)
            if found.place is not None:
                yield from _from_log(follower.wal, found, found.place, shape, columns)
            return
        count = min(left.rows, log.sizes[generation] - row)
        for batch in follower.source(flushed).written(shape, columns, row, count):
            yield batch, generation, row
            row += batch.num_rows
        left = replace(_without(left, count), first=log.after((generation, row), 0))


def _from_log(
    wal: Wal, wanted: RegionRange, place: LogPlace, shape: TableShape, columns: Sequence[str]
) -> Iterator[Written]:
    """The rows that the log has, up to the first entry that is not there any more."""
    if place.first[0] != wanted.first[0]:
        return
    row, (generation, number) = place.first[1], place.label
    begin, end = wanted.first[1], wanted.first[1] + wanted.rows
    for entry in wal.tail(place.position - 1):
        if entry.is_fence or entry.generation < place.first[0]:
            continue
        if entry.generation > generation and entry.position > wanted.fence:
            generation, number = entry.generation, 0
        for stored in entry.batches:
            first, last = max(begin, row), min(end, row + stored.num_rows)
            if first < last:
                rows = shape.align(stored).slice(first - row, last - first)
                yield rows.select([*columns, TOMBSTONE]), generation, number + first - row
            row += stored.num_rows
            number += stored.num_rows
        if row >= end:
            return
