"""Clean-up of a live table: what nobody can need any more is removed, and nothing else.

    plan_gc     list the files, then read what is needed: versions, tags, region manifests
    commit_gc   what readers look at first: generations leave the manifests, old versions go
    run_piece   the files that only those named, a bounded number at a time

Before a piece is removed it is asked again whether something new names a part of it. A crash leaves
files that the next time finds.

Versions go in ascending order; that one is kept while the next goes is written down before, for
those who ask whether theirs is the newest (`table_versions`). Lance's own clean-up is not used: it
removes versions in no order, counts their age from their making and not from their end, and does
not know which index a snapshot lies in.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from penstock import metrics
from penstock.errors import CommitConflict, Corruption, Fenced
from penstock.memwal import names
from penstock.memwal.base_table import BaseTable
from penstock.memwal.gc_limits import FENCE_SECONDS, ORPHAN_SECONDS, RETAIN_SECONDS, GcLimits
from penstock.memwal.gc_plan import THREADS, GcPiece, GcPlan, plan_gc
from penstock.memwal.gc_report import Doomed, GcLine, GcReport, added, lines_of
from penstock.memwal.manifest import RegionManifest, manifest_chain
from penstock.memwal.table_files import (
    FileSet,
    newer_manifests,
    patiently,
    read_refs,
    read_versions,
)

_WINDOW = 64
"""So many files are removed at a time before the next ones in order are."""
_PLANS = 3

Pieces = tuple[GcPiece, ...]
Run = Callable[[Sequence[Pieces]], Iterable[tuple[GcLine, ...]]]


def collect(
    table: BaseTable,
    *,
    retain_seconds: float = RETAIN_SECONDS,
    orphan_seconds: float = ORPHAN_SECONDS,
    fence_seconds: float = FENCE_SECONDS,
    dry_run: bool = False,
    run: Run | None = None,
) -> GcReport:
    """Remove what nobody needs any more; with `dry_run`, say what that would be.

    `run` is for those who have files removed elsewhere, by `run_pieces`. Each of what it is given
    can be done by itself, but its pieces only in their order.
    """
    limits = GcLimits(retain_seconds, orphan_seconds, fence_seconds)
    for attempt in range(_PLANS):
        plan = plan_gc(table, limits)
        if dry_run:
            return GcReport(plan.lines(), plan.kept, plan.unknown, dry_run=True)
        try:
            plan, done = commit_gc(table, plan)
        except RefsChanged:
            if attempt + 1 == _PLANS:
                raise
            continue
        break
    removed = list(done)
    for lines in (run or partial(map, partial(run_pieces, table)))(_in_order(plan.pieces)):
        removed += lines
        _count(lines)
    return GcReport(added(removed), plan.kept, plan.unknown)


def _in_order(pieces: Sequence[GcPiece]) -> list[Pieces]:
    """Pieces that belong together: those of a region, whose log goes from its beginning on."""
    regions: dict[uuid.UUID, list[GcPiece]] = {}
    for piece in pieces:
        if piece.region_id is not None:
            regions.setdefault(piece.region_id, []).append(piece)
    base = [(piece,) for piece in pieces if piece.region_id is None]
    return [*base, *(tuple(found) for found in regions.values())]


# --- commit --------------------------------------------------------------------------------


class RefsChanged(CommitConflict):
    """A tag or a branch came or went since the plan was made."""


def commit_gc(table: BaseTable, plan: GcPlan) -> tuple[GcPlan, tuple[GcLine, ...]]:
    """Take out of sight what is about to go; returns what of the plan is left to do, and did.

    Where a region is being claimed over and over its generations stay for the next time.
    """
    if tuple(sorted(read_refs(table.store, table.seams).items())) != plan.refs:
        raise RefsChanged(
            f"{table.uri}: its tags changed meanwhile; nothing was removed, try again"
        )
    store, seams = table.store, table.seams

    def unlist(asked: tuple[uuid.UUID, tuple[str, ...]]) -> bool:
        return _unlist(table, *asked)

    with ThreadPoolExecutor(THREADS, "penstock-gc") as pool:
        done = list(pool.map(unlist, plan.unlisted))
    listed = {
        f"{names.region_dir(region_id)}/{path}"
        for (region_id, paths), gone in zip(plan.unlisted, done, strict=True)
        if not gone
        for path in paths
    }
    for version in plan.gaps:
        patiently(seams, store.put, names.gap_key(version), b"")
    for one in plan.versions:
        patiently(seams, store.delete, one.key)
    for version in plan.closed_gaps:
        patiently(seams, store.delete, names.gap_key(version))
    _count(lines_of(plan.versions))
    pieces = tuple(
        replace(piece, doomed=tuple(one for one in piece.doomed if one.key not in listed))
        for piece in plan.pieces
    )
    return replace(plan, pieces=pieces, versions=()), lines_of(plan.versions)


def _unlist(table: BaseTable, region_id: uuid.UUID, paths: Sequence[str]) -> bool:
    """Take generations out of a region's manifest; False if its owner keeps changing."""
    chain = manifest_chain(table.store, region_id, table.seams)
    gone = frozenset(paths)

    def without(current: RegionManifest) -> RegionManifest:
        left = tuple(g for g in current.flushed_generations if g.path not in gone)
        return current.next(flushed_generations=left)

    def done(current: RegionManifest) -> bool:
        return gone.isdisjoint(listed.path for listed in current.flushed_generations)

    for _ in table.seams.attempts():
        latest = patiently(table.seams, chain.latest)
        if latest is None or done(latest):
            return True
        try:
            chain.update(latest.writer_epoch, without, landed=done)
            return True
        except Fenced:
            continue  # a claim came in between
        except CommitConflict:
            break
    metrics.gc_postponed.inc()
    return False


