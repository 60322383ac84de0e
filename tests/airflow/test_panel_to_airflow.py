"""From the panel through a real Airflow: started over HTTP, followed live, judged, answered, compared; found again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.judging import Desk, agreed
from support.real_airflow import DAG, RealAirflow
from support.scripted_ollama import ScriptedOllama
from tipbench.record.mlflow import MlflowStore
from web.panels import API, Served, serving

RUN, JOBS = f"{API}/run", f"{API}/jobs"
SMALL = {"models": "alpha:135m", "prompts": "v1", "n_tips": 2, "num_predict": 64, "server_wait_s": 5}


@pytest.fixture
def served(home: Path, airflow: RealAirflow, mlflow_url: str, scripted: ScriptedOllama) -> Iterator[Served]:
    """A panel with the real Airflow and MLflow, which looks after its jobs."""
    environment = {
        "TIPBENCH_AIRFLOW_URL": airflow.url,
        "TIPBENCH_AIRFLOW_USERNAME": "bench",
        "TIPBENCH_AIRFLOW_PASSWORD": airflow.password,
        "MLFLOW_TRACKING_URI": mlflow_url,
        "OLLAMA_HOST": scripted.url,
    }
    with serving(home, environment=environment, find_mlflow=True, run_jobs=True) as panel:
        yield panel
    scripted.set(call_s=0.0)


def job_once(served: Served, job_id: str, *states: str, within_s: float = 240) -> Any:
    """What the API shows of the job once it is in one of these states."""
    deadline = time.monotonic() + within_s
    while True:
        shown = served.get(f"{JOBS}/{job_id}").json()
        if shown["job"]["state"] in states:
            return shown
        assert time.monotonic() < deadline, f"{shown}\n{served.get(f'{JOBS}/{job_id}/log').text}"
        time.sleep(0.3)


def cells_once(served: Served, job_id: str, least: int) -> None:
    """Returns when so many cells have been reported live."""
    deadline = time.monotonic() + 240
    while True:
        shown = served.get(f"{JOBS}/{job_id}").json()
        if sum(model["done"] for model in shown["progress"]["models"]) >= least:
            return
        assert time.monotonic() < deadline, f"{shown}\n{served.get(f'{JOBS}/{job_id}/log').text}"
        time.sleep(0.3)


def test_a_run_goes_from_the_panel_through_airflow_and_the_judge_to_the_comparison(
    served: Served, airflow: RealAirflow, mlflow_url: str
) -> None:
    experiment = "tip-bench-panel-airflow"
    wanted = {**SMALL, "experiment": experiment, "n_scenarios": 4}
    job = served.post(f"{RUN}?wait_for_judge=true", json=wanted).json()["job"]
    assert job["runner"] == "airflow"
    shown = job_once(served, job["id"], "waiting", "failed")
    assert shown["job"]["state"] == "waiting", shown
    (model,) = shown["progress"]["models"]
    assert (model["model"], model["phase"], model["done"], model["total"]) == ("alpha:135m", "empty", 4, 4)
    run_id = f"tipbench__{job['id']}"
    assert shown["job"]["links"]["airflow"] == f"{airflow.url}/dags/{DAG}/runs/{run_id}"
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        assert found is not None
        Desk(store, found).judged_by("anna", agreed)
    ended = job_once(served, job["id"], "succeeded", "failed")
    assert ended["job"]["state"] == "succeeded", ended
    compared = airflow.returned(run_id, "compare")
    assert (compared["pending"], compared["judged"]) == (0, 4)
    assert ended["progress"]["collected"]["generated"] == 4


def test_an_airflow_that_stops_in_mid_run_is_told_and_the_run_is_finished_when_it_is_back(
    served: Served, airflow: RealAirflow, mlflow_url: str, scripted: ScriptedOllama
) -> None:
    scripted.set(call_s=1.0)
    experiment = "tip-bench-airflow-stopped"
    job = served.post(RUN, json={**SMALL, "experiment": experiment, "n_scenarios": 8}).json()["job"]
    cells_once(served, job["id"], 2)
    airflow.stop()
    lost = job_once(served, job["id"], "lost", within_s=60)
    assert "Is its API server running?" in lost["job"]["reason"]
    airflow.start()
    ended = job_once(served, job["id"], "succeeded", "failed", within_s=500)
    assert ended["job"]["state"] == "succeeded", ended
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        assert found is not None
        keys = [run.tags["cell_key"] for run in store.search(found.experiment_id, where={"kind": "cell"})]
    assert len(keys) == len(set(keys)) == 8
