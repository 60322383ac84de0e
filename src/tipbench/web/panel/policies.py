"""Policies page: what `tipbench serve` has learned, and the switches of its shadows."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import UsageError
from tipbench.web.api.policies import UserId, policies_report
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import Invalid, NotFound
from tipbench.web.forms import read_form
from tipbench.web.panel.pages import page
from tipbench.workflows.policies import DAYS, POOLED, set_shadow

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/policies")
def policies_page(request: Request, panel: PanelState, user_id: UserId = None) -> HTMLResponse:
    """Shows policies and shadows, and the state of one user if an id is given."""
    wrong = None
    try:
        report = policies_report(panel, user_id or None)
    except Invalid as exc:
        report, wrong = policies_report(panel, None), str(exc)
    return page(
        request,
        "policies.html",
        status=422 if wrong else 200,
        report=report,
        shown=next((each for each in report["policies"] if each["name"] == report["active"]), None),
        user_id=user_id or "",
        wrong=wrong,
        days=DAYS,
        pooled=POOLED,
        json_url=f"/api/bench/policies?{urlencode({'user_id': user_id})}" if user_id else "/api/bench/policies",
    )


@router.post("/policies/shadows/{name}")
async def switch_shadow(request: Request, panel: PanelState, name: str) -> Response:
    """Enables or disables a shadow and redirects to the page."""
    enabled = (await read_form(request)).get("enabled") == "true"
    try:
        await run_in_threadpool(set_shadow, panel.settings.home, name, enabled=enabled)
    except UsageError as exc:
        raise NotFound(str(exc), path="path.name") from exc
    return RedirectResponse("/policies#shadows", status_code=303)
