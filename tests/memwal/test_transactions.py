"""Writes that count once: a number that was written is not written again, whatever happened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake

import penstock
from penstock import Table
from penstock.errors import AmbiguousWrite, InvalidInput, PenstockError
from penstock.memwal.staged import Stage, StagedRows, check_staged, in_order
from penstock.memwal.table_writer import TableWriter
from penstock.memwal.transactions import MAX_APPLICATIONS, Transaction, joined
from penstock.storage.faults import Fault

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])


def make(path: Path, key: str | None) -> Table:
    regions = penstock.bucket("id", 3)
    return penstock.connect(path).create_table("t", SCHEMA, primary_key=key, regions=regions)


def reopened(table: Table) -> Table:
    return penstock.connect(str(Path(table.uri).parent)).open_table("t")


def batch(number: int) -> pa.RecordBatch:
    """Twelve rows, half of them of keys that the batch before had."""
    ids = range(6 * number, 6 * number + 12)
    rows = [{"id": one, "value": f"batch {number}"} for one in ids]
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def writer_of(table: Table) -> TableWriter:
    return TableWriter(table._base, table._default_config(), reclaim=True)


def send(writer: TableWriter, number: int, name: str = "stream") -> None:
    writer.write_once(writer.shape.wal_rows(batch(number)), Transaction.named(name, number))


def stage(table: Table, number: int) -> list[StagedRows]:
    """The rows as two generations in each region."""
    place = Stage(table._base)
    rows = place.shape.wal_rows(batch(number))
    parts = []
    for half in (rows.slice(0, 6), rows.slice(6)):
        for identity, some in place.route(half):
            parts.append(StagedRows(identity, (place.write(identity, [some]),)))
    return in_order(parts)


def expected(key: str | None, numbers: list[int]) -> Counter[tuple[Any, Any]]:
    every = [one for number in numbers for one in batch(number).to_pylist()]
    if key is None:
        return Counter((one["id"], one["value"]) for one in every)
    return Counter({one["id"]: one["value"] for one in every}.items())


def found(table: Table) -> Counter[tuple[Any, Any]]:
    return Counter((one["id"], one["value"]) for one in table.to_arrow().to_pylist())


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("key", ["id", None])
def test_a_number_is_written_once_whatever_lies_between(
    tmp_path: Path, key: str | None, staged: bool
) -> None:
    table = make(tmp_path, key)
    writer = writer_of(table)

    def again(number: int) -> None:
        if staged:
            writer.enter_once(stage(table, number), Transaction.named("stream", number))
        else:
            send(writer, number)

    again(0)
    again(1)
    again(1)
    again(0)
    assert found(table) == expected(key, [0, 1])
    writer.abandon()  # as a crash would
    writer = writer_of(table)
    again(1)
    assert found(table) == expected(key, [0, 1])
    again(2)
    writer.flush()
    again(2)
    writer.close()
    table.merge()
    table.gc(retain_seconds=0, orphan_seconds=0)
    table = reopened(table)
    writer = writer_of(table)
    again(2)
    assert found(table) == expected(key, [0, 1, 2])
    send(writer, 0, name="another stream")
    assert sum(found(table).values()) == sum(expected(key, [0, 1, 2]).values()) + (0 if key else 12)
    writer.close()


@pytest.mark.parametrize("key", ["id", None])
def test_two_processes_that_take_each_other_for_dead(tmp_path: Path, key: str | None) -> None:
    table = make(tmp_path, key)
    first, second = writer_of(table), writer_of(reopened(table))
    for number in range(6):
        for writer in (first, second) if number % 2 else (second, first):
            send(writer, number)
    first.flush()
    assert found(table) == expected(key, list(range(6)))
    assert found(reopened(table)) == expected(key, list(range(6)))
    first.close()
    second.close()


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
@pytest.mark.parametrize("staged", [False, True])
def test_a_fault_at_any_call_and_the_batch_again(
    tmp_path: Path, fault: Fault, staged: bool
) -> None:
    """Without a key, where a row written twice would be there twice."""
    nth, fired = 0, True
    while fired:
        nth += 2
        lake = make_lake(tmp_path / str(nth), primary_key=None)
        process = lake.process()
        table = process.table
        writer = writer_of(table)
        send(writer, 0)
        parts = stage(table, 1) if staged else []
        rule = process.store.inject(fault, nth=nth, times=12)
        for _ in range(2):
            try:
                if staged:
                    writer.enter_once(parts, Transaction.named("stream", 1))
                else:
                    send(writer, 1)
                break
            except PenstockError:
                process.store.clear()
                writer.abandon()
                writer = writer_of(table)
        fired = rule.fired > 0
        process.store.clear()
        send(writer, 0)
        assert found(table) == expected(None, [0, 1]), nth
        writer.close()


def test_generations_of_others_are_newer_than_all_before_and_older_than_all_after(
    tmp_path: Path,
) -> None:
    table = make(tmp_path, "id")
    with writer_of(table) as writer:
        writer.upsert([{"id": 3, "value": "before"}, {"id": 4, "value": "before"}])
        parts = stage(table, 0)
        check_staged(table._base, parts)
        writer.enter_once(parts, None)
        writer.upsert([{"id": 3, "value": "after"}])
        writer.delete([5])
        model = {one["id"]: one["value"] for one in batch(0).to_pylist()} | {3: "after"}
        del model[5]
        assert found(table) == Counter(model.items())
        writer.abandon()
    other = reopened(table)
    assert found(other) == Counter(model.items())
    other.flush(recover=True)
    other.merge()
    plain = lance.dataset(table.uri).to_table().to_pylist()
    assert Counter((one["id"], one["value"]) for one in plain) == Counter(model.items())


def test_clean_up_leaves_alone_what_may_still_be_entered(tmp_path: Path) -> None:
    table = make(tmp_path, "id")
    with writer_of(table) as writer:
        for number in range(3):
            send(writer, number)
            writer.flush()
        parts = stage(table, 3)
        table.merge()
        table.gc(retain_seconds=0)
        check_staged(table._base, parts)
        writer.enter_once(parts, Transaction.named("stream", 3))
    assert found(table) == expected("id", [0, 1, 2, 3])


def test_what_was_staged_and_cleaned_up_is_refused(tmp_path: Path) -> None:
    table = make(tmp_path, "id")
    parts = stage(table, 0)
    table.gc(retain_seconds=0, orphan_seconds=0)
    with pytest.raises(InvalidInput, match="write them again"):
        check_staged(table._base, parts)


def test_a_table_that_was_divided_anew_between_two_tries(tmp_path: Path) -> None:
    """With a key the rows go to their new regions; without, nobody can tell which are there."""
    for key in ("id", None):
        table = make(tmp_path / str(key), key)
        with writer_of(table) as writer:
            send(writer, 0)
        table.set_regions(penstock.bucket("id", 2))
        with writer_of(table) as writer:
            send(writer, 1)
            if key is None:
                with pytest.raises(AmbiguousWrite, match="divided anew"):
                    send(writer, 0)
            else:
                assert found(table) == expected(key, [0, 1])


def test_a_region_forgets_those_that_wrote_longest_ago() -> None:
    many = {number.to_bytes(8, "big"): 1 for number in range(MAX_APPLICATIONS)}
    kept = joined(many, {(0).to_bytes(8, "big"): 2}, {b"newcomer": 7})
    assert len(kept) == MAX_APPLICATIONS
    assert kept[(0).to_bytes(8, "big")] == 2
    assert (1).to_bytes(8, "big") not in kept


@pytest.mark.parametrize(("name", "number"), [("", 0), ("a", -1), ("a", 2**63), ("a", True)])
def test_names_and_numbers(name: str, number: int) -> None:
    with pytest.raises(InvalidInput, match="transaction"):
        Transaction.named(name, number)
