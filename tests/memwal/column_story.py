"""A table whose columns come, go and are renamed while rows of every age lie in every layer.

A `Story` has a model beside the table. Its rows lie in four regions, one for each layer: merged
into the base, flushed into generations, only in the log, and in the MemTable of a writer that was
opened before the first change. Each age (the columns between two changes) adds a row to each of
them. The model knows values by a number that a column keeps for life, whatever it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock import Table
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.memwal.regions import load_manifests

LAYERS = ("merged", "flushed", "logged", "held")
KEY = [pa.field("layer", pa.string()), pa.field("id", pa.int64())]
Rows = dict[tuple[Any, ...], dict[int, Any]]
Change = Callable[["Story"], None]


class Story:
    def __init__(self, path: Path, names: Sequence[str] = ("a", "b")) -> None:
        self.database = penstock.connect(path)
        schema = pa.schema([*KEY, *(pa.field(name, pa.string()) for name in names)])
        self.table = self.database.create_table(
            "t", schema, primary_key=["layer", "id"], regions=penstock.identity("layer")
        )
        self.watching = self.database.open_table("t")
        """A reader that stays open, and has read everything before each change."""
        self._numbers = itertools.count()
        self.columns = {name: next(self._numbers) for name in names}
        self.rows: Rows = {}
        self.age = 0
        self.held = self.table.writer(flush_on_close=False)
        self._held_columns = dict(self.columns)
        self.pinned: list[tuple[int, pa.Table]] = []

    # --- writing ---------------------------------------------------------------------------

    def write(self, layer: str) -> None:
        """A new row that stays as it is, and one that every age writes again."""
        names = dict(self.columns)
        if layer == "held":  # what it may still name: columns that are what they were
            names = {n: u for n, u in names.items() if self._held_columns.get(n) == u}
        for identity in (0, self.age + 1):
            values = {name: f"{layer} {identity} {name} age {self.age}" for name in names}
            row = {"layer": layer, "id": identity, **values}
            if layer == "held":
                self.held.upsert([row])
            else:
                with self.table.writer(flush_on_close=layer != "logged") as writer:
                    writer.upsert([row])
            self.rows[layer, identity] = {names[name]: value for name, value in values.items()}
        if layer == "merged":
            merge_only(self.table, "merged")

    def grow(self) -> None:
        for layer in LAYERS:
            self.write(layer)
        self.age += 1

    # --- changing --------------------------------------------------------------------------

    def add(self, *names: str) -> None:
        self.table.add_columns({name: pa.string() for name in names})
        self.columns.update({name: next(self._numbers) for name in names})

    def rename(self, old: str, new: str) -> None:
        self.table.rename_column(old, new)
        self.columns = {new if n == old else n: number for n, number in self.columns.items()}

    def drop(self, *names: str) -> None:
        self.table.drop_columns(list(names))
        for name in names:
            del self.columns[name]

    def swap(self, one: str, other: str) -> None:
        self.rename(one, "between")
        self.rename(other, one)
        self.rename("between", other)

    # --- checking --------------------------------------------------------------------------

    def expected(self, layers: Sequence[str] = LAYERS) -> list[dict[str, Any]]:
        return [
            {
                "layer": layer,
                "id": identity,
                **{name: values.get(number) for name, number in self.columns.items()},
            }
            for (layer, identity), values in sorted(self.rows.items())
            if layer in layers
        ]

    def check(self) -> None:
        expected = self.expected()
        keys = [(row["layer"], row["id"]) for row in expected]
        for handle in (self.watching, self.table):
            assert handle.schema.names == ["layer", "id", *self.columns]
            assert in_order(handle.to_arrow()) == expected
            assert in_order(handle.get_many(keys)) == expected
        for row in expected[:: max(1, len(expected) // 3)]:
            assert self.watching.get((row["layer"], row["id"])) == row
        for name in self.columns:
            self._check_filters(self.watching, name, expected)
        assert in_order(self.database.open_table("t").to_arrow()) == expected

    def _check_filters(self, handle: Table, name: str, expected: list[dict[str, Any]]) -> None:
        assert handle.count(f"`{name}` is null") == sum(row[name] is None for row in expected)
        there = sorted({row[name] for row in expected if row[name] is not None})
        for value in there[-1:]:
            wanted = [row for row in expected if row[name] == value]
            found = handle.scan(["layer", "id", name], f"`{name}` = '{value}'").read_all()
            chosen = [{n: row[n] for n in ("layer", "id", name)} for row in wanted]
            assert in_order(found) == chosen

    def pin(self) -> None:
        version = self.table.snapshot()
        self.pinned.append((version, self.table.to_arrow(version=version)))


def in_order(rows: pa.Table) -> list[dict[str, Any]]:
    ordered = rows.sort_by([("layer", "ascending"), ("id", "ascending")])
    found: list[dict[str, Any]] = ordered.to_pylist()
    return found


def merge_only(table: Table, layer: str) -> None:
    """Merge the regions that hold one layer and leave the others in flight."""
    owners = {
        manifest.region_id: bytes(manifest.region_values[0][1]).decode()
        for manifest in load_manifests(table._base.store, table._base.seams)
    }
    for plan in plan_merges(table._base, together=False)[0]:
        if owners[plan.parts[0].region_id] == layer:
            commit_merge(table._base, fold(table._base, plan))


CHANGES: dict[str, list[Change]] = {
    "added": [lambda s: s.add("c", "d")],
    "renamed": [lambda s: s.rename("a", "z")],
    "dropped": [lambda s: s.drop("b")],
    "dropped and added again": [lambda s: s.drop("b"), lambda s: s.add("b")],
    "dropped and added at once": [lambda s: (s.drop("b"), s.add("b"))[-1]],
    "renamed to a name that was dropped": [lambda s: s.drop("b"), lambda s: s.rename("a", "b")],
    "swapped": [lambda s: s.swap("a", "b")],
    "all of it": [
        lambda s: s.add("c"),
        lambda s: s.swap("c", "a"),
        lambda s: s.drop("b", "a"),
        lambda s: s.add("a"),
        lambda s: s.rename("a", "b"),
    ],
}


def in_id_order(rows: pa.Table) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.sort_by("id").to_pylist()
    return found
