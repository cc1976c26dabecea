"""One consistent view of a table: the base, the generations behind it, and what is in memory.

A view is taken in one order: the base table first, then each region's manifest, then its newest
rows. What is merged by the base version is never read from a generation, because it could outrank
newer base rows. What was flushed or merged since the base was read is still found in the
manifests; if clean-up has removed it meanwhile, the view is stale and another one is taken.

Newest rows come from the MemTables of a writer in this process, after its claim was verified, or
else from the WAL. In a region higher generations win, and later rows within one; between regions
there is nothing to decide, except that regions of a newer spec outrank those of an older.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lance
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import (
    Corruption,
    Fenced,
    PenstockError,
    WriterClosed,
    WriterPoisoned,
)
from penstock.index.primary_key import (
    PkIndexReader,
    key_array,
    newest_rows,
    python_keys,
)
from penstock.memwal import names
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.live_indexes import LiveIndexes
from penstock.memwal.manifest import FlushedGeneration, RegionManifest, manifest_chain
from penstock.memwal.memtable import MemTable, live_rows, prepare_rows
from penstock.memwal.regions import list_region_ids
from penstock.memwal.shape import FIELD_ID, TableShape
from penstock.memwal.wal import TOMBSTONE, Wal
from penstock.memwal.writer import RegionWriter

_VIEW_ATTEMPTS = 16
_NO_INDEXES = LiveIndexes([], pa.schema([]))

T = TypeVar("T")


class _StaleView(PenstockError):
    """Something the view rests on was merged and removed; take another view."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """What a region adds to the base: generations and MemTables, oldest first."""

    manifest: RegionManifest
    generations: tuple[FlushedGeneration, ...]
    memtables: tuple[tuple[MemTable, int], ...]


class View:
    def __init__(self, table: BaseTable, base: BaseSnapshot, regions: Sequence[RegionView]) -> None:
        self.base = base
        self.shape: TableShape = base.shape
        self.regions = sorted(regions, key=lambda r: r.manifest.region_spec_id)
        self._table = table

    # --- scanning --------------------------------------------------------------------------

    def to_arrow(self) -> pa.Table:
        """Every live row."""
        fresh = self.fresh_rows()
        base = self.base.dataset.to_table().cast(self.shape.schema)
        if self.shape.key_columns and fresh.num_rows:
            newer = key_array(fresh, self.shape.key_columns)
            base = base.filter(pc.invert(self._is_in(base, newer)))
        added = live_rows(fresh).cast(self.shape.schema)
        return pa.concat_tables([base, added])

    def count(self) -> int:
        """How many live rows there are."""
        fresh = self.fresh_rows(columns=self.shape.key_columns)
        hidden = 0
        if self.shape.key_columns and fresh.num_rows:
            newer = key_array(fresh, self.shape.key_columns)
            for batch in self.base.dataset.to_batches(columns=list(self.shape.key_columns)):
                hidden += pc.sum(self._is_in(batch, newer)).as_py() or 0
        added = fresh.num_rows - (pc.sum(fresh.column(TOMBSTONE)).as_py() or 0)
        return int(self.base.dataset.count_rows() - hidden + added)

    def fresh_rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The newest row of every key that is not in the base as it is, tombstones included."""
        schema = self.shape.wal_schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in [*columns, TOMBSTONE]])
        tables = [schema.empty_table()]
        for region in self.regions:
            for generation in region.generations:
                rows = self._generation_rows(region.manifest.region_id, generation)
                tables.append(rows.select(schema.names))
            for memtable, rows in region.memtables:
                tables.append(memtable.table(rows).select(schema.names))
        fresh = pa.concat_tables([table.cast(schema) for table in tables])
        if not self.shape.key_columns or not fresh.num_rows:
            return fresh
        return fresh.filter(pa.array(newest_rows(key_array(fresh, self.shape.key_columns))))

    def _is_in(self, rows: pa.Table | pa.RecordBatch, keys: pa.Array) -> pa.Array:
        return pc.is_in(key_array(rows, self.shape.key_columns), value_set=keys)

    # --- looking up ------------------------------------------------------------------------

    def get_many(self, keys: dict[str, pa.Array]) -> pa.Table:
        """The live rows with these keys, in no particular order, each once."""
        wanted = key_array(pa.table(keys), self.shape.key_columns)
        wanted = pc.unique(wanted)
        found = [self.shape.wal_schema.empty_table()]
        for region in reversed(self.regions):
            for memtable, rows in reversed(region.memtables):
                wanted = self._find_in_memtable(memtable, rows, wanted, found)
            for generation in reversed(region.generations):
                wanted = self._find_in_generation(region, generation, wanted, found)
            if not len(wanted):
                break
        fresh = live_rows(pa.concat_tables([t.cast(self.shape.wal_schema) for t in found]))
        base = self._find_in_base(wanted) if len(wanted) else self.shape.schema.empty_table()
        return pa.concat_tables([fresh.cast(self.shape.schema), base.cast(self.shape.schema)])

    def _find_in_memtable(
        self, memtable: MemTable, rows: int, wanted: pa.Array, found: list[pa.Table]
    ) -> pa.Array:
        missing = []
        hits = []
        for key in python_keys(wanted):
            hit = memtable.find(key, rows)
            if hit is None:
                missing.append(key)
            else:
                hits.append(hit)
        if not hits:
            return wanted
        found.append(pa.Table.from_batches(hits))
        return pa.array(missing, wanted.type)

    def _find_in_generation(
        self, region: RegionView, generation: FlushedGeneration, wanted: pa.Array, found: list[Any]
    ) -> pa.Array:
        if not len(wanted):
            return wanted
        uri = self._generation_uri(region.manifest.region_id, generation)

        def look_up() -> pa.Array:
            rows = PkIndexReader(uri, self._table.storage_options).newest_many(wanted)
            hits = rows >= 0
            if not hits.any():
                return wanted
            dataset = lance.dataset(uri, storage_options=self._table.storage_options)
            taken = dataset._take_rows(rows[hits].tolist())
            if taken.num_rows != hits.sum():
                raise ValueError(f"{hits.sum()} rows are indexed and {taken.num_rows} are there")
            found.append(self._aligned(dataset, taken))
            return wanted.filter(pa.array(~hits))

        return self._read_generation(generation, look_up)

    def _find_in_base(self, wanted: pa.Array) -> pa.Table:
        columns = list(self.shape.key_columns)
        if len(columns) == 1 and (
            pa.types.is_integer(wanted.type) or pa.types.is_string(wanted.type)
        ):
            values = ", ".join(_literal(key) for key in wanted.to_pylist())
            return self.base.dataset.to_table(filter=f"`{columns[0]}` IN ({values})")
        scanner = self.base.dataset.scanner(columns=columns, with_row_id=True)
        row_ids: list[int] = []
        for batch in scanner.to_batches():
            mask = self._is_in(batch, wanted)
            row_ids += batch.column("_rowid").filter(mask).to_pylist()
        return self.base.dataset._take_rows(row_ids)

    # --- generations -----------------------------------------------------------------------

    def _generation_uri(self, region_id: uuid.UUID, generation: FlushedGeneration) -> str:
        return f"{self._table.uri.rstrip('/')}/{names.region_dir(region_id)}/{generation.path}"

    def _read_generation(self, generation: FlushedGeneration, work: Callable[[], T]) -> T:
        """Clean-up may take a generation away before it is opened, or while it is read."""
        try:
            return work()
        except (OSError, ValueError, RuntimeError, PenstockError) as error:
            raise _StaleView(f"generation {generation.path} cannot be read: {error}") from error

    def _generation_rows(self, region_id: uuid.UUID, generation: FlushedGeneration) -> pa.Table:
        uri = self._generation_uri(region_id, generation)

        def scan() -> pa.Table:
            dataset = lance.dataset(uri, storage_options=self._table.storage_options)
            return self._aligned(dataset, dataset.to_table())

        return self._read_generation(generation, scan)

    def _aligned(self, dataset: lance.LanceDataset, rows: pa.Table) -> pa.Table:
        ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
        fields = []
        for field in rows.schema:
            metadata = {} if field.name == TOMBSTONE else {FIELD_ID: str(ids[field.name])}
            fields.append(field.with_metadata(metadata))
        stamped = rows.cast(pa.schema(fields))
        batches = [self.shape.align(batch) for batch in stamped.to_batches()]
        return pa.Table.from_batches(batches, self.shape.wal_schema)


