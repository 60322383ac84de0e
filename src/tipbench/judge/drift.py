"""Measures judges: agreement (Krippendorff's alpha), repeat consistency, and drift on the hidden controls."""

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


def alpha(scale: Scale, ratings: Sequence[Mapping[str, int]]) -> float | None:
    """Returns Krippendorff's ordinal alpha over tips, each a mapping of judge to score: 1 is full agreement, 0 chance.

    Only tips with two or more judges count. Returns None with fewer than two such tips, or if all their scores are
    equal, since alpha is undefined without variation.
    """
    units = [list(unit.values()) for unit in ratings if len(unit) >= 2]
    seen = {score for unit in units for score in unit}
    if len(units) < 2 or len(seen) < 2:
        return None
    if min(seen) < scale.min or max(seen) > scale.max:
        raise ValueError(f"{scale.name} goes from {scale.min} to {scale.max}; seen {min(seen)} to {max(seen)}.")
    from krippendorff import alpha as krippendorff_alpha

    steps = scale.max - scale.min + 1
    counts = np.array([np.bincount(np.array(unit) - scale.min, minlength=steps) for unit in units])
    domain = np.arange(scale.min, scale.max + 1)
    return float(krippendorff_alpha(value_counts=counts, value_domain=domain, level_of_measurement="ordinal"))


@dataclass(frozen=True)
class ScaleAgreement:
    """Self-agreement on one scale, over the tips scored twice."""

    scale: str
    n: int
    exact: float | None  # share of tips with the same score both times
    difference: float | None  # mean absolute difference, in the scale's points
    shift: float | None  # mean of later − earlier; positive if the judge became more lenient


