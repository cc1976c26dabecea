"""Caches with a limit, in bytes or in values: what was used longest ago goes first."""

from __future__ import annotations

import threading
import weakref
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

    A value's size may grow while it is cached; sizes are taken anew at every insertion. The name
    is that of its metrics, which it shares with the same cache of other tables.
    """

    def __init__(self, limit_bytes: int, name: str) -> None:
        self.limit_bytes = limit_bytes
        self._hits = metrics.cache_hits.labels(name)
        self._misses = metrics.cache_misses.labels(name)
        self._evictions = metrics.cache_evictions.labels(name)
        self._filled = _Filled(name)
        weakref.finalize(self, self._filled.set, 0)
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not there; two threads may both make it."""
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                self._hits.inc()
                return found
        made = make()
        self._misses.inc()
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
            self._evictions.inc()
        self._filled.set(total_bytes)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(item.nbytes for item in self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class _Filled:
    """The part of a gauge that one cache accounts for; taken back when the cache goes."""

    def __init__(self, name: str) -> None:
        self._gauge = metrics.cache_bytes.labels(name)
        self._bytes = 0

    def set(self, total_bytes: int) -> None:
        self._gauge.inc(total_bytes - self._bytes)
        self._bytes = total_bytes


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
