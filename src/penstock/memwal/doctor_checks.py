"""The checks of `doctor`: each looks at one thing, and yields troubles, or a line if all is well.

What several checks need is read once, when the table is admitted. A check reads listings and
manifests; the log's tail, which every read of the table reads, is the only data that is opened.
One trouble stands for all of its kind and names the worst, so that a diagnosis stays short.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import Corruption, PenstockError
from penstock.index.primary_key import PK_INDEX_DIRECTORY, key_array, newest_rows
from penstock.memwal import names
from penstock.memwal.base_parts import FragmentPart, IndexPart, read_fragments, read_indexes
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.build_indexes import MAX_SEGMENTS
from penstock.memwal.config import WriterConfig
from penstock.memwal.gc_limits import RETAIN_SECONDS, GcLimits
from penstock.memwal.gc_plan import plan_gc
from penstock.memwal.gc_report import NEVER_NAMED
from penstock.memwal.manifest import FlushedGeneration, RegionManifest, RegionStatus, manifest_chain
from penstock.memwal.region_parts import each, first_unflushed_ms, list_log, open_generation
from penstock.memwal.regions import list_region_ids
from penstock.memwal.snapshots import SnapshotGone, read_snapshot
from penstock.memwal.status import RegionState, region_state, seconds_since, small
from penstock.memwal.table_versions import version_of
from penstock.memwal.tabular import age, counted, share, size
from penstock.memwal.wal import Wal

_SHOWN_KEYS = 10
RECOVER = "maintain --recover"


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is worth telling."""

    unmerged_generations: int = 8
    unmerged_rows: int = 1_000_000
    uncovered_rows: int = 100_000
    uncovered_share: float = 0.10
    index_segments: int = MAX_SEGMENTS
    small_fragments: int = 16
    """Maintenance joins fragments of like size, and may leave one of each magnitude."""
    deletion_share: float = 0.20
    versions: int = 1000
    snapshot_seconds: float = 3600.0
    log_idle_seconds: float | None = None
    """None: twice the age at which the table's writers flush."""


@dataclass(frozen=True, slots=True)
class Trouble:
    sick: bool
    where: str
    what: str
    cure: str | None = None
    command: str | None = None
    """The `penstock` command with its options, without the table's URI."""


@dataclass(frozen=True, slots=True)
class Ward:
    """A table while it is examined."""

    table: BaseTable
    base: BaseSnapshot
    limits: Limits
    held: frozenset[uuid.UUID]
    manifests: tuple[RegionManifest, ...]
    unreadable: tuple[tuple[uuid.UUID, str | None], ...]
    """Regions whose manifest cannot be read, with the reason; None if there is no manifest."""
    regions: tuple[RegionState, ...]
    fragments: tuple[FragmentPart, ...]
    indexes: tuple[IndexPart, ...]

    def unmerged(self) -> list[tuple[RegionManifest, FlushedGeneration]]:
        merged = self.base.details.merged
        return [
            (manifest, flushed)
            for manifest in self.manifests
            for flushed in manifest.flushed_generations
            if flushed.generation > merged(manifest.region_id)
        ]


def admit(table: BaseTable, held: frozenset[uuid.UUID], limits: Limits) -> Ward:
    base = table.snapshot()
    manifests: list[RegionManifest] = []
    unreadable: list[tuple[uuid.UUID, str | None]] = []

    def load(region_id: uuid.UUID) -> RegionManifest | PenstockError | None:
        try:
            return manifest_chain(table.store, region_id, table.seams).latest()
        except PenstockError as error:
            return error

    ids = sorted(list_region_ids(table.store))
    for region_id, loaded in zip(ids, each(load, ids), strict=True):
        if isinstance(loaded, RegionManifest):
            manifests.append(loaded)
        else:
            unreadable.append((region_id, None if loaded is None else str(loaded)))
    fragments = read_fragments(base, table.store)
    return Ward(
        table=table,
        base=base,
        limits=limits,
        held=held,
        manifests=tuple(manifests),
        unreadable=tuple(unreadable),
        regions=tuple(each(lambda manifest: region_state(table, base, manifest), manifests)),
        fragments=fragments,
        indexes=read_indexes(base, fragments),
    )


