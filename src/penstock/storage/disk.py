"""Files written so that a crash at any moment leaves either the old state or the new one.

`Disk` is what the stores of one opened root share. `write_new` gives a finished file its name by
`link`, which only one of many can do; `replace` swaps a finished file in by `rename` under the
lock of its directory. Both return after `fsync` of the directory. `begin` and `finish` are the two
halves of an unconditional `replace`, for contents that come piece by piece. `local` says where
temporary files live and why.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from stat import S_ISREG
from types import TracebackType

import xxhash

from penstock.storage.directories import Directories
from penstock.storage.entropy import SystemEntropy
from penstock.storage.objects import TEMPORARY

IOV_MAX = 1024
RACE_ATTEMPTS = 64
STALE_TEMPORARY_MS = 3_600_000
MAX_SWEPT = 1000
HASH_CHUNK_BYTES = 1 << 22

_READ = os.O_RDONLY | os.O_CLOEXEC
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EXDEV, errno.EPERM}


class Disk:
    """What the stores of one opened root share: directory handles and temporary files."""

    def __init__(self, root: str) -> None:
        outside = f"{root}/".split("/_mem_wal/", 1)[0].rstrip("/") or "/"
        self._temporary = f"{outside}/{TEMPORARY}"
        self._directories = Directories(outside)
        self._entropy = SystemEntropy()
        self._nameless = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")
        self._swept = False

    def write_new(self, path: str, parts: Sequence[memoryview]) -> None:
        """Create the file with these contents, durably; FileExistsError if it is there."""
        cut = path.rindex("/")
        directory, name = path[:cut], path[cut + 1 :]
        for attempt in range(RACE_ATTEMPTS):
            try:
                handle = self._directories.open(directory)
                if self._nameless:
                    self._link_nameless(handle.fd, name, parts)
                else:
                    self._link_named(handle.fd, name, parts)
            except FileNotFoundError:
                # The directory was removed meanwhile, by drop_table for instance.
                if attempt == RACE_ATTEMPTS - 1:
                    raise
                continue
            os.fsync(handle.fd)
            return

    def replace(self, path: str, parts: Sequence[memoryview], etag: str | None) -> bool:
        """Put the file in place durably, if `etag` is None or still that of the one there."""
        temporary = self._write_temporary(parts)
        replaced = False
        try:
            replaced = self._rename(temporary, path, etag)
        finally:
            if not replaced:
                _unlink_if_there(temporary)
        return replaced

    def begin(self) -> Unfinished:
        """A new file that nobody sees, in the temporary place."""
        for attempt in range(RACE_ATTEMPTS):
            path = f"{self._temporary}/{self._entropy.token_bytes(10).hex()}"
            try:
                self._directories.open(self._temporary)
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
                break
            except FileNotFoundError:
                if attempt == RACE_ATTEMPTS - 1:
                    raise
        unfinished = Unfinished(fd, path)
        try:
            if not self._swept:
                self._swept = True
                self._sweep(modified_ms(os.fstat(fd)) - STALE_TEMPORARY_MS)
        except BaseException:
            unfinished.discard()
            raise
        return unfinished

    def finish(self, unfinished: Unfinished, path: str) -> None:
        """Put the file in place durably; whoever began it discards it if this fails."""
        os.fdatasync(unfinished.fd)
        unfinished.close()
        self._rename(unfinished.path, path, None)

    def _rename(self, temporary: str, path: str, etag: str | None) -> bool:
        directory = os.path.dirname(path)
        for attempt in range(RACE_ATTEMPTS):
            try:
                if etag is None:
                    self._directories.open(directory)
                with DirectoryLock(directory) as lock:
                    if etag is not None and etag != _etag_at(path):
                        return False
                    os.rename(temporary, path)
                    lock.release()
                    os.fsync(lock.fd)
                return True
            except FileNotFoundError:
                if etag is not None:
                    return False
                if attempt == RACE_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _link_nameless(self, directory_fd: int, name: str, parts: Sequence[memoryview]) -> None:
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=directory_fd)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            self._nameless = False
            return self._link_named(directory_fd, name, parts)
        try:
            write_all(fd, parts)
            os.fdatasync(fd)
            try:
                # Without src_dir_fd CPython calls link(2), which cannot follow the magic link.
                os.link(
                    f"/proc/self/fd/{fd}",
                    name,
                    src_dir_fd=directory_fd,
                    dst_dir_fd=directory_fd,
                    follow_symlinks=True,
                )
                return None
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._nameless = False
        finally:
            os.close(fd)
        return self._link_named(directory_fd, name, parts)

    def _link_named(self, directory_fd: int, name: str, parts: Sequence[memoryview]) -> None:
        temporary = self._write_temporary(parts)
        try:
            os.link(temporary, name, dst_dir_fd=directory_fd)
        finally:
            _unlink_if_there(temporary)

    def _write_temporary(self, parts: Sequence[memoryview]) -> str:
        unfinished = self.begin()
        try:
            write_all(unfinished.fd, parts)
            os.fdatasync(unfinished.fd)
        except BaseException:
            unfinished.discard()
            raise
        unfinished.close()
        return unfinished.path

    def _sweep(self, oldest_ms: int) -> None:
        """Remove what crashed processes left; ages are told by the file system's own clock."""
        with os.scandir(self._temporary) as entries:
            for entry, _ in zip(entries, range(MAX_SWEPT), strict=False):
                with contextlib.suppress(FileNotFoundError):
                    if modified_ms(entry.stat()) < oldest_ms:
                        os.unlink(entry.path)


