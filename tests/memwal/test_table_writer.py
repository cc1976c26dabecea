"""The table writer: routing to many regions, claiming back, and changes of the region spec."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.failures.lake import Lake, ids_of, make_lake, row

import penstock
from penstock.errors import Fenced, InvalidInput, PenstockError, RegionSealed
from penstock.memwal import transforms
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity, claim_region
from penstock.memwal.manifest import RegionStatus
from penstock.memwal.region_spec import RegionBy, arrow_type
from penstock.memwal.wal import Wal
from penstock.storage.faults import Fault
from penstock.storage.seams import Seams
from penstock.table import Table

WAIT_SECONDS = 30.0
EVENTS = pa.schema(
    [
        pa.field("tenant", pa.string()),
        pa.field("at", pa.timestamp("us")),
        pa.field("id", pa.int64()),
        pa.field("value", pa.string()),
    ]
)
SPECS: dict[str, RegionBy | Sequence[RegionBy]] = {
    "bucket": penstock.bucket("id", 5),
    "identity": penstock.identity("tenant"),
    "day": penstock.day("at"),
    "truncate": penstock.truncate("id", 10),
    "multi_bucket": penstock.multi_bucket(["tenant", "id"], 4),
    "expression": penstock.expression("col0 % 3", ["id"], "int64"),
    "several": [penstock.identity("tenant"), penstock.bucket("id", 2)],
}


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Run them all at once; what each returned or raised, in order."""
    outcomes: list[Any] = [None] * len(work)

    def target(n: int) -> None:
        try:
            outcomes[n] = work[n]()
        except PenstockError as error:
            outcomes[n] = error

    threads = [threading.Thread(target=target, args=(n,), daemon=True) for n in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def handles(lake: Lake, count: int) -> list[Table]:
    """Handles that share nothing but the disk, with a clock that really pauses."""
    return [Table("t", BaseTable(lake.store, None, Seams())) for _ in range(count)]


# --- routing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_rows_go_to_the_region_of_their_values(tmp_path: Path, kind: str) -> None:
    lake = make_lake(tmp_path, schema=EVENTS, primary_key=None, regions=SPECS[kind])  # type: ignore[arg-type]
    start = dt.datetime(2024, 2, 27)
    rows = [
        {
            "tenant": [None, "", "a", "b\0"][n % 4],
            "at": start + dt.timedelta(hours=n) if n % 7 else None,
            "id": n if n % 11 else None,
            "value": f"{n}",
        }
        for n in range(60)
    ]
    process = lake.process()
    with process.table.writer(flush_on_close=False) as writer:
        writer.upsert(rows[:30])
        writer.upsert(rows[30:])
        assert writer.stats()["rows"] == 60
        (spec,) = writer._snapshot.details.region_specs
        columns = writer.shape.columns_by_id
    # Each region holds exactly the rows with its values, in the order they were written.
    table = pa.Table.from_pylist(rows, schema=EVENTS)
    groups = transforms.group(spec, table, columns)
    expected = {
        tuple((f.field_id, v) for f, v in zip(spec.fields, values, strict=True) if v is not None): [
            rows[n]["value"] for n in (range(60) if indices is None else indices.tolist())
        ]
        for values, indices in groups
    }
    assert len(lake.manifests()) == len(expected) > 1
    kinds = {f.field_id: arrow_type(f.result_type) for f in spec.fields}
    stored = {}
    for manifest in lake.manifests():
        entries = list(Wal(lake.store, manifest.region_id, Seams()).tail(0))
        found = [v for e in entries for b in e.batches for v in b.column("value").to_pylist()]
        values = tuple(
            (field, _decoded(raw, kinds[field])) for field, raw in manifest.region_values
        )
        stored[values] = found
    assert stored == expected
    # A second process meets the same regions, and reads see every row once.
    other = lake.process()
    other.table.upsert(rows)
    assert len(lake.manifests()) == len(expected)
    assert sorted(other.table.to_arrow().column("value").to_pylist()) == sorted(
        [r["value"] for r in rows] * 2
    )


def _decoded(raw: bytes, kind: pa.DataType) -> object:
    if pa.types.is_string(kind):
        return raw.decode()
    return int.from_bytes(raw, "little", signed=True)


def test_two_processes_create_the_same_regions(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 8))
    tables = handles(lake, 3)
    outcomes = in_threads(
        *[
            lambda table=table, n=n: table.upsert([row(n * 100 + i) for i in range(40)])  # type: ignore[misc]
            for n, table in enumerate(tables)
        ]
    )
    assert outcomes == [40, 40, 40]
    assert len(lake.manifests()) == 8
    assert ids_of(lake.reader()) == sorted(n * 100 + i for n in range(3) for i in range(40))


def test_an_upsert_is_refused_as_a_whole_when_one_region_would_refuse(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, primary_key=None, regions=penstock.bucket("id", 4))
    process = lake.process()
    with process.table.writer(max_batch_bytes=2000) as writer:
        rows = [row(n, "small") for n in range(20)]
        rows[7]["value"] = "x" * 3000
        with pytest.raises(InvalidInput, match="max_batch_bytes"):
            writer.upsert(rows)
        assert process.ids() == []
        assert lake.manifests() == []


