"""Limits of connections: half-sent requests, clients that do not read, oversized bodies, repeated log lines."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from support.panel_site import make_app
from tipbench.settings import load_settings
from tipbench.web import server
from tipbench.web.security import MAX_BODY_BYTES
from tipbench.web.server import ConnectionLimits, RepeatedLines, listen, make_server, server_url
from web.panels import OPERATOR

pytestmark = pytest.mark.server
DEADLINE_S = 60.0
LARGE = 64_000_000
HALF_REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_BODY = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf"
UNREAD = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"


def untimed_limits(total: int, per_address: int) -> ConnectionLimits:
    """Return limits without time limits that matter in a test."""
    return ConnectionLimits(total, per_address, headers_s=600.0, body_s=600.0, stalled_s=600.0)


async def small_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and responds with 1 byte, or with 64 MB at /large."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    while (part := await receive())["type"] == "http.request" and part.get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * (LARGE if scope["path"] == "/large" else 1)})


@contextlib.contextmanager
def serve(app: ASGIApp, limits: ConnectionLimits) -> Iterator[tuple[str, int]]:
    """Serve an application in a thread; yields its host and port."""
    sock = listen("127.0.0.1", 0)
    running = make_server(app, limits)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not running.started and time.monotonic() < deadline:
            time.sleep(0.02)
        yield "127.0.0.1", sock.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(DEADLINE_S)
        sock.close()


def all_received(sock: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    sock.settimeout(DEADLINE_S)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "half",
    [b"", HALF_REQUEST, HALF_BODY],
    ids=["nothing", "headers", "body"],
)
def test_a_request_that_is_not_finished_in_time_gets_408_and_is_closed(half: bytes) -> None:
    limits = ConnectionLimits(total=16, per_address=16, headers_s=0.2, body_s=0.2, check_s=0.05)
    with serve(small_app, limits) as address, socket.create_connection(address) as client:
        client.sendall(half)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_its_response_is_closed() -> None:
    limits = ConnectionLimits(total=16, per_address=16, stalled_s=0.2, check_s=0.05)
    with serve(small_app, limits) as address, socket.create_connection(address) as client:
        client.sendall(UNREAD)
        deadline = time.monotonic() + DEADLINE_S
        closed = False
        while not closed and time.monotonic() < deadline:
            try:
                client.sendall(b"x")
                time.sleep(0.05)
            except OSError:  # reset or broken pipe
                closed = True
        assert closed


@pytest.mark.parametrize("limits", [untimed_limits(8, 100), untimed_limits(100, 8)], ids=["in total", "per address"])
@pytest.mark.parametrize("request_", [HALF_REQUEST, HALF_BODY], ids=["headers", "body"])
def test_clients_over_the_cap_that_keep_the_server_waiting_do_not_lock_out_others(
    request_: bytes, limits: ConnectionLimits
) -> None:
    with serve(small_app, limits) as address, contextlib.ExitStack() as stack:
        clients = []
        for _ in range(40):
            client = stack.enter_context(socket.create_connection(address))
            clients.append(client)
            with contextlib.suppress(OSError):  # closed already
                client.sendall(request_)
        assert httpx.get(f"http://{address[0]}:{address[1]}/", timeout=DEADLINE_S, trust_env=False).text == "x"
        assert all(not all_received(client) for client in clients[: 40 - 8])


def test_connections_of_a_configured_proxy_are_not_counted_per_address() -> None:
    limits = replace(untimed_limits(100, 2), proxies=("127.0.0.0/8",))
    with serve(small_app, limits) as address, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(6)]
        for client in clients:
            client.sendall(HALF_REQUEST + b"no\r\nConnection: close\r\n\r\n")
        assert all(b" 200 " in all_received(client) for client in clients)


def test_an_oversized_body_gets_its_413_and_not_a_reset(home: Path) -> None:
    app = make_app(load_settings({"TIPBENCH_HOME": str(home)}, home.parent))
    size = 20 * MAX_BODY_BYTES
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size + b"x" * size + b"\r\n0\r\n\r\n"
    for request in (whole, chunked):
        with serve(app, ConnectionLimits(16, 16)) as address, socket.create_connection(address, DEADLINE_S) as client:
            client.sendall(request)  # all of it before anything is read, as simple clients do
            assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_similar_log_lines_are_limited_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LOG_LINES", 3)
    now = [0.0]
    lines = RepeatedLines(clock=lambda: now[0])

    def logged(template: str, *values: object) -> str | None:
        record = logging.LogRecord("web", logging.WARNING, "", 0, template, values, None)
        return record.getMessage() if lines.filter(record) else None

    shown = [logged("request %s failed", number) for number in range(10)]
    assert [text for text in shown if text] == [f"request {number} failed" for number in range(3)]
    assert logged("another line") == "another line"
    now[0] = 61.0
    assert logged("request %s failed", 11) == "request 11 failed (7 earlier lines were not logged)"


@pytest.mark.process
@pytest.mark.parametrize("command", ["panel", "serve"])
def test_400_half_sent_requests_with_256_files_stop_neither_the_server_nor_fill_its_log(
    command: str, home: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    environment = {**os.environ, "TIPBENCH_HOME": str(home), "TIPBENCH_ADMIN_TOKEN": OPERATOR}
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tipbench", command, "--port", "0"],
            stdout=subprocess.DEVNULL,
            stderr=err,
            env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),  # noqa: PLW1509
        )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while (found := re.search(r": (http://\S+)/ \(", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        url = httpx.URL(found[1])
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                client = stack.enter_context(socket.create_connection((url.host, url.port or 80), DEADLINE_S))
                with contextlib.suppress(OSError):
                    client.sendall(HALF_REQUEST)
            for _ in range(3):
                assert httpx.get(f"{url}/healthz", timeout=DEADLINE_S, trust_env=False).status_code == 200
        assert "Too many open files" not in log.read_text()
        assert log.stat().st_size < 100_000
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_the_url_of_a_server_on_all_addresses_names_this_machine() -> None:
    with contextlib.closing(listen("0.0.0.0", 0)) as sock:
        assert server_url(sock, "0.0.0.0").startswith("http://localhost:")
