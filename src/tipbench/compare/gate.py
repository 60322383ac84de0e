"""Gate: is a candidate pair worse than a baseline, by more than a margin? For a prompt change in CI."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from tipbench.compare.board_json import difference_json, pair_json
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.leaderboard import COMPOSITE
from tipbench.compare.matrix import Pair, Score, score_matrix
from tipbench.compare.notes import not_on_board
from tipbench.compare.resampling import MIN_SCENARIOS, NOTHING, step_down
from tipbench.compare.statistics import Difference, paired_difference, scenarios_needed
from tipbench.compare.words import counted
from tipbench.errors import UsageError

MARGIN = 1.0


class Outcome(StrEnum):
    """What the gate says."""

    NOT_WORSE = "not worse"  # the lower bound is above −margin
    WORSE = "worse"  # the upper bound is below −margin
    UNDECIDED = "undecided"  # −margin lies within the interval
    UNKNOWN = "unknown"  # there is nothing to judge by


@dataclass(frozen=True)
class Evidence:
    """What the answer rests on, and what of the candidate it does not rest on."""

    failed: int  # cells of the candidate
    pending: int
    baseline_scenarios: int  # in which the baseline is judged
    rubric: str | None  # id@sha256
    judges: tuple[str, ...]
    conditions: str

    @property
    def unfinished(self) -> str:
        """In words; empty when every cell of the candidate counts."""
        counts = ((self.failed, "failed"), (self.pending, "pending"))
        parts = [f"{counted(n, 'candidate cell')} {state}" for n, state in counts if n]
        return ", ".join(parts)


@dataclass(frozen=True)
class GateResult:
    """The gate's answer with its numbers and one line of why."""

    candidate: Pair
    baseline: Pair
    margin: float
    outcome: Outcome
    reason: str
    difference: Difference | None = None  # candidate − baseline
    n_scenarios: int = 0
    scenarios_needed: int | None = None  # in all, while undecided; None when that cannot be told
    evidence: Evidence | None = None  # None when nothing could be read

    def exit_code(self, *, strict: bool = False) -> int:
        """0 passes, 1 does not, 3 cannot be told."""
        if self.outcome is Outcome.UNDECIDED:
            return int(strict)
        return {Outcome.NOT_WORSE: 0, Outcome.WORSE: 1}.get(self.outcome, 3)

    def to_json(self) -> dict[str, Any]:
        """Plain values; None where unknown."""
        return {
            "candidate": pair_json(self.candidate),
            "baseline": pair_json(self.baseline),
            "outcome": str(self.outcome),
            "difference": difference_json(self.difference),
            "margin": self.margin,
            "n_scenarios": self.n_scenarios,
            "scenarios_needed": self.scenarios_needed,
            **_evidence_json(self.evidence),
            "reason": self.reason,
        }


def judge_gate(cells: BoardCells, candidate: Pair, baseline: Pair, margin: float = MARGIN) -> GateResult:
    """Hold the paired-t interval of candidate − baseline, over the scenarios both are judged in, against −margin."""
    check_known(cells, candidate, baseline)
    if candidate == baseline:
        raise UsageError(f"The candidate and the baseline are the same pair, {candidate}. Name two different ones.")
    evidence = _evidence(cells, candidate, baseline)
    if cells.provisional:
        why = f"only provisional scores: no judge has scored {_any(cells)}."
        return unknown(candidate, baseline, margin, why, evidence=evidence)
    difference = _difference(cells.cells, candidate, baseline)
    if difference is None or difference.n < 2:
        n = difference.n if difference else 0
        shared = f"{n or 'no'} scenario{'s' if n != 1 else ''} in which {candidate} and {baseline} are both judged"
        why = f"there {'is' if n == 1 else 'are'} {shared}; it takes two{_but(evidence)}."
        return unknown(candidate, baseline, margin, why, n, evidence)
    outcome, why = _outcome(difference, margin)
    needed = _needed(difference, margin) if outcome is Outcome.UNDECIDED else None
    outlook = f" {_outlook(needed)}" if outcome is Outcome.UNDECIDED else ""
    reason = f"{outcome}: {candidate} − {baseline} = {_numbers(difference)}; {why}{_but(evidence)}.{outlook}"
    return GateResult(candidate, baseline, margin, outcome, reason, difference, difference.n, needed, evidence)


