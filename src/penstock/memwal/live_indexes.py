"""The live indexes of a MemTable: one mirror for each index the table maintains.

Encoding a batch (partitions and codes of vectors, terms of texts) reads only the models and may
run on many threads at once; appending what came out is cheap and happens in the MemTable's order.
Vectors of a large batch are encoded on another thread, beside the texts and the write to the WAL:
that work is NumPy's and leaves the interpreter free.
Kinds without a mirror here are left to the flushed generation's own index.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.index.base import IndexSpec
from penstock.index.ivf import IvfIndex
from penstock.index.scalar import ScalarIndex
from penstock.index.text import TextIndex

_PARALLEL_ROWS = 256

LiveIndex = IvfIndex | TextIndex | ScalarIndex


@dataclass(frozen=True, slots=True)
class IndexDeltas:
    """What one batch adds to each index, for the MemTable whose indexes encoded it."""

    encoder: LiveIndexes
    deltas: tuple[Any, ...]

    def settled(self) -> IndexDeltas:
        """The same with everything worked out, waiting for what is not yet."""
        if not any(isinstance(delta, Future) for delta in self.deltas):
            return self
        done = (d.result() if isinstance(d, Future) else d for d in self.deltas)
        return IndexDeltas(self.encoder, tuple(done))


class LiveIndexes:
    def __init__(self, specs: Sequence[IndexSpec], schema: pa.Schema) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._schema = schema
        self.by_name: dict[str, LiveIndex] = {}
        for spec in specs:
            index = _mirror(spec, schema)
            if index is not None:
                self.by_name[spec.name] = index

    def successor(self) -> LiveIndexes:
        """Empty indexes for the next MemTable; texts keep the words they have learnt."""
        following = LiveIndexes([], self._schema)
        following._specs = self._specs
        for name, index in self.by_name.items():
            if isinstance(index, TextIndex):
                following.by_name[name] = index.successor()
            else:
                made = _mirror(self._specs[name], self._schema)
                assert made is not None
                following.by_name[name] = made
        return following

    def understands(self, deltas: IndexDeltas) -> bool:
        """Whether deltas mean the same here: term ids are those of one vocabulary."""
        if deltas.encoder is self:
            return True
        return all(
            not isinstance(index, TextIndex)
            or index.analyzer is getattr(deltas.encoder.by_name.get(name), "analyzer", None)
            for name, index in self.by_name.items()
        )

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def encode(self, batch: pa.RecordBatch, pool: Executor | None = None) -> IndexDeltas:
        """What a batch adds; vectors may still be under way if there is a pool."""
        if pool is None or batch.num_rows < _PARALLEL_ROWS:
            pool = None
        begun: dict[str, Any] = {}
        if pool is not None:
            for name, index in self.by_name.items():
                if isinstance(index, IvfIndex):
                    begun[name] = pool.submit(_encode, index, batch)
        deltas = (
            begun[name] if name in begun else _encode(index, batch)
            for name, index in self.by_name.items()
        )
        return IndexDeltas(self, tuple(deltas))

    def append(self, deltas: IndexDeltas, first_row: int) -> None:
        for index, delta in zip(self.by_name.values(), deltas.deltas, strict=True):
            index.append(delta, first_row)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self.by_name.values())


def _mirror(spec: IndexSpec, schema: pa.Schema) -> LiveIndex | None:
    if spec.vector is not None and spec.vector.centroids is not None:
        return IvfIndex(spec) if spec.vector.metric in ("l2", "cosine", "dot") else None
    if spec.kind == "fts":
        return TextIndex(spec)
    if spec.kind in ("btree", "bitmap"):
        return ScalarIndex(spec, schema.field(spec.column).type)
    return None


def _encode(index: LiveIndex, batch: pa.RecordBatch) -> Any:
    column = batch.column(index.column)
    if not isinstance(index, IvfIndex):
        return index.encode(column)
    valid = None
    if column.null_count:
        valid = np.asarray(column.is_valid())
    return index.encode(vectors_of(column), valid)


def vectors_of(column: pa.Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A fixed-size-list column as a matrix, one row each; rows that are null hold anything."""
    width = column.type.list_size
    values = column.values.slice(column.offset * width, len(column) * width)
    matrix: np.ndarray[Any, np.dtype[np.float32]] = np.asarray(values).reshape(-1, width)
    return matrix
