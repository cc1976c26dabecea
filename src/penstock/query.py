"""The query builder: what `Table.search` returns.

A query is a value. Each call gives another one with one thing changed, so a query can be kept and
varied. Nothing is read until `to_arrow`, `to_pandas`, `to_polars`, `to_list` or `explain`; each of
them takes its own view of the table. What can be checked without the table is checked at once, the
rest when the query is run.

Rows come best first. A vector query adds the column `_distance`, a text query `_score`, a hybrid
query `_relevance_score` and both of these, null where that search did not find the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal.hybrid_search import (
    DEFAULT_DEPTH,
    RANK_CONSTANT,
    RELEVANCE,
    Weights,
    plan_hybrid_search,
)
from penstock.memwal.plan import Chunk, Node
from penstock.memwal.scan import checked_columns
from penstock.memwal.text_search import SCORE, plan_text_hits, plan_text_search, text_columns
from penstock.memwal.vector_blocks import vector_columns
from penstock.memwal.vector_search import (
    DISTANCE,
    METRICS,
    plan_vector_hits,
    plan_vector_search,
)
from penstock.memwal.view import View
from penstock.query_input import (
    Vector,
    given_text,
    given_vector,
    is_text,
    number,
    text_column_names,
    vector_column_name,
    whole_number,
)

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from penstock.memwal.filters import Filter

T = TypeVar("T")

DEFAULT_LIMIT = 10
OPERATORS = ("or", "and")


class Read(Protocol):
    """Runs work on a view of the table."""

    def __call__(self, work: Callable[[View], T]) -> T: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Query:
    """What every query can be asked for."""

    scores: ClassVar[tuple[str, ...]]
    """The columns that come with the table's own, last."""

    _read: Read = field(repr=False)
    _where: str | None = None
    _limit: int = DEFAULT_LIMIT
    _offset: int = 0
    _columns: tuple[str, ...] | None = None

    def where(self, filter: str) -> Self:
        """Only rows that match an SQL condition; the best of these are found."""
        return replace(self, _where=filter)

    def limit(self, rows: int) -> Self:
        """At most so many rows; 10 by default."""
        return replace(self, _limit=whole_number("limit", rows, least=0))

    def offset(self, rows: int) -> Self:
        """Leave out the best so many."""
        return replace(self, _offset=whole_number("offset", rows, least=0))

    def select(self, columns: Sequence[str]) -> Self:
        """Only these columns; those of the search always come with them, last."""
        if isinstance(columns, str):
            raise InvalidInput(f"columns must be a list of names; write [{columns!r}]")
        chosen = tuple(name for name in columns if name not in self.scores)
        return replace(self, _columns=chosen)

    def to_arrow(self) -> pa.Table:
        def work(view: View) -> pa.Table:
            batches = [chunk.rows for chunk in self._plan(view).stream()]
            fields = [view.shape.schema.field(name) for name in self._chosen(view)]
            fields += [pa.field(name, pa.float32()) for name in self.scores]
            return pa.Table.from_batches(batches, pa.schema(fields))

        return self._read(work)

    def to_pandas(self) -> pd.DataFrame:
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        import polars as pl

        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_list(self) -> list[dict[str, Any]]:
        """The rows as dicts."""
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def explain(self, *, analyze: bool = False) -> str:
        """The plan; with `analyze` it is run, and each node says what it did."""
        return self._read(lambda view: self._plan(view).explained(analyze=analyze))

    def _plan(self, view: View) -> Node[Chunk]:
        raise NotImplementedError

    def _chosen(self, view: View) -> list[str]:
        return checked_columns(view, self._columns)

    def _filter(self, view: View) -> Filter | None:
        if self._where is None:
            return None
        # Only here, because loading DataFusion takes longer than many a program runs.
        from penstock.memwal.filters import Filter

        return Filter.parse(self._where, view.shape.schema)


