"""The nodes of a text search: what each source has of a query, and one ranking over all of it.

A score depends on all documents of a corpus, so `FTSExec` does not score: it finds the postings of
the terms, and which rows the filter allows. `FilterStaleExec` stands below the scoring because
rows that are superseded or deleted must not count in the statistics either. `GlobalBM25Exec` adds
up the statistics of all live rows, and scores every source with them.

Small sources are laid side by side (`text_standing`) and scored in one go. An index gives its best
rows without scoring all of them where that is possible (`impact`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.errors import ObjectNotFound
from penstock.index.bm25 import (
    CorpusStatistics,
    Float32s,
    Matches,
    Operator,
    Source,
    best,
    best_column,
    match,
    phrase,
    rows_with_phrase,
)
from penstock.index.impact import best_chosen_rows, best_rows
from penstock.index.text import Postings
from penstock.lazy import lazy
from penstock.memwal.fragments import offsets_of
from penstock.memwal.freshness import RowIdSet
from penstock.memwal.hits import Hits
from penstock.memwal.plan import Node
from penstock.memwal.sources import ROW_ID, FreshSource, GenerationSource, StaleView
from penstock.memwal.text_memory import TextColumn
from penstock.memwal.text_parts import Bools, Int64s, Numbers
from penstock.memwal.text_standing import BASE, LiveIndex, LiveRun, Standing, standing

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter
    from penstock.memwal.view import View

T = TypeVar("T")

_TAKE_ROWS = 2048
"""A filter is checked on the rows that match the text, if these are no more, else by a scan."""
_FEW_SHARE = 16
_WHOLE_ROWS = 1 << 14
"""A single list of up to so many rows is scored whole, which is quicker than choosing."""


@dataclass(frozen=True, slots=True, eq=False)
class AskedColumn:
    """The query, for one column."""

    column: TextColumn
    terms: tuple[str, ...]
    positions: tuple[int, ...]
    boost: float

    @property
    def distinct(self) -> list[str]:
        return list(dict.fromkeys(self.terms))


class TextQuery:
    """What is asked of every source, and what is known of the rows of all."""

    def __init__(
        self,
        view: View,
        asked: Sequence[AskedColumn],
        text: str,
        operator: Operator,
        k: int | None,
        where: Filter | None,
    ) -> None:
        self.view = view
        self.sources = view.sources
        self.asked = asked
        self.text = text
        self.operator = operator
        self.k = k
        self.where = where
        # Regions that cannot match are not searched, but count in the statistics all the same.
        self.searched = {id(source) for source in view.pruned(where).sources}

    @lazy
    def standings(self) -> list[Standing]:
        """Of each column."""
        return [standing(self.view, asked.column) for asked in self.asked]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The postings that one part of a source has for one column's terms."""

    column: int
    part: LiveRun | LiveIndex
    postings: tuple[Postings | None, ...]
    allowed: Bools | None
    """Of each row whether the filter allows it; None if there is no filter."""

    @property
    def num_rows(self) -> int:
        return sum(len(hits.rows) for hits in self.postings if hits is not None)

    @property
    def nbytes(self) -> int:
        return 12 * self.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class _Fresh:
    """Postings of one column with their live rows, and what these add to the statistics."""

    column: int
    source: Source
    frequencies: Mapping[str, int]
    index: LiveIndex | None
    """None for everything that lies side by side."""

    @property
    def num_rows(self) -> int:
        return sum(self.frequencies.values())

    @property
    def nbytes(self) -> int:
        return 12 * self.num_rows


