"""Gate: tests whether a candidate pair is worse than a baseline by more than a margin; JUnit XML and annotations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree as ET

from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.leaderboard import COMPOSITE, difference_json, pair_json, unknown_pair_message
from tipbench.compare.matrix import Pair, Score, score_matrix
from tipbench.compare.resampling import MIN_SCENARIOS, NOTHING, step_down
from tipbench.compare.statistics import Difference, paired_difference, scenarios_needed
from tipbench.errors import UsageError
from tipbench.text import plural

MARGIN = 1.0


class Outcome(StrEnum):
    """The outcome of a gate."""

    NOT_WORSE = "not worse"  # lower bound above −margin
    WORSE = "worse"  # upper bound below −margin
    UNDECIDED = "undecided"  # −margin within the interval
    UNKNOWN = "unknown"  # not enough data


@dataclass(frozen=True)
class GateEvidence:
    """The data a gate result is based on, and the candidate cells missing from it."""

    failed: int  # cells of the candidate
    pending: int
    baseline_scenarios: int  # scenarios in which the baseline is judged
    rubric: str | None  # id@sha256
    judges: tuple[str, ...]
    conditions: str

    @property
    def unfinished(self) -> str:
        """The failed and pending candidate cells as text; empty if every cell is judged."""
        counts = ((self.failed, "failed"), (self.pending, "pending"))
        parts = [f"{plural(n, 'candidate cell')} {state}" for n, state in counts if n]
        return ", ".join(parts)


@dataclass(frozen=True)
class GateResult:
    """The result of a gate, with its numbers and a one-line reason."""

    candidate: Pair
    baseline: Pair
    margin: float
    outcome: Outcome
    reason: str
    difference: Difference | None = None  # candidate − baseline
    n_scenarios: int = 0
    scenarios_needed: int | None = None  # in total, if undecided; None if it cannot be estimated
    evidence: GateEvidence | None = None  # None if no data could be read

    def exit_code(self, *, strict: bool = False) -> int:
        """Returns 0 for pass, 1 for fail, 3 for unknown; undecided fails only if `strict`."""
        if self.outcome is Outcome.UNDECIDED:
            return int(strict)
        return {Outcome.NOT_WORSE: 0, Outcome.WORSE: 1}.get(self.outcome, 3)

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-serialisable values; None if unknown."""
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


def evaluate_gate(cells: BoardCells, candidate: Pair, baseline: Pair, margin: float = MARGIN) -> GateResult:
    """Compares the paired-t interval of candidate − baseline, over the scenarios judged for both, with −margin."""
    check_on_board(cells, candidate, baseline)
    if candidate == baseline:
        raise UsageError(f"The candidate and the baseline are the same pair, {candidate}. Name two different pairs.")
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
    candidate: Pair, baseline: Pair, margin: float, why: str, n: int = 0, evidence: GateEvidence | None = None
) -> GateResult:
    """Returns a result with the outcome unknown and its reason."""
    reason = f"unknown: {why}"
    return GateResult(candidate, baseline, margin, Outcome.UNKNOWN, reason, n_scenarios=n, evidence=evidence)


def _evidence(cells: BoardCells, candidate: Pair, baseline: Pair) -> GateEvidence:
    own = [cell for cell in cells.cells if cell.pair == candidate]
    failed = sum(cell.failed for cell in own)
    return GateEvidence(
        failed=failed,
        pending=sum(not cell.values for cell in own) - failed,
        baseline_scenarios=len({cell.scenario for cell in cells.cells if cell.pair == baseline and cell.values}),
        rubric=cells.rubric or None,
        judges=cells.judges,
        conditions=cells.conditions,
    )


def _evidence_json(evidence: GateEvidence | None) -> dict[str, Any]:
    values = {each.name: getattr(evidence, each.name, None) for each in fields(GateEvidence)}
    return {**values, "judges": list(values["judges"]) if values["judges"] is not None else None}


def _but(evidence: GateEvidence) -> str:
    return f"; {evidence.unfinished}" if evidence.unfinished else ""


def check_on_board(cells: BoardCells, *pairs: Pair) -> None:
    """Raises UsageError, listing the available pairs, if a pair is not on the board."""
    there = sorted({cell.pair for cell in cells.cells})
    for pair in pairs:
        if pair not in there:
            raise UsageError(unknown_pair_message(pair, there, cells))


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
        return Outcome.NOT_WORSE, f"the interval is above {limit}"
    if high < -margin:
        return Outcome.WORSE, f"the interval is below {limit}"
    return Outcome.UNDECIDED, f"the interval contains {limit}"


def _without_spread(difference: Difference, margin: float) -> tuple[Outcome, str]:
    """Returns the outcome of equal differences, which have no interval: sign flips decide from MIN_SCENARIOS on."""
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
        return "The number of scenarios needed cannot be estimated: the difference equals the margin."
    return f"About {needed} scenarios in total would decide."


def _numbers(difference: Difference) -> str:
    over = f"over {difference.n} scenarios"
    if difference.ci_low is None or difference.ci_high is None:
        return f"{_signed(difference.mean)} {over}"
    return f"{_signed(difference.mean)} [{_signed(difference.ci_low)}, {_signed(difference.ci_high)}] {over}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _any(cells: BoardCells) -> str:
    return f"any of these {len(cells.cells)} cells"


_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def junit_xml(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """Returns JUnit XML of one test case: worse fails, undecided is skipped (fails if strict), unknown is an error."""
    verdict = _verdict(result, strict=strict)
    counts = {
        "tests": "1",
        "failures": str(int(verdict == "failure")),
        "errors": str(int(verdict == "error")),
        "skipped": str(int(verdict == "skipped")),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "tipbench gate", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": _xml(experiment), **counts})
    name = f"{result.candidate} is not worse than {result.baseline} by more than {result.margin:g}"
    case = ET.SubElement(
        suite, "testcase", {"classname": _xml(f"tipbench.gate.{experiment}"), "name": _xml(name), "time": "0"}
    )
    if verdict is not None:
        attributes = {"message": _xml(result.reason)} | ({} if verdict == "skipped" else {"type": str(result.outcome)})
        ET.SubElement(case, verdict, attributes).text = _xml(result.reason)
    else:
        ET.SubElement(case, "system-out").text = _xml(result.reason)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def annotation(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """Returns a workflow command: error, warning (undecided, or candidate cells are missing) or notice."""
    level = "error" if result.exit_code(strict=strict) else "warning"
    if result.outcome is Outcome.NOT_WORSE and not (result.evidence and result.evidence.unfinished):
        level = "notice"
    title = f"tipbench gate: {result.candidate} against {result.baseline} in {experiment}"
    return f"::{level} title={_escaped(title, _PROPERTY)}::{_escaped(result.reason, _DATA)}"


def _verdict(result: GateResult, *, strict: bool) -> str | None:
    if result.outcome is Outcome.UNDECIDED and not strict:
        return "skipped"
    return {Outcome.NOT_WORSE: None, Outcome.UNKNOWN: "error"}.get(result.outcome, "failure")


def _xml(text: str) -> str:
    """Replaces characters that are invalid in XML even when escaped; the rest is escaped on writing."""
    return _NOT_XML.sub("\ufffd", text)


def _escaped(text: str, table: dict[str, str]) -> str:
    return "".join(table.get(char, char if char.isprintable() else " ") for char in text)
