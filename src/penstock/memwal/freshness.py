"""Which rows are the newest of their key, exactly, over everything in front of the base.

Keys of all sources are laid one after the other, oldest source first, and the last row of each
key wins. The work is done once per view; what is kept per source is one bit a row. Memory grows
with the rows that are not merged, never with the base table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.index.primary_key import newest_rows

Mask = npt.NDArray[np.bool_]
RowIds = npt.NDArray[np.uint64]

_OFFSET_BITS = np.uint64(32)
_OFFSET_MASK = np.uint64(0xFFFFFFFF)


class KeyedSource(Protocol):
    def keys(self) -> pa.Array:
        """One key per physical row, in row order."""


class Freshness:
    """For each source the rows that nothing newer supersedes, and the keys they have."""

    def __init__(self, sources: Sequence[KeyedSource], key_type: pa.DataType) -> None:
        parts = [source.keys() for source in sources]
        every = pa.concat_arrays([pa.array([], key_type), *parts])
        newest = newest_rows(every)
        self.distinct: pa.Array = every.filter(pa.array(newest))
        self._masks: dict[int, Mask] = {}
        first = 0
        for source, part in zip(sources, parts, strict=True):
            self._masks[id(source)] = newest[first : first + len(part)]
            first += len(part)

    def newest(self, source: KeyedSource) -> Mask:
        """True for each row of the source that is the newest with its key."""
        return self._masks[id(source)]


class RowIdSet:
    """A set of row ids with a fast vectorised test.

    Ids are either dense (stable row ids) or a fragment in the upper and an offset in the lower
    half (row addresses); both become bitmaps.
    """

    def __init__(self, row_ids: RowIds) -> None:
        self.row_ids = np.unique(row_ids)
        self._bitmaps: dict[int, Mask] = {}
        fragments = self.row_ids >> _OFFSET_BITS
        for fragment in np.unique(fragments):
            offsets = self.row_ids[fragments == fragment] & _OFFSET_MASK
            bitmap = np.zeros(int(offsets[-1]) + 1, dtype=np.bool_)
            bitmap[offsets] = True
            self._bitmaps[int(fragment)] = bitmap

    def __len__(self) -> int:
        return len(self.row_ids)

    def contains(self, row_ids: RowIds) -> Mask:
        found = np.zeros(len(row_ids), dtype=np.bool_)
        if not len(self.row_ids) or not len(row_ids):
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
