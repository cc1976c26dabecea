"""The changes of a table since a position: upserts and deletes, in batches that can be repeated.

    start / latest     where to begin, and where the table is now
    plan               the next position, at most so many rows further on
    parts              what lies between two positions, as pieces that can be read anywhere
    read_part          the rows of a piece

Changes come from two places: rows that were written to regions (`feed_regions`), and what versions
of the base table changed by themselves (`feed_base`). Merges and other versions that only move rows
are passed over, so a row is told once, however far it has come.

What a key is in the end has to follow from the order in which its changes are told:
- The base goes on to a version only when everything that this version has merged is told. So what a
  version changes is newer than all rows of regions before it, except those that are not merged.
- A row that waits in front of the base outranks what the base has. So a change of the base is left
  out if a row in front of that version, up to the end of the batch, has its key.
- Regions of a newer spec wait until those of older ones are sealed and told, in another batch.

So within a batch the changes of a key are in the order of `_version`, `_generation`, `_row`, and a
batch depends on its two positions alone. The first reading of a table is in batches of its own.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, VersionNotFound
from penstock.index.primary_key import key_array, key_type
from penstock.memwal.base_table import BaseTable
from penstock.memwal.feed_base import History, Segment, Step, StepReader
from penstock.memwal.feed_position import Mark, Position
from penstock.memwal.feed_regions import (
    RESTART,
    RegionFollowers,
    RegionLog,
    RegionRange,
    read_range,
)
from penstock.memwal.freshness import Mask
from penstock.memwal.manifest import RegionStatus
from penstock.memwal.shape import TableShape
from penstock.memwal.snapshots import read_snapshot
from penstock.memwal.sources import StaleView, chosen_rows
from penstock.memwal.wal import TOMBSTONE

PART_ROWS = 250_000
"""Rows that are read in one piece."""
_VERSIONS = 1_000
"""So many versions are gone through for one batch."""
CHANGE, REGION, GENERATION, VERSION, ROW = "_change", "_region", "_generation", "_version", "_row"
METADATA = pa.schema(
    [
        pa.field(CHANGE, pa.string(), nullable=False),
        pa.field(REGION, pa.string()),
        pa.field(GENERATION, pa.int64(), nullable=False),
        pa.field(VERSION, pa.int64(), nullable=False),
        pa.field(ROW, pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Rows that were written to a region."""

    wanted: RegionRange
    version: int
    """The version of the base that they are on top of."""


@dataclass(frozen=True, slots=True)
class BasePart:
    """What a version of the base changed, or a part of that."""

    version: int
    windows: tuple[tuple[Segment, int, int], ...]
    first: int
    """The number of its first row among all that the version changed."""
    added: tuple[int, ...]
    fronts: tuple[RegionRange, ...]
    """Rows that outrank what the version has."""


Part = RegionPart | BasePart


def change_schema(shape: TableShape) -> pa.Schema:
    """The columns of changes: those of the table, null in deletes except the key, and ours."""
    fields = [
        field if field.name in shape.key_columns else field.with_nullable(True)
        for field in shape.schema
    ]
    return pa.schema([*fields, *METADATA])


