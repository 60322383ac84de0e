"""What the leaderboard claims, held against worlds of which the truth is known."""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pytest
from worlds import board, verdict, world

from tipbench.compare.matrix import Floats
from tipbench.compare.ranking import rank
from tipbench.compare.resampling import better_than
from tipbench.compare.statistics import mean_estimate, scenarios_needed

ALL_EQUAL = [0.0] * 12
TWO_ON_TOP = [0.0] * 10 + [6.0, 6.0]
WORLDS = 800


def lead(size: float, k: int = 12) -> list[float]:
    return [0.0] * (k - 1) + [size]


def share_decided(effects: Sequence[float], n: int, worlds: int, seed: int = 1) -> float:
    rng = np.random.default_rng([seed, n])
    return sum(verdict(world(rng, effects, n), flips=499)[0] for _ in range(worlds)) / worlds


def covered(draws: Floats, truth: float) -> float:
    """Share of rows of `draws` of which the interval holds the truth."""
    found = [mean_estimate(row) for row in draws]
    ends = [(row.ci_low, row.ci_high) for row in found if row]
    return sum(low is not None and high is not None and low <= truth <= high for low, high in ends) / len(draws)


@pytest.mark.parametrize("n", [6, 16])
def test_equal_pairs_are_hardly_ever_decided(n: int) -> None:
    assert share_decided(ALL_EQUAL, n, WORLDS) <= 0.06


@pytest.mark.parametrize("n", [8, 32])
def test_two_equal_pairs_on_top_are_decided_in_at_most_six_of_a_hundred(n: int) -> None:
    assert share_decided(TWO_ON_TOP, n, WORLDS) <= 0.06


@pytest.mark.parametrize("n", [6, 16])
def test_two_equal_pairs_alone_are_decided_in_at_most_six_of_a_hundred(n: int) -> None:
    assert share_decided([0.0, 0.0], n, WORLDS) <= 0.06


@pytest.mark.parametrize(("size", "n"), [(5.0, 8), (2.0, 32)])
def test_a_clear_lead_is_decided_in_nine_of_ten(size: float, n: int) -> None:
    assert share_decided(lead(size), n, 200) >= 0.90


def test_with_four_scenarios_no_lead_is_decided() -> None:
    assert share_decided(lead(50.0), 4, 100) == 0


@pytest.mark.parametrize("n", [8, 32])
@pytest.mark.parametrize("effects", [lead(1.0), [0.0] * 6 + [1.0] * 5 + [1.3]], ids=["lead", "crowd"])
def test_the_true_best_leads_or_is_tied_in_ninety_five_of_a_hundred(effects: list[float], n: int) -> None:
    rng = np.random.default_rng([2, n])
    inside = sum(11 in verdict(world(rng, effects, n))[1] for _ in range(300))
    assert inside / 300 >= 0.95


def test_fewer_flips_do_not_change_what_the_simulations_show() -> None:
    rng = np.random.default_rng(3)
    pairs = [(verdict(values, 499)[0], verdict(values, 10_000)[0]) for values in _worlds(rng, lead(1.2), 32, 40)]
    few, many = np.array(pairs).mean(axis=0)
    assert 0.2 < many < 0.8
    assert abs(few - many) <= 0.06
    assert np.mean([one == other for one, other in pairs]) >= 0.93


@pytest.mark.parametrize(("effects", "n"), [(ALL_EQUAL, 16), (TWO_ON_TOP, 8)])
def test_equal_rows_are_kept_apart_by_the_rank_ranges_in_at_most_six_of_a_hundred(effects: list[float], n: int) -> None:
    rng, truth = np.random.default_rng([4, n]), np.array(effects)
    equal = truth[:, None] == truth
    wrong = sum(bool((better_than(values, flips=299) & equal).any()) for values in _worlds(rng, effects, n, 400))
    assert wrong / 400 <= 0.06


