"""The panel on a real port of this machine, in this process: for browsers and for programs that test servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from support.paper_jobs import PaperRunner
from tipbench.jobs.job import Runner
from tipbench.record.store import RunStore
from tipbench.settings import load_settings
from tipbench.web.admin import create_app
from tipbench.web.deps import Panel
from tipbench.web.options import PanelOptions
from tipbench.web.server import address_of, listen
from tipbench.web.tokens import Role

START_S = 30.0
JUDGE = "reviewer-1"


@dataclass(frozen=True)
class Site:
    """A panel that answers, and the tokens for it."""

    url: str
    app: FastAPI
    admin: str
    judge: str
    home: Path

    @property
    def panel(self) -> Panel:
        panel: Panel = self.app.state.panel
        return panel


@contextmanager
def panel_site(
    home: Path,
    store: RunStore,
    environment: Mapping[str, str] | None = None,
    runner: Runner | None = None,
) -> Iterator[Site]:
    """The application on this store, served until the block ends; jobs end at once, on paper, unless said otherwise."""
    settings = load_settings({"TIPBENCH_HOME": str(home), **(environment or {})}, home.parent)
    jobs = runner or PaperRunner()
    app = create_app(settings, store=store, runners={jobs.name: jobs})
    tokens = app.state.panel.guard.tokens
    _, admin = tokens.create(Role.ADMIN, "boss", life_s=None)
    _, judge = tokens.create(Role.JUDGE, JUDGE, life_s=None)
    with listening(app) as url:
        yield Site(url, app, admin, judge, home)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Any application on a port of its own; its address without the last slash."""
    options = PanelOptions(port=0)
    sock = listen(options)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_S
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started, "the panel did not start"
        yield address_of(sock, options).rstrip("/")
    finally:
        server.should_exit = True
        thread.join(START_S)
        sock.close()
