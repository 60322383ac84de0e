import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import board, world

from tipbench.compare.matrix import Floats, Pair
from tipbench.compare.statistics import (
    differences_to,
    mean_estimate,
    paired_difference,
    pseudo_values,
    scenarios_needed,
    smallest_detectable,
)

NAN = np.nan


@pytest.mark.parametrize("n", [2, 32])
def test_the_interval_of_a_row_is_that_of_scipy(n: int) -> None:
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(n).normal(12, 2, size=n)
    found, theirs = mean_estimate(values), ttest_1samp(values, 0).confidence_interval()
    assert found is not None
    assert (found.ci_low, found.ci_high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize("n", [2, 32])
def test_the_interval_of_a_difference_is_that_of_the_paired_t_test(n: int) -> None:
    from scipy.stats import ttest_rel

    first, second = world(np.random.default_rng(n), [0, 1], n).T
    found, theirs = paired_difference(first, second), ttest_rel(second, first).confidence_interval()
    assert found is not None
    assert found.mean == pytest.approx((second - first).mean(), abs=1e-12)
    assert (found.ci_low, found.ci_high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def levels(values: Floats) -> Floats:
    """What rows are ordered by."""
    return np.asarray(pseudo_values(values).mean(axis=0))


def test_one_scenario_gives_a_mean_and_no_interval() -> None:
    found = mean_estimate(np.array([7.5, NAN]))
    assert found is not None
    assert (found.mean, found.ci_low, found.ci_high, found.sd, found.n) == (7.5, None, None, None, 1)


def test_equal_scores_give_no_interval_because_one_without_width_would_claim_certainty() -> None:
    found = mean_estimate(np.full(8, 5.0))
    assert found is not None
    assert (found.mean, found.ci_low, found.ci_high) == (5.0, None, None)


def test_a_constant_difference_has_no_interval_even_after_rounding() -> None:
    first = np.array([12.1, 3.3, 7.7])
    found = paired_difference(first, first + 0.1 + 0.2)
    assert found is not None
    assert found.mean == pytest.approx(0.3)
    assert found.ci_low is None


def test_nothing_judged_and_nothing_shared_are_unknown() -> None:
    assert mean_estimate(np.array([NAN, NAN])) is None
    assert paired_difference(np.array([1.0, NAN]), np.array([NAN, 2.0])) is None


@settings(max_examples=20)
@given(st.permutations(range(4)))
def test_the_order_of_rows_changes_no_difference(order: list[int]) -> None:
    values, pairs = world(np.random.default_rng(1), [0, 1, 2, 3], 8), [Pair(f"m{at}", "v") for at in range(4)]
    plain = differences_to(board(values, pairs), pairs[2])
    assert differences_to(board(values[:, order], [pairs[at] for at in order]), pairs[2]) == plain


def test_a_third_row_changes_neither_mean_nor_interval_of_a_difference() -> None:
    rng = np.random.default_rng(2)
    values, pairs = world(rng, [0, 1], 8), [Pair(name, "v") for name in "abcd"]
    more = np.hstack([values, np.full((8, 1), NAN), rng.normal(size=(8, 1))])
    few = differences_to(board(values, pairs[:2]), pairs[0])[pairs[1]]
    many = differences_to(board(more, pairs), pairs[0])[pairs[1]]
    assert few is not None
    assert many is not None
    assert (few.mean, few.ci_low, few.ci_high, few.n) == (many.mean, many.ci_low, many.ci_high, many.n)


def test_an_incomplete_row_has_a_difference_without_p_and_leaves_the_others_theirs() -> None:
    values, pairs = world(np.random.default_rng(3), [0, 1, 5], 8), [Pair(name, "v") for name in "abc"]
    lacking = values.copy()
    lacking[3:, 1] = NAN
    with_hole = differences_to(board(lacking, pairs), pairs[0])
    without = differences_to(board(values[:, [0, 2]], [pairs[0], pairs[2]]), pairs[0])
    assert with_hole[pairs[1]] is not None
    assert with_hole[pairs[1]].p is None  # type: ignore[union-attr]
    assert with_hole[pairs[1]].n == 3  # type: ignore[union-attr]
    assert with_hole[pairs[2]] == without[pairs[2]]


def test_a_reference_that_is_not_on_the_board_is_refused() -> None:
    with pytest.raises(ValueError, match="not on the board"):
        differences_to(board(np.ones((2, 2))), Pair("nobody", "v1"))


def test_levels_are_plain_means_when_nothing_is_missing() -> None:
    values = world(np.random.default_rng(4), [0, 1, 2], 8)
    np.testing.assert_array_equal(levels(values), values.mean(axis=0))


def test_levels_do_not_reward_a_row_for_having_been_judged_in_easy_scenarios() -> None:
    difficulty = np.array([0.0, 0.0, 10.0, 10.0])[:, None]
    values: Floats = difficulty + np.array([0.0, 1.0, 2.0])
    values[2:, 2] = NAN
    np.testing.assert_allclose(np.diff(levels(values)), [1, 1])


def test_rows_with_the_same_scenarios_differ_in_level_by_their_paired_difference() -> None:
    values = world(np.random.default_rng(5), [0, 1, 2, 0, 0], 20)
    values[8:, 2:] = NAN
    assert np.diff(levels(values))[0] == pytest.approx((values[:, 1] - values[:, 0]).mean())


def test_levels_are_those_of_a_least_squares_fit() -> None:
    rng = np.random.default_rng(6)
    values = world(rng, [0, 1, 2, 3], 9)
    values[rng.random(values.shape) < 0.2] = NAN
    rows, columns = np.nonzero(~np.isnan(values))
    design = np.hstack([np.eye(9)[rows], np.eye(4)[columns]])
    fitted = np.linalg.lstsq(design, values[rows, columns], rcond=None)[0][9:]
    np.testing.assert_allclose(np.diff(levels(values)), np.diff(fitted), atol=1e-9)


def test_influences_predict_what_leaving_a_little_of_a_scenario_out_does() -> None:
    values = world(np.random.default_rng(7), [0, 1, 2], 10)
    values[7:, 2] = NAN
    pseudo, little = pseudo_values(values), 1e-6
    rows, columns = np.nonzero(~np.isnan(values))
    design = np.hstack([np.eye(10)[rows], np.eye(3)[columns]])
    weights = np.where(rows == 4, np.sqrt(1 + little), 1.0)
    moved = np.linalg.lstsq(design * weights[:, None], values[rows, columns] * weights, rcond=None)[0][10:]
    slope = (np.diff(moved) - np.diff(levels(values))) / little
    np.testing.assert_allclose(np.diff(pseudo[4] - pseudo.mean(axis=0)) / 10, slope, atol=1e-5)


@pytest.mark.parametrize("distance", [0.5, 8.0])
def test_the_scenarios_needed_are_the_fewest_that_detect_the_distance(distance: float) -> None:
    n = scenarios_needed(distance, 2.0, at_least=6)
    assert n is not None
    found = smallest_detectable(2.0, n)
    assert found is not None
    assert found <= distance
    if n > 6:
        fewer = smallest_detectable(2.0, n - 1)
        assert fewer is not None
        assert fewer > distance


def test_as_many_scenarios_as_needed_do_separate_in_about_four_of_five_benchmarks() -> None:
    from scipy.stats import ttest_1samp

    n = scenarios_needed(1.0, 2.0)
    assert n is not None
    draws = np.random.default_rng(8).normal(1.0, 2.0, size=(4000, n))
    assert 0.77 <= (ttest_1samp(draws, 0, axis=1).pvalue <= 0.05).mean() <= 0.84


def test_more_comparisons_need_more_scenarios() -> None:
    few, many = scenarios_needed(1.0, 2.0), scenarios_needed(1.0, 2.0, comparisons=11)
    assert few is not None
    assert many is not None
    assert few < many


def test_what_no_number_of_scenarios_can_tell_is_unknown() -> None:
    assert scenarios_needed(0.0, 2.0) is None
    assert scenarios_needed(1.0, None) is None
    assert scenarios_needed(1e-6, 2.0) is None


def test_a_constant_difference_needs_only_the_fewest_scenarios_that_can_decide() -> None:
    assert scenarios_needed(1.0, 0.0, at_least=6) == 6


def test_under_six_scenarios_no_difference_is_detectable() -> None:
    assert smallest_detectable(2.0, 5) is None
    assert smallest_detectable(2.0, 6) is not None
    assert smallest_detectable(0.0, 8) is None
