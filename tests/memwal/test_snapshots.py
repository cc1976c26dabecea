"""Region snapshots: everything survives, nothing goes backwards, nobody is disturbed."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance.file import LanceFileReader
from lance.mem_wal import CompactedSsTable
from tests.failures.lake import MANIFEST, Lake, make_lake, row

import penstock
from penstock.errors import CommitConflict, Corruption
from penstock.memwal import names, snapshots
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import FlushedGeneration, RegionManifest, RegionStatus
from penstock.memwal.region_spec import RegionField, RegionSpec, arrow_type
from penstock.memwal.snapshots import (
    build_snapshot,
    encode_snapshot,
    external_key,
    read_snapshot,
)
from penstock.memwal.table_commit import commit_details
from penstock.memwal.table_versions import read_details
from penstock.memwal.transforms import encode_value
from penstock.storage.open import open_store
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams

STORE = open_store("memory://")
u64 = st.integers(0, 2**64 - 1)
SPECS = [
    RegionSpec(1, (RegionField("bucket", (0,), "bucket", None, "int32", {"num_buckets": "4"}),)),
    # The same name for values of another type, and a second field.
    RegionSpec(
        2,
        (
            RegionField("bucket", (1,), "identity", None, "utf8", {}),
            RegionField("day_at", (2,), "day", None, "date32", {}),
        ),
    ),
]
VALUES = {"int32": st.integers(-(2**31), 2**31 - 1), "utf8": st.text(max_size=5)}


@st.composite
def regions(draw: st.DrawFn) -> RegionManifest:
    spec_id = draw(st.integers(0, 3))
    fields = {spec.spec_id: spec.fields for spec in SPECS}.get(spec_id, ())
    values = []
    for field in fields:
        kind = VALUES.get(field.result_type, st.dates())
        raw = encode_value(draw(st.none() | kind), arrow_type(field.result_type))
        if raw is not None:
            values.append((field.field_id, raw))
    if not fields:
        values = draw(st.lists(st.tuples(st.text(max_size=4), st.binary(max_size=4)), max_size=2))
    flushed = draw(
        st.lists(
            st.builds(
                FlushedGeneration,
                generation=u64,
                path=st.text("abc_gen0123", min_size=1),
                in_memory_bytes=st.none() | u64,
                physical_rows=st.none() | u64,
                primary_key_bytes=st.none() | u64,
            ),
            max_size=4,
            unique_by=lambda g: g.generation,
        )
    )
    return RegionManifest(
        region_id=draw(st.uuids()),
        version=draw(u64),
        writer_epoch=draw(u64),
        replay_after_wal_entry_position=draw(u64),
        wal_entry_position_last_seen=draw(u64),
        current_generation=draw(st.integers(1, 2**64 - 1)),
        flushed_generations=tuple(sorted(flushed, key=lambda g: g.generation)),
        region_spec_id=spec_id,
        region_values=tuple(values),
        status=draw(st.sampled_from(RegionStatus)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(regions(), max_size=5))
def test_everything_a_manifest_says_survives(some: list[RegionManifest]) -> None:
    assert read_snapshot(STORE, encode_snapshot(some, SPECS), "s") == tuple(some)


@settings(max_examples=60, deadline=None)
@given(st.lists(regions(), min_size=1, max_size=3), st.integers(0, 10**6), st.booleans())
def test_damage_is_found(some: list[RegionManifest], where: int, cut: bool) -> None:
    data = encode_snapshot(some, SPECS)
    place = where % (len(data) * 8)
    flipped = bytearray(data)
    flipped[place // 8] ^= 1 << place % 8
    damaged = data[: place // 8] if cut else bytes(flipped)
    # Some bits mean nothing; any other damage is an error, never another answer.
    with suppress(Corruption):
        assert read_snapshot(STORE, damaged, "the snapshot of t") == tuple(some)


def snapshot_of(lake: Lake, version: int) -> dict[uuid.UUID, RegionManifest]:
    found = read_details(lake.store, version)
    assert found is not None
    assert found[0].inline_snapshots is not None
    some = read_snapshot(lake.store, found[0].inline_snapshots, "s")
    assert len(some) == found[0].num_regions
    return {region.region_id: region for region in some}


def test_a_snapshot_is_a_lance_file_with_the_columns_of_the_specification(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 3))
    table = lake.process().table
    empty = table.snapshot()
    assert snapshot_of(lake, empty) == {}

    table.upsert([row(n) for n in range(20)])
    table.flush()
    version = table.snapshot()
    assert version == empty + 1
    assert table.snapshot() == version, "nothing has changed"
    details = lake.reader()._base.snapshot().details
    assert details.snapshot_ts_millis > 0
    assert snapshot_of(lake, version) == {
        manifest.region_id: manifest for manifest in lake.manifests()
    }
    assert details.inline_snapshots is not None
    path = tmp_path / "copy.lance"
    path.write_bytes(details.inline_snapshots)
    rows = LanceFileReader(str(path)).read_all().to_table()
    assert rows.schema.names[:8] == [
        "region_id",
        "version",
        "region_spec_id",
        "writer_epoch",
        "replay_after_wal_entry_position",
        "wal_entry_position_last_seen",
        "current_generation",
        "flushed_generations",
    ]
    assert rows.schema.field("region_id").type == pa.binary(16)
    assert sorted(rows.column("region_field_bucket").to_pylist()) == [0, 1, 2]
    assert rows.schema.field("region_field_bucket").type == pa.int32()

    # What is only in the log is counted, not contained.
    table.upsert([row(n) for n in range(20)])
    later = snapshot_of(lake, table.snapshot())
    assert {r.replay_after_wal_entry_position for r in later.values()} == {1}
    assert {r.wal_entry_position_last_seen for r in later.values()} == {2}


def test_configuration_and_progress_stay(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, writer_defaults={"max_memtable_rows": 77})
    table = lake.process().table
    table.upsert([row(1)])
    table.flush()
    table.create_index("id", "btree", name="by_id")
    region = lake.manifest().region_id

    def mark(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        return replace(
            current, merged_generations={region: 1}, index_catchup={"by_id": {region: 1}}
        )

    commit_details(lake.store, None, mark, Seams())
    before = lake.reader()._base.snapshot().details
    assert before.index_catchup
    table.snapshot()
    after = lake.reader()._base.snapshot().details
    kept = {
        "snapshot_ts_millis": before.snapshot_ts_millis,
        "num_regions": before.num_regions,
        "inline_snapshots": before.inline_snapshots,
    }
    assert replace(after, **kept) == before  # type: ignore[arg-type]
    # Dividing the table anew leaves the snapshot and its number of regions alone.
    table.set_regions(penstock.bucket("id", 8))
    divided = lake.reader()._base.snapshot().details
    assert divided.inline_snapshots == after.inline_snapshots
    assert divided.num_regions == 1


def test_many_regions_go_into_a_file_that_outlives_the_uuid_of_the_index(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 4))
    table = lake.process().table
    table.upsert([row(n) for n in range(40)])
    table.flush()
    version = build_snapshot(table._base, inline_regions=3)
    found = read_details(lake.store, version)
    assert found is not None
    details, identity = found
    assert details.num_regions == 4
    assert details.inline_snapshots is not None
    assert lake.store.exists(external_key(identity))
    assert LanceFileReader(f"{lake.store.uri}/{external_key(identity)}").num_rows() == 4
    assert snapshot_of(lake, version) == {m.region_id: m for m in lake.manifests()}
    assert table.count(consistency="eventual") == 40
    assert build_snapshot(table._base, inline_regions=3) == version

    # A merge by Lance gives the index another uuid; the file is still found.
    base = lance.dataset(table.uri)
    merge = base.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    merge.mark_sstables_as_compacted([CompactedSsTable(str(uuid.uuid4()), 1)])
    merge.execute(pa.table({"id": [1000], "value": ["merged"]}, schema=base.schema))
    renamed = read_details(lake.store, version + 1)
    assert renamed is not None
    assert renamed[1] != identity
    assert lake.reader().count(consistency="eventual") == 41
    assert lake.reader().count(version=version) == 40

    # When Lance has cleaned up every version with the first uuid, the file goes with them.
    lance.dataset(table.uri).cleanup_old_versions(older_than=timedelta(0))
    assert not lake.store.exists(external_key(identity))
    with pytest.raises(Corruption, match=r"take another with snapshot\(\)"):
        lake.reader().count(consistency="eventual")
    with pytest.raises(penstock.VersionNotFound, match=f"version {version + 1} cannot be read"):
        lake.reader().count(version=version + 1)
    assert lake.reader().count() == 41
    assert build_snapshot(table._base, inline_regions=3) == version + 2
    assert lake.reader().count(consistency="eventual") == 41


def test_a_snapshot_that_meets_a_newer_one_looks_again(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    slow, fast = lake.process(), lake.process()
    fast.table.upsert([row(1)])
    fast.table.flush()
    versions: list[int] = []

    def overtake(op: str, key: str) -> None:
        fast.table.upsert([row(2)])
        fast.table.flush()
        versions.append(fast.table.snapshot())

    slow.store.hook(op="put_if_absent", key="_versions/*", before=overtake, times=1)
    last = slow.table.snapshot()
    assert last >= versions[0]
    (region,) = snapshot_of(lake, last).values()
    assert region == lake.manifest()
    assert [g.generation for g in region.flushed_generations] == [1, 2]


def test_a_snapshot_gives_up_after_some_conflicts_and_changes_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    busy = lake.process()
    base = busy.table._base
    base.seams = replace(base.seams, backoff=Backoff(races=3, base_ms=0, max_ms=0))

    def another_commit(op: str, key: str) -> None:
        lance.write_dataset(busy.table.schema.empty_table(), lake.store.uri, mode="append")

    rule = busy.store.hook(op="put_if_absent", key="_versions/*", before=another_commit)
    with pytest.raises(CommitConflict, match="3 times"):
        busy.table.snapshot()
    assert rule.fired == 3
    assert lake.reader()._base.snapshot().details.inline_snapshots is None


def test_snapshots_of_many_never_go_backwards(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    def write() -> None:
        with lake.process().table.writer() as writer:
            for n in range(12):
                writer.upsert([row(n * 10 + k) for k in range(10)])
                writer.flush()
        done.set()

    def take() -> None:
        table = lake.process().table
        for _ in range(200):
            try:
                table.snapshot()
            except CommitConflict:
                continue
            if done.is_set():
                return

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, take, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    newest = lake.reader().snapshot()
    assert lake.reader().count(consistency="eventual") == 120
    known: dict[uuid.UUID, int] = {}
    for version in range(1, newest + 1):
        found = read_details(lake.store, version)
        if found is None or found[0].inline_snapshots is None:
            continue
        there = {r: m.version for r, m in snapshot_of(lake, version).items()}
        assert all(there[region] >= before for region, before in known.items())
        known = there


def test_the_hint_is_moved_on_under_a_writer_that_does_not_mind(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer = lake.process().table.writer()
    for n in range(70):
        writer.upsert([row(n)])
    before = lake.manifest()
    lake.reader().snapshot()
    hinted = lake.manifest()
    # One before the tip: the entry at the tip may not be durable yet.
    assert hinted == before.next(wal_entry_position_last_seen=69)
    lake.reader().snapshot()
    assert lake.manifest() == hinted, "a hint that is good enough is left alone"
    writer.upsert([row(100)])
    writer.flush()
    writer.upsert([row(101)])
    writer.close(flush=False)
    assert writer.stats()["flush_failures"] == 0
    assert lake.manifest().writer_epoch == before.writer_epoch
    assert lake.reader().count() == 72
    lake.process().table.upsert([row(102)])
    assert lake.reader().count() == 73


def test_a_claim_that_comes_first_keeps_the_hint_as_it_was(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    writer = lake.process().table.writer()
    for n in range(70):
        writer.upsert([row(n)])
    builder = lake.process()

    def claim(op: str, key: str) -> None:
        lake.process().table.writer().claim_all()

    rule = builder.store.hook(op="put_if_absent", key=MANIFEST, before=claim, times=1)
    builder.table.snapshot()
    assert rule.fired == 1
    assert lake.manifest().wal_entry_position_last_seen == 0
    assert lake.manifest().writer_epoch == 2
    assert lake.reader().count() == 70


def test_a_lance_writer_goes_on_under_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_HINT_LAG_ENTRIES", 3)
    lake = make_lake(tmp_path)
    table = lake.process().table
    table.upsert([row(0)])
    table.flush()
    table.close()
    region = lake.manifest().region_id
    with lance.dataset(table.uri).mem_wal_writer(str(region), max_memtable_rows=10) as theirs:
        for n in range(1, 9):
            theirs.put(pa.table({"id": [n], "value": ["lance"]}, schema=table.schema))
        epoch = lake.manifest().writer_epoch
        version = lake.reader().snapshot()
        assert lake.manifest().wal_entry_position_last_seen > 6
        for n in range(9, 15):
            theirs.put(pa.table({"id": [n], "value": ["lance"]}, schema=table.schema))
    assert lake.manifest().writer_epoch == epoch
    assert len(lake.generations()) >= 2
    assert lake.reader().count() == 15
    assert lake.reader().count(version=version) == 1


def test_a_region_without_a_manifest_is_not_left_out(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    lake.process().table.upsert([row(n) for n in range(10)])
    lost = lake.manifests()[0].region_id
    lake.store.delete_prefix(f"{names.region_dir(lost)}/manifest")
    with pytest.raises(Corruption, match=f"region {lost} has files but no manifest"):
        lake.reader().snapshot()
