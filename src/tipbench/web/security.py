"""Request security: allowed hosts, response headers, limits of body size and concurrency."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from asyncio import Semaphore
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tipbench.errors import UsageError
from tipbench.judge.sheet_file import MAX_BYTES as MAX_SHEET_BYTES
from tipbench.text import plural
from tipbench.web.errors import INTERNAL_ERROR, Busy, SafeJsonResponse, TooLarge, error_json
from tipbench.web.metrics import Metrics

if TYPE_CHECKING:
    from tipbench.web.auth import Identity

log = logging.getLogger("tipbench.web")
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?", re.ASCII)
_MAX_HOST_LENGTH = 255  # characters


@dataclass(frozen=True)
class Hosts:
    """Allowed host names, in addition to loopback names."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> Hosts:
        """Parse configured names or addresses without ports. Raises UsageError if one is invalid."""
        allowed = set()
        for name in names:
            host = host_without_port(name.strip().lower())
            if host is None:
                raise UsageError(
                    "panel_hosts must be names or addresses without scheme and port, separated by commas "
                    f"(got {name[:80]!r}), for example tips.example.org,10.0.0.7"
                )
            allowed.add(host)
        return cls(frozenset(allowed))

    def allows(self, header: str) -> bool:
        """Whether the Host header is allowed."""
        name = host_name(header)
        return name is not None and (name in self.names or is_loopback_name(name))

    def same_origin(self, origin: str, host_header: str) -> bool:
        """Whether an Origin header is the panel's own: equal to the Host header, or a configured name on any port.

        A loopback name must be equal to the Host header, port included: another port of localhost is another program.
        """
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            return False
        if parts.netloc.lower() == host_header.lower():
            return True
        name = host_name(parts.netloc)
        return name is not None and name in self.names and not is_loopback_name(name)


def host_name(header: str) -> str | None:
    """Return the normalised host name of a Host header, without port; None if the header is invalid."""
    text = header.lower()
    if not text.isascii() or len(text) > _MAX_HOST_LENGTH:
        return None
    if text.startswith("["):
        inside, bracket, after = text[1:].partition("]")
        has_port = after.startswith(":") and _is_port(after[1:])
        is_valid = bool(bracket) and (not after or has_port)
        return _ipv6_address(inside) if is_valid else None
    name, colon, port = text.partition(":")
    if colon and not _is_port(port):
        return None
    return name.rstrip(".") if _HOST_NAME.fullmatch(name) else None


def host_without_port(text: str) -> str | None:
    """Return the normalised name or address, such as `::1` for `[::1]`; None if it is invalid or has a port."""
    has_port = ":" in text and not text.endswith("]")
    return _ipv6_address(text) or (None if has_port else host_name(text))


def is_loopback_name(name: str) -> bool:
    """Whether a name returned by `host_name` is a loopback name or address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _ipv6_address(text: str) -> str | None:
    """Return the normalised IPv6 address; None if it is invalid or has a zone."""
    try:
        return str(ipaddress.IPv6Address(text)) if "%" not in text else None
    except ValueError:
        return None


def _is_port(text: str) -> bool:
    return bool(_PORT.fullmatch(text)) and int(text) <= 65535


_IPV6_PREFIX = 64  # a client usually controls a whole /64 network


def client_key(host: str | None) -> str:
    """Return the key of a client for rate limits: its IPv4 address, or the /64 network of its IPv6 address."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = ipaddress.ip_network((int(address), _IPV6_PREFIX), strict=False)
        return str(network.network_address)
    return str(address)


MAX_BODY_BYTES = 1_000_000
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# Defaults of every response. With the Referrer-Policy `no-referrer`, browsers would send the panel's forms with
# `Origin: null`, which `check_origin` rejects.
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
# Requests whose body is a filled sheet; their limit is MAX_SHEET_BYTES instead of MAX_BODY_BYTES.
_SHEET_PATHS = re.compile(r"/api/bench/judge/.+/apply|/experiments/.+/judges/import|/judge/preview", re.DOTALL)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)
_MAX_LENGTH_DIGITS = 20  # of Content-Length; enough for every limit, and int() rejects numbers of thousands of digits


