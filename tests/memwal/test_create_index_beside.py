"""An index is created while others commit: it is there in the end, and no conflict is heard of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import penstock
from penstock import InvalidInput, Table
from penstock.errors import CommitConflict
from penstock.memwal.base_table import BaseTable
from penstock.storage.open import open_store
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams

SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.string()), ("vector", pa.list_(pa.float32(), 4))]
)


def grown(table: Table, first: int = 0, fragments: int = 3) -> None:
    for start in range(first, first + 10 * fragments, 10):
        table.upsert(
            [
                {"id": i, "text": f"word{i}", "vector": [i, 0, 0, 1]}
                for i in range(start, start + 10)
            ]
        )
        table.flush()
        table.merge()


@contextmanager
def before_lance_builds(uri: str, work: Callable[[], object], times: int = 1) -> Iterator[None]:
    """Lets `work` happen after the version was chosen that an index is built on."""
    left = [work] * times

    def watched(method: Any) -> Any:
        def build(dataset: lance.LanceDataset, *given: Any, **options: Any) -> Any:
            if dataset.uri == uri and left:
                left.pop()()
            return method(dataset, *given, **options)

        return build

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_scalar_index", "create_index"):
            patch.setattr(lance.LanceDataset, name, watched(getattr(lance.LanceDataset, name)))
        yield
    assert not left


@pytest.mark.parametrize(
    ("column", "kind", "options"),
    [
        ("text", "fts", {}),
        ("text", "btree", {}),
        ("vector", "ivf_flat", {"num_partitions": 2}),
    ],
)
def test_a_compaction_in_between(
    tmp_path: Path, column: str, kind: str, options: dict[str, int]
) -> None:
    database = penstock.connect(tmp_path)
    table = database.create_table("t", SCHEMA, primary_key="id")
    grown(table)
    other = database.open_table("t")

    def compact() -> None:
        assert other.compact().fragments_before > 1

    with before_lance_builds(table.uri, compact):
        name = table.create_index(column, kind, **options)
    dataset = lance.dataset(table.uri)
    dataset.validate()
    index = next(one for one in dataset.describe_indices() if one.name == name)
    (fragment,) = dataset.get_fragments()
    assert {i for segment in index.segments for i in segment.fragment_ids} == {fragment.fragment_id}
    if kind == "fts":
        assert [row["id"] for row in table.search("word7").to_list()] == [7]
    elif kind == "btree":
        assert table.count("text = 'word7'") == 1
    else:
        assert table.search([7, 0, 0, 1]).limit(1).to_list()[0]["id"] == 7


def test_whoever_never_wins_hears_it_in_the_end_and_a_refusal_stays_one(tmp_path: Path) -> None:
    database = penstock.connect(tmp_path)
    other = database.create_table("t", SCHEMA, primary_key="id")
    grown(other)
    store = open_store(tmp_path).child("t.lance")
    impatient = Seams(backoff=Backoff(races=3, base_ms=0, max_ms=0))
    table = Table("t", BaseTable(store, None, impatient))
    rows = 30

    def compact() -> None:
        nonlocal rows
        grown(other, rows, 2)
        rows += 20
        assert other.compact().fragments_before > 1

    with (
        before_lance_builds(table.uri, compact, 3),
        pytest.raises(CommitConflict, match=r"index 'text_idx'.*3 times; try again"),
    ):
        table.create_index("text", "fts")
    with (
        before_lance_builds(table.uri, compact),
        pytest.raises(InvalidInput, match="unknown FTS index parameter"),
    ):
        table.create_index("text", "fts", nope=3)
    assert other.count() == table.count() == rows
