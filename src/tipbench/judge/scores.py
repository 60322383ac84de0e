"""The scores of one cell: who gave them, which count, what they replaced; and what that makes of its run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tipbench.errors import CorruptText
from tipbench.judge.sheet import ItemScore, TipScore
from tipbench.plan.rubric import FLAGS, Rubric
from tipbench.record.run import RunChange, RunState

FORMAT = "tipbench-scores/1"
SCORES = "artifact:scores.json"
RUBRIC = "artifact:rubric.md"
PROVISIONAL = "provisional_"


@dataclass(frozen=True)
class Judgement:
    """One judge's scores of one cell, under one rubric."""

    judge: str
    sheet: str
    exported: str  # when the sheet was made: of two rubrics the one exported last is the present one
    at: str  # when it was applied
    rubric: str  # id@sha256
    format_ok: bool
    tips: tuple[TipScore, ...]
    means: Mapping[str, float]  # over the tips: composite, scales and flags, as the rubric weighs them
    held: bool = False  # stored, not counted: the judge was beyond the drift limit

    def says_the_same_as(self, other: Judgement) -> bool:
        """Equal but for the time of applying."""
        return replace(self, at="") == replace(other, at="")


@dataclass(frozen=True)
class CellScores:
    """Everything anybody has said of a cell. The latest judgement of each judge stands, the rest is history."""

    judges: Mapping[str, Judgement]
    provisional: Mapping[str, Judgement]
    history: tuple[Judgement, ...] = ()

    def with_judgement(self, new: Judgement, *, provisional: bool = False) -> CellScores:
        """With this judgement in place of the judge's former one; the same object when it says nothing new."""
        there = self.provisional if provisional else self.judges
        former = there.get(new.judge)
        if former is not None and former.says_the_same_as(new):
            return self
        history = self.history
        if former is not None and not provisional and not _only_released(former, new):
            history = (*history, former)
        updated = {name: given for name, given in there.items() if name != new.judge} | {new.judge: new}
        if provisional:
            return replace(self, provisional=updated, history=history)
        return replace(self, judges=updated, history=history)

    @property
    def counted(self) -> list[Judgement]:
        """The judgements that count: not held, and under the rubric whose sheet was exported last."""
        free = [given for given in self.judges.values() if not given.held]
        if not free:
            return []
        present = max(free, key=lambda given: given.exported).rubric
        return [given for given in free if given.rubric == present]

    @property
    def latest_provisional(self) -> Judgement | None:
        return max(self.provisional.values(), key=lambda given: given.at, default=None)


NOBODY = CellScores({}, {})


def _only_released(former: Judgement, new: Judgement) -> bool:
    return replace(former, held=new.held, at=new.at) == new


def read_scores(text: str | None) -> CellScores:
    """The content of `artifact:scores.json`; nobody's scores when there is none."""
    if text is None:
        return NOBODY
    try:
        raw = json.loads(text)
        return CellScores(
            judges={name: _judgement(name, given) for name, given in raw["judges"].items()},
            provisional={name: _judgement(name, given) for name, given in raw["provisional"].items()},
            history=tuple(_judgement(given["judge"], given) for given in raw["history"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptText(f"The text {SCORES} is not what tipbench writes ({type(exc).__name__}: {exc}).") from exc


def scores_text(scores: CellScores) -> str:
    """The content of `artifact:scores.json`."""
    value = {
        "format": FORMAT,
        "judges": {name: _judgement_json(given) for name, given in sorted(scores.judges.items())},
        "provisional": {name: _judgement_json(given) for name, given in sorted(scores.provisional.items())},
        "history": [{"judge": given.judge, **_judgement_json(given)} for given in scores.history],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tip_means(rubric: Rubric, score: ItemScore) -> dict[str, float]:
    """One judge's numbers for a cell: means over its tips, of the composite, the scales and the flags."""
    means = {name: fmean(tip.scores[name] for tip in score.tips) for name in rubric.scale_names}
    means["format_ok"] = float(score.format_ok)
    means["overlong"] = fmean(tip.overlong for tip in score.tips)
    means["composite"] = fmean(
        rubric.composite(tip.scores, format_ok=score.format_ok, overlong=tip.overlong) for tip in score.tips
    )
    return means


def run_change(scores: CellScores, rubrics: Mapping[str, Rubric], at_ms: int) -> RunChange:
    """What the run of the cell must become; `rubrics` by tag, for the text that is kept with the scores."""
    texts = {SCORES: scores_text(scores)}
    tags: dict[str, str] = {}
    metrics: dict[str, float] = {}
    counted = scores.counted
    if counted:
        present = counted[0].rubric
        metrics |= {name: fmean(given.means[name] for given in counted) for name in counted[0].means}
        tags |= {"state": str(RunState.JUDGED), "judge_pending": "false", "scores_rubric": present}
        if present in rubrics:
            texts[RUBRIC] = rubrics[present].text
    elif scores.judges:
        tags |= {"state": str(RunState.PENDING), "judge_pending": "true"}
    tags["judges"] = _names(given.judge for given in counted)
    tags["held"] = str(any(given.held for given in scores.judges.values())).lower()
    provisional = scores.latest_provisional
    if provisional is not None:
        metrics |= {PROVISIONAL + name: value for name, value in provisional.means.items() if name not in FLAGS}
        tags |= {"provisional_judge": provisional.judge, "provisional_rubric": provisional.rubric}
    return RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=at_ms)


def floor_change(rubric: Rubric, at_ms: int) -> RunChange:
    """What the run of an answer without a usable tip becomes under another rubric."""
    metrics = {**rubric.floor, "composite": rubric.floor_composite}
    return RunChange(metrics=metrics, tags={"scores_rubric": rubric.tag}, texts={RUBRIC: rubric.text}, at_ms=at_ms)


def _names(names: Iterable[str]) -> str:
    return json.dumps(sorted(names), ensure_ascii=False)


def _judgement_json(given: Judgement) -> dict[str, Any]:
    value = {key: getattr(given, key) for key in ("sheet", "exported", "at", "rubric", "format_ok", "held")}
    return value | {"means": dict(given.means), "tips": [tip_score_json(tip) for tip in given.tips]}


def tip_score_json(tip: TipScore) -> dict[str, Any]:
    """One tip's scores as plain JSON."""
    return {"scores": dict(tip.scores), "overlong": tip.overlong, "note": tip.note}


def read_tip_score(raw: Mapping[str, Any]) -> TipScore:
    """What `tip_score_json` wrote."""
    return TipScore({name: int(score) for name, score in raw["scores"].items()}, bool(raw["overlong"]), raw["note"])


def _judgement(judge: str, raw: Mapping[str, Any]) -> Judgement:
    return Judgement(
        judge=judge,
        sheet=raw["sheet"],
        exported=raw["exported"],
        at=raw["at"],
        rubric=raw["rubric"],
        format_ok=bool(raw["format_ok"]),
        tips=tuple(read_tip_score(tip) for tip in raw["tips"]),
        means={name: float(value) for name, value in raw["means"].items()},
        held=bool(raw["held"]),
    )
