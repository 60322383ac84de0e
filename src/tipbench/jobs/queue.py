"""The queue: who may start when, and the supervisor that starts, watches and ends. `submit`, `cancel`, `retry`.

Any number of processes may submit and cancel; of the supervisors of one home one leads at a time, and when its process
dies another takes over where it stopped.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from tipbench.errors import JobConflict, NotStarted, ServerAway, TipbenchError
from tipbench.generate.home import in_home
from tipbench.generate.lock import try_lock
from tipbench.jobs.job import (
    ACTIVE,
    ENDED,
    Job,
    JobState,
    Order,
    Runner,
    Sighting,
    moves_between,
)
from tipbench.jobs.sqlite import JobStore, check_key

TICK_S = 0.5
MOST_RUNNING = 4
_MOST_LOST = 100  # so many of the lost are looked for
_SWEEP_S = 3600.0
_MOST_SWEPT = 50  # at a time: nobody's turn waits for it
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Submitted:
    """The job of an order; `new` is False when an earlier order under the same key made it."""

    job: Job
    new: bool


def submit(store: JobStore, order: Order, *, key: str | None = None) -> Submitted:
    """Put an order into the queue; with a key, at most once."""
    return Submitted(*store.add(order, key))


def cancel(store: JobStore, job_id: str) -> Job:
    """Have a job ended: at once in the queue, by the supervisor where it runs. JobConflict when it has ended."""
    return store.request_cancel(job_id)


def retry(
    store: JobStore,
    job_id: str,
    *,
    started_by: str = "",
    key: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Submitted:
    """A new job like the old one, which names it. JobConflict unless the old one failed, was cancelled or is lost.

    `changes` are fields of the order that are no longer as they were.
    """
    check_key(key)
    known = None if key is None else store.by_key(key)
    if known is not None and known.retry_of == job_id:  # whatever has become of the old one since
        return Submitted(known, new=False)
    old = store.get(job_id)
    if old.state not in (JobState.FAILED, JobState.CANCELLED, JobState.LOST):
        still = "has succeeded" if old.state in ENDED else f"is still {old.state}"
        raise JobConflict(f"A job that failed, was cancelled or is lost can be retried; {job_id} {still}.")
    order = Order(**{field.name: getattr(old, field.name) for field in fields(Order)})
    again = replace(order, **{**(changes or {}), "retry_of": old.id, "started_by": started_by})
    return submit(store, again, key=key)


def places(queued: Sequence[Job]) -> dict[str, int]:
    """Each queued job's place, 1 being next: behind those that came before and need the same thing."""
    found: dict[str, int] = {}
    for index, job in enumerate(queued):
        ahead = [other for other in queued[:index] if not set(other.resources).isdisjoint(job.resources)]
        found[job.id] = len(ahead) + 1
    return found


def startable(queued: Sequence[Job], running: Sequence[Job], most_running: int = MOST_RUNNING) -> list[Job]:
    """Which jobs may start now, first come first served for each resource."""
    taken = {resource for job in running for resource in job.resources}
    free = most_running - len(running)
    chosen = []
    for job in queued:
        if free > 0 and taken.isdisjoint(job.resources):
            chosen.append(job)
            free -= 1
        taken.update(job.resources)  # who waits for one thing is not overtaken at another
    return chosen


