"""What to judge next: the most informative cells of the tied rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import known

from support.judged import cells_of
from support.judging import SeededStore, SheetDriver, fill, items_of, record_cells
from tipbench.compare.cells import BoardCells, CellFilter, Focus, focus, read_board_cells
from tipbench.compare.leaderboard import BoardOptions, make_board
from tipbench.compare.matrix import Pair
from tipbench.judge.sheet_store import ItemKind
from tipbench.record.run import StoredRun

A, B, C, D, E = (Pair(f"{letter}:1b", "v1") for letter in "abcde")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
NEAR = [value + (0.6 if at % 2 else -0.4) for at, value in enumerate(LOW)]
FAR = [value - 6 + (0.25 if at % 2 else -0.25) for at, value in enumerate(LOW)]
OPEN: list[float | None] = [None, None, None]


def focus_of(cells: BoardCells) -> Focus | None:
    return focus(cells, make_board("", cells, BoardOptions()).ranking)


def tied_top() -> dict[Pair, Sequence[float | None]]:
    """A and B tie, C, D and E are far behind; three scenarios are open for all."""
    return {A: [*LOW, *OPEN], B: [*NEAR, *OPEN], C: [*FAR, *OPEN], D: [*FAR, *OPEN], E: [*FAR, *OPEN]}


def test_only_the_leader_and_what_ties_with_it_is_worth_judging() -> None:
    found = known(focus_of(cells_of(tied_top())))
    assert set(found.pairs) == {A, B}
    assert found.pairs[0] == B, "the leader first"
    assert set(found.scenarios) == {"p0@s8", "p1@s9", "p2@s10"}
    assert found.run_ids == {f"{pair}@{scenario}" for pair in (A, B) for scenario in found.scenarios}


def test_a_decided_board_has_no_focus() -> None:
    assert focus_of(cells_of({A: [*LOW, *OPEN], C: [*FAR, *OPEN]})) is None


def test_without_a_leader_or_without_an_open_cell_there_is_no_focus() -> None:
    assert focus_of(cells_of({A: [None] * 8, B: [None] * 8})) is None
    assert focus_of(cells_of({A: LOW, B: NEAR})) is None


def test_a_pair_with_too_few_scores_to_be_ranked_is_judged_too() -> None:
    found = known(focus_of(cells_of({A: LOW, C: FAR, B: [*NEAR[:5], *OPEN]})))
    assert found.pairs == (A, B)
    assert found.run_ids == {f"{B}@{scenario}" for scenario in found.scenarios}
    assert len(found.scenarios) == 3


def test_failed_cells_cannot_be_judged() -> None:
    cells = cells_of(tied_top())
    failed = tuple(
        replace(each, run=replace(each.run, tags={**each.run.tags, "state": "failed"}))
        if each.scenario == "p0@s8"
        else each
        for each in cells.cells
    )
    found = known(focus_of(replace(cells, cells=failed)))
    assert "p0@s8" not in found.scenarios


def test_a_scenario_in_which_the_leader_cannot_be_paired_is_excluded() -> None:
    """The leader has no answer there, so a judgement of the other pair compares nothing."""
    cells = cells_of(tied_top())
    without = tuple(each for each in cells.cells if not (each.pair == B and each.scenario == "p1@s9"))
    found = known(focus_of(replace(cells, cells=without)))
    assert set(found.scenarios) == {"p0@s8", "p2@s10"}


def test_a_scenario_that_pairs_more_tied_rows_comes_first() -> None:
    other = [value + (0.5 if at % 2 else -0.4) for at, value in enumerate(LOW)]
    columns = {**tied_top(), C: [*other, None, None, None]}
    cells = cells_of(columns)
    without = tuple(
        each for each in cells.cells if not (each.pair == C and each.scenario != "p2@s10" and not each.values)
    )
    found = known(focus_of(replace(cells, cells=without)))
    assert set(found.pairs) == {A, B, C}
    assert found.scenarios[0] == "p2@s10"


def test_a_scenario_half_of_which_is_judged_needs_only_its_rest() -> None:
    columns = tied_top()
    columns[B] = [*NEAR, 11.0, None, None]
    found = known(focus_of(cells_of(columns)))
    assert f"{A}@p0@s8" in found.run_ids
    assert f"{B}@p0@s8" not in found.run_ids


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_the_order_of_cells_changes_nothing(seed: int) -> None:
    cells = cells_of(tied_top())
    shuffled = list(cells.cells)
    random.Random(seed).shuffle(shuffled)
    assert focus_of(replace(cells, cells=tuple(shuffled))) == focus_of(cells)


def tied_level(run: StoredRun, number: int) -> int:
    """One and two are tied, three to six are far behind."""
    if run.params["model"] not in ("one:1b", "two:1b"):
        return 1
    return 3 + random.Random(f"{run.params['model']}{run.params['scenario']}{number}").randint(0, 2)


def test_a_focused_sheet_has_the_cells_of_the_focus_first_and_none_of_others() -> None:
    """Through a store: six of eight scenarios are judged, then the most informative cells."""
    store = SeededStore()
    models = ("one:1b", "two:1b", "three:1b", "four:1b", "five:1b", "six:1b")
    driver = SheetDriver(store, record_cells(store, models=models, prompts="v1"))
    scenarios = sorted({run.params["scenario"] for run in driver.cells().values()})
    judge_some(driver, set(scenarios[2:]))
    cells = read_board_cells(store, driver.experiment.experiment_id, CellFilter())
    found = known(focus_of(cells))
    assert {pair.model for pair in found.pairs} == {"one:1b", "two:1b"}
    done = driver.export("anna", only=found.run_ids, preferred_scenarios=found.scenarios, overlap=0.0)
    runs_by_id = driver.cells()
    runs = {entry.run_id for entry in done.stored.entries if entry.kind is ItemKind.CELL and entry.run_id}
    assert runs == found.run_ids
    assert {runs_by_id[run_id].params["scenario"] for run_id in runs} == set(scenarios[:2])
    assert len(runs) == 4


def judge_some(driver: SheetDriver, scenarios: set[str]) -> None:
    judging = driver.export("anna", everything=True).stored
    raw, cells = fill(judging), driver.cells()
    for run_id, item in items_of(raw, judging).items():
        keep = cells[run_id].params["scenario"] in scenarios
        for number, tip in enumerate(item["tips"]):
            tip["scores"] = dict.fromkeys(tip["scores"], tied_level(cells[run_id], number) if keep else None)
    assert driver.apply(raw).status == "applied"
