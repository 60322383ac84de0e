"""In-memory LRU cache. A value is valid for one version; concurrent callers wait for one computation."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

# Lifetime of values with a version. It is limited, because a process may change the data and die before it sets the
# new version.
LIFE_S = 900.0
UNVERSIONED_S = 5.0  # lifetime of values without a version

_T = TypeVar("_T")


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: str | None = None
    computed_at: float | None = None  # None: not computed yet
    value: Any = None


class Cache:
    """LRU cache of at most `size` values. Thread-safe."""

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, key: Hashable, version: str | None, compute: Callable[[], _T]) -> _T:
        """Return the value of `key` at `version`, computed by `compute` on a miss. Exceptions are not cached."""
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        with entry.lock:
            if self._is_fresh(entry, version):
                self.hits += 1
            else:
                self.misses += 1
                value = compute()
                entry.version, entry.computed_at, entry.value = version, self._clock(), value
            return cast("_T", entry.value)

    def make_room(self, size: int) -> None:
        """Grow to at least `size`. An LRU cache smaller than a list that is read in order repeatedly never hits."""
        with self._lock:
            self._size = max(self._size, size)

    def has(self, key: Hashable, version: str | None) -> bool:
        """Return whether `get` would return a cached value."""
        with self._lock:
            entry = self._entries.get(key)
        return entry is not None and self._is_fresh(entry, version)

    def __len__(self) -> int:
        return len(self._entries)

    def _is_fresh(self, entry: _Entry, version: str | None) -> bool:
        if entry.computed_at is None or entry.version != version:
            return False
        life_s = UNVERSIONED_S if version is None else LIFE_S
        return self._clock() - entry.computed_at < life_s
