"""Looking rows up by key: newest source first, and no further than needed.

    CoalesceFirstExec           a key that was found, alive or deleted, is not asked for again
      BloomFilterGuardExec      the keys that a generation may have
        TakeLastExec            the newest row of each
      …                         for every source of the regions that can hold the keys
      TakeLastExec              the base, last

Many keys go through the sources together. `get_many` calls the pieces of which the nodes are made
without building them, because for one key the tree would cost as much as its answer; the nodes
are there to be explained (`plan_lookup`).

A key index in memory is several times faster than a bloom filter, and exact; so a filter is asked
only where finding a key would mean to read. A generation whose filter says no is not opened.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.index.bloom import lance_written_hashes, pk_hashes
from penstock.index.key_index import NOT_FOUND
from penstock.index.primary_key import key_array, newest_rows
from penstock.index.siphash import U64
from penstock.lazy import lazy
from penstock.memwal.base_table import BaseSnapshot
from penstock.memwal.freshness import Mask
from penstock.memwal.hits import memtable_rows
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.plan import Chunk, Node
from penstock.memwal.region_spec import arrow_type
from penstock.memwal.sources import (
    ROW_ID,
    BaseSource,
    FreshSource,
    GenerationSource,
    MemTableSource,
)
from penstock.memwal.transforms import encode_value, group
from penstock.memwal.view import View
from penstock.memwal.wal import TOMBSTONE

Places = npt.NDArray[np.int64]
_SHOWN_KEYS = 3
_NO_KEY: Mask = np.zeros(0, dtype=np.bool_)
"""Stands for a region that can hold none of the keys."""
_encoded = lru_cache(maxsize=4096)(encode_value)


class Lookup:
    """Distinct keys on their way through the sources of a view, and which are still missing."""

    def __init__(
        self, view: View, keys: Mapping[str, pa.Array], columns: Sequence[str] | None = None
    ) -> None:
        shape = view.shape
        self.view = view
        self.columns = list(shape.schema.names if columns is None else columns)
        self.schema: pa.Schema = shape.schema
        if columns is not None:
            self.schema = pa.schema([shape.schema.field(name) for name in columns])
        self.asked = pa.RecordBatch.from_pydict(dict(keys))
        self.keys = key_array(self.asked, shape.key_columns)
        if len(self.keys) > 1:
            last = newest_rows(self.keys)
            if not last.all():
                self.asked = self.asked.filter(pa.array(last))
                self.keys = self.keys.filter(pa.array(last))
        self.missing: Mask = np.ones(len(self.keys), dtype=np.bool_)
        manifests = [region.manifest for region in view.regions]
        self._belongs = _keys_by_region(view.base, manifests, self.asked)

    def sources(self) -> Iterator[FreshSource]:
        """The sources that can hold a key, newest first."""
        for region in reversed(self.view.regions):
            if self._belongs.get(region.manifest.region_id) is not _NO_KEY:
                yield from reversed(region.sources)

    def places(self, source: FreshSource | None) -> Places:
        """Where the missing keys stand that can be in the source; `None` is the base."""
        belongs = None if source is None else self._belongs.get(source.region_id)
        return (self.missing if belongs is None else self.missing & belongs).nonzero()[0]

    def possible(self, source: FreshSource, places: Places) -> Places:
        """The places of keys that the source may have."""
        if isinstance(source, MemTableSource) or source.answers_from_memory(self._keys_at(places)):
            return places
        bloom = source.bloom
        if bloom is None:
            return places
        may = bloom.contains(self._hashes[0][places])
        if self._hashes[1] is not None:
            may |= bloom.contains(self._hashes[1][places])
        return places[may]

    @lazy
    def _hashes(self) -> tuple[U64, U64 | None]:
        """The keys' hashes, and those that Lance's own writer makes of them if it differs."""
        columns = [self.asked.column(name) for name in self.view.shape.key_columns]
        return pk_hashes(columns), lance_written_hashes(columns)

    def take_last(self, source: FreshSource, places: Places) -> pa.Table | None:
        """The newest live row of each of these keys; those it has, dead or alive, are found."""
        if not len(places):
            return None
        if len(places) == 1 and isinstance(source, MemTableSource):
            return self._take_last_one(source, int(places[0]))
        numbers = source.find(self._keys_at(places))
        hit = numbers >= 0
        if not hit.any():
            return None
        self.missing[places[hit]] = False
        shape, rows = self.view.shape, numbers[hit]
        if isinstance(source, GenerationSource):
            taken = source.take(rows, shape, self.columns)
        else:
            taken = memtable_rows(source, rows, shape, [*self.columns, TOMBSTONE])
        dead = taken.column(TOMBSTONE).to_numpy()
        if dead.any():
            if dead.all():
                return None
            taken = taken.take(pa.array(np.flatnonzero(~dead)))
        return self._shaped(taken)

    def _take_last_one(self, source: MemTableSource, place: int) -> pa.Table | None:
        """The same for one key of a MemTable, whose row is there to be pointed at."""
        row = source.memtable.find(self.keys[place].as_py(), source.rows)
        if row is None:
            return None
        self.missing[place] = False
        if source.memtable.shape is not self.view.shape:
            row = self.view.shape.align(row)
        return None if row.column(TOMBSTONE)[0].as_py() else self._shaped(row)

    def take_base(self) -> pa.Table | None:
        """The rows of the base with the keys that are still missing."""
        places = self.places(None)
        if not len(places):
            return None
        wanted = self._keys_at(places)
        dataset, index = self.view.base.dataset, self.view.key_index
        if index is not None:
            row_ids = index.find(wanted)
            row_ids = row_ids[row_ids != NOT_FOUND]
        else:
            row_ids = _scan_for(self.view, wanted)
        if not len(row_ids):
            return None
        row_ids.sort()
        return self._shaped(dataset._take_rows(row_ids.tolist(), columns=self.columns))

    def _keys_at(self, places: Places) -> pa.Array:
        return self.keys if len(places) == len(self.keys) else self.keys.take(pa.array(places))

    def _shaped(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Rows of any source under the table's own fields."""
        columns = [rows.column(name) for name in self.columns]
        return pa.Table.from_arrays(columns, schema=self.schema)


