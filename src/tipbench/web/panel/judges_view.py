"""The judging of an experiment as its page shows it: judges, how far they can be trusted, sheets and batches. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.judge.drift_drawing import DriftPoint, drift_points, drift_sentence
from tipbench.judge.status import JudgeStatus, JudgingStatus, OpenSheet, SheetHistory
from tipbench.web.panel.showing import bias_words, number

_GOOD_ALPHA, _FAIR_ALPHA = 0.8, 0.667  # Krippendorff's own advice
MOST_CLOSED = 10  # batches of one judge that are listed; what is held or open always is
_URGENT = {"held": 0, "open": 1}  # what waits for an admin first, then what waits for its judge

Told = Mapping[str, Any]  # a batch, or a skip, as the API tells it


@dataclass(frozen=True)
class ScaleView:
    """One judge on one scale."""

    scale: str
    words: str  # "0.4 too high"
    interval: tuple[float, float] | None
    error: float | None
    beyond: bool
    points: tuple[DriftPoint, ...]  # over time, oldest first

    @property
    def said(self) -> str:
        """The points in words."""
        return drift_sentence(self.points)


@dataclass(frozen=True)
class JudgeView:
    """One judge: the numbers, the newest verdict, the scales over time."""

    status: JudgeStatus
    verdict: str  # fine, beyond the limit, unknown
    sentences: tuple[str, ...]
    scales: tuple[ScaleView, ...]


@dataclass(frozen=True)
class SheetView:
    """One sheet in the list."""

    sheet: str
    judge: str | None
    exported: str
    status: str  # exported, applied, held
    provisional: bool
    items: int
    finished: int
    verdict: str | None
    accepted: str | None

    @property
    def held(self) -> bool:
        return self.status == "held"


@dataclass(frozen=True)
class BatchView:
    """One batch in the list."""

    told: Told
    skips: tuple[Told, ...]
    why: tuple[str, ...]  # it is held: what the controls say

    @property
    def sheet(self) -> str:
        return str(self.told["sheet"])

    @property
    def status(self) -> str:
        return str(self.told["status"])


@dataclass(frozen=True)
class JudgeBatches:
    """What one judge does in the browser."""

    judge: str
    count: Mapping[str, int]  # of batches by status
    skipped: int
    minutes: float | None  # of a submitted item, the median
    batches: tuple[BatchView, ...]
    left_out: int  # closed ones that are not listed


def judge_views(judging: JudgingStatus) -> list[JudgeView]:
    """Every judge, people first."""
    return [_judge(judging.history, status) for status in judging.judges]


def _judge(history: Sequence[SheetHistory], status: JudgeStatus) -> JudgeView:
    own = [each for each in history if each.judge == status.judge and each.provisional == status.provisional]
    drift = own[-1].drift if own and own[-1].drift else {}
    scales = tuple(_scale(history, status, scale) for scale in drift.get("scales", ()))
    return JudgeView(status, drift.get("verdict", "unknown"), tuple(drift_words(drift)), scales)


def _scale(history: Sequence[SheetHistory], status: JudgeStatus, scale: Mapping[str, Any]) -> ScaleView:
    points = drift_points(history, status.judge, scale["scale"], provisional=status.provisional)
    ends = scale["interval"]
    return ScaleView(
        scale=scale["scale"],
        words=bias_words(scale["bias"]),
        interval=(ends[0], ends[1]) if ends else None,
        error=scale["error"],
        beyond=bool(scale["beyond"]),
        points=tuple(points),
    )


def drift_words(drift: Mapping[str, Any] | None) -> list[str]:
    """What the hidden controls say of a judge, one sentence each; never which items were controls."""
    if not drift:
        return []
    said = [
        f"{scale['scale']} is scored {bias_words(scale['bias'])}, more than chance explains."
        for scale in drift.get("scales", ())
        if scale["beyond"]
    ]
    if drift.get("error_beyond"):
        said.append(
            f"The scores are {_short(drift['error'])} points away from the agreed ones on average; the limit is "
            f"{_short(drift['error_limit'])}."
        )
    if drift.get("contrast_beyond"):
        said.append(
            "Good and poor tips get scores that are too much alike: where the agreed scores are 1 point apart, these "
            f"are {_short(drift['contrast'])} apart on average; the limit is {_short(drift['contrast_limit'])}."
        )
    if said or "error" not in drift:
        return said
    if drift["verdict"] == "unknown":
        return ["Unknown: too few control tips have been scored to tell whether the judge drifts."]
    return [f"No drift shows: the scores are {_short(drift['error'])} points away from the agreed ones on average."]


def sheet_views(judging: JudgingStatus) -> list[SheetView]:
    """Every sheet, newest first."""
    back = {each.sheet: _returned(each) for each in judging.history}
    out = {each.sheet: _handed_out(each) for each in judging.open_sheets if each.sheet not in back}
    return sorted({**back, **out}.values(), key=lambda sheet: (sheet.exported, sheet.sheet), reverse=True)


def _returned(sheet: SheetHistory) -> SheetView:
    verdict = (sheet.drift or {}).get("verdict")
    return SheetView(
        sheet.sheet, sheet.judge or None, sheet.exported, sheet.status, sheet.provisional, sheet.items,
        sheet.finished, verdict, sheet.accepted,
    )  # fmt: skip


def _handed_out(sheet: OpenSheet) -> SheetView:
    return SheetView(
        sheet.sheet, sheet.judge, sheet.exported, "exported", sheet.provisional, sheet.items, sheet.finished, None, None
    )


def batch_views(
    told: Iterable[Told],
    skips: Callable[[str], Sequence[Told]],
    minutes: Mapping[str, float],
    judging: JudgingStatus,
) -> list[JudgeBatches]:
    """Batches by judge, whoever has a held one first; `told` has those last worked on first."""
    drifts = {each.sheet: each.drift for each in judging.history}
    by_judge: dict[str, list[Told]] = {}
    for batch in sorted(told, key=_urgency):
        by_judge.setdefault(batch["judge"], []).append(batch)
    ordered = sorted(by_judge.items(), key=lambda each: (_urgency(each[1][0]), each[0]))
    return [_judges_batches(judge, own, skips, minutes.get(judge), drifts) for judge, own in ordered]


def _urgency(batch: Told) -> int:
    return _URGENT.get(batch["status"], len(_URGENT))


def _judges_batches(
    judge: str,
    own: Sequence[Told],
    skips: Callable[[str], Sequence[Told]],
    minutes: float | None,
    drifts: Mapping[str, Mapping[str, Any] | None],
) -> JudgeBatches:
    count = Counter(batch["status"] for batch in own)
    shown = own[: count["held"] + count["open"] + MOST_CLOSED]
    views = tuple(
        BatchView(
            batch,
            tuple(skips(batch["sheet"])) if batch["skipped"] else (),
            tuple(drift_words(drifts.get(batch["sheet"]))) if batch["status"] == "held" else (),
        )
        for batch in shown
    )
    skipped = sum(batch["skipped"] for batch in own)
    return JudgeBatches(judge, count, skipped, minutes, views, len(own) - len(shown))


def alpha_words(alpha: float | None) -> str:
    """How far judges agree, in words."""
    if alpha is None:
        return "unknown: too few answers have two judges"
    if alpha >= _GOOD_ALPHA:
        return "good"
    return "fair: good enough for careful conclusions" if alpha >= _FAIR_ALPHA else "weak: look at the rubric together"


def _short(value: float | None) -> str:
    return number(None if value is None else round(value, 1) + 0.0, 1)
