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
# Names of texts in a cell's run.
SCORES = "artifact:scores.json"
RUBRIC = "artifact:rubric.md"
PROVISIONAL = "provisional_"  # prefix of metrics
_CACHE_SIZE = 5000  # cells; enough for two large experiments
_MAX_REPLACED = 5  # replaced judgements per sheet in a cell's history; the sheet's run stores all of them


@dataclass(frozen=True)
class Judgement:
    """One judge's scores of one cell. Cells store a Judgement for each judge, sheets an ItemScore for each item."""

    judge: str
    sheet: str
    exported: str  # ISO time of the sheet's export
    applied_at: str  # ISO time; `at` in JSON
    rubric: str  # id@sha256
    format_ok: bool
    tips: tuple[TipScore, ...]
    means: Mapping[str, float]  # over the tips: see `tip_means`
    held: bool = False  # stored but not counted, because the drift limit was exceeded

    def equals_except_time(self, other: Judgement | None) -> bool:
        """Return whether the other judgement is equal, ignoring the time of applying."""
        return other is not None and replace(other, applied_at=self.applied_at) == self


@dataclass(frozen=True)
class CellScores:
    """All judgements of a cell: the current ones by judge, and the replaced ones.

    A judge may have both an applied and a held judgement, from different sheets.
    """

    applied: Mapping[str, Judgement]  # by judge; they count if their rubric is the current one
    provisional: Mapping[str, Judgement]  # by judge; do not count
    history: tuple[Judgement, ...] = ()  # replaced judgements, oldest first
    held: Mapping[str, Judgement] = field(default_factory=dict)  # by judge; do not count

    def with_judgement(self, new: Judgement, *, provisional: bool = False) -> CellScores:
        """Add a judgement. A replaced one moves to the history unless provisional. Return self if nothing changes."""
        if provisional:
            if new.equals_except_time(self.provisional.get(new.judge)):
                return self
            return replace(self, provisional={**self.provisional, new.judge: new})
        return self._with_held(new) if new.held else self._with_applied(new)

    def without_judge(self, judge: str) -> CellScores:
        """Return the scores without this judge's judgements. Provisional ones are kept."""
        history = tuple(judgement for judgement in self.history if judgement.judge != judge)
        return replace(self, applied=_without(self.applied, judge), held=_without(self.held, judge), history=history)

    def _with_applied(self, new: Judgement) -> CellScores:
        """Remove the held judgement of the same sheet. Add the applied one, unless one of a later sheet is applied."""
        current = self.applied.get(new.judge)
        released = _if_from_sheet(new.sheet, self.held.get(new.judge))
        if _later_sheet_exists(current, new):  # then only the run of its sheet stores `new`
            if released is None:
                return self
            applied = self.applied
            replaced = [released]
        elif released is None and new.equals_except_time(current):
            return self
        else:
            applied = {**self.applied, new.judge: new}
            replaced = _replaced_by(new, current, released)
        held = self.held if released is None else _without(self.held, new.judge)
        return replace(self, applied=applied, held=held, history=_limit_history((*self.history, *replaced)))

    def _with_held(self, new: Judgement) -> CellScores:
        """Add a held judgement, and withdraw the applied judgement of the same sheet.

        The judge's newest applied judgement of another sheet then counts again. A held judgement from a sheet exported
        later is not replaced.
        """
        former = self.held.get(new.judge)
        withdrawn = _if_from_sheet(new.sheet, self.applied.get(new.judge))
        if _later_sheet_exists(former, new):
            if withdrawn is None:
                return self
            held = self.held
            replaced = [withdrawn]
        elif withdrawn is None and new.equals_except_time(former):
            return self
        else:
            held = {**self.held, new.judge: new}
            replaced = _replaced_by(new, withdrawn, former)
        applied, history = self.applied, self.history
        if withdrawn is not None:
            applied = _without(applied, new.judge)
            # The history is oldest first, so the last judgement of each sheet remains.
            last_by_sheet = {each.sheet: each for each in history if each.judge == new.judge}
            restorable = [each for each in last_by_sheet.values() if each.sheet != new.sheet and not each.held]
            restored = max(restorable, key=lambda judgement: judgement.exported, default=None)
            if restored is not None:
                applied = {**applied, new.judge: restored}
                history = tuple(judgement for judgement in history if judgement is not restored)
        return replace(self, applied=applied, held=held, history=_limit_history((*history, *replaced)))

    @cached_property
    def counted(self) -> list[Judgement]:
        """The applied judgements under the current rubric. The sheet exported last has the current rubric."""
        if not self.applied:
            return []
        newest = max(self.applied.values(), key=lambda judgement: judgement.exported)
        return [judgement for judgement in self.applied.values() if judgement.rubric == newest.rubric]

    @property
    def latest_provisional(self) -> Judgement | None:
        """The provisional judgement applied last, or None."""
        return max(self.provisional.values(), key=lambda judgement: judgement.applied_at, default=None)


