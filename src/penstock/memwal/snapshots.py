"""Region snapshots: what all regions were at one moment, kept in the MemWAL index.

A snapshot is a Lance file with one row per region. Up to a number of regions its bytes lie in the
index itself; beyond, they lie at `_indices/{uuid}/index.lance`, and the index has a file without
rows whose metadata names the uuid: Lance gives the index another uuid with every merge of its own,
and carries the inline bytes along. Commits of ours carry the file, too.

    region manifests, WAL tips --build_snapshot--> Lance file --commit--> version of the table
    version of the table --read_snapshot--> region manifests, as they were

Invariants
- Every manifest of a newer snapshot is at least as new as that of an older one: manifests are
  loaded after the snapshot that is replaced was seen, or loaded again.
- A generation that the merge progress of the same version does not cover is in the snapshot, if
  the region had it when the snapshot was taken.
- The file is durable before the version that names it exists.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import crc32c
import pyarrow as pa
from lance.file import LanceFileReader, LanceFileWriter

from penstock import metrics
from penstock.errors import Corruption, NotATable, ObjectNotFound, PenstockError, StorageError
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import (
    FlushedGeneration,
    RegionManifest,
    RegionStatus,
    manifest_chain,
)
from penstock.memwal.region_spec import RegionSpec, arrow_type
from penstock.memwal.regions import list_region_ids
from penstock.memwal.sources import StaleView
from penstock.memwal.table_commit import commit_index
from penstock.memwal.transforms import decode_value
from penstock.memwal.wal import Wal
from penstock.storage.epoch import VersionedObject
from penstock.storage.objects import ObjectStore

INLINE_REGIONS = 100
"""Snapshots of up to so many regions lie in the index itself."""

_HINT_LAG_ENTRIES = 64
"""A hint that is less behind is left alone; the tip is found from it in a few steps."""
_FILE_VERSION = "2.0"
_CHECKSUM = b"penstock.crc32c"
_EXTERNAL = b"penstock.external"
_LOAD_THREADS = 8

Load = Callable[[Sequence[uuid.UUID]], Sequence[RegionManifest | None]]

_GENERATION = pa.struct(
    [
        ("generation", pa.uint64()),
        ("path", pa.string()),
        ("in_memory_bytes", pa.uint64()),
        ("physical_rows", pa.uint64()),
        ("primary_key_bytes", pa.uint64()),
    ]
)
_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("region_id", pa.binary(16)),
    ("version", pa.uint64()),
    ("region_spec_id", pa.uint32()),
    ("writer_epoch", pa.uint64()),
    ("replay_after_wal_entry_position", pa.uint64()),
    ("wal_entry_position_last_seen", pa.uint64()),
    ("current_generation", pa.uint64()),
    ("flushed_generations", pa.list_(_GENERATION)),
    ("status", pa.uint8()),
    (
        "region_field_entries",
        pa.list_(pa.struct([("field_id", pa.string()), ("value", pa.binary())])),
    ),
]
_NUMBERS = (
    "version",
    "region_spec_id",
    "writer_epoch",
    "replay_after_wal_entry_position",
    "wal_entry_position_last_seen",
    "current_generation",
)


class SnapshotGone(StaleView):
    """The file of a snapshot is gone; the version that replaced it has another."""


# --- bytes ---------------------------------------------------------------------------------


def encode_snapshot(
    regions: Sequence[RegionManifest],
    specs: Sequence[RegionSpec],
    external: uuid.UUID | None = None,
) -> bytes:
    """A snapshot as a Lance file; with `external`, one without rows that says where they are."""
    kinds = {f.field_id: arrow_type(f.result_type) for spec in specs for f in spec.fields}
    fields = [pa.field(name, kind, nullable=False) for name, kind in _COLUMNS]
    fields += [pa.field(f"region_field_{name}", kind) for name, kind in kinds.items()]
    if external is None:
        metadata = {_CHECKSUM: _checksum(regions)}
    else:
        metadata, regions = {_EXTERNAL: str(external).encode()}, ()
    schema = pa.schema(fields, metadata=metadata)
    by_id = {spec.spec_id: spec for spec in specs}
    rows = [_row(region, by_id.get(region.region_spec_id), kinds) for region in regions]
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        path = Path(directory) / "index.lance"
        with LanceFileWriter(str(path), schema, version=_FILE_VERSION) as writer:
            if rows:
                writer.write_batch(pa.Table.from_pylist(rows, schema))
        return path.read_bytes()


def read_snapshot(store: ObjectStore, inline: bytes, where: str) -> tuple[RegionManifest, ...]:
    """The regions of a snapshot, given the index's bytes; `where` names it in errors."""
    rows = _read_file(inline, where)
    key = _external(rows, where)
    if key is None:
        return _regions(rows, where)
    try:
        data = bytes(store.get(key).data)
    except ObjectNotFound as error:
        raise SnapshotGone(f"{where} is in {key}, which is gone") from error
    return _regions(_read_file(data, f"{where}, {key}"), f"{where}, {key}")


