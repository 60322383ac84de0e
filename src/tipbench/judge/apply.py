"""Applies a filled sheet: measures the judge's drift, then counts or holds the scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tipbench.errors import MlflowError
from tipbench.judge.drift import (
    ControlScore,
    Drift,
    ScaleDrift,
    SelfAgreement,
    Verdict,
    alpha,
    measure_drift,
    self_agreement,
)
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
from tipbench.judge.sheet import FilledSheet, ItemScore
from tipbench.judge.sheet_store import (
    ANSWERS,
    DRIFT,
    FINAL,
    REVISIONS,
    ItemKind,
    SheetEntry,
    SheetStatus,
    StoredSheet,
    answers_text,
    find_sheet,
    merged,
    milliseconds,
    now_iso,
    scores_fingerprint,
)
from tipbench.plan.rubric import Rubric
from tipbench.record.run import RunChange, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import plural

__all__ = ["ApplyResult", "Progress", "SheetApplier", "alpha_by_scale", "is_deleted", "update_floor_scores"]

Progress = Callable[[int, int], None]  # done, total
_CHECKS = 2  # verification passes after writing; a run overwritten by another machine is written again


@dataclass(frozen=True)
class _Cell:
    run: StoredRun
    scores: CellScores
    rubric_text: str | None = None


class SheetApplier:
    """Applies one filled sheet to the runs in MLflow."""

    def __init__(self, store: RunStore, experiment: Experiment, stored: StoredSheet, filled: FilledSheet) -> None:
        self._store = store
        self._experiment = experiment
        self._stored = stored
        if filled.judge is None:
            raise ValueError("a sheet is applied for a judge; `receive` sees to it that there is one")
        self._judge = filled.judge
        self._at = now_iso()
        self._answers, self._replaced = merged(stored.answers, stored.replaced, filled.finished, self._at)
        self._blank = sum(item in stored.answers for item in filled.unfinished)
        self._rubrics = {stored.sheet.rubric.tag: stored.sheet.rubric}
        self._gone: set[str] = set()  # runs deleted in MLflow
        self._wrote = False

    def run(
        self,
        *,
        accept: str | None = None,
        final: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ApplyResult:
        """Writes the sheet's scores to MLflow; with `dry_run`, only returns what would change, from the sheet alone.

        The drift is measured once every item is answered or the sheet is `final`. The first verdict is returned in
        full, later ones (revisions) as a word: numbers that follow single changes would reveal the controls.
        """
        if dry_run:
            return self._result(SheetStatus.APPLIED, dry_run=True)
        stored, rubric = self._stored, self._stored.sheet.rubric
        final = final or stored.final
        settled = final or stored.provisional or len(self._answers) == len(stored.entries)
        drift = measure_drift(rubric.scales, list(_controls(stored.entries, self._answers))) if settled else None
        accepted = stored.acceptance_of(self._answers)
        if accept is not None and drift is not None and drift.verdict is Verdict.BEYOND:
            accepted = accept  # only a measured drift can be accepted
        beyond = stored.status is SheetStatus.HELD if drift is None else drift.verdict is Verdict.BEYOND
        held = beyond and not stored.provisional and accepted is None
        status = SheetStatus.HELD if held else SheetStatus.APPLIED
        cells = self._cells()
        revision = drift is not None and stored.drift is not None and not stored.provisional
        agreement = self_agreement(rubric.scales, list(self._repeats(cells))) if settled and not revision else None
        own = self._runs(ItemKind.CELL)
        wanted = [self._wanted(cell, held=held) for run_id, cell in cells.items() if run_id in own]
        alphas = alpha_by_scale(rubric, wanted) if settled and not stored.provisional else {}
        result = replace(
            self._result(status),
            drift=drift,
            revision=revision,
            accepted=accepted,
            self_agreement=agreement,
            alpha={} if revision else alphas,
        )
        if self._answers or final:
            self._save_answers(result, alphas, final=final)
            self._write_cells(cells, held=held, progress=progress)
            if not held and not stored.provisional and settled:
                self._wrote |= update_floor_scores(self._store, stored.refloor, rubric, self._at) > 0
            if self._wrote:
                self._store.touch(self._experiment.experiment_id)
        return replace(result, deleted=len(self._gone & own.keys()))

    def _result(self, status: SheetStatus, *, dry_run: bool = False) -> ApplyResult:
        stored = self._stored
        return ApplyResult(
            sheet=stored.sheet.id,
            rubric=stored.sheet.rubric,
            judge=self._judge,
            status=status,
            finished=len(self._answers),
            unfinished=len(stored.entries) - len(self._answers),
            changes=tuple(self._changes(status, dry_run=dry_run)),
            dry_run=dry_run,
            blank=self._blank,
        )

    @property
    def changes_scores(self) -> bool:
        """Whether the file has other answers than the last applied version."""
        return self._answers != self._stored.answers

    def is_brought_in(self, cells: Iterable[JudgedCell]) -> bool:
        """Returns whether every given cell that is on the sheet already has the scores of the stored answers."""
        held, own = self._stored.status is SheetStatus.HELD, self._runs(ItemKind.CELL)
        there = [_Cell(cell.run, cell.scores) for cell in cells if cell.run.run_id in own]
        return all(self._change(cell, held=held) is None for cell in there)

    def _runs(self, *kinds: ItemKind) -> dict[str, str]:
        """Returns the item id by run id, for the finished items of these kinds."""
        return {
            entry.run_id: entry.item.id
            for entry in self._stored.entries
            if entry.kind in kinds and entry.run_id and entry.item.id in self._answers
        }

    def _cells(self) -> dict[str, _Cell]:
        """Reads the runs of the finished cells and repeats; for a control another run, so that it takes as long."""
        found = {run_id: self._cell(run_id) for run_id in self._runs(ItemKind.CELL, ItemKind.REPEAT)}
        for entry in self._stored.entries:
            if entry.kind is ItemKind.CONTROL and entry.item.id in self._answers:
                self._read_any_cell()
        return {run_id: cell for run_id, cell in found.items() if cell is not None}

    def _read_any_cell(self) -> None:
        run_id = next((entry.run_id for entry in self._stored.entries if entry.kind is ItemKind.CELL), None)
        if run_id is not None:
            self._cell(run_id)

    def _cell(self, run_id: str) -> _Cell | None:
        """Returns the run's current state, or None if the run was deleted."""
        try:
            run, texts = self._store.get(run_id)
        except MlflowError as exc:
            self._note_gone(run_id, exc)
            return None
        return _Cell(run, read_scores(texts.get(SCORES)), texts.get(RUBRIC))

    def _wanted(self, cell: _Cell, *, held: bool) -> CellScores:
        stored = self._stored
        given = self._answers[self._runs(ItemKind.CELL)[cell.run.run_id]]
        judgement = Judgement(
            judge=self._judge,
            sheet=stored.sheet.id,
            exported=stored.exported,
            at=self._at,
            rubric=stored.sheet.rubric.tag,
            format_ok=given.format_ok,
            tips=given.tips,
            means=tip_means(stored.sheet.rubric, given),
            held=held,
        )
        return cell.scores.with_judgement(judgement, provisional=stored.provisional)

    def _repeats(self, cells: Mapping[str, _Cell]) -> Iterable[tuple[Mapping[str, int], Mapping[str, int]]]:
        for run_id, item in self._runs(ItemKind.REPEAT).items():
            before = cells[run_id].scores.judges.get(self._judge)
            if before is not None and before.rubric == self._stored.sheet.rubric.tag:
                for then, now in zip(before.tips, self._answers[item].tips, strict=False):
                    yield then.scores, now.scores

    def _save_answers(self, result: ApplyResult, alphas: Mapping[str, float | None], *, final: bool) -> None:
        """Saves all answers to the sheet's run before any cell is updated."""
        stored, drift = self._stored, result.drift
        same = self._answers == stored.answers and result.accepted == stored.accepted
        if same and result.status is stored.status and final == stored.final:
            return
        tags = {"sheet_status": str(result.status), "judge": self._judge, "applied_at": self._at}
        texts = {ANSWERS: answers_text(self._answers, self._replaced)}
        metrics = {"finished": float(len(self._answers))}
        metrics |= {f"alpha_{name}": value for name, value in alphas.items() if value is not None}
        if final:
            tags[FINAL] = "true"
        if stored.drift is not None and self._answers != stored.answers:
            tags[REVISIONS] = str(stored.revisions + 1)
        if drift is not None:
            tags["drift"] = str(drift.verdict)
            texts[DRIFT] = json.dumps(drift.to_json())
            metrics |= {"n_scored_controls": float(drift.n_controls or 0)}
            values = {"control_error": drift.error}
            values |= {f"bias_{scale.scale}": scale.bias for scale in drift.scales}
            values |= {f"error_{scale.scale}": scale.error for scale in drift.scales}
            metrics |= {name: value for name, value in values.items() if value is not None}
        if (agreement := result.self_agreement) is not None:
            differences = {f"self_difference_{scale.scale}": scale.difference for scale in agreement.scales}
            metrics |= {"self_exact": agreement.exact}
            metrics |= {name: value for name, value in differences.items() if value is not None}
        if result.accepted is not None:
            tags |= {"drift_accepted": result.accepted, "drift_accepted_for": scores_fingerprint(self._answers)}
        change = RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=milliseconds(self._at))
        self._store.update(stored.run_id, change)
        self._wrote = True

    def _write_cells(self, cells: Mapping[str, _Cell], *, held: bool, progress: Progress | None) -> None:
        runs = {item: run_id for run_id, item in self._runs(ItemKind.CELL).items()}
        written = []
        for done, (item, score) in enumerate(self._answers.items(), start=1):
            cell = cells.get(runs.get(item, ""))
            lacks = cell is not None and self._change(cell, held=held) is not None
            if lacks and self._write(runs[item], held=held):
                written.append(runs[item])
            if item not in runs and score != self._stored.answers.get(item):
                # A hidden item: the same number of reads and writes as for a cell, so that the time does not reveal it.
                answers = {ANSWERS: answers_text(self._answers, self._replaced)}
                self._read_any_cell()
                self._store.update(self._stored.run_id, RunChange(texts=answers, at_ms=milliseconds(self._at)))
                self._read_any_cell()
            if progress:
                progress(done, len(self._answers))
        for _ in range(_CHECKS):
            written = [run_id for run_id in written if self._write(run_id, held=held)]

    def _write(self, run_id: str, *, held: bool) -> bool:
        """Re-reads the run and writes the sheet's scores to it; returns whether anything was written."""
        cell = self._cell(run_id)
        change = None if cell is None else self._change(cell, held=held)
        return change is not None and self._update(run_id, change)

    def _change(self, cell: _Cell, *, held: bool) -> RunChange | None:
        scores = self._wanted(cell, held=held)
        change = run_change(scores, self._rubrics_of(scores), milliseconds(self._at))
        # Equal texts are not enough: a writer may have crashed between writing a run's texts and its tags.
        if scores is cell.scores and _has_change(cell.run, change):
            return None
        return _without_rubric(change) if change.texts.get(RUBRIC) == cell.rubric_text else change

    def _update(self, run_id: str, change: RunChange) -> bool:
        try:
            self._store.update(run_id, change)
        except MlflowError as exc:
            self._note_gone(run_id, exc)
            return False
        self._wrote = True
        return True

    def _note_gone(self, run_id: str, exc: MlflowError) -> None:
        if not is_deleted(exc):
            raise exc
        self._gone.add(run_id)

    def _rubrics_of(self, scores: CellScores) -> Mapping[str, Rubric]:
        """Returns rubrics by tag, including the one the counted scores were given under, even if from another sheet."""
        for given in scores.counted[:1]:
            if given.rubric not in self._rubrics:
                where = self._experiment
                other = find_sheet(self._store, where.experiment_id, where.name, given.sheet)
                self._rubrics |= {other.sheet.rubric.tag: other.sheet.rubric} if other else {}
        return self._rubrics

    def _changes(self, status: SheetStatus, *, dry_run: bool) -> Iterable[ItemChange]:
        """Yields changes per item from this judge's scores only, without revealing other judges' scores or controls."""
        stored, rubric = self._stored, self._stored.sheet.rubric
        names = (*rubric.scale_names, "composite")
        for item in stored.sheet.items:
            sides = []
            former = status if dry_run else stored.status  # a dry run compares with the last applied version
            for given, state in ((stored.answers, former), (self._answers, status)):
                score = given.get(item.id) if state is SheetStatus.APPLIED else None
                sides.append(score and tip_means(rubric, score))
            before, after = ({name: side[name] for name in names} if side else None for side in sides)
            score = self._answers.get(item.id)
            if before != after or score != stored.answers.get(item.id):
                means = tip_means(rubric, score) if score else None
                yield ItemChange(item.id, before, after, means and {name: means[name] for name in names})


