"""Spark: tables beside what Spark does with parquet, and beside `merge_insert` in `foreachBatch`.

2,000,000 rows of an id, a vector of 32 numbers and a short text; tables have 4 regions. All in one
session on two cores, contenders taking turns.

- write: upsert, bulk load and a load of files, against `df.write.parquet` of the same frame
- stream: micro-batches of 10,000 rows, half of them updates of 1,000,000 rows, against
  `foreachBatch` with `merge_insert`, and against a sink that does nothing
- read: the merged view, a tenth of it in generations, against Spark reading parquet
- merge: 8 regions as a Spark job, against the same merge in one process

    python -m bench.spark [--rows N] [--rounds N] [--only write|stream|read|merge] [--dir DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import penstock
from penstock.index.primary_key import mark_primary_key
from penstock.spark import Pipeline, load_files, local_session, read

DIMENSIONS = 32
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), DIMENSIONS)),
        pa.field("body", pa.string()),
    ]
)
SPARK_SCHEMA = "id long, vector array<float>, body string"
FILES = 4
BATCH_ROWS = 10_000
BATCHES = 20
COLD_BATCHES = 3
TURNS = 3
REGIONS = 4
MERGED_REGIONS = 8

Figures = dict[str, float]


def rows(first: int, count: int, word: str, ids: np.ndarray[Any, Any] | None = None) -> pa.Table:
    random = np.random.default_rng(first)
    values = random.random(count * DIMENSIONS, dtype=np.float32)
    keys = np.arange(first, first + count) if ids is None else ids
    texts = pa.array([f"{word} number {key:09}" for key in keys.tolist()])
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), DIMENSIONS)
    return pa.Table.from_arrays([pa.array(keys), vectors, texts], schema=SCHEMA)


def write_files(directory: Path, count: int, files: int, word: str = "item") -> list[str]:
    directory.mkdir(parents=True)
    share = count // files
    for number in range(files):
        path = directory / f"{number:04}.parquet"
        table = rows(number * share, share, word)
        vectors = table.column("vector").combine_chunks().cast(pa.list_(pa.float32()))
        pq.write_table(table.set_column(1, "vector", vectors), path)
    return sorted(str(path) for path in directory.iterdir())


def create(directory: Path, regions: int = REGIONS) -> penstock.Table:
    shutil.rmtree(directory, ignore_errors=True)
    database = penstock.connect(directory)
    by = penstock.bucket("id", regions)
    return database.create_table("t", SCHEMA, primary_key="id", regions=by)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each; the first round, in which everything is cold, does not count."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            seconds = run()
            if number:
                taken[name].append(seconds)
            os.sync()  # or the next one would wait for what this one wrote
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


# --- write ---------------------------------------------------------------------------------


def bench_write(spark: SparkSession, place: Path, count: int, rounds: int) -> Figures:
    files = write_files(place / "source", count, FILES)
    frame = spark.read.parquet(*files)

    def parquet() -> float:
        shutil.rmtree(place / "out", ignore_errors=True)
        return timed(lambda: frame.write.parquet(str(place / "out")))

    def into(mode: str) -> float:
        table = create(place / "lake")
        writer = frame.write.format("penstock").mode("append").option("mode", mode)
        seconds = timed(lambda: writer.save(table.uri))
        assert table.count() == count
        return seconds

    def by_files() -> float:
        table = create(place / "lake")
        seconds = timed(lambda: load_files(spark, files, table.uri))
        assert table.count() == count
        return seconds

    seconds = in_turns(
        {
            "parquet": parquet,
            "upsert": lambda: into("upsert"),
            "bulk": lambda: into("bulk"),
            "files": by_files,
        },
        rounds,
    )
    figures = {f"{name}_rows_per_s": count / taken for name, taken in seconds.items()}
    print("\nwrite")
    for name, taken in seconds.items():
        ratio = seconds["parquet"] / taken
        print(f"  {name:8} {count / taken:>12,.0f} rows/s   {ratio:.2f}x of parquet")
    return figures


# --- stream --------------------------------------------------------------------------------


def bench_stream(spark: SparkSession, place: Path, count: int) -> Figures:
    base_rows = count // 2
    source = place / "changes"
    source.mkdir(parents=True)
    random = np.random.default_rng(5)
    for number in range(BATCHES + COLD_BATCHES):
        known = random.choice(base_rows, BATCH_ROWS // 2, replace=False)
        first = base_rows + number * BATCH_ROWS
        ids = np.concatenate([known, np.arange(first, first + BATCH_ROWS // 2)])
        table = rows(first, BATCH_ROWS, "change", ids)
        vectors = table.column("vector").combine_chunks().cast(pa.list_(pa.float32()))
        path = source / f"{number:04}.parquet"
        pq.write_table(table.set_column(1, "vector", vectors), path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))

    def base(uri: str) -> None:
        schema = mark_primary_key(SCHEMA, ["id"])
        data = rows(0, base_rows, "item").cast(schema)
        lance.write_dataset(data, uri, enable_stable_row_ids=True)

    changes = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", 1)

    runs = itertools.count()

    def run(name: str, writer: Any, uri: str | None = None) -> float:
        checkpoint = str(place / f"checkpoint-{name}-{next(runs)}")
        writer = writer.option("checkpointLocation", checkpoint)
        writer = writer.queryName(name).trigger(availableNow=True)
        query = writer.start(uri) if uri else writer.start()
        query.awaitTermination()
        took = [p.durationMs["triggerExecution"] for p in query.recentProgress if p.numInputRows]
        assert len(took) == BATCHES + COLD_BATCHES, len(took)
        return float(statistics.median(took[COLD_BATCHES:])) / 1000

    merged = str(place / "merged.lance")
    base(merged)

    def merge(batch: DataFrame, _: int) -> None:
        change = batch.toArrow().cast(mark_primary_key(SCHEMA, ["id"]))
        builder = lance.dataset(merged).merge_insert("id")
        builder.when_matched_update_all().when_not_matched_insert_all().execute(change)

    (place / "lake").mkdir()
    base(str(place / "lake" / "t.lance"))
    live = penstock.connect(place / "lake").open_table("t", adopt=True)
    live.set_regions(penstock.bucket("id", REGIONS))

    def stream() -> Any:
        return changes.parquet(str(source)).writeStream

    contenders: dict[str, Callable[[], float]] = {
        "noop": lambda: run("noop", stream().format("noop")),
        "merge_insert": lambda: run("merge_insert", stream().foreachBatch(merge)),
        "penstock": lambda: run("penstock", stream().format("penstock"), live.uri),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, contender in contenders.items():
            taken[name].append(contender())
    # The first turn warms Spark up; in the later ones all keys are there already.
    seconds = {name: statistics.median(several[1:]) for name, several in taken.items()}
    assert live.count() == lance.dataset(merged).count_rows()
    print(f"\nstream, micro-batches of {BATCH_ROWS:,} rows")
    for name, taken in seconds.items():
        print(f"  {name:14} {taken * 1000:>7.0f} ms a batch  {BATCH_ROWS / taken:>10,.0f} rows/s")
    ratio = seconds["merge_insert"] / seconds["penstock"]
    above = {name: (taken - seconds["noop"]) * 1000 for name, taken in seconds.items()}
    print(
        f"  penstock: {ratio:.2f}x merge_insert; above a sink that does nothing "
        f"{above['penstock']:.0f} ms, merge_insert {above['merge_insert']:.0f} ms"
    )
    return {f"{name}_batch_ms": taken * 1000 for name, taken in seconds.items()}


# --- read ----------------------------------------------------------------------------------


def bench_read(spark: SparkSession, place: Path, count: int, rounds: int) -> Figures:
    files = write_files(place / "source", count, FILES)
    table = create(place / "lake")
    load_files(spark, files, table.uri)
    fresh = np.random.default_rng(3).choice(count, count // 10, replace=False)
    changes = rows(1, len(fresh), "change", fresh)
    with table.writer() as writer:
        for first in range(0, len(fresh), 50_000):
            writer.upsert(changes.slice(first, 50_000))
        writer.flush()
    assert table.count() == count

    def noop(frame: Callable[[], DataFrame]) -> float:
        return timed(lambda: frame().write.format("noop").mode("overwrite").save())

    seconds = in_turns(
        {
            "parquet": lambda: noop(lambda: spark.read.parquet(*files)),
            "penstock": lambda: noop(lambda: spark.read.format("penstock").load(table.uri)),
            "parquet, two columns": lambda: noop(
                lambda: spark.read.parquet(*files).select("id", "body")
            ),
            "penstock, two columns": lambda: noop(
                lambda: read(spark, table.uri, columns=["id", "body"])
            ),
        },
        rounds,
    )
    print("\nread")
    for name, taken in seconds.items():
        print(f"  {name:22} {taken * 1000:>7.0f} ms  {count / taken:>12,.0f} rows/s")
    print(
        f"  penstock: {seconds['parquet'] / seconds['penstock']:.2f}x of parquet; two columns "
        f"{seconds['penstock'] / seconds['penstock, two columns']:.2f}x faster than all"
    )
    return {f"read_{name}_ms": taken * 1000 for name, taken in seconds.items()}


# --- merge ---------------------------------------------------------------------------------


def bench_merge(spark: SparkSession, place: Path, count: int, rounds: int) -> Figures:
    origin = place / "origin"
    table = create(origin, MERGED_REGIONS)
    half = count // 2
    with table.writer(max_memtable_rows=10 * count) as writer:
        for number in range(4):
            # Half of the rows replace others.
            first = half * number // 4
            for at in range(first, first + half // 2, 50_000):
                upto = min(50_000, first + half // 2 - at)
                writer.upsert(rows(at, upto, f"round {number}"))
            writer.flush()
    table.close()

    def on_a_copy(work: Callable[[str], object]) -> Callable[[], float]:
        def run() -> float:
            copy = place / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(origin, copy, copy_function=os.link)
            os.sync()
            return timed(lambda: work(str(copy)))

        return run

    def in_process(copy: str) -> None:
        penstock.connect(copy).open_table("t").merge()

    def as_job(copy: str) -> None:
        Pipeline(spark, f"{copy}/t.lance").run(jobs=["merge"])

    seconds = in_turns(
        {"one process": on_a_copy(in_process), "spark job": on_a_copy(as_job)}, rounds
    )
    print(f"\nmerge of {MERGED_REGIONS} regions")
    for name, taken in seconds.items():
        print(f"  {name:12} {taken * 1000:>7.0f} ms")
    print(f"  spark job: {seconds['one process'] / seconds['spark job']:.2f}x the speed")
    return {f"merge_{name}_ms": taken * 1000 for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("write", "stream", "read", "merge"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    spark = local_session("bench", memory="4g")
    parts: dict[str, Callable[[Path], Figures]] = {
        "write": lambda place: bench_write(spark, place, arguments.rows, arguments.rounds),
        "stream": lambda place: bench_stream(spark, place, arguments.rows),
        "read": lambda place: bench_read(spark, place, arguments.rows, arguments.rounds),
        "merge": lambda place: bench_merge(spark, place, arguments.rows, arguments.rounds),
    }
    figures: dict[str, Figures] = {}
    for name in [arguments.only] if arguments.only else list(parts):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
            figures[name] = parts[name](Path(directory) / name)
    spark.stop()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
