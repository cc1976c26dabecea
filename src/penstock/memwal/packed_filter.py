"""From a filter to the rows that may match it, by asking packed indexes.

What comes out is a superset of the rows that match, or None where the indexes can rule nothing
out. Nothing rests on it being exact: whoever reads the rows puts the filter to them again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_

import pyarrow as pa
from pyroaring import BitMap

from penstock.memwal.predicates import (
    And,
    Compare,
    Constant,
    IsNull,
    Like,
    Not,
    OneOf,
    Or,
    Predicate,
    TextMatch,
)
from penstock.packed.indexes.base import NotAnswered, PackedIndex

Asked = Callable[[str], "PackedIndex | None"]
"""The index of a column, if it has one."""


def columns_asked(predicate: Predicate) -> set[str]:
    """The columns whose indexes could rule rows out."""
    match predicate:
        case Compare(column) | OneOf(column) | IsNull(column) | TextMatch(column) | Like(column):
            return {column}
        case And(parts):
            return set().union(*map(columns_asked, parts))
        case Or(parts):
            each = [columns_asked(part) for part in parts]
            return set().union(*each) if all(each) else set()
        case Not(Compare() | OneOf() | IsNull() | TextMatch() as part):
            return columns_asked(part)
        case _:
            return set()


def candidates(predicate: Predicate, index_of: Asked) -> BitMap | None:
    """Rows that may match; None if that may be any."""
    try:
        return _candidates(predicate, index_of)
    except NotAnswered:
        return None


def _candidates(predicate: Predicate, index_of: Asked) -> BitMap | None:
    match predicate:
        case Constant(value):
            return None if value else BitMap()
        case And(parts):
            known = [found for part in parts if (found := candidates(part, index_of)) is not None]
            return reduce(and_, known) if known else None
        case Or(parts):
            each = [candidates(part, index_of) for part in parts]
            whole = [found for found in each if found is not None]
            return reduce(or_, whole) if len(whole) == len(each) else None
        case Compare(column, op, value):
            index = _fitting(index_of(column), value.type)
            return None if index is None else index.query(op, value)
        case OneOf(column, values, _):
            index = _fitting(index_of(column), values.type)
            return None if index is None else index.query("in", values)
        case IsNull(column):
            asked = index_of(column)
            return None if asked is None else asked.query("is_null")
        case TextMatch(column, kernel, text):
            asked = index_of(column)
            return None if asked is None else _matching_text(asked, kernel, text)
        case Like(column, pattern):
            # Never under a NOT: Lance may see in `_` and `%` less than an index does.
            asked = index_of(column)
            return None if asked is None else asked.query("like", pattern)
        case Not(IsNull(column)):
            asked = index_of(column)
            return None if asked is None else asked.query("is_not_null")
        case Not(OneOf(_, _, True)):
            return BitMap()  # equal to NULL or not is never known
        case Not(Compare(column) | OneOf(column) | TextMatch(column) as part):
            asked, matching = index_of(column), candidates(part, index_of)
            if asked is None or matching is None:
                return None
            return asked.query("is_not_null") - matching
        case _:
            return None


def _fitting(index: PackedIndex | None, value_type: pa.DataType) -> PackedIndex | None:
    return index if index is not None and index.value_type == value_type else None


def _matching_text(index: PackedIndex, kernel: str, text: str) -> BitMap | None:
    if kernel == "starts_with":
        return index.query("prefix", text)
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    if kernel == "ends_with":
        return index.query("like", f"%{escaped}")
    return index.query("like", f"%{escaped}%") if kernel == "match_substring" else None
