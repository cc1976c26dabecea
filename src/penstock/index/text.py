"""The full-text index of a MemTable: an inverted index with the base index's own tokenizer.

Lance's tokenizer is exact but costs tens of microseconds a call. Its usual chain splits a document
into raw tokens and maps each of them, on its own, to a term or to nothing (case, stop words, stem,
folding, length). So `TextAnalyzer` splits documents itself and remembers what Lance makes of each
raw token; tokens not met before are handed to Lance together, in one call. Tokenizers that do not
work token by token always see the whole document.

`encode` turns a batch into sorted postings and touches nothing shared but the analyzer, which is
safe for many threads; it runs outside every lock. `append` adds the postings as a run and merges
small runs, sixteen at a time, up to a size that keeps the longest merge at ten milliseconds.

Invariants
- Terms, frequencies and document lengths are those Lance would index for the same text.
- Row i of the index is row i of the MemTable; runs are in row order, and so are postings.
- A null document, or one that loses all its tokens, is not a document: its length is 0.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec
from penstock.index.growing import GrowingArray

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_TOKENIZER_OPTIONS = (
    "base_tokenizer",
    "language",
    "max_token_length",
    "lower_case",
    "stem",
    "remove_stop_words",
    "custom_stop_words",
    "ascii_folding",
    "min_ngram_length",
    "max_ngram_length",
    "prefix_only",
    "split_identifiers",
    "split_on_numerics",
    "preserve_original",
    "index_operators",
)
_NO_FILTERS: dict[str, Any] = {
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
    "max_token_length": None,
}
_BLANK_SEPARATORS = bytes(
    code if code >= 128 or chr(code).isalnum() else ord(" ") for code in range(256)
)
_NOT_ASCII_WHITESPACE = re.compile(r"[^ \t\n\r\x0c]+")
_SENTINELS = ("zq7", "q9", "z", "7")

MEMO_LIMIT = 1 << 20
VOCABULARY_LIMIT = 1 << 20
_MERGE_WIDTH = 16
_MERGED_POSTINGS_LIMIT = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Term ids of several documents one after the other, and how many are each one's.

    Where positions is None they are the ordinals of the ids in their document, and an id of -1
    stands for a token that was removed. Otherwise no id is -1.
    """

    ids: list[int] | Int64s
    counts: Sequence[int] | Int64s
    positions: list[int] | None = None


