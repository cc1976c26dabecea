"""What a read is asked to see: everything, the last snapshot, or a version that never changes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import CompactedSsTable
from tests.failures.lake import Lake, make_lake, row
from tests.interop.lance_side import lance_rows, shard_writer, written_rows
from tests.s3_server import S3Server

import penstock
from penstock.errors import Corruption, InvalidInput, VersionNotFound
from penstock.memwal import names
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest, RegionStatus
from penstock.memwal.regions import load_manifests
from penstock.memwal.table_commit import commit_details
from penstock.storage.faults import Fault
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams
from penstock.table import Table

Rows = dict[int, str | None]


def rows_of(table: Table, **asked: Any) -> Rows:
    """Every row, and that all kinds of reads agree on it."""
    rows = table.to_arrow(**asked).to_pylist()
    found: Rows = {one["id"]: one["value"] for one in rows}
    assert len(found) == len(rows) == table.count(**asked)
    if found:
        some = min(found)
        assert table.get(some, **asked) == row(some, found[some])
        assert table.count(f"id = {some}", **asked) == 1
    assert table.get_many([*found, 10**6], **asked).num_rows == len(found)
    assert table.get(10**6, **asked) is None
    assert "base_table" in table.explain(**asked)
    return found


def merge(store: ObjectStore, region: RegionManifest, generation: int) -> None:
    """What a merge job does with the oldest generation: rows, tombstones, and the progress."""
    options = dict(store.storage_options) or None
    flushed = region.generation(generation)
    assert flushed is not None
    path = f"{store.uri}/{names.region_dir(region.region_id)}/{flushed.path}"
    rows = lance.dataset(path, storage_options=options).to_table()
    gone = rows.filter(rows["_tombstone"]).select(["id"])
    live = rows.filter(pa.compute.invert(rows["_tombstone"])).drop_columns(["_tombstone"])

    def base() -> lance.LanceDataset:
        return lance.dataset(store.uri, storage_options=options)

    if gone.num_rows:
        keys = pa.schema([base().schema.field("id")])
        base().merge_insert("id").when_matched_delete().execute(gone.cast(keys))
    if live.num_rows:
        upsert = base().merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        upsert.mark_sstables_as_compacted([CompactedSsTable(str(region.region_id), generation)])
        upsert.execute(live.cast(base().schema))
        return

    def mark(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        merged = {**current.merged_generations, region.region_id: generation}
        return replace(current, merged_generations=merged)

    commit_details(store, options, mark, Seams())


def merge_all(store: ObjectStore, table: Table) -> None:
    """Merge everything that is flushed, regions of older specs first."""
    for region in sorted(load_manifests(store, Seams()), key=lambda r: r.region_spec_id):
        merged = table._base.snapshot().details.merged(region.region_id)
        for flushed in region.flushed_generations:
            if flushed.generation > merged:
                merge(store, region, flushed.generation)


def clean_up(store: ObjectStore, table: Table) -> None:
    """Remove the generations that the newest version has merged."""
    details = table._base.snapshot().details
    for region in load_manifests(store, Seams()):
        for flushed in region.flushed_generations:
            if flushed.generation <= details.merged(region.region_id):
                store.delete_prefix(f"{names.region_dir(region.region_id)}/{flushed.path}")


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str] | None]:
    if request.param == "local":
        return str(tmp_path), None
    server: S3Server = request.getfixturevalue("s3")
    return server.uri("consistency"), server.storage_options


def test_an_eventual_read_sees_the_last_snapshot_and_a_strong_one_everything(
    place: tuple[str, dict[str, str] | None],
) -> None:
    uri, options = place
    schema = pa.schema([("id", pa.int64()), ("value", pa.string())])
    table = penstock.connect(uri, options).create_table(
        "t", schema, primary_key="id", regions=penstock.bucket("id", 2)
    )
    other = penstock.connect(uri, options).open_table("t")
    one: Rows = dict.fromkeys(range(10), "one")
    two: Rows = dict.fromkeys(range(5, 15), "two")
    table.upsert([row(*item) for item in one.items()])
    table.flush()
    for reader in (table, other):
        assert rows_of(reader) == one
        assert rows_of(reader, consistency="eventual") == {}, "no snapshot yet: just the base"

    first = table.snapshot()
    assert table.version == first
    table.upsert([row(*item) for item in two.items()])
    table.delete(keys=[0])
    now: Rows = {**one, **two}
    del now[0]
    for reader in (table, other):
        assert rows_of(reader) == now
        assert rows_of(reader, consistency="eventual") == one, "what is in the log is not in it"
        assert rows_of(reader, version=first) == one

    table.flush()
    assert rows_of(other, consistency="eventual") == one, "flushed since the snapshot"
    second = table.snapshot()
    assert rows_of(other, consistency="eventual") == now

    store = table._base.store
    merge_all(store, table)
    for reader in (table, other):
        assert rows_of(reader) == now
        assert rows_of(reader, consistency="eventual") == now
        assert rows_of(reader, version=first, consistency="eventual") == one
        assert rows_of(reader, version=second) == now
    clean_up(store, table)
    fresh = penstock.connect(uri, options).open_table("t")
    assert rows_of(fresh, consistency="eventual") == now, "merged generations are not needed"
    with pytest.raises(VersionNotFound, match=f"version {first} cannot be read any more"):
        fresh.count(version=first)


def test_an_eventual_read_asks_no_region_for_anything(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 4))
    writer = lake.process().table
    writer.upsert([row(n) for n in range(20)])
    writer.flush()
    version = writer.snapshot()
    reader = lake.process()
    for key in ("*/manifest/*", "*/wal/*"):
        reader.store.inject(Fault.FAIL_BEFORE, key=key)
    reader.store.inject(Fault.FAIL_BEFORE, op="list_dirs")
    for asked in ({"consistency": "eventual"}, {"version": version}):
        assert rows_of(reader.table, **asked).keys() == set(range(20))
    with pytest.raises(penstock.StorageError):
        reader.table.count()
    # Of what is kept it is asked whether it is the newest, and no more.
    before = len(reader.store.log)
    reader.table.count(consistency="eventual")
    asked_for = list(reader.store.log)[before:]
    assert {call.op for call in asked_for} == {"exists"}
    assert len(asked_for) <= 4


def test_eventual_reads_never_go_backwards(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    reader = lake.reader()
    seen = 0
    for n in range(6):
        table.upsert([row(n)])
        table.flush()
        table.snapshot()
        if n % 2:
            merge_all(lake.store, table)
            clean_up(lake.store, table)
        now = reader.count(consistency="eventual")
        assert now == n + 1 > seen
        seen = now


def test_versions_stay_what_they_were(tmp_path: Path) -> None:
    """A random history: every version is read when it appears, and again at the end."""
    draw = random.Random(7)
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    table = lake.process().table
    model: Rows = {}
    seen: dict[int, Rows] = {}
    counts = {"snapshot": 0, "merge": 0, "set_regions": 0}

    def look() -> None:
        version = table.version
        found = rows_of(table, version=version)
        assert seen.setdefault(version, found) == found
        assert table.count(consistency="eventual") == len(found)
        assert table.count() == len(model)

    for step in range(45):
        action = draw.choice(
            ["upsert"] * 3 + ["delete", "flush", "flush", "snapshot", "snapshot", "merge", "spec"]
        )
        if action == "upsert":
            new = {draw.randrange(30): f"step {step}" for _ in range(draw.randrange(1, 8))}
            table.upsert([row(*item) for item in new.items()])
            model.update(new)
        elif action == "delete" and model:
            gone = draw.sample(sorted(model), min(3, len(model)))
            table.delete(keys=gone)
            model = {key: value for key, value in model.items() if key not in gone}
        elif action == "flush":
            table.flush()
        elif action == "snapshot":
            flushed = draw.random() < 0.5
            if flushed:
                table.flush(recover=True)
            version = table.snapshot()
            counts["snapshot"] += 1
            if flushed:
                assert rows_of(table, version=version) == model
        elif action == "merge":
            every = load_manifests(lake.store, Seams())
            newest = max((r.region_spec_id for r in every), default=0)
            old = [r for r in every if r.region_spec_id < newest]
            # Newer specs wait until the older regions are sealed; all is merged in one go here.
            if all(region.status is RegionStatus.SEALED for region in old):
                merge_all(lake.store, table)
                counts["merge"] += 1
        elif action == "spec" and counts["set_regions"] < 3:
            table.set_regions(penstock.bucket("id", draw.randrange(1, 4)))
            counts["set_regions"] += 1
        look()
    assert min(counts.values()) >= 2, counts
    assert len({json.dumps(rows, sort_keys=True) for rows in seen.values()}) > 5
    reader = lake.reader()
    for version, rows in draw.sample(sorted(seen.items()), len(seen)):
        for consistency in ("strong", "eventual"):
            assert rows_of(reader, version=version, consistency=consistency) == rows
        assert rows_of(table, version=version) == rows


def test_another_process_sees_the_same_versions(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(n) for n in range(3)])
    table.flush()
    first = table.snapshot()
    table.upsert([row(n) for n in range(3, 5)])
    table.flush()
    table.snapshot()
    table.upsert([row(99)])
    script = (
        "import json, sys, penstock\n"
        "t = penstock.connect(sys.argv[1]).open_table('t')\n"
        "asked = [{}, {'consistency': 'eventual'}, {'version': int(sys.argv[2])}]\n"
        "print(json.dumps([sorted(t.to_arrow(**a)['id'].to_pylist()) for a in asked]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(Path(lake.store.uri).parent), str(first)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    strong, eventual, old = json.loads(ran.stdout)
    assert strong == [0, 1, 2, 3, 4, 99]
    assert eventual == [0, 1, 2, 3, 4]
    assert old == [0, 1, 2]


def test_search_and_filters_go_back_as_well(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), 4))])
    table = penstock.connect(tmp_path).create_table("t", schema, primary_key="id")
    vectors = np.eye(4, dtype=np.float32)
    table.upsert([{"id": n, "vector": vectors[n].tolist()} for n in range(4)])
    table.flush()
    first = table.snapshot()
    table.upsert([{"id": 2, "vector": vectors[0].tolist()}])

    def nearest(**asked: Any) -> list[int]:
        found = table.search(vectors[2], **asked).limit(1).select(["id"]).to_list()
        return [one["id"] for one in found if one["_distance"] == 0.0]

    assert nearest() == []
    assert nearest(consistency="eventual") == nearest(version=first) == [2]
    assert table.scan(["id"], "id > 2", version=first).read_all().to_pylist() == [{"id": 3}]


def test_a_table_without_a_key_has_versions_too(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    table = lake.process().table
    table.upsert([row(1), row(1)])
    table.flush()
    first = table.snapshot()
    table.upsert([row(1)])
    counts = [table.count(), table.count(consistency="eventual"), table.count(version=first)]
    assert counts == [3, 2, 2]
    assert lake.reader().to_arrow(version=first).num_rows == 2


def test_a_version_has_the_columns_it_had(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(n) for n in range(5)])
    table.flush()
    old = table.snapshot()
    assert rows_of(table, version=old) == {n: f"row {n}" for n in range(5)}
    table.close()
    base = lance.dataset(table.uri)
    base.alter_columns({"path": "value", "name": "former"})
    base.add_columns(pa.schema([pa.field("value", pa.string())]))
    new = table.version
    renamed = {"id": 3, "former": "row 3", "value": None}
    for reader in (table, lake.reader()):
        assert reader.get(3, consistency="eventual") == renamed
        assert reader.get(3, version=old) == row(3)
        assert reader.get(3, version=new) == renamed
        assert reader.count("value = 'row 3'", version=old) == 1
        assert reader.count("value = 'row 3'", version=new) == 0
        assert reader.to_arrow(version=old).schema.names == ["id", "value"]
        with pytest.raises(InvalidInput, match="former"):
            reader.scan(["former"], version=old)


@pytest.mark.parametrize("what", ["all", "_pk_index", "data", "_versions"])
def test_a_generation_that_is_gone_is_an_error_and_no_short_answer(
    tmp_path: Path, what: str
) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    for n in range(2):
        table.upsert([row(n)])
        table.flush()
    version = table.snapshot()
    flushed = lake.manifest().flushed_generations[0]
    path = f"{names.region_dir(lake.manifest().region_id)}/{flushed.path}"
    lake.store.delete_prefix(path if what == "all" else f"{path}/{what}")
    reads: list[Callable[..., Any]] = [Table.count, Table.to_arrow]
    for read in reads:
        with pytest.raises(Corruption, match="not merged into the base table"):
            read(lake.reader(), consistency="eventual")
        with pytest.raises(VersionNotFound, match=f"version {version} cannot be read.*newer"):
            read(lake.reader(), version=version)


def test_a_generation_that_is_merged_under_an_eventual_read_makes_it_look_again(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(n) for n in range(5)])
    table.flush()
    table.snapshot()
    reader = lake.process()

    def overtake(op: str, key: str) -> None:
        merge_all(lake.store, table)
        clean_up(lake.store, table)

    # The newest version is known and its snapshot too; then it is overtaken.
    rule = reader.store.hook(op="get", key="_versions/*", after=overtake, times=1)
    reader.table._base._latest = None
    assert reader.table.count(consistency="eventual") == 5
    assert rule.fired == 1


def test_versions_that_do_not_exist_are_named_with_those_that_do(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    assert table.count(version=1) == 0, "the table before it was live"
    table.upsert([row(1)])
    table.flush()
    version = table.snapshot()
    for absent in (version + 1, 2**63 + 1, 2**64 - 1 - version, 2**70):
        with pytest.raises(VersionNotFound, match=f"no version {absent}; .* 1 to {version}"):
            table.count(version=absent)
        with pytest.raises(VersionNotFound, match="read one of these"):
            table.get(1, version=absent, consistency="eventual")
    assert table.count(version=np.int64(version)) == 1
    lance.write_dataset(table.schema.empty_table(), table.uri, mode="append")
    assert table.count(version=version) == 1
    lance.dataset(table.uri).cleanup_old_versions(older_than=timedelta(0))
    for reader in (table, lake.reader()):
        with pytest.raises(VersionNotFound, match=f"no version {version};"):
            reader.count(version=version)
        assert reader.count(version=version + 1) == 1


@pytest.mark.parametrize(
    "read", ["scan", "count", "get", "get_many", "to_arrow", "explain", "search"]
)
def test_what_no_read_can_be_asked_for_is_refused(tmp_path: Path, read: str) -> None:
    table = make_lake(tmp_path).process().table
    arguments = {"get": [1], "get_many": [[1]], "search": [[1.0]]}.get(read, [])

    def ask(**asked: Any) -> None:
        getattr(table, read)(*arguments, **asked)

    for wrong in ("Strong", "", None, 1):
        with pytest.raises(InvalidInput, match="there are: strong, eventual"):
            ask(consistency=wrong)
    for bad in (True, False, 0, -1, "1", 1.0, np.bool_(True)):
        with pytest.raises(InvalidInput, match=f"from 1 to {table.version}, the newest"):
            ask(version=bad)


def test_lance_goes_on_with_a_table_that_has_snapshots(tmp_path: Path) -> None:
    lake: Lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(n, "ours") for n in range(5)])
    table.flush()
    table.close()
    version = table.snapshot()
    dataset = lance.dataset(table.uri)
    assert dataset.version == version
    assert dataset.count_rows() == 0
    said = dataset.mem_wal_index_details()
    assert said is not None
    assert said["num_shards"] == 1
    assert {key[0] for key in lance_rows(table)} == set(range(5))
    region = lake.manifest().region_id
    with shard_writer(table, region) as theirs:
        theirs.put(pa.table({"id": [5], "value": ["lance"]}, schema=table.schema))
        assert {key[0] for key in written_rows(theirs, table)} == set(range(6))
    dataset = lance.dataset(table.uri)
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    merge(lake.store, lake.manifest(), 1)
    lance.dataset(table.uri).optimize.compact_files()
    lance.dataset(table.uri).optimize.optimize_indices()
    assert table.count() == 6
    # Lance carried the snapshot along: the first generation is merged, the second is not in it.
    assert table.count(consistency="eventual") == 5
    later = table.snapshot()
    assert table.count(consistency="eventual") == table.count(version=later) == 6
    assert rows_of(table, version=version) == dict.fromkeys(range(5), "ours")
