"""Searches while the table changes, and wherever it is stored.

A vector, a text and a hybrid search are reads like any other: they answer as of one moment that is
not before they began, or say why they cannot. Every row found says which version of its key it is.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.failures.lake import WAIT_SECONDS, Lake, Process, make_lake
from tests.failures.test_read_path import (
    generation_uri,
    hook_once,
    merge,
    remove_merged,
)
from tests.memwal.test_consistency import clean_up, merge_all
from tests.memwal.versioned_rows import (
    QUERY,
    SCHEMA,
    Rows,
    assert_right,
    at,
    found_rows,
    rows,
    text,
    vector,
    version_of,
)
from tests.s3_server import S3Server

import penstock
from penstock.errors import Corruption
from penstock.memwal import sources, text_memory, vector_blocks
from penstock.storage.open import open_store
from penstock.table import Table

EVERYTHING = 10_000


# --- three searches for everything there is ------------------------------------------------------


def by_vector(table: Table, **asked: Any) -> Rows:
    return found_rows(table.search(QUERY, **asked).limit(EVERYTHING).to_arrow())


def by_text(table: Table, **asked: Any) -> Rows:
    return found_rows(table.search("river", **asked).limit(EVERYTHING).to_arrow())


def by_both(table: Table, **asked: Any) -> Rows:
    both = table.search(vector=QUERY, text="river", **asked)
    return found_rows(both.limit(EVERYTHING).to_arrow())


Search = Callable[..., Rows]
SEARCHES: list[Search] = [by_vector, by_text, by_both]
each_search = pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search.__name__)
either_search = pytest.mark.parametrize("search", SEARCHES[:2], ids=lambda search: search.__name__)


def by_words(table: Table, versions: Iterable[int]) -> Rows:
    """The rows that have the word of a version, and no others."""
    found: Rows = {}
    for version in versions:
        some = found_rows(table.search(f"v{version}").limit(EVERYTHING).to_arrow())
        assert {version_of(value) for value in some.values()} <= {version}
        found |= some
    return found


def create_indexes(table: Table) -> None:
    table.create_index("vector", "ivf_flat", num_partitions=2)
    table.create_index("value", "fts")


# --- wherever it is stored, whoever asks ---------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "index"), [("local", "ivf_flat"), ("local", "ivf_pq"), ("s3", "ivf_pq")]
)
def test_every_handle_finds_the_same_wherever_rows_are(
    request: pytest.FixtureRequest, tmp_path: Path, stored: str, index: str
) -> None:
    uri, options = str(tmp_path), None
    if stored == "s3":
        server: S3Server = request.getfixturevalue("s3")
        uri, options = server.uri("searches"), server.storage_options
    halves = penstock.expression("col0 % 2", ["id"], "int64")
    table = penstock.connect(uri, options).create_table(
        "t", SCHEMA, primary_key="id", regions=halves
    )

    def in_base(keys: range) -> Rows:
        base = lance.dataset(table.uri, storage_options=options)
        data = pa.Table.from_pylist(rows(keys, 0), base.schema)
        lance.write_dataset(data, table.uri, mode="append", storage_options=options)
        return at(keys, 0)

    expected = in_base(range(300))
    more: dict[str, Any] = {"num_sub_vectors": 4} if index == "ivf_pq" else {}
    table.create_index("vector", index, num_partitions=4, **more)
    table.create_index("value", "fts")
    expected |= in_base(range(300, 330))

    def change(handle: Table, keys: range, gone: range, version: int) -> None:
        nonlocal expected
        handle.upsert(rows(keys, version))
        handle.delete(keys=list(gone))
        expected |= at(keys, version)
        expected = {key: value for key, value in expected.items() if key not in gone}

    change(table, range(250, 350), range(5, 60, 5), 1)
    table.flush()
    change(table, range(0, 340, 4), range(100, 160, 10), 2)
    table.flush()
    other = penstock.connect(uri, options).open_table("t")
    # Each has the rows of one region in a MemTable, and those of the other in the WAL.
    change(table, range(0, 370, 10), range(40, 100, 20), 3)
    change(other, range(1, 371, 10), range(65, 205, 20), 3)
    assert len(other._region_writers()) == 1
    for query in (QUERY, -QUERY):
        for handle in (table, other, penstock.connect(uri, options).open_table("t")):
            assert_right(handle, expected, query)

    # All of it sinks into the base, and whoever remembers the layers finds the same.
    table.flush()
    other.flush()
    merge_all(table._base.store, table)
    clean_up(table._base.store, table)
    for handle in (table, other):
        assert_right(handle, expected, QUERY)


# --- many threads --------------------------------------------------------------------------------

KEYS = range(40)
KEPT = range(0, 40, 2)
"""Never deleted, so that so many rows exist at any moment."""
STEPS = 30


@dataclass
class Ledger:
    """What the writer was told is durable, and what it has asked for."""

    acknowledged: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Of each key the newest version, and whether it is alive; each change is one version."""
    asked: dict[int, int] = field(default_factory=dict)

    def write(self, keys: Sequence[int], work: Callable[[int], object], *, alive: bool) -> None:
        version = max(self.asked.values(), default=0) + 1
        self.asked.update(dict.fromkeys(keys, version))
        work(version)
        self.acknowledged.update(dict.fromkeys(keys, (version, alive)))

    def check(self, before: dict[int, tuple[int, bool]], found: Rows, *, complete: bool) -> None:
        asked = dict(self.asked)
        for key, value in found.items():
            version, alive = before.get(key, (0, False))
            least = version if alive else version + 1
            assert least <= version_of(value) <= asked[key], f"{key}: {value}, {before.get(key)}"
        if complete:
            settled = {key for key, (version, _) in before.items() if asked[key] == version}
            assert settled & set(found) == {key for key in settled if before[key][1]}


