"""Where the bytes of a packed file come from: memory, a file of this machine, an object store.

`tail` is called once, first, and says how long the file is. After that any number of threads read
ranges: `read` into fresh memory, or a buffer that is lent, or it gives a view of memory that is
there anyway; `read_into` into the caller's memory, `borrowed` into a buffer that is used again,
`copy` through one into a file, with its CRC-32C. A range that the file does not have is
`Corruption`.

A file is opened once and stays the same file even if another takes its name; of an object in a
store each range is one request.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from penstock.errors import Corruption, InvalidInput, ObjectNotFound, StorageError
from penstock.packed.crc import crc32c
from penstock.storage.local import LocalStore
from penstock.storage.objects import Buffer, ObjectStore, Tail, check_key
from penstock.storage.open import open_store

COPY_BYTES = 1 << 20
"""A file goes to a file in steps of this size, small enough to stay in the processor's cache."""


def new_buffer(size_bytes: int) -> memoryview:
    """Memory that is not cleared first, as nobody reads it before it was filled."""
    return np.empty(size_bytes, np.uint8).data


class Buffers:
    """Buffers for pieces on their way, all of one size, used again and again by one operation.

    There are never more of them than were in use at the same time. Fresh memory costs about as
    much as reading into it, and what one thread frees, another does not always get.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[memoryview] = []

    @contextlib.contextmanager
    def borrow(self, size_bytes: int) -> Iterator[memoryview]:
        buffer = self._take()
        try:
            yield buffer[:size_bytes]
        finally:
            self._free.append(buffer)

    def lend(self, size_bytes: int) -> memoryview:
        """A buffer that comes back by itself when nobody holds a view of it any more."""
        buffer = self._take()
        array = np.frombuffer(buffer, np.uint8, size_bytes)
        weakref.finalize(array, self._free.append, buffer).atexit = False
        return array.data

    def _take(self) -> memoryview:
        try:
            return self._free.pop()
        except IndexError:
            return new_buffer(self._size_bytes)


class Source(Protocol):
    @property
    def name(self) -> str:
        """How errors call the file."""

    @property
    def is_near(self) -> bool:
        """Whether one more small read costs nothing worth mentioning."""

    def tail(self, length: int) -> Tail: ...

    def read(self, start: int, length: int, buffers: Buffers | None = None) -> memoryview: ...

    def read_into(self, start: int, out: memoryview) -> None: ...

    def borrowed(
        self, start: int, length: int, buffers: Buffers
    ) -> contextlib.AbstractContextManager[memoryview]: ...

    def copy(self, start: int, length: int, file: int, at: int, buffers: Buffers) -> int:
        """Write the range to an open file, from `at` on, and give its CRC-32C."""

    def close(self) -> None: ...


def open_source(
    source: str | os.PathLike[str] | Buffer | bytearray,
    storage_options: Mapping[str, str] | None = None,
) -> Source:
    if isinstance(source, bytes | bytearray | memoryview | pa.Buffer):
        return MemorySource(source)
    if not isinstance(source, str | os.PathLike):
        raise InvalidInput(
            f"a packed file cannot be read from {type(source).__name__}: give a path, a URI, or "
            f"bytes; for a store and a key use PackedReader.from_store"
        )
    location = os.fsdecode(source)
    if "://" not in location:
        return FileSource(location)
    parent, _, key = location.rpartition("/")
    if not key or parent.endswith("/"):
        raise InvalidInput(f"{location!r} does not name a file in a store")
    return store_source(open_store(parent, storage_options), unquote(key))


def store_source(store: ObjectStore, key: str) -> Source:
    if isinstance(store, LocalStore):
        return FileSource(os.path.join(store.uri, check_key(key)))
    return StoreSource(store, key)


class MemorySource:
    name = "the packed file in memory"
    is_near = True

    def __init__(self, data: Buffer | bytearray) -> None:
        try:
            self._data = memoryview(data).cast("B").toreadonly()
        except TypeError as error:
            raise InvalidInput(f"{self.name} is no contiguous buffer: {error}") from error

    def tail(self, length: int) -> Tail:
        return Tail(self._data[max(len(self._data) - length, 0) :], len(self._data))

    def read(self, start: int, length: int, buffers: Buffers | None = None) -> memoryview:
        found = self._data[start : start + length]
        if len(found) != length:
            raise _too_short(self.name, start, length)
        return found

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self.read(start, len(out))

    @contextlib.contextmanager
    def borrowed(self, start: int, length: int, buffers: Buffers) -> Iterator[memoryview]:
        yield self.read(start, length)

    def copy(self, start: int, length: int, file: int, at: int, buffers: Buffers) -> int:
        return write_at(file, self.read(start, length), at)

    def close(self) -> None:
        self._data = memoryview(b"")


class FileSource:
    is_near = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            # Not to wait for whoever might write to a pipe of that name.
            self._file = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ObjectNotFound(f"{self.name}: there is no such file") from None
        except (OSError, ValueError) as error:
            raise self._failure(error) from error
        self._closing = weakref.finalize(self, os.close, self._file)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise self._failure("it is no regular file")

    def tail(self, length: int) -> Tail:
        size_bytes = os.fstat(self._file).st_size
        start = max(size_bytes - length, 0)
        return Tail(self.read(start, size_bytes - start), size_bytes)

    def read(self, start: int, length: int, buffers: Buffers | None = None) -> memoryview:
        out = buffers.lend(length) if buffers else new_buffer(length)
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._file, [out[done:]], start + done)
            except OSError as error:
                raise self._failure(error) from error
            if count == 0:
                raise _too_short(self.name, start, len(out))
            done += count

    @contextlib.contextmanager
    def borrowed(self, start: int, length: int, buffers: Buffers) -> Iterator[memoryview]:
        with buffers.borrow(length) as out:
            self.read_into(start, out)
            yield out

    def copy(self, start: int, length: int, file: int, at: int, buffers: Buffers) -> int:
        crc = 0
        with buffers.borrow(min(length, COPY_BYTES)) as buffer:
            for done in range(0, length, COPY_BYTES):
                step = buffer[: min(COPY_BYTES, length - done)]
                self.read_into(start + done, step)
                crc = write_at(file, step, at + done, crc)
        return crc

    def close(self) -> None:
        self._closing()

    def _failure(self, error: Exception | str) -> StorageError:
        return StorageError(f"{self.name} could not be read: {error}; check path and permissions")


class StoreSource:
    is_near = False

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.name = f"{key} in {store.uri}"
        self._store = store
        self._key = key

    def tail(self, length: int) -> Tail:
        found = self._store.get_tail(self._key, length)
        if len(found.data) != min(length, found.size_bytes):
            raise _too_short(self.name, max(found.size_bytes - length, 0), length)
        return found

    def read(self, start: int, length: int, buffers: Buffers | None = None) -> memoryview:
        return self._store.get_range(self._key, start, length)

    def read_into(self, start: int, out: memoryview) -> None:
        out[:] = self.read(start, len(out))

    @contextlib.contextmanager
    def borrowed(self, start: int, length: int, buffers: Buffers) -> Iterator[memoryview]:
        yield self.read(start, length)

    def copy(self, start: int, length: int, file: int, at: int, buffers: Buffers) -> int:
        return write_at(file, self.read(start, length), at)

    def close(self) -> None:
        return


def write_at(file: int, data: memoryview, at: int, crc: int = 0) -> int:
    """Write all of it, and give the CRC-32C of what had `crc` and this behind it."""
    crc = crc32c(data, crc)
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
    return crc


def _too_short(name: str, start: int, length: int) -> Corruption:
    return Corruption(
        f"{name} ends before the {length} bytes from {start} on: it was cut short while it was "
        f"read; restore it from a copy or write it again"
    )