class Feed:
    """Plans what is read; keeps between calls what it has seen of logs and versions."""

    def __init__(self, table: BaseTable) -> None:
        self.table = table
        self._history = History(table)
        self._regions = RegionFollowers(table)

    # --- positions -------------------------------------------------------------------------

    def start(self, since: object) -> Position:
        """The position that 'earliest', 'latest', a version, or a stored position stands for."""
        if since == "latest":
            return self.latest(everything=True)
        if since == "earliest":
            base = self.table.snapshot()
            merged = base.details.merged_generations
            return Position(0, _behind(merged), base.version, 0, self._table_id())
        if isinstance(since, int) and not isinstance(since, bool):
            return self._of_version(since)
        position = Position.of(since)
        known = self._table_id()
        if None not in (known, position.table_id) and known != position.table_id:
            raise InvalidInput(
                f"{self.table.uri} is table {known}, and the position is one of table "
                f"{position.table_id}; {RESTART}"
            )
        if max(position.version, position.into) > self.table.snapshot().version:
            raise VersionNotFound(
                f"{self.table.uri} has no version {max(position.version, position.into)}, up to "
                f"which changes were read: the table is older than that; {RESTART}"
            )
        return position

    def _of_version(self, version: int) -> Position:
        """What reads of a version show is done: the base, and the generations it names."""
        base = self.table.snapshot(version)
        marks = _behind(base.details.merged_generations)
        if base.details.inline_snapshots is not None:
            where = f"the region snapshot of {self.table.uri} version {version}"
            named = read_snapshot(self.table.store, base.details.inline_snapshots, where)
            for region in named:
                mark = (region.current_generation, 0)
                marks[region.region_id] = max(mark, marks.get(region.region_id, mark))
        return Position(version, marks, table_id=self._table_id())

    def latest(self, *, everything: bool = False) -> Position:
        """Where the table is now; without `everything`, how far changes may be told."""
        base = self.table.snapshot()
        logs = self._look()
        unsealed = [log.spec_id for log in logs.values() if not _is_sealed(log)]
        oldest = math.inf if everything else min(unsealed, default=math.inf)
        marks = _behind(base.details.merged_generations)
        marks |= {r: log.end for r, log in logs.items() if log.spec_id <= oldest}
        return Position(base.version, marks, table_id=self._table_id())

    def _table_id(self) -> str | None:
        """The table's id if it has one; to read changes is no reason to give it one."""
        known = self.table.known_table_id()
        return None if known is None else str(known)

    def _look(self) -> dict[uuid.UUID, RegionLog]:
        try:
            return self._regions.look()
        except StaleView as error:
            raise VersionNotFound(f"{self.table.uri}: {error}; try again") from error

    # --- planning --------------------------------------------------------------------------

    def plan(
        self, position: Position, upto: Position | None = None, max_rows: int | None = None
    ) -> Position:
        """The next position on the way to `upto` (where the table is now), at most so many rows on.

        It is the same one if there is nothing to read.
        """
        if max_rows is not None and max_rows < 1:
            raise InvalidInput(f"max_rows must be a whole number from 1 on, not {max_rows!r}")
        upto = self.latest() if upto is None else upto
        batch = _Batch(position, self._look(), max_rows)
        if not position.version:
            whole = self._history.whole(position.into)
            if not batch.go_into(whole) or batch.told:
                return batch.end
        last = min(upto.version, batch.version + _VERSIONS)
        for version in range(batch.version + 1, last + 1):
            step = self._history.step(version, batch.logs)
            if not batch.advance(_behind(step.merged)) or not batch.go_into(step):
                return batch.end
        if last >= upto.version:
            batch.advance(upto.regions)
        return batch.end

    # --- parts -----------------------------------------------------------------------------

    def parts(self, first: Position, last: Position) -> list[Part]:
        """What lies between two positions, in the order in which it has to be told."""
        logs = self._look()
        parts: list[Part] = []
        for region_id, mark in sorted(last.regions.items()):
            log = logs.get(region_id)
            if log is None:
                if mark > first.mark(region_id):
                    raise VersionNotFound(f"region {region_id} is gone; {RESTART}")
                continue
            at = first.mark(region_id)
            rows = log.between(at, mark) if mark != at else 0
            while rows:
                count = min(rows, PART_ROWS)
                parts.append(RegionPart(log.range(at, count), first.version))
                at, rows = log.after(at, count), rows - count
        for step, begin, end in self._steps(first, last, logs):
            fronts = self._fronts(step, last, logs) if end > begin else ()
            for start in range(begin, end, PART_ROWS):
                windows = tuple(step.windows(start, min(end, start + PART_ROWS)))
                parts.append(BasePart(step.version, windows, start, step.added, fronts))
        return parts

    def _steps(
        self, first: Position, last: Position, logs: Mapping[uuid.UUID, RegionLog]
    ) -> Iterator[tuple[Step, int, int]]:
        """Each version between two positions, with the rows of it that are."""
        begin = first.rows
        version = first.version
        if not version:
            whole = self._history.whole(first.into)
            partly = not last.version
            yield whole, begin, last.rows if partly else whole.rows
            begin, version = 0, first.into
        while version < last.version:
            version += 1
            step = self._history.step(version, logs)
            yield step, begin if first.into == version else 0, step.rows
        if last.version and last.into:
            step = self._history.step(last.into, logs)
            yield step, begin if first.into == last.into else 0, last.rows

    def _fronts(
        self, step: Step, last: Position, logs: Mapping[uuid.UUID, RegionLog]
    ) -> tuple[RegionRange, ...]:
        if not self.table.snapshot().shape.key_columns:
            return ()
        fronts = []
        for region_id, mark in last.regions.items():
            merged: Mark = (step.merged.get(region_id, 0) + 1, 0)
            if region_id in logs and mark > merged:
                rows = logs[region_id].between(merged, mark)
                if rows:
                    fronts.append(logs[region_id].range(merged, rows))
        return tuple(fronts)


