"""The verdict in words: it names who leads, who ties, and what it would take; never that somebody is worse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import board as matrix_of
from worlds import named, world

from support.judged import scored
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import rank
from tipbench.compare.verdict import verdict_text

A, B, C, D, E, F = (Pair(f"{letter}:1b", "v1") for letter in "abcdef")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
NEAR = [value + (0.6 if at % 2 else -0.4) for at, value in enumerate(LOW)]
HIGH = [value + 4 + (0.25 if at % 2 else -0.25) for at, value in enumerate(LOW)]

Columns = Mapping[Pair, Sequence[float | None]]


def made(columns: Columns) -> Leaderboard:
    return make_board("tip-bench-test", scored(columns), BoardOptions())


def verdict(columns: Columns) -> str:
    return made(columns).verdict


def test_a_decided_board_names_its_leader_and_how_many_scenarios_it_rests_on() -> None:
    said = verdict({A: LOW, B: HIGH})
    assert said.startswith("b:1b/v1 leads over 8 scenarios")
    assert "not clearly different" not in said
    assert "would decide" not in said


def test_a_tie_is_said_with_names_and_what_it_would_take() -> None:
    found = made({A: LOW, B: NEAR})
    assert found.verdict.startswith("b:1b/v1 leads over 8 scenarios, but is not clearly different from a:1b/v1.")
    assert f"about {found.ranking.scenarios_needed} scenarios would decide" in found.verdict


def test_a_long_tie_is_cut_and_counted() -> None:
    turns = {pair: [LOW[at] + (at + place) % 5 / 4 for at in range(8)] for place, pair in enumerate((A, B, C, D, E, F))}
    said = verdict(turns)
    assert "and 2 more" in said
    assert said.count(":1b/v1") <= 5


def test_under_six_scenarios_it_says_that_nothing_can_be_decided() -> None:
    said = verdict({A: LOW[:4], B: HIGH[:4]})
    assert "Too few scenarios: 4; at least 6 needed." in said


def test_identical_rows_need_nobody_knows_how_many_scenarios() -> None:
    said = verdict({A: LOW, B: LOW})
    assert said.startswith("a:1b/v1 and b:1b/v1 share the lead over 8 scenarios")
    assert "The number of scenarios needed cannot be estimated" in said


def test_one_row_has_nothing_to_be_compared_with() -> None:
    assert "nothing to compare it with" in verdict({A: LOW})


def test_without_a_score_it_says_that_nobody_has_judged() -> None:
    assert verdict({A: [None] * 8, B: [None] * 8}).startswith("Not judged yet: 2 pairs without scores.")


def test_without_a_complete_row_it_says_what_is_missing() -> None:
    holes: Columns = {
        pair: [None if at == hole else value for at, value in enumerate(LOW)] for hole, pair in enumerate((A, B, C))
    }
    said = verdict(holes)
    assert said.startswith("No pair is judged in all of the 8 scenarios")
    assert said.endswith("a:1b/v1 has most and lacks p0@s0.")


def test_where_hardly_anything_is_judged_it_says_so_without_counting_none() -> None:
    said = verdict({A: [9.0, *[None] * 7], B: [None] * 8, C: [None] * 8})
    assert said == "No scenario is judged for half of the 3 pairs: p0@s0 has most and lacks b:1b/v1 and c:1b/v1."


def test_an_empty_board_is_said_to_be_empty() -> None:
    assert verdict_text(rank(matrix_of(np.empty((0, 0)), personas=()))) == "Nothing is recorded yet."


def test_a_row_that_is_not_ranked_but_ahead_is_pointed_at() -> None:
    partly: list[float | None] = [17.0, 17.0, *[None] * 6]
    said = verdict({A: LOW, B: HIGH, C: partly})
    assert said.startswith("b:1b/v1 leads")
    assert said.endswith("ahead where judged: c:1b/v1.")
    behind: list[float | None] = [3.0, 3.0, *[None] * 6]
    assert "c:1b/v1" not in verdict({A: LOW, B: HIGH, C: behind})


def test_clusters_are_called_what_they_are() -> None:
    found = make_board("tip-bench-test", scored({A: LOW, B: NEAR}), BoardOptions(cluster="persona"))
    assert "leads over 4 personas" in found.verdict
    assert "scenarios" not in found.verdict


def test_the_winner_of_duels_stands_beside_and_changes_nothing() -> None:
    ranking = made({A: LOW, B: NEAR}).ranking
    plain = verdict_text(ranking)
    duels = [Duel(A, B, f"s{at}", "first") for at in range(8)] + [Duel(B, A, f"s{at}", "second") for at in range(8)]
    won = verdict_text(ranking, duel_table(duels))
    assert won.startswith(plain)
    assert "a:1b/v1 wins the duels between the tied rows; duels do not change ranks." in won
    even = [Duel(A, B, f"s{at}", "tie") for at in range(8)]
    assert verdict_text(ranking, duel_table(even)) == plain


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 14), st.integers(1, 6), st.floats(0, 6), st.floats(0, 0.4))
def test_every_verdict_is_whole_sentences_that_keep_to_the_ranking(
    seed: int, n: int, k: int, lead: float, missing: float
) -> None:
    rng = np.random.default_rng(seed)
    values = world(rng, [0.0] * (k - 1) + [lead], n)
    values[rng.random(values.shape) < missing] = np.nan
    ranking = rank(matrix_of(values), flips=199, resamples=50)
    said = verdict_text(ranking)
    assert said[0].isalnum()
    assert said.endswith(".")
    for word in ("nan", "None,", "best", "winner"):
        assert word not in said
    if ranking.leader is not None:
        assert said.startswith(str(ranking.leader))
    for pair in ranking.tied[:3]:
        assert str(pair) in said
    assert ("not clearly different" in said) == bool(ranking.tied)
    if ranking.decided:
        assert "would decide" not in said


@pytest.mark.parametrize("n", [6, 32])
def test_a_large_planted_lead_is_said_to_be_separated(n: int) -> None:
    values = world(np.random.default_rng(n), [0, 0, 30], n)
    ranking = rank(matrix_of(values))
    assert ranking.decided
    assert verdict_text(ranking).startswith(f"{named(3)[2]} leads over {n} scenarios")
