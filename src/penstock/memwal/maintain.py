"""A round of maintenance: whatever is due, in the order in which one job makes work for the next.

    merge      what is flushed goes into the base table
    index      its indexes cover what was merged
    compact    small fragments and those with many deleted rows are rewritten
    snapshot   the regions' state is brought into the newest version, where readers asked for that
    clean up   what nobody needs any more is removed

Every job is done piece by piece, and each piece is one commit or nothing. Budgets are looked at
between pieces: what is begun is finished, and what is left over is named in the report. Any number
of processes may maintain a table at once; they find each other's work done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.errors import InvalidInput
from penstock.memwal.base_table import BaseTable
from penstock.memwal.build_indexes import (
    IndexPlan,
    IndexReport,
    build_together,
    packed_report,
    plan_index_builds,
)
from penstock.memwal.compact import compact_one, plan_compaction
from penstock.memwal.compact_fit import CompactionReport
from penstock.memwal.gc import collect
from penstock.memwal.gc_limits import RETAIN_SECONDS
from penstock.memwal.merge import MERGE_ROWS, MergeReport, merge_piece, plan_merges
from penstock.memwal.packed_indexes import PackedBuild, build_packed, plan_packed
from penstock.memwal.snapshots import build_snapshot

INDEX_ROWS = 10_000
INDEX_SHARE = 0.05
"""An index is due when so many rows lack it, or this share of the base table. Until then searches
compare them in memory, which costs less than a segment more."""
DELETED_SHARE = 0.2
"""A fragment with a larger share of deleted rows is rewritten. Rows that are updated again and
again would have a large fragment copied for few of them."""
ROUNDS = 16
"""Others may do the work, or make more of it; after so many times it has to wait."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What one job did."""

    name: str
    did: str
    seconds: float
    left: str = ""
    """What is still due, if the budget ended before it was done."""


JobT = TypeVar("JobT", bound=Job)


@dataclass(frozen=True, slots=True)
class Round(Generic[JobT]):
    """What the jobs of one round did, in their order."""

    jobs: tuple[JobT, ...]

    @property
    def seconds(self) -> float:
        return sum(job.seconds for job in self.jobs)

    @property
    def finished(self) -> bool:
        return not any(job.left for job in self.jobs)

    def __getitem__(self, name: str) -> JobT:
        for job in self.jobs:
            if job.name == name:
                return job
        known = ", ".join(job.name for job in self.jobs)
        raise InvalidInput(f"there is no job {name!r} in this report; there are: {known}")


class MaintainReport(Round[Job]):
    __slots__ = ()

    def __str__(self) -> str:
        lines = []
        for job in self.jobs:
            first, *more = job.did.splitlines() or [""]
            lines.append(f"{job.name:<9} {job.seconds:>7.2f} s  {first}")
            lines += [f"{'':<21}{line}" for line in more]
            if job.left:
                lines.append(f"{'':<21}left for the next time: {job.left}")
        return "\n".join(lines)


