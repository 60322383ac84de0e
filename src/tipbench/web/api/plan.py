"""POST /api/bench/plan, the configuration schema, and the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.record.plan_check import plan_json
from tipbench.web.api.models import COMMON, PlanShape, refusals
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState, RunConfig
from tipbench.workflows.plan_run import plan_outlook, plan_run

router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)


def _schema() -> dict[str, Any]:
    """Return the schema of the body: the configuration plus the Airflow option, which a plan ignores."""
    schema = CollectConfig.model_json_schema()
    about = "Airflow only: the job waits until every cell of the run is judged, then compares."
    wait = {"type": "boolean", "default": False, "description": about}
    return {**schema, "properties": {**schema["properties"], WAIT_FOR_JUDGE: wait}}


# `RunConfig` reads the body after authentication, so FastAPI cannot document it by itself.
CONFIG_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "Options that differ from the defaults; see GET /api/bench/config.",
        "content": {
            "application/json": {
                "schema": _schema(),
                "example": {"models": "baseline:template", "prompts": "v1", "n_tips": 3, "n_scenarios": 2},
            }
        },
    }
}


@router.post(
    "/plan",
    summary="Plan a run",
    response_model=PlanShape,
    openapi_extra=CONFIG_BODY,
    responses=refusals(409, 502, 503),
)
def plan(config: RunConfig, panel: PanelState) -> dict[str, Any]:
    """Return the number of cells, those already recorded, refused models with reasons, and estimated memory and time.

    Nothing is generated or recorded.
    """
    return plan_of(panel, config)


def plan_of(panel: Panel, config: CollectConfig) -> dict[str, Any]:
    """Return the plan for the API and the page that starts a run."""
    made, warnings = plan_run(config, panel.settings.home, lambda: panel.tracker.named(config.mlflow_url))
    return {**plan_json(made), "outlook": plan_outlook(made).to_json(), "warnings": warnings}


@router.get("/config", summary="Get the configuration schema", response_model=dict[str, Any])
def config(panel: PanelState) -> dict[str, Any]:
    """Return the JSON schema of the options of `tipbench collect`.

    Defaults are those of this server; URLs are limited to the allowed ones.
    """
    return panel.allowed.schema()


@router.get("/openapi.json", summary="Get the OpenAPI document", response_model=dict[str, Any])
def openapi(request: Request) -> Any:
    """Return the OpenAPI document of the whole API."""
    return request.app.openapi()
