"""Which rows of a view's sources are live, and what their texts add up to.

Texts of everything but the base's index are few, so they are laid side by side: one array of
lengths, one mask, rows counted from the first source's first. The index of the base is too long
for that and is kept apart, as is a generation that is read through its own index:

    Standing.lengths, .live      of all small sources, side by side
    Standing.parts               which rows of that are whose
    Standing.indexed             the indexes, with their own masks

A mask of an index is kept for a base version and the generations in front of it. Rows in memory
take a few rows out of it, and their share of documents, tokens and terms is subtracted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from penstock.index.primary_key import key_array
from penstock.memwal.fragments import offsets_of
from penstock.memwal.freshness import RowIdSet
from penstock.memwal.sources import ROW_ID, MemTableSource
from penstock.memwal.text_group import Placed
from penstock.memwal.text_memory import TextColumn, TextMemory
from penstock.memwal.text_parts import (
    Bools,
    IndexedText,
    Int32s,
    Int64s,
    Numbers,
    StreamedText,
    TextPart,
)

if TYPE_CHECKING:
    from penstock.memwal.view import View

BASE = -1
_COUNTED_TERMS = 1 << 16
_FEW_SHARE = 16
_NO_ROWS: Int64s = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LivePart:
    """A small source: its rows are `first` and on among those laid side by side."""

    source: int
    """The place of the source among the view's, or `BASE`."""
    first: int
    rows: int
    numbers: Numbers | None
    """The row's number in its source; None if that is the row itself."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveRun:
    """One or several small sources that are asked for postings together."""

    text: TextPart
    first: int
    parts: tuple[LivePart, ...]

    @property
    def source(self) -> int:
        """Where to ask for it."""
        return self.parts[0].source


@dataclass(slots=True, eq=False)
class CountedIndex:
    """An index and which of its rows are live, as long as nothing in memory is newer."""

    text: IndexedText
    live: Bools
    documents: int
    tokens: int
    _counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, text: IndexedText, live: Bools) -> CountedIndex:
        lengths = text.lengths
        tokens = int(lengths.sum(dtype=np.int64, where=live))
        return cls(text, live, int(np.count_nonzero(live & (lengths > 0))), tokens)

    @property
    def nbytes(self) -> int:
        return self.live.nbytes + 100 * len(self._counts)

    def frequency(self, term: str) -> int:
        """How many live documents have a term."""
        known = self._counts.get(term)
        if known is None:
            (ranked,) = self.text.ranked([term])
            rows = ranked.postings.rows
            known = int(np.count_nonzero(self.live[rows]))
            if len(self._counts) >= _COUNTED_TERMS:
                self._counts.clear()
            self._counts[term] = known
        return known


@dataclass(frozen=True, slots=True, eq=False)
class LiveIndex:
    """An index and which of its rows are live in a view."""

    source: int
    counted: CountedIndex
    live: Bools | None
    """None if all are."""
    gone: Int64s
    """Rows that something in memory supersedes."""
    documents: int
    tokens: int
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> IndexedText:
        return self.counted.text

    def frequency(self, term: str) -> int:
        """How many live documents have a term."""
        if not len(self.gone):
            return self.counted.frequency(term)
        known = self._counts.get(term)
        if known is None:
            (ranked,) = self.text.ranked([term])
            if self.live is not None and len(ranked) < _FEW_SHARE * len(self.gone):
                known = int(np.count_nonzero(self.live[ranked.postings.rows]))
            else:
                known = self.counted.frequency(term)
                known -= int(np.count_nonzero(ranked.frequencies_of(self.gone)))
            if len(self._counts) >= _COUNTED_TERMS:
                self._counts.clear()
            self._counts[term] = known
        return known


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The live texts of one column in one view."""

    parts: tuple[LivePart, ...]
    """In the order of their rows."""
    firsts: Int64s
    """Where each part begins."""
    indexed: tuple[LiveIndex, ...]
    lengths: Int32s
    live: Bools
    documents: int
    tokens: int
    by_source: Mapping[int, Sequence[LiveRun | LiveIndex]]
    """What has the rows of each source. What has those of several is at the first of them."""


def standing(view: View, column: TextColumn) -> Standing:
    memory = view.reader.memory(TextMemory)
    states = tuple(memory.state(source) for source in view.sources)
    key = ("standing", column.key, view.base.version, states)
    found: Standing = memory.standings.get(key, lambda: _work_out(view, column, memory))
    return found


def _work_out(view: View, column: TextColumn, memory: TextMemory) -> Standing:
    covered = memory.counted.get(
        ("covered", column.key, view.base.version), lambda: _covered(view, column)
    )
    stored = memory.stored(view, column, covered.fragments)
    hidden = _hidden(view, memory) if view.shape.key_columns and view.sources else None
    laid: dict[int, _Laid] = {}
    indexed: list[LiveIndex] = []
    generations = 0
    for place, source in enumerate(view.sources):
        newest = view.freshness.newest(source) if view.shape.key_columns else None
        if isinstance(source, MemTableSource):
            text = memory.memtable(view, source, column)
            _Laid.add(laid, text, place, slice(0, len(text.lengths)), newest)
            continue
        found = stored[generations]
        generations += 1
        if isinstance(found, IndexedText):
            indexed.append(_generation_index(place, found, newest))
        else:
            _Laid.add(laid, *_where(found, place), newest)
    for found in stored[generations:]:
        assert not isinstance(found, IndexedText)
        text, place, rows = _where(found, BASE)
        assert text.numbers is not None
        live = None if hidden is None else ~hidden.contains(text.numbers[rows])
        _Laid.add(laid, text, place, rows, live)
    if len(column.text.index):
        indexed.append(_base_index(view, column, memory, covered.live, hidden))
    return _side_by_side(list(laid.values()), indexed)


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """A block, group or MemTable, and which of its rows are those of sources of the view."""

    text: TextPart
    lengths: Int32s
    live: Bools
    members: list[tuple[slice, int]]

    @staticmethod
    def add(
        laid: dict[int, _Laid], text: TextPart, place: int, rows: slice, live: Bools | None
    ) -> None:
        into = laid.get(id(text))
        if into is None:
            lengths = text.lengths
            into = _Laid(text, lengths, np.zeros(len(lengths), np.bool_), [])
            laid[id(text)] = into
        documents = into.lengths[rows] > 0
        into.live[rows] = documents if live is None else live & documents
        into.members.append((rows, place))


