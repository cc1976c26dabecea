"""Bulk loads: many rows straight into the base table, in one version, past log and regions.

    plan_bulk     what the table is like, and when the job began
    write_piece   some of the rows as Lance fragments that nobody names yet; any number at a time
    commit_bulk   one version: all pieces in, what they replace out

Plans and pieces are small values that can be sent to other processes. Of several rows with one key
the last counts: that of the highest piece, and in a piece the last. The keys are read back from the
fragments when they are committed, so the process that commits needs memory for the key columns.

An overwrite takes every row out that was there. Rows in regions go, too: what is in the log is
flushed, and the new version counts everything flushed as merged. Rows that others write meanwhile
come after it.

A load does not touch regions, and readers prefer rows in regions to those of the base. So with a
primary key a load is refused while a region has rows that are not merged: those would hide rows
that came later than they did. Rows that are written while it is committed come after it.

Invariants
- The version is published as the very next one after that in which keys were looked up and regions
  were counted, or not at all (`table_commit`). A crash leaves files that no version names.
- Pieces are committed once, if they are committed again while their files are still in use.
- No index covers the new rows. After an overwrite none lacks a row of any generation, so every
  index has caught up with all of them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileReader
from lance.fragment import FragmentMetadata, write_fragments

from penstock.errors import CommitConflict, InvalidInput, PenstockError, StorageError
from penstock.index.base import SYSTEM_INDEX_PREFIX
from penstock.index.primary_key import key_array, key_type, newest_rows
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.fragments import data_keys, sync_data
from penstock.memwal.gc_limits import check_age, store_now_ms
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.ingest import rows_to_batch
from penstock.memwal.manifest import RegionManifest, RegionStatus
from penstock.memwal.merge import Deletions, lessen, look_up
from penstock.memwal.names import MAX_POSITION
from penstock.memwal.regions import load_manifests
from penstock.memwal.shape import TableShape
from penstock.memwal.table_commit import commit_next
from penstock.memwal.table_files import patiently, remove_unnamed
from penstock.memwal.table_versions import is_latest_version
from penstock.memwal.wal import Wal

_READ_THREADS = 4
_READ_ROWS = 65_536
"""Rows whose keys are read back at a time."""


@dataclass(frozen=True, slots=True)
class BulkPlan:
    overwrite: bool
    version: int
    """The newest version when it was planned, so only later ones can name its files."""
    shape: TableShape
    started_ms: int
    """By the store's clock, before the first file was written."""


@dataclass(frozen=True, slots=True)
class BulkPiece:
    """Rows that are written and durable, and in no version."""

    number: int
    rows: int
    fragments: tuple[str, ...]
    """Each as Lance's JSON."""


@dataclass(frozen=True, slots=True)
class BulkReport:
    """What a bulk load did."""

    rows: int = 0
    """Rows that the base table got."""
    replaced: int = 0
    """Rows that it lost for them."""
    duplicates: int = 0
    """Rows that were given and not kept, because a later one had the same key."""
    version: int | None = None
    """The version that has them; None if there was nothing to do."""

    def __str__(self) -> str:
        version = f" in version {self.version}" if self.version is not None else ""
        twice = f", {self.duplicates:,} given twice" if self.duplicates else ""
        return f"{self.rows:,} rows loaded{version}, {self.replaced:,} replaced{twice}"


def load(table: BaseTable, data: Any, *, overwrite: bool, flush: Callable[[], None]) -> BulkReport:
    """Load rows in this process, as one piece; a stream is never held in memory as a whole."""
    plan = plan_bulk(table, overwrite=overwrite)
    piece = write_piece(table, plan, 0, batches_of(data, plan.shape))
    try:
        return commit_bulk(table, plan, [piece], flush)
    except InvalidInput:
        written = data_keys(_fragments([piece]))
        remove_unnamed(table.store, written, plan.version, table.seams)
        raise


def batches_of(data: Any, shape: TableShape) -> Iterator[pa.RecordBatch]:
    """Whatever rows come in, in batches; streams and datasets are read as they are needed."""
    if isinstance(data, pa.RecordBatchReader):
        yield from data
    elif hasattr(data, "to_batches"):
        yield from data.to_batches()
    else:
        yield rows_to_batch(data, shape)


