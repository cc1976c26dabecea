"""Deleting and updating the rows that match a condition, wherever they are stored.

A change takes one strong view and finds the rows in it. If no more than `WRITTEN_ROWS` of them are
in the base table, all of them go through the table's writer: tombstones for a delete, whole new
rows for an update. They are durable when the log has them, and no version is made. If more are in
the base, those are changed there, in one version (`base_changes`); the rows in front of it go
through the writer all the same.

Why nothing is missed, changed twice, or brought back:
- The version with the base's part is published as the very next one after the view's, or not at
  all: in between nothing was merged. So every row that matched is either in that part or in front
  of the base; if the race is lost, another view is taken, and nothing has happened yet.
- Only then are the rows in front of the base written, each key once. They are looked up again,
  where they are by then (a merge may have taken them to the base), and tested again.
- A base row that something in front of it hides is left alone; one that is hidden since may be
  changed without harm, because what hides it is newer, and replaces it when it is merged.

Between looking a row up and writing it, somebody else may write it: the last writer wins, as it
does for upserts. Readers see each row before or after the change, never half of it, but not all
rows at the same moment. After a crash some rows may have been changed; doing it again finishes a
delete, and an update whose values do not depend on what they replace.

Columns may be renamed, dropped or added meanwhile. Before anything has been changed, a change
that meets other columns is understood anew, with the names of then. Once something has, names mean
the columns that they did, whatever these are called by now (`selection.Change`); a change that is
decided by a column which was dropped ends there, with an error that says how far it got. Rows are
given to the writer by field id, too.

Rows without a key cannot be superseded, so a table without one is flushed and merged first and
then changed in the base, in one version, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import pyarrow as pa

from penstock.errors import CommitConflict, InvalidInput, PenstockError
from penstock.memwal.base_changes import BaseChange, Prepared
from penstock.memwal.base_table import BaseTable
from penstock.memwal.lookup import get_many
from penstock.memwal.plan import DeduplicateExec, ScanExec, UnionExec
from penstock.memwal.scan import plan_scan
from penstock.memwal.selection import Change, Selection, rewritten
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import BaseSource, chosen_rows, one_batch
from penstock.memwal.table_commit import commit_next
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.view import View

WRITTEN_ROWS = 10_000
"""Up to so many rows of the base are changed through the log; more are changed in a version."""
CHUNK_ROWS = 2_048
"""Rows that are looked up and held at a time on their way to the log."""
CHUNK_BYTES = 8 << 20
"""They are written in pieces of about this size."""

T = TypeVar("T")
Understand = Callable[[TableShape], Change]
"""Makes of what a caller asks for the change that it is in a table of some shape, or refuses."""


class Access(Protocol):
    """What a change needs of a table."""

    @property
    def base(self) -> BaseTable: ...

    def read(self, work: Callable[[View], T]) -> T:
        """Run `work` on a strong view, and again on another if that goes stale."""

    def write(self, work: Callable[[TableWriter], int]) -> int:
        """Run `work` on the table's own writer."""

    def settle(self) -> None:
        """Bring everything acknowledged so far into the base."""


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """What a change did."""

    rows: int = 0
    """Rows that were changed, however."""
    rewritten: int = 0
    """Of these, the ones that were changed in the base table."""
    version: int | None = None
    """The version of the base table that has them."""

    def __str__(self) -> str:
        where = f", {self.rewritten:,} of them in version {self.version}" if self.version else ""
        return f"{self.rows:,} rows changed{where}"


def delete_rows(access: Access, where: str) -> ChangeReport:
    """Delete the rows that match."""
    return change(access, lambda shape: Change(shape, selected(where, shape)))


def update_rows(access: Access, where: str, values: object) -> ChangeReport:
    """Set columns of the rows that match."""
    from penstock.memwal.assignments import Assignments

    return change(
        access,
        lambda shape: Change(shape, selected(where, shape), Assignments.parse(values, shape)),
    )


def selected(where: str, shape: TableShape) -> Selection:
    """The rows that match a condition, which has to be given."""
    # Only here, because loading DataFusion takes longer than many a program runs.
    from penstock.memwal.filters import Filter

    if not isinstance(where, str):
        raise InvalidInput(
            f'where must be an SQL condition, such as "price > 3", not {where!r}; '
            "to change every row write where='true'"
        )
    return Selection(Filter.parse(where, shape.schema))


def change(access: Access, understand: Understand) -> ChangeReport:
    """Update or delete rows; nothing has happened whenever `understand` is asked."""
    shape = access.base.snapshot().shape
    asked = _Asked(understand, understand(shape))
    if not shape.key_columns:
        access.settle()
        return _change_base(access, asked)
    found = access.read(lambda view: _few_keys(view, asked.on(view.shape)))
    if found is None:
        return _change_base(access, asked)
    return ChangeReport(change_keys(access, *found))


class _Asked:
    """What was asked for, understood once for each shape that it meets."""

    def __init__(self, understand: Understand, first: Change) -> None:
        self._understand = understand
        self._last = first

    def on(self, shape: TableShape) -> Change:
        if not shape.is_like(self._last.shape):
            self._last = self._understand(shape)
        return self._last


# --- through the log -----------------------------------------------------------------------


def _few_keys(view: View, asked: Change) -> tuple[Change, pa.Table] | None:
    """The keys of the rows to change; None if too many are in the base."""
    keys: list[pa.RecordBatch] = []
    of_base = 0
    for chunk in plan_scan(view, _columns(asked), asked.selection.where).stream():
        found = _checked(chunk.rows, asked)
        if isinstance(chunk.source, BaseSource):
            of_base += found.num_rows
            if of_base > WRITTEN_ROWS:
                return None
        keys.append(found)
    return asked, _key_table(view, keys)


