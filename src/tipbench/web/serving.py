"""The policy server: an ASGI application over `serve.PolicyService`, without a framework.

Paths have no parameters, so the routes are a dictionary. Scoring takes microseconds and runs on the event loop.
Operations that read or write the disk run in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote

import msgspec
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

import tipbench
from tipbench.errors import EventNotFound, TipbenchError, UsageError
from tipbench.serve.policy import POLICIES
from tipbench.serve.recommender import Recommender
from tipbench.serve.request import RECOMMEND, RESET, REWARD, SCORE, check_decision_request
from tipbench.serve.service import PolicyService, Result
from tipbench.web.auth import TokenGuard
from tipbench.web.errors import (
    Invalid,
    NotFound,
    TooLarge,
    Unauthorised,
    WebError,
    error_json,
    problem_path,
    status_and_code,
    validation_message,
)
from tipbench.web.metrics import CONTENT_TYPE, Labels, Metrics, labels
from tipbench.web.security import client_key
from tipbench.web.serving_schema import fast_validation, openapi_document

MAX_BODY = 256 * 1024  # bytes
TOKEN_CACHE_S = 5.0  # how long a token is accepted without another check
_RENEW_S = 1.0  # this long before a cached token expires, one request checks it again; the others use the cache
_MAX_CACHED_TOKENS = 1000
_JSON = b"application/json"
_NO_STORE = (b"cache-control", b"no-store")
_RETRY_AFTER = ((b"retry-after", b"1"),)
_GC_THRESHOLDS = (50_000, 20, 100)  # of the three generations, see gc.set_threshold
_validate_recommend = fast_validation(RECOMMEND, check_decision_request)
_validate_score = fast_validation(SCORE, check_decision_request)
_validate_reward = REWARD.validator.validate_json
_validate_reset = RESET.validator.validate_json
_encode = msgspec.json.Encoder().encode  # faster than `to_json`

Headers = tuple[tuple[bytes, bytes], ...]

log = logging.getLogger("tipbench.serving")


def tune_garbage_collector() -> None:
    """Collect garbage less often, because requests allocate many objects but no cycles. Affects the whole process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class Route(NamedTuple):
    """One operation. `handle` gets the validated body, or the query parameters if there is no `validate`."""

    method: str
    handle: Callable[[Any], Result | dict[str, Any]]
    validate: Callable[[bytes], Any] | None = None
    error_path: str | None = None  # the invalid part of the request if `handle` raises UsageError
    in_thread: bool = False


