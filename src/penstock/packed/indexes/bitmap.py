"""Kind `bitmap`: for every distinct value the rows that have it, as a Roaring bitmap.

Entries: `bitmap_index_data`, for every key in ascending order the key (a number as it is stored; of
text a u64 length and the bytes) and its bitmap; `valid_bitset`, a bit a row, only of nullable
columns. A row that no bitmap has is null.

In memory the index is that entry and tables of where things are in it; a bitmap becomes an object
only when a question needs it. -0.0 and 0.0 are one key, written as its first row has it.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind
from penstock.packed.indexes.numeric import checked_type, stored
from penstock.packed.indexes.order import number_order, number_runs, text_groups
from penstock.packed.indexes.ordered import (
    VALID_BITSET,
    NumberKeys,
    OrderedIndex,
    Spans,
    TextKeys,
    check_valid_bits,
    meta_count,
    meta_flag,
    meta_rows,
    no_options,
    plain_array,
    valid_rows,
)
from penstock.packed.indexes.postings import Postings, damaged, read_array
from penstock.packed.indexes.roaring import (
    BITSET_BYTES,
    CONTAINER_ROWS,
    COOKIE,
    MAX_ARRAY_ROWS,
    MIN_BITMAP_BYTES,
    Bytes,
    Containers,
    Counts,
    bitmap_of_rows,
    bits_of_rows,
    container_bytes,
    count_bits,
    overlaid,
    serialise,
    spread,
)
from penstock.packed.indexes.string_sort import is_text, with_lengths

BITMAP_DATA = "bitmap_index_data"

_MANY_ROWS = 1024
"""Bitmaps of more rows than this are united as bitmaps, smaller ones as arrays of rows."""


class BitmapIndex(OrderedIndex):
    kind: ClassVar[str] = "bitmap"

    def __init__(
        self,
        rows: int,
        value_type: pa.DataType,
        keys: NumberKeys | TextKeys,
        data: Bytes,
        starts: Counts,
        containers: Containers,
        valid_bits: Bytes,
        *,
        nullable: bool,
        is_nested: bool,
    ) -> None:
        super().__init__(rows, value_type, keys, valid_bits)
        self.nullable = nullable
        self._is_nested = is_nested
        self._data = data
        self._starts = starts
        self._containers = containers
        before = np.append(0, np.cumsum(containers.counts))
        self._rows_before: Counts = before[containers.borders]
        """How many rows the keys before each key have."""

    def _held_bytes(self) -> int:
        tables = (
            self._starts,
            self._rows_before,
            self.valid_bits,
            self._containers,
            self.keys.values,
        )
        return int(self._data.nbytes + sum(table.nbytes for table in tables))

    def write_entries(self, writer: EntryWriter) -> None:
        writer.write_entry(BITMAP_DATA, self._data)
        if self.nullable:
            writer.write_entry(VALID_BITSET, self.valid_bits)
        writer.put_meta("bitmap_index_length", len(self.keys))
        writer.put_meta("bitmap_index_num_rows", self.rows)
        writer.put_meta("is_nested", self._is_nested)

    def bitmap(self, key: int) -> BitMap:
        """The rows of the key of this number."""
        last = int(self._containers.borders[key + 1]) - 1
        size = int(container_bytes(self._containers.counts[last : last + 1])[0])
        end = int(self._containers.starts[last]) + size
        return BitMap.deserialize(self._data[int(self._starts[key]) : end].tobytes())

    def _rows(self, spans: Spans) -> BitMap:
        count, keys = self._count(spans), int((spans.stop - spans.first).sum())
        if count == self.valid_rows:
            return self.is_not_null()
        if keys <= 1 or count > _MANY_ROWS * keys:
            found = [self.bitmap(key) for key in spread(spans.first, spans.stop - spans.first)]
            return found[0] if len(found) == 1 else BitMap.union(*found) if found else BitMap()
        return bitmap_of_rows(self._containers.rows(self._data, spans.first, spans.stop), self.rows)

    def _count(self, spans: Spans) -> int:
        return int((self._rows_before[spans.stop] - self._rows_before[spans.first]).sum())


# --- building ------------------------------------------------------------------------------


class BitmapKind(IndexKind):
    kind: ClassVar[str] = "bitmap"

    def build(self, array: pa.Array, **options: Any) -> BitmapIndex:
        """Options: `nullable`, whether to write which rows are null, by default if any is;
        `is_nested`, a flag that the meta carries."""
        nullable = options.pop("nullable", None)
        is_nested = bool(options.pop("is_nested", False))
        no_options(self.kind, options)
        array = plain_array(array, self.kind)
        if nullable is False and array.null_count:
            raise InvalidInput(
                f"a bitmap index that is not nullable got {array.null_count} nulls; leave "
                "`nullable` out or fill them"
            )
        if not is_text(array.type):
            checked_type(array.type, self.kind)
        bits, rows = valid_rows(array)
        values = array if rows is None else array.drop_null()
        keys: NumberKeys | TextKeys
        if is_text(array.type):
            distinct, postings = text_groups(values, rows)
            keys = TextKeys(distinct)
            heads, head_starts = with_lengths(distinct, 8)
            head_counts = np.diff(head_starts)
        else:
            numbers, postings = _number_groups(stored(values), rows)
            keys = NumberKeys(numbers)
            heads = numbers.view(np.uint8)
            head_counts = np.full(len(numbers), numbers.itemsize, np.int64)
        data, starts, containers = serialise(postings.borders, postings.rows, heads, head_counts)
        return BitmapIndex(
            len(array),
            array.type,
            keys,
            data,
            starts,
            containers,
            bits,
            nullable=array.null_count > 0 if nullable is None else bool(nullable),
            is_nested=is_nested,
        )

    def load(self, reader: EntryReader, value_type: pa.DataType) -> BitmapIndex:
        text = is_text(value_type)
        width = 0 if text else checked_type(value_type, self.kind).itemsize
        rows = meta_rows(reader, "bitmap_index_num_rows")
        length = meta_count(reader, "bitmap_index_length")
        is_nested = meta_flag(reader, "is_nested")
        data = read_array(reader, BITMAP_DATA, "u1")
        if length * (max(width, 1) + MIN_BITMAP_BYTES) > len(data) or length > rows:
            raise damaged(BITMAP_DATA, f"{len(data)} bytes for {length} values of {rows} rows")
        head_starts, starts = _walk(data, length, width)
        keys: NumberKeys | TextKeys
        if text:
            keys = _text_keys(data, head_starts, starts, value_type)
        else:
            keys = _number_keys(data, head_starts, checked_type(value_type, self.kind))
        containers = _read_containers(data, starts, rows)
        bits = _read_bits(data, containers, length, rows)
        nullable = VALID_BITSET in reader.names()
        check_valid_bits(reader, rows, bits)
        return BitmapIndex(
            rows,
            value_type,
            keys,
            data,
            starts,
            containers,
            bits,
            nullable=nullable or count_bits(bits) < rows,
            is_nested=is_nested,
        )


def _number_groups(
    values: npt.NDArray[Any], rows: npt.NDArray[np.uint32] | None
) -> tuple[npt.NDArray[Any], Postings]:
    order = number_order(values)
    in_order = values[order]
    borders = number_runs(in_order)
    owners = order.astype(np.uint32) if rows is None else rows[order]
    return in_order[borders[:-1]], Postings(borders, owners)


# --- reading -------------------------------------------------------------------------------

_LENGTH = struct.Struct("<Q")
_HEAD = struct.Struct("<II")
_LAST_COUNT = struct.Struct("<H")
_LAST_OFFSET = struct.Struct("<I")


def _walk(data: Bytes, length: int, width: int) -> tuple[Counts, Counts]:
    """Where each key and each bitmap begins; `width` is that of a key, 0 for text.

    The one loop over keys. It finds a bitmap's end from its last container and leaves every other
    check to be made for all bitmaps at once.
    """
    view, size = data.data, len(data)
    starts, ends = [], [0]
    at = 0
    try:
        for _ in range(length):
            start = at + (width or 8 + _LENGTH.unpack_from(view, at)[0])
            if start > size:
                raise damaged(BITMAP_DATA, f"the key at byte {at} ends past the entry")
            cookie, count = _HEAD.unpack_from(view, start)
            if cookie != COOKIE or not 1 <= count <= CONTAINER_ROWS:
                raise damaged(BITMAP_DATA, f"no bitmap of array and bitset containers at {start}")
            (last,) = _LAST_COUNT.unpack_from(view, start + 6 + 4 * count)
            (offset,) = _LAST_OFFSET.unpack_from(view, start + 4 + 8 * count)
            end = start + offset + (2 * last + 2 if last < MAX_ARRAY_ROWS else BITSET_BYTES)
            if offset < 8 + 8 * count or end > size:
                raise damaged(BITMAP_DATA, f"the bitmap at byte {start} ends past the entry")
            starts.append(start)
            ends.append(end)
            at = end
    except struct.error as error:
        raise damaged(BITMAP_DATA, f"it ends within the bitmap after byte {at}") from error
    if at != size:
        raise damaged(BITMAP_DATA, f"{size - at} bytes follow its {length} bitmaps")
    found = np.array(ends, np.int64)
    return found[:-1], np.array(starts, np.int64)


def _number_keys(data: Bytes, head_starts: Counts, stored_as: np.dtype[Any]) -> NumberKeys:
    raw = overlaid(data, "u1" if stored_as.kind == "b" else stored_as.str)[head_starts]
    if stored_as.kind == "b" and len(raw) and raw.max() > 1:
        raise damaged(BITMAP_DATA, "it has a bool that is neither true nor false")
    keys = NumberKeys(raw.astype(stored_as, copy=False))
    if not keys.is_ascending(strictly=True):
        raise damaged(BITMAP_DATA, "its keys are not distinct and in ascending order")
    return keys


def _text_keys(
    data: Bytes, head_starts: Counts, starts: Counts, value_type: pa.DataType
) -> TextKeys:
    counts = starts - head_starts - 8
    flat = data[spread(head_starts + 8, counts)]
    borders = np.append(0, np.cumsum(counts))
    raw = pa.Array.from_buffers(
        pa.large_binary(), len(counts), [None, pa.py_buffer(borders), pa.py_buffer(flat)]
    )
    try:
        keys = TextKeys(raw.cast(value_type))
    except pa.ArrowInvalid as error:
        raise damaged(BITMAP_DATA, f"its keys are no {value_type} ({error})") from error
    if not keys.is_ascending():
        raise damaged(BITMAP_DATA, "its keys are not distinct and in ascending order")
    return keys


def _read_containers(data: Bytes, starts: Counts, rows: int) -> Containers:
    shorts, longs = overlaid(data, "<u2"), overlaid(data, "<u4")
    per_bitmap = longs[starts + 4].astype(np.int64)
    owned = np.append(0, np.cumsum(per_bitmap))
    if int(owned[-1]) > rows:
        raise damaged(BITMAP_DATA, f"it has more containers than its {rows} rows can fill")
    owner = np.repeat(np.arange(len(starts)), per_bitmap)
    number = np.arange(len(owner)) - owned[owner]
    described = starts[owner] + 8 + 4 * number
    high = shorts[described].astype(np.uint16)
    counts = shorts[described + 2].astype(np.int64) + 1
    offsets = longs[starts[owner] + 8 + 4 * (per_bitmap[owner] + number)].astype(np.int64)
    sizes = container_bytes(counts)
    within = np.cumsum(sizes) - sizes
    expected = 8 + 8 * per_bitmap[owner] + within - within[owned[owner]]
    same = owner[1:] == owner[:-1]
    if np.any(offsets != expected) or np.any(same & (high[1:] <= high[:-1])):
        raise damaged(BITMAP_DATA, "the containers of a bitmap do not follow one another")
    return Containers(owned, high, counts, starts[owner] + offsets)


def _read_bits(data: Bytes, containers: Containers, length: int, rows: int) -> Bytes:
    """A bit for every row that a bitmap has; no row may be in two of them."""
    for number in np.flatnonzero(containers.counts > MAX_ARRAY_ROWS):
        bitset = np.frombuffer(data, np.uint8, BITSET_BYTES, int(containers.starts[number]))
        if count_bits(bitset) != containers.counts[number]:
            raise damaged(BITMAP_DATA, "a bitset container has another count than its head says")
    if int(containers.counts.sum()) > rows:
        raise damaged(BITMAP_DATA, f"its bitmaps have more than {rows} rows")
    found = containers.rows(data, np.array([0]), np.array([length]))
    if len(found) and found.max() >= rows:
        raise damaged(BITMAP_DATA, f"it names rows past the {rows} there are")
    begins = np.zeros(len(found) + 1, np.bool_)
    begins[np.append(0, np.cumsum(containers.counts))] = True
    if not begins[np.flatnonzero(found[1:] <= found[:-1]) + 1].all():
        raise damaged(BITMAP_DATA, "rows of an array container are not in ascending order")
    bits = bits_of_rows(found, rows)
    if count_bits(bits) != len(found):
        raise damaged(BITMAP_DATA, "a row has two values")
    return bits
