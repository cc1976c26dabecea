"""What is asked of a table after every step, and what a plain dict says to it.

Columns come, go and are renamed, so the dict knows values by the role of their column, which is
its name for life. `Columns` says what each is called in the table; conditions are written with
roles, and get the names when they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

Row = dict[str, Any]
"""Values by role, or by name where a row is on its way to or from the table."""
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
EXTRA = "x"
"""The role of a column that comes and goes."""
NAMES = {"n": ("n", "m", "x"), EXTRA: ("x", "n", "m"), "s": ("s", "text")}
"""What columns may be called; some names pass from one column to another."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table in their order: the role of each, and what it is called."""

    named: tuple[tuple[str, str], ...]

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.named]

    @property
    def by_role(self) -> dict[str, str]:
        return dict(self.named)

    def shown(self, row: Mapping[str, Any]) -> Row:
        """A row, or as much of it as is given, as the table has it."""
        return {name: row[role] for role, name in self.named if role in row}

    def understood(self, row: Row) -> Row:
        """A row of the table by roles."""
        roles = {name: role for role, name in self.named}
        return {roles[name]: value for name, value in row.items()}

    def with_extra(self) -> Columns:
        free = next(name for name in NAMES[EXTRA] if name not in self.names)
        return Columns((*self.named, (EXTRA, free)))

    def without_extra(self) -> Columns:
        return Columns(tuple(pair for pair in self.named if pair[0] != EXTRA))

    def renamed(self, role: str) -> Columns:
        """The column gets a name that is free, if there is one."""
        free = [name for name in NAMES[role] if name not in self.names]
        new = {role: free[0]} if free else {}
        return Columns(tuple((known, new.get(known, name)) for known, name in self.named))


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
    def columns(self) -> Columns:
        """What they are called at first."""
        return Columns(tuple((name, name) for name in self.schema.names))

    @property
    def primary_key(self) -> list[str] | None:
        return [column.name for column in self.key_fields] if self.keyed else None

    @property
    def match_columns(self) -> list[str]:
        """What `merge_insert` matches rows by."""
        return [column.name for column in self.key_fields]

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
    """With `{role}` where the name of a column has to be."""
    test: Callable[[Row], Truth] = field(repr=False)
    listed: tuple[str, frozenset[Any]] | None = field(default=None, repr=False)
    """The column and the values, if it is an IN."""

    def holds(self, row: Row) -> bool:
        return self.test(row) is True

    def named(self, columns: Columns) -> str:
        return self.sql.format_map(columns.by_role)


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
        f"{{{column}}} {operator} {_literal(value)}",
        lambda row: None if row[column] is None else work(row[column], value),
    )


def _one_of(column: str, values: Sequence[Any]) -> Condition:
    return Condition(
        f"{{{column}}} IN ({', '.join(map(_literal, values))})",
        lambda row: None if row[column] is None else row[column] in values,
        (column, frozenset(values)),
    )


def _is_null(column: str) -> Condition:
    return Condition(f"{{{column}}} IS NULL", lambda row: row[column] is None)


def _starts(column: str, text: str) -> Condition:
    return Condition(
        f"{{{column}}} LIKE {_literal(text + '%')}",
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


def conditions(variant: Variant, *, extra: bool = False) -> st.SearchStrategy[Condition]:
    """Filters over every column, a few levels deep at most; always over the extra one, or never."""
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
    if extra:
        numbers = st.sampled_from(known["n"])
        over = st.builds(_compare, st.just(EXTRA), st.sampled_from([*_OPERATORS]), numbers)
        over = st.one_of(st.just(_is_null(EXTRA)), over)
        return st.one_of(over, over.map(_not), st.builds(_both, leaf, over))
    deeper = st.one_of(leaf.map(_not), st.builds(_both, leaf, leaf), st.builds(_either, leaf, leaf))
    return st.one_of(leaf, deeper, deeper.map(_not))


# --- questions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """One of each kind of read."""

    condition: Condition
    of_extra: Condition
    """What is asked instead if the table has the extra column."""
    projection: tuple[str, ...]
    limit: int
    offset: int
    keys: tuple[Key, ...]

    def of(self, columns: Columns) -> Condition:
        return self.of_extra if EXTRA in columns.by_role else self.condition

    def wire(self, columns: Columns) -> Asked:
        names = tuple(columns.by_role[role] for role in self.roles(columns))
        sql = self.of(columns).named(columns)
        return Asked(sql, names, self.limit, self.offset, self.keys)

    def roles(self, columns: Columns) -> list[str]:
        return [role for role in self.projection if role in columns.by_role]


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
    projections = [
        (*names, EXTRA),
        ("stamp",),
        (EXTRA, *reversed(names)),
        ("s", "stamp"),
        (EXTRA, "n"),
    ]
    absent = {"int": (77,), "string": ("absent",), "composite": ("a", 77)}.get(variant.name)
    keys = [*variant.keys, absent] if absent is not None else [*variant.keys]
    return st.builds(
        Question,
        conditions(variant),
        st.one_of(conditions(variant), conditions(variant, extra=True)),
        st.sampled_from(projections),
        st.integers(0, 6),
        st.integers(0, 5),
        st.lists(st.sampled_from(keys), min_size=1, max_size=4).map(tuple),
    )


def check(
    variant: Variant, columns: Columns, model: dict[Key, Row], question: Question, answer: Answer
) -> None:
    """Hold every part of an answer against the model."""
    condition = question.of(columns)
    sql = condition.named(columns)
    matching = {k: row for k, row in model.items() if condition.holds(row)}
    for read, found in answer.items():
        if read == "scan":
            agree("scan", by_key(variant, columns, found), model)
        elif read == "count":
            agree("count", found, len(model))
        elif read == "filtered":
            roles = question.roles(columns)
            projected = [{role: row[role] for role in roles} for row in matching.values()]
            seen = [columns.understood(row) for row in found]
            agree(f"scan where {sql}", in_order(seen), in_order(projected))
        elif read == "filtered_count":
            agree(f"count where {sql}", found, len(matching))
        elif read == "window":
            window = by_key(variant, columns, found)
            expected_rows = min(max(len(matching) - question.offset, 0), question.limit)
            agree(f"rows in a window where {sql}", len(window), expected_rows)
            agree(f"window where {sql}", window, {key: matching.get(key) for key in window})
        elif read == "get":
            seen_row = None if found is None else columns.understood(found)
            agree("get", seen_row, model.get(question.keys[0]))
        else:
            assert read == "get_many"
            expected = {key: model[key] for key in question.keys if key in model}
            agree("get_many", by_key(variant, columns, found), expected)


def agree(what: str, found: Any, expected: Any) -> None:
    if found == expected:
        return
    if isinstance(found, dict):
        keys = [key for key in {**found, **expected} if found.get(key) != expected.get(key)]
        found = {key: found.get(key) for key in keys}
        expected = {key: expected.get(key) for key in keys}
    raise AssertionError(f"{what} gives\n  {found}\nwhere the model has\n  {expected}")


def by_key(variant: Variant, columns: Columns, rows: Sequence[Row]) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for named in rows:
        assert list(named) == columns.names
        row = columns.understood(named)
        key = variant.key_of(row)
        assert key not in found, f"{key} came back twice: {found[key]} and {row}"
        found[key] = row
    return found


def in_order(rows: Sequence[Row]) -> list[list[tuple[str, Any]]]:
    return sorted((list(row.items()) for row in rows), key=repr)
