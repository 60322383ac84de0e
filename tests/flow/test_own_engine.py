"""An engine defined in this file runs through the whole product: no module depends on an engine's name."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.experiments import find_experiment
from support.judging import SheetDriver, agreed
from tipbench.cli.airflow_tasks import collect_model, compare, export_for_judge, plan_models
from tipbench.cli.main import app
from tipbench.generate.engine import (
    ENGINES,
    Completion,
    EngineDependencies,
    EngineFailure,
    EngineType,
    GenerationRequest,
    InProcessEngine,
    ModelFacts,
)
from tipbench.record.mlflow import MlflowStore

MODELS = ["echo:calm", "echo:brisk"]
TESTS = Path(__file__).parents[1]


class EchoEngine(InProcessEngine):
    """Writes tips that name the model and the scenario."""

    name = "echo"

    def facts(self, model: str) -> ModelFacts:
        digest = hashlib.sha256(model.encode()).hexdigest()
        return ModelFacts(model, self.name, "1", "here", digest, params_b=0.001, file_bytes=1000)

    def list_models(self) -> list[str]:
        return MODELS

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        word = request.model.partition(":")[2]
        tips = [
            {"tip": f"Stay {word} and give task {n} of {request.scenario.id} ten minutes.", "rationale": "Short."}
            for n in range(request.n_tips)
        ]
        return Completion(json.dumps(tips), "stop", latency_s=0.1)


def build_echo(_needs: EngineDependencies) -> EchoEngine:
    return EchoEngine()


ECHO = EngineType("echo", build_echo, "the echo", needs_lock=True)


@pytest.fixture
def worker_mlflow_url(tmp_path: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the engine in this process and in every process that a task starts."""
    monkeypatch.setitem(ENGINES, ECHO.name, ECHO)
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(TESTS)!r})\n"
        "from tipbench.generate.engine import ENGINES\nfrom flow.test_own_engine import ECHO\nENGINES['echo'] = ECHO\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(each for each in sys.path if each.endswith('src'))}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    return mlflow_url


def run_json(*arguments: str) -> Any:
    """Run a command of tipbench and return its JSON."""
    ended = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert ended.exit_code == 0, ended.stderr
    return json.loads(ended.stdout)


def judge_experiment(url: str, experiment: str) -> None:
    with MlflowStore(url) as store:
        SheetDriver(store, find_experiment(store, experiment)).judge_as("anna", agreed)


def test_a_new_engine_is_planned_collected_judged_compared_and_shown(home: Path, worker_mlflow_url: str) -> None:
    from web.panels import API, serve_panel  # not at the top: the worker's process imports this file

    experiment = "tip-bench-own-engine"
    options = ["--models", ",".join(MODELS), "--prompts", "v1", "--n-tips", "2", "--experiment", experiment]
    assert [row["model"] for row in run_json("models", "list") if row["engine"] == "echo"] == MODELS
    plan = run_json("plan", *options)
    assert ([row["model"] for row in plan["models"]], plan["refused"], plan["to_generate"]) == (MODELS, [], 16)
    collected = run_json("collect", *options)
    assert (collected["generated"], collected["failed"]) == (16, 0)
    judge_experiment(worker_mlflow_url, experiment)
    board = run_json("compare", experiment)
    assert {row["model"]: row["judged"] for row in board["standings"]} == dict.fromkeys(MODELS, 8)
    with serve_panel(home, environment={"MLFLOW_TRACKING_URI": worker_mlflow_url}, find_mlflow=True) as served:
        page = served.get(f"/experiments/{experiment}")
        assert all(re.search(model, page.text) for model in MODELS), page.status_code
        body = {"models": ",".join(MODELS), "prompts": "v1", "n_tips": 2, "experiment": experiment}
        assert served.post(f"{API}/plan", json=body).json()["to_generate"] == 0
        job = served.post(f"{API}/run", json=body).json()["job"]
        assert "the echo on this machine" in served.panel.jobs.store.get(job["id"]).resources


@pytest.mark.process
def test_a_new_engine_goes_through_the_tasks_of_the_dag(worker_mlflow_url: str) -> None:
    conf: dict[str, Any] = {
        "models": MODELS,
        "prompts": "v1",
        "n_tips": 2,
        "experiment": "tip-bench-own-dag",
        "mlflow_url": worker_mlflow_url,
    }
    planned = plan_models(conf, {"collect_on_a": "http://gpu-a:1", "collect_on_b": "http://gpu-b:1"})
    assert (planned["collect_on_a"], planned["collect_on_b"], planned["refused"]) == (MODELS, [], [])
    assert [collect_model(conf, model, "http://gpu-a:1")["generated"] for model in MODELS] == [8, 8]
    assert export_for_judge(conf)["pending"] == 16
    judge_experiment(worker_mlflow_url, conf["experiment"])
    assert compare(conf)["judged"] == 16
