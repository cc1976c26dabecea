"""`bloom_filter.bin` of a flushed generation: which primary keys it may hold.

A split-block bloom filter as in Parquet (blocks of eight 32-bit words, one bit set in each word),
over the hash that Lance computes of a row's key columns, so that Lance and Penstock can read each
other's files. The file is the blocks and nothing else.

Lance's writer hashes the values of `int32`, `int64`, `string` and `binary` columns only, and of any
other column just that it is not null, while its reader hashes all of them. We write what readers
look for, and look for both (`may_contain`), so that a filter of either writer serves.

Invariant: a key that was inserted is always found. The filter only ever saves work; whether a row
is stale is decided by the exact `_pk_index/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Corruption, InvalidInput
from penstock.index.primary_key import (
    SUPPORTED_KEY_TYPES,
    bytes_and_bounds,
    check_key_type,
    empty_for_null,
    is_variable_width,
    one_chunk,
)
from penstock.index.siphash import U64, MessageBuilder, siphash13

LANCE_EXPECTED_KEYS = 8192
"""Lance sizes every filter for this many keys; ours grow beyond it and are never smaller."""

_LANCE_HASHED_TYPES = (pa.int32(), pa.int64(), pa.string(), pa.binary())
_SMALL_ROWS = 8
_FALSE_POSITIVE_RATE = 0.00057
_BLOCK_BYTES = 32
_MAX_BYTES = 128 << 20
_SALTS = np.array(
    [
        0x47B6137B,
        0x44974D91,
        0x8824AD5B,
        0xA2B7289D,
        0x705495C7,
        0x2DF1424B,
        0x9EFC4947,
        0x5C6BFB31,
    ],
    dtype=np.uint32,
)
_SALT_NUMBERS: tuple[int, ...] = tuple(_SALTS.tolist())


def pk_hashes(columns: Sequence[pa.Array]) -> U64:
    """The hash of every row's key, given its key columns in key order."""
    return _hashes([one_chunk(column) for column in columns], SUPPORTED_KEY_TYPES)


def lance_written_hashes(columns: Sequence[pa.Array]) -> U64 | None:
    """The hashes that Lance's own writer inserts, where they differ from `pk_hashes`."""
    if all(column.type in _LANCE_HASHED_TYPES for column in columns):
        return None
    return _hashes([one_chunk(column) for column in columns], _LANCE_HASHED_TYPES)


def _hashes(arrays: Sequence[pa.Array], hashed_types: Sequence[pa.DataType]) -> U64:
    rows = len(arrays[0])
    for array in arrays:
        check_key_type("of the primary key", array.type)
    if rows <= _SMALL_ROWS:
        types = [array.type if array.type in hashed_types else None for array in arrays]
        by_row = zip(*(array.to_pylist() for array in arrays), strict=True)
        hashes = [siphash13(_message(values, types)) for values in by_row]
        return np.array(hashes, dtype=np.uint64)
    messages = MessageBuilder(rows)
    for array in arrays:
        _append_column(messages, array, array.type in hashed_types)
    return messages.finish()


def _message(values: Sequence[Any], types: Sequence[pa.DataType | None]) -> bytes:
    """The bytes hashed for one key; of a column without a type only whether it is null."""
    parts: list[bytes] = []
    for value, value_type in zip(values, types, strict=True):
        parts.append(b"\x01" if value is None else b"\x00")
        if value is None or value_type is None:
            continue
        if isinstance(value, str):
            parts.append(value.encode() + b"\xff")
        elif isinstance(value, bytes):
            parts.append(len(value).to_bytes(8, "little") + value)
        else:
            width_bytes = (value_type.bit_width + 7) // 8
            signed = pa.types.is_signed_integer(value_type)
            parts.append(int(value).to_bytes(width_bytes, "little", signed=signed))
    return b"".join(parts)


