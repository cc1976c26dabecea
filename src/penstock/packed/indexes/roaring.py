"""Roaring bitmaps from arrays and bits, and many of them as bytes at once.

The bytes are those of the portable format without run containers: a cookie, the number of
containers, for each its 16 high bits and its cardinality less one, for each its offset, then the
containers: up to 4096 rows as sorted 16-bit numbers, more as a bitset of 8 KiB. They can be made
from row numbers with a few array operations for any number of bitmaps, where making an object per
bitmap would take microseconds each; and for a large answer making bytes to be read back is faster
than adding its rows to a bitmap.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

COOKIE = 12346
CONTAINER_ROWS = 1 << 16
BITSET_BYTES = CONTAINER_ROWS // 8
MAX_ARRAY_ROWS = 4096
MIN_BITMAP_BYTES = 8 + 8 + 2

_BITSETS_AT_ONCE = 256
"""Bitset containers made at a time; each takes 64 KiB of flags while it is made."""

_DENSE = 64
"""An answer of more than one row in this many is made from bits."""

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint32]


# --- one bitmap ----------------------------------------------------------------------------


def bitmap_of_rows(rows: npt.NDArray[Any], total_rows: int) -> BitMap:
    """The bitmap of these rows of so many, in any order, each given once."""
    if len(rows) * _DENSE <= total_rows:
        # The buffer of an array.array is taken whole; a NumPy array would go number by number.
        return BitMap(array("I", np.sort(rows.astype(np.uint32)).tobytes()))
    flags = np.zeros(total_rows, np.bool_)
    flags[rows] = True
    return bitmap_of_bits(np.packbits(flags, bitorder="little"))


def bitmap_of_bits(bits: Bytes) -> BitMap:
    """The bitmap of the rows whose bit is set, least significant bit first."""
    chunks = -(-len(bits) // BITSET_BYTES)
    if not chunks:
        return BitMap()
    padded = np.zeros((chunks, BITSET_BYTES), np.uint8)
    padded.reshape(-1)[: len(bits)] = bits
    counts = np.bitwise_count(padded.view(np.uint64)).sum(axis=1, dtype=np.int64)
    numbers = np.flatnonzero(counts)
    parts = []
    for number in numbers:
        chunk = padded[number]
        if counts[number] <= MAX_ARRAY_ROWS:
            chunk = rows_of_bits(chunk).astype("<u2")
        parts.append(chunk.tobytes())
    described = np.empty((len(numbers), 2), "<u2")
    described[:, 0] = numbers
    described[:, 1] = counts[numbers] - 1
    sizes = container_bytes(counts[numbers])
    offsets = 8 + 8 * len(numbers) + np.cumsum(sizes) - sizes
    head = np.array([COOKIE, len(numbers)], "<u4")
    return BitMap.deserialize(
        b"".join((head.tobytes(), described.tobytes(), offsets.astype("<u4").tobytes(), *parts))
    )


def bits_of_rows(rows: npt.NDArray[Any], total_rows: int) -> Bytes:
    flags = np.zeros(total_rows, np.bool_)
    flags[rows] = True
    return np.packbits(flags, bitorder="little")


def rows_of_bits(bits: Bytes) -> Counts:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))


def count_bits(bits: Bytes) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def container_bytes(counts: Counts) -> Counts:
    return np.where(counts <= MAX_ARRAY_ROWS, 2 * counts, BITSET_BYTES)


def spread(starts: Counts, counts: Counts) -> Counts:
    """The numbers starts[0], starts[0] + 1, … (counts[0] of them), starts[1], … in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total)


def overlaid(data: Any, dtype: str) -> npt.NDArray[Any]:
    """A view of the number that begins at every byte."""
    width = np.dtype(dtype).itemsize
    return np.ndarray((max(0, len(data) - width + 1),), dtype, data, strides=(1,))


