"""/experiments/{experiment}/runs: what is recorded, filtered by the address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from tipbench.record.run import RunKind, RunState
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import page
from tipbench.web.panel.run_view import run_note, run_title
from tipbench.web.panel.showing import experiment_path, quote_path
from tipbench.web.run_filters import RunFilters, filters_of
from tipbench.web.run_queries import RunBook

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

Options = list[tuple[str, str]]
_ANY = ("", "any")
_CHOSEN = {"model": "model", "prompt": "prompt_version", "scenario": "scenario", "persona": "persona"}
_CHIPS = ("model", "prompt", "scenario", "persona", "state", "judge_pending")


@dataclass(frozen=True)
class RunLine:
    """One row of the list."""

    run: Mapping[str, Any]
    href: str
    title: str
    note: str
    stale: bool
    composite: float | None
    provisional: bool  # the composite is a provisional judge's

    @property
    def superseded(self) -> bool:
        return bool(self.run["tags"].get("superseded") == "true")


@router.get("/experiments/{experiment:path}/runs")
def runs_page(request: Request, experiment: ExperimentPath, panel: PanelState, store: Store) -> Response:
    """The list, one page of it."""
    filters = read_filters(request)
    if any(not value.strip() for _, value in request.query_params.multi_items()):
        return RedirectResponse(_url(experiment_path(experiment, "runs"), filters.query()), 303)  # a short address
    book = RunBook(panel.queries, store, experiment)
    found = panel.queries.runs(store, experiment, filters.ask)
    stale = book.stale() if filters.kind is RunKind.CELL else frozenset()
    path, query = experiment_path(experiment, "runs"), filters.query(next=None)
    api = f"/api/bench/runs/{quote_path(experiment)}"
    return page(
        request,
        "runs.html",
        experiment=experiment,
        filters=filters,
        kind=str(filters.kind),
        lines=[_line(experiment, run, filters, stale) for run in found["items"]],
        total=found["total"],
        next_url=_url(path, filters.query(next=found["next"])) if found["next"] else None,
        first_url=_url(path, query) if filters.next else None,
        clear_url=path,
        chips=_chips(path, filters),
        options=_options(book.choices(str(filters.kind)), filters),
        csv_url=_url(f"{api}/runs.csv", filters.query(next=None, limit=RunFilters().limit)),
        json_url=_url(api, filters.query()),
        mlflow_url=book.experiment.url,
    )


def read_filters(request: Request) -> RunFilters:
    """What the address asks for; empty fields of the form say nothing."""
    query = request.query_params
    return filters_of({**query, "where": query.getlist("where")})


def _line(experiment: str, run: Mapping[str, Any], filters: RunFilters, stale: frozenset[str]) -> RunLine:
    metrics = run["metrics"]
    counted = metrics.get("composite")
    return RunLine(
        run=run,
        href=_url(
            experiment_path(experiment, "runs", run["run_id"]), filters.query(next=None, limit=RunFilters().limit)
        ),
        title=run_title(run),
        note=run_note(run),
        stale=run["run_id"] in stale,
        composite=counted if counted is not None else metrics.get("provisional_composite"),
        provisional=counted is None,
    )


def _options(choices: Mapping[str, list[str]], filters: RunFilters) -> dict[str, Options]:
    """What each select offers; what is asked for is among it, even where no run has it."""
    found: dict[str, Options] = {}
    for name, param in _CHOSEN.items():
        values = choices[param]
        asked = getattr(filters, name)
        if asked is not None and asked not in values:
            values = [asked, *values]
        found[name] = [_ANY, *((value, value) for value in values)]
    found["state"] = [_ANY, *((str(state), str(state)) for state in RunState)]
    found["kind"] = [(str(kind), str(kind)) for kind in RunKind]
    found["judge_pending"] = [_ANY, ("true", "yes"), ("false", "no")]
    return found


def _chips(path: str, filters: RunFilters) -> list[tuple[str, str]]:
    """Each filter with the address without it."""
    chips = [
        (
            f"{name.replace('_', ' ')} = {_word(getattr(filters, name))}",
            _url(path, filters.query(next=None, **{name: None})),
        )
        for name in _CHIPS
        if getattr(filters, name) is not None
    ]
    for at, text in enumerate(filters.where):
        rest = [*filters.where[:at], *filters.where[at + 1 :]]
        chips.append((text, _url(path, filters.query(next=None, where=rest))))
    if filters.superseded:
        chips.append(("with superseded", _url(path, filters.query(next=None, superseded=False))))
    return chips


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _url(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path
