"""Error and log-in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import HTMLResponse

from tipbench.web.auth import Identity, session_cookie
from tipbench.web.deps import Panel
from tipbench.web.login import local_path
from tipbench.web.panel.pages import here, page, render

Steps = list[tuple[str, str]]

_TITLES = {
    400: "This request cannot be carried out",
    401: "Please log in",
    403: "Not allowed",
    404: "Not found",
    405: "Not possible here",
    409: "Not now",
    413: "Too large",
    422: "Something in the address is wrong",
    429: "Please wait",
    502: "A server answered strangely",
    503: "A server does not answer",
}
_ADVICE = {
    "mlflow_away": "Start MLflow, or have the operator check MLFLOW_TRACKING_URI; `tipbench mlflow status` says more.",
    "mlflow_refused": "The panel's log has the answer that came; `tipbench mlflow status` may say more.",
    "ollama_away": "Start Ollama, or have the operator check OLLAMA_HOST.",
    "mixed_rubrics": "Judge the older cells again under the present rubric: `tipbench judge export --rejudge`.",
    "internal": "Please report it with the request's number; the panel's log has the reason.",
}
_TRY_AGAIN = frozenset({409, 429, 500, 502, 503})


def render_error(request: Request, status: int, error: Mapping[str, Any]) -> HTMLResponse:
    """Renders the page for an error in the API's error format."""
    code = str(error["code"])
    who = _who(request)
    return page(
        request,
        "error.html",
        status=status,
        number=status,
        title=_TITLES.get(status, "Something went wrong"),
        message=str(error["message"]),
        advice=None if who is not None and who.is_judge else _ADVICE.get(code),
        code=code,
        steps=_steps(request, status, who),
        request_id=str(getattr(request.state, "request_id", "unknown")),
    )


def _who(request: Request) -> Identity | None:
    """Returns the caller, also if no route matched and so none authenticated it, for the page header."""
    known: Identity | None = getattr(request.state, "identity", None)
    if known is None and "authorization" not in request.headers:
        panel: Panel = request.app.state.panel
        known = request.state.identity = panel.guard.by_cookie(session_cookie(request))
    return known


def _steps(request: Request, status: int, who: Identity | None) -> Steps:
    steps: Steps = []
    if request.method != "GET":
        steps.append(("Back to the form", _came_from(request)))
    elif status in _TRY_AGAIN:
        steps.append(("Try again", here(request)))
    if who is None:
        return [*steps, ("Log in", "/login")]
    return [*steps, ("Your judging", "/judge") if who.is_judge else ("Experiments", "/")]


def _came_from(request: Request) -> str:
    """Returns the page the form was on, from the Referer header; the front page if it is missing or foreign."""
    try:
        sent = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    if sent.netloc != request.headers.get("host"):
        return "/"
    return local_path(f"{sent.path}?{sent.query}" if sent.query else sent.path)


def render_login(request: Request, there: str, fault: str | None) -> str:
    """Renders the login form, with the error of the last attempt."""
    return render(request, "login.html", there=there, fault=fault)
