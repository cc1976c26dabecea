"""Bulk loads from Spark: tasks write Lance fragments, the driver commits them as one version.

    frame   --Arrow batches from Java--> task: table's types, fragments --+
    files   --a list of them--> task: reads Parquet, writes fragments ----+--> driver: one version

What a load and an overwrite mean, and when they are refused, is said in `memwal.bulk`. A task
holds a few batches at a time. Tasks may fail and run again: fragments that no version names are
left for clean-up, and `abort` removes nothing, because Spark calls it even after a commit that may
have succeeded. Of rows with one key that of the last partition, or file, counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from penstock.errors import InvalidInput, PenstockError
from penstock.memwal.bulk import (
    BulkPiece,
    BulkPlan,
    BulkReport,
    commit_bulk,
    plan_bulk,
    write_piece,
)
from penstock.spark import tasks
from penstock.spark.convert import check_from_spark, from_spark
from penstock.spark.create import (
    Dimensions,
    Regions,
    create_if_asked,
    ensure_table,
    table_schema,
)
from penstock.spark.options import SourceOptions
from penstock.spark.workers import TablePlace
from penstock.table import Table

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_OPERATION = "_op"
_FRAGMENT_ROWS = 1 << 20
"""Lance begins another fragment after so many rows."""
_PIECE_ROWS = 50_000
"""A piece of files has at least so many rows, if there are as many."""
_BATCH_ROWS = 32_768
_FOOTER_THREADS = 8


# --- from a frame --------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded(WriterCommitMessage):
    """What one task has written."""

    piece: BulkPiece


def bulk_writer(options: SourceOptions, schema: StructType, overwrite: bool) -> BulkWriter:
    """The writer of `mode=bulk`, and of every overwrite."""
    if _OPERATION in schema.fieldNames():
        raise InvalidInput(
            f"column {_OPERATION!r} says which rows to delete, which a bulk load or an overwrite "
            "cannot do; append without mode=bulk, or leave the column out"
        )
    create_if_asked(options, schema)
    table = options.open()
    check_from_spark(schema, table.schema)
    return BulkWriter(options, plan_bulk(table._base, overwrite=overwrite))


class BulkWriter(DataSourceArrowWriter):
    def __init__(self, options: SourceOptions, plan: BulkPlan) -> None:
        self._options = options
        self._place = TablePlace.of(options.locate(), options.storage)
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Loaded:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        rows = (from_spark(batch, self._plan.shape.schema) for batch in iterator)
        return Loaded(write_piece(self._place.base_table(), self._plan, number, rows))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        loaded = [message.piece for message in messages if isinstance(message, Loaded)]
        _commit(self._options.open(), self._plan, loaded)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing: what the tasks left counts for nobody, unless a commit has landed."""


def _commit(table: Table, plan: BulkPlan, pieces: Sequence[BulkPiece]) -> BulkReport:
    try:
        return commit_bulk(table._base, plan, pieces, partial(table.flush, recover=True))
    finally:
        table.close()


# --- from files ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    filesystem: FileSystem
    path: str
    groups: tuple[int, ...]
    """Row groups, in order."""
    rows: int


@dataclass(frozen=True, slots=True)
class _Piece:
    place: TablePlace
    plan: BulkPlan
    number: int
    files: tuple[_File, ...]


def load_files(
    spark: SparkSession,
    paths: str | Sequence[str],
    uri: str,
    *,
    overwrite: bool = False,
    create_table: bool = False,
    primary_key: str | Sequence[str] | None = None,
    regions: Regions | None = None,
    vector_dimensions: Dimensions | None = None,
    storage_options: Mapping[str, str] | None = None,
    filesystem: FileSystem | None = None,
) -> BulkReport:
    """Load Parquet files into the table at `uri`, as one version; the rows never enter Java.

    `paths` are files or directories, which executors must be able to read: with `filesystem`, or
    else by what PyArrow makes of the path. With `create_table` the table is created if there is
    none, as `penstock.spark.create_table` does it, with the columns of the first file.
    """
    options = replace(SourceOptions.of({"path": uri}), storage_options=dict(storage_options or {}))
    files, schema = _files(paths, filesystem)
    if create_table:
        wanted = dict(vector_dimensions or {})
        columns = table_schema(schema, _first_lengths(files, schema, wanted) | wanted)
        ensure_table(options, columns, primary_key, regions)
    table = options.open()
    from_spark(pa.RecordBatch.from_pylist([], schema=schema), table.schema)
    plan = plan_bulk(table._base, overwrite=overwrite)
    place = TablePlace.of(options.locate(), options.storage)
    pieces = [
        _Piece(place, plan, number, part)
        for number, part in enumerate(_divided(files, tasks.slots(spark)))
    ]
    done = tasks.run(spark, _load, pieces, f"load {len(files)} row groups into {uri}")
    return _commit(table, plan, done)


