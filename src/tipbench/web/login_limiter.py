"""Rate limit for failed logins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FREE_FAILURES = 5  # after this many failed attempts, a client has to wait
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 900.0
MAX_CLIENTS = 10_000  # clients in memory; the least recent is removed first
# All clients share a token bucket. A failed attempt takes one token.
FAILURE_BURST = 60  # size of the bucket
FAILURES_PER_SECOND = 0.5  # refill rate


@dataclass(frozen=True)
class _ClientFailures:
    n_failures: int
    next_attempt_at: float  # on the limiter's clock, like `forget_at`
    forget_at: float  # from then on, the failures no longer count


class LoginLimiter:
    """Limits failed logins: per client with doubling waits, and for all clients together. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _ClientFailures] = OrderedDict()
        self._tokens = float(FAILURE_BURST)
        self._refilled_at = clock()

    def count_failure(self, client: str) -> float:
        """Count a failed login and return 0.0. If it came too early, do not count it, and return the seconds to wait.

        Call it only after a login has failed: a valid login is never limited.
        """
        with self._lock:
            now = self._clock()
            refill = (now - self._refilled_at) * FAILURES_PER_SECOND
            self._tokens = min(float(FAILURE_BURST), self._tokens + refill)
            self._refilled_at = now
            earlier = self._clients.get(client)
            if earlier is None or earlier.forget_at <= now:
                earlier = _ClientFailures(n_failures=0, next_attempt_at=0.0, forget_at=0.0)
            if earlier.next_attempt_at > now:
                return earlier.next_attempt_at - now
            if self._tokens < 1:
                return (1 - self._tokens) / FAILURES_PER_SECOND
            self._tokens -= 1
            n_failures = earlier.n_failures + 1
            wait_s = 0.0
            if n_failures >= FREE_FAILURES:
                doublings = min(n_failures - FREE_FAILURES, 32)  # at most 32, so that the power does not overflow
                wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0**doublings)
            next_attempt_at = now + wait_s
            self._clients[client] = _ClientFailures(n_failures, next_attempt_at, forget_at=next_attempt_at + MAX_WAIT_S)
            self._clients.move_to_end(client)
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            return 0.0

    def __len__(self) -> int:
        return len(self._clients)
