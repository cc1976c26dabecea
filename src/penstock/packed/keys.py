"""Keys that wrap the data keys of encrypted packed files, and where they come from.

A `KeyProvider` wraps and unwraps; nothing else ever asks for the keys themselves, so a key
management service fits it: `wrap` and `unwrap` are its encrypt and decrypt, `context` its
associated data or encryption context. `FileKeys` and `EnvironmentKeys` hold 256-bit keys of their
own and wrap with AES-256-GCM: a random 12-byte nonce, the sealed data key, a 16-byte tag.

Invariants
- A provider here holds no key between calls: keys are read where they lie every time. So a key
  that was added or removed is so at once, and neither repr nor pickle can carry one. A pickled
  provider reads the file, or the environment, of the process it arrives in.
- No error says anything about a key but its id.
- A key file is only ever replaced as a whole, durably, by one process at a time, and is readable
  by its owner alone. Losing a key is losing every file it wraps: nothing removes one unasked.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from penstock.errors import Corruption, InvalidInput
from penstock.packed.envelope import check_key_id
from penstock.storage.disk import DirectoryLock
from penstock.storage.entropy import Entropy, SystemEntropy

KEY_BYTES = 32
NONCE_BYTES = 12
MAX_KEY_FILE_BYTES = 1 << 20
PREFIX = "PENSTOCK_KEY_"
CURRENT = "CURRENT"

_NOT_FOR_OTHERS = 0o077


class KeyProvider(Protocol):
    """Where data keys get wrapped. Every method may be called from many threads at once.

    The ids that `unwrap` is given come from files. A service that could reach keys of others must
    take only ids it was told of, or whoever can write files brings a key of his own.
    """

    def wrap(self, key_id: str, data_key: bytes, context: bytes) -> bytes:
        """The data key, encrypted; `InvalidInput` if there is no such key."""

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        """The data key; `InvalidInput` if there is no such key or it may not be used,
        `Corruption` if it is not what was wrapped with the key in the same context."""

    def current(self) -> str:
        """The id of the key that wraps for new files."""


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """Keys in the environment: `PENSTOCK_KEY_<ID>` in base64, `PENSTOCK_KEY_CURRENT` the id."""

    prefix: str = PREFIX
    entropy: Entropy = field(default_factory=SystemEntropy, repr=False)

    def wrap(self, key_id: str, data_key: bytes, context: bytes) -> bytes:
        return _wrap(self._key(key_id), data_key, context, self.entropy)

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        return _unwrap(self._key(key_id), key_id, wrapped, context)

    def current(self) -> str:
        found = os.environ.get(self.prefix + CURRENT)
        if not found:
            raise InvalidInput(
                f"the environment does not say which key is for new files: set "
                f"{self.prefix}{CURRENT} to its id"
            )
        return check_key_id(found)

    def _key(self, key_id: str) -> bytes:
        name = self.prefix + check_key_id(key_id)
        text = os.environ.get(name) if key_id != CURRENT else None
        if text is None:
            raise InvalidInput(
                f"there is no key {key_id!r} in the environment: set {name} to {KEY_BYTES} "
                f"bytes in base64 (and name no key {CURRENT})"
            )
        return _key_of(text, f"the environment's {name}")


class FileKeys:
    """Keys in a JSON file, `{"current": id, "keys": {id: base64}}`, for its owner's eyes only.

    `shared` accepts a file that others than its owner may read, such as a mounted secret.
    """

    __slots__ = ("_entropy", "path", "shared")

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shared: bool = False,
        entropy: Entropy | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))
        self.shared = shared
        self._entropy = entropy or SystemEntropy()

    def __repr__(self) -> str:
        return f"FileKeys({str(self.path)!r})"

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], key_id: str = "1", *, entropy: Entropy | None = None
    ) -> FileKeys:
        """A new key file with one random key; refused if the file is there."""
        keys = cls(path, entropy=entropy)
        ring = _Ring(check_key_id(key_id), {key_id: keys._new_key()})
        try:
            with DirectoryLock(str(keys.path.parent)):
                if os.path.lexists(keys.path):
                    raise InvalidInput(
                        f"{keys.path} is there already, and overwriting it would lose its keys: "
                        f"use add or rotate, or another path"
                    )
                _write(keys.path, ring)
        except OSError as error:
            raise _unusable(keys.path, error) from error
        return keys

    def ids(self) -> tuple[str, ...]:
        return tuple(self._read().keys)

    def current(self) -> str:
        return self._read().current

    def wrap(self, key_id: str, data_key: bytes, context: bytes) -> bytes:
        return _wrap(self._key(key_id), data_key, context, self._entropy)

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        return _unwrap(self._key(key_id), key_id, wrapped, context)

    def add(self, key_id: str, key: bytes | None = None) -> None:
        """One key more, random unless given; the current one stays current."""
        if key is not None and len(key) != KEY_BYTES:
            raise InvalidInput(f"key {key_id!r} has {len(key)} bytes, and must have {KEY_BYTES}")
        self._change(check_key_id(key_id), key or self._new_key(), current=False)

    def rotate(self, key_id: str | None = None) -> str:
        """Add a random key and make it the current one; its id is a free number unless given.

        Files keep the key they have until `rewrap` gives them the new one.
        """
        chosen = None if key_id is None else check_key_id(key_id)
        return self._change(chosen, self._new_key(), current=True)

    def remove(self, key_id: str) -> None:
        """Forget a key. Files that are still wrapped with it can then never be read again."""
        try:
            with DirectoryLock(os.path.dirname(os.path.realpath(self.path))):
                ring = self._read()
                if key_id not in ring.keys:
                    raise _missing(key_id, self.path)
                if key_id == ring.current:
                    raise InvalidInput(
                        f"key {key_id!r} in {self.path} is the one for new files: rotate first"
                    )
                kept = {other: key for other, key in ring.keys.items() if other != key_id}
                _write(self.path, _Ring(ring.current, kept))
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _change(self, key_id: str | None, key: bytes, *, current: bool) -> str:
        try:
            # Two that add at once must not lose each other's key: files may be wrapped with it.
            with DirectoryLock(os.path.dirname(os.path.realpath(self.path))):
                ring = self._read()
                if key_id is None:
                    numbers = range(1, len(ring.keys) + 2)
                    key_id = next(str(n) for n in numbers if str(n) not in ring.keys)
                if key_id in ring.keys:
                    raise InvalidInput(
                        f"{self.path} has a key {key_id!r} already, and replacing it would lose "
                        f"every file it wraps: use another id"
                    )
                _write(
                    self.path,
                    _Ring(key_id if current else ring.current, {**ring.keys, key_id: key}),
                )
        except OSError as error:
            raise _unusable(self.path, error) from error
        return key_id

    def _new_key(self) -> bytes:
        return self._entropy.token_bytes(KEY_BYTES)

    def _key(self, key_id: str) -> bytes:
        key = self._read().keys.get(key_id)
        if key is None:
            raise _missing(key_id, self.path)
        return key

    def _read(self) -> _Ring:
        try:
            with open(self.path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                if mode & _NOT_FOR_OTHERS and not self.shared:
                    raise InvalidInput(
                        f"{self.path} holds keys and others may use it (mode {mode:04o}): "
                        f"chmod 600 it, or say shared=True if that is meant"
                    )
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise _unusable(self.path, error) from error
        ring = _ring_of(data)
        if ring is None:
            raise InvalidInput(
                f'{self.path} is no key file: it must be JSON, {{"current": id, "keys": {{id: '
                f"{KEY_BYTES} bytes in base64}}}}; restore it from a copy"
            )
        return ring


# --- key files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class _Ring:
    current: str
    keys: Mapping[str, bytes]


def _ring_of(data: bytes) -> _Ring | None:
    # None and not an error raised in here: a JSONDecodeError carries the text, and with it keys.
    if len(data) > MAX_KEY_FILE_BYTES:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("keys"), dict):
        return None
    keys = {key_id: _decoded(text) for key_id, text in found["keys"].items()}
    whole = {key_id: key for key_id, key in keys.items() if key is not None}
    current = found.get("current")
    if len(whole) != len(keys) or not isinstance(current, str) or current not in whole:
        return None
    return _Ring(current, whole)


def _write(path: Path, ring: _Ring) -> None:
    """Replace the file durably; the caller holds the lock of its directory."""
    target = Path(os.path.realpath(path))
    text = {key_id: base64.b64encode(key).decode() for key_id, key in ring.keys.items()}
    data = json.dumps({"current": ring.current, "keys": text}, indent=2).encode() + b"\n"
    if len(data) > MAX_KEY_FILE_BYTES:
        raise InvalidInput(
            f"{path} would have {len(data)} bytes, more than {MAX_KEY_FILE_BYTES}: remove keys "
            f"that wrap nothing any more"
        )
    temporary = target.with_name(f".{target.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)  # what a crash left; the lock says that nobody is writing it
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _missing(key_id: str, path: Path) -> InvalidInput:
    return InvalidInput(
        f"there is no key {key_id!r} in {path}: add it, or use the file that has it"
    )


def _unusable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(
        f"the key file {path} cannot be used: {error.strerror}; FileKeys.create makes one"
    )


# --- wrapping -------------------------------------------------------------------------------------


def _wrap(key: bytes, data_key: bytes, context: bytes, entropy: Entropy) -> bytes:
    nonce = entropy.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data_key, context)


def _unwrap(key: bytes, key_id: str, wrapped: bytes, context: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
    except (InvalidTag, ValueError):
        raise Corruption(
            f"key {key_id!r} does not open the data key: the key at hand is another of the same "
            f"id, or __edek__ or __ez_id__ in the file's directory was changed; use the key that "
            f"the file was written with, or restore the file from a copy"
        ) from None


def _key_of(text: str, where: str) -> bytes:
    key = _decoded(text)
    if key is None:
        raise InvalidInput(f"{where} is no key: it must be {KEY_BYTES} bytes in base64")
    return key


def _decoded(text: object) -> bytes | None:
    if not isinstance(text, str):
        return None
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None
