"""What a reader knows of a MemTable's keys: which rows were written again, and what they hide.

A MemTable only grows, so what was found out about its first rows stays true. `RecentKeys` looks
at each row once: at its predecessor in the MemTable, at the row of the generations before it, and
at the row of the base. A view takes a prefix of it, the rows it knows of (`RecentRows`).

Invariant: a row is the newest of a prefix if the next row with its key, if any, lies behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.index.growing import GrowingArray
from penstock.index.key_index import NOT_FOUND, KeyIndex
from penstock.index.primary_key import key_array, python_keys
from penstock.memwal.freshness import Mask, RowIds, SettledFreshness
from penstock.memwal.memtable import MemTable

_NEVER = np.iinfo(np.int64).max


class RecentKeys:
    """The keys of one MemTable, as far as views have asked. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Any, int] = {}
        self._next = GrowingArray(np.int64)
        self._found: dict[str, tuple[Hashable, GrowingArray]] = {}

    def rows(self, memtable: MemTable, rows: int) -> RecentRows:
        """What is known of the first so many rows of the MemTable, always the same one."""
        with self._lock:
            if len(self._next) < rows:
                self._extend(_keys(memtable, len(self._next), rows))
            newest: Mask = self._next.values(rows) >= rows
        return RecentRows(self, memtable, rows, newest)

    def _extend(self, keys: pa.Array) -> None:
        known, newest = len(self._next), self._newest
        again: list[int] = []
        by: list[int] = []
        for row, key in enumerate(python_keys(keys), known):
            before = newest.get(key)
            if before is not None:
                again.append(before)
                by.append(row)
            newest[key] = row
        self._next.append(np.full(len(keys), _NEVER, dtype=np.int64))
        self._next.values()[again] = by

    def find(
        self, what: str, which: Hashable, index: KeyIndex | SettledFreshness, upto: RecentRows
    ) -> RowIds:
        """What an index finds for the keys of the first rows; `which` is the state of the index."""
        with self._lock:
            state, found = self._found.get(what, (None, None))
            if found is None or state != which:
                found = GrowingArray(np.uint64)
                self._found[what] = (which, found)
            if len(found) < upto.rows:
                found.append(index.find(_keys(upto.memtable, len(found), upto.rows)))
            values: RowIds = found.values(upto.rows)
        known: RowIds = values[values != NOT_FOUND]
        return known


@dataclass(frozen=True, slots=True, eq=False)
class RecentRows:
    """The first rows of a MemTable, and which of them are the newest of their key."""

    known: RecentKeys
    memtable: MemTable
    rows: int
    newest: Mask

    def places(self, settled: SettledFreshness) -> RowIds:
        """Where the generations have rows with these keys."""
        return self.known.find("generations", settled.which, settled, self)

    def base_rows(self, version: int, index: KeyIndex) -> RowIds:
        """The row ids of base rows with these keys."""
        return self.known.find("base", version, index, self)


def _keys(memtable: MemTable, first: int, rows: int) -> pa.Array:
    return key_array(memtable.table(rows, first=first), memtable.shape.key_columns)
