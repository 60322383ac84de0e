"""The panel on a real port, in this process, for browsers and other clients."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.routing import BaseRoute

from support.scripted_runner import ScriptedRunner
from tipbench.jobs.job import Runner
from tipbench.record.store import RunStore
from tipbench.settings import Settings, load_settings
from tipbench.web.app import create_app
from tipbench.web.auth import Role
from tipbench.web.deps import Panel
from tipbench.web.options import PanelOptions
from tipbench.web.server import listen, server_url

START_TIMEOUT_S = 30.0
JUDGE = "reviewer-1"
_prepared: list[BaseRoute] = []


def make_app(
    settings: Settings, *, store: RunStore | None = None, runners: Mapping[str, Runner] | None = None
) -> FastAPI:
    """An application with the routes of the first one: FastAPI would take 0.3 s to prepare them again.

    Responses to judges are not delayed.
    """
    app = create_app(settings, store=store, runners=runners)
    app.state.panel.concurrency.judges_response_s = 0.0
    if _prepared:
        assert len(_prepared) == len(app.router.routes)
        app.router.routes[:] = _prepared
    else:
        _prepared.extend(app.router.routes)
    return app


def fix_random_draws(patch: pytest.MonkeyPatch) -> None:
    """Draw sheets and duels from a seed, so that no result depends on chance."""
    rng = random.Random(1)
    patch.setattr(random, "SystemRandom", lambda: rng)


@dataclass(frozen=True)
class Site:
    """A running panel, and tokens for it."""

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
    """Serve the application on this store until the block ends; the default runner ends jobs at once."""
    settings = load_settings({"TIPBENCH_HOME": str(home), **(environment or {})}, home.parent)
    jobs = runner or ScriptedRunner()
    app = make_app(settings, store=store, runners={jobs.name: jobs})
    tokens = app.state.panel.authenticator.tokens
    _, admin = tokens.create(Role.ADMIN, "boss", life_s=None)
    _, judge = tokens.create(Role.JUDGE, JUDGE, life_s=None)
    with serve_app(app) as url:
        yield Site(url, app, admin, judge, home)


@contextmanager
def serve_app(app: Any) -> Iterator[str]:
    """Serve an application on a free port; yields its address without the trailing slash."""
    options = PanelOptions(port=0)
    sock = listen(options.host, options.port)
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started, "the panel did not start"
        yield server_url(sock, options.host).rstrip("/")
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        sock.close()
