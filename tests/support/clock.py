"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Returns the time that the test has set."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now
