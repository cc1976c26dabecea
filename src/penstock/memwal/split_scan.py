"""A scan in parts: planned once, read by any number of processes, on any machine.

`plan_split` takes one view, as every read does, and settles on the spot which rows of each source
are the newest. The base table is pinned to its version; its fragments and the generations are cut
into spans of rows, and spans are dealt to parts evenly. With its spans a part carries which rows in
them something newer supersedes, as compressed bits. So `read_part` (`split_read`) looks at no key
and at no other part: every row is decided before anybody reads it, and the parts together are
exactly the scan.

What is only in the log is small as a rule: those rows are filtered and travel with the parts. Logs
that are too large for that are named by their position and read again. Rows that a writer of this
process has in memory and not in the log yet are in no part, for nobody else could see them.

Parts are plain values that can be pickled. They hold as long as clean-up keeps the version and the
generations they name, by default for longer than a job runs; afterwards reading one fails with
`VersionNotFound`, and never answers with a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, NotATable
from penstock.index.primary_key import key_array
from penstock.memwal.base_table import BaseTable
from penstock.memwal.fragments import Offsets, fragments_of, offsets_of
from penstock.memwal.freshness import Mask
from penstock.memwal.scan import checked_columns
from penstock.memwal.sources import ROW_ADDRESS, GenerationSource, MemTableSource, chosen_rows
from penstock.memwal.split_parts import (
    BaseSpan,
    GenerationSpan,
    LogSpan,
    RowSpan,
    Span,
    SplitPart,
    packed,
    stream_of,
    unpacked,
)
from penstock.memwal.split_read import BATCH_ROWS, parsed
from penstock.memwal.split_read import read_part as read_part
from penstock.memwal.table_versions import read_details
from penstock.memwal.view import Reader, View

SHIPPED_BYTES = 16 << 20
"""So much of what is only in the log travels with the parts of one scan."""
_COMPARED_ROWS = 1 << 20
"""Keys of the base are compared so many at a time."""
_DENSE_KEYS = 1 << 26
"""Keys that are whole numbers, none further from another than this, are looked up by number."""
_EVENNESS = 0.05
"""No span is cut for less than this share of a part."""

Divisible = BaseSpan | GenerationSpan


def plan_split(
    table: BaseTable,
    *,
    partitions: int,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    version: int | None = None,
    consistency: str = "strong",
    limit: int | None = None,
    least_rows: int = 1,
    reader: Reader | None = None,
) -> list[SplitPart]:
    """Cut a scan into at most so many parts, none of fewer than about `least_rows` rows.

    A scan with a limit is one part, which stops when it has them. A table that is plain Lance is
    read as it is. With a `reader`, what that has learnt of the table is used.
    """
    if partitions < 1 or (limit is not None and limit < 0):
        raise InvalidInput(f"partitions={partitions} and limit={limit} must not be negative")
    reader = reader or Reader(table)

    def work(view: View) -> list[SplitPart]:
        return _Plan(view, columns, filter, limit).parts(partitions, least_rows)

    try:
        return reader.read(lambda: [], work, consistency=consistency, version=version)
    except NotATable:
        plain = table.dataset()
        if version is not None or read_details(table.store, plain.version) is not None:
            raise
        return reader.read(lambda: [], work, version=plain.version)


class _Plan:
    def __init__(
        self, view: View, columns: Sequence[str] | None, sql: str | None, limit: int | None
    ) -> None:
        self.shape = view.shape
        self.where = parsed(sql, self.shape.schema)
        self.view = view.pruned(self.where)
        self.columns = checked_columns(view, columns)
        if not self.columns:
            raise InvalidInput("a scan in parts needs at least one column")
        self.sql = sql
        self.limit = limit
        self.keyed = bool(self.shape.key_columns and self.view.sources)

    def parts(self, partitions: int, least_rows: int) -> list[SplitPart]:
        spans: list[Span] = [*self._generations(), *self._base()]
        logs, rows = self._memory()
        spans = [*spans, *logs]
        total = sum(span.rows for span in spans) + rows.num_rows
        if not total or self.limit == 0:
            return []
        wanted = 1 if self.limit is not None else min(partitions, max(1, total // least_rows))
        dealt = _deal(spans, rows, total, wanted)
        return [
            SplitPart(
                self.view.base.version, tuple(self.columns), self.sql, self.limit, tuple(part)
            )
            for part in dealt
            if part
        ]

    def _base(self) -> list[BaseSpan]:
        """The fragments, whole, with what is hidden in each."""
        dataset = self.view.base.dataset
        fragments = dataset.get_fragments()
        live = [fragment.count_rows() for fragment in fragments]
        if self.limit is not None and self.where is None:
            # However many keys are in front of the base, no more rows than these are hidden.
            ahead = len(self.view.freshness.distinct) if self.keyed else 0
            enough = int(np.searchsorted(np.cumsum(live), self.limit + ahead)) + 1
            fragments, live = fragments[:enough], live[:enough]
        hidden = self._hidden(dataset, fragments)
        spans = []
        for fragment, rows in zip(fragments, live, strict=True):
            if not rows:
                continue
            number = fragment.fragment_id
            physical = fragment.physical_rows
            offsets = hidden.get(number)
            bits = None
            if offsets is not None:
                if len(offsets) == rows:
                    continue
                bits = packed(_mask_of(offsets, physical))
            if self.where is None:
                span = BaseSpan(number, 0, rows, True, bits, deleted=physical - rows)
            else:
                span = BaseSpan(number, 0, physical, True, bits)
            spans.append(span)
        return spans

    def _hidden(
        self, dataset: lance.LanceDataset, fragments: Sequence[lance.LanceFragment]
    ) -> dict[int, Offsets]:
        """Of each fragment the offsets of rows that something newer supersedes, ascending."""
        if not self.keyed or self.view.freshness.empty or not fragments:
            return {}
        keys = list(self.shape.key_columns)
        newer = _Newer(self.view.freshness.distinct)
        where = self.where
        pushed = where is not None and set(where.columns) <= set(keys)
        scanner = dataset.scanner(
            columns=keys,
            filter=where.sql if pushed and where is not None else None,
            fragments=list(fragments),
            with_row_address=True,
            batch_size=BATCH_ROWS,
        )
        found = []
        at_a_time = max(_COMPARED_ROWS, len(newer.keys))
        for rows in _gathered(scanner.to_batches(), at_a_time):
            older = newer.has(key_array(rows, keys))
            if older.any():
                found.append(rows.column(ROW_ADDRESS).to_numpy()[older])
        if not found:
            return {}
        addresses = np.sort(np.concatenate(found))
        numbers = fragments_of(addresses)
        starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
        runs = np.split(addresses, starts[1:])
        return {int(fragments_of(run[:1])[0]): offsets_of(run) for run in runs}

    def _generations(self) -> Iterator[GenerationSpan]:
        for region in self.view.regions:
            flushed = {g.path: g for g in region.manifest.flushed_generations}
            for source in region.sources:
                if not isinstance(source, GenerationSource):
                    continue
                bits = None
                if self.keyed:
                    newest = self.view.freshness.newest(source)
                    rows = len(newest)
                    if not newest.any():
                        continue
                    bits = None if newest.all() else packed(~newest)
                else:
                    fragments = source.dataset.get_fragments()
                    rows = sum(fragment.physical_rows for fragment in fragments)
                if rows:
                    region_id = region.manifest.region_id
                    yield GenerationSpan(region_id, flushed[source.path], 0, rows, True, bits)

    def _memory(self) -> tuple[list[LogSpan], pa.Table]:
        """What is only in the log: as far as it is small the rows themselves."""
        schema = pa.schema([self.shape.schema.field(name) for name in self.columns])
        logs = []
        shipped = [schema.empty_table()]
        left_bytes = SHIPPED_BYTES
        for region in self.view.regions:
            for source in region.sources:
                if not isinstance(source, MemTableSource):
                    continue
                newest = self.view.freshness.newest(source) if self.keyed else None
                rows = self._fresh_rows(source, newest, schema)
                if rows.nbytes <= left_bytes:
                    left_bytes -= rows.nbytes
                    shipped.append(rows)
                    continue
                manifest = region.manifest
                logs.append(
                    LogSpan(
                        manifest.region_id,
                        manifest.replay_after_wal_entry_position,
                        manifest.current_generation,
                        source.rows,
                        None if newest is None or newest.all() else packed(~newest),
                    )
                )
        return logs, pa.concat_tables(shipped)

    def _fresh_rows(
        self, source: MemTableSource, newest: Mask | None, schema: pa.Schema
    ) -> pa.Table:
        kept = []
        for rows, numbers, dead in source.scan(self.shape, self.columns, self.where):
            assert numbers is not None
            assert dead is not None
            mask = ~dead if newest is None else ~dead & newest[numbers]
            chosen = rows if mask.all() else chosen_rows(rows, mask)
            kept.append(pa.RecordBatch.from_arrays(chosen.columns, schema=schema))
        return pa.Table.from_batches(kept, schema)


class _Newer:
    """The keys in front of the base, to be asked about many others."""

    def __init__(self, keys: pa.Array) -> None:
        self.keys = keys
        self._first = 0
        self._flags: Mask | None = None
        if pa.types.is_integer(keys.type) and len(keys):
            numbers = _whole_numbers(keys)
            first, last = int(numbers.min()), int(numbers.max())
            if last - first < _DENSE_KEYS:
                self._first = first
                self._flags = np.zeros(last - first + 1, dtype=np.bool_)
                self._flags[numbers - numbers.dtype.type(first)] = True

    def has(self, keys: pa.Array) -> Mask:
        if self._flags is None:
            return np.asarray(pc.is_in(keys, value_set=self.keys))
        numbers = _whole_numbers(keys)
        first, last = self._first, self._first + len(self._flags) - 1
        inside = (numbers >= first) & (numbers <= last)
        places = np.where(inside, numbers, first) - numbers.dtype.type(first)
        found: Mask = self._flags[places] & inside
        return found


def _whole_numbers(keys: pa.Array) -> npt.NDArray[np.integer[Any]]:
    """Integer keys in a type in which the distance of any two that are near each other fits."""
    numbers: npt.NDArray[np.integer[Any]] = np.asarray(keys)
    return numbers if keys.type == pa.uint64() else numbers.astype(np.int64)


def _deal(spans: Sequence[Span], rows: pa.Table, total: int, parts: int) -> list[list[Span]]:
    """Spans in order to parts, cut where a part is full; rows that come along likewise."""
    ends = [round(total * (number + 1) / parts) for number in range(parts)]
    slack = int(total / parts * _EVENNESS)
    dealt: list[list[Span]] = [[] for _ in range(parts)]
    part, done = 0, 0

    def room() -> int:
        nonlocal part
        while part < parts - 1 and ends[part] - done <= slack:
            part += 1
        return ends[part] - done if part < parts - 1 else total

    for span in spans:
        left: Span | None = span
        while left is not None:
            fits = room()
            if isinstance(left, LogSpan | RowSpan) or left.rows <= fits + slack:
                dealt[part].append(left)
                done += left.rows
                break
            head, left = _cut(left, fits)
            dealt[part].append(head)
            done += head.rows
    first = 0
    while first < rows.num_rows:
        some = rows.slice(first, max(1, min(room(), rows.num_rows - first)))
        dealt[part].append(RowSpan(stream_of(some), some.num_rows))
        first += some.num_rows
        done += some.num_rows
    return dealt


def _cut(span: Divisible, rows: int) -> tuple[Divisible, Divisible]:
    """The first so many rows of a span, and the rest."""
    head: Divisible = replace(span, rows=rows, whole=False)
    tail: Divisible = replace(span, first=span.first + rows, rows=span.rows - rows, whole=False)
    if span.hidden is not None:
        hidden = unpacked(span.hidden)
        ahead = span.deleted if isinstance(span, BaseSpan) else 0
        head = replace(head, hidden=packed(hidden[: rows + ahead]))
        tail = replace(tail, hidden=packed(hidden[rows:]))
    return head, tail


def _gathered(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Batches put together to tables of about so many rows."""
    some: list[pa.RecordBatch] = []
    waiting = 0
    for batch in batches:
        some.append(batch)
        waiting += batch.num_rows
        if waiting >= rows:
            yield pa.Table.from_batches(some)
            some, waiting = [], 0
    if some:
        yield pa.Table.from_batches(some)


def _mask_of(offsets: Offsets, rows: int) -> Mask:
    mask = np.zeros(rows, dtype=np.bool_)
    mask[offsets] = True
    return mask
