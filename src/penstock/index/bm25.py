"""BM25 over many sources with one set of statistics: the scores Lance would give one dataset.

A source is a base index, a generation or a MemTable. Each brings its statistics and, for the terms
of the query, its postings; `CorpusStatistics` adds up over sources, and every source's rows are
then scored with the sum. So equal documents score equal wherever they are.

    CorpusStatistics  documents, tokens, documents per term; `a + b` is the corpus of both
    Source            one source's statistics, postings, document lengths and live rows
    search            the best rows of all sources for a match (any or all terms) or a phrase
    best_column       the best score of each row over several columns, as Lance's MultiMatch

What Lance does, and this does too: k1 = 1.2, b = 0.75, idf = ln(1 + (N - n + 0.5) / (n + 0.5)); a
term that is twice in a query counts twice; a phrase only decides which rows match, they score as if
all its terms had been asked for; columns are scored apart, and a row has the score of its best.

Invariants
- Arithmetic is in 32-bit floats, as Lance's; scores agree to about six digits.
- Rows of a source count from 0 and index its document lengths; postings are ascending by row.
- Rows that are not live never come out, but they count in the statistics they came with.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInput
from penstock.index.text import Postings

Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

Operator = Literal["or", "and", "phrase"]

K1 = 1.2
B = 0.75

_SPARSE_FACTOR = 16
_FIRST_PHRASES = 32
"""For the k best rows with a phrase, so many times k of those with all its words are tried."""
_PHRASE_ROWS = 1 << 15
"""In so many rows at a time a phrase is looked for."""


def idf(documents: int, document_frequency: int) -> float:
    """How much a term that so many of the documents have says about a document that has it."""
    if document_frequency <= 0:
        return 0.0
    # With statistics of different moments a term can seem to be in more documents than there are.
    rest = max(documents - document_frequency, 0)
    return math.log((rest + 0.5) / (document_frequency + 0.5) + 1.0)


def score(
    term_frequencies: Int32s, document_lengths: Int32s, idf: float, average_length: float
) -> Float32s:
    """What one term adds to the score of documents that have it so often and are so long."""
    frequencies = term_frequencies.astype(np.float32)
    norms = document_lengths.astype(np.float32)
    norms *= np.float32(K1 * B / average_length)
    norms += np.float32(K1 * (1.0 - B))
    norms += frequencies
    frequencies *= np.float32((K1 + 1.0) * idf)
    frequencies /= norms
    return frequencies


@dataclass(frozen=True, slots=True)
class CorpusStatistics:
    """Documents, their terms in all, and for each term asked for how many documents have it."""

    documents: int
    tokens: int
    document_frequencies: Mapping[str, int]

    def __add__(self, other: CorpusStatistics) -> CorpusStatistics:
        return CorpusStatistics(
            self.documents + other.documents,
            self.tokens + other.tokens,
            dict(Counter(self.document_frequencies) + Counter(other.document_frequencies)),
        )

    @classmethod
    def total(cls, parts: Iterable[CorpusStatistics]) -> CorpusStatistics:
        return functools.reduce(cls.__add__, parts, cls(0, 0, {}))

    @property
    def average_length(self) -> float:
        return self.tokens / self.documents if self.documents and self.tokens else 1.0

    def idf(self, term: str) -> float:
        return idf(self.documents, self.document_frequencies.get(term, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One source of a search: what it adds to the corpus, and its postings of the query's terms.

    `live` says which rows may come out, all if None. A phrase needs postings with positions.
    """

    statistics: CorpusStatistics
    postings: Mapping[str, Postings]
    document_lengths: Int32s
    live: Bools | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Rows of one source and their scores."""

    rows: Int64s
    scores: Float32s

    def __len__(self) -> int:
        return len(self.rows)


def search(
    sources: Sequence[Source],
    terms: Sequence[str],
    k: int | None = None,
    operator: Operator = "or",
    *,
    positions: Sequence[int] | None = None,
    statistics: CorpusStatistics | None = None,
) -> list[Matches]:
    """The k best rows of all sources together, by source; best first, equal ones by row.

    Without k every match, by row. `positions` are those of a phrase's terms, by default one after
    the other. `statistics` stand for the whole corpus if `sources` are only a part of it.
    """
    corpus = statistics or CorpusStatistics.total(source.statistics for source in sources)
    matches = [match(source, terms, corpus, operator, positions) for source in sources]
    return matches if k is None else best(matches, k)


def match(
    source: Source,
    terms: Sequence[str],
    corpus: CorpusStatistics,
    operator: Operator = "or",
    positions: Sequence[int] | None = None,
    k: int | None = None,
) -> Matches:
    """Every live row of one source that matches, ascending, scored for the corpus.

    With k some may be missing, but none of the k best.
    """
    counted = Counter(terms)
    found = {
        term: postings
        for term in counted
        if (postings := source.postings.get(term)) is not None and len(postings.rows)
    }
    if not found or (operator != "or" and len(found) < len(counted)):
        return _nothing()
    if operator == "or":
        matched = _any(source, found, counted, corpus)
        if source.live is None:
            return matched
        live = source.live[matched.rows]
        return matched if live.all() else Matches(matched.rows[live], matched.scores[live])
    rows = _in_all([hits.rows for hits in found.values()], len(source.document_lengths))
    if source.live is not None:
        rows = rows[source.live[rows]]
    if operator == "and":
        return _all(source, rows, found, counted, corpus)
    tokens = phrase(terms, positions)
    size = len(source.document_lengths)
    if k is None:
        return _all(source, rows_with_phrase(rows, found, tokens, size), found, counted, corpus)
    matched = _all(source, rows, found, counted, corpus)
    asked = _FIRST_PHRASES * k
    while True:
        some = matched
        if asked < len(matched):
            chosen = np.sort(np.argpartition(-matched.scores, asked)[:asked])
            some = Matches(matched.rows[chosen], matched.scores[chosen])
        here = np.isin(some.rows, rows_with_phrase(some.rows, found, tokens, size))
        if some is matched or np.count_nonzero(here) >= k:
            return Matches(some.rows[here], some.scores[here])
        asked *= _FIRST_PHRASES


def phrase(terms: Sequence[str], positions: Sequence[int] | None) -> list[tuple[str, int]]:
    """The terms of a phrase, each with its place from the first one's."""
    places = range(len(terms)) if positions is None else positions
    first = min(places, default=0)
    return [(term, place - first) for term, place in zip(terms, places, strict=True)]


