"""Scores of one cell: the judgements of each judge, and the metrics and tags of the cell's run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any

from tipbench.errors import CorruptText
from tipbench.judge.sheet import ItemScore, TipScore
from tipbench.plan.rubric import FLAGS, Rubric
from tipbench.record.run import RunChange, RunState

FORMAT = "tipbench-scores/1"
SCORES = "artifact:scores.json"
RUBRIC = "artifact:rubric.md"
PROVISIONAL = "provisional_"  # prefix of metrics
_CACHE_SIZE = 5000  # cells; enough for two large experiments
_MAX_REPLACED = 5  # replaced judgements per sheet in a cell's history; the sheet's run stores all of them


@dataclass(frozen=True)
class Judgement:
    """One judge's scores of one cell under one rubric."""

    judge: str
    sheet: str
    exported: str  # ISO time of the sheet's export
    applied_at: str  # ISO time; `at` in JSON
    rubric: str  # id@sha256
    format_ok: bool
    tips: tuple[TipScore, ...]
    means: Mapping[str, float]  # over the tips, of the composite, each scale and each flag
    held: bool = False  # stored but not counted, because the drift limit was exceeded

    def equals_except_time(self, other: Judgement) -> bool:
        """Return whether the judgements are equal, ignoring the time of applying."""
        return replace(self, applied_at="") == replace(other, applied_at="")


@dataclass(frozen=True)
class CellScores:
    """All judgements of a cell: the current ones by judge, and the replaced ones.

    A judge may have both a counted and a held judgement, from different sheets.
    """

    applied: Mapping[str, Judgement]  # by judge; not held
    provisional: Mapping[str, Judgement]  # by judge; do not count
    history: tuple[Judgement, ...] = ()  # replaced judgements, oldest first
    held: Mapping[str, Judgement] = field(default_factory=dict)  # by judge; do not count

    def with_judgement(self, new: Judgement, *, provisional: bool = False) -> CellScores:
        """Add a judgement. A replaced one moves to the history unless provisional. Return self if nothing changes."""
        if provisional:
            former = self.provisional.get(new.judge)
            same = former is not None and former.equals_except_time(new)
            return self if same else replace(self, provisional={**self.provisional, new.judge: new})
        return self._with_held(new) if new.held else self._with_applied(new)

    def without_judge(self, judge: str) -> CellScores:
        """Return the scores without this judge's judgements. Provisional ones are kept."""
        history = tuple(judgement for judgement in self.history if judgement.judge != judge)
        return replace(self, applied=_without(self.applied, judge), held=_without(self.held, judge), history=history)

    def _with_applied(self, new: Judgement) -> CellScores:
        """Add a counted judgement and remove the held one of the same sheet.

        A current judgement from a sheet exported later is not replaced.
        """
        current = self.applied.get(new.judge)
        released = _only_from_sheet(self.held.get(new.judge), new.sheet)
        keep_current = _is_of_later_sheet(current, new)
        if released is None and (keep_current or (current is not None and current.equals_except_time(new))):
            return self
        replaced = [released] if keep_current else _replaced_by(new, current, released)
        return replace(
            self,
            applied=self.applied if keep_current else {**self.applied, new.judge: new},
            held=_without(self.held, new.judge) if released else self.held,
            history=_shortened((*self.history, *filter(None, replaced))),
        )

    def _with_held(self, new: Judgement) -> CellScores:
        """Add a held judgement and withdraw the counted one of the same sheet.

        The judge's newest counted judgement from another sheet is restored from the history. A held judgement from a
        sheet exported later is not replaced.
        """
        withdrawn = _only_from_sheet(self.applied.get(new.judge), new.sheet)
        former = self.held.get(new.judge)
        keep_former = _is_of_later_sheet(former, new)
        if withdrawn is None and (keep_former or (former is not None and former.equals_except_time(new))):
            return self
        applied, history = self.applied, self.history
        if withdrawn is not None:
            applied = _without(applied, new.judge)
            latest_by_sheet = {judgement.sheet: judgement for judgement in history if judgement.judge == new.judge}
            restorable = [
                judgement
                for judgement in latest_by_sheet.values()
                if judgement.sheet != new.sheet and not judgement.held
            ]
            if restored := max(restorable, key=lambda judgement: judgement.exported, default=None):
                applied = {**applied, new.judge: restored}
                history = tuple(judgement for judgement in history if judgement is not restored)
        replaced = [withdrawn] if keep_former else _replaced_by(new, withdrawn, former)
        return replace(
            self,
            applied=applied,
            held=self.held if keep_former else {**self.held, new.judge: new},
            history=_shortened((*history, *filter(None, replaced))),
        )

    @cached_property
    def counted(self) -> list[Judgement]:
        """The judgements under the current rubric, which is the one of the sheet exported last."""
        if not self.applied:
            return []
        current = max(self.applied.values(), key=lambda judgement: judgement.exported).rubric
        return [judgement for judgement in self.applied.values() if judgement.rubric == current]

    @property
    def latest_provisional(self) -> Judgement | None:
        """The provisional judgement applied last, or None."""
        return max(self.provisional.values(), key=lambda judgement: judgement.applied_at, default=None)


