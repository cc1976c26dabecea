"""Columns change while writers are open and readers have searched: none takes one for another."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake
from tests.interop.lance_side import (
    lance_rows,
    only_region,
    our_rows,
    shard_writer,
    written_rows,
)

import penstock
from penstock import Table
from penstock.errors import InvalidInput
from penstock.memwal.text_memory import TextMemory
from penstock.memwal.vector_blocks import VectorMemory

# --- writers -----------------------------------------------------------------------------------


def test_a_writer_that_stays_open_takes_what_it_understands_and_says_what_it_does_not(
    tmp_path: Path,
) -> None:
    """The key alone, and columns that are what they were, are as good as ever."""
    database = penstock.connect(tmp_path)
    schema = pa.schema([pa.field(name, pa.string()) for name in ("id", "a", "b", "c")])
    table = database.create_table("t", schema, primary_key="id")
    mine = table.writer()
    mine.upsert([{"id": "1", "a": "a1", "b": "b1", "c": "c1"}])
    assert not mine.outdated
    table.rename_column("a", "between")
    table.rename_column("b", "a")
    table.rename_column("between", "b")
    table.drop_columns("c")
    table.add_columns({"new": pa.int64()})
    assert mine.outdated
    before = table.get("1")
    assert before == {"id": "1", "b": "a1", "a": "b1", "new": None}
    wrong: list[Any] = [
        [{"id": "1", "a": "which?"}],
        [{"id": "1", "c": "dropped"}],
        [{"id": "1", "new": 7}],
        pa.table({"id": ["1"], "b": ["which?"]}),
        pa.record_batch({"id": ["1"], "new": [7]}),
        pa.table({"id": ["1"], "b": ["which?"]}).to_reader(),
    ]
    for rows in wrong:
        with pytest.raises(InvalidInput, match="open a new writer"):
            mine.upsert(rows)
    assert table.get("1") == before
    mine.upsert([{"id": "2"}])
    mine.upsert(pa.table({"id": ["3", "4"]}).to_reader())
    mine.delete(["1"])
    mine.close()
    nothing = {"b": None, "a": None, "new": None}
    assert table.get_many(["1", "2", "3", "4"]).sort_by("id").to_pylist() == [
        {"id": identity, **nothing} for identity in ("2", "3", "4")
    ]
    with table.writer() as fresh:
        fresh.upsert([{"id": "2", "a": "it is clear", "new": 7}])
    assert table.get("2") == {"id": "2", "b": None, "a": "it is clear", "new": 7}
    table.close()


def test_the_writer_that_upserts_share_follows_changes_of_other_processes(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    here, there = lake.process(), lake.process()
    here.table.upsert([{"id": 1, "value": "one"}])
    there.table.add_columns({"more": pa.int64()})
    # A new column is not known here yet, so the table is asked.
    here.table.upsert([{"id": 2, "value": "two", "more": 2}])
    with here.table.writer() as mine:
        mine.upsert([{"id": 2, "value": "too"}])
        there.table.add_columns({"most": pa.int64()})
        with pytest.raises(InvalidInput, match=r"unknown column 'most'.*open a new writer"):
            mine.upsert([{"id": 2, "most": 3}])
    there.table.drop_columns("most")
    there.table.rename_column("value", "old")
    there.table.add_columns({"value": pa.string()})
    # The name is known and means another column; a second later at the latest that is noticed.
    here.clock.advance(1_001)
    here.table.upsert(pa.table({"id": [3], "value": ["three"]}).to_reader())
    there.table.drop_columns(["old", "more"])
    here.clock.advance(1_001)
    with pytest.raises(InvalidInput, match="unknown column 'old'"):
        here.table.upsert([{"id": 4, "old": "four"}])
    here.table.upsert([{"id": 4}])
    for process in (here, there, lake.process()):
        rows = process.table.to_arrow().sort_by("id").to_pylist()
        assert rows == [{"id": i, "value": "three" if i == 3 else None} for i in (1, 2, 3, 4)]
    here.table.close()


def test_a_region_spec_that_changes_with_the_columns(tmp_path: Path) -> None:
    """A writer from before both: its rows have no such column, and belong where nulls do."""
    schema = pa.schema([pa.field("n", pa.int64())])
    table = penstock.connect(tmp_path).create_table("t", schema)
    mine = table.writer()
    mine.upsert([{"n": 1}])
    table.add_columns({"tenant": pa.string()})
    table.set_regions(penstock.identity("tenant"))
    mine.upsert([{"n": 2}])
    table.rename_column("tenant", "customer")
    mine.close()
    table.upsert([{"n": 3, "customer": "c"}, {"n": 4}])
    wanted = [{"n": n, "customer": "c" if n == 3 else None} for n in (1, 2, 3, 4)]
    for _ in range(2):
        assert table.to_arrow().sort_by("n").to_pylist() == wanted
        assert table.count("customer = 'c'") == 1
        assert table.count("customer is null") == 3
        table.flush(recover=True)
        table.merge()
    assert lance.dataset(table.uri).to_table().sort_by("n").to_pylist() == wanted
    table.close()


def test_a_writer_of_lance_takes_a_region_over_whose_log_is_older(tmp_path: Path) -> None:
    database = penstock.connect(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
    table = database.create_table("t", schema, primary_key="id")
    for age in range(2):
        table.upsert([{"id": n, "a": f"a{age}", "b": f"b{age}"} for n in range(age, 3)])
        table.flush() if age == 0 else table.close()
    for old, new in (("a", "between"), ("b", "a"), ("between", "b")):
        table.rename_column(old, new)
    table.add_columns({"c": pa.int64()})
    wanted = {(n,): {"id": n, "b": f"a{n > 0:d}", "a": f"b{n > 0:d}", "c": None} for n in range(3)}
    writer = shard_writer(table, only_region(table).region_id)
    assert written_rows(writer, table) == wanted
    writer.put(pa.table({"id": [9], "b": ["b"], "a": ["a"], "c": [9]}, schema=table.schema))
    writer.close()
    wanted[9,] = {"id": 9, "b": "b", "a": "a", "c": 9}
    assert our_rows(table) == our_rows(database.open_table("t")) == lance_rows(table) == wanted


# --- searches ----------------------------------------------------------------------------------


def searched(table: Table, column: str, of: str, row: int) -> None:
    """Row `row` is found by what it has in a column, which began as the column `of`."""
    vector = list(np.eye(8)[row % 8] * (row + 1 if of == "v" else -row - 1))
    (nearest,) = table.search(vector, f"v{column}").nprobes(1).limit(1).to_list()
    assert nearest["id"] == row
    assert nearest["_distance"] == 0
    found = table.search(f"{of}word{row}", f"t{column}").limit(9).to_list()
    assert [hit["id"] for hit in found] == [row]
    assert table.search("none", f"t{column}").to_list() == []


@pytest.mark.parametrize("kept", [True, False])
def test_searches_follow_names_that_are_swapped_under_their_indexes(
    tmp_path: Path, kept: bool
) -> None:
    """A reader that stays open has models, words and vectors of both columns in its memory."""
    kind = pa.list_(pa.float32(), 8)
    fields = [("id", pa.int64()), ("v1", kind), ("v2", kind), ("t1", pa.string())]
    schema = pa.schema([*fields, ("t2", pa.string())])
    database = penstock.connect(tmp_path)
    table = database.create_table("t", schema, primary_key="id", regions=penstock.bucket("id", 2))

    def rows(ids: range) -> list[dict[str, Any]]:
        return [
            {
                "id": n,
                "v1": np.eye(8)[n % 8] * (n + 1),
                "v2": np.eye(8)[n % 8] * (-n - 1),
                "t1": f"vword{n}",
                "t2": f"wword{n}",
            }
            for n in ids
        ]

    table.upsert(rows(range(40)))
    table.flush()
    table.merge()
    for name in ("1", "2"):
        table.create_index(f"v{name}", "ivf_flat", num_partitions=4)
        table.create_index(f"t{name}", "fts")
    for first in range(40, 100, 10):
        table.upsert(rows(range(first, first + 10)))
        table.flush()
    held = table.writer(flush_on_close=False)
    held.upsert(rows(range(300, 400)))
    reader = database.open_table("t")
    if not kept:  # nothing fits into memory: generations are asked through their own indexes
        for handle in (reader, table):
            text, vectors = (handle._reader.memory(m) for m in (TextMemory, VectorMemory))
            text._blocks.limit_bytes = vectors.blocks.limit_bytes = 0
    samples = (3, 45, 321)
    for handle, row in itertools.product((reader, table), samples):
        searched(handle, "1", "v", row)
        searched(handle, "2", "w", row)
    for stem in ("v", "t"):
        table.rename_column(f"{stem}1", "between")
        table.rename_column(f"{stem}2", f"{stem}1")
        table.rename_column("between", f"{stem}2")
    for handle, row in itertools.product((reader, table), samples):
        searched(handle, "2", "v", row)
        searched(handle, "1", "w", row)
    held.close(flush=True)
    swapped = [
        {**r, "v1": r["v2"], "v2": r["v1"], "t1": r["t2"], "t2": r["t1"]}
        for r in rows(range(110, 120))
    ]
    table.upsert(swapped)
    for move_on in (table.flush, table.merge):
        for handle, row in ((reader, 45), (table, 321), (reader, 115)):
            searched(handle, "2", "v", row)
            searched(handle, "1", "w", row)
        move_on()
    # Indexes whose columns got names that they never had are maintained like any other.
    table.rename_column("v2", "v3")
    table.rename_column("t2", "t3")
    table.upsert([{"id": 120, "v3": np.eye(8)[0] * 121, "t3": "vword120"}])
    for _ in ("in memory", "flushed"):
        for handle, row in ((reader, 45), (table, 120)):
            searched(handle, "3", "v", row)
        table.flush()
    table.close()


@pytest.mark.parametrize("kept", [True, False])
def test_a_column_added_again_is_not_found_by_the_words_and_vectors_of_the_old_one(
    tmp_path: Path, kept: bool
) -> None:
    kind = pa.list_(pa.float32(), 4)
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("vector", kind)])
    database = penstock.connect(tmp_path)
    table = database.create_table("t", schema, primary_key="id")
    table.create_index("text", "fts")
    for n in range(6):
        table.upsert([{"id": n, "text": f"old {n}", "vector": [float(n), 0, 0, 0]}])
        table.flush()
    reader = database.open_table("t")
    if not kept:
        text, vectors = (reader._reader.memory(m) for m in (TextMemory, VectorMemory))
        text._blocks.limit_bytes = vectors.blocks.limit_bytes = 0
    assert reader.search("old", "text").limit(10).to_arrow().num_rows == 6
    assert reader.search([5.0, 0, 0, 0]).limit(1).to_list()[0]["id"] == 5
    with pytest.raises(InvalidInput, match=r'drop_index\("text_idx"\)'):
        table.drop_columns("text")
    table.drop_index("text_idx")
    table.drop_columns(["text", "vector"])
    table.add_columns({"text": pa.string(), "vector": kind})
    table.create_index("text", "fts")
    assert reader.search("old", "text").to_list() == []
    assert reader.search([5.0, 0, 0, 0]).to_list() == []
    table.upsert([{"id": 3, "text": "new", "vector": [1.0, 0, 0, 0]}])
    for _ in ("in memory", "in the base"):
        assert [hit["id"] for hit in reader.search("new", "text").to_list()] == [3]
        assert [hit["id"] for hit in reader.search([5.0, 0, 0, 0]).to_list()] == [3]
        assert reader.search("old", "text").to_list() == []
        table.flush()
        table.merge()
    table.close()


def test_an_index_that_another_tool_builds_while_its_column_goes_or_gets_another_name(
    tmp_path: Path,
) -> None:
    database = penstock.connect(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
    table = database.create_table("t", schema, primary_key="id")
    table.upsert([{"id": 1, "a": "one", "b": "eins"}])
    table.flush()
    table.merge()
    late, later = lance.dataset(table.uri), lance.dataset(table.uri)
    table.drop_columns("a")
    table.rename_column("b", "a")
    late.create_scalar_index("a", "INVERTED")
    later.create_scalar_index("b", "INVERTED")
    for handle in (table, database.open_table("t")):
        handle.upsert([{"id": 2, "a": "zwei"}])
        handle.flush()
        assert [hit["id"] for hit in handle.search("eins", "a").to_list()] == [1]
        assert [hit["id"] for hit in handle.search("zwei").to_list()] == [2]
        assert handle.search("one", "a").to_list() == []
        handle.close()
