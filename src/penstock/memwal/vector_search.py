"""Vector search over a view: the k nearest rows of the merged table, wherever they are stored.

Every source answers with rows that count: the newest of their key, alive, matching the filter.
The base is asked through Lance and its index. Lance knows nothing of what hides its rows, so
hidden ones are dropped from its answer, and it is asked for more until enough are left or there
are no more. Generations and MemTables are compared exactly, row by row, from vectors in memory
(`vector_blocks`), within the partitions nearest the query where the table has an index. Generations
that do not fit in the cache are asked through Lance like the base. At last the nearest of all are
taken, and only their columns read.

Distances from compressed codes cannot be compared with exact ones: they would favour one source
over another. So where the index compresses (PQ, SQ) Lance compares more rows than are wanted
with the vectors themselves, `refine` times as many, and `_distance` is exact everywhere.

Invariants
- A row is found whether or not an index covers it. `nprobes` and `refine` decide how good an
  answer is and how long it takes, never how many rows it has: if k rows match, there are k.
- A row without a distance is never found: no vector, or with `cosine` a vector of zeros, which
  has no direction. Lance does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.ivf import IvfIndex, exact_distances
from penstock.index.primary_key import key_array
from penstock.memwal.scan import checked_columns
from penstock.memwal.sources import ROW_ID, GenerationSource, MemTableSource, StaleView
from penstock.memwal.vector_blocks import (
    VectorBlock,
    VectorColumn,
    VectorMemory,
    guarded,
    take_rows,
)
from penstock.memwal.view import View
from penstock.memwal.wal import TOMBSTONE

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Range = tuple[float | None, float | None]

DISTANCE = "_distance"
METRICS = ("l2", "cosine", "dot")
DEFAULT_NPROBES = 20
DEFAULT_REFINE = 10
"""How many times as many rows as wanted are compared exactly where the index compresses."""
_LEAST_REFINE = 4
_BLOCK_ROWS = 1 << 16
"""So many rows are compared at a time, so that memory stays bounded."""
_OFFSET_MASK = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """What is asked of every source."""

    column: VectorColumn
    query: Floats
    metric: str
    rows: int
    """How many rows are wanted, those skipped by the offset included."""
    nprobes: int | None
    refine: int | None
    where: Filter | None
    low: float
    high: float
    _probed: dict[int, Mask] = field(default_factory=dict, repr=False)

    def probed(self, model: IvfIndex) -> Mask:
        """Of each partition whether to look into it; the last stands for rows without one."""
        known = self._probed.get(id(model))
        if known is None:
            known = np.zeros(model.num_partitions + 1, dtype=np.bool_)
            known[model.probes(self.query, self.nprobes or DEFAULT_NPROBES)] = True
            known[-1] = True
            self._probed[id(model)] = known
        return known

    def in_range(self, distances: Floats) -> Mask:
        # No distance is not in range: comparisons with NaN are false.
        inside: Mask = distances >= self.low
        return inside if self.high == math.inf else inside & (distances < self.high)

    def is_beyond(self, distances: Floats) -> bool:
        """Whether anything further away than these is out of range."""
        return self.high < math.inf and len(distances) > 0 and bool(distances.max() >= self.high)


@dataclass(frozen=True, slots=True, eq=False)
class _Hits:
    """Rows of one source with their distances; `None` is the base."""

    source: GenerationSource | MemTableSource | None
    rows: npt.NDArray[np.uint64]
    distances: Floats


def search_vectors(
    view: View,
    column: str,
    query: Floats,
    k: int,
    *,
    nprobes: int | None = None,
    refine: int | None = None,
    where: Filter | None = None,
    metric: str | None = None,
    columns: Sequence[str] | None = None,
    distance_range: Range | None = None,
    offset: int = 0,
) -> pa.Table:
    """The `k` nearest rows after the first `offset`, nearest first, with their `_distance`.

    `distance_range` keeps distances from the first up to, not including, the second. The metric
    is that of the column's index unless given, or `l2` if there is none.
    """
    wanted = checked_columns(view, columns)
    memory = VectorMemory.of(view.reader)
    described = memory.column(view, column, metric)
    used_metric = metric or described.metric or "l2"
    if used_metric not in METRICS:
        raise InvalidInput(f"unknown metric {used_metric!r}; there are: {', '.join(METRICS)}")
    low, high = distance_range or (None, None)
    search = _Search(
        described,
        _checked_query(query, described, used_metric),
        used_metric,
        k + offset,
        nprobes,
        refine,
        where,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )
    found: list[_Hits] = []
    if k:
        generations = set(memory.in_memory(view, described))
        for source in reversed(view.sources):
            if isinstance(source, MemTableSource) or source in generations:
                found.append(_search_memory(view, source, search, memory))
            else:
                found.append(_search_generation(view, source, search))
        found.append(_search_base(view, search))
    return _nearest_rows(view, found, k, offset, wanted)


def _checked_query(query: Floats, column: VectorColumn, metric: str) -> Floats:
    if query.ndim != 1 or len(query) != column.dimensions:
        shape = f"{len(query)} dimensions" if query.ndim == 1 else f"the shape {query.shape}"
        raise InvalidInput(
            f"column {column.name!r} holds vectors of {column.dimensions} dimensions, "
            f"the query has {shape}"
        )
    if not np.isfinite(query).all():
        raise InvalidInput("the query vector has values that are not finite (NaN or infinity)")
    if metric == "cosine" and not query.any():
        raise InvalidInput(
            "the query vector is all zeros and has no direction, so no cosine distance; "
            "use another vector or the metric l2 or dot"
        )
    return np.ascontiguousarray(query, dtype=np.float32)


# --- sources in memory ---------------------------------------------------------------------


def _search_memory(
    view: View, source: GenerationSource | MemTableSource, search: _Search, memory: VectorMemory
) -> _Hits:
    if isinstance(source, MemTableSource):
        block = memory.memtable(view, source, search.column)
    else:
        block = memory.generation(view, source, search.column)
    counting = block.usable
    if view.shape.key_columns:
        counting = counting & view.freshness.newest(source)
    if search.where is not None and counting.any():
        counting = counting & _matching(view, source, search.where, len(counting))
    rows = _probed(block, counting, search)
    distances = _distances(block, rows, search)
    kept = search.in_range(distances)
    if rows is not None and np.count_nonzero(kept) < search.rows:
        # Not enough in the nearest partitions: every row is compared.
        rows, distances = None, _distances(block, None, search)
        kept = search.in_range(distances)
    if rows is None:
        kept &= counting
    chosen = np.flatnonzero(kept)
    if len(chosen) > search.rows:
        nearest = np.argpartition(distances[chosen], search.rows - 1)[: search.rows]
        chosen = chosen[nearest]
    numbers = chosen if rows is None else rows[chosen]
    return _Hits(source, numbers.astype(np.uint64), distances[chosen])


def _probed(block: VectorBlock, counting: Mask, search: _Search) -> npt.NDArray[np.int64] | None:
    """The rows to compare: those that count in the nearest partitions; None stands for all."""
    live = int(np.count_nonzero(counting))
    model = block.model
    if block.partitions is not None and model is not None and model.metric == search.metric:
        rows = np.flatnonzero(search.probed(model)[block.partitions] & counting)
        if len(rows) >= min(search.rows, live):
            return rows
    return np.flatnonzero(counting) if live * 4 < len(counting) else None


def _distances(block: VectorBlock, rows: npt.NDArray[np.int64] | None, search: _Search) -> Floats:
    count = len(block.vectors) if rows is None else len(rows)
    parts = [np.empty(0, dtype=np.float32)]
    for at in range(0, count, _BLOCK_ROWS):
        end = min(at + _BLOCK_ROWS, count)
        vectors = block.vectors[at:end] if rows is None else block.vectors[rows[at:end]]
        with np.errstate(over="ignore", invalid="ignore"):
            distances = exact_distances(search.query, vectors, search.metric)
        if search.metric == "cosine":
            distances[~vectors.any(axis=1)] = np.nan
        parts.append(distances)
    return np.concatenate(parts)


def _matching(
    view: View, source: GenerationSource | MemTableSource, where: Filter, rows: int
) -> Mask:
    """Which of the source's rows match the filter."""
    mask = np.zeros(rows, dtype=np.bool_)
    for _, numbers, _ in source.scan(view.shape, [], where):
        mask[numbers] = True
    return mask


