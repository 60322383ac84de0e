"""From a recorded experiment to its leaderboard, in one call: for the command line, the panel and the decision."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tipbench.compare.cells import BoardCells, Question, read_board
from tipbench.compare.duelled import with_duels
from tipbench.compare.leaderboard import Leaderboard, Options, make_board
from tipbench.compare.matrix import Pair
from tipbench.judge.scores import RUBRIC
from tipbench.plan.rubric_files import parse_rubric
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
    board = make_board(experiment.name, cells, Options(baseline, cluster, by, scale_names(store, cells)))
    return with_duels(store, experiment, board, cells, judge=question.judge), cells


def scale_names(store: RunStore, cells: BoardCells) -> tuple[str, ...]:
    """The rubric's scales, from the rubric kept with one of the scored cells, or as collected while none is scored."""
    tags = ("scores_rubric", "provisional_rubric")
    rubric = cells.rubric
    runs = [cell.run for cell in cells.cells]
    scored = next((run for run in runs if rubric and rubric in map(run.tags.get, tags)), None)
    _, texts = store.get((scored or max(runs, key=lambda run: (run.start_ms, run.run_id))).run_id)
    return parse_rubric(texts[RUBRIC], Path("rubric.md")).scale_names if RUBRIC in texts else ()
