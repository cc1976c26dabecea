"""Building the base table's indexes on, and recording how far they have come.

A merge adds fragments that no index covers. The builder covers them, in three parts:

    plan_index_builds   for each index the fragments to read, and the segments they make obsolete
    build_segment       one segment written by Lance, with the model the index has; nobody names it
    commit_index_build  one version: the segments, and what their indexes have caught up with

Only fragments that no segment covers are read, so the work is that of the new rows. An index of
many segments is slow to search. Past `MAX_SEGMENTS` the new segment takes the smallest ones in,
reading their rows again, those that are no larger than what is taken in already: so a row is read
a few times in all, however many builds there are. No model is ever trained here.

Between plan and commit the table goes on. Of a segment that was built, a fragment counts if it is
still there and the index's column in it is what it was. Lance leaves the entries of other fragments
out of searches. If somebody else covers the same fragments first, the segment is dropped, and what
is still missing is planned anew. A version is published as the very next one or not at all
(`table_commit`), so coverage, segments and progress always belong to the same version.

Some entries Lance does not leave out. Its text and scalar indexes look up rows by id or address in
all segments, whichever covers the row now. A segment that has an older value of a row must not
stand beside one that has the newer (`index_segments`); it is built anew together with it. That
comes to pass where somebody has updated rows or rewritten columns with Lance, not by merging.

Invariants
- No two segments of an index cover the same fragment.
- An index is credited with the merged generations of a version only if it covers all its fragments.
- Coverage never shrinks by a build, so older credit stays true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import lance
from lance.bitmap import Bitmap
from lance.dataset import Index as LanceIndex
from lance.dataset import IndexFile

from penstock.errors import CommitConflict, InvalidInput, PenstockError, VersionNotFound
from penstock.index.base import create_segment, load_index_specs
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.gc_limits import check_age
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.index_segments import (
    FRAGMENT_REUSE,
    Ages,
    BaseIndex,
    BaseIndexes,
    Segment,
    to_remove,
)
from penstock.memwal.packed_indexes import PackedBuild, build_packed, plan_packed
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.table_commit import commit_next
from penstock.memwal.table_versions import version_exists

MAX_SEGMENTS = 8
"""An index of more segments is given fewer."""


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What one index needs next. Without fragments only its progress is to be recorded."""

    name: str
    version: int
    """The version of the base table that it was made for."""
    fragments: tuple[tuple[int, str], ...]
    """Those to read, and what the index's column in each is made of."""
    rows: int
    replaces: tuple[str, ...]
    """Segments that the new one takes the place of."""
    segments: tuple[str, ...]
    """All segments there were,"""
    last_fragment: int
    """and the highest number of a fragment."""
    planned_ms: float
    """When that was, by the clock of the process that plans and commits."""


