"""The demo: a Spark stream into a table that is searched meanwhile, and whose driver is killed.

    parent                                      driver (Spark)
    puts files into a directory, one by one --> stream: one file per micro-batch --> table
    gets and searches, measures                 pipeline: merge, index, compact, clean up
    half-way ---------------------------------> SIGKILL
    goes on putting files there
    starts another ---------------------------> goes on from the checkpoint
    many files at once -----------------------> as fast as it can
    compares every row                          maintenance, once more
    compares what plain Lance reads

What the table has to be is known before (`demo_changes`), so that the comparison is exact. The
parent believes only what it reads itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock
from penstock.cli.demo import TABLE, Progress, compare, fresh_table, matrix
from penstock.cli.demo_changes import (
    STREAM_SCHEMA,
    ChangeFile,
    Plan,
    plan_changes,
    recall_queries,
)
from penstock.cli.demo_driver import Driver, Reports
from penstock.cli.demo_reads import Queries, Sightings, Watcher
from penstock.cli.demo_report import Account, Files, Latency
from penstock.cli.demo_stream import Job
from penstock.cli.documents import documents
from penstock.errors import PenstockError
from penstock.memwal.status import TableStatus
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SystemEntropy
from penstock.table import Table

INTERVAL_MS = 500.0
"""Between two files of the steady part, where the machine is fast enough for that."""
MAX_BACKLOG = 8
"""With so many files that are not in the table yet the source waits until all are."""
WAIT_SECONDS = 300.0
"""So long may anything take before the demo gives up."""
_POLL_MS = 20.0
_PILOTS = 3
_PACE = 1.5
"""The interval, in times of what a file takes from the source to a read."""
_RECALL_QUERIES = 200
_GENERATIONS_WANTED = 8
_KILLED = "driver killed"


class SparkMissing(PenstockError):
    """Spark cannot be started here; the message says why."""


def run_demo(
    directory: str, count: int, regions: int, progress: Progress
) -> tuple[Account, TableStatus]:
    """Run the whole demo in `directory`; the table is left there to look at."""
    home = os.path.abspath(directory)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as scratch,
        _Run(home, count, regions, scratch, progress) as run,
    ):
        return run.demonstrate(), run.table.status()


@dataclass(frozen=True, slots=True)
class _Kill:
    at_ms: float
    seen: int
    written: int
    replayed: int
    lost: int
    files: Files


class _Run:
    """One demo, from the first driver to the account."""

    def __init__(
        self, home: str, count: int, regions: int, scratch: str, progress: Progress
    ) -> None:
        self.home = home
        self.regions = regions
        self.clock = SystemClock()
        self.progress = progress
        self.phase, self.phase_seen = "starting Spark", 0
        self.files: tuple[ChangeFile, ...] = ()
        self.reports = Reports()
        self.sightings = Sightings()
        self.source = Path(scratch, "source")
        self.source.mkdir()
        spark = Path(scratch, "spark")
        spark.mkdir()
        uri = os.path.join(home, f"{TABLE}.lance")
        self.job = Job(uri, str(self.source), os.path.join(scratch, "checkpoint"), str(spark))
        self.started_ms = self.clock.monotonic_ms()
        self.driver = Driver(self.job, self.reports)
        self.loops: list[Watcher | Queries] = []
        self._mtime_ms = 0
        try:
            self.show()
            stream = documents(count)
            self.plan: Plan = plan_changes(stream)
            self.files = self.plan.files
            self.wait(lambda: bool(self.driver.events), "Spark was found or not")
            if "unavailable" in self.driver.events:
                raise SparkMissing(self.reports.failure)
            self.documents = stream.num_rows
            self.table = self._new_table()
        except BaseException:
            self.driver.kill()
            raise

    def __enter__(self) -> _Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.driver.kill()
        for loop in self.loops:
            loop.stop()

    def _new_table(self) -> Table:
        """The table with its first documents and its indexes, while Spark starts."""
        memtable_rows = max(50, self.documents // self.regions // _GENERATIONS_WANTED)
        table = fresh_table(self.home, STREAM_SCHEMA, self.regions, max_memtable_rows=memtable_rows)
        table.upsert(self.plan.loaded)
        table.create_index("vector", "ivf_pq", metric="cosine", num_sub_vectors=16)
        table.close()
        return penstock.connect(self.home).open_table(TABLE)

    def wait(self, condition: Callable[[], bool], until: str) -> None:
        """Wait for something to be so, as long as the driver is there to bring it about."""
        end_ms = self.clock.monotonic_ms() + WAIT_SECONDS * 1000
        while not condition():
            self.show()
            if not self.driver.is_alive and not condition():
                raise self.driver.failed()
            if self.clock.monotonic_ms() > end_ms:
                raise PenstockError(f"the demo waited {WAIT_SECONDS:.0f} s until {until}, in vain")
            self.clock.sleep_ms(_POLL_MS)

    def show(self, phase: str | None = None) -> None:
        if phase is not None:
            self.phase, self.phase_seen = phase, self.sightings.seen
        elif self.phase == _KILLED and self.sightings.seen > self.phase_seen:
            self.phase = "streaming on"
        seen = sum(file.rows.num_rows for file in self.files[: self.sightings.seen])
        self.progress(self.phase, seen, sum(file.rows.num_rows for file in self.files) or None)

    # --- the course of it ------------------------------------------------------------------

    def demonstrate(self) -> Account:
        plan, sightings = self.plan, self.sightings
        watcher = Watcher(self.table, plan.files, sightings)
        queries = Queries(self.table, plan, sightings)
        self.loops = [watcher, queries]
        self.driver.send("stream")
        self.put(plan.steady[0])
        self.wait(lambda: "ready" in self.driver.events, "Spark was started")
        self.show("streaming")
        watcher.start()
        self.wait(lambda: sightings.seen > 0, "the first file was in the table")
        start_ms = self.clock.monotonic_ms() - self.started_ms
        queries.start()

        steady_ms = self.clock.monotonic_ms()
        half = len(plan.steady) // 2
        taken_ms = self.pilot(plan.steady[1 : 1 + _PILOTS])
        interval_ms = max(INTERVAL_MS, _PACE * taken_ms)
        self.stream(plan.steady[1 + _PILOTS : half], interval_ms)
        kill = self.kill_and_restart(taken_ms)
        self.stream(plan.steady[half:], interval_ms)
        self.wait(lambda: not sightings.backlog, "all files were in the table")
        steady_ms = self.clock.monotonic_ms() - steady_ms

        self.show("a burst of files")
        burst_ms = self.clock.monotonic_ms()
        for file in plan.burst:
            self.put(file)
        self.wait(lambda: not sightings.backlog, "the burst was in the table")
        burst_ms = sightings.seen_ms[sightings.seen] - burst_ms
        for loop in self.loops:
            loop.stop()

        self.show("verifying")
        self.driver.send("finish")
        self.wait(lambda: "stopped" in self.driver.events, "the stream had stopped")
        live = compare(plan.expected, self.table.to_arrow())
        before, recall_before = Files.of(self.table), self.recall()
        self.show("maintenance")
        self.driver.send("maintain")
        self.wait(lambda: "maintained" in self.driver.events, "maintenance was done")
        self.show("verifying")
        plain = compare(plan.expected, lance.dataset(self.table.uri).to_table())

        steady, burst = len(plan.steady), len(plan.burst)
        steady_rows = sum(file.rows.num_rows for file in plan.steady)
        burst_rows = sum(file.rows.num_rows for file in plan.burst)
        numbers = range(1, steady + 1)
        waited = sightings.behind(kill.seen + 1)
        return Account(
            documents=self.documents,
            regions=len(self.table.status().regions),
            loaded=plan.loaded.num_rows,
            files=steady + burst,
            upserts=plan.upserts,
            deletes=plan.deletes,
            interval_ms=interval_ms,
            steady_rows_per_second=steady_rows / steady_ms * 1000,
            burst_rows=burst_rows,
            burst_files=burst,
            burst_rows_per_second=burst_rows / burst_ms * 1000,
            batches=self.batch_times(lambda batch: batch < steady),
            burst_batches=self.batch_times(lambda batch: batch >= steady),
            freshness=Latency.of(
                [sightings.freshness_ms(n) for n in numbers[1:] if n not in waited]
            ),
            start_ms=start_ms,
            restart_ms=sightings.seen_ms[kill.seen + 1] - kill.at_ms,
            freshness_across_kill_ms=max(map(sightings.freshness_ms, waited)),
            seen_at_kill=kill.seen,
            written_at_kill=kill.written,
            replayed_batches=kill.replayed,
            lost_after_kill=kill.lost,
            reads={kind: Latency.of(times) for kind, times in queries.latencies_ms.items()},
            failed_reads=len(watcher.failures) + len(queries.failures),
            wrong_reads=len(queries.wrong),
            first_failure=next(iter(queries.wrong + watcher.failures + queries.failures), ""),
            pipeline_rounds=self.reports.rounds,
            maintenance=self.reports.jobs,
            at_kill=kill.files,
            before=before,
            after=Files.of(self.table),
            recall_before=recall_before,
            recall_after=self.recall(),
            rows=plan.expected.num_rows,
            live=live,
            plain=plain,
        )

    def pilot(self, files: Sequence[ChangeFile]) -> float:
        """Put files there one after the other; returns how long one takes until it is read."""
        for file in files:
            self.put(file)
            self.wait(lambda: not self.sightings.backlog, "a file was in the table")
        return float(np.median([self.sightings.freshness_ms(file.number) for file in files]))

    def stream(self, files: Sequence[ChangeFile], interval_ms: float) -> None:
        """Put files there at a steady pace, whatever becomes of them, as sources do."""
        due_ms = self.clock.monotonic_ms()
        for file in files:
            if self.sightings.backlog >= MAX_BACKLOG:
                self.wait(lambda: not self.sightings.backlog, "the stream caught up")
            due_ms = max(due_ms + interval_ms, self.clock.monotonic_ms())
            while (left_ms := due_ms - self.clock.monotonic_ms()) > 0:
                self.show()
                self.clock.sleep_ms(min(_POLL_MS, left_ms))
            self.put(file)

    def put(self, file: ChangeFile) -> None:
        """Put a file into the source at once, with a time after that of the one before it."""
        vectors = file.rows.schema.get_field_index("vector")
        column = file.rows.column(vectors).cast(pa.list_(pa.float32()))
        rows = file.rows.set_column(vectors, "vector", column)
        hidden = self.source / f".{file.number:06d}"
        pq.write_table(rows, hidden)
        # Spark takes files by the time of their last change, in whole milliseconds.
        self._mtime_ms = max(self._mtime_ms + 2, self.clock.now_ms())
        os.utime(hidden, ns=(self._mtime_ms * 1_000_000,) * 2)
        self.sightings.written_ms[file.number] = self.clock.monotonic_ms()
        hidden.rename(self.source / f"{file.number:06d}.parquet")
        self.show()

    def kill_and_restart(self, taken_ms: float) -> _Kill:
        """Kill the driver at some moment, start another, and look at the table meanwhile."""
        sightings = self.sightings
        # A file was put there just now, so that this is likely to be in the middle of its batch.
        self.clock.sleep_ms(SystemEntropy().uniform(0, taken_ms))
        self.driver.kill()
        at_ms, seen, written = self.clock.monotonic_ms(), sightings.seen, sightings.written
        self.show(_KILLED)
        begun, done = (self._last_batch(log) for log in ("offsets", "commits"))
        self.driver = Driver(self.job, self.reports)
        self.driver.send("stream")
        settled = sightings.settled
        found = self.table.to_arrow().select(["id", "revision"])
        revisions = dict(zip(*(column.to_pylist() for column in found.columns), strict=True))
        lost = sum(
            not self.plan.is_allowed(key, revisions.get(key), settled, written)
            for key in self.plan.history
        )
        return _Kill(at_ms, seen, written, begun - done, lost, Files.of(self.table))

    def _last_batch(self, log: str) -> int:
        names = os.listdir(os.path.join(self.job.checkpoint, log))
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def batch_times(self, is_meant: Callable[[int], bool]) -> Latency:
        """How long micro-batches took; the first of a driver is another matter."""
        firsts = self.reports.firsts
        return Latency.of(
            [ms for batch, _, ms in self.reports.batches if is_meant(batch) and batch not in firsts]
        )

    def recall(self) -> float:
        """The share of the ten nearest rows that a search finds, of many searches."""
        queries = recall_queries(self.plan.expected, _RECALL_QUERIES)
        exact = np.sort(1.0 - queries @ matrix(self.plan.expected.column("vector")).T, axis=1)
        found = 0
        for query, distances in zip(queries, exact, strict=True):
            near = self.table.search(query).limit(10).select(["vector"]).to_arrow()
            theirs = 1.0 - matrix(near.column("vector")) @ query
            # Rows with the same distance are as good as one another.
            found += int((theirs <= distances[9] + 1e-5).sum())
        return found / (10 * len(queries))
