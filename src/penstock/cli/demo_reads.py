"""Reads of the streaming demo: two threads that look at the table while others change it.

`Watcher` looks for each file of the source until its rows are there, which is how fresh reads are
measured. Micro-batches are stored one after the other, so once rows of a file are seen, all files
before it are settled: no later read may miss them.

`Queries` gets, searches vectors and searches text, one query after the other with a short pause,
and checks whether what it gets for a key is something that it may see then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute as pc

from penstock.cli.demo_changes import ChangeFile, Plan, recall_queries
from penstock.query import Query
from penstock.storage.clock import SystemClock
from penstock.table import Table

KINDS = ("get", "vector search", "text search")
_LOOK_MS = 10.0
_PAUSE_MS = 50.0
_QUERIES = 256
_SEED = 11


@dataclass(slots=True)
class Sightings:
    """When files were put into the source and when they were seen; written by one thread each."""

    written_ms: dict[int, float] = field(default_factory=dict)
    seen_ms: dict[int, float] = field(default_factory=dict)

    @property
    def written(self) -> int:
        return len(self.written_ms)

    @property
    def seen(self) -> int:
        return len(self.seen_ms)

    @property
    def settled(self) -> int:
        return max(0, self.seen - 1)

    @property
    def backlog(self) -> int:
        return self.written - self.seen

    def behind(self, first: int) -> range:
        """Files from `first` on, until one that was seen before the next was written."""
        last = first
        while last < self.seen and self.seen_ms[last] > self.written_ms[last + 1]:
            last += 1
        return range(first, last + 1)

    def freshness_ms(self, number: int) -> float:
        return self.seen_ms[number] - self.written_ms[number]


class _Loop(threading.Thread):
    """Does something again and again until it is stopped; remembers errors and goes on."""

    def __init__(self, name: str, pause_ms: float) -> None:
        super().__init__(name=name, daemon=True)
        self.failures: list[str] = []
        self.clock = SystemClock()
        self._pause_ms = pause_ms
        self._stopping = threading.Event()

    def step(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step()
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._stopping.wait(self._pause_ms / 1000)

    def stop(self) -> None:
        self._stopping.set()
        if self.is_alive():
            self.join()


class Watcher(_Loop):
    def __init__(self, table: Table, files: tuple[ChangeFile, ...], sightings: Sightings) -> None:
        super().__init__("penstock-demo-watcher", _LOOK_MS)
        self._table = table
        self._files = files
        self._sightings = sightings

    def step(self) -> None:
        at = self._sightings.seen
        if at >= self._sightings.written:
            return
        file = self._files[at]
        found = self._table.get_many(list(file.watched)).column("revision")
        if len(found) == len(file.watched) and pc.min(found).as_py() >= file.number:
            self._sightings.seen_ms[file.number] = self.clock.monotonic_ms()


class Queries(_Loop):
    def __init__(self, table: Table, plan: Plan, sightings: Sightings) -> None:
        super().__init__("penstock-demo-queries", _PAUSE_MS)
        self.latencies_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.wrong: list[str] = []
        self._table = table
        self._plan = plan
        self._sightings = sightings
        self._keys = list(plan.history)
        self._vectors = recall_queries(plan.expected, _QUERIES)
        lines = plan.expected.column("body").slice(0, _QUERIES).to_pylist()
        self._texts = [" ".join(line.split()[:3]) for line in lines]
        self._random = np.random.default_rng(_SEED)
        self._turn = 0

    def step(self) -> None:
        kind = KINDS[self._turn % len(KINDS)]
        self._turn += 1
        work: dict[str, Callable[[], object]] = {
            "get": self._get,
            "vector search": self._search_vectors,
            "text search": self._search_text,
        }
        started_ms = self.clock.monotonic_ms()
        work[kind]()
        self.latencies_ms[kind].append(self.clock.monotonic_ms() - started_ms)

    def _get(self) -> None:
        key = self._keys[int(self._random.integers(len(self._keys)))]
        settled = self._sightings.settled
        row = self._table.get(key)
        self._check(key, None if row is None else row["revision"], settled)

    def _search_vectors(self) -> None:
        at = int(self._random.integers(len(self._vectors)))
        self._run(self._table.search(self._vectors[at]))

    def _search_text(self) -> None:
        self._run(self._table.search(self._texts[int(self._random.integers(len(self._texts)))]))

    def _run(self, query: Query) -> None:
        settled = self._sightings.settled
        for row in query.limit(10).select(["id", "revision"]).to_list():
            self._check(row["id"], row["revision"], settled)

    def _check(self, key: str, revision: int | None, settled: int) -> None:
        # A file is noted as written before it is: none that was read can be missing there.
        if not self._plan.is_allowed(key, revision, settled, self._sightings.written):
            self.wrong.append(f"{key} at revision {revision} when {settled} files were settled")
