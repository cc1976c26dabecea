"""What clean-up may remove: the files of a table against what its versions still need.

    list every file -> tags and branches -> versions -> region manifests -> plan

The order is the point: candidates are listed before anything is read that could name them, so a
file that is named later was either listed as young, or not at all. What is neither Penstock's nor
Lance's is reported, and left.

A version is kept for as long as a reader may have opened it: until the given time after a newer one
replaced it, or for as long as a tag or a branch names it. The newest always is. A file of the base
goes if an old version named it and no kept one does; if none ever did, only when it is so old
that no job may name it any more (`gc_limits`). What of a region may go is said in `gc_regions`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from penstock.errors import Corruption, NotATable
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.gc_limits import GcLimits, is_clock_probe, is_older, store_now_ms
from penstock.memwal.gc_regions import Directory, Needs, RegionFiles, RegionPlan, plan_region
from penstock.memwal.gc_report import NO_VERSION_NAMES, Doomed, GcLine, lines_of
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.packed_specs import packed_file, packed_specs
from penstock.memwal.snapshots import SnapshotGone, external_of, read_snapshot
from penstock.memwal.table_files import (
    FileSet,
    TableVersion,
    newer_manifests,
    patiently,
    read_refs,
    read_versions,
)
from penstock.memwal.table_versions import version_of
from penstock.storage.objects import ObjectMeta

PIECE_KEYS = 1000
THREADS = 8
_KINDS = {
    "data": "data files",
    "_deletions": "deletion files",
    "_transactions": "transactions",
    "_indices": "index files",
    "_versions": "detached versions",
}
_SUFFIXES = {
    "data": (".lance", ".blob"),
    "_deletions": (".arrow", ".bin"),
    "_transactions": (".txn",),
}


@dataclass(frozen=True, slots=True)
class GcPiece:
    """Files that can be removed anywhere; of a region also old versions of its manifest."""

    region_id: uuid.UUID | None
    doomed: tuple[Doomed, ...]
    manifests: tuple[Doomed, ...] = ()
    newest: int = 0
    """The last version that was asked whether it names one of the files."""
    was_claimed: bool = True
    """Whether the region had a manifest."""


@dataclass(frozen=True, slots=True)
class GcPlan:
    newest: int
    refs: tuple[tuple[int, str], ...]
    versions: tuple[Doomed, ...]
    """Manifests of versions that go, in their order."""
    gaps: tuple[int, ...]
    """Versions that are kept while the next one goes."""
    closed_gaps: tuple[int, ...]
    unlisted: tuple[tuple[uuid.UUID, tuple[str, ...]], ...]
    pieces: tuple[GcPiece, ...]
    kept: tuple[GcLine, ...]
    unknown: tuple[str, ...]

    def lines(self) -> tuple[GcLine, ...]:
        inside = [one for piece in self.pieces for one in (*piece.doomed, *piece.manifests)]
        return lines_of([*self.versions, *inside])


def plan_gc(table: BaseTable, limits: GcLimits, now_ms: int | None = None) -> GcPlan:
    """What may go, as of now; without the time given the store is asked, by writing to it."""
    if now_ms is None:
        now_ms = patiently(table.seams, store_now_ms, table.store, table.seams)
    listed = _Listed(patiently(table.seams, lambda: list(table.store.list())))
    # From here on everything is younger than the listing.
    refs = read_refs(table.store, table.seams)
    versions = _Versions(table, listed, refs, limits, now_ms)
    needs = versions.needs()

    def plan(files: RegionFiles) -> RegionPlan:
        return plan_region(table, files, needs, limits, now_ms)

    with ThreadPoolExecutor(THREADS, "penstock-gc") as pool:
        regions = list(pool.map(plan, listed.regions.values()))
    doomed, kept = _base_files(listed, versions, limits, now_ms)
    pieces = [
        GcPiece(None, part, newest=versions.newest.version) for part in _parts(doomed, PIECE_KEYS)
    ]
    for region in regions:
        parts = _parts(region.doomed, PIECE_KEYS) or ([()] if region.manifests else [])
        for number, part in enumerate(parts):
            manifests = region.manifests if number == 0 else ()
            claimed = region.was_claimed
            pieces.append(GcPiece(region.region_id, part, manifests, was_claimed=claimed))
    unknown = sorted({*listed.unknown, *(name for region in regions for name in region.unknown)})
    return GcPlan(
        newest=versions.newest.version,
        refs=tuple(sorted(refs.items())),
        versions=tuple(versions.doomed),
        gaps=tuple(versions.gaps),
        closed_gaps=tuple(sorted(listed.gaps - versions.kept)),
        unlisted=tuple((r.region_id, r.unlisted) for r in regions if r.unlisted),
        pieces=tuple(pieces),
        kept=lines_of([*kept, *(one for region in regions for one in region.kept)]),
        unknown=tuple(unknown),
    )


class _Listed:
    """Every file of a table, by what it is."""

    def __init__(self, metas: Iterable[ObjectMeta]) -> None:
        self.versions: list[ObjectMeta] = []
        self.files: list[ObjectMeta] = []
        """Files of the base, temporary ones too."""
        self.indexes: dict[str, Directory] = {}
        self.regions: dict[uuid.UUID, RegionFiles] = {}
        self.packed: list[ObjectMeta] = []
        """Packed indexes of the base's data files."""
        self.gaps: set[int] = set()
        self.unknown: set[str] = set()
        for meta in metas:
            if not self._add(meta):
                parts = meta.key.split("/")
                shown = 2 if parts[0] in (*_KINDS, names.MEM_WAL) else 1
                cut = "/".join(parts[:shown])
                self.unknown.add(cut if cut == meta.key else f"{cut}/")

    def _add(self, meta: ObjectMeta) -> bool:
        top, _, rest = meta.key.partition("/")
        last = meta.key.rpartition("/")[2]
        if top == names.MEM_WAL:
            return self._add_to_region(meta, rest)
        if top == names.PRIVATE:
            if meta.key.startswith(f"{names.GAPS}/") and last.isdecimal():
                self.gaps.add(int(last))
            elif is_clock_probe(meta.key):
                self.files.append(meta)
            elif packed_file(meta.key) is not None:
                self.packed.append(meta)
            return True
        if top == "_refs":
            return True
        if top in _KINDS and names.is_unfinished(last):
            self.files.append(meta)
            return True
        if top == "_versions":
            if version_of(meta.key) is not None:
                self.versions.append(meta)
            elif last.startswith("d") and last[1:].removesuffix(".manifest").isdecimal():
                self.files.append(meta)
            elif last != "latest_version_hint.json":
                return False
            return True
        if top == "_indices":
            directory = rest.partition("/")[0]
            if not _is_uuid(directory) or directory == rest:
                return False
            self.indexes.setdefault(directory, Directory()).add(meta)
            return True
        if top in _SUFFIXES and meta.key.endswith(_SUFFIXES[top]):
            if rest.count("/") > (1 if rest.endswith(".blob") else 0):
                return False
            self.files.append(meta)
            return True
        return False

    def _add_to_region(self, meta: ObjectMeta, rest: str) -> bool:
        name, _, inside = rest.partition("/")
        if not inside or not _is_uuid(name):
            return False
        region_id = uuid.UUID(name)
        self.regions.setdefault(region_id, RegionFiles(region_id)).add(meta)
        return True


