"""Cases of the container that no other test has: exact borders, replaced files, odd arguments."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.packed.fixtures import golden, pack, pattern
from tests.packed.mock_cipher import MockCipher
from tests.packed.sealed import contents, new_cipher, write

from penstock.errors import Corruption, InvalidInput, PenstockError, StorageError, WriterPoisoned
from penstock.packed.budget import ByteBudget
from penstock.packed.cipher import Cipher
from penstock.packed.reader import TAIL_BYTES, PackedReader
from penstock.packed.rotate import rewrap
from penstock.packed.writer import PackedWriter
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.open import open_store

MIB = 1 << 20

both = pytest.mark.parametrize("cipher", [None, MockCipher()], ids=["plain", "encrypted"])


@pytest.fixture
def store() -> FaultStore:
    return FaultStore(open_store("memory://"), SystemClock(), SeededEntropy(6))


# --- 64 KiB ---------------------------------------------------------------------------------------


def padded(wanted_bytes: int, measure: Callable[[bytes], int], build: Any) -> bytes:
    """The file whose measure is exactly that, found by how long its meta has to be."""
    size = 0
    for _ in range(4):
        found: bytes = build(b'{"k":"%s"}' % (b"y" * size))
        if measure(found) == wanted_bytes:
            return found
        size += wanted_bytes - measure(found)
    raise AssertionError("no meta makes it so")


def tail_bytes(file: bytes) -> int:
    return 32 + sum(struct.unpack("<II", file[-8:]))


@both
@pytest.mark.parametrize("by", [-9, -8, -1, 0, 1, 8, 9])
@pytest.mark.parametrize("measure", [tail_bytes, len])
def test_what_the_tail_read_just_holds_or_just_misses(
    measure: Callable[[bytes], int], by: int, cipher: Cipher | None, store: FaultStore
) -> None:
    """Footer, directory and meta of 64 KiB, and whole files of it, magic half in the tail."""
    before = 100_000 if measure is tail_bytes else 10
    entries = {"before": pattern(before), "empty": b""}
    file = padded(TAIL_BYTES + by, measure, lambda meta: pack(entries, meta, cipher, 1 << 20))
    store.put("x.v3", file)
    with PackedReader.from_store(store, "x.v3", keys=cipher) as far:
        assert store.counts["get_tail"] == 1
        assert store.counts["get_range"] == (1 if tail_bytes(file) > TAIL_BYTES else 0)
        with PackedReader.open(file, keys=cipher) as near:
            for reader in (far, near):
                assert len(reader.meta["k"]) > 60_000
                assert {name: bytes(reader.read(name)) for name in reader.names()} == entries
    for at in range(8):
        wrong = file[:at] + b"?" + file[at + 1 :]
        store.put("wrong.v3", wrong)
        with pytest.raises(Corruption, match="begins with"):
            PackedReader.open(wrong, keys=cipher)
        if measure is tail_bytes or by > 8:  # Else all data, but not all of the magic, was there.
            with (
                pytest.raises(Corruption, match="begins with"),
                PackedReader.from_store(store, "wrong.v3", keys=cipher) as reader,
            ):
                reader.read("before")


# --- files that change while they are read --------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_of_an_object_that_was_replaced_no_mixture_is_handed_out(
    encrypted: bool, store: FaultStore, tmp_path: Path
) -> None:
    """Another file of the very same shape takes the key, or the name, while a reader is open."""
    cipher = new_cipher(tmp_path) if encrypted else None
    files = []
    for salt in (0, 1):
        entries = {name: data * 40 for name, data in contents(salt).items()}
        with PackedWriter(tmp_path / str(salt), cipher=cipher, slice_size=4096) as writer:
            for name, data in entries.items():
                writer.write_entry(name, data)
        files.append(entries)
    store.put("x.v3", (tmp_path / "0").read_bytes())
    with (
        PackedReader.from_store(store, "x.v3", keys=cipher) as far,
        PackedReader.open(tmp_path / "0", keys=cipher) as near,
    ):
        assert bytes(far.read("short")) == files[0]["short"]
        store.put("x.v3", (tmp_path / "1").read_bytes())
        os.replace(tmp_path / "1", tmp_path / "0")
        for way in (
            lambda: far.read("long"),
            lambda: list(far.stream("long")),
            lambda: far.read_to_file("long", tmp_path / "out"),
        ):
            with pytest.raises(Corruption, match="'long'"):
                way()
        assert not (tmp_path / "out").exists()
        assert bytes(near.read("long")) == files[0]["long"], "an open file stays what it was"


@both
def test_a_consumer_that_fails_holds_nothing_up(cipher: Cipher | None, tmp_path: Path) -> None:
    path = tmp_path / "x.v3"
    path.write_bytes(pack({"x": pattern(50 * MIB), "y": pattern(9)}, b"{}", cipher, 16 * MIB))
    budget = ByteBudget(1 << 30)
    with PackedReader.open(path, keys=cipher, budget=budget) as reader:
        for stop_at in range(5):
            stream = reader.stream("x")
            with pytest.raises(ZeroDivisionError):
                [1 // (stop_at - number) for number, _ in enumerate([b"", *stream])]
            assert bytes(reader.read("y")) == pattern(9)
        del stream
        assert len(reader.read("x")) == 50 * MIB
    assert budget.used_bytes == 0


def test_a_commit_whose_answer_is_lost_may_leave_the_whole_file(store: FaultStore) -> None:
    store.inject(Fault.FAIL_AFTER, op="commit")
    writer = PackedWriter.to_store(store, "x.v3")
    writer.write_entry("a", b"1")
    with pytest.raises(StorageError):
        writer.finish()
    with pytest.raises(WriterPoisoned, match="it may be there, whole"):
        writer.finish()
    assert bytes(store.get("x.v3").data) == pack({"a": b"1"})


# --- directories that say two things --------------------------------------------------------------


def redirected(file: bytes, old: str, new: str) -> bytes:
    """The file, with other text in its directory."""
    (directory_bytes,) = struct.unpack("<I", file[-4:])
    start = len(file) - 32 - directory_bytes
    text = file[start : len(file) - 32].decode()
    assert text.count(old) >= 1
    changed = text.replace(old, new, 1).encode()
    return file[:start] + changed + file[-32:-4] + struct.pack("<I", len(changed))


def test_a_key_that_is_in_a_directory_twice_is_refused(tmp_path: Path) -> None:
    """Whoever takes the first of them, and whoever takes the last, would read two files."""
    cipher = new_cipher(tmp_path)
    sealed = write(tmp_path / "a.v3", cipher, kind="test")
    plain = pack({"a": b"12345", "b": b""})
    assert redirected(plain, '"name":"a"', '"name":"a","x":[{"y":1}]') != plain
    changes = [
        (plain, '"entries":', '"entries":[],"entries":'),
        (plain, '"name":"a"', '"name":"z","name":"a"'),
        (plain, '"size":5', '"size":4,"size":5'),
        (plain, '"offset":0', '"offset":0,"offset":0'),
        (plain, '"name":"a"', '"name":"a","n\\u0061me":"a"'),
        (sealed, '"__edek__":', '"__edek__":"AAAA","__edek__":'),
        (sealed, '"__ez_id__":', '"__ez_id__":"6","__ez_id__":'),
        (sealed, '"entries":', '"entries":[],"entries":'),
        (sealed, '"slices":[', '"slices":[],"slices":['),
        (sealed, '"original_size":', '"original_size":7,"original_size":'),
    ]
    for file, old, new in changes:
        damaged = redirected(file, old, new)
        with pytest.raises(Corruption, match="a key is there twice"):
            PackedReader.open(damaged, keys=cipher)
        if file is sealed:
            (tmp_path / "b.v3").write_bytes(damaged)
            with pytest.raises(Corruption, match="a key is there twice"):
                rewrap(tmp_path / "b.v3", cipher, "old")
            assert (tmp_path / "b.v3").read_bytes() == damaged


def test_numbers_that_no_file_has_are_refused() -> None:
    """Also those that are too long to be written into an error."""
    nines = int("9" * 4300)
    table = {
        "__edek__": "\7",
        "__ez_id__": "1",
        "slice_size": 4096,
        "entries": [
            {
                "name": "__meta__",
                "crc32": "00000000",
                "original_size": 4097,
                "slices": [{"offset": 0, "size": nines}, {"offset": 0, "size": nines}],
            }
        ],
    }
    text = json.dumps(table).encode()
    file = b"MVSIDXV3{}" + text + struct.pack("<H22xII", 3, 2, len(text))
    with pytest.raises(Corruption, match="not a whole number of 63 bits"):
        PackedReader.open(file, keys=MockCipher())


# --- arguments ------------------------------------------------------------------------------------


class Lying(io.RawIOBase):
    """Says that it has read what it has not."""

    def __init__(self, says: int) -> None:
        self.says = says

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        return self.says


def test_odd_arguments_are_refused_by_their_names(tmp_path: Path) -> None:
    file = golden("c01_basic")
    (tmp_path / "data").write_bytes(b"12345")
    closed = (tmp_path / "data").open("rb")
    closed.close()
    reader = PackedReader.open(file)
    writer = PackedWriter(io.BytesIO())
    with (tmp_path / "only written").open("wb") as only_written:
        refused: list[Callable[[], object]] = [
            *(
                lambda source=source: PackedReader.open(source)  # type: ignore[misc]
                for source in (None, 7, io.BytesIO(file), memoryview(file)[::2], np.empty((0, 3)))
            ),
            *(
                lambda workers=workers: PackedReader.open(file, workers=workers)  # type: ignore[misc]
                for workers in (None, "3", 2.5, True)
            ),
            *(lambda limit=limit: ByteBudget(limit) for limit in (None, "1", 1.5)),  # type: ignore[misc]
            *(
                lambda path=path: reader.read_to_file("data", path)  # type: ignore[misc]
                for path in (None, 5, "a\0b", "\ud800", tmp_path / "a\0b")
            ),
            *(
                lambda data=data: writer.write_entry("a", data)  # type: ignore[misc]
                for data in (closed, only_written, Path("a\0b"), Path("\ud800"))
            ),
            *(lambda meta=meta: writer.set_meta(meta) for meta in (None, 5, [("a", 1)])),  # type: ignore[misc]
            *(
                lambda target=target: PackedWriter(target)  # type: ignore[misc]
                for target in (closed, "\ud800", str(tmp_path / "\ud800"))
            ),
            lambda: rewrap(7, new_cipher(tmp_path)),  # type: ignore[arg-type]
            lambda: rewrap("a\0b", new_cipher(tmp_path, "more.json")),
        ]
        for call in refused:
            with pytest.raises(InvalidInput):
                call()
    writer.write_entry("a", b"the writer goes on")
    reader.close()
    for says in (-1, 1 << 40):
        with pytest.raises(InvalidInput, match="bytes were read"):
            PackedWriter(io.BytesIO()).write_entry("a", Lying(says))
    with (tmp_path / "data").open("rb") as read_only, pytest.raises(StorageError):
        PackedWriter(read_only)
    assert sorted(os.listdir(tmp_path)) == ["data", "keys.json", "more.json", "only written"]


def test_what_is_no_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("pipe", tmp_path / "link")
    for name in ("pipe", "link"):
        with pytest.raises(StorageError, match="no regular file"):
            PackedReader.open(tmp_path / name)
        with pytest.raises(StorageError, match="device or pipe"):
            PackedWriter(tmp_path / name)
        with (
            PackedReader.open(golden("c01_basic")) as reader,
            pytest.raises(StorageError, match="device or pipe"),
        ):
            reader.read_to_file("data", tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_the_longest_names_that_files_can_have(tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        with PackedWriter(tmp_path / name) as writer:
            writer.write_entry("a", b"1")
        with PackedReader.open(tmp_path / name) as reader:
            reader.read_to_file("a", tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"1"


def test_an_entry_without_room_leaves_no_draft(tmp_path: Path) -> None:
    size = 300 * MIB
    (tmp_path / "out").mkdir()
    frame = pack({"x": b""})
    table = json.loads(frame[10:-32])
    table["entries"][0]["size"] = table["entries"][1]["offset"] = size
    text = json.dumps(table).encode()
    with (tmp_path / "x.v3").open("wb") as sparse:
        sparse.write(b"MVSIDXV3")
        sparse.seek(size, os.SEEK_CUR)
        sparse.write(b"{}" + text + struct.pack("<H22xII", 3, 2, len(text)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with PackedReader.open(tmp_path / "x.v3") as reader:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
        try:
            with pytest.raises(PenstockError, match="has room"):
                reader.read_to_file("x", tmp_path / "out" / "x")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / "out") == []
