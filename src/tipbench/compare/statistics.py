"""Statistics of the leaderboard: intervals, paired differences, adjusted means and sample sizes.

All comparisons are paired by scenario, because scenarios differ in difficulty. A row's own interval is not used in
comparisons. Unknown values are None, never 0. There is no interval for a single scenario, nor for equal scores in all
scenarios: an interval of zero width would imply certainty. The leader's interval is biased upwards, because the leader
is selected for its high score.

A row is a row of the leaderboard. In the matrices of scores it is a column.

Rows are ordered by their adjusted mean (see `AdditiveFit`). If all rows have the same scenarios, it equals the mean.
Otherwise it corrects for the difficulty of the scenarios that a row lacks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt

import numpy as np

from tipbench.compare.matrix import Floats, Mask
from tipbench.compare.resampling import ALPHA, N_FLIPS, TOLERANCE, critical_t, step_down
from tipbench.plan.design import MIN_SCENARIOS

POWER = 0.8  # the power of `scenarios_needed` and `smallest_detectable`
MAX_SCENARIOS_NEEDED = 1_000_000


@dataclass(frozen=True)
class Unknown:
    """A result that cannot be computed, with the reason."""

    reason: str


@dataclass(frozen=True)
class Estimate:
    """A mean over independent units (scenarios or users) with its 95 % Student-t interval.

    The interval is None for fewer than two units or zero spread.
    """

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None  # standard deviation over units; None for fewer than two
    n: int  # number of units

    @property
    def se(self) -> float | None:
        """Standard error of the mean."""
        return None if self.sd is None else self.sd / sqrt(self.n)

    def to_json(self) -> dict[str, float | None]:
        """Return the JSON form; unknown values are null."""
        return {"mean": self.mean, "ci_low": self.ci_low, "ci_high": self.ci_high}


@dataclass(frozen=True)
class Difference(Estimate):
    """The difference of two rows over their shared scenarios: row − other.

    On a board, interval and p are adjusted for the comparisons of all its rows.
    """

    p: float | None  # None for fewer than two shared scenarios, and for rows that are not tested
    level: float = ALPHA  # significance level

    @property
    def separated(self) -> bool | None:
        """Whether the two rows differ significantly; None if p is unknown."""
        return None if self.p is None else self.p <= self.level

    @property
    def better(self) -> bool:
        """Whether the row is significantly better than the other."""
        return bool(self.separated) and self.mean > 0

    @property
    def worse(self) -> bool:
        """Whether the row is significantly worse than the other."""
        return bool(self.separated) and self.mean < 0

    def to_json(self) -> dict[str, float | None]:
        """Return the JSON form; unknown values are null."""
        return {**super().to_json(), "p": self.p}


def estimate_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    """Return the JSON form of an estimate or difference; None for None."""
    return estimate.to_json() if estimate else None


def mean_estimate(values: Floats) -> Estimate | None:
    """Return the mean of the scores with its Student-t interval, ignoring NaN; None if there are no scores."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    n = len(known)
    if n == 0:
        return None
    mean = float(known.mean())
    if n == 1:
        return Estimate(mean, ci_low=None, ci_high=None, sd=None, n=1)
    if np.ptp(known) < TOLERANCE:
        return Estimate(mean, ci_low=None, ci_high=None, sd=0.0, n=n)
    sd = float(known.std(ddof=1))
    half_width = t_quantile(1 - ALPHA / 2, n - 1) * sd / sqrt(n)
    return Estimate(mean, mean - half_width, mean + half_width, sd, n)


def shown_estimate(values: Floats) -> Estimate | None:
    """Return the estimate to show users: `mean_estimate`, without an interval for fewer than MIN_SCENARIOS scores."""
    estimate = mean_estimate(values)
    if estimate is None or estimate.n >= MIN_SCENARIOS:
        return estimate
    return replace(estimate, ci_low=None, ci_high=None)


def paired_difference(row: Floats, other: Floats, p: float | None = None) -> Difference | None:
    """Return row − other over their shared scenarios; None if there are none.

    There is no interval for fewer than MIN_SCENARIOS scenarios, and no p for fewer than two.
    """
    estimate = shown_estimate(np.asarray(row) - np.asarray(other))
    if estimate is None:
        return None
    if abs(estimate.mean) < TOLERANCE:
        estimate = replace(estimate, mean=0.0)
    return Difference(**vars(estimate), p=p if estimate.n >= 2 else None)


