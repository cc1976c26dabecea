"""A script that uses the whole write path, over a store with faults, and what must hold after it.

The script creates a table with two regions, upserts, deletes, flushes and opens it again, as an
application does that gives up on a call that fails and goes on with the next. Whatever the store
does, the caller sees nothing but Penstock's own errors, and a clean look afterwards finds every
acknowledged row, no half of a call, and epochs that rise.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.crash.ledger import PRIMARY_KEY, SCHEMA, Call, Ledger
from tests.failures.chains import check_chains

import penstock
from penstock.database import Database
from penstock.errors import PenstockError
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import WRITES, Fault, FaultStore
from penstock.storage.faults import Call as StoreCall
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

FAULTS = [fault for fault in Fault if fault is not Fault.NOTHING]
FAULTY_OPS = dict.fromkeys((Fault.DUPLICATE, Fault.DELAY, Fault.DELAY_ANSWER), WRITES)
"""A read that comes late or twice is only a read."""

FAULTY_KEYS = {Fault.BIT_FLIP: "t.lance/_[mp]e*"}
"""Not in `_versions/`: those are Lance's files, which Lance too reads without a checksum."""

DELAY_MS = 60_000.0


def keys(part: int, *ids: int) -> list[tuple[int, int]]:
    return [(part, identity) for identity in ids]


def upsert(number: int, *rows: tuple[int, int]) -> Call:
    return Call(number, dict.fromkeys(rows, f"call {number}"))


def delete(number: int, *rows: tuple[int, int]) -> Call:
    return Call(number, dict.fromkeys(rows))


BEFORE_REOPENING = [
    upsert(1, *keys(0, 1, 2, 3), *keys(1, 1, 2, 3)),
    upsert(2, *keys(0, 3, 4)),
    delete(3, *keys(0, 1), *keys(1, 1, 9)),
]
AFTER_REOPENING = [
    upsert(4, *keys(0, 1, 5), *keys(1, 3, 4)),
    delete(5, *keys(1, 2, 3)),
    upsert(6, *keys(0, 6), *keys(1, 2)),
]


class Run:
    """One run of the script over a store that may fail."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.clean = open_store(path / uuid.uuid4().hex)
        self.clock = SimulatedClock()
        self.seams = Seams(clock=self.clock, entropy=SeededEntropy(seed + 1))
        self.store = FaultStore(self.clean, self.clock, SeededEntropy(seed))
        self.ledger = Ledger()
        self.failed = 0

    def script(self) -> None:
        database = Database(self.store, None, self.seams)
        table = self.create(database)
        for call in BEFORE_REOPENING:
            self.send(table, call)
        self.flush(table)
        table = self.reopen(database, table)
        for call in AFTER_REOPENING:
            self.send(table, call)
        self.flush(table)
        self.close(table)

    def create(self, database: Database) -> Table:
        try:
            return create(database)
        except PenstockError:
            self.failed += 1
        # Half a table may be in the way: it can be dropped, and then there is room for a whole one.
        clean = Database(self.clean, None, self.seams)
        if clean.list_tables():
            clean.drop_table("t")
        create(clean)
        return self.reopen(database, None)

    def send(self, table: Table, call: Call) -> None:
        try:
            call.send(table)
        except PenstockError:
            self.failed += 1
            self.ledger.in_doubt(call)
        else:
            self.ledger.acknowledged(call)

    def flush(self, table: Table) -> None:
        try:
            table.flush()
        except PenstockError:
            self.failed += 1

    def close(self, table: Table) -> None:
        try:
            table.close()
        except PenstockError:
            self.failed += 1

    def reopen(self, database: Database, table: Table | None) -> Table:
        if table is not None:
            self.close(table)
        for _ in range(20):
            try:
                return database.open_table("t")
            except PenstockError:
                self.failed += 1
        return Database(self.clean, None, self.seams).open_table("t")

    def check(self) -> None:
        """Everything promised holds, as a process that knows nothing of the faults sees it."""
        database = Database(self.clean, None, Seams())
        table = database.open_table("t")
        self.ledger.settle(table.to_arrow())
        check_chains(self.clean.child("t.lance"))
        # And the table is still good for writing.
        after = upsert(7, *keys(0, 7), *keys(1, 7))
        after.send(table)
        self.ledger.acknowledged(after)
        table.flush(recover=True)
        table.close()
        self.ledger.settle(database.open_table("t").to_arrow())


def create(database: Database) -> Table:
    return database.create_table(
        "t",
        SCHEMA,
        primary_key=PRIMARY_KEY,
        regions=penstock.identity("part"),
        writer_defaults={"max_memtable_rows": 4},
    )


def calls_made(path: Path) -> Sequence[StoreCall]:
    """What the script calls when nothing fails."""
    run = Run(path)
    run.script()
    assert run.failed == 0
    made = run.store.log
    run.check()
    return made


def strikes(fault: Fault, made: Sequence[StoreCall]) -> int:
    """How many of these calls a fault can befall."""
    rule = FaultStore(open_store("memory://"), SimulatedClock(), SeededEntropy(0)).inject(
        fault, op=FAULTY_OPS.get(fault, "*")
    )
    pattern = FAULTY_KEYS.get(fault, "*")
    return sum(call.op in rule.ops and fnmatchcase(call.key, pattern) for call in made)


def check_strikes(
    path: Path, fault: Fault, made: Sequence[StoreCall], *, first: int, stride: int
) -> None:
    total = strikes(fault, made)
    assert total
    for nth in range(first, total + 1, stride):
        run = Run(path, seed=nth)
        run.store.inject(
            fault,
            op=FAULTY_OPS.get(fault, "*"),
            key=FAULTY_KEYS.get(fault, "*"),
            nth=nth,
            delay_ms=DELAY_MS,
        )
        try:
            run.script()
            run.store.clear()
            run.check()
        except Exception as error:
            struck = [(call.op, call.key) for call in run.store.log if call.faults]
            error.add_note(f"{fault} at call {nth} of {total}: {struck}")
            raise


def check_storm(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    run = Run(path, seed=seed)
    for fault in FAULTS:
        run.store.inject(
            fault,
            key=FAULTY_KEYS.get(fault, "*"),
            probability=draw.uniform(0.0, 0.06),
            delay_ms=DELAY_MS,
        )
    run.script()
    run.store.clear()
    run.check()
