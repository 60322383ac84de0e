"""kill -9 of the process that supervises: jobs continue, are found again, and none is started twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.job_processes import kill_jobs, wait_for_job
from support.scripted_ollama import Fault, ScriptedOllama
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import ENDED, Job, JobState
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire

pytestmark = pytest.mark.process

CELLS = 6


class SupervisorProcesses:
    """The supervisor processes of one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("supervisor_process.py")
        command = [sys.executable, str(script), str(self.home)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self._processes.append(process)
        return process

    def start_and_lead(self) -> subprocess.Popen[bytes]:
        process = self.start()
        assert process.stdout is not None
        assert process.stdout.readline() == b"leads\n"
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the supervisor and its session, but not its jobs."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        for process in self._processes:
            self.kill(process)


@pytest.fixture
def supervisors(home: Path) -> Iterator[SupervisorProcesses]:
    opened = SupervisorProcesses(home)
    yield opened
    opened.close()


@pytest.fixture
def store(home: Path) -> Iterator[JobStore]:
    with JobStore(home / "jobs" / "jobs.db") as opened:
        yield opened
        kill_jobs(opened, home)


def submit(store: JobStore, experiment: str, mlflow_url: str, **changes: Any) -> Job:
    values = {
        "models": "baseline:template",
        "prompts": "v1",
        "n_scenarios": CELLS,
        "n_tips": 2,
        "num_predict": 64,
        "experiment": f"tip-bench-{experiment}-{uuid4().hex[:8]}",
        "mlflow_url": mlflow_url,
        **changes,
    }
    return store.add(collect_request(make_config(values))).job


def read_job_events(home: Path, job: Job, kind: type[Any]) -> list[Any]:
    return [each.event for each in LocalRunner(home).events(job, limit=10_000) if isinstance(each.event, kind)]


def test_a_job_outlives_its_panel_and_the_next_one_finds_it(
    supervisors: SupervisorProcesses, store: JobStore, home: Path, mlflow_url: str
) -> None:
    with ScriptedOllama(script=[Fault("hold", calls=(3,))]) as server:
        job = submit(store, "outlives", mlflow_url, models="alpha:135m", ollama_url=server.url)
        leader = supervisors.start_and_lead()
        wait_for_job(store, job, lambda job: job.state is JobState.RUNNING and len(server.log.calls()) == 3)
        supervisors.kill(leader)
        assert store.get(job.id).state is JobState.RUNNING
        server.clear_faults()
        wait_for_job(
            store, job, lambda _: bool(read_job_events(home, job, wire.Exit))
        )  # it continues without a supervisor
        supervisors.start_and_lead()
        done = wait_for_job(store, job, lambda job: job.state in ENDED)
        assert (done.state, done.exit_code) == (JobState.SUCCEEDED, 0)
        assert len(server.log.calls()) == CELLS
    assert len(read_job_events(home, job, wire.Started)) == 1
    assert [cell.done for cell in read_job_events(home, job, wire.CellFinished)] == list(range(1, CELLS + 1))
    assert done.links["mlflow"].startswith(mlflow_url)


def test_panels_killed_at_seeded_moments_start_every_job_once(
    supervisors: SupervisorProcesses, store: JobStore, home: Path, mlflow_url: str
) -> None:
    rng = random.Random(7)
    jobs = [submit(store, f"random-{number}", mlflow_url, n_scenarios=1) for number in range(3)]
    for _ in range(4):
        leader = supervisors.start_and_lead()
        time.sleep(rng.uniform(0.0, 0.35))
        supervisors.kill(leader)
    deadline = time.monotonic() + 120
    while any(read_job_events(home, job, wire.Started) and not read_job_events(home, job, wire.Exit) for job in jobs):
        assert time.monotonic() < deadline  # the next supervisor finds jobs that ended without one
        time.sleep(0.05)
    supervisors.start_and_lead()
    for job in jobs:
        done = wait_for_job(store, job, lambda job: job.state in ENDED or job.state is JobState.LOST)
        assert done.state is JobState.SUCCEEDED, done.reason
        assert len(read_job_events(home, job, wire.Started)) == 1
        assert sum(cell.failure is None for cell in read_job_events(home, job, wire.CellFinished)) == 1


def test_two_panels_at_once_start_every_job_once_and_one_takes_over(
    supervisors: SupervisorProcesses, store: JobStore, home: Path, mlflow_url: str
) -> None:
    first, _second = supervisors.start_and_lead(), supervisors.start()
    jobs = [submit(store, f"two-{number}", mlflow_url) for number in range(2)]
    wait_for_job(store, jobs[0], lambda job: job.state is not JobState.QUEUED)
    supervisors.kill(first)
    jobs.append(submit(store, "two-later", mlflow_url))
    for job in jobs:
        assert wait_for_job(store, job, lambda job: job.state in ENDED).state is JobState.SUCCEEDED
        assert len(read_job_events(home, job, wire.Started)) == 1


def test_a_cancel_given_while_no_panel_runs_is_carried_out_by_the_next(
    supervisors: SupervisorProcesses, store: JobStore, home: Path, mlflow_url: str
) -> None:
    with ScriptedOllama(script=[Fault("hold", calls=(2,))]) as server:
        job = submit(store, "cancel-later", mlflow_url, models="alpha:135m", ollama_url=server.url)
        leader = supervisors.start_and_lead()
        wait_for_job(store, job, lambda job: job.state is JobState.RUNNING and len(server.log.calls()) == 2)
        supervisors.kill(leader)
        assert store.request_cancel(job.id).state is JobState.RUNNING
        supervisors.start_and_lead()
        done = wait_for_job(store, job, lambda job: job.state in ENDED)
        assert (done.state, done.exit_code) == (JobState.CANCELLED, 130)
        assert not server.resident
