"""The cache: one value per revision, computed once, and a bounded size."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.clock import Clock
from tipbench.web.cache import LIFE_S, UNVERSIONED_S, Cache


class Made:
    """Counts how often it was made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_a_value_is_computed_once_per_version() -> None:
    cache, made = Cache(4), Made()
    assert [cache.get("key", "r1", made) for _ in range(3)] == [1, 1, 1]
    assert cache.get("key", "r2", made) == 2
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_new_version_takes_the_place_of_the_old() -> None:
    cache = Cache(4)
    for version in range(50):
        cache.get("key", str(version), Made())
    assert len(cache) == 1


def test_the_least_recently_used_value_is_evicted_first() -> None:
    cache, kept = Cache(2), Made()
    cache.get("kept", "r", kept)
    for key in range(10):
        cache.get(key, "r", Made())
        cache.get("kept", "r", kept)
    assert (len(cache), kept.count) == (2, 1)


def test_a_cached_value_expires_without_a_new_version() -> None:
    clock, made = Clock(), Made()
    cache = Cache(4, clock)
    cache.get("key", "r1", made)
    clock.now += LIFE_S - 1
    assert cache.get("key", "r1", made) == 1
    clock.now += 2
    assert cache.get("key", "r1", made) == 2


def test_a_value_without_a_version_is_cached_briefly() -> None:
    clock, made = Clock(), Made()
    cache = Cache(4, clock)
    cache.get("key", None, made)
    clock.now += UNVERSIONED_S
    assert cache.get("key", None, made) == 2


def test_a_failure_is_not_cached() -> None:
    cache = Cache(4)

    def fail() -> int:
        raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        cache.get("key", "r1", fail)
    assert not cache.has("key", "r1")
    assert cache.get("key", "r1", Made()) == 1


def test_concurrent_callers_wait_for_one_computation() -> None:
    cache, made, ready = Cache(4), Made(), threading.Event()

    def slow() -> int:
        ready.wait(10)
        return made()

    with ThreadPoolExecutor(8) as pool:
        results = [pool.submit(cache.get, "key", "r1", slow) for _ in range(8)]
        ready.set()
        assert {result.result(10) for result in results} == {1}
