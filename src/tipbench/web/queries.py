"""Read queries of the panel, cached per revision of an experiment, and the filters of a list of runs."""

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
from tipbench.compare.cells import BoardCells, read_board
from tipbench.compare.leaderboard import Leaderboard
from tipbench.errors import CorruptText, MlflowError, TipbenchError, UsageError
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import RUBRIC, SCORES, read_scores
from tipbench.judge.sheet_store import ANSWERS, DRIFT, KEY, SHEET, SheetStatus
from tipbench.judge.status import JudgingStatus, judging_status
from tipbench.plan.config import check_experiment_name
from tipbench.record.mlflow_wire import CELL_TAG, RECORD_TAG, REVISION_TAG, SUPERSEDED_TAG, matches
from tipbench.record.reader import FILTERS, cells, count_states, experiments, run_json, run_values, stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import csv_text, iso, one_line, shorten
from tipbench.web.cache import Cache
from tipbench.web.errors import Invalid, NotFound, checked, options_at
from tipbench.web.forms import DEFAULT_LIMIT, MAX_LIMIT, SortKey, page_of
from tipbench.workflows.board import BoardQuery, parse_filters

SNAPSHOTS = 4  # experiments whose runs are cached; four of 2400 cells take about 40 MB
# Texts cached with the runs: those of boards, answers and the judging status, which MLflow sends along with the runs.
# The prompts and rubrics of cells are read on demand.
_TEXTS: Mapping[str, tuple[str, ...]] = {
    str(RunKind.CELL): (SCORES, CANDIDATES, RAW),
    str(RunKind.JUDGING): (SHEET, KEY, RUBRIC, ANSWERS, DRIFT),
}

Snapshot = tuple[tuple[StoredRun, Mapping[str, str]], ...]


def revision(experiment: Experiment) -> str | None:
    """Return the experiment's revision, which changes with every write; None if it has none."""
    return experiment.tags.get(REVISION_TAG)


