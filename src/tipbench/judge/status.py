"""Judging status of an experiment: progress, judges and their reliability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from tipbench.judge.apply import alpha_by_scale, control_scores
from tipbench.judge.drift import Trends, measure_trends
from tipbench.judge.material import AnsweredCell, read_cells
from tipbench.judge.sheet_store import DUEL, SHEET_KIND, SheetStatus, StoredSheet, stored_sheets
from tipbench.record.run import RunKind, RunState
from tipbench.record.store import Experiment, RunStore


@dataclass(frozen=True)
class JudgeStatus:
    """The judging status of one judge."""

    judge: str
    provisional: bool
    cells: int  # with applied scores of this judge; if `provisional`, with provisional ones
    held: int  # cells with held scores of this judge
    sheets: int
    open_items: int  # unscored items on unfinished sheets
    verdict: str | None  # on the drift of the newest applied or held sheet; `drift` in JSON
    error: float | None  # mean absolute error on that sheet's controls
    self_exact: float | None  # share of equal scores on repeated tips
    minutes_per_item: float | None  # from export to apply, so an upper bound
    unchecked: int = 0  # scored items on applied sheets without a drift verdict; their scores count
    duels: int = 0  # number of duel sheets
    trends: Trends | None = None  # over the sheets that have a drift verdict and the same rubric as the newest sheet

    def to_json(self) -> dict[str, Any]:
        fields = {"drift" if name == "verdict" else name: value for name, value in asdict(self).items()}
        return {**fields, "trends": self.trends.to_json() if self.trends else None}


@dataclass(frozen=True)
class SheetSummary:
    """A sheet without its items."""

    sheet: str
    judge: str | None  # None if the sheet was exported without a name and is not applied yet
    exported: str
    status: str
    provisional: bool
    items: int
    finished: int  # items with scores
    drift: Mapping[str, Any] | None  # the JSON of a Drift; None until the first verdict
    accepted: str | None  # reason for accepting the drift

    @classmethod
    def of(cls, stored: StoredSheet) -> SheetSummary:
        return cls(
            sheet=stored.sheet.id,
            judge=stored.owner,
            exported=stored.exported,
            status=str(stored.status),
            provisional=stored.provisional,
            items=len(stored.entries),
            finished=len(stored.scores),
            drift=stored.drift,
            accepted=stored.accepted,
        )


@dataclass(frozen=True)
class JudgingStatus:
    """The judging status of an experiment."""

    experiment: str
    cells: int
    pending: int
    held: int  # pending cells with held scores
    judged: int
    floored: int  # judged cells without a usable tip
    twice: int  # cells with counted scores of two or more judges
    rubrics: tuple[str, ...]  # rubric ids of the current scores
    alpha: Mapping[str, float | None]  # Krippendorff's alpha by scale, for the rubric with the most counted judgements
    judges: tuple[JudgeStatus, ...]
    history: tuple[SheetSummary, ...]  # applied and held sheets, oldest first
    open_sheets: tuple[SheetSummary, ...] = ()  # unfinished sheets with unscored items, oldest first

    def use_of_scores(self, judge: JudgeStatus) -> str:
        """Return a phrase for how the judge's scores are used, such as "provisional" or "held"."""
        if judge.provisional:
            return "provisional"
        if judge.held:
            return "partly held" if judge.cells else "held"
        sheets = [sheet for sheet in self.history if sheet.judge == judge.judge and not sheet.provisional]
        if sheets and sheets[-1].accepted:
            return "count, drift accepted"
        if judge.unchecked:
            return "count, unchecked"
        return "count" if judge.cells else "none"

    def to_json(self) -> dict[str, Any]:
        judges = [each.to_json() for each in self.judges]
        open_keys = ("sheet", "judge", "exported", "provisional", "items", "finished")
        open_sheets = [{key: getattr(sheet, key) for key in open_keys} for sheet in self.open_sheets]
        return {**asdict(self), "judges": judges, "open_sheets": open_sheets}


