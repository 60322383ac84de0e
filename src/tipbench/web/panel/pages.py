"""Page rendering: Jinja environment, static files, and the error and login pages."""

from __future__ import annotations

import gc
import hashlib
import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

from fastapi import APIRouter, Depends, Request
from jinja2 import Environment, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

import tipbench
from tipbench import markup
from tipbench.errors import TipbenchError
from tipbench.jobs.job import JobState
from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, Identity, session_cookie
from tipbench.web.deps import panel_of
from tipbench.web.errors import NotFound
from tipbench.web.forms import Parts, read_parts
from tipbench.web.login import csrf_of, local_path
from tipbench.web.queries import experiment_path, quote_path

PREFIX = "/static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATE = "no-cache"  # for URLs of other releases, whose content may differ

router = APIRouter(include_in_schema=False)  # no authentication: the login page needs them


@dataclass(frozen=True)
class Assets:
    """The static files by name, and a hash over all of them."""

    version: str
    content: Mapping[str, bytes]

    def url(self, name: str) -> str:
        """Return the URL of a file; raise KeyError if it does not exist, so that tests catch wrong names."""
        if name not in self.content:
            raise KeyError(f"there is no static file {name!r}")
        return f"{PREFIX}/{self.version}/{name}"


@cache
def assets() -> Assets:
    """Return the style sheets and scripts of all pages, of the board and of the panel."""
    folders = (markup.static_folder(each) for each in ("tipbench.markup", "tipbench.compare", "tipbench.web.panel"))
    content = dict(sorted(item for folder in folders for item in _walk(folder, "").items()))
    digest = hashlib.sha256()
    for name, each in content.items():
        digest.update(f"{name}\0{len(each)}\0".encode() + each)
    return Assets(digest.hexdigest()[:16], content)


@router.get(PREFIX + "/{version}/{name:path}")
def static_file(version: str, name: str) -> Response:
    """Return a static file; cacheable indefinitely if the URL contains the current version."""
    content = assets().content.get(name)
    if content is None:
        raise NotFound("There is no such file.")
    caching = _IMMUTABLE if version == assets().version else _REVALIDATE
    return Response(content, media_type=MEDIA_TYPES[PurePosixPath(name).suffix], headers={"Cache-Control": caching})


def _walk(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for each in folder.iterdir():
        if each.is_dir():
            found |= _walk(each, f"{prefix}{each.name}/")
        elif PurePosixPath(each.name).suffix in MEDIA_TYPES:
            found[prefix + each.name] = each.read_bytes()
    return found


_SECTIONS = ("run", "jobs", "policies", "simulations", "promotions", "settings", "judge", "experiments")
_MAX_CHIP_JOBS = 100
_MACROS = {"form": "macros/form.html", "judge_ui": "macros/judge.html"}


async def sent_form(request: Request) -> Parts:
    """Read a submitted form; the router's dependencies have authenticated its sender before."""
    return await read_parts(request)


SentForm = Annotated[Parts, Depends(sent_form)]


@dataclass(frozen=True)
class Chip:
    """Link in the page header to the running or queued jobs."""

    text: str
    url: str
    state: str


class _Page(HTMLResponse):
    """HTML response that escapes lone surrogates instead of failing to encode them."""

    def render(self, content: Any) -> bytes:
        return str(content).encode("utf-8", "backslashreplace")


def page(
    request: Request, name: str, /, *, status: int = 200, headers: Mapping[str, str] | None = None, **context: Any
) -> HTMLResponse:
    """Render a template as a response; `json_url` and `mlflow_url` are linked in the footer."""
    return _Page(render(request, name, **context), status, headers=dict(headers or {}))


def render(request: Request, name: str, /, **context: Any) -> str:
    """Render a template to HTML."""
    who: Identity | None = getattr(request.state, "identity", None)
    first = request.scope["path"].strip("/").partition("/")[0] or "experiments"
    chip: Chip | None = None
    if who is not None and not who.is_judge:
        with suppress(TipbenchError):  # must not break the page, which may be the error page
            chip = jobs_chip(request)
    values = {
        "json_url": None,
        **context,
        "request": request,
        "who": who,
        "section": first if first in _SECTIONS else None,
        "csrf_token": csrf_of(request),
        "csrf_header": CSRF_HEADER,
        "chip": chip,
    }
    mlflow_url = context.get("mlflow_url")
    is_web = isinstance(mlflow_url, str) and mlflow_url.startswith(("http://", "https://"))
    return environment().get_template(name).render(values, mlflow_url=mlflow_url if is_web else None)


def jobs_chip(request: Request) -> Chip | None:
    """Return the chip with the number of running or else queued jobs; one cheap query, as every page needs it."""
    found = panel_of(request).jobs.store.in_states({JobState.RUNNING, JobState.QUEUED}, limit=_MAX_CHIP_JOBS)
    running = [job for job in found if job.state is JobState.RUNNING]
    counted, word = (running, "running") if running else (found, "queued")
    if not counted:
        return None
    url = f"/jobs/{counted[0].id}" if len(counted) == 1 else f"/jobs?state={word}"
    return Chip(f"{len(counted)} {word}", url, word)


def here(request: Request, **changes: object) -> str:
    """Return the current URL with changed query parameters: None removes one, a list sets several values."""
    kept = [(key, value) for key, value in request.query_params.multi_items() if key not in changes]
    for key, value in changes.items():
        values = value if isinstance(value, list | tuple) else [value]
        kept += [(key, str(each)) for each in values if each is not None]
    path = quote(request.scope["path"], safe="/", errors="backslashreplace")
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


def charts_installed() -> bool:
    """Return whether the extra `charts` is installed."""
    return all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))


