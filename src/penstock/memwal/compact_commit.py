"""The last part of a compaction: a version in which new fragments stand for old ones.

A piece that still fits the newest version (`compact_fit`) is published as the very next one or not
at all (`table_commit`), so nothing between is overlooked, and merge and catch-up progress are
what they were. If somebody else's commit comes first, the piece is compared again; what took long
to prepare is used again. Rows that were deleted since they were copied are deleted from the new
fragments in the same version.

Most indexes of a table with stable row ids need nothing else. A B-tree keeps row addresses all the
same, and is built anew for what it covered. Without stable row ids every index keeps addresses:
then Lance commits, because only Lance can rewrite them, and a piece must fit as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import lance
from lance.fragment import FragmentMetadata
from lance.optimize import Compaction

from penstock.memwal.base_table import BaseTable
from penstock.memwal.compact_fit import (
    Compacted,
    CompactionReport,
    Copied,
    Coverage,
    Fit,
    Rows,
    fit_of,
    rewrite_from,
    rewrite_of,
)
from penstock.memwal.fragments import data_keys
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.table_commit import commit_details, commit_next, only_moving_rows, trial
from penstock.memwal.table_files import remove_unnamed
from penstock.memwal.table_versions import is_latest_version, last_fragment_id, read_details

Group = tuple[list[FragmentMetadata], list[FragmentMetadata]]
"""Old fragments and the new ones that stand for them."""

_ADDRESSED = "BTreeIndexDetails"
"""Indexes that keep row addresses even where row ids are stable, and are cheap to build."""
_REBUILT_ROWS = 20_000_000
"""Such an index of more rows is left to the index builder."""
_ROOM = 64
"""So many numbers of fragments are left for others where they were faster once."""
_REBUILDS = 3
"""After so many lost races the same."""


def commit(table: BaseTable, compacted: Sequence[Compacted]) -> CompactionReport:
    with ExitStack() as trials:
        return _commit(table, compacted, trials)


def _commit(
    table: BaseTable, compacted: Sequence[Compacted], trials: ExitStack
) -> CompactionReport:
    report = CompactionReport()
    waiting = list(compacted)
    copies = {one.result: Copied(table, one) for one in compacted}
    tried: set[str] = set()
    ready: _Ready | None = None
    for attempt in table.seams.attempts():
        dataset = lance.dataset(table.uri, storage_options=table.storage_options)
        coverage = Coverage(dataset)
        if coverage.of_mem_wal:
            # Lance enters new fragments there when it merges rows in, as in every index that has
            # none of the changed columns, and refuses to compact them with others.
            commit_details(table.store, table.storage_options, _same, table.seams)
            continue
        fits: list[Fit] = []
        by_lance: list[Compacted] = []
        dropped: list[Compacted] = []
        for one in waiting:
            fit = fit_of(dataset, coverage, copies[one.result])
            if fit is None:
                dropped.append(one)
            elif coverage.needs_lance(fit):
                # A deletion of a row in it cannot be carried over: its new address is not known.
                # And Lance loses rows if it rewrites an index that was only told where rows went.
                usable = fit.untouched and one.piece.defers_remap >= coverage.deferred
                (by_lance if usable else dropped).append(one)
            else:
                fits.append(fit)
        # What was offered by this call may be on its way; the next clean-up finds it.
        _remove(table, [one for one in dropped if one.result not in tried])
        waiting = [one for one in waiting if one not in dropped]
        report = report.leaving(report.left + len(dropped))
        if not waiting:
            return report
        if fits:
            tried |= {fit.compacted.result for fit in fits}
            last = last_fragment_id(table.store, dataset.version)
            if ready is None or not ready.still(coverage, fits, last):
                first = last + 1 + (_ROOM if attempt else 0)
                ready = _prepare(table, dataset, coverage, fits, first, attempt, trials)
            done = _publish(table, dataset, coverage, fits, ready)
            landed = [fit.compacted for fit in fits] if done else []
        else:
            tried |= {one.result for one in by_lance}
            done = _commit_by_lance(table, dataset, by_lance)
            landed = by_lance if done else []
        if done is not None:
            report += done
            waiting = [one for one in waiting if one not in landed]
            if not waiting:
                return report
    return report.leaving(report.left + len(waiting))


def _same(details: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
    """The MemWAL index as it is, which covers no fragment when it is written anew."""
    return details


def _remove(table: BaseTable, dropped: Sequence[Compacted]) -> None:
    for one in dropped:
        new = rewrite_of(one).new_fragments
        keys = data_keys(new)
        remove_unnamed(table.store, keys, one.piece.version, table.seams)


# --- a version of our own ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """What stays the same if only somebody else's commit came first."""

    results: tuple[str, ...]
    first: int
    """The number of the first new fragment."""
    tried: lance.LanceDataset
    """The table with the new fragments, to make deletions for them."""
    identities: frozenset[str]
    rewritten: tuple[Any, ...]
    sources: Mapping[str, frozenset[int]]
    """What the segments covered that are in `rewritten`."""
    lost: frozenset[str]
    """The names of indexes that do not cover what they did."""

    def still(self, coverage: Coverage, fits: Sequence[Fit], last_id: int) -> bool:
        return (
            self.results == tuple(fit.compacted.result for fit in fits)
            and last_id < self.first
            and self.identities == frozenset(coverage.segments)
            and all(coverage.segments[name] == known for name, known in self.sources.items())
        )

    def numbered(self, fits: Sequence[Fit]) -> list[Group]:
        """Lance would number fragments, too, but not tell the indexes that cover them."""
        groups, following = [], self.first
        for fit in fits:
            new = [replace(part, id=following + at) for at, part in enumerate(fit.new)]
            following += len(new)
            groups.append((list(fit.old), new))
        return groups


