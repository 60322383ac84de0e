"""The Airflow runner with faults of Airflow: lost responses, missing pools, long waits for a judge."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.airflow_site import MLFLOW, MODELS, AirflowSite, airflow_site, emit, successful_collect, wait_for_state
from support.polling import eventually
from support.scripted_airflow import DAG
from tipbench.errors import AirflowUnavailable, JobStartError, MlflowUnavailable, TipbenchError
from tipbench.jobs.airflow import AirflowRunner, _failure_reason, conf_of, run_id_of
from tipbench.jobs.airflow_api import TaskInstance
from tipbench.jobs.airflow_progress import StoredProgress, TaskTotals, read_progress, write_progress
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import Job, JobState
from tipbench.jobs.supervisor import Supervisor, retry
from tipbench.record import events as wire
from tipbench.record.events import event_line


@pytest.fixture
def site(home: Path) -> Iterator[AirflowSite]:
    with airflow_site(home) as made:
        yield made


# starting


def test_a_trigger_whose_response_is_lost_makes_one_run(site: AirflowSite) -> None:
    job = site.job()
    site.airflow.lost_response_path = f"dags/{DAG}/dagRuns"
    with pytest.raises(AirflowUnavailable):
        site.runner.start(job)
    site.runner.start(job)
    assert list(site.airflow.runs) == [run_id_of(job)]
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_a_task_that_airflow_retries_has_its_failure_as_the_reason(site: AirflowSite) -> None:
    released = threading.Event()

    def collecting(model: str, log: list[str]) -> int:
        emit(log, wire.Started("1"), wire.Failure("Ollama at gpu-a does not respond."), wire.Exit(1))
        (run,) = site.airflow.runs.values()
        (task,) = (task for task in run.tasks if task.model == model)
        task.state = "up_for_retry"
        released.wait(30)
        return successful_collect(model, log)

    site.airflow.collecting = collecting
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: bool(seen.reason))
    assert (seen.state, seen.reason) == (JobState.RUNNING, "Ollama at gpu-a does not respond. Airflow tries again.")
    released.set()
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_a_job_that_succeeds_without_a_refused_model_names_it(site: AirflowSite) -> None:
    def collecting(model: str, log: list[str]) -> int:
        if model == "alpha:1b":
            return successful_collect(model, log)
        emit(log, wire.Collected("tip-bench-x", 0, 0, 0, 0, refused=("big:9b has 9.00B parameters.",)), wire.Exit(0))
        return 0

    site.airflow.collecting = collecting
    job = site.job()
    site.runner.start(job)
    seen = site.wait_for_end(job)
    assert seen.state is JobState.SUCCEEDED
    assert "big:9b has 9.00B parameters." in seen.reason


def test_a_run_whose_trigger_got_no_response_can_be_cancelled(site: AirflowSite) -> None:
    site.airflow.pools.clear()
    job = site.job()
    site.airflow.lost_response_path = f"dags/{DAG}/dagRuns"
    with pytest.raises(AirflowUnavailable):
        site.runner.start(job)
    site.runner.cancel(job)
    site.airflow.runs[run_id_of(job)].join()
    assert site.airflow.runs[run_id_of(job)].state == "failed"
    assert site.wait_for_end(job).state is JobState.CANCELLED


def test_a_job_that_airflow_does_not_have_is_cancelled_locally(site: AirflowSite) -> None:
    job = site.job()
    site.airflow.fault = "away"
    with pytest.raises(AirflowUnavailable):
        site.runner.start(job)
    site.runner.cancel(job)
    assert site.runner.observe(job).state is JobState.CANCELLED


def test_a_paused_dag_is_reported_and_waited_for(site: AirflowSite) -> None:
    site.airflow.paused = True
    job = site.job()
    with pytest.raises(AirflowUnavailable, match=f"The DAG {DAG} is paused in Airflow. Unpause it"):
        site.runner.start(job)
    assert not site.airflow.runs
    site.airflow.paused = False
    site.runner.start(job)
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_a_paused_dag_is_not_queried_at_every_start_attempt(site: AirflowSite) -> None:
    site.airflow.paused = True
    job = site.job()
    runner = AirflowRunner(site.home, site.rest, site.cells, poll_s=60)
    for _ in range(3):
        with pytest.raises(AirflowUnavailable, match="is paused in Airflow"):
            runner.start(job)
    assert site.airflow.count("GET", f"/dags/{DAG}") == 1


def test_a_cancel_that_airflow_does_not_allow_is_reported_once(site: AirflowSite) -> None:
    job = site.job(wait_for_judge=True)
    site.cells.n_pending = 2
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    site.airflow.may_cancel = False
    for _ in range(2):
        site.runner.cancel(job)
    warnings = [event.text for event in site.events(job) if isinstance(event, wire.Message) and event.warning]
    assert [("refused (HTTP 403)" in text, "the role op" in text) for text in warnings] == [(True, True)]


def test_a_missing_dag_cannot_be_started(site: AirflowSite) -> None:
    site.airflow.has_dag = False
    with pytest.raises(JobStartError, match=f"The DAG {DAG} is missing in Airflow at .*bench_dag.py"):
        site.runner.start(site.job())


def test_a_conf_that_airflow_refuses_cannot_be_started(site: AirflowSite) -> None:
    job = site.job()
    wrong = replace(job, arguments={**job.arguments, "n_tips": "many"})
    with pytest.raises(JobStartError, match="Invalid input for param n_tips"):
        site.runner.start(wrong)


def test_without_an_mlflow_a_job_cannot_be_started(site: AirflowSite) -> None:
    site.cells.url = None
    with pytest.raises(JobStartError, match="needs an MLflow that its workers and the panel reach"):
        site.runner.start(site.job())
    assert not site.airflow.requests


def test_the_conf_has_the_job_options_without_logins(site: AirflowSite) -> None:
    job = site.job(ollama_url="http://box:1", mlflow_url="http://anna:secret-7@mlflow.example:5000")
    conf = conf_of(job, site.cells.address(job))
    assert (conf["mlflow_url"], conf["models"], conf["ollama_url"]) == (MLFLOW, MODELS, "http://box:1")
    assert "secret-7" not in str(conf)
    left = replace(job, arguments={key: value for key, value in job.arguments.items() if key != "ollama_url"})
    assert "ollama_url" not in conf_of(left, MLFLOW)


# following


def test_a_run_of_two_models_is_reported_as_one_job(site: AirflowSite) -> None:
    job = site.job()
    site.runner.start(job)
    seen = site.wait_for_end(job)
    assert seen.links == {
        "airflow": f"{site.airflow.url}/dags/{DAG}/runs/{run_id_of(job)}",
        "mlflow": f"{MLFLOW}/#/experiments/1",
    }
    events = site.events(job)
    assert [event for event in events if isinstance(event, wire.Started)] == [events[0]]
    assert events[-3:] == [
        wire.Evidence(20, 1, 0.5, 2),
        wire.Collected("tip-bench-x", 4, 0, 4, 0, url=f"{MLFLOW}/#/experiments/1"),
        wire.Exit(0),
    ]
    log = site.runner.log(job).text
    assert "[collect alpha:1b] collecting alpha:1b" in log
    assert "cell_finished" not in log
    assert "[airflow] compare: success" in log


def test_a_model_that_fails_fails_the_job_and_is_named(site: AirflowSite) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    seen = site.wait_for_end(job)
    assert (seen.state, seen.exit_code, seen.reason) == (JobState.FAILED, 2, "beta:1b is too large.")
    assert site.events(job)[-2:] == [wire.Failure("beta:1b is too large."), wire.Exit(2)]


def test_several_models_that_fail_are_all_named(site: AirflowSite) -> None:
    site.failing |= {"alpha:1b", "beta:1b"}
    job = site.job()
    site.runner.start(job)
    assert site.wait_for_end(job).reason == "alpha:1b: alpha:1b is too large.; beta:1b: beta:1b is too large."


def test_unsaved_output_of_a_dead_panel_is_overwritten(site: AirflowSite) -> None:
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    file = site.home / "jobs" / job.id / "events.jsonl"
    with file.open("ab") as events:
        events.write(event_line(wire.CellFinished("alpha:1b", "v1", "s1", 1, 2), 1.0) + b'{"at": "half')
    site.wait_for_end(job)
    assert [event.done for event in site.events(job) if isinstance(event, wire.CellFinished)] == [1, 2]


def test_airflow_unavailable_in_mid_run_is_lost_then_found_and_nothing_is_missing(site: AirflowSite) -> None:
    site.airflow.pools.clear()
    job = site.job()
    with Supervisor(site.store, {"airflow": site.runner}, site.home / "jobs" / "lock", tick_s=0.02):
        wait_for_state(site, job, JobState.RUNNING)
        site.airflow.fault = "away"
        wait_for_state(site, job, JobState.LOST)
        assert "Is its API server running?" in site.store.get(job.id).reason
        site.airflow.pools.add("ollama")
        assert eventually(lambda: site.airflow.runs[run_id_of(job)].state == "success")
        site.airflow.fault = ""
        wait_for_state(site, job, JobState.SUCCEEDED)
    assert sum(isinstance(event, wire.CellFinished) for event in site.events(job)) == 4
    assert site.store.get(job.id).links["airflow"].endswith(run_id_of(job))


def test_a_missing_pool_is_reported_once_and_the_run_continues_when_it_exists(site: AirflowSite) -> None:
    site.airflow.pools.clear()
    job = site.job()
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: "pool" in seen.reason)
    assert seen.state is JobState.RUNNING
    assert "Airflow has no pool ollama" in seen.reason
    assert "`airflow pools set ollama 1 tipbench`" in seen.reason
    site.runner.observe(job)
    site.airflow.pools.add("ollama")
    assert site.wait_for_end(job).reason == ""
    warnings = [event for event in site.events(job) if isinstance(event, wire.Message) and event.warning]
    assert len(warnings) == 1


def test_a_dag_that_is_paused_after_the_trigger_is_reported(site: AirflowSite) -> None:
    site.airflow.pause_on_trigger = True
    job = site.job()
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: "is paused in Airflow" in seen.reason)
    assert seen.state is JobState.RUNNING
    site.airflow.paused = False
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_reading_a_log_does_not_wait_for_an_unavailable_airflow(site: AirflowSite) -> None:
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    site.airflow.fault = "away"
    with pytest.raises(AirflowUnavailable):
        site.runner.observe(job)
    site.airflow.fault = ""
    before = len(site.airflow.requests)
    assert "[airflow] run" in site.runner.log(job).text
    assert site.events(job)
    assert len(site.airflow.requests) == before, "only the supervisor polls an unavailable Airflow"
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_a_job_whose_run_was_deleted_in_airflow_can_be_removed(site: AirflowSite) -> None:
    site.airflow.pools.clear()
    job = site.job()
    site.runner.start(job)
    with pytest.raises(TipbenchError, match="is still running"):
        site.runner.forget(job)
    site.airflow.runs.pop(run_id_of(job)).cancel()
    assert site.runner.observe(job).state is JobState.LOST
    site.runner.forget(job)
    assert site.runner.log(job).text == ""


def test_waits_and_recordings_of_a_task_end_with_its_attempt(site: AirflowSite) -> None:
    def collecting(model: str, log: list[str]) -> int:
        if model == "alpha:1b":
            emit(log, wire.Started("1"), wire.Waiting("Ollama", 5.0), wire.Recording(3), wire.Exit(1))
            return 1
        return successful_collect(model, log)

    site.airflow.collecting = collecting
    job = site.job()
    site.runner.start(job)
    assert site.wait_for_end(job).state is JobState.FAILED
    events = site.events(job)
    closing = [wire.Resumed("Ollama"), wire.Recording(0)]
    assert [event for event in events if isinstance(event, wire.Resumed | wire.Recording)][-2:] == closing


def test_failures_caused_by_the_first_one_are_not_reasons() -> None:
    names = ("plan", "export_for_judge", "outcome")
    failed = [TaskInstance(task_id=name, state="failed") for name in names]
    kept = StoredProgress(totals={name: TaskTotals(failure=f"{name} failed.") for name in names})
    assert _failure_reason(failed, kept) == "plan failed."


def test_the_stored_progress_keeps_the_keys_of_its_file(tmp_path: Path) -> None:
    content = {"base": {"plan": 1}, "places": {"plan": {"lines": 3}}, "tallies": {"plan": {"failure": "x"}}}
    content |= {"told": ["a warning"], "looked": 7.0, "checked": 8.0}
    folder = JobFolder(tmp_path, "one")
    folder.make()
    (folder.path / "airflow.json").write_text(json.dumps(content))
    stored = read_progress(folder)
    assert (stored.earlier_attempts, stored.log_positions["plan"].lines) == ({"plan": 1}, 3)
    assert (stored.totals["plan"].failure, stored.warnings) == ("x", ["a warning"])
    assert (stored.polled_at, stored.checked_at) == (7.0, 8.0)
    write_progress(folder, stored)
    assert content.keys() <= json.loads((folder.path / "airflow.json").read_text()).keys()


def test_a_cancel_whose_response_is_lost_ends_as_cancelled(site: AirflowSite) -> None:
    site.cells.n_pending = 2
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    site.rest.patch(f"dags/{DAG}/dagRuns/{run_id_of(job)}", {"state": "failed"})
    assert site.wait_for_end(replace(job, cancel_requested=time.time())).state is JobState.CANCELLED


# the judge


def test_a_job_waits_for_the_judge_and_continues_when_no_cell_is_pending(site: AirflowSite) -> None:
    site.cells.n_pending = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    seen = site.wait_until(job, lambda seen: bool(seen.reason))
    assert seen.reason == "4 cells wait for a judge."
    assert site.airflow.count("PATCH", "hitlDetails") == 0
    site.cells.n_pending = 0
    assert site.wait_for_end(job).state is JobState.SUCCEEDED
    assert site.airflow.count("PATCH", "hitlDetails") >= 1


def test_a_gate_answered_in_airflow_continues_the_job(site: AirflowSite) -> None:
    site.cells.n_pending = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    site.airflow.runs[run_id_of(job)].answer_gate({"chosen_options": ["Compare now"]})
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_an_mlflow_that_is_unavailable_keeps_the_job_waiting(site: AirflowSite) -> None:
    site.cells.error = MlflowUnavailable("MLflow cannot be reached.")
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: "cannot be read" in seen.reason)
    assert seen.state is JobState.WAITING
    assert "MLflow cannot be reached." in seen.reason
    site.cells.error = None
    assert site.wait_for_end(job).state is JobState.SUCCEEDED


def test_a_waiting_job_can_be_cancelled(site: AirflowSite) -> None:
    site.cells.n_pending = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    site.runner.cancel(job)
    seen = site.wait_for_end(job)
    assert (seen.state, seen.exit_code) == (JobState.CANCELLED, 130)


def test_a_waiting_job_holds_no_resource(site: AirflowSite) -> None:
    site.cells.n_pending = 4
    first, second = site.job(wait_for_judge=True), site.job()
    with Supervisor(site.store, {"airflow": site.runner}, site.home / "jobs" / "lock", tick_s=0.02):
        wait_for_state(site, first, JobState.WAITING)
        wait_for_state(site, second, JobState.SUCCEEDED)
        assert site.store.get(first.id).state is JobState.WAITING


def test_a_run_that_waits_for_weeks_is_polled_rarely(site: AirflowSite) -> None:
    site.cells.n_pending = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    now = [time.time()]
    runner = AirflowRunner(site.home, site.rest, site.cells, poll_s=2, clock=lambda: now[0])
    runner.observe(job)
    before = len(site.airflow.requests)
    for _ in range(100):
        now[0] += 1.0
        runner.observe(job)
    assert len(site.airflow.requests) - before <= 30


# retrying


def retried(site: AirflowSite, job: Job) -> Job:
    """The new job; the old one is on the list as it was seen."""
    for state in (JobState.RUNNING, site.runner.observe(job).state):
        site.store.move(job.id, site.store.get(job.id).state, state)
    return retry(site.store, job.id).job


def test_a_retry_repeats_only_failed_tasks_in_the_same_run(site: AirflowSite) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    site.wait_for_end(job)
    site.failing.clear()
    again = retried(site, job)
    site.runner.start(again)
    assert site.wait_for_end(again).state is JobState.SUCCEEDED
    assert list(site.airflow.runs) == [run_id_of(job)]
    models = {event.model for event in site.events(again) if isinstance(event, wire.CellFinished)}
    assert models == {"beta:1b"}
    assert [task.attempt for task in site.airflow.runs[run_id_of(job)].tasks if task.model] == [1, 2]


def test_a_retry_that_is_started_twice_clears_once(site: AirflowSite) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    site.wait_for_end(job)
    again = retried(site, job)
    for _ in range(3):
        site.runner.start(again)
    assert site.wait_for_end(again).state is JobState.FAILED
    assert site.airflow.count("POST", "clearTaskInstances") == 1


def test_a_retry_of_a_cancelled_job_is_a_new_run(site: AirflowSite) -> None:
    site.cells.n_pending = 1
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.wait_until(job, lambda seen: seen.state is JobState.WAITING)
    site.runner.cancel(job)
    site.wait_for_end(job)
    site.cells.n_pending = 0
    again = retried(site, job)
    site.runner.start(again)
    assert site.wait_for_end(again).state is JobState.SUCCEEDED
    assert list(site.airflow.runs) == [run_id_of(job), run_id_of(again)]