@cache
def environment() -> Environment:
    """Return the Jinja environment: the panel's templates, and the board's, which it shares with the report."""
    helpers = {
        "csrf": _csrf,
        "here": _here,
        "static": lambda name: assets().url(name),
        "experiment_path": experiment_path,
        "version": tipbench.__version__,
    }
    made = markup.environment(
        "tipbench.compare", "tipbench.web.panel", filters={"quote_path": quote_path}, template_globals=helpers
    )
    for name, path in _MACROS.items():
        made.globals[name] = made.get_template(path).module
    return made


def prepare_board_page() -> None:
    """Import the statistics and compile the board's templates, so that the first board does not wait for them."""
    importlib.import_module("scipy.special")
    for name in environment().list_templates():
        if name.startswith(("leaderboard", "base", "board/")):
            environment().get_template(name)
    gc.freeze()  # modules stay as long as the process: garbage collections, frequent while runs are read, skip them


@pass_context
def _csrf(context: Context) -> Markup:
    """Return the hidden CSRF field, required in every form."""
    return Markup('<input type="hidden" name="{}" value="{}">').format(CSRF_FIELD, context["csrf_token"])


@pass_context
def _here(context: Context, **changes: object) -> str:
    return here(context["request"], **changes)


_TITLES = {
    400: "Bad request",
    401: "Please log in",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Request too large",
    422: "Invalid address",
    429: "Too many requests",
    502: "Invalid response from MLflow or Ollama",
    503: "MLflow is unreachable",
}
_ADVICE = {
    "mlflow_away": "Start MLflow, or ask the operator to check MLFLOW_TRACKING_URI; see `tipbench mlflow status`.",
    "mlflow_refused": "The panel's log has the response. `tipbench mlflow status` shows details.",
    "ollama_away": "Start Ollama, or ask the operator to check OLLAMA_HOST.",
    "mixed_rubrics": "Judge the older cells again under the current rubric: `tipbench judge export --rejudge`.",
    "internal": "Please report it with the request id; the panel's log has the details.",
}
_TRY_AGAIN = frozenset({409, 429, 500, 502, 503})


def render_error(request: Request, status: int, error: Mapping[str, Any]) -> HTMLResponse:
    """Render the page for an error in the API's error format."""
    code = str(error["code"])
    who: Identity | None = getattr(request.state, "identity", None)
    if who is None and "authorization" not in request.headers:  # no route matched, so none authenticated the caller
        who = request.state.identity = panel_of(request).guard.by_cookie(session_cookie(request))
    steps = []
    if request.method != "GET":
        steps.append(("Back to the form", _came_from(request)))
    elif status in _TRY_AGAIN:
        steps.append(("Try again", here(request)))
    is_judge = who is not None and who.is_judge
    home = ("Log in", "/login") if who is None else ("Your judging", "/judge") if is_judge else ("Experiments", "/")
    return page(
        request,
        "error.html",
        status=status,
        number=status,
        title=_TITLES.get(status, "Something went wrong"),
        message=str(error["message"]),
        advice=None if is_judge else _ADVICE.get(code),
        code=code,
        steps=[*steps, home],
        request_id=str(getattr(request.state, "request_id", "unknown")),
    )


def _came_from(request: Request) -> str:
    """Return the page the form was on, from the Referer header; the front page if it is missing or foreign."""
    try:
        sent = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    if sent.netloc != request.headers.get("host"):
        return "/"
    return local_path(f"{sent.path}?{sent.query}" if sent.query else sent.path)


def render_login(request: Request, next_path: str, fault: str | None) -> str:
    """Render the login form, with the error of the last attempt."""
    return render(request, "login.html", next_path=next_path, fault=fault)
