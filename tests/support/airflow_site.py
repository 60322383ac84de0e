"""The Airflow runner on a scripted Airflow, whose collects succeed or fail as a test sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.polling import eventually
from support.scripted_airflow import PASSWORD, USER, ScriptedAirflow
from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.airflow_api import AirflowAccess, AirflowApi
from tipbench.jobs.command import collect_request
from tipbench.jobs.job import ENDED, Job, JobState, JobStatus
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire
from tipbench.record.events import event_line

MLFLOW = "http://mlflow.example:5000"
MODELS = "alpha:1b,beta:1b"


@dataclass
class PendingCells:
    """The number of pending cells, or the error of counting them, set by a test."""

    n_pending: int = 0
    error: TipbenchError | None = None
    url: str | None = MLFLOW

    def address(self, job: Job) -> str:  # noqa: ARG002
        if self.url is None:
            raise NotEnoughData("Nothing is recorded yet.")
        return self.url

    def pending(self, job: Job) -> int:  # noqa: ARG002
        if self.error is not None:
            raise self.error
        return self.n_pending


def emit(log: list[str], *events: wire.Event) -> None:
    log += [event_line(event, time.time()).decode().rstrip() for event in events]


def successful_collect(model: str, log: list[str]) -> int:
    """Write the events of a successful collect of two cells."""
    emit(log, wire.Started("1"), wire.BlockStarted(model, 2))
    log.append(f"collecting {model}")
    for number in (1, 2):
        emit(log, wire.CellFinished(model, "v1", f"s{number}", number, 2, output_tokens=5))
    emit(log, wire.BlockFinished(model), wire.Evidence(10, 1, 0.5, 1))
    emit(log, wire.Collected("tip-bench-x", 2, 0, 2, 0, url=f"{MLFLOW}/#/experiments/1"))
    emit(log, wire.Exit(0))
    return 0


@dataclass
class AirflowSite:
    """A scripted Airflow and its runner. Collects of the `failing` models fail with a reason."""

    airflow: ScriptedAirflow
    store: JobStore
    home: Path
    rest: AirflowApi
    cells: PendingCells = field(default_factory=PendingCells)
    failing: set[str] = field(default_factory=set)

    @property
    def runner(self) -> AirflowRunner:
        return AirflowRunner(self.home, self.rest, self.cells, poll_s=0, check_s=0, settle_s=1)

    def collecting(self, model: str, log: list[str]) -> int:
        if model in self.failing:
            emit(log, wire.Started("1"), wire.Failure(f"{model} is too large."), wire.Exit(2))
            return 2
        return successful_collect(model, log)

    def job(self, **changes: Any) -> Job:
        wait = changes.pop("wait_for_judge", False)
        config = make_config({"models": MODELS, "experiment": "tip-bench-x", **changes})
        request = collect_request(config, runner="airflow")
        if wait:
            request = replace(request, arguments={**request.arguments, "wait_for_judge": True})
        return self.store.add(request)[0]

    def wait_until(self, job: Job, wanted: Callable[[JobStatus], bool]) -> JobStatus:
        deadline = time.monotonic() + 120
        while not wanted(status := self.runner.observe(job)):
            assert time.monotonic() < deadline, f"{status}\n{self.runner.log(job).text}"
            time.sleep(0.02)
        return status

    def wait_for_end(self, job: Job) -> JobStatus:
        return self.wait_until(job, lambda status: status.state in ENDED)

    def events(self, job: Job) -> list[wire.Event]:
        return [each.event for each in self.runner.events(job, limit=10_000)]


@contextmanager
def airflow_site(home: Path) -> Iterator[AirflowSite]:
    """A new site."""
    with JobStore(home / "jobs" / "jobs.db") as store, ScriptedAirflow(home) as airflow:
        access = AirflowAccess(airflow.url, USER, PASSWORD)
        with closing(AirflowApi(access, backoff_s=0)) as rest:
            site = AirflowSite(airflow, store, home, rest)
            airflow.collecting = site.collecting
            yield site


def wait_for_state(site: AirflowSite, job: Job, state: JobState) -> None:
    assert eventually(lambda: site.store.get(job.id).state is state, 120), site.store.get(job.id)
