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
_MAX_WAITS = 10  # servers that are stored as waited for, per task
_MERGED_EVENTS = (events.Started, events.Collected, events.Evidence, events.Failure, events.Exit)  # one of each per job


class LogPosition(BaseModel):
    """How far a task's log has been read."""

    attempt: int = 1
    lines: int = 0  # read of this attempt's log
    token: str | None = None  # requests the next page
    over: bool = False  # the log was read to its end


class TaskTotals(BaseModel):
    """Totals of one task over all its attempts."""

    collected: events.Collected | None = None
    memory: events.Evidence | None = None
    answered: int = 0  # cells of this attempt
    answered_before: int = 0  # cells of earlier attempts
    failure: str = ""
    exit_code: int | None = None
    waiting: list[str] = Field(default_factory=list)  # servers it waits for
    recording: bool = False  # some cells are still being recorded


class StoredProgress(BaseModel):
    """The Airflow runner's state of a job. Any process that shares the home folder can continue from it.

    An alias is the key in the file.
    """

    model_config = ConfigDict(populate_by_name=True)

    run_id: str = ""  # set before the trigger request is sent
    triggered: bool = False  # the DAG run exists in Airflow
    # Dictionaries are by task.
    earlier_attempts: dict[str, int] = Field(default_factory=dict, alias="base")  # of earlier jobs in the same DAG run
    log_positions: dict[str, LogPosition] = Field(default_factory=dict, alias="places")
    totals: dict[str, TaskTotals] = Field(default_factory=dict, alias="tallies")
    states: dict[str, str | None] = Field(default_factory=dict)  # as last logged
    warnings: list[str] = Field(default_factory=list, alias="told")  # already emitted
    events_size: int = 0  # bytes of the event file
    log_size: int = 0  # bytes of the log
    polled: float = Field(0.0, alias="looked")  # when Airflow was last polled
    checked: float = 0.0  # when the DAG, its pools and the pending cells were last checked
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
    """The events and the log of a job, buffered until `save`, which overwrites what a crashed process has written."""

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
                self.log("airflow", f"{task.title}: {task.state}" if task.state else "")
            if self.stored.has_attempts(task):
                self._read_task(dag, task)

    def _read_task(self, dag: AirflowDag, task: TaskInstance) -> None:
        """Read the new lines of a task's log. An unreadable log is a warning and does not change the job's outcome."""
        first_attempt = self.stored.earlier_attempts.get(task.key, 0) + 1
        position = self.stored.log_positions.setdefault(task.key, LogPosition(attempt=first_attempt))
        last_attempt = task.try_number
        if position.attempt > last_attempt or (position.attempt == last_attempt and position.over):
            return
        while True:
            try:
                page = dag.log(self.stored.run_id, task, position.attempt, position.token, position.lines)
            except (AirflowUnavailable, AirflowError) as exc:
                self.warn_once(f"The log of {task.title} cannot be read: {exc} The run continues.")
                if isinstance(exc, AirflowUnavailable) or exc.status != TOO_LONG:
                    return  # the next poll tries again
                at_end = True  # it would be too long again
            else:
                self._read_lines(task, page.lines)
                position.lines += len(page.lines)
                position.token = page.token
                at_end = page.token is None and task.state in TASK_ENDED
            if position.attempt == last_attempt:
                position.over = at_end
                return
            self._next_attempt(task, position)

    def _next_attempt(self, task: TaskInstance, position: LogPosition) -> None:
        """Move to the start of the next attempt's log, and reset the totals that are counted per attempt."""
        position.attempt += 1
        position.lines, position.token, position.over = 0, None, False
        totals = self.stored.totals.get(task.key)
        if totals is not None:
            self._close_waits(totals)
            totals.answered_before += totals.answered
            totals.answered = 0
            totals.collected, totals.failure, totals.exit_code = None, "", None
        self.emit(events.Message(f"{task.title}: attempt {position.attempt}; recorded cells are not generated again."))

    def _read_lines(self, task: TaskInstance, lines: Iterable[LogLine]) -> None:
        """Buffer the events in a task's log lines, and all other lines as log output."""
        totals = self.stored.totals.setdefault(task.key, TaskTotals())
        for line in lines:
            raw = line.text.strip().encode("utf-8", "backslashreplace")
            parsed = parse_line(raw) if raw.startswith(b'{"at"') else None
            if parsed is None:
                self._log_task(task, line.text)
                if line.error:
                    self._log_task(task, line.error)
                    totals.failure = totals.failure or line.error
                continue
            at, event = parsed
            self._update_totals(totals, event, task)
            if not isinstance(event, _MERGED_EVENTS) and not self._is_full():
                self._events.append(json.dumps({"at": at, **event_json(event)}).encode("ascii") + b"\n")

    def _update_totals(self, totals: TaskTotals, event: events.Event, task: TaskInstance) -> None:
        if isinstance(event, events.Collected):
            totals.collected = event
        elif isinstance(event, events.Evidence):
            totals.memory = merged_memory([*filter(None, [totals.memory]), event])
        elif isinstance(event, events.Failure):
            totals.failure = event_json(event)["text"]
            self._log_task(task, totals.failure)
        elif isinstance(event, events.Exit):
            totals.exit_code = event.code
            self._close_waits(totals)
        elif isinstance(event, events.Waiting):
            totals.waiting = list(dict.fromkeys([*totals.waiting, event.what]))[:_MAX_WAITS]
        elif isinstance(event, events.Resumed):
            totals.waiting = [server for server in totals.waiting if server != event.what]
        elif isinstance(event, events.Recording):
            totals.recording = event.left > 0
        elif isinstance(event, events.CellFinished):
            totals.answered += event.failure is None

    def _close_waits(self, totals: TaskTotals) -> None:
        """Emit the events that end the waits and the recording of an attempt that has ended."""
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
        if not self._is_full():
            self.log(task.title, text)

    def _is_full(self) -> bool:
        """Return whether the stored output exceeds MAX_OUTPUT_BYTES; if so, emits a warning."""
        if self.stored.events_size + self.stored.log_size <= MAX_OUTPUT_BYTES:
            return False
        self.warn_once(f"Its tasks have printed more than {MAX_OUTPUT_BYTES >> 20} MB; see Airflow for the rest.")
        return True

    def close(self, status: JobStatus) -> None:
        """Buffer the merged totals, the failure if any, and the exit event."""
        tasks = list(self.stored.totals.values())
        if memory := merged_memory([task.memory for task in tasks if task.memory is not None]):
            self.emit(memory)
        if collected := merged_collected(tasks):
            self.emit(collected)
        if status.state is JobState.FAILED:
            self.emit(events.Failure(status.reason))
        self.emit(events.Exit(status.exit_code if status.exit_code is not None else 1))

    def save(self) -> None:
        """Write the buffered output, and then the state, which contains the new file sizes."""
        text = "".join(f"{line}\n" for line in self._log).encode("utf-8", "backslashreplace")
        self.stored.events_size = _append(self._folder.events, self.stored.events_size, b"".join(self._events))
        self.stored.log_size = _append(self._folder.log, self.stored.log_size, text)
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


def merged_collected(tasks: list[TaskTotals]) -> events.Collected | None:
    """Merge the totals of collect tasks. Cells that earlier attempts of this job recorded count as generated."""
    totals = [(task.collected, task.answered_before) for task in tasks if task.collected is not None]
    if not totals:
        return None
    seconds = [each.seconds for each, _ in totals if each.seconds is not None]
    return events.Collected(
        experiment=totals[0][0].experiment,
        cells=sum(each.cells for each, _ in totals),
        recorded_before=sum(max(0, each.recorded_before - earlier) for each, earlier in totals),
        generated=sum(each.generated + min(earlier, each.recorded_before) for each, earlier in totals),
        failed=sum(each.failed for each, _ in totals),
        refused=tuple(dict.fromkeys(reason for each, _ in totals for reason in each.refused)),
        seconds=sum(seconds) if seconds else None,
        url=next((each.url for each, _ in totals if each.url), None),
    )


def _append(path: Path, size: int, content: bytes) -> int:
    """Write at byte `size`, after removing any output of a crashed process from there on. Returns the new size."""
    if not content:
        return size
    with convert_home_errors(path, "cannot be written"), os.fdopen(open_private(path, os.O_WRONLY), "wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(content)
    return size + len(content)