def external_of(inline: bytes, where: str) -> str | None:
    """The key of the file that a snapshot lies in, or None if it lies in the index itself."""
    return _external(_read_file(inline, where), where)


def _external(rows: pa.Table, where: str) -> str | None:
    named = (rows.schema.metadata or {}).get(_EXTERNAL)
    if named is None:
        return None
    try:
        return external_key(uuid.UUID(named.decode()))
    except ValueError as error:
        raise Corruption(f"{where} names a file that cannot be one: {error}") from error


def carried(
    store: ObjectStore, details: MemWalIndexDetails, identity: uuid.UUID
) -> MemWalIndexDetails:
    """The details for an index of another uuid, with the snapshot's file below it, if it has one.

    Lance's clean-up keeps what lies below the uuid of an index, and nothing else.
    """
    if details.inline_snapshots is None:
        return details
    try:
        key = external_of(details.inline_snapshots, "the last snapshot")
        if key is None:
            return details
        data = store.get(key).data
    except (Corruption, ObjectNotFound):
        return details  # whoever reads it is told, and the next snapshot replaces it
    store.put_if_absent(external_key(identity), data)
    pointer = encode_snapshot((), details.region_specs, identity)
    return replace(details, inline_snapshots=pointer)


def external_key(identity: uuid.UUID) -> str:
    """Where the snapshot of an index lies if it is not in the index itself."""
    return f"_indices/{identity}/index.lance"


def _row(
    region: RegionManifest, spec: RegionSpec | None, kinds: dict[str, pa.DataType]
) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(region, name) for name in _NUMBERS}
    row["region_id"] = region.region_id.bytes
    row["status"] = int(region.status)
    row["flushed_generations"] = [
        {member.name: getattr(flushed, member.name) for member in _GENERATION}
        for flushed in region.flushed_generations
    ]
    row["region_field_entries"] = [
        {"field_id": name, "value": value} for name, value in region.region_values
    ]
    stored = dict(region.region_values)
    for field in spec.fields if spec is not None else ():
        kind = arrow_type(field.result_type)
        if kind == kinds[field.field_id]:  # specs may use one name for values of several types
            row[f"region_field_{field.field_id}"] = decode_value(stored.get(field.field_id), kind)
    return row


def _read_file(data: bytes, where: str) -> pa.Table:
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        path = Path(directory) / "index.lance"
        path.write_bytes(data)
        try:
            return LanceFileReader(str(path)).read_all().to_table()
        except BaseException as error:
            # Lance panics at some damages, and a panic is no Exception.
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            raise Corruption(f"{where} cannot be read ({error}); {_REMEDY}") from error


def _regions(rows: pa.Table, where: str) -> tuple[RegionManifest, ...]:
    try:
        regions = tuple(_region(row) for row in rows.to_pylist())
        stored = (rows.schema.metadata or {})[_CHECKSUM]
    except (KeyError, ValueError, TypeError, Corruption) as error:
        raise Corruption(f"{where} cannot be read ({error!r}); {_REMEDY}") from error
    if stored != _checksum(regions):
        raise Corruption(f"{where} does not have the checksum {stored.decode()}; {_REMEDY}")
    return regions


def _region(row: dict[str, Any]) -> RegionManifest:
    region = RegionManifest(
        region_id=uuid.UUID(bytes=row["region_id"]),
        flushed_generations=tuple(FlushedGeneration(**g) for g in row["flushed_generations"]),
        region_values=tuple((e["field_id"], e["value"]) for e in row["region_field_entries"]),
        status=RegionStatus(row["status"]),
        **{name: row[name] for name in _NUMBERS},
    )
    # What a manifest must be is said in one place.
    key = names.manifest_key(region.region_id, region.version)
    return replace(RegionManifest.decode(region.encode(), key), raw=b"")


def _checksum(regions: Sequence[RegionManifest]) -> bytes:
    crc = 0
    for region in regions:
        crc = crc32c.crc32c(replace(region, raw=b"").encode(), crc)
    return f"{crc:08x}".encode()


_REMEDY = "the snapshot is damaged: take another with snapshot(), and restore the version if needed"


# --- building ------------------------------------------------------------------------------


