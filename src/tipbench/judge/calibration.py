"""Drift: how far a judge is from the agreed scores of the hidden control tips, with a stated false-alarm rate.

An honest judge is taken to score `clip(round(reference + noise))`, noise normal and independent between tips and
scales. Noise and errors are in points of a five-step scale: on another range they are stretched by (max − min) / 4,
but never under half a step. Clipping pulls an honest score away from the ends, so that the plain mean of
score − reference would blame whoever judges many very good tips.

- Bias, for each scale: score − what an honest judge gives on average at that reference, by the exact distribution for
  the noise that fits this judge's own errors on that scale. Two-sided t test; Bonferroni over the rubric's scales. The
  interval has the level of the test: it leaves out zero exactly when the scale is beyond the limit.
- Error, pooled over scales: the mean absolute difference from the reference. The limit is the upper quantile for an
  honest judge of noise 1.0 at these very references (exact mean, variance and skewness; Cornish–Fisher).
- Contrast, pooled: the slope of score on reference. A judge who gives everybody the middle has no bias, and little
  error among middling references, but no contrast. The limit is the lower quantile for the same honest judge.

The family errs on an honest judge in at most FALSE_ALARM_RATE of sheets: BIAS_SHARE for all biases together, half
of the rest for the error and half for the contrast. Noise that is alike within a tip widens the two pooled measures:
at noise 1.0 and a correlation of 0.5 between scales an honest judge is held in 7 % (measured); at 0.7 nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.plan.rubric import Rubric, Scale

MIN_CONTROLS = 20  # fewer control tips give no verdict
FALSE_ALARM_RATE = 0.05
BIAS_SHARE = 0.04  # of it, for the biases of all scales together
POOLED_SHARE = (FALSE_ALARM_RATE - BIAS_SHARE) / 2  # each, for error and contrast
POOLED_QUANTILE = NormalDist().inv_cdf(1 - POOLED_SHARE)
HONEST_NOISE = 1.0  # the most noise that is still called honest
NOISES = np.linspace(0.05, 1.5, 59)  # what a judge's own noise may be found to be
LEAST_SPREAD = 0.25  # of errors: a judge who never varies is not infinitely sure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Verdict(StrEnum):
    """What the controls say about a judge."""

    FINE = "fine"
    BEYOND = "beyond the limit"
    UNKNOWN = "unknown"  # too few controls scored


@dataclass(frozen=True)
class ControlScore:
    """One scored control tip."""

    scores: Mapping[str, int]
    reference: Mapping[str, int]


@dataclass(frozen=True)
class ScaleDrift:
    """One scale, in its own points; None where there is too little to say."""

    scale: str
    n: int | None  # None: not told
    bias: float | None  # mean of score − what an honest judge gives at that reference
    interval: tuple[float, float] | None  # of the bias, at the level of the test
    difference: float | None  # plain mean of score − reference
    error: float | None  # mean absolute difference
    beyond: bool


@dataclass(frozen=True)
class Drift:
    """A judge measured on controls. Pooled numbers are in points of a five-step scale."""

    verdict: Verdict
    n_controls: int | None  # None: not told
    false_alarm_rate: float
    scales: tuple[ScaleDrift, ...]
    error: float | None  # mean absolute difference from the references
    error_limit: float | None
    error_beyond: bool
    contrast: float | None  # slope of score on reference: 1 follows it fully, 0 not at all
    contrast_limit: float | None
    contrast_beyond: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values, unrounded; None where unknown."""
        scales = [{**asdict(scale), "interval": scale.interval and list(scale.interval)} for scale in self.scales]
        return {**asdict(self), "verdict": self.verdict.value, "scales": scales}

    def sentences(self, rubric: Rubric) -> list[str]:
        """The verdict for people: scale, direction and size, never which items were controls."""
        if self.verdict is not Verdict.BEYOND:
            return [self._in_one_sentence(_points(rubric))]
        ranges = {scale.name: f"{scale.min} to {scale.max}" for scale in rubric.scales}
        said = [_bias_sentence(scale, ranges[scale.scale]) for scale in self.scales if scale.beyond]
        if self.error_beyond and self.error is not None and self.error_limit is not None:
            points = _points(rubric)
            said.append(
                f"The scores are {self.error:.1f} {points} away from the agreed ones on average, "
                f"more than the limit of {self.error_limit:.1f}."
            )
        if self.contrast_beyond and self.contrast is not None and self.contrast_limit is not None:
            said.append(
                "Good and poor tips get scores that are too much alike: where the agreed scores are 1 point apart, "
                f"these are {self.contrast:.1f} apart on average; the limit is {self.contrast_limit:.1f}."
            )
        return said

    def _in_one_sentence(self, points: str) -> str:
        if self.verdict is Verdict.FINE and self.error is not None and self.error_limit is not None:
            count = "the" if self.n_controls is None else self.n_controls
            return (
                f"No drift shows on {count} control tips: the scores are {self.error:.1f} {points} away from "
                f"the agreed ones on average (limit {self.error_limit:.1f}), and no scale is too high or too low."
            )
        return (
            f"Whether the judge drifts is unknown: that takes {MIN_CONTROLS} control tips scored on every scale, "
            "and there are not so many yet."
        )


