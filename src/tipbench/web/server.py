"""Runs the panel and the policy server with uvicorn, and limits their connections in number and time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tipbench.errors import TipbenchError, UsageError
from tipbench.web.security import client_key

_BACKLOG = 128  # connections that the kernel queues
# Connections that asyncio accepts in a row. A small number: connections over a limit are closed only after that.
_ACCEPTED_AT_ONCE = 16
_OPEN_FILES = 8192  # soft limit of open files, if the hard limit allows it
_MAX_CONNECTIONS = 2048
_LOG_LINES = 100  # similar lines logged per _LOG_PERIOD_S
_LOG_PERIOD_S = 60.0
# Limits for reading and discarding the rest of a rejected body.
_DRAIN_S = 10.0
_DRAIN_BYTES = 256_000_000
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_SHUTDOWN_S = 5  # timeout for open requests and streams at shutdown


def listen(host: str, port: int, name: str = "panel") -> socket.socket:
    """Return a listening socket. Raises UsageError if the address is in use or does not belong to this machine."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise UsageError(f"--host {host} is not an address of this machine: {exc}. Use 127.0.0.1.") from exc
    family, kind, protocol, _, address = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((str(address[0]), int(address[1])))
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        hint = f"Is another {name} running? " if exc.errno == errno.EADDRINUSE else ""
        raise UsageError(
            f"The {name} cannot listen on {host} port {port}: {exc.strerror or exc}. {hint}"
            "Choose another --host or --port."
        ) from exc
    return sock


def server_url(sock: socket.socket, host: str) -> str:
    """Return the URL of a server that listens on this socket."""
    name = "localhost" if host in _UNSPECIFIED else host  # the unspecified address is not usable in a URL
    if ":" in name:
        name = f"[{name}]"  # IPv6
    port = sock.getsockname()[1]
    return f"http://{name}:{port}/"


