"""What indexes with sorted keys have in common: questions become spans of keys, spans rows.

An index of this kind has keys in ascending order and knows the rows of each. A question is first
turned into `Spans`, positions of keys from `first` up to before `stop`; how many rows these have is
known without looking at any, which is how `count` is answered.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyroaring import BitMap

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader
from penstock.packed.indexes.base import MAX_ROWS, PackedIndex, one
from penstock.packed.indexes.like import like_mask, like_prefix
from penstock.packed.indexes.numeric import Sorted, stored
from penstock.packed.indexes.postings import damaged, read_array
from penstock.packed.indexes.roaring import Bytes, Counts, bitmap_of_bits, count_bits

VALID_BITSET = "valid_bitset"

MAX_ROWS_PER_BYTE = 64
SPARE_ROWS = 1 << 20
"""How many rows a file may claim to have, so that memory stays in proportion to its size."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Positions of keys, ascending; no two spans touch the same key and none is empty."""

    first: Counts
    stop: Counts

    @staticmethod
    def one(first: int, stop: int) -> Spans:
        ends = (first, stop) if first < stop else ()
        return Spans(np.array(ends[:1], np.int64), np.array(ends[1:], np.int64))

    @staticmethod
    def of(first: Counts, stop: Counts) -> Spans:
        """Of spans in any order, some of them empty or there twice."""
        some = first < stop
        first, which = np.unique(first[some], return_index=True)
        return Spans(first, stop[some][which])


class OrderedIndex(PackedIndex):
    def __init__(
        self, rows: int, value_type: pa.DataType, keys: NumberKeys | TextKeys, valid_bits: Bytes
    ) -> None:
        super().__init__(rows, value_type)
        self.keys = keys
        self.valid_bits = valid_bits
        """One bit a row, least significant bit first, those past the last row unset."""
        self.valid_rows = count_bits(valid_bits)

    @abstractmethod
    def _rows(self, spans: Spans) -> BitMap: ...

    @abstractmethod
    def _count(self, spans: Spans) -> int: ...

    def is_null(self) -> BitMap:
        if self.valid_rows == self.rows:
            return BitMap()
        return bitmap_of_bits(~self.valid_bits & all_bits(self.rows))

    def is_not_null(self) -> BitMap:
        return bitmap_of_bits(self.valid_bits)

    def one_of(self, values: pa.Array) -> BitMap:
        return self._rows(self.keys.equal(values))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        return self._rows(self.keys.between(low, high, with_low, with_high))

    def prefix(self, text: str) -> BitMap:
        if not isinstance(self.keys, TextKeys):
            raise self._cannot("prefix")
        return self._rows(self.keys.prefix(text))

    def like(self, pattern: str) -> BitMap:
        if not isinstance(self.keys, TextKeys) or self.keys.is_binary:
            raise self._cannot("like")
        return self._rows(self.keys.like(pattern))

    def count(self, op: str, value: Any = None) -> int:
        match op:
            case "is_null":
                return self.rows - self.valid_rows
            case "is_not_null":
                return self.valid_rows
            case "in" | "not_in" | "=" | "!=":
                values = self._values(op, value if op.endswith("in") else one(value))
                found = self._count(self.keys.equal(values))
                return found if op in ("in", "=") else self.valid_rows - found
            case "<" | "<=":
                high = self._value(op, value)
                return self._count(self.keys.between(None, high, True, op == "<="))
            case ">" | ">=":
                low = self._value(op, value)
                return self._count(self.keys.between(low, None, op == ">=", True))
        return super().count(op, value)


# --- keys ----------------------------------------------------------------------------------


class NumberKeys:
    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._sorted = Sorted(values)

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._sorted.values

    def is_ascending(self, *, strictly: bool) -> bool:
        return self._sorted.is_ascending(strictly=strictly)

    def equal(self, values: pa.Array) -> Spans:
        wanted = stored(values)  # not sorted here: NumPy's sort loses the signs of NaNs
        first = self._sorted.positions(wanted, after=False)
        return Spans.of(first, self._sorted.positions(wanted, after=True))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> Spans:
        first, stop = 0, len(self)
        if low is not None:
            first = int(self._sorted.positions(_alone(low), after=not with_low)[0])
        if high is not None:
            stop = int(self._sorted.positions(_alone(high), after=with_high)[0])
        return Spans.one(first, stop)


def _alone(value: pa.Scalar) -> npt.NDArray[Any]:
    return stored(pa.repeat(value, 1))


