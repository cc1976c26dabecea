"""Merging data into a table by what it matches: update, insert and delete in one call.

The rows of the data (the source) are matched with rows of the table (the target) that have the
same values in the columns `on`. All that is decided on one strong view: by looking the keys up if
`on` is the primary key, else by a scan of the columns that decide. Only then is anything written,
through the table's writer, in pieces of bounded size. The rows that the data lacks are deleted by
`changes`, which looks at the table again; new rows come last.

A source that has only some of the columns leaves the others of a matched row as they are; they are
looked up when the row is written. Between deciding and writing the last writer of a row wins, as
in every change of rows. To do it again after a crash is harmless. Names mean the columns that they
do in the view on which it is decided, also if these are renamed while rows are written.

A table without a primary key is flushed and merged first, and its matched rows are changed in the
base table; new rows go through the writer there, too.

Invariants
- A source with two rows for the same `on` is refused: which one should win is not known.
- Null matches nothing. The key of a row is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, PenstockError
from penstock.index.primary_key import SUPPORTED_KEY_TYPES, key_array, newest_rows
from penstock.memwal.changes import (
    CHUNK_ROWS,
    Access,
    change,
    selected,
    write_rows,
    write_tombstones,
)
from penstock.memwal.freshness import Mask
from penstock.memwal.ingest import reusable_rows, rows_to_batch, some_columns
from penstock.memwal.lookup import get_many
from penstock.memwal.scan import plan_scan
from penstock.memwal.selection import Change, Selection
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import chosen_rows, one_batch
from penstock.memwal.view import View

if TYPE_CHECKING:
    from datafusion import Expr

Positions = npt.NDArray[np.int64]
_NAMES = re.compile(
    r"""(?P<text>'(?:''|[^'])*'|"(?:""|[^"])*")|\b(?P<side>source|target)\s*\.\s*"""
    r"""(?P<name>`(?:``|[^`])+`|[^\W\d][\w$]*)""",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class MergeInsertReport:
    """What a merge insert did, in rows."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    def __str__(self) -> str:
        return f"{self.inserted:,} inserted, {self.updated:,} updated, {self.deleted:,} deleted"


@dataclass(frozen=True, slots=True)
class MergeInsert:
    """What to do with rows that match and with those that do not; `execute` does it.

    Every `when_…` returns a builder with that clause; without a clause rows stay as they are.
    """

    _access: Access
    _on: str | Sequence[str] | None = None
    _update: bool = False
    _condition: str | None = None
    _delete: bool = False
    _insert: bool = False
    _sweep: str | None = None

    def when_matched_update_all(self, condition: str | None = None) -> MergeInsert:
        """Rows of the table that match get the columns of the data.

        `condition` is SQL over `source.x` and `target.x`; rows for which it is not true stay.
        """
        return replace(self, _update=True, _condition=condition)

    def when_matched_delete(self) -> MergeInsert:
        """Rows of the table that match are deleted."""
        return replace(self, _delete=True)

    def when_not_matched_insert_all(self) -> MergeInsert:
        """Rows of the data that match none are inserted."""
        return replace(self, _insert=True)

    def when_not_matched_by_source_delete(self, expr: str | None = None) -> MergeInsert:
        """Rows of the table that no row of the data matches are deleted, if `expr` is true."""
        return replace(self, _sweep="true" if expr is None else expr)

    def execute(self, data: Any) -> MergeInsertReport:
        """Do it with the rows of `data`; returns when everything is durable."""
        access = self._access
        if not (self._update or self._delete or self._insert or self._sweep):
            raise InvalidInput(
                "nothing to do: say what becomes of rows, such as "
                ".when_matched_update_all().when_not_matched_insert_all()"
            )
        if self._update and self._delete:
            raise InvalidInput("rows that match can be updated or deleted, not both")
        given = reusable_rows(data)
        first = self._understood(given, access.base.snapshot().shape)
        if not first.source.shape.key_columns:
            access.settle()

        def decide(view: View) -> tuple[_Task, _Decided]:
            same = first.source.shape.is_like(view.shape)
            task = first if same else self._understood(given, view.shape)
            return task, _decide(task.source, task.condition, self._insert, view)

        task, decided = access.read(decide)
        report = MergeInsertReport()
        try:
            if self._update or self._delete:
                write = _act if task.source.shape.key_columns else _act_on_base
                acted = write(access, task, decided, self._delete)
                if self._delete:
                    report = replace(report, deleted=acted)
                else:
                    report = replace(report, updated=acted)
            if task.swept is not None:  # and before rows come whose null matches nothing
                gone = change(access, task.swept.on).rows
                report = replace(report, deleted=report.deleted + gone)
            if self._insert:
                rows = task.source.rows.take(pa.array(decided.unmatched))
                report = replace(report, inserted=_insert(access, rows, task.source.shape))
        except PenstockError as error:
            error.add_note(f"before that: {report}; doing it again is harmless")
            raise
        return report

    def _understood(self, data: Any, shape: TableShape) -> _Task:
        """What is to be done, in the names of a shape; refuses what cannot be."""
        source = _Source.of(data, shape, _on_columns(self._on, shape))
        if self._insert:
            source.check_insertable()
        condition = swept = None
        if self._condition is not None:
            condition = _Condition.parse(self._condition, source)
        if self._sweep is not None:
            where = selected(self._sweep, shape).where
            swept = Change(shape, Selection(where, source.on, lambda rows: ~source.has(rows)))
        return _Task(source, condition, swept)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    source: _Source
    condition: _Condition | None
    swept: Change | None


# --- the source ----------------------------------------------------------------------------


def _on_columns(on: str | Sequence[str] | None, shape: TableShape) -> tuple[str, ...]:
    if on is None:
        if not shape.key_columns:
            raise InvalidInput("the table has no primary key; say what to match by: on=…")
        return shape.key_columns
    columns = (on,) if isinstance(on, str) else tuple(on)
    if not columns or len(set(columns)) != len(columns):
        raise InvalidInput(f"on must be one column or several different ones, not {on!r}")
    for name in columns:
        if name not in shape.schema.names:
            known = ", ".join(shape.schema.names)
            raise InvalidInput(f"on: no column {name!r}; the table has {known}")
        kind = shape.schema.field(name).type
        if kind not in SUPPORTED_KEY_TYPES:
            raise InvalidInput(
                f"on: rows cannot be matched by column {name!r} of type {kind}; "
                "use integer, boolean, string or binary columns"
            )
    return shape.key_columns if set(columns) == set(shape.key_columns) else columns


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The data, and where each value of the `on` columns is in it."""

    rows: pa.RecordBatch
    shape: TableShape
    on: tuple[str, ...]
    keys: pa.Array
    """Distinct, without null."""
    places: Positions
    """The row of each of them."""

    @classmethod
    def of(cls, data: Any, shape: TableShape, on: tuple[str, ...]) -> _Source:
        rows = some_columns(data, shape)
        missing = [name for name in on if name not in rows.schema.names]
        if missing:
            raise InvalidInput(f"the data lacks column {missing[0]!r}, by which rows are matched")
        valid = np.ones(rows.num_rows, dtype=np.bool_)
        for name in on:
            valid &= np.asarray(rows.column(name).is_valid())
        places = np.flatnonzero(valid)
        keys = key_array(rows.take(pa.array(places)), on)
        first = newest_rows(keys)
        if not first.all():
            twice = rows.slice(int(places[np.flatnonzero(~first)[0]]), 1).select(list(on))
            raise InvalidInput(
                f"the data has several rows with {twice.to_pylist()[0]}; which of them should "
                "win is not known: leave one"
            )
        return cls(rows, shape, on, keys, places)

    @property
    def by_key(self) -> bool:
        return self.on == self.shape.key_columns

    def is_whole_for(self, shape: TableShape) -> bool:
        """Whether it has every column of the table, as that is now."""
        names = shape.names_in(self.shape)
        return all(names.get(name) in self.rows.schema.names for name in shape.schema.names)

    def check_insertable(self) -> None:
        for field in self.shape.schema:
            required = field.name in self.shape.key_columns or not field.nullable
            if required and field.name not in self.rows.schema.names:
                raise InvalidInput(
                    f"the data lacks column {field.name!r}, which may not be null, so its rows "
                    "cannot be inserted; add the column, or leave the insert out"
                )

    def find(self, rows: pa.RecordBatch) -> tuple[Mask, Positions]:
        """Which rows match, and the source's row for each that does."""
        found = pc.index_in(key_array(rows, self.on), value_set=self.keys)
        hit = np.asarray(found.is_valid())
        at = found.drop_null().to_numpy().astype(np.int64)
        return hit, self.places[at]

    def has(self, rows: pa.RecordBatch) -> Mask:
        return self.find(rows)[0]


