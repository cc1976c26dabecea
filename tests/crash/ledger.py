"""What a table must hold, given which calls were acknowledged and which ended in doubt.

A call changes rows of one or more parts of the table, and each part is a region of its own. What
a call does to one part is atomic: all of it is there or none of it. A call that was acknowledged
is there; of one that failed, or was cut short, either may be true, once and for all.

`settle` holds that against the rows really found. It looks for a choice among the calls in doubt
that explains every row and every missing row; there is none if an acknowledged row is lost, an
old value is back, a deleted row has risen, or half a call is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
    ]
)
PRIMARY_KEY = ["part", "id"]
MAX_IN_DOUBT = 12

Key = tuple[int, int]
"""Part and id."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `upsert` or `delete`: the new value of each key, None where it is deleted."""

    number: int
    changes: Mapping[Key, str | None]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"part": p, "id": i, "value": value} for (p, i), value in self.changes.items()]

    @property
    def is_delete(self) -> bool:
        return None in self.changes.values()

    def send(self, target: Any) -> None:
        """Carry the call out on a table or a writer."""
        if self.is_delete:
            target.delete(keys=list(self.changes))
        else:
            target.upsert(self.rows)


@dataclass(slots=True)
class _Part:
    rows: dict[Key, str] = field(default_factory=dict)
    since: list[tuple[Call, bool]] = field(default_factory=list)
    """Calls since the rows were settled, in order, and whether each is certain."""

    def outcome(self, in_doubt_and_there: frozenset[int], part: int) -> dict[Key, str]:
        rows = dict(self.rows)
        for call, certain in self.since:
            if not certain and call.number not in in_doubt_and_there:
                continue
            for key, value in call.changes.items():
                if key[0] != part:
                    continue
                if value is None:
                    rows.pop(key, None)
                else:
                    rows[key] = value
        return rows


class Ledger:
    def __init__(self, parts: Iterable[int] = (0, 1)) -> None:
        self._parts = {part: _Part() for part in parts}

    def acknowledged(self, call: Call) -> None:
        self._record(call, certain=True)

    def in_doubt(self, call: Call) -> None:
        self._record(call, certain=False)

    def settle(self, table: pa.Table) -> None:
        """Check the rows found against every call so far, and go on from them."""
        rows = table.to_pylist()
        found: dict[Key, str] = {(r["part"], r["id"]): r["value"] for r in rows}
        assert len(found) == len(rows), "a key is there twice"
        for number, part in self._parts.items():
            mine = {key: value for key, value in found.items() if key[0] == number}
            doubtful = [call.number for call, certain in part.since if not certain]
            assert len(doubtful) <= MAX_IN_DOUBT, "too many calls in doubt to tell"
            choices = itertools.chain.from_iterable(
                itertools.combinations(doubtful, size) for size in range(len(doubtful) + 1)
            )
            if not any(part.outcome(frozenset(choice), number) == mine for choice in choices):
                raise AssertionError(self._account(number, part, mine))
            part.rows = mine
            part.since.clear()

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self._parts.values())

    def _record(self, call: Call, *, certain: bool) -> None:
        for number in {key[0] for key in call.changes}:
            self._parts[number].since.append((call, certain))

    @staticmethod
    def _account(number: int, part: _Part, found: Mapping[Key, str]) -> str:
        certain = part.outcome(frozenset(), number)
        wrong = {
            key: (certain.get(key), found.get(key))
            for key in sorted(certain.keys() | found.keys())
            if certain.get(key) != found.get(key)
        }
        calls = [(call.number, "acknowledged" if sure else "in doubt") for call, sure in part.since]
        return f"part {number}: no fate of {calls} explains (expected, found) {wrong}"
