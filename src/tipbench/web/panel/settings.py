"""/settings: who may use the panel, and what the operator has configured."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.web.api.hook import HookState, hook_of, run_test, state_of
from tipbench.web.api.tokens import DEFAULT_LIFE, TokenId, make_token, revoke_token, token_rows, wish_of
from tipbench.web.auth import ADMINS_ONLY, Identity
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Invalid
from tipbench.web.forms import read_form
from tipbench.web.panel.configured import configured, reached
from tipbench.web.panel.pages import page

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

_FIELDS = ("role", "name", "expires")
_BLANK = {"role": "judge", "name": "", "expires": DEFAULT_LIFE}
_MOST_FORMS = 1000
_MOST_DELIVERIES = 10


class Forms:
    """Forms that have been sent: a page that is loaded again must not make a second token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: OrderedDict[str, None] = OrderedDict()

    def first_time(self, mark: str) -> bool:
        """Whether this form comes for the first time; one without a mark always does."""
        with self._lock:
            if mark in self._sent:
                return False
            if mark:
                self._sent[mark[:64]] = None
            while len(self._sent) > _MOST_FORMS:
                self._sent.popitem(last=False)
            return True


@router.get("/settings")
def settings_page(
    request: Request, panel: PanelState, admin: Admin, revoked: str | None = None, tested: str | None = None
) -> HTMLResponse:
    """Tokens, a form that makes one, the webhook, and the configuration."""
    rows = token_rows(panel)
    ended = next((row for row in rows if row["id"] == revoked and row["state"] == "revoked"), None)
    return _page(request, panel, admin, ended=ended, tested=tested)


@router.post("/settings/tokens")
async def create_token(request: Request, panel: PanelState, admin: Admin) -> HTMLResponse:
    """Makes a token; the answer is the only page that ever shows its secret."""
    form = await read_form(request)
    given = {key: form.get(key, _BLANK[key]).strip() for key in _FIELDS}
    return await run_in_threadpool(_created, request, panel, admin, given, form.get("once", ""))


@router.post("/settings/tokens/{token_id}/revoke")
def revoke(token_id: TokenId, panel: PanelState) -> Response:
    """Ends a token, and says so on the page."""
    revoke_token(panel, token_id)
    return RedirectResponse(f"/settings?revoked={token_id}#tokens", status_code=303)


@router.post("/settings/hook/test")
def test_hook(hook: HookState) -> Response:
    """Sends a test to the webhook, and says what came of it on the page."""
    return RedirectResponse(f"/settings?tested={run_test(hook).message.id}#webhook", status_code=303)


def _created(request: Request, panel: Panel, admin: Identity, given: dict[str, str], mark: str) -> HTMLResponse:
    try:
        wish = wish_of(given)
    except Invalid as exc:
        field = (exc.path or "").removeprefix("body.")
        message = str(exc).removeprefix(f"body.{field}: ")
        return _page(request, panel, admin, given=given, faults={field: message}, status=422)
    sent: Forms = request.app.state.sent_forms
    if not sent.first_time(mark):
        return _page(request, panel, admin, repeated=wish.name, status=409)
    return _page(request, panel, admin, made=make_token(panel, wish), status=201)


def _page(request: Request, panel: Panel, admin: Identity, *, status: int = 200, **more: Any) -> HTMLResponse:
    rows = token_rows(panel)[::-1]
    known = {"made": None, "given": _BLANK, "faults": {}, "ended": None, "repeated": None, "tested": None, **more}
    hook = hook_of(request)
    return page(
        request,
        "settings.html",
        status=status,
        active=[row for row in rows if row["state"] == "active"],
        past=[row for row in rows if row["state"] != "active"],
        own=admin.token_id,
        operator=panel.options.admin_token is not None,
        once=secrets.token_urlsafe(16),
        hook=state_of(hook),
        deliveries=[each.to_json() for each in hook.deliveries()[:_MOST_DELIVERIES]] if hook else [],
        reached=reached(panel),
        configured=configured(panel.settings),
        json_url="/api/bench/tokens",
        **known,
    )
