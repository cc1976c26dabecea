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

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Corruption

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]

BLOCK_ROWS = 128

_LANES = 4


class Blobs:
    """The bytes of a large_binary array, and where each value starts."""

    def __init__(self, array: pa.Array) -> None:
        offsets = np.frombuffer(array.buffers()[1], np.int64)
        self.offsets = offsets[array.offset : array.offset + len(array) + 1]
        data = array.buffers()[2]
        whole = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
        self.data: Bytes = whole[int(self.offsets[0]) : int(self.offsets[-1])]
        self.offsets = self.offsets - self.offsets[0]


def decode_postings(blocks: Blobs, length: int, name: str) -> tuple[UInt32s, Int32s]:
    full, rest = divmod(length, BLOCK_ROWS)
    if len(blocks.offsets) - 1 != full + (rest > 0):
        raise Corruption(f"{name} has {len(blocks.offsets) - 1} blocks for {length} documents")
    documents = np.empty(length, dtype=np.uint32)
    frequencies = np.empty(length, dtype=np.uint32)
    if full:
        starts, data = blocks.offsets[:full], blocks.data
        width_at = starts + 8
        first = _words(data, starts + 4, 1).reshape(full, 1)
        deltas, frequencies_at = _unpack(data, width_at, name)
        values, end = _unpack(data, frequencies_at, name)
        if not np.array_equal(end, blocks.offsets[1 : full + 1]):
            raise Corruption(f"{name} has blocks of a wrong size; rebuild the index")
        documents[: full * BLOCK_ROWS] = (
            np.cumsum(deltas, axis=1, dtype=np.uint32) + first
        ).ravel()
        frequencies[: full * BLOCK_ROWS] = values.ravel()
    if rest:
        tail = _varints(blocks.data[int(blocks.offsets[full]) + 4 :])
        if len(tail) != 2 * rest:
            raise Corruption(f"{name} has a last block of a wrong size; rebuild the index")
        documents[full * BLOCK_ROWS :] = np.cumsum(tail[:rest], dtype=np.uint32)
        frequencies[full * BLOCK_ROWS :] = tail[rest:]
    return documents, frequencies.astype(np.int32)


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
    tail_bytes = data[_ranges(at, ends - at)]
    tails = _varints(tail_bytes)
    rests = counts - full * BLOCK_ROWS
    if len(tails) != int(rests.sum()):
        raise Corruption(f"{name} has {len(tails)} positions too many or few; rebuild the index")
    deltas[_ranges(block_first + full * BLOCK_ROWS, rests)] = tails
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
        words = np.ascontiguousarray(words.reshape(len(same), width, _LANES).swapaxes(0, 1))
        mask = np.uint32((1 << width) - 1)
        values = np.empty((BLOCK_ROWS // _LANES, len(same), _LANES), dtype=np.uint32)
        for slot in range(BLOCK_ROWS // _LANES):
            word, shift = divmod(slot * width, 32)
            value = np.right_shift(words[word], np.uint32(shift), out=values[slot])
            if shift + width > 32:
                value |= words[word + 1] << np.uint32(32 - shift)
            value &= mask
        unpacked[same] = values.swapaxes(0, 1)
    return unpacked.reshape(groups, BLOCK_ROWS), ends


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


def _ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """starts[0], starts[0]+1, ... counts[0] of them, then those of starts[1], and so on."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(starts - offsets, counts) + np.arange(int(counts.sum()))
