"""Packed index files, V3: one file for a whole index, with a directory, checksums and encryption.

    from penstock.packed import PackedWriter, PackedReader, build_index, load_index

    with PackedWriter("tenant.v3") as writer:
        build_index("hybrid", array).write(writer)
    with PackedReader.open("tenant.v3") as reader:
        rows = load_index(reader).query("in", [1, 2])     # a Roaring bitmap

`layout` has the bytes of the container, `writer` and `reader` move them, `aes` and `keys` encrypt
slices, and `indexes` has the kinds of index, which know none of that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.packed.aes import AesGcm
    from penstock.packed.budget import ByteBudget
    from penstock.packed.indexes import build_index, load_index
    from penstock.packed.indexes.base import PackedIndex
    from penstock.packed.keys import EnvironmentKeys, FileKeys, KeyProvider
    from penstock.packed.reader import PackedReader
    from penstock.packed.rotate import rewrap
    from penstock.packed.writer import PackedWriter

_WHERE = {
    "AesGcm": "aes",
    "ByteBudget": "budget",
    "EnvironmentKeys": "keys",
    "FileKeys": "keys",
    "KeyProvider": "keys",
    "PackedIndex": "indexes.base",
    "PackedReader": "reader",
    "PackedWriter": "writer",
    "build_index": "indexes",
    "load_index": "indexes",
    "rewrap": "rotate",
}

__all__ = [
    "AesGcm",
    "ByteBudget",
    "EnvironmentKeys",
    "FileKeys",
    "KeyProvider",
    "PackedIndex",
    "PackedReader",
    "PackedWriter",
    "build_index",
    "load_index",
    "rewrap",
]


def __getattr__(name: str) -> Any:
    """Each name is loaded when it is first used: encryption and tries take time to import."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
