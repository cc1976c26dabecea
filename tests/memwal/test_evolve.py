"""Columns are added, renamed and dropped; every row is read right, whatever layer it lies in."""

from __future__ import annotations

import threading
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.failures.lake import make_lake
from tests.interop.lance_side import (
    by_key,
    lance_rows,
)
from tests.memwal.column_story import CHANGES, LAYERS, Story, in_id_order, in_order, merge_only
from tests.refusals import refuses

import penstock
from penstock.errors import InvalidInput
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.storage.faults import Fault


@pytest.mark.parametrize("name", CHANGES)
def test_rows_of_every_age_are_read_right_in_every_layer(tmp_path: Path, name: str) -> None:
    story = Story(tmp_path)
    story.grow()
    story.check()
    story.pin()
    for change in CHANGES[name]:
        change(story)
        story.check()
        story.grow()
        story.check()
        story.pin()

    # Older versions have the columns they had.
    for version, rows in story.pinned:
        for handle in (story.table, story.watching):
            again = handle.to_arrow(version=version)
            assert again.schema == rows.schema
            assert in_order(again) == in_order(rows)
    # So do eventual reads those of the newest version, and Lance's readers.
    eventual = story.watching.to_arrow(consistency="eventual")
    assert in_order(eventual) == story.expected(("merged", "flushed"))
    lance_sees = by_key(eventual.to_pylist(), ["layer", "id"])
    assert lance_rows(story.table) == lance_sees

    # A MemTable that is older than all changes becomes a generation after them.
    story.held.close(flush=True)
    story.check()
    story.table.flush(recover=True)
    story.check()
    story.table.merge()
    story.check()
    assert in_order(lance.dataset(story.table.uri).to_table()) == story.expected()
    story.table.close()


def test_a_field_id_is_never_used_again(tmp_path: Path) -> None:
    """Lance numbers on from what its files have; a compaction makes it forget a dropped column."""
    story = Story(tmp_path, ("a", "b", "c"))
    story.grow()
    story.drop("c")
    lance.dataset(story.table.uri).optimize.compact_files(materialize_deletions_threshold=0.0)
    story.add("d")
    story.drop("d")
    story.add("e")
    story.check()
    ids = [field.id() for field in lance.dataset(story.table.uri).lance_schema.fields()]
    assert ids == [0, 1, 2, 3, 6]
    story.held.close()
    story.table.close()


def test_columns_with_columns_inside(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.grow()
    nested = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.struct([("z", pa.string())])))])
    story.table.add_columns(pa.schema([pa.field("deep", nested), pa.field("flat", pa.float64())]))
    story.table.drop_columns("deep")
    story.table.add_columns(pa.field("deep", nested))
    row = {"layer": "flushed", "id": 99, "deep": {"x": 1, "y": [{"z": "in"}]}, "flat": 0.5}
    story.table.upsert([row])
    for _ in ("in the log", "in a generation", "in the base"):
        for handle in (story.table, story.watching):
            found = handle.get(("flushed", 99))
            assert found == {**row, "a": None, "b": None}
            assert handle.count("deep is null") == 8
            assert handle.count("deep.x = 1") == 1
        story.table.flush()
        merge_only(story.table, "flushed")
    story.held.close()
    story.table.close()


# --- merges and other commits ------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CHANGES)[-4:])
def test_columns_change_between_the_fold_and_its_commit(tmp_path: Path, name: str) -> None:
    """Fragments know columns by field id, as generations do: nothing has to be folded again."""
    story = Story(tmp_path)
    story.grow()
    story.held.close(flush=True)
    story.table.flush(recover=True)
    folded = [
        fold(story.table._base, plan) for plan in plan_merges(story.table._base, together=False)[0]
    ]
    for change in CHANGES[name]:
        change(story)
    for one in folded:
        assert commit_merge(story.table._base, one).rows > 0
    assert plan_merges(story.table._base) == ([], 0)
    story.check()
    dataset = lance.dataset(story.table.uri)
    dataset.validate()
    assert in_order(dataset.to_table()) == story.expected()
    dataset.optimize.compact_files()
    story.check()
    story.table.close()


