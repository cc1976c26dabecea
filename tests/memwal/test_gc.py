"""Clean-up: what nobody needs goes, whatever happens meanwhile, and nothing else ever does.

Ages are those of files, told by the file system's clock, so a test makes files old by setting
their times back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lance
import pytest
from tests.failures.lake import Lake, ids_of, make_lake, row
from tests.memwal.cleaning import (
    DAY,
    HOUR,
    age,
    busy,
    caught_up,
    clean,
    clean_all,
    files_of,
    flushed,
    kept,
    reachable,
)

import penstock
from penstock import Table
from penstock.errors import AmbiguousWrite, CommitConflict, VersionNotFound
from penstock.memwal import gc_limits, names
from penstock.memwal.gc import collect
from penstock.memwal.gc_limits import Outdated, check_age
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.merge import commit_merge, fold, plan_merges
from penstock.memwal.table_commit import commit_details, commit_index
from penstock.memwal.table_versions import is_latest_version, list_versions
from penstock.storage.faults import Fault
from penstock.storage.seams import Seams

# --- 22: orphans -------------------------------------------------------------------------------


def test_failure_22_orphans(tmp_path: Path) -> None:
    lake = make_lake(tmp_path, regions=penstock.bucket("id", 2))
    busy(lake)
    before = lake.reader().to_arrow().sort_by("id")
    assert files_of(lake.store) > reachable(lake.store)

    # Young ones may belong to somebody, so nothing happens to them yet.
    assert "may belong to a flush" in kept(clean(lake), "orphans")
    clean(lake, retain_seconds=0)
    assert files_of(lake.store) > reachable(lake.store)
    assert lake.reader().to_arrow().sort_by("id") == before

    age(lake, DAY + HOUR)
    clean(lake, retain_seconds=0)
    clean(lake, retain_seconds=0)  # what the first one took out of manifests
    assert files_of(lake.store) == reachable(lake.store)
    assert lake.reader().to_arrow().sort_by("id") == before
    assert len(list_versions(lake.store)) == 1
    lance.dataset(lake.store.uri).validate()
    again = clean_all(lake)
    assert again.files == 0, str(again)

    # An index that has caught up sets the merged generations free.
    caught_up(lake, lake.reader())
    clean_all(lake)
    assert files_of(lake.store) == reachable(lake.store)
    assert all(len(m.flushed_generations) == 0 for m in lake.manifests())
    assert lake.reader().to_arrow().sort_by("id") == before
    # Everything still works.
    table = lake.process().table
    flushed(table, 1, 100, value="after")
    table.merge()
    assert table.get(100) == row(100, "after")
    assert table.count() == before.num_rows + 1


def test_a_dry_run_says_what_would_happen_and_does_nothing(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    busy(lake)
    for name in ("_mem_wal/notes/todo.txt", "mine.txt", "data/readme.md", "_indices/x/y"):
        lake.store.put(name, b"not ours")
    age(lake, 2 * DAY)
    before = files_of(lake.store)
    dry = clean(lake, retain_seconds=HOUR, dry_run=True)
    assert files_of(lake.store) == before
    assert dry.dry_run
    assert "would be removed" in str(dry)
    real = clean(lake, retain_seconds=HOUR)
    assert dry.removed == real.removed
    assert dry.files == len(before) - len(files_of(lake.store)) > 0
    assert real.unknown == ("_indices/x/", "_mem_wal/notes/", "data/readme.md", "mine.txt")
    assert set(real.unknown) <= {f"{key.rpartition('/')[0]}/" for key in before} | before
    for name in ("_mem_wal/notes/todo.txt", "mine.txt", "data/readme.md", "_indices/x/y"):
        assert lake.store.exists(name)


def test_bad_input(tmp_path: Path) -> None:
    table = make_lake(tmp_path).reader()
    for name in ("retain_seconds", "orphan_seconds", "fence_seconds"):
        for wrong in (-1, True, "1", float("nan"), None):
            with pytest.raises(penstock.InvalidInput, match=name):
                collect(table._base, **{name: wrong})
    with pytest.raises(penstock.InvalidInput, match="at least 43200"):
        table.gc(orphan_seconds=HOUR)
    with pytest.raises(penstock.InvalidInput, match="find the fence"):
        collect(table._base, fence_seconds=1)


# --- 21: lagging indexes, versions that are kept, roots ----------------------------------------


def test_failure_21_an_index_lags(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1, 2)
    table.merge()
    table.create_index("id", "btree", name="by_id")
    clean_all(lake)
    assert lake.generations() == []  # the index was built on all there was
    table = lake.process().table
    for first in (3, 5):
        flushed(table, first, first + 1)
        table.merge()
    report = clean_all(lake)
    assert lake.generations() == [2, 3]
    assert kept(report, "generations") == "index by_id has not caught up"
    region = lake.manifest().region_id

    def progress(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        return replace(current, index_catchup={"by_id": {region: 2}})

    commit_details(lake.store, None, progress, Seams())
    clean_all(lake)
    assert lake.generations() == [3]
    assert ids_of(lake.reader()) == [1, 2, 3, 4, 5, 6]
    caught_up(lake, table)
    clean_all(lake)
    assert lake.generations() == []
    assert files_of(lake.store) == reachable(lake.store)
    assert ids_of(lake.reader()) == [1, 2, 3, 4, 5, 6]


def test_failure_21_an_older_version_needs_the_generation(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1, 2)
    pinned = table.snapshot()
    age(lake, 10 * DAY)
    # However old it is: it has been replaced just now, and somebody may be reading it.
    table.merge()
    flushed(table, 2, 3, value="newer")
    table.merge()
    report = clean(lake, orphan_seconds=10 * DAY)
    assert f"version {pinned} may be read" in kept(report, "generations")
    assert lake.generations() == [1, 2]
    assert lake.reader().count(version=pinned) == 2

    age(lake, 2 * HOUR)
    clean(lake, orphan_seconds=10 * DAY)
    assert lake.generations() == []
    with pytest.raises(VersionNotFound):
        lake.reader().count(version=pinned)
    assert ids_of(lake.reader()) == [1, 2, 3]


def test_failure_21_a_tag_keeps_its_version_and_what_it_names(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1, 2)
    pinned = table.snapshot()
    tags = lance.dataset(lake.store.uri).tags
    tags.create("before", pinned)
    for value in ("second", "third"):
        flushed(table, 2, 3, value=value)
        table.merge()
    table.close()
    age(lake, 30 * DAY)
    report = clean_all(lake)
    assert kept(report, "generations") == f"version {pinned} (tag before) needs it"
    assert lake.generations() == [1]
    assert list_versions(lake.store) == [pinned, lance.dataset(lake.store.uri).version]
    assert files_of(lake.store) == reachable(lake.store)
    old = lake.reader().to_arrow(version=pinned).sort_by("id").to_pylist()
    assert old == [row(1), row(2)]
    assert ids_of(lake.reader()) == [1, 2, 3]

    tags.delete("before")
    clean_all(lake)
    assert lake.generations() == []
    assert len(list_versions(lake.store)) == 1
    assert files_of(lake.store) == reachable(lake.store)
    assert not any(key.startswith(names.GAPS) for key in files_of(lake.store))


def test_a_version_that_a_tag_keeps_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1)
    table.merge()
    idle = lake.reader()
    assert idle.count() == 1  # from now on it holds this version
    kept_version = lance.dataset(lake.store.uri).version
    lance.dataset(lake.store.uri).tags.create("kept", kept_version)
    committing = lake.process()
    table.delete(keys=[1])
    for first in (2, 3, 4):
        flushed(table, first)
        table.merge()
    clean_all(lake)
    assert kept_version + 1 not in list_versions(lake.store)
    assert not is_latest_version(lake.store, kept_version)
    assert ids_of(idle) == [2, 3, 4]

    # Nor does anybody publish a version behind it: it would be lost.
    def stalled(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        return replace(current, writer_config_defaults={"a": "b"})

    def meanwhile(*_: str) -> None:
        lance.dataset(lake.store.uri).tags.create("newer", newest)
        for first in (5, 6):
            flushed(table, first)
            table.merge()
        age(lake, 2 * HOUR)
        clean_all(lake)

    newest = lance.dataset(lake.store.uri).version
    committing.store.hook(op="put_if_absent", key="_versions/*", nth=1, before=meanwhile)
    with pytest.raises(CommitConflict, match="done again"):
        commit_index(committing.store, None, stalled, Seams())
    assert ids_of(idle) == ids_of(lake.reader()) == [2, 3, 4, 5, 6]
    clean_all(lake)
    assert newest + 1 not in list_versions(lake.store)


MEANWHILE: dict[str, Callable[[Lake, Table], Callable[[], None]]] = {}


def meanwhile(work: Callable[[Lake, Table], Callable[[], None]]) -> None:
    MEANWHILE[work.__name__.strip("_")] = work


@meanwhile
def _merge_commits(lake: Lake, table: Table) -> Callable[[], None]:
    flushed(table, 7, 8, value="folded before")
    base = lake.process().table._base
    (plan,), _ = plan_merges(base)
    folded = fold(base, plan)
    return lambda: commit_merge(base, folded) and None


@meanwhile
def _snapshot(lake: Lake, table: Table) -> Callable[[], None]:
    flushed(table, 7, 8, value="in a snapshot")
    process = lake.process().table
    return lambda: process.snapshot() and None


@meanwhile
def _flush_ends(lake: Lake, table: Table) -> Callable[[], None]:
    """A generation is written, and its manifest comes when the sweep has begun."""
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(7, "flushed late"), row(8)])
    wait, go = threading.Event(), threading.Event()

    def stall(*_: str) -> None:
        wait.set()
        assert go.wait(30)

    process.store.hook(op="put_if_absent", key="*/manifest/*.binpb", nth=1, before=stall)
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    assert wait.wait(30)

    def end() -> None:
        go.set()
        flushing.join()
        writer.close()

    return end


@meanwhile
def _everything(lake: Lake, table: Table) -> Callable[[], None]:
    def work() -> None:
        flushed(table, 7, 8, value="all")
        table.merge()
        table.snapshot()
        lance.dataset(lake.store.uri).optimize.compact_files()

    return work


@pytest.mark.parametrize("moment", ["after the listing", "before the first removal"])
@pytest.mark.parametrize("work", MEANWHILE)
def test_failure_21_roots_are_read_after_the_candidates(
    tmp_path: Path, work: str, moment: str
) -> None:
    """The worst case: with no age to tell them apart, what is named meanwhile still stays."""
    lake = make_lake(tmp_path)
    table = lake.process().table
    for value in ("one", "two"):
        flushed(table, 1, 2, 3, value=value)
        table.merge()
    flushed(table, 3, 4, value="unmerged")
    run = MEANWHILE[work](lake, table)
    collector = lake.process()
    if moment == "after the listing":
        rule = collector.store.hook(op="list", key="", nth=1, after=lambda *_: run())
    else:
        # The probe of the clock goes first, so that is the second file to go.
        rule = collector.store.hook(op=("delete", "delete_prefix"), nth=2, before=lambda *_: run())
    collect(collector.table._base, retain_seconds=0, orphan_seconds=0)
    assert rule.fired == 1
    collector.store.clear()
    reader = lake.reader()
    assert set(ids_of(reader)) >= {1, 2, 3, 4, 7, 8}
    lance.dataset(lake.store.uri).validate()
    lance.dataset(lake.store.uri).to_table()
    if work == "snapshot":
        assert reader.count(consistency="eventual") == reader.count()
    lake.reader().merge()
    assert ids_of(lake.reader()) == ids_of(reader)
    clean_all(lake)
    clean_all(lake)
    assert files_of(lake.store) == reachable(lake.store)
    assert ids_of(lake.reader()) == ids_of(reader)


def test_a_tag_made_meanwhile_is_respected(tmp_path: Path) -> None:
    lake = make_lake(tmp_path)
    table = lake.process().table
    flushed(table, 1, 2)
    pinned = table.snapshot()
    table.merge()
    collector = lake.process()
    collector.store.hook(
        op="get",
        key="_versions/*",
        nth=1,
        before=lambda *_: lance.dataset(lake.store.uri).tags.create("just-now", pinned),
    )
    collect(collector.table._base, retain_seconds=0, orphan_seconds=0)
    assert lake.reader().count(version=pinned) == 2
    assert lake.generations() == [1]


# --- jobs that take long -----------------------------------------------------------------------


def test_a_flush_that_slept_is_written_again(tmp_path: Path) -> None:
    """Its generation may have been taken for an orphan, and here it was."""
    lake = make_lake(tmp_path)
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(1), row(2)])

    def sleep(*_: str) -> None:
        process.clock.advance(2 * DAY * 1000)
        age(lake, 2 * DAY)
        report = clean(lake)
        assert any(line.what == "orphans" for line in report.removed)

    process.store.hook(op="sync", key="*_gen_1", nth=1, after=sleep)
    writer.flush()
    assert writer.stats()["flush_failures"] == 1
    writer.close()
    assert ids_of(lake.reader()) == [1, 2]
    with pytest.raises(Outdated, match="do it again"):
        check_age(process.table._base.seams, -gc_limits.JOB_SECONDS * 1e3, "a merge")


def test_a_commit_that_nobody_can_ask_about_keeps_its_files(tmp_path: Path) -> None:
    """It was published, the answer is lost, and so is every answer to whether it was."""
    lake = make_lake(tmp_path)
    flushed(lake.process().table, 1, 2)
    merger = lake.process()

    def deaf(*_: str) -> None:
        merger.store.inject(Fault.FAIL_BEFORE, op="get", key="_versions/*")

    published = merger.store.inject(
        Fault.FAIL_AFTER, op="put_if_absent", key="_versions/*", nth=1, after=deaf
    )
    with pytest.raises(AmbiguousWrite, match="look at the table"):
        merger.table.merge()
    assert published.fired == 1
    assert lance.dataset(lake.store.uri).count_rows() == 2
    assert ids_of(lake.reader()) == [1, 2]
