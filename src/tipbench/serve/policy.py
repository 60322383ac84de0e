"""Policies: the reward of an action, the regression that learns from rewards, and the choice of a candidate.

    egreedy/v1, v2, v3    score = estimate; with probability ε = 0.10, a uniformly random candidate
    linucb                score = estimate + α·√(xᵀVx); with probability ε = 0.05, a uniformly random candidate

Of K candidates, B have the best score. Each of these has the probability ε/K + (1 − ε)/B, every other one ε/K. LinUCB
needs no ε to explore; it has one so that off-policy evaluation can use its log. Scores are rounded to 1e-9 before they
are compared, so that equal candidates tie in spite of rounding errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tipbench.errors import UsageError
from tipbench.serve.features import FEATURES, FeatureSet, Floats
from tipbench.serve.prior import Prior
from tipbench.serve.request import RewardRequest
from tipbench.text import fingerprint

REWARD_VERSION = "reward-1"  # of the rewards below
REWARD_BY_ACTION = {"dismissed": -1.0, "snoozed": 0.1, "ignored": 0.0}
REWARD_BY_DWELL = (  # (limit in ms, reward of a completed tip whose dwell is below the limit)
    (15_000.0, -0.3),  # too fast to have been read
    (120_000.0, 1.0),
    (math.nextafter(600_000.0, math.inf), 0.6),  # the next float after 10 minutes: exactly 10 minutes is below it
    (math.inf, 0.3),
)
REWARD_WITHOUT_DWELL = 0.6  # the reward of a completed tip whose dwell is unknown

LAMBDA, LAMBDA_WITH_PRIOR = 1.0, 100.0  # λ of the ridge regression: the prior weighs as much as about λ rewards
REBUILD_EVERY = 1024  # updates; then V is computed from A again, to limit the rounding error
DECIMALS = 9  # of a rounded score


def reward_of(request: RewardRequest) -> float:
    """Return the reward, in [−1, 1]. If the request has none, it is computed from the action and the dwell."""
    reward = request.get("reward")
    if reward is not None:
        return float(reward)
    action = request.get("action") or "ignored"  # the default is unused: a valid request without a reward has an action
    if action != "completed":
        return REWARD_BY_ACTION[action]
    dwell_ms = request.get("dwell_ms")
    if dwell_ms is None:
        return REWARD_WITHOUT_DWELL
    return next(reward for limit_ms, reward in REWARD_BY_DWELL if dwell_ms < limit_ms)


class Ridge:
    """Ridge regression of one user's rewards under one policy, updated one reward at a time.

    The weights are θ = V(b + λθ₀), with A = Σxxᵀ and b = Σrx over features x and rewards r, V = (λI + A)⁻¹ and the
    prior θ₀. Only A and b are stored: they depend neither on θ₀ nor on λ, so they can be merged, and used with a new
    prior or another λ.
    """

    __slots__ = ("_prior_term", "_theta", "_v", "a", "b", "lam", "n", "reward_sum")

    def __init__(self, dim: int, *, lam: float = 1.0, prior: Floats | None = None) -> None:
        self.a = np.zeros((dim, dim))
        self.b = np.zeros(dim)
        self.n = 0
        self.reward_sum = 0.0
        self.lam = lam
        self._prior_term = np.zeros(dim) if prior is None else lam * prior
        self._v: Floats | None = np.eye(dim) / lam
        self._theta: Floats | None = None

    def restore(self, a: Floats, b: Floats, n: int, reward_sum: float) -> None:
        """Replace A, b, the number of rewards and their sum."""
        self.a, self.b, self.n, self.reward_sum = a, b, n, reward_sum
        self._v = self._theta = None

    def update(self, x: Floats, reward: float) -> None:
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
    def v(self) -> Floats:
        """(λI + A)⁻¹; a new array after each update, so a caller may keep it."""
        if self._v is None:
            identity = np.eye(len(self.b))
            lower = np.linalg.cholesky(self.a + self.lam * identity)  # LLᵀ = λI + A, so V = (L⁻¹)ᵀL⁻¹
            lower_inverse = np.linalg.solve(lower, identity)
            self._v = lower_inverse.T @ lower_inverse
        return self._v

    @property
    def theta(self) -> Floats:
        """The estimated weights; a new array after each update, so a caller may keep it."""
        if self._theta is None:
            self._theta = self.v @ (self.b + self._prior_term)
        return self._theta

    def snapshot(self) -> Ridge:
        """Return a read-only copy: its `v`, `theta`, `n` and `reward_sum` stay the same if the original is updated."""
        copy = object.__new__(Ridge)
        # `a` and `b` are shared, so the copy must not be updated.
        copy.a, copy.b, copy.n, copy.reward_sum, copy.lam = self.a, self.b, self.n, self.reward_sum, self.lam
        copy._prior_term, copy._v, copy._theta = self._prior_term, self.v, self.theta
        return copy


class Decision(NamedTuple):
    """The index of the chosen candidate, with the scores and probabilities of all candidates."""

    chosen: int
    scores: list[float]
    probabilities: list[float]


@dataclass(frozen=True)
class Policy:
    """ε-greedy over a linear estimate; with `alpha` > 0 over its upper confidence bound (LinUCB)."""

    name: str
    features: FeatureSet
    epsilon: float = 0.10
    alpha: float = 0.0

    @cached_property
    def version(self) -> str:
        """Hash of everything that changes the meaning of stored state and logged decisions."""
        features = self.features
        return fingerprint([self.name, features.version, features.names, self.epsilon, self.alpha, REWARD_VERSION], 12)

    def check_prior(self, prior: Prior) -> None:
        """Raise UsageError if the prior was fitted for another policy or other features."""
        if (prior.policy, prior.features, prior.names) != (self.name, self.features.version, self.features.names):
            raise UsageError(
                f"The prior was fitted for {prior.policy} with {prior.features}; {self.name} uses "
                f"{self.features.version}. Fit a prior for this policy with `tipbench prior fit`."
            )

    def ridge(self, prior: Prior | None = None) -> Ridge:
        """Return a new regression, without rewards."""
        if prior is None:
            return Ridge(self.features.dim, lam=LAMBDA)
        return Ridge(self.features.dim, lam=LAMBDA_WITH_PRIOR, prior=np.array(prior.theta))

    def scores(self, x: Floats, ridge: Ridge) -> list[float]:
        """Return the score of each candidate (a row of `x`), rounded to 1e-9."""
        # Not `x.dot(…)`: it releases the GIL. The thread that commits the log would then run, only to wait for the
        # service's lock, which this thread holds.
        scores = x @ ridge.theta
        if self.alpha:
            variances = ((x @ ridge.v) * x).sum(axis=1)  # xᵀVx of each candidate
            scores = scores + self.alpha * np.sqrt(variances)
        rounded: list[float] = scores.round(DECIMALS).tolist()
        return rounded

    def probabilities(self, scores: list[float]) -> list[float]:
        """Return the probability of each candidate; they sum to one."""
        best = max(scores)
        explore = self.epsilon / len(scores)
        exploit = explore + (1.0 - self.epsilon) / scores.count(best)
        return [exploit if score == best else explore for score in scores]

    def decide(self, x: Floats, ridge: Ridge, uniform: float) -> Decision:
        """Choose a candidate, given one row of features per candidate; `uniform` is a random number in [0, 1)."""
        scores = self.scores(x, ridge)
        probabilities = self.probabilities(scores)
        return Decision(choose(probabilities, uniform), scores, probabilities)


def choose(probabilities: list[float], uniform: float) -> int:
    """Return the first index at which the cumulative probability exceeds `uniform`."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return index
    return len(probabilities) - 1  # because of rounding errors, the sum may be slightly less than one


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("egreedy/v1", FEATURES["v1"]),
        Policy("egreedy/v2", FEATURES["v2"]),
        Policy("egreedy/v3", FEATURES["v3"]),
        Policy("linucb", FEATURES["v1"], epsilon=0.05, alpha=1.0),
    )
}
DEFAULT_POLICY = "egreedy/v1"


def check_policy(name: str) -> None:
    """Raise UsageError if there is no policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"There is no policy {name!r}. Choose one of {', '.join(POLICIES)}.")


def known_policy(name: str) -> Policy:
    """Return the policy of this name; raises UsageError if there is none."""
    check_policy(name)
    return POLICIES[name]
