"""GET /api/bench/runs: the recorded runs of an experiment, and one with all its texts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from tipbench.record.reading import FILTERS
from tipbench.record.run import RunKind, RunState
from tipbench.web.asking import where_of
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.queries import RunsAsk
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, DATA, RunDetail, RunList


class RunIdConvertor(StringConvertor):
    """A run's id in a path. An experiment's name may have slashes, so the id must be told from its end."""

    regex = "[0-9a-f]{32}"


register_url_convertor("run_id", RunIdConvertor())

router = APIRouter(prefix="/api/bench/runs", tags=["runs"], dependencies=[ADMINS_ONLY], responses={**COMMON, **DATA})

Text = Annotated[str | None, Query(max_length=250)]
WhereQuery = Annotated[
    list[str],
    Query(max_length=20, description="KEY=VALUE: any tag, or params.NAME; repeatable.", examples=["suite=tips"]),
]
ExperimentPath = Annotated[str, Path(max_length=200, description="The experiment's name.", examples=["tip-bench-auto"])]
RunPath = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The run's id.", examples=["1b9d6bcdbbfd4b2d9b5dab8dfbbd4bed"])
]


@router.get("/{experiment:path}/{run_id:run_id}", summary="One run with all its texts", response_model=RunDetail)
def one_run(experiment: ExperimentPath, run_id: RunPath, panel: PanelState, store: Store) -> Response:
    """Params, metrics, tags, and every text: prompt, raw answer, tips, rubric, scores."""
    return Json(panel.queries.run(store, experiment, run_id))


@router.get("/{experiment:path}", summary="List an experiment's runs", response_model=RunList)
def runs(
    experiment: ExperimentPath,
    panel: PanelState,
    store: Store,
    model: Text = None,
    prompt: Text = None,
    scenario: Text = None,
    state: RunState | None = None,
    kind: RunKind = RunKind.CELL,
    superseded: Annotated[bool, Query(description="Also tries that a later one has replaced.")] = False,
    where: WhereQuery = [],  # noqa: B006 - FastAPI copies it
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Newest first, without texts, page by page."""
    named = {"model": model, "prompt": prompt, "scenario": scenario, "state": state}
    filters = {FILTERS[key]: str(value) for key, value in named.items() if value is not None}
    ask = RunsAsk(where_of(where, filters), str(kind), limit, next, superseded)
    return Json(panel.queries.runs(store, experiment, ask))
