"""Export a sheet: select cells, add hidden controls and store the sheet with its key in MLflow."""

from __future__ import annotations

import random
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tipbench.errors import NotEnoughData
from tipbench.judge.apply import update_floor_scores
from tipbench.judge.controls import JudgeHistory, compose
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.material import (
    Candidate,
    JudgedCell,
    combine_material,
    load_suites,
    read_cells,
)
from tipbench.judge.sheet import Sheet, instructions
from tipbench.judge.sheet_store import (
    ItemKind,
    SheetEntry,
    StoredSheet,
    check_no_duels,
    controls_shown_to,
    now_iso,
    record_sheet,
    stored_sheets,
)
from tipbench.plan.design import read_design
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class ExportRequest:
    """Options of a sheet export."""

    judge: str | None = None
    limit: int | None = None
    overlap: float = 0.2  # target share of others' cells that this judge scores too
    everything: bool = False  # also all cells that only others have scored
    rejudge: bool = False
    seed: int | None = None
    suite: str | None = None
    provisional: bool = False
    first: tuple[str, ...] = ()  # scenarios to take first, in this order; those of the design precede them
    only: frozenset[str] | None = None  # runs that may be included; None for all
    without: frozenset[str] = frozenset()  # runs to exclude


@dataclass(frozen=True)
class ExportResult:
    """A sheet stored in MLflow, ready to be sent to a judge, with counts of omitted and mismatched cells."""

    stored: StoredSheet
    unknown_scenarios: int = 0  # cells whose scenario is not (or no longer) in the suite
    older_rubric: int = 0  # cells judged under another rubric, skipped without --rejudge
    other_conditions: int = 0  # cells on the sheet with other conditions than the newest cell; compare excludes them
    added: int = 0  # cells added beyond the limit, in whole scenarios, so that enough control tips fit

    @property
    def cells(self) -> int:
        """The number of cells on the sheet, without hidden items."""
        return sum(entry.kind is ItemKind.CELL for entry in self.stored.entries)

    @property
    def enough_controls(self) -> bool:
        """Whether the sheet has enough control tips to measure the judge's drift."""
        return _count_control_tips(self.stored.entries) >= MIN_CONTROLS


