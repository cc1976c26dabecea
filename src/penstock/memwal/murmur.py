"""Murmur3 (x86, 32-bit) over Arrow arrays, in the two dialects region values need.

- `bucket_hash` is what Lance computes for its `bucket` transform: values of up to 32 bits are
  hashed as 4 bytes, wider ones as 8, and the one to three bytes left over at the end of a string
  are each sign-extended and mixed as a word of their own.
- `murmur3` and `murmur3_multi` are the standard hash, as region expressions and `multi_bucket`
  use it: every integer, date, time and timestamp is widened to 8 bytes and every float to double
  first, so a column may be promoted without moving its rows. `murmur3_multi` hashes each value
  with the hash so far as its seed and skips NULLs, so `murmur3_multi(x)` is `murmur3(x)`, and
  `("ab", "c")` differs from `("a", "bc")`.

Data flows from the Arrow buffers, without a copy, into NumPy arrays of 32-bit words that are mixed
a column of words at a time: word j of every string that has one, in one step. Only below
`SCALAR_ROWS` values does plain integer arithmetic take over, which is then the faster of the two.

The hash of a NULL is whatever its slot holds: callers apply `valid_mask`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from penstock.errors import InvalidInput

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SCALAR_ROWS = 6
_SCALAR_WORDS = 1 << 16
_MASK = 0xFFFFFFFF
_C1 = np.uint32(0xCC9E2D51)
_C2 = np.uint32(0x1B873593)
_FIVE = np.uint32(5)
_H1 = np.uint32(0xE6546B64)
_F1 = np.uint32(0x85EBCA6B)
_F2 = np.uint32(0xC2B2AE35)
_S13, _S15, _S16, _S17, _S19 = (np.uint32(s) for s in (13, 15, 16, 17, 19))
_S32 = np.uint64(32)
_ZERO64 = np.uint64(0)
_NAN64 = np.uint64(0x7FF8000000000000)


def bucket_hash(array: pa.Array) -> U32:
    """Lance's hash of each value; NULL slots hold anything."""
    kind = array.type
    if pat.is_string(kind) or pat.is_large_string(kind):
        return _hash_bytes(*_byte_slices(array), None, bytewise_tail=True)
    if pat.is_float32(kind):
        return _hash_word(_float32_bits(array))
    if pat.is_float64(kind):
        return _hash_word64(_float64_bits(array), None)
    if pat.is_boolean(kind) or kind.bit_width <= 32:
        return _hash_word(_integers(array).astype(np.int32).view(np.uint32))
    return _hash_word64(_integers(array).view(np.uint64), None)


def bucket_hashable(kind: pa.DataType) -> bool:
    """The types Lance buckets by. It refuses every other, and so do we."""
    return bool(
        pat.is_boolean(kind)
        or pat.is_integer(kind)
        or pat.is_float32(kind)
        or pat.is_float64(kind)
        or pat.is_string(kind)
        or pat.is_large_string(kind)
        or pat.is_date32(kind)
        or pat.is_time(kind)
        or pat.is_timestamp(kind)
    )


def murmur3_hashable(kind: pa.DataType) -> bool:
    return bool(
        bucket_hashable(kind)
        or pat.is_float16(kind)
        or pat.is_binary(kind)
        or pat.is_large_binary(kind)
        or pat.is_fixed_size_binary(kind)
        or pat.is_string_view(kind)
        or pat.is_binary_view(kind)
        or pat.is_date64(kind)
        or pat.is_duration(kind)
        or pat.is_null(kind)
    )


def murmur3(array: pa.Array, seed: U32 | None = None) -> U32:
    """The standard hash of each value, on from `seed`; NULL slots hold anything."""
    kind = array.type
    if not murmur3_hashable(kind):
        raise InvalidInput(
            f"murmur3 cannot hash a value of type {kind}; "
            "cast it to a string, a number or a timestamp first"
        )
    if pat.is_null(kind):
        return np.zeros(len(array), np.uint32) if seed is None else seed
    if pat.is_string_view(kind) or pat.is_binary_view(kind):
        array = array.cast(pa.large_binary())
        kind = array.type
    if pat.is_floating(kind):
        return _hash_word64(_float64_bits(array.cast(pa.float64())), seed)
    if _is_bytes(kind):
        return _hash_bytes(*_byte_slices(array), seed, bytewise_tail=False)
    values = _integers(array)
    wide = values if values.dtype.itemsize == 8 else values.astype(np.int64)
    return _hash_word64(wide.view(np.uint64), seed)


