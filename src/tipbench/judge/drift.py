"""Measurement of judges: agreement (Krippendorff's alpha), repeat consistency, and drift on the hidden controls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from math import asin, pi, sqrt
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.plan.rubric import Rubric, Scale
from tipbench.text import plural


def alpha(scale: Scale, scores: Sequence[Sequence[int]]) -> float | None:
    """Return Krippendorff's ordinal alpha over tips, each with one score per judge: 1 is full agreement, 0 chance.

    Only tips with two or more judges count. Returns None with fewer than two such tips, or if all their scores are
    equal, since alpha is undefined without variation.
    """
    units = [unit for unit in scores if len(unit) >= 2]
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
        """Return unrounded JSON-serializable values; None where unknown."""
        return asdict(self)


def self_agreement(
    scales: Sequence[Scale], pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> SelfAgreement | None:
    """Compare the (earlier, later) scores of each tip scored twice; return None if there are none."""
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
FALSE_ALARM_RATE = 0.05  # of the whole verdict, for an honest judge; its parts are below
BIAS_SHARE = 0.031  # for the biases of all scales together
POOLED_SHARE = 0.003  # for error and contrast each; the rest is a margin, because the design effect is estimated
POOLED_QUANTILE = NormalDist().inv_cdf(1 - POOLED_SHARE)
HONEST_NOISE = 1.0  # the largest noise accepted as honest, in points of a five-step scale
NOISES = np.linspace(0.05, 1.5, 59)  # candidate values when estimating a judge's noise
PRIOR_DEGREES = 20  # degrees of freedom that are added to those of the control answers in the test of a bias
MIN_SPREAD = 0.25  # minimum spread of errors, so that a judge who never varies does not get a zero-width interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Verdict(StrEnum):
    """The result of measuring a judge on the controls."""

    FINE = "fine"
    BEYOND = "beyond the limit"
    UNKNOWN = "unknown"  # too few controls scored


def verdict_words(verdict: str | None) -> str:
    """Return a stored verdict for readers."""
    return "too far off" if verdict == Verdict.BEYOND else verdict or "unknown"


@dataclass(frozen=True)
class ControlScore:
    """A judge's scores of one control tip, its reference scores, and the answer it was shown in."""

    scores: Mapping[str, int]
    reference: Mapping[str, int]
    answer: str = ""  # the item's id
    position: float = 0.0  # of the item on its sheet, from 0 to 1


@dataclass(frozen=True)
class ScaleDrift:
    """A judge's drift on one scale, in the scale's points; None where there is too little data."""

    scale: str
    n: int
    bias: float | None  # mean of score − expected score of an honest judge at that reference
    interval: tuple[float, float] | None  # confidence interval of the bias, at the test's level
    se: float | None  # standard error of the bias
    difference: float | None  # plain mean of score − reference
    error: float | None  # mean absolute difference
    beyond: bool


