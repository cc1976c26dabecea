"""Which files of a region may go: generations, WAL entries, old manifests, orphans.

A generation may go when the newest version has merged it, every maintained index of the base covers
it, and no version that is kept still reads it: none that a reader may have opened within the time
that versions are kept, and none whose snapshot names it. Orphans are directories that the manifest
does not list. Below the current generation nobody can list them any more; from it on one may
belong to a flush that is not finished, and only its age can tell.

A WAL entry may go when a manifest covers it, and has for longer than any writer trusts its claim.
Two kinds stay: the last entry that is covered, because Lance begins an empty log from 1 again, and
fences, for as long as a writer that was shut out might still write. Its next position is always
that of the fence which shut it out: everything before is its own, and the fence took the first
free place.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from penstock.errors import Corruption, ObjectNotFound
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.gc_limits import GcLimits, is_older
from penstock.memwal.gc_report import LEFT_BY_A_CRASH, NO_MANIFEST_LISTS, Doomed
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest, manifest_chain
from penstock.memwal.table_files import READ_THREADS, get_twice, patiently
from penstock.memwal.wal import decode_entry
from penstock.storage.epoch import KEPT_VERSIONS
from penstock.storage.objects import ObjectMeta

FENCE_BYTES = 400
"""A fence takes some 200 bytes, an entry with a row at least twice as many as this."""
_MERGED = "merged, indexed, and needed by no version"
_FENCE_WINDOW = "penstock.fence_window_ms"


@dataclass(slots=True)
class Directory:
    """Everything that was listed below a directory."""

    files: int = 0
    size_bytes: int = 0
    modified_ms: int = 0
    """Of the youngest file."""

    def add(self, meta: ObjectMeta) -> None:
        self.files += 1
        self.size_bytes += meta.size_bytes
        self.modified_ms = max(self.modified_ms, meta.modified_ms)

    def doomed(self, key: str, what: str, why: str) -> Doomed:
        return Doomed(key, what, why, self.size_bytes, self.files, directory=True)


@dataclass(slots=True)
class RegionFiles:
    """What was listed of one region."""

    region_id: uuid.UUID
    manifests: dict[int, ObjectMeta] = field(default_factory=dict)
    entries: dict[int, ObjectMeta] = field(default_factory=dict)
    directories: dict[str, Directory] = field(default_factory=dict)
    temporary: list[ObjectMeta] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    def add(self, meta: ObjectMeta) -> None:
        _, _, inside = meta.key.split("/", 2)
        top, _, name = inside.partition("/")
        if names.generation_of(top) is not None and name:
            self.directories.setdefault(top, Directory()).add(meta)
        elif top in ("manifest", "wal") and names.is_unfinished(name):
            self.temporary.append(meta)
        elif top == "manifest" and name == "version_hint.json":
            return
        elif top == "manifest" and (found := _number(name, ".binpb")) is not None:
            self.manifests[found] = meta
        elif top == "wal" and (found := _number(name, ".arrow")) is not None:
            self.entries[found] = meta
        else:
            self.unknown.add(meta.key if top in ("manifest", "wal") else _top(meta.key))


def _number(name: str, suffix: str) -> int | None:
    return names.from_bitrev(name.removesuffix(suffix)) if name.endswith(suffix) else None


def _top(key: str) -> str:
    """A file directly below the region, or the directory there that it is in."""
    head = "/".join(key.split("/")[:3])
    return head if head == key else f"{head}/"


@dataclass(frozen=True, slots=True)
class Needs:
    """What the versions that are kept still read of regions."""

    newest: MemWalIndexDetails
    lagging: Mapping[str, Mapping[uuid.UUID, int]]
    """Indexes that do not cover the base, each with how far it has come."""
    young: Sequence[tuple[int, MemWalIndexDetails]]
    """Versions that a reader may have opened, with all that it found in front of them."""
    named: Mapping[tuple[uuid.UUID, str], str]
    """Generations that the snapshot of a version names, and which version."""

    def reason(self, region_id: uuid.UUID, generation: int, path: str | None) -> str | None:
        """Why a generation has to stay, or None."""
        if generation > self.newest.merged(region_id):
            return "not merged"
        for name, progress in self.lagging.items():
            if generation > progress.get(region_id, 0):
                return f"index {name} has not caught up"
        for version, details in self.young:
            if generation > details.merged(region_id):
                return f"version {version} may be read by somebody"
        if path is not None and (region_id, path) in self.named:
            return f"{self.named[region_id, path]} needs it"
        return None


@dataclass(frozen=True, slots=True)
class RegionPlan:
    region_id: uuid.UUID
    unlisted: tuple[str, ...] = ()
    """Generations to be taken out of the manifest before their directories go."""
    manifests: tuple[Doomed, ...] = ()
    doomed: tuple[Doomed, ...] = ()
    kept: tuple[Doomed, ...] = ()
    unknown: tuple[str, ...] = ()
    was_claimed: bool = True
    """Whether it has a manifest; without one there can be nothing but rows staged for it."""


def plan_region(
    table: BaseTable, files: RegionFiles, needs: Needs, limits: GcLimits, now_ms: int
) -> RegionPlan:
    """What of a region may go; its manifest is read here, after its files were listed."""
    manifest = _latest(table, files.region_id)
    was_claimed = manifest is not None
    unknown = sorted(files.unknown)
    if manifest is None and not files.entries and not files.manifests:
        # Nobody has claimed it yet: there can be nothing but rows that were staged for it.
        manifest = RegionManifest(files.region_id)
    if manifest is None:
        left = f"{names.region_dir(files.region_id)}/ (no manifest: restore it, or remove all)"
        return RegionPlan(files.region_id, unknown=(*unknown, left))
    doomed, kept, unlisted = _generations(files, manifest, needs)
    orphans, young = _orphans(files, manifest, needs, limits, now_ms)
    entries, fences = _entries(table, files, manifest, needs, limits, now_ms)
    temporary = [
        Doomed(meta.key, "temporary files", LEFT_BY_A_CRASH, meta.size_bytes)
        for meta in files.temporary
        if is_older(meta.modified_ms, limits.orphan_seconds, now_ms)
    ]
    return RegionPlan(
        files.region_id,
        unlisted=tuple(unlisted),
        manifests=tuple(_old_manifests(files, manifest, limits, now_ms)),
        doomed=(*doomed, *orphans, *temporary, *entries),
        kept=(*kept, *young, *fences),
        unknown=tuple(unknown),
        was_claimed=was_claimed,
    )


def _latest(table: BaseTable, region_id: uuid.UUID) -> RegionManifest | None:
    """The latest manifest, read again: it has no checksum, and files go by what it says."""
    chain = manifest_chain(table.store, region_id, table.seams)
    found = patiently(table.seams, chain.latest)
    if found is None:
        return None
    return _manifest(table, region_id, found.version)


def _manifest(table: BaseTable, region_id: uuid.UUID, version: int) -> RegionManifest:
    key = names.manifest_key(region_id, version)
    return RegionManifest.decode(get_twice(table.store, key, table.seams), key)


def _generations(
    files: RegionFiles, manifest: RegionManifest, needs: Needs
) -> tuple[list[Doomed], list[Doomed], list[str]]:
    doomed, kept, unlisted = [], [], []
    for listed in manifest.flushed_generations:
        key = f"{names.region_dir(files.region_id)}/{listed.path}"
        found = files.directories.get(listed.path)
        reason = needs.reason(files.region_id, listed.generation, listed.path)
        if reason is None:
            unlisted.append(listed.path)
            if found is not None:
                doomed.append(found.doomed(key, "generations", _MERGED))
        elif found is not None and listed.generation <= needs.newest.merged(files.region_id):
            kept.append(found.doomed(key, "generations", reason))
    return doomed, kept, unlisted


def _orphans(
    files: RegionFiles,
    manifest: RegionManifest,
    needs: Needs,
    limits: GcLimits,
    now_ms: int,
) -> tuple[list[Doomed], list[Doomed]]:
    paths = {listed.path for listed in manifest.flushed_generations}
    numbers = {listed.generation for listed in manifest.flushed_generations}
    doomed, kept = [], []
    for path, found in files.directories.items():
        if path in paths:
            continue
        generation = names.generation_of(path)
        assert generation is not None
        key = f"{names.region_dir(files.region_id)}/{path}"
        if (files.region_id, path) in needs.named:
            reason: str | None = f"{needs.named[files.region_id, path]} needs it"
        elif generation >= manifest.current_generation:
            reason = "may belong to a flush that is not finished"
            if is_older(found.modified_ms, limits.orphan_seconds, now_ms):
                reason = None
        elif generation in numbers:
            # The generation is listed with another directory, so this one never was.
            reason = None
        else:
            reason = needs.reason(files.region_id, generation, None)
        if reason is None and generation < manifest.current_generation:
            young = not is_older(found.modified_ms, limits.retain_seconds, now_ms)
            reason = "young, and somebody may be reading it" if young else None
        if reason is None:
            doomed.append(found.doomed(key, "orphans", NO_MANIFEST_LISTS))
        else:
            kept.append(found.doomed(key, "orphans", reason))
    return doomed, kept


def _old_manifests(
    files: RegionFiles, manifest: RegionManifest, limits: GcLimits, now_ms: int
) -> Iterable[Doomed]:
    for version, meta in sorted(files.manifests.items()):
        newest = version > manifest.version - KEPT_VERSIONS
        if newest or not is_older(meta.modified_ms, limits.manifest_seconds, now_ms):
            return
        yield Doomed(meta.key, "region manifests", "newer ones replace them", meta.size_bytes)


def _entries(
    table: BaseTable,
    files: RegionFiles,
    manifest: RegionManifest,
    needs: Needs,
    limits: GcLimits,
    now_ms: int,
) -> tuple[list[Doomed], list[Doomed]]:
    boundary = _boundary(table, files, manifest, needs, limits, now_ms)
    covered = [meta for position, meta in sorted(files.entries.items()) if position < boundary]
    small = [
        meta
        for meta in covered
        if meta.size_bytes <= FENCE_BYTES
        and not is_older(meta.modified_ms, limits.fence_seconds, now_ms)
    ]
    fences: set[str] = set()
    if small:
        with ThreadPoolExecutor(READ_THREADS, "penstock-fences") as pool:
            found = pool.map(lambda meta: _is_fence(table, meta), small)
            fences = {meta.key for meta, fence in zip(small, found, strict=True) if fence}
    doomed, kept = [], []
    for meta in covered:
        if meta.key in fences:
            why = "a writer that was shut out would collide with it"
            kept.append(Doomed(meta.key, "fences", why, meta.size_bytes))
        else:
            why = "their rows are in generations"
            doomed.append(Doomed(meta.key, "WAL entries", why, meta.size_bytes))
    return doomed, kept


def _boundary(
    table: BaseTable,
    files: RegionFiles,
    manifest: RegionManifest,
    needs: Needs,
    limits: GcLimits,
    now_ms: int,
) -> int:
    """The first position that has to stay: that of the last entry which is covered long enough."""
    window = needs.newest.writer_config_defaults.get(_FENCE_WINDOW, "")
    seconds = limits.boundary_seconds(int(window) if window.isdecimal() else 0)
    settled = [
        version
        for version, meta in files.manifests.items()
        if version <= manifest.version and is_older(meta.modified_ms, seconds, now_ms)
    ]
    if not settled:
        return 0
    version = max(settled)
    if version != manifest.version:
        try:
            manifest = _manifest(table, files.region_id, version)
        except ObjectNotFound:
            return 0
    return manifest.replay_after_wal_entry_position


def _is_fence(table: BaseTable, meta: ObjectMeta) -> bool:
    """Whether an entry is a fence; one that cannot be read is kept like one."""
    try:
        data = get_twice(table.store, meta.key, table.seams)
        return decode_entry(data, 0, meta.key).is_fence
    except ObjectNotFound:
        return False
    except Corruption:
        return True
