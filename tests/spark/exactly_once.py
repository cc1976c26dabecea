"""Two streams whose driver is killed again and again: what comes out has to be what went in."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
from tests.spark.streamer import FILES_PER_BATCH

import penstock

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
STARTED_SECONDS = 120.0
FINISHED_SECONDS = 600.0
GROUPS = 4
"""Keys come again after so many batches at the earliest."""


def write_changes(directory: Path, files: int, rows_per_file: int, rng: random.Random) -> None:
    """Changes as files; in those of one batch, whose rows have no order, each key comes once.

    After a kill Spark may put the files of two batches into one, so neighbours share no key.
    """
    directory.mkdir(parents=True)
    batch_rows = FILES_PER_BATCH * rows_per_file
    written = 0
    for batch in range(files // FILES_PER_BATCH):
        keys = range(batch % GROUPS, GROUPS * (batch_rows + batch_rows // 4), GROUPS)
        chosen = rng.sample(keys, batch_rows)
        for part in range(FILES_PER_BATCH):
            ids = chosen[part * rows_per_file : (part + 1) * rows_per_file]
            rows = [
                {
                    "id": one,
                    "value": f"change {written + n}",
                    "_op": "delete" if rng.random() < 0.2 else "upsert",
                }
                for n, one in enumerate(ids)
            ]
            written += len(rows)
            path = directory / f"{batch:05}-{part}.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path)
            # Spark takes the oldest first.
            os.utime(path, (1_700_000_000 + batch, 1_700_000_000 + batch))


def all_changes(directory: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted(directory.glob("*.parquet"))]
    found: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return found


def commits(directory: Path) -> int:
    """Batches that Spark knows to be done, of both streams."""
    return sum(1 for path in directory.glob("checkpoints/*/commits/*") if path.name.isdecimal())


def run(directory: Path, kills: int, rng: random.Random) -> int:
    """Run the streams to their end, killing their driver so often; returns how often it was."""
    command = [sys.executable, "-m", "tests.spark.streamer", str(directory)]
    killed = 0
    while True:
        log = (directory / f"driver-{killed}.log").open("wb")
        with log, subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as one:
            before, began = commits(directory), time.monotonic()
            if killed < kills:
                # Somewhere in the batch after the first one it finishes.
                while one.poll() is None and commits(directory) == before:
                    assert time.monotonic() - began < STARTED_SECONDS
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 1.0))
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                    killed += 1
                    one.wait()
                    continue
            ended = one.wait(FINISHED_SECONDS)
        if ended == 0:
            return killed
        raise AssertionError((directory / f"driver-{killed}.log").read_text()[-4000:])


def check(directory: Path, files: int, rows_per_file: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    write_changes(directory / "changes", files, rows_per_file, rng)
    database = penstock.connect(directory / "lake")
    regions = penstock.bucket("id", 2)
    # Small MemTables, so that batches go through the log, flushes and generations alike.
    small = {"max_memtable_rows": 3 * rows_per_file}
    keyed = database.create_table(
        "keyed", SCHEMA, primary_key="id", regions=regions, writer_defaults=small
    )
    log = database.create_table("log", SCHEMA, regions=regions, writer_defaults=small)
    assert run(directory, kills, rng) == kills

    changes = all_changes(directory / "changes")
    assert len(changes) == files * rows_per_file
    expected: dict[int, str] = {}
    for one in changes:
        expected.pop(one["id"], None)
        if one["_op"] == "upsert":
            expected[one["id"]] = one["value"]
    found = {one["id"]: one["value"] for one in keyed.to_arrow().to_pylist()}
    assert found == expected
    assert keyed.count() == len(expected)
    every = Counter(one["value"] for one in changes)
    assert Counter(one["value"] for one in log.to_arrow().to_pylist()) == every

    for table in (keyed, log):
        table.flush(recover=True)
        table.maintain()
    plain = lance.dataset(keyed.uri).to_table().to_pylist()
    assert {one["id"]: one["value"] for one in plain} == expected
    assert len(plain) == len(expected)
    assert Counter(lance.dataset(log.uri).to_table().column("value").to_pylist()) == every
