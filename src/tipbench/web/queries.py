"""Read queries of the panel, on snapshots of experiments cached per revision."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal
from urllib.parse import quote

from tipbench.compare.answers import ScenarioAnswers, read_answers
from tipbench.compare.cells import BoardCells, CellFilter, read_board
from tipbench.compare.leaderboard import Leaderboard, read_leaderboard
from tipbench.compare.matrix import Pair
from tipbench.errors import MlflowError, UsageError
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import SCORES
from tipbench.judge.status import JudgingStatus, judging_status
from tipbench.plan.config import EXPERIMENT_PREFIX, check_experiment_name
from tipbench.record.mlflow_wire import RECORD_TAG, REVISION_TAG, matches
from tipbench.record.reader import CellCounts, count_cells, run_json
from tipbench.record.run import NewRun, RunChange, RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.web.cache import Cache
from tipbench.web.errors import Invalid, NotFound
from tipbench.web.forms import SortKey, page_of

KEPT = 4  # snapshots; 2400 cells take about 40 MB
# Texts cached with a snapshot, needed for boards, answers and judging status. They are read along with the runs, so
# caching them saves a second read; prompts and rubrics are read on demand.
_TEXTS: Mapping[str, tuple[str, ...]] = {str(RunKind.CELL): (SCORES, CANDIDATES, RAW)}

Kept = tuple[tuple[StoredRun, Mapping[str, str]], ...]


def revision(experiment: Experiment) -> str | None:
    """Return the experiment's revision, which changes with every write; None if it has none."""
    return experiment.tags.get(REVISION_TAG)


class SnapshotStore:
    """A RunStore that caches the runs of one experiment; other calls are passed to the underlying store."""

    def __init__(self, store: RunStore, experiment: Experiment, cache: Cache) -> None:
        self._store = store
        self._experiment = experiment
        self._cache = cache

    def snapshot(self, kind: str) -> Kept:
        """Return all runs of a kind, newest first."""
        key, version = ("snapshot", self._experiment.experiment_id, kind), revision(self._experiment)
        return self._cache.get(key, version, lambda: self._load(kind))

    def _load(self, kind: str) -> Kept:
        found = self._store.read(self._experiment.experiment_id, where={"kind": kind}, texts=_TEXTS.get(kind, ()))
        return tuple(sorted(found, key=lambda each: (-each[0].start_ms, each[0].run_id)))

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Search the snapshot if it covers the experiment and kind, else the store."""
        return (run for run, _ in self.read(experiment_id, where=where, texts=(), limit=limit))

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Read from the snapshot if it covers the experiment, kind and texts, else from the store."""
        kind = where.get("kind", "")
        ours = experiment_id == self._experiment.experiment_id and kind in set(RunKind)
        if not ours or not set(texts) <= set(_TEXTS.get(kind, ())):
            return self._store.read(experiment_id, where=where, texts=texts, limit=limit)
        found = (
            (run, {name: kept[name] for name in texts if name in kept})
            for run, kept in self.snapshot(kind)
            if matches(run, where)
        )
        return islice(found, limit)

    def get(self, run_id: str) -> tuple[StoredRun, dict[str, str]]:
        """Return a run with all its texts, uncached."""
        return self._store.get(run_id)

    def experiment(self, name: str) -> Experiment | None:
        """Return an experiment, uncached."""
        return self._store.experiment(name)

    def experiments(self) -> list[Experiment]:
        """Return all experiments, uncached."""
        return self._store.experiments()

    def ensure_experiment(self, name: str) -> Experiment:
        """Return an experiment, created if missing."""
        return self._store.ensure_experiment(name)

    def record(self, experiment_id: str, run: NewRun, *, maybe_there: bool = False) -> str:
        """Record a run."""
        return self._store.record(experiment_id, run, maybe_there=maybe_there)

    def update(self, run_id: str, change: RunChange) -> None:
        """Update a run."""
        self._store.update(run_id, change)

    def touch(self, experiment_id: str) -> None:
        """Change the revision of an experiment."""
        self._store.touch(experiment_id)


SMALL = 256  # boards, judging status
COUNTS = 256  # at least; grows to the number of experiments
_COPIES = 10  # of one record; more than one is rare
LARGE = 8  # reports and answers, up to a few MB each
PAIRS = 32  # comparisons of two rows, up to a few hundred kB each
CHARTS = 96  # about 25 kB each
TABLES = 16  # prepared and rendered, half a MB for 300 rows


