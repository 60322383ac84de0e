from collections.abc import Iterable
from itertools import combinations
from math import log
from random import Random
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known

from tipbench.compare.duels import Duel, DuelTable, duel_table
from tipbench.compare.matrix import Pair
from tipbench.compare.statistics import Unknown

A, B, C, D = (Pair(name, "v1") for name in "abcd")
Winner = Literal["first", "second", "tie"]


def both_orders(left: Pair, right: Pair, scenario: int, outcome: Winner) -> list[Duel]:
    swapped: dict[Winner, Winner] = {"first": "second", "second": "first", "tie": "tie"}
    return [Duel(left, right, f"s{scenario}", outcome), Duel(right, left, f"s{scenario}", swapped[outcome])]


def match(left: Pair, right: Pair, wins: int, n: int) -> list[Duel]:
    """`left` wins `wins` of n scenarios, in both orders."""
    return [duel for at in range(n) for duel in both_orders(left, right, at, "first" if at < wins else "second")]


def table(duels: Iterable[Duel]) -> DuelTable:
    found = duel_table(list(duels))
    assert isinstance(found, DuelTable)
    return found


def played(rng: np.random.Generator, strengths: dict[Pair, float], n: int, spread: float = 0.0) -> list[Duel]:
    """A round robin in both orders; `spread` makes the answers of a row better or worse from scenario to scenario."""
    duels = []
    for scenario in range(n):
        form = {pair: strength + spread * rng.normal() for pair, strength in strengths.items()}
        for left, right in combinations(strengths, 2):
            for first, second in ((left, right), (right, left)):
                won = rng.random() < 1 / (1 + np.exp(form[second] - form[first]))
                duels.append(Duel(first, second, f"s{scenario}", "first" if won else "second"))
    return duels


@pytest.mark.parametrize(("wins", "n"), [(8, 8), (5, 8)])
def test_two_rows_have_the_log_odds_with_half_a_win_added_to_each(wins: int, n: int) -> None:
    found = table(match(A, B, wins, n))
    assert known(found.standings[1].behind_top).value == pytest.approx(log((2 * wins + 0.5) / (2 * (n - wins) + 0.5)))


def test_a_clean_sweep_of_six_scenarios_wins_and_of_five_does_not() -> None:
    assert table(match(A, B, 6, 6)).winner == A
    assert table(match(A, B, 5, 5)).winner is None


def test_both_orders_are_two_observations() -> None:
    once = [Duel(A, B, f"s{at}", "first" if at % 4 else "second") for at in range(16)]
    twice = [*once, *(Duel(B, A, duel.scenario, "second" if at % 5 else "first") for at, duel in enumerate(once))]
    widths = []
    for duels in (once, twice):
        behind = known(table(duels).standings[1].behind_top)
        widths.append((behind.ci_high or 0.0) - (behind.ci_low or 0.0))
    assert widths[1] < 0.8 * widths[0]


@pytest.mark.simulation
@pytest.mark.parametrize(("n", "spread"), [(6, 30.0), (8, 1.0)])
def test_orders_decided_alike_give_no_more_false_winners(n: int, spread: float) -> None:
    """With a large spread both orders have the same result, so that they are one observation in truth."""
    rng = np.random.default_rng(5)
    won = sum(table(played(rng, {A: 0.0, B: 0.0}, n, spread)).winner is not None for _ in range(200))
    assert won <= 0.06 * 200 + 2 * (200 * 0.06 * 0.94) ** 0.5


def test_a_draw_has_no_winner_and_an_interval_around_zero() -> None:
    found = table(match(A, B, 4, 8))
    assert found.winner is None
    behind = known(found.standings[1].behind_top)
    assert known(behind.ci_low) < 0 < known(behind.ci_high)
    assert behind.ci_low == pytest.approx(-known(behind.ci_high))


def test_a_tie_is_half_a_win_for_each() -> None:
    ties = [duel for at in range(6) for duel in both_orders(A, B, at, "tie")]
    found = table(ties)
    assert [row.points for row in found.standings] == [6.0, 6.0]
    assert found.standings[0].strength.value == pytest.approx(0)


def test_a_judge_who_always_takes_the_first_gives_no_winner_and_is_reported() -> None:
    found = table(Duel(one, other, f"s{at}", "first") for at in range(12) for one, other in ((A, B), (B, A)))
    assert found.first_share == 1.0
    assert found.winner is None
    assert found.standings[0].strength.value == pytest.approx(0)


def test_more_judges_of_the_same_scenarios_are_not_more_scenarios() -> None:
    one, five = table(match(A, B, 5, 6)), table(match(A, B, 5, 6) * 5)
    assert five.standings[0].strength == one.standings[0].strength
    assert five.n_scenarios == one.n_scenarios == 6