def raise_file_limit() -> int:
    """Raise the soft limit of open files to _OPEN_FILES if permitted. Return the limit, at most _OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return target
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # not permitted
        return soft
    return target


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the number of connections and of the time that each may wait for its client."""

    total: int  # connections
    per_address: int  # connections from one address, unless it is a proxy
    proxies: tuple[str, ...] = ()  # addresses or networks
    headers_s: float = 10.0  # from connecting, or the previous response, to the end of the request's headers
    body_s: float = 60.0  # until a request's body is complete
    stalled_s: float = 60.0  # while the client does not read the response
    check_s: float = 1.0  # interval between two checks of a connection

    @classmethod
    def of(cls, open_files: int, proxies: Sequence[str] = ()) -> ConnectionLimits:
        """Return the limits for a process that may have `open_files` files open.

        Half of them (16 to _MAX_CONNECTIONS) may be connections, and half of the connections may be of one address.
        """
        total = max(16, min(_MAX_CONNECTIONS, open_files // 2))
        return cls(total, total // 2, tuple(proxies))

    def is_proxy(self, address: str) -> bool:
        """Whether the address belongs to a configured proxy."""
        try:
            return any(ipaddress.ip_address(address) in ipaddress.ip_network(proxy) for proxy in self.proxies)
        except ValueError:
            return False


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol with ConnectionLimits; one instance per connection.

    If a new connection exceeds a limit, the oldest connection that waits for its client is closed, or the new one if
    none waits. So clients that send half a request, or do not read the response, cannot lock out others.
    """

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._opened_at = self._phase_began_at = self.loop.time()
        self._phase: tuple[object, ...] = ()  # (name, request[, unread bytes]), set by _check
        host = self.client[0] if self.client else None
        self._client_key = client_key(host)  # the address, or the /64 network for IPv6
        self._timer = self.loop.call_later(self.limits.check_s, self._check)
        others = [other for other in self.connections if other is not self and isinstance(other, LimitedProtocol)]
        same_address = [other for other in others if other._client_key == self._client_key]
        if len(same_address) >= self.limits.per_address and not self.limits.is_proxy(host or ""):
            self._make_room(same_address)
        elif len(others) >= self.limits.total:
            self._make_room(others)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _between_requests(self) -> bool:  # `cycle` is uvicorn's newest request
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Whether the client has not sent its whole request, or has not read the whole response."""
        return self._between_requests or self.cycle.more_body or self.transport.get_write_buffer_size() > 0

    def _make_room(self, others: Sequence[LimitedProtocol]) -> None:
        waiting = [other for other in others if other._waits_for_client]
        to_close = min(waiting, key=lambda other: other._opened_at, default=self)
        self.connections.discard(to_close)
        to_close.transport.abort()

    def _check(self) -> None:
        """Close the connection if it has exceeded the time limit of its phase; else schedule the next check."""
        now, cycle = self.loop.time(), self.cycle
        phase: tuple[object, ...]
        limit_s: float | None
        if self.transport.is_closing():
            return
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes:
            # The phase includes this number, so that a new phase begins whenever the client reads.
            phase, limit_s = ("response", cycle, unread_bytes), self.limits.stalled_s
        elif self._between_requests:
            phase, limit_s = ("headers", cycle), self.limits.headers_s
        elif cycle.more_body:
            phase, limit_s = ("body", cycle), self.limits.body_s
        else:  # the application computes or streams the response
            phase, limit_s = ("application", cycle), None
        if phase != self._phase:
            self._phase, self._phase_began_at = phase, now
        elif limit_s is not None and now - self._phase_began_at >= limit_s:
            if unread_bytes:
                self.transport.abort()  # `close` would wait for the client to read
                return
            # No 408 once a response has started: the client would take it for a part of that response, or for the
            # response to its next request.
            if cycle is None or not cycle.response_started:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
            return
        self._timer = self.loop.call_later(self.limits.check_s, self._check)


class RepeatedLines(logging.Filter):
    """Limits similar log lines to `_LOG_LINES` per `_LOG_PERIOD_S`. Similar lines have the same logger and format."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._period_began_at = clock()
        self._counts: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. The first line of a new period gets the number of suppressed lines."""
        if self._clock() - self._period_began_at >= _LOG_PERIOD_S:
            self._period_began_at = self._clock()
            suppressed = sum(max(0, count - _LOG_LINES) for count in self._counts.values())
            self._counts.clear()
            if suppressed:
                record.msg = f"{record.msg} ({suppressed} earlier lines were not logged)"
        key = record.name, str(record.msg)[:80]
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] <= _LOG_LINES


def drain_rejected_body(app: ASGIApp) -> ASGIApp:
    """Return an application that reads and discards the rest of the request's body after a 413 response.

    If the connection were closed with unread data, it would be reset, and the client would lose the response.
    """

    async def draining_app(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_and_drain(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or status != 413:
                await send(message)
                return
            await send({**message, "more_body": True})
            discarded_bytes = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    while discarded_bytes < _DRAIN_BYTES:
                        part = await receive()
                        discarded_bytes += len(part.get("body", b""))
                        if part["type"] != "http.request" or not part.get("more_body", False):
                            break
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await app(scope, receive, send_and_drain if scope["type"] == "http" else send)

    return draining_app


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio's `backlog` sets both the accepts in a row and the kernel's queue; restore the queue.
        for sock in sockets or ():
            sock.listen(_BACKLOG)


def make_server(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Server:
    """Return a uvicorn server for an application, with limits for its connections."""

    class Protocol(LimitedProtocol):  # uvicorn creates the instances, so the limits are an attribute of the class
        pass

    Protocol.limits = limits
    config = uvicorn.Config(
        drain_rejected_body(app),
        http=Protocol,
        backlog=_ACCEPTED_AT_ONCE,  # asyncio's; `_Server` sets the kernel's
        log_config=None,
        access_log=False,  # it would contain query strings, and these may contain user ids
        server_header=False,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=list(limits.proxies),
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
        lifespan="on",
    )
    return _Server(config)


def run_server(
    app: ASGIApp,
    sock: socket.socket,
    *,
    before_start: Callable[[], None],
    name: str = "panel",
    proxies: Sequence[str] = (),
) -> None:
    """Serve an ASGI application until it is stopped; Ctrl-C is a normal exit.

    `before_start` is called just before the server runs. X-Forwarded headers are accepted from `proxies` only.
    """
    server = make_server(app, ConnectionLimits.of(raise_file_limit(), proxies))
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatedLines())
    before_start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])
    if not server.started:
        raise TipbenchError(f"The {name} could not start; see the log above.")
