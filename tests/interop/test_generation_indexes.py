"""Generations carry the table's indexes, built with the base table's own model.

Looked at through Lance alone: whatever a Lance reader finds on a generation is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from tests.interop.lance_side import manifests, only_region

import penstock
from penstock.index.base import load_index_specs
from penstock.table import Table

DIMENSION = 16
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("vector", pa.list_(pa.float32(), DIMENSION)),
        ("body", pa.string()),
        ("price", pa.int32()),
        ("color", pa.string()),
    ]
)
CHANCE = np.random.default_rng(11)


def rows(ids: Sequence[int], words: str = "plain") -> pa.Table:
    vectors = CHANCE.random((len(ids), DIMENSION), dtype=np.float32)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), DIMENSION),
            "body": [f"{words} rivers running number{i}" for i in ids],
            "price": pa.array([i % 10 for i in ids], pa.int32()),
            "color": ["red" if i % 2 else "blue" for i in ids],
        }
    )


def generations(table: Table) -> list[lance.LanceDataset]:
    return [
        lance.dataset(f"{table.uri}/_mem_wal/{manifest.region_id}/{flushed.path}")
        for manifest in manifests(table)
        for flushed in manifest.flushed_generations
    ]


@pytest.fixture(params=["base rows", "empty base"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    """A table with an index of each kind, trained on base rows or on rows in front of the base."""
    made = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    if request.param == "base rows":
        lance.write_dataset(rows(range(400)), made.uri, mode="append")
    else:
        made.upsert(rows(range(400)))
    made.create_index("vector", "ivf_pq", metric="cosine", num_partitions=4, num_sub_vectors=4)
    made.create_index("body", "fts", stem=True, remove_stop_words=True)
    made.create_index("price", "btree")
    made.create_index("color", "bitmap")
    if request.param == "empty base":
        made.flush(recover=True)
    return made


def test_the_model_is_the_base_tables(table: Table) -> None:
    table.upsert(rows(range(1000, 1300), "swift"))
    table.flush()
    base = lance.dataset(table.uri)
    generation = generations(table)[-1]
    names = ["vector_idx", "body_idx", "price_idx", "color_idx"]
    assert sorted(index.name for index in generation.describe_indices()) == sorted(names)

    def centroids(dataset: lance.LanceDataset) -> Any:
        (index,) = dataset.stats.index_stats("vector_idx")["indices"]
        return np.array(index["centroids"], dtype=np.float32)

    ours, theirs = (load_index_specs(d, ["vector_idx"])[0].vector for d in (generation, base))
    assert ours is not None
    assert theirs is not None
    assert ours.metric == theirs.metric == "cosine"
    np.testing.assert_allclose(centroids(generation), theirs.centroids, rtol=1e-6)
    if base.count_rows():  # Lance says nothing of the model while the index covers no rows
        np.testing.assert_allclose(centroids(generation), centroids(base), rtol=1e-6)
    np.testing.assert_array_equal(ours.codebook, theirs.codebook)
    text, base_text = (load_index_specs(d, ["body_idx"])[0].text for d in (generation, base))
    assert text == base_text
    for name in names:
        assert generation.stats.index_stats(name)["num_unindexed_rows"] == 0

    # Each index answers, through Lance, on the generation alone.
    query = np.array(generation.to_table(columns=["vector"]).column(0)[7].as_py(), np.float32)
    nearest = generation.to_table(
        columns=["id"], nearest={"column": "vector", "q": query, "k": 5, "nprobes": 4}
    )
    assert 1007 in nearest.column("id").to_pylist()
    found = generation.to_table(columns=["id"], full_text_query="number1007")
    assert found.column("id").to_pylist() == [1007]
    stemmed = generation.to_table(columns=["id"], full_text_query="run")
    assert stemmed.num_rows == 300, "the base table's tokenizer stems, so this one does"
    cheap = generation.to_table(columns=["id"], filter="price = 3 AND color = 'red'")
    assert sorted(cheap.column("id").to_pylist()) == [i for i in range(1000, 1300) if i % 10 == 3]
    assert "ScalarIndexQuery" in generation.scanner(filter="price = 3").explain_plan()


def test_superseded_rows_and_tombstones_are_hidden(table: Table) -> None:
    table.upsert(rows([1, 2, 3], "first"))
    table.upsert(rows([2], "second"))
    table.delete(keys=[3])
    table.flush()
    generation = generations(table)[-1]
    by_text = generation.to_table(columns=["id"], full_text_query="first").column("id")
    assert by_text.to_pylist() == [1]
    live = generation.to_table(filter="NOT _tombstone", columns=["id"]).column("id")
    assert sorted(live.to_pylist()) == [1, 2]


@pytest.mark.parametrize("what", ["one row", "one null", "only tombstones"])
def test_tiny_generations_have_their_indexes(table: Table, what: str) -> None:
    if what == "one row":
        table.upsert(rows([5000]))
    elif what == "one null":
        table.upsert([{"id": 5000}])
    else:
        table.delete(keys=[1, 2])
    table.flush()
    generation = generations(table)[-1]
    assert len(generation.describe_indices()) == 4
    hits = generation.to_table(columns=["id"], full_text_query="rivers").column("id").to_pylist()
    assert hits == ([5000] if what == "one row" else [])
    assert (table.get(1) is None) == (what == "only tombstones")
    assert (table.get(5000) is None) == (what == "only tombstones")


def test_only_maintained_indexes_are_built(tmp_path: Path) -> None:
    """A table of Lance's that lists what it maintains gets that and no more."""
    key = {"lance-schema:unenforced-primary-key": "true"}
    schema = pa.schema([pa.field("id", pa.int64(), False, key), *list(SCHEMA)[1:]])
    dataset = lance.write_dataset(rows(range(300)).cast(schema), tmp_path / "t.lance")
    dataset.create_scalar_index("price", "BTREE", name="p")
    dataset.create_scalar_index("color", "BITMAP", name="c")
    dataset.create_scalar_index("body", "INVERTED", name="b")
    dataset.initialize_mem_wal(unsharded=True, maintained_indexes=["b", "p"])
    table = penstock.connect(tmp_path).open_table("t")
    table.upsert(rows([1, 301]))
    table.flush()
    (generation,) = generations(table)
    assert sorted(index.name for index in generation.describe_indices()) == ["b", "p"]
    assert only_region(table).flushed_generations[0].physical_rows == 2
