"""LoginLimiter: how many failed logins a client, and all clients together, may have before they have to wait."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FREE_FAILURES = 5  # failed attempts of a client until it has to wait
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 900.0
MAX_CLIENTS = 10_000  # clients in memory; the least recent is removed first
# Token bucket for the failed attempts of all clients together.
FAILURE_BURST = 60  # its size
FAILURES_PER_SECOND = 0.5  # its refill rate


@dataclass(frozen=True)
class _ClientFailures:
    """Failed attempts of a client. Times are seconds of the limiter's clock."""

    failures: int
    free_at: float  # time of the next allowed attempt
    forget_at: float  # time after which the failures no longer count


class LoginLimiter:
    """Limits failed attempts: a wait per client that doubles, and a limit for all clients together. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _ClientFailures] = OrderedDict()
        self._remaining = float(FAILURE_BURST)  # failed attempts left in the bucket
        self._refilled_at = clock()

    def count_failure(self, client: str) -> float:
        """Count a failed attempt and return 0.0. If no attempt is allowed yet, return the seconds to wait instead."""
        with self._lock:
            now = self._clock()
            refill = (now - self._refilled_at) * FAILURES_PER_SECOND
            self._remaining = min(float(FAILURE_BURST), self._remaining + refill)
            self._refilled_at = now
            earlier = self._clients.get(client)
            if earlier is None or earlier.forget_at <= now:
                earlier = _ClientFailures(failures=0, free_at=0.0, forget_at=0.0)
            if earlier.free_at > now:
                return earlier.free_at - now
            if self._remaining < 1:
                return (1 - self._remaining) / FAILURES_PER_SECOND
            self._remaining -= 1
            failures = earlier.failures + 1
            wait_s = 0.0
            if failures >= FREE_FAILURES:
                doublings = min(failures - FREE_FAILURES, 32)  # bounded so that the power does not overflow
                wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0**doublings)
            free_at = now + wait_s
            self._clients[client] = _ClientFailures(failures, free_at, forget_at=free_at + MAX_WAIT_S)
            self._clients.move_to_end(client)
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            return 0.0

    def __len__(self) -> int:
        return len(self._clients)
