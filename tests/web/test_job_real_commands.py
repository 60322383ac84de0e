"""Jobs started over HTTP and executed: real commands, a real MLflow, a real or a scripted Ollama."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from support.scripted_ollama import ScriptedOllama
from web.panel_process import generated_cells, has_ended, kill_jobs, wait_for_job
from web.panels import API, ServedPanel, serve_panel

SMALL = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 2, "n_tips": 2, "num_predict": 64}
PASSWORD = "hunter2-7c1f"
JOBS = f"{API}/jobs"

pytestmark = pytest.mark.process


@contextmanager
def panel_with_jobs(home: Path, mlflow_url: str, **environment: str) -> Iterator[ServedPanel]:
    """A panel that runs its jobs; none outlives the test."""
    given = {"MLFLOW_TRACKING_URI": mlflow_url, **environment}
    try:
        with serve_panel(home, environment=given, find_mlflow=True, run_jobs=True) as served:
            yield served
    finally:
        kill_jobs(home)


def new_experiment(name: str) -> str:
    """Return a new experiment name."""
    return f"tip-bench-http-{name}-{uuid4().hex[:8]}"


def start_run(served: ServedPanel, experiment: str, **changes: Any) -> str:
    response = served.post(f"{API}/run", json={**SMALL, "experiment": experiment, **changes})
    assert response.status_code == 202, response.text
    return str(response.json()["job"]["id"])


def test_a_run_is_collected_judged_logged_and_deleted_after_its_time(
    home: Path, mlflow_url: str, tmp_path: Path
) -> None:
    script = tmp_path / "judge.py"
    script.write_text(
        "import json, sys\n"
        "sheet = json.load(sys.stdin)\n"
        "for item in sheet['items']:\n"
        "    for tip in item['tips']:\n"
        "        tip['scores'] = dict.fromkeys(tip['scores'], 3)\n"
        "json.dump(sheet, sys.stdout)\n"
    )
    name, url = new_experiment("run"), mlflow_url.replace("://", f"://anna:{PASSWORD}@")
    with panel_with_jobs(home, url, TIPBENCH_JUDGE_COMMAND=f"{sys.executable} {script}") as served:
        job_id = start_run(served, name)
        now = wait_for_job(served.get, job_id, has_ended)
        assert (now["job"]["state"], now["job"]["exit_code"], now["job"]["reason"]) == ("succeeded", 0, None)
        assert now["progress"]["collected"]["generated"] == 2
        assert now["job"]["links"]["mlflow"].startswith(mlflow_url)
        assert served.get(f"{API}/runs/{name}").json()["total"] == 2
        check_log(served, job_id, name)

        job = served.post(f"{API}/judge/{name}/run", json={"with": "rules"}).json()["job"]
        judged = wait_for_job(served.get, job["id"], has_ended)
        assert judged["job"]["state"] == "succeeded", judged
        assert (judged["progress"]["judged"]["judge"], judged["progress"]["judged"]["provisional"]) == ("rules", True)
        board = served.get(f"{API}/leaderboard/{name}").json()
        assert (board["provisional"], board["references"][0]["judged"]) == (True, 2)

        body = {"with": "command", "judge": "threes", "accept_drift": "it is a test"}
        job = served.post(f"{API}/judge/{name}/run", json=body).json()["job"]
        judged = wait_for_job(served.get, job["id"], has_ended)
        assert judged["job"]["state"] == "succeeded", judged
        assert served.get(f"{API}/leaderboard/{name}").json()["judges"] == ["threes"]

        paths = (JOBS, f"{JOBS}/{job_id}", f"{JOBS}/{job_id}/log", f"{JOBS}/{job_id}/events?after=0")
        texts = [served.get(path).text for path in paths]
        assert all(texts)
        assert not any(PASSWORD in text or "anna" in text for text in texts)
        assert (home / "jobs" / job_id / "log.txt").exists()
    with panel_with_jobs(home, url, TIPBENCH_JOBS_KEEP_DAYS="0.0000000001") as served:
        deadline = time.monotonic() + 90
        while served.get(f"{JOBS}/{job_id}").status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not (home / "jobs" / job_id).exists()


def test_a_simulation_job_is_recorded_in_mlflow_and_shown_with_its_curves(home: Path, real_mlflow_url: str) -> None:
    options = {"policies": "egreedy/v1,egreedy/v3", "world": "lossy", "users": 60, "rounds": 20, "seeds": 2}
    with panel_with_jobs(home, real_mlflow_url) as served:
        job_id = served.post(f"{API}/simulations", json=options).json()["job"]["id"]
        now = wait_for_job(served.get, job_id, has_ended)
        assert now["job"]["state"] == "succeeded", now
        assert (now["progress"]["simulating"]["done"], now["progress"]["simulating"]["total"]) == (2, 2)
        recorded = served.get(f"{API}/simulations").json()["items"][0]
        assert {name: recorded["config"][name] for name in options} == options
        for place in (f"/jobs/{job_id}", f"/simulations/{recorded['run_id']}"):
            assert served.get(f"{place}/curves.svg").headers["content-type"].startswith("image/svg+xml")
        assert "tip-sim" not in {each["experiment"] for each in served.get(f"{API}/experiments").json()["items"]}


def check_log(served: ServedPanel, job_id: str, experiment: str) -> None:
    """Check that the log is plain text, and no longer than requested."""
    whole = served.get(f"{JOBS}/{job_id}/log")
    tail = served.get(f"{JOBS}/{job_id}/log?bytes=150")
    assert experiment in whole.text
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert (whole.headers["x-log-cut"], tail.headers["x-log-cut"]) == ("false", "true")
    assert int(whole.headers["x-log-size"]) == len(whole.content)
    assert len(tail.content) <= 150
    assert whole.text.endswith(tail.text)
    wrong = [served.get(f"{JOBS}/{job_id}/log?bytes={number}").status_code for number in ("0", "x", "2000000")]
    assert wrong == [422, 422, 422]


def test_a_cancel_unloads_the_model_and_keeps_what_is_finished(home: Path, mlflow_url: str) -> None:
    with (
        ScriptedOllama(["alpha:135m"], call_s=0.4) as server,
        panel_with_jobs(home, mlflow_url, OLLAMA_HOST=server.url) as served,
    ):
        job_id = start_run(served, new_experiment("cancel"), models="alpha:135m", n_scenarios=8)
        wait_for_job(served.get, job_id, lambda now: generated_cells(now) >= 1)
        server.set(call_s=30)
        assert "alpha:135m" in server.resident
        cancelled = served.post(f"{JOBS}/{job_id}/cancel").json()["job"]
        assert (cancelled["state"], cancelled["cancel_requested"]) == ("running", True)
        now = wait_for_job(served.get, job_id, has_ended)
        assert (now["job"]["state"], now["job"]["exit_code"]) == ("cancelled", 130)
        assert httpx.get(f"{server.url}/api/ps", trust_env=False).json()["models"] == []
        server.set(call_s=0)
        again = served.post(f"{JOBS}/{job_id}/retry").json()["job"]
        finished = wait_for_job(served.get, again["id"], has_ended)
    assert (finished["job"]["state"], finished["job"]["retry_of"]) == ("succeeded", job_id)
    assert finished["progress"]["collected"]["recorded_before"] >= 1


def test_two_runs_on_one_server_run_in_turn_and_show_it(home: Path, mlflow_url: str) -> None:
    with (
        ScriptedOllama(["alpha:135m"], call_s=0.2) as server,
        panel_with_jobs(home, mlflow_url, OLLAMA_HOST=server.url) as served,
    ):
        jobs = [
            start_run(served, new_experiment(f"turn-{turn}"), models="alpha:135m", n_scenarios=3) for turn in (1, 2)
        ]
        wait_for_job(served.get, jobs[0], lambda now: now["job"]["state"] == "running")
        listed = {item["id"]: item["place"] for item in served.get(JOBS).json()["items"]}
        assert [listed[job_id] for job_id in jobs] == [None, 1]
        assert [wait_for_job(served.get, job_id, has_ended)["job"]["state"] for job_id in jobs] == ["succeeded"] * 2
        assert server.log.max_resident == 1


def test_a_failed_run_has_a_reason(home: Path, mlflow_url: str) -> None:
    with (
        ScriptedOllama(["alpha:135m"]) as server,
        panel_with_jobs(home, mlflow_url, OLLAMA_HOST=server.url) as served,
    ):
        job_id = start_run(served, new_experiment("refused"), models="nosuch:1b")
        now = wait_for_job(served.get, job_id, has_ended)
    assert (now["job"]["state"], now["job"]["exit_code"]) == ("failed", 2)
    assert "nosuch:1b is not on the Ollama server" in now["job"]["reason"]
    assert now["progress"]["failure"] == now["job"]["reason"]
