"""Page rendering: Jinja environment, navigation, static files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

import tipbench
from tipbench.errors import TipbenchError
from tipbench.text import plural
from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, Identity
from tipbench.web.errors import NotFound
from tipbench.web.login import csrf_of
from tipbench.web.panel import template_filters as showing

PREFIX = "/static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_GOOD = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"  # for URLs of other releases, whose content may differ

router = APIRouter(include_in_schema=False)  # no authentication: the login page needs them


@dataclass(frozen=True)
class Assets:
    """The static files by name, and a hash over all of them."""

    version: str
    content: Mapping[str, bytes]

    def url(self, name: str) -> str:
        """Returns the URL of a file; raises KeyError if it does not exist, so that tests catch wrong names."""
        if name not in self.content:
            raise KeyError(f"there is no static file {name!r}")
        return f"{PREFIX}/{self.version}/{name}"


@cache
def assets() -> Assets:
    """Returns the content of the folder `static`."""
    content = dict(sorted(_walk(files("tipbench.web.panel").joinpath("static"), "").items()))
    together = hashlib.sha256()
    for name, each in content.items():
        together.update(f"{name}\0{len(each)}\0".encode() + each)
    return Assets(together.hexdigest()[:16], content)


@router.get(PREFIX + "/{version}/{name:path}")
def static_file(version: str, name: str) -> Response:
    """Returns a static file; cacheable indefinitely if the URL contains the current version."""
    known = assets()
    content = known.content.get(name)
    if content is None:
        raise NotFound("There is no such file here.")
    caching = _FOR_GOOD if version == known.version else _ASK_AGAIN
    kind = KINDS[PurePosixPath(name).suffix]
    return Response(content, media_type=kind, headers={"Cache-Control": caching})


def _walk(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for each in folder.iterdir():
        if each.is_dir():
            found |= _walk(each, f"{prefix}{each.name}/")
        elif PurePosixPath(each.name).suffix in KINDS:
            found[prefix + each.name] = each.read_bytes()
    return found


_SECTIONS = ("run", "jobs", "settings", "judge", "experiments")
_FILTERS = ("visible", "number", "signed", "percent", "duration", "when", "quote_path", "lines")
_MACROS = {
    "ui": "macros/ui.html",
    "form": "macros/form.html",
    "chart": "macros/chart.html",
    "preview": "macros/preview.html",
}


@dataclass(frozen=True)
class Chip:
    """Status link in the page header; `app.state.header_chip` is a function (request) → Chip | None."""

    text: str
    url: str
    state: str = "running"


class _Page(HTMLResponse):
    """HTML response that escapes lone surrogates instead of failing to encode them."""

    def render(self, content: Any) -> bytes:
        return str(content).encode("utf-8", "backslashreplace")


def page(
    request: Request, name: str, /, *, status: int = 200, headers: Mapping[str, str] | None = None, **context: Any
) -> HTMLResponse:
    """Renders a template as a response; `json_url` and `mlflow_url` are linked in the footer."""
    return _Page(render(request, name, **context), status, headers=dict(headers or {}))


def render(request: Request, name: str, /, **context: Any) -> str:
    """Renders a template to HTML."""
    mlflow_url = context.pop("mlflow_url", None)
    known = {"json_url": None, **context, "mlflow_url": mlflow_url if _is_web(mlflow_url) else None}
    return environment().get_template(name).render(**_of_request(request), **known)


def here(request: Request, **changes: object) -> str:
    """Returns the current URL with changed query parameters: None removes one, a list sets several values."""
    kept = [(key, value) for key, value in request.query_params.multi_items() if key not in changes]
    for key, value in changes.items():
        values = value if isinstance(value, list | tuple) else [value]
        kept += [(key, str(each)) for each in values if each is not None]
    path = quote(request.scope["path"], safe="/", errors="backslashreplace")
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


@cache
def environment() -> Environment:
    """Returns the Jinja environment."""
    made = Environment(
        loader=PackageLoader("tipbench.web.panel"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(showing, name) for name in _FILTERS} | {"plural": plural}
    made.globals |= {
        "csrf": _csrf,
        "here": _here,
        "static": lambda name: assets().url(name),
        "experiment_path": showing.experiment_path,
        "version": tipbench.__version__,
        "NOTHING": showing.NOTHING,
    }
    for name, path in _MACROS.items():  # in this order: a macro file may use the ones before it
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
    except TipbenchError:  # must not break the page, which may be the error page
        return None


@pass_context
def _csrf(context: Context) -> Markup:
    """Returns the hidden CSRF field, required in every form."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, context["csrf_token"])


@pass_context
def _here(context: Context, **changes: object) -> str:
    return here(context["request"], **changes)


def _is_web(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("http://", "https://"))
