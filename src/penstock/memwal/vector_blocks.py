"""Vectors in memory: of MemTables, generations and unindexed rows, ready to be compared.

What lies in front of the base is small beside it and is searched by every query, while opening
an index of each generation costs more than comparing its vectors. So a generation's vectors are
read once, assigned to the partitions of the base's own index, and kept in a cache with a limit in
bytes. Generations that do not fit are left to their own indexes in Lance; which ones these are
depends on their sizes only, so that a search never drives out what the next one needs.

The same holds for base rows that the index does not cover yet, fragment by fragment: right after
a merge they are many, and Lance would read them all for every query.

A MemTable's vectors lie in many small batches. They are copied once into one matrix that grows
with it, and partitions come from its live index if it has one.

Invariant: row i of a block is row i of its source. Rows that cannot be found (deleted, without
a vector) are not `usable`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.index.base import SYSTEM_INDEX_PREFIX, load_index_specs
from penstock.index.growing import GrowingArray
from penstock.index.ivf import NO_PARTITION, IvfIndex
from penstock.memwal.cache import ByteCache
from penstock.memwal.fragments import contents, offsets_of
from penstock.memwal.index_choice import chosen_index
from penstock.memwal.live_indexes import vectors_of
from penstock.memwal.memtable import MemTable
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import ROW_ADDRESS, ROW_ID, GenerationSource, MemTableSource, StaleView
from penstock.memwal.vector_group import Part, VectorGroup
from penstock.memwal.wal import TOMBSTONE

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter
    from penstock.memwal.view import View

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

VECTOR_CACHE_BYTES = 512 << 20
_KNOWN_COLUMNS = 64
_KNOWN_GROUPS = 4
_GROUP_GENERATIONS = 4
"""So many generations are searched one by one; of more a group is made."""
_EXACT_KINDS = ("ivf_flat", "ivf_hnsw_flat")


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
    index: str | None = None
    """The name of the index."""
    has_others: bool = False
    """Whether there are other indexes on the column, which Lance might take."""
    segments: frozenset[str] = frozenset()
    model: IvfIndex | None = None
    """The index's centroids, to tell a vector's partition; never holds rows."""
    model_name: str = ""
    """The same for the same centroids, whichever segments the index has."""
    unindexed: tuple[tuple[str, lance.LanceFragment], ...] = ()
    """The fragments of the base that the index does not cover, each with its contents' name."""

    def nbytes(self, rows: int) -> int:
        """How large a block of so many rows is."""
        return rows * (self.dimensions * 4 + 9)


@dataclass(frozen=True, slots=True, eq=False)
class VectorBlock:
    """The vectors of one source."""

    vectors: Floats
    squares: Floats
    """Of each vector the sum of its squares."""
    usable: Mask
    partitions: npt.NDArray[np.int32] | None
    model: IvfIndex | None

    @property
    def nbytes(self) -> int:
        partitions = 0 if self.partitions is None else self.partitions.nbytes
        return self.vectors.nbytes + self.squares.nbytes + self.usable.nbytes + partitions

    @property
    def part(self) -> Part:
        """The rows that can be found, for a group."""
        found = np.flatnonzero(self.usable)
        partitions = None if self.partitions is None else self.partitions[found]
        return Part(len(self.usable), found, self.vectors[found], self.squares[found], partitions)


@dataclass(frozen=True, slots=True, eq=False)
class FragmentBlock:
    """The vectors of a fragment of the base, and the row id of each."""

    fragment: lance.LanceFragment
    block: VectorBlock
    row_ids: npt.NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + self.row_ids.nbytes

    def matching(self, view: View, where: Filter) -> Mask:
        """Which rows match a filter."""
        scanner = view.base.dataset.scanner(
            columns=[], filter=where.sql, fragments=[self.fragment], with_row_id=True
        )
        found = scanner.to_table().column(ROW_ID).to_numpy()
        return np.isin(self.row_ids, found)


def is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type))


def vector_columns(schema: pa.Schema) -> list[str]:
    return [field.name for field in schema if is_vector(field.type)]


