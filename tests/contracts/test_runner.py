"""The Runner port: one suite for every runner, with real commands on real and scripted servers."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.job_processes import kill_jobs
from support.real_airflow import DAG, RealAirflow
from support.scripted_airflow import PASSWORD as AIRFLOW_PASSWORD
from support.scripted_airflow import USER, ScriptedAirflow
from support.scripted_ollama import Fault, ScriptedOllama
from support.threads import in_threads
from tipbench.errors import JobStartError, ServerUnavailable, TipbenchError
from tipbench.jobs.airflow import AirflowRunner, run_id_of
from tipbench.jobs.airflow_api import AirflowAccess, AirflowApi
from tipbench.jobs.command import collect_request, judge_request
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import ENDED, Job, JobState, JobStatus, RecordedEvent, Runner
from tipbench.jobs.local import LocalRunner
from tipbench.jobs.store import JobStore
from tipbench.plan.collect_config import make_config
from tipbench.record import events as wire
from tipbench.record.mlflow import MlflowStore
from tipbench.web.api.models import JobShape

SMALL = {"prompts": "v1", "n_scenarios": 2, "n_tips": 2, "num_predict": 64, "server_wait_s": 5}
PASSWORD = "hunter2-0b5c"
POLL_S = 0.1
WAIT_S = 600.0  # a real Airflow on a busy machine takes minutes

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]  # longer than WAIT_S, which has a better message


@dataclass
class RunnerBench:
    """The local runner with the store of its jobs; it can make a job unreachable, or kill it."""

    make_runner: Callable[[], Runner]
    store: JobStore
    mlflow_url: str
    home: Path
    name: str = "local"
    runs_judge_jobs: bool = True

    @property
    def runner(self) -> Runner:
        """A new runner at each access, as after a restart of the panel: runners keep no state in memory."""
        return self.make_runner()

    def collect(self, **changes: Any) -> Job:
        """Add a collect job to the store; it is not started."""
        values = {**SMALL, "models": "baseline:template", "mlflow_url": self.mlflow_url, **changes}
        values.setdefault("experiment", f"tip-bench-{uuid.uuid4().hex[:12]}")
        return self.store.add(collect_request(make_config(values), runner=self.name))[0]

    def observe(self, job: Job) -> JobStatus:
        """Return the status as the supervisor does: an unreachable job is lost."""
        try:
            return self.runner.observe(job)
        except ServerUnavailable as exc:
            return JobStatus(JobState.LOST, reason=str(exc))

    def wait_until(self, job: Job, wanted: Callable[[JobStatus], bool]) -> JobStatus:
        """Poll until the status meets the condition."""
        deadline = time.monotonic() + WAIT_S
        while not wanted(status := self.observe(job)):
            assert time.monotonic() < deadline, f"{status}\n{self.runner.log(job).text}"
            time.sleep(0.05)
        return status

    def describe(self, job: Job) -> str:
        """The job's status and output, for the message of a failed wait."""
        return f"{self.observe(job)}\n{self.runner.log(job).text}"

    def run(self, job: Job) -> JobStatus:
        """Start the job and wait until it has ended."""
        self.runner.start(job)
        return self.wait_until(job, lambda status: status.state in ENDED)

    def events(self, job: Job) -> list[wire.Event]:
        return [each.event for each in self.runner.events(job, limit=10_000)]

    def request_cancel(self, job: Job) -> Job:
        """Request the cancellation of a job and return it as stored."""
        self.store.claim(job.id)
        return self.store.request_cancel(job.id)

    def make_unreachable(self, job: Job) -> Callable[[], object]:
        """Make a running job unreachable; the returned function ends that."""
        known = self.home / "jobs" / job.id / "process.json"
        hidden = known.rename(known.with_name("aside"))
        return lambda: hidden.rename(known)

    def kill(self, job: Job) -> None:
        """End the job as a crash does."""
        process = JobFolder(self.home / "jobs", job.id).process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all jobs."""
        kill_jobs(self.store, self.home)


@dataclass
class ScriptedAirflowBench(RunnerBench):
    """The Airflow runner on the scripted Airflow."""

    airflow: ScriptedAirflow = field(kw_only=True)

    def make_unreachable(self, job: Job) -> Callable[[], object]:  # noqa: ARG002 - all of them are
        """Airflow is unavailable."""
        self.airflow.fault = "away"
        time.sleep(2 * POLL_S)
        return lambda: setattr(self.airflow, "fault", "")

    def kill(self, job: Job) -> None:
        """The run is deleted in Airflow."""
        self.airflow.runs.pop(run_id_of(job)).cancel()

    def close(self) -> None:
        """The scripted Airflow ends its runs itself."""


@dataclass
class AirflowBench(RunnerBench):
    """The Airflow runner on a real Airflow with tipbench's DAG."""

    api: AirflowApi = field(kw_only=True)
    airflow: RealAirflow = field(kw_only=True)

    def make_unreachable(self, job: Job) -> Callable[[], object]:  # noqa: ARG002 - all of them are
        """The runner uses an address without a server."""
        url, self.api.url = self.api.url, "http://127.0.0.1:9"
        time.sleep(2 * POLL_S)
        return lambda: setattr(self.api, "url", url)

    def kill(self, job: Job) -> None:
        """The run is deleted in Airflow."""
        self.api.patch(f"dags/{DAG}/dagRuns/{run_id_of(job)}", {"state": "failed"})
        self.airflow.wait_for(run_id_of(job), frozenset({"success", "failed"}))  # until then it cannot be deleted
        with self.airflow.client() as client:
            client.delete(f"/api/v2/dags/{DAG}/dagRuns/{run_id_of(job)}").raise_for_status()

    def close(self) -> None:
        """End all runs of this test in the shared Airflow."""
        for job in self.store.page(limit=200).items:
            with suppress(TipbenchError):
                self.api.patch(f"dags/{DAG}/dagRuns/{run_id_of(job)}", {"state": "failed"})


