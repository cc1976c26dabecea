"""The demo without Spark: stream documents, kill the writer half-way, recover, count the losses.

    parent                         writer 1                 writer 2
    documents, table, indexes ---> streams, reports
    kills it half-way ----------->  SIGKILL
    reads the table as it is
    starts another ---------------------------------------> claims, replays, streams the rest
    reads the table again, compares every acknowledged row

The parent believes only what was reported through the pipe: a row counts as acknowledged when the
writer said so after the call had returned. Rows of the call that was under way at the kill may be
there or not; the second writer sends them again, and the key keeps them from appearing twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.cli.demo import TABLE, Progress, compare, epochs, fresh_table
from penstock.cli.demo_writer import Job
from penstock.cli.documents import SCHEMA, documents
from penstock.errors import PenstockError
from penstock.memwal.status import TableStatus
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SystemEntropy
from penstock.table import Table

CALL_ROWS = 20
_GENERATIONS_WANTED = 4
_TRAINING_ROWS = (256, 1024)
_KILL_WITHIN_MS = 20.0


@dataclass(frozen=True, slots=True)
class Account:
    """What happened, in numbers."""

    documents: int
    regions: int
    acknowledged: int
    acknowledged_at_kill: int
    unacknowledged_at_kill: int
    """Rows found after the kill that no acknowledgement speaks of: the call under way."""
    lost_after_kill: int
    recovered_from_wal: int
    recovered_wal_entries: int
    lost: int
    changed: int
    duplicates: int
    epochs_before: tuple[int, ...]
    epochs_after: tuple[int, ...]
    generations: int
    call_rows: int
    rows_per_second: float
    write_p50_ms: float
    write_p99_ms: float
    recover_ms: float
    restart_ms: float
    """From the start of the second process to its first acknowledgement."""
    sample: dict[str, Any] | None
    """The last document acknowledged before the kill, looked up by its key at the end."""

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing changed, nothing twice, and the epochs rose."""
        rose = all(b < a for b, a in zip(self.epochs_before, self.epochs_after, strict=True))
        failures = (self.lost_after_kill, self.lost, self.changed, self.duplicates)
        return not any(failures) and rose and self.acknowledged == self.documents

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


@dataclass(slots=True)
class _Reports:
    """What the writers have said so far."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)
    timed_rows: int = 0
    claimed: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Documents are sent in order, so the last acknowledgement says how many there are."""
        return max((first + rows for first, rows in self.acknowledged), default=0)

    def take(self, report: dict[str, Any]) -> None:
        if report["event"] == "acknowledged":
            self.acknowledged.append((report["first"], report["rows"]))
            if report["ms"] is not None:
                self.latencies_ms.append(report["ms"])
                self.timed_rows += report["rows"]
        elif report["event"] == "claimed":
            self.claimed = report


def run_demo(
    directory: str, count: int, regions: int, progress: Progress
) -> tuple[Account, TableStatus]:
    """Run the whole demo in `directory`; the table is left there to look at."""
    progress("reading docstrings", 0)
    stream = documents(count)
    table = fresh_table(directory, SCHEMA, regions)
    total = stream.num_rows
    half = total // 2
    train_at = min(max(_TRAINING_ROWS[0], total // 8), _TRAINING_ROWS[1])
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as scratch:
        path = os.path.join(scratch, "documents.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, stream.schema) as writer:
            writer.write_table(stream)
        job = Job(
            database=directory,
            table=TABLE,
            documents_path=path,
            first=0,
            train_at=train_at,
            pause_at=max(total * 3 // 4, train_at + CALL_ROWS),  # a call is timed before it
            call_rows=CALL_ROWS,
            memtable_rows=max(100, total // regions // _GENERATIONS_WANTED),
        )
        reports = _Reports()
        progress("streaming", 0)
        _stream_and_kill(job, half, reports, progress)
        at_kill = reports.rows
        progress("writer killed", at_kill)
        after_kill = compare(stream.slice(0, at_kill), table.to_arrow())
        epochs_before = epochs(table)

        progress("recovering", at_kill)
        restart_ms = _resume(job, at_kill, total, reports, progress)
    progress("verifying", reports.rows)
    found = compare(stream, table.to_arrow())
    latencies = np.array(reports.latencies_ms)
    status = table.status()
    account = Account(
        documents=total,
        regions=len(status.regions),
        acknowledged=reports.rows,
        acknowledged_at_kill=at_kill,
        unacknowledged_at_kill=after_kill.extra,
        lost_after_kill=after_kill.lost + after_kill.changed + after_kill.duplicates,
        recovered_from_wal=reports.claimed["rows"],
        recovered_wal_entries=reports.claimed["entries"],
        lost=found.lost,
        changed=found.changed,
        duplicates=found.duplicates,
        epochs_before=epochs_before,
        epochs_after=epochs(table),
        generations=sum(region.current_generation - 1 for region in status.regions),
        call_rows=CALL_ROWS,
        rows_per_second=reports.timed_rows / (float(latencies.sum()) / 1000),
        write_p50_ms=float(np.percentile(latencies, 50)),
        write_p99_ms=float(np.percentile(latencies, 99)),
        recover_ms=reports.claimed["ms"],
        restart_ms=restart_ms,
        sample=_sample(table, stream, at_kill),
    )
    return account, status


# --- writers -------------------------------------------------------------------------------


def _stream_and_kill(job: Job, half: int, reports: _Reports, progress: Progress) -> None:
    """Let a writer stream until half of the documents are acknowledged, and kill it."""
    with _writer(job) as (process, lines):
        for report in lines:
            reports.take(report)
            progress("streaming", reports.rows)
            if reports.rows >= half and reports.latencies_ms:
                # At some moment of one of the next calls, not at the end of this one.
                SystemClock().sleep_ms(SystemEntropy().uniform(0, _KILL_WITHIN_MS))
                process.kill()
                break
        for report in lines:
            reports.take(report)  # acknowledged before the signal arrived
        if process.wait() == 0 or not reports.latencies_ms:
            raise PenstockError("the demo's writer stopped before it could be killed")


def _resume(job: Job, first: int, total: int, reports: _Reports, progress: Progress) -> float:
    """Stream the rest with another writer; returns how long its first acknowledgement took."""
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    values = {**asdict(job), "first": first, "train_at": 0, "pause_at": total}
    restart_ms = 0.0
    with _writer(Job(**values)) as (process, lines):
        for report in lines:
            reports.take(report)
            if report["event"] == "acknowledged" and not restart_ms:
                restart_ms = clock.monotonic_ms() - started_ms
            progress("streaming on", max(reports.rows, first))
        if process.wait():
            raise PenstockError(f"the second writer stopped with exit code {process.returncode}")
    return restart_ms


@contextmanager
def _writer(job: Job) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    command = [sys.executable, "-m", "penstock.cli.demo_writer", job.to_json()]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        # A line cut short by the kill was never a report.
        whole = (line for line in process.stdout if line.endswith("\n"))
        yield process, (json.loads(line) for line in whole)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _sample(table: Table, stream: pa.Table, at_kill: int) -> dict[str, Any] | None:
    row = table.get(stream.column("id")[at_kill - 1].as_py())
    if row is not None:
        del row["vector"]
    return row