def _fresh_keys(view: View, asked: Change) -> pa.Table:
    """The keys of the rows to change that are in front of the base."""
    where = asked.selection.where
    scans = [ScanExec(view, source, _columns(asked), where) for source in view.sources]
    plan = DeduplicateExec(view, UnionExec(*scans))
    return _key_table(view, [_checked(chunk.rows, asked) for chunk in plan.stream()])


def _columns(asked: Change) -> list[str]:
    reads = () if asked.values is None else asked.values.reads
    return list(dict.fromkeys([*asked.shape.key_columns, *asked.selection.columns, *reads]))


def _checked(rows: pa.RecordBatch, asked: Change) -> pa.RecordBatch:
    """The keys of the rows that are selected, all of which can be changed as asked."""
    mask = asked.selection.further(rows)
    chosen = rows if mask.all() else chosen_rows(rows, mask)
    if asked.values is not None:
        asked.values.apply(chosen)
    return chosen.select(list(asked.shape.key_columns))


def _key_table(view: View, keys: list[pa.RecordBatch]) -> pa.Table:
    schema = pa.schema([view.shape.schema.field(name) for name in view.shape.key_columns])
    batches = [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in keys]
    return pa.Table.from_batches(batches, schema)


def change_keys(access: Access, asked: Change, keys: pa.Table) -> int:
    """Change the rows with these keys, those that are selected now; returns how many."""
    changed = 0
    try:
        for first in range(0, keys.num_rows, CHUNK_ROWS):
            part = keys.slice(first, CHUNK_ROWS).combine_chunks()
            shape, rows = access.read(partial(_looked_up, part, asked))
            if asked.values is None:
                changed += write_tombstones(access, rows.select(keys.column_names))
            else:
                changed += write_rows(access, rows, shape)
    except PenstockError as error:
        if changed:
            error.add_note(f"{changed} rows had been changed before")
        raise
    return changed


def _looked_up(keys: pa.Table, asked: Change, view: View) -> tuple[TableShape, pa.RecordBatch]:
    """The rows with these keys that are to change, as they have to become."""
    now = asked.on(view.shape)
    columns = None
    if now.values is None:
        columns = list(dict.fromkeys([*view.shape.key_columns, *now.selection.reads]))
    arrays = {name: keys.column(name).combine_chunks() for name in keys.column_names}
    rows = one_batch(get_many(view, arrays, columns))
    chosen = chosen_rows(rows, now.selection.mask(rows))
    return view.shape, chosen if now.values is None else rewritten(chosen, now.values)


def write_tombstones(access: Access, keys: pa.RecordBatch) -> int:
    if not keys.num_rows:
        return 0
    return access.write(lambda writer: writer.delete(pa.Table.from_batches([keys])))


def write_rows(access: Access, rows: pa.RecordBatch, shape: TableShape) -> int:
    """Write whole rows of that shape, whatever shape the writer has."""
    return sum(access.write(partial(_upsert, access, piece, shape)) for piece in _pieces(rows))


def _upsert(access: Access, rows: pa.RecordBatch, shape: TableShape, writer: TableWriter) -> int:
    if not writer.shape.is_like(shape):
        # A column that the writer lacks was dropped since, or the writer is from before it.
        there = access.base.snapshot().shape.columns_by_id.keys()
        lacking = there & shape.columns_by_id.keys() - writer.shape.columns_by_id.keys()
        if lacking:
            names = sorted(shape.columns_by_id[field_id] for field_id in lacking)
            raise InvalidInput(
                f"the writer of {access.base.uri} does not know column {', '.join(names)}; open "
                "a new one"
            )
        rows = writer.shape.arrange(rows, shape)
    return writer.upsert(rows)


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    count = max(1, -(-rows.nbytes // CHUNK_BYTES))
    size = max(1, -(-rows.num_rows // count))
    for first in range(0, rows.num_rows, size):
        yield rows.slice(first, size)


# --- in the base table ---------------------------------------------------------------------


def _change_base(access: Access, asked: _Asked) -> ChangeReport:
    table = access.base
    keyed = bool(table.snapshot().shape.key_columns)
    work: BaseChange | None = None

    def attempt(view: View) -> tuple[View, pa.Table | None, BaseChange, Prepared]:
        nonlocal work
        now = asked.on(view.shape)
        # In this order, so that a value which cannot be set shows before a file is written.
        fresh = _fresh_keys(view, now) if keyed else None
        if work is None or work.asked is not now:
            if work is not None:
                work.discard(committed=False)
            work = BaseChange(table, now)
        return view, fresh, work, work.prepare(view)

    version = None
    try:
        for _ in table.seams.races():
            view, fresh, done, prepared = access.read(attempt)
            if prepared.operation is None:
                break
            dataset = view.base.dataset
            options = table.storage_options
            if commit_next(table.store, options, dataset, prepared.operation, table.seams):
                version = view.base.version + 1
                break
        else:
            raise CommitConflict(
                f"{table.uri}: other commits won {table.seams.backoff.races} times while rows "
                "were changed, and nothing was changed; try again when less is committed"
            )
    except (InvalidInput, CommitConflict):
        if work is not None:
            work.discard(committed=False)
        raise
    done.discard(committed=True)
    try:
        written = change_keys(access, done.asked, fresh) if fresh is not None else 0
    except PenstockError as error:
        if version is not None:
            error.add_note(f"{prepared.rows} rows had been changed in version {version}")
        raise
    return ChangeReport(prepared.rows + written, prepared.rows, version)
