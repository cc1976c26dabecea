"""AES-256-GCM for packed files: one data key a file, wrapped by a key of a `KeyProvider`.

A sealed slice is a 12-byte nonce, the ciphertext, and a 16-byte tag. The nonce is the slice's
sequence number, big endian: unique because the data key belongs to one file and no sequence
number is used twice in it. Associated data is the file's id and the slice's label, so what was
sealed as one slice opens as no other, of this file or another. `envelope` says how the wrapped
data key lies in the directory.

Invariants
- A file's cipher seals each sequence number at most once, and one of a file that exists seals
  nothing: its writer has used the numbers.
- The data key itself is kept only inside the library's cipher object, which cannot be pickled.
  `AesGcm` can, if its provider can: it holds no key.
- Slices are encrypted and decrypted straight into the caller's buffers, without the GIL.
"""

from __future__ import annotations

import re
import threading
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.errors import Corruption, InvalidInput
from penstock.packed.envelope import (
    FILE_ID_BYTES,
    Envelope,
    Slot,
    check_key_id,
    decode_envelope,
    encode_envelope,
    wrapping_context,
)
from penstock.packed.keys import KEY_BYTES, KeyProvider
from penstock.storage.entropy import Entropy, SystemEntropy

NONCE_BYTES = 12
TAG_BYTES = 16
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES

MAX_SLICE_BYTES = (1 << 31) - 1 - TAG_BYTES
MAX_AHEAD = 1 << 16
"""How far sequence numbers may run ahead of the lowest one that is still to come."""

_INT64 = re.compile(r"0|-?[1-9][0-9]{0,18}")


class AesGcm:
    """The cipher of packed files whose data keys `provider` wraps. `ez_id` goes into new files."""

    def __init__(
        self, provider: KeyProvider, *, ez_id: int = 0, entropy: Entropy | None = None
    ) -> None:
        if (
            isinstance(ez_id, bool)
            or not isinstance(ez_id, int)
            or not -(1 << 63) <= ez_id < 1 << 63
        ):
            raise InvalidInput(f"{ez_id!r} cannot be an encryption zone: give an int64")
        self.provider = provider
        self.ez_id = ez_id
        self._entropy = entropy or SystemEntropy()

    def __repr__(self) -> str:
        return f"AesGcm({self.provider!r}, ez_id={self.ez_id})"

    def new_file(self) -> AesGcmFile:
        data_key = self._entropy.token_bytes(KEY_BYTES)
        file_id = self._entropy.token_bytes(FILE_ID_BYTES)
        slot = self.wrap(data_key, file_id, self.ez_id, self.provider.current())
        edek = encode_envelope(file_id, slot)
        return AesGcmFile(data_key, file_id, edek, str(self.ez_id), _Sequences())

    def open_file(self, edek: str, ez_id: str) -> AesGcmFile:
        envelope = decode_envelope(edek)
        _, data_key = self.unwrap(envelope, parse_ez_id(ez_id))
        return AesGcmFile(data_key, envelope.file_id, edek, ez_id, None)

    def wrap(self, data_key: bytes, file_id: bytes, ez_id: int, key_id: str) -> Slot:
        """The data key wrapped with a key of the provider, as a slot of the envelope."""
        context = wrapping_context(file_id, ez_id)
        return Slot(key_id, self.provider.wrap(check_key_id(key_id), data_key, context))

    def unwrap(self, envelope: Envelope, ez_id: int) -> tuple[int, bytes]:
        """Which slot opened, the first that can, and the data key that was in it."""
        context = wrapping_context(envelope.file_id, ez_id)
        failures: dict[Slot, InvalidInput | Corruption] = {}
        for number, slot in enumerate(envelope.slots):
            if slot is None or slot in failures:
                continue
            try:
                data_key = self.provider.unwrap(slot.key_id, slot.wrapped, context)
            except (InvalidInput, Corruption) as failure:
                failures[slot] = failure
                continue
            if len(data_key) != KEY_BYTES:
                raise Corruption(
                    f"what key {slot.key_id!r} unwrapped has {len(data_key)} bytes and is no "
                    f"data key of {KEY_BYTES}: the key provider gave something else"
                )
            return number, data_key
        _raise_unopened(list(failures.values()))


