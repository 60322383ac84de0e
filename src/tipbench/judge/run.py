"""Automatic judges: their interface, and `run_judge`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tipbench.errors import MlflowUnavailable, NotEnoughData
from tipbench.judge.apply import ApplyResult, SheetApplier
from tipbench.judge.export import ExportRequest, export_sheet
from tipbench.judge.material import read_cells
from tipbench.judge.sheet import FilledSheet, ItemScore, TipSheet, sheet_text
from tipbench.judge.sheet_store import (
    FILLED,
    SheetStatus,
    StoredSheet,
    find_sheet,
    item_scores_text,
    milliseconds,
    now_iso,
    stored_sheets,
)
from tipbench.record.collect import retry_while_unavailable
from tipbench.record.events import Event, Message, Observer, Resumed, Waiting
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment, RunStore
from tipbench.text import printable, shorten


@dataclass(frozen=True)
class Unscored:
    """An item without scores, with the reason. A separate type, so that it is never mistaken for a low score."""

    item: str
    reason: str


class AutomaticJudge(Protocol):
    """Scores the items of a sheet without a person."""

    name: str  # recorded with the scores
    provisional: bool  # if true, the scores do not count

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Yield one result per item, each as soon as it is available. `report` receives messages for users."""
        ...


def waiting_reporter(report: Callable[[str], None]) -> Observer:
    """Return an observer that passes messages, and the start and end of a wait, to `report` as text."""

    def observe(event: Event) -> None:
        if isinstance(event, Waiting):
            report(f"{event.what} is unavailable: waiting for at most {event.limit_s:g} s")
        elif isinstance(event, Resumed):
            report(f"{event.what} is available again")
        elif isinstance(event, Message):
            report(event.text)

    return observe


def safe_line(text: str, limit: int) -> str:
    """Return untrusted text on one line without control characters, shortened to `limit` characters."""
    return shorten(" ".join(printable(text[: 4 * limit]).split()), limit)


SAVE_INTERVAL_S = 20.0  # seconds between saves of new scores


@dataclass(frozen=True)
class JudgeResult:
    """Result of `run_judge`."""

    applied: ApplyResult
    unscored: tuple[Unscored, ...]
    continued: bool = False  # whether a sheet of an earlier call was continued

    def to_json(self) -> dict[str, object]:
        """Return the JSON of `judge apply`, with the unscored items and their reasons added."""
        unscored = [{"item": each.item, "reason": each.reason} for each in self.unscored]
        return {**self.applied.to_json(), "unscored": unscored, "continued": self.continued}


@dataclass(frozen=True)
class JudgeEnvironment:
    """Callbacks and settings of `run_judge`."""

    report: Callable[[str], None] = lambda _text: None
    progress: Callable[[int, int, int], None] = lambda _scored, _unscored, _total: None  # numbers of items
    lock: Callable[[], AbstractContextManager[object]] = nullcontext  # held while scores are written
    wait_s: float = 0.0  # maximum wait for MLflow, if it is unavailable when all items are scored
    save_to_file: Callable[[str, str], Path] | None = None  # saves a sheet (id, text) to a file, to be applied later
    how_to_accept: str = "the same command with --accept-drift REASON"


def run_judge(
    store: RunStore,
    experiment: Experiment,
    judge: AutomaticJudge,
    request: ExportRequest,
    *,
    accept: str | None = None,
    environment: JudgeEnvironment | None = None,
) -> JudgeResult:
    """Score pending cells with an automatic judge. Raises NotEnoughData if there are none.

    The sheet of an interrupted call is continued. `accept` is the reason for accepting a drift beyond the limit. It
    applies to the judge's last sheet if that is held, else to the sheet that this call scores.
    """
    request = replace(request, judge=judge.name, provisional=judge.provisional)
    return _Call(store, experiment, judge, request, accept, environment or JudgeEnvironment()).run()


