"""Measurement of judges: agreement (Krippendorff's alpha), self-agreement, and drift on the hidden controls."""

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
    by_tip = [tip_scores for tip_scores in scores if len(tip_scores) >= 2]
    distinct_scores = {score for tip_scores in by_tip for score in tip_scores}
    if len(by_tip) < 2 or len(distinct_scores) < 2:
        return None
    from krippendorff import alpha as krippendorff_alpha

    domain = np.arange(scale.min, scale.max + 1)
    counts = [np.bincount(np.array(tip_scores) - scale.min, minlength=len(domain)) for tip_scores in by_tip]
    return float(krippendorff_alpha(value_counts=np.array(counts), value_domain=domain, level_of_measurement="ordinal"))


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
        return asdict(self)


def self_agreement(
    scales: Sequence[Scale], scored_twice: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> SelfAgreement | None:
    """Compare the (earlier, later) scores of each tip that was scored twice. Returns None without such tips."""
    if not scored_twice:
        return None
    n, unchanged = len(scored_twice), 0
    by_scale = []
    for scale in scales:
        changes = [later[scale.name] - earlier[scale.name] for earlier, later in scored_twice]
        unchanged += changes.count(0)
        difference = sum(map(abs, changes)) / n
        by_scale.append(ScaleAgreement(scale.name, n, changes.count(0) / n, difference, sum(changes) / n))
    return SelfAgreement(n, unchanged / (n * len(scales)), tuple(by_scale))


MIN_CONTROLS = 20  # with fewer control tips the verdict is unknown
FALSE_ALARM_RATE = 0.05  # of the whole verdict, for an honest judge
# The tests' rates add up to 0.037 (BIAS_RATE + 2 * POOLED_RATE), not 0.05: a reserve, because the correlation within
# items is only estimated.
BIAS_RATE = 0.031  # of the tests of bias on all scales together
POOLED_RATE = 0.003  # of the test of the error, and also of the test of the contrast
POOLED_QUANTILE = NormalDist().inv_cdf(1 - POOLED_RATE)
# Noise: standard deviation of a judge's normally distributed errors before rounding, in points of a five-step scale.
HONEST_NOISE = 1.0  # the largest noise accepted as honest
NOISES = np.linspace(0.05, 1.5, 59)  # values tried when estimating a judge's noise
MIN_SPREAD = 0.25  # minimum standard deviation of errors, in points of a five-step scale: no interval has zero width
# Added to the degrees of freedom (items − 1) in the test of a bias. With fewer, small biases are missed; with more,
# honest judges are held too often. The rates of both are in docs/judging.md.
PRIOR_DEGREES = 20

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Verdict(StrEnum):
    """The result of measuring a judge on the controls."""

    FINE = "fine"
    BEYOND = "beyond the limit"
    UNKNOWN = "unknown"  # too few controls scored


def verdict_words(verdict: str | None) -> str:
    """Return a stored verdict in the words that users see. None is unknown, too."""
    if verdict == Verdict.BEYOND:
        return "too far off"
    return verdict or "unknown"


@dataclass(frozen=True)
class ControlScore:
    """A judge's scores of one control tip, with its agreed scores and its item."""

    scores: Mapping[str, int]  # by scale
    agreed: Mapping[str, int]  # by scale
    item: str = ""  # id of the item that contains the tip
    position: float = 0.0  # of that item on its sheet, from 0 (first) to 1 (last)


@dataclass(frozen=True)
class ScaleDrift:
    """A judge's drift on one scale, in the scale's points; None where there is too little data."""

    scale: str
    n: int
    # Mean of (score − expected score). The expected score is the mean that an equally noisy honest judge gives to tips
    # with the same agreed score; near the ends of the scale it differs from the agreed score.
    bias: float | None
    interval: tuple[float, float] | None  # confidence interval of the bias, at the level of its test
    se: float | None  # standard error of the bias
    difference: float | None  # mean of score − agreed score, signed
    error: float | None  # mean of |score − agreed score|
    beyond: bool  # whether the bias differs from 0 by more than chance explains


@dataclass(frozen=True)
class Drift:
    """A judge's drift, measured on controls. Pooled values are in points of a five-step scale."""

    verdict: Verdict
    n_controls: int
    false_alarm_rate: float
    scales: tuple[ScaleDrift, ...]
    error: float | None  # mean absolute difference from the agreed scores
    error_limit: float | None
    error_beyond: bool
    contrast: float | None  # slope of scores over agreed scores: 1 if the scores follow them fully, 0 if unrelated
    contrast_limit: float | None
    contrast_beyond: bool
    icc: float | None = None  # intraclass correlation: how alike a judge's errors are within an item
    sheets: int = 1  # number of sheets whose controls were pooled

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values; None where unknown."""
        scales = [
            {**asdict(scale), "interval": list(scale.interval) if scale.interval else None} for scale in self.scales
        ]
        return {**asdict(self), "verdict": self.verdict.value, "scales": scales}

    def sentences(self, rubric: Rubric, *, with_count: bool = True) -> list[str]:
        """Return the verdict for users: the scales that drift, in which direction and how far.

        Without `with_count`, the number of control tips is not shown.
        """
        if self.verdict is Verdict.UNKNOWN:
            return [f"Drift unknown: fewer than {MIN_CONTROLS} control tips are scored on every scale."]
        of_sheets = f" of your last {self.sheets} sheets" if self.sheets > 1 else ""
        all_five_steps = all(scale.max - scale.min == 4 for scale in rubric.scales)
        points = "points" if all_five_steps else "points of a five-step scale"
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
            if scale.beyond and scale.bias is not None and scale.interval is not None:
                direction = "high" if scale.bias > 0 else "low"
                least, most = sorted(map(abs, scale.interval))
                sentences.append(
                    f"{scale.scale} is scored too {direction}: by {abs(scale.bias):.1f} points on "
                    f"average, on a scale of {ranges[scale.scale]} (allowing for chance, by {least:.1f} to {most:.1f})."
                )
        return [*sentences, *limit_sentences(self.to_json(), points)]


def limit_sentences(drift: Mapping[str, Any], points: str = "points") -> Iterator[str]:
    """Yield a sentence if the error is above its limit, and one if the contrast is below its limit.

    `drift` is from `Drift.to_json`.
    """
    if drift.get("error_beyond"):
        yield (
            f"The scores differ from the reference scores by {drift['error']:.1f} {points} on average, "
            f"more than the limit of {drift['error_limit']:.1f}."
        )
    if drift.get("contrast_beyond"):
        contrast = round(drift["contrast"], 1) + 0.0  # not "-0.0"
        yield (
            "Good and poor tips get similar scores: where the reference scores are 1 point apart, "
            f"the scores are {contrast:.1f} apart on average; the limit is {drift['contrast_limit']:.1f}."
        )


def measure_drift(scales: Sequence[Scale], scored: Sequence[ControlScore], *, sheets: int = 1) -> Drift:
    """Compare the scores of control tips with their agreed scores. Below MIN_CONTROLS tips the verdict is unknown.

    A judge's errors are alike within an item, so tips of one item count for less than independent ones: the design
    effect inflates all standard errors. Every tip must have a score and an agreed score on every scale.
    """
    columns = [_Column.of(scale, scored) for scale in scales]
    icc = _intraclass_correlation(columns)
    by_scale = tuple(_scale_drift(column, icc, false_alarm_rate=BIAS_RATE / len(scales)) for column in columns)
    enough = len(scored) >= MIN_CONTROLS
    error, error_limit = _pooled_error(columns, icc) if scored else (None, None)
    contrast, contrast_limit = _pooled_contrast(columns, icc) if scored else (None, None)
    error_beyond = enough and error is not None and error_limit is not None and error > error_limit
    contrast_beyond = enough and contrast is not None and contrast_limit is not None and contrast < contrast_limit
    # With too few controls no scale is beyond, see _scale_drift.
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
    score: Ints  # minus the scale's minimum
    agreed: Ints  # the agreed score, minus the scale's minimum
    item: Ints  # index of the tip's item
    position: Floats  # of the tip's item on its sheet, from 0 to 1

    @classmethod
    def of(cls, scale: Scale, scored: Sequence[ControlScore]) -> _Column:
        name = scale.name
        values = np.array([(tip.scores[name], tip.agreed[name]) for tip in scored], dtype=np.int64).reshape(-1, 2)
        if values.size and (values.min() < scale.min or values.max() > scale.max):
            raise ValueError(f"{name} goes from {scale.min} to {scale.max}; seen {values.min()} to {values.max()}.")
        score, agreed = (values - scale.min).T
        items = dict.fromkeys(tip.item for tip in scored)  # in order of occurrence
        index_of = {item: index for index, item in enumerate(items)}
        item = np.array([index_of[tip.item] for tip in scored], dtype=np.int64)
        return cls(scale, score, agreed, item, position=np.array([tip.position for tip in scored]))

    @property
    def n(self) -> int:
        return len(self.score)

    @property
    def n_items(self) -> int:
        return len(np.unique(self.item))

    @property
    def point_size(self) -> float:
        """The size of one point of a five-step scale, in points of this scale."""
        return _point_size(self.scale.max - self.scale.min)

    @property
    def honest(self) -> _HonestErrors:
        """The errors that an honest judge makes on this scale."""
        return _honest_errors(self.scale.max - self.scale.min)

    @cached_property
    def counts(self) -> Ints:
        """The number of tips with each agreed score."""
        return np.bincount(self.agreed, minlength=self.scale.max - self.scale.min + 1)

    @cached_property
    def error(self) -> Ints:
        return self.score - self.agreed

    @cached_property
    def excess(self) -> Floats:
        """Errors minus the mean error of an equally noisy honest judge, which is not 0 near the ends of the scale."""
        honest = self.honest
        # Estimate the noise from the variance of the errors, which a bias does not change. The variance over all tips
        # is the mean of the variances plus the variance of the means.
        shares = self.counts / self.n
        variance_by_noise = honest.variance @ shares + honest.mean**2 @ shares - (honest.mean @ shares) ** 2
        closest = int(np.abs(variance_by_noise - np.var(self.error)).argmin())
        return np.asarray(self.error - honest.mean[closest][self.agreed])

    @property
    def bias(self) -> float:
        return float(self.excess.mean())

    @property
    def spread(self) -> float:
        """The standard deviation of `excess`, at least MIN_SPREAD."""
        least = MIN_SPREAD * self.point_size
        return max(float(self.excess.std(ddof=1)), least) if self.n > 1 else least

    def bias_se(self, icc: float | None) -> float:
        return self.spread * sqrt(self.design_effect(icc) / self.n)

    def bias_degrees(self, icc: float | None) -> int:
        """Return the degrees of freedom of the bias: fewer if errors may be correlated within items.

        They are n − 1 if the correlation cannot be estimated (icc is None).
        """
        if icc is None:
            return self.n - 1
        return min(self.n - 1, self.n_items - 1 + PRIOR_DEGREES)

    def design_effect(self, icc: float | None, weights: NDArray[np.floating[Any]] | None = None) -> float:
        """Return the factor by which correlation within items inflates the variance of a weighted sum of errors.

        It is 1 + icc * (m − 1) after Kish, where m = Σ_items (Σ w)² / Σ_tips w² and w are the weights. With equal
        weights, m is the number of tips per item, averaged over the tips.
        """
        weights = np.ones(self.n) if weights is None else weights
        total = float(weights @ weights)
        if icc is None or not total:
            return 1.0
        m = float(np.square(np.bincount(self.item, weights)).sum()) / total
        return 1 + icc * (m - 1)


def _intraclass_correlation(columns: Sequence[_Column]) -> float | None:
    """Return the share of the error variance that is between items; at least 0.

    It is estimated by a one-way analysis of variance, pooled over the scales. None unless there are two items, one of
    them with two tips.
    """
    between = within = between_degrees = within_degrees = 0.0  # sums of squares, and their degrees of freedom
    sizes = []  # for each scale, the number of tips per item, adjusted for unequal numbers
    for column in columns:
        tips_per_item = np.bincount(column.item)
        n_items = len(tips_per_item)
        if n_items < 2 or column.n == n_items:
            continue
        error = (column.excess - column.excess.mean()) / column.spread
        explained = float((np.bincount(column.item, error) ** 2 / tips_per_item).sum())
        between += explained
        within += float(error @ error) - explained
        between_degrees += n_items - 1
        within_degrees += column.n - n_items
        sizes.append((column.n - float(tips_per_item @ tips_per_item) / column.n) / (n_items - 1))
    if not sizes:
        return None
    mean_between, mean_within = between / between_degrees, within / within_degrees
    total = mean_between + (float(np.mean(sizes)) - 1) * mean_within
    return max(0.0, (mean_between - mean_within) / total) if total > 0 else 0.0


def _point_size(span: int) -> float:
    # `span` is max − min, which is 4 on a five-step scale. On a scale of two steps, the noise of an honest judge would
    # almost vanish in rounding if a point were smaller than 0.5.
    return max(span / 4, 0.5)


@dataclass(frozen=True)
class _HonestErrors:
    """Moments of an honest judge's error. Arrays have one column per agreed score."""

    mean: Floats  # one row per noise in NOISES, and a last row for HONEST_NOISE
    variance: Floats  # the same rows
    absolute_moments: Floats  # mean, variance and third central moment of |error| at HONEST_NOISE; additive over tips


@lru_cache(maxsize=64)
def _honest_errors(span: int) -> _HonestErrors:
    """Return the exact moments on a scale from 0 to `span`, for score = clip(round(agreed + normal error))."""
    from scipy.special import ndtr

    noises = np.append(NOISES, HONEST_NOISE) * _point_size(span)
    values = np.arange(span + 1)
    # The axes of three-dimensional arrays are noise, agreed score and score.
    upper_ends = values[:-1] + 0.5  # of the interval that is rounded to a score; the last score has no upper end
    at_most = ndtr((upper_ends - values[:, None])[None] / noises[:, None, None])
    certain = np.ones((len(noises), span + 1, 1))
    cumulative = np.concatenate([np.zeros_like(certain), at_most, certain], axis=2)
    probabilities = np.diff(cumulative, axis=2)
    error = values[None, :] - values[:, None]  # by agreed score and score
    mean = (probabilities * error).sum(axis=2)
    variance = (probabilities * error**2).sum(axis=2) - mean**2
    at_honest_noise = probabilities[-1]
    first, second, third = ((at_honest_noise * np.abs(error) ** power).sum(axis=1) for power in (1, 2, 3))
    absolute_moments = np.stack([first, second - first**2, third - 3 * first * second + 2 * first**3])
    return _HonestErrors(mean, variance, absolute_moments)


def _scale_drift(column: _Column, icc: float | None, *, false_alarm_rate: float) -> ScaleDrift:
    interval: tuple[float, float] | None = None
    se: float | None = None
    beyond = False
    if column.n >= 2:
        se = column.bias_se(icc)
        half_width = _t_quantile(false_alarm_rate, column.bias_degrees(icc)) * se
        low, high = column.bias - half_width, column.bias + half_width
        interval = (low, high)
        beyond = column.n >= MIN_CONTROLS and not low <= 0 <= high
    return ScaleDrift(
        scale=column.scale.name,
        n=column.n,
        bias=column.bias if column.n else None,
        interval=interval,
        se=se,
        difference=float(column.error.mean()) if column.n else None,
        error=float(np.abs(column.error).mean()) if column.n else None,
        beyond=beyond,
    )


@lru_cache(maxsize=1024)
def _t_quantile(false_alarm_rate: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 1 - false_alarm_rate / 2))


