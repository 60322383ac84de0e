"""Airflow runner: each job is a DAG run, and its status is stored in the job's folder, as for a local job.

One process at a time polls Airflow; all others read the stored status. So page views send no requests to Airflow and
work during an outage of Airflow, and a restarted panel continues from the stored status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from tipbench.errors import AirflowError, AirflowUnavailable, JobStartError, NotEnoughData, TipbenchError
from tipbench.files import file_lock
from tipbench.http import is_http_url
from tipbench.jobs.airflow_api import (
    COMPARE,
    DEFAULT_POOL,
    TASK_FAILED,
    TASK_PARKED,
    TASK_UNSTARTED,
    WAIT,
    AirflowApi,
    AirflowDag,
    DagRun,
    TaskInstance,
)
from tipbench.jobs.airflow_progress import JobOutput, StoredProgress, merged_collected, read_progress, write_progress
from tipbench.jobs.folder import JobFolder, read_events
from tipbench.jobs.job import ENDED, Job, JobKind, JobState, JobStatus, LogTail, RecordedEvent
from tipbench.jobs.progress import refused_text
from tipbench.record import events
from tipbench.text import plural

POLL_S = 2.0  # between polls of a running DAG run
_SLOW_POLL_FACTOR = 5  # multiplies the poll interval of waiting and lost runs
CHECK_S = 15.0  # between checks for a missing pool, a paused DAG or cells pending judgement
RESEND_CANCEL_S = 120.0  # after which a cancel request is sent again
SETTLE_S = 15.0  # how long to wait for the last log lines after a run has ended
_CANCELLED_CODE = 130  # exit code of an interrupted command
_FORBIDDEN = 403
_MAX_NAMED = 3  # failed tasks named in a reason
_ALL_JUDGED = "Every cell is judged; Airflow continues with the comparison."


class MlflowLookup(Protocol):
    """The data that the runner reads from MLflow."""

    def address(self, job: Job) -> str:
        """Return the URL of the server that the job's workers use. Raises NotEnoughData if there is none."""
        ...

    def pending(self, job: Job) -> int:
        """Return the number of the job's cells that are not judged yet."""
        ...