@dataclass(frozen=True)
class _Call:
    """One call of `run_judge`."""

    store: RunStore
    experiment: Experiment
    judge: AutomaticJudge
    request: ExportRequest
    accept: str | None
    environment: JudgeEnvironment

    def run(self) -> JudgeResult:
        experiment, provisional = self.experiment, self.request.provisional
        newest_first = stored_sheets(self.store, experiment, self.request.judge)
        scored_sheets = (stored for stored in newest_first if stored.scores and stored.provisional == provisional)
        last = next(scored_sheets, None)
        if last is not None and last.status is SheetStatus.EXPORTED:  # the call that filled it was interrupted
            self.environment.report(
                f"continuing the sheet {last.sheet.id}: {len(last.scores)} of {len(last.entries)} items are scored"
            )
            return self._judge(last, continued=True)
        no_new_scores: FilledSheet[ItemScore] = FilledSheet(self.judge.name, {})
        is_held = last is not None and last.status is SheetStatus.HELD
        if last is not None and is_held and self.accept is not None:
            return JudgeResult(self._apply(last, no_new_scores, self.accept), (), continued=True)
        cells = read_cells(self.store, experiment.experiment_id)
        completed: JudgeResult | None = None
        # Held scores are written to the cells too, so cells without the sheet's scores mean an interrupted apply.
        if last is not None and not SheetApplier(self.store, experiment, last, no_new_scores).cells_have_scores(cells):
            self.environment.report(f"the sheet {last.sheet.id} was only partly applied: finishing it now")
            completed = JudgeResult(self._apply(last, no_new_scores, None), (), continued=True)
            cells = read_cells(self.store, experiment.experiment_id)  # applying has changed them
        try:
            stored = export_sheet(self.store, experiment, self.request, cells).stored
        except NotEnoughData as exc:
            if completed is not None:
                return completed
            if last is not None and is_held:
                raise NotEnoughData(
                    f"{exc} To accept the scores of the sheet {last.sheet.id}: {self.environment.how_to_accept}"
                ) from exc
            raise
        return self._judge(stored, continued=False)

    def _apply(self, stored: StoredSheet, filled: FilledSheet[ItemScore], accept: str | None) -> ApplyResult:
        with self.environment.lock():
            # Since the sheet was read, `tipbench judge apply` may have changed it.
            latest = find_sheet(self.store, self.experiment, stored.sheet.id) or stored
            return SheetApplier(self.store, self.experiment, latest, filled).run(accept=accept, final=True)

    def _judge(self, stored: StoredSheet, *, continued: bool) -> JudgeResult:
        """Score the sheet's remaining items and apply all its scores."""
        sheet, environment = stored.sheet, self.environment
        scores = _SheetScores(self.store, stored, environment.report)
        remaining = replace(sheet, items=tuple(item for item in sheet.items if item.id not in scores.all))
        unscored: list[Unscored] = []
        try:
            results = self.judge.fill(remaining, environment.report) if remaining.items else ()
            for result in results:
                if isinstance(result, Unscored):
                    unscored.append(result)
                else:
                    scores.add(result)
                environment.progress(len(scores.all), len(unscored), len(sheet.items))
            scores.save()  # no score is lost if the process is killed before they are applied
            filled = FilledSheet(self.judge.name, scores.new, tuple(each.item for each in unscored))
            applied = retry_while_unavailable(
                lambda: self._apply(stored, filled, self.accept),
                "MLflow",
                environment.wait_s,
                waiting_reporter(environment.report),
            )
        except MlflowUnavailable as exc:
            raise MlflowUnavailable(f"{exc} {self._save_to_file(stored, scores)}".strip()) from exc
        except BaseException:  # also if the user interrupts the command
            scores.save()
            if message := self._save_to_file(stored, scores):
                environment.report(message)
            raise
        return JudgeResult(applied, tuple(unscored), continued)

    def _save_to_file(self, stored: StoredSheet, scores: _SheetScores) -> str:
        """Save the scores to a file if some are not in MLflow; return a message with its path, or an empty string."""
        if not scores.has_unsaved or self.environment.save_to_file is None:
            return ""
        path = self.environment.save_to_file(stored.sheet.id, sheet_text(stored.sheet, scores.all))
        return (
            f"{len(scores.all)} items are scored; the filled sheet is in {path}. Once MLflow is available, apply it "
            f"with `tipbench judge apply {path}`."
        )


@dataclass
class _SheetScores:
    """The stored and new scores of a sheet. Saves new ones every SAVE_INTERVAL_S, so that a crash loses little work."""

    store: RunStore
    stored: StoredSheet
    report: Callable[[str], None]
    new: dict[str, ItemScore] = field(default_factory=dict)  # by item id
    _n_saved: int = 0  # number of new scores that are saved
    _last_save_attempt: float = field(default_factory=time.monotonic)
    _failure_reported: bool = False

    @property
    def all(self) -> dict[str, ItemScore]:
        return {**self.stored.scores, **self.new}

    @property
    def has_unsaved(self) -> bool:
        return len(self.new) > self._n_saved

    def add(self, score: ItemScore) -> None:
        self.new[score.item] = score
        if time.monotonic() - self._last_save_attempt > SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Save new scores in MLflow. If it is unavailable, they stay in memory, and the next `save` tries again."""
        if self.has_unsaved:
            change = RunChange(
                texts={FILLED: item_scores_text(self.all, self.stored.replaced)}, at_ms=milliseconds(now_iso())
            )
            try:
                self.store.update(self.stored.run_id, change)
                self._n_saved = len(self.new)
            except MlflowUnavailable as exc:
                if not self._failure_reported:
                    self.report(f"{exc} Judging continues; the scores are kept in memory until MLflow is available.")
                self._failure_reported = True
        self._last_save_attempt = time.monotonic()
