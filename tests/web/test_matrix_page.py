"""The scenario matrix: means over repeats, states of unjudged cells, and the order of the scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.judged import cells_of
from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.matrix import Pair
from tipbench.web.panel.matrix import SHADES, MatrixEntry, Order, matrix_rows

A, B = Pair("alpha:1b", "v1"), Pair("beta:1b", "v1")


def entries_of(board: BoardCells) -> list[tuple[MatrixEntry, ...]]:
    return [row.entries for row in matrix_rows(board, [A, B], "name")]


def failed(cell: BoardCell) -> BoardCell:
    return replace(cell, run=replace(cell.run, tags={**cell.run.tags, "state": "failed"}))


def test_repeats_are_averaged_and_shades_go_from_the_lowest_to_the_highest_mean() -> None:
    first, second = cells_of({A: [4.0], B: [2.0]}), cells_of({A: [5.0], B: [2.0]})
    board = replace(first, cells=first.cells + second.cells)
    assert entries_of(board) == [(MatrixEntry(4.5, "judged", SHADES - 1), MatrixEntry(2.0, "judged", 0))]


@pytest.mark.parametrize("failed_first", [True, False])
def test_a_cell_is_failed_only_if_all_its_repeats_failed(failed_first: bool) -> None:
    both, pending = cells_of({A: [None], B: [None]}).cells, cells_of({A: [None]}).cells
    runs = (*map(failed, both), *pending)
    board = cells_of({}, cells=runs if failed_first else runs[::-1])
    assert entries_of(board) == [(MatrixEntry(None, "pending"), MatrixEntry(None, "failed"))]


def test_a_pair_without_a_run_of_a_scenario_is_missing_there() -> None:
    assert entries_of(cells_of({A: [4.0, 3.0], B: [2.0]}))[1][1] == MatrixEntry(None, "missing")


@pytest.mark.parametrize(("order", "expected"), [("name", [0, 1, 2]), ("hardest", [1, 0, 2]), ("spread", [0, 1, 2])])
def test_unjudged_scenarios_come_last_in_every_order_by_score(order: Order, expected: list[int]) -> None:
    board = cells_of({A: [5.0, 2.0, None], B: [3.0, 1.0, None]})
    names = [row.scenario for row in matrix_rows(board, [A, B], order)]
    assert [int(name.rpartition("s")[2]) for name in names] == expected
