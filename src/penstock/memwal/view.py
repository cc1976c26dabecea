"""One consistent view of a table: the base, the generations in front of it, and what is in memory.

A view is taken in one order: the base table first, then each region's manifest, then its newest
rows. What is merged by the base version is never read from a generation, because it could outrank
newer base rows. What was flushed or merged since the base was read is still found in the
manifests; if clean-up has removed it meanwhile, the view is stale and another one is taken.

Newest rows come from the MemTables of a writer in this process, after its claim was verified, or
else from the WAL. In a region higher generations win, and later rows within one; between regions
there is nothing to decide, except that regions of a newer spec outrank those of an older.

Such a view is strong. An eventual one has the base and the generations that the snapshot in the
base's MemWAL index names, and asks no region for anything. A view of a version is the same for an
older version of the base. What a snapshot names and the base has not merged must all be there.

Between views a `Reader` keeps what it learnt. Every view asks the store again whether that is
still the newest: the answer that counts is never older than the request.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from penstock import metrics
from penstock.errors import (
    Corruption,
    Fenced,
    InvalidInput,
    StorageError,
    VersionNotFound,
    WriterClosed,
    WriterPoisoned,
)
from penstock.index.key_index import NOT_FOUND, KeyIndex, RowIds
from penstock.index.primary_key import key_array, key_type
from penstock.lazy import lazy
from penstock.memwal.advance import Advance
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.cache import ByteCache, FewCache
from penstock.memwal.freshness import Freshness, RowIdSet, SettledFreshness
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.memtable import MemTable
from penstock.memwal.recent_keys import RecentKeys, RecentRows
from penstock.memwal.region_spec import arrow_type
from penstock.memwal.regions import list_region_ids
from penstock.memwal.shape import TableShape
from penstock.memwal.snapshots import SnapshotGone, read_snapshot
from penstock.memwal.sources import FreshSource, GenerationSource, MemTableSource, StaleView
from penstock.memwal.table_versions import is_latest_version, version_exists
from penstock.memwal.tails import Tail
from penstock.memwal.transforms import decode_value
from penstock.memwal.writer import RegionWriter

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

GENERATION_CACHE_BYTES = 256 << 20
KEY_INDEX_CACHE_BYTES = 512 << 20
SETTLED_CACHE_BYTES = 128 << 20
_KEY_INDEX_BYTES_PER_ROW = 40
_VIEW_ATTEMPTS = 16
_KEPT_SNAPSHOTS = 4
_OPEN_THREADS = 8
"""So many generations are opened at a time."""
CONSISTENCIES = ("strong", "eventual")

T = TypeVar("T")
M = TypeVar("M")
LeaveOut = Callable[[BaseSnapshot, Sequence[RegionManifest]], Collection[uuid.UUID]]
"""Which regions a read does not need, of those that the reader has met before."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """What a region adds to the base: generations and MemTables, oldest first."""

    manifest: RegionManifest
    sources: tuple[FreshSource, ...]
    is_behind: bool = False
    """Whether there is a newer manifest, which shows the same rows."""

    @property
    def rank(self) -> int:
        return self.manifest.region_spec_id


class View:
    """Everything a read needs, as of one moment."""

    def __init__(self, reader: Reader, base: BaseSnapshot, regions: Sequence[RegionView]) -> None:
        self.reader = reader
        self.base = base
        self.shape: TableShape = base.shape
        self.given = regions
        self.regions = sorted(regions, key=lambda region: region.rank)

    @lazy
    def sources(self) -> list[FreshSource]:
        """Everything in front of the base, in the order in which later ones win."""
        return [source for region in self.regions for source in region.sources]

    def pruned(self, where: Filter | None) -> View:
        """The view without the regions that cannot hold a row that matches.

        A region's values follow from the key, so the keys of a region that is left out cannot
        match in the base either, and nothing there needs to be hidden.
        """
        if where is None or len(self.regions) < 2:
            return self
        from penstock.memwal.pruning import regions_for

        shape, names = self.shape, self.shape.columns_by_id
        specs = {}
        for spec in self.base.details.region_specs:
            ids = {field_id for field in spec.fields for field_id in field.source_ids}
            if not shape.key_columns or {names.get(i) for i in ids} <= set(shape.key_columns):
                specs[spec.spec_id] = (spec, regions_for(where, spec, names, shape.schema))

        def may_match(region: RegionView) -> bool:
            spec, pruner = specs.get(region.manifest.region_spec_id, (None, None))
            if spec is None or pruner is None:
                return True
            types = {field.field_id: arrow_type(field.result_type) for field in spec.fields}
            stored = region.manifest.region_values
            return pruner.may_match({name: decode_value(raw, types[name]) for name, raw in stored})

        kept = [region for region in self.regions if may_match(region)]
        return self if len(kept) == len(self.regions) else View(self.reader, self.base, kept)

    @lazy
    def _by_kind(self) -> tuple[list[GenerationSource], list[MemTableSource]]:
        sources = self.sources
        generations = [s for s in sources if isinstance(s, GenerationSource)]
        return generations, [s for s in sources if isinstance(s, MemTableSource)]

    @lazy
    def freshness(self) -> Freshness:
        """Which rows in front of the base are the newest of their key."""
        kind = key_type(self.shape.schema, self.shape.key_columns)
        generations, memory = self._by_kind
        ranks = [region.rank for region in self.regions]
        if len(set(ranks)) > 1:
            # Regions of several specs: a MemTable of an older one does not outrank a generation
            # of a newer one, so nothing is settled before all are laid side by side.
            return _unsettled(self.sources, kind)
        settled = self.reader.settled(generations, kind)
        return Freshness(settled, generations, memory, kind, self._recent)

    @lazy
    def _recent(self) -> list[RecentRows] | None:
        """What is known of the keys in memory; None where two MemTables may share a key."""
        _, memory = self._by_kind
        if len({source.region_id for source in memory}) < len(memory):
            return None
        if len({region.rank for region in self.regions}) > 1:
            return None
        return [self.reader.recent(source) for source in memory]

    @lazy
    def hidden_base_rows(self) -> RowIdSet | None:
        """Row ids of base rows that something newer supersedes.

        None if the base is too large for its keys to be kept in memory; a scan then compares
        keys as it goes.
        """
        freshness = self.freshness
        index = self.key_index
        if index is None:
            return RowIdSet(np.empty(0, dtype=np.uint64)) if freshness.empty else None
        hidden = self.reader.hidden(self.base, index, freshness.settled)
        recent = self.recent_base_rows(index)
        return hidden.plus(recent) if len(recent) else hidden

    def recent_base_rows(self, index: KeyIndex) -> RowIds:
        """Row ids of the base rows that what is in memory supersedes; `index` is `key_index`."""
        if self._recent is not None:
            found = [rows.base_rows(self.base.version, index) for rows in self._recent]
            return np.concatenate([np.empty(0, dtype=np.uint64), *found])
        recent: RowIds = index.find(self.freshness.recent)
        known: RowIds = recent[recent != NOT_FOUND]
        return known

    @lazy
    def key_index(self) -> KeyIndex | None:
        """The keys of the base in memory, or None if they are too many for the cache."""
        return self.reader.key_index(self.base)


def _same_sources(some: Sequence[RegionView], others: Sequence[RegionView]) -> bool:
    """Whether two views of regions have the very same rows."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one.manifest.region_id != other.manifest.region_id or one.rank != other.rank:
            return False
        if len(one.sources) != len(other.sources):
            return False
        for before, now in zip(one.sources, other.sources, strict=True):
            if before is now:
                continue
            if not (isinstance(before, MemTableSource) and isinstance(now, MemTableSource)):
                return False
            if before.memtable is not now.memtable or before.rows != now.rows:
                return False
    return True


