"""Rows that say which version they are, and what a search of them must find.

A row follows from its key and version, so of every row that a search found it can be said which
version it is, and whether all of it is that version. What the searches must find is worked out
from all rows, one by one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from tests.failures.test_read_path import keyed

from penstock.table import Table

WIDTH = 8
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
QUERY = np.full(WIDTH, 0.25, np.float32)
Vector = npt.NDArray[np.float32]
Rows = dict[int, str]
"""Of each key the text, which names the version."""


def text(key: int, version: int) -> str:
    """All have "river"; every fifth has "cold", and no two of these as often among as many."""
    words = ["river", f"v{version}"]
    if key % 5 == 0:
        words += ["cold"] * (1 + key % 3) + ["stone"] * (key // 5 + 90 * (version % 4))
    return " ".join(words)


def vector(key: int, version: int) -> list[float]:
    drawn = np.random.default_rng((key, version)).normal(size=WIDTH)
    return [float(x) for x in drawn.astype(np.float32)]


def row(key: int, version: int) -> dict[str, Any]:
    return {"id": key, "value": text(key, version), "vector": vector(key, version)}


def rows(keys: Iterable[int], version: int) -> list[dict[str, Any]]:
    return [row(key, version) for key in keys]


def version_of(value: str) -> int:
    return int(value.split()[1].removeprefix("v"))


def at(keys: Iterable[int], version: int) -> Rows:
    return {key: text(key, version) for key in keys}


def found_rows(found: pa.Table, query: Vector | None = None) -> Rows:
    """What was found, each key once and each row all of one version, as far away as it is."""
    for one in found.to_pylist():
        whole = vector(one["id"], version_of(one["value"]))
        assert one["vector"] == whole
        if one.get("_distance") is not None:
            away = np.square(np.array(whole) - (QUERY if query is None else query)).sum()
            assert one["_distance"] == pytest.approx(away, rel=1e-3)
    return keyed(found)


# --- what they must find, worked out in plain sight ----------------------------------------------

Scored = list[tuple[int, float]]
"""Keys and scores, best first."""


def nearest(live: Sequence[dict[str, Any]], query: Vector) -> Scored:
    distances = {
        one["id"]: float(np.square(np.array(one["vector"], np.float32) - query).sum())
        for one in live
    }
    return sorted(distances.items(), key=lambda item: item[1])


def matching(live: Sequence[dict[str, Any]], word: str) -> Scored:
    texts = {one["id"]: one["value"].split() for one in live}
    average = sum(map(len, texts.values())) / len(texts)
    having = sum(word in words for words in texts.values())
    idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
    scores = {}
    for key, words in texts.items():
        often = words.count(word)
        if often:
            norm = 1.2 * (1 - 0.75 + 0.75 * len(words) / average)
            scores[key] = idf * often * 2.2 / (often + norm)
    return sorted(scores.items(), key=lambda item: -item[1])


def fused(near: Scored, match: Scored) -> Scored:
    ranks = [{key: n for n, (key, _) in enumerate(found, 1)} for found in (near, match)]
    worth: dict[int, float] = defaultdict(float)
    for ranked in ranks:
        for key, rank in ranked.items():
            worth[key] += 1 / (60 + rank)
    last = len(near) + len(match) + 1
    order = sorted(worth, key=lambda k: (-worth[k], ranks[0].get(k, last), ranks[1].get(k, last)))
    return [(key, worth[key]) for key in order]


def scored(found: pa.Table, score: str) -> Scored:
    return list(zip(found["id"].to_pylist(), found[score].to_pylist(), strict=True))


def assert_same(found: Scored, expected: Scored) -> None:
    assert [key for key, _ in found] == [key for key, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], rel=1e-3, abs=1e-5)


def assert_right(table: Table, expected: Rows, query: Vector) -> None:
    """All searches of a table give what brute force over its rows does, and it has these rows."""
    live = table.to_arrow()
    assert found_rows(live) == expected
    near, match = nearest(live.to_pylist(), query), matching(live.to_pylist(), "cold")
    for k in (5, 60):
        depth = max(100, 2 * k)
        by_query = table.search(query).nprobes(8).refine(100).limit(k).to_arrow()
        assert_same(scored(by_query, "_distance"), near[:k])
        by_word = table.search("cold").limit(k).to_arrow()
        assert_same(scored(by_word, "_score"), match[:k])
        both = table.search(vector=query, text="cold").nprobes(8).refine(100).limit(k).to_arrow()
        assert_same(scored(both, "_relevance_score"), fused(near[:depth], match[:depth])[:k])
        for found in (by_query, by_word, both):
            assert found_rows(found, query).items() <= expected.items()
