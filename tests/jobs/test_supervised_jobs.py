"""The whole of it in one process: queue, supervisor, real commands, a scripted Ollama and MLflow."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.job_processes import kill_jobs
from support.scripted_ollama import Fault, ScriptedOllama
from support.scripted_runner import progress_of
from tipbench.jobs.command import collect_request
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import ENDED, Job, JobState
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.progress import Phase
from tipbench.jobs.store import JobStore
from tipbench.jobs.supervisor import Supervisor, queue_positions, retry
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire

pytestmark = pytest.mark.process

CELLS = 4


@dataclass
class Panel:
    """What a panel process holds."""

    home: Path
    store: JobStore
    runner: LocalRunner
    mlflow_url: str
    server: ScriptedOllama

    def submit(self, experiment: str, **changes: Any) -> Job:
        values = {
            "models": "alpha:135m",
            "prompts": "v1",
            "n_scenarios": CELLS,
            "n_tips": 2,
            "num_predict": 64,
            "experiment": f"tip-bench-{experiment}-{uuid4().hex[:8]}",
            "ollama_url": self.server.url,
            "mlflow_url": self.mlflow_url,
            **changes,
        }
        return self.store.add(collect_request(make_config(values))).job

    def until(self, job: Job, wanted: Callable[[Job], bool]) -> Job:
        deadline = time.monotonic() + 120
        while not wanted(now := self.store.get(job.id)):
            assert time.monotonic() < deadline, (now, self.runner.log(job).text)
            time.sleep(0.02)
        return now

    def ended(self, job: Job) -> Job:
        return self.until(job, lambda job: job.state in ENDED)

    def cells(self, job: Job) -> int:
        return sum(isinstance(each.event, wire.CellFinished) for each in self.runner.events(job))

    def hold_call(self, number: int) -> None:
        """Hold this call to the server until the faults are cleared or the client disconnects."""
        self.server.add_faults(Fault("hold", calls=(number,)))

    def pid(self, job: Job) -> int:
        process = JobFolder(self.home / "jobs", job.id).process
        assert process is not None
        return process.pid


@pytest.fixture
def panel(home: Path, mlflow_url: str) -> Iterator[Panel]:
    runner = LocalRunner(home, grace_s=30)
    with (
        ScriptedOllama(["alpha:135m", "beta:135m"]) as server,
        JobStore(home / "jobs" / "jobs.db") as store,
    ):
        with Supervisor(store, {"local": runner}, home / "jobs" / "supervisor.lock", tick_s=0.05):
            yield Panel(home, store, runner, mlflow_url, server)
        kill_jobs(store, home)


def test_two_collects_on_one_server_take_turns_and_never_share_its_memory(panel: Panel) -> None:
    panel.hold_call(1)
    first = panel.submit("turns-1", n_scenarios=2)
    second = panel.submit("turns-2", models="beta:135m", n_scenarios=1)
    third = panel.submit("turns-3", models="alpha:135m,beta:135m", n_scenarios=1)
    panel.until(first, lambda job: job.state is JobState.RUNNING)
    assert queue_positions(panel.store.in_states({JobState.QUEUED})) == {second.id: 1, third.id: 2}
    panel.server.clear_faults()
    done = [panel.ended(job) for job in (first, second, third)]
    assert [job.state for job in done] == [JobState.SUCCEEDED] * 3
    for earlier, later in itertools.pairwise(done):
        assert earlier.ended is not None
        assert later.started is not None
        assert earlier.ended <= later.started
    assert panel.server.log.max_resident == 1
    seen = progress_of(each.event for each in panel.runner.events(third))
    assert [(model.phase, model.done, model.total) for model in seen.models] == [(Phase.EMPTY, 1, 1)] * 2


def test_a_cancelled_job_makes_room_for_the_next(panel: Panel) -> None:
    panel.hold_call(2)
    first, second = panel.submit("room-1"), panel.submit("room-2", models="beta:135m", n_scenarios=1)
    panel.until(first, lambda job: panel.cells(job) == 1)
    panel.store.request_cancel(first.id)
    assert panel.ended(first).state is JobState.CANCELLED
    assert panel.ended(second).state is JobState.SUCCEEDED
    assert panel.server.log.max_resident == 1
    seen = progress_of(each.event for each in panel.runner.events(first))
    assert [model.phase for model in seen.models] == [Phase.STOPPED]
    assert "alpha:135m unloaded" in [message.text for message in seen.messages]


def test_a_killed_job_is_lost_and_its_retry_does_only_what_is_missing(panel: Panel) -> None:
    panel.hold_call(3)
    job = panel.submit("killed")
    panel.until(job, lambda job: job.state is JobState.RUNNING and panel.cells(job) == 2)
    os.killpg(panel.pid(job), signal.SIGKILL)
    lost = panel.until(job, lambda job: job.state is not JobState.RUNNING)
    assert (lost.state, lost.exit_code) == (JobState.LOST, None)
    again = retry(panel.store, job.id).job
    done = panel.ended(again)
    assert (done.state, done.retry_of) == (JobState.SUCCEEDED, job.id)
    summary = progress_of(each.event for each in panel.runner.events(again)).collected
    assert summary is not None
    assert (summary.recorded_before, summary.generated) == (2, CELLS - 2)
    assert panel.store.get(job.id).state is JobState.LOST
    panel.store.request_cancel(job.id)
    assert panel.ended(job).state is JobState.CANCELLED