class SecurityMiddleware:
    """ASGI middleware: checks host and body size, adds headers and request id, logs failures, counts requests."""

    def __init__(
        self, app: ASGIApp, *, hosts: Hosts, metrics: Metrics, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; WebSockets are rejected."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started = self._clock()
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):  # missing, or not safe to log
            request_id = secrets.token_hex(8)
        scope.setdefault("state", {}).update(request_id=request_id, arrived=started)
        outgoing = _Sender(send, request_id, self._clock)
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, outgoing)
            else:
                await self._app(scope, _limit_body(scope, receive, self._clock), outgoing)
            failure: Any = scope["state"].get("failure")  # set by the exception handlers
            if failure is not None:
                log.warning("request %s: %s: %r", request_id, type(failure).__name__, str(failure)[:2000])
        except ClientDisconnect:
            log.info("request %s: client disconnected", request_id)
        except Exception:
            log.exception("request %s: %s %r failed", request_id, scope["method"], scope["path"][:200])
            if outgoing.status:
                raise  # the response has started, so the connection is closed
            message = f"{INTERNAL_ERROR} The log has the details under {request_id}."
            await SafeJsonResponse(error_json("internal", message), 500)(scope, receive, outgoing)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            # Measure until the start of the response, because event streams stay open.
            responded_at = outgoing.started_at if outgoing.started_at is not None else self._clock()
            self._metrics.observe(scope["method"], route, outgoing.status, responded_at - started)

    def _refusal(self, scope: Scope) -> SafeJsonResponse | None:
        """Return the error response for an invalid host or a too large body, else None."""
        names = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(names) != 1 or not self._hosts.allows(names[0]):
            shown_names = ", ".join(name[:80] for name in names) or "none"
            message = (
                f"The host name is not allowed (Host: {shown_names}). Use localhost or a name of this machine, or ask "
                "the operator to add it to TIPBENCH_PANEL_HOSTS."
            )
            return SafeJsonResponse(error_json("host_refused", message, "header.host"), 400)
        limit = _max_body(scope["path"])
        length = Headers(scope=scope).get("content-length", "0")
        is_number = length.isascii() and length.isdigit()
        if not is_number or int(length[:_MAX_LENGTH_DIGITS]) > limit:
            return SafeJsonResponse(
                error_json("too_large", _too_large(limit), "body"), 413, headers={"Connection": "close"}
            )
        return None


class CompressionMiddleware:
    """ASGI middleware: compresses the responses of GET requests.

    The length of a compressed response can reveal a secret if the response also contains an attacker's text (BREACH).
    Here, other sites cannot send requests with a user's session: its cookie is SameSite=Strict. And new tokens and
    similar secrets are only in responses to POST requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gzip = GZipMiddleware(app, minimum_size=1000, compresslevel=5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. GZipMiddleware does not compress event streams."""
        is_get = scope["type"] == "http" and scope["method"] == "GET"
        app: ASGIApp = self._gzip if is_get else self._app
        await app(scope, receive, send)


class _Sender:
    """A `send` that adds default headers and the request id to every response."""

    def __init__(self, send: Send, request_id: str, clock: Callable[[], float]) -> None:
        self._send = send
        self._request_id = request_id
        self._clock = clock
        self.status = 0  # of the response; 0 until it starts
        self.started_at: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started_at = message["status"], self._clock()
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-ID"] = self._request_id
        await self._send(message)


def _limit_body(scope: Scope, receive: Receive, clock: Callable[[], float]) -> Receive:
    """Return a `receive` that raises TooLarge when the body exceeds its limit; Content-Length may be missing or wrong.

    `limit_sheet_requests` may lower the limit with `state.max_bytes`. Sets `state.arrived` when the body is complete.
    """
    content_length = int(Headers(scope=scope).get("content-length", "0")[:_MAX_LENGTH_DIGITS])
    received_bytes = 0

    async def limited_receive() -> Message:
        nonlocal received_bytes
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            scope["state"]["arrived"] = clock()
        received_bytes += len(message.get("body", b""))
        limit = min(_max_body(scope["path"]), scope["state"].get("max_bytes", MAX_SHEET_BYTES))
        if max(received_bytes, content_length) > limit:
            raise TooLarge(_too_large(limit), path="body", headers={"Connection": "close"})
        return message

    return limited_receive


def _max_body(path: str) -> int:
    return MAX_SHEET_BYTES if _SHEET_PATHS.fullmatch(path) else MAX_BODY_BYTES


def _too_large(limit: int) -> str:
    return f"The body of this request may have at most {limit // 1_000_000} MB. Send less at a time."


