"""What only happens between a client and a real S3 server, through a proxy that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import lance
import pyarrow as pa
import pytest
from tests.s3_proxy import Proxy, proxying
from tests.s3_server import S3Server

from penstock.errors import ObjectExists, PreconditionFailed, StorageError, WriterClosed
from penstock.storage.objects import ObjectStore, ObjectWriter
from penstock.storage.open import open_store
from penstock.storage.streams import PART_BYTES


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with proxying(s3.port) as server:
        yield server


@pytest.fixture
def store(s3: S3Server, proxy: Proxy) -> ObjectStore:
    options = s3.storage_options | {"aws_endpoint": proxy.endpoint, "client_max_retries": "1"}
    return open_store(s3.uri("proxied"), options)


def test_a_409_says_nothing_about_who_won_and_is_asked_again(
    store: ObjectStore, proxy: Proxy
) -> None:
    proxy.conflicts = 2
    etag = store.put_if_absent("wal/1", b"mine")
    assert (proxy.conflicts, proxy.puts) == (0, 3)
    proxy.conflicts = 3
    etag = store.put_if_match("wal/1", b"changed", etag)
    assert bytes(store.get("wal/1").data) == b"changed"

    proxy.conflicts = 1
    with pytest.raises(ObjectExists):
        store.put_if_absent("wal/1", b"theirs")
    proxy.conflicts = 1
    with pytest.raises(PreconditionFailed):
        store.put_if_match("wal/1", b"theirs", "stale")


def test_endless_409_is_given_up_as_unknown(store: ObjectStore, proxy: Proxy) -> None:
    proxy.conflicts = 1_000
    with pytest.raises(StorageError, match="409 Conflict 6 times") as caught:
        store.put_if_absent("wal/1", b"mine")
    assert type(caught.value) is StorageError
    assert proxy.puts == 6


def test_a_lost_answer_comes_back_as_the_echo_of_ones_own_put(
    store: ObjectStore, proxy: Proxy
) -> None:
    """Why the WAL compares write ids before it believes `ObjectExists`."""
    proxy.lost_answers = 1
    with pytest.raises(ObjectExists):
        store.put_if_absent("wal/1", b"mine")
    assert bytes(store.get("wal/1").data) == b"mine"


def test_a_large_stream_goes_up_in_parts_side_by_side_and_a_small_one_at_once(
    store: ObjectStore, proxy: Proxy
) -> None:
    proxy.together = threading.Barrier(2)
    whole = bytes(range(251)) * (4 * PART_BYTES // 251)
    with store.open_writer("large") as writer:
        writer.write(whole)
        writer.commit()
    assert bytes(store.get("large").data) == whole
    assert proxy.puts == 4
    with store.open_writer("small") as writer:
        writer.write(whole[:PART_BYTES])
        writer.commit()
    assert len(store.get("small").data) == PART_BYTES
    assert proxy.puts == 5


@pytest.mark.parametrize("refused", ["?uploads", "partNumber=1&", "partNumber=5&", "?uploadId="])
def test_an_upload_that_fails_anywhere_leaves_nothing(
    store: ObjectStore, proxy: Proxy, s3: S3Server, refused: str
) -> None:
    proxy.refused = refused if "partNumber" in refused else f"POST {store.uri[4:]}/large{refused}"
    with store.open_writer("large") as writer:
        with pytest.raises(StorageError, match=r"(write|commit) of 'large' in s3://"):
            write_all(writer)
        with pytest.raises(WriterClosed):
            writer.commit()
    assert not store.exists("large")
    proxy.refused = ""
    assert s3.unfinished_uploads() == 0


def write_all(writer: ObjectWriter) -> None:
    for _ in range(10):
        writer.write(bytes(PART_BYTES))
    writer.commit()


def test_one_dict_of_options_serves_lance_and_us(s3: S3Server) -> None:
    ours = open_store(s3.uri("shared"), s3.storage_options)
    table = pa.table({"id": [1, 2, 3]})
    lance.write_dataset(table, f"{ours.uri}/docs", storage_options=ours.storage_options)
    assert ours.list_dirs() == ["docs"]
    assert {"_versions", "data"} <= set(ours.list_dirs("docs"))
    read = lance.dataset(f"{ours.uri}/docs", storage_options=ours.storage_options)
    assert read.count_rows() == 3
    ours.delete_prefix("docs")
    assert list(ours.list()) == []
