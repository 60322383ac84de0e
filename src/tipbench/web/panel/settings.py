"""Settings page: tokens, webhook, and the configuration without its secrets."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.http import strip_login
from tipbench.markup import duration
from tipbench.settings import DEFAULT_TOKEN_LIFETIME, SETTINGS, Setting, Settings
from tipbench.web.api import hook, tokens
from tipbench.web.auth import ADMINS_ONLY, Identity
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Invalid
from tipbench.web.panel.pages import SentForm, form_errors, page
from tipbench.web.webhook import shown_address

_SECRET_SUFFIXES = ("_username", "_password", "_token", "_secret")  # of keys whose values are never shown
_URL_SUFFIXES = ("_url", "_urls")  # of keys whose values are shown without credentials
_PROCESS_SETTINGS = frozenset({"home", "no_color"})  # not shown: they concern the process, not the panel


def configured(settings: Settings) -> list[dict[str, Any]]:
    """Return the settings, in the order of the documentation; `source` is None for a default."""
    return [
        {
            "key": setting.key,
            "value": _displayed_value(settings, setting),
            "meaning": setting.meaning,
            "source": settings.sources.get(setting.key),
        }
        for setting in SETTINGS
        if setting.key not in _PROCESS_SETTINGS
    ]


def network_facts(panel: Panel) -> list[tuple[str, str]]:
    """Return the panel's network settings, and the servers and suites that jobs may use, as labels and values."""
    options, allowed = panel.options, panel.permissions
    return [
        ("Listens on", f"{options.host}, this machine only" if options.on_loopback else options.host),
        ("Allowed hosts", ", ".join(["localhost", *sorted(options.hosts.names)])),
        ("Reverse proxies", ", ".join(options.proxies) or "none"),
        ("Session lifetime", duration(options.session_s)),
        ("Ollama servers", ", ".join(map(strip_login, allowed.urls["ollama_url"]))),
        ("MLflow servers", ", ".join(map(strip_login, allowed.urls["mlflow_url"])) or "found automatically"),
        ("Suites", ", ".join(["built in", *(str(folder) for folder in allowed.suites)])),
    ]


def _displayed_value(settings: Settings, setting: Setting) -> str:
    if setting.key.endswith(_SECRET_SUFFIXES):
        return "set" if settings.get(setting.key) else "not set"
    if setting.key not in settings.values:
        return setting.default or "–"
    if setting.key == "judge_command":  # its arguments may contain secrets
        words = (settings.get(setting.key) or "").split()
        name = PurePath(words[0]).name if words else ""
        return f"{name} …" if len(words) > 1 else name
    if setting.key == "hook_url":  # its path and query may be secret too
        return shown_address(settings.get(setting.key) or "")
    if setting.key.endswith(_URL_SUFFIXES):
        return ", ".join(strip_login(url) for url in settings.get_list(setting.key))
    value = settings.values[setting.key]
    if isinstance(value, list):
        return ", ".join(settings.get_list(setting.key))
    return str(value)


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

_DEFAULT_FIELDS = {"role": "judge", "name": "", "expires": DEFAULT_TOKEN_LIFETIME}
_MAX_REMEMBERED_FORMS = 1000
_MAX_FORM_ID_CHARS = 64  # the page's own ids have 22
_MAX_LISTED_DELIVERIES = 10


class SubmittedForms:
    """Remembers submitted forms, so that reloading the page does not create a second token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, None] = OrderedDict()

    def first_time(self, form_id: str) -> bool:
        """Remember the id and return whether it is new. An empty id is not remembered, so it is always new."""
        form_id = form_id[:_MAX_FORM_ID_CHARS]
        with self._lock:
            if form_id in self._ids:
                return False
            if form_id:
                self._ids[form_id] = None
            while len(self._ids) > _MAX_REMEMBERED_FORMS:
                self._ids.popitem(last=False)
            return True


@router.get("/settings")
def settings_page(
    request: Request, panel: PanelState, admin: Admin, revoked: str | None = None, tested: str | None = None
) -> HTMLResponse:
    """Show the tokens, the webhook and the configuration."""
    return _render_settings(request, panel, admin, revoked=revoked, tested=tested)


@router.post("/settings/tokens")
def create_token(request: Request, panel: PanelState, admin: Admin, form: SentForm) -> HTMLResponse:
    """Create a token; the response is the only page that shows its secret."""
    fields = {key: form.fields.get(key, default).strip() for key, default in _DEFAULT_FIELDS.items()}
    try:
        token_request = tokens.validate_token_request(fields)
    except Invalid as exc:
        return _render_settings(request, panel, admin, values=fields, errors=form_errors(exc), status=422)
    submitted_forms: SubmittedForms = request.app.state.submitted_forms
    form_id = form.fields.get("once", "")
    if not submitted_forms.first_time(form_id):
        return _render_settings(request, panel, admin, repeated=token_request.name, status=409)
    return _render_settings(request, panel, admin, made=tokens.create(token_request, panel), status=201)


@router.post("/settings/tokens/{token_id}/revoke")
def revoke(token_id: tokens.TokenId, panel: PanelState) -> Response:
    """Revoke a token and redirect to the settings page."""
    tokens.revoke(token_id, panel)
    return RedirectResponse(f"/settings?revoked={token_id}#tokens", status_code=303)


@router.post("/settings/hook/test")
def test_hook(webhook: hook.WebhookParam) -> Response:
    """Send a test to the webhook and redirect to the settings page, which shows the result."""
    delivery = hook.run_test(webhook)
    return RedirectResponse(f"/settings?tested={delivery.id}#webhook", status_code=303)


def _render_settings(
    request: Request, panel: Panel, admin: Identity, *, status: int = 200, revoked: str | None = None, **more: Any
) -> HTMLResponse:
    newest_first = tokens.tokens(panel).items[::-1]
    context = {"made": None, "values": _DEFAULT_FIELDS, "errors": {}, "repeated": None, "tested": None, **more}
    webhook = hook.webhook_of(request)
    deliveries = webhook.deliveries()[:_MAX_LISTED_DELIVERIES] if webhook else []
    return page(
        request,
        "settings.html",
        status=status,
        active=[token for token in newest_first if token.state == "active"],
        past=[token for token in newest_first if token.state != "active"],
        revoked=next((token for token in newest_first if token.id == revoked and token.state == "revoked"), None),
        own=admin.token_id,
        has_operator_token=panel.options.admin_token is not None,  # TIPBENCH_ADMIN_TOKEN
        once=secrets.token_urlsafe(16),  # id of the form, see SubmittedForms
        hook=hook.state(webhook),
        deliveries=[delivery.response() for delivery in deliveries],
        network=network_facts(panel),
        configured=configured(panel.settings),
        json_url="/api/bench/tokens",
        **context,
    )
