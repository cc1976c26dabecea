"""Rows are changed by condition while columns get other names: no value lands in another column.

Each story is told once for every moment at which the columns can change: before and after every
look at the table, every write, and every new version. Whatever the moment, what comes out is what
would have come out had the columns changed before, or after, and nothing in between.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import Lake, Process, make_lake
from tests.memwal.changing import bounds

from penstock import InvalidInput, Table
from penstock.memwal import changes, merge_insert
from penstock.storage.open import open_store
from penstock.table import _Access

Row = dict[str, Any]
IDS = range(12)
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("a", pa.int64()),
        pa.field("b", pa.int64()),
        pa.field("c", pa.string()),
    ]
)
BEFORE: dict[int, Row] = {i: {"id": i, "a": i, "b": 51 + i, "c": "old"} for i in IDS}


# --- what is asked for, and what it is to come to ----------------------------------------------


def update(table: Table) -> None:
    table.update(where="a % 2 = 0", values={"a": "a + b", "c": "'new'"})


def updated(rows: dict[int, Row]) -> dict[int, Row]:
    return {
        i: {**row, "a": row["a"] + row["b"], "c": "new"} if row["a"] % 2 == 0 else row
        for i, row in rows.items()
    }


def delete(table: Table) -> None:
    table.delete(where="a % 2 = 0")


def deleted(rows: dict[int, Row]) -> dict[int, Row]:
    return {i: row for i, row in rows.items() if row["a"] % 2}


DATA: dict[int, Row] = {i: {"id": i, "a": 1000 + i} for i in (0, 1, 2, 3, 20)}


def merge_in(table: Table, data: list[Row] | None = None) -> None:
    builder = table.merge_insert("id").when_matched_update_all("target.a <= 2")
    builder = builder.when_not_matched_insert_all().when_not_matched_by_source_delete("a % 2 = 0")
    builder.execute(pa.Table.from_pylist(data or list(DATA.values())))


def merged_in(rows: dict[int, Row], data: dict[int, Row] = DATA) -> dict[int, Row]:
    after = {i: row for i, row in rows.items() if i in data or row["a"] % 2}
    for i, row in data.items():
        if i not in rows:
            after[i] = {"b": None, "c": None, **row}
        elif rows[i]["a"] <= 2:
            after[i] = {**rows[i], **row}
    return after


WHOLE: dict[int, Row] = {i: {**row, "b": 2000 + i, "c": "whole"} for i, row in DATA.items()}


def merge_in_whole(table: Table) -> None:
    merge_in(table, list(WHOLE.values()))


def merged_in_whole(rows: dict[int, Row]) -> dict[int, Row]:
    return merged_in(rows, WHOLE)


Outcome = Callable[[dict[int, Row]], dict[int, Row]]
ASKED: dict[Callable[[Table], None], Outcome] = {
    update: updated,
    delete: deleted,
    merge_in: merged_in,
    merge_in_whole: merged_in_whole,
}


# --- when the columns change -------------------------------------------------------------------


@dataclass
class Moments:
    """Counts the moments of a change, and lets the columns change at one of them."""

    chosen: int
    act: Callable[[], None]
    passed: int = field(default=0)

    def come(self, *_: object) -> None:
        self.passed += 1
        if self.passed == self.chosen:
            self.act()


@contextmanager
def watched(moments: Moments) -> Iterator[None]:
    """Before and after every look at the table, and before every write."""
    read, write = _Access.read, _Access.write

    def watched_read(access: _Access, work: Any) -> Any:
        moments.come()
        found = read(access, work)
        moments.come()
        return found

    def watched_write(access: _Access, work: Any) -> int:
        moments.come()
        return write(access, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Access, "read", watched_read)
        patch.setattr(_Access, "write", watched_write)
        for module in (changes, merge_insert):
            patch.setattr(module, "CHUNK_ROWS", 3)
        yield


def swap(table: Table) -> None:
    for old, new in (("a", "between"), ("b", "a"), ("between", "b")):
        table.rename_column(old, new)


def drop_b(table: Table) -> None:
    table.drop_columns("b")


def drop_and_add_b(table: Table) -> None:
    table.drop_columns("b")
    table.add_columns({"b": pa.int64()})


def add_d(table: Table) -> None:
    table.add_columns({"d": pa.int64()})
    table.upsert([{**BEFORE[2], "d": 4}])


def layered(path: Path, *, keyed: bool) -> Lake:
    """Rows in two fragments of the base, in a generation, and in the log."""
    lake = make_lake(path, schema=SCHEMA, primary_key="id" if keyed else None)
    table = lake.process().table
    for first in (0, 3, 6, 9):
        table.upsert([BEFORE[i] for i in range(first, first + 3)])
        if first < 9:
            table.flush()
        if first < 6:
            table.merge()
    table.close()
    return lake


def copied(lake: Lake) -> Lake:
    path = Path(lake.store.uri)
    copy = path.parent / uuid.uuid4().hex
    shutil.copytree(path, copy)
    return Lake(open_store(copy))


def told(
    lake: Lake, ask: Callable[[Table], None], evolve: Callable[[Table], None], written_rows: int
) -> Iterator[tuple[Lake, InvalidInput | None]]:
    """The story with the columns changing at each moment in turn."""
    for chosen in range(1, 100):
        here = copied(lake)
        process, other = here.process(), here.process().table
        process.table.upsert([])  # so that it has a writer, which is older than what comes
        moments = Moments(chosen, partial(_evolve_and_wait, evolve, other, process))
        for key in ("_versions/[0-9]*.manifest", "*/wal/*"):
            process.store.hook(op="put_if_absent", key=key, before=moments.come)
        refused = None
        with watched(moments), bounds(written_rows):
            try:
                ask(process.table)
            except InvalidInput as error:
                refused = error
        process.table.close()
        if moments.passed < chosen:
            assert chosen > 4, "there are more moments than these"
            return
        yield here, refused
        shutil.rmtree(here.store.uri)
    raise AssertionError("it does not end")


def _evolve_and_wait(evolve: Callable[[Table], None], table: Table, process: Process) -> None:
    evolve(table)
    process.clock.advance(1_001)  # after which writers look whether they have today's columns


def found(lake: Lake, names: Mapping[str, str] = MappingProxyType({})) -> dict[int, Row]:
    """What is there, under the names of before."""
    rows = lake.reader().to_arrow().to_pylist()
    by_id = {row["id"]: {names.get(name, name): row[name] for name in row} for row in rows}
    assert len(by_id) == len(rows)
    lance.dataset(lake.store.uri).validate()
    return by_id


# --- the stories -------------------------------------------------------------------------------

KINDS = [(True, 10_000), (True, 0), (False, 0)]
"""With a key through the log and in the base, and without one."""


@pytest.mark.parametrize(
    ("ask", "keyed", "written_rows"),
    [
        *((ask, *kind) for ask in (update, delete) for kind in KINDS),
        *((merge_in, *kind) for kind in KINDS[1:]),
        (merge_in_whole, *KINDS[0]),
    ],
)
def test_names_that_are_swapped(
    tmp_path: Path, ask: Callable[[Table], None], keyed: bool, written_rows: int
) -> None:
    """It is all done to the columns of before, or all to those of after."""
    outcome = ASKED[ask]
    swapped = {i: {**row, "a": row["b"], "b": row["a"]} for i, row in BEFORE.items()}
    after = {i: {**row, "a": row["b"], "b": row["a"]} for i, row in outcome(swapped).items()}
    seen = set()
    for lake, refused in told(layered(tmp_path, keyed=keyed), ask, swap, written_rows):
        assert refused is None
        rows = found(lake, {"a": "b", "b": "a"})
        assert rows in (outcome(BEFORE), after)
        seen.add(rows == after)
    assert True in seen
    assert seen == {True, False} or not keyed


@pytest.mark.parametrize(("keyed", "written_rows"), KINDS)
def test_a_column_that_decides_is_dropped(tmp_path: Path, keyed: bool, written_rows: int) -> None:
    """What cannot go on says so, and how far it got; what it did, it did as it was asked to."""
    undone = without_b(BEFORE)
    done = without_b(updated(BEFORE))
    told_how_far = False
    for lake, refused in told(layered(tmp_path, keyed=keyed), update, drop_b, written_rows):
        rows = found(lake)
        if refused is None:
            assert rows == done
            continue
        assert re.search(r"column 'b'|No field named b\.", str(refused))
        assert all(rows[i] in (undone[i], done[i]) for i in IDS)
        notes = " ".join(getattr(refused, "__notes__", []))
        assert ("had been changed" in notes) == (rows != undone)
        told_how_far |= rows != undone
    assert told_how_far == keyed


@pytest.mark.parametrize("evolve", [drop_b, drop_and_add_b])
def test_a_column_that_is_only_set_is_dropped(
    tmp_path: Path, evolve: Callable[[Table], None]
) -> None:
    """Then it is as if it had been dropped after all was done, or the data names no such column."""
    outcomes = set()
    for lake, refused in told(layered(tmp_path, keyed=True), merge_in_whole, evolve, 0):
        rows = found(lake)
        if refused is not None:
            assert evolve is drop_b
            assert "unknown column 'b'" in str(refused)
            assert rows == without_b(BEFORE)
        elif rows != (before := added_b(merged_in_whole(BEFORE), evolve)):
            assert evolve is drop_and_add_b
            assert without_b(rows) == without_b(before)
            assert {row["b"] for row in rows.values()} <= {
                None,
                *(row["b"] for row in WHOLE.values()),
            }
        outcomes.add(refused is None)
    assert outcomes == {True, False} if evolve is drop_b else {True}


@pytest.mark.parametrize("ask", [update, merge_in_whole], ids=lambda ask: ask.__name__)
def test_a_column_that_is_added_keeps_its_values(
    tmp_path: Path, ask: Callable[[Table], None]
) -> None:
    """Unless its row is written between being read and being written: the last writer wins."""
    done = {i: {**row, "d": None} for i, row in ASKED[ask](BEFORE).items()}
    kept, overwritten = {**done[2], "d": 4}, {**BEFORE[2], "d": 4}
    seen = []
    for lake, refused in told(layered(tmp_path, keyed=True), ask, add_d, 10_000):
        assert refused is None
        rows = found(lake)
        seen.append(rows.pop(2))
        assert rows == {i: row for i, row in done.items() if i != 2}
    assert all(row in (kept, overwritten, done[2]) for row in seen)
    assert kept in seen
    assert seen.count(done[2]) <= 3


def without_b(rows: dict[int, Row]) -> dict[int, Row]:
    return {i: {n: v for n, v in row.items() if n != "b"} for i, row in rows.items()}


def added_b(rows: dict[int, Row], evolve: Callable[[Table], None]) -> dict[int, Row]:
    if evolve is drop_b:
        return without_b(rows)
    return {i: {**row, "b": None} for i, row in rows.items()}
