"""Converts the task logs of a DAG run into the events and the log of one job.

A task's log contains the events of its command as JSON lines, mixed with other output. The start, exit and totals
events of all tasks are merged, so that the job has one of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tipbench.errors import AirflowError, AirflowUnavailable
from tipbench.files import convert_home_errors, open_private, write_atomic
from tipbench.jobs.airflow_api import TASK_ENDED, TOO_LONG, AirflowDag, DagRun, LogLine, TaskInstance
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import JobState, JobStatus
from tipbench.record import events
from tipbench.record.events import event_json, event_line, parse_line

MAX_OUTPUT_BYTES = 64 * 1024 * 1024  # of all tasks of a job together; a collect of 10 000 cells prints 3 MB
_PROGRESS_FILE = "airflow.json"
_MAX_AWAITED_SERVERS = 10  # per task
_MAX_PAGES = 100  # of a task's log per poll; the next poll continues
# Not copied from the tasks: the job emits these itself, once.
_MERGED_EVENTS = (events.Started, events.Collected, events.Evidence, events.Failure, events.Exit)


class LogPosition(BaseModel):
    """How far a task's log has been read."""

    model_config = ConfigDict(populate_by_name=True)

    attempt: int = 1
    lines: int = 0  # read of this attempt's log
    token: str | None = None  # requests the next page
    is_complete: bool = Field(False, alias="over")  # the whole log has been read


class TaskTotals(BaseModel):
    """Totals of one task: of its current attempt, except `memory` and `answered_before`."""

    collected: events.Collected | None = None
    memory: events.Evidence | None = None  # about the models in memory, over all attempts
    answered: int = 0  # cells
    answered_before: int = 0  # cells of earlier attempts
    failure: str = ""
    exit_code: int | None = None
    waiting: list[str] = Field(default_factory=list)  # servers it waits for
    recording: bool = False  # some cells are still being recorded


class StoredProgress(BaseModel):
    """The Airflow runner's state of a job. Any process that shares the home folder can continue from it.

    An alias is the key in the file. Dictionaries are keyed by `TaskInstance.key`, except `links`.
    """

    model_config = ConfigDict(populate_by_name=True)

    run_id: str = ""  # set before the trigger request is sent
    triggered: bool = False  # the DAG run exists in Airflow
    # Number of attempts made by earlier jobs. A retry is a new job that continues the DAG run of the failed one.
    earlier_attempts: dict[str, int] = Field(default_factory=dict, alias="base")
    log_positions: dict[str, LogPosition] = Field(default_factory=dict, alias="places")
    totals: dict[str, TaskTotals] = Field(default_factory=dict, alias="tallies")
    states: dict[str, str | None] = Field(default_factory=dict)  # as last logged
    warnings: list[str] = Field(default_factory=list, alias="told")  # already emitted
    events_size: int = 0  # bytes of the event file
    log_size: int = 0  # bytes of the log
    polled_at: float = Field(0.0, alias="looked")  # of the last poll of Airflow
    checked_at: float = Field(0.0, alias="checked")  # of the last check of the DAG, its pools and the pending cells
    ended_since: float | None = None  # when the DAG run was first seen to have ended
    state: JobState | None = None
    exit_code: int | None = None
    reason: str = ""
    links: dict[str, str] = Field(default_factory=dict)

    def has_attempts(self, task: TaskInstance) -> bool:
        """Return whether the task has run for this job, and not only for earlier jobs in the same DAG run."""
        return task.try_number > self.earlier_attempts.get(task.key, 0)

    @property
    def status(self) -> JobStatus:
        """The last observed status."""
        return JobStatus(self.state or JobState.RUNNING, self.exit_code, self.reason, dict(self.links))

    def set_status(self, status: JobStatus) -> None:
        """Store an observed status."""
        self.state, self.exit_code = status.state, status.exit_code
        self.reason, self.links = status.reason, dict(status.links)


def read_progress(folder: JobFolder) -> StoredProgress:
    """Return the stored state, or an empty one if the file is missing or invalid."""
    try:
        return StoredProgress.model_validate_json((folder.path / _PROGRESS_FILE).read_bytes())
    except (OSError, ValidationError):
        return StoredProgress()


def write_progress(folder: JobFolder, stored: StoredProgress) -> None:
    """Save the state atomically."""
    with convert_home_errors(folder.path, "cannot be written"):
        folder.make()
        write_atomic(folder.path / _PROGRESS_FILE, stored.model_dump_json(by_alias=True).encode())


