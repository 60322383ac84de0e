"""What a sheet is made of: the suite's cards, rubric and controls, and the cells that could be judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.errors import CorruptText, SuiteError, UsageError
from tipbench.generate.parsing import Tip, parse_answer
from tipbench.judge.scores import SCORES, CellScores, read_scores
from tipbench.judge.selection import Candidate
from tipbench.plan.rubric import Control, Rubric
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.current import stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore

CANDIDATES = "artifact:candidates.json"
RAW = "artifact:raw.txt"


@dataclass(frozen=True)
class Material:
    """What the suites of an experiment give to judges."""

    cards: Mapping[tuple[str, str], Mapping[str, Any]]  # by scenario id and content hash
    rubric: Rubric
    controls: tuple[Control, ...]


@dataclass(frozen=True)
class JudgedCell:
    """A recorded cell with its tips and what has been said of it."""

    run: StoredRun
    tips: tuple[Tip, ...]  # the first n_tips: those that are judged
    scores: CellScores
    format_ok: bool  # as computed, whatever a judge has said of it since

    @property
    def scenario(self) -> tuple[str, str]:
        return self.run.params.get("scenario", ""), self.run.tags.get("scenario_hash", "")

    @property
    def floored(self) -> bool:
        return self.run.tags.get("floored") == "true"

    def candidate(self, scored_by: frozenset[str]) -> Candidate:
        """The cell as selection sees it."""
        return Candidate(self.run.run_id, self.scenario[0], self.tips, self.format_ok, scored_by)


def material_of(suites: Sequence[Suite]) -> Material:
    """One material of all suites; they must agree on the rubric."""
    rubrics = {suite.rubric.tag: suite for suite in suites}
    if len(rubrics) > 1:
        names = ", ".join(f"{suite.name} ({suite.rubric.id})" for suite in rubrics.values())
        raise UsageError(
            f"The cells come from suites with different rubrics: {names}. One sheet has one rubric: pass --suite."
        )
    cards = {
        (scenario.id, scenario.content_hash): scenario.to_card() for suite in suites for scenario in suite.scenarios
    }
    controls = {(control.scenario, control.tip): control for suite in suites for control in suite.controls}
    return Material(cards, suites[0].rubric, tuple(controls.values()))


def suites_of(cells: Sequence[JudgedCell], asked: str | None) -> list[Suite]:
    """The suites the cells were collected with, or the one asked for."""
    if asked is not None:
        return [load_suite(asked)]
    names = sorted({cell.run.params.get("suite", "") for cell in cells})
    listed = ", ".join(repr(name) for name in names)
    try:
        return [load_suite(name) for name in names]
    except SuiteError as exc:
        raise UsageError(
            f"The cells were collected with the suite {listed}, which is not built in. "
            f"Pass its folder with --suite ({exc.reason})"
        ) from exc


def read_cells(store: RunStore, experiment_id: str) -> list[JudgedCell]:
    """The answered cells of an experiment that are neither superseded nor stale, with tips and scores."""
    where = {"kind": str(RunKind.CELL)}
    found = [
        (run, texts)
        for run, texts in store.read(experiment_id, where=where, texts=(CANDIDATES, SCORES, RAW))
        if run.tags.get("superseded") != "true" and run.state != RunState.FAILED
    ]
    stale = stale_runs([run for run, _ in found])
    return [_cell(run, texts) for run, texts in found if run.run_id not in stale]


def _cell(run: StoredRun, texts: Mapping[str, str]) -> JudgedCell:
    tips = tuple(_tips(run, texts.get(CANDIDATES, "[]")))
    scores = read_scores(texts.get(SCORES))
    touched = scores.judges or scores.held or scores.history
    if touched and RAW in texts:  # the metric has become the judges' mean: the next one must not see it
        format_ok = parse_answer(texts[RAW], int(run.params["n_tips"])).format_ok
    else:
        format_ok = run.metrics.get("format_ok") == 1.0
    return JudgedCell(run, tips, scores, format_ok)


def _tips(run: StoredRun, text: str) -> Iterator[Tip]:
    try:
        n_tips = int(run.params["n_tips"])
        for tip in json.loads(text)[:n_tips]:
            yield Tip(str(tip["tip"]), str(tip["rationale"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptText(f"The text {CANDIDATES} of run {run.run_id} is not what tipbench writes ({exc}).") from exc
