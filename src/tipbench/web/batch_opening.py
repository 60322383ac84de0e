"""Where a batch comes from: the judge's open sheet or duels in MLflow, or new ones, exported as by file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.compare.cells import Question, read_board
from tipbench.compare.leaderboard import Options, make_board
from tipbench.errors import NotEnoughData
from tipbench.judge.duel_runs import DuelJudging, duel_judgings, find_duel
from tipbench.judge.duel_sheet import duel_json
from tipbench.judge.duelling import DuelRequest, export_duels
from tipbench.judge.judging import SheetStatus, find_judging
from tipbench.judge.sheet import sheet_json
from tipbench.record.store import Experiment, RunStore
from tipbench.web.allowed import Allowed
from tipbench.web.auth import Identity
from tipbench.web.batch import Batch, Kind, Status
from tipbench.web.judging import sheet_for, wish_of
from tipbench.web.queries import existing

ANSWERS = 30  # of a new sheet; with what is hidden among them about 40 items
DUELS = 40


@dataclass(frozen=True)
class Found:
    """A sheet or duels of a judge's, with the public part alone."""

    sheet: str
    raw: Mapping[str, Any]


def find_work(store: RunStore, name: str, judge: Identity, allowed: Allowed, kind: Kind, limit: int | None) -> Found:
    """The judge's open piece of work in MLflow, or a new one. NotEnoughData when nothing waits."""
    if kind is Kind.DUEL:
        duels = _duels(store, existing(store, name), judge.name, limit or DUELS)
        return Found(duels.sheet.id, duel_json(duels.sheet))
    judging = sheet_for(store, name, wish_of({"limit": limit or ANSWERS}, judge, allowed))
    return Found(judging.sheet.id, sheet_json(judging.sheet))


def recorded_status(store: RunStore, batch: Batch) -> tuple[Status | None, str | None]:
    """How the batch's sheet stands in MLflow, and why its drift was accepted; None while nothing has come back."""
    experiment = existing(store, batch.experiment)
    find = find_duel if batch.kind is Kind.DUEL else find_judging
    found = find(store, experiment.experiment_id, experiment.name, batch.sheet)
    if found is None or found.status is SheetStatus.EXPORTED:
        return None, None
    return Status(str(found.status)), getattr(found, "accepted", None)


def _duels(store: RunStore, experiment: Experiment, judge: str, limit: int) -> DuelJudging:
    """As `judge duel` makes them; its own words would name the leader."""
    there = duel_judgings(store, experiment.experiment_id, experiment.name)
    open_ = next((each for each in there if each.owner == judge and each.status is SheetStatus.EXPORTED), None)
    if open_ is not None:
        return open_
    cells = read_board(store, experiment.experiment_id, Question())
    ranking = None if cells.provisional else make_board(experiment.name, cells, Options()).ranking
    if ranking is None or ranking.leader is None or not ranking.tied:
        raise NotEnoughData(
            f"No duels wait in {experiment.name[:200]}: nothing is tied. Judge a batch of tips instead."
        )
    leader, among = ranking.leader, {ranking.leader, *ranking.tied}
    runs = {
        cell.run.run_id: (cell.pair.model, cell.pair.prompt)
        for cell in cells.cells
        if cell.pair in among and not cell.failed
    }
    request = DuelRequest((leader.model, leader.prompt), runs, cells.rubric, judge, limit)
    return export_duels(store, experiment, request).judging
