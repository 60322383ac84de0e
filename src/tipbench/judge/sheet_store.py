"""Sheets stored in MLflow as runs of kind `judging`: content, unblinding key, answers and status."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import tipbench
from tipbench.errors import CorruptText, SheetRefused, SheetsClosed
from tipbench.judge.check import Problem, check_sheet, refusal, shown
from tipbench.judge.scores import RUBRIC, read_tip_score, tip_score_json
from tipbench.judge.sheet import FORMAT, FilledSheet, Item, ItemScore, Sheet, SheetTip, instructions
from tipbench.plan.config import EXPERIMENT_PREFIX, check_experiment_name
from tipbench.plan.rubric import Control, Rubric, parse_rubric
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import fingerprint


class ItemKind(StrEnum):
    """The kind of an item, hidden from the judge."""

    CELL = "cell"  # an answer to be scored by this judge
    CONTROL = "control"  # calibrated tips presented as an answer; measures drift
    REPEAT = "repeat"  # an answer this judge has already scored; measures self-agreement


@dataclass(frozen=True)
class SheetEntry:
    """One item with its kind and source."""

    item: Item
    kind: ItemKind
    run_id: str | None = None  # for cells and repeats
    controls: tuple[str, ...] = ()  # ids of the control tips, in item order
    references: tuple[Mapping[str, int], ...] = ()  # their reference scores


def control_id(control: Control) -> str:
    """Returns a content-based id of a control, stable across machines and edits of the controls file."""
    return fingerprint([control.scenario, control.tip], 12)


@dataclass(frozen=True)
class ReplacedAnswer:
    """An answer replaced by a later one."""

    given: ItemScore
    at: str  # time of replacement


def answers_text(answers: Mapping[str, ItemScore], history: Sequence[ReplacedAnswer] = ()) -> str:
    """Serializes the answers and their history for storage with the sheet."""
    value = {
        "items": {item: _score_json(score) for item, score in sorted(answers.items())},
        "history": [{"item": each.given.item, "at": each.at, **_score_json(each.given)} for each in history],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read_answers(text: str | None) -> tuple[dict[str, ItemScore], tuple[ReplacedAnswer, ...]]:
    """Parses the output of `answers_text`; returns empty values for None."""
    if text is None:
        return {}, ()
    raw = json.loads(text)
    history = tuple(ReplacedAnswer(_score(each["item"], each), each["at"]) for each in raw["history"])
    return {item: _score(item, given) for item, given in raw["items"].items()}, history


def merged(
    before: Mapping[str, ItemScore], history: Sequence[ReplacedAnswer], finished: Sequence[ItemScore], at: str
) -> tuple[dict[str, ItemScore], tuple[ReplacedAnswer, ...]]:
    """Returns the answers updated with the finished ones, and the history extended by those replaced."""
    new = {score.item: score for score in finished}
    replaced = [ReplacedAnswer(given, at) for item, given in before.items() if new.get(item, given) != given]
    return {**before, **new}, (*history, *replaced)


def scores_fingerprint(answers: Mapping[str, ItemScore]) -> str:
    """Returns a fingerprint of scores and flags, without notes, which do not affect drift."""
    return fingerprint(
        {
            item: [score.format_ok, [[dict(tip.scores), tip.overlong] for tip in score.tips]]
            for item, score in answers.items()
        },
        32,
    )


def _score_json(score: ItemScore) -> dict[str, Any]:
    return {"format_ok": score.format_ok, "tips": [tip_score_json(tip) for tip in score.tips]}


def _score(item: str, raw: Mapping[str, Any]) -> ItemScore:
    return ItemScore(item, bool(raw["format_ok"]), tuple(read_tip_score(tip) for tip in raw["tips"]))


SHEET = "artifact:sheet.json"
KEY = "artifact:key.json"
ANSWERS = "artifact:answers.json"
DRIFT = "artifact:drift.json"
SHEET_KIND = "sheet_kind"  # tag; absent on an ordinary sheet
DUEL = "duel"  # its value on a duel sheet
FINAL = "sheet_final"  # tag
REVISIONS = "sheet_revisions"  # tag
_TEXTS = (SHEET, KEY, RUBRIC, ANSWERS, DRIFT)


class SheetStatus(StrEnum):
    """The status of a sheet (tag `sheet_status`)."""

    EXPORTED = "exported"  # not applied yet
    APPLIED = "applied"  # its scores count
    HELD = "held"  # its scores are stored but do not count: drift limit exceeded


@dataclass(frozen=True)
class StoredSheet:
    """A sheet stored in MLflow: its content, the kind and source of each item, and the answers."""

    sheet: Sheet
    entries: tuple[SheetEntry, ...]  # in the sheet's order
    exported: str  # ISO time
    provisional: bool = False
    refloor: tuple[str, ...] = ()  # runs without a usable tip, whose floor scores are updated to the sheet's rubric
    seed: int = 0
    run_id: str = ""
    status: SheetStatus = SheetStatus.EXPORTED
    answers: Mapping[str, ItemScore] = field(default_factory=dict)
    replaced: tuple[ReplacedAnswer, ...] = ()  # answers replaced by later ones
    acceptance: str | None = None  # reason for accepting the drift; valid for the scores in `accepted_for`
    accepted_for: str | None = None  # as returned by `scores_fingerprint`
    drift: Mapping[str, Any] | None = None  # None until the first verdict
    final: bool = False  # finished by its judge, although items are open
    revisions: int = 0  # changes applied after the first verdict
    applied_at: str | None = None
    owner: str | None = None  # named at export, else the first judge who filled it
    self_exact: float | None = None  # share of equal scores on repeated tips

    @property
    def finished(self) -> int:
        return len(self.answers)

    @property
    def unanswered(self) -> tuple[SheetEntry, ...]:
        """The entries without an answer."""
        return tuple(entry for entry in self.entries if entry.item.id not in self.answers)

    @property
    def is_open(self) -> bool:
        """Whether its judge may still fill in items before the first verdict."""
        return not self.final and bool(self.unanswered)

    @property
    def accepted(self) -> str | None:
        """The reason for accepting the drift of the current scores, or None."""
        return self.acceptance_of(self.answers)

    def acceptance_of(self, answers: Mapping[str, ItemScore]) -> str | None:
        """Returns the reason for accepting the drift of these exact scores and flags, or None."""
        return self.acceptance if self.acceptance and self.accepted_for == scores_fingerprint(answers) else None


def now_iso() -> str:
    """Returns the current UTC time in ISO format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def milliseconds(iso: str) -> int:
    """Converts an ISO time to milliseconds since the epoch, as used by MLflow."""
    return int(datetime.fromisoformat(iso).timestamp() * 1000)


