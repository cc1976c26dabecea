"""Whether the columns of a table are still those a writer was opened with.

A writer keeps the columns it was opened with, and its rows are read right whatever becomes of them
(`evolve`). What it must not do is take a value for one column and store it under another that had
the name before. So it looks at the table now and then, and refuses rows that name a column whose
meaning has changed. Rows that name none of these are as good as ever. When it takes over a log in
which a later writer may have put values of new columns, it keeps them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.flush import FlushTarget
from penstock.memwal.ingest import reusable_rows, rows_to_batch
from penstock.memwal.shape import TableShape


class ColumnWatch:
    def __init__(self, table: BaseTable, opened: BaseSnapshot) -> None:
        self._table = table
        self._opened = opened
        self._seen = opened
        self._changed: frozenset[str] = frozenset()

    @property
    def changed(self) -> frozenset[str]:
        """Names that came, went, or mean another column now; as of the last second."""
        return self._compared(self._table.recent_snapshot())

    def _compared(self, now: BaseSnapshot) -> frozenset[str]:
        if now is not self._seen and now.version > self._seen.version:
            then, ids = self._opened.shape.field_ids, now.shape.field_ids
            both = then.keys() | ids.keys()
            self._changed = frozenset(name for name in both if then.get(name) != ids.get(name))
            self._seen = now
        return self._changed

    def checked(self, data: Any) -> Any:
        """Rows that name no column which has changed."""
        changed = self.changed
        if not changed:
            return data
        data = reusable_rows(data)
        if isinstance(data, list | tuple):
            given = {name for row in data if isinstance(row, dict) for name in row}
        else:
            given = set(data.schema.names)
        if given & changed:
            raise self._refusal(sorted(given & changed))
        return data

    def conform(self, data: Any) -> pa.RecordBatch:
        """Rows in the writer's columns; if it cannot be, perhaps because it lacks a new one."""
        try:
            return rows_to_batch(data, self._opened.shape)
        except InvalidInput as error:
            changed = self._compared(self._table.snapshot())
            if not changed:
                raise
            raise InvalidInput(f"{error}. {self._refusal(sorted(changed))}") from error

    def for_region(self, target: FlushTarget) -> tuple[TableShape, FlushTarget]:
        """The columns that the writer of a region needs, and how it flushes them.

        These are today's if there are any that were not there when the writer was opened: the log
        may have their values, which would be lost with it. To be asked after the claim, because
        whoever wrote the log knew no later ones.
        """
        now = self._table.snapshot()
        known = set(self._opened.shape.field_ids.values())
        if known.issuperset(now.shape.field_ids.values()):
            return self._opened.shape, target
        return now.shape, self._table.flush_target(now)

    def _refusal(self, names: list[str]) -> InvalidInput:
        return InvalidInput(
            f"column {', '.join(map(repr, names))} of {self._table.uri} was added, renamed or "
            "dropped after this writer was opened; open a new writer"
        )