def simultaneous_differences(
    values: Floats, against: Floats, level: float = ALPHA, *, n_flips: int = N_FLIPS
) -> list[Difference | None]:
    """Return each column − `against`, tested as one family, with step-down p and simultaneous intervals."""
    differences = values - against[:, None]
    adjusted = step_down(differences, n_flips=n_flips)
    critical = critical_t(differences, level, n_flips=n_flips)
    family: list[Difference | None] = []
    for column, p, t in zip(values.T, adjusted, critical, strict=True):
        difference = paired_difference(column, against, p)
        if difference is not None:
            difference = _with_simultaneous_interval(replace(difference, level=level), t)
        family.append(difference)
    return family


def _with_simultaneous_interval(difference: Difference, t: float | None) -> Difference:
    """Return the difference with the interval mean ± t standard errors; without an interval if t is None.

    Step-down tests reject more than single-step intervals do. To agree with the test, the interval of a significant
    difference is cut off at 0, and the interval of any other difference is widened to contain 0.
    """
    if t is None or not difference.sd or difference.n < MIN_SCENARIOS:
        return replace(difference, ci_low=None, ci_high=None)
    half_width = t * difference.sd / sqrt(difference.n)
    low, high = difference.mean - half_width, difference.mean + half_width
    if not difference.separated:
        low, high = min(low, 0.0), max(high, 0.0)
    elif difference.mean > 0:
        low = max(low, 0.0)
    else:
        high = min(high, 0.0)
    return replace(difference, ci_low=low, ci_high=high)


def untested(difference: Difference | None) -> Difference | None:
    """Return the difference without its p and interval."""
    return None if difference is None else replace(difference, ci_low=None, ci_high=None, p=None)


@dataclass(frozen=True, eq=False)
class AdditiveFit:
    """The least-squares fit of `score ~ scenario + column`.

    The adjusted mean of a column is its mean as if it were judged in all core scenarios.
    """

    scenario_effects: Floats  # mean of (score − adjusted mean) in each scenario; NaN if it is not judged
    pseudo_values: Floats  # scenarios × columns, without NaN; their means are the adjusted means; for resampling


def additive_fit(values: Floats, core: Mask) -> AdditiveFit:
    """Fit `score ~ scenario + column`.

    Pseudo-values are adjusted mean + n_scenarios × influence (infinitesimal jackknife, Efron 1982).
    """
    judged = ~np.isnan(values)
    n_scenarios, n_columns = values.shape
    if judged.all() and core.all():
        return AdditiveFit(scenario_effects=values.mean(axis=1) - values.mean(), pseudo_values=values)
    present = judged.astype(np.float64)
    counts = present.sum(axis=1)
    divisors = np.maximum(counts, 1.0)[:, None]
    # The normal equations of the column effects, after the scenario effects are eliminated.
    normal_matrix = np.diag(present.sum(axis=0)) - (present / divisors).T @ present
    inverse = np.linalg.pinv(normal_matrix, hermitian=True)

    def centre_scenarios(scores: Floats) -> Floats:
        """Subtract from each score the mean of its scenario; 0 where there is no score."""
        filled = np.where(judged, scores, 0.0)
        return np.asarray(present * (filled - filled.sum(axis=1, keepdims=True) / divisors))

    column_effects = inverse @ centre_scenarios(values).sum(axis=0)
    column_effects -= column_effects.mean()
    influence = centre_scenarios(values - column_effects) @ inverse
    scenario_means = np.where(judged, values - column_effects, 0.0).sum(axis=1) / np.where(counts > 0, counts, np.nan)
    judged_core = core & (counts > 0)
    overall_mean = float(scenario_means[judged_core].mean()) if judged_core.any() else float(np.nanmean(scenario_means))
    adjusted_means = column_effects + overall_mean
    pseudo_values = np.asarray(adjusted_means + n_scenarios * influence).reshape(n_scenarios, n_columns)
    return AdditiveFit(scenario_means - overall_mean, pseudo_values)


