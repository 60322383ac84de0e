"""Types of a run: its kind, its state, and its data before and after it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tipbench.errors import MlflowError


class RunState(StrEnum):
    """State of a cell's run."""

    PENDING = "pending"  # answered; waiting for a judge
    JUDGED = "judged"  # every tip is scored, or the answer is floored
    FAILED = "failed"  # no complete answer; never scored; the next collect asks for it again, as a new run


TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.JUDGED}),
    RunState.JUDGED: frozenset({RunState.PENDING}),  # if all its scores are held later
    RunState.FAILED: frozenset(),
}


def check_transition(old: str | None, new: str) -> None:
    """Raise MlflowError for a transition that is not in `TRANSITIONS`; keeping the state is always legal."""
    if old == new:
        return
    targets = TRANSITIONS[RunState(old)] if old in set(RunState) else frozenset()  # unknown states have none
    if new not in targets:
        legal = " or ".join(sorted(targets)) or "nothing else"
        raise MlflowError(
            f"A run that is {old or 'without a state'} may become {legal}, not {new}. Nothing was changed: "
            "read the run again; another process may have changed it.",
            code="ILLEGAL_MOVE",
        )


class RunKind(StrEnum):
    """Kind of a run in MLflow (tag `kind`)."""

    CELL = "cell"
    COLLECTION = "collection"  # a collect
    JUDGING = "judging"  # a sheet
    LEADERBOARD = "leaderboard"
    DECISION = "decision"  # from `tipbench decide`
    REFUSED = "refused"  # a model that a collect refused, with the reason
    SIMULATION = "simulation"  # in the experiment tip-sim


@dataclass(frozen=True)
class NewRun:
    """A finished run, before it is stored; later updates use `RunChange`."""

    kind: RunKind
    record_id: str  # created before the run is stored, so that storing it again adds no second run
    name: str
    start_ms: int
    end_ms: int
    ok: bool = True  # False: the status in MLflow is FAILED, not FINISHED
    cell_key: str | None = None  # only for cells; at most one finished run per key is stored, unless superseded
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)  # strings of any length; see `tipbench.record.texts`
    supersedes: tuple[str, ...] = ()  # ids of runs to tag superseded=true once this one is stored


@dataclass(frozen=True, kw_only=True)
class RunChange:
    """Metrics, tags and texts to add to a stored run or to replace in it."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    at_ms: int  # when the metrics were measured


@dataclass(frozen=True)
class StoredRun:
    """A run read from the store. `RunStore.read` and `RunStore.get` return its texts separately."""

    run_id: str
    status: str  # FINISHED, FAILED or RUNNING (half written)
    start_ms: int
    end_ms: int | None
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]

    @property
    def state(self) -> str | None:
        return self.tags.get("state")
