"""Decoding the posting lists of Lance's full-text index files, whole lists at a time.

A posting block holds 128 documents: f32 score bound, u32 first document, u8 width and bit-packed
deltas, u8 width and bit-packed frequencies. The last, shorter block is varints. 128 values of w
bits are packed in four lanes: value i is in lane i % 4, whose w words are every fourth u32.
Positions are one stream a term, cut at the posting blocks: deltas within a document, each 128 of a
block's as u8 width and packed bits, the rest as varints.

Blocks of equal width are unpacked together, so the work is a few NumPy calls a width, not a block.

Invariants
- A list that does not add up to its stated length and size is `Corruption`, never a short answer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Corruption
from penstock.index.text_block import ranges

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]

BLOCK_ROWS = 128

_LANES = 4
_FEW_GROUPS = 128


class Blobs:
    """The bytes of a large_binary array, and where each value starts."""

    def __init__(self, array: pa.Array) -> None:
        offsets = np.frombuffer(array.buffers()[1], np.int64)
        self.offsets = offsets[array.offset : array.offset + len(array) + 1]
        data = array.buffers()[2]
        whole = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        self.data: Bytes = whole[int(self.offsets[0]) : int(self.offsets[-1])]
        self.offsets = self.offsets - self.offsets[0]


def decode_postings(
    blocks: Blobs, lengths: Sequence[int], name: str
) -> list[tuple[UInt32s, Int32s]]:
    """The documents and frequencies of lists of these lengths, whose blocks follow each other."""
    counts = [divmod(length, BLOCK_ROWS) for length in lengths]
    ends = np.cumsum([full + (rest > 0) for full, rest in counts], dtype=np.int64).tolist()
    if len(blocks.offsets) - 1 != ends[-1]:
        raise Corruption(f"{name} has {len(blocks.offsets) - 1} blocks for {lengths} documents")
    whole = np.ones(ends[-1], dtype=np.bool_)
    whole[[end - 1 for end, (_, rest) in zip(ends, counts, strict=True) if rest]] = False
    blocks_at = np.flatnonzero(whole)
    documents = frequencies = np.zeros((0, BLOCK_ROWS), dtype=np.uint32)
    if len(blocks_at):
        starts, data = blocks.offsets[blocks_at], blocks.data
        first = _words(data, starts + 4, 1).reshape(len(starts), 1)
        deltas, frequencies_at = _unpack(data, starts + 8, name)
        frequencies, stops = _unpack(data, frequencies_at, name)
        if not np.array_equal(stops, blocks.offsets[blocks_at + 1]):
            raise Corruption(f"{name} has blocks of a wrong size; rebuild the index")
        documents = np.cumsum(deltas, axis=1, dtype=np.uint32) + first
    found: list[tuple[UInt32s, Int32s]] = []
    done = 0
    for end, (full, rest) in zip(ends, counts, strict=True):
        here = documents[done : done + full].ravel()
        often = frequencies[done : done + full].ravel()
        done += full
        if rest:
            last = blocks.data[int(blocks.offsets[end - 1]) + 4 : int(blocks.offsets[end])]
            tail = _varints(last)
            if len(tail) != 2 * rest:
                raise Corruption(f"{name} has a last block of a wrong size; rebuild the index")
            here = np.concatenate([here, np.cumsum(tail[:rest], dtype=np.uint32)])
            often = np.concatenate([often, tail[rest:]])
        found.append((here, often.astype(np.int32)))
    return found


def decode_positions(data: Bytes, starts: UInt32s, frequencies: Int32s, name: str) -> Int32s:
    """The positions of all documents, one after the other."""
    total = int(frequencies.sum(dtype=np.int64))
    firsts = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])
    block_first = firsts[0:-1:BLOCK_ROWS]
    counts = np.diff(np.append(block_first, total))
    if len(starts) != len(counts):
        raise Corruption(f"{name} has {len(starts)} blocks of positions for {len(counts)}")
    deltas = np.empty(total, dtype=np.uint32)
    at = starts.astype(np.int64)
    full = counts // BLOCK_ROWS
    for turn in range(int(full.max(initial=0))):
        turning = np.flatnonzero(full > turn)
        values, at[turning] = _unpack(data, at[turning], name)
        into = block_first[turning] + turn * BLOCK_ROWS
        deltas[into[:, None] + np.arange(BLOCK_ROWS)] = values
    ends = np.append(starts[1:].astype(np.int64), len(data))
    tail_bytes = data[ranges(at, ends - at)]
    tails = _varints(tail_bytes)
    rests = counts - full * BLOCK_ROWS
    if len(tails) != int(rests.sum()):
        raise Corruption(f"{name} has {len(tails)} positions too many or few; rebuild the index")
    deltas[ranges(block_first + full * BLOCK_ROWS, rests)] = tails
    running = np.cumsum(deltas, dtype=np.int64)
    before = running[firsts[:-1]] - deltas[firsts[:-1]]
    positions: Int32s = (running - np.repeat(before, frequencies)).astype(np.int32)
    return positions


def _unpack(data: Bytes, width_at: Int64s, name: str) -> tuple[UInt32s, Int64s]:
    """Packed groups of 128 values, each a width byte and its bits; and where each one ends.

    Groups of the same width are unpacked together.
    """
    groups = len(width_at)
    if groups and int(width_at.max()) >= len(data):
        raise Corruption(f"{name} ends too early; rebuild the index")
    widths = data[width_at]
    ends = width_at + 1 + widths.astype(np.int64) * (BLOCK_ROWS // 8)
    if groups and (int(widths.max()) > 32 or int(ends.max()) > len(data)):
        raise Corruption(f"{name} has a block of an impossible width; rebuild the index")
    unpacked = np.zeros((groups, BLOCK_ROWS // _LANES, _LANES), dtype=np.uint32)
    for width in np.flatnonzero(np.bincount(widths, minlength=33)).tolist():
        if not width:
            continue
        same = np.flatnonzero(widths == width)
        words = _words(data, width_at[same] + 1, width * _LANES)
        words = words.reshape(len(same), width, _LANES)
        unpacked[same] = (_few if len(same) <= _FEW_GROUPS else _many)(words, width)
    return unpacked.reshape(groups, BLOCK_ROWS), ends


def _few(words: UInt32s, width: int) -> UInt32s:
    """The values of some groups of one width; few calls."""
    at, shifts, crossing = _slots(width)
    values = words[:, at]
    values >>= shifts
    if len(crossing):
        rest = np.uint32(32) - shifts[crossing]
        values[:, crossing] |= words[:, at[crossing] + 1] << rest
    values &= np.uint32((1 << width) - 1)
    return values


def _many(words: UInt32s, width: int) -> UInt32s:
    """The same, with little memory touched at a time."""
    words = np.ascontiguousarray(words.swapaxes(0, 1))
    mask = np.uint32((1 << width) - 1)
    values = np.empty((BLOCK_ROWS // _LANES, words.shape[1], _LANES), dtype=np.uint32)
    for slot in range(BLOCK_ROWS // _LANES):
        word, shift = divmod(slot * width, 32)
        value = np.right_shift(words[word], np.uint32(shift), out=values[slot])
        if shift + width > 32:
            value |= words[word + 1] << np.uint32(32 - shift)
        value &= mask
    return values.swapaxes(0, 1)


@functools.cache
def _slots(width: int) -> tuple[Int64s, UInt32s, Int64s]:
    """Of each value of a lane its word and shift; and which values go on in the next word."""
    bits = np.arange(BLOCK_ROWS // _LANES) * width
    shifts = bits & 31
    crossing = np.flatnonzero(shifts + width > 32)
    return bits >> 5, shifts.astype(np.uint32)[:, None], crossing


def _words(data: Bytes, starts: Int64s, count: int) -> UInt32s:
    """`count` little-endian u32 from each start, a row each; starts need no alignment."""
    words: UInt32s = data[starts[:, None] + np.arange(4 * count)].view("<u4")
    return words


def _varints(data: Bytes) -> UInt32s:
    last = np.flatnonzero(data < 0x80)
    if not len(last):
        return np.zeros(0, dtype=np.uint32)
    starts = np.concatenate([[0], last[:-1] + 1])
    sizes = last - starts + 1
    if int(sizes.max()) == 1:
        return data.astype(np.uint32)
    shifts = 7 * (np.arange(int(last[-1]) + 1) - np.repeat(starts, sizes))
    parts = (data[: int(last[-1]) + 1] & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(parts, starts).astype(np.uint32)
