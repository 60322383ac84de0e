"""Apply a filled sheet: measure the judge's drift, then count or hold the scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tipbench.errors import MlflowError
from tipbench.judge.check import check_sheet
from tipbench.judge.controls import CONTROL_TIPS
from tipbench.judge.drift import (
    MIN_CONTROLS,
    ControlScore,
    Drift,
    SelfAgreement,
    Verdict,
    alpha,
    measure_drift,
    self_agreement,
)
from tipbench.judge.material import AnsweredCell
from tipbench.judge.scores import (
    NO_SCORES,
    RUBRIC,
    SCORES,
    CellScores,
    Judgement,
    floor_change,
    run_change,
    tip_means,
)
from tipbench.judge.sheet import FORMAT, FilledSheet, ItemScore, TipScore
from tipbench.judge.sheet_store import (
    DRIFT,
    FILLED,
    FINAL,
    HIDDEN,
    REVISIONS,
    ItemKind,
    ReplacedScore,
    SheetEntry,
    SheetStatus,
    StoredSheet,
    check_no_duels,
    find_original,
    find_sheet,
    item_scores_text,
    milliseconds,
    now_iso,
    scores_fingerprint,
    stored_sheets,
)
from tipbench.plan.collect_config import EXPERIMENT_PREFIX
from tipbench.plan.rubric import Rubric
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment, RunStore
from tipbench.text import plural

Progress = Callable[[int, int], None]  # items done, items in total
# How often written runs are read again, and repaired if another machine has overwritten them.
_VERIFICATION_PASSES = 2


class SheetApplier:
    """Applies one filled sheet to the runs in MLflow.

    Neither its result nor its duration may reveal which items are hidden (controls and repeats). So the result lists
    them like cells, and for each of them MLflow gets the same calls of about the same size as for a cell.
    """

    def __init__(
        self, store: RunStore, experiment: Experiment, stored: StoredSheet, filled: FilledSheet[ItemScore]
    ) -> None:
        self._store = store
        self._experiment = experiment
        self.stored = stored
        self._judge = filled.judge
        self._at = now_iso()  # time of this apply
        self._scores = {**stored.scores, **filled.finished}  # by item id
        former = [score for item, score in stored.scores.items() if self._scores[item] != score]
        self._replaced = (*stored.replaced, *(ReplacedScore(score, self._at) for score in former))
        self._n_blank = sum(item in stored.scores for item in filled.unfinished)  # they keep their earlier scores
        self._cell_items = self._scored_items(ItemKind.CELL)  # item ids by run id
        self._repeat_items = self._scored_items(ItemKind.REPEAT)  # item ids by run id
        self._rubrics = {stored.sheet.rubric.tag: stored.sheet.rubric}  # by tag; `_change` adds others
        self._held = stored.status is SheetStatus.HELD  # `run` decides it anew if it measures the drift
        self._deleted: set[str] = set()  # ids of runs deleted in MLflow
        self._wrote = False  # whether this apply has written anything to MLflow

    @classmethod
    def for_file(
        cls, store: RunStore, raw: Mapping[str, Any], *, judge: str | None = None, skip_duel_check: bool = False
    ) -> SheetApplier:
        """Validate a filled file against its stored sheet. Raises SheetRefused with all problems.

        Raises SheetsClosed if the judge has opened duels. `skip_duel_check` allows an admin to accept drift after that.
        """
        experiment, stored = find_original(store, raw, FORMAT, find_sheet)
        expected = replace(stored.sheet, judge=stored.owner)
        filled = check_sheet(raw, expected, judge=judge, allow_reserved_name=stored.provisional)
        if not stored.provisional and not skip_duel_check:
            check_no_duels(store, experiment, filled.judge)
        return cls(store, experiment, stored, filled)

    def _scored_items(self, kind: ItemKind) -> dict[str, str]:
        entries = [entry for entry in self.stored.entries if entry.kind is kind and entry.item.id in self._scores]
        return {entry.run_id: entry.item.id for entry in entries if entry.run_id}

    @property
    def changes_scores(self) -> bool:
        """Whether the scores differ from those applied last."""
        return self._scores != self.stored.scores

    def cells_have_scores(self, cells: Iterable[AnsweredCell]) -> bool:
        """Return whether the cells already have the sheet's scores. Cells that are not on it are ignored."""
        return all(self._change(cell) is None for cell in cells if cell.run.run_id in self._cell_items)

    def run(
        self,
        *,
        accept: str | None = None,
        final: bool = False,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ApplyResult:
        """Write the sheet's scores to MLflow. With `dry_run`, only return the changes, without reading runs.

        The drift is measured once every item is scored or the sheet is `final`. `accept` is the reason for accepting a
        drift beyond the limit. The result shows the numbers of the drift only with the first verdict, and only if
        enough items are scored: numbers that change with a single item would reveal whether it is a control.
        """
        if dry_run:
            return self._result(SheetStatus.APPLIED, dry_run=True)
        stored, rubric = self.stored, self.stored.sheet.rubric
        final = final or stored.final
        complete = final or stored.provisional or len(self._scores) == len(stored.entries)
        # 1. Measure the drift, and decide whether the scores count or are held.
        drift = self._measure_drift() if complete else None
        # If the drift is not measured now, the result of the last apply remains.
        is_beyond = self._held if drift is None else drift.verdict is Verdict.BEYOND
        accepted = stored.acceptance_of(self._scores)  # reason given before for these same scores
        if accept is not None and drift is not None and is_beyond:
            accepted = accept  # only a measured drift can be accepted
        self._held = is_beyond and not stored.provisional and accepted is None
        is_revision = complete and not stored.provisional and stored.drift is not None
        # 2. Compare with the judge's own earlier scores and with other judges.
        cells = self._read_cells() if complete else None  # a partial apply reads each run only when it writes to it
        agreement, alphas = None, {}
        if cells is not None and not is_revision:
            agreement = self_agreement(rubric.scales, list(self._repeated_tips(cells)))
        if cells is not None and not stored.provisional:
            scores = [self._with_sheet_scores(cell) for run_id, cell in cells.items() if run_id in self._cell_items]
            alphas = alpha_by_scale(rubric, scores)
        result = replace(
            self._result(SheetStatus.HELD if self._held else SheetStatus.APPLIED),
            drift=drift,
            accepted=accepted,
            is_revision=is_revision,
            too_few_for_numbers=complete and not stored.provisional and self._too_few_for_numbers(),
            self_agreement=agreement,
            alpha=alphas,
        )
        # 3. Save the scores with the sheet, then write them to the cells.
        if self._scores or final:
            self._save_scores(result, final=final)
            self._write_cells(cells, progress)
            # Once the scores count, floor scores are updated to the sheet's rubric: a board must not mix rubrics.
            if complete and not self._held and not stored.provisional:
                self._wrote |= update_floor_scores(self._store, stored.outdated_floors, rubric, self._at) > 0
            if self._wrote:
                self._store.mark_changed(self._experiment.experiment_id)
        if drift is None or result.verdict_only:
            # `n_deleted` stays None: if it grew with an item, the item could not be a control: controls have no run.
            return result
        return replace(result, n_deleted=len(self._deleted & self._cell_items.keys()))

    def _result(self, status: SheetStatus, *, dry_run: bool = False) -> ApplyResult:
        """Return the result without drift and agreement; its changes include hidden items."""
        stored, rubric = self.stored, self.stored.sheet.rubric
        # A dry run does not measure the drift: it compares the scores as if all of them counted.
        counted_before = dry_run or stored.status is SheetStatus.APPLIED
        counted_after = status is SheetStatus.APPLIED

        def means(score: ItemScore | None) -> Mapping[str, float] | None:
            if score is None:
                return None
            values = tip_means(rubric, score)
            return {name: values[name] for name in (*rubric.scale_names, "composite")}

        changes = []
        for item in stored.sheet.items:
            old, new = stored.scores.get(item.id), self._scores.get(item.id)
            before = means(old) if counted_before else None
            after = means(new) if counted_after else None
            if before != after or old != new:
                changes.append(ItemChange(item.id, before, after, means(new)))
        return ApplyResult(
            sheet=stored.sheet.id,
            rubric=rubric,
            judge=self._judge,
            status=status,
            n_finished=len(self._scores),
            n_unfinished=len(stored.entries) - len(self._scores),
            changes=tuple(changes),
            dry_run=dry_run,
            n_blank=self._n_blank,
        )

    def _too_few_for_numbers(self) -> bool:
        """Return whether so few items are scored that the numbers of the drift could reveal a control."""
        n_controls = len(list(control_scores(self.stored.entries, self._scores)))
        return n_controls < MIN_CONTROLS and len(self._scores) < len(self.stored.entries)

    def _measure_drift(self) -> Drift:
        """Measure the drift on the sheet's controls; if they are too few, also on those of earlier sheets."""
        stored, rubric = self.stored, self.stored.sheet.rubric
        pooled = list(control_scores(stored.entries, self._scores))
        if stored.provisional or len(pooled) >= MIN_CONTROLS:
            return measure_drift(rubric.scales, pooled)
        earlier_sheets = [
            other
            for experiment in self._store.experiments()
            if experiment.name.startswith(EXPERIMENT_PREFIX)
            for other in stored_sheets(self._store, experiment, self._judge)
            if (
                other.sheet.rubric.tag == rubric.tag
                and other.exported < stored.exported
                and other.status is SheetStatus.APPLIED
                and other.drift is not None
                and not other.provisional
            )
        ]
        n_sheets = 1
        for other in sorted(earlier_sheets, key=lambda other: other.exported, reverse=True):
            if len(pooled) >= CONTROL_TIPS:  # as many as on a full sheet
                break
            if scores := list(control_scores(other.entries, other.scores)):
                pooled += scores
                n_sheets += 1
        return measure_drift(rubric.scales, pooled, sheets=n_sheets)

    def _repeated_tips(
        self, cells: Mapping[str, AnsweredCell]
    ) -> Iterator[tuple[Mapping[str, int], Mapping[str, int]]]:
        """Yield the earlier and the new scores of each repeated tip."""
        for run_id, item in self._repeat_items.items():
            # `applied` instead of `counted`, which depends on the rubrics of other judges.
            earlier = cells[run_id].scores.applied.get(self._judge) if run_id in cells else None
            if earlier is not None and earlier.rubric == self.stored.sheet.rubric.tag:
                # Lengths or scales differ only if another program has changed the run.
                for old, new in zip(earlier.tips, self._scores[item].tips, strict=False):
                    if old.scores.keys() == new.scores.keys():
                        yield old.scores, new.scores

    def _save_scores(self, result: ApplyResult, *, final: bool) -> None:
        """Save all scores in the sheet's run, unless nothing has changed. Called before any cell is updated."""
        stored, drift, agreement = self.stored, result.drift, result.self_agreement
        same_state = result.status is stored.status and final == stored.final and result.accepted == stored.accepted
        if same_state and not self.changes_scores:
            return
        tags = {"sheet_status": str(result.status), "judge": self._judge, "applied_at": self._at}
        texts = {FILLED: item_scores_text(self._scores, self._replaced)}
        metrics: dict[str, float | None] = {"finished": float(len(self._scores))}
        metrics |= {f"alpha_{name}": value for name, value in result.alpha.items()}
        if final:
            tags[FINAL] = "true"
        if stored.drift is not None and self.changes_scores:
            tags[REVISIONS] = str(stored.revisions + 1)
        if drift is not None:
            tags["drift"] = str(drift.verdict)
            texts[DRIFT] = json.dumps(drift.to_json())
            metrics |= {"n_scored_controls": float(drift.n_controls), "control_error": drift.error}
            metrics |= {f"bias_{scale.scale}": scale.bias for scale in drift.scales}
            metrics |= {f"error_{scale.scale}": scale.error for scale in drift.scales}
        if agreement is not None:
            metrics["self_exact"] = agreement.exact
            metrics |= {f"self_difference_{scale.scale}": scale.difference for scale in agreement.scales}
        if result.accepted is not None:
            tags |= {"drift_accepted": result.accepted, "drift_accepted_for": scores_fingerprint(self._scores)}
        known_metrics = {name: value for name, value in metrics.items() if value is not None}
        change = RunChange(metrics=known_metrics, tags=tags, texts=texts, at_ms=milliseconds(self._at))
        self._store.update(stored.run_id, change)
        self._wrote = True

    def _write_cells(self, cells: Mapping[str, AnsweredCell] | None, progress: Progress | None) -> None:
        """Write the scores of outdated cells. If `cells` is None, each cell is read here."""
        run_of_item = {item: run_id for run_id, item in self._cell_items.items()}
        written = []
        for done, item in enumerate(self._scores, start=1):
            run_id = run_of_item.get(item)
            if run_id is None:
                self._imitate_write(item, already_read=cells is not None)
            elif cells is not None and self._change(cells.get(run_id)) is None:
                pass  # already read, and nothing to write
            elif self._write_if_outdated(run_id):
                written.append(run_id)
                # This read is only for its duration: the update in `_imitate_write` first reads the sheet's run.
                self._store.get(self.stored.run_id)
            if progress:
                progress(done, len(self._scores))
        for _ in range(_VERIFICATION_PASSES):
            written = [run_id for run_id in written if self._write_if_outdated(run_id)]

    def _imitate_write(self, item: str, *, already_read: bool) -> None:
        """Make the same calls for a hidden item as for a cell, but read the next cell and update the sheet's run.

        The values that the update adds are never used.
        """
        score = self._scores[item]
        judgement = self._judgement(score)  # even if unused, to take as long as `_change` of an unchanged cell
        is_unchanged = score == self.stored.scores.get(item)  # an unchanged cell is read, but not written
        if is_unchanged or self.stored.provisional:  # for provisional judges, writes are not imitated
            if not already_read:
                self._read_next_cell(item)
            return
        next_cell = self._read_next_cell(item)
        # Make the text as long as a cell's: the other judges' scores are those of the next cell, and this judge's
        # are those of the item, including replaced ones.
        scores = next_cell.scores.without_judge(self._judge) if next_cell else NO_SCORES
        for replaced in self._replaced:
            if replaced.score.item == item:
                scores = scores.with_judgement(self._judgement(replaced.score))
        change = run_change(scores.with_judgement(judgement), rubrics={}, at_ms=milliseconds(self._at))
        imitation = RunChange(
            metrics={HIDDEN + name: value for name, value in change.metrics.items()},
            tags={HIDDEN + name: value for name, value in change.tags.items()},
            texts={f"artifact:{HIDDEN}{item}.json": change.texts[SCORES]},
            at_ms=change.at_ms,
        )
        self._store.update(self.stored.run_id, imitation)
        self._read_next_cell(item)  # as `RunStore.update` of a cell does, before it writes
        self._read_next_cell(item)  # as the verification of a cell does

    def _read_cells(self) -> dict[str, AnsweredCell]:
        """Return the scored cells and repeats by run id. Controls have no run: read another cell, to take as long."""
        cells = {run_id: self._read_cell(run_id) for run_id in (*self._cell_items, *self._repeat_items)}
        for entry in self.stored.entries:
            if entry.kind is ItemKind.CONTROL and entry.item.id in self._scores:
                self._read_next_cell(entry.item.id)
        return {run_id: cell for run_id, cell in cells.items() if cell is not None}

    def _read_next_cell(self, item: str) -> AnsweredCell | None:
        """Read the first cell after a hidden item; after the last item, continue at the top of the sheet."""
        entries = self.stored.entries
        start = next(index for index, entry in enumerate(entries) if entry.item.id == item)
        entries_from_item = (*entries[start:], *entries[:start])
        run_id = next((entry.run_id for entry in entries_from_item if entry.kind is ItemKind.CELL), None)
        return self._read_cell(run_id) if run_id is not None else None

    def _read_cell(self, run_id: str) -> AnsweredCell | None:
        """Read the cell from MLflow; None if its run was deleted."""
        try:
            return AnsweredCell(*self._store.get(run_id))
        except MlflowError as exc:
            _raise_unless_deleted(exc)
            self._deleted.add(run_id)
            return None

    def _write_if_outdated(self, run_id: str) -> bool:
        """Write the sheet's scores to the run if it lacks them. Returns whether anything was written."""
        change = self._change(self._read_cell(run_id))
        if change is None:
            return False
        try:
            self._store.update(run_id, change)
        except MlflowError as exc:
            _raise_unless_deleted(exc)
            self._deleted.add(run_id)
            return False
        self._wrote = True
        return True

    def _change(self, cell: AnsweredCell | None) -> RunChange | None:
        """Return the update that adds the sheet's scores to the cell's run. None if the run has them or was deleted."""
        if cell is None:
            return None
        scores = self._with_sheet_scores(cell)
        if scores.counted and scores.counted[0].rubric not in self._rubrics:
            # The counted scores are from another sheet, which has their rubric.
            other = find_sheet(self._store, self._experiment, scores.counted[0].sheet)
            if other is not None:
                self._rubrics[other.sheet.rubric.tag] = other.sheet.rubric
        change = run_change(scores, self._rubrics, milliseconds(self._at))
        same_scores = scores is cell.scores  # `with_judgement` returns the same object if nothing changes
        # A writer may have crashed after the scores, before the tags.
        same_tags = change.tags.items() <= cell.run.tags.items()
        same_metrics = change.metrics.items() <= cell.run.metrics.items()
        if same_scores and same_tags and same_metrics:
            return None
        texts = dict(change.texts)
        if RUBRIC in texts and texts[RUBRIC] == cell.texts.get(RUBRIC):
            del texts[RUBRIC]
        return replace(change, texts=texts)

    def _with_sheet_scores(self, cell: AnsweredCell) -> CellScores:
        new = self._judgement(self._scores[self._cell_items[cell.run.run_id]])
        return cell.scores.with_judgement(new, provisional=self.stored.provisional)

    def _judgement(self, score: ItemScore) -> Judgement:
        stored = self.stored
        return Judgement(
            judge=self._judge,
            sheet=stored.sheet.id,
            exported=stored.exported,
            applied_at=self._at,
            rubric=stored.sheet.rubric.tag,
            format_ok=score.format_ok,
            tips=score.tips,
            means=tip_means(stored.sheet.rubric, score),
            held=self._held,
        )


def update_floor_scores(store: RunStore, run_ids: Iterable[str], rubric: Rubric, at: str) -> int:
    """Replace the floor scores of these runs with those of this rubric. Returns the number of changed runs."""
    n_changed = 0
    for run_id in run_ids:
        try:
            run, _ = store.get(run_id)
            if run.tags.get("scores_rubric") != rubric.tag:
                store.update(run_id, floor_change(rubric, milliseconds(at)))
                n_changed += 1
        except MlflowError as exc:
            _raise_unless_deleted(exc)
    return n_changed


def _raise_unless_deleted(exc: MlflowError) -> None:
    """Raise the error again, unless its cause is that the run was deleted in MLflow."""
    is_purged = exc.code == "RESOURCE_DOES_NOT_EXIST"
    is_marked_as_deleted = "Current state is deleted" in str(exc)
    if not is_purged and not is_marked_as_deleted:
        raise exc


def alpha_by_scale(rubric: Rubric, cells: Iterable[CellScores]) -> dict[str, float | None]:
    """Return Krippendorff's alpha per scale, over the tips with counted scores of two or more judges."""
    scores_by_tip: list[tuple[TipScore, ...]] = []  # for each tip, its scores by all judges
    for cell in cells:
        judgements = [judgement for judgement in cell.counted if judgement.rubric == rubric.tag]
        scores_by_tip += zip(*(judgement.tips for judgement in judgements), strict=False)

    def scores_on(scale: str) -> list[list[int]]:
        # A tip lacks a scale only if another program has changed the run.
        return [[score.scores[scale] for score in scores if scale in score.scores] for scores in scores_by_tip]

    return {scale.name: alpha(scale, scores_on(scale.name)) for scale in rubric.scales}


def control_scores(entries: Sequence[SheetEntry], scores: Mapping[str, ItemScore]) -> Iterator[ControlScore]:
    """Yield the judge's scores of a sheet's control tips."""
    for index, entry in enumerate(entries):
        if entry.kind is ItemKind.CONTROL and entry.item.id in scores:
            position = index / max(1, len(entries) - 1)  # 0 is the first item, 1 the last
            for tip, agreed in zip(scores[entry.item.id].tips, entry.agreed_scores, strict=True):
                yield ControlScore(tip.scores, agreed, entry.item.id, position)


@dataclass(frozen=True)
class ItemChange:
    """The effect of an apply on one item, hidden or not, as shown to the judge."""

    item: str
    # Means by scale, and of the composite:
    before: Mapping[str, float] | None  # of the scores applied last; None if they did not count
    after: Mapping[str, float] | None  # of the new scores; None if they do not count
    given: Mapping[str, float] | None  # of the new scores, even if they do not count


@dataclass(frozen=True)
class ApplyResult:
    """The result of an apply. `drift`, `self_agreement` and `alpha` are exact; `to_json` rounds or omits them."""

    sheet: str
    rubric: Rubric
    judge: str
    status: SheetStatus
    n_finished: int  # fully scored items, including hidden ones
    n_unfinished: int
    drift: Drift | None = None  # None before the first verdict and in a dry run
    is_revision: bool = False  # whether an earlier apply has returned a verdict
    too_few_for_numbers: bool = False  # whether numbers could reveal a control, because few items are scored
    self_agreement: SelfAgreement | None = None
    alpha: Mapping[str, float | None] = field(default_factory=dict)
    changes: tuple[ItemChange, ...] = ()
    accepted: str | None = None  # reason for accepting the drift
    dry_run: bool = False
    n_blank: int = 0  # items that are blank in the file but have earlier scores
    n_deleted: int | None = None  # answers whose run was deleted in MLflow; None without `drift` or if `verdict_only`

    @property
    def held(self) -> bool:
        return self.status is SheetStatus.HELD

    @property
    def verdict_only(self) -> bool:
        """Whether only `verdict` is shown, without drift, agreement and the number of deleted answers."""
        return self.is_revision or self.too_few_for_numbers

    @property
    def verdict(self) -> str:
        """The drift verdict as one word: ok, held or unknown."""
        if self.held:
            return "held"
        if self.drift is None or self.drift.verdict is Verdict.UNKNOWN:
            return "unknown"
        return "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the result for scripts, rounded so that single hidden items cannot be identified."""
        drift = agreement = None
        if self.drift is not None:
            drift = {"verdict": self.verdict} if self.verdict_only else self._drift_json(self.drift)
        if self.self_agreement is not None and not self.verdict_only:
            agreement = _rounded(self.self_agreement.to_json())
        return {
            "sheet": self.sheet,
            "status": str(self.status),
            "judge": self.judge,
            "applied": 0 if self.held else self.n_finished,
            "held": self.n_finished if self.held else 0,
            "unfinished": self.n_unfinished,
            "unchecked": self.n_finished if self.drift is None and not self.dry_run else 0,
            "blank": self.n_blank,
            **({} if self.n_deleted is None else {"deleted": self.n_deleted}),
            "changed": len(self.changes),
            "errors": [],
            "drift": drift,
            "self_agreement": agreement,
            "alpha": {} if self.verdict_only else _rounded(dict(self.alpha)),
            "drift_accepted": self.accepted,
            **({"dry_run": True, "changes": [vars(change) for change in self.changes]} if self.dry_run else {}),
        }

    def _drift_json(self, drift: Drift) -> dict[str, Any]:
        """Return the rounded drift. An unfinished sheet's counts and an unknown verdict's numbers are None."""
        is_unknown = drift.verdict is Verdict.UNKNOWN
        omitted = {"icc", "se"}
        if is_unknown or self.n_unfinished:
            omitted |= {"n_controls", "n"}
        if is_unknown:
            omitted |= {"bias", "interval", "difference", "error", "error_limit", "contrast", "contrast_limit"}

        def visible(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: None if name in omitted else _rounded(value) for name, value in values.items()}

        full = drift.to_json()
        scales = [visible(scale) for scale in full["scales"]]
        # The rate is a constant, so it is not rounded.
        return visible(full) | {"false_alarm_rate": drift.false_alarm_rate, "scales": scales}

    def sentences(self) -> list[str]:
        """Return messages for users, one line each: drift, blank items and deleted answers."""
        if self.dry_run:
            messages = []
        elif self.drift is None:
            messages = ["The drift is checked once, when the last item is scored or the sheet is finished (--final)."]
        elif self.is_revision:
            messages = [f"drift after revision: {self.verdict}"]
        elif self.too_few_for_numbers:
            reason = "Finished with few items filled: numbers would reveal control items, so there is only the verdict"
            messages = [f"{reason}: {self.verdict}"]
        else:
            messages = self.drift.sentences(self.rubric, with_count=not self.n_unfinished)
        if self.n_blank:
            messages.append(
                f"{plural(self.n_blank, 'item is', 'items are')} blank in the file; their earlier scores are kept"
            )
        if self.n_deleted:
            answers = plural(self.n_deleted, "answer was", "answers were")
            possessive = "its" if self.n_deleted == 1 else "their"
            messages.append(f"{answers} deleted in MLflow; {possessive} scores are kept with the sheet")
        return messages


def _rounded(value: Any) -> Any:
    """Round all floats to one decimal, which hides most effects of a single item."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 1) if isinstance(value, float) else value
