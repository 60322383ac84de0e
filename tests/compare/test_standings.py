"""Rows: pairs with only stale runs, and clusters by persona."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.boards import SCALES, cell, scenario_names
from support.judged import scored
from tipbench.compare.cells import CellFilter, select_cells
from tipbench.compare.decision import make_decision
from tipbench.compare.gate import GateOptions, evaluate_gate
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.standings import TableCell, standings_table
from tipbench.errors import UsageError
from tipbench.judge.scores import NO_SCORES
from tipbench.plan.design import make_design
from tipbench.record.run import StoredRun

A, B, C = Pair("a:1b", "v1"), Pair("b:1b", "v1"), Pair("c:1b", "v1")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
HIGH = [value + 4 + (0.25 if at % 2 else -0.25) for at, value in enumerate(LOW)]


def column(pair: Pair, values: Sequence[float | None], *, at: int = 1, text: str = "p2") -> list[StoredRun]:
    made = [
        cell(pair, name, value, tags={"prompt_hash": text})
        for name, value in zip(scenario_names(8), values, strict=True)
    ]
    return [replace(run, run_id=f"{run.run_id}#{at}", start_ms=at) for run in made]


def of_runs(runs: Sequence[StoredRun], options: BoardOptions | None = None, **filters: object) -> Leaderboard:
    chosen = select_cells([(run, NO_SCORES) for run in runs], CellFilter(**filters))  # type: ignore[arg-type]
    return make_board("tip-bench-test", chosen, options or BoardOptions(scales=SCALES))


RUNS = [*column(A, LOW, at=5), *column(B, HIGH, at=5)]
OLD = column(C, HIGH, at=1, text="p1")


def test_a_pair_with_only_stale_runs_is_last_and_does_not_count() -> None:
    found, alone = of_runs([*RUNS, *OLD]), of_runs(RUNS)
    *current, last = found.to_json()["standings"]
    assert (last["model"], last["rank"], last["composite"], last["total"]) == ("c:1b", None, None, 0)
    assert last["flags"] == ["incomplete", "stale"]
    assert current == alone.to_json()["standings"]
    assert {**found.to_json()["verdict"], "text": ""} == {**alone.to_json()["verdict"], "text": ""}


def test_page_has_usable_answers_with_their_exact_interval_and_the_adjusted_mean() -> None:
    unusable = [replace(run, tags={**run.tags, "floored": "true"}) for run in RUNS[:2]]
    found = of_runs([*unusable, *RUNS[2:], *column(C, [*LOW[:6], None, None], at=5)])
    table = standings_table(found)
    titles = [each.key for each in table.columns]
    cells = {row.pair: dict(zip(titles, row.cells, strict=True)) for row in table.rows}
    assert cells[A]["usable"].text == "6 of 8"
    assert cells[A]["usable"].small_lines[0] == "35 % to 97 %"
    assert cells[B]["usable"] == TableCell("8 of 8", ("63 % to 100 %",), 1.0)
    assert cells[C]["composite"].small_lines[-1].endswith(" adjusted")
    flags = {name: about for row in table.rows for name, about in row.flags}
    assert flags["adjusted"] == "lacks scenarios: its mean is also shown adjusted for these"


def test_page_names_the_confidence_of_the_looks_level() -> None:
    design = make_design(scenario_names(32))
    (to_leader,) = [
        each.description
        for each in standings_table(of_runs(RUNS, BoardOptions(design=design))).columns
        if each.key == "leader"
    ]
    assert to_leader == "Row − leader, with its 98.18 % interval; p is adjusted for all rows"
    (to_leader,) = [each.description for each in standings_table(of_runs(RUNS)).columns if each.key == "leader"]
    assert "with its 95 % interval" in to_leader


def test_a_model_with_only_stale_runs_is_on_a_board_by_model_too() -> None:
    *_, last = of_runs([*RUNS, *OLD], BoardOptions(by="model")).to_json()["standings"]
    assert (last["model"], last["prompt_version"], last["flags"]) == ("c:1b", "*", ["incomplete", "stale"])


def test_naming_a_stale_pair_is_refused_with_the_reason() -> None:
    cells = select_cells([(run, NO_SCORES) for run in (*RUNS, *OLD)], CellFilter())
    message = "The pair c:1b/v1 is not on this board: all 8 runs of it are of an older build or prompt"
    for name in (
        lambda: evaluate_gate(cells, GateOptions(C, A)),
        lambda: make_board("tip-bench-test", cells, BoardOptions(baseline=C)),
        lambda: make_decision(of_runs(RUNS), cells, C, "because", decision_id="d", at="2026-05-01"),
    ):
        with pytest.raises(UsageError, match=message):
            name()


def test_per_persona_scenarios_stay_scenarios_and_personas_are_clusters() -> None:
    found = make_board("tip-bench-test", scored({A: LOW, B: HIGH}), BoardOptions(cluster="persona")).to_json()
    verdict = found["verdict"]
    assert (verdict["n_scenarios"], verdict["n_clusters"]) == (8, 4)
    assert [(row["n_scenarios"], row["n_clusters"]) for row in found["standings"]] == [(8, 4)] * 2
    near = [value + (0.6 if at % 2 else -0.4) for at, value in enumerate(LOW)]
    tied = make_board("tip-bench-test", scored({A: LOW, B: near}), BoardOptions(cluster="persona")).to_json()["verdict"]
    assert tied["scenarios_needed"] is None
    plain = make_board("tip-bench-test", scored({A: LOW, B: near}), BoardOptions()).to_json()["verdict"]
    assert (plain["n_clusters"], plain["clusters_needed"]) == (None, None)
    assert plain["scenarios_needed"] is None


def test_a_row_that_lacks_a_persona_rests_on_the_scenarios_of_the_others() -> None:
    partly: list[float | None] = [None if at % 4 == 0 else value for at, value in enumerate(LOW)]
    found = make_board(
        "tip-bench-test", scored({A: LOW, B: HIGH, C: partly}), BoardOptions(cluster="persona")
    ).to_json()
    assert [(row["n_scenarios"], row["n_clusters"]) for row in found["standings"]] == [(8, 4), (8, 4), (6, 3)]


def test_a_filtered_board_shows_the_filter_in_every_form() -> None:
    runs = [replace(run, tags={**run.tags, "suite": "x"}) for run in RUNS]
    found = of_runs(runs, where={"suite": "x", "params.model": "a:1b"})
    assert found.to_json()["where"] == {"suite": "x", "params.model": "a:1b"}
    assert found.to_json()["judge"] is None
    assert "Only cells with suite=x and params.model=a:1b." in found.notes
    of_anna = make_board("tip-bench-test", scored({A: LOW}, cell_filter=CellFilter(judge="anna")), BoardOptions())
    assert of_anna.to_json()["judge"] == "anna"
    assert "Only anna's scores." in of_anna.notes
    assert not any(note.startswith("Only ") for note in of_runs(RUNS).notes)
