"""A round of maintenance does what is due, within its budget, and says what it did."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lance
import pytest
from tests.failures.lake import Lake, make_lake
from tests.memwal.versioned_rows import QUERY, SCHEMA, assert_right, at, found_rows, rows

import penstock
from penstock import InvalidInput, Table
from penstock.memwal.maintain import MaintainReport
from penstock.memwal.snapshots import read_snapshot

JOBS = ["merge", "index", "compact", "snapshot", "clean up"]


def busy_table(path: Path) -> tuple[Lake, Table]:
    """Several generations in two regions, indexes, and a base with deleted rows."""
    lake = make_lake(path, schema=SCHEMA, regions=penstock.bucket("id", 2))
    table = lake.process().table
    table.upsert(rows(range(100), 0))
    table.create_index("vector", "ivf_flat", num_partitions=2)
    table.create_index("value", "fts")
    for version in range(1, 4):
        table.flush()
        table.upsert(rows(range(0, 100, version + 1), version))
    return lake, table


def expected_rows() -> Any:
    expected = at(range(100), 0)
    for version in range(1, 4):
        expected |= at(range(0, 100, version + 1), version)
    return expected


def plain(table: Table) -> Any:
    return found_rows(lance.dataset(table.uri).to_table())


def did(report: MaintainReport) -> dict[str, str]:
    return {job.name: job.did for job in report.jobs}


def test_a_round_leaves_an_ordinary_lance_table_and_nothing_to_do(tmp_path: Path) -> None:
    lake, table = busy_table(tmp_path)
    told: list[tuple[str, int, int]] = []
    report = table.maintain(on_progress=lambda *piece: told.append(piece))
    assert [job.name for job in report.jobs] == JOBS
    assert report.finished
    assert report["merge"].did.startswith("8 generations, 100 rows")
    assert "caught up" in report["index"].did
    assert all(done <= total for _, done, total in told)
    assert {name for name, _, _ in told} >= {"merge", "index"}
    assert plain(table) == expected_rows()
    for handle in (table, lake.reader()):
        assert_right(handle, expected_rows(), QUERY)
    again = did(table.maintain())
    assert again["merge"] == "nothing to merge"
    assert again["index"] == "every index is up to date"
    assert again["compact"] == "nothing to compact"
    assert again["snapshot"] == "none was ever asked for"
    assert table.doctor().healthy
    for name in JOBS:
        assert name in str(report)


def test_a_snapshot_that_somebody_asked_for_is_kept_up_to_date(tmp_path: Path) -> None:
    lake, table = busy_table(tmp_path)
    table.snapshot()
    table.maintain()
    table.upsert(rows([7], 9))
    table.maintain(retain_seconds=0)
    stored = table._base.snapshot().details.inline_snapshots
    assert stored is not None
    named = read_snapshot(lake.store, stored, "the snapshot")
    assert {region.region_id: region.current_generation for region in named} == {
        manifest.region_id: manifest.current_generation for manifest in lake.manifests()
    }
    expected = expected_rows() | at([7], 9)
    assert found_rows(lake.reader().to_arrow(consistency="eventual")) == expected


def test_no_piece_is_begun_once_the_budget_is_spent(tmp_path: Path) -> None:
    lake, _ = busy_table(tmp_path)
    process = lake.process()
    process.table.flush(recover=True)
    process.store.hook(op="list_dirs", before=lambda *_: process.clock.advance(5_000.0))
    version = process.table.version
    report = process.table.maintain(budget_seconds=1.0)
    assert not report.finished
    assert report["merge"].left == "8 generations to merge"
    assert report["clean up"].left == "clean-up"
    assert process.table.version == version
    other = lake.process().table
    small = other.maintain(budget_bytes=1)
    assert small["merge"].did.startswith("8 generations")  # one piece is always done
    assert not small.finished
    assert other.maintain().finished
    assert plain(other) == expected_rows()


@pytest.mark.parametrize("wrong", [0, -1, "1", True])
def test_budgets_are_positive_numbers(tmp_path: Path, wrong: Any) -> None:
    table = make_lake(tmp_path).process().table
    for name in ("budget_seconds", "budget_bytes"):
        with pytest.raises(InvalidInput, match=name):
            table.maintain(**{name: wrong})


def test_several_at_once_do_the_work_once_and_without_an_error(tmp_path: Path) -> None:
    db = penstock.connect(tmp_path)
    db.create_table("t", SCHEMA, primary_key="id", regions=penstock.bucket("id", 2))
    writer = db.open_table("t")
    writer.upsert(rows(range(100), 0))
    writer.create_index("value", "fts")
    writer.flush()
    reports: list[MaintainReport] = []
    failures: list[BaseException] = []
    start = threading.Barrier(3)

    def work() -> None:
        try:
            table = db.open_table("t")
            start.wait(30)
            reports.append(table.maintain())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert sum(report["merge"].did.startswith("2 generations") for report in reports) == 1
    assert plain(writer) == at(range(100), 0)
    assert_right(writer, at(range(100), 0), QUERY)


def test_rows_that_a_crashed_writer_left_are_recovered_on_request(tmp_path: Path) -> None:
    lake, table = busy_table(tmp_path)
    table.upsert(rows([3], 8))  # never flushed: the process is gone
    other = lake.process().table
    other.maintain()
    assert plain(other) != expected_rows() | at([3], 8)
    other.maintain(recover=True)
    assert plain(other) == expected_rows() | at([3], 8)
