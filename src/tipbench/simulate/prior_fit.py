"""Fits the prior θ₀ that new users of a policy start from, and measures what it is worth to users it has not seen.

θ₀ is the ridge regression pooled over users. Cross-fitting: each user's gain is computed with a prior that was fitted
without that user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tipbench.compare.statistics import Estimate, mean_estimate
from tipbench.errors import NotEnoughData
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.simulate.off_policy import FOLDS, ReplayedDecision
from tipbench.simulate.rollout import Arm, find_arm, rollout
from tipbench.simulate.simulation import estimate_json
from tipbench.simulate.world import Floats, World, WorldName, load_personas

MIN_USERS = 10
EVALUATED = (WorldName.STANDARD, WorldName.NO_TASTE, WorldName.DRIFT, WorldName.LOSSY, WorldName.NULL)
_HELD_OUT = 1_000_000  # first seed of users that no prior is fitted on


@dataclass(frozen=True)
class Statistics:
    """A = Σxxᵀ, b = Σrx and the number of rewards of every user (first axis)."""

    a: Floats
    b: Floats
    n: Floats

    def theta(self, chosen: Any = slice(None)) -> Floats:
        """Return the pooled ridge regression of the chosen users."""
        return np.asarray(
            np.linalg.solve(self.a[chosen].sum(axis=0) + np.eye(self.b.shape[1]), self.b[chosen].sum(axis=0))
        )


@dataclass(frozen=True)
class FittedPrior:
    """A prior with what it explains, and what it is worth in each simulated world."""

    prior: Prior
    users: int
    explained: Estimate | None  # squared error per reward that the prior saves users it was not fitted on
    worlds: Mapping[str, tuple[Estimate | None, Estimate | None]]  # gain over no prior; loss to that world's own prior

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {
            "policy": self.prior.policy,
            "hash": self.prior.hash,
            "theta": dict(zip(self.prior.names, self.prior.theta, strict=True)),
            "users": self.users,
            "explained": estimate_json(self.explained),
            "worlds": [
                {"world": world, "gain": estimate_json(gain), "price": estimate_json(price)}
                for world, (gain, price) in self.worlds.items()
            ],
            "source": dict(self.prior.source),
        }


def fit_from_simulation(policy: str, world: WorldName, *, users: int, rounds: int, seed: int = 0) -> FittedPrior:
    """Fit on simulated users and evaluate on others, in the same world and in worlds that the prior does not fit."""
    source = {"from": "simulation", "world": world.value, "users": users, "rounds": rounds, "seed": seed}
    statistics = _simulated(policy, world, users, rounds, seed)
    prior = _prior(policy, statistics, {**source, "personas": load_personas().version})
    worlds = {}
    for other in dict.fromkeys((world, *EVALUATED)):
        own_prior = prior if other is world else _prior(policy, _simulated(policy, other, users, rounds, seed), source)
        arms = [Arm(POLICIES[policy], one) for one in (None, prior, own_prior)]
        without, fitted, with_own = rollout(World(other, _HELD_OUT + seed, users, rounds), arms)
        price = None if own_prior is prior else mean_estimate((fitted.reward - with_own.reward) / rounds)
        worlds[other.value] = mean_estimate((fitted.reward - without.reward) / rounds), price
    return FittedPrior(prior, users, _explained(statistics), worlds)


def fit_from_log(policy: str, replayed: Iterable[ReplayedDecision]) -> FittedPrior:
    """Fit on the rewards of an event log."""
    size = POLICIES[policy].features.dim
    by_user: dict[int, tuple[Floats, Floats, list[int]]] = {}
    for one in replayed:
        a, b, n = by_user.setdefault(one.user, (np.zeros((size, size)), np.zeros(size), [0]))
        x = one.rows[one.chosen]
        a += x[:, None] * x
        b += float(one.reward or 0.0) * x
        n[0] += 1
    if len(by_user) < MIN_USERS:
        raise NotEnoughData(
            f"The log has rewards of {len(by_user)} users; a prior needs at least {MIN_USERS}. Serve tips for longer, "
            "or use --from simulation."
        )
    rows = list(by_user.values())
    statistics = Statistics(
        np.array([r[0] for r in rows]), np.array([r[1] for r in rows]), np.array([r[2][0] for r in rows])
    )
    prior = _prior(policy, statistics, {"from": "log", "users": len(rows), "rewards": int(statistics.n.sum())})
    return FittedPrior(prior, len(rows), _explained(statistics), {})


def _simulated(policy: str, world: WorldName, users: int, rounds: int, seed: int) -> Statistics:
    found = rollout(World(world, seed, users, rounds), [find_arm(policy)], record=True)[0].statistics
    assert found is not None  # noqa: S101 - recorded
    return Statistics(found[0], found[1], np.full(users, float(rounds)))


def _prior(policy: str, statistics: Statistics, source: Mapping[str, object]) -> Prior:
    features = POLICIES[policy].features
    return Prior(policy, features.version, features.names, tuple(statistics.theta().tolist()), source)


def _explained(statistics: Statistics) -> Estimate | None:
    """Return the squared error per reward that a prior saves, each user's with a prior fitted on other users."""
    fold = np.arange(len(statistics.b)) % FOLDS
    saved = np.zeros(len(fold))
    for number in range(FOLDS):
        theta, in_fold = statistics.theta(fold != number), fold == number
        # Σ r² − Σ (r − θx)², of each user of this fold; d and e are features, n is the user
        squares = np.einsum("d,nde,e->n", theta, statistics.a[in_fold], theta)
        saved[in_fold] = 2 * statistics.b[in_fold] @ theta - squares
    return mean_estimate(saved / statistics.n)
