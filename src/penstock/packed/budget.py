"""A limit on bytes in flight, shared by whoever is given the same `ByteBudget`.

`acquire` is for work that ends by itself, such as one range request. It waits for its turn and
then for room; if there is none it takes the one spare place, which a single piece of work may
hold beyond the limit, whatever its size. `try_acquire` is for what may be kept as long as the
holder likes, such as pieces read ahead for a consumer that is slow: it never waits, and gets
nothing while others do.

So nobody waits for a consumer: the spare place always becomes free by itself, and the bytes in
flight are at most the limit and one piece.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from penstock import metrics
from penstock.errors import InvalidInput


class ByteBudget:
    def __init__(self, limit_bytes: int) -> None:
        if type(limit_bytes) is not int or limit_bytes <= 0:
            raise InvalidInput(f"a budget of {limit_bytes!r} bytes lets nothing through")
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._spare_bytes: int | None = None
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return self._used_bytes + (self._spare_bytes or 0)

    def acquire(self, size_bytes: int) -> Lease:
        """Wait until so many bytes may be in flight; give them back with `Lease.release`."""
        turn = object()
        with self._changed:
            self._queue.append(turn)
            if len(self._queue) > 1 or not self._has_room(size_bytes):
                metrics.packed_budget_waits.inc()
            try:
                while self._queue[0] is not turn or not (
                    self._has_room(size_bytes) or self._spare_bytes is None
                ):
                    self._changed.wait()
                return self._take(size_bytes)
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()

    def try_acquire(self, size_bytes: int) -> Lease | None:
        with self._changed:
            if self._queue or not self._has_room(size_bytes):
                return None
            return self._take(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return self._used_bytes + size_bytes <= self.limit_bytes

    def _take(self, size_bytes: int) -> Lease:
        is_spare = not self._has_room(size_bytes)
        if is_spare:
            self._spare_bytes = size_bytes
        else:
            self._used_bytes += size_bytes
        return Lease(self, size_bytes, is_spare)

    def _give_back(self, size_bytes: int, is_spare: bool) -> None:
        with self._changed:
            if is_spare:
                self._spare_bytes = None
            else:
                self._used_bytes -= size_bytes
            self._changed.notify_all()


class Lease:
    """Bytes taken from a budget. Releasing it twice, or from another thread, is fine."""

    def __init__(self, budget: ByteBudget | None, size_bytes: int, is_spare: bool) -> None:
        self._budget = budget
        self._size_bytes = size_bytes
        self._is_spare = is_spare
        self._lock = threading.Lock()

    @classmethod
    def unlimited(cls) -> Lease:
        return cls(None, 0, False)

    def release(self) -> None:
        with self._lock:
            budget, self._budget = self._budget, None
        if budget is not None:
            budget._give_back(self._size_bytes, self._is_spare)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
