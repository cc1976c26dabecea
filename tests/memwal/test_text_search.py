"""Text search: the scores of one merged table with one index, whatever layer a row is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.query import FullTextOperator, FullTextQuery, MatchQuery, MultiMatchQuery, PhraseQuery
from tests.memwal.searching import search_text

import penstock
from penstock import Table
from penstock.errors import InvalidInput
from penstock.index import impact
from penstock.memwal import text_memory, text_nodes, view
from penstock.memwal.filters import Filter
from penstock.memwal.text_search import (
    Operator,
    plan_text_hits,
    plan_text_search,
    text_columns,
)
from penstock.memwal.view import View

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.int64()),
        ("body", pa.string()),
        ("title", pa.string()),
    ]
)
EVERYTHING = 1 << 20
OPERATORS: list[Operator] = ["or", "and", "phrase"]
LANCE_OPERATORS = {"or": FullTextOperator.OR, "and": FullTextOperator.AND}


class Words:
    """Documents of common and rare words, some of them empty, some null."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def text(self, longest: int = 20) -> str | None:
        if self.rng.random() < 0.03:
            return None if self.rng.random() < 0.5 else "..."
        words = np.minimum(self.rng.zipf(1.3, self.rng.integers(1, longest)), 300)
        return " ".join(f"w{word}" for word in words)

    def rows(self, ids: Iterable[int]) -> pa.Table:
        numbers = list(ids)
        columns = [
            pa.array(numbers),
            pa.array([number % 100 for number in numbers]),
            pa.array([self.text() for _ in numbers], pa.string()),
            pa.array([self.text(5) for _ in numbers], pa.string()),
        ]
        return pa.table(columns, schema=SCHEMA)

    def query(self) -> str:
        words = np.minimum(self.rng.zipf(1.2, self.rng.integers(1, 4)), 320)
        return " ".join(f"w{word}" for word in words)


def in_base(table: Table, data: pa.Table) -> None:
    """Rows put straight into the base table, as a merge leaves them there."""
    base = lance.dataset(table.uri)
    lance.write_dataset(data.cast(base.schema), table.uri, mode="append", max_rows_per_file=500)


def searched(
    table: Table,
    text: str,
    k: int | None = None,
    columns: Sequence[str] = ("body",),
    operator: Operator = "or",
    where: str | None = None,
    **options: Any,
) -> pa.Table:
    def work(view: View) -> pa.Table:
        condition = None if where is None else Filter.parse(where, view.shape.schema)
        return search_text(
            view, list(columns), text, k, operator=operator, where=condition, **options
        )

    return table._reader.read(table._region_writers, work)


Scored = list[tuple[int, float]]


def scores(found: pa.Table) -> Scored:
    """Ids and scores, best first."""
    values = found["_score"].to_pylist()
    assert values == sorted(values, reverse=True)
    return list(zip(found["id"].to_pylist(), values, strict=True))


class Merged:
    """The live rows of a table in one plain Lance table with the same indexes."""

    def __init__(self, table: Table, path: Path, columns: Sequence[str] = ("body",)) -> None:
        self.dataset = lance.write_dataset(table.to_arrow(), path)
        for column in columns:
            self.dataset.create_scalar_index(column, "INVERTED", with_position=True)

    def scores(self, query: FullTextQuery, where: str | None = None) -> Scored:
        found = self.dataset.to_table(
            columns=["id"],
            full_text_query=query,
            filter=where,
            prefilter=where is not None,
            limit=EVERYTHING,
        )
        return scores(found)

    def asked(self, text: str, operator: Operator, where: str | None = None) -> Scored:
        if operator == "phrase":
            return self.scores(PhraseQuery(text, "body"), where)
        return self.scores(MatchQuery(text, "body", operator=LANCE_OPERATORS[operator]), where)


def assert_same(found: pa.Table, expected: Scored, k: int | None) -> None:
    """The k best of what is expected, in order; equal scores in any."""
    ours, best = scores(found), expected[:k]
    assert [score for _, score in ours] == pytest.approx([score for _, score in best], rel=1e-4)
    # Rows that score the same as the last one may stand for each other.
    lowest = best[-1][1] * 1.0001 if k is not None and best else 0.0
    assert sorted(i for i, score in ours if score > lowest) == sorted(
        i for i, score in best if score > lowest
    )
    allowed = Counter(i for i, _ in expected)
    allowed.subtract(i for i, _ in ours)
    assert min(allowed.values(), default=0) >= 0


