"""From the panel through a real Airflow: started over HTTP, followed live, judged, answered, compared; found again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.command import tipbench
from support.experiments import find_experiment, recorded_runs
from support.judging import SheetDriver, fill
from support.real_airflow import DAG, RealAirflow, unique_name
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama
from tipbench.errors import AirflowUnavailable, JobStartError
from tipbench.jobs.airflow_api import AirflowAccess, AirflowApi, AirflowDag
from tipbench.record.mlflow import MlflowStore
from web.panels import API, ServedPanel, serve_panel

RUN, JOBS = f"{API}/run", f"{API}/jobs"
SMALL = {"models": "alpha:135m", "prompts": "v1", "n_tips": 2, "num_predict": 64, "server_wait_s": 5}


@pytest.fixture
def served(home: Path, airflow: RealAirflow, mlflow_url: str, scripted_ollama: ScriptedOllama) -> Iterator[ServedPanel]:
    """A panel with the real Airflow, whose jobs run."""
    environment = {
        "TIPBENCH_AIRFLOW_URL": airflow.url,
        "TIPBENCH_AIRFLOW_USERNAME": "bench",
        "TIPBENCH_AIRFLOW_PASSWORD": airflow.password,
        "MLFLOW_TRACKING_URI": mlflow_url,
        "OLLAMA_HOST": scripted_ollama.url,
    }
    with serve_panel(home, environment=environment, find_mlflow=True, run_jobs=True) as panel:
        yield panel
    scripted_ollama.clear_faults()
    scripted_ollama.set(call_s=0.0)


def wait_for_job(served: ServedPanel, job_id: str, *states: str, reason: str = "", within_s: float = 300) -> Any:
    """Wait until the job has one of these states, with this reason; returns the API's response."""
    deadline = time.monotonic() + within_s
    while True:
        shown = served.get(f"{JOBS}/{job_id}").json()
        if shown["job"]["state"] in states and reason in (shown["job"]["reason"] or ""):
            return shown
        assert time.monotonic() < deadline, f"{shown}\n{served.get(f'{JOBS}/{job_id}/log').text}"
        time.sleep(0.3)


def wait_for_cells(served: ServedPanel, job_id: str, least: int) -> None:
    """Wait until at least `least` cells have been reported live."""
    deadline = time.monotonic() + 300
    while True:
        shown = served.get(f"{JOBS}/{job_id}").json()
        if sum(model["done"] for model in shown["progress"]["models"]) >= least:
            return
        assert time.monotonic() < deadline, f"{shown}\n{served.get(f'{JOBS}/{job_id}/log').text}"
        time.sleep(0.3)


def test_a_run_goes_from_the_panel_through_airflow_and_the_judge_to_the_comparison(
    served: ServedPanel, airflow: RealAirflow, mlflow_url: str, home: Path
) -> None:
    experiment = unique_name("tip-bench-panel-airflow")
    wanted = {**SMALL, "experiment": experiment, "n_scenarios": 4}
    job = served.post(f"{RUN}?wait_for_judge=true", json=wanted).json()["job"]
    assert job["runner"] == "airflow"
    shown = wait_for_job(served, job["id"], "waiting", "failed")
    assert shown["job"]["state"] == "waiting", shown
    (model,) = shown["progress"]["models"]
    assert (model["model"], model["phase"], model["done"], model["total"]) == ("alpha:135m", "empty", 4, 4)
    run_id = f"tipbench__{job['id']}"
    assert shown["job"]["links"]["airflow"] == f"{airflow.url}/dags/{DAG}/runs/{run_id}"
    with MlflowStore(mlflow_url) as store:
        found = find_experiment(store, experiment)
        (home / "sheet.json").write_text(json.dumps(fill(SheetDriver(store, found).export("anna").stored)), "utf-8")
    arguments = ("judge", "apply", str(home / "sheet.json"), "--judge", "anna", "--mlflow-url", mlflow_url)
    tipbench(*arguments, home=home)
    ended = wait_for_job(served, job["id"], "succeeded", "failed")
    assert ended["job"]["state"] == "succeeded", ended
    compared = airflow.return_value(run_id, "compare")
    assert (compared["pending"], compared["judged"]) == (0, 4)
    assert ended["progress"]["collected"]["generated"] == 4