def _prepare(
    table: BaseTable,
    dataset: lance.LanceDataset,
    coverage: Coverage,
    fits: Sequence[Fit],
    first: int,
    attempt: int,
    trials: ExitStack,
) -> _Ready:
    results = tuple(fit.compacted.result for fit in fits)
    identities = frozenset(coverage.segments)
    ready = _Ready(results, first, dataset, identities, (), {}, frozenset())
    groups = ready.numbered(fits)
    tried = trials.enter_context(
        trial(table.store, table.storage_options, dataset, _rewrite(groups, ()))
    )
    lost = _uncovered(coverage, Coverage(tried), groups)
    rewritten: dict[str, Any] = {}
    if lost and attempt < _REBUILDS:
        rewritten, rebuilt = _rebuild(table, dataset, tried, coverage, groups, lost)
        lost = lost - rebuilt
    return replace(
        ready,
        tried=tried,
        rewritten=tuple(rewritten.values()),
        sources={name: coverage.segments[name] for name in rewritten},
        lost=frozenset(lost),
    )


def _publish(
    table: BaseTable,
    dataset: lance.LanceDataset,
    coverage: Coverage,
    fits: Sequence[Fit],
    ready: _Ready,
) -> CompactionReport | None:
    """Make the next version; None if somebody else made it."""
    final = [
        (old, _without_gone(table, ready.tried, new, fit.gone))
        for (old, new), fit in zip(ready.numbered(fits), fits, strict=True)
    ]
    landed = commit_next(
        table.store,
        table.storage_options,
        dataset,
        only_moving_rows(_rewrite(final, ready.rewritten)),
        table.seams,
        caught_up=coverage.by_name().keys() - ready.lost,
    )
    if not landed:
        return None
    reports = [_landed(fit.compacted, new) for fit, (_, new) in zip(fits, final, strict=True)]
    return sum(reports, CompactionReport())


def _rewrite(groups: Sequence[Group], rewritten: Sequence[Any]) -> Any:
    made = [
        lance.LanceOperation.RewriteGroup(old_fragments=old, new_fragments=new)
        for old, new in groups
    ]
    return lance.LanceOperation.Rewrite(groups=made, rewritten_indices=list(rewritten))


def _without_gone(
    table: BaseTable, tried: lance.LanceDataset, new: Sequence[FragmentMetadata], gone: Rows
) -> list[FragmentMetadata]:
    """New fragments with the rows at some places deleted, counted over all of them."""
    if not len(gone):
        return list(new)
    numbered = {part.fragment_id: part for part in tried.get_fragments()}
    made, first, deleted = [], 0, False
    for part in new:
        here = gone[(gone >= first) & (gone < first + part.physical_rows)] - first
        first += part.physical_rows
        if len(here) == part.physical_rows:
            continue
        if len(here):
            lessened = numbered[part.id].delete_rows(here.tolist())
            assert lessened is not None  # some rows are left
            part, deleted = lessened, True
        made.append(part)
    if deleted:
        table.store.sync("_deletions")
    return made


