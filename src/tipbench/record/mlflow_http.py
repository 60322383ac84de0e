"""Sends JSON requests to MLflow, with retries and readable errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from tipbench.errors import MlflowError, MlflowUnavailable, UsageError
from tipbench.http import TOO_MANY_FILES_ADVICE, http_client, is_too_many_files, read_body
from tipbench.record.mlflow_wire import Json

MAX_BYTES = 64 * 1024 * 1024
KEEPALIVE_S = 4.0  # MLflow's server closes an idle connection after 5 s: close it first
RESPONSE_TIMEOUT_FACTOR = 4  # times the timeout, for a whole response; httpx limits only the wait for each chunk
_UNAVAILABLE_CODES = frozenset({"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"})
_NOT_IDEMPOTENT = frozenset({"runs/create", "experiments/create"})
_RETRY_WAITS_S = (0.2, 1.0)
_UNAVAILABLE_STATUSES = frozenset({408, 429, 502, 503, 504})
_REQUEST_SENT = "http11.send_request_body.complete"  # an event of httpx's trace extension
_VERSION_PATTERN = re.compile(r"\d+\.\d+[\w.+-]{0,40}\s*\Z")


class TooLarge(MlflowError):
    """The response exceeds the size limit."""


class _ConnectionLost(MlflowUnavailable):
    """The connection was lost after it was established."""


class MlflowHttp:
    """Keep-alive client for one MLflow server."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        client: httpx.Client | None = None,
        username: str | None = None,
        password: str | None = None,
        token: str | None = None,
        host_header: str | None = None,
    ) -> None:
        parsed = _parse_url(url)
        self.url = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        self._timeout_s = timeout_s
        self._urls: dict[str, httpx.URL] = {}  # cached: parsing one takes as long as building the rest of a request
        self._client = client or http_client(
            self.url, timeout=timeout_s, limits=httpx.Limits(max_connections=8, keepalive_expiry=KEEPALIVE_S)
        )
        if host_header:
            self._client.headers["host"] = host_header
        self.host = self._client.headers.get("host", parsed.netloc.decode("ascii"))
        self._client.headers["content-type"] = "application/json"
        if token:
            self._client.headers["authorization"] = f"Bearer {token}"
        elif username:
            self._client.auth = httpx.BasicAuth(username, password or "")
        elif parsed.username:
            self._client.auth = httpx.BasicAuth(parsed.username, parsed.password)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, params: dict[str, str]) -> Json:
        """Send GET {base}/api/2.0/mlflow/{path} and return the response."""
        request = self._client.build_request("GET", f"{self.url}/api/2.0/mlflow/{path}", params=params)
        return self.parse(self._call(request, retry=True))

    def post(self, path: str, body: Json) -> Json:
        """Send POST {base}/api/2.0/mlflow/{path} and return the response."""
        return self.parse(self.post_unparsed(path, body))

    def post_unparsed(self, path: str, body: Json, on_sent: Callable[[], None] | None = None) -> bytearray:
        """Like `post`, but return the body, for `parse`. Calls `on_sent` as soon as the request is sent."""
        content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(f"{self.url}/api/2.0/mlflow/{path}")
        request = self._client.build_request("POST", url, content=content)
        if on_sent is not None:

            def trace(event: str, _info: object) -> None:
                if event == _REQUEST_SENT:
                    on_sent()

            request.extensions["trace"] = trace
        return self._call(request, retry=path not in _NOT_IDEMPOTENT)

    def parse(self, body: bytearray) -> Json:
        """Parse the body of a response; raises MlflowError if it is not a JSON object."""
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise MlflowError(
                f"Not an MLflow server at {self._where()}: {_excerpt(body)}. Check --mlflow-url.",
                code="NOT_MLFLOW",
                status=200,
            )
        return parsed

    def is_mlflow(self) -> bool:
        """Return whether MLflow responds; False for another program on the port, or if a login is required."""
        try:
            status, version = self._send(self._client.build_request("GET", f"{self.url}/version"))
            if status != 200 or not _VERSION_PATTERN.match(version[:60].decode("utf-8", "replace")):
                return False
            return isinstance(self.get("experiments/search", {"max_results": "1"}).get("experiments", []), list)
        except (MlflowUnavailable, MlflowError):
            return False

    def _call(self, request: httpx.Request, *, retry: bool) -> bytearray:
        """Send a request and return the body. With `retry`, a lost connection or a server error is retried.

        A refused connection or a timeout is not retried: callers decide how long to wait for the server.
        """
        retry_waits_s = _RETRY_WAITS_S if retry else ()
        for wait_s in retry_waits_s:
            with suppress(_ConnectionLost):
                status, body = self._send(request)
                if status < 500:
                    return self._body_or_raise(status, body)
            time.sleep(wait_s)
        status, body = self._send(request)
        return self._body_or_raise(status, body)

    def _body_or_raise(self, status: int, body: bytearray) -> bytearray:
        if status != 200:
            raise self._failure(status, body)
        return body

    def _send(self, request: httpx.Request) -> tuple[int, bytearray]:
        deadline = time.monotonic() + self._timeout_s * RESPONSE_TIMEOUT_FACTOR
        try:
            response = self._client.send(request, stream=True)
            try:
                body = read_body(response, limit=MAX_BYTES, deadline=deadline)
            finally:
                response.close()
        except httpx.TimeoutException as exc:
            raise MlflowUnavailable(f"MLflow at {self._where()} did not respond within {self._timeout_s:g} s.") from exc
        except httpx.DecodingError as exc:
            raise MlflowError(f"The response of {self._where()} cannot be decompressed: {exc}.") from exc
        except httpx.RequestError as exc:
            if is_too_many_files(exc):
                raise MlflowUnavailable(
                    f"MLflow at {self._where()} could not be reached: {TOO_MANY_FILES_ADVICE}."
                ) from exc
            is_lost = isinstance(exc, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)
            error_class = _ConnectionLost if is_lost else MlflowUnavailable
            reason = str(exc) or type(exc).__name__
            raise error_class(f"MLflow at {self._where()} cannot be reached: {reason}. Is it running?") from exc
        if body is None:
            raise TooLarge(f"MLflow at {self.url} returned more than {MAX_BYTES // 2**20} MB.", code="TOO_LARGE")
        return response.status_code, body

    def _failure(self, status: int, body: bytearray) -> MlflowUnavailable | MlflowError:
        try:
            error = json.loads(body)
            code, message = str(error["error_code"]), str(error.get("message", ""))[:2000]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            code, message = "", _excerpt(body)
        if status in _UNAVAILABLE_STATUSES or code in _UNAVAILABLE_CODES:
            return MlflowUnavailable(f"MLflow at {self._where()} is not available: HTTP {status}, {message}.")
        code_note = f", {code}" if code else ""
        text = f"MLflow at {self.url} rejected the request (HTTP {status}{code_note}): {message}"
        if status == 401:
            text = (
                f"MLflow at {self.url} requires a login (HTTP 401, {message}). Give a user name and password "
                "(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD) or a token (MLFLOW_TRACKING_TOKEN); they are "
                "sent only to the server of MLFLOW_TRACKING_URI."
            )
        elif status == 403 and not code:
            text = (
                f"MLflow at {self.url} denied access (HTTP 403, {message}). It was sent 'Host: {self.host}'. "
                f"Unless the account lacks permissions, start MLflow with --allowed-hosts {self.host}, or, where "
                "that cannot be changed, set TIPBENCH_MLFLOW_HOST_HEADER to a host that it allows."
            )
        elif status in {404, 405} and not code:
            text = (
                f"There is no MLflow API at {self.url}/api/2.0/mlflow (HTTP {status}, Host {self.host}). If MLflow "
                "is served under a prefix, add it to the URL, as in http://host:5000/mlflow; otherwise remove the path."
            )
        elif 300 <= status < 400:
            text = f"{self._where()} redirects (HTTP {status}). Set --mlflow-url to the final address."
        return MlflowError(text, code=code, status=status)

    def _where(self) -> str:
        return f"{self.url} (Host: {self.host})"


def _parse_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url.strip())
    except (httpx.InvalidURL, TypeError) as exc:
        raise UsageError(f"{url!r} is not a URL: {exc}. Use one like http://localhost:5000.") from exc
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise UsageError(
            f"tipbench speaks MLflow's REST API, so it needs an http or https URL of a tracking server, not {url!r}. "
            "Start one with `tipbench mlflow up` or `mlflow server`, and give its address."
        )
    return parsed.copy_with(query=None, fragment=None)


def _excerpt(body: bytearray) -> str:
    text = " ".join(body[:400].decode("utf-8", "replace").split())
    return repr(text[:120]) if text else "an empty response"
