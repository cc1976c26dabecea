"""One lease, several would-be holders, clocks that jump, answers that get lost."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.errors import Corruption, InvalidInput, LeaseHeld, LeaseLost, StorageError
from penstock.storage.clock import SimulatedClock, SystemClock
from penstock.storage.entropy import SeededEntropy, SystemEntropy
from penstock.storage.faults import Fault, FaultStore
from penstock.storage.lease import LeaseKeeper
from penstock.storage.objects import ObjectStore
from penstock.storage.open import open_store
from penstock.storage.retry import Backoff

TTL_MS = 60_000


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def store(clock: SimulatedClock) -> FaultStore:
    return FaultStore(open_store("memory://"), clock, SeededEntropy(3))


def keeper(store: ObjectStore, holder: str, clock: SimulatedClock) -> LeaseKeeper:
    entropy = SeededEntropy(hash_of(holder))
    return LeaseKeeper(store, "ns/lease.json", holder, ttl_ms=TTL_MS, clock=clock, entropy=entropy)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "big")


def test_a_lease_passes_from_hand_to_hand_with_rising_tokens(
    any_store: ObjectStore, clock: SimulatedClock
) -> None:
    ann, bob = keeper(any_store, "ann", clock), keeper(any_store, "bob", clock)
    mine = ann.acquire()
    assert mine.token == 1
    with pytest.raises(LeaseHeld, match=r"ns/lease.json in .* is held by ann with token 1"):
        bob.acquire()

    clock.advance(TTL_MS / 2)
    mine = ann.renew(mine)
    clock.advance(TTL_MS * 0.9)
    ann.check(mine)
    with pytest.raises(LeaseHeld):
        bob.acquire()
    assert ann.release(mine)
    assert bob.acquire().token == 2

    clock.advance(TTL_MS + 1)
    assert ann.acquire().token == 3
    stored = json.loads(bytes(any_store.get("ns/lease.json").data))
    assert (stored["holder"], stored["fencing_token"]) == ("ann", 3)
    assert stored["acquired_at"] == "2023-11-14T22:15:44.001Z"
    assert stored["expires_at"] == "2023-11-14T22:16:44.001Z"


def test_failure_26_release_after_a_takeover_changes_nothing(
    store: FaultStore, clock: SimulatedClock
) -> None:
    """Read-then-write would overwrite the new holder, and the next token would be a repeat."""
    ann, bob, eve = (keeper(store, name, clock) for name in ("ann", "bob", "eve"))
    late = ann.acquire()
    taken = []

    def take_over(op: str, key: str) -> None:
        if not taken:
            clock.advance(TTL_MS + 1)
            taken.append(bob.acquire())

    store.hook(op="put_if_match", nth=1, before=take_over)
    assert not ann.release(late)
    stored = bob.read()
    assert stored is not None
    assert (stored.holder, stored.token, stored.released) == ("bob", 2, False)
    with pytest.raises(LeaseHeld):
        eve.acquire()
    with pytest.raises(LeaseLost, match="token 1 is no longer held: it is bob's with token 2"):
        ann.renew(late)
    assert bob.release(taken[0])
    assert eve.acquire().token == 3
    assert not bob.release(taken[0])
    assert store.counts["put"] == store.counts["delete"] == 0


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DUPLICATE])
def test_a_lost_answer_neither_loses_the_lease_nor_skips_its_owner(
    store: FaultStore, clock: SimulatedClock, fault: Fault
) -> None:
    ann, bob = keeper(store, "ann", clock), keeper(store, "bob", clock)
    store.inject(fault, op=("put_if_absent", "put_if_match"), nth=1)
    mine = ann.acquire()
    assert (mine.holder, mine.token) == ("ann", 1)
    store.inject(fault, op="put_if_match", nth=1)
    clock.advance(TTL_MS * 0.9)
    mine = ann.renew(mine)
    clock.advance(TTL_MS * 0.9)
    ann.check(mine)
    store.inject(fault, op="put_if_match", nth=1)
    store.inject(Fault.FAIL_BEFORE, op="get", nth=1)
    assert ann.release(mine)
    assert bob.acquire().token == 2


def test_a_store_that_stays_silent_is_reported_after_a_bounded_number_of_tries(
    store: FaultStore, clock: SimulatedClock
) -> None:
    ann = keeper(store, "ann", clock)
    mine = ann.acquire()
    store.inject(Fault.FAIL_BEFORE)
    for attempt in (lambda: ann.renew(mine), lambda: ann.release(mine), ann.acquire):
        with pytest.raises(StorageError, match=r"ns/lease\.json"):
            attempt()
    assert sum(store.counts.values()) < 40


def test_the_holders_wall_clock_may_jump(store: FaultStore) -> None:
    clocks = SimulatedClock(), SimulatedClock()
    ann, bob = keeper(store, "ann", clocks[0]), keeper(store, "bob", clocks[1])
    mine = ann.acquire()
    clocks[0].jump_wall(-1_000_000_000)
    ann.check(mine)
    clocks[0].advance(TTL_MS)
    with pytest.raises(LeaseLost, match="token 1 ran out"):
        ann.check(mine)

    mine = ann.renew(mine)
    ann.check(mine)
    clocks[0].jump_wall(2_000_000_000)
    ann.check(mine)
    mine = ann.renew(mine)

    with pytest.raises(LeaseHeld):
        bob.acquire()
    clocks[1].advance(TTL_MS)
    with pytest.raises(LeaseHeld):
        bob.acquire()
    clocks[1].advance(1)
    assert bob.acquire().token == 2, "a stamp from the far future does not hold for ever"
    with pytest.raises(LeaseLost):
        ann.renew(mine)


def test_a_delay_longer_than_the_lease_is_noticed_by_its_holder(
    store: FaultStore, clock: SimulatedClock
) -> None:
    ann = keeper(store, "ann", clock)
    store.inject(Fault.DELAY_ANSWER, op="put_if_absent", delay_ms=TTL_MS)
    mine = ann.acquire()
    with pytest.raises(LeaseLost):
        ann.check(mine)
    ann.check(ann.renew(mine))


def test_waiting_gets_the_lease_once_it_expires(store: FaultStore, clock: SimulatedClock) -> None:
    keeper(store, "ann", clock).acquire()
    with pytest.raises(LeaseHeld):
        keeper(store, "bob", clock).acquire(wait_ms=TTL_MS / 2)
    assert keeper(store, "bob", clock).acquire(wait_ms=TTL_MS).token == 2


def test_tokens_are_unique_among_racing_threads(any_store: ObjectStore) -> None:
    tokens = []

    def work(n: int) -> None:
        ours = LeaseKeeper(any_store, "lease", str(n), ttl_ms=30_000, backoff=Backoff(20, 1, 20))
        lease = ours.acquire()
        tokens.append(lease.token)
        assert ours.release(lease)

    def patient(n: int) -> None:
        for _ in range(400):
            try:
                return work(n)
            except LeaseHeld:
                SystemClock().sleep_ms(SystemEntropy().uniform(0, 10))
        raise AssertionError("never got the lease")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(patient, range(8)))
    assert tokens == list(range(1, 9))


def test_failure_32_a_held_lease_is_renewed_while_the_work_goes_on() -> None:
    store = open_store("memory://")
    ann = LeaseKeeper(store, "lease", "ann", ttl_ms=300)
    bob = LeaseKeeper(store, "lease", "bob", ttl_ms=300)
    with ann.hold() as held:
        for _ in range(6):
            threading.Event().wait(0.1)
            held.check()
            with pytest.raises(LeaseHeld):
                bob.acquire()
        assert held.token == 1
    assert bob.acquire().token == 2


def test_work_under_a_lost_lease_is_told_to_stop(store: FaultStore, clock: SimulatedClock) -> None:
    ann, bob = keeper(store, "ann", clock), keeper(store, "bob", clock)

    def work() -> None:
        with ann.hold() as held:
            clock.advance(TTL_MS + 1)
            bob.acquire()
            with pytest.raises(LeaseLost):
                held.check()
            held.renew_if_due()

    with pytest.raises(LeaseLost, match="bob's with token 2"):
        work()
    stored = bob.read()
    assert stored is not None
    assert (stored.holder, stored.released) == ("bob", False)


def test_leases_written_by_others_are_understood_and_broken_ones_are_not_guessed(
    store: FaultStore, clock: SimulatedClock
) -> None:
    store.put(
        "ns/lease.json",
        b'{"holder": "node-abc", "fencing_token": 42, "acquired_at": "2023-11-14T22:00:00Z",'
        b' "expires_at": "2023-11-14T22:20:00Z"}',
    )
    with pytest.raises(LeaseHeld, match="node-abc with token 42"):
        keeper(store, "ann", clock).acquire()
    clock.advance(20 * 60_000)
    assert keeper(store, "ann", clock).acquire().token == 43
    for broken in (b"", b"[]", b"{}", b'{"holder": "x", "fencing_token": "many"}', b"\xff"):
        store.put("ns/lease.json", broken)
        with pytest.raises(Corruption, match=r"ns/lease.json .* fencing_token is higher"):
            keeper(store, "ann", clock).acquire()
    with pytest.raises(InvalidInput):
        LeaseKeeper(store, "lease", "ann", ttl_ms=0)
