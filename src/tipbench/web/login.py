"""Browser login and logout: exchanges a token for an HttpOnly session cookie."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.text import iso
from tipbench.web.api.models import COMMON_ERRORS, LoggedIn, error_responses
from tipbench.web.auth import (
    CSRF_HEADER,
    JUDGES_TOO,
    Identity,
    check_origin,
    client_of,
    cookie_name,
    require_judge,
    session_cookie,
)
from tipbench.web.deps import PanelState, panel_of
from tipbench.web.errors import Forbidden, SafeJsonResponse, TooManyAttempts, Unauthorised
from tipbench.web.forms import FORM_TYPE, JSON_TYPE, content_type, read_form, read_json

router = APIRouter(tags=["login"])
logout_router = APIRouter(tags=["login"], dependencies=[JUDGES_TOO], responses=COMMON_ERRORS)
_MAX_NEXT_LENGTH = 1000
_Next = Annotated[str, Query(max_length=_MAX_NEXT_LENGTH, description="Path to redirect to after login.")]
_LOGIN_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media_type: {
                "schema": {
                    "type": "object",
                    "properties": {"token": {"type": "string", "maxLength": 256}, "next": {"type": "string"}},
                    "required": ["token"],
                },
                "example": {"token": "tipbench_…"},
            }
            for media_type in (FORM_TYPE, JSON_TYPE)
        },
    }
}
_LOGIN_ERRORS = error_responses(401, 403, 429)  # JSON, or the login page if the request is a form
for _response in _LOGIN_ERRORS.values():
    _response["content"]["text/html"] = {"schema": {"type": "string"}}


@router.get(
    "/login",
    summary="Get the login page",
    response_class=Response,
    responses={
        200: {"description": "The page.", "content": {"text/html": {"schema": {"type": "string"}}}},
        303: {"description": "Already logged in: redirect."},
        **error_responses(400, 413, 422, 500),
    },
)
async def login_page(request: Request, panel: PanelState, next: _Next = "/") -> Response:  # noqa: A002 - the name in the URL
    """Return a login form, or redirect if the client already has a session."""
    identity = await run_in_threadpool(panel.authenticator.by_cookie, session_cookie(request))
    if identity is not None:
        return RedirectResponse(_landing_path(identity, local_path(next)), status_code=303)
    return HTMLResponse(_render_page(request, local_path(next), None))


@router.post(
    "/login",
    summary="Exchange a token for a session",
    response_model=LoggedIn,
    openapi_extra=_LOGIN_BODY,
    responses={
        200: {"description": "For JSON: name, role and the CSRF token for the header " + CSRF_HEADER + "."},
        303: {"description": "For a form: logged in, redirect."},
        **error_responses(400, 413, 422, 500),
        **_LOGIN_ERRORS,
    },
)
async def log_in(request: Request, panel: PanelState) -> Response:
    """Set the session cookie. Repeated failures are rate limited with increasing delays."""
    check_origin(request, panel.options.hosts)
    is_form = content_type(request) == FORM_TYPE
    body: dict[str, Any] = await read_form(request) if is_form else await read_json(request)
    next_path = local_path(str(body.get("next", "/")))
    token = str(body.get("token", "")).strip()
    try:
        identity = await run_in_threadpool(panel.authenticator.by_token, token, client_of(request))
    except (Unauthorised, Forbidden, TooManyAttempts) as exc:
        if is_form:
            return HTMLResponse(_render_page(request, next_path, str(exc)), exc.status, headers=exc.headers)
        raise
    sessions = panel.authenticator.sessions
    previous = await run_in_threadpool(sessions.authenticate, session_cookie(request))
    if previous is not None:
        await run_in_threadpool(sessions.end, previous)
    session = sessions.begin(identity.token_id)
    if is_form:
        response: Response = RedirectResponse(_landing_path(identity, next_path), status_code=303)
    else:
        logged_in = LoggedIn(
            name=identity.name,
            role="judge" if identity.is_judge else "admin",  # `by_token` refuses the role app
            expires=iso(session.expires),
            csrf=sessions.csrf(session),
        )
        response = SafeJsonResponse(logged_in.model_dump())
    _set_cookie(request, response, sessions.seal(session), max_age_s=session.expires - int(time.time()))
    return response


@logout_router.post(
    "/logout",
    summary="End the session",
    status_code=204,
    responses={303: {"description": "For a form: redirect to the login page."}},
)
async def log_out(
    request: Request,
    panel: PanelState,
    identity: Annotated[Identity, Depends(require_judge)],  # a judge or an admin
) -> Response:
    """Invalidate the session cookie. Bearer tokens have no session; revoke the token instead."""
    if identity.session is not None:
        await run_in_threadpool(panel.authenticator.sessions.end, identity.session)
    is_form = content_type(request) == FORM_TYPE
    response = RedirectResponse("/login", status_code=303) if is_form else Response(status_code=204)
    _set_cookie(request, response, "", max_age_s=0)
    return response


def csrf_of(request: Request) -> str:
    """Return the session's CSRF token for forms and scripts; empty for bearer tokens, which have no session."""
    identity: Identity | None = getattr(request.state, "identity", None)
    if identity is None or identity.session is None:
        return ""
    return panel_of(request).authenticator.sessions.csrf(identity.session)


def local_path(text: str) -> str:
    """Return `text` if it is a path of the panel, else `/`; prevents open redirects."""
    # Browsers read a backslash as a slash, and `//` as the start of a host name.
    is_local = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_local and text.isprintable() and len(text) <= _MAX_NEXT_LENGTH else "/"


def _landing_path(identity: Identity, next_path: str) -> str:
    return "/judge" if identity.is_judge and next_path == "/" else next_path  # judges may not see the front page


def _render_page(request: Request, next_path: str, error: str | None) -> str:
    render: Callable[[Request, str, str | None], str] = request.app.state.login_page  # set by web/panel/__init__.py
    return render(request, next_path, error)


def _set_cookie(request: Request, response: Response, value: str, *, max_age_s: int) -> None:
    response.set_cookie(
        cookie_name(request),
        value,
        max_age=max(0, max_age_s),
        path="/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
