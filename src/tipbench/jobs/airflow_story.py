"""A DAG run told as one job: what its tasks print becomes the events and the log in the job's folder.

A task's log holds the events of its command, one JSON a line, among what it prints. Each task begins and ends for
itself; the job begins once, ends once, and has one account of memory and cells.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tipbench.errors import AirflowAway, AirflowRefused
from tipbench.generate.durable import write_whole
from tipbench.generate.home import in_home
from tipbench.jobs import events as wire
from tipbench.jobs.airflow_dag import ENDED, AirflowDag, LogLine, SeenRun, TaskInstance
from tipbench.jobs.airflow_rest import TOO_LONG
from tipbench.jobs.events import event_json, event_line, parse_line
from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import JobState, Sighting

MOST_KEPT = 64 * 1024 * 1024  # of what the tasks of one job print; a collect of 10 000 cells prints 3 MB
_KEPT = "airflow.json"
_MOST_SERVERS = 10


class _Disk(BaseModel):
    model_config = ConfigDict(extra="ignore", validate_assignment=False)


class Place(_Disk):
    """How far a task's log has been read."""

    attempt: int = 1
    lines: int = 0
    token: str | None = None
    over: bool = False


class Tally(_Disk):
    """What one task has told of itself, over all its attempts."""

    collected: wire.Collected | None = None
    memory: wire.Memory | None = None
    answered: int = 0  # cells of this attempt
    answered_before: int = 0  # and of those before it
    failure: str = ""
    exit_code: int | None = None
    waiting: list[str] = Field(default_factory=list)  # for these servers
    recording: bool = False


class Kept(_Disk):
    """What the runner knows of a job: on disk, so that any process of this home goes on where another stopped."""

    run_id: str = ""  # Airflow was asked for it, or is about to be
    triggered: bool = False  # and has it
    base: dict[str, int] = Field(default_factory=dict)  # attempts of an earlier job in the same DAG run, by task
    places: dict[str, Place] = Field(default_factory=dict)
    tallies: dict[str, Tally] = Field(default_factory=dict)
    states: dict[str, str | None] = Field(default_factory=dict)
    told: list[str] = Field(default_factory=list)
    events_size: int = 0
    log_size: int = 0
    looked: float = 0.0
    checked: float = 0.0
    ended_since: float | None = None
    state: JobState | None = None
    exit_code: int | None = None
    reason: str = ""
    links: dict[str, str] = Field(default_factory=dict)

    @property
    def sighting(self) -> Sighting:
        """What was seen last."""
        return Sighting(self.state or JobState.RUNNING, self.exit_code, self.reason, dict(self.links))

    def see(self, sighting: Sighting) -> None:
        """Keep what was seen."""
        self.state, self.exit_code = sighting.state, sighting.exit_code
        self.reason, self.links = sighting.reason, dict(sighting.links)


def read_kept(folder: JobFolder) -> Kept:
    """What is on disk; nothing known when there is nothing."""
    try:
        return Kept.model_validate_json((folder.path / _KEPT).read_bytes())
    except (OSError, ValidationError):
        return Kept()


def write_kept(folder: JobFolder, kept: Kept) -> None:
    """On disk when it returns."""
    with in_home(folder.path, "cannot be written"):
        folder.make()
        write_whole(folder.path / _KEPT, kept.model_dump_json().encode())


