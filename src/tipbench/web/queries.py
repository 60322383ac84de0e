"""One query for each page: what it returns feeds the JSON and the HTML alike.

Answers are kept by the experiment's revision, which every writer changes: a sheet applied on the command line shows at
once, and a page that nothing has changed costs one small question to MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tipbench.compare.answers import ScenarioAnswers, read_answers
from tipbench.compare.cells import Question, read_board
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.reading import read_leaderboard
from tipbench.errors import MlflowRefused
from tipbench.judge.status import JudgingStatus, judging_status
from tipbench.plan.config import EXPERIMENT_PREFIX, check_experiment_name
from tipbench.record.mlflow_wire import RECORD_TAG
from tipbench.record.reading import CellCounts, count_cells, run_json
from tipbench.record.run import RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.web.cache import Cache
from tipbench.web.errors import Invalid, NotFound
from tipbench.web.paging import Place, page_of
from tipbench.web.snapshots import KEPT, SnapshotStore, revision

SMALL = 256  # counts, boards, judging states
_COPIES = 10  # of one record; more than one is rare
LARGE = 8  # reports and answers, up to some MB each


@dataclass(frozen=True)
class BoardAsk:
    """Which board is asked for; the options of `tipbench compare`."""

    where: tuple[tuple[str, str], ...] = ()
    judge: str | None = None
    provisional: bool = False
    baseline: Pair | None = None
    by: Literal["model", "prompt"] | None = None
    cluster: Literal["persona"] | None = None

    @property
    def question(self) -> Question:
        """What is asked of the cells."""
        return Question(dict(self.where), self.judge, self.provisional)


@dataclass(frozen=True)
class RunsAsk:
    """Which runs are asked for, and which page of them."""

    where: tuple[tuple[str, str], ...] = ()
    kind: str = str(RunKind.CELL)
    limit: int = 50
    after: str | None = None
    superseded: bool = False


class Queries:
    """The pages' questions to a store. Thread-safe."""

    def __init__(self) -> None:
        self.snapshots = Cache(KEPT)
        self.small = Cache(SMALL)
        self.large = Cache(LARGE)

    def experiments(self, store: RunStore) -> list[dict[str, Any]]:
        """Every experiment of ours with its cells by state, by name."""
        found = [each for each in store.experiments() if each.name.startswith(EXPERIMENT_PREFIX)]
        few = len(found) <= KEPT
        return [self._experiment_row(store, each, few=few) for each in sorted(found, key=lambda each: each.name)]

    def runs(self, store: RunStore, name: str, ask: RunsAsk) -> dict[str, Any]:
        """One page of an experiment's runs, newest first, without texts."""
        experiment = existing(store, name)
        where = {"kind": ask.kind, **dict(ask.where)}
        found = [
            run
            for run in self._view(store, experiment).search(experiment.experiment_id, where=where)
            if ask.superseded or run.tags.get("superseded") != "true"
        ]
        page, following = page_of(found, _place, limit=ask.limit, after=ask.after)
        return {"items": [_run_row(experiment, run) for run in page], "next": following, "total": len(found)}

    def run(self, store: RunStore, name: str, run_id: str) -> dict[str, Any]:
        """One run of the experiment with all its texts."""
        experiment = existing(store, name)
        try:
            run, texts = store.get(run_id)
        except MlflowRefused as exc:
            if exc.status == 404 and exc.code:
                raise _no_run(name, run_id) from exc
            raise
        if not _belongs(store, experiment, run):
            raise _no_run(name, run_id)
        return {**_run_row(experiment, run), "status": run.status, "texts": texts}

    def leaderboard(self, store: RunStore, name: str, ask: BoardAsk) -> Leaderboard:
        """The board, as `tipbench compare` makes it."""
        experiment = existing(store, name)
        return self._board(store, experiment, ask)

    def answers(self, store: RunStore, name: str, ask: BoardAsk) -> tuple[ScenarioAnswers, ...]:
        """What the pairs of the board wrote, scenario by scenario."""
        experiment = existing(store, name)

        def make() -> tuple[ScenarioAnswers, ...]:
            cells = read_board(self._view(store, experiment), experiment.experiment_id, ask.question)
            return read_answers(store, experiment, self._board(store, experiment, ask), cells)

        return self.large.get(("answers", experiment.experiment_id, ask), revision(experiment), make)

    def report(self, store: RunStore, name: str, ask: BoardAsk) -> str:
        """The board as one HTML file, as `compare --html` writes it."""
        from tipbench.compare.html import html_report

        experiment = existing(store, name)
        return self.large.get(
            ("report", experiment.experiment_id, ask),
            revision(experiment),
            lambda: html_report(
                self._board(store, experiment, ask), self.answers(store, name, ask), self.judging(store, name)
            ),
        )

    def judging(self, store: RunStore, name: str) -> JudgingStatus:
        """How far the judging is, by whom, and how far each judge can be trusted."""
        experiment = existing(store, name)
        key = ("judging", experiment.experiment_id)
        return self.small.get(key, revision(experiment), lambda: judging_status(store, experiment))

    def _board(self, store: RunStore, experiment: Experiment, ask: BoardAsk) -> Leaderboard:
        def make() -> Leaderboard:
            view = self._view(store, experiment)
            board, _ = read_leaderboard(
                view, experiment, ask.question, baseline=ask.baseline, by=ask.by, cluster=ask.cluster
            )
            return board

        return self.small.get(("board", experiment.experiment_id, ask), revision(experiment), make)

    def _experiment_row(self, store: RunStore, experiment: Experiment, *, few: bool) -> dict[str, Any]:
        counts = self.small.get(
            ("counts", experiment.experiment_id), revision(experiment), lambda: self._count(store, experiment, few=few)
        )
        return {"experiment": experiment.name, **vars(counts), "url": experiment.url}

    def _count(self, store: RunStore, experiment: Experiment, *, few: bool) -> CellCounts:
        """From a snapshot, which other pages will want too; of many experiments in passing, or they push them out."""
        key = ("snapshot", experiment.experiment_id, str(RunKind.CELL))
        kept = few or self.snapshots.has(key, revision(experiment))
        return count_cells(self._view(store, experiment) if kept else store, experiment.experiment_id)

    def _view(self, store: RunStore, experiment: Experiment) -> SnapshotStore:
        return SnapshotStore(store, experiment, self.snapshots)