def _pooled_error(columns: Sequence[_Column], icc: float | None) -> tuple[float, float]:
    """Return the pooled mean absolute error, and its limit: the largest value explained by chance."""
    total = sum(column.n for column in columns)
    error = sum(float(np.abs(column.error).sum()) / column.point_size for column in columns)
    r = icc or 0.0
    # The correlation of |x| and |y|, if x and y are bivariate normal with the correlation r. It follows from
    # E|xy| = (sqrt(1 - r²) + r asin r) 2/pi, E|x| = sqrt(2/pi) and E x² = 1.
    absolute_icc = (sqrt(1 - r**2) + r * asin(r) - 1) * 2 / (pi - 2)
    mean = variance = third = inflated_variance = 0.0  # moments of the sum of an honest judge's |error|
    for column in columns:
        powers = np.array([1, 2, 3])  # the moments are in points, points² and points³
        moments = (column.honest.absolute_moments @ column.counts) / column.point_size**powers
        column_mean, column_variance, column_third = moments.tolist()
        mean += column_mean
        variance += column_variance
        third += column_third
        inflated_variance += column_variance * column.design_effect(absolute_icc)
    z = POOLED_QUANTILE
    # Corrected for skewness (Cornish-Fisher). `third` is of independent tips, so it is divided by their variance, not
    # by the inflated one.
    quantile = z + (z**2 - 1) / 6 * third / variance**1.5
    return error / total, (mean + quantile * sqrt(inflated_variance)) / total


