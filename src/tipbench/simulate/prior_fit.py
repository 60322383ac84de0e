"""Fits the prior θ₀ that a policy starts from for a new user, and estimates how much the prior helps.

θ₀ is the estimate of a ridge regression pooled over users. A prior is never evaluated on users that it was fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tipbench.compare.statistics import Estimate, estimate_json, mean_estimate
from tipbench.errors import NotEnoughData
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.simulate.off_policy import FOLDS, ReplayedDecision
from tipbench.simulate.rollout import Arm, RidgeStatistics, rollout
from tipbench.simulate.world import World, WorldName, load_personas

MIN_USERS = 2 * FOLDS  # two in each fold
EVALUATION_WORLDS = (WorldName.STANDARD, WorldName.NO_TASTE, WorldName.DRIFT, WorldName.LOSSY, WorldName.NULL)
_HELD_OUT_SEED_OFFSET = 1_000_000  # added to the seed, so that a prior is evaluated on new users


class PriorGain(NamedTuple):
    """The gain of a prior in one simulated world, in reward per decision."""

    over_none: Estimate | None  # over starting without a prior
    # Over a prior fitted in this world, usually negative; None if the evaluated prior was fitted in it.
    over_own_prior: Estimate | None


@dataclass(frozen=True)
class FittedPrior:
    """A prior with the estimates of how much it helps."""

    prior: Prior
    n_users: int
    error_reduction: Estimate | None  # of the squared error per reward, for users that the prior was not fitted on
    gains: Mapping[str, PriorGain]  # by world; empty for a prior fitted on a log

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {
            "policy": self.prior.policy,
            "hash": self.prior.hash,
            "theta": dict(zip(self.prior.names, self.prior.theta, strict=True)),
            "users": self.n_users,
            "explained": estimate_json(self.error_reduction),
            "worlds": [
                {"world": world, "gain": estimate_json(gain.over_none), "price": estimate_json(gain.over_own_prior)}
                for world, gain in self.gains.items()
            ],
            "source": dict(self.prior.source),
        }


def fit_from_simulation(policy: str, world: WorldName, *, users: int, rounds: int, seed: int = 0) -> FittedPrior:
    """Fit a prior on simulated users of one world, and evaluate it on new users of this and other worlds."""
    source: dict[str, object] = {"from": "simulation", "world": world.value, "users": users, "rounds": rounds}
    source |= {"seed": seed, "personas": load_personas().version}
    statistics = _simulate_statistics(policy, World(world, seed, users, rounds))
    prior = _make_prior(policy, statistics, source)
    gains = {}
    for evaluated_world in dict.fromkeys((world, *EVALUATION_WORLDS)):
        own_prior = prior
        if evaluated_world is not world:
            own_statistics = _simulate_statistics(policy, World(evaluated_world, seed, users, rounds))
            own_prior = _make_prior(policy, own_statistics, source)  # not saved, so its source does not matter
        arms = [Arm(POLICIES[policy], arm_prior) for arm_prior in (None, prior, own_prior)]
        held_out_world = World(evaluated_world, _HELD_OUT_SEED_OFFSET + seed, users, rounds)
        without, with_prior, with_own_prior = rollout(held_out_world, arms)
        over_none = mean_estimate(with_prior.reward - without.reward)
        over_own_prior = None
        if own_prior is not prior:
            over_own_prior = mean_estimate(with_prior.reward - with_own_prior.reward)
        gains[evaluated_world.value] = PriorGain(over_none, over_own_prior)
    return FittedPrior(prior, users, _error_reduction(statistics), gains)


def fit_from_log(policy: str, replayed: Iterable[ReplayedDecision]) -> FittedPrior:
    """Fit a prior on the rewards of an event log. Raises NotEnoughData for fewer than MIN_USERS users."""
    dim = POLICIES[policy].features.dim
    by_user: dict[int, list[ReplayedDecision]] = {}
    for decision in replayed:
        by_user.setdefault(decision.user, []).append(decision)
    if len(by_user) < MIN_USERS:
        raise NotEnoughData(
            f"The log has rewards of {len(by_user)} users; a prior needs at least {MIN_USERS}. Serve tips for longer, "
            "or use --from simulation."
        )
    gram, moment = np.zeros((len(by_user), dim, dim)), np.zeros((len(by_user), dim))
    for user, decisions in enumerate(by_user.values()):
        for decision in decisions:
            x = decision.features[decision.chosen]
            gram[user] += x[:, None] * x
            moment[user] += decision.reward * x
    n_rewards = np.array([len(decisions) for decisions in by_user.values()])
    statistics = RidgeStatistics(gram, moment, n_rewards)
    prior = _make_prior(policy, statistics, {"from": "log", "users": len(by_user), "rewards": int(n_rewards.sum())})
    return FittedPrior(prior, len(by_user), _error_reduction(statistics), gains={})


def _simulate_statistics(policy: str, world: World) -> RidgeStatistics:
    (result,) = rollout(world, [Arm(POLICIES[policy])], record=True)
    assert result.statistics is not None  # noqa: S101 - because of record=True
    return result.statistics


def _make_prior(policy: str, statistics: RidgeStatistics, source: Mapping[str, object]) -> Prior:
    features = POLICIES[policy].features
    return Prior(policy, features.version, features.names, tuple(statistics.pooled_theta().tolist()), source)


def _error_reduction(statistics: RidgeStatistics) -> Estimate | None:
    """Estimate by cross-fitting how much a prior reduces the squared error per reward, compared with predicting 0."""
    fold = np.arange(len(statistics.moment)) % FOLDS
    reduction = np.zeros(len(fold))
    for held_out in range(FOLDS):
        theta = statistics.pooled_theta(fold != held_out)
        in_fold = fold == held_out
        # For each user n of this fold: Σ r² − Σ (r − θx)² = 2 θ·moment − θᵀ gram θ. d and e are features.
        squares = np.einsum("d,nde,e->n", theta, statistics.gram[in_fold], theta)
        reduction[in_fold] = 2 * statistics.moment[in_fold] @ theta - squares
    has_rewards = statistics.n_rewards > 0
    return mean_estimate(reduction[has_rewards] / statistics.n_rewards[has_rewards])
