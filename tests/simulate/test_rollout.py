"""Rollouts: the vectorised rollout decides as the policies of the server do."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from support.simulated_requests import reward_request, score_request, slow_rollout
from tipbench.errors import UsageError
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.serve.request import REWARD, SCORE
from tipbench.serve.tallies import Tallies
from tipbench.simulate import rollout as module
from tipbench.simulate.rollout import CONTROL_ARM, Arm, find_arm, rollout
from tipbench.simulate.simulation import SimulationConfig, simulate
from tipbench.simulate.world import World


def prior_for(name: str) -> Prior:
    policy = POLICIES[name]
    theta = tuple(np.random.default_rng(1).normal(0, 0.2, policy.features.dim).tolist())
    return Prior(name, policy.features.version, policy.features.names, theta)


@pytest.mark.parametrize("world", ["standard", "drift", "lossy", "linear"])
@pytest.mark.parametrize("name", [*POLICIES, CONTROL_ARM, "egreedy/v3 without quality"])
def test_the_vectorised_rollout_decides_as_the_policy_objects_do(name: str, world: str) -> None:
    arm = find_arm(name)
    fast = rollout(World(world, 3, 10, 30), [arm], record=True)[0]
    slow = slow_rollout(World(world, 3, 10, 30), arm)
    assert fast.chosen is not None
    assert slow.chosen is not None
    assert np.array_equal(fast.chosen, slow.chosen)
    assert np.array_equal(fast.reward, slow.reward)


@pytest.mark.parametrize("name", ["egreedy/v3", "linucb"])
def test_rollouts_decide_alike_with_a_prior(name: str) -> None:
    arm = find_arm(name, {name: prior_for(name)})
    fast, slow = (
        rollout(World("standard", 6, 10, 30), [arm], record=True)[0],
        slow_rollout(World("standard", 6, 10, 30), arm),
    )
    assert np.array_equal(fast.reward, slow.reward)


def test_an_ablation_starts_from_the_prior_without_the_weights_of_the_removed_features() -> None:
    config = SimulationConfig(policies="egreedy/v3", ablation="egreedy/v3", users=10, rounds=4, seeds=1)
    prior = prior_for("egreedy/v3")
    arm = simulate(config, priors=[prior], workers=1).arms["egreedy/v3 without category_*"]
    assert arm.prior is not None
    arm.policy.check_prior(arm.prior)
    weights = dict(zip(prior.names, prior.theta, strict=True))
    assert arm.prior.theta == tuple(weights[name] for name in arm.policy.features.names)


@pytest.mark.parametrize("name", list(POLICIES))
def test_batched_features_equal_those_of_the_server(name: str) -> None:
    world, policy = World("standard", 8, 12, 20), POLICIES[name]
    learner, tallies = module._Learner(world, Arm(policy)), [Tallies() for _ in range(12)]
    for number in range(12):
        round_ = world.round(number)
        chosen = learner.choose(module._RoundFeatures(world, round_), world.draws(number))
        outcome = world.outcome(round_, chosen)
        for user in range(12):
            request = SCORE.validate_python(score_request(world, round_, user))
            moment = datetime.fromisoformat(str(request.get("at")))
            expected = policy.features.matrix(request, request["candidates"], moment, tallies[user])
            assert np.allclose(learner._x[:, :, user].T, expected, atol=1e-12)
            sent = REWARD.validate_python(reward_request(world, round_, user, outcome))
            category = request["candidates"][chosen[user]].get("category")
            tallies[user].add(category, sent.get("action"), sent.get("dwell_ms"), float(round_.hour[user]))
        learner.learn(round_, chosen, outcome)


def test_an_arm_does_not_depend_on_the_others_it_runs_with() -> None:
    arms = [find_arm(name) for name in ("egreedy/v1", "egreedy/v3")]
    together = rollout(World("standard", 1, 30, 20), arms)
    alone = [rollout(World("standard", 1, 30, 20), [arm])[0] for arm in arms]
    assert all(np.array_equal(a.reward, b.reward) for a, b in zip(together, alone, strict=True))


def test_statistics_are_the_sums_over_the_chosen_features() -> None:
    world, arm = World("standard", 1, 8, 15), find_arm("egreedy/v2")
    learner = module._Learner(world, arm)
    a, b = np.zeros((8, 12, 12)), np.zeros((8, 12))
    for number in range(15):
        round_ = world.round(number)
        chosen = learner.choose(module._RoundFeatures(world, round_), world.draws(number))
        outcome = world.outcome(round_, chosen)
        x = learner._x[:, chosen, np.arange(8)].T
        a += x[:, :, None] * x[:, None, :]
        b += outcome.reward[:, None] * x
        learner.learn(round_, chosen, outcome)
    measured = learner.statistics()
    assert np.allclose(measured.gram, a, atol=1e-9)
    assert np.allclose(measured.moment, b, atol=1e-9)


def test_the_statistics_of_the_lossy_world_count_only_rewards_that_arrived() -> None:
    world = World("lossy", 2, 10, 6)
    (result,) = rollout(world, [find_arm("egreedy/v1")], record=True)
    assert result.statistics is not None
    arrived = np.sum([world.round(number).arrives for number in range(6)], axis=0)
    assert result.statistics.n_rewards.tolist() == arrived.tolist()
    assert arrived.min() < 6


def test_linucb_without_exploration_learns_the_linear_world() -> None:
    arm = Arm(replace(POLICIES["linucb"], epsilon=0.0))
    regret = rollout(World("linear", 5, 300, 200), [arm])[0].regret_by_round
    assert regret[-50:].mean() <= regret[:50].mean() / 2


def test_an_unknown_policy_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="egreedy/v9"):
        find_arm("egreedy/v9")