def test_a_failure_in_one_region_names_how_far_it_went(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 3))
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(n) for n in range(30)])
    victim = writer.region_writers()[0]
    process.store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key=f"*{victim.region_id}/wal/*")
    with pytest.raises(penstock.WriterPoisoned) as caught:
        writer.upsert([row(n, "new") for n in range(30)])
    assert caught.value.__notes__ == ["the rows of 2 of 3 regions were acknowledged"]
    process.store.clear()
    values = lake.reader().to_arrow().column("value").to_pylist()
    assert 0 < values.count("new") < 30
    assert len(values) == 30
    with pytest.raises(penstock.WriterPoisoned):
        writer.close()


def test_small_upserts_of_many_threads_are_joined_and_each_gets_its_own_answer(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    process = lake.process()
    writer = process.table.writer()

    def write(thread: int) -> int:
        return sum(writer.upsert([row(thread * 100 + n)]) for n in range(20))

    def wrong() -> int:
        for _ in range(20):
            batch = pa.record_batch({"id": pa.array([1]), "other": pa.array(["x"])})
            with pytest.raises(InvalidInput, match="other"):
                writer.upsert(batch)
        return -1

    outcomes = in_threads(*[lambda t=t: write(t) for t in range(7)], wrong)  # type: ignore[misc]
    assert outcomes == [20] * 7 + [-1]
    assert process.ids() == sorted(t * 100 + n for t in range(7) for n in range(20))
    writer.close()


# --- many writers ------------------------------------------------------------------------------


@pytest.mark.parametrize("primary_key", ["id", None])
def test_handles_that_fight_over_a_region_lose_and_repeat_nothing(
    tmp_path: Path, primary_key: str | None
) -> None:
    lake = make_lake(tmp_path, primary_key=primary_key, writer_defaults={"max_memtable_rows": 7})
    tables = handles(lake, 3)

    def write(n: int) -> int:
        return sum(tables[n].upsert([row(n * 1000 + i)]) for i in range(15))

    outcomes = in_threads(*[lambda n=n: write(n) for n in range(3)])  # type: ignore[misc]
    assert outcomes == [15, 15, 15]
    assert ids_of(lake.reader()) == sorted(n * 1000 + i for n in range(3) for i in range(15))
    for table in tables:
        table.flush()
        table.close()
    assert ids_of(lake.reader()) == sorted(n * 1000 + i for n in range(3) for i in range(15))


@pytest.mark.parametrize("handle", ["shared", "explicit"])
def test_a_claim_that_is_overtaken_gives_way_and_leaves_nothing_in_the_way(
    tmp_path: Path, handle: str
) -> None:
    lake = make_lake(tmp_path, primary_key=None)
    lake.process().table.upsert([row(1)])
    slow, fast = lake.process(), lake.process()
    winner = fast.table.writer()

    def overtake(op: str, key: str) -> None:
        winner.upsert([row(2)])

    # Between the manifest of the claim and its fence another process claims, fences and writes.
    slow.store.hook(op="put_if_absent", key="*/manifest/*", nth=1, after=overtake)
    if handle == "shared":
        slow.table.upsert([row(3)])  # claims again
        with pytest.raises(Fenced):
            winner.upsert([row(4)])
        assert ids_of(lake.reader()) == [1, 2, 3]
    else:
        with pytest.raises(Fenced):
            slow.table.writer().upsert([row(3)])
        winner.upsert([row(4)])
        assert ids_of(lake.reader()) == [1, 2, 4]


def test_flush_and_close_of_a_handle_whose_region_was_taken(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    old, new = lake.process(), lake.process()
    old.table.upsert([row(1)])
    new.table.upsert([row(2)])
    old.table.flush()
    old.table.upsert([row(3)])
    new.table.close()
    old.table.close()
    old.table.close()
    assert old.ids() == ids_of(lake.reader()) == [1, 2, 3]


# --- region specs over a table's life ------------------------------------------------------------


def spec_ids(lake: Lake) -> dict[int, set[RegionStatus]]:
    found: dict[int, set[RegionStatus]] = {}
    for manifest in lake.manifests():
        found.setdefault(manifest.region_spec_id, set()).add(manifest.status)
    return found


@pytest.mark.parametrize("flushed", [True, False])
def test_the_newest_row_wins_through_every_change_of_the_spec(
    tmp_path: Path, flushed: bool
) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    specs = [penstock.bucket("id", 3), penstock.identity("id"), penstock.unsharded()]
    process.table.upsert([row(n, "first") for n in range(6)])
    for turn, spec in enumerate(specs):
        if flushed:
            process.table.flush()
        assert process.table.set_regions(spec) == turn + 2
        process.table.delete(keys=[turn])
        process.table.upsert([row(5, f"turn {turn}")])
        if turn:
            process.table.upsert([row(turn - 1, "back")])
        for table in (process.table, lake.reader()):
            assert table.get(5) == row(5, f"turn {turn}")
            assert table.get(turn) is None
            assert table.get(4) == row(4, "first")
            expected = {n: "first" for n in range(6) if n > turn}
            expected |= dict.fromkeys(range(turn), "back") | {5: f"turn {turn}"}
            assert {r["id"]: r["value"] for r in table.to_arrow().to_pylist()} == expected
            assert table.count() == len(expected)
    # Every region of an older spec is sealed; nothing can be written to it again.
    states = spec_ids(lake)
    assert states.pop(4) == {RegionStatus.ACTIVE}
    assert set().union(*states.values()) == {RegionStatus.SEALED}


@pytest.mark.parametrize("primary_key", ["id", None])
def test_processes_with_the_old_spec_come_along(tmp_path: Path, primary_key: str | None) -> None:
    lake = make_lake(tmp_path, primary_key=primary_key, regions=penstock.bucket("id", 2))
    old, other, new = lake.process(), lake.process(), lake.process()
    old.table.upsert([row(n) for n in range(10)])
    explicit = other.table.writer()  # has the old spec in mind, and no region yet
    new.table.set_regions(penstock.bucket("id", 3))
    # Until somebody writes by the new spec, the old one is as good.
    old.table.upsert([row(10)])
    new.table.upsert([row(n) for n in range(11, 20)])
    old.table.upsert([row(n) for n in range(20, 30)])
    explicit.upsert([row(n) for n in range(30, 40)])
    assert ids_of(lake.reader()) == list(range(40))
    if primary_key is not None:
        for turn, writer in enumerate((old.table, new.table, other.table, old.table)):
            writer.upsert([row(n, f"{turn}") for n in range(40)])
            assert set(lake.reader().to_arrow().column("value").to_pylist()) == {f"{turn}"}
    states = spec_ids(lake)
    assert states == {1: {RegionStatus.SEALED}, 2: {RegionStatus.ACTIVE}}


def test_a_region_of_the_old_spec_that_appears_late_takes_no_row(tmp_path: Path) -> None:
    """Its maker died between making it and looking at the spec; a third process must look."""
    lake = make_lake(tmp_path)
    late = lake.process()
    writer = late.table.writer()
    with lake.process().table.writer() as probe:
        assert probe._router is not None
        identity = probe._router.identity((0,))
    new = lake.process()
    new.table.set_regions(penstock.bucket("id", 2))
    new.table.upsert([row(1, "new")])
    claim_region(lake.store, RegionIdentity(identity.region_id, 1, identity.values), Seams())
    writer.upsert([row(1, "newest")])
    assert lake.reader().get(1) == row(1, "newest")
    assert lake.manifests()
    assert spec_ids(lake)[1] == {RegionStatus.SEALED}
    writer.close()


def test_rows_that_are_not_durable_survive_their_own_writers_change_of_spec(
    tmp_path: Path,
) -> None:
    lake = make_lake(tmp_path, regions=penstock.identity("id"))
    process = lake.process()
    writer = process.table.writer(durable=False, wal_flush_interval_ms=10**9)
    writer.upsert([row(1)])
    lake.process().table.set_regions(penstock.bucket("id", 2))
    writer.upsert([row(2)])  # a new region of the old spec: here the change is noticed
    assert process.ids() == [1, 2]
    writer.close()
    assert ids_of(lake.reader()) == [1, 2]
    assert spec_ids(lake) == {1: {RegionStatus.SEALED}, 2: {RegionStatus.ACTIVE}}


def test_many_threads_and_processes_notice_a_change_of_spec_at_once(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, primary_key=None, regions=penstock.bucket("id", 2))
    tables = handles(lake, 2)
    for n, table in enumerate(tables):
        table.upsert([row(-n * 2 - k) for k in (1, 2)])
    lake.process().table.set_regions(penstock.bucket("id", 3))
    work = [
        lambda t=table, start=n * 1000 + i * 100: [t.upsert([row(start + k)]) for k in range(5)]  # type: ignore[misc]
        for n, table in enumerate(tables)
        for i in range(3)
    ]
    assert in_threads(*work) == [[1] * 5] * 6
    written = [n * 1000 + i * 100 + k for n in range(2) for i in range(3) for k in range(5)]
    assert ids_of(lake.reader()) == sorted([-4, -3, -2, -1, *written])


def test_a_sealed_region_refuses_a_writer_of_its_own(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    process = lake.process()
    process.table.upsert([row(1)])
    region = lake.manifest().region_id
    process.table.set_regions(penstock.bucket("id", 2))
    process.table.upsert([row(2)])
    with process.table.writer(region=region) as writer, pytest.raises(RegionSealed):
        writer.upsert([row(3)])
    assert ids_of(lake.reader()) == [1, 2]


def test_an_explicit_writer_is_told_when_it_is_fenced(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    old, new = lake.process(), lake.process()
    writer = old.table.writer()
    writer.upsert([row(n) for n in range(8)])
    new.table.upsert([row(n) for n in range(8, 16)])
    with pytest.raises(Fenced):
        writer.upsert([row(n) for n in range(16, 24)])
    assert ids_of(lake.reader()) == list(range(16))
    assert [c for c in old.store.log if c.op == "put_if_absent" and c.outcome == "ObjectExists"]
    with pytest.raises(Fenced):
        writer.close()