# --- run -----------------------------------------------------------------------------------


def run_pieces(table: BaseTable, pieces: Pieces) -> tuple[GcLine, ...]:
    """Remove the files of some pieces, one after the other."""
    return tuple(line for piece in pieces for line in run_piece(table, piece))


def run_piece(table: BaseTable, piece: GcPiece) -> tuple[GcLine, ...]:
    """Remove the files of a piece, except what something new names by now."""
    doomed = list(piece.doomed)
    if not doomed and not piece.manifests:
        return ()
    if piece.region_id is None:
        renewed = FileSet()
        newer = newer_manifests(table.store, piece.newest, table.seams)
        for version in read_versions(table.store, newer, table.seams):
            renewed.add(version)
        doomed = [one for one in doomed if one.key not in renewed]
    else:
        chain = manifest_chain(table.store, piece.region_id, table.seams)
        if piece.manifests:
            versions = [names.from_bitrev(_stem(one.key)) for one in piece.manifests]
            patiently(table.seams, chain.remove, [v for v in versions if v is not None])
        latest = patiently(table.seams, chain.latest)
        if latest is None and piece.was_claimed:
            raise Corruption(f"{chain.name} has lost its manifest; restore it from a copy")
        listed = {g.path for g in latest.flushed_generations} if latest is not None else set()
        doomed = [one for one in doomed if one.key.rpartition("/")[2] not in listed]

    def remove(one: Doomed) -> None:
        delete = table.store.delete_prefix if one.directory else table.store.delete
        patiently(table.seams, delete, one.key)

    with ThreadPoolExecutor(THREADS, "penstock-gc") as pool:
        for first in range(0, len(doomed), _WINDOW):
            list(pool.map(remove, doomed[first : first + _WINDOW]))
    return lines_of([*doomed, *piece.manifests])


def _stem(key: str) -> str:
    return key.rpartition("/")[2].partition(".")[0]


def _count(removed: Sequence[GcLine]) -> None:
    for line in removed:
        metrics.gc_files.labels(line.what).inc(line.files)
        metrics.gc_bytes.labels(line.what).inc(line.size_bytes)
