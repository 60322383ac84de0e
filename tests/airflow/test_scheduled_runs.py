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
from support.real_airflow import DAG, RealAirflow
from support.scripted_ollama import Fault, MemorySettings, ScriptedOllama
from tipbench.compare.keeping import BOARD
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import StoredRun

ALPHA, BETA, LEAVER = "alpha:135m", "beta:135m", "leaver:135m"
SMALL: dict[str, Any] = {"prompts": "v1", "n_tips": 2, "n_scenarios": 4, "num_predict": 64, "server_wait_s": 5}
ENDED = frozenset({"success", "failed"})
PARKED = frozenset({"awaiting_input", "deferred"})


@pytest.fixture(autouse=True)
def healthy(scripted: ScriptedOllama) -> Iterator[None]:
    yield
    scripted.clear_faults()
    scripted.set(call_s=0.0, unload_s=MemorySettings().unload_s)


def cells(mlflow_url: str, experiment: str, kind: str = "cell") -> list[StoredRun]:
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        return [] if found is None else list(store.search(found.experiment_id, where={"kind": kind}))


def until(true: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_refused_a_missing_and_a_healthy_model_in_one_run_and_the_healthy_one_is_judged_and_ranked(
    airflow: RealAirflow, mlflow_url: str, home: Path, tmp_path: Path
) -> None:
    experiment = "tip-bench-three-models"
    models = ["huge:70b", "gone:1b", ALPHA]
    airflow.trigger("three", {**SMALL, "models": models, "experiment": experiment, "wait_for_judge": True})
    airflow.wait_for_task("three", "wait_for_judge", PARKED)
    assert airflow.states("three")[f"collect {ALPHA}"] == "success"
    assert {run.params["model"] for run in cells(mlflow_url, experiment, "refused")} == {"huge:70b", "gone:1b"}
    assert len(cells(mlflow_url, experiment)) == 4
    _judge(airflow.returned("three", "export_for_judge")["sheet"], experiment, mlflow_url, home, tmp_path)
    assert _answer(airflow, "three") == 200
    assert airflow.wait_for("three", ENDED) == "success"
    told = airflow.returned("three", "compare")
    assert (told["judged"], told["pending"], told["failed"], told["provisional"]) == (4, 0, 0, False)
    with MlflowStore(mlflow_url) as store:
        board = json.loads(store.get(told["board_run"])[1][BOARD])
    assert [(row["rank"], row["model"], row["judged"]) for row in board["standings"]] == [(1, ALPHA, 4)]


def test_a_model_that_fails_does_not_block_the_others_and_the_run_says_so(
    airflow: RealAirflow, mlflow_url: str, scripted: ScriptedOllama
) -> None:
    scripted.add_faults(Fault("missing", model=LEAVER, path="/api/show", calls=(2, 3, 4)))  # after the plan
    airflow.trigger("one-fails", {**SMALL, "models": f"{LEAVER},{BETA}", "experiment": "tip-bench-one-fails"})
    assert airflow.wait_for("one-fails", ENDED) == "failed"
    states = airflow.states("one-fails")
    assert (states[f"collect {LEAVER}"], states[f"collect {BETA}"]) == ("failed", "success")
    assert states["compare"] == "success"
    assert len(cells(mlflow_url, "tip-bench-one-fails")) == 4
    assert f"Not collected in full: {LEAVER}" in airflow.logs("one-fails", "outcome")


def test_a_collect_killed_in_mid_model_continues_on_its_next_try(
    airflow: RealAirflow, mlflow_url: str, scripted: ScriptedOllama
) -> None:
    experiment = "tip-bench-killed"
    scripted.set(call_s=1.0)
    before = len(scripted.log.requests)
    airflow.trigger("killed", {**SMALL, "models": ALPHA, "experiment": experiment, "n_scenarios": 8})
    until(lambda: len(cells(mlflow_url, experiment)) >= 2)
    victim = _task_process()
    os.kill(victim, signal.SIGKILL)
    assert airflow.wait_for("killed", ENDED, 400.0) == "success"
    runs = cells(mlflow_url, experiment)
    assert len({run.tags["cell_key"] for run in runs if run.status == "FINISHED"}) == len(runs) == 8
    (collect,) = [task for task in airflow.tasks("killed") if task["task_id"] == "collect"]
    assert collect["try_number"] == 2
    chats = [request for request in scripted.log.requests[before:] if request.path == "/api/chat"]
    assert len(chats) <= 9  # the one that was under way is asked again, and nothing else


def _task_process() -> int:
    """The task that runs our command: the parent of `tipbench collect`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"collect" in words and b"--experiment=tip-bench-killed" in words:
                    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    raise AssertionError("no collect is running")


def test_a_cancelled_run_ends_its_collect_and_frees_the_memory(
    airflow: RealAirflow, mlflow_url: str, scripted: ScriptedOllama
) -> None:
    experiment = "tip-bench-cancelled"
    scripted.set(call_s=1.0, unload_s=8.0)  # longer than Airflow waits for a task that it has told to end
    airflow.trigger("cancelled", {**SMALL, "models": f"{ALPHA},{BETA}", "experiment": experiment, "n_scenarios": 8})
    until(lambda: bool(scripted.resident))
    with airflow.client() as client:
        answer = client.patch(f"/api/v2/dags/{DAG}/dagRuns/cancelled", json={"state": "failed"})
        assert answer.status_code == 200
    until(lambda: not scripted.resident)
    assert airflow.wait_for("cancelled", ENDED) == "failed"
    assert airflow.states("cancelled")["unload"] == "success"
    assert airflow.returned("cancelled", "unload")["unloaded"] is None  # the collect itself has seen it leave
    assert len(cells(mlflow_url, experiment)) < 16
    assert scripted.resident == ()


def test_the_gate_waits_without_a_slot_until_it_is_answered_once(
    airflow: RealAirflow, mlflow_url: str, home: Path, tmp_path: Path
) -> None:
    experiment = "tip-bench-gate"
    airflow.trigger("gate", {**SMALL, "models": ALPHA, "experiment": experiment, "wait_for_judge": True})
    airflow.wait_for_task("gate", "wait_for_judge", PARKED)
    sheet = airflow.returned("gate", "export_for_judge")["sheet"]
    _judge(sheet, experiment, mlflow_url, home, tmp_path)
    with airflow.client() as client:
        assert "4 answers of tip-bench-gate wait" in client.get(_gate("gate")).json()["subject"]
    assert [_answer(airflow, "gate") for _ in range(2)] == [200, 409]
    assert airflow.wait_for("gate", ENDED) == "success"
    told = airflow.returned("gate", "compare")
    assert (told["pending"], told["judged"], told["provisional"]) == (0, 4, False)


def _gate(run_id: str) -> str:
    return f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/wait_for_judge/-1/hitlDetails"


def _answer(airflow: RealAirflow, run_id: str) -> int:
    """Say that the judge is done; the status of Airflow's answer."""
    with airflow.client() as client:
        answer = {"chosen_options": ["Compare now"], "params_input": {}}
        return client.patch(_gate(run_id), json=answer).status_code


def _judge(sheet: str, experiment: str, mlflow_url: str, home: Path, folder: Path) -> None:
    file = folder / "sheet.json"
    where = ("--experiment", experiment, "--mlflow-url", mlflow_url)
    tipbench("judge", "export", "--sheet", sheet, *where, "--out", str(file), home=home)
    filled = json.loads(file.read_text("utf-8"))
    for item in filled["items"]:
        for tip in item["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"], 3)
    file.write_text(json.dumps(filled), "utf-8")
    words = ("judge", "apply", str(file), "--judge", "anna", "--mlflow-url", mlflow_url, "--accept-drift", "a test")
    tipbench(*words, home=home)


def test_a_value_out_of_range_is_refused_before_anything_starts(airflow: RealAirflow) -> None:
    body = {"dag_run_id": "bad", "logical_date": None, "conf": {"n_tips": 0}}
    with airflow.client() as client:
        assert client.post(f"/api/v2/dags/{DAG}/dagRuns", json=body).status_code == 400


def test_a_key_that_no_run_knows_is_taken_by_airflow_and_refused_by_name_in_the_plan(airflow: RealAirflow) -> None:
    airflow.trigger("unknown", {"models": ALPHA, "n_tipps": 3})
    assert airflow.wait_for("unknown", ENDED) == "failed"
    (plan,) = [task for task in airflow.tasks("unknown") if task["task_id"] == "plan"]
    assert (plan["state"], plan["try_number"]) == ("failed", 1)
    assert "conf has a key that no run knows: n_tipps" in airflow.logs("unknown", "plan")