def test_a_merge_that_lands_during_a_change_loses_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    here, other = lake.process(), lake.process()
    for step in range(3):
        other.table.upsert([{"id": step, "value": f"{step}"}])
        other.table.flush()
    merged = []
    here.store.hook(
        op="put_if_absent",
        key="_versions/*.manifest",
        nth=1,
        before=lambda op, key: merged.append(other.table.merge()),
    )
    assert here.table.add_columns({"more": pa.int64()}) == other.table.version
    assert merged[0].generations == 3
    assert other.table.merge().generations == 0
    assert here.table.count("more is null") == other.table.count() == 3
    assert lance.dataset(lake.store.uri).count_rows() == 3


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DUPLICATE])
def test_a_change_whose_answer_is_lost_is_made_once(tmp_path: Path, fault: Fault) -> None:
    lake = make_lake(tmp_path)
    here = lake.process()
    asked = []

    def fail_next(op: str, key: str) -> None:
        asked.append(here.store.inject(Fault.FAIL_BEFORE, op="exists", key=key, nth=1))

    for change in (
        lambda: here.table.add_columns({"more": pa.int64()}),
        lambda: here.table.rename_column("more", "less"),
        lambda: here.table.drop_columns(["less"]),
    ):
        rule = here.store.inject(fault, op="put_if_absent", key="_versions/*", nth=1)
        # What asks afterwards whether it landed fails, too.
        here.store.hook(op="put_if_absent", key="_versions/*", nth=1, before=fail_next)
        change()
        assert rule.fired == asked.pop().fired == 1
        here.store.clear()
    assert here.table.schema.names == ["id", "value"]


def test_many_change_columns_at_once_and_none_hears_of_a_conflict(tmp_path: Path) -> None:
    database = penstock.connect(tmp_path)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("a", pa.int64())])
    table = database.create_table("t", schema, primary_key="id")
    errors: list[BaseException] = []

    def run(number: int) -> None:
        handle = database.open_table("t")
        try:
            for step in range(3):
                handle.add_columns({f"new {number} {step}": pa.int64()})
                handle.upsert([{"id": 10 * number + step, f"new {number} {step}": step}])
                handle.flush()
            handle.rename_column(f"new {number} 0", f"renamed {number}")
            handle.drop_columns(f"new {number} 1")
        except BaseException as error:
            errors.append(error)
        finally:
            handle.close()

    def merge() -> None:
        while any(thread.is_alive() for thread in threads):
            table.merge()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    merger = threading.Thread(target=merge)
    for thread in (*threads, merger):
        thread.start()
    for thread in (*threads, merger):
        thread.join(60)
    assert not errors
    names = [f"{kind} {n}{end}" for n in range(3) for kind, end in (("renamed", ""), ("new", " 2"))]
    assert sorted(table.schema.names) == sorted(["id", "a", *names])
    for row in table.to_arrow().to_pylist():
        number, step = divmod(row["id"], 10)
        set_ = {name: value for name, value in row.items() if value is not None and name != "id"}
        wanted = {0: f"renamed {number}", 2: f"new {number} 2"}
        assert set_ == ({wanted[step]: step} if step in wanted else {})
    table.flush()
    table.merge()
    ids = [field.id() for field in lance.dataset(table.uri).lance_schema.fields()]
    assert len(set(ids)) == len(ids)
    assert in_id_order(lance.dataset(table.uri).to_table()) == in_id_order(table.to_arrow())


# --- values of new columns ---------------------------------------------------------------------