def _points(rubric: Rubric) -> str:
    five_steps = all(scale.max - scale.min == 4 for scale in rubric.scales)
    return "points" if five_steps else "points of a five-step scale"


def _bias_sentence(scale: ScaleDrift, ends: str) -> str:
    bias, (low, high) = scale.bias or 0.0, scale.interval or (0.0, 0.0)
    least, most = sorted((abs(low), abs(high)))
    return (
        f"{scale.scale} is scored too {'high' if bias > 0 else 'low'}: by {abs(bias):.1f} points on average, "
        f"on a scale of {ends} (allowing for chance, by {least:.1f} to {most:.1f})."
    )


def measure_drift(scales: Sequence[Scale], scored: Sequence[ControlScore]) -> Drift:
    """Hold the scores of control tips against their references; under MIN_CONTROLS the verdict is unknown."""
    columns = [_column(scale, scored) for scale in scales]
    by_scale = tuple(_scale_drift(column, BIAS_SHARE / len(scales)) for column in columns)
    used = [column for column in columns if column.n]
    enough = bool(columns) and all(column.n >= MIN_CONTROLS for column in columns)
    error, error_limit = _error(used)
    contrast, contrast_limit = _contrast(used)
    error_beyond = enough and error is not None and error_limit is not None and error > error_limit
    contrast_beyond = enough and contrast is not None and contrast_limit is not None and contrast < contrast_limit
    beyond = error_beyond or contrast_beyond or any(scale.beyond for scale in by_scale)
    known = Verdict.FINE if enough else Verdict.UNKNOWN
    return Drift(
        verdict=Verdict.BEYOND if beyond else known,
        n_controls=len(scored),
        false_alarm_rate=FALSE_ALARM_RATE,
        scales=by_scale,
        error=error,
        error_limit=error_limit,
        error_beyond=error_beyond,
        contrast=contrast,
        contrast_limit=contrast_limit,
        contrast_beyond=contrast_beyond,
    )


@dataclass(frozen=True)
class _Column:
    """One scale's scores and references, as steps above its lowest; `unit` is a point of a five-step scale."""

    scale: Scale
    score: Ints
    reference: Ints
    counts: Ints  # how often each reference occurs
    unit: float

    @property
    def n(self) -> int:
        return len(self.score)


def _column(scale: Scale, scored: Sequence[ControlScore]) -> _Column:
    name = scale.name
    pairs = [(tip.scores[name], tip.reference[name]) for tip in scored if name in tip.scores and name in tip.reference]
    values = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    if values.size and (values.min() < scale.min or values.max() > scale.max):
        raise ValueError(f"{name} goes from {scale.min} to {scale.max}; seen {values.min()} to {values.max()}.")
    score, reference = (values - scale.min).T
    steps = scale.max - scale.min
    return _Column(scale, score, reference, np.bincount(reference, minlength=steps + 1), _unit(steps))


def _unit(steps: int) -> float:
    return max(steps / 4, 0.5)


