"""Sign-flip tests, empirical Bayes and bootstrap. All are seeded.

Matrices have one row per scenario and one column per candidate, or per paired difference of two candidates. Whole rows
are flipped or drawn: this preserves the dependence between columns. If two candidates are equally good, a scenario's
paired difference is as likely to be d as −d. So sign flips give the null distribution.

The statistic is the paired t. It depends only on r² = S² / (n Q), where S is the sum of the n differences and Q the sum
of their squares. Flips do not change Q, so the statistics of all flips are one matrix product.

Wallace's normal equivalent of t makes columns with different numbers of shared scenarios comparable. With ν degrees of
freedom, z² = ((8ν + 1) / (8ν + 3))² · ν · log(1 + t² / ν), and 1 + t² / ν = 1 / (1 − r²). With t itself the test would
be valid too, but a column with two scenarios would dominate, because it often has a huge t by chance.

The observed signs are one of the flips, so p is never 0 and is valid for any number of flips. A flip and its negative
give the same two-sided statistic, so only half of all 2ⁿ flips are computed. Constant differences need no special case:
r² is 1, and p is at least 2 / 2ⁿ. If all differences are zero, p is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.matrix import Floats, Mask

ALPHA = 0.05  # significance level, if the design has no other
N_FLIPS = 10_000  # random sign flips of a test
N_RESAMPLES = 10_000  # of the bootstrap
SEED = 42  # fixed: the same scores give the same board
TOLERANCE = 1e-9  # smaller differences are rounding errors

MAX_EXACT_SCENARIOS = 12  # up to this number of scenarios, every flip is computed
MAX_CACHED_SCENARIOS = 64  # the flips of more scenarios are not cached
MAX_R_SQUARED = 1 - 1e-9  # a larger r² is lowered to this, because z² is infinite at 1
MAX_R_SQUARED_SINGLE = 1 - 1e-3  # the same in single precision
TAU_GRID = 200  # number of values of τ; see `empirical_bayes`

# Limits of `significantly_better`.
MAX_DIRECT_SUMS = 2_000_000  # up to this number of flipped sums, adjusted p-values are computed
MANY_COLUMNS = 60  # from this number of columns, critical values use single precision, fewer flips and fewer rounds
MANY_COLUMNS_ROUNDS = 3
MANY_COLUMNS_FLIPS = 4000
MAX_SUMS_IN_MEMORY = 30_000_000
BLOCK = 1 << 17  # numbers computed together, to fit in the CPU cache


def sign_flips(n: int, n_flips: int = N_FLIPS) -> Floats:
    """Return a matrix of ±1, flips × scenarios. The first flip, all +1, is the observed data."""
    if n <= MAX_CACHED_SCENARIOS:
        return _cached_signs(n, n_flips)
    return _draw_signs(n, n_flips)


def _draw_signs(n: int, n_flips: int) -> Floats:
    """Return all distinct flips if they are few enough, else random ones."""
    n_distinct = 2 ** max(n - 1, 0)  # half of all: the last scenario keeps its sign
    if n <= MAX_EXACT_SCENARIOS and n_distinct <= n_flips + 1:
        bits = (np.arange(n_distinct)[:, None] >> np.arange(n)) & 1  # the binary digits of each number
    else:
        bits = np.random.default_rng([SEED, 1]).integers(0, 2, size=(n_flips + 1, n), dtype=np.int8)
        bits[0] = 0  # the observed data
    signs = np.where(bits, -1.0, 1.0)
    signs.setflags(write=False)
    return signs


_cached_signs = lru_cache(maxsize=32)(_draw_signs)


@dataclass(frozen=True, eq=False)
class _TestableColumns:
    """The columns of paired differences that have at least two shared scenarios."""

    columns: NDArray[Any]  # their indices among all columns
    shared: Mask  # scenarios × testable columns, without scenarios that no testable column has
    values: Floats  # the differences, in the same shape; 0 if not shared

    @classmethod
    def of(cls, differences: Floats) -> _TestableColumns:
        shared = ~np.isnan(differences)
        columns = np.flatnonzero(shared.sum(axis=0) >= 2)
        scenarios = shared[:, columns].any(axis=1)
        used = np.ix_(scenarios, columns)
        return cls(columns, shared[used], _without_rounding_errors(np.where(shared, differences, 0.0)[used]))

    @property
    def n_shared(self) -> NDArray[Any]:
        return np.asarray(self.shared.sum(axis=0))

    def z_squared(self, values: Floats, n_flips: int) -> Floats:
        """Return z², flips × columns. The first flip is the observed data."""
        sums = sign_flips(len(values), n_flips) @ values
        squares = (values * values).sum(axis=0)
        r_squared = np.square(sums) / np.where(squares > 0, self.n_shared * squares, np.inf)  # 0 if all are zero
        return _wallace_z_squared(r_squared, self.n_shared, MAX_R_SQUARED)


def _without_rounding_errors(values: Floats) -> Floats:
    return np.where(np.abs(values) < TOLERANCE, 0.0, values)


def step_down(differences: Floats, *, n_flips: int = N_FLIPS) -> tuple[float | None, ...]:
    """Return the adjusted two-sided p of each column of paired differences; None for fewer than two shared scenarios.

    A difference is NaN if the scenario is not shared. The method is step-down max-t (Westfall and Young 1993; Romano
    and Wolf 2005). The probability that any column without a true difference gets p ≤ α is at most α.
    """
    adjusted: list[float | None] = [None] * differences.shape[1]
    testable = _TestableColumns.of(differences)
    if testable.columns.size:
        statistic = testable.z_squared(testable.values, n_flips)
        order = np.argsort(-statistic[0], kind="stable")  # the largest observed statistic first
        ordered = statistic[:, order]
        largest_of_rest = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]  # of this column and later ones
        reached = largest_of_rest >= ordered[0] * (1 - 1e-7) - 1e-12  # equal except for rounding errors is enough
        p_values = np.maximum.accumulate(reached.mean(axis=0))  # never less than that of an earlier column
        for column, p in zip(testable.columns[order], p_values, strict=True):
            adjusted[column] = float(p)
    return tuple(adjusted)


def critical_t(differences: Floats, level: float = ALPHA, *, n_flips: int = N_FLIPS) -> tuple[float | None, ...]:
    """Return the t of each column's simultaneous interval (single-step max-t): mean ± t × standard error.

    The critical z², the same for all columns, is the (1 − level) quantile of the largest z² of the centred differences
    over flips. It is converted to each column's t by its number of shared scenarios. None for fewer than two shared
    scenarios, or if there are too few flips for the level: then the interval is unbounded.
    """
    critical: list[float | None] = [None] * differences.shape[1]
    testable = _TestableColumns.of(differences)
    if not testable.columns.size:
        return tuple(critical)
    n_shared = testable.n_shared
    means = np.where(np.isnan(differences), 0.0, differences).sum(axis=0)[testable.columns] / n_shared
    centred = _without_rounding_errors(np.where(testable.shared, testable.values - means, 0.0))
    largest = np.sort(testable.z_squared(centred, n_flips).max(axis=1))
    n_above = int(level * len(largest) + 1e-9)  # flips beyond the quantile; 1e-9 against rounding errors
    if not n_above:
        return tuple(critical)
    r_squared = -np.expm1(-largest[-1 - n_above] / _wallace_factor(n_shared))  # the inverse of _wallace_z_squared
    bounded = r_squared < MAX_R_SQUARED
    critical_ts = np.sqrt((n_shared - 1.0) * r_squared / np.where(bounded, 1 - r_squared, 1.0))
    for column, t, is_bounded in zip(testable.columns, critical_ts, bounded, strict=True):
        critical[column] = float(t) if is_bounded else None
    return tuple(critical)


def significantly_better(values: Floats, *, n_flips: int = N_FLIPS, level: float = ALPHA) -> Mask:
    """Return a mask: [i, j] is True if column i is significantly better than column j.

    The test is step-down max-t over all pairs of columns. With few columns it compares adjusted p-values with `level`.
    With more it uses critical values, with the same result: each round rejects the statistics above the critical value,
    until a round rejects none. The critical value is the (1 − level) quantile, over the flips, of the largest statistic
    among the pairs not rejected yet. The tolerance for rounding errors, and the limits for MANY_COLUMNS, only make the
    test more conservative.
    """
    n, k = values.shape
    if n < 2 or k < 2:
        return np.zeros((k, k), dtype=bool)
    n_column_pairs = k * (k - 1) // 2
    n_sums = n_column_pairs * min(n_flips, 2 ** min(n, 60))  # 60 only avoids huge integers
    if n_sums <= MAX_DIRECT_SUMS:
        first, second = np.triu_indices(k, 1)
        differences = values[:, first] - values[:, second]
        adjusted = np.array([1.0 if p is None else p for p in step_down(differences, n_flips=n_flips)])
        totals = np.where(np.isnan(differences), 0.0, differences).sum(axis=0)
        better = np.zeros((k, k), dtype=bool)
        better[first, second] = (adjusted <= level) & (totals > 0)
        better[second, first] = (adjusted <= level) & (totals < 0)
        return better
    max_rounds = k * k  # each round but the last rejects at least one pair
    if k >= MANY_COLUMNS:
        n_flips, max_rounds = min(n_flips, MANY_COLUMNS_FLIPS), MANY_COLUMNS_ROUNDS
    family = _AllPairs(values, n_flips)
    rejected = np.zeros((k, k), dtype=bool)
    for _ in range(max_rounds):
        newly_rejected = (family.observed > family.critical_value(~rejected, level)) & ~rejected
        if not newly_rejected.any():
            break
        rejected |= newly_rejected
    return np.asarray(rejected & (family.sums > 0))


@dataclass(frozen=True)
class EmpiricalBayes:
    """Result of `empirical_bayes`."""

    p_best: Floats  # by column; sums to 1
    shrinkage: float  # posterior mean of B: the part of an observed difference that remains, 0 to 1


def empirical_bayes(values: Floats, *, n_resamples: int = N_RESAMPLES) -> EmpiricalBayes:
    """Return the probability that each column has the highest true mean (Efron and Morris 1975; Gelman 2006).

    The true means are assumed to be normal around a common mean, with an unknown standard deviation τ. The posterior
    of τ is computed on a grid, with a half-Cauchy prior whose scale is the standard error. Given τ, an observed
    difference is multiplied by B = τ² / (τ² + se²), and its error is √B × that of a bootstrap over scenarios. Without
    shrinkage, the best of many close columns would look far too certain.

    `values` must not contain NaN. If cells are missing, pass the pseudo-values of `statistics.additive_fit`.
    """
    n, k = values.shape
    if k == 1:
        return EmpiricalBayes(np.ones(1), 1.0)
    rng = np.random.default_rng([SEED, 2])
    column_means = values.mean(axis=0)
    deviations = column_means - column_means.mean()
    residuals = values - values.mean(axis=1, keepdims=True) - deviations
    se_squared = float(np.square(residuals).sum()) / ((n - 1) * (k - 1)) / n
    if se_squared < TOLERANCE**2:
        best = (deviations >= deviations.max() - TOLERANCE).astype(np.float64)
        return EmpiricalBayes(best / best.sum(), 1.0)
    ratios = np.tan(np.linspace(0, np.pi / 2, TAU_GRID + 2)[1:-1])  # τ / se, at equally spaced quantiles of the prior
    sum_of_squares = float(deviations @ deviations)
    # The log-likelihood of each τ: the k − 1 contrasts of the means are normal with variance τ² + se².
    log_weight = -0.5 * (k - 1) * np.log1p(ratios**2) - 0.5 * sum_of_squares / se_squared / (1 + ratios**2)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    factors = ratios**2 / (1 + ratios**2)  # B for each τ
    # Each resample has its own B: equally spaced quantiles of the posterior, not random draws.
    quantiles = (np.arange(n_resamples) + 0.5) / n_resamples
    factor_of_resample = factors[np.searchsorted(np.cumsum(weight)[:-1], quantiles)]
    # Count how often each scenario is drawn in each resample: one bincount, with the numbers from i × n for resample i.
    drawn = rng.integers(0, n, size=(n_resamples, n), dtype=np.int32)
    drawn += (np.arange(n_resamples, dtype=np.int32) * n)[:, None]
    draw_counts = np.bincount(drawn.ravel(), minlength=n_resamples * n).reshape(n_resamples, n).astype(np.float64)
    # n / (n − 1) corrects the variance of the bootstrap. The chi-squared numbers are needed, because the standard error
    # is an estimate. The last n turns sums into means.
    error_scales = np.sqrt(n / (n - 1)) * np.sqrt((n - 1) / rng.chisquare(n - 1, size=(n_resamples, 1))) / n
    p_best = np.zeros(k)
    part_size = max(1, BLOCK // k)
    for start in range(0, n_resamples, part_size):
        part = slice(start, start + part_size)
        part_factors = factor_of_resample[part, None]
        errors = draw_counts[part] @ residuals * error_scales[part]
        means = part_factors * deviations + np.sqrt(part_factors) * errors
        best = means >= means.max(axis=1, keepdims=True) - TOLERANCE
        p_best += (best / best.sum(axis=1, keepdims=True)).sum(axis=0)
    p_best /= n_resamples
    return EmpiricalBayes(p_best, float(weight @ factors))


def _wallace_z_squared(r_squared: NDArray[Any], n_shared: NDArray[Any], max_r_squared: float) -> NDArray[Any]:
    return np.asarray(_wallace_factor(n_shared) * -np.log1p(-np.minimum(r_squared, max_r_squared)))


def _wallace_factor(n_shared: NDArray[Any]) -> Floats:
    """Return the factor before the logarithm in Wallace's z²."""
    degrees_of_freedom = np.maximum(n_shared - 1.0, 0.0)
    return np.asarray(degrees_of_freedom * np.square((8 * degrees_of_freedom + 1) / (8 * degrees_of_freedom + 3)))


