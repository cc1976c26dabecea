"""The postings of rows that never change: one sorted run, with a directory of its terms.

A generation, or a fragment of the base that its index does not cover, is tokenised once. What is
left of it is a `TextBlock`: the length of each document, and the postings of every term, found by
one binary search for all terms of a query.

Invariant: row i of a block is row i of what it was made from; postings are ascending by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.index.text import Postings, TextAnalyzer, TextDelta, TextIndex, merge_runs

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TextBlock:
    """Postings of a fixed number of rows; term ids are those of `analyzer`."""

    analyzer: TextAnalyzer
    lengths: Int32s
    terms: Int32s
    """Distinct terms, ascending; those of `starts[i]:starts[i + 1]` are the i-th one's postings."""
    starts: Int64s
    rows: Int32s
    frequencies: Int32s
    positions: Int32s | None
    place_starts: Int64s | None
    """Where each term's positions begin."""

    @property
    def nbytes(self) -> int:
        arrays = (self.lengths, self.terms, self.starts, self.rows, self.frequencies)
        places = (self.positions, self.place_starts)
        return sum(array.nbytes for array in (*arrays, *places) if array is not None) + 1000

    def postings(
        self, terms: Sequence[str], *, first: int = 0, positions: bool = False
    ) -> list[Postings | None]:
        """The postings of each term, with rows counted from `first`."""
        known = [self.analyzer.term_id(term) for term in terms]
        ids = np.array([-1 if term is None else term for term in known], dtype=np.int32)
        places = np.searchsorted(self.terms, ids).tolist()
        found: list[Postings | None] = []
        for term, at in zip(known, places, strict=True):
            if term is None or at == len(self.terms) or int(self.terms[at]) != term:
                found.append(None)
                continue
            here = slice(int(self.starts[at]), int(self.starts[at + 1]))
            rows = np.add(self.rows[here], first, dtype=np.int64)
            frequencies = self.frequencies[here]
            if not positions or self.positions is None or self.place_starts is None:
                found.append(Postings(rows, frequencies))
                continue
            bounds = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])
            start = int(self.place_starts[at])
            spots = self.positions[start : start + int(bounds[-1])]
            found.append(Postings(rows, frequencies, spots, bounds))
        return found


class BlockBuilder:
    """Puts a block together from batches of texts with ascending row numbers."""

    def __init__(self, index: TextIndex, rows: int, only: Sequence[str] | None = None) -> None:
        """`index` tokenises and keeps nothing; with `only`, other terms are not kept."""
        self._index = index
        self._only = only
        self._lengths = np.zeros(rows, dtype=np.int32)
        self._runs: list[TextDelta] = []
        self.nbytes = self._lengths.nbytes

    def add(self, texts: pa.Array, numbers: Int64s) -> None:
        delta = self._index.encode(texts)
        self._lengths[numbers] = delta.document_lengths
        run = _chosen(delta, self._wanted()) if self._only is not None else delta
        run = TextDelta(
            run.terms,
            numbers[run.rows].astype(np.int32),
            run.frequencies,
            run.positions,
            run.document_lengths[:0],
        )
        self.nbytes += run.terms.nbytes + run.rows.nbytes + run.frequencies.nbytes
        self.nbytes += 0 if run.positions is None else run.positions.nbytes
        self._runs.append(run)

    def _wanted(self) -> list[int]:
        known = (self._index.analyzer.term_id(term) for term in self._only or ())
        return [term for term in known if term is not None]

    def block(self) -> TextBlock:
        runs = self._runs or [_nothing()]
        run = runs[0] if len(runs) == 1 else merge_runs(runs)
        return _directory(
            self._index.analyzer,
            self._lengths,
            run.terms,
            run.rows,  # type: ignore[arg-type]  # 32 bits, see `add`
            run.frequencies,
            run.positions,
        )


