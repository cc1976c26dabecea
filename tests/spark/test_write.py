"""Rows from Spark into regions: upserts, deletes, streams, and what is refused."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.s3_server import S3Server

import penstock
from penstock import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 3)),
        pa.field("body", pa.string()),
        pa.field("at", pa.timestamp("ms", "UTC")),
    ]
)
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def make(path: Path | str, name: str = "t", key: str | None = "id", **options: Any) -> Table:
    database = penstock.connect(path, options.pop("storage_options", None))
    regions = penstock.bucket("id", 3)
    return database.create_table(name, SCHEMA, primary_key=key, regions=regions, **options)


def frame(spark: SparkSession, first: int, last: int, word: str = "row") -> DataFrame:
    made = spark.range(first, last, 1, 3)
    return made.selectExpr(
        "id",
        "array(cast(id as float), 1f, 2f) as vector",
        f"concat('{word} ', id) as body",
        "timestamp '2026-01-02 03:04:05' as at",
    )


def row(key: int, word: str = "row") -> dict[str, Any]:
    return {"id": key, "vector": [float(key), 1.0, 2.0], "body": f"{word} {key}", "at": NOW}


def upsert(rows: DataFrame, table: Table, **options: Any) -> None:
    rows.write.format("penstock").mode("append").options(**options).save(table.uri)


def found(table: Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_arrow().sort_by("id").to_pylist()
    return rows


def plain(table: Table) -> list[dict[str, Any]]:
    dataset = lance.dataset(table.uri, storage_options=table._base.storage_options)
    rows: list[dict[str, Any]] = dataset.to_table().sort_by("id").to_pylist()
    return rows


def test_upserts_deletes_and_what_plain_lance_sees(spark: SparkSession, tmp_path: Path) -> None:
    table = make(tmp_path)
    upsert(frame(spark, 0, 300), table)
    upsert(frame(spark, 250, 400, "newer"), table)
    changes = frame(spark, 390, 410, "newest").selectExpr(
        "*", "if(id % 2 = 0, 'delete', 'upsert') as _op"
    )
    upsert(changes, table)
    upsert(spark.sql("select id, 'delete' as _op from range(10)"), table)
    model = {key: row(key) for key in range(300)}
    model |= {key: row(key, "newer") for key in range(250, 400)}
    model |= {key: row(key, "newest") for key in range(390, 410)}
    for key in (*range(390, 410, 2), *range(10)):
        del model[key]
    assert found(table) == [model[key] for key in sorted(model)]
    table.merge()
    assert plain(table) == [model[key] for key in sorted(model)]


def test_many_rows_are_staged_by_the_tasks(spark: SparkSession, tmp_path: Path) -> None:
    table = make(tmp_path)
    table.create_index("body", "fts")
    big = frame(spark, 0, 30_000).selectExpr("id", "vector", "repeat(body, 20) as body", "at")
    upsert(big, table)
    unmerged = [one for one in Path(table.uri).glob("_mem_wal/*/*_gen_*") if one.is_dir()]
    assert len(unmerged) == 3 * 3  # of each task one in each region
    assert not list(Path(table.uri).glob("_mem_wal/*/wal/*.arrow"))
    assert table.count() == 30_000
    assert table.get(29_999) is not None
    upsert(frame(spark, 0, 100, "fresh"), table)
    assert table.search("fresh", "body").limit(1_000).to_arrow().num_rows == 100
    table.maintain()
    assert plain(table)[50] == row(50, "fresh")
    assert lance.dataset(table.uri).count_rows() == 30_000


def test_a_job_with_a_number_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    table = make(tmp_path, key=None)
    for number in (0, 0, 1, 1):
        upsert(frame(spark, 0, 50, f"run {number}"), table, txnApp="nightly", txnNumber=number)
    bodies = Counter(one["body"].rsplit(" ", 1)[0] for one in found(table))
    assert bodies == {"run 0": 50, "run 1": 50}
    with pytest.raises(PySparkException, match="give both or neither"):
        upsert(frame(spark, 0, 1), table, txnApp="nightly")


def test_a_stream_and_its_restart(spark: SparkSession, tmp_path: Path, s3: S3Server) -> None:
    """Into S3; the second run goes on where the first has ended."""
    options = s3.storage_options
    table = make(s3.uri("stream"), storage_options=options)
    storage = {f"storage.{name}": value for name, value in options.items()}
    frame(spark, 0, 100).write.parquet(str(tmp_path / "in"))
    source = spark.readStream.schema(frame(spark, 0, 1).schema).option("maxFilesPerTrigger", 1)
    for first in (100, 200):
        stream = source.parquet(str(tmp_path / "in")).writeStream.format("penstock")
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = stream.options(**storage).trigger(availableNow=True).start(table.uri)
        assert query.awaitTermination(60)
        assert found(table) == [row(key) for key in range(first)]
        frame(spark, first, first + 100).write.mode("append").parquet(str(tmp_path / "in"))
    table.flush(recover=True)
    table.merge()
    assert plain(table) == [row(key) for key in range(200)]


def test_a_table_that_was_made_anew_in_the_same_place(spark: SparkSession, tmp_path: Path) -> None:
    """The processes of Spark live on, and must not know the regions of the old one."""
    table = make(tmp_path)
    upsert(frame(spark, 0, 10), table)
    penstock.connect(tmp_path).drop_table("t")
    table = make(tmp_path)
    upsert(frame(spark, 5, 15), table)
    upsert(frame(spark, 0, 10, "newer"), table)
    expected = {key: row(key) for key in range(5, 15)} | {k: row(k, "newer") for k in range(10)}
    assert found(table) == [expected[key] for key in sorted(expected)]


# --- what is refused -----------------------------------------------------------------------


def files_of(path: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("select 1L as id, 'x' as bodi", "unknown column 'bodi'; did you mean 'body'"),
        ("select 'x' as id", "'id'"),
        ("select 'only a body' as body", "lack the column 'id'"),
        ("select 1L as id, array(1f, 2f) as vector", "column 'vector'"),
        ("select cast(null as long) as id", "'id' is null"),
        ("select 1L as id, 'remove' as _op", "'upsert' or 'delete' in every row, not 'remove'"),
        ("select 'x' as body, 'delete' as _op", "lack the key column 'id'"),
    ],
)
def test_rows_that_do_not_fit(
    spark: SparkSession, tmp_path: Path, expression: str, said: str
) -> None:
    table = make(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(PySparkException, match=said):
        upsert(spark.sql(expression), table)
    assert files_of(tmp_path) == before


def test_modes_places_and_options_that_do_not_work(spark: SparkSession, tmp_path: Path) -> None:
    table = make(tmp_path)
    rows = frame(spark, 0, 10)
    with pytest.raises(AnalysisException, match="ErrorIfExists"):
        rows.write.format("penstock").mode("error").save(table.uri)
    with pytest.raises(PySparkException, match="no table at"):
        rows.write.format("penstock").mode("append").save(str(tmp_path / "nowhere"))
    with pytest.raises(PySparkException, match="unknown option"):
        upsert(rows, table, colour="blue")
    stream = spark.readStream.format("rate").load().selectExpr("value as id")
    with pytest.raises(PySparkException, match="checkpointLocation"):
        stream.writeStream.format("penstock").start(table.uri)
    counted = stream.groupBy("id").count().select("id").writeStream.outputMode("complete")
    complete = counted.format("penstock").option("checkpointLocation", str(tmp_path / "point"))
    with pytest.raises(PySparkException, match="'complete' would replace"):
        complete.start(table.uri).processAllAvailable()
    assert table.count() == 0
