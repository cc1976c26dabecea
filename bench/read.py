"""Merged reads against Lance's own LSM planners and against a plain table, in one run.

One table of many base rows with four regions, three generations each and rows in memory; the same
rows merged into one plain Lance table with the same indexes; and Lance's `LsmScanner`,
`LsmPointLookupPlanner` and `LsmVectorSearchPlanner` on the very same directory (which do not see
the rows in memory). Contenders take turns; figures are medians and 99th percentiles.

    python -m bench.read [--rows N] [--rounds N] [--json FILE] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.mem_wal import (
    LsmPointLookupPlanner,
    LsmScanner,
    LsmVectorSearchPlanner,
    ShardSnapshot,
)

import penstock
from bench.data import DIMENSIONS, SCHEMA, Rows, create_search_indexes
from bench.figures import quantiles
from penstock.index.ivf import exact_distances
from penstock.index.primary_key import mark_primary_key
from penstock.memwal.regions import load_manifests

REGIONS = 4
GENERATIONS = 3
GENERATION_SHARE = 0.006
MEMORY_SHARE = 0.002
"""Rows of each generation, and rows in memory, for each row of the base."""
BATCH_KEYS = 1_000
SMALL_ROWS = 10_000
WRITE_ROWS = 8_192
TOP = 10
NPROBES = 20
REFINE = 30
RECALL_QUERIES = 50

Figures = dict[str, dict[str, float]]


class Tables:
    """The live table, its merged twin, and Lance's view of the live one."""

    def __init__(self, directory: Path, base_rows: int, *, searched: bool = True) -> None:
        rows = Rows()
        random = np.random.default_rng(3)
        schema = mark_primary_key(SCHEMA, ["id"])
        uri = str(directory / "live.lance")

        def stream(count: int) -> Iterator[pa.RecordBatch]:
            for first in range(0, count, WRITE_ROWS):
                batch = rows.batch(min(WRITE_ROWS, count - first))
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

        reader = pa.RecordBatchReader.from_batches(schema, stream(base_rows))
        _index(lance.write_dataset(reader, uri), searched)
        self.table = penstock.connect(directory).open_table("live", adopt=True)
        self.table.set_regions(penstock.bucket("id", REGIONS))
        self.writer = self.table.writer()

        def changes(count: int) -> pa.RecordBatch:
            batch = rows.batch(count)
            fresh = np.asarray(batch.column("id"))
            known = random.integers(0, base_rows, count)
            ids = np.where(random.random(count) < 0.8, known, fresh)
            return batch.set_column(0, SCHEMA.field("id"), pa.array(ids))

        for _ in range(GENERATIONS):
            self.writer.upsert(changes(int(base_rows * GENERATION_SHARE) * REGIONS))
            self.writer.flush()
        self.writer.upsert(changes(int(base_rows * MEMORY_SHARE)))
        merged = self.table.to_arrow()
        self.merged = lance.write_dataset(
            merged.to_reader(WRITE_ROWS), str(directory / "merged.lance"), schema=merged.schema
        )
        _index(self.merged, searched)
        self.merged = lance.dataset(str(directory / "merged.lance"))
        self.ids = np.asarray(merged.column("id"))
        self.rows = merged if searched else merged.slice(0, 0)
        self.dataset = lance.dataset(uri)
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

    def lance_vectors(self, query: npt.NDArray[np.float32]) -> pa.Table:
        planner = LsmVectorSearchPlanner(self.dataset, self.snapshots(), "vector")
        plan = planner.plan_search(pa.array(query), k=TOP, nprobes=NPROBES, refine_base_table=True)
        return plan.to_table()

    def plain_vectors(self, query: npt.NDArray[np.float32]) -> pa.Table:
        nearest = {
            "column": "vector",
            "q": query,
            "k": TOP,
            "nprobes": NPROBES,
            "refine_factor": REFINE,
        }
        return self.merged.scanner(columns=["id", "_distance"], nearest=nearest).to_table()

    def our_vectors(self, query: npt.NDArray[np.float32]) -> pa.Table:
        asked = self.table.search(query).limit(TOP).nprobes(NPROBES).refine(REFINE)
        return asked.select(["id"]).to_arrow()

    def plain_text(self, words: str) -> None:
        self.merged.scanner(columns=["id", "_score"], full_text_query=words, limit=TOP).to_table()

    def our_text(self, words: str) -> None:
        self.table.search(words).limit(TOP).select(["id"]).to_arrow()


def _index(dataset: lance.LanceDataset, searched: bool) -> None:
    dataset.create_scalar_index("id", "BTREE", name="id_idx")
    if searched:
        create_search_indexes(dataset)