def export_sheet(
    store: RunStore, experiment: Experiment, request: ExportRequest, cells: Sequence[JudgedCell] | None = None
) -> ExportResult:
    """Create a sheet and store it in MLflow. `cells` is the result of `read_cells`, if already read.

    Raises NotEnoughData if there is nothing for this judge to score; with `rejudge`, after updating outdated floor
    scores to the current rubric.
    """
    if request.judge and not request.provisional:
        check_no_duels(store, experiment, request.judge)
    cells = read_cells(store, experiment.experiment_id) if cells is None else cells
    if not cells:
        raise NotEnoughData(f"{experiment.name} has no answered cells yet. Run `tipbench collect` first.")
    material = combine_material(load_suites(cells, request.suite))
    rubric = material.rubric
    known = {cell.run.run_id: cell for cell in cells if cell.scenario in material.cards}
    unknown = len(cells) - len(known)
    outdated = {
        run_id for run_id, cell in known.items() if cell.run.tags.get("scores_rubric", rubric.tag) != rubric.tag
    }
    seed = random.SystemRandom().randrange(2**63) if request.seed is None else request.seed
    candidates = [
        cell.candidate(_scored_by(cell, rubric.tag, request))
        for run_id, cell in known.items()
        if not cell.floored and (request.only is None or run_id in request.only) and run_id not in request.without
    ]
    with_controls = {control.scenario for control in material.controls}
    rng = random.Random(seed)  # noqa: S311 - for shuffling, not a secret
    design = read_design(experiment.tags)
    order = (*(design.scenarios if design else ()), *request.first)
    chosen = choose_cells(candidates, request, with_controls, rng, order)
    rescore = request.rejudge and not request.provisional
    floors = tuple(run_id for run_id in known if rescore and known[run_id].floored and run_id in outdated)
    if not chosen:
        message = ""
        if floors:
            changed = update_floor_scores(store, floors, rubric, now_iso())
            store.touch(experiment.experiment_id)
            message = f"{changed} answers without a usable tip were rescored under {rubric.id}. "
        raise NotEnoughData(message + _nothing_pending_message(experiment.name, request, list(known.values()), unknown))
    sheet_id = uuid.uuid4().hex[:12]
    history = _judge_history(store, experiment, request, rubric.tag, known.values())

    def compose_entries(cells: Sequence[Candidate]) -> tuple[SheetEntry, ...]:
        cards = {cell.scenario: material.cards[known[cell.run_id].scenario] for cell in cells}
        return compose(cells, cards, material.controls, rubric, history, sheet_id=sheet_id, rng=rng)

    entries, added = compose_entries(chosen), 0
    if request.limit is not None and not request.provisional and _count_control_tips(entries) < MIN_CONTROLS:
        same_order = random.Random(seed)  # noqa: S311
        everything = choose_cells(candidates, replace(request, limit=None), with_controls, same_order, order)
        taken, begun = {cell.run_id for cell in chosen}, {cell.scenario for cell in chosen}
        remaining = _by_scenario(cell for cell in everything if cell.run_id not in taken)
        larger = list(chosen)
        for group in sorted(remaining, key=lambda group: group[0].scenario not in begun):
            larger += group
            more = compose_entries(larger)
            if _count_control_tips(more) >= MIN_CONTROLS:
                added, chosen, entries = len(larger) - len(chosen), larger, more
                break
    items = tuple(entry.item for entry in entries)
    stored = StoredSheet(
        Sheet(sheet_id, experiment.name, request.judge, rubric, items, instructions(rubric)),
        entries,
        now_iso(),
        provisional=request.provisional,
        owner=request.judge,
        refloor=floors,
        seed=seed,
    )
    run_id = record_sheet(store, experiment.experiment_id, stored)
    store.touch(experiment.experiment_id)
    newest = max(known.values(), key=lambda cell: cell.run.start_ms).run.tags.get("conditions")
    return ExportResult(
        replace(stored, run_id=run_id),
        unknown_scenarios=unknown,
        older_rubric=0 if request.rejudge else len(outdated),
        other_conditions=sum(known[cell.run_id].run.tags.get("conditions") != newest for cell in chosen),
        added=added,
    )


def choose_cells(
    candidates: Iterable[Candidate],
    request: ExportRequest,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str] = (),
) -> list[Candidate]:
    """Select the cells of a sheet, scenario by scenario; the scenarios in `first` take precedence.

    Without a judge's name, only unscored cells are selected.
    """
    known = sorted(candidates, key=lambda cell: cell.run_id)
    order = _scenario_order(known, request.judge, with_controls, rng, first)
    unscored = [cell for cell in known if not cell.scored_by]
    by_others = [cell for cell in known if request.judge and cell.scored_by - {request.judge}]
    only_by_others = [cell for cell in by_others if request.judge not in cell.scored_by]
    if request.everything or request.provisional:
        return _take_scenarios(_by_scenario([*unscored, *only_by_others], order), request.limit, rng)
    groups = _by_scenario(unscored, order)
    scored_by_both = len(by_others) - len(only_by_others)
    wanted = _rounded_up(request.overlap * len(by_others)) - scored_by_both
    shared: list[list[Candidate]] = []  # the fewest leading scenarios that contain the wanted number of cells
    for group in _by_scenario(only_by_others, order):
        if sum(map(len, shared)) < wanted:
            shared.append(group)
    if request.limit is None:
        return _take_scenarios(groups, None, rng) + _take_scenarios(shared, None, rng)
    n_shared = sum(map(len, shared))
    min_unscored = _rounded_up(request.limit / (1 + request.overlap))
    n_unscored = min(len(unscored), max(min_unscored, request.limit - n_shared))
    return _take_scenarios(groups, n_unscored, rng) + _take_scenarios(shared, request.limit - n_unscored, rng)


