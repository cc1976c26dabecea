"""A process of the crowd: imports everything, says so, reads a job from its input, and works.

A job names the table, when to begin and end by the machine's monotonic clock, and the roles to
play, each in a thread. What readers and writers did is kept with the times and left in a file at
the end, for the judge. Whatever goes wrong in a thread is told with its trace and ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.crash.crowd_events import (
    CALL_NUMBERS,
    RETAIN_SECONDS,
    Count,
    Event,
    Pinned,
    Read,
    Write,
)
from tests.crash.crowd_rows import (
    EVERYTHING,
    IDS,
    KEYS,
    PARTS,
    QUERY,
    WRITERS,
    Seen,
    call_word,
    codes_of,
    group_word,
    key_of,
    rows,
    seen_in,
    values_of,
    where,
)

import penstock
from penstock.errors import VersionNotFound
from penstock.memwal import advance
from penstock.table import Table

FAILED = 3


class Worker:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.ends: float = job["ends"]
        self.events: list[Event] = []
        self.failed = threading.Event()
        self._work = os.open(job["work"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def open(self) -> Table:
        return penstock.connect(self.job["uri"], self.job["storage_options"]).open_table("t")

    def goes_on(self) -> bool:
        return time.monotonic() < self.ends and not self.failed.is_set()

    def done(self, role: str, amount: int) -> None:
        """One line in one write: it is there whenever this process is killed."""
        os.write(self._work, f"{role} {amount}\n".encode())

    def run(self) -> bool:
        shared = self.open() if self.job["shares"] else None
        tables = [shared or self.open() for _ in self.job["roles"]]
        threads = [
            threading.Thread(target=self._guard, args=(role, table), name=role)
            for role, table in zip(self.job["roles"], tables, strict=True)
        ]
        time.sleep(max(0.0, self.job["begins"] - time.monotonic()))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for table in tables:
            table.close()
        Path(self.job["events"]).write_bytes(pickle.dumps(self.events))
        return not self.failed.is_set()

    def _guard(self, role: str, table: Table) -> None:
        name, _, number = role.partition("-")
        draw = random.Random(f"{self.job['seed']}/{role}")
        try:
            ROLES[name](self, table, draw, number)
        except BaseException:
            text = f"--- {role}, {time.monotonic() - self.job['begins']:.2f} s after the start\n"
            os.write(2, (text + traceback.format_exc()).encode())
            self.failed.set()


# --- writers ---------------------------------------------------------------------------------


def write(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    """Change one's own keys, mostly in two parts that are one's home, and flush now and then."""
    writer = int(number)
    home = (0, 1) if writer < WRITERS // 2 else (2, 3)
    live: set[int] = set(worker.job["live"])
    call = 1
    while worker.goes_on():
        call += 1
        parts = draw.choice([home[:1], home[1:], home])
        if draw.random() < 0.03:
            parts = (draw.randrange(PARTS),)  # takes a region from the other process
        codes = [
            code
            for part in parts
            for code in draw.sample(codes_of(writer, part).tolist(), draw.randint(1, 6))
        ]
        luck = draw.random()
        deletes = luck < 0.25
        first = [code for code in codes if code // IDS == parts[0]]
        began = time.monotonic()
        kind = "upsert"
        if luck < 0.17:
            kind = "delete"
            table.delete(keys=[key_of(code) for code in codes])
        elif deletes:
            codes, kind = first, "delete where"
            table.delete(where=where(codes))
        elif luck < 0.32 and first[0] in live:
            codes, kind = first[:1], "update"
            table.update(where=where(codes), values=values_of(codes[0], call))
        elif luck < 0.37:
            codes, kind = codes[:1], "merge insert"  # what matches is written before what is new
            merging = table.merge_insert().when_matched_update_all().when_not_matched_insert_all()
            merging.execute(rows(np.array(codes), call))
        else:
            table.upsert(rows(np.array(codes), call))
        ended = time.monotonic()
        live = live - set(codes) if deletes else live | set(codes)
        worker.events.append(Write(writer, call, kind, np.array(codes), began, ended))
        if draw.random() < 0.1:
            table.flush()
        time.sleep(draw.uniform(0, 0.03))
    worker.done("write", call)


# --- readers ---------------------------------------------------------------------------------


def read(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    reader = f"reader {number}"
    known = np.ones(KEYS, dtype=np.int64)
    pinned: list[tuple[int, float, Seen | None, float]] = []
    reads = 0

    def ask(kind: str, found: Callable[[], Seen], **details: Any) -> Seen:
        began = time.monotonic()
        seen = found()
        worker.events.append(Read(reader, kind, began, time.monotonic(), seen, **details))
        return seen

    def everything() -> None:
        nonlocal known
        known = ask("scan", lambda: seen_in(table.to_arrow()))

    def some_keys() -> None:
        codes = np.array(draw.sample(range(KEYS), draw.randint(1, 20)))
        keys = [key_of(code) for code in codes]
        ask("get_many", lambda: seen_in(table.get_many(keys)), asked=codes)

    def since() -> None:
        part, call = draw.randrange(PARTS), max(int(draw.choice(known.tolist())), 1)
        asked = np.arange(part * IDS, (part + 1) * IDS)
        sql = f"part = {part} AND call >= {call}"
        ask(
            "filter",
            lambda: seen_in(table.scan(filter=sql).read_all()),
            asked=asked,
            calls=(call, CALL_NUMBERS),
        )

    def near() -> None:
        limit = draw.choice([5, EVERYTHING])
        query = table.search(QUERY).nprobes(8).limit(limit)
        ask("vector", lambda: seen_in(query.to_arrow()), nearest=limit)

    def by_group() -> None:
        writer, part = draw.randrange(WRITERS), draw.randrange(PARTS)
        query = table.search(group_word(writer, part)).limit(EVERYTHING)
        ask("text", lambda: seen_in(query.to_arrow()), asked=codes_of(writer, part))

    def by_call() -> None:
        code = draw.randrange(KEYS)
        call = max(int(known[code]), 1)
        asked = np.concatenate([codes_of(code % WRITERS, part) for part in range(PARTS)])
        query = table.search(call_word(code, call)).limit(EVERYTHING)
        ask("word", lambda: seen_in(query.to_arrow()), asked=asked, calls=(call, call))

    def both() -> None:
        query = table.search(vector=QUERY, text="river").nprobes(8).limit(EVERYTHING)
        ask("hybrid", lambda: seen_in(query.to_arrow()))

    def count() -> None:
        began = time.monotonic()
        rows = table.count()
        worker.events.append(Count(reader, began, time.monotonic(), rows))

    def snapshot() -> None:
        ask(
            "eventual",
            lambda: seen_in_snapshot(draw, table, consistency="eventual"),
            stamp="snapshot",
        )

    def pin() -> None:
        at = time.monotonic()
        version = table.version
        pinned.append((version, at, _pinned(draw, table, version), time.monotonic()))

    def look_again() -> None:
        if pinned:
            version, at, first, ended = pinned.pop(draw.randrange(len(pinned)))
            again = _pinned(draw, table, version)
            times = (ended, time.monotonic())
            worker.events.append(Pinned(reader, at, times, (first, again)))

    kinds = [everything, some_keys, since, near, by_group, by_call, both, count]
    while worker.goes_on():
        draw.choice([*kinds, snapshot, pin, look_again])()
        reads += 1
        time.sleep(draw.uniform(0, 0.02))
    worker.done("read", reads)


def _pinned(draw: random.Random, table: Table, version: int) -> Seen | None:
    try:
        return seen_in_snapshot(draw, table, version=version)
    except VersionNotFound:
        return None


def seen_in_snapshot(draw: random.Random, table: Table, **asked: Any) -> Seen:
    """All rows of a version, in one of the ways in which there are all of them."""
    if draw.random() < 0.5:
        return seen_in(table.to_arrow(**asked))
    if draw.random() < 0.5:
        return seen_in(table.search("river", **asked).limit(EVERYTHING).to_arrow())
    return seen_in(table.search(QUERY, **asked).nprobes(8).limit(EVERYTHING).to_arrow())


# --- maintenance -----------------------------------------------------------------------------


def merge(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    while worker.goes_on():
        worker.done("merge", table.merge(max_rows=draw.choice([60, 1_000_000])).generations)
        time.sleep(draw.uniform(0, 0.2))


def compact(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    while worker.goes_on():
        target = draw.choice([KEYS // 4, 1 << 20])
        worker.done("compact", table.compact(target_rows=target).pieces)
        time.sleep(draw.uniform(0, 0.3))


def index(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    while worker.goes_on():
        worker.done("index", table.build_indexes().rows)
        time.sleep(draw.uniform(0, 0.3))


def snap(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    while worker.goes_on():
        worker.done("snap", table.snapshot())
        time.sleep(draw.uniform(0, 0.5))


def collect(worker: Worker, table: Table, draw: random.Random, number: str) -> None:
    while worker.goes_on():
        report = table.gc(retain_seconds=RETAIN_SECONDS)
        worker.done("collect", report.files)
        assert not report.unknown, report.unknown
        time.sleep(draw.uniform(0, 0.3))


ROLES: dict[str, Callable[[Worker, Table, random.Random, str], None]] = {
    "write": write,
    "read": read,
    "merge": merge,
    "compact": compact,
    "index": index,
    "snap": snap,
    "collect": collect,
}


def main() -> None:
    faulthandler.enable()
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    if "advance_rows" in job:
        advance.ADVANCE_ROWS = job["advance_rows"]
    worker = Worker(job)
    ended = worker.run()
    sys.exit(0 if ended else FAILED)


if __name__ == "__main__":
    main()