def update_floor_scores(store: RunStore, run_ids: Iterable[str], rubric: Rubric, at: str) -> int:
    """Rewrites the floor scores of answers without a usable tip under this rubric; returns how many changed."""
    changed = 0
    for run_id in run_ids:
        try:
            run, _ = store.get(run_id)
            if run.tags.get("scores_rubric") != rubric.tag:
                store.update(run_id, floor_change(rubric, milliseconds(at)))
                changed += 1
        except MlflowError as exc:
            if not is_deleted(exc):
                raise
    return changed


def is_deleted(exc: MlflowError) -> bool:
    """Returns whether the error means the run was deleted: MLflow still lists it as read-only, or has purged it."""
    return exc.code == "RESOURCE_DOES_NOT_EXIST" or "Current state is deleted" in str(exc)


def alpha_by_scale(rubric: Rubric, cells: Iterable[CellScores]) -> dict[str, float | None]:
    """Returns Krippendorff's alpha per scale, over the tips scored by two or more counted judges."""
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


def _controls(entries: Iterable[SheetEntry], answers: Mapping[str, ItemScore]) -> Iterable[ControlScore]:
    for entry in entries:
        if entry.kind is ItemKind.CONTROL and entry.item.id in answers:
            for tip, reference in zip(answers[entry.item.id].tips, entry.references, strict=True):
                yield ControlScore(tip.scores, reference)


