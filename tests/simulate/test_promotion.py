"""Promotions on a real policy service: its event log is replayed, and the store keeps checks and switches."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from support.simulated_requests import drive
from tipbench.errors import NotEnoughData, UsageError
from tipbench.serve.event_log import SECRET_FILE, Entry, load_keys
from tipbench.serve.policy import POLICIES
from tipbench.serve.request import RewardRequest, ScoreRequest
from tipbench.serve.service import PolicyService
from tipbench.serve.switches import ShadowCounts, Switches
from tipbench.simulate.off_policy import judge_validity, logged_decisions, replay
from tipbench.simulate.promotion_gate import Size
from tipbench.simulate.rollout import find_arm, rollout
from tipbench.simulate.world import World
from tipbench.workflows.promotion import (
    apply_promotion,
    check_promotion,
    evaluate_log,
    fit_prior_from_log,
    replay_log,
    switches_of,
    undo_promotion,
)

SMALL, ENOUGH = Size(1, 200, 60), Size(1, 800, 100)
WORLD = World("standard", 5, 30, 12)


@dataclass(frozen=True)
class ServiceChooser:
    """Lets a service of this process decide for simulated users."""

    service: PolicyService
    policy: str

    def score(self, request: ScoreRequest) -> str:
        return str(self.service.score(self.policy, request).body["chosen"])

    def reward(self, request: RewardRequest) -> None:
        self.service.reward(self.policy, request)


@pytest.fixture(scope="module")
def served_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose event log has `egreedy/v1` serving all users of WORLD, as an application would drive it."""
    home = tmp_path_factory.mktemp("served")
    (home / SECRET_FILE).write_text("5" * 64 + "\n", "utf-8")  # draws depend on it: the same in every run
    (home / SECRET_FILE).chmod(0o600)
    with closing(PolicyService(home)) as service:
        drive(WORLD, ServiceChooser(service, "egreedy/v1"))
    return home


def test_the_server_decides_as_the_vectorised_rollout_does(served_home: Path) -> None:
    keys = load_keys(served_home)

    def draws(policy: object, number: int) -> np.ndarray:
        users = [keys.hash_user_id(f"user-{user}") for user in range(len(WORLD))]
        return np.array([keys.repeatable_random("egreedy/v1", user, f"round-{number}") for user in users])

    fast = rollout(WORLD, [find_arm("egreedy/v1")], draws=draws, record=True)[0].chosen
    replayed = replay_log(served_home, "egreedy/v1")
    assert fast is not None
    assert [decision.chosen for decision in replayed] == fast.ravel().tolist()


def test_the_policy_that_served_is_estimated_at_its_mean_reward(served_home: Path) -> None:
    log = logged_decisions(replay_log(served_home, "egreedy/v1"), "egreedy/v1")
    assert np.allclose(log.weights, 1.0)
    report = evaluate_log(served_home, "egreedy/v1")
    for name in ("IPS", "SNIPS"):
        assert report["estimates"][name] == pytest.approx(report["logged_reward"])
    assert report["estimates"]["DR"]["mean"] == pytest.approx(report["logged_reward"]["mean"], abs=0.02)
    assert report["weights"]["effective_sample"] == pytest.approx(len(WORLD) * WORLD.n_rounds)
    assert report["weights"]["plausible"] is True


def test_the_target_learns_from_earlier_rewards_only(served_home: Path) -> None:
    replayed = replay_log(served_home, "egreedy/v3")
    first = replayed[: len(WORLD)]
    assert all(np.ptp(decision.target_probabilities) == 0 for decision in first), "without rewards all candidates tie"
    assert any(np.ptp(decision.target_probabilities) > 0 for decision in replayed[len(WORLD) :])


def test_a_log_without_probabilities_is_rejected() -> None:
    body = {"request": {"candidates": [{"tip_id": "t"}]}, "at": "2026-01-05T09:00:00+00:00", "chosen": "t"}
    with pytest.raises(UsageError, match="no probabilities"):
        replay([Entry(1, "score", "u", "e", "egreedy/v1", 0.0, None, body)], POLICIES["egreedy/v1"])


def test_missing_decisions_are_not_enough_data(tmp_path: Path, served_home: Path) -> None:
    with pytest.raises(NotEnoughData, match="no event log"):
        replay_log(tmp_path, "egreedy/v3")
    with pytest.raises(NotEnoughData, match="no decision of linucb"):
        evaluate_log(served_home, "egreedy/v3", "linucb")


def test_a_prior_is_fitted_from_the_log(served_home: Path) -> None:
    fitted = fit_prior_from_log(served_home, "egreedy/v3")
    assert fitted.n_users == len(WORLD)
    POLICIES["egreedy/v3"].check_prior(fitted.prior)
    assert fitted.error_reduction is not None