def read(
    table: BaseTable, writers: Callable[[], Iterable[RegionWriter]], work: Callable[[View], T]
) -> T:
    """Run `work` on a fresh view, and again on another if the first went stale under it."""
    stale: _StaleView | None = None
    for attempt in table.seams.attempts():
        try:
            return work(take_view(table, writers()))
        except _StaleView as error:
            stale = error
            if attempt + 1 >= _VIEW_ATTEMPTS:
                break
    raise Corruption(
        f"{table.uri}: {stale}; it is not merged into the base table, so its rows cannot be read. "
        "Restore the directory from a copy"
    ) from stale


def take_view(table: BaseTable, writers: Iterable[RegionWriter]) -> View:
    """A view of everything acknowledged before this call."""
    base = table.snapshot()
    usable = [writer for writer in writers if writer.failure is None]
    # Of two writers of a region in this process the one that claimed it last counts.
    live = {w.region_id: w for w in sorted(usable, key=lambda writer: writer.epoch)}
    regions = []
    for region_id in list_region_ids(table.store):
        regions.append(_region_view(table, base, region_id, live.get(region_id)))
    return View(table, base, regions)


def _region_view(
    table: BaseTable, base: BaseSnapshot, region_id: uuid.UUID, writer: RegionWriter | None
) -> RegionView:
    if writer is not None:
        try:
            writer.verify()
            snapshot = writer.snapshot()
            return _checked(base, snapshot.manifest, snapshot.memtables)
        except (Fenced, WriterClosed, WriterPoisoned):
            pass  # not ours any more: read it as any other process would
    chain = manifest_chain(table.store, region_id, table.seams)
    for _ in range(_VIEW_ATTEMPTS):
        manifest = chain.latest()
        if manifest is None:
            raise _StaleView(f"region {region_id} has files but no manifest")
        tail = _read_tail(table, base.shape, manifest)
        # What was flushed while the tail was read may be missing from both: look again.
        if chain.is_latest(manifest.version) or _same_rows(manifest, chain.latest()):
            return _checked(base, manifest, ((tail, tail.rows),) if tail.rows else ())
    raise _StaleView(f"region {region_id} keeps changing while it is read")


