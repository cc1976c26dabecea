"""Vector search over a view: the k nearest rows of the merged table, wherever they are stored.

Every source answers with rows that count: the newest of their key, alive, matching the filter.
The base is asked through Lance and its index, on another thread, while the rest is compared here.
Lance knows nothing of what hides its rows, so hidden ones are dropped from its answer, and it is
asked for more until enough are left or there are no more. Generations, MemTables, and base rows
that the index does not cover yet are compared exactly, row by row, from vectors in memory
(`vector_blocks`), within the partitions nearest the query where the table has an index. Those that
do not fit in the cache are left to Lance. At last the nearest of all are taken (`hits`), and only
their columns read.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.index.primary_key import key_array
from penstock.memwal.fragments import offsets_of
from penstock.memwal.hits import Hits, SortExec, only_the_key
from penstock.memwal.plan import Chunk, GlobalLimitExec, Node, UnionExec
from penstock.memwal.scan import checked_columns
from penstock.memwal.sources import ROW_ID, BaseSource, GenerationSource, MemTableSource
from penstock.memwal.vector_blocks import FragmentBlock, VectorColumn, VectorMemory, guarded
from penstock.memwal.vector_compare import VectorSearch, nearest, nearest_of_group
from penstock.memwal.vector_group import VectorGroup
from penstock.memwal.view import View
from penstock.memwal.wal import TOMBSTONE

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Range = tuple[float | None, float | None]

DISTANCE = "_distance"
METRICS = ("l2", "cosine", "dot")
DEFAULT_REFINE = 10
"""How many times as many rows as wanted are compared exactly where the index compresses."""
_LEAST_REFINE = 4
_SEARCH_THREADS = 8
"""So many searches ask Lance at a time; more wait their turn."""
_pool = ThreadPoolExecutor(_SEARCH_THREADS, thread_name_prefix="penstock-search")


class KNNExec(Node[Hits]):
    """The nearest rows of one source. Each piece has more of them than the one before.

    `begin` may be called first, to have the first one found on another thread.
    """

    def __init__(self, label: str, rows: int, rounds: Callable[[], Iterator[Hits]]) -> None:
        super().__init__()
        self._label = label
        self._rows = rows
        self._rounds = rounds
        self._begun: tuple[Iterator[Hits], Future[Hits | None]] | None = None

    def describe(self) -> str:
        return f"KNNExec: {self._label}, k={self._rows}"

    def begin(self) -> None:
        rounds = self._rounds()
        self._begun = rounds, _pool.submit(next, rounds, None)

    def _stream(self) -> Iterator[Hits]:
        if self._begun is None:
            yield from self._rounds()
            return
        rounds, first = self._begun
        found = first.result()
        if found is not None:
            yield found
            yield from rounds


class FilterStaleExec(Node[Hits]):
    """Leaves out rows that something newer supersedes, exactly; asks for more where too few stay.

    Sources in memory know which of their rows count before they compare any. Only Lance has to be
    told afterwards.
    """

    def __init__(
        self, view: View, rows: int, union: UnionExec[Hits], last: Sequence[KNNExec]
    ) -> None:
        super().__init__(union)
        self._union = union
        self._view = view
        self._rows = rows
        self._last = last
        """Those that answer from another thread: begun first, waited for last."""

    def describe(self) -> str:
        return f"FilterStaleExec: exact, sources={len(self._view.sources)}"

    def _stream(self) -> Iterator[Hits]:
        sources = self.children[0].children
        if len(sources) > 1:
            if self._view.shape.key_columns and self._view.sources:
                _ = self._view.hidden_base_rows  # or both threads would work it out
            for begun in self._last:
                begun.begin()
        for source in sorted(sources, key=lambda child: child in self._last):
            kept: Hits | None = None
            for hits in source.stream():
                if hits.counted:
                    yield hits
                    continue
                counts = self._counts(hits)
                kept = hits if counts.all() else hits.chosen(np.flatnonzero(counts))
                if kept.num_rows >= self._rows:
                    break
            if kept is not None:
                yield kept
        self._union.count()

    def _counts(self, hits: Hits) -> Mask:
        view = self._view
        if not view.shape.key_columns or not view.sources:
            return np.ones(hits.num_rows, dtype=np.bool_)
        if isinstance(hits.source, GenerationSource):
            newest: Mask = view.freshness.newest(hits.source)[hits.rows.astype(np.int64)]
            return newest
        hidden = view.hidden_base_rows
        if hidden is not None:
            return ~hidden.contains(hits.rows)
        # Too many keys to keep: compare those of the hits with those in front of the base.
        assert hits.columns is not None
        keys = key_array(hits.columns, view.shape.key_columns)  # of rounds, so all of them
        return ~np.asarray(pc.is_in(keys, value_set=view.freshness.distinct))


def plan_vector_search(
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
) -> Node[Chunk]:
    """The `k` nearest rows after the first `offset`, nearest first, with their `_distance`.

    `distance_range` keeps distances from the first up to, not including, the second. The metric
    is that of the column's index unless given, or `l2` if there is none.
    """
    chosen = checked_columns(view, columns)
    rows = k + offset if k else 0
    hits = plan_vector_hits(
        view,
        column,
        query,
        rows,
        nprobes=nprobes,
        refine=refine,
        where=where,
        metric=metric,
        distance_range=distance_range,
        columns=[] if only_the_key(view, chosen) and view.key_index is not None else chosen,
    )
    return GlobalLimitExec(k, offset, SortExec(view, chosen, DISTANCE, hits, fetch=rows))


def plan_vector_hits(
    view: View,
    column: str,
    query: Floats,
    k: int,
    *,
    nprobes: int | None = None,
    refine: int | None = None,
    where: Filter | None = None,
    metric: str | None = None,
    distance_range: Range | None = None,
    columns: Sequence[str] = (),
) -> Node[Hits]:
    """At least the `k` nearest rows of all that count, and their distances.

    `columns` are those that will be wanted of them, to be read on the way where that is cheap.
    """
    memory = view.reader.memory(VectorMemory)
    described = memory.column(view, column, metric)
    used_metric = metric or described.metric or "l2"
    if used_metric not in METRICS:
        raise InvalidInput(f"unknown metric {used_metric!r}; there are: {', '.join(METRICS)}")
    low, high = distance_range or (None, None)
    search = VectorSearch(
        described,
        _checked_query(query, described, used_metric),
        used_metric,
        k,
        nprobes,
        refine,
        where,
        -math.inf if low is None else low,
        math.inf if high is None else high,
    )
    nodes: list[Node[Hits]] = []
    begun: list[KNNExec] = []
    if k:
        # What is kept in memory depends on the whole table, not on what one query leaves out.
        generations = memory.in_memory(view, described)
        group = memory.group(view, described, generations)
        view = view.pruned(where)
        asked = {source.uri for source in view.sources if isinstance(source, GenerationSource)}
        kept = {source.uri: source for source in generations if source.uri in asked}
        grouped: dict[str, GenerationSource] = {}
        if group is not None:
            grouped = {uri: kept[uri] for uri in group.generations if uri in kept}
        if group is not None and grouped:
            label = ", ".join(source.label for source in grouped.values())
            nodes.append(KNNExec(label, k, partial(_search_group, view, group, grouped, search)))
        for source in reversed(view.sources):
            if isinstance(source, MemTableSource):
                rounds = partial(_search_memory, view, source, search, memory)
            elif source.uri in grouped:
                continue
            elif source.uri in kept:
                rounds = partial(_search_memory, view, source, search, memory)
            else:
                rounds = partial(_search_generation, view, source, search)
            nodes.append(KNNExec(source.label, k, rounds))
        base = BaseSource(view.base.dataset, numbered=True)
        fragments = None
        if search.uses_index:
            fragments = memory.unindexed(view, described, generations)
        for fragment in fragments or ():
            label = f"{base.label}, unindexed fragment {fragment.fragment.fragment_id}"
            nodes.append(KNNExec(label, k, partial(_search_fragment, view, fragment, search)))
        if view.base.rows:
            indexed_only = fragments is not None
            last = KNNExec(
                base.label, k, partial(_search_base, view, search, list(columns), indexed_only)
            )
            begun.append(last)
            nodes.append(last)
    return FilterStaleExec(view, k, UnionExec(*nodes), begun)


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
    view: View,
    source: GenerationSource | MemTableSource,
    search: VectorSearch,
    memory: VectorMemory,
) -> Iterator[Hits]:
    if isinstance(source, MemTableSource):
        block = memory.memtable(view, source, search.column)
    else:
        block = memory.generation(view, source, search.column)
    counting = block.usable
    if view.shape.key_columns:
        counting = counting & view.freshness.newest(source)
    if search.where is not None and counting.any():
        counting = counting & _matching(view, source, search.where, len(counting))
    rows, distances = nearest(block, counting, search)
    yield Hits(source, rows.astype(np.uint64), distances, counted=True)


def _search_group(
    view: View, group: VectorGroup, sources: Mapping[str, GenerationSource], search: VectorSearch
) -> Iterator[Hits]:
    counting = np.zeros(int(group.firsts[-1]), dtype=np.bool_)
    for number, uri in enumerate(group.generations):
        source = sources.get(uri)
        if source is None:
            continue
        here = counting[group.firsts[number] : group.firsts[number + 1]]
        here[:] = view.freshness.newest(source) if view.shape.key_columns else True
        if search.where is not None and here.any():
            here &= _matching(view, source, search.where, len(here))
    places, distances = nearest_of_group(group, counting, search)
    if len(places) > search.rows:
        chosen = np.argpartition(distances, search.rows - 1)[: search.rows]
        places, distances = places[chosen], distances[chosen]
    owners = group.owners(places)
    for number in np.unique(owners).tolist():
        here = owners == number
        rows = (places[here] - group.firsts[number]).astype(np.uint64)
        yield Hits(sources[group.generations[number]], rows, distances[here], counted=True)


def _search_fragment(view: View, fragment: FragmentBlock, search: VectorSearch) -> Iterator[Hits]:
    counting = fragment.block.usable
    hidden = view.hidden_base_rows if view.shape.key_columns and view.sources else None
    if hidden is not None:
        counting = counting & ~hidden.contains(fragment.row_ids)
    if search.where is not None and counting.any():
        counting = counting & fragment.matching(view, search.where)
    rows, distances = nearest(fragment.block, counting, search)
    yield Hits(None, fragment.row_ids[rows], distances, counted=True)


def _matching(
    view: View, source: GenerationSource | MemTableSource, where: Filter, rows: int
) -> Mask:
    """Which of the source's rows match the filter."""
    mask = np.zeros(rows, dtype=np.bool_)
    for _, numbers, _ in source.scan(view.shape, [], where):
        mask[numbers] = True
    return mask


