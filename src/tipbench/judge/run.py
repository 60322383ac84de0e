"""Automatic judges: their interface, recovery of scores from the output of `--with command`, and `run_judge`."""

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
    """Return an observer that passes messages, and the start and end of a wait, to `report` as text."""

    def observe(event: Event) -> None:
        if isinstance(event, Waiting):
            report(f"{event.what} is unavailable: waiting for at most {event.limit_s:g} s")
        elif isinstance(event, Resumed):
            report(f"{event.what} is available again")
        elif isinstance(event, Message):
            report(event.text)

    return observe


# A bracket or a string. A string without a closing quote ends with its line, because JSON strings do not span lines.
_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\\n]|\\.)*+"?')
_KEYS = ('"item"', '"items"')
_MAX_DEPTH = 200  # open brackets; beyond it, the outermost are dropped
# Nested objects are parsed repeatedly. In total, at most FACTOR * len(text) + EXTRA characters are parsed.
_MAX_PARSED_FACTOR, _MAX_PARSED_EXTRA = 8, 1_000_000
_MAX_VERSIONS = 8  # per item
_MAX_VALUE_CHARS = 60  # of a value in a message
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class RecoveredItems:
    """The items found in one output of the program of `--with command`. An item may occur in several versions."""

    versions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by item id, in order of occurrence
    mismatch: str = ""  # why a sheet in the output was ignored; empty if none was


def recover_items(output: bytes, sheet: TipSheet) -> RecoveredItems:
    """Extract the sheet's items from arbitrary output. Checks the sheet id and the rubric, but not the items."""
    expected_ids = {item.id for item in sheet.items}
    versions: dict[str, list[dict[str, Any]]] = {}
    mismatch = ""
    for found in _find_objects(output.decode("utf-8", "replace")):
        if reason := _mismatch(found, sheet):
            mismatch = mismatch or reason  # the first one is reported
            continue
        items = found.get("items")
        if not isinstance(items, list):  # a single item, for example of a truncated sheet
            items = [found]
        for item in items:
            item_id = item.get("item") if isinstance(item, dict) else None
            if isinstance(item_id, str) and item_id in expected_ids:
                item_versions = versions.setdefault(item_id, [])
                if len(item_versions) < _MAX_VERSIONS and item not in item_versions:
                    item_versions.append(item)
    return RecoveredItems(versions, mismatch)


def choose_score(
    item: TipItem, rubric: Rubric, sources: Sequence[RecoveredItems], failure: str
) -> ItemScore | Unscored:
    """Return the item's score from the first of the sources that has exactly one valid score, else the reason.

    The sources are the program's output file, its stdout, and the sheet if the program changed it. `failure` is why the
    judge failed, or empty.
    """
    problem_text, unfinished = "", False
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
                problem_text = problem_text or "; ".join(problem.message for problem in checked[:2])
        if len(scores) == 1:
            return scores[0]
        if scores:
            problem_text = problem_text or "returned more than once, with different scores"
    if problem_text:
        reasons = [f"invalid answer: {problem_text}"]
    else:
        mismatch = next((source.mismatch for source in sources if source.mismatch), "")
        reasons = ["returned unfinished" if unfinished else "not returned", mismatch, failure]
    return Unscored(item.id, safe_line("; ".join(filter(None, reasons)), _MAX_REASON_CHARS))


def _mismatch(found: dict[str, Any], sheet: TipSheet) -> str:
    """Return why the found object is another sheet, or an empty string if it is this sheet or an item."""
    if "items" not in found:
        return ""
    # A missing sheet id or rubric is accepted, because each item has its own hash.
    if found.get("sheet", sheet.id) != sheet.id:
        return f"another sheet was returned: {_value_text(found['sheet'])} instead of {sheet.id}"
    rubric = found.get("rubric")
    if isinstance(rubric, dict) and rubric.get("sha256", sheet.rubric.sha256) != sheet.rubric.sha256:
        return f"it was returned with another rubric: {_value_text(rubric['sha256'])}"
    return ""


def _find_objects(text: str) -> list[dict[str, Any]]:
    """Return the outermost complete JSON objects that have a key `items` or `item`, in order.

    Complete objects inside an unclosed one (a truncated sheet, a brace in prose) are returned too.
    """
    found: list[tuple[int, dict[str, Any]]] = []  # (start, object)
    starts: deque[int] = deque(maxlen=_MAX_DEPTH)  # position of each open bracket
    has_key: deque[bool] = deque(maxlen=_MAX_DEPTH)  # whether each open bracket directly contains one of _KEYS
    chars_left = _MAX_PARSED_FACTOR * len(text) + _MAX_PARSED_EXTRA
    for token in _TOKEN.finditer(text):
        word = token.group()  # a bracket or a string
        if word in ("[", "{"):
            starts.append(token.start())
            has_key.append(False)
        elif word in _KEYS and starts:
            has_key[-1] = True
        elif word in ("]", "}") and starts:
            start = starts.pop()
            if not has_key.pop() or chars_left <= 0:
                continue
            chars_left -= token.end() - start
            try:
                value = json.loads(text[start : token.end()])
            except (ValueError, RecursionError):  # ValueError also for very long integers
                continue
            if isinstance(value, dict):
                while found and found[-1][0] > start:  # objects inside this one
                    found.pop()
                found.append((start, value))
    return [value for _, value in found]


def _value_text(value: object) -> str:
    return safe_line(repr(value), _MAX_VALUE_CHARS)


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

    The sheet of an interrupted call is continued. `accept` is the reason for accepting a drift beyond the limit. It
    applies to the judge's last sheet if that is held, else to this one.
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
        earlier_result = self._finish_earlier(last, cells, accepting=accepting) if last is not None else None
        if earlier_result is not None:
            if accepting:
                return earlier_result
            cells = read_cells(self.store, experiment.experiment_id)  # applying the earlier sheet changes them
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
        """Apply the judge's last sheet again if it is only partly applied, or to accept its drift; else return None."""
        no_new_scores: FilledSheet[ItemScore] = FilledSheet(self.judge.name, {})
        if not accepting:
            # A held sheet is completely applied too: its cells have its scores as held ones.
            if SheetApplier(self.store, self.experiment, last, no_new_scores).cells_have_scores(cells):
                return None
            self.environment.report(f"the sheet {last.sheet.id} was only partly applied: finishing it now")
        with self.environment.lock():
            applier = SheetApplier(self.store, self.experiment, self._reload(last), no_new_scores)
            applied = applier.run(accept=self.accept if accepting else None, final=True)
            return JudgeResult(applied, (), continued=True)

    def _reload(self, stored: StoredSheet) -> StoredSheet:
        """Read the sheet again: since it was read, `tipbench judge apply` may have changed it."""
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
            scores.save()  # no score is lost if the process is killed before they are applied
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
        """Save the scores to a file if some are not in MLflow; return a message with its path, or an empty string."""
        if not scores.has_unsaved or self.environment.rescue is None:
            return ""
        path = self.environment.rescue(stored.sheet.id, sheet_text(stored.sheet, scores.all))
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
                    self.report(f"{exc} Judging continues; the scores are kept in memory until it is available.")
                self._failure_reported = True
        self._last_save_attempt = time.monotonic()
