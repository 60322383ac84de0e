"""The policy server: an ASGI application over `serve.PolicyService`, without a framework.

All paths are fixed, so a route is a dictionary entry, and requests are validated straight from their bytes. Scoring
takes microseconds and runs on the event loop. Operations that read or write the disk run in a thread.
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
from tipbench.serve.request import RECOMMEND, RESET, REWARD, SCORE, check_occasion, check_user_id
from tipbench.serve.service import Answer, PolicyService
from tipbench.web.auth import TokenGuard
from tipbench.web.errors import (
    Invalid,
    NotFound,
    TooLarge,
    Unauthorised,
    WebError,
    error_json,
    place_of,
    status_and_code,
    validation_message,
)
from tipbench.web.metrics import CONTENT_TYPE, Metrics
from tipbench.web.security import client_key
from tipbench.web.serving_schema import fast_validation, openapi_document

MAX_BODY = 256 * 1024  # bytes
TOKEN_CACHE_S = 5.0  # how long a token is accepted without another check
_RENEW_S = 1.0  # in the last second, one request checks the token again, so that the others never wait for a check
_MAX_CACHED_TOKENS = 1000
_JSON = b"application/json"
_NO_STORE = (b"cache-control", b"no-store")
_RETRY_AFTER = ((b"retry-after", b"1"),)
_GC_THRESHOLD = 50_000  # allocations
_recommend_request = fast_validation(RECOMMEND, check_occasion)
_score_request = fast_validation(SCORE, check_occasion)
_reward_request = REWARD.validator.validate_json
_reset_request = RESET.validator.validate_json
_encode = msgspec.json.Encoder().encode  # the answers to scores and rewards, faster than `to_json`

log = logging.getLogger("tipbench.serving")


def tune_garbage_collector() -> None:
    """Collect garbage less often, in a process that only serves: requests allocate many objects without cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 100)


class Route(NamedTuple):
    """One operation. `handle` gets the result of `validate` for the body; without `validate`, the query parameters."""

    handle: Callable[[Any], Answer | dict[str, Any]]
    validate: Callable[[bytes], Any] | None = None
    error_path: str | None = None  # the part of the request that a UsageError is about
    in_thread: bool = False  # because it reads or writes the disk


