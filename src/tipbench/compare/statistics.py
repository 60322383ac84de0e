"""Statistics of the leaderboard: intervals, paired differences, levels and sample sizes.

All comparisons are paired by scenario. Unknown values are None, never 0: a single scenario has a mean but no interval,
and so do equal scores in all scenarios, because an interval of zero width would imply certainty. A row's own interval
is wide if scenarios differ in difficulty, and is not used in any comparison. The leader's is biased upwards, because
the leader is selected for its high score.

Rows are ordered by level: the fit score ~ scenario + pair, which equals the mean if all complete rows have the same
scenarios. It makes use of additional scenarios that are judged for the top rows only.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np

from tipbench.compare.matrix import Floats, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, FLIPS, MIN_SCENARIOS, NOTHING, SEED, step_down

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
    """Row − reference over their shared scenarios, with unadjusted paired-t interval and adjusted step-down p."""

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None
    n: int
    p: float | None  # None for fewer than two shared scenarios, and for incomplete rows, which are not tested

    @property
    def separated(self) -> bool | None:
        """Whether the two rows differ significantly; None if p is unknown."""
        return None if self.p is None else self.p <= ALPHA


def mean_estimate(values: Floats) -> Estimate | None:
    """Returns the mean of scenario scores with its Student-t interval, ignoring NaN; None if no scores are left."""
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


def paired_difference(first: Floats, second: Floats, p: float | None = None) -> Difference | None:
    """Returns second − first over their shared scenarios; None if there are none."""
    found = mean_estimate(np.asarray(second) - np.asarray(first))
    if found is None:
        return None
    mean = 0.0 if abs(found.mean) < NOTHING else found.mean
    return Difference(mean, found.ci_low, found.ci_high, found.sd, found.n, p if found.n >= 2 else None)


def differences_to(
    matrix: ScoreMatrix, reference: Pair, *, seed: int = SEED, flips: int = FLIPS
) -> dict[Pair, Difference | None]:
    """Returns every other row − reference. Complete rows form one step-down family; incomplete rows have no p."""
    own = matrix.column(reference)
    if own is None:
        raise ValueError(f"{reference} is not on the board; it has {', '.join(map(str, matrix.pairs)) or 'no rows'}.")
    family = [int(at) for at in np.flatnonzero(matrix.complete) if at != own]
    against = matrix.values[:, [own]]
    adjusted = dict(zip(family, step_down(matrix.values[:, family] - against, seed=seed, flips=flips), strict=True))
    return {
        pair: paired_difference(matrix.values[:, own], matrix.values[:, at], adjusted.get(at))
        for at, pair in enumerate(matrix.pairs)
        if at != own
    }


def pseudo_values(values: Floats) -> Floats:
    """Returns the contribution of each scenario to each column's level; resampling its rows bootstraps the levels.

    Up to a constant per scenario, these are the scores themselves if none are missing; otherwise
    level + n × the scenario's influence on it (infinitesimal jackknife).
    """
    judged = ~np.isnan(values)
    if judged.all():
        return values
    n, k = values.shape
    present = judged.astype(np.float64)
    per_row = np.maximum(present.sum(axis=1, keepdims=True), 1.0)
    design = np.diag(present.sum(axis=0)) - (present / per_row).T @ present
    inverse = np.linalg.pinv(design, hermitian=True)

    def within_rows(numbers: Floats) -> Floats:
        filled = np.where(judged, numbers, 0.0)
        return np.asarray(present * (filled - filled.sum(axis=1, keepdims=True) / per_row))

    level = inverse @ within_rows(values).sum(axis=0)
    influence = within_rows(values - level) @ inverse
    full = judged.all(axis=1)
    anchor = values[full].mean() if full.any() else np.nanmean(values)
    return np.asarray(level - level.mean() + anchor + n * influence).reshape(n, k)


def scenarios_needed(distance: float, sd: float | None, *, comparisons: int = 1, at_least: int = 2) -> int | None:
    """Returns the total number of scenarios that detect a true `distance` from 0 with 80 % power.

    None if `distance` is 0, `sd` is unknown, or the number exceeds OUT_OF_REACH.
    Assumes a two-sided t test at the Šidák level for `comparisons`. The observed lead of a leader is biased upwards by
    selection, so the result tends to be too low.
    """
    if sd is None or abs(distance) < NOTHING:
        return None
    effect = sd / abs(distance)

    def enough(n: int) -> bool:
        return (_margin(n, comparisons) * effect) ** 2 <= n

    low = high = max(at_least, 2)
    while not enough(high):
        if high > OUT_OF_REACH:
            return None
        low, high = high + 1, 2 * high
    return bisect_left(range(high), x=True, lo=low, key=enough)


def smallest_detectable(sd: float | None, n: int, *, comparisons: int = 1) -> float | None:
    """Returns the difference that n scenarios detect with 80 % power; None if n is too small or sd unknown or 0."""
    if n < MIN_SCENARIOS or sd is None or sd < NOTHING:
        return None
    return _margin(n, comparisons) * sd / sqrt(n)


def _margin(n: int, comparisons: int) -> float:
    level = 1 - (1 - ALPHA) ** (1 / max(comparisons, 1))
    return t_quantile(1 - level / 2, n - 1) + t_quantile(POWER, n - 1)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: int) -> float:
    """Returns the Student-t quantile; cached."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
