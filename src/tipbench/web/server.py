"""The panel as a server: a socket of its own, uvicorn behind it, and an end without a traceback."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tipbench.errors import TipbenchError, UsageError
from tipbench.web.options import PanelOptions

_BACKLOG = 128
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what it means to listen there
_CLOSE_S = 5  # for open streams when it ends


def listen(options: PanelOptions) -> socket.socket:
    """The socket, bound before anything else is done; UsageError when the address is taken or not ours."""
    family, kind, protocol, _, address = _resolved(options)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        hint = "Is another panel running? " if exc.errno == errno.EADDRINUSE else ""
        raise UsageError(
            f"The panel cannot listen on {options.host} port {options.port}: {exc.strerror or exc}. {hint}"
            "Choose another --host or --port."
        ) from exc
    return sock


def address_of(sock: socket.socket, options: PanelOptions) -> str:
    """Where people find it."""
    name, port = options.host, sock.getsockname()[1]
    if name in _EVERYWHERE:  # nobody can go there; here it is this machine
        name = "localhost"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def serve(app: FastAPI, options: PanelOptions, sock: socket.socket, *, started: Callable[[], None]) -> None:
    """Answer requests until it is told to stop; Ctrl-C is how a server ends, and no failure."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(options.proxies),
        forwarded_allow_ips=list(options.proxies),
        timeout_graceful_shutdown=_CLOSE_S,
        ws="none",
        lifespan="on",
    )
    server = uvicorn.Server(config)
    started()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[sock])
    if not server.started:
        raise TipbenchError("The panel could not start; the log above has the reason.")


def _resolved(options: PanelOptions) -> tuple[int, int, int, str, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise UsageError(f"--host {options.host} is no address of this machine: {exc}. Use 127.0.0.1.") from exc
    family, kind, protocol, name, address = found[0]
    return family, kind, protocol, name, (str(address[0]), int(address[1]))