def murmur3_multi(arrays: Sequence[pa.Array]) -> tuple[U32, Mask]:
    """The hash across columns, and which rows have one (any value that is not NULL)."""
    if not arrays:
        raise InvalidInput("murmur3_multi wants at least one argument")
    rows = len(arrays[0])
    running = np.zeros(rows, np.uint32)
    any_valid = np.zeros(rows, np.bool_)
    for array in arrays:
        hashed = murmur3(array, running)
        if array.null_count == 0:
            running = hashed
            any_valid[:] = True
        else:
            valid = valid_mask(array)
            running = np.where(valid, hashed, running)
            any_valid |= valid
    return running, any_valid


def valid_mask(array: pa.Array) -> Mask:
    mask: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


# --- Arrow to NumPy ------------------------------------------------------------------------


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pat.is_string(kind)
        or pat.is_large_string(kind)
        or pat.is_binary(kind)
        or pat.is_large_binary(kind)
        or pat.is_fixed_size_binary(kind)
    )


def _integers(array: pa.Array) -> npt.NDArray[Any]:
    """The stored integers of a boolean, integer or temporal array."""
    kind = array.type
    if pat.is_boolean(kind):
        return _fixed_width(array.cast(pa.uint8()), "u1")
    sign = "u" if pat.is_unsigned_integer(kind) else "i"
    return _fixed_width(array, f"<{sign}{kind.bit_width // 8}")


def _fixed_width(array: pa.Array, dtype: str) -> npt.NDArray[Any]:
    values = array.buffers()[1]
    if values is None or not len(array):
        return np.zeros(len(array), dtype)
    size_bytes = np.dtype(dtype).itemsize
    return np.frombuffer(values, dtype, len(array), array.offset * size_bytes)


def _float32_bits(array: pa.Array) -> U32:
    values = _fixed_width(array, "<f4")
    bits = np.where(values == 0, np.uint32(0), values.view(np.uint32))
    return np.where(np.isnan(values), np.uint32(0x7FC00000), bits)


def _float64_bits(array: pa.Array) -> U64:
    values = _fixed_width(array, "<f8")
    bits = np.where(values == 0, _ZERO64, values.view(np.uint64))
    return np.where(np.isnan(values), _NAN64, bits)


def _byte_slices(array: pa.Array) -> tuple[U8, I64, I64]:
    """The value bytes of the array, and where in them each value starts and how long it is."""
    kind, rows = array.type, len(array)
    buffers = array.buffers()
    none = np.zeros(rows, np.int64)
    if not rows or buffers[1] is None:
        return np.zeros(0, np.uint8), none, none
    if pat.is_fixed_size_binary(kind):
        starts = (array.offset + np.arange(rows, dtype=np.int64)) * kind.byte_width
        return np.frombuffer(buffers[1], np.uint8), starts, none + kind.byte_width
    large = pat.is_large_string(kind) or pat.is_large_binary(kind)
    dtype, size_bytes = ("<i8", 8) if large else ("<i4", 4)
    offsets = np.frombuffer(buffers[1], dtype, rows + 1, array.offset * size_bytes)
    offsets = offsets.astype(np.int64, copy=False)
    data = np.zeros(0, np.uint8) if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    return data, offsets[:-1], np.diff(offsets)


# --- the hash ------------------------------------------------------------------------------


def _mix_k(k: U32) -> U32:
    k = k * _C1
    k = (k << _S15) | (k >> _S17)
    return k * _C2


def _mix_h(h: U32, k: U32) -> U32:
    h = h ^ k
    h = (h << _S13) | (h >> _S19)
    return h * _FIVE + _H1


def _finish(h: U32, length: U32 | np.uint32) -> U32:
    h = h ^ length
    h = (h ^ (h >> _S16)) * _F1
    h = (h ^ (h >> _S13)) * _F2
    return h ^ (h >> _S16)


def _hash_word(words: U32) -> U32:
    if len(words) < SCALAR_ROWS:
        return _hash_few(words, 4, None)
    return _finish(_mix_h(np.zeros(len(words), np.uint32), _mix_k(words)), np.uint32(4))


def _hash_word64(words: U64, seed: U32 | None) -> U32:
    if len(words) < SCALAR_ROWS:
        return _hash_few(words, 8, seed)
    h = np.zeros(len(words), np.uint32) if seed is None else seed
    h = _mix_h(h, _mix_k(words.astype(np.uint32)))
    h = _mix_h(h, _mix_k((words >> _S32).astype(np.uint32)))
    return _finish(h, np.uint32(8))