NO_SCORES = CellScores({}, {})


def _only_from_sheet(judgement: Judgement | None, sheet: str) -> Judgement | None:
    return judgement if judgement is not None and judgement.sheet == sheet else None


def _is_of_later_sheet(judgement: Judgement | None, new: Judgement) -> bool:
    """Return whether the judgement comes from another sheet than `new`, and that sheet was exported later."""
    return judgement is not None and judgement.sheet != new.sheet and judgement.exported > new.exported


def _replaced_by(new: Judgement, *former: Judgement | None) -> list[Judgement | None]:
    """Return the former judgements that differ from `new`, ignoring the held flag and the time."""
    return [old for old in former if old is not None and replace(old, held=new.held, applied_at=new.applied_at) != new]


def _shortened(history: Sequence[Judgement]) -> tuple[Judgement, ...]:
    """Return the newest _MAX_REPLACED judgements of each sheet. Only the newest one keeps its notes.

    Without a limit, each revision would make the cell's run slower to read and write. Controls have no
    run, so a judge could tell them from answers by the time of an apply. The newest may be restored.
    """
    counts: Counter[str] = Counter()  # by sheet
    kept = []
    for judgement in reversed(history):
        counts[judgement.sheet] += 1
        if counts[judgement.sheet] <= _MAX_REPLACED:
            kept.append(judgement if counts[judgement.sheet] == 1 else _without_notes(judgement))
    return tuple(reversed(kept))


def _without_notes(judgement: Judgement) -> Judgement:
    return replace(judgement, tips=tuple(replace(tip, note="") for tip in judgement.tips))


def _without(judgements: Mapping[str, Judgement], judge: str) -> dict[str, Judgement]:
    return {name: judgement for name, judgement in judgements.items() if name != judge}