# --- plan ----------------------------------------------------------------------------------


def plan_bulk(table: BaseTable, *, overwrite: bool = False) -> BulkPlan:
    """Begin a load; raises `InvalidInput` if it could not be committed as things are."""
    started_ms = patiently(table.seams, store_now_ms, table.store, table.seams)
    base = table.snapshot()
    while base.shape.key_columns and not overwrite and not _is_settled(table, base):
        base = table.snapshot()
    return BulkPlan(overwrite, base.version, base.shape, started_ms)


# --- run -----------------------------------------------------------------------------------


def write_piece(
    table: BaseTable, plan: BulkPlan, number: int, batches: Iterable[pa.RecordBatch]
) -> BulkPiece:
    """Check rows as an upsert does and write them as fragments; they are in no version yet."""
    base = table.snapshot()
    _check_shape(table, plan, base)
    counted = 0
    refused: list[PenstockError] = []

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal counted
        try:
            for given in batches:
                batch = rows_to_batch(given, plan.shape)
                if batch.num_rows:
                    counted += int(batch.num_rows)
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=plan.shape.schema)
        except PenstockError as error:
            error.add_note(f"after {counted} rows of piece {number}")
            refused.append(error)
            raise

    first = next(stream := rows(), None)
    if first is None:
        return BulkPiece(number, 0, ())
    reader = pa.RecordBatchReader.from_batches(plan.shape.schema, chain([first], stream))
    try:
        fragments = write_fragments(reader, base.dataset, mode="append")
    except Exception:
        if refused:  # which Lance wraps in an error of its own
            raise refused[0] from None
        raise
    sync_data(table.store, fragments)
    return BulkPiece(
        number, counted, tuple(json.dumps(fragment.to_json()) for fragment in fragments)
    )


# --- commit --------------------------------------------------------------------------------