class AirflowRunner:
    """Runs collect jobs as DAG runs; all state is on disk, so any process that shares the home folder can use it."""

    name = "airflow"

    def __init__(
        self,
        home: Path,
        api: AirflowApi,
        mlflow: MlflowLookup,
        *,
        poll_s: float = POLL_S,
        check_s: float = CHECK_S,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = home / "jobs"
        self._dag = AirflowDag(api)
        self._api = api
        self._mlflow = mlflow
        self._poll_s, self._check_s, self._settle_s = poll_s, check_s, settle_s
        self._clock = clock
        self._paused_error, self._paused_error_until = "", 0.0  # cached by _check_unpaused

    def close(self) -> None:
        """Close the connections to Airflow; DAG runs continue."""
        self._api.close()

    # Start and cancel

    def start(self, job: Job) -> None:
        """Trigger a DAG run, once. A retry of a failed job clears the failed tasks of that job's DAG run instead."""
        if job.kind is not JobKind.COLLECT:
            raise JobStartError(f"Airflow runs collects; a {job.kind} runs on the panel's own machine.")
        folder = self._folder(job)
        with folder.locked():
            stored = read_progress(folder)
            if stored.triggered or folder.start_forbidden:
                return
            if not self._resume(job, folder, stored):
                try:
                    conf = conf_of(job, self._mlflow.address(job))
                except NotEnoughData as exc:
                    raise JobStartError(
                        "A run in Airflow needs an MLflow that its workers and the panel reach, and there is none yet. "
                        "Set MLFLOW_TRACKING_URI, or start one with `tipbench mlflow up`, and retry."
                    ) from exc
                self._check_unpaused()
                stored.run_id = run_id_of(job)
                write_progress(folder, stored)  # before the request: its response may be lost
                self._dag.trigger(stored.run_id, conf, f"tipbench job {job.id}")
            stored.triggered = True
            output = JobOutput(folder, stored, self._clock)
            output.emit(events.Started("airflow"))
            output.log("airflow", f"run {stored.run_id} for {job.experiment}: {self._dag.run_url(stored.run_id)}")
            if job.private:  # the URLs with a login
                output.warn_once(
                    "A login in an address is not sent to Airflow, which would show it; Airflow's workers use the one "
                    "in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
                )
            output.save()

    def _check_unpaused(self) -> None:
        """Raise AirflowUnavailable if the DAG is paused. The error is cached, because the queue retries often."""
        if self._clock() < self._paused_error_until:
            raise AirflowUnavailable(self._paused_error)
        try:
            self._dag.check_unpaused()
        except AirflowUnavailable as exc:
            self._paused_error, self._paused_error_until = str(exc), self._clock() + self._poll_s
            raise

    def _resume(self, job: Job, folder: JobFolder, stored: StoredProgress) -> bool:
        """Clear the failed tasks of the retried job's DAG run, so that it continues.

        Returns False, without changes, if this job is not a retry or that DAG run cannot be continued.
        """
        # An interrupted call of `start` may have triggered a DAG run for this job.
        if job.retry_of is None or stored.run_id == run_id_of(job):
            return False
        previous = read_progress(JobFolder(self._jobs, job.retry_of))
        if previous.state is not JobState.FAILED or not previous.run_id:
            return False
        run = self._dag.get_run(previous.run_id)
        if run is None:
            return False
        failed_tasks = [task for task in run.tasks if task.state in TASK_FAILED]
        was_interrupted = stored.run_id == previous.run_id  # an earlier call of `start` was, after the write below
        if not run.has_ended or not failed_tasks:
            return was_interrupted  # if so, that call has already cleared the tasks
        if not was_interrupted:
            stored.run_id = previous.run_id
            stored.earlier_attempts = {task.key: task.try_number for task in run.tasks}
            write_progress(folder, stored)
        self._dag.clear(stored.run_id, failed_tasks)
        return True

    def cancel(self, job: Job) -> None:
        """Mark the DAG run as failed: its tasks get SIGTERM, and its teardown tasks still run.

        The request is sent again if the run has not ended after RESEND_CANCEL_S.
        """
        folder = self._folder(job)
        with folder.locked():
            stored = read_progress(folder)
            if not stored.run_id:
                folder.forbid_start()
                return
        if stored.state in ENDED:
            return
        cancel_sent, now = folder.cancel_sent_at, self._clock()
        if cancel_sent is not None and now - cancel_sent < RESEND_CANCEL_S:
            return
        run = self._dag.get_run(stored.run_id)
        if run is None and not stored.triggered:
            folder.forbid_start()
        elif run is not None and not run.has_ended:
            try:
                self._dag.cancel(stored.run_id)
            except AirflowError as exc:  # if the run has ended or was deleted, the next poll shows that
                if exc.status == _FORBIDDEN:
                    self._warn(folder, f"{exc} Cancel the run in Airflow, or give tipbench's user the role op.")
            folder.save_cancel_sent(now)

    def _warn(self, folder: JobFolder, text: str) -> None:
        """Save a warning, unless another process is polling Airflow for this job."""
        with self._poll_lock(folder) as locked:
            if locked:
                output = JobOutput(folder, read_progress(folder), self._clock)
                output.warn_once(text)
                output.save()

    def forget(self, job: Job) -> None:
        """Remove the job's folder; Airflow keeps its history. Raises TipbenchError while the DAG run is active."""
        folder = self._folder(job)
        stored = read_progress(folder)
        if stored.triggered and stored.state not in ENDED | {JobState.LOST}:  # LOST: the run was deleted in Airflow
            raise TipbenchError(f"The DAG run of {job.id} is still running; its folder is kept.")
        folder.remove()

    # Status

    def observe(self, job: Job) -> JobStatus:
        """Return the job's status from Airflow, or the stored status if it is recent."""
        folder = self._folder(job)
        stored = read_progress(folder)
        if not stored.triggered:
            if folder.start_forbidden:
                return JobStatus(JobState.CANCELLED, reason="Cancelled before it was started.")
            if stored.run_id and self._dag.get_run(stored.run_id) is not None:
                self.start(job)  # completes a call that was interrupted after the trigger request
                return JobStatus(JobState.RUNNING)
            return JobStatus(JobState.LOST, reason=f"No DAG run recorded in {folder.path}.")
        if stored.state in ENDED or self._clock() - stored.polled_at < self._max_age(job, stored):
            return stored.status
        return self._poll(job, folder)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        self._refresh(job)
        return read_events(self._folder(job).events_file, after, limit)

    def log(self, job: Job, max_bytes: int = 65_536) -> LogTail:
        self._refresh(job)
        return self._folder(job).tail(max_bytes)

    def _refresh(self, job: Job) -> None:
        """Poll Airflow if the supervisor has not done so recently. Ignores errors: the supervisor reports them."""
        folder = self._folder(job)
        stored = read_progress(folder)
        # The supervisor polls when a status is _max_age old; twice that age means that it does not poll this job.
        overdue = self._clock() - stored.polled_at >= 2 * self._max_age(job, stored)
        if stored.triggered and stored.state not in ENDED and overdue and not self._api.is_failing:
            with suppress(TipbenchError):
                self._poll(job, folder)

    def _max_age(self, job: Job, stored: StoredProgress) -> float:
        """Return for how many seconds a stored status is valid."""
        may_last_weeks = stored.state in (JobState.WAITING, JobState.LOST) and job.cancel_requested is None
        return self._poll_s * (_SLOW_POLL_FACTOR if may_last_weeks else 1)

    def _poll(self, job: Job, folder: JobFolder) -> JobStatus:
        with self._poll_lock(folder) as locked:
            stored = read_progress(folder)
            if not locked or stored.state in ENDED:
                return stored.status
            output = JobOutput(folder, stored, self._clock)
            run = self._dag.get_run(stored.run_id)
            if run is not None:
                status = self._status_of(job, folder, output, run)
            elif job.cancel_requested is not None:
                status = JobStatus(JobState.CANCELLED, _CANCELLED_CODE, "Cancelled; Airflow no longer has the run.")
            else:
                reason = f"Airflow no longer has the run {stored.run_id}. Finished cells are kept; a retry continues."
                status = JobStatus(JobState.LOST, reason=reason, links=stored.links)
            if status.state in ENDED:
                output.close(status)
            stored.polled_at = self._clock()
            stored.set_status(status)
            output.save()
            return status

    def _status_of(self, job: Job, folder: JobFolder, output: JobOutput, run: DagRun) -> JobStatus:
        stored = output.stored
        output.read_logs(self._dag, run)
        links = {**stored.links, "airflow": self._dag.run_url(stored.run_id)}
        urls = (totals.collected.url for totals in stored.totals.values() if totals.collected is not None)
        if mlflow_url := next((url for url in urls if url and is_http_url(url)), None):
            links["mlflow"] = mlflow_url
        if run.has_ended and self._logs_complete(stored, run):
            # Check both, because a cancel may show in one only: `job` may have been read before the cancel request, and
            # `cancel_sent_at` is saved only after Airflow's response.
            cancelled = job.cancel_requested is not None or folder.cancel_sent_at is not None
            return _end_status(run, stored, links, cancelled=cancelled)
        wait_task = run.task(WAIT)
        if wait_task is not None and wait_task.state in TASK_PARKED:
            reason = self._continue_if_judged(job, output, wait_task)
            # The state is derived from the reason, which is the stored one if no check was due.
            state = JobState.RUNNING if reason == _ALL_JUDGED else JobState.WAITING
            return JobStatus(state, reason=reason, links=links)
        for task in run.tasks:
            totals = stored.totals.get(task.key)
            if task.state == "up_for_retry" and totals is not None and totals.failure:
                return JobStatus(JobState.RUNNING, reason=f"{totals.failure} Airflow tries again.", links=links)
        return JobStatus(JobState.RUNNING, reason=self._blocked_reason(output, run), links=links)

    def _logs_complete(self, stored: StoredProgress, run: DagRun) -> bool:
        """Return whether all ended collect tasks have logged an exit code, or had `settle_s` seconds to do so.

        Tasks that ran only for an earlier job in the same DAG run do not count.
        """
        collects = [task for task in run.tasks if task.is_collect and task.state in ("success", "failed")]
        totals_of_job = [stored.totals.get(task.key) for task in collects if stored.has_attempts(task)]
        if all(totals is not None and totals.exit_code is not None for totals in totals_of_job):
            return True
        if stored.ended_since is None:
            stored.ended_since = self._clock()
        return self._clock() - stored.ended_since >= self._settle_s  # a log may never arrive

    def _continue_if_judged(self, job: Job, output: JobOutput, wait_task: TaskInstance) -> str:
        """Continue the DAG run if no cell of the job is pending. Returns the reason to show."""
        if not self._begin_check_if_due(output.stored):
            return output.stored.reason
        try:
            n_pending = self._mlflow.pending(job)
        except TipbenchError as exc:  # MLflow is unavailable, but the job is not lost
            return f"The state of its cells cannot be read: {exc}"
        if n_pending:
            return f"{plural(n_pending, 'cell waits', 'cells wait')} for a judge."
        try:
            self._dag.respond(output.stored.run_id, wait_task)
        except AirflowError as exc:
            return f"Every cell is judged, but Airflow rejects the response to {WAIT}: {exc} Respond in Airflow."
        if output.stored.reason != _ALL_JUDGED:  # emit it once, although Airflow may continue only some polls later
            output.emit(events.Message(_ALL_JUDGED))
        return _ALL_JUDGED

    def _blocked_reason(self, output: JobOutput, run: DagRun) -> str:
        """Return the reason why no task is running, if an operator can remove it; else an empty string."""
        if any(task.state == "running" for task in run.tasks):
            return ""
        if not self._begin_check_if_due(output.stored):  # keep the last reason, unless it is of another state
            return output.stored.reason if output.stored.state is JobState.RUNNING else ""
        reason = ""
        with suppress(AirflowError):  # the user may lack permission to read pools
            pools = {task.pool for task in run.tasks if task.state in TASK_UNSTARTED} - {DEFAULT_POOL}
            if missing := self._dag.missing_pools(pools):
                reason = (
                    f"Airflow has no pool {missing[0]}, so its tasks never start. Create it with one slot: "
                    f"`airflow pools set {missing[0]} 1 tipbench`; the run then continues."
                )
            elif run.state == "queued" and self._dag.is_paused():
                reason = f"The DAG {self._dag.dag_id} is paused in Airflow; unpause it there to start the run."
        if reason:
            output.warn_once(reason)
        return reason

    def _begin_check_if_due(self, stored: StoredProgress) -> bool:
        """Return whether the last check is `check_s` seconds ago; if so, save the time of the check that begins."""
        if self._clock() - stored.checked_at < self._check_s:
            return False
        stored.checked_at = self._clock()
        return True

    def _folder(self, job: Job) -> JobFolder:
        return JobFolder(self._jobs, job.id)

    def _poll_lock(self, folder: JobFolder) -> AbstractContextManager[bool]:
        """Try to lock the job, so that one process at a time polls Airflow for it and writes its output."""
        return file_lock(folder.path / "turn", wait=False)


def run_id_of(job: Job) -> str:
    """Return the id of a job's DAG run. It is derived from the job, so that triggering twice starts one run."""
    return f"tipbench__{job.id}"


def conf_of(job: Job, mlflow_url: str) -> dict[str, Any]:
    """Return the conf of the DAG run. Options without a value are left out, so that defaults apply."""
    return {key: value for key, value in job.arguments.items() if value is not None} | {"mlflow_url": mlflow_url}


def _end_status(run: DagRun, stored: StoredProgress, links: dict[str, str], *, cancelled: bool) -> JobStatus:
    compare_task = run.task(COMPARE)
    # Once the comparison has succeeded, only teardown tasks are left, and a cancel does not stop those.
    if cancelled and (compare_task is None or compare_task.state != "success"):
        return JobStatus(JobState.CANCELLED, _CANCELLED_CODE, "Cancelled; finished cells are kept.", links)
    failed = [task for task in run.tasks if task.state == "failed"]
    if run.state == "success" and not any(task.is_collect for task in failed):
        reason = refused_text(merged_collected(list(stored.totals.values())))
        return JobStatus(JobState.SUCCEEDED, 0, reason, links)
    exit_code = next((totals.exit_code for totals in stored.totals.values() if totals.exit_code), 1)
    return JobStatus(JobState.FAILED, exit_code, _failure_reason(failed, stored), links)


def _failure_reason(failed: Sequence[TaskInstance], stored: StoredProgress) -> str:
    failures = []
    for task in failed:
        totals = stored.totals.get(task.key)
        if totals is not None and totals.failure:
            failures.append((task, totals.failure))
    # The failures of collects; if there are none, only the first failure of another task.
    shown = [(task, failure) for task, failure in failures if task.is_collect] or failures[:1]
    if not shown:
        names = ", ".join(task.title for task in failed[:_MAX_NAMED]) or "A task"
        return f"{names} failed in Airflow; see the log."
    if len(shown) == 1:
        [(_, failure)] = shown
        return failure
    listed = "; ".join(f"{task.rendered_map_index or task.title}: {failure}" for task, failure in shown[:_MAX_NAMED])
    unlisted = len(shown) - _MAX_NAMED
    return f"{listed}; and {unlisted} more" if unlisted > 0 else listed
