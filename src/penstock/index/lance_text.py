"""The raw statistics and postings of Lance's own full-text index files.

Lance scores each dataset with that dataset's statistics. One ranking over many sources needs the
numbers themselves, so this module reads the files of an index version 2 (what Lance 14 writes):

    _indices/{uuid}/metadata.lance       parameters, the partition ids
                    part_N_tokens.lance  term -> token id, an `fst` map
                    part_N_invert.lance  a row per token id: blocks of documents and frequencies
                    part_N_docs.lance    a row per document: row id and length

An index is several segments of several partitions. All their documents, one partition after the
other, are the rows 0, 1, 2, ... of a `LanceTextIndex`; `row_ids` turns rows into Lance row ids.
A row id can be twice among them, once for a text that was updated since: rows cannot.

Lance never takes a document out of its numbers: `statistics` and `document_frequency` count rows
that were deleted or updated since the index was built, as Lance's scores do, until
`optimize_indices` merges the segments. Which rows to show is for `live_rows` to say.

Invariants
- Every file of an index is immutable, so what was read stays true; only memory limits the cache.
- Documents and their lengths are read once and kept; decoded postings stay below `cache_bytes`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.file import LanceFileReader

from penstock.errors import Corruption, InvalidInput, ObjectNotFound, StorageError
from penstock.index.fst import Fst
from penstock.index.lance_postings import BLOCK_ROWS, Blobs, decode_positions, decode_postings
from penstock.index.text import Postings

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

DEFAULT_CACHE_BYTES = 64 << 20

_READABLE = {
    "format_version": "2",
    "token_set_format": "fst",
    "posting_tail_codec": "varint_delta_v1",
    "posting_block_size": str(BLOCK_ROWS),
}
_READABLE_POSITIONS = {
    "positions_layout": "shared_stream_v2",
    "positions_codec": "packed_delta_v1",
}
_POSTING = ["_posting", "_length"]
_POSITIONS = ["_posting", "_length", "_compressed_position", "_position_block_offset"]
_FRAGMENT_REUSE = "__lance_frag_reuse"
_NOWHERE = 2**64 - 1


class LanceTextIndex:
    """One full-text index of one dataset version. Safe for many threads."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        segments: Sequence[_Segment],
        cache_bytes: int,
        moved: Callable[[UInt64s], UInt64s] | None = None,
    ) -> None:
        self.name, self.params = name, params
        self._segments = segments
        self._partitions = [part for segment in segments for part in segment.partitions]
        self._cache_limit_bytes = cache_bytes
        self._cache: OrderedDict[tuple[str, bool], Postings] = OrderedDict()
        self._cached_bytes = 0
        self._documents: tuple[UInt64s, Int32s] | None = None
        self._sorted: tuple[UInt64s, Int64s | None] | None = None
        self._lock = threading.Lock()
        self._moved = moved
        """Tells where rows went that the files name by an older address."""

    @classmethod
    def open(
        cls,
        dataset: lance.LanceDataset,
        index_name: str,
        storage_options: dict[str, str] | None = None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> LanceTextIndex:
        """Open the index as of the dataset's version; reads the small metadata files only."""
        descriptions = {found.name: found for found in dataset.describe_indices()}
        description = descriptions.get(index_name)
        if description is None or not description.type_url.endswith("InvertedIndexDetails"):
            raise InvalidInput(
                f"{dataset.uri} has no full-text index {index_name!r}; create one with "
                f"create_index(column, 'fts')"
            )
        moved = None
        if _FRAGMENT_REUSE in descriptions and not dataset.has_stable_row_ids:
            moved = partial(_moved_rows, dataset)
        params: dict[str, Any] = {}
        segments: list[_Segment] = []
        rows = 0
        for segment in description.segments:
            if segment.base_id is not None:
                raise InvalidInput(
                    f"index {index_name!r} of {dataset.uri} has files outside the dataset; "
                    f"optimize_indices brings them in"
                )
            directory = f"{dataset.uri.rstrip('/')}/_indices/{segment.uuid}"
            metadata = _File(f"{directory}/metadata.lance", storage_options, None).metadata()
            params = json.loads(metadata.get("params", "{}"))
            _check_readable(directory, metadata, bool(params.get("with_position")))
            partitions = []
            for number in json.loads(metadata["partitions"]):
                partition = _Partition(f"{directory}/part_{number}", storage_options, rows)
                rows = partition.stop_row
                partitions.append(partition)
            segments.append(_Segment(frozenset(segment.fragment_ids), tuple(partitions)))
        return cls(index_name, params, segments, cache_bytes, moved)

    def __len__(self) -> int:
        """How many rows (documents, dead ones included) the index has."""
        return self._partitions[-1].stop_row if self._partitions else 0

    @property
    def with_positions(self) -> bool:
        return bool(self.params.get("with_position"))

    @property
    def nbytes(self) -> int:
        """Memory held: term dictionaries, documents and cached postings."""
        arrays: list[npt.NDArray[Any]] = list(self._documents or ())
        if self._sorted is not None and self._sorted[1] is not None:
            arrays += [self._sorted[0], self._sorted[1]]
        return (
            sum(partition.nbytes for partition in self._partitions)
            + sum(array.nbytes for array in arrays)
            + self._cached_bytes
        )

    def fragments(self) -> frozenset[int]:
        """The fragments whose rows the index covers; rows of others are not in it."""
        return frozenset().union(*(segment.fragments for segment in self._segments))

    def statistics(self) -> tuple[int, int]:
        """How many documents there are, and how many terms in all of them, as Lance counts."""
        tokens = sum(partition.tokens for partition in self._partitions)
        return len(self), tokens

    def document_frequency(self, term: str) -> int:
        """How many documents have the term, as Lance counts; dead ones included."""
        with self._lock:
            cached = self._cache.get((term, True)) or self._cache.get((term, False))
        if cached is not None:
            return len(cached.rows)
        return sum(partition.document_frequency(term) for partition in self._partitions)

    def postings(self, term: str, *, positions: bool = False) -> Postings:
        """Every row that has the term, ascending, live or not; `row_ids` gives their row ids."""
        if positions and not self.with_positions:
            raise InvalidInput(
                f"index {self.name!r} keeps no positions, phrases need them; "
                f"create it with with_position=True"
            )
        (found,) = self.postings_of([term], positions=positions)
        return found

    def postings_of(self, terms: Sequence[str], *, positions: bool = False) -> list[Postings]:
        """The postings of each term; what is not kept is read in one go."""
        found = {term: self._recall(term, positions) for term in terms}
        missing = [term for term, known in found.items() if known is None]
        if missing:
            parts = [part.postings(missing, positions) for part in self._partitions]
            for at, term in enumerate(missing):
                found[term] = decoded = _joined([part[at] for part in parts], positions)
                with self._lock:
                    self._remember((term, positions), decoded)
        return [known for term in terms if (known := found[term]) is not None]

    def _recall(self, term: str, positions: bool) -> Postings | None:
        with self._lock:
            for key in ((term, positions), (term, True)):
                found = self._cache.get(key)
                if found is not None:
                    self._cache.move_to_end(key)
                    return found
        return None

    def row_ids(self, rows: Int64s | None = None) -> UInt64s:
        """The Lance row ids of rows, or of all."""
        ids, _ = self._load_documents()
        return ids if rows is None else ids[rows]

    def document_lengths(self, row_ids: UInt64s | None = None) -> Int32s:
        """The terms of every row, or of the documents with these row ids, 0 where there is none.

        Of a row id that is twice in the index, the document of the newest segment counts.
        """
        _, lengths = self._load_documents()
        if row_ids is None:
            return lengths
        ids, rows = self._load_sorted()
        if not len(ids):
            return np.zeros(len(row_ids), dtype=np.int32)
        places = np.searchsorted(ids, row_ids, side="right") - 1
        found = (places >= 0) & (ids[places] == row_ids)
        return np.where(found, lengths[places if rows is None else rows[places]], np.int32(0))

    def rows_of(self, row_ids: UInt64s) -> Int64s:
        """Every row with one of these row ids, in no order; live or not, so some have several."""
        ids, order = self._load_sorted()
        wanted = np.unique(row_ids)
        places = np.searchsorted(ids, wanted)
        found = []
        while len(places):
            inside = places < len(ids)
            places, wanted = places[inside], wanted[inside]
            same = ids[places] == wanted
            places, wanted = places[same], wanted[same]
            found.append(places if order is None else order[places])
            places = places + 1
        return np.concatenate([np.zeros(0, np.int64), *found])

    def live_rows(self, dataset: lance.LanceDataset) -> Bools:
        """Which rows are still what the dataset has: neither deleted, updated nor moved out.

        A row is live if its row id is that of a row in a fragment its segment covers. An update
        keeps a stable row id and moves the row to a new fragment, and so to a newer segment; when
        Lance merges the two it keeps both documents, the newer one behind the older. So a row
        whose text was updated to no terms at all looks live once Lance merged, here as in Lance.
        """
        ids, _ = self._load_documents()
        live = np.zeros(len(ids), dtype=np.bool_)
        fragments = {part.fragment_id: part for part in dataset.get_fragments()}
        for segment in self._segments:
            covered = [fragments[found] for found in segment.fragments if found in fragments]
            if not covered or not segment.partitions:
                continue
            rows = slice(segment.partitions[0].first_row, segment.partitions[-1].stop_row)
            scanner = dataset.scanner(columns=[], with_row_id=True, fragments=covered)
            present = [np.asarray(batch.column("_rowid")) for batch in scanner.to_batches()]
            live[rows] = _last_of_each(
                ids[rows], np.concatenate([np.zeros(0, np.uint64), *present])
            )
        return live

    # --- what is kept ---

    def _load_documents(self) -> tuple[UInt64s, Int32s]:
        if self._documents is None:
            parts = [partition.documents() for partition in self._partitions]
            row_ids = np.concatenate([np.zeros(0, np.uint64), *(ids for ids, _ in parts)])
            self._documents = (
                row_ids if self._moved is None else self._moved(row_ids),
                np.concatenate([np.zeros(0, np.int32), *(lengths for _, lengths in parts)]),
            )
        return self._documents

    def _load_sorted(self) -> tuple[UInt64s, Int64s | None]:
        """Row ids in order, and the row of each; None if the rows are in that order."""
        if self._sorted is None:
            ids, _ = self._load_documents()
            if bool((ids[1:] >= ids[:-1]).all()):
                self._sorted = ids, None
            else:
                order = np.argsort(ids, kind="stable")
                self._sorted = ids[order], order
        return self._sorted

    def _remember(self, key: tuple[str, bool], postings: Postings) -> None:
        size = _size(postings)
        if key in self._cache or size > self._cache_limit_bytes:
            return
        self._cache[key] = postings
        self._cached_bytes += size
        while self._cached_bytes > self._cache_limit_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= _size(dropped)


@dataclass(frozen=True, slots=True)
class _Segment:
    fragments: frozenset[int]
    partitions: tuple[_Partition, ...]


class _Partition:
    """One partition: its rows are `first_row` and on. Files are opened when first needed."""

    def __init__(self, prefix: str, options: dict[str, str] | None, first_row: int) -> None:
        self._prefix, self._options = prefix, options
        self._files: dict[str, _File] = {}
        self._terms: Fst | None = None
        docs = self._file("docs", None)
        metadata = docs.metadata()
        if "total_tokens" not in metadata:
            raise InvalidInput(
                f"{prefix}_docs.lance is of an older index format; rebuild the index"
            )
        self.tokens = int(metadata["total_tokens"])
        self.first_row = first_row
        self.stop_row: int = first_row + len(docs)

    @property
    def nbytes(self) -> int:
        return 0 if self._terms is None else self._terms.nbytes

    def documents(self) -> tuple[UInt64s, Int32s]:
        table = self._file("docs", None).read()
        lengths = np.asarray(table.column("_num_tokens").combine_chunks())
        return np.asarray(table.column("_rowid").combine_chunks()), lengths.astype(np.int32)

    def document_frequency(self, term: str) -> int:
        token = self._token(term)
        if token is None:
            return 0
        return int(self._rows([token], ["_length"]).column("_length")[0].as_py())

    def postings(self, terms: Sequence[str], positions: bool) -> list[Postings | None]:
        tokens = [self._token(term) for term in terms]
        wanted = sorted({token for token in tokens if token is not None})
        if not wanted:
            return [None] * len(terms)
        stored = self._rows(wanted, _POSITIONS if positions else _POSTING)
        name = f"{self._prefix}_invert.lance, terms {', '.join(map(repr, terms))}"
        lengths = stored.column("_length").to_pylist()
        blocks = Blobs(stored.column("_posting").combine_chunks().flatten())
        found: dict[int | None, Postings] = {}
        for at, (documents, frequencies) in enumerate(decode_postings(blocks, lengths, name)):
            if len(documents) and int(documents.max()) >= self.stop_row - self.first_row:
                raise Corruption(f"{name} names a document that is not there; rebuild the index")
            rows = documents.astype(np.int64)
            rows += self.first_row
            places = None
            if positions:
                stream = Blobs(stored.column("_compressed_position").slice(at, 1).combine_chunks())
                starts = stored.column("_position_block_offset")[at].values
                places = decode_positions(stream.data, np.asarray(starts), frequencies, name)
            found[wanted[at]] = Postings(rows, frequencies, places)
        return [found.get(token) for token in tokens]

    def _token(self, term: str) -> int | None:
        if self._terms is None:
            path = f"{self._prefix}_tokens.lance"
            table = self._file("tokens", None).read()
            self._terms = Fst(table.column("_token_fst_bytes")[0].as_py(), path)
        return self._terms.get(term.encode())

    def _rows(self, tokens: list[int], columns: list[str]) -> pa.Table:
        return self._file("invert", columns).read(tokens)

    def _file(self, file: str, columns: list[str] | None) -> _File:
        key = f"{file}{columns}"
        if key not in self._files:
            self._files[key] = _File(f"{self._prefix}_{file}.lance", self._options, columns)
        return self._files[key]


def _moved_rows(dataset: lance.LanceDataset, row_ids: UInt64s) -> UInt64s:
    """Where rows are since compactions that left the index as it was; `_NOWHERE` if deleted."""
    found = dataset.remap_row_addrs(pa.array(row_ids))
    if found is None:
        return row_ids
    return np.asarray(found.fill_null(pa.scalar(_NOWHERE, pa.uint64())))


def _joined(parts: Sequence[Postings | None], with_positions: bool) -> Postings:
    found = [part for part in parts if part is not None]
    if len(found) == 1 and not with_positions:
        return found[0]
    rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in found)])
    frequencies = np.concatenate([np.zeros(0, np.int32), *(part.frequencies for part in found)])
    if not with_positions:
        return Postings(rows, frequencies)
    places = [part.positions for part in found if part.positions is not None]
    bounds = np.concatenate([[0], np.cumsum(frequencies, dtype=np.int64)])
    return Postings(rows, frequencies, np.concatenate([np.zeros(0, np.int32), *places]), bounds)