def layered(
    tmp_path: Path, words: Words, *, key: str | None = "id", stable_row_ids: bool = True
) -> Table:
    """Base with an unindexed tail, two generations, frozen and active MemTables; two regions."""
    path = tmp_path / "lake"
    db = penstock.connect(path)
    schema = SCHEMA
    if stable_row_ids:
        table = db.create_table("t", schema, primary_key=key, regions=penstock.bucket("id", 2))
    else:
        marked = db.create_table("model", schema, primary_key=key).schema
        empty = marked.empty_table()
        lance.write_dataset(empty, str(path / "t.lance"), enable_stable_row_ids=False)
        table = db.open_table("t", adopt=True)
        table.set_regions(penstock.bucket("id", 2))
    in_base(table, words.rows(range(1200)))
    for column in ("body", "title"):
        table.create_index(column, "fts", with_position=True)
    lance.dataset(table.uri).delete("id % 17 = 0")
    in_base(table, words.rows(range(1200, 1500)))
    if key:
        merge = lance.dataset(table.uri).merge_insert("id").when_matched_update_all()
        changed = words.rows(n for n in range(40, 400, 9) if n % 17)
        merge.execute(changed.cast(lance.dataset(table.uri).schema))
    lance.dataset(table.uri).delete("id % 19 = 3")
    table.upsert(words.rows(range(900, 1700)))
    if key:
        table.delete(keys=list(range(0, 1700, 7)))
    table.flush()
    table.upsert(words.rows(range(1400, 1900)))
    table.flush()
    table.upsert(words.rows(range(0, 2000, 3)))
    for writer in table._region_writers():
        writer.freeze()
    table.upsert(words.rows(range(5, 2100, 11)))
    if key:
        table.delete(keys=list(range(0, 2000, 13)))
    return table


# --- right, whatever the layers ----------------------------------------------------------------


def ask_at_random(table: Table, merged: Merged, words: Words, queries: int) -> None:
    for number in range(queries):
        text = words.query()
        operator = OPERATORS[number % 3]
        where = [None, "price < 9", "price % 2 = 0", "id = 77"][number // 3 % 4]
        k = [None, 10, 1, 100][number % 4]
        expected = merged.asked(text, operator, where)
        assert_same(searched(table, text, k, operator=operator, where=where), expected, k)


@pytest.mark.parametrize("stable_row_ids", [True, False], ids=["row ids", "row addresses"])
@pytest.mark.parametrize("key", ["id", None], ids=["key", "no key"])
def test_scores_are_those_of_the_merged_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, stable_row_ids: bool
) -> None:
    monkeypatch.setattr(impact, "SHORT_ROWS", 64)  # so that lists of this size count as long
    words = Words(1)
    table = layered(tmp_path, words, key=key, stable_row_ids=stable_row_ids)
    assert lance.dataset(table.uri).has_stable_row_ids == stable_row_ids
    merged = Merged(table, tmp_path / "merged.lance")
    ask_at_random(table, merged, words, 200 if key and stable_row_ids else 48)
    # Another process has neither the MemTables nor their indexes, and reads the WAL.
    ask_at_random(penstock.connect(tmp_path / "lake").open_table("t"), merged, words, 12)


@pytest.mark.parametrize("limit", ["cache", "take", "keys"])
def test_what_does_not_fit_is_answered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "cache":  # generations through their own index, fragments tokenised every time
        monkeypatch.setattr(text_memory, "TEXT_CACHE_BYTES", 0)
    elif limit == "take":  # filters of the base are always scanned
        monkeypatch.setattr(text_nodes, "_TAKE_ROWS", -1)
    else:  # too many keys in the base to be kept
        monkeypatch.setattr(view, "KEY_INDEX_CACHE_BYTES", 0)
    words = Words(2)
    table = layered(tmp_path, words)
    merged = Merged(table, tmp_path / "merged.lance")
    ask_at_random(table, merged, words, 48)