def _same_rows(before: RegionManifest, now: RegionManifest | None) -> bool:
    """Whether only the owner changed, so that the WAL behind both begins at the same entry."""
    return now is not None and (
        now.replay_after_wal_entry_position == before.replay_after_wal_entry_position
        and now.current_generation == before.current_generation
        and now.flushed_generations == before.flushed_generations
    )


def _checked(
    base: BaseSnapshot,
    manifest: RegionManifest,
    memtables: tuple[tuple[MemTable, int], ...],
) -> RegionView:
    """The unmerged part of a region, all of which must be there."""
    merged = base.details.merged(manifest.region_id)
    generations = tuple(g for g in manifest.flushed_generations if g.generation > merged)
    expected = list(range(merged + 1, manifest.current_generation))
    if [g.generation for g in generations] != expected:
        raise _StaleView(
            f"region {manifest.region_id} lists generations "
            f"{[g.generation for g in generations]} where {expected} are not merged yet"
        )
    return RegionView(manifest, generations, memtables)


def _read_tail(table: BaseTable, shape: TableShape, manifest: RegionManifest) -> MemTable:
    """The rows in the WAL that are in no generation."""
    tail = MemTable(manifest.current_generation, shape, _NO_INDEXES, 0.0)
    wal = Wal(table.store, manifest.region_id, table.seams)
    for entry in wal.tail(manifest.replay_after_wal_entry_position):
        if entry.generation < manifest.current_generation:
            continue
        for stored in entry.batches:
            batch = shape.align(stored)
            tail.append(prepare_rows(shape, _NO_INDEXES, batch, batch.nbytes, indexed=False))
    return tail


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)
