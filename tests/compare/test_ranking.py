import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import board, known, named, verdict, world

from tipbench.compare.matrix import Pair, Score, ScoreMatrix, score_matrix
from tipbench.compare.ranking import Look, PairResult, Ranking, RankOptions, rank
from tipbench.plan.design import make_design

NAN = np.nan
THIRD = np.array([False, False, True])


def by_pair(ranking: Ranking) -> dict[Pair, PairResult]:
    return {row.pair: row for row in ranking.rows}


def test_a_clear_leader_is_decided() -> None:
    found = rank(board(world(np.random.default_rng(0), [0, 0, 9, 0], 8)))
    assert found.leader == named(4)[2]
    assert found.decided
    assert found.tied == ()
    assert found.units_needed is None
    assert (found.rows[0].rank, found.rows[0].rank_low, found.rows[0].rank_high) == (1, 1, 1)


def test_similar_rows_are_tied_with_the_needed_scenarios() -> None:
    found = rank(board(world(np.random.default_rng(12), [0, 0.5, -9], 8)))
    assert len(found.tied) == 1
    assert not found.decided
    assert known(found.units_needed) > 8
    assert found.smallest_detectable is not None


@pytest.mark.parametrize("n", [1, 5])
def test_with_too_few_scenarios_nothing_is_decided_for_any_scores(n: int) -> None:
    found = rank(board(np.array([[2.0, 17.0]] * n)))
    assert not found.decided
    assert found.too_few_units
    assert found.tied == (named(2)[0],)
    assert [(row.rank_low, row.rank_high) for row in found.rows] == [(1, 2), (1, 2)]


def test_identical_rows_share_their_rank_and_are_tied() -> None:
    same = np.random.default_rng(3).normal(size=(8, 1))
    found = rank(board(np.hstack([same, same, same])))
    assert [row.rank for row in found.rows] == [1, 1, 1]
    assert len(found.tied) == 2
    assert found.units_needed is None
    np.testing.assert_allclose([row.p_best for row in found.rows], 1 / 3)  # type: ignore[arg-type]


def test_incomplete_rows_are_last_without_rank_and_change_no_other() -> None:
    values = world(np.random.default_rng(4), [0, 5, 20], 8)
    values[4:, 2] = NAN
    found, without = rank(board(values)), rank(board(values[:, :2]))
    last = found.rows[-1]
    assert last.pair == named(3)[2]
    assert (last.is_ranked, last.rank, last.rank_low, last.rank_high, last.p_best) == (False, None, None, None, None)
    assert (known(last.to_leader).n, known(last.to_leader).p) == (4, None)
    assert found.rows[:2] == without.rows
    assert (found.leader, without.tied, found.tied) == (without.leader, (), (last.pair,)), "it may still be best"
    assert without.decided
    assert not found.decided


def test_row_without_a_single_answer_does_not_forbid_a_decision() -> None:
    values = world(np.random.default_rng(4), [0, 9, 0], 8)
    values[:, 2] = NAN
    assert not rank(board(values)).decided
    assert rank(board(values), RankOptions(silent=frozenset({named(3)[2]}))).decided


def test_row_with_gaps_is_ranked_from_six_shared_scenarios_on() -> None:
    values = world(np.random.default_rng(14), [0, 9, 0], 8)
    values[:2, 0] = NAN
    found = by_pair(rank(board(values)))
    assert found[named(3)[0]].is_ranked
    assert found[named(3)[0]].is_adjusted
    assert not found[named(3)[1]].is_adjusted
    values[2, 0] = NAN
    assert not by_pair(rank(board(values)))[named(3)[0]].is_ranked


def test_decided_leader_is_first_with_certainty_and_no_other_row_can_be() -> None:
    rng = np.random.default_rng(15)
    decided = [found for found in (rank(board(world(rng, [0] * 7 + [3], 8))) for _ in range(25)) if found.decided]
    assert len(decided) > 5
    for found in decided:
        assert (found.rows[0].rank, found.rows[0].rank_low, found.rows[0].rank_high) == (1, 1, 1)
        assert all(row.rank_low is not None and row.rank_low >= 2 for row in found.rows[1:])