# --- sources in Lance ----------------------------------------------------------------------


def _search_generation(view: View, source: GenerationSource, search: _Search) -> _Hits:
    sql = f"{TOMBSTONE} = false"
    if search.where is not None:
        sql = f"{sql} AND ({search.where.sql})"
    newest = view.freshness.newest(source) if view.shape.key_columns else None

    def counts(hits: pa.Table) -> Mask:
        rows = (hits.column(ROW_ID).to_numpy() & _OFFSET_MASK).astype(np.int64)
        return np.ones(len(rows), dtype=np.bool_) if newest is None else newest[rows]

    share = 1.0 if newest is None else float(np.count_nonzero(newest)) / max(1, len(newest))
    rows, distances = guarded(
        source, lambda: _ask_lance(source.dataset, search, sql, share, counts, [])
    )
    return _Hits(source, rows & _OFFSET_MASK, distances)


def _search_base(view: View, search: _Search) -> _Hits:
    dataset = view.base.dataset
    sql = None if search.where is None else search.where.sql
    total = dataset.count_rows()
    needed: list[str] = []
    hidden = view.hidden_base_rows if view.shape.key_columns and view.sources else None
    if not (view.shape.key_columns and view.sources):
        share = 1.0

        def counts(hits: pa.Table) -> Mask:
            return np.ones(hits.num_rows, dtype=np.bool_)

    elif hidden is not None:
        share = 1.0 - len(hidden) / max(1, total)

        def counts(hits: pa.Table) -> Mask:
            return ~hidden.contains(hits.column(ROW_ID).to_numpy())

    else:
        # Too many keys to keep: compare those of the hits with those in front of the base.
        needed = list(view.shape.key_columns)
        newer = view.freshness.distinct
        share = max(0.5, 1.0 - len(newer) / max(1, total))

        def counts(hits: pa.Table) -> Mask:
            return ~np.asarray(pc.is_in(key_array(hits, needed), value_set=newer))

    if not total or share <= 0.0:
        return _Hits(None, np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.float32))
    return _Hits(None, *_ask_lance(dataset, search, sql, share, counts, needed))


