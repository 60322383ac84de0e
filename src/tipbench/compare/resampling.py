"""Seeded sign flips and bootstrap over whole scenarios, the same for all rows.

If two rows are equally good, a scenario's paired difference is as likely to be d as −d. Flipping the signs of whole
scenarios gives the null distribution and preserves the dependence between rows. The statistic is the paired t. It
depends only on r² = S² / (n Q) (S sum, Q sum of squares of the differences; flips do not change Q), so all flips are
one matrix product. Rows with different numbers of shared scenarios are put on one scale by Wallace's normal
equivalent of t, z² = ((8ν + 1) / (8ν + 3))² · ν · log(1 + t² / ν), with 1 + t² / ν = 1 / (1 − r²). Without it, a row
with two scenarios, which reaches a huge t half of the time by chance, would dominate. The test is valid on any scale.

The observed signs are one of the flips, so p is never 0 and is valid for any number of flips. A flip and its negative
give the same two-sided statistic, so only half of all 2ⁿ are computed. Constant differences need no special case:
r² = 1 and p follows from the flips, at least 2 / 2ⁿ. If all differences are zero, p = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.matrix import Floats, Mask

ALPHA = 0.05
FLIPS = 10_000
RESAMPLES = 10_000
EXACT_UP_TO = 12  # scenarios; up to this number, every flip is computed
SEED = 42

NOTHING = 1e-9  # smaller differences are rounding errors
MAX_R_SQUARED = 1 - 1e-9  # a larger r² is a rounding error
MAX_R_SQUARED_SINGLE = 1 - 1e-3  # likewise in single precision, for the logarithm
LARGE = 60  # rows; from this number on, all pairs are tested in single precision, with fewer flips and rounds
LARGE_ROUNDS = 3
LARGE_FLIPS = 4000
SMALL = 2_000_000  # flipped sums of all pairs; up to this number, they are computed at once
GRID = 200  # values of τ
CACHED = 64  # scenarios; flips of longer boards are not kept in memory
MEMORY = 30_000_000  # maximum number of flipped sums in memory
BLOCK = 1 << 17  # numbers per block, to fit in the CPU cache


def sign_flips(n: int, *, seed: int = SEED, flips: int = FLIPS) -> Floats:
    """Return ±1 signs with flips as rows and scenarios as columns; the first row is all +1, the observed data."""
    return _cached_flips(n, seed, flips) if n <= CACHED else _signs(n, seed, flips)


@lru_cache(maxsize=32)
def _cached_flips(n: int, seed: int, flips: int) -> Floats:
    signs = _signs(n, seed, flips)
    signs.setflags(write=False)
    return signs


def _signs(n: int, seed: int, flips: int) -> Floats:
    half = 1 << max(n - 1, 0)
    if n <= EXACT_UP_TO and half <= flips + 1:
        bits = (np.arange(half)[:, None] >> np.arange(n)) & 1
    else:
        bits = np.random.default_rng([seed, 1]).integers(0, 2, size=(flips + 1, n), dtype=np.int8)
        bits[0] = 0
    return np.where(bits, -1.0, 1.0)


def step_down(differences: Floats, *, seed: int = SEED, flips: int = FLIPS) -> tuple[float | None, ...]:
    """Return the adjusted two-sided p of each column of paired differences (rows are scenarios; NaN = not shared).

    Step-down max-t (Westfall and Young 1993; Romano and Wolf 2005): the probability that any column without a true
    difference gets p ≤ α is at most α. None for fewer than two shared scenarios.
    """
    found: list[float | None] = [None] * differences.shape[1]
    known, counts, block = _testable(differences)
    if known.size:
        sums = sign_flips(len(block), seed=seed, flips=flips) @ block
        evidence = _evidence(sums, (block * block).sum(axis=0), counts)
        order = np.argsort(-evidence[0], kind="stable")
        ordered = evidence[:, order]
        largest_of_rest = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]
        reached = largest_of_rest >= ordered[0] * (1 - 1e-7) - 1e-12
        for column, p in zip(known[order], np.maximum.accumulate(reached.mean(axis=0)), strict=True):
            found[column] = float(p)
    return tuple(found)


def critical_t(
    differences: Floats, level: float = ALPHA, *, seed: int = SEED, flips: int = FLIPS
) -> tuple[float | None, ...]:
    """Return how many standard errors wide a single-step simultaneous interval is on each side, by column.

    The (1 − level) quantile over flips of the largest statistic of the centred differences. None for fewer than two
    shared scenarios, or if there are too few flips for the level, because the interval would be unbounded.
    """
    found: list[float | None] = [None] * differences.shape[1]
    known, counts, block = _testable(differences)
    if not known.size:
        return tuple(found)
    shared = ~np.isnan(differences)
    means = np.where(shared, differences, 0.0).sum(axis=0)[known] / counts
    used = shared[:, known].any(axis=1)
    centred = np.where(shared[np.ix_(used, known)], block - means, 0.0)
    centred[np.abs(centred) < NOTHING] = 0.0
    sums = sign_flips(len(centred), seed=seed, flips=flips) @ centred
    largest = np.sort(_evidence(sums, (centred * centred).sum(axis=0), counts).max(axis=1))
    may_exceed = int(level * len(largest) + 1e-9)
    if not may_exceed:
        return tuple(found)
    r_squared = -np.expm1(-largest[-1 - may_exceed] / _weights(counts))
    bounded = r_squared < MAX_R_SQUARED
    widths = np.sqrt((counts - 1.0) * r_squared / np.where(bounded, 1 - r_squared, 1.0))
    for column, width, finite in zip(known, widths, bounded, strict=True):
        found[column] = float(width) if finite else None
    return tuple(found)


def _testable(differences: Floats) -> tuple[NDArray[Any], NDArray[Any], Floats]:
    """Return the columns with at least two shared scenarios, their counts, and their values with 0 if not shared."""
    shared = ~np.isnan(differences)
    known = np.flatnonzero(shared.sum(axis=0) >= 2)
    used = shared[:, known].any(axis=1)
    block = np.where(shared, differences, 0.0)[np.ix_(used, known)]
    block[np.abs(block) < NOTHING] = 0.0
    return known, shared.sum(axis=0)[known], block


def better_than(
    values: Floats, *, seed: int = SEED, flips: int = FLIPS, alpha: float = ALPHA, rounds: int | None = None
) -> Mask:
    """Return a mask: [i, j] if column i is significantly better than column j, by step-down max-t over all pairs.

    With many columns it uses critical values: rejects statistics above the (1 − α) quantile of the largest, then
    repeats over the rest until no more are rejected, with the same result as adjusted p. Stopping earlier (`rounds`,
    set for very many columns), fewer flips and the tolerance for rounding only make the test more conservative.
    """
    n, k = values.shape
    if n < 2 or k < 2:
        return np.zeros((k, k), dtype=bool)
    if k * (k - 1) // 2 * min(flips, 2 ** min(n, 60)) <= SMALL and rounds is None:
        first, second = np.triu_indices(k, 1)
        differences = values[:, first] - values[:, second]
        adjusted = np.array([1.0 if p is None else p for p in step_down(differences, seed=seed, flips=flips)])
        totals = np.where(np.isnan(differences), 0.0, differences).sum(axis=0)
        better = np.zeros((k, k), dtype=bool)
        better[first, second] = (adjusted <= alpha) & (totals > 0)
        better[second, first] = (adjusted <= alpha) & (totals < 0)
        return better
    family = _Family(values, seed=seed, flips=min(flips, LARGE_FLIPS) if k >= LARGE else flips)
    rejected = np.zeros((k, k), dtype=bool)
    for _ in range(rounds or (LARGE_ROUNDS if k >= LARGE else k * k)):
        limit = family.critical(~rejected, alpha)
        more = (family.observed > limit) & ~rejected
        if not more.any():
            break
        rejected |= more
    return np.asarray(rejected & (family.sums > 0))


@dataclass(frozen=True)
class Shrunken:
    """Probabilities of being best, and how much of the observed differences between columns remains after shrinking."""

    best: Floats  # sums to 1
    kept: float  # 0 to 1


def shrink(values: Floats, *, seed: int = SEED, resamples: int = RESAMPLES) -> Shrunken:
    """Return how probable it is that each column has the highest true mean, by empirical Bayes.

    The true means are taken as normal around a common mean, with a standard deviation τ that is unknown; its posterior
    is computed on a grid, under a half-Cauchy prior whose scale is the standard error. Given τ, an observed difference
    shrinks by B = τ² / (τ² + se²), and the remaining error is √B × that of a bootstrap over scenarios, which preserves
    the dependence between columns. Without shrinking, the best of many close columns looks far too certain.
    `values` must not contain NaN; for an incomplete layout, pass the pseudo-values of `statistics.additive_fit`.
    """
    n, k = values.shape
    if k == 1:
        return Shrunken(np.ones(1), 1.0)
    rng = np.random.default_rng([seed, 2])
    levels = values.mean(axis=0)
    residuals = values - values.mean(axis=1, keepdims=True) - (levels - levels.mean())
    se2 = float(np.square(residuals).sum()) / ((n - 1) * (k - 1)) / n
    spread = levels - levels.mean()
    if se2 < NOTHING**2:
        best = (spread >= spread.max() - NOTHING).astype(np.float64)
        return Shrunken(best / best.sum(), 1.0)
    ratio = np.tan(np.linspace(0, np.pi / 2, GRID + 2)[1:-1])  # τ / se, at equal steps of the prior
    log_weight = -0.5 * (k - 1) * np.log1p(ratio**2) - 0.5 * float(spread @ spread) / se2 / (1 + ratio**2)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    kept = ratio**2 / (1 + ratio**2)
    chosen = kept[np.searchsorted(np.cumsum(weight)[:-1], (np.arange(resamples) + 0.5) / resamples)]
    # Count how often each scenario is drawn in each resample; adding n per resample lets one bincount do it.
    drawn = rng.integers(0, n, size=(resamples, n), dtype=np.int32)
    drawn += (np.arange(resamples, dtype=np.int32) * n)[:, None]
    times = np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)
    errors = times @ residuals / n * np.sqrt(n / (n - 1))
    errors *= np.sqrt((n - 1) / rng.chisquare(n - 1, size=(resamples, 1)))  # the standard error is estimated too
    means = chosen[:, None] * spread + np.sqrt(chosen)[:, None] * errors
    best = means >= means.max(axis=1, keepdims=True) - NOTHING
    shares = np.asarray((best / best.sum(axis=1, keepdims=True)).sum(axis=0) / resamples).reshape(k)
    return Shrunken(shares, float(weight @ kept))


def _evidence(sums: Floats, squares: Floats, counts: NDArray[Any]) -> Floats:
    """Return the statistic z² of each flip (rows) and column, from the sums and the sum of squares of a column."""
    r_squared = np.square(sums) / np.where(squares > 0, counts * squares, np.inf)
    return np.asarray(_weights(counts) * -np.log1p(-np.minimum(r_squared, MAX_R_SQUARED)))


def _weights(counts: NDArray[Any]) -> Floats:
    """Return the factor of the logarithm in Wallace's z², by the number of scenarios."""
    freedom = np.maximum(counts - 1.0, 0.0)
    return np.asarray(freedom * np.square((8 * freedom + 1) / (8 * freedom + 3)))


