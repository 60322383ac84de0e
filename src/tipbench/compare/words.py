"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(n: int, noun: str) -> str:
    """1 scenario, 2 scenarios."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(names: Iterable[object], most: int) -> str:
    """a, b and c; what is beyond `most` is counted."""
    known = [str(name) for name in names]
    shown, more = known[:most], len(known) - most
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