class _AllPairs:
    """The differences of all pairs of columns, as one family of tests.

    The flipped sum of a difference is the difference of the flipped sums of two columns, over their shared scenarios.
    Many columns are judged in the same scenarios: they have the same pattern. So the sums of each column over each
    pattern are computed, instead of one sum for each pair of columns.
    """

    def __init__(self, values: Floats, n_flips: int) -> None:
        judged = ~np.isnan(values)
        # Subtracting each scenario's mean does not change the differences of columns, and reduces rounding errors.
        totals = np.where(judged, values, 0.0).sum(axis=1, keepdims=True)
        centred = np.where(judged, values - totals / np.maximum(judged.sum(axis=1, keepdims=True), 1), 0.0)
        patterns, self._pattern_of_column = np.unique(judged, axis=1, return_inverse=True)
        present = judged.astype(np.float64)
        self._n_shared = present.T @ present
        cross = (centred**2).T @ present  # [i, j]: sum of squares of column i over the scenarios of column j
        squares = cross + cross.T - 2 * centred.T @ centred  # of the differences of columns i and j
        # Smaller squares are rounding errors: all differences are zero.
        testable = (squares > 1e-12 * (cross + cross.T)) & (self._n_shared >= 2)
        np.fill_diagonal(testable, val=False)
        # r² = sum² × scale
        scale = np.divide(1.0, self._n_shared * squares, out=np.zeros_like(squares), where=testable)
        self.sums = centred.T @ present - present.T @ centred  # of the differences of columns i and j
        self._equal_n_shared = bool(np.ptp(self._n_shared) == 0)
        self._single_precision = values.shape[1] >= MANY_COLUMNS
        precision = np.float32 if self._single_precision else np.float64
        self._scale = scale.astype(precision)
        n_flips = max(min(n_flips, MAX_SUMS_IN_MEMORY // (patterns.shape[1] * values.shape[1])), 100)
        signs = np.ascontiguousarray(sign_flips(len(values), n_flips).T, dtype=precision)
        centred = centred.astype(precision)
        sums_over_all = centred.T @ signs
        # A pattern usually has most scenarios, so it is faster to subtract the scenarios that it lacks.
        pattern_sums = [sums_over_all - centred[~pattern].T @ signs[~pattern] for pattern in patterns.T]
        self._flipped_sums: NDArray[Any] = np.stack(pattern_sums)  # pattern × column × flip
        self.observed = self._statistic(np.square(self.sums) * scale, self._n_shared)

    def critical_value(self, not_rejected: Mask, level: float) -> float:
        """Return the (1 − level) quantile, over flips, of the largest statistic of the column pairs `not_rejected`."""
        scale = self._scale * not_rejected
        _, k, n_flips = self._flipped_sums.shape
        part_size = max(BLOCK // k, 64)
        parts = [slice(start, start + part_size) for start in range(0, n_flips, part_size)]
        largest = np.concatenate([self._largest(scale, part) for part in parts])
        n_above = int(level * n_flips + 1e-9)
        tolerance = 2e-4 if self._single_precision else 1e-7
        return float(np.sort(largest)[n_flips - 1 - n_above]) * (1 + tolerance) + 1e-12

    def _largest(self, scale: NDArray[Any], flips: slice) -> Floats:
        """Return the largest statistic of each flip over all pairs of columns with a scale above 0."""
        sums = self._flipped_sums[:, :, flips]
        n_patterns, k, n_flips = sums.shape
        pattern = self._pattern_of_column
        largest = np.zeros(n_flips)
        for i in range(k - 1):
            # Sums of column i, over the pattern of each later column; one sum is enough if all patterns are equal.
            own_sums = sums[0, i] if n_patterns == 1 else sums[pattern[i + 1 :], i]
            r_squared = own_sums - sums[pattern[i], i + 1 :]  # flipped sums; made r² in place, to save memory
            np.square(r_squared, out=r_squared)
            r_squared *= scale[i, i + 1 :, None]
            largest_of_column = self._statistic(r_squared, self._n_shared[i, i + 1 :, None]).max(axis=0)
            np.maximum(largest, largest_of_column, out=largest)
        return largest

    def _statistic(self, r_squared: NDArray[Any], n_shared: Floats) -> NDArray[Any]:
        if self._equal_n_shared:  # then r² and z² have the same order
            return r_squared
        max_r_squared = MAX_R_SQUARED_SINGLE if self._single_precision else MAX_R_SQUARED
        return _wallace_z_squared(r_squared, n_shared, max_r_squared)
