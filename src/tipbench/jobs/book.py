"""The book of progress: each job's events are folded once, however many look on."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tipbench.errors import ServerAway
from tipbench.jobs.event_log import Recorded
from tipbench.jobs.job import Job, Runner
from tipbench.jobs.progress import Progress

KEPT = 200
_AT_ONCE = 500


@dataclass(frozen=True)
class Told:
    """What a job's events add up to, up to and with the one at `cursor`."""

    cursor: int = 0
    progress: Progress = field(default_factory=Progress)

    def after(self, recorded: Recorded) -> Told:
        """With one event more."""
        return Told(recorded.cursor, self.progress.after(recorded.event))


class Book:
    """What is told of each job so far. Thread-safe; the job that was not asked about for longest is forgotten."""

    def __init__(self, runner_of: Callable[[Job], Runner], size: int = KEPT) -> None:
        self._runner_of = runner_of
        self._size = size
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Told] = OrderedDict()

    def told(self, job: Job) -> Told:
        """All that it has told until now; what is known of it while its runner does not answer."""
        with self._lock:
            told = self._known.get(job.id, Told())
        try:
            for recorded in events_after(self._runner_of(job), job, told.cursor):
                told = told.after(recorded)
        except ServerAway:
            return told
        self._keep(job.id, told)
        return told

    def told_until(self, job: Job, cursor: int) -> Told:
        """What it had told when its events were read up to `cursor`; one beyond the last event is that one."""
        now = self.told(job)
        if cursor >= now.cursor:
            return now
        told = Told()
        for recorded in events_after(self._runner_of(job), job, 0):
            if recorded.cursor > cursor:
                break
            told = told.after(recorded)
        return told

    def _keep(self, job_id: str, told: Told) -> None:
        with self._lock:
            if self._known.get(job_id, Told()).cursor <= told.cursor:
                self._known[job_id] = told
            self._known.move_to_end(job_id)
            while len(self._known) > self._size:
                self._known.popitem(last=False)


def events_after(runner: Runner, job: Job, cursor: int) -> Iterator[Recorded]:
    """Every event after the one at `cursor`, oldest first, as many as there are now."""
    while True:
        found = runner.events(job, cursor, _AT_ONCE)
        yield from found
        if len(found) < _AT_ONCE:
            return
        cursor = found[-1].cursor
