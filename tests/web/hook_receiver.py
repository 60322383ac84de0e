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
class Got:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def payload(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """Responds with 204 unless `respond` returns another status; `respond` gets each request and may block."""

    respond: Callable[[Got], int] = lambda _got: 204
    got: list[Got] = field(default_factory=list)
    port: int = 0
    location: str = ""  # of redirects

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def wait(self, number: int, wait_s: float = 120) -> list[Got]:
        """All requests, once there are `number`."""
        deadline = time.monotonic() + wait_s
        while len(self.got) < number:
            assert time.monotonic() < deadline, f"{len(self.got)} of {number} came"
            time.sleep(0.02)
        return list(self.got)


@contextmanager
def receiving(receiver: Receiver | None = None) -> Iterator[Receiver]:
    """A receiver that listens, on its own port or, when it has none, on any."""
    made = receiver or Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            got = Got(self.path, dict(self.headers.items()), body)
            status = made.respond(got)
            made.got.append(got)
            self.send_response(status)
            if made.location:
                self.send_header("Location", made.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", made.port), Handler)
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