def record_sheet(store: RunStore, experiment_id: str, stored: StoredSheet) -> str:
    """Stores a new sheet and returns its run id. Must succeed before the file is sent to a judge."""
    sheet = stored.sheet
    at = milliseconds(stored.exported)
    count = {f"n_{kind}s": float(sum(entry.kind is kind for entry in stored.entries)) for kind in ItemKind}
    tips = sum(len(entry.controls) for entry in stored.entries)
    run = NewRun(
        kind=RunKind.JUDGING,
        record_id=sheet.id,
        name=f"sheet {sheet.id}",
        start_ms=at,
        end_ms=at,
        params={"rubric": sheet.rubric.tag, "seed": str(stored.seed)},
        metrics={"n_items": float(len(sheet.items)), **count, "n_control_tips": float(tips)},
        tags={
            "sheet": sheet.id,
            "sheet_status": str(stored.status),
            "provisional": str(stored.provisional).lower(),
            "exported_at": stored.exported,
            "tipbench.version": tipbench.__version__,
            **({"judge": sheet.judge} if sheet.judge else {}),
        },
        texts={SHEET: _sheet_text(sheet), KEY: _key_text(stored), RUBRIC: sheet.rubric.text},
    )
    return store.record(experiment_id, run)


def find_sheet(store: RunStore, experiment_id: str, experiment: str, sheet_id: str) -> StoredSheet | None:
    """Returns the sheet with this id, or None if absent."""
    where = {"kind": str(RunKind.JUDGING), "sheet": sheet_id}
    return next(_read(store, experiment_id, experiment, where), None)


