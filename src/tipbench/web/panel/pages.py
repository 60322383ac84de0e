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
from tipbench.compare.verdict import WORDING
from tipbench.errors import TipbenchError
from tipbench.jobs.job import JobState
from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, Identity, session_cookie
from tipbench.web.deps import panel_of
from tipbench.web.errors import Invalid, NotFound, status_and_code
from tipbench.web.forms import Parts, read_parts
from tipbench.web.login import csrf_of, local_path
from tipbench.web.queries import experiment_path, quote_path

_STATIC_PATH = "/static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATE = "no-cache"  # for a URL of another release, whose files may differ
_MAX_COUNTED_JOBS = 100  # keeps the query cheap: every page makes it
_MACROS = {"form": "macros/form.html", "judge_ui": "macros/judge.html"}  # template global: file

router = APIRouter(include_in_schema=False)  # no authentication: the login page needs the static files


@dataclass(frozen=True)
class Assets:
    """The static files by name."""

    version: str  # hash of all files
    content: Mapping[str, bytes]

    def url(self, name: str) -> str:
        """Return the URL of a file. Raises KeyError for an unknown name."""
        if name not in self.content:
            raise KeyError(f"there is no static file {name!r}")
        return f"{_STATIC_PATH}/{self.version}/{name}"


@cache
def assets() -> Assets:
    """Return the static files of the panel, the board and their shared markup."""
    packages = ("tipbench.markup", "tipbench.compare", "tipbench.web.panel")
    content: dict[str, bytes] = {}
    for package in packages:
        content |= _read_files(markup.static_folder(package), "")
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return Assets(digest.hexdigest()[:16], content)


@router.get(_STATIC_PATH + "/{version}/{name:path}")
def static_file(version: str, name: str) -> Response:
    """Return a static file. Clients may cache it forever if the URL has the current version."""
    content = assets().content.get(name)
    if content is None:
        raise NotFound("There is no such file.")
    cache_control = _IMMUTABLE if version == assets().version else _REVALIDATE
    media_type = MEDIA_TYPES[PurePosixPath(name).suffix]
    return Response(content, media_type=media_type, headers={"Cache-Control": cache_control})


def _read_files(folder: Traversable, prefix: str) -> dict[str, bytes]:
    """Return the static files in a folder and its subfolders, by `prefix` + path."""
    content: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            content |= _read_files(entry, f"{prefix}{entry.name}/")
        elif PurePosixPath(entry.name).suffix in MEDIA_TYPES:
            content[prefix + entry.name] = entry.read_bytes()
    return content


SentForm = Annotated[Parts, Depends(read_parts)]  # read after the router's dependencies have authenticated the client


@dataclass(frozen=True)
class JobsLink:
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
    """Render a template as a response. The footer links to `json_url` and `mlflow_url`."""
    return _Page(render(request, name, **context), status, headers=dict(headers or {}))


def render(request: Request, name: str, /, **context: Any) -> str:
    """Render a template to HTML."""
    identity: Identity | None = getattr(request.state, "identity", None)
    link: JobsLink | None = None
    if identity is not None and not identity.is_judge:
        with suppress(TipbenchError):  # the link must not fail the page, which may be the error page
            link = jobs_link(request)
    first_part, _, _ = request.scope["path"].strip("/").partition("/")
    mlflow_url = context.get("mlflow_url")
    is_web_url = isinstance(mlflow_url, str) and mlflow_url.startswith(("http://", "https://"))
    values = {
        "json_url": None,
        **context,
        "mlflow_url": mlflow_url if is_web_url else None,  # a link to another scheme could run a script
        "request": request,
        "who": identity,
        "section": first_part or "experiments",
        "csrf_token": csrf_of(request),
        "csrf_header": CSRF_HEADER,
        "jobs_link": link,
    }
    return environment().get_template(name).render(values)


def is_mlflow_error(exc: TipbenchError) -> bool:
    """Return whether MLflow is unavailable (503) or returned an error (502). Pages then show what works without it.

    Ollama and Airflow have errors with the same statuses, so use this only for calls to MLflow.
    """
    status, _ = status_and_code(exc)
    return status in (502, 503)