def existing(store: RunStore, name: str) -> Experiment:
    """The experiment of that name. Invalid when it cannot be one of ours, NotFound when there is none."""
    try:
        check_experiment_name(name)
    except ValueError as exc:
        raise Invalid(str(exc), path="path.experiment") from exc
    experiment = store.experiment(name)
    if experiment is None:
        raise NotFound(
            f"There is no experiment {name[:200]}. GET /api/bench/experiments lists what there is.",
            path="path.experiment",
        )
    return experiment


def _belongs(store: RunStore, experiment: Experiment, run: StoredRun) -> bool:
    """MLflow finds a run in whatever experiment, anybody's too; a page is about one of ours."""
    record = run.tags.get(RECORD_TAG)
    if record is None:
        return False
    found = store.search(experiment.experiment_id, where={RECORD_TAG: record}, limit=_COPIES)
    return any(each.run_id == run.run_id for each in found)


def run_link(experiment: Experiment, run_id: str) -> str | None:
    """The run's page in MLflow."""
    return None if experiment.url is None else f"{experiment.url}/runs/{run_id}"


def _run_row(experiment: Experiment, run: StoredRun) -> dict[str, Any]:
    times: Mapping[str, int | None] = {"start_ms": run.start_ms, "end_ms": run.end_ms}
    return {**run_json(run), **times, "url": run_link(experiment, run.run_id)}


def _place(run: StoredRun) -> Place:
    return Place(-run.start_ms, run.run_id)


def _no_run(name: str, run_id: str) -> NotFound:
    return NotFound(f"{name[:200]} has no run {run_id[:64]}. Its runs are at /api/bench/runs/….", path="path.run_id")
