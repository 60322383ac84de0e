"""Cleaning up after tests that start jobs as real processes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from tipbench.jobs.folder import JobFolder
from tipbench.jobs.local import is_alive
from tipbench.jobs.store import JobStore


def kill_jobs(store: JobStore, home: Path) -> None:
    """Kill the processes of all jobs of a store that are still running."""
    for job in store.page(limit=200).items:
        process = JobFolder(home / "jobs", job.id).process
        if process is not None and is_alive(process):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
