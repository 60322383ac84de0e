"""GET /api/bench/experiments: what is recorded."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from tipbench.errors import MlflowAway, NotEnoughData
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, ExperimentList, refusals

router = APIRouter(prefix="/api/bench", tags=["experiments"], dependencies=[ADMINS_ONLY], responses=COMMON)


@router.get("/experiments", summary="List the experiments", response_model=ExperimentList, responses=refusals(502, 503))
def experiments(panel: PanelState) -> Response:
    """Every experiment with its cells by state, by name. Empty while nothing was ever recorded."""
    return Json({"items": experiment_rows(panel), "next": None})


def experiment_rows(panel: Panel) -> list[dict[str, object]]:
    """For the list and for the front page; empty where there is no MLflow yet."""
    try:
        return panel.queries.experiments(panel.tracker.open().store)
    except NotEnoughData:
        return []
    except MlflowAway:
        panel.tracker.doubt()
        raise
