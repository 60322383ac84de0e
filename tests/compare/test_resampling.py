from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known, simulate

from tipbench.compare import resampling
from tipbench.compare.matrix import Floats, Mask
from tipbench.compare.resampling import ALPHA, critical_t, empirical_bayes, sign_flips, significantly_better, step_down


def column(*numbers: float) -> Floats:
    return np.array(numbers, dtype=float)[:, None]


def better_by_p(values: Floats, n_flips: int) -> Mask:
    """The expected result of `significantly_better`: one step-down over the differences of all pairs."""
    k = values.shape[1]
    pairs = list(combinations(range(k), 2))
    adjusted = step_down(np.stack([values[:, i] - values[:, j] for i, j in pairs], axis=1), n_flips=n_flips)
    better = np.zeros((k, k), dtype=bool)
    for (i, j), p in zip(pairs, adjusted, strict=True):
        if p is not None and p <= ALPHA:
            gap = np.nanmean(values[:, i] - values[:, j])
            better[(i, j) if gap > 0 else (j, i)] = True
    return better


def test_up_to_twelve_scenarios_every_flip_or_its_negative_occurs_once() -> None:
    flips = sign_flips(6)
    assert flips.shape == (32, 6)
    assert len({tuple(row) for row in np.concatenate([flips, -flips])}) == 64


def test_beyond_twelve_scenarios_flips_are_drawn_and_the_first_is_the_data() -> None:
    flips = sign_flips(13, n_flips=1000)
    assert flips.shape == (1001, 13)
    assert (flips[0] == 1).all()
    assert abs(flips[1:].mean()) < 0.05


@pytest.mark.parametrize("n", [2, 8])
def test_one_column_agrees_with_the_exact_permutation_test_of_scipy(n: int) -> None:
    from scipy.stats import permutation_test

    values = np.random.default_rng(n).normal(0.7, 1.0, size=n)
    exact = permutation_test((values,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=1e5)
    assert step_down(values[:, None])[0] == pytest.approx(exact.pvalue, abs=1e-9)


def test_a_constant_difference_gets_the_smallest_p_that_the_scenarios_allow() -> None:
    assert step_down(column(*[1.5] * 8)) == (2 / 256,)
    assert step_down(column(*[-0.1 - 0.2] * 5)) == (2 / 32,)


def test_no_difference_at_all_has_p_one() -> None:
    assert step_down(column(0, 0, 0, 0, 0, 0)) == (1.0,)
    assert step_down(column(1, -1, 2, -2)) == (1.0,)


def test_a_rounding_error_is_not_a_difference() -> None:
    assert step_down(column(*[1e-15, 2e-15, 1e-15] * 4)) == (1.0,)


def test_one_shared_scenario_gives_no_p() -> None:
    values = np.array([[3.0, 3.0], [np.nan, 4.0]])
    assert step_down(values)[0] is None
    assert step_down(values)[1] == 0.5
    assert step_down(np.empty((0, 2))) == (None, None)


@pytest.mark.parametrize("n", [2, 5])
def test_under_six_scenarios_nothing_is_separated(n: int) -> None:
    assert known(step_down(column(*range(100, 100 + n)))[0]) > ALPHA


def test_a_column_with_two_scenarios_does_not_affect_the_others() -> None:
    rng = np.random.default_rng(0)
    strong = rng.normal(2.0, 1.0, size=(16, 1))
    weak = np.full((16, 5), np.nan)
    weak[:2] = [[1.0], [1.0 + 1e-6]]
    alone, together = step_down(strong)[0], step_down(np.hstack([strong, weak]))[0]
    assert known(alone) <= known(together) <= ALPHA


differences = (
    st.integers(2, 9)
    .flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-8, 8).map(lambda step: step / 2), min_size=n, max_size=n), min_size=1, max_size=6
        )
    )
    .map(lambda columns: np.array(columns, dtype=float).T)
)


@settings(max_examples=25)
@given(differences, st.randoms())
def test_the_order_of_columns_and_their_signs_change_no_p(block: Floats, random: Random) -> None:
    order = list(range(block.shape[1]))
    random.shuffle(order)
    plain = step_down(block)
    assert step_down(block[:, order]) == tuple(plain[at] for at in order)
    assert step_down(-block) == plain


@settings(max_examples=25)
@given(differences)
def test_repeated_columns_change_no_p(block: Floats) -> None:
    assert step_down(np.hstack([block, block])) == step_down(block) * 2