def take_turns(contenders: dict[str, Callable[[Any], Any]], asked: list[Any]) -> Figures:
    """Every contender is given each of the questions, the first of them to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number, question in enumerate([asked[0], *asked]):
        for name, run in contenders.items():
            began = time.perf_counter()
            run(question)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: quantiles(taken) for name, taken in seconds.items()}


def drain(reader: pa.RecordBatchReader) -> None:
    for _ in reader:
        continue


def lookups(tables: Tables, rounds: int) -> dict[str, Figures]:
    random = np.random.default_rng(5)
    table = tables.table
    keys = [int(key) for key in random.choice(tables.ids, rounds * 10)]
    many = [random.choice(tables.ids, BATCH_KEYS, replace=False).tolist() for _ in range(rounds)]
    found = {
        "lookup of one key": take_turns(
            {"penstock": table.get, "lance": tables.lance_lookup}, keys
        ),
        f"lookup of {BATCH_KEYS} keys": take_turns({"penstock": table.get_many}, many),
    }
    ours = found[f"lookup of {BATCH_KEYS} keys"]
    one = found["lookup of one key"]["lance"]
    # Lance looks keys up one by one.
    ours["lance"] = {name: value * BATCH_KEYS for name, value in one.items()}
    return found


def scans(tables: Tables, rounds: int) -> dict[str, Figures]:
    table = tables.table

    def contenders(columns: list[str] | None) -> dict[str, Callable[[Any], Any]]:
        return {
            "penstock": lambda _: drain(table.scan(columns)),
            "plain": lambda _: drain(tables.merged.scanner(columns=columns).to_reader()),
            "lance": lambda _: tables.lance_scan(columns),
        }

    asked = [None] * max(5, rounds // 2)
    return {
        "scan of whole rows": take_turns(contenders(None), asked),
        "scan of two columns": take_turns(contenders(["id", "body"]), asked),
    }


def searches(tables: Tables, rounds: int) -> tuple[dict[str, Figures], dict[str, float]]:
    random = np.random.default_rng(7)
    vectors = tables.rows.column("vector").combine_chunks().flatten().to_numpy()
    vectors = vectors.reshape(-1, DIMENSIONS)
    noise = 0.1 * random.normal(size=(rounds * 5, DIMENSIONS))
    queries = (vectors[random.integers(0, len(vectors), rounds * 5)] + noise).astype(np.float32)
    ways = {
        "penstock": tables.our_vectors,
        "plain": tables.plain_vectors,
        "lance": tables.lance_vectors,
    }
    recall = Counter[str]()
    for query in queries[:RECALL_QUERIES]:
        nearest = np.argpartition(exact_distances(query, vectors, "l2"), TOP)[:TOP]
        truth = set(tables.ids[nearest].tolist())
        for name, ask in ways.items():
            recall[name] += len(truth & set(ask(query).column("id").to_pylist()))
    asked = min(RECALL_QUERIES, len(queries)) * TOP
    bodies = tables.rows.column("body").slice(0, 50_000).to_pylist()
    frequencies = Counter(word for body in bodies for word in body.split())
    words = [word for word, _ in frequencies.most_common()]
    tiers = {"common": words[20:120], "medium": words[200:1000], "rare": words[2000:]}
    figures = {"vector search": take_turns(ways, list(queries))}
    for tier, known in tiers.items():
        texts = [" ".join(random.choice(known, 2, replace=False)) for _ in range(rounds * 5)]
        figures[f"text search, two {tier} words"] = take_turns(
            {"penstock": tables.our_text, "plain": tables.plain_text}, texts
        )
    return figures, {name: hits / asked for name, hits in recall.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        place = Path(directory)
        small = Tables(place / "small", SMALL_ROWS, searched=False)
        figures = {
            f"{what}, {SMALL_ROWS:,} base rows": taken
            for what, taken in lookups(small, arguments.rounds).items()
        }
        small.writer.close(flush=False)
        tables = Tables(place / "large", arguments.rows)
        measured = lookups(tables, arguments.rounds) | scans(tables, arguments.rounds)
        found, recall = searches(tables, arguments.rounds)
        for what, taken in (measured | found).items():
            figures[f"{what}, {arguments.rows:,} base rows"] = taken
        tables.writer.close(flush=False)
    for what, taken in figures.items():
        print(f"\n{what}")
        ours = taken["penstock"]["median_ms"]
        for name, numbers in taken.items():
            print(
                f"  {name:10} {numbers['median_ms']:>9.2f} ms  p99 {numbers['p99_ms']:>9.2f} ms"
                f"  penstock takes {ours / numbers['median_ms']:.4g}x its time"
            )
    print(f"\nrecall@{TOP}: " + ", ".join(f"{name} {part:.3f}" for name, part in recall.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "recall": recall}, indent=1))


if __name__ == "__main__":
    main()
