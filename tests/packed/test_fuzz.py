"""Ten thousand damaged files: an error, or the very entry that was written; nothing in between."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from tests.packed.fixtures import golden, pack
from tests.packed.mock_cipher import MockCipher

from penstock.errors import PenstockError
from penstock.packed.reader import PackedReader

MUTANTS = 10_000
SLACK_BYTES = 256 << 10
"""Beside what is read, for the directory as objects and the reader itself."""

Mutation = Callable[[random.Random, bytearray, bytes], None]


def flip_bits(dice: random.Random, data: bytearray, other: bytes) -> None:
    for _ in range(dice.choice((1, 1, 2, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def flip_in_the_frame(dice: random.Random, data: bytearray, other: bytes) -> None:
    (directory_bytes,) = struct.unpack("<I", data[-4:])
    start = max(len(data) - 32 - directory_bytes, 0)
    data[dice.randrange(start, len(data))] ^= 1 << dice.randrange(8)


def cut(dice: random.Random, data: bytearray, other: bytes) -> None:
    at = dice.randrange(len(data))
    if dice.random() < 0.5:
        del data[at:]
    else:
        del data[at : at + dice.randint(1, 64)]


def repeat(dice: random.Random, data: bytearray, other: bytes) -> None:
    at = dice.randrange(len(data))
    data[at:at] = data[at : at + dice.randint(1, 64)]


def splice(dice: random.Random, data: bytearray, other: bytes) -> None:
    """The beginning of one file and the end of another, or a stretch of it in the middle."""
    if dice.random() < 0.5:
        data[dice.randrange(len(data)) :] = other[dice.randrange(len(other)) :]
    else:
        start = dice.randrange(len(other))
        at = dice.randrange(len(data))
        data[at : at + 40] = other[start : start + 40]


def edit_lengths(dice: random.Random, data: bytearray, other: bytes) -> None:
    field = dice.choice((-8, -4))
    value = dice.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, dice.randrange(len(data) + 2)))
    struct.pack_into("<I", data, len(data) + field, value)


def edit_digits(dice: random.Random, data: bytearray, other: bytes) -> None:
    """Another number in the directory, sometimes a huge one; the footer is told of it."""
    (directory_bytes,) = struct.unpack("<I", data[-4:])
    start = len(data) - 32 - directory_bytes
    digits = [at for at in range(start, len(data) - 32) if 48 <= data[at] <= 57]
    at = dice.choice(digits)
    new = str(dice.choice((dice.randrange(10), dice.randrange(10**5), 10**12, 10**30))).encode()
    data[at : at + 1] = new
    struct.pack_into("<I", data, len(data) - 4, directory_bytes + len(new) - 1)


MUTATIONS: list[Mutation] = [
    flip_bits,
    flip_in_the_frame,
    cut,
    repeat,
    splice,
    edit_lengths,
    edit_digits,
    edit_digits,
]


def originals() -> list[bytes]:
    entries = {"first": b"first " * 40, "empty": b"", "second": bytes(range(256)) * 33}
    return [
        golden("c01_basic"),
        golden("c04_zero_len_and_unicode_names"),
        golden("e01_small"),
        golden("e03_multi_entries_exact_slice_and_empty"),
        pack(entries, b'{"rows":7}'),
        pack(entries, b'{"rows":7}', MockCipher()),
        pack({**entries, "first": b"other " * 40}, b'{"rows":8}'),
    ]


def test_damage_is_an_error_or_does_no_harm() -> None:
    dice = random.Random(2026)
    files = originals()
    truth = [read_all(data, 0) for data in files]
    anywhere = {data for entries in truth for data in entries.values()}
    refused = harmless = 0
    for number in range(MUTANTS):
        which = number % len(files)
        data = bytearray(files[which])
        mutation = dice.choice(MUTATIONS)
        mutation(dice, data, dice.choice(files))
        try:
            found = watched(bytes(data), number)
        except PenstockError:
            refused += 1
            continue
        harmless += 1
        for name, read in found.items():
            if mutation is splice:
                assert read in anywhere, number
            else:
                # The directory has no checksum of its own: an entry can come to another name.
                # Under a name that was written there is what was written under it.
                assert read == truth[which].get(name, read), (mutation, number, name)
                assert read in truth[which].values(), (mutation, number, name)
    assert refused > MUTANTS * 3 // 4
    assert harmless > MUTANTS // 50


def watched(data: bytes, number: int) -> dict[str, bytes]:
    """Read everything; of every eighth file, see how much memory that took."""
    if number % 8:
        return read_all(data, number)
    tracemalloc.start()
    try:
        return read_all(data, number // 8)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * len(data) + SLACK_BYTES, number


def read_all(data: bytes, number: int) -> dict[str, bytes]:
    with PackedReader.open(data, keys=MockCipher()) as reader:
        _ = reader.meta
        names = (*reader.names(), "__meta__")
        if number % 2:
            return {name: bytes(reader.read(name)) for name in names}
        return {name: b"".join(reader.stream(name)) for name in names}


@pytest.mark.parametrize("encrypted", [False, True])
def test_every_single_bit_of_a_small_file_counts(encrypted: bool) -> None:
    entries = {"a": b"some bytes", "b": b"more"}
    whole = pack(entries, b'{"k":1}', MockCipher() if encrypted else None)
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        try:
            found = read_all(bytes(data), bit)
        except PenstockError:
            continue
        assert sorted(found.values()) == sorted([*entries.values(), b'{"k":1}']), bit
