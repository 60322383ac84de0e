"""Policies: exact ridge statistics, correct probabilities, and draws that can be repeated."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from support.serving import score_request
from tipbench.errors import UsageError
from tipbench.serve.event_log import SECRET_FILE, Keys, load_keys
from tipbench.serve.features import FEATURES
from tipbench.serve.policy import LAMBDA_WITH_PRIOR, POLICIES, REBUILD_EVERY, Ridge, choose, reward_of
from tipbench.serve.prior import Prior, load_prior
from tipbench.serve.request import RewardRequest, parse_time
from tipbench.serve.tallies import Tallies

Array = NDArray[Any]


def collinear_data(steps: int, dim: int, seed: int) -> tuple[Array, Array]:
    """Features with two equal columns and one that is nearly constant, as for a user with overdue tasks only."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (steps, dim))
    x[:, 1] = x[:, 0]
    x[:, 2] = 1 + 1e-9 * x[:, 2]
    return x, rng.uniform(-1, 1, steps)


def direct_solution(x: Array, rewards: Array, lam: float, prior: Array) -> Array:
    return np.linalg.solve(lam * np.eye(x.shape[1]) + x.T @ x, x.T @ rewards + lam * prior)


@pytest.mark.parametrize(("lam", "steps"), [(1.0, 100_000), (100.0, 2 * REBUILD_EVERY + 7)])
def test_recursive_updates_equal_the_direct_solution(lam: float, steps: int) -> None:
    x, rewards = collinear_data(steps, 12, seed=1)
    prior = np.linspace(-1, 1, 12)
    ridge = Ridge(12, lam=lam, prior=prior)
    for row, reward in zip(x, rewards, strict=True):
        ridge.update(row, reward)
    assert ridge.n == steps
    np.testing.assert_allclose(ridge.theta, direct_solution(x, rewards, lam, prior), atol=1e-9)
    np.testing.assert_allclose(ridge.v @ (lam * np.eye(12) + x.T @ x), np.eye(12), atol=1e-6)


def test_v_is_recomputed_from_a_at_fixed_counts() -> None:
    x, rewards = collinear_data(REBUILD_EVERY, 12, seed=4)
    ridge, fresh = Ridge(12), Ridge(12)
    for row, reward in zip(x, rewards, strict=True):
        ridge.update(row, reward)
        if ridge.n in (REBUILD_EVERY - 1, REBUILD_EVERY):
            fresh.restore(ridge.a, ridge.b, ridge.n, ridge.reward_sum)
            assert np.array_equal(ridge.v, fresh.v) == (ridge.n == REBUILD_EVERY)


@pytest.mark.parametrize("lam", [0.5, 1.0, 100.0])
def test_before_the_first_reward_the_estimate_is_the_prior_and_v_is_its_inverse_weight(lam: float) -> None:
    prior = np.arange(7.0)
    ridge = Ridge(7, lam=lam, prior=prior)
    np.testing.assert_allclose(ridge.theta, prior, atol=1e-12)
    np.testing.assert_allclose(ridge.v, np.eye(7) / lam)


def test_permuted_and_merged_updates_give_the_same_state() -> None:
    x, rewards = collinear_data(3000, 12, seed=2)

    def learn(order: Array | range) -> Ridge:
        ridge = Ridge(12)
        for i in order:
            ridge.update(x[int(i)], rewards[int(i)])
        return ridge

    serial = learn(range(3000))
    permuted = learn(np.random.default_rng(3).permutation(3000).astype(float))
    left, right, merged = learn(range(1000)), learn(range(1000, 3000)), Ridge(12)
    merged.restore(left.a + right.a, left.b + right.b, left.n + right.n, left.reward_sum + right.reward_sum)
    for other in (permuted, merged):
        np.testing.assert_allclose(other.a, serial.a, atol=1e-9)
        np.testing.assert_allclose(other.b, serial.b, atol=1e-9)
        np.testing.assert_allclose(other.theta, serial.theta, atol=1e-9)