class FTSExec(Node[_Found]):
    """The postings of the query's terms in some sources; `places` are where the view has them."""

    def __init__(self, query: TextQuery, places: Sequence[int]) -> None:
        super().__init__()
        self._query = query
        self._places = places

    def describe(self) -> str:
        sources, where = self._query.sources, self._query.where
        labels = [
            "base_table[gen=0]" if place == BASE else sources[place].label for place in self._places
        ]
        condition = "" if where is None else f", filter=[{where.sql}]"
        return f'FTSExec: {", ".join(labels)}, query="{self._query.text}"{condition}'

    def _stream(self) -> Iterator[_Found]:
        query = self._query
        places = query.operator == "phrase"
        for column, asked in enumerate(query.asked):
            terms = asked.distinct
            if not terms:
                continue
            known = query.standings[column]
            for place in self._places:
                for part in known.by_source.get(place, ()):
                    if isinstance(part, LiveRun):
                        hits = part.text.postings(terms, part.first, places)
                    else:
                        hits = _of_index(part, terms, places)
                    yield _Found(column, part, tuple(hits), self._allowed(known, part, hits))

    def _allowed(
        self, known: Standing, part: LiveRun | LiveIndex, hits: list[Postings | None]
    ) -> Bools | None:
        """Which rows the filter allows."""
        query = self._query
        rows = [one.rows for one in hits if one is not None and len(one.rows)]
        if query.where is None or not rows:
            return None
        mask = np.zeros(len(part.text.lengths), dtype=np.bool_)
        if part.source == BASE:
            _allow_in_base(query, known, part, np.concatenate(rows), mask)
        elif isinstance(part, LiveIndex):
            source = query.sources[part.source]
            if id(source) in query.searched:
                mask = _matching(query, source, part.text.numbers)
        else:
            for one in part.parts:
                source = query.sources[one.source]
                if id(source) in query.searched:
                    first = one.first - part.first
                    mask[first : first + one.rows] = _matching(query, source, None)[: one.rows]
        return mask


class FilterStaleExec(Node[_Fresh]):
    """Which rows of all sources are the newest of their key, exactly, and how many have a term."""

    def __init__(self, query: TextQuery, child: Node[_Found]) -> None:
        super().__init__(child)
        self._query = query

    def describe(self) -> str:
        key = ", ".join(self._query.view.shape.key_columns)
        return f"FilterStaleExec: key=[{key}]"

    def _stream(self) -> Iterator[_Fresh]:
        side_by_side: dict[int, dict[int, tuple[_Found, LiveRun]]] = {}
        for found in self.children[0].stream():
            if isinstance(found.part, LiveRun):
                mine = side_by_side.setdefault(found.column, {})
                mine[found.part.first] = (found, found.part)
            else:
                yield self._index(found, found.part)
        for column, parts in side_by_side.items():
            yield self._joined(column, [parts[first] for first in sorted(parts)])

    def _index(self, found: _Found, index: LiveIndex) -> _Fresh:
        terms = self._query.asked[found.column].distinct
        frequencies = {term: index.frequency(term) for term in terms}
        postings = {t: hits for t, hits in zip(terms, found.postings, strict=True) if hits}
        live = index.live
        if found.allowed is not None:
            live = found.allowed if live is None else live & found.allowed
        source = Source(_NO_STATISTICS, postings, index.text.lengths, live)
        return _Fresh(found.column, source, frequencies, index)

    def _joined(self, column: int, parts: Sequence[tuple[_Found, LiveRun]]) -> _Fresh:
        """All small sources side by side, in that order, so that postings stay ascending."""
        known = self._query.standings[column]
        postings: dict[str, Postings] = {}
        frequencies: dict[str, int] = {}
        for at, term in enumerate(self._query.asked[column].distinct):
            hits = [one for found, _ in parts if (one := found.postings[at]) is not None]
            postings[term] = joined = _concatenated(hits)
            frequencies[term] = int(np.count_nonzero(known.live[joined.rows]))
        live = known.live
        if self._query.where is not None:
            live = live.copy()
            for found, part in parts:
                here = slice(part.first, part.first + len(part.text.lengths))
                live[here] &= False if found.allowed is None else found.allowed
        source = Source(_NO_STATISTICS, postings, known.lengths, live)
        return _Fresh(column, source, frequencies, None)


