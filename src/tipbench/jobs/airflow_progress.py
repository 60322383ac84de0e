"""Converts the task logs of a DAG run into the events and the log of one job.

A task's log contains the events of its command as JSON lines, mixed with other output. Each task has its own start,
exit and totals; they are merged, so that the job has one of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tipbench.errors import AirflowError, AirflowUnavailable
from tipbench.files import home_errors, open_private, write_atomic
from tipbench.jobs.airflow_api import TASK_ENDED, TOO_LONG, AirflowDag, DagRun, LogLine, TaskInstance
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import JobState, JobStatus
from tipbench.record import events
from tipbench.record.events import event_json, event_line, parse_line

MAX_OUTPUT_BYTES = 64 * 1024 * 1024  # of all tasks of a job; a collect of 10 000 cells prints 3 MB
_FILE = "airflow.json"
_MAX_WAITS = 10  # servers that a task waits for


class _StoredModel(BaseModel):
    model_config = ConfigDict(extra="ignore", validate_assignment=False)


class LogPosition(_StoredModel):
    """How far a task's log has been read."""

    attempt: int = 1
    lines: int = 0  # of this attempt
    token: str | None = None  # requests the next page
    over: bool = False  # read to its end


class TaskTotals(_StoredModel):
    """Totals of one task over all its attempts."""

    collected: events.Collected | None = None
    memory: events.Evidence | None = None
    answered: int = 0  # cells of this attempt
    answered_before: int = 0  # cells of earlier attempts
    failure: str = ""
    exit_code: int | None = None
    waiting: list[str] = Field(default_factory=list)  # servers it waits for
    recording: bool = False


class StoredProgress(_StoredModel):
    """The runner's state of a job, on disk so that any process that shares the home folder can continue."""

    run_id: str = ""  # set before the trigger request is sent
    triggered: bool = False  # the DAG run exists in Airflow
    base: dict[str, int] = Field(default_factory=dict)  # attempts by earlier jobs in the same DAG run, by task
    places: dict[str, LogPosition] = Field(default_factory=dict)
    tallies: dict[str, TaskTotals] = Field(default_factory=dict)
    states: dict[str, str | None] = Field(default_factory=dict)  # of tasks, as last logged
    told: list[str] = Field(default_factory=list)  # warnings already emitted
    events_size: int = 0  # bytes of the event file
    log_size: int = 0
    looked: float = 0.0  # when Airflow was last polled
    checked: float = 0.0  # when the DAG, its pools and the pending cells were last checked
    ended_since: float | None = None  # when the DAG run was first seen to have ended
    state: JobState | None = None
    exit_code: int | None = None
    reason: str = ""
    links: dict[str, str] = Field(default_factory=dict)

    @property
    def status(self) -> JobStatus:
        """The last observed status."""
        return JobStatus(self.state or JobState.RUNNING, self.exit_code, self.reason, dict(self.links))

    def set_status(self, status: JobStatus) -> None:
        """Store an observed status."""
        self.state, self.exit_code = status.state, status.exit_code
        self.reason, self.links = status.reason, dict(status.links)


def read_progress(folder: JobFolder) -> StoredProgress:
    """Read the stored state; returns an empty one if it is missing or invalid."""
    try:
        return StoredProgress.model_validate_json((folder.path / _FILE).read_bytes())
    except (OSError, ValidationError):
        return StoredProgress()


def write_progress(folder: JobFolder, stored: StoredProgress) -> None:
    """Save the state atomically."""
    with home_errors(folder.path, "cannot be written"):
        folder.make()
        write_atomic(folder.path / _FILE, stored.model_dump_json().encode())


