"""Run an automatic judge: the AutomaticJudge port, recovery of partial answers, and the run itself."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tipbench.errors import MlflowUnavailable, NotEnoughData
from tipbench.judge.apply import ApplyResult, SheetApplier
from tipbench.judge.check import check_item
from tipbench.judge.export import ExportRequest, export_sheet
from tipbench.judge.material import JudgedCell, read_cells
from tipbench.judge.sheet import FilledSheet, Item, ItemScore, TipSheet, sheet_text
from tipbench.judge.sheet_store import (
    ANSWERS,
    SheetStatus,
    StoredSheet,
    answers_text,
    find_sheet,
    milliseconds,
    now_iso,
    stored_sheets,
)
from tipbench.plan.rubric import Rubric
from tipbench.record.collect import retry_while_unavailable
from tipbench.record.events import Event, Message, Observer, Resumed, Waiting
from tipbench.record.run import RunChange
from tipbench.record.store import Experiment, RunStore
from tipbench.text import printable, shorten


@dataclass(frozen=True)
class Unscored:
    """An item without scores and the reason; a separate type, so that it is never taken for a low score."""

    item: str
    reason: str


class AutomaticJudge(Protocol):
    """Scores the items of a sheet without a person."""

    name: str  # recorded with its scores
    provisional: bool  # if true, its scores never count as a person's

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Yield one result per item, each as soon as it is available. `report` receives messages for users."""
        ...


def waiting_reporter(report: Callable[[str], None]) -> Observer:
    """Return an observer that reports waiting events as messages."""

    def observe(event: Event) -> None:
        if isinstance(event, Waiting):
            report(f"{event.what} is unavailable: waiting for at most {event.limit_s:g} s")
        elif isinstance(event, Resumed):
            report(f"{event.what} is available again")
        elif isinstance(event, Message):
            report(event.text)

    return observe


_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\\n]|\\.)*+"?')  # JSON strings do not span lines
_KEYS = ('"item"', '"items"')
_MAX_DEPTH = 200  # open brackets; the outermost are forgotten
# Nested objects are parsed repeatedly. The limit of all characters parsed: a multiple of the text's length, plus some.
_MAX_PARSED_FACTOR, _MAX_PARSED_EXTRA = 8, 1_000_000
_MAX_VERSIONS = 8  # per item
_MAX_SHOWN = 60  # characters of a value in a message
_MAX_REASON = 300  # characters


@dataclass(frozen=True)
class RecoveredItems:
    """The versions found of each requested item, in order of occurrence."""

    versions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    mismatch: str = ""  # why a sheet in the output was ignored


def recover_items(output: bytes, sheet: TipSheet) -> RecoveredItems:
    """Extract the sheet's items from arbitrary output. Checks only the sheet id and rubric, not the items."""
    expected = {item.id for item in sheet.items}
    versions: dict[str, list[dict[str, Any]]] = {}
    mismatch = ""
    for found in _find_objects(output.decode("utf-8", "replace")):
        if reason := _mismatch(found, sheet):
            mismatch = mismatch or reason
            continue
        # A sheet's items, or the object itself if it is a single item, as in truncated output.
        items = found.get("items")
        for item in items if isinstance(items, list) else [found]:
            name = item.get("item") if isinstance(item, dict) else None
            if isinstance(name, str) and name in expected:
                known = versions.setdefault(name, [])
                if len(known) < _MAX_VERSIONS and item not in known:
                    known.append(item)
    return RecoveredItems(versions, mismatch)


def choose_answer(item: Item, rubric: Rubric, found: Sequence[RecoveredItems], failure: str) -> ItemScore | Unscored:
    """Return the item's score from the first source with a single valid answer, or the most specific reason."""
    wrong, unfinished = "", False
    for source in found:
        scores: list[ItemScore] = []
        for version in source.versions.get(item.id, ()):
            checked = check_item(version, item, rubric)
            if isinstance(checked, ItemScore):
                scores += [checked] if checked not in scores else []
            elif checked is None:
                unfinished = True
            else:
                wrong = wrong or "; ".join(problem.message for problem in checked[:2])
        if len(scores) == 1:
            return scores[0]
        if scores:
            wrong = wrong or "returned more than once, with different scores"
    if wrong:
        reasons = [f"invalid answer: {wrong}"]
    else:
        mismatch = next((source.mismatch for source in found if source.mismatch), "")
        reasons = ["returned unfinished" if unfinished else "not returned", mismatch, failure]
    return Unscored(item.id, safe_line("; ".join(filter(None, reasons)), _MAX_REASON))


