"""The object store on a local disk: acknowledged means it survives power loss.

How a put flows: the bytes go to a file nobody can see, `fdatasync`, then one atomic step gives it
its name (`link` for put_if_absent, `rename` for the others), then `fsync` of the directory.
`put_if_absent` is the WAL's hot path: its file is born nameless in the destination directory
(`O_TMPFILE`), so nothing is left behind by a crash, and the kernel settles races (`EEXIST`).

Invariants
- Nothing but finished objects is ever visible. Where a temporary file needs a name (overwrites,
  and file systems without O_TMPFILE) it lives in `_penstock/tmp` below the root that was opened,
  or, for a root inside a table's `_mem_wal/`, below that table: Lance takes every child of
  `_mem_wal/` for a region. No key may enter `_penstock/tmp` and no listing shows it.
- The etag is the size and the XXH3-128 of the contents. Inode and mtime are not enough: both can
  recur within one clock tick. The price is that `head` reads the object, and that `list` gives
  no etag.
- put_if_match, put and delete exclude each other by an `flock` on the object's directory. The
  directory itself is the lock file, so processes that opened the store at different roots agree.
- A directory is created on demand, and before anything in it is acknowledged its name has been
  fsynced into its parent, also if another process created it.
- Deletions are not waited for: after power loss a deleted object may be back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from penstock.errors import (
    Corruption,
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from penstock.storage.disk import (
    RACE_ATTEMPTS,
    DirectoryLock,
    Disk,
    etag_of,
    etag_of_file,
    fsync_path,
    modified_ms,
    read_at,
)
from penstock.storage.objects import (
    TEMPORARY,
    Object,
    ObjectMeta,
    Payload,
    Tail,
    buffers_of,
    check_key,
    check_prefix,
    check_range,
)
from penstock.storage.streams import LocalWriter, part_bytes_for


class LocalStore:
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._prefix = ""
        self._disk = Disk(self._root)

    @property
    def uri(self) -> str:
        return self._path_of_prefix("")

    @property
    def storage_options(self) -> dict[str, str]:
        return {}

    def __repr__(self) -> str:
        return f"LocalStore({self.uri!r})"

    def __reduce__(self) -> tuple[Callable[[str, str], LocalStore], tuple[str, str]]:
        return _reopen, (self._root, self._prefix)

    def child(self, prefix: str) -> LocalStore:
        twin = LocalStore.__new__(LocalStore)
        twin._root = self._root
        twin._prefix = f"{self._prefix}{check_prefix(prefix)}/" if prefix else self._prefix
        twin._disk = self._disk
        return twin

    # --- reading -----------------------------------------------------------------------------

    def get(self, key: str) -> Object:
        with self._failures("get", key), open(self._path(key), "rb", buffering=0) as file:
            data = memoryview(file.read())
        return Object(data, etag_of([data]))

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        check_range(key, start, length)
        with self._failures("get_range", key), open(self._path(key), "rb", buffering=0) as file:
            data = read_at(file.fileno(), start, length)
            size_bytes = os.fstat(file.fileno()).st_size
        if data.nbytes != length:
            raise Corruption(
                f"{key} in {self.uri} ends at byte {size_bytes}, before the {length} bytes from "
                f"{start} that were asked for: it was cut short, or what points into it is wrong"
            )
        return data

    def get_tail(self, key: str, length: int) -> Tail:
        check_range(key, 0, length)
        with self._failures("get_tail", key), open(self._path(key), "rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            start = max(size_bytes - length, 0)
            return Tail(read_at(file.fileno(), start, size_bytes - start), size_bytes)

    def head(self, key: str) -> ObjectMeta:
        with self._failures("head", key), open(self._path(key), "rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            return ObjectMeta(key, stat.st_size, etag_of_file(file.fileno()), modified_ms(stat))

    def exists(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def list(self, prefix: str = "") -> Iterator[ObjectMeta]:
        below = check_prefix(prefix)
        start = f"{below}/" if below else ""
        with self._failures("list", prefix):
            for path, stat in _walk(self._path_of_prefix(below)):
                yield ObjectMeta(start + path, stat.st_size, "", modified_ms(stat))

    def list_dirs(self, prefix: str = "") -> Sequence[str]:
        path = self._path_of_prefix(check_prefix(prefix))
        with self._failures("list_dirs", prefix):
            return sorted(
                entry.name
                for entry in _entries(path)
                if entry.is_dir(follow_symlinks=False) and _holds_object(entry.path)
            )

    # --- writing -----------------------------------------------------------------------------

    def put(self, key: str, data: Payload) -> str:
        return self._replace("put", key, data, None)

    def put_if_absent(self, key: str, data: Payload) -> str:
        path = self._path(key)
        parts = buffers_of(data)
        try:
            self._disk.write_new(path, parts)
        except FileExistsError:
            raise ObjectExists(f"{key} in {self.uri} exists; nothing was written") from None
        except OSError as error:
            raise self._failure("put_if_absent", key, error) from error
        return etag_of(parts)

    def put_if_match(self, key: str, data: Payload, etag: str) -> str:
        return self._replace("put_if_match", key, data, etag)

    def open_writer(self, key: str, expected_bytes: int = 0) -> LocalWriter:
        path = self._path(key)
        part_bytes_for(key, expected_bytes)

        def fail(op: str, error: Exception) -> NoReturn:
            raise self._failure(op, key, error) if isinstance(error, OSError) else error

        return LocalWriter(self._disk, path, key, self.uri, fail)

    def copy(self, key: str, new_key: str) -> None:
        path, new_path = self._path(key), self._path(new_key)
        with self._failures("copy", key):
            os.makedirs(os.path.dirname(new_path), exist_ok=True)
            # Both names share one file and its age: it must be young before it has the new one.
            os.utime(path)
            try:
                os.link(path, new_path)
            except FileExistsError:
                raise ObjectExists(f"{new_key} in {self.uri} exists; nothing was copied") from None
            fsync_path(os.path.dirname(new_path))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with (
            self._failures("delete", key),
            contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            DirectoryLock(os.path.dirname(path)),
        ):
            os.unlink(path)

    def delete_prefix(self, prefix: str) -> None:
        path = self._path_of_prefix(check_prefix(prefix))
        with self._failures("delete_prefix", prefix):
            for attempt in range(RACE_ATTEMPTS):
                try:
                    shutil.rmtree(path)
                    break
                except NotADirectoryError:
                    break
                except OSError as error:
                    # Others add files below, or remove them too.
                    if not os.path.lexists(path):
                        break
                    raced = isinstance(error, FileNotFoundError) or error.errno == errno.ENOTEMPTY
                    if not raced or attempt == RACE_ATTEMPTS - 1:
                        raise
            with contextlib.suppress(FileNotFoundError):
                fsync_path(os.path.dirname(path))

    def sync(self, prefix: str) -> None:
        below = check_prefix(prefix)
        path = self._path_of_prefix(below)
        if not os.path.exists(path):
            raise ObjectNotFound(f"nothing to make durable: {prefix!r} is not in {self.uri}")
        with self._failures("sync", prefix):
            if os.path.isfile(path):
                fsync_path(path)
            for directory, _, names in os.walk(path, topdown=False):
                # Others may remove what lies beside that which has to be durable.
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        fsync_path(os.path.join(directory, name))
                with contextlib.suppress(FileNotFoundError):
                    fsync_path(directory)
            while len(path) > len(self._root):
                path = os.path.dirname(path)
                fsync_path(path)

    # --- inside ------------------------------------------------------------------------------

    def _replace(self, op: str, key: str, data: Payload, etag: str | None) -> str:
        path = self._path(key)
        parts = buffers_of(data)
        with self._failures(op, key):
            if not self._disk.replace(path, parts, etag):
                raise PreconditionFailed(
                    f"{key} in {self.uri} is no longer the version {etag}; nothing was written: "
                    f"read it again and decide anew"
                )
        return etag_of(parts)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(self._prefix + key)}"

    def _path_of_prefix(self, below: str) -> str:
        full = f"{self._prefix}{below}".removesuffix("/")
        return f"{self._root}/{full}" if full else self._root

    @contextlib.contextmanager
    def _failures(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if op in ("get", "get_range", "get_tail", "head", "copy"):
                raise ObjectNotFound(f"{key} is not in {self.uri}") from None
            raise self._failure(op, key, error) from error
        except OSError as error:
            raise self._failure(op, key, error) from error

    def _failure(self, op: str, key: str, error: OSError) -> StorageError:
        return StorageError(
            f"{op} of {key!r} in {self.uri} failed: {error.strerror or error}; "
            f"check the disk's health, space and permissions, then try again"
        )


def _reopen(root: str, prefix: str) -> LocalStore:
    return LocalStore(root).child(prefix)


def _is_temporary(entry: os.DirEntry[str]) -> bool:
    return entry.name == "tmp" and entry.path.endswith(TEMPORARY)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not _is_temporary(entry)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files below `path`, in key order: a directory sorts as its name and the `/` after it."""
    found = [(e.name + "/" * e.is_dir(follow_symlinks=False), e) for e in _entries(path)]
    for name, entry in sorted(found, key=lambda pair: pair[0]):
        if name.endswith("/"):
            for below, stat in _walk(entry.path):
                yield name + below, stat
        else:
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                if entry.is_file():
                    yield name, stat


def _holds_object(path: str) -> bool:
    """Whether there is a file somewhere below; looks no further than the first it meets."""
    below = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if not _is_temporary(entry):
                        below.append(entry.path)
                elif entry.is_file() and not _is_temporary(entry):
                    return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return any(map(_holds_object, below))
