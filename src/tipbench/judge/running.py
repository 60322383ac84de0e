"""Run: let a filler judge. Its sheet is exported, filled and applied in one go, and continued after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from tipbench.judge.applying import Application, Applied
from tipbench.judge.exporting import Request, export_sheet
from tipbench.judge.filler import Filler, Unscored
from tipbench.judge.judging import ANSWERS, Judging, SheetStatus, answers_text, judgings, milliseconds, now_iso
from tipbench.judge.sheet import Filled, ItemScore
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


def run_judge(
    store: RunStore,
    experiment: Experiment,
    filler: Filler,
    request: Request,
    *,
    report: Callable[[str], None],
    progress: Progress = lambda _scored, _unscored, _of: None,
    accept: str | None = None,
    alone: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Ran:
    """Have the filler judge what waits for it. NotEnoughData when nothing does. Scores are written within `alone()`."""
    request = replace(request, judge=filler.name, provisional=filler.provisional)
    judging = _unfinished(store, experiment, request)
    continued = judging is not None
    if judging is None:
        judging = export_sheet(store, experiment, request).judging
    else:
        report(
            f"continuing the sheet {judging.sheet.id}: {judging.finished} of {len(judging.entries)} items are scored"
        )
    keeper = _Answers(store, judging)
    try:
        unscored = _fill(filler, judging, keeper, report, progress)
    finally:
        keeper.save()
    filled = Filled(filler.name, tuple(keeper.given.values()), tuple(each.item for each in unscored))
    with alone():
        applied = Application(store, experiment, judging, filled).run(accept=accept)
    return Ran(applied, unscored, continued)


def _fill(
    filler: Filler, judging: Judging, keeper: _Answers, report: Callable[[str], None], progress: Progress
) -> tuple[Unscored, ...]:
    sheet = judging.sheet
    left = replace(sheet, items=tuple(item for item in sheet.items if item.id not in keeper.given))
    unscored: list[Unscored] = []
    for outcome in filler.fill(left, report) if left.items else ():
        if isinstance(outcome, Unscored):
            unscored.append(outcome)
        else:
            keeper.add(outcome)
        progress(len(keeper.given), len(unscored), len(sheet.items))
    return tuple(unscored)


class _Answers:
    """What has come back so far; now and then it is kept with the sheet, so that a crash costs seconds."""

    def __init__(self, store: RunStore, judging: Judging) -> None:
        self._store = store
        self._run_id = judging.run_id
        self.given = dict(judging.answers)
        self._saved = len(self.given)
        self._saved_at = time.monotonic()

    def add(self, score: ItemScore) -> None:
        self.given[score.item] = score
        if time.monotonic() - self._saved_at > SAVE_S:
            self.save()

    def save(self) -> None:
        """Keep what has come since the last time."""
        if len(self.given) > self._saved:
            change = RunChange(texts={ANSWERS: answers_text(self.given)}, at_ms=milliseconds(now_iso()))
            self._store.update(self._run_id, change)
            self._saved = len(self.given)
        self._saved_at = time.monotonic()


def _unfinished(store: RunStore, experiment: Experiment, request: Request) -> Judging | None:
    """The judge's newest sheet, if an earlier run left it before anything was applied."""
    newest = next(judgings(store, experiment.experiment_id, experiment.name, request.judge), None)
    if newest is None or newest.status is not SheetStatus.EXPORTED or not newest.answers:
        return None
    return newest if newest.provisional == request.provisional else None
