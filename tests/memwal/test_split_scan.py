"""A scan in parts: exactly the scan, evenly dealt, small to send, and clear when it is too late.

That parts agree with the scan on tables in every state is the model's business
(`tests/model/split_reads.py`); here is what a state does not show.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import InvalidInput, VersionNotFound
from penstock.memwal import split_scan
from penstock.memwal.base_table import BaseTable
from penstock.memwal.split_parts import BaseSpan, GenerationSpan, LogSpan, RowSpan, SplitPart
from penstock.memwal.split_scan import plan_split, read_part
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

ROWS = 3000
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("text", pa.string()),
    ]
)


def rows(ids: Any, text: str) -> pa.Table:
    numbers = np.asarray(ids)
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(np.repeat(numbers, 4).astype(np.float32)), 4
    )
    return pa.table({"id": numbers, "vector": vectors, "text": [f"{text} {i}" for i in numbers]})


def fresh(uri: str) -> BaseTable:
    return BaseTable(open_store(uri), None, Seams())


def ids_of(table: BaseTable, parts: list[SplitPart]) -> list[Any]:
    sent = pickle.loads(pickle.dumps(parts))
    return sorted(
        i for part in sent for b in read_part(table, part) for i in b.column("id").to_pylist()
    )


@pytest.fixture
def table(tmp_path: Path) -> penstock.Table:
    """Rows in a base of one fragment with deletions, in generations, and in the log."""
    made = penstock.connect(tmp_path).create_table(
        "docs", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2)
    )
    made.upsert(rows(range(ROWS), "base"))
    made.flush()
    made.merge()
    lance.dataset(made.uri).delete("id % 7 = 3")
    made.upsert(rows(range(0, ROWS, 5), "generation"))
    made.delete(keys=list(range(0, ROWS, 11)))
    made.flush()
    made.upsert(rows(range(0, ROWS, 13), "log"))
    return made


@pytest.mark.parametrize("tasks", [1, 2, 8, 40])
@pytest.mark.parametrize("condition", [None, "text LIKE '%5' AND id < 2000"])
def test_parts_are_the_scan_and_even(
    table: penstock.Table, tasks: int, condition: str | None
) -> None:
    parts = plan_split(fresh(table.uri), partitions=tasks, filter=condition)
    assert len(parts) == tasks
    looked_at = [part.rows for part in parts]
    assert max(looked_at) <= 1.2 * sum(looked_at) / tasks
    found = [
        row
        for part in pickle.loads(pickle.dumps(parts))
        for batch in read_part(fresh(table.uri), part)
        for row in batch.to_pylist()
    ]
    expected = table.scan(filter=condition).read_all().to_pylist()
    assert sorted(found, key=lambda r: r["id"]) == sorted(expected, key=lambda r: r["id"])
    kinds = {type(span) for part in parts for span in part.spans}
    assert kinds == {BaseSpan, GenerationSpan, RowSpan}


def test_a_part_is_small_whatever_is_hidden(table: penstock.Table) -> None:
    parts = plan_split(fresh(table.uri), partitions=4, columns=["id"])
    assert all(part.columns == ("id",) for part in parts)
    assert max(len(pickle.dumps(part)) for part in parts) < 8192


def test_a_long_log_is_read_again_instead_of_being_sent(
    table: penstock.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_scan, "SHIPPED_BYTES", 1000)
    for condition in (None, "text LIKE 'log%'"):
        parts = plan_split(fresh(table.uri), partitions=2, filter=condition)
        spans = [span for part in parts for span in part.spans]
        assert any(isinstance(span, LogSpan) for span in spans)
        assert not any(isinstance(span, RowSpan) for span in spans)
        expected = table.scan(columns=["id"], filter=condition).read_all()["id"].to_pylist()
        # What was written after the plan is not in it.
        table.upsert(rows([ROWS + 1, 0], "later"))
        table.delete(keys=[1])
        assert ids_of(fresh(table.uri), parts) == sorted(expected)


def test_a_plan_stands_whatever_happens_after_it(table: penstock.Table) -> None:
    expected = sorted(table.to_arrow()["id"].to_pylist())
    parts = plan_split(fresh(table.uri), partitions=3)
    table.upsert(rows(range(0, ROWS, 2), "later"))
    table.flush()
    table.merge()
    table.compact()
    assert ids_of(fresh(table.uri), parts) == expected


def test_a_limit_is_one_part_and_reads_no_more_than_it_needs(table: penstock.Table) -> None:
    everything = set(table.to_arrow()["id"].to_pylist())
    for limit, condition in ((0, None), (7, None), (7, "id > 100"), (10**9, None)):
        parts = plan_split(fresh(table.uri), partitions=8, limit=limit, filter=condition)
        found = ids_of(fresh(table.uri), parts)
        assert len(parts) <= 1
        assert len(found) == len(set(found)) == min(limit, len(everything))
        assert set(found) <= everything


def test_a_limit_counts_rows_that_are_left(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("docs", SCHEMA, primary_key="id")
    for first in (0, 10):  # a fragment each
        table.upsert(rows(range(first, first + 10), "base"))
        table.flush()
        table.merge()
    table.delete(keys=list(range(10)))
    parts = plan_split(fresh(table.uri), partitions=2, limit=10)
    assert ids_of(fresh(table.uri), parts) == list(range(10, 20))


def test_too_late_is_said_and_not_answered_with_less(table: penstock.Table) -> None:
    parts = plan_split(fresh(table.uri), partitions=2)
    table.flush()
    table.merge()
    table.gc(retain_seconds=0, orphan_seconds=0)
    with pytest.raises(VersionNotFound, match=r"read again, and keep .* gc\(retain_seconds"):
        ids_of(fresh(table.uri), parts)


def test_plain_lance_tables_are_read_as_they_are(tmp_path: Path) -> None:
    uri = str(tmp_path / "plain.lance")
    lance.write_dataset(rows(range(100), "plain"), uri, max_rows_per_file=30)
    lance.dataset(uri).delete("id < 10")
    for how in ({}, {"consistency": "eventual"}, {"version": 2}):
        parts = plan_split(fresh(uri), partitions=3, **how)
        assert ids_of(fresh(uri), parts) == list(range(10, 100))
    assert ids_of(fresh(uri), plan_split(fresh(uri), partitions=1, version=1)) == list(range(100))


def test_few_rows_are_few_parts_and_no_rows_none(tmp_path: Path) -> None:
    table = penstock.connect(tmp_path).create_table("docs", SCHEMA, primary_key="id")
    assert plan_split(fresh(table.uri), partitions=8) == []
    table.upsert(rows(range(3), "few"))
    assert len(plan_split(fresh(table.uri), partitions=8)) == 3
    assert len(plan_split(fresh(table.uri), partitions=8, least_rows=1000)) == 1
    table.delete(keys=[0, 1, 2])
    assert plan_split(fresh(table.uri), partitions=8) == []


def test_what_cannot_be_asked_is_refused(table: penstock.Table) -> None:
    base = fresh(table.uri)
    with pytest.raises(InvalidInput, match="no column 'txt'"):
        plan_split(base, partitions=1, columns=["txt"])
    with pytest.raises(InvalidInput, match="at least one column"):
        plan_split(base, partitions=1, columns=[])
    with pytest.raises(InvalidInput, match="names column 'txt'"):
        plan_split(base, partitions=1, filter="txt = 'a'")
    with pytest.raises(InvalidInput, match="partitions"):
        plan_split(base, partitions=0)
    with pytest.raises(VersionNotFound, match="has no version 99"):
        plan_split(base, partitions=1, version=99)


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        (pa.int64(), list(range(-20, 20))),
        (pa.int64(), [number << 40 for number in range(-20, 20)]),
        (pa.int8(), [-128, -127, *range(-18, 18), 126, 127]),
        (pa.uint64(), [0, 1, *range(2**64 - 38, 2**64)]),
        (pa.string(), [f"{number:03}" for number in range(40)]),
    ],
    ids=["near", "far", "narrow", "unsigned", "text"],
)
def test_keys_of_every_kind_are_hidden(tmp_path: Path, kind: pa.DataType, ids: list[Any]) -> None:
    schema = pa.schema([pa.field("id", kind, nullable=False), pa.field("text", pa.string())])
    table = penstock.connect(tmp_path).create_table(
        "docs", schema, primary_key="id", regions=penstock.bucket("id", 2)
    )
    table.upsert([{"id": i, "text": "base"} for i in ids])
    table.flush()
    table.merge()
    table.upsert([{"id": i, "text": "newer"} for i in ids[5:10] + ids[-2:]])
    table.delete(keys=ids[:2])
    table.flush()
    assert ids_of(fresh(table.uri), plan_split(fresh(table.uri), partitions=3)) == ids[2:]