class Story:
    """Appends to a job's events and log, at `save`; what a process that died wrote without it is written anew."""

    def __init__(self, folder: JobFolder, kept: Kept, clock: Callable[[], float]) -> None:
        self.kept = kept
        self._folder = folder
        self._clock = clock
        self._events: list[bytes] = []
        self._log: list[str] = []

    def read_logs(self, dag: AirflowDag, seen: SeenRun) -> None:
        """All that the run's tasks have printed since."""
        for task in seen.tasks:
            if self.kept.states.get(task.key) != task.state:
                self.kept.states[task.key] = task.state
                self.log("airflow", f"{task.title}: {task.state}" if task.state else "")
            if task.try_number > self.kept.base.get(task.key, 0):
                self._read_safely(dag, task)

    def _read_safely(self, dag: AirflowDag, task: TaskInstance) -> None:
        """A log that cannot be read costs the progress it tells of, not the job: how that ends the run itself says."""
        try:
            self._read_task(dag, task)
        except (AirflowAway, AirflowRefused) as exc:
            self.tell_once(f"The log of {task.title} cannot be read: {exc} The run goes on.")
            if isinstance(exc, AirflowRefused) and exc.status == TOO_LONG:
                self._pass_over(task, self.kept.places[task.key])

    def _pass_over(self, task: TaskInstance, place: Place) -> None:
        if place.attempt < task.try_number:
            self._next_attempt(task, place)
        else:
            place.over = True

    def _read_task(self, dag: AirflowDag, task: TaskInstance) -> None:
        place = self.kept.places.setdefault(task.key, Place(attempt=self.kept.base.get(task.key, 0) + 1))
        while place.attempt <= task.try_number and not (place.over and place.attempt == task.try_number):
            part = dag.log(self.kept.run_id, task, place.attempt, place.token, place.lines)
            self._take(task, part.lines)
            place.lines += len(part.lines)
            place.token = part.token
            if place.attempt == task.try_number:
                place.over = part.token is None and task.state in ENDED
                return
            self._next_attempt(task, place)

    def _next_attempt(self, task: TaskInstance, place: Place) -> None:
        place.attempt, place.lines, place.token, place.over = place.attempt + 1, 0, None, False
        tally = self.kept.tallies.get(task.key)
        if tally is not None:
            self._leave_nothing_open(tally)
            tally.answered_before, tally.answered = tally.answered_before + tally.answered, 0
            tally.collected, tally.failure, tally.exit_code = None, "", None
        self.tell(wire.Message(f"{task.title}: attempt {place.attempt}; what is recorded is not generated again."))

    def _take(self, task: TaskInstance, lines: Iterable[LogLine]) -> None:
        tally = self.kept.tallies.setdefault(task.key, Tally())
        for line in lines:
            raw = line.text.strip().encode("utf-8", "backslashreplace")
            parsed = parse_line(raw) if raw.startswith(b'{"at"') else None
            if parsed is None:
                self._log_of(task, line.text)
                if line.error:
                    self._log_of(task, line.error)
                    tally.failure = tally.failure or line.error
            elif self._is_the_jobs(tally, parsed[1], task) and not self._full:
                at, event = parsed
                self._events.append(json.dumps({"at": at, **event_json(event)}).encode("ascii") + b"\n")

    def _is_the_jobs(self, tally: Tally, event: wire.Event, task: TaskInstance) -> bool:
        """Whether it is told as it is; what is the task's own is kept for the job's account."""
        if isinstance(event, wire.Collected):
            tally.collected = event
        elif isinstance(event, wire.Memory):
            tally.memory = merged_memory([*filter(None, [tally.memory]), event])
        elif isinstance(event, wire.Failure):
            tally.failure = event_json(event)["text"]
            self._log_of(task, tally.failure)
        elif isinstance(event, wire.Exit):
            tally.exit_code = event.code
            self._leave_nothing_open(tally)
        elif isinstance(event, wire.Waiting):
            tally.waiting = list(dict.fromkeys([*tally.waiting, event.what]))[:_MOST_SERVERS]
        elif isinstance(event, wire.Resumed):
            tally.waiting = [what for what in tally.waiting if what != event.what]
        elif isinstance(event, wire.Recording):
            tally.recording = event.left > 0
        elif isinstance(event, wire.CellFinished):
            tally.answered += event.failure is None
        return not isinstance(event, wire.Collected | wire.Memory | wire.Failure | wire.Exit | wire.Started)

    def _leave_nothing_open(self, tally: Tally) -> None:
        """An attempt that is over neither waits for a server nor has results on the way."""
        for what in tally.waiting:
            self.tell(wire.Resumed(what))
        if tally.recording:
            self.tell(wire.Recording(0))
        tally.waiting, tally.recording = [], False

    def tell(self, event: wire.Event) -> None:
        """An event of the job's own."""
        self._events.append(event_line(event, self._clock()))

    def tell_once(self, text: str) -> None:
        """A warning, however often it holds."""
        if text not in self.kept.told:
            self.kept.told.append(text)
            self.tell(wire.Message(text, warning=True))
            self.log("airflow", text)

    def log(self, who: str, text: str) -> None:
        """A line of the log."""
        self._log += [f"[{who}] {line}" for line in text.splitlines()]

    def _log_of(self, task: TaskInstance, text: str) -> None:
        if not self._full:
            self.log(task.title, text)

    @property
    def _full(self) -> bool:
        """Whether the tasks have said more than is kept here."""
        if self.kept.events_size + self.kept.log_size <= MOST_KEPT:
            return False
        self.tell_once(f"Its tasks have printed more than {MOST_KEPT >> 20} MB; the rest is in Airflow alone.")
        return True

    def close(self, sighting: Sighting) -> None:
        """The job's account, and its exit."""
        tallies = list(self.kept.tallies.values())
        memory = merged_memory([tally.memory for tally in tallies if tally.memory is not None])
        collected = merged_collected(tallies)
        for event in (memory, collected):
            if event is not None:
                self.tell(event)
        if sighting.state is JobState.FAILED:
            self.tell(wire.Failure(sighting.reason))
        self.tell(wire.Exit(sighting.exit_code if sighting.exit_code is not None else 1))

    def save(self) -> None:
        """Write what was told, then how far that is."""
        text = "".join(f"{line}\n" for line in self._log).encode("utf-8", "backslashreplace")
        self.kept.events_size = _append(self._folder.events, self.kept.events_size, b"".join(self._events))
        self.kept.log_size = _append(self._folder.log, self.kept.log_size, text)
        self._events, self._log = [], []
        write_kept(self._folder, self.kept)


def merged_memory(seen: list[wire.Memory]) -> wire.Memory | None:
    """One account of memory of several; None of none."""
    if not seen:
        return None
    return wire.Memory(
        samples=sum(each.samples for each in seen),
        most_resident=max(each.most_resident for each in seen),
        largest_gap_s=max(each.largest_gap_s for each in seen),
        handovers=sum(each.handovers for each in seen),
        unknown_samples=sum(each.unknown_samples for each in seen),
        foreign=tuple(sorted({name for each in seen for name in each.foreign})),
    )


def merged_collected(tallies: list[Tally]) -> wire.Collected | None:
    """How all collects ended together; what an earlier attempt generated was recorded before only to the later one."""
    found = [(tally.collected, tally.answered_before) for tally in tallies if tally.collected is not None]
    if not found:
        return None
    seconds = [each.seconds for each, _ in found if each.seconds is not None]
    return wire.Collected(
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
    """Write after the byte `size`, over what a process that died has left there; the new size."""
    if not content:
        return size
    with in_home(path, "cannot be written"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
