"""Fits the prior θ₀ that a policy starts from for a new user, and estimates how much the prior helps.

θ₀ is a ridge regression pooled over users. The estimates are cross-fitted: a prior is never evaluated on the users that
it was fitted on.
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
from tipbench.simulate.rollout import Arm, RidgeStatistics, find_arm, rollout
from tipbench.simulate.world import World, WorldName, load_personas

MIN_USERS = 10
EVALUATED = (WorldName.STANDARD, WorldName.NO_TASTE, WorldName.DRIFT, WorldName.LOSSY, WorldName.NULL)
_HELD_OUT_SEED = 1_000_000  # added to the seed of a fit for the users that the prior is evaluated on


class PriorValue(NamedTuple):
    """What a prior gains in one simulated world, in reward per decision."""

    gain: Estimate | None  # compared with no prior
    # Compared with a prior fitted in this world, so usually negative. None if the prior itself was fitted in it.
    price: Estimate | None


@dataclass(frozen=True)
class FittedPrior:
    """A prior with the estimates of how much it helps."""

    prior: Prior
    users: int
    explained: Estimate | None  # reduction of the squared error per reward, cross-fitted
    worlds: Mapping[str, PriorValue]  # by name; empty for a prior fitted on a log

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {
            "policy": self.prior.policy,
            "hash": self.prior.hash,
            "theta": dict(zip(self.prior.names, self.prior.theta, strict=True)),
            "users": self.users,
            "explained": estimate_json(self.explained),
            "worlds": [
                {"world": world, "gain": estimate_json(value.gain), "price": estimate_json(value.price)}
                for world, value in self.worlds.items()
            ],
            "source": dict(self.prior.source),
        }


def fit_from_simulation(policy: str, world: WorldName, *, users: int, rounds: int, seed: int = 0) -> FittedPrior:
    """Fit a prior on simulated users of one world, and evaluate it on new users of this and other worlds."""
    source = {"from": "simulation", "world": world.value, "users": users, "rounds": rounds, "seed": seed}
    statistics = _simulate_statistics(policy, world, users, rounds, seed)
    prior = _make_prior(policy, statistics, {**source, "personas": load_personas().version})
    worlds = {}
    for other in dict.fromkeys((world, *EVALUATED)):
        own_prior = prior
        if other is not world:
            own_prior = _make_prior(policy, _simulate_statistics(policy, other, users, rounds, seed), source)
        arms = [Arm(POLICIES[policy], arm_prior) for arm_prior in (None, prior, own_prior)]
        held_out = World(other, _HELD_OUT_SEED + seed, users, rounds)
        without, with_prior, with_own = rollout(held_out, arms)
        gain = mean_estimate((with_prior.reward - without.reward) / rounds)
        price = None if own_prior is prior else mean_estimate((with_prior.reward - with_own.reward) / rounds)
        worlds[other.value] = PriorValue(gain, price)
    return FittedPrior(prior, users, _explained_error(statistics), worlds)


def fit_from_log(policy: str, replayed: Iterable[ReplayedDecision]) -> FittedPrior:
    """Fit a prior on the rewards of an event log. Raises NotEnoughData for fewer than MIN_USERS users."""
    size = POLICIES[policy].features.dim
    by_user: dict[int, list[ReplayedDecision]] = {}
    for decision in replayed:
        by_user.setdefault(decision.user, []).append(decision)
    if len(by_user) < MIN_USERS:
        raise NotEnoughData(
            f"The log has rewards of {len(by_user)} users; a prior needs at least {MIN_USERS}. Serve tips for longer, "
            "or use --from simulation."
        )
    gram, moment = np.zeros((len(by_user), size, size)), np.zeros((len(by_user), size))
    for row, decisions in enumerate(by_user.values()):
        for decision in decisions:
            x = decision.features[decision.chosen]
            gram[row] += x[:, None] * x
            moment[row] += float(decision.reward or 0.0) * x
    counts = np.array([len(decisions) for decisions in by_user.values()])
    statistics = RidgeStatistics(gram, moment, counts)
    prior = _make_prior(policy, statistics, {"from": "log", "users": len(by_user), "rewards": int(counts.sum())})
    return FittedPrior(prior, len(by_user), _explained_error(statistics), {})


def _simulate_statistics(policy: str, world: WorldName, users: int, rounds: int, seed: int) -> RidgeStatistics:
    (totals,) = rollout(World(world, seed, users, rounds), [find_arm(policy)], record=True)
    assert totals.statistics is not None  # noqa: S101 - because of record=True
    return totals.statistics


def _make_prior(policy: str, statistics: RidgeStatistics, source: Mapping[str, object]) -> Prior:
    features = POLICIES[policy].features
    return Prior(policy, features.version, features.names, tuple(statistics.theta().tolist()), source)


def _explained_error(statistics: RidgeStatistics) -> Estimate | None:
    """Return by how much a prior reduces the squared error per reward, cross-fitted over folds of users."""
    fold = np.arange(len(statistics.moment)) % FOLDS
    reduction = np.zeros(len(fold))
    for number in range(FOLDS):
        theta, in_fold = statistics.theta(fold != number), fold == number
        # For each user of this fold: Σ r² − Σ (r − θx)². In the subscripts, d and e are features and n is the user.
        squares = np.einsum("d,nde,e->n", theta, statistics.gram[in_fold], theta)
        reduction[in_fold] = 2 * statistics.moment[in_fold] @ theta - squares
    has_rewards = statistics.n > 0
    return mean_estimate(reduction[has_rewards] / statistics.n[has_rewards])