def judging_status(store: RunStore, experiment: Experiment) -> JudgingStatus:
    """Read the cells and sheets of an experiment and return the judging status."""
    sheets = list(stored_sheets(store, experiment))[::-1]  # oldest first
    cells = read_cells(store, experiment.experiment_id)
    judged = [cell for cell in cells if cell.run.state == RunState.JUDGED]
    pending = [cell for cell in cells if cell.run.state == RunState.PENDING]
    rubric_counts = Counter(judgement.rubric for cell in judged for judgement in cell.scores.counted)
    most_used_tag = max(rubric_counts, key=rubric_counts.__getitem__, default="")
    rubrics_by_tag = {stored.sheet.rubric.tag: stored.sheet.rubric for stored in sheets}
    rubric = rubrics_by_tag.get(most_used_tag)
    duels_only = {"kind": str(RunKind.JUDGING), SHEET_KIND: DUEL}
    duel_sheets = store.search(experiment.experiment_id, where=duels_only)
    duel_counts = Counter(run.tags.get("judge", "") for run in duel_sheets)
    provisional = {name for cell in cells for name in cell.scores.provisional}
    provisional |= {stored.owner for stored in sheets if stored.owner and stored.provisional}
    others = {name for cell in cells for name in (*cell.scores.applied, *cell.scores.held)}
    others |= {stored.owner for stored in sheets if stored.owner and not stored.provisional}
    statuses = [_judge_status(name, cells, sheets, duel_counts, provisional=False) for name in sorted(others)]
    statuses += [_judge_status(name, cells, sheets, duel_counts, provisional=True) for name in sorted(provisional)]
    return JudgingStatus(
        experiment=experiment.name,
        cells=len(cells),
        pending=len(pending),
        held=sum(bool(cell.scores.held) for cell in pending),
        judged=len(judged),
        floored=sum(cell.floored for cell in judged),
        twice=sum(len(cell.scores.counted) > 1 for cell in judged),
        rubrics=tuple(sorted({cell.run.tags.get("scores_rubric", "").split("@")[0] for cell in judged})),
        alpha=alpha_by_scale(rubric, [cell.scores for cell in judged]) if rubric else {},
        judges=tuple(statuses),
        history=tuple(SheetSummary.of(stored) for stored in sheets if stored.status is not SheetStatus.EXPORTED),
        open_sheets=tuple(SheetSummary.of(stored) for stored in sheets if stored.is_open),
    )


def _judge_status(
    name: str,
    cells: Sequence[AnsweredCell],
    sheets: Sequence[StoredSheet],
    duel_counts: Counter[str],
    *,
    provisional: bool,
) -> JudgeStatus:
    """Return the status of one judge. `sheets` are oldest first."""
    own_sheets = [stored for stored in sheets if stored.owner == name and stored.provisional == provisional]
    applied_or_held = [stored for stored in own_sheets if stored.status is not SheetStatus.EXPORTED]
    newest = applied_or_held[-1] if applied_or_held else None
    drift = newest.drift if newest and newest.drift else {}
    n_scored = sum(len(stored.scores) for stored in applied_or_held)
    rubric = newest.sheet.rubric if newest else None
    with_drift = [stored for stored in applied_or_held if stored.drift is not None]
    same_rubric = [stored for stored in with_drift if rubric and stored.sheet.rubric.tag == rubric.tag]
    controls = [list(control_scores(stored.entries, stored.scores)) for stored in same_rubric]
    durations_s = [
        (datetime.fromisoformat(stored.applied_at) - datetime.fromisoformat(stored.exported)).total_seconds()
        for stored in applied_or_held
        if stored.applied_at
    ]
    return JudgeStatus(
        judge=name,
        provisional=provisional,
        cells=sum(name in (cell.scores.provisional if provisional else cell.scores.applied) for cell in cells),
        held=0 if provisional else sum(name in cell.scores.held for cell in cells),
        sheets=len(own_sheets),
        open_items=sum(len(stored.unscored) for stored in own_sheets if not stored.final),
        verdict=drift.get("verdict"),
        error=drift.get("error"),
        self_exact=newest.self_exact if newest else None,
        minutes_per_item=sum(durations_s) / 60 / n_scored if n_scored and durations_s else None,
        unchecked=sum(len(stored.scores) for stored in applied_or_held if stored.drift is None),
        duels=0 if provisional else duel_counts[name],
        trends=measure_trends(rubric.scales, controls) if rubric and any(controls) else None,
    )
