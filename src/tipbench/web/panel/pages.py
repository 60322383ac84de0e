"""Page rendering: template filters, Jinja environment, static files, and the error and login pages."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from fastapi import APIRouter, Request
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

import tipbench
from tipbench.compare.html import text as as_html
from tipbench.errors import TipbenchError
from tipbench.text import plural
from tipbench.web.auth import CSRF_FIELD, CSRF_HEADER, Identity, session_cookie
from tipbench.web.deps import Panel
from tipbench.web.errors import NotFound
from tipbench.web.login import csrf_of, local_path
from tipbench.web.queries import experiment_path, quote_path

NOTHING = "–"
MINUS = "−"
_GAP = "\u00a0"
_MILLISECONDS = 100_000_000_000  # timestamps above are in milliseconds, below in seconds
# Invisible characters, and those that reorder the surrounding text.
_UNSEEN = re.compile("[\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\U000e0000-\U000e007f]")
_QUOTED = re.compile("`([^`]{1,200})`")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def visible(value: object) -> Markup:
    """Escapes untrusted text; invisible and bidirectional control characters are replaced by their code points."""
    named = _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(value))
    return Markup(as_html(named))  # noqa: S704 - as_html has just escaped it


def number(value: float | None, digits: int = 2) -> str:
    """Formats a number as 1,234.50; integers have no decimals."""
    if value is None or not math.isfinite(value):
        return NOTHING
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
    return shown.replace("-", MINUS)


def signed(value: float | None, digits: int = 2) -> str:
    """Formats a number as +0.50 or −0.50; ±0.00 if it rounds to zero."""
    if value is None or not math.isfinite(value):
        return NOTHING
    rounded = round(value, digits) + 0.0
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else "±"
    return f"{sign}{abs(rounded):,.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Formats a fraction of 1 as 42 %."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value * 100:.{digits}f}{_GAP}%".replace("-", MINUS)


def bias_words(bias: float | None, digits: int = 2) -> str:
    """Formats a judge's bias as "0.40 too high"."""
    if bias is None:
        return "unknown"
    size = f"{abs(bias):.{digits}f}"
    return f"{size} too {'high' if bias > 0 else 'low'}" if float(size) else "even"


def duration(seconds: float | None) -> str:
    """Formats seconds as 340 ms, 2.4 s, 3 min 20 s, 2 h 5 min or 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return MINUS + duration(-seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}{_GAP}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}{_GAP}s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}{_GAP}s"
    if whole < _HOUR:
        return _two(whole, _MINUTE, "min", 1, "s")
    return _two(whole, _HOUR, "h", _MINUTE, "min") if whole < _DAY else _two(whole, _DAY, "d", _HOUR, "h")


def when(value: str | float | datetime | None) -> Markup | str:
    """Returns a `<time>` element in UTC for an ISO string, a datetime, or seconds or milliseconds since 1970.

    `site.js` replaces it with the local time.
    """
    moment = _moment(value)
    if moment is None:
        return NOTHING
    exact, shown = moment.strftime("%Y-%m-%dT%H:%M:%SZ"), moment.strftime("%d %b %Y, %H:%M").lstrip("0")
    return Markup('<time datetime="{}">{} UTC</time>').format(exact, shown.replace(" ", _GAP))


def lines(value: object) -> Markup:
    """Escapes a message, keeping line breaks and showing text in backticks as code."""
    shown = (_QUOTED.sub(r"<code>\1</code>", visible(line)) for line in str(value).splitlines())
    return Markup("<br>").join(Markup(line) for line in shown)  # noqa: S704 - made visible, hence escaped


def _two(whole: int, large: int, large_name: str, small: int, small_name: str) -> str:
    first, rest = divmod(whole, large)
    second = rest // small
    return f"{first}{_GAP}{large_name}" + (f" {second}{_GAP}{small_name}" if second else "")


def _moment(value: str | float | datetime | None) -> datetime | None:
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
        if value is None:
            return None
        return datetime.fromtimestamp(value / 1000 if value > _MILLISECONDS else value, UTC)
    except (ValueError, OverflowError, OSError):
        return None


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
        raise NotFound("There is no such file.")
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


_SECTIONS = ("run", "jobs", "policies", "simulations", "promotions", "settings", "judge", "experiments")
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
    filters = (visible, number, signed, percent, duration, when, quote_path, lines, plural)
    made.filters |= {each.__name__: each for each in filters}
    made.globals |= {
        "csrf": _csrf,
        "here": _here,
        "static": lambda name: assets().url(name),
        "experiment_path": experiment_path,
        "version": tipbench.__version__,
        "NOTHING": NOTHING,
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


Steps = list[tuple[str, str]]

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