class GlobalBM25Exec(Node[Hits]):
    """Scores rows of all sources with the statistics of all live rows; the k best."""

    def __init__(self, query: TextQuery, child: Node[_Fresh]) -> None:
        super().__init__(child)
        self._query = query

    def describe(self) -> str:
        query = self._query
        columns = ", ".join(asked.column.name for asked in query.asked)
        return f"GlobalBM25Exec: columns=[{columns}], operator={query.operator}"

    def _stream(self) -> Iterator[Hits]:
        query = self._query
        fresh = _read_base(lambda: list(self.children[0].stream()))
        found: dict[int, list[list[tuple[Numbers, Float32s]]]] = {}
        for column, asked in enumerate(query.asked):
            mine = [one for one in fresh if one.column == column]
            known = query.standings[column]
            counts: Counter[str] = Counter()
            for one in mine:
                counts.update(one.frequencies)
            corpus = CorpusStatistics(known.documents, known.tokens, counts)
            matches = [_read_base(partial(_scored, query, asked, one, corpus)) for one in mine]
            if query.k is not None:
                # A row that is not among the k best of its column is not among those of all.
                matches = best(matches, query.k)
            for one, rows in zip(mine, matches, strict=True):
                for place, numbers, scores in _by_source(known, one, rows):
                    columns = found.setdefault(place, [[] for _ in query.asked])
                    columns[column].append((numbers, scores * np.float32(asked.boost)))
        sources = query.sources
        hits = [
            Hits(None if place == BASE else sources[place], *_best_of(found[place]))
            for place in sorted(found, key=lambda place: -place if place >= 0 else 1)
        ]
        one_column = len(query.asked) == 1
        yield from (hits if query.k is None or one_column else _cut(hits, query.k))


# --- one source ----------------------------------------------------------------------------

_NO_STATISTICS = CorpusStatistics(0, 0, {})


def _of_index(index: LiveIndex, terms: Sequence[str], places: bool) -> list[Postings | None]:
    if places:
        return index.text.postings(terms, 0, True)
    return [ranked.postings for ranked in index.text.ranked(terms)]


def _matching(query: TextQuery, source: FreshSource, own: Numbers | None) -> Bools:
    """Which rows of a source in front of the base, or those with these numbers, are allowed."""
    if isinstance(source, GenerationSource):
        rows = sum(fragment.physical_rows for fragment in source.dataset.get_fragments())
    else:
        rows = source.rows
    mask = np.zeros(rows, dtype=np.bool_)
    for _, numbers, _ in source.scan(query.view.shape, [], query.where):
        mask[numbers] = True
    return mask if own is None else mask[offsets_of(own)]


def _allow_in_base(
    query: TextQuery, known: Standing, part: LiveRun | LiveIndex, rows: Int64s, mask: Bools
) -> None:
    """Mark the rows of a part of the base that the filter allows, at least those that match."""
    where, dataset, numbers = query.where, query.view.base.dataset, part.text.numbers
    assert where is not None
    assert numbers is not None
    if len(rows) <= _TAKE_ROWS and where.columns:
        chosen = np.unique(rows)
        if isinstance(part, LiveRun):
            chosen = chosen[known.live[chosen]] - part.first
        elif part.live is not None:
            chosen = chosen[part.live[chosen]]
        if len(chosen):
            taken = dataset._take_rows(numbers[chosen].tolist(), columns=list(where.columns))
            if taken.num_rows != len(chosen):
                raise StaleView(f"{len(chosen)} rows were found and {taken.num_rows} are there")
            mask[chosen[where.mask(taken)]] = True
        return
    scanner = dataset.scanner(columns=[], filter=where.sql, with_row_id=True)
    ids = [batch.column(ROW_ID).to_numpy() for batch in scanner.to_batches()]
    allowed = np.concatenate([np.zeros(0, np.uint64), *ids])
    if isinstance(part, LiveIndex) and len(allowed) * _FEW_SHARE < len(numbers):
        mask[part.text.index.rows_of(allowed)] = True
    else:
        mask[:] = RowIdSet(allowed).contains(numbers)