@dataclass(frozen=True, slots=True)
class BuiltSegment:
    """A segment that is written and durable, and in no version."""

    plan: IndexPlan
    uuid: str | None = None
    """None if nothing was written."""
    fields: tuple[int, ...] = ()
    files: tuple[tuple[str, int], ...] = ()
    """Paths and sizes in bytes."""
    details: tuple[str, bytes] | None = None
    index_version: int = 0
    skipped: str | None = None
    """Why it cannot be built."""


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """What became of one index."""

    name: str
    fragments: int = 0
    rows: int = 0
    replaced: int = 0
    """Segments that the new one took the place of."""
    segment: str | None = None
    """The segment that is in the table now; None if nothing was built, or somebody was faster."""
    caught_up: bool = False
    skipped: str | None = None

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"{self.name}: not built, {self.skipped}"
        read = f"{self.rows} rows of {self.fragments} fragments" if self.segment else "nothing new"
        instead = f", in place of {self.replaced} segments" if self.replaced else ""
        return f"{self.name}: {read}{instead}, {'caught up' if self.caught_up else 'behind'}"


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What a build did, index by index."""

    builds: tuple[IndexBuild, ...] = ()
    version: int | None = None
    """The newest version that it made."""

    @property
    def rows(self) -> int:
        """Rows read, once for each index."""
        return sum(build.rows for build in self.builds)

    @property
    def behind(self) -> list[str]:
        """Indexes that do not cover every merged row; merges went on, or they cannot be built."""
        last = {build.name: build.caught_up for build in self.builds}
        return [name for name, caught_up in last.items() if not caught_up]

    @property
    def skipped(self) -> set[str]:
        """Indexes that cannot be built."""
        return {build.name for build in self.builds if build.skipped is not None}

    def __add__(self, other: IndexReport) -> IndexReport:
        version = self.version if other.version is None else other.version
        return IndexReport((*self.builds, *other.builds), version)

    def __str__(self) -> str:
        return "\n".join(map(str, self.builds)) or "every index is up to date"


def build_indexes(table: BaseTable, names: Sequence[str] | None = None) -> IndexReport:
    """Build what is missing of the table's indexes, or of those named, until nothing is.

    Merges that go on meanwhile make another, smaller round of it, a bounded number of times.
    """
    declared = {spec.name for spec in packed_specs(table.snapshot().details)}
    if names is not None and not isinstance(names, str):
        packed, names = list(names), [name for name in names if name not in declared]
    else:
        packed = list(declared)
    report = packed_report([build_packed(table, plan) for plan in plan_packed(table, packed)])
    skipped: set[str] = set()
    for _ in table.seams.attempts():
        plans = plan_index_builds(table, names)
        plans = [plan for plan in plans if plan.name not in skipped]
        if not plans:
            break
        done = build_together(table, plans)
        skipped.update(done.skipped)
        report += done
    return report


def packed_report(builds: Sequence[PackedBuild]) -> IndexReport:
    """What was built of packed indexes, which need no commit."""
    by_name: dict[str, list[PackedBuild]] = {}
    skipped = {build.name: build.skipped for build in builds if build.skipped is not None}
    for build in builds:
        if build.rows:
            by_name.setdefault(build.name, []).append(build)
    done = (
        IndexBuild(
            name,
            fragments=len(some),
            rows=sum(build.rows for build in some),
            segment=some[0].uid,
            caught_up=name not in skipped,
        )
        for name, some in by_name.items()
    )
    return IndexReport((*done, *(IndexBuild(name, skipped=why) for name, why in skipped.items())))


def build_together(table: BaseTable, plans: Sequence[IndexPlan]) -> IndexReport:
    """Build some segments and commit them as one version; what did not land is removed.

    Nothing is done if clean-up took the version that they were planned for.
    """
    try:
        results = [build_segment(table, plan) for plan in plans]
    except VersionNotFound:
        return IndexReport()
    return commit_or_remove(table, results)


def commit_or_remove(table: BaseTable, results: Sequence[BuiltSegment]) -> IndexReport:
    """Commit some segments as one version; what did not land is removed."""
    report = commit_index_build(table, results)
    landed = {build.segment for build in report.builds}
    for built in results:
        if built.uuid is not None and built.uuid not in landed:
            table.store.delete_prefix(f"_indices/{built.uuid}")
    return report


# --- plan ----------------------------------------------------------------------------------


def plan_index_builds(table: BaseTable, names: Sequence[str] | None = None) -> list[IndexPlan]:
    """What the table's indexes, or those named, lack; nothing for those that lack nothing."""
    now_ms = table.seams.clock.monotonic_ms()
    base = table.snapshot()
    indexes = BaseIndexes.of(base.dataset)
    chosen = list(indexes.by_name) if names is None else _checked(names, base, indexes)
    ages = Ages(table.store, indexes)
    plans = (_plan(base, indexes, indexes.by_name[name], ages, now_ms) for name in chosen)
    return [plan for plan in plans if plan is not None]


def _checked(names: Sequence[str], base: BaseSnapshot, indexes: BaseIndexes) -> list[str]:
    if isinstance(names, str):
        raise InvalidInput(f"names must be a list of index names, not the text {names!r}")
    unknown = sorted(set(names) - set(indexes.by_name))
    if unknown:
        raise InvalidInput(
            f"{base.dataset.uri} has no index {', '.join(unknown)}; "
            f"there are: {', '.join(indexes.by_name) or 'none'}"
        )
    return list(dict.fromkeys(names))


