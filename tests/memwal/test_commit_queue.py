"""Group commit with real threads: order, exactly once, errors to the right callers, no hang."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable

import pytest

from penstock.errors import InvalidInput, PenstockError, WriterClosed, WriterPoisoned
from penstock.memwal.commit_queue import CommitQueue, QueueItem
from penstock.storage.clock import Clock, SystemClock

WAIT_SECONDS = 30.0


class Number(QueueItem):
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value


def take_up_to(limit: int) -> Callable[[deque[Number]], list[Number]]:
    return lambda waiting: [waiting.popleft() for _ in range(min(limit, len(waiting)))]


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def test_sixteen_threads_each_item_once_and_in_the_order_of_each_thread() -> None:
    done: list[int] = []
    inside = threading.Lock()
    groups = []

    def process(group: list[Number]) -> None:
        assert inside.acquire(blocking=False), "two leaders at once"
        groups.append(len(group))
        for item in group:
            if item.value % 10 == 7:
                item.error = InvalidInput(str(item.value))
            else:
                done.append(item.value)
        inside.release()

    queue = CommitQueue(take_up_to(8), process, SystemClock())
    refused: list[str] = []

    def work(thread: int) -> None:
        for n in range(200):
            value = thread * 1000 + n
            try:
                queue.run(Number(value))
            except InvalidInput as error:
                refused.append(f"{value} was told {error}")

    in_threads(16, work)
    sent = [t * 1000 + n for t in range(16) for n in range(200)]
    assert sorted(done) == [value for value in sent if value % 10 != 7]
    wrong = [value for value in sent if value % 10 == 7]
    assert sorted(refused) == sorted(f"{value} was told {value}" for value in wrong)
    for thread in range(16):
        own = [value for value in done if value // 1000 == thread]
        assert own == sorted(own)
    assert len(queue) == 0
    assert max(groups) <= 8


def test_what_nobody_waits_for_is_done_by_the_next_leader_or_by_drain() -> None:
    done: list[int] = []
    queue = CommitQueue(
        take_up_to(2), lambda group: done.extend(i.value for i in group), SystemClock()
    )
    for n in range(3):
        queue.submit(Number(n))
    assert done == []
    queue.run(Number(3))
    assert done == [0, 1, 2, 3]
    for n in range(4, 9):
        queue.submit(Number(n))
    queue.drain()
    queue.drain()
    assert done == list(range(9))


def test_after_a_failure_everything_ends_with_it() -> None:
    started, go = threading.Event(), threading.Event()

    def process(group: list[Number]) -> None:
        started.set()
        go.wait(WAIT_SECONDS)

    queue = CommitQueue(take_up_to(1), process, SystemClock())
    outcomes: dict[int, BaseException | None] = {}

    def work(n: int) -> None:
        try:
            queue.run(Number(n))
            outcomes[n] = None
        except PenstockError as error:
            outcomes[n] = error

    def fail() -> None:
        started.wait(WAIT_SECONDS)
        while len(queue) < 7:
            threading.Event().wait(0.001)
        queue.fail(lambda: WriterClosed("closed"))
        go.set()

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    in_threads(8, work)
    failing.join(WAIT_SECONDS)
    # One item was being processed, and was finished; all others were told.
    assert sorted(type(o) is WriterClosed for o in outcomes.values()) == [False] + [True] * 7
    with pytest.raises(WriterClosed):
        queue.run(Number(9))
    with pytest.raises(WriterClosed):
        queue.submit(Number(9))


class InterruptedSleep:
    """A clock whose next sleep is cut short, as Ctrl-C does it."""

    def __init__(self) -> None:
        self.armed = False

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return 0.0

    def sleep_ms(self, ms: float) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["while it processes", "while it gathers"])
def test_an_interrupted_leader_hands_over_and_nobody_is_told_that_it_was_done(where: str) -> None:
    clock = InterruptedSleep()
    interrupt = threading.Event()
    broken: list[BaseException] = []

    def process(group: list[Number]) -> None:
        if interrupt.is_set():
            interrupt.clear()
            raise KeyboardInterrupt

    queue = CommitQueue(take_up_to(4), process, clock, broken.append)
    in_threads(8, lambda n: queue.run(Number(n)))
    if where == "while it processes":
        interrupt.set()
        for n in range(3):
            queue.submit(Number(n))
    else:
        queue._expected = 100
        clock.armed = True
    with pytest.raises(KeyboardInterrupt):
        queue.run(Number(3))
    assert len(broken) == (where == "while it processes")
    # The lead is free, and others go on.
    in_threads(8, lambda n: queue.run(Number(n)))


def test_the_followers_of_an_interrupted_group_learn_that_the_outcome_is_unknown() -> None:
    leading, go = threading.Event(), threading.Event()

    def process(group: list[Number]) -> None:
        if group[0].value == 0:
            leading.set()
            go.wait(WAIT_SECONDS)
        elif len(group) > 1:
            raise KeyboardInterrupt

    queue = CommitQueue(take_up_to(100), process, SystemClock())
    outcomes: list[type[BaseException] | None] = []

    def work(n: int) -> None:
        if n:
            assert leading.wait(WAIT_SECONDS)
        try:
            queue.run(Number(n))
            outcomes.append(None)
        except (KeyboardInterrupt, PenstockError) as error:
            outcomes.append(type(error))

    def release() -> None:
        while len(queue) < 5:
            threading.Event().wait(0.001)
        go.set()

    releasing = threading.Thread(target=release, daemon=True)
    releasing.start()
    in_threads(6, work)
    assert sorted(map(str, outcomes)) == sorted(
        map(str, [None, KeyboardInterrupt, *[WriterPoisoned] * 4])
    )


def test_a_waiting_thread_that_is_interrupted_leaves_its_item_and_passes_the_lead_on() -> None:
    assert threading.current_thread() is threading.main_thread()
    leading, go = threading.Event(), threading.Event()
    done: list[int] = []

    def process(group: list[Number]) -> None:
        leading.set()
        go.wait(WAIT_SECONDS)
        done.extend(item.value for item in group)

    clock: Clock = SystemClock()
    queue = CommitQueue(take_up_to(1), process, clock)
    leader = threading.Thread(target=queue.run, args=(Number(0),), daemon=True)
    leader.start()
    assert leading.wait(WAIT_SECONDS)

    def interrupt() -> None:
        while len(queue) < 1:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            queue.run(Number(1))
    finally:
        signal.signal(signal.SIGINT, previous)
    go.set()
    leader.join(WAIT_SECONDS)
    assert not leader.is_alive()
    queue.run(Number(2))
    assert done == [0, 1, 2], "an item that was handed in keeps its place"