# --- what can be lost ----------------------------------------------------------------------


def base_files(ward: Ward) -> Iterator[Trouble | str]:
    """Whether every file that the newest version names is there, and as long as it was."""
    store = ward.table.store
    present = {
        meta.key: meta.size_bytes
        for directory in ("data", "_deletions")
        for meta in store.list(directory)
    }
    wanted: dict[str, int | None] = {}
    for fragment in ward.fragments:
        wanted.update((file.path, file.size_bytes) for file in fragment.files)
        if fragment.deletion_file is not None:
            wanted[fragment.deletion_file] = None
    gone = sorted(key for key in wanted if key not in present)
    short = sorted(key for key, long in wanted.items() if long and present.get(key, long) != long)
    for keys, said in ((gone, "missing"), (short, "not as long as it was")):
        if keys:
            yield Trouble(
                True,
                f"{ward.table.uri}/{keys[0]}",
                f"{counted(len(keys), 'file')} of version {ward.base.version} "
                f"{'is' if len(keys) == 1 else 'are'} {said}; restore from a copy",
            )
    lost = [
        (index.name, segment.uuid)
        for index in ward.indexes
        for segment in index.segments
        if segment.size_bytes and not any(store.list(f"_indices/{segment.uuid}"))
    ]
    for name, identity in lost:
        yield Trouble(
            True,
            f"{ward.table.uri}/_indices/{identity}",
            f"a segment of index {name} is missing; restore it from a copy, or drop the index "
            "and create it again",
        )
    if not (gone or short or lost):
        yield f"all {counted(len(wanted), 'file')} of version {ward.base.version} are there"


def region_manifests(ward: Ward) -> Iterator[Trouble | str]:
    for region_id, reason in ward.unreadable:
        where = f"{ward.table.uri}/{names.region_dir(region_id)}"
        if reason is not None:
            yield Trouble(True, where, reason)
        else:
            yield Trouble(
                True,
                where,
                "the region has files but no manifest; restore it from a copy, or remove the "
                "directory if nothing in it matters",
            )
    if not ward.unreadable:
        yield f"{counted(len(ward.manifests), 'region')}, every manifest can be read"


def logs(ward: Ward) -> Iterator[Trouble | str]:
    """Whether rows that are only in the log can be read, and whether somebody will flush them."""
    fine = True
    idle: list[tuple[float, RegionState]] = []
    limit = _log_idle_seconds(ward)
    for manifest, region in zip(ward.manifests, ward.regions, strict=True):
        damage = _log_damage(ward, manifest)
        if damage is not None:
            fine = False
            yield damage
            continue
        covered = manifest.replay_after_wal_entry_position
        if region.wal_position == covered or region.region_id in ward.held:
            continue
        oldest = first_unflushed_ms(ward.table, region.region_id, covered, region.wal_position)
        if oldest is not None and (waited := seconds_since(ward.table, oldest)) > limit:
            idle.append((waited, region))
    if idle:
        waited, worst = max(idle, key=lambda pair: pair[0])
        yield Trouble(
            False,
            f"region {worst.region_id}",
            f"{counted(len(idle), 'region')} with rows that are only in the log, the oldest for "
            f"{age(waited)}; their writers are gone, or cannot flush",
            "table.flush(recover=True)",
            RECOVER,
        )
    elif fine:
        entries = sum(region.wal_lag_entries for region in ward.regions)
        yield f"{counted(entries, 'entry')} not flushed yet, all of them can be read"


def _log_idle_seconds(ward: Ward) -> float:
    if ward.limits.log_idle_seconds is not None:
        return ward.limits.log_idle_seconds
    config = WriterConfig().with_defaults(ward.base.details.writer_config_defaults)
    return 2 * config.max_memtable_age_ms / 1000


