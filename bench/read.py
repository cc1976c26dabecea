"""Merged reads against Lance's own LSM planners and against a plain table, in one run.

One table of many base rows with four regions, three generations each and rows in memory; the same
rows merged into one plain Lance table; and Lance's `LsmScanner` and `LsmPointLookupPlanner` on the
very same directory. Contenders take turns; figures are medians.

    python -m bench.read [--rows N] [--rounds N] [--json FILE] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.mem_wal import LsmPointLookupPlanner, LsmScanner, ShardSnapshot

import penstock
from bench.data import SCHEMA, Rows
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.regions import load_manifests

REGIONS = 4
GENERATIONS = 3
GENERATION_ROWS = 6_000
MEMORY_ROWS = 2_000
BATCH_KEYS = 1_000


class Tables:
    """The live table, its merged twin, and Lance's view of the live one."""

    def __init__(self, directory: Path, base_rows: int) -> None:
        rows = Rows()
        random = np.random.default_rng(3)
        schema = mark_primary_key(SCHEMA, ["id"])
        uri = directory / "live.lance"
        for first in range(0, base_rows, 100_000):
            batch = rows.batch(min(100_000, base_rows - first))
            table = pa.Table.from_batches([batch]).cast(schema)
            mode = "append" if first else "create"
            lance.write_dataset(table, str(uri), mode=mode)
        dataset = lance.dataset(str(uri))
        dataset.create_scalar_index("id", "BTREE", name="id_idx")
        self.table = penstock.connect(directory).open_table("live", adopt=True)
        self.table.set_regions(penstock.bucket("id", REGIONS))
        self.writer = self.table.writer(indexed=False)

        def changes(count: int) -> pa.RecordBatch:
            batch = rows.batch(count)
            fresh = np.asarray(batch.column("id"))
            known = random.integers(0, base_rows, count)
            ids = np.where(random.random(count) < 0.8, known, fresh)
            return batch.set_column(0, SCHEMA.field("id"), pa.array(ids))

        for _ in range(GENERATIONS):
            self.writer.upsert(changes(GENERATION_ROWS * REGIONS))
            self.writer.flush()
        self.writer.upsert(changes(MEMORY_ROWS))
        merged = self.table.to_arrow()
        self.merged = lance.write_dataset(merged, str(directory / "merged.lance"))
        self.merged.create_scalar_index("id", "BTREE", name="id_idx")
        self.ids = np.asarray(merged.column("id"))
        self.dataset = lance.dataset(str(uri))
        self.manifests = load_manifests(self.table._base.store, self.table._base.seams)

    def snapshots(self) -> list[ShardSnapshot]:
        found = []
        for manifest in self.manifests:
            snapshot = ShardSnapshot(str(manifest.region_id))
            snapshot = snapshot.with_spec_id(manifest.region_spec_id)
            snapshot = snapshot.with_current_generation(manifest.current_generation)
            for flushed in manifest.flushed_generations:
                snapshot = snapshot.with_sstable(flushed.generation, flushed.path)
            found.append(snapshot)
        return found

    def lance_lookup(self, key: int) -> None:
        planner = LsmPointLookupPlanner(self.dataset, self.snapshots())
        planner.plan_lookup(pa.array([key], pa.int64())).to_table()

    def lance_scan(self, columns: list[str] | None) -> None:
        scanner = LsmScanner.from_snapshots(self.dataset, self.snapshots())
        (scanner.project(columns) if columns else scanner).to_batches()


def take_turns(
    contenders: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {
        name: {
            "median_ms": statistics.median(taken) * 1e3,
            "p99_ms": sorted(taken)[int(len(taken) * 0.99)] * 1e3,
        }
        for name, taken in seconds.items()
    }


def measure(tables: Tables, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(5)
    table, narrow = tables.table, ["id", "body"]

    def key() -> int:
        return int(random.choice(tables.ids))

    def keys() -> list[int]:
        return [int(k) for k in random.choice(tables.ids, BATCH_KEYS, replace=False)]

    def drain(reader: pa.RecordBatchReader) -> None:
        for _ in reader:
            continue

    return {
        "lookup of one key": take_turns(
            {"penstock": lambda: table.get(key()), "lance": lambda: tables.lance_lookup(key())},
            rounds * 5,
        ),
        f"lookup of {BATCH_KEYS} keys": take_turns(
            {"penstock": lambda: table.get_many(keys())}, rounds
        ),
        "scan of whole rows": take_turns(
            {
                "penstock": lambda: drain(table.scan()),
                "plain": lambda: drain(tables.merged.scanner().to_reader()),
                "lance": lambda: tables.lance_scan(None),
            },
            max(3, rounds // 4),
        ),
        "scan of two columns": take_turns(
            {
                "penstock": lambda: drain(table.scan(narrow)),
                "plain": lambda: drain(tables.merged.scanner(columns=narrow).to_reader()),
                "lance": lambda: tables.lance_scan(narrow),
            },
            max(3, rounds // 4),
        ),
        "scan of the key": take_turns(
            {
                "penstock": lambda: drain(table.scan(["id"])),
                "plain": lambda: drain(tables.merged.scanner(columns=["id"]).to_reader()),
            },
            max(3, rounds // 4),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        tables = Tables(Path(directory), arguments.rows)
        figures = measure(tables, arguments.rounds)
        tables.writer.close(flush=False)
    for what, taken in figures.items():
        print(f"\n{what}, {arguments.rows:,} base rows")
        ours = taken["penstock"]["median_ms"]
        for name, numbers in taken.items():
            print(
                f"  {name:10} {numbers['median_ms']:>9.2f} ms  p99 {numbers['p99_ms']:>9.2f} ms"
                f"  penstock takes {ours / numbers['median_ms']:.2f}x its time"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
