"""Queue, supervisor and real commands together, on a scripted Ollama and MLflow."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.job_processes import kill_jobs, wait_for_job
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
class SupervisedJobs:
    """The jobs of one home, with a supervisor that runs in the test's process."""

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

    def wait_until(self, job: Job, is_reached: Callable[[Job], bool]) -> Job:
        return wait_for_job(self.store, job, is_reached)

    def wait_for_end(self, job: Job) -> Job:
        return self.wait_until(job, lambda job: job.state in ENDED)

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
def jobs(home: Path, mlflow_url: str) -> Iterator[SupervisedJobs]:
    runner = LocalRunner(home, grace_s=30)
    with (
        ScriptedOllama(["alpha:135m", "beta:135m"]) as server,
        JobStore(home / "jobs" / "jobs.db") as store,
    ):
        with Supervisor(store, {"local": runner}, home / "jobs" / "supervisor.lock", tick_s=0.05):
            yield SupervisedJobs(home, store, runner, mlflow_url, server)
        kill_jobs(store, home)


def test_two_collects_on_one_server_take_turns_and_never_share_its_memory(jobs: SupervisedJobs) -> None:
    jobs.hold_call(1)
    first = jobs.submit("turns-1", n_scenarios=2)
    second = jobs.submit("turns-2", models="beta:135m", n_scenarios=1)
    third = jobs.submit("turns-3", models="alpha:135m,beta:135m", n_scenarios=1)
    jobs.wait_until(first, lambda job: job.state is JobState.RUNNING)
    assert queue_positions(jobs.store.in_states({JobState.QUEUED})) == {second.id: 1, third.id: 2}
    jobs.server.clear_faults()
    done = [jobs.wait_for_end(job) for job in (first, second, third)]
    assert [job.state for job in done] == [JobState.SUCCEEDED] * 3
    for earlier, later in itertools.pairwise(done):
        assert earlier.ended is not None
        assert later.started is not None
        assert earlier.ended <= later.started
    assert jobs.server.log.max_resident == 1
    progress = progress_of(each.event for each in jobs.runner.events(third))
    assert [(model.phase, model.done, model.total) for model in progress.models] == [(Phase.EMPTY, 1, 1)] * 2


def test_a_cancelled_job_makes_room_for_the_next(jobs: SupervisedJobs) -> None:
    jobs.hold_call(2)
    first, second = jobs.submit("room-1"), jobs.submit("room-2", models="beta:135m", n_scenarios=1)
    jobs.wait_until(first, lambda job: jobs.cells(job) == 1)
    jobs.store.request_cancel(first.id)
    assert jobs.wait_for_end(first).state is JobState.CANCELLED
    assert jobs.wait_for_end(second).state is JobState.SUCCEEDED
    assert jobs.server.log.max_resident == 1
    progress = progress_of(each.event for each in jobs.runner.events(first))
    assert [model.phase for model in progress.models] == [Phase.STOPPED]
    assert "alpha:135m unloaded" in [message.text for message in progress.messages]


def test_a_killed_job_is_lost_and_its_retry_does_only_what_is_missing(jobs: SupervisedJobs) -> None:
    jobs.hold_call(3)
    job = jobs.submit("killed")
    jobs.wait_until(job, lambda job: job.state is JobState.RUNNING and jobs.cells(job) == 2)
    os.killpg(jobs.pid(job), signal.SIGKILL)
    lost = jobs.wait_until(job, lambda job: job.state is not JobState.RUNNING)
    assert (lost.state, lost.exit_code) == (JobState.LOST, None)
    again = retry(jobs.store, job.id).job
    done = jobs.wait_for_end(again)
    assert (done.state, done.retry_of) == (JobState.SUCCEEDED, job.id)
    summary = progress_of(each.event for each in jobs.runner.events(again)).collected
    assert summary is not None
    assert (summary.recorded_before, summary.generated) == (2, CELLS - 2)
    assert jobs.store.get(job.id).state is JobState.LOST
    jobs.store.request_cancel(job.id)
    assert jobs.wait_for_end(job).state is JobState.CANCELLED
