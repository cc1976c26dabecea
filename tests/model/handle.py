"""One user of a table: a handle with its own reader and writers, in this process or another.

`Handle` is the user itself. `RemoteHandle` drives one that lives in a child process over a pipe,
with the same methods; `tests.model.child` is what runs there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from tests.model.mortal import Death, Mortal
from tests.model.questions import Answer, Asked, Key, Reads, Row

import penstock
from penstock.errors import AmbiguousWrite, Fenced, InvalidInput, PenstockError
from penstock.memwal import advance, build_indexes, changes
from penstock.memwal.build_indexes import build_segment, commit_index_build, plan_index_builds
from penstock.memwal.compact import commit_compaction, compact_piece, plan_compaction
from penstock.memwal.gc_limits import RETAIN_SECONDS
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.memwal.snapshots import build_snapshot
from penstock.memwal.writer import RegionWriter
from penstock.table import Table, Writer

PROJECT = Path(__file__).parents[2]
ANSWER_SECONDS = 60.0
NEVER_MS = 10**9
_MEMORY = Path("/dev/shm")

Piece = tuple[str, Any]
"""The name of a job, and what was worked out for it and is not committed."""
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


def shrink(written_rows: int) -> None:
    """Let what is done for large tables be done for small ones, in this process."""
    advance.ADVANCE_ROWS = 0
    build_indexes.MAX_SEGMENTS = 2
    changes.WRITTEN_ROWS = written_rows


@contextmanager
def usual_sizes() -> Iterator[None]:
    """Whatever `shrink` does meanwhile, afterwards it is undone."""
    before = advance.ADVANCE_ROWS, build_indexes.MAX_SEGMENTS, changes.WRITTEN_ROWS
    try:
        yield
    finally:
        advance.ADVANCE_ROWS, build_indexes.MAX_SEGMENTS, changes.WRITTEN_ROWS = before


class User(Protocol):
    """What a walk asks of a user. Writes and flushes say whether they were acknowledged."""

    def upsert(self, rows: Sequence[Row], own: bool) -> bool: ...
    def delete(self, keys: Sequence[Key], own: bool) -> bool: ...
    def open_writer(self, durable: bool) -> None: ...
    def close_writer(self) -> bool: ...
    def drain(self) -> bool: ...
    def flush(self, recover: bool) -> bool: ...
    def freeze(self) -> None: ...
    def work(self, job: str, arguments: Sequence[Any], death: Death | None) -> bool: ...
    def start(self, job: str) -> list[Piece]: ...
    def rest(self) -> None: ...
    def reopen(self, crash: bool) -> None: ...
    def set_regions(self, function: str, arguments: tuple[Any, ...]) -> None: ...
    def answer(self, asked: Asked, reads: Reads, how: How) -> Answer: ...
    def answer_or_refuse(self, asked: Asked, reads: Reads, how: How) -> Answer | None: ...
    def leave(self) -> list[str]: ...


class Handle:
    """A user in this process."""

    def __init__(self, uri: str, name: str) -> None:
        self._uri = uri
        self._name = name
        self._own: Writer | None = None
        self._abandoned: list[RegionWriter] = []
        self._open()

    def _open(self) -> None:
        self.table: Table = penstock.connect(self._uri).open_table(self._name)

    # --- writing -------------------------------------------------------------------------------

    def upsert(self, rows: Sequence[Row], own: bool) -> bool:
        data = pa.Table.from_pylist(rows, self.table.schema)
        if own:
            return self._by_writer(lambda writer: writer.upsert(data))
        return self._attempt(lambda: self.table.upsert(data))

    def delete(self, keys: Sequence[Key], own: bool) -> bool:
        names = [_named(key) for key in keys]
        if own:
            return self._attempt(lambda: self._writer().delete(names))
        return self._attempt(lambda: self.table.delete(keys=names))

    def _by_writer(self, write: Callable[[Writer], object]) -> bool:
        try:
            return self._attempt(lambda: write(self._writer()))
        except InvalidInput:
            # It takes no rows that name a column which is not what it was.
            assert self._own is not None
            assert self._own.outdated
            return self.close_writer() and self._attempt(lambda: write(self._writer()))

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
        self._abandon(own)
        return False

    def flush(self, recover: bool) -> bool:
        return self._attempt(lambda: self.table.flush(recover=recover))

    def freeze(self) -> None:
        for region in self.table._region_writers():
            if region.failure is None:
                self._attempt(region.freeze)

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
                self._abandon(own)
            return False
        return True

    def _abandon(self, writer: Writer) -> None:
        """What it was flushing may still come to its end."""
        self._abandoned += writer.region_writers()
        writer.abandon()

    # --- upkeep --------------------------------------------------------------------------------

    def work(self, job: str, arguments: Sequence[Any], death: Death | None) -> bool:
        """Do a job; whether it was done, or death came in between."""
        if death is None:
            return self._attempt(lambda: _JOBS[job](self.table, *arguments))
        mortal = Mortal(self.table.uri, death)
        try:
            _JOBS[job](mortal.table, *arguments)
        except (PenstockError, OSError):
            if not mortal.is_dead:
                raise
            return False
        finally:
            for writer in mortal.table._tracked():
                self._abandon(writer)
            mortal.table._reader.forget()
        return True

    def start(self, job: str) -> list[Piece]:
        """Do all of a job but its commits."""
        base = self.table._base
        if job == "merge":
            plans, _ = plan_merges(base, max_rows=4, together=False)
            return [(job, fold(base, planned)) for planned in plans]
        if job == "compact":
            due = plan_compaction(base, target_rows=12, deletion_share=0.0)
            return [(job, compact_piece(base, piece)) for piece in due]
        return [(job, build_segment(base, planned)) for planned in plan_index_builds(base)]

    def rest(self) -> None:
        """Wait until nothing of this user's is under way."""
        for region in [*self._abandoned, *self.table._region_writers()]:
            if region.failure is None:
                region._await_flushes()
            with region._flushing:
                pass
        self._abandoned.clear()

    # --- life ----------------------------------------------------------------------------------

    def reopen(self, crash: bool) -> None:
        """Begin anew, as another process would after this one ended or was killed."""
        if crash:
            self._let_go()
        else:
            self.close_writer()
            self.table.close()
        self._open()

    def set_regions(self, function: str, arguments: tuple[Any, ...]) -> None:
        self.table.set_regions(getattr(penstock, function)(*arguments))

    def leave(self) -> list[str]:
        """Go, and leave nothing running; returns what is running all the same."""
        self._let_go()
        self.rest()
        names = (thread.name for thread in threading.enumerate())
        return [name for name in names if name.startswith("penstock-advance")]

    def _let_go(self) -> None:
        for writer in self.table._tracked():
            self._abandon(writer)
        self._own = None
        self.table._reader.forget()

    # --- reading -------------------------------------------------------------------------------

    def answer(self, asked: Asked, reads: Reads, how: How) -> Answer:
        return {read: _READS[read](self.table, asked, how) for read in reads if self._can(read)}

    def answer_or_refuse(self, asked: Asked, reads: Reads, how: How) -> Answer | None:
        """The answer, or None if it cannot be given any more."""
        try:
            return self.answer(asked, reads, how)
        except PenstockError:
            return None

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


