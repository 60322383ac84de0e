"""Automatic judges: the AutomaticJudge port, recovery of scores from a program's output, and `run_judge`."""

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
from tipbench.judge.material import AnsweredCell, read_cells
from tipbench.judge.sheet import FilledSheet, ItemScore, TipItem, TipSheet, sheet_text
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
from tipbench.plan.rubric import Rubric
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
    provisional: bool  # if true, the scores never count as a person's scores

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Yield one result per item, each as soon as it is available. `report` receives messages for users."""
        ...


def waiting_reporter(report: Callable[[str], None]) -> Observer:
    """Return an observer that reports messages and waits for a server as text."""

    def observe(event: Event) -> None:
        if isinstance(event, Waiting):
            report(f"{event.what} is unavailable: waiting for at most {event.limit_s:g} s")
        elif isinstance(event, Resumed):
            report(f"{event.what} is available again")
        elif isinstance(event, Message):
            report(event.text)

    return observe


_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\\n]|\\.)*+"?')  # JSON strings do not span lines
_KEYS = ('"item"', '"items"')  # of the objects to find
_MAX_DEPTH = 200  # open brackets; beyond it, the outermost are dropped
# Nested objects are parsed repeatedly. In total, at most FACTOR * len(text) + EXTRA characters are parsed.
_MAX_PARSED_FACTOR, _MAX_PARSED_EXTRA = 8, 1_000_000
_MAX_VERSIONS = 8  # per item
_MAX_SHOWN = 60  # characters of a value in a message
_MAX_REASON = 300  # characters


@dataclass(frozen=True)
class RecoveredItems:
    """The items recovered from output. An item may occur in several versions."""

    versions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by item id, in order of occurrence
    mismatch: str = ""  # why a sheet in the output was ignored, or empty


def recover_items(output: bytes, sheet: TipSheet) -> RecoveredItems:
    """Extract the sheet's items from arbitrary output. Checks the sheet id and the rubric, but not the items."""
    expected_ids = {item.id for item in sheet.items}
    versions: dict[str, list[dict[str, Any]]] = {}
    mismatch = ""
    for candidate in _find_objects(output.decode("utf-8", "replace")):
        if reason := _mismatch(candidate, sheet):
            mismatch = mismatch or reason
            continue
        # The object is a sheet with items, or a single item if the output is truncated.
        items = candidate.get("items")
        raw_items = items if isinstance(items, list) else [candidate]
        for item in raw_items:
            item_id = item.get("item") if isinstance(item, dict) else None
            if isinstance(item_id, str) and item_id in expected_ids:
                item_versions = versions.setdefault(item_id, [])
                if len(item_versions) < _MAX_VERSIONS and item not in item_versions:
                    item_versions.append(item)
    return RecoveredItems(versions, mismatch)


def choose_score(
    item: TipItem, rubric: Rubric, sources: Sequence[RecoveredItems], failure: str
) -> ItemScore | Unscored:
    """Return the item's score from the first of the sources that has exactly one valid score.

    Without such a source, return the most specific reason. `failure` is why the judge failed, or empty.
    """
    invalid, unfinished = "", False
    for source in sources:
        scores: list[ItemScore] = []
        for version in source.versions.get(item.id, ()):
            checked = check_item(version, item, rubric)
            if isinstance(checked, ItemScore):
                if checked not in scores:
                    scores.append(checked)
            elif checked is None:
                unfinished = True
            else:
                invalid = invalid or "; ".join(problem.message for problem in checked[:2])
        if len(scores) == 1:
            return scores[0]
        if scores:
            invalid = invalid or "returned more than once, with different scores"
    if invalid:
        reasons = [f"invalid answer: {invalid}"]
    else:
        mismatch = next((source.mismatch for source in sources if source.mismatch), "")
        reasons = ["returned unfinished" if unfinished else "not returned", mismatch, failure]
    return Unscored(item.id, safe_line("; ".join(filter(None, reasons)), _MAX_REASON))


