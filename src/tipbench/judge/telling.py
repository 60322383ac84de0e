"""What applying tells the judge: enough to act on, never enough to find out which items measure them.

A judge may change one item, or fill in one more, and apply again as often as they like. So a dry run says of the drift
nothing but the verdict; a real one no number before there is a verdict, and then one decimal. The exact numbers are in
the sheet's run and in `judge status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tipbench.judge.agreement import SelfAgreement
from tipbench.judge.calibration import Drift, ScaleDrift, Verdict
from tipbench.judge.judging import SheetStatus
from tipbench.plan.rubric import Rubric


@dataclass(frozen=True)
class Change:
    """What applying does to one item, as its judge sees it: hidden items show like all others."""

    item: str
    before: Mapping[str, float] | None  # means of the scales and the composite; None while they do not count
    after: Mapping[str, float] | None
    given: Mapping[str, float] | None = None  # what the sheet says now, whether it counts or not

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"item": self.item, "before": self.before, "after": self.after, "given": self.given}


@dataclass(frozen=True)
class Applied:
    """How an apply ended. `drift`, `self_agreement` and `alpha` are exact; what is told of them is in `to_json`."""

    sheet: str
    rubric: Rubric
    judge: str
    status: SheetStatus
    finished: int  # items with every score, hidden ones included: the judge cannot tell them apart
    unfinished: int
    drift: Drift
    self_agreement: SelfAgreement | None = None
    alpha: Mapping[str, float | None] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    accepted: str | None = None
    dry_run: bool = False
    blank: int = 0  # items that are blank in the file and have scores from before
    deleted: int = 0  # answers whose run was deleted in MLflow

    @property
    def held(self) -> bool:
        return self.status is SheetStatus.HELD

    def to_json(self) -> dict[str, Any]:
        """What scripts read."""
        whole = not self.unfinished and not self.dry_run
        itself = self.self_agreement if whole else None
        return {
            "sheet": self.sheet,
            "status": str(self.status),
            "judge": self.judge,
            "applied": 0 if self.held else self.finished,
            "held": self.finished if self.held else 0,
            "unfinished": self.unfinished,
            "blank": self.blank,
            "deleted": self.deleted,
            "changed": len(self.changes),
            "errors": [],
            "drift": {"verdict": self.drift.verdict.value} if self.dry_run else self._told().to_json(),
            "self_agreement": _coarse(itself.to_json()) if itself else None,
            "alpha": _coarse(dict(self.alpha)) if whole else {},
            "drift_accepted": self.accepted,
        }

    def sentences(self) -> list[str]:
        """For people, one line each: the drift, what was left out, what stands."""
        told = [f"drift: {self.drift.verdict}"] if self.dry_run else self._told().sentences(self.rubric)
        if self.blank:
            told.append(f"{_count(self.blank, 'item is', 'items are')} blank in the file; their earlier scores stand")
        if self.deleted:
            gone = _count(self.deleted, "answer was", "answers were")
            told.append(
                f"{gone} deleted in MLflow; {'its' if self.deleted == 1 else 'their'} scores stay with the sheet"
            )
        return told

    def _told(self) -> Drift:
        drift = self.drift
        known, n = drift.verdict is not Verdict.UNKNOWN, None if self.unfinished else drift.n_controls
        return replace(
            drift,
            n_controls=n if known else None,
            scales=tuple(_told_scale(scale, known=known, n=n) for scale in drift.scales),
            error=_rounded(drift.error) if known else None,
            error_limit=_rounded(drift.error_limit) if known else None,
            contrast=_rounded(drift.contrast) if known else None,
            contrast_limit=_rounded(drift.contrast_limit) if known else None,
        )


def _told_scale(scale: ScaleDrift, *, known: bool, n: int | None) -> ScaleDrift:
    if not known:
        return ScaleDrift(scale.scale, None, None, None, None, None, beyond=False)
    low, high = scale.interval or (0.0, 0.0)
    return replace(
        scale,
        n=n and scale.n,
        bias=_rounded(scale.bias),
        interval=scale.interval and (round(low, 1), round(high, 1)),
        difference=_rounded(scale.difference),
        error=_rounded(scale.error),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _coarse(value: Any) -> Any:
    """The same with one decimal everywhere: one item more or less hardly shows."""
    if isinstance(value, dict):
        return {name: _coarse(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_coarse(each) for each in value]
    return round(value, 1) if isinstance(value, float) else value


def _count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
