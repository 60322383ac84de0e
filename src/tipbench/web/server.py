"""Listening and serving with uvicorn, for the panel and the policy server, with limits against idle connections."""

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

_BACKLOG = 128
_ACCEPTED_AT_ONCE = 16  # connections that asyncio accepts before it runs code that could close one over a cap
_OPEN_FILES = 8192  # the soft limit is raised to this at startup, as far as the hard limit allows
_MAX_CONNECTIONS = 2048
_LOG_LINES = 100  # similar lines per period
_LOG_PERIOD_S = 60.0
_DRAIN_S = 10.0
_DRAIN_BYTES = 256_000_000
_UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_SHUTDOWN_S = 5  # timeout for open requests and streams


def listen(host: str, port: int, name: str = "panel") -> socket.socket:
    """Return a listening socket. Raises UsageError if the address is in use or not of this machine."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise UsageError(f"--host {host} is not an address of this machine: {exc}. Use 127.0.0.1.") from exc
    family, kind, protocol, _, address = found[0]
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
    """Raise the soft limit of open files towards the hard limit; return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # not permitted
        return soft
    return wanted


@dataclass(frozen=True)
class ConnectionLimits:
    """Time limits and caps for connections. Connections from `proxies` are not counted per address."""

    total: int
    per_address: int
    proxies: tuple[str, ...] = ()
    headers_s: float = 10.0  # for a request's headers, from the connection or the previous response
    body_s: float = 60.0  # for a request's body
    stalled_s: float = 60.0  # without the client reading any of the response
    check_s: float = 1.0  # between two checks of a connection

    @classmethod
    def of(cls, open_files: int, proxies: Sequence[str] = ()) -> ConnectionLimits:
        """Return limits that leave half of the files for databases and logs; one address gets half of the rest."""
        total = max(16, min(_MAX_CONNECTIONS, open_files // 2))
        return cls(total, total // 2, tuple(proxies))

    def is_proxy(self, address: str) -> bool:
        """Whether the address belongs to a configured proxy."""
        try:
            return any(ipaddress.ip_address(address) in ipaddress.ip_network(each) for each in self.proxies)
        except ValueError:
            return False


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol with time limits and caps; one instance per connection.

    If a new connection exceeds a cap, the oldest one that waits for its client is closed, so that half-sent requests
    and clients that do not read cannot lock out others; if none waits, the new connection is closed.
    """

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._opened = self._since = self.loop.time()
        self._phase: tuple[object, ...] = ()
        host = self.client[0] if self.client else None
        self._address = client_key(host)
        self._timer = self.loop.call_later(self.limits.check_s, self._check)
        others = [each for each in self.connections if each is not self and isinstance(each, LimitedProtocol)]
        same = [each for each in others if each._address == self._address]
        if len(same) >= self.limits.per_address and not self.limits.is_proxy(host or ""):
            self._make_room(same)
        elif len(others) >= self.limits.total:
            self._make_room(others)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def _between_requests(self) -> bool:
        """Whether no request is in progress, or its headers have not been received completely."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """Whether the rest of a request is missing, or the client has not read its response."""
        return self._between_requests or self.cycle.more_body or self.transport.get_write_buffer_size() > 0

    def _make_room(self, others: Sequence[LimitedProtocol]) -> None:
        """Close the oldest of the other connections that waits for its client; this one if none waits."""
        idle = [each for each in others if each._waits_for_client]
        closed = min(idle, key=lambda each: each._opened, default=self)
        self.connections.discard(closed)
        closed.transport.abort()

    def _check(self) -> None:
        """Close the connection if it has been in one phase of a request for too long."""
        now, cycle = self.loop.time(), self.cycle
        phase: tuple[object, ...]
        limit: float | None
        if self.transport.is_closing():
            return
        if unread := self.transport.get_write_buffer_size():
            # `unread` is part of the phase, so that the time starts again whenever the client reads.
            phase, limit = ("response", cycle, unread), self.limits.stalled_s
        elif self._between_requests:
            phase, limit = ("headers", cycle), self.limits.headers_s
        else:
            phase, limit = ("body", cycle), self.limits.body_s
            if not cycle.more_body:
                limit = None  # the application is working on the response, or streams it
        if phase != self._phase:
            self._phase, self._since = phase, now
        elif limit is not None and now - self._since >= limit:
            if phase[0] == "response":
                self.transport.abort()  # `close` would wait for the client to read
                return
            if cycle is None or not cycle.response_started:
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
            return
        self._timer = self.loop.call_later(self.limits.check_s, self._check)


class RepeatedLines(logging.Filter):
    """Limits similar log lines, those with the same logger and format, to `_LOG_LINES` per `_LOG_PERIOD_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._started = clock()
        self._counts: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record; the first one of a new period gets the number of suppressed ones."""
        if self._clock() - self._started >= _LOG_PERIOD_S:
            self._started = self._clock()
            suppressed = sum(max(0, count - _LOG_LINES) for count in self._counts.values())
            self._counts.clear()
            if suppressed:
                record.msg = f"{record.msg} ({suppressed} similar lines before were not logged)"
        key = record.name, str(record.msg)[:80]
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] <= _LOG_LINES


def drain_rejected_body(app: ASGIApp) -> ASGIApp:
    """Return an application that discards the rest of the body after a 413, before the connection is closed.

    Closing a connection with unread data resets it, and the client would lose the response.
    """

    async def draining_app(scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def send_and_drain(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not last or status != 413:
                await send(message)
                return
            await send({**message, "more_body": True})
            discarded = 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    while discarded < _DRAIN_BYTES:
                        part = await receive()
                        discarded += len(part.get("body", b""))
                        if part["type"] != "http.request" or not part.get("more_body", False):
                            break
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await app(scope, receive, send_and_drain if scope["type"] == "http" else send)

    return draining_app


class _Server(uvicorn.Server):
    """Keeps the kernel's queue at _BACKLOG; asyncio would reduce it to the number that it accepts at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_BACKLOG)


def make_server(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Server:
    """Return a uvicorn server for an application, with limits for its connections."""

    class Protocol(LimitedProtocol):  # uvicorn creates the protocols itself, so the limits are in a class of their own
        pass

    Protocol.limits = limits
    config = uvicorn.Config(
        drain_rejected_body(app),
        http=Protocol,
        backlog=_ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,  # uvicorn's has query strings, which may contain user ids
        server_header=False,
        proxy_headers=bool(limits.proxies),
        forwarded_allow_ips=list(limits.proxies),
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
        lifespan="on",
    )
    return _Server(config)


def run_server(
    app: ASGIApp, sock: socket.socket, *, started: Callable[[], None], name: str = "panel", proxies: Sequence[str] = ()
) -> None:
    """Serve an ASGI application until stopped; Ctrl-C is a normal exit. `proxies` may set X-Forwarded headers."""
    server = make_server(app, ConnectionLimits.of(raise_file_limit(), proxies))
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatedLines())
    started()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])
    if not server.started:
        raise TipbenchError(f"The {name} could not start; see the log above.")