@dataclass(frozen=True)
class Drift:
    """A judge's drift, measured on controls. Pooled values are in points of a five-step scale."""

    verdict: Verdict
    n_controls: int
    false_alarm_rate: float
    scales: tuple[ScaleDrift, ...]
    error: float | None  # mean absolute difference from the references
    error_limit: float | None
    error_beyond: bool
    contrast: float | None  # slope of score on reference: 1 if scores follow it fully, 0 if not at all
    contrast_limit: float | None
    contrast_beyond: bool
    icc: float | None = None  # intraclass correlation: how alike a judge's errors are within an answer
    sheets: int = 1  # from which the controls were pooled

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values; None where unknown."""
        scales = [{**asdict(scale), "interval": scale.interval and list(scale.interval)} for scale in self.scales]
        return {**asdict(self), "verdict": self.verdict.value, "scales": scales}

    def sentences(self, rubric: Rubric, *, with_count: bool = True) -> list[str]:
        """Return the verdict for users: scale, direction and size, and with `with_count` the number of control tips."""
        if self.verdict is Verdict.UNKNOWN:
            return [f"Drift unknown: fewer than {MIN_CONTROLS} control tips are scored on every scale."]
        of_sheets = f" of your last {self.sheets} sheets" if self.sheets > 1 else ""
        five_steps = all(scale.max - scale.min == 4 for scale in rubric.scales)
        points = "points" if five_steps else "points of a five-step scale"
        if self.verdict is Verdict.FINE and self.error is not None and self.error_limit is not None:
            count = self.n_controls if with_count else "the"
            sentence = (
                f"No drift found on {count} control tips{of_sheets}: the scores differ from the reference scores by "
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
        return [*sentences, *limit_sentences(self.to_json(), points)]


def limit_sentences(drift: Mapping[str, Any], points: str = "points") -> Iterator[str]:
    """Yield a sentence for each limit over all scales that the drift, as JSON, exceeds."""
    if drift.get("error_beyond"):
        yield (
            f"The scores differ from the reference scores by {drift['error']:.1f} {points} on average, "
            f"more than the limit of {drift['error_limit']:.1f}."
        )
    if drift.get("contrast_beyond"):
        contrast = round(drift["contrast"], 1) + 0.0  # not "-0.0"
        yield (
            "Good and poor tips get similar scores: where the reference scores are 1 point apart, "
            f"these are {contrast:.1f} apart on average; the limit is {drift['contrast_limit']:.1f}."
        )


def measure_drift(scales: Sequence[Scale], scored: Sequence[ControlScore], *, sheets: int = 1) -> Drift:
    """Compare the scores of control tips with their references; below MIN_CONTROLS the verdict is unknown.

    A judge's errors are alike within an answer, so tips of one answer count for less than independent ones. All
    standard errors are therefore inflated by the design effect of the intraclass correlation, which is estimated from
    the judge's own errors on all scales.
    """
    columns = [_Column.of(scale, scored) for scale in scales]
    used = [column for column in columns if column.n]
    icc = _intraclass_correlation(used)
    by_scale = tuple(_scale_drift(column, BIAS_SHARE / len(scales), icc) for column in columns)
    enough = bool(columns) and all(column.n >= MIN_CONTROLS for column in columns)
    error, error_limit = _error(used, icc)
    contrast, contrast_limit = _contrast(used, icc)
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
        icc=icc,
        sheets=sheets,
    )


@dataclass(frozen=True)
class _Column:
    """The scores of the control tips on one scale, and their references, in steps above the scale's minimum."""

    scale: Scale
    score: Ints
    reference: Ints
    answer: Ints  # number of the answer that each tip is in
    position: Floats  # of that answer on its sheet, from 0 to 1

    @classmethod
    def of(cls, scale: Scale, scored: Sequence[ControlScore]) -> _Column:
        """Return the column of one scale; tips without a score or reference on it are left out."""
        name = scale.name
        used = [tip for tip in scored if name in tip.scores and name in tip.reference]
        values = np.array([(tip.scores[name], tip.reference[name]) for tip in used], dtype=np.int64).reshape(-1, 2)
        if values.size and (values.min() < scale.min or values.max() > scale.max):
            raise ValueError(f"{name} goes from {scale.min} to {scale.max}; seen {values.min()} to {values.max()}.")
        score, reference = (values - scale.min).T
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(tip.answer for tip in used))}
        answer = np.array([numbers[tip.answer] for tip in used], dtype=np.int64)
        return cls(scale, score, reference, answer, np.array([tip.position for tip in used]))

    @property
    def n(self) -> int:
        return len(self.score)

    @property
    def answers(self) -> int:
        return int(self.answer.max()) + 1

    @property
    def unit(self) -> float:
        """One point of a five-step scale, in steps of this scale."""
        return _unit(self.scale.max - self.scale.min)

    @property
    def honest(self) -> _Honest:
        return _honest(self.scale.max - self.scale.min)

    @cached_property
    def counts(self) -> Ints:
        """The number of tips by reference."""
        return np.bincount(self.reference, minlength=self.scale.max - self.scale.min + 1)

    @cached_property
    def error(self) -> Ints:
        return self.score - self.reference

    @cached_property
    def excess(self) -> Floats:
        """Errors without those that the ends of the scale cause for an honest judge as noisy as this one."""
        honest = self.honest
        # The noise whose error variance at these references is closest to the judge's; unaffected by a shift.
        shares = self.counts / self.n
        expected = honest.variance @ shares + honest.mean**2 @ shares - (honest.mean @ shares) ** 2
        noise = int(np.abs(expected - np.var(self.error)).argmin())
        return np.asarray(self.error - honest.mean[noise][self.reference])

    @property
    def spread(self) -> float:
        return max(float(self.excess.std(ddof=1)) if self.n > 1 else 0.0, MIN_SPREAD * self.unit)

    def design_effect(self, correlation: float | None, weights: NDArray[np.floating[Any]] | None = None) -> float:
        """Return how much the correlation within answers inflates the variance of a weighted sum of the errors."""
        weights = np.ones(self.n) if weights is None else weights
        total = float(weights @ weights)
        if not total:
            return 1.0
        clustering = float(np.square(np.bincount(self.answer, weights)).sum()) / total
        return 1 + (correlation or 0.0) * (clustering - 1)


