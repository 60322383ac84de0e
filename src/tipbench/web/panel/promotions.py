"""Promotions page: the active policy, and every check and switch with its time and user."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from tipbench.web.api.simulations import promotions_json
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.panel.pages import page

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/promotions")
def promotions_page(request: Request, panel: PanelState) -> HTMLResponse:
    """Lists checks, switches and undos, newest first."""
    found = promotions_json(panel)
    return page(
        request, "promotions.html", active=found["active"], rows=found["items"], json_url="/api/bench/promotions"
    )
