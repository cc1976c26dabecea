"""Changes, applied to an empty copy in the order they come, make the copy equal to the table.

Copies read in batches of different sizes, at different moments, while anything happens to the
table that can: rows are written and deleted through the log, flushed, merged, compacted, cleaned
up; other tools edit the base table; regions are divided anew, columns come and go, and writers are
taken over. A copy that lags behind what was cleaned up is told so, and never has a gap.
"""

from __future__ import annotations

import json
import pickle
import random
import uuid
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.interop.test_we_claim_lance_shards import LanceStory, lance_table

import penstock
from penstock import InvalidInput, Table, VersionNotFound
from penstock.memwal import changes as changing
from penstock.memwal.bulk import load
from penstock.memwal.feed import Feed, read_part
from penstock.memwal.feed_position import Position
from penstock.memwal.feed_regions import RegionLog
from penstock.memwal.manifest import FlushedGeneration, RegionManifest
from penstock.memwal.regions import load_manifests
from penstock.memwal.wal import Wal, encode_entry, schema_message
from penstock.storage.seams import Seams

KEYS = 24
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("value", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
Rows = dict[int, dict[str, Any]]


def table_of(path: Path, **options: Any) -> Table:
    given = {"primary_key": "id", "regions": penstock.bucket("id", 2)} | options
    return penstock.connect(path).create_table("t", SCHEMA, **given)


def row(key: int, value: str) -> dict[str, Any]:
    return {"id": key, "value": value, "vector": [float(key), float(len(value))]}


def rows_of(table: Table) -> Rows:
    return {found["id"]: found for found in table.to_arrow().to_pylist()}


class Copy:
    """A copy of a table that is kept up to date by its changes."""

    def __init__(self, since: object = "earliest", max_rows: int = 1000) -> None:
        self.rows: Rows = {}
        self.position = since
        self.max_rows = max_rows
        self.told = 0

    def follow(self, table: Table) -> None:
        changes = table.changes(self.position, max_rows=self.max_rows)
        names = table.schema.names
        for batch in changes:
            assert 0 < batch.num_rows <= self.max_rows
            self.check_order(batch.rows.to_pylist())
            for change in batch.rows.to_pylist():
                self.apply(change, names)
            self.position = json.loads(json.dumps(batch.position))
            self.told += batch.num_rows
        self.position = changes.position

    def apply(self, change: dict[str, Any], names: list[str]) -> None:
        if change["_change"] == "delete":
            self.rows.pop(change["id"], None)
        else:
            self.rows[change["id"]] = {name: change[name] for name in names}

    def check_order(self, rows: list[dict[str, Any]]) -> None:
        """Sorted by our columns, the changes of a key come as they were told."""
        last: dict[int, tuple[int, int, int]] = {}
        for change in rows:
            at = (change["_version"], change["_generation"], change["_row"])
            assert last.get(change["id"], (0, 0, -1)) < at
            last[change["id"]] = at

    def must_equal(self, table: Table) -> None:
        there = rows_of(table)
        assert self.rows.keys() == there.keys()
        assert self.rows == there


def told(table: Table, begin: Position, end: Position) -> list[dict[str, Any]]:
    """What lies between two positions, as a process would read it that knows nothing else."""
    base = penstock.connect(Path(table.uri).parent).open_table("t")._base
    parts = pickle.loads(pickle.dumps(Feed(base).parts(begin, end)))
    shape = base.snapshot().shape
    return [
        change
        for part in parts
        for batch in read_part(base, part, shape)
        for change in batch.to_pylist()
    ]


class Story:
    """A table to which anything happens."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)
        self.table = table_of(path)
        self.copies = [Copy(max_rows=size) for size in (1, 7, 1000)]
        self.written = 0
        self.at = Feed(self.table._base).start("earliest")
        self.recorded: list[tuple[Position, Position, list[dict[str, Any]]]] = []

    def keys(self) -> list[int]:
        return self.random.sample(range(KEYS), self.random.randint(1, 6))

    def value(self) -> str:
        self.written += 1
        return f"v{self.written}"

    def upsert(self) -> None:
        self.table.upsert([row(key, self.value()) for key in self.keys()])
        self.table.upsert([row(key, self.value()) for key in self.keys()])

    def delete(self) -> None:
        self.table.delete(keys=self.keys())

    def flush(self) -> None:
        self.table.flush(recover=True)

    def merge(self) -> None:
        self.flush()
        self.table.merge()

    def compact(self) -> None:
        self.table.compact(target_rows=self.random.choice([4, 1000]))

    def update_where(self) -> None:
        where = f"id % 3 = {self.random.randint(0, 2)}"
        self.table.update(where=where, values={"value": f"'{self.value()}'"})

    def delete_where(self) -> None:
        self.table.delete(where=f"id % 7 = {self.random.randint(0, 6)}")

    def lance_delete(self) -> None:
        lance.dataset(self.table.uri).delete(f"id in ({', '.join(map(str, self.keys()))})")

    def lance_update(self) -> None:
        dataset = lance.dataset(self.table.uri)
        dataset.update({"value": f"'{self.value()}'"}, where=f"id > {self.random.randint(0, KEYS)}")

    def lance_merge_insert(self) -> None:
        data = pa.Table.from_pylist([row(k, self.value()) for k in self.keys()], self.table.schema)
        builder = lance.dataset(self.table.uri).merge_insert("id")
        builder.when_matched_update_all().when_not_matched_insert_all().execute(data)

    def overwrite(self) -> None:
        rows = [row(key, self.value()) for key in self.keys()]
        load(self.table._base, rows, overwrite=True, flush=self.flush)

    def set_regions(self) -> None:
        self.table.set_regions(penstock.bucket("id", self.random.randint(1, 4)))

    def another_process(self) -> None:
        """The log of a writer that is gone is replayed by the next."""
        self.table = penstock.connect(self.path).open_table("t")

    def snapshot(self) -> None:
        self.table.snapshot()

    def clean_up(self) -> None:
        for copy in self.copies:
            copy.follow(self.table)
        self.record()
        self.replay()
        self.recorded = []
        self.table.gc(retain_seconds=0, orphan_seconds=0)

    def record(self) -> None:
        """Read some changes in small batches, and remember what each was."""
        feed = Feed(self.table._base)
        while (end := feed.plan(self.at, max_rows=5)) != self.at:
            self.recorded.append((self.at, end, told(self.table, self.at, end)))
            self.at = end

    def replay(self) -> None:
        """Read again, the same batches have the same changes, wherever their rows are by now."""
        for begin, end, rows in self.recorded:
            assert told(self.table, begin, end) == rows

    def follow_one(self) -> None:
        self.random.choice(self.copies).follow(self.table)

    def check(self) -> None:
        self.record()
        self.replay()
        for copy in self.copies:
            copy.follow(self.table)
            copy.must_equal(self.table)


STEPS = sorted(name for name in vars(Story) if name[0] != "_" and name not in ("keys", "value"))
OFTEN = ["upsert", "delete", "flush", "merge", "follow_one", "lance_update", "lance_delete"]


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    steps=st.lists(st.sampled_from([*STEPS, *OFTEN, *OFTEN]), min_size=4, max_size=24),
    seed=st.integers(0, 2**16),
)
def test_copies_are_equal_to_the_table_whatever_happens(
    steps: list[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changing, "WRITTEN_ROWS", 3)  # so that versions of the base are made
        story = Story(tmp_path_factory.mktemp("lake"), seed)
        for step in steps:
            getattr(story, step)()
        story.check()


def test_rows_come_in_the_shape_that_the_table_has_today(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    begin = table.changes("latest").position
    table.upsert([row(key, "old") for key in range(6)])
    table.flush()
    table.merge()
    lance.dataset(table.uri).update({"value": "'edited'"}, where="id = 1")
    table.upsert([row(2, "in the log")])
    table.add_columns({"price": pa.float64()})
    table.rename_column("value", "body")
    table.drop_columns("vector")
    table.upsert([{"id": 3, "body": "new", "price": 2.5}])
    table.delete(where="id = 5")
    for size in (1, 1000):
        copy = Copy(begin, size)
        copy.follow(table)
        copy.must_equal(table)
        assert copy.rows[1] == {"id": 1, "body": "edited", "price": None}
        assert copy.rows[3] == {"id": 3, "body": "new", "price": 2.5}


def test_where_changes_may_begin(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    table.upsert([row(key, "merged") for key in range(4)])
    table.flush()
    table.merge()
    merged = table.version
    table.upsert([row(1, "named")])
    table.flush()
    table.snapshot()
    named = table.version
    table.upsert([row(2, "in the log")])

    def told_since(since: object) -> dict[int, str]:
        copy = Copy(since)
        copy.follow(table)
        return {key: found["value"] for key, found in copy.rows.items()}

    assert told_since("earliest") == {0: "merged", 1: "named", 2: "in the log", 3: "merged"}
    assert told_since(merged) == {1: "named", 2: "in the log"}
    assert told_since(named) == {2: "in the log"}
    assert told_since("latest") == {}
    with pytest.raises(VersionNotFound, match="no version 99"):
        table.changes(99)
    for wrong in ("yesterday", {"version": -1, "regions": {}}, {"version": 1}, None, True):
        with pytest.raises(InvalidInput, match="position"):
            table.changes(wrong)
    with pytest.raises(InvalidInput, match="max_rows"):
        table.changes(max_rows=0)
    other = table_of(tmp_path / "other")
    other.upsert([row(1, "other")])
    with pytest.raises(InvalidInput, match="position is one of table"):
        other.changes(table.changes("latest").position)


@pytest.mark.parametrize("merged_first", [False, True])
def test_a_copy_that_lags_behind_what_was_cleaned_up_is_told_so(
    tmp_path: Path, merged_first: bool
) -> None:
    table = table_of(tmp_path)
    table.upsert([row(key, "first") for key in range(4)])
    copy = Copy()
    copy.follow(table)
    if merged_first:
        table.flush()
        table.merge()
        copy.follow(table)
        lance.dataset(table.uri).delete("id = 1")
    table.upsert([row(2, "second")])
    table.flush()
    table.merge()
    table.gc(retain_seconds=0, orphan_seconds=0)
    with pytest.raises(VersionNotFound, match=r"cleaned up.*'earliest'"):
        copy.follow(table)
    again = Copy()
    again.follow(table)
    again.must_equal(table)


def test_without_a_key_every_row_is_told_once_and_a_delete_is_refused(tmp_path: Path) -> None:
    table = table_of(tmp_path, primary_key=None, regions=penstock.unsharded())
    position: Any = "earliest"
    told_values: list[str] = []

    def follow() -> None:
        nonlocal position
        changes = table.changes(position, max_rows=3)
        for batch in changes:
            assert set(batch.rows["_change"].to_pylist()) == {"upsert"}
            told_values.extend(batch.rows["value"].to_pylist())
        position = changes.position

    written = []
    for turn in range(6):
        rows = [row(1, f"{turn}.{number}") for number in range(4)]
        written += [found["value"] for found in rows]
        if turn % 3 == 2:
            lance.write_dataset(pa.Table.from_pylist(rows, table.schema), table.uri, mode="append")
        else:
            table.upsert(rows)
        if turn % 2:
            table.flush()
            table.merge()
            table.compact(target_rows=1000)
        if turn != 3:
            follow()
    assert sorted(told_values) == sorted(written)
    table.delete(where="value = '0.1'")
    with pytest.raises(InvalidInput, match=r"no primary key.*go on from version"):
        follow()
    position = table.version
    table.upsert([row(2, "later")])
    follow()
    assert told_values[len(written) :] == ["later"]


def test_of_rewritten_columns_only_rows_that_differ_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "WRITTEN_ROWS", 0)
    table = table_of(tmp_path)
    table.upsert([row(key, "same") for key in range(20)])
    table.flush()
    table.merge()
    copy = Copy()
    copy.follow(table)
    table.update(where="id < 5", values={"value": "'other'"})
    table.update(where="id = 7", values={"vector": [9.0, 9.0]})
    table.delete(where="id > 17")
    before = copy.told
    copy.follow(table)
    assert copy.told - before == 5 + 1 + 2
    copy.must_equal(table)


def test_a_writer_that_takes_over_puts_two_generations_of_the_log_into_one(tmp_path: Path) -> None:
    """What a reader had counted as rows of the next generation are rows of this one then."""
    table = table_of(tmp_path, regions=penstock.unsharded())
    table.upsert([row(key, "first") for key in range(3)])
    (manifest,) = load_manifests(table._base.store, Seams())
    wal, shape = Wal(table._base.store, manifest.region_id, Seams()), table._base.snapshot().shape
    tip = wal.tip(0)
    rows = shape.wal_rows(pa.RecordBatch.from_pylist([row(9, "second")], shape.schema))
    head = schema_message(shape.wal_schema, manifest.writer_epoch, 2)
    entry = encode_entry(head, [rows.serialize()], bytes(16))
    wal.append(tip + 1, entry, bytes(16), manifest.writer_epoch)
    copy = Copy(max_rows=2)
    copy.follow(table)
    assert copy.told == 4

    table = penstock.connect(tmp_path).open_table("t")
    table.upsert([row(1, "third")])
    copy.follow(table)
    table.flush()
    table.upsert([row(2, "fourth")])
    copy.follow(table)
    table.merge()
    copy.follow(table)
    assert copy.told == 6
    copy.must_equal(table)


def test_a_mark_that_counts_into_the_next_generation_holds_when_that_is_flushed() -> None:
    manifest = RegionManifest(
        uuid.uuid4(),
        current_generation=3,
        flushed_generations=(FlushedGeneration(1, "a"), FlushedGeneration(2, "b")),
    )
    log = RegionLog(manifest, {1: 3, 2: 4}, (), 5, 0)
    assert [log.normal((1, row)) for row in (2, 3, 5, 7, 9)] == [
        (1, 2),
        (2, 0),
        (2, 2),
        (3, 0),
        (3, 2),
    ]
    assert log.between((1, 1), (1, 9)) == 8
    assert log.after((1, 1), 4) == (2, 2)
    for missing in ((1, 13), (4, 0)):
        with pytest.raises(VersionNotFound, match="older than that"):
            log.normal(missing)


def test_rows_that_lance_wrote_are_numbered_alike(tmp_path: Path) -> None:
    story = LanceStory(lance_table(tmp_path, unsharded=True))
    table = story.table
    feed, at = Feed(table._base), Feed(table._base).start("earliest")
    recorded = []
    for _ in range(2):
        story.write("a")
        while (end := feed.plan(at, max_rows=4)) != at:
            recorded.append((at, end, told(table, at, end)))
            at = end
        story.flush()
    story.close()
    assert len(recorded) >= 6
    for begin, end, rows in recorded:
        assert told(table, begin, end) == rows
    copy: dict[tuple[int], str | None] = {}
    for _, _, rows in recorded:
        for change in rows:
            copy.pop((change["id"],), None)
            if change["_change"] == "upsert":
                copy[(change["id"],)] = change["name"]
    assert copy == {key: found["name"] for key, found in story.model.items()}