NO_SCORES = CellScores(applied={}, provisional={})


def _if_from_sheet(sheet: str, judgement: Judgement | None) -> Judgement | None:
    return judgement if judgement is not None and judgement.sheet == sheet else None


def _later_sheet_exists(current: Judgement | None, new: Judgement) -> bool:
    """Return whether the current judgement is from a sheet exported later than that of `new`."""
    return current is not None and current.sheet != new.sheet and current.exported > new.exported


def _replaced_by(new: Judgement, *former: Judgement | None) -> list[Judgement]:
    """Return the former judgements that differ from `new` in more than `held` and the time of applying."""
    return [old for old in former if old is not None and replace(old, held=new.held, applied_at=new.applied_at) != new]


def _limit_history(history: Sequence[Judgement]) -> tuple[Judgement, ...]:
    """Return the newest _MAX_REPLACED judgements of each sheet. Only the newest keeps its notes: it may be restored.

    Without a limit, each revision of a cell would take longer to apply. Controls have no history, so the duration would
    reveal to a judge which items are controls.
    """
    seen: Counter[str] = Counter()  # by sheet
    kept = []
    for judgement in reversed(history):
        seen[judgement.sheet] += 1
        if seen[judgement.sheet] == 1:
            kept.append(judgement)
        elif seen[judgement.sheet] <= _MAX_REPLACED:
            tips_without_notes = tuple(replace(tip, note="") for tip in judgement.tips)
            kept.append(replace(judgement, tips=tips_without_notes))
    return tuple(reversed(kept))


def _without(judgements: Mapping[str, Judgement], judge: str) -> dict[str, Judgement]:
    return {name: judgement for name, judgement in judgements.items() if name != judge}


@lru_cache(maxsize=_CACHE_SIZE)  # the leaderboard, the judging status and the answers page read the same texts
def read_scores(text: str | None) -> CellScores:
    """Parse the content of `artifact:scores.json`; return empty scores for None."""
    if text is None:
        return NO_SCORES

    def parse_by_judge(raw_judgements: Mapping[str, Any]) -> dict[str, Judgement]:
        return {judge: _parse_judgement(judge, each) for judge, each in raw_judgements.items()}

    try:
        raw = json.loads(text)
        # Earlier versions of tipbench stored held judgements under "judges", too.
        applied_or_held = parse_by_judge(raw["judges"])
        held = parse_by_judge(raw.get("held", {}))
        return CellScores(
            applied={judge: judgement for judge, judgement in applied_or_held.items() if not judgement.held},
            provisional=parse_by_judge(raw["provisional"]),
            history=tuple(_parse_judgement(each["judge"], each) for each in raw["history"]),
            held={judge: judgement for judge, judgement in applied_or_held.items() if judgement.held} | held,
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
    """Return the means over an answer's tips: of the composite, of each scale, and of each flag as 0 or 1."""
    means = {name: fmean(tip.scores[name] for tip in score.tips) for name in rubric.scale_names}
    means["format_ok"] = float(score.format_ok)
    means["overlong"] = fmean(tip.overlong for tip in score.tips)
    means["composite"] = fmean(
        rubric.composite(tip.scores, format_ok=score.format_ok, overlong=tip.overlong) for tip in score.tips
    )
    return means


def run_change(scores: CellScores, rubrics: Mapping[str, Rubric], at_ms: int) -> RunChange:
    """Return the update of the cell's run. It stores the current rubric's text, if `rubrics` (by id@sha256) has it."""
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
        # Sets back a cell that was judged before.
        tags |= {"state": str(RunState.PENDING), "judge_pending": "true"}
    tags["judges"] = json.dumps(sorted(judgement.judge for judgement in counted), ensure_ascii=False)
    tags["held"] = str(bool(scores.held)).lower()
    provisional = scores.latest_provisional
    if provisional is not None:
        # Without flags: they are computed, and automatic judges do not correct them.
        metrics |= {PROVISIONAL + name: value for name, value in provisional.means.items() if name not in FLAGS}
        tags |= {"provisional_judge": provisional.judge, "provisional_rubric": provisional.rubric}
    return RunChange(metrics=metrics, tags=tags, texts=texts, at_ms=at_ms)


def floor_change(rubric: Rubric, at_ms: int) -> RunChange:
    """Return the update that gives the rubric's floor scores to a cell without a usable tip."""
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


def _parse_judgement(judge: str, raw: Mapping[str, Any]) -> Judgement:
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
