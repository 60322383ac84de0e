"""The Airflow runner where Airflow is awkward: lost answers, missing pools, judges who take their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from support.little_airflow import DAG, PASSWORD, USER, LittleAirflow
from tipbench.errors import AirflowAway, MlflowAway, NotEnoughData, NotStarted, TipbenchError
from tipbench.jobs import events as wire
from tipbench.jobs.airflow import AirflowRunner, conf_of, run_id_of
from tipbench.jobs.airflow_rest import AirflowAccess, AirflowRest
from tipbench.jobs.command import collect_order
from tipbench.jobs.events import event_line
from tipbench.jobs.job import ENDED, Job, JobState, Sighting
from tipbench.jobs.queue import Supervisor, retry
from tipbench.jobs.sqlite import JobStore
from tipbench.plan.config import make_config

MLFLOW = "http://mlflow.example:5000"
MODELS = "alpha:1b,beta:1b"


@dataclass
class Cells:
    """How many cells wait for a judge, as a test wants it."""

    waiting: int = 0
    trouble: TipbenchError | None = None
    url: str | None = MLFLOW

    def address(self, job: Job) -> str:  # noqa: ARG002
        if self.url is None:
            raise NotEnoughData("Nothing is recorded yet.")
        return self.url

    def pending(self, job: Job) -> int:  # noqa: ARG002
        if self.trouble is not None:
            raise self.trouble
        return self.waiting


def told(log: list[str], *events: wire.Event) -> None:
    log += [event_line(event, time.time()).decode().rstrip() for event in events]


def story(model: str, log: list[str], generated: int = 2) -> int:
    """What a collect of two cells prints."""
    told(log, wire.Started("1"), wire.BlockStarted(model, 2))
    log.append(f"collecting {model}")
    for number in (1, 2):
        told(log, wire.CellFinished(model, "v1", f"s{number}", number, 2, output_tokens=5))
    told(log, wire.BlockFinished(model), wire.Memory(10, 1, 0.5, 1))
    told(log, wire.Collected("tip-bench-x", 2, 2 - generated, generated, 0, url=f"{MLFLOW}/#/experiments/1"))
    told(log, wire.Exit(0))
    return 0


@dataclass
class Site:
    """A little Airflow and the runner on it. `failing` models fail, with a reason."""

    airflow: LittleAirflow
    store: JobStore
    home: Path
    rest: AirflowRest
    cells: Cells = field(default_factory=Cells)
    failing: set[str] = field(default_factory=set)

    @property
    def runner(self) -> AirflowRunner:
        return AirflowRunner(self.home, self.rest, self.cells, poll_s=0, check_s=0, settle_s=1)

    def collecting(self, model: str, log: list[str]) -> int:
        if model in self.failing:
            told(log, wire.Started("1"), wire.Failure(f"{model} is too large."), wire.Exit(2))
            return 2
        return story(model, log)

    def job(self, **changes: Any) -> Job:
        wait = changes.pop("wait_for_judge", False)
        config = make_config({"models": MODELS, "experiment": "tip-bench-x", **changes})
        order = collect_order(config, runner="airflow")
        if wait:
            order = replace(order, arguments={**order.arguments, "wait_for_judge": True})
        return self.store.add(order)[0]

    def until(self, job: Job, wanted: Callable[[Sighting], bool]) -> Sighting:
        deadline = time.monotonic() + 30
        while not wanted(seen := self.runner.observe(job)):
            assert time.monotonic() < deadline, f"{seen}\n{self.runner.log(job).text}"
            time.sleep(0.02)
        return seen

    def ended(self, job: Job) -> Sighting:
        return self.until(job, lambda seen: seen.state in ENDED)

    def events(self, job: Job) -> list[wire.Event]:
        return [each.event for each in self.runner.events(job, limit=10_000)]


@pytest.fixture
def site(home: Path) -> Iterator[Site]:
    with JobStore(home / "jobs" / "jobs.db") as store, LittleAirflow(home) as airflow:
        access = AirflowAccess(airflow.url, USER, PASSWORD)
        with closing(AirflowRest(access, rest_s=0)) as rest:
            made = Site(airflow, store, home, rest)
            airflow.collecting = made.collecting
            yield made


# starting


def test_a_trigger_whose_answer_is_lost_makes_one_run(site: Site) -> None:
    job = site.job()
    site.airflow.lose_answers_to = f"dags/{DAG}/dagRuns"
    with pytest.raises(AirflowAway):
        site.runner.start(job)
    site.runner.start(job)
    assert list(site.airflow.runs) == [run_id_of(job)]
    assert site.ended(job).state is JobState.SUCCEEDED


def test_a_run_whose_trigger_was_never_answered_is_cancelled_too(site: Site) -> None:
    site.airflow.pools.clear()
    job = site.job()
    site.airflow.lose_answers_to = f"dags/{DAG}/dagRuns"
    with pytest.raises(AirflowAway):
        site.runner.start(job)
    site.runner.cancel(job)
    site.airflow.runs[run_id_of(job)].join()
    assert site.airflow.runs[run_id_of(job)].state == "failed"
    assert site.ended(job).state is JobState.CANCELLED


def test_a_job_that_airflow_never_heard_of_is_cancelled_without_it(site: Site) -> None:
    job = site.job()
    site.airflow.fault = "away"
    with pytest.raises(AirflowAway):
        site.runner.start(job)
    site.runner.cancel(job)
    assert site.runner.observe(job).state is JobState.CANCELLED


def test_a_paused_dag_is_told_and_waited_for(site: Site) -> None:
    site.airflow.paused = True
    job = site.job()
    with pytest.raises(AirflowAway, match=f"The DAG {DAG} is paused in Airflow. Unpause it"):
        site.runner.start(job)
    assert not site.airflow.runs
    site.airflow.paused = False
    site.runner.start(job)
    assert site.ended(job).state is JobState.SUCCEEDED


def test_a_missing_dag_cannot_be_started(site: Site) -> None:
    site.airflow.has_dag = False
    with pytest.raises(NotStarted, match=f"There is no DAG {DAG} in Airflow at .*bench_dag.py"):
        site.runner.start(site.job())


def test_a_conf_that_airflow_refuses_cannot_be_started(site: Site) -> None:
    job = site.job()
    wrong = replace(job, arguments={**job.arguments, "n_tips": "many"})
    with pytest.raises(NotStarted, match="Invalid input for param n_tips"):
        site.runner.start(wrong)


def test_without_an_mlflow_there_is_nothing_to_start(site: Site) -> None:
    site.cells.url = None
    with pytest.raises(NotStarted, match="needs an MLflow that its workers and the panel reach"):
        site.runner.start(site.job())
    assert not site.airflow.requests


def test_the_conf_is_the_configuration_without_logins_and_without_what_nobody_chose(site: Site) -> None:
    job = site.job(ollama_url="http://localhost:11434", mlflow_url="http://anna:secret-7@mlflow.example:5000")
    conf = conf_of(job, site.cells.address(job))
    assert conf["mlflow_url"] == MLFLOW
    assert conf["models"] == MODELS
    assert "secret-7" not in str(conf)
    assert not {"ollama_url", "skip_refused"} & set(conf)
    assert conf_of(site.job(ollama_url="http://box:1", skip_refused=True), MLFLOW)["ollama_url"] == "http://box:1"


# following


def test_a_run_of_two_models_is_told_as_one_job(site: Site) -> None:
    job = site.job()
    site.runner.start(job)
    seen = site.ended(job)
    assert seen.links == {
        "airflow": f"{site.airflow.url}/dags/{DAG}/runs/{run_id_of(job)}",
        "mlflow": f"{MLFLOW}/#/experiments/1",
    }
    events = site.events(job)
    assert [event for event in events if isinstance(event, wire.Started)] == [events[0]]
    assert events[-3:] == [
        wire.Memory(20, 1, 0.5, 2),
        wire.Collected("tip-bench-x", 4, 0, 4, 0, url=f"{MLFLOW}/#/experiments/1"),
        wire.Exit(0),
    ]
    log = site.runner.log(job).text
    assert "[collect alpha:1b] collecting alpha:1b" in log
    assert "cell_finished" not in log
    assert "[airflow] compare: success" in log


def test_a_model_that_fails_fails_the_job_and_is_named(site: Site) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    seen = site.ended(job)
    assert (seen.state, seen.exit_code, seen.reason) == (JobState.FAILED, 2, "beta:1b is too large.")
    assert site.events(job)[-2:] == [wire.Failure("beta:1b is too large."), wire.Exit(2)]


def test_several_models_that_fail_are_all_named(site: Site) -> None:
    site.failing |= {"alpha:1b", "beta:1b"}
    job = site.job()
    site.runner.start(job)
    assert site.ended(job).reason == "alpha:1b: alpha:1b is too large.; beta:1b: beta:1b is too large."


def test_logs_without_events_still_make_a_job(site: Site) -> None:
    def silent(model: str, log: list[str]) -> int:
        log.append(f"{model} is done")
        return 0

    site.airflow.collecting = silent
    job = site.job()
    site.runner.start(job)
    assert site.ended(job).state is JobState.SUCCEEDED
    assert site.events(job)[-1] == wire.Exit(0)
    assert "alpha:1b is done" in site.runner.log(job).text


@pytest.mark.parametrize("line", ['{"at": 1', '{"at": "x", "event": "bomb"}', '{"at": [], "event": []}', "{" * 5000])
def test_what_only_looks_like_an_event_is_a_line_of_the_log(site: Site, line: str) -> None:
    def odd(model: str, log: list[str]) -> int:
        log.append(line)
        return story(model, log)

    site.airflow.collecting = odd
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    assert site.ended(job).state is JobState.SUCCEEDED
    assert line[:20] in site.runner.log(job).text


def test_a_change_of_airflows_key_loses_and_repeats_no_event(site: Site) -> None:
    go = [False]

    def slow(model: str, log: list[str]) -> int:
        told(log, wire.Started("1"), wire.BlockStarted(model, 2), wire.CellFinished(model, "v1", "a", 1, 2))
        deadline = time.monotonic() + 30
        while not go[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        told(log, wire.CellFinished(model, "v1", "b", 2, 2), wire.BlockFinished(model), wire.Exit(0))
        return 0

    site.airflow.collecting = slow
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    deadline = time.monotonic() + 30
    while not any(isinstance(event, wire.CellFinished) for event in site.events(job)):
        assert time.monotonic() < deadline
    site.airflow.runs[run_id_of(job)].key = "another"
    go[0] = True
    site.ended(job)
    assert [event.done for event in site.events(job) if isinstance(event, wire.CellFinished)] == [1, 2]


def test_what_a_dead_panel_wrote_without_saving_is_written_anew(site: Site) -> None:
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    file = site.home / "jobs" / job.id / "events.jsonl"
    with file.open("ab") as events:
        events.write(event_line(wire.CellFinished("alpha:1b", "v1", "s1", 1, 2), 1.0) + b'{"at": "half')
    site.ended(job)
    assert [event.done for event in site.events(job) if isinstance(event, wire.CellFinished)] == [1, 2]


def test_airflow_away_in_mid_run_is_lost_then_found_and_nothing_is_missing(site: Site) -> None:
    site.airflow.pools.clear()
    job = site.job()
    with Supervisor(site.store, {"airflow": site.runner}, site.home / "jobs" / "lock", tick_s=0.02):
        wait_for(site, job, JobState.RUNNING)
        site.airflow.fault = "away"
        wait_for(site, job, JobState.LOST)
        assert "Is its API server running?" in site.store.get(job.id).reason
        site.airflow.pools.add("ollama")
        time.sleep(0.2)
        site.airflow.fault = ""
        wait_for(site, job, JobState.SUCCEEDED)
    assert sum(isinstance(event, wire.CellFinished) for event in site.events(job)) == 4
    assert site.store.get(job.id).links["airflow"].endswith(run_id_of(job))


def wait_for(site: Site, job: Job, state: JobState) -> None:
    deadline = time.monotonic() + 30
    while (now := site.store.get(job.id)).state is not state:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)


def test_a_missing_pool_is_named_once_and_the_run_goes_on_when_it_is_there(site: Site) -> None:
    site.airflow.pools.clear()
    job = site.job()
    site.runner.start(job)
    seen = site.until(job, lambda seen: "pool" in seen.reason)
    assert seen.state is JobState.RUNNING
    assert "Airflow has no pool ollama" in seen.reason
    assert "`airflow pools set ollama 1 tipbench`" in seen.reason
    site.runner.observe(job)
    site.airflow.pools.add("ollama")
    assert site.ended(job).reason == ""
    warnings = [event for event in site.events(job) if isinstance(event, wire.Message) and event.warning]
    assert len(warnings) == 1


def test_a_dag_that_is_paused_after_the_trigger_is_told(site: Site) -> None:
    site.airflow.pause_on_trigger = True
    job = site.job()
    site.runner.start(job)
    seen = site.until(job, lambda seen: "is paused in Airflow" in seen.reason)
    assert seen.state is JobState.RUNNING
    site.airflow.paused = False
    assert site.ended(job).state is JobState.SUCCEEDED


# the judge


def test_a_job_waits_for_the_judge_and_goes_on_when_no_cell_is_pending(site: Site) -> None:
    site.cells.waiting = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    seen = site.until(job, lambda seen: seen.state is JobState.WAITING)
    seen = site.until(job, lambda seen: bool(seen.reason))
    assert seen.reason == "4 cells wait for a judge."
    assert site.airflow.asked("PATCH", "hitlDetails") == 0
    site.cells.waiting = 0
    assert site.ended(job).state is JobState.SUCCEEDED
    assert site.airflow.asked("PATCH", "hitlDetails") >= 1


def test_somebody_who_answers_in_airflow_is_as_good(site: Site) -> None:
    site.cells.waiting = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.until(job, lambda seen: seen.state is JobState.WAITING)
    site.airflow.runs[run_id_of(job)].judged({"chosen_options": ["Compare now"]})
    assert site.ended(job).state is JobState.SUCCEEDED


def test_an_mlflow_that_is_away_keeps_the_job_waiting(site: Site) -> None:
    site.cells.trouble = MlflowAway("MLflow cannot be reached.")
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    seen = site.until(job, lambda seen: "cannot be seen" in seen.reason)
    assert seen.state is JobState.WAITING
    assert "MLflow cannot be reached." in seen.reason
    site.cells.trouble = None
    assert site.ended(job).state is JobState.SUCCEEDED


def test_a_job_that_waits_can_be_cancelled(site: Site) -> None:
    site.cells.waiting = 4
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.until(job, lambda seen: seen.state is JobState.WAITING)
    site.runner.cancel(job)
    seen = site.ended(job)
    assert (seen.state, seen.exit_code) == (JobState.CANCELLED, 130)


def test_a_waiting_job_holds_nothing_that_others_need(site: Site) -> None:
    site.cells.waiting = 4
    first, second = site.job(wait_for_judge=True), site.job()
    with Supervisor(site.store, {"airflow": site.runner}, site.home / "jobs" / "lock", tick_s=0.02):
        wait_for(site, first, JobState.WAITING)
        wait_for(site, second, JobState.SUCCEEDED)
        assert site.store.get(first.id).state is JobState.WAITING


# retrying


def retried(site: Site, job: Job) -> Job:
    """The new job; the old one is on the list as it was seen."""
    for state in (JobState.RUNNING, site.runner.observe(job).state):
        site.store.move(job.id, site.store.get(job.id).state, state)
    return retry(site.store, job.id).job


def test_a_retry_has_only_what_failed_done_again_in_the_same_run(site: Site) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    site.ended(job)
    site.failing.clear()
    again = retried(site, job)
    site.runner.start(again)
    assert site.ended(again).state is JobState.SUCCEEDED
    assert list(site.airflow.runs) == [run_id_of(job)]
    models = {event.model for event in site.events(again) if isinstance(event, wire.CellFinished)}
    assert models == {"beta:1b"}
    assert [task.attempt for task in site.airflow.runs[run_id_of(job)].tasks if task.model] == [1, 2]


def test_a_retry_that_is_started_twice_clears_once(site: Site) -> None:
    site.failing.add("beta:1b")
    job = site.job()
    site.runner.start(job)
    site.ended(job)
    again = retried(site, job)
    for _ in range(3):
        site.runner.start(again)
    assert site.ended(again).state is JobState.FAILED
    assert site.airflow.asked("POST", "clearTaskInstances") == 1


def test_a_retry_of_a_cancelled_job_is_a_run_of_its_own(site: Site) -> None:
    site.cells.waiting = 1
    job = site.job(wait_for_judge=True)
    site.runner.start(job)
    site.until(job, lambda seen: seen.state is JobState.WAITING)
    site.runner.cancel(job)
    site.ended(job)
    site.cells.waiting = 0
    again = retried(site, job)
    site.runner.start(again)
    assert site.ended(again).state is JobState.SUCCEEDED
    assert list(site.airflow.runs) == [run_id_of(job), run_id_of(again)]
