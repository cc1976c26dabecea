"""Lance's readers return exactly the right rows from generations that we flushed.

Each test drives a table with random operations and keeps a dict beside it. Base rows come in by
plain Lance appends, as any other tool would write them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lance.mem_wal import LsmVectorSearchPlanner
from tests.interop.lance_side import (
    LanceLookup,
    Rows,
    by_key,
    lance_rows,
    manifests,
    only_region,
    our_rows,
    scanner,
    snapshots,
)

import penstock
from penstock.index.bloom import BloomFilter
from penstock.index.primary_key import PAGE_ROWS
from penstock.memwal.region_spec import RegionBy
from penstock.table import Table

VALUES = [
    pa.field("number", pa.int64()),
    pa.field("text", pa.string()),
    pa.field("vector", pa.list_(pa.float32(), 2)),
]

TEXTS = ["", "a", "A", "a\0", "a\0b", "\0", "\0\xff", "ü", "日本", "\U0001f600", "it's", "x" * 3000]
KEYS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int8": (pa.int8(), [-128, -1, 0, 1, 127]),
    "int16": (pa.int16(), [-(2**15), -1, 0, 1, 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), -1, 0, 1, 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1]),
    "uint8": (pa.uint8(), [0, 1, 127, 128, 255]),
    "uint16": (pa.uint16(), [0, 1, 2**15, 2**16 - 1]),
    "uint32": (pa.uint32(), [0, 1, 2**31, 2**32 - 1]),
    "uint64": (pa.uint64(), [0, 1, 2**63, 2**64 - 1]),
    "bool": (pa.bool_(), [False, True]),
    "string": (pa.string(), TEXTS),
    "large_string": (pa.large_string(), TEXTS),
    "binary": (pa.binary(), [text.encode() for text in TEXTS] + [b"\xff\xfe"]),
    "large_binary": (pa.large_binary(), [text.encode() for text in TEXTS] + [b"\xff\xfe"]),
}


@dataclass
class Driver:
    """Random writes to a table, with a model of what it must hold."""

    table: Table
    keys: Sequence[tuple[Any, ...]]
    random: random.Random
    model: Rows = field(default_factory=dict)
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    count: int = 0

    def row(self, key: tuple[Any, ...]) -> dict[str, Any]:
        self.count += 1
        values: dict[str, Any] = dict(zip(self.table.primary_key, key, strict=True))
        values["number"] = None if self.count % 5 == 0 else self.count
        values["text"] = None if self.count % 7 == 0 else f"text {self.count}"
        values["vector"] = None if self.count % 3 == 0 else [float(self.count), -1.0]
        columns = set(self.table.schema.names)
        return {name: value for name, value in values.items() if name in columns}

    def some_keys(self) -> list[tuple[Any, ...]]:
        return [self.random.choice(self.keys) for _ in range(self.random.randint(1, 6))]

    def append_to_base(self, keys: Sequence[tuple[Any, ...]]) -> None:
        """Base rows, written by Lance alone; only before anything else writes those keys."""
        rows = [self.row(key) for key in keys]
        lance.write_dataset(
            pa.Table.from_pylist(rows, self.table.schema), self.table.uri, mode="append"
        )
        self._remember(rows)

    def upsert(self, keys: Sequence[tuple[Any, ...]]) -> None:
        rows = [self.row(key) for key in keys]
        self.table.upsert(pa.Table.from_pylist(rows, self.table.schema))
        self._remember(rows)

    def delete(self, keys: Sequence[tuple[Any, ...]]) -> None:
        self.table.delete(keys=[key if len(key) > 1 else key[0] for key in keys])
        self.seen.update(keys)
        for key in keys:
            self.model.pop(key, None)

    def _remember(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            key = tuple(row[name] for name in self.table.primary_key)
            self.model[key] = row
            self.seen.add(key)

    def run(self, steps: int) -> None:
        """Writes and deletes with flushes in between, the last of them at the end."""
        for _ in range(steps):
            action = self.random.random()
            if action < 0.55:
                self.upsert(self.some_keys())
            elif action < 0.8:
                self.delete(self.some_keys())
            else:
                self.table.flush()
        self.upsert(self.some_keys())
        self.table.flush()

    def check(self, absent: Sequence[tuple[Any, ...]] = ()) -> None:
        """Lance and we return the model, whole and key by key, and nothing else."""
        assert lance_rows(self.table) == self.model
        assert our_rows(self.table) == self.model
        assert self.table.count() == scanner(self.table).count_rows() == len(self.model)
        lookup = LanceLookup(self.table)
        asked = [*self.seen, *absent]
        assert {key: lookup(key) for key in asked} == {key: self.model.get(key) for key in asked}
        names = [key if len(key) > 1 else key[0] for key in asked]
        found = by_key(self.table.get_many(names).to_pylist(), self.table.primary_key)
        assert found == self.model


def create(
    path: Path,
    key_types: Sequence[pa.DataType],
    regions: RegionBy | None = None,
    values: Sequence[pa.Field] = VALUES,
) -> Table:
    names = [f"k{number}" for number in range(len(key_types))]
    fields = [pa.field(name, kind) for name, kind in zip(names, key_types, strict=True)]
    # Keys need not come first in the table, nor in their own order.
    schema = pa.schema([values[0], *reversed(fields), *values[1:]])
    return penstock.connect(path).create_table("t", schema, primary_key=names, regions=regions)


@pytest.mark.parametrize("kind", list(KEYS))
def test_every_key_type(tmp_path: Path, kind: str) -> None:
    key_type, values = KEYS[kind]
    keys = [(value,) for value in values]
    driver = Driver(create(tmp_path, [key_type]), keys, random.Random(kind))
    driver.append_to_base(keys[: len(keys) // 2])
    driver.run(25)
    assert len(only_region(driver.table).flushed_generations) > 1
    driver.check(absent=keys)


@pytest.mark.parametrize(
    "kinds",
    [
        ("string", "int64"),
        ("int8", "uint64"),
        ("binary", "bool"),
        ("large_string", "string", "int32"),
        ("uint16", "large_binary", "string"),
    ],
    ids="-".join,
)
def test_composite_keys(tmp_path: Path, kinds: Sequence[str]) -> None:
    """Mixed types; strings with NUL bytes, where a careless encoding makes two keys one."""
    chance = random.Random("-".join(kinds))
    keys = [tuple(chance.choice(KEYS[kind][1]) for kind in kinds) for _ in range(30)]
    if kinds == ("large_string", "string", "int32"):
        keys += [("a", "\0b", 1), ("a\0", "b", 1), ("a\0\0", "", 1), ("", "a\0\0b", 1)]
    keys = list(dict.fromkeys(keys))
    driver = Driver(create(tmp_path, [KEYS[kind][0] for kind in kinds]), keys, chance)
    driver.append_to_base(keys[:10])
    driver.run(30)
    driver.check(absent=keys)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    buckets=st.integers(1, 5),
    width=st.integers(1, 2),
    steps=st.integers(1, 30),
)
def test_any_history_of_any_table(
    tmp_path_factory: pytest.TempPathFactory, seed: int, buckets: int, width: int, steps: int
) -> None:
    """Several regions, few keys and so many collisions, any order of operations."""
    chance = random.Random(seed)
    table = create(
        tmp_path_factory.mktemp("any"),
        [pa.string(), pa.int64()][:width],
        penstock.bucket("k0", buckets),
    )
    keys = [(f"key {i}", i)[:width] for i in range(chance.randint(1, 25))]
    driver = Driver(table, keys, chance)
    driver.append_to_base(keys[::3])
    driver.run(steps)
    driver.check(absent=[("nobody", 0)[:width]])
    table.close()


def test_filters_and_projections(tmp_path: Path) -> None:
    keys = [(i,) for i in range(60)]
    driver = Driver(create(tmp_path, [pa.int32()]), keys, random.Random(5))
    driver.append_to_base(keys[:30])
    driver.run(40)
    table = driver.table

    def lance_says(filter_sql: str, columns: list[str]) -> list[dict[str, Any]]:
        return scanner(table).project(columns).filter(filter_sql).to_table().to_pylist()

    def model_says(keep: Callable[[dict[str, Any]], bool], columns: list[str]) -> Any:
        rows = [row for row in driver.model.values() if keep(row)]
        return [{name: row[name] for name in columns} for row in rows]

    def same(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
        return sorted(map(repr, left)) == sorted(map(repr, right))

    assert same(
        lance_says("number % 2 = 0", ["k0", "text"]),
        model_says(lambda r: r["number"] is not None and r["number"] % 2 == 0, ["k0", "text"]),
    )
    assert same(
        lance_says("text IS NULL", ["number", "k0"]),
        model_says(lambda r: r["text"] is None, ["number", "k0"]),
    )
    assert same(
        lance_says("k0 < 20 AND number > 10", ["k0"]),
        model_says(lambda r: r["k0"] < 20 and (r["number"] or 0) > 10, ["k0"]),
    )
    some = scanner(table).limit(7).to_table().to_pylist()
    assert len(some) == min(7, len(driver.model))
    assert all(driver.model[(row["k0"],)] == row for row in some)


@pytest.mark.parametrize("kinds", [("int64",), ("string",), ("string", "int64")], ids="-".join)
def test_a_generation_of_several_index_pages(tmp_path: Path, kinds: Sequence[str]) -> None:
    """More rows than one page of `_pk_index/`, with a key whose rows span a page boundary."""
    rows = 2 * PAGE_ROWS + 500
    chance = np.random.default_rng(1)
    numbers = chance.permutation(rows)

    def columns(ids: np.ndarray[Any, Any]) -> dict[str, pa.Array]:
        made: dict[str, pa.Array] = {}
        for ordinal, kind in enumerate(kinds):
            made[f"k{ordinal}"] = (
                pa.array(ids)
                if kind == "int64"
                else pa.array([f"{i % 97:03}/{i}" for i in ids.tolist()])
            )
        return made

    table = create(tmp_path, [KEYS[kind][0] for kind in kinds], values=VALUES[:1])
    table.upsert(pa.table({**columns(numbers), "number": pa.array(numbers)}))
    middle = np.full(300, int(np.sort(numbers)[PAGE_ROWS]))
    table.upsert(pa.table({**columns(middle), "number": pa.array(np.arange(300))}))
    gone = np.arange(0, rows, 1000)
    table.delete(keys=pa.table(columns(gone)))
    table.flush()
    (generation,) = only_region(table).flushed_generations
    assert generation.physical_rows == rows + 300 + len(gone)

    expected = {int(i): int(i) for i in numbers} | {int(middle[0]): 299}
    for number in gone.tolist():
        expected.pop(number)
    keyed = columns(np.array(sorted(expected)))
    wanted = by_key(
        pa.table({**keyed, "number": pa.array([expected[i] for i in sorted(expected)])})
        .select(table.schema.names)
        .to_pylist(),
        table.primary_key,
    )
    assert lance_rows(table) == wanted
    assert our_rows(table) == wanted
    lookup = LanceLookup(table)
    probes = [0, 1, 999, 1000, PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, rows - 1, rows, -1]
    names = list(zip(*(c.to_pylist() for c in columns(np.array(probes)).values()), strict=True))
    assert [lookup(name) for name in names] == [wanted.get(name) for name in names]
    found = table.get_many(pa.table(columns(np.array(probes))))
    assert len(found) == sum(name in wanted for name in names)


def test_columns_that_were_dropped_and_added(tmp_path: Path) -> None:
    """Field ids with gaps: generations carry the base table's ids, not their own count."""
    db = penstock.connect(tmp_path)
    fields = [
        pa.field("old", pa.struct([("x", pa.int8()), ("y", pa.list_(pa.string()))])),
        pa.field("k0", pa.int64()),
        pa.field("gone", pa.int64()),
        *VALUES,
    ]
    table = db.create_table("t", pa.schema(fields), primary_key="k0")
    dataset = lance.dataset(table.uri)
    dataset.drop_columns(["old", "gone"])
    dataset.add_columns(pa.field("late", pa.int64()))
    table = db.open_table("t")
    assert table.schema.names == ["k0", "number", "text", "vector", "late"]

    keys = [(i,) for i in range(20)]
    driver = Driver(table, keys, random.Random(3))
    plain_row = driver.row

    def row(key: tuple[Any, ...]) -> dict[str, Any]:
        return {**plain_row(key), "late": driver.count * 10}

    driver.row = row  # type: ignore[method-assign]
    driver.append_to_base(keys[:10])
    driver.run(30)
    driver.check(absent=[(99,)])
    base_ids = {f.name(): f.id() for f in lance.dataset(table.uri).lance_schema.fields()}
    region = only_region(table)
    for generation in region.flushed_generations:
        path = f"{table.uri}/_mem_wal/{region.region_id}/{generation.path}"
        fields_of = lance.dataset(path).lance_schema.fields()
        ids = {f.name(): f.id() for f in fields_of if f.name() != "_tombstone"}
        assert ids == base_ids