def _is_uuid(name: str) -> bool:
    try:
        return str(uuid.UUID(name)) == name
    except ValueError:
        return False


class _Versions:
    """Which versions are kept, and what they need."""

    def __init__(
        self,
        table: BaseTable,
        listed: _Listed,
        refs: dict[int, str],
        limits: GcLimits,
        now_ms: int,
    ) -> None:
        self._table = table
        self._refs = refs
        metas = newer_manifests(table.store, 0, table.seams, listed.versions)
        if not metas:
            raise NotATable(f"{table.uri} has no version, so nothing tells what it needs")
        numbers = [number for meta in metas if (number := version_of(meta.key)) is not None]
        ended_ms = [meta.modified_ms for meta in metas[1:]]
        young = {numbers[-1]} | {
            number
            for number, ended in zip(numbers, ended_ms, strict=False)
            if not is_older(ended, limits.retain_seconds, now_ms)
        }
        self.kept = young | (set(numbers) & set(refs))
        self.gaps = [n for n in numbers if n in self.kept and n + 1 in set(numbers) - self.kept]
        self.doomed = [
            Doomed(meta.key, "versions", "replaced long enough ago", meta.size_bytes)
            for number, meta in zip(numbers, metas, strict=True)
            if number not in self.kept
        ]
        self.needed, self.former = FileSet(), FileSet()
        stay = [m for number, m in zip(numbers, metas, strict=True) if number in self.kept]
        go = [m for number, m in zip(numbers, metas, strict=True) if number not in self.kept]
        versions: list[TableVersion] = []
        for version in read_versions(table.store, stay, table.seams):
            self.needed.add(version)
            self.newest = version
            versions.append(version.without_fragments())
        if self.newest.version != numbers[-1]:
            raise Corruption(
                f"{table.uri}: {stay[-1].key} is not, or does not say it is, version {numbers[-1]}"
            )
        # What a damaged one named is not known, and is kept until it is old.
        for version in read_versions(table.store, go, table.seams, pass_damaged=True):
            self.former.add(version)
        self._versions = [version for version in versions if version.details is not None]
        self._young = young

    def needs(self) -> Needs:
        """What these versions need of regions; marks the files of their snapshots as needed."""
        newest = self.newest.details
        if newest is None:
            raise NotATable(f"{self._table.uri} is a Lance table without a MemWAL index")
        young: list[tuple[int, MemWalIndexDetails]] = []
        named: dict[tuple[uuid.UUID, str], str] = {}
        snapshots: dict[bytes, tuple[RegionManifest, ...] | None] = {}
        for version in self._versions:
            details = version.details
            assert details is not None
            if version.version in self._young:
                young.append((version.version, details))
            inline = details.inline_snapshots
            if inline is None:
                continue
            if inline not in snapshots:
                snapshots[inline] = self._snapshot(inline, version.version)
            regions = snapshots[inline]
            if regions is None:
                # What it names is not known, so it keeps whatever it has not merged.
                young.append((version.version, details))
                continue
            name = f"version {version.version}"
            if version.version in self._refs:
                name += f" ({self._refs[version.version]})"
            for region in regions:
                for listed in region.flushed_generations:
                    if listed.generation > details.merged(region.region_id):
                        named.setdefault((region.region_id, listed.path), name)
        return Needs(newest, self._lagging(newest), young, named)

    def packed_uids(self) -> set[str]:
        """The packed indexes that a kept version declares."""
        kept = (version.details for version in self._versions if version.details is not None)
        return {spec.uid for details in kept for spec in packed_specs(details)}

    def _snapshot(self, inline: bytes, version: int) -> tuple[RegionManifest, ...] | None:
        where = f"the region snapshot of {self._table.uri} version {version}"
        try:
            key = external_of(inline, where)
            if key is not None:
                self.needed.indexes.add(key.split("/")[1])
            return patiently(self._table.seams, read_snapshot, self._table.store, inline, where)
        except (Corruption, SnapshotGone):
            return None

    def _lagging(self, details: MemWalIndexDetails) -> dict[str, dict[uuid.UUID, int]]:
        """The maintained indexes that do not cover the base, and how far they have come."""
        uncovered = self.newest.uncovered_indexes()
        if not details.maintain_all_indexes:
            uncovered &= set(details.maintained_indexes)
        return {
            name: dict(details.index_catchup.get(name, {}))
            for name in sorted(uncovered)
            if not name.startswith(SYSTEM_INDEX_PREFIX)
        }


