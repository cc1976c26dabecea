"""The specification's Appendices 1 and 2, step by step, with its numbers.

Appendix 4 is `test_appendix_4_index_catchup` of the index builder.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pytest
from tests.failures.lake import Lake, Process, ids_of, make_lake, row

from penstock import Table
from penstock.errors import Fenced
from penstock.memwal import names
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.memwal.table_commit import commit_details
from penstock.memwal.wal import encode_entry, schema_message
from penstock.storage.faults import WRITES
from penstock.storage.seams import Seams
from penstock.table import Writer

# --- Appendix 1: writer fencing ------------------------------------------------------------------


def fencing_lake(path: Path) -> Lake:
    """Initial state: manifest version 1, writer_epoch 5, replay_after 10, last seen 12.

    Entries 11 and 12 were written by epoch 5 and are in no generation yet. Entries up to 10 became
    generation 1, which is merged; of them nothing is left.
    """
    lake = make_lake(path)
    first = lake.process().table.writer()
    first.upsert([row(11)])
    first.upsert([row(12)])
    entries = [lake.entry(position) for position in (1, 2)]
    region_id = lake.manifest().region_id
    first.abandon()

    lake.store.delete_prefix(names.region_dir(region_id))
    manifest = RegionManifest(
        region_id=region_id,
        version=1,
        writer_epoch=5,
        replay_after_wal_entry_position=10,
        wal_entry_position_last_seen=12,
        current_generation=2,
        region_spec_id=1,
    )
    lake.store.put(names.manifest_key(region_id, 1), manifest.encode())
    for position, entry in zip((11, 12), entries, strict=True):
        assert entry is not None
        head = schema_message(entry.batches[0].schema, epoch=5, generation=2)
        bodies = [batch.serialize() for batch in entry.batches]
        parts = encode_entry(head, bodies, uuid.uuid4().bytes)
        lake.store.put(names.wal_key(region_id, position), b"".join(map(bytes, parts)))

    def merged(details: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert details is not None
        return details.with_merged({region_id: 1})

    commit_details(lake.store, None, merged, Seams())
    assert ids_of(lake.reader()) == [11, 12]
    return lake


def claim(process: Process) -> Writer:
    writer = process.table.writer()
    writer.claim_all()
    return writer


def state(lake: Lake) -> tuple[int, int]:
    """Epoch and version of the manifest, the appendix's last column."""
    return lake.manifest().writer_epoch, lake.manifest().version


def epochs(lake: Lake, positions: range) -> list[int]:
    entries = [lake.entry(position) for position in positions]
    return [entry.writer_epoch for entry in entries if entry is not None]


def test_appendix_1_writer_fencing(tmp_path: Path) -> None:
    lake = fencing_lake(tmp_path)
    writer_a, writer_b = lake.process(), lake.process()

    # 1. A loads the manifest, sees epoch=5.                                   epoch=5, version=1
    assert state(lake) == (5, 1)
    # 2. A increments to epoch=6, writes manifest v2. And, as the appendix does not, a fence: it
    #    takes position 13, so A's entries are 14, 15 and 16 where the appendix has 13, 14, 15.
    a = claim(writer_a)
    assert state(lake) == (6, 2)
    fence = lake.entry(13)
    assert fence is not None
    assert (fence.is_fence, fence.writer_epoch) == (True, 6)
    # 3. A starts writing WAL entries.
    for position in (14, 15, 16):
        a.upsert([row(position)])
    assert epochs(lake, range(14, 18)) == [6, 6, 6]
    # 4. B loads manifest v2, sees epoch=6.                                    epoch=6, version=2
    assert state(lake) == (6, 2)
    # 5. B increments to epoch=7, writes manifest v3, and its fence at 17.
    b = claim(writer_b)
    assert state(lake) == (7, 3)
    # 6. B starts writing two WAL entries: 18 and 19 for 16 and 17.
    for position in (18, 19):
        b.upsert([row(position)])
    assert epochs(lake, range(14, 21)) == [6, 6, 6, 7, 7, 7]
    # 7. A tries to flush its MemTable, loads the manifest,
    # 8. sees epoch=7, but its local epoch is 6.
    # 9. A is fenced! It aborts all operations.
    with pytest.raises(Fenced, match=r"epoch 6.*epoch 7.*open a new writer"):
        a.flush()
    for refused in (20, 21):
        with pytest.raises(Fenced):
            a.upsert([row(refused)])
    assert state(lake) == (7, 3)
    # 10. B continues writing normally.                                        epoch=7, version=3
    b.upsert([row(20)])
    assert state(lake) == (7, 3)

    # What happens to A's entries? B has replayed them: readers, its MemTable and the generation
    # that it flushes have 11 and 12 of epoch 5, 14 to 16 of epoch 6, 18 to 20 of epoch 7.
    everything = [11, 12, 14, 15, 16, 18, 19, 20]
    assert writer_a.ids() == writer_b.ids() == ids_of(lake.reader()) == everything
    b.flush()
    generation = lake.generation(2)
    assert sorted(generation.to_table()["id"].to_pylist()) == everything
    assert lake.manifest().replay_after_wal_entry_position == 20
    # They are cleaned up only when they are in a generation that is merged.
    writer_b.table.merge()
    writer_b.table.gc(retain_seconds=0, orphan_seconds=0)
    assert ids_of(lake.reader()) == everything


