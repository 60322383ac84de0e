"""Ridge regression of one user under one policy, updated one reward at a time.

What is stored is A = Σxxᵀ and b = Σrx, without the prior: both are sums, so they can be merged and replayed, and a new
prior or another λ needs no relearning. In memory there is also V = (λI + A)⁻¹.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

REBUILD_EVERY = 1024  # updates between two computations of V from A, which bound the rounding error

Vector = NDArray[np.float64]


class Ridge:
    """Statistics A, b, n and reward_sum, with θ = V(b + λθ₀)."""

    __slots__ = ("_prior_term", "_theta", "_v", "a", "b", "lam", "n", "reward_sum")

    def __init__(self, dim: int, *, lam: float = 1.0, prior: Vector | None = None) -> None:
        self.a = np.zeros((dim, dim))
        self.b = np.zeros(dim)
        self.n = 0
        self.reward_sum = 0.0
        self.lam = lam
        self._prior_term = np.zeros(dim) if prior is None else lam * prior
        self._v: Vector | None = np.eye(dim) / lam
        self._theta: Vector | None = None

    def restore(self, a: Vector, b: Vector, n: int, reward_sum: float) -> None:
        """Replace the statistics."""
        self.a, self.b, self.n, self.reward_sum = a, b, n, reward_sum
        self._v = self._theta = None

    def update(self, x: Vector, reward: float) -> None:
        """Learn one reward."""
        self.a += x[:, None] * x
        self.b += reward * x
        self.n += 1
        self.reward_sum += reward
        self._theta = None
        if self.n % REBUILD_EVERY == 0:
            self._v = None
        elif self._v is not None:  # Sherman–Morrison
            vx = self._v @ x
            self._v = self._v - vx[:, None] * (vx / (1.0 + x @ vx))

    @property
    def v(self) -> Vector:
        """(λI + A)⁻¹; never modified in place, so a caller may keep it."""
        if self._v is None:
            lower = np.linalg.cholesky(self.a + self.lam * np.eye(len(self.b)))
            inverse = np.linalg.solve(lower, np.eye(len(self.b)))
            self._v = inverse.T @ inverse
        return self._v

    @property
    def theta(self) -> Vector:
        """The estimate; never modified in place, so a caller may keep it."""
        if self._theta is None:
            self._theta = self.v @ (self.b + self._prior_term)
        return self._theta

    def snapshot(self) -> Ridge:
        """Return a copy for reading: it shares θ and V with this one and must not be updated."""
        copy = object.__new__(Ridge)
        copy.a, copy.b, copy.n, copy.reward_sum, copy.lam = self.a, self.b, self.n, self.reward_sum, self.lam
        copy._prior_term, copy._v, copy._theta = self._prior_term, self.v, self.theta
        return copy
