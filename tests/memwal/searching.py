"""Searches of one view, which the query builder only makes on a view of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.memwal.plan import Chunk, Node
from penstock.memwal.scan import checked_columns
from penstock.memwal.text_search import SCORE, plan_text_search
from penstock.memwal.vector_search import DISTANCE, plan_vector_search
from penstock.memwal.view import View


def search_vectors(
    view: View, *asked: Any, columns: Sequence[str] | None = None, **options: Any
) -> pa.Table:
    plan = plan_vector_search(view, *asked, columns=columns, **options)
    return _rows(view, plan, columns, DISTANCE)


def search_text(
    view: View, *asked: Any, select: Sequence[str] | None = None, **options: Any
) -> pa.Table:
    plan = plan_text_search(view, *asked, select=select, **options)
    return _rows(view, plan, select, SCORE)


def _rows(view: View, plan: Node[Chunk], columns: Sequence[str] | None, score: str) -> pa.Table:
    chosen = [name for name in columns if name != score] if columns is not None else None
    fields = [view.shape.schema.field(name) for name in checked_columns(view, chosen)]
    schema = pa.schema([*fields, pa.field(score, pa.float32())])
    return pa.Table.from_batches([chunk.rows for chunk in plan.stream()], schema)