class Budget:
    """How long a round may take, and how much it may read."""

    def __init__(
        self, table: BaseTable, seconds: float | None = None, size_bytes: int | None = None
    ) -> None:
        for name, value in (("budget_seconds", seconds), ("budget_bytes", size_bytes)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise InvalidInput(f"{name} must be a positive number, not {value!r}")
        self._clock = table.seams.clock
        self._end_ms = None if seconds is None else self._clock.monotonic_ms() + seconds * 1000
        self._left_bytes = size_bytes

    @property
    def is_spent(self) -> bool:
        if self._end_ms is not None and self._clock.monotonic_ms() >= self._end_ms:
            return True
        return self._left_bytes is not None and self._left_bytes <= 0

    def spend(self, size_bytes: int) -> None:
        if self._left_bytes is not None:
            self._left_bytes -= size_bytes


def maintain(
    table: BaseTable,
    *,
    budget_seconds: float | None = None,
    budget_bytes: int | None = None,
    retain_seconds: float = RETAIN_SECONDS,
    on_progress: Progress | None = None,
) -> MaintainReport:
    """Do what is due; `on_progress` is told the job, the pieces of it that are done, and all."""
    budget = Budget(table, budget_seconds, budget_bytes)
    tell = on_progress or (lambda job, done, total: None)
    jobs: dict[str, Callable[[], tuple[str, str]]] = {
        "merge": lambda: _merge(table, budget, tell),
        "index": lambda: _index(table, budget, tell),
        "compact": lambda: _compact(table, budget, tell),
        "snapshot": lambda: _snapshot(table, budget),
        "clean up": lambda: _clean_up(table, budget, retain_seconds),
    }
    clock = table.seams.clock
    done = []
    for name, run in jobs.items():
        began_ms = clock.monotonic_ms()
        did, left = run()
        done.append(Job(name, did, (clock.monotonic_ms() - began_ms) / 1000, left))
    return MaintainReport(tuple(done))


def _merge(table: BaseTable, budget: Budget, tell: Progress) -> tuple[str, str]:
    report = MergeReport()
    left = 0
    done = 0
    for _ in range(ROUNDS):
        plans, waiting = plan_merges(table, max_rows=MERGE_ROWS)
        report += MergeReport(waiting=waiting)
        left = sum(len(plan.generations) for plan in plans)
        for plan in plans:
            if budget.is_spent:
                return describe_merge(report), f"{left} generations to merge"
            report += merge_piece(table, plan)
            budget.spend(sum(found.in_memory_bytes or 0 for _, found in plan.generations))
            left -= len(plan.generations)
            done += len(plan.generations)
            tell("merge", done, done + left)
        if not plans:
            break
    return describe_merge(report), f"{left} generations to merge" if left else ""


def describe_merge(report: MergeReport) -> str:
    said = "nothing to merge"
    if report.generations:
        said = (
            f"{report.generations} generations, {report.rows:,} rows, {report.tombstones:,} deletes"
        )
    if report.waiting:
        said += f"; {report.waiting} generations wait for older regions to be flushed"
    return said


def _index(table: BaseTable, budget: Budget, tell: Progress) -> tuple[str, str]:
    packed: list[PackedBuild] = []
    lacking = plan_packed(table)
    for number, one in enumerate(lacking):
        if budget.is_spent:
            names = sorted({plan.spec.name for plan in lacking[number:]})
            return str(packed_report(packed)), ", ".join(names)
        packed.append(build_packed(table, one))
        tell("index", number + 1, len(lacking))
    report = packed_report(packed)
    skipped: set[str] = set()
    for _ in range(ROUNDS):
        plans, few = due_builds(table, skipped)
        if not plans:
            return describe_builds(report, few), ""
        for number, plan in enumerate(plans):
            if budget.is_spent:
                return str(report), ", ".join(plan.name for plan in plans[number:])
            done = build_together(table, [plan])
            skipped.update(done.skipped)
            report += done
            tell("index", number + 1, len(plans))
    return str(report), ", ".join(report.behind)


def due_builds(table: BaseTable, skipped: Set[str]) -> tuple[list[IndexPlan], list[str]]:
    """The builds that are due, and the indexes that lack too few rows for one."""
    least = min(INDEX_ROWS, INDEX_SHARE * table.snapshot().rows)
    found = [plan for plan in plan_index_builds(table) if plan.name not in skipped]
    due = [plan for plan in found if plan.rows >= least or not plan.fragments]
    return due, [plan.name for plan in found if plan not in due]


def describe_builds(report: IndexReport, few: Sequence[str]) -> str:
    return str(report) if report.builds or not few else "too few rows for another segment"


def _compact(table: BaseTable, budget: Budget, tell: Progress) -> tuple[str, str]:
    report = CompactionReport()
    for _ in range(ROUNDS):
        pieces = plan_compaction(table, deletion_share=DELETED_SHARE, gradual=True)
        left = 0
        for number, piece in enumerate(pieces):
            if budget.is_spent:
                return str(report), f"{len(pieces) - number} groups of fragments"
            done = compact_one(table, piece)
            budget.spend(piece.size_bytes)
            left += done.left
            report += done.leaving(0)
            tell("compact", number + 1, len(pieces))
        if not left:
            return str(report), ""
    return str(report), f"{left} groups of fragments"


def _snapshot(table: BaseTable, budget: Budget) -> tuple[str, str]:
    base = table.snapshot()
    if base.details.inline_snapshots is None:
        return "none was ever asked for", ""
    if budget.is_spent:
        return "not looked at", "a snapshot"
    version = build_snapshot(table)
    if version == base.version:
        return f"version {version} has it", ""
    return f"version {version} has the regions as they are", ""


def _clean_up(table: BaseTable, budget: Budget, retain_seconds: float) -> tuple[str, str]:
    if budget.is_spent:
        return "not looked at", "clean-up"
    return str(collect(table, retain_seconds=retain_seconds)), ""
