"""Run queries: filters from the URL, CSV, neighbours and related runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from tipbench.judge.material import CANDIDATES, RAW
from tipbench.record.mlflow_wire import CELL_TAG, RECORD_TAG, SUPERSEDED_TAG
from tipbench.record.reader import FILTERS, stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore
from tipbench.text import csv_text, iso, one_line, shorten
from tipbench.web.board_query import where_of
from tipbench.web.errors import checked
from tipbench.web.forms import LIMIT, MOST
from tipbench.web.queries import Queries, RunListQuery, RunSort, answer_text, get_experiment, revision

MOST_WHERE = 20
_LONGEST_VALUE = 250
_LONGEST_MARK = 400
_PREVIEW = 140  # characters of an answer in the list
_NAMED = {**FILTERS, "persona": "params.persona", "judge_pending": "judge_pending"}
_Text = Annotated[str | None, Field(max_length=_LONGEST_VALUE)]


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
    q: str | None = Field(None, max_length=_LONGEST_VALUE, description="Only answers with this text, ignoring case.")
    sort: RunSort = Field("-started", description="Order: newest first, or by composite, lowest or highest first.")
    where: list[str] = Field(
        [],
        max_length=MOST_WHERE,
        description="KEY=VALUE: any tag, or params.NAME; repeatable.",
        examples=["suite=tips"],
    )
    limit: int = Field(LIMIT, ge=1, le=MOST, description=f"Maximum number of items per page, up to {MOST}.")
    next: str | None = Field(
        None, max_length=_LONGEST_MARK, description="The `next` value of the previous page; omit it for the first page."
    )

    @property
    def list_query(self) -> RunListQuery:
        """The filters as a RunListQuery. Raises Invalid if a key has two values."""
        named = {name: _text(getattr(self, name)) for name in _NAMED}
        filters = {_NAMED[name]: value for name, value in named.items() if value is not None}
        return RunListQuery(
            where_of(self.where, filters),
            str(self.kind),
            self.limit,
            self.next,
            self.superseded,
            self.q or "",
            self.sort,
        )

    @property
    def narrowed(self) -> bool:
        """Whether any filter other than kind is set."""
        return any(getattr(self, name) is not None for name in (*_NAMED, "q")) or bool(self.where)

    def query(self, **changes: object) -> str:
        """Return the filters with `changes` as a query string; defaults are omitted."""
        values = {**{name: getattr(self, name) for name in type(self).model_fields}, **changes}
        usual = {name: field.get_default() for name, field in type(self).model_fields.items()}
        pairs = [
            (name, _text(each))
            for name, value in values.items()
            if value != usual[name]
            for each in (value if isinstance(value, list) else [value])
        ]
        return urlencode([(name, text) for name, text in pairs if text is not None], errors="backslashreplace")


RunsQuery = Annotated[RunFilters, Query()]


def filters_of(query: Mapping[str, Any]) -> RunFilters:
    """Parse the filters of a page's URL; empty form fields are ignored."""
    given = {name: value for name, value in query.items() if value not in ("", None) and name != "where"}
    where = [text for text in query.get("where", []) if text.strip()]
    return checked(RunFilters, {**given, "where": where}, "query")


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    return None if value is None else str(value)


CHOICES = ("model", "prompt_version", "scenario", "persona")  # params offered as filters
MOST_CHOICES = 300
_WHOLE = 10**9
_SAME = ("model", "prompt_version", "scenario", "repeat")
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
    """Runs related to a cell, newest first, without the run itself."""

    stale: bool = False  # replaced by a newer model digest, prompt text or scenario of the same name
    tries: tuple[StoredRun, ...] = ()  # same cell_key: failures and retries
    builds: tuple[StoredRun, ...] = ()  # same cell and conditions, other content
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
            return {name: sorted(found)[:MOST_CHOICES] for name, found in values.items()}

        return self._queries.small.get(key, revision(self.experiment), read)

    def previews(self, run_ids: Collection[str]) -> dict[str, str]:
        """Return the beginning of the answer of each cell in `run_ids`."""
        where = {"kind": str(RunKind.CELL)}
        read = self._view.read(self.experiment.experiment_id, where=where, texts=(CANDIDATES, RAW))
        wanted = frozenset(run_ids)
        return {
            run.run_id: shorten(one_line(answer_text(texts)), _PREVIEW) for run, texts in read if run.run_id in wanted
        }

    def stale(self) -> frozenset[str]:
        """Return the ids of cells replaced by a newer version of their model, prompt or scenario."""
        key = ("stale", self.experiment.experiment_id)

        def read() -> frozenset[str]:
            cells = self._runs(str(RunKind.CELL))
            return frozenset(stale_runs([run for run in cells if run.tags.get(SUPERSEDED_TAG) != "true"]))

        return self._queries.small.get(key, revision(self.experiment), read)

    def neighbours(self, query: RunListQuery, run_id: str) -> Neighbours:
        """Return the position and neighbours of a run in the list of `query`."""
        found = [run.run_id for run in self._queries.found_runs(self._store, self.experiment, query)]
        if run_id not in found:
            return Neighbours(total=len(found))
        at = found.index(run_id)
        older = found[at + 1] if at + 1 < len(found) else None
        return Neighbours(found[at - 1] if at else None, older, at + 1, len(found))

    def related(self, run: Mapping[str, Any]) -> Related:
        """Return the runs related to a cell."""
        params, tags, run_id = run["params"], run["tags"], run["run_id"]
        key, record = tags.get(CELL_TAG), tags.get("collection")
        others = [each for each in self._runs(str(RunKind.CELL)) if each.run_id != run_id]
        alike = [
            each
            for each in others
            if each.tags.get("conditions") == tags.get("conditions")
            and all(each.params.get(name) == params.get(name) for name in _SAME)
        ]
        collections = self._runs(str(RunKind.COLLECTION), {RECORD_TAG: record}) if record else ()
        return Related(
            stale=run_id in self.stale(),
            tries=tuple(each for each in others if key is not None and each.tags.get(CELL_TAG) == key),
            builds=tuple(each for each in alike if each.tags.get(CELL_TAG) != key),
            collection=next(iter(collections), None),
        )

    def _runs(self, kind: str, where: Mapping[str, str] | None = None) -> Iterable[StoredRun]:
        return self._view.search(self.experiment.experiment_id, where={"kind": kind, **(where or {})})


def runs_csv(queries: Queries, store: RunStore, name: str, query: RunListQuery) -> str:
    """Return all matching runs as CSV, in the list's order; numbers are not rounded."""
    rows = []
    for run in queries.runs(store, name, replace(query, limit=_WHOLE, after=None))["items"]:
        params, metrics, tags = run["params"], run["metrics"], run["tags"]
        values = {
            **{name: params.get(name) for name in ("model", "scenario", "persona", "repeat", "host", "model_digest")},
            **{name: metrics.get(name) for name in ("composite", "provisional_composite", "format_ok", "overlong")},
            **{name: metrics.get(name) for name in ("diversity", "latency_s", "tokens_per_s")},
            **{name: tags.get(name) for name in ("kind", "failure", "superseded", "conditions")},
            "run_id": run["run_id"],
            "prompt": params.get("prompt_version"),
            "state": run["state"],
            "tips": metrics.get("n_candidates"),
            "started": iso(run["start_ms"] / 1000),
        }
        rows.append([values[column] for column in _COLUMNS])
    return csv_text(_COLUMNS, rows)
