"""Signatures of webhook deliveries: HMAC-SHA256 over time and body. The panel signs, receivers call `verify`.

The module needs only the standard library, so receivers can import or copy it, as docs/webhook.md shows:

    seen = Seen()  # once per receiver process
    verify(secret, request.headers, request.body, time.time(), seen)  # raises DeliveryRefused
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from typing import Literal, Protocol

# Names of headers.
TIME = "Tipbench-Time"  # time of the attempt, in Unix seconds
SIGNATURE = "Tipbench-Signature"  # v1= and 64 hexadecimal digits
DELIVERY = "Tipbench-Delivery"  # id of the delivery, the same for all its attempts; also in the body
EVENT = "Tipbench-Event"  # for logs and routing; not signed, but also in the signed body
TOLERANCE_S = 300  # maximum difference between the time of the attempt and the receiver's clock
MIN_SECRET_LENGTH = 20  # characters
_SIGNATURE_PREFIX = "v1="
_MAX_TIME_DIGITS = 12


class DeliveryRefused(Exception):
    """The delivery is invalid; `why` is a one-word code."""

    def __init__(self, why: Literal["unsigned", "forged", "late", "replayed"], message: str) -> None:
        super().__init__(message)
        self.why = why


class Memory(Protocol):
    """A store of accepted signatures. A receiver with several processes needs one that they share."""

    def first_time(self, signature: str, now: float) -> bool:
        """Return whether the signature is new.

        It must be remembered for 2 × TOLERANCE_S: if its time is TOLERANCE_S in the future, it is valid that long.
        """
        ...


class Seen:
    """A Memory within one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expires_at: dict[str, float] = {}  # by signature

    def first_time(self, signature: str, now: float) -> bool:
        """Save the signature for twice TOLERANCE_S. Return whether it was not saved before."""
        with self._lock:
            expired = [saved for saved, expires_at in self._expires_at.items() if expires_at < now]
            for saved in expired:
                del self._expires_at[saved]
            is_new = signature not in self._expires_at
            self._expires_at[signature] = now + 2 * TOLERANCE_S
            return is_new


def sign(secret: str, time_s: int, body: bytes) -> str:
    """Return the signature of a body that is sent at `time_s`, in Unix seconds."""
    digest = hmac.new(secret.encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"{_SIGNATURE_PREFIX}{digest}"


def signed_headers(secret: str, delivery: str, event: str, body: bytes, now: float) -> dict[str, str]:
    """Return the headers of one attempt to send a delivery."""
    time_s = int(now)
    return {TIME: str(time_s), SIGNATURE: sign(secret, time_s, body), DELIVERY: delivery, EVENT: event}


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: float, seen: Memory) -> None:
    """Verify a delivery. Raises DeliveryRefused if it is unsigned, forged, outside the time tolerance or replayed.

    A sender's retry is not a replay: it has a new time and signature, so it is accepted here. If its delivery id is
    already processed, the receiver should do nothing and respond with 200.
    """
    by_lower_name = {name.lower(): value for name, value in headers.items()}
    time_text = by_lower_name.get(TIME.lower(), "")
    signature = by_lower_name.get(SIGNATURE.lower(), "")
    is_time = time_text.isascii() and time_text.isdigit() and len(time_text) <= _MAX_TIME_DIGITS
    if not (is_time and signature):
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
