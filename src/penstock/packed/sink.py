"""Where a packed file goes: a path, the URI of an object, a store and a key, or an open file.

A sink takes bytes in order; a path also has room reserved, which many threads then fill and must
be done with before `commit` or `abort`. What a sink was given is there, whole and durable, once
`commit` has returned; after `abort`, or if the process dies, nothing of it is to be seen under its
name.
An open file is the exception: it belongs to the caller, and what was written to it stays there.
Half a packed file has no footer, and no reader takes it for a whole one.

A path is written as a file without a name in the directory it will have its name in, where the
file system has such (`O_TMPFILE`), so that a killed process leaves nothing at all; else as a
hidden file beside it. It gets its name by `rename` and replaces what had it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit

from penstock.errors import InvalidInput, StorageError
from penstock.packed.drafts import absolute
from penstock.storage.disk import check_replaceable, fsync_path, write_all
from penstock.storage.entropy import SystemEntropy
from penstock.storage.objects import ObjectStore, ObjectWriter
from penstock.storage.open import open_store

SinkTarget: TypeAlias = "str | os.PathLike[str] | BinaryIO"

Put: TypeAlias = Callable[[int, memoryview], None]
"""Fills a part of the room that was reserved, from its given byte on; from any thread."""

SMALL_BYTES = 256 << 10

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EXDEV, errno.EPERM}
_WRITE = os.O_RDWR | os.O_CLOEXEC


class Sink(Protocol):
    @property
    def where(self) -> str:
        """The place, for messages."""

    def write(self, data: memoryview) -> None:
        """Append; the buffer may be reused on return."""

    def reserve(self, size_bytes: int) -> Put | None:
        """Append room that is then filled out of order; None where only `write` appends."""

    def commit(self) -> None: ...

    def abort(self) -> None:
        """Forget everything; never fails, and may be repeated."""


def open_sink(
    target: SinkTarget,
    storage_options: Mapping[str, str] | None = None,
    expected_bytes: int = 0,
) -> Sink:
    """`expected_bytes` is for uploads above 78 GiB, see `ObjectStore.open_writer`."""
    if isinstance(target, str | os.PathLike):
        location = os.fspath(target)
        if not isinstance(location, str):
            raise InvalidInput(f"{location!r} must be a path or URI as text, not as bytes")
        if "://" not in location:
            return PathSink(location)
        if location.startswith("file://"):
            open_store(location)
            return PathSink(unquote(urlsplit(location).path))
        parent, _, key = location.rpartition("/")
        if not key or parent.endswith(":/") or "?" in key or "#" in key:
            raise InvalidInput(
                f"{location!r} names no object; give a bucket and a key, without a query"
            )
        return store_sink(open_store(parent, storage_options), unquote(key), expected_bytes)
    if hasattr(target, "write") and not isinstance(target, io.TextIOBase):
        if getattr(target, "closed", False) is True:
            raise InvalidInput("a packed file cannot be written to a file that is closed")
        return FileSink(target)
    raise InvalidInput(
        f"a packed file cannot be written to {type(target).__name__}: give a path, a URI, or a "
        f"file open for writing bytes; for a store and a key use PackedWriter.to_store"
    )


def store_sink(store: ObjectStore, key: str, expected_bytes: int = 0) -> Sink:
    return StoreSink(store.open_writer(key, expected_bytes), f"{store.uri}/{key}")


class StoreSink:
    def __init__(self, writer: ObjectWriter, where: str) -> None:
        self._writer = writer
        self.where = where

    def write(self, data: memoryview) -> None:
        self._writer.write(data)

    def reserve(self, size_bytes: int) -> None:
        return None

    def commit(self) -> None:
        self._writer.commit()

    def abort(self) -> None:
        self._writer.abort()


class FileSink:
    """A file the caller opened, and closes; written from where it stands."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.where = str(getattr(file, "name", None) or type(file).__name__)

    def write(self, data: memoryview) -> None:
        while data.nbytes:
            # A raw file may take less than it is given; an object of the caller's may not say.
            with self._failures():
                taken: int | None = self._file.write(data)
            if taken is None and not isinstance(self._file, io.RawIOBase):
                return
            if not taken:
                raise StorageError(
                    f"{self.where} takes no more bytes: give a file that blocks until it can"
                )
            data = data[taken:]

    def reserve(self, size_bytes: int) -> None:
        return None

    def commit(self) -> None:
        flush = getattr(self._file, "flush", None)
        if flush is not None:
            with self._failures():
                flush()

    def abort(self) -> None:
        return None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self.where} could not be written: {error}") from error


