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
    """Return Krippendorff's ordinal alpha: 1 is full agreement, and 0 is agreement by chance.

    `scores` has one score per judge for each tip. Only tips with two or more scores count. Returns None with fewer than
    two such tips, or if all their scores are equal, since alpha is undefined without variation.
    """
    units = [unit for unit in scores if len(unit) >= 2]
    values = {score for unit in units for score in unit}
    if len(units) < 2 or len(values) < 2:
        return None
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
    exact: float  # share of tips with the same score both times
    difference: float  # mean absolute difference, in the scale's points
    shift: float  # mean of later − earlier; positive if the judge became more lenient


@dataclass(frozen=True)
class SelfAgreement:
    """A judge's later scores compared with their own earlier ones."""

    n: int  # tips
    exact: float  # share of equal scores, over all scales
    scales: tuple[ScaleAgreement, ...]

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values."""
        return asdict(self)


def self_agreement(
    scales: Sequence[Scale], pairs: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> SelfAgreement | None:
    """Compare the (earlier, later) scores of each tip that was scored twice. Returns None without such tips."""
    if not pairs:
        return None
    n, unchanged = len(pairs), 0
    by_scale = []
    for scale in scales:
        changes = [later[scale.name] - earlier[scale.name] for earlier, later in pairs]
        unchanged += changes.count(0)
        difference = sum(map(abs, changes)) / n
        by_scale.append(ScaleAgreement(scale.name, n, changes.count(0) / n, difference, sum(changes) / n))
    return SelfAgreement(n, unchanged / (n * len(scales)), tuple(by_scale))


MIN_CONTROLS = 20  # with fewer control tips the verdict is unknown
FALSE_ALARM_RATE = 0.05  # of the whole verdict, for an honest judge
BIAS_SHARE = 0.031  # part of this rate for the biases of all scales together
POOLED_SHARE = 0.003  # part for error and contrast each; the rest is a margin, because the design effect is estimated
POOLED_QUANTILE = NormalDist().inv_cdf(1 - POOLED_SHARE)
HONEST_NOISE = 1.0  # the largest noise accepted as honest, in points of a five-step scale
NOISES = np.linspace(0.05, 1.5, 59)  # candidates when estimating a judge's noise, in the same points
PRIOR_DEGREES = 20  # added to the degrees of freedom by items in the test of a bias
MIN_SPREAD = 0.25  # minimum standard deviation of errors, so that no interval has zero width; in the same points

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Verdict(StrEnum):
    """The result of measuring a judge on the controls."""

    FINE = "fine"
    BEYOND = "beyond the limit"
    UNKNOWN = "unknown"  # too few controls scored


def verdict_words(verdict: str | None) -> str:
    """Return a stored verdict in the words that users see."""
    return "too far off" if verdict == Verdict.BEYOND else verdict or "unknown"


@dataclass(frozen=True)
class ControlScore:
    """A judge's scores of one control tip, with its reference scores and its item."""

    scores: Mapping[str, int]
    reference: Mapping[str, int]
    item: str = ""  # id of the item that contains the tip
    position: float = 0.0  # of that item on its sheet, from 0 (first) to 1 (last)


