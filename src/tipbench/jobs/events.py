"""Event types that a command emits, one JSON object per line.

They feed the panel's live view (`tipbench.jobs.progress`) and are stored after the process ends, so existing fields
keep their meaning; new events may be added, and readers ignore unknown ones.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tipbench.record.events import BlockFinished, BlockStarted, Message, Recording, Resumed, Waiting
from tipbench.text import iso

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "EVENT_TYPES",
    "BlockFinished",
    "BlockStarted",
    "CellFinished",
    "Collected",
    "Event",
    "Exit",
    "Failure",
    "Judged",
    "Judging",
    "Memory",
    "Message",
    "Recording",
    "Resumed",
    "Simulating",
    "Started",
    "Waiting",
    "event_json",
    "event_line",
    "parse_line",
    "strip_logins",
]  # fmt: skip

MOST_TEXT = 2000
MOST_LINE = 65_536
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")


@dataclass(frozen=True)
class Started:
    """The command has started."""

    version: str


@dataclass(frozen=True)
class CellFinished:
    """A cell is generated or has failed; `done` of the model's `total`, `failed` of them in this run."""

    model: str
    prompt: str
    scenario: str
    done: int
    total: int
    failed: int = 0
    failure: str | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Judging:
    """Progress of an automatic judge."""

    judge: str
    scored: int
    unscored: int
    total: int


@dataclass(frozen=True)
class Simulating:
    """Progress of a simulation: `done` of `total` seeds, with the mean reward so far of each policy by round."""

    done: int
    total: int
    world: str
    policies: tuple[str, ...]
    rounds: tuple[int, ...]
    rewards: tuple[tuple[float, ...], ...]
    users: int
    run_id: str | None = None  # in MLflow, once it is recorded
    url: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why the command failed, with the message it also prints."""

    text: str


@dataclass(frozen=True)
class Memory:
    """Summary of the models observed in the server's memory."""

    samples: int
    most_resident: int
    largest_gap_s: float
    handovers: int
    unknown_samples: int = 0
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collected:
    """Result of a collect."""

    experiment: str
    cells: int
    recorded_before: int
    generated: int
    failed: int
    refused: tuple[str, ...] = ()
    seconds: float | None = None
    url: str | None = None


@dataclass(frozen=True)
class Judged:
    """Result of an automatic judge's run."""

    sheet: str
    judge: str
    scored: int
    unscored: int
    held: bool
    provisional: bool


@dataclass(frozen=True)
class Exit:
    """The last event, on disk before the process ends; if it is missing, the outcome is unknown."""

    code: int


Event = (
    Started
    | BlockStarted
    | CellFinished
    | BlockFinished
    | Recording
    | Waiting
    | Resumed
    | Judging
    | Simulating
    | Message
    | Failure
    | Memory
    | Collected
    | Judged
    | Exit
)
EVENT_TYPES: dict[str, type[Any]] = {
    "started": Started,
    "block_started": BlockStarted,
    "cell_finished": CellFinished,
    "block_finished": BlockFinished,
    "recording": Recording,
    "waiting": Waiting,
    "resumed": Resumed,
    "judging": Judging,
    "simulating": Simulating,
    "message": Message,
    "failure": Failure,
    "memory": Memory,
    "collected": Collected,
    "judged": Judged,
    "exit": Exit,
}
_NAMES = {kind: name for name, kind in EVENT_TYPES.items()}


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as plain values, its name under `event`; strings are truncated and stripped of credentials."""
    return {"event": _NAMES[type(event)], **{key: _plain(value) for key, value in asdict(event).items()}}


def event_line(event: Event, at: float) -> bytes:
    """Serialize an event as a JSON line."""
    return json.dumps({"at": iso(at), **event_json(event)}).encode("ascii") + b"\n"


def parse_line(line: bytes) -> tuple[str, Event] | None:
    """Parse a line into its time and event; None if it is invalid, too long or of an unknown type."""
    if len(line) > MOST_LINE:
        return None
    try:
        raw = json.loads(line)
        at, event = str(raw["at"]), _reader(raw["event"]).validate_python(raw)
    except (ValueError, KeyError, TypeError, RecursionError):  # pydantic's ValidationError is a ValueError
        return None
    return at[:40], event


def strip_logins(text: str) -> str:
    """Return the text with user names and passwords removed from URLs."""
    return _LOGIN.sub("", text)


@cache
def _reader(name: str) -> TypeAdapter[Event]:
    from pydantic import TypeAdapter

    return TypeAdapter(EVENT_TYPES[name])


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        text = strip_logins(value).encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:100]]
    return value