def commit_bulk(
    table: BaseTable, plan: BulkPlan, pieces: Sequence[BulkPiece], flush: Callable[[], None]
) -> BulkReport:
    """Publish all pieces in one version; `flush` brings the rows of all logs into generations."""
    # The time that the job has taken, by the store's clock, for a process that did not begin it.
    age_ms = patiently(table.seams, store_now_ms, table.store, table.seams) - plan.started_ms
    started_ms = table.seams.clock.monotonic_ms() - age_ms
    new = _Rows.of(table, plan.shape, pieces)
    if plan.overwrite:
        _settle(table, flush)
    elif not new.fragments:
        return BulkReport()
    last: Exception | None = None
    for _ in table.seams.races():
        base = table.snapshot()
        if new.are_in(base):
            return replace(new.report, version=base.version)
        check_age(table.seams, started_ms, "a bulk load")
        _check_shape(table, plan, base)
        if plan.shape.key_columns and not plan.overwrite and not _is_settled(table, base):
            continue
        details = _all_merged(table, base) if plan.overwrite else None
        try:
            attempt = _prepare(table, plan, base, new)
            if attempt.is_nothing and details == base.details:
                return BulkReport()
            if commit_next(
                table.store,
                table.storage_options,
                base.dataset,
                attempt.steps,
                table.seams,
                details=details,
            ):
                return replace(new.report, replaced=attempt.replaced, version=base.version + 1)
        except (OSError, RuntimeError, pa.ArrowException) as error:
            if is_latest_version(table.store, base.version):
                raise StorageError(f"{table.uri}: the bulk load failed, {error}") from error
            last = error  # newer versions came, and clean-up took what it was reading
    raise CommitConflict(
        f"{table.uri}: other commits won {table.seams.backoff.races} times, and nothing of the "
        f"bulk load was committed; commit it again when less is committed ({last})"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What is loaded: fragments, their keys, and the rows among them that a later one replaces."""

    fragments: list[FragmentMetadata]
    keys: pa.Array | None
    dead: Mapping[str, list[int]]
    """By data file the offsets of rows that the table must not have."""
    report: BulkReport
    known: dict[str, list[int]]
    """Of fragments of the base that were looked through the rows with one of the keys."""

    @classmethod
    def of(cls, table: BaseTable, shape: TableShape, pieces: Sequence[BulkPiece]) -> _Rows:
        fragments = _fragments(pieces)
        rows = sum(piece.rows for piece in pieces)
        if not shape.key_columns:
            return cls(fragments, None, {}, BulkReport(rows), {})
        with ThreadPoolExecutor(_READ_THREADS, "penstock-keys") as pool:
            parts = list(pool.map(lambda one: _keys_of(table, shape, one), fragments))
        keys = pa.concat_arrays([pa.array([], key_type(shape.schema, shape.key_columns)), *parts])
        newest = newest_rows(keys)
        dead: dict[str, list[int]] = {}
        first = 0
        for fragment, part in zip(fragments, parts, strict=True):
            older = np.flatnonzero(~newest[first : first + len(part)])
            if len(older):
                dead[fragment.files[0].path] = older.tolist()
            first += len(part)
        twice = sum(map(len, dead.values()))
        distinct = keys if not twice else keys.filter(pa.array(newest))
        return cls(fragments, distinct, dead, BulkReport(rows - twice, duplicates=twice), {})

    def are_in(self, base: BaseSnapshot) -> bool:
        """Whether a version has them already, of an earlier commit whose answer was lost."""
        there = data_keys(fragment.metadata for fragment in base.dataset.get_fragments())
        return not set(data_keys(self.fragments)).isdisjoint(there)

    def dead_in(self, appended: lance.LanceDataset) -> Deletions:
        return {
            fragment.fragment_id: (fragment, self.dead[file.path])
            for fragment in appended.get_fragments()
            for file in fragment.metadata.files
            if file.path in self.dead
        }


def _fragments(pieces: Iterable[BulkPiece]) -> list[FragmentMetadata]:
    """The fragments of pieces, in the order of their numbers."""
    ordered = sorted(pieces, key=lambda piece: piece.number)
    return [FragmentMetadata.from_json(stored) for piece in ordered for stored in piece.fragments]


def _keys_of(table: BaseTable, shape: TableShape, fragment: FragmentMetadata) -> pa.Array:
    path = f"{table.uri}/data/{fragment.files[0].path}"
    try:
        reader = LanceFileReader(path, table.storage_options, columns=list(shape.key_columns))
        batches = reader.read_all(batch_size=_READ_ROWS).to_batches()
        parts = [key_array(batch, shape.key_columns) for batch in batches]
    except (OSError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"{path}, a part of the bulk load, cannot be read ({error}); do the load again"
        ) from error
    return pa.concat_arrays(parts)


@dataclass(frozen=True, slots=True)
class _Attempt:
    steps: list[Any]
    replaced: int
    is_nothing: bool


def _prepare(table: BaseTable, plan: BulkPlan, base: BaseSnapshot, new: _Rows) -> _Attempt:
    """The rows in, and what they replace out, for one version."""
    dataset = base.dataset
    removed: list[int] = []
    replaced: Deletions = {}
    if plan.overwrite:
        removed = [fragment.fragment_id for fragment in dataset.get_fragments()]
    elif new.keys is not None:
        replaced = look_up(dataset, plan.shape.key_columns, new.keys, new.known)
    count = base.rows if plan.overwrite else sum(len(rows) for _, rows in replaced.values())
    if new.keys is None and not removed:
        append = lance.LanceOperation.Append(new.fragments)
        return _Attempt([append], 0, is_nothing=not new.fragments)

    def exchange(deletions: Deletions, fragments: list[FragmentMetadata]) -> Any:
        changed, gone = lessen(table, deletions)
        return lance.LanceOperation.Update(
            removed_fragment_ids=[*removed, *gone],
            updated_fragments=changed,
            new_fragments=fragments,
        )

    if not new.dead:
        nothing = not removed and not new.fragments
        return _Attempt([exchange(replaced, new.fragments)], count, is_nothing=nothing)
    # What is deleted from a fragment is in a file with its number, which it gets by being added.
    steps = [
        lance.LanceOperation.Append(new.fragments),
        lambda appended: exchange(replaced | new.dead_in(appended), []),
    ]
    return _Attempt(steps, count, is_nothing=False)


def _check_shape(table: BaseTable, plan: BulkPlan, base: BaseSnapshot) -> None:
    if not plan.shape.is_like(base.shape):
        raise InvalidInput(
            f"the columns of {table.uri} have changed since the bulk load began; nothing of it is "
            "in the table, do it again"
        )


# --- what lies in front of the base --------------------------------------------------------


def _all_merged(table: BaseTable, base: BaseSnapshot) -> MemWalIndexDetails:
    """The index of a version that has nothing of any generation, and lacks nothing of them."""
    manifests = load_manifests(table.store, table.seams)
    flushed = {m.region_id: m.current_generation - 1 for m in manifests if m.current_generation > 1}
    details = base.details.with_merged(flushed)
    for index in base.dataset.describe_indices():
        if not index.name.startswith(SYSTEM_INDEX_PREFIX):
            details = details.with_catchup(index.name, details.merged_generations)
    return details


def _is_settled(table: BaseTable, base: BaseSnapshot) -> bool:
    """Whether the base is all there is; False if there is a newer version, which may be.

    Raises `InvalidInput` if it is not.
    """
    found = _in_front(table, base.details)
    if found is None:
        return True
    if not is_latest_version(table.store, base.version):
        return False
    raise InvalidInput(
        f"{table.uri}: {found}; a bulk load would go below them, and they would hide rows that "
        "are newer. Bring them into the base table first, flush(recover=True) and merge(), or "
        "upsert the rows (in Spark: append without mode=bulk)"
    )


def _in_front(table: BaseTable, details: MemWalIndexDetails) -> str | None:
    """Why the base is not all there is, if it is not."""
    manifests = load_manifests(table.store, table.seams)
    for manifest in manifests:
        count = manifest.current_generation - 1 - details.merged(manifest.region_id)
        if count > 0:
            return f"region {manifest.region_id} has {count} generations that are not merged"
    for manifest in _with_rows(table, manifests, {}):
        return f"region {manifest.region_id} has rows in its log that are not flushed"
    return None


def _with_rows(
    table: BaseTable, manifests: Sequence[RegionManifest], upto: Mapping[uuid.UUID, int]
) -> list[RegionManifest]:
    """Regions with rows in their log that are in no generation, up to a position of each."""

    def has_rows(manifest: RegionManifest) -> bool:
        wal = Wal(table.store, manifest.region_id, table.seams)
        until = upto.get(manifest.region_id, MAX_POSITION)
        tail = wal.tail(manifest.replay_after_wal_entry_position, until)
        return any(batch.num_rows for entry in tail for batch in entry.batches)

    active = [manifest for manifest in manifests if manifest.status is RegionStatus.ACTIVE]
    with ThreadPoolExecutor(_READ_THREADS, "penstock-tails") as pool:
        found = list(pool.map(has_rows, active))
    return [manifest for manifest, has in zip(active, found, strict=True) if has]


def _settle(table: BaseTable, flush: Callable[[], None]) -> None:
    """Bring whatever is in a log now into generations.

    Another writer may take a region back before it is flushed, and have the rows in its memory.
    """
    tips: dict[uuid.UUID, int] = {}
    for manifest in load_manifests(table.store, table.seams):
        known = max(manifest.replay_after_wal_entry_position, manifest.wal_entry_position_last_seen)
        wal = Wal(table.store, manifest.region_id, table.seams)
        tips[manifest.region_id] = patiently(table.seams, wal.tip, known)
    for _ in table.seams.races():
        flush()
        there = [m for m in load_manifests(table.store, table.seams) if m.region_id in tips]
        if not _with_rows(table, there, tips):
            return
    raise CommitConflict(
        f"{table.uri}: other writers took regions back {table.seams.backoff.races} times before "
        "they could be flushed, and nothing was overwritten; try again when less is written"
    )
