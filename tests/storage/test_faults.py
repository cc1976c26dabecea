"""The store that fails on purpose does exactly what its plan says, and writes down what it did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import (
    InvalidInput,
    ObjectExists,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
    WriterClosed,
)
from penstock.storage.clock import SimulatedClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import READS, WRITES, Fault, FaultStore
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store


@pytest.fixture
def inner() -> ObjectStore:
    return open_store("memory://")


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def store(inner: ObjectStore, clock: SimulatedClock) -> FaultStore:
    return FaultStore(inner, clock, SeededEntropy(5))


def test_failing_before_and_after_differ_only_in_what_is_stored(store: FaultStore) -> None:
    store.inject(Fault.FAIL_BEFORE, op="put_if_absent", key="*/wal/*", nth=2)
    store.inject(Fault.FAIL_AFTER, op="put_if_absent", key="*/wal/*", nth=3)
    docs = store.child("docs")
    docs.put_if_absent("wal/1", b"1")
    with pytest.raises(StorageError, match=r"docs/wal/2 never arrived"):
        docs.put_if_absent("wal/2", b"2")
    with pytest.raises(StorageError, match=r"docs/wal/3 was lost"):
        docs.put_if_absent("wal/3", b"3")
    docs.put_if_absent("wal/4", b"4")
    assert [meta.key for meta in store.list()] == ["docs/wal/1", "docs/wal/3", "docs/wal/4"]

    assert [(call.op, call.key, call.outcome) for call in store.log] == [
        ("put_if_absent", "docs/wal/1", "ok"),
        ("put_if_absent", "docs/wal/2", "StorageError"),
        ("put_if_absent", "docs/wal/3", "StorageError"),
        ("put_if_absent", "docs/wal/4", "ok"),
        ("list", "", "ok"),
    ]
    assert store.log[1].faults == (Fault.FAIL_BEFORE,)
    assert store.counts == docs.counts == {"put_if_absent": 4, "list": 1}
    store.reset_log()
    assert not store.log
    assert not store.counts


def test_a_duplicate_delivery_answers_with_the_second(store: FaultStore) -> None:
    store.inject(Fault.DUPLICATE, op=("put_if_absent", "put_if_match"))
    with pytest.raises(ObjectExists):
        store.put_if_absent("a", b"1")
    found = store.get("a")
    assert bytes(found.data) == b"1"
    with pytest.raises(PreconditionFailed):
        store.put_if_match("a", b"2", found.etag)
    store.clear()
    assert bytes(store.get("a").data) == b"2"


def test_delays_pass_on_the_injected_clock(store: FaultStore, clock: SimulatedClock) -> None:
    at: list[float] = []
    store.inject(Fault.DELAY, op="put", delay_ms=300, after=lambda *_: at.append(now()))
    store.inject(Fault.DELAY_ANSWER, op="put", delay_ms=40)

    def now() -> float:
        return clock.monotonic_ms()

    store.put("a", b"")
    assert (at, now()) == ([300], 340)


def test_a_torn_put_leaves_half_and_only_befalls_put(store: FaultStore) -> None:
    store.inject(Fault.TORN)
    with pytest.raises(StorageError, match="torn"):
        store.put("a", [b"1234", b"5678"])
    assert bytes(store.get("a").data) == b"1234"
    store.put_if_absent("b", b"1234")
    with pytest.raises(InvalidInput, match="cannot befall"):
        store.inject(Fault.TORN, op="put_if_absent")


def test_a_flipped_bit_is_one_bit_of_the_answer(store: FaultStore) -> None:
    data = bytes(range(256))
    store.put("a", data)
    store.inject(Fault.BIT_FLIP, times=2)
    for wrong in (store.get("a").data, store.get_range("a", 0, 256)):
        difference = int.from_bytes(wrong, "big") ^ int.from_bytes(data, "big")
        assert difference.bit_count() == 1
    assert bytes(store.get("a").data) == data


def test_a_stale_listing_is_that_of_an_earlier_moment(store: FaultStore) -> None:
    store.put("t/wal/1", b"")
    store.inject(Fault.STALE_LIST, times=3)
    store.put("t/wal/2", b"")
    store.put("t/new/1", b"")
    store.delete("t/wal/1")
    child = store.child("t")
    assert [meta.key for meta in store.list("t")] == ["t/wal/1"]
    assert [meta.key for meta in child.list("wal/")] == ["wal/1"]
    assert child.list_dirs() == ["wal"]
    assert child.list_dirs() == ["new", "wal"]


def test_statuses_are_what_callers_see_of_them(store: FaultStore) -> None:
    etag = store.put("a", b"1")
    store.inject(Fault.HTTP_412, key="a", times=2)
    with pytest.raises(ObjectExists):
        store.put_if_absent("a", b"")
    with pytest.raises(PreconditionFailed):
        store.put_if_match("a", b"2", etag)
    store.inject(Fault.HTTP_409, times=1)
    with pytest.raises(StorageError, match="409") as caught:
        store.put_if_absent("b", b"")
    assert type(caught.value) is StorageError
    store.inject(Fault.HTTP_404, times=2)
    with pytest.raises(ObjectNotFound):
        store.get("a")
    with pytest.raises(PreconditionFailed):
        store.put_if_match("a", b"2", etag)
    assert bytes(store.get("a").data) == b"1"
    assert [meta.key for meta in store.list()] == ["a"]


def test_chance_replays_from_its_seed() -> None:
    def outcomes(seed: int) -> list[str]:
        store = FaultStore(open_store("memory://"), SimulatedClock(), SeededEntropy(seed))
        rule = store.inject(Fault.FAIL_BEFORE, op=WRITES, probability=0.3)
        for n in range(200):
            try:
                store.put(str(n), b"")
            except StorageError:
                continue
        assert rule.matched == 200
        assert 30 < rule.fired < 90
        return [call.outcome for call in store.log]

    assert outcomes(1) == outcomes(1) != outcomes(2)


def test_two_writers_are_interleaved_at_will(store: FaultStore) -> None:
    """Between one writer's read and its swap another one comes first, every time."""

    def overtake(op: str, key: str) -> None:
        found = store.get("counter")
        store.put_if_match("counter", bytes(found.data) + b"B", found.etag)

    store.put("counter", b"")
    store.hook(op="put_if_match", key="counter", nth=1, before=overtake)
    found = store.get("counter")
    with pytest.raises(PreconditionFailed):
        store.put_if_match("counter", bytes(found.data) + b"A", found.etag)
    assert bytes(store.get("counter").data) == b"B"

    arrived, go_on = threading.Event(), threading.Event()

    def stall(op: str, key: str) -> None:
        arrived.set()
        assert go_on.wait(10)

    store.hook(op="put", key="slow", before=stall)
    writer = threading.Thread(target=store.put, args=("slow", b"late"))
    writer.start()
    assert arrived.wait(10)
    with pytest.raises(ObjectNotFound):
        store.get("slow")
    go_on.set()
    writer.join()
    assert bytes(store.get("slow").data) == b"late"


