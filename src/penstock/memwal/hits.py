"""Hits: rows of the sources with a score each, and the nodes that every search is made of.

A search asks each source for its best rows, by number and score only. `FilterStaleExec` leaves out
those that something newer supersedes, and asks a source for more where too few are left; `SortExec`
brings the hits of all sources into one order, and only then reads the columns of the best.

    GlobalLimitExec       limit and offset
      SortExec            the best of all, with their columns
        FilterStaleExec   the newest of each key, exactly
          UnionExec
            KNNExec …     one for each source (`vector_search`, `text_search`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.index.primary_key import one_chunk
from penstock.memwal.plan import Chunk, Node
from penstock.memwal.shape import TableShape
from penstock.memwal.sources import FreshSource, GenerationSource, MemTableSource, StaleView

if TYPE_CHECKING:
    from penstock.memwal.view import View

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Hits:
    """Rows of one source and their scores, in no particular order; `None` is the base.

    Rows are numbers within the source, in the base row ids.
    """

    source: FreshSource | None
    rows: Numbers
    scores: Floats
    columns: pa.Table | None = None
    """Columns that were read on the way, of these rows and perhaps of more."""
    at: Rows | None = None
    """Where the rows are among those of `columns`; None if they are the same."""
    counted: bool = False
    """Whether every row is known to be the newest of its key."""

    def chosen(self, places: Rows) -> Hits:
        """The hits at these places, in that order."""
        at = None
        if self.columns is not None:
            at = places if self.at is None else self.at[places]
        rows, scores = self.rows[places], self.scores[places]
        return Hits(self.source, rows, scores, self.columns, at, self.counted)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.scores.nbytes


class SortExec(Node[Chunk]):
    """The best `fetch` hits of all sources, best first, with the columns asked for and the score.

    Equal scores keep the order of their sources.
    """

    def __init__(
        self,
        view: View,
        columns: Sequence[str],
        score: str,
        child: Node[Hits],
        *,
        fetch: int,
        descending: bool = False,
    ) -> None:
        super().__init__(child)
        self._view = view
        self._columns = list(columns)
        self._score = score
        self._fetch = fetch
        self._descending = descending

    def describe(self) -> str:
        order = "DESC" if self._descending else "ASC"
        return f"SortExec: order_by=[{self._score} {order}], fetch={self._fetch}"

    def _stream(self) -> Iterator[Chunk]:
        found: list[Hits] = list(self.children[0].stream())
        yield Chunk(self.best(found), None)

    def best(self, found: Sequence[Hits]) -> pa.RecordBatch:
        """The rows of the best hits, in order."""
        schema = self._view.shape.schema
        fields = [schema.field(name) for name in self._columns]
        score = pa.field(self._score, pa.float32())
        scores = np.concatenate([np.empty(0, np.float32), *(hits.scores for hits in found)])
        order = np.argsort(-scores if self._descending else scores, kind="stable")[: self._fetch]
        columns: list[pa.Array] = []
        if fields:
            columns = self._taken(found, order, pa.schema(fields))
        columns.append(pa.array(scores[order], pa.float32()))
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, score]))

    def _taken(self, found: Sequence[Hits], order: Rows, schema: pa.Schema) -> list[pa.Array]:
        """The columns, one array each: gathered source by source, then brought into order."""
        parts: list[list[pa.Array]] = [[pa.array([], field.type)] for field in schema]
        places: list[Rows] = []
        ends = np.cumsum([hits.num_rows for hits in found])
        owners = np.searchsorted(ends, order, side="right")
        for number in sorted(set(owners.tolist())):
            hits = found[number]
            here = np.flatnonzero(owners == number)
            best = hits.chosen(order[here] - (int(ends[number]) - hits.num_rows))
            table = best.columns
            if table is None:
                table = taken(self._view, best.source, best.rows, self._columns)
            for arrays, field in zip(parts, schema, strict=True):
                column = one_chunk(table.column(field.name))
                if best.at is not None:
                    column = column.take(pa.array(best.at))
                arrays.append(column if column.type == field.type else column.cast(field.type))
            places.append(here)
        if len(places) < 2:
            return [arrays[-1] for arrays in parts]
        back = pa.array(np.argsort(np.concatenate(places), kind="stable"))
        return [pa.concat_arrays(arrays).take(back) for arrays in parts]


def only_the_key(view: View, columns: Sequence[str]) -> bool:
    """Whether nothing is wanted of a base row that the keys in memory do not have."""
    return len(columns) == 1 and tuple(columns) == view.shape.key_columns


def taken(
    view: View, source: FreshSource | None, rows: Numbers, columns: Sequence[str]
) -> pa.Table:
    """These columns of rows of one source, in the order given; there may be others beside them."""
    index = view.key_index if source is None and only_the_key(view, columns) else None
    if index is not None:
        table = pa.table({columns[0]: index.keys_of(rows)})
    elif source is None:
        table = view.base.dataset._take_rows(rows.tolist(), columns=list(columns))
    elif isinstance(source, GenerationSource):
        table = source.take(rows.astype(np.int64), view.shape, columns)
    else:
        table = memtable_rows(source, rows.astype(np.int64), view.shape, columns)
    if table.num_rows != len(rows):
        raise StaleView(f"{len(rows)} rows were found and {table.num_rows} of them are there")
    return table


def memtable_rows(
    source: MemTableSource, rows: Rows, shape: TableShape, columns: Sequence[str]
) -> pa.Table:
    """Rows of a MemTable by number, in that order."""
    batches, starts = source.memtable.batches_with(rows)
    pieces, order = [], []
    for batch, start in zip(batches, starts, strict=True):
        end = start + batch.num_rows
        here = np.flatnonzero((rows >= start) & (rows < end))
        aligned = shape.align(batch).select(list(columns))
        pieces.append(aligned.take(pa.array(rows[here] - start)))
        order.append(here)
    table = pa.Table.from_batches(pieces)
    if len(pieces) > 1:
        table = table.take(pa.array(np.argsort(np.concatenate(order), kind="stable")))
    return table
