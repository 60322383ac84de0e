"""Run: what is kept of one cell, and the states it may be in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tipbench.errors import MlflowRefused


class RunState(StrEnum):
    """Where a cell's run stands; `MOVES` has the legal changes."""

    PENDING = "pending"  # answered; waits for a judge
    JUDGED = "judged"  # every tip scored under the pinned rubric, or floored for want of a tip
    FAILED = "failed"  # no complete answer came; never scored, tried again as a new run


MOVES: Mapping[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.JUDGED}),
    RunState.JUDGED: frozenset({RunState.PENDING}),
    RunState.FAILED: frozenset(),
}


def check_move(old: str | None, new: str) -> None:
    """Refuses a change of state that `MOVES` does not have; staying is always legal."""
    if old == new:
        return
    targets = MOVES[RunState(old)] if old in set(RunState) else frozenset()
    if new not in targets:
        legal = " or ".join(sorted(targets)) or "nothing else"
        raise MlflowRefused(
            f"A run that is {old or 'without a state'} may become {legal}, not {new}. Nothing was changed: "
            "read the run again; something else may have moved it.",
            code="ILLEGAL_MOVE",
        )


class RunKind(StrEnum):
    """What a run in MLflow stands for (tag `kind`)."""

    CELL = "cell"
    COLLECTION = "collection"
    JUDGING = "judging"
    LEADERBOARD = "leaderboard"
    DECISION = "decision"
    REFUSED = "refused"


@dataclass(frozen=True)
class NewRun:
    """A finished run on its way into the store: everything at once; `RunChange` is for later.

    `texts` are stored under their keys without loss, whatever their length. `record_id` is made once, with
    the result: recording it again keeps one run. A cell also has a `cell_key`: the store keeps at most one
    finished run of a key.
    """

    kind: RunKind
    record_id: str
    name: str
    start_ms: int
    end_ms: int
    ok: bool = True  # False: the run failed
    cell_key: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    supersedes: tuple[str, ...] = ()  # run ids to be tagged superseded=true once this one is kept


@dataclass(frozen=True, kw_only=True)
class RunChange:
    """What changes in a recorded run. What it does not name stays; a text is replaced whole."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    at_ms: int  # when the metrics were measured


@dataclass(frozen=True)
class StoredRun:
    """A run as read back. `tags` hold no texts; ask the store for those."""

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
