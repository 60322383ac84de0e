"""Signed deliveries: HMAC-SHA256 over time stamp and body. The panel signs; whoever receives calls `verify`.

It needs nothing but the standard library, so that a receiver may use it, or copy it, as docs/webhook.md shows:

    seen = Seen()                       # one for the life of the receiver
    verify(secret, request.headers, request.body, time.time(), seen)    # raises DeliveryRefused
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from typing import Literal, Protocol

TIME = "Tipbench-Time"  # seconds since 1970, of this attempt
SIGNATURE = "Tipbench-Signature"  # v1= and 64 hexadecimal digits
DELIVERY = "Tipbench-Delivery"  # the same for every attempt of one delivery; also in the body
EVENT = "Tipbench-Event"  # for logs and routing; the body says it too, and the body is signed
TOLERANCE_S = 300
SHORTEST_SECRET = 20
_VERSION = "v1="
_LONGEST_TIME = 12


class DeliveryRefused(Exception):
    """A delivery that is not to be believed; `why` says it in one word."""

    def __init__(self, why: Literal["unsigned", "forged", "late", "replayed"], message: str) -> None:
        super().__init__(message)
        self.why = why


class Memory(Protocol):
    """What a receiver remembers of accepted deliveries. One of several processes keeps it where all can see it."""

    def first_time(self, signature: str, now: float) -> bool:
        """Whether it comes for the first time, and remember it; for longer than a signature is valid."""
        ...


class Seen:
    """A memory in this process. Thread-safe; it only ever holds what was signed within the last minutes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def first_time(self, signature: str, now: float) -> bool:
        """Whether it comes for the first time, and remember it."""
        with self._lock:
            for old in [known for known, until in self._until.items() if until < now]:
                del self._until[old]
            fresh = signature not in self._until
            self._until[signature] = now + 2 * TOLERANCE_S
            return fresh


def sign(secret: str, time_s: int, body: bytes) -> str:
    """The signature of a body sent at a time."""
    digest = hmac.new(secret.encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"{_VERSION}{digest}"


def signed_headers(secret: str, delivery: str, event: str, body: bytes, now: float) -> dict[str, str]:
    """The headers of one attempt."""
    time_s = int(now)
    return {TIME: str(time_s), SIGNATURE: sign(secret, time_s, body), DELIVERY: delivery, EVENT: event}


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: float, seen: Memory) -> None:
    """Refuse what was not signed with the secret, was signed too long ago (or ahead), or was accepted before.

    An attempt that is repeated by the sender has a new time and thus a new signature: it is no replay. Whoever has
    dealt with its delivery id already answers 200 and does nothing.
    """
    known = {name.lower(): value for name, value in headers.items()}
    time_text, signature = known.get(TIME.lower(), ""), known.get(SIGNATURE.lower(), "")
    if not (time_text.isascii() and time_text.isdigit() and len(time_text) <= _LONGEST_TIME and signature):
        raise DeliveryRefused("unsigned", f"A delivery has the headers {TIME} and {SIGNATURE}.")
    expected = sign(secret, int(time_text), body)
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
        raise DeliveryRefused("forged", "The signature does not fit the secret, the time and the body.")
    if abs(now - int(time_text)) > TOLERANCE_S:
        raise DeliveryRefused(
            "late", f"Signed at {time_text}, {TOLERANCE_S} s or more from now ({int(now)}). Check the clocks."
        )
    if not seen.first_time(expected, now):
        raise DeliveryRefused("replayed", "This very request was accepted before.")