def _unsettled(sources: Sequence[FreshSource], kind: pa.DataType) -> Freshness:
    return Freshness(SettledFreshness([], kind), [], sources, kind)


class Reader:
    """Takes views of one table, and keeps between them what does not change or is checked."""

    def __init__(self, table: BaseTable) -> None:
        self.table = table
        self.generations: ByteCache[GenerationSource] = ByteCache(
            GENERATION_CACHE_BYTES, "generations"
        )
        self.key_indexes: ByteCache[KeyIndex] = ByteCache(KEY_INDEX_CACHE_BYTES, "base keys")
        self._settled: ByteCache[SettledFreshness] = ByteCache(SETTLED_CACHE_BYTES, "freshness")
        self._hidden: ByteCache[RowIdSet] = ByteCache(SETTLED_CACHE_BYTES, "hidden rows")
        self._recent: weakref.WeakKeyDictionary[MemTable, RecentKeys] = weakref.WeakKeyDictionary()
        self._tails: dict[uuid.UUID, Tail] = {}
        self._known: dict[uuid.UUID, RegionManifest] = {}
        """A manifest of each region met so far: which values it stands for never changes."""
        self._last: View | None = None
        self._memories: dict[type[object], object] = {}
        self._snapshots: FewCache[tuple[RegionManifest, ...]] = FewCache(_KEPT_SNAPSHOTS)
        self._advance = Advance(table, self._use_what_was_tried)
        self._lock = threading.Lock()

    def read(
        self,
        writers: Callable[[], Iterable[RegionWriter]],
        work: Callable[[View], T],
        *,
        consistency: str = "strong",
        version: int | None = None,
        leave_out: LeaveOut | None = None,
        kind: str | None = None,
    ) -> T:
        """Run `work` on a fresh view, and again on another if the first went stale under it.

        Of each `kind` of read, the last is tried on new versions of the base before they are used.
        """
        version = self.check(consistency, version)
        stale: StaleView | None = None
        gone: Exception | None = None
        for attempt in self.table.seams.attempts():
            view: View | None = None
            try:
                view = self.view(
                    writers(), consistency=consistency, version=version, leave_out=leave_out
                )
                found = work(view)
                if kind is not None and version is None and consistency == "strong":
                    self._advance.remember(kind, work)
                return found
            except StaleView as error:
                stale = error
                self._move_on()
                metrics.stale_views.inc()
                if attempt + 1 >= _VIEW_ATTEMPTS:
                    break
            except (OSError, RuntimeError, pa.ArrowException) as error:
                # Versions are cleaned up under readers: then Lance's error says what, and not why.
                if version is None and (self._move_on() or self._is_past(view)):
                    gone = error
                    continue
                if version is None or version_exists(self.table.store, version):
                    raise
                raise VersionNotFound(
                    f"{self.table.uri}: version {version} was cleaned up while it was read "
                    f"({error}); read a newer one"
                ) from error
        if stale is None:
            raise StorageError(
                f"{self.table.uri}: versions are cleaned up faster than they can be read ({gone}); "
                "keep them for longer with gc(retain_seconds=…)"
            ) from gone
        raise self._lasting(stale, version) from stale

    def _is_past(self, view: View | None) -> bool:
        """Whether there is a newer version than a view has, so that its own may be gone."""
        return view is not None and not is_latest_version(self.table.store, view.base.version)

    def _lasting(self, stale: StaleView | None, version: int | None) -> Exception:
        """What to say when no view is better than the last one."""
        if version is not None:
            return VersionNotFound(
                f"{self.table.uri}: version {version} cannot be read any more: {stale}; read a "
                "newer version, or the newest without one, or restore what is missing from a copy"
            )
        if isinstance(stale, SnapshotGone):
            return Corruption(
                f"{self.table.uri}: {stale}; take another with snapshot(), or read with "
                "consistency='strong', which needs none"
            )
        return Corruption(
            f"{self.table.uri}: {stale}; it is not merged into the base table, so its rows cannot "
            "be read. Restore the directory from a copy"
        )

    def check(self, consistency: str, version: int | None) -> int | None:
        """Refuse what no read can be asked for; returns the version."""
        if consistency not in CONSISTENCIES:
            raise InvalidInput(
                f"unknown consistency {consistency!r}; there are: {', '.join(CONSISTENCIES)}"
            )
        if version is None:
            return None
        whole = isinstance(version, int | np.integer) and not isinstance(version, bool)
        if not whole or version < 1:
            raise InvalidInput(
                f"version must be a whole number from 1 to {self.table.snapshot().version}, "
                f"the newest, not {version!r}"
            )
        return int(version)

    def view(
        self,
        writers: Iterable[RegionWriter] = (),
        *,
        consistency: str = "strong",
        version: int | None = None,
        leave_out: LeaveOut | None = None,
    ) -> View:
        """A strong view has everything acknowledged before this call.

        An eventual one has what the newest version of the base names. With `version`, that
        version and what it names: as it never changes, every consistency gives the same.
        Regions that `leave_out` names are not asked whether they are still as they were.
        """
        if version is not None or consistency != "strong":
            base = self.table.snapshot(version)
            return View(self, base, self._named_regions(base))
        writers = list(writers)
        newest = self.table.snapshot()

        def view_of(tried: BaseSnapshot) -> View:
            return View(self, tried, self._regions(tried, writers, trying=True))

        base = self._advance.choose(newest, view_of)
        regions = self._regions(base, writers, leave_out)
        if any(region.is_behind for region in regions):
            self._advance.prepare(newest, view_of)
        if leave_out is not None:
            return View(self, base, regions)
        # If nothing was written since the last one, what that has worked out holds for this.
        last = self._last
        if last is None or last.base is not base or not _same_sources(last.given, regions):
            last = self._last = View(self, base, regions)
        return last

    def _regions(
        self,
        base: BaseSnapshot,
        writers: Iterable[RegionWriter],
        leave_out: LeaveOut | None = None,
        *,
        trying: bool = False,
    ) -> list[RegionView]:
        usable = [writer for writer in writers if writer.failure is None]
        # Of two writers of a region in this process the one that claimed it last counts.
        live = {w.region_id: w for w in sorted(usable, key=lambda writer: writer.epoch)}
        ids = list_region_ids(self.table.store)
        if leave_out is not None and len(ids) > 1:
            left_out = leave_out(base, [self._known[i] for i in ids if i in self._known])
            ids = [region_id for region_id in ids if region_id not in left_out]
        return [self._region(base, i, live.get(i), trying=trying) for i in ids]

    def memory(self, kind: type[M]) -> M:
        """What a kind of search keeps between reads of this table; made when first asked for."""
        with self._lock:
            known = self._memories.get(kind)
            if known is None:
                known = self._memories[kind] = kind()
        assert isinstance(known, kind)
        return known

    def forget(self) -> None:
        """Let go of the last view, and with it of the rows in memory that it has."""
        self._last = None
        self._advance.forget()

    def _named_regions(self, base: BaseSnapshot) -> list[RegionView]:
        """The regions as the snapshot of a version has them; without one the base is all."""
        inline = base.details.inline_snapshots
        if inline is None:
            return []
        where = f"the region snapshot of {self.table.uri} version {base.version}"
        regions = self._snapshots.get(
            inline, lambda: read_snapshot(self.table.store, inline, where)
        )
        return [self._checked(base, region, ()) for region in regions]

    def settled(
        self, generations: Sequence[GenerationSource], kind: pa.DataType
    ) -> SettledFreshness:
        """What these generations decide among themselves."""
        which = tuple(source.uri for source in generations)

        def settle() -> SettledFreshness:
            unread = [source for source in generations if not source.has_keys]
            if len(unread) > 1:
                with ThreadPoolExecutor(_OPEN_THREADS, "penstock-open") as pool:
                    list(pool.map(GenerationSource.keys, unread))
            return SettledFreshness(generations, kind, which)

        return self._settled.get((which, kind), settle)

    def recent(self, source: MemTableSource) -> RecentRows:
        """What is known of the keys of a MemTable; it grows with it and goes with it."""
        with self._lock:
            known = self._recent.setdefault(source.memtable, RecentKeys())
        return known.rows(source.memtable, source.rows)

    def hidden(self, base: BaseSnapshot, index: KeyIndex, settled: SettledFreshness) -> RowIdSet:
        """The base rows that those generations supersede."""

        def find() -> RowIdSet:
            found = index.find(settled.keys)
            return RowIdSet(found[found != NOT_FOUND])

        return self._hidden.get((base.version, settled.which), find)

    def key_index(self, base: BaseSnapshot) -> KeyIndex | None:
        if base.rows * _KEY_INDEX_BYTES_PER_ROW > self.key_indexes.limit_bytes:
            return None
        return self.key_indexes.get(base.version, lambda: _build_key_index(base))

    def _region(
        self,
        base: BaseSnapshot,
        region_id: uuid.UUID,
        writer: RegionWriter | None,
        *,
        trying: bool,
    ) -> RegionView:
        if writer is not None:
            try:
                writer.verify()
                snapshot = writer.snapshot()
                return self._checked(base, snapshot.manifest, snapshot.memtables)
            except (Fenced, WriterClosed, WriterPoisoned):
                pass  # not ours any more: read it as any other process would
        with self._lock:
            tail = self._tails.setdefault(region_id, Tail(self.table, region_id))
        if trying:
            manifest, memtable, rows = tail.try_newest(base)
            is_behind = False
        else:
            waits = self._advance.waits(base)
            manifest, memtable, rows, is_behind = tail.read(base, may_stay=waits)
        region = self._checked(base, manifest, ((memtable, rows),) if rows else ())
        return replace(region, is_behind=is_behind)

    def _move_on(self) -> bool:
        """Read the newest of everything from now on; False if that is so already."""
        behind = [tail.move_on() for tail in list(self._tails.values())]
        return self._advance.move_on() or any(behind)

    def _use_what_was_tried(self) -> None:
        for tail in list(self._tails.values()):
            tail.use_tried()

    def _checked(
        self,
        base: BaseSnapshot,
        manifest: RegionManifest,
        memtables: tuple[tuple[MemTable, int], ...],
    ) -> RegionView:
        """The unmerged part of a region, all of which must be there."""
        self._known[manifest.region_id] = manifest
        merged = base.details.merged(manifest.region_id)
        generations = [g for g in manifest.flushed_generations if g.generation > merged]
        expected = list(range(merged + 1, manifest.current_generation))
        if [g.generation for g in generations] != expected:
            raise StaleView(
                f"region {manifest.region_id} lists generations "
                f"{[g.generation for g in generations]} where {expected} are not merged yet"
            )
        table = self.table
        flushed = [
            self.generations.get(
                (manifest.region_id, g.path),
                partial(
                    GenerationSource, table.store, table.storage_options, manifest.region_id, g
                ),
            )
            for g in generations
        ]
        memory = [MemTableSource(m, rows, manifest.region_id) for m, rows in memtables if rows]
        return RegionView(manifest, (*flushed, *memory))


def _build_key_index(base: BaseSnapshot) -> KeyIndex:
    columns = list(base.shape.key_columns)
    rows = base.dataset.scanner(columns=columns, with_row_id=True).to_table()
    return KeyIndex(key_array(rows, columns), rows.column("_rowid").to_numpy())
