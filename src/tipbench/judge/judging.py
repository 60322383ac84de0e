"""Judging: a sheet with its key and what has come back of it, as one run of kind `judging` in MLflow.

Everything a sheet needs is in that run, so a sheet exported on one box is applied, or written again byte for byte,
on another that has neither the suite nor the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import tipbench
from tipbench.errors import CorruptText
from tipbench.judge.answers import Replaced, read_answers, scores_mark
from tipbench.judge.key import Behind, Entry
from tipbench.judge.scores import RUBRIC
from tipbench.judge.sheet import Item, ItemScore, Sheet, SheetTip, instructions
from tipbench.plan.config import EXPERIMENT_PREFIX
from tipbench.plan.rubric import Rubric
from tipbench.plan.rubric_files import parse_rubric
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import RunStore

SHEET = "artifact:sheet.json"
KEY = "artifact:key.json"
ANSWERS = "artifact:answers.json"
DRIFT = "artifact:drift.json"
SHEET_KIND = "sheet_kind"  # tag; absent on an ordinary sheet
_TEXTS = (SHEET, KEY, RUBRIC, ANSWERS, DRIFT)


class SheetStatus(StrEnum):
    """Where a sheet stands (tag `sheet_status`)."""

    EXPORTED = "exported"  # nothing has come back yet
    APPLIED = "applied"  # what came back counts
    HELD = "held"  # what came back is stored and does not count: beyond the drift limit


@dataclass(frozen=True)
class Judging:
    """One sheet: what was asked, what stands behind it, what came back."""

    sheet: Sheet
    entries: tuple[Entry, ...]  # in the sheet's order
    exported: str  # ISO time
    provisional: bool = False
    refloor: tuple[str, ...] = ()  # runs without a usable tip, to be floored anew under the sheet's rubric
    seed: int = 0
    run_id: str = ""
    status: SheetStatus = SheetStatus.EXPORTED
    answers: Mapping[str, ItemScore] = field(default_factory=dict)
    replaced: tuple[Replaced, ...] = ()  # answers that later ones took the place of
    acceptance: str | None = None  # why a drift of this sheet was accepted, and for which scores
    accepted_for: str | None = None
    drift: Mapping[str, Any] | None = None
    applied_at: str | None = None
    owner: str | None = None  # whose sheet it is: by export, or the first who filled it
    self_exact: float | None = None  # share of equal scores on tips the judge had scored before

    @property
    def finished(self) -> int:
        return len(self.answers)

    @property
    def unanswered(self) -> tuple[Entry, ...]:
        """What has not come back."""
        return tuple(entry for entry in self.entries if entry.item.id not in self.answers)

    @property
    def accepted(self) -> str | None:
        """Why the drift of the present scores is accepted, if it is."""
        return self.acceptance_of(self.answers)

    def acceptance_of(self, answers: Mapping[str, ItemScore]) -> str | None:
        """Why the drift of these scores was accepted: an acceptance is for the scores and flags it was given for."""
        return self.acceptance if self.acceptance and self.accepted_for == scores_mark(answers) else None


def now_iso() -> str:
    """The time of day in UTC, as it stands in records."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def milliseconds(iso: str) -> int:
    """The same in MLflow's unit."""
    return int(datetime.fromisoformat(iso).timestamp() * 1000)


def record_judging(store: RunStore, experiment_id: str, judging: Judging) -> str:
    """Keep a new sheet and return its run's id. Only then may the file be handed out."""
    sheet = judging.sheet
    at = milliseconds(judging.exported)
    count = {f"n_{behind}s": float(sum(entry.behind is behind for entry in judging.entries)) for behind in Behind}
    tips = sum(len(entry.controls) for entry in judging.entries)
    run = NewRun(
        kind=RunKind.JUDGING,
        record_id=sheet.id,
        name=f"sheet {sheet.id}",
        start_ms=at,
        end_ms=at,
        params={"rubric": sheet.rubric.tag, "seed": str(judging.seed)},
        metrics={"n_items": float(len(sheet.items)), **count, "n_control_tips": float(tips)},
        tags={
            "sheet": sheet.id,
            "sheet_status": str(judging.status),
            "provisional": str(judging.provisional).lower(),
            "exported_at": judging.exported,
            "tipbench.version": tipbench.__version__,
            **({"judge": sheet.judge} if sheet.judge else {}),
        },
        texts={SHEET: _sheet_text(sheet), KEY: _key_text(judging), RUBRIC: sheet.rubric.text},
    )
    return store.record(experiment_id, run)


def find_judging(store: RunStore, experiment_id: str, experiment: str, sheet_id: str) -> Judging | None:
    """The sheet of that id, or None."""
    where = {"kind": str(RunKind.JUDGING), "sheet": sheet_id}
    return next(_read(store, experiment_id, experiment, where), None)


def judgings(store: RunStore, experiment_id: str, experiment: str, judge: str | None = None) -> Iterator[Judging]:
    """The sheets of an experiment, newest first; of one judge if named."""
    where = {"kind": str(RunKind.JUDGING)} | ({"judge": judge} if judge else {})
    return _read(store, experiment_id, experiment, where)


def controls_shown_to(store: RunStore, judge: str) -> list[str]:
    """Ids of the controls this judge was given, in any experiment, each as often as it was."""
    shown: list[str] = []
    where = {"kind": str(RunKind.JUDGING), "judge": judge}
    for experiment in store.experiments():
        if not experiment.name.startswith(EXPERIMENT_PREFIX):
            continue
        for run, texts in store.read(experiment.experiment_id, where=where, texts=(KEY,)):
            if run.tags.get(SHEET_KIND, "sheet") == "sheet":
                shown += [control for item in json.loads(texts[KEY])["items"].values() for control in item["controls"]]
    return shown


def _read(store: RunStore, experiment_id: str, experiment: str, where: Mapping[str, str]) -> Iterator[Judging]:
    rubrics: dict[str, Rubric] = {}
    for run, texts in store.read(experiment_id, where=where, texts=_TEXTS):
        if run.tags.get(SHEET_KIND, "sheet") != "sheet":  # a duel: `tipbench.judge.duelling` reads those
            continue
        try:
            yield _judging(experiment, run, texts, rubrics)
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptText(
                f"The judging run {run.run_id} in MLflow is not what tipbench writes ({type(exc).__name__}: {exc})."
            ) from exc


def _judging(experiment: str, run: StoredRun, texts: Mapping[str, str], rubrics: dict[str, Rubric]) -> Judging:
    text = texts[RUBRIC]
    rubric = rubrics.get(text) or rubrics.setdefault(text, parse_rubric(text, Path("rubric.md")))
    shown = json.loads(texts[SHEET])
    items = _read_items(shown)
    key = json.loads(texts[KEY])
    answers, replaced = read_answers(texts.get(ANSWERS))
    return Judging(
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


def _key_text(judging: Judging) -> str:
    items = {
        entry.item.id: {
            "behind": str(entry.behind),
            "run": entry.run_id,
            "controls": list(entry.controls),
            "references": [dict(reference) for reference in entry.references],
        }
        for entry in judging.entries
    }
    return _compact({"judge": judging.sheet.judge, "items": items, "refloor": list(judging.refloor)})


def _entry(item: Item, raw: Mapping[str, Any]) -> Entry:
    return Entry(item, Behind(raw["behind"]), raw["run"], tuple(raw["controls"]), tuple(raw["references"]))


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
