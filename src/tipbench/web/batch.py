"""Batch: a sheet that is judged in the browser, and what its judge has said of each item so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What is judged."""

    SHEET = "sheet"  # tips, on the rubric's scales
    DUEL = "duel"  # which of two answers is better


class Status(StrEnum):
    """Where a batch stands."""

    OPEN = "open"  # the judge is at work
    APPLIED = "applied"  # closed; the scores count
    HELD = "held"  # closed; the scores are beyond the drift limit and do not count


class State(StrEnum):
    """Where one item of a batch stands."""

    EMPTY = "empty"  # untouched, or cleared
    DRAFT = "draft"  # begun
    SUBMITTED = "submitted"  # whole: counted when the batch closes
    SKIPPED = "skipped"  # left for somebody else, with a reason


class Cause(StrEnum):
    """What made a version."""

    PUT = "put"
    UNDO = "undo"


@dataclass(frozen=True)
class Batch:
    """A sheet that is judged in the browser. Times are seconds since 1970."""

    sheet: str
    place: str  # identity of the MLflow that has the sheet
    experiment: str
    judge: str
    kind: Kind
    size: int  # items
    status: Status = Status.OPEN
    revision: int = 0
    opened: float = 0.0
    updated: float = 0.0
    closed: float | None = None
    note: str | None = None  # why an admin sent it back
    accepted: str | None = None  # why an admin accepted its drift
    outcome: Mapping[str, Any] | None = None  # what the last close told


@dataclass(frozen=True)
class Said:
    """What a judge says of an item: the state, the answer as canonical JSON, the reason of a skip."""

    state: State
    content: str
    reason: str = ""


@dataclass(frozen=True)
class Kept:
    """One version of an item. `parent` is the version that an undo brings back; None when there is nothing before."""

    item: str
    version: int
    parent: int | None
    cause: Cause
    said: Said
    seconds: float
    updated: float


class ItemMoved(Exception):
    """The item has another version than the writer saw; `present` is None for one that was never touched."""

    def __init__(self, present: Kept | None) -> None:
        super().__init__("the item has moved on")
        self.present = present


class BatchClosed(Exception):
    """Items of a closed batch do not change."""


class NothingBefore(Exception):
    """There is no step to undo."""