KILLED = """
import os, signal, sys
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import WRITES, FaultStore
from penstock.storage.local import LocalStore
store = FaultStore(LocalStore(sys.argv[1]), SystemClock(), SeededEntropy(1))
kill = lambda op, key: os.kill(os.getpid(), signal.SIGKILL)
store.hook(op=WRITES, nth=3, **{sys.argv[2]: kill})
for n in range(1, 9):
    store.put_if_absent(f"wal/{n}", b"row")
"""


@pytest.mark.parametrize(("when", "survived"), [("before", 2), ("after", 3)])
def test_a_process_dies_at_the_durable_step_it_was_told_to(
    tmp_path: Path, when: str, survived: int
) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(LocalStore(tmp_path).list())) == survived
    assert os.path.isdir(tmp_path / "wal")


def test_every_call_of_the_seam_can_fail(store: FaultStore) -> None:
    opened = [store.open_writer("a"), store.open_writer("b")]
    store.reset_log()
    store.inject(Fault.FAIL_BEFORE)
    calls = {
        "get": lambda: store.get("a"),
        "get_range": lambda: store.get_range("a", 0, 1),
        "get_tail": lambda: store.get_tail("a", 1),
        "head": lambda: store.head("a"),
        "exists": lambda: store.exists("a"),
        "list": lambda: list(store.list()),
        "list_dirs": lambda: store.list_dirs(),
        "put": lambda: store.put("a", b""),
        "put_if_absent": lambda: store.put_if_absent("a", b""),
        "put_if_match": lambda: store.put_if_match("a", b"", "etag"),
        "open_writer": lambda: store.open_writer("a"),
        "write": lambda: opened[0].write(b""),
        "commit": lambda: opened[1].commit(),
        "copy": lambda: store.copy("a", "b"),
        "delete": lambda: store.delete("a"),
        "delete_prefix": lambda: store.delete_prefix("a"),
        "sync": lambda: store.sync("a"),
    }
    assert calls.keys() == READS | WRITES
    for call in calls.values():
        with pytest.raises(StorageError, match="injected"):
            call()
    assert store.counts == dict.fromkeys(calls, 1)
    store.clear()
    for writer in opened:
        with pytest.raises(WriterClosed):
            writer.commit()
    assert not list(store.list())


def test_a_stream_fails_in_its_middle_or_at_its_end(store: FaultStore) -> None:
    store.inject(Fault.FAIL_BEFORE, op="write", key="middle", nth=2)
    store.inject(Fault.FAIL_AFTER, op="commit", key="end")
    for key, committed in (("middle", False), ("end", True), ("fine", True)):
        try:
            with store.open_writer(key) as writer:
                for part in (b"a", b"b", b"c"):
                    writer.write(part)
                writer.commit()
        except StorageError:
            assert key != "fine"
        assert store.exists(key) == committed
    with pytest.raises(InvalidInput, match="cannot befall"):
        store.inject(Fault.DUPLICATE, op="write")
