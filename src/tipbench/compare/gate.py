"""Gate: tests whether a candidate pair is worse than a baseline by more than a margin.

A result can be written as JSON, as JUnit XML and as an annotation of GitHub Actions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any
from xml.etree import ElementTree as ET

from tipbench.compare.cells import COMPOSITE, BoardCell, BoardCells, floor_values
from tipbench.compare.matrix import Pair, Score, score_matrix
from tipbench.compare.resampling import TOLERANCE, step_down
from tipbench.compare.statistics import Difference, estimate_json, paired_difference, scenarios_needed
from tipbench.compare.verdict import unknown_pair_message
from tipbench.errors import UsageError
from tipbench.plan.design import MIN_SCENARIOS
from tipbench.text import join_names, number, plural

MARGIN = 1.0  # points of the composite
_MAX_NAMED_SCENARIOS = 8  # in a message about missing scenarios


class Outcome(StrEnum):
    """The outcome of a gate."""

    NOT_WORSE = "not worse"  # lower bound above −margin
    WORSE = "worse"  # upper bound below −margin
    UNDECIDED = "undecided"  # −margin within the interval
    UNKNOWN = "not enough data"  # too few shared scenarios, scenarios without the candidate, or no scores by people


@dataclass(frozen=True)
class GateEvidence:
    """The data that a gate result is based on."""

    failed: int  # failed cells of the candidate
    pending: int  # cells of the candidate that wait for a judge
    baseline_scenarios: int  # scenarios in which the baseline is judged
    rubric: str | None  # id@sha256
    judges: tuple[str, ...]
    conditions: str
    missing: tuple[str, ...]  # scenarios in which the baseline is judged, but not the candidate
    floored: int  # failed cells of the candidate that count with the lowest scores


@dataclass(frozen=True)
class GateOptions:
    """The two pairs that a gate compares, named as on the board, and how it compares them."""

    candidate: Pair
    baseline: Pair
    margin: float = MARGIN  # points of the composite
    failed_as_floor: bool = False  # count the candidate's failed cells with the rubric's lowest scores


@dataclass(frozen=True)
class GateResult:
    """The result of a gate, with its numbers and a one-line reason."""

    options: GateOptions
    outcome: Outcome
    reason: str
    difference: Difference | None = None  # candidate − baseline
    n_scenarios: int = 0
    scenarios_needed: int | None = None  # in total, to decide; None if not UNDECIDED, or if it cannot be estimated
    evidence: GateEvidence | None = None  # None if no data could be read

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 if not worse, 1 if worse, 3 without enough data. Undecided is 1 if `strict`, else 0."""
        if self.outcome is Outcome.UNKNOWN:
            return 3
        is_failure = self.outcome is Outcome.WORSE or (self.outcome is Outcome.UNDECIDED and strict)
        return 1 if is_failure else 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; unknown values are None."""
        if self.evidence is not None:
            evidence = vars(self.evidence)
        else:
            evidence = dict.fromkeys(field.name for field in fields(GateEvidence))
        return {
            "candidate": self.options.candidate.to_json(),
            "baseline": self.options.baseline.to_json(),
            "outcome": str(self.outcome),
            "difference": estimate_json(self.difference),
            "margin": self.options.margin,
            "n_scenarios": self.n_scenarios,
            "scenarios_needed": self.scenarios_needed,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in evidence.items()},
            "reason": self.reason,
        }


def evaluate_gate(cells: BoardCells, options: GateOptions) -> GateResult:
    """Compare the paired-t interval of candidate − baseline with −margin.

    The outcome is UNKNOWN unless the candidate is judged in every scenario in which the baseline is judged, and in at
    least MIN_SCENARIOS. Without this rule, a candidate could pass by failing in the scenarios in which it is weak. With
    `failed_as_floor`, its failed cells count with the rubric's lowest scores, so that their scenarios are not missing.
    """
    candidate, baseline, margin = options.candidate, options.baseline, options.margin
    check_on_board(cells, candidate, baseline)
    if candidate == baseline:
        raise UsageError(f"The candidate and the baseline are the same pair, {candidate}. Name two different pairs.")
    candidate_cells = [cell for cell in cells.cells if cell.pair == candidate]
    if options.failed_as_floor and cells.rubric_content is not None:
        floor = floor_values(cells.rubric_content)
        candidate_cells = [replace(cell, values=floor) if cell.failed else cell for cell in candidate_cells]
    baseline_cells = [cell for cell in cells.cells if cell.pair == baseline]
    evidence = _evidence(cells, candidate_cells, baseline_cells)
    if cells.provisional or not cells.has_scores:
        prefix = "only provisional scores: " if cells.provisional else ""
        problem = f"no judge has scored enough of these {len(cells.cells)} cells"
        return unknown_result(options, f"{prefix}{problem}. `tipbench judge export` writes a sheet.", evidence=evidence)
    scores = [
        Score(cell.pair, cell.scenario, cell.persona, cell.values[COMPOSITE])
        for cell in (*candidate_cells, *baseline_cells)
        if cell.values
    ]
    matrix = score_matrix(scores, (candidate, baseline))
    baseline_values = matrix.values[:, matrix.pairs.index(baseline)]
    candidate_values = matrix.values[:, matrix.pairs.index(candidate)]
    differences = (candidate_values - baseline_values)[:, None]  # a single column
    (p_value,) = step_down(differences)  # for the JSON; only the interval decides
    difference = paired_difference(candidate_values, baseline_values, p_value)
    if difference is None or difference.n < MIN_SCENARIOS or evidence.missing:
        n = difference.n if difference else 0
        why = _unknown_reason(candidate_cells, candidate, baseline, evidence, n)
        return unknown_result(options, why, n_scenarios=n, evidence=evidence)
    outcome, why = _outcome_and_reason(difference, margin)
    numbers = number(difference.mean, "+.2f")
    if difference.ci_low is not None and difference.ci_high is not None:
        numbers += f" [{number(difference.ci_low, '+.2f')}, {number(difference.ci_high, '+.2f')}]"
    reason = f"{outcome}: {candidate} − {baseline} = {numbers} over {difference.n} scenarios; {why}"
    if evidence.floored:
        reason += f"; {plural(evidence.floored, 'failed cell')} counted at the floor"
    reason += "."
    needed = None
    if outcome is Outcome.UNDECIDED:
        needed = scenarios_needed(difference.mean + margin, difference.sd, at_least=difference.n + 1)
        if needed is None:
            limit = f"−{margin:.2f}"
            reason += f" The number of scenarios needed cannot be estimated: the difference is too close to {limit}."
        else:
            reason += f" About {needed} scenarios in total would decide."
    return GateResult(options, outcome, reason, difference, difference.n, scenarios_needed=needed, evidence=evidence)


def _evidence(
    cells: BoardCells, candidate_cells: Sequence[BoardCell], baseline_cells: Sequence[BoardCell]
) -> GateEvidence:
    candidate_scenarios = {cell.scenario for cell in candidate_cells if cell.values}
    baseline_scenarios = {cell.scenario for cell in baseline_cells if cell.values}
    return GateEvidence(
        failed=sum(cell.failed for cell in candidate_cells),
        pending=sum(cell.waits_for_judge for cell in candidate_cells),
        baseline_scenarios=len(baseline_scenarios),
        rubric=cells.rubric or None,
        judges=cells.judges,
        conditions=cells.conditions,
        missing=tuple(sorted(baseline_scenarios - candidate_scenarios)),
        floored=sum(1 for cell in candidate_cells if cell.failed and cell.values),
    )


def _unknown_reason(
    candidate_cells: Sequence[BoardCell], candidate: Pair, baseline: Pair, evidence: GateEvidence, n: int
) -> str:
    """Return why there is not enough data, and the commands that help."""
    missing = set(evidence.missing)
    if not missing:
        both = f"{candidate} and {baseline} are both judged in {plural(n, 'scenario')}"
        more = "judge more scenarios of both with `tipbench judge export`"
        return f"{both}; at least {MIN_SCENARIOS} are needed: {more}."
    # A scenario is in both of these sets if one of its repeats has failed and another one is pending.
    failed = {cell.scenario for cell in candidate_cells if cell.failed} & missing
    pending = {cell.scenario for cell in candidate_cells if cell.waits_for_judge} & missing
    commands = []
    if failed or missing - pending:
        commands.append(f"generate what is missing with `tipbench collect --models {candidate.model} …`")
    if pending:
        commands.append("judge what is pending with `tipbench judge export`")
    if failed:
        commands.append("or pass --failed-as-floor to count failed cells at the floor")
    where = f"{len(missing)} of the {evidence.baseline_scenarios} scenarios of {baseline}"
    names = join_names(evidence.missing, _MAX_NAMED_SCENARIOS)
    return f"{candidate} is not judged in {where} ({names}): {', '.join(commands)}."


def _outcome_and_reason(difference: Difference, margin: float) -> tuple[Outcome, str]:
    low, high = difference.ci_low, difference.ci_high
    limit_text = f"−{margin:.2f}"
    if low is None or high is None:  # there is no interval if the difference is the same in all scenarios
        same = f"the same difference in all {difference.n} scenarios"
        above_limit = difference.mean + margin
        if abs(above_limit) < TOLERANCE:
            return Outcome.UNDECIDED, f"{same}, exactly {limit_text}"
        if above_limit > 0:
            return Outcome.NOT_WORSE, same
        return Outcome.WORSE, f"{same}, below {limit_text}"
    if low > -margin:
        return Outcome.NOT_WORSE, f"the interval is above {limit_text}"
    if high < -margin:
        return Outcome.WORSE, f"the interval is below {limit_text}"
    return Outcome.UNDECIDED, f"the interval contains {limit_text}"


def unknown_result(
    options: GateOptions, why: str, *, n_scenarios: int = 0, evidence: GateEvidence | None = None
) -> GateResult:
    """Return a result with the outcome UNKNOWN."""
    reason = f"{Outcome.UNKNOWN}: {why}"
    return GateResult(options, Outcome.UNKNOWN, reason, n_scenarios=n_scenarios, evidence=evidence)


def check_on_board(cells: BoardCells, *pairs: Pair) -> None:
    """Raise UsageError if a pair is not on the board; the message lists the available pairs."""
    pairs_on_board = sorted({cell.pair for cell in cells.cells})
    for pair in pairs:
        if pair not in pairs_on_board:
            raise UsageError(unknown_pair_message(pair, pairs_on_board, cells))


_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# For GitHub's workflow commands
_MESSAGE_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY_ESCAPES = {**_MESSAGE_ESCAPES, ":": "%3A", ",": "%2C"}


def junit_xml(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """Return JUnit XML with one test case.

    Worse is a failure and not enough data is an error. Undecided is a failure if `strict`, else skipped.
    """
    if result.outcome is Outcome.NOT_WORSE:
        status = None
    elif result.outcome is Outcome.UNKNOWN:
        status = "error"
    elif result.outcome is Outcome.UNDECIDED and not strict:
        status = "skipped"
    else:
        status = "failure"
    counts = {
        "tests": "1",
        "failures": str(int(status == "failure")),
        "errors": str(int(status == "error")),
        "skipped": str(int(status == "skipped")),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "tipbench gate", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": _valid_xml(experiment), **counts})
    options = result.options
    name = f"{options.candidate} is not worse than {options.baseline} by more than {options.margin:g}"
    case = ET.SubElement(
        suite,
        "testcase",
        {"classname": _valid_xml(f"tipbench.gate.{experiment}"), "name": _valid_xml(name), "time": "0"},
    )
    if status is not None:
        attributes = {"message": _valid_xml(result.reason)}
        if status != "skipped":
            attributes["type"] = str(result.outcome)
        ET.SubElement(case, status, attributes).text = _valid_xml(result.reason)
    else:
        ET.SubElement(case, "system-out").text = _valid_xml(result.reason)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def annotation(experiment: str, result: GateResult, *, strict: bool = False) -> str:
    """Return a workflow command of GitHub Actions: notice if not worse, else warning or error by the exit code."""
    level = "error" if result.exit_code(strict=strict) else "warning"
    if result.outcome is Outcome.NOT_WORSE:
        level = "notice"
    title = f"tipbench gate: {result.options.candidate} against {result.options.baseline} in {experiment}"
    return f"::{level} title={_escape(title, _PROPERTY_ESCAPES)}::{_escape(result.reason, _MESSAGE_ESCAPES)}"


def _valid_xml(text: str) -> str:
    """Replace characters that XML does not allow even as escapes. ElementTree escapes the others."""
    return _INVALID_IN_XML.sub("\ufffd", text)


def _escape(text: str, escapes: dict[str, str]) -> str:
    """Escape the characters of `escapes`, and replace other unprintable characters with spaces."""
    return "".join(escapes.get(char, char if char.isprintable() else " ") for char in text)
