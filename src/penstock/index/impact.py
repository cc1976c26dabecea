"""The best rows of long posting lists, without scoring all of their rows.

A posting list is grouped by how much its rows can score at most: by frequency and document length,
both of which decide a score whatever the statistics of the corpus are. For a query each group has
a bound, and groups are taken in the order of their bounds. Rows of the first groups of every term
are scored in full; the k-th best of them is a threshold. A row that none of the groups taken so
far has can score no more than the bounds of the next groups together, so when these do not reach
the threshold, no other row is among the best. If they do, groups are taken until they do not. That
takes at most two rounds; where it would take most of the rows, all of them are scored instead.

Invariant: the answer is exact. Grouping decides only how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.index.bm25 import Bools, Float32s, Int32s, Int64s, Matches, score
from penstock.index.text import Postings

SHORT_ROWS = 4096
"""Lists of up to so many rows are scored whole."""

_DENSE_SHARE = 32
"""A list with one of so many documents, or more, is also kept as a frequency for each document."""
_FIRST_ROWS = 256
_GROUP_ROWS = 512
_CHOICE = 32
_DEEP_SHARE = 2
_SLACK = 1.0 + 1e-6
_CODE_LIMIT = 255


class RankedPostings:
    """The postings of one term over documents whose lengths are known."""

    def __init__(self, postings: Postings, lengths: Int32s) -> None:
        self.postings = postings
        self._dense: npt.NDArray[Any] | None = None
        rows, frequencies = postings.rows, postings.frequencies
        if len(rows) <= SHORT_ROWS:
            self.groups: Groups | None = None
            return
        self.groups = _grouped(rows, frequencies, lengths[rows])
        if len(rows) * _DENSE_SHARE > len(lengths):
            most = int(frequencies.max())
            kind = np.uint8 if most < 1 << 8 else np.uint16 if most < 1 << 16 else np.int32
            self._dense = np.zeros(len(lengths), dtype=kind)
            self._dense[rows] = frequencies

    def __len__(self) -> int:
        return len(self.postings.rows)

    @property
    def nbytes(self) -> int:
        postings = self.postings
        arrays: list[npt.NDArray[Any]] = [postings.rows, postings.frequencies]
        if self.groups is not None:
            arrays += [self.groups.rows, self.groups.row_frequencies]
        if self._dense is not None:
            arrays.append(self._dense)
        return sum(array.nbytes for array in arrays) + 1000

    def frequencies_of(self, rows: Int64s) -> Int32s:
        """How often the term is in each of these rows."""
        if self._dense is not None:
            dense: Int32s = self._dense[rows].astype(np.int32)
            return dense
        found = np.zeros(len(rows), dtype=np.int32)
        among = self.postings.rows
        if not len(among):
            return found
        places = among.searchsorted(rows)
        places[places == len(among)] = 0
        hit = among[places] == rows
        found[hit] = self.postings.frequencies[places[hit]]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows of a list, group by group; in a group frequencies and lengths are about the same."""

    rows: Int64s
    row_frequencies: Int32s
    starts: Int64s
    frequencies: Int32s
    """The highest in each group."""
    lengths: Int32s
    """The lowest in each group."""

    def ranked(self, weight: float, average_length: float) -> Ranking:
        bounds = score(self.frequencies, self.lengths, weight, average_length)
        order = np.argsort(-bounds, kind="stable")
        sizes = np.diff(self.starts)[order]
        return Ranking(self, order, bounds[order], np.cumsum(sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Groups by their bounds for one query, the highest first."""

    groups: Groups
    order: Int64s
    bounds: Float32s
    rows_through: Int64s

    def first(self, rows: int) -> int:
        """How many groups have at least so many rows."""
        return min(int(np.searchsorted(self.rows_through, rows)) + 1, len(self.order))

    def above(self, level: float) -> int:
        """How many groups have a bound above that."""
        return int(np.searchsorted(-self.bounds, -level, side="left"))

    def count(self, groups: int) -> int:
        return int(self.rows_through[groups - 1]) if groups else 0

    def level(self, groups: int) -> float:
        """What a row behind so many groups can score at most."""
        return float(self.bounds[groups]) if groups < len(self.bounds) else 0.0

    def rows(self, groups: int) -> tuple[Int64s, Int32s]:
        """The rows of so many groups, with their frequencies."""
        starts, known = self.groups.starts, self.groups
        taken = self.order[:groups]
        places = [
            slice(first, stop)
            for first, stop in zip(starts[taken].tolist(), starts[taken + 1].tolist(), strict=True)
        ]
        return (
            np.concatenate([known.rows[:0], *(known.rows[at] for at in places)]),
            np.concatenate(
                [known.row_frequencies[:0], *(known.row_frequencies[at] for at in places)]
            ),
        )


def best_rows(
    lists: Sequence[tuple[RankedPostings, float]],
    lengths: Int32s,
    live: Bools | None,
    average_length: float,
    k: int,
    *,
    require_all: bool = False,
) -> Matches | None:
    """The k best live rows that have any (or all) of the terms, each with its weight; best first.

    None if that is not to be had without scoring most rows.
    """
    rankings = [
        ranked.groups.ranked(weight, average_length)
        for ranked, weight in lists
        if ranked.groups is not None
    ]
    taken = [ranking.first(max(4 * k, _FIRST_ROWS)) for ranking in rankings]
    rest = 0.0
    found = _nothing()
    for attempt in range(2):
        left = iter(zip(rankings, taken, strict=True))
        parts: list[tuple[Int64s, Int32s]] = []
        for ranked, _ in lists:
            if ranked.groups is None:
                parts.append((ranked.postings.rows, ranked.postings.frequencies))
            else:
                ranking, groups = next(left)
                parts.append(ranking.rows(groups))
        found = _scored(lists, parts, lengths, live, average_length, k, require_all)
        threshold = float(found.scores[k - 1]) if len(found) >= k else -math.inf
        rest = sum(ranking.level(n) for ranking, n in zip(rankings, taken, strict=True))
        if rest == 0.0 or rest * _SLACK <= threshold:
            return found
        if attempt or threshold <= 0.0:
            return None
        taken = _deeper(rankings, threshold / _SLACK)
        if sum(r.count(n) for r, n in zip(rankings, taken, strict=True)) * _DEEP_SHARE > sum(
            len(ranked) for ranked, _ in lists
        ):
            return None
    return None


def best_chosen_rows(
    lists: Sequence[tuple[RankedPostings, float]],
    lengths: Int32s,
    live: Bools | None,
    average_length: float,
    k: int,
    choose: Callable[[Int64s], Int64s],
) -> Matches | None:
    """The k best live rows that have all of the terms and are chosen, which is asked of few.

    None if it would have to be asked of more.
    """
    want = _CHOICE * k
    found = best_rows(lists, lengths, live, average_length, want, require_all=True)
    if found is None:
        return None
    chosen = np.isin(found.rows, choose(np.sort(found.rows)))
    if len(found) == want and np.count_nonzero(chosen) < k:
        return None
    return Matches(found.rows[chosen][:k], found.scores[chosen][:k])


def _deeper(rankings: Sequence[Ranking], threshold: float) -> list[int]:
    """How many groups of each to take so that what is left cannot reach the threshold."""
    highest = [ranking.level(0) for ranking in rankings]
    total = sum(highest)
    options = [[threshold * most / total for most in highest]]
    for at, most in enumerate(highest):
        spare = threshold - (total - most)
        if spare > 0.0:
            # All of the others may be left out if enough of this one is taken.
            options.append([spare if n == at else level for n, level in enumerate(highest)])
    plans = [
        [ranking.above(level) for ranking, level in zip(rankings, levels, strict=True)]
        for levels in options
    ]
    return min(
        plans,
        key=lambda plan: sum(r.count(n) for r, n in zip(rankings, plan, strict=True)),
    )


def _scored(
    lists: Sequence[tuple[RankedPostings, float]],
    parts: Sequence[tuple[Int64s, Int32s]],
    lengths: Int32s,
    live: Bools | None,
    average_length: float,
    k: int,
    require_all: bool,
) -> Matches:
    """The k best of some rows of each list, with their frequencies in it."""
    if live is not None:
        masks = [live[rows] for rows, _ in parts]
        parts = [
            (rows[mask], frequencies[mask])
            for (rows, frequencies), mask in zip(parts, masks, strict=True)
        ]
    rows = np.concatenate([part for part, _ in parts])
    ends = np.cumsum([len(part) for part, _ in parts]).tolist()
    sizes = lengths[rows]
    scores = np.zeros(len(rows), dtype=np.float32)
    for (ranked, weight), (_, own), end in zip(lists, parts, ends, strict=True):
        if require_all:
            frequencies = ranked.frequencies_of(rows)
            if not frequencies.all():
                has = np.flatnonzero(frequencies)
                rows, sizes, scores = rows[has], sizes[has], scores[has]
                frequencies = frequencies[has]
        else:
            before, behind = rows[: end - len(own)], rows[end:]
            frequencies = np.concatenate(
                [ranked.frequencies_of(before), own, ranked.frequencies_of(behind)]
            )
        scores += score(frequencies, sizes, weight, average_length)
    most = k * len(lists)  # a row can be there once for each list, with one score
    if len(rows) > most:
        best = np.argpartition(scores, len(scores) - most)[len(scores) - most :]
        rows, scores = rows[best], scores[best]
    rows, first = np.unique(rows, return_index=True)
    scores = scores[first]
    order = np.argsort(-scores, kind="stable")[:k]
    return Matches(rows[order], scores[order])


def _nothing() -> Matches:
    return Matches(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32))


def _grouped(rows: Int64s, frequencies: Int32s, lengths: Int32s) -> Groups:
    codes = np.minimum(frequencies, _CODE_LIMIT).astype(np.uint16) << np.uint16(8)
    if int(lengths.max()) <= _CODE_LIMIT:
        codes |= lengths.astype(np.uint16)
    else:
        # Exponent and three bits more: an eighth apart, in 256 steps for any length.
        steps = (lengths.astype(np.float32).view(np.int32) >> 20) - (127 << 3)
        codes |= np.clip(steps, 0, _CODE_LIMIT).astype(np.uint16)
    order = np.argsort(codes, kind="stable")  # a radix sort, for so short numbers
    codes = codes[order]
    changes = np.concatenate([[True], codes[1:] != codes[:-1]])
    # A large group is several, so that not all of it has to be taken.
    changes[::_GROUP_ROWS] = True
    starts = np.flatnonzero(changes)
    frequencies = frequencies[order]
    return Groups(
        rows[order],
        frequencies,
        np.append(starts, len(rows)),
        np.maximum.reduceat(frequencies, starts),
        np.minimum.reduceat(lengths[order], starts),
    )
