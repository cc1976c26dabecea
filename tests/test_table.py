"""The table as people use it: against a dict through any history, and in a few stories."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import penstock
from penstock import Table
from penstock.errors import Fenced, InvalidInput, PenstockError, WriterClosed
from penstock.storage.clock import SimulatedClock
from penstock.storage.seams import Seams

WAIT_SECONDS = 30.0
SCHEMA = pa.schema([("tenant", pa.string()), ("id", pa.int64()), ("value", pa.int64())])
Row = tuple[str, int, int]


@pytest.fixture
def db(tmp_path: Path) -> penstock.Database:
    return penstock.connect(tmp_path / "lake", seams=Seams(clock=SimulatedClock()))


# --- any history -------------------------------------------------------------------------------

KEYS: dict[str, list[str]] = {"single": ["id"], "composite": ["tenant", "id"], "none": []}
REGIONS = {
    "single": [penstock.unsharded(), penstock.bucket("id", 3), penstock.identity("id")],
    "composite": [penstock.unsharded(), penstock.identity("tenant"), penstock.truncate("id", 2)],
    "none": [penstock.unsharded(), penstock.bucket("value", 2), penstock.identity("tenant")],
}
tenants = st.sampled_from(["", "a", "b\0"])
rows = st.lists(st.tuples(tenants, st.integers(0, 5), st.integers(0, 99)), min_size=1, max_size=6)


class Histories(RuleBasedStateMachine):
    """Two handles of one table, writers of their own, crashes; and the dict it all should be."""

    lake: Path

    def __init__(self) -> None:
        super().__init__()
        self.seams = Seams(clock=SimulatedClock())
        self.db = penstock.connect(self.lake, seams=self.seams)
        self.name = f"t{uuid.uuid4().hex}"
        self.kind = "single"
        self.handles: list[Table] = []
        self.writer: penstock.Writer | None = None
        self.newest: dict[Any, Row] = {}
        self.all: Counter[Row] = Counter()

    @initialize(kind=st.sampled_from(sorted(KEYS)), limit=st.sampled_from([2, 5, 1000]))
    def create(self, kind: str, limit: int) -> None:
        self.kind = kind
        self.db.create_table(
            self.name,
            SCHEMA,
            primary_key=KEYS[kind] or None,
            regions=REGIONS[kind][0],
            writer_defaults={"max_memtable_rows": limit},
        )
        self.handles = [self.db.open_table(self.name) for _ in range(2)]

    def key(self, row: Row) -> Any:
        return row[1] if self.kind == "single" else row[:2]

    def applied(self, written: list[Row]) -> None:
        self.all.update(written)
        self.newest.update((self.key(row), row) for row in written)

    @rule(which=st.integers(0, 1), written=rows, shape=st.sampled_from(["dicts", "table"]))
    def upsert(self, which: int, written: list[Row], shape: str) -> None:
        data: Any = [dict(zip(SCHEMA.names, row, strict=True)) for row in written]
        if shape == "table":
            data = pa.Table.from_pylist(data, schema=SCHEMA)
        assert self.handles[which].upsert(data) == len(written)
        self.applied(written)

    @precondition(lambda self: self.kind != "none")
    @rule(which=st.integers(0, 1), doomed=rows)
    def delete(self, which: int, doomed: list[Row]) -> None:
        keys = [self.key(row) for row in doomed]
        self.handles[which].delete(keys=keys)
        for key in keys:
            self.newest.pop(key, None)

    @rule(written=rows, durable=st.booleans(), end=st.sampled_from(["open", "flush", "crash"]))
    def write_on_ones_own(self, written: list[Row], durable: bool, end: str) -> None:
        if self.writer is None:
            self.writer = self.handles[0].writer(durable=durable)
        try:
            self.writer.upsert([dict(zip(SCHEMA.names, row, strict=True)) for row in written])
            if not self.writer.config.durable:
                self.writer.flush()
        except Fenced:
            # A handle took a region. Parts for other regions may be there: start from what is.
            self.forget_writer()
            self.take_over()
            return
        self.applied(written)
        if end == "flush":
            try:
                self.writer.flush()
            except Fenced:
                self.forget_writer()
        elif end == "crash":
            self.forget_writer()

    def forget_writer(self) -> None:
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    def take_over(self) -> None:
        found = [tuple(row.values()) for row in self.handles[1].to_arrow().to_pylist()]
        self.all = Counter(found)  # type: ignore[arg-type]
        self.newest = {self.key(row): row for row in found}  # type: ignore[arg-type, misc]

    @rule(which=st.integers(0, 1), recover=st.booleans())
    def flush(self, which: int, recover: bool) -> None:
        self.forget_writer()
        self.handles[which].flush(recover=recover)

    @rule(which=st.integers(0, 1), crash=st.booleans())
    def reopen(self, which: int, crash: bool) -> None:
        handle = self.handles[which]
        if which == 0:
            self.forget_writer()
        if crash and handle._shared is not None:
            handle._shared.abandon()
        else:
            handle.close()
        self.handles[which] = self.db.open_table(self.name)

    @rule(which=st.integers(0, 1), choice=st.integers(0, 2))
    def divide_anew(self, which: int, choice: int) -> None:
        self.forget_writer()
        self.handles[which].set_regions(REGIONS[self.kind][choice])

    @invariant()
    def reads_agree(self) -> None:
        for handle in self.handles:
            found = [tuple(row.values()) for row in handle.to_arrow().to_pylist()]
            if self.kind == "none":
                assert Counter(found) == self.all
            else:
                assert sorted(found) == sorted(self.newest.values())
            assert handle.count() == len(found)
        if self.kind == "none" or not self.handles:
            return
        asked = [*list(self.newest)[:4], ("a", 77) if self.kind == "composite" else 77]
        many = self.handles[1].get_many(asked).to_pylist()
        assert sorted(tuple(row.values()) for row in many) == sorted(
            self.newest[key] for key in asked if key in self.newest
        )
        one = self.handles[0].get(asked[0])
        expected = self.newest.get(asked[0])
        assert (None if one is None else tuple(one.values())) == expected

    def teardown(self) -> None:
        self.forget_writer()
        for handle in self.handles:
            handle.close()


def test_any_history_is_the_dict_it_should_be(tmp_path: Path) -> None:
    machine = type("Histories", (Histories,), {"lake": tmp_path / "lake"})
    test_case = machine.TestCase
    test_case.settings = settings(
        max_examples=20,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    test_case().runTest()


# --- stories -----------------------------------------------------------------------------------


def events(*ids: int, value: int = 0) -> list[dict[str, Any]]:
    return [{"tenant": "a", "id": n, "value": value} for n in ids]


def ids(table: Table) -> list[int]:
    found: list[int] = sorted(table.to_arrow().column("id").to_pylist())
    return found


def test_any_form_of_rows_and_keys(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA, primary_key=["tenant", "id"])
    arrow = pa.Table.from_pylist(events(1, 2), schema=SCHEMA)
    forms: list[Any] = [
        events(1, 2),
        arrow,
        arrow.to_batches()[0],
        arrow.to_reader(),
        arrow.to_pandas(),
        arrow.select(["value", "id", "tenant"]),
    ]
    for form in forms:
        assert table.upsert(form) == 2
        assert ids(table) == [1, 2]
        assert table.delete(keys=iter([("a", 1), {"tenant": "a", "id": 2}])) == 2
        assert table.count() == 0
    assert table.upsert([]) == 0
    table.upsert(events(1, 2, 3))
    assert table.delete(keys=pa.table({"tenant": ["a"], "id": [2]})) == 1
    assert ids(table) == [1, 3]
    assert table.get(("a", 3)) == events(3)[0]
    assert table.get(("b", 3)) is None
    assert table.get_many([("a", 1), ("a", 1), ("a", 2)]).num_rows == 1


def test_flush_still_brings_home_what_an_earlier_writer_of_the_handle_left(
    db: penstock.Database,
) -> None:
    table = db.create_table("t", SCHEMA, primary_key="id")
    table.upsert(events(1, 2))
    table.create_index("value", "btree")  # the shared writer is closed, its rows are in the WAL
    (region,) = table.status().regions
    assert region.wal_lag_entries > 0
    table.flush()
    (region,) = table.status().regions
    assert (region.wal_lag_entries, region.unmerged_rows) == (0, 2)
    table.flush()
    assert ids(table) == [1, 2]


def test_recovery_leaves_the_handles_own_writers_alone(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    dead = db.open_table("t").writer()
    dead.upsert(events(*range(20)))
    dead.abandon()
    (bucket_0, bucket_1) = (r.region_id for r in table.status().regions)
    with table.writer(region=bucket_0) as mine:
        mine.upsert([row for row in events(*range(20), value=1) if _in(table, row, bucket_0)])
        table.flush(recover=True)
        mine.upsert([row for row in events(*range(20), value=2) if _in(table, row, bucket_0)])
    lag = {r.region_id: r.wal_lag_entries for r in table.status().regions}
    assert lag[bucket_1] == 0
    assert table.count() == 20


def _in(table: Table, row: dict[str, Any], region: uuid.UUID) -> bool:
    with table.writer() as writer:
        batch = writer.shape.wal_rows(pa.RecordBatch.from_pylist([row], schema=table.schema))
        ((identity, _),) = writer._route(writer._router, batch)
        return bool(identity.region_id == region)


def test_upserts_go_on_while_another_thread_closes_the_shared_writer(
    db: penstock.Database,
) -> None:
    table = db.create_table("t", SCHEMA)
    stop = threading.Event()
    written: list[list[int]] = [[], []]
    errors: list[BaseException] = []

    def write(thread: int) -> None:
        n = thread * 100_000
        try:
            while not stop.is_set():
                batch = pa.Table.from_pylist(events(n), schema=SCHEMA)
                assert table.upsert(batch.to_reader()) == 1
                written[thread].append(n)
                n += 1
        except (PenstockError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        before = sum(map(len, written))
        for _ in range(10_000):
            if sum(map(len, written)) > before + 2 or errors:
                break
            threading.Event().wait(0.001)
        table.close()
    stop.set()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert errors == []
    assert ids(table) == sorted(written[0] + written[1])


def test_reads_while_writers_come_and_go(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA, primary_key="id")
    table.upsert(events(*range(5)))
    stop = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                count = table.count()
                if count < 5:
                    errors.append(AssertionError(f"{count} rows"))
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for n in range(12):
        with table.writer() as writer:
            writer.upsert(events(5 + n))
    stop.set()
    reader.join(WAIT_SECONDS)
    assert errors == []
    assert ids(table) == list(range(17))


def test_a_table_without_a_key_says_so(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA)
    table.upsert(events(1, 1))
    assert table.primary_key == ()
    assert table.count() == 2
    for call in (
        lambda: table.get(1),
        lambda: table.get_many([1]),
        lambda: table.delete(keys=[1]),
    ):
        with pytest.raises(InvalidInput, match="no primary key"):
            call()
    assert table.count() == 2


def test_every_way_to_say_it_wrong_changes_nothing(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA, primary_key="id")
    table.upsert(events(1))
    wrong: list[Any] = [
        [{"id": "x"}],
        [{"id": None}],
        [{"value": 1}],
        [{"id": 1, "other": 2}],
        [{"id": 2**70}],
        [7],
        "rows",
        pa.table({"id": [1.5]}),
        pa.table({"id": pa.array([None], pa.int64())}),
    ]
    for data in wrong:
        with pytest.raises(InvalidInput):
            table.upsert(data)
    for keys in ("x", 7, [None], ["x"], [(1, 2)], pa.table({"value": [1]})):
        with pytest.raises(InvalidInput):
            table.delete(keys=keys)
    with pytest.raises(InvalidInput, match="not a region id"):
        table.writer(region="7")
    with pytest.raises(InvalidInput, match="unknown writer option"):
        table.writer(speed=11)
    assert table.to_arrow().to_pylist() == events(1)
    (region,) = table.status().regions
    assert region.wal_position == 1


def test_status_counts_what_lies_where(db: penstock.Database) -> None:
    table = db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    assert table.status().regions == ()
    table.upsert(events(*range(8)))
    table.flush()
    table.upsert(events(*range(8)))
    status = table.status()
    assert sum(r.unmerged_rows for r in status.regions) == 8
    assert [r.wal_lag_entries for r in status.regions] == [1, 1]
    assert {r.status for r in status.regions} == {"active"}
    assert status.base_rows == 0
    assert str(status.regions[0].region_id) in str(status)
    assert status.to_dict()["regions"][0]["writer_epoch"] == 1
    table.close()
    with table.writer() as writer:
        writer.close()
        with pytest.raises(WriterClosed):
            writer.upsert(events(1))
