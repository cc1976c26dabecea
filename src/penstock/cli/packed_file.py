"""What is in a packed file: its frame, directory and meta, and on demand whether all is right.

The directory of an encrypted file is not secret: where entries lie, their sizes and checksums, the
encryption zone and the ids of the keys that unwrap the data key can be told without any key. Its
meta, and the check of its entries, need one: from a key file, or from the environment if that has
one of those keys.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from penstock.errors import Corruption, InvalidInput
from penstock.packed.layout import (
    FOOTER_BYTES,
    MAGIC_BYTES,
    META,
    VERSION,
    Directory,
    EntryInfo,
    Footer,
    check_magic,
    decode_directory,
    decode_footer,
)
from penstock.packed.reader import PackedReader
from penstock.packed.source import open_source

Report = dict[str, Any]
SUFFIX = ".v3"


def inspect_packed(
    location: str, options: Mapping[str, str], *, verify: bool = False, key_file: str | None = None
) -> Report:
    """The file at `location`; with `verify` every entry is read and `Corruption` names the bad."""
    footer, directory, size_bytes = _frame(location, options)
    report: Report = {
        "kind": "packed file",
        "path": location,
        "size_bytes": size_bytes,
        "version": VERSION,
        "meta_entry_size": footer.meta_bytes,
        "directory_table_size": footer.directory_bytes,
        "encryption": _encryption(directory),
        "entries": [_entry(entry) for entry in directory.entries],
    }
    keys = _keys(directory, key_file)
    if directory.encryption is not None and keys is None:
        if verify:
            raise InvalidInput(
                f"{location} is encrypted, and its entries cannot be checked without a key: give "
                f"--key-file, or set PENSTOCK_KEY_<id> in the environment"
            )
        report["meta"] = "encrypted; a key shows it (--key-file, or PENSTOCK_KEY_<id>)"
        return report
    with PackedReader.open(location, keys=keys, storage_options=options) as reader:
        report["index"] = _index(reader)
        report["meta"] = dict(reader.meta)
        if verify:
            report["verified"] = _verified(reader, location)
    return report


def _frame(location: str, options: Mapping[str, str]) -> tuple[Footer, Directory, int]:
    """Footer and directory, which need no key."""
    with closing(open_source(location, options)) as source:
        tail = source.tail(FOOTER_BYTES)
        footer = decode_footer(tail.data, tail.size_bytes, location)
        check_magic(source.read(0, MAGIC_BYTES), location)
        start = tail.size_bytes - FOOTER_BYTES - footer.directory_bytes
        table = source.read(start, footer.directory_bytes)
        return (
            footer,
            decode_directory(table, footer, tail.size_bytes, location),
            tail.size_bytes,
        )


def _encryption(directory: Directory) -> Report | None:
    if directory.encryption is None:
        return None
    return {
        "ez_id": directory.encryption.ez_id,
        "slice_size": directory.encryption.slice_size,
        "key_ids": _key_ids(directory) or "in an envelope that is not Penstock's",
    }


def _key_ids(directory: Directory) -> list[str]:
    """The keys that unwrap the data key; none if somebody else wrapped it."""
    from penstock.packed.envelope import decode_envelope

    assert directory.encryption is not None
    try:
        slots = decode_envelope(directory.encryption.edek).slots
    except Corruption:
        return []
    return list(dict.fromkeys(slot.key_id for slot in slots if slot is not None))


def _entry(entry: EntryInfo) -> Report:
    return {
        "name": entry.name,
        "size": entry.size,
        "crc32": f"{entry.crc32:08X}",
        "offset": entry.slices[0].offset if entry.slices else None,
        "stored_bytes": entry.stored_bytes,
        "slices": len(entry.slices),
    }


def _keys(directory: Directory, key_file: str | None) -> Any:
    """The cipher to open the file with; None if it is plain, or no key is at hand."""
    if directory.encryption is None:
        return None
    from penstock.packed.aes import AesGcm
    from penstock.packed.keys import PREFIX, EnvironmentKeys, FileKeys

    if key_file is not None:
        return AesGcm(FileKeys(key_file))
    at_hand = any(PREFIX + key_id in os.environ for key_id in _key_ids(directory))
    return AesGcm(EnvironmentKeys()) if at_hand else None


def _index(reader: PackedReader) -> Report | None:
    """Which index the entries are, if they are one."""
    from penstock.packed.indexes import kind_of
    from penstock.packed.indexes.base import DESCRIPTION

    described = reader.meta.get(DESCRIPTION)
    if isinstance(described, Mapping):
        return dict(described)
    try:
        return {"kind": kind_of(reader)}
    except Corruption:
        return None


def _verified(reader: PackedReader, location: str) -> Report:
    """Read all entries piece by piece; the meta was read when the file was opened."""
    damaged: list[tuple[str, Corruption]] = []
    names = [META, *reader.names()]
    for name in names[1:]:
        try:
            for _ in reader.stream(name):
                pass
        except Corruption as error:
            damaged.append((name, error))
    if damaged:
        listed = ", ".join(name for name, _ in damaged[:20])
        raise Corruption(
            f"{location}: {len(damaged)} of {len(names)} entries are damaged ({listed}): "
            f"{damaged[0][1]}"
        ) from damaged[0][1]
    return {"entries": len(names), "bytes": sum(map(reader.size, names))}
