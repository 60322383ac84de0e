"""The rubric behind a board: floors at the one the scores were given under, flags that no other judge changed."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from support.judging import SeededStore, SheetDriver, fill, record_cells, three_tips
from tipbench.compare.answers import read_answers
from tipbench.compare.cells import BoardCells, CellFilter, find_rubric, read_board_cells, read_rubric
from tipbench.compare.leaderboard import read_leaderboard, scale_names
from tipbench.judge.export import ExportRequest
from tipbench.judge.rules import RulesJudge
from tipbench.judge.run import run_judge
from tipbench.judge.scores import SCORES, scores_text
from tipbench.plan.grid import PlannedCell
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunChange

TIPS = load_suite("tips").rubric
FLOORED = load_suite("tips").scenarios[0].id


def answer_except_once(cell: PlannedCell, rng: random.Random) -> str:
    return "Sorry, no." if cell.scenario.id == FLOORED else three_tips(cell, rng)


def new_driver() -> SheetDriver:
    store = SeededStore()
    return SheetDriver(store, record_cells(store, prompts="v1", write=answer_except_once))


def harder_suite(folder: Path) -> str:
    """`tips` with a rubric whose floor is higher."""
    with as_file(files("tipbench.suites").joinpath("tips")) as tips:
        shutil.copytree(tips, folder / "tips")
    rubric = folder / "tips" / "rubric.md"
    text = rubric.read_text("utf-8")
    rubric.write_text(text.replace("[floor]\nrelevance = 1", "[floor]\nrelevance = 2"), "utf-8")
    return str(folder / "tips")


def read_cells(driver: SheetDriver, **filters: object) -> BoardCells:
    return read_board_cells(driver.store, driver.experiment.experiment_id, CellFilter(**filters))  # type: ignore[arg-type]


def floor_scores(cells: BoardCells) -> set[float]:
    return {cell.values["composite"] for cell in cells.cells if cell.floored}


def test_floors_use_the_judges_rubric(tmp_path: Path) -> None:
    """After a provisional sheet under another rubric, stored floors may be those of the collect."""
    driver, folder = new_driver(), harder_suite(tmp_path)
    run_judge(driver.store, driver.experiment, RulesJudge(), ExportRequest(suite=folder))
    harder = load_suite(folder).rubric
    for run_id, run in driver.cells().items():  # either floor may be stored
        if run.tags.get("floored") == "true":
            change = {**TIPS.floor, "composite": TIPS.floor_composite}
            driver.store.update(run_id, RunChange(metrics=change, tags={"scores_rubric": TIPS.tag}, at_ms=1))
    found = read_cells(driver)
    assert (found.provisional, found.rubric) == (True, harder.tag)
    assert floor_scores(found) == {harder.floor_composite} == {TIPS.floor_composite + 1}
    assert {cell.values["relevance"] for cell in found.cells if cell.floored} == {2.0}


def test_one_experiment_may_have_judges_and_rules_of_two_rubrics(tmp_path: Path) -> None:
    """Neither board is refused, and each has its own floor."""
    driver, folder = new_driver(), harder_suite(tmp_path)
    driver.judge_as("anna")
    run_judge(driver.store, driver.experiment, RulesJudge(), ExportRequest(suite=folder))
    judged, provisional = read_cells(driver), read_cells(driver, provisional=True)
    assert (judged.rubric, floor_scores(judged)) == (TIPS.tag, {TIPS.floor_composite})
    assert provisional.rubric == load_suite(folder).rubric.tag
    assert floor_scores(provisional) == {TIPS.floor_composite + 1}


def test_a_rubric_is_found_with_a_scored_cell_or_with_a_sheet(tmp_path: Path) -> None:
    driver, folder = new_driver(), harder_suite(tmp_path)
    runs = list(driver.cells().values())
    harder = load_suite(folder).rubric

    def find(tag: str) -> object:
        return find_rubric(driver.store, driver.experiment.experiment_id, tag, runs)

    assert find(TIPS.tag) == TIPS
    assert find(harder.tag) is None
    driver.export("anna", suite=folder)
    assert find(harder.tag) == harder
    assert find("tip-v9@00") is None


def test_a_rubric_that_cannot_be_read_is_none() -> None:
    assert read_rubric(None) is None
    assert read_rubric("+++\nnonsense") is None


def test_scales_come_from_the_rubric_of_the_scores_or_from_the_collected_one() -> None:
    driver = new_driver()
    assert scale_names(driver.store, read_cells(driver)) == TIPS.scale_names
    driver.judge_as("anna")
    assert scale_names(driver.store, read_cells(driver)) == TIPS.scale_names


def contest_flags(driver: SheetDriver, judge: str, limit: int) -> None:
    """Judge every answer as ill-formed and overlong."""
    judging = driver.export(judge, limit=limit).stored
    raw = fill(judging)
    for item in raw["items"]:
        item["format_ok"] = False
        for tip in item["tips"]:
            tip["overlong"] = True
    driver.apply(raw)


@pytest.mark.parametrize("filters", [{"judge": "anna"}, {"provisional": True}, {}])
def test_flags_are_those_of_the_judge_or_computed(filters: dict[str, object]) -> None:
    driver = new_driver()
    contest_flags(driver, "ben", 6)
    if "judge" in filters:
        driver.judge_as("anna", overlap=0.0)
    else:
        run_judge(driver.store, driver.experiment, RulesJudge(), ExportRequest())
        for run_id in list(driver.cells())[::3]:  # as before the rules judged
            driver.store.update(run_id, RunChange(texts={SCORES: _without_provisional(driver, run_id)}, at_ms=1))
    leaderboard, cells = read_leaderboard(driver.store, driver.experiment, CellFilter(**filters))  # type: ignore[arg-type]
    assert leaderboard.provisional == ("judge" not in filters)
    assert any(not cell.values for cell in cells.cells)
    answered = [cell for cell in cells.cells if not cell.floored]
    assert {cell.metrics["format_ok"] for cell in answered} == {1.0}
    assert {cell.metrics["overlong"] for cell in answered} == {0.0}
    assert all(standing.means["overlong"] == 0.0 for standing in leaderboard.standings)
    by_scenario = read_answers(driver.store, driver.experiment, leaderboard, cells)
    assert all(answer.format_ok for scenario in by_scenario for answer in scenario.answers if answer.tips)


def _without_provisional(driver: SheetDriver, run_id: str) -> str:
    return scores_text(replace(driver.scores()[run_id], provisional={}))
