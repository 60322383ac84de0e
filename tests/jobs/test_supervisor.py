"""The queue: one job at a time on each resource, first come first served, and one supervisor that leads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.polling import eventually
from tipbench.errors import JobConflict, JobStartError, ServerUnavailable, TipbenchError
from tipbench.jobs.job import Job, JobKind, JobRequest, JobState, JobStatus, LogTail, RecordedEvent
from tipbench.jobs.store import JobStore
from tipbench.jobs.supervisor import Supervisor, queue_positions, retry, startable

ONE, TWO = "Ollama at http://one:11434", "Ollama at http://two:11434"


@dataclass
class ScriptedRunner:
    """Returns the statuses that a test sets, and records its calls."""

    name: str = "local"
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    statuses: dict[str, JobStatus] = field(default_factory=dict)
    error: Exception | None = None

    def start(self, job: Job) -> None:
        if self.error is not None:
            raise self.error
        if job.id not in self.started:
            self.started.append(job.id)
            self.statuses.setdefault(job.id, JobStatus(JobState.RUNNING))

    def observe(self, job: Job) -> JobStatus:
        if self.error is not None:
            raise self.error
        return self.statuses.get(job.id, JobStatus(JobState.LOST, reason="unknown job"))

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job.id)
        self.statuses[job.id] = JobStatus(JobState.CANCELLED, 130)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:  # noqa: ARG002
        return []

    def log(self, job: Job, max_bytes: int = 65_536) -> LogTail:  # noqa: ARG002
        return LogTail("", 0, cut=False)

    def forget(self, job: Job) -> None:
        if self.error is not None:
            raise self.error
        self.forgotten.append(job.id)


@dataclass
class Queue:
    """A queue with its runner."""

    store: JobStore
    runner: ScriptedRunner
    supervisor: Supervisor

    def submit(self, *resources: str, runner: str = "local") -> Job:
        request = JobRequest(JobKind.COLLECT, "tip-bench-a", {}, resources=resources, runner=runner)
        return self.store.add(request).job

    def observe_as(self, job: Job, state: JobState, code: int | None = None, reason: str = "") -> Job:
        """Set the runner's status of a job, then process the queue."""
        self.runner.statuses[job.id] = JobStatus(state, code, reason)
        return self.tick(job)

    def tick(self, job: Job) -> Job:
        assert self.supervisor.tick()
        return self.store.get(job.id)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    runner = ScriptedRunner()
    with JobStore(tmp_path / "jobs.db") as store:
        supervisor = Supervisor(store, {"local": runner}, tmp_path / "lock")
        yield Queue(store, runner, supervisor)
        supervisor.close()