def planned(n_planned: int = 32) -> RankOptions:
    return RankOptions(design=make_design(f"s{at:03}" for at in range(n_planned)), n_flips=999, n_resamples=99)


def test_tests_use_the_scenarios_and_the_level_of_the_latest_look() -> None:
    values = world(np.random.default_rng(16), [0, 3.7, 4], 20)
    found = rank(board(values), planned())
    assert (found.look, found.level, found.n_tested, found.n_units) == (Look(2, 4, 16), 0.0182, 16, 20)
    at_the_look = rank(board(values[:16]), planned())
    assert [row.to_leader for row in found.rows] == [row.to_leader for row in at_the_look.rows]
    next_look = known(found.next_look)
    assert next_look.look == Look(3, 4, 24)
    assert 0 <= known(next_look.power) <= 1
    assert known(found.rows[0].estimate).n == 20, "means use everything judged"


def test_before_the_first_look_nothing_is_decided_and_all_rows_are_tied() -> None:
    found = rank(board(world(np.random.default_rng(17), [0, 0, 50], 7)), planned())
    assert (found.look, found.level, found.decided, len(found.tied)) == (None, 0.0182, False, 2)
    assert known(found.next_look).look == Look(1, 4, 8)
    difference = known(found.rows[1].to_leader)
    assert (difference.p, difference.ci_low, difference.ci_high) == (None, None, None)


def test_look_is_not_reached_while_a_ranked_row_has_too_few_scenarios_to_be_separated() -> None:
    values = world(np.random.default_rng(18), [0, 0, 50], 8)
    assert rank(board(values), planned()).decided
    values[:2, 0] = NAN
    assert rank(board(values), planned()).look is None, "six of eight cannot reach 0.0182"
    assert rank(board(values), planned(8)).decided, "six of eight are enough for a single look"


def test_scenario_without_a_waiting_answer_counts_for_a_look_even_if_few_rows_have_it() -> None:
    values = world(np.random.default_rng(19), [0, 0, 50], 8)
    values[7, :2] = NAN
    assert rank(board(values), planned()).look is None
    finished = RankOptions(design=planned().design, finished_scenarios=frozenset({"s007"}))
    assert rank(board(values), finished).look == Look(1, 4, 8)


def test_references_are_tested_against_the_leader_and_never_ranked() -> None:
    matrix = board(world(np.random.default_rng(20), [0, 5, 0], 8))
    candidates, reference = matrix.select(~THIRD), matrix.select(THIRD)
    found = rank(candidates, None, reference)
    assert [row.pair for row in found.references] == list(reference.pairs)
    assert found.beats_reference
    assert known(found.to_reference).mean == pytest.approx(-known(found.references[0].to_leader).mean)
    assert {row.pair for row in found.rows} == set(candidates.pairs)
    alone = rank(candidates)
    assert (alone.beats_reference, alone.to_reference) == (None, None)
    assert alone.rows == found.rows


def test_reference_can_be_the_baseline() -> None:
    matrix = board(world(np.random.default_rng(21), [0, 5, 0], 8))
    found = rank(matrix.select(~THIRD), RankOptions(baseline=named(3)[2]), matrix.select(THIRD))
    assert known(found.rows[0].to_baseline).separated


