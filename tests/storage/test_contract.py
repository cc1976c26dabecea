"""One contract, every store: what `storage.objects` promises, asked of each implementation."""

from __future__ import annotations

import hashlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.s3_server import S3Server

from penstock.errors import (
    Corruption,
    InvalidInput,
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
    WriterClosed,
)
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore, check_key
from penstock.storage.open import open_store
from penstock.storage.streams import PART_BYTES


@pytest.fixture(params=["plain", "behind faults"])
def store(request: pytest.FixtureRequest, any_store: ObjectStore) -> ObjectStore:
    if request.param == "plain":
        return any_store
    return FaultStore(any_store, SystemClock(), SeededEntropy(1))


def test_what_is_put_is_got_in_whole_and_in_part(store: ObjectStore) -> None:
    parts = [b"one ", memoryview(b"two "), pa.py_buffer(b"three"), b""]
    etag = store.put("a/b/object", parts)

    whole = store.get("a/b/object")
    assert bytes(whole.data) == b"one two three"
    assert bytes(store.get_range("a/b/object", 4, 3)) == b"two"
    assert bytes(store.get_range("a/b/object", 13, 0)) == b""
    meta = store.head("a/b/object")
    assert (meta.key, meta.size_bytes) == ("a/b/object", 13)
    assert whole.etag == meta.etag == etag

    store.put("a/b/object", b"")
    assert bytes(store.get("a/b/object").data) == b""
    assert store.head("a/b/object").etag != etag


def test_a_range_past_the_end_is_an_error_never_a_short_answer(store: ObjectStore) -> None:
    store.put("short", b"12345")
    for start, length in ((3, 3), (5, 1), (9, 1)):
        with pytest.raises(Corruption, match=r"short .* ends at byte 5"):
            store.get_range("short", start, length)
    with pytest.raises(InvalidInput):
        store.get_range("short", -1, 2)


def test_the_tail_comes_with_the_size(store: ObjectStore) -> None:
    store.put("a/b", b"12345")
    store.put("empty", b"")
    for length, data in ((2, b"45"), (5, b"12345"), (9, b"12345"), (0, b"")):
        tail = store.get_tail("a/b", length)
        assert (bytes(tail.data), tail.size_bytes) == (data, 5)
    tail = store.get_tail("empty", 4)
    assert (bytes(tail.data), tail.size_bytes) == (b"", 0)
    with pytest.raises(InvalidInput):
        store.get_tail("a/b", -1)


def test_a_missing_object_is_not_found_and_may_be_deleted(store: ObjectStore) -> None:
    store.put("a/b", b"1")
    for key in ("a", "b", "a/b/c", "x/y"):
        with pytest.raises(ObjectNotFound, match=key):
            store.get(key)
        with pytest.raises(ObjectNotFound, match=key):
            store.head(key)
        with pytest.raises(ObjectNotFound, match=key):
            store.get_range(key, 0, 1)
        with pytest.raises(ObjectNotFound, match=key):
            store.get_tail(key, 1)
        store.delete(key)
    assert [meta.key for meta in store.list()] == ["a/b"]


def test_listings_are_in_key_order_and_by_whole_directories(store: ObjectStore) -> None:
    keys = ["a/b", "a-b", "a.b/c", "a/b-c/d", "a/c/d/e", "ab/c", "z é %20#?/ü", "a/B", "a/c/a"]
    for key in keys:
        store.put(key, key.encode())

    assert [meta.key for meta in store.list()] == sorted(keys)
    assert [meta.key for meta in store.list("a")] == ["a/B", "a/b", "a/b-c/d", "a/c/a", "a/c/d/e"]
    assert [meta.key for meta in store.list("a/c/")] == ["a/c/a", "a/c/d/e"]
    assert [meta.size_bytes for meta in store.list("ab")] == [4]
    assert list(store.list("nowhere/at/all")) == list(store.list("a-b")) == []
    assert store.list_dirs() == ["a", "a.b", "ab", "z é %20#?"]
    assert store.list_dirs("a") == ["b-c", "c"]
    assert store.list_dirs("nowhere") == store.list_dirs("a-b") == []

    store.delete("ab/c")
    assert "ab" not in store.list_dirs()


def test_a_child_is_the_same_store_from_a_deeper_root(store: ObjectStore) -> None:
    child = store.child("lake").child("docs/")
    child.put("wal/1", b"row")
    assert bytes(store.get("lake/docs/wal/1").data) == b"row"
    assert [meta.key for meta in child.list()] == ["wal/1"]
    assert child.list_dirs() == ["wal"]
    assert child.uri == f"{store.uri}/lake/docs"
    assert store.child("").uri == store.uri