class TextAnalyzer:
    """Documents to term ids, for one tokenizer. Ids count up from 0 and are never reused."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        if params.get("lance_tokenizer") not in (None, "text"):
            raise InvalidInput(
                f"documents of kind {params['lance_tokenizer']!r} are not kept in memory; "
                f"index a string column"
            )
        self._options = {key: params[key] for key in _TOKENIZER_OPTIONS if key in params}
        self._base = params.get("base_tokenizer") or "simple"
        if self._base == "code":
            self._options["analyzer"] = "code"
        self._memo: dict[str, int] = {"": -1}
        self._terms: dict[str, int] = {}
        self._lock = threading.Lock()
        token_by_token = self._base in ("simple", "whitespace")
        self._sentinel = self._find_sentinel() if token_by_token else None

    @property
    def vocabulary_size(self) -> int:
        return len(self._terms)

    def term_id(self, term: str) -> int | None:
        """The id of a term, or None if no document so far has it."""
        return self._terms.get(term)

    def tokenize(self, text: str) -> list[tuple[str, int]]:
        """Terms and their positions, as Lance gives them; for queries."""
        return [(token.text, token.position) for token in lance.tokenize(text, **self._options)]

    def encode_column(self, texts: pa.Array) -> EncodedText:
        """The term ids of a column of documents, in Arrow where they are plain ASCII."""
        if self._sentinel is not None and self._base == "simple" and pa.types.is_string(texts.type):
            if texts.null_count:
                texts = texts.fill_null("")
            bounds = np.frombuffer(texts.buffers()[1], np.int32)
            bounds = bounds[texts.offset : texts.offset + len(texts) + 1]
            data = texts.buffers()[2]
            data = b"" if data is None else data[int(bounds[0]) : int(bounds[-1])].to_pybytes()
            if data.isascii():
                return self._encode_ascii(data, bounds - bounds[0])
        return self.encode(texts.to_pylist())

    def _encode_ascii(self, data: bytes, bounds: Int32s) -> EncodedText:
        """Split at everything that is no letter or digit, and look up each distinct token once."""
        blanked = pa.StringArray.from_buffers(
            len(bounds) - 1,
            pa.py_buffer(np.ascontiguousarray(bounds)),
            pa.py_buffer(data.translate(_BLANK_SEPARATORS)),
        )
        # A blank at either end leaves an empty token there, which is no term.
        split = pc.ascii_split_whitespace(blanked)
        encoded = split.values.dictionary_encode()
        ids = np.array(self._ids_of_raw(encoded.dictionary.to_pylist()), dtype=np.int64)
        counts = np.diff(np.asarray(split.offsets)).astype(np.int64)
        return EncodedText(ids[np.asarray(encoded.indices)], counts)

    def encode(self, documents: Sequence[str | None]) -> EncodedText:
        """The documents' term ids; safe for many threads."""
        if self._sentinel is None:
            return self._encode_whole(documents)
        flat: list[str] = []
        counts: list[int] = []
        for document in documents:
            raw = self._raw_tokens(document) if document else []
            counts.append(len(raw))
            flat += raw
        return EncodedText(self._ids_of_raw(flat), counts)

    def _encode_whole(self, documents: Sequence[str | None]) -> EncodedText:
        terms: list[str] = []
        counts: list[int] = []
        positions: list[int] = []
        for document in documents:
            tokens = [] if document is None else self.tokenize(document)
            counts.append(len(tokens))
            terms += [term for term, _ in tokens]
            positions += [position for _, position in tokens]
        return EncodedText(self._ids_of_terms(terms), counts, positions)

    def _raw_tokens(self, document: str) -> list[str]:
        if self._base == "whitespace":
            return _NOT_ASCII_WHITESPACE.findall(document)
        if document.isascii():
            return document.encode().translate(_BLANK_SEPARATORS).decode().split()
        # Which other characters are letters is for Lance to say.
        tokens = lance.tokenize(document, base_tokenizer=self._base, **_NO_FILTERS)
        return [token.text for token in tokens]

    def _ids_of_raw(self, raw: list[str]) -> list[int]:
        found = list(map(self._memo.get, raw))
        if None not in found:
            return found  # type: ignore[return-value]  # just checked
        missing = {token for token, term in zip(raw, found, strict=True) if term is None}
        learnt = self._learn(sorted(missing))
        return [
            learnt[token] if term is None else term for token, term in zip(raw, found, strict=True)
        ]

    def _learn(self, raw: list[str]) -> dict[str, int]:
        """Ask Lance for the terms of raw tokens, all in one call.

        A first token that no filter removes anchors the positions, which tell the others apart.
        """
        tokens = self.tokenize(" ".join([f"{self._sentinel}", *raw]))
        kept = [(raw[position - 1], term) for term, position in tokens[1:]]
        learnt = dict.fromkeys(raw, -1)
        ids = self._ids_of_terms([term for _, term in kept])
        learnt.update(zip((token for token, _ in kept), ids, strict=True))
        if len(self._memo) + len(learnt) > MEMO_LIMIT:
            self._memo.clear()
        self._memo.update(learnt, **{"": -1})
        return learnt

    def _ids_of_terms(self, terms: list[str]) -> list[int]:
        found = list(map(self._terms.get, terms))
        if None not in found:
            return found  # type: ignore[return-value]  # just checked
        with self._lock:
            for term in terms:
                if term not in self._terms:
                    self._terms[term] = len(self._terms)
        return [self._terms[term] for term in terms]

    def _find_sentinel(self) -> str | None:
        for candidate in _SENTINELS:
            tokens = self.tokenize(candidate)
            if len(tokens) == 1 and tokens[0][1] == 0:
                return candidate
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Postings:
    """Rows that have a term, ascending, with the term's frequency in each.

    `positions[bounds[i]:bounds[i + 1]]` are the term's places in row i, if the index keeps them.
    """

    rows: Int64s
    frequencies: Int32s
    positions: Int32s | None = None
    bounds: Int64s | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TextDelta:
    """Postings sorted by term, then row; as a batch's, rows count from the batch's first."""

    terms: Int32s
    rows: Int64s
    frequencies: Int32s
    positions: Int32s | None
    document_lengths: Int32s

    def __len__(self) -> int:
        return len(self.document_lengths)