class Response(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = _JSON
    for_shadows: Result | None = None  # a recommendation that shadows have to score too


class PolicyServer:
    """The application of `tipbench serve`."""

    def __init__(
        self,
        service: PolicyService,
        recommender: Recommender,
        guard: TokenGuard,
        *,
        texts: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._recommender = recommender
        self._guard = guard
        self._tip_texts = texts or {}  # by tip id of the catalogue
        self._clock = clock
        self._authorised: dict[bytes, float] = {}  # time of the next check, by Authorization header
        self._checking: set[bytes] = set()  # Authorization headers that are being checked
        self._committing: Future[None] | None = None  # the newest commit of the event log that requests wait for
        self._waiting: list[asyncio.Future[None]] = []  # one future per request that waits for `_committing`
        self._metrics = Metrics()
        self._metrics.register(
            "tipbench_info", "gauge", "Always 1.", lambda: {labels(version=tipbench.__version__): 1.0}
        )
        for name, title in (("calls", "Calls"), ("dropped", "Dropped calls"), ("errors", "Failed calls")):
            read_counts = partial(self._shadow_counts, name)
            self._metrics.register(f"tipbench_shadow_{name}_total", "counter", f"{title} of a shadow.", read_counts)
        self._routes = {  # by path
            "/recommend": Route("POST", self._recommend, _validate_recommend, error_path="body.candidates"),
            "/reward": Route(
                "POST", partial(service.reward, None), _validate_reward
            ),  # None: the policy that served it
            "/reset": Route(
                "POST",
                lambda request: service.reset(request["user_id"], erase=request.get("erase", False)),
                _validate_reset,
                in_thread=True,
            ),
            "/policies": Route("GET", lambda _: recommender.policies(), in_thread=True),
        }
        for policy in POLICIES:
            self._routes[f"/score/{policy}"] = Route("POST", partial(service.score, policy), _validate_score)
            self._routes[f"/reward/{policy}"] = Route("POST", partial(service.reward, policy), _validate_reward)
            read_stats = partial(self._stats, policy)
            self._routes[f"/stats/{policy}"] = Route("GET", read_stats, error_path="query.user_id", in_thread=True)
        for verb in ("score", "reward", "stats"):
            self._routes[f"/{verb}/egreedy"] = self._routes[f"/{verb}/egreedy/v1"]
        openapi_json = to_json(openapi_document())
        self._documents: dict[str, Callable[[], Response]] = {
            "/metrics": lambda: Response(200, self._metrics.text().encode(), content_type=CONTENT_TYPE.encode()),
            "/openapi.json": lambda: Response(200, openapi_json),
        }

    @property
    def paths(self) -> dict[str, str]:
        """The method of every path that needs a token."""
        return {path: route.method for path, route in self._routes.items()} | dict.fromkeys(self._documents, "GET")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Shadows run after the response has been sent."""
        if scope["type"] == "lifespan":
            await receive()  # lifespan.startup
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started_s = time.perf_counter()
        method, path = scope["method"], scope["path"]
        try:
            response = await self._respond(method, path, scope, receive)
        except Exception as exc:
            response = _error_response(exc)
            if response.status == 500:
                log.exception("%s %r failed", method, path[:200])
        status, body, more_headers, content_type, for_shadows = response
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), _NO_STORE, *more_headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})
        if for_shadows is not None:
            self._recommender.queue_for_shadows(for_shadows)
        took_s = time.perf_counter() - started_s
        self._metrics.observe(method, path if path in self._routes else "other", status, took_s)
        if log.isEnabledFor(logging.INFO):  # without the query string, which may contain a user id
            log.info("%s %s %d %.1f ms", method, quote(path[:200]), status, took_s * 1000)

    async def _respond(self, method: str, path: str, scope: Scope, receive: Receive) -> Response:
        route = self._routes.get(path)
        if route is None or route.method != method:
            return await self._respond_without_route(method, path, scope)
        _, handle, validate, error_path, in_thread = route
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"")
        remaining_s = self._authorised.get(authorization, 0.0) - self._clock()
        is_expired = remaining_s <= 0.0
        if is_expired or (remaining_s < _RENEW_S and authorization not in self._checking):
            await self._authorise(scope)
        if validate is not None:
            announced_bytes = int(headers.get(b"content-length", 0))
            request = _validate_body(validate, await _read_body(announced_bytes, receive))
        else:
            request = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            result = await asyncio.to_thread(handle, request) if in_thread else handle(request)
        except UsageError as exc:
            if error_path is None or isinstance(exc, EventNotFound):  # EventNotFound has its own status, 404
                raise
            raise Invalid(str(exc), path=error_path) from exc
        if not isinstance(result, Result):
            return Response(200, to_json(result))
        for_shadows = result if path == "/recommend" and self._recommender.has_enabled_shadow() else None
        response = Response(200, _encode(result.body), for_shadows=for_shadows)
        committed = result.committed
        # Keep only the response while waiting for the commit. Keeping the dictionaries of all waiting requests costs
        # CPU time, probably because they do not fit in the CPU's cache.
        del request, result, for_shadows
        if committed is not None:
            if committed.done():
                committed.result()  # raises if the commit failed
            else:
                await self._wait_for(committed)
        return response

    async def _respond_without_route(self, method: str, path: str, scope: Scope) -> Response:
        """Respond to /healthz, /metrics, /openapi.json, and to unknown paths and methods."""
        if path != "/healthz" and path not in self.paths:
            raise NotFound(f"There is nothing at {path[:200]}. GET /openapi.json lists the routes.")
        allowed = ("GET", "HEAD") if path == "/healthz" else (self.paths[path],)
        if method not in allowed:
            message = f"{path} takes {' or '.join(allowed)} only, not {method[:20]}."
            return _error(405, "method_not_allowed", message, headers=((b"allow", ", ".join(allowed).encode()),))
        if path == "/healthz":
            return Response(200, to_json({"status": "ok", "version": tipbench.__version__}))
        await self._authorise(scope)
        return self._documents[path]()

    async def _authorise(self, scope: Scope) -> None:
        """Check the token and cache the result. Raises Unauthorised, Forbidden or TooManyAttempts."""
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, secret = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorised("A token is needed: send 'Authorization: Bearer TOKEN'.", path="header.authorization")
        client = client_key(scope["client"][0] if scope.get("client") else None)
        next_check_at = self._clock() + TOKEN_CACHE_S
        self._checking.add(header)
        try:
            await asyncio.to_thread(self._guard.by_token, secret.strip(), client)
        except BaseException:
            self._authorised.pop(header, None)
            raise
        finally:
            self._checking.discard(header)
        if len(self._authorised) >= _MAX_CACHED_TOKENS:  # one token can have many headers, with different spaces
            self._authorised.clear()
        self._authorised[header] = next_check_at

    def _wait_for(self, committed: Future[None]) -> asyncio.Future[None]:
        """Return an asyncio future that completes with the commit. Waiters of one commit share a callback."""
        loop = asyncio.get_running_loop()
        if self._committing is not committed:
            self._committing, self._waiting = committed, []
            finish_waiting = partial(_finish_waiting, self._waiting)
            committed.add_done_callback(lambda done: loop.call_soon_threadsafe(finish_waiting, done))
        waiter = loop.create_future()
        self._waiting.append(waiter)
        return waiter

    def _recommend(self, request: Any) -> Result:
        result = self._recommender.recommend(request)
        if request.get("candidates") is None:  # the tip is from the catalogue, so the client lacks its text
            result.body["tip"] = self._tip_texts.get(result.body["chosen"])
        return result

    def _stats(self, policy: str, query: Mapping[str, list[str]]) -> dict[str, Any]:
        user_ids = query.get("user_id", [])
        if len(user_ids) > 1 or query.keys() - {"user_id"}:
            raise Invalid("The only parameter is one user_id.", path="query")
        return self._service.stats(policy, user_ids[0] if user_ids else None)

    def _shadow_counts(self, name: str) -> dict[Labels, float]:
        shadows = self._recommender.policies()["shadows"]
        return {labels(shadow=shadow): float(counts[name]) for shadow, counts in shadows.items()}


def _finish_waiting(waiting: list[asyncio.Future[None]], committed: Future[None]) -> None:
    error = committed.exception()
    for waiter in waiting:
        if waiter.done():  # its request was cancelled
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _validate_body(validate: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return validate(body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        first = errors[0]
        if first["type"] == "json_invalid":
            raise WebError(f"The body is not valid JSON: {first['msg']}.", path="body", code="not_json") from None
        raise Invalid(validation_message(errors), path=problem_path(first)) from None


async def _read_body(announced_bytes: int, receive: Receive) -> bytes:
    """Return the body or raise TooLarge. The body is not read if the announced size is too large."""
    body = b""
    must_read = announced_bytes <= MAX_BODY
    while must_read and len(body) <= MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        must_read = message.get("more_body", False)
    size = max(len(body), announced_bytes)
    if size > MAX_BODY:
        raise TooLarge(
            f"A body has at most {MAX_BODY // 1024} KiB (got {size // 1024} KiB). Send fewer candidates.",
            path="body",
            headers={"Connection": "close"},
        )
    return body


def _error_response(exc: Exception) -> Response:
    if isinstance(exc, WebError):
        headers = tuple((name.lower().encode(), value.encode("latin-1")) for name, value in exc.headers.items())
        return _error(exc.status, exc.code, str(exc), exc.path, headers)
    if not isinstance(exc, TipbenchError):
        return _error(500, "internal", "Something went wrong in tipbench itself; the log has more.")
    status, code = status_and_code(exc)
    if status == 500:  # in the policy server, only errors of its database have this status
        log.error("the store cannot be used: %s", exc)
        message = "The store cannot be used, and nothing was learned. The server's log has the reason; retry later."
        return _error(503, "store_unavailable", message, headers=_RETRY_AFTER)
    if status == 400:  # a UsageError; this server uses 400 for bodies that are not JSON, and 422 for invalid values
        status, code = 422, "invalid"
    return _error(status, code, str(exc), headers=_RETRY_AFTER if status == 503 else ())


def _error(status: int, code: str, message: str, path: str | None = None, headers: Headers = ()) -> Response:
    return Response(status, to_json(error_json(code, message, path)), headers)
