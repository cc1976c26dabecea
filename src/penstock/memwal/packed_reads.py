"""Reading fewer rows because packed indexes say which may match a filter.

Of each data file with an index the rows that may match are looked up (`packed_filter`), numbered
by address, and taken from Lance at once; the filter decides about them as about any others. Data
files without an index are scanned. Where so many rows may match that taking them is slower than
scanning, only the fragments in which none matches are left out.

Indexes are kept in memory up to a limit in bytes. Which files have one is listed when a version
is first asked, and again after a while if some have none: an index that is built later is found
without a new version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import LanceFragment
from pyroaring import BitMap

from penstock.errors import Corruption, ObjectNotFound
from penstock.memwal.base_table import BaseSnapshot
from penstock.memwal.cache import ByteCache, FewCache
from penstock.memwal.filters import Filter
from penstock.memwal.fragments import Addresses
from penstock.memwal.packed_filter import candidates, columns_asked
from penstock.memwal.packed_specs import DIRECTORY, PackedSpec, column_file, packed_specs
from penstock.memwal.sources import ROW_ID, GenerationSource, Scanned, chosen_rows
from penstock.memwal.view import View
from penstock.packed import PackedReader, load_index
from penstock.packed.indexes.base import PackedIndex
from penstock.storage.objects import ObjectStore

PACKED_CACHE_BYTES = 256 << 20
MAX_TAKEN_ROWS = 2_048
"""More rows than these are not taken one by one,"""
TAKEN_SHARE = 1 / 500
"""nor a larger share of those there are: Lance then reads them faster by scanning."""
LISTED_FOR_MS = 5_000.0
READ_THREADS = 8
_KEPT_VERSIONS = 4


@dataclass(slots=True)
class _Coverage:
    """Of one version, which data file each fragment has of a column, and which have an index."""

    base: BaseSnapshot
    fragments: list[LanceFragment]
    files: dict[int, list[str | None]] = field(default_factory=dict)
    there: dict[str, frozenset[str]] = field(default_factory=dict)
    """Keys of the index files, by declaration."""
    listed_ms: dict[str, float] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    """Keys of the index files that have been read once."""


class PackedMemory:
    """What a reader keeps of packed indexes."""

    def __init__(self) -> None:
        self._cache: ByteCache[PackedIndex] = ByteCache(PACKED_CACHE_BYTES, "packed indexes")
        self._coverage: FewCache[_Coverage] = FewCache(_KEPT_VERSIONS)
        self._lock = threading.Lock()

    def load(self, store: ObjectStore, key: str) -> PackedIndex:
        """An index from memory, or from the store; `ObjectNotFound` if there is none."""

        def read() -> PackedIndex:
            with PackedReader.from_store(store, key) as reader:
                return load_index(reader)

        def read_twice() -> PackedIndex:
            try:
                return read()
            except Corruption:
                # Somebody who built it again may have put other bytes in its place meanwhile.
                return read()

        try:
            return self._cache.get((store.uri, key), read_twice)
        except Corruption as error:
            raise Corruption(
                f"{store.uri}/{key} is damaged: {error}; remove it, rows are only found more "
                "slowly without, and build_indexes() makes it anew"
            ) from error

    def coverage(self, view: View, specs: Sequence[PackedSpec]) -> _Coverage:
        base, table = view.base, view.reader.table
        # By the snapshot, which a kept one keeps from being another: a table may be made anew.
        known = self._coverage.get(id(base), lambda: _Coverage(base, base.dataset.get_fragments()))
        with self._lock:
            now_ms = table.seams.clock.monotonic_ms()
            for spec in specs:
                if spec.field_id not in known.files:
                    known.files[spec.field_id] = [
                        column_file(fragment.metadata, spec.field_id)
                        for fragment in known.fragments
                    ]
                files = known.files[spec.field_id]
                there = known.there.get(spec.uid, frozenset())
                lacking = any(f is not None and spec.key(f) not in there for f in files)
                since_ms = now_ms - known.listed_ms.get(spec.uid, -LISTED_FOR_MS)
                if lacking and since_ms >= LISTED_FOR_MS:
                    listed = table.store.list(f"{DIRECTORY}/{spec.uid}")
                    known.there[spec.uid] = frozenset(meta.key for meta in listed)
                    known.listed_ms[spec.uid] = now_ms
        return known


class PackedLookup:
    """The packed indexes that a filter can use on a view."""

    def __init__(self, view: View, where: Filter, specs: dict[str, PackedSpec]) -> None:
        self._view = view
        self._where = where
        self._specs = specs
        self._memory = view.reader.memory(PackedMemory)
        self._store = view.reader.table.store

    @classmethod
    def of(cls, view: View, where: Filter | None) -> PackedLookup | None:
        """None if no declared index is on a column that the filter asks about."""
        declared = packed_specs(view.base.details)
        if where is None or not declared:
            return None
        ids = view.shape.field_ids
        asked = columns_asked(where.predicate)
        by_field = {spec.field_id: spec for spec in declared}
        specs = {name: by_field[ids[name]] for name in asked if ids.get(name) in by_field}
        return cls(view, where, specs) if specs else None

    @property
    def label(self) -> str:
        return ", ".join(sorted(spec.name for spec in self._specs.values()))

    # --- the base ----------------------------------------------------------------------------

    def scan_base(self, columns: Sequence[str], *, numbered: bool) -> Iterator[Scanned]:
        """Rows of the base that match, with their row ids if somebody asks for them."""
        dataset = self._view.base.dataset
        found = self._addresses()
        if found is None:
            yield from self._scan(dataset, columns, numbered, None)
            return
        addresses, covered_rows, hit, uncovered = found
        if len(addresses) > min(MAX_TAKEN_ROWS, covered_rows * TAKEN_SHARE):
            uncovered = uncovered + hit
        elif len(addresses):
            yield from self._take(dataset, addresses, columns, numbered)
        if uncovered:
            yield from self._scan(dataset, columns, numbered, uncovered)

    def _addresses(
        self,
    ) -> tuple[Addresses, int, list[LanceFragment], list[LanceFragment]] | None:
        """Which rows may match, of how many; where they are; and fragments nothing is known of."""
        specs = list(self._specs.values())
        coverage = self._memory.coverage(self._view, specs)
        parts: list[Addresses] = []
        hit: list[LanceFragment] = []
        uncovered: list[LanceFragment] = []
        covered_rows = 0
        keys = [self._keys(coverage, number) for number in range(len(coverage.fragments))]
        for fragment, rows in zip(coverage.fragments, self._each(coverage, keys), strict=True):
            if rows is None:
                uncovered.append(fragment)
                continue
            covered_rows += fragment.physical_rows
            if rows:
                offsets = np.frombuffer(rows.to_array(), dtype=np.uint32).astype(np.uint64)
                parts.append(offsets | np.uint64(fragment.fragment_id << 32))
                hit.append(fragment)
        if not covered_rows:
            return None
        empty = np.empty(0, dtype=np.uint64)
        return np.concatenate([empty, *parts]), covered_rows, hit, uncovered

    def _keys(self, coverage: _Coverage, number: int) -> dict[str, str]:
        """Of the columns with an index in a fragment, where that is."""
        keys = {}
        for name, spec in self._specs.items():
            file = coverage.files[spec.field_id][number]
            if file is not None and spec.key(file) in coverage.there.get(spec.uid, ()):
                keys[name] = spec.key(file)
        return keys

    def _each(self, coverage: _Coverage, keys: Sequence[dict[str, str]]) -> Sequence[BitMap | None]:
        """Rows of each fragment that may match; indexes not met before are read side by side."""
        work = list(zip(keys, coverage.fragments, strict=True))
        unread = {key for named in keys for key in named.values()} - coverage.loaded
        if len(unread) < 2:
            return [self._candidates(*one) for one in work]
        with ThreadPoolExecutor(READ_THREADS, "penstock-packed") as pool:
            found = list(pool.map(lambda one: self._candidates(*one), work))
        coverage.loaded |= unread
        return found

    def _candidates(self, keys: dict[str, str], fragment: LanceFragment) -> BitMap | None:
        if not keys:
            return None
        physical_rows = fragment.physical_rows

        def index_of(column: str) -> PackedIndex | None:
            key = keys.get(column)
            if key is None:
                return None
            try:
                index = self._memory.load(self._store, key)
            except ObjectNotFound:
                return None  # clean-up took it
            if index.rows != physical_rows:
                raise Corruption(
                    f"{self._store.uri}/{key} is of {index.rows} rows and the data file has "
                    f"{physical_rows}; remove it, and build_indexes() makes it anew"
                )
            return index

        return candidates(self._where.predicate, index_of)

    def _take(
        self,
        dataset: lance.LanceDataset,
        addresses: Addresses,
        columns: Sequence[str],
        numbered: bool,
    ) -> Iterator[Scanned]:
        listed = ",".join(map(str, addresses.tolist()))
        needed = _with_those_of(columns, self._where)
        scanner = dataset.scanner(
            columns=needed, filter=f"_rowaddr IN ({listed})", with_row_id=True
        )
        for batch in scanner.to_batches():
            yield from self._matching(batch, columns, numbered)

    def _scan(
        self,
        dataset: lance.LanceDataset,
        columns: Sequence[str],
        numbered: bool,
        fragments: list[LanceFragment] | None,
    ) -> Iterator[Scanned]:
        scanner = dataset.scanner(
            columns=list(columns), filter=self._where.sql, with_row_id=True, fragments=fragments
        )
        for batch in scanner.to_batches():
            yield _numbered(batch, columns, numbered)

    def _matching(
        self, batch: pa.RecordBatch, columns: Sequence[str], numbered: bool
    ) -> Iterator[Scanned]:
        mask = self._where.mask(batch)
        if not mask.all():
            batch = chosen_rows(batch, mask)
        if batch.num_rows:
            yield _numbered(batch, columns, numbered)

    # --- generations -------------------------------------------------------------------------

    def rows_of_generation(self, source: GenerationSource) -> BitMap | None:
        """Rows of a generation that may match; None if that may be any, or too many to take."""

        def index_of(column: str) -> PackedIndex | None:
            spec = self._specs.get(column)
            if spec is None or source.field_id(column) != spec.field_id:
                return None
            key = spec.generation_key(source.key)
            try:
                index = self._memory.load(self._store, key)
            except ObjectNotFound:
                return None
            if index.rows != source.rows:
                raise Corruption(
                    f"{self._store.uri}/{key} is of {index.rows} rows and the generation has "
                    f"{source.rows}; remove it, rows are only found more slowly without"
                )
            return index

        if not source.rows or not source.is_current(self._view.shape):
            return None  # manifests of older writers do not say how many rows there are
        found = candidates(self._where.predicate, index_of)
        if found is None or len(found) > min(MAX_TAKEN_ROWS, source.rows * TAKEN_SHARE):
            return None
        return found


def _with_those_of(columns: Sequence[str], where: Filter) -> list[str]:
    return [*columns, *(name for name in where.columns if name not in columns)]


def _numbered(batch: pa.RecordBatch, columns: Sequence[str], numbered: bool) -> Scanned:
    numbers = batch.column(ROW_ID).to_numpy() if numbered or not columns else None
    # Rows without columns would lose their number: keep the row ids then.
    return (batch.select(list(columns)) if columns else batch.select([ROW_ID])), numbers, None
