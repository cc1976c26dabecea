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
from penstock.memwal.index_details import commit_next
from penstock.memwal.lookup import get_many
from penstock.memwal.plan import DeduplicateExec, ScanExec, UnionExec
from penstock.memwal.scan import plan_scan
from penstock.memwal.selection import NewValues, Selection, rewritten
from penstock.memwal.sources import BaseSource, chosen_rows, one_batch
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.view import View

WRITTEN_ROWS = 10_000
"""Up to so many rows of the base are changed through the log; more are changed in a version."""
CHUNK_ROWS = 2_048
"""Rows that are looked up and held at a time on their way to the log."""
CHUNK_BYTES = 8 << 20
"""They are written in pieces of about this size."""

T = TypeVar("T")


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
    return change(access, selected(access, where), None)


def update_rows(access: Access, where: str, values: object) -> ChangeReport:
    """Set columns of the rows that match."""
    from penstock.memwal.assignments import Assignments

    selection = selected(access, where)
    return change(access, selection, Assignments.parse(values, access.base.snapshot().shape))


def selected(access: Access, where: str) -> Selection:
    """The rows that match a condition, which has to be given."""
    # Only here, because loading DataFusion takes longer than many a program runs.
    from penstock.memwal.filters import Filter

    if not isinstance(where, str):
        raise InvalidInput(
            f'where must be an SQL condition, such as "price > 3", not {where!r}; '
            "to change every row write where='true'"
        )
    return Selection(Filter.parse(where, access.base.snapshot().shape.schema))


def change(access: Access, selection: Selection, values: NewValues | None) -> ChangeReport:
    """Update the selected rows, or delete them if there are no values."""
    if not access.base.snapshot().shape.key_columns:
        access.settle()
        return _change_base(access, selection, values)
    keys = access.read(lambda view: _few_keys(view, selection, values))
    if keys is None:
        return _change_base(access, selection, values)
    return ChangeReport(change_keys(access, keys, selection, values))


# --- through the log -----------------------------------------------------------------------


def _few_keys(view: View, selection: Selection, values: NewValues | None) -> pa.Table | None:
    """The keys of the selected rows; None if too many are in the base."""
    columns = _columns(view, selection, values)
    keys: list[pa.RecordBatch] = []
    of_base = 0
    for chunk in plan_scan(view, columns, selection.where).stream():
        found = _checked(view, chunk.rows, selection, values)
        if isinstance(chunk.source, BaseSource):
            of_base += found.num_rows
            if of_base > WRITTEN_ROWS:
                return None
        keys.append(found)
    return _key_table(view, keys)


def _fresh_keys(view: View, selection: Selection, values: NewValues | None) -> pa.Table:
    """The keys of the selected rows in front of the base."""
    columns = _columns(view, selection, values)
    scans = [ScanExec(view, source, columns, selection.where) for source in view.sources]
    plan = DeduplicateExec(view, UnionExec(*scans))
    found = [_checked(view, chunk.rows, selection, values) for chunk in plan.stream()]
    return _key_table(view, found)


def _columns(view: View, selection: Selection, values: NewValues | None) -> list[str]:
    reads = () if values is None else values.reads
    return list(dict.fromkeys([*view.shape.key_columns, *selection.columns, *reads]))


def _checked(
    view: View, rows: pa.RecordBatch, selection: Selection, values: NewValues | None
) -> pa.RecordBatch:
    """The keys of the rows that are selected, all of which can be changed as asked."""
    mask = selection.further(rows)
    chosen = rows if mask.all() else chosen_rows(rows, mask)
    if values is not None:
        values.apply(chosen)
    return chosen.select(list(view.shape.key_columns))


def _key_table(view: View, keys: list[pa.RecordBatch]) -> pa.Table:
    schema = pa.schema([view.shape.schema.field(name) for name in view.shape.key_columns])
    batches = [pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in keys]
    return pa.Table.from_batches(batches, schema)


def change_keys(
    access: Access, keys: pa.Table, selection: Selection, values: NewValues | None
) -> int:
    """Change the rows with these keys, those that are selected now; returns how many."""
    changed = 0
    try:
        for first in range(0, keys.num_rows, CHUNK_ROWS):
            asked = keys.slice(first, CHUNK_ROWS).combine_chunks()
            rows = access.read(partial(_looked_up, asked, selection, values))
            if values is None:
                changed += write_tombstones(access, rows.select(keys.column_names))
            elif rows.num_rows:
                changed += write_rows(access, rewritten(rows, values))
    except PenstockError as error:
        if changed:
            error.add_note(f"{changed} rows had been changed before")
        raise
    return changed


def _looked_up(
    keys: pa.Table, selection: Selection, values: NewValues | None, view: View
) -> pa.RecordBatch:
    columns = None
    if values is None:
        columns = list(dict.fromkeys([*view.shape.key_columns, *selection.reads]))
    arrays = {name: keys.column(name).combine_chunks() for name in keys.column_names}
    rows = one_batch(get_many(view, arrays, columns))
    return chosen_rows(rows, selection.mask(rows))


def write_tombstones(access: Access, keys: pa.RecordBatch) -> int:
    if not keys.num_rows:
        return 0
    return access.write(lambda writer: writer.delete(pa.Table.from_batches([keys])))


def write_rows(access: Access, rows: pa.RecordBatch) -> int:
    return sum(access.write(partial(_upsert, piece)) for piece in _pieces(rows))


def _upsert(rows: pa.RecordBatch, writer: TableWriter) -> int:
    return writer.upsert(rows)


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    count = max(1, -(-rows.nbytes // CHUNK_BYTES))
    size = max(1, -(-rows.num_rows // count))
    for first in range(0, rows.num_rows, size):
        yield rows.slice(first, size)


# --- in the base table ---------------------------------------------------------------------


def _change_base(access: Access, selection: Selection, values: NewValues | None) -> ChangeReport:
    table = access.base
    work = BaseChange(table, selection, values)
    keyed = bool(table.snapshot().shape.key_columns)

    def attempt(view: View) -> tuple[View, pa.Table | None, Prepared]:
        # In this order, so that a value which cannot be set shows before a file is written.
        fresh = _fresh_keys(view, selection, values) if keyed else None
        return view, fresh, work.prepare(view)

    version = None
    try:
        for _ in table.seams.races():
            view, fresh, prepared = access.read(attempt)
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
        work.discard(committed=False)
        raise
    work.discard(committed=True)
    written = change_keys(access, fresh, selection, values) if fresh is not None else 0
    return ChangeReport(prepared.rows + written, prepared.rows, version)