def _mismatch(candidate: dict[str, Any], sheet: TipSheet) -> str:
    """Return why the candidate is not this sheet, or an empty string.

    Missing keys are accepted, because each item has its own hash.
    """
    if "items" not in candidate:
        return ""
    if candidate.get("sheet", sheet.id) != sheet.id:
        return f"another sheet was returned: {_shown(candidate['sheet'])} instead of {sheet.id}"
    rubric = candidate.get("rubric")
    sha256 = rubric.get("sha256", sheet.rubric.sha256) if isinstance(rubric, dict) else sheet.rubric.sha256
    if sha256 != sheet.rubric.sha256:
        return f"it was returned with another rubric: {_shown(sha256)}"
    return ""


def _find_objects(text: str) -> list[dict[str, Any]]:
    """Return the outermost complete JSON objects that have a key `items` or `item`, in order.

    Complete objects inside an unclosed one (a truncated sheet, a brace in prose) are returned too.
    """
    found: list[tuple[int, dict[str, Any]]] = []  # (start, object)
    starts: deque[int] = deque(maxlen=_MAX_DEPTH)  # position of each open bracket
    has_key: deque[bool] = deque(maxlen=_MAX_DEPTH)  # whether each open bracket directly contains one of _KEYS
    budget = _MAX_PARSED_FACTOR * len(text) + _MAX_PARSED_EXTRA  # characters that may still be parsed
    for token in _TOKEN.finditer(text):
        word = token.group()  # a bracket or a string
        if word in ("[", "{"):
            starts.append(token.start())
            has_key.append(False)
        elif word in _KEYS and starts:
            has_key[-1] = True
        elif word in ("]", "}") and starts:
            start = starts.pop()
            if not has_key.pop() or budget <= 0:
                continue
            budget -= token.end() - start
            try:
                value = json.loads(text[start : token.end()])
            except (ValueError, RecursionError):  # ValueError also for very long integers
                continue
            if isinstance(value, dict):
                while found and found[-1][0] > start:  # objects inside this one
                    found.pop()
                found.append((start, value))
    return [value for _, value in found]


def _shown(value: object) -> str:
    return safe_line(repr(value), _MAX_SHOWN)


def safe_line(text: str, limit: int) -> str:
    """Return untrusted text on one line without control characters, shortened to `limit` characters."""
    return shorten(" ".join(printable(text[: 4 * limit]).split()), limit)


SAVE_INTERVAL_S = 20.0  # seconds between saves of new scores


