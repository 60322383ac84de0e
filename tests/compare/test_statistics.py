import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known, world

from tipbench.compare.matrix import Floats
from tipbench.compare.statistics import (
    additive_fit,
    clopper_pearson,
    conditional_power,
    is_fragile,
    mean_estimate,
    paired_difference,
    scenarios_needed,
    shown_estimate,
    simultaneous_differences,
    smallest_detectable,
)

NAN = np.nan


@pytest.mark.parametrize("n", [2, 32])
def test_the_interval_of_a_row_is_that_of_scipy(n: int) -> None:
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(n).normal(12, 2, size=n)
    found, theirs = known(mean_estimate(values)), ttest_1samp(values, 0).confidence_interval()
    assert (found.ci_low, found.ci_high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@pytest.mark.parametrize("n", [6, 32])
def test_the_interval_of_a_difference_is_that_of_the_paired_t_test(n: int) -> None:
    from scipy.stats import ttest_rel

    first, second = world(np.random.default_rng(n), [0, 1], n).T
    found, theirs = known(paired_difference(second, first)), ttest_rel(second, first).confidence_interval()
    assert found.mean == pytest.approx((second - first).mean(), abs=1e-12)
    assert (found.ci_low, found.ci_high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_below_six_scenarios_no_interval_is_shown() -> None:
    first, second = world(np.random.default_rng(5), [0, 1], 5).T
    for found in (known(shown_estimate(first)), known(paired_difference(second, first))):
        assert found.sd is not None
        assert (found.ci_low, found.ci_high, found.n) == (None, None, 5)


def adjusted_means(values: Floats) -> Floats:
    return np.asarray(additive_fit(values, np.ones(len(values), dtype=bool)).pseudo_values.mean(axis=0))


def test_one_scenario_gives_a_mean_and_no_interval() -> None:
    found = known(mean_estimate(np.array([7.5, NAN])))
    assert (found.mean, found.ci_low, found.ci_high, found.sd, found.n) == (7.5, None, None, None, 1)


def test_equal_scores_give_no_interval_because_one_without_width_would_claim_certainty() -> None:
    found = known(mean_estimate(np.full(8, 5.0)))
    assert (found.mean, found.ci_low, found.ci_high) == (5.0, None, None)


def test_a_constant_difference_has_no_interval_even_after_rounding() -> None:
    first = np.array([12.1, 3.3, 7.7])
    found = known(paired_difference(first + 0.1 + 0.2, first))
    assert found.mean == pytest.approx(0.3)
    assert found.ci_low is None


def test_nothing_judged_and_nothing_shared_are_unknown() -> None:
    assert mean_estimate(np.array([NAN, NAN])) is None
    assert paired_difference(np.array([1.0, NAN]), np.array([NAN, 2.0])) is None


@settings(max_examples=20)
@given(st.permutations(range(3)))
def test_order_of_columns_does_not_change_differences(order: list[int]) -> None:
    values = world(np.random.default_rng(1), [0, 1, 2, 3], 8)
    plain = simultaneous_differences(values[:, :3], values[:, 3])
    assert simultaneous_differences(values[:, order], values[:, 3]) == [plain[at] for at in order]


def test_simultaneous_intervals_cover_all_true_differences() -> None:
    rng, inside = np.random.default_rng(2), 0
    truth = np.array([0.0, -1.0, -2.0, -3.0])
    for _ in range(300):
        values = world(rng, [0.0, *truth], 12)
        found = simultaneous_differences(values[:, 1:], values[:, 0], 0.05, n_flips=999)
        differences = [known(each) for each in found]
        inside += all(
            known(each.ci_low) - 1e-9 <= true <= known(each.ci_high) + 1e-9
            for each, true in zip(differences, truth, strict=True)
        )
    assert inside / 300 >= 0.93


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([6, 8, 16]), st.sampled_from([0.05, 0.0182]))
def test_intervals_agree_with_the_step_down_test(seed: int, n: int, level: float) -> None:
    values = world(np.random.default_rng(seed), [3, 0, 1, 2.5, 3], n)
    for each in map(known, simultaneous_differences(values[:, 1:], values[:, 0], level)):
        if each.ci_low is not None and each.ci_high is not None:
            assert each.ci_low <= each.mean <= each.ci_high
            assert (each.ci_low < 0 < each.ci_high) <= (not each.separated)
            assert each.separated or each.ci_low <= 0 <= each.ci_high


def test_adjusted_means_are_on_the_scale_of_the_core_scenarios() -> None:
    values: Floats = np.array([0.0, 0.0, 10.0, 10.0])[:, None] + np.array([1.0, 2.0])
    values[2:, 1] = NAN
    fit = additive_fit(values, np.array([True, True, True, False]))
    np.testing.assert_allclose(fit.pseudo_values.mean(axis=0), np.array([1.0, 2.0]) + 10 / 3)


def test_conditional_power_is_the_share_of_continued_benchmarks_that_decide() -> None:
    rng = np.random.default_rng(3)
    more = rng.normal(0.8, 2.0, size=(20_000, 8))
    means = (8 * 1.2 + more.sum(axis=1)) / 16
    expected = (means > 2.3 * 2.0 / 4).mean()
    assert conditional_power(1.2, 2.0, 8, 16, expected_mean=0.8, critical=2.3) == pytest.approx(expected, abs=0.01)


def test_rates_have_exact_bounds() -> None:
    from scipy.stats import binomtest

    for k in (0, 3, 8):
        theirs = binomtest(k, 8).proportion_ci(method="exact")
        assert clopper_pearson(k, 8) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_lead_is_fragile_below_what_the_upper_bound_of_unusable_answers_would_cost() -> None:
    cost = (1 - 0.05 ** (1 / 8)) * (12.0 - 3.0)  # none of 8 unusable, quality 12, floor 3
    assert is_fragile(cost - 0.01, 12.0, 3.0, 0, 8)
    assert not is_fragile(cost + 0.01, 12.0, 3.0, 0, 8)
    assert is_fragile(20.0, None, 3.0, 8, 8)


def test_adjusted_means_are_plain_means_when_nothing_is_missing() -> None:
    values = world(np.random.default_rng(4), [0, 1, 2], 8)
    np.testing.assert_allclose(adjusted_means(values), values.mean(axis=0))


def test_adjusted_means_do_not_reward_a_row_for_having_been_judged_in_easy_scenarios() -> None:
    difficulty = np.array([0.0, 0.0, 10.0, 10.0])[:, None]
    values: Floats = difficulty + np.array([0.0, 1.0, 2.0])
    values[2:, 2] = NAN
    np.testing.assert_allclose(np.diff(adjusted_means(values)), [1, 1])


def test_rows_with_the_same_scenarios_differ_in_adjusted_mean_by_their_paired_difference() -> None:
    values = world(np.random.default_rng(5), [0, 1, 2, 0, 0], 20)
    values[8:, 2:] = NAN
    assert np.diff(adjusted_means(values))[0] == pytest.approx((values[:, 1] - values[:, 0]).mean())


def test_adjusted_means_are_those_of_a_least_squares_fit() -> None:
    rng = np.random.default_rng(6)
    values = world(rng, [0, 1, 2, 3], 9)
    values[rng.random(values.shape) < 0.2] = NAN
    rows, columns = np.nonzero(~np.isnan(values))
    design = np.hstack([np.eye(9)[rows], np.eye(4)[columns]])
    fitted = np.linalg.lstsq(design, values[rows, columns], rcond=None)[0][9:]
    np.testing.assert_allclose(np.diff(adjusted_means(values)), np.diff(fitted), atol=1e-9)


def test_influences_predict_what_leaving_a_little_of_a_scenario_out_does() -> None:
    values = world(np.random.default_rng(7), [0, 1, 2], 10)
    values[7:, 2] = NAN
    pseudo, little = additive_fit(values, np.ones(10, dtype=bool)).pseudo_values, 1e-6
    rows, columns = np.nonzero(~np.isnan(values))
    design = np.hstack([np.eye(10)[rows], np.eye(3)[columns]])
    weights = np.where(rows == 4, np.sqrt(1 + little), 1.0)
    moved = np.linalg.lstsq(design * weights[:, None], values[rows, columns] * weights, rcond=None)[0][10:]
    slope = (np.diff(moved) - np.diff(adjusted_means(values))) / little
    np.testing.assert_allclose(np.diff(pseudo[4] - pseudo.mean(axis=0)) / 10, slope, atol=1e-5)


@pytest.mark.parametrize("distance", [0.5, 8.0])
def test_the_scenarios_needed_are_the_fewest_that_detect_the_distance(distance: float) -> None:
    n = known(scenarios_needed(distance, 2.0, at_least=6))
    assert known(smallest_detectable(2.0, n)) <= distance
    if n > 6:
        assert known(smallest_detectable(2.0, n - 1)) > distance


def test_as_many_scenarios_as_needed_do_separate_in_about_four_of_five_benchmarks() -> None:
    from scipy.stats import ttest_1samp

    n = known(scenarios_needed(1.0, 2.0))
    draws = np.random.default_rng(8).normal(1.0, 2.0, size=(4000, n))
    assert 0.77 <= (ttest_1samp(draws, 0, axis=1).pvalue <= 0.05).mean() <= 0.84


def test_more_comparisons_need_more_scenarios() -> None:
    assert known(scenarios_needed(1.0, 2.0)) < known(scenarios_needed(1.0, 2.0, comparisons=11))


def test_a_number_of_scenarios_that_cannot_decide_is_unknown() -> None:
    assert scenarios_needed(0.0, 2.0) is None
    assert scenarios_needed(1.0, None) is None
    assert scenarios_needed(1e-6, 2.0) is None


def test_a_constant_difference_needs_only_the_fewest_scenarios_that_can_decide() -> None:
    assert scenarios_needed(1.0, 0.0, at_least=6) == 6


def test_under_six_scenarios_no_difference_is_detectable() -> None:
    assert smallest_detectable(2.0, 5) is None
    assert smallest_detectable(2.0, 6) is not None
    assert smallest_detectable(0.0, 8) is None
