"""The gate: requires a win in simulation, each clause can fail separately, and chance hardly ever passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tipbench.compare.statistics import Estimate
from tipbench.serve.policy import POLICIES
from tipbench.serve.switches import ShadowCounts
from tipbench.simulate import promotion_gate as gate
from tipbench.simulate.off_policy import LoggedDecisions
from tipbench.simulate.promotion_gate import Clause, Size, Verdict, simulation_clauses
from tipbench.simulate.simulation import SimulationConfig, simulate
from tipbench.simulate.world import WorldName

SMALL = Size(2, 300, 100)


def make_verdict(*clauses: Clause, quick: bool = False, simulation_only: bool = True) -> Verdict:
    return Verdict("egreedy/v3", "egreedy/v1", clauses, simulation_only, SMALL, "2026-01-01", {}, quick)


@pytest.mark.simulation
def test_r17_only_an_offline_simulation_win_passes_the_gate() -> None:
    won = simulation_clauses("egreedy/v3", "egreedy/v1", SMALL, workers=1)
    assert [clause.passed for clause in won] == [True, True, True]
    assert make_verdict(*won).exit_code == 0
    lost = simulation_clauses("egreedy/v1", "egreedy/v3", SMALL, workers=1)
    assert [clause.passed for clause in lost] == [False, False, False]
    assert make_verdict(*lost).exit_code == 1


def test_a_policy_does_not_win_against_itself() -> None:
    clauses = simulation_clauses("egreedy/v3", "egreedy/v3", Size(1, 50, 20), workers=1)
    assert [clause.passed for clause in clauses] == [False, True, True]


def test_the_gain_of_v3_comes_from_its_features_and_not_from_an_intercept() -> None:
    config = SimulationConfig(policies="egreedy/v1+bias,egreedy/v3", seeds=2, users=300, rounds=100)
    result = simulate(config, workers=1)
    over_control = result.gain("egreedy/v3", "egreedy/v1+bias")
    assert over_control is not None
    assert over_control.ci_low is not None
    assert over_control.ci_low > 0.03


@pytest.mark.simulation
def test_chance_hardly_ever_wins_in_the_null_world() -> None:
    """Clauses a and b for 20 seeds; `make simulations` runs all clauses for 100."""
    wins = 0
    for seed in range(20):
        config = SimulationConfig(
            policies="egreedy/v3", world=WorldName.NULL, seeds=1, users=200, rounds=100, seed=seed
        )
        result = simulate(config, workers=1)
        assert result.gain("egreedy/v3") != Estimate(0, None, None, 0, 200), "luck differs per candidate"
        clauses = gate.win_clause(result, "egreedy/v3"), gate.persona_clause(result, "egreedy/v3")
        wins += all(clause.passed for clause in clauses)
    assert wins <= 1


def estimate(mean: float, low: float) -> Estimate:
    return Estimate(mean, low, 2 * mean - low, 0.1, 100)


@pytest.mark.parametrize(
    ("persona", "worlds", "expected"),
    [
        ([0.02] * 5, [0.02] * 3, [True, True, True]),
        ([0.02, 0.02, -0.011, 0.02, 0.02], [0.02] * 3, [True, False, True]),
        ([0.02] * 5, [0.02, -0.02, 0.02], [True, True, False]),
    ],
)
def test_the_clauses_on_personas_and_worlds_fail_separately(
    persona: list[float], worlds: list[float], expected: list[bool]
) -> None:
    clauses = (
        Clause("a", True, 0.1, 0.01, ""),
        gate._lower_bounds_clause("b", {str(at): estimate(low + 0.05, low) for at, low in enumerate(persona)}),
        gate._lower_bounds_clause("c", {str(at): estimate(low + 0.05, low) for at, low in enumerate(worlds)}),
    )
    assert [clause.passed for clause in clauses] == expected
    assert make_verdict(*clauses).exit_code == (0 if all(expected) else 1)


def make_log(gain: float, decisions: int = 8000, users: int = 400, *, weight: float = 1.0) -> LoggedDecisions:
    rng = np.random.default_rng(1)
    probability = rng.uniform(0.2, 0.8, decisions)
    reward = rng.normal(0.2, 0.1, decisions)
    zero = np.zeros(decisions)
    log = LoggedDecisions(np.arange(decisions) % users, reward, probability, probability * weight, zero, zero)
    return replace(log, q_target=zero + gain + (1 - weight) * 0.2)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (make_log(0.02), True),
        (make_log(-0.02), True),
        (make_log(-0.2), False),
        (make_log(0.02, decisions=1500), None),
        (make_log(0.02, weight=1.4), False),
        (None, None),
    ],
)
def test_the_clause_on_logs_passes_fails_or_lacks_data(log: LoggedDecisions | None, expected: bool | None) -> None:
    assert gate.log_clause(log, "nothing is logged").passed is expected


def test_a_logged_gain_whose_interval_straddles_the_margin_is_not_enough_data() -> None:
    log = make_log(-0.03)
    noisy = replace(log, q_target=log.q_target + np.random.default_rng(2).normal(0, 1, len(log.reward)))
    assert gate.log_clause(noisy).passed is None


@pytest.mark.parametrize(
    ("counts", "has_same_schema", "expected"),
    [
        (ShadowCounts(10_000, dropped=5, errors=0), True, True),
        (ShadowCounts(10_000, dropped=20, errors=0), True, False),
        (ShadowCounts(10_000, dropped=0, errors=1), True, False),
        (ShadowCounts(10_000, dropped=0, errors=0), False, False),
        (ShadowCounts(0, dropped=0, errors=0), True, None),
    ],
)
def test_the_clause_on_operations(counts: ShadowCounts, has_same_schema: bool, expected: bool | None) -> None:
    clause = gate.operations_clause("egreedy/v3", "egreedy-v3-shadow", counts, has_same_schema=has_same_schema)
    assert clause.passed is expected


def test_missing_data_is_exit_3_and_a_quick_check_is_never_a_verdict() -> None:
    passed, unknown = Clause("a", True, 0.1, 0.01, ""), Clause("d", None, None, -0.03, "")
    assert make_verdict(passed, unknown).exit_code == 3
    assert make_verdict(passed, quick=True).exit_code == 3
    assert "No verdict" in make_verdict(passed, quick=True).text
    assert "not checked" in make_verdict(passed).text


def test_a_check_is_valid_for_its_versions() -> None:
    found = gate.versions("egreedy/v3", "egreedy/v1")
    assert found["candidate"] == POLICIES["egreedy/v3"].version
    assert found != gate.versions("egreedy/v2", "egreedy/v1")