def _size(postings: Postings) -> int:
    arrays = (postings.rows, postings.frequencies, postings.positions, postings.bounds)
    return sum(array.nbytes for array in arrays if array is not None) + 200


def _last_of_each(ids: UInt64s, present: UInt64s) -> Bools:
    """Which ids are present, and of equal ones only the last."""
    if np.array_equal(ids, present) and bool((ids[1:] > ids[:-1]).all()):
        return np.ones(len(ids), dtype=np.bool_)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    last = np.ones(len(ids), dtype=np.bool_)
    last[:-1] = ordered[1:] != ordered[:-1]
    present = np.sort(present)
    places = np.minimum(np.searchsorted(present, ordered), max(len(present) - 1, 0))
    if len(present):
        last &= present[places] == ordered
    else:
        last[:] = False
    wanted = np.zeros(len(ids), dtype=np.bool_)
    wanted[order] = last
    return wanted


# --- files ---


class _File:
    """An open file. Lance begins one read of it at a time; a second caller would get an error."""

    def __init__(
        self, path: str, options: dict[str, str] | None, columns: list[str] | None
    ) -> None:
        self.path = path
        self._beginning = threading.Lock()
        try:
            self._reader = LanceFileReader(path, storage_options=options or None, columns=columns)
        except (OSError, ValueError) as error:
            raise _explained(error, path) from error

    def __len__(self) -> int:
        return int(self._reader.num_rows())

    def metadata(self) -> dict[str, str]:
        stored = self._reader.metadata().schema.metadata or {}
        return {key.decode(): value.decode() for key, value in stored.items()}

    def read(self, rows: list[int] | None = None) -> pa.Table:
        """Rows by number, or all."""
        try:
            with self._beginning:
                if rows is None:
                    begun = self._reader.read_all(batch_size=1 << 20)
                else:
                    begun = self._reader.take_rows(rows)
            return begun.to_table()
        except (OSError, ValueError) as error:
            raise _explained(error, self.path) from error


def _explained(error: Exception, path: str) -> Exception:
    if isinstance(error, FileNotFoundError) or "not found" in str(error).lower():
        return ObjectNotFound(f"{path} is gone; the index was replaced, open a newer version")
    if isinstance(error, ValueError):
        return Corruption(f"{path} cannot be read as an index file: {error}; rebuild the index")
    return StorageError(f"{path} could not be read: {error}")


def _check_readable(directory: str, metadata: dict[str, str], with_positions: bool) -> None:
    expected = {**_READABLE, **(_READABLE_POSITIONS if with_positions else {})}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise InvalidInput(
                f"{directory} has {key} {metadata.get(key)!r}, only {value!r} can be read; "
                f"create the index again with Lance 14 and block_size=128"
            )
