"""One user of a table: a handle with its own reader and writers, in this process or another.

`Handle` is the user itself. `RemoteHandle` drives one that lives in a child process over a pipe,
with the same methods; `tests.model.child` is what runs there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from tests.model.questions import Answer, Asked, Key, Reads, Row

import penstock
from penstock.errors import AmbiguousWrite, Fenced, PenstockError
from penstock.table import Table, Writer

PROJECT = Path(__file__).parents[2]
ANSWER_SECONDS = 60.0
NEVER_MS = 10**9
_MEMORY = Path("/dev/shm")

How = dict[str, Any]
"""What a read is told besides: the consistency, or the version."""


@contextmanager
def fast_directory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory if the system has one: what a power cut does is tested elsewhere."""
    if not os.access(_MEMORY, os.W_OK):
        yield otherwise / "lake"
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY) as made:
        yield Path(made)


class User(Protocol):
    """What a walk asks of a user. Writes and flushes say whether they were acknowledged."""

    def upsert(self, rows: Sequence[Row], own: bool) -> bool: ...
    def delete(self, keys: Sequence[Key], own: bool) -> bool: ...
    def open_writer(self, durable: bool) -> None: ...
    def close_writer(self) -> bool: ...
    def drain(self) -> bool: ...
    def flush(self, recover: bool) -> bool: ...
    def freeze(self) -> None: ...
    def reopen(self, crash: bool) -> None: ...
    def set_regions(self, function: str, arguments: tuple[Any, ...]) -> None: ...
    def answer(self, asked: Asked, reads: Reads, how: How) -> Answer: ...
    def answer_or_refuse(self, asked: Asked, reads: Reads, how: How) -> Answer | None: ...
    def snapshot(self) -> int: ...
    def leave(self) -> None: ...


class Handle:
    """A user in this process."""

    def __init__(self, uri: str, name: str) -> None:
        self._uri = uri
        self._name = name
        self._own: Writer | None = None
        self._open()

    def _open(self) -> None:
        self.table: Table = penstock.connect(self._uri).open_table(self._name)

    # --- writing -------------------------------------------------------------------------------

    def upsert(self, rows: Sequence[Row], own: bool) -> bool:
        data = pa.Table.from_pylist(rows, self.table.schema)
        return self._attempt(lambda: self._target(own).upsert(data))

    def delete(self, keys: Sequence[Key], own: bool) -> bool:
        names = [_named(key) for key in keys]
        if own:
            return self._attempt(lambda: self._writer().delete(names))
        return self._attempt(lambda: self.table.delete(keys=names))

    def open_writer(self, durable: bool) -> None:
        self.close_writer()
        waits = {} if durable else {"wal_flush_interval_ms": NEVER_MS}
        self._own = self.table.writer(durable=durable, **waits)

    def close_writer(self) -> bool:
        own, self._own = self._own, None
        return own is None or self._attempt(own.close)

    def drain(self) -> bool:
        """Bring what a writer that is not durable holds back into the log."""
        own = self._own
        if own is None or own.config.durable:
            return True
        regions = own.region_writers()
        for region in regions:
            region.drain()
        if all(region.failure is None for region in regions):
            return True
        self._own = None
        own.abandon()
        return False

    def flush(self, recover: bool) -> bool:
        return self._attempt(lambda: self.table.flush(recover=recover))

    def freeze(self) -> None:
        for region in self.table._region_writers():
            if region.failure is None:
                self._attempt(region.freeze)

    def _target(self, own: bool) -> Table | Writer:
        return self._writer() if own else self.table

    def _writer(self) -> Writer:
        if self._own is None:
            self._own = self.table.writer()
        return self._own

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Whether it was done; a writer that was fenced is of no more use."""
        try:
            work()
        except (Fenced, AmbiguousWrite):
            own, self._own = self._own, None
            if own is not None:
                own.abandon()
            return False
        return True

    # --- life ----------------------------------------------------------------------------------

    def reopen(self, crash: bool) -> None:
        """Begin anew, as another process would after this one ended or was killed."""
        if crash:
            for writer in self.table._tracked():
                writer.abandon()
            self._own = None
        else:
            self.close_writer()
            self.table.close()
        self._open()

    def set_regions(self, function: str, arguments: tuple[Any, ...]) -> None:
        self.table.set_regions(getattr(penstock, function)(*arguments))

    def leave(self) -> None:
        for writer in self.table._tracked():
            writer.abandon()

    # --- reading -------------------------------------------------------------------------------

    def answer(self, asked: Asked, reads: Reads, how: How) -> Answer:
        return {read: _READS[read](self.table, asked, how) for read in reads if self._can(read)}

    def answer_or_refuse(self, asked: Asked, reads: Reads, how: How) -> Answer | None:
        """The answer, or None if it cannot be given any more."""
        try:
            return self.answer(asked, reads, how)
        except PenstockError:
            return None

    def snapshot(self) -> int:
        return self.table.snapshot()

    def _can(self, read: str) -> bool:
        return bool(self.table.primary_key) or read not in ("get", "get_many")


def _filtered(table: Table, asked: Asked, how: How) -> list[Row]:
    return _rows(table.scan(list(asked.columns), asked.filter, **how).read_all())


def _window(table: Table, asked: Asked, how: How) -> list[Row]:
    window = table.scan(filter=asked.filter, limit=asked.limit, offset=asked.offset, **how)
    return _rows(window.read_all())


def _rows(table: pa.Table) -> list[Row]:
    return table.to_pylist()


def _named(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


_READS: dict[str, Callable[[Table, Asked, How], Any]] = {
    "scan": lambda table, asked, how: _rows(table.to_arrow(**how)),
    "count": lambda table, asked, how: table.count(**how),
    "get": lambda table, asked, how: table.get(_named(asked.keys[0]), **how),
    "get_many": lambda table, asked, how: _rows(
        table.get_many([_named(key) for key in asked.keys], **how)
    ),
    "filtered": _filtered,
    "filtered_count": lambda table, asked, how: table.count(asked.filter, **how),
    "window": _window,
}


class ChildProcess:
    """A second process, warm: users come and go in it."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._pipe, theirs = Pipe()
        with theirs, errors.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.model.child", str(theirs.fileno())],
                cwd=PROJECT,
                pass_fds=[theirs.fileno()],
                stderr=sink,
            )

    def call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(ANSWER_SECONDS):
            raise AssertionError(f"{method} was not answered:\n{self._errors.read_text()[-4000:]}")
        failed, result = self._pipe.recv()
        assert not failed, f"in the second process:\n{result}"
        return result

    def stop(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class RemoteHandle:
    """A user in a second process."""

    def __init__(self, process: ChildProcess, uri: str, name: str) -> None:
        self._process = process
        process.call("begin", uri, name)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self._process.call(method, *arguments)
