"""Batch reads: the merged view of a table as partitions of a Spark frame.

On the driver Spark asks for the schema and for partitions; there one view is taken, and cut into
parts (`memwal.split_scan`). Spark keeps them for as long as the frame lives, so a frame is the
table as of the first time that it was read. Each task then reads its part, as batches in
exactly the form that Spark's Arrow has. Nothing goes over the driver but the plan and the rows
that are only in the log.

Spark does not tell which columns are needed. It is told by the schema given to the reader
(`.schema("id long")`), by the option `columns`, or by `read(…, columns=…)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.errors import InvalidInput
from penstock.memwal.base_table import BaseTable
from penstock.memwal.split_parts import SplitPart
from penstock.memwal.split_read import BATCH_ROWS, read_part
from penstock.memwal.split_scan import plan_split
from penstock.spark.convert import arrow_schema_for_spark, spark_schema, to_spark
from penstock.spark.options import SourceOptions
from penstock.spark.workers import calm

_LEAST_ROWS = 32_768
"""Unless it is asked for, no task is started for fewer rows."""
_PART_ROWS = 4_000_000
"""About so many rows a task reads at most, unless it is asked to read more."""


def read(
    spark: SparkSession,
    uri: str,
    columns: Sequence[str] | None = None,
    *,
    filter: str | None = None,
    version: int | None = None,
    consistency: str = "strong",
    limit: int | None = None,
    partitions: int | None = None,
    vector_format: str = "array",
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """A table as a frame: its newest rows, or those of a version.

    Only the columns named are read. `filter` is a condition in SQL, as `Table.scan` takes it.
    `partitions` is how many tasks read it; without it, as many as run at a time.
    """
    if isinstance(columns, str):
        raise InvalidInput(f"columns must be a list of names; write [{columns!r}]")
    options = {
        "path": os.fspath(uri),
        "columns": None if columns is None else json.dumps(list(columns)),
        "filter": filter,
        "version": version,
        "consistency": consistency,
        "limit": limit,
        "partitions": partitions,
        "parallelism": _parallelism(spark),
        "vectorFormat": vector_format,
    }
    given = {name: str(value) for name, value in options.items() if value is not None}
    given |= {f"storage.{name}": value for name, value in (storage_options or {}).items()}
    # Here already, so that what is wrong is said without Spark's wrapping.
    given["path"] = SourceOptions.of(given).locate()
    return spark.read.format("penstock").options(**given).load()


def _parallelism(spark: SparkSession) -> int | None:
    context = getattr(spark, "_sc", None)
    return None if context is None else max(1, int(context.defaultParallelism))


def schema_of(options: SourceOptions) -> StructType:
    """The schema of a table, or of the columns that the options name."""
    schema = _table_schema(options.base_table(), options.version)
    if options.columns is not None:
        schema = pa.schema([_field(schema, name) for name in options.columns])
    return spark_schema(schema, vector_format=options.vector_format)


def batch_reader(options: SourceOptions, schema: StructType) -> TableReader:
    return TableReader(options, schema)


class PartOfTable(InputPartition):
    def __init__(self, part: SplitPart) -> None:
        super().__init__(part)


class TableReader(DataSourceReader):
    """Reads parts, with the frame's own filter; what a query filters besides, Spark does."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._uri = options.locate()
        if not schema.fieldNames():
            raise InvalidInput("a schema without columns reads nothing; name at least one")

    def partitions(self) -> Sequence[InputPartition]:
        calm()
        options = self._options
        table = options.base_table()
        stored = _table_schema(table, options.version)
        names = self._schema.fieldNames()
        # What cannot be converted is told now, and not by some task.
        empty = pa.schema([_field(stored, name) for name in names]).empty_table()
        to_spark(pa.RecordBatch.from_pylist([], empty.schema), self._arrow_schema())
        asked = options.partitions
        parts = plan_split(
            table,
            partitions=asked if asked is not None else _tasks(table, options.parallelism),
            columns=names,
            filter=options.filter,
            version=options.version,
            consistency=options.consistency,
            limit=options.limit,
            least_rows=1 if asked is not None else _LEAST_ROWS,
        )
        return [PartOfTable(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        part = partition.value
        if part is None:  # what Spark makes of no partitions at all
            return
        calm()
        schema = self._arrow_schema()
        for batch in read_part(self._options.base_table(), part):
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield to_spark(batch.slice(first, BATCH_ROWS), schema)

    def _arrow_schema(self) -> pa.Schema:
        return arrow_schema_for_spark(self._schema)


def _table_schema(table: BaseTable, version: int | None) -> pa.Schema:
    if version is not None:
        return table.snapshot(version).shape.schema
    return table.dataset().schema


def _field(schema: pa.Schema, name: str) -> pa.Field:
    if name not in schema.names:
        raise InvalidInput(f"no column {name!r}; the table has {', '.join(schema.names)}")
    return schema.field(name)


def _tasks(table: BaseTable, parallelism: int | None) -> int:
    """How many tasks read a table if nobody says: as many as run at a time, more if it is large."""
    at_a_time = parallelism or max(2, os.cpu_count() or 1)
    return int(max(at_a_time, table.dataset().count_rows() // _PART_ROWS))
