"""The Filler port: a judge without a person in front of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tipbench.judge.sheet import ItemScore, Sheet
from tipbench.record.events import Event, Message, Observer, Resumed, Waiting


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


def telling(report: Callable[[str], None]) -> Observer:
    """Waits for a server, in words."""

    def tell(event: Event) -> None:
        if isinstance(event, Waiting):
            report(f"{event.what} is away: waiting for at most {event.limit_s:g} s")
        elif isinstance(event, Resumed):
            report(f"{event.what} is back")
        elif isinstance(event, Message):
            report(event.text)

    return tell