@dataclass(frozen=True)
class ScaleDrift:
    """A judge's drift on one scale, in the scale's points; None where there is too little data."""

    scale: str
    n: int
    bias: float | None  # mean of score − expected score of an honest judge at that reference
    interval: tuple[float, float] | None  # confidence interval of the bias, at the level of its test
    se: float | None  # standard error of the bias
    difference: float | None  # plain mean of score − reference
    error: float | None  # mean absolute value of score − reference
    beyond: bool  # whether the bias differs from 0 by more than chance


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
    contrast: float | None  # slope of score on reference: 1 if scores follow the references fully, 0 if not at all
    contrast_limit: float | None
    contrast_beyond: bool
    icc: float | None = None  # intraclass correlation: how alike a judge's errors are within an item
    sheets: int = 1  # number of sheets whose controls were pooled

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values; None where unknown."""
        scales = [{**asdict(scale), "interval": scale.interval and list(scale.interval)} for scale in self.scales]
        return {**asdict(self), "verdict": self.verdict.value, "scales": scales}

    def sentences(self, rubric: Rubric, *, with_count: bool = True) -> list[str]:
        """Return the verdict for users: the scales that drift, in which direction and how far.

        Without `with_count`, the number of control tips is not shown.
        """
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
    """Yield a sentence for each pooled limit, of error and contrast, that a drift exceeds. `drift` is its JSON."""
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
    """Compare the scores of control tips with their references. Below MIN_CONTROLS tips the verdict is unknown.

    A judge's errors are alike within an item, so tips of one item count for less than independent ones. All
    standard errors are therefore inflated by the design effect of the intraclass correlation, which is estimated from
    the judge's own errors on all scales. Every tip has a score and a reference on every scale.
    """
    columns = [_Column.of(scale, scored) for scale in scales]
    icc = _intraclass_correlation(columns)
    by_scale = tuple(_scale_drift(column, BIAS_SHARE / len(scales), icc) for column in columns)
    enough = len(scored) >= MIN_CONTROLS
    error, error_limit = _pooled_error(columns, icc)
    contrast, contrast_limit = _pooled_contrast(columns, icc) if scored else (None, None)
    error_beyond = enough and error is not None and error_limit is not None and error > error_limit
    contrast_beyond = enough and contrast is not None and contrast_limit is not None and contrast < contrast_limit
    if error_beyond or contrast_beyond or any(scale.beyond for scale in by_scale):
        verdict = Verdict.BEYOND
    else:
        verdict = Verdict.FINE if enough else Verdict.UNKNOWN
    return Drift(
        verdict=verdict,
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
    """The control tips on one scale, as arrays with one element per tip."""

    scale: Scale
    score: Ints  # in steps above the scale's minimum
    reference: Ints  # likewise
    item: Ints  # index of the tip's item
    position: Floats  # of the tip's item on its sheet, from 0 to 1

    @classmethod
    def of(cls, scale: Scale, scored: Sequence[ControlScore]) -> _Column:
        name = scale.name
        values = np.array([(tip.scores[name], tip.reference[name]) for tip in scored], dtype=np.int64).reshape(-1, 2)
        if values.size and (values.min() < scale.min or values.max() > scale.max):
            raise ValueError(f"{name} goes from {scale.min} to {scale.max}; seen {values.min()} to {values.max()}.")
        score, reference = (values - scale.min).T
        index_of = {item: index for index, item in enumerate(dict.fromkeys(tip.item for tip in scored))}
        item = np.array([index_of[tip.item] for tip in scored], dtype=np.int64)
        return cls(scale, score, reference, item, np.array([tip.position for tip in scored]))

    @property
    def n(self) -> int:
        return len(self.score)

    @property
    def n_items(self) -> int:
        return len(np.unique(self.item))

    @property
    def unit(self) -> float:
        """One point of a five-step scale, in steps of this scale."""
        return _unit(self.scale.max - self.scale.min)

    @property
    def honest(self) -> _HonestErrors:
        """The errors that an honest judge makes on this scale."""
        return _honest_errors(self.scale.max - self.scale.min)

    @cached_property
    def counts(self) -> Ints:
        """The number of tips at each reference."""
        return np.bincount(self.reference, minlength=self.scale.max - self.scale.min + 1)

    @cached_property
    def error(self) -> Ints:
        return self.score - self.reference

    @cached_property
    def excess(self) -> Floats:
        """Errors minus the mean error of an equally noisy honest judge, which the ends of the scale cause."""
        honest = self.honest
        # Find the noise whose error variance at these references is closest to the judge's. A bias does not change it.
        shares = self.counts / self.n
        expected = honest.variance @ shares + honest.mean**2 @ shares - (honest.mean @ shares) ** 2
        noise = int(np.abs(expected - np.var(self.error)).argmin())
        return np.asarray(self.error - honest.mean[noise][self.reference])

    @property
    def spread(self) -> float:
        """The standard deviation of `excess`, at least MIN_SPREAD."""
        return max(float(self.excess.std(ddof=1)) if self.n > 1 else 0.0, MIN_SPREAD * self.unit)

    def design_effect(self, correlation: float | None, weights: NDArray[np.floating[Any]] | None = None) -> float:
        """Return the factor by which correlation within items inflates the variance of a weighted sum of errors."""
        weights = np.ones(self.n) if weights is None else weights
        total = float(weights @ weights)
        if not total:
            return 1.0
        clustering = float(np.square(np.bincount(self.item, weights)).sum()) / total
        return 1 + (correlation or 0.0) * (clustering - 1)


def _intraclass_correlation(columns: Sequence[_Column]) -> float | None:
    """Return the share of the error variance that is between items; at least 0.

    It is estimated by a one-way analysis of variance, pooled over the scales. None unless there are two items, one of
    them with two tips.
    """
    between = within = between_degrees = within_degrees = 0.0
    sizes = []  # for each scale, the effective number of tips per item
    for column in columns:
        tips = np.bincount(column.item)  # per item
        if len(tips) < 2 or column.n == len(tips):
            continue
        error = (column.excess - column.excess.mean()) / column.spread
        explained = float((np.bincount(column.item, error) ** 2 / tips).sum())
        between += explained
        within += float(error @ error) - explained
        between_degrees += len(tips) - 1
        within_degrees += column.n - len(tips)
        sizes.append((column.n - float(tips @ tips) / column.n) / (len(tips) - 1))
    if not sizes:
        return None
    mean_between, mean_within = between / between_degrees, within / within_degrees
    total = mean_between + (float(np.mean(sizes)) - 1) * mean_within
    return max(0.0, (mean_between - mean_within) / total) if total > 0 else 0.0


def _unit(steps: int) -> float:
    """Return one point of a five-step scale, in steps of a scale of `steps` + 1 values."""
    return max(steps / 4, 0.5)


@dataclass(frozen=True)
class _HonestErrors:
    """Moments of an honest judge's error. Arrays have one column per reference."""

    mean: Floats  # one row per noise in NOISES, and a last row for HONEST_NOISE
    variance: Floats  # likewise
    absolute: Floats  # rows: mean, variance and third central moment of |error| at HONEST_NOISE; additive over tips


