"""The packed writer: the golden bytes, from any source to any place, or nothing at all."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.packed.fixtures import FIXTURES, contents, golden, names, pack, pattern, spec
from tests.packed.mock_cipher import MockCipher, MockFileCipher
from tests.s3_server import S3Server

from penstock.errors import (
    InvalidInput,
    StorageError,
    WriterClosed,
    WriterPoisoned,
)
from penstock.packed.cipher import Cipher
from penstock.packed.layout import directory_digest, slice_label
from penstock.packed.reader import PackedReader
from penstock.packed.sealing import CHUNK_BYTES, RUN_BYTES
from penstock.packed.writer import MAX_SLICE_BYTES, PackedWriter
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.streams import PART_BYTES

MIB = 1 << 20
HASHED: dict[str, Any] = json.loads((FIXTURES / "HASH_ONLY.json").read_text())


class Hash(io.RawIOBase):
    """A file of which only the hash is kept."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return len(data)


def described(found: Mapping[str, Any]) -> dict[str, Any]:
    """What to give the writer for a spec."""
    encrypt = found.get("encrypt")
    if encrypt is None:
        return {}
    cipher = MockCipher(encrypt["key"], encrypt["ez_id"])
    return {"cipher": cipher, "slice_size": encrypt["slice_size"]}


def write(target: Any, entries: Mapping[str, Any], meta: Mapping[str, Any], **how: Any) -> int:
    writer = PackedWriter(target, **how)
    for name, data in entries.items():
        writer.write_entry(name, data)
    writer.set_meta(meta)
    return writer.finish()


# --- the golden bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*names("c"), *names("e")])
def test_golden_files_are_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    found = spec(name)
    entries, meta = contents(found), found.get("meta", {})
    out = io.BytesIO()
    assert write(out, entries, meta, **described(found)) == len(golden(name))
    assert out.getvalue() == golden(name)

    for n, data in enumerate(entries.values()):
        (tmp_path / str(n)).write_bytes(data)
    files = {name: tmp_path / str(n) for n, name in enumerate(entries)}
    write(tmp_path / "again.v3", files, meta, **described(found))
    assert (tmp_path / "again.v3").read_bytes() == golden(name)


@pytest.mark.parametrize("name", HASHED)
def test_large_golden_files_have_the_right_hash(name: str) -> None:
    found = HASHED[name]["spec"]
    if isinstance(found, str):
        found = spec("c06_large_meta_70k")
        found["meta"] = {"huge_field": "Y" * (20 * MIB)}
        found["entries"] = [{"name": found["entries"][0]["name"], "pattern": 256}]
    sink = Hash()
    write(sink, contents(found), found.get("meta", {}), **described(found))
    assert (sink.size, sink.sha256.hexdigest()) == (HASHED[name]["size"], HASHED[name]["sha256"])


SIZES = [
    0,
    1,
    4095,
    4096,
    4097,
    (64 << 10) - 1,
    (64 << 10) + 1,
    RUN_BYTES - 1,
    RUN_BYTES + 1,
    CHUNK_BYTES,
    3 * CHUNK_BYTES + 5,
    16 * MIB - 1,
    16 * MIB,
    16 * MIB + 1,
]


