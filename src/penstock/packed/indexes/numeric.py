"""Numbers as the indexes hold them: which Arrow types are numbers, and how they are ordered.

Every type is stored as the bool, signed integer or float that holds all its values: an unsigned
integer as the next wider signed one, dates, times, timestamps and durations as their integers.

The order is that of tables: -0.0 equals 0.0, NaN is above every number, or below if its sign is
set, and equal to every NaN of its sign. A sorted array is therefore NaNs with a sign, numbers,
NaNs without; `Sorted` knows where the numbers begin and end, so that a binary search over the raw
values is enough.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from penstock.errors import InvalidInput

Array: TypeAlias = npt.NDArray[Any]

_SIGN = np.uint64(1 << 63)


def stored_type(value_type: pa.DataType) -> np.dtype[Any] | None:
    """The type the numbers are stored as; None if these are no numbers an index holds."""
    if pat.is_boolean(value_type):
        return np.dtype(np.bool_)
    if pat.is_float32(value_type) or pat.is_float64(value_type):
        return np.dtype(f"<f{value_type.bit_width // 8}")
    if pat.is_unsigned_integer(value_type):
        return np.dtype(f"<i{value_type.bit_width // 4}") if value_type.bit_width < 64 else None
    if pat.is_signed_integer(value_type) or pat.is_temporal(value_type):
        if pat.is_interval(value_type):
            return None
        return np.dtype(f"<i{value_type.bit_width // 8}")
    return None


def checked_type(value_type: pa.DataType, kind: str) -> np.dtype[Any]:
    found = stored_type(value_type)
    if found is None:
        raise InvalidInput(
            f"a {kind} index does not take {value_type}: no signed integer or float of the format "
            "holds it; cast the column"
        )
    return found


def stored(array: pa.Array) -> Array:
    """The values, none of which is null, as the type they are stored as."""
    kind = stored_type(array.type)
    if pat.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(kind, copy=False)


def ordered_bits(values: Array) -> npt.NDArray[np.uint64]:
    """Unsigned integers that are ordered, and equal, as the values are."""
    if values.dtype.kind != "f":
        return values.astype(np.int64).view(np.uint64) ^ _SIGN
    with np.errstate(invalid="ignore"):  # signalling NaNs are NaNs like others
        # Adding zero makes 0.0 of -0.0.
        wide = values.astype(np.float64) + 0.0
    bits = wide.view(np.uint64)
    nans = np.flatnonzero(np.isnan(wide))
    if len(nans):
        bits[nans] = np.where(np.signbit(wide[nans]), ~np.uint64(0), ~_SIGN)
    flips = (wide.view(np.int64) >> 63).view(np.uint64) | _SIGN
    return bits ^ flips


class Sorted:
    """Values in ascending order, and where a value would stand among them."""

    __slots__ = ("_first", "_stop", "values")

    def __init__(self, values: Array) -> None:
        self.values = values
        self._first, self._stop = 0, len(values)
        if values.dtype.kind == "f" and len(values) and np.isnan(values[[0, -1]]).any():
            nans = np.isnan(values)
            below = nans & np.signbit(values)
            self._first = int(below.sum())
            self._stop = len(values) - int(nans.sum()) + self._first

    def __len__(self) -> int:
        return len(self.values)

    def is_ascending(self, *, strictly: bool) -> bool:
        """Whether the order is as claimed; searching means nothing if it is not."""
        values = self.values
        if values.dtype.kind != "f":
            steps = values[1:] > values[:-1] if strictly else values[1:] >= values[:-1]
            return bool(steps.all())
        bits = ordered_bits(values)
        steps = bits[1:] > bits[:-1] if strictly else bits[1:] >= bits[:-1]
        return bool(steps.all())

    def positions(self, wanted: Array, *, after: bool) -> npt.NDArray[np.int64]:
        """How many values are below each of these, or (`after`) not above it."""
        numbers = self.values[self._first : self._stop]
        found = np.searchsorted(numbers, wanted, "right" if after else "left") + self._first
        if wanted.dtype.kind == "f":
            nans = np.isnan(wanted)
            if nans.any():
                below = (0, self._first)[after]
                above = (self._stop, len(self.values))[after]
                found = np.where(nans, np.where(np.signbit(wanted), below, above), found)
        return found.astype(np.int64, copy=False)
