"""Streaming reads: the changes of a table as they come, from a position on.

An offset of Spark's is a position (`memwal.feed_position`) as JSON. On the driver the reader plans
the next one, at most `maxRowsPerTrigger` rows further on, and cuts what is between two into parts;
tasks read the parts. A batch follows from its two offsets alone, so Spark may repeat it.

Spark does not tell a source whether its schema is for a stream. A stream has the columns of changes
(`_change` and the others) if an option says so: `readChanges`, or one that only streams have. Else
it has the columns of the table alone, which is enough where rows are only added or replaced, and
ends with an error at the first delete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidInput
from penstock.memwal.feed import CHANGE, METADATA, Feed, Part, change_schema, read_part
from penstock.memwal.feed_position import Position
from penstock.spark.convert import arrow_schema_for_spark, spark_schema, to_spark
from penstock.spark.options import SourceOptions

_BATCH_ROWS = 65_536


def read_changes(
    spark: SparkSession,
    uri: str,
    columns: Sequence[str] | None = None,
    *,
    since: str | int = "earliest",
    max_rows: int | None = None,
    vector_format: str = "array",
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """The changes of a table as a streaming frame, at most `max_rows` of them in a micro-batch.

    `since` is "earliest" (the whole table first), "latest" or a version; a stream with a
    checkpoint goes on from there.
    """
    options = {
        "path": os.fspath(uri),
        "columns": None if columns is None else json.dumps(list(columns)),
        "startingPosition": since,
        "maxRowsPerTrigger": max_rows,
        "vectorFormat": vector_format,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    given |= {f"storage.{name}": value for name, value in (storage_options or {}).items()}
    # Here already, so that what is wrong is said without Spark's wrapping.
    given["path"] = SourceOptions.of(given).locate()
    return spark.readStream.format("penstock").options(**given).load()


def changes_schema(options: SourceOptions) -> StructType:
    """The columns of changes: those of the table, or those that the options name, and ours."""
    schema = change_schema(options.base_table().snapshot().shape)
    if options.columns is not None:
        chosen = [name for name in options.columns if name not in METADATA.names]
        schema = pa.schema([*(_field(schema, name) for name in chosen), *METADATA])
    return spark_schema(schema, vector_format=options.vector_format)


def stream_reader(options: SourceOptions, schema: StructType) -> ChangeReader:
    return ChangeReader(options, schema)


class PartOfChanges(InputPartition):
    def __init__(self, part: Part) -> None:
        super().__init__(part)


class ChangeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._feed: Feed | None = None
        self._upto: Position | None = None
        for name in ("version", "limit", "filter"):
            if getattr(options, name) is not None:
                raise InvalidInput(
                    f"option {name} is for reading a table once; a stream of changes has "
                    "startingPosition and maxRowsPerTrigger, and is filtered by Spark"
                )

    # --- on the driver ---------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._planner().start(self._options.starting_position).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.max_rows_per_trigger
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._upto = self._planner().latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        feed = self._planner()
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return feed.plan(feed.start(start), self._upto, rows).to_json()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        return self._planner().latest().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._check_columns()
        feed = self._planner()
        return [PartOfChanges(part) for part in feed.parts(feed.start(start), feed.start(end))]

    def _planner(self) -> Feed:
        # Not made before it is asked for: the reader is sent to the tasks as well.
        if self._feed is None:
            self._feed = Feed(self._options.base_table())
        return self._feed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_feed": None, "_upto": None}

    def _check_columns(self) -> None:
        """Columns may have changed while the stream runs, and its schema cannot."""
        there = change_schema(self._planner().table.snapshot().shape)
        wanted = pa.schema([_field(there, name) for name in self._schema.fieldNames()])
        empty = pa.RecordBatch.from_pylist([], wanted)
        to_spark(empty, arrow_schema_for_spark(self._schema))

    # --- in tasks --------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part = partition.value
        if part is None:  # what Spark makes of no partitions at all
            return
        table = self._options.base_table()
        names = self._schema.fieldNames()
        needed = list(dict.fromkeys([*names, CHANGE]))
        arrow = arrow_schema_for_spark(self._schema)
        for batch in read_part(table, part, table.snapshot().shape, needed):
            if CHANGE not in names:
                _refuse_deletes(batch)
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield to_spark(batch.slice(first, _BATCH_ROWS), arrow)


def _refuse_deletes(changes: pa.RecordBatch) -> None:
    if pc.any(pc.equal(changes.column(CHANGE), "delete")).as_py():
        raise InvalidInput(
            "rows were deleted, and the stream has no column to tell that; give it the columns of "
            'changes with .option("readChanges", "true"), and a new checkpoint'
        )


def _field(schema: pa.Schema, name: str) -> pa.Field:
    if name not in schema.names:
        raise InvalidInput(
            f"no column {name!r}; changes have {', '.join(schema.names)}. If the table's columns "
            "changed while the stream was running, start it again"
        )
    return schema.field(name)
