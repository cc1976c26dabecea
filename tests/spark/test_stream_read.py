"""A stream of changes: from where it began, once each, over restarts, as fast as it may."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import penstock
from penstock import InvalidInput, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
WAIT_SECONDS = 120


def rows(*ids: int, value: str = "first") -> list[dict[str, Any]]:
    return [{"id": one, "value": value, "vector": [float(one), 0.5]} for one in ids]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    database = penstock.connect(tmp_path / "lake")
    regions = penstock.bucket("id", 2)
    table = database.create_table("docs", SCHEMA, primary_key="id", regions=regions)
    table.upsert(rows(*range(10)))
    table.flush()
    table.merge()
    return table


class Sink:
    """Applies micro-batches to a copy, in the order that the columns of changes give."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.copy: dict[int, str] = {}
        self.sizes: list[int] = []

    def run(self, changes: DataFrame) -> None:
        """Everything there is now, and then stop."""
        query = (
            changes.writeStream.foreachBatch(self._apply)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_SECONDS)

    def _apply(self, batch: DataFrame, number: int) -> None:
        found = batch.orderBy("_version", "_generation", "_row").toArrow().to_pylist()
        self.sizes.append(len(found))
        for change in found:
            if change["_change"] == "delete":
                self.copy.pop(change["id"], None)
            else:
                assert change["vector"] == [float(change["id"]), 0.5]
                self.copy[change["id"]] = change["value"]


def values(table: Table) -> dict[int, str]:
    return {row["id"]: row["value"] for row in table.to_arrow().to_pylist()}


def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, table: Table, tmp_path: Path
) -> None:
    from penstock.spark import read_changes

    table.upsert(rows(3, value="second"))
    table.delete(keys=[4])
    sink = Sink(tmp_path / "checkpoint")
    sink.run(read_changes(spark, table.uri, max_rows=6))
    assert sink.copy == values(table)
    assert max(sink.sizes) <= 6
    assert sum(sink.sizes) == 12

    table.upsert(rows(5, 20, value="third"))
    table.flush()
    table.merge()
    table.compact(target_rows=1000)
    table.delete(keys=[20])
    before = len(sink.sizes)
    sink.run(read_changes(spark, table.uri))
    assert sink.copy == values(table)
    assert sum(sink.sizes[before:]) == 3


def test_where_a_stream_may_begin(spark: SparkSession, table: Table, tmp_path: Path) -> None:
    from penstock.spark import read_changes

    old = table.version
    table.upsert(rows(1, value="second"))
    late = Sink(tmp_path / "latest")
    late.run(read_changes(spark, table.uri, ["value", "id", "vector"], since="latest"))
    table.upsert(rows(2, value="third"))
    late.run(read_changes(spark, table.uri, ["value", "id", "vector"], since="latest"))
    assert late.copy == {2: "third"}
    since = Sink(tmp_path / "version")
    since.run(read_changes(spark, table.uri, since=old))
    assert since.copy == {1: "second", 2: "third"}


def test_without_the_columns_of_changes_a_delete_ends_the_stream(
    spark: SparkSession, table: Table, tmp_path: Path
) -> None:
    from penstock.spark import read_changes

    plain = spark.readStream.format("penstock").load(table.uri)
    assert plain.columns == SCHEMA.names
    seen: list[int] = []

    def run() -> None:
        query = (
            plain.writeStream.foreachBatch(lambda batch, _: seen.append(batch.count()))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_SECONDS)

    run()
    assert sum(seen) == 10
    table.delete(keys=[1])
    with pytest.raises(Exception, match="readChanges"):
        run()
    with pytest.raises(InvalidInput, match="earliest, latest or a version"):
        read_changes(spark, table.uri, since="yesterday")
