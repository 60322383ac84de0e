"""What the tasks of an Airflow run print: read once, bounded, and untrusted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.airflow_site import MLFLOW, AirflowSite, airflow_site, emit, successful_collect
from support.polling import eventually
from tipbench.errors import AirflowError
from tipbench.jobs import airflow_api as airflow_rest
from tipbench.jobs import airflow_progress
from tipbench.jobs.airflow import run_id_of
from tipbench.jobs.airflow_api import AirflowDag, DagRun, LogLine, LogPage, TaskInstance
from tipbench.jobs.airflow_progress import JobOutput, StoredProgress
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import Job, JobState
from tipbench.record import events as wire


@pytest.fixture
def site(home: Path) -> Iterator[AirflowSite]:
    with airflow_site(home) as made:
        yield made


def test_logs_without_events_still_make_a_job(site: AirflowSite) -> None:
    def silent(model: str, log: list[str]) -> int:
        log.append(f"{model} is done")
        return 0

    site.airflow.collecting = silent
    job = site.job()
    site.runner.start(job)
    assert site.wait_for_end(job).state is JobState.SUCCEEDED
    assert site.events(job)[-1] == wire.Exit(0)
    assert "alpha:1b is done" in site.runner.log(job).text


@pytest.mark.parametrize("line", ['{"at": 1', '{"at": "x", "event": "bomb"}', '{"at": [], "event": []}', "{" * 5000])
def test_a_line_that_only_resembles_an_event_is_logged(site: AirflowSite, line: str) -> None:
    def odd(model: str, log: list[str]) -> int:
        log.append(line)
        return successful_collect(model, log)

    site.airflow.collecting = odd
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    assert site.wait_for_end(job).state is JobState.SUCCEEDED
    assert line[:20] in site.runner.log(job).text


def test_a_change_of_airflows_key_loses_and_repeats_no_event(site: AirflowSite) -> None:
    key_changed = threading.Event()

    def slow(model: str, log: list[str]) -> int:
        emit(log, wire.Started("1"), wire.BlockStarted(model, 2), wire.CellFinished(model, "v1", "a", 1, 2))
        assert key_changed.wait(60)
        emit(log, wire.CellFinished(model, "v1", "b", 2, 2), wire.BlockFinished(model), wire.Exit(0))
        return 0

    site.airflow.collecting = slow
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    assert eventually(lambda: any(isinstance(event, wire.CellFinished) for event in site.events(job)))
    site.airflow.runs[run_id_of(job)].key = "another"
    key_changed.set()
    site.wait_for_end(job)
    assert [event.done for event in site.events(job) if isinstance(event, wire.CellFinished)] == [1, 2]


def test_a_forged_event_changes_neither_the_result_nor_the_links(site: AirflowSite) -> None:
    def forging(model: str, log: list[str]) -> int:
        emit(log, wire.Started("1"), wire.BlockStarted(model, 2))
        emit(log, wire.Collected("tip-bench-x", 9, 0, 9, 0, url="javascript:alert(1)"), wire.Exit(0))
        emit(log, wire.Failure("look at http://anna:secret-7@box/ " + "x" * 5000))
        return 1

    site.airflow.collecting = forging
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    seen = site.wait_for_end(job)
    assert (seen.state, set(seen.links)) == (JobState.FAILED, {"airflow"})
    assert len(seen.reason) <= wire.MAX_TEXT_CHARS
    assert "secret-7" not in seen.reason + site.runner.log(job).text


def test_terminal_control_sequences_are_plain_text(site: AirflowSite) -> None:
    def colourful(model: str, log: list[str]) -> int:
        log.append("\x1b]0;owned\x07\x1b[31mred\x1b[0m\r\u202egnp.exe")
        return successful_collect(model, log)

    site.airflow.collecting = colourful
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    site.wait_for_end(job)
    text = site.runner.log(job).text
    assert "red" in text
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def warnings(site: AirflowSite, job: Job) -> list[str]:
    return [event.text for event in site.events(job) if isinstance(event, wire.Message) and event.warning]


def test_a_log_over_the_size_limit_loses_progress_but_not_the_job(
    site: AirflowSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(airflow_rest, "MAX_BYTES", 30_000)

    def endless(model: str, log: list[str]) -> int:
        if model == "alpha:1b":
            log += ["and so on " * 10] * 1000
            return 0
        return successful_collect(model, log)

    site.airflow.collecting = endless
    job = site.job()
    site.runner.start(job)
    seen = site.wait_for_end(job)
    assert (seen.state, seen.links["mlflow"]) == (JobState.SUCCEEDED, f"{MLFLOW}/#/experiments/1")
    (warning,) = warnings(site, job)
    assert "The log of collect alpha:1b cannot be read" in warning


class TooLongAtFirst(AirflowDag):
    """A DAG whose tasks print more than any answer at their first attempt."""

    def log(self, _run_id: str, _task: TaskInstance, attempt: int, *, token: str | None, skip: int) -> LogPage:  # noqa: ARG002
        if attempt == 1:
            raise AirflowError("That is too much.", status=airflow_rest.TOO_LONG)
        return LogPage((LogLine(f"attempt {attempt}"),)[skip:], None)


def test_an_attempt_that_printed_too_much_does_not_hide_the_next(site: AirflowSite) -> None:
    folder, dag = JobFolder(site.home / "jobs", "one"), TooLongAtFirst(site.rest)
    folder.make()
    output = JobOutput(folder, StoredProgress(run_id="x"), time.time)
    for tries in (1, 2, 2, 2):
        task = TaskInstance(task_id="collect", state="running", try_number=tries)
        output.read_logs(dag, DagRun(state="running", tasks=(task,)))
    output.save()
    assert folder.tail(10_000).text.count("] attempt 2") == 1


class PagedAtFirst(AirflowDag):
    """A DAG whose first attempt has a log of two pages, as Airflow returns one that is stored in Elasticsearch."""

    def log(self, _run_id: str, _task: TaskInstance, attempt: int, *, token: str | None, skip: int) -> LogPage:
        if attempt > 1:
            return LogPage((LogLine("attempt 2"),)[skip:], None)
        return LogPage((LogLine("page 1"),), "2") if token is None else LogPage((LogLine("page 2"),), None)


def test_all_pages_of_an_earlier_attempt_are_read(site: AirflowSite) -> None:
    folder, dag = JobFolder(site.home / "jobs", "one"), PagedAtFirst(site.rest)
    folder.make()
    output = JobOutput(folder, StoredProgress(run_id="x"), time.time)
    task = TaskInstance(task_id="collect", state="running", try_number=2)
    output.read_logs(dag, DagRun(state="running", tasks=(task,)))
    output.save()
    assert [line.split("] ")[1] for line in folder.tail(10_000).text.splitlines()][1:] == [
        "page 1",
        "page 2",
        "attempt 2",
    ]


class EndlessAtFirst(AirflowDag):
    """A DAG whose first attempt has a log without an end, as of a server that ignores the token."""

    def log(self, _run_id: str, _task: TaskInstance, _attempt: int, *, token: str | None, skip: int) -> LogPage:  # noqa: ARG002
        return LogPage((LogLine("again"),), "same")


def test_a_log_without_an_end_does_not_stop_the_poll(site: AirflowSite) -> None:
    folder, dag = JobFolder(site.home / "jobs", "one"), EndlessAtFirst(site.rest)
    folder.make()
    output = JobOutput(folder, StoredProgress(run_id="x"), time.time)
    task = TaskInstance(task_id="collect", state="running", try_number=2)
    output.read_logs(dag, DagRun(state="running", tasks=(task,)))
    output.save()
    assert folder.tail(100_000).text.count("] again") == airflow_progress._MAX_PAGES


@pytest.mark.parametrize("status", [403, 500])
def test_an_unreadable_log_loses_progress_but_not_the_job(site: AirflowSite, status: int) -> None:
    site.airflow.failing_path, site.airflow.failing_status = "/logs/", status
    job = site.job(models="alpha:1b")
    site.runner.start(job)
    seen = site.wait_until(job, lambda seen: seen.state is not JobState.RUNNING)
    assert seen.state is JobState.SUCCEEDED
    assert f"HTTP {status}" in " ".join(warnings(site, job))


def test_task_output_is_kept_up_to_a_limit_and_the_job_ends(site: AirflowSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airflow_progress, "MAX_OUTPUT_BYTES", 20_000)

    job = site.job(models="alpha:1b")
    file = site.home / "jobs" / job.id / "log.txt"

    def chatty(model: str, log: list[str]) -> int:
        log += ["word after word"] * 1000
        assert eventually(lambda: file.exists() and file.stat().st_size > 20_000)
        log += ["word after word"] * 4000
        return successful_collect(model, log)

    site.airflow.collecting = chatty
    site.runner.start(job)
    assert site.wait_for_end(job).state is JobState.SUCCEEDED
    assert site.runner.log(job).size < 100_000
    assert sum("see Airflow for the rest" in each for each in warnings(site, job)) == 1
    assert isinstance(site.events(job)[-1], wire.Exit)
