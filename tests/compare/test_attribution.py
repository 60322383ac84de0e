from itertools import product

import numpy as np
import pytest
from worlds import board, known

from tipbench.compare.attribution import Attribution, Factor, attribute
from tipbench.compare.matrix import Floats, Pair, ScoreMatrix
from tipbench.compare.statistics import Unknown

MODELS, PROMPTS = ("a", "b", "c", "d"), ("v1", "v2", "v3")
PAIRS = tuple(Pair(model, prompt) for model, prompt in product(MODELS, PROMPTS))
NONE = np.zeros((4, 3))

NAN = np.nan


def planted(effects: Floats, *, seed: int = 1, n: int = 32, noise: float = 1.0, scenario: float = 2.0) -> ScoreMatrix:
    """Four models with three prompts, and what each pair adds."""
    rng = np.random.default_rng(seed)
    values = 10 + scenario * rng.normal(size=(n, 1)) + effects.reshape(1, -1) + noise * rng.normal(size=(n, 12))
    return board(values, PAIRS, personas=[f"p{at % 8}" for at in range(n)])


def attributed(matrix: ScoreMatrix) -> Attribution:
    found = attribute(matrix, n_flips=999)
    assert isinstance(found, Attribution)
    return found


def p_of(factor: Factor | None) -> float:
    return known(known(factor).p)


def test_shares_sum_to_one() -> None:
    shares = attributed(planted(NONE)).shares()
    assert list(shares) == ["model", "prompt", "interaction", "scenario", "residual"]
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1, abs=1e-12)


def test_sums_of_squares_and_p_are_those_of_statsmodels() -> None:
    import pandas as pd
    from scipy.stats import f
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    rng = np.random.default_rng(1)
    matrix = planted(rng.normal(size=(4, 3)), seed=1, n=8)
    rows = [
        (matrix.scenarios[row], pair.model, pair.prompt, matrix.values[row, column])
        for row in range(8)
        for column, pair in enumerate(PAIRS)
    ]
    frame = pd.DataFrame(rows, columns=["scenario", "model", "prompt", "score"])
    table = anova_lm(ols("score ~ C(scenario) + C(model) * C(prompt)", frame).fit(), typ=2)
    ours = attributed(matrix)
    theirs = {
        "C(model)": ours.model,
        "C(prompt)": ours.prompt,
        "C(model):C(prompt)": ours.interaction,
        "C(scenario)": ours.scenario,
    }
    for name, factor in theirs.items():
        assert known(factor).squares == pytest.approx(table.loc[name, "sum_sq"], rel=1e-9)
        assert known(factor).df == table.loc[name, "df"]
    full = anova_lm(
        ols("score ~ C(scenario) * C(model) + C(scenario) * C(prompt) + C(model) * C(prompt)", frame).fit(), typ=2
    )
    mean_squares = full["sum_sq"] / full["df"]
    against = {
        "C(model)": "C(scenario):C(model)",
        "C(prompt)": "C(scenario):C(prompt)",
        "C(model):C(prompt)": "Residual",
    }
    for name, error in against.items():
        expected = f.sf(mean_squares[name] / mean_squares[error], full.loc[name, "df"], full.loc[error, "df"])
        assert p_of(theirs[name]) == pytest.approx(expected, abs=1e-9)
        by_chance = full.loc[name, "df"] * mean_squares[error]
        omega_squared = (full.loc[name, "sum_sq"] - by_chance) / (table["sum_sq"].sum() + mean_squares[error])
        assert known(theirs[name]).share == pytest.approx(max(omega_squared, 0.0), abs=1e-9)
    assert ours.residual.squares == pytest.approx(table.loc["Residual", "sum_sq"], rel=1e-9)


MODEL_D = NONE + np.array([[0], [0], [0], [4]])
PROMPT_V2 = NONE + np.array([0, 3, 0])


def test_a_planted_model_effect_is_found_every_time_and_other_effects_only_by_chance() -> None:
    boards = [attributed(planted(MODEL_D, seed=seed)) for seed in range(60)]
    assert all(p_of(found.model) < 1e-6 for found in boards)
    assert all(max(found.model_means, key=lambda name: found.model_means[name].mean) == "d" for found in boards)
    assert np.mean([p_of(found.prompt) <= 0.05 for found in boards]) <= 0.13
    assert np.mean([p_of(found.interaction) <= 0.05 for found in boards]) <= 0.13


def test_a_planted_prompt_effect_is_found_every_time_and_other_effects_only_by_chance() -> None:
    boards = [attributed(planted(PROMPT_V2, seed=seed)) for seed in range(60)]
    assert all(p_of(found.prompt) < 1e-6 for found in boards)
    assert all(max(found.prompt_means, key=lambda name: found.prompt_means[name].mean) == "v2" for found in boards)
    assert np.mean([p_of(found.model) <= 0.05 for found in boards]) <= 0.13
    assert np.mean([p_of(found.interaction) <= 0.05 for found in boards]) <= 0.13


