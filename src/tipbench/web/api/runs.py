"""Endpoints for experiments and their runs."""

from __future__ import annotations

import sys
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from tipbench.errors import NotEnoughData
from tipbench.web.api.models import (
    COMMON_ERRORS,
    EXPERIMENT_ERRORS,
    ExperimentList,
    RunDetail,
    RunList,
    error_responses,
    text_response,
)
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState, Store
from tipbench.web.errors import attachment
from tipbench.web.forms import MAX_LIMIT, Limit, Next
from tipbench.web.queries import ExperimentsPage, RunsQuery, runs_csv


class RunIdConvertor(StringConvertor):
    """Matches a run id in a path by its format, because experiment names may contain slashes."""

    regex = "[0-9a-f]{32}"


register_url_convertor("run_id", RunIdConvertor())

experiments_router = APIRouter(
    prefix="/api/bench", tags=["experiments"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS
)
router = APIRouter(
    prefix="/api/bench/runs",
    tags=["runs"],
    dependencies=[ADMINS_ONLY],
    responses={**COMMON_ERRORS, **EXPERIMENT_ERRORS},
)

ExperimentPath = Annotated[str, Path(max_length=200, description="The experiment's name.", examples=["tip-bench-auto"])]
NameContains = Annotated[
    str, Query(max_length=200, description="Only experiments whose name contains this text, ignoring case.")
]
RunPath = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The run's id.", examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
]


@experiments_router.get("/experiments", summary="List the experiments", responses=error_responses(502, 503))
def experiments(
    panel: PanelState,
    q: NameContains = "",
    limit: Limit = MAX_LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> ExperimentList:
    """Return the experiments sorted by name, with the number of cells in each state.

    The list is empty until something has been recorded.
    """
    page = find_experiments(panel, q, limit=limit, after=next)
    return ExperimentList.model_validate({"items": page.items, "next": page.next})


def find_experiments(
    panel: Panel, name_contains: str = "", *, limit: int = sys.maxsize, after: str | None = None
) -> ExperimentsPage:
    """Return a page of experiments; empty if MLflow has never been used."""
    try:
        with panel.mlflow.connected() as mlflow:
            return panel.queries.experiments(mlflow.store, name_contains, limit=limit, after=after)
    except NotEnoughData:
        return ExperimentsPage()


@router.get("/{experiment:path}/{run_id:run_id}", summary="Get a run")
def one_run(experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store) -> RunDetail:
    """Return a run's params, metrics, tags and texts: prompt, raw answer, tips, rubric, scores."""
    return RunDetail.model_validate(panel.queries.run(store, experiment, run_id))


@router.get(
    "/{experiment:path}/runs.csv",
    summary="Download the runs",
    response_class=Response,
    responses=text_response("text/csv", "One line per run, newest first; numbers are not rounded."),
)
def runs_table(experiment: ExperimentPath, filters: RunsQuery, panel: PanelState, store: Store) -> Response:
    """Return all matching runs as CSV; `limit` and `next` are ignored."""
    return download(runs_csv(panel.queries, store, experiment, filters), "text/csv", f"{experiment}-runs", "csv")


@router.get("/{experiment:path}", summary="List an experiment's runs")
def runs(experiment: ExperimentPath, filters: RunsQuery, panel: PanelState, store: Store) -> RunList:
    """Return a page of runs, newest first, without their texts."""
    return RunList.model_validate(panel.queries.runs(store, experiment, filters))


def download(text: str, media_type: str, name: str, extension: str) -> Response:
    """Return a text as a file to download."""
    content = text.encode("utf-8", "backslashreplace")  # escape surrogates, which UTF-8 cannot encode
    return Response(content, media_type=media_type, headers=attachment(name, extension))
