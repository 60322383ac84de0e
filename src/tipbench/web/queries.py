"""Read queries of the panel, cached until the experiment changes, and the filters of a list of runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from tipbench.compare.answers import ScenarioAnswers, read_answers
from tipbench.compare.cells import BoardCells, read_board_cells
from tipbench.compare.leaderboard import Leaderboard
from tipbench.errors import CorruptText, MlflowError, TipbenchError, UsageError
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import RUBRIC, SCORES, read_scores
from tipbench.judge.sheet_store import DRIFT, FILLED, KEY, SHEET, SheetStatus
from tipbench.judge.status import JudgingStatus, judging_status
from tipbench.plan.collect_config import check_experiment_name
from tipbench.record.mlflow_wire import CELL_TAG, RECORD_TAG, REVISION_TAG, SUPERSEDED_TAG, matches
from tipbench.record.reader import (
    FILTERS,
    count_states,
    current_runs,
    list_experiments,
    run_json,
    run_values,
    stale_runs,
)
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import csv_text, iso, one_line, shorten
from tipbench.web.cache import Cache
from tipbench.web.errors import Invalid, NotFound, convert_option_errors, validate_part
from tipbench.web.forms import DEFAULT_LIMIT, Limit, Next, SortKey, page_of
from tipbench.workflows.board import BoardQuery, parse_filters

# A snapshot is all runs of one kind in an experiment. With 2400 runs it takes about 10 MB.
CACHED_EXPERIMENTS = 4  # whose snapshots fit in the cache together
SNAPSHOTS = 2 * CACHED_EXPERIMENTS  # a leaderboard needs the cells and the sheets
# Texts cached with the runs, by kind of run. MLflow returns them together with the runs, and leaderboards, answers and
# the judging status need them. Other texts, such as prompts, are read on demand.
_CACHED_TEXTS: Mapping[str, tuple[str, ...]] = {
    str(RunKind.CELL): (SCORES, CANDIDATES, RAW),
    str(RunKind.JUDGING): (SHEET, KEY, RUBRIC, FILLED, DRIFT),
}

RunWithTexts = tuple[StoredRun, Mapping[str, str]]  # texts by name
Snapshot = tuple[RunWithTexts, ...]


def revision(experiment: Experiment) -> str | None:
    """Return the experiment's revision, which changes with every write; None if it has none."""
    return experiment.tags.get(REVISION_TAG)


