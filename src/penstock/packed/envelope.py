"""The text of `__edek__`: a file's id and its wrapped data key, twice.

    version, u8 = 1 | file id, 16 bytes | zero, u8 | slot A, 768 bytes | slot B, 768 bytes
    slot: u16 n | key id, n bytes of UTF-8 | u16 m | wrapped key, m bytes | zeros | CRC-32C, u32

All numbers are little endian; the CRC is of the slot's other 764 bytes. The whole is base64. All
parts are multiples of three bytes long, so each is a stretch of base64 of its own, without
padding: the header takes 24 characters, and each slot the 1024 behind it.

Why two slots: changing the key overwrites one at a time in a file that is never moved nor
shortened, and at every moment one of them is whole. A new file has the same in both. A slot that
is torn is seen by its CRC and decodes to None; that both may be is for the caller to judge. The
CRC tells torn from whole and nothing more: what keeps a slot from being forged is the key that
wrapped it. `wrapping_context` is what that is bound to.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass

from penstock.errors import Corruption, InvalidInput
from penstock.packed.crc import crc32c

VERSION = 1
FILE_ID_BYTES = 16
SLOTS = 2
SLOT_BYTES = 768
"""A key id and what any key management service makes of a data key, up to RSA with 4096 bits."""

HEADER_CHARACTERS = 24
SLOT_CHARACTERS = SLOT_BYTES // 3 * 4
EDEK_CHARACTERS = HEADER_CHARACTERS + SLOTS * SLOT_CHARACTERS

MAX_KEY_ID_BYTES = 240

_HEADER = struct.Struct(f"<B{FILE_ID_BYTES}sx")
_LENGTH = struct.Struct("<H")
_CRC = struct.Struct("<I")
_ROOM_BYTES = SLOT_BYTES - 2 * _LENGTH.size - _CRC.size
_PURPOSE = b"penstock packed v1"
_EZ_ID = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class Slot:
    key_id: str
    wrapped: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    file_id: bytes
    slots: tuple[Slot | None, Slot | None]
    """None where the slot is torn or damaged."""


def wrapping_context(file_id: bytes, ez_id: int) -> bytes:
    """What a wrapped data key is bound to: this use of it, the file, and its zone."""
    return _PURPOSE + file_id + _EZ_ID.pack(ez_id)


def check_key_id(key_id: str) -> str:
    """The id itself, if it may name a key."""
    if not isinstance(key_id, str) or not key_id or not key_id.isprintable():
        raise InvalidInput("a key id is text of at least one character, all of them printable")
    if len(key_id.encode()) > MAX_KEY_ID_BYTES:
        raise InvalidInput(f"a key id has at most {MAX_KEY_ID_BYTES} bytes; use a shorter one")
    return key_id


def slot_place(number: int) -> int:
    """The character of `__edek__` at which the slot begins."""
    return HEADER_CHARACTERS + number * SLOT_CHARACTERS


def encode_slot(slot: Slot) -> str:
    """The slot's stretch of `__edek__`, always `SLOT_CHARACTERS` long."""
    key_id = check_key_id(slot.key_id).encode()
    if not slot.wrapped or len(key_id) + len(slot.wrapped) > _ROOM_BYTES:
        raise InvalidInput(
            f"the data key wrapped with key {slot.key_id!r} has {len(slot.wrapped)} bytes, and "
            f"a packed file has room for 1 to {_ROOM_BYTES - len(key_id)}: use another kind of "
            f"key, or a shorter key id"
        )
    body = b"".join(
        (_LENGTH.pack(len(key_id)), key_id, _LENGTH.pack(len(slot.wrapped)), slot.wrapped)
    ).ljust(SLOT_BYTES - _CRC.size, b"\0")
    return base64.b64encode(body + _CRC.pack(crc32c(body))).decode()


def encode_envelope(file_id: bytes, slot: Slot) -> str:
    """`__edek__` of a new file, with the slot twice."""
    return base64.b64encode(_HEADER.pack(VERSION, file_id)).decode() + encode_slot(slot) * SLOTS


def decode_envelope(edek: str) -> Envelope:
    header = _from_base64(edek[:HEADER_CHARACTERS])
    if len(edek) != EDEK_CHARACTERS or header is None or header[-1]:
        raise Corruption(
            f"__edek__ in the directory, of {len(edek)} characters, is none of Penstock's: the "
            f"file is damaged, or its keys are with whoever wrote it"
        )
    version, file_id = _HEADER.unpack(header)
    if version != VERSION:
        raise Corruption(
            f"__edek__ in the directory says version {version}, and only {VERSION} is known: "
            f"it is damaged, or was written by a newer version"
        )
    return Envelope(file_id, (_slot(edek, 0), _slot(edek, 1)))


def _slot(edek: str, number: int) -> Slot | None:
    start = slot_place(number)
    data = _from_base64(edek[start : start + SLOT_CHARACTERS])
    if data is None:
        return None
    body = data[: -_CRC.size]
    if _CRC.unpack(data[-_CRC.size :]) != (crc32c(body),):
        return None
    key_id, rest = _cut(body)
    wrapped, padding = _cut(rest)
    if not key_id or not wrapped or any(padding):
        return None
    try:
        return Slot(key_id.decode(), wrapped)
    except UnicodeDecodeError:
        return None


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """A string of bytes that its length precedes, and what is behind it; empty if cut short."""
    if len(data) < _LENGTH.size:
        return b"", b""
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return (data[_LENGTH.size : end], data[end:]) if end <= len(data) else (b"", b"")


def _from_base64(text: str) -> bytes | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) * 4 == len(text) * 3 else None
