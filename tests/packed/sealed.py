"""Encrypted files for tests: keys at hand, a file to attack, and tools to take it apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.packed.aes import AesGcm
from penstock.packed.keys import FileKeys
from penstock.packed.layout import (
    FOOTER_BYTES,
    MAGIC,
    MAGIC_BYTES,
    canonical_json,
    decode_footer,
    encode_footer,
)
from penstock.packed.reader import PackedReader
from penstock.packed.writer import PackedWriter

SLICE = 4096


def contents(salt: int = 0) -> dict[str, bytes]:
    """Two entries of three slices and a bit, two that are short, one empty."""

    def numbered(seed: int, size: int) -> bytes:
        return b"".join(((seed << 32) + n).to_bytes(8, "big") for n in range(-(-size // 8)))[:size]

    return {
        "long": numbered(salt + 1, 3 * SLICE + 100),
        "twin": numbered(salt + 2, 3 * SLICE + 100),
        "short": numbered(salt + 3, 100),
        "brief": numbered(salt + 4, 100),
        "empty": b"",
    }


def write(
    path: Path, cipher: AesGcm, entries: Mapping[str, bytes] | None = None, **meta: Any
) -> bytes:
    """An encrypted file at the path, and its bytes."""
    with PackedWriter(path, cipher=cipher, slice_size=SLICE) as writer:
        for name, data in (contents() if entries is None else entries).items():
            writer.write_entry(name, data)
        for key, value in meta.items():
            writer.put_meta(key, value)
    return path.read_bytes()


def read(file: bytes | Path, cipher: AesGcm) -> dict[str, bytes]:
    """Everything in the file, `__meta__` as its JSON."""
    with PackedReader.open(file, keys=cipher) as reader:
        found = {name: bytes(reader.read(name)) for name in reader.names()}
        return {**found, "__meta__": canonical_json(dict(reader.meta))}


@dataclass
class Taken:
    """A file taken apart: what lies between magic and directory, and the directory."""

    data: bytearray
    table: dict[str, Any]

    @classmethod
    def apart(cls, file: bytes) -> Taken:
        footer = decode_footer(file, len(file), "the file")
        start = len(file) - FOOTER_BYTES - footer.directory_bytes
        return cls(
            bytearray(file[MAGIC_BYTES:start]), json.loads(file[start : len(file) - FOOTER_BYTES])
        )

    def together(self) -> bytes:
        meta = next((entry for entry in self.entries if entry["name"] == "__meta__"), None)
        meta_bytes = sum(piece["size"] for piece in meta["slices"]) if meta else 0
        directory = canonical_json(self.table)
        footer = encode_footer(meta_bytes, len(directory))
        return MAGIC + bytes(self.data) + directory + footer

    @property
    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.table["entries"]
        return found

    def entry(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.entries if entry["name"] == name)

    def place(self, name: str, number: int) -> slice:
        piece = self.entry(name)["slices"][number]
        return slice(piece["offset"], piece["offset"] + piece["size"])

    def sealed(self, name: str, number: int) -> bytes:
        return bytes(self.data[self.place(name, number)])

    def swap(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        one, other = self.sealed(*first), self.sealed(*second)
        self.data[self.place(*first)] = other
        self.data[self.place(*second)] = one


def new_cipher(directory: Path, name: str = "keys.json", ez_id: int = 5) -> AesGcm:
    return AesGcm(FileKeys.create(directory / name, "old"), ez_id=ez_id)
