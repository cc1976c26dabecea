"""What both demos share: the table they fill, and how it is compared with what it should be.

`demo_spark` streams with Spark; `demo_process` is the demo for machines without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import penstock
from penstock.table import Table

TABLE = "documents"
MIN_DOCUMENTS = 300
_CREATED_BY_DEMO = "_penstock/demo.txt"


class Progress(Protocol):
    """Called with what is going on, and how many documents or changes are known to be stored."""

    def __call__(self, what: str, done: int, total: int | None = None) -> None: ...


def fresh_table(directory: str, schema: pa.Schema, regions: int, **writer_defaults: int) -> Table:
    """An empty table with its indexes; one that an earlier demo left is removed."""
    marker = Path(directory, _CREATED_BY_DEMO)
    database = penstock.connect(directory)
    if TABLE in database.list_tables():
        if not marker.exists():
            raise penstock.TableExists(
                f"{directory} has a table {TABLE!r} that no demo made; choose another --dir"
            )
        database.drop_table(TABLE)
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text("`penstock demo` made this directory and will replace its table.\n")
    by = penstock.bucket("id", regions) if regions > 1 else penstock.unsharded()
    table = database.create_table(
        TABLE, schema, primary_key="id", regions=by, writer_defaults=writer_defaults
    )
    table.create_index("body", "fts")
    table.create_index("module", "btree")
    return table


@dataclass(frozen=True, slots=True)
class Comparison:
    lost: int
    changed: int
    duplicates: int
    extra: int


def compare(expected: pa.Table, found: pa.Table) -> Comparison:
    """Every expected row must be there once and unchanged; others are counted."""
    ids = pc.unique(found.column("id"))
    duplicates = found.num_rows - len(ids)
    at = pc.index_in(expected.column("id"), value_set=found.column("id"))
    lost = at.null_count
    there = expected.filter(pc.is_valid(at))
    twins = found.take(pc.drop_null(at))
    same = np.ones(there.num_rows, bool)
    for name in expected.column_names:
        ours, theirs = there.column(name), twins.column(name)
        if name == "vector":
            matrices = [matrix(column) for column in (ours, theirs)]
            same &= (matrices[0] == matrices[1]).all(axis=1)
        else:
            same &= np.asarray(pc.equal(ours, theirs))
    extra = len(ids) - there.num_rows
    return Comparison(lost, int((~same).sum()), duplicates, extra)


def matrix(vectors: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float32]]:
    width = vectors.type.list_size
    flat = [np.asarray(chunk.flatten()) for chunk in vectors.chunks]
    values: np.ndarray[Any, np.dtype[np.float32]] = np.concatenate(
        flat or [np.empty(0, np.float32)]
    )
    return values.reshape(-1, width)


def epochs(table: Table) -> tuple[int, ...]:
    return tuple(region.writer_epoch for region in table.status().regions)
