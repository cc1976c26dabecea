"""The streaming demo's driver: Spark in a process of its own, so that it can be killed.

`python -m penstock.cli.demo_stream JOB` streams the files of a directory into a table, one file
per micro-batch, with a pipeline beside it that merges, indexes, compacts and cleans up. It takes
commands from standard input, a word per line, and ends when that ends:

    stream      the table is there: begin
    finish      every file is there: process them and stop
    maintain    flush what is only in the log, and bring the table into order

It reports on standard output, one JSON object per line:

    {"event": "unavailable", "reason": …}          there is no Spark here; nothing else will come
    {"event": "available"}, {"event": "ready"}     Spark can be started; it is
    {"event": "batch", "id": …, "rows": …, "ms": …}
    {"event": "stopped", "rounds": …}              of the pipeline
    {"event": "maintained", "jobs": […]}
    {"event": "failed", "error": …}
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from penstock.cli.demo_changes import SOURCE_COLUMNS
from penstock.errors import PenstockError

_TRIGGER = "100 milliseconds"
_POLL_SECONDS = 0.2
_ROUND_SECONDS = 3.0
_RETAIN_SECONDS = 15.0
# Java compiles less well and starts sooner; and leaves nothing behind outside of the scratch
# directory when it is killed.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -Djava.io.tmpdir="


@dataclass(frozen=True, slots=True)
class Job:
    """What the driver is to do, passed to it as JSON."""

    table_uri: str
    source: str
    checkpoint: str
    scratch: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(job: Job, reports: Reports) -> None:
    try:
        from penstock.spark import Pipeline, local_session
        from penstock.spark.session import check_java

        check_java()
    except PenstockError as error:
        reports.send("unavailable", reason=str(error))
        return
    reports.send("available")
    commands = _commands()
    settings = {
        "spark.driver.defaultJavaOptions": _JAVA_OPTIONS + job.scratch,
        "spark.local.dir": job.scratch,
        "spark.sql.warehouse.dir": job.scratch,
    }
    spark = local_session("penstock demo", memory="1g", conf=settings)
    reports.send("ready")
    _expect(commands, "stream")
    query = _start(spark, job)
    batches = _Batches(query, reports)
    batches.await_first()
    pipeline = Pipeline(spark, job.table_uri)
    with pipeline.start(_ROUND_SECONDS, retain_seconds=_RETAIN_SECONDS) as running:
        while not _expect(commands, "finish", _POLL_SECONDS):
            batches.report()
        query.processAllAvailable()
        batches.report()
        query.stop()
    reports.send("stopped", rounds=running.rounds)
    _expect(commands, "maintain")
    _flush(job.table_uri)
    done = pipeline.run(retain_seconds=0)
    reports.send("maintained", jobs=[asdict(one) for one in done.jobs])


def _start(spark: Any, job: Job) -> Any:
    changes = (
        spark.readStream.schema(SOURCE_COLUMNS).option("maxFilesPerTrigger", 1).parquet(job.source)
    )
    return (
        changes.writeStream.format("penstock")
        .option("checkpointLocation", job.checkpoint)
        .trigger(processingTime=_TRIGGER)
        .start(job.table_uri)
    )


class _Batches:
    """Reports each micro-batch once."""

    def __init__(self, query: Any, reports: Reports) -> None:
        self._query = query
        self._reports = reports
        self._last = -1

    def await_first(self) -> None:
        """The first one has everything to load; nothing should be in its way."""
        while self._last < 0:
            self.report()
            self._query.awaitTermination(_POLL_SECONDS)

    def report(self) -> None:
        failure = self._query.exception()
        if failure is not None:
            raise PenstockError(f"the stream failed: {failure}")
        for progress in self._query.recentProgress:
            if progress.batchId > self._last and progress.numInputRows:
                self._last = progress.batchId
                self._reports.send(
                    "batch",
                    id=progress.batchId,
                    rows=progress.numInputRows,
                    ms=progress.durationMs["triggerExecution"],
                )


def _flush(uri: str) -> None:
    """What the stream's writer left in the log becomes generations."""
    from penstock.spark.options import SourceOptions

    table = SourceOptions(uri).open()
    table.flush(recover=True)
    table.close()


# --- the parent ----------------------------------------------------------------------------


def _commands() -> queue.Queue[str]:
    found: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            found.put(line.strip())
        os._exit(0)  # the parent is gone, and Java goes with this process

    threading.Thread(target=read, name="penstock-demo-commands", daemon=True).start()
    return found


def _expect(commands: queue.Queue[str], command: str, timeout_seconds: float | None = None) -> bool:
    """Wait for a command; False if the time was up before it came."""
    try:
        given = commands.get(timeout=timeout_seconds)
    except queue.Empty:
        return False
    if given != command:
        raise PenstockError(f"the demo's driver expects {command!r}, not {given!r}")
    return True


class Reports:
    """Lines to the parent. What Java or a library prints goes to the log instead."""

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, event: str, **values: Any) -> None:
        self._stream.write(json.dumps({"event": event, **values}) + "\n")
        self._stream.flush()


if __name__ == "__main__":
    to_parent = Reports()
    try:
        main(Job(**json.loads(sys.argv[1])), to_parent)
    except Exception as error:
        to_parent.send("failed", error=f"{type(error).__name__}: {error}")
        raise
