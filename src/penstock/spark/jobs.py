"""The maintenance jobs of a table, each as Spark tasks: plan here, pieces there, commit here.

    merge      a task folds one region, or several small ones; one version for all of them
    index      a task builds a part of a segment for a group of fragments; one version for all
    compact    a task rewrites a group of fragments; one version for all
    snapshot   a task loads the manifests of some regions; one version
    gc         a task removes the files of some regions, or some of the base table's

They are the jobs of `memwal/`, with their plans, pieces and commits; only where pieces run is
decided here. What is due is what `Table.maintain` takes for due. Any number of pipelines and
processes may work on a table at once: a commit leaves out what somebody else has done, and removes
what was written for it. Whatever dies between a piece and its commit leaves files that nobody
names, which clean-up finds when they are old enough.

Tasks take some time to start, so little work is done by the driver: pieces of fewer than
`DRIVER_ROWS` rows in all, manifests of at most `DRIVER_REGIONS` regions, at most `DRIVER_FILES`
files. A table has one committer at a time in each job, this process: pieces' results are collected
and published together, in waves of a bounded size.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from lance.dataset import Index as LanceIndex
from pyspark.sql import SparkSession
from rich.console import Console

from penstock.errors import InvalidInput, VersionNotFound
from penstock.index.base import IndexSpec, load_index_specs
from penstock.memwal import create_index as index_creation
from penstock.memwal import packed_indexes
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.build_indexes import (
    BuiltSegment,
    IndexPlan,
    IndexReport,
    build_together,
    built_as,
    commit_or_remove,
    packed_report,
)
from penstock.memwal.compact import commit_compaction, compact_piece, plan_compaction
from penstock.memwal.compact_fit import Compacted, CompactionPiece, CompactionReport
from penstock.memwal.gc import Pieces, collect, run_pieces
from penstock.memwal.gc_limits import check_age
from penstock.memwal.gc_plan import PIECE_KEYS
from penstock.memwal.gc_report import GcLine
from penstock.memwal.index_parts import SegmentGroup, build_part, divide, join, remove
from penstock.memwal.maintain import (
    DELETED_SHARE,
    ROUNDS,
    Budget,
    describe_builds,
    describe_merge,
    due_builds,
)
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.merge import (
    MERGE_ROWS,
    MergePlan,
    MergeReport,
    commit_pieces,
    fold_piece,
    merge_piece,
    plan_merges,
)
from penstock.memwal.packed_indexes import (
    PACKED_KINDS,
    PackedBuild,
    PackedPlan,
    build_packed,
    plan_packed,
)
from penstock.memwal.sample import SampleShare, plan_sample, read_share
from penstock.memwal.snapshots import build_snapshot, load_regions
from penstock.spark import tasks
from penstock.spark.workers import TablePlace

T = TypeVar("T")
R = TypeVar("R")
Outcome = tuple[str, str]
"""What a job did, and what is left for the next time."""

DRIVER_ROWS = 100_000
"""Pieces of fewer rows in all are done by the driver."""
DRIVER_REGIONS = 64
"""Manifests of so many regions are loaded by the driver."""
DRIVER_FILES = 2_000
"""So many files are removed by the driver."""
TASK_ROWS = 100_000
"""Regions with fewer rows to merge share a task, up to about so many,"""
LOOKED_UP_SHARE = 4
"""or one in so many of the base table's rows: each task looks its keys up in all of them."""
WAVE_ROWS = 8_000_000
"""Rows that are folded or copied before they are committed: what a kill can make to be redone."""
_SAMPLE_BYTES = 256 << 20
_TASKS_PER_SLOT = 4
"""Tasks that read a sample, for each that can run at a time."""


