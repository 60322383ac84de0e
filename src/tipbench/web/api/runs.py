"""GET /api/bench/runs: the recorded runs of an experiment, and one with all its texts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.downloads import attachment
from tipbench.web.rendering import Json
from tipbench.web.run_filters import RunsQuery
from tipbench.web.run_queries import runs_csv
from tipbench.web.shapes import COMMON, DATA, RunDetail, RunList


class RunIdConvertor(StringConvertor):
    """A run's id in a path. An experiment's name may have slashes, so the id must be told from its end."""

    regex = "[0-9a-f]{32}"


register_url_convertor("run_id", RunIdConvertor())

router = APIRouter(prefix="/api/bench/runs", tags=["runs"], dependencies=[ADMINS_ONLY], responses={**COMMON, **DATA})

ExperimentPath = Annotated[str, Path(max_length=200, description="The experiment's name.", examples=["tip-bench-auto"])]
RunPath = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The run's id.", examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
]


@router.get("/{experiment:path}/{run_id:run_id}", summary="One run with all its texts", response_model=RunDetail)
def one_run(experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store) -> Response:
    """Params, metrics, tags, and every text: prompt, raw answer, tips, rubric, scores."""
    return Json(panel.queries.run(store, experiment, run_id))


@router.get(
    "/{experiment:path}/runs.csv",
    summary="Download the runs",
    response_class=Response,
    responses={
        200: {
            "description": "One line for each run, newest first, not rounded.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        }
    },
)
def runs_table(experiment: ExperimentPath, filters: RunsQuery, panel: PanelState, store: Store) -> Response:
    """All runs that match for a spreadsheet; `limit` and `next` do not matter."""
    content = runs_csv(panel.queries, store, experiment, filters.ask).encode("utf-8", "backslashreplace")
    return Response(content, media_type="text/csv", headers=attachment(f"{experiment}-runs", "csv"))


@router.get("/{experiment:path}", summary="List an experiment's runs", response_model=RunList)
def runs(experiment: ExperimentPath, filters: RunsQuery, panel: PanelState, store: Store) -> Response:
    """Newest first, without texts, page by page."""
    return Json(panel.queries.runs(store, experiment, filters.ask))
