"""Group commit: many threads hand in items, one of them at a time works through the queue.

The first thread to find nobody leading becomes the leader. It takes a group from the front,
processes it, and goes on until its own item is done; then the lead passes to a thread that waits
in the queue. No thread ever waits for a group that only it could write, and no thread works for
others longer than one group beyond its own item.

Threads that were just acknowledged tend to come back at once. A leader that knows of them, from
the size of the last group, pauses for a moment, so that one group serves all of them instead of
every other one. A thread on its own never waits for anybody.

Items that nobody waits for are processed by whoever leads next, or by `drain`. After `fail`
every item, queued or handed in later, ends with an error. A thread may be interrupted wherever it
waits: its item stays queued, and the lead, if it had it, goes to another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import PenstockError, WriterPoisoned
from penstock.storage.clock import Clock

_GATHER_PAUSES = 4
_GATHER_PAUSE_MS = 0.05


class QueueItem:
    """The part of an item that the queue looks after."""

    __slots__ = ("abandoned", "error", "finished", "promoted", "wake")

    def __init__(self) -> None:
        self.wake: threading.Lock | None = None
        """Held while the item waits; released to wake its thread."""
        self.finished = False
        self.promoted = False
        self.abandoned = False
        self.error: PenstockError | None = None


ItemT = TypeVar("ItemT", bound=QueueItem)


class CommitQueue(Generic[ItemT]):
    def __init__(
        self,
        take: Callable[[deque[ItemT]], list[ItemT]],
        process: Callable[[list[ItemT]], None],
        clock: Clock,
        broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        """`broken` hears of a group that was taken and cut short by an interruption."""
        self._take = take
        self._process = process
        self._clock = clock
        self._broken = broken
        self._expected = 1
        self._lock = threading.Lock()
        self._items: deque[ItemT] = deque()
        self._leader: object | None = None
        self._failure: Callable[[], PenstockError] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def submit(self, item: ItemT) -> None:
        """Hand in an item and do not wait for it."""
        with self._lock:
            if self._failure is not None:
                raise self._failure()
            self._items.append(item)

    def run(self, item: ItemT) -> None:
        """Hand in an item and return when it is done; raises the item's error."""
        try:
            with self._lock:
                if self._failure is not None:
                    raise self._failure()
                self._items.append(item)
                if self._leader is None:
                    self._leader = item
                else:
                    wake = threading.Lock()
                    wake.acquire()
                    item.wake = wake
            if item.wake is not None:
                item.wake.acquire()
            if not item.finished:
                self._lead(item, item)
        except BaseException:
            with self._lock:
                item.abandoned = True
                if self._leader is item:
                    self._pass_on()
            raise
        if item.error is not None:
            raise item.error

    def drain(self) -> None:
        """Work off everything queued, unless another thread is at it."""
        leader = object()
        with self._lock:
            if self._leader is not None or not self._items:
                return
            self._leader = leader
        self._lead(leader, None)

    def fail(self, failure: Callable[[], PenstockError]) -> None:
        """End every item with an error, now and from now on."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
            items = list(self._items)
            self._items.clear()
            for item in items:
                self._finish(item, self._failure())

    def _lead(self, leader: object, own: ItemT | None) -> None:
        group: list[ItemT] = []
        try:
            while True:
                for _ in range(_GATHER_PAUSES):
                    if len(self._items) >= self._expected:
                        break
                    self._clock.sleep_ms(_GATHER_PAUSE_MS)
                with self._lock:
                    group = self._take(self._items)
                if group:
                    self._process(group)
                with self._lock:
                    for item in group:
                        self._finish(item, item.error)
                    self._expected = len(group) + len(self._items)
                    done = own.finished if own is not None else not self._items
                    if done or not group:
                        self._pass_on()
                        return
        except BaseException as error:
            unfinished = [item for item in group if not item.finished]
            if self._broken is not None and unfinished:
                self._broken(error)
            with self._lock:
                for item in unfinished:
                    # Whether it was done is unknown, so nobody may take it for done.
                    unknown = WriterPoisoned(
                        f"the write was cut short by {error!r}; whether its rows are there "
                        "is unknown, so look or send them again"
                    )
                    self._finish(item, item.error or unknown)
                if self._leader is leader:
                    self._pass_on()
            raise

    def _pass_on(self) -> None:
        for item in self._items:
            if item.wake is not None and not item.abandoned:
                item.promoted = True
                self._leader = item
                item.wake.release()
                return
        self._leader = None

    def _finish(self, item: ItemT, error: PenstockError | None) -> None:
        item.error = error
        item.finished = True
        if item.wake is not None and not item.promoted:
            item.wake.release()
