"""Which rows a change is about, and what they get.

Rows are selected by a filter, which Lance evaluates where they are, and by a further test on some
of their columns. What they get is worked out of their own columns, a batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from penstock.memwal.freshness import Mask

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
