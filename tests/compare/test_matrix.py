from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import matrix_of

from tipbench.compare.matrix import Pair, Score, parse_pair, score_matrix

A, B, C = Pair("a", "v1"), Pair("b", "v1"), Pair("c", "v1")
NAN = np.nan

scores = st.lists(
    st.builds(
        lambda pair, at, value: Score(pair, f"p{at % 3}@s{at}", f"p{at % 3}", value),
        st.sampled_from([A, B, C]),
        st.integers(0, 6),
        st.integers(0, 60).map(lambda step: 2 + step / 4),
    ),
    max_size=40,
)


def score(pair: Pair, scenario: str, value: float, persona: str = "p") -> Score:
    return Score(pair, scenario, persona, value)


def test_repeats_are_averaged_within_pair_and_scenario() -> None:
    matrix = score_matrix([score(A, "x", 10), score(A, "x", 12), score(B, "x", 7), score(A, "y", 3)])
    assert matrix.values[:, 0].tolist() == [11, 3]
    assert matrix.values[0, 1] == 7
    assert np.isnan(matrix.values[1, 1])


@settings(max_examples=20)
@given(scores, st.randoms())
def test_the_order_in_which_scores_are_read_changes_nothing(found: list[Score], random: Random) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)
    first, second = score_matrix(found), score_matrix(shuffled)
    assert (first.pairs, first.scenarios, first.personas) == (second.pairs, second.scenarios, second.personas)
    np.testing.assert_array_equal(first.values, second.values)


@settings(max_examples=20)
@given(scores)
def test_scores_that_are_given_twice_change_nothing(found: list[Score]) -> None:
    np.testing.assert_array_equal(score_matrix(found).values, score_matrix(found + found).values)


def test_an_unjudged_pair_is_a_row() -> None:
    matrix = score_matrix([score(A, "x", 10)], pairs=[B])
    assert matrix.pairs == (A, B)
    assert matrix.complete.tolist() == [True, False]


def test_a_score_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        score_matrix([score(A, "x", NAN)])


def test_a_scenario_with_two_personas_is_refused() -> None:
    with pytest.raises(ValueError, match="one persona"):
        score_matrix([score(A, "x", 1), score(B, "x", 1, persona="q")])


def test_a_row_is_complete_when_judged_wherever_half_of_the_rows_are() -> None:
    matrix = matrix_of(np.array([[1, 1, 1, 1], [1, 1, NAN, NAN], [1, NAN, NAN, NAN]], dtype=float))
    assert matrix.core.tolist() == [True, True, False]
    assert matrix.complete.tolist() == [True, True, False, False]


def test_without_a_scenario_shared_by_half_of_the_rows_no_row_is_complete() -> None:
    matrix = matrix_of(np.array([[1, NAN, NAN], [NAN, 1, NAN], [NAN, NAN, 1]]))
    assert not matrix.complete.any()


def test_an_empty_matrix_has_no_complete_row() -> None:
    matrix = score_matrix([])
    assert matrix.values.shape == (0, 0)
    assert not matrix.complete.any()
    assert matrix.averaged_by_persona().values.shape == (0, 0)


def test_select_drops_the_scenarios_that_are_left_without_a_number() -> None:
    matrix = matrix_of(np.array([[1, 2, 3], [NAN, NAN, 4]])).select(np.array([True, True, False]))
    assert matrix.scenarios == ("s000",)
    assert matrix.values.tolist() == [[1, 2]]


def test_means_per_persona_have_one_row_for_each_persona() -> None:
    matrix = matrix_of(np.array([[1.0, 2], [3, 4], [10, 20]]), personas=["p", "p", "q"]).averaged_by_persona()
    assert matrix.scenarios == ("p", "q")
    assert matrix.values.tolist() == [[2, 3], [10, 20]]


def test_a_persona_mean_is_unknown_where_a_core_scenario_is_missing() -> None:
    matrix = matrix_of(
        np.array([[1.0, 2, 5], [3, 4, NAN], [10, 20, 30]]), personas=["p", "p", "q"]
    ).averaged_by_persona()
    assert np.isnan(matrix.values[0, 2])
    assert matrix.values[0, :2].tolist() == [2, 3]


def test_means_per_model_use_the_prompts_that_every_model_has() -> None:
    pairs = (Pair("a", "v1"), Pair("a", "v2"), Pair("b", "v1"), Pair("b", "v2"), Pair("b", "v3"))
    matrix = matrix_of(np.array([[1.0, 3, 5, 7, 100], [2, NAN, 6, 8, 100]]), pairs).averaged_by("model")
    assert [str(pair) for pair in matrix.pairs] == ["a/*", "b/*"]
    assert matrix.values[0].tolist() == [2, 6]
    assert np.isnan(matrix.values[1, 0])
    assert matrix.values[1, 1] == 7


def test_prompts_without_a_common_model_have_no_means() -> None:
    pairs = (Pair("a", "v1"), Pair("b", "v2"))
    assert np.isnan(matrix_of(np.ones((2, 2)), pairs).averaged_by("prompt").values).all()


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("qwen2.5:0.5b/v1", Pair("qwen2.5:0.5b", "v1")),
        ("hf.co/org/name/v2-mentor", Pair("hf.co/org/name", "v2-mentor")),
        ("v1", None),
        ("/v1", None),
        ("a/", None),
    ],
)
def test_a_pair_is_split_at_the_last_slash(text: str, pair: Pair | None) -> None:
    assert parse_pair(text) == pair
    if pair:
        assert str(pair) == text