def stored_sheets(
    store: RunStore, experiment_id: str, experiment: str, judge: str | None = None
) -> Iterator[StoredSheet]:
    """Yields the sheets of an experiment, newest first, optionally of one judge."""
    where = {"kind": str(RunKind.JUDGING)} | ({"judge": judge} if judge else {})
    return _read(store, experiment_id, experiment, where)


def check_no_duels(store: RunStore, experiment: Experiment, judge: str) -> None:
    """Raises SheetsClosed if the judge has opened a duel in the experiment, which closes their sheets."""
    if has_duels(store, experiment, judge):
        raise SheetsClosed(
            f"{judge} has opened duels in {experiment.name}, which closes their sheets there: duels show real answers "
            "only and would reveal the hidden controls. Scores given before are kept; continue under another name."
        )


def check_no_open_sheet(store: RunStore, experiment: Experiment, judge: str) -> None:
    """Raises SheetsClosed if the judge, who has no duels yet, has an open sheet in the experiment."""
    if has_duels(store, experiment, judge):
        return
    for stored in stored_sheets(store, experiment.experiment_id, experiment.name, judge):
        if stored.is_open and not stored.provisional:
            raise SheetsClosed(
                f"{judge} has the open sheet {stored.sheet.id} in {experiment.name} ({len(stored.unanswered)} items "
                "left). Sheets come before duels: fill it in, or finish it with `tipbench judge apply FILE --final` "
                "or *Finish batch*."
            )


def has_duels(store: RunStore, experiment: Experiment, judge: str) -> bool:
    """Returns whether the judge has opened a duel in the experiment, answered or not."""
    where = {"kind": str(RunKind.JUDGING), SHEET_KIND: DUEL, "judge": judge}
    return next(iter(store.search(experiment.experiment_id, where=where, limit=1)), None) is not None


def controls_shown_to(store: RunStore, judge: str) -> list[str]:
    """Returns the ids of controls shown to this judge in any experiment, once per time shown."""
    shown: list[str] = []
    where = {"kind": str(RunKind.JUDGING), "judge": judge}
    for experiment in store.experiments():
        if not experiment.name.startswith(EXPERIMENT_PREFIX):
            continue
        for run, texts in store.read(experiment.experiment_id, where=where, texts=(KEY,)):
            if run.tags.get(SHEET_KIND, "sheet") == "sheet":
                shown += [control for item in json.loads(texts[KEY])["items"].values() for control in item["controls"]]
    return shown


def _read(store: RunStore, experiment_id: str, experiment: str, where: Mapping[str, str]) -> Iterator[StoredSheet]:
    rubrics: dict[str, Rubric] = {}
    for run, texts in store.read(experiment_id, where=where, texts=_TEXTS):
        if run.tags.get(SHEET_KIND, "sheet") != "sheet":  # a duel sheet, see `tipbench.judge.duels`
            continue
        try:
            yield _judging(experiment, run, texts, rubrics)
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptText(
                f"The judging run {run.run_id} in MLflow has an unexpected format ({type(exc).__name__}: {exc})."
            ) from exc


def _judging(experiment: str, run: StoredRun, texts: Mapping[str, str], rubrics: dict[str, Rubric]) -> StoredSheet:
    text = texts[RUBRIC]
    rubric = rubrics.get(text) or rubrics.setdefault(text, parse_rubric(text, Path("rubric.md")))
    shown = json.loads(texts[SHEET])
    items = _read_items(shown)
    key = json.loads(texts[KEY])
    answers, replaced = read_answers(texts.get(ANSWERS))
    return StoredSheet(
        sheet=Sheet(run.tags["sheet"], experiment, key["judge"], rubric, items, shown.get("instructions", "")),
        entries=tuple(_entry(item, key["items"][item.id]) for item in items),
        exported=run.tags["exported_at"],
        provisional=run.tags.get("provisional") == "true",
        refloor=tuple(key["refloor"]),
        seed=int(run.params["seed"]),
        run_id=run.run_id,
        status=SheetStatus(run.tags["sheet_status"]),
        answers=answers,
        replaced=replaced,
        acceptance=run.tags.get("drift_accepted"),
        accepted_for=run.tags.get("drift_accepted_for"),
        drift=json.loads(texts[DRIFT]) if DRIFT in texts else None,
        final=run.tags.get(FINAL) == "true",
        revisions=int(run.tags.get(REVISIONS, "0")),
        applied_at=run.tags.get("applied_at"),
        owner=run.tags.get("judge"),
        self_exact=run.metrics.get("self_exact"),
    )


