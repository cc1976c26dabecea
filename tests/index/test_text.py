"""The in-memory full-text index sees the terms that Lance would index."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader

from penstock.errors import InvalidInput
from penstock.index import text as text_module
from penstock.index.base import IndexSpec, load_index_specs
from penstock.index.text import TextAnalyzer, TextIndex

TOKENIZERS: list[dict[str, Any]] = [
    {},
    {"with_position": True},
    {"stem": False, "remove_stop_words": False, "with_position": True},
    {"stem": False, "custom_stop_words": ["cold", "zq7"], "with_position": True},
    {"lower_case": False, "ascii_folding": False, "max_token_length": 5},
    {"max_token_length": None, "language": "French", "with_position": True},
    {"base_tokenizer": "whitespace", "with_position": True},
    {"base_tokenizer": "whitespace", "max_token_length": 3, "stem": False},
    {"base_tokenizer": "raw", "max_token_length": None},
    {"base_tokenizer": "ngram"},
    {"base_tokenizer": "icu", "with_position": True},
    {"base_tokenizer": "code", "index_operators": True, "with_position": True},
]
words = st.sampled_from(
    [
        "the",
        "The",
        "rivers",
        "running",
        "cold",
        "a",
        "zq7",
        "Été",
        "naïve",
        "x1",
        "ÆON",
        "日本",
        "I",
    ]
)
separators = st.sampled_from([" ", "-", "\t", "\x0b", "\x1c", "_", ". ", "\u2014", "\u00a0", "'"])
documents = st.one_of(
    st.none(),
    st.text(max_size=30),
    st.text(alphabet=st.characters(max_codepoint=127), max_size=60),
    st.lists(st.tuples(words, separators), max_size=12).map(
        lambda pairs: "".join(word + separator for word, separator in pairs)
    ),
)


def spec_of(options: dict[str, Any]) -> IndexSpec:
    return IndexSpec("t", "fts", "body", text={"lance_tokenizer": "text", **options})


def expected_postings(
    texts: Sequence[str | None], options: dict[str, Any]
) -> dict[str, dict[int, list[int]]]:
    """Positions by term and row, by asking Lance about each document."""
    options = {key: value for key, value in options.items() if key != "with_position"}
    if options.get("base_tokenizer") == "code":
        options["analyzer"] = "code"
    expected: dict[str, dict[int, list[int]]] = {}
    for row, document in enumerate(texts):
        for token in lance.tokenize(document, **options) if document is not None else ():
            expected.setdefault(token.text, {}).setdefault(row, []).append(token.position)
    return expected


def assert_holds(index: TextIndex, expected: dict[str, dict[int, list[int]]], rows: int) -> None:
    lengths = np.zeros(rows, dtype=int)
    for term, by_row in expected.items():
        postings = index.postings(term)
        assert postings.rows.tolist() == list(by_row)
        assert postings.frequencies.tolist() == [len(places) for places in by_row.values()]
        if postings.positions is not None and postings.bounds is not None:
            split = np.split(postings.positions, postings.bounds[1:-1])
            assert [part.tolist() for part in split] == list(by_row.values())
        for row, places in by_row.items():
            lengths[row] += len(places)
    assert index.document_lengths().tolist() == lengths.tolist()
    assert index.statistics() == (np.count_nonzero(lengths), lengths.sum())
    assert index.analyzer.vocabulary_size == len(expected)


@pytest.mark.parametrize("options", TOKENIZERS, ids=str)
def test_terms_frequencies_and_positions_are_those_of_lance(options: dict[str, Any]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(documents, max_size=8), st.integers(1, 4))
    def check(texts: list[str | None], batch_rows: int) -> None:
        index = TextIndex(spec_of(options))
        for first in range(0, len(texts), batch_rows):
            batch = pa.array(texts[first : first + batch_rows], pa.string())
            index.append(index.encode(batch), first)
        assert_holds(index, expected_postings(texts, options), len(texts))

    check()


@pytest.mark.parametrize(
    "options",
    [
        {"custom_stop_words": ["nights"]},
        {"base_tokenizer": "whitespace", "stem": False},
        {"base_tokenizer": "raw"},
        {"analyzer": "code", "index_operators": True},
    ],
    ids=str,
)
def test_an_index_built_by_lance_counts_the_same_documents(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    texts = ["the cold river", None, "", "the", "Cold, COLD nights!", "été — naïve", " ", "a+=b c"]
    table = pa.table({"body": pa.array(texts * 20, pa.string())})
    base = lance.write_dataset(table, str(tmp_path / "t"))
    base.create_scalar_index("body", "INVERTED", name="t", **options)
    (spec,) = load_index_specs(base)
    index = TextIndex(spec)
    index.append(index.encode(table["body"].combine_chunks()), 0)
    (documents_file,) = (tmp_path / "t" / "_indices").glob("*/part_*_docs.lance")
    theirs = LanceFileReader(str(documents_file)).read_all().to_table()
    lengths = index.document_lengths()
    assert np.flatnonzero(lengths).tolist() == sorted(theirs["_rowid"].to_pylist())
    assert lengths[theirs["_rowid"].to_numpy()].tolist() == theirs["_num_tokens"].to_pylist()
    for query in ("cold", "nights", "ete", "c", "the cold river"):
        found = base.to_table(columns=[], full_text_query=query, with_row_id=True)
        terms = [term for term, _ in index.analyzer.tokenize(query)]
        rows = {row for term in terms for row in index.postings(term).rows.tolist()}
        assert set(found["_rowid"].to_pylist()) == rows


def test_many_small_batches_are_merged_and_older_views_stay_whole() -> None:
    options = {"with_position": True}
    texts = [f"river {i % 7} cold river {i % 3}" for i in range(1500)]
    index = TextIndex(spec_of(options))
    for row, document in enumerate(texts):
        index.append(index.encode(pa.array([document])), row)
    assert len(index._runs) < 64
    assert_holds(index, expected_postings(texts, options), len(texts))
    seen = index.postings("river", visible_rows=100)
    assert seen.rows.tolist() == list(range(100))
    assert seen.positions is not None
    assert seen.positions.tolist() == [0, 3] * 100
    assert index.statistics(visible_rows=10) == (10, 50)
    assert index.postings("absent").rows.tolist() == []


def test_threads_that_encode_together_agree_on_every_term() -> None:
    index = TextIndex(spec_of({}))
    batches = [
        pa.array([f"word{(i * 7 + j) % 900} thing{j} shared" for j in range(200)])
        for i in range(24)
    ]
    with ThreadPoolExecutor(8) as pool:
        deltas = list(pool.map(index.encode, batches))
    for number, delta in enumerate(deltas):
        index.append(delta, number * 200)
    texts = [document for batch in batches for document in batch.to_pylist()]
    assert_holds(index, expected_postings(texts, {}), len(texts))


def test_the_memory_of_raw_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "MEMO_LIMIT", 50)
    monkeypatch.setattr(text_module, "VOCABULARY_LIMIT", 30)
    index = TextIndex(spec_of({}))
    texts = [f"alpha{i} beta{i} gamma" for i in range(40)]
    for row, document in enumerate(texts):
        index.append(index.encode(pa.array([document])), row)
        assert len(index.analyzer._memo) <= 50
    assert_holds(index, expected_postings(texts, {}), len(texts))
    assert index.successor().analyzer is not index.analyzer
    small = TextIndex(spec_of({}))
    assert small.successor().analyzer is small.analyzer


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidInput, match="json"):
        TextAnalyzer({"lance_tokenizer": "json"})
    with pytest.raises(InvalidInput, match="strings"):
        TextIndex(spec_of({})).encode(pa.array([1]))
    with pytest.raises(InvalidInput, match="not a full-text index"):
        TextIndex(IndexSpec("b", "btree", "id"))