def test_an_airflow_that_stops_in_mid_run_is_reported_and_the_run_finishes_after_its_restart(
    served: ServedPanel, airflow: RealAirflow, mlflow_url: str, scripted_ollama: ScriptedOllama
) -> None:
    scripted_ollama.set(call_s=1.0)
    experiment = unique_name("tip-bench-airflow-stopped")
    job = served.post(RUN, json={**SMALL, "experiment": experiment, "n_scenarios": 8}).json()["job"]
    wait_for_cells(served, job["id"], 2)
    airflow.stop()
    try:
        lost = wait_for_job(served, job["id"], "lost")
        assert "Is its API server running?" in lost["job"]["reason"]
    finally:
        airflow.start()
    ended = wait_for_job(served, job["id"], "succeeded", "failed", within_s=500)
    assert ended["job"]["state"] == "succeeded", ended
    keys = [run.tags["cell_key"] for run in recorded_runs(mlflow_url, experiment)]
    assert len(keys) == len(set(keys)) == 8


def test_a_failed_model_blocks_no_other_and_a_retry_repeats_only_it_in_the_same_dag_run(
    served: ServedPanel, airflow: RealAirflow, scripted_ollama: ScriptedOllama
) -> None:
    failing, experiment = f"{unique_name('failing')}:135m", unique_name("tip-bench-airflow-retry")
    scripted_ollama.add_model(ModelSpec(failing))
    scripted_ollama.add_faults(Fault("missing", model=failing, path="/api/show", calls=(2, 3, 4)))  # after the plan
    order = {**SMALL, "models": f"{failing},beta:135m", "experiment": experiment, "n_scenarios": 2}
    job = served.post(RUN, json=order).json()["job"]
    failed = wait_for_job(served, job["id"], "succeeded", "failed")["job"]
    assert failed["state"] == "failed", failed
    assert failing in failed["reason"]
    run_id = f"tipbench__{job['id']}"
    states = airflow.task_states(run_id)
    assert (states[f"collect {failing}"], states["collect beta:135m"], states["compare"]) == (
        "failed",
        *["success"] * 2,
    )
    assert f"Not collected in full: {failing}" in airflow.logs(run_id, "outcome")
    scripted_ollama.clear_faults()
    again = served.post(f"{JOBS}/{job['id']}/retry").json()["job"]
    ended = wait_for_job(served, again["id"], "succeeded", "failed")
    assert ended["job"]["state"] == "succeeded", ended
    assert ended["job"]["links"]["airflow"] == failed["links"]["airflow"]
    assert [model["model"] for model in ended["progress"]["models"]] == [failing]
    tries = {each["rendered_map_index"]: each["try_number"] for each in airflow.tasks(run_id)}
    assert (tries[failing], tries["beta:135m"]) == (2, 1)


def test_a_paused_dag_and_a_missing_pool_are_reported_and_the_job_continues_once_fixed(
    served: ServedPanel, airflow: RealAirflow
) -> None:
    with airflow.paused() as unpause, airflow.without_pool() as make_pool:
        order = {**SMALL, "experiment": unique_name("tip-bench-airflow-paused"), "n_scenarios": 2}
        job = served.post(RUN, json=order).json()["job"]
        wait_for_job(served, job["id"], "queued", reason=f"The DAG {DAG} is paused in Airflow. Unpause it there")
        unpause()
        shown = wait_for_job(served, job["id"], "running", reason="Airflow has no pool ollama")
        assert "`airflow pools set ollama 1 tipbench`" in shown["job"]["reason"]
        make_pool()
        ended = wait_for_job(served, job["id"], "succeeded", "failed")
    assert (ended["job"]["state"], ended["job"]["reason"]) == ("succeeded", None)


def test_a_token_that_has_become_invalid_is_renewed(airflow: RealAirflow) -> None:
    stale = AirflowAccess(airflow.url, "bench", airflow.password, token="eyJhbGciOiJIUzUxMiJ9.e30.c3RhbGU")
    with closing(AirflowApi(stale)) as api:
        assert api.get(f"dags/{DAG}")["dag_id"] == DAG


def test_a_missing_dag_is_reported_with_what_to_do(airflow: RealAirflow) -> None:
    access = AirflowAccess(airflow.url, "bench", airflow.password, dag_id="no_such_dag")
    with (
        closing(AirflowApi(access)) as api,
        pytest.raises(JobStartError, match=r"The DAG no_such_dag is missing in .*Put dags/bench_dag\.py"),
    ):
        AirflowDag(api).check_unpaused()


def test_a_wrong_password_is_reported_without_it(airflow: RealAirflow) -> None:
    access = AirflowAccess(airflow.url, "bench", "wrong-a1b2")
    with (
        closing(AirflowApi(access)) as api,
        pytest.raises(AirflowUnavailable, match="rejects the login of bench") as caught,
    ):
        api.get(f"dags/{DAG}")
    assert "wrong-a1b2" not in str(caught.value)
