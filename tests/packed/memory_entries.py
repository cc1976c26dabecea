"""Entries and meta held in memory, and golden files taken apart without the reader under test."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.packed.fixtures import golden

from penstock.packed.entries import EntryData

STREAM_BYTES = 1 << 16


class MemoryEntries:
    """An `EntryWriter` whose entries an `EntryReader`, the same object, gives back."""

    def __init__(
        self, entries: Mapping[str, bytes] | None = None, meta: Mapping[str, Any] | None = None
    ) -> None:
        self.entries: dict[str, bytes] = dict(entries or {})
        self.meta: dict[str, Any] = dict(meta or {})

    # --- writing -----------------------------------------------------------------------------

    def write_entry(self, name: str, data: EntryData, size: int | None = None) -> None:
        assert name not in self.entries
        if isinstance(data, os.PathLike):
            self.entries[name] = Path(data).read_bytes()
        elif hasattr(data, "read"):
            self.entries[name] = data.read() if size is None else data.read(size)
        else:
            self.entries[name] = bytes(memoryview(data).cast("B"))
        assert size is None or len(self.entries[name]) == size

    def put_meta(self, key: str, value: Any) -> None:
        self.meta[key] = json.loads(json.dumps(value))

    # --- reading -----------------------------------------------------------------------------

    def names(self) -> Sequence[str]:
        return list(self.entries)

    def size(self, name: str) -> int:
        return len(self.entries[name])

    def read(self, name: str) -> memoryview:
        return memoryview(self.entries[name])

    def read_to_file(self, name: str, path: str | os.PathLike[str]) -> None:
        Path(path).write_bytes(self.entries[name])

    def read_to_files(self, paths: Mapping[str, str | os.PathLike[str]]) -> None:
        for name, path in paths.items():
            self.read_to_file(name, path)

    def stream(self, name: str) -> Iterator[memoryview]:
        whole = self.read(name)
        for start in range(0, len(whole), STREAM_BYTES):
            yield whole[start : start + STREAM_BYTES]

    # --- for tests ---------------------------------------------------------------------------

    def replaced(self, **entries: bytes | None) -> MemoryEntries:
        """A copy with entries exchanged, or left out where None."""
        kept = {**self.entries, **entries}
        return MemoryEntries({k: v for k, v in kept.items() if v is not None}, self.meta)

    def with_meta(self, **meta: Any) -> MemoryEntries:
        """A copy with keys of the meta exchanged, or left out where None."""
        kept = {**self.meta, **meta}
        return MemoryEntries(self.entries, {k: v for k, v in kept.items() if v is not None})


def golden_entries(name: str) -> MemoryEntries:
    """The entries and the meta of a plain golden file."""
    data = golden(name)
    (directory_bytes,) = struct.unpack("<I", data[-4:])
    directory = json.loads(data[-32 - directory_bytes : -32])
    found = {
        entry["name"]: data[8 + entry["offset"] : 8 + entry["offset"] + entry["size"]]
        for entry in directory["entries"]
    }
    return MemoryEntries(found, json.loads(found.pop("__meta__")))