class _Family:
    """The test family of all pairs of columns.

    The flipped sum of a difference is the difference of two columns' flipped sums over their shared scenarios, so only
    (columns × patterns of missing cells) sums are needed, not one per pair.
    """

    def __init__(self, values: Floats, *, seed: int, flips: int) -> None:
        judged = ~np.isnan(values)
        totals = np.where(judged, values, 0.0).sum(axis=1, keepdims=True)
        centred = np.where(judged, values - totals / np.maximum(judged.sum(axis=1, keepdims=True), 1), 0.0)
        patterns, self._pattern = np.unique(judged, axis=1, return_inverse=True)
        present = judged.astype(np.float64)
        self._counts = present.T @ present
        cross = (centred**2).T @ present
        squares = cross + cross.T - 2 * centred.T @ centred
        real = (squares > 1e-12 * (cross + cross.T)) & (self._counts >= 2)
        np.fill_diagonal(real, val=False)
        scale = np.divide(1.0, self._counts * squares, out=np.zeros_like(squares), where=real)
        self.sums = centred.T @ present - present.T @ centred
        self._alike = bool(np.ptp(self._counts) == 0)
        self._coarse = values.shape[1] >= LARGE
        precision = np.float32 if self._coarse else np.float64
        self._scale = scale.astype(precision)
        flips = max(min(flips, MEMORY // (patterns.shape[1] * values.shape[1])), 100)
        signs = np.ascontiguousarray(sign_flips(len(values), seed=seed, flips=flips).T, dtype=precision)
        centred = centred.astype(precision)
        every = centred.T @ signs
        # Less work than the sum over what a pattern has: it usually has most scenarios.
        parts = [every - centred[~pattern].T @ signs[~pattern] for pattern in patterns.T]
        self._flipped: NDArray[Any] = np.stack(parts)  # pattern × column × flip
        self.observed = self._on_scale(np.square(self.sums) * scale, self._counts)

    def critical(self, open_pairs: Mask, alpha: float) -> float:
        """Return the critical value: the (1 − α) quantile over flips of the largest statistic among the open pairs."""
        scale = self._scale * open_pairs
        flips = self._flipped.shape[2]
        step = max(BLOCK // self._flipped.shape[1], 64)
        largest = np.concatenate([self._largest(scale, slice(at, at + step)) for at in range(0, flips, step)])
        may_exceed = int(alpha * flips + 1e-9)
        return float(np.sort(largest)[flips - 1 - may_exceed]) * (1 + (2e-4 if self._coarse else 1e-7)) + 1e-12

    def _largest(self, scale: NDArray[Any], flips: slice) -> Floats:
        """Return the largest statistic of each flip over all pairs of columns with a scale above 0."""
        sums = self._flipped[:, :, flips]
        k = sums.shape[1]
        largest = np.zeros(sums.shape[2])
        for i in range(k - 1):
            own = sums[0, i] if len(sums) == 1 else sums[self._pattern[i + 1 :], i]
            r_squared = own - sums[self._pattern[i], i + 1 :]  # computed in place, to save memory
            np.square(r_squared, out=r_squared)
            r_squared *= scale[i, i + 1 :, None]
            found = self._on_scale(r_squared, self._counts[i, i + 1 :, None]).max(axis=0)
            np.maximum(largest, found, out=largest)
        return largest

    def _on_scale(self, r_squared: NDArray[Any], counts: Floats) -> NDArray[Any]:
        if self._alike:
            return r_squared
        highest = MAX_R_SQUARED_SINGLE if self._coarse else MAX_R_SQUARED
        return np.asarray(_weights(counts) * -np.log1p(-np.minimum(r_squared, highest)))
