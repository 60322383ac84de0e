"""The duels that speak about a board: made between its own answers, inside its tied set, under its rubric."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tipbench.compare.cells import BoardCells
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.judge.duel_sheet import Winner
from tipbench.judge.duelling import JudgedDuel, read_duels
from tipbench.record.store import Experiment, RunStore

_WINNERS: dict[Winner, Literal["first", "second", "tie"]] = {
    Winner.A: "first",
    Winner.B: "second",
    Winner.TIE: "tie",
}


def duels_of(
    store: RunStore, experiment: Experiment, cells: BoardCells | None = None, *, judge: str | None = None
) -> list[Duel]:
    """The judged duels of an experiment; with `cells` only those between answers of that board, under its rubric."""
    duels = read_duels(store, experiment)
    if judge is not None:
        duels = [duel for duel in duels if duel.judge == judge]
    if cells is not None:
        runs = {cell.run.run_id for cell in cells.cells}
        duels = [duel for duel in duels if runs.issuperset(duel.runs) and duel.rubric == cells.rubric]
    return [_duel(duel) for duel in duels]


def with_duels(
    store: RunStore, experiment: Experiment, board: Leaderboard, cells: BoardCells, *, judge: str | None = None
) -> Leaderboard:
    """The board with the duels inside its tied set beside it; ranks, leader and `decided` stay as they are."""
    if board.provisional or board.by is not None or not board.ranking.tied:
        return board
    among = {pair for pair in (board.ranking.leader, *board.ranking.tied) if pair is not None}
    duels = [duel for duel in duels_of(store, experiment, cells, judge=judge) if {duel.first, duel.second} <= among]
    return replace(board, duels=duel_table(duels, among)) if duels else board


def _duel(duel: JudgedDuel) -> Duel:
    first, second = (Pair(model, prompt) for model, prompt in duel.names)
    return Duel(first, second, duel.scenario, _WINNERS[duel.winner])
