"""Run: let a filler judge. Its sheet is exported, filled and applied in one go, and continued after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from tipbench.errors import MlflowAway, NotEnoughData
from tipbench.judge.answers import answers_text
from tipbench.judge.applying import Application, Applied
from tipbench.judge.exporting import Request, export_sheet
from tipbench.judge.filler import Filler, Unscored, telling
from tipbench.judge.judging import ANSWERS, Judging, SheetStatus, find_judging, judgings, milliseconds, now_iso
from tipbench.judge.material import JudgedCell, read_cells
from tipbench.judge.sheet import Filled, ItemScore, sheet_text
from tipbench.record.collect import patiently
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment, RunStore

SAVE_S = 20.0  # answers that have come are kept at least this often

Progress = Callable[[int, int, int], None]  # scored, unscored, of


@dataclass(frozen=True)
class Ran:
    """How a filler's sheet ended."""

    applied: Applied
    unscored: tuple[Unscored, ...]
    continued: bool = False  # an unfinished sheet of an earlier run

    def to_json(self) -> dict[str, object]:
        """What scripts read: as `judge apply`, and why items have no score."""
        reasons = [{"item": each.item, "reason": each.reason} for each in self.unscored]
        return {**self.applied.to_json(), "unscored": reasons, "continued": self.continued}


@dataclass(frozen=True)
class Around:
    """What a run needs from outside."""

    report: Callable[[str], None]
    progress: Progress = lambda _scored, _unscored, _of: None
    alone: Callable[[], AbstractContextManager[object]] = nullcontext  # scores are written within it
    wait_s: float = 0.0  # how long an MLflow that is away is waited for when everything is scored
    rescue: Callable[[str, str], Path] | None = None  # writes a filled sheet (id, text) where it can be applied from
    how_to_accept: str = "the same command with --accept-drift REASON"


def run_judge(
    store: RunStore,
    experiment: Experiment,
    filler: Filler,
    request: Request,
    *,
    report: Callable[[str], None] | None = None,
    accept: str | None = None,
    around: Around | None = None,
) -> Ran:
    """Have the filler judge what waits for it. NotEnoughData when nothing does."""
    request = replace(request, judge=filler.name, provisional=filler.provisional)
    around = around or Around(report or (lambda _text: None))
    return _Run(store, experiment, filler, request, accept, around).run()


