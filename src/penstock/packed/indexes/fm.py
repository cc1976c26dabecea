"""The `fmindex` index, which is only read: text recovered from a Burrows-Wheeler transform.

`fm_index.bin`, little endian, as two golden files show it:

```
"XIMF"  u32 8  u32 8  u32 symbols  u32 levels  u32 2048  u64 n
u32[256]         symbol of each byte, 0xFFFFFFFF if the byte does not occur
u64[symbols]     how many smaller symbols there are in the transform (C)
u64[levels][4]   per level where the digits 0 to 3 begin on the next
u64[levels]      words of each level; u64 words of marks; u64 samples; u64 borders
u64[words]...    the levels, two bits per place
u64[words]       marks: one bit per place whose position in the text is known
u32[samples]     these positions
u64[borders]     where each row begins in the text
```

The text is every row's bytes and symbol 1 after each, null rows as empty ones; symbol 0 ends it, so
that the transform has n + 1 places. Symbols are stored as a wavelet matrix of digits of two bits,
the highest first: each level holds the digits in the order the levels above sorted the places into,
stably. What the fields that are 8, 8 and 2048 say is not known; nothing here depends on them.

`load` undoes all that: digits to symbols, symbols to the step from each place to the one before it
in the text, and then from all known positions backwards at once, each until it meets the position
known before it. Where lanes meet, every border ends in symbol 1 and every count agrees with C, or
the file is refused. Questions are then asked of the recovered column.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind, PackedIndex
from penstock.packed.indexes.like import like_mask
from penstock.packed.indexes.postings import damaged, rows_bitmap, text_array

DATA, NULL_BITMAP = "fm_index.bin", "fm_index_null_bitmap"
MAGIC = b"XIMF"
HEADER = struct.Struct("<4sIIIIIQ")
END, SEPARATOR = 0, 1
MAX_SYMBOLS = 258
MAX_LEVELS = 5
UNUSED = 0xFFFFFFFF
MAX_STEPS = 4096
"""Places between known positions; files have 8, and far more would be walked one by one."""


class FmIndex(PackedIndex):
    kind = "fmindex"

    def __init__(self, values: pa.Array, value_type: pa.DataType) -> None:
        super().__init__(len(values), value_type)
        self._column = values

    def _held_bytes(self) -> int:
        return int(self._column.nbytes)

    def write_entries(self, writer: EntryWriter) -> None:
        raise _read_only()

    def values(self) -> pa.Array:
        """The column the index was built from."""
        return self._column

    def is_null(self) -> BitMap:
        return self._rows(self._column.is_null())

    def one_of(self, values: pa.Array) -> BitMap:
        return self._rows(pc.is_in(self._column, value_set=values))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        inside = self._column.is_valid()
        if low is not None:
            compare = pc.greater_equal if with_low else pc.greater
            inside = pc.and_(inside, compare(self._column, low))
        if high is not None:
            compare = pc.less_equal if with_high else pc.less
            inside = pc.and_(inside, compare(self._column, high))
        return self._rows(inside)

    def prefix(self, text: str) -> BitMap:
        return self._rows(pc.starts_with(self._column, text))

    def like(self, pattern: str) -> BitMap:
        return rows_bitmap(np.flatnonzero(like_mask(self._column, pattern)))

    def _rows(self, mask: pa.Array) -> BitMap:
        return rows_bitmap(np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False)))


class FmKind(IndexKind):
    kind = "fmindex"

    def build(self, array: pa.Array, **options: Any) -> FmIndex:
        raise _read_only()

    def load(self, reader: EntryReader, value_type: pa.DataType) -> FmIndex:
        text_array(pa.array([], value_type), self.kind)
        if DATA not in reader.names():
            raise Corruption(f"the file has no entry {DATA!r}; it holds no fmindex")
        parts = _taken_apart(reader.read(DATA))
        nulls = _nulls(reader, len(parts.borders) - 1)
        text = _text(parts)
        begins, ends = parts.borders[:-1], parts.borders[1:] - 1
        if np.any(text[ends] != SEPARATOR) or np.count_nonzero(text == SEPARATOR) != len(ends):
            raise damaged(DATA, "rows do not end where its borders say")
        if np.any((ends > begins) & nulls):
            raise damaged(NULL_BITMAP, "a null row has text")
        byte_of = np.zeros(len(parts.smaller), np.uint8)
        byte_of[parts.symbol_of[parts.symbol_of != UNUSED]] = np.flatnonzero(
            parts.symbol_of != UNUSED
        )
        data = byte_of[text[text != SEPARATOR]].tobytes()
        offsets = np.append(begins - np.arange(len(begins)), len(data))
        column = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(begins), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )
        column = pc.if_else(pa.array(nulls), pa.scalar(None, pa.large_binary()), column)
        try:
            return FmIndex(column.cast(pa.large_string()).cast(value_type), value_type)
        except pa.ArrowInvalid as error:
            raise damaged(DATA, f"its rows are not UTF-8 text ({error})") from error


@dataclass(frozen=True, slots=True)
class _Parts:
    places: int
    symbol_of: npt.NDArray[np.uint32]
    smaller: npt.NDArray[np.int64]
    digit_starts: npt.NDArray[np.int64]
    levels: list[npt.NDArray[np.uint8]]
    known: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64]


def _taken_apart(data: memoryview) -> _Parts:
    """The parts of the entry, each of a size that the entry really has, and in range."""
    if len(data) < HEADER.size:
        raise damaged(DATA, f"{len(data)} bytes hold no header")
    magic, _, _, symbols, levels, _, length = HEADER.unpack_from(data)
    if magic != MAGIC or not 1 <= symbols <= MAX_SYMBOLS or not 1 <= levels <= MAX_LEVELS:
        raise damaged(DATA, "it has no header of an fmindex")
    if length > len(data) * 4 or 4**levels < symbols:
        raise damaged(DATA, f"{len(data)} bytes cannot hold {length} characters")
    at = HEADER.size

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal at
        size = np.dtype(dtype).itemsize * count
        if size > len(data) - at:
            raise damaged(DATA, f"it ends at byte {len(data)}, in the middle of a part")
        found = np.frombuffer(data, dtype, count, at)
        at += size
        return found

    places = length + 1
    symbol_of = take("<u4", 256)
    smaller = take("<u8", symbols)
    digit_starts = take("<u8", levels * 4)
    *words, marks, samples, borders = take("<u8", levels + 3).tolist()
    if words != [(places * 2 + 63) // 64] * levels or marks != (places + 63) // 64:
        raise damaged(DATA, f"its levels are not those of {places} places")
    if not 0 < samples <= places or not 0 < borders <= places:
        raise damaged(DATA, f"{samples} known positions, {borders} borders in {places} places")
    digits = [_digits(take("<u8", count), places) for count in words]
    bits = np.unpackbits(take("<u8", marks).view(np.uint8), bitorder="little")
    known = np.flatnonzero(bits[:places])
    positions = take("<u4", samples).astype(np.int64)
    row_borders = take("<u8", borders)
    if at != len(data):
        raise damaged(DATA, f"{len(data) - at} bytes follow its last part")
    used = symbol_of[symbol_of != UNUSED]
    if len(used) and (used.min() <= SEPARATOR or used.max() >= symbols):
        raise damaged(DATA, "bytes have symbols that do not exist")
    if len(np.unique(used)) != len(used) or len(used) + 2 < symbols:
        raise damaged(DATA, "symbols and bytes do not go together")
    if len(known) != samples or len(np.unique(positions)) != samples or positions.max() > length:
        raise damaged(DATA, "marks and known positions do not go together")
    if row_borders[0] or row_borders[-1] != length or np.any(row_borders[1:] <= row_borders[:-1]):
        raise damaged(DATA, f"its borders do not divide {length} characters into rows")
    for numbers in (smaller, digit_starts):
        if len(numbers) and numbers.max() > places:
            raise damaged(DATA, "it counts more places than it has")
    return _Parts(
        places,
        symbol_of,
        smaller.astype(np.int64),
        digit_starts.astype(np.int64).reshape(levels, 4),
        digits,
        known,
        positions,
        row_borders.astype(np.int64),
    )


def _digits(words: npt.NDArray[Any], places: int) -> npt.NDArray[np.uint8]:
    pairs = np.unpackbits(words.view(np.uint8), bitorder="little").reshape(-1, 2)[:places]
    return pairs[:, 0] + pairs[:, 1] * np.uint8(2)


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.cumsum(counts) - counts


def _text(parts: _Parts) -> npt.NDArray[np.int16]:
    """The symbols of the text in order, without the one that ends it."""
    symbols = np.zeros(parts.places, np.int16)
    at = np.arange(parts.places)
    for digits, starts in zip(parts.levels, parts.digit_starts, strict=True):
        if np.any(_starts(np.bincount(digits, minlength=4)) != starts):
            raise damaged(DATA, "a level's digits are not as many as it says")
        symbols = symbols * 4 + digits[at]
        at = _inverse(np.argsort(digits, kind="stable"))[at]
    if int(symbols.max()) >= len(parts.smaller) or np.any(
        _starts(np.bincount(symbols, minlength=len(parts.smaller))) != parts.smaller
    ):
        raise damaged(DATA, "its symbols are not as many as it says")
    before = _inverse(np.argsort(symbols, kind="stable"))
    text = np.full(parts.places, -1, np.int16)
    # The place of the end of the text is the first, as nothing sorts below it.
    order = np.argsort(parts.positions)
    lanes = np.append(parts.known[order], 0)
    positions = np.append(parts.positions[order], parts.places - 1)
    targets = np.append(-1, positions[:-1])
    met = np.append(-1, lanes[:-1])
    if np.diff(positions).max(initial=0) > MAX_STEPS:
        raise damaged(DATA, f"known positions are more than {MAX_STEPS} places apart")
    running = positions > targets
    lanes, positions, targets, met = (part[running] for part in (lanes, positions, targets, met))
    if len(positions) and targets[0] == -1:
        if positions[0]:
            raise damaged(DATA, "the place where the text begins is not marked")
        lanes, positions, targets, met = (part[1:] for part in (lanes, positions, targets, met))
    while len(lanes):
        text[positions - 1] = symbols[lanes]
        lanes, positions = before[lanes], positions - 1
        done = positions == targets
        if np.any(lanes[done] != met[done]):
            raise damaged(DATA, "known positions contradict each other")
        lanes, positions, targets, met = (part[~done] for part in (lanes, positions, targets, met))
    if np.any(text[:-1] <= END):
        raise damaged(DATA, "the text ends before its end")
    return text[:-1]


def _inverse(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places


def _nulls(reader: EntryReader, rows: int) -> npt.NDArray[np.bool_]:
    if reader.meta.get("total_rows", rows) != rows:
        raise damaged("__meta__", f"total_rows is not the {rows} rows of {DATA!r}")
    if NULL_BITMAP not in reader.names():
        return np.zeros(rows, np.bool_)
    if reader.size(NULL_BITMAP) != (rows + 7) // 8:
        raise damaged(NULL_BITMAP, f"{reader.size(NULL_BITMAP)} bytes for {rows} rows")
    bits = np.unpackbits(np.frombuffer(reader.read(NULL_BITMAP), np.uint8), bitorder="little")
    return bits[:rows].astype(np.bool_)


def _read_only() -> InvalidInput:
    return InvalidInput(
        "an fmindex is only read, not made; for patterns on text build an ngram index"
    )
