"""Tables in Spark SQL: queried, inserted into, merged, maintained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

import penstock
from penstock import InvalidInput, Table

pytest.importorskip("pyspark")

from penstock.spark import (
    delete_from,
    merge_into,
    query,
    register_functions,
    register_table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("vec", pa.list_(pa.float32(), 2)),
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    made = penstock.connect(tmp_path / "it's").create_table("docs", SCHEMA, primary_key="id")
    made.upsert([{"id": n, "value": "old", "vec": [n, 1]} for n in range(6)])
    made.flush()
    return made


def values(table: Table) -> dict[int, str]:
    return {one["id"]: one["value"] for one in table.to_arrow().to_pylist()}


def test_tables_are_queried_and_inserted_into(spark: SparkSession, table: Table) -> None:
    def run(text: str) -> list[tuple[Any, ...]]:
        return [tuple(one) for one in query(spark, text, docs=table.uri).collect()]

    assert run("SELECT id, vec[0] FROM docs WHERE id > 3 ORDER BY id") == [(4, 4.0), (5, 5.0)]
    run("INSERT INTO docs VALUES (5, 'new', array(5, 1)), (6, 'new', NULL)")
    run("INSERT INTO docs (id, value) SELECT id + 10, 'copy' FROM docs WHERE id < 2")
    expected = dict.fromkeys(range(5), "old") | {5: "new", 6: "new", 10: "copy", 11: "copy"}
    assert values(table) == expected
    assert run("SELECT count(*) FROM docs") == [(9,)]
    run("INSERT OVERWRITE docs SELECT id, 'over', vec FROM docs WHERE id < 3")
    assert values(table) == dict.fromkeys(range(3), "over")


def test_a_view_is_registered(spark: SparkSession, table: Table) -> None:
    version = table.snapshot()
    table.upsert([{"id": 9, "value": "later", "vec": None}])
    assert register_table(spark, "docs", table.uri).count() == 7
    assert register_table(spark, "docs", table.uri, version=version).count() == 6
    with pytest.raises(InvalidInput, match="name a view"):
        register_table(spark, "no; drop", table.uri)
    with pytest.raises(penstock.TableNotFound):
        register_table(spark, "docs", table.uri + "x")


def test_a_query_is_merged_by_key(spark: SparkSession, table: Table) -> None:
    source = "SELECT id, 'merged' AS value FROM VALUES (4), (5), (6), (7) AS t(id)"
    merge_into(spark, table.uri, source, not_matched="ignore")
    assert values(table) == dict.fromkeys(range(4), "old") | {4: "merged", 5: "merged"}
    spark.sql(source).createOrReplaceTempView("fresh")
    merge_into(spark, table.uri, "fresh", matched="ignore")
    assert values(table) == dict.fromkeys(range(4), "old") | dict.fromkeys(range(4, 8), "merged")
    merge_into(
        spark,
        table.uri,
        spark.sql("SELECT id FROM fresh WHERE id > 5"),
        matched="delete",
        not_matched="ignore",
    )
    assert values(table) == dict.fromkeys(range(4), "old") | {4: "merged", 5: "merged"}
    merge_into(
        spark,
        table.uri,
        "SELECT id, 'both' AS value, if(id = 3, 'delete', 'upsert') AS _op FROM range(3, 5)",
    )
    assert values(table) == dict.fromkeys(range(3), "old") | {4: "both", 5: "merged"}
    merge_into(spark, table.uri, "SELECT id, 'x' AS value FROM range(5, 7)", matched="delete")
    assert values(table) == dict.fromkeys(range(3), "old") | {4: "both", 6: "x"}
    assert delete_from(table.uri, "value = 'old' AND id > 0") == 2
    assert values(table) == {0: "old", 4: "both", 6: "x"}
    for wrong in ({"matched": "drop"}, {"not_matched": "delete"}):
        with pytest.raises(InvalidInput, match="is one of"):
            merge_into(spark, table.uri, source, **wrong)
    with pytest.raises(InvalidInput, match="key column 'id'"):
        merge_into(spark, table.uri, "SELECT 'x' AS value")


def test_maintenance_is_a_function(spark: SparkSession, table: Table) -> None:
    register_functions(spark)
    uri = table.uri.replace("'", "\\'")
    jobs = spark.sql(f"SELECT job, did FROM penstock_maintain('{uri}')").collect()
    assert [one.job for one in jobs][:3] == ["merge", "index", "compact"]
    assert lance.dataset(table.uri).count_rows() == 6
    found = spark.sql(f"SELECT * FROM penstock_status('{uri}', map())").collect()
    numbers = {one.name: one.value for one in found}
    assert (numbers["base_rows"], numbers["unmerged_rows"]) == (6, 0)