def test_generations_of_one_row_and_of_tombstones_only(tmp_path: Path) -> None:
    driver = Driver(create(tmp_path, [pa.string()]), [("a",), ("b",)], random.Random(0))
    driver.append_to_base([("a",), ("b",), ("c",)])
    for step in ("upsert a", "delete b", "delete a", "upsert a", "delete nobody"):
        action, _, key = step.partition(" ")
        getattr(driver, action)([(key,)])
        driver.table.flush()
        driver.check()
    generations = only_region(driver.table).flushed_generations
    assert [g.physical_rows for g in generations] == [1] * 5


def test_what_manifests_and_bloom_filters_say(tmp_path: Path) -> None:
    """A filter misses no key; a manifest tells generation, size and region values as Lance does."""
    keys = [(f"key {i}", i) for i in range(500)]
    regions = penstock.bucket("k0", 3)
    driver = Driver(create(tmp_path, [pa.string(), pa.int64()], regions), keys, random.Random(9))
    driver.upsert(keys)
    driver.table.flush()
    found = manifests(driver.table)
    assert [m.region_spec_id for m in found] == [1, 1, 1]
    assert sorted(m.region_values for m in found) == [
        (("bucket", number.to_bytes(4, "little")),) for number in range(3)
    ]
    held = 0
    for manifest in found:
        (generation,) = manifest.flushed_generations
        assert generation.generation == 1
        assert manifest.current_generation == 2
        path = tmp_path / "t.lance/_mem_wal" / str(manifest.region_id) / generation.path
        rows = lance.dataset(path).to_table()
        assert generation.physical_rows == rows.num_rows
        assert generation.in_memory_bytes
        assert generation.primary_key_bytes
        bloom = BloomFilter.from_bytes((path / "bloom_filter.bin").read_bytes())
        inside = [rows.column(name).combine_chunks() for name in ("k0", "k1")]
        assert bloom.may_contain(inside).all()
        foreign = [pa.array([f"other {i}" for i in range(1000)]), pa.array(range(1000))]
        assert bloom.may_contain(foreign).mean() < 0.01
        held += rows.num_rows
    assert held == len(keys)


