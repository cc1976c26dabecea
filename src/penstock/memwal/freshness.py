"""Which rows are the newest of their key, exactly, over everything in front of the base.

Keys of all sources are laid one after the other, oldest source first, and the last row of each
key wins. What generations decide among themselves is worked out once and kept; a view adds what
is in memory, which is little. Kept per source is one bit a row. Memory grows with the rows that
are not merged, never with the base table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.index.key_index import NOT_FOUND, KeyIndex
from penstock.index.primary_key import newest_rows

Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[np.uint64]

_OFFSET_BITS = np.uint64(32)
_OFFSET_MASK = np.uint64(0xFFFFFFFF)


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

    def without(self, newer: pa.Array) -> tuple[list[Mask], Mask]:
        """The masks with newer keys taken out, and which of the kept keys those are."""
        found = self._places.find(newer)
        gone = found[found != NOT_FOUND].astype(np.int64)
        masks = list(self.masks)
        sources = np.searchsorted(self._starts, gone, side="right") - 1
        for number in np.unique(sources).tolist():
            masks[number] = masks[number].copy()
            masks[number][gone[sources == number] - self._starts[number]] = False
        return masks, found != NOT_FOUND


class Freshness:
    """For each source the rows that nothing newer supersedes, and the keys in front of the base.

    `settled` covers the first sources; the others are what is in memory.
    """

    def __init__(
        self,
        settled: SettledFreshness,
        generations: Sequence[KeyedSource],
        memory: Sequence[KeyedSource],
        key_type: pa.DataType,
    ) -> None:
        self.settled = settled
        parts = [source.keys() for source in memory]
        every = pa.concat_arrays([pa.array([], key_type), *parts])
        newest = newest_rows(every)
        self.recent: pa.Array = every.filter(pa.array(newest))
        masks, _ = settled.without(self.recent)
        self._masks: dict[int, Mask] = {
            id(source): mask for source, mask in zip(generations, masks, strict=True)
        }
        first = 0
        for source, part in zip(memory, parts, strict=True):
            self._masks[id(source)] = newest[first : first + len(part)]
            first += len(part)

    @property
    def empty(self) -> bool:
        """Whether there is no key in front of the base at all."""
        return not len(self.settled.keys) and not len(self.recent)

    @cached_property
    def distinct(self) -> pa.Array:
        """Every key in front of the base; some may appear twice."""
        return pa.concat_arrays([self.settled.keys, self.recent])

    def newest(self, source: KeyedSource) -> Mask:
        """True for each row of the source that is the newest with its key."""
        return self._masks[id(source)]


class RowIdSet:
    """A set of row ids with a fast vectorised test.

    Ids are either dense (stable row ids) or a fragment in the upper and an offset in the lower
    half (row addresses); both become bitmaps.
    """

    def __init__(self, row_ids: RowIds) -> None:
        self._bitmaps: dict[int, Mask] = {}
        fragments = row_ids >> _OFFSET_BITS
        for fragment in np.unique(fragments).tolist():
            offsets = (row_ids[fragments == fragment] & _OFFSET_MASK).astype(np.int64)
            bitmap = np.zeros(int(offsets.max()) + 1, dtype=np.bool_)
            bitmap[offsets] = True
            self._bitmaps[int(fragment)] = bitmap

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(bitmap)) for bitmap in self._bitmaps.values())

    @property
    def nbytes(self) -> int:
        return sum(bitmap.nbytes for bitmap in self._bitmaps.values())

    def plus(self, row_ids: RowIds) -> RowIdSet:
        """The set with more ids in it; what it does not touch is shared."""
        together = RowIdSet(row_ids)
        for fragment, known in self._bitmaps.items():
            added = together._bitmaps.get(fragment)
            if added is not None:
                longer = np.zeros(max(len(known), len(added)), dtype=np.bool_)
                longer[: len(known)] = known
                longer[: len(added)] |= added
                known = longer
            together._bitmaps[fragment] = known
        return together

    def contains(self, row_ids: RowIds) -> Mask:
        found = np.zeros(len(row_ids), dtype=np.bool_)
        if not self._bitmaps or not len(row_ids):
            return found
        fragments = row_ids >> _OFFSET_BITS
        first, last = int(fragments[0]), int(fragments[-1])
        if first == last and (fragments == fragments[0]).all():
            return self._in_fragment(first, row_ids)
        for fragment in np.unique(fragments):
            here = fragments == fragment
            found[here] = self._in_fragment(int(fragment), row_ids[here])
        return found

    def _in_fragment(self, fragment: int, row_ids: RowIds) -> Mask:
        bitmap = self._bitmaps.get(fragment)
        if bitmap is None:
            return np.zeros(len(row_ids), dtype=np.bool_)
        offsets = (row_ids & _OFFSET_MASK).astype(np.int64)
        if int(offsets.max()) < len(bitmap):
            return bitmap[offsets]
        inside = offsets < len(bitmap)
        found = np.zeros(len(row_ids), dtype=np.bool_)
        found[inside] = bitmap[offsets[inside]]
        return found