def _log_damage(ward: Ward, manifest: RegionManifest) -> Trouble | None:
    store, region_id = ward.table.store, manifest.region_id
    covered = manifest.replay_after_wal_entry_position
    position = covered
    try:
        for entry in Wal(store, region_id, ward.table.seams).tail(covered):
            position = entry.position
    except Corruption as error:
        return Trouble(True, f"region {region_id}", str(error))
    beyond = [at for at in list_log(store, region_id) if at > position + 1]
    if beyond:
        return Trouble(
            True,
            f"{ward.table.uri}/{names.wal_key(region_id, position + 1)}",
            f"log entry {position + 1} is missing although entry {beyond[0]} exists; restore it "
            "from a copy",
        )
    return None


def generations(ward: Ward) -> Iterator[Trouble | str]:
    """Whether every generation that is not merged can be read."""
    unmerged = ward.unmerged()
    reasons = each(lambda pair: _generation_damage(ward, *pair), unmerged)
    broken = [
        (f"{names.region_dir(manifest.region_id)}/{flushed.path}", reason)
        for (manifest, flushed), reason in zip(unmerged, reasons, strict=True)
        if reason is not None
    ]
    for prefix, reason in broken:
        yield Trouble(
            True,
            f"{ward.table.uri}/{prefix}",
            f"a generation that is not merged {reason}; restore it from a copy",
        )
    if not broken:
        yield f"{counted(len(unmerged), 'generation')} not merged yet, all of them are there"


def _generation_damage(
    ward: Ward, manifest: RegionManifest, flushed: FlushedGeneration
) -> str | None:
    prefix = f"{names.region_dir(manifest.region_id)}/{flushed.path}"
    present = {meta.key: meta.size_bytes for meta in ward.table.store.list(prefix)}
    if not present:
        return "is missing"
    try:
        dataset = open_generation(ward.table, prefix)
    except (OSError, ValueError) as error:
        return f"cannot be opened ({str(error).partition(', /')[0]})"
    rows = 0
    for fragment in dataset.get_fragments():
        rows += fragment.physical_rows
        deletions = fragment.deletion_file()
        if deletions is not None and f"{prefix}/{deletions}" not in present:
            return f"has lost {deletions}"
        for file in fragment.metadata.files:
            found = present.get(f"{prefix}/data/{file.path}")
            if found is None:
                return f"has lost data/{file.path}"
            if file.file_size_bytes not in (None, 0, found):
                return f"has data/{file.path} of {found} bytes, not {file.file_size_bytes}"
    if flushed.physical_rows not in (None, rows):
        return f"has {rows} rows, not {flushed.physical_rows}"
    if ward.base.shape.key_columns and not any(
        key.startswith(f"{prefix}/{PK_INDEX_DIRECTORY}/") for key in present
    ):
        return f"has lost {PK_INDEX_DIRECTORY}"
    return None


# --- what is late --------------------------------------------------------------------------


def merge_lag(ward: Ward) -> Iterator[Trouble | str]:
    limits = ward.limits
    late = [
        region
        for region in ward.regions
        if region.unmerged_generations > limits.unmerged_generations
        or region.unmerged_rows > limits.unmerged_rows
    ]
    total = sum(region.unmerged_generations for region in ward.regions)
    rows = sum(region.unmerged_rows for region in ward.regions)
    if not late:
        yield f"{counted(total, 'generation')} with {counted(rows, 'row')} to merge"
        return
    worst = max(late, key=lambda region: (region.unmerged_rows, region.unmerged_generations))
    yield Trouble(
        False,
        f"region {worst.region_id}",
        f"{counted(total, 'generation')} with {counted(rows, 'row')} to merge, up to "
        f"{counted(max(region.unmerged_generations for region in late), 'generation')} a region; "
        "reads get slower with each",
        "table.merge()",
        "maintain",
    )


