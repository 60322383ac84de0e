"""In-memory cache of values that are valid for one version; concurrent callers wait for one computation."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

LIFE_S = 900.0  # lifetime of values with a version; limited because a writer may die before it changes the revision
UNVERSIONED_S = 5.0  # lifetime of values without a version

_T = TypeVar("_T")


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: str | None = None
    made_at: float | None = None
    value: Any = None


class Cache:
    """LRU cache of at most `size` values. Thread-safe."""

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, key: Hashable, version: str | None, make: Callable[[], _T]) -> _T:
        """Return the value of `key` at `version`, computed by `make` on a miss. Exceptions are not cached."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > self._size:
                self._slots.popitem(last=False)
        with slot.lock:
            if self._is_fresh(slot, version):
                self.hits += 1
            else:
                self.misses += 1
                value = make()
                slot.version, slot.made_at, slot.value = version, self._clock(), value
            return cast("_T", slot.value)

    def make_room(self, size: int) -> None:
        """Increase the capacity to at least `size`. A list with more items than the cache would miss every time."""
        with self._lock:
            self._size = max(self._size, size)

    def has(self, key: Hashable, version: str | None) -> bool:
        """Return whether `get` would return a cached value."""
        with self._lock:
            slot = self._slots.get(key)
        return slot is not None and self._is_fresh(slot, version)

    def __len__(self) -> int:
        return len(self._slots)

    def _is_fresh(self, slot: _Slot, version: str | None) -> bool:
        if slot.made_at is None or slot.version != version:
            return False
        life_s = UNVERSIONED_S if version is None else LIFE_S
        return self._clock() - slot.made_at < life_s