@lru_cache(maxsize=_CACHE_SIZE)  # the leaderboard, the judging status and the answers page read the same texts
def read_scores(text: str | None) -> CellScores:
    """Parse the content of `artifact:scores.json`; return empty scores for None."""
    if text is None:
        return NO_SCORES

    def parsed(judgements: Mapping[str, Any]) -> dict[str, Judgement]:
        return {judge: _judgement(judge, raw) for judge, raw in judgements.items()}

    try:
        raw = json.loads(text)
        judges, held = parsed(raw["judges"]), parsed(raw.get("held", {}))
        return CellScores(
            # Earlier versions of tipbench stored held judgements under "judges".
            applied={judge: judgement for judge, judgement in judges.items() if not judgement.held},
            provisional=parsed(raw["provisional"]),
            history=tuple(_judgement(each["judge"], each) for each in raw["history"]),
            held={judge: judgement for judge, judgement in judges.items() if judgement.held} | held,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptText(f"The text {SCORES} has an unexpected format ({type(exc).__name__}: {exc}).") from exc


def scores_text(scores: CellScores) -> str:
    """Return the content of `artifact:scores.json`."""

    def by_judge(judgements: Mapping[str, Judgement]) -> dict[str, Any]:
        return {judge: _judgement_json(judgement) for judge, judgement in sorted(judgements.items())}

    value = {
        "format": FORMAT,
        "judges": by_judge(scores.applied),
        "held": by_judge(scores.held),
        "provisional": by_judge(scores.provisional),
        "history": [{"judge": judgement.judge, **_judgement_json(judgement)} for judgement in scores.history],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tip_means(rubric: Rubric, score: ItemScore) -> dict[str, float]:
    """Return the means over a cell's tips of the composite, each scale and each flag."""
    means = {name: fmean(tip.scores[name] for tip in score.tips) for name in rubric.scale_names}
    means["format_ok"] = float(score.format_ok)
    means["overlong"] = fmean(tip.overlong for tip in score.tips)
    means["composite"] = fmean(
        rubric.composite(tip.scores, format_ok=score.format_ok, overlong=tip.overlong) for tip in score.tips
    )
    return means


def run_change(scores: CellScores, rubrics: Mapping[str, Rubric], at_ms: int) -> RunChange:
    """Return the update of the cell's run, with the text of the current rubric. `rubrics` are by `id@sha256`."""
    texts = {SCORES: scores_text(scores)}
    tags: dict[str, str] = {}
    metrics: dict[str, float] = {}
    counted = scores.counted
    if counted:
        rubric = counted[0].rubric
        metrics |= {name: fmean(judgement.means[name] for judgement in counted) for name in counted[0].means}
        tags |= {"state": str(RunState.JUDGED), "judge_pending": "false", "scores_rubric": rubric}
        if rubric in rubrics:
            texts[RUBRIC] = rubrics[rubric].text
    elif scores.held:
        tags |= {"state": str(RunState.PENDING), "judge_pending": "true"}
    tags["judges"] = json.dumps(sorted(judgement.judge for judgement in counted), ensure_ascii=False)
    tags["held"] = str(bool(scores.held)).lower()
    provisional = scores.latest_provisional
    if provisional is not None:
        metrics |= {PROVISIONAL + name: value for name, value in provisional.means.items() if name not in FLAGS}
        tags |= {"provisional_judge": provisional.judge, "provisional_rubric": provisional.rubric}
    return RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=at_ms)


def floor_change(rubric: Rubric, at_ms: int) -> RunChange:
    """Return the update of a cell without a usable tip, which gets the rubric's floor scores."""
    metrics = {**rubric.floor, "composite": rubric.floor_composite}
    return RunChange(metrics=metrics, tags={"scores_rubric": rubric.tag}, texts={RUBRIC: rubric.text}, at_ms=at_ms)


def _judgement_json(judgement: Judgement) -> dict[str, Any]:
    return {
        "sheet": judgement.sheet,
        "exported": judgement.exported,
        "at": judgement.applied_at,
        "rubric": judgement.rubric,
        "format_ok": judgement.format_ok,
        "held": judgement.held,
        "means": dict(judgement.means),
        "tips": [tip.to_json() for tip in judgement.tips],
    }


def _judgement(judge: str, raw: Mapping[str, Any]) -> Judgement:
    return Judgement(
        judge=judge,
        sheet=raw["sheet"],
        exported=raw["exported"],
        applied_at=raw["at"],
        rubric=raw["rubric"],
        format_ok=bool(raw["format_ok"]),
        tips=tuple(map(TipScore.from_json, raw["tips"])),
        means={name: float(value) for name, value in raw["means"].items()},
        held=bool(raw["held"]),
    )
