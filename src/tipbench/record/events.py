"""Progress events of a command, for the terminal, job files, logs and the panel.

Files and logs have one JSON object per line. Later versions read them too: do not change the meaning of a field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tipbench.generate.residency import Evidence as Evidence  # noqa: PLC0414 - re-exported, because it is an event
from tipbench.text import iso

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_TEXT_CHARS = 2000  # longer texts are truncated
MAX_LINE_BYTES = 65_536  # longer lines are ignored
_MAX_ITEMS = 100  # longer lists are truncated
_MAX_TIME_CHARS = 40
_URL_LOGIN = re.compile(r"(?<=://)[^/\s]*@")


@dataclass(frozen=True)
class Started:
    """The command has started."""

    version: str


@dataclass(frozen=True)
class Message:
    """A message or a warning to show."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Refused:
    """A requested model is refused; its cells are not generated."""

    model: str
    reason: str


@dataclass(frozen=True)
class BlockStarted:
    """The generation of a model's cells starts; its weights are not loaded yet."""

    model: str
    total: int  # cells of the model
    done: int = 0  # cells that were recorded before


@dataclass(frozen=True)
class CellFinished:
    """A cell is in the journal, answered or failed."""

    model: str
    prompt: str
    scenario: str
    done: int  # finished cells of the model, including cells that were recorded before
    total: int  # cells of the model
    failed: int = 0  # cells of the model that failed in this collect
    failure: str | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class BlockFinished:
    """A model's weights are confirmed unloaded."""

    model: str


@dataclass(frozen=True)
class Waiting:
    """A server is unreachable. The command waits for at most `limit_s` seconds; 0 means that it does not wait."""

    what: str  # the server
    limit_s: float = 0.0


@dataclass(frozen=True)
class Resumed:
    """The server is available again."""

    what: str  # the server


@dataclass(frozen=True)
class Recording:
    """Generation has ended; `left` results are not stored in MLflow yet."""

    left: int


@dataclass(frozen=True)
class Judging:
    """Progress of an automatic judge."""

    judge: str
    scored: int
    unscored: int  # items that the judge failed to score
    total: int


@dataclass(frozen=True)
class Simulating:
    """Progress of a simulation."""

    done: int  # finished seeds
    total: int  # seeds
    world: str
    policies: tuple[str, ...]
    rounds: tuple[int, ...]
    rewards: tuple[tuple[float, ...], ...]  # by policy and round: the mean reward up to this round
    users: int
    run_id: str | None = None  # MLflow run of the simulation, once it is recorded
    url: str | None = None


@dataclass(frozen=True)
class Failure:
    """The command failed with this error message."""

    text: str


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
    """Result of an automatic judge."""

    sheet: str
    judge: str
    scored: int
    unscored: int
    held: bool
    provisional: bool


@dataclass(frozen=True)
class Exit:
    """The last event of a command. If it is missing, the outcome is unknown."""

    code: int


Event = (
    Started | Message | Refused | BlockStarted | CellFinished | BlockFinished | Waiting | Resumed | Recording | Judging
    | Simulating | Failure | Evidence | Collected | Judged | Exit
)  # fmt: skip
Observer = Callable[[Event], None]
EVENT_TYPES: dict[str, type[Any]] = {
    "started": Started, "refused": Refused, "block_started": BlockStarted, "cell_finished": CellFinished,
    "block_finished": BlockFinished, "recording": Recording, "waiting": Waiting, "resumed": Resumed,
    "judging": Judging, "simulating": Simulating, "message": Message, "failure": Failure, "memory": Evidence,
    "collected": Collected, "judged": Judged, "exit": Exit,
}  # fmt: skip
_EVENT_NAMES = {event_type: name for name, event_type in EVENT_TYPES.items()}


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as JSON values, with its name under `event`. Truncates long values, removes logins from URLs."""
    return {"event": _EVENT_NAMES[type(event)], **{key: _json_value(value) for key, value in asdict(event).items()}}


def event_line(event: Event, at: float) -> bytes:
    """Serialize an event as a JSON line; `at` is a Unix timestamp."""
    return json.dumps({"at": iso(at), **event_json(event)}).encode("ascii") + b"\n"


def parse_line(line: bytes) -> tuple[str, Event] | None:
    """Return the time (ISO 8601) and the event of a line; None if it is invalid, too long or of an unknown type."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        raw = json.loads(line)
        event = _type_adapter(raw["event"]).validate_python(raw)
        at = str(raw["at"])
    except (ValueError, KeyError, TypeError, RecursionError):  # pydantic's ValidationError is a ValueError
        return None
    return at[:_MAX_TIME_CHARS], event


def strip_logins(text: str) -> str:
    """Return the text with user names and passwords removed from URLs."""
    return _URL_LOGIN.sub("", text)


@cache
def _type_adapter(name: str) -> TypeAdapter[Event]:
    from pydantic import TypeAdapter  # slow to import, and only readers of events need it

    return TypeAdapter(EVENT_TYPES[name])


def _json_value(value: Any) -> Any:
    if isinstance(value, str):
        text = strip_logins(value).encode("utf-8", "backslashreplace").decode()  # escapes lone surrogates
        return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value[:_MAX_ITEMS]]
    return value
