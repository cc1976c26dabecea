"""Reading one part of a scan: any process can, and needs no other part and no key.

What is superseded is known from the bits that come with each span; tombstones are seen here. Whole
fragments of a part are read together, so that Lance reads ahead over their borders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import StorageError, VersionNotFound
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.fragments import fragments_of, offsets_of
from penstock.memwal.freshness import Mask
from penstock.memwal.shape import FIELD_ID, TableShape
from penstock.memwal.sources import ROW_ADDRESS, GenerationSource, StaleView, chosen_rows
from penstock.memwal.split_parts import (
    BaseSpan,
    GenerationSpan,
    LogSpan,
    RowSpan,
    SplitPart,
    unpacked,
)
from penstock.memwal.table_versions import version_exists
from penstock.memwal.wal import TOMBSTONE, Wal

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

BATCH_ROWS = 65_536


def read_part(table: BaseTable, part: SplitPart) -> Iterator[pa.RecordBatch]:
    """The rows of a part, in the table's types, in batches of about 65,536 rows."""
    try:
        base = table.snapshot(part.version)
        left = part.limit
        for batch in _joined(_part_rows(table, base, part)):
            rows = batch if left is None else batch.slice(0, left)
            if rows.num_rows:
                yield rows
            if left is not None:
                left -= rows.num_rows
                if left <= 0:
                    return
    except (StaleView, VersionNotFound) as error:
        raise _gone(table, part, error) from error
    except (OSError, RuntimeError, pa.ArrowException) as error:
        if "not found" in str(error).lower() or not version_exists(table.store, part.version):
            raise _gone(table, part, error) from error
        raise StorageError(f"{table.uri}: a part of a scan cannot be read: {error}") from error


def _gone(table: BaseTable, part: SplitPart, error: Exception) -> VersionNotFound:
    return VersionNotFound(
        f"{table.uri}: clean-up took away what a scan in parts of version {part.version} needs "
        f"before it was read ({error}); read again, and keep what is replaced for longer with "
        "gc(retain_seconds=…)"
    )


def _part_rows(table: BaseTable, base: BaseSnapshot, part: SplitPart) -> Iterator[pa.RecordBatch]:
    shape = base.shape
    columns = list(part.columns)
    where = parsed(part.filter, shape.schema)
    schema = pa.schema([shape.schema.field(name) for name in columns])
    together: list[BaseSpan] = []
    for span in part.spans:
        if isinstance(span, BaseSpan) and span.whole:
            together.append(span)
            continue
        if isinstance(span, RowSpan):
            yield from pa.ipc.open_stream(span.stream)
            continue
        if isinstance(span, BaseSpan):
            found = _base_rows(base.dataset, [span], columns, where)
        elif isinstance(span, GenerationSpan):
            found = _generation_rows(table, shape, span, columns, where)
        else:
            found = _log_rows(table, shape, span, columns, where)
        for rows in found:
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)
    if together:
        for rows in _base_rows(base.dataset, together, columns, where):
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)


def _base_rows(
    dataset: lance.LanceDataset,
    spans: Sequence[BaseSpan],
    columns: Sequence[str],
    where: Filter | None,
) -> Iterator[pa.RecordBatch]:
    """Rows of whole fragments, or of a span of one."""
    hidden = {s.fragment: (s.first, unpacked(s.hidden)) for s in spans if s.hidden is not None}
    condition = None if where is None else f"({where.sql})"
    offset = limit = None
    if not spans[0].whole:
        span = spans[0]
        if where is None:
            offset, limit = span.first, span.rows
        else:
            within = _between((span.fragment << 32) + span.first, span.rows)
            condition = f"{within} AND {condition}"
    wanted = {span.fragment for span in spans}
    fragments = [f for f in dataset.get_fragments() if f.fragment_id in wanted]
    scanner = dataset.scanner(
        columns=list(columns),
        filter=condition,
        fragments=fragments,
        offset=offset,
        limit=limit,
        with_row_address=bool(hidden),
        batch_size=BATCH_ROWS,
    )
    for batch in scanner.to_batches():
        if not hidden:
            yield batch
            continue
        kept = ~_are_hidden(batch.column(ROW_ADDRESS).to_numpy(), hidden)
        rows = batch.select(list(columns))
        if kept.all():
            yield rows
        elif kept.any():
            yield chosen_rows(rows, kept)