# --- sources in Lance ----------------------------------------------------------------------


def _search_generation(
    view: View, source: GenerationSource, search: VectorSearch
) -> Iterator[Hits]:
    sql = f"{TOMBSTONE} = false"
    if search.where is not None:
        sql = f"{sql} AND ({search.where.sql})"
    dataset, share = source.dataset, 1.0
    if view.shape.key_columns:
        newest = view.freshness.newest(source)
        share = float(np.count_nonzero(newest)) / max(1, len(newest))
    rounds = _ask_lance(dataset, dataset.count_rows(), search, sql, share, [])
    while True:
        hits = guarded(source, lambda: next(rounds, None))
        if hits is None:
            return
        rows = offsets_of(hits[ROW_ID].to_numpy()).view(np.uint64)
        yield Hits(source, rows, hits[DISTANCE].to_numpy())


def _search_base(
    view: View, search: VectorSearch, columns: list[str], indexed_only: bool
) -> Iterator[Hits]:
    dataset, rows = view.base.dataset, view.base.rows
    share, needed = 1.0, list(columns)
    if view.shape.key_columns and view.sources:
        hidden = view.hidden_base_rows
        if hidden is not None:
            share = 1.0 - len(hidden) / rows
        else:
            share = max(0.5, 1.0 - len(view.freshness.distinct) / rows)
            needed += [name for name in view.shape.key_columns if name not in columns]
    if share <= 0.0:
        return
    sql = None if search.where is None else search.where.sql
    for hits in _ask_lance(dataset, rows, search, sql, share, needed, indexed_only):
        yield Hits(
            None,
            hits[ROW_ID].to_numpy(),
            hits[DISTANCE].to_numpy(),
            hits if needed else None,
        )


