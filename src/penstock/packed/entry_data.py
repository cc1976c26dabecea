"""What an entry is made of, brought into one shape: bytes at hand, a file, or a stream.

`MemoryData` is never copied. `FileData` is a regular file, read at any offset from any thread.
`StreamData` is whatever else can be read, in order and in the caller's thread only. A `size` that
is known is a promise: data that ends before is refused, what lies behind it is not looked at.
Without one, data goes to its end.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias, cast

from penstock.errors import InvalidInput, StorageError
from penstock.packed.entries import EntryData

Data: TypeAlias = "MemoryData | FileData | StreamData"


class MemoryData:
    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size = view.nbytes


class FileData:
    def __init__(self, what: str, fd: int, start: int, size: int) -> None:
        self._what = what
        self._fd = fd
        self._start = start
        self.size = size
        self.end = start + size

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill `out` from the data's byte `offset` on."""
        done = 0
        try:
            while done < out.nbytes:
                got = os.preadv(self._fd, [out[done:]], self._start + offset + done)
                if not got:
                    raise too_short(self._what, self.size, offset + done)
                done += got
        except OSError as error:
            raise StorageError(
                f"{self._what} could not be read at {self._start + offset + done}: "
                f"{error.strerror or error}; check the disk, then write the file again"
            ) from error


class StreamData:
    def __init__(self, what: str, file: Any, size: int | None) -> None:
        self._what = what
        self._file = file
        self._done = 0
        self.size = size

    def read_into(self, out: memoryview) -> int:
        """Fill `out` with what comes next, and say how much that was; less only at the end."""
        want = out.nbytes if self.size is None else min(out.nbytes, self.size - self._done)
        got = 0
        while got < want:
            more = self._read(out[got:want])
            if not more:
                if self.size is not None:
                    raise too_short(self._what, self.size, self._done)
                break
            got += more
            self._done += more
        return got

    def _read(self, out: memoryview) -> int:
        if hasattr(self._file, "readinto"):
            got = self._file.readinto(out)
        else:
            piece = self._file.read(out.nbytes)
            got = None if piece is None else len(piece)
            if got and got <= out.nbytes:
                out[:got] = piece
        if got is None:
            raise InvalidInput(f"{self._what} has nothing to read yet: give a file that blocks")
        if not 0 <= got <= out.nbytes:
            # What it did not write is what the buffer was last used for.
            raise InvalidInput(f"{self._what} says {got} bytes were read of {out.nbytes}")
        return int(got)


@contextlib.contextmanager
def open_data(name: str, data: EntryData, size: int | None) -> Iterator[Data]:
    """The data of entry `name`, as long as the context lasts."""
    what = f"the data of entry {name!r}"
    if size is not None and (type(size) is not int or size < 0):
        raise InvalidInput(f"{what} cannot have {size!r} bytes")
    if isinstance(data, str):
        raise InvalidInput(f"{what} is text: encode it, or give a path as pathlib.Path")
    if isinstance(data, os.PathLike):
        try:
            file = open(data, "rb", buffering=0)  # noqa: SIM115 closed by the context below
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInput(
                f"{what}, {os.fspath(data)!r}, cannot be opened: {reason}"
            ) from error
        with file:
            yield _of_file(what, file, size)
    elif hasattr(data, "readinto") or hasattr(data, "read"):
        if isinstance(data, io.TextIOBase):
            raise InvalidInput(f"{what} is a file of text: open it for reading bytes")
        if getattr(data, "closed", False) is True or (
            isinstance(data, io.FileIO | io.BufferedWriter) and not data.readable()
        ):
            raise InvalidInput(f"{what} is a file that is not open for reading")
        found = _of_file(what, data, size)
        yield found
        if isinstance(found, FileData):
            cast("BinaryIO", data).seek(found.end)
    else:
        yield _of_memory(what, data, size)


def too_short(what: str, size: int, got: int) -> InvalidInput:
    return InvalidInput(
        f"{what} ended after {got} of the {size} bytes that it was to have; the packed file was "
        f"not written: give the right size, and nobody else who changes the data meanwhile"
    )


def _of_memory(what: str, data: Any, size: int | None) -> MemoryData:
    try:
        view = memoryview(data)
        if "O" in view.format:
            raise TypeError("it holds Python objects, not their bytes")
        flat = view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise InvalidInput(
            f"{what} is no contiguous buffer, path or open binary file but "
            f"{type(data).__name__}: {error}"
        ) from error
    if size is not None and size != flat.nbytes:
        raise InvalidInput(f"{what} has {flat.nbytes} bytes, not {size}")
    return MemoryData(flat)


def _of_file(what: str, file: Any, size: int | None) -> FileData | StreamData:
    # Only of these is the descriptor known to give the same bytes as the object: that of a
    # GzipFile, for instance, gives the compressed ones.
    raw = file.raw if type(file) in (io.BufferedReader, io.BufferedRandom) else file
    if type(raw) is not io.FileIO:
        return StreamData(what, file, size)
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        return StreamData(what, file, size)
    if type(file) is io.BufferedRandom:
        file.flush()
        found = os.fstat(file.fileno())
    start = file.tell()
    left = max(found.st_size - start, 0)
    if size is not None and size > left:
        raise too_short(what, size, left)
    return FileData(what, file.fileno(), start, left if size is None else size)
