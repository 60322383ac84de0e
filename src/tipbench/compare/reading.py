"""From a recorded experiment to its leaderboard, in one call: for the command line, the panel and the decision."""

from __future__ import annotations

from typing import Literal

from tipbench.compare.cells import BoardCells, Question, read_board
from tipbench.compare.duelled import with_duels
from tipbench.compare.leaderboard import Leaderboard, Options, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.rubrics import find_rubric, read_rubric
from tipbench.judge.scores import RUBRIC
from tipbench.record.current import newest_run
from tipbench.record.store import Experiment, RunStore


def read_leaderboard(
    store: RunStore,
    experiment: Experiment,
    question: Question,
    *,
    baseline: Pair | None = None,
    by: Literal["model", "prompt"] | None = None,
    cluster: Literal["persona"] | None = None,
) -> tuple[Leaderboard, BoardCells]:
    """The board of an experiment, with its duels, and the cells it rests on."""
    cells = read_board(store, experiment.experiment_id, question)
    scales = scale_names(store, experiment.experiment_id, cells)
    board = make_board(experiment.name, cells, Options(baseline, cluster, by, scales))
    return with_duels(store, experiment, board, cells, judge=question.judge), cells


def scale_names(store: RunStore, experiment_id: str, cells: BoardCells) -> tuple[str, ...]:
    """The scales of the rubric that the scores were given under, or of the one collected with while there are none."""
    runs = [cell.run for cell in cells.cells]
    found = find_rubric(store, experiment_id, cells.rubric, runs) if cells.rubric else None
    if found is None and runs:
        found = read_rubric(store.get(newest_run(runs).run_id)[1].get(RUBRIC))
    return found.scale_names if found else ()
