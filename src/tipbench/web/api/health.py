"""Health: whether the process lives, whether it can work, and what it has counted."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

import tipbench
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.plan.config import DEFAULT_EXPERIMENT
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.cache import Cache
from tipbench.web.deps import Panel, PanelState
from tipbench.web.errors import WebError
from tipbench.web.metrics import CONTENT_TYPE
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, Health, Readiness, refusals

router = APIRouter(tags=["health"])  # open to everybody: it tells nothing
counted = APIRouter(tags=["health"], dependencies=[ADMINS_ONLY], responses=COMMON)


class NotReady(WebError):
    """It lives, and cannot work."""

    status, code = 503, "not_ready"


@router.get("/healthz", summary="Whether the process lives", response_model=Health, responses=refusals(400, 500))
async def healthz() -> Response:  # on the event loop: it does not wait for a thread
    """Answers as long as it can answer at all."""
    return Json({"status": "ok", "version": tipbench.__version__})


@router.get(
    "/readyz",
    summary="Whether it can work",
    response_model=Readiness,
    responses={**refusals(400, 500), 503: {**refusals(503)[503], "description": "MLflow or the database is away."}},
)
def readyz(panel: PanelState) -> Response:
    """MLflow answers, or none was ever used; the tokens can be read."""
    checks: Cache = panel.queries.small
    # Anybody may ask, so MLflow is asked every few seconds at most, whether it answers or not.
    state = checks.get("readiness", None, lambda: _outcome(panel))
    if isinstance(state, TipbenchError):
        raise NotReady("Not ready: MLflow or the panel's database does not answer; the log has more.") from state
    return Json({"status": "ready", "mlflow": state})


def _outcome(panel: Panel) -> str | TipbenchError:
    """How it stands with MLflow, or why not: a failure is an answer that can be kept."""
    try:
        return _mlflow(panel)
    except TipbenchError as exc:
        return exc


def _mlflow(panel: Panel) -> str:
    panel.guard.tokens.get("")
    try:
        opened = panel.tracker.open()
        opened.store.experiment(DEFAULT_EXPERIMENT)
    except NotEnoughData:
        return "none yet"
    except TipbenchError:
        panel.tracker.doubt()
        raise
    return "answers"


@counted.get(
    "/metrics",
    summary="Counters for Prometheus",
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text form.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    },
)
def metrics(panel: PanelState) -> Response:
    """Requests, their times, and what is kept in memory."""
    return Response(panel.metrics.text(), media_type=CONTENT_TYPE)
