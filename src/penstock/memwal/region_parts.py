"""What lies in front of the base table: regions, their generations, their logs.

    region manifests, listings --read_regions, read_generations, read_logs--> parts

Manifests are read, and of the log its listing; an entry is opened only if it is so small that it
may be a fence. A generation that a manifest lists and that is not there is told as missing: it is
for the caller to say what that means.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import lance

from penstock.errors import Corruption, ObjectNotFound
from penstock.memwal import names
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.region_spec import RegionSpec, arrow_type
from penstock.memwal.transforms import decode_value
from penstock.memwal.wal import Wal
from penstock.storage.objects import ObjectMeta, ObjectStore

_THREADS = 8
_FENCE_BYTES = 1024
"""A fence has no columns, and is smaller by far."""
_ASKED_ONE_BY_ONE = 16
"""So many log entries are asked for by name before the log is listed instead."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class RegionPart:
    region_id: uuid.UUID
    region_spec_id: int
    values: Mapping[str, Any]
    """What its rows have in common, by field of the spec."""
    status: str
    manifest_version: int
    writer_epoch: int
    current_generation: int
    merged_generation: int
    wal_covered: int
    """The last log entry that is in a generation."""
    wal_position: int
    """The last log entry there is."""

    @property
    def wal_lag_entries(self) -> int:
        return self.wal_position - self.wal_covered


@dataclass(frozen=True, slots=True)
class GenerationPart:
    region_id: uuid.UUID
    generation: int
    path: str
    """The directory, relative to the table."""
    physical_rows: int | None
    size_bytes: int
    written_ms: int | None
    merged: bool
    present: bool
    indexes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogPart:
    region_id: uuid.UUID
    entries: int
    """Objects in the log, fences included."""
    fences: int
    size_bytes: int
    first_position: int | None
    last_position: int | None
    unflushed_entries: int
    unflushed_bytes: int
    oldest_unflushed_ms: int | None
    """When the first entry with rows was written that is in no generation yet."""


def read_regions(
    table: BaseTable, base: BaseSnapshot, manifests: Sequence[RegionManifest]
) -> tuple[RegionPart, ...]:
    specs = {spec.spec_id: spec for spec in base.details.region_specs}

    def read(manifest: RegionManifest) -> RegionPart:
        covered = manifest.replay_after_wal_entry_position
        known = max(covered, manifest.wal_entry_position_last_seen)
        return RegionPart(
            region_id=manifest.region_id,
            region_spec_id=manifest.region_spec_id,
            values=region_values(manifest, specs.get(manifest.region_spec_id)),
            status=manifest.status.name.lower(),
            manifest_version=manifest.version,
            writer_epoch=manifest.writer_epoch,
            current_generation=manifest.current_generation,
            merged_generation=base.details.merged(manifest.region_id),
            wal_covered=covered,
            wal_position=Wal(table.store, manifest.region_id, table.seams).tip(known),
        )

    found = each(read, manifests)
    return tuple(sorted(found, key=lambda part: (part.region_spec_id, str(part.region_id))))


def region_values(manifest: RegionManifest, spec: RegionSpec | None) -> dict[str, Any]:
    """A region's values in the types its spec gives them; raw bytes as hex without the spec."""
    stored = dict(manifest.region_values)
    if spec is None:
        return {name: value.hex() for name, value in stored.items()}
    return {
        field.field_id: decode_value(stored.get(field.field_id), arrow_type(field.result_type))
        for field in spec.fields
    }


def read_generations(
    table: BaseTable, base: BaseSnapshot, manifests: Sequence[RegionManifest]
) -> tuple[GenerationPart, ...]:
    """Every generation that a manifest lists, with what is there of it."""

    def read(listed: tuple[RegionManifest, FlushedGeneration]) -> GenerationPart:
        manifest, flushed = listed
        prefix = f"{names.region_dir(manifest.region_id)}/{flushed.path}"
        files = list(table.store.list(prefix))
        return GenerationPart(
            region_id=manifest.region_id,
            generation=flushed.generation,
            path=prefix,
            physical_rows=flushed.physical_rows,
            size_bytes=sum(meta.size_bytes for meta in files),
            written_ms=min((meta.modified_ms for meta in files), default=None),
            merged=flushed.generation <= base.details.merged(manifest.region_id),
            present=bool(files),
            indexes=_index_names(table, prefix) if files else (),
        )

    pairs = [(manifest, one) for manifest in manifests for one in manifest.flushed_generations]
    found = each(read, pairs)
    return tuple(sorted(found, key=lambda part: (str(part.region_id), part.generation)))


