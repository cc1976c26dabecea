"""Plans: trees of the specification's nodes, each of which streams rows and can be explained.

A node yields `Chunk`s: rows of one source, with their numbers in it where somebody further up asks
which of them are the newest. Nodes of a search yield hits instead (`hits`). What a node did (rows,
bytes, time of its own and below) is counted as the rows pass, and printed by
`explain(analyze=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.index.primary_key import key_array
from penstock.memwal.sources import (
    BaseSource,
    GenerationSource,
    MemTableSource,
    Scanned,
    Source,
    chosen_rows,
)
from penstock.storage.clock import Clock, SystemClock

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter
    from penstock.memwal.packed_reads import PackedLookup
    from penstock.memwal.view import View


class Piece(Protocol):
    """What nodes hand on."""

    @property
    def num_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Piece)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one source, or of several that nobody needs to tell apart any more."""

    rows: pa.RecordBatch
    source: Source | None
    numbers: npt.NDArray[Any] | None = None
    """Of each row its number in the source; in the base, its row id."""
    dead: npt.NDArray[np.bool_] | None = None
    """Which rows are tombstones; None where there can be none."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.num_rows)

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)

    def kept(self, mask: npt.NDArray[np.bool_]) -> Chunk:
        """The rows for which the mask is true; numbers are not kept."""
        if mask.all():
            return Chunk(self.rows, self.source)
        return Chunk(chosen_rows(self.rows, mask), self.source)


class Node(Generic[P]):
    """A step of a plan."""

    def __init__(self, *children: Node[Any], clock: Clock | None = None) -> None:
        self.children = children
        self.rows = 0
        self.bytes = 0
        self.ms = 0.0
        self._clock = clock or SystemClock()

    def describe(self) -> str:
        raise NotImplementedError

    def _stream(self) -> Iterator[P]:
        raise NotImplementedError

    def stream(self) -> Iterator[P]:
        """The node's rows, counted on their way."""
        pieces = self._stream()
        while True:
            began_ms = self._clock.monotonic_ms()
            piece = next(pieces, None)
            self.ms += self._clock.monotonic_ms() - began_ms
            if piece is None:
                return
            self.rows += piece.num_rows
            self.bytes += piece.nbytes
            yield piece

    def explained(self, *, analyze: bool) -> str:
        """The tree as text; with `analyze` it is run first."""
        if analyze:
            for _ in self.stream():
                continue
        return self.explain(analyze=analyze)

    def explain(self, *, analyze: bool = False, depth: int = 0) -> str:
        """The tree below this node, a line each; with what each did if it has run."""
        line = "  " * depth + self.describe()
        if analyze:
            line += f"  -- rows={self.rows:,} bytes={self.bytes:,} time={self.ms:.2f} ms"
        below = [child.explain(analyze=analyze, depth=depth + 1) for child in self.children]
        return "\n".join([line, *below])


class ScanExec(Node[Chunk]):
    """Reads one source, with the filter and the projection pushed into it."""

    def __init__(
        self,
        view: View,
        source: Source,
        columns: Sequence[str],
        where: Filter | None,
        lookup: PackedLookup | None = None,
    ) -> None:
        super().__init__()
        self._lookup = None if isinstance(source, MemTableSource) else lookup
        self._view = view
        self._source = source
        self._columns = list(columns)
        self._where = where

    def describe(self) -> str:
        condition = self._where.sql if self._where is not None else ""
        packed = "" if self._lookup is None else f", packed=[{self._lookup.label}]"
        return f"ScanExec: {self._source.label}, filter=[{condition}]{packed}"

    def _stream(self) -> Iterator[Chunk]:
        for rows, numbers, dead in self._scan():
            yield Chunk(rows, self._source, numbers, dead)

    def _scan(self) -> Iterator[Scanned]:
        source, lookup, shape = self._source, self._lookup, self._view.shape
        if lookup is not None and isinstance(source, BaseSource):
            return lookup.scan_base(self._columns, numbered=source.numbered)
        if lookup is not None and isinstance(source, GenerationSource):
            picked = partial(lookup.rows_of_generation, source)
            return source.scan(shape, self._columns, self._where, picked=picked)
        return source.scan(shape, self._columns, self._where)


