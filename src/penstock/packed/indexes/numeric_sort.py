"""Kind `stlsort` over numbers: (value, row) pairs in the order of their values.

Entries: `index_data`, one struct of value and int32 row for every row that has a value, sorted by
value; `idx_to_offsets`, for every row the position of its struct, 0 for null; `valid_bitset`, a bit
a row in 64-bit words. Structs are laid out as C++ does, with padding; ours is zero. Files of older
writers lack the last two entries, which follow from the first.

In memory the values and the rows are two plain arrays: less than the structs take, and quicker to
search. Rows of equal values are ascending, unless `ties="std_sort"` asks for Milvus' own order.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind
from penstock.packed.indexes.numeric import checked_type, ordered_bits, stored
from penstock.packed.indexes.order import number_order
from penstock.packed.indexes.ordered import (
    VALID_BITSET,
    NumberKeys,
    OrderedIndex,
    Spans,
    check_valid_bits,
    meta_count,
    meta_flag,
    meta_rows,
    no_options,
    plain_array,
    valid_rows,
)
from penstock.packed.indexes.postings import damaged, read_array
from penstock.packed.indexes.roaring import (
    Bytes,
    Counts,
    bitmap_of_rows,
    bits_of_rows,
    count_bits,
    spread,
)
from penstock.packed.indexes.std_sort import std_sort_order

INDEX_DATA = "index_data"
IDX_TO_OFFSETS = "idx_to_offsets"
TIES = ("row", "std_sort")


def struct_of(stored_as: np.dtype[Any]) -> np.dtype[Any]:
    """`struct {T value; int32_t row;}`, as long as a C++ compiler makes it."""
    width = stored_as.itemsize
    return np.dtype(
        {
            "names": ["value", "row"],
            "formats": [stored_as, "<i4"],
            "offsets": [0, max(4, width)],
            "itemsize": 16 if width == 8 else 8,
        }
    )


class NumericSortIndex(OrderedIndex):
    kind: ClassVar[str] = "stlsort"

    keys: NumberKeys

    def __init__(
        self,
        rows: int,
        value_type: pa.DataType,
        values: npt.NDArray[Any],
        owners: npt.NDArray[np.uint32],
        valid_bits: Bytes,
        is_nested: bool,
    ) -> None:
        super().__init__(rows, value_type, NumberKeys(values), valid_bits)
        self._owners = owners
        self._is_nested = is_nested

    def _held_bytes(self) -> int:
        return int(self.keys.values.nbytes + self._owners.nbytes + self.valid_bits.nbytes)

    def write_entries(self, writer: EntryWriter) -> None:
        values = self.keys.values
        pairs = np.zeros(len(values), struct_of(values.dtype))
        pairs["value"] = values
        pairs["row"] = self._owners
        writer.write_entry(INDEX_DATA, pairs.view(np.uint8))
        positions = np.zeros(self.rows, "<i4")
        positions[self._owners] = np.arange(len(values), dtype=np.int32)
        writer.write_entry(IDX_TO_OFFSETS, positions.view(np.uint8))
        bits = np.zeros(-(-self.rows // 64) * 8, np.uint8)
        bits[: len(self.valid_bits)] = self.valid_bits
        writer.write_entry(VALID_BITSET, bits)
        writer.put_meta("index_length", len(values))
        writer.put_meta("num_rows", self.rows)
        writer.put_meta("is_nested", self._is_nested)

    def _rows(self, spans: Spans) -> BitMap:
        return bitmap_of_rows(rows_of_spans(self._owners, spans.first, spans.stop), self.rows)

    def _count(self, spans: Spans) -> int:
        return int((spans.stop - spans.first).sum())


def rows_of_spans(
    owners: npt.NDArray[np.uint32], first: Counts, stop: Counts
) -> npt.NDArray[np.uint32]:
    if len(first) == 1:
        return owners[first[0] : stop[0]]
    return owners[spread(first, stop - first)]


class NumericSortKind(IndexKind):
    kind: ClassVar[str] = "stlsort"

    def build(self, array: pa.Array, **options: Any) -> NumericSortIndex:
        """Options: `ties`, "row" or "std_sort", the order of rows that have the same value;
        `is_nested`, a flag that the meta carries."""
        ties = options.pop("ties", "row")
        is_nested = bool(options.pop("is_nested", False))
        no_options(self.kind, options)
        if ties not in TIES:
            raise InvalidInput(f"ties is one of {', '.join(TIES)}, not {ties!r}")
        array = plain_array(array, self.kind)
        checked_type(array.type, self.kind)
        bits, rows = valid_rows(array)
        values = stored(array if rows is None else array.drop_null())
        if ties == "row":
            order = number_order(values)
        else:
            order = np.array(std_sort_order(ordered_bits(values).tolist()), np.int64)
        owners = order.astype(np.uint32) if rows is None else rows[order]
        return NumericSortIndex(len(array), array.type, values[order], owners, bits, is_nested)

    def load(self, reader: EntryReader, value_type: pa.DataType) -> NumericSortIndex:
        stored_as = checked_type(value_type, self.kind)
        rows = meta_rows(reader, "num_rows")
        length = meta_count(reader, "index_length")
        is_nested = meta_flag(reader, "is_nested")
        layout = struct_of(stored_as)
        data = read_array(reader, INDEX_DATA, "u1")
        if length > rows or len(data) != length * layout.itemsize:
            raise damaged(
                INDEX_DATA,
                f"{len(data)} bytes for {length} of {rows} rows of {layout.itemsize} bytes",
            )
        if stored_as.kind == "b" and length and data[:: layout.itemsize].max() > 1:
            raise damaged(INDEX_DATA, "it has a bool that is neither true nor false")
        pairs = data.view(layout)
        values = np.ascontiguousarray(pairs["value"])
        owners = pairs["row"].astype(np.uint32)
        if length and owners.max() >= rows:
            raise damaged(INDEX_DATA, f"it names rows past the {rows} there are")
        bits = bits_of_rows(owners, rows)
        if count_bits(bits) != length:
            raise damaged(INDEX_DATA, "a row has two values")
        check_valid_bits(reader, rows, bits)
        index = NumericSortIndex(rows, value_type, values, owners, bits, is_nested)
        if not index.keys.is_ascending(strictly=False):
            raise damaged(INDEX_DATA, "its values are not in ascending order")
        if IDX_TO_OFFSETS in reader.names():
            positions = read_array(reader, IDX_TO_OFFSETS, "<i4")
            if len(positions) != rows or np.any(positions[owners] != np.arange(length)):
                raise damaged(IDX_TO_OFFSETS, f"it does not lead back from rows to {INDEX_DATA!r}")
        return index
