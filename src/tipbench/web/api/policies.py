"""Policy endpoints: the policies of `tipbench serve`, promotions, recorded simulations, and new simulations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from tipbench.jobs.command import simulate_request
from tipbench.jobs.store import Submitted
from tipbench.serve.event_log import store_exists
from tipbench.serve.policy import DEFAULT_POLICY
from tipbench.simulate.simulation import SimulationConfig
from tipbench.web.api.jobs import STARTED_RESPONSE, respond_with_job
from tipbench.web.api.models import (
    COMMON_ERRORS,
    EXPERIMENT_ERRORS,
    JobStarted,
    PromotionList,
    PromotionShape,
    SimulationList,
    error_responses,
)
from tipbench.web.auth import ADMINS_ONLY, require_admin
from tipbench.web.deps import Admin, Panel, PanelState, Store
from tipbench.web.errors import convert_usage_errors
from tipbench.web.forms import body_of, body_schema
from tipbench.web.job_service import IdempotencyKey
from tipbench.workflows.policies import PoliciesReport, read_policies
from tipbench.workflows.promotion import promotion_json, switches_of
from tipbench.workflows.simulation import read_simulations

router = APIRouter(prefix="/api/bench", tags=["policies"], dependencies=[ADMINS_ONLY], responses=COMMON_ERRORS)
_BODY = body_schema(SimulationConfig, example={"world": "drift", "seeds": 2}, about="Options of `tipbench simulate`.")
MaxItems = Annotated[int, Query(ge=1, le=200, description="Maximum number of items; the newest are returned.")]
UserId = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Include the state of this user; the id is the one that the app sends.",
        examples=["u1"],
    ),
]


@router.get("/policies", summary="Get policies and shadows")
def policies(panel: PanelState, user_id: UserId = None) -> PoliciesReport:
    """Return the active policy's name; each policy's counts, weights and daily rewards; and the shadows."""
    with convert_usage_errors("query.user_id"):
        return read_policies(panel.settings.home, user_id)


@router.get("/simulations", summary="List simulations", responses=EXPERIMENT_ERRORS)
def simulations(store: Store, limit: MaxItems = 50) -> SimulationList:
    """Return recorded simulations with their results, newest first."""
    items = [{"run_id": run.run_id, **result} for run, result in read_simulations(store, limit)]
    return SimulationList.model_validate({"items": items, "next": None})


@router.post(
    "/simulations",
    summary="Start a simulation",
    status_code=202,
    response_model_exclude_unset=True,
    openapi_extra=_BODY,
    responses={**STARTED_RESPONSE, **error_responses(409)},
)
def simulate(
    # `body_of` requires an admin before it parses the body
    config: Annotated[SimulationConfig, body_of(SimulationConfig, require_admin)],
    who: Admin,
    panel: PanelState,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> JobStarted:
    """Queue `tipbench simulate`. It always runs on this machine and does not wait for a running `collect`."""
    submitted = start_simulation(panel, config, started_by=who.name, idempotency_key=idempotency_key)
    return respond_with_job(panel, submitted, response)


def start_simulation(
    panel: Panel, config: SimulationConfig, *, started_by: str, idempotency_key: str | None
) -> Submitted:
    """Queue the job; it records the simulation in the panel's MLflow."""
    mlflow_url = panel.settings.get("mlflow_url") or None
    request = simulate_request(config, mlflow_url=mlflow_url, started_by=started_by)
    return panel.jobs.submit(request, idempotency_key=idempotency_key)


@router.get("/promotions", summary="List promotions")
def promotions(panel: PanelState, limit: MaxItems = 100) -> PromotionList:
    """Return the active policy, and the checks, switches and undos with time and operator, newest first."""
    if not store_exists(panel.settings.home):
        return PromotionList(active=DEFAULT_POLICY, items=[], next=None)
    with switches_of(panel.settings.home) as switches:
        items = [PromotionShape.model_validate(promotion_json(row)) for row in switches.promotions(limit=limit)]
        return PromotionList(active=switches.active(), items=items, next=None)
