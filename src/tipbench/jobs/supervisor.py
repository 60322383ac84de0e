"""Supervisor: starts, observes and cancels jobs. Jobs that need the same resource are queued."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from tipbench.errors import JobConflict, JobStartError, ServerUnavailable, TipbenchError
from tipbench.files import convert_home_errors, open_private, try_lock, write_atomic
from tipbench.jobs.job import RETRIABLE, Job, JobRequest, JobState, JobStatus, Runner, path_between
from tipbench.jobs.store import JobStore, Submitted, check_key

TICK_S = 0.5  # between two passes over the jobs
MAX_RUNNING = 4  # jobs at the same time
_MAX_LOST = 100  # lost jobs checked per tick
_SWEEP_S = 3600.0  # between two sweeps; a sweep deletes expired jobs
_MAX_SWEPT = 50  # jobs deleted per tick, to keep ticks short
_MAX_SWEEP_GAP_S = 2 * 86_400.0  # if more time seems to have passed since the last sweep, the clock is doubted
_CONFIRM_CLOCK_S = 86_400.0  # how long the panel runs with a doubted clock before it is accepted
_log = logging.getLogger(__name__)


def retry(
    store: JobStore,
    job_id: str,
    *,
    started_by: str = "",
    idempotency_key: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Submitted:
    """Queue a copy of a job. Raises JobConflict unless the job failed, was cancelled or is lost.

    `changes` overrides fields of the original request.
    """
    check_key(idempotency_key)
    existing = None if idempotency_key is None else store.by_key(idempotency_key)
    if existing is not None and existing.retry_of == job_id:
        # A repeated request gets the same response, even if the old job can no longer be retried.
        return Submitted(existing, new=False)
    old = store.get(job_id)
    if old.state not in RETRIABLE:
        state = "has succeeded" if old.state is JobState.SUCCEEDED else f"is still {old.state}"
        raise JobConflict(f"A job that failed, was cancelled or is lost can be retried; {job_id} {state}.")
    values = {field.name: getattr(old, field.name) for field in fields(JobRequest)}
    values |= changes or {}
    values |= {"retry_of": old.id, "started_by": started_by}
    return store.add(JobRequest(**values), idempotency_key)


def queue_positions(queued: Sequence[Job]) -> dict[str, int]:
    """Return each job's queue position: 1 plus the number of earlier jobs that share a resource."""
    positions = {}
    for index, job in enumerate(queued):
        sharing = [earlier for earlier in queued[:index] if not set(earlier.resources).isdisjoint(job.resources)]
        positions[job.id] = 1 + len(sharing)
    return positions


def startable(queued: Sequence[Job], running: Sequence[Job], max_running: int = MAX_RUNNING) -> list[Job]:
    """Return the jobs that can start now. Each resource is assigned in the order of the queue."""
    taken = {resource for job in running for resource in job.resources}
    free_slots = max_running - len(running)
    chosen = []
    for job in queued:
        if free_slots > 0 and taken.isdisjoint(job.resources):
            chosen.append(job)
            free_slots -= 1
        taken.update(job.resources)  # also for a job that must wait, so that no later job overtakes it
    return chosen