class AesGcmFile:
    """The encryption of one file; see `cipher.FileCipher`."""

    def __init__(
        self, data_key: bytes, file_id: bytes, edek: str, ez_id: str, sequences: _Sequences | None
    ) -> None:
        self._aes = AESGCM(data_key)
        self._file_id = file_id
        self._edek = edek
        self._ez_id = ez_id
        self._sequences = sequences

    @property
    def edek(self) -> str:
        return self._edek

    @property
    def ez_id(self) -> str:
        return self._ez_id

    @property
    def overhead_bytes(self) -> int:
        return OVERHEAD_BYTES

    def __reduce__(self) -> NoReturn:
        raise TypeError("a file's cipher holds its data key and is not pickled: pickle the AesGcm")

    def seal_into(self, sequence: int, label: bytes, plain: memoryview, out: memoryview) -> None:
        if self._sequences is None:
            raise InvalidInput("this file exists: only the cipher of a new file seals slices")
        if plain.nbytes > MAX_SLICE_BYTES or out.nbytes != plain.nbytes + OVERHEAD_BYTES:
            raise InvalidInput(
                f"a slice of {plain.nbytes} bytes seals to {OVERHEAD_BYTES} more, not to "
                f"{out.nbytes}, and may have at most {MAX_SLICE_BYTES}: use a smaller slice_size"
            )
        self._sequences.take(sequence)
        nonce = sequence.to_bytes(NONCE_BYTES, "big")
        out[:NONCE_BYTES] = nonce
        self._aes.encrypt_into(nonce, plain, self._file_id + label, out[NONCE_BYTES:])

    def open_into(self, label: bytes, sealed: memoryview, out: memoryview) -> None:
        if sealed.nbytes != out.nbytes + OVERHEAD_BYTES or out.nbytes > MAX_SLICE_BYTES:
            raise Corruption(
                f"a sealed slice of {sealed.nbytes} bytes does not hold {out.nbytes} bytes: the "
                f"file's directory was changed or is damaged; restore the file from a copy"
            )
        try:
            self._aes.decrypt_into(
                sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._file_id + label, out
            )
        except InvalidTag:
            raise Corruption(
                "a slice is not what was sealed at its place: the slice, its name or the file's "
                "directory was changed or is damaged; restore the file from a copy"
            ) from None


class _Sequences:
    """Each number once, in any order that is roughly ascending, from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._ahead: set[int] = set()

    def take(self, sequence: int) -> None:
        with self._lock:
            if sequence < self._next or sequence in self._ahead:
                raise InvalidInput(
                    f"slice {sequence} of the file was sealed before: a sequence number is a "
                    f"nonce and must never be used twice; give each slice the next one"
                )
            if sequence >= self._next + MAX_AHEAD:
                raise InvalidInput(
                    f"slice {sequence} is too far ahead of slice {self._next}, which was not "
                    f"sealed yet: number the slices of a file from 0 without gaps"
                )
            self._ahead.add(sequence)
            while self._next in self._ahead:
                self._ahead.remove(self._next)
                self._next += 1


def parse_ez_id(text: str) -> int:
    """The encryption zone that a directory names, in the one way to write it."""
    number = int(text) if _INT64.fullmatch(text) else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise Corruption(
            f"__ez_id__ in the directory is {text!r:.40} and no int64 in decimal: the file is "
            f"damaged; restore it from a copy"
        )
    return number


def _raise_unopened(failures: list[InvalidInput | Corruption]) -> NoReturn:
    if not failures:
        raise Corruption(
            "both copies of the wrapped data key in the directory are damaged: restore the file "
            "from a copy"
        )
    # A missing key has a remedy at hand; that a key fits no slot is said only if none is missing.
    raise next((found for found in failures if isinstance(found, InvalidInput)), failures[0])