def _plan(
    base: BaseSnapshot, indexes: BaseIndexes, index: BaseIndex, ages: Ages, planned_ms: float
) -> IndexPlan | None:
    reading = frozenset(indexes.fragments) - index.covered
    replaced = [
        segment
        for segment in index.segments
        if segment.unmapped or any(ages.may_hold(index, segment, number) for number in reading)
    ]
    others = [s for s in index.segments if s.fragments and s not in replaced]
    reading = reading.union(*(segment.fragments for segment in replaced))
    if len(others) + bool(reading) > MAX_SEGMENTS:
        others.sort(key=lambda segment: (indexes.rows(segment.fragments), segment.uuid))
        while len(others) >= MAX_SEGMENTS or (
            others and indexes.rows(others[0].fragments) <= indexes.rows(reading)
        ):
            taken = others.pop(0)
            replaced.append(taken)
            reading |= taken.fragments
    if not reading and _is_credited(base.details, index.name):
        return None
    return IndexPlan(
        index.name,
        base.version,
        tuple((number, indexes.contents(number, index.fields)) for number in sorted(reading)),
        indexes.rows(reading),
        tuple(segment.uuid for segment in replaced),
        tuple(segment.uuid for segment in index.segments),
        max(indexes.fragments, default=-1),
        planned_ms,
    )


def _is_credited(details: MemWalIndexDetails, name: str) -> bool:
    progress = details.index_catchup.get(name, {})
    return all(progress.get(region, 0) >= at for region, at in details.merged_generations.items())


# --- run -----------------------------------------------------------------------------------


def build_segment(table: BaseTable, plan: IndexPlan) -> BuiltSegment:
    """Write the segment that a plan asks for; it is in no version yet.

    Raises `VersionNotFound` if the version that was planned for is gone.
    """
    if not plan.fragments:
        return BuiltSegment(plan)
    base = table.snapshot(plan.version)
    try:
        (spec,) = load_index_specs(base.dataset, [plan.name])
        numbers = [number for number, _ in plan.fragments]
        segment = create_segment(spec, base.dataset, numbers)
    except InvalidInput as error:
        return BuiltSegment(plan, skipped=str(error))
    except (PenstockError, OSError, ValueError) as error:
        if not version_exists(table.store, plan.version):
            raise VersionNotFound(
                f"{table.uri}: version {plan.version} was cleaned up while index {plan.name!r} "
                "was built from it; plan the build again"
            ) from error
        raise
    table.store.sync(f"_indices/{segment.uuid}")
    return built_as(plan, segment)


def built_as(plan: IndexPlan, segment: LanceIndex) -> BuiltSegment:
    """A plan and the segment that was built for it, in one process or several (`index_parts`)."""
    assert segment.index_details is not None
    return BuiltSegment(
        plan,
        segment.uuid,
        tuple(segment.fields),
        tuple((file.path, file.size_bytes) for file in segment.files or ()),
        segment.index_details,
        segment.index_version,
    )


# --- commit --------------------------------------------------------------------------------


def commit_index_build(table: BaseTable, results: Sequence[BuiltSegment]) -> IndexReport:
    """Publish what was built and record what its indexes have caught up with, in one version.

    What somebody else has built in the meantime, or what the table has no use for any more, is
    left out. It may be called again with the same results.
    """
    for _ in table.seams.races():
        base = table.snapshot()
        settled = _settle(table, base, results)
        if settled.is_nothing(base):
            return IndexReport(tuple(settled.builds))
        for built in results:
            check_age(table.seams, built.plan.planned_ms, f"the build of index {built.plan.name!r}")
        if commit_next(
            table.store,
            table.storage_options,
            base.dataset,
            lance.LanceOperation.CreateIndex(settled.new, settled.removed),
            table.seams,
            details=settled.details,
        ):
            return IndexReport(tuple(settled.builds), base.version + 1)
    raise CommitConflict(
        f"indexes of {table.uri} could not be committed: other commits won "
        f"{table.seams.backoff.races} times; build them again later"
    )