class SnapshotStore:
    """A RunStore that caches the runs of one experiment; its other methods are those of the underlying store."""

    def __init__(self, store: RunStore, experiment: Experiment, cache: Cache) -> None:
        self._store = store
        self._experiment = experiment
        self._cache = cache

    def snapshot(self, kind: str) -> Snapshot:
        """Return all runs of a kind, newest first."""
        key, version = ("snapshot", self._experiment.experiment_id, kind), revision(self._experiment)

        def load() -> Snapshot:
            found = []
            for each in self._store.read(
                self._experiment.experiment_id, where={"kind": kind}, texts=_TEXTS.get(kind, ())
            ):
                found.append(each)
                with suppress(CorruptText):  # raised again when the scores are used
                    read_scores(each[1].get(SCORES))  # parsed and cached while MLflow prepares the next page
            return tuple(sorted(found, key=lambda each: (-each[0].start_ms, each[0].run_id)))

        return self._cache.get(key, version, load)

    def search(self, experiment_id: str, *, where: Mapping[str, str], limit: int | None = None) -> Iterator[StoredRun]:
        """Search the snapshot if it covers the experiment and kind, else the store."""
        return (run for run, _ in self.read(experiment_id, where=where, texts=(), limit=limit))

    def read(
        self, experiment_id: str, *, where: Mapping[str, str], texts: Collection[str], limit: int | None = None
    ) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        """Read from the snapshot if it covers the experiment, kind and texts, else from the store."""
        kind = where.get("kind", "")
        has_runs = experiment_id == self._experiment.experiment_id and kind in set(RunKind)
        has_texts = set(texts) <= set(_TEXTS.get(kind, ()))
        if not has_runs or not has_texts:
            return self._store.read(experiment_id, where=where, texts=texts, limit=limit)
        found = (
            (run, {name: cached[name] for name in texts if name in cached})
            for run, cached in self.snapshot(kind)
            if matches(run, where)
        )
        return islice(found, limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# Number of values in each cache of `Queries`.
SMALL = 256  # boards, judging status
COUNTS = 256  # cell counts; grows to the number of experiments
LARGE = 8  # reports and answers, up to a few MB each
PAIRS = 32  # comparisons of two rows, up to a few hundred kB each
CHARTS = 96  # about 25 kB each
TABLES = 16  # rendered boards, half a MB for 300 rows

_MAX_COPIES = 10  # runs with the same record id; more than one is rare


@dataclass(frozen=True)
class ExperimentsPage:
    """A page of experiments with their cell counts by state, sorted by name."""

    items: tuple[dict[str, Any], ...] = ()
    next: str | None = None
    total: int = 0  # number of experiments, unfiltered


RunSort = Literal["-started", "composite", "-composite"]
MAX_CONDITIONS = 20  # values of `where`
# Maximum number of characters.
_MAX_CONDITION = 500
_MAX_VALUE = 250
_MAX_CURSOR = 400
_MAX_PREVIEW = 140  # of an answer in the list
_FILTER_KEYS = {**FILTERS, "persona": "params.persona", "judge_pending": "judge_pending"}
_Text = Annotated[str | None, Field(max_length=_MAX_VALUE)]


class RunFilters(BaseModel):
    """Query parameters of a list of runs."""

    model_config = ConfigDict(frozen=True)

    model: _Text = None
    prompt: _Text = None
    scenario: _Text = None
    persona: _Text = None
    state: RunState | None = None
    kind: RunKind = RunKind.CELL
    judge_pending: bool | None = Field(None, description="Whether the run waits for a judge.")
    superseded: bool = Field(False, description="Include runs replaced by a later attempt.")
    q: str | None = Field(None, max_length=_MAX_VALUE, description="Only answers with this text, ignoring case.")
    sort: RunSort = Field("-started", description="Order: newest first, or by composite, lowest or highest first.")
    where: list[str] = Field(
        [],
        max_length=MAX_CONDITIONS,
        description="KEY=VALUE: any tag, or params.NAME; repeatable.",
        examples=["suite=tips"],
    )
    limit: int = Field(
        DEFAULT_LIMIT, ge=1, le=MAX_LIMIT, description=f"Maximum number of items per page, up to {MAX_LIMIT}."
    )
    next: str | None = Field(
        None, max_length=_MAX_CURSOR, description="The `next` value of the previous page; omit it for the first page."
    )

    @property
    def conditions(self) -> dict[str, str]:
        """The filters on params and tags, by key. Raises Invalid if a key has two values."""
        named = {name: _text(getattr(self, name)) for name in _FILTER_KEYS}
        filters = {_FILTER_KEYS[name]: value for name, value in named.items() if value is not None}
        with options_at("query"):
            where = parse_filters([text[:_MAX_CONDITION] for text in self.where], filters)
        return {"kind": str(self.kind), **dict(where)}

    @property
    def narrowed(self) -> bool:
        """Whether any filter other than kind is set."""
        return any(getattr(self, name) is not None for name in (*_FILTER_KEYS, "q")) or bool(self.where)

    def query(self, **changes: object) -> str:
        """Return the filters with `changes` as a query string; defaults are omitted."""
        values = {**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        defaults = {name: field.get_default() for name, field in type(self).model_fields.items()}
        pairs = [
            (name, _text(each))
            for name, value in values.items()
            if value != defaults[name]
            for each in (value if isinstance(value, list) else [value])
        ]
        return urlencode([(name, text) for name, text in pairs if text is not None], errors="backslashreplace")


RunsQuery = Annotated[RunFilters, Query()]


def filters_of(query: Mapping[str, Any]) -> RunFilters:
    """Parse the filters of a page's URL; empty form fields are ignored."""
    values = {name: value for name, value in query.items() if value not in ("", None) and name != "where"}
    where = [text for text in query.get("where", []) if text.strip()]
    return checked(RunFilters, {**values, "where": where}, "query")


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


class Queries:
    """Cached read queries on a store. Thread-safe."""

    def __init__(self) -> None:
        self.snapshots = Cache(SNAPSHOTS)
        self.counts = Cache(COUNTS)
        self.small = Cache(SMALL)
        self.large = Cache(LARGE)
        self.pairs = Cache(PAIRS)
        self.charts = Cache(CHARTS)
        self.tables = Cache(TABLES)

    def experiments(
        self, store: RunStore, q: str = "", *, limit: int = sys.maxsize, after: str | None = None
    ) -> ExperimentsPage:
        """Return a page of tipbench experiments whose name contains `q`, ignoring case.

        Cells are counted only for experiments on the page.
        """
        known = experiments(store)
        self.counts.make_room(len(known))
        matching = [each for each in known if q.strip().casefold() in each.name.casefold()]
        page, following = page_of(matching, lambda each: SortKey(0, each.name), limit=limit, after=after)
        all_fit = len(known) <= SNAPSHOTS
        rows = tuple(self._experiment_row(store, each, load_snapshot=all_fit) for each in page)
        return ExperimentsPage(rows, following, total=len(known))

    def runs(self, store: RunStore, name: str, filters: RunFilters) -> dict[str, Any]:
        """Return a page of an experiment's runs, without texts."""
        experiment = get_experiment(store, name)
        found = self.found_runs(store, experiment, filters)
        page, following = page_of(found, partial(_sort_key, filters.sort), limit=filters.limit, after=filters.next)
        return {"items": [_run_row(experiment, run) for run in page], "next": following, "total": len(found)}

    def found_runs(self, store: RunStore, experiment: Experiment, filters: RunFilters) -> list[StoredRun]:
        """Return all matching runs, in the order of the filters."""
        where, view = filters.conditions, self.view(store, experiment)
        if filters.q and filters.kind is RunKind.CELL:
            read = view.read(experiment.experiment_id, where=where, texts=(CANDIDATES, RAW))
            wanted = filters.q.casefold()
            found: Iterator[StoredRun] = (run for run, texts in read if wanted in answer_text(texts).casefold())
        else:
            found = view.search(experiment.experiment_id, where=where)
        if not filters.superseded:
            found = (run for run in found if run.tags.get(SUPERSEDED_TAG) != "true")
        return sorted(found, key=partial(_sort_key, filters.sort))

    def run(self, store: RunStore, name: str, run_id: str) -> dict[str, Any]:
        """Return a run of the experiment with all its texts. Raises NotFound."""
        experiment = get_experiment(store, name)
        missing = NotFound(
            f"{name[:200]} has no run {run_id[:64]}. GET /api/bench/runs/… lists its runs.", path="path.run_id"
        )
        try:
            run, texts = store.get(run_id)
        except MlflowError as exc:
            if exc.status == 404 and exc.code:
                raise missing from exc
            raise
        # MLflow returns a run of any experiment: check that this experiment has the run.
        record = run.tags.get(RECORD_TAG)
        if record is None:
            raise missing
        copies = store.search(experiment.experiment_id, where={RECORD_TAG: record}, limit=_MAX_COPIES)
        if run.run_id not in {copy.run_id for copy in copies}:
            raise missing
        return {**_run_row(experiment, run), "status": run.status, "texts": texts}

    def leaderboard(self, store: RunStore, name: str, query: BoardQuery) -> Leaderboard:
        """Return the board, as `tipbench compare` computes it."""
        return self.board(store, get_experiment(store, name), query)

    def answers(self, store: RunStore, name: str, query: BoardQuery) -> tuple[ScenarioAnswers, ...]:
        """Return the answers of the board's pairs, by scenario."""
        experiment = get_experiment(store, name)

        def make() -> tuple[ScenarioAnswers, ...]:
            view, cells = self.view(store, experiment), self.cells(store, experiment, query)
            return read_answers(view, experiment, self.board(store, experiment, query), cells)

        return self.large.get(("answers", experiment.experiment_id, query), revision(experiment), make)

    def report(self, store: RunStore, name: str, query: BoardQuery) -> str:
        """Return the board as one HTML file, as written by `compare --html`."""
        from tipbench.compare.html import html_report

        experiment = get_experiment(store, name)
        return self.large.get(
            ("report", experiment.experiment_id, query),
            revision(experiment),
            lambda: html_report(
                self.board(store, experiment, query), self.answers(store, name, query), self.judging(store, name)
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

    def board(self, store: RunStore, experiment: Experiment, query: BoardQuery) -> Leaderboard:
        """Return the board of an already loaded experiment."""

        def make() -> Leaderboard:
            view = self.view(store, experiment)
            try:
                return query.read(view, experiment)[0]
            except UsageError:
                if query.baseline is None:
                    raise
                # Slashes in names make MODEL/PROMPT ambiguous: if one row only is spelled like the baseline, use it.
                pairs = self.board(store, experiment, replace(query, baseline=None)).matrix.pairs
                spelling = str(query.baseline).strip()
                same_spelling = [pair for pair in pairs if str(pair).strip() == spelling and pair != query.baseline]
                if len(same_spelling) != 1:
                    raise
                return replace(query, baseline=same_spelling[0]).read(view, experiment)[0]

        return self.small.get(("board", experiment.experiment_id, query), revision(experiment), make)

    def cells(self, store: RunStore, experiment: Experiment, query: BoardQuery) -> BoardCells:
        """Return the cells of a board; they do not depend on `baseline`, `by` or `cluster`."""
        key = ("cells", experiment.experiment_id, query.where, query.judge, query.provisional, query.exclude)
        view = self.view(store, experiment)
        return self.large.get(
            key, revision(experiment), lambda: read_board(view, experiment.experiment_id, query.cell_filter)
        )

    def _experiment_row(self, store: RunStore, experiment: Experiment, *, load_snapshot: bool) -> dict[str, Any]:
        """Return an experiment with its number of cells by state, and its leader if the board is quickly available.

        Cells are counted in the cached runs if there are any, or if `load_snapshot`. Otherwise they are read from the
        store: caching the runs of many experiments would evict those in use.
        """
        key = ("snapshot", experiment.experiment_id, str(RunKind.CELL))
        use_snapshot = load_snapshot or self.snapshots.has(key, revision(experiment))
        source = self.view(store, experiment) if use_snapshot else store
        held = {"kind": str(RunKind.JUDGING), "sheet_status": str(SheetStatus.HELD)}

        def count() -> dict[str, Any]:
            runs = cells(source, experiment.experiment_id, {})
            newest = max((run.end_ms or run.start_ms for run in runs), default=None)
            return {
                **vars(count_states(runs)),
                "provisional": sum("provisional_judge" in run.tags for run in runs),
                "held": sum(1 for _ in store.search(experiment.experiment_id, where=held)),
                "models": sorted({run.params.get("model", "") for run in runs} - {""}),
                "changed": iso(newest / 1000) if newest else None,
            }

        found = self.counts.get(experiment.experiment_id, revision(experiment), count)
        scored = found["judged"] or found["provisional"]
        has_board = self.small.has(("board", experiment.experiment_id, BoardQuery()), revision(experiment))
        leader: dict[str, Any] | None = None
        if scored and (use_snapshot or has_board):
            with suppress(TipbenchError):  # shown on the board's page
                board = self.board(store, experiment, BoardQuery())
                if pair := board.ranking.leader:
                    leader = {
                        "model": pair.model,
                        "prompt_version": pair.prompt,
                        "decided": board.ranking.decided,
                        "provisional": board.provisional,
                        "beats_reference": board.ranking.beats_reference,
                    }
        return {"experiment": experiment.name, **found, "url": experiment.url, "leader": leader}

    def view(self, store: RunStore, experiment: Experiment) -> RunStore:
        """Return the store with this experiment's runs cached."""
        return cast("RunStore", SnapshotStore(store, experiment, self.snapshots))


def quote_path(value: object) -> str:
    """Quote a path segment, including slashes."""
    return quote(str(value), safe="", errors="backslashreplace")


def experiment_path(name: str, *rest: str) -> str:
    """Return the path of an experiment's page: experiment_path(name, "runs", run_id)."""
    return "/".join(["/experiments", *(quote_path(part) for part in (name, *rest))])


def check_name(name: str, path: str = "path.experiment") -> None:
    """Raise Invalid unless the name is valid for an experiment; `path` is its place in the request."""
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
            f"There is no experiment {name[:200]}. GET /api/bench/experiments lists all.",
            path="path.experiment",
        )
    return experiment


def _run_row(experiment: Experiment, run: StoredRun) -> dict[str, Any]:
    times: Mapping[str, int | None] = {"start_ms": run.start_ms, "end_ms": run.end_ms}
    return {**run_json(run), **times, "url": experiment.run_url(run.run_id)}


def answer_text(texts: Mapping[str, str]) -> str:
    """Return a cell's tips, one per line; the raw answer if it has no tips."""
    try:
        tips = [f"{tip['tip']}\n{tip['rationale']}" for tip in json.loads(texts.get(CANDIDATES, "[]"))]
    except (ValueError, KeyError, TypeError):
        tips = []
    return "\n".join(tips) or texts.get(RAW, "")


def shown_composite(metrics: Mapping[str, float | None]) -> float | None:
    """Return the composite that counts, else the provisional one."""
    counted = metrics.get("composite")
    return counted if counted is not None else metrics.get("provisional_composite")


def _sort_key(sort: RunSort, run: StoredRun) -> SortKey:
    if sort == "-started":
        return SortKey(-run.start_ms, run.run_id)
    composite = shown_composite(run.metrics)
    if composite is None:
        return SortKey(sys.maxsize, run.run_id)  # unknown scores last in both orders
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

    newer: str | None = None
    older: str | None = None
    place: int | None = None  # from 1; None if the run is not in the list
    total: int = 0


@dataclass(frozen=True)
class Related:
    """Runs related to a cell, newest first; the run itself is not among them."""

    stale: bool = False  # the model, prompt or scenario of this name has changed since
    tries: tuple[StoredRun, ...] = ()  # failures and retries: the same cell_key
    builds: tuple[StoredRun, ...] = ()  # the same cell and conditions with another version of model, prompt or scenario
    collection: StoredRun | None = None  # the collect that recorded it


class RunQueries:
    """Queries on the runs of one experiment, from the cached snapshot."""

    def __init__(self, queries: Queries, store: RunStore, name: str) -> None:
        self.experiment = get_experiment(store, name)
        self._queries = queries
        self._store = store
        self._view = queries.view(store, self.experiment)

    def choices(self, kind: str) -> dict[str, list[str]]:
        """Return the values to filter by, per param."""
        key = ("choices", self.experiment.experiment_id, kind)

        def read() -> dict[str, list[str]]:
            runs = list(self._runs(kind))
            values = {name: {run.params[name] for run in runs if name in run.params} for name in CHOICES}
            return {name: sorted(found)[:MAX_CHOICES] for name, found in values.items()}

        return self._queries.small.get(key, revision(self.experiment), read)

    def previews(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the beginning of the answer of each cell in `run_ids`."""
        where = {"kind": str(RunKind.CELL)}
        read = self._view.read(self.experiment.experiment_id, where=where, texts=(CANDIDATES, RAW))
        wanted = frozenset(run_ids)
        return {
            run.run_id: shorten(one_line(answer_text(texts)), _MAX_PREVIEW)
            for run, texts in read
            if run.run_id in wanted
        }

    def stale(self) -> frozenset[str]:
        """Return the ids of cells replaced by a newer version of their model, prompt or scenario."""
        key = ("stale", self.experiment.experiment_id)

        def read() -> frozenset[str]:
            cells = self._runs(str(RunKind.CELL))
            return frozenset(stale_runs([run for run in cells if run.tags.get(SUPERSEDED_TAG) != "true"]))

        return self._queries.small.get(key, revision(self.experiment), read)

    def neighbours(self, filters: RunFilters, run_id: str) -> Neighbours:
        """Return the position and neighbours of a run in the list of the filters."""
        found = [run.run_id for run in self._queries.found_runs(self._store, self.experiment, filters)]
        if run_id not in found:
            return Neighbours(total=len(found))
        index = found.index(run_id)
        older = found[index + 1] if index + 1 < len(found) else None
        return Neighbours(found[index - 1] if index else None, older, index + 1, len(found))

    def related(self, run: Mapping[str, Any]) -> Related:
        """Return the runs related to a cell."""
        params, tags, run_id = run["params"], run["tags"], run["run_id"]
        key, record = tags.get(CELL_TAG), tags.get("collection")
        others = [each for each in self._runs(str(RunKind.CELL)) if each.run_id != run_id]
        same_cell = [
            each
            for each in others
            if each.tags.get("conditions") == tags.get("conditions")
            and all(each.params.get(name) == params.get(name) for name in _CELL_PARAMS)
        ]
        collections = self._runs(str(RunKind.COLLECTION), {RECORD_TAG: record}) if record else ()
        return Related(
            stale=run_id in self.stale(),
            tries=tuple(each for each in others if key is not None and each.tags.get(CELL_TAG) == key),
            builds=tuple(each for each in same_cell if each.tags.get(CELL_TAG) != key),
            collection=next(iter(collections), None),
        )

    def _runs(self, kind: str, where: Mapping[str, str] | None = None) -> Iterable[StoredRun]:
        return self._view.search(self.experiment.experiment_id, where={"kind": kind, **(where or {})})


def runs_csv(queries: Queries, store: RunStore, name: str, filters: RunFilters) -> str:
    """Return all matching runs as CSV, in the list's order; numbers are not rounded."""
    rows = map(run_values, queries.found_runs(store, get_experiment(store, name), filters))
    return csv_text(_COLUMNS, [[values[column] for column in _COLUMNS] for values in rows])