def _behind(merged: Mapping[uuid.UUID, int]) -> dict[uuid.UUID, Mark]:
    return {region_id: (generation + 1, 0) for region_id, generation in merged.items()}


def _is_sealed(log: RegionLog) -> bool:
    return log.manifest.status is RegionStatus.SEALED


class _Batch:
    """A batch as it grows, from a position on."""

    def __init__(
        self, begin: Position, logs: Mapping[uuid.UUID, RegionLog], max_rows: int | None
    ) -> None:
        self.logs = logs
        self.version = begin.version
        self.told = False
        """Whether it has a row."""
        self._begin = begin
        self._into, self._rows = begin.into, begin.rows
        self._left = math.inf if max_rows is None else max_rows
        self._spec: int | None = None
        self._marks = dict(begin.regions)
        for region_id, log in logs.items():
            self._marks[region_id] = log.normal(begin.mark(region_id))

    @property
    def end(self) -> Position:
        return Position(self.version, self._marks, self._into, self._rows, self._begin.table_id)

    def go_into(self, step: Step) -> bool:
        """Tell what a version changed; False if not all of it has room."""
        done = self._rows if self._into == step.version else 0
        count = int(min(self._left, step.rows - done))
        self.told = self.told or count > 0
        self._left -= count
        if done + count < step.rows:
            if count or done:
                self._into, self._rows = step.version, done + count
            return False
        self.version, self._into, self._rows = step.version, 0, 0
        return True

    def advance(self, targets: Mapping[uuid.UUID, Mark]) -> bool:
        """Tell rows of regions up to these marks; False if not all of them have room."""
        waiting: dict[int, list[tuple[int, uuid.UUID]]] = {}
        for region_id, target in targets.items():
            mark = self._marks.get(region_id, (1, 0))
            if target <= mark:
                continue
            log = self.logs.get(region_id)
            if log is None:
                raise VersionNotFound(f"region {region_id} is gone; {RESTART}")
            rows = log.between(mark, target)
            if rows:
                waiting.setdefault(log.spec_id, []).append((rows, region_id))
        for spec_id, regions in sorted(waiting.items()):
            if self._spec not in (None, spec_id):
                return False
            self._spec = spec_id
            if not self._fill(sorted(regions)):
                return False
        return True

    def _fill(self, regions: Sequence[tuple[int, uuid.UUID]]) -> bool:
        """As many rows of each as of the others, as far as there is room and there are any."""
        missing = sum(rows for rows, _ in regions)
        for number, (rows, region_id) in enumerate(regions):
            count = rows
            if self._left < math.inf:
                count = min(rows, -(-int(self._left) // (len(regions) - number)))
            self._marks[region_id] = self.logs[region_id].after(self._marks[region_id], count)
            self._left -= count
            missing -= count
            self.told = self.told or count > 0
        return missing == 0


# --- reading -------------------------------------------------------------------------------


def read_part(
    table: BaseTable, part: Part, shape: TableShape, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The changes of a part, with the given columns of `change_schema(shape)`, or all."""
    schema = change_schema(shape)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    told = _Told(shape, schema)
    if isinstance(part, RegionPart):
        for rows, generation, first in read_range(table, part.wanted, shape, told.needed):
            dead = np.asarray(rows.column(TOMBSTONE))
            region = str(part.wanted.region_id)
            yield told.batch(rows, dead, region, generation, part.version, first)
        return
    older = _Outranked(table, part, shape)
    first = part.first
    reader = StepReader(table, part.version, part.added, shape, told.needed)
    for segment, begin, end in part.windows:
        number = first
        for rows, deletes in reader.read(segment, begin, end):
            mask = older.mask(rows)
            kept = rows if not mask.any() else chosen_rows(rows, ~mask)
            if kept.num_rows:
                dead = np.full(kept.num_rows, deletes)
                yield told.batch(kept, dead, None, 0, part.version, number)
            number += rows.num_rows
        first += end - begin


class _Told:
    """Makes changes of rows."""

    def __init__(self, shape: TableShape, schema: pa.Schema) -> None:
        self._schema = schema
        named = [f.name for f in shape.schema if f.name in schema.names]
        # Rows without any column would not say how many they are.
        self.needed = list(dict.fromkeys([*shape.key_columns, *named])) or shape.schema.names[:1]

    def batch(
        self,
        rows: pa.RecordBatch,
        dead: Mask,
        region: str | None,
        generation: int,
        version: int,
        first: int,
    ) -> pa.RecordBatch:
        count = rows.num_rows
        made: dict[str, Any] = {
            CHANGE: pc.if_else(pa.array(dead), "delete", "upsert"),
            REGION: pa.repeat(pa.scalar(region, pa.string()), count),
            GENERATION: pa.array(np.full(count, generation)),
            VERSION: pa.array(np.full(count, version)),
            ROW: pa.array(np.arange(first, first + count)),
        }
        columns = [
            made[field.name]
            if field.name in made
            else rows.column(field.name)
            if field.name in rows.schema.names
            else pa.nulls(count, field.type)
            for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


class _Outranked:
    """Tells rows of the base that have a newer row of a region in front of them."""

    def __init__(self, table: BaseTable, part: BasePart, shape: TableShape) -> None:
        self._key = list(shape.key_columns)
        self._keys: pa.Array | None = None
        if part.fronts:
            found = [
                key_array(rows, self._key)
                for front in part.fronts
                for rows, _, _ in read_range(table, front, shape, self._key)
            ]
            kind = key_type(shape.schema, shape.key_columns)
            self._keys = pa.concat_arrays([pa.array([], kind), *found]).unique()

    def mask(self, rows: pa.RecordBatch) -> Mask:
        if self._keys is None:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        outranked: Mask = np.asarray(pc.is_in(key_array(rows, self._key), value_set=self._keys))
        return outranked


# --- in one process ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ChangeBatch:
    """Some changes, and where they end."""

    rows: pa.Table
    position: dict[str, Any]
    """Give this to `changes` to go on from here; it can be kept as JSON."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.num_rows)


class Changes:
    """The changes from a position up to what there was when they were asked for, in batches."""

    def __init__(self, table: BaseTable, since: object, max_rows: int) -> None:
        self._feed = Feed(table)
        self._at = self._feed.start(since)
        self._max_rows = max_rows
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise InvalidInput(f"max_rows must be a whole number from 1 on, not {max_rows!r}")

    @property
    def position(self) -> dict[str, Any]:
        """How far they were read: behind the last batch that was given out."""
        return self._at.to_json()

    def __iter__(self) -> Iterator[ChangeBatch]:
        upto = self._feed.latest()
        table = self._feed.table
        while (following := self._feed.plan(self._at, upto, self._max_rows)) != self._at:
            shape = table.snapshot().shape
            parts = self._feed.parts(self._at, following)
            batches = [batch for part in parts for batch in read_part(table, part, shape)]
            self._at = following
            if batches:
                rows = pa.Table.from_batches(batches, change_schema(shape))
                yield ChangeBatch(rows, self.position)