def _scenario_order(
    known: Sequence[Candidate],
    judge: str | None,
    with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str],
) -> list[str]:
    """Return the scenarios in order: those of `first`, then those with controls, then the others.

    Among equals, scenarios that this judge has begun come first, and those that only others have begun come last.
    """
    priority = {scenario: first.index(scenario) for scenario in first}
    begun_by_judge = {cell.scenario for cell in known if judge in cell.scored_by}
    begun = {cell.scenario for cell in known if cell.scored_by}
    scenarios = sorted({cell.scenario for cell in known})
    rng.shuffle(scenarios)

    def rank(scenario: str) -> tuple[int, bool, int]:
        begun_by_others = scenario in begun and scenario not in begun_by_judge
        progress = 0 if scenario in begun_by_judge else 2 if begun_by_others else 1
        return priority.get(scenario, len(first)), scenario not in with_controls, progress

    return sorted(scenarios, key=rank)


def _by_scenario(cells: Iterable[Candidate], order: Sequence[str] = ()) -> list[list[Candidate]]:
    groups: dict[str, list[Candidate]] = {scenario: [] for scenario in order}
    for cell in cells:
        groups.setdefault(cell.scenario, []).append(cell)
    return [group for group in groups.values() if group]


def _take_scenarios(groups: Sequence[list[Candidate]], limit: int | None, rng: random.Random) -> list[Candidate]:
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


def _judge_history(
    store: RunStore, experiment: Experiment, request: ExportRequest, rubric: str, cells: Iterable[JudgedCell]
) -> JudgeHistory:
    judge = request.judge
    shown = controls_shown_to(store, judge) if judge else []
    if request.provisional:
        return JudgeHistory(judge, shown)
    judgements = [(cell, cell.scores.judges.get(judge) if judge else None) for cell in cells]
    found = stored_sheets(store, experiment.experiment_id, experiment.name)
    return JudgeHistory(
        judge,
        shown,
        scored=[cell.candidate(frozenset()) for cell, before in judgements if before and before.rubric == rubric],
        sheets=[each for each in found if not each.provisional and each.sheet.rubric.tag == rubric][::-1],
    )


def _count_control_tips(entries: Iterable[SheetEntry]) -> int:
    return sum(len(entry.controls) for entry in entries)


def _scored_by(cell: JudgedCell, rubric: str, request: ExportRequest) -> frozenset[str]:
    """Return the judges who have scored the cell, without other judges whose scores are held."""
    given = list((cell.scores.provisional if request.provisional else cell.scores.judges).values())
    if not request.provisional:
        given += [held for name, held in cell.scores.held.items() if name == request.judge]
    any_rubric = not (request.rejudge or request.provisional)
    return frozenset(judgement.judge for judgement in given if any_rubric or judgement.rubric == rubric)


def _nothing_pending_message(name: str, request: ExportRequest, known: Sequence[JudgedCell], unknown: int) -> str:
    who = f"for {request.judge}" if request.judge else "for a judge"
    if not known and unknown:
        return (
            f"None of the {unknown} cells of {name} belongs to a scenario of the current suite. "
            "Pass the suite they were collected with (--suite)."
        )
    if held := 0 if request.provisional else sum(request.judge in cell.scores.held for cell in known):
        return (
            f"Nothing in {name} is pending {who} except {held} answers whose scores are held: revise their sheet "
            "and apply it again, or accept the drift. `tipbench judge status` names the sheet."
        )
    nothing = f"Nothing in {name} is pending {who}: all {len(known)} answers are scored or have no usable tip."
    if request.provisional:
        return nothing
    return f"{nothing} `--all` includes answers scored by others, `--rejudge` those scored under another rubric."
