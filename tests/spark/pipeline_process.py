"""A pipeline in a process of its own, on another kind of Spark, or to be killed in the middle.

    python -m tests.spark.pipeline_process MASTER URI STORAGE_OPTIONS WHERE

Every second task that folds regions fails after its work is done, the first time it is tried. At
WHERE, a name in `jobs`, the process kills itself; `-` lets it finish and print what it did.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

from pyspark import TaskContext
from tests.spark.conftest import QUICK_START, quick_conf

from penstock.memwal import index_parts
from penstock.memwal.base_table import BaseTable
from penstock.memwal.merge import FoldedPiece, MergePlan, fold_piece
from penstock.spark import jobs, local_session, tasks
from penstock.spark.pipeline import Pipeline


def fold_at_the_second_try(table: BaseTable, plan: MergePlan) -> FoldedPiece | None:
    folded = fold_piece(table, plan)
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() % 2 == 0:
        raise OSError("the disk was gone for a moment")
    return folded


def process_of(_: Any) -> int:
    return os.getppid()


def die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main(master: str, uri: str, storage_options: str, where: str) -> None:
    conf = quick_conf() | {"spark.executor.extraJavaOptions": QUICK_START}
    spark = local_session("tests", master=master, memory="1g", conf=conf)
    jobs.DRIVER_ROWS = jobs.TASK_ROWS = 1
    jobs.DRIVER_REGIONS = 2
    jobs.DRIVER_FILES = 0
    index_parts.PART_ROWS = 200
    jobs.fold_piece = fold_at_the_second_try
    if where != "-":
        assert hasattr(jobs, where)
        setattr(jobs, where, die)
    pipeline = Pipeline(spark, uri, json.loads(storage_options))
    report = pipeline.run(["merge", "index", "compact", "snapshot", "gc"], retain_seconds=0)
    pipeline.create_index("vec", "ivf_flat", num_partitions=2)
    executors = len(set(tasks.run(spark, process_of, range(8), "who runs tasks")))
    print(json.dumps({job.name: job.tasks for job in report.jobs} | {"executors": executors}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
