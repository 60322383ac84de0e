"""Export a sheet: select cells, add hidden controls and store the sheet in MLflow with its key (the items' sources)."""

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
from tipbench.judge.material import AnsweredCell, EligibleCell, load_material, read_cells
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
    limit: int | None = None  # maximum number of cells
    overlap: float = 0.2  # share of the cells scored by others that this judge should score too
    everything: bool = False  # also include all cells that only others have scored
    rejudge: bool = False  # also include cells scored under another rubric
    seed: int | None = None
    suite: str | None = None
    provisional: bool = False  # whether its scores will be provisional
    preferred_scenarios: tuple[str, ...] = ()  # selected before all others except those of the design, in this order
    only: frozenset[str] | None = None  # runs that may be included; None for all
    without: frozenset[str] = frozenset()  # runs to exclude


@dataclass(frozen=True)
class ExportResult:
    """A sheet stored in MLflow, ready to be sent to a judge, with counts for warnings."""

    stored: StoredSheet
    n_unknown: int = 0  # cells whose scenario is not in the suite
    n_other_rubric: int = 0  # cells scored under another rubric, skipped without --rejudge
    n_other_conditions: int = 0  # cells on the sheet with other conditions than the newest cell; compare excludes them
    n_added: int = 0  # cells beyond the limit, added so that the sheet has enough control tips

    @property
    def n_cells(self) -> int:
        """The number of cells on the sheet, without hidden items."""
        return sum(entry.kind is ItemKind.CELL for entry in self.stored.entries)

    @property
    def enough_controls(self) -> bool:
        """Whether the sheet has enough control tips to measure the judge's drift."""
        return _count_control_tips(self.stored.entries) >= MIN_CONTROLS


def export_sheet(
    store: RunStore, experiment: Experiment, request: ExportRequest, cells: Sequence[AnsweredCell] | None = None
) -> ExportResult:
    """Create a sheet and store it in MLflow. If `cells` is None, they are read from MLflow.

    Raises NotEnoughData if there is nothing for this judge to score. With `rejudge`, floor scores of another rubric are
    updated too, unless the sheet is provisional: when the scores of the finished sheet count, or here if there is
    nothing to score.
    """
    if request.judge and not request.provisional:
        check_no_duels(store, experiment, request.judge)
    if cells is None:
        cells = read_cells(store, experiment.experiment_id)
    if not cells:
        raise NotEnoughData(f"{experiment.name} has no answered cells yet. Run `tipbench collect` first.")
    material = load_material(cells, request.suite)
    rubric = material.rubric
    known_cells = {cell.run.run_id: cell for cell in cells if cell.scenario_key in material.cards}
    n_unknown = len(cells) - len(known_cells)
    eligible = [
        cell.to_eligible(_judges_who_scored(cell, rubric.tag, request))
        for run_id, cell in known_cells.items()
        if not cell.floored and (request.only is None or run_id in request.only) and run_id not in request.without
    ]
    scenarios_with_controls = {control.scenario for control in material.controls}
    design = read_design(experiment.tags)
    planned_scenarios = design.scenarios if design else ()
    first_scenarios = (*planned_scenarios, *request.preferred_scenarios)
    seed = random.SystemRandom().randrange(2**63) if request.seed is None else request.seed
    rng = random.Random(seed)  # noqa: S311 - for shuffling, not a secret
    chosen = choose_cells(eligible, request, scenarios_with_controls, rng, first_scenarios)
    with_other_rubric = [
        cell for cell in known_cells.values() if cell.run.tags.get("scores_rubric", rubric.tag) != rubric.tag
    ]
    outdated_floors: tuple[str, ...] = ()
    if request.rejudge and not request.provisional:
        outdated_floors = tuple(cell.run.run_id for cell in with_other_rubric if cell.floored)
    if not chosen:
        message = ""
        if outdated_floors:
            n_changed = update_floor_scores(store, outdated_floors, rubric, now_iso())
            store.mark_changed(experiment.experiment_id)
            message = f"{n_changed} answers without a usable tip were rescored under {rubric.id}. "
        message += _nothing_pending_message(experiment.name, request, list(known_cells.values()), n_unknown)
        raise NotEnoughData(message)
    sheet_id = uuid.uuid4().hex[:12]
    history = _judge_history(store, experiment, request, rubric.tag, known_cells.values())

    def compose_entries(selected: Sequence[EligibleCell]) -> tuple[SheetEntry, ...]:
        cards = {cell.scenario: material.cards[known_cells[cell.run_id].scenario_key] for cell in selected}
        return compose(selected, cards, material.controls, rubric, history, sheet_id=sheet_id, rng=rng)

    entries = compose_entries(chosen)
    n_added = 0
    if request.limit is not None and not request.provisional and _count_control_tips(entries) < MIN_CONTROLS:
        # More cells make room for more control tips. Add the remaining cells, scenario by scenario, beginning with
        # scenarios already on the sheet, until there are enough. If even all cells are not enough, add none.
        restarted_rng = random.Random(seed)  # noqa: S311 - same seed, same order of scenarios
        without_limit = replace(request, limit=None)
        all_cells = choose_cells(eligible, without_limit, scenarios_with_controls, restarted_rng, first_scenarios)
        chosen_runs, chosen_scenarios = {cell.run_id for cell in chosen}, {cell.scenario for cell in chosen}
        remaining = _by_scenario(cell for cell in all_cells if cell.run_id not in chosen_runs)
        extended = list(chosen)
        for group in sorted(remaining, key=lambda group: group[0].scenario not in chosen_scenarios):
            extended += group
            extended_entries = compose_entries(extended)
            if _count_control_tips(extended_entries) >= MIN_CONTROLS:
                n_added = len(extended) - len(chosen)
                chosen, entries = extended, extended_entries
                break
    items = tuple(entry.item for entry in entries)
    stored = StoredSheet(
        sheet=Sheet(sheet_id, experiment.name, request.judge, rubric, items, instructions(rubric)),
        entries=entries,
        exported=now_iso(),
        provisional=request.provisional,
        owner=request.judge,
        outdated_floors=outdated_floors,
    )
    run_id = record_sheet(store, experiment.experiment_id, stored, seed=seed)
    store.mark_changed(experiment.experiment_id)
    newest_run = max(known_cells.values(), key=lambda cell: cell.run.start_ms).run
    conditions = newest_run.tags.get("conditions")
    return ExportResult(
        replace(stored, run_id=run_id),
        n_unknown=n_unknown,
        n_other_rubric=0 if request.rejudge else len(with_other_rubric),
        n_other_conditions=sum(known_cells[cell.run_id].run.tags.get("conditions") != conditions for cell in chosen),
        n_added=n_added,
    )