class Searcher(threading.Thread):
    """Searches on and on, and holds every answer against what was acknowledged before it."""

    def __init__(self, search: Search, table: Table, ledger: Ledger) -> None:
        super().__init__(daemon=True)
        self.search = search
        self.table = table
        self.ledger = ledger
        self.stopped = threading.Event()
        self.searches = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                before = dict(self.ledger.acknowledged)
                self.ledger.check(before, self.search(self.table), complete=True)
                before = dict(self.ledger.acknowledged)
                few = self.few()
                assert len(few) == 5
                self.ledger.check(before, few, complete=False)
                self.searches += 1
        except BaseException as error:
            self.failure = error

    def few(self) -> Rows:
        table = self.table
        if self.search is by_vector:
            return found_rows(table.search(QUERY).limit(5).to_arrow())
        if self.search is by_text:
            return found_rows(table.search("river").limit(5).to_arrow())
        return found_rows(table.search(vector=QUERY, text="river").limit(5).to_arrow())


@pytest.mark.parametrize("whose", ["writer", "reader"])
def test_threads_search_a_handle_while_the_table_changes(tmp_path: Path, whose: str) -> None:
    draw = random.Random(11)
    lake = make_lake(tmp_path, schema=SCHEMA, regions=penstock.bucket("id", 2))
    table = lake.process().table
    ledger = Ledger()

    def upsert(keys: Sequence[int]) -> None:
        ledger.write(keys, lambda version: table.upsert(rows(keys, version)), alive=True)

    def delete(keys: Sequence[int]) -> None:
        ledger.write(keys, lambda version: table.delete(keys=keys), alive=False)

    upsert(KEYS)
    table.flush()
    merge(lake)
    create_indexes(table)
    searched = table if whose == "writer" else lake.reader()
    searchers = [Searcher(search, searched, ledger) for search in SEARCHES]
    for searcher in searchers:
        searcher.start()
    try:
        for step in range(STEPS):
            upsert(draw.sample(KEYS, draw.randrange(1, 8)))
            if step % 2:
                delete(draw.sample(sorted(set(KEYS) - set(KEPT)), 3))
            if step % 5 == 0:
                table.flush()
            if step % 10 == 4:
                table.snapshot()
            if step % 10 == 8:
                merge(lake)
            if step % 20 == 18:
                remove_merged(lake)
            if any(searcher.failure for searcher in searchers):
                break
    finally:
        for searcher in searchers:
            searcher.stopped.set()
        for searcher in searchers:
            searcher.join(WAIT_SECONDS)
    for searcher in searchers:
        assert not searcher.is_alive()
        if searcher.failure is not None:
            raise searcher.failure
        assert searcher.searches
        ledger.check(ledger.acknowledged, searcher.search(searched), complete=True)


# --- generations that go away --------------------------------------------------------------------

LAYERED = at(range(3, 8), 0) | at(range(8, 14), 1) | at(range(14, 18), 2) | at(range(18, 22), 3)


def layered(tmp_path: Path) -> tuple[Lake, Process]:
    """A base with indexes, two generations, a log; each hides some of what is under it."""
    lake = make_lake(tmp_path, schema=SCHEMA)
    process = lake.process()
    table = process.table
    table.upsert(rows(range(12), 0))
    table.flush()
    merge(lake)
    create_indexes(table)
    for version, keys in ((1, range(8, 16)), (2, range(14, 20)), (3, range(18, 22))):
        table.upsert(rows(keys, version))
        table.delete(keys=[version - 1])
        if version < 3:
            table.flush()
    return lake, process


def copied(path: Path, to: Path) -> Path:
    """A table's files once more; as nothing writes into a file that exists, links will do."""
    return shutil.copytree(path, to, copy_function=os.link)