@dataclass(frozen=True)
class BoardQuery:
    """Options of a board, as for `tipbench compare`."""

    where: tuple[tuple[str, str], ...] = ()
    judge: str | None = None
    provisional: bool = False
    baseline: Pair | None = None
    by: Literal["model", "prompt"] | None = None
    cluster: Literal["persona"] | None = None

    @property
    def question(self) -> CellFilter:
        """The options that select cells."""
        return CellFilter(dict(self.where), self.judge, self.provisional)


@dataclass(frozen=True)
class ExperimentsQuery:
    """Filter and page of a list of experiments."""

    q: str = ""  # substring of the name, ignoring case
    limit: int = sys.maxsize
    after: str | None = None


@dataclass(frozen=True)
class ExperimentsPage:
    """A page of experiments with their cell counts by state, sorted by name."""

    items: tuple[dict[str, Any], ...] = ()
    next: str | None = None
    total: int = 0  # number of experiments, unfiltered


@dataclass(frozen=True)
class RunListQuery:
    """Filter and page of a list of runs."""

    where: tuple[tuple[str, str], ...] = ()
    kind: str = str(RunKind.CELL)
    limit: int = 50
    after: str | None = None
    superseded: bool = False


class Queries:
    """Cached read queries on a store. Thread-safe."""

    def __init__(self) -> None:
        self.snapshots = Cache(KEPT)
        self.counts = Cache(COUNTS)
        self.small = Cache(SMALL)
        self.large = Cache(LARGE)
        self.pairs = Cache(PAIRS)
        self.charts = Cache(CHARTS)
        self.tables = Cache(TABLES)

    def experiments(self, store: RunStore, ask: ExperimentsQuery) -> ExperimentsPage:
        """Return a page of tipbench experiments; cells are counted only for experiments on the page."""
        ours = sorted((each for each in store.experiments() if each.name.startswith(EXPERIMENT_PREFIX)), key=_by_name)
        self.counts.make_room(len(ours))
        wanted = ask.q.strip().casefold()
        found = [each for each in ours if wanted in each.name.casefold()]
        page, following = page_of(found, _by_name, limit=ask.limit, after=ask.after)
        few = len(ours) <= KEPT
        return ExperimentsPage(
            tuple(self._experiment_row(store, each, few=few) for each in page), following, total=len(ours)
        )

    def runs(self, store: RunStore, name: str, ask: RunListQuery) -> dict[str, Any]:
        """Return a page of an experiment's runs, newest first, without texts."""
        experiment = get_experiment(store, name)
        where = {"kind": ask.kind, **dict(ask.where)}
        found = [
            run
            for run in self.view(store, experiment).search(experiment.experiment_id, where=where)
            if ask.superseded or run.tags.get("superseded") != "true"
        ]
        page, following = page_of(found, _place, limit=ask.limit, after=ask.after)
        return {"items": [_run_row(experiment, run) for run in page], "next": following, "total": len(found)}

    def run(self, store: RunStore, name: str, run_id: str) -> dict[str, Any]:
        """Return a run of the experiment with all its texts. Raises NotFound."""
        experiment = get_experiment(store, name)
        try:
            run, texts = store.get(run_id)
        except MlflowError as exc:
            if exc.status == 404 and exc.code:
                raise _no_run(name, run_id) from exc
            raise
        if not _belongs(store, experiment, run):
            raise _no_run(name, run_id)
        return {**_run_row(experiment, run), "status": run.status, "texts": texts}

    def leaderboard(self, store: RunStore, name: str, ask: BoardQuery) -> Leaderboard:
        """Return the board, as `tipbench compare` computes it."""
        return self.board(store, get_experiment(store, name), ask)

    def answers(self, store: RunStore, name: str, ask: BoardQuery) -> tuple[ScenarioAnswers, ...]:
        """Return the answers of the board's pairs, by scenario."""
        experiment = get_experiment(store, name)

        def make() -> tuple[ScenarioAnswers, ...]:
            view, cells = self.view(store, experiment), self.cells(store, experiment, ask)
            return read_answers(view, experiment, self.board(store, experiment, ask), cells)

        return self.large.get(("answers", experiment.experiment_id, ask), revision(experiment), make)

    def report(self, store: RunStore, name: str, ask: BoardQuery) -> str:
        """Return the board as one HTML file, as written by `compare --html`."""
        from tipbench.compare.html import html_report

        experiment = get_experiment(store, name)
        return self.large.get(
            ("report", experiment.experiment_id, ask),
            revision(experiment),
            lambda: html_report(
                self.board(store, experiment, ask), self.answers(store, name, ask), self.judging(store, name)
            ),
        )

    def judging(self, store: RunStore, name: str) -> JudgingStatus:
        """Return the judging status: progress, judges and their reliability."""
        return self.judging_of(store, get_experiment(store, name))

    def judging_of(self, store: RunStore, experiment: Experiment) -> JudgingStatus:
        """Return the judging status of an already loaded experiment."""
        key = ("judging", experiment.experiment_id)
        view = self.view(store, experiment)
        return self.small.get(key, revision(experiment), lambda: judging_status(view, experiment))

    def board(self, store: RunStore, experiment: Experiment, ask: BoardQuery) -> Leaderboard:
        """Return the board of an already loaded experiment."""

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

    def cells(self, store: RunStore, experiment: Experiment, ask: BoardQuery) -> BoardCells:
        """Return the cells of a board; they do not depend on `baseline`, `by` or `cluster`."""
        key = ("cells", experiment.experiment_id, ask.where, ask.judge, ask.provisional)
        view = self.view(store, experiment)
        return self.large.get(
            key, revision(experiment), lambda: read_board(view, experiment.experiment_id, ask.question)
        )

    def _meant(self, store: RunStore, experiment: Experiment, ask: BoardQuery) -> Pair | None:
        """Return the only row spelled like an unknown baseline; slashes in names make MODEL/PROMPT ambiguous."""
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
        """Count cells in a snapshot, or in the store if caching many experiments would evict the snapshots in use."""
        key = ("snapshot", experiment.experiment_id, str(RunKind.CELL))
        kept = few or self.snapshots.has(key, revision(experiment))
        return count_cells(self.view(store, experiment) if kept else store, experiment.experiment_id)

    def view(self, store: RunStore, experiment: Experiment) -> SnapshotStore:
        """Return the store with this experiment's runs cached."""
        return SnapshotStore(store, experiment, self.snapshots)


