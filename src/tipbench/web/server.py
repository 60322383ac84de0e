"""Listening and serving with uvicorn, for the panel and the policy server."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from tipbench.errors import TipbenchError, UsageError

_BACKLOG = 128
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_CLOSE_S = 5  # timeout for open requests and streams at shutdown


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
    name = "localhost" if host in _EVERYWHERE else host  # the unspecified address is not usable in a URL
    return f"http://{f'[{name}]' if ':' in name else name}:{sock.getsockname()[1]}/"


def run_server(
    app: Any, sock: socket.socket, *, started: Callable[[], None], name: str = "panel", proxies: Sequence[str] = ()
) -> None:
    """Serve an ASGI application until stopped; Ctrl-C is a normal exit. `proxies` may set X-Forwarded headers."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # uvicorn's has query strings, which may contain user ids
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_graceful_shutdown=_CLOSE_S,
        ws="none",
        lifespan="on",
    )
    server = uvicorn.Server(config)
    started()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])
    if not server.started:
        raise TipbenchError(f"The {name} could not start; the log above has the reason.")
