"""Runs that wait for a judge in Airflow: continued by scores from page, API or file, without blocking others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.command import tipbench
from support.judging import MODELS, SheetDriver, agreed, fill, record_cells
from support.scripted_airflow import PASSWORD, ScriptedAirflow
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import Job
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun
from tipbench.record.store import MemoryStore
from tipbench.settings import load_settings
from tipbench.web.cache import LIFE_S, Cache
from tipbench.web.deps import PanelMlflow
from tipbench.web.job_service import PanelMlflowLookup
from web.airflow_panel import JOBS, RUN, airflow_environment, report_nothing_to_do, serve_with_airflow, wait_for_state
from web.judge_client import JudgeClient, stored_sheet
from web.panel_process import PanelProcess
from web.panels import API, EXPERIMENT, ServedPanel, answered_store

WAITING = f"{RUN}?wait_for_judge=true"
OF_ALL = {"models": ",".join(MODELS), "n_tips": 3, "experiment": EXPERIMENT}
FEW = {"models": MODELS[0], "prompts": "v1", "n_scenarios": 4, "n_tips": 3}


@pytest.fixture
def scripted_airflow(home: Path) -> Iterator[ScriptedAirflow]:
    with ScriptedAirflow(home, report_nothing_to_do) as server:
        yield server


@pytest.fixture
def waiting_experiment(mlflow_url: str) -> Iterator[tuple[MlflowStore, dict[str, Any]]]:
    """An MLflow with four answers, and the options of a run that waits for their scores."""
    name = f"tip-bench-waiting-{uuid4().hex[:8]}"
    with MlflowStore(mlflow_url) as store:
        found = record_cells(store, models=MODELS[:1], experiment=name, prompts="v1", n_scenarios=4)
        store.mark_changed(found.experiment_id)
        yield store, {**FEW, "experiment": name}


# judged by batch, file or webhook


def judge_by_batch(served: ServedPanel) -> None:
    judge_client = JudgeClient(served, served.judge)
    for _ in range(2):  # a batch has thirty answers at most
        assert judge_client.judge_batch()["outcome"]["status"] == "applied"


def judge_by_file(served: ServedPanel) -> None:
    """Judge like a program after a webhook: export a sheet and apply it."""
    sheet = served.post(f"{API}/judge/{EXPERIMENT}/sheets", token=served.judge, json={}).json()["sheet"]
    filled = fill(stored_sheet(served, sheet))
    response = served.post(f"{API}/judge/{EXPERIMENT}/apply", token=served.judge, json=filled)
    assert response.json()["status"] == "applied", response.text


@pytest.mark.parametrize("judge", [judge_by_batch, judge_by_file])
def test_judging_at_the_panel_continues_a_waiting_run(
    home: Path, scripted_airflow: ScriptedAirflow, judge: Callable[[ServedPanel], None]
) -> None:
    with serve_with_airflow(home, scripted_airflow, answered_store()) as served:
        job = served.post(WAITING, json=OF_ALL).json()["job"]
        wait_for_state(served, job["id"], "waiting", "48 cells wait for a judge.")
        judge(served)
        wait_for_state(served, job["id"], "succeeded")
    assert scripted_airflow.count("PATCH", "hitlDetails") == 1


@pytest.mark.process
def test_a_sheet_applied_on_the_command_line_continues_a_waiting_run(
    home: Path,
    scripted_airflow: ScriptedAirflow,
    waiting_experiment: tuple[MlflowStore, dict[str, Any]],
    mlflow_url: str,
) -> None:
    store, wanted = waiting_experiment
    with serve_with_airflow(home, scripted_airflow, store) as served:
        job = served.post(WAITING, json=wanted).json()["job"]
        wait_for_state(served, job["id"], "waiting", "4 cells wait for a judge.")
        experiment = store.experiment(wanted["experiment"])
        assert experiment is not None
        file = home / "sheet.json"
        file.write_text(json.dumps(fill(SheetDriver(store, experiment).export("anna").stored)), "utf-8")
        tipbench("judge", "apply", str(file), "--judge", "anna", "--mlflow-url", mlflow_url, home=home)
        wait_for_state(served, job["id"], "succeeded")


@pytest.mark.process
def test_a_killed_panel_finds_its_waiting_run_again_and_continues_it(
    home: Path,
    scripted_airflow: ScriptedAirflow,
    waiting_experiment: tuple[MlflowStore, dict[str, Any]],
    mlflow_url: str,
) -> None:
    store, wanted = waiting_experiment
    with PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, **airflow_environment(scripted_airflow)}) as panel:
        job = panel.client.post(WAITING, json=wanted).json()["job"]
        panel.wait_until(job["id"], lambda now: now["job"]["state"] == "waiting")
        panel.kill()
        experiment = store.experiment(wanted["experiment"])
        assert experiment is not None
        SheetDriver(store, experiment).judged_by("anna", agreed)
        panel.start()
        assert panel.wait_for_end(job["id"])["job"]["state"] == "succeeded"
        assert PASSWORD not in panel.stderr
    assert scripted_airflow.count("POST", "dagRuns") == 1
    assert scripted_airflow.count("PATCH", "hitlDetails") == 1


# without blocking other jobs


def test_other_jobs_run_while_one_waits(home: Path, scripted_airflow: ScriptedAirflow) -> None:
    with serve_with_airflow(home, scripted_airflow, answered_store()) as served:
        waiting = [served.post(WAITING, json=OF_ALL).json()["job"]["id"] for _ in range(2)]
        for job_id in waiting:
            wait_for_state(served, job_id, "waiting")
        for runner in ("local", "airflow"):
            job = served.post(f"{RUN}?runner={runner}", json=OF_ALL).json()["job"]
            wait_for_state(served, job["id"], "succeeded")
        for job_id in waiting:
            wait_for_state(served, job_id, "waiting")


def test_a_waiting_run_is_cancelled_and_its_retry_waits_and_is_answered(
    home: Path, scripted_airflow: ScriptedAirflow
) -> None:
    store = answered_store()
    experiment = store.ensure_experiment(EXPERIMENT)
    with serve_with_airflow(home, scripted_airflow, store) as served:
        job = served.post(WAITING, json=OF_ALL).json()["job"]
        wait_for_state(served, job["id"], "waiting")
        assert served.post(f"{JOBS}/{job['id']}/cancel").status_code == 200
        assert wait_for_state(served, job["id"], "cancelled")["exit_code"] == 130
        again = served.post(f"{JOBS}/{job['id']}/retry").json()["job"]
        assert again["retry_of"] == job["id"]
        wait_for_state(served, again["id"], "waiting", "48 cells wait for a judge.")
        SheetDriver(store, experiment).judged_by("anna", agreed)
        wait_for_state(served, again["id"], "succeeded")


# counting cells cheaply


class CountingStore(MemoryStore):
    """Counts how often runs are read."""

    reads = 0

    def search(self, *arguments: Any, **options: Any) -> Iterator[StoredRun]:
        self.reads += 1
        return super().search(*arguments, **options)

    def read(self, *arguments: Any, **options: Any) -> Iterator[tuple[StoredRun, dict[str, str]]]:
        self.reads += 1
        return super().read(*arguments, **options)


def waiting_job(home: Path) -> Job:
    with JobStore(home / "jobs" / "other.db") as jobs:
        return jobs.add(collect_request(make_config(OF_ALL), runner="airflow"))[0]


def test_cells_are_counted_after_a_change_and_periodically(home: Path) -> None:
    store, now = CountingStore(), [0.0]
    experiment = record_cells(store)
    store.mark_changed(experiment.experiment_id)
    settings = load_settings({"TIPBENCH_HOME": str(home)}, home.parent)
    lookup = PanelMlflowLookup(PanelMlflow(settings, store), Cache(4, lambda: now[0]))
    job = waiting_job(home)
    assert [lookup.pending(job) for _ in range(10)] == [48] * 10
    first = store.reads
    now[0] += LIFE_S
    lookup.pending(job)
    assert store.reads == 2 * first, "a write may not have changed the revision"
    SheetDriver(store, experiment).judged_by("anna", agreed)
    assert lookup.pending(job) == 0