@dataclass(slots=True)
class Tally:
    pieces: int = 0
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a job works on, and with."""

    spark: SparkSession
    place: TablePlace
    table: BaseTable
    name: str
    group: str
    budget: Budget
    console: Console | None = None
    tally: Tally = field(default_factory=Tally)

    def each(
        self,
        function: Callable[[BaseTable, T], R],
        items: Sequence[T],
        job: str,
        what: str,
        *,
        small: bool,
    ) -> list[R]:
        """Apply a function to the table and each item, in tasks unless the work is `small`."""
        self.tally.pieces += len(items)
        if small:
            return [function(self.table, item) for item in items]
        self.tally.tasks += len(items)
        return tasks.run(
            self.spark,
            partial(_on_table, self.place, function),
            items,
            f"penstock {job} {self.name}: {what}",
            group=self.group,
            console=self.console,
        )


def _on_table(place: TablePlace, function: Callable[[BaseTable, T], R], item: T) -> R:
    return function(place.base_table(), item)


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


# --- merge ---------------------------------------------------------------------------------


def merge(work: Work) -> Outcome:
    report = MergeReport()
    left = 0
    for _ in range(ROUNDS):
        plans, waiting = plan_merges(work.table, max_rows=MERGE_ROWS, together=False)
        report += MergeReport(waiting=waiting)
        left = sum(len(plan.generations) for plan in plans)
        for wave in _waves(_shared(work, plans), work.budget, lambda plan: plan.rows, _bytes_of):
            report += _merge_wave(work, wave)
            left -= sum(len(plan.generations) for plan in wave)
        if left or not plans:
            break
    else:
        plans, _ = plan_merges(work.table, max_rows=MERGE_ROWS, together=False)
        left = sum(len(plan.generations) for plan in plans)
    return describe_merge(report), f"{_count(left, 'generation')} to merge" if left else ""


def _merge_wave(work: Work, plans: Sequence[MergePlan]) -> MergeReport:
    if sum(map(_rows_of, plans)) < DRIVER_ROWS:
        work.tally.pieces += 1
        return merge_piece(work.table, _together(plans))
    regions = sum(len(plan.parts) for plan in plans)
    generations = sum(len(plan.generations) for plan in plans)
    said = f"{_count(regions, 'region')}, {_count(generations, 'generation')}"
    started_ms = work.table.seams.clock.monotonic_ms()
    folded = work.each(fold_piece, plans, "merge", said, small=False)
    there = [one for one in folded if one is not None]
    return commit_pieces(work.table, there, started_ms)


def _rows_of(plan: MergePlan) -> int:
    """Rows of a plan; many where a generation does not say."""
    known = [found.physical_rows for _, found in plan.generations]
    return sum(DRIVER_ROWS if rows is None else rows for rows in known)


def _bytes_of(plan: MergePlan) -> int:
    return sum(found.in_memory_bytes or 0 for _, found in plan.generations)


def _together(plans: Sequence[MergePlan]) -> MergePlan:
    return MergePlan(tuple(part for plan in plans for part in plan.parts))


def _shared(work: Work, plans: Sequence[MergePlan]) -> list[MergePlan]:
    """The plans, small ones of them together; all of one round are of regions that share no key."""
    in_each_slot = sum(map(_rows_of, plans)) // tasks.slots(work.spark)
    looked_up = work.table.snapshot().rows // LOOKED_UP_SHARE
    enough = max(TASK_ROWS, min(looked_up, in_each_slot, MERGE_ROWS))
    made: list[MergePlan] = []
    for plan in sorted(plans, key=_rows_of):
        if made and _rows_of(made[-1]) + _rows_of(plan) // 2 <= enough:
            made[-1] = _together([made[-1], plan])
        else:
            made.append(plan)
    return made[::-1]  # the largest first, so that none is waited for in the end


def _waves(
    items: Sequence[T],
    budget: Budget,
    rows: Callable[[T], int],
    size_bytes: Callable[[T], int],
) -> Iterator[list[T]]:
    """Items by as many as are done before a commit, while the budget lasts."""
    wave: list[T] = []
    held = 0
    for item in items:
        if wave and (budget.is_spent or held + rows(item) > WAVE_ROWS):
            yield wave
            wave, held = [], 0
        if budget.is_spent:
            return
        wave.append(item)
        held += rows(item)
        budget.spend(size_bytes(item))
    if wave:
        yield wave


# --- index ---------------------------------------------------------------------------------


def index(work: Work) -> Outcome:
    report = _build_packed(work)
    skipped: set[str] = set()
    for _ in range(ROUNDS):
        plans, few = due_builds(work.table, skipped)
        if not plans:
            return describe_builds(report, few), ""
        if work.budget.is_spent:
            return str(report), ", ".join(plan.name for plan in plans)
        if sum(plan.rows for plan in plans) < DRIVER_ROWS:
            work.tally.pieces += len(plans)
            done = build_together(work.table, plans)
        else:
            done = _build(work, plans)
        skipped.update(done.skipped)
        report += done
    return str(report), ", ".join(report.behind)


def _build_packed(work: Work) -> IndexReport:
    """Write the packed indexes that data files lack, a file a task."""
    plans = plan_packed(work.table)
    return IndexReport() if work.budget.is_spent else packed_report(_run_packed(work, plans))


def _run_packed(work: Work, plans: Sequence[PackedPlan]) -> Sequence[PackedBuild]:
    if not plans:
        return []
    rows = sum(plan.rows for plan in plans)
    said = f"{_count(len(plans), 'packed file')}, {_count(rows, 'row')}"
    return list(work.each(build_packed, plans, "index", said, small=rows < DRIVER_ROWS))


def _build(work: Work, plans: Sequence[IndexPlan]) -> IndexReport:
    """Build segments in tasks and commit them; nothing if clean-up took the version."""
    table = work.table
    results: list[BuiltSegment] = []
    building: list[tuple[IndexPlan, list[SegmentGroup]]] = []
    for plan in plans:
        if not plan.fragments:
            results.append(BuiltSegment(plan))
            continue
        numbers = {number for number, _ in plan.fragments}
        try:
            (spec,) = load_index_specs(table.snapshot(plan.version).dataset, [plan.name])
            groups = divide(table, spec, plan.version, numbers, tasks.slots(work.spark))
        except InvalidInput as error:
            results.append(BuiltSegment(plan, skipped=str(error)))
        except VersionNotFound:
            return IndexReport()
        else:
            building.append((plan, groups))
    every = [group for _, groups in building for group in groups]
    said = f"{_count(len(building), 'index', 'indexes')}, {_count(len(every), 'part')}"
    parts = iter(work.each(build_part, every, "index", said, small=False))
    made: list[LanceIndex] = []
    for plan, groups in building:
        segment = join(table, groups, [next(parts) for _ in groups])
        if segment is not None:
            made.append(segment)
            results.append(built_as(plan, segment))
    if len(made) < len(building):
        remove(table, made)
        return IndexReport()
    return commit_or_remove(table, results)


def create_index(
    work: Work, column: str, kind: str, *, name: str | None, live: Any, options: dict[str, Any]
) -> str:
    """Create an index: its model trained on a sample that tasks read, its parts built by tasks."""
    if isinstance(kind, str) and kind.lower() in PACKED_KINDS:
        run = partial(_run_packed, work)
        return packed_indexes.create(work.table, column, kind.lower(), name, options, run)
    small = work.table.snapshot().rows < DRIVER_ROWS
    return index_creation.create_index(
        work.table,
        column,
        kind,
        name=name,
        live=live if small else partial(_sample, work, column),
        options=options,
        build=None if small else partial(_whole_index, work),
    )


def _sample(work: Work, column: str) -> pa.Table:
    kind = work.table.snapshot().shape.schema.field(column).type
    vector_bytes = max(1, kind.list_size * kind.value_type.bit_width // 8)
    rows = max(1, min(index_creation.SAMPLE_ROWS, _SAMPLE_BYTES // vector_bytes))
    shares = plan_sample(work.table, column, rows)
    step = max(1, len(shares) // (_TASKS_PER_SLOT * tasks.slots(work.spark)))
    items = [tuple(shares[first : first + step]) for first in range(0, len(shares), step)]
    said = f"a sample of {_count(sum(share.rows for share in shares), 'row')} of {column}"
    return pa.concat_tables(work.each(_read_shares, items, "index", said, small=False))


def _read_shares(table: BaseTable, shares: Sequence[SampleShare]) -> pa.Table:
    return pa.concat_tables([read_share(table, share) for share in shares])


def _whole_index(work: Work, base: BaseSnapshot, spec: IndexSpec) -> LanceIndex:
    numbers = [fragment.fragment_id for fragment in base.dataset.get_fragments()]
    groups = divide(work.table, spec, base.version, numbers, tasks.slots(work.spark))
    said = f"{spec.kind} on {spec.column}, {_count(len(groups), 'part')}"
    parts = work.each(build_part, groups, "index", said, small=False)
    segment = join(work.table, groups, parts)
    if segment is None:
        raise VersionNotFound(
            f"{work.table.uri}: version {base.version} was cleaned up while index {spec.name!r} "
            "was built from it; build it again"
        )
    return segment


# --- compact -------------------------------------------------------------------------------


def compact(work: Work) -> Outcome:
    report = CompactionReport()
    left = 0
    for _ in range(ROUNDS):
        pieces = plan_compaction(work.table, deletion_share=DELETED_SHARE, gradual=True)
        waiting, left = len(pieces), 0
        waves = _waves(pieces, work.budget, lambda one: one.rows, lambda one: one.size_bytes)
        for wave in waves:
            done = _compact_wave(work, wave)
            waiting -= len(wave)
            left += done.left
            report += done.leaving(0)
        if waiting:
            return str(report), _count(waiting + left, "group of fragments", "groups of fragments")
        if not left:
            return str(report), ""
    return str(report), _count(left, "group of fragments", "groups of fragments")


def _compact_wave(work: Work, pieces: Sequence[CompactionPiece]) -> CompactionReport:
    started_ms = work.table.seams.clock.monotonic_ms()
    rows = sum(piece.rows for piece in pieces)
    fragments = sum(len(piece.fragments) for piece in pieces)
    said = f"{_count(fragments, 'fragment')}, {_count(rows, 'row')}"
    small = rows < DRIVER_ROWS
    copied = work.each(_copy, pieces, "compact", said, small=small)
    there = [one for one in copied if one is not None]
    report = CompactionReport(left=len(pieces) - len(there))
    if there:
        check_age(work.table.seams, started_ms, "a compaction")
        report += commit_compaction(work.table, there)
    return report


def _copy(table: BaseTable, piece: CompactionPiece) -> Compacted | None:
    try:
        return compact_piece(table, piece)
    except VersionNotFound:
        return None  # clean-up took the version it was planned on


# --- snapshot and clean-up -----------------------------------------------------------------


def snapshot(work: Work, *, asked: bool) -> Outcome:
    base = work.table.snapshot()
    if base.details.inline_snapshots is None and not asked:
        return "none was ever asked for", ""
    if work.budget.is_spent:
        return "not looked at", "a snapshot"
    version = build_snapshot(work.table, load=partial(_load, work))
    if version == base.version:
        return f"version {version} has it", ""
    return f"version {version} has the regions as they are", ""


def _load(work: Work, ids: Sequence[uuid.UUID]) -> list[RegionManifest | None]:
    step = DRIVER_REGIONS
    groups = [ids[first : first + step] for first in range(0, len(ids), step)]
    said = _count(len(ids), "region")
    found = work.each(load_regions, groups, "snapshot", said, small=len(groups) <= 1)
    return [region for group in found for region in group]


def clean_up(work: Work, *, retain_seconds: float) -> Outcome:
    if work.budget.is_spent:
        return "not looked at", "clean-up"
    report = collect(work.table, retain_seconds=retain_seconds, run=partial(_remove, work))
    return str(report).splitlines()[0], ""


def _remove(work: Work, groups: Sequence[Pieces]) -> Iterable[tuple[GcLine, ...]]:
    """Remove what belongs together in one task, in its order; small groups share a task."""
    packed: list[Pieces] = []
    for group in groups:
        if packed and _files_of(packed[-1]) + _files_of(group) <= PIECE_KEYS:
            packed[-1] += group
        else:
            packed.append(group)
    files = sum(map(_files_of, packed))
    said = _count(files, "file or directory", "files and directories")
    return work.each(run_pieces, packed, "gc", said, small=files <= DRIVER_FILES)


def _files_of(pieces: Pieces) -> int:
    return sum(len(piece.doomed) + len(piece.manifests) for piece in pieces)