class RunProgress:
    """Events and log lines of a job, buffered until `save`; incomplete output of a crashed process is overwritten."""

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
            if task.try_number > self.stored.base.get(task.key, 0):
                self._read_task(dag, task)

    def _read_task(self, dag: AirflowDag, task: TaskInstance) -> None:
        """Read a task's log. If it is unreadable, progress is lost; the job's outcome is not affected."""
        position = self.stored.places.setdefault(task.key, LogPosition(attempt=self.stored.base.get(task.key, 0) + 1))
        last = task.try_number
        if position.attempt > last or (position.attempt == last and position.over):
            return
        while True:
            try:
                part = dag.log(self.stored.run_id, task, position.attempt, position.token, position.lines)
            except (AirflowUnavailable, AirflowError) as exc:
                self.warn_once(f"The log of {task.title} cannot be read: {exc} The run continues.")
                if isinstance(exc, AirflowUnavailable) or exc.status != TOO_LONG:
                    return
                over = True
            else:
                self._read_lines(task, part.lines)
                position.lines += len(part.lines)
                position.token = part.token
                over = part.token is None and task.state in TASK_ENDED
            if position.attempt == last:
                position.over = over
                return
            self._next_attempt(task, position)

    def _next_attempt(self, task: TaskInstance, position: LogPosition) -> None:
        position.attempt, position.lines, position.token, position.over = position.attempt + 1, 0, None, False
        totals = self.stored.tallies.get(task.key)
        if totals is not None:
            self._close_waits(totals)
            totals.answered_before, totals.answered = totals.answered_before + totals.answered, 0
            totals.collected, totals.failure, totals.exit_code = None, "", None
        self.emit(events.Message(f"{task.title}: attempt {position.attempt}; recorded cells are not generated again."))

    def _read_lines(self, task: TaskInstance, lines: Iterable[LogLine]) -> None:
        totals = self.stored.tallies.setdefault(task.key, TaskTotals())
        for line in lines:
            raw = line.text.strip().encode("utf-8", "backslashreplace")
            parsed = parse_line(raw) if raw.startswith(b'{"at"') else None
            if parsed is None:
                self._log_task(task, line.text)
                if line.error:
                    self._log_task(task, line.error)
                    totals.failure = totals.failure or line.error
            elif self._update_totals(totals, parsed[1], task) and not self._full:
                at, event = parsed
                self._events.append(json.dumps({"at": at, **event_json(event)}).encode("ascii") + b"\n")

    def _update_totals(self, totals: TaskTotals, event: events.Event, task: TaskInstance) -> bool:
        """Update the task's totals; returns False for an event that the job emits merged with those of other tasks."""
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
            totals.waiting = [what for what in totals.waiting if what != event.what]
        elif isinstance(event, events.Recording):
            totals.recording = event.left > 0
        elif isinstance(event, events.CellFinished):
            totals.answered += event.failure is None
        return not isinstance(event, events.Collected | events.Evidence | events.Failure | events.Exit | events.Started)

    def _close_waits(self, totals: TaskTotals) -> None:
        """Emit the events that close an ended attempt's waits and pending recordings."""
        for what in totals.waiting:
            self.emit(events.Resumed(what))
        if totals.recording:
            self.emit(events.Recording(0))
        totals.waiting, totals.recording = [], False

    def emit(self, event: events.Event) -> None:
        """Buffer an event of the job."""
        self._events.append(event_line(event, self._clock()))

    def warn_once(self, text: str) -> None:
        """Buffer a warning, unless the same text was emitted before."""
        if text not in self.stored.told:
            self.stored.told.append(text)
            self.emit(events.Message(text, warning=True))
            self.log("airflow", text)

    def log(self, source: str, text: str) -> None:
        """Buffer text for the log, each line prefixed with its source."""
        self._log += [f"[{source}] {line}" for line in text.splitlines()]

    def _log_task(self, task: TaskInstance, text: str) -> None:
        if not self._full:
            self.log(task.title, text)

    @property
    def _full(self) -> bool:
        """Whether task output exceeds MAX_OUTPUT_BYTES; emits a warning if so."""
        if self.stored.events_size + self.stored.log_size <= MAX_OUTPUT_BYTES:
            return False
        self.warn_once(f"Its tasks have printed more than {MAX_OUTPUT_BYTES >> 20} MB; see Airflow for the rest.")
        return True

    def close(self, status: JobStatus) -> None:
        """Buffer the merged totals, the failure if any, and the exit event."""
        tasks = list(self.stored.tallies.values())
        if memory := merged_memory([task.memory for task in tasks if task.memory is not None]):
            self.emit(memory)
        if collected := merged_collected(tasks):
            self.emit(collected)
        if status.state is JobState.FAILED:
            self.emit(events.Failure(status.reason))
        self.emit(events.Exit(status.exit_code if status.exit_code is not None else 1))

    def save(self) -> None:
        """Write the buffered output, then the state with its file sizes."""
        text = "".join(f"{line}\n" for line in self._log).encode("utf-8", "backslashreplace")
        self.stored.events_size = _append(self._folder.events, self.stored.events_size, b"".join(self._events))
        self.stored.log_size = _append(self._folder.log, self.stored.log_size, text)
        self._events, self._log = [], []
        write_progress(self._folder, self.stored)


def merged_memory(seen: list[events.Evidence]) -> events.Evidence | None:
    """Merge memory events; returns None for an empty list."""
    if not seen:
        return None
    return events.Evidence(
        samples=sum(each.samples for each in seen),
        most_resident=max(each.most_resident for each in seen),
        largest_gap_s=max(each.largest_gap_s for each in seen),
        handovers=sum(each.handovers for each in seen),
        unknown_samples=sum(each.unknown_samples for each in seen),
        foreign=tuple(sorted({name for each in seen for name in each.foreign})),
    )


def merged_collected(tasks: list[TaskTotals]) -> events.Collected | None:
    """Merge the totals of collect tasks; cells of this job's earlier attempts count as generated."""
    found = [(task.collected, task.answered_before) for task in tasks if task.collected is not None]
    if not found:
        return None
    seconds = [each.seconds for each, _ in found if each.seconds is not None]
    return events.Collected(
        experiment=found[0][0].experiment,
        cells=sum(each.cells for each, _ in found),
        recorded_before=sum(max(0, each.recorded_before - earlier) for each, earlier in found),
        generated=sum(each.generated + min(earlier, each.recorded_before) for each, earlier in found),
        failed=sum(each.failed for each, _ in found),
        refused=tuple(dict.fromkeys(reason for each, _ in found for reason in each.refused)),
        seconds=sum(seconds) if seconds else None,
        url=next((each.url for each, _ in found if each.url), None),
    )


def _append(path: Path, size: int, content: bytes) -> int:
    """Write at byte `size`, truncating leftovers of a crashed process; returns the new size."""
    if not content:
        return size
    with home_errors(path, "cannot be written"):
        fd = open_private(path, os.O_WRONLY)
        try:
            if os.fstat(fd).st_size > size:
                os.ftruncate(fd, size)
            os.lseek(fd, size, os.SEEK_SET)
            while content:
                written = os.write(fd, content)
                size, content = size + written, content[written:]
        finally:
            os.close(fd)
    return size
