"""The demo's writer: a process of its own, so that it can be killed.

`python -m penstock.cli.demo_writer JOB` opens the table, claims what an earlier writer left behind,
and streams documents. It reports on standard output, one JSON object per line, each written only
after the call it speaks of has returned:

    {"event": "claimed", "ms": …, "entries": …, "rows": …}      what was replayed from the WAL
    {"event": "acknowledged", "first": …, "rows": …, "ms": …}   documents first … first + rows - 1
    {"event": "trained", "ms": …}                               the vector index is there
    {"event": "done", …}                                        the writer's statistics

A writer that is to be killed has a `pause_at` and waits there, so that it cannot get away.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

import penstock
from penstock.storage.clock import SystemClock


@dataclass(frozen=True, slots=True)
class Job:
    """What one writer process is to do, passed to it as JSON."""

    database: str
    table: str
    documents_path: str
    first: int
    train_at: int
    """Write this many documents in one call and train the vector index on them; 0 for neither."""
    pause_at: int
    """Wait here to be killed."""
    call_rows: int
    memtable_rows: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(job: Job) -> None:
    clock = SystemClock()
    with pa.memory_map(job.documents_path) as source:
        documents = pa.ipc.open_file(source).read_all().combine_chunks()
    table = penstock.connect(job.database).open_table(job.table)
    first = job.first
    if job.train_at:
        started_ms = clock.monotonic_ms()
        first += table.upsert(documents.slice(first, job.train_at))
        _report("acknowledged", first=job.first, rows=first, ms=None)
        table.create_index("vector", "ivf_pq", metric="cosine", num_sub_vectors=16)
        _report("trained", ms=clock.monotonic_ms() - started_ms)
    with table.writer(max_memtable_rows=job.memtable_rows) as writer:
        started_ms = clock.monotonic_ms()
        writer.claim_all()
        stats = writer.stats()
        _report(
            "claimed",
            ms=clock.monotonic_ms() - started_ms,
            entries=stats["replayed_entries"],
            rows=stats["replayed_rows"],
        )
        while first < documents.num_rows:
            if first >= job.pause_at:
                sys.stdin.read()  # ends when the parent is gone; until then, wait to be killed
                return
            rows = documents.slice(first, job.call_rows)
            started_ms = clock.monotonic_ms()
            writer.upsert(rows)
            elapsed_ms = clock.monotonic_ms() - started_ms
            _report("acknowledged", first=first, rows=rows.num_rows, ms=elapsed_ms)
            first += rows.num_rows
    _report("done", **writer.stats())


def _report(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(Job(**json.loads(sys.argv[1])))
    except penstock.PenstockError as error:
        sys.exit(f"penstock: the demo's writer failed: {error}")
    except BrokenPipeError:
        sys.exit("penstock: the demo is gone, and its writer with it")
