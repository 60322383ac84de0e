"""Material for judging: recorded cells with tips and scores, and the cards, rubric and controls of their suites."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tipbench.errors import CorruptText, SuiteError, UsageError
from tipbench.generate.parsing import Tip, parse_answer
from tipbench.judge.scores import SCORES, CellScores, read_scores
from tipbench.plan.rubric import Control, Rubric
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.reader import duplicate_runs, stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore

# Names of texts in a cell's run.
CANDIDATES = "artifact:candidates.json"  # the tips of the answer
RAW = "artifact:raw.txt"  # the answer as returned


@dataclass(frozen=True)
class EligibleCell:
    """A cell that may be put on a sheet, with the tips to score."""

    run_id: str
    scenario: str
    tips: tuple[Tip, ...]
    format_ok: bool
    scored_by: frozenset[str]  # names of judges


@dataclass(frozen=True)
class Material:
    """The cards, rubric and controls of an experiment's suites."""

    cards: Mapping[tuple[str, str], Mapping[str, Any]]  # by scenario id and content hash
    rubric: Rubric
    controls: tuple[Control, ...]


@dataclass(frozen=True)
class AnsweredCell:
    """A cell with an answer, judged or not. Scores and tips are parsed on first access."""

    run: StoredRun
    texts: Mapping[str, str]

    @cached_property
    def scores(self) -> CellScores:
        """The judges' scores. Raises CorruptText."""
        return read_scores(self.texts.get(SCORES))

    @cached_property
    def tips(self) -> tuple[Tip, ...]:
        """The tips to judge: the first `n_tips` of the answer. Raises CorruptText."""
        try:
            raw_tips = json.loads(self.texts.get(CANDIDATES, "[]"))[: self._n_tips]
            return tuple(Tip(str(raw["tip"]), str(raw["rationale"])) for raw in raw_tips)
        except (ValueError, KeyError, TypeError) as exc:
            message = f"The text {CANDIDATES} of run {self.run.run_id} has an unexpected format ({exc})."
            raise CorruptText(message) from exc

    @cached_property
    def format_ok(self) -> bool:
        """Whether the answer has the requested format, as computed. Corrections by judges do not count here."""
        judged = self.scores.applied or self.scores.held or self.scores.history
        # After judging, the run's metric is the mean of the judges' flags, which the next judge must not see.
        if judged and RAW in self.texts:
            return parse_answer(self.texts[RAW], self._n_tips).format_ok
        return self.run.metrics.get("format_ok") == 1.0

    @property
    def _n_tips(self) -> int:
        return int(self.run.params["n_tips"])

    @property
    def scenario_key(self) -> tuple[str, str]:
        """The scenario's id and content hash."""
        return self.run.params.get("scenario", ""), self.run.tags.get("scenario_hash", "")

    @property
    def floored(self) -> bool:
        """Whether the answer has no usable tip, and so gets the rubric's floor scores."""
        return self.run.tags.get("floored") == "true"

    def to_eligible(self, scored_by: frozenset[str]) -> EligibleCell:
        """Return the values by which cells are chosen for a sheet."""
        scenario, _ = self.scenario_key
        return EligibleCell(self.run.run_id, scenario, self.tips, self.format_ok, scored_by)


def load_material(cells: Sequence[AnsweredCell], suite: str | None) -> Material:
    """Load the material of a suite, given by name or folder; by default, of the suites of the cells.

    Raises UsageError if the cells' suites have different rubrics or are not built in.
    """
    suites = [load_suite(suite)] if suite is not None else _suites_of(cells)
    suite_by_rubric = {each.rubric.tag: each for each in suites}
    if len(suite_by_rubric) > 1:
        names = ", ".join(f"{each.name} ({each.rubric.id})" for each in suite_by_rubric.values())
        raise UsageError(
            f"The cells come from suites with different rubrics: {names}. One sheet has one rubric: pass --suite."
        )
    cards = {(scenario.id, scenario.content_hash): scenario.to_card() for each in suites for scenario in each.scenarios}
    # Suites may share controls: `tips-32` contains those of `tips`.
    controls = {(control.scenario, control.tip): control for each in suites for control in each.controls}
    return Material(cards, suites[0].rubric, tuple(controls.values()))


def _suites_of(cells: Sequence[AnsweredCell]) -> list[Suite]:
    names = sorted({cell.run.params.get("suite", "") for cell in cells})
    try:
        return [load_suite(name) for name in names]
    except SuiteError as exc:
        quoted_names = ", ".join(repr(name) for name in names)
        raise UsageError(
            f"The cells were collected with the suite {quoted_names}, which is not built in. "
            f"Pass its folder with --suite ({exc.reason})"
        ) from exc


def read_cells(store: RunStore, experiment_id: str) -> list[AnsweredCell]:
    """Return the answered cells of an experiment, without stale, duplicate and superseded (replaced) runs."""
    answered = [
        (run, texts)
        for run, texts in store.read(experiment_id, where={"kind": str(RunKind.CELL)}, texts=(CANDIDATES, SCORES, RAW))
        if run.tags.get("superseded") != "true" and run.state != RunState.FAILED
    ]
    runs = [run for run, _ in answered]
    excluded = stale_runs(runs) | duplicate_runs(runs)
    return [AnsweredCell(run, texts) for run, texts in answered if run.run_id not in excluded]
