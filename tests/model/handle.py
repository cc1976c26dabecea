"""One user of a table: a handle with its own reader and writers, in this process or another.

`Handle` is the user itself. `RemoteHandle` drives one that lives in a child process over a pipe,
with the same methods; `tests.model.child` is what runs there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from tests.model.questions import GETS, Answer, Asked, Key, Row

import penstock
from penstock.errors import AmbiguousWrite, Fenced
from penstock.table import Table, Writer

PROJECT = Path(__file__).parents[2]
ANSWER_SECONDS = 60.0
NEVER_MS = 10**9


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
    def answer(self, asked: Asked, part: int | None = None) -> Answer: ...
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
        names = [key[0] if len(key) == 1 else key for key in keys]
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

    def answer(self, asked: Asked, part: int | None = None) -> Answer:
        """Everything that is asked, or one of two parts of it, which is faster."""
        table = self.table
        names = [key[0] if len(key) == 1 else key for key in asked.keys]
        if not table.primary_key:
            names = []
        scan, count, filtered, filtered_count, window, got, many = [None] * 7
        if part in (None, 0):
            scan = table.to_arrow().to_pylist()
            filtered_count = table.count(asked.filter)
            got = [table.get(name) for name in names[:GETS]] if names else None
        if part in (None, 1):
            filtered = table.scan(list(asked.columns), asked.filter).read_all().to_pylist()
            count = table.count()
            many = table.get_many(names).to_pylist() if names else None
        if part is None:
            rows = table.scan(filter=asked.filter, limit=asked.limit, offset=asked.offset)
            window = rows.read_all().to_pylist()
        return Answer(scan, filtered, count, filtered_count, window, got, many)


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