def test_put_if_absent_never_overwrites(store: ObjectStore) -> None:
    etag = store.put_if_absent("wal/1", [b"fir", b"st"])
    with pytest.raises(ObjectExists, match="wal/1"):
        store.put_if_absent("wal/1", b"second")
    assert bytes(store.get("wal/1").data) == b"first"
    assert store.head("wal/1").etag == etag
    store.delete("wal/1")
    store.put_if_absent("wal/1", b"third")


def test_put_if_match_needs_the_version_that_is_there(store: ObjectStore) -> None:
    with pytest.raises(PreconditionFailed, match="manifest"):
        store.put_if_match("manifest", b"0", "no such version")
    first = store.put("manifest", b"1")
    second = store.put_if_match("manifest", b"2", first)
    with pytest.raises(PreconditionFailed, match="manifest"):
        store.put_if_match("manifest", b"lost update", first)
    assert store.put_if_match("manifest", b"3", second) == store.get("manifest").etag
    assert bytes(store.get("manifest").data) == b"3"


def test_a_stream_is_visible_only_when_it_is_committed(store: ObjectStore) -> None:
    store.put("a/b", b"old")
    for sizes in ((), (3,), (PART_BYTES,), (PART_BYTES - 1, 2, 300_000), (2 * PART_BYTES + 7,)):
        reused = bytearray(max(sizes, default=0))
        written = hashlib.sha256()
        with store.open_writer("a/b") as writer:
            for n, size in enumerate(sizes):
                view = memoryview(reused)[:size]
                view[:] = bytes([n + 1]) * size
                written.update(view)
                writer.write(view)
                # What was written must not change with the buffer it came in.
                view[:] = bytes(size)
            assert bytes(store.get("a/b").data) == b"old"
            assert [meta.key for meta in store.list()] == ["a/b"]
            writer.commit()
            writer.commit()
            writer.abort()
        assert hashlib.sha256(store.get("a/b").data).digest() == written.digest()
        with pytest.raises(WriterClosed):
            writer.write(b"more")
        store.put("a/b", b"old")


def test_a_stream_that_is_not_committed_leaves_nothing(store: ObjectStore) -> None:
    for size in (0, 10, PART_BYTES + 1, 3 * PART_BYTES):
        with store.open_writer("x/y") as writer:
            writer.write(bytes(size))
        with pytest.raises(WriterClosed, match="x/y"):
            writer.commit()
        writer.abort()

        def interrupted(size: int = size) -> None:
            with store.open_writer("x/y") as writer:
                writer.write(bytes(size))
                raise KeyError

        with pytest.raises(KeyError):
            interrupted()
    assert not store.exists("x/y")
    assert not list(store.list())
    for wrong in (-1, 6 << 40):
        with pytest.raises(InvalidInput, match="no size"):
            store.open_writer("x/y", expected_bytes=wrong)


def test_a_copy_is_young_and_outlives_what_it_was_made_of(store: ObjectStore) -> None:
    began_ms = _written_at_ms(store, "before")
    store.put("a/original", b"rows")
    if isinstance(store, LocalStore):
        os.utime(f"{store.uri}/a/original", (1_000_000, 1_000_000))
    store.copy("a/original", "b/copy")
    assert store.head("b/copy").modified_ms >= began_ms
    store.delete_prefix("a")
    assert bytes(store.get("b/copy").data) == b"rows"
    with pytest.raises(ObjectNotFound):
        store.copy("a/original", "b/another")
    assert not store.exists("b/another")


def _written_at_ms(store: ObjectStore, key: str) -> int:
    store.put(key, b"")
    return store.head(key).modified_ms


def test_of_many_threads_exactly_one_creates(store: ObjectStore) -> None:
    def create(n: int) -> bool:
        try:
            store.put_if_absent("race/position", str(n).encode())
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(24)))
    assert won.count(True) == 1
    assert bytes(store.get("race/position").data) == str(won.index(True)).encode()


def test_no_increment_is_lost_between_threads(store: ObjectStore) -> None:
    store.put("counter", b"0")

    def increment(_: int) -> None:
        for _attempt in range(500):
            found = store.get("counter")
            try:
                store.put_if_match("counter", b"%d" % (int(found.data.tobytes()) + 1), found.etag)
                return
            except PreconditionFailed:
                continue
        raise AssertionError("no progress")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(20)))
    assert bytes(store.get("counter").data) == b"20"


