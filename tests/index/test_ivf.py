"""The in-memory IVF puts rows where Lance puts them, and quantises them as Lance does."""

from __future__ import annotations

import json
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lance.file import LanceFileReader
from tests.index.test_base import DIMENSIONS, VECTOR_KINDS, rows, vector_table

from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec, VectorParams, load_index_specs
from penstock.index.ivf import IvfIndex, exact_distances


def matrix(table: pa.Table) -> np.ndarray:
    values = table["vector"].combine_chunks().flatten().to_numpy()
    return values.reshape(len(table), DIMENSIONS)


def lance_assignment(dataset: lance.LanceDataset) -> tuple[np.ndarray, np.ndarray | None]:
    """Each row's partition and code, read from the files of the index that Lance built."""
    (index,) = dataset.describe_indices()
    uri = Path(dataset.uri) / "_indices" / str(index.segments[0].uuid) / "auxiliary.idx"
    reader = LanceFileReader(str(uri))
    sizes = [part["size"] for part in dataset.stats.index_stats("v")["indices"][0]["partitions"]]
    table = reader.read_all().to_table()
    row_ids = table["_rowid"].to_numpy()
    partitions = np.empty(len(row_ids), dtype=np.int32)
    partitions[row_ids] = np.repeat(np.arange(len(sizes)), sizes)
    name = table.schema.names[1]
    if name not in ("__pq_code", "__sq_code"):
        return partitions, None
    storage = json.loads(json.loads(reader.metadata().schema.metadata[b"storage_metadata"])[0])
    width = table.schema.field(name).type.list_size
    flat = table[name].combine_chunks().flatten().to_numpy()
    codes = np.empty((len(row_ids), width), dtype=np.uint8)
    at = 0
    for size in sizes:
        block = flat[at * width : (at + size) * width]
        transposed = storage.get("transposed", False)
        block = block.reshape(width, size).T if transposed else block.reshape(size, width)
        codes[row_ids[at : at + size]] = block
        at += size
    return partitions, codes


@pytest.mark.parametrize(("kind", "metric"), VECTOR_KINDS)
def test_partitions_and_codes_are_those_of_lance(tmp_path: Path, kind: str, metric: str) -> None:
    base = vector_table(str(tmp_path / "base"), kind, metric)
    (spec,) = load_index_specs(base)
    partitions, codes = lance_assignment(base)
    delta = IvfIndex(spec).encode(matrix(rows(1200)))
    assert (delta.partitions == partitions).mean() >= 0.999
    if codes is not None:
        assert delta.codes is not None
        assert (delta.codes == codes).mean() >= 0.999


def index_of(metric: str = "l2", partitions: int = 5, sub_vectors: int = 2) -> IvfIndex:
    random = np.random.default_rng(3)
    centroids = random.standard_normal((partitions, 8)).astype(np.float32)
    codebook = random.standard_normal((sub_vectors, 16, 8 // sub_vectors)).astype(np.float32)
    model = VectorParams(metric, centroids, codebook, 4)
    return IvfIndex(IndexSpec("v", "ivf_pq", "vector", model))


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5),
    st.sampled_from(["l2", "cosine", "dot"]),
    st.integers(0, 2**32 - 1),
)
def test_every_row_with_a_vector_is_a_candidate_of_exactly_one_partition(
    batches: list[int], metric: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    index = index_of(metric)
    vectors = random.standard_normal((sum(batches), 8)).astype(np.float32)
    vectors[random.random(len(vectors)) < 0.1] = 0
    valid = random.random(len(vectors)) < 0.8
    vectors[random.random(len(vectors)) < 0.1, 0] = np.nan
    usable = valid & np.isfinite(vectors).all(axis=1)
    first = 0
    for size in batches:
        part = slice(first, first + size)
        index.append(index.encode(vectors[part], valid[part]), first)
        first += size
    everything = index.candidates(np.ones(8, np.float32), nprobes=99)
    assert everything.tolist() == np.flatnonzero(usable).tolist()
    query = random.standard_normal(8).astype(np.float32)
    nearest = index.candidates(query, nprobes=1)
    assert (index.partitions()[nearest] == index.probes(query, 1)[0]).all()
    assert index.candidates(query, 99, visible_rows=3).tolist() == [
        row for row in everything if row < 3
    ]
    at_once = index.encode(vectors, valid)
    assert at_once.partitions.tolist() == index.partitions().tolist()
    codes = index.codes()
    assert codes is not None
    assert at_once.codes is not None
    assert (at_once.codes == codes).mean() > 0.99  # ties may fall either way


def test_rows_that_were_skipped_are_no_candidates_and_none_is_appended_twice() -> None:
    index = index_of()
    delta = index.encode(np.ones((2, 8), np.float32))
    index.append(delta, 3)
    assert index.candidates(np.ones(8, np.float32), 99).tolist() == [3, 4]
    with pytest.raises(InvalidInput, match="appended before"):
        index.append(delta, 4)
    with pytest.raises(InvalidInput, match="8 dimensions"):
        index.encode(np.ones((2, 7), np.float32))


@pytest.mark.parametrize("metric", ["l2", "cosine", "dot"])
def test_distances_are_those_lance_reports(tmp_path: Path, metric: str) -> None:
    table = rows(50)
    dataset = lance.write_dataset(table, str(tmp_path / "t"))
    query = np.linspace(-1, 2, DIMENSIONS, dtype=np.float32)
    nearest = {"column": "vector", "q": query, "k": 50, "metric": metric}
    theirs = dataset.to_table(columns=["id"], nearest=nearest)
    ours = exact_distances(query, matrix(table), metric)[theirs["id"].to_numpy()]
    np.testing.assert_allclose(ours, theirs["_distance"].to_numpy(), rtol=1e-4, atol=1e-5)
