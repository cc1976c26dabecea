"""The `ngram` index: which values contain which short pieces of text, for `like` and the rest.

`build` takes the distinct values in order and cuts each into its n-grams, runs of `min_gram` to
`max_gram` characters (Unicode code points), all at once over one array of code points. Each
distinct gram is a term of a tantivy index (`Terms`), numbered, and beside it lies the Roaring
bitmap of the values that contain it. A pattern's literal text is cut the same way; the values that
have all its grams are the candidates. That much can be too many, never too few, so the index also
keeps the distinct values themselves, in order, and compares: answers are exact. A pattern with no
literal of `min_gram` characters compares all distinct values. Equality, ranges and prefixes need no
grams, they are searched for in the ordered values.

The defaults, 2 and 3: pairs serve words of two Chinese characters, triples make Latin text narrow.
Grams of more than three characters are worth their room only for text of very few letters.

Entries: one per tantivy file, named in the meta's `file_names`; `index_null_offset` as in the
inverted index; `ngram_avg_row_size` u64, the mean bytes of a non-null row; then ours:
`ngram_postings_index` u64[grams+1] and `ngram_postings` (portable Roaring, back to back),
`ngram_values_index` u64[values+1] and `ngram_values` (UTF-8), `ngram_rows_index` u32[values+1] and
`ngram_rows` u32. Milvus' ngram files hold a tantivy of its own fork, which we cannot load, nor it
ours.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from penstock.errors import InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind, PackedIndex
from penstock.packed.indexes.inverted import check_nulls, distinct
from penstock.packed.indexes.like import like_mask, literals
from penstock.packed.indexes.postings import (
    Postings,
    damaged,
    read_array,
    read_nulls,
    rows_bitmap,
    text_array,
    write_nulls,
)
from penstock.packed.indexes.terms import Terms

AVG_ROW_SIZE = "ngram_avg_row_size"
GRAMS_INDEX, GRAMS = "ngram_postings_index", "ngram_postings"
VALUES_INDEX, VALUES = "ngram_values_index", "ngram_values"
ROWS_INDEX, ROWS = "ngram_rows_index", "ngram_rows"
MIN_GRAM, MAX_GRAM = "min_gram", "max_gram"
DEFAULT_MIN_GRAM, DEFAULT_MAX_GRAM = 2, 3
LONGEST_GRAM = 8
MAX_QUERY_GRAMS = 64
"""Grams of one pattern that are asked for; more hardly narrow what these leave over."""

SEARCHED_ONE_BY_ONE = 1000
"""Values of one `in` up to which each is searched for; for more a hash table is built."""

BLOCK_BYTES = 1 << 20
"""Text that is cut at once; it takes about a hundred times as much memory while it is."""

TABLE_NUMBERS = 1 << 21
"""Up to so many possible grams are numbered by a table with a place for each."""


class NgramIndex(PackedIndex):
    kind = "ngram"

    def __init__(
        self,
        terms: Terms,
        grams_index: npt.NDArray[np.int64],
        grams: memoryview,
        values: pa.Array,
        postings: Postings,
        nulls: npt.NDArray[np.uint64],
        lengths: tuple[int, int],
        value_type: pa.DataType,
    ) -> None:
        super().__init__(len(postings.rows) + len(nulls), value_type)
        self._terms = terms
        self._grams_index = grams_index
        self._grams = grams
        self._values_held = values
        self._postings = postings
        self._nulls = nulls
        self.min_gram, self.max_gram = lengths

    def _held_bytes(self) -> int:
        parts = (self._terms, self._grams_index, self._grams, self._values_held, self._postings)
        return sum(part.nbytes for part in parts) + self._nulls.nbytes

    def write_entries(self, writer: EntryWriter) -> None:
        self._terms.write(writer)
        write_nulls(writer, self._nulls)
        data, offsets = text_parts(self._values_held)
        counts = np.diff(self._postings.borders)
        total_bytes = int((np.diff(offsets) * counts).sum())
        mean = total_bytes // max(len(self._postings.rows), 1)
        writer.write_entry(AVG_ROW_SIZE, np.array([mean], "<u8"))
        writer.write_entry(GRAMS_INDEX, self._grams_index.astype("<u8"))
        writer.write_entry(GRAMS, self._grams)
        writer.write_entry(VALUES_INDEX, offsets.astype("<u8"))
        writer.write_entry(VALUES, data)
        writer.write_entry(ROWS_INDEX, self._postings.borders.astype("<u4"))
        writer.write_entry(ROWS, self._postings.rows.astype("<u4", copy=False))
        writer.put_meta(MIN_GRAM, self.min_gram)
        writer.put_meta(MAX_GRAM, self.max_gram)

    def is_null(self) -> BitMap:
        return rows_bitmap(self._nulls)

    def one_of(self, values: pa.Array) -> BitMap:
        asked = pc.unique(values).cast(pa.large_string())
        if len(asked) > SEARCHED_ONE_BY_ONE:
            places = pc.index_in(asked, self._values_held).drop_null()
            return self._postings.of(places.to_numpy().astype(np.int64))
        found = []
        for text in asked.to_pylist():
            place = self._place(text, bisect_left)
            if place < len(self._values_held) and self._values_held[place].as_py() == text:
                found.append(place)
        return self._postings.of(np.array(found, np.int64))

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        start, stop = 0, len(self._values_held)
        if low is not None:
            start = self._place(low.as_py(), bisect_left if with_low else bisect_right)
        if high is not None:
            stop = self._place(high.as_py(), bisect_right if with_high else bisect_left)
        return self._postings.span(start, stop)

    def prefix(self, text: str) -> BitMap:
        start = self._place(text, bisect_left, len(text))
        return self._postings.span(start, self._place(text, bisect_right, len(text)))

    def like(self, pattern: str) -> BitMap:
        candidates = self.candidates(literals(pattern))
        held = self._values_held
        some = held if len(candidates) == len(held) else held.take(pa.array(candidates))
        return self._postings.of(candidates[like_mask(some, pattern)])

    def candidates(self, texts: list[str]) -> npt.NDArray[np.int64]:
        """Numbers of values that have every gram of each text, so at least those that have
        the texts."""
        grams = list(dict.fromkeys(gram for text in texts for gram in self._cut(text)))
        if not grams:
            return np.arange(len(self._values_held))
        grams = grams[:MAX_QUERY_GRAMS]
        found = self._terms.ordinals(grams)
        if len(found) < len(grams):
            return np.zeros(0, np.int64)
        sizes = self._grams_index[found + 1] - self._grams_index[found]
        left: BitMap | None = None
        for gram in found[np.argsort(sizes)].tolist():
            having = self._bitmap(gram)
            left = having if left is None else left & having
            if not left:
                break
        return np.array(left.to_array() if left else [], np.int64)

    def _place(self, text: str, bisect: Callable[..., int], chars: int | None = None) -> int:
        """Where the text, or a beginning of `chars` characters, stands among the values."""
        held = self._values_held
        return bisect(range(len(held)), text, key=lambda place: held[place].as_py()[:chars])

    def _cut(self, text: str) -> list[str]:
        size = min(len(text), self.max_gram)
        if size < self.min_gram:
            return []
        return [text[at : at + size] for at in range(len(text) - size + 1)]

    def _bitmap(self, gram: int) -> BitMap:
        start, stop = self._grams_index[gram : gram + 2].tolist()
        try:
            bitmap = BitMap.deserialize(bytes(self._grams[start:stop]))
        except (ValueError, RuntimeError, MemoryError) as error:
            raise damaged(GRAMS, f"gram {gram} has no Roaring bitmap ({error})") from error
        if not bitmap or bitmap.max() >= len(self._values_held):
            raise damaged(GRAMS, f"gram {gram} names values that are not there")
        return bitmap


class NgramKind(IndexKind):
    kind = "ngram"

    def build(self, array: pa.Array, **options: Any) -> NgramIndex:
        low = options.pop(MIN_GRAM, DEFAULT_MIN_GRAM)
        high = options.pop(MAX_GRAM, max(low, DEFAULT_MAX_GRAM) if isinstance(low, int) else 0)
        if not _lengths_fit(low, high):
            raise InvalidInput(
                f"an ngram index wants 1 <= min_gram <= max_gram <= {LONGEST_GRAM}, "
                f"not {low!r} and {high!r}"
            )
        array = text_array(array, self.kind, options)
        values, codes = distinct(array)
        values = values.cast(pa.large_string())
        grams, bitmaps = _all_grams(values, low, high)
        index = np.zeros(len(bitmaps) + 1, np.int64)
        np.cumsum([len(bitmap) for bitmap in bitmaps], out=index[1:])
        return NgramIndex(
            Terms.build(grams),
            index,
            memoryview(b"".join(bitmaps)),
            values,
            Postings.derive(codes, len(values)),
            np.flatnonzero(codes < 0).astype(np.uint64),
            (low, high),
            array.type,
        )

    def load(self, reader: EntryReader, value_type: pa.DataType) -> NgramIndex:
        text_array(pa.array([], value_type), self.kind)
        low: Any = reader.meta.get(MIN_GRAM)
        high: Any = reader.meta.get(MAX_GRAM)
        if not _lengths_fit(low, high):
            raise damaged(
                "__meta__",
                f"{MIN_GRAM} and {MAX_GRAM} are missing or not lengths of grams, as in files of "
                "Milvus, whose tantivy this is not",
            )
        nulls = read_nulls(reader)
        terms = Terms.load(reader, pa.string())
        values = _read_texts(reader)
        rows = len(read_array(reader, ROWS, "<u4")) + len(nulls)
        postings = Postings.read(reader, ROWS_INDEX, ROWS, len(values), rows)
        check_nulls(nulls, postings)
        grams = read_array(reader, GRAMS, "<u1").data
        grams_index = _read_borders(reader, GRAMS_INDEX, len(grams))
        if len(grams_index) != len(terms) + 1:
            raise damaged(GRAMS_INDEX, f"{len(grams_index)} borders for {len(terms)} grams")
        return NgramIndex(
            terms, grams_index, grams, values, postings, nulls, (low, high), value_type
        )


def text_parts(values: pa.Array) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """The UTF-8 of all values of a large_string array, and where each begins in it."""
    if not len(values):
        return memoryview(b""), np.zeros(1, np.int64)
    _, offsets_buffer, data = values.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[values.offset :][: len(values) + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    return memoryview(data if data is not None else b"").cast("B")[begin:end], offsets - begin


def _lengths_fit(low: Any, high: Any) -> bool:
    whole = type(low) is int and type(high) is int
    return whole and 1 <= low <= high <= LONGEST_GRAM


def _all_grams(values: pa.Array, low: int, high: int) -> tuple[pa.Array, list[bytes]]:
    """Distinct grams in order, and for each the portable bitmap of the values that contain it."""
    bitmaps: dict[str, BitMap] = {}
    _, offsets = text_parts(values)
    start = 0
    while start < len(values):
        stop = int(np.searchsorted(offsets, offsets[start] + BLOCK_BYTES, "right")) - 1
        stop = max(stop, start + 1)
        for block in _pieces(values[start:stop], high):
            for gram, bitmap in _block_grams(block, start, low, high):
                held = bitmaps.setdefault(gram, bitmap)
                if held is not bitmap:
                    held |= bitmap
        start = stop
    grams = sorted(bitmaps)
    return pa.array(grams, pa.large_string()), [_portable(bitmaps[gram]) for gram in grams]


def _pieces(values: pa.Array, high: int) -> Iterator[pa.Array]:
    """The values as they are, or one that is longer than a block in pieces that overlap."""
    if len(values) > 1 or values.nbytes <= 2 * BLOCK_BYTES:
        yield values
        return
    text = values[0].as_py()
    for at in range(0, len(text), BLOCK_BYTES):
        yield pa.array([text[at : at + BLOCK_BYTES + high - 1]], pa.large_string())


def _block_grams(values: pa.Array, first: int, low: int, high: int) -> Iterator[tuple[str, BitMap]]:
    """The grams of some of the values, which are numbered from `first`."""
    data, offsets = text_parts(values)
    chars = np.frombuffer(str(data, "utf-8").encode("utf-32-le"), np.uint32)
    begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    places = np.zeros(len(begins) + 1, np.int64)
    np.cumsum(begins, out=places[1:])
    ends = places[offsets]
    lengths = np.diff(ends)
    owners = np.repeat(np.arange(first, first + len(values), dtype=np.uint32), lengths)
    room = np.repeat(ends[1:], lengths) - np.arange(len(chars))
    alphabet, letters = _numbered(chars.astype(np.int64), sys.maxunicode + 1)
    known = [chr(char) for char in alphabet.tolist()]
    grams = known
    numbers, starts = letters, np.arange(len(chars))
    for size in range(1, high + 1):
        if size > 1:
            # A gram is a shorter one, known by its number, and one letter more.
            keep = room[starts] >= size
            starts = starts[keep]
            joined = numbers[keep] * len(alphabet) + letters[starts + size - 1]
            heads, numbers = _numbered(joined, len(grams) * len(alphabet))
            grams = [
                grams[head // len(alphabet)] + known[head % len(alphabet)]
                for head in heads.tolist()
            ]
        if size >= low:
            yield from zip(grams, _bitmaps(numbers, owners[starts], len(grams)), strict=True)


def _numbered(
    values: npt.NDArray[np.int64], limit: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct values, all below `limit`, and for each value its place among them."""
    if limit > TABLE_NUMBERS:
        encoded = pa.array(values).dictionary_encode()
        return encoded.dictionary.to_numpy(), encoded.indices.to_numpy().astype(np.int64)
    seen = np.zeros(limit, np.bool_)
    seen[values] = True
    distinct_values = np.flatnonzero(seen)
    table = np.zeros(limit, np.int64)
    table[distinct_values] = np.arange(len(distinct_values))
    return distinct_values, table[values]