def test_a_full_check_with_a_small_log_is_not_enough_data(served_home: Path) -> None:
    verdict = check_promotion(served_home, "egreedy/v3", size=SMALL, user="ada")
    assert [clause.passed for clause in verdict.clauses[3:]] == [None, None]
    assert "effective sample" in verdict.clauses[3].why
    assert verdict.validity[0]["correlation"] is None, "8 tips are fewer than 30"
    with switches_of(served_home) as switches:
        assert switches.promotions(kind="check")[0].passed is verdict.passed


def test_a_full_check_of_a_policy_without_a_shadow_advises_a_check_in_simulation_only(tmp_path: Path) -> None:
    verdict = check_promotion(tmp_path, "egreedy/v1", "egreedy/v3", size=Size(1, 10, 4))
    assert verdict.clauses[-1].passed is None
    assert verdict.clauses[-1].why == "egreedy/v1 has no shadow, so only --simulation-only can check it."


def test_the_feature_schema_changes_only_with_the_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(PolicyService(tmp_path)) as service:
        service.score("egreedy/v1", {"user_id": "u1", "candidates": [{"tip_id": "t"}]})
    with switches_of(tmp_path) as switches:
        switches.add_shadow_counts("egreedy-v3-shadow", ShadowCounts(calls=1))
    logged_with = POLICIES["egreedy/v1"]
    other_rate = replace(logged_with, epsilon=0.2)
    other_features = replace(logged_with, features=replace(logged_with.features, version="features-v1/2"))
    for policy, passed in ((other_rate, True), (other_features, False)):
        monkeypatch.setitem(POLICIES, "egreedy/v1", policy)
        verdict = check_promotion(tmp_path, "egreedy/v3", size=Size(1, 10, 4))
        assert verdict.clauses[-1].passed is passed, verdict.clauses[-1].why


def test_judged_quality_that_predicts_completion_is_found(served_home: Path) -> None:
    replayed = replay_log(served_home, "egreedy/v3")
    for at, decision in enumerate(replayed):
        decision.chosen_candidate = {"tip_id": f"tip-{at % 40}", "composite": 2.0 + at % 40 / 3}
        decision.action = "completed" if (at * 7919) % 40 < at % 40 else "ignored"
    found = judge_validity(replayed, {"tone": {f"tip-{at}": float(-at) for at in range(40)}})
    assert {row.scale: np.sign(row.correlation or 0) for row in found} == {"composite": 1, "tone": -1}


def test_r17_a_promotion_needs_a_passed_fresh_check_of_the_same_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="not passed a check"):
        apply_promotion(tmp_path, "egreedy/v3", user="ada")
    check_promotion(tmp_path, "egreedy/v3", size=SMALL, quick=True, user="ada")
    with pytest.raises(UsageError, match="not passed a check"):
        apply_promotion(tmp_path, "egreedy/v3", user="ada")
    verdict = check_promotion(tmp_path, "egreedy/v3", size=ENOUGH, simulation_only=True, user="ada")
    assert verdict.passed
    with monkeypatch.context() as patch:
        now = time.time()
        patch.setattr(Switches.__init__, "__kwdefaults__", {"clock": lambda: now + 8 * 86_400})
        with pytest.raises(UsageError, match="last 7 days"):
            apply_promotion(tmp_path, "egreedy/v3", user="ada")
    with monkeypatch.context() as patch:
        patch.setattr("tipbench.workflows.promotion.versions", lambda *_: {"candidate": "another"})
        with pytest.raises(UsageError, match="present versions"):
            apply_promotion(tmp_path, "egreedy/v3", user="ada")
    assert apply_promotion(tmp_path, "egreedy/v3", user="ada").baseline == "egreedy/v1"
    assert undo_promotion(tmp_path, user="grace").candidate == "egreedy/v1"
    with switches_of(tmp_path) as switches:
        assert [(row.kind, row.user) for row in switches.promotions()] == [
            ("undo", "grace"),
            ("apply", "ada"),
            ("check", "ada"),
        ]
        assert switches.active() == "egreedy/v1"


def test_a_worse_policy_fails_and_cannot_be_applied(tmp_path: Path) -> None:
    with switches_of(tmp_path) as switches:
        switches.switch_unchecked("egreedy/v3", user="ada", reason="test")
    verdict = check_promotion(tmp_path, "egreedy/v1", size=SMALL, simulation_only=True, user="ada")
    assert verdict.exit_code == 1
    with pytest.raises(UsageError, match="not passed a check"):
        apply_promotion(tmp_path, "egreedy/v1", user="ada")