def _load(piece: _Piece) -> BulkPiece:
    """One task: read files, write fragments."""
    schema = piece.plan.shape.schema

    def rows() -> Iterator[pa.RecordBatch]:
        for file in piece.files:
            try:
                with pq.ParquetFile(file.path, filesystem=file.filesystem) as opened:
                    found = opened.iter_batches(_BATCH_ROWS, row_groups=list(file.groups))
                    for batch in found:
                        yield from_spark(batch, schema)
            except (OSError, pa.ArrowException) as error:
                raise InvalidInput(f"{file.path} cannot be read: {error}") from error
            except PenstockError as error:
                error.add_note(f"in {file.path}")
                raise

    return write_piece(piece.place.base_table(), piece.plan, piece.number, rows())


def _files(
    paths: str | Sequence[str], filesystem: FileSystem | None
) -> tuple[list[_File], pa.Schema]:
    """Every row group of every file, in order, and the columns of the first."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: list[tuple[FileSystem, str]] = []
    schema: pa.Schema | None = None
    for path in given:
        path = os.fspath(path)
        if filesystem is None and "://" not in path:
            path = os.path.abspath(os.path.expanduser(path))
        try:
            there = pads.dataset(path, format="parquet", filesystem=filesystem)
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput(f"{path} is no Parquet file or directory of them: {error}") from None
        schema = there.schema if schema is None else schema
        found += [(there.filesystem, one) for one in there.files]
    if schema is None or not found:
        raise InvalidInput(
            f"there are no Parquet files at {', '.join(map(str, given)) or 'no path'}"
        )

    def groups(place: tuple[FileSystem, str]) -> list[_File]:
        try:
            with pq.ParquetFile(place[1], filesystem=place[0]) as opened:
                meta = opened.metadata
                rows = [meta.row_group(n).num_rows for n in range(meta.num_row_groups)]
        except (OSError, pa.ArrowException) as error:
            raise InvalidInput(f"{place[1]} is no Parquet file: {error}") from None
        return [_File(*place, (number,), count) for number, count in enumerate(rows)]

    with ThreadPoolExecutor(_FOOTER_THREADS, "penstock-footers") as pool:
        return [group for file in pool.map(groups, found) for group in file], schema


def _divided(groups: Sequence[_File], slots: int) -> list[tuple[_File, ...]]:
    """Row groups in pieces of about as many rows, neighbours together; of a file as one part."""
    ends = np.cumsum([group.rows for group in groups])
    total = int(ends[-1]) if len(ends) else 0
    wanted = max(slots, -(-total // _FRAGMENT_ROWS))
    count = max(1, min(wanted, -(-total // _PIECE_ROWS), len(groups)))
    middles = ends - np.array([group.rows for group in groups]) / 2
    owners = np.minimum((middles * count / max(total, 1)).astype(int), count - 1)
    pieces: list[list[_File]] = [[] for _ in range(count)]
    for group, owner in zip(groups, owners.tolist(), strict=True):
        parts = pieces[owner]
        if parts and (parts[-1].path, parts[-1].filesystem) == (group.path, group.filesystem):
            last = parts.pop()
            group = replace(last, groups=last.groups + group.groups, rows=last.rows + group.rows)
        parts.append(group)
    return [tuple(parts) for parts in pieces if parts]


def _first_lengths(
    files: Sequence[_File], schema: pa.Schema, given: Dimensions
) -> dict[str, int | None]:
    """The lengths of vectors in the first rows."""
    floats = [
        field.name
        for field in schema
        if (pa.types.is_list(field.type) or pa.types.is_large_list(field.type))
        and pa.types.is_floating(field.type.value_type)
        and field.name not in given
    ]
    found: dict[str, int | None] = {}
    if not floats or not files:
        return found
    with pq.ParquetFile(files[0].path, filesystem=files[0].filesystem) as opened:
        first = next(opened.iter_batches(1024, columns=floats), None)
    for name in floats if first is not None else ():
        assert first is not None
        lengths = [len(value) for value in first.column(name).to_pylist() if value]
        if lengths:
            found[name] = lengths[0]
    return found
