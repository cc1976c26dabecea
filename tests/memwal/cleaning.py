"""Tables with a past, and what of them must stay when they are cleaned up."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pytest
from tests.failures.lake import Lake, row

from penstock import PenstockError, Table
from penstock.memwal import names
from penstock.memwal.gc import collect
from penstock.memwal.gc_limits import GcLimits
from penstock.memwal.gc_report import GcReport
from penstock.memwal.merge import fold, plan_merges
from penstock.memwal.wal import Wal
from penstock.storage.faults import Fault
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

HOUR = 3600.0
DAY = 24 * HOUR
ALONE = GcLimits(retain_seconds=0, orphan_seconds=0)


def files_of(store: ObjectStore) -> set[str]:
    return {meta.key for meta in store.list()}


def age(lake: Lake, seconds: float, *, below: str = "") -> None:
    """Let what is there have been written so much earlier."""
    for path in (Path(lake.store.uri) / below).rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def clean(lake: Lake, **limits: Any) -> GcReport:
    return collect(lake.process().table._base, **limits)


def clean_all(lake: Lake) -> GcReport:
    return clean(lake, retain_seconds=0, orphan_seconds=0)


def flushed(table: Table, *ids: int, value: str | None = None) -> None:
    table.upsert([row(one, value) for one in ids])
    table.flush()


def kept(report: GcReport, what: str) -> str:
    return "; ".join(line.why for line in report.kept if line.what == what)


def reachable(store: ObjectStore, options: dict[str, str] | None = None) -> set[str]:
    """Every file that something still leads to, as Lance and the manifests say."""
    lake = Lake(store)
    there = files_of(store)
    found = {"_penstock/table.json"}

    def below(prefix: str) -> set[str]:
        return {key for key in there if key.startswith(f"{prefix}/")}

    for listed in lance.dataset(store.uri, storage_options=options).versions():
        version = listed["version"]
        dataset = lance.dataset(store.uri, version=version, storage_options=options)
        found.add(f"_versions/{2**64 - 1 - version}.manifest")
        for fragment in dataset.get_fragments():
            found |= {f"data/{file.path}" for file in fragment.data_files()}
            if fragment.deletion_file() is not None:
                found.add(fragment.deletion_file())
        # Lance cannot give the transaction of every kind of commit; its name is in the manifest.
        manifest = bytes(store.get(f"_versions/{2**64 - 1 - version}.manifest").data)
        named = re.findall(rb"[0-9]+-[0-9a-f-]{36}\.txn", manifest)
        found |= {f"_transactions/{name.decode()}" for name in named}
        for index in dataset.describe_indices():
            for segment in index.segments:
                found |= below(f"_indices/{segment.uuid}")
    found |= below("_refs") | below("_penstock/gaps") | {"_versions/latest_version_hint.json"}
    for region in lake.manifests():
        home = names.region_dir(region.region_id)
        found |= below(f"{home}/manifest")
        for generation in region.flushed_generations:
            found |= below(f"{home}/{generation.path}")
        for key in below(f"{home}/wal"):
            position = names.from_bitrev(key.rpartition("/")[2].removesuffix(".arrow"))
            assert position is not None
            entry = Wal(store, region.region_id, Seams()).read(position)
            assert entry is not None
            if entry.is_fence or position >= region.replay_after_wal_entry_position:
                found.add(key)
    return found & there


class Crash(BaseException):
    """The process ends here."""


def crash(*_: str) -> None:
    raise Crash


def crashed_flush(lake: Lake, table: Table) -> None:
    """Generations are written, and the manifest that would list them never is."""
    process = lake.process()
    writer = process.table.writer()
    writer.upsert([row(1000, "crashed")])
    process.store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key="*/manifest/*.binpb")
    with suppress(PenstockError):
        writer.flush()
    with suppress(PenstockError):
        writer.close()


def crashed_fold(lake: Lake, table: Table) -> None:
    flushed(table, 1, 2, value="folded")
    process = lake.process().table._base
    (plan, *_), _ = plan_merges(process)
    fold(process, plan)


def crashed_commit(lake: Lake, table: Table) -> None:
    """The commit is prepared, and the process ends before, or after, it is published."""
    for op, key in (("delete", "_versions/d*"), ("put_if_absent", "_versions/*")):
        flushed(table, 3, value=op)
        process = lake.process()
        process.store.hook(op=op, key=key, nth=1, before=crash)
        with pytest.raises(Crash):
            process.table.merge()


def lost_commit(lake: Lake, table: Table) -> None:
    flushed(table, 4, value="late")
    process = lake.process()
    process.store.hook(op="put_if_absent", key="_versions/*", nth=1, before=lambda *_: edit(lake))
    process.table.merge()


def edit(lake: Lake) -> None:
    lance.dataset(lake.store.uri).update({"value": "'edited'"}, where="id = 5")


def caught_up(lake: Lake, table: Table) -> None:
    lance.dataset(lake.store.uri).optimize.optimize_indices()


def busy(lake: Lake) -> Table:
    """A table that has seen much, and of which nothing is running any more."""
    table = lake.process().table
    flushed(table, *range(20))
    table.merge()
    table.create_index("id", "btree")
    for accident in (crashed_flush, crashed_fold, crashed_commit, lost_commit):
        accident(lake, table)
        table = lake.process().table
        flushed(table, *range(5, 12), value=accident.__name__)
        table.snapshot()
    table.delete(keys=[6, 7])
    table.flush()
    table.merge()
    lance.dataset(lake.store.uri).optimize.compact_files()
    table.upsert([row(12, "in the log")])
    table.close()
    crashed_flush(lake, table)
    return table


def manifest_file(lake: Lake, version: int) -> str:
    return names.manifest_key(lake.manifest().region_id, version)
