"""Off-policy estimators: equal to obp's, unbiased, with intervals that cover the truth."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from tipbench.errors import NotEnoughData
from tipbench.simulate.off_policy import (
    ESTIMATORS,
    LoggedDecisions,
    clustered_mean,
    gain,
    rank_correlation,
    weight_diagnostics,
)

STORED = json.loads(Path(__file__).with_name("obp_estimates.json").read_text("utf-8"))


def stored_log() -> LoggedDecisions:
    action = np.array(STORED["action"])
    logged, target, model = (np.array(STORED[key]) for key in ("logged", "target", "model"))
    rows = np.arange(len(action))
    return LoggedDecisions(
        rows,
        np.array(STORED["reward"]),
        logged[rows, action],
        target[rows, action],
        model[rows, action],
        (target * model).sum(axis=1),
    )


@pytest.mark.parametrize("name", ["IPS", "SNIPS", "DM", "DR"])
def test_estimates_equal_those_of_obp_on_stored_arrays(name: str) -> None:
    assert ESTIMATORS[name](stored_log()).mean == pytest.approx(STORED["estimates"][name], abs=1e-12)


def softmax(scores: np.ndarray) -> np.ndarray:
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def simulated_log(seed: int, users: int = 60, rounds: int = 12, *, wrong: float = 0.0) -> tuple[LoggedDecisions, float]:
    """Return a log of users who differ, and the true value of the target; `wrong` biases the reward model."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(users * rounds, 4, 3))
    user = np.repeat(np.arange(users), rounds)
    liking, offset = np.array([0.5, -0.3, 0.2]), rng.normal(0, 0.3, users)[user]
    mean = np.tanh(x @ liking) * 0.5 + offset[:, None]
    logging, target = softmax(x @ [0.3, 0.2, 0.0]), softmax(x @ [0.8, -0.4, 0.3])
    action = (rng.random((len(x), 1)) > logging.cumsum(axis=1)).sum(axis=1).clip(max=3)
    rows = np.arange(len(x))
    reward = mean[rows, action] + rng.normal(0, 0.3, len(x))
    model = x @ liking * 0.4 - wrong * np.abs(x[:, :, 0])
    log = LoggedDecisions(
        user, reward, logging[rows, action], target[rows, action], model[rows, action], (target * model).sum(axis=1)
    )
    return log, true_value()


@functools.cache
def true_value() -> float:
    """The target's value over contexts and users, from a large sample."""
    x = np.random.default_rng(0).normal(size=(400_000, 4, 3))
    mean = np.tanh(x @ np.array([0.5, -0.3, 0.2])) * 0.5
    return float((softmax(x @ [0.8, -0.4, 0.3]) * mean).sum(axis=1).mean())


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_intervals_cover_the_truth_in_at_least_ninety_percent_of_two_hundred_worlds(wrong: float) -> None:
    covered = dict.fromkeys(("IPS", "SNIPS", "DR"), 0)
    for seed in range(200):
        log, truth = simulated_log(seed, wrong=wrong)
        for name in covered:
            found = ESTIMATORS[name](log)
            assert found.ci_low is not None
            assert found.ci_high is not None
            covered[name] += found.ci_low <= truth <= found.ci_high
    assert all(180 <= count <= 200 for count in covered.values()), covered


def test_doubly_robust_stays_right_with_a_wrong_reward_model_and_the_direct_method_does_not() -> None:
    means: dict[str, list[float]] = {"DR": [], "DM": []}
    for seed in range(60):
        log, truth = simulated_log(seed, wrong=1.0)
        for name, found in means.items():
            found.append(ESTIMATORS[name](log).mean - truth)
    error = {name: abs(np.mean(found)) / (np.std(found) / np.sqrt(60)) for name, found in means.items()}
    assert error["DR"] < 3
    assert error["DM"] > 5


def test_the_logging_policy_is_estimated_at_its_sample_mean() -> None:
    log, _ = simulated_log(3)
    same = LoggedDecisions(
        log.user, log.reward, log.logged_probability, log.logged_probability, log.q_chosen * 0, log.q_target * 0
    )
    for name in ("IPS", "SNIPS", "DR"):
        assert ESTIMATORS[name](same).mean == pytest.approx(log.reward.mean(), abs=1e-12)
    assert gain(same).mean == pytest.approx(0, abs=1e-12)
    diagnostics = weight_diagnostics(same)
    assert diagnostics.effective_sample == pytest.approx(len(log.reward))
    assert diagnostics.is_plausible


def test_wrong_probabilities_are_detected_by_the_mean_weight() -> None:
    log, _ = simulated_log(3)
    wrong = LoggedDecisions(
        log.user, log.reward, log.logged_probability * 0.7, log.target_probability, log.q_chosen, log.q_target
    )
    assert weight_diagnostics(log).is_plausible
    assert not weight_diagnostics(wrong).is_plausible


def test_decisions_of_one_user_count_as_one_cluster() -> None:
    values, user = np.repeat([0.0, 1.0, 2.0, 3.0], 100), np.repeat(np.arange(4), 100)
    by_decision, by_user = clustered_mean(values, np.arange(400)), clustered_mean(values, user)
    assert by_decision.se is not None
    assert by_user.se is not None
    assert by_user.se == pytest.approx(np.std([0, 1, 2, 3], ddof=1) / 2)
    assert by_user.se > 5 * by_decision.se
    assert clustered_mean(values, user * 0).ci_low is None


def test_no_decisions_are_not_enough_data() -> None:
    with pytest.raises(NotEnoughData):
        clustered_mean(np.empty(0), np.empty(0, dtype=np.int64))


def test_the_rank_correlation_needs_thirty_tips_and_has_the_right_sign() -> None:
    rng = np.random.default_rng(2)
    quality = rng.uniform(2, 17, 80)
    found = rank_correlation("composite", quality, np.tanh(quality) + rng.normal(0, 0.3, 80) + quality / 10)
    assert found.correlation is not None
    assert found.ci_low is not None
    assert found.ci_low > 0
    assert rank_correlation("composite", quality[:29], quality[:29]).correlation is None
