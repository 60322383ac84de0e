"""A duel sheet with its key and what has come back of it, as a run of kind `judging` (tag `sheet_kind=duel`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tipbench
from tipbench.errors import CorruptText
from tipbench.generate.parsing import Tip
from tipbench.judge.duel_sheet import SIDES, DuelItem, DuelSheet, Winner
from tipbench.judge.judging import ANSWERS, KEY, SHEET, SHEET_KIND, SheetStatus, milliseconds
from tipbench.judge.pairing import Name
from tipbench.judge.scores import RUBRIC
from tipbench.plan.rubric import Rubric
from tipbench.plan.rubric_files import parse_rubric
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import RunStore

DUEL = "duel"
_TEXTS = (SHEET, KEY, RUBRIC, ANSWERS)


@dataclass(frozen=True)
class DuelAnswer:
    """What a judge said of one item, and when."""

    item: str
    winner: Winner
    at: str


@dataclass(frozen=True)
class DuelJudging:
    """One duel sheet: what was asked, what stands behind it, what came back."""

    sheet: DuelSheet
    sides: Mapping[str, tuple[str, str]]  # by item: the runs shown as a and b
    names: Mapping[str, Name]  # by run
    exported: str  # ISO time
    seed: int = 0
    run_id: str = ""
    status: SheetStatus = SheetStatus.EXPORTED
    answers: Mapping[str, DuelAnswer] = field(default_factory=dict)
    history: tuple[DuelAnswer, ...] = ()  # what was revised
    owner: str | None = None  # whose sheet it is: by export, or the first who filled it


def record_duel(store: RunStore, experiment_id: str, judging: DuelJudging) -> str:
    """Keep a new duel sheet and return its run's id. Only then may the file be handed out."""
    sheet, at = judging.sheet, milliseconds(judging.exported)
    key = {"judge": sheet.judge, "items": judging.sides, "runs": judging.names}
    run = NewRun(
        kind=RunKind.JUDGING,
        record_id=sheet.id,
        name=f"duels {sheet.id}",
        start_ms=at,
        end_ms=at,
        params={"rubric": sheet.rubric.tag, "seed": str(judging.seed)},
        metrics={"n_items": float(len(sheet.items))},
        tags={
            "sheet": sheet.id,
            SHEET_KIND: DUEL,
            "sheet_status": str(judging.status),
            "exported_at": judging.exported,
            "tipbench.version": tipbench.__version__,
            **({"judge": sheet.judge} if sheet.judge else {}),
        },
        texts={SHEET: _sheet_text(sheet), KEY: _compact(key), RUBRIC: sheet.rubric.text},
    )
    return store.record(experiment_id, run)


def find_duel(store: RunStore, experiment_id: str, experiment: str, sheet_id: str) -> DuelJudging | None:
    """The duel sheet of that id, or None."""
    return next(_read(store, experiment_id, experiment, {"sheet": sheet_id}), None)


def duel_judgings(store: RunStore, experiment_id: str, experiment: str) -> Iterator[DuelJudging]:
    """The duel sheets of an experiment, newest first."""
    return _read(store, experiment_id, experiment, {})


def duel_answers_text(answers: Mapping[str, DuelAnswer], history: tuple[DuelAnswer, ...]) -> str:
    """What came back, as kept with the sheet."""
    now = {item: {"winner": str(given.winner), "at": given.at} for item, given in sorted(answers.items())}
    before = [{"item": given.item, "winner": str(given.winner), "at": given.at} for given in history]
    return _compact({"answers": now, "history": before})


def _read(store: RunStore, experiment_id: str, experiment: str, where: Mapping[str, str]) -> Iterator[DuelJudging]:
    only = {"kind": str(RunKind.JUDGING), SHEET_KIND: DUEL, **where}
    rubrics: dict[str, Rubric] = {}
    for run, texts in store.read(experiment_id, where=only, texts=_TEXTS):
        try:
            text = texts[RUBRIC]
            rubric = rubrics.get(text) or rubrics.setdefault(text, parse_rubric(text, Path("rubric.md")))
            yield _judging(experiment, run, texts, rubric)
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptText(
                f"The judging run {run.run_id} in MLflow is not what tipbench writes ({type(exc).__name__}: {exc})."
            ) from exc


def _judging(experiment: str, run: StoredRun, texts: Mapping[str, str], rubric: Rubric) -> DuelJudging:
    key = json.loads(texts[KEY])
    came_back = json.loads(texts[ANSWERS]) if ANSWERS in texts else {"answers": {}, "history": []}
    return DuelJudging(
        sheet=DuelSheet(run.tags["sheet"], experiment, key["judge"], rubric, _items(json.loads(texts[SHEET]))),
        sides={item: (runs[0], runs[1]) for item, runs in key["items"].items()},
        names={run_id: (name[0], name[1]) for run_id, name in key["runs"].items()},
        exported=run.tags["exported_at"],
        seed=int(run.params["seed"]),
        run_id=run.run_id,
        status=SheetStatus(run.tags["sheet_status"]),
        answers={item: _answer({"item": item, **given}) for item, given in came_back["answers"].items()},
        history=tuple(_answer(given) for given in came_back["history"]),
        owner=run.tags.get("judge"),
    )


def _answer(raw: Mapping[str, Any]) -> DuelAnswer:
    return DuelAnswer(raw["item"], Winner(raw["winner"]), raw["at"])


def _sheet_text(sheet: DuelSheet) -> str:
    """An answer meets many others: each is kept once, and items point to it."""
    cards = {item.scenario["id"]: item.scenario for item in sheet.items}
    answers = list(dict.fromkeys(getattr(item, side) for item in sheet.items for side in SIDES))
    place = {tips: at for at, tips in enumerate(answers)}
    items = [[item.id, item.scenario["id"], place[item.a], place[item.b]] for item in sheet.items]
    told = [[[tip.tip, tip.rationale] for tip in tips] for tips in answers]
    return _compact({"cards": cards, "answers": told, "items": items})


def _items(raw: Mapping[str, Any]) -> tuple[DuelItem, ...]:
    answers = [tuple(Tip(*tip) for tip in tips) for tips in raw["answers"]]
    return tuple(DuelItem(item, raw["cards"][card], answers[a], answers[b]) for item, card, a, b in raw["items"])


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
