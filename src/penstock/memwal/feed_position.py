"""How far the changes of a table have been read, as one small value that can be kept as JSON.

A position is a version of the base table and, of every region, a mark: a generation, and how many
rows from its beginning on. Rows of a region are counted in the order of their writing. A mark may
count beyond the end of its generation, into those that follow: rows in the log are counted from the
first generation that is not flushed, and where the next one begins is settled when it is. So a mark
holds whatever becomes of the rows behind it.

Where a version is read in several pieces, `into` is that version and `rows` how much of it is done.
`version` is 0 while the table itself is read for the first time.

Invariant: every mark lies behind what the position's version has merged of its region. Otherwise a
row that was merged long ago would come after a newer one of the base.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidInput

Mark = tuple[int, int]
START: Mark = (1, 0)
"""Where a region begins."""


@dataclass(frozen=True, slots=True)
class Position:
    version: int
    regions: Mapping[uuid.UUID, Mark] = field(default_factory=dict)
    into: int = 0
    rows: int = 0
    table_id: str | None = None
    """To tell that a position is of another table."""

    def mark(self, region_id: uuid.UUID) -> Mark:
        return self.regions.get(region_id, START)

    def to_json(self) -> dict[str, Any]:
        regions = {str(r): list(mark) for r, mark in sorted(self.regions.items()) if mark != START}
        stored: dict[str, Any] = {"version": self.version, "regions": regions}
        if self.into:
            stored |= {"into": self.into, "rows": self.rows}
        if self.table_id is not None:
            stored["table"] = self.table_id
        return stored

    @classmethod
    def of(cls, stored: object) -> Position:
        """A position that `to_json` gave."""
        if isinstance(stored, Position):
            return stored
        if not isinstance(stored, Mapping):
            raise _refusal(stored)
        try:
            regions: dict[uuid.UUID, Mark] = {}
            for name, mark in stored["regions"].items():
                generation, row = mark
                regions[uuid.UUID(name)] = (_whole(generation, 1), _whole(row, 0))
            table_id = stored.get("table")
            return cls(
                version=_whole(stored["version"], 0),
                regions=regions,
                into=_whole(stored.get("into", 0), 0),
                rows=_whole(stored.get("rows", 0), 0),
                table_id=None if table_id is None else str(uuid.UUID(table_id)),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise _refusal(stored) from error


def _whole(value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is not a whole number from {least}")
    return value


def _refusal(stored: object) -> InvalidInput:
    return InvalidInput(
        f"{str(stored)[:200]!r} is not a position in the changes of a table; give one that changes "
        "gave, a version, 'earliest' or 'latest'"
    )
