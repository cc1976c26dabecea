"""Merging without moving rows: a generation's file becomes a file of the base table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.s3_server import S3Server

import penstock
from penstock import Table
from penstock.memwal import adopt
from penstock.memwal.merge import Folded, commit_merge, fold, plan_merges

POINT = pa.struct([pa.field("x", pa.float64()), pa.field("tags", pa.list_(pa.string()))])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("at", POINT),
        pa.field("body", pa.string()),
    ]
)


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "ADOPTED_ROWS", 10)


def rows(keys: Sequence[int], word: str) -> list[dict[str, Any]]:
    return [
        {
            "id": key,
            "vector": [key, 0.5, 0.25, 0.0],
            "at": {"x": key / 2, "tags": [word, str(key)]},
            "body": f"{word} {key}",
        }
        for key in keys
    ]


def folded(table: Table) -> Folded:
    (plan,), _ = plan_merges(table._base)
    return fold(table._base, plan)


def same_everywhere(table: Table) -> list[dict[str, Any]]:
    """The rows, which have to be the same to Penstock and to plain Lance."""
    options = table._base.storage_options
    seen: list[dict[str, Any]] = (
        lance.dataset(table.uri, storage_options=options).to_table().sort_by("id").to_pylist()
    )
    assert table.to_arrow().sort_by("id").to_pylist() == seen
    return seen


def files_below(directory: Path) -> set[int]:
    return {path.stat().st_ino for path in directory.glob("*.lance")}


def test_the_file_is_shared_and_outlives_the_generation(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(40), "first"))
    table.flush()
    table.upsert(rows(range(35, 75), "second"))
    table.delete(keys=[0, 74])
    table.flush()
    expected = table.to_arrow().sort_by("id").to_pylist()
    home = Path(table.uri)
    of_generations = {path.stat().st_ino for path in home.glob("_mem_wal/*/*_gen_*/data/*.lance")}
    table.merge()
    assert files_below(home / "data") == of_generations
    assert len(of_generations) == 2
    assert same_everywhere(table) == expected
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert not list(home.glob("_mem_wal/*/*_gen_*/data"))
    table.compact()
    table.gc(retain_seconds=0, orphan_seconds=0)
    assert len(files_below(home / "data") - of_generations) == 1
    again = penstock.connect(tmp_path).open_table("t")
    assert same_everywhere(again) == expected


def test_on_s3_the_store_copies_it(s3: S3Server) -> None:
    table = penstock.connect(s3.uri("adopted"), storage_options=s3.storage_options).create_table(
        "t", SCHEMA, primary_key="id"
    )
    table.upsert(rows(range(40), "first"))
    table.delete(keys=[3])
    table.flush()
    made = folded(table)
    assert len(made.adopted) == 1
    assert not made.fragments
    commit_merge(table._base, made)
    assert [one["id"] for one in same_everywhere(table)] == [k for k in range(40) if k != 3]


@pytest.mark.parametrize("deletes", [False, True])
def test_columns_without_nulls(tmp_path: Path, deletes: bool) -> None:
    """A delete is a row of nulls, which Lance does not read in a column that has none."""
    schema = pa.schema([SCHEMA.field("id"), pa.field("n", pa.int32(), nullable=False)])
    table = penstock.connect(tmp_path).create_table("t", schema, primary_key="id")
    table.upsert([{"id": key, "n": key} for key in range(40)])
    if deletes:
        table.delete(keys=[7])
    table.flush()
    made = folded(table)
    assert len(made.adopted) == (0 if deletes else 1)
    commit_merge(table._base, made)
    assert len(same_everywhere(table)) == (39 if deletes else 40)


def test_columns_that_changed_since(tmp_path: Path) -> None:
    """A dropped column stays behind in the file; a file that lacks a column is rewritten."""
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(40), "first"))
    table.flush()
    table.drop_columns(["body"])
    made = folded(table)
    assert len(made.adopted) == 1
    commit_merge(table._base, made)
    assert all("body" not in one for one in same_everywhere(table))
    table.add_columns(pa.field("body", pa.string()))
    assert {one["body"] for one in same_everywhere(table)} == {None}

    table.upsert(rows(range(50, 70), "second"))
    table.flush()
    table.add_columns(pa.field("late", pa.int16()))
    made = folded(table)
    assert not made.adopted
    commit_merge(table._base, made)
    found = same_everywhere(table)
    assert {one["late"] for one in found} == {None}
    assert sum(one["body"] is not None for one in found) == 20


def test_many_dead_rows_are_not_kept(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    for keys in (range(40), range(20), range(16, 36)):
        table.upsert(rows(keys, f"from {keys.start}"))
        table.flush()
    made = folded(table)
    # Of the first 36 of 40 are replaced, of the second 4 of 20, of the third none.
    assert [one.rows for one in made.adopted] == [16, 20]
    assert sum(part.num_rows for part in made.fragments) == 4
    commit_merge(table._base, made)
    assert len(same_everywhere(table)) == 40


@pytest.mark.parametrize("stable", [True, False])
def test_a_table_without_a_key(tmp_path: Path, stable: bool) -> None:
    lance.write_dataset(
        SCHEMA.empty_table(), str(tmp_path / "t.lance"), enable_stable_row_ids=stable
    )
    table = penstock.connect(tmp_path).open_table("t", adopt=True)
    for word in ("first", "second"):
        table.upsert(rows(range(20), word))
        table.flush()
    made = folded(table)
    assert len(made.adopted) == 2
    commit_merge(table._base, made)
    assert len(same_everywhere(table)) == 40


def test_what_a_lost_race_adopted_is_removed_again(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.upsert(rows(range(40), "first"))
    table.flush()
    late = folded(table)
    table.merge()
    assert commit_merge(table._base, late).generations == 0
    assert len(list((Path(table.uri) / "data").iterdir())) == 1
    assert len(same_everywhere(table)) == 40


def test_indexes_find_what_was_adopted(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    table.create_index("body", "fts")
    for word in ("first", "second"):
        table.upsert(rows(range(40), word))
        table.flush()
        table.merge()
        table.build_indexes()
        found = table.search(word, "body").limit(100).to_arrow()
        assert found.num_rows == 40
        dataset = lance.dataset(table.uri)
        assert dataset.to_table(full_text_query=word).num_rows == 40
    assert table.search("first", "body").limit(100).to_arrow().num_rows == 0
    assert lance.dataset(table.uri).to_table(full_text_query="first").num_rows == 0
