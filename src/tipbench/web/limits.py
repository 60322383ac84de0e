"""Slow-down: whoever fails to log in has to wait, longer each time; all who fail together have to wait too."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FREE = 5  # wrong tries of one client before it has to wait
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 900.0
CLIENTS = 10_000  # remembered; the one not seen for longest is forgotten first
BURST = 60  # wrong tries of all clients together
PER_SECOND = 0.5  # so many of them are forgiven
_V6_PREFIX = 64  # who has one address of such a network has them all


@dataclass(frozen=True)
class _Record:
    failures: int
    free_at: float  # the next try may come then
    forget_at: float


class Attempts:
    """Tries to log in. Each counts as failed until it is forgiven, so tries at the same moment gain nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _Record] = OrderedDict()
        self._room = float(BURST)
        self._filled_at = clock()

    def admit(self, client: str) -> float:
        """0 when a try may be made; else the seconds to wait before the next one is looked at."""
        with self._lock:
            now = self._clock()
            self._refill(now)
            record = self._known(client, now)
            if record.free_at > now:
                return record.free_at - now
            if self._room < 1:
                return (1 - self._room) / PER_SECOND
            self._room -= 1
            self._remember(client, _failed_again(record, now))
            return 0.0

    def forgive(self, client: str) -> None:
        """The try was a right one: what this client did wrong before no longer counts."""
        with self._lock:
            self._clients.pop(client, None)
            self._room = min(float(BURST), self._room + 1)

    def __len__(self) -> int:
        return len(self._clients)

    def _known(self, client: str, now: float) -> _Record:
        record = self._clients.get(client)
        return record if record is not None and record.forget_at > now else _Record(0, 0.0, 0.0)

    def _remember(self, client: str, record: _Record) -> None:
        self._clients[client] = record
        self._clients.move_to_end(client)
        while len(self._clients) > CLIENTS:
            self._clients.popitem(last=False)

    def _refill(self, now: float) -> None:
        self._room = min(float(BURST), self._room + (now - self._filled_at) * PER_SECOND)
        self._filled_at = now


def _failed_again(record: _Record, now: float) -> _Record:
    failures = record.failures + 1
    over = failures - FREE
    wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(over, 32)) if over >= 0 else 0.0
    return _Record(failures, now + wait, now + wait + LONGEST_WAIT_S)


def client_key(host: str | None) -> str:
    """One name for all addresses that one client can take at will."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = ipaddress.ip_network((int(address), _V6_PREFIX), strict=False)
        return str(network.network_address)
    return str(address)