def get_many(
    view: View, keys: Mapping[str, pa.Array], columns: Sequence[str] | None = None
) -> pa.Table:
    """The live rows with these keys, each once, in no particular order."""
    lookup = Lookup(view, keys, columns)
    found: list[pa.Table] = []
    for source in lookup.sources():
        places = lookup.places(source)
        if len(places):
            rows = lookup.take_last(source, lookup.possible(source, places))
            if rows is not None:
                found.append(rows)
    rows = lookup.take_base()
    if rows is not None:
        found.append(rows)
    if len(found) == 1:
        return found[0]
    return pa.concat_tables(found) if found else pa.Table.from_batches([], lookup.schema)


def regions_without(
    base: BaseSnapshot, regions: Sequence[RegionManifest], keys: Mapping[str, pa.Array]
) -> set[uuid.UUID]:
    """The regions that can hold none of the keys."""
    found = _keys_by_region(base, regions, pa.RecordBatch.from_pydict(dict(keys)))
    return {region_id for region_id, mask in found.items() if mask is _NO_KEY}


def _keys_by_region(
    base: BaseSnapshot, known: Sequence[RegionManifest], keys: pa.RecordBatch
) -> dict[uuid.UUID, Mask]:
    """Of each region which of the keys can be in it; a region left out may have any.

    A region says which values it stands for, and the values of a key follow from the spec it was
    written under. Regions that record nothing may have any key.
    """
    result: dict[uuid.UUID, Mask] = {}
    if len(known) < 2:
        return result
    for spec in base.details.region_specs:
        regions = [manifest for manifest in known if manifest.region_spec_id == spec.spec_id]
        if not any(manifest.region_values for manifest in regions):
            continue
        types = [arrow_type(field.result_type) for field in spec.fields]
        members: dict[tuple[tuple[str, bytes], ...], Mask] = {}
        for values, rows in group(spec, keys, base.shape.columns_by_id):
            encoded = [
                (field.field_id, raw)
                for field, kind, value in zip(spec.fields, types, values, strict=True)
                if (raw := _encoded(value, kind)) is not None
            ]
            mask = np.zeros(keys.num_rows, dtype=np.bool_)
            mask[slice(None) if rows is None else rows] = True
            members[tuple(encoded)] = mask
        for manifest in regions:
            if manifest.region_values:
                result[manifest.region_id] = members.get(manifest.region_values, _NO_KEY)
    return result


