"""Health endpoints: liveness, readiness and Prometheus metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

import tipbench
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.plan.collect_config import DEFAULT_EXPERIMENT
from tipbench.web.api.models import COMMON_ERRORS, Health, Readiness, error_responses, text_response
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import WebError
from tipbench.web.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])  # no authentication: the responses contain nothing sensitive
metrics_router = APIRouter(tags=["health"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS)


class NotReady(WebError):
    """503: the process is running, but MLflow or the database is unavailable."""

    status, code = 503, "not_ready"


_NOT_READY_RESPONSE = error_responses(503)
_NOT_READY_RESPONSE[503]["description"] = "MLflow or the database is unavailable."


@router.get("/healthz", summary="Liveness probe", responses=error_responses(400, 500))
async def healthz() -> Health:  # async, so that it responds even if all threads are busy
    """Return 200 as long as the process can handle requests."""
    return Health(status="ok", version=tipbench.__version__)


@router.get("/readyz", summary="Readiness probe", responses={**error_responses(400, 500), **_NOT_READY_RESPONSE})
def readyz(panel: PanelState) -> Readiness:
    """Return 200 if the token database is readable and MLflow responds.

    Before anything has been recorded, no MLflow is needed; `mlflow` is then `none yet`.
    """

    def check() -> Literal["answers", "none yet"] | TipbenchError:
        """Return the status of MLflow. An error is returned, not raised, so that the cache stores it."""
        try:
            panel.authenticator.tokens.get("")  # raises if the database is not readable
            panel.mlflow.open().store.experiment(DEFAULT_EXPERIMENT)
        except NotEnoughData:  # no MLflow is available, and nothing was ever recorded
            return "none yet"
        except TipbenchError as exc:
            panel.mlflow.locate_again()  # a local MLflow may have restarted on another port
            return exc
        return "answers"

    # The endpoint requires no authentication, so the cache limits how often MLflow is checked.
    result = panel.queries.small_cache.get("readiness", version=None, compute=check)
    if isinstance(result, TipbenchError):
        raise NotReady("Not ready: MLflow or the panel's database is unavailable; the log has the details.") from result
    return Readiness(status="ready", mlflow=result)


@metrics_router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses=text_response("text/plain", "Prometheus text format."),
)
def metrics(panel: PanelState) -> Response:
    """Return the panel's metrics: requests, durations, cache use, jobs, queue length and open streams."""
    return Response(panel.metrics.text(), media_type=CONTENT_TYPE)
