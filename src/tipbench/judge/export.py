"""Exports a sheet: selects cells, adds hidden controls and stores the sheet with its key in MLflow."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tipbench.errors import NotEnoughData
from tipbench.judge.apply import update_floor_scores
from tipbench.judge.controls import compose
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.material import (
    Candidate,
    JudgedCell,
    Material,
    Selection,
    choose_cells,
    combine_material,
    load_suites,
    read_cells,
)
from tipbench.judge.sheet import Sheet, instructions
from tipbench.judge.sheet_store import SheetEntry, StoredSheet, check_no_duels, controls_shown_to, now_iso, record_sheet
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class ExportRequest:
    """Options of a sheet export."""

    judge: str | None = None
    limit: int | None = None
    overlap: float = 0.2
    everything: bool = False
    rejudge: bool = False
    seed: int | None = None
    suite: str | None = None
    provisional: bool = False
    first: tuple[str, ...] = ()  # preferred scenarios, highest priority first
    only: frozenset[str] | None = None  # runs that may be included; None for all
    without: frozenset[str] = frozenset()  # runs to exclude


@dataclass(frozen=True)
class ExportResult:
    """A sheet stored in MLflow, ready to be sent to a judge, with counts of omitted and mismatched cells."""

    stored: StoredSheet
    cells: int  # on the sheet, without hidden items
    unknown_scenarios: int = 0  # cells whose scenario is not (or no longer) in the suite
    older_rubric: int = 0  # cells judged under another rubric, skipped without --rejudge
    other_conditions: int = 0  # cells on the sheet with other conditions than the newest; compare excludes them
    added: int = 0  # cells beyond the limit, in whole scenarios, so that enough control tips fit

    @property
    def enough_controls(self) -> bool:
        """Whether the sheet has enough control tips to measure the judge's drift."""
        return _control_tips(self.stored.entries) >= MIN_CONTROLS


def export_sheet(
    store: RunStore, experiment: Experiment, request: ExportRequest, cells: Sequence[JudgedCell] | None = None
) -> ExportResult:
    """Creates a sheet and stores it in MLflow. `cells` is the result of `read_cells`, if already read.

    Raises NotEnoughData if there is nothing for this judge to score. With `rejudge`, outdated floor scores are then
    updated to the current rubric before raising.
    """
    if request.judge and not request.provisional:
        check_no_duels(store, experiment, request.judge)
    cells = read_cells(store, experiment.experiment_id) if cells is None else cells
    if not cells:
        raise NotEnoughData(f"{experiment.name} has no answered cells yet. Run `tipbench collect` first.")
    material = combine_material(load_suites(cells, request.suite))
    known = [cell for cell in cells if cell.scenario in material.cards]
    unknown = len(cells) - len(known)
    seed = random.SystemRandom().randrange(2**63) if request.seed is None else request.seed
    candidates = [
        cell.candidate(_scored_by(cell, material, request))
        for cell in known
        if not cell.floored
        and (request.only is None or cell.run.run_id in request.only)
        and cell.run.run_id not in request.without
    ]
    selection = Selection(request.judge, request.limit, request.overlap, request.everything or request.provisional)
    with_controls = {control.scenario for control in material.controls}
    rng = random.Random(seed)  # noqa: S311 - for shuffling, not a secret
    chosen = choose_cells(candidates, selection, with_controls, rng, request.first)
    floors = _floors(known, material, request)
    if not chosen:
        message = ""
        if floors:
            changed = update_floor_scores(store, floors, material.rubric, now_iso())
            store.touch(experiment.experiment_id)
            message = f"{changed} answers without a usable tip were rescored under {material.rubric.id}. "
        raise NotEnoughData(message + _nothing(experiment.name, request, known, unknown))
    shown = controls_shown_to(store, request.judge) if request.judge else []
    sheet_id = uuid.uuid4().hex[:12]
    entries = _compose(chosen, material, request, known, shown, sheet_id, rng)
    added = 0
    if request.limit is not None and not request.provisional and _control_tips(entries) < MIN_CONTROLS:
        same_order = random.Random(seed)  # noqa: S311
        everything = choose_cells(candidates, replace(selection, limit=None), with_controls, same_order, request.first)
        larger = list(chosen)
        for group in _remaining_scenarios(everything, chosen):
            larger += group
            more = _compose(larger, material, request, known, shown, sheet_id, rng)
            if _control_tips(more) >= MIN_CONTROLS:
                added, chosen, entries = len(larger) - len(chosen), larger, more
                break
    items, text = tuple(entry.item for entry in entries), instructions(material.rubric)
    sheet = Sheet(sheet_id, experiment.name, request.judge, material.rubric, items, text)
    stored = StoredSheet(
        sheet, entries, now_iso(), provisional=request.provisional, owner=request.judge, refloor=floors, seed=seed
    )
    run_id = record_sheet(store, experiment.experiment_id, stored)
    store.touch(experiment.experiment_id)
    return ExportResult(
        replace(stored, run_id=run_id),
        cells=len(chosen),
        unknown_scenarios=unknown,
        older_rubric=0 if request.rejudge else sum(_under_another(cell, material) for cell in known),
        other_conditions=_other_conditions(known, {candidate.run_id for candidate in chosen}),
        added=added,
    )


