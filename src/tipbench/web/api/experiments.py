"""GET /api/bench/experiments: what is recorded."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.errors import MlflowAway, NotEnoughData
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState
from tipbench.web.paging import MOST, Limit, Next
from tipbench.web.queries import ExperimentsAsk, ExperimentsPage
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, ExperimentList, refusals

router = APIRouter(prefix="/api/bench", tags=["experiments"], dependencies=[ADMINS_ONLY], responses=COMMON)


NameHas = Annotated[str, Query(max_length=200, description="Those alone whose name contains it, in whatever case.")]


@router.get("/experiments", summary="List the experiments", response_model=ExperimentList, responses=refusals(502, 503))
def experiments(
    panel: PanelState,
    q: NameHas = "",
    limit: Limit = MOST,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Every experiment with its cells by state, by name. Empty while nothing was ever recorded."""
    found = experiments_page(panel, ExperimentsAsk(q, limit, next))
    return Json({"items": list(found.items), "next": found.next})


def experiments_page(panel: Panel, ask: ExperimentsAsk) -> ExperimentsPage:
    """For the list and for the front page; empty where there is no MLflow yet."""
    try:
        return panel.queries.experiments(panel.tracker.open().store, ask)
    except NotEnoughData:
        return ExperimentsPage()
    except MlflowAway:
        panel.tracker.doubt()
        raise
