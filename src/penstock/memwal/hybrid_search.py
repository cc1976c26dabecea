"""Hybrid search: the rows that a vector search and a text search of one view agree on come first.

    GlobalLimitExec         limit and offset
      SortExec              the best of all, with their columns, read once
        FusionExec          reciprocal rank fusion
          FilterStaleExec … the nearest rows (`vector_search`)
          FilterStaleExec … the rows with the best text scores (`text_search`)

Distances and text scores have nothing in common, but ranks do: the best row of either search has
rank 1, and a row is worth `weight / (rank_constant + rank)` in each search that found it. A row is
the same row in both if its source and its number there are the same, so the two are brought
together before a single column is read.

Invariant: the order is total. Rows of equal worth come in the order of the vector search, those
that it did not find last, in the order of the text search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.memwal.hits import Floats, Hits, Numbers, Rows, SortExec
from penstock.memwal.plan import Chunk, GlobalLimitExec, Node
from penstock.memwal.sources import FreshSource
from penstock.memwal.text_search import SCORE
from penstock.memwal.vector_search import DISTANCE
from penstock.memwal.view import View

RELEVANCE = "_relevance_score"
RANK_CONSTANT = 60
"""How much less a rank counts the further down it is; the value of the paper that proposed it."""
DEFAULT_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Weights:
    """What a search's ranks are worth."""

    vector: float = 1.0
    text: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class FusedHits:
    """Rows of one source, how relevant they are, and what each search said of them.

    NaN stands for a search that did not find the row.
    """

    hits: Hits
    order: Rows
    """Of each row its place in the whole answer."""
    distances: Floats
    text_scores: Floats

    @property
    def num_rows(self) -> int:
        return self.hits.num_rows

    @property
    def nbytes(self) -> int:
        return self.hits.nbytes + self.distances.nbytes + self.text_scores.nbytes


class FusionExec(Node[FusedHits]):
    """The best `depth` rows of two searches, brought into one order by their ranks."""

    def __init__(
        self,
        vector: Node[Hits],
        text: Node[Hits],
        *,
        depth: int,
        weights: Weights,
        rank_constant: float,
    ) -> None:
        super().__init__(vector, text)
        self._depth = depth
        self._weights = weights
        self._rank_constant = rank_constant

    def describe(self) -> str:
        weights = f"vector={self._weights.vector:g}, text={self._weights.text:g}"
        return (
            f"FusionExec: reciprocal_rank, weights=[{weights}], "
            f"rank_constant={self._rank_constant:g}, depth={self._depth}"
        )

    def _stream(self) -> Iterator[FusedHits]:
        vector, text = self.children
        sources: list[FreshSource | None] = []
        nearest = _ranked(list(vector.stream()), sources, self._depth, descending=False)
        matching = _ranked(list(text.stream()), sources, self._depth, descending=True)
        found = np.concatenate([nearest.places, matching.places])
        if not len(found):
            return
        rows, inverse = np.unique(found, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        near, match = inverse[: nearest.num_rows], inverse[nearest.num_rows :]
        relevance = np.zeros(len(rows))
        relevance[near] += self._weights.vector / (self._rank_constant + nearest.ranks)
        relevance[match] += self._weights.text / (self._rank_constant + matching.ranks)
        order = self._order(relevance, (near, nearest), (match, matching))
        distances = _spread(len(rows), near, nearest.scores)
        text_scores = _spread(len(rows), match, matching.scores)
        for number in np.unique(rows[:, 0]).tolist():
            here = np.flatnonzero(rows[:, 0] == number)
            scores = relevance[here].astype(np.float32)
            hits = Hits(sources[number], rows[here, 1], scores)
            yield FusedHits(hits, order[here], distances[here], text_scores[here])

    @staticmethod
    def _order(relevance: npt.NDArray[np.float64], *searches: tuple[Rows, _Ranked]) -> Rows:
        """The place of each row in the answer: by relevance, then by its rank in each search."""
        ranks = []
        for places, ranked in searches:
            rank = np.full(len(relevance), np.iinfo(np.int64).max)
            rank[places] = ranked.ranks
            ranks.append(rank)
        order = np.empty(len(relevance), dtype=np.int64)
        order[np.lexsort((*reversed(ranks), -relevance))] = np.arange(len(relevance))
        return order


@dataclass(frozen=True, slots=True, eq=False)
class _Ranked:
    """The best hits of one search, best first."""

    places: Numbers
    """A pair for each: the number of its source, and its row there."""
    scores: Floats

    @property
    def num_rows(self) -> int:
        return len(self.scores)

    @property
    def ranks(self) -> Rows:
        return np.arange(1, len(self.scores) + 1)


def _ranked(
    found: Sequence[Hits], sources: list[FreshSource | None], depth: int, *, descending: bool
) -> _Ranked:
    """The best `depth` of these hits; sources that are not among `sources` yet are added."""
    numbers = {id(source): number for number, source in enumerate(sources)}
    owners = [np.empty(0, np.uint64)]
    for hits in found:
        number = numbers.setdefault(id(hits.source), len(numbers))
        if number == len(sources):
            sources.append(hits.source)
        owners.append(np.full(hits.num_rows, number, dtype=np.uint64))
    rows = np.concatenate([np.empty(0, np.uint64), *(hits.rows for hits in found)])
    scores = np.concatenate([np.empty(0, np.float32), *(hits.scores for hits in found)])
    best = np.argsort(-scores if descending else scores, kind="stable")[:depth]
    places = np.column_stack([np.concatenate(owners), rows]).astype(np.uint64)
    return _Ranked(places[best], scores[best])


def _spread(rows: int, places: Rows, scores: Floats) -> Floats:
    spread = np.full(rows, np.nan, dtype=np.float32)
    spread[places] = scores
    return spread


class SortFusedExec(SortExec):
    """The best `fetch` fused hits in order, with their columns, relevance, distance and score."""

    def __init__(self, view: View, columns: Sequence[str], fused: Node[Any], *, fetch: int) -> None:
        super().__init__(view, columns, RELEVANCE, fused, fetch=fetch, descending=True)

    def _stream(self) -> Iterator[Chunk]:
        found: list[FusedHits] = list(self.children[0].stream())
        schema = self._view.shape.schema
        fields = [schema.field(name) for name in self._columns]
        places = np.concatenate([np.empty(0, np.int64), *(fused.order for fused in found)])
        order = np.argsort(places)[: self._fetch]
        columns: list[pa.Array] = []
        if fields:
            columns = self._taken([fused.hits for fused in found], order, pa.schema(fields))
        for part in ("relevance", "distances", "text_scores"):
            parts = [f.hits.scores if part == "relevance" else getattr(f, part) for f in found]
            values = np.concatenate([np.empty(0, np.float32), *parts])[order]
            columns.append(pa.array(values, pa.float32(), mask=np.isnan(values)))
        scores = [pa.field(name, pa.float32()) for name in (RELEVANCE, DISTANCE, SCORE)]
        rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, *scores]))
        yield Chunk(rows, None)


def plan_hybrid_search(
    view: View,
    vector: Node[Hits],
    text: Node[Hits],
    columns: Sequence[str],
    limit: int,
    offset: int,
    *,
    depth: int,
    weights: Weights,
    rank_constant: float,
) -> Node[Chunk]:
    """The plan that fuses two searches of one view."""
    fused = FusionExec(vector, text, depth=depth, weights=weights, rank_constant=rank_constant)
    sort = SortFusedExec(view, columns, fused, fetch=limit + offset)
    return GlobalLimitExec(limit, offset, sort)