def _bitmaps(
    numbers: npt.NDArray[np.int64], owners: npt.NDArray[np.uint32], count: int
) -> list[BitMap]:
    """For each of `count` grams the values it is in."""
    words = (numbers.astype(np.uint64) << np.uint64(32)) | owners
    words.sort()
    if len(words):
        words = words[np.concatenate(([True], words[1:] != words[:-1]))]
    borders = np.zeros(count + 1, np.int64)
    counts = np.bincount((words >> np.uint64(32)).astype(np.int64), minlength=count)
    np.cumsum(counts, out=borders[1:])
    members = words.astype(np.uint32)
    return [
        rows_bitmap(members[start:stop])
        for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]


def _portable(bitmap: BitMap) -> bytes:
    bitmap.run_optimize()
    serialized: bytes = bitmap.serialize()
    return serialized


def _read_borders(reader: EntryReader, name: str, total_bytes: int) -> npt.NDArray[np.int64]:
    borders = read_array(reader, name, "<u8")
    if not len(borders) or borders[0] or borders[-1] != total_bytes:
        raise damaged(name, f"its borders do not divide {total_bytes} bytes")
    if np.any(borders[1:] < borders[:-1]):
        raise damaged(name, "its borders are not in ascending order")
    return borders.astype(np.int64)


def _read_texts(reader: EntryReader) -> pa.Array:
    data = read_array(reader, VALUES, "<u1")
    offsets = _read_borders(reader, VALUES_INDEX, len(data))
    values = pa.LargeStringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data)
    )
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        raise damaged(VALUES, f"it is not UTF-8 text ({error})") from error
    if len(values) > 1 and not pc.all(pc.less(values[:-1], values[1:])).as_py():
        raise damaged(VALUES, "its values are not distinct and in order")
    return values
