"""The simulated world: its users behave as in their profiles, and policies get the same random numbers."""

from __future__ import annotations

import numpy as np
import pytest

from support.simulated_requests import reward_request
from tipbench.serve.policy import reward_of
from tipbench.simulate.rollout import CONTROL_ARM, find_arm, rollout
from tipbench.simulate.world import ACTIONS, COMPLETED, PROFILE_KEYS, World, WorldName, load_personas


def measure_behaviour(world: World) -> np.ndarray:
    """Measure completion rate, dismissal rate and mean dwell of every user when tips are chosen in turn."""
    sums = np.zeros((4, len(world)))
    for number in range(world.n_rounds):
        outcome = world.outcome(world.round(number), np.full(len(world), number % world.n_candidates))
        assert outcome.action is not None
        completed = outcome.action == COMPLETED
        sums += [completed, outcome.action == 2, np.nan_to_num(outcome.dwell_ms), completed]
    return np.stack([sums[0] / world.n_rounds, sums[1] / world.n_rounds, sums[2] / sums[3]])


def test_r15_personas_carry_profile_features_that_agree_with_their_behaviour() -> None:
    world = World("standard", 7, 1000, 120)
    measured = measure_behaviour(world)
    assert set(PROFILE_KEYS) == set(load_personas().personas[0].profile)
    for persona in range(5):
        chosen = world.persona == persona
        profile = world.profile[:, chosen].mean(axis=1)
        assert measured[0, chosen].mean() == pytest.approx(profile[0], abs=0.03)
        assert measured[1, chosen].mean() == pytest.approx(profile[1], abs=0.03)
        assert measured[2, chosen].mean() == pytest.approx(profile[2], rel=0.15)
        within = np.corrcoef(measured[0, chosen], world.profile[0, chosen])[0, 1]
        assert within > 0.25, "users who complete more have a higher completion rate in their profile"


@pytest.mark.parametrize("name", list(WorldName))
def test_more_users_and_rounds_do_not_change_existing_ones(name: WorldName) -> None:
    small, large = World(name, 3, 20, 10), World(name, 3, 45, 10)
    for number in (0, 9):
        one, other = small.round(number), large.round(number)
        assert np.array_equal(one.composite, other.composite[:, :20])
        assert np.array_equal(one.action_uniform, other.action_uniform[:, :20])
        assert np.allclose(one.mean_reward, other.mean_reward[:, :20], atol=1e-15)
    assert np.array_equal(small.profile, large.profile[:, :20])


def test_the_true_mean_is_the_mean_of_the_rewards() -> None:
    world = World("standard", 11, 400, 300)
    chosen = np.zeros(400, dtype=np.int64)
    pairs = []
    for number in range(world.n_rounds):
        offered = world.round(number)
        pairs.append((world.outcome(offered, chosen).reward - offered.mean_reward[0]).mean())
    assert np.mean(pairs) == pytest.approx(0, abs=4 * np.std(pairs) / np.sqrt(len(pairs)))


def test_rewards_are_those_of_the_server() -> None:
    world = World("standard", 5, 300, 3)
    for number in range(3):
        offered = world.round(number)
        outcome = world.outcome(offered, np.zeros(300, dtype=np.int64))
        sent = [reward_of(reward_request(world, offered, user, outcome)) for user in range(300)]
        assert np.array_equal(outcome.reward, sent)
        assert outcome.action is not None
        assert set(outcome.action) == set(range(len(ACTIONS)))


def test_in_the_null_world_candidates_are_equal_and_rewards_still_vary() -> None:
    world = World("null", 1, 50, 4)
    offered = world.round(0)
    assert np.ptp(offered.mean_reward) == 0
    rewards = [world.outcome(offered, np.full(50, at)).reward for at in range(world.n_candidates)]
    assert all(not np.array_equal(rewards[0], other) for other in rewards[1:])


def test_drift_changes_tastes_half_way() -> None:
    before, after = (World(name, 2, 200, 10) for name in ("standard", "drift"))
    assert np.array_equal(before.round(4).mean_reward, after.round(4).mean_reward)
    assert not np.allclose(before.round(5).mean_reward, after.round(5).mean_reward)


def test_a_lossy_world_loses_its_share_of_rewards() -> None:
    world = World("lossy", 2, 2000, 1)
    assert world.round(0).arrives.mean() == pytest.approx(0.7, abs=0.04)
    assert World("standard", 2, 2000, 1).round(0).arrives.all()


def test_common_random_numbers_shrink_the_variance_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [find_arm("egreedy/v1"), find_arm(CONTROL_ARM)]
    shared = rollout(World("standard", 4, 500, 60), arms)
    monkeypatch.setattr("tipbench.simulate.world._OUTCOME_STREAM", 99)  # other outcomes of the same users and offers
    other = rollout(World("standard", 4, 500, 60), arms[1:])
    common = np.var(shared[1].reward - shared[0].reward)
    independent = np.var(other[0].reward - shared[0].reward)
    assert common < 0.8 * independent
