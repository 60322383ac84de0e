"""The log of a scripted server: requests, loads, and how many models were resident."""

from __future__ import annotations

import hashlib
import json
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
    nth: int = 0  # number of this call among the model's calls of the path, from 1
    keep_alive: object = None
    options: dict[str, object] = field(default_factory=dict)
    messages: str = ""  # their messages_hash
    finished: float | None = None
    outcome: str = "running"
    status: int = 0
    load_s: float | None = None  # waited for the model; None where none was needed
    body: dict[str, object] = field(default_factory=dict, repr=False)  # in process only

    def as_json(self) -> dict[str, object]:
        """Everything but the body."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "body"}


@dataclass
class Log:
    """Grows while the server runs; may be read from any thread."""

    requests: list[Request] = field(default_factory=list)
    loads: Counter[str] = field(default_factory=Counter)
    unloads: Counter[str] = field(default_factory=Counter)
    resident: tuple[str, ...] = ()  # weights in memory, whether /api/ps lists them or not
    max_resident: int = 0

    def set_resident(self, names: Sequence[str]) -> None:
        self.resident = tuple(names)
        self.max_resident = max(self.max_resident, len(names))

    def calls(self, model: str | None = None, *, path: str = "/api/chat", outcome: str | None = None) -> list[Request]:
        """The requests to a path, filtered by model and outcome."""
        return [
            request
            for request in list(self.requests)
            if request.path == path
            and (model is None or request.model == model)
            and (outcome is None or request.outcome == outcome)
        ]

    def as_json(self) -> dict[str, object]:
        """The body of GET /_log."""
        requests = [request.as_json() for request in self.requests]
        return {"loads": dict(self.loads), "max_resident": self.max_resident, "requests": requests}