class UnionExec(Node[P]):
    """The rows of its inputs, one input after the other."""

    def describe(self) -> str:
        return "UnionExec"

    def _stream(self) -> Iterator[P]:
        for child in self.children:
            yield from child.stream()

    def count(self) -> None:
        """Take over what the inputs did, where somebody has asked them one by one."""
        self.rows = sum(child.rows for child in self.children)
        self.bytes = sum(child.bytes for child in self.children)
        self.ms = sum(child.ms for child in self.children)


class DeduplicateExec(Node[Chunk]):
    """Of each key the newest row, unless it is a tombstone.

    Streams: whether a row is the newest was worked out from the keys alone.
    """

    def __init__(self, view: View, child: Node[Chunk]) -> None:
        super().__init__(child)
        self._view = view

    def describe(self) -> str:
        key = ", ".join(self._view.shape.key_columns)
        return f"DeduplicateExec: partition_by=[{key}], order_by=[_gen DESC, _rowaddr DESC]"

    def _stream(self) -> Iterator[Chunk]:
        for chunk in self.children[0].stream():
            kept = self._kept(chunk)
            if kept is not None and kept.rows.num_rows:
                yield kept

    def _kept(self, chunk: Chunk) -> Chunk | None:
        mask = None if chunk.dead is None else ~chunk.dead
        if self._view.shape.key_columns and self._view.sources:
            newest = self._newest(chunk)
            if newest is not None:
                mask = newest if mask is None else mask & newest
        if mask is None:
            return chunk
        return chunk.kept(mask) if mask.any() else None

    def _newest(self, chunk: Chunk) -> npt.NDArray[np.bool_] | None:
        view = self._view
        if not isinstance(chunk.source, BaseSource):
            assert chunk.numbers is not None
            assert chunk.source is not None
            newest: npt.NDArray[np.bool_] = view.freshness.newest(chunk.source)[chunk.numbers]
            return newest
        if view.freshness.empty:
            return None
        hidden = view.hidden_base_rows
        if hidden is not None:
            assert chunk.numbers is not None
            return ~hidden.contains(chunk.numbers)
        # Too many keys in the base to keep them: compare with those in front of it.
        keys = key_array(chunk.rows, view.shape.key_columns)
        older: npt.NDArray[np.bool_] = np.asarray(pc.is_in(keys, value_set=view.freshness.distinct))
        return ~older


class ProjectionExec(Node[Chunk]):
    """Leaves out columns that were only read to decide."""

    def __init__(self, columns: Sequence[str], child: Node[Chunk]) -> None:
        super().__init__(child)
        self._columns = list(columns)

    def describe(self) -> str:
        return f"ProjectionExec: [{', '.join(self._columns)}]"

    def _stream(self) -> Iterator[Chunk]:
        for chunk in self.children[0].stream():
            yield Chunk(chunk.rows.select(self._columns), chunk.source)


class GlobalLimitExec(Node[Chunk]):
    """At most so many rows, after leaving out the first ones; stops its input when it has them."""

    def __init__(self, limit: int | None, offset: int, child: Node[Chunk]) -> None:
        super().__init__(child)
        self._limit = limit
        self._offset = offset

    def describe(self) -> str:
        skip = f", offset={self._offset}" if self._offset else ""
        return f"GlobalLimitExec: limit={'none' if self._limit is None else self._limit}{skip}"

    def _stream(self) -> Iterator[Chunk]:
        left, skip = self._limit, self._offset
        if left == 0:
            return
        for chunk in self.children[0].stream():
            rows = chunk.rows
            if skip:
                skipped = min(skip, rows.num_rows)
                skip -= skipped
                rows = rows.slice(skipped)
            if left is not None:
                rows = rows.slice(0, left)
                left -= rows.num_rows
            if rows.num_rows:
                yield Chunk(rows, chunk.source)
            if left == 0:
                return