def _base_files(
    listed: _Listed, versions: _Versions, limits: GcLimits, now_ms: int
) -> tuple[list[Doomed], list[Doomed]]:
    """Files of the base table that no kept version needs, and those too young to tell."""
    doomed: list[Doomed] = []
    kept: list[Doomed] = []

    def judge(
        key: str, what: str, found: Directory, *, directory: bool, named: str | None = None
    ) -> None:
        if (named or key) in versions.needed:
            return
        if (named or key) in versions.former:
            fate, why = doomed, "only versions that are gone named them"
        elif is_older(found.modified_ms, limits.orphan_seconds, now_ms):
            fate, why = doomed, NO_VERSION_NAMES
        else:
            fate, why = kept, "young, and may belong to a job that is not finished"
        one = found.doomed(key, what, why)
        fate.append(one if directory else replace(one, directory=False))

    for meta in listed.files:
        unfinished = names.is_unfinished(meta.key.rpartition("/")[2])
        temporary = unfinished or is_clock_probe(meta.key)
        what = "temporary files" if temporary else _KINDS[meta.key.partition("/")[0]]
        single = Directory()
        single.add(meta)
        judge(meta.key, what, single, directory=False)
    for name, found in sorted(listed.indexes.items()):
        judge(f"_indices/{name}", _KINDS["_indices"], found, directory=True)
    declared = versions.packed_uids()
    for meta in listed.packed:
        belongs = packed_file(meta.key)
        assert belongs is not None
        uid, data_file = belongs
        single = Directory()
        single.add(meta)
        # A declaration that is gone takes its files along, like data files of which they tell.
        named = data_file if uid in declared else meta.key
        judge(meta.key, "packed indexes", single, directory=False, named=named)
    return doomed, kept


def _parts(doomed: Sequence[Doomed], length: int) -> list[tuple[Doomed, ...]]:
    return [tuple(doomed[first : first + length]) for first in range(0, len(doomed), length)]
