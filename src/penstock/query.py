"""The query builder: what `Table.search` returns.

A query is a value. Each call gives another one with one thing changed, so a query can be kept and
varied. Nothing is read until `to_arrow`, `to_pandas`, `to_polars` or `to_list`; each of them takes
its own view of the table. What can be checked without the table is checked at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInput
from penstock.memwal.vector_blocks import vector_columns
from penstock.memwal.vector_search import DISTANCE, METRICS, search_vectors
from penstock.memwal.view import View

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Read = Callable[[Callable[[View], pa.Table]], pa.Table]
"""Runs work on a view of the table."""

DEFAULT_LIMIT = 10


@dataclass(frozen=True, slots=True, eq=False)
class VectorQuery:
    """The rows whose vectors are nearest to one, nearest first."""

    _read: Read = field(repr=False)
    _vector: npt.NDArray[np.float32] = field(repr=False)
    _column: str | None
    _where: str | None = None
    _limit: int = DEFAULT_LIMIT
    _offset: int = 0
    _columns: tuple[str, ...] | None = None
    _nprobes: int | None = None
    _refine: int | None = None
    _metric: str | None = None
    _range: tuple[float | None, float | None] | None = None

    def where(self, filter: str) -> VectorQuery:
        """Only rows that match an SQL condition; the k nearest of these are found."""
        return replace(self, _where=filter)

    def limit(self, rows: int) -> VectorQuery:
        """At most so many rows; 10 by default."""
        return replace(self, _limit=_count("limit", rows, least=0))

    def offset(self, rows: int) -> VectorQuery:
        """Leave out the nearest so many."""
        return replace(self, _offset=_count("offset", rows, least=0))

    def select(self, columns: Sequence[str]) -> VectorQuery:
        """Only these columns; `_distance` always comes with them, last."""
        if isinstance(columns, str):
            raise InvalidInput(f"columns must be a list of names; write [{columns!r}]")
        chosen = tuple(name for name in columns if name != DISTANCE)
        return replace(self, _columns=chosen)

    def nprobes(self, partitions: int) -> VectorQuery:
        """How many partitions of the index to look into; more find more and take longer."""
        return replace(self, _nprobes=_count("nprobes", partitions, least=1))

    def refine(self, factor: int) -> VectorQuery:
        """Compare `factor` times as many rows as wanted exactly, if the index compresses."""
        return replace(self, _refine=_count("refine", factor, least=1))

    def metric(self, name: str) -> VectorQuery:
        """`l2`, `cosine` or `dot`; by default that of the index. Any other ignores the index."""
        if name not in METRICS:
            raise InvalidInput(f"unknown metric {name!r}; there are: {', '.join(METRICS)}")
        return replace(self, _metric=name)

    def distance_range(self, low: float | None = None, high: float | None = None) -> VectorQuery:
        """Only distances from `low` up to, not including, `high`."""
        for bound in (low, high):
            if bound is not None and (
                isinstance(bound, bool) or not isinstance(bound, int | float) or math.isnan(bound)
            ):
                raise InvalidInput(f"a distance must be a number, not {bound!r}")
        return replace(self, _range=(low, high))

    def to_arrow(self) -> pa.Table:
        return self._read(self._on)

    def to_pandas(self) -> pd.DataFrame:
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        import polars as pl

        frame = pl.from_arrow(self.to_arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_list(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.to_arrow().to_pylist()
        return rows

    def _on(self, view: View) -> pa.Table:
        where = None
        if self._where is not None:
            # Only here, because loading DataFusion takes longer than many a program runs.
            from penstock.memwal.filters import Filter

            where = Filter.parse(self._where, view.shape.schema)
        return search_vectors(
            view,
            _only_vector_column(view) if self._column is None else self._column,
            self._vector,
            self._limit,
            nprobes=self._nprobes,
            refine=self._refine,
            where=where,
            metric=self._metric,
            columns=self._columns,
            distance_range=self._range,
            offset=self._offset,
        )


def search(read: Read, query: Any, column: str | None) -> VectorQuery:
    """A query for what was asked; vectors may come as lists, NumPy or Arrow arrays."""
    if column is not None and not isinstance(column, str):
        raise InvalidInput(f"column must be the name of a column, not {column!r}")
    if isinstance(query, str):
        raise InvalidInput("text search is not there yet; search with a vector")
    return VectorQuery(read, _vector(query), column)


def _vector(query: Any) -> npt.NDArray[np.float32]:
    if isinstance(query, pa.Scalar):
        query = query.as_py()
    if isinstance(query, pa.Array | pa.ChunkedArray):
        query = query.to_numpy(zero_copy_only=False) if isinstance(query, pa.Array) else query
    try:
        given = np.asarray(query)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"the query is not a vector of numbers: {error}") from error
    if given.ndim != 1 or given.dtype.kind not in "fiu" or not len(given):
        raise InvalidInput(
            "the query must be one vector, a list or array of numbers, not "
            f"{type(query).__name__} of shape {given.shape} and type {given.dtype}"
        )
    with np.errstate(over="ignore"):
        vector = np.array(given, dtype=np.float32)  # a copy: the caller may reuse its buffer
    if not np.isfinite(vector).all():
        raise InvalidInput(
            "the query vector has values that are NaN, infinite or too large for 32-bit floats"
        )
    return vector


def _only_vector_column(view: View) -> str:
    there = vector_columns(view.shape.schema)
    if len(there) == 1:
        return there[0]
    if not there:
        raise InvalidInput(
            "the table has no column with vectors (a fixed-size list of floats); it has "
            f"{', '.join(view.shape.schema.names)}"
        )
    raise InvalidInput(
        f"several columns hold vectors; name one: search(vector, column={there[0]!r}); "
        f"there are: {', '.join(there)}"
    )


def _count(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInput(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise InvalidInput(f"{name} must be at least {least}, but it is {value}")
    return int(value)
