"""POST /api/bench/plan: what a run would do, without doing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tipbench.addresses import is_loopback
from tipbench.errors import LocalServerError, MlflowAway, NotEnoughData
from tipbench.generate.engine import engine_of
from tipbench.generate.machine import free_memory
from tipbench.generate.sizing import Memory
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.plan.suite import Suite
from tipbench.record.collect import dry_run
from tipbench.record.journal import journalled_keys
from tipbench.record.outcome import Setting
from tipbench.record.planning import Recorded, plan_json, read_recorded
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Panel, PanelState, RunConfig
from tipbench.web.rendering import Json
from tipbench.web.shapes import COMMON, PlanShape, refusals

router = APIRouter(prefix="/api/bench", tags=["run"], dependencies=[ADMINS_ONLY], responses=COMMON)


def _schema() -> dict[str, Any]:
    """Of the body: the configuration, and what a scheduler's runs know beside it. A plan does not mind that."""
    schema = CollectConfig.model_json_schema()
    about = "In Airflow: compare when every cell of the run is judged; until then the job is waiting."
    wait = {"type": "boolean", "default": False, "description": about}
    return {**schema, "properties": {**schema["properties"], WAIT_FOR_JUDGE: wait}}


# The body is read once it is known who asks, so FastAPI does not see it; `RunConfig` reads it.
CONFIG_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "What differs from the defaults; see GET /api/bench/config.",
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
    summary="What a run would do",
    response_model=PlanShape,
    openapi_extra=CONFIG_BODY,
    responses=refusals(409, 502, 503),
)
def plan(config: RunConfig, panel: PanelState) -> Response:
    """Cells, those already recorded, models refused and why, memory and time. Nothing is generated or written."""
    return Json(plan_of(panel, config))


def plan_of(panel: Panel, config: CollectConfig) -> dict[str, Any]:
    """For the JSON and for the page that starts a run."""
    warnings: list[str] = []

    def recorded(suite: Suite) -> Recorded:
        try:
            return _recorded(panel, config, suite)
        except NotEnoughData:
            return Recorded()
        except (LocalServerError, MlflowAway) as exc:
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
        found = read_recorded(opened.store, experiment.experiment_id, Setting(config, suite, "").conditions)
        return replace(found, journalled=journalled)


def _free_memory(model: str, config: CollectConfig) -> Memory:
    """This machine's, where the model is computed here; unknown where it is not."""
    elsewhere = engine_of(model) == "ollama" and not is_loopback(config.ollama_url)
    return Memory() if elsewhere else free_memory()
