"""Clean-up next to writers that stall: whatever they wake up to do, no row is lost."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from tests.failures.lake import WAL, Lake, ids_of, make_lake, row
from tests.interop.lance_side import only_region, shard_writer
from tests.memwal.cleaning import (
    DAY,
    HOUR,
    age,
    clean,
    clean_all,
    files_of,
    flushed,
    manifest_file,
    reachable,
)

from penstock import PenstockError, Table
from penstock.errors import Fenced
from penstock.memwal import names

# --- 2: writers that stall ---------------------------------------------------------------------


def take_over(lake: Lake, *, claims: int = 1, later: float = DAY) -> None:
    """While somebody sleeps, others claim, write, flush and merge, time passes, files go."""
    for number in range(claims):
        table = lake.process().table
        flushed(table, 100 + number)
        table.merge()
        table.close()
    if later:
        age(lake, later)
    clean(lake, retain_seconds=0)
    clean(lake, retain_seconds=0)


@pytest.mark.parametrize("later", [0, DAY, 8 * DAY], ids=["at once", "a day", "a week"])
def test_failure_02_a_stalled_writer_and_the_collector(tmp_path: Path, later: float) -> None:
    lake = make_lake(tmp_path)
    stalled = lake.process()
    writer = stalled.table.writer()
    writer.upsert([row(1)])

    def stall(*_: str) -> None:
        take_over(lake, claims=3, later=later)
        stalled.clock.advance(later * 1000)

    stalled.store.hook(op="put_if_absent", key=WAL, nth=1, before=stall)
    fence = lake.manifest().wal_entry_position_last_seen + 2
    with pytest.raises(Fenced):
        writer.upsert([row(2)])
    if later == DAY:
        entry = lake.entry(fence)
        assert entry is not None
        assert entry.is_fence
        assert lake.entry(1) is None
    # Only what was acknowledged is there, and all of it.
    assert ids_of(lake.reader()) == [1, 100, 101, 102]
    flushed(lake.process().table, 3)
    assert ids_of(lake.reader()) == [1, 3, 100, 101, 102]


def test_failure_02_a_claim_that_stalls_before_its_fence(tmp_path: Path) -> None:
    """It looks for the tip where the log was; all of it is covered now, and must still be there."""
    lake = make_lake(tmp_path)
    first = lake.process().table
    first.upsert([row(1), row(2)])
    stalled = lake.process()
    rule = stalled.store.hook(
        op="put_if_absent",
        key="*/manifest/*",
        nth=1,
        after=lambda *_: take_over(lake, claims=2, later=0),
    )
    with suppress(PenstockError):
        stalled.table.writer().upsert([row(3)])
        pytest.fail("the write was acknowledged by a claim that two others had taken over")
    assert rule.fired == 1
    assert ids_of(lake.reader()) == [1, 2, 100, 101]
    flushed(stalled.table, 3)
    assert ids_of(lake.reader()) == [1, 2, 3, 100, 101]


@pytest.mark.parametrize("exists", [True, False], ids=["claims", "creates"])
def test_failure_02_a_manifest_lands_where_others_were_removed(
    tmp_path: Path, exists: bool
) -> None:
    lake = make_lake(tmp_path)
    if exists:
        flushed(lake.process().table, 1)
    stalled = lake.process()
    rule = stalled.store.hook(
        op="put_if_absent",
        key="*/manifest/*",
        nth=1,
        before=lambda *_: take_over(lake, claims=9, later=30 * DAY),
    )
    stalled.table.upsert([row(2)])
    assert rule.fired == 1
    expected = [1] * exists + [2, *range(100, 109)]
    assert stalled.ids() == ids_of(lake.reader()) == expected
    # No early version is left that somebody could take for the newest.
    newest = lake.manifest().version
    present = [v for v in range(1, newest + 1) if lake.store.exists(manifest_file(lake, v))]
    assert present == list(range(present[0], newest + 1))
    assert present[0] > (3 if exists else 1)


def lance_rows(table: Table, *ids: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids), pa.array(["lance"] * len(ids))], schema=table.schema)


def test_failure_02_lances_writer_stalls(tmp_path: Path) -> None:
    """It knows no fence window: the fence alone tells it, for a week."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1)
    table.close()
    stalled = shard_writer(table, only_region(table).region_id)
    stalled.put(lance_rows(table, 2))
    take_over(lake, claims=3, later=6 * DAY)
    with pytest.raises(OSError, match="fenced"):
        stalled.put(lance_rows(table, 3))
    with suppress(OSError):
        stalled.close()
    assert ids_of(lake.reader()) == [1, 2, 100, 101, 102]

    # And when it claims a region again it goes on where the log ended, not from its start.
    take_over(lake, claims=1, later=30 * DAY)
    again = shard_writer(table, only_region(table).region_id)
    fence = lake.entry(lake.manifest().replay_after_wal_entry_position + 1)
    assert fence is not None, "the fence is not where the former owner would write"
    assert fence.is_fence
    again.put(lance_rows(table, 4))
    again.close()
    assert ids_of(lake.reader()) == [1, 2, 4, 100, 101, 102]


def test_a_region_that_lance_owns_is_cleaned_under_it(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1)
    table.close()
    writer = shard_writer(table, only_region(table).region_id)
    lake.process().table.merge()
    clean_all(lake)
    assert lake.generations() == []
    writer.put(lance_rows(table, 2, 3))
    writer.close()
    assert lake.generations() == [2]
    lake.process().table.merge()
    clean_all(lake)
    assert files_of(lake.store) == reachable(lake.store)
    assert ids_of(lake.reader()) == [1, 2, 3]


def test_old_manifests_go_and_the_hint_leads_to_the_newest(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    for number in range(24):
        flushed(table, number)
    table.close()
    newest = lake.manifest()
    clean(lake)
    assert lake.store.exists(manifest_file(lake, 1))  # younger than an hour
    age(lake, 2 * HOUR)
    hint = names.manifest_hint_key(newest.region_id)
    lake.store.put(hint, b'{"version": 2}')  # a late write of somebody slow
    clean(lake)
    there = [v for v in range(1, newest.version + 1) if lake.store.exists(manifest_file(lake, v))]
    assert there == list(range(newest.version - 15, newest.version + 1))
    assert lake.manifest() == newest
    assert json.loads(bytes(lake.store.get(hint).data))["version"] == newest.version
    writer = shard_writer(table, newest.region_id)  # Lance starts from the hint, too
    writer.put(lance_rows(table, 100))
    writer.close()
    assert ids_of(lake.reader()) == [*range(24), 100]
