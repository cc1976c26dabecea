"""Our writer takes over shards that Lance wrote, and our reads equal Lance's own.

Lance's entries have no trailer and no checksum, its regions have ids of its own choosing, and its
generations were flushed by another engine. A table of Lance's is ours the moment we open it.
"""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.mem_wal import ShardWriter, evaluate_sharding_spec
from tests.interop.lance_side import (
    LanceLookup,
    Rows,
    by_key,
    lance_rows,
    manifests,
    only_region,
    our_rows,
    shard_writer,
    snapshots,
    written_rows,
)

import penstock
from penstock import Fenced, InvalidInput
from penstock.table import Table

PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False, PRIMARY_KEY),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 4)),
    ]
)


def row(number: int, name: str | None) -> dict[str, Any]:
    vector = None if number % 4 == 0 else [float(number % 1000)] * 4
    return {"id": number, "name": name, "vector": vector}


def lance_table(path: Path, **sharding: Any) -> Table:
    """A table that Lance alone made, with ten base rows."""
    base = pa.Table.from_pylist([row(i, "base") for i in range(10)], SCHEMA)
    dataset = lance.write_dataset(base, path / "t.lance")
    dataset.initialize_mem_wal(**sharding)
    return penstock.connect(path).open_table("t")


class LanceStory:
    """Lance's writer on one shard, and what the table must hold."""

    def __init__(self, table: Table, shard_id: uuid.UUID | None = None) -> None:
        self.table = table
        self.shard_id = shard_id or uuid.uuid4()
        self.model: Rows = {(i,): row(i, "base") for i in range(10)}
        self.writer: ShardWriter = shard_writer(table, self.shard_id)

    def put(self, numbers: list[int], name: str | None) -> None:
        rows = [row(number, name) for number in numbers]
        self.writer.put(pa.Table.from_pylist(rows, SCHEMA))
        self.model.update({(r["id"],): r for r in rows})

    def delete(self, numbers: list[int]) -> None:
        self.writer.delete(pa.table({"id": pa.array(numbers, pa.int64())}))
        for number in numbers:
            self.model.pop((number,), None)

    def write(self, name: str) -> None:
        self.put([0, 3, 20, 21, 20], name)
        self.put([3, 22], None)
        self.delete([1, 21, 404])
        self.put([21], f"{name} back")

    def flush(self) -> None:
        """Lance flushes when it closes; opening again claims the shard anew."""
        self.writer.close()
        self.writer = shard_writer(self.table, self.shard_id)

    def close(self) -> None:
        self.writer.close()

    def check(self) -> None:
        """What we read is the model."""
        table = self.table
        assert our_rows(table) == self.model
        assert table.count() == len(self.model)
        asked = [*range(30), 50, 51, 404]
        many = by_key(table.get_many(asked).to_pylist(), ("id",))
        assert many == {(key,): self.model[(key,)] for key in asked if (key,) in self.model}
        for key in (1, 3, 20, 404):
            assert table.get(key) == self.model.get((key,))


def wal_only(story: LanceStory) -> None:
    story.write("wal")


def generations_only(story: LanceStory) -> None:
    story.write("one")
    story.flush()
    story.delete([22])
    story.put([3], "two")
    story.close()


def both(story: LanceStory) -> None:
    story.write("one")
    story.flush()
    story.write("two")
    story.flush()
    story.put([5, 30], "tail")
    story.delete([0, 20])


@pytest.mark.parametrize("history", [wal_only, generations_only, both])
@pytest.mark.parametrize(
    "sharding",
    [{"unsharded": True}, {"bucket_column": "id", "num_buckets": 1}, {}],
    ids=["unsharded", "bucket", "manual"],
)
def test_we_claim_read_flush_and_lance_reads_on(
    tmp_path: Path, history: Any, sharding: dict[str, Any]
) -> None:
    story = LanceStory(lance_table(tmp_path, **sharding))
    table = story.table
    history(story)
    story.check()
    before = only_region(table)
    assert before.region_id == story.shard_id

    # An unsharded table has one region, and that is Lance's; others are named by the caller.
    if sharding == {"unsharded": True}:
        ours: Any = table
    else:
        ours = table.writer(region=story.shard_id)
    ours.upsert([row(50, "ours"), row(3, "ours")])
    ours.delete(keys=[22, 9])
    story.model.update({(50,): row(50, "ours"), (3,): row(3, "ours")})
    story.model.pop((22,), None)
    story.model.pop((9,), None)
    after = only_region(table)
    assert after.writer_epoch == before.writer_epoch + 1
    assert after.region_spec_id == before.region_spec_id
    story.check()
    if history is not generations_only:
        with pytest.raises(OSError, match="fenced"):
            story.put([99], "too late")

    ours.flush()
    assert len(only_region(table).flushed_generations) == len(before.flushed_generations) + 1
    story.check()
    assert lance_rows(table) == story.model
    lookup = LanceLookup(table)
    for key in (0, 1, 3, 9, 20, 21, 22, 50, 404):
        assert lookup((key,)) == story.model.get((key,))

    # And once more around: Lance writes on our generation, and we read that.
    story.writer = shard_writer(table, story.shard_id)
    assert written_rows(story.writer, table) == story.model
    story.put([50, 51], "lance again")
    story.delete([20])
    story.check()
    if ours is not table:
        with pytest.raises(Fenced, match="open a new writer"):
            ours.upsert([row(52, "too late")])


