"""The answers behind a board: the cells that count, their tips, and the scores that made the composite."""

from __future__ import annotations

from statistics import fmean

import pytest

from support.boards import SCALES
from support.judging import MODELS, SeededStore, SheetDriver, record_cells
from tipbench.compare.answers import Answer, ScenarioAnswers, read_answers
from tipbench.compare.cells import CellFilter, read_board_cells
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.plan.suite import load_suite


@pytest.fixture(scope="module")
def driver() -> SheetDriver:
    """Two models in three scenarios, judged by two people."""
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, prompts="v1", n_scenarios=3))
    driver.judge_as("anna")
    driver.judge_as("ben", seed=2, everything=True)
    return driver


def read(driver: SheetDriver, cell_filter: CellFilter | None = None) -> tuple[Leaderboard, tuple[ScenarioAnswers, ...]]:
    cell_filter = cell_filter or CellFilter()
    cells = read_board_cells(driver.store, driver.experiment.experiment_id, cell_filter)
    board = make_board(driver.experiment.name, cells, BoardOptions(scales=SCALES))
    return board, read_answers(driver.store, driver.experiment, board, cells)


def all_answers(found: tuple[ScenarioAnswers, ...]) -> list[Answer]:
    return [answer for scenario in found for answer in scenario.answers]


def test_every_scenario_has_its_card_and_every_pair_in_the_boards_order(driver: SheetDriver) -> None:
    board, found = read(driver)
    cards = {scenario.id: scenario.to_card() for scenario in load_suite("tips").scenarios}
    assert [each.scenario for each in found] == list(board.matrix.scenarios)
    for each in found:
        assert each.card == cards[each.scenario]
        assert [answer.pair for answer in each.answers] == [standing.pair for standing in board.standings]


@pytest.mark.parametrize("judge", [None, "anna", "ben"])
def test_the_scores_shown_make_the_composite_shown(driver: SheetDriver, judge: str | None) -> None:
    _, found = read(driver, CellFilter(judge=judge))
    for answer in all_answers(found):
        assert len(answer.tips) == 3
        scales = sum(fmean(tip.scores[name] for tip in answer.tips) for name in SCALES)
        assert answer.composite == pytest.approx(scales + 2)
        assert answer.format_ok


def test_one_judges_board_shows_that_judges_scores(driver: SheetDriver) -> None:
    scores = driver.scores()
    _, found = read(driver, CellFilter(judge="ben"))
    given = {tuple(tip.scores.values()) for answer in all_answers(found) for tip in answer.tips}
    own = {tuple(map(float, tip.scores.values())) for cell in scores.values() for tip in cell.applied["ben"].tips}
    assert given == own


def test_the_filter_of_the_board_is_the_filter_of_its_answers(driver: SheetDriver) -> None:
    _, found = read(driver, CellFilter(where={"params.model": MODELS[0]}))
    assert {answer.pair.model for answer in all_answers(found)} == {MODELS[0]}


def test_pending_answers_have_no_scores() -> None:
    store = SeededStore()
    _, found = read(SheetDriver(store, record_cells(store, prompts="v1", n_scenarios=1)))
    for answer in all_answers(found):
        assert answer.state == "pending"
        assert answer.composite is None
        assert all(tip.scores == {} and tip.overlong is None for tip in answer.tips)


def test_without_the_suite_answers_are_shown_without_cards() -> None:
    store = SeededStore()
    driver = SheetDriver(store, record_cells(store, prompts="v1", n_scenarios=1))
    for kept in driver.cells().values():
        kept.params["suite"] = "somebody-elses"  # type: ignore[index]
    _, found = read(driver)
    assert [each.card for each in found] == [None]
    assert all_answers(found)