def choose_cells(
    eligible: Iterable[EligibleCell],
    request: ExportRequest,
    scenarios_with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str] = (),
) -> list[EligibleCell]:
    """Select the cells of a sheet, scenario by scenario, beginning with the scenarios in `first`.

    Without a judge's name, only unscored cells are selected.
    """
    cells = sorted(eligible, key=lambda cell: cell.run_id)
    order = _scenario_order(cells, request.judge, scenarios_with_controls, rng, first)
    unscored = [cell for cell in cells if not cell.scored_by]
    scored_by_others = [cell for cell in cells if request.judge and cell.scored_by - {request.judge}]
    scored_only_by_others = [cell for cell in scored_by_others if request.judge not in cell.scored_by]
    if request.everything or request.provisional:
        return _take_scenarios(_by_scenario([*unscored, *scored_only_by_others], order), request.limit, rng)
    unscored_groups = _by_scenario(unscored, order)
    # Add shared scenarios, which others have scored and this judge has not, until the overlap is reached.
    n_scored_by_both = len(scored_by_others) - len(scored_only_by_others)
    overlap_missing = _round_up(request.overlap * len(scored_by_others)) - n_scored_by_both
    shared_groups: list[list[EligibleCell]] = []
    n_shared = 0
    for group in _by_scenario(scored_only_by_others, order):
        if n_shared < overlap_missing:
            shared_groups.append(group)
            n_shared += len(group)
    if request.limit is None:
        return [cell for group in (*unscored_groups, *shared_groups) for cell in group]
    # With a limit, the sheet may also have at most `overlap` shared cells per unscored cell. So it gets at least
    # limit / (1 + overlap) unscored cells, or all unscored ones if there are fewer.
    min_unscored = _round_up(request.limit / (1 + request.overlap))
    n_unscored = min(len(unscored), max(min_unscored, request.limit - n_shared))
    shared_limit = request.limit - n_unscored
    return _take_scenarios(unscored_groups, n_unscored, rng) + _take_scenarios(shared_groups, shared_limit, rng)