class TextKeys:
    """Distinct strings in the order of their bytes."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_binary(self) -> bool:
        return bool(pat.is_binary(self.values.type) or pat.is_large_binary(self.values.type))

    def is_ascending(self) -> bool:
        return bool(pc.all(pc.less(self.values[:-1], self.values[1:])).as_py() is not False)

    def _position(self, wanted: pa.Array, *, after: bool) -> Counts:
        found = pc.search_sorted(self.values, wanted, side="right" if after else "left")
        positions: Counts = found.to_numpy().astype(np.int64)
        return positions

    def equal(self, values: pa.Array) -> Spans:
        wanted = values.cast(self.values.type)
        first = self._position(wanted, after=False)
        return Spans.of(first, self._position(wanted, after=True))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> Spans:
        return Spans.one(*self.ends(low, high, with_low, with_high))

    def ends(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> tuple[int, int]:
        """Where the keys in a range begin, and where they end, which may be before that."""
        first, stop = 0, len(self)
        if low is not None:
            first = int(self._position(self._alone(low.as_py()), after=not with_low)[0])
        if high is not None:
            stop = int(self._position(self._alone(high.as_py()), after=with_high)[0])
        return first, stop

    def prefix(self, text: str) -> Spans:
        return Spans.one(*self.prefix_ends(text))

    def prefix_ends(self, text: str) -> tuple[int, int]:
        begin = text.encode()
        if not begin:
            return 0, len(self)
        # No byte of UTF-8 is 0xFF, so the last one can always be counted up.
        beyond = begin[:-1] + bytes([begin[-1] + 1])
        keys = TextKeys(self.values.view(_binary_type(self.values.type)))
        ends = keys._position(keys._alone(begin), after=False)
        stops = keys._position(keys._alone(beyond), after=False)
        return int(ends[0]), int(stops[0])

    def like(self, pattern: str) -> Spans:
        first, stop = self.prefix_ends(like_prefix(pattern))
        found = np.flatnonzero(like_mask(self.values[first:stop], pattern)) + first
        return Spans(found, found + 1)

    def _alone(self, value: str | bytes) -> pa.Array:
        return pa.array([value], self.values.type)


def _binary_type(text: pa.DataType) -> pa.DataType:
    large = pat.is_large_string(text) or pat.is_large_binary(text)
    return pa.large_binary() if large else pa.binary()


# --- what comes in -------------------------------------------------------------------------


def plain_array(array: pa.Array, kind: str) -> pa.Array:
    """The array in one piece, without a dictionary, and not too long."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pat.is_dictionary(array.type):
        array = array.dictionary_decode()
    if len(array) > MAX_ROWS:
        raise InvalidInput(
            f"a {kind} index holds at most {MAX_ROWS} rows, not {len(array)}; split the column"
        )
    return array


def valid_rows(array: pa.Array) -> tuple[Bytes, npt.NDArray[np.uint32] | None]:
    """A bit a row that says whether it has a value, and the rows that do; None if all do."""
    if not array.null_count:
        return all_bits(len(array)), None
    flags = array.is_valid().to_numpy(zero_copy_only=False)
    return np.packbits(flags, bitorder="little"), np.flatnonzero(flags).astype(np.uint32)


def all_bits(rows: int) -> Bytes:
    bits = np.full(-(-rows // 8), 0xFF, np.uint8)
    if rows % 8:
        bits[-1] = (1 << rows % 8) - 1
    return bits


def meta_count(reader: EntryReader, key: str) -> int:
    """A number of rows or keys from the meta."""
    found = reader.meta.get(key)
    if type(found) is not int or not 0 <= found <= MAX_ROWS:
        raise Corruption(
            f"the index's meta has {found!r} for {key!r}, not a number of rows; build it again"
        )
    return found


def meta_rows(reader: EntryReader, key: str) -> int:
    """The number of rows, which a file of this size must be able to hold.

    A bit a row is what the format needs; only older files lack those bits, hence the allowance.
    """
    found = meta_count(reader, key)
    size = sum(reader.size(name) for name in reader.names())
    if found > MAX_ROWS_PER_BYTE * size + SPARE_ROWS:
        raise Corruption(
            f"the index's meta has {found} for {key!r}, which {size} bytes of {reader.names()} "
            "cannot hold; build it again"
        )
    return found


def meta_flag(reader: EntryReader, key: str) -> bool:
    found = reader.meta.get(key, False)
    if not isinstance(found, bool):
        raise Corruption(f"the index's meta has {found!r} for {key!r}, not true or false")
    return found


def check_valid_bits(reader: EntryReader, rows: int, found: Bytes) -> None:
    """Compare the bits that the file has, if it has any, with those `found` in its data.

    Sort indexes of numbers have whole 64-bit words of them, others whole bytes; both are read.
    """
    if VALID_BITSET not in reader.names():
        return
    bits = read_array(reader, VALID_BITSET, "u1")
    if len(bits) not in (len(found), -(-len(found) // 8) * 8):
        raise damaged(VALID_BITSET, f"{len(bits)} bytes for {rows} rows, not {len(found)}")
    if not np.array_equal(bits[: len(found)] & all_bits(rows), found):
        raise damaged(VALID_BITSET, "it calls other rows null than those without a value")


def no_options(kind: str, options: dict[str, Any]) -> None:
    if options:
        raise InvalidInput(f"a {kind} index has no option {', '.join(map(repr, options))}")
