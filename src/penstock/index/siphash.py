"""SipHash-1-3 with a zero key over many short messages at once.

This is the hash of Rust's `DefaultHasher`, which Lance's primary-key bloom filter is built on.
Messages arrive as rows of a `MessageBuilder`: columns append their bytes to every row, then
`finish` lays the rows out in zero-padded 8-byte words and hashes rows of equal word count together,
each round a handful of NumPy calls over all of them.

`siphash13` hashes a single message, without the fixed cost of the vectorised way.

Invariant: the hash of a row depends on that row's bytes alone, whatever else is in the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_INITIAL = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_M = (1 << 64) - 1


class MessageBuilder:
    """Collects the bytes of many messages, column by column."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._lengths: I64 = np.zeros(rows, dtype=np.int64)
        self._fixed: list[tuple[I64, U8, npt.NDArray[np.bool_] | None]] = []
        self._variable: list[tuple[I64, U8, I64]] = []

    def append_fixed(self, values: U8, where: npt.NDArray[np.bool_] | None = None) -> None:
        """Append row i of the matrix `values` to message i, or only where the mask is true."""
        at = self._lengths.copy()
        self._fixed.append((at, values, where))
        width = values.shape[1]
        self._lengths += width if where is None else np.where(where, width, 0)

    def append_variable(self, data: U8, bounds: I64) -> None:
        """Append `data[bounds[i]:bounds[i + 1]]` to message i."""
        self._variable.append((self._lengths.copy(), data, bounds))
        self._lengths += np.diff(bounds)

    def finish(self) -> U64:
        """The hash of every message."""
        if not self._variable and all(where is None for _, _, where in self._fixed):
            return self._finish_equal_lengths()
        words_of_row = self._lengths // 8 + 1
        first_word = np.cumsum(words_of_row) - words_of_row
        words = np.zeros(int(words_of_row.sum()), dtype="<u8")
        out = words.view(np.uint8)
        first_byte = first_word * 8
        for at, values, where in self._fixed:
            starts = first_byte + at
            if where is not None:
                starts, values = starts[where], values[where]
            for column in range(values.shape[1]):
                out[starts + column] = values[:, column]
        for at, data, bounds in self._variable:
            target = np.repeat(first_byte + at - bounds[:-1], np.diff(bounds))
            target += np.arange(bounds[0], bounds[-1])
            out[target] = data[bounds[0] : bounds[-1]]
        out[first_byte + words_of_row * 8 - 1] = (self._lengths & 0xFF).astype(np.uint8)
        hashes = np.empty(self._rows, dtype=np.uint64)
        for count in np.unique(words_of_row).tolist():
            rows = np.flatnonzero(words_of_row == count)
            matrix = words[first_word[rows] + np.arange(count)[:, None]]
            hashes[rows] = _hash_words(matrix)
        return hashes

    def _finish_equal_lengths(self) -> U64:
        length = sum(values.shape[1] for _, values, _ in self._fixed)
        out = np.zeros((self._rows, (length // 8 + 1) * 8), dtype=np.uint8)
        at = 0
        for _, values, _ in self._fixed:
            out[:, at : at + values.shape[1]] = values
            at += values.shape[1]
        out[:, -1] = length & 0xFF
        return _hash_words(np.ascontiguousarray(out.view("<u8").T))


def siphash13(message: bytes) -> int:
    """SipHash-1-3 of one message, with a zero key."""
    v0, v1, v2, v3 = _INITIAL
    tail = len(message) & ~7
    tagged = int.from_bytes(message[tail:], "little") | (len(message) & 0xFF) << 56
    words = [int.from_bytes(message[at : at + 8], "little") for at in range(0, tail, 8)]
    for word, closing in [(word, 0) for word in (*words, tagged)] + [(0, 0xFF), (0, 0), (0, 0)]:
        v3 ^= word
        v2 ^= closing
        v0 = (v0 + v1) & _M
        v1 = (v1 << 13 & _M | v1 >> 51) ^ v0
        v0 = v0 << 32 & _M | v0 >> 32
        v2 = (v2 + v3) & _M
        v3 = (v3 << 16 & _M | v3 >> 48) ^ v2
        v0 = (v0 + v3) & _M
        v3 = (v3 << 21 & _M | v3 >> 43) ^ v0
        v2 = (v2 + v1) & _M
        v1 = (v1 << 17 & _M | v1 >> 47) ^ v2
        v2 = v2 << 32 & _M | v2 >> 32
        v0 ^= word
    return v0 ^ v1 ^ v2 ^ v3


def _hash_words(words: U64) -> U64:
    """SipHash-1-3 of messages given as columns of final, length-tagged words."""
    v0, v1, v2, v3 = (np.full(words.shape[1], start, dtype=np.uint64) for start in _INITIAL)
    scratch = np.empty_like(v0)
    for word in words:
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3, scratch)
        v0 ^= word
    v2 ^= np.uint64(0xFF)
    for _ in range(3):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3, scratch)
    result: U64 = v0 ^ v1 ^ v2 ^ v3
    return result


def _round(v0: U64, v1: U64, v2: U64, v3: U64, scratch: U64) -> tuple[U64, U64, U64, U64]:
    v0 += v1
    _rotate_left(v1, 13, scratch)
    v1 ^= v0
    _rotate_left(v0, 32, scratch)
    v2 += v3
    _rotate_left(v3, 16, scratch)
    v3 ^= v2
    v0 += v3
    _rotate_left(v3, 21, scratch)
    v3 ^= v0
    v2 += v1
    _rotate_left(v1, 17, scratch)
    v1 ^= v2
    _rotate_left(v2, 32, scratch)
    return v0, v1, v2, v3


def _rotate_left(values: U64, bits: int, scratch: U64) -> None:
    np.right_shift(values, np.uint64(64 - bits), out=scratch)
    np.left_shift(values, np.uint64(bits), out=values)
    np.bitwise_or(values, scratch, out=values)
