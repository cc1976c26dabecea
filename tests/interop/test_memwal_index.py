"""The MemWAL index on the base table: written by one side, read and changed by the other."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable
from tests.s3_server import S3Server

import penstock
from penstock.memwal.config import WriterConfig
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.table_commit import commit_details
from penstock.memwal.table_versions import read_details
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"}),
        pa.field("name", pa.string()),
    ]
)
TWO_ROWS = pa.table({"id": [1, 2], "name": ["a", "b"]}, schema=SCHEMA)


def ours(uri: str | Path) -> MemWalIndexDetails:
    store = open_store(uri)
    found = read_details(store, lance.dataset(str(uri)).version)
    assert found is not None
    return found[0]


def as_lance_says(details: MemWalIndexDetails) -> dict[str, Any]:
    """Our reading of an index in the words of `mem_wal_index_details()`."""
    return {
        "num_shards": details.num_regions,
        "maintained_indexes": list(details.maintained_indexes),
        "maintain_all_indexes": details.maintain_all_indexes,
        "writer_config_defaults": dict(details.writer_config_defaults),
        "sharding_specs": [
            {
                "spec_id": spec.spec_id,
                "fields": [
                    {
                        "field_id": field.field_id,
                        "source_ids": list(field.source_ids),
                        "transform": field.transform,
                        "expression": field.expression,
                        "result_type": field.result_type,
                        "parameters": dict(field.parameters),
                    }
                    for field in spec.fields
                ],
            }
            for spec in details.region_specs
        ],
    }


def mark_merged(uri: str, region_id: uuid.UUID, generation: int, row: int) -> None:
    """A merge by Lance, which records its progress in the same commit."""
    (
        lance.dataset(uri)
        .merge_insert("id")
        .when_matched_update_all()
        .when_not_matched_insert_all()
        .mark_sstables_as_compacted([CompactedSsTable(str(region_id), generation)])
        .execute(pa.table({"id": [row], "name": ["merged"]}, schema=SCHEMA))
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unsharded": True},
        {"bucket_column": "id", "num_buckets": 16},
        {"identity_column": "name"},
        {"maintained_indexes": ["id_idx"]},
        {"maintained_indexes": []},
        {
            "unsharded": True,
            "durable_write": False,
            "max_memtable_size": 123_456,
            "max_memtable_rows": 77,
            "max_wal_buffer_size": 4_321,
            "max_wal_flush_interval_ms": 7,
            "max_unflushed_memtable_bytes": 200_000,
        },
    ],
    ids=lambda options: "-".join(options) or "manual",
)
def test_we_read_what_lance_wrote(tmp_path: Path, options: dict[str, Any]) -> None:
    uri = str(tmp_path / "t.lance")
    dataset = lance.write_dataset(TWO_ROWS, uri)
    dataset.create_scalar_index("id", "BTREE", name="id_idx")
    dataset.initialize_mem_wal(**options)
    details = ours(uri)
    assert as_lance_says(details) == lance.dataset(uri).mem_wal_index_details()

    config = WriterConfig().with_defaults(details.writer_config_defaults)
    if "durable_write" in options:
        assert not config.durable
        assert config.max_memtable_bytes == 123_456
        assert config.max_memtable_rows == 77
        assert config.wal_buffer_bytes == 4_321
        assert config.wal_flush_interval_ms == 7
    else:
        assert config == WriterConfig()

    # Encoding what was decoded changes nothing that Lance reads.
    commit_details(open_store(uri), None, lambda current: current, Seams())
    again = ours(uri)
    assert replace(again, snapshot_ts_millis=0) == replace(details, snapshot_ts_millis=0)
    assert lance.dataset(uri).mem_wal_index_details() == as_lance_says(details)


def test_lance_reads_what_we_wrote(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    regions = [penstock.truncate("tenant", 2), penstock.bucket("id", 3)]
    schema = pa.schema([("tenant", pa.string()), ("id", pa.int64()), ("at", pa.date32())])
    table = db.create_table(
        "t",
        schema,
        primary_key=["tenant", "id"],
        regions=regions,
        writer_defaults={"durable": False, "max_memtable_rows": 99, "indexed": False},
    )
    # Lance opens a writer on a spec it cannot evaluate; keys of ours do not disturb it.
    with lance.dataset(table.uri).mem_wal_writer(str(uuid.uuid4())) as theirs:
        theirs.put(pa.table({"tenant": ["x"], "id": [1], "at": [None]}, schema=table.schema))
    assert table.get(("x", 1)) == {"tenant": "x", "id": 1, "at": None}

    table.set_regions(penstock.expression("col0 % 7", ["id"], "int64"))
    table.set_regions(penstock.bucket("id", 8))
    said = lance.dataset(table.uri).mem_wal_index_details()
    assert said == as_lance_says(ours(table.uri))
    assert said["num_shards"] == 8
    assert [spec["spec_id"] for spec in said["sharding_specs"]] == [1, 2, 3]
    assert [len(spec["fields"]) for spec in said["sharding_specs"]] == [2, 1, 1]
    assert said["sharding_specs"][1]["fields"][0]["expression"] == "col0 % 7"
    assert said["writer_config_defaults"]["durable_write"] == "false"
    assert said["writer_config_defaults"]["max_memtable_rows"] == "99"
    assert said["writer_config_defaults"]["penstock.indexed"] == "false"
    # Lance writes to tables with one spec only, and says so; it reads the others.
    with pytest.raises(OSError, match="at most one sharding spec"):
        lance.dataset(table.uri).mem_wal_writer(str(uuid.uuid4()))


def test_our_commits_keep_the_progress_lance_recorded(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id")
    first, second = uuid.uuid4(), uuid.uuid4()
    mark_merged(table.uri, first, 3, row=1)
    table.set_regions(penstock.bucket("id", 2))
    mark_merged(table.uri, second, 1, row=2)
    table.set_regions(penstock.bucket("id", 4))
    mark_merged(table.uri, first, 5, row=3)
    table.create_index("id", "btree")
    details = ours(table.uri)
    assert dict(details.merged_generations) == {first: 5, second: 1}
    assert [spec.spec_id for spec in details.region_specs] == [1, 2, 3]
    assert table.count() == 3


def test_a_merged_generation_is_read_from_the_base_alone(tmp_path: Path) -> None:
    """Once Lance has merged a generation, its rows must not outrank newer base rows."""
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id")
    table.upsert(TWO_ROWS)
    table.flush()
    (region,) = table.status().regions
    mark_merged(table.uri, region.region_id, 1, row=1)
    assert {row["id"]: row["name"] for row in table.to_arrow().to_pylist()} == {1: "merged"}
    assert table.get(2) is None
    table.upsert([{"id": 1, "name": "newer"}])
    assert table.get(1) == {"id": 1, "name": "newer"}
    assert table.count() == 1


def test_a_merge_that_lands_during_our_commit_keeps_its_progress(tmp_path: Path) -> None:
    """Lance lets an index change pass over a merge it has not seen; then the merge is forgotten,
    and its generation would outrank newer base rows. Our commit has to start again instead."""
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id")
    region = uuid.uuid4()
    runs = []

    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        if not runs:
            mark_merged(table.uri, region, 4, row=1)
        runs.append(current)
        return replace(current, writer_config_defaults={"penstock.test": "1"})

    commit_details(open_store(table.uri), None, change, Seams())
    details = ours(table.uri)
    assert details.merged(region) == 4
    assert details.writer_config_defaults == {"penstock.test": "1"}


def test_concurrent_commits_lose_nothing(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id")
    uri = table.uri
    regions = [uuid.uuid4() for _ in range(4)]
    errors: list[BaseException] = []

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)

    def configure(number: int) -> None:
        def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
            assert current is not None
            defaults = {**current.writer_config_defaults, f"penstock.test.{number}": "1"}
            return replace(current, writer_config_defaults=defaults)

        commit_details(open_store(uri), None, change, Seams())

    def merge(number: int) -> None:
        """Lance gives up on a conflict where we try again, so its side is repeated here."""
        for _ in range(50):
            try:
                return mark_merged(uri, regions[number], number + 1, row=number)
            except (OSError, RuntimeError) as error:
                if "conflict" not in str(error).lower():
                    raise
        raise AssertionError("the merge never got through")

    threads = [threading.Thread(target=guarded, args=(configure, n)) for n in range(6)]
    threads += [threading.Thread(target=guarded, args=(merge, n)) for n in range(len(regions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    details = ours(uri)
    assert dict(details.merged_generations) == {r: n + 1 for n, r in enumerate(regions)}
    assert sum(key.startswith("penstock.test.") for key in details.writer_config_defaults) == 6
    assert lance.dataset(uri).count_rows() == len(regions)


def test_versions_of_ours_are_versions_like_any_other(s3: S3Server) -> None:
    """Lance lists, reads, appends to, compacts and cleans up a table that we have committed to."""
    options = s3.storage_options
    db = penstock.connect(s3.uri("versions"), options)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    for step in range(3):
        lance.write_dataset(TWO_ROWS, table.uri, mode="append", storage_options=options)
        table.set_regions(penstock.bucket("id", step + 3))
    dataset = lance.dataset(table.uri, storage_options=options)
    assert dataset.mem_wal_index_details()["num_shards"] == 5
    assert [version["version"] for version in dataset.versions()] == list(range(1, 9))
    for version in (2, 4, 6, 8):
        transaction = dataset.read_transaction(version)
        assert transaction is not None
        assert isinstance(transaction.operation, lance.LanceOperation.CreateIndex)
    dataset.optimize.compact_files()
    dataset.cleanup_old_versions(older_than=timedelta(0))
    assert lance.dataset(table.uri, storage_options=options).count_rows() == 6
    assert table.set_regions(penstock.unsharded()) == 5
    assert table.count() == 6
