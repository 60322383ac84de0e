"""Progress events of a collect, in order, for a progress bar or a log; `tipbench.jobs.events` writes them to a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tipbench.plan.grid import Cell


@dataclass(frozen=True)
class Message:
    """A message or a warning to show."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class BlockStarted:
    """A model's cells start, before its weights are loaded; `done` of `total` are already recorded."""

    model: str
    total: int
    done: int = 0


@dataclass(frozen=True)
class CellFinished:
    """A cell is saved in the journal."""

    cell: Cell
    failure: str | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class BlockFinished:
    """A model's weights are confirmed unloaded."""

    model: str


@dataclass(frozen=True)
class Waiting:
    """A server is unreachable; the run pauses for at most `limit_s` seconds (0: while other work continues)."""

    what: str
    limit_s: float = 0.0


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
