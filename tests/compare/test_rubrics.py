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


def sometimes_nothing(cell: PlannedCell, rng: random.Random) -> str:
    return "Sorry, no." if cell.scenario.id == FLOORED else three_tips(cell, rng)


def driver() -> SheetDriver:
    store = SeededStore()
    return SheetDriver(store, record_cells(store, prompts="v1", write=sometimes_nothing))


def harder_suite(folder: Path) -> str:
    """`tips` with a rubric whose floor is higher."""
    with as_file(files("tipbench.suites").joinpath("tips")) as tips:
        shutil.copytree(tips, folder / "tips")
    rubric = folder / "tips" / "rubric.md"
    text = rubric.read_text("utf-8")
    rubric.write_text(text.replace("[floor]\nrelevance = 1", "[floor]\nrelevance = 2"), "utf-8")
    return str(folder / "tips")


def board(at: SheetDriver, **filters: object) -> BoardCells:
    return read_board_cells(at.store, at.experiment.experiment_id, CellFilter(**filters))  # type: ignore[arg-type]


def floors(cells: BoardCells) -> set[float]:
    return {cell.values["composite"] for cell in cells.cells if cell.floored}


def test_floors_use_the_judges_rubric(tmp_path: Path) -> None:
    """As a provisional sheet under another rubric leaves them: scored anew, floors as collected."""
    at, folder = driver(), harder_suite(tmp_path)
    run_judge(at.store, at.experiment, RulesJudge(), ExportRequest(suite=folder))
    harder = load_suite(folder).rubric
    for run_id, run in at.cells().items():  # whichever floor judging leaves behind
        if run.tags.get("floored") == "true":
            change = {**TIPS.floor, "composite": TIPS.floor_composite}
            at.store.update(run_id, RunChange(metrics=change, tags={"scores_rubric": TIPS.tag}, at_ms=1))
    found = board(at)
    assert (found.provisional, found.rubric) == (True, harder.tag)
    assert floors(found) == {harder.floor_composite} == {TIPS.floor_composite + 1}
    assert {cell.values["relevance"] for cell in found.cells if cell.floored} == {2.0}


def test_one_experiment_may_have_judges_and_rules_of_two_rubrics(tmp_path: Path) -> None:
    """Neither board is refused, and each has its own floor."""
    at, folder = driver(), harder_suite(tmp_path)
    at.judged_by("anna")
    run_judge(at.store, at.experiment, RulesJudge(), ExportRequest(suite=folder))
    judged, provisional = board(at), board(at, provisional=True)
    assert (judged.rubric, floors(judged)) == (TIPS.tag, {TIPS.floor_composite})
    assert provisional.rubric == load_suite(folder).rubric.tag
    assert floors(provisional) == {TIPS.floor_composite + 1}


def test_a_rubric_is_found_with_a_scored_cell_or_with_a_sheet(tmp_path: Path) -> None:
    at, folder = driver(), harder_suite(tmp_path)
    runs = list(at.cells().values())
    harder = load_suite(folder).rubric

    def find(tag: str) -> object:
        return find_rubric(at.store, at.experiment.experiment_id, tag, runs)

    assert find(TIPS.tag) == TIPS
    assert find(harder.tag) is None
    at.export("anna", suite=folder)
    assert find(harder.tag) == harder
    assert find("tip-v9@00") is None


def test_a_rubric_that_cannot_be_read_is_none() -> None:
    assert read_rubric(None) is None
    assert read_rubric("+++\nnonsense") is None


def test_scales_come_from_the_rubric_of_the_scores_or_from_the_collected_one() -> None:
    at = driver()
    assert scale_names(at.store, board(at)) == TIPS.scale_names
    at.judged_by("anna")
    assert scale_names(at.store, board(at)) == TIPS.scale_names


def contested(at: SheetDriver, judge: str, limit: int) -> None:
    """A judge who finds every answer ill-formed and overlong."""
    judging = at.export(judge, limit=limit).stored
    raw = fill(judging)
    for item in raw["items"]:
        item["format_ok"] = False
        for tip in item["tips"]:
            tip["overlong"] = True
    at.apply(raw)


@pytest.mark.parametrize("filters", [{"judge": "anna"}, {"provisional": True}, {}])
def test_flags_are_those_of_the_judge_or_computed(filters: dict[str, object]) -> None:
    at = driver()
    contested(at, "ben", 6)
    if "judge" in filters:
        at.judged_by("anna", overlap=0.0)
    else:
        run_judge(at.store, at.experiment, RulesJudge(), ExportRequest())
        for run_id in list(at.cells())[::3]:  # as if the rules had come before these
            at.store.update(run_id, RunChange(texts={SCORES: _without_provisional(at, run_id)}, at_ms=1))
    made, cells = read_leaderboard(at.store, at.experiment, CellFilter(**filters))  # type: ignore[arg-type]
    assert made.provisional == ("judge" not in filters)
    assert any(not cell.values for cell in cells.cells)
    answered = [cell for cell in cells.cells if not cell.floored]
    assert {cell.metrics["format_ok"] for cell in answered} == {1.0}
    assert {cell.metrics["overlong"] for cell in answered} == {0.0}
    assert all(standing.means["overlong"] == 0.0 for standing in made.standings)
    by_scenario = read_answers(at.store, at.experiment, made, cells)
    assert all(answer.format_ok for scenario in by_scenario for answer in scenario.answers if answer.tips)


def _without_provisional(at: SheetDriver, run_id: str) -> str:
    return scores_text(replace(at.scores()[run_id], provisional={}))
