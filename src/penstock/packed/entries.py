"""What an index knows of the file it lives in: named entries and a small JSON meta.

Indexes write and load themselves through these two protocols and are unaware of encryption,
transport and layout. `PackedWriter` and `PackedReader` are the ones that are real files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol, TypeAlias

from penstock.storage.objects import Buffer

EntryData: TypeAlias = "Buffer | os.PathLike[str] | BinaryIO"
"""Bytes at hand, the path of a file, or an open binary file read from where it stands."""


class EntryWriter(Protocol):
    def write_entry(self, name: str, data: EntryData, size: int | None = None) -> None:
        """Write one entry; `size` says how many bytes an open file has to give."""

    def put_meta(self, key: str, value: Any) -> None:
        """Set one key of the file's meta; the value is anything JSON can hold."""


class EntryReader(Protocol):
    @property
    def meta(self) -> Mapping[str, Any]: ...

    def names(self) -> Sequence[str]:
        """The entries, in the order they were written, `__meta__` not among them."""

    def size(self, name: str) -> int:
        """How many bytes of plaintext the entry has."""

    def read(self, name: str) -> memoryview:
        """The whole entry, checked."""

    def read_to_file(self, name: str, path: str | os.PathLike[str]) -> None: ...

    def read_to_files(self, paths: Mapping[str, str | os.PathLike[str]]) -> None:
        """Several entries, each to its own file, all at once."""

    def stream(self, name: str) -> Iterator[memoryview]:
        """The entry in order, piece by piece; the last piece comes only if the whole is right."""
