"""Tables with indexes of every kind, and what Lance and the table itself must find by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import penstock
from penstock import Table
from penstock.index.base import VectorParams, load_index_specs
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.table_versions import read_details

DIMENSIONS = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("tag", pa.string()),
        pa.field("text", pa.string()),
        pa.field("v", pa.list_(pa.float32(), DIMENSIONS)),
    ]
)
WORDS = ("alpha", "beta", "gamma", "common")


def rows(ids: Iterable[int], word: str, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": number,
            "tag": f"t{number % 3}" if word == "alpha" else f"{word[0]}{number % 3}",
            "text": f"{word} common word{number % 7}",
            "v": np.random.default_rng((seed, number)).normal(size=DIMENSIONS).tolist(),
        }
        for number in ids
    ]


def make(path: Path, *, stable: bool = True, kinds: str = "flat fts btree bitmap") -> Table:
    """A table with rows that are flushed, and indexes that were made before any was merged."""
    lance.write_dataset(
        mark_primary_key(SCHEMA, ["id"]).empty_table(),
        str(path / "t.lance"),
        enable_stable_row_ids=stable,
    )
    table = penstock.connect(path).open_table("t", adopt=True)
    table.upsert(rows(range(300), "alpha"))
    made: dict[str, Callable[[], Any]] = {
        "flat": lambda: table.create_index("v", "ivf_flat", name="flat", num_partitions=3),
        "pq": lambda: table.create_index(
            "v", "ivf_pq", name="pq", num_partitions=3, num_sub_vectors=4
        ),
        "sq": lambda: table.create_index("v", "ivf_sq", name="sq", num_partitions=3),
        "fts": lambda: table.create_index("text", "fts", name="fts", with_position=True),
        "btree": lambda: table.create_index("id", "btree", name="btree"),
        "bitmap": lambda: table.create_index("tag", "bitmap", name="bitmap"),
    }
    for kind in kinds.split():
        made[kind]()
    table.flush(recover=True)
    return table


def merge(table: Table, *changes: list[dict[str, Any]], gone: Sequence[int] = ()) -> None:
    for change in changes:
        table.upsert(change)
    if gone:
        table.delete(keys=list(gone))
    table.flush()
    table.merge()


def segments(table: Table) -> dict[str, dict[str, list[int]]]:
    """Of each index its segments, and the fragments that each covers."""
    return {
        index.name: {str(s.uuid): sorted(s.fragment_ids) for s in index.segments}
        for index in lance.dataset(table.uri).describe_indices()
        if not index.name.startswith("__")
    }


def credit(table: Table) -> dict[str, list[int]]:
    found = read_details(table._base.store, lance.dataset(table.uri).version)
    assert found is not None
    return {name: sorted(at.values()) for name, at in found[0].index_catchup.items()}


def models(table: Table) -> dict[str, VectorParams]:
    specs = load_index_specs(lance.dataset(table.uri))
    return {spec.name: spec.vector for spec in specs if spec.vector is not None}


def check(table: Table, *, covered: bool = True) -> None:
    """Lance alone, with its indexes, finds what is there, each row once; and so does the table."""
    dataset = lance.dataset(table.uri)
    there = dataset.to_table().to_pylist()
    ids = np.array([row["id"] for row in there])
    assert len(set(ids.tolist())) == len(ids)
    query = np.full(DIMENSIONS, 0.3, dtype=np.float32)
    distances = ((np.array([row["v"] for row in there]) - query) ** 2).sum(axis=1)
    nearest = ids[np.argsort(distances)[:10]].tolist()
    fragments = {part.fragment_id for part in dataset.get_fragments()}
    for index in dataset.describe_indices():
        numbers = [f for s in index.segments for f in s.fragment_ids if f in fragments]
        assert len(numbers) == len(set(numbers)), "a fragment is covered twice"
        if index.name.startswith("__") or not covered:
            continue
        assert set(numbers) == fragments
        if index.field_names == ["v"]:
            own = [str(segment.uuid) for segment in index.segments]
            asked = {"column": "v", "q": query, "nprobes": 99, "refine_factor": 30}
            found = dataset.scanner(
                columns=["id"], nearest={**asked, "k": 10}, index_segments=own
            ).to_table()
            assert found["id"].to_pylist() == nearest
            every = dataset.scanner(
                columns=["id"], nearest={**asked, "k": len(ids) + 9}, index_segments=own
            ).to_table()
            assert sorted(every["id"].to_pylist()) == sorted(ids.tolist())
    for word in WORDS:
        expected = sorted(row["id"] for row in there if word in row["text"])
        hits = dataset.scanner(columns=["id"], full_text_query=word, fast_search=covered)
        if "fts" in segments(table):
            assert sorted(hits.to_table()["id"].to_pylist()) == expected, word
            mine = table.search(word, "text").limit(len(ids) + 9).to_list()
            assert sorted(row["id"] for row in mine) == expected, word
    for sql, holds in (
        ("tag = 't1'", lambda row: row["tag"] == "t1"),
        ("tag = 'b1'", lambda row: row["tag"] == "b1"),
        ("id >= 90 AND id < 310", lambda row: 90 <= row["id"] < 310),
    ):
        found = sorted(dataset.to_table(columns=["id"], filter=sql)["id"].to_pylist())
        assert found == sorted(row["id"] for row in there if holds(row)), sql
    mine = table.search(query, "v").nprobes(99).limit(10).to_list()
    assert [row["id"] for row in mine] == nearest