def _intraclass_correlation(columns: Sequence[_Column]) -> float | None:
    """Return the share of the error variance that is between answers, by a one-way analysis pooled over the scales.

    At least 0. None unless there are two answers, one of them with two tips.
    """
    between = within = between_degrees = within_degrees = 0.0
    sizes = []
    for column in columns:
        tips = np.bincount(column.answer)
        if len(tips) < 2 or column.n == len(tips):
            continue
        error = (column.excess - column.excess.mean()) / column.spread
        explained = float((np.bincount(column.answer, error) ** 2 / tips).sum())
        between, within = between + explained, within + float(error @ error) - explained
        between_degrees, within_degrees = between_degrees + len(tips) - 1, within_degrees + column.n - len(tips)
        sizes.append((column.n - float(tips @ tips) / column.n) / (len(tips) - 1))
    if not sizes:
        return None
    above, below = between / between_degrees, within / within_degrees
    total = above + (float(np.mean(sizes)) - 1) * below
    return max(0.0, (above - below) / total) if total > 0 else 0.0


def _unit(steps: int) -> float:
    return max(steps / 4, 0.5)


@dataclass(frozen=True)
class _Honest:
    """Moments of an honest judge's error. One column per reference."""

    mean: Floats  # one row per noise in NOISES, and a last one for HONEST_NOISE
    variance: Floats  # likewise
    absolute: Floats  # mean, variance and third central moment of |error| at HONEST_NOISE; additive over tips


@lru_cache(maxsize=64)
def _honest(steps: int) -> _Honest:
    """Compute the exact moments for a scale of `steps` + 1 values, with score = clip(round(reference + noise))."""
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


def _scale_drift(column: _Column, rate: float, icc: float | None) -> ScaleDrift:
    name, n = column.scale.name, column.n
    if not n:
        return ScaleDrift(name, 0, None, None, None, None, None, beyond=False)
    bias, interval, se = float(column.excess.mean()), None, None
    if n >= 2:
        se = column.spread * sqrt(column.design_effect(icc) / n)
        reach = _t_quantile(rate, _degrees(column, icc)) * se
        interval = (bias - reach, bias + reach)
    beyond = n >= MIN_CONTROLS and interval is not None and not interval[0] <= 0 <= interval[1]
    difference, error = float(column.error.mean()), float(np.abs(column.error).mean())
    return ScaleDrift(name, n, bias, interval, se, difference, error, beyond)


def _degrees(column: _Column, icc: float | None) -> int:
    """Return the degrees of freedom of a bias: fewer than tips if the errors of an answer are alike."""
    return column.n - 1 if icc is None else min(column.n - 1, column.answers - 1 + PRIOR_DEGREES)


@lru_cache(maxsize=1024)
def _t_quantile(rate: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - rate / 2))