def test_a_job_goes_from_the_queue_to_its_end(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    assert job.state is JobState.RUNNING
    assert job.started is not None
    done = queue.observe_as(job, JobState.SUCCEEDED, 0)
    assert (done.state, done.exit_code) == (JobState.SUCCEEDED, 0)
    assert queue.runner.started == [job.id]


def test_jobs_of_one_resource_run_one_at_a_time_in_order(queue: Queue) -> None:
    jobs = [queue.submit(ONE) for _ in range(3)]
    for turn, job in enumerate(jobs):
        assert queue.tick(job).state is JobState.RUNNING
        assert queue.runner.started == [each.id for each in jobs[: turn + 1]]
        queue.observe_as(job, JobState.SUCCEEDED, 0)


def test_jobs_of_two_resources_run_at_the_same_time(queue: Queue) -> None:
    first, second = queue.submit(ONE), queue.submit(TWO)
    queue.tick(first)
    assert queue.store.get(second.id).state is JobState.RUNNING


def test_a_queue_position_counts_jobs_of_the_same_resources(queue: Queue) -> None:
    running, next_, other, both, last = (queue.submit(*needs) for needs in ((ONE,), (ONE,), (TWO,), (ONE, TWO), (ONE,)))
    queue.supervisor.tick()
    assert queue.store.get(other.id).state is JobState.RUNNING
    queued = queue.store.in_states({JobState.QUEUED})
    assert queue_positions(queued) == {next_.id: 1, both.id: 2, last.id: 3}
    assert running.id not in queue_positions(queued)


def test_a_job_without_resources_waits_only_for_the_running_limit(queue: Queue) -> None:
    jobs = [queue.submit() for _ in range(6)]
    queue.supervisor.tick()
    assert queue.runner.started == [job.id for job in jobs[:4]]


def test_a_lost_job_blocks_no_other_and_is_found_again(queue: Queue) -> None:
    job, behind = queue.submit(ONE), queue.submit(ONE)
    queue.tick(job)
    lost = queue.observe_as(job, JobState.LOST, reason="out of sight")
    assert (lost.state, lost.reason, lost.ended) == (JobState.LOST, "out of sight", None)
    assert queue.store.get(behind.id).state is JobState.RUNNING
    found = queue.observe_as(job, JobState.RUNNING)
    assert (found.state, found.reason) == (JobState.RUNNING, "")
    assert queue.observe_as(found, JobState.SUCCEEDED, 0).started == lost.started


def test_a_lost_job_that_ended_gets_its_result(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    queue.observe_as(job, JobState.LOST)
    assert queue.observe_as(job, JobState.FAILED, 1, "no MLflow").reason == "no MLflow"


def test_a_job_waiting_for_a_judge_frees_its_place(queue: Queue) -> None:
    job, behind = queue.submit(ONE), queue.submit(ONE)
    queue.tick(job)
    assert queue.observe_as(job, JobState.WAITING).state is JobState.WAITING
    assert queue.store.get(behind.id).state is JobState.RUNNING
    assert queue.observe_as(job, JobState.LOST).state is JobState.LOST
    assert queue.observe_as(job, JobState.SUCCEEDED, 0).state is JobState.SUCCEEDED


def test_a_runner_that_is_unavailable_makes_its_jobs_lost_until_it_is_back(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    queue.runner.error = ServerUnavailable("Airflow does not answer")
    lost = queue.tick(job)
    assert (lost.state, lost.reason) == (JobState.LOST, "Airflow does not answer")
    queue.runner.error = None
    assert queue.tick(job).state is JobState.RUNNING


def test_a_job_whose_runner_is_unavailable_stays_queued_with_a_reason(queue: Queue) -> None:
    queue.runner.error = ServerUnavailable("Airflow does not answer")
    job = queue.tick(queue.submit(ONE))
    assert (job.state, job.reason) == (JobState.QUEUED, "Airflow does not answer")
    queue.runner.error = None
    assert queue.tick(job).state is JobState.RUNNING


def test_a_job_of_a_runner_that_is_not_configured_waits_and_reports_it(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE, runner="airflow"))
    assert job.state is JobState.QUEUED
    assert "airflow, which is not configured" in job.reason


def test_a_job_that_cannot_be_started_has_failed(queue: Queue) -> None:
    queue.runner.error = JobStartError("no such program")
    job = queue.tick(queue.submit(ONE))
    assert (job.state, job.reason) == (JobState.FAILED, "no such program")


def test_an_exception_at_one_job_does_not_block_the_others(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    broken = queue.tick(queue.submit(ONE))
    queue.runner.error = ZeroDivisionError()
    with caplog.at_level(logging.ERROR):
        assert queue.tick(broken).state is JobState.RUNNING
    assert broken.id in caplog.text
    queue.runner.error = None
    assert queue.observe_as(broken, JobState.SUCCEEDED, 0).state is JobState.SUCCEEDED


def test_a_cancel_is_passed_to_the_runner(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    assert queue.store.request_cancel(job.id).state is JobState.RUNNING
    done = queue.tick(job)
    assert (done.state, done.exit_code, queue.runner.cancelled) == (JobState.CANCELLED, 130, [job.id])


def test_a_cancel_in_the_queue_never_reaches_the_runner(queue: Queue) -> None:
    job = queue.submit(ONE)
    assert queue.store.request_cancel(job.id).state is JobState.CANCELLED
    queue.supervisor.tick()
    assert (queue.runner.started, queue.runner.cancelled) == ([], [])


def test_a_job_cancelled_after_its_leader_died_while_starting_it_is_not_started(queue: Queue) -> None:
    job = queue.submit(ONE)
    queue.store.claim(job.id)  # and dies
    assert queue.store.request_cancel(job.id).state is JobState.QUEUED
    assert queue.tick(job).state is JobState.CANCELLED
    assert (queue.runner.started, queue.runner.cancelled) == ([], [job.id])


def test_a_job_started_by_a_leader_that_died_before_recording_it_is_running(queue: Queue) -> None:
    job = queue.submit(ONE)
    claimed = queue.store.claim(job.id)
    assert claimed is not None
    queue.runner.start(claimed)  # and dies
    assert queue.tick(job).state is JobState.RUNNING
    assert queue.runner.started == [job.id]


def test_a_retry_runs_like_any_other_job(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    queue.observe_as(job, JobState.FAILED, 1)
    again = retry(queue.store, job.id).job
    assert queue.tick(again).state is JobState.RUNNING
    with pytest.raises(JobConflict):
        retry(queue.store, again.id)


def test_of_two_supervisors_one_leads_and_the_other_takes_over(queue: Queue, tmp_path: Path) -> None:
    job = queue.tick(queue.submit(ONE))
    other_runner = ScriptedRunner()
    with JobStore(queue.store.path) as store:
        other = Supervisor(store, {"local": other_runner}, tmp_path / "lock")
        assert other.tick() is False
        assert not other.holds_lock
        queue.supervisor.close()
        other_runner.statuses[job.id] = JobStatus(JobState.SUCCEEDED, 0)
        assert other.tick() is True
        assert store.get(job.id).state is JobState.SUCCEEDED
        other.close()


@pytest.fixture
def expiring_queue(tmp_path: Path) -> Iterator[tuple[Queue, list[float]]]:
    """A queue that deletes jobs a day after their end, and its clock."""
    runner, now = ScriptedRunner(), [1_000_000.0]
    with JobStore(tmp_path / "jobs.db", clock=lambda: now[0]) as store:
        supervisor = Supervisor(store, {"local": runner}, tmp_path / "lock", keep_s=86_400)
        yield Queue(store, runner, supervisor), now
        supervisor.close()


def jobs_ended_long_ago(expiring_queue: tuple[Queue, list[float]], number: int = 1, runner: str = "local") -> list[Job]:
    queue, now = expiring_queue
    jobs = [queue.submit(runner=runner) for _ in range(number)]
    for job in jobs:
        queue.store.move(job.id, JobState.QUEUED, JobState.RUNNING)
        queue.store.move(job.id, JobState.RUNNING, JobState.SUCCEEDED)
    now[0] += 90_000
    return jobs


def test_jobs_that_ended_long_ago_are_deleted_by_runner_and_store(expiring_queue: tuple[Queue, list[float]]) -> None:
    queue, _ = expiring_queue
    jobs = jobs_ended_long_ago(expiring_queue, 120)
    for _ in range(3):  # some at a time
        queue.supervisor.tick()
    assert sorted(queue.runner.forgotten) == sorted(job.id for job in jobs)
    assert queue.store.page().items == ()


def test_a_clock_100_days_ahead_deletes_no_job_until_it_has_stayed_so_for_a_day(
    expiring_queue: tuple[Queue, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, now = expiring_queue
    monotonic = [1e6]
    monkeypatch.setattr("tipbench.jobs.supervisor.time.monotonic", lambda: monotonic[0])
    jobs_ended_long_ago(expiring_queue)
    now[0] += 100 * 86_400
    for _ in range(23):
        queue.supervisor.tick()
        queue.submit(TWO)  # activity at the wrong time does not confirm it
        monotonic[0] += 3601
    assert queue.runner.forgotten == []
    monotonic[0] += 2 * 3600
    queue.supervisor.tick()
    assert len(queue.runner.forgotten) == 1


def test_a_job_that_has_just_ended_is_kept(expiring_queue: tuple[Queue, list[float]]) -> None:
    queue, now = expiring_queue
    jobs_ended_long_ago(expiring_queue)
    now[0] -= 80_000
    queue.supervisor.tick()
    assert queue.runner.forgotten == []
    assert len(queue.store.page().items) == 1


def test_a_job_whose_runner_cannot_delete_it_yet_is_kept(
    expiring_queue: tuple[Queue, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    queue, _ = expiring_queue
    (job,) = jobs_ended_long_ago(expiring_queue)
    queue.runner.error = TipbenchError("its process is still running")
    queue.supervisor.tick()
    assert queue.store.get(job.id).state is JobState.SUCCEEDED
    assert "its process is still running" in caplog.text


def test_a_job_of_a_removed_runner_is_deleted(expiring_queue: tuple[Queue, list[float]]) -> None:
    queue, _ = expiring_queue
    jobs_ended_long_ago(expiring_queue, runner="airflow")
    queue.supervisor.tick()
    assert queue.store.page().items == ()


def test_without_a_limit_no_job_is_deleted(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    queue.observe_as(job, JobState.SUCCEEDED, 0)
    queue.supervisor.tick()
    assert queue.runner.forgotten == []


def test_the_same_key_gives_the_same_retry_when_the_lost_job_is_found_again(queue: Queue) -> None:
    job = queue.tick(queue.submit(ONE))
    queue.observe_as(job, JobState.LOST)
    again = retry(queue.store, job.id, idempotency_key="key-1").job
    queue.observe_as(job, JobState.RUNNING)
    assert retry(queue.store, job.id, idempotency_key="key-1").job.id == again.id
    with pytest.raises(JobConflict):
        retry(queue.store, job.id, idempotency_key="key-2")


def test_a_supervisor_on_its_thread_can_be_woken_and_closed(queue: Queue) -> None:
    with Supervisor(queue.store, {"local": queue.runner}, queue.store.path.with_name("other"), tick_s=30) as supervisor:
        job = queue.submit(ONE)
        supervisor.wake()
        assert eventually(lambda: queue.store.get(job.id).state is JobState.RUNNING)


RESOURCES = st.lists(st.sampled_from("abcd"), max_size=2, unique=True).map(tuple)


def queued_job(number: int, resources: tuple[str, ...]) -> Job:
    return Job(
        JobKind.COLLECT, "tip-bench-a", {}, resources=resources, id=str(number), state=JobState.QUEUED, created=0
    )


@given(st.lists(RESOURCES, max_size=12), st.lists(st.sampled_from("abcd"), max_size=3, unique=True), st.integers(0, 6))
def test_no_resource_is_shared_and_jobs_start_in_order(
    needs: list[tuple[str, ...]], held: list[str], most: int
) -> None:
    queued = [queued_job(number, resources) for number, resources in enumerate(needs)]
    running = [replace(queued_job(100 + number, (name,)), state=JobState.RUNNING) for number, name in enumerate(held)]
    chosen = startable(queued, running, most)
    used = [resource for job in [*running, *chosen] for resource in job.resources]
    assert len(used) == len(set(used))
    assert len(chosen) <= max(0, most - len(running))
    for job in chosen:
        ahead = queued[: int(job.id)]
        assert all(other in chosen or set(other.resources).isdisjoint(job.resources) for other in ahead)
    if queued and most > len(running) and set(held).isdisjoint(queued[0].resources):
        assert queued[0] in chosen
