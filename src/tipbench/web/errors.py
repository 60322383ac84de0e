"""Responses: JSON, downloads, and errors as {"error": {"code", "message", "path"}}.

`code` is for programs and does not change. `message` is for people. `path` is the invalid part of the request
(`body.n_tips`, `query.limit`, `header.host`) or null. The message of an unexpected error contains only the request id,
which is also in the log.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, RedirectResponse, Response

from tipbench import errors
from tipbench.workflows.judging import refused_json


class SafeJsonResponse(JSONResponse):
    """JSON response. NaN and infinity become null, lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Return compact JSON in UTF-8."""
    try:
        text = _dumps(content)
    except ValueError:  # NaN or infinity: too rare to check every value beforehand
        text = _dumps(_replace_nan(content))
    return text.encode("utf-8", "backslashreplace")


def _dumps(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)


def _replace_nan(value: Any) -> Any:
    """Replace NaN and infinity by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _replace_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nan(each) for each in value]
    return value


def attachment(name: str, extension: str) -> dict[str, str]:
    """Return the header of a download, with a file name that is valid on every file system."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip(".-") or "tipbench"
    return {"Content-Disposition": f'attachment; filename="{stem}.{extension}"'}


INTERNAL_ERROR = "Internal error in tipbench."  # start of the message of an unexpected error
_MAX_PROBLEMS = 10  # in one message
_FORM_TYPES = frozenset({"application/x-www-form-urlencoded", "multipart/form-data"})

STATUSES_AND_CODES: tuple[tuple[type[errors.TipbenchError], int, str], ...] = (  # the first match applies
    (errors.InvalidOption, 422, "invalid"),
    (errors.SuiteError, 400, "suite_error"),
    (errors.ModelRefused, 409, "model_refused"),
    (errors.JobNotFound, 404, "not_found"),
    (errors.EventNotFound, 404, "not_found"),
    (errors.UsageError, 400, "misused"),
    (errors.NotEnoughData, 409, "not_enough_data"),
    (errors.OllamaUnavailable, 503, "ollama_away"),
    (errors.MlflowUnavailable, 503, "mlflow_away"),
    (errors.AirflowUnavailable, 503, "airflow_away"),
    (errors.ServerUnavailable, 503, "server_away"),
    (errors.LocalMlflowError, 503, "mlflow_away"),  # the MLflow server that tipbench starts itself
    (errors.MlflowError, 502, "mlflow_refused"),
    (errors.OllamaError, 502, "ollama_refused"),
    (errors.AirflowError, 502, "airflow_refused"),
    (errors.CorruptText, 502, "corrupt_text"),
    (errors.ResidencyError, 409, "memory_in_use"),
    (errors.LockHeld, 409, "in_use"),
    (errors.MixedRubrics, 409, "mixed_rubrics"),
    (errors.SheetRefused, 422, "sheet_refused"),
    (errors.SheetsClosed, 409, "sheets_closed"),
    (errors.WeightsError, 409, "weights_missing"),
    (errors.JobConflict, 409, "job_conflict"),
    (errors.JobStartError, 409, "not_started"),
    (errors.QueueFull, 503, "queue_full"),
    (errors.EventConflict, 409, "event_conflict"),
    (errors.StateError, 500, "state_error"),
    (errors.JournalError, 500, "journal_error"),
    (errors.TipbenchError, 500, "failed"),
)


def status_and_code(exc: errors.TipbenchError) -> tuple[int, str]:
    """Return the HTTP status and the error code."""
    return next((status, code) for kind, status, code in STATUSES_AND_CODES if isinstance(exc, kind))


# Errors whose messages are shown to judges; other messages may name a run or a model.
_SHOWN_TO_JUDGES = (errors.SheetRefused, errors.SheetsClosed, errors.NotEnoughData, errors.LockHeld)
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_M = TypeVar("_M", bound=BaseModel)


class WebError(Exception):
    """Error with an HTTP status."""

    status = 400
    code = "bad_request"

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        detail: Mapping[str, Any] | None = None,  # added to the response
    ) -> None:
        super().__init__(message)
        self.path = path
        self.detail = detail
        self.code = code or type(self).code
        self.headers = dict(headers or {})


class Unauthorised(WebError):
    """401: missing or invalid credentials."""

    status, code = 401, "unauthorised"

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message, path=path, headers={"WWW-Authenticate": 'Bearer realm="tipbench"'})


class Forbidden(WebError):
    """403: authenticated but not allowed."""

    status, code = 403, "forbidden"


class NotFound(WebError):
    """404: the resource does not exist."""

    status, code = 404, "not_found"


class Conflict(WebError):
    """409: the request conflicts with the current state."""

    status, code = 409, "conflict"


class TooLarge(WebError):
    """413: the request body is too large."""

    status, code = 413, "too_large"


class Invalid(WebError):
    """422: a value in the request is invalid."""

    status, code = 422, "invalid"


class TooManyAttempts(WebError):
    """429: too many failed authentication attempts."""

    status, code = 429, "too_many_attempts"

    def __init__(self, wait_s: float) -> None:
        seconds = max(1, math.ceil(wait_s))
        super().__init__(
            f"Too many failed attempts from this address. Try again in {seconds} s.",
            headers={"Retry-After": str(seconds)},
        )


class Busy(WebError):
    """429: too many concurrent requests."""

    status, code = 429, "busy"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Retry-After": "5"})


def error_json(code: str, message: str, path: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"error": {"code": code, "message": message, "path": path}}


def install(app: FastAPI) -> None:
    """Install the exception handlers."""
    app.exception_handler(WebError)(_web_error)
    app.exception_handler(errors.TipbenchError)(_tipbench_error)
    app.exception_handler(RequestValidationError)(_validation_error)
    app.exception_handler(HTTPException)(_http_error)


def wants_page(request: Request) -> bool:
    """Return whether to respond with an HTML page: true for browser requests outside the API."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_navigation = request.method == "GET" or content_type in _FORM_TYPES
    accepts_html = "text/html" in request.headers.get("accept", "")
    return is_navigation and accepts_html and not request.url.path.startswith("/api/")