def test_a_snapshot_does_not_follow_later_updates() -> None:
    ridge = Ridge(7)
    snapshot = ridge.snapshot()
    before = snapshot.theta.copy(), snapshot.v.copy()
    ridge.update(np.ones(7), 1.0)
    np.testing.assert_array_equal(snapshot.theta, before[0])
    np.testing.assert_array_equal(snapshot.v, before[1])


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@given(st.lists(st.floats(-1, 1).map(lambda score: round(score, 1)), min_size=1, max_size=200))
def test_probabilities_sum_to_one_and_split_ties(policy, scores: list[float]) -> None:  # type: ignore[no-untyped-def]
    probabilities = policy.probabilities(scores)
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-12)
    best = [p for p, score in zip(probabilities, scores, strict=True) if score == max(scores)]
    rest = [p for p, score in zip(probabilities, scores, strict=True) if score < max(scores)]
    assert best == [pytest.approx(policy.epsilon / len(scores) + (1 - policy.epsilon) / len(best))] * len(best)
    assert rest == [policy.epsilon / len(scores)] * len(rest)


def test_choices_have_the_frequencies_of_their_probabilities() -> None:
    policy = replace(POLICIES["egreedy/v1"], epsilon=0.4)
    probabilities = policy.probabilities([0.5, 0.5, 0.1, -0.2])
    keys = Keys(b"k" * 32)
    chosen = [choose(probabilities, keys.repeatable_random(policy.name, "u", f"e{number}")) for number in range(20_000)]
    observed = np.bincount(chosen, minlength=4)
    assert stats.chisquare(observed, np.array(probabilities) * 20_000).pvalue > 0.001


def test_draws_depend_on_secret_policy_user_and_event_and_are_uniform() -> None:
    keys = Keys(b"k" * 32)
    same = keys.repeatable_random("linucb", "u", "e")
    assert same == Keys(b"k" * 32).repeatable_random("linucb", "u", "e")
    others = [Keys(b"l" * 32).repeatable_random("linucb", "u", "e"), keys.repeatable_random("egreedy/v1", "u", "e")]
    others += [keys.repeatable_random("linucb", "v", "e"), keys.repeatable_random("linucb", "u", "f")]
    assert len({same, *others}) == 5
    draws = [keys.repeatable_random("linucb", "u", f"{number}") for number in range(5000)]
    assert stats.kstest(draws, "uniform").pvalue > 0.001


@pytest.mark.parametrize("name", ["egreedy/v1", "egreedy/v2"])
def test_a_greedy_choice_does_not_depend_on_features_that_all_candidates_share(name: str) -> None:
    """For a given θ the user's dimensions add one number to every candidate: v1 and v2 rank by the task alone."""
    policy = POLICIES[name]
    rng = np.random.default_rng(5)
    ridge = policy.ridge()
    for _ in range(50):
        ridge.update(rng.uniform(-1, 1, policy.features.dim), rng.uniform(-1, 1))
    request = score_request(k=6)
    x = policy.features.matrix(request, request["candidates"], parse_time(request.get("at") or ""), Tallies())
    constant = np.ptp(x, axis=0) == 0
    assert {n for n, c in zip(policy.features.names, constant, strict=True) if not c} == {
        "is_overdue",
        "task_age_norm",
        "priority_norm",
    }
    before = policy.decide(x, ridge, 0.3)
    for _ in range(20):
        moved = np.where(constant, rng.uniform(-1, 1, len(constant)), x)
        assert policy.decide(moved, ridge, 0.3).probabilities == before.probabilities


def test_equal_candidates_tie_with_any_rounding_of_their_sums() -> None:
    policy = POLICIES["egreedy/v3"]
    ridge = policy.ridge()
    rng = np.random.default_rng(6)
    for _ in range(40):
        ridge.update(rng.uniform(-1, 1, 12), rng.uniform(-1, 1))
    x = np.tile(rng.uniform(-1, 1, 12), (37, 1))
    assert policy.decide(x, ridge, 0.5).probabilities == [pytest.approx(1 / 37)] * 37


def test_linucb_prefers_what_it_has_seen_less() -> None:
    policy = POLICIES["linucb"]
    ridge = policy.ridge()
    seen, unseen = np.eye(7)[2], np.eye(7)[3]
    for _ in range(30):
        ridge.update(seen, 0.0)
    decision = policy.decide(np.stack([seen, unseen]), ridge, 0.99)
    assert decision.scores == pytest.approx([1 / np.sqrt(31), 1.0])
    assert decision.probabilities == pytest.approx([0.025, 0.975])
    assert decision.chosen == 1
    assert policy.decide(np.stack([seen, unseen]), ridge, 0.0).chosen == 0


