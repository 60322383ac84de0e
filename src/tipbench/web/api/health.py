"""Health endpoints: liveness, readiness and Prometheus metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

import tipbench
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.plan.config import DEFAULT_EXPERIMENT
from tipbench.web.api.models import COMMON, Health, Readiness, error_responses, text_response
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import WebError
from tipbench.web.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])  # no authentication: the responses contain nothing sensitive
metrics_router = APIRouter(tags=["health"], dependencies=[ADMINS_ONLY], responses=COMMON)


class NotReady(WebError):
    """503: the process is running, but MLflow or the database is unavailable."""

    status, code = 503, "not_ready"


@router.get("/healthz", summary="Liveness probe", responses=error_responses(400, 500))
async def healthz() -> Health:  # async, so that it responds even if all threads are busy
    """Return 200 as long as the process can handle requests."""
    return Health(status="ok", version=tipbench.__version__)


@router.get(
    "/readyz",
    summary="Readiness probe",
    responses={
        **error_responses(400, 500),
        503: {**error_responses(503)[503], "description": "MLflow or the database is unavailable."},
    },
)
def readyz(panel: PanelState) -> Readiness:
    """Return 200 if the token database is readable and MLflow responds.

    MLflow is not required until it has been used for the first time.
    """

    def check() -> Literal["answers", "none yet"] | TipbenchError:
        """Return the status of MLflow. Returns errors instead of raising them, so that failures are cached too."""
        try:
            panel.guard.tokens.get("")
            panel.mlflow.open().store.experiment(DEFAULT_EXPERIMENT)
        except NotEnoughData:
            return "none yet"
        except TipbenchError as exc:
            panel.mlflow.locate_again()
            return exc
        return "answers"

    # The endpoint is public, so the result is cached for a few seconds.
    state = panel.queries.small.get("readiness", None, check)
    if isinstance(state, TipbenchError):
        raise NotReady("Not ready: MLflow or the panel's database is unavailable; the log has the details.") from state
    return Readiness(status="ready", mlflow=state)


@metrics_router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=text_response("text/plain", "Prometheus text format."),
)
def metrics(panel: PanelState) -> Response:
    """Return the panel's metrics: requests, durations, cache use, jobs, queue length and open streams."""
    return Response(panel.metrics.text(), media_type=CONTENT_TYPE)