def _between(address: int, rows: int) -> str:
    return f"{ROW_ADDRESS} >= {address} AND {ROW_ADDRESS} < {address + rows}"


def _are_hidden(addresses: npt.NDArray[np.uint64], hidden: dict[int, tuple[int, Mask]]) -> Mask:
    numbers = fragments_of(addresses)
    found = np.zeros(len(addresses), dtype=np.bool_)
    for number in np.unique(numbers).tolist():
        if number in hidden:
            first, bits = hidden[number]
            here = numbers == number
            found[here] = bits[offsets_of(addresses[here]) - first]
    return found


def _generation_rows(
    table: BaseTable,
    shape: TableShape,
    span: GenerationSpan,
    columns: Sequence[str],
    where: Filter | None,
) -> Iterator[pa.RecordBatch]:
    source = GenerationSource(table.store, table.storage_options, span.region_id, span.flushed)
    pushed = source.is_current(shape)
    dataset = source.dataset
    needed = list(columns) if pushed else [f.name for f in dataset.schema if f.name != TOMBSTONE]
    tests = [] if where is None or not pushed else [f"({where.sql})"]
    if not span.whole:
        tests.insert(0, _between(span.first, span.rows))
    hidden = None if span.hidden is None else unpacked(span.hidden)
    batches = source.guarded(
        lambda: iter(
            dataset.scanner(
                columns=[*needed, TOMBSTONE],
                filter=" AND ".join(tests) or None,
                with_row_address=True,
                batch_size=BATCH_ROWS,
            ).to_reader()
        )
    )
    while True:
        batch = source.guarded(lambda: next(batches, None))
        if batch is None:
            return
        kept = ~np.asarray(batch.column(TOMBSTONE))
        if hidden is not None:
            kept &= ~hidden[offsets_of(batch.column(ROW_ADDRESS).to_numpy()) - span.first]
        if not pushed:
            batch = shape.align(_stamped(batch.drop_columns([ROW_ADDRESS]), source))
            if where is not None:
                kept &= where.mask(batch)
        yield from _some(batch.select(list(columns)), kept)


def _log_rows(
    table: BaseTable,
    shape: TableShape,
    span: LogSpan,
    columns: Sequence[str],
    where: Filter | None,
) -> Iterator[pa.RecordBatch]:
    hidden = None if span.hidden is None else unpacked(span.hidden)
    first = 0
    for entry in Wal(table.store, span.region_id, table.seams).tail(span.after):
        if entry.generation < span.generation:
            continue
        for stored in entry.batches:
            batch = shape.align(stored)
            kept = ~np.asarray(batch.column(TOMBSTONE))
            if hidden is not None:
                kept &= ~hidden[first : first + batch.num_rows]
            first += batch.num_rows
            if where is not None:
                kept &= where.mask(batch)
            yield from _some(batch.select(list(columns)), kept)
        if first >= span.rows:
            return
    raise StaleView(
        f"the log of region {span.region_id} behind {span.after} has {first} of {span.rows} rows"
    )


def _some(rows: pa.RecordBatch, kept: Mask) -> Iterator[pa.RecordBatch]:
    if kept.all():
        if rows.num_rows:
            yield rows
    elif kept.any():
        yield chosen_rows(rows, kept)


def _stamped(batch: pa.RecordBatch, source: GenerationSource) -> pa.RecordBatch:
    """Rows of a generation with the field ids of their columns, by which they are aligned."""
    fields = []
    for field in batch.schema:
        known = {} if field.name == TOMBSTONE else {FIELD_ID: str(source.field_id(field.name))}
        fields.append(field.with_metadata(known))
    return pa.RecordBatch.from_arrays(batch.columns, schema=pa.schema(fields))


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches that are not small; each batch costs as much as many rows."""
    small: list[pa.RecordBatch] = []
    waiting = 0
    for batch in batches:
        if not small and batch.num_rows >= BATCH_ROWS // 2:
            yield batch
            continue
        small.append(batch)
        waiting += batch.num_rows
        if waiting >= BATCH_ROWS // 2:
            yield pa.concat_batches(small)
            small, waiting = [], 0
    if small:
        yield small[0] if len(small) == 1 else pa.concat_batches(small)


def parsed(sql: str | None, schema: pa.Schema) -> Filter | None:
    if sql is None:
        return None
    from penstock.memwal.filters import Filter

    return Filter.parse(sql, schema)