def best_column(
    columns: Sequence[tuple[UInt64s, Float32s]], boosts: Sequence[float] | None = None
) -> tuple[UInt64s, Float32s]:
    """Row ids found in any column, ascending, with the best of their boosted scores."""
    weights = [1.0] * len(columns) if boosts is None else boosts
    if len(weights) != len(columns):
        raise InvalidInput(f"{len(weights)} boosts for {len(columns)} columns; give one for each")
    ids = np.concatenate([np.zeros(0, np.uint64), *(ids for ids, _ in columns)])
    scores = np.concatenate(
        [np.zeros(0, np.float32)]
        + [
            scores * np.float32(weight)
            for (_, scores), weight in zip(columns, weights, strict=True)
        ]
    )
    if not len(ids):
        return ids, scores
    order = np.argsort(ids, kind="stable")
    ids, scores = ids[order], scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    return ids[starts], np.maximum.reduceat(scores, starts)


# --- one source ---


def _nothing() -> Matches:
    return Matches(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


def _part(
    source: Source, rows: Int64s, frequencies: Int32s, weight: float, corpus: CorpusStatistics
) -> Float32s:
    return score(frequencies, source.document_lengths[rows], weight, corpus.average_length)


def _any(
    source: Source,
    found: Mapping[str, Postings],
    counted: Mapping[str, int],
    corpus: CorpusStatistics,
) -> Matches:
    parts = [
        _part(source, hits.rows, hits.frequencies, counted[term] * corpus.idf(term), corpus)
        for term, hits in found.items()
    ]
    lists = [hits.rows for hits in found.values()]
    if len(lists) == 1:
        return Matches(lists[0], parts[0])
    size = len(source.document_lengths)
    if sum(map(len, lists)) * _SPARSE_FACTOR < size:
        rows, scores = np.concatenate(lists), np.concatenate(parts)
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        starts = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
        return Matches(rows[starts], np.add.reduceat(scores[order], starts))
    scores = np.zeros(size, dtype=np.float32)
    hit = np.zeros(size, dtype=np.bool_)
    for rows, part in zip(lists, parts, strict=True):
        # A row is at most once in a posting list.
        scores[rows] += part
        hit[rows] = True
    rows = np.flatnonzero(hit)
    return Matches(rows, scores[rows])


def _all(
    source: Source,
    rows: Int64s,
    found: Mapping[str, Postings],
    counted: Mapping[str, int],
    corpus: CorpusStatistics,
) -> Matches:
    scores = np.zeros(len(rows), dtype=np.float32)
    for term, hits in found.items():
        frequencies = hits.frequencies[_find(rows, hits.rows, len(source.document_lengths))]
        scores += _part(source, rows, frequencies, counted[term] * corpus.idf(term), corpus)
    return Matches(rows, scores)


def _in_all(lists: Sequence[Int64s], size: int) -> Int64s:
    """The rows, below `size`, that every list has."""
    rows, *others = sorted(lists, key=len)
    for other in others:
        if len(rows) * _SPARSE_FACTOR < len(other):
            rows = _intersection(rows, other)
        else:
            has = np.zeros(size, dtype=np.bool_)
            has[other] = True
            rows = rows[has[rows]]
    return rows


def _find(rows: Int64s, among: Int64s, size: int) -> Int64s:
    """Where rows are in a list that has them all."""
    if len(rows) * _SPARSE_FACTOR < len(among):
        return np.searchsorted(among, rows)
    has = np.zeros(size, dtype=np.bool_)
    has[rows] = True
    return np.flatnonzero(has[among])


def _intersection(few: Int64s, many: Int64s) -> Int64s:
    """The values of the first that the second has too; both ascending."""
    if not len(few) or not len(many):
        return few[:0]
    places = np.searchsorted(many, few)
    places[places == len(many)] = 0
    shared: Bools = many[places] == few
    return few[shared]


def rows_with_phrase(
    rows: Int64s, found: Mapping[str, Postings], tokens: Sequence[tuple[str, int]], size: int
) -> Int64s:
    """Those of some rows, which have all terms, where these are as far apart as in the phrase."""
    for term, hits in found.items():
        if hits.positions is None or hits.bounds is None:
            raise InvalidInput(
                f"the postings of {term!r} have no positions, phrases need them; create the index "
                f"with with_position=True"
            )
    places = {term: _find(rows, hits.rows, size) for term, hits in found.items()}
    ordered = sorted(tokens, key=lambda token: len(found[token[0]].rows))
    matched = [rows[:0]]
    for begin in range(0, len(rows), _PHRASE_ROWS):
        end = min(begin + _PHRASE_ROWS, len(rows))
        here = np.arange(begin, end)
        starts: Int64s | None = None
        for term, place in ordered:
            keys = _keys(found[term], here, places[term][here], place)
            starts = keys if starts is None else _shared(starts, keys)
            here = starts >> 32
            here = here[np.flatnonzero(np.diff(here, prepend=-1))]
            if not len(here):
                break
        matched.append(rows[here])
    return np.concatenate(matched)


def _keys(hits: Postings, ordinals: Int64s, at: Int64s, place: int) -> Int64s:
    """Where in these rows a phrase would begin, so that the term is at its place; ascending."""
    assert hits.positions is not None
    assert hits.bounds is not None
    counts = hits.frequencies[at].astype(np.int64)
    before = np.cumsum(counts) - counts
    picked = np.repeat(hits.bounds[at] - before, counts)
    picked += np.arange(len(picked))
    starts = hits.positions[picked].astype(np.int64)
    starts -= place
    keys = np.repeat(ordinals << 32, counts)
    keys += starts
    # A phrase that would begin before the document is no match.
    inside: Bools = starts >= 0
    return keys if inside.all() else keys[inside]


def _shared(few: Int64s, many: Int64s) -> Int64s:
    """The values that both have; both ascending, and without equal ones."""
    if len(many) * _SPARSE_FACTOR < len(few):
        few, many = many, few
    if len(few) * _SPARSE_FACTOR < len(many):
        return _intersection(few, many)
    # Two runs are merged, not sorted.
    both = np.concatenate([few, many])
    both.sort(kind="stable")
    shared: Int64s = both[1:][both[1:] == both[:-1]]
    return shared


# --- the best of all ---


def best(matches: Sequence[Matches], k: int) -> list[Matches]:
    """The k best of all, by source; best first, equal ones by source and row."""
    if k < 0:
        raise InvalidInput(f"k is {k}; ask for 0 rows or more")
    total = sum(map(len, matches))
    keep: list[Bools | None] = [None] * len(matches)
    if k == 0:
        return [_nothing() for _ in matches]
    if k < total:
        scores = np.concatenate([found.scores for found in matches])
        lowest = np.partition(scores, total - k)[total - k]
        ties = k - int(np.count_nonzero(scores > lowest))
        for ordinal, found in enumerate(matches):
            kept = found.scores > lowest
            tied = np.flatnonzero(found.scores == lowest)[:ties]
            ties -= len(tied)
            kept[tied] = True
            keep[ordinal] = kept
    return [_ordered(found, kept) for found, kept in zip(matches, keep, strict=True)]


def _ordered(found: Matches, kept: Bools | None) -> Matches:
    rows = found.rows if kept is None else found.rows[kept]
    scores = found.scores if kept is None else found.scores[kept]
    order = np.argsort(-scores, kind="stable")
    return Matches(rows[order], scores[order])