def _pooled_contrast(columns: Sequence[_Column], icc: float | None) -> tuple[float | None, float | None]:
    """Return the contrast and its limit: the smallest value explained by chance. None if agreed scores do not vary."""
    # The slope of a regression is Sxy / Sxx. Here both sums are over all scales; x is the agreed score, y the score.
    sxy = honest_sxy = honest_sxy_variance = sxx = 0.0
    for column in columns:
        values = np.arange(len(column.counts))
        mean_agreed = float(values @ column.counts) / column.n
        centered = (values - mean_agreed) / column.point_size  # x minus its mean, for each value of x
        weighted_counts = centered * column.counts
        effect = column.design_effect(icc, centered[column.agreed])
        honest_mean, honest_variance = column.honest.mean[-1], column.honest.variance[-1]
        sxy += float(centered[column.agreed] @ column.score) / column.point_size
        honest_sxy += float(weighted_counts @ (values + honest_mean)) / column.point_size
        honest_sxy_variance += float((weighted_counts * centered) @ honest_variance) / column.point_size**2 * effect
        sxx += float(weighted_counts @ centered)
    if sxx <= 0:
        return None, None
    return sxy / sxx, (honest_sxy - POOLED_QUANTILE * sqrt(honest_sxy_variance)) / sxx


CUSUM_SLACK = 0.5  # subtracted per sheet, in standard errors; as usual, half of the smallest bias to be detected
CUSUM_LIMIT = 6.5  # over 20 sheets, the sums of all scales stay below it for 97 % of honest judges
TREND_RATE = 0.01  # false-alarm rate of fatigue and compression each
_MIN_ITEMS = 8  # with fewer, fatigue and compression are unknown


