"""Local disk: what is acknowledged survives, what is unfinished is never seen."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import (
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
    WriterClosed,
)
from penstock.storage import local
from penstock.storage.directories import Directories
from penstock.storage.disk import fsync_path
from penstock.storage.local import LocalStore

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["nameless", "named"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    """On a file system with O_TMPFILE, and as on one without."""
    opened = LocalStore(tmp_path / "lake")
    opened._disk._nameless = request.param == "nameless"
    return opened


def files_below(path: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(directory, name), path)
        for directory, _, names in os.walk(path)
        for name in names
    )


class Steps:
    """Which durable steps were made, in order: real calls, written down as they happen."""

    def __init__(self, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self._root = root
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._spy(name, getattr(os, name)))
        for name in ("link", "rename"):
            monkeypatch.setattr(os, name, self._spy(name, getattr(os, name)))

    def _spy(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            self.seen.append((name, self._place(args[-1])))
            real(*args, **kwargs)

        return call

    def _place(self, target: object) -> str:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        path = str(target)
        return os.path.relpath(path, self._root) if path.startswith("/") else path


def test_an_object_is_synced_before_it_is_named_and_its_name_before_it_is_acknowledged(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(store.uri, monkeypatch)
    store.put_if_absent("docs/wal/1", b"row")
    names = [name for name, _ in steps.seen]
    data, named = names.index("fdatasync"), names.index("link")
    assert data < named
    assert steps.seen[named:] == [("link", "1"), ("fsync", "docs/wal")]
    made = [place for name, place in steps.seen[:named] if name == "fsync"]
    assert {".", "docs"} <= set(made)

    steps.seen.clear()
    store.put_if_absent("docs/wal/2", b"row")
    assert [name for name, _ in steps.seen] == ["fdatasync", "link", "fsync"]

    etag = store.put("docs/hint", b"1")
    steps.seen.clear()
    store.put_if_match("docs/hint", b"2", etag)
    assert [name for name, _ in steps.seen] == ["fdatasync", "rename", "fsync"]
    assert steps.seen[1:] == [("rename", "docs/hint"), ("fsync", "docs")]

    steps.seen.clear()
    with store.open_writer("docs/hint") as writer:
        for part in (b"3", bytes(1_000_000), b"4"):
            writer.write(part)
        assert not steps.seen
        writer.commit()
    assert [name for name, _ in steps.seen] == ["fdatasync", "rename", "fsync"]
    assert steps.seen[1:] == [("rename", "docs/hint"), ("fsync", "docs")]


def test_sync_covers_every_file_and_directory_bottom_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    deep = tmp_path / "docs/_mem_wal/r/gen_1"
    (deep / "data").mkdir(parents=True)
    (deep / "data/0.lance").write_bytes(b"x")
    (deep / "bloom").write_bytes(b"y")
    steps = Steps(store.uri, monkeypatch)
    store.child("docs").sync("_mem_wal/r/gen_1")
    gen = "docs/_mem_wal/r/gen_1"
    places = [place for _, place in steps.seen]
    assert places[:4] == [f"{gen}/data/0.lance", f"{gen}/data", f"{gen}/bloom", gen]
    assert places[4:] == ["docs/_mem_wal/r", "docs/_mem_wal", "docs", "."]
    with pytest.raises(ObjectNotFound, match="gen_2"):
        store.sync("gen_2")


def test_sync_passes_over_what_others_remove_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    for name in ("a", "b"):
        store.put(f"_indices/{name}/file", b"1")
    synced: list[str] = []

    def sync(path: str) -> None:
        fsync_path(path)
        if not synced:
            shutil.rmtree(Path(path).parent)
        synced.append(os.path.relpath(path, tmp_path))

    monkeypatch.setattr(local, "fsync_path", sync)
    store.sync("_indices")
    assert {"_indices", "."} <= set(synced)
    assert len(synced) == 5


def test_nothing_but_objects_is_left_or_listed(store: LocalStore) -> None:
    store.put_if_absent("docs/a", b"1")
    etag = store.put("docs/b", b"1")
    store.put_if_match("docs/b", b"2", etag)
    with pytest.raises(ObjectExists):
        store.put_if_absent("docs/a", b"2")
    with pytest.raises(PreconditionFailed):
        store.put_if_match("docs/b", b"3", etag)
    with pytest.raises(StorageError, match="docs"):
        store.put("docs", b"a directory is in the way")
    with pytest.raises(StorageError, match="docs/a/b"):
        store.put_if_absent("docs/a/b", b"a file is in the way")

    with store.open_writer("docs") as writer:
        writer.write(b"a directory is in the way")
        with pytest.raises(StorageError, match="commit of 'docs'"):
            writer.commit()
        with pytest.raises(WriterClosed):
            writer.commit()
    forgotten = store.open_writer("docs/c")
    forgotten.write(bytes(1_000_000))
    del forgotten

    assert files_below(store.uri) == ["docs/a", "docs/b"]
    Path(store.uri, "_penstock/tmp/left-by-a-crash").write_bytes(b"")
    assert [meta.key for meta in store.list()] == ["docs/a", "docs/b"]
    assert store.list_dirs() == ["docs"]
    assert store.child("_penstock").list_dirs() == []


def test_what_crashes_left_is_swept_and_what_others_are_writing_is_not(tmp_path: Path) -> None:
    temporary = tmp_path / "_penstock/tmp"
    temporary.mkdir(parents=True)
    (temporary / "old").write_bytes(b"")
    (temporary / "new").write_bytes(b"")
    two_hours_ago = (temporary / "new").stat().st_mtime - 7200
    os.utime(temporary / "old", (two_hours_ago, two_hours_ago))
    LocalStore(tmp_path).put("a", b"1")
    assert files_below(str(tmp_path)) == ["_penstock/tmp/new", "a"]


def test_lance_never_sees_a_directory_that_is_not_a_region(tmp_path: Path) -> None:
    region = LocalStore(tmp_path / "docs/_mem_wal/region")
    region.put("manifest/version_hint.json", b"{}")
    LocalStore(tmp_path / "docs/_mem_wal").put("region/x", b"")
    assert os.listdir(tmp_path / "docs/_mem_wal") == ["region"]
    assert sorted(os.listdir(tmp_path / "docs")) == ["_mem_wal", "_penstock"]


def test_a_table_dropped_and_made_anew_is_written_where_it_is_now(store: LocalStore) -> None:
    for round_ in range(3):
        store.put_if_absent("docs/wal/1", b"%d" % round_)
        store.put("docs/wal/hint", b"%d" % round_)
        assert files_below(f"{store.uri}/docs") == ["wal/1", "wal/hint"]
        LocalStore(store.uri).delete_prefix("docs")
    store.put_if_absent("docs/wal/1", b"moved")
    os.rename(f"{store.uri}/docs", f"{store.uri}/old")
    store.put_if_absent("docs/wal/1", b"new")
    assert bytes(store.get("docs/wal/1").data) == b"new"
    assert bytes(store.get("old/wal/1").data) == b"moved"


def test_writers_survive_a_table_being_dropped_again_and_again(store: LocalStore) -> None:
    stop = threading.Event()

    def drop() -> None:
        while not stop.wait(0.004):
            LocalStore(store.uri).delete_prefix("docs")

    dropper = threading.Thread(target=drop)
    dropper.start()
    written = 0
    try:
        for n in range(100):
            try:
                store.put_if_absent(f"docs/wal/{n}", b"x")
                store.put("docs/hint", b"x")
                written += 1
            except StorageError:
                continue
    finally:
        stop.set()
        dropper.join()
    assert written > 10
    store.put_if_absent("docs/wal/after", b"x")
    assert files_below(f"{store.uri}/_penstock") == []


def test_equal_sizes_within_one_clock_tick_have_different_etags(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    etags = [store.put("a", content) for content in (b"one", b"two", b"one", b"two")]
    assert etags[:2] == etags[2:]
    assert etags[0] != etags[1]
    with pytest.raises(PreconditionFailed):
        store.put_if_match("a", b"new", etags[0])


def test_open_directories_are_bounded_and_never_closed_under_a_user(tmp_path: Path) -> None:
    directories = Directories(str(tmp_path), limit=4)
    before = len(os.listdir("/proc/self/fd"))
    held = directories.open(f"{tmp_path}/held")
    for n in range(50):
        directories.open(f"{tmp_path}/{n}/deep")
    assert len(os.listdir("/proc/self/fd")) <= before + 5
    assert os.path.samestat(os.fstat(held.fd), os.stat(tmp_path / "held"))
    del held, directories
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_large_object_of_many_parts_is_written_whole(store: LocalStore) -> None:
    parts = [bytes([n % 251]) * (n % 7) for n in range(5000)]
    store.put_if_absent("many", parts)
    assert bytes(store.get("many").data) == b"".join(parts)


# --- other processes -----------------------------------------------------------------------


def create_all(path: str, me: int) -> list[int]:
    store = LocalStore(path)
    won = []
    for position in range(40):
        try:
            store.put_if_absent(f"wal/{position}", b"%d" % me)
            won.append(position)
        except ObjectExists:
            continue
    return won


def increment_often(root: str, below: str) -> None:
    store = LocalStore(root).child(below)
    for _ in range(25):
        while True:
            found = store.get("counter")
            try:
                store.put_if_match("counter", b"%d" % (int(bytes(found.data)) + 1), found.etag)
                break
            except PreconditionFailed:
                continue


def test_of_many_processes_exactly_one_creates_and_no_increment_is_lost(tmp_path: Path) -> None:
    lake = LocalStore(tmp_path)
    lake.put("docs/counter", b"0")
    with ProcessPoolExecutor(3, mp_context=SPAWN) as pool:
        racers = [pool.submit(create_all, f"{tmp_path}/docs", me) for me in range(3)]
        won = [racer.result() for racer in racers]
        # The same object seen from different roots: they must still exclude each other.
        roots = [(str(tmp_path), "docs"), (f"{tmp_path}/docs", ""), (str(tmp_path), "docs")]
        for done in [pool.submit(increment_often, root, below) for root, below in roots]:
            done.result()
    assert sorted(position for positions in won for position in positions) == list(range(40))
    for me, positions in enumerate(won):
        for position in positions:
            assert bytes(lake.get(f"docs/wal/{position}").data) == b"%d" % me
    assert bytes(lake.get("docs/counter").data) == b"75"


FORKED = """
import os, sys
from penstock.storage.local import LocalStore
store = LocalStore(sys.argv[1])
store.put_if_absent("docs/parent", b"1")
with store._disk._directories._lock:
    child = os.fork()
    if child == 0:
        store.put_if_absent("docs/child", b"1")
        os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_shares_nothing_that_could_hang_or_mix_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path)]  # Lance warns of forks: an error here
    subprocess.run(command, check=True, timeout=30)
    assert [meta.key for meta in LocalStore(tmp_path).list()] == ["docs/child", "docs/parent"]


KILLED = """
import sys
from penstock.storage.local import LocalStore
store = LocalStore(sys.argv[1])
for n in range(1_000_000):
    key = f"wal/{n}"
    store.put_if_absent(key, [b"%08d" % n] * 20_000)
    print(key, flush=True)
    store.put("hint", [b"%08d" % n] * 20_000)
"""


def test_a_killed_writer_leaves_whole_objects_and_all_it_acknowledged(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline().strip() for _ in range(15)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += writer.stdout.read().split()
    store = LocalStore(tmp_path)
    found = {meta.key: bytes(store.get(meta.key).data) for meta in store.list()}
    assert set(acknowledged) <= found.keys()
    assert len(found) <= len(acknowledged) + 2
    for key, data in found.items():
        assert data == data[:8] * 20_000
        assert key == "hint" or key == f"wal/{int(data[:8])}"
