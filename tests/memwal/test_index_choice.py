"""A second index on a column: built while the first serves, switched to, and the first dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.memwal.indexed_tables import DIMENSIONS, credit, make, models, rows, segments

import penstock
from penstock import Table
from penstock.memwal.vector_blocks import VectorMemory
from penstock.memwal.view import View


def index_used(table: Table) -> str | None:
    def ask(view: View) -> str | None:
        return view.reader.memory(VectorMemory).column(view, "v", None).index

    return table._read(ask, "strong", None)


def test_a_second_model_is_built_while_the_first_serves(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="")
    table.merge()
    table.create_index("v", "ivf_flat", name="zebra", num_partitions=2)
    table.upsert(rows(range(250, 320), "beta", 1))
    table.flush()  # a generation that knows the first index only
    assert index_used(table) == "zebra"

    def right(name: str) -> None:
        reader = penstock.connect(tmp_path).open_table("t")
        there = reader.to_arrow()
        vectors = np.stack(there["v"].to_numpy(zero_copy_only=False))
        for handle in (table, reader):
            assert index_used(handle) == name
            for seed in range(3):
                query = np.random.default_rng(seed).normal(size=DIMENSIONS).astype(np.float32)
                best = np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]
                found = handle.search(query).nprobes(99).limit(10).to_list()
                assert [row["id"] for row in found] == there["id"].to_numpy()[best].tolist()

    table.create_index("v", "ivf_flat", name="apple", num_partitions=5)
    right("zebra")
    table.upsert(rows(range(310, 360), "gamma", 2))
    table.flush()  # one that has both
    table.upsert(rows(range(350, 370), "gamma", 3))
    right("zebra")
    table.merge()
    table.build_indexes(["apple"])  # now the two cover different fragments
    right("zebra")
    table.use_index("apple")
    right("apple")
    table.use_index("zebra")
    right("zebra")
    table.build_indexes()
    assert set(credit(table)) == {"apple", "zebra"}
    table.use_index("apple")
    table.drop_index("zebra")
    right("apple")
    assert set(segments(table)) == set(credit(table)) == {"apple"}
    assert models(table)["apple"].centroids is not None
    assert len(models(table)["apple"].centroids) == 5
    table.flush(recover=True)
    table.merge()
    assert table.build_indexes().behind == []
    right("apple")
    table.drop_index("apple")
    assert index_used(table) is None
    with pytest.raises(penstock.InvalidInput, match="no index 'apple'; there are: none"):
        table.drop_index("apple")


def test_another_tokenizer_is_switched_to_in_every_layer(tmp_path: Path) -> None:
    table = make(tmp_path, kinds="btree")
    table.merge()
    table.create_index("text", "fts", name="stemmed", stem=True)
    table.upsert([{"id": 1001, "text": "running water"}])
    table.flush()
    table.create_index("text", "fts", name="exact", stem=False)
    table.upsert([{"id": 1002, "text": "running water"}])
    table.flush()
    table.upsert([{"id": 1003, "text": "running water"}, {"id": 1004, "text": "a run"}])

    def found(word: str) -> list[int]:
        return sorted(row["id"] for row in table.search(word, "text").to_list())

    assert found("run") == [1001, 1002, 1003, 1004]
    table.use_index("exact")
    assert (found("run"), found("running")) == ([1004], [1001, 1002, 1003])
    table.merge()
    table.build_indexes()
    assert (found("run"), found("running")) == ([1004], [1001, 1002, 1003])
    table.use_index("stemmed")
    assert found("run") == [1001, 1002, 1003, 1004]
    table.drop_index("stemmed")
    assert found("run") == [1004]
    with pytest.raises(penstock.InvalidInput, match="for filters"):
        table.use_index("btree")
