"""Vectors in memory: those of MemTables and of generations, ready to be compared with a query.

What lies in front of the base is small beside it and is searched by every query, while opening
an index of each generation costs more than comparing its vectors. So a generation's vectors are
read once, assigned to the partitions of the base's own index, and kept in a cache with a limit in
bytes. Generations that do not fit are left to their own indexes in Lance; which ones these are
depends on their sizes only, so that a search never drives out what the next one needs.

A MemTable's vectors lie in many small batches. They are copied once into one matrix that grows
with it, and partitions come from its live index if it has one.

Invariant: row i of a block is row i of its source. Rows that cannot be found (deleted, without
a vector) are not `usable`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.index.base import SYSTEM_INDEX_PREFIX, load_index_specs
from penstock.index.growing import GrowingArray
from penstock.index.ivf import NO_PARTITION, IvfIndex
from penstock.memwal.cache import ByteCache
from penstock.memwal.live_indexes import vectors_of
from penstock.memwal.memtable import MemTable
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import ROW_ADDRESS, GenerationSource, MemTableSource, StaleView
from penstock.memwal.wal import TOMBSTONE

if TYPE_CHECKING:
    from penstock.memwal.view import Reader, View

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

VECTOR_CACHE_BYTES = 512 << 20
_KNOWN_COLUMNS = 64
_EXACT_KINDS = ("ivf_flat", "ivf_hnsw_flat")
_OFFSET_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False)
class VectorColumn:
    """A column of vectors and the index of the base that answers for it, if there is one."""

    name: str
    field_id: int
    dimensions: int
    metric: str | None = None
    """The metric of the index; None without one."""
    compressed: bool = False
    """Whether distances from the index are approximate."""
    segments: frozenset[str] = frozenset()
    model: IvfIndex | None = None
    """The index's centroids, to tell a vector's partition; never holds rows."""


@dataclass(frozen=True, slots=True, eq=False)
class VectorBlock:
    """The vectors of one source."""

    vectors: Floats
    usable: Mask
    partitions: npt.NDArray[np.int32] | None
    model: IvfIndex | None

    @property
    def nbytes(self) -> int:
        partitions = 0 if self.partitions is None else self.partitions.nbytes
        return self.vectors.nbytes + self.usable.nbytes + partitions


def is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type))


def vector_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if is_vector(field.type)]


class VectorMemory:
    """What one reader keeps of vectors between searches."""

    def __init__(self) -> None:
        self.blocks: ByteCache[VectorBlock] = ByteCache(VECTOR_CACHE_BYTES)
        self._growing: weakref.WeakKeyDictionary[MemTable, _GrowingBlocks] = (
            weakref.WeakKeyDictionary()
        )
        self._columns: dict[tuple[int, str, str | None], VectorColumn] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, reader: Reader) -> VectorMemory:
        with _memories_lock:
            known = _memories.get(reader)
            if known is None:
                known = _memories[reader] = cls()
            return known

    def column(self, view: View, name: str, metric: str | None) -> VectorColumn:
        """The column as of a view, with the index for a metric (any metric if None)."""
        key = (view.base.version, name, metric)
        known = self._columns.get(key)
        if known is None:
            known = _describe(view, name, metric)
            with self._lock:
                if len(self._columns) >= _KNOWN_COLUMNS:
                    self._columns.clear()
                self._columns[key] = known
        return known

    def in_memory(self, view: View, column: VectorColumn) -> list[GenerationSource]:
        """The generations whose vectors are kept, smallest first as long as they fit."""
        sizes = [
            (physical_rows(view, source) * (column.dimensions * 4 + 5), number, source)
            for number, source in enumerate(view.sources)
            if isinstance(source, GenerationSource)
        ]
        left_bytes = self.blocks.limit_bytes
        kept = []
        for size_bytes, _, source in sorted(sizes, key=lambda size: size[:2]):
            # Lance can only search columns that are still what they were when it wrote them.
            if size_bytes <= left_bytes or not source._is_current(view.shape):
                left_bytes -= size_bytes
                kept.append(source)
        return kept

    def generation(self, view: View, source: GenerationSource, column: VectorColumn) -> VectorBlock:
        key = (source.region_id, source.path, column.field_id, column.segments)
        return self.blocks.get(key, lambda: _load(view, source, column))

    def memtable(self, view: View, source: MemTableSource, column: VectorColumn) -> VectorBlock:
        with self._lock:
            growing = self._growing.setdefault(source.memtable, _GrowingBlocks())
        return growing.block(view.shape, source, column)


_memories: weakref.WeakKeyDictionary[Reader, VectorMemory] = weakref.WeakKeyDictionary()
_memories_lock = threading.Lock()


def physical_rows(view: View, source: GenerationSource) -> int:
    if view.shape.key_columns:
        return len(view.freshness.newest(source))
    return sum(fragment.physical_rows for fragment in source.dataset.get_fragments())


def guarded(source: GenerationSource, work: Any) -> Any:
    """Clean-up may take a generation away while it is read."""
    try:
        return work()
    except (OSError, ValueError, RuntimeError) as error:
        raise StaleView(f"generation {source.path} cannot be read: {error}") from error


def take_rows(
    source: MemTableSource, rows: Rows, shape: TableShape, columns: Sequence[str]
) -> pa.Table:
    """Rows of a MemTable by number, in that order."""
    batches = source.memtable.table(source.rows).to_batches()
    ends = np.cumsum([batch.num_rows for batch in batches])
    numbers = np.searchsorted(ends, rows, side="right")
    pieces, order = [], []
    for number in np.unique(numbers):
        batch = shape.align(batches[number]).select(list(columns))
        here = np.flatnonzero(numbers == number)
        first = int(ends[number]) - batches[number].num_rows
        pieces.append(batch.take(pa.array(rows[here] - first)))
        order.append(here)
    back = np.argsort(np.concatenate(order), kind="stable")
    return pa.Table.from_batches(pieces).take(pa.array(back))


# --- the index of the base -----------------------------------------------------------------


def _describe(view: View, name: str, metric: str | None) -> VectorColumn:
    schema = view.shape.schema
    if name not in schema.names:
        raise InvalidInput(f"no column {name!r}; the table has {', '.join(schema.names)}")
    kind = schema.field(name).type
    if not is_vector(kind):
        there = ", ".join(vector_columns(schema)) or "none"
        raise InvalidInput(
            f"column {name!r} is {kind}, not a fixed-size list of floats; "
            f"columns with vectors: {there}"
        )
    plain = VectorColumn(name, view.shape.field_ids[name], kind.list_size)
    dataset = view.base.dataset
    for index in dataset.describe_indices():
        if list(index.field_names) != [name] or index.name.startswith(SYSTEM_INDEX_PREFIX):
            continue
        used = str(dict(index.details).get("metric_type", "")).lower()
        if not used or used != (metric or used):
            continue
        segments = frozenset(str(segment.uuid) for segment in index.segments)
        compressed = index.index_type.lower() not in _EXACT_KINDS
        known = replace(plain, metric=used, compressed=compressed, segments=segments)
        try:
            (spec,) = load_index_specs(dataset, [index.name])
        except InvalidInput:  # its files belong to another table; only Lance finds them
            return known
        if spec.vector is None or spec.vector.centroids is None or used == "hamming":
            return known
        bare = replace(spec.vector, codebook=None, sq_bounds=None)
        return replace(known, model=IvfIndex(replace(spec, vector=bare)))
    return plain


# --- blocks --------------------------------------------------------------------------------


def _load(view: View, source: GenerationSource, column: VectorColumn) -> VectorBlock:
    rows = physical_rows(view, source)
    vectors = np.zeros((rows, column.dimensions), dtype=np.float32)
    usable = np.zeros(rows, dtype=np.bool_)
    for part, numbers in _stored(view, source, column.name):
        values, valid = _matrix(part)
        vectors[numbers], usable[numbers] = values, valid
    if column.model is None:
        return VectorBlock(vectors, usable, None, None)
    partitions = column.model.encode(vectors, usable).partitions
    return VectorBlock(vectors, usable, partitions, column.model)


def _stored(view: View, source: GenerationSource, name: str) -> Iterator[tuple[pa.Array, Rows]]:
    """The live vectors of a generation and their row numbers, kept by nobody."""
    if not source._is_current(view.shape):
        for batch, numbers, dead in source.scan(view.shape, [name], None):
            live = np.flatnonzero(~dead) if dead is not None else np.arange(batch.num_rows)
            assert numbers is not None
            yield batch.column(name).take(pa.array(live)), numbers[live]
        return
    read = guarded(
        source,
        lambda: source.dataset.scanner(
            columns=[name], filter=f"{TOMBSTONE} = false", with_row_address=True
        ).to_table(),
    )
    for batch in read.to_batches():
        yield (
            batch.column(name),
            (np.asarray(batch.column(ROW_ADDRESS)) & _OFFSET_MASK).astype(np.int64),
        )


class _GrowingBlocks:
    """The vectors of one MemTable, column by column, as far as searches have asked for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._columns: dict[tuple[int, int], tuple[GrowingArray, GrowingArray]] = {}

    def block(self, shape: TableShape, source: MemTableSource, column: VectorColumn) -> VectorBlock:
        key = (column.field_id, column.dimensions)
        with self._lock:
            if key not in self._columns:
                fresh = (GrowingArray(np.float32, column.dimensions), GrowingArray(np.bool_))
                self._columns[key] = fresh
            vectors, usable = self._columns[key]
            if len(usable) < source.rows:
                added = source.memtable.table(source.rows).slice(len(usable))
                for batch in added.to_batches():
                    values, valid = _matrix(shape.align(batch).column(column.name))
                    valid &= ~np.asarray(batch.column(TOMBSTONE))
                    vectors.append(values)
                    usable.append(valid)
        partitions = model = None
        live = source.memtable.indexes.by_name.values()
        for index in live:
            if isinstance(index, IvfIndex) and index.column == column.name:
                known = index.partitions(source.rows)
                # Rows that the index has not reached yet belong to no partition.
                partitions = np.full(source.rows, NO_PARTITION, dtype=np.int32)
                partitions[: len(known)] = known
                model = index
                break
        rows = source.rows
        return VectorBlock(vectors.values(rows), usable.values(rows), partitions, model)


def _matrix(column: pa.Array) -> tuple[Floats, Mask]:
    """Vectors, one a row, and which of them can be compared at all."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    with np.errstate(over="ignore", invalid="ignore"):
        vectors = vectors_of(column).astype(np.float32, copy=False)
    valid = np.logical_and.reduce(np.isfinite(vectors), axis=1)
    if column.null_count:
        valid &= np.asarray(column.is_valid())
    return vectors, valid
