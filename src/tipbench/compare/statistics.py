"""Statistics of the leaderboard: intervals, paired differences, levels and sample sizes.

All comparisons are paired by scenario. Unknown values are None, never 0: a single scenario has a mean but no interval,
and so do equal scores in all scenarios, because an interval of zero width would imply certainty. A row's own interval
is wide if scenarios differ in difficulty, and is not used in any comparison. The leader's is biased upwards, because
the leader is selected for its high score.

Rows are ordered by adjusted mean: the fit score ~ scenario + pair, which equals the mean if all rows have the same
scenarios. It allows for the scenarios a row lacks, and uses additional scenarios judged for the top rows only.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt

import numpy as np

from tipbench.compare.matrix import Floats, Mask
from tipbench.compare.resampling import ALPHA, FLIPS, NOTHING, SEED, critical_t, step_down
from tipbench.plan.design import MIN_SCENARIOS

POWER = 0.8
OUT_OF_REACH = 1_000_000  # scenarios


@dataclass(frozen=True)
class Unknown:
    """A result that cannot be computed, with the reason."""

    reason: str


@dataclass(frozen=True)
class Estimate:
    """A mean over scenarios with its 95 % Student-t interval, None for fewer than two scenarios or zero spread."""

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None  # over scenarios; None for fewer than two
    n: int  # scenarios


@dataclass(frozen=True)
class Difference:
    """Row − other over their shared scenarios, with interval and p; those of a board are simultaneous."""

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None
    n: int
    p: float | None  # None for fewer than two shared scenarios, and for rows that are not tested
    level: float = ALPHA  # at which p is significant

    @property
    def separated(self) -> bool | None:
        """Whether the two rows differ significantly; None if p is unknown."""
        return None if self.p is None else self.p <= self.level


def difference_json(found: Difference | None) -> dict[str, float | None] | None:
    """Return the JSON form of a difference."""
    if found is None:
        return None
    return {"mean": found.mean, "ci_low": found.ci_low, "ci_high": found.ci_high, "p": found.p}


def mean_estimate(values: Floats) -> Estimate | None:
    """Return the mean of scenario scores with its Student-t interval, ignoring NaN; None if no scores are left."""
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    n = len(known)
    if n == 0:
        return None
    mean = float(known.mean())
    if n == 1:
        return Estimate(mean, None, None, None, 1)
    if np.ptp(known) < NOTHING:
        return Estimate(mean, None, None, 0.0, n)
    sd = float(known.std(ddof=1))
    half = t_quantile(1 - ALPHA / 2, n - 1) * sd / sqrt(n)
    return Estimate(mean, mean - half, mean + half, sd, n)


def shown_estimate(values: Floats) -> Estimate | None:
    """Return `mean_estimate` without the interval below MIN_SCENARIOS, where it would suggest too much."""
    found = mean_estimate(values)
    return found if found is None or found.n >= MIN_SCENARIOS else replace(found, ci_low=None, ci_high=None)


def paired_difference(first: Floats, second: Floats, p: float | None = None) -> Difference | None:
    """Return second − first over their shared scenarios; None if there are none, without interval below six."""
    found = shown_estimate(np.asarray(second) - np.asarray(first))
    if found is None:
        return None
    mean = 0.0 if abs(found.mean) < NOTHING else found.mean
    return Difference(mean, found.ci_low, found.ci_high, found.sd, found.n, p if found.n >= 2 else None)


def simultaneous_differences(
    values: Floats, against: Floats, level: float = ALPHA, *, seed: int = SEED, flips: int = FLIPS
) -> list[Difference | None]:
    """Return each column − `against` as one family: step-down p, and simultaneous intervals that agree with it.

    The single-step interval of a separated row is clipped at 0, that of a tied row widened to contain 0: step-down
    separates more than single-step intervals do, and both are on one page.
    """
    differences = values - against[:, None]
    adjusted = step_down(differences, seed=seed, flips=flips)
    widths = critical_t(differences, level, seed=seed, flips=flips)
    family: list[Difference | None] = []
    for column, p, width in zip(values.T, adjusted, widths, strict=True):
        found = paired_difference(against, column, p)
        if found is not None:
            found = replace(found, level=level, ci_low=None, ci_high=None)
            if width is not None and found.sd and found.n >= MIN_SCENARIOS and found.p is not None:
                half = width * found.sd / sqrt(found.n)
                low, high = found.mean - half, found.mean + half
                if not found.separated:
                    low, high = min(low, 0.0), max(high, 0.0)
                elif found.mean > 0:
                    low = max(low, 0.0)
                else:
                    high = min(high, 0.0)
                found = replace(found, ci_low=low, ci_high=high)
        family.append(found)
    return family


def untested(found: Difference | None) -> Difference | None:
    """Return the difference without p and interval, for a row or a time at which nothing is tested."""
    return None if found is None else replace(found, ci_low=None, ci_high=None, p=None)


@dataclass(frozen=True, eq=False)
class Fit:
    """The fit score ~ scenario + column, and each scenario's contribution to each column's level."""

    levels: Floats  # adjusted means of the columns, as if each were judged in all core scenarios
    effects: Floats  # how much higher the scores of each scenario are than the levels; NaN if not judged
    pseudo: Floats  # rows are scenarios; their means are the levels, and resampling them bootstraps the levels


def additive_fit(values: Floats, core: Mask) -> Fit:
    """Fit the columns by least squares. Pseudo-values are level + n × influence (infinitesimal jackknife)."""
    judged = ~np.isnan(values)
    n, k = values.shape
    if judged.all() and core.all():
        return Fit(values.mean(axis=0), values.mean(axis=1) - values.mean(), values)
    present = judged.astype(np.float64)
    counts = present.sum(axis=1)
    per_row = np.maximum(counts, 1.0)[:, None]
    design = np.diag(present.sum(axis=0)) - (present / per_row).T @ present
    inverse = np.linalg.pinv(design, hermitian=True)

    def within_rows(numbers: Floats) -> Floats:
        filled = np.where(judged, numbers, 0.0)
        return np.asarray(present * (filled - filled.sum(axis=1, keepdims=True) / per_row))

    level = inverse @ within_rows(values).sum(axis=0)
    level -= level.mean()
    influence = within_rows(values - level) @ inverse
    effects = np.where(judged, values - level, 0.0).sum(axis=1) / np.where(counts > 0, counts, np.nan)
    anchored = core & (counts > 0)
    anchor = float(effects[anchored].mean()) if anchored.any() else float(np.nanmean(effects))
    return Fit(level + anchor, effects - anchor, np.asarray(level + anchor + n * influence).reshape(n, k))


def conditional_power(lead: float, sd: float, now: int, then: int, *, drift: float, width: float) -> float:
    """Return the chance that a mean over `then` scenarios exceeds `width` standard errors, given the first `now`.

    Normal approximation: `lead` is the mean over the first `now`; the rest are expected to have the mean `drift`.
    """
    from scipy.special import ndtr

    more = then - now
    if more <= 0:
        return float(lead > width * sd / sqrt(now))
    return float(ndtr((now * lead + more * drift - width * sd * sqrt(then)) / (sd * sqrt(more))))


def scenarios_needed(
    distance: float, sd: float | None, *, comparisons: int = 1, at_least: int = 2, level: float = ALPHA
) -> int | None:
    """Return the total number of scenarios that detect a true `distance` from 0 with 80 % power.

    None if `distance` is 0, `sd` is unknown, or the number exceeds OUT_OF_REACH.
    Assumes a two-sided t test at the Šidák level for `comparisons`. The observed lead of a leader is biased upwards by
    selection: pass the shrunken one.
    """
    if sd is None or abs(distance) < NOTHING:
        return None
    effect = sd / abs(distance)

    def enough(n: int) -> bool:
        return (_margin(n, comparisons, level) * effect) ** 2 <= n

    low = high = max(at_least, 2)
    while not enough(high):
        if high > OUT_OF_REACH:
            return None
        low, high = high + 1, 2 * high
    return bisect_left(range(high), x=True, lo=low, key=enough)


def smallest_detectable(sd: float | None, n: int, *, comparisons: int = 1, level: float = ALPHA) -> float | None:
    """Return the difference that n scenarios detect with 80 % power; None if n is too small or sd unknown or 0."""
    if n < MIN_SCENARIOS or sd is None or sd < NOTHING:
        return None
    return _margin(n, comparisons, level) * sd / sqrt(n)


def _margin(n: int, comparisons: int, level: float) -> float:
    return sidak_width(n, comparisons, level) + t_quantile(POWER, n - 1)


def sidak_width(n: int, comparisons: int, level: float) -> float:
    """Return the two-sided critical t over n scenarios at the Šidák level for this number of comparisons."""
    each = 1 - (1 - level) ** (1 / max(comparisons, 1))
    return t_quantile(1 - each / 2, n - 1)


def exact_rate(successes: float, n: int) -> tuple[float, float]:
    """Return the 95 % Clopper–Pearson interval of a rate; `successes` may be a fraction (means over repeats)."""
    from scipy.special import betaincinv

    low = float(betaincinv(successes, n - successes + 1, ALPHA / 2)) if successes > 0 else 0.0
    high = float(betaincinv(successes + 1, n - successes, 1 - ALPHA / 2)) if successes < n else 1.0
    return low, high


def is_fragile(lead: float, quality: float | None, floor: float, unusable: float, n: int) -> bool:
    """Return whether a lead could be undone by unusable answers that the leader may give more often than seen.

    Sign flips assume symmetric differences, which rare unusable answers are not; no test repairs that with few
    scenarios. So the lead is compared with what the upper 95 % Clopper–Pearson bound of the leader's unusable rate
    would cost it. `unusable` of n answers were; `quality` is the mean of the others, None if there are none.
    """
    from scipy.special import betaincinv

    if quality is None:
        return True
    upper = float(betaincinv(unusable + 1, n - unusable, 1 - ALPHA)) if unusable < n else 1.0
    return lead < (upper - unusable / n) * (quality - floor)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: int) -> float:
    """Return the Student-t quantile; cached."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
