"""Apply: take a filled sheet back, measure its judge, and count or hold the scores.

The order survives a kill at any point: the sheet's run gets everything that came back first, then each cell is brought
to what that says; applying again finds what is missing and does only that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tipbench.judge.agreement import SelfAgreement, alpha, self_agreement
from tipbench.judge.calibration import ControlScore, Drift, Verdict, measure_drift
from tipbench.judge.judging import (
    ANSWERS,
    DRIFT,
    Judging,
    SheetStatus,
    answers_text,
    find_judging,
    milliseconds,
    now_iso,
)
from tipbench.judge.key import Behind, Entry
from tipbench.judge.scores import (
    RUBRIC,
    SCORES,
    CellScores,
    Judgement,
    floor_change,
    read_scores,
    run_change,
    tip_means,
)
from tipbench.judge.sheet import Filled, ItemScore
from tipbench.plan.rubric import Rubric
from tipbench.record.run import RunChange, StoredRun
from tipbench.record.store import Experiment, RunStore

Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True)
class Change:
    """What applying does to one item, as its judge sees it: hidden items show like all others."""

    item: str
    before: Mapping[str, float] | None  # means of the scales and the composite; None while they do not count
    after: Mapping[str, float] | None


@dataclass(frozen=True)
class Applied:
    """How an apply ended."""

    sheet: str
    rubric: Rubric
    judge: str
    status: SheetStatus
    finished: int  # items with every score, hidden ones included: the judge cannot tell them apart
    unfinished: int
    drift: Drift
    self_agreement: SelfAgreement | None = None
    alpha: Mapping[str, float | None] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    accepted: str | None = None

    @property
    def held(self) -> bool:
        return self.status is SheetStatus.HELD

    def to_json(self) -> dict[str, Any]:
        """What scripts read."""
        return {
            "sheet": self.sheet,
            "status": str(self.status),
            "judge": self.judge,
            "applied": 0 if self.held else self.finished,
            "held": self.finished if self.held else 0,
            "unfinished": self.unfinished,
            "changed": len(self.changes),
            "errors": [],
            "drift": self.drift.to_json(),
            "self_agreement": self.self_agreement.to_json() if self.self_agreement else None,
            "alpha": dict(self.alpha),
            "drift_accepted": self.accepted,
        }


@dataclass(frozen=True)
class _Cell:
    run: StoredRun
    scores: CellScores
    rubric_text: str | None


class Application:
    """One sheet being applied."""

    def __init__(self, store: RunStore, experiment: Experiment, judging: Judging, filled: Filled) -> None:
        self._store = store
        self._experiment = experiment
        self._judging = judging
        if filled.judge is None:
            raise ValueError("a sheet is applied for a judge; `receive` sees to it that there is one")
        self._judge = filled.judge
        finished = {score.item: score for score in filled.finished}
        self._answers = {**judging.answers, **finished}
        self._at = now_iso()
        self._rubrics = {judging.sheet.rubric.tag: judging.sheet.rubric}

    def run(self, *, accept: str | None = None, dry_run: bool = False, progress: Progress | None = None) -> Applied:
        """Bring MLflow to what the sheet says; with `dry_run` only tell what would change."""
        judging, rubric = self._judging, self._judging.sheet.rubric
        drift = measure_drift(rubric.scales, list(_controls(judging.entries, self._answers)))
        # An acceptance is of these very scores: a revised or further filled sheet is measured again.
        accepted = judging.accepted if self._answers == dict(judging.answers) else None
        if accept is not None and drift.verdict is Verdict.BEYOND:
            accepted = accept  # what nobody has seen yet cannot be accepted
        held = drift.verdict is Verdict.BEYOND and not judging.provisional and accepted is None
        status = SheetStatus.HELD if held else SheetStatus.APPLIED
        cells = {run_id: self._cell(run_id) for run_id in self._runs(Behind.CELL, Behind.REPEAT)}
        wanted = {run_id: self._wanted(run_id, cells[run_id], held=held) for run_id in self._runs(Behind.CELL)}
        itself = self_agreement(rubric.scales, list(self._repeats(cells)))
        alphas = self._alphas(wanted.values())
        if not dry_run:
            self._keep(status, drift, itself, alphas, accepted)
            self._bring(cells, wanted, progress)
            self._refloor(held=held)
            self._store.touch(self._experiment.experiment_id)
        finished = len(self._answers)
        return Applied(
            sheet=judging.sheet.id,
            rubric=rubric,
            judge=self._judge,
            status=status,
            finished=finished,
            unfinished=len(judging.entries) - finished,
            drift=drift,
            self_agreement=itself,
            alpha=alphas,
            changes=tuple(self._changes(status)),
            accepted=accepted,
        )

    def _runs(self, *behind: Behind) -> dict[str, str]:
        """The runs behind finished items of these kinds, with the item."""
        return {
            entry.run_id: entry.item.id
            for entry in self._judging.entries
            if entry.behind in behind and entry.run_id and entry.item.id in self._answers
        }

    def _cell(self, run_id: str) -> _Cell:
        run, texts = self._store.get(run_id)
        return _Cell(run, read_scores(texts.get(SCORES)), texts.get(RUBRIC))

    def _wanted(self, run_id: str, cell: _Cell, *, held: bool) -> CellScores:
        judging = self._judging
        given = self._answers[self._runs(Behind.CELL)[run_id]]
        judgement = Judgement(
            judge=self._judge,
            sheet=judging.sheet.id,
            exported=judging.exported,
            at=self._at,
            rubric=judging.sheet.rubric.tag,
            format_ok=given.format_ok,
            tips=given.tips,
            means=tip_means(judging.sheet.rubric, given),
            held=held,
        )
        newer = cell.scores.judges.get(self._judge)
        if newer is not None and newer.exported > judging.exported and not judging.provisional:
            return cell.scores  # the judge has scored it again on a later sheet: that one stands
        return cell.scores.with_judgement(judgement, provisional=judging.provisional)

    def _repeats(self, cells: Mapping[str, _Cell]) -> Iterable[tuple[Mapping[str, int], Mapping[str, int]]]:
        for run_id, item in self._runs(Behind.REPEAT).items():
            before = cells[run_id].scores.judges.get(self._judge)
            if before is not None and before.rubric == self._judging.sheet.rubric.tag:
                for then, now in zip(before.tips, self._answers[item].tips, strict=False):
                    yield then.scores, now.scores

    def _alphas(self, cells: Iterable[CellScores]) -> dict[str, float | None]:
        rubric = self._judging.sheet.rubric
        if self._judging.provisional:
            return {}
        return alphas_of(rubric, cells)

    def _keep(
        self,
        status: SheetStatus,
        drift: Drift,
        itself: SelfAgreement | None,
        alphas: Mapping[str, float | None],
        accepted: str | None,
    ) -> None:
        judging = self._judging
        text = answers_text(self._answers)
        same = text == answers_text(judging.answers) and status is judging.status and accepted == judging.accepted
        if same and judging.answers:
            return
        metrics = {"finished": float(len(self._answers)), **_drift_metrics(drift)}
        metrics |= {f"alpha_{name}": value for name, value in alphas.items() if value is not None}
        if itself is not None:
            metrics |= _self_metrics(itself)
        tags = {"sheet_status": str(status), "judge": self._judge, "applied_at": self._at, "drift": str(drift.verdict)}
        if accepted is not None or judging.accepted is not None:
            tags["drift_accepted"] = accepted or ""
        texts = {ANSWERS: text, DRIFT: json.dumps(drift.to_json())}
        change = RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=milliseconds(self._at))
        self._store.update(judging.run_id, change)

    def _bring(
        self,
        cells: Mapping[str, _Cell],
        wanted: Mapping[str, CellScores],
        progress: Progress | None,
    ) -> None:
        for done, (run_id, scores) in enumerate(wanted.items()):
            cell = cells[run_id]
            change = run_change(scores, self._rubrics_of(scores), milliseconds(self._at))
            # The text alone does not tell: a writer may have died between a run's texts and its tags.
            if scores is not cell.scores or not _says(cell.run, change):
                same_rubric = change.texts.get(RUBRIC) == cell.rubric_text
                self._store.update(run_id, _without_rubric(change) if same_rubric else change)
            if progress:
                progress(done + 1, len(wanted))

    def _rubrics_of(self, scores: CellScores) -> Mapping[str, Rubric]:
        """With the rubric of what counts: if it is not this sheet's, that of the sheet the scores were given on."""
        for given in scores.counted[:1]:
            if given.rubric not in self._rubrics:
                where = self._experiment
                other = find_judging(self._store, where.experiment_id, where.name, given.sheet)
                self._rubrics |= {other.sheet.rubric.tag: other.sheet.rubric} if other else {}
        return self._rubrics

    def _changes(self, status: SheetStatus) -> Iterable[Change]:
        """Item by item, from the judge's own scores alone: what others gave, or what is hidden, must not show."""
        judging, rubric = self._judging, self._judging.sheet.rubric
        names = (*rubric.scale_names, "composite")
        for item in judging.sheet.items:
            sides = []
            for given, state in ((judging.answers, judging.status), (self._answers, status)):
                score = given.get(item.id) if state is SheetStatus.APPLIED else None
                sides.append(score and tip_means(rubric, score))
            before, after = ({name: side[name] for name in names} if side else None for side in sides)
            if before != after or self._answers.get(item.id) != judging.answers.get(item.id):
                yield Change(item.id, before, after)

    def _refloor(self, *, held: bool) -> None:
        rubric = self._judging.sheet.rubric
        for run_id in () if held else self._judging.refloor:
            run, _ = self._store.get(run_id)
            if run.tags.get("scores_rubric") != rubric.tag:
                self._store.update(run_id, floor_change(rubric, milliseconds(self._at)))