@pytest.fixture(scope="module")
def before_and_after(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of such a table, and those of the same when its generations are in the base."""
    directory = tmp_path_factory.mktemp("layered")
    lake, process = layered(directory)
    process.table.close()
    before = Path(lake.store.uri)
    after = copied(before, directory / "after.lance")
    merged = Lake(open_store(after))
    merge(merged)
    remove_merged(merged)
    return before, after


def become(path: Path, after: Path) -> None:
    """What another process leaves behind: everything it added is there, what it removed is not."""

    def replaced(source: str, to: str) -> None:
        if not os.path.exists(to) or not os.path.samefile(source, to):
            Path(to).unlink(missing_ok=True)
            os.link(source, to)

    shutil.copytree(after, path, copy_function=replaced, dirs_exist_ok=True)
    for found in [*path.rglob("*_gen_*")]:
        if found.is_dir() and not (after / found.relative_to(path)).exists():
            shutil.rmtree(found)


def searched_otherwise(table: Table, search: Search) -> None:
    (by_text if search is by_vector else by_vector)(table)


KNOWN: dict[str, Callable[[Table, Search], object]] = {
    "nothing": lambda table, search: None,
    "keys": lambda table, search: table.count(),
    "another search": searched_otherwise,
    "the search": lambda table, search: search(table),
}
"""What a reader remembers."""


@pytest.fixture(params=["kept", "not kept"])
def keeping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations are kept in memory, or are too large for that and read through Lance."""
    if request.param == "not kept":
        monkeypatch.setattr(vector_blocks, "VECTOR_CACHE_BYTES", 0)
        monkeypatch.setattr(text_memory, "TEXT_CACHE_BYTES", 0)
        monkeypatch.setattr(sources, "_KEPT_ROWS", 0)


@pytest.mark.usefixtures("keeping")
def test_many_threads_search_a_new_handle_at_once(before_and_after: tuple[Path, Path]) -> None:
    # Everything is opened and read for the first time by several of them together.
    for _ in range(5):
        reader = Lake(open_store(before_and_after[0])).reader()
        together = threading.Barrier(8)

        def ask(number: int, reader: Table = reader, together: Any = together) -> Rows:
            together.wait(WAIT_SECONDS)
            found = SEARCHES[number % 3](reader)
            assert by_words(reader, range(4)) == LAYERED
            return found

        with ThreadPoolExecutor(8) as pool:
            assert all(found == LAYERED for found in pool.map(ask, range(8)))


@either_search
@pytest.mark.parametrize("known", ["nothing", "keys"])
@pytest.mark.usefixtures("keeping")
def test_a_generation_is_merged_and_deleted_under_a_search(
    tmp_path: Path, before_and_after: tuple[Path, Path], search: Search, known: str
) -> None:
    before, after = before_and_after
    nth = first = 0
    while True:
        nth += 1
        path = copied(before, tmp_path / f"copy{nth}.lance")
        reader = Lake(open_store(path)).process()
        KNOWN[known](reader.table, search)
        rule = hook_once(reader.store, nth, lambda path=path: become(path, after))  # type: ignore[misc]
        # It happens under the first search, or under the second, of a reader with memories.
        assert search(reader.table) == LAYERED
        first = first or (nth if not rule.fired else 0)
        assert search(reader.table) == LAYERED
        if not rule.fired:
            break
    assert 3 < first < nth - 3


@either_search
@pytest.mark.parametrize("lost", ["all", "data", "_pk_index", "_indices"])
@pytest.mark.usefixtures("keeping")
def test_a_generation_that_is_lost_is_an_error_and_no_part_of_an_answer(
    tmp_path: Path, before_and_after: tuple[Path, Path], search: Search, lost: str
) -> None:
    for number in (1, 2) if lost == "all" else (1,):
        path = copied(before_and_after[0], tmp_path / f"copy{number}.lance")
        lake = Lake(open_store(path))
        readers = [lake.reader() for _ in KNOWN]
        for prepare, reader in zip(KNOWN.values(), readers, strict=True):
            prepare(reader, search)
        region = lake.manifest()
        gone = Path(generation_uri(lake, region, region.flushed_generations[number]))
        shutil.rmtree(gone if lost == "all" else gone / lost)
        if lost != "_indices":
            # Without its indexes a generation is whole, but slower.
            with pytest.raises(Corruption, match="not merged"):
                search(readers[0])
        for reader in readers:
            # One that had it in memory may still answer in full; a part of it is no answer.
            with suppress(Corruption):
                assert search(reader) == LAYERED


# --- a handle that remembers everything ----------------------------------------------------------


@either_search
def test_a_warm_handle_sees_every_change_by_somebody_else(tmp_path: Path, search: Search) -> None:
    lake = make_lake(tmp_path, schema=SCHEMA, regions=penstock.bucket("id", 2))
    writer, reader = lake.process().table, lake.reader()
    expected: Rows = {}
    versions: set[int] = set()

    def expect(keys: Iterable[int], version: int) -> None:
        expected.update(at(keys, version))
        versions.add(version)

    def write(keys: Iterable[int], version: int, table: Table = writer) -> None:
        table.upsert(rows(keys, version))
        expect(keys, version)

    def delete(keys: Sequence[int]) -> None:
        writer.delete(keys=keys)
        for key in keys:
            del expected[key]

    def base() -> lance.LanceDataset:
        return lance.dataset(lake.store.uri)

    def in_base(keys: Sequence[int], version: int, columns: Sequence[str] = SCHEMA.names) -> None:
        """Lance writes rows, or some of their columns, as anybody may who has the table."""
        edited = pa.Table.from_pylist(rows(keys, version), base().schema).select(list(columns))
        upsert = base().merge_insert("id").when_matched_update_all()
        if len(columns) == len(SCHEMA):
            upsert = upsert.when_not_matched_insert_all()
        upsert.execute(edited)
        expect(keys, version)

    def update_base() -> None:
        base().update({"value": f"'{text(2, 60)}'", "vector": f"{vector(2, 60)}"}, "id = 2")
        expect([2], 60)

    def edit_columns_in_base() -> None:
        # With an index on the key Lance rewrites columns in place: the rows stay where they are,
        # and an index of such a column stays the same but covers fewer fragments.
        base().create_scalar_index("id", "BTREE", replace=False)
        for column in ("value", "vector"):
            in_base([11, 12], 61, ["id", column])

    def delete_from_base() -> None:
        base().delete("id = 3")
        del expected[3]

    def third() -> None:
        write([5, 24], 40, lake.process().table)

    write(range(20), 0)
    writer.flush()
    merge(lake)
    create_indexes(writer)
    changes: list[Callable[[], Any]] = [
        lambda: write([0, 1, 20], 10),
        lambda: write([1, 2, 21, 22], 11),
        writer.flush,
        lambda: write([0, 2, 23], 20),
        lambda: delete([0, 4, 22]),
        third,
        writer.flush,
        writer.snapshot,
        lambda: lake.process().table.flush(recover=True),
        lambda: merge(lake),
        lambda: in_base([1, 30], 50),
        update_base,
        lambda: remove_merged(lake),
        delete_from_base,
        edit_columns_in_base,
        lambda: in_base([6, 7], 51),
        lambda: base().optimize.optimize_indices(),
        lambda: write([6, 8], 52),
        lambda: base().optimize.compact_files(),
        lambda: writer.set_regions(penstock.bucket("id", 3)),
        lambda: write([0, 9, 25], 53),
        lambda: create_again(writer),
        lambda: write([10], 54),
    ]
    for number, change in enumerate(changes):
        assert search(reader) == expected
        change()
        # Twice: the second answer comes from whatever the first one left in memory.
        for handle in (reader, reader, writer):
            assert search(handle) == expected, f"change {number}"
            if search is by_text:
                assert by_words(handle, versions) == expected, f"change {number}"
    assert found_rows(reader.to_arrow()) == expected


def create_again(table: Table) -> None:
    base = lance.dataset(table.uri)
    base.create_scalar_index("value", "INVERTED", name="value_idx", replace=True)
    base.create_index("vector", "IVF_FLAT", name="vector_idx", num_partitions=1, replace=True)


# --- less than everything, and what was ----------------------------------------------------------


@each_search
def test_eventual_searches_see_the_snapshot_and_versions_never_change(
    tmp_path: Path, search: Search
) -> None:
    lake = make_lake(tmp_path, schema=SCHEMA, regions=penstock.bucket("id", 2))
    table, reader = lake.process().table, lake.reader()
    table.upsert(rows(range(20), 0))
    table.flush()
    merge(lake)
    create_indexes(table)
    now, last = at(range(20), 0), at(range(20), 0)
    versions: dict[int, Rows] = {}

    def look() -> None:
        for handle in (table, reader):
            assert search(handle) == now
            assert search(handle, consistency="eventual") == last
            for version, then in versions.items():
                assert search(handle, version=version) == then

    for version in range(1, 4):
        keys = range(4 * version, 4 * version + 18, 3)
        table.upsert(rows(keys, version))
        table.delete(keys=[version])
        now = {key: value for key, value in (now | at(keys, version)).items() if key != version}
        look()
        table.flush()
        look()
        taken = table.snapshot()
        last = versions[taken] = now
        look()
        if version == 2:
            merge(lake)
            look()
