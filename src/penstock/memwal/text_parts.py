"""The texts of one source, ready to be searched: postings by term, lengths by row.

Whatever a row lies in, it is asked for the same way. A `TextPart` gives the postings of a query's
terms and the length of each document:

    BlockText     tokenised once and kept in memory: generations, fragments outside the index
    GrowingText   the index of a MemTable, as far as the view sees it
    StreamedText  too large to be kept: tokenised for every query, in bounded memory
    IndexedText   Lance's own index files: the base, and generations too large to be kept

`IndexedText` can be long, so it also finds its best rows without scoring all of them.

Invariant: row i of a part is row i of its source, or has the row id `numbers[i]`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import metrics
from penstock.errors import ObjectNotFound
from penstock.index.impact import RankedPostings
from penstock.index.lance_text import LanceTextIndex
from penstock.index.text import Postings, TextIndex
from penstock.index.text_block import TextBlock, build_block
from penstock.memwal.fragments import offsets_of
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import ROW_ADDRESS, ROW_ID, GenerationSource, StaleView
from penstock.memwal.wal import TOMBSTONE

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]
Texts = Iterator[tuple[pa.Array, Int64s]]
"""Texts and their row numbers, ascending."""

TERM_CACHE_BYTES = 256 << 20
"""Posting lists of one index that are kept, ranked."""
_hits = metrics.cache_hits.labels("terms")
_misses = metrics.cache_misses.labels("terms")
_evictions = metrics.cache_evictions.labels("terms")

BATCH_ROWS = 1 << 15
"""So many rows are tokenised at a time."""


class TextPart(Protocol):
    @property
    def lengths(self) -> Int32s: ...

    @property
    def numbers(self) -> Numbers | None:
        """The row's number in its source; None if that is the row itself."""

    def postings(self, terms: Sequence[str], first: int, positions: bool) -> list[Postings | None]:
        """The postings of each term, with rows counted from `first`."""


class BlockText:
    def __init__(self, block: TextBlock, numbers: Numbers | None = None) -> None:
        self.block = block
        self.numbers = numbers

    @property
    def nbytes(self) -> int:
        return self.block.nbytes + (0 if self.numbers is None else self.numbers.nbytes)

    @property
    def lengths(self) -> Int32s:
        return self.block.lengths

    def postings(self, terms: Sequence[str], first: int, positions: bool) -> list[Postings | None]:
        return self.block.postings(terms, first=first, positions=positions)


class GrowingText:
    def __init__(self, index: TextIndex, rows: int) -> None:
        self._index = index
        self._rows = rows
        self.numbers: Numbers | None = None

    @property
    def lengths(self) -> Int32s:
        return self._index.document_lengths(self._rows)

    def postings(self, terms: Sequence[str], first: int, positions: bool) -> list[Postings | None]:
        found: list[Postings | None] = []
        for term in terms:
            hits = self._index.postings(term, self._rows, positions=positions)
            if not len(hits.rows):
                found.append(None)
                continue
            rows = hits.rows + first
            found.append(Postings(rows, hits.frequencies, hits.positions, hits.bounds))
        return found


class StreamedText:
    """Of the rows themselves only the lengths are kept."""

    def __init__(self, index: TextIndex, rows: int, read: Callable[[], Texts]) -> None:
        self._index = index
        self._rows = rows
        self._read = read
        self.lengths: Int32s = self._block([]).lengths
        self.numbers: Numbers | None = None

    @property
    def nbytes(self) -> int:
        return self.lengths.nbytes + (0 if self.numbers is None else self.numbers.nbytes)

    def postings(self, terms: Sequence[str], first: int, positions: bool) -> list[Postings | None]:
        return self._block(terms).postings(terms, first=first, positions=positions)

    def _block(self, terms: Sequence[str]) -> TextBlock:
        block = build_block(self._index, self._rows, self._read(), only=terms)
        assert block is not None
        return block


