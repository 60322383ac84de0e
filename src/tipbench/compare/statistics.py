"""What the leaderboard may claim: intervals, differences, levels, and what it would take to know more.

Everything is paired by scenario. Unknown is None, never 0: one scenario gives a mean and no interval, and so do equal
scores in all scenarios, because an interval of no width would claim certainty. A row's own interval is wide where
scenarios differ in difficulty; it takes no part in any comparison, and the leader's is optimistic, the leader having
been chosen for being high.

Rows are ordered by level: the fit score ~ scenario + pair, which is the plain mean as long as all complete rows have
the same scenarios. It lets the extra scenarios count that were judged for the top rows only.
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
    """Nothing can be said, and why."""

    reason: str


@dataclass(frozen=True)
class Estimate:
    """A mean over scenarios with its 95 % Student-t interval; no interval below two scenarios or without spread."""

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None  # over scenarios; None below two
    n: int  # scenarios


@dataclass(frozen=True)
class Difference:
    """Row − reference over the scenarios both have: plain paired-t interval, and the adjusted step-down p."""

    mean: float
    ci_low: float | None
    ci_high: float | None
    sd: float | None
    n: int
    p: float | None  # None below two shared scenarios, and for an incomplete row, which is in no family

    @property
    def separated(self) -> bool | None:
        """Whether the two rows can be told apart; None when p is unknown."""
        return None if self.p is None else self.p <= ALPHA


def mean_estimate(values: Floats) -> Estimate | None:
    """Mean of scenario scores with its Student-t interval; NaN is left out. None when nothing is left."""
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
    """second − first over the scenarios both have; None when they share none."""
    found = mean_estimate(np.asarray(second) - np.asarray(first))
    if found is None:
        return None
    mean = 0.0 if abs(found.mean) < NOTHING else found.mean
    return Difference(mean, found.ci_low, found.ci_high, found.sd, found.n, p if found.n >= 2 else None)


def differences_to(
    matrix: ScoreMatrix, reference: Pair, *, seed: int = SEED, flips: int = FLIPS
) -> dict[Pair, Difference | None]:
    """Every other row − reference. The complete rows are one step-down family; incomplete rows get no p."""
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
    """What each scenario says about each column's level: means over resampled scenarios bootstrap the levels.

    Up to a number common to a scenario's columns these are the scores themselves when nothing is missing; otherwise
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
    """How many scenarios in all give 80 % power to tell a true `distance` from 0.

    None when it is 0, when sd is unknown, and beyond OUT_OF_REACH.
    Two-sided t at the Šidák level for so many comparisons. The observed lead of a leader is flattered by the choice,
    so take the number as a lower guess.
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
    """The true difference found with 80 % power from n scenarios; None where none can be, or sd is unknown or 0."""
    if n < MIN_SCENARIOS or sd is None or sd < NOTHING:
        return None
    return _margin(n, comparisons) * sd / sqrt(n)


def _margin(n: int, comparisons: int) -> float:
    level = 1 - (1 - ALPHA) ** (1 / max(comparisons, 1))
    return t_quantile(1 - level / 2, n - 1) + t_quantile(POWER, n - 1)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, freedom: int) -> float:
    """Student-t quantile."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
