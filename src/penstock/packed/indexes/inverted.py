"""The `inverted` index: exact values of any scalar type, found by tantivy.

`build` takes the distinct values in order, gives each a number, and puts one document per value
into tantivy (`Terms`); which rows have which value is a pair of arrays beside it (`Postings`).
Every question goes to tantivy, which answers with numbers of values, and those become rows in one
step.

Entries: one per tantivy file, named in the meta's `file_names`; `index_null_offset`, the null rows
as u64, if the meta's `has_null` says so; then the postings, `inverted_postings_index` u32[values+1]
and `inverted_postings_rows` u32[non-null rows]. The files are ours: Milvus keeps the same layout
around files of its own fork of tantivy, and neither can load what the other wrote.

Floats are indexed with -0.0 as 0.0 and one NaN per sign, in tantivy's order of floats, which is
the one that tables have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import MAX_ROWS, IndexKind, PackedIndex
from penstock.packed.indexes.like import like_exact, like_mask, like_prefix
from penstock.packed.indexes.ordered import TextKeys
from penstock.packed.indexes.postings import (
    NULL_OFFSETS,
    Postings,
    damaged,
    read_array,
    read_nulls,
    rows_bitmap,
    shared_prefix,
    write_nulls,
)
from penstock.packed.indexes.terms import Terms, field_of, is_text

POSTINGS_INDEX, POSTINGS_ROWS = "inverted_postings_index", "inverted_postings_rows"


class InvertedIndex(PackedIndex):
    kind = "inverted"

    def __init__(
        self,
        terms: Terms,
        postings: Postings,
        nulls: npt.NDArray[np.uint64],
        value_type: pa.DataType,
    ) -> None:
        super().__init__(len(postings.rows) + len(nulls), value_type)
        self._terms = terms
        self._postings = postings
        self._nulls = nulls

    def _held_bytes(self) -> int:
        return self._terms.nbytes + self._postings.nbytes + self._nulls.nbytes

    def write_entries(self, writer: EntryWriter) -> None:
        self._terms.write(writer)
        write_nulls(writer, self._nulls)
        writer.write_entry(POSTINGS_INDEX, self._postings.borders.astype("<u4"))
        writer.write_entry(POSTINGS_ROWS, self._postings.rows.astype("<u4", copy=False))

    def is_null(self) -> BitMap:
        return rows_bitmap(self._nulls)

    def one_of(self, values: pa.Array) -> BitMap:
        if pa.types.is_floating(self.value_type):
            asked = _ordered(_normal(values.to_numpy(zero_copy_only=False)))
            return self._postings.of(self._terms.ordinals(_unordered(np.unique(asked)).tolist()))
        return self._postings.of(self._terms.ordinals(pc.unique(values).to_pylist()))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        first, last = (None if end is None else end.as_py() for end in (low, high))
        if is_text(self.value_type):
            shared = "" if first is None or last is None else shared_prefix(first, last)
            texts, at = self._below(shared)
            begin, end = texts.ends(low, high, with_low, with_high)
            return self._postings.span(at + begin, at + end)
        if pa.types.is_boolean(self.value_type):
            inside = [
                value
                for value in (False, True)
                if (first is None or (value >= first if with_low else value > first))
                and (last is None or (value <= last if with_high else value < last))
            ]
            return self._postings.of(self._terms.ordinals(inside))
        if pa.types.is_floating(self.value_type):
            first, last = (
                None if end is None else float(_normal(np.array([end]))[0]) for end in (first, last)
            )
        return self._postings.span(*self._terms.span(first, last, with_low, with_high))

    def prefix(self, text: str) -> BitMap:
        self._wants_text("prefix")
        texts, at = self._below(text)
        return self._postings.span(at, at + len(texts))

    def like(self, pattern: str) -> BitMap:
        self._wants_text("like")
        exact = like_exact(pattern)
        if exact is not None:
            return self._postings.of(self._terms.ordinals([exact]))
        texts, at = self._below(like_prefix(pattern))
        return self._postings.of(np.flatnonzero(like_mask(texts.values, pattern)) + at)

    def _below(self, prefix: str) -> tuple[TextKeys, int]:
        if not prefix:
            self._nbytes = None  # all terms, which are kept
        return self._terms.below(prefix)

    def _wants_text(self, op: str) -> None:
        if not is_text(self.value_type):
            raise self._cannot(op)


class InvertedKind(IndexKind):
    kind = "inverted"

    def build(self, array: pa.Array, **options: Any) -> InvertedIndex:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if options:
            raise InvalidInput(f"an inverted index has no option {', '.join(map(repr, options))}")
        if len(array) > MAX_ROWS:
            raise InvalidInput(f"{len(array)} rows; an index holds at most {MAX_ROWS}: split it")
        field_of(array.type)
        values, codes = distinct(array)
        return InvertedIndex(
            Terms.build(values),
            Postings.derive(codes, len(values)),
            np.flatnonzero(codes < 0).astype(np.uint64),
            array.type,
        )

    def load(self, reader: EntryReader, value_type: pa.DataType) -> InvertedIndex:
        field_of(value_type)
        nulls = read_nulls(reader)
        terms = Terms.load(reader, value_type)
        rows = len(read_array(reader, POSTINGS_ROWS, "<u4")) + len(nulls)
        postings = Postings.read(reader, POSTINGS_INDEX, POSTINGS_ROWS, len(terms), rows)
        check_nulls(nulls, postings)
        return InvertedIndex(terms, postings, nulls, value_type)


def distinct(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """The distinct values in order, and for every row the number of its value, -1 for null."""
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    codes = np.full(len(array), -1, np.int64)
    if is_text(array.type):
        encoded = array.dictionary_encode()
        order = pc.sort_indices(encoded.dictionary)
        place = np.empty(len(order), np.int64)
        place[order.to_numpy()] = np.arange(len(order))
        present = encoded.indices.drop_null().to_numpy()
        codes[valid] = place[present] if len(place) else 0
        return encoded.dictionary.take(order), codes
    present = array.drop_null().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(array.type):
        ordered, inverse = np.unique(_ordered(_normal(present)), return_inverse=True)
        values = _unordered(ordered)
    else:
        values, inverse = np.unique(present, return_inverse=True)
    codes[valid] = inverse
    return pa.array(values), codes


def check_nulls(nulls: npt.NDArray[np.uint64], postings: Postings) -> None:
    """Every row has a value or is null, and none is both."""
    rows = len(nulls) + len(postings.rows)
    if len(nulls) and int(nulls[-1]) >= rows:
        raise damaged(NULL_OFFSETS, f"it names rows past the {rows} there are")
    seen = np.zeros(rows, np.bool_)
    seen[postings.rows] = True
    if seen[nulls.astype(np.int64)].any():
        raise damaged(NULL_OFFSETS, "a row with a value is among the null rows")


_SIGN = np.int64(-(1 << 63))


def _normal(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Equal floats with equal bits: one zero, and one NaN of each sign."""
    wide = values.astype(np.float64) + 0.0
    return np.where(np.isnan(wide), np.copysign(np.nan, wide), wide)


def _ordered(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole numbers that sort as the floats do, NaN last, or first if its sign is set."""
    bits = values.view(np.int64)
    return np.where(bits < 0, ~bits ^ _SIGN, bits)


def _unordered(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.where(numbers < 0, ~(numbers ^ _SIGN), numbers).view(np.float64)
