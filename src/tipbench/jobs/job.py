"""Job: a tipbench command in the background, the states it may be in, and the Runner port that carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tipbench.errors import JobConflict
from tipbench.jobs.event_log import Recorded
from tipbench.times import iso


class JobKind(StrEnum):
    """Which command a job runs."""

    COLLECT = "collect"
    JUDGE = "judge"
    SIMULATE = "simulate"


class JobState(StrEnum):
    """Where a job stands; `MOVES` has the legal changes."""

    QUEUED = "queued"  # accepted; waits for its turn on what it needs
    RUNNING = "running"  # started, and seen
    WAITING = "waiting"  # started, and parked until somebody outside (a judge) has answered; holds nothing meanwhile
    SUCCEEDED = "succeeded"  # ended with exit code 0
    FAILED = "failed"  # ended with another exit code, or could not be started
    CANCELLED = "cancelled"  # ended because somebody asked for it
    LOST = "lost"  # started, and out of sight: its process is gone without a word, or its scheduler does not answer


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
ACTIVE = frozenset({JobState.RUNNING, JobState.WAITING, JobState.LOST})  # a runner has to be asked how they are

MOVES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: ENDED | {JobState.WAITING, JobState.LOST},
    JobState.WAITING: ENDED | {JobState.RUNNING},
    JobState.LOST: frozenset({JobState.RUNNING}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def check_move(old: JobState, new: JobState) -> None:
    """Refuses a change of state that `MOVES` does not have."""
    if new not in MOVES[old]:
        legal = " or ".join(sorted(MOVES[old])) or "nothing else any more"
        raise JobConflict(f"A job that is {old} may become {legal}, not {new}. Look at the job again.")


def moves_between(old: JobState, new: JobState) -> tuple[JobState, ...]:
    """The fewest legal moves from one state to another, the last of them `new`; none when there is no way."""
    roads: list[tuple[JobState, ...]] = [()]
    seen = {old}
    for road in roads:  # grows while it is walked: breadth first
        here = road[-1] if road else old
        if here is new:
            return road
        for target in sorted(MOVES[here] - seen):
            seen.add(target)
            roads.append((*road, target))
    return ()


@dataclass(frozen=True)
class Order:
    """What somebody wants to have run. `jobs.command` makes one from a configuration."""

    kind: JobKind
    experiment: str
    arguments: Mapping[str, Any]  # the command's options by key, without secrets; also an Airflow run's conf
    private: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables with secrets; never shown
    resources: tuple[str, ...] = ()  # what only one job may use at a time, as an Ollama server
    started_by: str = ""
    runner: str = "local"
    retry_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job(Order):
    """An order that was accepted. Times are seconds since 1970."""

    id: str
    state: JobState
    created: float
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    reason: str = ""  # why it failed, is lost, or cannot start
    links: Mapping[str, str] = field(default_factory=dict)  # pages of this job elsewhere: mlflow, airflow
    key: str | None = None  # the idempotency key it was ordered with
    claimed: float | None = None  # a supervisor began to start it
    cancel_requested: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values for the API and `--json`; nothing secret among them."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "state": self.state.value,
            "experiment": self.experiment,
            "retry_of": self.retry_of,
            "links": dict(self.links),
            "arguments": dict(self.arguments),
            "created": iso(self.created),
            "started": iso(self.started),
            "ended": iso(self.ended),
            "exit_code": self.exit_code,
            "reason": self.reason or None,
            "cancel_requested": self.cancel_requested is not None,
            "started_by": self.started_by or None,
            "runner": self.runner,
        }


@dataclass(frozen=True)
class Sighting:
    """What a runner sees of a job that was started: any state but queued."""

    state: JobState
    exit_code: int | None = None
    reason: str = ""
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LogTail:
    """The end of what a job printed; `cut` when there was more before it. `size` is that of the whole, in bytes."""

    text: str
    size: int
    cut: bool


class Runner(Protocol):
    """Who carries jobs out. Nothing of it lives in this process: a job outlives the panel that started it.

    A runner that cannot be reached raises ServerAway; the job is then lost, or stays queued, until it answers.
    """

    name: str

    def start(self, job: Job) -> None:
        """Start it, once: nothing happens when it was started before, by whomever. NotStarted when it cannot be."""
        ...

    def observe(self, job: Job) -> Sighting:
        """How it is; LOST when nothing is seen of it."""
        ...

    def cancel(self, job: Job) -> None:
        """Ask it to end, politely at first; called again and again until it is seen ended.

        One that was not started yet never will be, and is seen as CANCELLED.
        """
        ...

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[Recorded]:
        """What it has reported since, oldest first. `after` is the `cursor` of the last event already known."""
        ...

    def log(self, job: Job, most_bytes: int = 65_536) -> LogTail:
        """The end of what it printed."""
        ...

    def forget(self, job: Job) -> None:
        """Throw away what is kept here of a job that has ended; nothing happens when there is nothing."""
        ...
