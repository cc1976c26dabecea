"""The threads that read for one reader, and the bytes they may have in flight.

Whoever submits a task waits for the budget, never the thread that runs it: a task that has begun
ends by itself.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from penstock.errors import InvalidInput
from penstock.packed.budget import ByteBudget, Lease

WORKERS = 4
MAX_WORKERS = 64

T = TypeVar("T")


def checked_workers(count: int) -> int:
    """The number itself, if a reader or writer may have so many threads."""
    if type(count) is not int or not 1 <= count <= MAX_WORKERS:
        raise InvalidInput(f"workers must be from 1 to {MAX_WORKERS}, not {count!r}")
    return count


class Workers:
    def __init__(self, count: int, budget: ByteBudget | None) -> None:
        self.count = checked_workers(count)
        self._budget = budget
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run_all(
        self, tasks: Iterable[tuple[int, Callable[[], T]]], beside: Callable[[], None] | None = None
    ) -> list[T]:
        """Results of tasks, each given with the bytes it has in flight, in their order.

        When it returns or raises, none of them is running any more.
        """
        todo = iter(tasks)
        running: deque[Future[T]] = deque()
        results: list[T] = []
        extra = self.submit(beside, Lease.unlimited()) if beside else None
        try:
            few = list(itertools.islice(todo, 2))
            if len(few) == 1:
                with self.lease(few[0][0]):
                    results.append(few[0][1]())
            else:
                for size_bytes, task in itertools.chain(few, todo):
                    if len(running) == 2 * self.count:
                        results.append(running[0].result())
                        running.popleft()
                    running.append(self.submit(task, self.lease(size_bytes)))
                while running:
                    results.append(running[0].result())
                    running.popleft()
            if extra is not None:
                extra.result()
        finally:
            unfinished: list[Future[Any]] = [*running, *([extra] if extra else [])]
            for future in unfinished:
                future.cancel()
            wait(unfinished)
        return results

    def submit(self, task: Callable[[], T], lease: Lease, *, until_done: bool = True) -> Future[T]:
        """Run the task on the pool; the lease ends with it, or is the caller's to end."""
        try:
            with self._lock:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self.count, "packed-reader")
                future = self._pool.submit(task)
        except BaseException:
            lease.release()
            raise
        if until_done:
            release_when_done(future, lease)
        return future

    def lease(self, size_bytes: int) -> Lease:
        return self._budget.acquire(size_bytes) if self._budget else Lease.unlimited()

    def lease_if_room(self, size_bytes: int) -> Lease | None:
        return self._budget.try_acquire(size_bytes) if self._budget else Lease.unlimited()

    def close(self) -> None:
        """Wait for tasks that run, and cancel those that wait."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def release_when_done(future: Future[Any], lease: Lease) -> None:
    future.add_done_callback(lambda _: lease.release())
