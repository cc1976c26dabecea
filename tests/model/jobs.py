"""The jobs that keep a table healthy and the changes of many rows: what each must come to.

A job is one call of a table's, which can be cut short anywhere; some can also be begun, and be
completed when much else has happened. Most of them only move rows, and no reader may see that they
ran. Those that change rows say of each which it becomes; where one is cut short every row is the
old one or the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from tests.model.layers import Changes
from tests.model.mortal import Death
from tests.model.questions import EXTRA, Columns, Condition, Key, Row, Variant, conditions

Cells = list[tuple[int, int]]

GC_LIMITS: Sequence[Mapping[str, float]] = (
    {"retain_seconds": 0.0, "orphan_seconds": 0.0},
    {"retain_seconds": 0.0},
    {},
)


@dataclass(frozen=True, slots=True)
class Job:
    method: str
    arguments: tuple[Any, ...] = ()
    changes: Changes = field(default_factory=dict)
    """What becomes of rows; all others stay as they are."""
    columns: Columns | None = None
    """The columns there are afterwards, if they change."""
    flushes: bool = False
    """It flushes this user's writers, so it may have to say that one was fenced."""
    snapshots: bool = False
    forgets: bool = False
    """Versions without a tag may be gone afterwards."""
    alone: bool = False
    """Nothing else may be under way."""
    settles: bool = False
    """Everything is in the base afterwards."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is when a job begins."""

    variant: Variant
    columns: Columns
    model: Mapping[Key, Row]
    rows: Callable[[Cells], list[Row]]
    """Makes rows of what was drawn."""
    pieces: Sequence[Any]
    """What was worked out and is not committed."""


# --- drawing -----------------------------------------------------------------------------------

_BOOL = st.booleans()
_CELLS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 63)), min_size=1, max_size=6)


def deaths(name: str) -> st.SearchStrategy[Death]:
    """When it may come: most jobs take some ten calls that write, and four times as many in all."""
    writes = {"gc": 24, "maintain": 40, "merge": 14, "compact": 14}.get(name, 8)
    return st.one_of(
        st.builds(Death, st.integers(1, writes), st.just(True), _BOOL),
        st.builds(Death, st.integers(1, 4 * writes), st.just(False), _BOOL),
    )


def drawn_jobs(variant: Variant) -> dict[str, tuple[int, st.SearchStrategy[tuple[Any, ...]]]]:
    """How often each job comes, and what it draws."""
    where = st.one_of(conditions(variant), conditions(variant, extra=True))
    either = st.tuples(conditions(variant), where)
    return {
        "flush": (4, st.tuples(_BOOL)),
        "merge": (3, st.tuples(st.sampled_from([1_000_000, 1, 4]))),
        "compact": (3, st.tuples(st.sampled_from([1 << 20, 4, 12]), st.sampled_from([0.1, 0.0]))),
        "build_indexes": (3, st.just(())),
        "complete": (3, st.just(())),
        "snapshot": (4, st.tuples(_BOOL)),
        "gc": (3, st.tuples(st.sampled_from(GC_LIMITS))),
        "maintain": (2, st.tuples(_BOOL, _BOOL)),
        "delete_where": (2, st.tuples(either)),
        "update_where": (3, st.tuples(either, st.integers(0, len(_UPDATES) - 1))),
        "merge_insert": (3, st.tuples(_CELLS, st.integers(0, 4))),
        "change_columns": (4, st.tuples(st.integers(0, 5))),
    }


# --- what they come to -------------------------------------------------------------------------


def plan(name: str, drawn: tuple[Any, ...], scene: Scene) -> Job:
    return _PLANS[name](scene, *drawn)


def _flush(scene: Scene, recover: bool) -> Job:
    return Job("flush", (recover,), flushes=True)


def _merge(scene: Scene, max_rows: int) -> Job:
    return Job("merge", (max_rows,))


def _compact(scene: Scene, target_rows: int, deletion_share: float) -> Job:
    return Job("compact", (target_rows, deletion_share))


def _build_indexes(scene: Scene) -> Job:
    return Job("build_indexes")


def _complete(scene: Scene) -> Job:
    """Commit what was worked out when the table was another."""
    return Job("complete", (list(scene.pieces),))


def _snapshot(scene: Scene, outside: bool) -> Job:
    return Job("snapshot", (outside,), snapshots=True)


def _gc(scene: Scene, limits: Mapping[str, float]) -> Job:
    now = limits.get("retain_seconds") == 0
    alone = limits.get("orphan_seconds") == 0
    return Job("gc", (dict(limits),), forgets=now, alone=alone)


def _maintain(scene: Scene, recover: bool, now: bool) -> Job:
    return Job("maintain", (recover, now), flushes=True, forgets=now, settles=recover)


def _chosen(scene: Scene, either: tuple[Condition, Condition]) -> Condition:
    """The second condition may be about a column that is not there."""
    plain, other = either
    return other if EXTRA in scene.columns.by_role else plain


def _delete_where(scene: Scene, either: tuple[Condition, Condition]) -> Job:
    where = _chosen(scene, either)
    gone = [key for key, row in scene.model.items() if where.holds(row)]
    sql = where.named(scene.columns)
    return Job("delete_where", (sql,), dict.fromkeys(gone), flushes=not scene.variant.keyed)


