"""Keeping a table healthy with Spark: once, or again and again next to a stream.

`Pipeline(spark, uri).run()` does what is due, job by job (`jobs`), and says what it did.
`start()` does the same in a thread of its own, round after round, until it is told to stop.

Invariants
- Whatever ends a pipeline, be it an error, `stop` or a kill, the table is as the last commit left
  it, and the next run goes on from there.
- An error of a round is kept and logged. The next round tries again; after `MAX_FAILURES` rounds
  in a row that failed the pipeline ends, and whoever waits for it gets the error.
- `stop` returns within a bounded time: what is under way may finish, and is cancelled after that.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from pyspark.sql import SparkSession
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text

from penstock.errors import InvalidInput, PenstockError
from penstock.memwal.base_table import BaseTable
from penstock.memwal.gc_limits import RETAIN_SECONDS
from penstock.memwal.maintain import Budget, Job, Round
from penstock.spark import jobs as work_of
from penstock.spark import tasks
from penstock.spark.jobs import Outcome, Tally, Work
from penstock.spark.options import SourceOptions
from penstock.spark.tasks import Cancelled
from penstock.spark.workers import TablePlace

JOBS = ("merge", "index", "compact", "snapshot", "gc")
INTERVAL_SECONDS = 30.0
STOP_SECONDS = 60.0
MAX_FAILURES = 5
_WIDTH = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobReport(Job):
    """What one job did."""

    pieces: int = 0
    tasks: int = 0
    """How many of the pieces were Spark tasks; the driver did the others."""


@dataclass(frozen=True, slots=True)
class PipelineReport(Round[JobReport]):
    """What a run did; prints as a table."""

    table: str

    def __rich__(self) -> Group:
        return Group(Text(self.table, overflow="fold"), self._grid())

    def _grid(self) -> RichTable:
        table = RichTable(box=SIMPLE_HEAD)
        table.add_column("job")
        table.add_column("what it did", overflow="fold")
        table.add_column("pieces", justify="right")
        table.add_column("tasks", justify="right")
        table.add_column("seconds", justify="right")
        table.add_column("left", overflow="fold")
        for job in self.jobs:
            counts = (f"{job.pieces:,}", f"{job.tasks:,}", f"{job.seconds:.2f}")
            table.add_row(job.name, job.did, *counts, job.left or "-")
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, markup=False)
        with console.capture() as capture:
            console.print(self._grid())
        lines = [line.rstrip() for line in capture.get().splitlines()]
        return "\n".join([self.table, *(line for line in lines if line)])


class Pipeline:
    """The maintenance of one table as Spark jobs."""

    def __init__(
        self,
        spark: SparkSession,
        uri: str | os.PathLike[str],
        storage_options: Mapping[str, str] | None = None,
        *,
        console: Console | None = None,
    ) -> None:
        """Open the table at a path or URI; `console` is where bars go, else the standard error."""
        options = SourceOptions.of({"path": os.fspath(uri)})
        given = SourceOptions(options.uri, dict(storage_options or {}))
        tasks.context_of(spark)
        self._spark = spark
        self._handle = given.open()
        self._place = TablePlace.of(given.locate(), storage_options)
        self._console = console

    @property
    def uri(self) -> str:
        return self._place.uri

    def __repr__(self) -> str:
        return f"Pipeline({self.uri!r})"

    def run(
        self,
        jobs: str | Sequence[str] | None = None,
        *,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
        retain_seconds: float = RETAIN_SECONDS,
    ) -> PipelineReport:
        """Do what is due of these jobs, or of all: merge, index, compact, snapshot, gc.

        They are run in this order, whichever order they are named in. No piece of work is begun
        once `budget_seconds` have passed or `budget_bytes` were read; the report says what is
        left. A version can be read for `retain_seconds` after a newer one replaced it. A snapshot
        is taken where it is named, or where there is one already.
        """
        return self._run(_Round(_checked(jobs), budget_seconds, budget_bytes, retain_seconds))

    def start(
        self,
        interval_seconds: float = INTERVAL_SECONDS,
        *,
        jobs: str | Sequence[str] | None = None,
        budget_seconds: float | None = None,
        budget_bytes: int | None = None,
        retain_seconds: float = RETAIN_SECONDS,
    ) -> RunningPipeline:
        """Run now, and again so many seconds after each run, until `stop()` is called."""
        number = isinstance(interval_seconds, int | float) and not isinstance(
            interval_seconds, bool
        )
        if not number or not interval_seconds > 0:
            raise InvalidInput(
                f"interval_seconds must be a positive number, not {interval_seconds!r}"
            )
        asked = _Round(_checked(jobs), budget_seconds, budget_bytes, retain_seconds)
        Budget(self._base, budget_seconds, budget_bytes)  # says now if these are wrong
        return RunningPipeline(self, asked, float(interval_seconds))

    def create_index(
        self, column: str, kind: str, *, name: str | None = None, **options: Any
    ) -> str:
        """Create an index, as `Table.create_index` does; returns its name.

        A vector model is trained on a sample that Spark tasks read, the index is built by tasks,
        a group of fragments each, and committed once.
        """
        work = self._work(Budget(self._base), self._new_group())
        live = self._handle.to_arrow
        return work_of.create_index(work, column, kind, name=name, live=live, options=options)

    @property
    def _base(self) -> BaseTable:
        return self._handle._base

    def _new_group(self) -> str:
        return f"penstock-{self._base.seams.entropy.uuid4()}"

    def _work(self, budget: Budget, group: str) -> Work:
        return Work(
            self._spark,
            self._place,
            self._base,
            self._handle.name,
            group,
            budget,
            self._console,
        )

    def _run(
        self,
        asked: _Round,
        group: str | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> PipelineReport:
        budget = _Allowance(self._base, asked, is_stopping)
        runners: dict[str, Callable[[Work], Outcome]] = {
            "merge": work_of.merge,
            "index": work_of.index,
            "compact": work_of.compact,
            "snapshot": partial(work_of.snapshot, asked=asked.jobs is not None),
            "gc": partial(work_of.clean_up, retain_seconds=asked.retain_seconds),
        }
        clock = self._base.seams.clock
        work = self._work(budget, group or self._new_group())
        done = []
        for name in JOBS if asked.jobs is None else asked.jobs:
            began_ms = clock.monotonic_ms()
            tally = Tally()
            one = Work(
                work.spark,
                work.place,
                work.table,
                work.name,
                work.group,
                budget,
                work.console,
                tally,
            )
            did, left = runners[name](one)
            seconds = (clock.monotonic_ms() - began_ms) / 1000
            done.append(JobReport(name, did, seconds, left, tally.pieces, tally.tasks))
        return PipelineReport(tuple(done), self.uri)


@dataclass(frozen=True, slots=True)
class _Round:
    """What was asked for."""

    jobs: tuple[str, ...] | None
    budget_seconds: float | None
    budget_bytes: int | None
    retain_seconds: float


class _Allowance(Budget):
    """A budget that is spent, too, once the pipeline is to stop."""

    def __init__(self, table: BaseTable, asked: _Round, is_stopping: Callable[[], bool]) -> None:
        super().__init__(table, asked.budget_seconds, asked.budget_bytes)
        self._is_stopping = is_stopping

    @property
    def is_spent(self) -> bool:
        return self._is_stopping() or super().is_spent


def _checked(jobs: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if jobs is None:
        return None
    named = [jobs] if isinstance(jobs, str) else list(jobs)
    unknown = [name for name in named if name not in JOBS]
    if unknown or not named:
        wrong = f"unknown job {unknown[0]!r}" if unknown else "no job is named"
        raise InvalidInput(f"{wrong}; there are: {', '.join(JOBS)}")
    return tuple(name for name in JOBS if name in named)


class RunningPipeline:
    """A pipeline in a thread of its own; ends with the process at the latest."""

    def __init__(self, pipeline: Pipeline, asked: _Round, interval_seconds: float) -> None:
        self._pipeline = pipeline
        self._asked = asked
        self._interval_seconds = interval_seconds
        self._group = pipeline._new_group()
        self._stopping = threading.Event()
        self._last: PipelineReport | None = None
        self._failure: Exception | None = None
        self._rounds = 0
        self._thread = threading.Thread(
            target=self._go_on, name=f"penstock-pipeline-{pipeline._handle.name}", daemon=True
        )
        self._thread.start()

    @property
    def last(self) -> PipelineReport | None:
        """What the last round did that succeeded."""
        return self._last

    @property
    def failure(self) -> Exception | None:
        """The error of the last round; None if it succeeded."""
        return self._failure

    @property
    def rounds(self) -> int:
        """Rounds that ended, one way or the other."""
        return self._rounds

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it has ended, which it does by itself only after several failures.

        Returns False if the time was up before. Raises the error that ended it.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return False
        self._raise()
        return True

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> PipelineReport | None:
        """Let it end, and return the last report; raises if its last round failed.

        No new piece of work is begun. Tasks that are not done after `timeout_seconds` are
        cancelled, which leaves nothing half-done.
        """
        self._stopping.set()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            tasks.cancel(self._pipeline._spark, self._group)
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise PenstockError(
                f"{self._pipeline.uri}: the pipeline has not ended {2 * timeout_seconds:.0f} s "
                "after it was told to; the driver is in the middle of a commit or cannot reach "
                "the store. It will end after that"
            )
        self._raise()
        return self._last

    def __enter__(self) -> RunningPipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
            return
        try:
            self.stop()
        except Exception as also:
            error.add_note(f"and the pipeline of {self._pipeline.uri} failed: {also}")

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _go_on(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._last = self._pipeline._run(self._asked, self._group, self._stopping.is_set)
                self._failure, failures = None, 0
            except Cancelled as error:
                if not self._stopping.is_set():
                    self._failure, failures = error, failures + 1
            except Exception as error:
                self._failure, failures = error, failures + 1
            self._rounds += 1
            if self._failure is not None:
                ends = failures >= MAX_FAILURES
                log.error(
                    "the pipeline of %s failed, %s: %s: %s",
                    self._pipeline.uri,
                    f"{failures} times in a row, and ends" if ends else "and will try again",
                    type(self._failure).__name__,
                    self._failure,
                )
                if ends:
                    return
            self._stopping.wait(self._interval_seconds)
