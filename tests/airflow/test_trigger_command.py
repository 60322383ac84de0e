"""`airflow dags trigger` on the local Airflow, as written in docs/migrating.md: with and without a conf."""

from __future__ import annotations

import re
import shlex
import subprocess

from support.experiments import recorded_runs
from support.real_airflow import ENDED, ROOT, RealAirflow, unique_name
from support.scripted_ollama import ModelSpec, ScriptedOllama

PAGE = (ROOT / "docs" / "migrating.md").read_text("utf-8")


def test_the_documented_trigger_commands_collect_the_installed_models(
    airflow: RealAirflow, scripted_ollama: ScriptedOllama, mlflow_url: str
) -> None:
    scripted_ollama.add_model(ModelSpec("qwen2.5:0.5b"))  # the other default models are missing and skipped
    lines = re.findall(r"^    (airflow dags trigger .+)$", PAGE, flags=re.MULTILINE)
    assert ["--conf" in line for line in lines] == [False, True]
    for line in lines:
        run_id = unique_name("typed")
        variables = shlex.quote(str(airflow.folder / "airflow" / "airflow.env"))
        typed = f". {variables} && {line} --run-id {run_id}"
        done = subprocess.run(
            ["bash", "-c", typed],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert airflow.wait_for(run_id, ENDED) == "success", airflow.task_states(run_id)
        assert airflow.task_states(run_id)["collect qwen2.5:0.5b"] == "success"
    for experiment, cells in (("tip-bench-auto", 24), ("tip-bench-moved", 8)):
        runs = recorded_runs(mlflow_url, experiment)
        assert sum(run.params["model"] == "qwen2.5:0.5b" for run in runs) >= cells
