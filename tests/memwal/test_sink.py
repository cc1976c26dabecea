"""One write of many tasks: the same rows, whether they go through the log or are staged."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock import Table
from penstock.errors import BackPressure, CommitConflict, InvalidInput
from penstock.memwal import sink
from penstock.memwal.config import WriterConfig
from penstock.memwal.sink import Task, TaskRows, await_merges, changes, commit_tasks
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.transactions import Transaction
from penstock.storage.clock import SimulatedClock
from penstock.storage.seams import Seams

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("body", pa.string()),
    ]
)


def make(path: Path, **options: Any) -> Table:
    regions = penstock.bucket("id", 3)
    database = penstock.connect(path, **options)
    return database.create_table("t", SCHEMA, primary_key="id", regions=regions)


def run_task(table: Table, batches: list[list[tuple[int, int | None]]]) -> TaskRows:
    """A task with these changes of key and number; None deletes the key."""
    task = Task(table._base)
    for pairs in batches:
        rows = [{"id": key, "n": n, "body": f"body {n}"} for key, n in pairs]
        loose = pa.schema([field.with_nullable(True) for field in SCHEMA])
        batch = pa.RecordBatch.from_pylist(rows, loose)
        deleted = np.array([n is None for _, n in pairs])
        task.add(changes(batch, deleted, task.shape))
    result: TaskRows = pickle.loads(pickle.dumps(task.finish()))
    return result


def writer_of(table: Table) -> TableWriter:
    return TableWriter(table._base, WriterConfig(), reclaim=True)


@pytest.mark.parametrize("inline_bytes", [0, 700, 1 << 20])
@pytest.mark.parametrize("commit_bytes", [0, 1 << 20])
def test_any_changes_in_the_order_of_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_bytes: int, commit_bytes: int
) -> None:
    monkeypatch.setattr(sink, "INLINE_BYTES", inline_bytes)
    monkeypatch.setattr(sink, "COMMIT_BYTES", commit_bytes)
    monkeypatch.setattr(sink, "STAGED_BYTES", 400)
    rng = random.Random(inline_bytes + commit_bytes)
    table = make(tmp_path)
    model: dict[int, int] = {}
    with writer_of(table) as writer:
        for number in range(4):
            results = []
            for _ in range(3):
                batches = [
                    [
                        (rng.randrange(40), rng.choice([None, rng.randrange(1000)]))
                        for _ in range(rng.randrange(1, 30))
                    ]
                    for _ in range(rng.randrange(3))
                ]
                results.append(run_task(table, batches))
                for key, n in (pair for pairs in batches for pair in pairs):
                    model.pop(key, None)
                    if n is not None:
                        model[key] = n
            transaction = Transaction.named("job", number)
            for _ in range(2):
                commit_tasks(table._base, writer, results, transaction)
            assert {one["id"]: one["n"] for one in table.to_arrow().to_pylist()} == model
    table.merge()
    plain = lance.dataset(table.uri).to_table().to_pylist()
    assert {one["id"]: one["n"] for one in plain} == model
    assert len(plain) == len(model)


def test_a_task_refuses_what_an_upsert_would(tmp_path: Path) -> None:
    table = make(tmp_path)
    task = Task(table._base)
    loose = pa.schema([field.with_nullable(True) for field in SCHEMA])
    lacking = pa.RecordBatch.from_pylist([{"id": 1}, {"id": 2}], loose)
    with pytest.raises(InvalidInput, match="'n'"):
        changes(lacking, np.array([True, False]), task.shape)
    assert changes(lacking, np.array([True, True]), task.shape).num_rows == 2


def test_rows_staged_for_regions_that_were_replaced_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "INLINE_BYTES", 0)
    table = make(tmp_path)
    table.upsert([{"id": 1, "n": 1}])
    result = run_task(table, [[(key, key) for key in range(20)]])
    table.set_regions(penstock.bucket("id", 2))
    with writer_of(table) as writer, pytest.raises(CommitConflict, match="write them again"):
        commit_tasks(table._base, writer, [result])
    assert table.count() == 1


def test_a_commit_waits_for_merges_and_then_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "INLINE_BYTES", 0)
    table = make(tmp_path, seams=Seams(clock=SimulatedClock()))
    with writer_of(table) as writer:
        for n in range(3):
            result = run_task(table, [[(key, n) for key in range(20)]])
            commit_tasks(table._base, writer, [result])
        await_merges(table._base, writer, limit=3)
        with pytest.raises(BackPressure, match="maintain"):
            await_merges(table._base, writer, limit=2)
        table.merge()
        await_merges(table._base, writer, limit=0)
