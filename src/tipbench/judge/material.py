"""Cells to judge, with their answers and scores, and the selection of cells for a sheet."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from tipbench.errors import CorruptText, SuiteError, UsageError
from tipbench.generate.parsing import Tip, parse_answer
from tipbench.judge.scores import SCORES, CellScores, read_scores
from tipbench.plan.rubric import Control, Rubric
from tipbench.plan.suite import Suite, load_suite
from tipbench.record.reader import stale_runs, twin_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore

CANDIDATES = "artifact:candidates.json"
RAW = "artifact:raw.txt"


@dataclass(frozen=True)
class Candidate:
    """A cell eligible for judging, with the tips to score."""

    run_id: str
    scenario: str
    tips: tuple[Tip, ...]
    format_ok: bool
    scored_by: frozenset[str]


@dataclass(frozen=True)
class Selection:
    """Selection criteria for a sheet. Without a judge's name, only unscored cells are selected."""

    judge: str | None
    limit: int | None
    overlap: float = 0.2  # target share of others' cells that this judge scores too
    everything: bool = False  # all cells this judge has not scored


def choose_cells(
    candidates: Iterable[Candidate],
    selection: Selection,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str] = (),
) -> list[Candidate]:
    """Select the cells of a sheet, scenario by scenario; the scenarios in `first` take precedence."""
    known = sorted(candidates, key=lambda cell: cell.run_id)
    order = _scenario_order(known, selection.judge, with_controls, rng, first)
    fresh = [cell for cell in known if not cell.scored_by]
    others = [cell for cell in known if selection.judge and cell.scored_by and selection.judge not in cell.scored_by]
    if selection.everything:
        return _first(_by_scenario([*fresh, *others], order), selection.limit, rng)
    groups = _by_scenario(fresh, order)
    by_others = [cell for cell in known if selection.judge and cell.scored_by - {selection.judge}]
    wanted = _rounded_up(selection.overlap * len(by_others)) - (len(by_others) - len(others))
    shared: list[list[Candidate]] = []  # the fewest leading scenarios that contain the wanted number of cells
    for group in _by_scenario(others, order):
        if sum(map(len, shared)) < wanted:
            shared.append(group)
    if selection.limit is None:
        return _first(groups, None, rng) + _first(shared, None, rng)
    n_shared = sum(map(len, shared))
    due = _rounded_up(selection.limit / (1 + selection.overlap))
    room = min(len(fresh), max(due, selection.limit - n_shared))
    return _first(groups, room, rng) + _first(shared, selection.limit - room, rng)


def _scenario_order(
    known: Sequence[Candidate],
    judge: str | None,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str],
) -> list[str]:
    wanted = {scenario: place for place, scenario in reversed(list(enumerate(first)))}
    own = {cell.scenario for cell in known if judge in cell.scored_by}
    begun = {cell.scenario for cell in known if cell.scored_by}
    scenarios = sorted({cell.scenario for cell in known})
    rng.shuffle(scenarios)

    def rank(scenario: str) -> tuple[int, bool, int]:
        begun_by = 0 if scenario in own else 2 if scenario in begun else 1
        return wanted.get(scenario, len(first)), scenario not in with_controls, begun_by

    return sorted(scenarios, key=rank)


def _by_scenario(cells: Iterable[Candidate], order: Sequence[str]) -> list[list[Candidate]]:
    groups: dict[str, list[Candidate]] = {scenario: [] for scenario in order}
    for cell in cells:
        groups[cell.scenario].append(cell)
    return [group for group in groups.values() if group]


def _first(groups: Sequence[list[Candidate]], limit: int | None, rng: random.Random) -> list[Candidate]:
    """Return whole scenarios while they fit the limit, then a sample of the next."""
    chosen: list[Candidate] = []
    for group in groups:
        room = len(group) if limit is None else limit - len(chosen)
        if len(group) > room:
            group = sorted(rng.sample(group, max(0, room)), key=lambda cell: cell.run_id)  # noqa: PLW2901
        chosen += group
    return chosen


def _rounded_up(number: float) -> int:
    """Round up, ignoring floating-point error (0.07 * 100 is 7.000000000000001)."""
    return ceil(round(number, 9))


@dataclass(frozen=True)
class Material:
    """The cards, rubric and controls of an experiment's suites."""

    cards: Mapping[tuple[str, str], Mapping[str, Any]]  # by scenario id and content hash
    rubric: Rubric
    controls: tuple[Control, ...]


@dataclass(frozen=True)
class JudgedCell:
    """A recorded cell with its tips and scores."""

    run: StoredRun
    tips: tuple[Tip, ...]  # the first n_tips, which are judged
    scores: CellScores
    format_ok: bool  # as computed, ignoring judges' corrections

    @property
    def scenario(self) -> tuple[str, str]:
        return self.run.params.get("scenario", ""), self.run.tags.get("scenario_hash", "")

    @property
    def floored(self) -> bool:
        return self.run.tags.get("floored") == "true"

    def candidate(self, scored_by: frozenset[str]) -> Candidate:
        """Return the cell as a candidate for selection."""
        return Candidate(self.run.run_id, self.scenario[0], self.tips, self.format_ok, scored_by)


def combine_material(suites: Sequence[Suite]) -> Material:
    """Combine the suites' material. Raises UsageError if their rubrics differ."""
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


def load_suites(cells: Sequence[JudgedCell], name: str | None) -> list[Suite]:
    """Load the suite of this name or folder, or without one those that the cells were collected with."""
    if name is not None:
        return [load_suite(name)]
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
    """Return the answered cells of an experiment with tips and scores, without superseded, twin and stale runs."""
    where = {"kind": str(RunKind.CELL)}
    found = [
        (run, texts)
        for run, texts in store.read(experiment_id, where=where, texts=(CANDIDATES, SCORES, RAW))
        if run.tags.get("superseded") != "true" and run.state != RunState.FAILED
    ]
    runs = [run for run, _ in found]
    left_out = stale_runs(runs) | twin_runs(runs)
    return [_cell(run, texts) for run, texts in found if run.run_id not in left_out]


def _cell(run: StoredRun, texts: Mapping[str, str]) -> JudgedCell:
    try:
        n_tips = int(run.params["n_tips"])
        listed = json.loads(texts.get(CANDIDATES, "[]"))[:n_tips]
        tips = tuple(Tip(str(tip["tip"]), str(tip["rationale"])) for tip in listed)
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptText(f"The text {CANDIDATES} of run {run.run_id} has an unexpected format ({exc}).") from exc
    scores = read_scores(texts.get(SCORES))
    touched = scores.judges or scores.held or scores.history
    if touched and RAW in texts:  # the metric now holds the judges' mean, which must not be shown to the next judge
        format_ok = parse_answer(texts[RAW], n_tips).format_ok
    else:
        format_ok = run.metrics.get("format_ok") == 1.0
    return JudgedCell(run, tips, scores, format_ok)
