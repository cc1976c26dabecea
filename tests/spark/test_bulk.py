"""Bulk loads and overwrites from Spark: frames and files, one version, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.s3_server import S3Server

import penstock
from penstock import InvalidInput, Table

pytest.importorskip("pyspark")

from penstock.memwal.region_spec import RegionBy
from penstock.spark import create_table, load_files
from penstock.spark.create import dimensions_of, regions_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("vec", pa.list_(pa.float32(), 4)),
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    regions = penstock.bucket("id", 2)
    return penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id", regions=regions)


def frame(spark: SparkSession, ids: range, value: str, partitions: int = 3) -> DataFrame:
    numbered = spark.range(ids.start, ids.stop, 1, partitions)
    return numbered.selectExpr(
        "id", f"'{value}' AS value", "transform(array(0, 1, 2, 3), x -> float(id + x)) AS vec"
    )


def save(rows: DataFrame, table: Table | Path, save_mode: str, **options: str) -> None:
    uri = table.uri if isinstance(table, Table) else str(table)
    rows.write.format("penstock").options(**options).mode(save_mode).save(uri)


def found(table: Table) -> dict[int, str]:
    rows = table.to_arrow().to_pylist()
    assert all(one["vec"] == [one["id"] + x for x in range(4)] for one in rows)
    by_id = {one["id"]: one["value"] for one in rows}
    assert len(by_id) == len(rows)
    return by_id


def plain(table: Table) -> dict[int, str]:
    rows = lance.dataset(table.uri).to_table().to_pylist()
    assert len(rows) == len({one["id"] for one in rows})
    return {one["id"]: one["value"] for one in rows}


def refusal(work: Any) -> str:
    """The one line in which Spark says what was wrong."""
    with pytest.raises(Exception, match="InvalidInput") as caught:
        work()
    (line,) = re.findall(r"^penstock\.errors\.InvalidInput: (.*)$", str(caught.value), re.M)[:1]
    return str(line)


def test_a_frame_is_loaded_in_one_version_and_replaces_rows(
    spark: SparkSession, table: Table
) -> None:
    save(frame(spark, range(1000), "first"), table, "append", mode="bulk")
    assert table.version == 3
    assert len(lance.dataset(table.uri).get_fragments()) == 3
    twice = frame(spark, range(990, 1010), "second").union(frame(spark, range(995, 1000), "third"))
    save(twice, table, "append", mode="bulk")
    expected = dict.fromkeys(range(990), "first") | dict.fromkeys(range(990, 1010), "second")
    expected |= dict.fromkeys(range(995, 1000), "third")
    assert found(table) == plain(table) == expected
    assert table.version == 4
    # Rows in front of the base would hide what is loaded; an overwrite takes them, too.
    table.upsert([{"id": 1, "value": "live", "vec": [1, 2, 3, 4]}])
    told = refusal(lambda: save(frame(spark, range(3), "x"), table, "append", mode="bulk"))
    assert "rows in its log" in told
    assert "mode=bulk" in told
    assert table.version == 4
    save(frame(spark, range(5), "new"), table, "overwrite")
    assert found(table) == plain(table) == dict.fromkeys(range(5), "new")


def test_what_is_wrong_is_said_once_and_nothing_is_written(
    spark: SparkSession, table: Table, tmp_path: Path
) -> None:
    rows = frame(spark, range(3), "x")

    def bulk(wrong: DataFrame, mode: str = "append") -> str:
        return refusal(lambda: save(wrong, table, mode, mode="bulk"))

    assert "'colour'" in bulk(rows.withColumnRenamed("value", "colour"))
    assert "'id'" in bulk(rows.drop("id"), "overwrite")
    assert "'_op'" in bulk(rows.selectExpr("*", "'delete' AS _op"))
    assert "'vec'" in bulk(rows.selectExpr("id", "value", "array(float(1)) AS vec"))
    assert "not finite" in bulk(rows.selectExpr("id", "array_repeat(float('NaN'), 4) AS vec"))
    assert "null" in bulk(rows.selectExpr("nullif(id, 2) AS id", "value"))
    assert table.version == 2
    for mode in ("error", "ignore"):
        with pytest.raises(Exception, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            save(rows, table, mode)
    with pytest.raises(Exception, match="there is no table at"):
        save(rows, tmp_path / "none.lance", "overwrite")
    assert not (tmp_path / "none.lance").exists()


def test_the_first_load_creates_the_table(spark: SparkSession, tmp_path: Path) -> None:
    rows = frame(spark, range(10), "x")
    options = {
        "createTable": "true",
        "primaryKey": "id",
        "regions": "bucket(id, 4)",
        "vectorDimensions": "vec=4",
    }
    save(rows, tmp_path / "bulk.lance", "append", mode="bulk", **options)
    save(rows, tmp_path / "over", "overwrite", **options)
    save(rows, tmp_path / "live.lance", "append", **options)
    for name in ("bulk", "over", "live"):
        made = penstock.connect(tmp_path).open_table(name)
        assert found(made) == dict.fromkeys(range(10), "x")
        assert made.schema.equals(SCHEMA, check_metadata=False)
        assert made.primary_key == ("id",)
        details = made._base.snapshot().details
        assert details.num_regions == 4
    save(rows, tmp_path / "bulk.lance", "overwrite", **options)  # there is one by now
    made = create_table(
        rows, str(tmp_path / "made.lance"), primary_key="id", regions="bucket(id,2)"
    )
    assert made.schema.equals(SCHEMA, check_metadata=False)
    listed = create_table(rows, str(tmp_path / "listed"), vector_dimensions={"vec": None})
    assert listed.schema.field("vec").type == pa.list_(pa.float32())
    with pytest.raises(penstock.TableExists):
        create_table(rows, str(tmp_path / "made"))
    for wrong in ({"id": 3}, {"nothing": 3}, {"vec": 0}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            create_table(rows, str(tmp_path / "wrong"), vector_dimensions=wrong)


def written(path: Path, ids: range, value: str, *, groups: int = 2) -> None:
    table = pa.table(
        {
            "vec": [np.arange(4, dtype=np.float32) + n for n in ids],
            "value": [value] * len(ids),
            "id": pa.array(ids, pa.int32()),
        }
    )
    pq.write_table(table, path, row_group_size=max(1, len(ids) // groups))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.spark import bulk

    monkeypatch.setattr(bulk, "_PIECE_ROWS", 10)


def test_files_are_loaded_without_a_row_in_java(
    spark: SparkSession, tmp_path: Path, small_pieces: None
) -> None:
    lake, files = tmp_path / "lake", tmp_path / "files"
    files.mkdir()
    written(files / "a.parquet", range(100), "a")
    written(files / "b.parquet", range(90, 130), "b", groups=5)
    written(files / "c.parquet", range(0), "c")
    later = tmp_path / "later.parquet"
    written(later, range(128, 132), "later")
    uri = str(lake / "t.lance")
    report = load_files(
        spark,
        [str(files), str(later)],
        uri,
        create_table=True,
        primary_key="id",
        regions=penstock.bucket("id", 2),
    )
    assert (report.rows, report.duplicates) == (132, 12)
    table = penstock.connect(lake).open_table("t")
    expected = dict.fromkeys(range(90), "a") | dict.fromkeys(range(90, 128), "b")
    expected |= dict.fromkeys(range(128, 132), "later")
    assert found(table) == plain(table) == expected
    assert table.version == 3
    # What Spark wrote, and as an overwrite.
    frame(spark, range(50), "spark").write.parquet(str(tmp_path / "spark"))
    assert load_files(spark, str(tmp_path / "spark"), uri, overwrite=True).replaced == 132
    assert found(table) == dict.fromkeys(range(50), "spark")
    with pytest.raises(InvalidInput, match="Parquet"):
        load_files(spark, str(tmp_path / "nothing"), uri)
    (tmp_path / "text.parquet").write_text("no")
    with pytest.raises(InvalidInput, match=r"text\.parquet"):
        load_files(spark, str(tmp_path / "text.parquet"), uri)
    pq.write_table(pa.table({"id": [None, 1]}), tmp_path / "null.parquet")
    with pytest.raises(InvalidInput, match="'id' is null in row 0"):
        load_files(spark, str(tmp_path / "null.parquet"), uri)
    assert found(table) == dict.fromkeys(range(50), "spark")


def test_on_s3(spark: SparkSession, s3: S3Server, tmp_path: Path) -> None:
    uri = f"{s3.uri('lake')}/t.lance"
    storage = {f"storage.{key}": value for key, value in s3.storage_options.items()}
    options = {"createTable": "true", "primaryKey": "id", "vectorDimensions": "vec=4", **storage}
    rows = frame(spark, range(20), "x")
    rows.write.format("penstock").options(mode="bulk", **options).mode("append").save(uri)
    written(tmp_path / "a.parquet", range(15, 25), "file")
    path = str(tmp_path / "a.parquet")
    assert load_files(spark, path, uri, storage_options=s3.storage_options).replaced == 5
    database, _, _ = uri.rpartition("/")
    table = penstock.connect(database, s3.storage_options).open_table("t")
    expected = dict.fromkeys(range(15), "x") | dict.fromkeys(range(15, 25), "file")
    assert found(table) == expected


def test_regions_and_vectors_as_text() -> None:
    by = penstock
    cases: dict[str, list[RegionBy]] = {
        "bucket(id,4)": [by.bucket("id", 4)],
        " identity( tenant ), bucket(id, 4) ": [by.identity("tenant"), by.bucket("id", 4)],
        "multi_bucket(a, b, 8)": [by.multi_bucket(["a", "b"], 8)],
        "truncate(`name`, 3)": [by.truncate("name", 3)],
        "year(at), HOUR(at)": [by.year("at"), by.hour("at")],
        "unsharded()": [by.unsharded()],
    }
    for text, expected in cases.items():
        assert regions_of(text) == expected
    for wrong in (
        "",
        "bucket",
        "bucket(id)",
        "bucket(id, x)",
        "bucket(id, 4) bucket(b, 2)",
        "f(x)",
    ):
        with pytest.raises(InvalidInput, match="regions"):
            regions_of(wrong)
    assert dimensions_of("vec=32, other = 8") == {"vec": 32, "other": 8}
    assert dimensions_of(None) == {}
    for wrong in ("vec", "=3", "vec=x", "vec=-1"):
        with pytest.raises(InvalidInput, match="vectorDimensions"):
            dimensions_of(wrong)