def _concatenated(hits: Sequence[Postings]) -> Postings:
    rows = np.concatenate([np.zeros(0, np.int64), *(one.rows for one in hits)])
    frequencies = np.concatenate([np.zeros(0, np.int32), *(one.frequencies for one in hits)])
    places = [one.positions for one in hits if one.positions is not None]
    if not places:
        return Postings(rows, frequencies)
    bounds = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])
    return Postings(rows, frequencies, np.concatenate(places), bounds)


# --- scoring -------------------------------------------------------------------------------


def _scored(
    query: TextQuery, asked: AskedColumn, fresh: _Fresh, corpus: CorpusStatistics
) -> Matches:
    """Rows of one piece that match, all of them or at least the k best."""
    index, source, operator = fresh.index, fresh.source, query.operator
    if index is not None and query.k:
        counted = Counter(asked.terms)
        weights = [n * corpus.idf(term) for term, n in counted.items()]
        lists = list(zip(index.text.ranked(list(counted)), weights, strict=True))
        long = [ranked.groups is not None for ranked, _ in lists]
        if len(lists) == 1:
            long = [len(lists[0][0]) > _WHOLE_ROWS]
        among = (lists, source.document_lengths, source.live, corpus.average_length, query.k)
        found = None
        if operator == "phrase" and long and all(long):
            found = best_chosen_rows(*among, partial(_with_phrase, asked, source))
        elif operator != "phrase" and (all(long) if operator == "and" else any(long)):
            found = best_rows(*among, require_all=operator == "and")
        if found is not None:
            return found
    return match(source, asked.terms, corpus, operator, asked.positions, query.k)


def _with_phrase(asked: AskedColumn, source: Source, rows: Int64s) -> Int64s:
    tokens = phrase(asked.terms, asked.positions)
    return rows_with_phrase(rows, source.postings, tokens, len(source.document_lengths))


def _by_source(
    known: Standing, fresh: _Fresh, matches: Matches
) -> Iterator[tuple[int, Numbers, Float32s]]:
    """Matches with the numbers their rows have in their own source."""
    index = fresh.index
    if not len(matches):
        return
    if index is not None:
        numbers = index.text.numbers[matches.rows]
        if index.source != BASE:
            numbers = offsets_of(numbers).astype(np.uint64)
        yield index.source, numbers, matches.scores
        return
    owners = np.searchsorted(known.firsts, matches.rows, side="right") - 1
    for at in np.unique(owners).tolist():
        part = known.parts[at]
        here = owners == at
        rows = matches.rows[here] - part.first
        own = part.numbers
        numbers = rows.astype(np.uint64) if own is None else own[rows]
        yield part.source, numbers, matches.scores[here]


def _best_of(columns: Sequence[Sequence[tuple[Numbers, Float32s]]]) -> tuple[Numbers, Float32s]:
    """Rows of one source found in any column, with the best of their scores."""
    joined = [
        (
            np.concatenate([np.zeros(0, np.uint64), *(rows for rows, _ in parts)]),
            np.concatenate([np.zeros(0, np.float32), *(scores for _, scores in parts)]),
        )
        for parts in columns
    ]
    return joined[0] if len(joined) == 1 else best_column(joined)


def _cut(hits: Sequence[Hits], k: int) -> Iterator[Hits]:
    """The k best of all; of equal ones the first."""
    total = sum(one.num_rows for one in hits)
    if k <= 0:
        return
    if k >= total:
        yield from hits
        return
    scores = np.concatenate([one.scores for one in hits])
    lowest = np.partition(scores, total - k)[total - k]
    ties = k - int(np.count_nonzero(scores > lowest))
    for one in hits:
        kept = one.scores > lowest
        tied = np.flatnonzero(one.scores == lowest)[:ties]
        ties -= len(tied)
        kept[tied] = True
        if kept.any():
            yield Hits(one.source, one.rows[kept], one.scores[kept])


def _read_base(work: Callable[[], T]) -> T:
    """Index files that are gone belong to a version that was replaced and cleaned up."""
    try:
        return work()
    except ObjectNotFound as error:
        raise StaleView(str(error)) from error
