"""The Filler port: a judge without a person in front of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tipbench.judge.sheet import ItemScore, Sheet


@dataclass(frozen=True)
class Unscored:
    """No score came for an item, and why: a value of its own, never a low score."""

    item: str
    reason: str


class Filler(Protocol):
    """Fills a sheet."""

    name: str  # the judge's name
    provisional: bool  # its scores never stand for a person's

    def fill(self, sheet: Sheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """One outcome for every item, each as soon as it is known. `report` takes messages for people."""
        ...
