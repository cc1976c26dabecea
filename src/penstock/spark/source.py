"""The data source `penstock`: what Spark asks for a table's schema, readers and writers.

Spark makes one in a process of its own for every step, and sends it on; so it holds nothing but
the parsed options. What it hands out is imported when it is asked for.

Readers take no filters from Spark. It would plan a frame's partitions once, with the filter of
whatever query came last, and give them to all queries of the frame, which would then miss rows.
A filter for the table is an option of the source, and belongs to the frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from penstock.spark.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class PenstockSource(DataSource):
    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self.parsed = SourceOptions.of(options)

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        if self.parsed.read_changes:
            from penstock.spark.stream_read import changes_schema

            return changes_schema(self.parsed)
        from penstock.spark.reader import schema_of

        return schema_of(self.parsed)

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.reader import batch_reader

        return batch_reader(self.parsed, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if self.parsed.mode == "bulk" or overwrite:
            from penstock.spark.bulk import bulk_writer

            return bulk_writer(self.parsed, schema, overwrite)
        if self.parsed.create_table:
            from penstock.spark.create import create_if_asked

            create_if_asked(self.parsed, schema)
        from penstock.spark.write import batch_writer

        return batch_writer(self.parsed, schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from penstock.spark.stream_read import stream_reader

        return stream_reader(self.parsed, schema)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        from penstock.spark.write import stream_writer

        return stream_writer(self.parsed, schema, overwrite)