# --- deciding ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Condition:
    """A condition over a row of the source and the row it matches."""

    sql: str
    expr: Expr
    source: tuple[str, ...]
    target: tuple[str, ...]

    @classmethod
    def parse(cls, sql: str, source: _Source) -> _Condition:
        from penstock.memwal.filters import evaluated, parse_value

        what = "the condition"
        if not isinstance(sql, str):
            raise InvalidInput(f"{what} must be SQL over source.x and target.x, not {sql!r}")
        sides = {"source": source.rows.schema, "target": source.shape.schema}

        def named(match: re.Match[str]) -> str:
            if match["text"]:
                return match[0]
            side, name = match["side"].lower(), match["name"].strip("`")
            known = {column.lower(): column for column in sides[side].names}
            column = name if name in sides[side].names else known.get(name.lower())
            if column is None:
                have = ", ".join(sides[side].names)
                raise InvalidInput(f"{what} {sql!r}: {side} has no column {name!r}, only {have}")
            return f"`{side}.{column}`"

        fields = [
            pa.field(f"{side}.{field.name}", field.type)
            for side, schema in sides.items()
            for field in schema
        ]
        schema = pa.schema(fields)
        expr, reads = parse_value(_NAMES.sub(named, sql), schema, what)
        try:
            kind = evaluated(expr, pa.RecordBatch.from_pylist([], schema)).type
        except Exception as error:  # DataFusion raises no class of its own
            raise InvalidInput(f"{what} {sql!r} is not understood: {error}") from error
        if not reads or kind != pa.bool_():
            raise InvalidInput(
                f"{what} {sql!r} must say yes or no to a row, by columns source.x and target.x"
            )
        names = [name.split(".", 1) for name in reads]
        return cls(
            sql,
            expr,
            tuple(name for side, name in names if side == "source"),
            tuple(name for side, name in names if side == "target"),
        )

    def mask(self, source: pa.RecordBatch, target: pa.RecordBatch) -> Mask:
        """For which pairs of rows it is true."""
        from penstock.memwal.filters import evaluated

        columns = {f"source.{name}": source.column(name) for name in self.source}
        columns |= {f"target.{name}": target.column(name) for name in self.target}
        try:
            found = evaluated(self.expr, pa.RecordBatch.from_pydict(columns))
        except Exception as error:  # DataFusion raises no class of its own
            raise InvalidInput(
                f"the condition {self.sql!r} cannot be worked out: {error}"
            ) from error
        mask: Mask = found.fill_null(False).to_numpy(zero_copy_only=False)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class _Decided:
    keys: pa.Table
    """Of the target's rows to act upon; without columns where rows have no key."""
    places: Positions
    """The source's row for each of them."""
    unmatched: Positions
    """The source's rows that match nothing."""


