"""Regions of a table: their ids, those of others, and values that are null."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from tests.failures.lake import ids_of, make_lake, row

import penstock
from penstock.errors import Corruption, InvalidInput
from penstock.memwal import names
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.memwal.regions import RegionRouter, list_region_ids, load_manifests
from penstock.storage.seams import Seams
from penstock.table import Table


def router(table: Table) -> RegionRouter:
    base = table._base
    spec = base.snapshot().details.current_spec
    assert spec is not None
    return RegionRouter(base, spec, load_manifests(base.store, base.seams))


def test_ids_are_derived_so_that_every_process_means_the_same_region(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.string()), ("id", pa.int64())])
    lake = make_lake(
        tmp_path,
        schema=schema,
        primary_key=None,
        regions=[penstock.identity("a"), penstock.identity("b")],  # type: ignore[arg-type]
    )
    values = [(a, b) for a in (None, "", "x", "y") for b in (None, "", "x", "y")]
    one, two = router(lake.reader()), router(lake.reader())
    ids = [one.identity(value).region_id for value in values]
    assert len(set(ids)) == 16, "NULL, the empty string and the column all count"
    assert [two.identity(value).region_id for value in values] == ids
    assert all(identity.version == 4 for identity in ids)
    # Once they exist they are recognised by what their manifests say, the all-null one too.
    lake.process().table.upsert([{"a": a, "b": b, "id": n} for n, (a, b) in enumerate(values)])
    assert sorted(list_region_ids(lake.store)) == sorted(ids)
    again = router(lake.reader())
    assert [again.identity(value).region_id for value in values] == ids
    assert ids_of(lake.reader()) == list(range(16))


def test_a_region_somebody_else_made_is_found_by_its_values(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    theirs = uuid.uuid4()
    mine = router(lake.reader())
    other = mine.identity((1,))
    claim_region(lake.store, RegionIdentity(theirs, 1, other.values), Seams())
    assert router(lake.reader()).identity((1,)).region_id == theirs
    assert router(lake.reader()).identity((0,)).region_id == mine.identity((0,)).region_id


def test_the_only_region_without_values_is_that_of_an_unsharded_table(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    theirs = uuid.uuid4()
    claim_region(lake.store, RegionIdentity(theirs, 1), Seams())
    lake.process().table.upsert([row(1)])
    assert list_region_ids(lake.store) == [theirs]
    claim_region(lake.store, RegionIdentity(uuid.uuid4(), 1), Seams())
    with pytest.raises(InvalidInput, match="do not record which rows belong to them"):
        router(lake.reader())
    # Such regions can still be written one by one, and are read like any other.
    with lake.process().table.writer(region=str(theirs)) as writer:
        writer.upsert([row(2)])
    assert ids_of(lake.reader()) == [1, 2]


def test_what_is_no_region_is_passed_over_and_a_region_without_manifest_is_not(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path)
    lake.process().table.upsert([row(1)])
    lake.store.put(f"{names.MEM_WAL}/notes/readme", b"not a region")
    assert ids_of(lake.reader()) == [1]
    # Half a region is damage: an answer without its rows would be a partial answer.
    region = lake.manifest().region_id
    lake.store.delete_prefix(f"{names.region_dir(region)}/manifest")
    with pytest.raises(Corruption, match=f"{region} has files but no manifest"):
        lake.reader().count()
