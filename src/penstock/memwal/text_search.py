"""Text search over a view: the rows of the merged table that match best, wherever they are stored.

    GlobalLimitExec         limit and offset
      SortExec              the best of all, with their columns (`hits`)
        GlobalBM25Exec      one set of statistics, and every row scored with it
          FilterStaleExec   which rows are live, and how many of them have each term
            UnionExec
              FTSExec …     the postings of the query's terms, one for each source; for all
                            generations together, if they are many

Scores are those of one table, with one index, that has exactly the live rows: superseded and
deleted rows count nowhere, and a row counts wherever it is, covered by an index or not. Texts and
the query go through the tokenizer of the base's index. A filter decides which rows come out and
does not change statistics, as in Lance: a row scores the same with and without it.

Several columns are scored apart, each with its own statistics; a row has the best of its boosted
scores.

Invariants
- Every hit is live and matches. Of k rows asked for, the k best are there.
- Equal documents have equal scores, whatever layer they are in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from penstock.errors import InvalidInput
from penstock.index.bm25 import Operator
from penstock.memwal.hits import Hits, SortExec
from penstock.memwal.plan import Chunk, GlobalLimitExec, Node, UnionExec
from penstock.memwal.scan import checked_columns
from penstock.memwal.sources import GenerationSource
from penstock.memwal.text_group import MOST_RUNS
from penstock.memwal.text_memory import TextMemory
from penstock.memwal.text_nodes import (
    AskedColumn,
    FilterStaleExec,
    FTSExec,
    GlobalBM25Exec,
    TextQuery,
)
from penstock.memwal.text_standing import BASE

if TYPE_CHECKING:
    from penstock.memwal.filters import Filter
    from penstock.memwal.view import View

SCORE = "_score"
OPERATORS: tuple[str, ...] = get_args(Operator)


def text_columns(view: View) -> list[str]:
    """The columns that have a full-text index."""
    return view.reader.memory(TextMemory).columns(view)


def plan_text_hits(
    view: View,
    columns: Sequence[str],
    text: str,
    k: int | None,
    *,
    operator: Operator = "or",
    boosts: Mapping[str, float] | None = None,
    where: Filter | None = None,
) -> Node[Hits]:
    """The k best rows, or all that match if k is None; in no order."""
    if operator not in OPERATORS:
        raise InvalidInput(f"unknown operator {operator!r}; there are: {', '.join(OPERATORS)}")
    if not isinstance(text, str):
        raise InvalidInput(f"the query must be text, not {type(text).__name__}")
    asked = _asked(view, columns, text, operator, boosts or {})
    query = TextQuery(view, asked, text, operator, k, where)
    found = [FTSExec(query, places) for places in _together(view)]
    return GlobalBM25Exec(query, FilterStaleExec(query, UnionExec(*found)))


def plan_text_search(
    view: View,
    columns: Sequence[str],
    text: str,
    k: int | None,
    *,
    operator: Operator = "or",
    boosts: Mapping[str, float] | None = None,
    where: Filter | None = None,
    select: Sequence[str] | None = None,
    offset: int = 0,
) -> Node[Chunk]:
    """The best rows after the first `offset`, best first, with their `_score` last."""
    chosen = _selected(view, select)
    best = None if k is None else k + offset
    hits = plan_text_hits(view, columns, text, best, operator=operator, boosts=boosts, where=where)
    fetch = sys.maxsize if best is None else best
    ordered = SortExec(view, chosen, SCORE, hits, fetch=fetch, descending=True)
    return GlobalLimitExec(k, offset, ordered)


def _together(view: View) -> list[list[int]]:
    """Places of sources that are searched in one go, the newest first."""
    places = list(reversed(range(len(view.sources))))
    generations = [at for at in places if isinstance(view.sources[at], GenerationSource)]
    if len(generations) <= MOST_RUNS:
        return [*([place] for place in places), [BASE]]
    others = [at for at in places if not isinstance(view.sources[at], GenerationSource)]
    return [*([place] for place in others), generations, [BASE]]


def _selected(view: View, select: Sequence[str] | None) -> list[str]:
    if select is None or isinstance(select, str):
        return checked_columns(view, select)
    return checked_columns(view, [name for name in select if name != SCORE])


def _asked(
    view: View,
    columns: Sequence[str],
    text: str,
    operator: Operator,
    boosts: Mapping[str, float],
) -> list[AskedColumn]:
    if isinstance(columns, str):
        raise InvalidInput(f"columns must be a list of names; write [{columns!r}]")
    if not columns or len(set(columns)) != len(columns):
        raise InvalidInput(f"name each column to search once, at least one, not {list(columns)}")
    for name, boost in boosts.items():
        if name not in columns:
            raise InvalidInput(f"a boost for {name!r}, but only {', '.join(columns)} is searched")
        if isinstance(boost, bool) or not isinstance(boost, int | float):
            raise InvalidInput(f"the boost of {name!r} must be a number, not {boost!r}")
        if not (math.isfinite(boost) and boost > 0):
            raise InvalidInput(f"the boost of {name!r} must be positive, but it is {boost}")
    memory = view.reader.memory(TextMemory)
    asked = []
    for name in columns:
        column = memory.column(view, name)
        if operator == "phrase" and not column.with_positions:
            raise InvalidInput(
                f"the full-text index of {name!r} keeps no positions, which phrases need; create "
                f'it again with create_index({name!r}, "fts", name={column.spec.name!r}, '
                "with_position=True)"
            )
        tokens = column.encoder.analyzer.tokenize(text)
        asked.append(
            AskedColumn(
                column,
                tuple(term for term, _ in tokens),
                tuple(position for _, position in tokens),
                float(boosts.get(name, 1.0)),
            )
        )
    return asked
