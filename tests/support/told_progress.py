"""A job's events, folded into its progress as the panel's book does one by one."""

from __future__ import annotations

from collections.abc import Iterable

from tipbench.jobs.events import Event
from tipbench.jobs.progress import Progress


def progress_of(events: Iterable[Event], begin: Progress | None = None) -> Progress:
    """All of them, from nothing or from what was known."""
    progress = begin or Progress()
    for event in events:
        progress = progress.after(event)
    return progress
