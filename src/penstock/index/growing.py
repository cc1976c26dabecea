"""An append-only NumPy array with one writer and any number of readers.

The in-memory indexes keep one value per MemTable row in such arrays. The buffer doubles when it is
full, so appending costs amortised constant time; what was appended is never moved under a reader,
because a reader works on the buffer and length it saw, taken together in one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidInput

_FIRST_ROWS = 1024


class GrowingArray:
    """Rows of equal width and type. Appends must not run concurrently; reads may, with anything."""

    __slots__ = ("_fill", "_state")

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None, fill: int = 0) -> None:
        shape = (_FIRST_ROWS,) if width is None else (_FIRST_ROWS, width)
        self._fill = fill
        self._state: tuple[npt.NDArray[Any], int] = (np.empty(shape, dtype=dtype), 0)

    def __len__(self) -> int:
        return self._state[1]

    @property
    def nbytes(self) -> int:
        return self._state[0].nbytes

    def values(self, rows: int | None = None) -> npt.NDArray[Any]:
        """The first `rows` rows, by default all there are now. Do not write to it."""
        buffer, length = self._state
        return buffer[: length if rows is None else min(rows, length)]

    def append(self, values: npt.NDArray[Any], first_row: int | None = None) -> None:
        """Add rows at the end, or from `first_row` on, skipped rows taking the fill value."""
        buffer, length = self._state
        start = length if first_row is None else first_row
        if start < length:
            raise InvalidInput(f"row {start} was appended before; the next is {length}")
        end = start + len(values)
        if end > len(buffer):
            larger = np.empty((max(end, 2 * len(buffer)), *buffer.shape[1:]), dtype=buffer.dtype)
            larger[:length] = buffer[:length]
            buffer = larger
        buffer[length:start] = self._fill
        buffer[start:end] = values
        self._state = (buffer, end)
