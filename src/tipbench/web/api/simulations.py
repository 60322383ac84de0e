"""Simulations and promotions: what is recorded, and the job that runs a simulation."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from tipbench.jobs.command import simulate_request
from tipbench.jobs.supervisor import Submitted
from tipbench.serve.event_log import FILE, FOLDER
from tipbench.serve.policy import DEFAULT_POLICY
from tipbench.simulate.simulation import SimulationConfig
from tipbench.web.api.jobs import STARTED, started
from tipbench.web.api.models import COMMON, DATA, JobStarted, PromotionList, SimulationList, refusals
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState, Store
from tipbench.web.errors import Json, checked
from tipbench.web.forms import JSON, read_json
from tipbench.web.job_service import Key
from tipbench.workflows.promotion import promotion_json, switches_of
from tipbench.workflows.simulation import read_simulations

router = APIRouter(prefix="/api/bench", tags=["policies"], dependencies=[ADMINS_ONLY], responses=COMMON)
_SCHEMA = SimulationConfig.model_json_schema()
_WORLD = {**_SCHEMA.pop("$defs")["WorldName"], **_SCHEMA["properties"]["world"]}  # OpenAPI has no local definitions
_SCHEMA["properties"]["world"] = {key: value for key, value in _WORLD.items() if key != "$ref"}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "Options of `tipbench simulate`.",
        "content": {JSON: {"schema": _SCHEMA, "example": {"world": "drift", "seeds": 2}}},
    }
}
Most = Annotated[int, Query(ge=1, le=200, description="At most this many, newest first.")]


async def read_simulation_options(request: Request, _admin: Admin) -> dict[str, Any]:
    """Reads the body after authentication."""
    return await read_json(request)


@router.get("/simulations", summary="List simulations", response_model=SimulationList, responses=DATA)
def simulations(store: Store, limit: Most = 50) -> Response:
    """Returns recorded simulations with their results, newest first."""
    items = [{"run_id": run.run_id, **result} for run, result in read_simulations(store, limit)]
    return Json({"items": items, "next": None})


@router.post(
    "/simulations",
    summary="Start a simulation",
    status_code=202,
    response_model=JobStarted,
    openapi_extra=_BODY,
    responses={**STARTED, **refusals(409)},
)
def simulate(
    options: Annotated[dict[str, Any], Depends(read_simulation_options)],
    who: Admin,
    panel: PanelState,
    key: Key = None,
) -> Response:
    """Queues `tipbench simulate`, always as a subprocess of this machine; it does not wait for a collect."""
    config = checked(SimulationConfig, options, "body")
    return started(panel, start_simulation(panel, config, started_by=who.name, key=key))


def start_simulation(panel: Panel, config: SimulationConfig, *, started_by: str, key: str | None) -> Submitted:
    """Queue the job; it records in the MLflow of the panel."""
    order = simulate_request(config, mlflow_url=panel.settings.get("mlflow_url") or None, started_by=started_by)
    return panel.jobs.submit(order, key=key)


@router.get("/promotions", summary="List promotions", response_model=PromotionList)
def promotions(panel: PanelState, limit: Most = 100) -> Response:
    """Returns the active policy, and checks, switches and undos with their time and user, newest first."""
    return Json(promotions_json(panel, limit))


def promotions_json(panel: Panel, limit: int = 100) -> dict[str, Any]:
    """Return the record of promotions, for the API and the page."""
    if not (panel.settings.home / FOLDER / FILE).exists():
        return {"active": DEFAULT_POLICY, "items": [], "next": None}
    with switches_of(panel.settings.home) as switches:
        rows = switches.promotions(limit=limit)
        return {"active": switches.active(), "items": [promotion_json(row) for row in rows], "next": None}