@dataclass(slots=True)
class _Settled:
    """What the results come to in one version."""

    details: MemWalIndexDetails
    new: list[LanceIndex]
    removed: list[LanceIndex]
    builds: list[IndexBuild]

    def is_nothing(self, base: BaseSnapshot) -> bool:
        same = self.details.index_catchup == base.details.index_catchup
        return same and not self.new and not self.removed


def _settle(table: BaseTable, base: BaseSnapshot, results: Sequence[BuiltSegment]) -> _Settled:
    indexes = BaseIndexes.of(base.dataset)
    ages = Ages(table.store, indexes)
    settled = _Settled(base.details, [], [], [])
    for built in results:
        plan = built.plan
        index = indexes.by_name.get(plan.name)
        if index is None or built.skipped is not None:
            why = built.skipped or "it was dropped"
            settled.builds.append(IndexBuild(plan.name, skipped=why))
            continue
        build = IndexBuild(plan.name)
        still = _still_valid(plan, index, indexes)
        if built.uuid in {segment.uuid for segment in index.segments}:
            build = replace(build, segment=built.uuid)  # by an earlier call
        elif built.uuid is not None and _fits(plan, index, still, ages):
            gone = [s for s in index.segments if s.uuid in plan.replaces or not s.fragments]
            kept = [segment for segment in index.segments if segment not in gone]
            index = replace(index, segments=(*kept, Segment(built.uuid, plan.version, still)))
            indexes.by_name[plan.name] = index
            lost = {number for number, _ in plan.fragments} - indexes.fragments.keys()
            settled.new.append(_segment(built, still | lost))
            settled.removed += [to_remove(plan.name, segment.uuid) for segment in gone]
            instead = sum(bool(segment.fragments) for segment in gone)
            build = IndexBuild(plan.name, len(still), plan.rows, instead, built.uuid)
        caught_up = index.covered >= indexes.fragments.keys()
        if caught_up and not _is_credited(settled.details, plan.name):
            merged = base.details.merged_generations
            settled.details = settled.details.with_catchup(plan.name, merged)
        settled.builds.append(replace(build, caught_up=caught_up))
    every = [segment for index in indexes.by_name.values() for segment in index.segments]
    if settled.new and indexes.reuse and not any(segment.unmapped for segment in every):
        settled.removed.append(to_remove(FRAGMENT_REUSE, indexes.reuse))
    return settled


def _still_valid(plan: IndexPlan, index: BaseIndex, indexes: BaseIndexes) -> frozenset[int]:
    return frozenset(
        number
        for number, contents in plan.fragments
        if number in indexes.fragments and indexes.contents(number, index.fields) == contents
    )


def _fits(plan: IndexPlan, index: BaseIndex, still: frozenset[int], ages: Ages) -> bool:
    """Whether a segment that was built for a plan can stand beside what there is now."""
    if not still:
        return False
    kept = [segment for segment in index.segments if segment.uuid not in plan.replaces]
    if any(not segment.fragments.isdisjoint(still) for segment in kept):
        return False  # somebody else was faster
    if any(s.uuid in plan.replaces and not s.fragments <= still for s in index.segments):
        return False  # it would take coverage away
    ours = Segment("", plan.version, still)
    later = [segment for segment in kept if segment.uuid not in plan.segments]
    born = [number for s in kept for number in s.fragments if number > plan.last_fragment]
    return not any(ages.may_hold(index, ours, number) for number in born) and not any(
        ages.may_hold(index, segment, number) for segment in later for number in still
    )


def _segment(built: BuiltSegment, fragments: frozenset[int]) -> LanceIndex:
    """The segment as Lance is to have it, with all fragments it has entries for.

    Those that are gone are among them, as they are where fragments go later. Else Lance takes their
    entries for rows as soon as others have deleted ones, and finds too few in the end.
    """
    assert built.uuid is not None
    return LanceIndex(
        uuid=built.uuid,
        name=built.plan.name,
        fields=list(built.fields),
        dataset_version=built.plan.version,
        fragment_ids=Bitmap(sorted(fragments)),
        index_version=built.index_version,
        index_details=built.details,
        files=[IndexFile(path, size_bytes) for path, size_bytes in built.files],
    )