def test_appendix_1_crash_recovery_by_writer_b(tmp_path: Path) -> None:
    lake = fencing_lake(tmp_path)
    a = claim(lake.process())
    for position in (14, 15, 16):
        a.upsert([row(position)])
    b = claim(lake.process())
    for position in (18, 19):
        b.upsert([row(position)])
    b.abandon()
    # Entries are read one after the other from 11 on, until one is not there: 20. All of them have
    # an epoch that is not above the next one, 8, and are replayed.
    again = lake.process()
    c = claim(again)
    assert state(lake) == (8, 4)
    assert epochs(lake, range(11, 21)) == [5, 5, 6, 6, 6, 6, 7, 7, 7, 8]
    assert again.ids() == ids_of(lake.reader()) == [11, 12, 14, 15, 16, 18, 19]
    c.flush()
    assert sorted(lake.generation(2).to_table()["id"].to_pylist()) == again.ids()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_appendix_1_at_whatever_step_of_b_writer_a_writes(tmp_path: Path, moment: str) -> None:
    """The hole that the appendix has: what A writes between steps 5 and 9, B must have or refuse.

    A tries to write at every step of B's claim. What is acknowledged is there, and in what B
    flushes; from B's fence on nothing is acknowledged, and what was refused is not there.
    """
    nth = acknowledged = refused = 0
    fired = True
    while fired:
        nth += 1
        lake = fencing_lake(tmp_path)
        a = claim(lake.process())
        a.upsert([row(14)])
        told: list[int] = []

        def write(*_: str, a: Writer = a, told: list[int] = told) -> None:
            with suppress(Fenced):
                a.upsert([row(100)])
                told.append(100)

        process = lake.process()
        moments: dict[str, Any] = {moment: write}
        step = process.store.hook(op=WRITES, nth=nth, **moments)
        b = claim(process)
        fired = bool(step.fired)
        if fired:
            acknowledged += len(told)
            refused += not told
        b.upsert([row(200)])
        with pytest.raises(Fenced):
            a.upsert([row(300)])
        expected = [11, 12, 14, *told, 200]
        assert process.ids() == ids_of(lake.reader()) == expected
        b.flush()
        assert sorted(lake.generation(2).to_table()["id"].to_pylist()) == expected
    # The manifest, its hint, the fence: until the fence is there A may write, and then no more.
    assert (acknowledged, refused) == ((3, 0) if moment == "before" else (2, 1))


# --- Appendix 2: concurrent mergers --------------------------------------------------------------


def merging_lake(path: Path) -> tuple[Lake, Table]:
    """Initial state: merged_generations {region: 5}, current_generation 8, flushed 6 and 7."""
    lake = make_lake(path)
    table = lake.process().table

    def generation(number: int) -> None:
        # 0 is in all of them, each has a row of its own, and deletes that of the one before.
        table.upsert([row(0, f"generation {number}"), row(number), row(10 + number)])
        table.delete(keys=[10 + number - 1])
        table.flush()

    for number in range(1, 6):
        generation(number)
    table.merge()
    table.gc(retain_seconds=0, orphan_seconds=0)
    for number in (6, 7):
        generation(number)
    assert merged(lake) == 5
    assert lake.manifest().current_generation == 8
    listed = [names.generation_of(g.path) for g in lake.manifest().flushed_generations]
    assert listed == lake.generations() == [6, 7]
    return lake, table


def rows_behind(generation: int) -> dict[int, str]:
    """What a table has of which generations up to that one are merged."""
    own = {number: f"row {number}" for number in range(1, generation + 1)}
    last = 10 + generation
    return {0: f"generation {generation}", **own, last: f"row {last}"}


