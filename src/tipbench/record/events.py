"""Progress events of a collect, in order, for a progress bar, a log or the panel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tipbench.plan.grid import Cell


@dataclass(frozen=True)
class Message:
    """A message or a warning to show."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class BlockStarted:
    """Generation of a model's cells starts; `recorded` of `total` are already recorded."""

    model: str
    total: int
    recorded: int


@dataclass(frozen=True)
class CellFinished:
    """A cell is saved in the journal."""

    cell: Cell
    failure: str | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class BlockFinished:
    """A model's weights are unloaded."""

    model: str


@dataclass(frozen=True)
class Waiting:
    """A server is unreachable; the run pauses for at most `limit_s` seconds."""

    what: str
    limit_s: float


@dataclass(frozen=True)
class Resumed:
    """The server is available again."""

    what: str


@dataclass(frozen=True)
class Recording:
    """Generation is finished (or there was none); `left` results are still to be sent to MLflow."""

    left: int


Event = Message | BlockStarted | CellFinished | BlockFinished | Waiting | Resumed | Recording
Observer = Callable[[Event], None]
