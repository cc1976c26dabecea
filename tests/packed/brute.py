"""What an index must answer, found by looking at every value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any


def expected(values: list[Any], op: str, asked: Any = None) -> list[int]:
    """Rows for which the question holds; null rows only for `is_null`."""
    if op == "is_null":
        return [row for row, value in enumerate(values) if value is None]
    holds = _test(op, asked)
    return [row for row, value in enumerate(values) if value is not None and holds(value)]


def like_regex(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression of Python's, character by character."""
    parts, at = [], 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "\\":
            parts.append(re.escape(pattern[at]))
            at += 1
        else:
            parts.append({"%": ".*", "_": "."}.get(char, re.escape(char)))
    return re.compile("".join(parts), re.DOTALL)


def ordered(value: Any) -> Any:
    """Something that sorts as values do: NaN above all numbers, or below if its sign is set."""
    if isinstance(value, float):
        if math.isnan(value):
            return (math.copysign(1, value), 0.0)
        return (0, value)
    return value.encode() if isinstance(value, str) else value


def _test(op: str, asked: Any) -> Callable[[Any], bool]:
    match op:
        case "is_not_null":
            return lambda value: True
        case "in" | "not_in":
            among = {ordered(value) for value in asked}
            return lambda value: (ordered(value) in among) == (op == "in")
        case "=":
            return lambda value: ordered(value) == ordered(asked)
        case "<":
            return lambda value: ordered(value) < ordered(asked)
        case "<=":
            return lambda value: ordered(value) <= ordered(asked)
        case ">":
            return lambda value: ordered(value) > ordered(asked)
        case ">=":
            return lambda value: ordered(value) >= ordered(asked)
        case "range":
            low, high = asked
            return lambda value: (
                (low is None or ordered(value) >= ordered(low))
                and (high is None or ordered(value) <= ordered(high))
            )
        case "prefix":
            return lambda value: value.startswith(asked)
        case "like":
            regex = like_regex(asked)
            return lambda value: regex.fullmatch(value) is not None
    raise AssertionError(op)