def unknown(
    candidate: Pair, baseline: Pair, margin: float, why: str, n: int = 0, evidence: Evidence | None = None
) -> GateResult:
    """The gate cannot say anything, and why."""
    reason = f"unknown: {why}"
    return GateResult(candidate, baseline, margin, Outcome.UNKNOWN, reason, n_scenarios=n, evidence=evidence)


def _evidence(cells: BoardCells, candidate: Pair, baseline: Pair) -> Evidence:
    own = [cell for cell in cells.cells if cell.pair == candidate]
    failed = sum(cell.failed for cell in own)
    return Evidence(
        failed=failed,
        pending=sum(not cell.values for cell in own) - failed,
        baseline_scenarios=len({cell.scenario for cell in cells.cells if cell.pair == baseline and cell.values}),
        rubric=cells.rubric or None,
        judges=cells.judges,
        conditions=cells.conditions,
    )


def _evidence_json(evidence: Evidence | None) -> dict[str, Any]:
    values = {each.name: getattr(evidence, each.name, None) for each in fields(Evidence)}
    return {**values, "judges": list(values["judges"]) if values["judges"] is not None else None}


def _but(evidence: Evidence) -> str:
    return f"; {evidence.unfinished}" if evidence.unfinished else ""


def check_known(cells: BoardCells, *pairs: Pair) -> None:
    """UsageError for a pair that the board does not have, with those it has."""
    there = sorted({cell.pair for cell in cells.cells})
    for pair in pairs:
        if pair not in there:
            raise UsageError(not_on_board(pair, there, cells))


def _difference(cells: Iterable[BoardCell], candidate: Pair, baseline: Pair) -> Difference | None:
    both = (baseline, candidate)
    scores = [
        Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE])
        for cell in cells
        if cell.pair in both and cell.values
    ]
    matrix = score_matrix(scores, both)
    first, second = (matrix.values[:, matrix.pairs.index(pair)] for pair in both)
    (p,) = step_down((second - first)[:, None])
    return paired_difference(first, second, p)


def _outcome(difference: Difference, margin: float) -> tuple[Outcome, str]:
    low, high = difference.ci_low, difference.ci_high
    limit = f"−{margin:.2f}"
    if low is None or high is None:
        return _without_spread(difference, margin)
    if low > -margin:
        return Outcome.NOT_WORSE, f"the interval lies above {limit}"
    if high < -margin:
        return Outcome.WORSE, f"the interval lies below {limit}"
    return Outcome.UNDECIDED, f"the interval does not exclude {limit}"


def _without_spread(difference: Difference, margin: float) -> tuple[Outcome, str]:
    """The same difference in every scenario has no interval; sign-flips can still tell it from −margin, from 6 on."""
    distance = difference.mean + margin
    same = f"the same difference in all {difference.n} scenarios"
    if difference.n < MIN_SCENARIOS or abs(distance) < NOTHING:
        return Outcome.UNDECIDED, f"{same} has no interval"
    return (Outcome.NOT_WORSE, f"{same}") if distance > 0 else (Outcome.WORSE, f"{same}, below −{margin:.2f}")


def _needed(difference: Difference, margin: float) -> int | None:
    least = MIN_SCENARIOS if not difference.sd else 2
    return scenarios_needed(difference.mean + margin, difference.sd, at_least=max(least, difference.n + 1))


def _outlook(needed: int | None) -> str:
    if needed is None:
        return "How many scenarios would decide cannot be told: the difference is just the margin."
    return f"About {needed} scenarios in all would decide."


def _numbers(difference: Difference) -> str:
    over = f"over {difference.n} scenarios"
    if difference.ci_low is None or difference.ci_high is None:
        return f"{_signed(difference.mean)} {over}"
    return f"{_signed(difference.mean)} [{_signed(difference.ci_low)}, {_signed(difference.ci_high)}] {over}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _any(cells: BoardCells) -> str:
    return f"any of these {len(cells.cells)} cells"
