"""The query builder: what it gives, that it is a value, and what it says when it is misused."""

from __future__ import annotations

import random
import re
import textwrap
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInput
from penstock.index.primary_key import mark_primary_key
from penstock.query import HybridQuery, TextQuery, VectorQuery
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


def hybrid(table: Table, **asked: Any) -> Any:
    return table.search(vector=[1.0, 2.0], text="rivers", **asked)


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
        (lambda t: t.search([1.0, float("nan")]), "NaN, infinite or too large"),
        (lambda t: t.search([1.0, 1e300]), "NaN, infinite or too large"),
        (lambda t: t.search([[1.0, 2.0]]), "must be one vector"),
        (lambda t: t.search([]), "must be one vector"),
        (lambda t: t.search(), "nothing to search for"),
        (lambda t: t.search(None), "nothing to search for"),
        (lambda t: t.search([1.0, 2.0], text="rivers"), "give one query"),
        (lambda t: t.search("rivers", vector=[1.0, 2.0]), "give one query"),
        (lambda t: t.search([1.0, 2.0], text_column="body"), "no text to search for"),
        (lambda t: t.search("rivers", "body", vector_column="vector"), "no vector to search for"),
        (lambda t: t.search("rivers", "body", text_column="body"), "named twice"),
        (lambda t: hybrid(t, column="body"), "vector_column= and text_column="),
        (lambda t: t.search("  "), "text to search for is empty"),
        (lambda t: t.search(text=3), "must be a string, not 3"),
        (lambda t: t.search("rivers", column=[]), "a name or a list of names"),
        (lambda t: t.search("rivers", column=["body", "body"]), "appears twice"),
        (lambda t: t.search("rivers").operator("xor"), "there are: or, and"),
        (lambda t: t.search("rivers").boost({"body": 0}), "boost of 'body' must be more than 0"),
        (lambda t: t.search("rivers").boost({"body": "2"}), "must be a number, not '2'"),
        (lambda t: t.search("rivers").boost(2.0), "factors by column"),
        (lambda t: hybrid(t).weights(vector=-1), "weight of the vector must be at least 0"),
        (lambda t: hybrid(t).weights(0, 0), "both weights are 0"),
        (lambda t: hybrid(t).rank_constant(float("nan")), "rank constant must be at least 0"),
        (lambda t: hybrid(t).depth(0), "depth must be at least 1"),
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


# --- text and hybrid -----------------------------------------------------------------------

DOCUMENTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("year", pa.int32()),
        ("title", pa.string()),
        ("body", pa.string()),
        ("vector", pa.list_(pa.float32(), 4)),
    ]
)
WORDS = ["river", "cold", "stone", "lake", "wind", "north", "bridge", "mill", "valve", "gauge"]


def document(dice: random.Random, key: int) -> dict[str, Any]:
    """Bodies of many lengths, so that scores differ from row to row."""
    body = dice.choices(WORDS, [5, 3, 3, 3, 2, 2, 2, 1, 1, 1], k=dice.randint(3, 200))
    return {
        "id": key,
        "year": 2000 + key % 20,
        "title": " ".join(dice.sample(WORDS, 2)),
        "body": " ".join(body),
        "vector": [dice.random() for _ in range(4)],
    }


def documents(directory: Path) -> tuple[Table, lance.LanceDataset]:
    """Rows in the base, a generation and memory, some replaced or deleted; and all of them merged.

    Both have an index on the texts, the live one an index on the vectors too.
    """
    dice = random.Random(4)
    schema = mark_primary_key(DOCUMENTS, ["id"])
    rows = pa.Table.from_pylist([document(dice, n) for n in range(150)], schema)
    lance.write_dataset(rows, str(directory / "live.lance"))
    table = penstock.connect(directory).open_table("live", adopt=True)
    table.set_regions(penstock.bucket("id", 2))
    table.create_index("vector", "ivf_flat", num_partitions=2)
    for column in ("title", "body"):
        table.create_index(column, "fts", with_position=True)
    table.upsert([document(dice, n) for n in range(100, 200)])
    table.delete(keys=list(range(0, 150, 10)))
    table.flush()
    table.upsert([document(dice, n) for n in range(180, 240)])
    table.delete(keys=[150, 160, 5])
    merged = lance.write_dataset(table.to_arrow(), str(directory / "merged.lance"))
    for column in ("title", "body"):
        merged.create_scalar_index(column, "INVERTED", with_position=True)
    return table, merged


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, lance.LanceDataset]:
    return documents(tmp_path_factory.mktemp("library"))


QUERY = [0.4, 0.6, 0.2, 0.8]


def text_scores(merged: lance.LanceDataset, text: str, column: str) -> dict[int, float]:
    """Of every row that matches its score, as Lance has it for the merged rows."""
    query = {"query": text, "columns": [column]}
    found = merged.to_table(columns=["id", "_score"], full_text_query=query, limit=1000)
    return dict(zip(found["id"].to_pylist(), found["_score"].to_pylist(), strict=True))