class IndexedText:
    def __init__(self, index: LanceTextIndex) -> None:
        self.index = index
        self._terms: OrderedDict[str, RankedPostings] = OrderedDict()
        self._terms_bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self._terms_bytes

    @property
    def lengths(self) -> Int32s:
        return self.index.document_lengths()

    @property
    def numbers(self) -> Numbers:
        return self.index.row_ids()

    def postings(self, terms: Sequence[str], first: int, positions: bool) -> list[Postings | None]:
        """Those of a phrase; `ranked` has the others."""
        assert first == 0
        return list(self.index.postings_of(terms, positions=positions))

    def ranked(self, terms: Sequence[str]) -> list[RankedPostings]:
        """The postings of each term, ready to be ranked; what is not kept is read in one go."""
        found: dict[str, RankedPostings] = {}
        with self._lock:
            for term in terms:
                known = self._terms.get(term)
                if known is not None:
                    found[term] = known
                    self._terms.move_to_end(term)
        missing = [term for term in terms if term not in found]
        _hits.inc(len(found))
        _misses.inc(len(missing))
        if missing:
            lengths = self.lengths
            for term, postings in zip(missing, self.index.postings_of(missing), strict=True):
                found[term] = RankedPostings(postings, lengths)
            self._keep({term: found[term] for term in missing})
        return [found[term] for term in terms]

    def _keep(self, made: Mapping[str, RankedPostings]) -> None:
        with self._lock:
            for term, ranked in made.items():
                if term not in self._terms:
                    self._terms[term] = ranked
                    self._terms_bytes += ranked.nbytes
            while self._terms_bytes > TERM_CACHE_BYTES and self._terms:
                _, gone = self._terms.popitem(last=False)
                self._terms_bytes -= gone.nbytes
                _evictions.inc()


# --- reading texts -------------------------------------------------------------------------


def generation_texts(shape: TableShape, source: GenerationSource, column: str) -> Texts:
    """The texts of a generation, kept by nobody."""
    if not source.is_current(shape):
        for batch, numbers, _ in source.scan(shape, [column], None):
            assert numbers is not None
            yield batch.column(column), numbers
        return

    def begin() -> Iterator[pa.RecordBatch]:
        scanner = source.dataset.scanner(
            columns=[column],
            filter=f"{TOMBSTONE} = false",
            with_row_address=True,
            batch_size=BATCH_ROWS,
        )
        return iter(scanner.to_reader())

    batches = source.guarded(begin)
    while True:
        batch = source.guarded(lambda: next(batches, None))
        if batch is None:
            return
        addresses = batch.column(ROW_ADDRESS).to_numpy()
        yield batch.column(column), offsets_of(addresses)


def fragment_texts(
    dataset: lance.LanceDataset, fragment: lance.LanceFragment, column: str
) -> Texts:
    """The texts of one fragment of the base; rows count its live rows."""
    first = 0
    scanner = dataset.scanner(
        columns=[column], fragments=[fragment], batch_size=BATCH_ROWS, scan_in_order=True
    )
    for batch in scanner.to_batches():
        yield batch.column(column), np.arange(first, first + batch.num_rows)
        first += batch.num_rows


def fragment_row_ids(dataset: lance.LanceDataset, fragment: lance.LanceFragment) -> Numbers:
    """The row ids of one fragment's live rows, in the order of its texts."""
    scanner = dataset.scanner(
        columns=[], with_row_id=True, fragments=[fragment], scan_in_order=True
    )
    parts = [batch.column(ROW_ID).to_numpy() for batch in scanner.to_batches()]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def open_index(dataset: lance.LanceDataset, name: str, cache_bytes: int) -> LanceTextIndex:
    """An index of the dataset; if its files are gone, what names them is out of date."""
    options = dict(dataset.initial_storage_options or {})
    try:
        return LanceTextIndex.open(dataset, name, options, cache_bytes=cache_bytes)
    except ObjectNotFound as error:
        raise StaleView(str(error)) from error
