"""Everybody at once: processes that write, read, merge, compact, index and clean up one table.

    writers a, b    two writers and a reader each, all on one handle
    readers         two readers with a handle each, which try new versions before they use them
    mergers a, b    a merger each; one also compacts, the other builds indexes and takes snapshots
    collector       keeps versions for two seconds

Any error in any of them is a failure, whatever it is: only a version that was cleaned up may be
refused. Mergers and the collector may be killed at any moment, and others take their places. When
all have ended, the judge looks at every answer that was given, the table is read and cleaned up,
and there is neither a row nor a file too many.
"""

from __future__ import annotations

import json
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
from tests.crash.crowd_events import Event
from tests.crash.crowd_judge import Judge, assert_equal
from tests.crash.crowd_rows import EVERYTHING, KEYS, QUERY, SCHEMA, rows, seen_in
from tests.crash.reachable import check_files

import penstock
from penstock.storage.open import open_store
from penstock.table import Table

PROJECT = Path(__file__).parents[2]
PATIENCE_SECONDS = 60.0
"""Longer than anything takes that is not stuck."""
CROWD = {
    "writers a": ["write-0", "write-1", "read-0"],
    "writers b": ["write-2", "write-3", "read-1"],
    "readers": ["read-2", "read-3"],
    "mergers a": ["merge", "compact"],
    "mergers b": ["merge", "index", "snap"],
    "collector": ["collect"],
}
MORTAL = ["mergers a", "mergers b", "collector"]


class Person:
    """A process, started now, that waits for its job."""

    def __init__(self, directory: Path, number: int) -> None:
        self.name = "nobody"
        self.events = directory / f"events-{number}"
        self._errors = directory / f"errors-{number}.txt"
        with self._errors.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.crowd_worker"],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )

    def get_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self._errors.read_text()

    def tell(self, name: str, job: dict[str, Any]) -> None:
        self.name = name
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job | {"events": str(self.events)}) + "\n")
        self._process.stdin.flush()

    def is_alive(self) -> bool:
        """Whether it is still at it; raises if it came to a bad end."""
        status = self._process.poll()
        assert not status, f"{self.name} ended with {status}:\n{self._errors.read_text()}"
        return status is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, until: float) -> None:
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)  # it says where it was
            self._process.wait()
        self.is_alive()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(slots=True)
class Outcome:
    judged: Counter[str]
    work: Counter[str]
    """Of each role how much it did in all."""
    kills: int


def run_crowd(
    directory: Path, *, seconds: float, seed: int, kills: int = 0, stable_row_ids: bool = True
) -> Outcome:
    draw = random.Random(seed)
    everybody: list[Person] = []

    def start() -> Person:
        everybody.append(Person(directory, len(everybody)))
        return everybody[-1]

    try:
        waiting = [start() for _ in CROWD]
        table = _make_table(directory, stable_row_ids)
        for person in waiting:
            person.get_ready()
        spare = [start()] if kills else []
        begins = time.monotonic() + 0.5
        ends = begins + seconds
        present: dict[str, Person] = {}

        def tell(name: str, person: Person) -> None:
            job = {
                "uri": str(directory / "lake"),
                "storage_options": None,
                "work": str(directory / "work.txt"),
                "roles": CROWD[name],
                "shares": name.startswith("writers"),
                "begins": begins,
                "ends": ends,
                "seed": f"{seed}/{len(everybody)}",
                "live": list(range(KEYS)),
            }
            if name == "readers":
                job["advance_rows"] = 1
            person.tell(name, job)
            present[name] = person

        for name, person in zip(CROWD, waiting, strict=True):
            tell(name, person)
        moments = sorted(draw.uniform(0.15, 0.85) for _ in range(kills))
        for number, moment in enumerate(moments):
            _watch(present, begins + moment * seconds)
            name = draw.choice(MORTAL)
            spare[-1].get_ready()
            present.pop(name).kill()
            tell(name, spare.pop())
            if number + 1 < kills:
                spare.append(start())
        _watch(present, ends)
        for person in present.values():
            person.wait(ends + PATIENCE_SECONDS)
        events: list[Event] = []
        for person in present.values():
            events += pickle.loads(person.events.read_bytes())
    finally:
        for person in everybody:
            person.stop()
    judge = Judge(events)
    judge.judge()
    _check_table(directory, table, judge)
    work: Counter[str] = Counter()
    for line in (directory / "work.txt").read_text().splitlines():
        role, amount = line.split()
        work[role] += int(amount)
    return Outcome(judge.judged, work, kills)


def _watch(present: dict[str, Person], until: float) -> None:
    while time.monotonic() < until:
        for person in present.values():
            person.is_alive()
        time.sleep(0.05)


def _make_table(directory: Path, stable_row_ids: bool) -> Table:
    table = penstock.connect(directory / "lake").create_table(
        "t",
        SCHEMA,
        primary_key=["part", "id"],
        regions=penstock.identity("part"),
        stable_row_ids=stable_row_ids,
        writer_defaults={"max_memtable_rows": 200},
    )
    table.upsert(rows(np.arange(KEYS), 1))
    table.flush()
    table.merge()
    table.create_index("vector", "ivf_flat", num_partitions=2)
    table.create_index("text", "fts")
    table.create_index("call", "btree")
    table.snapshot()
    table.close()
    return table


def _check_table(directory: Path, table: Table, judge: Judge) -> None:
    """What is left is what was acknowledged last, in every way in which it can be read."""

    def check(what: str) -> None:
        for reader in (table, penstock.connect(directory / "lake").open_table("t")):
            assert_equal(seen_in(reader.to_arrow()), judge.last, what)
            near = reader.search(QUERY).nprobes(8).limit(EVERYTHING).to_arrow()
            assert_equal(seen_in(near), judge.last, f"{what}, vectors")
            text = reader.search("river").limit(EVERYTHING).to_arrow()
            assert_equal(seen_in(text), judge.last, f"{what}, text")
            assert reader.count() == int(np.count_nonzero(judge.last))

    check("at the end")
    table.maintain(recover=True)
    table.build_indexes()
    check("after maintenance")
    assert_equal(seen_in(lance.dataset(table.uri).to_table()), judge.last, "plain Lance")
    table.close()
    table.gc(retain_seconds=0, orphan_seconds=0)
    check("after clean-up")
    base = lance.dataset(table.uri)
    base.validate()
    assert_equal(seen_in(base.to_table()), judge.last, "plain Lance after clean-up")
    assert len(base.versions()) == 1
    check_files(open_store(table.uri))
    assert not list(Path(table.uri).rglob("*_gen_*"))