def test_vector_search_sees_neither_superseded_nor_deleted_rows(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), 8))])
    table = db.create_table("t", schema, primary_key="id")
    chance = np.random.default_rng(4)

    def rows(ids: Sequence[int]) -> pa.Table:
        vectors = chance.random((len(ids), 8), dtype=np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 8)
        return pa.table([pa.array(ids, pa.int64()), column], schema=table.schema)

    lance.write_dataset(rows(range(600)), table.uri, mode="append")
    table.create_index("vector", "ivf_pq", metric="l2", num_partitions=2, num_sub_vectors=8)
    table.upsert(rows([*range(100), *range(50), *range(600, 700)]))
    table.delete(keys=list(range(100, 120)))
    table.flush()
    table.upsert(rows(range(40, 60)))
    table.delete(keys=[0, 1, 650])
    table.flush()

    truth = our_rows(table)
    ids = np.array([key for (key,) in truth])
    matrix = np.array([row["vector"] for row in truth.values()], dtype=np.float32)
    planner = LsmVectorSearchPlanner(lance.dataset(table.uri), snapshots(table), "vector")
    recall = []
    for key in (5, 45, 55, 300, 620):
        query = np.array(truth[(key,)]["vector"], dtype=np.float32)
        plan = planner.plan_search(pa.array(query), k=20, nprobes=2, refine_base_table=True)
        hits = plan.to_table().to_pylist()
        found = by_key(hits, ("id",))
        assert len(found) == 20
        for (identity,), hit in found.items():
            assert hit["vector"] == truth[(identity,)]["vector"]
        exact = ids[np.argsort(((matrix - query) ** 2).sum(axis=1), kind="stable")[:20]]
        recall.append(len(set(exact.tolist()) & {k for (k,) in found}) / 20)
    assert np.mean(recall) > 0.6