def distances(merged: lance.LanceDataset) -> dict[int, float]:
    rows = merged.to_table(columns=["id", "vector"])
    vectors = np.stack(rows["vector"].to_numpy())
    found = ((vectors - np.array(QUERY, np.float32)) ** 2).sum(axis=1)
    return dict(zip(rows["id"].to_pylist(), found.tolist(), strict=True))


def test_the_kind_of_query_follows_from_what_is_searched_for(
    library: tuple[Table, lance.LanceDataset],
) -> None:
    table, _ = library
    assert isinstance(table.search(QUERY), VectorQuery)
    assert isinstance(table.search(vector=QUERY), VectorQuery)
    assert isinstance(table.search("river"), TextQuery)
    assert isinstance(table.search(text="river", text_column=["body", "title"]), TextQuery)
    assert isinstance(table.search(vector=QUERY, text="river"), HybridQuery)


def test_text_queries_score_like_the_merged_table(
    library: tuple[Table, lance.LanceDataset],
) -> None:
    table, merged = library
    query = table.search("cold rivers", column="body").select(["id"])
    expected = text_scores(merged, "cold rivers", "body")
    rows = query.limit(1000).to_list()
    assert {row["id"] for row in rows} == set(expected)
    assert [row["_score"] for row in rows] == pytest.approx(
        sorted(expected.values(), reverse=True), rel=1e-4
    )
    assert query.limit(3).offset(2).to_list() == rows[2:5]
    assert list(rows[0]) == ["id", "_score"]
    recent = query.where("year >= 2015").limit(1000).to_list()
    assert recent == [row for row in rows if row["id"] % 20 >= 15]


def test_texts_are_searched_for_all_words_any_or_side_by_side(
    library: tuple[Table, lance.LanceDataset],
) -> None:
    table, merged = library
    bodies = merged.to_table(columns=["id", "body"]).to_pylist()
    query = table.search("mill valve", column="body").limit(1000)

    def having(test: Any) -> set[int]:
        return {row["id"] for row in bodies if test(row["body"])}

    assert set(ids(query)) == having(lambda body: "mill" in body or "valve" in body)
    assert set(ids(query.operator("and"))) == having(lambda b: "mill" in b and "valve" in b)
    assert set(ids(query.phrase())) == having(lambda body: "mill valve" in body)


def test_several_columns_are_searched_by_default_and_can_be_boosted(
    library: tuple[Table, lance.LanceDataset],
) -> None:
    table, merged = library
    both = table.search("gauge").limit(1000)
    body, title = (text_scores(merged, "gauge", column) for column in ("body", "title"))
    assert set(ids(both)) == body.keys() | title.keys()
    assert both.to_list() == table.search("gauge", ["title", "body"]).limit(1000).to_list()
    boosted = both.boost({"title": 100.0}).to_list()
    in_title = [row["id"] in title for row in boosted]
    assert in_title == sorted(in_title, reverse=True)
    assert boosted[0]["_score"] == pytest.approx(100 * max(title.values()), rel=1e-4)


@pytest.mark.parametrize(
    ("weights", "constant", "depth", "where"),
    [
        ((1.0, 1.0), 60, None, None),
        ((0.3, 2.0), 60, None, None),
        ((1.0, 0.0), 60, None, None),
        ((1.0, 1.0), 1, 20, None),
        ((1.0, 1.5), 60, None, "year < 2010"),
    ],
)
def test_hybrid_is_reciprocal_rank_fusion_over_the_merged_rows(
    library: tuple[Table, lance.LanceDataset],
    weights: tuple[float, float],
    constant: float,
    depth: int | None,
    where: str | None,
) -> None:
    table, merged = library
    near, match = distances(merged), text_scores(merged, "cold rivers", "body")
    assert len(set(match.values())) == len(match), "scores must differ for ranks to be certain"
    if where is not None:
        near = {key: value for key, value in near.items() if key % 20 < 10}
        match = {key: value for key, value in match.items() if key % 20 < 10}
    ranked = [
        sorted(near, key=lambda key: near[key])[: depth or 100],
        sorted(match, key=lambda key: -match[key])[: depth or 100],
    ]
    worth: dict[int, float] = {}
    for weight, keys in zip(weights, ranked, strict=True):
        for rank, key in enumerate(keys, 1):
            worth[key] = worth.get(key, 0.0) + weight / (constant + rank)

    query = table.search(vector=QUERY, text="cold rivers", text_column="body")
    query = query.weights(*weights).rank_constant(constant).nprobes(2).select(["id"])
    query = query if depth is None else query.depth(depth)
    query = query if where is None else query.where(where)
    rows = query.limit(30).to_list()
    assert list(rows[0]) == ["id", "_relevance_score", "_distance", "_score"]
    assert [row["_relevance_score"] for row in rows] == pytest.approx(
        sorted(worth.values(), reverse=True)[: len(rows)], rel=1e-6
    )
    for row in rows:
        key = row["id"]
        assert row["_relevance_score"] == pytest.approx(worth[key], rel=1e-6)
        for name, found, all_of_them in (("_distance", 0, near), ("_score", 1, match)):
            if key in ranked[found]:
                assert row[name] == pytest.approx(all_of_them[key], rel=1e-4)
            else:
                assert row[name] is None
    assert query.limit(5).offset(3).to_list() == rows[3:8]
    assert query.limit(30).to_list() == rows