def _mismatch(found: dict[str, Any], sheet: TipSheet) -> str:
    """Return why a found sheet is not this one, or an empty string; missing keys are accepted, as items have a hash."""
    if "items" not in found:
        return ""
    if found.get("sheet", sheet.id) != sheet.id:
        return f"another sheet was returned: {_shown(found['sheet'])} instead of {sheet.id}"
    rubric = found.get("rubric")
    sha256 = rubric.get("sha256", sheet.rubric.sha256) if isinstance(rubric, dict) else sheet.rubric.sha256
    if sha256 != sheet.rubric.sha256:
        return f"it was returned with another rubric: {_shown(sha256)}"
    return ""


def _find_objects(text: str) -> list[dict[str, Any]]:
    """Return complete outermost JSON objects with a key `items` or `item`, in order, in one pass over the text.

    An unclosed object (a truncated sheet, a brace in prose) does not hide complete objects inside it.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    starts: deque[int] = deque(maxlen=_MAX_DEPTH)  # position of each open bracket
    has_key: deque[bool] = deque(maxlen=_MAX_DEPTH)  # whether one of _KEYS was found in it
    left = _MAX_PARSED_FACTOR * len(text) + _MAX_PARSED_EXTRA  # characters that may still be parsed
    for token in _TOKEN.finditer(text):
        mark = token[0][0]
        if mark in "[{":
            starts.append(token.start())
            has_key.append(False)
        elif mark == '"' and starts and token[0] in _KEYS:
            has_key[-1] = True
        elif mark in "]}" and starts:
            start = starts.pop()
            if not has_key.pop() or left <= 0:
                continue
            left -= token.end() - start
            try:
                value = json.loads(text[start : token.end()])
            except (ValueError, RecursionError):  # ValueError also for very long integers
                continue
            if isinstance(value, dict):
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, value))
    return [value for _, value in found]


def _shown(value: object) -> str:
    return safe_line(repr(value), _MAX_SHOWN)


def safe_line(text: str, limit: int) -> str:
    """Return untrusted text on one line without control characters, shortened to `limit` characters."""
    return shorten(" ".join(printable(text[: 4 * limit]).split()), limit)


SAVE_INTERVAL_S = 20.0  # seconds between saves of new answers

Progress = Callable[[int, int, int], None]  # scored, unscored, total


@dataclass(frozen=True)
class JudgeResult:
    """The result of an automatic judge's run."""

    applied: ApplyResult
    unscored: tuple[Unscored, ...]
    continued: bool = False  # whether it continued a sheet of an earlier run

    def to_json(self) -> dict[str, object]:
        """Return the result for scripts: that of `judge apply`, and why items have no score."""
        reasons = [{"item": each.item, "reason": each.reason} for each in self.unscored]
        return {**self.applied.to_json(), "unscored": reasons, "continued": self.continued}


@dataclass(frozen=True)
class JudgeEnvironment:
    """Callbacks and settings of a judge run."""

    report: Callable[[str], None]
    progress: Progress = lambda _scored, _unscored, _of: None
    lock: Callable[[], AbstractContextManager[object]] = nullcontext  # held while scores are written
    wait_s: float = 0.0  # maximum wait for an unavailable MLflow once all items are scored
    rescue: Callable[[str, str], Path] | None = None  # saves a filled sheet (id, text) to be applied later
    how_to_accept: str = "the same command with --accept-drift REASON"


def run_judge(
    store: RunStore,
    experiment: Experiment,
    judge: AutomaticJudge,
    request: ExportRequest,
    *,
    report: Callable[[str], None] | None = None,
    accept: str | None = None,
    environment: JudgeEnvironment | None = None,
) -> JudgeResult:
    """Score pending cells with an automatic judge. Raises NotEnoughData if there are none."""
    request = replace(request, judge=judge.name, provisional=judge.provisional)
    environment = environment or JudgeEnvironment(report or (lambda _text: None))
    return _Run(store, experiment, judge, request, accept, environment).run()


