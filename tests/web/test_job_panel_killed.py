"""A real panel, killed and restarted: its jobs keep running, are found, and none is started twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from support.scripted_ollama import ScriptedOllama
from tipbench.jobs.folder import JobFolder
from web.event_reader import EventReader, Frame, done_counts, read_events
from web.panel_process import PanelProcess, generated_cells
from web.panels import API

pytestmark = pytest.mark.process

CELLS = 6
CALL_S, HANGING_S = 0.3, 30.0
PanelStarter = Callable[..., PanelProcess]


@pytest.fixture
def start_panel(home: Path, mlflow_url: str) -> Iterator[PanelStarter]:
    """Starts panels on one home, in front of one MLflow."""
    with ExitStack() as stack:
        yield lambda **environment: stack.enter_context(
            PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, **environment})
        )


@pytest.fixture
def slow_ollama() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(["alpha:135m"], call_s=CALL_S) as server:
        yield server


def run_options(experiment: str) -> dict[str, Any]:
    name = f"tip-bench-{experiment}-{uuid4().hex[:8]}"
    small = {"prompts": "v1", "n_tips": 2, "num_predict": 64, "n_scenarios": CELLS}
    return {"models": "alpha:135m", "experiment": name, **small}


def read_until_broken(reader: EventReader) -> list[Frame]:
    """Return the events before the connection breaks."""
    frames: list[Frame] = []
    with suppress(httpx.TransportError):
        frames += reader.read_rest()
    return frames


def test_a_job_and_its_events_continue_when_the_panel_is_killed_or_stopped(
    start_panel: PanelStarter, slow_ollama: ScriptedOllama
) -> None:
    panel = start_panel(OLLAMA_HOST=slow_ollama.url)
    options = run_options("killed")
    job = panel.run("key-1", **options)
    with read_events(panel.client, job["id"], "?after=0") as reader:
        seen = reader.read_until("cell_finished")
        panel.kill()
        seen += read_until_broken(reader)

    panel.start()
    assert panel.run("key-1", **options)["id"] == job["id"], "the key is remembered"
    with read_events(panel.client, job["id"], **{"Last-Event-ID": str(last_id(seen))}) as reader:
        (snapshot, *following) = reader.read_until("cell_finished")
        assert (snapshot.event, generated_cells(snapshot.data)) == ("snapshot", len(done_counts(seen)))
        seen += following
        code, seconds = panel.stop()
        assert (code, seconds < 45) == (0, True), panel.stderr
        seen += read_until_broken(reader)
    assert "Traceback" not in panel.stderr

    panel.start()
    with read_events(panel.client, job["id"], **{"Last-Event-ID": str(last_id(seen))}) as reader:
        seen += reader.read_until("end")
    assert done_counts(seen) == list(range(1, CELLS + 1))
    assert [frame.event for frame in seen].count("started") == 1
    assert seen[-1].data["job"]["state"] == "succeeded"
    assert seen[-1].data["job"]["links"]["mlflow"].startswith("http")
    assert len(panel.client.get(f"{API}/jobs").json()["items"]) == 1
    assert len(slow_ollama.log.calls()) == CELLS


def last_id(frames: list[Frame]) -> int:
    return max(frame.id or 0 for frame in frames)


def test_a_job_whose_process_vanished_without_a_panel_is_lost(
    start_panel: PanelStarter, home: Path, slow_ollama: ScriptedOllama
) -> None:
    panel = start_panel(OLLAMA_HOST=slow_ollama.url)
    job = panel.run(**run_options("vanished"))
    panel.wait_until(job["id"], lambda now: generated_cells(now) >= 1)
    slow_ollama.set(call_s=HANGING_S)
    panel.kill()
    process = JobFolder(home / "jobs", job["id"]).process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)
    panel.start()
    now = panel.wait_until(job["id"], lambda now: now["job"]["state"] != "running")
    assert (now["job"]["state"], now["job"]["exit_code"]) == ("lost", None)
    assert "a retry continues" in now["job"]["reason"]
    slow_ollama.set(call_s=CALL_S)
    again = panel.client.post(f"{API}/jobs/{job['id']}/retry").json()["job"]
    finished = panel.wait_for_end(again["id"])
    assert (finished["job"]["state"], finished["job"]["retry_of"]) == ("succeeded", job["id"])
    collected = finished["progress"]["collected"]
    assert collected["recorded_before"] >= 1
    assert collected["recorded_before"] + collected["generated"] == CELLS


def test_two_panels_on_one_home_share_their_jobs_and_one_takes_over(
    start_panel: PanelStarter, home: Path, mlflow_url: str, slow_ollama: ScriptedOllama
) -> None:
    first = start_panel(OLLAMA_HOST=slow_ollama.url)
    with PanelProcess(home, {"MLFLOW_TRACKING_URI": mlflow_url, "OLLAMA_HOST": slow_ollama.url}) as second:
        cancelled = second.run(**run_options("cancelled"))
        second.wait_until(cancelled["id"], lambda now: generated_cells(now) >= 1)
        slow_ollama.set(call_s=HANGING_S)
        assert second.client.post(f"{API}/jobs/{cancelled['id']}/cancel").status_code == 200
        assert second.wait_for_end(cancelled["id"])["job"]["state"] == "cancelled"
        assert not slow_ollama.resident
        slow_ollama.set(call_s=CALL_S)
        before = len(slow_ollama.log.calls())

        options = run_options("shared")
        job = second.run("key-1", **options)
        assert first.run("key-1", **options)["id"] == job["id"]
        queued = second.run(**run_options("behind"))
        assert first.job(queued["id"])["place"] in (1, 2)
        with read_events(second.client, job["id"]) as reader:
            reader.read_until("cell_finished")
            first.kill()
            assert reader.read_until("end")[-1].data["job"]["state"] == "succeeded"
        assert second.wait_for_end(queued["id"])["job"]["state"] == "succeeded"
        assert len(slow_ollama.log.calls()) - before == 2 * CELLS, "nothing was generated twice"
        assert slow_ollama.log.max_resident == 1