def _without_rubric(change: RunChange) -> RunChange:
    texts = {key: text for key, text in change.texts.items() if key != RUBRIC}
    return RunChange(metrics=change.metrics, tags=change.tags, texts=texts, at_ms=change.at_ms)


def _has_change(run: StoredRun, change: RunChange) -> bool:
    """Returns whether the run already has the change's tags and metrics."""
    return change.tags.items() <= run.tags.items() and change.metrics.items() <= run.metrics.items()


@dataclass(frozen=True)
class ItemChange:
    """The effect of applying on one item, as shown to its judge; hidden items are included like any other."""

    item: str
    before: Mapping[str, float] | None  # means of the scales and the composite; None if not counted
    after: Mapping[str, float] | None
    given: Mapping[str, float] | None = None  # the sheet's current scores, counted or not

    def to_json(self) -> dict[str, Any]:
        """Returns the change as JSON-serializable values."""
        return {"item": self.item, "before": self.before, "after": self.after, "given": self.given}


@dataclass(frozen=True)
class ApplyResult:
    """The result of an apply. `drift`, `self_agreement` and `alpha` are exact; `to_json` rounds or omits them."""

    sheet: str
    rubric: Rubric
    judge: str
    status: SheetStatus
    finished: int  # fully scored items, including hidden ones, which judges cannot distinguish
    unfinished: int
    drift: Drift | None = None  # None before the first verdict and in a dry run
    revision: bool = False  # a verdict was given before; this one is only a word
    self_agreement: SelfAgreement | None = None
    alpha: Mapping[str, float | None] = field(default_factory=dict)
    changes: tuple[ItemChange, ...] = ()
    accepted: str | None = None
    dry_run: bool = False
    blank: int = 0  # items blank in the file that have earlier scores
    deleted: int = 0  # answers whose run was deleted in MLflow

    @property
    def held(self) -> bool:
        return self.status is SheetStatus.HELD

    @property
    def verdict(self) -> str:
        """The drift verdict of a revision: ok, held or unknown."""
        unknown = self.drift is None or self.drift.verdict is Verdict.UNKNOWN
        return "held" if self.held else "unknown" if unknown else "ok"

    def to_json(self) -> dict[str, Any]:
        """Returns the result for scripts, rounded so that single hidden items cannot be identified."""
        drift = None
        if self.drift is not None:
            drift = {"verdict": self.verdict} if self.revision else self._rounded_drift(self.drift).to_json()
        value = {
            "sheet": self.sheet,
            "status": str(self.status),
            "judge": self.judge,
            "applied": 0 if self.held else self.finished,
            "held": self.finished if self.held else 0,
            "unfinished": self.unfinished,
            "unchecked": self.finished if self.drift is None and not self.dry_run else 0,
            "blank": self.blank,
            "deleted": self.deleted,
            "changed": len(self.changes),
            "errors": [],
            "drift": drift,
            "self_agreement": _coarse(self.self_agreement.to_json()) if self.self_agreement else None,
            "alpha": _coarse(dict(self.alpha)),
            "drift_accepted": self.accepted,
        }
        if self.dry_run:
            del value["deleted"]  # not known without reading the runs
        return value

    def sentences(self) -> list[str]:
        """Returns messages for users, one line each: drift, blank items and deleted answers."""
        if self.dry_run:
            messages = []
        elif self.drift is None:
            messages = ["The drift is checked once, when the last item is scored or the sheet is finished (--final)."]
        elif self.revision:
            messages = [f"drift after revision: {self.verdict}"]
        else:
            messages = self._rounded_drift(self.drift).sentences(self.rubric)
        if self.blank:
            messages.append(
                f"{plural(self.blank, 'item is', 'items are')} blank in the file; their earlier scores are kept"
            )
        if self.deleted:
            gone = plural(self.deleted, "answer was", "answers were")
            messages.append(
                f"{gone} deleted in MLflow; {'its' if self.deleted == 1 else 'their'} scores are kept with the sheet"
            )
        return messages

    def _rounded_drift(self, drift: Drift) -> Drift:
        known, n = drift.verdict is not Verdict.UNKNOWN, None if self.unfinished else drift.n_controls
        return replace(
            drift,
            n_controls=n if known else None,
            scales=tuple(_rounded_scale(scale, known=known, n=n) for scale in drift.scales),
            error=_rounded(drift.error) if known else None,
            error_limit=_rounded(drift.error_limit) if known else None,
            contrast=_rounded(drift.contrast) if known else None,
            contrast_limit=_rounded(drift.contrast_limit) if known else None,
        )


def _rounded_scale(scale: ScaleDrift, *, known: bool, n: int | None) -> ScaleDrift:
    if not known:
        return ScaleDrift(scale.scale, None, None, None, None, None, beyond=False)
    low, high = scale.interval or (0.0, 0.0)
    return replace(
        scale,
        n=n and scale.n,
        bias=_rounded(scale.bias),
        interval=scale.interval and (round(low, 1), round(high, 1)),
        difference=_rounded(scale.difference),
        error=_rounded(scale.error),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _coarse(value: Any) -> Any:
    """Rounds all floats to one decimal, so that the effect of a single item is barely visible."""
    if isinstance(value, dict):
        return {name: _coarse(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_coarse(each) for each in value]
    return round(value, 1) if isinstance(value, float) else value