async def _web_error(request: Request, exc: WebError) -> Response:
    if isinstance(exc, Unauthorised) and wants_page(request):
        target = "/"  # for a form: it is not submitted again after login
        if request.method == "GET":
            target = quote(request.scope["path"], safe="/")  # the path in the scope is decoded, the query is not
            if request.url.query:
                target += f"?{request.url.query}"
        return RedirectResponse(f"/login?next={quote(target, safe='')}", status_code=303)
    detail = {} if exc.detail is None else {"detail": exc.detail}
    return _respond(request, exc.status, {**error_json(exc.code, str(exc), exc.path), **detail}, exc.headers)


async def _tipbench_error(request: Request, exc: errors.TipbenchError) -> Response:
    status, code = status_and_code(exc)
    message = str(exc)
    identity = getattr(request.state, "identity", None)
    hides_message = identity is not None and identity.is_judge and not isinstance(exc, _SHOWN_TO_JUDGES)
    if hides_message:
        request_id = getattr(request.state, "request_id", "unknown")
        message = f"The request failed. Ask an admin; the log has the details under {request_id}."
    if hides_message or status >= 500:
        request.state.failure = exc  # logged: the message refers to the log, or the client cannot fix the error
    headers = {"Retry-After": "5"} if status == 503 else None
    body = refused_sheet(exc) if isinstance(exc, errors.SheetRefused) else error_json(code, message)
    return _respond(request, status, body, headers)


def refused_sheet(exc: errors.SheetRefused) -> dict[str, Any]:
    """Return the response body for an invalid sheet, with the fields of `judge apply --json`."""
    _, code = status_and_code(exc)
    refusal = refused_json(exc)
    first, *_ = refusal["errors"]
    return {**error_json(code, str(exc), path=f"body.{first['field']}"), **refusal}


async def _validation_error(request: Request, exc: RequestValidationError) -> Response:
    problems = exc.errors()
    return _respond(request, 422, error_json("invalid", validation_message(problems), problem_path(problems[0])))


def validate_part(model: type[_M], raw: Mapping[str, Any], part: str) -> _M:
    """Validate a part of the request, such as `body`. Raises Invalid with the path of the wrong field."""
    with convert_validation_errors(part):
        return model.model_validate(raw)


@contextmanager
def convert_validation_errors(part: str) -> Iterator[None]:
    """Convert pydantic's ValidationError into Invalid; `part` is the part of the request, such as `query`."""
    try:
        yield
    except ValidationError as exc:
        problems = [{**error, "loc": (part, *error["loc"])} for error in exc.errors(include_url=False)]
        raise Invalid(validation_message(problems), path=problem_path(problems[0])) from exc


@contextmanager
def convert_option_errors(part: str) -> Iterator[None]:
    """Convert InvalidOption into Invalid; `part` is the part of the request, such as `body`."""
    try:
        yield
    except errors.InvalidOption as exc:
        raise Invalid(f"{exc.key} {exc.problem}", path=f"{part}.{exc.key}") from exc


@contextmanager
def convert_usage_errors(path: str) -> Iterator[None]:
    """Convert UsageError into Invalid; `path` is that of the value, such as `body.name`."""
    try:
        yield
    except errors.UsageError as exc:
        raise Invalid(str(exc), path=path) from exc


def validation_message(problems: Sequence[Any]) -> str:
    """Return pydantic's errors as one line, each with its path and the invalid value."""
    texts = []
    for problem in problems[:_MAX_PROBLEMS]:
        message = str(problem["msg"]).removeprefix("Value error, ")
        # A missing value cannot be shown; our own validators (value_error) write complete messages.
        shows_value = problem["type"] not in ("missing", "value_error")
        got = f" (got {str(problem.get('input'))[:80]!r})" if shows_value else ""
        texts.append(f"{problem_path(problem)}: {message}{got}")
    if len(problems) > _MAX_PROBLEMS:
        texts.append(f"and {len(problems) - _MAX_PROBLEMS} more")
    return "; ".join(texts)


def problem_path(problem: Any) -> str:
    """Return the path of a pydantic error in the request; shortened, because it may contain long keys of a client."""
    return ".".join(str(part)[:80] for part in problem["loc"][:8]) or "body"


async def _http_error(request: Request, exc: HTTPException) -> Response:
    status = exc.status_code
    message = {
        404: f"Not found: {request.url.path[:200]}.",
        405: f"{request.method[:20]} is not allowed for {request.url.path[:200]}; see the header Allow.",
    }.get(status, str(exc.detail))
    return _respond(request, status, error_json(_HTTP_CODES.get(status, "bad_request"), message), exc.headers)


def _respond(request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    error_page = getattr(request.app.state, "error_page", None)
    if error_page is not None and wants_page(request):
        response: Response = error_page(request, status, body["error"])
        response.headers.update(headers or {})
        return response
    return SafeJsonResponse(body, status, headers=headers)
