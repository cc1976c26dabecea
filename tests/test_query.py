"""The query builder: what it gives, that it is a value, and what it says when it is misused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInput
from penstock.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.float64()),
        ("vector", pa.list_(pa.float32(), 2)),
    ]
)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Rows 0 to 19 on a line: row n is n away from the origin, half of them flushed."""
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    rows = [{"id": n, "price": n / 2, "vector": [float(n), 0.0]} for n in range(20)]
    table.upsert(rows[::2])
    table.flush()
    table.upsert(rows[1::2])
    return table


def ids(query: Any) -> list[int]:
    return [row["id"] for row in query.to_list()]


def test_results_come_in_the_shape_one_asks_for(table: Table) -> None:
    query = table.search([0.0, 0.0]).limit(3)
    expected = [
        {"id": n, "price": n / 2, "vector": [float(n), 0.0], "_distance": float(n * n)}
        for n in range(3)
    ]
    assert query.to_list() == expected
    arrow = query.to_arrow()
    assert arrow.schema == SCHEMA.append(pa.field("_distance", pa.float32()))
    assert query.to_pandas()["id"].tolist() == [0, 1, 2]
    assert query.to_polars()["id"].to_list() == [0, 1, 2]


def test_everything_can_be_chained(table: Table) -> None:
    query = (
        table.search(np.array([0.0, 0.0]), column="vector")
        .where("price >= 2")
        .limit(3)
        .offset(1)
        .nprobes(20)
        .refine(5)
        .metric("l2")
        .distance_range(20.0, 100.0)
        .select(["price", "id"])
    )
    # From 16 up: 16 is below the range, 25 is skipped, 100 would be beyond it.
    assert query.to_list() == [
        {"price": n / 2, "id": n, "_distance": float(n * n)} for n in (6, 7, 8)
    ]
    assert ids(query.limit(100)) == [6, 7, 8, 9]


def test_a_query_is_a_value_and_sees_the_table_as_it_is_when_it_is_run(table: Table) -> None:
    query = table.search([0.0, 0.0])
    cheap = query.where("price < 2").limit(2)
    assert len(ids(query)) == 10
    assert ids(cheap) == [0, 1]
    table.delete(keys=[0])
    assert ids(cheap) == [1, 2]
    assert ids(query)[0] == 1


def test_ranges_offsets_and_limits_at_their_ends(table: Table) -> None:
    query = table.search([0.0, 0.0])
    assert ids(query.limit(0)) == []
    assert query.limit(0).to_arrow().column_names == ["id", "price", "vector", "_distance"]
    assert ids(query.offset(18)) == [18, 19]
    assert ids(query.offset(99)) == []
    assert ids(query.distance_range(high=9.0)) == [0, 1, 2]
    assert ids(query.distance_range(low=324.0)) == [18, 19]
    assert ids(query.distance_range(5, 5)) == []
    assert query.limit(2).select([]).to_list() == [{"_distance": 0.0}, {"_distance": 1.0}]
    assert query.limit(1).select(["id", "_distance"]).to_list() == [{"id": 0, "_distance": 0.0}]


def test_vectors_come_from_anywhere(table: Table) -> None:
    column = table.to_arrow().column("vector").combine_chunks()
    for vector in (
        [3, 0],
        (3.0, 0.0),
        np.array([3, 0], np.int32),
        np.array([3, 0], np.float64),
        pa.array([3.0, 0.0]),
        pa.chunked_array([[3.0], [0.0]]),
        column[column.to_pylist().index([3.0, 0.0])],
    ):
        assert ids(table.search(vector).limit(1)) == [3]


def test_the_column_must_be_named_where_several_hold_vectors(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    two = db.create_table("two", SCHEMA.append(pa.field("image", pa.list_(pa.float32(), 3))))
    with pytest.raises(InvalidInput, match=r"several columns hold vectors.*vector, image"):
        two.search([1.0, 2.0]).to_arrow()
    assert two.search([1.0, 2.0, 3.0], column="image").to_list() == []
    none = db.create_table("none", pa.schema([("id", pa.int64())]))
    with pytest.raises(InvalidInput, match=r"no column with vectors.*it has id"):
        none.search([1.0]).to_arrow()


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda t: t.search("cold rivers"), "text search is not there yet"),
        (lambda t: t.search([1.0, float("nan")]), "NaN, infinite or too large"),
        (lambda t: t.search([1.0, 1e300]), "NaN, infinite or too large"),
        (lambda t: t.search([[1.0, 2.0]]), "must be one vector"),
        (lambda t: t.search([]), "must be one vector"),
        (lambda t: t.search(None), "must be one vector"),
        (lambda t: t.search(["a", "b"]), "must be one vector"),
        (lambda t: t.search([1.0, [2.0]]), "not a vector of numbers"),
        (lambda t: t.search([1.0, 2.0], column=3), "must be the name of a column"),
        (lambda t: t.search([1.0, 2.0]).limit(-1), "limit must be at least 0"),
        (lambda t: t.search([1.0, 2.0]).limit(2.5), "limit must be a whole number"),
        (lambda t: t.search([1.0, 2.0]).offset(True), "offset must be a whole number"),
        (lambda t: t.search([1.0, 2.0]).nprobes(0), "nprobes must be at least 1"),
        (lambda t: t.search([1.0, 2.0]).refine(0), "refine must be at least 1"),
        (lambda t: t.search([1.0, 2.0]).metric("euclid"), "there are: l2, cosine, dot"),
        (lambda t: t.search([1.0, 2.0]).select("id"), "must be a list of names"),
        (lambda t: t.search([1.0, 2.0]).distance_range("a"), "must be a number"),
    ],
)
def test_misuse_is_refused_at_once(table: Table, misuse: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        misuse(table)


def test_what_only_the_table_can_tell_is_refused_when_it_is_run(table: Table) -> None:
    query = table.search([1.0, 2.0])
    with pytest.raises(InvalidInput, match="no column 'colour'; the table has id, price, vector"):
        query.select(["colour"]).to_arrow()
    with pytest.raises(InvalidInput, match="colour"):
        query.where("colour = 3").to_arrow()
    with pytest.raises(InvalidInput, match="a filter is SQL text"):
        query.where("").to_arrow()
