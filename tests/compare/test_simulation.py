"""The leaderboard's claims in worlds whose truth is known: the short form of `make simulations`, and coverage."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from simulated_boards import Claim, Floats, board, claims, covers, measure, normal, one_leader

from tipbench.compare.resampling import significantly_better
from tipbench.compare.statistics import mean_estimate

pytestmark = pytest.mark.simulation
WORLDS = 300
MEASURED = 800  # benchmarks for coverage, which is cheap


@pytest.mark.parametrize("claim", [each for each in claims() if each.short], ids=lambda each: each.world)
def test_claim_of_the_docs_holds(claim: Claim) -> None:
    """Rates from a few hundred worlds scatter: by two standard errors of a rate of 6 %, or of the difference."""
    worlds = 80 if "four looks" in claim.world else WORLDS
    slack = 0.1 if claim.group.startswith("P(best)") else 2 * sqrt(0.06 * 0.94 / worlds)
    assert claim.holds(measure(claim, worlds), slack)


def test_with_four_scenarios_no_lead_is_decided() -> None:
    rng = np.random.default_rng(1)
    assert not any(board(normal(rng, one_leader(50.0), 4)).decided for _ in range(50))


def test_rank_ranges_contain_the_true_ranks() -> None:
    rng, inside = np.random.default_rng(6), 0
    for _ in range(150):
        rows = board(normal(rng, list(np.linspace(5, 0, 6)), 12)).rows
        places = [(row.rank_low, int(row.pair.model[1:]) + 1, row.rank_high) for row in rows]
        inside += all(low <= true <= high for low, true, high in places)  # type: ignore[operator]
    assert inside / 150 >= 0.95


@pytest.mark.parametrize("gaps", [False, True])
def test_equal_rows_are_rarely_separated_by_the_rank_ranges(gaps: bool) -> None:
    rng, wrong, worlds = np.random.default_rng(5), 0, 1200
    for _ in range(worlds):
        values = normal(rng, [0.0] * 8, 20)
        if gaps:
            values[12:, 4:] = np.nan
            values[10:14, 1] = np.nan
        wrong += bool(significantly_better(values, n_flips=299).any())
    assert wrong / worlds <= 0.05 + 3 * sqrt(0.05 * 0.95 / worlds)


def share_covered(draws: Floats, truth: float) -> float:
    """Share of rows of `draws` whose interval contains the truth."""
    return sum(covers(mean_estimate(row), truth) for row in draws) / len(draws)


@pytest.mark.parametrize(("n", "personas"), [(8, 4), (32, 8)])
def test_persona_effects_narrow_the_interval_and_means_per_persona_correct_it(n: int, personas: int) -> None:
    rng = np.random.default_rng([9, n])
    effect = rng.normal(0, 1.4, size=(MEASURED, personas, 1))
    draws = 12 + effect + rng.normal(0, 1.4, size=(MEASURED, personas, n // personas))
    assert share_covered(draws.reshape(MEASURED, n), 12) < 0.93
    assert 0.93 <= share_covered(draws.mean(axis=2), 12) <= 0.97


@pytest.mark.parametrize("n", [8, 32])
def test_interval_of_the_leader_is_optimistic_by_a_known_amount(n: int) -> None:
    rng = np.random.default_rng([10, n])
    worlds = [normal(rng, [0.0] * 12, n) for _ in range(MEASURED)]
    leaders = np.array([values[:, values.mean(axis=0).argmax()] for values in worlds])
    assert 0.80 <= share_covered(leaders, 10) <= 0.93
