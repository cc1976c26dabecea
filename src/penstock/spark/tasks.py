"""Running pieces of work as Spark tasks: values go out, values come back, rows stay away.

    items --pickle--> one task each --function(item)--> pickle --> results, in the items' order

A piece reads and writes the table by itself, so nothing passes through Java but the description of
the work and of what became of it. Functions are those of an installed module (or of the program's
own `__main__`); executors need the package.

Failures
- A task that fails is tried again as often as Spark allows (`spark.task.maxFailures`; never on
  `local[n]`, which can be asked for it: `local[n,3]`). A piece may be run any number of times:
  files of an attempt that did not finish are named by nothing, and clean-up finds them.
- The last attempt gives its error back as a value, and the driver raises the very same error.
  Errors that another attempt cannot cure (`_FINAL`) are given back at once.
- What kills a worker leaves no error; then the driver says what Spark says, in one line.

A worker opens each table once and keeps it. Spark has a worker collect garbage after every task,
which takes longer than a small piece if libraries are loaded; they are put out of its sight once.
"""

from __future__ import annotations

import pickle
import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from penstock.errors import (
    Corruption,
    InvalidInput,
    NotATable,
    PenstockError,
    StoreUnsupported,
    TableNotFound,
    VersionNotFound,
)
from penstock.spark.workers import calm

T = TypeVar("T")
R = TypeVar("R")

_FINAL = (Corruption, InvalidInput, NotATable, StoreUnsupported, TableNotFound, VersionNotFound)
_POLL_SECONDS = 0.2
_CLUSTER_FAILURES = "4"
"""What `spark.task.maxFailures` is unless set."""
_GROUP, _DESCRIPTION, _INTERRUPT = (
    "spark.jobGroup.id",
    "spark.job.description",
    "spark.job.interruptOnCancel",
)


class Cancelled(PenstockError):
    """The Spark job was cancelled; nothing of it was committed."""


def run(
    spark: SparkSession,
    function: Callable[[T], R],
    items: Sequence[T],
    description: str,
    *,
    group: str = "penstock",
    console: Console | None = None,
) -> list[R]:
    """Apply a function to each item in a Spark task of its own; results in the items' order.

    `description` is what Spark's web page and the progress bar say, `group` what the job can be
    cancelled by. The bar is shown if `console` (the standard error) is a terminal.
    """
    if not items:
        return []
    context = context_of(spark)
    attempt = partial(_attempt, function, _attempts(context))
    pickled = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
    with _described(context, group, description):
        try:
            with _shown(context, group, description, len(items), console):
                found = context.parallelize(pickled, len(pickled)).map(attempt).collect()
        except Py4JJavaError as error:
            raise _of_spark(error, description) from None
    results = []
    for answer in found:
        failure, value = pickle.loads(answer)
        if failure is not None:
            raise failure
        results.append(value)
    return results


def context_of(spark: SparkSession) -> SparkContext:
    """The session's context; what has none (Spark Connect) cannot run pieces."""
    try:
        return spark.sparkContext
    except Exception as error:
        raise InvalidInput(
            "pieces of work need a Spark session with a SparkContext, which Spark Connect does "
            "not have; use local_session(), or a session of a driver of your own"
        ) from error


def slots(spark: SparkSession) -> int:
    """How many tasks run at a time, about."""
    return max(1, context_of(spark).defaultParallelism)


def cancel(spark: SparkSession, group: str) -> None:
    """End the jobs of a group; who waits for them gets `Cancelled`."""
    context_of(spark).cancelJobGroup(group)


# --- in the worker -------------------------------------------------------------------------


def _attempt(function: Callable[[Any], Any], attempts: int, item: bytes) -> bytes:
    context = TaskContext.get()
    number = context.attemptNumber() if context is not None else 0
    try:
        value = function(pickle.loads(item))
        calm()
        return pickle.dumps((None, value), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        if number + 1 < attempts and not isinstance(error, _FINAL):
            raise
        return pickle.dumps((_sendable(error), None), pickle.HIGHEST_PROTOCOL)


def _sendable(error: Exception) -> Exception:
    """An error as it can be sent to the driver, with a note on where it happened."""
    cause = error.__cause__
    told = "".join(traceback.format_exception(error)).strip()
    try:
        error.__cause__ = error.__context__ = None
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = PenstockError(f"{type(error).__name__}: {error}")
    if not isinstance(error, PenstockError):
        because = "" if cause is None else f", because of {type(cause).__name__}: {cause}"
        error.add_note(f"in a Spark task on {socket.gethostname()}{because}")
    error.add_note(f"There:\n{told}")
    return error


# --- on the driver -------------------------------------------------------------------------


def _attempts(context: SparkContext) -> int:
    local = re.fullmatch(r"local(?:\[[^,\]]+(?:,\s*(\d+))?\s*\])?", str(context.master))
    if local:
        return int(local[1] or 1)
    return int(context.getConf().get("spark.task.maxFailures", _CLUSTER_FAILURES) or 1)


def _of_spark(error: Py4JJavaError, description: str) -> PenstockError:
    said = str(error.java_exception.getMessage() or error.java_exception)
    if "cancelled" in said.lower():
        return Cancelled(f"{description}: was cancelled; nothing of it was committed")
    if "ModuleNotFoundError" in said and "penstock" in said:
        return PenstockError(
            f"{description}: executors cannot import penstock; install the package there, the "
            "same version as here"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # Python's own last word, if there is one, else what Spark begins with.
    python = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b.*:", line)]
    first = (python or lines or ["no reason given"])[0]
    return PenstockError(
        f"{description}: Spark gave up on a task ({first}); nothing of it was committed. The "
        "executors' logs say more; run it again"
    )


@contextmanager
def _described(context: SparkContext, group: str, description: str) -> Iterator[None]:
    """Name this thread's jobs, and afterwards let them be named as they were."""
    names = (_GROUP, _DESCRIPTION, _INTERRUPT)
    before = [context.getLocalProperty(name) for name in names]
    context.setJobGroup(group, description)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            # Java takes None for one that is not set; the stubs know only text.
            context.setLocalProperty(name, value)  # type: ignore[arg-type]


@contextmanager
def _shown(
    context: SparkContext, group: str, description: str, total: int, console: Console | None
) -> Iterator[None]:
    """A bar that follows the tasks of a job, while there is a terminal to show it on."""
    chosen = console or Console(stderr=True)
    if not chosen.is_terminal:
        yield
        return
    done = threading.Event()
    earlier = set(context.statusTracker().getJobIdsForGroup(group))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=chosen,
        transient=True,
    ) as bar:
        task = bar.add_task(description, total=total)
        watcher = threading.Thread(
            target=_watch,
            args=(context, group, earlier, bar, task, done),
            name="penstock-bar",
            daemon=True,
        )
        watcher.start()
        try:
            yield
            bar.update(task, completed=total)
        finally:
            done.set()
            watcher.join(_POLL_SECONDS * 10)


def _watch(
    context: SparkContext,
    group: str,
    earlier: set[int],
    bar: Progress,
    task: TaskID,
    done: threading.Event,
) -> None:
    tracker = context.statusTracker()
    try:
        while not done.wait(_POLL_SECONDS):
            completed = 0
            for job in set(tracker.getJobIdsForGroup(group)) - earlier:
                info = tracker.getJobInfo(job)
                for stage in info.stageIds if info is not None else ():
                    found = tracker.getStageInfo(stage)
                    completed += found.numCompletedTasks if found is not None else 0
            bar.update(task, completed=completed)
    except Py4JError:
        return  # the session ended; whoever waits for the job is told
