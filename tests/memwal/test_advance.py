"""Reads go on while the next version of the base is tried in the background, and miss nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import WAIT_SECONDS, Lake, make_lake, row

import penstock
from penstock import Table
from penstock.memwal import advance, names
from penstock.memwal.advance import Advance

Found = dict[int, str]


@pytest.fixture(autouse=True)
def small_bases_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advance, "ADVANCE_ROWS", 0)


class Gate:
    """Stops whoever tries a version beforehand until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        prepare = Advance._prepare

        def wait(*arguments: object) -> None:
            self.waiting.set()
            assert self.open.wait(WAIT_SECONDS)
            prepare(*arguments)  # type: ignore[arg-type]

        patch.setattr(Advance, "_prepare", wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def lake_with_base(tmp_path: Path) -> tuple[Lake, Table, Table]:
    """A writer, and a reader that has looked a key up, on a table with rows in its base."""
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    writer, reader = lake.process().table, lake.reader()
    writer.upsert([row(key, "first") for key in range(20)])
    writer.flush()
    writer.merge()
    assert reader.get(3) == row(3, "first")
    return lake, writer, reader


def used_version(table: Table) -> int:
    used = table._reader._advance._used
    assert used is not None
    return used.version


def found(table: Table) -> Found:
    rows = table.to_arrow().to_pylist()
    assert len({r["id"] for r in rows}) == len(rows)
    assert {r["id"]: r["value"] for r in table.get_many(range(100)).to_pylist()} == {
        r["id"]: r["value"] for r in rows
    }
    return {r["id"]: r["value"] for r in rows}


def settle(table: Table) -> None:
    running = table._reader._advance._running
    if running is not None:
        running.join(WAIT_SECONDS)


def test_a_merge_is_tried_before_it_is_used_and_rows_are_the_same_throughout(
    tmp_path: Path, gate: Gate
) -> None:
    _, writer, reader = lake_with_base(tmp_path)
    before = used_version(reader)
    expected = dict.fromkeys(range(20), "first")
    for turn in range(3):
        changes = dict.fromkeys(range(turn, 20, 3), f"turn {turn}")
        writer.upsert([row(key, value) for key, value in changes.items()])
        writer.flush()
        writer.delete(keys=[19 - turn])
        writer.flush()
        writer.merge()
        expected = {key: v for key, v in (expected | changes).items() if key != 19 - turn}
        writer.upsert([row(50 + turn, "fresh")])
        expected[50 + turn] = "fresh"
        assert found(reader) == expected
        assert used_version(reader) == before
    assert gate.waiting.is_set()
    gate.open.set()
    settle(reader)
    found(reader)  # versions that came while the first was tried are tried now
    settle(reader)
    assert found(reader) == expected
    assert used_version(reader) == writer.version


@pytest.mark.parametrize("between", ["delete", "update", "merge_insert", "append"])
def test_what_others_do_to_the_base_is_seen_at_once(
    tmp_path: Path, gate: Gate, between: str
) -> None:
    lake, writer, reader = lake_with_base(tmp_path)
    writer.upsert([row(1, "second")])
    writer.flush()
    writer.merge()
    expected = dict.fromkeys(range(20), "first") | {1: "second"}
    assert found(reader) == expected
    assert used_version(reader) < writer.version
    dataset = lance.dataset(lake.store.uri)
    rows = pa.Table.from_pylist([row(70, "other")], schema=dataset.schema)
    if between == "delete":
        dataset.delete("id = 5")
        del expected[5]
    elif between == "update":
        dataset.update({"value": "'edited'"}, where="id = 5")
        expected[5] = "edited"
    elif between == "append":
        dataset.insert(rows)
        expected[70] = "other"
    else:
        dataset.merge_insert("id").when_not_matched_insert_all().execute(rows)
        expected[70] = "other"
    assert found(reader) == expected
    assert used_version(reader) == lance.dataset(lake.store.uri).version


def test_clean_up_of_the_version_in_use_moves_the_reader_on(tmp_path: Path, gate: Gate) -> None:
    lake, writer, reader = lake_with_base(tmp_path)
    writer.upsert([row(key, "second") for key in range(10)])
    writer.flush()
    writer.merge()
    dataset = lance.dataset(lake.store.uri)
    dataset.optimize.compact_files()
    expected = dict.fromkeys(range(20), "first") | dict.fromkeys(range(10), "second")
    assert found(reader) == expected
    assert used_version(reader) < dataset.version
    lance.dataset(lake.store.uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    # A stream cannot begin anew once it has been given away, so it must begin right.
    assert sorted(reader.scan(["id"]).read_all().column("id").to_pylist()) == sorted(expected)
    assert found(reader) == expected


def test_a_stream_does_not_begin_in_a_version_that_is_gone(tmp_path: Path, gate: Gate) -> None:
    """Its first fragment is still there, and would be given away before the second is missed."""
    lake, writer, reader = lake_with_base(tmp_path)
    for value in ("first", "second"):
        writer.upsert([row(key, value) for key in range(50, 60)])
        writer.flush()
        writer.merge()
        if value == "first":
            reader = lake.reader()
            assert reader.get(3) == row(3, "first")
    assert reader.get(50) == row(50, "second")
    assert used_version(reader) < writer.version
    lance.dataset(lake.store.uri).cleanup_old_versions(timedelta(0), delete_unverified=True)
    expected = dict.fromkeys(range(20), "first") | dict.fromkeys(range(50, 60), "second")
    assert sorted(reader.scan(["id"]).read_all().column("id").to_pylist()) == sorted(expected)
    assert used_version(reader) == writer.version


def test_clean_up_of_generations_moves_the_reader_on(tmp_path: Path, gate: Gate) -> None:
    lake, writer, _ = lake_with_base(tmp_path)
    writer.upsert([row(key, "second") for key in range(10)])
    writer.flush()
    reader = lake.reader()
    assert reader.get(15) == row(15, "first")
    writer.merge()
    assert reader.get(15) == row(15, "first")
    assert used_version(reader) < writer.version
    for manifest in lake.manifests():
        for flushed in manifest.flushed_generations:
            lake.store.delete_prefix(f"{names.region_dir(manifest.region_id)}/{flushed.path}")
    expected = dict.fromkeys(range(20), "first") | dict.fromkeys(range(10), "second")
    assert found(reader) == expected
    assert used_version(reader) == writer.version


def followed(table: Table) -> list[int]:
    """The generation that the log of each region is read for."""
    tails = table._reader._tails.values()
    return [tail._used.manifest.current_generation for tail in tails if tail._used is not None]


def test_a_flush_is_tried_before_it_is_used_and_rows_are_the_same_throughout(
    tmp_path: Path, gate: Gate
) -> None:
    _, writer, reader = lake_with_base(tmp_path)
    expected = dict.fromkeys(range(20), "first")
    before = followed(reader)
    for turn in range(3):
        writer.upsert([row(key, f"turn {turn}") for key in range(turn, 20, 2)])
        assert reader.get(turn) == row(turn, f"turn {turn}")
        writer.delete(keys=[turn])
        writer.flush()
        expected |= dict.fromkeys(range(turn, 20, 2), f"turn {turn}")
        del expected[turn]
        writer.upsert([row(50 + turn, "fresh")])
        expected[50 + turn] = "fresh"
        assert found(reader) == expected
        assert followed(reader) == before
    gate.open.set()
    settle(reader)
    assert found(reader) == expected
    assert min(followed(reader)) > max(before)


def test_log_entries_that_were_flushed_and_removed_unread_are_found_in_the_generation(
    tmp_path: Path, gate: Gate
) -> None:
    lake, writer, reader = lake_with_base(tmp_path)
    for value in ("second", "third"):
        writer.upsert([row(key, value) for key in range(20)])
    writer.flush()
    for manifest in lake.manifests():
        for position in range(1, manifest.replay_after_wal_entry_position + 1):
            lake.store.delete(names.wal_key(manifest.region_id, position))
    writer.upsert([row(1, "fourth")])
    assert found(reader) == dict.fromkeys(range(20), "third") | {1: "fourth"}


def test_rows_of_the_log_do_not_hide_what_was_done_to_them_in_the_base(
    tmp_path: Path, gate: Gate
) -> None:
    """Flushed, merged and then edited by somebody, all while the reader has them in its log."""
    lake, writer, reader = lake_with_base(tmp_path)
    writer.upsert([row(key, "second") for key in range(20)])
    assert reader.get(3) == row(3, "second")
    writer.flush()
    assert reader.get(3) == row(3, "second")
    writer.merge()
    assert reader.get(3) == row(3, "second")
    lance.dataset(lake.store.uri).delete("id >= 10")
    assert found(reader) == dict.fromkeys(range(10), "second")


def test_a_new_index_can_be_used_at_once(tmp_path: Path, gate: Gate) -> None:
    _, writer, reader = lake_with_base(tmp_path)
    writer.upsert([row(1, "second")])
    writer.flush()
    writer.merge()
    assert reader.get(1) == row(1, "second")
    writer.create_index("value", "fts")
    assert reader.search("second", "value").to_arrow().column("id").to_pylist() == [1]


def test_a_version_that_cannot_be_tried_is_read_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer, reader = lake_with_base(tmp_path)

    def fail(view: object) -> None:
        raise OSError("the store is away")

    reader._reader._advance.remember("lookup", fail)
    writer.upsert([row(1, "second")])
    writer.flush()
    writer.merge()
    assert reader.get(1) == row(1, "second")
    settle(reader)
    assert reader.get(1) == row(1, "second")
    assert used_version(reader) == writer.version
