"""The `marisa` index: every distinct text in one compressed trie, and the rows of each.

`build` takes the distinct values with their counts, lets the trie give each a number (its key id),
and keeps two views of the same fact: `marisa_trie_str_ids`, the key id of every row (-1 for null),
and the CSR pair, the rows of every key id (`marisa_csr_index` are the borders,
`marisa_csr_offsets` the rows, ascending within a key). The trie is in label order and built with
each value's count as its weight, which gives the bytes of Milvus, whose key set holds duplicates.

`load` trusts the row numbers only after it compared the two views. Files of older writers have
no CSR pair; it is then derived. A key id says nothing about order: ranges, prefixes and patterns
walk the trie below the text that all matches begin with, and key ids become rows at the end.

The trie's library checks lengths but not the inner links of a trie, and may crash on one that
was made up. Accidental damage cannot get that far, the container's checksum stops it; open files
of strangers only if you trust them or if they are encrypted.
"""

from __future__ import annotations

from typing import Any

import marisa_trie
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from penstock.errors import Corruption
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.base import IndexKind, PackedIndex
from penstock.packed.indexes.like import like_exact, like_mask, like_prefix
from penstock.packed.indexes.ordered import TextKeys
from penstock.packed.indexes.postings import (
    Postings,
    damaged,
    read_array,
    rows_bitmap,
    shared_prefix,
    text_array,
)

TRIE, STR_IDS = "marisa_trie_index", "marisa_trie_str_ids"
CSR_INDEX, CSR_OFFSETS = "marisa_csr_index", "marisa_csr_offsets"
CSR_VERSION = 1


