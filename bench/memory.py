"""Is memory flat over a long run? Writes through many flushes and watches the resident set.

python -m bench.memory [--rows N] [--dir DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil

import penstock
from bench.data import Rows
from bench.write import build_base

ROWS_PER_CALL = 1_000
MEMTABLE_ROWS = 20_000
KEYS = 200_000
LIMITS = {
    "max_memtable_bytes": 24 << 20,
    "max_batch_bytes": 8 << 20,
    "max_unflushed_bytes": 64 << 20,
}
"""Tight, so that the run reaches its steady state soon: writes wait for flushes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    process = psutil.Process()
    samples: list[float] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        rows = Rows()
        build_base(f"{directory}/t.lance", rows.batch(5_000), indexed=True)
        table = penstock.connect(directory).open_table("t", adopt=True)
        pool = [rows.batch(ROWS_PER_CALL) for _ in range(KEYS // ROWS_PER_CALL)]
        began = time.perf_counter()
        with table.writer(max_memtable_rows=MEMTABLE_ROWS, **LIMITS) as writer:
            for number in range(arguments.rows // ROWS_PER_CALL):
                writer.upsert(pool[number % len(pool)])
                if (number + 1) * ROWS_PER_CALL % MEMTABLE_ROWS == 0:
                    samples.append(process.memory_info().rss / 2**20)
            stats = writer.stats()
        took = time.perf_counter() - began
    half = len(samples) // 2
    early, late = samples[half // 2 : half], samples[-half // 2 :]
    print(f"{stats['rows']:,} rows, {stats['flushes']} flushes in {took:.0f} s")
    print(f"resident MiB, second quarter: median {statistics.median(early):.0f}")
    print(f"resident MiB, last quarter:   median {statistics.median(late):.0f}")
    print(f"growth: {statistics.median(late) / statistics.median(early) - 1:+.1%}")
    print("every fifth sample: " + " ".join(f"{sample:.0f}" for sample in samples[::5]))


if __name__ == "__main__":
    main()
