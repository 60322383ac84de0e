"""`keep_alive` as Ollama reads it: JSON numbers are seconds, strings are Go durations."""

from __future__ import annotations

import math
import re

NEVER = math.inf

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)([^\d.]*)")


class BadDurationError(ValueError):
    """The error message of Ollama's response, status 400."""


def keep_alive_seconds(value: object) -> float | None:
    """Seconds until the unload, NEVER for a negative value, None when absent. A number's fraction is dropped."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        kind = {bool: "bool", list: "[]interface {}"}.get(type(value), "map[string]interface {}")
        raise BadDurationError(f"Unsupported type: '{kind}'")
    seconds = go_duration(value) if isinstance(value, str) else value
    if seconds < 0:
        return NEVER
    return float(seconds) if isinstance(value, str) else int(seconds)


def go_duration(text: str) -> float:
    """The seconds that Go's time.ParseDuration returns for a text."""
    sign, rest = (-1.0, text[1:]) if text[:1] == "-" else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    total, at = 0.0, 0
    while at < len(rest) or at == 0:
        part = _PART.match(rest, at)
        if part is None:
            raise BadDurationError(f'time: invalid duration "{text}"')
        number, unit = part.groups()
        if not unit:
            raise BadDurationError(f'time: missing unit in duration "{text}"')
        if unit not in _UNITS:
            raise BadDurationError(f'time: unknown unit "{unit}" in duration "{text}"')
        total += float(number) * _UNITS[unit]
        at = part.end()
    return sign * total
