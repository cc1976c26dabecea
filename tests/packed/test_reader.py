"""Reading packed files: from where, to where, how many requests, and what happens on damage."""

from __future__ import annotations

import itertools
import os
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.packed.fixtures import contents, golden, names, pack, pattern, spec
from tests.packed.mock_cipher import MockCipher

from penstock.errors import Corruption, InvalidInput, ObjectNotFound, PenstockError, StorageError
from penstock.packed.budget import ByteBudget
from penstock.packed.reader import CACHE_BYTES, SMALL_ENTRY_BYTES, TAIL_BYTES, PackedReader
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store

MIB = 1 << 20


@pytest.fixture
def store() -> FaultStore:
    return FaultStore(open_store("memory://"), SystemClock(), SeededEntropy(6))


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def streamed(reader: PackedReader, name: str) -> bytes:
    return b"".join(reader.stream(name))


def assert_holds(reader: PackedReader, entries: dict[str, bytes], scratch: Path) -> None:
    """All three ways of reading give these entries and no others."""
    assert reader.names() == list(entries)
    paths = {name: scratch / f"{number}.bin" for number, name in enumerate(entries)}
    reader.read_to_files(paths)
    for name, data in entries.items():
        assert reader.size(name) == len(data)
        assert bytes(reader.read(name)) == data
        assert streamed(reader, name) == data
        assert paths[name].read_bytes() == data
    assert len(os.listdir(scratch)) == len(entries)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*names("c"), *names("e")])
def test_golden_containers_hold_what_their_specs_say(name: str, tmp_path: Path) -> None:
    described = spec(name)
    with PackedReader.open(golden(name), keys=MockCipher()) as reader:
        assert_holds(reader, contents(described), tmp_path)
        assert reader.meta == described.get("meta", {})
        assert reader.is_encrypted == ("encrypt" in described)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_sizes_around_every_limit_from_every_source(
    encrypted: bool, any_store: ObjectStore, tmp_path: Path
) -> None:
    around = [limit + by for limit in (TAIL_BYTES, SMALL_ENTRY_BYTES) for by in (-1, 0, 1)]
    sizes = [0, 1, *around, 8 * MIB, 16 * MIB, 16 * MIB + 1]
    entries = {f"{size} bytes": pattern(size) for size in sizes}
    cipher = MockCipher() if encrypted else None
    data = pack(entries, b'{"k":[1,2]}', cipher, 8 * MIB)
    any_store.put("index/big.v3", data)
    location = f"{any_store.uri}/index/big.v3"
    with PackedReader.from_store(any_store, "index/big.v3", keys=cipher) as reader:
        assert reader.size_bytes == len(data)
        assert reader.meta == {"k": [1, 2]}
        assert_holds(reader, entries, tmp_path_of(tmp_path, "from_store"))
    if location.startswith("memory://"):
        return
    options = any_store.storage_options
    with PackedReader.open(location, keys=cipher, storage_options=options) as reader:
        assert bytes(reader.read("1 bytes")) == b"\0"


def tmp_path_of(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.mkdir()
    return path


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_meta_of_20_mib_and_a_directory_of_1200_names(encrypted: bool, tmp_path: Path) -> None:
    entries = {f"an entry with quite a long name, number {n}": pattern(n % 7) for n in range(1200)}
    cipher = MockCipher() if encrypted else None
    meta = b'{"huge":"%s"}' % (b"Y" * 20 * MIB)
    with PackedReader.open(pack(entries, meta, cipher, 16 * MIB), keys=cipher) as reader:
        assert len(reader.meta["huge"]) == 20 * MIB
        assert bytes(reader.read("__meta__")) == meta
        assert_holds(reader, entries, tmp_path)


def test_who_asks_for_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"gone\.v3"):
        PackedReader.open(tmp_path / "gone.v3")
    with pytest.raises(ObjectNotFound, match=r"gone\.v3"):
        PackedReader.open("memory://name/gone.v3")
    with pytest.raises(StorageError, match="could not be read"):
        PackedReader.open(tmp_path)
    with pytest.raises(InvalidInput, match="workers"):
        PackedReader.open(golden("c01_basic"), workers=0)
    with PackedReader.open(golden("c01_basic")) as reader:
        for ask in (reader.read, reader.size, reader.stream):
            with pytest.raises(InvalidInput, match="no entry 'date'; it begins with 'data'"):
                ask("date")
        with pytest.raises(InvalidInput, match="one file"):
            reader.read_to_files({"data": tmp_path / "x", "__meta__": tmp_path / "y/../x"})
        with pytest.raises(StorageError, match="check that the directory is there"):
            reader.read_to_file("data", tmp_path / "missing" / "x")
        with pytest.raises(TypeError):
            reader.read("data")[0] = 1
    with pytest.raises(InvalidInput, match="closed; open the file again"):
        reader.read("data")