@lru_cache(maxsize=64)
def _honest_errors(steps: int) -> _HonestErrors:
    """Compute the exact moments for a scale of `steps` + 1 values, with score = clip(round(reference + noise))."""
    from scipy.special import ndtr

    noises = np.append(NOISES, HONEST_NOISE) * _unit(steps)
    values = np.arange(steps + 1)
    # By noise, reference and score: the probability of at most this score, and then of exactly this score.
    cumulative = ndtr((values[:-1] + 0.5 - values[:, None])[None] / noises[:, None, None])
    ends = np.ones((len(noises), steps + 1, 1))
    probabilities = np.diff(np.concatenate([0 * ends, cumulative, ends], axis=2), axis=2)
    error = values[None, :] - values[:, None]
    mean = (probabilities * error).sum(axis=2)
    variance = (probabilities * error**2).sum(axis=2) - mean**2
    first, second, third = ((probabilities[-1] * np.abs(error) ** power).sum(axis=1) for power in (1, 2, 3))
    absolute = np.stack([first, second - first**2, third - 3 * first * second + 2 * first**3])
    return _HonestErrors(mean, variance, absolute)


def _scale_drift(column: _Column, rate: float, icc: float | None) -> ScaleDrift:
    """Measure the drift on one scale. Its bias is tested at the false-alarm rate `rate`."""
    name, n = column.scale.name, column.n
    if not n:
        return ScaleDrift(name, 0, None, None, None, None, None, beyond=False)
    bias = float(column.excess.mean())
    interval: tuple[float, float] | None = None
    se: float | None = None
    if n >= 2:
        se = column.spread * sqrt(column.design_effect(icc) / n)
        half_width = _t_quantile(rate, _degrees_of_freedom(column, icc)) * se
        interval = (bias - half_width, bias + half_width)
    beyond = n >= MIN_CONTROLS and interval is not None and not interval[0] <= 0 <= interval[1]
    difference, error = float(column.error.mean()), float(np.abs(column.error).mean())
    return ScaleDrift(name, n, bias, interval, se, difference, error, beyond)


