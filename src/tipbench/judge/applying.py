"""Apply: take a filled sheet back, measure its judge, and count or hold the scores.

The order survives a kill at any point: the sheet's run gets everything that came back first, then each cell is brought
to what that says; applying again finds what is missing and does only that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tipbench.errors import MlflowRefused
from tipbench.judge.agreement import SelfAgreement, alpha, self_agreement
from tipbench.judge.answers import answers_text, merged, scores_mark
from tipbench.judge.calibration import ControlScore, Drift, Verdict, measure_drift
from tipbench.judge.judging import ANSWERS, DRIFT, Judging, SheetStatus, find_judging, milliseconds, now_iso
from tipbench.judge.key import Behind, Entry
from tipbench.judge.material import JudgedCell
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
from tipbench.judge.telling import Applied, Change
from tipbench.plan.rubric import Rubric
from tipbench.record.run import RunChange, StoredRun
from tipbench.record.store import Experiment, RunStore

__all__ = ["Application", "Applied", "Progress", "alphas_of", "is_gone", "refloor"]

Progress = Callable[[int, int], None]  # done, of
_CHECKS = 2  # how often what was written is read back, and written again where another machine has undone it


@dataclass(frozen=True)
class _Cell:
    run: StoredRun
    scores: CellScores
    rubric_text: str | None = None


@dataclass(frozen=True)
class _Measured:
    """What a sheet's scores are worth, and what follows."""

    drift: Drift
    accepted: str | None
    status: SheetStatus

    @property
    def held(self) -> bool:
        return self.status is SheetStatus.HELD