def form_errors(exc: Invalid) -> dict[str, str]:
    """Return the error message by the name of the invalid field."""
    field = (exc.path or "").removeprefix("body.")
    return {field: str(exc).removeprefix(f"body.{field}: ")}


def jobs_link(request: Request) -> JobsLink | None:
    """Return the link with the number of running jobs, or of queued jobs if none is running; None without either."""
    jobs = panel_of(request).jobs.store.in_states({JobState.RUNNING, JobState.QUEUED}, limit=_MAX_COUNTED_JOBS)
    running = [job for job in jobs if job.state is JobState.RUNNING]
    counted, state = (running, "running") if running else (jobs, "queued")
    if not counted:
        return None
    url = f"/jobs/{counted[0].id}" if len(counted) == 1 else f"/jobs?state={state}"
    return JobsLink(f"{len(counted)} {state}", url, state)


def here(request: Request, **changes: object) -> str:
    """Return the current URL with changed query parameters. None removes a parameter, a list repeats it."""
    params = [(key, value) for key, value in request.query_params.multi_items() if key not in changes]
    for key, value in changes.items():
        values = value if isinstance(value, list | tuple) else [value]
        params += [(key, str(each)) for each in values if each is not None]
    path = quote(request.scope["path"], safe="/", errors="backslashreplace")
    return f"{path}?{urlencode(params, errors='backslashreplace')}" if params else path


def charts_installed() -> bool:
    """Return whether the extra `charts` is installed."""
    return all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))


@cache
def environment() -> Environment:
    """Return the Jinja environment with the templates of the panel and of the board."""
    helpers = {
        "csrf": _csrf,
        "here": _here,
        "static": lambda name: assets().url(name),
        "experiment_path": experiment_path,
        "version": tipbench.__version__,
        **WORDING,
    }
    jinja = markup.environment(
        "tipbench.compare", "tipbench.web.panel", filters={"quote_path": quote_path}, template_globals=helpers
    )
    for name, path in _MACROS.items():
        jinja.globals[name] = jinja.get_template(path).module
    return jinja


def prepare_board_page() -> None:
    """Import the statistics and compile the board's templates, so that the first board page is fast."""
    importlib.import_module("scipy.special")
    for name in environment().list_templates():
        if name.startswith(("leaderboard", "base", "board/")):
            environment().get_template(name)
    gc.freeze()  # modules are never freed: skipping them makes garbage collection faster while runs are read


@pass_context
def _csrf(context: Context) -> Markup:
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
    identity: Identity | None = getattr(request.state, "identity", None)
    if identity is None and "authorization" not in request.headers:
        # The request was not authenticated: no route matched, the route needs no login, or `admit_request` refused the
        # request. The cookie may be valid anyway. As in `authenticate`, an Authorization header overrides it.
        identity = panel_of(request).authenticator.by_cookie(session_cookie(request))
        request.state.identity = identity
    links = []
    if request.method != "GET":
        links.append(("Back to the form", _form_page_url(request)))
    elif status in _TRY_AGAIN:
        links.append(("Try again", here(request)))
    is_judge = identity is not None and identity.is_judge
    if identity is None:
        home = ("Log in", "/login")
    elif is_judge:
        home = ("Your judging", "/judge")
    else:
        home = ("Experiments", "/")
    return page(
        request,
        "error.html",
        status=status,
        number=status,
        title=_TITLES.get(status, "Something went wrong"),
        message=str(error["message"]),
        advice=None if is_judge else _ADVICE.get(code),
        code=code,
        steps=[*links, home],
        request_id=str(getattr(request.state, "request_id", "unknown")),
    )


def _form_page_url(request: Request) -> str:
    """Return the path in the Referer header, or `/` if it is missing or of another host."""
    try:
        referer = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    if referer.netloc != request.headers.get("host"):
        return "/"
    return local_path(f"{referer.path}?{referer.query}" if referer.query else referer.path)


def render_login(request: Request, next_path: str, error: str | None) -> str:
    """Render the login page, with the error of the last attempt."""
    return render(request, "login.html", next_path=next_path, error=error)