def _degrees_of_freedom(column: _Column, icc: float | None) -> int:
    """Return the degrees of freedom of a bias: by tips, or fewer if errors may be correlated within items."""
    by_tips = column.n - 1
    return by_tips if icc is None else min(by_tips, column.n_items - 1 + PRIOR_DEGREES)


@lru_cache(maxsize=1024)
def _t_quantile(rate: float, degrees: int) -> float:
    """Return the quantile of Student's t for a two-sided test at the false-alarm rate `rate`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - rate / 2))


def _pooled_error(columns: Sequence[_Column], icc: float | None) -> tuple[float | None, float | None]:
    """Return the pooled mean absolute error, and its limit: the largest value explained by chance."""
    total = sum(column.n for column in columns)
    if not total:
        return None, None
    error = sum(float(np.abs(column.error).sum()) / column.unit for column in columns)
    correlation = icc or 0.0
    # The correlation of |error|, if errors are normal.
    absolute_icc = (sqrt(1 - correlation**2) + correlation * asin(correlation) - 1) * 2 / (pi - 2)
    mean = variance = third = inflated_variance = 0.0
    for column in columns:
        moments = column.honest.absolute @ column.counts / column.unit ** np.arange(1, 4)
        mean += float(moments[0])
        variance += float(moments[1])
        third += float(moments[2])
        inflated_variance += float(moments[1]) * column.design_effect(absolute_icc)
    z = POOLED_QUANTILE
    quantile = z + (z**2 - 1) / 6 * third / variance**1.5  # corrected for skewness (Cornish-Fisher)
    return error / total, (mean + quantile * sqrt(inflated_variance)) / total


def _pooled_contrast(columns: Sequence[_Column], icc: float | None) -> tuple[float | None, float | None]:
    """Return the pooled slope of score on reference, and its limit: the smallest value explained by chance.

    Both are None if the references do not vary.
    """
    observed = expected = variance = weight = 0.0
    for column in columns:
        values = np.arange(len(column.counts))
        centered = (values - float(values @ column.counts) / column.n) / column.unit
        weights, effect = centered * column.counts, column.design_effect(icc, centered[column.reference])
        observed += float(centered[column.reference] @ column.score) / column.unit
        expected += float(weights @ (values + column.honest.mean[-1])) / column.unit
        variance += float(weights * centered @ column.honest.variance[-1]) / column.unit**2 * effect
        weight += float(weights @ centered)
    if weight <= 0:
        return None, None
    return observed / weight, (expected - POOLED_QUANTILE * sqrt(variance)) / weight


CUSUM_SLACK = 0.5  # standard errors subtracted per sheet
CUSUM_LIMIT = 6.5  # over 20 sheets, the sums of all scales stay below it for 97 % of honest judges
TREND_RATE = 0.01  # false-alarm rate of fatigue and compression each
_MIN_ITEMS = 8  # with fewer, fatigue and compression are unknown


@dataclass(frozen=True)
class BiasSum:
    """A judge's bias on one scale added up over sheets (CUSUM). It detects small biases that persist."""

    scale: str
    sheets: int
    bias: float  # mean over the sheets, in the scale's points
    high: float  # sum of biases above 0, in standard errors
    low: float  # sum of biases below 0, as a positive number

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
    """Measure a judge's trends. `sheets` has the control scores of each sheet, oldest first."""
    by_sheet = [[_Column.of(scale, sheet) for scale in scales] for sheet in sheets if sheet]
    overall = [_Column.of(scale, [tip for sheet in sheets for tip in sheet]) for scale in scales]
    return Trends(tuple(_bias_sums(by_sheet)), _fatigue(by_sheet), _compression(overall))


