"""Jobs: tipbench commands that run in the background, their states, and the Runner port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tipbench.record.events import Event


class JobKind(StrEnum):
    """The command that a job runs."""

    COLLECT = "collect"
    JUDGE = "judge"
    SIMULATE = "simulate"


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"  # accepted; waits for its resources
    RUNNING = "running"  # started
    WAITING = "waiting"  # started; waits until judging is finished, and holds no resources
    SUCCEEDED = "succeeded"  # ended with exit code 0
    FAILED = "failed"  # ended with an exit code other than 0, or could not be started
    CANCELLED = "cancelled"  # ended by a cancel request
    LOST = "lost"  # started, but its process ended without an exit code, or its runner is unavailable


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
ACTIVE = frozenset({JobState.RUNNING, JobState.WAITING, JobState.LOST})  # started, not in ENDED
RETRIABLE = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.LOST})

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: ENDED | {JobState.WAITING, JobState.LOST},
    JobState.WAITING: ENDED | {JobState.RUNNING},
    JobState.LOST: frozenset({JobState.RUNNING}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def path_between(old: JobState, new: JobState) -> tuple[JobState, ...]:
    """Return the states after `old` on the way to `new`: directly or via RUNNING. Empty if there is no legal path."""
    if new in TRANSITIONS[old]:
        return (new,)
    if new is not old and JobState.RUNNING in TRANSITIONS[old] and new in TRANSITIONS[JobState.RUNNING]:
        return (JobState.RUNNING, new)
    return ()


@dataclass(frozen=True)
class JobRequest:
    """A request to run a job; `jobs/command.py` builds it from a configuration."""

    kind: JobKind
    experiment: str
    arguments: Mapping[str, Any]  # the command's options by key, without secrets
    private: Mapping[str, str] = field(default_factory=dict, repr=False)  # environment variables with secrets
    resources: tuple[str, ...] = ()  # such as an Ollama server; a resource is used by one job at a time
    started_by: str = ""
    runner: str = "local"
    retry_of: str | None = None  # id of the job that this one repeats


@dataclass(frozen=True, kw_only=True)
class Job(JobRequest):
    """A stored request with its state. Times are Unix timestamps."""

    id: str
    state: JobState
    created: float
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    reason: str = ""  # explains the state, such as why the job failed or cannot start
    links: Mapping[str, str] = field(default_factory=dict)  # URLs of its pages; keys: mlflow, airflow
    key: str | None = None  # the idempotency key of its request
    claimed: float | None = None  # when a supervisor began to start it
    cancel_requested: float | None = None


@dataclass(frozen=True)
class JobStatus:
    """The status of a started job, as returned by its runner. Its state is never QUEUED."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedEvent:
    """An event of a job with its time."""

    cursor: int  # pass as `after` to read the following events
    at: str  # ISO 8601, UTC
    event: Event


@dataclass(frozen=True)
class LogTail:
    """The end of a job's log."""

    text: str
    size: int  # of the whole log, in bytes
    cut: bool  # whether earlier output is omitted


class Runner(Protocol):
    """Runs jobs outside this process, so that they continue when the panel stops.

    All methods raise ServerUnavailable if the runner's server is unavailable. Until it responds, started jobs are LOST
    and others stay QUEUED.
    """

    name: str

    def start(self, job: Job) -> None:
        """Start the job; does nothing if it was already started. Raises JobStartError if it cannot be started."""
        ...

    def observe(self, job: Job) -> JobStatus:
        """Return the job's status; LOST if it cannot be found."""
        ...

    def cancel(self, job: Job) -> None:
        """Stop the job, gracefully at first. Called repeatedly until the job has ended.

        A job that was not started yet is never started, and its status is CANCELLED.
        """
        ...

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        """Return the job's events after the cursor `after`, oldest first."""
        ...

    def log(self, job: Job, max_bytes: int = 65_536) -> LogTail:
        """Return the end of the job's log."""
        ...

    def forget(self, job: Job) -> None:
        """Delete the stored data of an ended job; does nothing if there is none."""
        ...