def _scenario_order(
    cells: Sequence[EligibleCell],
    judge: str | None,
    scenarios_with_controls: Collection[str],
    rng: random.Random,
    first: Sequence[str],
) -> list[str]:
    """Return the scenarios in order: those of `first` in its order, then those with controls, then the others.

    Within the last two groups, scenarios that this judge has begun come first, and those that only others have begun
    come last.
    """
    position = {scenario: first.index(scenario) for scenario in first}  # the first one if a scenario is repeated
    begun_by_judge = {cell.scenario for cell in cells if judge in cell.scored_by}
    begun = {cell.scenario for cell in cells if cell.scored_by}
    scenarios = sorted({cell.scenario for cell in cells})
    rng.shuffle(scenarios)

    def sort_key(scenario: str) -> tuple[int, bool, bool, bool]:
        begun_only_by_others = scenario in begun and scenario not in begun_by_judge
        return (
            position.get(scenario, len(first)),
            scenario not in scenarios_with_controls,
            begun_only_by_others,
            scenario not in begun_by_judge,
        )

    return sorted(scenarios, key=sort_key)


def _by_scenario(cells: Iterable[EligibleCell], order: Sequence[str] = ()) -> list[list[EligibleCell]]:
    groups: dict[str, list[EligibleCell]] = {scenario: [] for scenario in order}
    for cell in cells:
        groups.setdefault(cell.scenario, []).append(cell)
    return [group for group in groups.values() if group]


def _take_scenarios(groups: Sequence[list[EligibleCell]], limit: int | None, rng: random.Random) -> list[EligibleCell]:
    """Return the cells of whole scenarios up to the limit; of the last scenario, a random sample that fits."""
    chosen: list[EligibleCell] = []
    for group in groups:
        remaining = len(group) if limit is None else max(0, limit - len(chosen))
        if len(group) <= remaining:
            chosen += group
        else:
            chosen += sorted(rng.sample(group, remaining), key=lambda cell: cell.run_id)
    return chosen


def _round_up(number: float) -> int:
    """Round up, ignoring floating-point error (0.07 * 100 is 7.000000000000001)."""
    return ceil(round(number, 9))


def _judge_history(
    store: RunStore, experiment: Experiment, request: ExportRequest, rubric_tag: str, cells: Iterable[AnsweredCell]
) -> JudgeHistory:
    judge = request.judge
    shown = controls_shown_to(store, judge) if judge else []
    if request.provisional:
        return JudgeHistory(judge, shown)
    scored = []
    for cell in cells:
        judgement = cell.scores.applied.get(judge) if judge else None
        if judgement and judgement.rubric == rubric_tag:
            scored.append(cell.to_eligible(frozenset()))  # who scored it is not used here
    newest_first = stored_sheets(store, experiment)
    sheets = [stored for stored in newest_first if not stored.provisional and stored.sheet.rubric.tag == rubric_tag]
    return JudgeHistory(judge, shown, scored=scored, sheets=sheets[::-1])


def _count_control_tips(entries: Iterable[SheetEntry]) -> int:
    return sum(len(entry.controls) for entry in entries)


def _judges_who_scored(cell: AnsweredCell, rubric_tag: str, request: ExportRequest) -> frozenset[str]:
    """Return the judges who have scored the cell.

    With `rejudge` or `provisional`, only scores under this rubric count. With `provisional`, only provisional scores
    count; else applied scores and, of the held ones, only this judge's.
    """
    if request.provisional:
        judgements = list(cell.scores.provisional.values())
    else:
        own_held = [judgement for name, judgement in cell.scores.held.items() if name == request.judge]
        judgements = [*cell.scores.applied.values(), *own_held]
    any_rubric = not request.rejudge and not request.provisional
    return frozenset(judgement.judge for judgement in judgements if any_rubric or judgement.rubric == rubric_tag)


def _nothing_pending_message(
    experiment: str, request: ExportRequest, cells: Sequence[AnsweredCell], n_unknown: int
) -> str:
    for_judge = f"for {request.judge or 'a judge'}"
    if not cells and n_unknown:
        return (
            f"None of the {n_unknown} cells of {experiment} belongs to a scenario of the current suite. "
            "Pass the suite they were collected with (--suite)."
        )
    n_held = 0 if request.provisional else sum(request.judge in cell.scores.held for cell in cells)
    if n_held:
        return (
            f"Nothing in {experiment} is pending {for_judge} except {n_held} answers whose scores are held: revise "
            "their sheet and apply it again, or accept the drift. `tipbench judge status` names the sheet."
        )
    message = (
        f"Nothing in {experiment} is pending {for_judge}: all {len(cells)} answers are scored or have no usable tip."
    )
    if request.provisional:
        return message
    return f"{message} `--all` includes answers scored by others, `--rejudge` those scored under another rubric."
