"""State and dependencies of the route handlers. Authorisation is declared on the routers, see `auth`."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from tipbench.errors import MlflowUnavailable
from tipbench.plan.collect_config import CollectConfig, split_wait_for_judge
from tipbench.record.mlflow import MlflowConnection, find_mlflow
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.web.auth import Authenticator, Identity, authenticate, require_admin, require_judge
from tipbench.web.errors import convert_option_errors
from tipbench.web.forms import read_json
from tipbench.web.job_service import JobService
from tipbench.web.metrics import Metrics
from tipbench.web.options import OperatorPermissions, PanelOptions
from tipbench.web.queries import Queries
from tipbench.web.security import MAX_JUDGE_SHEET_BYTES, ConcurrencyLimits, StreamLimits
from tipbench.workflows.judging import judging_lock

JUDGING_WAIT_S = 20.0  # maximum wait for another client that is writing scores
log = logging.getLogger("tipbench.web")


class PanelMlflow:
    """Connection to the configured MLflow or to the given store, opened on first use. Thread-safe."""

    def __init__(self, settings: Settings, store: RunStore | None = None) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._given: MlflowConnection | None = None
        if store is not None:
            self._given = MlflowConnection(store, identity="given", description="given", url="http://given.invalid")
        self._opened: MlflowConnection | None = None
        self._opened_url = ""
        self._must_locate = False
        self._connections: list[MlflowConnection] = []  # including earlier ones, which may still be in use

    def open(self) -> MlflowConnection:
        """Return the connection; may start the local server, see `MlflowAccess.find`.

        Raises NotEnoughData if no MLflow is available and nothing was ever recorded.
        """
        if self._given is not None:
            return self._given
        with self._lock:
            if self._opened is None or self._must_locate:
                access = self._settings.mlflow
                server = access.find(report=log.info)
                if self._opened is None or server.url != self._opened_url:
                    self._opened, self._opened_url = access.connect(server), server.url
                    self._connections.append(self._opened)
                self._must_locate = False
            return self._opened

    def open_running(self) -> MlflowConnection:
        """Return the connection without starting the local server, which may have been stopped on purpose.

        Raises LocalMlflowError if no MLflow is found.
        """
        if self._given is None:
            # Called only because it raises if no server is found; `open` could start one.
            find_mlflow(self._settings.get("mlflow_url"), self._settings.home, start=False, report=log.debug)
        return self.open()

    def locate_again(self) -> None:
        """Locate the server again on the next `open`: a local server may have restarted on another port."""
        self._must_locate = True

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._opened = None

    @contextmanager
    def connected(self, url: str | None = None) -> Iterator[MlflowConnection]:
        """Yield the connection to the server at `url`; None is the configured server.

        If the configured server is unavailable, it is located again on the next `open`.
        """
        if url is None or self._given is not None or url == self._settings.get("mlflow_url"):
            try:
                yield self.open()
            except MlflowUnavailable:
                self.locate_again()
                raise
            return
        server = find_mlflow(url, self._settings.home, start=False, report=log.info)
        with self._settings.mlflow.connect(server) as opened:
            yield opened

    @contextmanager
    def judging_lock(self) -> Iterator[None]:
        """Hold the home's lock on writing scores and opening sheets. Raises LockHeld after JUDGING_WAIT_S."""
        with judging_lock(self._settings.home, self.open().url, wait_s=JUDGING_WAIT_S):
            yield


@dataclass(frozen=True)
class Panel:
    """State of one application, created by `app.make_panel` and stored in `app.state.panel`."""

    settings: Settings
    options: PanelOptions
    authenticator: Authenticator
    mlflow: PanelMlflow
    queries: Queries
    permissions: OperatorPermissions
    metrics: Metrics
    jobs: JobService
    streams: StreamLimits
    concurrency: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)


@dataclass(frozen=True)
class CollectBody:
    """Parsed request body for a collect."""

    options: Mapping[str, Any]  # of CollectConfig
    wait_for_judge: bool = False


def panel_of(request: Request) -> Panel:
    """Return the application's state."""
    panel: Panel = request.app.state.panel
    return panel


PanelState = Annotated[Panel, Depends(panel_of)]  # Panel, injected by FastAPI


def open_store(panel: PanelState) -> Iterator[RunStore]:
    """Yield the MLflow store. Raises NotEnoughData if there is none yet."""
    with panel.mlflow.connected() as opened:
        yield opened.store


async def read_collect_body(request: Request, _admin: Annotated[Identity, Depends(require_admin)]) -> CollectBody:
    """Parse the body. The dependency on `require_admin` authenticates the client before the body is read."""
    raw = await read_json(request)
    with convert_option_errors("body"):
        options, wait_for_judge = split_wait_for_judge(raw)
        return CollectBody(options, wait_for_judge)


def read_collect_config(body: Annotated[CollectBody, Depends(read_collect_body)], panel: PanelState) -> CollectConfig:
    """Return the collect's configuration: the settings, overridden by the body. Raises Forbidden if not permitted."""
    return panel.permissions.config(body.options)


Admin = Annotated[Identity, Depends(require_admin)]
Judge = Annotated[Identity, Depends(require_judge)]  # judge or admin
Store = Annotated[RunStore, Depends(open_store)]
CollectBodyParam = Annotated[CollectBody, Depends(read_collect_body)]
CollectConfigParam = Annotated[CollectConfig, Depends(read_collect_config)]


async def limit_sheet_requests(
    request: Request, who: Annotated[Identity, Depends(authenticate)]
) -> AsyncIterator[None]:
    """Hold one of the token's slots for work on sheets. A judge's body limit is lower than an admin's."""
    if who.is_judge:
        request.state.max_bytes = MAX_JUDGE_SHEET_BYTES  # enforced by `SecurityMiddleware`
    async with panel_of(request).concurrency.sheet_request(who):
        yield


async def delay_judge_response(
    request: Request, who: Annotated[Identity, Depends(authenticate)]
) -> AsyncIterator[None]:
    """Delay a judge's response, so that the response time does not reveal the work; see `wait_to_respond`."""
    try:
        yield
    finally:
        if who.is_judge:
            await panel_of(request).concurrency.wait_to_respond(request.state.arrived)


async def limit_filled_sheets(request: Request) -> AsyncIterator[None]:
    """Hold one of the panel's slots for filled sheets, which all tokens share."""
    async with panel_of(request).concurrency.filled_sheet():
        yield


# Use these three dependencies in this order. On routes for judges' forms, put LIMIT_SHEET_REQUESTS also before the
# check of the role: that check reads the body for the CSRF token, and LIMIT_SHEET_REQUESTS sets the body's size limit.
# With the scope "function", dependencies end before the response is sent, the last one first:
# - LIMIT_FILLED_SHEETS releases its slot.
# - DELAY_JUDGE_RESPONSE delays the response.
# - LIMIT_SHEET_REQUESTS releases the token's slot. If it did so before the delay, other requests of the token would
#   reveal when the work ended.
LIMIT_SHEET_REQUESTS = Depends(limit_sheet_requests, scope="function")
DELAY_JUDGE_RESPONSE = Depends(delay_judge_response, scope="function")
LIMIT_FILLED_SHEETS = Depends(limit_filled_sheets, scope="function")
