"""Times as people's scripts read them: ISO 8601 in UTC, to the millisecond."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload


@overload
def iso(seconds: float) -> str: ...


@overload
def iso(seconds: None) -> None: ...


@overload
def iso(seconds: float | None) -> str | None: ...


def iso(seconds: float | None) -> str | None:
    """Of seconds since 1970: 2026-05-04T10:15:00.000Z."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