def test_a_column_computed_from_others(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("n", pa.int32()), ("name", pa.string())])
    table = penstock.connect(tmp_path).create_table("t", schema, primary_key="id")
    for first in (0, 10, 20):
        table.upsert([{"id": n, "n": n, "name": f"x{n}"} for n in range(first, first + 10)])
        if first < 20:
            table.flush()
        if first < 10:
            table.merge()
    table.add_columns({"twice": "n * 2", "loud": "upper(name)", "none": pa.float32(), "one": "1.5"})
    assert table.schema.field("twice").type == pa.int64()
    assert table.schema.field("loud").type == pa.string()
    wanted = [
        {
            "id": n,
            "n": n,
            "name": f"x{n}",
            "twice": 2 * n,
            "loud": f"X{n}",
            "none": None,
            "one": 1.5,
        }
        for n in range(30)
    ]
    assert in_id_order(table.to_arrow()) == wanted
    table.flush()
    table.merge()
    assert in_id_order(lance.dataset(table.uri).to_table()) == wanted
    table.close()


# --- refusals ----------------------------------------------------------------------------------


def test_refusals_leave_everything_as_it_was(tmp_path: Path) -> None:
    database = penstock.connect(tmp_path)
    fields = [("id", pa.int32()), ("part", pa.string()), ("a", pa.int32()), ("b", pa.string())]
    table = database.create_table(
        "t",
        pa.schema(fields),
        primary_key=["id", "part"],
        regions=penstock.bucket("id", 2),
    )
    keyless = database.create_table("k", pa.schema(fields), regions=penstock.identity("part"))
    table.upsert([{"id": 1, "part": "p", "a": 1, "b": "x"}])
    table.flush()
    table.merge()
    table.create_index("b", "btree")
    table.close()
    for names in ("id", ["a", "part"]):
        with refuses(tmp_path, InvalidInput, "primary key", "new table"):
            table.drop_columns(names)
    with refuses(tmp_path, InvalidInput, "primary key", "new table"):
        table.rename_column("id", "key")
    with refuses(tmp_path, InvalidInput, "'part'", "set_regions"):
        keyless.drop_columns("part")
    with refuses(tmp_path, InvalidInput, "'b'", "'b_idx'", 'drop_index("b_idx")'):
        table.drop_columns(["a", "b"])
    for wrong in ([], None, 3, {"a"}):
        with refuses(tmp_path, InvalidInput, "list of names"):
            table.drop_columns(wrong)
    for wrong in ("nobody", ["a", "nobody"], [None]):
        with refuses(tmp_path, InvalidInput, "no column", "part"):
            table.drop_columns(wrong)
    for name in ("", "_x", "x.y", "x`y", "x\0", None, 3):
        with refuses(tmp_path, InvalidInput, "cannot name a column"):
            table.rename_column("a", name)
    with refuses(tmp_path, InvalidInput, "'b'", "already"):
        table.rename_column("a", "b")
    with refuses(tmp_path, InvalidInput, "no column", "part"):
        table.rename_column("nobody", "z")
    for name in ("_tombstone", "", "x.y"):
        with refuses(tmp_path, InvalidInput, "cannot name a column"):
            table.add_columns({name: pa.int64()})
    with refuses(tmp_path, InvalidInput, "'a'", "already"):
        table.add_columns({"new": pa.int64(), "a": pa.int64()})
    with refuses(tmp_path, InvalidInput, "twice"):
        table.add_columns(pa.schema([("c", pa.int64()), ("c", pa.int64())]))
    with refuses(tmp_path, InvalidInput, "'c'", "nullable"):
        table.add_columns(pa.field("c", pa.int64(), nullable=False))
    with refuses(tmp_path, InvalidInput, "primary key", "metadata"):
        key = {"lance-schema:unenforced-primary-key": "true"}
        table.add_columns(pa.field("c", pa.int64(), metadata=key))
    with refuses(tmp_path, InvalidInput, "cannot be stored"):
        table.add_columns({"c": pa.list_view(pa.int32())})
    for wrong in ({}, pa.schema([])):
        with refuses(tmp_path, InvalidInput, "at least one"):
            table.add_columns(wrong)
    for wrong in (None, "c", {"c": int}, {3: pa.int64()}):
        with refuses(tmp_path, InvalidInput, "columns must"):
            table.add_columns(wrong)
    for sql in ("nobody + 1", "a +", "count(a)", "NULL", "random()"):
        with refuses(tmp_path, InvalidInput, "'c'"):
            table.add_columns({"c": sql})
    for name, words in (
        ("id", "primary key"),
        ("a", "Add a column of the new type"),
        ("nobody", "no column"),
    ):
        with refuses(tmp_path, InvalidInput, words):
            table.alter_column(name, pa.int64())
    with refuses(tmp_path, InvalidInput, "regions", "set_regions"):
        keyless.alter_column("part", pa.large_string())
    assert table.schema.names == keyless.schema.names == ["id", "part", "a", "b"]
    database.create_table("lone", pa.schema([("a", pa.int64())]))
    with refuses(tmp_path, InvalidInput, "at least one column"):
        database.open_table("lone").drop_columns("a")