@dataclass(frozen=True, eq=False, kw_only=True)
class _VectorOptions(Query):
    """How a query looks for vectors."""

    _vector: Vector = field(repr=False)
    _vector_column: str | None = None
    _nprobes: int | None = None
    _refine: int | None = None
    _metric: str | None = None

    def nprobes(self, partitions: int) -> Self:
        """How many partitions of the index to look into; more find more and take longer."""
        return replace(self, _nprobes=whole_number("nprobes", partitions, least=1))

    def refine(self, factor: int) -> Self:
        """Compare `factor` times as many rows as wanted exactly, if the index compresses."""
        return replace(self, _refine=whole_number("refine", factor, least=1))

    def metric(self, name: str) -> Self:
        """`l2`, `cosine` or `dot`; by default that of the index. Any other ignores the index."""
        if name not in METRICS:
            raise InvalidInput(f"unknown metric {name!r}; there are: {', '.join(METRICS)}")
        return replace(self, _metric=name)

    def _vector_options(self) -> dict[str, Any]:
        return {"nprobes": self._nprobes, "refine": self._refine, "metric": self._metric}

    def _vectors(self, view: View) -> str:
        """The column to search."""
        if self._vector_column is not None:
            return self._vector_column
        there = vector_columns(view.shape.schema)
        if len(there) == 1:
            return there[0]
        if not there:
            raise InvalidInput(
                "the table has no column with vectors (a fixed-size list of floats); it has "
                f"{', '.join(view.shape.schema.names)}"
            )
        named = "vector_column" if isinstance(self, HybridQuery) else "column"
        raise InvalidInput(
            f"several columns hold vectors; name one: search(…, {named}={there[0]!r}); "
            f"there are: {', '.join(there)}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _TextOptions(Query):
    """How a query looks for words."""

    _text: str
    _text_columns: tuple[str, ...] | None = None
    _operator: str = "or"
    _boosts: Mapping[str, float] = field(default_factory=dict)

    def operator(self, name: str) -> Self:
        """`or`: rows with any of the words, the default; `and`: only rows with all of them."""
        if name not in OPERATORS:
            raise InvalidInput(f"unknown operator {name!r}; there are: {', '.join(OPERATORS)}")
        return replace(self, _operator=name)

    def phrase(self) -> Self:
        """Only rows with the words side by side, in this order; the index needs positions."""
        return replace(self, _operator="phrase")

    def boost(self, factors: Mapping[str, float]) -> Self:
        """How many times a column's score counts: `{"title": 2.0}`; others count once."""
        if not isinstance(factors, Mapping):
            raise InvalidInput(
                f"boosts are factors by column, such as {{'title': 2.0}}, not {factors!r}"
            )
        checked = {
            name: number(f"the boost of {name!r}", factor, positive=True)
            for name, factor in factors.items()
        }
        return replace(self, _boosts=checked)

    def _text_options(self) -> dict[str, Any]:
        return {"operator": self._operator, "boosts": dict(self._boosts)}

    def _texts(self, view: View) -> list[str]:
        """The columns to search."""
        chosen = self._text_columns
        columns = list(text_columns(view) if chosen is None else chosen)
        if not columns:
            texts = [f.name for f in view.shape.schema if is_text(f.type)]
            hint = f"create_index({texts[0]!r}, 'fts')" if texts else "a table with a text column"
            raise InvalidInput(f"no column has a full-text index to search; make one: {hint}")
        return columns


@dataclass(frozen=True, eq=False, kw_only=True)
class VectorQuery(_VectorOptions):
    """The rows whose vectors are nearest to one, nearest first."""

    scores: ClassVar[tuple[str, ...]] = (DISTANCE,)

    _range: tuple[float | None, float | None] | None = None

    def distance_range(self, low: float | None = None, high: float | None = None) -> Self:
        """Only distances from `low` up to, not including, `high`."""
        for bound in (low, high):
            if bound is not None and (
                isinstance(bound, bool) or not isinstance(bound, int | float) or math.isnan(bound)
            ):
                raise InvalidInput(f"a distance must be a number, not {bound!r}")
        return replace(self, _range=(low, high))

    def _plan(self, view: View) -> Node[Chunk]:
        return plan_vector_search(
            view,
            self._vectors(view),
            self._vector,
            self._limit,
            where=self._filter(view),
            columns=self._columns,
            distance_range=self._range,
            offset=self._offset,
            **self._vector_options(),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TextQuery(_TextOptions):
    """The rows whose texts match words best, by BM25 over the whole table."""

    scores: ClassVar[tuple[str, ...]] = (SCORE,)

    def _plan(self, view: View) -> Node[Chunk]:
        return plan_text_search(
            view,
            self._texts(view),
            self._text,
            self._limit,
            where=self._filter(view),
            select=self._chosen(view),
            offset=self._offset,
            **self._text_options(),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class HybridQuery(_VectorOptions, _TextOptions):
    """The rows that are near a vector and match words, fused by their ranks in either search.

    A row is worth `weight / (rank constant + rank)` in each search that found it.
    """

    scores: ClassVar[tuple[str, ...]] = (RELEVANCE, DISTANCE, SCORE)

    _weights: Weights = field(default_factory=Weights)
    _rank_constant: float = RANK_CONSTANT
    _depth: int | None = None

    def weights(self, vector: float = 1.0, text: float = 1.0) -> Self:
        """What the ranks of either search are worth."""
        chosen = Weights(
            number("the weight of the vector", vector), number("the weight of the text", text)
        )
        if chosen.vector == chosen.text == 0:
            raise InvalidInput("both weights are 0, so no row is better than another")
        return replace(self, _weights=chosen)

    def rank_constant(self, constant: float) -> Self:
        """60 by default; with a lower one the first ranks are worth more than later ones."""
        return replace(self, _rank_constant=number("the rank constant", constant))

    def depth(self, rows: int) -> Self:
        """How many rows of each search are ranked; by default 100, or twice those wanted."""
        return replace(self, _depth=whole_number("depth", rows, least=1))

    def _plan(self, view: View) -> Node[Chunk]:
        where, columns = self._filter(view), self._chosen(view)
        depth = self._depth or max(DEFAULT_DEPTH, 2 * (self._limit + self._offset))
        nearest = plan_vector_hits(
            view,
            self._vectors(view),
            self._vector,
            depth,
            where=where,
            **self._vector_options(),
        )
        matching = plan_text_hits(
            view, self._texts(view), self._text, depth, where=where, **self._text_options()
        )
        return plan_hybrid_search(
            view,
            nearest,
            matching,
            columns,
            self._limit,
            self._offset,
            depth=depth,
            weights=self._weights,
            rank_constant=self._rank_constant,
        )


def search(
    read: Read,
    query: Any,
    column: Any,
    *,
    vector: Any = None,
    text: Any = None,
    vector_column: Any = None,
    text_column: Any = None,
) -> VectorQuery | TextQuery | HybridQuery:
    """A query for what was asked; vectors may come as lists, NumPy or Arrow arrays."""
    if query is not None:
        if vector is not None or text is not None:
            raise InvalidInput(
                "give one query, or vector= and text= for a hybrid search, not a query and these"
            )
        vector, text = (None, query) if isinstance(query, str) else (query, None)
    if vector is None and text is None:
        raise InvalidInput(
            "nothing to search for; give a vector, a text, or vector= and text= for both"
        )
    if column is not None:
        if vector is not None and text is not None:
            raise InvalidInput(
                "a hybrid search has two columns; name them vector_column= and text_column="
            )
        if (text_column if vector is None else vector_column) is not None:
            raise InvalidInput("the column is named twice; leave one out")
        if vector is None:
            text_column = column
        else:
            vector_column = column
    if vector is None and vector_column is not None:
        raise InvalidInput("vector_column= is given, but no vector to search for")
    if text is None and text_column is not None:
        raise InvalidInput("text_column= is given, but no text to search for")
    if text is None:
        return VectorQuery(
            _read=read,
            _vector=given_vector(vector),
            _vector_column=vector_column_name(vector_column),
        )
    if vector is None:
        return TextQuery(
            _read=read, _text=given_text(text), _text_columns=text_column_names(text_column)
        )
    return HybridQuery(
        _read=read,
        _vector=given_vector(vector),
        _vector_column=vector_column_name(vector_column),
        _text=given_text(text),
        _text_columns=text_column_names(text_column),
    )
