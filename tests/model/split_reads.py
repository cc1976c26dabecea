"""Scans in parts on the walk: whatever has happened to a table, its parts are the dict.

Parts are made for several numbers of tasks, sent through pickle as Spark would, and read by handles
that know nothing but what is in them.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from tests.model.questions import Columns, Key, Question, Row
from tests.model.world import World

from penstock.memwal.base_table import BaseTable
from penstock.memwal.split_scan import plan_split, read_part
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

TASKS = (1, 2, 8)


def ask(world: World, question: Question, turn: int) -> None:
    """Strongly, eventually, and of a version that is remembered."""
    asked: list[tuple[Columns, Mapping[Key, Row], dict[str, Any]]] = [
        (world.columns, world.model, {}),
        (world.columns, world.layers.rows, {"consistency": "eventual"}),
    ]
    if world.layers.remembered:
        version = world.layers.remembered[turn % len(world.layers.remembered)]
        asked.append((version.columns, version.rows, {"version": version.version}))
    for columns, rows, how in asked:
        tasks = TASKS[turn % len(TASKS)]
        assert _read(world, tasks, how) == _sorted(columns.shown(row) for row in rows.values())
        condition = question.of(columns)
        matching = [columns.shown(row) for row in rows.values() if condition.test(row) is True]
        sql = condition.named(columns)
        assert _read(world, tasks, {**how, "filter": sql}) == _sorted(matching), sql
        limited = _read(world, tasks, {**how, "filter": sql, "limit": question.limit})
        assert len(limited) == min(question.limit, len(matching))


def _read(world: World, tasks: int, how: dict[str, Any]) -> list[str]:
    parts = plan_split(_fresh(world), partitions=tasks, **how)
    assert len(parts) <= tasks
    found: list[Row] = []
    for sent in pickle.loads(pickle.dumps(parts)):
        for batch in read_part(_fresh(world), sent):
            found += batch.to_pylist()
    return _sorted(found)


def _fresh(world: World) -> BaseTable:
    return BaseTable(open_store(world.store.uri), None, Seams())


def _sorted(rows: Any) -> list[str]:
    return sorted(repr(sorted(row.items(), key=lambda item: item[0])) for row in rows)
