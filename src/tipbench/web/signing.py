"""Signed deliveries: HMAC-SHA256 over timestamp and body. The panel signs; receivers call `verify`.

The module needs only the standard library, so receivers can import or copy it, as docs/webhook.md shows:

    seen = Seen()                       # once per receiver process
    verify(secret, request.headers, request.body, time.time(), seen)    # raises DeliveryRefused
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from typing import Literal, Protocol

TIME = "Tipbench-Time"  # Unix seconds of this attempt
SIGNATURE = "Tipbench-Signature"  # v1= and 64 hexadecimal digits
DELIVERY = "Tipbench-Delivery"  # the same for every attempt of one delivery; also in the body
EVENT = "Tipbench-Event"  # for logs and routing; also in the body, which is signed
TOLERANCE_S = 300
MIN_SECRET_LENGTH = 20
_VERSION = "v1="
_MAX_TIME_DIGITS = 12


class DeliveryRefused(Exception):
    """The delivery is invalid; `why` is a one-word code."""

    def __init__(self, why: Literal["unsigned", "forged", "late", "replayed"], message: str) -> None:
        super().__init__(message)
        self.why = why


class Memory(Protocol):
    """Store of accepted signatures; a receiver with several processes needs a shared one."""

    def first_time(self, signature: str, now: float) -> bool:
        """Save the signature for longer than it is valid; return whether it is new."""
        ...


class Seen:
    """In-memory store of the signatures of the last minutes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}

    def first_time(self, signature: str, now: float) -> bool:
        """Save the signature; return whether it is new."""
        with self._lock:
            for old in [known for known, until in self._until.items() if until < now]:
                del self._until[old]
            fresh = signature not in self._until
            self._until[signature] = now + 2 * TOLERANCE_S
            return fresh


def sign(secret: str, time_s: int, body: bytes) -> str:
    """Return the signature of a body sent at `time_s`."""
    digest = hmac.new(secret.encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"{_VERSION}{digest}"


def signed_headers(secret: str, delivery: str, event: str, body: bytes, now: float) -> dict[str, str]:
    """Return the headers of one attempt."""
    time_s = int(now)
    return {TIME: str(time_s), SIGNATURE: sign(secret, time_s, body), DELIVERY: delivery, EVENT: event}


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: float, seen: Memory) -> None:
    """Verify a delivery. Raises DeliveryRefused if it is unsigned, forged, outside the time tolerance or replayed.

    A retry by the sender has a new time and thus a new signature, so it is not a replay. If its delivery id has been
    processed already, respond with 200 and do nothing.
    """
    known = {name.lower(): value for name, value in headers.items()}
    time_text, signature = known.get(TIME.lower(), ""), known.get(SIGNATURE.lower(), "")
    if not (time_text.isascii() and time_text.isdigit() and len(time_text) <= _MAX_TIME_DIGITS and signature):
        raise DeliveryRefused("unsigned", f"A delivery needs the headers {TIME} and {SIGNATURE}.")
    expected = sign(secret, int(time_text), body)
    if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
        raise DeliveryRefused("forged", "The signature does not match the secret, time and body.")
    if abs(now - int(time_text)) > TOLERANCE_S:
        raise DeliveryRefused(
            "late", f"Signed at {time_text}, more than {TOLERANCE_S} s from now ({int(now)}). Check the clocks."
        )
    if not seen.first_time(expected, now):
        raise DeliveryRefused("replayed", "This request was already accepted.")