class Supervisor:
    """Carries the queue on. `tick` does all there is to do now; `start` ticks on a thread until `close`."""

    def __init__(
        self,
        store: JobStore,
        runners: Mapping[str, Runner],
        lock: Path,
        *,
        tick_s: float = TICK_S,
        most_running: int = MOST_RUNNING,
        keep_s: float | None = None,
    ) -> None:
        """`keep_s` after its end a job is forgotten; None keeps all."""
        self._store = store
        self._runners = runners
        self._lock_path = lock
        self._tick_s = tick_s
        self._most_running = most_running
        self._keep_s = keep_s
        self._next_sweep = 0.0
        self._lock_fd: int | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def runner_of(self, job: Job) -> Runner:
        """Who carries the job out; ServerAway when it is not configured here."""
        runner = self._runners.get(job.runner)
        if runner is None:
            raise ServerAway(f"The job runs on {job.runner}, which is not configured here. Configure it again.")
        return runner

    @property
    def leads(self) -> bool:
        """Whether this one carries the queue on, not another process."""
        return self._lock_fd is not None

    def start(self) -> Self:
        """Tick on a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()
        return self

    def wake(self) -> None:
        """Tick soon: something was submitted or cancelled."""
        self._wake.set()

    def close(self) -> None:
        """Stop ticking and let another lead. Jobs run on."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(60)
            self._thread = None
        if self._lock_fd is not None:
            fd, self._lock_fd = self._lock_fd, None
            os.close(fd)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def tick(self) -> bool:
        """Look after every job once; False, and nothing done, while another process leads."""
        if not self._take_lead():
            return False
        for job in self._store.in_states(ACTIVE - {JobState.LOST}) + self._lost():
            self._safely(self._follow, job)
        queued = self._store.in_states({JobState.QUEUED})
        for job in (job for job in queued if job.cancel_requested is not None):
            self._safely(self._follow, job)  # a leader died between claiming and starting it
        queued = [job for job in queued if job.cancel_requested is None]
        running = self._store.in_states({JobState.RUNNING})
        for job in startable(queued, running, self._most_running):
            self._safely(self._begin, job)
        if time.monotonic() >= self._next_sweep:
            self._sweep()
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - a thread has no caller: a full disk must not end the queue for good
                _log.exception("the queue of jobs could not be carried on; trying again")
                self._stop.wait(10 * self._tick_s)
            self._wake.wait(self._tick_s)

    def _sweep(self) -> None:
        """Forget what ended long ago: first what its runner keeps of it, so that nothing is left without a name."""
        found = [] if self._keep_s is None else self._store.expired(self._keep_s, limit=_MOST_SWEPT)
        gone = [job for job in found if self._forgotten(job)]
        self._next_sweep = time.monotonic() + (0 if len(gone) == _MOST_SWEPT else _SWEEP_S)

    def _forgotten(self, job: Job) -> bool:
        runner = self._runners.get(job.runner)
        try:
            if runner is not None:
                runner.forget(job)
            return self._store.remove(job.id)
        except TipbenchError as exc:
            _log.warning("job %s is kept for now: %s", job.id, exc)
            return False

    def _take_lead(self) -> bool:
        if self._lock_fd is not None:
            return True
        with in_home(self._lock_path, "cannot be opened"):
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(fd, self._lock_path, fcntl.LOCK_EX):
            self._lock_fd = fd
            return True
        os.close(fd)
        return False

    def _lost(self) -> list[Job]:
        return self._store.in_states({JobState.LOST}, limit=_MOST_LOST)

    def _safely(self, act: Callable[[Job], None], job: Job) -> None:
        """One job's trouble is its own: it is noted, and the others go on."""
        try:
            act(job)
        except TipbenchError as exc:
            self._store.note(job.id, reason=str(exc))
        except Exception:  # noqa: BLE001 - a bug met at one job must not hold up the others
            _log.exception("job %s could not be looked after", job.id)

    def _begin(self, job: Job) -> None:
        claimed = self._store.claim(job.id)
        if claimed is None:  # cancelled in between
            return
        try:
            self.runner_of(claimed).start(claimed)
        except NotStarted as exc:
            self._advance(claimed, Sighting(JobState.FAILED, reason=str(exc)))
        else:
            self._advance(claimed, Sighting(JobState.RUNNING))

    def _follow(self, job: Job) -> None:
        try:
            runner = self.runner_of(job)
            if job.cancel_requested is not None:
                runner.cancel(job)
            sighting = runner.observe(job)
        except ServerAway as exc:
            sighting = Sighting(JobState.LOST, reason=str(exc))
        self._advance(job, sighting)

    def _advance(self, job: Job, sighting: Sighting) -> None:
        """Move the job to where it was seen, by legal moves; each is a compare-and-set."""
        if any(job.links.get(name) != url for name, url in sighting.links.items()):
            self._store.note(job.id, links=sighting.links)
        if sighting.state is job.state:
            if sighting.reason != job.reason:
                self._store.note(job.id, reason=sighting.reason)
            return
        state = job.state
        for step in moves_between(job.state, sighting.state):
            last = step is sighting.state
            code, reason = (sighting.exit_code, sighting.reason) if last else (None, "")
            if self._store.move(job.id, state, step, exit_code=code, reason=reason) is None:
                return  # somebody else was quicker; the next tick looks again
            state = step