def alphas_of(rubric: Rubric, cells: Iterable[CellScores]) -> dict[str, float | None]:
    """Krippendorff's alpha per scale over the tips that two or more counted judges have scored."""
    units: list[dict[str, Mapping[str, int]]] = []
    for scores in cells:
        counted = [given for given in scores.counted if given.rubric == rubric.tag]
        units += [
            {given.judge: tip.scores for given, tip in zip(counted, tips, strict=True)}
            for tips in zip(*(given.tips for given in counted), strict=False)
        ]
    return {
        scale.name: alpha(scale, [{judge: given[scale.name] for judge, given in unit.items()} for unit in units])
        for scale in rubric.scales
    }


def _controls(entries: Iterable[Entry], answers: Mapping[str, ItemScore]) -> Iterable[ControlScore]:
    for entry in entries:
        if entry.behind is Behind.CONTROL and entry.item.id in answers:
            for tip, reference in zip(answers[entry.item.id].tips, entry.references, strict=True):
                yield ControlScore(tip.scores, reference)


def _drift_metrics(drift: Drift) -> dict[str, float]:
    metrics = {"n_scored_controls": float(drift.n_controls)}
    if drift.error is not None:
        metrics["control_error"] = drift.error
    for scale in drift.scales:
        for name, value in (("bias", scale.bias), ("error", scale.error)):
            if value is not None:
                metrics[f"{name}_{scale.scale}"] = value
    return metrics


def _self_metrics(itself: SelfAgreement) -> dict[str, float]:
    by_scale = {f"self_difference_{scale.scale}": scale.difference for scale in itself.scales}
    return {"self_exact": itself.exact} | {name: value for name, value in by_scale.items() if value is not None}


def _without_rubric(change: RunChange) -> RunChange:
    texts = {key: text for key, text in change.texts.items() if key != RUBRIC}
    return RunChange(metrics=change.metrics, tags=change.tags, texts=texts, at_ms=change.at_ms)


def _says(run: StoredRun, change: RunChange) -> bool:
    """Whether the run's tags and metrics are what the change would make them."""
    return change.tags.items() <= run.tags.items() and change.metrics.items() <= run.metrics.items()