def test_a_prefix_is_deleted_whole_and_alone(store: ObjectStore) -> None:
    for key in ("docs/1", "docs/a/2", "docs/a/b/3", "docs2/1", "doc"):
        store.put(key, b"x")
    store.delete_prefix("docs")
    store.delete_prefix("docs")
    assert [meta.key for meta in store.list()] == ["doc", "docs2/1"]
    store.put_if_absent("docs/a/2", b"made anew")
    store.sync("docs")
    store.child("docs").delete_prefix("")
    assert store.list_dirs() == ["docs2"]


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "a\0b",
    "a\nb",
    "a\\b",
    "x" * 256,
    "ü" * 128,
    "/".join(["x" * 200] * 6),
    "_penstock/tmp/x",
    "t/_penstock/tmp",
    "\udc80",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_bad_key_is_refused_by_every_operation(store: ObjectStore, key: str) -> None:
    for call in (store.get, store.head, store.delete):
        with pytest.raises(InvalidInput, match="cannot name an object"):
            call(key)
    for pair in ((key, "fine"), ("fine", key)):
        with pytest.raises(InvalidInput, match="cannot name an object"):
            store.copy(*pair)
    with pytest.raises(InvalidInput, match="cannot name an object"):
        store.open_writer(key)
    for put in (store.put, store.put_if_absent):
        with pytest.raises(InvalidInput, match="cannot name an object"):
            put(key, b"")
    with pytest.raises(InvalidInput, match="cannot name an object"):
        store.put_if_match(key, b"", "etag")
    if key not in ("", "a/"):
        with pytest.raises(InvalidInput, match="cannot name an object"):
            list(store.list(key))
    assert list(store.list()) == []


segments = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="/\\"), min_size=1
)


@given(key=st.lists(segments, min_size=1, max_size=4).map("/".join), data=st.binary(max_size=64))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_good_key_keeps_any_bytes(tmp_path: Path, key: str, data: bytes) -> None:
    stores = (LocalStore(tmp_path / "keys"), open_store("memory://"))
    try:
        check_key(key)
    except InvalidInput:
        for store in stores:
            with pytest.raises(InvalidInput):
                store.put(key, data)
        return
    for store in stores:
        etag = store.put(key, data)
        assert bytes(store.get(key).data) == data
        assert store.head(key).etag == etag
        assert [meta.key for meta in store.list()] == [key]
        store.delete_prefix("")


def test_stores_travel_to_other_processes(tmp_path: Path, s3: S3Server) -> None:
    for opened in (open_store(tmp_path), open_store(s3.uri(), s3.storage_options)):
        child = opened.child("a/b")
        child.put("c", b"d")
        again = pickle.loads(pickle.dumps(child))
        assert again.uri == child.uri
        assert again.storage_options == child.storage_options
        assert bytes(again.get("c").data) == b"d"
    with pytest.raises(InvalidInput, match="one process"):
        pickle.dumps(open_store("memory://"))


def test_locations_are_understood_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("lake").uri == open_store(f"file://{tmp_path}/lake").uri == f"{tmp_path}/lake"
    assert open_store("file:///a%20b").uri == "/a b"
    assert open_store(f"{tmp_path}/x/../lake/").uri == f"{tmp_path}/lake"
    held = open_store("memory://shared/a")
    held.put("k", b"v")
    assert bytes(open_store("memory://shared").get("a/k").data) == b"v"
    assert list(open_store("memory://other").list()) == []
    assert open_store("s3://bucket/a/b/", {"region": "eu-west-1"}).uri == "s3://bucket/a/b"
    azure = {"account_name": "x", "account_key": "YWJj"}
    assert open_store("az://container/a", azure).uri == "az://container/a"
    google = {"google_skip_signature": "true"}
    assert open_store("gs://bucket", google).uri == "gs://bucket"

    for wrong in (
        "",
        "http://x/y",
        "hdfs://x",
        "s3://",
        "s3://b/k?x=1",
        "s3://u:p@b/k",
        "file://h/x",
    ):
        with pytest.raises(InvalidInput):
            open_store(wrong)
    with pytest.raises(InvalidInput, match="storage_options"):
        open_store("s3://bucket", {"client_max_retries": "many"})


def test_a_store_that_cannot_be_reached_is_named(s3: S3Server) -> None:
    options = s3.storage_options | {"client_max_retries": "0", "only_lance_knows": "this"}
    with pytest.raises(StorageError, match=r"put of 'k' in s3://no-such-bucket failed"):
        open_store("s3://no-such-bucket", options).put("k", b"")
    with pytest.raises(ObjectNotFound):
        open_store(s3.uri(), options).get("k")
    nobody = options | {"aws_endpoint": "http://127.0.0.1:9"}
    with pytest.raises(StorageError, match="put_if_absent of 'k' in s3://penstock"):
        open_store("s3://penstock", nobody).put_if_absent("k", b"")
