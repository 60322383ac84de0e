"""POST /api/bench/plan, the configuration schema, and the OpenAPI document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tipbench.errors import LocalServerError, MlflowUnavailable, NotEnoughData
from tipbench.generate.engine import Memory, engine_of, free_memory
from tipbench.http import is_loopback
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.plan.suite import Suite
from tipbench.record.cell_run import RunContext
from tipbench.record.collect import dry_run
from tipbench.record.journal import journalled_keys
from tipbench.record.plan_check import Recorded, plan_json, read_recorded
from tipbench.web.api.models import COMMON, PlanShape, refusals
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState, RunConfig
from tipbench.web.errors import Json

router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)


def _schema() -> dict[str, Any]:
    """Returns the schema of the body: the configuration plus the Airflow option, which a plan ignores."""
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
def plan(config: RunConfig, panel: PanelState) -> Response:
    """Returns the number of cells, those already recorded, refused models with reasons, and estimated memory and time.

    Nothing is generated or recorded.
    """
    return Json(plan_of(panel, config))


def plan_of(panel: Panel, config: CollectConfig) -> dict[str, Any]:
    """Returns the plan for the API and the page that starts a run."""
    warnings: list[str] = []

    def recorded(suite: Suite) -> Recorded:
        try:
            return _recorded(panel, config, suite)
        except NotEnoughData:
            return Recorded()
        except (LocalServerError, MlflowUnavailable) as exc:
            warnings.append(f"{exc} The plan counts nothing as recorded.")
            return Recorded()

    made = dry_run(config, panel.settings.home, recorded, lambda model: _free_memory(model, config))
    warnings += [model.warning for model in made.models if model.warning]
    return {**plan_json(made), "warnings": warnings}


def _recorded(panel: Panel, config: CollectConfig, suite: Suite) -> Recorded:
    with panel.tracker.named(config.mlflow_url) as opened:
        journalled = frozenset(journalled_keys(panel.tracker.journal(opened, config.experiment)))
        experiment = opened.store.experiment(config.experiment)
        if experiment is None:
            return Recorded(journalled=journalled)
        found = read_recorded(opened.store, experiment.experiment_id, RunContext(config, suite, "").conditions)
        return replace(found, journalled=journalled)


def _free_memory(model: str, config: CollectConfig) -> Memory:
    """Returns this machine's free memory; unknown if the model runs on a remote server."""
    elsewhere = engine_of(model) == "ollama" and not is_loopback(config.ollama_url)
    return Memory() if elsewhere else free_memory()


@router.get("/config", summary="Get the configuration schema", response_model=dict[str, Any])
def config(panel: PanelState) -> Response:
    """Returns the JSON schema of the options of `tipbench collect`.

    Defaults are those of this server; URLs are limited to the allowed ones.
    """
    return Json(panel.allowed.schema())


@router.get("/openapi.json", summary="Get the OpenAPI document", response_model=dict[str, Any])
def openapi(request: Request) -> Response:
    """Returns the OpenAPI document of the whole API."""
    return Json(request.app.openapi())
