"""Kind `stlsort` over text: distinct strings in the order of their bytes, and the rows of each.

Entry `index_data`, all numbers u32 unless said otherwise: the number U of strings; U offsets into
the section of strings; that section, for each string its length and its bytes; U offsets into the
section of rows; that section, for each string how many rows have it, and the rows, ascending; a
u64 that marks the end. Then `valid_bitset`, a bit a row, and `idx_to_offsets`, for every row the
number of its string as int32, -1 for null. The last two follow from the first and may be missing.

In memory the strings are an Arrow array and the rows `Postings`; neither holds on to the entry.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
from pyroaring import BitMap

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind
from penstock.packed.indexes.numeric_sort import IDX_TO_OFFSETS, INDEX_DATA, rows_of_spans
from penstock.packed.indexes.order import cells_of, text_groups
from penstock.packed.indexes.ordered import (
    VALID_BITSET,
    OrderedIndex,
    Spans,
    TextKeys,
    check_valid_bits,
    meta_flag,
    meta_rows,
    no_options,
    plain_array,
    valid_rows,
)
from penstock.packed.indexes.postings import Postings, damaged, read_array
from penstock.packed.indexes.roaring import (
    Bytes,
    bitmap_of_rows,
    bits_of_rows,
    count_bits,
    overlaid,
)

VERSION = 1
END_MARK = 0x5354524E47534F52
MAX_SECTION_BYTES = (1 << 32) - 1

Words = npt.NDArray[np.uint32]


def is_text(value_type: pa.DataType) -> bool:
    return bool(
        pat.is_string(value_type)
        or pat.is_large_string(value_type)
        or pat.is_binary(value_type)
        or pat.is_large_binary(value_type)
    )


class StringSortIndex(OrderedIndex):
    kind: ClassVar[str] = "stlsort"

    keys: TextKeys

    def __init__(
        self,
        rows: int,
        value_type: pa.DataType,
        distinct: pa.Array,
        postings: Postings,
        valid_bits: Bytes,
        is_nested: bool,
    ) -> None:
        super().__init__(rows, value_type, TextKeys(distinct), valid_bits)
        self._postings = postings
        self._is_nested = is_nested

    def _held_bytes(self) -> int:
        return int(self.keys.values.nbytes + self._postings.nbytes + self.valid_bits.nbytes)

    def write_entries(self, writer: EntryWriter) -> None:
        writer.write_entry(INDEX_DATA, self._data())
        writer.write_entry(VALID_BITSET, self.valid_bits)
        numbers = np.full(self.rows, -1, "<i4")
        numbers[self._postings.rows] = self._owners()
        writer.write_entry(IDX_TO_OFFSETS, numbers.view(np.uint8))
        writer.put_meta("version", VERSION)
        writer.put_meta("num_rows", self.rows)
        writer.put_meta("is_nested", self._is_nested)

    def _owners(self) -> npt.NDArray[np.int32]:
        """The number of the string of each posted row."""
        counts = np.diff(self._postings.borders)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def _data(self) -> Bytes:
        count = len(self.keys)
        strings, starts = with_lengths(self.keys.values, 4)
        borders, rows = self._postings.borders, self._postings.rows
        heads = borders[:-1] + np.arange(count)
        posted = np.empty(count + len(rows), "<u4")
        body = np.ones(len(posted), np.bool_)
        body[heads] = False
        posted[heads] = np.diff(borders)
        posted[body] = rows
        if len(strings) > MAX_SECTION_BYTES or posted.nbytes > MAX_SECTION_BYTES:
            raise InvalidInput(
                f"{len(strings)} bytes of strings and {posted.nbytes} of rows do not fit a sort "
                f"index of strings, which holds {MAX_SECTION_BYTES} of each; split the column"
            )
        parts = (
            np.array([count], "<u4"),
            starts[:-1].astype("<u4"),
            strings,
            (4 * heads).astype("<u4"),
            posted,
            np.array([END_MARK], "<u8"),
        )
        return np.concatenate([part.view(np.uint8) for part in parts])

    def _rows(self, spans: Spans) -> BitMap:
        borders = self._postings.borders
        rows = rows_of_spans(self._postings.rows, borders[spans.first], borders[spans.stop])
        return bitmap_of_rows(rows, self.rows)

    def _count(self, spans: Spans) -> int:
        borders = self._postings.borders
        return int((borders[spans.stop] - borders[spans.first]).sum())


def with_lengths(strings: pa.Array, width: int) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Every string after its length as a number of `width` bytes, and where each of these begins;
    one more place says where the last one ends."""
    count = len(strings)
    cells = cells_of(strings)
    if cells is not None:
        length = cells.dtype.itemsize
        table = np.empty((count, width + length), np.uint8)
        table[:, :width] = np.array([length], f"<u{width}").view(np.uint8)
        table[:, width:] = cells.view(np.uint8).reshape(count, length)
        return table.ravel(), np.arange(count + 1) * (width + length)
    lengths = pc.binary_length(strings).to_numpy().astype(f"<u{width}")
    steps = pa.py_buffer(np.arange(0, width * (count + 1), width, dtype=np.int64))
    heads = pa.Array.from_buffers(pa.large_binary(), count, [None, steps, pa.py_buffer(lengths)])
    nothing = pa.scalar(b"", pa.large_binary())
    joined = pc.binary_join_element_wise(heads, strings.cast(pa.large_binary()), nothing)
    starts = np.append(0, np.cumsum(lengths.astype(np.int64) + width))
    if not count:
        return np.empty(0, np.uint8), starts
    return np.frombuffer(joined.buffers()[2], np.uint8)[: starts[-1]], starts


