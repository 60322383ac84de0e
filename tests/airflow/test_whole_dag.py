"""The whole DAG in one process, on the template and the embedded engine, with a real MLflow."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.command import tipbench, tipbench_json
from support.experiments import recorded_runs
from support.real_airflow import DagProgram, airflow_environment, unique_name
from support.scripted_ollama import ScriptedOllama

PATH = re.compile(r"""(^|[\s"'=(])(~?/|\.\.?/|file:|[A-Za-z]:\\)""")  # a path of a file or folder, not a URL
CONF = {"prompts": "v1", "n_tips": 2, "n_scenarios": 2, "num_predict": 48}


@pytest.fixture(scope="module")
def mlflow_url(real_mlflow_url: str) -> str:
    """A real MLflow, which is part of the tested flow."""
    return real_mlflow_url


def cell_keys(mlflow_url: str, experiment: str) -> list[str]:
    return sorted(run.tags["cell_key"] for run in recorded_runs(mlflow_url, experiment))


def task_states(result: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in result["tasks"]:
        found.setdefault(each["task"], []).append(each["state"])
    return found


def test_the_whole_dag_runs_on_the_template_and_the_embedded_engine(dag_program: DagProgram, mlflow_url: str) -> None:
    models = ["baseline:template", "embedded:smollm2:135m", "embedded:none"]
    experiment = unique_name("tip-bench-dag-test")
    result = dag_program("run", json.dumps({**CONF, "models": models, "experiment": experiment}))
    assert result["state"] == "success", result["tasks"]
    assert task_states(result) == {
        "plan": ["success"],
        "share": ["success"],
        "collect": ["success", "success"],
        "unload": ["success"],
        "export_for_judge": ["success"],
        "wait_for_judge": ["skipped"],
        "compare": ["success"],
        "outcome": ["success"],
    }
    assert len(cell_keys(mlflow_url, experiment)) == 4
    for kind in ("refused", "judging", "leaderboard", "collection"):
        assert recorded_runs(mlflow_url, experiment, kind), kind
    xcoms = {each["task"]: json.dumps(each["value"]) for each in result["xcoms"]}
    assert {"plan", "share", "collect", "unload", "export_for_judge", "compare"} <= set(xcoms)
    assert not [task for task, value in xcoms.items() if PATH.search(value)]


def test_the_command_and_the_dag_make_the_same_cells_and_nothing_twice(
    dag_program: DagProgram, mlflow_url: str, scripted_ollama: ScriptedOllama, home: Path
) -> None:
    by_command, by_dag = unique_name("tip-bench-by-command"), unique_name("tip-bench-by-dag")
    conf = {**CONF, "models": "alpha:135m", "mlflow_url": mlflow_url, "ollama_url": scripted_ollama.url}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in conf.items()]
    before = len(scripted_ollama.log.calls())
    tipbench("collect", *words, f"--experiment={by_command}", home=home)
    worker = {"OLLAMA_HOST": scripted_ollama.url, "MLFLOW_TRACKING_URI": mlflow_url}
    assert dag_program("run", json.dumps({**conf, "experiment": by_dag}), **worker)["state"] == "success"
    sent = len(scripted_ollama.log.calls()) - before
    assert dag_program("run", json.dumps({**conf, "experiment": by_command}), **worker)["state"] == "success"
    assert tipbench_json("collect", *words, f"--experiment={by_dag}", home=home)["generated"] == 0
    assert cell_keys(mlflow_url, by_command) == cell_keys(mlflow_url, by_dag)
    assert len(cell_keys(mlflow_url, by_dag)) == 2
    assert sent == len(scripted_ollama.log.calls()) - before == 4


def test_models_are_spread_over_the_available_hosts_one_at_a_time_on_each(dag_program: DagProgram) -> None:
    models = ("alpha:135m", "beta:135m", "delta:135m", "gamma:135m")
    with ScriptedOllama(models=models) as first, ScriptedOllama(models=models) as second:
        hosts = f"away=http://127.0.0.1:9,first={first.url},second={second.url}"
        conf = {**CONF, "models": list(models), "experiment": unique_name("tip-bench-many-hosts")}
        result = dag_program("run", json.dumps(conf), TIPBENCH_OLLAMA_HOSTS=hosts)
        assert result["state"] == "success", result["tasks"]
        assert task_states(result)["collect_on_away"] == ["skipped"]
        for server in (first, second):
            assert sorted(len(server.log.calls(model)) for model in models) == [0, 0, 2, 2]
            assert (server.log.max_resident, server.resident) == (1, ())
        assert all(len(first.log.calls(model)) + len(second.log.calls(model)) == 2 for model in models)


def test_an_unknown_key_fails_the_plan_and_nothing_is_collected(dag_program: DagProgram) -> None:
    result = dag_program("run", json.dumps({**CONF, "models": "baseline:template", "n_tipps": 3}))
    assert result["state"] == "failed"
    (plan,) = [each for each in result["tasks"] if each["task"] == "plan"]
    assert (plan["state"], plan["tries"]) == ("failed", 1)
    assert task_states(result)["collect"] == ["upstream_failed"]


def test_core_without_extras_installs_next_to_airflow() -> None:
    done = subprocess.run(
        [airflow_environment() / "bin" / "python", "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