def quote_path(value: object) -> str:
    """Quotes a path segment, including slashes."""
    return quote(str(value), safe="", errors="backslashreplace")


def experiment_path(name: str, *rest: str) -> str:
    """Returns the path of an experiment's page: experiment_path(name, "runs", run_id)."""
    return "/".join(["/experiments", *(quote_path(part) for part in (name, *rest))])


def get_experiment(store: RunStore, name: str) -> Experiment:
    """Return an experiment by name. Raises Invalid if the name is invalid, NotFound if it does not exist."""
    try:
        check_experiment_name(name)
    except ValueError as exc:
        raise Invalid(str(exc), path="path.experiment") from exc
    experiment = store.experiment(name)
    if experiment is None:
        raise NotFound(
            f"There is no experiment {name[:200]}. GET /api/bench/experiments lists all.",
            path="path.experiment",
        )
    return experiment


def _belongs(store: RunStore, experiment: Experiment, run: StoredRun) -> bool:
    """Whether the run was recorded in this experiment; MLflow returns runs of any experiment by id."""
    record = run.tags.get(RECORD_TAG)
    if record is None:
        return False
    found = store.search(experiment.experiment_id, where={RECORD_TAG: record}, limit=_COPIES)
    return any(each.run_id == run.run_id for each in found)


def run_link(experiment: Experiment, run_id: str) -> str | None:
    """Return the URL of the run's page in MLflow, or None."""
    return None if experiment.url is None else f"{experiment.url}/runs/{run_id}"


def _run_row(experiment: Experiment, run: StoredRun) -> dict[str, Any]:
    times: Mapping[str, int | None] = {"start_ms": run.start_ms, "end_ms": run.end_ms}
    return {**run_json(run), **times, "url": run_link(experiment, run.run_id)}


def _by_name(experiment: Experiment) -> SortKey:
    return SortKey(0, experiment.name)


def _place(run: StoredRun) -> SortKey:
    return SortKey(-run.start_ms, run.run_id)


def _no_run(name: str, run_id: str) -> NotFound:
    return NotFound(f"{name[:200]} has no run {run_id[:64]}. GET /api/bench/runs/… lists its runs.", path="path.run_id")
