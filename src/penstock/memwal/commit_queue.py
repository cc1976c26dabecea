"""Group commit: many threads hand in items, one of them at a time works through the queue.

The first thread to find nobody leading becomes the leader. It takes a group from the front,
processes it, and goes on until its own item is done; then the lead passes to a thread that waits
in the queue. No thread ever waits for a group that only it could write, and no thread works for
others longer than one group beyond its own item.

Items that nobody waits for are processed by whoever leads next, or by `drain`. After `fail`
every item, queued or handed in later, ends with an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import PenstockError


class QueueItem:
    """The part of an item that the queue looks after."""

    __slots__ = ("abandoned", "error", "finished", "promoted", "wake")

    def __init__(self) -> None:
        self.wake: threading.Event | None = None
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
    ) -> None:
        self._take = take
        self._process = process
        self._lock = threading.Lock()
        self._items: deque[ItemT] = deque()
        self._leading = False
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
        with self._lock:
            if self._failure is not None:
                raise self._failure()
            self._items.append(item)
            lead = not self._leading
            if lead:
                self._leading = True
            else:
                item.wake = threading.Event()
        if not lead:
            self._wait(item)
        if not item.finished:
            self._lead(item)
        if item.error is not None:
            raise item.error

    def drain(self) -> None:
        """Work off everything queued, unless another thread is at it."""
        with self._lock:
            if self._leading or not self._items:
                return
            self._leading = True
        self._lead(None)

    def fail(self, failure: Callable[[], PenstockError]) -> None:
        """End every item with an error, now and from now on."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
            items = list(self._items)
            self._items.clear()
            for item in items:
                self._finish(item, self._failure())

    def _wait(self, item: ItemT) -> None:
        assert item.wake is not None
        try:
            item.wake.wait()
        except BaseException:
            with self._lock:
                item.abandoned = True
                if item.promoted and not item.finished:
                    self._pass_on()
            raise

    def _lead(self, own: ItemT | None) -> None:
        while True:
            with self._lock:
                group = self._take(self._items)
            error: BaseException | None = None
            if group:
                try:
                    self._process(group)
                except BaseException as caught:
                    error = caught
            with self._lock:
                for item in group:
                    self._finish(item, item.error)
                done = own.finished if own is not None else not self._items
                if done or error is not None or not group:
                    self._pass_on()
                    break
        if error is not None:
            raise error

    def _pass_on(self) -> None:
        for item in self._items:
            if item.wake is not None and not item.abandoned:
                item.promoted = True
                item.wake.set()
                return
        self._leading = False

    def _finish(self, item: ItemT, error: PenstockError | None) -> None:
        item.error = error
        item.finished = True
        if item.wake is not None:
            item.wake.set()
