"""A scripted runner: the Runner port without processes, for tests that only read jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tipbench.jobs.job import Job, JobState, JobStatus, LogTail, RecordedEvent
from tipbench.jobs.progress import Progress
from tipbench.record.events import Event


@dataclass
class ScriptedRunner:
    """Every started job has the status `ends`, the events `emitted` and the output `printed`. Thread-safe."""

    name: str = "local"
    ends: Callable[[Job], JobStatus] = lambda _job: JobStatus(JobState.SUCCEEDED, 0)
    emitted: Callable[[Job], Sequence[Event]] = lambda _job: ()
    printed: str = ""
    _cancelled: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, job: Job) -> None:
        """Start nothing."""

    def observe(self, job: Job) -> JobStatus:
        """Return the scripted status, unless the job was cancelled."""
        with self._lock:
            return JobStatus(JobState.CANCELLED) if job.id in self._cancelled else self.ends(job)

    def cancel(self, job: Job) -> None:
        """Cancel the job at once."""
        with self._lock:
            self._cancelled.add(job.id)

    def events(self, job: Job, after: int = 0, limit: int = 500) -> Sequence[RecordedEvent]:
        """Return the scripted events, with their position as cursor."""
        at = "2026-05-04T10:15:00.000Z"
        events = [RecordedEvent(cursor, at, event) for cursor, event in enumerate(self.emitted(job), start=1)]
        return events[after : after + limit]

    def log(self, job: Job, max_bytes: int = 65_536) -> LogTail:  # noqa: ARG002 - all jobs have the same output
        """Return the tail of the scripted output."""
        whole = self.printed.encode("utf-8", "backslashreplace")
        return LogTail(whole[-max_bytes:].decode("utf-8", "replace"), len(whole), len(whole) > max_bytes)

    def forget(self, job: Job) -> None:
        """Do nothing."""


def progress_of(events: Iterable[Event], begin: Progress | None = None) -> Progress:
    """Return the progress after all these events."""
    progress = begin or Progress()
    for event in events:
        progress = progress.after(event)
    return progress