class VectorMemory:
    """What one reader keeps of vectors between searches."""

    def __init__(self) -> None:
        self.blocks: ByteCache[VectorBlock | FragmentBlock] = ByteCache(
            VECTOR_CACHE_BYTES, "vectors"
        )
        self._growing: weakref.WeakKeyDictionary[MemTable, _GrowingBlocks] = (
            weakref.WeakKeyDictionary()
        )
        self._columns: dict[tuple[int, str, str | None], VectorColumn] = {}
        self._groups: dict[tuple[int, str], VectorGroup] = {}
        self._lock = threading.Lock()
        self._grouping = threading.Lock()

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
            (column.nbytes(physical_rows(view, source)), number, source)
            for number, source in enumerate(view.sources)
            if isinstance(source, GenerationSource)
        ]
        left_bytes = self.blocks.limit_bytes
        kept = []
        for size_bytes, _, source in sorted(sizes, key=lambda size: size[:2]):
            # Lance can only search columns that are still what they were when it wrote them.
            if size_bytes <= left_bytes or not source.is_current(view.shape):
                left_bytes -= size_bytes
                kept.append(source)
        return kept

    def generation(self, view: View, source: GenerationSource, column: VectorColumn) -> VectorBlock:
        block = self.blocks.get(_block_key(source, column), lambda: _load(view, source, column))
        assert isinstance(block, VectorBlock)
        return block

    def group(
        self, view: View, column: VectorColumn, generations: Sequence[GenerationSource]
    ) -> VectorGroup | None:
        """A group with most of these generations, if they are many; a new one if none has."""
        if len(generations) < _GROUP_GENERATIONS:
            return None
        key = (column.field_id, column.model_name)
        with self._grouping:
            group = self._groups.get(key)
        wanted = {source.uri: source for source in generations}
        if group is not None:
            inside = sum(uri in wanted for uri in group.generations)
            few_outside = len(wanted) - inside <= _GROUP_GENERATIONS
            if few_outside and 2 * inside >= len(group.generations):
                return group
        known = () if group is None else group.generations
        # Not under the lock: whoever needs no new group should not wait for one.
        parts = {
            uri: group.part(uri)
            if group is not None and uri in known
            else self.generation(view, source, column).part
            for uri, source in wanted.items()
        }
        group = VectorGroup(parts, column.model)
        with self._grouping:
            if len(self._groups) >= _KNOWN_GROUPS:
                self._groups.clear()
            self._groups[key] = group
        for source in generations:
            self.blocks.discard(_block_key(source, column))
        return group

    def unindexed(
        self, view: View, column: VectorColumn, beside: Iterable[GenerationSource]
    ) -> list[FragmentBlock] | None:
        """The base rows that the index does not cover; None if they are too many to keep.

        `beside` are the generations that are kept already.
        """
        if not column.unindexed:
            return []
        rows = sum(physical_rows(view, source) for source in beside)
        rows += sum(fragment.physical_rows for _, fragment in column.unindexed)
        if column.nbytes(rows) > self.blocks.limit_bytes:
            return None
        if view.shape.key_columns and view.sources and view.hidden_base_rows is None:
            return None
        found = []
        for which, fragment in column.unindexed:
            key = (which, column.field_id, column.model_name)
            block = self.blocks.get(key, partial(_load_fragment, view, fragment, column))
            assert isinstance(block, FragmentBlock)
            found.append(block)
        return found

    def memtable(self, view: View, source: MemTableSource, column: VectorColumn) -> VectorBlock:
        with self._lock:
            growing = self._growing.setdefault(source.memtable, _GrowingBlocks())
        return growing.block(view.shape, source, column)


def _block_key(source: GenerationSource, column: VectorColumn) -> Hashable:
    return (source.region_id, source.path, column.field_id, column.model_name)


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
    indexes = {
        index.name: index
        for index in dataset.describe_indices()
        if list(index.field_names) == [name]
        and not index.name.startswith(SYSTEM_INDEX_PREFIX)
        and _metric_of(index)
    }
    usable = [index.name for index in indexes.values() if _metric_of(index) == metric or not metric]
    if not usable:
        return plain
    index = indexes[chosen_index(view.base.details, plain.field_id, usable)]
    covered = {number for segment in index.segments for number in segment.fragment_ids}
    fragments = [f for f in dataset.get_fragments() if f.fragment_id not in covered]
    known = replace(
        plain,
        metric=_metric_of(index),
        compressed=index.index_type.lower() not in _EXACT_KINDS,
        index=index.name,
        has_others=len(indexes) > 1,
        segments=frozenset(str(segment.uuid) for segment in index.segments),
        unindexed=tuple((contents(fragment), fragment) for fragment in fragments),
    )
    try:
        (spec,) = load_index_specs(dataset, [index.name])
    except InvalidInput:  # its files belong to another table; only Lance finds them
        return known
    if spec.vector is None or spec.vector.centroids is None or known.metric == "hamming":
        return known
    bare = replace(spec.vector, codebook=None, sq_bounds=None)
    digest = hashlib.sha256(np.ascontiguousarray(spec.vector.centroids).tobytes()).hexdigest()
    model = IvfIndex(replace(spec, vector=bare))
    return replace(known, model=model, model_name=f"{known.metric} {digest}")


