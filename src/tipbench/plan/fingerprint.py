"""Fingerprints of plain values: equal content has equal hashes everywhere."""

from __future__ import annotations

import hashlib
import json


def fingerprint(value: object, length: int = 64) -> str:
    """Return the SHA-256 of a value's canonical JSON, truncated to `length` hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
