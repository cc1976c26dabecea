"""The write path against what a user would pick instead, in one run.

Contenders, each writing the same rows durably, taking turns so that a noisy machine treats them
alike:

- penstock, indexed: vector, text and key indexes maintained before the acknowledgement
- penstock, not indexed
- Lance's ShardWriter with vector, text and key indexes maintained
- Lance's merge_insert into a table without indexes
- a bare crash-safe put of the same bytes: write, fdatasync, rename, fsync of the directory

    python -m bench.write [--quick] [--json FILE] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

import penstock
from bench.data import SCHEMA, Rows
from penstock.index.primary_key import mark_primary_key

BASE_ROWS = 10_000
INDEXES = ("vector_idx", "body_idx", "id_idx")
Put = Callable[[pa.RecordBatch], None]


def build_base(uri: str, rows: pa.RecordBatch, *, indexed: bool) -> lance.LanceDataset:
    schema = mark_primary_key(SCHEMA, ["id"])
    table = pa.Table.from_batches([rows]).cast(schema)
    dataset = lance.write_dataset(table, uri)
    if indexed:
        dataset.create_index(
            "vector", "IVF_PQ", num_partitions=64, num_sub_vectors=16, name="vector_idx"
        )
        dataset.create_scalar_index("body", "INVERTED", name="body_idx")
        dataset.create_scalar_index("id", "BTREE", name="id_idx")
    return dataset


class Contenders:
    """Every contender with a table of its own, all with the same rows to begin with."""

    def __init__(self, directory: Path, rows: Rows) -> None:
        base = rows.batch(BASE_ROWS)
        indexed = directory / "indexed.lance"
        plain = directory / "plain.lance"
        build_base(str(indexed), base, indexed=True)
        build_base(str(plain), base, indexed=False)
        db_directory = directory / "lake"
        db_directory.mkdir()
        for name in ("a", "b"):
            shutil.copytree(indexed, db_directory / f"{name}.lance")
        shutil.copytree(indexed, directory / "shard.lance")
        db = penstock.connect(db_directory)
        self.tables = [db.open_table(name, adopt=True) for name in ("a", "b")]
        self.writers = [
            self.tables[0].writer(indexed=True),
            self.tables[1].writer(indexed=False),
        ]
        shard = lance.dataset(str(directory / "shard.lance"))
        shard.initialize_mem_wal(unsharded=True, maintained_indexes=list(INDEXES))
        self.shard = lance.dataset(str(directory / "shard.lance")).mem_wal_writer(str(uuid.uuid4()))
        self.merged = lance.dataset(str(plain))
        self.bare = BarePut(directory / "bare")
        self.puts: dict[str, Put] = {
            "penstock indexed": lambda batch: _ignore(self.writers[0].upsert(batch)),
            "penstock": lambda batch: _ignore(self.writers[1].upsert(batch)),
            "lance ShardWriter": self.shard.put,
            "lance merge_insert": self._merge_insert,
            "bare put": self.bare,
        }

    def _merge_insert(self, batch: pa.RecordBatch) -> None:
        builder = self.merged.merge_insert("id")
        builder.when_matched_update_all().when_not_matched_insert_all()
        builder.execute(pa.Table.from_batches([batch]))

    def close(self) -> None:
        for writer in self.writers:
            writer.close(flush=False)
        self.shard.close()


class BarePut:
    """The least a crash-safe write can cost on this disk, with the bytes of a WAL entry."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = str(directory)
        self._fd = os.open(directory, os.O_RDONLY)
        self._number = 0

    def __call__(self, batch: pa.RecordBatch) -> None:
        self._number += 1
        body = batch.schema.serialize().to_pybytes() + batch.serialize().to_pybytes()
        name = f"{self._directory}/{self._number}"
        fd = os.open(f"{name}.tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(fd, body)
        os.fdatasync(fd)
        os.close(fd)
        os.rename(f"{name}.tmp", name)
        os.fsync(self._fd)


def _ignore(_: int) -> None:
    return None


def compare(
    contenders: Contenders, rows: Rows, rows_per_call: int, rounds: int, calls: dict[str, int]
) -> dict[str, Any]:
    """Median seconds per call of every contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders.puts}
    order = list(contenders.puts)
    for number in range(rounds + 1):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            put = contenders.puts[name]
            batches = [rows.batch(rows_per_call) for _ in range(calls[name])]
            for batch in batches:
                began = time.perf_counter()
                put(batch)
                took = time.perf_counter() - began
                if number:  # the first round warms up
                    seconds[name].append(took)
    return {
        name: {
            "median_ms": statistics.median(taken) * 1e3,
            "p99_ms": sorted(taken)[int(len(taken) * 0.99)] * 1e3,
            "rows_per_s": rows_per_call / statistics.median(taken),
            "mean_rows_per_s": rows_per_call * len(taken) / sum(taken),
            "calls": len(taken),
        }
        for name, taken in seconds.items()
    }


def threads(contenders: Contenders, rows: Rows, calls: int, rounds: int) -> dict[str, float]:
    """Rows per second at one row per call, by one thread and by eight, taking turns."""
    result: dict[str, list[float]] = {}
    for _ in range(rounds):
        for label, writer in zip(("indexed", "not indexed"), contenders.writers, strict=True):
            for count in (1, 8):
                shares = [[rows.batch(1) for _ in range(calls)] for _ in range(count)]
                workers = [
                    threading.Thread(target=lambda s=share, w=writer: [w.upsert(b) for b in s])
                    for share in shares
                ]
                began = time.perf_counter()
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
                rate = calls * count / (time.perf_counter() - began)
                result.setdefault(f"{label}, {count} threads", []).append(rate)
    return {name: statistics.median(rates) for name, rates in result.items()}


def report(figures: dict[str, Any]) -> None:
    for size, taken in figures["sizes"].items():
        print(f"\n{size} rows per call")
        print(f"  {'contender':22} {'median':>10} {'p99':>10} {'rows/s':>10} {'calls':>6}")
        for name, numbers in taken.items():
            print(
                f"  {name:22} {numbers['median_ms']:>7.2f} ms {numbers['p99_ms']:>7.2f} ms "
                f"{numbers['rows_per_s']:>10,.0f} {numbers['calls']:>6}"
            )
    print("\none row per call, rows/s")
    for name, rate in figures["threads"].items():
        print(f"  {name:22} {rate:>10,.0f}")
    print("\nratios                                                     measured   wanted")
    for what, (value, bound) in figures["ratios"].items():
        sign = ">=" if bound > 0 else "<="
        met = value >= bound if bound > 0 else value <= -bound
        print(f"  {what:56} {value:>7.2f}x  {sign} {abs(bound):g}x  {'' if met else 'MISSED'}")


def ratios(figures: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What was asked for: a positive bound is a least ratio, a negative one a greatest."""
    sizes, found = figures["sizes"], {}

    def rate(size: str, name: str) -> float:
        return float(sizes[size][name]["rows_per_s"])

    for size in ("100", "1000"):
        found[f"indexed, against ShardWriter, {size} rows per call"] = (
            rate(size, "penstock indexed") / rate(size, "lance ShardWriter"),
            10.0,
        )
    for size, bound in (("100", 5.0), ("1000", 3.0)):
        found[f"not indexed, against merge_insert, {size} rows per call"] = (
            rate(size, "penstock") / rate(size, "lance merge_insert"),
            bound,
        )
    for size in ("1", "100", "1000"):
        found[f"not indexed, latency against a bare put, {size} rows per call"] = (
            rate(size, "bare put") / rate(size, "penstock"),
            -2.0,
        )
    found["indexed, latency against a bare put, 1 row per call"] = (
        rate("1", "bare put") / rate("1", "penstock indexed"),
        -3.0,
    )
    for label in ("indexed", "not indexed"):
        found[f"{label}, 8 threads against 1, 1 row per call"] = (
            figures["threads"][f"{label}, 8 threads"] / figures["threads"][f"{label}, 1 threads"],
            3.0,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--dir", type=Path, help="where to write (a disk, not a RAM disk)")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else 12
    rows = Rows()
    figures: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "sizes": {},
    }
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        contenders = Contenders(Path(directory), rows)
        # First, so that no flush of the larger runs goes on beside it.
        figures["threads"] = threads(contenders, rows, 150, max(3, rounds // 2))
        for size, calls in ((1, 20), (100, 20), (1000, 8)):
            # The same rows for everybody: how much is in memory already decides what a put costs.
            share = dict.fromkeys(contenders.puts, calls)
            figures["sizes"][str(size)] = compare(contenders, rows, size, rounds, share)
        contenders.close()
    figures["ratios"] = ratios(figures)
    report(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