class PathSink:
    def __init__(self, path: str) -> None:
        self.where = path
        if not path or "\0" in path or path.endswith("/"):
            raise InvalidInput(f"{path!r} names no file")
        self._path = absolute(path)
        self._directory, self._name = os.path.split(self._path)
        self._small = bytearray()
        with self._failures("open"):
            check_replaceable(self._path)
            self._open = _Open(self._directory, self._name)
        self._forgotten = weakref.finalize(self, self._open.discard)

    def write(self, data: memoryview) -> None:
        if len(self._small) + data.nbytes <= SMALL_BYTES:
            self._small += data
        else:
            self._flush(data)

    def reserve(self, size_bytes: int) -> Put:
        self._flush()
        with self._failures("write"):
            start = os.lseek(self._open.fd, 0, os.SEEK_CUR)
            os.lseek(self._open.fd, size_bytes, os.SEEK_CUR)
        return partial(self._put, start)

    def _put(self, start: int, at: int, data: memoryview) -> None:
        done = 0
        with self._failures("write"):
            while done < data.nbytes:
                done += os.pwrite(self._open.fd, data[done:], start + at + done)

    def commit(self) -> None:
        self._flush()
        with self._failures("finish"):
            self._open.finish(self._path)
        self._forgotten.detach()

    def abort(self) -> None:
        self._small = bytearray()
        self._forgotten()

    def _flush(self, *behind: memoryview) -> None:
        small, self._small = self._small, bytearray()
        with self._failures("write"):
            write_all(self._open.fd, [view for view in (memoryview(small), *behind) if view])

    @contextlib.contextmanager
    def _failures(self, op: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(
                f"{op} of {self.where} failed: {self._directory} is not there; create it first"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{op} of {self.where} failed: {error.strerror or error}; check the disk's "
                f"health, space and permissions, then write the file again"
            ) from error


class _Open:
    """The file while it is written: without a name, or with a hidden one (`temporary`)."""

    def __init__(self, directory: str, name: str) -> None:
        # With 4 bytes a character that stays below the longest name there may be, 255 bytes.
        token = SystemEntropy().token_bytes(8).hex()
        self._hidden = f"{directory}/.{name[:50]}.{token}.tmp"
        self._named = False
        self.fd = -1
        if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
            try:
                self.fd = os.open(directory, os.O_TMPFILE | _WRITE, 0o644)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        if self.fd < 0:
            self.fd = os.open(self._hidden, os.O_CREAT | os.O_EXCL | _WRITE, 0o644)
            self._named = True

    def finish(self, path: str) -> None:
        os.fdatasync(self.fd)
        if not self._named:
            self._give_name()
        os.rename(self._hidden, path)
        self._named = False
        self._close()
        fsync_path(os.path.dirname(path))

    def _give_name(self) -> None:
        try:
            # Without src_dir_fd CPython calls link(2), which cannot follow the magic link.
            os.link(
                f"/proc/self/fd/{self.fd}", self._hidden, src_dir_fd=self.fd, follow_symlinks=True
            )
            self._named = True
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            with open(self._hidden, "xb") as copy, open(self.fd, "rb", closefd=False) as nameless:
                self._named = True
                nameless.seek(0)
                shutil.copyfileobj(nameless, copy, SMALL_BYTES)
                copy.flush()
                os.fdatasync(copy.fileno())

    def discard(self) -> None:
        # Nobody can do more about a hidden file that cannot be removed than to remove it later.
        with contextlib.suppress(OSError):
            self._close()
            if self._named:
                os.unlink(self._hidden)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
