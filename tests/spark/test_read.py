"""Tables read by Spark: what the table's own scan gives, however it is cut and asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest
from tests.s3_server import S3Server

import penstock
from penstock.errors import InvalidInput, NotATable, TableNotFound
from penstock.spark import read, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("body", pa.large_string()),
    ]
)
TENANTS = ("a", "it's", "ü")


def rows(ids: Iterable[int], body: str | None) -> list[dict[str, Any]]:
    return [
        {"id": i, "tenant": TENANTS[i % 3], "vector": [i, 0.5], "body": body and f"{body} {i}"}
        for i in ids
    ]


def lively(uri: str, storage: dict[str, str] | None = None) -> penstock.Table:
    """Rows in the base, in generations half of which are merged, in the log; some deleted."""
    made = penstock.connect(uri, storage).create_table(
        "docs",
        SCHEMA,
        primary_key=["tenant", "id"],
        regions=penstock.identity("tenant"),
    )
    made.upsert(rows(range(60), "base"))
    made.flush()
    made.merge()
    made.upsert(rows(range(0, 60, 4), "merged"))
    made.delete(keys=[(TENANTS[i % 3], i) for i in (5, 8)])
    made.flush()
    made.merge(max_rows=5)
    made.snapshot()
    made.upsert(rows(range(0, 60, 5), None))
    made.flush()
    made.upsert(rows(range(58, 70), "log"))
    made.delete(keys=[(TENANTS[i % 3], i) for i in (2, 60)])
    return made


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> penstock.Table:
    return lively(str(tmp_path_factory.mktemp("lake")))


def told(frame: DataFrame) -> list[str]:
    return sorted(repr(row.asDict(recursive=True)) for row in frame.collect())


def scanned(table: penstock.Table, **how: Any) -> list[str]:
    return sorted(repr(row) for row in table.scan(**how).read_all().to_pylist())


@pytest.mark.parametrize("tasks", [1, 2, 8])
def test_a_spark_read_is_the_scan(spark: SparkSession, table: penstock.Table, tasks: int) -> None:
    for how in ({}, {"consistency": "eventual"}, {"version": table.version - 1}):
        frame = read(spark, table.uri, partitions=tasks, **how)
        assert frame.rdd.getNumPartitions() == tasks
        assert told(frame) == scanned(table, **how)


def test_filters_and_columns_go_down_to_the_table(
    spark: SparkSession, table: penstock.Table
) -> None:
    asked = "tenant = 'it''s' AND id >= 10 AND body LIKE 'base%'"
    assert told(read(spark, table.uri, filter=asked)) == scanned(table, filter=asked)
    both = read(spark, table.uri, filter="body IS NULL").where("id % 2 = 0")
    assert told(both) == scanned(table, filter="body IS NULL AND id % 2 = 0")

    pruned = spark.read.format("penstock").schema("body string, id int").load(table.uri)
    assert pruned.columns == ["body", "id"]
    assert told(pruned.where("id < 9")) == scanned(table, columns=["body", "id"], filter="id < 9")
    named = read(spark, table.uri, ["id"], filter="tenant = 'ü' AND body IS NULL")
    assert told(named) == scanned(table, columns=["id"], filter="tenant = 'ü' AND body IS NULL")


@pytest.mark.parametrize("offered", ["true", "false"])
def test_queries_of_one_frame_do_not_share_their_filters(
    spark: SparkSession, table: penstock.Table, offered: str
) -> None:
    """Spark 4.3 gives a frame the partitions of the query whose filter was taken last."""
    session = spark.newSession()
    session.conf.set("spark.sql.python.filterPushdown.enabled", offered)
    register(session)
    frame = session.read.format("penstock").load(table.uri)
    few = scanned(table, filter="id < 9")
    assert 0 < len(few) < table.count()
    assert told(frame.where("id < 9")) == few
    assert frame.count() == table.count()
    assert frame.where("id < 9").union(frame).count() == len(few) + table.count()


def test_limits_come_before_filters(spark: SparkSession, table: penstock.Table) -> None:
    frame = read(spark, table.uri, ["id"], limit=7)
    assert frame.count() == 7
    assert frame.where("id < 0").count() == 0
    assert read(spark, table.uri, limit=0).count() == 0


def test_vectors_as_bytes(spark: SparkSession, table: penstock.Table) -> None:
    frame = read(spark, table.uri, ["id", "vector"], vector_format="binary", filter="id = 7")
    (row,) = frame.collect()
    assert bytes(row["vector"]) == pa.array([7, 0.5], pa.float32()).buffers()[1].to_pybytes()


def test_tables_of_other_kinds(spark: SparkSession, tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    keyless = db.create_table("keyless", pa.schema({"n": pa.uint8()}))
    assert read(spark, keyless.uri).count() == 0
    keyless.upsert([{"n": 1}, {"n": 1}])
    keyless.flush()
    keyless.upsert([{"n": 255}])
    assert sorted(read(spark, keyless.uri, partitions=2).toArrow()["n"].to_pylist()) == [1, 1, 255]

    evolved = db.create_table("evolved", pa.schema({"id": pa.int32(), "old": pa.string()}))
    evolved.upsert([{"id": 1, "old": "x"}])
    evolved.flush()
    evolved.add_columns({"added": pa.float64()})
    evolved.rename_column("old", "new")
    evolved.upsert([{"id": 2, "new": "y", "added": 0.5}])
    assert told(read(spark, evolved.uri)) == scanned(evolved)

    plain = str(tmp_path / "plain.lance")
    lance.write_dataset(pa.table({"id": [1, 2, 3]}), plain)
    assert told(read(spark, plain, filter="id > 1")) == ["{'id': 2}", "{'id': 3}"]


def test_a_table_on_s3(spark: SparkSession, s3: S3Server) -> None:
    table = lively(s3.uri("spark"), s3.storage_options)
    frame = read(spark, table.uri, partitions=2, storage_options=s3.storage_options)
    assert told(frame) == scanned(table)


def test_it_is_found_by_name(spark: SparkSession, table: penstock.Table) -> None:
    """As in a session that nobody made ready: found through `pyspark_penstock`."""
    other = spark.newSession()
    frame = other.read.format("penstock").load(table.uri.removesuffix(".lance"))
    assert told(frame.where("id = 7")) == scanned(table, filter="id = 7")
    other.sql(f"CREATE TEMPORARY VIEW docs USING penstock OPTIONS (path '{table.uri}')")
    assert other.sql("SELECT count(*) FROM docs").collect()[0][0] == table.count()


def test_what_is_wrong_is_said_on_the_driver(
    spark: SparkSession, table: penstock.Table, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(TableNotFound, match="there is no table at"):
        read(spark, tmp_path / "absent")
    with pytest.raises(NotATable, match="is a database, not a table; name one of its tables"):
        read(spark, str(Path(table.uri).parent))
    with pytest.raises(InvalidInput, match="must be a whole number from 1"):
        read(spark, table.uri, partitions=-1)
    source = spark.read.format("penstock")
    for options, words in (
        ({"path": str(tmp_path / "absent")}, "there is no table at"),
        ({"path": table.uri, "verison": "1"}, "unknown option 'verison'; did you mean 'version'"),
        ({"path": table.uri, "columns": "id,nope"}, "no column 'nope'; the table has"),
        ({"path": table.uri, "version": "99"}, "has no version 99"),
        ({}, "no table is named"),
    ):
        with pytest.raises(PySparkException, match=words):
            source.options(**options).load().collect()
        source = spark.read.format("penstock")
    with pytest.raises(PySparkException, match="no column 'nope'"):
        source.schema("nope int").load(table.uri).collect()
    with pytest.raises(PySparkException, match="column 'body' is int32, but the data is"):
        spark.read.format("penstock").schema("body int").load(table.uri).collect()