def test_each_policy_has_its_own_features_epsilon_and_version() -> None:
    table = {name: (policy.features.dim, policy.epsilon) for name, policy in POLICIES.items()}
    assert table == {
        "egreedy/v1": (7, 0.10),
        "egreedy/v2": (12, 0.10),
        "egreedy/v3": (12, 0.10),
        "linucb": (7, 0.05),
    }
    assert len({policy.version for policy in POLICIES.values()}) == 4
    assert replace(POLICIES["linucb"], alpha=2.0).version != POLICIES["linucb"].version


@pytest.mark.parametrize(
    ("request_body", "reward"),
    [
        ({"action": "dismissed", "dwell_ms": 42_000}, -1.0),
        ({"action": "snoozed"}, 0.1),
        ({"action": "ignored"}, 0.0),
        ({"action": "completed"}, 0.6),
        ({"action": "completed", "dwell_ms": 0}, -0.3),
        ({"action": "completed", "dwell_ms": 14_999}, -0.3),
        ({"action": "completed", "dwell_ms": 15_000}, 1.0),
        ({"action": "completed", "dwell_ms": 119_999}, 1.0),
        ({"action": "completed", "dwell_ms": 120_000}, 0.6),
        ({"action": "completed", "dwell_ms": 600_000}, 0.6),
        ({"action": "completed", "dwell_ms": 600_001}, 0.3),
        ({"reward": 0.4}, 0.4),
        ({"action": "dismissed", "reward": 0.0}, 0.0),
    ],
)
def test_actions_and_dwell_times_have_the_rewards_of_the_contract(request_body: RewardRequest, reward: float) -> None:
    assert reward_of(request_body) == reward


# Priors


def example_prior(theta: tuple[float, ...] = tuple(range(12))) -> Prior:
    features = FEATURES["v3"]
    return Prior("egreedy/v3", features.version, features.names, theta, {"from": "simulation"})


def test_a_saved_prior_is_loaded_unchanged_and_its_hash_ignores_the_source(tmp_path: Path) -> None:
    example_prior().save(tmp_path / "prior.json")
    loaded = load_prior(tmp_path / "prior.json")
    assert loaded == example_prior()
    assert loaded.source == {"from": "simulation"}
    assert loaded.hash == example_prior().hash == replace(example_prior(), source={}).hash
    assert loaded.hash != example_prior((1.0,) * 12).hash


def test_a_prior_is_where_a_new_user_starts_with_more_weight() -> None:
    ridge = POLICIES["egreedy/v3"].ridge(example_prior())
    assert ridge.lam == LAMBDA_WITH_PRIOR
    np.testing.assert_allclose(ridge.theta, range(12), atol=1e-12)
    assert POLICIES["egreedy/v3"].ridge().lam == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"format": "tipbench-prior/2"},
        {"theta": [1.0] * 11},
        {"theta": ["x"] * 12},
        {"theta": None},
        {"extra": 1},
        {"policy": 3},
    ],
)
def test_an_invalid_prior_is_a_usage_error(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "prior.json"
    example_prior().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match="prior"):
        load_prior(path)


def test_a_prior_of_other_features_is_refused() -> None:
    with pytest.raises(UsageError, match="features-v3/1; egreedy/v2 uses features-v2/1"):
        POLICIES["egreedy/v2"].check_prior(example_prior())


# Keys


@pytest.mark.parametrize(
    "user_id", ["", "../x", "a/b", "a\0", "a" * 129, "x" * 10_000, "ü", "u1\n", " u1", "u1\u200b", "ｕ1", "а1"]
)
def test_a_hostile_user_id_is_refused(user_id: str) -> None:
    with pytest.raises(UsageError, match="user id"):
        Keys(b"k" * 32).hash_user_id(user_id)


def test_a_user_key_is_hex_and_differs_by_user_and_secret() -> None:
    keys = [Keys(b"k" * 32).hash_user_id("u1"), Keys(b"k" * 32).hash_user_id("u2"), Keys(b"l" * 32).hash_user_id("u1")]
    assert len(set(keys)) == 3
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


def test_the_secret_is_created_once_for_its_owner_only(tmp_path: Path) -> None:
    first = load_keys(tmp_path).hash_user_id("u1")
    assert load_keys(tmp_path).hash_user_id("u1") == first
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    (tmp_path / SECRET_FILE).write_text("short")
    with pytest.raises(UsageError, match=r"64 hex digits.*backup"):
        load_keys(tmp_path)