def _ask_lance(
    dataset: lance.LanceDataset,
    total: int,
    search: VectorSearch,
    sql: str | None,
    share: float,
    columns: list[str],
    indexed_only: bool = False,
) -> Iterator[pa.Table]:
    """The nearest rows in range, more and more of them, until there are no more.

    `share` is the part of all rows that count, to ask for enough at the first attempt.
    """
    share = max(share, 1 / total)
    # As many as hold enough that count on average, and two standard deviations more.
    asked = math.ceil((search.rows + 2 * math.sqrt(search.rows * (1 - share))) / share)
    asked = min(total, asked)
    nearest: dict[str, Any] = {
        "column": search.column.name,
        "q": search.query,
        "metric": search.metric,
        "use_index": search.uses_index,
    }
    if search.column.compressed and search.uses_index:
        # So many times the rows wanted, however many more are asked for.
        spread = math.ceil((search.refine or DEFAULT_REFINE) * search.rows / max(1, asked))
        nearest["refine_factor"] = max(1 if search.refine else _LEAST_REFINE, spread)
    if search.nprobes is not None:
        nearest["nprobes"] = search.nprobes
    segments = None
    if indexed_only and search.uses_index and search.column.has_others:
        # Only these, so that it is the index whose unindexed rows are searched elsewhere.
        segments = sorted(search.column.segments)
    # Where row ids are stable, an index still has the rows that were deleted before a compaction.
    # Lance overlooks that they are gone until it looks up where they are, and then has fewer rows.
    outdated = bool(search.uses_index and sql is None and dataset.has_stable_row_ids)

    def scanned(options: dict[str, Any], looked_up: bool) -> pa.Table:
        return dataset.scanner(
            columns=[*(columns if looked_up else ()), DISTANCE],
            nearest=options,
            filter=sql,
            prefilter=sql is not None,
            with_row_id=True,
            with_row_address=outdated and looked_up and not columns,
            fast_search=indexed_only,
            index_segments=segments,
        ).to_table()

    def has_more() -> bool:
        """Whether the index has as many as were asked for, gone ones among them."""
        entries = max(1, asked) * nearest.get("refine_factor", 1)
        plain = {name: value for name, value in nearest.items() if name != "refine_factor"}
        return bool(scanned({**plain, "k": entries}, looked_up=False).num_rows >= entries)

    while True:
        hits = scanned({**nearest, "k": max(1, asked)}, looked_up=True)
        distances = hits[DISTANCE].to_numpy()
        if np.isinf(distances).any() and search.uses_index and "refine_factor" not in nearest:
            # Rows that match a filter but lie in no partition it looked into: Lance adds them
            # without a distance where there are too few others.
            nearest["refine_factor"] = 1
            continue
        inside = search.in_range(distances)
        yield hits if inside.all() else hits.filter(pa.array(inside))
        if search.is_beyond(distances):
            return
        if hits.num_rows < asked and outdated and has_more():
            asked = 2 * asked
        elif hits.num_rows < asked:
            if "nprobes" not in nearest:
                return
            del nearest["nprobes"]  # without it Lance goes on to further partitions
        elif asked >= total:
            return
        else:
            asked = min(total, 2 * asked)