class Application:
    """One sheet being applied."""

    def __init__(self, store: RunStore, experiment: Experiment, judging: Judging, filled: Filled) -> None:
        self._store = store
        self._experiment = experiment
        self._judging = judging
        if filled.judge is None:
            raise ValueError("a sheet is applied for a judge; `receive` sees to it that there is one")
        self._judge = filled.judge
        self._at = now_iso()
        self._answers, self._replaced = merged(judging.answers, judging.replaced, filled.finished, self._at)
        self._blank = sum(item in judging.answers for item in filled.unfinished)
        self._rubrics = {judging.sheet.rubric.tag: judging.sheet.rubric}
        self._gone: set[str] = set()  # runs that were deleted in MLflow
        self._wrote = False

    def run(self, *, accept: str | None = None, dry_run: bool = False, progress: Progress | None = None) -> Applied:
        """Bring MLflow to what the sheet says; with `dry_run` only tell what would change."""
        judging, rubric = self._judging, self._judging.sheet.rubric
        measured = self._measure(accept)
        cells = self._cells(Behind.CELL, Behind.REPEAT)
        itself = self_agreement(rubric.scales, list(self._repeats(cells)))
        alphas = self._alphas(cells, held=measured.held)
        if self._answers and not dry_run:
            self._keep(measured, itself, alphas)
            self._bring(cells, held=measured.held, progress=progress)
            self._refloor(held=measured.held)
            if self._wrote:
                self._store.touch(self._experiment.experiment_id)
        finished = len(self._answers)
        return Applied(
            sheet=judging.sheet.id,
            rubric=rubric,
            judge=self._judge,
            status=measured.status,
            finished=finished,
            unfinished=len(judging.entries) - finished,
            drift=measured.drift,
            self_agreement=itself,
            alpha=alphas,
            changes=tuple(self._changes(measured.status)),
            accepted=measured.accepted,
            dry_run=dry_run,
            blank=self._blank,
            deleted=len(self._gone & self._runs(Behind.CELL).keys()),
        )

    def is_brought_in(self, cells: Iterable[JudgedCell]) -> bool:
        """Whether each of these cells that is on the sheet already says what the stored answers make of it."""
        held, own = self._judging.status is SheetStatus.HELD, self._runs(Behind.CELL)
        there = [_Cell(cell.run, cell.scores) for cell in cells if cell.run.run_id in own]
        return all(self._change(cell, held=held) is None for cell in there)

    def _measure(self, accept: str | None) -> _Measured:
        judging = self._judging
        drift = measure_drift(judging.sheet.rubric.scales, list(_controls(judging.entries, self._answers)))
        accepted = judging.acceptance_of(self._answers)
        if accept is not None and drift.verdict is Verdict.BEYOND:
            accepted = accept  # what nobody has seen yet cannot be accepted
        held = drift.verdict is Verdict.BEYOND and not judging.provisional and accepted is None
        return _Measured(drift, accepted, SheetStatus.HELD if held else SheetStatus.APPLIED)

    def _runs(self, *behind: Behind) -> dict[str, str]:
        """The runs behind finished items of these kinds, with the item."""
        return {
            entry.run_id: entry.item.id
            for entry in self._judging.entries
            if entry.behind in behind and entry.run_id and entry.item.id in self._answers
        }

    def _cells(self, *behind: Behind) -> dict[str, _Cell]:
        found = {run_id: self._cell(run_id) for run_id in self._runs(*behind)}
        return {run_id: cell for run_id, cell in found.items() if cell is not None}

    def _cell(self, run_id: str) -> _Cell | None:
        """The run as it is now; None when it was deleted."""
        try:
            run, texts = self._store.get(run_id)
        except MlflowRefused as exc:
            self._note_gone(run_id, exc)
            return None
        return _Cell(run, read_scores(texts.get(SCORES)), texts.get(RUBRIC))

    def _wanted(self, cell: _Cell, *, held: bool) -> CellScores:
        judging = self._judging
        given = self._answers[self._runs(Behind.CELL)[cell.run.run_id]]
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
        return cell.scores.with_judgement(judgement, provisional=judging.provisional)

    def _repeats(self, cells: Mapping[str, _Cell]) -> Iterable[tuple[Mapping[str, int], Mapping[str, int]]]:
        for run_id, item in self._runs(Behind.REPEAT).items():
            before = cells[run_id].scores.judges.get(self._judge)
            if before is not None and before.rubric == self._judging.sheet.rubric.tag:
                for then, now in zip(before.tips, self._answers[item].tips, strict=False):
                    yield then.scores, now.scores

    def _alphas(self, cells: Mapping[str, _Cell], *, held: bool) -> dict[str, float | None]:
        if self._judging.provisional:
            return {}
        own = self._runs(Behind.CELL)
        wanted = [self._wanted(cell, held=held) for run_id, cell in cells.items() if run_id in own]
        return alphas_of(self._judging.sheet.rubric, wanted)

    def _keep(self, measured: _Measured, itself: SelfAgreement | None, alphas: Mapping[str, float | None]) -> None:
        """Everything that came back goes to the sheet's own run, before any cell hears of it."""
        judging, drift = self._judging, measured.drift
        same = self._answers == judging.answers and measured.accepted == judging.accepted
        if same and measured.status is judging.status:
            return
        metrics = {"finished": float(len(self._answers)), **_drift_metrics(drift)}
        metrics |= {f"alpha_{name}": value for name, value in alphas.items() if value is not None}
        if itself is not None:
            metrics |= _self_metrics(itself)
        tags = {
            "sheet_status": str(measured.status),
            "judge": self._judge,
            "applied_at": self._at,
            "drift": str(drift.verdict),
        }
        if measured.accepted is not None:
            tags |= {"drift_accepted": measured.accepted, "drift_accepted_for": scores_mark(self._answers)}
        texts = {ANSWERS: answers_text(self._answers, self._replaced), DRIFT: json.dumps(drift.to_json())}
        change = RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=milliseconds(self._at))
        self._store.update(judging.run_id, change)
        self._wrote = True

    def _bring(self, cells: Mapping[str, _Cell], *, held: bool, progress: Progress | None) -> None:
        runs = {item: run_id for run_id, item in self._runs(Behind.CELL).items()}
        written = []
        for done, item in enumerate(self._answers, start=1):
            cell = cells.get(runs.get(item, ""))
            lacks = cell is not None and self._change(cell, held=held) is not None
            if lacks and self._write(runs[item], held=held):
                written.append(runs[item])
            if progress:
                progress(done, len(self._answers))
        for _ in range(_CHECKS):
            written = [run_id for run_id in written if self._write(run_id, held=held)]

    def _write(self, run_id: str, *, held: bool) -> bool:
        """Bring the run, as it is at this moment, to what the sheet says; whether there was anything to write."""
        cell = self._cell(run_id)
        change = None if cell is None else self._change(cell, held=held)
        return change is not None and self._update(run_id, change)

    def _change(self, cell: _Cell, *, held: bool) -> RunChange | None:
        scores = self._wanted(cell, held=held)
        change = run_change(scores, self._rubrics_of(scores), milliseconds(self._at))
        # The text alone does not tell: a writer may have died between a run's texts and its tags.
        if scores is cell.scores and _says(cell.run, change):
            return None
        return _without_rubric(change) if change.texts.get(RUBRIC) == cell.rubric_text else change

    def _update(self, run_id: str, change: RunChange) -> bool:
        try:
            self._store.update(run_id, change)
        except MlflowRefused as exc:
            self._note_gone(run_id, exc)
            return False
        self._wrote = True
        return True

    def _note_gone(self, run_id: str, exc: MlflowRefused) -> None:
        if not is_gone(exc):
            raise exc
        self._gone.add(run_id)

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
            score = self._answers.get(item.id)
            if before != after or score != judging.answers.get(item.id):
                means = tip_means(rubric, score) if score else None
                yield Change(item.id, before, after, means and {name: means[name] for name in names})

    def _refloor(self, *, held: bool) -> None:
        rubric = self._judging.sheet.rubric
        if not held and not self._judging.provisional:
            self._wrote |= refloor(self._store, self._judging.refloor, rubric, self._at) > 0


def refloor(store: RunStore, run_ids: Iterable[str], rubric: Rubric, at: str) -> int:
    """Floor answers without a usable tip anew under this rubric; how many were not so yet."""
    changed = 0
    for run_id in run_ids:
        try:
            run, _ = store.get(run_id)
            if run.tags.get("scores_rubric") != rubric.tag:
                store.update(run_id, floor_change(rubric, milliseconds(at)))
                changed += 1
        except MlflowRefused as exc:
            if not is_gone(exc):
                raise
    return changed


def is_gone(exc: MlflowRefused) -> bool:
    """Whether the run was deleted: MLflow still shows it and lets nobody change it, or knows it no more."""
    return exc.code == "RESOURCE_DOES_NOT_EXIST" or "Current state is deleted" in str(exc)


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
    metrics = {"n_scored_controls": float(drift.n_controls or 0)}
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
