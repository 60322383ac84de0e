"""Progress: what a job's events add up to, for a live view that may join at any moment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tipbench.jobs import events as wire

_MESSAGES = 20


class Phase(StrEnum):
    """Where a model stands within a collect."""

    LOADING = "loading"  # nothing is answered yet
    GENERATING = "generating"  # k of n
    UNLOADING = "unloading"  # all is answered; its weights have not been seen gone
    EMPTY = "empty"  # memory was seen empty of it
    STOPPED = "stopped"  # the command ended in its middle; what became of the weights is in the messages


@dataclass(frozen=True)
class ModelProgress:
    """One model of a collect: `done` of `total` cells, those recorded before included."""

    model: str
    phase: Phase
    done: int
    total: int
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None  # of the last answer


@dataclass(frozen=True)
class Progress:
    """A job as its events tell it so far. Frozen: `after` gives the next one."""

    models: tuple[ModelProgress, ...] = ()  # in the order of their blocks
    waiting_for: tuple[str, ...] = ()
    recording_left: int | None = None
    judging: wire.Judging | None = None
    messages: tuple[wire.Message, ...] = ()  # the last few
    failure: str | None = None
    memory: wire.Memory | None = None
    collected: wire.Collected | None = None
    judged: wire.Judged | None = None
    exit_code: int | None = None

    def after(self, event: wire.Event) -> Progress:
        """What is known once the event has been read."""
        if isinstance(event, wire.BlockStarted | wire.CellFinished | wire.BlockFinished):
            return self._with_model(_moved(self._model(event.model), event))
        if isinstance(event, wire.Waiting):
            return replace(self, waiting_for=(*(w for w in self.waiting_for if w != event.what), event.what))
        if isinstance(event, wire.Resumed):
            return replace(self, waiting_for=tuple(what for what in self.waiting_for if what != event.what))
        if isinstance(event, wire.Message):
            return replace(self, messages=(*self.messages, event)[-_MESSAGES:])
        return self._ended(event) if isinstance(event, wire.Exit) else self._noted(event)

    def _noted(self, event: wire.Event) -> Progress:
        if isinstance(event, wire.Recording):
            return replace(self, recording_left=event.left)
        if isinstance(event, wire.Judging):
            return replace(self, judging=event)
        if isinstance(event, wire.Memory):
            return replace(self, memory=event)
        if isinstance(event, wire.Collected):
            return replace(self, collected=event, recording_left=0)
        if isinstance(event, wire.Judged):
            return replace(self, judged=event)
        return replace(self, failure=event.text) if isinstance(event, wire.Failure) else self

    def _ended(self, event: wire.Exit) -> Progress:
        models = tuple(m if m.phase is Phase.EMPTY else replace(m, phase=Phase.STOPPED) for m in self.models)
        return replace(self, models=models, waiting_for=(), exit_code=event.code)

    def _model(self, name: str) -> ModelProgress:
        known = next((model for model in self.models if model.model == name), None)
        return known or ModelProgress(name, Phase.LOADING, 0, 0)

    def _with_model(self, changed: ModelProgress) -> Progress:
        if all(model.model != changed.model for model in self.models):
            return replace(self, models=(*self.models, changed))
        return replace(self, models=tuple(changed if m.model == changed.model else m for m in self.models))

    def to_json(self) -> dict[str, Any]:
        """Plain values for the API and the page."""
        return {
            "models": [{**vars(model), "phase": model.phase.value} for model in self.models],
            "waiting_for": list(self.waiting_for),
            "recording_left": self.recording_left,
            "judging": _plain(self.judging),
            "messages": [{"text": message.text, "warning": message.warning} for message in self.messages],
            "failure": self.failure,
            "memory": _plain(self.memory),
            "collected": _plain(self.collected),
            "judged": _plain(self.judged),
            "exit_code": self.exit_code,
        }


def _moved(model: ModelProgress, event: wire.BlockStarted | wire.CellFinished | wire.BlockFinished) -> ModelProgress:
    if isinstance(event, wire.BlockStarted):
        return ModelProgress(event.model, Phase.LOADING, event.done, event.total)
    if isinstance(event, wire.BlockFinished):
        return replace(model, phase=Phase.EMPTY)
    return replace(
        model,
        phase=Phase.GENERATING if event.done < event.total else Phase.UNLOADING,
        done=event.done,
        total=event.total,
        failed=event.failed,
        output_tokens=model.output_tokens + (event.output_tokens or 0),
        tokens_per_s=event.tokens_per_s if event.tokens_per_s is not None else model.tokens_per_s,
    )


def _plain(event: wire.Event | None) -> dict[str, Any] | None:
    if event is None:
        return None
    return {key: value for key, value in wire.event_json(event).items() if key != "event"}