def build_snapshot(
    table: BaseTable, *, inline_regions: int = INLINE_REGIONS, load: Load | None = None
) -> int:
    """Bring the state of every region into the index; returns the version that holds it.

    If nothing has changed since the last snapshot, that is the newest version as it is. `load` is
    for those who have regions loaded elsewhere, by `load_regions`.
    """
    load_all = load or partial(load_regions, table)
    before = table.snapshot().details.inline_snapshots
    regions = _load_regions(table, load_all)

    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        nonlocal before, regions
        if current is None:
            raise NotATable(f"{table.uri} has no MemWAL index, so it cannot have snapshots")
        if current.inline_snapshots != before:
            # Somebody else's snapshot, which may have newer regions than ours.
            before, regions = current.inline_snapshots, _load_regions(table, load_all)
        if _holds(table, current, regions):
            return None
        stored = encode_snapshot(regions, current.region_specs)
        return replace(
            current,
            # Clocks differ between machines; a newer snapshot never looks older.
            snapshot_ts_millis=max(table.seams.clock.now_ms(), current.snapshot_ts_millis),
            num_regions=len(regions),
            inline_snapshots=stored,
        )

    def lay_down(details: MemWalIndexDetails, identity: uuid.UUID) -> MemWalIndexDetails:
        if len(regions) <= inline_regions:
            return details
        assert details.inline_snapshots is not None
        table.store.put_if_absent(external_key(identity), details.inline_snapshots)
        pointer = encode_snapshot((), details.region_specs, identity)
        return replace(details, inline_snapshots=pointer)

    return commit_index(table.store, table.storage_options, change, table.seams, lay_down)[1]


def _holds(
    table: BaseTable, details: MemWalIndexDetails, regions: tuple[RegionManifest, ...]
) -> bool:
    if details.inline_snapshots is None:
        return False
    try:
        return read_snapshot(table.store, details.inline_snapshots, "the last snapshot") == regions
    except (SnapshotGone, Corruption):
        return False


def load_regions(table: BaseTable, ids: Sequence[uuid.UUID]) -> list[RegionManifest | None]:
    """Some regions as they are, with the true end of their WAL; None for one without manifest."""
    with ThreadPoolExecutor(_LOAD_THREADS, "penstock-snapshot") as pool:
        return list(pool.map(lambda identity: _load_region(table, identity), ids))


def _load_regions(table: BaseTable, load: Load) -> tuple[RegionManifest, ...]:
    """Every region as it is, with the true end of its WAL; all of them must be readable."""
    missing: list[uuid.UUID] = []
    for _ in table.seams.attempts():
        ids = sorted(list_region_ids(table.store))
        loaded = load(ids)
        missing = [i for i, region in zip(ids, loaded, strict=True) if region is None]
        # A region that is just being created has a directory before it has a manifest.
        if not missing:
            return tuple(region for region in loaded if region is not None)
    raise Corruption(
        f"{table.uri}: region {missing[0]} has files but no manifest; restore it from a copy, or "
        "remove the directory if nothing in it matters"
    )


def _load_region(table: BaseTable, region_id: uuid.UUID) -> RegionManifest | None:
    chain = manifest_chain(table.store, region_id, table.seams)
    region = _latest_twice(chain, table)
    if region is None:
        return None
    known = max(region.replay_after_wal_entry_position, region.wal_entry_position_last_seen)
    tip = Wal(table.store, region_id, table.seams).tip(known)
    region = _advance_hint(chain, region, tip - 1)
    return replace(region, wal_entry_position_last_seen=max(tip, known), raw=b"")


def _latest_twice(
    chain: VersionedObject[RegionManifest], table: BaseTable
) -> RegionManifest | None:
    """The latest manifest, read twice: it has no checksum, and the snapshot will be believed."""
    for _ in table.seams.attempts():
        region = chain.latest()
        if region is None:
            return None
        again = chain.latest()
        if again is not None and again == region:
            return region
    raise StorageError(f"{chain.name}: its manifest reads differently every time; try again")


def _advance_hint(
    chain: VersionedObject[RegionManifest], region: RegionManifest, position: int
) -> RegionManifest:
    """Let whoever claims the region next start its search for the tip further on.

    The position is one before the tip: an entry is begun only when the one before it is durable,
    so a hint never points at what a power failure could take back. The epoch stays, and so does
    everything else that the region's writer relies on.
    """
    if position - region.wal_entry_position_last_seen < _HINT_LAG_ENTRIES:
        return region
    if region.status is RegionStatus.SEALED:
        return region

    def has_it(manifest: RegionManifest) -> bool:
        return manifest.wal_entry_position_last_seen >= position

    try:
        return chain.update(
            region.writer_epoch,
            lambda current: current.next(wal_entry_position_last_seen=position),
            landed=has_it,
        )
    except PenstockError:
        metrics.hint_failures.inc()
        return region