@dataclass(frozen=True)
class _Run:
    store: RunStore
    experiment: Experiment
    filler: Filler
    request: Request
    accept: str | None
    around: Around

    def run(self) -> Ran:
        last = self._last_sheet()
        if last is not None and last.status is SheetStatus.EXPORTED:
            self.around.report(
                f"continuing the sheet {last.sheet.id}: {last.finished} of {len(last.entries)} items are scored"
            )
            return self._judge(last, continued=True)
        cells = read_cells(self.store, self.experiment.experiment_id)
        mended = None if last is None else self._mended(last, cells)
        if mended is not None and self._accepts(last):
            return mended
        if mended is not None:
            cells = read_cells(self.store, self.experiment.experiment_id)
        try:
            judging = export_sheet(self.store, self.experiment, self.request, cells).judging
        except NotEnoughData as exc:
            if mended is not None:
                return mended
            if last is not None and last.status is SheetStatus.HELD:
                raise NotEnoughData(
                    f"{exc} If the scores of the sheet {last.sheet.id} shall stand: {self.around.how_to_accept}"
                ) from exc
            raise
        return self._judge(judging, continued=False)

    def _last_sheet(self) -> Judging | None:
        """The judge's newest sheet of which something has come back, be it in a run that died."""
        where = self.experiment
        found = judgings(self.store, where.experiment_id, where.name, self.request.judge)
        return next((each for each in found if each.answers and each.provisional == self.request.provisional), None)

    def _accepts(self, last: Judging | None) -> bool:
        return last is not None and last.status is SheetStatus.HELD and self.accept is not None

    def _mended(self, last: Judging, cells: Sequence[JudgedCell]) -> Ran | None:
        """Bring in what an earlier run has scored: it died on the way, or its drift is accepted now."""
        stored = Filled(self.filler.name)
        if not self._accepts(last):
            if Application(self.store, self.experiment, last, stored).is_brought_in(cells):
                return None
            self.around.report(f"the sheet {last.sheet.id} was not applied to its end: doing so now")
        with self.around.alone():
            work = Application(self.store, self.experiment, self._again(last), stored)
            return Ran(work.run(accept=self.accept if self._accepts(last) else None), (), continued=True)

    def _again(self, judging: Judging) -> Judging:
        """The sheet as it is in MLflow now: somebody may have applied a file of it meanwhile."""
        where = self.experiment
        return find_judging(self.store, where.experiment_id, where.name, judging.sheet.id) or judging

    def _judge(self, judging: Judging, *, continued: bool) -> Ran:
        keeper = _Answers(self.store, judging, self.around.report)
        try:
            unscored = self._fill(judging, keeper)
            keeper.save()  # before anything is read: a kill from here on costs nothing
            applied = patiently(
                lambda: self._apply(judging, keeper, unscored),
                "MLflow",
                self.around.wait_s,
                telling(self.around.report),
            )
        except MlflowAway as exc:
            kept = self._rescued(judging, keeper)
            raise MlflowAway(f"{exc} {kept}" if kept else str(exc)) from exc
        except BaseException:
            keeper.save()
            if kept := self._rescued(judging, keeper):
                self.around.report(kept)
            raise
        return Ran(applied, unscored, continued)

    def _fill(self, judging: Judging, keeper: _Answers) -> tuple[Unscored, ...]:
        sheet = judging.sheet
        left = replace(sheet, items=tuple(item for item in sheet.items if item.id not in keeper.given))
        unscored: list[Unscored] = []
        for outcome in self.filler.fill(left, self.around.report) if left.items else ():
            if isinstance(outcome, Unscored):
                unscored.append(outcome)
            else:
                keeper.add(outcome)
            self.around.progress(len(keeper.given), len(unscored), len(sheet.items))
        return tuple(unscored)

    def _apply(self, judging: Judging, keeper: _Answers, unscored: Sequence[Unscored]) -> Applied:
        filled = Filled(self.filler.name, tuple(keeper.new.values()), tuple(each.item for each in unscored))
        with self.around.alone():
            return Application(self.store, self.experiment, self._again(judging), filled).run(accept=self.accept)

    def _rescued(self, judging: Judging, keeper: _Answers) -> str:
        """Where the scores are that MLflow does not have, and what to do with them."""
        if not keeper.unsaved or self.around.rescue is None:
            return ""
        path = self.around.rescue(judging.sheet.id, sheet_text(judging.sheet, keeper.given))
        return (
            f"{len(keeper.given)} items are scored, and the filled sheet is in {path}: when MLflow is back, apply it "
            f"with `tipbench judge apply {path}`."
        )


@dataclass
class _Answers:
    """What has come back so far; now and then it is kept with the sheet, so that a crash costs seconds."""

    store: RunStore
    judging: Judging
    report: Callable[[str], None]
    new: dict[str, ItemScore] = field(default_factory=dict)
    _saved: int = 0
    _saved_at: float = field(default_factory=time.monotonic)
    _told: bool = False

    @property
    def given(self) -> dict[str, ItemScore]:
        return {**self.judging.answers, **self.new}

    @property
    def unsaved(self) -> bool:
        return len(self.new) > self._saved

    def add(self, score: ItemScore) -> None:
        self.new[score.item] = score
        if time.monotonic() - self._saved_at > SAVE_S:
            self.save()

    def save(self) -> None:
        """Keep what has come since the last time; an MLflow that is away gets it the next time."""
        if self.unsaved:
            change = RunChange(
                texts={ANSWERS: answers_text(self.given, self.judging.replaced)}, at_ms=milliseconds(now_iso())
            )
            try:
                self.store.update(self.judging.run_id, change)
                self._saved = len(self.new)
            except MlflowAway as exc:
                if not self._told:
                    self.report(f"{exc} Judging goes on; the scores are kept here until it is back.")
                self._told = True
        self._saved_at = time.monotonic()
