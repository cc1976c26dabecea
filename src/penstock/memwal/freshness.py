"""Which rows are the newest of their key, exactly, over everything in front of the base.

Keys of all sources are laid one after the other, oldest source first, and the last row of each
key wins. What generations decide among themselves is worked out once and kept; a view adds what
is in memory. That is cheap too: what a MemTable's rows supersede is kept in its `RecentKeys`, which
grow with it, so that a read only looks at the rows written since the last one. Memory grows with
the rows that are not merged, never with the base table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.index.key_index import NOT_FOUND, KeyIndex
from penstock.index.primary_key import newest_rows
from penstock.lazy import lazy
from penstock.memwal.fragments import fragments_of, offsets_of

if TYPE_CHECKING:
    from penstock.memwal.recent_keys import RecentRows

Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[np.uint64]

_FEW_ROWS = 1024
"""About so many rows at a time the ids that stand beside the bitmaps are searched."""
_RUN_ROWS = 64
"""Runs of rows of one fragment are tested one by one if they are as long as that on average."""


class KeyedSource(Protocol):
    def keys(self) -> pa.Array:
        """One key per physical row, in row order."""


class SettledFreshness:
    """The part that generations decide among themselves; they never change, so it is kept.

    `places` says of each of their keys which source and row has the newest version.
    """

    def __init__(
        self, sources: Sequence[KeyedSource], key_type: pa.DataType, which: tuple[str, ...] = ()
    ) -> None:
        self.which = which
        """The generations it is about, by name."""
        parts = [source.keys() for source in sources]
        every = pa.concat_arrays([pa.array([], key_type), *parts])
        newest = newest_rows(every)
        starts = np.cumsum([0, *(len(part) for part in parts)])
        self.keys: pa.Array = every.filter(pa.array(newest))
        self.masks = [newest[starts[i] : starts[i + 1]] for i in range(len(parts))]
        self._starts = starts
        self._places = KeyIndex(self.keys, np.flatnonzero(newest).astype(np.uint64))

    @property
    def nbytes(self) -> int:
        masks = sum(mask.nbytes for mask in self.masks)
        return int(self.keys.nbytes) + self._places.nbytes + masks

    def find(self, keys: pa.Array) -> RowIds:
        """Of each key the place of its newest row among all rows of these, or `NOT_FOUND`."""
        return self._places.find(keys)

    def without(self, places: RowIds) -> list[Mask]:
        """The masks with the rows at these places taken out."""
        gone = places.astype(np.int64)
        masks = list(self.masks)
        if not len(gone):
            return masks
        sources = np.searchsorted(self._starts, gone, side="right") - 1
        for number in np.unique(sources).tolist():
            masks[number] = masks[number].copy()
            masks[number][gone[sources == number] - self._starts[number]] = False
        return masks


class Freshness:
    """For each source the rows that nothing newer supersedes, and the keys in front of the base.

    `settled` covers the generations; the others are what is in memory. Where no two of these can
    share a key, `recent` brings what is known of each, and nothing is compared anew.
    """

    def __init__(
        self,
        settled: SettledFreshness,
        generations: Sequence[KeyedSource],
        memory: Sequence[KeyedSource],
        key_type: pa.DataType,
        recent: Sequence[RecentRows] | None = None,
    ) -> None:
        self.settled = settled
        self._memory = memory
        self._key_type = key_type
        self._masks: dict[int, Mask] = {}
        if recent is not None:
            places = [rows.places(settled) for rows in recent]
            for source, rows in zip(memory, recent, strict=True):
                self._masks[id(source)] = rows.newest
        else:
            first = 0
            newest = newest_rows(self.recent)
            for source in memory:
                rows_here = len(source.keys())
                self._masks[id(source)] = newest[first : first + rows_here]
                first += rows_here
            found = settled.find(self.recent)
            places = [found[found != NOT_FOUND]]
        masks = settled.without(np.concatenate([np.empty(0, dtype=np.uint64), *places]))
        for source, mask in zip(generations, masks, strict=True):
            self._masks[id(source)] = mask

    @lazy
    def recent(self) -> pa.Array:
        """The keys of everything in memory, some of them more than once."""
        parts = [source.keys() for source in self._memory]
        return pa.concat_arrays([pa.array([], self._key_type), *parts])

    @property
    def empty(self) -> bool:
        """Whether there is no key in front of the base at all."""
        return not len(self.settled.keys) and not self._memory

    @lazy
    def distinct(self) -> pa.Array:
        """Every key in front of the base; some may appear twice."""
        return pa.concat_arrays([self.settled.keys, self.recent])

    def newest(self, source: KeyedSource) -> Mask:
        """True for each row of the source that is the newest with its key."""
        return self._masks[id(source)]


class RowIdSet:
    """A set of row ids with a fast vectorised test.

    Ids are either dense (stable row ids) or a fragment in the upper and an offset in the lower
    half (row addresses); both become bitmaps. Ids added later stand beside them, sorted, until
    somebody asks about many.
    """

    def __init__(self, row_ids: RowIds) -> None:
        self._bitmaps: dict[int, Mask] = _bitmaps(row_ids)
        self._added: RowIds | None = None

    def __len__(self) -> int:
        return self._size

    @lazy
    def _size(self) -> int:
        known = sum(int(np.count_nonzero(bitmap)) for bitmap in self._bitmaps.values())
        if self._added is None:
            return known
        return known + int(np.count_nonzero(~self._in_bitmaps(self._added)))

    @property
    def nbytes(self) -> int:
        return sum(bitmap.nbytes for bitmap in self._bitmaps.values())

    def plus(self, row_ids: RowIds) -> RowIdSet:
        """The set with more ids in it; what it has already is shared."""
        assert self._added is None
        together = RowIdSet(row_ids[:0])
        together._bitmaps = self._bitmaps
        together._added = np.unique(row_ids) if len(row_ids) else None
        return together

    def contains(self, row_ids: RowIds) -> Mask:
        if self._added is None:
            return self._in_bitmaps(row_ids)
        if len(row_ids) > _FEW_ROWS:
            return self._joined._in_bitmaps(row_ids)
        at = np.minimum(np.searchsorted(self._added, row_ids), len(self._added) - 1)
        beside: Mask = self._added[at] == row_ids
        return self._in_bitmaps(row_ids) | beside

    @lazy
    def _joined(self) -> RowIdSet:
        """The same set with everything in bitmaps."""
        assert self._added is not None
        together = RowIdSet(self._added)
        for fragment, known in self._bitmaps.items():
            added = together._bitmaps.get(fragment)
            if added is not None:
                longer = np.zeros(max(len(known), len(added)), dtype=np.bool_)
                longer[: len(known)] = known
                longer[: len(added)] |= added
                known = longer
            together._bitmaps[fragment] = known
        return together

    def _in_bitmaps(self, row_ids: RowIds) -> Mask:
        found = np.zeros(len(row_ids), dtype=np.bool_)
        if not self._bitmaps or not len(row_ids):
            return found
        fragments = fragments_of(row_ids)
        first, last = int(fragments[0]), int(fragments[-1])
        if first == last and (fragments == fragments[0]).all():
            return self._in_fragment(first, row_ids)
        # Row ids nearly always come in order, so that each fragment is one run of them.
        starts = np.flatnonzero(np.concatenate([[True], fragments[1:] != fragments[:-1]]))
        if len(starts) * _RUN_ROWS <= len(row_ids):
            for start, end in pairwise([*starts.tolist(), len(row_ids)]):
                run = self._in_fragment(int(fragments[start]), row_ids[start:end])
                found[start:end] = run
            return found
        for fragment in np.unique(fragments):
            here = fragments == fragment
            found[here] = self._in_fragment(int(fragment), row_ids[here])
        return found

    def _in_fragment(self, fragment: int, row_ids: RowIds) -> Mask:
        bitmap = self._bitmaps.get(fragment)
        if bitmap is None:
            return np.zeros(len(row_ids), dtype=np.bool_)
        offsets = offsets_of(row_ids)
        if int(offsets.max()) < len(bitmap):
            return bitmap[offsets]
        inside = offsets < len(bitmap)
        found = np.zeros(len(row_ids), dtype=np.bool_)
        found[inside] = bitmap[offsets[inside]]
        return found


def _bitmaps(row_ids: RowIds) -> dict[int, Mask]:
    bitmaps: dict[int, Mask] = {}
    fragments = fragments_of(row_ids)
    for fragment in np.unique(fragments).tolist():
        offsets = offsets_of(row_ids[fragments == fragment])
        bitmap = np.zeros(int(offsets.max()) + 1, dtype=np.bool_)
        bitmap[offsets] = True
        bitmaps[int(fragment)] = bitmap
    return bitmaps
