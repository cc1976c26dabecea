"""A driver of two streams, to be killed at any moment: one upserts and deletes, one only appends.

Run as a process of its own: `streamer.py DIR`, with the changes in `DIR/changes` as parquet files.
Tasks fail at random, at their first attempt. Ends when all changes are in both tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from tests.spark.conftest import quick_conf
from tests.spark.failing import sometimes_failing

from penstock.spark import local_session

CHANGES = "id long, value string, _op string"
FILES_PER_BATCH = 2


def changes(spark: SparkSession, directory: Path) -> DataFrame:
    source = spark.readStream.schema(CHANGES).option("maxFilesPerTrigger", FILES_PER_BATCH)
    return source.parquet(str(directory / "changes")).mapInArrow(sometimes_failing, CHANGES)


def main(directory: Path) -> None:
    spark = local_session("streamer", master="local[2,8]", memory="512m", conf=quick_conf())
    frame = changes(spark, directory)
    queries = []
    for name, rows in (("keyed", frame), ("log", frame.drop("_op"))):
        writer = rows.writeStream.format("penstock").queryName(name)
        writer = writer.option("checkpointLocation", str(directory / "checkpoints" / name))
        table = str(directory / "lake" / f"{name}.lance")
        queries.append(writer.trigger(availableNow=True).start(table))
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