@settings(max_examples=25)
@given(differences)
def test_an_adjusted_p_is_never_below_the_plain_one_and_follows_the_evidence(block: Floats) -> None:
    adjusted = np.array(step_down(block), dtype=float)
    plain = np.array([step_down(block[:, [at]])[0] for at in range(block.shape[1])], dtype=float)
    assert (adjusted >= plain - 1e-12).all()
    assert adjusted.min() >= plain.min() - 1e-12
    assert (adjusted <= 1).all()


@pytest.mark.parametrize(("n", "missing"), [(6, False), (8, True), (20, True)])
def test_all_pairs_by_critical_values_are_the_rejections_by_adjusted_p(
    n: int, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(n)
    monkeypatch.setattr(resampling, "MAX_DIRECT_SUMS", 0)  # as for large boards
    for _ in range(8):
        values = simulate(rng, np.linspace(0, 8, 7), n)
        if missing:
            values[: n // 3, 4:] = np.nan
            values[-1, 2] = np.nan
        np.testing.assert_array_equal(significantly_better(values, n_flips=999), better_by_p(values, n_flips=999))


def test_fewer_rounds_only_reject_less(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    gained = 0
    for _ in range(8):
        values = simulate(rng, np.linspace(0, 6, 10), 12)
        all_rounds = significantly_better(values)
        with monkeypatch.context() as changed:
            changed.setattr(resampling, "MAX_DIRECT_SUMS", 0)
            changed.setattr(resampling, "MANY_COLUMNS", 0)
            changed.setattr(resampling, "MANY_COLUMNS_ROUNDS", 1)
            one = significantly_better(values)
        assert not (one & ~all_rounds).any()
        gained += int(all_rounds.sum() - one.sum())
    assert gained > 0


def test_identical_columns_are_never_separated() -> None:
    same = np.random.default_rng(1).normal(size=(20, 1))
    assert not significantly_better(np.hstack([same, same, same + 0.1 + 0.2 - 0.3])).any()


def test_one_scenario_or_one_column_separates_nothing() -> None:
    assert not significantly_better(np.array([[1.0, 9.0]])).any()
    assert not significantly_better(np.ones((9, 1))).any()


def test_many_patterns_of_missing_cells_use_fewer_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "MAX_DIRECT_SUMS", 0)
    monkeypatch.setattr(resampling, "MAX_SUMS_IN_MEMORY", 400_000)  # 1000 flips for 20 columns with 20 patterns
    rng = np.random.default_rng(2)
    values = simulate(rng, np.linspace(0, 30, 20), 14)
    values[rng.random(values.shape) < 0.1] = np.nan
    better = significantly_better(values)
    assert better[-1, 0]
    assert not (better & better.T).any()


def test_critical_t_of_one_column_is_close_to_that_of_a_t_test() -> None:
    from scipy.stats import t

    column = np.random.default_rng(10).normal(3.0, 1.0, size=(30, 1))
    (found,) = critical_t(column, 0.05)
    assert found == pytest.approx(t.ppf(0.975, 29), abs=0.15)


def test_critical_t_is_unknown_if_the_flips_cannot_reach_the_level() -> None:
    assert critical_t(np.random.default_rng(11).normal(size=(5, 2)), 0.0182) == (None, None)
    assert critical_t(np.full((8, 1), np.nan), 0.05) == (None,)


def test_probabilities_of_being_best_sum_to_one_and_follow_the_means() -> None:
    values = simulate(np.random.default_rng(4), [0, 0.5, 1.0, 3.0], 16)
    found = empirical_bayes(values)
    assert found.p_best.sum() == pytest.approx(1, abs=1e-12)
    assert found.p_best.argmax() == values.mean(axis=0).argmax()
    assert 0 < found.shrinkage < 1


def test_identical_columns_split_the_probability_of_being_best() -> None:
    same = np.random.default_rng(6).normal(size=(9, 1))
    np.testing.assert_allclose(
        empirical_bayes(np.hstack([same, same, same, same - 50])).p_best, [1 / 3, 1 / 3, 1 / 3, 0]
    )


@settings(max_examples=8)
@given(st.permutations(range(5)))
def test_order_of_columns_does_not_change_the_probabilities(order: list[int]) -> None:
    values = simulate(np.random.default_rng(7), [0, 0, 0, 1, 1], 10)
    np.testing.assert_allclose(
        empirical_bayes(values[:, order]).p_best, empirical_bayes(values).p_best[order], atol=1e-12
    )


def test_far_apart_columns_are_hardly_shrunk_and_equal_ones_nearly_fully() -> None:
    rng = np.random.default_rng(8)
    assert empirical_bayes(simulate(rng, np.linspace(0, 40, 12), 8)).shrinkage > 0.98
    kept = [empirical_bayes(simulate(rng, [0.0] * 12, 8), n_resamples=10).shrinkage for _ in range(40)]
    assert np.median(kept) < 0.35