def _hash_bytes(
    data: U8, starts: I64, lengths: I64, seed: U32 | None, *, bytewise_tail: bool
) -> U32:
    if len(starts) < SCALAR_ROWS:
        slices = zip(starts.tolist(), lengths.tolist(), strict=True)
        values = (data[start : start + length] for start, length in slices)
        return _hash_each(values, _seeds(len(starts), seed), bytewise_tail)
    h = np.zeros(len(starts), np.uint32) if seed is None else seed.copy()
    words_each = lengths >> 2
    if words_each.max() > 0:
        _fold_words(h, data, starts, words_each)
    if (lengths & 3).any():
        tail = _tail_bytewise if bytewise_tail else _tail_standard
        h = tail(h, data, starts + (words_each << 2), lengths & 3)
    return _finish(h, lengths.astype(np.uint32))


def _fold_words(h: U32, data: U8, starts: I64, words_each: I64) -> None:
    """Mix the whole words of every value into `h`, longest values first, in place."""
    # A view of the word at every byte position: values start anywhere in the buffer.
    words: U32 = np.ndarray((len(data) - 3,), "<u4", data, strides=(1,))
    most = words_each.max()
    if (words_each == most).all():
        for step in range(int(most)):
            h[:] = _mix_h(h, _mix_k(words[starts + 4 * step]))
        return
    shortness = most - words_each
    if most <= 0xFFFF:
        shortness = shortness.astype(np.uint16)  # sorts by radix
    longest_first = np.argsort(shortness, kind="stable")
    counts = words_each[longest_first]
    ascending = counts[::-1]
    running, position = h[longest_first], starts[longest_first]
    for step in range(int(counts[0])):
        rows = len(counts) - int(np.searchsorted(ascending, step, side="right"))
        if rows < SCALAR_ROWS:
            for row in range(rows):
                begin = int(position[row])
                end = int(starts[longest_first[row]]) + 4 * int(counts[row])
                running[row] = _fold_one(int(running[row]), data[begin:end])
            break
        running[:rows] = _mix_h(running[:rows], _mix_k(words[position[:rows]]))
        position += 4
    h[longest_first] = running


def _tail_bytewise(h: U32, data: U8, starts: I64, left: I64) -> U32:
    signed = data.view(np.int8)
    for byte in range(3):
        rows = np.flatnonzero(left > byte)
        if not len(rows):
            break
        k = signed[starts[rows] + byte].astype(np.int32).view(np.uint32)
        h[rows] = _mix_h(h[rows], _mix_k(k))
    return h


def _tail_standard(h: U32, data: U8, starts: I64, left: I64) -> U32:
    k = np.zeros(len(h), np.uint32)
    for byte in range(3):
        rows = np.flatnonzero(left > byte)
        if not len(rows):
            break
        k[rows] |= data[starts[rows] + byte].astype(np.uint32) << np.uint32(8 * byte)
    return h ^ _mix_k(k)


# --- the same for a few values, in plain integers ---------------------------------------------


def _seeds(rows: int, seed: U32 | None) -> list[int]:
    return [0] * rows if seed is None else seed.tolist()


def _hash_few(words: U32 | U64, size_bytes: int, seed: U32 | None) -> U32:
    hashes = []
    for word, h in zip(words.tolist(), _seeds(len(words), seed), strict=True):
        h = _mix_h_one(h, _mix_k_one(word & _MASK))
        if size_bytes == 8:
            h = _mix_h_one(h, _mix_k_one(word >> 32))
        hashes.append(_finish_one(h, size_bytes))
    return np.array(hashes, np.uint32)


def _hash_each(values: Iterable[U8], seeds: Sequence[int], bytewise_tail: bool) -> U32:
    hashes = []
    for value, seed in zip(values, seeds, strict=True):
        whole = len(value) & ~3
        h = _fold_one(seed, value[:whole])
        left = value[whole:].tolist()
        if bytewise_tail:
            for byte in left:
                h = _mix_h_one(h, _mix_k_one(byte if byte < 128 else byte | 0xFFFFFF00))
        else:
            h ^= _mix_k_one(int.from_bytes(left, "little"))
        hashes.append(_finish_one(h, len(value)))
    return np.array(hashes, np.uint32)


def _fold_one(h: int, data: U8) -> int:
    words = data.view("<u4")
    for start in range(0, len(words), _SCALAR_WORDS):
        for k in _mix_k(words[start : start + _SCALAR_WORDS]).tolist():
            h = _mix_h_one(h, k)
    return h


def _mix_k_one(k: int) -> int:
    k = (k * 0xCC9E2D51) & _MASK
    k = ((k << 15) | (k >> 17)) & _MASK
    return (k * 0x1B873593) & _MASK


def _mix_h_one(h: int, k: int) -> int:
    h ^= k
    h = ((h << 13) | (h >> 19)) & _MASK
    return (h * 5 + 0xE6546B64) & _MASK


def _finish_one(h: int, length: int) -> int:
    h ^= length & _MASK
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