def _ask_lance(
    dataset: lance.LanceDataset,
    search: _Search,
    sql: str | None,
    share: float,
    counts: Callable[[pa.Table], Mask],
    columns: list[str],
) -> tuple[npt.NDArray[np.uint64], Floats]:
    """The nearest rows that count, asking for more until there are enough or no more.

    `share` is the part of all rows that count, to ask for enough at the first attempt.
    """
    total = dataset.count_rows()
    share = max(share, 1 / total)
    # As many as hold enough that count on average, and two standard deviations more.
    asked = math.ceil((search.rows + 2 * math.sqrt(search.rows * (1 - share))) / share)
    asked = min(total, asked)
    nearest: dict[str, Any] = {
        "column": search.column.name,
        "q": search.query,
        "metric": search.metric,
        "use_index": search.column.metric == search.metric,
    }
    if search.column.compressed and nearest["use_index"]:
        # By default so many times the rows wanted, however many more are asked for.
        spread = math.ceil(DEFAULT_REFINE * search.rows / max(1, asked))
        nearest["refine_factor"] = search.refine or max(_LEAST_REFINE, spread)
    if search.nprobes is not None:
        nearest["nprobes"] = search.nprobes
    while True:
        hits = dataset.scanner(
            columns=[*columns, DISTANCE],
            nearest={**nearest, "k": max(1, asked)},
            filter=sql,
            prefilter=sql is not None,
            with_row_id=True,
        ).to_table()
        distances = hits.column(DISTANCE).to_numpy()
        kept = counts(hits) & search.in_range(distances)
        enough = np.count_nonzero(kept) >= search.rows
        beyond = search.is_beyond(distances)
        if hits.num_rows < asked and not enough and not beyond and "nprobes" in nearest:
            del nearest["nprobes"]  # without it Lance goes on to further partitions
            continue
        if enough or beyond or hits.num_rows < asked or asked >= total:
            chosen = np.flatnonzero(kept)
            chosen = chosen[np.argsort(distances[chosen], kind="stable")[: search.rows]]
            return hits.column(ROW_ID).to_numpy()[chosen], distances[chosen]
        asked = min(total, 2 * asked)


# --- the answer ----------------------------------------------------------------------------


def _nearest_rows(
    view: View, found: Sequence[_Hits], k: int, offset: int, columns: list[str]
) -> pa.Table:
    """The rows of the `k` nearest hits after the first `offset`, in order."""
    distances = np.concatenate([np.empty(0, np.float32), *(hits.distances for hits in found)])
    order = np.argsort(distances, kind="stable")[offset : offset + k]
    found_distances = pa.array(distances[order], pa.float32())
    if not columns:
        return pa.table({DISTANCE: found_distances})
    schema = pa.schema([view.shape.schema.field(name) for name in columns])
    parts: list[pa.Table] = [schema.empty_table()]
    places = []
    first = 0
    for hits in found:
        end = first + len(hits.rows)
        here = np.flatnonzero((order >= first) & (order < end))
        if len(here):
            rows = hits.rows[order[here] - first]
            parts.append(_taken(view, hits.source, rows, columns).cast(schema))
            places.append(here)
        first = end
    rows_by_source = pa.concat_tables(parts)
    if len(places) > 1:
        back = np.argsort(np.concatenate(places), kind="stable")
        rows_by_source = rows_by_source.take(pa.array(back))
    return rows_by_source.append_column(pa.field(DISTANCE, pa.float32()), found_distances)


def _taken(
    view: View,
    source: GenerationSource | MemTableSource | None,
    rows: npt.NDArray[np.uint64],
    columns: list[str],
) -> pa.Table:
    """Rows of one source in the order given."""
    if source is None:
        taken = view.base.dataset._take_rows(rows.tolist(), columns=columns)
    elif isinstance(source, GenerationSource):
        taken = source.take(rows.astype(np.int64), view.shape, columns)
    else:
        taken = take_rows(source, rows.astype(np.int64), view.shape, columns)
    if taken.num_rows != len(rows):
        raise StaleView(f"{len(rows)} rows were found and {taken.num_rows} of them are there")
    return taken.select(columns)
