"""A real panel, killed and started again: its jobs run on, are found, and none is started twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from support.scripted_ollama import ScriptedOllama
from tipbench.jobs.folder import JobFolder
from web.event_reading import Frame, Reader, reading
from web.panel_process import PanelProcess, done
from web.panels import API

CELLS = 8
FEW = 4
CALL_S, HANGING_S = 0.5, 30.0
EMBEDDED = {"models": "embedded:smollm2:135m", "prompts": "v1", "n_tips": 1, "num_predict": 24, "n_scenarios": FEW}
Panels = Callable[..., PanelProcess]


@pytest.fixture
def panels(home: Path, mlflow_url: str) -> Iterator[Panels]:
    """Starts panels on one home, in front of one MLflow."""
    with ExitStack() as stack:
        yield lambda **environment: stack.enter_context(
            PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, **environment})
        )


@pytest.fixture
def slow() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(["alpha:135m"], call_s=CALL_S) as server:
        yield server


def slowly(experiment: str) -> dict[str, Any]:
    name = f"tip-bench-{experiment}-{uuid4().hex[:8]}"
    return {"models": "alpha:135m", "prompts": "v1", "n_tips": 2, "num_predict": 64, "experiment": name}


def until_broken(reader: Reader) -> list[Frame]:
    """What comes before the server is gone."""
    frames: list[Frame] = []
    with suppress(httpx.TransportError):
        frames += reader.rest()
    return frames


def cells_of(frames: list[Frame]) -> list[int]:
    return [frame.data["done"] for frame in frames if frame.event == "cell_finished"]


def test_a_killed_panel_finds_its_job_again_and_its_events_go_on(
    panels: Panels, home: Path, weights_home: Path
) -> None:
    home.mkdir(exist_ok=True)
    (home / "models").symlink_to(weights_home / "models")
    panel = panels()
    order = {**EMBEDDED, "experiment": f"tip-bench-killed-{time.monotonic_ns()}"}
    job = panel.run("key-1", **order)
    with reading(panel.client, job["id"], "?after=0") as reader:
        before = reader.until("cell_finished")
        panel.kill()
        before += until_broken(reader)
    last = max(frame.id or 0 for frame in before)

    panel.start()
    assert panel.run("key-1", **order)["id"] == job["id"], "the key is remembered"
    with reading(panel.client, job["id"], **{"Last-Event-ID": str(last)}) as reader:
        after = reader.until("end")
    assert after[0].event == "snapshot"
    assert done(after[0].data) == len(cells_of(before))
    assert cells_of(before) + cells_of(after) == list(range(1, FEW + 1))
    assert [frame.event for frame in before + after].count("started") == 1, "it was started once"
    assert after[-1].data["job"]["state"] == "succeeded"
    assert after[-1].data["job"]["links"]["mlflow"].startswith("http")
    assert len(panel.client.get(f"{API}/jobs").json()["items"]) == 1


def test_a_job_whose_process_vanished_while_nobody_looked_is_lost(
    panels: Panels, home: Path, slow: ScriptedOllama
) -> None:
    panel = panels(OLLAMA_HOST=slow.url)
    job = panel.run(**slowly("vanished"))
    panel.until(job["id"], lambda now: done(now) >= 1)
    slow.set(call_s=HANGING_S)
    panel.kill()
    process = JobFolder(home / "jobs", job["id"]).process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    panel.start()
    now = panel.until(job["id"], lambda now: now["job"]["state"] != "running")
    assert (now["job"]["state"], now["job"]["exit_code"]) == ("lost", None)
    assert "a retry continues" in now["job"]["reason"]
    slow.set(call_s=CALL_S)
    again = panel.client.post(f"{API}/jobs/{job['id']}/retry").json()["job"]
    finished = panel.ended(again["id"])
    assert (finished["job"]["state"], finished["job"]["retry_of"]) == ("succeeded", job["id"])
    collected = finished["progress"]["collected"]
    assert collected["recorded_before"] >= 1
    assert collected["recorded_before"] + collected["generated"] == CELLS


def test_two_panels_on_one_home_share_their_jobs_and_one_takes_over(
    panels: Panels, home: Path, mlflow_url: str, slow: ScriptedOllama
) -> None:
    first = panels(OLLAMA_HOST=slow.url)
    second = PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, "OLLAMA_HOST": slow.url})
    with second:
        order = slowly("shared")
        job = second.run("key-1", **order)
        assert first.run("key-1", **order)["id"] == job["id"]
        behind = second.run(**slowly("behind"))
        assert first.job(behind["id"])["place"] in (1, 2)
        with reading(second.client, job["id"]) as reader:
            reader.until("cell_finished")
            first.kill()
            assert reader.until("end")[-1].data["job"]["state"] == "succeeded"
        assert second.ended(behind["id"])["job"]["state"] == "succeeded"
        assert len(slow.log.calls()) == 2 * CELLS, "nothing was generated twice"
        assert slow.log.max_resident == 1


def test_a_job_cancelled_on_the_panel_that_does_not_lead_ends(
    panels: Panels, home: Path, mlflow_url: str, slow: ScriptedOllama
) -> None:
    panels(OLLAMA_HOST=slow.url)
    with PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, "OLLAMA_HOST": slow.url}) as second:
        job = second.run(**slowly("cancel-there"))
        second.until(job["id"], lambda now: done(now) >= 1)
        slow.set(call_s=HANGING_S)
        assert second.client.post(f"{API}/jobs/{job['id']}/cancel").status_code == 200
        assert second.ended(job["id"])["job"]["state"] == "cancelled"
    assert not slow.resident


def test_a_panel_that_is_told_to_stop_does_so_while_somebody_looks_on_and_the_job_runs_on(
    panels: Panels, slow: ScriptedOllama
) -> None:
    panel = panels(OLLAMA_HOST=slow.url)
    job = panel.run(**slowly("stopped"))
    with reading(panel.client, job["id"]) as reader:
        reader.until("cell_finished")
        code, seconds = panel.stop()
        assert code == 0, panel.stderr
        assert seconds < 45
    assert "Traceback" not in panel.stderr
    panel.start()
    finished = panel.ended(job["id"])
    assert finished["job"]["state"] == "succeeded"
    assert len(slow.log.calls()) == CELLS
