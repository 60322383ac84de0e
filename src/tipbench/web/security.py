"""The shield in front of every route: Host, size, headers, request ids, and a 500 that tells nothing.

It is the outermost layer, so that no answer leaves without its headers, whoever made it.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tipbench.judge.sheet_files import MAX_BYTES as SHEET_BYTES
from tipbench.web.errors import INTERNAL, TooLarge, error_json
from tipbench.web.hosts import Hosts
from tipbench.web.metrics import Metrics
from tipbench.web.rendering import Json

log = logging.getLogger("tipbench.web")

BODY_BYTES = 1_000_000
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# `no-referrer` would make browsers send `Origin: null` with our own forms, and we look at Origin.
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
_SHEET = re.compile(r"/api/bench/judge/.+/apply|/experiments/.+/judges/import|/judge/preview", re.DOTALL)
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)


class Shield:
    """ASGI middleware."""

    def __init__(
        self, app: ASGIApp, *, hosts: Hosts, metrics: Metrics, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # there are none here

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = self._clock()
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        outgoing = _Outgoing(send, request_id, self._clock)
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, outgoing)
            else:
                await self._app(scope, _bounded(scope, receive), outgoing)
            _log_failure(scope, request_id)
        except ClientDisconnect:
            log.info("request %s: the client left", request_id)
        except Exception:
            log.exception("request %s: %s %r failed", request_id, scope["method"], scope["path"][:200])
            if outgoing.status:
                raise  # half an answer is out: only closing the connection can tell
            message = f"{INTERNAL} The log has the reason under {request_id}."
            await Json(error_json("internal", message), 500)(scope, receive, outgoing)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            # Until the answer begins: how long people look at a live stream is no measure of ours.
            ended = outgoing.begun if outgoing.begun is not None else self._clock()
            self._metrics.observe(scope["method"], route, outgoing.status, ended - started)

    def _refusal(self, scope: Scope) -> Json | None:
        names = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(names) != 1 or not self._hosts.allow(names[0]):
            seen = ", ".join(name[:80] for name in names) or "none"
            message = (
                f"The panel does not answer to this name (Host: {seen}). Use one of this machine's own names, or have "
                "the operator add it to TIPBENCH_PANEL_HOSTS."
            )
            return Json(error_json("host_refused", message, "header.host"), 400)
        limit, length = _limit(scope["path"]), Headers(scope=scope).get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > limit:
            return Json(error_json("too_large", _too_large(limit), "body"), 413, headers={"Connection": "close"})
        return None


class _Outgoing:
    """Sends, and puts the headers on every answer that does not bring its own."""

    def __init__(self, send: Send, request_id: str, clock: Callable[[], float]) -> None:
        self._send = send
        self._request_id = request_id
        self._clock = clock
        self.status = 0
        self.begun: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.begun = message["status"], self._clock()
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-ID"] = self._request_id
        await self._send(message)


def _bounded(scope: Scope, receive: Receive) -> Receive:
    """The body may come without its length, or be longer than it said.

    Its limit may be lowered (`state.most_bytes`) until it is read, when it is known who sends it.
    """
    announced, seen = int(Headers(scope=scope).get("content-length", "0")[:20]), 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        limit = min(_limit(scope["path"]), scope["state"].get("most_bytes", SHEET_BYTES))
        if max(seen, announced) > limit:
            raise TooLarge(_too_large(limit), path="body", headers={"Connection": "close"})
        return message

    return counted


def _limit(path: str) -> int:
    return SHEET_BYTES if _SHEET.fullmatch(path) else BODY_BYTES


def _too_large(limit: int) -> str:
    return f"The body of this request has at most {limit // 1_000_000} MB. Send less at a time."


def _request_id(headers: Headers) -> str:
    """The caller's, where it is fit for a log; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _log_failure(scope: Scope, request_id: str) -> None:
    failure: Any = scope["state"].get("failure")
    if failure is not None:
        log.warning("request %s: %s: %r", request_id, type(failure).__name__, str(failure)[:2000])