def _control_tips(entries: Iterable[SheetEntry]) -> int:
    return sum(len(entry.controls) for entry in entries)


def _remaining_scenarios(everything: Sequence[Candidate], chosen: Sequence[Candidate]) -> list[list[Candidate]]:
    """Returns the cells that are not chosen, by scenario; scenarios that are chosen in part first."""
    taken, begun = {cell.run_id for cell in chosen}, {cell.scenario for cell in chosen}
    groups: dict[str, list[Candidate]] = {}
    for cell in everything:
        if cell.run_id not in taken:
            groups.setdefault(cell.scenario, []).append(cell)
    return [groups[scenario] for scenario in sorted(groups, key=lambda scenario: scenario not in begun)]


def _other_conditions(cells: Sequence[JudgedCell], chosen: Iterable[str]) -> int:
    """Counts the chosen cells collected under other conditions than the newest cell."""
    conditions = {cell.run.run_id: cell.run.tags.get("conditions") for cell in cells}
    newest = max(cells, key=lambda cell: cell.run.start_ms).run.run_id
    return sum(conditions[run_id] != conditions[newest] for run_id in chosen)


def _scored_by(cell: JudgedCell, material: Material, request: ExportRequest) -> frozenset[str]:
    """Returns the judges who have scored the cell. Others' held scores do not count, so it stays available."""
    given = list((cell.scores.provisional if request.provisional else cell.scores.judges).values())
    if not request.provisional:
        given += [held for name, held in cell.scores.held.items() if name == request.judge]
    present = material.rubric.tag
    any_rubric = not (request.rejudge or request.provisional)
    return frozenset(judgement.judge for judgement in given if any_rubric or judgement.rubric == present)


def _floors(cells: Sequence[JudgedCell], material: Material, request: ExportRequest) -> tuple[str, ...]:
    if not request.rejudge or request.provisional:
        return ()
    return tuple(cell.run.run_id for cell in cells if cell.floored and _under_another(cell, material))


def _under_another(cell: JudgedCell, material: Material) -> bool:
    return cell.run.tags.get("scores_rubric", material.rubric.tag) != material.rubric.tag


def _compose(
    chosen: Sequence[Candidate],
    material: Material,
    request: ExportRequest,
    known: Sequence[JudgedCell],
    shown: Sequence[str],
    sheet_id: str,
    rng: random.Random,
) -> tuple[SheetEntry, ...]:
    """Returns the sheet's items: the chosen cells, hidden controls, and repeats of what this judge has scored."""
    by_run = {cell.run.run_id: cell for cell in known}
    cards: Mapping[str, Mapping[str, object]] = {
        candidate.scenario: material.cards[by_run[candidate.run_id].scenario] for candidate in chosen
    }
    taken = {candidate.run_id for candidate in chosen}
    earlier = []
    for cell in known:
        before = cell.scores.judges.get(request.judge) if request.judge else None
        same_rubric = before is not None and before.rubric == material.rubric.tag
        if same_rubric and not request.provisional and cell.run.run_id not in taken:
            earlier.append(cell.candidate(frozenset()))
    return compose(
        chosen,
        cards,
        material.controls,
        material.rubric,
        shown=shown,
        earlier=earlier,
        sheet_id=sheet_id,
        rng=rng,
    )


def _nothing(name: str, request: ExportRequest, known: Sequence[JudgedCell], unknown: int) -> str:
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
