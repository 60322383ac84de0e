"""Reading a job's server-sent events as a browser does, from the real application on a real port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from tipbench.web.options import PanelOptions
from tipbench.web.server import listen, server_url

START_S = 120.0


@dataclass(frozen=True)
class Frame:
    """One event; a comment has the name `:`."""

    event: str
    data: Any
    id: int | None


class Reader:
    """The events of an open response, in order."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> Frame | None:
        """Return the next event; None if the server has closed the stream."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                fields["event"] = ":"
            elif line:
                name, _, value = line.partition(": ")
                assert name in ("id", "event", "data", "retry"), line
                fields[name] = value
            elif fields:
                data = json.loads(fields["data"]) if "data" in fields else None
                return Frame(fields["event"], data, int(fields["id"]) if "id" in fields else None)
        return None

    def until(self, event: str, most: int = 2000) -> list[Frame]:
        """Return all events up to the first with that name."""
        found: list[Frame] = []
        for _ in range(most):
            frame = self.next()
            assert frame is not None, f"closed before {event}: {found[-3:]}"
            found.append(frame)
            if frame.event == event:
                return found
        raise AssertionError(f"no {event} among {most}")

    def rest(self, most: int = 2000) -> list[Frame]:
        """Return all events until the server closes the stream."""
        found: list[Frame] = []
        for _ in range(most):
            frame = self.next()
            if frame is None:
                return found
            found.append(frame)
        raise AssertionError(f"more than {most}")


@contextmanager
def reading(client: httpx.Client, job_id: str, query: str = "", **headers: str) -> Iterator[Reader]:
    """Open the event stream of a job."""
    with client.stream("GET", f"/api/bench/jobs/{job_id}/events{query}", headers=headers) as response:
        yield Reader(response)


@contextmanager
def on_a_port(app: FastAPI) -> Iterator[str]:
    """Serve the application on a free port; yields its address."""
    options = PanelOptions(port=0)
    sock = listen(options.host, options.port)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, START_S)
        yield server_url(sock, options.host).rstrip("/")
    finally:
        server.should_exit = True
        thread.join(START_S)
        sock.close()


def until(wanted: Callable[[], object], wait_s: float = 120.0) -> None:
    """Wait until the condition holds; fails after `wait_s`."""
    deadline = time.monotonic() + wait_s
    while not wanted():
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.02)