def _metric_of(index: Any) -> str:
    return str(dict(index.details).get("metric_type", "")).lower()


# --- blocks --------------------------------------------------------------------------------


def _load(view: View, source: GenerationSource, column: VectorColumn) -> VectorBlock:
    rows = physical_rows(view, source)
    vectors = np.zeros((rows, column.dimensions), dtype=np.float32)
    usable = np.zeros(rows, dtype=np.bool_)
    for part, numbers in _stored(view, source, column.name):
        values, valid = _matrix(part)
        vectors[numbers], usable[numbers] = values, valid
    return _block(vectors, usable, column)


def _block(vectors: Floats, usable: Mask, column: VectorColumn) -> VectorBlock:
    squares = _squares(vectors)
    if column.model is None:
        return VectorBlock(vectors, squares, usable, None, None)
    partitions = column.model.encode(vectors, usable).partitions
    return VectorBlock(vectors, squares, usable, partitions, column.model)


def _squares(vectors: Floats) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        squares: Floats = np.einsum("ij,ij->i", vectors, vectors)
    return squares


def _load_fragment(
    view: View, fragment: lance.LanceFragment, column: VectorColumn
) -> FragmentBlock:
    scanner = view.base.dataset.scanner(
        columns=[column.name], fragments=[fragment], with_row_id=True
    )
    rows = scanner.to_table()
    vectors, usable = _matrix(rows.column(column.name).combine_chunks())
    block = _block(vectors, usable, column)
    return FragmentBlock(fragment, block, rows.column(ROW_ID).to_numpy())


def _stored(view: View, source: GenerationSource, name: str) -> Iterator[tuple[pa.Array, Rows]]:
    """The live vectors of a generation and their row numbers, kept by nobody."""
    if not source.is_current(view.shape):
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
            offsets_of(np.asarray(batch.column(ROW_ADDRESS))),
        )


class _GrowingBlocks:
    """The vectors of one MemTable, column by column, as far as searches have asked for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._columns: dict[tuple[int, int], _GrowingBlock] = {}

    def block(self, shape: TableShape, source: MemTableSource, column: VectorColumn) -> VectorBlock:
        with self._lock:
            key = (column.field_id, column.dimensions)
            growing = self._columns.get(key)
            if growing is None:
                growing = self._columns[key] = _GrowingBlock(column.dimensions)
            growing.extend(shape, source, column.name)
        rows = source.rows
        partitions = model = None
        live = source.memtable.indexes.by_name
        for name in sorted(live, key=lambda name: name != column.index):
            index = live[name]
            field_id = source.memtable.shape.field_ids.get(index.column)
            if isinstance(index, IvfIndex) and field_id == column.field_id:
                partitions, model = index.partitions(rows), index
                if len(partitions) < rows:
                    # Rows that the index has not reached yet belong to no partition.
                    missing = np.full(rows - len(partitions), NO_PARTITION, dtype=np.int32)
                    partitions = np.concatenate([partitions, missing])
                break
        return VectorBlock(
            growing.vectors.values(rows),
            growing.squares.values(rows),
            growing.usable.values(rows),
            partitions,
            model,
        )


class _GrowingBlock:
    def __init__(self, dimensions: int) -> None:
        self.vectors = GrowingArray(np.float32, dimensions)
        self.squares = GrowingArray(np.float32)
        self.usable = GrowingArray(np.bool_)

    def extend(self, shape: TableShape, source: MemTableSource, name: str) -> None:
        if len(self.usable) >= source.rows:
            return
        added = source.memtable.table(source.rows, first=len(self.usable))
        for batch in added.to_batches():
            values, valid = _matrix(shape.align(batch).column(name))
            valid &= ~np.asarray(batch.column(TOMBSTONE))
            self.vectors.append(values)
            self.squares.append(_squares(values))
            self.usable.append(valid)


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