class StringSortKind(IndexKind):
    kind: ClassVar[str] = "stlsort"

    def build(self, array: pa.Array, **options: Any) -> StringSortIndex:
        """Options: `is_nested`, a flag that the meta carries; `ties`, as rows of one string are
        always ascending, makes no difference."""
        is_nested = bool(options.pop("is_nested", False))
        options.pop("ties", None)
        no_options(self.kind, options)
        array = plain_array(array, self.kind)
        _check_text(array.type)
        bits, rows = valid_rows(array)
        distinct, postings = text_groups(array if rows is None else array.drop_null(), rows)
        return StringSortIndex(len(array), array.type, distinct, postings, bits, is_nested)

    def load(self, reader: EntryReader, value_type: pa.DataType) -> StringSortIndex:
        _check_text(value_type)
        rows = meta_rows(reader, "num_rows")
        is_nested = meta_flag(reader, "is_nested")
        if reader.meta.get("version", VERSION) != VERSION:
            raise Corruption(
                f"a sort index of strings has version {reader.meta['version']!r}; version "
                f"{VERSION} is known: read it with a newer release"
            )
        data = read_array(reader, INDEX_DATA, "u1")
        distinct, at = _read_strings(data, value_type)
        postings = _read_postings(data, at, len(distinct), rows)
        bits = bits_of_rows(postings.rows, rows)
        if count_bits(bits) != len(postings.rows):
            raise damaged(INDEX_DATA, "a row has two values")
        check_valid_bits(reader, rows, bits)
        index = StringSortIndex(rows, value_type, distinct, postings, bits, is_nested)
        if not index.keys.is_ascending():
            raise damaged(INDEX_DATA, "its strings are not distinct and in ascending order")
        if IDX_TO_OFFSETS in reader.names():
            numbers = read_array(reader, IDX_TO_OFFSETS, "<i4")
            if len(numbers) != rows or np.any(numbers[postings.rows] != index._owners()):
                raise damaged(IDX_TO_OFFSETS, f"it does not lead back from rows to {INDEX_DATA!r}")
        return index


def _check_text(value_type: pa.DataType) -> None:
    if not is_text(value_type):
        raise InvalidInput(
            f"a sort index of strings takes string, large_string, binary and large_binary, "
            f"not {value_type}; cast the column"
        )


def _words(data: Bytes, at: int, count: int) -> Words:
    if count > (len(data) - at) // 4:
        raise damaged(INDEX_DATA, f"{len(data)} bytes end before {count} numbers at byte {at}")
    return np.frombuffer(data, "<u4", count, at).astype(np.uint32)


def _read_strings(data: Bytes, value_type: pa.DataType) -> tuple[pa.Array, int]:
    """The strings, and where the offsets of their rows begin."""
    count = int(_words(data, 0, 1)[0])
    starts = _words(data, 4, count).astype(np.int64)
    at = 4 + 4 * count
    if not count:
        return pa.array([], value_type), at
    # Offsets give where every string ends but the last, whose length must be believed.
    if starts[0] or np.any(np.diff(starts) < 4):
        raise damaged(INDEX_DATA, "the offsets of its strings do not ascend from 0")
    last = at + int(starts[-1])
    end = last + 4 + int(_words(data, last, 1)[0]) if last < len(data) else len(data) + 1
    if end > len(data):
        raise damaged(INDEX_DATA, "its strings end past the entry")
    borders = np.append(starts, end - at)
    joined = pa.Array.from_buffers(
        pa.large_binary(), count, [None, pa.py_buffer(borders), pa.py_buffer(data[at:end])]
    )
    if np.any(overlaid(data, "<u4")[at + starts] != np.diff(borders) - 4):
        raise damaged(INDEX_DATA, "lengths and offsets of its strings disagree")
    try:
        return pc.binary_slice(joined, 4, 1 << 32).cast(value_type), end
    except pa.ArrowInvalid as error:
        raise damaged(INDEX_DATA, f"its strings are no {value_type} ({error})") from error


def _read_postings(data: Bytes, at: int, count: int, rows: int) -> Postings:
    offsets = _words(data, at, count)
    at += 4 * count
    left = len(data) - at - 8
    if left < 0 or left % 4 or int(np.frombuffer(data, "<u8", 1, len(data) - 8)[0]) != END_MARK:
        raise damaged(INDEX_DATA, "its end mark is missing")
    words = _words(data, at, left // 4)
    if len(words) - count > rows or (len(words) and not count):
        raise damaged(INDEX_DATA, f"it has more than {rows} rows")
    heads = offsets.astype(np.int64) // 4
    borders = np.append(heads, len(words)) - np.arange(count + 1)
    if np.any(offsets % 4) or (count and heads[0]) or np.any(np.diff(borders) < 1):
        raise damaged(INDEX_DATA, "the offsets of its rows do not ascend from 0")
    if np.any(words[heads] != np.diff(borders)):
        raise damaged(INDEX_DATA, "numbers and offsets of its rows disagree")
    body = np.ones(len(words), np.bool_)
    body[heads] = False
    posted = words[body]
    if len(posted) and posted.max() >= rows:
        raise damaged(INDEX_DATA, f"it names rows past the {rows} there are")
    falls = np.flatnonzero(posted[1:] <= posted[:-1]) + 1
    begins = np.zeros(len(posted) + 1, np.bool_)
    begins[borders] = True
    if not begins[falls].all():
        raise damaged(INDEX_DATA, "rows of one string are not in ascending order")
    return Postings(borders, posted)