def test_missing_cells_do_not_break_the_rank_ranges() -> None:
    rng, wrong, worlds = np.random.default_rng(5), 0, 1600
    for values in _worlds(rng, [0.0] * 8, 20, worlds):
        values[12:, 4:] = np.nan
        values[10:14, 1] = np.nan
        wrong += bool(better_than(values, flips=299).any())
    assert wrong / worlds <= 0.05 + 3 * sqrt(0.05 * 0.95 / worlds)  # the stated rate and its sampling error


def test_rank_ranges_hold_the_true_ranks() -> None:
    rng, inside = np.random.default_rng(6), 0
    for values in _worlds(rng, list(np.linspace(5, 0, 6)), 12, 150):
        rows = rank(board(values), flips=299, resamples=1).rows
        places = [(row.rank_low, int(row.pair.model[1:]) + 1, row.rank_high) for row in rows]
        inside += all(low <= true <= high for low, true, high in places)  # type: ignore[operator]
    assert inside / 150 >= 0.95


@pytest.mark.parametrize("n", [8, 32])
def test_the_interval_of_a_row_fixed_in_advance_covers_the_truth(n: int) -> None:
    draws = np.random.default_rng([7, n]).normal(12, 2, size=(WORLDS, n))
    assert 0.93 <= covered(draws, 12) <= 0.97


@pytest.mark.parametrize("n", [8, 32])
def test_with_floors_mixed_in_the_interval_still_covers_nearly_as_often(n: int) -> None:
    rng = np.random.default_rng([8, n])
    floored = rng.random((WORLDS, n)) < 0.1
    draws = np.where(floored, 3.0, np.clip(rng.normal(12, 2, size=(WORLDS, n)), 2, 17))
    assert 0.85 <= covered(draws, _floored_mean()) <= 0.97


@pytest.mark.parametrize(("n", "personas"), [(8, 4), (32, 8)])
def test_persona_effects_narrow_the_interval_and_means_per_persona_mend_it(n: int, personas: int) -> None:
    rng = np.random.default_rng([9, n])
    effect = rng.normal(0, 1.4, size=(WORLDS, personas, 1))
    draws = 12 + effect + rng.normal(0, 1.4, size=(WORLDS, personas, n // personas))
    assert covered(draws.reshape(WORLDS, n), 12) < 0.93
    assert 0.93 <= covered(draws.mean(axis=2), 12) <= 0.97


@pytest.mark.parametrize("n", [8, 32])
def test_the_interval_of_the_leader_is_optimistic_and_by_how_much_is_known(n: int) -> None:
    rng = np.random.default_rng([10, n])
    draws = [values[:, values.mean(axis=0).argmax()] for values in _worlds(rng, ALL_EQUAL, n, WORLDS)]
    assert 0.80 <= covered(np.array(draws), 10) <= 0.93


def test_the_chance_of_being_best_is_even_between_equal_rows() -> None:
    rng = np.random.default_rng(11)
    chances = np.zeros(4)
    for values in _worlds(rng, [0.0] * 4, 12, 100):
        rows = sorted(rank(board(values), flips=19, resamples=200).rows, key=lambda row: row.pair)
        chances += [row.p_best or 0.0 for row in rows]
    np.testing.assert_allclose(chances / 100, 0.25, atol=0.08)


def test_the_scenarios_said_to_be_needed_do_decide_as_a_rule() -> None:
    needed = scenarios_needed(2.0, 2.0, comparisons=11, at_least=6)
    assert needed is not None
    rng = np.random.default_rng(12)
    separated = [11 in top and 0 not in top for _, top in (verdict(v) for v in _worlds(rng, lead(2.0), needed, 150))]
    assert np.mean(separated) >= 0.75


def _worlds(rng: np.random.Generator, effects: Sequence[float], n: int, count: int) -> list[Floats]:
    return [world(rng, effects, n) for _ in range(count)]


def _floored_mean() -> float:
    clipped = np.clip(np.random.default_rng(0).normal(12, 2, size=400_000), 2, 17)
    return float(0.1 * 3.0 + 0.9 * clipped.mean())