def test_rows_of_equal_worth_come_in_a_fixed_order(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", DOCUMENTS, primary_key="id")
    table.create_index("body", "fts")
    rows = [
        {"id": 0, "body": "river", "vector": None},
        {"id": 1, "body": "stone", "vector": [0.0, 0.0, 0.0, 0.0]},
    ]
    table.upsert(rows[:1])
    table.flush()
    table.upsert(rows[1:])
    query = table.search(vector=[0.0] * 4, text="river").select(["id"])
    # Both are the best of one search: the nearest comes first.
    first, second = query.to_list()
    assert (first["id"], second["id"]) == (1, 0)
    assert first["_relevance_score"] == second["_relevance_score"] == pytest.approx(1 / 61)
    assert (first["_distance"], first["_score"]) == (0.0, None)
    assert second["_distance"] is None
    assert query.weights(text=1.1).to_list()[0]["id"] == 0
    assert query.limit(0).to_arrow().schema.names == [
        "id",
        "_relevance_score",
        "_distance",
        "_score",
    ]


def test_what_only_the_table_can_tell_of_texts_is_refused_when_it_is_run(
    table: Table, library: tuple[Table, lance.LanceDataset]
) -> None:
    with pytest.raises(InvalidInput, match="no column has a full-text index"):
        table.search("river").to_arrow()
    documents, _ = library
    for misuse, said in (
        (documents.search("river", column="colour"), r"no column 'colour'; the table has id, year"),
        (documents.search("river", column="year"), r"no full-text index.*title, body"),
        (documents.search("river", column="body").boost({"title": 2}), r"boost for 'title'"),
        (documents.search(vector=[1.0], text="river"), r"4 dimensions"),
        (documents.search(vector=QUERY, text="river", vector_column="body"), r"body"),
        (documents.search("river").where("colour = 3"), r"colour"),
    ):
        with pytest.raises(InvalidInput, match=said):
            misuse.to_arrow()


def drawn(table: Table, query: Any) -> str:
    """The plan with short names for regions, and without what `FilterStaleExec` says of itself."""
    plan = query.explain()
    for letter, region in zip("AB", reversed(table._reader.view().regions), strict=True):
        plan = plan.replace(str(region.manifest.region_id), letter)
    return re.sub("FilterStaleExec:.*", "FilterStaleExec", plan)


NEAREST = """
FilterStaleExec
  UnionExec
    KNNExec: region_A[gen=2], k={k}
    KNNExec: region_A[gen=1], k={k}
    KNNExec: region_B[gen=2], k={k}
    KNNExec: region_B[gen=1], k={k}
    KNNExec: base_table[gen=0], k={k}"""
MATCHING = """
GlobalBM25Exec: columns=[body], operator=and
  FilterStaleExec
    UnionExec
      FTSExec: region_A[gen=2], query="cold river"
      FTSExec: region_A[gen=1], query="cold river"
      FTSExec: region_B[gen=2], query="cold river"
      FTSExec: region_B[gen=1], query="cold river"
      FTSExec: base_table[gen=0], query="cold river\""""


def under(*above: str, trees: str) -> str:
    lines = [("  " * depth) + line for depth, line in enumerate(above)]
    return "\n".join(lines) + textwrap.indent(trees, "  " * len(above))


def test_plans_are_drawn_as_in_the_specification(
    library: tuple[Table, lance.LanceDataset],
) -> None:
    table, _ = library
    assert drawn(table, table.search(QUERY).offset(2)) == under(
        "GlobalLimitExec: limit=10, offset=2",
        "SortExec: order_by=[_distance ASC], fetch=12",
        trees=NEAREST.format(k=12),
    )
    text = table.search("cold river", column="body").operator("and")
    assert drawn(table, text) == under(
        "GlobalLimitExec: limit=10",
        "SortExec: order_by=[_score DESC], fetch=10",
        trees=MATCHING,
    )
    both = table.search(vector=QUERY, text="cold river", text_column="body").operator("and")
    assert drawn(table, both.weights(text=0.5).limit(5)) == under(
        "GlobalLimitExec: limit=5",
        "SortExec: order_by=[_relevance_score DESC], fetch=5",
        "FusionExec: reciprocal_rank, weights=[vector=1, text=0.5], rank_constant=60, depth=100",
        trees=NEAREST.format(k=100) + MATCHING,
    )
    # Only one region can hold the row; the statistics of texts are of all of them.
    assert drawn(table, table.search(QUERY).where("id = 7")).count("KNNExec") == 3


def test_analyze_says_what_each_node_did(library: tuple[Table, lance.LanceDataset]) -> None:
    table, _ = library
    for query in (table.search(QUERY), table.search("river"), hybrid_of(table)):
        assert "rows=" not in query.explain()
        first, *others = query.limit(7).explain(analyze=True).splitlines()
        assert "rows=7 " in first
        assert all("time=" in line for line in others)


def hybrid_of(table: Table) -> HybridQuery:
    return table.search(vector=QUERY, text="cold rivers", text_column="body")
