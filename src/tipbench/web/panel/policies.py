"""Policies and promotions pages: the policies of `tipbench serve`, their shadows, and the history of promotions."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import UsageError
from tipbench.web.api import policies
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState
from tipbench.web.errors import Invalid, NotFound
from tipbench.web.panel.pages import SentForm, page
from tipbench.workflows.policies import DAYS, MAX_POOLED_REWARDS, set_shadow

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/policies")
def policies_page(request: Request, panel: PanelState, user_id: policies.UserId = None) -> HTMLResponse:
    """Show the policies and shadows; with `user_id`, also the state of this user."""
    error = None
    try:
        report = policies.policies(panel, user_id or None)
    except Invalid as exc:
        report, error = policies.policies(panel), str(exc)
    active_policy = next((policy for policy in report["policies"] if policy["name"] == report["active"]), None)
    json_url = "/api/bench/policies"
    if user_id:
        json_url += f"?{urlencode({'user_id': user_id})}"
    return page(
        request,
        "policies.html",
        status=422 if error else 200,
        report=report,
        active_policy=active_policy,
        user_id=user_id or "",
        error=error,
        days=DAYS,
        max_pooled=MAX_POOLED_REWARDS,  # rewards in the regression over all users
        json_url=json_url,
    )


@router.post("/policies/shadows/{name}")
def switch_shadow(panel: PanelState, name: str, form: SentForm) -> Response:
    """Enable or disable a shadow and redirect to the policies page."""
    try:
        set_shadow(panel.settings.home, name, enabled=form.fields.get("enabled") == "true")
    except UsageError as exc:
        raise NotFound(str(exc), path="path.name") from exc
    return RedirectResponse("/policies#shadows", status_code=303)


@router.get("/promotions")
def promotions_page(request: Request, panel: PanelState) -> HTMLResponse:
    """List checks, and changes of the active policy, newest first."""
    promotions = policies.promotions(panel)
    return page(
        request, "promotions.html", active=promotions.active, rows=promotions.items, json_url="/api/bench/promotions"
    )
