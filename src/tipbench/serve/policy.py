"""Policies: from features and what was learned to a probability for every candidate, and a choice.

    egreedy/v1, v2, v3    the candidate with the best estimate, mixed with ε = 0.10 uniform
    linucb                estimate + α·√(xᵀVx), mixed with ε = 0.05 uniform so that its log can value another policy

The probability of a candidate is ε/K + (1 − ε)/#best if it is among the best, else ε/K. Scores are rounded to 1e-9
before they are compared: equal candidates tie whatever the rounding errors of their sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tipbench.errors import UsageError
from tipbench.serve.features import FEATURES, FeatureSet, Matrix
from tipbench.serve.prior import Prior
from tipbench.serve.reward import REWARD_VERSION
from tipbench.serve.ridge import Ridge
from tipbench.text import fingerprint

LAMBDA, LAMBDA_WITH_PRIOR = 1.0, 100.0
DECIMALS = 9


class Decision(NamedTuple):
    """A choice among candidates, in their order, with the probability that each had."""

    chosen: int
    scores: list[float]
    probabilities: list[float]

    @property
    def explored(self) -> bool:
        """True if the choice is not among the best scores."""
        return self.scores[self.chosen] < max(self.scores)


@dataclass(frozen=True)
class Policy:
    """ε-greedy over a linear estimate; with `alpha` > 0 over its upper confidence bound (LinUCB)."""

    name: str
    features: FeatureSet
    epsilon: float = 0.10
    alpha: float = 0.0

    @cached_property
    def version(self) -> str:
        """Hash of all that changes the meaning of its state and decisions."""
        return fingerprint(
            [self.name, self.features.version, self.features.names, self.epsilon, self.alpha, REWARD_VERSION], 12
        )

    def check_prior(self, prior: Prior) -> None:
        """Raise UsageError if the prior was fitted for another policy or other features."""
        if (prior.policy, prior.features, prior.names) != (self.name, self.features.version, self.features.names):
            raise UsageError(
                f"The prior was fitted for {prior.policy} with {prior.features}; {self.name} uses "
                f"{self.features.version}. Fit a prior for this policy with `tipbench prior fit`."
            )

    def ridge(self, prior: Prior | None = None) -> Ridge:
        """Return the state of a user without rewards."""
        if prior is None:
            return Ridge(self.features.dim, lam=LAMBDA)
        return Ridge(self.features.dim, lam=LAMBDA_WITH_PRIOR, prior=np.array(prior.theta))

    def scores(self, x: Matrix, ridge: Ridge) -> list[float]:
        """Return the score of each row of features, rounded to 1e-9."""
        # Not `x.dot`, which releases the interpreter's lock: the thread that commits may wake up, find the service's
        # lock held by this one and sleep again.
        estimate = x @ ridge.theta
        if self.alpha:
            estimate = estimate + self.alpha * np.sqrt(((x @ ridge.v) * x).sum(axis=1))
        scores: list[float] = estimate.round(DECIMALS).tolist()
        return scores

    def probabilities(self, scores: list[float]) -> list[float]:
        """Return the probability of each candidate; they sum to one."""
        best = max(scores)
        explore = self.epsilon / len(scores)
        exploit = explore + (1.0 - self.epsilon) / scores.count(best)
        return [exploit if score == best else explore for score in scores]

    def decide(self, x: Matrix, ridge: Ridge, uniform: float) -> Decision:
        """Choose a row of features; `uniform` in [0, 1) selects it by the cumulated probabilities."""
        scores = self.scores(x, ridge)
        probabilities = self.probabilities(scores)
        return Decision(choose(probabilities, uniform), scores, probabilities)


def choose(probabilities: list[float], uniform: float) -> int:
    """Return the index at which the cumulated probabilities exceed `uniform`."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if uniform < total:
            return index
    return len(probabilities) - 1  # the sum may be a rounding error below one


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


def known_policy(name: str) -> Policy:
    """Return a policy by name; raises UsageError."""
    if name not in POLICIES:
        raise UsageError(f"There is no policy {name!r}. Choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]