def merged(lake: Lake) -> int:
    """The appendix's last column."""
    details = lake.reader()._base.snapshot().details
    return details.merged(lake.manifest().region_id)


def plain(lake: Lake) -> dict[int, str]:
    rows = lance.dataset(lake.store.uri).to_table().to_pylist()
    found = {one["id"]: one["value"] for one in rows}
    assert len(found) == len(rows)
    return found


def test_appendix_2_racing_on_the_same_generation(tmp_path: Path) -> None:
    lake, writer = merging_lake(tmp_path)
    merger_a, merger_b = lake.process(), lake.process()
    before = {meta.key for meta in lake.store.list("data")}

    # 1. A reads the index: merged_gen=5.                                           merged_gen=5
    # 2. A reads the region manifest.
    (of_a,), _ = plan_merges(merger_a.table._base, max_rows=1)
    # 3. A starts merging gen 6.
    assert [g.generation for _, g in of_a.generations] == [6]
    folded_a = fold(merger_a.table._base, of_a)
    assert merged(lake) == 5

    def commit_of_a(*_: str) -> None:
        # 7. A commits (merged_gen=6), in the moment in which B is about to.        merged_gen=6
        assert commit_merge(merger_a.table._base, folded_a).generations == 1
        assert merged(lake) == 6
        assert plain(lake) == rows_behind(6)

    # 4. B reads the index: merged_gen=5.
    # 5. B reads the region manifest.
    # 6. B starts merging gen 6.
    # 8. B tries to commit.
    # 9. Conflict: it reads the new index,
    # 10. sees merged_gen=6 >= 6, aborts,
    # 11. reloads, continues to gen 7.
    race = merger_b.store.hook(op="put_if_absent", key="_versions/*", nth=1, before=commit_of_a)
    report = merger_b.table.merge(max_rows=1)
    assert race.fired == 1
    assert (report.generations, report.rows) == (1, 3)
    assert merged(lake) == 7
    assert plain(lake) == rows_behind(7)
    read = {one["id"]: one["value"] for one in writer.to_arrow().to_pylist()}
    assert read == rows_behind(7)
    # Gen 6 is in the table once, by A; what B had written of it is gone.
    new = {meta.key for meta in lake.store.list("data")} - before
    assert len(new) == 2
    assert {f"data/{file.path}" for part in folded_a.fragments for file in part.files} < new


def test_appendix_2_crash_after_table_commit(tmp_path: Path) -> None:
    class Crash(BaseException):
        """The merger ends here."""

    def crash(*_: str) -> None:
        raise Crash

    lake, writer = merging_lake(tmp_path)
    merger_a, merger_b = lake.process(), lake.process()
    # 1. A reads the index: merged_gen=5.                                           merged_gen=5
    assert merged(lake) == 5
    # 2. A merges gen 6, commits.                                                   merged_gen=6
    # 3. CRASH                                                                      merged_gen=6
    merger_a.store.hook(op="put_if_absent", key="_versions/*", nth=1, after=crash)
    with pytest.raises(Crash):
        merger_a.table.merge(max_rows=1)
    assert merged(lake) == 6
    assert plain(lake) == rows_behind(6)
    # 4. B reads the index: merged_gen=6.
    # 5. B reads the region manifest, which still lists gen 6.
    assert lake.generations() == [6, 7]
    # 6. B skips gen 6 (already merged).
    (of_b,), _ = plan_merges(merger_b.table._base, max_rows=1)
    assert [g.generation for _, g in of_b.generations] == [7]
    # 7. B merges gen 7, commits.                                                   merged_gen=7
    assert merger_b.table.merge(max_rows=1).generations == 1
    assert merged(lake) == 7
    assert plain(lake) == rows_behind(7)
    assert {one["id"]: one["value"] for one in writer.to_arrow().to_pylist()} == rows_behind(7)


def test_appendix_2_progress_never_goes_back(tmp_path: Path) -> None:
    """Key point 3: a merger that slept through gen 7 changes nothing when it wakes."""
    lake, _ = merging_lake(tmp_path)
    late, other = lake.process().table, lake.process().table
    (plan,), _ = plan_merges(late._base, max_rows=1)
    folded = fold(late._base, plan)
    assert other.merge().generations == 2
    version = lance.dataset(lake.store.uri).version
    assert commit_merge(late._base, folded).generations == 0
    assert merged(lake) == 7
    assert lance.dataset(lake.store.uri).version == version
    assert plain(lake) == rows_behind(7)
