"""The frame of a packed file: magic, directory and footer, to bytes and back.

    magic, 8 bytes | entries, back to back, `__meta__` last | directory, JSON | footer, 32 bytes

The footer says how long the directory and the stored `__meta__` are, the directory where every
entry lies and what its plaintext's CRC-32C is. A plain entry lies in one piece. An encrypted one
is cut into slices of `slice_size` bytes of plaintext, of which only the last may be shorter, and
lies sealed, slice by slice. Offsets count from the end of the magic. `EntryInfo.slices` holds the
pieces of either kind as they lie in the file.

Encoding gives exactly the bytes that Milvus writes. Decoding takes whatever JSON says the same
(any order, any white space, keys it does not know) and trusts no number. What it has let
through obeys:

- every piece lies between the magic and the directory, and no two share a byte;
- so an entry's plaintext is never larger than the file, and may be allocated;
- names are unique, and `__meta__` is among them and is as long as the footer says;
- an encrypted entry has exactly the slices that its size makes necessary.

Everything else is `Corruption`, with the name of the file and what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import Corruption, InvalidInput

MAGIC = b"MVSIDXV3"
MAGIC_BYTES = len(MAGIC)

FOOTER = struct.Struct("<H22xII")
"""Version, 22 bytes that are zero and mean nothing yet, size of `__meta__`, of the directory."""
FOOTER_BYTES = FOOTER.size
VERSION = 3

META = "__meta__"
EMPTY_META = b"{}"

SLICE_BYTES = 16 << 20
SLICE_ALIGNMENT_BYTES = 4096

MAX_DIRECTORY_BYTES = 64 << 20
"""Parsed JSON takes many times its text; half a million names, or 20 TiB of slices, fit."""
MAX_META_BYTES = 256 << 20

_CRC = re.compile(r"[0-9A-Fa-f]{8}")
_LABEL = struct.Struct("<IQ")
_MAX_SIZE = (1 << 63) - 1
_REMEDY = "it is damaged or no packed file: restore it from a copy or write it again"


@dataclass(frozen=True, slots=True)
class Footer:
    meta_bytes: int
    """How many bytes `__meta__` takes in the file, sealed if the file is encrypted."""
    directory_bytes: int

    @property
    def tail_bytes(self) -> int:
        """Footer, directory and meta together, from the end of the file."""
        return FOOTER_BYTES + self.directory_bytes + self.meta_bytes


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """A stretch of the file: `offset` from the end of the magic, and how many bytes lie there."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class EntryInfo:
    name: str
    size: int
    """Bytes of plaintext."""
    crc32: int
    """CRC-32C of the plaintext."""
    slices: tuple[SliceInfo, ...]
    """A plain entry has exactly one, an empty encrypted entry none."""

    @property
    def stored_bytes(self) -> int:
        return sum(piece.size for piece in self.slices)


@dataclass(frozen=True, slots=True)
class Encryption:
    """What the directory of an encrypted file says about its encryption."""

    edek: str
    ez_id: str
    slice_size: int


@dataclass(frozen=True, slots=True)
class Directory:
    entries: tuple[EntryInfo, ...]
    """In the order of writing, `__meta__` last in what we write."""
    encryption: Encryption | None = None


# --- footer ---------------------------------------------------------------------------------------


def encode_footer(meta_bytes: int, directory_bytes: int) -> bytes:
    for what, size in (("meta", meta_bytes), ("directory", directory_bytes)):
        if not 0 <= size <= 0xFFFFFFFF:
            raise InvalidInput(
                f"a {what} of {size} bytes does not fit a packed file, whose footer has 32 bits "
                f"for it; put less into it, large things are entries"
            )
    return FOOTER.pack(VERSION, meta_bytes, directory_bytes)


def decode_footer(data: bytes | memoryview, file_bytes: int, where: str) -> Footer:
    """The footer, from the last bytes of a file that is `file_bytes` long."""
    if file_bytes < MAGIC_BYTES + FOOTER_BYTES or len(data) < FOOTER_BYTES:
        raise Corruption(f"{where} has {file_bytes} bytes, too few for a packed file: {_REMEDY}")
    version, meta_bytes, directory_bytes = FOOTER.unpack(data[-FOOTER_BYTES:])
    if version != VERSION:
        raise Corruption(
            f"{where}: its footer says version {version}, and only {VERSION} is known; it was "
            f"cut short, has bytes behind its end, or was written by a newer version"
        )
    if directory_bytes == 0:
        raise Corruption(f"{where}: its footer says the directory has no bytes; {_REMEDY}")
    footer = Footer(meta_bytes, directory_bytes)
    if MAGIC_BYTES + footer.tail_bytes > file_bytes:
        raise Corruption(
            f"{where}: meta of {meta_bytes} and directory of {directory_bytes} bytes, as its "
            f"footer says, do not fit into the {file_bytes} bytes of the file; {_REMEDY}"
        )
    for what, size, limit in (
        ("directory", directory_bytes, MAX_DIRECTORY_BYTES),
        ("meta", meta_bytes, MAX_META_BYTES),
    ):
        if size > limit:
            raise Corruption(
                f"{where}: its footer says the {what} has {size} bytes, more than the {limit} "
                f"that any packed file needs; {_REMEDY}"
            )
    return footer


