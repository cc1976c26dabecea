"""Stores that keep their word pass; each way of lying about conditional puts is refused."""

from __future__ import annotations

import time

import pytest

from penstock.errors import ObjectExists, PreconditionFailed, StoreUnsupported
from penstock.storage.clock import SystemClock
from penstock.storage.entropy import SeededEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.objects import ObjectStore, Payload
from penstock.storage.open import open_store
from penstock.storage.probe import probe_conditional_puts
from penstock.storage.remote import RemoteStore


def test_honest_stores_pass_for_a_few_requests_and_stay_clean(any_store: ObjectStore) -> None:
    counted = FaultStore(any_store, SystemClock(), SeededEntropy(1))
    probe_conditional_puts(counted)
    assert sum(counted.counts.values()) <= 16
    assert list(any_store.list()) == []


def test_an_answer_lost_on_the_way_is_not_held_against_the_store() -> None:
    store = FaultStore(open_store("memory://"), SystemClock(), SeededEntropy(1))
    store.inject(Fault.DUPLICATE, op="put_if_absent", nth=1)
    store.inject(Fault.DUPLICATE, op="put_if_match", nth=1)
    probe_conditional_puts(store)
    assert list(store.list()) == []


class Liar(RemoteStore):
    """A memory store that gets one thing wrong."""

    def __init__(self, lie: str) -> None:
        honest = open_store("memory://")
        assert isinstance(honest, RemoteStore)
        super().__init__(honest._backend, "memory", "", "", {})
        self.lie = lie

    def put_if_absent(self, key: str, data: Payload) -> str:
        if self.lie == "ignores if-none-match":
            return self.put(key, data)
        if self.lie == "looks before it writes":
            if any(meta.key == key for meta in self.list()):
                raise ObjectExists(key)
            time.sleep(0.01)
            return self.put(key, data)
        if self.lie == "refuses but writes":
            try:
                return super().put_if_absent(key, data)
            except ObjectExists:
                self.put(key, data)
                raise
        if self.lie == "never creates":
            raise ObjectExists(key)
        return super().put_if_absent(key, data)

    def put_if_match(self, key: str, data: Payload, etag: str) -> str:
        if self.lie == "ignores if-match":
            return self.put(key, data)
        if self.lie == "never replaces":
            raise PreconditionFailed(key)
        return super().put_if_match(key, data, etag)


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        ("ignores if-none-match", "threads at once created the same object"),
        ("looks before it writes", "threads at once created the same object"),
        ("refuses but writes", "created only if absent was overwritten"),
        ("never creates", "no one of several threads"),
        ("ignores if-match", "an outdated etag was accepted"),
        ("never replaces", "with the current etag was refused"),
    ],
)
def test_each_lie_is_named_and_refused(lie: str, named: str) -> None:
    store = Liar(lie)
    with pytest.raises(StoreUnsupported, match=f"memory://.*{named}.*use a store with"):
        probe_conditional_puts(store)
    assert list(store.list()) == []
