"""Lance's writer takes over a region of ours, whatever state we left it in, and we take it back."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from tests.interop.lance_side import (
    lance_rows,
    only_region,
    our_rows,
    shard_writer,
    written_rows,
)
from tests.s3_server import S3Server

import penstock
from penstock import Fenced
from penstock.memwal.base_table import BaseTable
from penstock.memwal.config import WriterConfig
from penstock.memwal.table_writer import TableWriter
from penstock.storage.faults import FaultStore
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    ],
    metadata={"owner": "interop"},
)


def row(number: int, name: str | None) -> dict[str, object]:
    empty = number % 3 == 0
    return {
        "id": number,
        "name": name,
        "vector": None if empty else [float(number), 0.5],
        "tags": None if empty else ["a", str(number)],
        "place": None if empty else {"x": number, "y": name},
    }


class Story:
    """A writer of ours and what it has written so far."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.model: dict[tuple[int], dict[str, object]] = {}
        self.writer = table.writer(max_memtable_rows=1_000_000)

    def upsert(self, numbers: list[int], name: str | None) -> None:
        rows = [row(number, name) for number in numbers]
        self.writer.upsert(rows)
        self.model.update({(r["id"],): r for r in rows})

    def delete(self, numbers: list[int]) -> None:
        self.writer.delete(numbers)
        for number in numbers:
            self.model.pop((number,), None)

    def write_a_tail(self) -> None:
        """Upserts, duplicates within and across entries, tombstones, in several entries."""
        self.upsert(list(range(20)), "first")
        self.upsert([3, 4, 3, 3], "again")
        self.delete([5, 6, 404])
        self.upsert([6, 21], "back")
        self.upsert([7], None)
        self.delete([21])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    db = penstock.connect(tmp_path)
    return Story(db.create_table("t", SCHEMA, primary_key="id"))


def leave_with_close(story: Story) -> None:
    story.writer.close(flush=False)


def leave_flushed(story: Story) -> None:
    story.writer.close()


def leave_by_crash(story: Story) -> None:
    story.writer.abandon()


def stay(story: Story) -> None:
    """The former writer lives on, and must be fenced."""


@pytest.mark.parametrize("generations", [0, 1, 2])
@pytest.mark.parametrize("leave", [leave_with_close, leave_flushed, leave_by_crash, stay])
def test_lance_claims_replays_and_fences_and_we_claim_back(
    story: Story, leave: object, generations: int
) -> None:
    for number in range(generations):
        story.upsert(list(range(10, 30)), f"generation {number}")
        story.upsert([10, 10], "twice")
        story.delete([11, 29])
        story.writer.flush()
    story.write_a_tail()
    leave(story)  # type: ignore[operator]
    before = only_region(story.table)

    theirs = shard_writer(story.table, before.region_id)
    assert only_region(story.table).writer_epoch == before.writer_epoch + 1
    assert written_rows(theirs, story.table) == story.model

    if leave is stay:
        with pytest.raises(Fenced, match="open a new writer"):
            story.writer.upsert([row(1, "too late")])
        story.writer.abandon()
        assert written_rows(theirs, story.table) == story.model

    # Lance writes on, and goes away without a flush or with one.
    rows = [row(50, "theirs"), row(3, "theirs"), row(50, "theirs again")]
    theirs.put(pa.Table.from_pylist(rows, story.table.schema))
    theirs.delete(pa.table({"id": pa.array([4, 8], pa.int64())}))
    story.model.update({(50,): rows[2], (3,): rows[1]})
    del story.model[(4,)], story.model[(8,)]
    if generations == 1:
        theirs.close()
    assert our_rows(story.table) == story.model

    story.writer = story.table.writer()
    story.upsert([60, 4], "ours again")
    assert only_region(story.table).writer_epoch == before.writer_epoch + 2
    assert our_rows(story.table) == story.model
    if generations != 1:
        with pytest.raises(OSError, match="fenced"):
            theirs.put(pa.Table.from_pylist(rows, story.table.schema))
    story.writer.close()
    assert our_rows(story.table) == story.model
    assert story.table.count() == len(story.model)


def test_lance_replays_entries_of_generations_that_were_never_flushed(tmp_path: Path) -> None:
    """Our log may run several generations ahead of the manifest; Lance replays all of them."""
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id")
    seams = Seams()
    store = FaultStore(open_store(table.uri), seams.clock, seams.entropy)
    hold = threading.Event()
    store.hook(op="put", key="*bloom_filter.bin", before=lambda *_: hold.wait(60))
    writer = TableWriter(BaseTable(store, None, seams), WriterConfig())
    try:
        for number in range(4):
            writer.upsert([row(i, f"entry {number}") for i in range(number, number + 3)])
            writer.delete([number])
            for region in writer.region_writers():
                region.freeze()
        manifest = only_region(table)
        assert manifest.current_generation == 1
        assert not manifest.flushed_generations
        writer.abandon()
        theirs = shard_writer(table, manifest.region_id)
    finally:
        hold.set()
    expected = {(i,): row(i, f"entry {3 if i > 3 else i - 1}") for i in range(4, 6)}
    assert written_rows(theirs, table) == expected
    assert our_rows(table) == expected


def test_the_same_on_an_object_store(s3: S3Server) -> None:
    db = penstock.connect(s3.uri("claims"), s3.storage_options)
    story = Story(db.create_table("t", SCHEMA, primary_key="id"))
    story.upsert(list(range(10, 30)), "flushed")
    story.delete([12])
    story.writer.flush()
    story.write_a_tail()
    assert lance_rows(story.table).keys() == {(i,) for i in range(10, 30) if i != 12}
    region = only_region(story.table)
    theirs = shard_writer(story.table, region.region_id)
    assert written_rows(theirs, story.table) == story.model
    with pytest.raises(Fenced):
        story.writer.upsert([row(1, "too late")])
    story.writer.abandon()
    theirs.put(pa.Table.from_pylist([row(70, "theirs")], story.table.schema))
    theirs.close()
    story.model[(70,)] = row(70, "theirs")
    story.table.upsert([row(71, "ours")])
    story.model[(71,)] = row(71, "ours")
    story.table.flush()
    assert our_rows(story.table) == lance_rows(story.table) == story.model
    story.table.close()


def test_a_table_without_a_key_keeps_every_row(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    table = db.create_table("log", pa.schema([("line", pa.string())]))
    with table.writer() as writer:
        writer.upsert([{"line": "a"}, {"line": "a"}])
        writer.flush()
        writer.upsert([{"line": "b"}])
        writer.close(flush=False)
    region = only_region(table).region_id
    theirs = shard_writer(table, region)
    theirs.put(pa.table({"line": ["b", "c"]}))
    assert sorted(table.to_arrow().column("line").to_pylist()) == ["a", "a", "b", "b", "c"]
    theirs.close()
    table.upsert([{"line": "d"}])
    table.flush()
    assert sorted(table.to_arrow().column("line").to_pylist()) == ["a", "a", "b", "b", "c", "d"]


def test_lance_creates_a_region_with_an_id_we_never_saw(tmp_path: Path) -> None:
    """In a bucketed table Lance may open any shard id; we read its rows all the same."""
    db = penstock.connect(tmp_path)
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 4))
    table.upsert([row(i, "ours") for i in range(8)])
    theirs = shard_writer(table, uuid.uuid4())
    theirs.put(pa.Table.from_pylist([row(100, "theirs")], table.schema))
    assert sorted(key for (key,) in our_rows(table)) == [*range(8), 100]
    theirs.close()
    assert table.get(100) == row(100, "theirs")
    assert table.count() == 9
