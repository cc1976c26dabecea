"""Scanning a view: every live row once, its newest version, streamed in batches.

The sources in front of the base know, row by row, whether they are the newest (`Freshness`); the
base leaves out the rows whose keys appear in front of it. Nothing is sorted and nothing is held
but the keys of rows that are not merged, so memory does not grow with the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.plan import (
    Chunk,
    DeduplicateExec,
    GlobalLimitExec,
    Node,
    ProjectionExec,
    ScanExec,
    UnionExec,
)
from penstock.memwal.sources import BaseSource
from penstock.memwal.view import View

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter
    from penstock.memwal.packed_reads import PackedLookup

READ_AHEAD_BYTES = 256 << 20


def checked_columns(view: View, columns: Sequence[str] | None) -> list[str]:
    """The columns of a projection; all of them where none is named."""
    names = view.shape.schema.names
    if columns is None:
        return list(names)
    if isinstance(columns, str):
        raise InvalidInput(f"columns must be a list of names; write [{columns!r}]")
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise InvalidInput(f"no column {unknown[0]!r}; the table has {', '.join(names)}")
    if len(set(columns)) != len(columns):
        raise InvalidInput(f"a column appears twice among {list(columns)}")
    return list(columns)


def scan_view(
    view: View,
    columns: Sequence[str] | None = None,
    where: Filter | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> pa.RecordBatchReader:
    """Live rows that match, at most `limit` of them after the first `offset`.

    Rows in front of the base come first and are read at once, up to a limit in bytes: if one of
    their generations has been cleaned up, that shows before a row is given away, and another view
    can be taken. Everything else streams.
    """
    chosen = checked_columns(view, columns)
    for name, value in (("limit", limit), ("offset", offset)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidInput(f"{name} must be a whole number, not {value!r}")
        if value is not None and value < 0:
            raise InvalidInput(f"{name} must not be negative, but it is {value}")
    schema = pa.schema([view.shape.schema.field(name) for name in chosen])
    plan = plan_scan(view, chosen, where, limit, offset)
    chunks = plan.stream()
    read_ahead: list[Chunk] = []
    read_bytes = 0
    for chunk in chunks:
        read_ahead.append(chunk)
        read_bytes += chunk.rows.nbytes
        if isinstance(chunk.source, BaseSource) or read_bytes > READ_AHEAD_BYTES:
            break
    batches = (
        pa.RecordBatch.from_arrays(chunk.rows.columns, schema=schema)
        for chunk in itertools.chain(read_ahead, chunks)
    )
    return pa.RecordBatchReader.from_batches(schema, batches)


def plan_scan(
    view: View,
    columns: Sequence[str],
    where: Filter | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> Node[Chunk]:
    """The plan of a scan: rows in front of the base first, newest source first."""
    view = view.pruned(where)
    keyed = bool(view.shape.key_columns and view.sources)
    compared = keyed and not view.freshness.empty and view.hidden_base_rows is None
    needed = list(columns)
    if compared:
        needed += [name for name in view.shape.key_columns if name not in columns]
    base = BaseSource(view.base.dataset, numbered=keyed and not compared)
    lookup = _lookup(view, where)
    scans = [
        ScanExec(view, source, needed, where, lookup) for source in (*reversed(view.sources), base)
    ]
    plan: Node[Chunk] = UnionExec(*scans) if len(scans) > 1 else scans[0]
    if view.sources:
        plan = DeduplicateExec(view, plan)
    if compared and len(needed) > len(columns):
        plan = ProjectionExec(columns, plan)
    if limit is not None or offset:
        plan = GlobalLimitExec(limit, offset, plan)
    return plan


def _lookup(view: View, where: Filter | None) -> PackedLookup | None:
    if where is None or not packed_specs(view.base.details):
        return None
    # Only here, so that tables without packed indexes do not wait for what reads them.
    from penstock.memwal.packed_reads import PackedLookup

    return PackedLookup.of(view, where)


def count_view(view: View, where: Filter | None = None) -> int:
    """How many live rows match."""
    if where is None and view.shape.key_columns and view.hidden_base_rows is not None:
        base = view.base.rows - len(view.hidden_base_rows)
        fresh = [ScanExec(view, source, [], None) for source in view.sources]
        rows = sum(
            chunk.rows.num_rows for chunk in DeduplicateExec(view, UnionExec(*fresh)).stream()
        )
        return int(base + rows)
    return int(sum(chunk.rows.num_rows for chunk in plan_scan(view, [], where).stream()))