def test_extra_scenarios_of_the_top_rows_count_for_their_order_and_separation() -> None:
    rng = np.random.default_rng(5)
    values = world(rng, [3, 3.2, 0, 0, 0], 8)
    values[:, 0] += 0.5 + values[:, 1].mean() - values[:, 0].mean()
    extra = np.full((24, 5), NAN)
    extra[:, :2] = world(rng, [0, 4], 24)
    found = rank(board(np.vstack([values, extra])))
    assert rank(board(values)).leader == named(5)[0]
    assert found.leader == named(5)[1]
    rows = by_pair(found)
    assert all(row.is_ranked for row in found.rows)
    difference = known(rows[named(5)[0]].to_leader)
    assert difference.n == 32
    assert difference.separated
    assert known(rows[named(5)[1]].p_best) > 0.99


def test_a_baseline_takes_the_place_of_the_leader() -> None:
    baseline = named(3)[0]
    found = by_pair(rank(board(world(np.random.default_rng(6), [0, 6, 0], 10)), RankOptions(baseline=baseline)))
    assert found[baseline].to_baseline is None
    better = known(found[named(3)[1]].to_baseline)
    assert better.mean > 0
    assert better.separated


matrices = (
    st.integers(1, 5)
    .flatmap(
        lambda k: st.lists(
            st.lists(st.one_of(st.just(NAN), st.integers(8, 68).map(lambda step: step / 4)), min_size=k, max_size=k),
            min_size=1,
            max_size=9,
        )
    )
    .map(lambda rows: board(np.array(rows, dtype=float)))
)


@settings(max_examples=20)
@given(matrices)
def test_every_board_is_consistent(matrix: ScoreMatrix) -> None:
    found = rank(matrix, RankOptions(n_flips=199, n_resamples=200))
    complete = [row for row in found.rows if row.is_ranked]
    assert {row.pair for row in found.rows} == set(matrix.pairs)
    assert [row.is_ranked for row in found.rows] == sorted((row.is_ranked for row in found.rows), reverse=True)
    assert found.leader == (complete[0].pair if complete else None)
    for row in complete:
        assert 1 <= known(row.rank_low) <= known(row.rank_high) <= len(complete)
    chances = [row.p_best for row in complete if row.p_best is not None]
    assert not chances or sum(chances) == pytest.approx(1)
    if found.decided:
        assert not found.tied
        assert len(complete) >= 2


@settings(max_examples=20)
@given(st.permutations(range(6)), st.permutations(range(14)))
def test_the_order_of_rows_and_scenarios_changes_nothing(columns: list[int], rows: list[int]) -> None:
    values, pairs = world(np.random.default_rng(7), [0, 0, 1, 2, 2, 5], 14), named(6)
    scores = [Score(pairs[column], f"s{row:02}", "p", values[row, column]) for row in rows for column in columns]
    plain = rank(board(values, pairs), RankOptions(n_flips=500, n_resamples=500))
    assert rank(score_matrix(scores), RankOptions(n_flips=500, n_resamples=500)) == plain


def test_the_same_data_give_the_same_board_every_time() -> None:
    values = world(np.random.default_rng(8), np.linspace(0, 3, 12), 32)
    assert rank(board(values)) == rank(board(values.copy()))


def test_the_short_verdict_of_the_simulations_is_that_of_the_board() -> None:
    rng = np.random.default_rng(9)
    for lead in (0.0, 1.0, 2.0, 3.0, 5.0):
        values = world(rng, [0] * 7 + [lead], 10)
        found = rank(board(values), RankOptions(n_resamples=10))
        decided, top = verdict(values, n_flips=10_000)
        assert found.decided == decided
        assert {found.leader, *found.tied} == {named(8)[at] for at in top}


def test_scenarios_needed_are_named_only_within_reach() -> None:
    rng = np.random.default_rng(22)
    open_boards = [found for found in (rank(board(world(rng, [0, 1.3], 16))) for _ in range(40)) if not found.decided]
    named_ones = [found.units_needed for found in open_boards if found.units_needed is not None]
    assert named_ones
    assert all(16 < needed <= 160 for needed in named_ones)
    equal = [rank(board(world(rng, [0, 0], 16))) for _ in range(60)]
    assert sum(found.units_needed is not None for found in equal) <= 9