@dataclass(frozen=True)
class BiasSum:
    """A judge's bias on one scale added up over sheets (CUSUM). It detects small biases that persist."""

    scale: str
    sheets: int  # number of sheets
    bias: float  # mean over the sheets, in the scale's points
    high: float  # upper CUSUM of the sheets' z scores (see _bias_sums)
    low: float  # lower CUSUM, as a positive number

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
        is_rounding_error = abs(self.value) <= 1e-9
        return not is_rounding_error and not self.ci_low <= 0 <= self.ci_high

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "beyond": self.beyond}


@dataclass(frozen=True)
class Trends:
    """Trends of a judge over several sheets. Shown to admins; no sheet is held because of them."""

    sums: tuple[BiasSum, ...]
    fatigue: Slope | None  # growth of the absolute error from the first to the last item of a sheet
    # Error per point of the agreed score: negative if good and poor tips are scored alike. Like contrast − 1, but over
    # all sheets and corrected for the ends of the scale.
    compression: Slope | None

    def to_json(self) -> dict[str, Any]:
        """Return unrounded JSON-serializable values; None where unknown."""
        return {
            "sums": [{**asdict(each), "limit": CUSUM_LIMIT, "beyond": each.beyond} for each in self.sums],
            "fatigue": self.fatigue.to_json() if self.fatigue else None,
            "compression": self.compression.to_json() if self.compression else None,
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
                "for each point between their reference scores."
            )
        return found


