"""Changing the key of an encrypted packed file without touching its data.

The data key stays; it is wrapped anew and put into the two slots of `__edek__` (see `envelope`).
Nothing is decrypted but the data key, and neither the directory's length nor any byte outside the
slots changes.

- A file, by its path: in place. First the slot that did not open the file, written, synced and
  read back; then the other. At every moment one slot is whole, so a crash leaves a file that opens
  with the old key or the new one, and running again finishes the change. What reads at the same
  moment reads one whole slot too. When it is done the old key opens the file no more. One file
  under several names (hard links) changes under all of them.
- An object in a store: objects never change, so the sealed bytes are copied as they are under a
  new tail, which takes the old one's place in one step. Bytes lie where they lay, so that readers
  which have the old directory go on reading.

It is the same data key: whoever kept a copy of the file as it was, and the old key, still reads
that copy. Only writing the data anew shuts out one who has had the key.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from penstock.errors import (
    CommitConflict,
    Corruption,
    InvalidInput,
    ObjectNotFound,
    StorageError,
)
from penstock.packed.aes import AesGcm, parse_ez_id
from penstock.packed.envelope import (
    SLOT_CHARACTERS,
    SLOTS,
    Envelope,
    Slot,
    decode_envelope,
    encode_slot,
    slot_place,
)
from penstock.packed.layout import (
    FOOTER_BYTES,
    MAGIC_BYTES,
    check_magic,
    decode_directory,
    decode_footer,
)
from penstock.storage.disk import RACE_ATTEMPTS, read_at
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store

TAIL_BYTES = 64 << 10
COPY_BYTES = 16 << 20

Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class RewrapReport:
    where: str
    key_id: str
    """The key that opens the file now."""
    previous: tuple[str, ...]
    """The keys that did before; more than one if an earlier change was cut short."""
    changed: bool
    written_bytes: int

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.where} has key {self.key_id!r} already"
        before = " and ".join(repr(key_id) for key_id in self.previous)
        return f"{self.where} now has key {self.key_id!r} instead of {before}"


def rewrap(
    target: str | os.PathLike[str] | tuple[ObjectStore, str],
    cipher: AesGcm,
    new_key_id: str | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
) -> RewrapReport:
    """Wrap a file's data key with another key of the cipher's provider, by default the current.

    The file is a path, the URI of an object, or a store and a key.
    """
    if isinstance(target, tuple):
        return rewrap_object(*target, cipher, new_key_id)
    if not isinstance(target, str | os.PathLike):
        raise InvalidInput(f"{target!r} must be a path, a URI, or a store and a key")
    location = os.fsdecode(target)
    if "://" not in location:
        return rewrap_file(location, cipher, new_key_id)
    parent, _, key = location.rpartition("/")
    if not key or parent.endswith("/"):
        raise InvalidInput(f"{location!r} does not name a file in a store")
    store = open_store(parent, storage_options)
    if isinstance(store, LocalStore):
        return rewrap_file(os.path.join(store.uri, unquote(key)), cipher, new_key_id)
    return rewrap_object(store, unquote(key), cipher, new_key_id)


def rewrap_file(
    path: str | os.PathLike[str],
    cipher: AesGcm,
    new_key_id: str | None = None,
    *,
    write: Callable[[int, bytes, int], int] = os.pwrite,
) -> RewrapReport:
    """Change the key of a file in place. `write` is what puts bytes into it."""
    where = os.fspath(path)
    try:
        fd = _open_alone(where)
    except FileNotFoundError as error:
        raise ObjectNotFound(f"there is no file {where}") from error
    except ValueError as error:
        raise InvalidInput(f"{where!r} is no path of a file: {error}") from error
    except OSError as error:
        raise StorageError(
            f"{where} cannot be opened for changing its key: {error.strerror}"
        ) from error
    try:
        found = _find(
            lambda start, length: bytes(read_at(fd, start, length)), os.fstat(fd).st_size, where
        )
        change = _plan(found, cipher, new_key_id, where)
        written_bytes = 0
        for number in change.order:
            at = found.edek_at + slot_place(number)
            _write_slot(fd, at, change.text, write, where)
            written_bytes += len(change.text)
    except OSError as error:
        raise StorageError(
            f"changing the key of {where} failed ({error.strerror}); it opens with the key it "
            f"had or with the new one: keep both, and run it again"
        ) from error
    finally:
        os.close(fd)
    return change.report(where, written_bytes)


def rewrap_object(
    store: ObjectStore, key: str, cipher: AesGcm, new_key_id: str | None = None
) -> RewrapReport:
    """Replace an object by one with the same sealed bytes and another key."""
    where = f"{key} in {store.uri}"
    # Before anything is read: what is copied must be the object that the slots were found in.
    before = store.head(key)
    tail = store.get_tail(key, TAIL_BYTES)
    start_of_tail = tail.size_bytes - tail.data.nbytes

    def read(start: int, length: int) -> bytes:
        if start < start_of_tail:
            return bytes(store.get_range(key, start, length))
        return bytes(tail.data[start - start_of_tail : start - start_of_tail + length])

    found = _find(read, tail.size_bytes, where)
    change = _plan(found, cipher, new_key_id, where)
    if not change.order:
        return change.report(where, 0)
    slots_at = found.edek_at + slot_place(0)
    behind_at = slots_at + SLOTS * SLOT_CHARACTERS
    with store.open_writer(key, expected_bytes=tail.size_bytes) as writer:
        for start in range(0, slots_at, COPY_BYTES):
            writer.write(store.get_range(key, start, min(COPY_BYTES, slots_at - start)))
        writer.write(change.text * SLOTS)
        for start in range(behind_at, tail.size_bytes, COPY_BYTES):
            writer.write(store.get_range(key, start, min(COPY_BYTES, tail.size_bytes - start)))
        if store.head(key).etag != before.etag:
            raise CommitConflict(
                f"{where} was replaced while its key was changed; nothing was done: run it again"
            )
        writer.commit()
    return change.report(where, tail.size_bytes)


# --- finding the wrapped key ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    envelope: Envelope
    ez_id: int
    edek_at: int
    """The byte of the file at which the text of `__edek__` begins."""


def _find(read: Read, file_bytes: int, where: str) -> _Found:
    check_magic(read(0, MAGIC_BYTES), where)
    end = max(file_bytes - FOOTER_BYTES, 0)
    footer = decode_footer(read(end, FOOTER_BYTES), file_bytes, where)
    start = end - footer.directory_bytes
    data = read(start, footer.directory_bytes)
    encryption = decode_directory(data, footer, file_bytes, where).encryption
    if encryption is None:
        raise InvalidInput(f"{where} is not encrypted and has no key to change")
    with _naming(where):
        envelope, ez_id = decode_envelope(encryption.edek), parse_ez_id(encryption.ez_id)
    text = f'"{encryption.edek}"'.encode()
    if data.count(text) != 1:
        raise Corruption(
            f"{where}: __edek__ stands {data.count(text)} times in its directory as Penstock "
            f"writes it, and must once; restore it from a copy or write it again"
        )
    return _Found(envelope, ez_id, start + data.index(text) + 1)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Ciphers and key providers do not know which file they are asked about."""
    try:
        yield
    except (InvalidInput, Corruption) as error:
        raise type(error)(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Change:
    key_id: str
    previous: tuple[str, ...]
    text: bytes
    """What goes into a slot."""
    order: tuple[int, ...]
    """The slots to write, one after the other."""

    def report(self, where: str, written_bytes: int) -> RewrapReport:
        return RewrapReport(where, self.key_id, self.previous, bool(self.order), written_bytes)


def _plan(found: _Found, cipher: AesGcm, new_key_id: str | None, where: str) -> _Change:
    envelope = found.envelope
    with _naming(where):
        opened, data_key = cipher.unwrap(envelope, found.ez_id)
    key_id = cipher.provider.current() if new_key_id is None else new_key_id
    previous = tuple(dict.fromkeys(slot.key_id for slot in envelope.slots if slot is not None))
    if previous == (key_id,) and envelope.slots[0] == envelope.slots[1]:
        return _Change(key_id, previous, b"", ())
    slot = cipher.wrap(data_key, envelope.file_id, found.ez_id, key_id)
    _check_opens(slot, data_key, found, cipher, where)
    # The slot that opened is what the file rests on until the other one is safe.
    order = tuple(sorted(range(SLOTS), key=lambda number: number == opened))
    return _Change(key_id, previous, encode_slot(slot).encode(), order)


def _check_opens(slot: Slot, data_key: bytes, found: _Found, cipher: AesGcm, where: str) -> None:
    trial = Envelope(found.envelope.file_id, (slot, slot))
    if cipher.unwrap(trial, found.ez_id)[1] != data_key:
        raise Corruption(
            f"key {slot.key_id!r} does not give back the data key of {where} that it wrapped; "
            f"nothing was changed: look at the key provider"
        )


# --- files ----------------------------------------------------------------------------------------


def _write_slot(
    fd: int, at: int, text: bytes, write: Callable[[int, bytes, int], int], where: str
) -> None:
    done = 0
    while done < len(text):
        done += write(fd, text[done:], at + done)
    os.fsync(fd)
    if os.pread(fd, SLOT_CHARACTERS, at) != text:
        raise Corruption(
            f"{where}: the newly wrapped key was not read back as it was written; the file opens "
            f"with the key it had or with the new one: look after the disk, and run it again"
        )


def _open_alone(path: str) -> int:
    """The file, open for writing, with nobody else changing its key."""
    for _ in range(RACE_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise StorageError(f"{path} keeps being replaced; change its key when that is over")
