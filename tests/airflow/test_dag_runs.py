"""Runs through the real scheduler and REST: failures, kills, refusals, the judge's gate, a cancelled run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command import tipbench
from support.experiments import recorded_runs
from support.real_airflow import DAG, RealAirflow, unique_name
from support.scripted_ollama import MemorySettings, ScriptedOllama
from tipbench.compare.leaderboard import BOARD
from tipbench.record.mlflow import MlflowStore

ALPHA, BETA = "alpha:135m", "beta:135m"
SMALL: dict[str, Any] = {"prompts": "v1", "n_tips": 2, "n_scenarios": 4, "num_predict": 64, "server_wait_s": 5}
WAITING = frozenset({"awaiting_input", "deferred"})


@pytest.fixture(autouse=True)
def reset_ollama(scripted_ollama: ScriptedOllama) -> Iterator[None]:
    yield
    scripted_ollama.clear_faults()
    scripted_ollama.set(call_s=0.0, unload_s=MemorySettings().unload_s)


def wait_until(is_true: Callable[[], bool], airflow: RealAirflow, run_id: str, within_s: float = 300.0) -> None:
    """Wait for a condition; fails with the states of the run's tasks after `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(f"{run_id} is {airflow.run_state(run_id)} after {within_s:g} s: {airflow.task_states(run_id)}")
        time.sleep(0.2)


def test_the_accepted_model_of_a_run_with_refused_ones_is_judged_and_ranked(
    airflow: RealAirflow, mlflow_url: str, home: Path, tmp_path: Path
) -> None:
    name = unique_name("tip-bench-three-models")
    models = ["huge:70b", "gone:1b", ALPHA]
    airflow.trigger(name, {**SMALL, "models": models, "experiment": name, "wait_for_judge": True})
    airflow.wait_for_task(name, "wait_for_judge", WAITING)
    assert airflow.task_states(name)[f"collect {ALPHA}"] == "success"
    assert {run.params["model"] for run in recorded_runs(mlflow_url, name, "refused")} == {"huge:70b", "gone:1b"}
    assert len(recorded_runs(mlflow_url, name)) == 4
    _judge_sheet(airflow.return_value(name, "export_for_judge")["sheet"], name, mlflow_url, home, tmp_path)
    with airflow.client() as client:
        assert f"4 answers of {name} wait" in client.get(_gate_path(name)).json()["subject"]
    assert [_answer_gate(airflow, name) for _ in range(2)] == [200, 409]
    airflow.expect_state(name, "success")
    compared = airflow.return_value(name, "compare")
    assert (compared["judged"], compared["pending"], compared["failed"], compared["provisional"]) == (4, 0, 0, False)
    with MlflowStore(mlflow_url) as store:
        board = json.loads(store.get(compared["board_run"])[1][BOARD])
    assert [(row["rank"], row["model"], row["judged"]) for row in board["standings"]] == [(1, ALPHA, 4)]


def test_a_collect_killed_in_mid_model_continues_on_its_next_try(
    airflow: RealAirflow, mlflow_url: str, scripted_ollama: ScriptedOllama
) -> None:
    name = unique_name("tip-bench-killed")
    scripted_ollama.set(call_s=2.0)
    before = len(scripted_ollama.log.requests)
    airflow.trigger(name, {**SMALL, "models": ALPHA, "experiment": name, "n_scenarios": 8})
    wait_until(lambda: len(recorded_runs(mlflow_url, name)) >= 2, airflow, name)
    os.kill(_find_task_process(name), signal.SIGKILL)
    scripted_ollama.set(call_s=0.0)
    airflow.expect_state(name, "success", 400.0)
    runs = recorded_runs(mlflow_url, name)
    assert len({run.tags["cell_key"] for run in runs if run.status == "FINISHED"}) == len(runs) == 8
    (collect,) = [task for task in airflow.tasks(name) if task["task_id"] == "collect"]
    assert collect["try_number"] == 2
    chats = [request for request in scripted_ollama.log.requests[before:] if request.path == "/api/chat"]
    assert len(chats) <= 9  # only the interrupted request is sent again


def _find_task_process(experiment: str) -> int:
    """Return the process id of the task: the parent of `tipbench collect`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if b"collect" in arguments and f"--experiment={experiment}".encode() in arguments:
                    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    raise AssertionError(f"no collect of {experiment} is running")


def test_a_cancelled_run_ends_its_collect_and_frees_the_memory(
    airflow: RealAirflow, mlflow_url: str, scripted_ollama: ScriptedOllama
) -> None:
    name = unique_name("tip-bench-cancelled")
    scripted_ollama.set(call_s=1.0, unload_s=8.0)  # longer than Airflow waits for a task after SIGTERM
    airflow.trigger(name, {**SMALL, "models": f"{ALPHA},{BETA}", "experiment": name, "n_scenarios": 8})
    wait_until(lambda: bool(scripted_ollama.resident), airflow, name)
    with airflow.client() as client:
        answer = client.patch(f"/api/v2/dags/{DAG}/dagRuns/{name}", json={"state": "failed"})
        assert answer.status_code == 200, answer.text
    wait_until(lambda: not scripted_ollama.resident, airflow, name)
    airflow.expect_state(name, "failed")
    assert airflow.task_states(name)["unload"] == "success"
    assert airflow.return_value(name, "unload")["unloaded"] is None  # the collect itself unloaded the model
    assert len(recorded_runs(mlflow_url, name)) < 16
    assert scripted_ollama.resident == ()


def _gate_path(run_id: str) -> str:
    return f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/wait_for_judge/-1/hitlDetails"


def _answer_gate(airflow: RealAirflow, run_id: str) -> int:
    """Answer the judge's gate; returns the status of Airflow's response."""
    with airflow.client() as client:
        answer = {"chosen_options": ["Compare now"], "params_input": {}}
        return client.patch(_gate_path(run_id), json=answer).status_code


def _judge_sheet(sheet: str, experiment: str, mlflow_url: str, home: Path, folder: Path) -> None:
    file = folder / "sheet.json"
    where = ("--experiment", experiment, "--mlflow-url", mlflow_url)
    tipbench("judge", "export", "--sheet", sheet, *where, "--out", str(file), home=home)
    filled = json.loads(file.read_text("utf-8"))
    for item in filled["items"]:
        for tip in item["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"], 3)
    file.write_text(json.dumps(filled), "utf-8")
    arguments = ("judge", "apply", str(file), "--judge", "anna", "--mlflow-url", mlflow_url, "--accept-drift", "a test")
    tipbench(*arguments, home=home)


def test_a_value_out_of_range_is_refused_before_anything_starts(airflow: RealAirflow) -> None:
    body = {"dag_run_id": unique_name("out-of-range"), "logical_date": None, "conf": {"n_tips": 0}}
    with airflow.client() as client:
        assert client.post(f"/api/v2/dags/{DAG}/dagRuns", json=body).status_code == 400
