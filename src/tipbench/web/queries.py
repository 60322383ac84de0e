"""One query for each page: what it returns feeds the JSON and the HTML alike.

Answers are kept by the experiment's revision, which every writer changes: a sheet applied on the command line shows at
once, and a page that nothing has changed costs one small question to MLflow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tipbench.compare.answers import ScenarioAnswers, read_answers
from tipbench.compare.cells import BoardCells, Question, read_board
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.reading import read_leaderboard
from tipbench.errors import MlflowRefused, UsageError
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

SMALL = 256  # boards, judging states
COUNTS = 256  # and as many as there are experiments
_COPIES = 10  # of one record; more than one is rare
LARGE = 8  # reports and answers, up to some MB each
PAIRS = 32  # two rows side by side, up to some hundred kB each
CHARTS = 96  # about 25 kB each
TABLES = 16  # prepared and rendered, half a MB for 300 rows


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
class ExperimentsAsk:
    """Which experiments are asked for, and which page of them."""

    q: str = ""  # what the name contains, in whatever case
    limit: int = sys.maxsize
    after: str | None = None


@dataclass(frozen=True)
class ExperimentsPage:
    """Experiments with their cells by state, by name."""

    items: tuple[dict[str, Any], ...] = ()
    next: str | None = None
    total: int = 0  # of all names


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
        self.counts = Cache(COUNTS)
        self.small = Cache(SMALL)
        self.large = Cache(LARGE)
        self.pairs = Cache(PAIRS)
        self.charts = Cache(CHARTS)
        self.tables = Cache(TABLES)

    def experiments(self, store: RunStore, ask: ExperimentsAsk) -> ExperimentsPage:
        """One page of our experiments; cells are counted of those alone that are on it."""
        ours = sorted((each for each in store.experiments() if each.name.startswith(EXPERIMENT_PREFIX)), key=_by_name)
        self.counts.make_room(len(ours))
        wanted = ask.q.strip().casefold()
        found = [each for each in ours if wanted in each.name.casefold()]
        page, following = page_of(found, _by_name, limit=ask.limit, after=ask.after)
        few = len(ours) <= KEPT
        return ExperimentsPage(
            tuple(self._experiment_row(store, each, few=few) for each in page), following, total=len(ours)
        )

    def runs(self, store: RunStore, name: str, ask: RunsAsk) -> dict[str, Any]:
        """One page of an experiment's runs, newest first, without texts."""
        experiment = existing(store, name)
        where = {"kind": ask.kind, **dict(ask.where)}
        found = [
            run
            for run in self.view(store, experiment).search(experiment.experiment_id, where=where)
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
        return self.board(store, existing(store, name), ask)

    def answers(self, store: RunStore, name: str, ask: BoardAsk) -> tuple[ScenarioAnswers, ...]:
        """What the pairs of the board wrote, scenario by scenario."""
        experiment = existing(store, name)

        def make() -> tuple[ScenarioAnswers, ...]:
            view, cells = self.view(store, experiment), self.cells(store, experiment, ask)
            return read_answers(view, experiment, self.board(store, experiment, ask), cells)

        return self.large.get(("answers", experiment.experiment_id, ask), revision(experiment), make)

    def report(self, store: RunStore, name: str, ask: BoardAsk) -> str:
        """The board as one HTML file, as `compare --html` writes it."""
        from tipbench.compare.html import html_report

        experiment = existing(store, name)
        return self.large.get(
            ("report", experiment.experiment_id, ask),
            revision(experiment),
            lambda: html_report(
                self.board(store, experiment, ask), self.answers(store, name, ask), self.judging(store, name)
            ),
        )

    def judging(self, store: RunStore, name: str) -> JudgingStatus:
        """How far the judging is, by whom, and how far each judge can be trusted."""
        return self.judging_of(store, existing(store, name))

    def judging_of(self, store: RunStore, experiment: Experiment) -> JudgingStatus:
        """The same, of an experiment that was looked up already."""
        key = ("judging", experiment.experiment_id)
        view = self.view(store, experiment)
        return self.small.get(key, revision(experiment), lambda: judging_status(view, experiment))

    def board(self, store: RunStore, experiment: Experiment, ask: BoardAsk) -> Leaderboard:
        """The board of an experiment that was looked up already."""

        def make() -> Leaderboard:
            view = self.view(store, experiment)
            read = partial(read_leaderboard, view, experiment, ask.question, by=ask.by, cluster=ask.cluster)
            try:
                return read(baseline=ask.baseline)[0]
            except UsageError:
                meant = self._meant(store, experiment, ask)
                if meant is None:
                    raise
                return read(baseline=meant)[0]

        return self.small.get(("board", experiment.experiment_id, ask), revision(experiment), make)

    def cells(self, store: RunStore, experiment: Experiment, ask: BoardAsk) -> BoardCells:
        """The cells that a board rests on; the same for every baseline and for models and prompts alone."""
        key = ("cells", experiment.experiment_id, ask.where, ask.judge, ask.provisional)
        view = self.view(store, experiment)
        return self.large.get(
            key, revision(experiment), lambda: read_board(view, experiment.experiment_id, ask.question)
        )

    def _meant(self, store: RunStore, experiment: Experiment, ask: BoardAsk) -> Pair | None:
        """The one row that is written like a baseline that is not there: a recorded prompt's name may have slashes."""
        if ask.baseline is None:
            return None
        there = self.board(store, experiment, replace(ask, baseline=None)).matrix.pairs
        alike = [pair for pair in there if str(pair).strip() == str(ask.baseline).strip() and pair != ask.baseline]
        return alike[0] if len(alike) == 1 else None

    def _experiment_row(self, store: RunStore, experiment: Experiment, *, few: bool) -> dict[str, Any]:
        counts = self.counts.get(
            experiment.experiment_id, revision(experiment), lambda: self._count(store, experiment, few=few)
        )
        return {"experiment": experiment.name, **vars(counts), "url": experiment.url}

    def _count(self, store: RunStore, experiment: Experiment, *, few: bool) -> CellCounts:
        """From a snapshot, which other pages will want too; of many experiments in passing, or they push them out."""
        key = ("snapshot", experiment.experiment_id, str(RunKind.CELL))
        kept = few or self.snapshots.has(key, revision(experiment))
        return count_cells(self.view(store, experiment) if kept else store, experiment.experiment_id)

    def view(self, store: RunStore, experiment: Experiment) -> SnapshotStore:
        """The store with this experiment's runs in memory."""
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


def _by_name(experiment: Experiment) -> Place:
    return Place(0, experiment.name)


def _place(run: StoredRun) -> Place:
    return Place(-run.start_ms, run.run_id)


def _no_run(name: str, run_id: str) -> NotFound:
    return NotFound(f"{name[:200]} has no run {run_id[:64]}. Its runs are at /api/bench/runs/….", path="path.run_id")