def test_encrypted_files_want_keys_and_plain_ones_can_be_kept_out() -> None:
    with pytest.raises(InvalidInput, match="encrypted; give the keys"):
        PackedReader.open(golden("e01_small"))
    with PackedReader.open(golden("e01_small"), keys=MockCipher(), require_encrypted=True) as found:
        assert found.read("enc_entry") == pattern(1024)
    with PackedReader.open(golden("c01_basic"), keys=MockCipher()) as found:
        assert found.read("data") == pattern(256)
    with pytest.raises(Corruption, match="is not encrypted"):
        PackedReader.open(golden("c01_basic"), keys=MockCipher(), require_encrypted=True)


# --- requests -------------------------------------------------------------------------------------


def requests(store: FaultStore, key: str, act: Callable[[PackedReader], Any], **how: Any) -> int:
    store.reset_log()
    with PackedReader.from_store(store, key, **how) as reader:
        act(reader)
    counts = store.counts
    assert set(counts) <= {"get_tail", "get_range"}
    return counts.total()


def test_a_small_entry_costs_two_requests_in_all(store: FaultStore) -> None:
    entries = {
        "first": pattern(1000),
        "within the first MiB": pattern(900_000),
        "far inside": pattern(200_000),
        "large": pattern(33 * MIB),
        "in the tail": pattern(5000),
    }
    store.put("plain.v3", pack(entries))
    store.put("sealed.v3", pack(entries, b"{}", MockCipher(), 16 * MIB))
    store.put("small slices.v3", pack(entries, b"{}", MockCipher(), 64 << 10))
    store.put("tiny.v3", golden("c01_basic"))
    store.put("wide.v3", golden("c05_large_directory"))
    for key in ("plain.v3", "sealed.v3", "small slices.v3"):
        how = {"keys": MockCipher()}
        for name, count in [
            ("first", 2),
            ("within the first MiB", 2),
            ("far inside", 3),
            ("large", 5),
            ("in the tail", 1),
        ]:
            assert requests(store, key, lambda reader, name=name: reader.read(name), **how) == count
            assert requests(store, key, lambda r, name=name: streamed(r, name), **how) == count
        twice = lambda reader: [reader.read("first"), reader.read("first")]  # noqa: E731
        assert requests(store, key, twice, **how) == 2
    assert requests(store, "tiny.v3", lambda reader: reader.read("data")) == 1
    assert requests(store, "wide.v3", lambda reader: reader.meta) == 2