class JobOutput:
    """The events and the log of a job, buffered until `save`.

    Output beyond the stored sizes is from a process that crashed before it saved its state; `save` overwrites it.
    """

    def __init__(self, folder: JobFolder, stored: StoredProgress, clock: Callable[[], float]) -> None:
        self.stored = stored
        self._folder = folder
        self._clock = clock
        self._events: list[bytes] = []
        self._log: list[str] = []

    def read_logs(self, dag: AirflowDag, run: DagRun) -> None:
        """Read the new log lines of all tasks."""
        for task in run.tasks:
            if self.stored.states.get(task.key) != task.state:
                self.stored.states[task.key] = task.state
                if task.state:
                    self.log("airflow", f"{task.title}: {task.state}")
            if self.stored.has_attempts(task):
                self._read_task(dag, task)

    def _read_task(self, dag: AirflowDag, task: TaskInstance) -> None:
        """Read the new lines of a task's log. An unreadable log is a warning and does not change the job's outcome."""
        first_attempt = self.stored.earlier_attempts.get(task.key, 0) + 1
        position = self.stored.log_positions.setdefault(task.key, LogPosition(attempt=first_attempt))
        if position.attempt > task.try_number or (position.attempt == task.try_number and position.is_complete):
            return
        for _ in range(_MAX_PAGES):  # all pages of earlier attempts, then one page of the last attempt
            is_last_attempt = position.attempt == task.try_number
            try:
                page = dag.log(self.stored.run_id, task, position.attempt, token=position.token, skip=position.lines)
            except (AirflowUnavailable, AirflowError) as exc:
                self.warn_once(f"The log of {task.title} cannot be read: {exc} The run continues.")
                if not isinstance(exc, AirflowError) or exc.status != TOO_LONG:
                    return  # the next poll tries again
                is_complete = True  # it would be too long again
            else:
                self._read_lines(task, page.lines)
                position.lines += len(page.lines)
                position.token = page.token
                if is_last_attempt:
                    is_complete = page.token is None and task.state in TASK_ENDED
                else:  # some log stores return a token with the last page; the page after that is empty
                    is_complete = page.token is None or not page.lines
            if is_last_attempt:
                position.is_complete = is_complete
                return  # the next poll reads the next page
            if is_complete:
                self._next_attempt(task, position)

    def _next_attempt(self, task: TaskInstance, position: LogPosition) -> None:
        """Move to the start of the next attempt's log, and reset the totals that are counted per attempt."""
        position.attempt += 1
        position.lines, position.token, position.is_complete = 0, None, False
        totals = self.stored.totals.get(task.key)
        if totals is not None:
            self._close_waits(totals)
            totals.answered_before += totals.answered
            totals.answered = 0
            totals.collected, totals.failure, totals.exit_code = None, "", None
        self.emit(events.Message(f"{task.title}: attempt {position.attempt}; recorded cells are not generated again."))

    def _read_lines(self, task: TaskInstance, lines: Iterable[LogLine]) -> None:
        totals = self.stored.totals.setdefault(task.key, TaskTotals())
        for line in lines:
            content = line.text.strip().encode("utf-8", "backslashreplace")
            parsed = parse_line(content) if content.startswith(b'{"at"') else None
            if parsed is None:
                self._log_task(task, line.text)
                if line.error:
                    self._log_task(task, line.error)
                    totals.failure = totals.failure or line.error
                continue
            at, event = parsed
            self._update_totals(totals, event, task)
            if not isinstance(event, _MERGED_EVENTS) and not self._warn_if_full():
                # Serialized again, because a task is not trusted: event_json removes logins and truncates strings.
                self._events.append(json.dumps({"at": at, **event_json(event)}).encode("ascii") + b"\n")

    def _update_totals(self, totals: TaskTotals, event: events.Event, task: TaskInstance) -> None:
        if isinstance(event, events.Collected):
            totals.collected = event
        elif isinstance(event, events.Evidence):
            totals.memory = event if totals.memory is None else merged_memory([totals.memory, event])
        elif isinstance(event, events.Failure):
            totals.failure = event_json(event)["text"]  # without logins, and truncated
            self._log_task(task, totals.failure)
        elif isinstance(event, events.Exit):
            totals.exit_code = event.code
            self._close_waits(totals)
        elif isinstance(event, events.Waiting):
            totals.waiting = list(dict.fromkeys([*totals.waiting, event.what]))[:_MAX_AWAITED_SERVERS]
        elif isinstance(event, events.Resumed):
            totals.waiting = [server for server in totals.waiting if server != event.what]
        elif isinstance(event, events.Recording):
            totals.recording = event.left > 0
        elif isinstance(event, events.CellFinished) and event.failure is None:
            totals.answered += 1

    def _close_waits(self, totals: TaskTotals) -> None:
        """Emit the events that end the waits and the recording of an attempt."""
        for server in totals.waiting:
            self.emit(events.Resumed(server))
        if totals.recording:
            self.emit(events.Recording(0))
        totals.waiting, totals.recording = [], False

    def emit(self, event: events.Event) -> None:
        """Buffer an event of the job."""
        self._events.append(event_line(event, self._clock()))

    def warn_once(self, text: str) -> None:
        """Buffer a warning, unless the same text was emitted before."""
        if text not in self.stored.warnings:
            self.stored.warnings.append(text)
            self.emit(events.Message(text, warning=True))
            self.log("airflow", text)

    def log(self, source: str, text: str) -> None:
        """Buffer text for the log, each line prefixed with its source."""
        self._log += [f"[{source}] {line}" for line in text.splitlines()]

    def _log_task(self, task: TaskInstance, text: str) -> None:
        if not self._warn_if_full():
            self.log(task.title, text)

    def _warn_if_full(self) -> bool:
        """Return whether the stored output exceeds MAX_OUTPUT_BYTES; if so, warn once."""
        if self.stored.events_size + self.stored.log_size <= MAX_OUTPUT_BYTES:
            return False
        size_mb = MAX_OUTPUT_BYTES // 2**20
        self.warn_once(f"The job's tasks have printed more than {size_mb} MB; see Airflow for the rest.")
        return True

    def close(self, status: JobStatus) -> None:
        """Buffer the merged totals, the failure if any, and the exit event."""
        all_totals = list(self.stored.totals.values())
        if memory := merged_memory([totals.memory for totals in all_totals if totals.memory is not None]):
            self.emit(memory)
        if collected := merged_collected(all_totals):
            self.emit(collected)
        if status.state is JobState.FAILED:
            self.emit(events.Failure(status.reason))
        self.emit(events.Exit(status.exit_code if status.exit_code is not None else 1))

    def save(self) -> None:
        """Write the buffered output, then the state with the new file sizes."""
        text = "".join(f"{line}\n" for line in self._log).encode("utf-8", "backslashreplace")
        self.stored.events_size = _write_at(self._folder.events_file, self.stored.events_size, b"".join(self._events))
        self.stored.log_size = _write_at(self._folder.log_file, self.stored.log_size, text)
        self._events, self._log = [], []
        write_progress(self._folder, self.stored)


