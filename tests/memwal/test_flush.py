"""A flushed generation is a Lance table of its own, with the base's field ids and all its types."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import make_lake

from penstock.index.primary_key import PkIndexReader, primary_key_columns
from penstock.memwal import names
from penstock.storage.faults import Fault

NESTED = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("who", pa.struct([("name", pa.string()), ("at", pa.list_(pa.float64()))])),
        pa.field("tags", pa.list_(pa.struct([("k", pa.string()), ("v", pa.int32())]))),
        pa.field("vector", pa.list_(pa.float32(), 3)),
        pa.field("when", pa.timestamp("us", "UTC")),
        pa.field("blob", pa.large_binary()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("prices", pa.list_(pa.decimal128(30, 1))),
        pa.field("last", pa.bool_()),
    ]
)


def nested(n: int) -> dict[str, Any]:
    return {
        "id": n,
        "who": None if n % 5 == 0 else {"name": f"n{n}", "at": [n / 2, None]},
        "tags": [{"k": "a", "v": n}, {"k": None, "v": None}] if n % 3 else [],
        "vector": [n, n + 1, n + 2] if n % 4 else None,
        "when": dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=n),
        "blob": bytes([n % 256]) * (n % 7),
        "price": Decimal(n) / 4 if n % 6 else None,
        "prices": [Decimal(n), None] * (n % 3),
        "last": n % 2 == 0,
    }


def test_nested_rows_survive_log_flush_and_recovery_unchanged(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, schema=NESTED)
    process = lake.process()
    expected = [nested(n) for n in range(40)]
    process.table.upsert(expected[:20])
    process.table.flush()
    process.table.upsert(expected[20:])
    for table in (process.table, lake.reader()):
        assert table.to_arrow().sort_by("id").to_pylist() == expected
        assert table.get(21) == expected[21]
        assert table.get(1) == expected[1]
    ids = {f.name(): f.id() for f in lance.dataset(lake.store.uri).lance_schema.fields()}
    generation = lake.generation(1)
    flushed = {f.name(): f.id() for f in generation.lance_schema.fields()}
    assert {name: flushed[name] for name in ids} == ids
    assert len(generation.get_fragments()) == 1


def test_superseded_rows_are_hidden_and_tombstones_stay(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    with process.table.writer() as writer:
        for turn in range(4):
            writer.upsert([{"id": n, "value": f"{turn}"} for n in range(10)])
        writer.delete([3, 77])
        writer.upsert([{"id": 4, "value": "x"}, {"id": 4, "value": "y"}])
    generation = lake.generation(1)
    stored = {r["id"]: (r["value"], r["_tombstone"]) for r in generation.to_table().to_pylist()}
    assert generation.count_rows() == len(stored) == 11
    assert stored[3] == stored[77] == (None, True)
    assert stored[4] == ("y", False)
    flushed = lake.manifest().generation(1)
    assert flushed is not None
    assert flushed.physical_rows == 44
    index = PkIndexReader(generation.uri)
    assert index.lookup(4).tolist() == [4, 14, 24, 34, 42, 43]
    assert primary_key_columns(generation.schema) == ("id",)
    bloom = f"{names.region_dir(lake.manifest().region_id)}/{flushed.path}/bloom_filter.bin"
    assert lake.store.exists(bloom)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
def test_a_flush_that_fails_is_tried_again_in_another_directory(
    tmp_path: Path, fault: Fault
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([{"id": 1, "value": "a"}])
    process.store.inject(fault, op="sync", key="*_gen_1", nth=1, times=2)
    writer.flush()
    assert writer.stats()["flush_failures"] == 2
    assert lake.generations() == [1]
    region = names.region_dir(lake.manifest().region_id)
    tried = [d for d in lake.store.list_dirs(region) if names.generation_of(d) == 1]
    assert len(tried) == 3, "each attempt has a directory of its own"
    assert lake.reader().get(1) == {"id": 1, "value": "a"}
    writer.close()
    assert uuid.UUID(region.rsplit("/", 1)[-1]) == lake.manifest().region_id