def region_specs(ward: Ward) -> Iterator[Trouble | str]:
    """Regions of a replaced spec hold up the merge of newer ones until they are sealed."""
    current = ward.base.details.current_spec
    newest = 0 if current is None else current.spec_id
    open_still = [
        manifest
        for manifest in ward.manifests
        if manifest.region_spec_id < newest and manifest.status is not RegionStatus.SEALED
    ]
    if not open_still:
        yield f"spec {newest} divides the table, and regions of older ones are sealed"
        return
    oldest = min(manifest.region_spec_id for manifest in open_still)
    waiting = sum(
        region.unmerged_generations for region in ward.regions if region.region_spec_id > oldest
    )
    yield Trouble(
        False,
        f"region {open_still[0].region_id}",
        f"{counted(len(open_still), 'region')} of an older spec not sealed; "
        f"{counted(waiting, 'generation')} of newer ones must wait to be merged",
        "table.flush(recover=True); table.merge()",
        RECOVER,
    )


def index_lag(ward: Ward) -> Iterator[Trouble | str]:
    limits = ward.limits
    late = [
        index
        for index in ward.indexes
        if index.uncovered_rows > limits.uncovered_rows
        or index.uncovered_share > limits.uncovered_share
    ]
    for index in late:
        rows = index.covered_rows + index.uncovered_rows
        yield Trouble(
            False,
            f"index {index.name}",
            f"{index.uncovered_rows:,} of {counted(rows, 'row')} "
            f"({share(index.uncovered_rows, rows)}) of the base table not covered; searches "
            "read these one by one",
            "table.build_indexes()",
            "maintain",
        )
    many = [index for index in ward.indexes if len(index.segments) > limits.index_segments]
    for index in many:
        yield Trouble(
            False,
            f"index {index.name}",
            f"{counted(len(index.segments), 'segment')}; a search goes through each",
            "table.build_indexes()",
            "maintain",
        )
    if not (late or many):
        worst = max((index.uncovered_rows for index in ward.indexes), default=0)
        yield f"{counted(len(ward.indexes), 'index')}, {counted(worst, 'row')} not covered at most"


def fragments(ward: Ward) -> Iterator[Trouble | str]:
    tiny = small(ward.fragments)
    said = f"{len(tiny):,} of {counted(len(ward.fragments), 'fragment')} are small"
    if len(tiny) <= ward.limits.small_fragments:
        yield said
        return
    worst = min(tiny, key=lambda fragment: fragment.rows)
    yield Trouble(
        False,
        f"fragment {worst.fragment_id}",
        f"{said}, down to {counted(worst.rows, 'row')}; each is a file to open",
        "table.compact()",
        "maintain",
    )


def deletions(ward: Ward) -> Iterator[Trouble | str]:
    stored = sum(fragment.physical_rows for fragment in ward.fragments)
    deleted = sum(fragment.deleted_rows for fragment in ward.fragments)
    said = f"{share(deleted, stored)} of the rows in the base table's files are deleted"
    if not stored or deleted / stored <= ward.limits.deletion_share:
        yield said
        return
    worst = max(ward.fragments, key=lambda fragment: fragment.deleted_rows)
    yield Trouble(False, f"fragment {worst.fragment_id}", said, "table.compact()", "maintain")


def snapshot(ward: Ward) -> Iterator[Trouble | str]:
    """A snapshot is worth having only to those who took one; then it must be whole and recent."""
    details = ward.base.details
    if details.inline_snapshots is None:
        yield "none was taken; eventual reads see the base table alone"
        return
    where = f"the snapshot in version {ward.base.version}"
    try:
        regions = read_snapshot(ward.table.store, details.inline_snapshots, where)
    except (SnapshotGone, Corruption) as error:
        what = f"{error}; eventual reads fail"
        yield Trouble(True, ward.table.uri, what, "table.snapshot()", "maintain")
        return
    held = {
        (region.region_id, one.generation)
        for region in regions
        for one in region.flushed_generations
    }
    lacking = [
        manifest.region_id
        for manifest, one in ward.unmerged()
        if (manifest.region_id, one.generation) not in held
    ]
    waited = seconds_since(ward.table, details.snapshot_ts_millis)
    said = f"taken {age(waited)} ago, lacks {counted(len(lacking), 'generation')}"
    if lacking and waited > ward.limits.snapshot_seconds:
        where, what = f"region {lacking[0]}", f"{said}; eventual reads do not see them"
        yield Trouble(False, where, what, "table.snapshot()", "maintain")
    else:
        yield said


