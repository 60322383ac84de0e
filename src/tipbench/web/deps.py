"""Dependencies of the route handlers. Authorisation is declared on the routers, see `auth`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from tipbench.errors import MlflowUnavailable
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.web.auth import Authenticator, Identity, authenticate, require_admin, require_judge
from tipbench.web.errors import Invalid
from tipbench.web.forms import read_json
from tipbench.web.job_service import JobService
from tipbench.web.metrics import Metrics
from tipbench.web.mlflow_connection import MlflowConnection
from tipbench.web.options import PanelOptions, RunPolicy
from tipbench.web.queries import Queries
from tipbench.web.security import JUDGES_BYTES, ConcurrencyLimits, StreamLimits


@dataclass(frozen=True)
class Panel:
    """State of one application, created by `app.create_app` and stored in `app.state.panel`."""

    settings: Settings
    options: PanelOptions
    guard: Authenticator
    tracker: MlflowConnection
    queries: Queries
    allowed: RunPolicy
    metrics: Metrics
    jobs: JobService
    streams: StreamLimits
    concurrency: ConcurrencyLimits = field(default_factory=ConcurrencyLimits)


@dataclass(frozen=True)
class RunBody:
    """Request body of a run: its configuration values, and whether it waits for the judge."""

    given: Mapping[str, Any]
    wait_for_judge: bool = False


def panel_of(request: Request) -> Panel:
    """Return the application's state."""
    panel: Panel = request.app.state.panel
    return panel


PanelState = Annotated[Panel, Depends(panel_of)]


def open_store(panel: PanelState) -> Iterator[RunStore]:
    """Yield the MLflow store. Raises NotEnoughData if there is none yet."""
    try:
        yield panel.tracker.open().store
    except MlflowUnavailable:
        panel.tracker.doubt()
        raise


async def read_run_body(request: Request, _admin: Annotated[Identity, Depends(require_admin)]) -> RunBody:
    """Parse the body; depends on `require_admin`, which authenticates before the body is read."""
    given = await read_json(request)
    wait = given.pop(WAIT_FOR_JUDGE, False)
    if not isinstance(wait, bool):
        raise Invalid(
            f"{WAIT_FOR_JUDGE} must be true or false (got {str(wait)[:80]!r}).", path=f"body.{WAIT_FOR_JUDGE}"
        )
    return RunBody(given, wait)


def read_run_config(body: Annotated[RunBody, Depends(read_run_body)], panel: PanelState) -> CollectConfig:
    """Return the run's configuration: the body's values over the settings, checked against the run policy."""
    return panel.allowed.config(body.given)


Admin = Annotated[Identity, Depends(require_admin)]
Judge = Annotated[Identity, Depends(require_judge)]  # judge or admin
Store = Annotated[RunStore, Depends(open_store)]
RunBodyParam = Annotated[RunBody, Depends(read_run_body)]
RunConfig = Annotated[CollectConfig, Depends(read_run_config)]


def concurrency_limits(request: Request) -> ConcurrencyLimits:
    """Return the application's concurrency limits."""
    return panel_of(request).concurrency


async def limit_concurrency(request: Request, who: Annotated[Identity, Depends(authenticate)]) -> AsyncIterator[None]:
    """Hold one of the token's slots; lower a judge's body limit, which `SecurityMiddleware` enforces."""
    if who.is_judge:
        request.state.most_bytes = JUDGES_BYTES
    async with concurrency_limits(request).taken(who):
        yield


async def sheet_room(request: Request) -> AsyncIterator[None]:
    """Hold a slot for the request's filled sheet."""
    async with concurrency_limits(request).sheet():
        yield


# Set on a router, it runs before authorisation, which reads the body for its CSRF token.
LIMIT_CONCURRENCY = Depends(limit_concurrency)
LIMIT_SHEETS = Depends(sheet_room)