def _error(columns: Sequence[_Column], icc: float | None) -> tuple[float | None, float | None]:
    """Return the pooled mean absolute error and the largest value explained by chance."""
    total = sum(column.n for column in columns)
    if not total:
        return None, None
    seen = sum(float(np.abs(column.error).sum()) / column.unit for column in columns)
    rho = icc or 0.0
    alike = (sqrt(1 - rho**2) + rho * asin(rho) - 1) * 2 / (pi - 2)  # correlation of absolute normal values
    mean = variance = third = inflated = 0.0
    for column in columns:
        first, second, skew = column.honest.absolute @ column.counts / column.unit ** np.arange(1, 4)
        mean, variance, third = mean + float(first), variance + float(second), third + float(skew)
        inflated += float(second) * column.design_effect(alike)
    z = POOLED_QUANTILE
    skewed = z + (z**2 - 1) / 6 * third / variance**1.5
    return seen / total, (mean + skewed * sqrt(inflated)) / total


def _contrast(columns: Sequence[_Column], icc: float | None) -> tuple[float | None, float | None]:
    """Return the pooled slope of score on reference and the smallest by chance; None if references do not vary."""
    seen = expected = variance = weight = 0.0
    for column in columns:
        values = np.arange(len(column.counts))
        away = (values - float(values @ column.counts) / column.n) / column.unit  # from the mean reference
        weights, effect = away * column.counts, column.design_effect(icc, away[column.reference])
        seen += float(away[column.reference] @ column.score) / column.unit
        expected += float(weights @ (values + column.honest.mean[-1])) / column.unit
        variance += float(weights * away @ column.honest.variance[-1]) / column.unit**2 * effect
        weight += float(weights @ away)
    if weight <= 0:
        return None, None
    return seen / weight, (expected - POOLED_QUANTILE * sqrt(variance)) / weight


CUSUM_SLACK = 0.5  # standard errors per sheet that are not added up
CUSUM_LIMIT = 6.5  # an honest judge's sums of all scales stay below it over 20 sheets in 97 %
TREND_RATE = 0.01  # false-alarm rate of fatigue and compression each
_MIN_ANSWERS = 8


@dataclass(frozen=True)
class BiasSum:
    """A judge's bias on one scale added up over sheets (CUSUM), in standard errors: small drifts that persist."""

    scale: str
    sheets: int
    bias: float  # mean over the sheets, in the scale's points
    high: float
    low: float

    @property
    def beyond(self) -> bool:
        return max(self.high, self.low) > CUSUM_LIMIT


@dataclass(frozen=True)
class Slope:
    """The slope of a judge's errors, with its confidence interval."""

    value: float
    ci_low: float
    ci_high: float

    @property
    def beyond(self) -> bool:
        return abs(self.value) > 1e-9 and not self.ci_low <= 0 <= self.ci_high  # smaller values are rounding errors


@dataclass(frozen=True)
class Trends:
    """Trends of a judge over several sheets. Shown to admins; no sheet is held because of them."""

    sums: tuple[BiasSum, ...]
    fatigue: Slope | None  # growth of the absolute error from the first to the last item of a sheet
    compression: Slope | None  # error per point of the reference: negative if good and poor tips move together

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values; None where unknown."""
        return {
            "sums": [{**asdict(each), "limit": CUSUM_LIMIT, "beyond": each.beyond} for each in self.sums],
            "fatigue": self.fatigue and {**asdict(self.fatigue), "beyond": self.fatigue.beyond},
            "compression": self.compression and {**asdict(self.compression), "beyond": self.compression.beyond},
        }

    def sentences(self) -> list[str]:
        """Return a sentence for each trend that chance does not explain, for admins."""
        found = [
            f"{each.scale} is scored too {'high' if each.high > each.low else 'low'} over "
            f"{plural(each.sheets, 'sheet')}, by {abs(each.bias):.2f} points on average."
            for each in self.sums
            if each.beyond
        ]
        if self.fatigue and self.fatigue.beyond:
            more = "larger" if self.fatigue.value > 0 else "smaller"
            found.append(f"Errors are {abs(self.fatigue.value):.2f} points {more} at the end of a sheet.")
        if self.compression and self.compression.beyond:
            change = "too close together" if self.compression.value < 0 else "too far apart"
            found.append(
                f"Scores of good and poor tips are {change}: by {abs(self.compression.value):.2f} points "
                "for each point between their references."
            )
        return found


def measure_trends(scales: Sequence[Scale], sheets: Sequence[Sequence[ControlScore]]) -> Trends:
    """Measure a judge's trends over the controls of their sheets, oldest first."""
    by_sheet = [[_Column.of(scale, sheet) for scale in scales] for sheet in sheets if sheet]
    overall = [_Column.of(scale, [tip for sheet in sheets for tip in sheet]) for scale in scales]
    return Trends(tuple(_bias_sums(by_sheet)), _fatigue(by_sheet), _compression(overall))


