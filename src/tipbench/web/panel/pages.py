"""Pages: one Jinja2 environment, and what every page gets. Templates escape everything and know every name they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import Request
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import HTMLResponse

import tipbench
from tipbench.errors import TipbenchError
from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, Identity
from tipbench.web.login import csrf_of
from tipbench.web.panel import showing
from tipbench.web.panel.static_files import assets

_SECTIONS = ("run", "jobs", "settings", "judge", "experiments")
_FILTERS = ("visible", "number", "signed", "percent", "duration", "when", "quote_path", "counted", "lines")
_MACROS = {
    "ui": "macros/ui.html",
    "form": "macros/form.html",
    "chart": "macros/chart.html",
    "preview": "macros/preview.html",
}


@dataclass(frozen=True)
class Chip:
    """A word in the header on what is going on now; `app.state.header_chip` is a function (request) → Chip | None."""

    text: str
    url: str
    state: str = "running"


class _Page(HTMLResponse):
    """HTML whose text may hold half a character: it is shown as its escape."""

    def render(self, content: Any) -> bytes:
        return str(content).encode("utf-8", "backslashreplace")


def page(
    request: Request, name: str, /, *, status: int = 200, headers: Mapping[str, str] | None = None, **context: Any
) -> HTMLResponse:
    """A page made of a template; `json_url` and `mlflow_url` show at its foot."""
    return _Page(render(request, name, **context), status, headers=dict(headers or {}))


def render(request: Request, name: str, /, **context: Any) -> str:
    """A page's HTML."""
    mlflow_url = context.pop("mlflow_url", None)
    known = {"json_url": None, **context, "mlflow_url": mlflow_url if _is_web(mlflow_url) else None}
    return environment().get_template(name).render(**_of_request(request), **known)


def here(request: Request, **changes: object) -> str:
    """This page's address with other values in its query: None takes one out, a list gives several."""
    kept = [(key, value) for key, value in request.query_params.multi_items() if key not in changes]
    for key, value in changes.items():
        values = value if isinstance(value, list | tuple) else [value]
        kept += [(key, str(each)) for each in values if each is not None]
    path = quote(request.scope["path"], safe="/", errors="backslashreplace")
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


@cache
def environment() -> Environment:
    """The one environment."""
    made = Environment(
        loader=PackageLoader("tipbench.web.panel"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(showing, name) for name in _FILTERS}
    made.globals |= {
        "csrf": _csrf,
        "here": _here,
        "static": lambda name: assets().url(name),
        "experiment_path": showing.experiment_path,
        "version": tipbench.__version__,
        "NOTHING": showing.NOTHING,
    }
    for name, path in _MACROS.items():  # one may use those before it
        made.globals[name] = made.get_template(path).module
    return made


def _of_request(request: Request) -> dict[str, Any]:
    who: Identity | None = getattr(request.state, "identity", None)
    first = request.scope["path"].strip("/").partition("/")[0] or "experiments"
    return {
        "request": request,
        "who": who,
        "section": first if first in _SECTIONS else None,
        "csrf_token": csrf_of(request),
        "csrf_header": CSRF_HEADER,
        "chip": _chip(request, who),
    }


def _chip(request: Request, who: Identity | None) -> Chip | None:
    made: Callable[[Request], Chip | None] | None = getattr(request.app.state, "header_chip", None)
    if made is None or who is None or who.is_judge:
        return None
    try:
        return made(request)
    except TipbenchError:  # the page itself, which may be the one that tells of it, matters more
        return None


@pass_context
def _csrf(context: Context) -> Markup:
    """The hidden field without which a form changes nothing."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, context["csrf_token"])


@pass_context
def _here(context: Context, **changes: object) -> str:
    return here(context["request"], **changes)


def _is_web(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("http://", "https://"))