def _where(found: Placed | StreamedText, place: int) -> tuple[TextPart, int, slice]:
    if isinstance(found, Placed):
        return found.text, place, found.rows
    return found, place, slice(0, len(found.lengths))


def _side_by_side(laid: list[_Laid], indexed: list[LiveIndex]) -> Standing:
    every = np.concatenate([np.zeros(0, np.int32), *(one.lengths for one in laid)])
    alive = np.concatenate([np.zeros(0, np.bool_), *(one.live for one in laid)])
    by_source: dict[int, list[LiveRun | LiveIndex]] = {}
    parts: list[LivePart] = []
    first = 0
    for one in laid:
        numbers = one.text.numbers
        mine = tuple(
            LivePart(
                place,
                first + rows.start,
                rows.stop - rows.start,
                None if numbers is None else numbers[rows],
            )
            for rows, place in sorted(one.members, key=lambda member: member[0].start)
        )
        run = LiveRun(one.text, first, mine)
        by_source.setdefault(run.source, []).append(run)
        parts += mine
        first += len(one.lengths)
    for index in indexed:
        by_source.setdefault(index.source, []).append(index)
    return Standing(
        tuple(parts),
        np.array([part.first for part in parts], dtype=np.int64),
        tuple(indexed),
        every,
        alive,
        int(np.count_nonzero(alive)) + sum(index.documents for index in indexed),
        int(every.sum(dtype=np.int64, where=alive)) + sum(index.tokens for index in indexed),
        by_source,
    )


# --- indexes -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Covered:
    """Which rows of its index the base still has, and the fragments the index knows nothing of."""

    live: Bools
    fragments: tuple[object, ...]

    @property
    def nbytes(self) -> int:
        return self.live.nbytes + 1000 * len(self.fragments)


def _covered(view: View, column: TextColumn) -> _Covered:
    index, dataset = column.text.index, view.base.dataset
    known = index.fragments()
    others = (part for part in dataset.get_fragments() if part.fragment_id not in known)
    return _Covered(index.live_rows(dataset), tuple(others))


def _generation_index(place: int, text: IndexedText, newest: Bools | None) -> LiveIndex:
    if newest is None:
        live = np.ones(len(text.lengths), dtype=np.bool_)
    else:
        live = newest[offsets_of(text.numbers)]
    counted = CountedIndex.of(text, live)
    return LiveIndex(place, counted, live, _NO_ROWS, counted.documents, counted.tokens)


def _base_index(
    view: View, column: TextColumn, memory: TextMemory, covered: Bools, hidden: _Hidden | None
) -> LiveIndex:
    which = None if hidden is None else hidden.which

    def count() -> CountedIndex:
        live = covered
        if hidden is not None and len(hidden.settled):
            live = covered & ~hidden.settled.contains(column.text.numbers)
        return CountedIndex.of(column.text, live)

    key = ("index", column.key, view.base.version, which)
    counted: CountedIndex = memory.counted.get(key, count)
    live, gone = counted.live, _NO_ROWS
    if hidden is not None and len(hidden.recent):
        gone = column.text.index.rows_of(hidden.recent)
        gone = np.sort(gone[live[gone]])
        if len(gone):
            live = live.copy()
            live[gone] = False
    lengths = column.text.lengths[gone]
    return LiveIndex(
        BASE,
        counted,
        None if live.all() else live,
        gone,
        counted.documents - int(np.count_nonzero(lengths)),
        counted.tokens - int(lengths.sum(dtype=np.int64)),
    )


# --- base rows that are superseded ---------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Hidden:
    """Base rows superseded by generations, and those superseded by what is in memory."""

    which: Hashable
    settled: RowIdSet
    recent: Numbers

    def contains(self, row_ids: Numbers) -> Bools:
        found = self.settled.contains(row_ids)
        if len(self.recent):
            found |= np.isin(row_ids, self.recent)
        return found


def _hidden(view: View, memory: TextMemory) -> _Hidden:
    freshness, index = view.freshness, view.key_index
    which = freshness.settled.which
    if index is not None:
        settled = view.reader.hidden(view.base, index, freshness.settled)
        return _Hidden(which, settled, view.recent_base_rows(index))
    # Too many keys in the base to keep them: read them.
    settled = memory.counted.get(
        ("hidden", view.base.version, which),
        lambda: RowIdSet(_rows_with(view, freshness.settled.keys)),
    )
    return _Hidden(which, settled, _rows_with(view, freshness.recent))


def _rows_with(view: View, keys: object) -> Numbers:
    """The row ids of base rows with these keys, found by reading all keys of the base."""
    columns = list(view.shape.key_columns)
    found: list[npt.NDArray[np.uint64]] = [np.zeros(0, np.uint64)]
    if len(keys):  # type: ignore[arg-type]  # an Arrow array
        for batch in view.base.dataset.scanner(columns=columns, with_row_id=True).to_batches():
            same = np.asarray(pc.is_in(key_array(batch, columns), value_set=keys))
            found.append(batch.column(ROW_ID).to_numpy()[same])
    return np.concatenate(found)
