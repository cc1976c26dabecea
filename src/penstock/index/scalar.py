"""The scalar index of a MemTable: rows by the value of one column, for BTREE and BITMAP indexes.

A batch is only noted down when it is appended. The first read afterwards sorts what is new into a
run, and merges runs of like size, so that a writer pays nothing and n rows are at most about
log2(n) binary searches.

Invariants
- Row i of the index is row i of the MemTable; answers are rows in ascending order.
- Null equals nothing and lies between nothing; `rows_null` finds it.
- NaN is equal to itself and above every number, and NaN with its sign bit set below every number,
  as in Lance. The two zeros are equal.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec
from penstock.index.primary_key import one_chunk

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    values: pa.Array
    """Sorted, without nulls and NaNs."""
    rows: Rows
    null_rows: Rows
    low_nan_rows: Rows
    high_nan_rows: Rows

    def __len__(self) -> int:
        nans = len(self.low_nan_rows) + len(self.high_nan_rows)
        return len(self.rows) + len(self.null_rows) + nans


class ScalarIndex:
    """One scalar index over the rows of one MemTable. One appender; any number of readers."""

    def __init__(self, spec: IndexSpec, value_type: pa.DataType) -> None:
        if not self.supports(value_type):
            raise InvalidInput(
                f"index {spec.name!r}: values of type {value_type} are not kept in memory"
            )
        self.name, self.column, self.value_type = spec.name, spec.column, value_type
        self._rows = 0
        self._unsorted: list[tuple[int, pa.Array]] = []
        self._unsorted_lock = threading.Lock()
        self._runs: tuple[_Run, ...] = ()
        self._runs_lock = threading.Lock()

    @staticmethod
    def supports(value_type: pa.DataType) -> bool:
        """Whether values of the type can be kept: numbers but decimals, times, strings, bytes."""
        try:
            pc.search_sorted(pa.nulls(0, value_type), pa.nulls(0, value_type))
        except pa.ArrowNotImplementedError:
            return False
        return True

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return sum(run.values.nbytes + 8 * len(run) for run in self._runs)

    # --- building ---

    def encode(self, values: pa.Array) -> pa.Array:
        """The batch's column as one array of the index's type."""
        values = one_chunk(values)
        return values if values.type == self.value_type else values.cast(self.value_type)

    def append(self, values: pa.Array, first_row: int) -> None:
        """Add a batch whose first row is the MemTable's row `first_row`."""
        if first_row < self._rows:
            raise InvalidInput(f"row {first_row} was appended before; the next is {self._rows}")
        with self._unsorted_lock:
            self._unsorted.append((first_row, values))
        self._rows = first_row + len(values)

    # --- reading ---

    def rows_equal(self, value: Any, visible_rows: int | None = None) -> Rows:
        return self.rows_in([value], visible_rows)

    def rows_in(self, values: Sequence[Any], visible_rows: int | None = None) -> Rows:
        """Rows whose value is one of these. Nulls among them match nothing."""
        wanted = [value for value in values if value is not None]
        nan_signs = {math.copysign(1, value) for value in wanted if _is_nan(value)}
        keys = self._keys([value for value in wanted if not _is_nan(value)]).unique()
        found: list[Rows] = []
        for run in self._sorted_runs():
            starts = _search(run.values, keys, "left")
            stops = _search(run.values, keys, "right")
            hit = stops > starts
            found += [
                run.rows[start:stop]
                for start, stop in zip(starts[hit].tolist(), stops[hit].tolist(), strict=True)
            ]
            if -1 in nan_signs:
                found.append(run.low_nan_rows)
            if 1 in nan_signs:
                found.append(run.high_nan_rows)
        return _in_row_order(found, visible_rows)

    def rows_between(
        self,
        low: Any = None,
        high: Any = None,
        *,
        low_inclusive: bool = True,
        high_inclusive: bool = False,
        visible_rows: int | None = None,
    ) -> Rows:
        """Rows whose value lies between the bounds; a bound of None is no bound."""
        low_key = None if low is None else self._keys([low])
        high_key = None if high is None else self._keys([high])
        found: list[Rows] = []
        for run in self._sorted_runs():
            start, stop = 0, len(run.rows)
            if low_key is not None:
                start = int(_search(run.values, low_key, "left" if low_inclusive else "right")[0])
            if high_key is not None:
                stop = int(_search(run.values, high_key, "right" if high_inclusive else "left")[0])
            found.append(run.rows[start:stop])
            if low_key is None:
                found.append(run.low_nan_rows)
            if high_key is None:
                found.append(run.high_nan_rows)
        return _in_row_order(found, visible_rows)

    def rows_null(self, visible_rows: int | None = None) -> Rows:
        return _in_row_order([run.null_rows for run in self._sorted_runs()], visible_rows)

    def _keys(self, values: Sequence[Any]) -> pa.Array:
        if any(_is_nan(value) for value in values):
            raise InvalidInput(f"NaN is no bound for a range of column {self.column!r}")
        try:
            return pa.array(values, self.value_type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise InvalidInput(
                f"column {self.column!r} holds {self.value_type}; {values!r} cannot be compared"
            ) from error

    def _sorted_runs(self) -> tuple[_Run, ...]:
        """The runs of every batch appended before the call."""
        with self._runs_lock:
            with self._unsorted_lock:
                fresh, self._unsorted = self._unsorted, []
            if fresh:
                runs = [*self._runs, _sort(fresh)]
                while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
                    runs[-2:] = [_merge(runs[-2], runs[-1])]
                self._runs = tuple(runs)
            return self._runs


def _sort(chunks: Sequence[tuple[int, pa.Array]]) -> _Run:
    values = pa.concat_arrays([chunk for _, chunk in chunks])
    rows = np.concatenate([np.arange(first, first + len(chunk)) for first, chunk in chunks])
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    nan = negative = np.zeros(len(values), dtype=np.bool_)
    if pa.types.is_floating(values.type):
        numbers = values.to_numpy(zero_copy_only=False)
        nan = np.isnan(numbers) & valid
        negative = np.signbit(numbers)
    plain = np.flatnonzero(valid & ~nan)
    kept = values if len(plain) == len(values) else values.take(pa.array(plain))
    order = pc.sort_indices(kept)
    sorted_rows = rows[plain][order.to_numpy()]
    return _Run(
        kept.take(order), sorted_rows, rows[~valid], rows[nan & negative], rows[nan & ~negative]
    )


def _merge(older: _Run, newer: _Run) -> _Run:
    values = pa.concat_arrays([older.values, newer.values])
    order = pc.sort_indices(values)
    return _Run(
        values.take(order),
        np.concatenate([older.rows, newer.rows])[order.to_numpy()],
        np.concatenate([older.null_rows, newer.null_rows]),
        np.concatenate([older.low_nan_rows, newer.low_nan_rows]),
        np.concatenate([older.high_nan_rows, newer.high_nan_rows]),
    )


def _search(values: pa.Array, keys: pa.Array, side: Literal["left", "right"]) -> Rows:
    found = pc.search_sorted(values, keys, side=side).to_numpy()
    return found.astype(np.int64)  # type: ignore[no-any-return]  # pyarrow is untyped


def _in_row_order(found: Sequence[Rows], visible_rows: int | None) -> Rows:
    rows = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *found]))
    return rows if visible_rows is None else rows[: np.searchsorted(rows, visible_rows)]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
