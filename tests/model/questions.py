"""What is asked of a table after every step, and what a plain dict says to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

Row = dict[str, Any]
Key = tuple[Any, ...]
Truth = bool | None
"""SQL's: true, false or unknown."""

NUMBERS: Sequence[int | None] = [None, -3, 0, 1, 2, 5, 8, 2**53 + 1]
TEXTS: Sequence[str | None] = [None, "", "a", "ab", "it's", "ü", "Ab", "%"]
VALUES = [
    pa.field("n", pa.int64()),
    pa.field("s", pa.string()),
    pa.field("stamp", pa.int64(), nullable=False),
]


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of table: its key, and the keys that rows may have."""

    name: str
    key_fields: Sequence[pa.Field]
    keys: Sequence[Key]
    regions: Sequence[tuple[str, tuple[Any, ...]]]
    """Region specs by the name of the function in `penstock` and its arguments."""
    keyed: bool = True

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*self.key_fields, *VALUES])

    @property
    def primary_key(self) -> list[str] | None:
        return [column.name for column in self.key_fields] if self.keyed else None

    def key_of(self, row: Row) -> Key:
        """What tells rows apart. Without a primary key it is the stamp, no two of which agree."""
        if not self.keyed:
            return (row["stamp"],)
        return tuple(row[column.name] for column in self.key_fields)


def _single(name: str, kind: pa.DataType, keys: Sequence[Any], *, keyed: bool = True) -> Variant:
    regions = [("unsharded", ()), ("bucket", ("id", 2)), ("bucket", ("id", 3))]
    column = pa.field("id", kind, nullable=not keyed)
    return Variant(name, [column], [(key,) for key in keys], regions, keyed)


VARIANTS = {
    variant.name: variant
    for variant in (
        _single("int", pa.int64(), range(-3, 9)),
        _single("string", pa.string(), ["", "a", "A", "ab", "it's", "ü", "日本", "%", "0", "\n"]),
        Variant(
            "composite",
            [pa.field("t", pa.string(), nullable=False), pa.field("id", pa.int32())],
            [(tenant, number) for tenant in ("", "a", "it's") for number in (-1, 0, 1, 2**31 - 1)],
            [
                ("unsharded", ()),
                ("bucket", ("t", 2)),
                ("identity", ("t",)),
                ("multi_bucket", (["t", "id"], 2)),
            ],
        ),
        _single("no_key", pa.int64(), [None, *range(5)], keyed=False),
    )
}


# --- conditions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """A filter as SQL and as Python."""

    sql: str
    test: Callable[[Row], Truth] = field(repr=False)
    listed: tuple[str, frozenset[Any]] | None = field(default=None, repr=False)
    """The column and the values, if it is an IN."""

    def holds(self, row: Row) -> bool:
        return self.test(row) is True


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: bool(a == b),
    "!=": lambda a, b: bool(a != b),
    "<": lambda a, b: bool(a < b),
    "<=": lambda a, b: bool(a <= b),
    ">": lambda a, b: bool(a > b),
    ">=": lambda a, b: bool(a >= b),
}


def _compare(column: str, operator: str, value: Any) -> Condition:
    work = _OPERATORS[operator]
    return Condition(
        f"{column} {operator} {_literal(value)}",
        lambda row: None if row[column] is None else work(row[column], value),
    )


def _one_of(column: str, values: Sequence[Any]) -> Condition:
    return Condition(
        f"{column} IN ({', '.join(map(_literal, values))})",
        lambda row: None if row[column] is None else row[column] in values,
        (column, frozenset(values)),
    )


def _is_null(column: str) -> Condition:
    return Condition(f"{column} IS NULL", lambda row: row[column] is None)


def _starts(column: str, text: str) -> Condition:
    return Condition(
        f"{column} LIKE {_literal(text + '%')}",
        lambda row: None if row[column] is None else row[column].startswith(text),
    )


def _not(part: Condition) -> Condition:
    def test(row: Row) -> Truth:
        found = part.test(row)
        return None if found is None else not found

    return Condition(f"NOT ({part.sql})", test)


def _both(left: Condition, right: Condition) -> Condition:
    def test(row: Row) -> Truth:
        found = (left.test(row), right.test(row))
        return False if False in found else None if None in found else True

    # Lance plans two lists that share no value as false, even where the column is NULL, and
    # under NOT that shows. A filter means what it means to Lance.
    sql = f"({left.sql}) AND ({right.sql})"
    if left.listed is not None and right.listed is not None:
        (column, values), (other, others) = left.listed, right.listed
        if column == other and not values & others:
            return Condition(sql, lambda row: False)
    return Condition(sql, test)


def _either(left: Condition, right: Condition) -> Condition:
    def test(row: Row) -> Truth:
        found = (left.test(row), right.test(row))
        return True if True in found else None if None in found else False

    return Condition(f"({left.sql}) OR ({right.sql})", test)


def conditions(variant: Variant) -> st.SearchStrategy[Condition]:
    """Filters over every column, a few levels deep at most."""
    known: dict[str, list[Any]] = {
        "n": [value for value in NUMBERS if value is not None],
        "s": [value for value in TEXTS if value is not None],
    }
    for place, column in enumerate(variant.key_fields):
        values = {key[place] for key in variant.keys} - {None}
        known[column.name] = sorted(values)
    leaves: list[st.SearchStrategy[Condition]] = [
        st.sampled_from(["n", "s"]).map(_is_null),
        st.sampled_from(["", "a", "A"]).map(lambda text: _starts("s", text)),
    ]
    for column_name, choices in known.items():
        value = st.sampled_from(choices)
        leaves.append(
            st.builds(_compare, st.just(column_name), st.sampled_from([*_OPERATORS]), value)
        )
        leaves.append(
            st.builds(_one_of, st.just(column_name), st.lists(value, min_size=1, max_size=3))
        )
    leaf = st.one_of(leaves)
    deeper = st.one_of(leaf.map(_not), st.builds(_both, leaf, leaf), st.builds(_either, leaf, leaf))
    return st.one_of(leaf, deeper, deeper.map(_not))


# --- questions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """One of each kind of read."""

    condition: Condition
    columns: tuple[str, ...]
    limit: int
    offset: int
    keys: tuple[Key, ...]

    @property
    def wire(self) -> Asked:
        return Asked(self.condition.sql, self.columns, self.limit, self.offset, self.keys)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as it is sent to whoever holds the table."""

    filter: str
    columns: tuple[str, ...]
    limit: int
    offset: int
    keys: tuple[Key, ...]