@pytest.mark.parametrize("n", [1, 5])
def test_below_six_scenarios_strengths_have_no_interval_and_no_winner(n: int) -> None:
    found = table(match(A, B, n, n))
    assert found.winner is None
    assert found.standings[0].strength.value > 0
    assert found.standings[0].strength.ci_low is None


def test_rows_without_connecting_duels_are_unknown_and_named() -> None:
    found = duel_table(match(A, B, 3, 6) + match(C, D, 3, 6))
    assert isinstance(found, Unknown)
    assert "c/v1" in found.reason


def test_rows_connected_through_a_third_are_compared() -> None:
    found = table(match(A, B, 15, 16) + match(B, C, 15, 16))
    assert [row.pair for row in found.standings] == [A, B, C]


def test_no_duels_are_unknown() -> None:
    assert isinstance(duel_table([]), Unknown)


def test_strengths_agree_with_a_logistic_regression_when_there_is_much_data() -> None:
    from statsmodels.api import GLM, families

    duels = played(np.random.default_rng(0), {A: 1.0, B: 0.3, C: -1.3}, 1200)
    rows = [[(duel.first == pair) - (duel.second == pair) for pair in (A, B)] for duel in duels]
    won = [duel.winner == "first" for duel in duels]
    fitted = GLM(np.array(won, dtype=float), np.array(rows, dtype=float), family=families.Binomial()).fit().params
    found = {row.pair: row.strength.value for row in table(duels).standings}
    assert [found[A] - found[C], found[B] - found[C]] == pytest.approx(list(fitted), abs=8e-3)


outcomes = st.lists(
    st.tuples(
        st.sampled_from(list(combinations((A, B, C), 2))),
        st.integers(0, 5),
        st.sampled_from(["first", "second", "tie"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=20)
@given(outcomes)
def test_intervals_hold_their_value_and_only_a_separated_top_wins(
    found: list[tuple[tuple[Pair, Pair], int, Winner]],
) -> None:
    duels = [duel for (left, right), at, winner in found for duel in both_orders(left, right, at, winner)]
    ranked = duel_table(duels)
    if isinstance(ranked, Unknown):
        return
    strengths = [row.strength.value for row in ranked.standings]
    assert sum(strengths) == pytest.approx(0, abs=1e-6)
    assert strengths == sorted(strengths, reverse=True) or min(np.diff(strengths)) < 1e-8
    for row in ranked.standings:
        assert row.strength.ci_low is None or row.strength.ci_low <= row.strength.value
        assert row.strength.ci_high is None or row.strength.ci_high >= row.strength.value
    assert ranked.winner in (None, ranked.standings[0].pair)


@settings(max_examples=5)
@given(st.randoms())
def test_the_order_of_duels_changes_nothing(random: Random) -> None:
    duels = played(np.random.default_rng(1), {A: 0.5, B: 0.0, C: 0.0}, 8)
    shuffled = list(duels)
    random.shuffle(shuffled)
    assert table(shuffled) == table(duels)


@pytest.mark.simulation
def test_equal_rows_have_a_winner_in_at_most_one_table_of_twenty() -> None:
    rng = np.random.default_rng(2)
    winners = sum(table(played(rng, {A: 0.0, B: 0.0}, 12, 2.0)).winner is not None for _ in range(150))
    assert winners / 150 <= 0.07


@pytest.mark.simulation
def test_two_equal_rows_above_a_third_have_a_winner_in_at_most_one_table_of_twenty() -> None:
    rng = np.random.default_rng(3)
    winners = sum(table(played(rng, {A: 0.0, B: 0.0, C: -4.0}, 12, 1.5)).winner is not None for _ in range(60))
    assert winners / 60 <= 0.10


@pytest.mark.simulation
def test_a_clearly_stronger_row_wins_as_a_rule() -> None:
    rng = np.random.default_rng(4)
    winners = [table(played(rng, {A: 3.0, B: 0.0, C: 0.0}, 16)).winner for _ in range(20)]
    assert winners.count(A) >= 18


@pytest.mark.simulation
def test_intervals_of_differences_cover_the_truth() -> None:
    rng, inside = np.random.default_rng(5), 0
    for _ in range(100):
        rows = {row.pair: row for row in table(played(rng, {A: 0.6, B: -0.6}, 24)).standings}
        strength = rows[A].strength
        inside += known(strength.ci_low) <= 0.6 <= known(strength.ci_high)
    assert inside / 100 >= 0.92


def test_there_is_no_winner_while_a_row_of_the_group_has_no_duels() -> None:
    duels = match(A, B, 8, 8)
    assert table(duels).winner == A
    found = duel_table(duels, {A, B, C})
    assert isinstance(found, DuelTable)
    assert (found.winner, found.absent) == (None, (C,))
