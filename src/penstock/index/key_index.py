"""Keys of the base table in memory, sorted, so that finding rows by key does not scan.

Integer keys are kept as they are. Other keys are kept as 64-bit hashes beside the keys
themselves, and every hit is compared, so the answer is exact whatever collides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.bloom import pk_hashes

RowIds = npt.NDArray[np.uint64]
NOT_FOUND = np.uint64(2**64 - 1)
_SORT_FROM = 1024


class KeyIndex:
    def __init__(self, keys: pa.Array, row_ids: RowIds) -> None:
        """`keys` and the row id of each; a key may appear once."""
        self._type = keys.type
        self._keys = None if pa.types.is_integer(keys.type) else keys
        marks = self._marks(keys)
        order = np.argsort(marks, kind="stable")
        self._sorted = marks[order]
        self._order = order if self._keys is not None else None
        self._row_ids = row_ids[order]
        self._by_row: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._row_ids)

    @property
    def nbytes(self) -> int:
        kept = 0 if self._keys is None else int(self._keys.nbytes)
        order = 0 if self._order is None else self._order.nbytes
        by_row = 0 if self._by_row is None else self._by_row.nbytes
        return self._sorted.nbytes + self._row_ids.nbytes + kept + order + by_row

    def keys_of(self, row_ids: RowIds) -> pa.Array:
        """The keys of rows by row id; each of them must be there."""
        if self._by_row is None:
            self._by_row = np.argsort(self._row_ids)
        places = np.searchsorted(self._row_ids, row_ids, sorter=self._by_row)
        places = self._by_row[np.minimum(places, len(self._by_row) - 1)]
        if not np.array_equal(self._row_ids[places], row_ids):
            raise InvalidInput(f"not all of {len(row_ids)} row ids are in the key index")
        if self._keys is None:
            return pa.array(self._sorted[places], self._type)
        assert self._order is not None
        return self._keys.take(pa.array(self._order[places]))

    def find(self, keys: pa.Array) -> RowIds:
        """The row id of each key, or `NOT_FOUND`."""
        found = np.full(len(keys), NOT_FOUND, dtype=np.uint64)
        if not len(self._sorted) or not len(keys):
            return found
        if keys.type != self._type:
            keys = keys.cast(self._type)
        marks = self._marks(keys)
        at = self._places(marks)
        if self._keys is None:
            at = np.minimum(at, len(self._sorted) - 1)
            hit = self._sorted[at] == marks
            found[hit] = self._row_ids[at[hit]]
            return found
        # Equal hashes stand side by side; nearly always there is one.
        waiting = np.arange(len(keys))
        while len(waiting):
            inside = at[waiting] < len(self._sorted)
            waiting = waiting[inside]
            waiting = waiting[self._sorted[at[waiting]] == marks[waiting]]
            if not len(waiting):
                break
            assert self._order is not None
            stored = self._keys.take(pa.array(self._order[at[waiting]]))
            equal = np.asarray(pc.equal(stored, keys.take(pa.array(waiting))))
            hit = waiting[equal]
            found[hit] = self._row_ids[at[hit]]
            waiting = waiting[~equal]
            at[waiting] += 1
        return found

    def _places(
        self, marks: npt.NDArray[np.int64] | npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        if len(marks) < _SORT_FROM:
            return np.searchsorted(self._sorted, marks)
        # In order, neighbours are found in the same cache lines.
        order = np.argsort(marks)
        at = np.empty(len(marks), dtype=np.int64)
        at[order] = np.searchsorted(self._sorted, marks[order])
        return at

    def _marks(self, keys: pa.Array) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
        if pa.types.is_integer(keys.type):
            marks: npt.NDArray[np.int64] = np.asarray(keys)
            return marks
        return pk_hashes([keys])