def _merge_insert(
    table: Table, rows: Sequence[Row], on: Sequence[str] | None, clauses: Sequence[Sequence[Any]]
) -> None:
    builder = table.merge_insert(on)
    for clause, *arguments in clauses:
        builder = getattr(builder, clause)(*arguments)
    fields = [table.schema.field(name) for name in rows[0]]
    builder.execute(pa.Table.from_pylist(list(rows), pa.schema(fields)))


def _snapshot(table: Table, outside: bool) -> None:
    if outside:
        build_snapshot(table._base, inline_regions=0)
    else:
        table.snapshot()


def _complete(table: Table, pieces: Sequence[Piece]) -> None:
    for job, piece in pieces:
        if job == "merge":
            commit_merge(table._base, piece)
        elif job == "compact":
            commit_compaction(table._base, [piece])
        else:
            commit_index_build(table._base, [piece])


_JOBS: dict[str, Callable[..., object]] = {
    "complete": _complete,
    "flush": lambda table, recover: table.flush(recover=recover),
    "merge": lambda table, max_rows: table.merge(max_rows=max_rows),
    "compact": lambda table, target_rows, deletion_share: table.compact(
        target_rows=target_rows, deletion_share=deletion_share
    ),
    "build_indexes": lambda table: table.build_indexes(),
    "snapshot": _snapshot,
    "gc": lambda table, limits: table.gc(**limits),
    "maintain": lambda table, recover, now: table.maintain(
        recover=recover, retain_seconds=0 if now else RETAIN_SECONDS
    ),
    "delete_where": lambda table, where: table.delete(where=where),
    "update_where": lambda table, where, values: table.update(where=where, values=values),
    "merge_insert": _merge_insert,
    "add_column": lambda table, name: table.add_columns({name: pa.int64()}),
    "rename_column": lambda table, old, new: table.rename_column(old, new),
    "drop_column": lambda table, name: table.drop_columns(name),
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

    def __init__(self, process: ChildProcess, uri: str, name: str, written_rows: int) -> None:
        self._process = process
        process.call("begin", uri, name, written_rows)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self._process.call(method, *arguments)
