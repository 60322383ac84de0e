"""What a collect tells whoever watches it: small facts, in order, for a progress bar, a log or a panel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tipbench.plan.grid import Cell


@dataclass(frozen=True)
class Message:
    """Something worth a line."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class BlockStarted:
    """A model's cells begin; `recorded` of `total` were there before."""

    model: str
    total: int
    recorded: int


@dataclass(frozen=True)
class CellFinished:
    """A cell is in the journal."""

    cell: Cell
    failure: str | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class BlockFinished:
    """A model's weights are gone."""

    model: str


@dataclass(frozen=True)
class Waiting:
    """A server is away; the run pauses for at most `limit_s`."""

    what: str
    limit_s: float


@dataclass(frozen=True)
class Resumed:
    """The server is back."""

    what: str


@dataclass(frozen=True)
class Recording:
    """Generation is done (or there is none); so many results are still on their way to MLflow."""

    left: int


Event = Message | BlockStarted | CellFinished | BlockFinished | Waiting | Resumed | Recording
Observer = Callable[[Event], None]