def _decide(source: _Source, condition: _Condition | None, inserts: bool, view: View) -> _Decided:
    key = list(view.shape.key_columns)
    needed = [*key, *source.on, *(condition.target if condition is not None else ())]
    matched = np.zeros(source.rows.num_rows, dtype=np.bool_)
    keys: list[pa.RecordBatch] = []
    places = [np.empty(0, dtype=np.int64)]
    for rows in _candidates(view, source, list(dict.fromkeys(needed))):
        hit, found = source.find(rows)
        if not len(found):
            continue
        matched[found] = True
        target = rows if hit.all() else chosen_rows(rows, hit)
        if condition is not None:
            true = condition.mask(source.rows.take(pa.array(found)), target)
            target, found = chosen_rows(target, true), found[true]
        if key:
            keys.append(target.select(key))
            places.append(found)
    schema = pa.schema([view.shape.schema.field(name) for name in key])
    acted = pa.Table.from_batches(
        [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in keys], schema
    )
    decided = _Decided(acted, np.concatenate(places), np.flatnonzero(~matched))
    if key and not source.by_key:
        _check_keys(view, source, decided, inserts)
    return decided


def _candidates(view: View, source: _Source, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of the table that may match."""
    if not source.by_key:
        for chunk in plan_scan(view, columns).stream():
            yield chunk.rows
        return
    for first in range(0, source.rows.num_rows, CHUNK_ROWS):
        part = source.rows.slice(first, CHUNK_ROWS)
        asked = {name: part.column(name) for name in source.on}
        yield one_batch(get_many(view, asked, columns))


def _check_keys(view: View, source: _Source, decided: _Decided, inserts: bool) -> None:
    """No row may change its key, and none that does not match may be overwritten."""
    key = list(view.shape.key_columns)
    given = [name for name in key if name in source.rows.schema.names]
    if given and decided.keys.num_rows:
        own = source.rows.select(given).take(pa.array(decided.places))
        for name in given:
            same = pc.equal(own.column(name), decided.keys.column(name).combine_chunks())
            if not pc.all(same).as_py():
                row = decided.keys.slice(pc.index(same, False).as_py(), 1).to_pylist()[0]
                raise InvalidInput(
                    f"the row {row} matches a row of the data with another key; keys cannot be "
                    "changed: leave the key columns out of the data, or match by them"
                )
    if inserts and len(decided.unmatched):
        new = source.rows.select(key).take(pa.array(decided.unmatched))
        there = get_many(view, {name: new.column(name) for name in key}, key)
        twice = not newest_rows(key_array(new, key)).all()
        if there.num_rows or twice:
            which = there.slice(0, 1).to_pylist()[0] if there.num_rows else "given twice"
            raise InvalidInput(
                f"a row to be inserted has a key that is there already ({which}), though it does "
                f"not match by {list(source.on)}; give it another key, or match by the key"
            )


# --- acting --------------------------------------------------------------------------------


def _act(access: Access, task: _Task, decided: _Decided, deletes: bool) -> int:
    """Update or delete the rows that were decided upon, through the writer."""
    source = task.source
    done = 0
    for first in range(0, decided.keys.num_rows, CHUNK_ROWS):
        keys = one_batch(decided.keys.slice(first, CHUNK_ROWS))
        given = source.rows.take(pa.array(decided.places[first : first + CHUNK_ROWS]))
        if deletes:
            done += write_tombstones(access, keys)
        elif source.is_whole_for(access.base.snapshot().shape):
            done += write_rows(access, given, source.shape)
        else:
            shape, rows = access.read(partial(_completed, source.shape, given, keys))
            done += write_rows(access, rows, shape)
    return done


def _completed(
    shape: TableShape, given: pa.RecordBatch, keys: pa.RecordBatch, view: View
) -> tuple[TableShape, pa.RecordBatch]:
    """Rows of the source with the columns they lack from the table's rows with these keys."""
    names = view.shape.schema.names
    given = _renamed(given, shape.names_in(view.shape))
    lacking = [name for name in names if name not in given.schema.names]
    columns = list(dict.fromkeys([*keys.schema.names, *lacking]))
    asked = {name: keys.column(name) for name in keys.schema.names}
    there = one_batch(get_many(view, asked, columns))
    at = pc.index_in(
        key_array(there, keys.schema.names), value_set=key_array(keys, keys.schema.names)
    )
    mine = given.take(at)  # rows that somebody has deleted meanwhile stay deleted
    arrays = [(mine if name in given.schema.names else there).column(name) for name in names]
    schema = pa.schema(list(view.shape.schema))
    return view.shape, pa.RecordBatch.from_arrays(arrays, schema=schema)


def _renamed(rows: pa.RecordBatch, names: Mapping[str, str]) -> pa.RecordBatch:
    """Rows with other names, without the columns that have none."""
    kept = [name for name in rows.schema.names if name in names]
    return rows.select(kept).rename_columns([names[name] for name in kept])


def _act_on_base(access: Access, task: _Task, decided: _Decided, deletes: bool) -> int:
    """Update or delete rows without a key: those that match when the base is changed."""
    source, condition = task.source, task.condition

    def matches(rows: pa.RecordBatch) -> Mask:
        hit, found = source.find(rows)
        if condition is not None and len(found):
            target = chosen_rows(rows, hit)
            hit[hit] = condition.mask(source.rows.take(pa.array(found)), target)
        return hit

    reads = (*source.on, *(condition.target if condition is not None else ()))
    selection = Selection(None, tuple(dict.fromkeys(reads)), matches)
    values = None if deletes else _FromSource(source)
    if values is not None and not values.columns:
        return 0
    return change(access, Change(source.shape, selection, values).on).rows


@dataclass(frozen=True, slots=True, eq=False)
class _FromSource:
    """What rows get from the source's row that they match."""

    source: _Source

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.source.rows.schema.names if name not in self.reads)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.source.on

    def apply(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        found = self.source.rows.take(pa.array(self.source.find(rows)[1]))
        return {name: found.column(name) for name in self.columns}


def _insert(access: Access, rows: pa.RecordBatch, shape: TableShape) -> int:
    done = 0
    for first in range(0, rows.num_rows, CHUNK_ROWS):
        part = pa.Table.from_batches([rows.slice(first, CHUNK_ROWS)])
        done += write_rows(access, rows_to_batch(part, shape), shape)
    return done