def _plus_one(row: Row) -> Any:
    return None if row["n"] is None else row["n"] + 1


def _shouted(row: Row) -> Any:
    return None if row["s"] is None else row["s"].upper()


_UPDATES: Sequence[tuple[str, Any, Callable[[Row], Any]]] = (
    ("n", 5, lambda row: 5),
    ("n", "{n} + 1", _plus_one),
    ("s", "'ab'", lambda row: "ab"),
    ("s", "upper({s})", _shouted),
    (EXTRA, "{n} + 1", _plus_one),
)
"""A column, its value or an expression for it, and that in Python."""


def _update_where(scene: Scene, either: tuple[Condition, Condition], which: int) -> Job:
    where = _chosen(scene, either)
    role, value, python = _UPDATES[which]
    names = scene.columns.by_role
    if role not in names:
        role, value, python = _UPDATES[0]
    if isinstance(value, str):
        value = value.format_map(names)
    changes = {
        key: {**row, role: python(row)} for key, row in scene.model.items() if where.holds(row)
    }
    arguments = (where.named(scene.columns), {names[role]: value})
    return Job("update_where", arguments, changes, flushes=not scene.variant.keyed)


def _change_columns(scene: Scene, which: int) -> Job:
    columns = scene.columns
    if which < 2 and EXTRA not in columns.by_role:
        added = columns.with_extra()
        return Job("add_column", (added.by_role[EXTRA],), columns=added)
    if which < 2:
        return Job("drop_column", (columns.by_role[EXTRA],), columns=columns.without_extra())
    role = ("n", "s", "n", EXTRA)[which - 2]
    if role not in columns.by_role:
        role = "s"
    renamed = columns.renamed(role)
    if renamed == columns:
        return Job("drop_column", (columns.by_role[EXTRA],), columns=columns.without_extra())
    names = (columns.by_role[role], renamed.by_role[role])
    return Job("rename_column", names, columns=renamed)


# --- merge insert ------------------------------------------------------------------------------


def _merge_insert(scene: Scene, cells: Cells, which: int) -> Job:
    """Rows that match are updated or deleted, others inserted, and some of the rest deleted.

    Without a primary key rows are matched by `id`, and several may be; so none of them gets the
    stamp of a row of the data, which tells rows apart.
    """
    keyed = scene.variant.keyed
    made = scene.rows(cells)
    by_match = {_match(scene, row) or (None, row["stamp"]): row for row in made}
    data = {match: row for match, row in by_match.items() if match[0] is not None or keyed}
    rows, names = list(by_match.values()), scene.columns.by_role
    n = names["n"]
    matched = {
        key: (row, data[match])
        for key, row in scene.model.items()
        if (match := _match(scene, row)) is not None and match in data
    }
    there = {_match(scene, row) for row in scene.model.values()}
    unmatched = [row for match, row in by_match.items() if match not in there]
    inserts: dict[Key, Row | None] = {scene.variant.key_of(row): row for row in unmatched}
    insert = ("when_not_matched_insert_all",)
    update = ("when_matched_update_all",)
    changes: dict[Key, Row | None] = {}
    given: Sequence[str] = [role for role, _ in scene.columns.named]
    clauses: list[tuple[Any, ...]] = []
    if which == 0:  # those that are not there
        changes, clauses = inserts, [insert]
    elif which == 1:  # those that are there go
        changes, clauses = {**dict.fromkeys(matched), **inserts}, [("when_matched_delete",), insert]
    elif which == 2:  # only one column is given
        given = [*scene.variant.match_columns, "n"]
        changes = {key: {**row, "n": new["n"]} for key, (row, new) in matched.items()}
        clauses = [update]
    elif which == 3 and keyed:  # only where more is given
        newer = f"source.{n} > target.{n}"
        changes = {key: new for key, (row, new) in matched.items() if _is_more(new, row)}
        changes, clauses = changes | inserts, [(*update, newer), insert]
    else:  # the data is all there is to be where n > 1
        swept = {
            key: None
            for key, row in scene.model.items()
            if key not in matched and row["n"] is not None and row["n"] > 1
        }
        changes = {**swept, **inserts}
        clauses = [insert, ("when_not_matched_by_source_delete", f"{n} > 1")]
        if keyed:
            changes |= {key: new for key, (_, new) in matched.items()}
            clauses.append(update)
    shown = [scene.columns.shown({role: row[role] for role in given}) for row in rows]
    on = None if keyed else ["id"]
    return Job("merge_insert", (shown, on, clauses), changes, flushes=not keyed)


def _match(scene: Scene, row: Row) -> Key | None:
    """What a row is matched by; None where that is null, which matches nothing."""
    match = tuple(row[column] for column in scene.variant.match_columns)
    return None if not scene.variant.keyed and None in match else match


def _is_more(new: Row, row: Row) -> bool:
    return new["n"] is not None and row["n"] is not None and new["n"] > row["n"]


_PLANS: dict[str, Callable[..., Job]] = {
    "flush": _flush,
    "merge": _merge,
    "compact": _compact,
    "build_indexes": _build_indexes,
    "complete": _complete,
    "snapshot": _snapshot,
    "gc": _gc,
    "maintain": _maintain,
    "delete_where": _delete_where,
    "update_where": _update_where,
    "merge_insert": _merge_insert,
    "change_columns": _change_columns,
}