def check_magic(data: bytes | memoryview, where: str) -> None:
    if data[:MAGIC_BYTES] != MAGIC:
        raise Corruption(
            f"{where} begins with {bytes(data[:MAGIC_BYTES])!r} and not with {MAGIC!r}; {_REMEDY}"
        )


# --- directory ------------------------------------------------------------------------------------


def canonical_json(value: Any) -> bytes:
    """JSON as the format has it: keys sorted, no white space, UTF-8 as it is."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"this cannot be written as JSON in UTF-8 ({error}): use text without lone "
            f"surrogates, finite numbers, lists and mappings with text as keys"
        ) from error


def parse_json(data: bytes | memoryview, what: str, *, keys_once: bool = False) -> Any:
    """Strict JSON in UTF-8; `what` names it in the error. A key's last value counts."""
    hook = _each_once if keys_once else None
    try:
        return json.loads(str(data, "utf-8"), parse_constant=_no_constant, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise Corruption(f"{what} is not JSON ({error}); {_REMEDY}") from error


def encode_directory(directory: Directory) -> bytes:
    encryption = directory.encryption
    table: dict[str, Any] = {"entries": _entries_json(directory.entries, encryption is not None)}
    if encryption is not None:
        table["__edek__"] = encryption.edek
        table["__ez_id__"] = encryption.ez_id
        table["slice_size"] = encryption.slice_size
    data = canonical_json(table)
    if len(data) > MAX_DIRECTORY_BYTES:
        raise InvalidInput(
            f"a directory of {len(data)} bytes is more than the {MAX_DIRECTORY_BYTES} that a "
            f"packed file may have: use fewer entries, shorter names or larger slices"
        )
    return data


def decode_directory(
    data: bytes | memoryview, footer: Footer, file_bytes: int, where: str
) -> Directory:
    """The directory of a file that is `file_bytes` long, every statement of it checked."""
    # Of a key that is there twice, other readers may take the first: no two may see two files.
    table = parse_json(data, f"{where}: its directory", keys_once=True)
    if not isinstance(table, dict) or not isinstance(table.get("entries"), list):
        raise Corruption(f"{where}: its directory has no list of entries; {_REMEDY}")
    encryption = _encryption(table, where) if "__edek__" in table else None
    entries = tuple(_entry(found, encryption, where) for found in table["entries"])
    _check_names(entries, footer, where)
    data_bytes = file_bytes - MAGIC_BYTES - FOOTER_BYTES - footer.directory_bytes
    _check_places(entries, data_bytes, where)
    return Directory(entries, encryption)


def plain_slice_bytes(entry: EntryInfo, slice_number: int, slice_size: int) -> int:
    """How many bytes of plaintext the slice of an encrypted entry holds."""
    return min(slice_size, entry.size - slice_number * slice_size)


# --- what encryption is bound to ------------------------------------------------------------------


def slice_label(entry_name: str, slice_number: int, digest: bytes = b"") -> bytes:
    """Which slice of which entry this is; no two slices of a file have the same label.

    Slices of `__meta__` carry the `directory_digest` too: they open only beside the directory
    they were sealed with.
    """
    name = entry_name.encode()
    return _LABEL.pack(len(name), slice_number) + name + digest


def directory_digest(
    entries: Iterable[EntryInfo], meta_bytes: int, slice_size: int, ez_id: str
) -> bytes:
    """SHA-256 of all that an encrypted directory says, but for where `__meta__` is and the key.

    `__meta__` is sealed under the digest, so of itself it can only have its size there; the
    wrapped key is left out so that it can be wrapped anew without touching the data.
    """
    listed = [entry for entry in entries if entry.name != META]
    said = {
        "__ez_id__": ez_id,
        "entries": _entries_json(listed, sealed=True),
        "meta_size": meta_bytes,
        "slice_size": slice_size,
    }
    return hashlib.sha256(canonical_json(said)).digest()


# --- inside ---------------------------------------------------------------------------------------


def _entries_json(entries: Sequence[EntryInfo], sealed: bool) -> list[dict[str, Any]]:
    if not sealed:
        return [
            {
                "crc32": f"{entry.crc32:08X}",
                "name": entry.name,
                "offset": entry.slices[0].offset,
                "size": entry.size,
            }
            for entry in entries
        ]
    return [
        {
            "crc32": f"{entry.crc32:08X}",
            "name": entry.name,
            "original_size": entry.size,
            "slices": [{"offset": piece.offset, "size": piece.size} for piece in entry.slices],
        }
        for entry in entries
    ]


def _encryption(table: Mapping[str, Any], where: str) -> Encryption:
    edek, ez_id = table["__edek__"], table.get("__ez_id__")
    if not isinstance(edek, str) or not isinstance(ez_id, str):
        raise Corruption(
            f"{where}: __edek__ and __ez_id__ in its directory must be text; {_REMEDY}"
        )
    slice_size = _size(table, "slice_size", f"{where}: its directory")
    if slice_size == 0 or slice_size % SLICE_ALIGNMENT_BYTES:
        raise Corruption(
            f"{where}: slice_size in its directory is {slice_size}, and must be a multiple of "
            f"{SLICE_ALIGNMENT_BYTES}; {_REMEDY}"
        )
    return Encryption(edek, ez_id, slice_size)


def _entry(found: Any, encryption: Encryption | None, where: str) -> EntryInfo:
    if not isinstance(found, dict):
        raise Corruption(f"{where}: an entry in its directory is no mapping; {_REMEDY}")
    name = found.get("name")
    if not isinstance(name, str) or not _is_utf8(name):
        raise Corruption(f"{where}: an entry in its directory has no name; {_REMEDY}")
    what = f"{where}: entry {name!r} in its directory"
    crc = found.get("crc32")
    if not isinstance(crc, str) or not _CRC.fullmatch(crc):
        raise Corruption(f"{what} has no crc32 of 8 hexadecimal digits; {_REMEDY}")
    if encryption is None:
        size = _size(found, "size", what)
        slices: tuple[SliceInfo, ...] = (SliceInfo(_size(found, "offset", what), size),)
    else:
        size = _size(found, "original_size", what)
        slices = _slices(found, size, encryption.slice_size, what)
    return EntryInfo(name, size, int(crc, 16), slices)


def _slices(
    found: Mapping[str, Any], size: int, slice_size: int, what: str
) -> tuple[SliceInfo, ...]:
    listed = found.get("slices")
    needed = -(-size // slice_size)
    if not isinstance(listed, list) or len(listed) != needed:
        raise Corruption(f"{what} does not list the {needed} slices of its {size} bytes; {_REMEDY}")
    slices = []
    left = size
    for piece in listed:
        if not isinstance(piece, dict):
            raise Corruption(f"{what}: a slice is no mapping; {_REMEDY}")
        stored = _size(piece, "size", what)
        if stored < min(slice_size, left):
            raise Corruption(f"{what}: a slice of {stored} bytes is too short; {_REMEDY}")
        slices.append(SliceInfo(_size(piece, "offset", what), stored))
        left -= slice_size
    return tuple(slices)


def _size(found: Mapping[str, Any], key: str, what: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise Corruption(
            f"{what} has {value!r:.40} for {key}, not a whole number of 63 bits; {_REMEDY}"
        )
    return value


def _check_names(entries: Sequence[EntryInfo], footer: Footer, where: str) -> None:
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        counts = Counter(entry.name for entry in entries)
        twice = counts.most_common(1)[0][0]
        raise Corruption(f"{where}: its directory lists {twice!r} twice; {_REMEDY}")
    meta = by_name.get(META)
    if meta is None:
        raise Corruption(f"{where}: its directory does not list {META}; {_REMEDY}")
    if meta.stored_bytes != footer.meta_bytes:
        raise Corruption(
            f"{where}: {META} has {meta.stored_bytes} bytes by the directory and "
            f"{footer.meta_bytes} by the footer; {_REMEDY}"
        )


def _check_places(entries: Sequence[EntryInfo], data_bytes: int, where: str) -> None:
    pieces = []
    for entry in entries:
        for piece in entry.slices:
            if piece.offset + piece.size > data_bytes:
                raise Corruption(
                    f"{where}: entry {entry.name!r} lies at {piece.offset}, {piece.size} bytes "
                    f"long, by the directory, and the file's data has only {data_bytes} bytes; "
                    f"{_REMEDY}"
                )
            if piece.size:
                pieces.append((piece.offset, piece.size, entry.name))
    pieces.sort()
    end, last = 0, ""
    for offset, size, name in pieces:
        if offset < end:
            raise Corruption(
                f"{where}: entries {last!r} and {name!r} share bytes by the directory; {_REMEDY}"
            )
        end, last = offset + size, name


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(found: str) -> None:
    raise ValueError(f"{found} is no JSON number")