def test_the_shared_writer_claims_back_from_lance(tmp_path: Path) -> None:
    """`Table.upsert` survives Lance taking the region between two calls, and loses nothing."""
    table = lance_table(tmp_path, unsharded=True)
    table.upsert([row(50, "ours")])
    story = LanceStory(table, only_region(table).region_id)
    story.model[(50,)] = row(50, "ours")
    story.write("theirs")
    table.upsert([row(51, "ours again")])
    story.model[(51,)] = row(51, "ours again")
    story.check()
    table.flush()
    story.check()
    assert lance_rows(table) == story.model


def test_buckets_that_lance_filled(tmp_path: Path) -> None:
    """Rows routed by Lance's own evaluation go to the shards we would choose."""
    table = lance_table(tmp_path, bucket_column="id", num_buckets=4)
    dataset = lance.dataset(table.uri)
    spec = dataset.mem_wal_index_details()["sharding_specs"][0]
    chance = random.Random(8)
    model: Rows = {(i,): row(i, "base") for i in range(10)}
    numbers = [chance.randint(-(2**40), 2**40) for _ in range(200)]
    rows = pa.RecordBatch.from_pylist([row(i, "routed") for i in numbers], SCHEMA)
    buckets = evaluate_sharding_spec(rows, spec, dataset.lance_schema).column(0).to_numpy()
    for bucket in np.unique(buckets).tolist():
        part = rows.take(pa.array(np.flatnonzero(buckets == bucket)))
        with shard_writer(table, uuid.uuid4()) as theirs:
            theirs.put(part)
    model.update({(i,): row(i, "routed") for i in numbers})
    assert our_rows(table) == model == lance_rows(table)

    # Lance does not record which values its shards stand for, so we do not guess.
    with pytest.raises(InvalidInput, match="writer\\(region="):
        table.upsert([row(0, "which region?")])
    for manifest in manifests(table):
        with table.writer(region=manifest.region_id) as ours:
            (generation,) = manifest.flushed_generations
            path = f"{table.uri}/_mem_wal/{manifest.region_id}/{generation.path}"
            numbers_inside = lance.dataset(path).to_table(columns=["id"]).column(0).to_pylist()
            ours.delete(numbers_inside[:3])
            for number in numbers_inside[:3]:
                del model[(number,)]
    assert our_rows(table) == model == lance_rows(table)


def test_a_table_that_lance_divides_by_another_column_than_its_key(tmp_path: Path) -> None:
    """Two versions of a row would lie in two regions with no order between them."""
    table = lance_table(tmp_path, identity_column="name")
    with pytest.raises(InvalidInput, match=r"'name'.*set_regions"):
        table.upsert([row(1, "which is newer?")])
    assert table.count() == 10
    table.set_regions(penstock.bucket("id", 2))
    table.upsert([row(1, "a")])
    table.upsert([row(1, "b")])
    assert table.get(1) == row(1, "b")
    table.delete(keys=[1])
    assert table.get(1) is None


def test_our_buckets_are_lance_buckets(tmp_path: Path) -> None:
    """Every row lies in the region whose recorded value Lance computes for it."""
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 5))
    table.upsert([row(i, "ours") for i in range(-40, 40)])
    table.flush()
    dataset = lance.dataset(table.uri)
    spec = dataset.mem_wal_index_details()["sharding_specs"][0]
    for manifest in manifests(table):
        ((_, value),) = manifest.region_values
        (generation,) = manifest.flushed_generations
        path = f"{table.uri}/_mem_wal/{manifest.region_id}/{generation.path}"
        (rows,) = lance.dataset(path).to_table(columns=SCHEMA.names).combine_chunks().to_batches()
        buckets = evaluate_sharding_spec(rows, spec, dataset.lance_schema)
        assert set(buckets.column(0).to_pylist()) == {int.from_bytes(value, "little")}


def test_a_plain_lance_table_is_adopted(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([row(i, "base") for i in range(10)], SCHEMA)
    lance.write_dataset(rows, tmp_path / "t.lance")
    db = penstock.connect(tmp_path)
    table = db.open_table("t", adopt=True)
    assert lance.dataset(table.uri).mem_wal_index_details()["num_shards"] == 1
    table.upsert([row(3, "live"), row(11, "live")])
    table.delete(keys=[0])
    assert table.count() == 10
    table.flush()
    assert lance_rows(table) == our_rows(table)
    assert our_rows(table)[(3,)] == row(3, "live")
    assert db.open_table("t", adopt=True).version == table.version, "adopting twice changes nothing"
    assert len(snapshots(table)) == 1
