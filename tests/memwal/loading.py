"""Helpers of the tests of bulk loads: tables as dicts, and loads in pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lance
from tests.failures.lake import Lake, row

from penstock import Table
from penstock.memwal.bulk import (
    BulkPiece,
    BulkPlan,
    BulkReport,
    batches_of,
    commit_bulk,
    plan_bulk,
    write_piece,
)
from penstock.memwal.doctor import Severity

NEXT_VERSION = "_versions/[0-9]*.manifest"
Found = dict[int, Any]


def plain(table: Table) -> Found:
    """What a Lance user sees who knows nothing of regions."""
    dataset = lance.dataset(table.uri)
    dataset.validate()
    rows = dataset.to_table().to_pylist()
    by_key = {one["id"]: one["value"] for one in rows}
    assert len(by_key) == len(rows)
    return by_key


def live(table: Table) -> Found:
    rows = table.to_arrow().to_pylist()
    by_key = {one["id"]: one["value"] for one in rows}
    assert len(by_key) == len(rows) == table.count()
    return by_key


def check_health(table: Table) -> None:
    """Nothing is broken; work may be due."""
    findings = table.doctor(deep=True).findings
    assert not [one for one in findings if one.severity is Severity.SICK], findings


def pieces_of(table: Table, plan: BulkPlan, parts: Sequence[Any]) -> list[BulkPiece]:
    """Written as by other processes: what they get and give is sent, and comes in any order."""
    sent: BulkPlan = pickle.loads(pickle.dumps(plan))
    pieces = [
        write_piece(table._base, sent, number, batches_of(part, plan.shape))
        for number, part in enumerate(parts)
    ]
    return list(reversed(pickle.loads(pickle.dumps(pieces))))


def in_pieces(table: Table, parts: Sequence[Any], *, overwrite: bool = False) -> BulkReport:
    plan = plan_bulk(table._base, overwrite=overwrite)
    return commit_bulk(table._base, plan, pieces_of(table, plan, parts), flusher(table))


def flusher(table: Table) -> Callable[[], None]:
    return partial(table.flush, recover=True)


def begun(lake: Lake) -> None:
    table = lake.process().table
    table.upsert([row(n, "base") for n in range(6)])
    table.flush()
    table.merge()
