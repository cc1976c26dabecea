"""Comparing vectors in memory with a query: the nearest rows of a block or a group, exactly.

Where the table has an index, only rows in the partitions nearest the query are compared; if these
have too few that count, every row is. For l2 one product says which rows can be the nearest, and
only those are compared digit by digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penstock.blas import one_thread
from penstock.index.ivf import IvfIndex, exact_distances
from penstock.memwal.vector_blocks import VectorBlock, VectorColumn
from penstock.memwal.vector_group import VectorGroup

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

DEFAULT_NPROBES = 20
_BLOCK_ROWS = 1 << 16
"""So many rows are compared at a time, so that memory stays bounded."""


@dataclass(frozen=True, slots=True, eq=False)
class VectorSearch:
    """What is asked of every source."""

    column: VectorColumn
    query: Floats
    metric: str
    rows: int
    """How many rows are wanted, those skipped by the offset included."""
    nprobes: int | None
    refine: int | None
    where: Filter | None
    low: float
    high: float
    _probes: dict[int, Rows] = field(default_factory=dict, repr=False)

    def probes(self, model: IvfIndex) -> Rows:
        """The partitions to look into."""
        known = self._probes.get(id(model))
        if known is None:
            found = model.probes(self.query, self.nprobes or DEFAULT_NPROBES)
            known = self._probes[id(model)] = found.astype(np.int64)
        return known

    def probed(self, model: IvfIndex) -> Mask:
        """Of each partition whether to look into it; the last stands for rows without one."""
        wanted = np.zeros(model.num_partitions + 1, dtype=np.bool_)
        wanted[self.probes(model)] = True
        wanted[-1] = True
        return wanted

    @property
    def uses_index(self) -> bool:
        return self.column.metric == self.metric

    @property
    def unbounded(self) -> bool:
        return self.low == -math.inf and self.high == math.inf

    def in_range(self, distances: Floats) -> Mask:
        # No distance is not in range: comparisons with NaN are false.
        inside: Mask = distances >= self.low
        return inside if self.high == math.inf else inside & (distances < self.high)

    def is_beyond(self, distances: Floats) -> bool:
        """Whether anything further away than these is out of range."""
        return self.high < math.inf and len(distances) > 0 and bool(distances.max() >= self.high)


@one_thread()
def nearest(block: VectorBlock, counting: Mask, search: VectorSearch) -> tuple[Rows, Floats]:
    """Of the rows that count the nearest, as many as are wanted."""
    rows = _probed(block, counting, search)
    if rows is not None and search.metric == "l2" and search.unbounded:
        vectors, squares = block.vectors[rows], block.squares[rows]
        likely = _likely(squares - 2 * (vectors @ search.query), squares, None, search)
        distances = _exact(vectors[likely], search)
        if search.in_range(distances).all():
            return rows[likely], distances
    distances = _distances(block, rows, search)
    kept = search.in_range(distances)
    if rows is not None and np.count_nonzero(kept) < search.rows:
        # Not enough in the nearest partitions: every row is compared.
        rows, distances = None, _distances(block, None, search)
        kept = search.in_range(distances)
    if rows is None:
        kept &= counting
    chosen = np.flatnonzero(kept)
    if len(chosen) > search.rows:
        nearest = np.argpartition(distances[chosen], search.rows - 1)[: search.rows]
        chosen = chosen[nearest]
    return chosen if rows is None else rows[chosen], distances[chosen]


def _likely(nearness: Floats, squares: Floats, counts: Mask | None, search: VectorSearch) -> Rows:
    """The rows that can be among the nearest for l2, by one product and a bound on its error.

    |v - q|^2 = |v|^2 - 2vq + |q|^2 costs a third of the difference, but loses digits where vectors
    are long and close together. So all are kept that the lost digits could make the nearest.
    """
    if counts is not None and not counts.all():
        nearness[~counts] = np.inf
    if len(nearness) > search.rows:
        query = search.query
        error = np.finfo(np.float32).eps * len(query) * float(squares.max() + query @ query)
        furthest = np.partition(nearness, search.rows - 1)[search.rows - 1]
        likely = ~(nearness > furthest + 2 * error)
        if counts is not None:
            likely &= counts
        return np.flatnonzero(likely)
    return np.arange(len(nearness)) if counts is None else np.flatnonzero(counts)


def _probed(block: VectorBlock, counting: Mask, search: VectorSearch) -> Rows | None:
    """The rows to compare: those that count in the nearest partitions; None stands for all."""
    live = int(np.count_nonzero(counting))
    model = block.model
    if block.partitions is not None and model is not None and model.metric == search.metric:
        rows = np.flatnonzero(search.probed(model)[block.partitions] & counting)
        if len(rows) >= min(search.rows, live):
            return rows
    return np.flatnonzero(counting) if live * 4 < len(counting) else None


def _distances(block: VectorBlock, rows: Rows | None, search: VectorSearch) -> Floats:
    count = len(block.vectors) if rows is None else len(rows)
    parts = [np.empty(0, dtype=np.float32)]
    for at in range(0, count, _BLOCK_ROWS):
        end = min(at + _BLOCK_ROWS, count)
        vectors = block.vectors[at:end] if rows is None else block.vectors[rows[at:end]]
        parts.append(_exact(vectors, search))
    return np.concatenate(parts)


def _exact(vectors: Floats, search: VectorSearch) -> Floats:
    """Distances; NaN for vectors without a direction where the metric needs one."""
    with np.errstate(over="ignore", invalid="ignore"):
        distances = exact_distances(search.query, vectors, search.metric)
    if search.metric == "cosine":
        distances[~vectors.any(axis=1)] = np.nan
    return distances


@one_thread()
def nearest_of_group(
    group: VectorGroup, counting: Mask, search: VectorSearch
) -> tuple[Rows, Floats]:
    """Of the group's rows that count the nearest, by place; `counting` is by place, too."""
    model = group.model
    if model is not None and model.metric == search.metric:
        slices = group.slices(search.probes(model).tolist())
        places, distances = _compare_slices(group, slices, counting, search)
        if len(places) >= search.rows:
            return places, distances
    return _compare_slices(group, [slice(0, len(group))], counting, search)


