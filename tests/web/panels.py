"""A panel for tests: the real application on a store with answered cells, and a client for each role."""

from __future__ import annotations

import copy
import fcntl
import functools
import os
import random
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRouter
from starlette.routing import Mount

from support.judging import EXPERIMENT, record_cells
from support.panel_site import make_app
from tipbench.record.store import MemoryStore, RunStore
from tipbench.settings import load_settings
from tipbench.web.app import create_app
from tipbench.web.auth import Role
from tipbench.web.deps import Panel

with warnings.catch_warnings():  # Starlette prefers its own client; we depend on httpx
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

JUDGE = "reviewer-1"
BASE = "http://localhost"
HTML = {"Accept": "text/html"}
API = "/api/bench"
OPERATOR = "an-operators-own-token-of-32-or-more"
S = TypeVar("S", bound=MemoryStore)


@dataclass(frozen=True)
class ServedPanel:
    """A running application; requests are an admin's by default."""

    app: FastAPI
    client: TestClient
    admin: str
    judge: str
    store: RunStore
    home: Path

    @property
    def panel(self) -> Panel:
        panel: Panel = self.app.state.panel
        return panel

    def get(self, path: str, *, token: str | None = "", **options: Any) -> Any:
        return self.request("GET", path, token=token, **options)

    def post(self, path: str, *, token: str | None = "", **options: Any) -> Any:
        return self.request("POST", path, token=token, **options)

    def request(self, method: str, path: str, *, token: str | None = "", **options: Any) -> Any:
        """Send a request with the admin's token, another one, or none."""
        headers = dict(options.pop("headers", {}))
        if token is not None:
            headers["Authorization"] = f"Bearer {token or self.admin}"
        return self.client.request(method, path, headers=headers, follow_redirects=False, **options)

    def error(self, response: Any) -> tuple[int, str]:
        """Return status and code of an error response, whose format is checked."""
        body = response.json()
        assert {"code", "message", "path"} == set(body["error"]), body
        assert body["error"]["message"]
        return response.status_code, body["error"]["code"]

    def log_in(self, secret: str) -> str:
        """Log in, with the session in the client's cookie jar; return its CSRF token."""
        response = self.client.post("/login", json={"token": secret})
        assert response.status_code == 200, response.text
        return str(response.json()["csrf"])

    def stop_clock(self) -> None:
        """Stop the clock of the rate limits, so that a slow machine changes nothing."""
        limiter = self.panel.authenticator._limiter
        now = limiter._clock()
        limiter._clock = lambda: now


@contextmanager
def serve_panel(
    home: Path,
    store: RunStore | None = None,
    environment: Mapping[str, str] | None = None,
    routers: tuple[APIRouter, ...] = (),
    *,
    find_mlflow: bool = False,
    run_jobs: bool = False,
    **client: Any,
) -> Iterator[ServedPanel]:
    """The application with an admin's and a judge's token; on a store in memory, or on the MLflow of the settings.

    Its jobs stay in the queue unless they are to run.
    """
    settings = load_settings({"TIPBENCH_HOME": str(home), **(environment or {})}, home.parent)
    store = store if store is not None else MemoryStore()
    given = None if find_mlflow else store
    app = create_app(settings, store=given, routers=routers) if routers else make_app(settings, store=given)
    app.state.panel.concurrency.judges_response_s = 0.0
    tokens = app.state.panel.authenticator.tokens
    _, admin = tokens.create(Role.ADMIN, "boss", life_s=3600)
    _, judge = tokens.create(Role.JUDGE, JUDGE, life_s=3600)
    idle = nullcontext() if run_jobs else hold_supervisor_lock(home)
    with idle, TestClient(app, **{"base_url": BASE, **client}) as opened:
        yield ServedPanel(app, opened, admin, judge, store, home)


@contextmanager
def hold_supervisor_lock(home: Path) -> Iterator[None]:
    """Hold the supervisor's lock, as another process would: the panel leaves its jobs in the queue."""
    folder = home / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def answered_store() -> MemoryStore:
    """Return a store with 48 answered cells of two models and three prompts."""
    return copy_store(_answered_store())


@functools.cache
def _answered_store() -> MemoryStore:
    store = MemoryStore()
    rng = random.Random(1)
    with pytest.MonkeyPatch.context() as patch:  # run ids decide the order of equals
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
        store.mark_changed(record_cells(store).experiment_id)
    return store


def copy_store(store: S) -> S:
    """Return a copy of a store, which is faster than recording its runs again."""
    copied = copy.copy(store)
    copied._lock = threading.RLock()
    copied._experiments = dict(store._experiments)
    copied._runs = {run_id: replace(kept) for run_id, kept in store._runs.items()}
    return copied


def route_list(app: FastAPI) -> list[tuple[str, str]]:
    """Return every (method, path) of the application; one path for a mounted folder."""
    import fastapi.routing

    walk = getattr(fastapi.routing, "iter_route_contexts", lambda routes: routes)  # older ones keep a flat list
    found = []
    for route in walk(app.routes):
        if isinstance(getattr(route, "original_route", route), Mount):
            found.append(("GET", f"{route.path}/{{path:path}}"))
            continue
        assert getattr(route, "methods", None), f"{route!r} answers to anything"
        found += [(method, route.path) for method in sorted(route.methods)]
    return found


__all__ = [
    "API",
    "EXPERIMENT",
    "HTML",
    "JUDGE",
    "OPERATOR",
    "ServedPanel",
    "TestClient",
    "answered_store",
    "copy_store",
    "route_list",
    "serve_panel",
]
