"""Objects written piece by piece: the `ObjectWriter` of local disk and that of remote stores.

Local disk: pieces go to a temporary file, which `commit` makes durable and renames, as `put` does.
What a killed process leaves is swept like everything in the temporary place.

Remote: pieces are copied into parts; full parts are uploaded in the background while the next one
fills, a bounded number at a time, so `write` waits when the network is slower than the caller. An
object that fits one part is a single put. A store takes at most 10,000 parts of one size, so who
expects a very large object says so (`expected_bytes`) and gets larger parts.

Invariants
- A caller may reuse its buffer as soon as `write` returns. The library below uploads from the very
  memory it is given, so it is only ever given parts that nobody touches again.
- After a failed `write` or `commit` the writer has given up and removed what it could; an upload
  whose abortion fails too is left to the bucket's rule for incomplete uploads.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from penstock.errors import InvalidInput, WriterClosed
from penstock.storage.disk import Disk, Unfinished, write_all
from penstock.storage.objects import Buffer, buffers_of

FILE_BUFFER_BYTES = 256 << 10
PART_BYTES = 8 << 20
MAX_PARTS = 10_000
IN_FLIGHT_BYTES = 24 << 20
MAX_OBJECT_BYTES = 5 << 40


class _State(enum.Enum):
    OPEN = "open"
    COMMITTED = "was committed"
    ABORTED = "was aborted, or an earlier call failed"


class StreamWriter(abc.ABC):
    """What every `ObjectWriter` does about its life; how pieces are kept is for the subclasses."""

    def __init__(self, key: str, where: str) -> None:
        self._key = key
        self._where = where
        self._state = _State.OPEN

    def write(self, data: Buffer) -> None:
        self._check_open()
        try:
            for part in buffers_of(data):
                self._write(part)
        except BaseException as error:
            self._give_up("write", error)

    def commit(self) -> None:
        if self._state is _State.COMMITTED:
            return
        self._check_open()
        try:
            self._commit()
        except BaseException as error:
            self._give_up("commit", error)
        self._state = _State.COMMITTED

    def abort(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.ABORTED
            self._discard()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise WriterClosed(
                f"the writer of {self._key} in {self._where} {self._state.value}; open a new one"
            )

    def _give_up(self, op: str, error: BaseException) -> NoReturn:
        self.abort()
        if isinstance(error, Exception):
            self._fail(op, error)
        raise error

    @abc.abstractmethod
    def _write(self, part: memoryview) -> None: ...

    @abc.abstractmethod
    def _commit(self) -> None: ...

    @abc.abstractmethod
    def _discard(self) -> None:
        """Remove what was written; never raises for what cannot be removed."""

    @abc.abstractmethod
    def _fail(self, op: str, error: Exception) -> NoReturn: ...


class LocalWriter(StreamWriter):
    def __init__(
        self,
        disk: Disk,
        path: str,
        key: str,
        where: str,
        fail: Callable[[str, Exception], NoReturn],
    ) -> None:
        super().__init__(key, where)
        self._disk = disk
        self._path = path
        self._fail_as = fail
        self._small = bytearray()
        try:
            self._unfinished = disk.begin()
        except OSError as error:
            self._fail("open_writer", error)
        self._forgotten = weakref.finalize(self, _discard_quietly, self._unfinished)

    def _write(self, part: memoryview) -> None:
        if len(self._small) + part.nbytes <= FILE_BUFFER_BYTES:
            self._small += part
        else:
            self._flush(part)

    def _flush(self, *behind: memoryview) -> None:
        small, self._small = self._small, bytearray()
        write_all(self._unfinished.fd, [view for view in (memoryview(small), *behind) if view])

    def _commit(self) -> None:
        self._flush()
        self._disk.finish(self._unfinished, self._path)
        self._forgotten.detach()

    def _discard(self) -> None:
        self._small = bytearray()
        self._forgotten()

    def _fail(self, op: str, error: Exception) -> NoReturn:
        self._fail_as(op, error)


class RemoteWriter(StreamWriter):
    """`put` writes a whole object, `begin` opens the library's own writer for parts of a size."""

    def __init__(
        self,
        key: str,
        where: str,
        put: Callable[[bytearray], object],
        begin: Callable[[int, int], Any],
        fail: Callable[[str, Exception], NoReturn],
        expected_bytes: int = 0,
    ) -> None:
        super().__init__(key, where)
        self._put = put
        self._begin = begin
        self._fail_as = fail
        self._part_bytes = part_bytes_for(key, expected_bytes)
        self._part = bytearray()
        self._parts = 0
        self._upload: Any = None

    def _write(self, part: memoryview) -> None:
        while part.nbytes:
            if len(self._part) == self._part_bytes:
                self._send_part()
            room = self._part_bytes - len(self._part)
            self._part += part[:room]
            part = part[room:]

    def _send_part(self) -> None:
        if self._parts == MAX_PARTS - 1:
            raise InvalidInput(
                f"{self._key} in {self._where} is larger than the {MAX_PARTS} parts of "
                f"{self._part_bytes} bytes that it was begun with: open its writer with "
                f"expected_bytes of at least its size"
            )
        if self._upload is None:
            in_flight = max(1, IN_FLIGHT_BYTES // self._part_bytes)
            self._upload = self._begin(self._part_bytes, in_flight)
        full, self._part = self._part, bytearray()
        self._parts += 1
        self._upload.write(full)

    def _commit(self) -> None:
        if self._upload is None:
            self._put(self._part)
        else:
            self._upload.write(self._part)
            self._upload.close()
            self._upload = None
        self._part = bytearray()

    def _discard(self) -> None:
        self._part = bytearray()
        upload, self._upload = self._upload, None
        if upload is not None:
            # It aborts when its context ends with an error; a close that failed has done so.
            with contextlib.suppress(Exception):
                upload.__exit__(WriterClosed, WriterClosed("aborted"), None)

    def _fail(self, op: str, error: Exception) -> NoReturn:
        self._fail_as(op, error)


def _discard_quietly(unfinished: Unfinished) -> None:
    # A temporary file that cannot be removed now is swept later.
    with contextlib.suppress(OSError):
        unfinished.discard()


def part_bytes_for(key: str, expected_bytes: int) -> int:
    """The size of parts that an object of the expected size needs, in whole MiB."""
    if not 0 <= expected_bytes <= MAX_OBJECT_BYTES:
        raise InvalidInput(
            f"{key}: {expected_bytes} is no size that an object can have; at most "
            f"{MAX_OBJECT_BYTES} bytes fit one"
        )
    needed = -(-expected_bytes // MAX_PARTS)
    return max(PART_BYTES, -(-needed >> 20) << 20)
