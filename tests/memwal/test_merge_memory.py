"""Merges and memory, each in a process of its own, whose resident set is watched."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest

import penstock

WIDTH = 256
CALL_ROWS = 5_000
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), WIDTH)),
    ]
)
ROW_BYTES = WIDTH * 4
MIB = 1 << 20


def some_rows(first: int, count: int) -> pa.RecordBatch:
    values = np.random.default_rng(first).random(count * WIDTH, dtype=np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH)
    ids = pa.array(np.arange(first, first + count))
    return pa.RecordBatch.from_arrays([ids, vectors], schema=SCHEMA)


def merge_one_generation(directory: Path, rows: int) -> list[float]:
    """How much memory a merge of so many rows takes at its peak, in MiB."""
    table = penstock.connect(directory).open_table("t")
    process = psutil.Process()
    before = process.memory_info().rss
    peak, over = [before], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert table.merge().rows == rows
    finally:
        over.set()
        watcher.join()
    return [(peak[0] - before) / MIB]


def merge_again_and_again(directory: Path, rounds: int) -> list[float]:
    """The resident set after each merge, in MiB."""
    table = penstock.connect(directory).open_table("t")
    process = psutil.Process()
    found = []
    for number in range(rounds):
        table.upsert(some_rows(number % 2 * CALL_ROWS, CALL_ROWS))
        table.flush()
        table.merge()
        found.append(process.memory_info().rss / MIB)
    return found


def in_a_process(work: str, directory: Path, number: int) -> list[float]:
    code = (
        f"import json, pathlib; from tests.memwal import test_merge_memory as child; "
        f"print(json.dumps(child.{work}(pathlib.Path({str(directory)!r}), {number})))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=240
    )
    assert done.returncode == 0, done.stderr
    measured: list[float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def test_failure_25_memory_of_repeated_merges_does_not_grow(tmp_path: Path) -> None:
    penstock.connect(tmp_path).create_table("t", SCHEMA, primary_key="id")
    resident = in_a_process("merge_again_and_again", tmp_path, 40)
    early, late = statistics.median(resident[12:20]), statistics.median(resident[-8:])
    # Twenty merges lie between the two, each of so many rows.
    assert late - early < 0.5 * 20 * CALL_ROWS * ROW_BYTES / MIB, resident


@pytest.mark.soak
def test_memory_of_a_merge_does_not_follow_the_size_of_a_generation(tmp_path: Path) -> None:
    taken = []
    sizes = (200_000, 800_000)
    for rows in sizes:
        lake = tmp_path / str(rows)
        table = penstock.connect(lake).create_table("t", SCHEMA, primary_key="id")
        with table.writer(
            max_memtable_rows=10**6, max_memtable_bytes=1000 * MIB, max_unflushed_bytes=2000 * MIB
        ) as writer:
            for first in range(0, rows, CALL_ROWS):
                writer.upsert(some_rows(first, CALL_ROWS))
            writer.flush()
        table.close()
        taken += in_a_process("merge_one_generation", lake, rows)
    more = (sizes[1] - sizes[0]) * ROW_BYTES / MIB
    assert taken[1] - taken[0] < 0.3 * more, taken
