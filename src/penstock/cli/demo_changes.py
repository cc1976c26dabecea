"""What the streaming demo writes, decided before it begins, so that the end is known exactly.

    file 0       documents that are in the table before the stream begins
    steady 1..n  new documents, changes of earlier ones, deletes: one file every so often
    burst  n+1.. changes of many documents, all files at once

A file has each key at most once, and files are taken one by one in their order; so the last file
that speaks of a key decides what becomes of it. Every row carries the number of its file as
`revision`, by which a reader tells which state it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.cli.demo import matrix
from penstock.cli.documents import SCHEMA, embed

STREAM_SCHEMA = SCHEMA.append(pa.field("revision", pa.int64()))
SOURCE_COLUMNS = (
    "id string, module string, kind string, body string, vector array<float>, revision bigint, "
    "_op string"
)
"""The columns of the files, as Spark reads them."""
WATCHED_KEYS = 8
_MIN_LOADED = 256  # a vector index cannot be trained on fewer
_STEADY_FILES = (10, 48)
_FRESH_ROWS = 94
_UPDATES_PER_NEW = 0.3
_DELETES_PER_NEW = 0.15
_BURST_FILES = (3, 6)
_BURST_ROWS = 2000
_SEED = 7

Indices = np.ndarray[Any, np.dtype[np.int64]]
Vectors = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class ChangeFile:
    number: int
    rows: pa.Table
    """Documents with `_op`; of those to delete only the key."""
    watched: tuple[str, ...]
    """Keys that it upserts and no later file deletes: once they are seen, it has arrived."""


@dataclass(frozen=True, slots=True)
class Plan:
    loaded: pa.Table
    steady: tuple[ChangeFile, ...]
    burst: tuple[ChangeFile, ...]
    expected: pa.Table
    """The table at the end."""
    history: dict[str, tuple[tuple[int, bool], ...]]
    """For each key, the files that speak of it, in order, and whether they delete it."""
    upserts: int
    deletes: int

    @property
    def files(self) -> tuple[ChangeFile, ...]:
        return self.steady + self.burst

    @property
    def changes(self) -> int:
        return self.upserts + self.deletes

    def is_allowed(self, key: str, revision: int | None, settled: int, written: int) -> bool:
        """Whether a read may see this revision of a key, or None for no row.

        Files up to `settled` are known to have been stored before it, those up to `written` may
        have been.
        """
        before: int | None = None
        allowed: set[int | None] = set()
        for number, is_delete in self.history[key]:
            state = None if is_delete else number
            if number <= settled:
                before = state
            elif number <= written:
                allowed.add(state)
        return revision in allowed | {before}


def plan_changes(documents: pa.Table) -> Plan:
    return _Planner(documents).plan()


class _Planner:
    """Goes through the files in order and keeps what the table has to be after each."""

    def __init__(self, documents: pa.Table) -> None:
        self.documents = documents.combine_chunks()
        self.bodies: list[str] = documents.column("body").to_pylist()
        self.keys: list[str] = documents.column("id").to_pylist()
        count = documents.num_rows
        self.revisions: Indices = np.zeros(count, np.int64)
        self.is_live = np.zeros(count, bool)
        self.is_watched = np.zeros(count, bool)
        self.history: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
        self.random = np.random.default_rng(_SEED)
        self.upserts = self.deletes = 0

    def plan(self) -> Plan:
        count = len(self.keys)
        first = min(count, max(_MIN_LOADED, count // 4))
        loaded = self._upsert(np.arange(first), 0)
        self.upserts = 0  # these do not come with the stream
        left = count - first
        files = max(_STEADY_FILES[0], min(_STEADY_FILES[1], left // _FRESH_ROWS))
        borders = np.linspace(first, count, files + 1).astype(int)
        steady = tuple(
            self._steady(number, int(low), int(high))
            for number, (low, high) in enumerate(pairwise(borders), 1)
        )
        rows = min(_BURST_ROWS, count // 2)
        bursts = max(_BURST_FILES[0], min(_BURST_FILES[1], files // 4))
        burst = tuple(self._burst(files + 1 + step, rows) for step in range(bursts))
        return Plan(
            loaded=loaded,
            steady=steady,
            burst=burst,
            expected=self._rows(np.flatnonzero(self.is_live)),
            history={key: tuple(found) for key, found in zip(self.keys, self.history, strict=True)},
            upserts=self.upserts,
            deletes=self.deletes,
        )

    def _steady(self, number: int, first: int, end: int) -> ChangeFile:
        fresh = np.arange(first, end)
        # Of all earlier documents, deleted ones too: some come back on purpose.
        earlier = self.random.permutation(first)
        updates = max(1, round(len(fresh) * _UPDATES_PER_NEW))
        deletes = max(1, round(len(fresh) * _DELETES_PER_NEW))
        return self._file(
            number, np.concatenate([fresh, earlier[:updates]]), earlier[updates:], deletes
        )

    def _burst(self, number: int, rows: int) -> ChangeFile:
        live = self.random.permutation(np.flatnonzero(self.is_live))[:rows]
        deletes = rows // 20
        return self._file(number, live[deletes:], live[:deletes], deletes)

    def _file(self, number: int, upserted: Indices, deletable: Indices, deletes: int) -> ChangeFile:
        may_go = self.is_live[deletable] & ~self.is_watched[deletable]
        deleted = deletable[may_go][:deletes]
        watched = upserted[:WATCHED_KEYS]
        self.is_watched[watched] = True
        upserts = self._upsert(upserted, number)
        tombstones = self._delete(deleted, number)
        rows = pa.concat_tables(
            [
                upserts.append_column("_op", pa.array(["upsert"] * len(upserted))),
                tombstones.append_column("_op", pa.array(["delete"] * len(deleted))),
            ]
        )
        return ChangeFile(number, rows, tuple(self.keys[at] for at in watched))

    def _upsert(self, at: Indices, number: int) -> pa.Table:
        for one in at:
            if self.history[one]:
                text = self.documents.column("body")[int(one)].as_py()
                self.bodies[one] = f"{text}\n\nRevision {number}."
            self.history[one].append((number, False))
        self.revisions[at] = number
        self.is_live[at] = True
        self.upserts += len(at)
        return self._rows(at)

    def _delete(self, at: Indices, number: int) -> pa.Table:
        for one in at:
            self.history[one].append((number, True))
        self.is_live[at] = False
        self.deletes += len(at)
        nothing = [pa.nulls(len(at), field.type) for field in STREAM_SCHEMA]
        nothing[0] = pa.array([self.keys[one] for one in at], pa.string())
        return pa.table(nothing, schema=STREAM_SCHEMA)

    def _rows(self, at: Indices) -> pa.Table:
        rows = self.documents.take(pa.array(at))
        text = pa.array([self.bodies[one] for one in at], pa.string())
        columns = {
            **{name: rows.column(name) for name in ("id", "module", "kind")},
            "body": text,
            "vector": embed(text),
            "revision": pa.array(self.revisions[at]),
        }
        return pa.table(columns, schema=STREAM_SCHEMA)


def recall_queries(expected: pa.Table, count: int) -> Vectors:
    """Vectors to search for: those of the first lines of documents."""
    chosen = np.random.default_rng(_SEED).permutation(expected.num_rows)[:count]
    bodies = expected.column("body").take(pa.array(chosen)).to_pylist()
    lines = pa.array([body.partition("\n")[0] for body in bodies], pa.string())
    return matrix(pa.chunked_array([embed(lines)]))
