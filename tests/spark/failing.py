"""Tasks that fail at random; alone, because every process that runs them imports this."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

FAILING = 0.1


def sometimes_failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, but one first attempt in ten ends in an error."""
    context = TaskContext.get()
    fails = context is not None and context.attemptNumber() == 0 and random.random() < FAILING
    for batch in batches:
        yield batch
        if fails:
            raise RuntimeError("a task that fails by chance")
