"""What versions of the base table changed by themselves, row by row.

Most versions only move rows: merges, compactions, index builds. Of any other the fragments are
compared with those of the version before:

    added       a new fragment: its rows are upserts
    rewritten   other files, the same rows: upserts of those whose values differ
    deleted     more rows are deleted from it: their keys are deletes
    removed     a fragment that is gone: the keys of its rows are deletes
    front       generations that the version counts as merged without having merged them, as an
                overwrite does: their keys are deletes

A key that the same version also upserts is not deleted. `Step` has this as a list of segments with
numbers of rows, taken from metadata alone, so that any part of it can be planned before it is read.

Without a primary key a deleted row cannot be named, so such a version is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import LanceFragment

from penstock.errors import InvalidInput, NotATable, ObjectNotFound, StorageError, VersionNotFound
from penstock.index.primary_key import key_array, key_type, newest_rows
from penstock.memwal.advance import MOVING
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.cache import FewCache
from penstock.memwal.feed_regions import RESTART, RegionLog, RegionRange, read_range
from penstock.memwal.freshness import Mask
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import ROW_ADDRESS, chosen_rows
from penstock.memwal.table_commit import MOVED_ROWS
from penstock.memwal.table_files import TableVersion, parse_version, patiently
from penstock.memwal.table_versions import manifest_bytes, version_exists

_KEPT_STEPS = 1024
_KEPT_MANIFESTS = 4
_WINDOW_ROWS = 65_536
_WHOLESALE = (lance.LanceOperation.Overwrite, lance.LanceOperation.Restore)

Changed = tuple[pa.RecordBatch, bool]
"""Rows in today's shape, and whether they are deletes, which have nothing but the key."""


