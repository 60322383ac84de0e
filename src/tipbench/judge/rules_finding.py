"""Finding: what the rules say of a tip on one scale."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A score, and what in the tip led to it."""

    score: int
    because: tuple[str, ...]
