"""A process that writes to a table and says on its standard output what was acknowledged.

It imports everything, then reads one job, a line of JSON, from its standard input. So a process
can be kept warm until it is needed. Each line it prints is a JSON object with a `kind`:

    ready                           waits for another line, so that several start as one
    begin  number, changes          a call is about to be made
    ack    number                   it returned
    epoch  number, epoch            the epoch of the writer that made it
    fenced, lost                    an error it was told and went on from

Jobs: `crash` writes for ever and is killed, by its parent or by itself at the n-th durable step;
`duel` claims one region again and again with a writer of its own; `share` calls `Table.upsert`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from tests.crash.ledger import Call

from penstock.database import Database
from penstock.errors import ClaimContention, Fenced
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SystemEntropy
from penstock.storage.faults import WRITES, FaultStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

THREADS = 2
IDS_PER_THREAD = 40
SHARED_ID = 0


def say(kind: str, **details: Any) -> None:
    """One whole line in one write, so that a kill leaves no half of it."""
    os.write(1, (json.dumps({"kind": kind, **details}) + "\n").encode())


def main() -> None:
    job = json.loads(sys.stdin.readline())
    store: ObjectStore = open_store(job["uri"], job["storage_options"])
    if job.get("die_at"):
        store = _dying(store, job["die_at"], before=job["die_before"])
    table = Database(store, job["storage_options"], Seams()).open_table("t")
    if job["mode"] != "crash":
        say("ready")
        sys.stdin.readline()
    {"crash": crash, "duel": duel, "share": share}[job["mode"]](table, job)


def _dying(store: ObjectStore, step: int, *, before: bool) -> FaultStore:
    def die(op: str, key: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    mortal = FaultStore(store, SystemClock(), SystemEntropy())
    moment = {"before": die} if before else {"after": die}
    mortal.hook(op=WRITES, nth=step, **moment)
    return mortal


# --- written until killed ----------------------------------------------------------------------


def crash(table: Table, job: dict[str, Any]) -> None:
    """Threads that upsert and delete, each among keys of its own, and flush now and then."""
    draw = random.Random(job["seed"])
    target = table if draw.random() < 0.5 else table.writer()
    numbers = iter(range(job["first_call"], 1 << 62))
    lock = threading.Lock()

    def write(thread: int) -> None:
        mine = random.Random(f"{job['seed']}/{thread}")
        while True:
            with lock:
                call = make_call(mine, next(numbers), thread)
                changes = [[*key, value] for key, value in call.changes.items()]
                say("begin", number=call.number, changes=changes)
            call.send(target)
            say("ack", number=call.number)
            if mine.random() < 0.05:
                target.flush()

    for thread in range(1, THREADS):
        threading.Thread(target=write, args=(thread,), daemon=True).start()
    write(0)


def make_call(draw: random.Random, number: int, thread: int) -> Call:
    first = thread * IDS_PER_THREAD
    keys = {
        (part, draw.randrange(first, first + IDS_PER_THREAD))
        for part in draw.choice([(0,), (1,), (0, 1)])
        for _ in range(draw.randint(2, 5))
    }
    gone = draw.random() < 0.25
    return Call(number, dict.fromkeys(sorted(keys), None if gone else f"call {number}"))


# --- two at a time -----------------------------------------------------------------------------


def duel(table: Table, job: dict[str, Any]) -> None:
    """Claims with a writer of one's own; each writes its own rows and one that all write."""
    draw = random.Random(job["seed"])
    number = job["first_call"]
    for _ in range(job["claims"]):
        writer = table.writer()
        try:
            for _ in range(draw.randint(1, 8)):
                number += 1
                value = f"call {number}"
                changes = [[0, SHARED_ID, value], [0, number, value]]
                say("begin", number=number, changes=changes)
                writer.upsert([{"part": p, "id": i, "value": v} for p, i, v in changes])
                (region,) = writer.region_writers()
                say("ack", number=number)
                say("epoch", number=number, epoch=region.epoch)
                time.sleep(draw.uniform(0, 0.004))
        except Fenced as error:
            say("fenced", number=number, message=str(error))
        except ClaimContention as error:
            say("lost", number=number, message=str(error))
        finally:
            writer.abandon()


def share(table: Table, job: dict[str, Any]) -> None:
    """Calls of `Table.upsert`, which may take as many claims as they need."""
    draw = random.Random(job["seed"])
    first = job["first_call"]
    for number in range(first, first + job["calls"]):
        changes = [[0, 3 * number + n, f"call {number}"] for n in range(3)]
        say("begin", number=number, changes=changes)
        table.upsert([{"part": p, "id": i, "value": v} for p, i, v in changes])
        say("ack", number=number)
        time.sleep(draw.uniform(0, 0.004))
    table.close()


if __name__ == "__main__":
    main()