def _scan_for(view: View, wanted: pa.Array) -> npt.NDArray[np.uint64]:
    """Row ids of keys in a base that is too large for its keys to be kept in memory."""
    columns = list(view.shape.key_columns)
    parts = [np.empty(0, dtype=np.uint64)]
    for batch in view.base.dataset.scanner(columns=columns, with_row_id=True).to_batches():
        here = pc.is_in(key_array(batch, columns), value_set=wanted)
        parts.append(batch.column(ROW_ID).filter(here).to_numpy())
    return np.concatenate(parts)


# --- the same as nodes ---------------------------------------------------------------------


class TakeLastExec(Node[Chunk]):
    """The newest row of each key in one source, unless it is deleted."""

    def __init__(self, lookup: Lookup, source: FreshSource | None) -> None:
        super().__init__()
        self._lookup = lookup
        self._source = source
        self.places: Places | None = None
        """Which keys to take; all that are missing unless a guard says otherwise."""

    def describe(self) -> str:
        label = BaseSource.label if self._source is None else self._source.label
        return f"TakeLastExec: {label}, filter=[{_condition(self._lookup)}]"

    def _stream(self) -> Iterator[Chunk]:
        lookup, source = self._lookup, self._source
        if source is None:
            rows = lookup.take_base()
        else:
            places = lookup.places(source) if self.places is None else self.places
            rows = lookup.take_last(source, places)
        if rows is not None:
            for batch in rows.to_batches():
                yield Chunk(batch, source)


class BloomFilterGuardExec(Node[Chunk]):
    """Asks its source only for keys that it may have; an index in memory needs no filter."""

    def __init__(self, lookup: Lookup, source: FreshSource, child: TakeLastExec) -> None:
        super().__init__(child)
        self._lookup = lookup
        self._source = source
        self._child = child

    def describe(self) -> str:
        source = self._source
        return f"BloomFilterGuardExec: bf[region_{source.region_id}][gen={source.generation}]"

    def _stream(self) -> Iterator[Chunk]:
        places = self._lookup.places(self._source)
        self._child.places = self._lookup.possible(self._source, places)
        if len(self._child.places):
            yield from self._child.stream()


class CoalesceFirstExec(Node[Chunk]):
    """Of each key the first row that an input has; stops when none is missing."""

    def __init__(self, lookup: Lookup, *children: Node[Chunk]) -> None:
        super().__init__(*children)
        self._lookup = lookup

    def describe(self) -> str:
        return "CoalesceFirstExec: return_first_non_null"

    def _stream(self) -> Iterator[Chunk]:
        for child in self.children:
            if not self._lookup.missing.any():
                return
            yield from child.stream()


def plan_lookup(
    view: View, keys: Mapping[str, pa.Array], columns: Sequence[str] | None = None
) -> Node[Chunk]:
    """The plan of `get_many`; it can be run once."""
    lookup = Lookup(view, keys, columns)
    guarded = [
        BloomFilterGuardExec(lookup, source, TakeLastExec(lookup, source))
        for source in lookup.sources()
    ]
    return CoalesceFirstExec(lookup, *guarded, TakeLastExec(lookup, None))


def _condition(lookup: Lookup) -> str:
    """The keys as SQL, the first few of many."""
    names = lookup.view.shape.key_columns
    rows = [
        tuple(row[name] for name in names) for row in lookup.asked.slice(0, _SHOWN_KEYS).to_pylist()
    ]
    if lookup.asked.num_rows == 1:
        return " AND ".join(f"{n} = {_literal(v)}" for n, v in zip(names, rows[0], strict=True))
    shown = [_tuple([_literal(value) for value in row]) for row in rows]
    if lookup.asked.num_rows > _SHOWN_KEYS:
        shown.append(f"… {lookup.asked.num_rows:,} keys")
    return f"{_tuple(list(names))} IN ({', '.join(shown)})"


def _tuple(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    return str(value).lower() if isinstance(value, bool) else str(value)