@dataclass(frozen=True)
class SelfAgreement:
    """A judge's later scores compared with their own earlier ones."""

    n: int  # tips
    exact: float  # share of scores that are equal both times, over all scales
    scales: tuple[ScaleAgreement, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns unrounded JSON-serializable values; None where unknown."""
        return {**asdict(self), "scales": [asdict(scale) for scale in self.scales]}


def self_agreement(
    scales: Sequence[Scale], pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> SelfAgreement | None:
    """Compares the (earlier, later) scores of each tip scored twice; returns None if there are none."""
    by_scale = []
    total = equal = 0
    for scale in scales:
        name = scale.name
        changes = [later[name] - earlier[name] for earlier, later in pairs if name in earlier and name in later]
        n, same = len(changes), changes.count(0)
        total, equal = total + n, equal + same
        absolute = sum(abs(change) for change in changes)
        by_scale.append(
            ScaleAgreement(name, n, same / n, absolute / n, sum(changes) / n)
            if n
            else ScaleAgreement(name, 0, None, None, None)
        )
    return SelfAgreement(len(pairs), equal / total, tuple(by_scale)) if total else None


MIN_CONTROLS = 20  # with fewer control tips the verdict is unknown
FALSE_ALARM_RATE = 0.05
BIAS_SHARE = 0.04  # part of it, for the biases of all scales together
POOLED_SHARE = (FALSE_ALARM_RATE - BIAS_SHARE) / 2  # for error and contrast each
POOLED_QUANTILE = NormalDist().inv_cdf(1 - POOLED_SHARE)
HONEST_NOISE = 1.0  # the largest noise accepted as honest, in points of a five-step scale
NOISES = np.linspace(0.05, 1.5, 59)  # candidate values when estimating a judge's noise
LEAST_SPREAD = 0.25  # minimum spread of errors, so that a judge who never varies does not get a zero-width interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Verdict(StrEnum):
    """The result of measuring a judge on the controls."""

    FINE = "fine"
    BEYOND = "beyond the limit"
    UNKNOWN = "unknown"  # too few controls scored


@dataclass(frozen=True)
class ControlScore:
    """A judge's scores of one control tip, and its reference scores."""

    scores: Mapping[str, int]
    reference: Mapping[str, int]


@dataclass(frozen=True)
class ScaleDrift:
    """A judge's drift on one scale, in the scale's points; None where there is too little data."""

    scale: str
    n: int | None  # None if withheld
    bias: float | None  # mean of score − expected score of an honest judge at that reference
    interval: tuple[float, float] | None  # confidence interval of the bias, at the test's level
    difference: float | None  # plain mean of score − reference
    error: float | None  # mean absolute difference
    beyond: bool


@dataclass(frozen=True)
class Drift:
    """A judge's drift, measured on controls. Pooled values are in points of a five-step scale."""

    verdict: Verdict
    n_controls: int | None  # None if withheld
    false_alarm_rate: float
    scales: tuple[ScaleDrift, ...]
    error: float | None  # mean absolute difference from the references
    error_limit: float | None
    error_beyond: bool
    contrast: float | None  # slope of score on reference: 1 if scores follow it fully, 0 if not at all
    contrast_limit: float | None
    contrast_beyond: bool

    def to_json(self) -> dict[str, Any]:
        """Returns unrounded JSON-serializable values; None where unknown."""
        scales = [{**asdict(scale), "interval": scale.interval and list(scale.interval)} for scale in self.scales]
        return {**asdict(self), "verdict": self.verdict.value, "scales": scales}

    def sentences(self, rubric: Rubric) -> list[str]:
        """Returns the verdict for users: scale, direction and size, never which items were controls."""
        if self.verdict is Verdict.UNKNOWN:
            return [f"Drift unknown: fewer than {MIN_CONTROLS} control tips are scored on every scale."]
        five_steps = all(scale.max - scale.min == 4 for scale in rubric.scales)
        points = "points" if five_steps else "points of a five-step scale"
        if self.verdict is Verdict.FINE and self.error is not None and self.error_limit is not None:
            count = "the" if self.n_controls is None else self.n_controls
            sentence = (
                f"No drift found on {count} control tips: the scores differ from the reference scores by "
                f"{self.error:.1f} {points} on average (limit {self.error_limit:.1f}), and no scale is too high or low."
            )
            return [sentence]
        ranges = {scale.name: f"{scale.min} to {scale.max}" for scale in rubric.scales}
        sentences = []
        for scale in self.scales:
            if scale.beyond:
                bias, (low, high) = scale.bias or 0.0, scale.interval or (0.0, 0.0)
                least, most = sorted((abs(low), abs(high)))
                sentences.append(
                    f"{scale.scale} is scored too {'high' if bias > 0 else 'low'}: by {abs(bias):.1f} points on "
                    f"average, on a scale of {ranges[scale.scale]} (allowing for chance, by {least:.1f} to {most:.1f})."
                )
        if self.error_beyond and self.error is not None and self.error_limit is not None:
            sentences.append(
                f"The scores differ from the reference scores by {self.error:.1f} {points} on average, "
                f"more than the limit of {self.error_limit:.1f}."
            )
        if self.contrast_beyond and self.contrast is not None and self.contrast_limit is not None:
            sentences.append(
                "Good and poor tips get similar scores: where the reference scores are 1 point apart, "
                f"these are {self.contrast:.1f} apart on average; the limit is {self.contrast_limit:.1f}."
            )
        return sentences


def measure_drift(scales: Sequence[Scale], scored: Sequence[ControlScore]) -> Drift:
    """Compares the scores of control tips with their references; below MIN_CONTROLS the verdict is unknown."""
    columns = [_column(scale, scored) for scale in scales]
    by_scale = tuple(_scale_drift(column, BIAS_SHARE / len(scales)) for column in columns)
    used = [column for column in columns if column.n]
    enough = bool(columns) and all(column.n >= MIN_CONTROLS for column in columns)
    error, error_limit = _error(used)
    contrast, contrast_limit = _contrast(used)
    error_beyond = enough and error is not None and error_limit is not None and error > error_limit
    contrast_beyond = enough and contrast is not None and contrast_limit is not None and contrast < contrast_limit
    beyond = error_beyond or contrast_beyond or any(scale.beyond for scale in by_scale)
    return Drift(
        verdict=Verdict.BEYOND if beyond else Verdict.FINE if enough else Verdict.UNKNOWN,
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
    """One scale's scores and references, in steps above its minimum; `unit` is one point of a five-step scale."""

    scale: Scale
    score: Ints
    reference: Ints
    counts: Ints  # occurrences of each reference
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
    """Error moments of an honest judge: one column per reference, one row per noise, the last for HONEST_NOISE."""

    mean: Floats
    variance: Floats
    absolute: Floats  # mean, variance and third central moment of |error| at HONEST_NOISE; additive over tips


@lru_cache(maxsize=64)
def _honest(steps: int) -> _Honest:
    """Computes the moments for a scale of `steps` + 1 values, exactly, from clip(round(reference + noise))."""
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


def _scale_drift(column: _Column, rate: float) -> ScaleDrift:
    name, n = column.scale.name, column.n
    if not n:
        return ScaleDrift(name, 0, None, None, None, None, beyond=False)
    honest = _honest(column.scale.max - column.scale.min)
    error = column.score - column.reference
    # The noise whose error variance at these references is closest to the judge's; unaffected by a shift.
    shares = column.counts / n
    expected = honest.variance @ shares + honest.mean**2 @ shares - (honest.mean @ shares) ** 2
    noise = int(np.abs(expected - np.var(error)).argmin())
    excess = error - honest.mean[noise][column.reference]
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
    """Returns the pooled mean absolute error and the largest value explained by chance."""
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
    """Returns the pooled slope of score on reference and the smallest by chance; None if references do not vary."""
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
