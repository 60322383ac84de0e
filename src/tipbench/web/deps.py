"""What handlers ask for, each named once. Who may ask is settled on the routers, by `auth`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from tipbench.errors import MlflowAway
from tipbench.plan.config import CollectConfig
from tipbench.record.store import RunStore
from tipbench.settings import Settings
from tipbench.web.allowed import Allowed
from tipbench.web.auth import Guard, Identity, require_admin, require_judge
from tipbench.web.desk import JobDesk
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


async def read_run_config(
    request: Request, panel: PanelState, _admin: Annotated[Identity, Depends(require_admin)]
) -> CollectConfig:
    """The run's configuration in the body, over this server's settings, within what the operator allows.

    It depends on the admin, so that a stranger's body is not even read.
    """
    return panel.allowed.config(await read_json(request))


Admin = Annotated[Identity, Depends(require_admin)]
Judge = Annotated[Identity, Depends(require_judge)]  # a judge, or an admin
Store = Annotated[RunStore, Depends(open_store)]
RunConfig = Annotated[CollectConfig, Depends(read_run_config)]