@dataclass(frozen=True, slots=True)
class Segment:
    kind: str
    rows: int
    fragment: int = -1
    front: RegionRange | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What one version changed, and how far it has merged each region."""

    version: int
    merged: Mapping[uuid.UUID, int]
    segments: tuple[Segment, ...] = ()

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def added(self) -> tuple[int, ...]:
        return tuple(s.fragment for s in self.segments if s.kind == "added")

    def windows(self, first: int, last: int) -> Iterator[tuple[Segment, int, int]]:
        """The segments between two numbers of rows, each with the part of it that is between."""
        start = 0
        for segment in self.segments:
            begin, end = max(first, start) - start, min(last, start + segment.rows) - start
            if begin < end:
                yield segment, begin, end
            start += segment.rows


class History:
    """The versions of a base table as steps."""

    def __init__(self, table: BaseTable) -> None:
        self._table = table
        self._steps: FewCache[Step] = FewCache(_KEPT_STEPS)
        self._manifests: FewCache[TableVersion] = FewCache(_KEPT_MANIFESTS)

    def whole(self, version: int) -> Step:
        """All rows of a version, as if it were the first."""
        base = opened(self._table, version)
        segments = [_added(fragment) for fragment in base.dataset.get_fragments()]
        return Step(version, base.details.merged_generations, tuple(segments))

    def step(self, version: int, logs: Mapping[uuid.UUID, RegionLog]) -> Step:
        """What a version changed; `logs` are the regions as they are."""
        return self._steps.get(version, lambda: self._compare(version, logs))

    def _compare(self, version: int, logs: Mapping[uuid.UUID, RegionLog]) -> Step:
        now = self._manifest(version)
        merged = _merged(now)
        try:
            before = self._manifest(version - 1)
        except VersionNotFound:
            if self._operation(version) is None:
                return Step(version, merged)
            raise
        if before.fragments == now.fragments and _merged(before) == merged:
            return Step(version, merged)
        operation = self._operation(version)
        if operation is None:
            return Step(version, merged)
        old, new = opened(self._table, version - 1), opened(self._table, version)
        segments = _compared(old, new, wholesale=isinstance(operation, _WHOLESALE))
        for region_id, generation in merged.items():
            done = _merged(before).get(region_id, 0)
            if generation > done and region_id in logs:
                log = logs[region_id]
                rows = log.between((done + 1, 0), (generation + 1, 0))
                if rows:
                    front = log.range((done + 1, 0), rows)
                    segments.append(Segment("front", rows, front=front))
        if not new.shape.key_columns and any(s.kind != "added" for s in segments):
            raise InvalidInput(
                f"{self._table.uri}: version {version} changed or deleted rows, and the table has "
                "no primary key to name them by, so changes cannot tell which; begin anew from "
                f"'earliest' with an empty copy, or go on from version {version} without it"
            )
        return Step(version, merged, tuple(segments))

    def _manifest(self, version: int) -> TableVersion:
        def read() -> TableVersion:
            where = f"{self._table.uri} version {version}"
            data = patiently(self._table.seams, manifest_bytes, self._table.store, version)
            return parse_version(data, where)

        try:
            return self._manifests.get(version, read)
        except (NotATable, ObjectNotFound) as error:
            raise gone(self._table, version) from error

    def _operation(self, version: int) -> Any:
        """What a version was made by; None if that leaves all rows as they are."""
        try:
            transaction: Any = self._table.dataset().read_transaction(version)
        except TypeError as error:
            # What a compaction says of indexes it rewrote, Lance cannot turn into its own class.
            if "RewrittenIndex" in str(error):
                return None
            raise
        except (OSError, ValueError, RuntimeError) as error:
            if not version_exists(self._table.store, version):
                raise gone(self._table, version) from error
            raise StorageError(
                f"{self._table.uri}: how version {version} was made cannot be read: {error}"
            ) from error
        if transaction is None:
            return lance.LanceOperation.BaseOperation()
        moved = MOVED_ROWS in (transaction.transaction_properties or {})
        return None if moved or isinstance(transaction.operation, MOVING) else transaction.operation


def _merged(version: TableVersion) -> Mapping[uuid.UUID, int]:
    return version.details.merged_generations if version.details is not None else {}


def gone(table: BaseTable, version: int) -> VersionNotFound:
    return VersionNotFound(
        f"{table.uri}: changes since version {version} are asked for, and it was cleaned up; "
        f"{RESTART}"
    )


def opened(table: BaseTable, version: int) -> BaseSnapshot:
    """A version that is needed to tell what changed."""
    try:
        return table.snapshot(version)
    except VersionNotFound as error:
        raise gone(table, version) from error


# --- comparing -----------------------------------------------------------------------------


def _compared(old: BaseSnapshot, new: BaseSnapshot, *, wholesale: bool) -> list[Segment]:
    before = {fragment.fragment_id: fragment for fragment in old.dataset.get_fragments()}
    upserts: list[Segment] = []
    deletes: list[Segment] = []
    for fragment in new.dataset.get_fragments():
        number = fragment.fragment_id
        known = before.pop(number, None)
        if known is None:
            upserts.append(_added(fragment))
            continue
        more = fragment.num_deletions - known.num_deletions
        same_rows = fragment.physical_rows == known.physical_rows and more >= 0
        if _described(fragment) == _described(known):
            continue
        if wholesale or not same_rows:
            deletes.append(_removed(known))
            upserts.append(_added(fragment))
            continue
        if _files(fragment) != _files(known):
            upserts.append(Segment("rewritten", fragment.physical_rows, number))
        if more:
            deletes.append(Segment("deleted", more, number))
    deletes += [_removed(fragment) for fragment in before.values()]
    return [segment for segment in (*upserts, *deletes) if segment.rows]


def _added(fragment: LanceFragment) -> Segment:
    return Segment("added", fragment.physical_rows - fragment.num_deletions, fragment.fragment_id)


def _removed(fragment: LanceFragment) -> Segment:
    return Segment("removed", fragment.physical_rows - fragment.num_deletions, fragment.fragment_id)


def _files(fragment: LanceFragment) -> str:
    described = fragment.metadata.to_json()
    files = [(file["path"], file["fields"]) for file in described["files"]]
    return json.dumps([files, described["overlays"]], sort_keys=True)


def _described(fragment: LanceFragment) -> tuple[str, str]:
    return _files(fragment), json.dumps(fragment.metadata.to_json()["deletion_file"])


# --- reading -------------------------------------------------------------------------------


class StepReader:
    """Rows of one step, in today's shape."""

    def __init__(
        self,
        table: BaseTable,
        version: int,
        added: Sequence[int],
        shape: TableShape,
        columns: Sequence[str],
    ) -> None:
        self._table = table
        self._version = version
        self._added = added
        self._shape = shape
        self._columns = columns
        self._upserted: pa.Array | None = None

    def read(self, segment: Segment, first: int, last: int) -> Iterator[Changed]:
        """Rows of a segment, some of which may turn out to be no changes."""
        try:
            yield from self._segment(segment, first, last)
        except (OSError, ValueError, RuntimeError, pa.ArrowException) as error:
            for version in (self._version - 1, self._version):
                needed = version == self._version or segment.kind != "added"
                if needed and not version_exists(self._table.store, version):
                    raise gone(self._table, version) from error
            raise

    def _segment(self, segment: Segment, first: int, last: int) -> Iterator[Changed]:
        if segment.kind == "added":
            new = opened(self._table, self._version)
            for batch in _live(new, segment.fragment, self._wanted(new), first, last):
                yield self._arranged(batch, new), False
        elif segment.kind == "rewritten":
            for batch in self._rewritten(segment.fragment, first, last):
                yield batch, False
        else:
            for keys in self._deleted(segment, first, last):
                left = chosen_rows(keys, ~self._is_upserted(keys))
                if left.num_rows:
                    yield left, True

    def _wanted(self, base: BaseSnapshot) -> list[str]:
        """The columns as they are called in a version that may have other names for them."""
        names = self._shape.names_in(base.shape)
        return [names[name] for name in self._columns if name in names]

    def _arranged(self, rows: pa.RecordBatch, base: BaseSnapshot) -> pa.RecordBatch:
        return self._shape.arrange(rows, base.shape).select(list(self._columns))

    def _rewritten(self, number: int, first: int, last: int) -> Iterator[pa.RecordBatch]:
        old, new = opened(self._table, self._version - 1), opened(self._table, self._version)
        compared = _rewritten_columns(old, new, number)
        wanted = list(dict.fromkeys([*self._wanted(new), *compared]))
        earlier = new.shape.names_in(old.shape)
        older = [earlier[name] for name in compared if name in earlier]
        windows = zip(
            _physical(new, number, wanted, first, last),
            _physical(old, number, older, first, last),
            strict=True,
        )
        for now, before in windows:
            is_live = _is_live(now)
            changed = ~_is_live(before)
            for name in compared:
                known = before.column(earlier[name]) if name in earlier else None
                changed |= _differs(now.column(name), known)
            if (is_live & changed).any():
                yield self._arranged(chosen_rows(now, is_live & changed), new)

    def _deleted(self, segment: Segment, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """The keys of the rows that a segment of deletes is about."""
        key = list(self._shape.key_columns)
        if segment.kind == "front":
            assert segment.front is not None
            for rows, _, _ in read_range(self._table, segment.front, self._shape, key):
                begin, end = max(0, first), min(last, rows.num_rows)
                if begin < end:
                    keys = rows.select(key).slice(begin, end - begin)
                    yield chosen_rows(keys, newest_rows(key_array(keys, key)))
                first, last = first - rows.num_rows, last - rows.num_rows
            return
        old = opened(self._table, self._version - 1)
        named = _only(old.shape, self._shape)
        if segment.kind == "removed":
            found = _live(old, segment.fragment, named, first, last)
        else:
            found = self._lately_deleted(old, segment.fragment, named, first, last)
        for batch in found:
            yield self._shape.arrange(batch, old.shape).select(key)

    def _lately_deleted(
        self, old: BaseSnapshot, number: int, columns: Sequence[str], first: int, last: int
    ) -> Iterator[pa.RecordBatch]:
        new = opened(self._table, self._version)
        rows = _fragment(old, number).physical_rows
        passed = 0
        windows = zip(
            _physical(old, number, columns, 0, rows),
            _physical(new, number, [], 0, rows),
            strict=True,
        )
        for before, now in windows:
            at = np.flatnonzero(_is_live(before) & ~_is_live(now))
            inside = at[max(0, first - passed) : max(0, last - passed)]
            passed += len(at)
            if len(inside):
                yield before.take(pa.array(inside))
            if passed >= last:
                return

    def _is_upserted(self, keys: pa.RecordBatch) -> Mask:
        """Which keys the version has rows of in what it added."""
        if self._upserted is None:
            new = opened(self._table, self._version)
            named = _only(new.shape, self._shape)
            kind = key_type(self._shape.schema, self._shape.key_columns)
            parts = [
                key_array(batch, named)
                for number in self._added
                for batch in _live(new, number, named, 0, _fragment(new, number).physical_rows)
            ]
            self._upserted = pa.concat_arrays([pa.array([], kind), *parts])
        stored = key_array(keys, self._shape.key_columns)
        upserted: Mask = np.asarray(pc.is_in(stored, value_set=self._upserted))
        return upserted


def _only(base: TableShape, shape: TableShape) -> list[str]:
    """The key columns by the names that they have in a version."""
    names = shape.names_in(base)
    return [names[name] for name in shape.key_columns]


def _fragment(base: BaseSnapshot, number: int) -> LanceFragment:
    fragment = base.dataset.get_fragment(number)
    if fragment is None:
        raise StorageError(f"{base.dataset.uri} version {base.version} has no fragment {number}")
    return fragment


def _live(
    base: BaseSnapshot, number: int, columns: Sequence[str], first: int, last: int
) -> Iterator[pa.RecordBatch]:
    """Rows of a fragment that are not deleted, by their number among these."""
    scanner = base.dataset.scanner(
        columns=list(columns),
        fragments=[_fragment(base, number)],
        offset=first,
        limit=last - first,
        with_row_id=True,  # without any column it would not be known how many rows there are
    )
    yield from scanner.to_batches()


def _physical(
    base: BaseSnapshot, number: int, columns: Sequence[str], first: int, last: int
) -> Iterator[pa.RecordBatch]:
    """Rows of a fragment by their offset, deleted ones too, in windows of the same size."""
    fragment = _fragment(base, number)
    for begin in range(first, last, _WINDOW_ROWS):
        rows = base.dataset.scanner(
            columns=list(columns),
            fragments=[fragment],
            offset=begin,
            limit=min(_WINDOW_ROWS, last - begin),
            with_row_id=True,
            with_row_address=True,
            include_deleted_rows=True,
        ).to_table()
        yield rows.combine_chunks().to_batches()[0]


def _is_live(rows: pa.RecordBatch) -> Mask:
    live: Mask = np.asarray(rows.column(ROW_ADDRESS).is_valid())
    return live


def _rewritten_columns(old: BaseSnapshot, new: BaseSnapshot, number: int) -> list[str]:
    """The columns of a fragment that are in other files than before, whole or in part."""
    placed = _places(_fragment(new, number))
    before = _places(_fragment(old, number))
    moved = {field for field, place in placed.items() if before.get(field) != place}
    overlaid = _fragment(new, number).metadata.to_json()["overlays"]
    columns: list[str] = []

    def ids(field: Any) -> set[int]:
        return {field.id()}.union(*(ids(child) for child in field.children()))

    for field in new.dataset.lance_schema.fields():
        if overlaid or ids(field) & moved:
            columns.append(field.name())
    return columns


def _places(fragment: LanceFragment) -> dict[int, str]:
    return {field: file.path for file in fragment.metadata.files for field in file.fields}


def _differs(now: pa.Array, before: pa.Array | None) -> Mask:
    """Which values differ; values that cannot be compared at once are taken to."""
    if before is None:
        differs: Mask = np.asarray(now.is_valid())
        return differs
    if pa.types.is_fixed_size_list(now.type) and now.type == before.type:
        width = now.type.list_size
        both = np.asarray(now.is_valid()) & np.asarray(before.is_valid())
        differs = np.asarray(now.is_valid()) != np.asarray(before.is_valid())
        inside = np.flatnonzero(both)
        if len(inside):
            at = pa.array(inside)
            parts = _differs(now.take(at).flatten(), before.take(at).flatten())
            differs[inside] = parts.reshape(-1, width).any(axis=1) if width else False
        return differs
    try:
        unequal = pc.not_equal(now, before)
    except pa.ArrowException:
        return np.ones(len(now), dtype=np.bool_)
    differs = np.asarray(now.is_valid()) != np.asarray(before.is_valid())
    differs |= np.asarray(pc.fill_null(unequal, False))
    return differs