def test_small_entries_are_kept_within_a_limit(store: FaultStore) -> None:
    entries = {str(n): pattern(SMALL_ENTRY_BYTES) for n in range(CACHE_BYTES // MIB + 2)}
    entries["large"] = pattern(SMALL_ENTRY_BYTES + 1)
    store.put("x.v3", pack(entries))
    with PackedReader.from_store(store, "x.v3") as reader:
        for name in entries:
            reader.read(name)
        store.reset_log()
        reader.read(str(len(entries) - 2))
        assert store.counts.total() == 0
        reader.read("0")
        reader.read("large")
        reader.read("large")
        assert store.counts.total() == 3
        assert reader._cache._used_bytes <= CACHE_BYTES


@pytest.mark.parametrize("size", [1000, 3 * MIB, 17 * MIB])
def test_the_magic_is_seen_before_data_is_handed_out(
    size: int, store: FaultStore, tmp_path: Path
) -> None:
    bad = b"MVSIDXV2" + pack({"x": pattern(size), "last": pattern(TAIL_BYTES)})[8:]
    store.put("bad.v3", bad)
    (tmp_path / "bad.v3").write_bytes(bad)
    for opened in (tmp_path / "bad.v3", bad):
        with pytest.raises(Corruption, match="begins with b'MVSIDXV2'"):
            PackedReader.open(opened)
    for act in (
        lambda reader: reader.read("x"),
        lambda reader: next(reader.stream("x")),
        lambda reader: reader.read_to_file("x", tmp_path / "out"),
    ):
        with (
            PackedReader.from_store(store, "bad.v3") as reader,
            pytest.raises(Corruption, match="begins with b'MVSIDXV2'"),
        ):
            act(reader)
    assert os.listdir(tmp_path) == ["bad.v3"]


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_nothing_wrong_is_ever_handed_out(encrypted: bool, tmp_path: Path) -> None:
    entries = {"good": pattern(100), "bad": pattern(35 * MIB), "fine": pattern(200)}
    cipher = MockCipher() if encrypted else None
    data = flipped(pack(entries, b"{}", cipher, 16 * MIB), 20 * MIB)
    (tmp_path / "bad").write_text("what was there before")
    with PackedReader.open(data, keys=cipher) as reader:
        with pytest.raises(Corruption, match="'bad' has the CRC-32C"):
            reader.read("bad")
        with pytest.raises(Corruption, match="'bad' has the CRC-32C"):
            reader.read_to_files({name: tmp_path / name for name in entries})
        assert os.listdir(tmp_path) == ["bad"]
        assert (tmp_path / "bad").read_text() == "what was there before"
        seen = []
        with pytest.raises(Corruption, match="'bad' has the CRC-32C"):
            seen.extend(len(piece) for piece in reader.stream("bad"))
        assert seen == [16 * MIB, 16 * MIB]
        assert reader.read("good") == entries["good"]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.v3"
    path.write_bytes(pack({"x": pattern(3 * MIB)}))
    with PackedReader.open(path) as reader:
        os.truncate(path, 2 * MIB)
        with pytest.raises(Corruption, match="ends before"):
            reader.read("x")
        path.unlink()


def test_a_store_that_flips_bits_is_found_out(store: FaultStore) -> None:
    entries = {"a": pattern(70_000), "b": pattern(2000), "c": pattern(90_000), "d": pattern(10)}
    for key, cipher in (("plain.v3", None), ("sealed.v3", MockCipher())):
        store.put(key, pack(entries, b'{"k":1}', cipher))
        for number in range(300):
            store.clear()
            store.inject(Fault.BIT_FLIP, op=("get_range", "get_tail"), nth=1 + number % 4)
            found = []
            try:
                with PackedReader.from_store(store, key, keys=cipher) as reader:
                    found.extend(bytes(reader.read(name)) for name in reader.names())
            except PenstockError:
                pass
            assert found == list(entries.values())[: len(found)]


# --- many at once, and stopping -------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_many_threads_read_the_same_entries(encrypted: bool, tmp_path: Path) -> None:
    entries = {"small": pattern(5000), "large": pattern(9 * MIB + 5), "empty": b""}
    cipher = MockCipher() if encrypted else None
    path = tmp_path / "x.v3"
    path.write_bytes(pack(entries, b"{}", cipher, MIB))
    budget = ByteBudget(3 * MIB)
    ways: list[Callable[[PackedReader, str], Any]] = [
        lambda reader, name: bytes(reader.read(name)),
        streamed,
        lambda reader, name: written(reader, name, tmp_path),
    ]
    asked = [(way, name) for way, name in itertools.product(ways, entries) for _ in range(4)]
    with (
        PackedReader.open(path, keys=cipher, budget=budget) as reader,
        ThreadPoolExecutor(8) as pool,
    ):
        found = pool.map(lambda ask: ask[0](reader, ask[1]), asked)
        for (_, name), data in zip(asked, found, strict=True):
            assert data == entries[name]
    assert budget.used_bytes == 0


def written(reader: PackedReader, name: str, scratch: Path) -> bytes:
    path = scratch / f"{threading.get_ident()} {name}"
    reader.read_to_file(name, path)
    return path.read_bytes()


def put_large(store: FaultStore, size: int = 112 * MIB) -> None:
    store.put("x.v3", pack({"x": pattern(size)}))
    store.reset_log()


def test_who_stops_listening_stops_the_reading(store: FaultStore) -> None:
    put_large(store)
    budget = ByteBudget(1 << 30)

    def consume(reader: PackedReader) -> None:
        for number, _ in enumerate(reader.stream("x")):
            if number == 2:
                raise ValueError("enough")

    with PackedReader.from_store(store, "x.v3", workers=3, budget=budget) as reader:
        with pytest.raises(ValueError, match="enough"):
            consume(reader)
        reader.stream("x").close()
    # Tail, magic, three pieces that were taken and at most two ahead of each.
    assert store.counts.total() <= 2 + 3 + 2
    assert budget.used_bytes == 0


def test_an_error_of_the_store_in_the_midst_ends_everything(
    store: FaultStore, tmp_path: Path
) -> None:
    put_large(store)
    for act in (
        lambda reader: reader.read("x"),
        lambda reader: streamed(reader, "x"),
        lambda reader: reader.read_to_file("x", tmp_path / "out"),
    ):
        store.clear()
        store.inject(Fault.FAIL_BEFORE, op="get_range", nth=5)
        budget = ByteBudget(64 * MIB)
        with (
            PackedReader.from_store(store, "x.v3", budget=budget) as reader,
            pytest.raises(StorageError),
        ):
            act(reader)
        assert budget.used_bytes == 0
        assert not os.listdir(tmp_path)


def test_a_stream_of_a_closed_reader_fails(store: FaultStore) -> None:
    put_large(store)
    reader = PackedReader.from_store(store, "x.v3")
    pieces = reader.stream("x")
    next(pieces)
    reader.close()
    with pytest.raises(InvalidInput, match="closed"):
        next(pieces)


# --- memory ---------------------------------------------------------------------------------------


def test_streams_that_share_a_budget_never_wait_for_each_other(store: FaultStore) -> None:
    put_large(store, 50 * MIB)
    for limit_bytes in (1, 16 * MIB, 40 * MIB):
        budget = ByteBudget(limit_bytes)
        most = 0
        with PackedReader.from_store(store, "x.v3", budget=budget) as reader:
            streams = [reader.stream("x") for _ in range(3)]
            taken = 0
            for turn in itertools.zip_longest(*streams):
                taken += sum(map(len, turn))
                most = max(most, budget.used_bytes)
            assert len(reader.read("x")) == 50 * MIB
        assert taken == 150 * MIB
        assert most <= limit_bytes + 16 * MIB
        assert budget.used_bytes == 0


def test_a_budget_lets_as_much_through_as_fits_and_one_more() -> None:
    budget = ByteBudget(10)
    ahead = budget.try_acquire(9)
    assert ahead is not None
    assert budget.try_acquire(2) is None
    with budget.acquire(1), budget.acquire(500):
        assert budget.used_bytes == 510
        waiting = threading.Thread(target=lambda: budget.acquire(3).release())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
    ahead.release()
    ahead.release()
    assert budget.used_bytes == 0
    with pytest.raises(InvalidInput, match="lets nothing through"):
        ByteBudget(0)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_memory_does_not_grow_with_the_entry(encrypted: bool, tmp_path: Path) -> None:
    size, workers = 192 * MIB, 5
    cipher = MockCipher() if encrypted else None
    path = tmp_path / "x.v3"
    path.write_bytes(pack({"x": pattern(size)}, b"{}", cipher, 16 * MIB))
    decrypting = min(workers, os.cpu_count() or 1) if encrypted else 0
    # A loop holds on to one piece of a stream until it has the next.
    limit_bytes = (workers + decrypting + 1) * 16 * MIB
    with PackedReader.open(path, keys=cipher, workers=workers) as reader:
        for act in (
            lambda: reader.read_to_file("x", tmp_path / "out"),
            lambda: [None for _ in reader.stream("x")],
        ):
            tracemalloc.start()
            try:
                act()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak <= limit_bytes + MIB
