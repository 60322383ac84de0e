"""Cells with given scores: as values, or judged through a sheet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from support.judging import SheetDriver, fill, items_of
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.matrix import Pair
from tipbench.record.run import StoredRun

RUBRIC = "tip-v1@" + "a" * 64


def cells_of(columns: Mapping[Pair, Sequence[float | None]], **over: Any) -> BoardCells:
    """The cells of a board with these composites by scenario; None is an unscored cell."""
    cells = [
        _cell(pair, f"p{at % 4}@s{at}", value) for pair, values in columns.items() for at, value in enumerate(values)
    ]
    return replace(BoardCells(tuple(cells), RUBRIC, ("anna",), False, {}, 0, "c" * 8), **over)


def _cell(pair: Pair, scenario: str, value: float | None) -> BoardCell:
    params = {
        "model": pair.model,
        "prompt_version": pair.prompt,
        "scenario": scenario,
        "persona": scenario.partition("@")[0],
        "model_digest": f"sha256:{pair.model}",
        "suite": "tips",
        "temperature": "0.7",
    }
    tags = {"scenario_hash": f"h-{scenario}", "prompt_hash": f"p-{pair.prompt}", "state": "judged"}
    run = StoredRun(f"{pair}@{scenario}", "FINISHED", 1, 2, params, {}, tags)
    return BoardCell(run, {} if value is None else {"composite": value})


Level = Callable[[StoredRun, int], int]  # (run, number of the tip) → the score on every scale


def judge_at(driver: SheetDriver, level: Level, judge: str = "anna") -> None:
    """Judge every cell of an experiment at these levels."""
    judging = driver.export(judge, everything=True).stored
    raw, cells = fill(judging), driver.cells()
    for run_id, item in items_of(raw, judging).items():
        for number, tip in enumerate(item["tips"]):
            tip["scores"] = dict.fromkeys(tip["scores"], level(cells[run_id], number))
    assert driver.apply(raw).status == "applied"
