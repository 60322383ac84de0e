"""What a command tells a program that watches it: one JSON object a line, in the words of this file.

They feed the panel's live view (`tipbench.jobs.progress`) and outlive the process that wrote them, so a word keeps its
meaning; a new one is added, and readers leave out what they do not know.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tipbench.times import iso

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_TEXT = 2000
MOST_LINE = 65_536
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")


@dataclass(frozen=True)
class Started:
    """The command begins."""

    version: str


@dataclass(frozen=True)
class BlockStarted:
    """A model's cells begin, and its weights are about to be loaded; `done` of `total` were recorded before."""

    model: str
    total: int
    done: int = 0


@dataclass(frozen=True)
class CellFinished:
    """A cell is generated, or has failed: `done` of the model's `total`, `failed` of them in this run."""

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
class BlockFinished:
    """A model's weights were seen gone from memory."""

    model: str


@dataclass(frozen=True)
class Recording:
    """Nothing is generated any more; so many results are on their way to MLflow."""

    left: int


@dataclass(frozen=True)
class Waiting:
    """A server is away; the command pauses for at most `limit_s` (0: as long as other work goes on)."""

    what: str
    limit_s: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """The server is back."""

    what: str


@dataclass(frozen=True)
class Judging:
    """A judge without a person is so far."""

    judge: str
    scored: int
    unscored: int
    total: int


@dataclass(frozen=True)
class Message:
    """Something worth a line."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Failure:
    """Why the command gives up, in the sentence it also prints."""

    text: str


@dataclass(frozen=True)
class Memory:
    """The evidence of what was in the server's memory."""

    samples: int
    most_resident: int
    largest_gap_s: float
    handovers: int
    unknown_samples: int = 0
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collected:
    """How a collect ended."""

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
    """How a judge's run ended."""

    sheet: str
    judge: str
    scored: int
    unscored: int
    held: bool
    provisional: bool


@dataclass(frozen=True)
class Exit:
    """The last one, on disk before the process ends. Without it nobody knows how the command ended."""

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
    | Message
    | Failure
    | Memory
    | Collected
    | Judged
    | Exit
)
VOCABULARY: dict[str, type[Any]] = {
    "started": Started,
    "block_started": BlockStarted,
    "cell_finished": CellFinished,
    "block_finished": BlockFinished,
    "recording": Recording,
    "waiting": Waiting,
    "resumed": Resumed,
    "judging": Judging,
    "message": Message,
    "failure": Failure,
    "memory": Memory,
    "collected": Collected,
    "judged": Judged,
    "exit": Exit,
}
_NAMES = {kind: name for name, kind in VOCABULARY.items()}


def event_json(event: Event) -> dict[str, Any]:
    """An event as plain values: its name under `event`, then its fields; texts are bounded and hold no login."""
    return {"event": _NAMES[type(event)], **{key: _plain(value) for key, value in asdict(event).items()}}


def event_line(event: Event, at: float) -> bytes:
    """An event as a line of a file."""
    return json.dumps({"at": iso(at), **event_json(event)}).encode("ascii") + b"\n"


def parse_line(line: bytes) -> tuple[str, Event] | None:
    """When, and what; None for a line that is broken, too long or of another version."""
    if len(line) > MOST_LINE:
        return None
    try:
        raw = json.loads(line)
        at, event = str(raw["at"]), _reader(raw["event"]).validate_python(raw)
    except (ValueError, KeyError, TypeError, RecursionError):  # pydantic's own error is a ValueError
        return None
    return at[:40], event


def without_logins(text: str) -> str:
    """A text whose web addresses hold no user name and password."""
    return _LOGIN.sub("", text)


@cache
def _reader(name: str) -> TypeAdapter[Event]:
    from pydantic import TypeAdapter

    return TypeAdapter(VOCABULARY[name])


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        text = without_logins(value).encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:100]]
    return value
