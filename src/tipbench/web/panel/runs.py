"""Page of an experiment's runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from tipbench.record.run import RunKind, RunState
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import page
from tipbench.web.queries import RunFilters, RunQueries, experiment_path, filters_of, quote_path, shown_composite

_NOTE_TAG = "mlflow.note.content"
_NAME_TAG = "mlflow.runName"


def run_title(run: Mapping[str, Any]) -> str:
    """Return the title of a run."""
    params, tags = run["params"], run["tags"]
    if tags.get("kind") == RunKind.CELL:
        return f"{params.get('model', '?')}/{params.get('prompt_version', '?')} · {params.get('scenario', '?')}"
    return str(tags.get(_NAME_TAG) or f"{tags.get('kind', 'run')} {run['run_id'][:8]}")


def run_note(run: Mapping[str, Any]) -> str:
    """Return a line about a run that is not a cell, such as its note or how it ended."""
    tags = run["tags"]
    if tags.get("kind") == RunKind.JUDGING:
        status = str(tags.get("sheet_status", ""))
        return {"exported": "exported, no scores yet", "held": "scores are held"}.get(status, status)
    note = (
        tags.get(_NOTE_TAG)  # MLflow's description, which users can edit
        or tags.get("reason")  # of a decision or a refused model
        or tags.get("evidence")  # of a collect: which models were in memory
        or tags.get("ended")  # of a collect: "complete", "with failures" or "interrupted"
    )
    return str(note or "")


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

Options = list[tuple[str, str]]
_ANY = ("", "any")
_PARAMS_BY_FILTER = {"model": "model", "prompt": "prompt_version", "scenario": "scenario", "persona": "persona"}
_CHIP_NAMES = {"q": "text", "judge_pending": "judge pending"}
_CHIP_FILTERS = ("q", "model", "prompt", "scenario", "persona", "state", "judge_pending")


@router.get("/experiments/{experiment:path}/runs")
def runs_page(request: Request, experiment: ExperimentPath, panel: PanelState, store: Store) -> Response:
    """Show one page of the list of runs. A URL with empty form fields is redirected to one without them."""
    filters = read_filters(request)
    path = experiment_path(experiment, "runs")
    has_empty_field = any(not value.strip() for _, value in request.query_params.multi_items())
    if has_empty_field:
        return RedirectResponse(_url(path, filters.query()), 303)
    experiment_queries = RunQueries(panel.queries, store, experiment)
    runs = panel.queries.runs(store, experiment, filters)
    shows_cells = filters.kind is RunKind.CELL
    stale = experiment_queries.stale() if shows_cells else frozenset()
    previews = experiment_queries.previews([run["run_id"] for run in runs["items"]]) if shows_cells else {}
    query_without_page = filters.query(next=None, limit=RunFilters().limit)
    api_url = f"/api/bench/runs/{quote_path(experiment)}"
    return page(
        request,
        "runs.html",
        experiment=experiment,
        filters=filters,
        kind=str(filters.kind),
        lines=[
            {
                "run": run,
                "href": _url(experiment_path(experiment, "runs", run["run_id"]), query_without_page),
                "title": run_title(run),
                "note": run_note(run),
                "stale": run["run_id"] in stale,
                "composite": shown_composite(run["metrics"]),
                "preview": previews.get(run["run_id"], ""),
            }
            for run in runs["items"]
        ],
        total=runs["total"],
        next_url=_url(path, filters.query(next=runs["next"])) if runs["next"] else None,
        first_url=_url(path, filters.query(next=None)) if filters.next else None,
        clear_url=path,
        chips=_chips(path, filters),
        options=_options(experiment_queries.choices(str(filters.kind)), filters),
        sort=filters.sort,
        sort_url=lambda key: _url(path, filters.query(next=None, sort=key)),
        csv_url=_url(f"{api_url}/runs.csv", query_without_page),
        json_url=_url(api_url, filters.query()),
        mlflow_url=experiment_queries.experiment.url,
    )


def read_filters(request: Request) -> RunFilters:
    """Parse the filters from the URL; empty form fields are ignored."""
    query = request.query_params
    return filters_of({**query, "where": query.getlist("where")})


def _options(choices: Mapping[str, list[str]], filters: RunFilters) -> dict[str, Options]:
    """Return the options of each select field. They include the selected value even if no run has it."""
    options: dict[str, Options] = {}
    for name, param in _PARAMS_BY_FILTER.items():
        values = choices[param]
        selected = getattr(filters, name)
        if selected is not None and selected not in values:
            values = [selected, *values]
        options[name] = [_ANY, *((value, value) for value in values)]
    options["state"] = [_ANY, *((str(state), str(state)) for state in RunState)]
    options["kind"] = [(str(kind), str(kind)) for kind in RunKind]
    options["judge_pending"] = [_ANY, ("true", "yes"), ("false", "no")]
    return options


def _chips(path: str, filters: RunFilters) -> list[tuple[str, str]]:
    """Return the text of each active filter, with the URL of the page without that filter."""
    chips = []
    for name in _CHIP_FILTERS:
        value = getattr(filters, name)
        if value is None:
            continue
        if isinstance(value, bool):
            value = "yes" if value else "no"
        text = f"{_CHIP_NAMES.get(name, name)} = {value}"
        chips.append((text, _url(path, filters.query(next=None, **{name: None}))))
    for i, condition in enumerate(filters.where):
        others = [*filters.where[:i], *filters.where[i + 1 :]]
        chips.append((condition, _url(path, filters.query(next=None, where=others))))
    if filters.superseded:
        chips.append(("superseded shown", _url(path, filters.query(next=None, superseded=False))))
    return chips


def _url(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path
