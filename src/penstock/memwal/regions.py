"""The regions of a table: listing them, naming them, and retiring those of an old spec.

A region's id follows from the table's id, the spec and the region's values, so two processes that
meet a new value create the same region, and the put-if-absent of its first manifest settles who
does. Regions that Lance created have ids of their own; they are recognised by their values, or,
in a table with a single region, by being the only one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity
from penstock.memwal.manifest import RegionManifest, RegionStatus, manifest_chain
from penstock.memwal.region_spec import RegionSpec, arrow_type
from penstock.memwal.shape import TableShape
from penstock.memwal.transforms import encode_value, group, region_id
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

_LOAD_THREADS = 8


def list_region_ids(store: ObjectStore) -> list[uuid.UUID]:
    """Every region that has a directory, written to or not."""
    found = []
    for name in store.list_dirs(names.MEM_WAL):
        try:
            found.append(uuid.UUID(name))
        except ValueError:
            continue  # not a region's name, so not a region; clean-up reports it
    return found


def load_manifests(store: ObjectStore, seams: Seams) -> list[RegionManifest]:
    """The latest manifest of every region."""
    ids = list_region_ids(store)

    def load(identity: uuid.UUID) -> RegionManifest | None:
        return manifest_chain(store, identity, seams).latest()

    if len(ids) <= 1:
        loaded = [load(identity) for identity in ids]
    else:
        with ThreadPoolExecutor(_LOAD_THREADS, "penstock-manifests") as pool:
            loaded = list(pool.map(load, ids))
    return [manifest for manifest in loaded if manifest is not None]


def _check_key_decides(base: BaseTable, spec: RegionSpec) -> None:
    """Lance makes specs that `bind` would refuse: two versions of a row in two regions."""
    shape = base.snapshot().shape
    sources = {shape.columns_by_id.get(source) for f in spec.fields for source in f.source_ids}
    outside = sorted(name for name in sources if name and name not in shape.key_columns)
    if shape.key_columns and outside:
        raise InvalidInput(
            f"{base.uri} divides its rows by {outside}, which is not part of the primary key "
            f"{list(shape.key_columns)}, so the newest version of a row could not be told; "
            "divide it anew with set_regions(…), or write to a region by id: writer(region=…)"
        )


class RegionRouter:
    """From region values to the region, for one spec of a table."""

    def __init__(self, base: BaseTable, spec: RegionSpec, known: Sequence[RegionManifest]) -> None:
        _check_key_decides(base, spec)
        self.spec = spec
        self._table_id = base.table_id()
        self.unsharded = [field.transform for field in spec.fields] == ["unsharded"]
        self._types = [arrow_type(field.result_type) for field in spec.fields]
        self._identities: dict[tuple[object, ...], RegionIdentity] = {}
        ours = [m for m in known if m.region_spec_id == spec.spec_id]
        self._by_values: dict[tuple[tuple[str, bytes], ...], uuid.UUID] = {}
        unnamed = []
        all_null = [None] * len(spec.fields)
        for manifest in ours:
            if manifest.status is RegionStatus.SEALED:
                continue
            if manifest.region_values or self._is_derived(manifest.region_id, all_null):
                self._by_values[manifest.region_values] = manifest.region_id
            else:
                unnamed.append(manifest.region_id)
        if unnamed:
            self._adopt(base.uri, unnamed)

    def _adopt(self, uri: str, unnamed: list[uuid.UUID]) -> None:
        """Regions without values: in an unsharded table the only one is the table's region."""
        if self.unsharded and len(unnamed) == 1 and not self._by_values:
            values = self._encode((0,))
            self._by_values[tuple(v for v in values if v is not None)] = unnamed[0]
            return
        listed = ", ".join(str(identity) for identity in unnamed)
        raise InvalidInput(
            f"{uri} has regions that do not record which rows belong to them ({listed}); "
            "write to them with writer(region=…), or merge and remove them first"
        )

    def _is_derived(self, identity: uuid.UUID, values: Sequence[bytes | None]) -> bool:
        return identity == region_id(self._table_id, self.spec.spec_id, values)

    def _encode(self, values: Sequence[object]) -> list[tuple[str, bytes] | None]:
        encoded: list[tuple[str, bytes] | None] = []
        for field, kind, value in zip(self.spec.fields, self._types, values, strict=True):
            raw = encode_value(value, kind)
            encoded.append(None if raw is None else (field.field_id, raw))
        return encoded

    def route(
        self, rows: pa.RecordBatch, shape: TableShape
    ) -> list[tuple[RegionIdentity, pa.RecordBatch]]:
        """Rows in WAL shape, by the region that they belong to."""
        if self.unsharded:
            return [(self.identity((0,)), rows)]
        return [
            (self.identity(values), rows if places is None else rows.take(pa.array(places)))
            for values, places in group(self.spec, rows, shape.columns_by_id)
        ]

    def identity(self, values: tuple[object, ...]) -> RegionIdentity:
        """The region that rows with these values belong to."""
        found = self._identities.get(values)
        if found is None:
            encoded = self._encode(values)
            stored = tuple(v for v in encoded if v is not None)
            derived = region_id(
                self._table_id,
                self.spec.spec_id,
                [v[1] if v is not None else None for v in encoded],
            )
            found = RegionIdentity(self._by_values.get(stored, derived), self.spec.spec_id, stored)
            self._identities[values] = found
        return found
