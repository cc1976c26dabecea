"""The sources of a read: the base table, flushed generations, and MemTables, behind one face.

Each yields rows in the table's own shape, whatever schema it was written with. Rows are numbered
within their source in the order they were written; the base numbers them by Lance's row ids. A
source knows nothing of the others: which of its rows are the newest is told from outside.

Generations never change, so what is read of them once (the dataset, its keys, its key index) is
kept in a cache with a limit in bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from penstock.errors import Corruption, ObjectNotFound, PenstockError
from penstock.index.bloom import BloomFilter
from penstock.index.primary_key import PkIndexReader, key_array, python_keys
from penstock.memwal import names
from penstock.memwal.flush import BLOOM_FILE
from penstock.memwal.fragments import offsets_of
from penstock.memwal.freshness import Mask
from penstock.memwal.manifest import FlushedGeneration
from penstock.memwal.memtable import MemTable
from penstock.memwal.shape import FIELD_ID, TableShape
from penstock.memwal.wal import TOMBSTONE
from penstock.storage.objects import ObjectStore

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

T = TypeVar("T")
Rows = npt.NDArray[np.int64]
Scanned = tuple[pa.RecordBatch, npt.NDArray[Any] | None, Mask | None]
"""Rows, the number of each within its source, and which are tombstones."""
ROW_ADDRESS = "_rowaddr"
ROW_ID = "_rowid"
_BATCH_ROWS = 8192
_BUFFERED_BATCHES = 4
_KEPT_ROWS = 200_000
"""Generations of up to so many rows are kept in memory, as far as the cache allows."""
_BLOCK_ROWS = 8192
_TAKES_BEFORE_KEPT = 2
"""Rows are taken one by one so often before whole columns are read instead."""


class StaleView(PenstockError):
    """Something the view rests on was merged and removed; take another view."""


class GenerationSource:
    """A flushed generation."""

    def __init__(
        self,
        store: ObjectStore,
        storage_options: Mapping[str, str] | None,
        region_id: uuid.UUID,
        flushed: FlushedGeneration,
    ) -> None:
        self.region_id = region_id
        self.generation = flushed.generation
        self.path = flushed.path
        self._store = store
        self.key = f"{names.region_dir(region_id)}/{flushed.path}"
        self.uri = f"{store.uri.rstrip('/')}/{self.key}"
        self._options = dict(storage_options) if storage_options else None
        self._dataset: lance.LanceDataset | None = None
        self._reader: PkIndexReader | None = None
        self._bloom: BloomFilter | None = None
        self._bloom_read = False
        self._keys: pa.Array | None = None
        self._rows = flushed.physical_rows or 0
        self._size_bytes = flushed.in_memory_bytes or 0
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._numbers: npt.NDArray[np.int64] | None = None
        self._ids: dict[str, int] | None = None
        self._takes = 0
        self._compared: tuple[TableShape, bool] | None = None

    @property
    def label(self) -> str:
        return f"region_{self.region_id}[gen={self.generation}]"

    @property
    def rows(self) -> int:
        """Rows in its files, as far as the manifest says."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """What is kept in memory of it, roughly."""
        keys = 0 if self._keys is None else int(self._keys.nbytes)
        bloom = 0 if self._bloom is None else self._bloom.nbytes
        kept = sum(int(column.nbytes) for column in list(self._columns.values()))
        return 64_000 + keys + bloom + kept

    def guarded(self, work: Callable[[], T]) -> T:
        """Clean-up may take a generation away before it is opened, or while it is read."""
        try:
            return work()
        except (OSError, ValueError, RuntimeError, PenstockError) as error:
            raise StaleView(f"generation {self.path} cannot be read: {error}") from error

    @property
    def dataset(self) -> lance.LanceDataset:
        if self._dataset is None:
            dataset = self.guarded(lambda: lance.dataset(self.uri, storage_options=self._options))
            fields = dataset.lance_schema.fields()
            # Whoever sees the dataset, on whatever thread, sees these too.
            self._ids = {field.name(): field.id() for field in fields}
            self._dataset = dataset
        return self._dataset

    @property
    def reader(self) -> PkIndexReader:
        if self._reader is None:
            self._reader = self.guarded(lambda: PkIndexReader(self.uri, self._options))
        return self._reader

    @property
    def has_keys(self) -> bool:
        """Whether its keys are in memory."""
        return self._keys is not None

    def keys(self) -> pa.Array:
        if self._keys is None:
            self._keys = self.guarded(lambda: self.reader.keys_by_row())
        return self._keys

    @property
    def bloom(self) -> BloomFilter | None:
        """Which keys it may hold; None if it has no filter."""
        if not self._bloom_read:
            try:
                data = self._store.get(f"{self.key}/{BLOOM_FILE}").data
                self._bloom = BloomFilter.from_bytes(data)
            except ObjectNotFound:
                self._bloom = None
            except Corruption as error:
                raise Corruption(
                    f"{self.uri}/{BLOOM_FILE} is damaged: {error}; remove it (lookups are only "
                    "slower without), or restore it from a copy"
                ) from error
            self._bloom_read = True
        return self._bloom

    def may_contain(self, columns: Sequence[pa.Array]) -> Mask | None:
        """What the bloom filter says of each key, or None if there is no filter."""
        bloom = self.bloom
        return None if bloom is None else bloom.may_contain(columns)

    def answers_from_memory(self, keys: pa.Array) -> bool:
        """Whether `find` reads nothing for these keys."""
        return self._reader is not None and self._reader.in_memory(keys)

    def find(self, keys: pa.Array) -> Rows:
        """The newest row with each key, or -1."""
        return self.guarded(lambda: self.reader.newest_many(keys))

    def take(self, rows: Rows, shape: TableShape, columns: Sequence[str]) -> pa.Table:
        """Rows by number, with their tombstone flag."""

        wanted = [*columns, TOMBSTONE]
        self._takes += 1
        if self._takes > _TAKES_BEFORE_KEPT:
            self._kept_columns(shape, columns)
        kept = self._numbers is not None and all(name in self._columns for name in wanted)
        if self._numbers is not None and kept and self.is_current(shape):
            at = np.searchsorted(self._numbers, rows)
            if len(at) == 1:  # slices are views, and many times faster than `take`
                first = int(at[0])
                return pa.table({name: self._columns[name].slice(first, 1) for name in wanted})
            places = pa.array(at)
            return pa.table({name: self._columns[name].take(places) for name in wanted})

        def work() -> pa.Table:
            dataset = self.dataset
            if not self.is_current(shape):
                taken = dataset._take_rows(rows.tolist())
                return self._aligned(taken, shape).select([*columns, TOMBSTONE])
            taken = dataset._take_rows(rows.tolist(), columns=[*columns, TOMBSTONE])
            if taken.num_rows != len(rows):
                raise ValueError(f"{len(rows)} rows are indexed and {taken.num_rows} are there")
            return taken

        return self.guarded(work)

    def scan(
        self,
        shape: TableShape,
        columns: Sequence[str],
        where: Filter | None,
        *,
        buffer_bytes: int | None = None,
        picked: Callable[[], BitMap | None] | None = None,
    ) -> Iterator[Scanned]:
        """Rows that match, tombstones among them.

        A generation that is small enough is read once, column by column, and then kept. With
        `buffer_bytes` it is not kept, and about so much of it is in memory at a time. `picked`
        may know which rows are the only ones that can match.
        """
        needed = list(columns)
        if where is not None:
            needed += [name for name in where.columns if name not in needed]
        if where is not None and picked is not None and not self._has_columns(needed):
            chosen = picked()
            if chosen is not None:
                self._takes += 1
                yield from self._scan_picked(chosen, needed, columns, where)
                return
        kept = None if buffer_bytes else self._kept_columns(shape, needed)
        if kept is not None:
            yield from self._scan_kept(kept, columns, where)
            return
        dataset = self.dataset
        pushed = self.is_current(shape)
        if not pushed:
            needed = [f.name for f in dataset.schema if f.name != TOMBSTONE]
        limits: dict[str, Any] = {}
        if buffer_bytes:
            row_bytes = max(1, self._size_bytes // max(1, self._rows))
            rows = buffer_bytes // _BUFFERED_BATCHES // row_bytes
            limits["batch_size"] = min(_BATCH_ROWS, max(1, rows))
            limits["batch_readahead"] = 1
            limits["io_buffer_size"] = buffer_bytes
        batches = self.guarded(
            lambda: iter(
                dataset.scanner(
                    columns=[*(needed if not pushed else columns), TOMBSTONE],
                    filter=where.sql if where is not None and pushed else None,
                    with_row_address=True,
                    **limits,
                ).to_reader()
            )
        )
        while True:
            batch = self.guarded(lambda: next(batches, None))
            if batch is None:
                return
            numbers = offsets_of(batch.column(ROW_ADDRESS).to_numpy())
            dead = np.asarray(batch.column(TOMBSTONE))
            if not pushed:
                table = pa.Table.from_batches([batch]).drop_columns([ROW_ADDRESS])
                batch = one_batch(self._aligned(table, shape))
            yield from _matching(batch, numbers, dead, columns, None if pushed else where)

    def written(
        self, shape: TableShape, columns: Sequence[str], first: int, count: int
    ) -> Iterator[pa.RecordBatch]:
        """Rows by number as they were written, superseded ones too, with their tombstone flag."""
        current = self.is_current(shape)
        schema = self.dataset.schema
        needed = list(columns) if current else [f.name for f in schema if f.name != TOMBSTONE]
        batches = self.guarded(
            lambda: iter(
                self.dataset.scanner(
                    columns=[*needed, TOMBSTONE],
                    offset=first,
                    limit=count,
                    with_row_id=True,
                    include_deleted_rows=True,
                ).to_reader()
            )
        )
        while True:
            batch = self.guarded(lambda: next(batches, None))
            if batch is None:
                return
            rows = pa.Table.from_batches([batch]).drop_columns([ROW_ID])
            aligned = rows if current else self._aligned(rows, shape)
            yield one_batch(aligned.select([*columns, TOMBSTONE]))

    def _kept_columns(self, shape: TableShape, needed: Sequence[str]) -> pa.Table | None:
        """The columns from memory, read into it if need be; None if the generation is large."""
        if not 0 < self._rows <= _KEPT_ROWS or not self.is_current(shape):
            return None
        missing = [name for name in (*needed, TOMBSTONE) if name not in self._columns]
        if missing or self._numbers is None:
            rows = self.guarded(
                lambda: self.dataset.scanner(columns=missing, with_row_address=True).to_table()
            )
            self._numbers = offsets_of(rows.column(ROW_ADDRESS).to_numpy())
            for name in missing:
                self._columns[name] = rows.column(name)
        return pa.table({name: self._columns[name] for name in (*needed, TOMBSTONE)})

    def _has_columns(self, needed: Sequence[str]) -> bool:
        """Whether they are in memory, or better be read into it by now."""
        if all(name in self._columns for name in needed):
            return True
        return self._rows <= _KEPT_ROWS and self._takes >= _TAKES_BEFORE_KEPT

    def _scan_picked(
        self, rows: BitMap, needed: Sequence[str], columns: Sequence[str], where: Filter
    ) -> Iterator[Scanned]:
        if not rows:
            return
        listed = ",".join(map(str, rows))  # addresses, as there is one fragment, number 0
        found = self.guarded(
            lambda: self.dataset.scanner(
                columns=[*needed, TOMBSTONE],
                filter=f"{ROW_ADDRESS} IN ({listed})",
                with_row_address=True,
            ).to_table()
        )
        for batch in found.to_batches():
            numbers = offsets_of(batch.column(ROW_ADDRESS).to_numpy())
            dead = np.asarray(batch.column(TOMBSTONE))
            yield from _matching(batch, numbers, dead, columns, where)

    def _scan_kept(
        self, kept: pa.Table, columns: Sequence[str], where: Filter | None
    ) -> Iterator[Scanned]:
        assert self._numbers is not None
        first = 0
        for batch in kept.to_batches():
            numbers = self._numbers[first : first + batch.num_rows]
            first += batch.num_rows
            dead = np.asarray(batch.column(TOMBSTONE))
            yield from _matching(batch, numbers, dead, columns, where)

    def is_current(self, shape: TableShape) -> bool:
        """Whether its columns are those of the table today, so that Lance can do the work."""
        known = self._compared
        if known is None or known[0] is not shape:
            schema = self.dataset.schema
            assert self._ids is not None
            current = all(
                self._ids.get(field.name) == shape.field_ids[field.name]
                and schema.field(field.name).type == field.type
                for field in shape.schema
            )
            known = self._compared = (shape, current)
        return known[1]

    def field_id(self, column: str) -> int | None:
        """The field id of a column, by the name it had when the generation was written."""
        _ = self.dataset
        assert self._ids is not None
        return self._ids.get(column)

    def _aligned(self, rows: pa.Table, shape: TableShape) -> pa.Table:
        assert self._ids is not None
        fields = []
        for field in rows.schema:
            known = {} if field.name == TOMBSTONE else {FIELD_ID: str(self._ids[field.name])}
            fields.append(field.with_metadata(known))
        stamped = rows.cast(pa.schema(fields))
        batches = [shape.align(batch) for batch in stamped.to_batches()]
        return pa.Table.from_batches(batches, shape.wal_schema)


class MemTableSource:
    """The first rows of a MemTable, as many as there were when the view was taken."""

    def __init__(self, memtable: MemTable, rows: int, region_id: uuid.UUID) -> None:
        self.memtable = memtable
        self.rows = rows
        self.region_id = region_id
        self.generation = memtable.generation

    @property
    def label(self) -> str:
        return f"region_{self.region_id}[gen={self.generation}]"

    def keys(self) -> pa.Array:
        return key_array(self.memtable.table(self.rows), self.memtable.shape.key_columns)

    def find(self, keys: pa.Array) -> Rows:
        """The newest row with each key, or -1."""
        return self.memtable.find_many(python_keys(keys), self.rows)

    def scan(
        self, shape: TableShape, columns: Sequence[str], where: Filter | None
    ) -> Iterator[Scanned]:
        """Rows that match, tombstones among them."""
        first = 0
        for batch in _in_blocks(self.memtable.table(self.rows).to_batches()):
            rows = shape.align(batch)
            numbers = np.arange(first, first + rows.num_rows)
            first += rows.num_rows
            dead = np.asarray(rows.column(TOMBSTONE))
            yield from _matching(rows, numbers, dead, columns, where)


class BaseSource:
    """The base table at one version."""

    label = "base_table[gen=0]"

    def __init__(self, dataset: lance.LanceDataset, *, numbered: bool) -> None:
        self.dataset = dataset
        self.numbered = numbered

    def scan(
        self, shape: TableShape, columns: Sequence[str], where: Filter | None
    ) -> Iterator[Scanned]:
        """Rows that match, with their row ids if somebody asks for them."""
        # A scan of no columns at all needs one to know how many rows there are.
        numbered = self.numbered or not columns
        scanner = self.dataset.scanner(
            columns=list(columns),
            filter=where.sql if where is not None else None,
            with_row_id=numbered,
        )
        for batch in scanner.to_batches():
            if not numbered:
                yield batch, None, None
                continue
            numbers = batch.column(ROW_ID).to_numpy()
            # Rows without columns would lose their number: keep the row ids then.
            yield (batch.select(list(columns)) if columns else batch), numbers, None


FreshSource = GenerationSource | MemTableSource
Source = BaseSource | GenerationSource | MemTableSource


def _matching(
    rows: pa.RecordBatch,
    numbers: npt.NDArray[Any],
    dead: Mask,
    columns: Sequence[str],
    where: Filter | None,
) -> Iterator[Scanned]:
    """These columns of the rows in memory that match, if there are any."""
    if where is not None:
        matches = where.mask(rows)
        if not matches.all():
            rows = chosen_rows(rows, matches)
            numbers, dead = numbers[matches], dead[matches]
    if rows.num_rows:
        yield rows.select(list(columns)), numbers, dead


def _in_blocks(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows with small batches put together: each costs as much as thousands of rows."""
    small: list[pa.RecordBatch] = []
    waiting_rows = 0
    for batch in batches:
        if small and waiting_rows + batch.num_rows > _BLOCK_ROWS:
            yield pa.concat_batches(small) if len(small) > 1 else small[0]
            small, waiting_rows = [], 0
        small.append(batch)
        waiting_rows += batch.num_rows
    if small:
        yield pa.concat_batches(small) if len(small) > 1 else small[0]


def chosen_rows(rows: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    """The rows for which the mask is true. `take` is many times faster than `filter` here."""
    return rows.take(pa.array(np.flatnonzero(mask)))


def one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def tombstone_free(rows: pa.Table) -> pa.Table:
    kept = rows.filter(pc.invert(rows.column(TOMBSTONE)))
    return kept.drop_columns([TOMBSTONE])