def measure_trends(scales: Sequence[Scale], sheets: Sequence[Sequence[ControlScore]]) -> Trends:
    """Measure a judge's trends. `sheets` has the control scores of each sheet, oldest first."""
    by_sheet = [[_Column.of(scale, sheet) for scale in scales] for sheet in sheets if sheet]
    overall = [_Column.of(scale, [tip for sheet in sheets for tip in sheet]) for scale in scales]
    return Trends(tuple(_bias_sums(by_sheet)), _fatigue(by_sheet), _compression(overall))


def _bias_sums(sheets: Sequence[Sequence[_Column]]) -> Iterator[BiasSum]:
    from scipy.special import ndtri, stdtr

    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by scale: bias and z score of each sheet
    for columns in sheets:
        icc = _intraclass_correlation(columns)
        for column in columns:
            if column.n >= 2:
                t = column.bias / column.bias_se(icc)
                z = float(ndtri(stdtr(column.bias_degrees(icc), t)))  # has the cumulative probability of t
                measured[column.scale.name].append((column.bias, z))
    for name, values in measured.items():
        high = low = 0.0
        for _, z in values:
            high = max(0.0, high + z - CUSUM_SLACK)
            low = max(0.0, low - z - CUSUM_SLACK)
        mean_bias = sum(bias for bias, _ in values) / len(values)
        yield BiasSum(name, len(values), mean_bias, high, low)


