"""The MemWAL index: kept whole, changed by one at a time, read from any version."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from pathlib import Path

import lance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.failures.lake import make_lake, row

import penstock
from penstock.errors import CommitConflict, Corruption, NotATable
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.region_spec import RegionField, RegionSpec
from penstock.memwal.table_commit import commit_details
from penstock.memwal.table_versions import read_details
from penstock.storage.retry import Backoff
from penstock.storage.seams import Seams

u64 = st.integers(0, 2**64 - 1)
progress = st.dictionaries(st.uuids(), u64, max_size=3)
fields = st.builds(
    RegionField,
    field_id=st.text(min_size=1, max_size=8),
    source_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    transform=st.none() | st.text(max_size=8),
    expression=st.none() | st.text(max_size=8),
    result_type=st.sampled_from(["int32", "utf8"]),
    parameters=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)
details = st.builds(
    MemWalIndexDetails,
    snapshot_ts_millis=st.integers(-(2**63), 2**63 - 1),
    num_regions=st.integers(0, 2**32 - 1),
    inline_snapshots=st.none() | st.binary(max_size=9),
    region_specs=st.lists(
        st.builds(
            RegionSpec,
            spec_id=st.integers(0, 2**32 - 1),
            fields=st.lists(fields, max_size=2).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    maintained_indexes=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    merged_generations=progress,
    index_catchup=st.dictionaries(st.text(max_size=5), progress, max_size=2),
    writer_config_defaults=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    maintain_all_indexes=st.booleans(),
)


@given(details)
def test_what_is_encoded_is_decoded(one: MemWalIndexDetails) -> None:
    assert MemWalIndexDetails.decode(one.encode(), "t") == one


@given(details, st.binary(max_size=40))
def test_fields_of_a_newer_lance_survive_our_changes(
    one: MemWalIndexDetails, payload: bytes
) -> None:
    tag = (1000 << 3) | 2
    unknown = bytes([tag & 0x7F | 0x80, tag >> 7, len(payload)]) + payload
    known = MemWalIndexDetails.decode(one.encode() + unknown, "t")
    changed = replace(known, num_regions=5, merged_generations={}, region_specs=())
    assert unknown in changed.encode()
    assert MemWalIndexDetails.decode(changed.encode(), "t") == changed


def test_commits_of_many_threads_lose_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    patient = Seams(backoff=Backoff(races=100, base_ms=1, max_ms=50))
    regions = [uuid.uuid4() for _ in range(12)]

    def work(region: uuid.UUID, generation: int) -> None:
        def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
            assert current is not None
            return replace(
                current, merged_generations={**current.merged_generations, region: generation}
            )

        commit_details(lake.store, None, change, patient)

    threads = [
        threading.Thread(target=work, args=(region, n + 1), daemon=True)
        for n, region in enumerate(regions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    snapshot = lake.reader()._base.snapshot()
    assert dict(snapshot.details.merged_generations) == {r: n + 1 for n, r in enumerate(regions)}
    # Nothing else was touched, and each commit is a version of its own that stays readable.
    assert len(snapshot.details.region_specs) == 1
    counts = []
    for version in range(2, snapshot.version + 1):
        found = read_details(lake.store, version)
        assert found is not None
        counts.append(len(found[0].merged_generations))
    assert counts == list(range(13))
    # Lance itself goes on from there.
    lance.write_dataset(lake.reader().schema.empty_table(), lake.store.uri, mode="append")
    assert lake.reader()._base.snapshot().details == snapshot.details


def test_a_change_that_always_loses_gives_up_and_says_so(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    hasty = Seams(backoff=Backoff(races=3, base_ms=0, max_ms=0))
    tried = []

    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        tried.append(current.num_regions)
        # Somebody else commits each time between our look and our commit.
        commit_details(
            lake.store,
            None,
            lambda c: replace(c, num_regions=len(tried) + 10),
            Seams(),  # type: ignore[type-var]
        )
        return replace(current, num_regions=99)

    with pytest.raises(CommitConflict, match="3 times"):
        commit_details(lake.store, None, change, hasty)
    assert tried == [1, 11, 12]
    assert lake.reader()._base.snapshot().details.num_regions == 13


def test_a_change_that_changes_nothing_commits_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    version = lake.reader().version
    found = commit_details(lake.store, None, lambda current: None, Seams())
    assert found is not None
    assert lake.reader().version == version


def test_spec_ids_are_never_used_again(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    spec = lake.reader()._base.snapshot().details.region_specs[0]
    with pytest.raises(penstock.InvalidInput, match="used before"):
        lake.reader()._base.snapshot().details.with_spec(spec)
    made: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: made.append(lake.reader().set_regions(penstock.bucket("id", 2))),
            daemon=True,
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made) == [2, 3, 4, 5]
    lake.process().table.upsert([row(1)])
    assert lake.manifest().region_spec_id == 5


def test_a_damaged_table_manifest_is_refused(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    version = lake.reader().version
    key = f"_versions/{2**64 - 1 - version:020}.manifest"
    data = bytes(lake.store.get(key).data)
    for damaged in (data[:-1], data[:10], b"", data[:-16] + b"\xff" * 8 + data[-8:]):
        lake.store.put(key, damaged)
        with pytest.raises(Corruption, match=f"version {version}"):
            read_details(lake.store, version)
    lake.store.delete(key)
    with pytest.raises(NotATable):
        read_details(lake.store, version)
