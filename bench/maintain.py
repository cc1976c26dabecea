"""Maintenance: how fast generations are merged, and what reads feel of it while rows stream in.

Merging: twenty generations of 50,000 rows, half of them new keys, go into 1,000,000 rows. The
contender is what Lance offers: one `merge_insert` for each generation, with its progress marked.
Each run is a process of its own on a copy of the same table; contenders take turns.

Steady state: 2,000 rows a second are written for five minutes while another process keeps the
table maintained and a third one reads. Read latencies are compared with those of the same table
at rest.

    python -m bench.maintain [--rows N] [--rounds N] [--seconds N] [--only merge|steady] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import penstock
from bench.data import SCHEMA, Rows, create_search_indexes
from bench.figures import quantiles
from penstock.cli.upkeep import give_way
from penstock.index.primary_key import mark_primary_key

GENERATIONS = 20
GENERATION_ROWS = 50_000
WRITE_ROWS = 8_192
CALL_ROWS = 10_000

REGIONS = 4
STEADY_ROWS_PER_S = 2_000
STEADY_CALL_ROWS = 100
STEADY_MEMTABLE_ROWS = 25_000
STEADY_EVERY_SECONDS = 10.0
STEADY_RETAIN_SECONDS = 30.0
READ_PAUSE_SECONDS = 0.02
MARKER = "last acknowledged"

Figures = dict[str, float]


def build_base(directory: Path, rows: Rows, count: int) -> penstock.Table:
    schema = mark_primary_key(SCHEMA, ["id"])

    def stream() -> Iterator[pa.RecordBatch]:
        for first in range(0, count, WRITE_ROWS):
            batch = rows.batch(min(WRITE_ROWS, count - first))
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    reader = pa.RecordBatchReader.from_batches(schema, stream())
    lance.write_dataset(reader, str(directory / "t.lance"), enable_stable_row_ids=True)
    return penstock.connect(directory).open_table("t", adopt=True)


# --- merging -------------------------------------------------------------------------------


def build_generations(directory: Path, base_rows: int) -> None:
    rows = Rows()
    random = np.random.default_rng(11)
    table = build_base(directory, rows, base_rows)
    with table.writer(max_memtable_rows=10 * GENERATION_ROWS) as writer:
        for _ in range(GENERATIONS):
            for _ in range(GENERATION_ROWS // CALL_ROWS):
                batch = rows.batch(CALL_ROWS)
                known = random.integers(0, base_rows, CALL_ROWS)
                ids = np.where(random.random(CALL_ROWS) < 0.5, known, np.asarray(batch.column(0)))
                writer.upsert(batch.set_column(0, SCHEMA.field("id"), pa.array(ids)))
            writer.flush()
    table.close()


def merge_ours(directory: Path) -> None:
    report = penstock.connect(directory).open_table("t").merge()
    assert report.generations == GENERATIONS, report


def merge_lance(directory: Path) -> None:
    """One `merge_insert` for each generation."""
    uri = str(directory / "t.lance")
    for generation, path in generations_of(directory):
        dataset = lance.dataset(uri)
        rows = lance.dataset(f"{uri}/_mem_wal/{path[0]}/{path[1]}")
        columns = [field.name for field in SCHEMA]
        merge = dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge = merge.mark_sstables_as_compacted(
            [lance.mem_wal.CompactedSsTable(path[0], generation)]
        )
        merge.execute(rows.scanner(columns=columns).to_reader())


def merge_nothing(directory: Path) -> None:
    """What a process needs before it merges anything."""
    penstock.connect(directory).open_table("t")


MERGERS: dict[str, Callable[[Path], None]] = {
    "penstock": merge_ours,
    "lance": merge_lance,
    "nothing": merge_nothing,
}


def generations_of(directory: Path) -> list[tuple[int, tuple[str, str]]]:
    from penstock.memwal.regions import load_manifests

    base = penstock.connect(directory).open_table("t")._base
    (manifest,) = load_manifests(base.store, base.seams)
    return [
        (flushed.generation, (str(manifest.region_id), flushed.path))
        for flushed in manifest.flushed_generations
    ]


def run_merger(name: str, directory: Path) -> None:
    """In a process of its own: merge, and say how long it took and how much memory."""
    began = time.perf_counter()
    MERGERS[name](directory)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = lance.dataset(str(directory / "t.lance")).count_rows()
    print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024, "rows": rows}))


def compare_mergers(place: Path, base_rows: int, rounds: int) -> dict[str, Figures]:
    origin = place / "origin"
    build_generations(origin, base_rows)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in MERGERS}
    for _ in range(rounds):
        for name, runs in taken.items():
            copy = place / "copy"
            # Files never change once written, so the copy may share them.
            shutil.copytree(origin, copy, copy_function=os.link)
            os.sync()  # or a run would wait for what the one before it wrote
            child = subprocess.run(
                [sys.executable, "-m", "bench.maintain", "--merger", name, "--dir", str(copy)],
                capture_output=True,
                text=True,
                check=True,
            )
            runs.append(json.loads(child.stdout.splitlines()[-1]))
            shutil.rmtree(copy)
    assert len({run["rows"] for name in ("penstock", "lance") for run in taken[name]}) == 1
    merged = GENERATIONS * GENERATION_ROWS
    return {
        name: {
            "rows_per_s": merged / statistics.median(run["seconds"] for run in runs),
            "peak_mib": statistics.median(run["peak_mib"] for run in runs),
        }
        for name, runs in taken.items()
    }


def print_mergers(figures: dict[str, Figures]) -> None:
    print(f"\nmerging {GENERATIONS} generations of {GENERATION_ROWS:,} rows")
    idle = figures["nothing"]["peak_mib"]
    for name in ("penstock", "lance"):
        run = figures[name]
        print(
            f"  {name:10} {run['rows_per_s']:>10,.0f} rows/s   peak {run['peak_mib']:>7,.0f} MiB "
            f"({run['peak_mib'] - idle:,.0f} above a process that merges nothing)"
        )
    ours, theirs = figures["penstock"], figures["lance"]
    print(
        f"  penstock: {ours['rows_per_s'] / theirs['rows_per_s']:.2f}x the speed, "
        f"{ours['peak_mib'] / theirs['peak_mib']:.2f}x the memory"
    )


# --- steady state --------------------------------------------------------------------------


def build_steady(directory: Path, base_rows: int) -> None:
    rows = Rows()
    table = build_base(directory, rows, base_rows)
    dataset = lance.dataset(table.uri)
    create_search_indexes(dataset)
    table = penstock.connect(directory).open_table("t")
    table.set_regions(penstock.bucket("id", REGIONS))
    table.upsert(rows.batch(1_000))
    table.flush()
    table.close()


def write_steadily(directory: Path, base_rows: int, seconds: float) -> None:
    """In a process of its own: as many rows a second as asked for, and how long each call took."""
    table = penstock.connect(directory).open_table("t")
    rows = Rows(13)
    rows.next_id = 2 * base_rows
    random = np.random.default_rng(17)
    pool = [rows.batch(STEADY_CALL_ROWS) for _ in range(200)]
    taken, late = [], 0.0
    with table.writer(max_memtable_rows=STEADY_MEMTABLE_ROWS) as writer:
        began = time.perf_counter()
        calls = int(seconds * STEADY_ROWS_PER_S / STEADY_CALL_ROWS)
        for number in range(calls):
            batch = pool[number % len(pool)]
            known = random.integers(0, base_rows, STEADY_CALL_ROWS)
            fresh = rows.next_id + np.arange(STEADY_CALL_ROWS)
            rows.next_id += STEADY_CALL_ROWS
            ids = np.where(random.random(STEADY_CALL_ROWS) < 0.8, known, fresh)
            at = began + number * STEADY_CALL_ROWS / STEADY_ROWS_PER_S
            late = max(late, time.perf_counter() - at)
            time.sleep(max(0.0, at - time.perf_counter()))
            call = time.perf_counter()
            writer.upsert(batch.set_column(0, SCHEMA.field("id"), pa.array(ids)))
            taken.append(time.perf_counter() - call)
            mark(directory, int(ids[-1]))
        wrote = calls * STEADY_CALL_ROWS / (time.perf_counter() - began)
    print(json.dumps({"rows_per_s": wrote, "late_s": late, "latency": quantiles(taken)}))


def maintain_steadily(directory: Path, seconds: float) -> None:
    """In a process of its own: what `penstock maintain --every` does."""
    give_way()
    table = penstock.connect(directory).open_table("t")
    end = time.monotonic() + seconds
    rounds, taken, reports = 0, [], []
    while time.monotonic() < end:
        began = time.perf_counter()
        reports.append(str(table.maintain(retain_seconds=STEADY_RETAIN_SECONDS)))
        taken.append(time.perf_counter() - began)
        rounds += 1
        time.sleep(max(0.0, STEADY_EVERY_SECONDS - taken[-1]))
    print(reports[-1], file=sys.stderr)
    print(json.dumps({"rounds": rounds, "seconds": quantiles(taken)}))


def read_steadily(table: penstock.Table, seconds: float, rows: int) -> dict[str, list[float]]:
    """Reads of each kind in turn, at the pace of a person's clicks, and how long each took."""
    random = np.random.default_rng(19)
    batch = Rows(7).batch(2_000)
    vectors = np.stack(batch.column("vector").to_numpy(zero_copy_only=False))
    bodies = batch.column("body").to_pylist()
    words = np.array([word for body in bodies for word in body.split()])
    kinds: dict[str, Callable[[], Any]] = {
        "get": lambda: table.get(int(random.integers(0, rows))),
        "vector search": lambda: (
            table.search(vectors[random.integers(0, len(vectors))]).limit(10).to_arrow()
        ),
        "text search": lambda: (
            table.search(" ".join(random.choice(words, 2)), "body").limit(10).to_arrow()
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, ask in kinds.items():
            began = time.perf_counter()
            ask()
            taken[name].append(time.perf_counter() - began)
            time.sleep(READ_PAUSE_SECONDS)
    return taken


def mark(directory: Path, key: int) -> None:
    """Say which row was acknowledged last, and when."""
    path = directory / MARKER
    path.with_suffix(".new").write_text(f"{key} {time.time()}")
    path.with_suffix(".new").replace(path)


def freshness(table: penstock.Table, directory: Path) -> list[float]:
    """Seconds from the acknowledgement of the next row to the answer of a read that has it.

    Nothing if there is no next row within a second, because the writer has ended.
    """
    before = (directory / MARKER).read_text()
    end = time.monotonic() + 1.0
    while (said := (directory / MARKER).read_text()) == before:
        if time.monotonic() > end:
            return []
        time.sleep(0.001)
    key, acknowledged = said.split()
    while table.get(int(key)) is None:
        continue
    return [time.time() - float(acknowledged)]


def files_of(directory: Path) -> int:
    return sum(1 for path in directory.rglob("*") if path.is_file())


def steady_state(place: Path, base_rows: int, seconds: int) -> dict[str, Any]:
    build_steady(place, base_rows)
    table = penstock.connect(place).open_table("t")
    read_steadily(table, 3, base_rows)  # to warm up
    idle = read_steadily(table, min(60, seconds), base_rows)

    def child(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench.maintain", "--rows", str(base_rows), *arguments]
        command += ["--seconds", str(seconds), "--dir", str(place)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    files = [files_of(place)]
    with child("--part", "write") as writer, child("--part", "maintain") as maintainer:
        busy: dict[str, list[float]] = {name: [] for name in idle}
        fresh = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, taken in read_steadily(table, 10, base_rows).items():
                busy[name] += taken
            for _ in range(10):
                fresh += freshness(table, place)
            files.append(files_of(place))
        said = [json.loads(run.communicate()[0].splitlines()[-1]) for run in (writer, maintainer)]
    return {
        "idle": {name: quantiles(taken) for name, taken in idle.items()},
        "busy": {name: quantiles(taken) for name, taken in busy.items()},
        "files": files,
        "writer": said[0],
        "maintainer": said[1],
        "freshness": quantiles(fresh),
    }


def print_steady(figures: dict[str, Any]) -> None:
    print("\nsteady state")
    for name, idle in figures["idle"].items():
        busy = figures["busy"][name]
        print(
            f"  {name:14} at rest {idle['median_ms']:>7.2f} ms  p99 {idle['p99_ms']:>7.2f} ms   "
            f"busy {busy['median_ms']:>7.2f} ms  p99 {busy['p99_ms']:>7.2f} ms "
            f"max {busy['max_ms']:>7.2f} ms   p99 {busy['p99_ms'] / idle['p99_ms']:.2f}x"
        )
    writer, maintainer = figures["writer"], figures["maintainer"]
    print(f"  written {writer['rows_per_s']:,.0f} rows/s, calls {writer['latency']}")
    print(f"  maintained {maintainer['rounds']} times, each {maintainer['seconds']}")
    print(f"  from acknowledgement to answer: {figures['freshness']}")
    print(f"  files every 10 s: {' '.join(map(str, figures['files']))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--only", choices=("merge", "steady"))
    parser.add_argument("--merger", choices=tuple(MERGERS), help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("write", "maintain"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    if arguments.merger:
        run_merger(arguments.merger, arguments.dir)
        return
    if arguments.part == "write":
        write_steadily(arguments.dir, arguments.rows, arguments.seconds)
        return
    if arguments.part == "maintain":
        maintain_steadily(arguments.dir, arguments.seconds)
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        place = Path(directory)
        if arguments.only != "steady":
            figures["merge"] = compare_mergers(place / "merge", arguments.rows, arguments.rounds)
            print_mergers(figures["merge"])
        if arguments.only != "merge":
            figures["steady"] = steady_state(place / "steady", arguments.rows, arguments.seconds)
            print_steady(figures["steady"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