@dataclass(frozen=True)
class JobMlflow:
    """The MLflow that the job names, with one pending cell."""

    def address(self, job: Job) -> str:
        return str(job.arguments["mlflow_url"])

    def pending(self, job: Job) -> int:  # noqa: ARG002
        return 1


@pytest.fixture(scope="session")
def mlflow_url(airflow_mlflow_url: str) -> str:
    """The MLflow of the shared Airflow's worker."""
    return airflow_mlflow_url


@pytest.fixture(params=["local", "scripted airflow"])
def bench(request: pytest.FixtureRequest, home: Path, mlflow_url: str) -> Iterator[RunnerBench]:
    yield from _open_bench(request, home, mlflow_url)


REAL_AIRFLOW = pytest.param("airflow", marks=[pytest.mark.real, pytest.mark.xdist_group("airflow")])


@pytest.fixture(params=["local", "scripted airflow", REAL_AIRFLOW])
def any_bench(request: pytest.FixtureRequest, home: Path, mlflow_url: str) -> Iterator[RunnerBench]:
    """`bench`, also with the real Airflow, which takes seconds per task: for few tests."""
    yield from _open_bench(request, home, mlflow_url)


def _open_bench(request: pytest.FixtureRequest, home: Path, mlflow_url: str) -> Iterator[RunnerBench]:
    with JobStore(home / "jobs" / "jobs.db") as store, ExitStack() as stack:
        bench = _make_bench(str(request.param), request, store, stack, home, mlflow_url)
        yield bench
        bench.close()


def _make_bench(
    kind: str, request: pytest.FixtureRequest, store: JobStore, stack: ExitStack, home: Path, mlflow_url: str
) -> RunnerBench:
    if kind == "local":
        return RunnerBench(lambda: LocalRunner(home, grace_s=30), store, mlflow_url, home)
    if kind == "scripted airflow":
        scripted = stack.enter_context(ScriptedAirflow(home))
        access = AirflowAccess(scripted.url, USER, AIRFLOW_PASSWORD)
    else:
        real: RealAirflow = request.getfixturevalue("airflow")
        access = AirflowAccess(real.url, "bench", real.password)
        allowed = Path(request.getfixturevalue("worker_home")) / "tipbench.toml"  # the worker's own settings
        allowed.write_text(f'panel_urls = ["{request.getfixturevalue("slow_ollama").url}"]\n', "utf-8")
        allowed.chmod(0o600)
        stack.callback(allowed.unlink)
    api = stack.enter_context(closing(AirflowApi(access, timeout_s=60, backoff_s=0)))
    options: dict[str, Any] = {"name": "airflow", "runs_judge_jobs": False}
    runner = lambda: AirflowRunner(home, api, JobMlflow(), poll_s=POLL_S, check_s=1, settle_s=5)  # noqa: E731
    if kind == "scripted airflow":
        return ScriptedAirflowBench(runner, store, mlflow_url, home, **options, airflow=scripted)
    return AirflowBench(runner, store, mlflow_url, home, **options, api=api, airflow=real)


@pytest.fixture
def slow_ollama() -> Iterator[ScriptedOllama]:
    with ScriptedOllama(["alpha:135m", "beta:135m"], call_s=0.3) as server:
        yield server


CELLS = 4


