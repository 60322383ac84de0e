"""What handlers ask for, each named once. Who may ask is settled on the routers, by `auth`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from tipbench.errors import MlflowAway
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.web.allowed import Allowed
from tipbench.web.auth import Guard, Identity, require_admin, require_judge
from tipbench.web.desk import JobDesk
from tipbench.web.errors import Invalid
from tipbench.web.forms import read_json
from tipbench.web.metrics import Metrics
from tipbench.web.opening import Tracker
from tipbench.web.options import PanelOptions
from tipbench.web.queries import Queries
from tipbench.web.streaming import Streams
from tipbench.web.turns import Turns


@dataclass(frozen=True)
class Panel:
    """What one application holds: made by `admin.create_app`, found at `app.state.panel`."""

    settings: Settings
    options: PanelOptions
    guard: Guard
    tracker: Tracker
    queries: Queries
    allowed: Allowed
    metrics: Metrics
    jobs: JobDesk
    streams: Streams
    turns: Turns = field(default_factory=Turns)


@dataclass(frozen=True)
class RunBody:
    """The body of a run: the keys of its configuration, and whether it waits for the judge."""

    given: Mapping[str, Any]
    wait_for_judge: bool = False


def panel_of(request: Request) -> Panel:
    """The application's parts."""
    panel: Panel = request.app.state.panel
    return panel


PanelState = Annotated[Panel, Depends(panel_of)]


def open_store(panel: PanelState) -> Iterator[RunStore]:
    """The MLflow to work with. NotEnoughData when there is none yet."""
    try:
        yield panel.tracker.open().store
    except MlflowAway:
        panel.tracker.doubt()
        raise


async def read_run_body(request: Request, _admin: Annotated[Identity, Depends(require_admin)]) -> RunBody:
    """What the body says. It depends on the admin, so that a stranger's is not even read."""
    given = await read_json(request)
    wait = given.pop(WAIT_FOR_JUDGE, False)
    if not isinstance(wait, bool):
        raise Invalid(f"{WAIT_FOR_JUDGE} takes true or false (got {str(wait)[:80]!r}).", path=f"body.{WAIT_FOR_JUDGE}")
    return RunBody(given, wait)


def read_run_config(body: Annotated[RunBody, Depends(read_run_body)], panel: PanelState) -> CollectConfig:
    """The run's configuration in the body, over this server's settings, within what the operator allows."""
    return panel.allowed.config(body.given)


Admin = Annotated[Identity, Depends(require_admin)]
Judge = Annotated[Identity, Depends(require_judge)]  # a judge, or an admin
Store = Annotated[RunStore, Depends(open_store)]
AskedRun = Annotated[RunBody, Depends(read_run_body)]
RunConfig = Annotated[CollectConfig, Depends(read_run_config)]