class TextIndex:
    """One full-text index over the rows of one MemTable. One appender; any number of readers."""

    def __init__(self, spec: IndexSpec, analyzer: TextAnalyzer | None = None) -> None:
        if spec.text is None:
            raise InvalidInput(f"index {spec.name!r} of kind {spec.kind} is not a full-text index")
        self.name, self.column = spec.name, spec.column
        self.analyzer = analyzer or TextAnalyzer(spec.text)
        self._spec = spec
        self.params: Mapping[str, Any] = spec.text
        self._with_positions = bool(spec.text.get("with_position"))
        self._lengths = GrowingArray(np.int32)
        self._runs: tuple[TextDelta, ...] = ()

    def successor(self) -> TextIndex:
        """An empty index for the next MemTable, keeping what was learnt unless it grew large."""
        full = self.analyzer.vocabulary_size > VOCABULARY_LIMIT
        return TextIndex(self._spec, None if full else self.analyzer)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def nbytes(self) -> int:
        return self._lengths.nbytes + sum(
            run.terms.nbytes
            + run.rows.nbytes
            + run.frequencies.nbytes
            + (0 if run.positions is None else run.positions.nbytes)
            for run in self._runs
        )

    # --- building ---

    def encode(self, texts: pa.Array) -> TextDelta:
        """The postings of a batch. Any number of threads may encode at once."""
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise InvalidInput(f"column {self.column!r} is {texts.type}, full text needs strings")
        if len(texts) == 1:
            return _postings_of_one(self.analyzer.encode(texts.to_pylist()), self._with_positions)
        encoded = self.analyzer.encode_column(texts)
        return _sorted_postings(encoded, self._with_positions)

    def append(self, delta: TextDelta, first_row: int) -> None:
        """Add a batch whose first row is the MemTable's row `first_row`."""
        self._lengths.append(delta.document_lengths, first_row)
        if len(delta.terms):
            run = TextDelta(
                delta.terms,
                delta.rows + first_row,
                delta.frequencies,
                delta.positions,
                delta.document_lengths[:0],
            )
            self._runs = _merge_small((*self._runs, run))

    # --- reading ---

    def document_lengths(self, visible_rows: int | None = None) -> Int32s:
        """Terms of every row, 0 where there is no document."""
        return self._lengths.values(visible_rows)

    def statistics(self, visible_rows: int | None = None) -> tuple[int, int]:
        """How many documents there are, and how many terms in all of them."""
        lengths = self.document_lengths(visible_rows)
        return int(np.count_nonzero(lengths)), int(lengths.sum(dtype=np.int64))

    def postings(
        self, term: str, visible_rows: int | None = None, *, positions: bool = True
    ) -> Postings:
        """The rows below `visible_rows` that have the term; a term as the tokenizer leaves it.

        Without positions, if they are not needed; an index that has none gives none.
        """
        positions = positions and self._with_positions
        known = self.analyzer.term_id(term)
        ends = np.array([-1, -1] if known is None else [known, known + 1], dtype=np.int32)
        limit = len(self._lengths) if visible_rows is None else visible_rows
        rows, frequencies, places = [np.empty(0, np.int64)], [np.empty(0, np.int32)], []
        for run in self._runs:
            start, stop = run.terms.searchsorted(ends).tolist()
            if stop > start and run.rows[stop - 1] >= limit:
                stop = start + int(run.rows[start:stop].searchsorted(limit))
            if start == stop:
                continue
            rows.append(run.rows[start:stop])
            frequencies.append(run.frequencies[start:stop])
            if positions and run.positions is not None:
                first = int(run.frequencies[:start].sum(dtype=np.int64))
                last = first + int(run.frequencies[start:stop].sum(dtype=np.int64))
                places.append(run.positions[first:last])
        joined = np.concatenate(frequencies)
        if not positions:
            return Postings(np.concatenate(rows), joined)
        bounds = np.concatenate([[0], np.cumsum(joined, dtype=np.int64)])
        return Postings(np.concatenate(rows), joined, _concatenated(places), bounds)


