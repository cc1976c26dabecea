"""One ranking over many sources, with the scores Lance gives the same rows in one dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.query import FullTextOperator, FullTextQuery, MatchQuery, MultiMatchQuery, PhraseQuery

from penstock.errors import InvalidInput
from penstock.index import bm25
from penstock.index.base import IndexSpec
from penstock.index.bm25 import CorpusStatistics, Matches, Source, best_column, search
from penstock.index.lance_text import LanceTextIndex
from penstock.index.text import Postings, TextIndex

OPERATORS = {"or": FullTextOperator.OR, "and": FullTextOperator.AND}
QUERIES = ["w1", "w2 w3", "w400 w17 w1", "w2 w2 w3", "w3 absent", "absent", "w1 w2 w3 w4 w5"]


def zipf_documents(rng: np.random.Generator, count: int, longest: int = 20) -> list[str]:
    return [
        " ".join(f"w{word}" for word in np.minimum(rng.zipf(1.3, rng.integers(1, longest)), 500))
        for _ in range(count)
    ]


def corpus(rng: np.random.Generator, first_id: int, count: int) -> pa.Table:
    return pa.table(
        {
            "id": np.arange(first_id, first_id + count),
            "body": zipf_documents(rng, count),
            "title": zipf_documents(rng, count, 5),
        }
    )


def indexed(dataset: lance.LanceDataset, columns: Sequence[str] = ("body",)) -> lance.LanceDataset:
    for column in columns:
        dataset.create_scalar_index(column, "INVERTED", with_position=True)
    return dataset


def of_lance(dataset: lance.LanceDataset, query: FullTextQuery) -> dict[int, float]:
    table = dataset.to_table(columns=["id"], full_text_query=query, limit=1 << 20)
    return dict(zip(table["id"].to_pylist(), table["_score"].to_pylist(), strict=True))


def source_of(
    dataset: lance.LanceDataset, terms: Sequence[str], column: str = "body"
) -> tuple[Source, LanceTextIndex]:
    index = LanceTextIndex.open(dataset, f"{column}_idx")
    postings = {term: index.postings(term, positions=True) for term in terms}
    frequencies = {term: index.document_frequency(term) for term in terms}
    statistics = CorpusStatistics(*index.statistics(), frequencies)
    live = index.live_rows(dataset)
    return Source(statistics, postings, index.document_lengths(), live), index


def by_id(
    dataset: lance.LanceDataset, row_ids: npt.NDArray[np.uint64], scores: npt.NDArray[np.float32]
) -> dict[int, float]:
    table = dataset.to_table(columns=["id"], with_row_id=True)
    ids = dict(zip(table["_rowid"].to_pylist(), table["id"].to_pylist(), strict=True))
    return {ids[row]: value for row, value in zip(row_ids.tolist(), scores.tolist(), strict=True)}


def of_ours(
    dataset: lance.LanceDataset, query: str, operator: bm25.Operator = "or", column: str = "body"
) -> dict[int, float]:
    source, index = source_of(dataset, query.split(), column)
    (found,) = search([source], query.split(), operator=operator)
    return by_id(dataset, index.row_ids(found.rows), found.scores)


def assert_same(ours: dict[int, float], theirs: dict[int, float]) -> None:
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-4)


def assert_scores_as_lance(dataset: lance.LanceDataset) -> None:
    for query in QUERIES:
        for operator in ("or", "and"):
            theirs = of_lance(dataset, MatchQuery(query, "body", operator=OPERATORS[operator]))
            assert_same(of_ours(dataset, query, operator), theirs)
    for phrase in ("w1 w2", "w2 w1 w1", "w3 w3", "w1 absent"):
        assert_same(
            of_ours(dataset, phrase, "phrase"), of_lance(dataset, PhraseQuery(phrase, "body"))
        )


@pytest.mark.parametrize("count", [1, 7, 300, 20_000])
def test_a_dataset_scores_as_lance_scores_it(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(count)
    table = corpus(rng, 0, count)
    dataset = lance.write_dataset(table, tmp_path / "t", max_rows_per_file=6000)
    assert_scores_as_lance(indexed(dataset))


def test_deleted_rows_and_new_segments_count_as_lance_counts_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "t"
    indexed(lance.write_dataset(corpus(rng, 0, 2000), path, max_rows_per_file=500))
    lance.dataset(path).delete("id % 3 = 0")
    assert_scores_as_lance(lance.dataset(path))
    lance.dataset(path).delete("id < 600")
    lance.write_dataset(corpus(rng, 2000, 400), path, mode="append")
    lance.dataset(path).optimize.optimize_indices(num_indices_to_merge=0)
    assert_scores_as_lance(lance.dataset(path))
    lance.write_dataset(corpus(rng, 2400, 400), path, mode="append")
    lance.dataset(path).optimize.optimize_indices(num_indices_to_merge=1)
    assert_scores_as_lance(lance.dataset(path))
    lance.dataset(path).optimize.compact_files()
    assert_scores_as_lance(lance.dataset(path))


def test_columns_are_scored_apart_and_the_best_one_counts(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    table = corpus(rng, 0, 1500)
    dataset = indexed(lance.write_dataset(table, tmp_path / "t"), ("body", "title"))
    for operator in ("or", "and"):
        for boosts in (None, [1.0, 2.5]):
            columns = []
            for column in ("body", "title"):
                source, index = source_of(dataset, ["w2", "w3"], column)
                (found,) = search([source], ["w2", "w3"], operator=operator)
                columns.append((index.row_ids(found.rows), found.scores))
            ours = by_id(dataset, *best_column(columns, boosts))
            theirs = MultiMatchQuery(
                "w2 w3", ["body", "title"], boosts=boosts, operator=OPERATORS[operator]
            )
            assert_same(ours, of_lance(dataset, theirs))
    with pytest.raises(InvalidInput, match="3 boosts for 2 columns"):
        best_column(columns, [1.0, 2.0, 3.0])


def test_sources_together_score_as_one_dataset(tmp_path: Path) -> None:
    """A base, two generations and a MemTable against Lance on all of their rows at once."""
    rng = np.random.default_rng(3)
    tables = [corpus(rng, first, count) for first, count in ((0, 1500), (1500, 40), (1540, 200))]
    fresh = corpus(rng, 1740, 90)
    whole = indexed(lance.write_dataset(pa.concat_tables([*tables, fresh]), tmp_path / "whole"))
    datasets = [
        indexed(lance.write_dataset(table, tmp_path / f"part{ordinal}"))
        for ordinal, table in enumerate(tables)
    ]
    params = LanceTextIndex.open(datasets[0], "body_idx").params
    memory = TextIndex(IndexSpec("body_idx", "fts", "body", text=dict(params)))
    memory.append(memory.encode(fresh["body"].combine_chunks()), 0)

    for query in [*QUERIES, "the running Rivers"]:
        terms = [term for term, _ in memory.analyzer.tokenize(query)]
        opened = [source_of(dataset, terms) for dataset in datasets]
        postings = {term: memory.postings(term) for term in terms}
        frequencies = {term: len(hits.rows) for term, hits in postings.items()}
        statistics = CorpusStatistics(*memory.statistics(), frequencies)
        last = Source(statistics, postings, memory.document_lengths())
        sources = [*(source for source, _ in opened), last]
        for operator in ("or", "and"):
            found = search(sources, terms, operator=operator)
            ours = {
                int(row) + 1740: float(value)
                for row, value in zip(found[-1].rows, found[-1].scores, strict=True)
            }
            for dataset, (_, index), part in zip(datasets, opened, found[:-1], strict=True):
                ours |= by_id(dataset, index.row_ids(part.rows), part.scores)
            theirs = of_lance(whole, MatchQuery(query, "body", operator=OPERATORS[operator]))
            assert_same(ours, theirs)
            best = search(sources, terms, 10, operator)
            assert sum(map(len, best)) == min(10, len(theirs))
            scores = sorted(
                (value for part in best for value in part.scores.tolist()), reverse=True
            )
            expected = sorted(theirs.values(), reverse=True)[:10]
            assert scores == pytest.approx(expected, rel=1e-4)


def test_a_phrase_keeps_the_gaps_of_removed_words(tmp_path: Path) -> None:
    texts = ["state of the art", "state art", "the state of our art", "art of the state", "state"]
    table = pa.table({"id": range(len(texts)), "body": texts})
    dataset = indexed(lance.write_dataset(table, tmp_path / "t"))
    for phrase in ("state of the art", "the state of the art", "state art"):
        tokens = [(token.text, token.position) for token in lance.tokenize(phrase)]
        terms, positions = [term for term, _ in tokens], [place for _, place in tokens]
        source, index = source_of(dataset, terms)
        (found,) = search([source], terms, operator="phrase", positions=positions)
        ours = by_id(dataset, index.row_ids(found.rows), found.scores)
        assert_same(ours, of_lance(dataset, PhraseQuery(phrase, "body")))


# --- without Lance ---

postings_of_rows = st.lists(
    st.dictionaries(st.integers(0, 400), st.integers(1, 5), max_size=60), min_size=1, max_size=3
)


def source_from(lists: list[dict[int, int]], live: npt.NDArray[np.bool_] | None) -> Source:
    postings = {
        f"t{ordinal}": Postings(
            np.array(sorted(hits), dtype=np.int64),
            np.array([hits[row] for row in sorted(hits)], dtype=np.int32),
        )
        for ordinal, hits in enumerate(lists)
    }
    lengths = np.arange(401, dtype=np.int32) % 7 + 5
    frequencies = {term: len(hits.rows) for term, hits in postings.items()}
    return Source(CorpusStatistics(401, int(lengths.sum()), frequencies), postings, lengths, live)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(postings_of_rows, min_size=1, max_size=3),
    st.integers(0, 150),
    st.sampled_from(["or", "and"]),
    st.booleans(),
)
def test_the_best_are_the_first_of_all_matches(
    drawn: list[list[dict[int, int]]], k: int, operator: bm25.Operator, some_dead: bool
) -> None:
    live = np.arange(401) % 3 != 0 if some_dead else None
    sources = [source_from(lists, live) for lists in drawn]
    terms = ["t0", "t1", "t1"]
    everything = search(sources, terms, operator=operator)
    for source, lists, found in zip(sources, drawn, everything, strict=True):
        combine = set.union if operator == "or" else set.intersection
        rows = combine(*(set(lists[at]) if at < len(lists) else set() for at in (0, 1)))
        expected = sorted(row for row in rows if source.live is None or source.live[row])
        assert found.rows.tolist() == expected
        assert (found.scores > 0).all()

    ranked = sorted(
        (-value, ordinal, row)
        for ordinal, found in enumerate(everything)
        for row, value in zip(found.rows.tolist(), found.scores.tolist(), strict=True)
    )[:k]
    best = search(sources, terms, k, operator)
    for ordinal, found in enumerate(best):
        mine = [(row, -value) for value, where, row in ranked if where == ordinal]
        assert list(zip(found.rows.tolist(), found.scores.tolist(), strict=True)) == mine


def test_common_and_rare_terms_take_different_roads_to_the_same_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    lists = [dict.fromkeys(rng.choice(401, size, replace=False).tolist(), 2) for size in (9, 300)]
    answers: list[Matches] = []
    for factor in (0, 1 << 20):
        monkeypatch.setattr(bm25, "_SPARSE_FACTOR", factor)
        source = source_from(lists, None)
        answers += search([source], ["t0", "t1"], operator="or")
        answers += search([source], ["t0", "t1"], operator="and")
    for dense, sparse in zip(answers[:2], answers[2:], strict=True):
        assert dense.rows.tolist() == sparse.rows.tolist()
        assert dense.scores.tolist() == pytest.approx(sparse.scores.tolist(), rel=1e-6)


def test_what_a_search_refuses() -> None:
    source = source_from([{1: 1}], None)
    with pytest.raises(InvalidInput, match="no positions"):
        search([source], ["t0"], operator="phrase")
    with pytest.raises(InvalidInput, match="k is -1"):
        search([source], ["t0"], -1)
    assert [len(found) for found in search([source], ["t0"], 0)] == [0]
    assert search([], ["t0"], 5) == []
    assert CorpusStatistics.total([]) == CorpusStatistics(0, 0, {})