class Reply(NamedTuple):
    """A response; `served` is the recommender's answer if shadows have to score it."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = _JSON
    served: Answer | None = None


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
        self._tips = texts or {}  # the catalogue's, by tip id
        self._clock = clock
        self._authorised: dict[bytes, float] = {}  # by Authorization header: when it must be checked again
        self._checking: set[bytes] = set()  # headers that are being checked
        self._committing: Future[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []  # requests whose entries are part of `_committing`
        self._metrics = Metrics()
        self._metrics.register(
            "tipbench_info", "gauge", "Always 1.", lambda: {(("version", tipbench.__version__),): 1.0}
        )
        for name, about in (("calls", "Calls"), ("dropped", "Dropped calls"), ("errors", "Failed calls")):
            reading = partial(self._shadow_counts, name)
            self._metrics.register(f"tipbench_shadow_{name}_total", "counter", f"{about} of a shadow.", reading)
        self._routes: dict[str, dict[str, Route]] = {
            "/recommend": {"POST": Route(self._recommend, _recommend_request, "body.candidates")},
            "/reward": {"POST": Route(partial(service.reward, None), _reward_request)},
            "/reset": {
                "POST": Route(
                    lambda sent: service.reset(sent["user_id"], erase=sent.get("erase", False)),
                    _reset_request,
                    in_thread=True,
                )
            },
            "/policies": {"GET": Route(lambda _: recommender.policies(), in_thread=True)},
        }
        for policy in POLICIES:
            self._routes[f"/score/{policy}"] = {"POST": Route(partial(service.score, policy), _score_request)}
            self._routes[f"/reward/{policy}"] = {"POST": Route(partial(service.reward, policy), _reward_request)}
            self._routes[f"/stats/{policy}"] = {
                "GET": Route(partial(self._stats, policy), None, "query.user_id", in_thread=True)
            }
        for verb in ("score", "reward", "stats"):
            self._routes[f"/{verb}/egreedy"] = self._routes[f"/{verb}/egreedy/v1"]
        document = to_json(openapi_document())
        self._documents: dict[str, Callable[[], Reply]] = {
            "/metrics": lambda: Reply(200, self._metrics.text().encode(), content_type=CONTENT_TYPE.encode()),
            "/openapi.json": lambda: Reply(200, document),
        }

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The methods of every path that needs a token."""
        return {path: tuple(methods) for path, methods in self._routes.items()} | dict.fromkeys(
            self._documents, ("GET",)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; shadows run after the response has been sent."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = time.perf_counter()
        method, path = scope["method"], scope["path"]
        try:
            reply = await self._reply(method, path, scope, receive)
        except Exception as exc:
            reply = _error_reply(exc)
            if reply.status == 500:
                log.exception("%s %r failed", method, path[:200])
        status, body, more_headers, content_type, served = reply
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), _NO_STORE, *more_headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if method == "HEAD" else body})
        if served is not None:
            self._recommender.queue_for_shadows(served)
        took = time.perf_counter() - started
        self._metrics.observe(method, path if path in self._routes else "other", status, took)
        if log.isEnabledFor(logging.INFO):  # without the query string, which may contain a user id
            log.info("%s %s %d %.1f ms", method, quote(path[:200]), status, took * 1000)

    async def _reply(self, method: str, path: str, scope: Scope, receive: Receive) -> Reply:
        methods = self._routes.get(path)
        route = methods.get(method) if methods else None
        if route is None:
            return await self._other(method, path, scope)
        handle, validate, error_path, in_thread = route
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"")
        left_s = self._authorised.get(authorization, 0.0) - self._clock()
        if left_s <= 0.0 or (left_s < _RENEW_S and authorization not in self._checking):
            await self._authorise(scope)
        if validate is not None:
            sent = _validated(validate, await _read_body(int(headers.get(b"content-length", 0)), receive))
        else:
            sent = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        try:
            answer = await asyncio.to_thread(handle, sent) if in_thread else handle(sent)
        except UsageError as exc:
            if error_path is None or isinstance(exc, EventNotFound):
                raise
            raise Invalid(str(exc), path=error_path) from exc
        if not isinstance(answer, Answer):
            return Reply(200, to_json(answer))
        served = answer if validate is _recommend_request and self._recommender.has_shadows() else None
        reply = Reply(200, _encode(answer.body), (), _JSON, served)
        committed = answer.committed
        # Keep only the reply while waiting for the commit. With the dictionaries of all waiting requests in memory,
        # each request takes more CPU time, probably because they do not fit in the CPU's cache.
        del sent, answer, served
        if committed is not None:
            committed.result() if committed.done() else await self._wait_for(committed)
        return reply

    async def _other(self, method: str, path: str, scope: Scope) -> Reply:
        """Reply to requests without a route: health, metrics, the OpenAPI document, unknown paths and methods."""
        allowed = self.paths.get(path, ("GET", "HEAD") if path == "/healthz" else ())
        if not allowed:
            raise NotFound(f"There is nothing at {path[:200]}. GET /openapi.json lists the routes.")
        if method not in allowed:
            body = to_json(
                error_json("method_not_allowed", f"{path} takes {' or '.join(allowed)} only, not {method[:20]}.")
            )
            return Reply(405, body, ((b"allow", ", ".join(allowed).encode()),))
        if path == "/healthz":
            return Reply(200, to_json({"status": "ok", "version": tipbench.__version__}))
        await self._authorise(scope)
        return self._documents[path]()

    async def _authorise(self, scope: Scope) -> None:
        """Check the token; raises Unauthorised, Forbidden or TooManyAttempts."""
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, secret = header.decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorised("A token is needed: send 'Authorization: Bearer TOKEN'.", path="header.authorization")
        client = client_key(scope["client"][0] if scope.get("client") else None)
        until = self._clock() + TOKEN_CACHE_S
        self._checking.add(header)
        try:
            await asyncio.to_thread(self._guard.by_token, secret.strip(), client)
        except BaseException:
            self._authorised.pop(header, None)
            raise
        finally:
            self._checking.discard(header)
        if len(self._authorised) >= _MAX_CACHED_TOKENS:  # headers of one token may differ in spaces
            self._authorised.clear()
        self._authorised[header] = until

    def _wait_for(self, committed: Future[None]) -> asyncio.Future[None]:
        """Return a future of the event loop for a commit; one callback wakes all requests that wait for it."""
        loop = asyncio.get_running_loop()
        if self._committing is not committed:
            self._committing, self._waiting = committed, []
            wake_up = partial(_wake_up, self._waiting)
            committed.add_done_callback(lambda done: loop.call_soon_threadsafe(wake_up, done))
        self._waiting.append(waiter := loop.create_future())
        return waiter

    def _recommend(self, request: Any) -> Answer:
        answer = self._recommender.recommend(request)
        if request.get("candidates") is None:
            answer.body["tip"] = self._tips.get(answer.body["chosen"])
        return answer

    def _stats(self, policy: str, query: Mapping[str, list[str]]) -> dict[str, Any]:
        users = query.get("user_id", [])
        if len(users) > 1 or query.keys() - {"user_id"}:
            raise Invalid("The only parameter is one user_id.", path="query")
        user = check_user_id(users[0]) if users else None
        return self._service.stats(policy, user)

    def _shadow_counts(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        shadows = self._recommender.policies()["shadows"]
        return {(("shadow", shadow),): float(state[name]) for shadow, state in shadows.items()}


def _wake_up(waiting: list[asyncio.Future[None]], committed: Future[None]) -> None:
    error = committed.exception()
    for waiter in waiting:
        if waiter.done():  # its request was cancelled
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _validated(validate: Callable[[bytes], Any], body: bytes) -> Any:
    """Validate a body; raises WebError if it is not JSON, and Invalid with the path of the wrong field."""
    try:
        return validate(body)
    except ValidationError as exc:
        found = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        if found[0]["type"] == "json_invalid":
            raise WebError(f"The body is not valid JSON: {found[0]['msg']}.", path="body", code="not_json") from None
        raise Invalid(validation_message(found), path=place_of(found[0])) from None


async def _read_body(announced: int, receive: Receive) -> bytes:
    """Return the body; raises TooLarge, before reading it if its announced size is too large."""
    body, more = b"", announced <= MAX_BODY
    while more and len(body) <= MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    size = max(len(body), announced)
    if size > MAX_BODY:
        raise TooLarge(
            f"A body has at most {MAX_BODY // 1024} KiB (got {size // 1024} KiB). Send fewer candidates.",
            path="body",
            headers={"Connection": "close"},
        )
    return body


def _error_reply(exc: Exception) -> Reply:
    if isinstance(exc, WebError):
        headers = tuple((name.lower().encode(), value.encode("latin-1")) for name, value in exc.headers.items())
        return Reply(exc.status, to_json(error_json(exc.code, str(exc), exc.path)), headers)
    if not isinstance(exc, TipbenchError):
        return Reply(500, to_json(error_json("internal", "Something went wrong in tipbench itself; the log has more.")))
    status, code = status_and_code(exc)
    if status == 500:
        log.error("the store cannot be used: %s", exc)
        message = "The store cannot be used, and nothing was learned. The server's log has the reason; retry later."
        return Reply(503, to_json(error_json("store_unavailable", message)), _RETRY_AFTER)
    if status == 400:  # a UsageError: the request is JSON, and a value in it is invalid
        status, code = 422, "invalid"
    return Reply(status, to_json(error_json(code, str(exc))), _RETRY_AFTER if status == 503 else ())