def _append_column(messages: MessageBuilder, array: pa.Array, hash_value: bool) -> None:
    valid = None
    null_flags = np.zeros((len(array), 1), dtype=np.uint8)
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        null_flags[:, 0] = ~valid
    messages.append_fixed(null_flags)
    if not hash_value:
        return
    if is_variable_width(array.type):
        data, bounds = bytes_and_bounds(empty_for_null(array))
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            messages.append_variable(data, bounds)
            messages.append_fixed(np.full((len(array), 1), 0xFF, dtype=np.uint8), valid)
        else:
            lengths = np.diff(bounds).astype("<u8").view(np.uint8).reshape(-1, 8)
            messages.append_fixed(lengths, valid)
            messages.append_variable(data, bounds)
        return
    zero = False if pa.types.is_boolean(array.type) else 0
    values = (array.fill_null(zero) if array.null_count else array).to_numpy(zero_copy_only=False)
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    messages.append_fixed(little.view(np.uint8).reshape(len(array), -1), valid)


class BloomFilter:
    """A set of key hashes that may claim to hold one it does not, never the reverse."""

    __slots__ = ("_words",)

    def __init__(self, expected_keys: int = LANCE_EXPECTED_KEYS) -> None:
        self._words: npt.NDArray[np.uint32] = np.zeros(_size_bytes(expected_keys) // 4, "<u4")

    @classmethod
    def from_hashes(cls, hashes: U64, expected_keys: int | None = None) -> BloomFilter:
        """A filter holding the hashes, sized for them or for as many keys as are expected."""
        bloom = cls(max(LANCE_EXPECTED_KEYS, expected_keys or len(hashes)))
        bloom.insert(hashes)
        return bloom

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> BloomFilter:
        """The filter of a `bloom_filter.bin`."""
        if len(data) == 0 or len(data) % _BLOCK_BYTES:
            raise Corruption(
                f"a bloom filter is whole blocks of {_BLOCK_BYTES} bytes, this is {len(data)} bytes"
            )
        bloom = cls.__new__(cls)
        bloom._words = np.frombuffer(data, dtype="<u4").copy()
        return bloom

    def to_bytes(self) -> bytes:
        return self._words.tobytes()

    @property
    def nbytes(self) -> int:
        return len(self.to_bytes())

    def insert(self, hashes: U64) -> None:
        words, bits = self._places(hashes)
        np.bitwise_or.at(self._words, words.ravel(), bits.ravel())

    def contains(self, hashes: U64) -> npt.NDArray[np.bool_]:
        """False where the key was certainly never inserted."""
        if len(hashes) == 1 and hashes.dtype == np.uint64:
            return np.array([self._contains_one(int(hashes[0]))])
        words, bits = self._places(hashes)
        found: npt.NDArray[np.bool_] = ((self._words[words] & bits) != 0).all(axis=1)
        return found

    def _contains_one(self, key_hash: int) -> bool:
        """The same for one key, several times faster: most are ruled out by the first words."""
        blocks = len(self._words) // 8
        first = 8 * (((key_hash >> 32) * blocks) >> 32)
        low = key_hash & 0xFFFFFFFF
        block = self._words[first : first + 8].tolist()
        return all(
            word >> (((low * salt) & 0xFFFFFFFF) >> 27) & 1
            for word, salt in zip(block, _SALT_NUMBERS, strict=True)
        )

    def may_contain(self, columns: Sequence[pa.Array]) -> npt.NDArray[np.bool_]:
        """`contains` for keys given as columns, for filters written by Penstock or by Lance."""
        found = self.contains(pk_hashes(columns))
        lance_hashes = lance_written_hashes(columns)
        return found if lance_hashes is None else found | self.contains(lance_hashes)

    def _places(self, hashes: U64) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """For each hash the eight words it concerns, and its bit in each."""
        if hashes.dtype != np.uint64:
            raise InvalidInput(f"key hashes are uint64, got {hashes.dtype}")
        blocks = np.uint64(len(self._words) // 8)
        block = ((hashes >> np.uint64(32)) * blocks) >> np.uint64(32)
        words = (block.astype(np.int64) * 8)[:, None] + np.arange(8)
        low = hashes.astype(np.uint32)[:, None]
        bits = np.uint32(1) << ((low * _SALTS) >> np.uint32(27))
        return words, bits


def _size_bytes(expected_keys: int) -> int:
    bits = -8.0 * expected_keys / math.log(1.0 - _FALSE_POSITIVE_RATE ** (1.0 / 8.0))
    size_bytes = min(max(int(bits) // 8, _BLOCK_BYTES), _MAX_BYTES)
    return 1 << (size_bytes - 1).bit_length()
