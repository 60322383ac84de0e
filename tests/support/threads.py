"""Running a function in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_threads(number: int, function: Callable[[int], T]) -> list[T]:
    """Call the function with 0, 1, … in threads that start together; returns the results in this order."""
    barrier = threading.Barrier(number)

    def run(index: int) -> T:
        barrier.wait(60)
        return function(index)

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(run, range(number)))
