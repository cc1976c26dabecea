"""The vectors of many generations in one block, ordered by partition.

Comparing a dozen small blocks costs more in calls than in work, and picking the rows of the
nearest partitions out of each copies them. In a group the rows of a partition stand side by side,
whatever generation they are from, so a search is one product for each partition it looks into.

A group has every row that can be found at all, superseded ones too: which rows count is told by
the view that searches, so one group serves views of any moment. Generations that come later are
searched beside it until there are many; then a new group is made, from the old one and from them.

Invariant: `places` are row numbers of the generations laid one after the other, in the order of
`generations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.index.ivf import IvfIndex

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one generation brings: the vectors of rows that can be found, and where they are."""

    rows: int
    """How many rows the generation has, found or not."""
    numbers: Rows
    vectors: Floats
    squares: Floats
    partitions: npt.NDArray[np.int32] | None


class VectorGroup:
    def __init__(self, parts: Mapping[str, Part], model: IvfIndex | None) -> None:
        self.generations = tuple(parts)
        self.model = model
        every = list(parts.values())
        self.firsts: Rows = np.cumsum([0, *(part.rows for part in every)])
        """Where each generation begins among the places, and where the last one ends."""
        places = _joined(
            [part.numbers + first for part, first in zip(every, self.firsts, strict=False)],
            np.int64,
        )
        partitions = np.zeros(len(places), dtype=np.int32)
        count = 0
        if model is not None:
            count = model.num_partitions
            known = [part.partitions for part in every]
            partitions = _joined([p for p in known if p is not None], np.int32)
            partitions = np.where(partitions < 0, count, partitions).astype(np.int32)
        order = np.argsort(partitions, kind="stable")
        self.places: Rows = places[order]
        self.vectors: Floats = _gathered([part.vectors for part in every], order)
        self.squares: Floats = _joined([part.squares for part in every], np.float32)[order]
        self.starts: Rows = np.searchsorted(partitions[order], np.arange(count + 2))
        """Where each partition begins; after the last come rows that are in none."""

    @property
    def nbytes(self) -> int:
        return self.vectors.nbytes + self.squares.nbytes + self.places.nbytes

    def __len__(self) -> int:
        return len(self.places)

    def part(self, generation: str) -> Part:
        """What a generation brought."""
        number = self.generations.index(generation)
        first, end = int(self.firsts[number]), int(self.firsts[number + 1])
        here = np.flatnonzero((self.places >= first) & (self.places < end))
        partitions = None
        if self.model is not None:
            found = np.searchsorted(self.starts, here, side="right") - 1
            partitions = np.where(found >= self.model.num_partitions, -1, found).astype(np.int32)
        return Part(
            end - first,
            self.places[here] - first,
            self.vectors[here],
            self.squares[here],
            partitions,
        )

    def slices(self, partitions: Sequence[int]) -> list[slice]:
        """The rows of these partitions, and those that are in none."""
        assert self.model is not None
        wanted = [*partitions, self.model.num_partitions]
        starts = self.starts.tolist()
        ends = [*starts[1:], len(self)]
        return [slice(starts[p], ends[p]) for p in wanted if starts[p] < ends[p]]

    def owners(self, places: Rows) -> Rows:
        """Of each place the number of its generation."""
        return np.searchsorted(self.firsts, places, side="right") - 1


def _joined(parts: Sequence[npt.NDArray[Any]], kind: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=kind), *parts]).astype(kind, copy=False)


def _gathered(parts: Sequence[Floats], order: Rows) -> Floats:
    """The rows of all parts in an order, copied once."""
    width = parts[0].shape[1] if parts else 0
    together = np.empty((len(order), width), dtype=np.float32)
    target = np.empty(len(order), dtype=np.int64)
    target[order] = np.arange(len(order))
    first = 0
    for part in parts:
        together[target[first : first + len(part)]] = part
        first += len(part)
    return together
