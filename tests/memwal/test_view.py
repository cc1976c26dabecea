"""Reads take one view, and never answer with a part."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import WAL, Lake, ids_of, make_lake, row

import penstock
from penstock.errors import Corruption
from penstock.memwal import names
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.lookup import get_many
from penstock.memwal.scan import count_view, scan_view
from penstock.memwal.table_commit import commit_details
from penstock.memwal.view import Reader
from penstock.storage.faults import Fault
from penstock.storage.seams import Seams
from penstock.table import Table

READS: list[Callable[[Table], Any]] = [
    Table.count,
    lambda table: table.to_arrow().num_rows,
    lambda table: table.get_many(list(range(20))).num_rows,
]


def generation_path(lake: Lake, generation: int) -> str:
    manifest = lake.manifest()
    found = manifest.generation(generation)
    assert found is not None
    return f"{names.region_dir(manifest.region_id)}/{found.path}"


def merge(lake: Lake, generation: int) -> None:
    """What a merge job does: the rows and the progress in one commit."""
    rows = lake.generation(generation).to_table().drop_columns(["_tombstone"])
    base = lance.dataset(lake.store.uri)
    base.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(
        rows.cast(base.schema)
    )
    region = lake.manifest().region_id

    def mark(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        merged = {**current.merged_generations, region: generation}
        return replace(current, merged_generations=merged)

    commit_details(lake.store, None, mark, Seams())


def two_generations(tmp_path: Path) -> Lake:
    lake = make_lake(tmp_path)
    with lake.process().table.writer() as writer:
        writer.upsert([row(n, "one") for n in range(10)])
        writer.flush()
        writer.upsert([row(n, "two") for n in range(5, 12)])
    assert lake.generations() == [1, 2]
    return lake


@pytest.mark.parametrize("read", range(len(READS)))
@pytest.mark.parametrize("what", ["all", "_pk_index", "data", "_versions"])
def test_a_generation_that_is_gone_and_was_not_merged_is_an_error(
    tmp_path: Path, read: int, what: str
) -> None:
    lake = two_generations(tmp_path)
    path = generation_path(lake, 1) + ("" if what == "all" else f"/{what}")
    lake.store.delete_prefix(path)
    with pytest.raises(Corruption, match="Restore the directory"):
        READS[read](lake.reader())


@pytest.mark.parametrize("read", range(len(READS)))
def test_a_generation_that_is_merged_and_removed_under_a_reader_makes_it_look_again(
    tmp_path: Path, read: int
) -> None:
    lake = two_generations(tmp_path)
    reader = lake.process()
    path = generation_path(lake, 1)

    def clean_up(op: str, key: str) -> None:
        merge(lake, 1)
        lake.store.delete_prefix(path)

    # The base was read, the region's manifest is next; then the generation is merged and removed.
    rule = reader.store.hook(op="get", key="*/manifest/*.binpb", nth=1, after=clean_up)
    assert READS[read](reader.table) == 12
    assert rule.fired == 1
    assert reader.table.get(3) == row(3, "one")
    assert reader.table.get(7) == row(7, "two")


def test_a_generation_that_vanishes_while_it_is_read_makes_the_reader_look_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = two_generations(tmp_path)
    path = generation_path(lake, 1)
    opened = lance.dataset
    done = []

    def open_and_lose(uri: str, *args: Any, **options: Any) -> lance.LanceDataset:
        dataset = opened(uri, *args, **options)
        if uri.endswith("_gen_1") and not done:
            done.append(True)
            merge(lake, 1)
            shutil.rmtree(f"{lake.store.uri}/{path}/data")
        return dataset

    monkeypatch.setattr(lance, "dataset", open_and_lose)
    assert ids_of(lake.reader()) == list(range(12))
    assert done


def test_a_merged_generation_is_not_read_even_if_it_is_there(tmp_path: Path) -> None:
    lake = two_generations(tmp_path)
    merge(lake, 1)
    merge(lake, 2)
    base = lance.dataset(lake.store.uri)
    base.update({"value": "'newer in the base'"}, "id = 6")
    assert lake.reader().get(6) == row(6, "newer in the base")
    assert lake.reader().count() == 12


@pytest.mark.parametrize("primary_key", ["id", None])
def test_rows_flushed_while_the_tail_is_read_are_neither_lost_nor_counted_twice(
    tmp_path: Path, primary_key: str | None
) -> None:
    lake = make_lake(tmp_path, primary_key=primary_key)
    process = lake.process()
    writer = process.table.writer()
    for n in range(6):
        writer.upsert([row(n)])
    for nth in range(1, 8):
        reader = lake.process()

        def flush(op: str, key: str, nth: int = nth) -> None:
            writer.flush()
            covered = lake.manifest().replay_after_wal_entry_position
            lake.clean_up_wal(range(1, covered + 1))
            writer.upsert([row(nth * 100)])

        reader.store.hook(op="get", key=WAL, nth=nth, before=flush)
        found = set(reader.table.to_arrow().column("id").to_pylist())
        assert set(range(6)) <= found
        assert lake.reader().count() == len(set(ids_of(lake.reader())))


def test_a_claim_in_between_does_not_disturb_a_reader(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    lake.process().table.upsert([row(n) for n in range(3)])
    reader = lake.process()

    one_at_a_time = threading.Lock()

    def claim(op: str, key: str) -> None:
        with one_at_a_time:
            lake.process().table.upsert([row(0)])

    # Every time the reader has looked at the WAL, the region has a new owner.
    reader.store.hook(op="get", key=WAL, before=claim, times=20)
    assert reader.table.count() == 3


def test_an_interrupted_batch_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(0, "old"), row(1, "old")])
    taken = Reader(process.table._base).view(writer.region_writers())
    writer.upsert([row(0, "new"), row(1, "new"), row(2, "new")])
    keys = {"id": pa.array([0, 1, 2], pa.int64())}
    old = [row(0, "old"), row(1, "old")]
    assert sorted(get_many(taken, keys).to_pylist(), key=lambda r: r["id"]) == old
    assert scan_view(taken).read_all().to_pylist() == old
    assert count_view(taken) == 2
    assert process.table.get(2) == row(2, "new")


def test_of_two_writers_of_a_region_in_one_process_the_newer_counts(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writers = []
    for n in range(6):
        writers.append(process.table.writer(durable=False, wal_flush_interval_ms=10**9))
        writers[-1].upsert([row(n)])
        # What the newest one holds in memory is seen, whatever the older ones still believe.
        assert process.table.get(n) == row(n)
        writers[-1].region_writers()[0].drain()
    for writer in writers[:-1]:
        with pytest.raises(penstock.Fenced):
            writer.close()
    writers[-1].close()
    assert process.ids() == list(range(6))


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.BIT_FLIP])
def test_a_log_that_cannot_be_read_is_an_error_and_no_short_answer(
    tmp_path: Path, fault: Fault
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    for n in range(5):
        process.table.upsert([row(n)])
    reader = lake.process()
    reader.store.inject(fault, op="get", key=WAL, nth=3)
    with pytest.raises((Corruption, penstock.StorageError)):
        reader.table.count()
    assert reader.table.count() == 5


KEY_TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "uint64": (pa.uint64(), [0, 2**63, 2**64 - 1]),
    "int8": (pa.int8(), [-128, 0, 127]),
    "string": (pa.string(), ["", "it's", 'a"b', "back\\slash", "%_", "nul\0nul", "日本\n", "--"]),
    "large_string": (pa.large_string(), ["", "it's"]),
    "binary": (pa.binary(), [b"", b"\0", b"\xff\x00"]),
    "bool": (pa.bool_(), [True, False]),
}


@pytest.mark.parametrize("kind", sorted(KEY_TYPES))
@pytest.mark.parametrize("where", ["log", "generation", "base"])
def test_keys_of_every_type_are_found_wherever_they_are(
    tmp_path: Path, kind: str, where: str
) -> None:
    key_type, keys = KEY_TYPES[kind]
    schema = pa.schema([("id", key_type), ("value", pa.string())])
    lake = make_lake(tmp_path, schema=schema)
    rows = [{"id": key, "value": repr(key)} for key in keys]
    process = lake.process()
    process.table.upsert(rows)
    if where != "log":
        process.table.flush()
    if where == "base":
        merge(lake, 1)
    for table in (process.table, lake.reader()):
        assert [table.get(key) for key in keys] == rows
        assert table.get_many(keys).num_rows == table.count() == len(keys)
    process.table.delete(keys=keys[:1])
    assert lake.reader().get(keys[0]) is None
    assert lake.reader().count() == len(keys) - 1