def _sorted_postings(encoded: EncodedText, with_positions: bool) -> TextDelta:
    documents = len(encoded.counts)
    per_document = np.asarray(encoded.counts, dtype=np.int64)
    terms = np.array(encoded.ids, dtype=np.int64)
    rows = np.repeat(np.arange(documents), per_document)
    places = None
    if with_positions and encoded.positions is not None:
        places = np.array(encoded.positions, dtype=np.int64)
    elif with_positions:
        places = np.arange(len(terms))
    kept = terms >= 0
    if not kept.all():
        terms, rows = terms[kept], rows[kept]
        places = None if places is None else places[kept]
    lengths = np.bincount(rows, minlength=documents).astype(np.int32)
    key = terms * documents + rows
    ordered_places = None
    if places is None:
        key.sort()
    else:
        if len(places):
            firsts = np.cumsum(lengths) - lengths
            places = places - np.repeat(places[np.minimum(firsts, len(places) - 1)], lengths)
        order = np.argsort(key, kind="stable")
        key = key[order]
        ordered_places = places[order].astype(np.int32)
    starts = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else key
    distinct = key[starts]
    return TextDelta(
        (distinct // documents).astype(np.int32) if documents else distinct.astype(np.int32),
        distinct % documents if documents else distinct,
        np.diff(starts, append=len(key)).astype(np.int32),
        ordered_places,
        lengths,
    )


def _postings_of_one(encoded: EncodedText, with_positions: bool) -> TextDelta:
    """`_sorted_postings` of a single document, where plain Python is quicker."""
    ids = encoded.ids
    places: dict[int, list[int]] = {}
    for position, term in zip(encoded.positions or range(len(ids)), ids, strict=True):
        places.setdefault(term, []).append(position)
    removed = len(places.pop(-1, ()))
    terms = sorted(places)
    found = [places[term] for term in terms]
    flat = None
    if with_positions:
        first = min((at[0] for at in found), default=0)
        flat = np.array([place - first for at in found for place in at], dtype=np.int32)
    return TextDelta(
        np.array(terms, dtype=np.int32),
        np.zeros(len(terms), dtype=np.int64),
        np.array([len(at) for at in found], dtype=np.int32),
        flat,
        np.array([len(ids) - removed], dtype=np.int32),
    )


def _merge_small(runs: tuple[TextDelta, ...]) -> tuple[TextDelta, ...]:
    """Replace the runs at the end that are no larger than the last one, by powers of sixteen, by
    one run, once there are sixteen of them."""
    while len(runs) >= _MERGE_WIDTH:
        last_level = _level(runs[-1])
        first = len(runs) - 1
        while first > 0 and _level(runs[first - 1]) <= last_level:
            first -= 1
        total = sum(len(run.terms) for run in runs[first:])
        if len(runs) - first < _MERGE_WIDTH or total > _MERGED_POSTINGS_LIMIT:
            break
        runs = (*runs[:first], merge_runs(runs[first:]))
    return runs


def _level(run: TextDelta) -> int:
    return (len(run.terms).bit_length() - 1) // 4


def merge_runs(runs: Sequence[TextDelta]) -> TextDelta:
    """One run with the postings of several, whose rows follow each other."""
    terms = np.concatenate([run.terms for run in runs])
    frequencies = np.concatenate([run.frequencies for run in runs])
    order = np.argsort(terms, kind="stable")
    positions = None
    if runs[0].positions is not None:
        flat = _concatenated([run.positions for run in runs if run.positions is not None])
        ends = np.cumsum(frequencies, dtype=np.int64)
        sizes = frequencies[order]
        source = np.repeat((ends - frequencies)[order] - (np.cumsum(sizes) - sizes), sizes)
        positions = flat[source + np.arange(len(flat))]
    return TextDelta(
        terms[order],
        np.concatenate([run.rows for run in runs])[order],
        frequencies[order],
        positions,
        runs[0].document_lengths,
    )


def _concatenated(parts: Sequence[Int32s]) -> Int32s:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
