"""Scanning a view: every live row once, its newest version, streamed in batches.

The sources in front of the base know, row by row, whether they are the newest (`Freshness`); the
base leaves out the rows whose keys appear in front of it. Nothing is sorted and nothing is held
but the keys of rows that are not merged, so memory does not grow with the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.primary_key import key_array
from penstock.memwal.view import View

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

ROW_ID = "_rowid"
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
    wanted_rows = None if limit is None else limit + offset
    fresh = _fresh_batches(view, chosen, where)
    read_ahead: list[pa.RecordBatch] = []
    read_rows = read_bytes = 0
    for batch in fresh:
        read_ahead.append(batch)
        read_rows += batch.num_rows
        read_bytes += batch.nbytes
        if read_bytes > READ_AHEAD_BYTES or (wanted_rows is not None and read_rows >= wanted_rows):
            break
    batches = itertools.chain(read_ahead, fresh, _base_batches(view, chosen, where))
    return pa.RecordBatchReader.from_batches(schema, _window(batches, schema, limit, offset))


def _window(
    batches: Iterator[pa.RecordBatch], schema: pa.Schema, limit: int | None, offset: int
) -> Iterator[pa.RecordBatch]:
    left = limit
    if left == 0:
        return
    for batch in batches:
        if offset:
            skipped = min(offset, batch.num_rows)
            offset -= skipped
            batch = batch.slice(skipped)
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
        if left == 0:
            return


def count_view(view: View, where: Filter | None = None) -> int:
    """How many live rows match."""
    keyed = bool(view.shape.key_columns)
    if where is None and keyed and view.hidden_base_rows is not None:
        base = view.base.dataset.count_rows() - len(view.hidden_base_rows)
        return int(base + sum(batch.num_rows for batch in _fresh_batches(view, [], None)))
    return int(sum(batch.num_rows for batch in _batches(view, [], where)))


def _batches(view: View, columns: list[str], where: Filter | None) -> Iterator[pa.RecordBatch]:
    yield from _fresh_batches(view, columns, where)
    yield from _base_batches(view, columns, where)


def _fresh_batches(
    view: View, columns: list[str], where: Filter | None
) -> Iterator[pa.RecordBatch]:
    keyed = bool(view.shape.key_columns)
    for source in reversed(view.sources):
        newest = view.freshness.newest(source) if keyed else None
        yield from source.scan(view.shape, columns, where, newest)


def _base_batches(view: View, columns: list[str], where: Filter | None) -> Iterator[pa.RecordBatch]:
    dataset = view.base.dataset
    sql = where.sql if where is not None else None
    keyed = bool(view.shape.key_columns) and bool(view.sources)
    if not keyed or not len(view.freshness.distinct):
        yield from dataset.scanner(
            columns=columns, filter=sql, with_row_id=not columns
        ).to_batches()
        return
    hidden = view.hidden_base_rows
    if hidden is not None:
        for batch in dataset.scanner(columns=columns, filter=sql, with_row_id=True).to_batches():
            row_ids = batch.column(ROW_ID)
            gone = hidden.contains(row_ids.to_numpy())
            kept = batch if columns == [] else batch.select(columns)
            yield kept.filter(pa.array(~gone)) if gone.any() else kept
        return
    # Too many keys to keep: compare each row's key with those in front of the base.
    needed = [*columns, *(name for name in view.shape.key_columns if name not in columns)]
    newer = view.freshness.distinct
    for batch in dataset.scanner(columns=needed, filter=sql).to_batches():
        gone = np.asarray(pc.is_in(key_array(batch, view.shape.key_columns), value_set=newer))
        kept = batch if columns == [] else batch.select(columns)
        yield kept.filter(pa.array(~gone)) if gone.any() else kept