# --- many bitmaps as bytes -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Containers:
    """Where the containers of many bitmaps are in one buffer, those of one bitmap in a row."""

    borders: Counts
    """Containers `borders[i]` up to before `borders[i + 1]` are those of bitmap i."""
    high: npt.NDArray[np.uint16]
    counts: Counts
    starts: Counts
    """First byte of each container."""

    @property
    def nbytes(self) -> int:
        parts = (self.borders, self.high, self.counts, self.starts)
        return sum(part.nbytes for part in parts)

    def rows(self, data: Any, first: Counts, stop: Counts) -> Rows:
        """Rows of bitmaps `first[i]` up to before `stop[i]`, for every i, one container after the
        other."""
        some = spread(self.borders[first], self.borders[stop] - self.borders[first])
        counts, starts = self.counts[some], self.starts[some]
        bases = self.high[some].astype(np.uint32) << np.uint32(16)
        lists = counts <= MAX_ARRAY_ROWS
        flat = overlaid(data, "<u2")
        if lists.all():
            return np.repeat(bases, counts) | _listed(flat, starts, counts)
        found = np.empty(int(counts.sum()), np.uint32)
        ends = np.cumsum(counts)
        places = spread((ends - counts)[lists], counts[lists])
        found[places] = np.repeat(bases[lists], counts[lists])
        found[places] |= _listed(flat, starts[lists], counts[lists])
        for number in np.flatnonzero(~lists):
            bits = np.frombuffer(data, np.uint8, BITSET_BYTES, int(starts[number]))
            low = rows_of_bits(bits).astype(np.uint32)
            found[ends[number] - counts[number] : ends[number]] = bases[number] | low
        return found


def _listed(flat: npt.NDArray[Any], starts: Counts, counts: Counts) -> Rows:
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    at = np.repeat(starts - 2 * (ends - counts), counts) + 2 * np.arange(total)
    return flat[at].astype(np.uint32)


def serialise(
    borders: Counts, rows: Rows, heads: Bytes, head_counts: Counts
) -> tuple[Bytes, Counts, Containers]:
    """Bitmaps one after the other, each after its head: the bytes, where bitmaps begin, and what
    they consist of.

    Rows `borders[i]` up to before `borders[i + 1]`, ascending, make bitmap i, and `head_counts[i]`
    bytes of `heads` are to stand before it. No bitmap is empty.
    """
    high = (rows >> np.uint32(16)).astype(np.uint16)
    begins = np.ones(len(rows), np.bool_)
    if len(rows):
        np.not_equal(high[1:], high[:-1], out=begins[1:])
        begins[borders[:-1]] = True
    firsts = np.flatnonzero(begins)
    counts = np.diff(np.append(firsts, len(rows)))
    sizes = container_bytes(counts)
    owned = np.searchsorted(firsts, borders)
    per_bitmap = np.diff(owned)
    payload = np.diff(np.append(0, np.cumsum(sizes))[owned])
    spans = head_counts + 8 + 8 * per_bitmap + payload
    head_starts = np.cumsum(spans) - spans
    starts = head_starts + head_counts

    owner = np.repeat(np.arange(len(per_bitmap)), per_bitmap)
    number = np.arange(len(firsts)) - owned[owner]
    within = np.cumsum(sizes) - sizes
    offsets = 8 + 8 * per_bitmap[owner] + within - within[owned[owner]]
    containers = Containers(owned, high[firsts], counts, starts[owner] + offsets)

    out = np.zeros(int(spans.sum()), np.uint8)
    shorts, longs = overlaid(out, "<u2"), overlaid(out, "<u4")
    out[spread(head_starts, head_counts)] = heads
    longs[starts] = COOKIE
    longs[starts + 4] = per_bitmap
    described = starts[owner] + 8 + 4 * number
    shorts[described] = containers.high
    shorts[described + 2] = counts - 1
    longs[starts[owner] + 8 + 4 * (per_bitmap[owner] + number)] = offsets
    _put_lists(shorts, rows, firsts, containers)
    _put_bitsets(out, rows, firsts, containers)
    return out, starts, containers


def _put_lists(out: npt.NDArray[Any], rows: Rows, firsts: Counts, containers: Containers) -> None:
    lists = containers.counts <= MAX_ARRAY_ROWS
    low = rows.astype(np.uint16)
    counts, starts = containers.counts, containers.starts
    if not lists.all():
        low = low[spread(firsts[lists], counts[lists])]
        counts, starts = counts[lists], starts[lists]
    before = np.cumsum(counts) - counts
    out[np.repeat(starts - 2 * before, counts) + 2 * np.arange(len(low))] = low


def _put_bitsets(out: Bytes, rows: Rows, firsts: Counts, containers: Containers) -> None:
    wanted = np.flatnonzero(containers.counts > MAX_ARRAY_ROWS)
    flags = np.empty((min(len(wanted), _BITSETS_AT_ONCE), CONTAINER_ROWS), np.bool_)
    for at in range(0, len(wanted), _BITSETS_AT_ONCE):
        some = wanted[at : at + _BITSETS_AT_ONCE]
        flags[:] = False
        for place, number in enumerate(some):
            first = firsts[number]
            low = rows[first : first + containers.counts[number]].astype(np.uint16)
            flags[place, low] = True
        bitsets = np.packbits(flags, axis=1, bitorder="little")
        for place, number in enumerate(some):
            start = containers.starts[number]
            out[start : start + BITSET_BYTES] = bitsets[place]
