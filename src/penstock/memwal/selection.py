"""Which rows a change is about, and what they get.

Rows are selected by a filter, which Lance evaluates where they are, and by a further test on some
of their columns. What they get is worked out of their own columns, a batch at a time.

All of that names columns, and names can be given to other columns while a change is under way. So
a `Change` knows of which shape its names are. In another shape (`Change.on`) the columns it means
are found by field id, whatever they are called there: rows are read by the names of that shape,
and shown to the change under its own. The filter is evaluated in memory then, not by Lance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal.freshness import Mask
from penstock.memwal.shape import TableShape

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter


class NewValues(Protocol):
    """What selected rows get."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that get new values."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Those whose values of before are needed."""

    def apply(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """The new values of rows that have at least the columns of `reads`."""


def rewritten(rows: pa.RecordBatch, values: NewValues) -> pa.RecordBatch:
    """Whole rows with the new values in place of the old ones."""
    new = values.apply(rows)
    columns = [
        new.get(name, old) for name, old in zip(rows.schema.names, rows.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    where: Filter | None = None
    """Lance evaluates it where the rows are; None matches all."""
    columns: tuple[str, ...] = ()
    """What `also` reads."""
    also: Callable[[pa.RecordBatch], Mask] | None = None
    """Decides further, on rows that match the filter."""

    @property
    def sql(self) -> str | None:
        return None if self.where is None else self.where.sql

    @property
    def reads(self) -> tuple[str, ...]:
        """All columns that decide."""
        return tuple(dict.fromkeys([*(self.where.columns if self.where else ()), *self.columns]))

    def further(self, rows: pa.RecordBatch) -> Mask:
        """Which rows that match the filter are chosen."""
        if self.also is None:
            return np.ones(rows.num_rows, dtype=np.bool_)
        return self.also(rows)

    def mask(self, rows: pa.RecordBatch) -> Mask:
        """Which rows are chosen."""
        chosen = self.further(rows)
        return chosen if self.where is None else chosen & self.where.mask(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Which rows change and what they get, in the names of one shape; without values they go."""

    shape: TableShape
    selection: Selection
    values: NewValues | None = None

    def on(self, shape: TableShape) -> Change:
        """The same change of the same columns, in the names of another shape.

        Columns that are dropped get no values; if one decides, the change cannot go on.
        """
        if shape is self.shape or shape.is_like(self.shape):
            return self
        names = self.shape.names_in(shape)
        reads = (*self.selection.reads, *(self.values.reads if self.values is not None else ()))
        gone = [name for name in reads if name not in names]
        if gone:
            raise InvalidInput(
                f"column {gone[0]!r}, by which rows are changed, was dropped meanwhile; the table "
                f"has {', '.join(shape.schema.names)}: say it with these"
            )

        def mask(rows: pa.RecordBatch) -> Mask:
            return self.selection.mask(_shown_as(rows, names))

        selection = Selection(None, tuple(names[name] for name in self.selection.reads), mask)
        values = None if self.values is None else _Renamed(self.values, names)
        return Change(shape, selection, values)


@dataclass(frozen=True, slots=True, eq=False)
class _Renamed:
    """New values of columns that have other names now."""

    values: NewValues
    names: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.names[name] for name in self.values.columns if name in self.names)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.names[name] for name in self.values.reads)

    def apply(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        new = self.values.apply(_shown_as(rows, self.names))
        return {self.names[name]: column for name, column in new.items() if name in self.names}


def _shown_as(rows: pa.RecordBatch, names: Mapping[str, str]) -> pa.RecordBatch:
    """Rows under the names that their columns have had, which `names` maps to those of now."""
    before = {now: name for name, now in names.items()}
    kept = [name for name in rows.schema.names if name in before or name.startswith("_")]
    return rows.select(kept).rename_columns([before.get(name, name) for name in kept])
