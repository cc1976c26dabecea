"""What is given to a query, checked: text, vectors, names of columns, numbers.

Each function returns its value in the form that the query keeps, or refuses it with an error that
says what was expected. None of them looks at a table.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InvalidInput

Vector = npt.NDArray[np.float32]


def given_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"the text to search for must be a string, not {text!r}")
    if not text.strip():
        raise InvalidInput("the text to search for is empty")
    return text


def vector_column_name(name: Any) -> str | None:
    if name is not None and not isinstance(name, str):
        raise InvalidInput(f"column must be the name of a column, not {name!r}")
    return name


def text_column_names(names: Any) -> tuple[str, ...] | None:
    if names is None or isinstance(names, str):
        return None if names is None else (names,)
    listed = isinstance(names, list | tuple) and len(names) > 0
    if not listed or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"columns must be a name or a list of names, not {names!r}")
    if len(set(names)) != len(names):
        raise InvalidInput(f"a column appears twice among {list(names)}")
    return tuple(names)


def given_vector(query: Any) -> Vector:
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


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def number(name: str, value: Any, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidInput(f"{name} must be a number, not {value!r}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        least = "more than 0" if positive else "at least 0"
        raise InvalidInput(f"{name} must be {least}, but it is {value}")
    return float(value)


def whole_number(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidInput(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise InvalidInput(f"{name} must be at least {least}, but it is {value}")
    return int(value)