class MarisaIndex(PackedIndex):
    kind = "marisa"

    def __init__(
        self,
        trie: marisa_trie.BinaryTrie,
        str_ids: npt.NDArray[np.int64],
        postings: Postings,
        value_type: pa.DataType,
    ) -> None:
        super().__init__(len(str_ids), value_type)
        self._trie = trie
        self._str_ids = str_ids
        self._postings = postings
        self._trie_bytes = len(trie.tobytes())
        self._all: tuple[TextKeys, npt.NDArray[np.int64]] | None = None

    def _held_bytes(self) -> int:
        walked = 0 if self._all is None else int(self._all[0].values.nbytes) + self._all[1].nbytes
        return self._trie_bytes + self._str_ids.nbytes + self._postings.nbytes + walked

    def write_entries(self, writer: EntryWriter) -> None:
        writer.write_entry(TRIE, self._trie.tobytes())
        writer.write_entry(STR_IDS, self._str_ids.astype("<i8", copy=False))
        writer.write_entry(CSR_INDEX, self._postings.borders.astype("<u4"))
        writer.write_entry(CSR_OFFSETS, self._postings.rows.astype("<u4", copy=False))
        writer.put_meta("csr_num_keys", len(self._postings))
        writer.put_meta("marisa_csr_format_version", CSR_VERSION)

    def is_null(self) -> BitMap:
        return rows_bitmap(np.flatnonzero(self._str_ids < 0))

    def one_of(self, values: pa.Array) -> BitMap:
        keys = pc.unique(values).cast(pa.large_binary()).to_pylist()
        found = np.fromiter((self._trie.get(key, -1) for key in keys), np.int64, len(keys))
        return self._postings.of(found[found >= 0])

    def between(
        self, low: pa.Scalar | None, high: pa.Scalar | None, with_low: bool, with_high: bool
    ) -> BitMap:
        shared = "" if low is None or high is None else shared_prefix(low.as_py(), high.as_py())
        keys, ids = self._below(shared)
        first, stop = keys.ends(low, high, with_low, with_high)
        return self._postings.of(ids[first:stop])

    def prefix(self, text: str) -> BitMap:
        return self._postings.of(self._below(text)[1])

    def like(self, pattern: str) -> BitMap:
        exact = like_exact(pattern)
        if exact is not None:
            return self.one_of(pa.array([exact], self.value_type))
        keys, ids = self._below(like_prefix(pattern))
        return self._postings.of(ids[like_mask(keys.values, pattern)])

    def values(self) -> pa.Array:
        """The column the index was built from."""
        keys, ids = self._below("")
        by_id = np.zeros(len(self._postings), np.int64)
        by_id[ids] = np.arange(len(ids))
        takes = pa.array(by_id[self._str_ids] if len(by_id) else self._str_ids, pa.int64())
        takes = pc.if_else(pa.array(self._str_ids >= 0), takes, pa.scalar(None, pa.int64()))
        return keys.values.take(takes).cast(self.value_type)

    def _below(self, prefix: str) -> tuple[TextKeys, npt.NDArray[np.int64]]:
        """Keys that begin so, in order, and their ids; the walk of the whole trie is kept."""
        if self._all is not None:
            keys, ids = self._all
            some = slice(*keys.prefix_ends(prefix))
            return TextKeys(keys.values[some]), ids[some]
        found = self._trie.items(prefix.encode())
        found.sort()
        ids = np.fromiter((key_id for _, key_id in found), np.int64, len(found))
        try:
            texts = pa.array([key for key, _ in found], pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid as error:
            raise damaged(TRIE, f"a key is no text ({error})") from error
        if not prefix:
            self._all, self._nbytes = (TextKeys(texts), ids), None
        return TextKeys(texts), ids


class MarisaKind(IndexKind):
    kind = "marisa"

    def build(self, array: pa.Array, **options: Any) -> MarisaIndex:
        array = text_array(array, self.kind, options)
        encoded = array.dictionary_encode()
        keys = encoded.dictionary.cast(pa.large_binary()).to_pylist()
        codes = pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64, copy=False)
        counts = np.bincount(codes[codes >= 0], minlength=len(keys))
        trie = marisa_trie.BinaryTrie(
            keys, order=marisa_trie.LABEL_ORDER, weights=counts.astype(float).tolist()
        )
        key_ids = np.fromiter(map(trie.get, keys), np.int64, len(keys))
        str_ids = np.append(key_ids, -1)[codes]
        return MarisaIndex(trie, str_ids, Postings.derive(str_ids, len(keys)), array.type)

    def load(self, reader: EntryReader, value_type: pa.DataType) -> MarisaIndex:
        text_array(pa.array([], value_type), self.kind)
        trie = _load_trie(reader)
        keys = len(trie)
        str_ids = read_array(reader, STR_IDS, "<i8").astype(np.int64, copy=False)
        if len(str_ids) and not -1 <= str_ids.min() <= str_ids.max() < keys:
            raise damaged(STR_IDS, f"it names keys that a trie of {keys} does not have")
        names = reader.names()
        if CSR_INDEX not in names and CSR_OFFSETS not in names:
            return MarisaIndex(trie, str_ids, Postings.derive(str_ids, keys), value_type)
        if reader.meta.get("csr_num_keys", keys) != keys:
            raise damaged("__meta__", f"csr_num_keys is not the {keys} keys of the trie")
        if reader.meta.get("marisa_csr_format_version", CSR_VERSION) != CSR_VERSION:
            raise damaged("__meta__", f"marisa_csr_format_version is not {CSR_VERSION}")
        postings = Postings.read(reader, CSR_INDEX, CSR_OFFSETS, keys, len(str_ids))
        owners = np.repeat(np.arange(keys), np.diff(postings.borders))
        if len(owners) != np.count_nonzero(str_ids >= 0) or np.any(
            str_ids[postings.rows] != owners
        ):
            raise damaged(CSR_OFFSETS, f"it and {STR_IDS} do not say the same")
        return MarisaIndex(trie, str_ids, postings, value_type)


def _load_trie(reader: EntryReader) -> marisa_trie.BinaryTrie:
    if TRIE not in reader.names():
        raise Corruption(f"the file has no entry {TRIE!r}; it holds no marisa index")
    trie = marisa_trie.BinaryTrie()
    try:
        trie.frombytes(bytes(reader.read(TRIE)))
    except (RuntimeError, MemoryError) as error:
        raise damaged(TRIE, f"it is no marisa trie ({error})") from error
    return trie