def conditional_power(
    mean: float, sd: float, n_now: int, n_then: int, *, expected_mean: float, critical: float
) -> float:
    """Return the chance that the mean of `n_then` differences exceeds `critical` standard errors (Lachin 2005).

    `mean` is that of the first `n_now` differences, `expected_mean` that of the others. Uses the normal approximation.
    """
    from scipy.special import ndtr

    n_more = n_then - n_now
    if n_more <= 0:
        return float(mean > critical * sd / sqrt(n_now))  # already known: 1 or 0
    expected_sum = n_now * mean + n_more * expected_mean
    return float(ndtr((expected_sum - critical * sd * sqrt(n_then)) / (sd * sqrt(n_more))))


def scenarios_needed(
    distance: float, sd: float | None, *, comparisons: int = 1, at_least: int = 2, level: float = ALPHA
) -> int | None:
    """Return the total number of scenarios that detect a true mean difference of `distance` with 80 % power.

    Returns None if `distance` is 0, if `sd` is unknown, or if the number exceeds MAX_SCENARIOS_NEEDED. Assumes a
    two-sided t test at the Šidák level for `comparisons`. For a leader, pass the shrunken lead as `distance`: the
    observed lead is biased upwards, because the leader is selected for it.
    """
    if sd is None or abs(distance) < TOLERANCE:
        return None
    sd_per_distance = sd / abs(distance)

    def enough(n: int) -> bool:
        """Return whether n scenarios detect a difference of |distance| with 80 % power."""
        return (_detectable_standard_errors(n, comparisons, level) * sd_per_distance) ** 2 <= n

    low = high = max(at_least, 2)
    while not enough(high):
        if high > MAX_SCENARIOS_NEEDED:
            return None
        low, high = high + 1, 2 * high
    # The smallest n that is enough: `high` is, and `bisect_left` returns it if no smaller one is.
    return bisect_left(range(high), x=True, lo=low, key=enough)


def smallest_detectable(sd: float | None, n: int, *, comparisons: int = 1, level: float = ALPHA) -> float | None:
    """Return the true difference that n scenarios detect with 80 % power.

    None if `n` is below MIN_SCENARIOS, or if `sd` is unknown or 0.
    """
    if n < MIN_SCENARIOS or sd is None or sd < TOLERANCE:
        return None
    return _detectable_standard_errors(n, comparisons, level) * sd / sqrt(n)


def _detectable_standard_errors(n: int, comparisons: int, level: float) -> float:
    """Return the true difference that n scenarios detect with 80 % power, in standard errors."""
    return sidak_critical_t(n, comparisons, level) + t_quantile(POWER, n - 1)


def sidak_critical_t(n: int, comparisons: int, level: float) -> float:
    """Return the two-sided critical t of a test over n scenarios, at the Šidák level for `comparisons`."""
    level_of_each = 1 - (1 - level) ** (1 / max(comparisons, 1))
    return t_quantile(1 - level_of_each / 2, n - 1)


def clopper_pearson(successes: float, n: int, alpha: float = ALPHA) -> tuple[float, float]:
    """Return the lower and upper bound of the exact (1 − alpha) interval of a rate.

    `successes` is a count, but need not be whole, because repeats are averaged.
    """
    from scipy.special import betaincinv

    low = float(betaincinv(successes, n - successes + 1, alpha / 2)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, n - successes, 1 - alpha / 2)) if successes < n else 1.0
    return low, high


def is_fragile(lead: float, usable_mean: float | None, floor: float, n_unusable: float, n: int) -> bool:
    """Return whether the lead would be lost if the leader gave unusable answers more often than observed.

    Sign flips assume symmetric differences, but rare unusable answers make them asymmetric. With few scenarios no test
    corrects that. So this compares the lead with the loss at the highest plausible rate of unusable answers, the
    one-sided 95 % Clopper–Pearson bound. `usable_mean` is the leader's mean over its usable answers, None without any.
    """
    if usable_mean is None:
        return True
    _, highest_rate = clopper_pearson(n_unusable, n, alpha=2 * ALPHA)  # 2 α, because only one bound is used
    rate_increase = highest_rate - n_unusable / n
    return lead < rate_increase * (usable_mean - floor)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t distribution with `df` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))