# Concurrent exports, previews, applies and closes per token.
MAX_JUDGE_SHEET_REQUESTS = 1
MAX_ADMIN_SHEET_REQUESTS = 4
# Concurrent requests of any kind per judge's token: as many as a browser sends at once. Further requests of the token
# wait on the event loop, not in a thread.
MAX_JUDGE_REQUESTS = 6
MAX_FILLED_SHEETS = 2  # filled sheets in memory, of all tokens together
MAX_JUDGE_SHEET_BYTES = 8_000_000  # size of a judge's filled sheet; the limit of admins is MAX_SHEET_BYTES
JUDGES_RESPONSE_S = 2.0  # from a judge's request to its response; see `wait_to_respond`
# Maximum waits for a free slot.
SHEET_REQUEST_WAIT_S = 5.0  # longer than JUDGES_RESPONSE_S, so that a second tab of the judge succeeds after the first
FILLED_SHEET_WAIT_S = 20.0
JUDGE_REQUEST_WAIT_S = 20.0


class ConcurrencyLimits:
    """Limits of concurrent requests and filled sheets. Not thread-safe: use on the event loop only."""

    def __init__(self) -> None:
        self._filled_sheets = Semaphore(MAX_FILLED_SHEETS)
        # By token id.
        self._judge_requests: defaultdict[str, Semaphore] = defaultdict(lambda: Semaphore(MAX_JUDGE_REQUESTS))
        self._sheet_requests: dict[str, Semaphore] = {}
        self.judges_response_s = JUDGES_RESPONSE_S
        self.clock: Callable[[], float] = time.perf_counter
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    @asynccontextmanager
    async def sheet_request(self, who: Identity) -> AsyncIterator[None]:
        """Hold one of the token's slots for requests on sheets. Raises Busy after SHEET_REQUEST_WAIT_S."""
        limit = MAX_JUDGE_SHEET_REQUESTS if who.is_judge else MAX_ADMIN_SHEET_REQUESTS
        busy_message = (
            f"A token may run {plural(limit, 'export, preview, apply or close request')} at a time. "
            "Nothing was changed; try again when the running request has finished."
        )
        slots = self._sheet_requests.setdefault(who.token_id, Semaphore(limit))
        async with _hold_slot(slots, SHEET_REQUEST_WAIT_S, busy_message):
            yield

    async def wait_to_respond(self, arrived: float) -> None:
        """Wait until JUDGES_RESPONSE_S after `arrived`. If that time has passed, wait for a random part of it again.

        Without the wait, the response time could reveal controls. Applying scores to an answer also writes the other
        judges' notes on it again. A control has no such notes, so the apply writes those on another answer instead,
        and these can be longer or shorter.
        """
        left_s = arrived + self.judges_response_s - self.clock()
        if left_s <= 0:
            left_s = secrets.SystemRandom().uniform(0, self.judges_response_s)
        await self.sleep(left_s)

    @asynccontextmanager
    async def request(self, who: Identity) -> AsyncIterator[None]:
        """Hold one of a judge's slots for any request. Raises Busy after JUDGE_REQUEST_WAIT_S. Admins have no limit."""
        if not who.is_judge:
            yield
            return
        busy_message = f"A judge's token may send {MAX_JUDGE_REQUESTS} requests at a time. Try again shortly."
        async with _hold_slot(self._judge_requests[who.token_id], JUDGE_REQUEST_WAIT_S, busy_message):
            yield

    @asynccontextmanager
    async def filled_sheet(self) -> AsyncIterator[None]:
        """Hold a slot for one filled sheet in memory. Raises Busy after FILLED_SHEET_WAIT_S."""
        busy_message = "The panel is processing other filled sheets. Nothing was changed; try again shortly."
        async with _hold_slot(self._filled_sheets, FILLED_SHEET_WAIT_S, busy_message):
            yield


@asynccontextmanager
async def _hold_slot(slots: Semaphore, wait_s: float, busy_message: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(wait_s):
            await slots.acquire()
    except TimeoutError as exc:
        raise Busy(busy_message) from exc
    try:
        yield
    finally:
        slots.release()


@dataclass
class StreamLimits:
    """Limits and intervals of event streams. Not thread-safe: use on the event loop only."""

    max_open: int = 64
    poll_s: float = 0.5
    heartbeat_s: float = 15.0
    n_open: int = 0  # open streams