def add_slow_job(bench: RunnerBench, server: ScriptedOllama, **changes: Any) -> Job:
    return bench.collect(models="alpha:135m", ollama_url=server.url, n_scenarios=CELLS, **changes)


def start_held_job(bench: RunnerBench, server: ScriptedOllama) -> Job:
    """Start a job and wait until it has finished one cell; its next call is held until the faults are cleared."""
    server.add_faults(Fault("hold", calls=(2,)))
    job = add_slow_job(bench, server)
    bench.runner.start(job)
    wait_for_cells(bench, job, 1)
    return job


def wait_for_cells(bench: RunnerBench, job: Job, least: int) -> Sequence[RecordedEvent]:
    """Wait for at least `least` cells; returns all events until then."""
    deadline = time.monotonic() + WAIT_S
    while True:
        events = bench.runner.events(job)
        if sum(isinstance(each.event, wire.CellFinished) for each in events) >= least:
            return events
        assert time.monotonic() < deadline, bench.describe(job)
        time.sleep(0.05)


def test_a_job_that_does_its_work_succeeds_and_records_its_events_in_order(
    any_bench: RunnerBench, slow_ollama: ScriptedOllama
) -> None:
    bench = any_bench
    job = bench.collect(models="alpha:135m,beta:135m", ollama_url=slow_ollama.url)
    assert bench.runner.log(job).text == ""
    assert bench.runner.events(job) == []
    status = bench.run(job)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    with MlflowStore(bench.mlflow_url) as store:
        experiment = store.experiment(job.experiment)
        assert experiment is not None
        assert len(list(store.search(experiment.experiment_id, where={"kind": "cell"}))) == 4
        assert status.links["mlflow"] == experiment.url
    events = [event for event in bench.events(job) if not isinstance(event, wire.Message | wire.Recording)]
    assert isinstance(events[0], wire.Started)
    assert events[-1] == wire.Exit(0)
    blocks = [type(event).__name__ for event in events[1:-3]]
    assert blocks == ["BlockStarted", "CellFinished", "CellFinished", "BlockFinished"] * 2
    cells = [event for event in events if isinstance(event, wire.CellFinished)]
    assert [(cell.model, cell.done, cell.total) for cell in cells] == [
        ("alpha:135m", 1, 2),
        ("alpha:135m", 2, 2),
        ("beta:135m", 1, 2),
        ("beta:135m", 2, 2),
    ]
    assert all(cell.tokens_per_s and cell.output_tokens for cell in cells)
    memory, collected = events[-3:-1]
    assert isinstance(memory, wire.Evidence)
    assert (memory.most_resident, memory.handovers) == (1, 2)
    assert isinstance(collected, wire.Collected)
    assert (collected.generated, collected.failed) == (4, 0)
    for after in (-5, 10**12):  # a cursor that was never given
        assert len(bench.runner.events(job, after=after)) in (0, len(bench.events(job)))
    _check_log_tail(bench, job)
    bench.runner.cancel(bench.request_cancel(job))
    assert bench.runner.observe(job).state is JobState.SUCCEEDED, "cancelling an ended job changes nothing"
    _forget_when_ended(bench, job)
    bench.runner.forget(job)
    assert bench.runner.events(job) == []
    assert bench.runner.log(job).text == ""