def _compare_slices(
    group: VectorGroup, slices: list[slice], counting: Mask, search: VectorSearch
) -> tuple[Rows, Floats]:
    places = [np.empty(0, dtype=np.int64)]
    found = [np.empty(0, dtype=np.float32)]
    for several in _bundled(slices):
        rows = np.concatenate([np.arange(part.start, part.stop) for part in several])
        counts = counting[group.places[rows]]
        if search.metric == "l2" and search.unbounded:
            products = np.concatenate([group.vectors[part] @ search.query for part in several])
            squares = np.concatenate([group.squares[part] for part in several])
            rows = rows[_likely(squares - 2 * products, squares, counts, search)]
        elif not counts.all():
            rows = rows[counts]
        distances = _exact(group.vectors[rows], search)
        kept = np.flatnonzero(search.in_range(distances))
        if len(kept) > search.rows:
            kept = kept[np.argpartition(distances[kept], search.rows - 1)[: search.rows]]
        places.append(group.places[rows[kept]])
        found.append(distances[kept])
    return np.concatenate(places), np.concatenate(found)


def _bundled(slices: list[slice]) -> list[list[slice]]:
    """The same rows in bundles of at most so many, to bound memory."""
    bundles: list[list[slice]] = []
    left = 0
    for part in slices:
        for start in range(part.start, part.stop, _BLOCK_ROWS):
            piece = slice(start, min(start + _BLOCK_ROWS, part.stop))
            if piece.stop - piece.start > left:
                bundles.append([])
                left = _BLOCK_ROWS
            bundles[-1].append(piece)
            left -= piece.stop - piece.start
    return bundles