def build_block(
    index: TextIndex,
    rows: int,
    batches: Iterable[tuple[pa.Array, Int64s]],
    *,
    only: Sequence[str] | None = None,
    limit_bytes: int | None = None,
) -> TextBlock | None:
    """A block of texts and their row numbers, or None if it would be larger than the limit."""
    builder = BlockBuilder(index, rows, only)
    for texts, numbers in batches:
        builder.add(texts, numbers)
        if limit_bytes is not None and builder.nbytes > limit_bytes:
            return None
    return builder.block()


def merge_blocks(blocks: Sequence[TextBlock]) -> TextBlock:
    """One block with the rows of several, of one analyzer, one after the other."""
    firsts = np.cumsum([0, *(len(block.lengths) for block in blocks)])
    rows = np.concatenate(
        [block.rows + np.int32(first) for block, first in zip(blocks, firsts, strict=False)]
    )
    frequencies = np.concatenate([block.frequencies for block in blocks])
    counts = np.concatenate([np.diff(block.starts) for block in blocks])
    terms = np.concatenate([block.terms for block in blocks])
    order = np.argsort(terms, kind="stable")
    terms = terms[order]
    picked = ranges((np.cumsum(counts) - counts)[order], counts[order])
    changes = np.flatnonzero(np.concatenate([[True], terms[1:] != terms[:-1]])[: len(terms)])
    starts = np.append(np.cumsum(counts[order]) - counts[order], len(rows))
    positions = place_starts = None
    stored = [block.positions for block in blocks if block.positions is not None]
    if stored:
        positions = np.concatenate(stored)
        sizes = np.add.reduceat(
            np.append(frequencies, 0).astype(np.int64), np.cumsum(counts) - counts
        )[: len(counts)]
        places = ranges((np.cumsum(sizes) - sizes)[order], sizes[order])
        positions = positions[places]
        place_starts = (np.cumsum(sizes[order]) - sizes[order])[changes]
    return TextBlock(
        blocks[0].analyzer,
        np.concatenate([block.lengths for block in blocks]),
        terms[changes],
        np.append(starts[changes], len(rows)),
        rows[picked],
        frequencies[picked],
        positions,
        place_starts,
    )


def block_of_rows(block: TextBlock, kept: npt.NDArray[np.bool_]) -> TextBlock:
    """The postings of some of the rows, which are then counted anew."""
    here = kept[block.rows]
    numbers = (np.cumsum(kept) - 1).astype(np.int32)
    terms = np.repeat(block.terms, np.diff(block.starts))[here]
    positions = block.positions
    if positions is not None:
        positions = positions[np.repeat(here, block.frequencies)]
    return _directory(
        block.analyzer,
        block.lengths[kept],
        terms,
        numbers[block.rows[here]],
        block.frequencies[here],
        positions,
    )


def ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """starts[0], starts[0]+1, ... counts[0] of them, then those of starts[1], and so on."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))


def _directory(
    analyzer: TextAnalyzer,
    lengths: Int32s,
    terms: Int32s,
    rows: Int32s,
    frequencies: Int32s,
    positions: Int32s | None,
) -> TextBlock:
    """A block of postings that are sorted by term."""
    changes = np.concatenate([[True], terms[1:] != terms[:-1]])
    starts = np.flatnonzero(changes[: len(terms)])
    place_starts = None
    if positions is not None:
        place_starts = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])[starts]
    return TextBlock(
        analyzer,
        lengths,
        terms[starts],
        np.append(starts, len(terms)),
        rows,
        frequencies,
        positions,
        place_starts,
    )


def _nothing() -> TextDelta:
    none = np.empty(0, dtype=np.int32)
    return TextDelta(none, np.empty(0, dtype=np.int64), none, None, none)


def _chosen(delta: TextDelta, terms: Sequence[int]) -> TextDelta:
    """The postings of a few terms."""
    kept = np.isin(delta.terms, np.array(terms, dtype=np.int32))
    positions = delta.positions
    if positions is not None:
        positions = positions[np.repeat(kept, delta.frequencies)]
    return TextDelta(
        delta.terms[kept],
        delta.rows[kept],
        delta.frequencies[kept],
        positions,
        delta.document_lengths,
    )