@dataclass(frozen=True)
class JudgeResult:
    """The result of `run_judge`."""

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
    progress: Callable[[int, int, int], None] = lambda _scored, _unscored, _total: None  # called with numbers of items
    lock: Callable[[], AbstractContextManager[object]] = nullcontext  # held while scores are written
    wait_s: float = 0.0  # maximum wait for MLflow, if it is unavailable when all items are scored
    rescue: Callable[[str, str], Path] | None = None  # saves a sheet (id, text) to a file, to be applied later
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

    `accept` is the reason for accepting a drift beyond the limit, of this sheet or of the judge's last one.
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
        cells = read_cells(self.store, experiment.experiment_id)
        accepting = last is not None and last.status is SheetStatus.HELD and self.accept is not None
        earlier_result = None if last is None else self._finish_earlier(last, cells, accepting=accepting)
        if earlier_result is not None:
            if accepting:
                return earlier_result
            cells = read_cells(self.store, experiment.experiment_id)
        try:
            stored = export_sheet(self.store, experiment, self.request, cells).stored
        except NotEnoughData as exc:
            if earlier_result is not None:
                return earlier_result
            if last is not None and last.status is SheetStatus.HELD:
                raise NotEnoughData(
                    f"{exc} To accept the scores of the sheet {last.sheet.id}: {self.environment.how_to_accept}"
                ) from exc
            raise
        return self._judge(stored, continued=False)

    def _finish_earlier(
        self, last: StoredSheet, cells: Sequence[AnsweredCell], *, accepting: bool
    ) -> JudgeResult | None:
        """Apply the judge's last sheet again if the apply was interrupted, or if its drift is now accepted.

        Return None if its scores are applied already.
        """
        no_new_scores: FilledSheet[ItemScore] = FilledSheet(self.judge.name, {})
        if not accepting:
            if SheetApplier(self.store, self.experiment, last, no_new_scores).cells_have_scores(cells):
                return None
            self.environment.report(f"the sheet {last.sheet.id} was only partly applied: finishing it now")
        with self.environment.lock():
            applier = SheetApplier(self.store, self.experiment, self._reload(last), no_new_scores)
            applied = applier.run(accept=self.accept if accepting else None, final=True)
            return JudgeResult(applied, (), continued=True)

    def _reload(self, stored: StoredSheet) -> StoredSheet:
        """Reload the sheet from MLflow: a file of it may have been applied since it was read."""
        return find_sheet(self.store, self.experiment, stored.sheet.id) or stored

    def _judge(self, stored: StoredSheet, *, continued: bool) -> JudgeResult:
        """Score the sheet's remaining items and apply all its scores."""
        sheet, environment = stored.sheet, self.environment
        scores = _SheetScores(self.store, stored, environment.report)
        remaining = replace(sheet, items=tuple(item for item in sheet.items if item.id not in scores.all))
        unscored: list[Unscored] = []

        def apply() -> ApplyResult:
            filled = FilledSheet(self.judge.name, scores.new, tuple(each.item for each in unscored))
            with environment.lock():
                applier = SheetApplier(self.store, self.experiment, self._reload(stored), filled)
                return applier.run(accept=self.accept, final=True)

        try:
            results = self.judge.fill(remaining, environment.report) if remaining.items else ()
            for result in results:
                if isinstance(result, Unscored):
                    unscored.append(result)
                else:
                    scores.add(result)
                environment.progress(len(scores.all), len(unscored), len(sheet.items))
            scores.save()  # before applying, so that no score is lost if the process is killed
            observer = waiting_reporter(environment.report)
            applied = retry_while_unavailable(apply, "MLflow", environment.wait_s, observer)
        except MlflowUnavailable as exc:
            raise MlflowUnavailable(f"{exc} {self._save_to_file(stored, scores)}".strip()) from exc
        except BaseException:  # also if the user interrupts the command
            scores.save()
            if message := self._save_to_file(stored, scores):
                environment.report(message)
            raise
        return JudgeResult(applied, tuple(unscored), continued)

    def _save_to_file(self, stored: StoredSheet, scores: _SheetScores) -> str:
        """Save unsaved scores to a file; return a message with its path, or an empty string."""
        if not scores.has_unsaved or self.environment.rescue is None:
            return ""
        path = self.environment.rescue(stored.sheet.id, sheet_text(stored.sheet, scores.all))
        return (
            f"{len(scores.all)} items are scored; the filled sheet is in {path}. Once MLflow is available, apply it "
            f"with `tipbench judge apply {path}`."
        )


@dataclass
class _SheetScores:
    """The sheet's scores: stored ones and new ones.

    New ones are saved with the sheet every SAVE_INTERVAL_S seconds, so that a crash loses little work.
    """

    store: RunStore
    stored: StoredSheet
    report: Callable[[str], None]
    new: dict[str, ItemScore] = field(default_factory=dict)  # by item id
    _n_saved: int = 0  # number of new scores that are saved
    _tried_at: float = field(default_factory=time.monotonic)  # time of the last attempt to save
    _reported: bool = False  # whether a failed attempt was reported

    @property
    def all(self) -> dict[str, ItemScore]:
        return {**self.stored.scores, **self.new}

    @property
    def has_unsaved(self) -> bool:
        return len(self.new) > self._n_saved

    def add(self, score: ItemScore) -> None:
        self.new[score.item] = score
        if time.monotonic() - self._tried_at > SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Save new scores; if MLflow is unavailable, they are saved by the next call."""
        if self.has_unsaved:
            change = RunChange(
                texts={FILLED: item_scores_text(self.all, self.stored.replaced)}, at_ms=milliseconds(now_iso())
            )
            try:
                self.store.update(self.stored.run_id, change)
                self._n_saved = len(self.new)
            except MlflowUnavailable as exc:
                if not self._reported:
                    self.report(f"{exc} Judging continues; the scores are kept in memory until it is available.")
                self._reported = True
        self._tried_at = time.monotonic()
