"""Columns of numbers, every question about them, and golden indexes built from their specs."""

from __future__ import annotations

import io
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from tests.packed.brute import expected, ordered
from tests.packed.fixtures import golden, spec
from tests.packed.memory_entries import MemoryEntries, golden_entries

from penstock.errors import Corruption
from penstock.packed.indexes.base import IndexKind, PackedIndex
from penstock.packed.indexes.numeric import stored_type
from penstock.packed.indexes.numeric_sort import INDEX_DATA, struct_of
from penstock.packed.writer import PackedWriter

TYPES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
}
NUMBERS = [kind for name, kind in TYPES.items() if name != "string"]

NEGATIVE_NAN = float(np.copysign(np.nan, -1))


def numbers(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values that repeat and values at the ends of the type."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        odd = [0.0, -0.0, float("nan"), NEGATIVE_NAN, float("inf"), float("-inf"), 5e-324, 1.5]
        if kind == pa.float32():
            odd.remove(5e-324)
        return st.sampled_from(odd) | st.floats(width=kind.bit_width, allow_nan=False)
    signed = not pa.types.is_unsigned_integer(kind)
    low = -(1 << kind.bit_width - 1) if signed else 0
    high = (1 << kind.bit_width - signed) - 1
    return st.sampled_from([low, high, 0, 1, 2, 3]) | st.integers(low, high)


def columns_of(kind: pa.DataType) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.none() | numbers(kind), max_size=60)


def number_questions(one: Any, other: Any) -> list[tuple[str, Any]]:
    low, high = sorted((one, other), key=ordered)
    return [
        ("is_null", None),
        ("is_not_null", None),
        *((op, one) for op in ("=", "!=", "<", "<=", ">", ">=")),
        ("in", [one, other, one]),
        ("in", []),
        ("not_in", [other]),
        *(("range", ends) for ends in ((low, high), (high, low), (None, low), (high, None))),
        ("range", (None, None)),
    ]


def assert_answers(index: PackedIndex, values: list[Any], asked: list[tuple[str, Any]]) -> None:
    for op, value in asked:
        wanted = expected(values, op if op != "!=" else "not_in", value if op != "!=" else [value])
        assert list(index.query(op, value)) == wanted, (op, value)
        assert index.count(op, value) == len(wanted), (op, value)


def held_values(index: PackedIndex, values: list[Any]) -> list[Any]:
    """What the index holds, row by row, asked for with every value that it may hold."""
    held: list[Any] = [None] * index.rows
    for value in {ordered(value): value for value in values if value is not None}.values():
        for row in index.query("=", value):
            held[row] = value
    return held


def assert_holds(index: PackedIndex, values: list[Any]) -> None:
    assert index.rows == len(values)
    assert list(index.is_null()) == expected(values, "is_null")
    assert held_values(index, values) == values


# --- golden files --------------------------------------------------------------------------


def golden_options(name: str) -> dict[str, Any]:
    given = spec(name)
    if given["index"] == "bitmap":
        return {"nullable": given["nullable"]}
    return {"ties": "std_sort"}


def assert_golden(kind: IndexKind, name: str, **options: Any) -> None:
    """The golden file holds what its spec says, and is written again byte for byte."""
    given, entries = spec(name), golden_entries(name)
    value_type = TYPES[given["type"]]
    loaded = kind.load(entries, value_type)
    assert_holds(loaded, given["values"])
    built = kind.build(pa.array(given["values"], value_type), **golden_options(name), **options)
    assert_holds(built, given["values"])
    for index in (loaded, built):
        written = MemoryEntries()
        index.write(written, described=False)
        assert list(written.entries) == list(entries.entries)
        assert written.meta == entries.meta
        if given["index"] == "stlsort" and given["type"] != "string":
            # Padding between value and row is whatever the writer's memory held; ours is zero.
            layout = struct_of(stored_type(value_type))
            ours = np.frombuffer(written.entries[INDEX_DATA], layout)
            theirs = np.frombuffer(entries.entries[INDEX_DATA], layout)
            assert ours["value"].tobytes() == theirs["value"].tobytes()
            assert ours["row"].tobytes() == theirs["row"].tobytes()
            padded = int(layout.itemsize > sum(layout[n].itemsize for n in layout.names))
            written.entries[INDEX_DATA] = entries.entries[INDEX_DATA]
        else:
            padded = 0
        assert written.entries == entries.entries
        if not padded:
            assert whole_file(index) == golden(name)


def whole_file(index: PackedIndex) -> bytes:
    target = io.BytesIO()
    with PackedWriter(target) as writer:
        index.write(writer, described=False)
    return target.getvalue()


# --- damage --------------------------------------------------------------------------------


def damaged_copies(entries: MemoryEntries, seed: int, copies: int) -> list[MemoryEntries]:
    """The entries, each time with one changed at random: a byte, a piece cut out, a piece added."""
    random = Random(seed)
    found = []
    for _ in range(copies):
        name = random.choice([name for name, data in entries.entries.items() if data])
        data = bytearray(entries.entries[name])
        at = random.randrange(len(data))
        match random.randrange(4):
            case 0 | 1:
                data[at] ^= 1 << random.randrange(8)
            case 2:
                del data[at : at + random.choice([1, 4, 8])]
            case 3:
                data[at:at] = random.randbytes(random.choice([1, 4, 8]))
        found.append(entries.replaced(**{name: bytes(data)}))
    return found


def loaded_or_refused(
    kind: IndexKind, entries: MemoryEntries, value_type: pa.DataType
) -> PackedIndex | None:
    """The index, or None if it was refused with an error that names an entry."""
    try:
        return kind.load(entries, value_type)
    except Corruption as error:
        if any(name in str(error) for name in entries.names()):
            return None
        raise
