"""A receiver for webhooks: a local HTTP server that records requests and responds as scripted."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "a-secret-of-the-webhook-1234"


@dataclass(frozen=True)
class HookRequest:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def payload(self) -> Any:
        return json.loads(self.body)


@dataclass
class HookReceiver:
    """Responds with the status that `respond` returns for a request; `respond` may block."""

    respond: Callable[[HookRequest], int] = lambda _request: 204
    requests: list[HookRequest] = field(default_factory=list)
    port: int = 0
    location: str = ""  # of redirects

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def wait_for(self, number: int, wait_s: float = 120) -> list[HookRequest]:
        """Wait for `number` requests and return all."""
        deadline = time.monotonic() + wait_s
        while len(self.requests) < number:
            assert time.monotonic() < deadline, f"{len(self.requests)} of {number} requests"
            time.sleep(0.02)
        return list(self.requests)


@contextmanager
def run_hook_receiver(receiver: HookReceiver | None = None) -> Iterator[HookReceiver]:
    """Run a receiver on its port, or on a free one if it has none."""
    served = receiver or HookReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            request = HookRequest(self.path, dict(self.headers.items()), body)
            status = served.respond(request)
            served.requests.append(request)
            self.send_response(status)
            if served.location:
                self.send_header("Location", served.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", served.port), Handler)
    server.daemon_threads = True
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