def versions(ward: Ward) -> Iterator[Trouble | str]:
    kept = sorted(
        (version, meta.modified_ms)
        for meta in ward.table.store.list("_versions")
        if (version := version_of(meta.key)) is not None
    )
    if len(kept) <= ward.limits.versions:
        yield f"{counted(len(kept), 'version')} kept"
        return
    # A version may go so long after the next one has replaced it.
    replaced = [ended for _, ended in kept[1:]]
    young = [ended for ended in replaced if seconds_since(ward.table, ended) <= RETAIN_SECONDS]
    enough = len(young) < ward.limits.versions
    yield Trouble(
        False,
        f"versions {kept[0][0]} to {kept[-1][0]}",
        f"{counted(len(kept), 'version')} kept, with all files that only they need",
        "table.gc()" if enough else "table.gc(retain_seconds=60)",
        "gc" if enough else "gc --retain-seconds 60",
    )


def orphans(ward: Ward) -> Iterator[Trouble | str]:
    """Files that nothing ever named, left by crashes, and what does not belong there at all."""
    if ward.unreadable:
        yield "cannot be told while a region's manifest is missing or damaged"
        return
    # By our clock: to ask the store for its own is to write to it.
    plan = plan_gc(ward.table, GcLimits(), ward.table.seams.clock.now_ms())
    doomed = [one for piece in plan.pieces for one in piece.doomed]
    left = [one for one in doomed if one.why in NEVER_NAMED]
    if left:
        yield Trouble(
            False,
            f"{ward.table.uri}/{left[0].key}",
            f"{counted(sum(one.files for one in left), 'file')} with "
            f"{size(sum(one.size_bytes for one in left))} that nothing names, left by crashes",
            "table.gc()",
            "gc",
        )
    if plan.unknown:
        yield Trouble(
            False,
            f"{ward.table.uri}/{plan.unknown[0]}",
            f"{counted(len(plan.unknown), 'thing')} in the table's directory that is neither "
            "Lance's nor Penstock's; move it elsewhere",
        )
    if not (left or plan.unknown):
        waste = sum(line.size_bytes for line in plan.lines())
        yield f"none; {size(waste)} that nothing needs any more can be removed"


def duplicate_keys(ward: Ward) -> Iterator[Trouble | str]:
    """Whether a key is in the base table twice; reads every key."""
    columns = ward.base.shape.key_columns
    if not columns:
        yield "the table has no primary key"
        return
    scanner = ward.base.dataset.scanner(columns=list(columns))
    batches = list(scanner.to_batches())
    parts = [key_array(batch, columns) for batch in batches]
    if not parts:
        yield "the base table is empty"
        return
    older = pa.array(~newest_rows(pa.concat_arrays(parts)))
    rows = pa.Table.from_batches(batches).filter(older)
    if not rows.num_rows:
        yield f"{counted(len(older), 'key')} in the base table, each once"
        return
    shown = rows.slice(0, _SHOWN_KEYS).to_pylist()
    keys = [tuple(row.values()) if len(columns) > 1 else row[columns[0]] for row in shown]
    yield Trouble(
        True,
        f"keys {', '.join(map(repr, keys))}",
        f"{counted(rows.num_rows, 'row')} of the base table with a key that another row has, too: "
        "another tool appended them; decide which is right, and upsert it",
        f"table.upsert(table.get_many({keys!r})); table.flush(); table.merge()",
    )
