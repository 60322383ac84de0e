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
from tipbench.judge.sheet_store import StoredSheet, controls_shown_to, now_iso, record_sheet
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

    @property
    def enough_controls(self) -> bool:
        """Whether the sheet has enough control tips to measure the judge's drift."""
        return sum(len(entry.controls) for entry in self.stored.entries) >= MIN_CONTROLS


def export_sheet(
    store: RunStore, experiment: Experiment, request: ExportRequest, cells: Sequence[JudgedCell] | None = None
) -> ExportResult:
    """Creates a sheet and stores it in MLflow. `cells` is the result of `read_cells`, if already read.

    Raises NotEnoughData if there is nothing for this judge to score. With `rejudge`, outdated floor scores are then
    updated to the current rubric before raising.
    """
    cells = read_cells(store, experiment.experiment_id) if cells is None else cells
    if not cells:
        raise NotEnoughData(f"{experiment.name} has no answered cells yet. `tipbench collect` makes some.")
    material = combine_material(load_suites(cells, request.suite))
    known = [cell for cell in cells if cell.scenario in material.cards]
    unknown = len(cells) - len(known)
    rng, seed = _rng(request.seed)
    candidates = [
        cell.candidate(_scored_by(cell, material, request))
        for cell in known
        if not cell.floored and _may_be_on(request, cell.run.run_id)
    ]
    chosen = choose_cells(
        candidates, _wish(request), {control.scenario for control in material.controls}, rng, request.first
    )
    floors = _floors(known, material, request)
    if not chosen:
        told = _floored_anew(store, experiment, material, floors) if floors else ""
        raise NotEnoughData(told + _nothing(experiment.name, request, known, unknown))
    stored = _judging(store, experiment, material, request, known, chosen, rng)
    stored = replace(stored, refloor=floors, seed=seed)
    run_id = record_sheet(store, experiment.experiment_id, stored)
    store.touch(experiment.experiment_id)
    older = 0 if request.rejudge else sum(_under_another(cell, material) for cell in known)
    other = _other_conditions(known, {candidate.run_id for candidate in chosen})
    return ExportResult(replace(stored, run_id=run_id), len(chosen), unknown, older, other)


def _may_be_on(request: ExportRequest, run_id: str) -> bool:
    return (request.only is None or run_id in request.only) and run_id not in request.without


def _floored_anew(store: RunStore, experiment: Experiment, material: Material, floors: Sequence[str]) -> str:
    changed = update_floor_scores(store, floors, material.rubric, now_iso())
    store.touch(experiment.experiment_id)
    return f"{changed} answers without a usable tip were floored anew under {material.rubric.id}. "


def _other_conditions(cells: Sequence[JudgedCell], chosen: Iterable[str]) -> int:
    """Counts the chosen cells collected under other conditions than the newest cell."""
    conditions = {cell.run.run_id: cell.run.tags.get("conditions") for cell in cells}
    newest = max(cells, key=lambda cell: cell.run.start_ms).run.run_id
    return sum(conditions[run_id] != conditions[newest] for run_id in chosen)


def _rng(seed: int | None) -> tuple[random.Random, int]:
    seed = random.SystemRandom().randrange(2**63) if seed is None else seed
    return random.Random(seed), seed  # noqa: S311 - for shuffling, not a secret


def _wish(request: ExportRequest) -> Selection:
    return Selection(request.judge, request.limit, request.overlap, request.everything or request.provisional)


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


def _judging(
    store: RunStore,
    experiment: Experiment,
    material: Material,
    request: ExportRequest,
    known: Sequence[JudgedCell],
    chosen: Sequence[Candidate],
    rng: random.Random,
) -> StoredSheet:
    by_run = {cell.run.run_id: cell for cell in known}
    cards: Mapping[str, Mapping[str, object]] = {
        candidate.scenario: material.cards[by_run[candidate.run_id].scenario] for candidate in chosen
    }
    sheet_id = uuid.uuid4().hex[:12]
    taken = {candidate.run_id for candidate in chosen}
    earlier = [
        cell.candidate(frozenset())
        for cell in known
        if not request.provisional and cell.run.run_id not in taken and _scored_before(cell, material, request.judge)
    ]
    entries = compose(
        chosen,
        cards,
        material.controls,
        material.rubric,
        shown=controls_shown_to(store, request.judge) if request.judge else (),
        earlier=earlier,
        sheet_id=sheet_id,
        rng=rng,
    )
    items, told = tuple(entry.item for entry in entries), instructions(material.rubric)
    sheet = Sheet(sheet_id, experiment.name, request.judge, material.rubric, items, told)
    return StoredSheet(sheet, entries, now_iso(), provisional=request.provisional, owner=request.judge)


def _scored_before(cell: JudgedCell, material: Material, judge: str | None) -> bool:
    given = cell.scores.judges.get(judge) if judge else None
    return given is not None and given.rubric == material.rubric.tag


def _nothing(name: str, request: ExportRequest, known: Sequence[JudgedCell], unknown: int) -> str:
    who = f"for {request.judge}" if request.judge else "for a judge"
    if not known and unknown:
        return (
            f"None of the {unknown} cells of {name} belongs to a scenario of the suite as it is now. "
            "Pass the suite they were collected with (--suite)."
        )
    if held := 0 if request.provisional else sum(request.judge in cell.scores.held for cell in known):
        return (
            f"Nothing in {name} waits {who} but {held} answers whose scores are held: revise their sheet and apply it "
            "again, or accept the drift. `tipbench judge status` names the sheet."
        )
    nothing = f"Nothing in {name} waits {who}: all {len(known)} answers are scored, or floored for want of a tip."
    if request.provisional:
        return nothing
    return f"{nothing} `--all` takes what others have scored, `--rejudge` what was scored under another rubric."
