"""Waiting for jobs that run as real processes, and killing them after the test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tipbench.jobs.folder import JobFolder
from tipbench.jobs.job import Job
from tipbench.jobs.local import is_alive
from tipbench.jobs.store import JobStore


def kill_jobs(store: JobStore, home: Path) -> None:
    """Kill the processes of all jobs of a store that are still running."""
    for job in store.page(limit=200).items:
        process = JobFolder(home / "jobs", job.id).process
        if process is not None and is_alive(process):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_job(store: JobStore, job: Job, is_reached: Callable[[Job], bool]) -> Job:
    """Poll the job until it satisfies the condition."""
    deadline = time.monotonic() + 120
    while not is_reached(found := store.get(job.id)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found