@dataclass(frozen=True)
class _Honest:
    """The errors of an honest judge: one column per reference, one row per noise, the last for HONEST_NOISE."""

    mean: Floats
    variance: Floats
    absolute: Floats  # mean, variance and third central moment of |error|, at HONEST_NOISE: what sums over tips


@lru_cache(maxsize=64)
def _honest(steps: int) -> _Honest:
    """For a scale of `steps` steps above its lowest, by the exact distribution of clip(round(reference + noise))."""
    from scipy.special import ndtr

    noises = np.append(NOISES, HONEST_NOISE) * _unit(steps)
    values = np.arange(steps + 1)
    below = ndtr((values[:-1] + 0.5 - values[:, None])[None] / noises[:, None, None])
    ends = np.ones((len(noises), steps + 1, 1))
    chances = np.diff(np.concatenate([0 * ends, below, ends], axis=2), axis=2)
    error = values[None, :] - values[:, None]
    mean = (chances * error).sum(axis=2)
    variance = (chances * error**2).sum(axis=2) - mean**2
    one, two, three = ((chances[-1] * np.abs(error) ** power).sum(axis=1) for power in (1, 2, 3))
    absolute = np.stack([one, two - one**2, three - 3 * one * two + 2 * one**3])
    return _Honest(mean, variance, absolute)


def _own_noise(column: _Column, honest: _Honest) -> int:
    """The row whose error variance, at these references, is nearest to the judge's; a shift does not enter."""
    shares = column.counts / column.n
    expected = honest.variance @ shares + honest.mean**2 @ shares - (honest.mean @ shares) ** 2
    return int(np.abs(expected - np.var(column.score - column.reference)).argmin())


def _scale_drift(column: _Column, rate: float) -> ScaleDrift:
    name, n = column.scale.name, column.n
    if not n:
        return ScaleDrift(name, 0, None, None, None, None, beyond=False)
    honest = _honest(column.scale.max - column.scale.min)
    error = column.score - column.reference
    excess = error - honest.mean[_own_noise(column, honest)][column.reference]
    bias = float(excess.mean())
    interval = None
    if n >= 2:
        spread = max(float(excess.std(ddof=1)), LEAST_SPREAD * column.unit)
        reach = _t_quantile(rate, n - 1) * spread / sqrt(n)
        interval = (bias - reach, bias + reach)
    beyond = n >= MIN_CONTROLS and interval is not None and not interval[0] <= 0 <= interval[1]
    return ScaleDrift(name, n, bias, interval, float(error.mean()), float(np.abs(error).mean()), beyond)


@lru_cache(maxsize=1024)
def _t_quantile(rate: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - rate / 2))


def _error(columns: Sequence[_Column]) -> tuple[float | None, float | None]:
    """The pooled mean absolute error, and the most that chance explains."""
    total = sum(column.n for column in columns)
    if not total:
        return None, None
    seen = sum(float(np.abs(column.score - column.reference).sum()) / column.unit for column in columns)
    mean = variance = third = 0.0
    for column in columns:
        cumulants = _honest(column.scale.max - column.scale.min).absolute @ column.counts
        mean += float(cumulants[0]) / column.unit
        variance += float(cumulants[1]) / column.unit**2
        third += float(cumulants[2]) / column.unit**3
    z = POOLED_QUANTILE
    skewed = z + (z**2 - 1) / 6 * third / variance**1.5
    return seen / total, (mean + skewed * sqrt(variance)) / total


def _contrast(columns: Sequence[_Column]) -> tuple[float | None, float | None]:
    """The pooled slope of score on reference, and the least that chance explains; None when no reference differs."""
    seen = expected = variance = weight = 0.0
    for column in columns:
        honest = _honest(column.scale.max - column.scale.min)
        values = np.arange(len(column.counts))
        away = (values - float(values @ column.counts) / column.n) / column.unit
        weights = away * column.counts
        seen += float(away[column.reference] @ column.score) / column.unit
        expected += float(weights @ (values + honest.mean[-1])) / column.unit
        variance += float(weights * away @ honest.variance[-1]) / column.unit**2
        weight += float(weights @ away)
    if weight <= 0:
        return None, None
    return seen / weight, (expected - POOLED_QUANTILE * sqrt(variance)) / weight
