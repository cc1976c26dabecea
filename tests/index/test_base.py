"""A base table's indexes are read, and repeated on generations of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec, create_like, load_index_specs

DIMENSIONS = 16
VECTOR_KINDS = [
    ("IVF_FLAT", "l2"),
    ("IVF_PQ", "l2"),
    ("IVF_PQ", "cosine"),
    ("IVF_PQ", "dot"),
    ("IVF_SQ", "l2"),
    ("IVF_RQ", "l2"),
    ("IVF_HNSW_FLAT", "cosine"),
    ("IVF_HNSW_PQ", "l2"),
    ("IVF_HNSW_SQ", "cosine"),
]
TEXT_OPTIONS: dict[str, Any] = {
    "stem": False,
    "with_position": True,
    "max_token_length": None,
    "remove_stop_words": True,
    "custom_stop_words": ["foo"],
}


def rows(count: int, seed: int = 0, *, vectors: bool = True) -> pa.Table:
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, DIMENSIONS)).astype(np.float32)
    values += random.integers(0, 4, (count, 1)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), DIMENSIONS)
    if not vectors:
        column = pa.nulls(count, column.type)
    text = pa.array(
        [f"cold rivers foo {i}" if vectors else None for i in range(count)], pa.string()
    )
    return pa.table({"id": np.arange(count), "vector": column, "text": text})


def vector_table(uri: str, kind: str, metric: str) -> lance.LanceDataset:
    dataset = lance.write_dataset(rows(1200), uri)
    extra: dict[str, Any] = {"num_sub_vectors": 4} if kind.endswith("PQ") else {}
    extra |= {"m": 12, "ef_construction": 60} if "HNSW" in kind else {}
    return dataset.create_index("vector", kind, metric=metric, name="v", num_partitions=4, **extra)


def assert_same_model(left: IndexSpec, right: IndexSpec) -> None:
    assert (left.name, left.kind, left.column) == (right.name, right.kind, right.column)
    mine, other = left.vector, right.vector
    assert mine is not None
    assert other is not None
    assert (mine.metric, mine.num_bits, mine.hnsw) == (other.metric, other.num_bits, other.hnsw)
    assert np.array_equal(mine.centroids, other.centroids)  # type: ignore[arg-type]
    assert (mine.codebook is None) == (other.codebook is None)
    if mine.codebook is not None:
        assert np.array_equal(mine.codebook, other.codebook)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "metric"), VECTOR_KINDS)
def test_a_vector_index_is_repeated_with_the_same_model(
    tmp_path: Path, kind: str, metric: str
) -> None:
    base = vector_table(str(tmp_path / "base.v1"), kind, metric)
    (spec,) = load_index_specs(base, ["v"])
    model = spec.vector
    assert model is not None
    assert model.centroids is not None
    assert model.centroids.shape == (4, DIMENSIONS)
    assert (model.codebook is not None) == kind.endswith("PQ")
    assert (model.sq_bounds is not None) == kind.endswith("SQ")
    assert model.hnsw.get("max_connections") == (12 if "HNSW" in kind else None)
    generation = lance.write_dataset(rows(40, seed=1), str(tmp_path / "generation"))
    done = create_like(spec, generation)
    assert done.skipped is None
    assert bool(done.retrained) == kind.endswith(("SQ", "RQ"))
    assert_same_model(spec, load_index_specs(generation)[0])
    query = {"column": "vector", "q": rows(1, seed=2)["vector"][0].values, "k": 40, "nprobes": 4}
    assert generation.to_table(nearest=query, fast_search=True).num_rows == 40


@pytest.mark.parametrize("kind", ["IVF_FLAT", "IVF_PQ", "IVF_SQ", "IVF_HNSW_SQ", "IVF_RQ"])
def test_tiny_generations_get_their_indexes_too(tmp_path: Path, kind: str) -> None:
    base = vector_table(str(tmp_path / "base"), kind, "l2")
    base.create_scalar_index("text", "INVERTED", name="t")
    base.create_scalar_index("id", "BTREE", name="b")
    specs = load_index_specs(base)
    one, tombstones = rows(1), rows(3, vectors=False)
    for number, table in enumerate([one, tombstones, pa.concat_tables([tombstones, one])]):
        generation = lance.write_dataset(table, str(tmp_path / str(number)))
        assert [create_like(spec, generation).skipped for spec in specs] == [None] * 3
        found = generation.to_table(
            nearest={"column": "vector", "q": np.zeros(DIMENSIONS, np.float32), "k": 9},
            fast_search=True,
        )
        assert found.num_rows == len(table) - table["vector"].null_count
        found = generation.to_table(full_text_query="rivers", fast_search=True)
        assert found.num_rows == len(table) - table["text"].null_count


def test_text_and_scalar_indexes_keep_their_options(tmp_path: Path) -> None:
    base = lance.write_dataset(rows(50), str(tmp_path / "base"))
    base.create_scalar_index("text", "INVERTED", name="t", **TEXT_OPTIONS)
    base.create_scalar_index("id", "BITMAP", name="m")
    base.create_scalar_index("text", "NGRAM", name="n")
    base.initialize_mem_wal(unsharded=True)
    specs = {spec.name: spec for spec in load_index_specs(base)}
    assert {name: spec.kind for name, spec in specs.items()} == {
        "t": "fts",
        "m": "bitmap",
        "n": "ngram",
    }
    text = specs["t"].text
    assert text is not None
    assert {key: text[key] for key in TEXT_OPTIONS} == TEXT_OPTIONS
    generation = lance.write_dataset(rows(3), str(tmp_path / "generation"))
    assert create_like(specs["t"], generation).skipped is None
    assert create_like(specs["m"], generation).skipped is None
    assert "ngram" in (create_like(specs["n"], generation).skipped or "")
    again = {spec.name: spec for spec in load_index_specs(generation)}
    assert again["t"].text == text
    assert again["m"].kind == "bitmap"


def test_an_index_declared_before_there_are_rows_is_skipped_and_said_so(tmp_path: Path) -> None:
    base = lance.write_dataset(rows(0), str(tmp_path / "base"))
    base.create_index("vector", "IVF_FLAT", name="v", num_partitions=4, train=False)
    (spec,) = load_index_specs(base)
    assert spec.vector is not None
    assert spec.vector.centroids is None
    generation = lance.write_dataset(rows(5), str(tmp_path / "generation"))
    assert "not been trained" in (create_like(spec, generation).skipped or "")
    with pytest.raises(InvalidInput, match="no index nope"):
        load_index_specs(base, ["v", "nope"])


def test_indexes_are_read_and_repeated_on_s3(s3: Any) -> None:
    options = s3.storage_options
    base = lance.write_dataset(rows(600), s3.uri("base"), storage_options=options)
    base.create_index("vector", "IVF_PQ", name="v", num_partitions=2, num_sub_vectors=4)
    base.create_scalar_index("text", "INVERTED", name="t", custom_stop_words=["foo"])
    opened = lance.dataset(base.uri, storage_options=options)
    generation = lance.write_dataset(rows(4), s3.uri("generation"), storage_options=options)
    for spec in load_index_specs(opened, ["v", "t"]):
        assert create_like(spec, generation).skipped is None
    v, t = load_index_specs(generation, ["v", "t"])
    assert_same_model(v, load_index_specs(opened, ["v"])[0])
    assert t.text is not None
    assert t.text["custom_stop_words"] == ["foo"]