@dataclass(frozen=True)
class _Run:
    store: RunStore
    experiment: Experiment
    judge: AutomaticJudge
    request: ExportRequest
    accept: str | None
    environment: JudgeEnvironment

    def run(self) -> JudgeResult:
        experiment = self.experiment
        sheets = stored_sheets(self.store, experiment.experiment_id, experiment.name, self.request.judge)
        # The judge's newest sheet with any answers; a run that crashed has left some.
        last = next((each for each in sheets if each.answers and each.provisional == self.request.provisional), None)
        if last is not None and last.status is SheetStatus.EXPORTED:
            self.environment.report(
                f"continuing the sheet {last.sheet.id}: {last.finished} of {len(last.entries)} items are scored"
            )
            return self._judge(last, continued=True)
        cells = read_cells(self.store, experiment.experiment_id)
        accepting = last is not None and last.status is SheetStatus.HELD and self.accept is not None
        finished = None if last is None else self._finish_earlier(last, cells, accepting=accepting)
        if finished is not None and accepting:
            return finished
        if finished is not None:
            cells = read_cells(self.store, experiment.experiment_id)
        try:
            stored = export_sheet(self.store, experiment, self.request, cells).stored
        except NotEnoughData as exc:
            if finished is not None:
                return finished
            if last is not None and last.status is SheetStatus.HELD:
                raise NotEnoughData(
                    f"{exc} To accept the scores of the sheet {last.sheet.id}: {self.environment.how_to_accept}"
                ) from exc
            raise
        return self._judge(stored, continued=False)

    def _finish_earlier(self, last: StoredSheet, cells: Sequence[JudgedCell], *, accepting: bool) -> JudgeResult | None:
        """Apply the scores of an earlier run that was interrupted or whose drift is now accepted."""
        nothing_new: FilledSheet[ItemScore] = FilledSheet(self.judge.name, {})
        if not accepting:
            if SheetApplier(self.store, self.experiment, last, nothing_new).cells_have_scores(cells):
                return None
            self.environment.report(f"the sheet {last.sheet.id} was only partly applied: finishing it now")
        with self.environment.lock():
            work = SheetApplier(self.store, self.experiment, self._reload(last), nothing_new)
            return JudgeResult(work.run(accept=self.accept if accepting else None, final=True), (), continued=True)

    def _reload(self, stored: StoredSheet) -> StoredSheet:
        """Reload the sheet from MLflow, since a file of it may have been applied in the meantime."""
        experiment = self.experiment
        return find_sheet(self.store, experiment.experiment_id, experiment.name, stored.sheet.id) or stored

    def _judge(self, stored: StoredSheet, *, continued: bool) -> JudgeResult:
        sheet, environment = stored.sheet, self.environment
        answers = _Answers(self.store, stored, environment.report)
        left = replace(sheet, items=tuple(item for item in sheet.items if item.id not in answers.given))
        unscored: list[Unscored] = []

        def apply() -> ApplyResult:
            filled = FilledSheet(self.judge.name, answers.new, tuple(each.item for each in unscored))
            with environment.lock():
                work = SheetApplier(self.store, self.experiment, self._reload(stored), filled)
                return work.run(accept=self.accept, final=True)

        try:
            for outcome in self.judge.fill(left, environment.report) if left.items else ():
                if isinstance(outcome, Unscored):
                    unscored.append(outcome)
                else:
                    answers.add(outcome)
                environment.progress(len(answers.given), len(unscored), len(sheet.items))
            answers.save()  # before applying, so that no score is lost if the process is killed
            observer = waiting_reporter(environment.report)
            applied = retry_while_unavailable(apply, "MLflow", environment.wait_s, observer)
        except MlflowUnavailable as exc:
            raise MlflowUnavailable(f"{exc} {self._save_to_file(stored, answers)}".strip()) from exc
        except BaseException:
            answers.save()
            if message := self._save_to_file(stored, answers):
                environment.report(message)
            raise
        return JudgeResult(applied, tuple(unscored), continued)

    def _save_to_file(self, stored: StoredSheet, answers: _Answers) -> str:
        """Save unsaved scores to a file; return a message with its path, or an empty string."""
        if not answers.unsaved or self.environment.rescue is None:
            return ""
        path = self.environment.rescue(stored.sheet.id, sheet_text(stored.sheet, answers.given))
        return (
            f"{len(answers.given)} items are scored; the filled sheet is in {path}. Once MLflow is available, apply it "
            f"with `tipbench judge apply {path}`."
        )


@dataclass
class _Answers:
    """The answers so far, saved with the sheet every SAVE_INTERVAL_S seconds, so that a crash loses little work."""

    store: RunStore
    stored: StoredSheet
    report: Callable[[str], None]
    new: dict[str, ItemScore] = field(default_factory=dict)
    _saved: int = 0
    _saved_at: float = field(default_factory=time.monotonic)
    _reported: bool = False

    @property
    def given(self) -> dict[str, ItemScore]:
        return {**self.stored.answers, **self.new}

    @property
    def unsaved(self) -> bool:
        return len(self.new) > self._saved

    def add(self, score: ItemScore) -> None:
        self.new[score.item] = score
        if time.monotonic() - self._saved_at > SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Save new answers; if MLflow is unavailable, they are saved by the next call."""
        if self.unsaved:
            change = RunChange(
                texts={ANSWERS: answers_text(self.given, self.stored.replaced)}, at_ms=milliseconds(now_iso())
            )
            try:
                self.store.update(self.stored.run_id, change)
                self._saved = len(self.new)
            except MlflowUnavailable as exc:
                if not self._reported:
                    self.report(f"{exc} Judging continues; the scores are kept in memory until it is available.")
                self._reported = True
        self._saved_at = time.monotonic()
