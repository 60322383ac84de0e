"""GET /api/bench/config: the JSON schema of a run's configuration; and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON

router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)


@router.get("/config", summary="The JSON schema of a run's configuration", response_model=dict[str, Any])
def config(panel: PanelState) -> Response:
    """The keys of `tipbench collect`. Defaults are those that apply here; URLs are those that are allowed."""
    return Json(panel.allowed.schema())


@router.get("/openapi.json", summary="This document", response_model=dict[str, Any])
def openapi(request: Request) -> Response:
    """The OpenAPI document of the whole API."""
    return Json(request.app.openapi())
