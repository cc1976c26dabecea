"""The logs of regions that other processes write, as one reader follows them.

A log is read once, and then only what was added. A flush moves rows from the log to a generation,
and a reader that has them in memory need not open that generation at once: the rows it has and
what follows them in the log are the same. So a tail stays at the manifest it knows until what the
next one names was tried in the background (`advance`), unless something forbids it:

- log entries that it has not read were flushed, and may be removed: the log has a hole;
- the base table has merged rows that the tail still has in memory, and would hide newer ones;
- the region changed in another way than by a flush or a new owner.
"""

from __future__ import annotations

import threading
import uuid

import pyarrow as pa

from penstock.memwal.advance import ADVANCE_LIMIT_MS
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.manifest import RegionManifest, manifest_chain
from penstock.memwal.memtable import MemTable, prepare_rows
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import StaleView
from penstock.memwal.wal import Wal

_ATTEMPTS = 16
_JOINED_ROWS = 4096
_NO_INDEXES = LiveIndexes([], pa.schema([]))


class _Followed:
    """A manifest, and the rows of the log behind it as far as they were read."""

    def __init__(self, manifest: RegionManifest, shape: TableShape) -> None:
        self.manifest = manifest
        self.memtable = MemTable(manifest.current_generation, shape, _NO_INDEXES, 0.0)
        self.read_to = manifest.replay_after_wal_entry_position
        self.broken = False

    def extend(self, wal: Wal) -> None:
        # If reading fails between two batches of an entry, the next view begins anew.
        self.broken = True
        shape = self.memtable.shape
        small: list[pa.RecordBatch] = []
        for entry in wal.tail(self.read_to):
            if entry.generation >= self.manifest.current_generation:
                small += [shape.align(stored) for stored in entry.batches]
                if sum(batch.num_rows for batch in small) >= _JOINED_ROWS:
                    self._append(small)
                    small = []
            self.read_to = entry.position
        self._append(small)
        self.broken = False

    def _append(self, batches: list[pa.RecordBatch]) -> None:
        """Add rows; small batches as one, because each costs as much as many rows."""
        if not batches:
            return
        schema = self.memtable.shape.wal_schema
        same = [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches]
        joined = same[0] if len(same) == 1 else pa.concat_batches(same)
        rows = prepare_rows(self.memtable.shape, _NO_INDEXES, joined, joined.nbytes, indexed=False)
        self.memtable.append(rows)

    def serves(self, manifest: RegionManifest, shape: TableShape) -> bool:
        """Whether these are the rows behind that manifest, too; if so, it is taken over."""
        if self.broken or self.memtable.shape is not shape:
            return False
        if not _same_log(self.manifest, manifest):
            return False
        self.manifest = manifest
        return True


class Tail:
    def __init__(self, table: BaseTable, region_id: uuid.UUID) -> None:
        self._table = table
        self._region_id = region_id
        self._chain = manifest_chain(table.store, region_id, table.seams)
        self._wal = Wal(table.store, region_id, table.seams)
        self._lock = threading.Lock()
        self._newest: RegionManifest | None = None
        self._used: _Followed | None = None
        self._tried: _Followed | None = None
        self._behind_ms: float | None = None

    def read(
        self, base: BaseSnapshot, *, may_stay: bool
    ) -> tuple[RegionManifest, MemTable, int, bool]:
        """A manifest, the rows behind it, and whether a newer manifest waits to be tried.

        With `may_stay`, the manifest may be an older one that shows the same rows.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                newest = self._latest()
                used = self._used
                if used is None or not used.serves(newest, base.shape):
                    stays = may_stay and used is not None and self._stays(used, newest, base)
                    if used is None or not stays:
                        used = self._move_on(newest, base.shape)
                used.extend(self._wal)
                if used.read_to < newest.replay_after_wal_entry_position:
                    self._used = None
                    continue
                # What was flushed while the tail was read may be missing from both: look again.
                if self._is_still(newest):
                    behind = not _same_log(used.manifest, newest)
                    return used.manifest, used.memtable, used.memtable.rows, behind
        raise StaleView(f"region {self._region_id} keeps changing while it is read")

    def try_newest(self, base: BaseSnapshot) -> tuple[RegionManifest, MemTable, int]:
        """The newest manifest and the rows behind it, to be used by reads later on."""
        with self._lock:
            for _ in range(_ATTEMPTS):
                newest = self._latest()
                tried = self._used
                if tried is None or not tried.serves(newest, base.shape):
                    tried = self._tried
                if tried is None or not tried.serves(newest, base.shape):
                    tried = self._tried = _Followed(newest, base.shape)
                tried.extend(self._wal)
                if self._is_still(newest):
                    return tried.manifest, tried.memtable, tried.memtable.rows
        raise StaleView(f"region {self._region_id} keeps changing while it is read")

    def use_tried(self) -> None:
        """What was tried is what reads use from now on."""
        with self._lock:
            if self._tried is not None and not self._tried.broken:
                self._used, self._tried, self._behind_ms = self._tried, None, None

    def move_on(self) -> bool:
        """Give up the manifest in use; False if it is the newest known anyway."""
        with self._lock:
            behind = self._behind_ms is not None
            if behind:
                self._used = self._behind_ms = None
            return behind

    def _move_on(self, newest: RegionManifest, shape: TableShape) -> _Followed:
        tried = self._tried
        if tried is None or not tried.serves(newest, shape):
            tried = _Followed(newest, shape)
        self._used, self._tried, self._behind_ms = tried, None, None
        return tried

    def _stays(self, used: _Followed, newest: RegionManifest, base: BaseSnapshot) -> bool:
        """Whether the rows of a manifest that is not the newest are still the same rows."""
        before = used.manifest
        now_ms = self._table.seams.clock.monotonic_ms()
        if self._behind_ms is None:
            self._behind_ms = now_ms
        return (
            not used.broken
            and used.memtable.shape is base.shape
            and now_ms - self._behind_ms <= ADVANCE_LIMIT_MS
            and newest.status is before.status
            and newest.region_spec_id == before.region_spec_id
            and newest.current_generation >= before.current_generation
            and base.details.merged(self._region_id) < before.current_generation
        )

    def _latest(self) -> RegionManifest:
        known = self._newest
        if known is not None and self._chain.is_latest(known.version):
            return known
        manifest = self._chain.latest()
        if manifest is None:
            raise StaleView(f"region {self._region_id} has files but no manifest")
        self._newest = manifest
        return manifest

    def _is_still(self, newest: RegionManifest) -> bool:
        if self._chain.is_latest(newest.version):
            return True
        latest = self._chain.latest()
        return latest is not None and _same_rows(newest, latest)


def _same_rows(before: RegionManifest, now: RegionManifest) -> bool:
    return _same_log(before, now) and now.flushed_generations == before.flushed_generations


def _same_log(before: RegionManifest, now: RegionManifest) -> bool:
    """Whether the log behind both begins at the same entry: only the owner changed, or clean-up."""
    return (
        now.replay_after_wal_entry_position == before.replay_after_wal_entry_position
        and now.current_generation == before.current_generation
    )
