"""Fits the prior θ₀ that new users of a policy start from, and estimates its value for other users.

θ₀ is the ridge regression pooled over users. Cross-fitting: each user's gain is computed with a prior that was fitted
without that user.
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
_HELD_OUT_SEED = 1_000_000  # users from this seed on are not used to fit a prior


class PriorValue(NamedTuple):
    """Gains in reward per decision of a prior in one world."""

    gain: Estimate | None  # over no prior
    price: Estimate | None  # over the prior fitted in that world, usually negative; None if it is the same prior


@dataclass(frozen=True)
class FittedPrior:
    """A prior, the error that it saves, and its value in each simulated world."""

    prior: Prior
    users: int
    explained: Estimate | None  # squared error per reward that the prior saves users it was not fitted on
    worlds: Mapping[str, PriorValue]

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
    """Fit on simulated users, and evaluate on other users of the same world and of other worlds."""
    source = {"from": "simulation", "world": world.value, "users": users, "rounds": rounds, "seed": seed}
    statistics = _simulated(policy, world, users, rounds, seed)
    prior = _prior(policy, statistics, {**source, "personas": load_personas().version})
    worlds = {}
    for other in dict.fromkeys((world, *EVALUATED)):
        own_prior = prior if other is world else _prior(policy, _simulated(policy, other, users, rounds, seed), source)
        arms = [Arm(POLICIES[policy], one) for one in (None, prior, own_prior)]
        without, fitted, with_own = rollout(World(other, _HELD_OUT_SEED + seed, users, rounds), arms)
        price = None if own_prior is prior else mean_estimate((fitted.reward - with_own.reward) / rounds)
        worlds[other.value] = PriorValue(mean_estimate((fitted.reward - without.reward) / rounds), price)
    return FittedPrior(prior, users, _explained(statistics), worlds)


def fit_from_log(policy: str, replayed: Iterable[ReplayedDecision]) -> FittedPrior:
    """Fit on the rewards of an event log."""
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
    for at, decisions in enumerate(by_user.values()):
        for decision in decisions:
            x = decision.features[decision.chosen]
            gram[at] += x[:, None] * x
            moment[at] += float(decision.reward or 0.0) * x
    counts = np.array([len(decisions) for decisions in by_user.values()])
    statistics = RidgeStatistics(gram, moment, counts)
    prior = _prior(policy, statistics, {"from": "log", "users": len(by_user), "rewards": int(counts.sum())})
    return FittedPrior(prior, len(by_user), _explained(statistics), {})


def _simulated(policy: str, world: WorldName, users: int, rounds: int, seed: int) -> RidgeStatistics:
    found = rollout(World(world, seed, users, rounds), [find_arm(policy)], record=True)[0].statistics
    assert found is not None  # noqa: S101 - recorded
    return found


def _prior(policy: str, statistics: RidgeStatistics, source: Mapping[str, object]) -> Prior:
    features = POLICIES[policy].features
    return Prior(policy, features.version, features.names, tuple(statistics.theta().tolist()), source)


def _explained(statistics: RidgeStatistics) -> Estimate | None:
    """Return the squared error per reward that a prior saves; the prior of each user is fitted on other users."""
    fold = np.arange(len(statistics.moment)) % FOLDS
    saved = np.zeros(len(fold))
    for number in range(FOLDS):
        theta, in_fold = statistics.theta(fold != number), fold == number
        # Σ r² − Σ (r − θx)², of each user of this fold; d and e are features, n is the user
        squares = np.einsum("d,nde,e->n", theta, statistics.gram[in_fold], theta)
        saved[in_fold] = 2 * statistics.moment[in_fold] @ theta - squares
    return mean_estimate(saved / statistics.n)
