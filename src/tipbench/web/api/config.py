"""GET /api/bench/config, the JSON schema of a run's configuration, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tipbench.web.api.models import COMMON
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.responses import Json

router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)


@router.get("/config", summary="Get the configuration schema", response_model=dict[str, Any])
def config(panel: PanelState) -> Response:
    """Returns the JSON schema of the options of `tipbench collect`.

    Defaults are those of this server; URLs are limited to the allowed ones.
    """
    return Json(panel.allowed.schema())


@router.get("/openapi.json", summary="Get the OpenAPI document", response_model=dict[str, Any])
def openapi(request: Request) -> Response:
    """Returns the OpenAPI document of the whole API."""
    return Json(request.app.openapi())