class SnapshotStore:
    """A RunStore that caches the runs of one experiment, and delegates everything else to another store."""

    def __init__(self, store: RunStore, experiment: Experiment, cache: Cache) -> None:
        self._store = store
        self._experiment = experiment
        self._cache = cache

    def snapshot(self, kind: str) -> Snapshot:
        """Return all runs of a kind, newest first."""
        experiment_id = self._experiment.experiment_id

        def newest_first(item: RunWithTexts) -> tuple[int, str]:
            run, _ = item
            return -run.start_ms, run.run_id

        def load() -> Snapshot:
            loaded: list[RunWithTexts] = []
            for run, texts in self._store.read(experiment_id, where={"kind": kind}, texts=_CACHED_TEXTS.get(kind, ())):
                loaded.append((run, texts))
                # Fill the cache of `read_scores` while MLflow prepares the next page.
                with suppress(CorruptText):  # raised again when the scores are used
                    read_scores(texts.get(SCORES))
            return tuple(sorted(loaded, key=newest_first))

        return self._cache.get(("snapshot", experiment_id, kind), revision(self._experiment), load)

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Search the snapshot if it covers the experiment and kind, else the store."""
        return (run for run, _ in self.read(experiment_id, where=where, texts=(), limit=limit))

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Read from the snapshot if it covers the experiment, kind and texts, else from the store."""
        kind = where.get("kind", "")
        covers_runs = experiment_id == self._experiment.experiment_id and kind in set(RunKind)
        covers_texts = set(texts) <= set(_CACHED_TEXTS.get(kind, ()))
        if not covers_runs or not covers_texts:
            return self._store.read(experiment_id, where=where, texts=texts, limit=limit)
        matching = (
            (run, {name: cached_texts[name] for name in texts if name in cached_texts})
            for run, cached_texts in self.snapshot(kind)
            if matches(run, where)
        )
        return islice(matching, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# Maximum number of entries in the other caches of `Queries`.
SMALL = 256  # leaderboards, judging status and other small values
COUNTS = 256  # cell counts; grows to the number of experiments
LARGE = 8  # reports, answers and cells of leaderboards, up to a few MB each
PAIRS = 32  # comparisons of two rows of a leaderboard, up to a few hundred kB each
CHARTS = 96  # about 25 kB each
TABLES = 16  # rendered leaderboards, half a MB for 300 rows

_MAX_COPIES = 10  # runs with the same record id; a repeated request to MLflow can create a second one


@dataclass(frozen=True)
class ExperimentsPage:
    """A page of experiments, sorted by name, with their numbers of cells by state."""

    items: tuple[dict[str, Any], ...] = ()
    next: str | None = None
    n_all: int = 0  # number of all experiments, not only the matching ones


RunSort = Literal["-started", "composite", "-composite"]
MAX_WHERE = 20  # number of values of `where`
# Maximum lengths in characters.
_MAX_WHERE_CHARS = 500
_MAX_VALUE = 250
_MAX_PREVIEW = 140  # the beginning of an answer in a list of runs
# Tag or param by field of RunFilters.
_FILTER_KEYS = {**FILTERS, "persona": "params.persona", "judge_pending": "judge_pending"}
_FilterValue = Annotated[str | None, Field(max_length=_MAX_VALUE)]


class RunFilters(BaseModel):
    """Query parameters of a list of runs."""

    model_config = ConfigDict(frozen=True)

    model: _FilterValue = None
    prompt: _FilterValue = None
    scenario: _FilterValue = None
    persona: _FilterValue = None
    state: RunState | None = None
    kind: RunKind = RunKind.CELL
    judge_pending: bool | None = Field(None, description="Whether the run waits for a judge.")
    superseded: bool = Field(False, description="Include runs replaced by a later attempt.")
    q: str | None = Field(None, max_length=_MAX_VALUE, description="Only answers with this text, ignoring case.")
    sort: RunSort = Field("-started", description="Order: newest first, or by composite, lowest or highest first.")
    where: list[str] = Field(
        [],
        max_length=MAX_WHERE,
        description="KEY=VALUE: any tag, or params.NAME; repeatable.",
        examples=["suite=tips"],
    )
    limit: Limit = DEFAULT_LIMIT
    next: Next = None

    @property
    def where_filters(self) -> dict[str, str]:
        """The filters on params and tags, by key. Raises Invalid if a key has two values."""
        texts = {key: _query_text(getattr(self, name)) for name, key in _FILTER_KEYS.items()}
        filters = {key: text for key, text in texts.items() if text is not None}
        with convert_option_errors("query"):
            where = parse_filters([text[:_MAX_WHERE_CHARS] for text in self.where], filters)
        return {"kind": str(self.kind), **dict(where)}

    @property
    def is_filtered(self) -> bool:
        """Whether any filter is set. `kind` and `superseded` do not count."""
        return any(getattr(self, name) is not None for name in (*_FILTER_KEYS, "q")) or bool(self.where)

    def query(self, **changes: object) -> str:
        """Return the filters, updated with `changes`, as a query string without default values.

        Lone surrogates are escaped, because UTF-8 cannot encode them.
        """
        values = self.model_copy(update=changes).model_dump(exclude_defaults=True)
        texts = {name: value if isinstance(value, list) else _query_text(value) for name, value in values.items()}
        return urlencode(texts, doseq=True, errors="backslashreplace")


RunsQuery = Annotated[RunFilters, Query()]


def filters_of(query: Mapping[str, Any]) -> RunFilters:
    """Parse the filters of a page's URL; empty form fields are ignored."""
    values = {name: value for name, value in query.items() if value not in ("", None) and name != "where"}
    where = [text for text in query.get("where", []) if text.strip()]
    return validate_part(RunFilters, {**values, "where": where}, "query")


def _query_text(value: object) -> str | None:
    """Return a value as in a query string: `true` and `false` for bool, None for None."""
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


class Queries:
    """Read queries on a store, with caches. Thread-safe."""

    def __init__(self) -> None:
        self.snapshots = Cache(SNAPSHOTS)
        self.counts = Cache(COUNTS)
        self.small_cache = Cache(SMALL)
        self.large_cache = Cache(LARGE)
        self.pairs = Cache(PAIRS)
        self.charts = Cache(CHARTS)
        self.tables = Cache(TABLES)

    def experiments(
        self, store: RunStore, q: str = "", *, limit: int = sys.maxsize, after: str | None = None
    ) -> ExperimentsPage:
        """Return a page of tipbench experiments whose name contains `q`, ignoring case.

        Cells are counted only for the experiments of the page.
        """
        all_experiments = list_experiments(store)
        self.counts.make_room(len(all_experiments))
        matching = [experiment for experiment in all_experiments if q.strip().casefold() in experiment.name.casefold()]
        page, next_cursor = page_of(matching, lambda each: SortKey(0, each.name), limit=limit, after=after)
        # Loading the snapshots of more experiments would evict those in use.
        load_snapshots = len(all_experiments) <= CACHED_EXPERIMENTS
        rows = tuple(self._experiment_row(store, experiment, load_snapshots=load_snapshots) for experiment in page)
        return ExperimentsPage(rows, next_cursor, n_all=len(all_experiments))

    def runs(self, store: RunStore, name: str, filters: RunFilters) -> dict[str, Any]:
        """Return a page of an experiment's runs, without texts."""
        experiment = get_experiment(store, name)
        matching = self.matching_runs(store, experiment, filters)
        page, next_cursor = page_of(matching, partial(_sort_key, filters.sort), limit=filters.limit, after=filters.next)
        return {"items": [_run_row(experiment, run) for run in page], "next": next_cursor, "total": len(matching)}

    def matching_runs(self, store: RunStore, experiment: Experiment, filters: RunFilters) -> list[StoredRun]:
        """Return all matching runs, in the order of `filters.sort`."""
        where = filters.where_filters
        cached_store = self.cached_store(store, experiment)
        if filters.q and filters.kind is RunKind.CELL:
            cells_with_texts = cached_store.read(experiment.experiment_id, where=where, texts=(CANDIDATES, RAW))
            q = filters.q.casefold()
            runs: Iterator[StoredRun] = (run for run, texts in cells_with_texts if q in answer_text(texts).casefold())
        else:
            runs = cached_store.search(experiment.experiment_id, where=where)
        if not filters.superseded:
            runs = (run for run in runs if run.tags.get(SUPERSEDED_TAG) != "true")
        return sorted(runs, key=partial(_sort_key, filters.sort))

    def run(self, store: RunStore, name: str, run_id: str) -> dict[str, Any]:
        """Return a run of the experiment with all its texts. Raises NotFound if the experiment does not have it."""
        experiment = get_experiment(store, name)
        not_found = NotFound(
            f"{name[:200]} has no run {run_id[:64]}. GET /api/bench/runs/… lists its runs.", path="path.run_id"
        )
        try:
            run, texts = store.get(run_id)
        except MlflowError as exc:
            if exc.status == 404 and exc.code:  # without a code, the 404 is not from MLflow but from a proxy
                raise not_found from exc
            raise
        # MLflow finds a run by its id in any experiment, and StoredRun has no experiment id. So search for the run in
        # this experiment.
        record_id = run.tags.get(RECORD_TAG)
        if record_id is None:
            raise not_found
        copies = store.search(experiment.experiment_id, where={RECORD_TAG: record_id}, limit=_MAX_COPIES)
        if run.run_id not in {copy.run_id for copy in copies}:
            raise not_found
        return {**_run_row(experiment, run), "status": run.status, "texts": texts}

    def answers(self, store: RunStore, name: str, query: BoardQuery) -> tuple[ScenarioAnswers, ...]:
        """Return the answers of the pairs on the leaderboard, by scenario."""
        experiment = get_experiment(store, name)

        def load() -> tuple[ScenarioAnswers, ...]:
            board = self.board(store, experiment, query)
            board_cells = self.cells(store, experiment, query)
            return read_answers(self.cached_store(store, experiment), experiment, board, board_cells)

        return self.large_cache.get(("answers", experiment.experiment_id, query), revision(experiment), load)

    def report(self, store: RunStore, name: str, query: BoardQuery) -> str:
        """Return the leaderboard as one HTML file, as written by `compare --html`."""
        from tipbench.compare.html import html_report

        experiment = get_experiment(store, name)

        def make() -> str:
            board = self.board(store, experiment, query)
            judging = self.judging(store, experiment)
            return html_report(board, self.answers(store, name, query), judging)

        return self.large_cache.get(("report", experiment.experiment_id, query), revision(experiment), make)

    def judging(self, store: RunStore, experiment: Experiment) -> JudgingStatus:
        """Return the judging status: progress, judges and their reliability."""
        key = ("judging", experiment.experiment_id)
        cached_store = self.cached_store(store, experiment)
        return self.small_cache.get(key, revision(experiment), lambda: judging_status(cached_store, experiment))

    def board(self, store: RunStore, experiment: Experiment, query: BoardQuery) -> Leaderboard:
        """Return the leaderboard, as `tipbench compare` computes it."""

        def load() -> Leaderboard:
            cached_store = self.cached_store(store, experiment)
            try:
                board, _ = query.read(cached_store, experiment)
            except UsageError:
                if query.baseline is None:
                    raise
                # Names may contain slashes, so MODEL/PROMPT may have been split at the wrong one. If exactly one row
                # is spelled like the baseline, use that row.
                pairs = self.board(store, experiment, replace(query, baseline=None)).matrix.pairs
                spelling = str(query.baseline).strip()
                same_spelling = [pair for pair in pairs if str(pair).strip() == spelling and pair != query.baseline]
                if len(same_spelling) != 1:
                    raise
                board, _ = replace(query, baseline=same_spelling[0]).read(cached_store, experiment)
            return board

        return self.small_cache.get(("board", experiment.experiment_id, query), revision(experiment), load)

    def cells(self, store: RunStore, experiment: Experiment, query: BoardQuery) -> BoardCells:
        """Return the cells of a leaderboard; they do not depend on `baseline`, `by` or `cluster`."""
        key = ("cells", experiment.experiment_id, query.where, query.judge, query.provisional, query.exclude)
        cached_store = self.cached_store(store, experiment)

        def load() -> BoardCells:
            return read_board_cells(cached_store, experiment.experiment_id, query.cell_filter)

        return self.large_cache.get(key, revision(experiment), load)

    def _experiment_row(self, store: RunStore, experiment: Experiment, *, load_snapshots: bool) -> dict[str, Any]:
        """Return an experiment with its numbers of cells by state, and its leader.

        Without `load_snapshots`, the leader is None if neither the cells nor the board are cached.
        """
        key = ("snapshot", experiment.experiment_id, str(RunKind.CELL))
        use_snapshot = load_snapshots or self.snapshots.has(key, revision(experiment))
        source = self.cached_store(store, experiment) if use_snapshot else store
        held_sheets = {"kind": str(RunKind.JUDGING), "sheet_status": str(SheetStatus.HELD)}

        def count() -> dict[str, Any]:
            runs = current_runs(source, experiment.experiment_id, where={})
            newest_ms = max((run.end_ms or run.start_ms for run in runs), default=None)
            return {
                **vars(count_states(runs)),
                "provisional": sum("provisional_judge" in run.tags for run in runs),
                "held": sum(1 for _ in store.search(experiment.experiment_id, where=held_sheets)),
                "models": sorted({run.params.get("model", "") for run in runs} - {""}),
                "changed": iso(newest_ms / 1000) if newest_ms else None,
            }

        counts = self.counts.get(experiment.experiment_id, revision(experiment), count)
        has_scores = counts["judged"] > 0 or counts["provisional"] > 0
        board_is_cached = self.small_cache.has(("board", experiment.experiment_id, BoardQuery()), revision(experiment))
        leader: dict[str, Any] | None = None
        if has_scores and (use_snapshot or board_is_cached):
            with suppress(TipbenchError):  # the page of the leaderboard shows the error
                board = self.board(store, experiment, BoardQuery())
                if pair := board.ranking.leader:
                    leader = {
                        "model": pair.model,
                        "prompt_version": pair.prompt,
                        "decided": board.ranking.decided,
                        "provisional": board.provisional,
                        "beats_reference": board.ranking.beats_reference,
                    }
        return {"experiment": experiment.name, **counts, "url": experiment.url, "leader": leader}

    def cached_store(self, store: RunStore, experiment: Experiment) -> RunStore:
        """Return the store with this experiment's runs cached."""
        return cast("RunStore", SnapshotStore(store, experiment, self.snapshots))


def quote_path(value: object) -> str:
    """Quote a path segment, including slashes. Lone surrogates are escaped, because UTF-8 cannot encode them."""
    return quote(str(value), safe="", errors="backslashreplace")


def experiment_path(name: str, *rest: str) -> str:
    """Return the path of a page of an experiment, for example `experiment_path(name, "runs", run_id)`."""
    return "/".join(["/experiments", *(quote_path(part) for part in (name, *rest))])


def check_name(name: str, path: str = "path.experiment") -> None:
    """Raise Invalid unless the name is valid for an experiment; `path` is the path of the name in the request."""
    try:
        check_experiment_name(name)
    except ValueError as exc:
        raise Invalid(str(exc), path=path) from exc


def get_experiment(store: RunStore, name: str) -> Experiment:
    """Return an experiment by name. Raises Invalid if the name is invalid, NotFound if it does not exist."""
    check_name(name)
    experiment = store.experiment(name)
    if experiment is None:
        raise NotFound(
            f"There is no experiment {name[:200]}. GET /api/bench/experiments lists all.", path="path.experiment"
        )
    return experiment


def _run_row(experiment: Experiment, run: StoredRun) -> dict[str, Any]:
    return {**run_json(run), "start_ms": run.start_ms, "end_ms": run.end_ms, "url": experiment.run_url(run.run_id)}


def answer_text(texts: Mapping[str, str]) -> str:
    """Return a cell's tips and rationales, one per line; the raw answer if it has no tips."""
    try:
        tips = [f"{tip['tip']}\n{tip['rationale']}" for tip in json.loads(texts.get(CANDIDATES, "[]"))]
    except (ValueError, KeyError, TypeError):
        tips = []
    return "\n".join(tips) or texts.get(RAW, "")


def shown_composite(metrics: Mapping[str, float | None]) -> float | None:
    """Return the composite, or the provisional one if there is none."""
    composite = metrics.get("composite")
    return composite if composite is not None else metrics.get("provisional_composite")


def _sort_key(sort: RunSort, run: StoredRun) -> SortKey:
    if sort == "-started":
        return SortKey(-run.start_ms, run.run_id)
    composite = shown_composite(run.metrics)
    if composite is None:
        return SortKey(sys.maxsize, run.run_id)  # runs without scores are last in both orders
    millionths = round(composite * 1e6)  # sort keys are whole numbers
    return SortKey(-millionths if sort == "-composite" else millionths, run.run_id)


CHOICES = ("model", "prompt_version", "scenario", "persona")  # params offered as filters
MAX_CHOICES = 300
_CELL_PARAMS = ("model", "prompt_version", "scenario", "repeat")
_COLUMNS = (
    "run_id", "kind", "model", "prompt", "scenario", "persona", "repeat", "state", "tips", "composite",
    "provisional_composite", "format_ok", "overlong", "diversity", "latency_s", "tokens_per_s", "started", "host",
    "failure", "superseded", "conditions", "model_digest",
)  # fmt: skip


@dataclass(frozen=True)
class Neighbours:
    """A run's position in a list, and the ids of the runs before and after it."""

    previous: str | None = None
    next: str | None = None
    position: int | None = None  # starting at 1; None if the run is not in the list
    total: int = 0


@dataclass(frozen=True)
class Related:
    """Other runs of the same cell, newest first, and its collect."""

    stale: bool = False  # whether the run itself is stale
    other_attempts: tuple[StoredRun, ...] = ()  # with the same cell_key
    other_versions: tuple[StoredRun, ...] = ()  # the same conditions, another version of model, prompt or scenario
    collection: StoredRun | None = None  # the run of the collect that recorded the cell


class RunQueries:
    """Queries on the runs of one experiment, from the cached snapshot."""

    def __init__(self, queries: Queries, store: RunStore, name: str) -> None:
        self.experiment = get_experiment(store, name)
        self._queries = queries
        self._store = store
        self._cached_store = queries.cached_store(store, self.experiment)

    def choices(self, kind: str) -> dict[str, list[str]]:
        """Return the values that occur, by param; at most MAX_CHOICES each."""
        key = ("choices", self.experiment.experiment_id, kind)

        def read() -> dict[str, list[str]]:
            runs = list(self._runs(kind))
            values = {name: {run.params[name] for run in runs if name in run.params} for name in CHOICES}
            return {name: sorted(choices)[:MAX_CHOICES] for name, choices in values.items()}

        return self._queries.small_cache.get(key, revision(self.experiment), read)

    def previews(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the beginning of the answer of each cell in `run_ids`."""
        where = {"kind": str(RunKind.CELL)}
        cells_with_texts = self._cached_store.read(self.experiment.experiment_id, where=where, texts=(CANDIDATES, RAW))
        listed = frozenset(run_ids)
        return {
            run.run_id: shorten(one_line(answer_text(texts)), _MAX_PREVIEW)
            for run, texts in cells_with_texts
            if run.run_id in listed
        }

    def stale(self) -> frozenset[str]:
        """Return the ids of the stale cells."""
        key = ("stale", self.experiment.experiment_id)

        def read() -> frozenset[str]:
            cell_runs = self._runs(str(RunKind.CELL))
            return frozenset(stale_runs([run for run in cell_runs if run.tags.get(SUPERSEDED_TAG) != "true"]))

        return self._queries.small_cache.get(key, revision(self.experiment), read)

    def neighbours(self, filters: RunFilters, run_id: str) -> Neighbours:
        """Return the neighbours of a run in the list of the runs that match the filters."""
        run_ids = [run.run_id for run in self._queries.matching_runs(self._store, self.experiment, filters)]
        if run_id not in run_ids:
            return Neighbours(total=len(run_ids))
        index = run_ids.index(run_id)
        previous_id = run_ids[index - 1] if index > 0 else None
        next_id = run_ids[index + 1] if index + 1 < len(run_ids) else None
        return Neighbours(previous_id, next_id, position=index + 1, total=len(run_ids))

    def related(self, run: Mapping[str, Any]) -> Related:
        """Return the runs related to a cell."""
        params, tags, run_id = run["params"], run["tags"], run["run_id"]
        cell_key, collection_id = tags.get(CELL_TAG), tags.get("collection")
        others = [other for other in self._runs(str(RunKind.CELL)) if other.run_id != run_id]
        any_version = [
            other
            for other in others
            if other.tags.get("conditions") == tags.get("conditions")
            and all(other.params.get(name) == params.get(name) for name in _CELL_PARAMS)
        ]
        collections = self._runs(str(RunKind.COLLECTION), {RECORD_TAG: collection_id}) if collection_id else ()
        return Related(
            stale=run_id in self.stale(),
            other_attempts=tuple(
                other for other in others if cell_key is not None and other.tags.get(CELL_TAG) == cell_key
            ),
            other_versions=tuple(other for other in any_version if other.tags.get(CELL_TAG) != cell_key),
            collection=next(iter(collections), None),
        )

    def _runs(self, kind: str, where: Mapping[str, str] | None = None) -> Iterable[StoredRun]:
        return self._cached_store.search(self.experiment.experiment_id, where={"kind": kind, **(where or {})})


def runs_csv(queries: Queries, store: RunStore, name: str, filters: RunFilters) -> str:
    """Return all matching runs as CSV, in the order of the list. Numbers are not rounded."""
    rows = map(run_values, queries.matching_runs(store, get_experiment(store, name), filters))
    return csv_text(_COLUMNS, [[values[column] for column in _COLUMNS] for values in rows])