def _bias_sums(sheets: Sequence[Sequence[_Column]]) -> Iterator[BiasSum]:
    """Yield the sums of each scale with a known bias."""
    from scipy.special import ndtri, stdtr

    measured: dict[str, list[tuple[float, float]]] = {}  # by scale: bias and z score of each sheet
    for columns in sheets:
        icc = _intraclass_correlation(columns)
        for column in columns:
            drift = _scale_drift(column, TREND_RATE, icc)
            if drift.bias is not None and drift.se:
                z = float(ndtri(stdtr(_degrees_of_freedom(column, icc), drift.bias / drift.se)))
                measured.setdefault(drift.scale, []).append((drift.bias, z))
    for name, values in measured.items():
        high = low = 0.0
        for _, z in values:
            high = max(0.0, high + z - CUSUM_SLACK)
            low = max(0.0, low - z - CUSUM_SLACK)
        yield BiasSum(name, len(values), sum(bias for bias, _ in values) / len(values), high, low)


def _fatigue(sheets: Sequence[Sequence[_Column]]) -> Slope | None:
    """Regress the mean absolute error of items on their position, within sheets."""
    x, y = [], []  # position and error, minus their means over the sheet
    for columns in sheets:
        errors: dict[float, list[float]] = defaultdict(list)  # by position, minus the mean of an honest judge
        for column in columns:
            excess = (np.abs(column.error) - column.honest.absolute[0][column.reference]) / column.unit
            for position, error in zip(column.position.tolist(), excess.tolist(), strict=True):
                errors[position].append(error)
        means = [fmean(values) for values in errors.values()]
        x += [position - fmean(errors) for position in errors]
        y += [mean - fmean(means) for mean in means]
    degrees, sum_of_squares = len(x) - len(sheets) - 1, float(np.dot(x, x))
    if len(x) < _MIN_ITEMS or degrees < 1 or not sum_of_squares:
        return None
    slope = float(np.dot(x, y)) / sum_of_squares
    residuals = np.array(y) - slope * np.array(x)
    se = sqrt(float(residuals @ residuals) / degrees / sum_of_squares)
    return _with_interval(slope, se, degrees)


def _compression(columns: Sequence[_Column]) -> Slope | None:
    """Regress errors on references over all scales. The variance allows for correlation within items."""
    n_items = columns[0].n_items  # the same on every scale
    if n_items < _MIN_ITEMS:
        return None
    x = [(column.reference - column.reference.mean()) / column.unit for column in columns]
    y = [(column.excess - column.excess.mean()) / column.unit for column in columns]
    sum_of_squares = sum(float(each @ each) for each in x)
    if not sum_of_squares:
        return None
    slope = sum(float(a @ b) for a, b in zip(x, y, strict=True)) / sum_of_squares
    cluster_sums = np.zeros(n_items)  # per item; for the cluster-robust variance
    for column, a, b in zip(columns, x, y, strict=True):
        cluster_sums += np.bincount(column.item, a * (b - slope * a), minlength=n_items)
    se = sqrt(float(cluster_sums @ cluster_sums) * n_items / (n_items - 1)) / sum_of_squares
    return _with_interval(slope, se, n_items - 1)


def _with_interval(value: float, se: float, degrees: int) -> Slope:
    half_width = _t_quantile(TREND_RATE, degrees) * se
    return Slope(value, value - half_width, value + half_width)