def test_the_planted_share_is_estimated() -> None:
    """A model 4 points up on 3 of 12 rows has a variance of 3; scenarios have 4 and noise 1."""
    shares = [attributed(planted(MODEL_D, seed=seed, n=64)).shares() for seed in range(20)]
    means = {name: np.mean([share[name] or 0.0 for share in shares]) for name in shares[0]}
    assert means["model"] == pytest.approx(3 / 8, abs=0.03)
    assert means["scenario"] == pytest.approx(4 / 8, abs=0.04)
    assert means["residual"] == pytest.approx(1 / 8, abs=0.02)


def test_a_prompt_that_helps_only_one_model_is_flagged_with_that_model() -> None:
    effects = NONE.copy()
    effects[2, 1] = 3.0
    found = attributed(planted(effects))
    assert p_of(found.interaction) < 1e-6
    flagged = {each.prompt: each for each in found.model_dependent_prompts}
    assert flagged["v2"].helps == ("c",)
    assert flagged["v2"].hurts == ()


def test_a_prompt_that_helps_one_model_and_hurts_another_reports_both() -> None:
    effects = NONE.copy()
    effects[0, 2], effects[3, 2] = 3.0, -3.0
    flagged = {each.prompt: each for each in attributed(planted(effects)).model_dependent_prompts}
    assert flagged["v3"].helps == ("a",)
    assert flagged["v3"].hurts == ("d",)


def test_without_an_interaction_a_flag_is_raised_in_at_most_one_board_of_twenty() -> None:
    raised = sum(bool(attributed(planted(PROMPT_V2, seed=seed, n=8)).model_dependent_prompts) for seed in range(150))
    assert raised / 150 <= 0.09


def test_below_six_scenarios_marginal_means_have_no_interval() -> None:
    found = attributed(planted(NONE, n=5))
    assert {(each.ci_low, each.ci_high) for each in (*found.model_means.values(), *found.prompt_means.values())} == {
        (None, None)
    }


def test_planted_effects_come_back_in_the_marginal_means_with_their_intervals() -> None:
    inside = 0
    for seed in range(100):
        found = attributed(planted(NONE + np.array([[0], [1], [2], [3]]), seed=seed, n=10, scenario=1.0))
        estimate = list(found.model_means.values())[3]
        inside += known(estimate.ci_low) <= 13 <= known(estimate.ci_high)
    assert 0.88 <= inside / 100 <= 0.99


def test_persona_effects_show_as_a_part_of_the_scenarios() -> None:
    matrix = planted(NONE, scenario=0.1)
    moved = matrix.values + np.array([3.0 * (at % 8) for at in range(32)])[:, None]
    found = attributed(board(moved, PAIRS, matrix.personas))
    assert 0.9 * found.scenario.share < known(found.persona).share <= found.scenario.share
    assert p_of(found.persona) < 1e-6


def test_excluded_rows_are_named_in_the_shortest_form() -> None:
    matrix = planted(NONE)
    assert attributed(matrix).excluded == ()
    holes = matrix.values.copy()
    holes[0, [at for at, pair in enumerate(matrix.pairs) if pair.model == matrix.pairs[-1].model]] = NAN
    assert attributed(board(holes, matrix.pairs, matrix.personas)).excluded == (matrix.pairs[-1].model,)
    holes = matrix.values.copy()
    holes[0, [at for at, pair in enumerate(matrix.pairs) if pair.prompt == matrix.pairs[0].prompt]] = NAN
    assert attributed(board(holes, matrix.pairs, matrix.personas)).excluded == (matrix.pairs[0].prompt,)


def test_with_one_scenario_per_persona_there_is_no_persona_effect() -> None:
    matrix = planted(NONE, n=8)
    found = attributed(board(matrix.values, PAIRS))
    assert found.persona is None


def test_one_model_has_no_share_and_the_other_shares_sum_to_one() -> None:
    found = attributed(board(planted(NONE).values[:, :3], PAIRS[:3]))
    shares = found.shares()
    assert shares["model"] is None
    assert shares["interaction"] is None
    assert sum(share for share in shares.values() if share is not None) == pytest.approx(1)


def test_a_missing_pair_is_named_as_the_reason() -> None:
    found = attribute(board(planted(NONE).values[:, 1:], PAIRS[1:]))
    assert isinstance(found, Unknown)
    assert "a/v1" in found.reason


def test_an_incomplete_row_is_named_as_the_reason() -> None:
    values = planted(NONE).values.copy()
    values[3, 4] = np.nan
    found = attribute(board(values, PAIRS))
    assert isinstance(found, Unknown)
    assert "b/v2" in found.reason


def test_a_model_without_a_complete_row_is_excluded() -> None:
    values = planted(NONE).values.copy()
    values[3, 9:] = np.nan
    assert list(attributed(board(values, PAIRS)).model_means) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.ones((8, 12)), "equal"),
        (np.arange(12.0)[None, :], "two scenarios"),
        (np.full((8, 12), np.nan), "two complete rows"),
    ],
)
def test_too_little_data_is_unknown_with_the_reason(values: Floats, reason: str) -> None:
    found = attribute(board(values, PAIRS))
    assert isinstance(found, Unknown)
    assert reason in found.reason


def test_scores_without_noise_have_no_p() -> None:
    found = attributed(planted(PROMPT_V2, noise=0.0))
    assert known(found.prompt).p is None
    assert found.residual.share == pytest.approx(0, abs=1e-12)