def _sheet_text(sheet: Sheet) -> str:
    cards = {item.scenario["id"]: item.scenario for item in sheet.items}
    items = [
        [item.id, item.scenario["id"], item.format_ok, [[tip.tip, tip.rationale, tip.overlong] for tip in item.tips]]
        for item in sheet.items
    ]
    text = sheet.instructions or instructions(sheet.rubric)
    return _compact({"instructions": text, "cards": cards, "items": items})


def _read_items(raw: Mapping[str, Any]) -> tuple[Item, ...]:
    cards = raw["cards"]
    return tuple(
        Item(item, cards[scenario], bool(format_ok), tuple(SheetTip(*tip) for tip in tips))
        for item, scenario, format_ok, tips in raw["items"]
    )


def _key_text(stored: StoredSheet) -> str:
    items = {
        entry.item.id: {
            "behind": str(entry.kind),
            "run": entry.run_id,
            "controls": list(entry.controls),
            "references": [dict(reference) for reference in entry.references],
        }
        for entry in stored.entries
    }
    return _compact({"judge": stored.sheet.judge, "items": items, "refloor": list(stored.refloor)})


def _entry(item: Item, raw: Mapping[str, Any]) -> SheetEntry:
    return SheetEntry(item, ItemKind(raw["behind"]), raw["run"], tuple(raw["controls"]), tuple(raw["references"]))


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class ReceivedSheet:
    """A validated sheet, ready to be applied."""

    experiment: Experiment
    stored: StoredSheet
    filled: FilledSheet


def receive(
    store: RunStore, raw: Mapping[str, Any], *, judge: str | None = None, accepting: bool = False
) -> ReceivedSheet:
    """Finds the stored sheet of a filled file and validates it. Raises SheetRefused with every problem.

    Raises SheetsClosed if the judge has opened duels, unless an admin is `accepting` the drift of a held sheet.
    """
    experiment, sheet_id = origin(store, raw, FORMAT)
    stored = find_sheet(store, experiment.experiment_id, experiment.name, sheet_id)
    if stored is None:
        raise unknown_sheet_error(experiment, sheet_id)
    expected = replace(stored.sheet, judge=stored.owner or stored.sheet.judge)
    filled = check_sheet(raw, expected, judge=judge, allow_reserved=stored.provisional)
    if filled.judge and not stored.provisional and not accepting:
        check_no_duels(store, experiment, filled.judge)
    return ReceivedSheet(experiment, stored, filled)


def origin(store: RunStore, raw: Mapping[str, Any], format_: str) -> tuple[Experiment, str]:
    """Returns the experiment and sheet id named in a file. Raises SheetRefused if either or the format is invalid."""
    if raw.get("format") != format_:
        raise refusal([Problem(None, None, "format", shown(raw.get("format")), f"{format_!r}")])
    name, sheet_id = raw.get("experiment"), raw.get("sheet")
    if not isinstance(name, str) or not _is_experiment(name):
        raise refusal([Problem(None, None, "experiment", shown(name), "the name it was exported with, tip-bench-…")])
    if not isinstance(sheet_id, str) or not 0 < len(sheet_id) <= 64:
        raise refusal([Problem(None, None, "sheet", shown(sheet_id), "the id it was exported with")])
    experiment = store.experiment(name)
    if experiment is None:
        raise refusal(
            [Problem(None, None, "experiment", shown(name), "an experiment of this MLflow; see --mlflow-url")]
        )
    return experiment, sheet_id


def unknown_sheet_error(experiment: Experiment, sheet_id: str) -> SheetRefused:
    """Returns the error for a file whose sheet is not in MLflow."""
    expected = f"a sheet exported from {experiment.name} and recorded in this MLflow; see --mlflow-url"
    return refusal([Problem(None, None, "sheet", shown(sheet_id), expected)])


def _is_experiment(name: str) -> bool:
    try:
        check_experiment_name(name)
    except ValueError:
        return False
    return True