@pytest.mark.parametrize("sealed", [None, 4096, 48 << 10, MIB, 16 * MIB])
def test_the_bytes_do_not_depend_on_where_they_come_from(
    sealed: int | None, tmp_path: Path
) -> None:
    """From memory, a path, an open file and a pipe-like stream, all sizes around the borders."""
    how: dict[str, Any] = {"cipher": MockCipher(), "slice_size": sealed} if sealed else {}
    sizes = [size for size in SIZES if sealed != 4096 or size <= 2 * MIB]
    # No two pieces of it are the same, unlike those of the golden files' pattern.
    whole = bytes(range(251)) * (max(sizes) // 251 + 1)
    path = tmp_path / "source"
    path.write_bytes(b"before" + whole + b"after")
    entries = {f"of {size}": memoryview(whole)[:size] for size in sizes}
    expected = Hash()
    write(expected, entries, {"a": 1}, **how)
    packed = pack({name: bytes(data) for name, data in entries.items()}, b'{"a":1}', **how)
    assert expected.sha256.digest() == hashlib.sha256(packed).digest()

    class Stream:
        """Neither seekable nor a file, and gives a little less than it is asked for."""

        def __init__(self, data: memoryview) -> None:
            self.left = data

        def read(self, size: int) -> bytes:
            piece, self.left = self.left[: size - size // 3], self.left[size - size // 3 :]
            return bytes(piece)

    target = tmp_path / "x.v3"
    for workers in (1, 3):
        write(target, entries, {"a": 1}, workers=workers, **how)
        assert hashlib.sha256(target.read_bytes()).digest() == expected.sha256.digest()

    with path.open("rb") as file:
        for source in ("file to path", "file", "stream", "stream of known size"):
            found = Hash()
            to_path = source == "file to path"
            with PackedWriter(target if to_path else found, workers=3, **how) as writer:
                writer.put_meta("a", 1)
                for name, data in entries.items():
                    file.seek(6)
                    if source.startswith("file"):
                        writer.write_entry(name, file, data.nbytes)
                        assert file.tell() == 6 + data.nbytes
                    else:
                        known = data.nbytes if source == "stream of known size" else None
                        writer.write_entry(name, Stream(data), known)
            if to_path:
                found.write(target.read_bytes())
            assert found.sha256.digest() == expected.sha256.digest(), source


def test_every_buffer_will_do_and_only_the_bytes_of_a_file_count(tmp_path: Path) -> None:
    numbers = np.arange(1000, dtype="<i8")
    raw = numbers.tobytes()
    with gzip.open(tmp_path / "z", "wb") as packed:
        packed.write(raw)
    random_access = (tmp_path / "r").open("wb+")
    random_access.write(raw)
    random_access.seek(0)
    sources = [raw, bytearray(raw), memoryview(numbers), pa.py_buffer(raw), numbers]
    with gzip.open(tmp_path / "z") as unzipped, random_access:
        out = io.BytesIO()
        with PackedWriter(out) as writer:
            for n, data in enumerate([*sources, io.BytesIO(raw), unzipped, random_access]):
                writer.write_entry(str(n), data)
            writer.write_entry("none", np.empty(0))
    expected = {str(n): raw for n in range(len(sources) + 3)} | {"none": b""}
    assert out.getvalue() == pack(expected)


def test_many_names_and_their_order(tmp_path: Path) -> None:
    entries = {f"entry/{n * 7919 % 1200} é": b"%d" % n for n in range(1200)}
    write(tmp_path / "many.v3", entries, {})
    assert (tmp_path / "many.v3").read_bytes() == pack(entries)
    with PackedReader.open(tmp_path / "many.v3") as reader:
        assert list(reader.names()) == list(entries)
        assert all(bytes(reader.read(name)) == data for name, data in entries.items())


def test_the_last_meta_counts_and_is_kept_as_it_was_put() -> None:
    out = io.BytesIO()
    value = [1]
    with PackedWriter(out) as writer:
        writer.put_meta("dropped", 1)
        writer.set_meta({"é": value, "b": None, "a": {"y": 1, "x": 2}})
        writer.put_meta("b", 2**64 - 1)
        value.append(2)
    assert out.getvalue() == pack(
        {}, '{"a":{"x":2,"y":1},"b":18446744073709551615,"é":[1]}'.encode()
    )


def test_every_slice_has_its_own_number_and_label() -> None:
    sealed: list[tuple[int, bytes, int]] = []

    class Noted(MockFileCipher):
        def seal_into(self, sequence: int, label: bytes, plain: Any, out: Any) -> None:
            sealed.append((sequence, label, len(plain)))
            super().seal_into(sequence, label, plain, out)

    class NotedCipher(MockCipher):
        def new_file(self) -> MockFileCipher:
            return Noted(self.key, str(self.ez_id))

    entries = {"a": pattern(3 * RUN_BYTES), "empty": b"", "é": pattern(5000)}
    out = io.BytesIO()
    write(out, entries, {"k": "v" * 5000}, cipher=NotedCipher(), slice_size=4096)
    with PackedReader.open(out.getvalue(), keys=MockCipher()) as reader:
        directory = reader.directory
    digest = directory_digest(directory.entries, directory.entries[-1].size, 4096, "1")
    labels = [
        slice_label(entry.name, n, digest if entry.name == "__meta__" else b"")
        for entry in directory.entries
        for n in range(len(entry.slices))
    ]
    assert [label for _, label, _ in sorted(sealed)] == labels
    assert sorted(sequence for sequence, _, _ in sealed) == list(range(len(labels)))
    assert len(labels) == 3 * RUN_BYTES // 4096 + 2 + 2


# --- what is refused ------------------------------------------------------------------------------


class BadKey(MockCipher):
    def new_file(self) -> Any:
        class File:
            edek, ez_id, overhead_bytes = "\udc80", "1", 4

        return File()


def test_bad_arguments_are_refused_and_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.packed.writer.MAX_META_BYTES", MIB)
    out = io.BytesIO()
    writer = PackedWriter(out, cipher=MockCipher(), slice_size=4096)
    writer.write_entry("a", b"1")
    writer.put_meta("k", "v")
    short = tmp_path / "short"
    short.write_bytes(b"12345")
    refused: list[tuple[str, Callable[[], object]]] = [
        ("already", lambda: writer.write_entry("a", b"2")),
        ("own", lambda: writer.write_entry("__meta__", b"2")),
        ("surrogates", lambda: writer.write_entry("\ud800", b"2")),
        ("text", lambda: writer.write_entry(b"b", b"2")),
        ("has 1 bytes, not 2", lambda: writer.write_entry("b", b"2", 2)),
        ("cannot have", lambda: writer.write_entry("b", b"2", -1)),
        ("encode it", lambda: writer.write_entry("b", "text")),
        ("open it for", lambda: writer.write_entry("b", io.StringIO("x"))),
        ("no contiguous", lambda: writer.write_entry("b", memoryview(b"1234")[::2])),
        ("but int", lambda: writer.write_entry("b", 5)),
        ("cannot be opened", lambda: writer.write_entry("b", tmp_path / "none")),
        ("5 of the 6", lambda: writer.write_entry("b", short, 6)),
        ("meta 'x'", lambda: writer.put_meta("x", float("nan"))),
        ("meta 'x'", lambda: writer.put_meta("x", b"bytes")),
        ("meta 'x'", lambda: writer.put_meta("x", ["\udfff"])),
        ("surrogates", lambda: writer.put_meta("\udfff", 1)),
        ("key of the meta", lambda: writer.set_meta({1: 2})),
        ("small things", lambda: writer.put_meta("x", "x" * MIB)),
    ]
    for message, call in refused:
        with pytest.raises(InvalidInput, match=message):
            call()
    writer.finish()
    assert out.getvalue() == pack({"a": b"1"}, b'{"k":"v"}', MockCipher())


def test_a_directory_that_no_reader_takes_is_refused_before_the_work(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb+") as sparse:
        sparse.truncate(2**40)
        with PackedWriter(io.BytesIO(), cipher=MockCipher(), slice_size=4096) as writer:
            with pytest.raises(InvalidInput, match="larger slices"):
                writer.write_entry("b", sparse)
            writer.abort()


@pytest.mark.parametrize("slice_size", [0, 4095, 4097, -4096, MAX_SLICE_BYTES + 4096, 4096.0, None])
def test_slices_that_cannot_be_are_refused_and_nothing_is_begun(
    slice_size: Any, tmp_path: Path
) -> None:
    target = tmp_path / "x.v3"
    with pytest.raises(InvalidInput, match="multiple of 4096"):
        PackedWriter(target, cipher=MockCipher(), slice_size=slice_size)
    with pytest.raises(InvalidInput, match="workers"):
        PackedWriter(target, workers=0)
    with pytest.raises(InvalidInput, match="surrogates"):
        PackedWriter(target, cipher=BadKey())
    assert os.listdir(tmp_path) == []


def test_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    ended = [PackedWriter(tmp_path / "finished"), PackedWriter(tmp_path / "aborted")]
    ended[0].finish()
    ended[1].abort()
    for writer in ended:
        for call in (
            lambda w: w.write_entry("a", b""),
            lambda w: w.put_meta("a", 1),
            lambda w: w.set_meta({}),
            lambda w: w.finish(),
        ):
            with pytest.raises(WriterClosed):
                call(writer)
        writer.abort()
        with writer:
            pass
    assert os.listdir(tmp_path) == ["finished"]
    assert (tmp_path / "finished").stat().st_size == 114


# --- what fails in the middle ---------------------------------------------------------------------


class Failing(io.RawIOBase):
    """Gives so many bytes, then fails, or ends."""

    def __init__(self, good_bytes: int, error: Exception | None) -> None:
        self.left = good_bytes
        self.error = error

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        got = min(len(out), self.left)
        if not got and self.error is not None:
            raise self.error
        self.left -= got
        return got


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server) -> Iterator[FaultStore]:
    """A store that can fail, and that must have nothing unfinished in the end."""
    if request.param == "local":
        inner: ObjectStore = LocalStore(tmp_path / "store")
    else:
        inner = open_store(s3.uri("packed"), s3.storage_options)
    yield FaultStore(inner, SystemClock(), SeededEntropy(1))
    assert s3.unfinished_uploads() == 0
    left = [name for path, _, files in os.walk(tmp_path / "store/_penstock") for name in files]
    assert left == []


both = pytest.mark.parametrize("cipher", [None, MockCipher()], ids=["plain", "sealed"])


def given_up(writer: PackedWriter) -> None:
    for call in (writer.finish, lambda: writer.write_entry("more", b"")):
        with pytest.raises(WriterPoisoned, match=r"x\.v3 was given up"):
            call()
    writer.abort()


@both
def test_a_source_that_fails_leaves_nothing(
    cipher: Cipher | None, store: FaultStore, tmp_path: Path
) -> None:
    store.put("x.v3", b"old")
    for error, expected, message in (
        (ZeroDivisionError("mine"), ZeroDivisionError, "mine"),
        (None, InvalidInput, f"after {20 * MIB} of the {24 * MIB} bytes"),
    ):
        writer = PackedWriter.to_store(store, "x.v3", cipher=cipher, slice_size=MIB)
        writer.write_entry("fine", bytes(10))
        with pytest.raises(expected, match=message):
            writer.write_entry("fails", Failing(20 * MIB, error), 24 * MIB)
        given_up(writer)

    source = tmp_path / "source"
    source.write_bytes(bytes(40 * MIB))
    store.hook(op="write", nth=3, after=lambda op, key: os.truncate(source, 5))
    writer = PackedWriter.to_store(store, "x.v3", cipher=cipher, slice_size=MIB)
    with source.open("rb") as file, pytest.raises(InvalidInput, match="'shrinks' ended after"):
        writer.write_entry("shrinks", file)
    given_up(writer)
    assert bytes(store.get("x.v3").data) == b"old"


@both
@pytest.mark.parametrize("op", ["open_writer", "write", "commit"])
def test_a_store_that_fails_leaves_nothing(
    cipher: Cipher | None, store: FaultStore, op: str
) -> None:
    store.inject(Fault.FAIL_BEFORE, op=op, nth=5 if op == "write" else 1)

    def attempt() -> None:
        with PackedWriter.to_store(store, "x.v3", cipher=cipher, slice_size=MIB) as writer:
            writer.write_entry("a", pattern(3 * PART_BYTES))
            writer.write_entry("b", io.BytesIO(pattern(3 * PART_BYTES)))

    with pytest.raises(StorageError, match="injected"):
        attempt()
    assert not list(store.list())
    attempt()
    with PackedReader.from_store(store, "x.v3", keys=cipher) as reader:
        assert bytes(reader.read("b")) == pattern(3 * PART_BYTES)


@both
def test_a_disk_that_takes_no_more_leaves_nothing(cipher: Cipher | None, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(24 * MIB))
    (tmp_path / "out").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for data in (source, bytes(24 * MIB)):
        writer = PackedWriter(tmp_path / "out/x.v3", cipher=cipher, slice_size=MIB)
        writer.write_entry("fits", bytes(3 * MIB))
        resource.setrlimit(resource.RLIMIT_FSIZE, (12 * MIB + 5, limits[1]))
        try:
            with pytest.raises(StorageError, match=r"x\.v3 failed: File too large"):
                writer.write_entry("does not", data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        given_up(writer)
    assert os.listdir(tmp_path / "out") == []


def test_an_error_of_the_caller_or_one_that_it_hides_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "x.v3"
    target.write_bytes(b"old")

    def interrupted() -> None:
        with PackedWriter(target) as writer:
            writer.write_entry("a", bytes(MIB))
            raise KeyboardInterrupt

    def hidden() -> None:
        with PackedWriter(target) as writer, contextlib.suppress(InvalidInput):
            writer.write_entry("a", io.BytesIO(b"1"), 2)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(WriterPoisoned):
        hidden()
    forgotten = PackedWriter(target)
    forgotten.write_entry("a", bytes(MIB))
    del forgotten
    assert os.listdir(tmp_path) == ["x.v3"]
    assert target.read_bytes() == b"old"


# --- side by side ---------------------------------------------------------------------------------


def test_many_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    """Of several threads, each with a file of its own, and all with one."""
    shared = PackedWriter(tmp_path / "shared", cipher=MockCipher(), slice_size=64 << 10)

    def work(n: int) -> None:
        entries = {f"{n}/{k}": pattern(n * 100_000 + k) for k in range(4)}
        cipher = MockCipher(n) if n % 2 else None
        write(tmp_path / str(n), entries, {}, cipher=cipher, slice_size=64 << 10, workers=2)
        for name, data in entries.items():
            shared.write_entry(name, data)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(1, 13)))
    shared.finish()
    with PackedReader.open(tmp_path / "shared", keys=MockCipher()) as everything:
        assert len(everything.names()) == 48
        for n in range(1, 13):
            with PackedReader.open(tmp_path / str(n), keys=MockCipher()) as reader:
                for name in reader.names():
                    k = int(name.partition("/")[2])
                    assert bytes(reader.read(name)) == pattern(n * 100_000 + k)
                    assert bytes(everything.read(name)) == pattern(n * 100_000 + k)
    assert threading.active_count() < 50
