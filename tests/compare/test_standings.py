"""Rows: what stands on a board although nothing of it is current, and what rows per persona rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.boards import SCALES, cell, scenario_names
from support.judged import scored
from tipbench.compare.cells import CellFilter, select_cells
from tipbench.compare.decision import make_decision
from tipbench.compare.gate import evaluate_gate
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.errors import UsageError
from tipbench.judge.scores import NO_SCORES
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


def of_runs(runs: Sequence[StoredRun], options: BoardOptions | None = None, **question: object) -> Leaderboard:
    chosen = select_cells([(run, NO_SCORES) for run in runs], CellFilter(**question))  # type: ignore[arg-type]
    return make_board("tip-bench-test", chosen, options or BoardOptions(scales=SCALES))


RUNS = [*column(A, LOW, at=5), *column(B, HIGH, at=5)]
OLD = column(C, HIGH, at=1, text="p1")


def test_a_pair_of_which_everything_is_stale_stands_last_and_counts_nowhere() -> None:
    found, alone = of_runs([*RUNS, *OLD]), of_runs(RUNS)
    *current, last = found.to_json()["standings"]
    assert (last["model"], last["rank"], last["composite"], last["total"]) == ("c:1b", None, None, 0)
    assert last["flags"] == ["incomplete", "stale"]
    assert current == alone.to_json()["standings"]
    assert found.to_json()["verdict"] == alone.to_json()["verdict"]


def test_a_model_of_which_everything_is_stale_stands_on_a_board_by_model_too() -> None:
    *_, last = of_runs([*RUNS, *OLD], BoardOptions(by="model")).to_json()["standings"]
    assert (last["model"], last["prompt_version"], last["flags"]) == ("c:1b", "*", ["incomplete", "stale"])


def test_whoever_names_a_stale_pair_is_told_why_it_is_not_there() -> None:
    cells = select_cells([(run, NO_SCORES) for run in (*RUNS, *OLD)], CellFilter())
    said = "The pair c:1b/v1 is not on this board: all 8 runs of it are of an older build or prompt"
    for name in (
        lambda: evaluate_gate(cells, C, A),
        lambda: make_board("tip-bench-test", cells, BoardOptions(baseline=C)),
        lambda: make_decision(of_runs(RUNS), cells, C, "because", decision_id="d", at="2026-05-01"),
    ):
        with pytest.raises(UsageError, match=said):
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
    assert plain["scenarios_needed"] > 8


def test_a_row_that_lacks_a_persona_rests_on_the_scenarios_of_the_others() -> None:
    partly: list[float | None] = [None if at % 4 == 0 else value for at, value in enumerate(LOW)]
    found = make_board(
        "tip-bench-test", scored({A: LOW, B: HIGH, C: partly}), BoardOptions(cluster="persona")
    ).to_json()
    assert [(row["n_scenarios"], row["n_clusters"]) for row in found["standings"]] == [(8, 4), (8, 4), (6, 3)]


def test_a_filtered_board_says_so_everywhere() -> None:
    runs = [replace(run, tags={**run.tags, "suite": "x"}) for run in RUNS]
    found = of_runs(runs, where={"suite": "x", "params.model": "a:1b"})
    assert found.to_json()["where"] == {"suite": "x", "params.model": "a:1b"}
    assert found.to_json()["judge"] is None
    assert "Only cells with suite=x and params.model=a:1b." in found.notes
    of_anna = make_board("tip-bench-test", scored({A: LOW}, question=CellFilter(judge="anna")), BoardOptions())
    assert of_anna.to_json()["judge"] == "anna"
    assert "Only anna's scores." in of_anna.notes
    assert not any(note.startswith("Only ") for note in of_runs(RUNS).notes)