def test_a_computed_column_that_cannot_be_computed_is_taken_back(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    table = penstock.connect(tmp_path).create_table("t", schema, primary_key="id")
    table.upsert([{"id": 1, "text": "7"}, {"id": 2, "text": "seven"}])
    with pytest.raises(InvalidInput, match="seven"):
        table.add_columns({"number": "cast(text as bigint)"})
    assert table.schema.names == ["id", "text"]
    table.add_columns({"number": "try_cast(text as bigint)"})
    assert in_id_order(table.to_arrow().select(["id", "number"])) == [
        {"id": 1, "number": 7},
        {"id": 2, "number": None},
    ]
    table.close()


# --- a random walk -----------------------------------------------------------------------------

STEPS = ("write", "write", "flush", "merge", "snapshot", "reopen", "add", "rename", "drop", "swap")


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    walk=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 99)), min_size=6, max_size=20)
)
def test_a_random_walk(
    tmp_path_factory: pytest.TempPathFactory, walk: list[tuple[str, int]]
) -> None:
    """One writer writes all along and is opened anew now and then: its columns are often old."""
    story = Story(tmp_path_factory.mktemp("walk"))
    story.held.close()
    names = ("a", "b", "c", "d")
    opened = dict(story.columns)
    writer = story.table.writer(flush_on_close=False)
    for number, (step, choice) in enumerate([*walk, ("write", 0), ("reopen", 0), ("write", 1)]):
        free = [name for name in names if name not in story.columns]
        taken = list(story.columns)
        if step == "write":
            key = (LAYERS[choice % 2], choice % 5)
            known = {n: u for n, u in opened.items() if story.columns.get(n) == u}
            values = {name: f"{number} {name}" for name in known}
            if choice % 7 == 6:
                writer.delete([key])
                story.rows.pop(key, None)
            else:
                writer.upsert([{"layer": key[0], "id": key[1], **values}])
                story.rows[key] = {opened[name]: value for name, value in values.items()}
        elif step == "flush":
            writer.flush()
        elif step == "merge":
            story.table.merge()
        elif step == "snapshot":
            story.pin()
        elif step == "reopen":
            writer.close(flush=bool(choice % 2))
            writer = story.table.writer(flush_on_close=False)
            opened = dict(story.columns)
        elif step == "add" and free:
            story.add(free[choice % len(free)])
        elif step == "rename" and free and taken:
            story.rename(taken[choice % len(taken)], free[choice % len(free)])
        elif step == "drop" and taken:
            story.drop(taken[choice % len(taken)])
        elif step == "swap" and len(taken) > 1:
            story.swap(taken[0], taken[-1])
        else:
            continue
        assert in_order(story.watching.to_arrow()) == story.expected()
    story.check()
    for version, rows in story.pinned:
        again = story.watching.to_arrow(version=version)
        assert again.schema == rows.schema
        assert in_order(again) == in_order(rows)
    writer.close(flush=True)
    story.table.flush(recover=True)
    story.table.merge()
    story.check()
    assert in_order(lance.dataset(story.table.uri).to_table()) == story.expected()
    story.table.close()