def _bias_sums(sheets: Sequence[Sequence[_Column]]) -> Iterator[BiasSum]:
    from scipy.special import ndtri, stdtr

    measured: dict[str, list[tuple[float, float]]] = {}  # by scale: bias and z of each sheet
    for columns in sheets:
        icc = _intraclass_correlation([column for column in columns if column.n])
        for column in columns:
            drift = _scale_drift(column, TREND_RATE, icc)
            if drift.bias is not None and drift.se:
                z = float(ndtri(stdtr(_degrees(column, icc), drift.bias / drift.se)))
                measured.setdefault(drift.scale, []).append((drift.bias, z))
    for name, found in measured.items():
        high = low = 0.0
        for _, z in found:
            high, low = max(0.0, high + z - CUSUM_SLACK), max(0.0, low - z - CUSUM_SLACK)
        yield BiasSum(name, len(found), sum(bias for bias, _ in found) / len(found), high, low)


def _fatigue(sheets: Sequence[Sequence[_Column]]) -> Slope | None:
    """Regress an answer's mean absolute error on its position, within sheets."""
    x, y = [], []
    for columns in sheets:
        errors: dict[float, list[float]] = defaultdict(list)  # by position: beyond those of an honest judge
        for column in columns:
            beyond = (np.abs(column.error) - column.honest.absolute[0][column.reference]) / column.unit
            for position, error in zip(column.position.tolist(), beyond.tolist(), strict=True):
                errors[position].append(error)
        means = [fmean(found) for found in errors.values()]
        x += [position - fmean(errors) for position in errors]
        y += [mean - fmean(means) for mean in means]
    degrees, spread = len(x) - len(sheets) - 1, float(np.dot(x, x))
    if len(x) < _MIN_ANSWERS or degrees < 1 or not spread:
        return None
    slope = float(np.dot(x, y)) / spread
    rest = np.array(y) - slope * np.array(x)
    return _slope(slope, sqrt(float(rest @ rest) / degrees / spread), degrees)


def _compression(columns: Sequence[_Column]) -> Slope | None:
    """Regress errors on references over all scales; the variance allows for the correlation within an answer."""
    used = [column for column in columns if column.n > 1]
    answers = max((column.answers for column in used), default=0)
    x = [(column.reference - column.reference.mean()) / column.unit for column in used]
    y = [(column.excess - column.excess.mean()) / column.unit for column in used]
    spread = sum(float(each @ each) for each in x)
    if answers < _MIN_ANSWERS or not spread:
        return None
    slope = sum(float(a @ b) for a, b in zip(x, y, strict=True)) / spread
    pulls = np.zeros(answers)
    for column, a, b in zip(used, x, y, strict=True):
        pulls += np.bincount(column.answer, a * (b - slope * a), minlength=answers)
    return _slope(slope, sqrt(float(pulls @ pulls) * answers / (answers - 1)) / spread, answers - 1)


def _slope(value: float, se: float, degrees: int) -> Slope:
    reach = _t_quantile(TREND_RATE, degrees) * se
    return Slope(value, value - reach, value + reach)
