"""Changing the key of encrypted packed files: data stays, and no crash loses the file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed.sealed import SLICE, Taken, contents, new_cipher, read, write

from penstock.errors import CommitConflict, Corruption, InvalidInput, ObjectNotFound, StorageError
from penstock.packed.aes import AesGcm
from penstock.packed.envelope import EDEK_CHARACTERS, SLOT_CHARACTERS, decode_envelope, slot_place
from penstock.packed.keys import FileKeys
from penstock.packed.layout import META
from penstock.packed.reader import PackedReader
from penstock.packed.rotate import rewrap, rewrap_file
from penstock.packed.writer import PackedWriter
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store

WANTED = {**contents(), META: b'{"kind":"test"}'}

Writes = list[tuple[int, bytes]]


def keys_of(cipher: AesGcm) -> FileKeys:
    assert isinstance(cipher.provider, FileKeys)
    return cipher.provider


def only(cipher: AesGcm, key_id: str, directory: Path) -> AesGcm:
    """The same cipher with one of its keys and no other."""
    path = directory / f"only-{key_id}.json"
    if not path.exists():
        path.write_bytes(keys_of(cipher).path.read_bytes())
        path.chmod(0o600)
        keys = FileKeys(path)
        keys.rotate("none of them")
        for other in set(keys.ids()) - {key_id, "none of them"}:
            keys.remove(other)
    return AesGcm(FileKeys(path))


def opens(file: bytes | Path, cipher: AesGcm) -> bool:
    try:
        return read(file, cipher) == WANTED
    except (InvalidInput, Corruption):
        return False


def edek_place(file: bytes) -> int:
    return file.index(b'"__edek__":"') + len(b'"__edek__":"')


def without_slots(file: bytes) -> bytes:
    start = edek_place(file) + slot_place(0)
    return file[:start] + file[start + 2 * SLOT_CHARACTERS :]


def recorded(path: Path, cipher: AesGcm, new_key_id: str | None = None) -> Writes:
    """What changing the key writes to the file, which it does."""
    writes: Writes = []

    def write_at(fd: int, data: bytes, at: int) -> int:
        writes.append((at, data))
        return os.pwrite(fd, data, at)

    rewrap_file(path, cipher, new_key_id, write=write_at)
    return writes


def after(file: bytes, writes: Writes) -> bytes:
    found = bytearray(file)
    for at, data in writes:
        found[at : at + len(data)] = data
    return bytes(found)


@pytest.fixture
def cipher(tmp_path: Path) -> AesGcm:
    return new_cipher(tmp_path)


def test_the_key_changes_and_the_data_stays(cipher: AesGcm, tmp_path: Path) -> None:
    path = tmp_path / "a.v3"
    before = write(path, cipher, kind="test")
    inode = path.stat().st_ino
    report = rewrap(path, cipher)
    assert not report.changed
    assert str(report) == f"{path} has key 'old' already"
    assert path.read_bytes() == before

    assert keys_of(cipher).rotate("new") == "new"
    assert opens(path, cipher), "rotating keys alone changes no file"
    with PackedReader.open(path, keys=cipher) as reader:
        report = rewrap(path, cipher)
        assert bytes(reader.read("long")) == contents()["long"], "an open file goes on"
    assert (report.changed, report.key_id, report.previous) == (True, "new", ("old",))
    assert report.written_bytes == 2 * SLOT_CHARACTERS
    assert str(report) == f"{path} now has key 'new' instead of 'old'"

    changed = path.read_bytes()
    assert path.stat().st_ino == inode
    assert without_slots(changed) == without_slots(before)
    assert bytes(Taken.apart(changed).data) == bytes(Taken.apart(before).data)
    assert opens(path, cipher)
    assert opens(path, only(cipher, "new", tmp_path))
    assert not opens(path, only(cipher, "old", tmp_path))
    assert not rewrap(f"file://{path}", cipher).changed
    keys_of(cipher).remove("old")
    assert opens(path, cipher)
    assert not opens(before, cipher)

    # And back to a key that is named.
    keys_of(cipher).add("third")
    assert rewrap(path, cipher, "third").key_id == "third"
    assert opens(path, only(cipher, "third", tmp_path))
    with pytest.raises(InvalidInput, match="no key 'fourth'"):
        rewrap(path, cipher, "fourth")
    assert opens(path, cipher)


def test_a_crash_at_any_byte_leaves_a_file_that_opens(cipher: AesGcm, tmp_path: Path) -> None:
    path = tmp_path / "a.v3"
    file = write(path, cipher, kind="test")
    keys_of(cipher).rotate("new")
    old, new = only(cipher, "old", tmp_path), only(cipher, "new", tmp_path)
    writes = recorded(path, cipher)
    start = edek_place(file)
    assert [(at - start, len(data)) for at, data in writes] == [
        (slot_place(1), SLOT_CHARACTERS),
        (slot_place(0), SLOT_CHARACTERS),
    ]

    def keys_that_open(damaged: bytes) -> set[str]:
        edek = damaged[start : start + EDEK_CHARACTERS].decode()
        found = set()
        for name, single in (("old", old), ("new", new)):
            try:
                single.open_file(edek, "5")
                found.add(name)
            except (InvalidInput, Corruption):
                continue
        return found

    seen = []
    for done, (at, data) in enumerate(writes):
        for cut in range(len(data) + 1):
            state = after(file, [*writes[:done], (at, data[:cut])])
            seen.append(keys_that_open(state))
            assert seen[-1], f"write {done}, cut at {cut}"
    assert seen[0] == {"old"}
    assert seen[SLOT_CHARACTERS] == {"old", "new"}
    assert seen[-1] == {"new"}

    # Running again after a crash finishes, and is itself safe from crashes.
    for first_cut in (1, 23, 100, SLOT_CHARACTERS - 1):
        for done in (0, 1):
            at, data = writes[done]
            crashed = after(file, [*writes[:done], (at, data[:first_cut])])
            path.write_bytes(crashed)
            again = recorded(path, cipher)
            assert opens(path, new)
            assert not opens(path, old)
            for step, (at, data) in enumerate(again):
                for cut in (*range(0, len(data), 37), len(data)):
                    assert keys_that_open(after(crashed, [*again[:step], (at, data[:cut])]))


def test_no_mixture_of_old_and_new_sectors_loses_the_file(cipher: AesGcm, tmp_path: Path) -> None:
    """Disks write sectors in any order: of a write that was cut off any part may be there."""
    path = tmp_path / "a.v3"
    file = write(path, cipher, kind="test")
    keys_of(cipher).rotate("new")
    writes = recorded(path, cipher)
    old, new = only(cipher, "old", tmp_path), only(cipher, "new", tmp_path)

    @settings(max_examples=60, deadline=None)
    @given(
        done=st.integers(0, 1),
        sector=st.sampled_from([1, 8, 64, 512]),
        kept=st.integers(0, (1 << SLOT_CHARACTERS) - 1),
    )
    def check(done: int, sector: int, kept: int) -> None:
        at, fresh = writes[done]
        pieces = [(begin, fresh[begin : begin + sector]) for begin in range(0, len(fresh), sector)]
        arrived = [(at + begin, piece) for begin, piece in pieces if kept >> begin & 1]
        mixed = after(file, [*writes[:done], *arrived])
        assert opens(mixed, (old, new)[done])
        path.write_bytes(mixed)
        rewrap(path, cipher)
        assert opens(path, new)
        assert not opens(path, old)
        assert without_slots(path.read_bytes()) == without_slots(file)

    check()


def test_a_disk_that_fails_or_lies_stops_the_change(cipher: AesGcm, tmp_path: Path) -> None:
    path = tmp_path / "a.v3"
    file = write(path, cipher, kind="test")
    keys_of(cipher).rotate("new")
    calls = 0

    def failing(at_call: int, instead: Callable[[int, bytes, int], int]) -> None:
        nonlocal calls
        calls = 0

        def write_at(fd: int, data: bytes, at: int) -> int:
            nonlocal calls
            calls += 1
            return (instead if calls == at_call else os.pwrite)(fd, data, at)

        rewrap_file(path, cipher, write=write_at)

    def no_space(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def half_then_fail(fd: int, data: bytes, at: int) -> int:
        os.pwrite(fd, data[:300], at)
        raise OSError(errno.EIO, "Input/output error")

    def forgotten(fd: int, data: bytes, at: int) -> int:
        return len(data)

    def short(fd: int, data: bytes, at: int) -> int:
        return os.pwrite(fd, data[:7], at)

    for at_call in (1, 2):
        for instead in (no_space, half_then_fail):
            path.write_bytes(file)
            with pytest.raises(StorageError, match="run it again"):
                failing(at_call, instead)
            assert calls == at_call, "nothing is written after a failure"
            assert opens(path, cipher)
        path.write_bytes(file)
        with pytest.raises(Corruption, match="not read back"):
            failing(at_call, forgotten)
        assert calls == at_call
        assert opens(path, cipher)
        path.write_bytes(file)
        failing(at_call, short)
        assert opens(path, only(cipher, "new", tmp_path))


def test_files_can_be_opened_while_their_key_changes(cipher: AesGcm, tmp_path: Path) -> None:
    path = tmp_path / "a.v3"
    write(path, cipher, kind="test")
    keys_of(cipher).add("new")
    failures: list[BaseException] = []
    over = threading.Event()

    def rotate() -> None:
        try:
            for turn in range(25):
                rewrap(path, cipher, ("new", "old")[turn % 2])
        except BaseException as error:
            failures.append(error)

    def keep_reading() -> None:
        try:
            while not over.is_set():
                try:
                    found = read(path, cipher)
                except Corruption:
                    # Held up between the slots, by a change for each: then again.
                    found = read(path, cipher)
                assert found == WANTED
        except BaseException as error:
            failures.append(error)

    rotating = [threading.Thread(target=rotate) for _ in range(2)]
    reading = threading.Thread(target=keep_reading)
    for thread in (*rotating, reading):
        thread.start()
    for thread in rotating:
        thread.join(120)
    over.set()
    reading.join(120)
    assert not failures
    assert opens(path, cipher)


def test_objects_are_replaced_as_a_whole(
    cipher: AesGcm, any_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Smaller steps, so that a small file takes several of them, before and behind the slots.
    monkeypatch.setattr("penstock.packed.rotate.COPY_BYTES", 1 << 16)
    text = os.urandom(300_000)
    many = {f"entry {n:05d}": b"" for n in range(2000)}
    with PackedWriter.to_store(any_store, "deep/a.v3", cipher=cipher, slice_size=SLICE) as writer:
        for name, data in {"text": text, **many}.items():
            writer.write_entry(name, data)
    before = bytes(any_store.get("deep/a.v3").data)
    keys_of(cipher).rotate("new")

    with PackedReader.from_store(any_store, "deep/a.v3", keys=cipher) as reader:
        report = rewrap((any_store, "deep/a.v3"), cipher)
        assert bytes(reader.read("text")) == text, "an open file goes on"
    assert report.changed
    assert report.written_bytes == len(before)
    changed = bytes(any_store.get("deep/a.v3").data)
    assert without_slots(changed) == without_slots(before)
    for key_id, good in (("new", True), ("old", False)):
        single = only(cipher, key_id, tmp_path)
        if good:
            with PackedReader.from_store(any_store, "deep/a.v3", keys=single) as reader:
                assert bytes(reader.read("text")) == text
        else:
            with pytest.raises(InvalidInput, match="no key 'new'"):
                PackedReader.from_store(any_store, "deep/a.v3", keys=single)
    assert not rewrap((any_store, "deep/a.v3"), cipher).changed
    assert [found.key for found in any_store.list()] == ["deep/a.v3"]


def test_an_object_changes_its_key_wholly_or_not_at_all(cipher: AesGcm, tmp_path: Path) -> None:
    inner = open_store("memory://")
    store = FaultStore(inner, SystemClock(), SeededEntropy(1))
    file = write(tmp_path / "a.v3", cipher, kind="test")
    keys_of(cipher).rotate("new")
    inner.put("a.v3", file)
    rewrap((store, "a.v3"), cipher)
    steps = [call.op for call in store.log]
    for nth in range(1, len(steps) + 1):
        store.clear()
        inner.put("a.v3", file)
        store.inject(Fault.FAIL_BEFORE, op=frozenset(steps), nth=nth)
        with pytest.raises(StorageError):
            rewrap((store, "a.v3"), cipher)
        assert bytes(inner.get("a.v3").data) == file

    # Somebody writes another file under the key meanwhile: it stays.
    another = write(tmp_path / "b.v3", cipher, contents(1), kind="test")
    for size, at, error in (
        (len(another), "get_tail", CommitConflict),
        (len(another), "open_writer", CommitConflict),
        (100, "open_writer", Corruption),
    ):
        store.clear()
        inner.put("a.v3", file)
        replace = partial(inner.put, "a.v3", another[:size])
        store.hook(op=at, nth=1, after=lambda op, key, replace=replace: replace() and None)
        with pytest.raises(error):
            rewrap((store, "a.v3"), cipher)
        assert bytes(inner.get("a.v3").data) == another[:size], at


def test_what_has_no_key_to_change_is_refused(cipher: AesGcm, tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "plain.v3") as writer:
        writer.write_entry("a", b"b")
    with pytest.raises(InvalidInput, match="is not encrypted"):
        rewrap(tmp_path / "plain.v3", cipher)
    with pytest.raises(ObjectNotFound):
        rewrap(tmp_path / "nowhere.v3", cipher)
    with pytest.raises(ObjectNotFound):
        rewrap((open_store("memory://"), "nowhere.v3"), cipher)
    with pytest.raises(InvalidInput, match="does not name a file"):
        rewrap("memory://a", cipher)
    with pytest.raises(StorageError):
        rewrap(tmp_path, cipher)
    (tmp_path / "junk.v3").write_bytes(b"junk" * 100)
    with pytest.raises(Corruption):
        rewrap(tmp_path / "junk.v3", cipher)

    path = tmp_path / "a.v3"
    file = write(path, cipher, kind="test")
    keys_of(cipher).rotate("new")
    stranger = AesGcm(FileKeys.create(tmp_path / "other.json", "new"))
    with pytest.raises(InvalidInput, match=r"a\.v3: there is no key 'old'"):
        rewrap(path, stranger)
    # An entry that bears the text of the wrapped key must not be mistaken for it.
    taken = Taken.apart(file)
    taken.entry("empty")["name"] = taken.table["__edek__"]
    path.write_bytes(taken.together())
    with pytest.raises(Corruption, match="stands 2 times"):
        rewrap(path, cipher)
    assert path.read_bytes() == taken.together()
    assert decode_envelope(taken.table["__edek__"]).slots[0] is not None
