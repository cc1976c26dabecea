"""Caches with a limit, in bytes or in values: what was used longest ago goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from penstock import metrics


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)
V = TypeVar("V")


class ByteCache(Generic[T]):
    """Values by key, at most `limit_bytes` of them together; a value larger than that is not kept.

    A value's size may grow while it is cached; sizes are taken anew at every insertion.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not there; two threads may both make it."""
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                metrics.cache_hits.inc()
                return found
        made = make()
        metrics.cache_misses.inc()
        with self._lock:
            kept = self._items.setdefault(key, made)
            self._items.move_to_end(key)
            self._evict()
        return kept

    def discard(self, key: Hashable) -> None:
        with self._lock:
            self._items.pop(key, None)

    def _evict(self) -> None:
        total_bytes = sum(item.nbytes for item in self._items.values())
        while total_bytes > self.limit_bytes and self._items:
            _, gone = self._items.popitem(last=False)
            total_bytes -= gone.nbytes
            metrics.cache_evictions.inc()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(item.nbytes for item in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class FewCache(Generic[V]):
    """Values by key, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not there; two threads may both make it."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
        made = make()
        with self._lock:
            kept = self._items.setdefault(key, made)
            self._items.move_to_end(key)
            while len(self._items) > self.limit:
                self._items.popitem(last=False)
        return kept

    def __len__(self) -> int:
        return len(self._items)