def _uncovered(
    before: Coverage,
    after: Coverage,
    groups: Sequence[Group],
) -> set[str]:
    """The names of indexes that do not cover what they did."""
    covered = after.by_name()
    return {
        name
        for name, numbers in before.by_name().items()
        if not _expected(numbers, groups) <= covered.get(name, frozenset())
    }


def _expected(
    covered: frozenset[int],
    groups: Sequence[Group],
) -> frozenset[int]:
    for old, new in groups:
        numbers = {part.id for part in old}
        if numbers & covered:
            covered = covered - numbers | {part.id for part in new}
    return covered


def _rebuild(
    table: BaseTable,
    dataset: lance.LanceDataset,
    tried: lance.LanceDataset,
    coverage: Coverage,
    groups: Sequence[Group],
    names: set[str],
) -> tuple[dict[str, Any], set[str]]:
    """Build the B-trees among these anew: by segment what takes its place, and their names."""
    rows = {part.fragment_id: part.physical_rows for part in tried.get_fragments()}
    rewritten: dict[str, Any] = {}
    rebuilt: set[str] = set()
    for index in coverage.indexes:
        if index.name not in names or not index.type_url.endswith(_ADDRESSED):
            continue
        kept = {part.fragment_id for part in dataset.get_fragments()}
        changed = []
        for segment in index.segments:
            before = frozenset(segment.fragment_ids) & kept
            after = _expected(before, groups)
            if after != before:
                changed.append((str(segment.uuid), sorted(after)))
        if sum(rows[number] for _, numbers in changed for number in numbers) > _REBUILT_ROWS:
            continue
        for identity, numbers in changed:
            built = tried.create_index_uncommitted(
                index.field_names[0], "BTREE", name=index.name, replace=True, fragment_ids=numbers
            )
            table.store.sync(f"_indices/{built.uuid}")
            assert built.index_details is not None
            type_url, value = built.index_details
            rewritten[identity] = lance.LanceOperation.RewrittenIndex(
                old_id=identity,
                new_id=str(built.uuid),
                new_details_type_url=type_url,
                new_details_value=value,
                new_index_version=built.index_version,
            )
        rebuilt.add(index.name)
    return rewritten, rebuilt


def _landed(compacted: Compacted, new: Sequence[FragmentMetadata]) -> CompactionReport:
    piece = compacted.piece
    files = [file for part in new for file in part.files]
    return CompactionReport(
        pieces=1,
        fragments_before=len(piece.fragments),
        fragments_after=len(new),
        rows=piece.rows,
        rows_dropped=piece.deleted_rows,
        files_before=piece.files,
        files_after=len(files) + sum(part.deletion_file is not None for part in new),
        bytes_before=piece.size_bytes,
        bytes_after=sum(file.file_size_bytes or 0 for file in files),
    )


# --- a version of Lance's ------------------------------------------------------------------


def _commit_by_lance(
    table: BaseTable, dataset: lance.LanceDataset, compacted: Sequence[Compacted]
) -> CompactionReport | None:
    """Let Lance commit, which rewrites the indexes; None if somebody else came between."""
    before = dataset.version
    results = []
    for one in compacted:
        # It was compared with this version, so this is the one that others may not have changed.
        stored: Mapping[str, Any] = json.loads(one.result) | {"read_version": before}
        results.append(rewrite_from(json.dumps(stored)))
    defers = any(one.piece.defers_remap for one in compacted)
    try:
        Compaction.commit(dataset, results, {"defer_index_remap": defers})
    except Exception as error:
        if "conflict" in str(error).lower():
            return None
        raise
    for directory in {"_indices", "_transactions", "_versions"} & set(table.store.list_dirs("")):
        table.store.sync(directory)
    _restore_catch_up(table, dataset.version)
    landed = [_landed(one, rewrite_of(one).new_fragments) for one in compacted]
    return sum(landed, CompactionReport())


def _restore_catch_up(table: BaseTable, version: int) -> None:
    """Lance takes the progress of rewritten indexes back; they cover what they did.

    Only where nobody has changed the table since; else the index builder finds it out.
    """
    found = read_details(table.store, version - 1)
    before = {} if found is None else found[0].index_catchup
    if not before:
        return

    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        if current is None or not is_latest_version(table.store, version):
            return None
        if current.index_catchup == before:
            return None
        return replace(current, index_catchup=before)

    commit_details(table.store, table.storage_options, change, table.seams)
