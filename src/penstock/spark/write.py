"""Rows from Spark into the regions of a table: upserts, deletes, and streams that count once.

Tasks bring their rows into the table's types and hand them on (`memwal.sink`): few of them with
the task's result, many as generations that nobody names yet. The driver commits what the tasks
that succeeded have left, for each region at once. Nothing counts before that, so tasks may fail
and run again, and what they leave behind is for clean-up to find; `abort` removes nothing, because
Spark calls it even after a commit that may have succeeded.

A column `_op` says what is to become of a row: 'upsert' or 'delete', for which only the key counts.

A stream numbers its batches. The commit of a batch is a transaction with that number under the
name of the stream (its `sinkId`, or the id that Spark keeps in the checkpoint): a batch that Spark
repeats changes nothing where it was written before. So does a job with `txnApp` and `txnNumber`.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.errors import InvalidInput
from penstock.memwal.base_table import BaseTable
from penstock.memwal.config import WriterConfig
from penstock.memwal.freshness import Mask
from penstock.memwal.shape import TableShape
from penstock.memwal.sink import Task, TaskRows, await_merges, changes, commit_tasks
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.transactions import Transaction
from penstock.spark.convert import check_from_spark, from_spark
from penstock.spark.options import SourceOptions
from penstock.spark.workers import KEPT_TABLES, TablePlace, calm

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OPERATION = "_op"
_QUERY = "sql.streaming.queryId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """What one task has left."""

    partition: int
    stream: str | None
    rows: TaskRows


def batch_writer(options: SourceOptions, schema: StructType, overwrite: bool) -> BatchWriter:
    assert not overwrite  # which replaces the table, and is no business of its regions
    _check(options, schema)
    if (options.txn_app is None) != (options.txn_number is None):
        raise InvalidInput("txnApp and txnNumber are one name together; give both or neither")
    return BatchWriter(options)


def stream_writer(options: SourceOptions, schema: StructType, overwrite: bool) -> StreamWriter:
    if overwrite:
        raise InvalidInput(
            "output mode 'complete' would replace the table with every batch; use 'append' or "
            "'update', whose rows are upserts"
        )
    if options.mode != "upsert":
        raise InvalidInput(f"a stream writes with mode 'upsert', not {options.mode!r}")
    _check(options, schema)
    return StreamWriter(options)


def _check(options: SourceOptions, schema: StructType) -> None:
    """Refuse on the driver what no task could store."""
    shape = _table(options).snapshot().shape
    names = schema.fieldNames()
    if OPERATION not in names:
        check_from_spark(schema, shape.schema)
        return
    if not shape.key_columns:
        raise InvalidInput(
            f"column {OPERATION!r} says which rows to delete, but the table has no primary key"
        )
    missing = [name for name in shape.key_columns if name not in names]
    if missing:
        raise InvalidInput(f"the rows lack the key column {missing[0]!r}")
    given = type(schema)([field for field in schema if field.name != OPERATION])
    # Deletes need no more than the key; whether a row has what an upsert needs, its task sees.
    check_from_spark(given, pa.schema([_loosely(field) for field in shape.schema]))


def _loosely(field: pa.Field) -> pa.Field:
    return field.with_nullable(True)


# --- in a task -----------------------------------------------------------------------------


def _write(options: SourceOptions, batches: Iterator[pa.RecordBatch]) -> Sent:
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    stream = context.getLocalProperty(_QUERY) if context is not None else None
    task = Task(_table(options))
    for batch in batches:
        task.add(_rows(batch, task.shape))
    return Sent(partition, stream, task.finish())


def _rows(batch: pa.RecordBatch, shape: TableShape) -> pa.RecordBatch:
    if OPERATION not in batch.schema.names:
        return changes(from_spark(batch, shape.schema), None, shape)
    deleted = _deletes(batch.column(OPERATION))
    values = batch.drop_columns([OPERATION])
    if not deleted.any():
        return changes(from_spark(values, shape.schema), None, shape)
    loose = pa.schema([_loosely(field) for field in shape.schema])
    return changes(from_spark(values, loose), deleted, shape)


def _deletes(column: pa.Array) -> Mask:
    if not pa.types.is_string(column.type):
        raise InvalidInput(f"column {OPERATION!r} must be a string, not {column.type}")
    known = pc.is_in(column, value_set=pa.array(["upsert", "delete"]))
    if not pc.all(known, min_count=0).as_py():
        wrong = column.filter(pc.invert(known))[0].as_py()
        raise InvalidInput(
            f"column {OPERATION!r} must be 'upsert' or 'delete' in every row, not {wrong!r}"
        )
    return np.asarray(pc.equal(column, "delete"))


# --- on the driver -------------------------------------------------------------------------


def _in_order(messages: Sequence[WriterCommitMessage | None]) -> list[Sent]:
    sent = [message for message in messages if isinstance(message, Sent)]
    return sorted(sent, key=lambda one: one.partition)


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return _write(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        options = self._options
        transaction = None
        if options.txn_app is not None and options.txn_number is not None:
            transaction = Transaction.named(options.txn_app, options.txn_number)
        table = _table(options)
        with _writer(table) as writer:  # and what went through the log is flushed at the end
            results = [one.rows for one in _in_order(messages)]
            commit_tasks(table, writer, results, transaction)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what the tasks left counts for nobody, unless a commit has landed."""


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return _write(self._options, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        sent = _in_order(messages)
        streams = {one.stream for one in sent if one.stream}
        name = self._options.sink_id or next(iter(streams), None)
        if name is None:
            if not sent:
                return
            raise InvalidInput(
                "Spark does not say which stream this is; name it with the option sinkId, and "
                "never let two streams have the same name"
            )
        table, writer = _kept_writer(self._options)
        await_merges(table, writer)
        transaction = Transaction.named(name, batchId)
        commit_tasks(table, writer, [one.rows for one in sent], transaction)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing, for the same reason as for a batch."""


def _writer(table: BaseTable) -> TableWriter:
    defaults = table.snapshot().details.writer_config_defaults
    # Nobody searches the rows in this process.
    wanted = {"durable": True, "indexed": False}
    config = WriterConfig().with_defaults(defaults).with_options(wanted)
    return TableWriter(table, config, reclaim=True)


# --- kept by a process ---------------------------------------------------------------------

_writers: dict[TablePlace, tuple[BaseTable, TableWriter]] = {}


def _place(options: SourceOptions) -> TablePlace:
    return TablePlace.of(options.uri, options.storage_options)


def _table(options: SourceOptions) -> BaseTable:
    calm()
    return _place(options).base_table(lambda: options.open()._base)


def _kept_writer(options: SourceOptions) -> tuple[BaseTable, TableWriter]:
    """The writer of a stream, which the process that commits keeps from batch to batch."""
    table, place = _table(options), _place(options)
    of, writer = _writers.pop(place, (None, None))
    if writer is not None and of is not table:
        writer.abandon()
        writer = None
    elif writer is not None and (writer.closed or writer.outdated):
        writer.close(flush=False)
        writer = None
    _writers[place] = (table, writer or _writer(table))
    while len(_writers) > KEPT_TABLES:
        _writers.pop(next(iter(_writers)))[1].close(flush=False)
    return _writers[place]


@atexit.register
def _let_go() -> None:
    """Rows are in the log; there is nothing to do for them, and no thread to do it any more."""
    while _writers:
        _writers.popitem()[1][1].abandon()