@dataclass(slots=True)
class Unfinished:
    """A temporary file that is being written."""

    fd: int
    path: str

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self) -> None:
        self.close()
        _unlink_if_there(self.path)


class DirectoryLock:
    """Excludes other threads and processes that lock the same directory, as long as it lasts."""

    def __init__(self, path: str) -> None:
        for _ in range(RACE_ATTEMPTS):
            # Its own open file, never a shared handle: flock does not exclude within one.
            self.fd = os.open(path, _READ | os.O_DIRECTORY)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(self.fd), os.stat(path)):
                    return
            except BaseException:
                os.close(self.fd)
                raise
            os.close(self.fd)
        raise OSError(errno.EAGAIN, "the directory keeps being replaced", path)

    def release(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        os.close(self.fd)


def etag_of(parts: Sequence[memoryview]) -> str:
    if len(parts) == 1:
        return f"{parts[0].nbytes:x}-{xxhash.xxh3_128_hexdigest(parts[0])}"
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return f"{sum(part.nbytes for part in parts):x}-{digest.hexdigest()}"


def etag_of_file(fd: int) -> str:
    digest = xxhash.xxh3_128()
    size_bytes = 0
    while chunk := os.pread(fd, HASH_CHUNK_BYTES, size_bytes):
        digest.update(chunk)
        size_bytes += len(chunk)
    return f"{size_bytes:x}-{digest.hexdigest()}"


def read_at(fd: int, start: int, length: int) -> memoryview:
    """So many bytes from there on, or fewer if the file ends before."""
    parts: list[bytes] = []
    missing = length
    while missing and (part := os.pread(fd, missing, start + length - missing)):
        parts.append(part)
        missing -= len(part)
    return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


def _etag_at(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return etag_of_file(file.fileno())


def write_all(fd: int, parts: Sequence[memoryview]) -> None:
    waiting = list(parts)
    first = 0
    while first < len(waiting):
        written = os.writev(fd, waiting[first : first + IOV_MAX])
        while first < len(waiting) and written >= waiting[first].nbytes:
            written -= waiting[first].nbytes
            first += 1
        if written:
            waiting[first] = waiting[first][written:]


def check_replaceable(path: str) -> None:
    """An `OSError` if a rename to the path would replace anything but a regular file."""
    with contextlib.suppress(FileNotFoundError):
        if not S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a directory, device or pipe has that name", path)


def _unlink_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def fsync_path(path: str) -> None:
    fd = os.open(path, _READ)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def modified_ms(stat: os.stat_result) -> int:
    return stat.st_mtime_ns // 1_000_000