Reads = tuple[str, ...]
"""Which kinds of read are made."""
Answer = dict[str, Any]
"""What each of them gave."""

EVERY: Reads = ("scan", "count", "get", "get_many", "filtered")
"""What is read after every step."""
FURTHER: Sequence[Reads] = ((), ("filtered_count",), (), ("window",))
"""What is read besides, in turn."""
HALVES: Sequence[Reads] = (("scan", "get", "filtered_count"), ("filtered", "count", "get_many"))


def questions(variant: Variant) -> st.SearchStrategy[Question]:
    names = variant.schema.names
    projections = [tuple(names), ("stamp",), tuple(reversed(names)), ("s", "stamp"), ("n",)]
    absent = {"int": (77,), "string": ("absent",), "composite": ("a", 77)}.get(variant.name)
    keys = [*variant.keys, absent] if absent is not None else [*variant.keys]
    return st.builds(
        Question,
        conditions(variant),
        st.sampled_from(projections),
        st.integers(0, 6),
        st.integers(0, 5),
        st.lists(st.sampled_from(keys), min_size=1, max_size=4).map(tuple),
    )


def check(variant: Variant, model: dict[Key, Row], question: Question, answer: Answer) -> None:
    """Hold every part of an answer against the model."""
    sql = question.condition.sql
    matching = {k: row for k, row in model.items() if question.condition.holds(row)}
    for read, found in answer.items():
        if read == "scan":
            agree("scan", by_key(variant, found), model)
        elif read == "count":
            agree("count", found, len(model))
        elif read == "filtered":
            names = question.columns
            projected = [{name: row[name] for name in names} for row in matching.values()]
            agree(f"scan where {sql}", in_order(found), in_order(projected))
        elif read == "filtered_count":
            agree(f"count where {sql}", found, len(matching))
        elif read == "window":
            window = by_key(variant, found)
            expected_rows = min(max(len(matching) - question.offset, 0), question.limit)
            agree(f"rows in a window where {sql}", len(window), expected_rows)
            agree(f"window where {sql}", window, {key: matching.get(key) for key in window})
        elif read == "get":
            agree("get", found, model.get(question.keys[0]))
        else:
            assert read == "get_many"
            expected = {key: model[key] for key in question.keys if key in model}
            agree("get_many", by_key(variant, found), expected)


def agree(what: str, found: Any, expected: Any) -> None:
    if found == expected:
        return
    if isinstance(found, dict):
        keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        found = {key: found.get(key) for key in keys}
        expected = {key: expected.get(key) for key in keys}
    raise AssertionError(f"{what} gives\n  {found}\nwhere the model has\n  {expected}")


def by_key(variant: Variant, rows: Sequence[Row]) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for row in rows:
        key = variant.key_of(row)
        assert key not in found, f"{key} came back twice: {found[key]} and {row}"
        assert list(row) == variant.schema.names
        found[key] = row
    return found


def in_order(rows: Sequence[Row]) -> list[list[tuple[str, Any]]]:
    return sorted((list(row.items()) for row in rows), key=repr)
