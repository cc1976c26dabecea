"""The best rows of long lists are those that scoring every row would find."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.index import bm25, impact
from penstock.index.bm25 import CorpusStatistics, Source, best, match, phrase, rows_with_phrase
from penstock.index.impact import RankedPostings, best_chosen_rows, best_rows
from penstock.index.text import Postings

ROWS = 6000


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([0.001, 0.02, 0.1, 0.5, 0.99]), min_size=1, max_size=3),
    st.sampled_from([1, 10, 100]),
    st.sampled_from([3, 60, 3000]),
    st.booleans(),
    st.sampled_from([1.0, 0.5, 0.01]),
)
def test_nothing_better_is_left_out(
    seed: int, shares: list[float], k: int, longest: int, every: bool, alive: float
) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(2 / longest, ROWS), longest).astype(np.int32)
    live = rng.random(ROWS) < alive
    postings = {}
    for number, share in enumerate(shares):
        rows = np.flatnonzero(rng.random(ROWS) < share)
        frequencies = np.minimum(rng.zipf(2.0, len(rows)), 400).astype(np.int32)
        postings[f"t{number}"] = Postings(rows, frequencies)
    frequencies_of_terms = {term: len(hits.rows) for term, hits in postings.items()}
    corpus = CorpusStatistics(ROWS, int(lengths.sum()), frequencies_of_terms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impact, "SHORT_ROWS", 100)
        lists = [(RankedPostings(hits, lengths), corpus.idf(t)) for t, hits in postings.items()]
        found = best_rows(lists, lengths, live, corpus.average_length, k, require_all=every)
    if found is None:  # it says so where it would have to score most rows
        return
    source = Source(corpus, postings, lengths, live)
    (expected,) = best([match(source, list(postings), corpus, "and" if every else "or")], k)
    assert found.scores.tolist() == pytest.approx(expected.scores.tolist(), rel=1e-6)
    assert live[found.rows].all()
    assert len(set(found.rows.tolist())) == len(found)


def test_common_words_do_not_mean_scoring_everything() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 60, 200_000).astype(np.int32)
    lists = []
    for share in (0.7, 0.4):
        rows = np.flatnonzero(rng.random(len(lengths)) < share)
        frequencies = np.minimum(rng.zipf(2.0, len(rows)), 30).astype(np.int32)
        lists.append((RankedPostings(Postings(rows, frequencies), lengths), 1.0 - share))
    for every in (False, True):
        assert best_rows(lists, lengths, None, 30.0, 10, require_all=every) is not None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["a", "b", "c"]), min_size=2, max_size=4),
    st.sampled_from([1, 3, 40]),
    st.sampled_from([5, 700]),
)
def test_the_best_rows_with_a_phrase_are_found_without_trying_all(
    seed: int, terms: list[str], k: int, chunk_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    documents = [
        rng.choice(["a", "b", "c", "d"], int(n), p=[0.5, 0.3, 0.1, 0.1])
        for n in rng.integers(0, 16, 800)
    ]
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    live = rng.random(len(documents)) < 0.8
    postings = {}
    for term in set(terms):
        places = [np.flatnonzero(document == term) for document in documents]
        counts = np.array([len(found) for found in places])
        rows = np.flatnonzero(counts)
        bounds = np.concatenate([[0], np.cumsum(counts[rows])])
        flat = np.concatenate(places).astype(np.int32)
        postings[term] = Postings(rows, counts[rows].astype(np.int32), flat, bounds)
    text = " ".join(terms)
    with_phrase = [row for row, words in enumerate(documents) if f" {text} " in _spaced(words)]
    frequencies = {term: len(hits.rows) for term, hits in postings.items()}
    corpus = CorpusStatistics(len(lengths), int(lengths.sum()), frequencies)
    source = Source(corpus, postings, lengths, live)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "_PHRASE_ROWS", chunk_rows)
        patch.setattr(bm25, "_FIRST_PHRASES", 2)
        patch.setattr(impact, "SHORT_ROWS", 10)
        every = match(source, terms, corpus, "phrase")
        assert every.rows.tolist() == [row for row in with_phrase if live[row]]
        (expected,) = best([every], k)
        (some,) = best([match(source, terms, corpus, "phrase", k=k)], k)
        assert some.scores.tolist() == pytest.approx(expected.scores.tolist(), rel=1e-6)
        lists = [
            (RankedPostings(hits, lengths), terms.count(term) * corpus.idf(term))
            for term, hits in postings.items()
        ]
        found = best_chosen_rows(
            lists,
            lengths,
            live,
            corpus.average_length,
            k,
            lambda rows: rows_with_phrase(rows, postings, phrase(terms, None), len(lengths)),
        )
    if found is not None:
        assert found.scores.tolist() == pytest.approx(expected.scores.tolist(), rel=1e-5)
        assert set(found.rows.tolist()) <= set(every.rows.tolist())


def _spaced(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "
