"""Folding flushed generations into the base table.

A merge has three parts, so that the costly one can run anywhere and is never done twice:

    plan_merges     which generations of which regions, in order
    fold            the newest row of each key, as Lance fragments that nobody names yet: of the
                    generation's own file (`adopt`) or written anew
    commit_merge    one version: the new rows, the rows they replace or delete taken out, progress

`fold_piece` and `commit_pieces` are the same for those who fold in other processes: what they
folded of several regions becomes one version.

Several generations are folded together; a key that was written in each of them is merged once.
What a key replaces is looked up when the merge is committed, in the version it is committed on:
if another commit comes in between, only that is done again.

Progress and rows are in the same version, which is published as the very next one or not at all
(`table_commit`). A merge whose generations are merged already changes nothing. A crash leaves at
most fragments that no version names, for clean-up to find.

Regions of a newer spec wait until those of older ones are sealed and merged: keys may have moved
between them, and their newer rows would be overwritten by older ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from penstock.errors import Corruption, InvalidInput
from penstock.index.key_index import NOT_FOUND, KeyIndex
from penstock.index.primary_key import key_array, key_type, newest_rows
from penstock.memwal.adopt import Adopted, adopt
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.fragments import contents, data_keys, fragments_of, offsets_of, sync_data
from penstock.memwal.freshness import Mask
from penstock.memwal.gc_limits import check_age
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import FlushedGeneration, RegionManifest, RegionStatus
from penstock.memwal.regions import load_manifests
from penstock.memwal.sources import ROW_ADDRESS, GenerationSource, StaleView, chosen_rows
from penstock.memwal.table_commit import commit_index, only_moving_rows
from penstock.memwal.table_files import remove_unnamed

T = TypeVar("T")

MERGE_ROWS = 1_000_000
"""Rows of generations that are folded at a time; at least one generation, however large."""
_BUFFER_BYTES = 8 << 20
"""So much of a generation is in memory at a time while it is folded, besides its keys."""
_WRITERS = 2
_ROWS_PER_WRITER = 200_000
"""So many threads write rows, if there are so many for each but the last."""
_LOOKED_UP_ROWS = 65_536
"""Rows of the base whose keys are compared at a time."""


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Generations of one region that are merged together, oldest first."""

    region_id: uuid.UUID
    generations: tuple[FlushedGeneration, ...]

    @property
    def after(self) -> int:
        """The generation that must be the last one merged."""
        return self.generations[0].generation - 1

    @property
    def last(self) -> int:
        return self.generations[-1].generation

    @property
    def rows(self) -> int:
        return sum(generation.physical_rows or 0 for generation in self.generations)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What is folded together and becomes one version: parts of regions that share no key."""

    parts: tuple[RegionPart, ...]

    @property
    def generations(self) -> list[tuple[uuid.UUID, FlushedGeneration]]:
        return [(part.region_id, found) for part in self.parts for found in part.generations]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The newest rows of some generations as fragments, and every key they are about."""

    plan: MergePlan
    fragments: tuple[FragmentMetadata, ...]
    adopted: tuple[Adopted, ...]
    rows: int
    deleted: int
    keyed: bool
    """False for a table without a primary key, whose rows replace nothing."""
    keys: pa.Array | None
    """None if they were left behind; they are read again if they are needed."""
    superseded: dict[str, list[int]]
    """Of the fragments that were looked through already the offsets of rows with these keys."""
    started_ms: float
    """By the clock of the process that publishes it, before its first file was written."""
    version: int
    """The newest version when its files were written, so only later ones can name them."""


@dataclass(frozen=True, slots=True, eq=False)
class FoldedPiece:
    """What was folded, as it is sent to the process that commits it.

    The keys stay behind: they are needed only if others commit in between.
    """

    folded: Folded
    superseded: dict[str, npt.NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did."""

    generations: int = 0
    rows: int = 0
    """Rows written to the base table."""
    tombstones: int = 0
    waiting: int = 0
    """Generations that wait for regions of an older spec to be flushed."""

    def __add__(self, other: MergeReport) -> MergeReport:
        return MergeReport(
            self.generations + other.generations,
            self.rows + other.rows,
            self.tombstones + other.tombstones,
            other.waiting,
        )


def merge_all(table: BaseTable, *, max_rows: int = MERGE_ROWS) -> MergeReport:
    """Merge everything that is flushed; what is flushed meanwhile is left for the next time."""
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        raise InvalidInput(f"max_rows must be a whole number from 1 on, not {max_rows!r}")
    report = MergeReport()
    upto = {
        manifest.region_id: manifest.current_generation - 1
        for manifest in load_manifests(table.store, table.seams)
    }
    while True:
        plans, waiting = plan_merges(table, max_rows=max_rows, upto=upto)
        if not plans:
            return report + MergeReport(waiting=waiting)
        for plan in plans:
            report += merge_piece(table, plan)


def merge_piece(table: BaseTable, plan: MergePlan) -> MergeReport:
    """Fold and commit; nothing is done if somebody else has merged it meanwhile."""
    done = _unless_merged(table, plan, lambda: commit_merge(table, fold(table, plan)))
    return done or MergeReport()


def fold_piece(table: BaseTable, plan: MergePlan) -> FoldedPiece | None:
    """Fold; None if somebody else has merged it, and clean-up took what it was reading."""
    folded = _unless_merged(table, plan, lambda: fold(table, plan))
    if folded is None:
        return None
    superseded = {
        which: np.array(offsets, dtype=np.uint32) for which, offsets in folded.superseded.items()
    }
    return FoldedPiece(replace(folded, keys=None, superseded={}), superseded)


def commit_pieces(
    table: BaseTable, pieces: Sequence[FoldedPiece], started_ms: float
) -> MergeReport:
    """Publish what was folded elsewhere of regions that share no key, as one version.

    `started_ms` is by this process's clock, before the first of them was begun. What somebody
    else has merged is left out; if that happens in the very moment, nothing is done.
    """
    details = table.snapshot().details
    fresh: list[FoldedPiece] = []
    for piece in pieces:
        if _is_overtaken(details, piece.folded.plan):
            # Which finds that out, too, and removes what was written.
            commit_merge(table, replace(piece.folded, started_ms=started_ms))
        else:
            fresh.append(piece)
    if not fresh:
        return MergeReport()
    whole = _joined(fresh, started_ms)
    return _unless_merged(table, whole.plan, lambda: commit_merge(table, whole)) or MergeReport()


def _joined(pieces: Sequence[FoldedPiece], started_ms: float) -> Folded:
    every = [piece.folded for piece in pieces]
    # What one of them has not looked through is looked up again for all.
    known = set(pieces[0].superseded).intersection(*(piece.superseded for piece in pieces))
    return Folded(
        plan=MergePlan(tuple(part for one in every for part in one.plan.parts)),
        fragments=tuple(fragment for one in every for fragment in one.fragments),
        adopted=tuple(adopted for one in every for adopted in one.adopted),
        rows=sum(one.rows for one in every),
        deleted=sum(one.deleted for one in every),
        keyed=every[0].keyed,
        keys=None,
        superseded={
            which: np.concatenate([piece.superseded[which] for piece in pieces]).tolist()
            for which in known
        },
        started_ms=started_ms,
        version=min(one.version for one in every),
    )


def _is_overtaken(details: MemWalIndexDetails, plan: MergePlan) -> bool:
    return any(details.merged(part.region_id) != part.after for part in plan.parts)


def _unless_merged(table: BaseTable, plan: MergePlan, work: Callable[[], T]) -> T | None:
    try:
        return work()
    except (StaleView, OSError, RuntimeError, pa.ArrowException) as error:
        if _is_overtaken(table.snapshot().details, plan):
            return None  # and clean-up has taken what it was reading
        if not isinstance(error, StaleView):
            raise
        raise Corruption(
            f"{table.uri}: {error}; it is not merged yet, so its rows would be lost. Restore the "
            "directory from a copy"
        ) from error


# --- plan ----------------------------------------------------------------------------------


def plan_merges(
    table: BaseTable,
    *,
    max_rows: int = MERGE_ROWS,
    upto: Mapping[uuid.UUID, int] | None = None,
    together: bool = True,
) -> tuple[list[MergePlan], int]:
    """The next merges of the regions that may go on, and how many generations have to wait.

    `together` puts regions into one plan as far as `max_rows` allows, for fewer versions and
    larger fragments; else each has a plan of its own. With `upto`, only generations up to those.
    """
    manifests, unmerged = _look(table)
    unfinished = [
        m.region_spec_id
        for m in manifests
        if unmerged[m.region_id] or m.status is not RegionStatus.SEALED
    ]
    oldest = min(unfinished, default=0)
    plans: list[MergePlan] = []
    waiting = 0
    for manifest in sorted(manifests, key=lambda m: (m.region_spec_id, m.region_id)):
        generations = unmerged[manifest.region_id]
        if manifest.region_spec_id > oldest:
            waiting += len(generations)
            continue
        if upto is not None:
            last = upto.get(manifest.region_id, 0)
            generations = [found for found in generations if found.generation <= last]
        if not generations:
            continue
        rows = np.cumsum([generation.physical_rows or 0 for generation in generations])
        count = max(1, int(np.searchsorted(rows, max_rows, side="right")))
        part = RegionPart(manifest.region_id, tuple(generations[:count]))
        if together and plans and plans[-1].rows + part.rows <= max_rows:
            plans[-1] = MergePlan((*plans[-1].parts, part))
        else:
            plans.append(MergePlan((part,)))
    return plans, waiting


def _look(
    table: BaseTable,
) -> tuple[list[RegionManifest], dict[uuid.UUID, list[FlushedGeneration]]]:
    """The regions, and what of each is not merged yet."""
    while True:
        base = table.snapshot()
        manifests = load_manifests(table.store, table.seams)
        try:
            return manifests, {m.region_id: _unmerged(base, m) for m in manifests}
        except Corruption:
            # Others may have merged generations since, and taken them out of the manifests.
            if table.snapshot().version == base.version:
                raise


def _unmerged(base: BaseSnapshot, manifest: RegionManifest) -> list[FlushedGeneration]:
    merged = base.details.merged(manifest.region_id)
    found = [g for g in manifest.flushed_generations if g.generation > merged]
    expected = list(range(merged + 1, merged + 1 + len(found)))
    if [g.generation for g in found] != expected:
        raise Corruption(
            f"region {manifest.region_id} lists generations {[g.generation for g in found]} where "
            f"{expected} have to come next; restore its manifest from a copy"
        )
    return found


# --- run -----------------------------------------------------------------------------------


def fold(table: BaseTable, plan: MergePlan) -> Folded:
    """Write the newest live row of each key as fragments; they are in no version yet."""
    started_ms = table.seams.clock.monotonic_ms()
    base = table.snapshot()

    def source(region_id: uuid.UUID, generation: FlushedGeneration) -> GenerationSource:
        return GenerationSource(table.store, table.storage_options, region_id, generation)

    shape, keys = base.shape, None
    masks: Sequence[Mask | None] = [None] * len(plan.generations)
    if shape.key_columns:
        keys, masks = _read_keys(table, base, plan)
    known: dict[str, list[int]] = {}
    with ThreadPoolExecutor(_WRITERS + 1, "penstock-fold") as pool:
        # Most of what the commit has to look up is known by the time the rows are written.
        looking = pool.submit(look_up, base.dataset, shape.key_columns, keys, known)
        every = list(zip(plan.generations, masks, strict=True))
        adopting = [adopt(table, base, source(*found), mask) for found, mask in every]
        left = [one for one, done in zip(every, adopting, strict=True) if done is None]
        written = list(pool.map(partial(_write, table, base), _shares(left)))
        # Clean-up may take the version; the commit looks up whatever is not known.
        with suppress(OSError, RuntimeError, pa.ArrowException):
            looking.result()
    adopted = tuple(one for one in adopting if one is not None)
    return Folded(
        plan,
        tuple(fragment for share in written for fragment in share.fragments),
        adopted,
        sum(share.rows for share in written) + sum(one.rows for one in adopted),
        sum(share.deleted for share in written) + sum(one.tombstones for one in adopted),
        keys is not None,
        keys,
        known,
        started_ms,
        base.version,
    )


def _read_keys(
    table: BaseTable, base: BaseSnapshot, plan: MergePlan
) -> tuple[pa.Array, list[Mask]]:
    """Every key of the generations once, and of each which of its rows are the newest of theirs."""
    kind = key_type(base.shape.schema, base.shape.key_columns)
    parts = [
        GenerationSource(table.store, table.storage_options, *found).keys()
        for found in plan.generations
    ]
    every = pa.concat_arrays([pa.array([], kind), *parts])
    newest = newest_rows(every)
    ends = np.cumsum([len(part) for part in parts])
    masks = [newest[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
    return every.filter(pa.array(newest)), masks


_Share = Sequence[tuple[tuple[uuid.UUID, FlushedGeneration], Mask | None]]
"""Generations, and which of the rows of each are the newest of their key."""


@dataclass(frozen=True, slots=True)
class _Written:
    fragments: list[FragmentMetadata]
    rows: int
    deleted: int


def _shares(every: _Share) -> list[_Share]:
    """The generations for each of the threads that write, in order; one if they are few rows."""
    if not every:
        return []
    ends = np.cumsum([found.physical_rows or 0 for (_, found), _ in every])
    count = int(min(_WRITERS, len(every), 1 + ends[-1] // _ROWS_PER_WRITER))
    cuts = np.searchsorted(ends, [ends[-1] * part / count for part in range(1, count)])
    bounds = [0, *(int(cut) + 1 for cut in cuts), len(every)]
    shares = [every[begin:end] for begin, end in pairwise(bounds)]
    return [share for share in shares if share]


def _write(table: BaseTable, base: BaseSnapshot, share: _Share) -> _Written:
    """Write the live ones among the newest rows as fragments of their own."""
    shape = base.shape
    counted = {"rows": 0, "dead": 0}

    def rows() -> Iterator[pa.RecordBatch]:
        for (region_id, generation), mask in share:
            # Opened here, so that what it keeps in memory goes with it.
            source = GenerationSource(table.store, table.storage_options, region_id, generation)
            found = source.scan(shape, shape.schema.names, None, buffer_bytes=_BUFFER_BYTES)
            for batch, numbers, dead in found:
                assert numbers is not None
                kept = np.ones(batch.num_rows, dtype=np.bool_) if mask is None else mask[numbers]
                if dead is not None:
                    counted["dead"] += int(np.count_nonzero(kept & dead))
                    kept = kept & ~dead
                if kept.any():
                    counted["rows"] += int(np.count_nonzero(kept))
                    chosen = batch if kept.all() else chosen_rows(batch, kept)
                    yield pa.RecordBatch.from_arrays(chosen.columns, schema=shape.schema)

    first = next(stream := rows(), None)
    fragments: list[FragmentMetadata] = []
    if first is not None:
        reader = pa.RecordBatchReader.from_batches(shape.schema, chain([first], stream))
        fragments = write_fragments(reader, base.dataset, mode="append")
        sync_data(table.store, fragments)
    return _Written(fragments, counted["rows"], counted["dead"])


# --- commit --------------------------------------------------------------------------------


def commit_merge(table: BaseTable, folded: Folded) -> MergeReport:
    """Publish folded rows and their progress, unless somebody else has merged some of them.

    Then nothing is done, and what is left to do has to be planned again.
    """
    plan = folded.plan
    done = False

    def progress(details: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        nonlocal done
        assert details is not None
        check_age(table.seams, folded.started_ms, "a merge")
        done = _is_overtaken(details, plan)
        if done:
            return None
        return details.with_merged({part.region_id: part.last for part in plan.parts})

    commit_index(
        table.store,
        table.storage_options,
        progress,
        table.seams,
        operation=partial(_operation, table, folded),
    )
    if done:
        keys = data_keys([*folded.fragments, *(one.fragment for one in folded.adopted)])
        remove_unnamed(table.store, keys, folded.version, table.seams)
        return MergeReport()
    return MergeReport(len(plan.generations), folded.rows, folded.deleted)


def _operation(table: BaseTable, folded: Folded, dataset: lance.LanceDataset) -> Any:
    """The rows in, and those they replace out."""
    adopted = [one.fragment for one in folded.adopted]
    if not folded.keyed:
        return only_moving_rows(lance.LanceOperation.Append([*adopted, *folded.fragments]))
    base = table.snapshot()

    def keys() -> pa.Array:
        return _read_keys(table, base, folded.plan)[0] if folded.keys is None else folded.keys

    # What earlier attempts looked up is known to later ones.
    replaced = look_up(dataset, base.shape.key_columns, keys, folded.superseded)
    if not adopted:
        return _exchange(table, folded, replaced)

    def exchange(appended: lance.LanceDataset) -> Any:
        return _exchange(table, folded, replaced | _dead(folded, appended))

    # What is deleted from a fragment is in a file with its number, which it gets by being added.
    return [lance.LanceOperation.Append(adopted), exchange]


Deletions = dict[int, tuple[lance.LanceFragment, list[int]]]
"""By their numbers, fragments and the offsets of rows that go out of them."""


def _exchange(table: BaseTable, folded: Folded, deletions: Deletions) -> Any:
    changed, removed = lessen(table, deletions)
    return only_moving_rows(
        lance.LanceOperation.Update(
            removed_fragment_ids=removed,
            updated_fragments=changed,
            new_fragments=list(folded.fragments),
        )
    )


def lessen(table: BaseTable, deletions: Deletions) -> tuple[list[FragmentMetadata], list[int]]:
    """The fragments without these rows, and the numbers of those of which nothing is left."""
    changed, removed = [], []
    for number, (fragment, offsets) in deletions.items():
        lessened = fragment.delete_rows(offsets)
        if lessened is None:
            removed.append(number)
        else:
            changed.append(lessened)
    if changed:
        table.store.sync("_deletions")
    return changed, removed


def _dead(folded: Folded, appended: lance.LanceDataset) -> Deletions:
    """What of the fragments that were adopted the table must not have."""
    dead = {one.path: one.dead.tolist() for one in folded.adopted if len(one.dead)}
    return {
        fragment.fragment_id: (fragment, dead[file.path])
        for fragment in appended.get_fragments()
        for file in fragment.metadata.files
        if file.path in dead
    }


def look_up(
    dataset: lance.LanceDataset,
    columns: Sequence[str],
    keys: pa.Array | Callable[[], pa.Array] | None,
    known: dict[str, list[int]],
) -> Deletions:
    """Rows with these keys; what `known` lacks of them is added to it, by fragments' contents.

    Keys that are given as a function are asked for only if something is lacking.
    """
    if keys is None:
        return {}
    fragments = {contents(fragment): fragment for fragment in dataset.get_fragments()}
    unread = {f.fragment_id: which for which, f in fragments.items() if which not in known}
    if unread:
        every = keys() if callable(keys) else keys
        wanted = KeyIndex(every, np.arange(len(every), dtype=np.uint64))
        scanner = dataset.scanner(
            columns=list(columns),
            fragments=[fragments[which] for which in unread.values()],
            with_row_address=True,
            batch_size=_LOOKED_UP_ROWS,
        )
        found = [np.empty(0, dtype=np.uint64)]
        for batch in scanner.to_batches():
            same = wanted.find(key_array(batch, columns)) != NOT_FOUND
            found.append(batch.column(ROW_ADDRESS).to_numpy()[same])
        addresses = np.concatenate(found)
        owners = fragments_of(addresses)
        known.update((which, []) for which in unread.values())
        for owner in np.unique(owners).tolist():
            known[unread[int(owner)]] = offsets_of(addresses[owners == owner]).tolist()
    return {f.fragment_id: (f, known[which]) for which, f in fragments.items() if known[which]}