def _fatigue(sheets: Sequence[Sequence[_Column]]) -> Slope | None:
    """Regress the mean absolute error of items on their position, within sheets."""
    x, y = [], []  # position and error, minus their means over the sheet
    for columns in sheets:
        errors_at: dict[float, list[float]] = defaultdict(list)  # by position: |error| minus an honest judge's mean
        for column in columns:
            honest_mean = column.honest.absolute_moments[0]
            absolute_excess = (np.abs(column.error) - honest_mean[column.agreed]) / column.point_size
            for position, error in zip(column.position.tolist(), absolute_excess.tolist(), strict=True):
                errors_at[position].append(error)
        positions, errors = list(errors_at), [fmean(values) for values in errors_at.values()]
        x += [position - fmean(positions) for position in positions]
        y += [error - fmean(errors) for error in errors]
    degrees = len(x) - len(sheets) - 1  # a mean per sheet and the slope are estimated
    sxx = float(np.dot(x, x))
    if len(x) < _MIN_ITEMS or degrees < 1 or not sxx:
        return None
    slope = float(np.dot(x, y)) / sxx
    residuals = np.array(y) - slope * np.array(x)
    se = sqrt(float(residuals @ residuals) / degrees / sxx)
    return _with_interval(slope, se, degrees)


def _compression(columns: Sequence[_Column]) -> Slope | None:
    """Regress errors on agreed scores over all scales. The variance allows for correlation within items."""
    n_items = columns[0].n_items  # the same on every scale
    if n_items < _MIN_ITEMS:
        return None
    # For each scale, the agreed scores and the errors, minus their means.
    xs = [(column.agreed - column.agreed.mean()) / column.point_size for column in columns]
    ys = [(column.excess - column.excess.mean()) / column.point_size for column in columns]
    sxx = sum(float(x @ x) for x in xs)
    if not sxx:
        return None
    slope = sum(float(x @ y) for x, y in zip(xs, ys, strict=True)) / sxx
    cluster_sums = np.zeros(n_items)  # per item; for the cluster-robust variance
    for column, x, y in zip(columns, xs, ys, strict=True):
        residuals = y - slope * x
        cluster_sums += np.bincount(column.item, x * residuals, minlength=n_items)
    se = sqrt(float(cluster_sums @ cluster_sums) * n_items / (n_items - 1)) / sxx
    return _with_interval(slope, se, n_items - 1)


def _with_interval(value: float, se: float, degrees: int) -> Slope:
    half_width = _t_quantile(TREND_RATE, degrees) * se
    return Slope(value, value - half_width, value + half_width)
