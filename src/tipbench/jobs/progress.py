"""Progress of a job, computed from its events and cached per job."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tipbench.errors import ServerUnavailable
from tipbench.jobs.job import Job, RecordedEvent, Runner
from tipbench.record import events

_MAX_MESSAGES = 20
_MAX_CACHED = 200  # jobs
_PAGE_SIZE = 500  # events read at a time


class Phase(StrEnum):
    """Phase of a model within a collect."""

    LOADING = "loading"  # no cell is finished yet
    GENERATING = "generating"  # some cells are finished
    UNLOADING = "unloading"  # all cells are finished; not yet confirmed unloaded
    EMPTY = "empty"  # confirmed unloaded
    STOPPED = "stopped"  # the command ended before the model was confirmed unloaded


@dataclass(frozen=True)
class ModelProgress:
    """Progress of one model: `done` of `total` cells, including those already recorded."""

    model: str
    phase: Phase
    done: int
    total: int
    failed: int = 0
    output_tokens: int = 0
    tokens_per_s: float | None = None  # of the last response
    recorded: int = 0  # cells of `done` that were recorded before this job

    def after(self, event: events.BlockStarted | events.CellFinished | events.BlockFinished) -> ModelProgress:
        """Return the progress after an event."""
        if isinstance(event, events.BlockStarted):
            return ModelProgress(event.model, Phase.LOADING, event.done, event.total, recorded=event.done)
        if isinstance(event, events.BlockFinished):
            return replace(self, phase=Phase.EMPTY)
        return replace(
            self,
            phase=Phase.GENERATING if event.done < event.total else Phase.UNLOADING,
            done=event.done,
            total=event.total,
            failed=event.failed,
            output_tokens=self.output_tokens + (event.output_tokens or 0),
            tokens_per_s=event.tokens_per_s if event.tokens_per_s is not None else self.tokens_per_s,
        )


@dataclass(frozen=True)
class Progress:
    """Progress of a job so far. Immutable: `after` returns the next value."""

    models: tuple[ModelProgress, ...] = ()  # in the order they were started
    refused: tuple[events.Refused, ...] = ()
    waiting_for: tuple[str, ...] = ()  # servers
    recording_left: int | None = None  # results still to be sent to MLflow
    judging: events.Judging | None = None
    simulating: events.Simulating | None = None
    messages: tuple[events.Message, ...] = ()  # the most recent ones
    failure: str | None = None
    memory: events.Evidence | None = None  # models seen in memory during a collect
    collected: events.Collected | None = None
    judged: events.Judged | None = None
    exit_code: int | None = None

    def after(self, event: events.Event) -> Progress:
        """Return the progress after an event."""
        match event:
            case events.BlockStarted() | events.CellFinished() | events.BlockFinished():
                by_model = {progress.model: progress for progress in self.models}
                progress = by_model.get(event.model) or ModelProgress(event.model, Phase.LOADING, done=0, total=0)
                by_model[event.model] = progress.after(event)
                return replace(self, models=tuple(by_model.values()))
            case events.Waiting():
                other_servers = (server for server in self.waiting_for if server != event.what)
                return replace(self, waiting_for=(*other_servers, event.what))
            case events.Resumed():
                return replace(self, waiting_for=tuple(server for server in self.waiting_for if server != event.what))
            case events.Message():
                return replace(self, messages=(*self.messages, event)[-_MAX_MESSAGES:])
            case events.Refused():
                other_models = (refused for refused in self.refused if refused.model != event.model)
                return replace(self, refused=(*other_models, event))
            case events.Recording():
                return replace(self, recording_left=event.left)
            case events.Judging():
                return replace(self, judging=event)
            case events.Simulating():
                return replace(self, simulating=event)
            case events.Evidence():
                return replace(self, memory=event)
            case events.Collected():
                return replace(self, collected=event, recording_left=0)
            case events.Judged():
                return replace(self, judged=event)
            case events.Failure():
                return replace(self, failure=event.text)
            case events.Exit():
                models = tuple(
                    progress if progress.phase is Phase.EMPTY else replace(progress, phase=Phase.STOPPED)
                    for progress in self.models
                )
                return replace(self, models=models, waiting_for=(), exit_code=event.code)
        return self

    @property
    def failure_reason(self) -> str:
        """Why the command failed: its message, failed cells, held scores or items without a score; else empty."""
        if self.failure:
            return self.failure
        if self.collected is not None and self.collected.failed:
            return f"{self.collected.failed} of {self.collected.cells} cells failed; a retry tries them again."
        if self.judged is not None and self.judged.held:
            return f"The scores of {self.judged.judge} are held: their drift is over the limit."
        if self.judged is not None and self.judged.unscored:
            return f"{self.judged.unscored} items have no score."
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the API and the panel."""
        from pydantic_core import to_jsonable_python  # a slow import, which the launcher of jobs/local.py avoids

        values: dict[str, Any] = to_jsonable_python(self)
        return values


@dataclass(frozen=True)
class ProgressSnapshot:
    """Progress of a job up to and including the event at `cursor`."""

    cursor: int = 0
    progress: Progress = field(default_factory=Progress)

    def after(self, recorded: RecordedEvent) -> ProgressSnapshot:
        """Return the snapshot after one more event."""
        return ProgressSnapshot(recorded.cursor, self.progress.after(recorded.event))


class ProgressCache:
    """LRU cache of the progress by job. Thread-safe."""

    def __init__(self, runner_of: Callable[[Job], Runner], max_jobs: int = _MAX_CACHED) -> None:
        self._runner_of = runner_of
        self._max_jobs = max_jobs
        self._lock = threading.Lock()
        self._snapshots: OrderedDict[str, ProgressSnapshot] = OrderedDict()

    def current(self, job: Job) -> ProgressSnapshot:
        """Return the current progress; if the runner is unavailable, that of the events read so far."""
        with self._lock:
            snapshot = self._snapshots.get(job.id, ProgressSnapshot())
        try:
            for recorded in events_after(self._runner_of(job), job, snapshot.cursor):
                snapshot = snapshot.after(recorded)
        except ServerUnavailable:
            return snapshot
        with self._lock:
            # Another thread may have cached a later snapshot.
            if self._snapshots.get(job.id, ProgressSnapshot()).cursor <= snapshot.cursor:
                self._snapshots[job.id] = snapshot
            self._snapshots.move_to_end(job.id)
            while len(self._snapshots) > self._max_jobs:
                self._snapshots.popitem(last=False)
        return snapshot

    def at(self, job: Job, cursor: int) -> ProgressSnapshot:
        """Return the progress at `cursor`; the current one if the cursor is past the last event."""
        current = self.current(job)
        if cursor >= current.cursor:
            return current
        snapshot = ProgressSnapshot()
        for recorded in events_after(self._runner_of(job), job, 0):
            if recorded.cursor > cursor:
                break
            snapshot = snapshot.after(recorded)
        return snapshot


def refused_text(collected: events.Collected | None) -> str:
    """Return why models were refused, as one text; empty if none was."""
    if collected is None or not collected.refused:
        return ""
    return f"Refused models were left out: {' '.join(collected.refused)}"


def events_after(runner: Runner, job: Job, cursor: int) -> Iterator[RecordedEvent]:
    """Yield all events after `cursor`, oldest first."""
    while True:
        page = runner.events(job, cursor, _PAGE_SIZE)
        yield from page
        if len(page) < _PAGE_SIZE:
            return
        cursor = page[-1].cursor
