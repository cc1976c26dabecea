"""Golden files of the packed format: what was written, from what, and how damage is judged."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crc32c import crc32c

from penstock.packed.cipher import Cipher

FIXTURES = Path(__file__).parents[1] / "data" / "packed_v3"


def golden(name: str) -> bytes:
    return (FIXTURES / f"{name}.v3").read_bytes()


def spec(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / "specs" / f"{name}.json").read_text())
    return found


def names(prefix: str) -> list[str]:
    """Golden files whose names begin so, sorted."""
    return sorted(path.stem for path in FIXTURES.glob(f"{prefix}*.v3"))


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


def contents(described: Mapping[str, Any]) -> dict[str, bytes]:
    """The entries that a spec describes."""
    return {
        entry["name"]: pattern(entry["pattern"]) if "pattern" in entry else entry["text"].encode()
        for entry in described["entries"]
    }


def pack(
    entries: Mapping[str, bytes],
    meta: bytes = b"{}",
    cipher: Cipher | None = None,
    slice_size: int = 4096,
) -> bytes:
    """A packed file, put together straight from the description of the format.

    Slices are sealed without labels: only a cipher that ignores them can open such a file.
    """
    file = cipher.new_file() if cipher else None
    parts, listed, end = [b"MVSIDXV3"], [], 0

    def put(data: bytes) -> dict[str, int]:
        nonlocal end
        parts.append(data)
        end += len(data)
        return {"offset": end - len(data), "size": len(data)}

    def seal(data: bytes) -> bytes:
        assert file
        out = bytearray(len(data) + file.overhead_bytes)
        file.seal_into(0, b"", memoryview(data), memoryview(out))
        return bytes(out)

    before_meta = 0
    for name, data in [*entries.items(), ("__meta__", meta)]:
        before_meta = end
        entry: dict[str, Any] = {"crc32": f"{crc32c(data):08X}", "name": name}
        if file is None:
            entry |= put(data)
        else:
            starts = range(0, len(data), slice_size)
            entry["original_size"] = len(data)
            entry["slices"] = [put(seal(data[at : at + slice_size])) for at in starts]
        listed.append(entry)
    table: dict[str, Any] = {"entries": listed}
    if file is not None:
        table |= {"__edek__": file.edek, "__ez_id__": file.ez_id, "slice_size": slice_size}
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    footer = struct.pack("<H22xII", 3, end - before_meta, len(text))
    return b"".join([*parts, text, footer])
