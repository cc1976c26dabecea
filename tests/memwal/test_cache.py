"""Reader caches: bounded in bytes, and each accounts for what it holds."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest

from penstock import metrics
from penstock.memwal.cache import ByteCache, FewCache


@dataclass
class Value:
    nbytes: int


def sample(metric: str, cache: str) -> float:
    found = metrics.registry.get_sample_value(f"penstock_cache_{metric}", {"cache": cache})
    return found or 0.0


def test_what_was_used_longest_ago_goes_first_and_is_counted() -> None:
    cache: ByteCache[Value] = ByteCache(100, "a test")
    for key in ("a", "b", "c"):
        assert cache.get(key, lambda: Value(30)).nbytes == 30
    cache.get("a", lambda: pytest.fail("it is there"))
    cache.get("d", lambda: Value(30))
    assert cache.get("b", lambda: Value(31)).nbytes == 31  # it was gone
    assert cache.get("a", lambda: Value(32)).nbytes == 30
    assert cache.nbytes <= 100
    assert sample("hits_total", "a test") == 2
    assert sample("misses_total", "a test") == 5
    assert sample("evictions_total", "a test") == 2
    assert sample("bytes", "a test") == cache.nbytes


def test_a_value_that_grows_is_weighed_again_and_one_too_large_is_not_kept() -> None:
    cache: ByteCache[Value] = ByteCache(100, "another test")
    growing = cache.get("growing", lambda: Value(10))
    growing.nbytes = 95
    cache.get("next", lambda: Value(10))
    assert cache.get("growing", lambda: Value(1)) is not growing
    assert cache.get("large", lambda: Value(1000)).nbytes == 1000
    assert cache.nbytes <= 100


def test_a_cache_that_is_gone_holds_nothing() -> None:
    caches = [ByteCache[Value](100, "a third test") for _ in range(2)]
    for cache in caches:
        cache.get("a", lambda: Value(40))
    assert sample("bytes", "a third test") == 80
    del cache
    caches.pop()
    gc.collect()
    assert sample("bytes", "a third test") == 40


def test_a_few_are_kept() -> None:
    cache: FewCache[int] = FewCache(2)
    made: list[int] = []

    def make(number: int) -> int:
        made.append(number)
        return number

    for number in (1, 2, 1, 3, 1, 2):
        assert cache.get(number, lambda number=number: make(number)) == number  # type: ignore[misc]
    assert made == [1, 2, 3, 2]
    assert len(cache) == 2
