"""The cache: one value per revision, computed once, and a bounded size."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.clock import Clock
from tipbench.web.cache import LIFE_S, UNVERSIONED_S, Cache


class CountedValue:
    """Counts how often it was computed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_a_value_is_computed_once_per_version() -> None:
    cache, value = Cache(4), CountedValue()
    assert [cache.get("key", "r1", value) for _ in range(3)] == [1, 1, 1]
    assert cache.get("key", "r2", value) == 2
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_new_version_takes_the_place_of_the_old() -> None:
    cache = Cache(4)
    for version in range(50):
        cache.get("key", str(version), CountedValue())
    assert len(cache) == 1


def test_the_least_recently_used_value_is_evicted_first() -> None:
    cache, kept = Cache(2), CountedValue()
    cache.get("kept", "r", kept)
    for key in range(10):
        cache.get(key, "r", CountedValue())
        cache.get("kept", "r", kept)
    assert (len(cache), kept.count) == (2, 1)


def test_a_cached_value_expires_without_a_new_version() -> None:
    clock, value = Clock(), CountedValue()
    cache = Cache(4, clock)
    cache.get("key", "r1", value)
    clock.now += LIFE_S - 1
    assert cache.get("key", "r1", value) == 1
    clock.now += 2
    assert cache.get("key", "r1", value) == 2


def test_a_value_without_a_version_is_cached_briefly() -> None:
    clock, value = Clock(), CountedValue()
    cache = Cache(4, clock)
    cache.get("key", None, value)
    clock.now += UNVERSIONED_S
    assert cache.get("key", None, value) == 2


def test_a_failure_is_not_cached() -> None:
    cache = Cache(4)

    def fail() -> int:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        cache.get("key", "r1", fail)
    assert not cache.has("key", "r1")
    assert cache.get("key", "r1", CountedValue()) == 1


def test_concurrent_callers_wait_for_one_computation() -> None:
    cache, value, ready = Cache(4), CountedValue(), threading.Event()

    def slow() -> int:
        ready.wait(10)
        return value()

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(cache.get, "key", "r1", slow) for _ in range(8)]
        ready.set()
        assert {result.result(10) for result in results} == {1}