class Supervisor:
    """Processes the jobs. `tick` runs one pass; `start` runs passes on a thread until `close`."""

    def __init__(
        self,
        store: JobStore,
        runners: Mapping[str, Runner],
        lock: Path,
        *,
        tick_s: float = TICK_S,
        keep_s: float | None = None,
    ) -> None:
        """Ended jobs are kept for `keep_s` seconds, or forever if it is None."""
        self._store = store
        self._runners = runners
        self._lock_path = lock
        self._tick_s = tick_s
        self._keep_s = keep_s
        self._next_sweep = 0.0  # monotonic time
        self._clock_doubted_since: float | None = None  # monotonic time; None if the clock is not in doubt
        self._lock_fd: int | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def runner_of(self, job: Job) -> Runner:
        """Return the job's runner. Raises ServerUnavailable if it is not configured."""
        runner = self._runners.get(job.runner)
        if runner is None:
            raise ServerUnavailable(f"The job runs on {job.runner}, which is not configured here. Configure it again.")
        return runner

    @property
    def holds_lock(self) -> bool:
        """Whether this process supervises the jobs. At most one process per home folder does."""
        return self._lock_fd is not None

    def start(self) -> Self:
        """Start ticking on a background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()
        return self

    def wake(self) -> None:
        """Run the next tick now, for example because a job was submitted or cancelled."""
        self._wake.set()

    def close(self) -> None:
        """Stop ticking and release the supervisor lock. Jobs keep running."""
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
        """Process every job once. Returns False, without processing any, if another process holds the lock."""
        if not self._acquire_lock():
            return False
        running_or_waiting = self._store.in_states({JobState.RUNNING, JobState.WAITING})
        lost = self._store.in_states({JobState.LOST}, limit=_MAX_LOST)
        for job in running_or_waiting + lost:
            self._safely(self._update_job, job)
        queued = self._store.in_states({JobState.QUEUED})
        for job in queued:
            # A queued job with a cancel request was claimed for a start; otherwise the request would have ended it. It
            # may have been started, so its runner has to cancel it.
            if job.cancel_requested is not None:
                self._safely(self._update_job, job)
        to_start = [job for job in queued if job.cancel_requested is None]
        running = self._store.in_states({JobState.RUNNING})  # waiting jobs hold no resources
        for job in startable(to_start, running):
            self._safely(self._start_job, job)
        if time.monotonic() >= self._next_sweep:
            self._sweep()
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                self.tick()
            except Exception:  # noqa: BLE001 - an error such as a full disk must not end the thread
                _log.exception("processing the job queue failed; trying again")
                self._stop.wait(10 * self._tick_s)
            self._wake.wait(self._tick_s)

    def _sweep(self) -> None:
        """Delete expired jobs. The runner's data of a job is deleted first: later, nothing would refer to that data."""
        n_removed = 0
        if self._keep_s is not None and self._clock_is_plausible():
            for job in self._store.expired(self._keep_s, limit=_MAX_SWEPT):
                try:
                    if job.runner in self._runners:
                        self._runners[job.runner].forget(job)
                    if self._store.remove(job.id):
                        n_removed += 1
                except TipbenchError as exc:
                    _log.warning("job %s is kept for now: %s", job.id, exc)
        # If a full batch was removed, more jobs may have expired. If a job was kept, it is tried again an hour later.
        self._next_sweep = time.monotonic() + (0 if n_removed == _MAX_SWEPT else _SWEEP_S)

    def _clock_is_plausible(self) -> bool:
        """Return False if the clock is so far ahead of the last sweep that it may be wrong. Saves the sweep's time.

        The clock may also be right, for example after the panel was stopped for weeks. So it is accepted once the panel
        has run with it for _CONFIRM_CLOCK_S.
        """
        path, now = self._lock_path.with_name("last_sweep"), self._store.clock()
        try:
            last_sweep = float(path.read_text())
        except (OSError, ValueError):
            last_sweep = self._store.last_activity() or now
        if now - last_sweep <= _MAX_SWEEP_GAP_S:
            self._clock_doubted_since = None
        elif self._clock_doubted_since is None:
            self._clock_doubted_since = time.monotonic()
            days = (now - last_sweep) / 86_400
            _log.warning("the clock is %.0f days after the last sweep; expired jobs are kept for another day", days)
        doubted_since = self._clock_doubted_since
        plausible = doubted_since is None or time.monotonic() - doubted_since >= _CONFIRM_CLOCK_S
        with convert_home_errors(path, "cannot be written"):
            # In doubt, the old time is saved too, so that there is a file. Without a file, the next sweep would use
            # `last_activity`; a job that starts until then would set it by the doubted clock, and end the doubt.
            write_atomic(path, str(now if plausible else last_sweep).encode())
        return plausible

    def _acquire_lock(self) -> bool:
        if self._lock_fd is not None:
            return True
        with convert_home_errors(self._lock_path, "cannot be opened"):
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            fd = open_private(self._lock_path)
        if try_lock(fd, self._lock_path):
            self._lock_fd = fd
            return True
        os.close(fd)
        return False

    def _safely(self, action: Callable[[Job], None], job: Job) -> None:
        """Call `action`. Save a TipbenchError as the job's reason and log any other error, so that other jobs go on."""
        try:
            action(job)
        except TipbenchError as exc:
            self._store.set_reason(job.id, str(exc))
        except Exception:  # noqa: BLE001 - a bug with one job must not block the others
            _log.exception("checking job %s failed", job.id)

    def _start_job(self, job: Job) -> None:
        claimed = self._store.claim(job.id)
        if claimed is None:  # cancelled in the meantime
            return
        try:
            # ServerUnavailable is left to `_safely`: the job stays queued, and the next tick tries again.
            self.runner_of(claimed).start(claimed)
        except JobStartError as exc:
            self._advance(claimed, JobStatus(JobState.FAILED, reason=str(exc)))
        else:
            self._advance(claimed, JobStatus(JobState.RUNNING))

    def _update_job(self, job: Job) -> None:
        try:
            runner = self.runner_of(job)
            if job.cancel_requested is not None:
                runner.cancel(job)
            status = runner.observe(job)
        except ServerUnavailable as exc:
            status = JobStatus(JobState.LOST, reason=str(exc))
        self._advance(job, status)

    def _advance(self, job: Job, status: JobStatus) -> None:
        """Move the stored job to its observed state by legal transitions. Each of them is a compare-and-set."""
        if any(job.links.get(name) != url for name, url in status.links.items()):
            self._store.add_links(job.id, status.links)
        if status.state is job.state:
            if status.reason != job.reason:
                self._store.set_reason(job.id, status.reason)
            return
        state = job.state
        for step in path_between(job.state, status.state):
            if step is status.state:
                moved = self._store.move(job.id, state, step, exit_code=status.exit_code, reason=status.reason)
            else:
                moved = self._store.move(job.id, state, step)
            if moved is None:
                return  # changed concurrently; the next tick retries
            state = step