def test_generations_flushed_before_the_index_or_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Words(3)
    table = penstock.connect(tmp_path / "lake").create_table("t", SCHEMA, primary_key="id")
    table.upsert(words.rows(range(300)))
    table.flush()
    table.create_index("body", "fts", name="first", stem=False)
    table.upsert(words.rows(range(200, 400)))
    table.flush()
    lance.dataset(table.uri).drop_index("first")
    table.create_index("body", "fts", name="second", with_position=True)
    table.upsert(words.rows(range(350, 500)))
    table.flush()
    table.upsert(words.rows(range(100, 600, 5)))
    merged = Merged(table, tmp_path / "merged.lance")
    ask_at_random(table, merged, words, 24)
    monkeypatch.setattr(text_memory, "TEXT_CACHE_BYTES", 0)
    ask_at_random(penstock.connect(tmp_path / "lake").open_table("t"), merged, words, 24)


def test_an_empty_base_has_the_index_and_rows_stream_in(tmp_path: Path) -> None:
    words = Words(4)
    table = penstock.connect(tmp_path / "lake").create_table("t", SCHEMA, primary_key="id")
    table.create_index("body", "fts", with_position=True)
    other = penstock.connect(tmp_path / "lake").open_table("t")
    assert searched(table, "w1").num_rows == 0
    for step in range(6):
        at = int(words.rng.integers(0, 200))
        table.upsert(words.rows(range(at, at + 60)))
        table.delete(keys=[at + 3, at + 4])
        if step % 3 == 2:
            table.flush()
        merged = Merged(table, tmp_path / f"merged{step}.lance")
        for reader in (table, other):
            ask_at_random(reader, merged, words, 12)


def test_columns_of_another_shape_than_when_they_were_written(tmp_path: Path) -> None:
    words = Words(5)
    table = layered(tmp_path, words)
    lance.dataset(table.uri).add_columns(pa.field("extra", pa.int64()))
    merged = Merged(table, tmp_path / "merged.lance")
    ask_at_random(penstock.connect(tmp_path / "lake").open_table("t"), merged, words, 24)


def test_identical_documents_have_identical_scores_in_every_layer(tmp_path: Path) -> None:
    words = Words(6)
    table = layered(tmp_path, words)
    same = "w2 w2 w7 w31 w5"

    def copies(ids: Sequence[int]) -> pa.Table:
        plain = words.rows(ids)
        return plain.set_column(2, SCHEMA.field("body"), pa.array([same] * len(ids)))

    table.upsert(copies([5001]))
    table.flush()
    table.upsert(copies([5002]))
    for writer in table._region_writers():
        writer.freeze()
    table.upsert(copies([5003]))
    in_base(table, copies([5004]))
    lance.dataset(table.uri).optimize.optimize_indices(num_indices_to_merge=0)
    in_base(table, copies([5005]))
    for reader in (table, penstock.connect(tmp_path / "lake").open_table("t")):
        for text in ("w2", "w2 w7", "w31 w2 w5 w7", "w5 w1 w1 w3"):
            found = dict(scores(searched(reader, text)))
            assert len({found[key] for key in (5001, 5002, 5003, 5004, 5005)}) == 1


def test_a_filter_does_not_change_scores_and_prunes_regions(tmp_path: Path) -> None:
    words = Words(7)
    table = layered(tmp_path, words)
    merged = Merged(table, tmp_path / "merged.lance")
    everything = merged.asked("w1 w40", "or")
    for key in (1405, 5, 60, 1203, 903):
        expected = [(i, score) for i, score in everything if i == key]
        assert_same(searched(table, "w1 w40", where=f"id = {key}"), expected, None)
        assert merged.asked("w1 w40", "or", f"id = {key}") == expected
    assert searched(table, "w1", where="price > 1000").num_rows == 0


