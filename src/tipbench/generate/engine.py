"""The Engine port: what can be asked, what comes back, and what is known about a model before asking."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tipbench.generate.residency import Evidence
from tipbench.plan.scenarios import Scenario


@dataclass(frozen=True)
class ModelFacts:
    """What an engine knows of a model before anything is generated. Unknown is None."""

    model: str
    engine: str
    engine_version: str
    host: str  # the machine that computes: tokens/s of two hosts do not compare
    digest: str
    params_b: float | None = None  # true parameter count, in billions
    quantization: str | None = None
    file_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    thinking: bool = False  # the model thinks unless told not to
    remote: bool = False  # computes elsewhere: never local weights
    completes: bool = True  # False for embedding-only models


@dataclass(frozen=True)
class Ask:
    """One question to one model. `options` holds every sampling option, seed included."""

    model: str
    system: str
    user: str
    scenario: Scenario
    n_tips: int
    options: Mapping[str, float | int]
    timeout_s: float = 300.0
    last: bool = False  # the model's last call: its weights may go when it ends
    thinking: bool = False  # the model would think; tell it not to
    cancel: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True)
class Completion:
    """A complete answer. Times in seconds; None where the engine does not say."""

    text: str
    done_reason: str  # stop | length | aborted (the stream ended cleanly, but without `done`)
    wall_s: float
    latency_s: float | None = None  # without load
    load_s: float | None = None
    ttft_s: float | None = None  # to the first token, without load
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    truncated: bool = False  # the server cut the prompt


class FailureKind(StrEnum):
    """Why no complete answer came."""

    MISSING_MODEL = "missing_model"  # the server does not have it (any more)
    NOT_LOCAL = "not_local"  # it would be computed elsewhere
    BUSY = "busy"  # 503, still after backing off
    LOAD_FAILED = "load_failed"  # 500 before the first token, twice
    PROMPT_TOO_LONG = "prompt_too_long"
    REJECTED = "rejected"  # any other 4xx: the request itself is wrong
    INCOMPLETE = "incomplete"  # an error after the first token, or an end with no text at all
    RESET = "reset"  # the connection broke while the server stayed up
    TIMEOUT = "timeout"
    SERVER_GONE = "server_gone"  # not the cell's fault: the run pauses and asks again
    CANCELLED = "cancelled"  # we stopped it ourselves; never recorded


@dataclass(frozen=True)
class EngineFailure:
    """No complete answer: a value, never a score and never a text. Keeps what did arrive."""

    kind: FailureKind
    reason: str
    partial: str = ""
    wall_s: float = 0.0


class Engine(Protocol):
    """Something that can be asked. Holds at most one model's weights at any time."""

    name: str

    def facts(self, model: str) -> ModelFacts:
        """Raises ModelRefused when the model is not there, ServerAway when nobody answers."""
        ...

    def prepare(self, facts: ModelFacts) -> None:
        """Called before a model's first call; returns when no other weights are in memory, or raises ResidencyError."""
        ...

    def complete(self, ask: Ask) -> Completion | EngineFailure:
        """One call, tried again only where the failure is not the model's. Thread-safe."""
        ...

    def release(self, model: str) -> None:
        """Called after a model's last call; returns when its weights are gone, or raises ResidencyError."""
        ...

    def alive(self) -> bool:
        """Whether calls can be answered at all; False pauses the run."""
        ...

    def abort(self) -> None:
        """Break off the calls under way, from another thread; each returns CANCELLED."""
        ...

    def evidence(self) -> Evidence | None:
        """What was seen in memory so far; None for engines that share memory with nobody."""
        ...

    def foreign_between(self, start: float, end: float) -> bool:
        """Whether another client's model was in memory between two monotonic times."""
        ...

    def close(self) -> None: ...


class InProcessEngine:
    """What the port asks of an engine that lives inside this process, where nobody else can load anything."""

    def prepare(self, facts: ModelFacts) -> None:
        pass

    def release(self, model: str) -> None:
        pass

    def alive(self) -> bool:
        return True

    def abort(self) -> None:
        pass  # such engines watch `Ask.cancel` themselves

    def evidence(self) -> Evidence | None:
        return None

    def foreign_between(self, start: float, end: float) -> bool:  # noqa: ARG002 - nobody else is in here
        return False

    def close(self) -> None:
        pass


def engine_of(model: str) -> str:
    """The engine a model's name stands for: a prefix of ours, else Ollama."""
    prefix, _, _ = model.partition(":")
    return prefix if prefix in ("embedded", "baseline") else "ollama"