def merged_memory(evidence: list[events.Evidence]) -> events.Evidence | None:
    """Merge the memory events of several tasks; returns None for an empty list."""
    if not evidence:
        return None
    return events.Evidence(
        samples=sum(each.samples for each in evidence),
        most_resident=max(each.most_resident for each in evidence),
        largest_gap_s=max(each.largest_gap_s for each in evidence),
        handovers=sum(each.handovers for each in evidence),
        unknown_samples=sum(each.unknown_samples for each in evidence),
        foreign=tuple(sorted({name for each in evidence for name in each.foreign})),
    )


def merged_collected(all_totals: list[TaskTotals]) -> events.Collected | None:
    """Merge the totals of collect tasks. Cells that earlier attempts of this job recorded count as generated."""
    collected = [totals.collected for totals in all_totals if totals.collected is not None]
    if not collected:
        return None
    # The last attempt of a task counts the cells of its earlier attempts as recorded before.
    generated_earlier = sum(
        min(totals.answered_before, totals.collected.recorded_before)
        for totals in all_totals
        if totals.collected is not None
    )
    seconds = [each.seconds for each in collected if each.seconds is not None]
    return events.Collected(
        experiment=collected[0].experiment,
        cells=sum(each.cells for each in collected),
        recorded_before=sum(each.recorded_before for each in collected) - generated_earlier,
        generated=sum(each.generated for each in collected) + generated_earlier,
        failed=sum(each.failed for each in collected),
        refused=tuple(dict.fromkeys(reason for each in collected for reason in each.refused)),
        seconds=sum(seconds) if seconds else None,
        url=next((each.url for each in collected if each.url), None),
    )


def _write_at(path: Path, size: int, content: bytes) -> int:
    """Replace everything from byte `size` on and return the new size. Empty content changes nothing."""
    if not content:
        return size
    with convert_home_errors(path, "cannot be written"), os.fdopen(open_private(path), "r+b") as file:
        file.truncate(size)
        file.seek(size)
        file.write(content)
    return size + len(content)