def test_the_best_of_several_columns(tmp_path: Path) -> None:
    words = Words(8)
    table = layered(tmp_path, words)
    columns = ["body", "title"]
    merged = Merged(table, tmp_path / "merged.lance", columns)
    for number, boosts in enumerate([None, {"title": 2.5}, {"body": 0.5, "title": 3}] * 4):
        text = words.query()
        operator: Operator = ("or", "and")[number % 2]  # type: ignore[assignment]
        query = MultiMatchQuery(
            text,
            columns,
            boosts=[float((boosts or {}).get(name, 1.0)) for name in columns],
            operator=LANCE_OPERATORS[operator],
        )
        for k in (None, 7):
            found = searched(table, text, k, columns, operator, boosts=boosts)
            assert_same(found, merged.scores(query), k)


def test_rows_come_best_first_with_the_columns_asked_for(tmp_path: Path) -> None:
    words = Words(9)
    table = layered(tmp_path, words)
    everything = searched(table, "w1 w9 w33")
    assert everything.schema.names == [*SCHEMA.names, "_score"]
    assert everything.schema.field("_score").type == pa.float32()
    page = searched(table, "w1 w9 w33", 5, offset=3, select=["body", "_score"])
    assert page.schema.names == ["body", "_score"]
    assert page["_score"].to_pylist() == everything["_score"].to_pylist()[3:8]
    assert searched(table, "w1", 0).num_rows == 0
    assert searched(table, "", 5).schema.names == [*SCHEMA.names, "_score"]
    for nothing in ("", "...", "the", "absent"):  # no terms, a stop word, a word nobody has
        assert searched(table, nothing).num_rows == 0
    current = {row["id"]: row["body"] for row in table.to_arrow().to_pylist()}
    assert all(current[row["id"]] == row["body"] for row in everything.to_pylist())


def test_plans_show_what_a_search_does(tmp_path: Path) -> None:
    table = layered(tmp_path, Words(10))

    def explained(view: View) -> tuple[str, int]:
        plan = plan_text_search(view, ["body"], "w1 w2", 3, select=["id"])
        assert sum(chunk.rows.num_rows for chunk in plan.stream()) == 3
        hits = plan_text_hits(view, ["body"], "w1 w2", 3)
        return plan.explain(analyze=True), sum(piece.num_rows for piece in hits.stream())

    plan, hits = table._reader.read(table._region_writers, explained)
    assert hits == 3
    names = [line.strip().split(":")[0].split()[0] for line in plan.splitlines()]
    sources = names.count("FTSExec")
    assert names == [
        "GlobalLimitExec",
        "SortExec",
        "GlobalBM25Exec",
        "FilterStaleExec",
        "UnionExec",
        *["FTSExec"] * sources,
    ]
    assert sources == 6  # four MemTables, all generations together, the base
    assert 'FTSExec: base_table[gen=0], query="w1 w2"' in plan
    assert "rows=3" in plan


def test_errors_name_what_exists_and_how_to_get_the_rest(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path / "lake").create_table("t", SCHEMA, primary_key="id")
    table.upsert(Words(11).rows(range(20)))
    with pytest.raises(InvalidInput, match=r"have one: none; create one with create_index\('body'"):
        searched(table, "w1")
    table.create_index("title", "fts")
    columns = table._reader.read(table._region_writers, text_columns)
    assert columns == ["title"]
    with pytest.raises(InvalidInput, match="columns that have one: title"):
        searched(table, "w1")
    with pytest.raises(InvalidInput, match="no column 'nope'; the table has id, price"):
        searched(table, "w1", columns=["nope"])
    with pytest.raises(InvalidInput, match="with_position=True"):
        searched(table, "w1 w2", columns=["title"], operator="phrase")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"columns": []}, "at least one"),
        ({"columns": ["title", "title"]}, "once"),
        ({"columns": ["title"], "operator": "near"}, "unknown operator 'near'"),
        ({"columns": ["title"], "boosts": {"body": 2.0}}, "a boost for 'body'"),
        ({"columns": ["title"], "boosts": {"title": -1.0}}, "positive"),
        ({"columns": ["title"], "boosts": {"title": "much"}}, "must be a number"),
        ({"columns": ["title"], "select": ["nope"]}, "no column 'nope'"),
    ]
    for options, message in bad:
        with pytest.raises(InvalidInput, match=message):
            searched(table, "w1", **options)
