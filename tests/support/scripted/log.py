"""What a scripted server has seen: every request, every load, and how many models were resident."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


def messages_hash(messages: object) -> str:
    """A hash of 16 hex digits that identifies a prompt."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(slots=True)
class Request:
    """One request; times are seconds since the epoch. `outcome` is running, finished, aborted (by the client),
    reset (by the server) or dropped (the server stopped listening)."""

    path: str
    started: float
    model: str | None = None
    nth: int = 0  # the model's how-manieth chat call, from 1
    keep_alive: object = None
    options: dict[str, object] = field(default_factory=dict)
    messages: str = ""  # messages_hash of them
    finished: float | None = None
    outcome: str = "running"
    status: int = 0
    faults: tuple[str, ...] = ()
    load_s: float | None = None  # waited for the model; None where none was needed
    loaded: bool = False  # this request made the server load
    body: dict[str, object] = field(default_factory=dict, repr=False)  # in process only

    def as_json(self) -> dict[str, object]:
        """Everything but the body."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "body"}


@dataclass
class Log:
    """Grows while the server runs; read it from any thread."""

    requests: list[Request] = field(default_factory=list)
    loads: Counter[str] = field(default_factory=Counter)
    unloads: Counter[str] = field(default_factory=Counter)
    timeline: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    max_resident: int = 0  # weights in memory, whether /api/ps listed them or not

    def resident(self, names: Sequence[str]) -> None:
        """Notes the set of resident models after a change."""
        self.timeline.append((time.time(), tuple(names)))
        self.max_resident = max(self.max_resident, len(names))

    def calls(self, model: str | None = None, *, path: str = "/api/chat", outcome: str | None = None) -> list[Request]:
        """The requests to a path, of one model and with one outcome where given."""
        return [
            request
            for request in list(self.requests)
            if request.path == path
            and (model is None or request.model == model)
            and (outcome is None or request.outcome == outcome)
        ]

    def as_json(self, *, brief: bool = False) -> dict[str, object]:
        """The body of GET /_log; brief leaves the requests out."""
        outcomes = Counter(request.outcome for request in self.requests if request.path == "/api/chat")
        answer: dict[str, object] = {
            "loads": dict(self.loads),
            "unloads": dict(self.unloads),
            "max_resident": self.max_resident,
            "timeline": self.timeline,
            "n_requests": len(self.requests),
            "chat_outcomes": dict(outcomes),
        }
        return answer if brief else answer | {"requests": [request.as_json() for request in self.requests]}