def _index_names(table: BaseTable, prefix: str) -> tuple[str, ...]:
    try:
        dataset = open_generation(table, prefix)
    except (OSError, ValueError):
        return ()  # damaged, or removed since; `doctor` tells which
    return tuple(sorted(index.name for index in dataset.describe_indices()))


def open_generation(table: BaseTable, prefix: str) -> lance.LanceDataset:
    return lance.dataset(f"{table.uri.rstrip('/')}/{prefix}", storage_options=table.storage_options)


def generation_written_ms(store: ObjectStore, manifest: RegionManifest, path: str) -> int | None:
    """When a generation was flushed, by its oldest file."""
    files = store.list(f"{names.region_dir(manifest.region_id)}/{path}")
    return min((meta.modified_ms for meta in files), default=None)


# --- logs ----------------------------------------------------------------------------------


def read_logs(table: BaseTable, manifests: Sequence[RegionManifest]) -> tuple[LogPart, ...]:
    def read(manifest: RegionManifest) -> LogPart:
        covered = manifest.replay_after_wal_entry_position
        entries = list_log(table.store, manifest.region_id)
        tail = [meta for position, meta in entries.items() if position > covered]
        log = Wal(table.store, manifest.region_id, table.seams)
        fences = {position for position, meta in entries.items() if _is_fence(log, position, meta)}
        rows = [p for p in entries if p > covered and p not in fences]
        return LogPart(
            region_id=manifest.region_id,
            entries=len(entries),
            fences=len(fences),
            size_bytes=sum(meta.size_bytes for meta in entries.values()),
            first_position=min(entries, default=None),
            last_position=max(entries, default=None),
            unflushed_entries=len(tail),
            unflushed_bytes=sum(meta.size_bytes for meta in tail),
            oldest_unflushed_ms=entries[min(rows)].modified_ms if rows else None,
        )

    return tuple(sorted(each(read, manifests), key=lambda part: str(part.region_id)))


def list_log(store: ObjectStore, region_id: uuid.UUID) -> dict[int, ObjectMeta]:
    """The entries of a region's log by position, in order."""
    found = {}
    for meta in store.list(f"{names.region_dir(region_id)}/wal"):
        name, _, suffix = meta.key.rsplit("/", 1)[-1].rpartition(".")
        position = names.from_bitrev(name) if suffix == "arrow" else None
        if position is not None:
            found[position] = meta
    return dict(sorted(found.items()))


def first_unflushed_ms(table: BaseTable, region_id: uuid.UUID, after: int, tip: int) -> int | None:
    """When the first entry with rows behind `after` was written; None if there is none."""
    log = Wal(table.store, region_id, table.seams)
    for position, meta in _entries(table.store, region_id, after, tip):
        if not _is_fence(log, position, meta):
            return meta.modified_ms
    return None


def _entries(
    store: ObjectStore, region_id: uuid.UUID, after: int, tip: int
) -> Iterator[tuple[int, ObjectMeta]]:
    if tip - after > _ASKED_ONE_BY_ONE:
        listed = list_log(store, region_id)
        yield from ((position, meta) for position, meta in listed.items() if position > after)
        return
    for position in range(after + 1, tip + 1):
        try:
            yield position, store.head(names.wal_key(region_id, position))
        except ObjectNotFound:
            continue  # flushed and cleaned up since


def _is_fence(log: Wal, position: int, meta: ObjectMeta) -> bool:
    if meta.size_bytes > _FENCE_BYTES:
        return False
    try:
        entry = log.read(position)
    except Corruption:
        return False  # whoever needs its rows is told
    return entry is not None and entry.is_fence


def each(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """The results of work on every item; a few threads, because it is waiting that takes time."""
    if len(items) <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_THREADS, "penstock-look") as pool:
        return list(pool.map(work, items))
