"""Sign-flips and bootstrap over whole scenarios, the same for all rows, seeded.

If two rows are equally good, a scenario's paired difference is as likely to be d as −d. Flipping the signs of whole
scenarios shows what chance alone would do, and leaves the dependence between rows as it is. The statistic is the paired
t. It depends on r² = S² / (n Q) only (S sum, Q sum of squares of the differences; flips leave Q alone), so a flip
costs one product of matrices. Rows with different numbers of shared scenarios are put on one scale by Wallace's normal
equivalent of t, z² = ((8ν + 1) / (8ν + 3))² · ν · log(1 + t² / ν), with 1 + t² / ν = 1 / (1 − r²): a row with two
scenarios reaches a huge t half of the time by chance, and would drown the others. Any such scale keeps the test valid.

The observed signs are one of the flips, so a p is never 0 and is valid for any number of flips. A flip and its negative
give the same two-sided statistic: of all 2ⁿ only half are computed. Constant differences need no special case: r² = 1,
and p is what the flips give, 2 / 2ⁿ at best. Differences of nothing but zeros have p = 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.matrix import Floats, Mask

ALPHA = 0.05
FLIPS = 10_000
RESAMPLES = 10_000
EXACT_UP_TO = 12  # scenarios: with so many or fewer, every flip is computed
SEED = 42
MIN_SCENARIOS = 6  # with fewer, 2 / 2ⁿ exceeds ALPHA and nothing can be separated

NOTHING = 1e-9  # differences below it are rounding
MOST_CERTAIN = 1 - 1e-9  # r² beyond it is rounding
COARSELY_CERTAIN = 1 - 1e-3  # likewise in single precision, as far as the logarithm goes
LARGE = 60  # rows: from here on, the family of all pairs is worked in single precision, in at most LARGE_ROUNDS steps
LARGE_ROUNDS = 3
MEMORY = 30_000_000  # flipped sums held at a time
BLOCK = 1 << 17  # numbers worked on at a time: they should stay in the cache


def sign_flips(n: int, *, seed: int = SEED, flips: int = FLIPS) -> Floats:
    """Flips down, scenarios across, as ±1; the first is the data as observed."""
    half = 1 << max(n - 1, 0)
    if n <= EXACT_UP_TO and half <= flips + 1:
        bits = (np.arange(half)[:, None] >> np.arange(n)) & 1
    else:
        bits = np.random.default_rng([seed, 1]).integers(0, 2, size=(flips + 1, n), dtype=np.int8)
        bits[0] = 0
    return np.where(bits, -1.0, 1.0)


def step_down(differences: Floats, *, seed: int = SEED, flips: int = FLIPS) -> tuple[float | None, ...]:
    """Adjusted two-sided p per column of paired differences (scenarios down; NaN = not shared).

    Step-down max-t (Westfall and Young 1993; Romano and Wolf 2005): the chance that one or more of the columns
    without a true difference get p ≤ α is at most α. None below two shared scenarios.
    """
    shared = ~np.isnan(differences)
    known = np.flatnonzero(shared.sum(axis=0) >= 2)
    used = shared[:, known].any(axis=1)
    found: list[float | None] = [None] * differences.shape[1]
    if not known.size:
        return tuple(found)
    block = np.where(shared, differences, 0.0)[np.ix_(used, known)]
    block[np.abs(block) < NOTHING] = 0.0
    sums = sign_flips(len(block), seed=seed, flips=flips) @ block
    evidence = _evidence(sums, (block * block).sum(axis=0), shared.sum(axis=0)[known])
    for column, p in zip(known, _adjusted(evidence), strict=True):
        found[column] = float(p)
    return tuple(found)


def better_than(
    values: Floats, *, seed: int = SEED, flips: int = FLIPS, alpha: float = ALPHA, rounds: int | None = None
) -> Mask:
    """[i, j]: column i is separated from column j as the better one, by step-down max-t over all pairs of columns.

    Works with critical values: reject what exceeds the (1 − α) quantile of the largest statistic, then again over what
    is left, until nothing more falls; the same rejections as by adjusted p. Stopping earlier (`rounds`, set for many
    columns) only rejects less, and so does the slack for rounding. With many columns and many patterns of missing cells
    fewer flips are taken, which is as valid.
    """
    n, k = values.shape
    if n < 2 or k < 2:
        return np.zeros((k, k), dtype=bool)
    family = _Family(values, seed=seed, flips=flips)
    rejected = np.zeros((k, k), dtype=bool)
    for _ in range(rounds or (LARGE_ROUNDS if k >= LARGE else k * k)):
        limit = family.critical(~rejected, alpha)
        more = (family.observed > limit) & ~rejected
        if not more.any():
            break
        rejected |= more
    return np.asarray(rejected & (family.sums > 0))


def best_shares(values: Floats, *, seed: int = SEED, resamples: int = RESAMPLES) -> Floats:
    """How often each column has the highest mean when scenarios are drawn anew; ties are split, shares sum to 1.

    `values` has no missing numbers: of an incomplete layout give `statistics.pseudo_values`.
    """
    n, k = values.shape
    drawn = np.random.default_rng([seed, 2]).integers(0, n, size=(resamples, n), dtype=np.int32)
    drawn += (np.arange(resamples, dtype=np.int32) * n)[:, None]
    times = np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)
    sums = times @ (values - values.mean())
    best = sums >= sums.max(axis=1, keepdims=True) - n * NOTHING
    return np.asarray((best / best.sum(axis=1, keepdims=True)).sum(axis=0) / resamples).reshape(k)


def _evidence(sums: Floats, squares: Floats, counts: NDArray[Any]) -> Floats:
    certainty = np.square(sums) / np.where(squares > 0, counts * squares, np.inf)
    return np.asarray(_weights(counts) * -np.log1p(-np.minimum(certainty, MOST_CERTAIN)))


def _weights(counts: NDArray[Any]) -> Floats:
    freedom = np.maximum(counts - 1.0, 0.0)
    return np.asarray(freedom * np.square((8 * freedom + 1) / (8 * freedom + 3)))


def _adjusted(evidence: Floats) -> Floats:
    order = np.argsort(-evidence[0], kind="stable")
    ordered = evidence[:, order]
    largest_of_rest = np.maximum.accumulate(ordered[:, ::-1], axis=1)[:, ::-1]
    reached = largest_of_rest >= ordered[0] * (1 - 1e-7) - 1e-12
    adjusted = np.empty(len(order))
    adjusted[order] = np.maximum.accumulate(reached.mean(axis=0))
    return adjusted


class _Family:
    """All pairs of columns.

    A difference's flipped sum is the difference of two columns' flipped sums over the scenarios both have, so only
    (columns × patterns of missing cells) sums are needed, not one for each pair.
    """

    def __init__(self, values: Floats, *, seed: int, flips: int) -> None:
        judged = ~np.isnan(values)
        centred = np.where(judged, values - _row_means(values, judged), 0.0)
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
        flips = max(min(flips, MEMORY // (patterns.shape[1] * values.shape[1])), int(1 / ALPHA))
        signs = sign_flips(len(values), seed=seed, flips=flips).astype(precision)
        parts = [(centred * pattern[:, None]).astype(precision).T @ signs.T for pattern in patterns.T]
        self._flipped: NDArray[Any] = np.stack(parts)  # pattern × column × flip
        self.observed = self._on_scale(np.square(self.sums) * scale, self._counts)

    def critical(self, open_pairs: Mask, alpha: float) -> float:
        """What a statistic must exceed: the (1 − α) quantile, over flips, of the largest among the open pairs."""
        scale = self._scale * open_pairs
        flips = self._flipped.shape[2]
        step = max(BLOCK // self._flipped.shape[1], 64)
        largest = np.concatenate([self._largest(scale, slice(at, at + step)) for at in range(0, flips, step)])
        spare = int(alpha * flips + 1e-9)
        return float(np.sort(largest)[flips - 1 - spare]) * (1 + (2e-4 if self._coarse else 1e-7)) + 1e-12

    def _largest(self, scale: NDArray[Any], flips: slice) -> Floats:
        sums = self._flipped[:, :, flips]
        k = sums.shape[1]
        largest = np.zeros(sums.shape[2])
        for i in range(k - 1):
            own = sums[0, i] if len(sums) == 1 else sums[self._pattern[i + 1 :], i]
            certainty = own - sums[self._pattern[i], i + 1 :]
            np.square(certainty, out=certainty)
            certainty *= scale[i, i + 1 :, None]
            found = self._on_scale(certainty, self._counts[i, i + 1 :, None]).max(axis=0)
            np.maximum(largest, found, out=largest)
        return largest

    def _on_scale(self, certainty: NDArray[Any], counts: Floats) -> NDArray[Any]:
        if self._alike:
            return certainty
        certain = COARSELY_CERTAIN if self._coarse else MOST_CERTAIN
        return np.asarray(_weights(counts) * -np.log1p(-np.minimum(certainty, certain)))


def _row_means(values: Floats, judged: Mask) -> Floats:
    totals = np.where(judged, values, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(totals / np.maximum(judged.sum(axis=1, keepdims=True), 1))
