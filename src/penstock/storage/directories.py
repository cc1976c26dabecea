"""Open directories of a local store: a bounded cache of descriptors that are never stale.

`open(path)` gives a handle on the directory that is at `path` now, creating it and everything
above it as needed. A handle comes into the cache only after the directory's name was fsynced
into its parent, and its parent's before it, so whatever is fsynced inside it can be found again
after power loss.

Invariants
- A cached handle is used only if the path still leads to the same inode: a directory dropped and
  made anew is noticed. An inode number cannot be reused while the handle holds it open.
- At most `limit` handles are cached. One that is pushed out stays open as long as a caller still
  uses it, and is closed when the last of them lets go.
- A forked process starts with an empty cache and a lock of its own.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable

MAX_OPEN = 128

_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DirectoryHandle:
    __slots__ = ("_close", "device", "fd", "inode")

    def __init__(self, path: str) -> None:
        self._close: Callable[[int], None] = os.close
        self.fd = -1
        self.fd = os.open(path, _READ_DIRECTORY)
        stat = os.fstat(self.fd)
        self.device, self.inode = stat.st_dev, stat.st_ino

    def __del__(self) -> None:
        if self.fd >= 0:
            self._close(self.fd)


class Directories:
    """The directories at and below `top`."""

    def __init__(self, top: str, limit: int = MAX_OPEN) -> None:
        self._top = top
        self._limit = limit
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, DirectoryHandle] = OrderedDict()

    def open(self, path: str) -> DirectoryHandle:
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            handle = self._handles.get(path)
            if handle is not None:
                self._handles.move_to_end(path)
        if handle is not None:
            try:
                stat = os.stat(path)
                if stat.st_ino == handle.inode and stat.st_dev == handle.device:
                    return handle
            except FileNotFoundError:
                pass  # made anew below
        return self._open_anew(path)

    def _open_anew(self, path: str) -> DirectoryHandle:
        above = os.path.dirname(path)
        if path == self._top or above == path:
            handle = _open_top(path)
        else:
            parent = self.open(above)
            try:
                handle = DirectoryHandle(path)
            except FileNotFoundError:
                _make(path)
                handle = DirectoryHandle(path)
            # Also when it was there: whoever created it may not have come to this step.
            os.fsync(parent.fd)
        with self._lock:
            self._handles[path] = handle
            self._handles.move_to_end(path)
            while len(self._handles) > self._limit:
                self._handles.popitem(last=False)
        return handle


def _open_top(path: str) -> DirectoryHandle:
    try:
        return DirectoryHandle(path)
    except FileNotFoundError:
        above = _open_top(os.path.dirname(path))
        _make(path)
        os.fsync(above.fd)
        return DirectoryHandle(path)


def _make(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        return  # another writer was faster, which serves as well