def _forget_when_ended(bench: RunnerBench, job: Job) -> None:
    """Forget the job once its process has ended, a moment after its last event."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return bench.runner.forget(job)
        except TipbenchError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _check_log_tail(bench: RunnerBench, job: Job) -> None:
    whole = bench.runner.log(job)
    assert (whole.cut, job.experiment in whole.text) == (False, True)
    tail = bench.runner.log(job, max_bytes=200)
    assert tail.cut
    assert len(tail.text.encode()) <= 200
    assert whole.text.endswith(tail.text)
    assert tail.size == whole.size


def test_a_judge_run_is_a_job(bench: RunnerBench) -> None:
    collected = bench.collect()
    bench.run(collected)
    options = {"with": "rules", "experiment": collected.experiment, "mlflow_url": bench.mlflow_url}
    judging = judge_request(options, ollama_url="http://localhost:11434")
    job = bench.store.add(replace(judging, runner=bench.name)).job
    if not bench.runs_judge_jobs:
        with pytest.raises(JobStartError, match="runs on the panel's own machine"):
            bench.runner.start(job)
        return
    assert bench.run(job).state is JobState.SUCCEEDED
    events = bench.events(job)
    progress = [event for event in events if isinstance(event, wire.Judging)]
    assert progress[-1].scored == progress[-1].total > 0
    judged = next(event for event in events if isinstance(event, wire.Judged))
    assert (judged.judge, judged.provisional, judged.unscored) == ("rules", True, 0)


def test_a_job_that_cannot_do_its_work_has_failed_with_a_reason(
    any_bench: RunnerBench, slow_ollama: ScriptedOllama
) -> None:
    bench = any_bench
    job = bench.collect(models="nosuch:1b", ollama_url=slow_ollama.url)
    status = bench.run(job)
    assert status.state is JobState.FAILED
    assert status.exit_code in (1, 2)
    assert "nosuch:1b is not on the Ollama server" in status.reason
    assert "nosuch:1b is not on the Ollama server" in bench.runner.log(job).text


def test_a_job_started_many_times_runs_once(bench: RunnerBench, slow_ollama: ScriptedOllama) -> None:
    job = add_slow_job(bench, slow_ollama)
    in_threads(4, lambda _: bench.runner.start(job))
    bench.wait_until(job, lambda status: status.state in ENDED)
    bench.runner.start(job)  # an ended job is not started again
    assert bench.runner.observe(job).state is JobState.SUCCEEDED
    assert sum(isinstance(event, wire.Started) for event in bench.events(job)) == 1
    assert len(slow_ollama.log.calls()) == CELLS


def test_a_cancelled_job_unloads_the_model_and_keeps_what_is_finished(
    any_bench: RunnerBench, slow_ollama: ScriptedOllama
) -> None:
    bench = any_bench
    job = start_held_job(bench, slow_ollama)
    assert "alpha:135m" in slow_ollama.resident
    cancelling = bench.request_cancel(job)
    for _ in range(3):
        bench.runner.cancel(cancelling)
    status = bench.wait_until(cancelling, lambda status: status.state in ENDED)
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 130)
    assert not slow_ollama.resident
    again = add_slow_job(bench, slow_ollama, experiment=job.experiment)
    assert bench.run(again).state is JobState.SUCCEEDED
    collected = next(event for event in bench.events(again) if isinstance(event, wire.Collected))
    assert collected.recorded_before >= 1
    assert collected.recorded_before + collected.generated == CELLS


def test_a_job_that_is_cancelled_before_it_starts_never_starts(bench: RunnerBench) -> None:
    job = bench.request_cancel(bench.collect())
    bench.runner.cancel(job)
    bench.runner.start(job)
    assert bench.runner.observe(job).state is JobState.CANCELLED
    assert bench.events(job) == []


def test_a_job_that_crashes_is_lost_and_not_running(bench: RunnerBench, slow_ollama: ScriptedOllama) -> None:
    job = start_held_job(bench, slow_ollama)
    bench.kill(job)
    status = bench.wait_until(job, lambda status: status.state is not JobState.RUNNING)
    assert status.state is JobState.LOST
    assert status.exit_code is None
    assert "retry" in status.reason
    assert bench.runner.events(job), "earlier events are kept"


def test_a_running_job_can_be_followed_and_not_forgotten_and_is_lost_only_while_unreachable(
    bench: RunnerBench, slow_ollama: ScriptedOllama
) -> None:
    job = start_held_job(bench, slow_ollama)
    with pytest.raises(TipbenchError, match="is still running"):
        bench.runner.forget(job)
    make_reachable = bench.make_unreachable(job)
    assert bench.observe(job).state is JobState.LOST
    make_reachable()
    assert bench.wait_until(job, lambda status: status.state is not JobState.LOST).state is JobState.RUNNING
    slow_ollama.clear_faults()
    followed: list[RecordedEvent] = []
    deadline = time.monotonic() + WAIT_S
    while not (followed and isinstance(followed[-1].event, wire.Exit)):
        assert time.monotonic() < deadline, bench.describe(job)
        followed += bench.runner.events(job, after=followed[-1].cursor if followed else 0, limit=2)
        time.sleep(0.05)
    assert followed == list(bench.runner.events(job, limit=10_000))
    cursors = [each.cursor for each in followed]
    assert cursors == sorted(set(cursors)), "no event is missing or repeated"
    assert bench.wait_until(job, lambda status: status.state in ENDED).state is JobState.SUCCEEDED


def test_a_login_in_an_address_reaches_the_command_and_nothing_else(bench: RunnerBench) -> None:
    url = bench.mlflow_url.replace("://", f"://anna:{PASSWORD}@")
    job = bench.collect(mlflow_url=url)
    assert PASSWORD not in repr(job) + JobShape.of(job).model_dump_json()
    assert job.private["TIPBENCH_MLFLOW_URL"] == url
    assert bench.run(job).state is JobState.SUCCEEDED
    assert PASSWORD not in str(bench.events(job)) + bench.runner.log(job).text
    for path in (bench.home / "jobs" / job.id).rglob("*"):
        assert PASSWORD.encode() not in path.read_bytes(), path
