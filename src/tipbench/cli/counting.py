"""Progress of work that is counted: a bar on a terminal, a line now and then elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tipbench.cli.console import err, say

_LINE_EVERY_S = 5.0
_BAR_FROM = 5  # fewer steps are over before anybody could read a bar

Count = Callable[[int, int], None]  # done, of


@contextmanager
def counting(what: str) -> Iterator[Count]:
    """A function to be told how far the work is."""
    if sys.stderr.isatty():
        with _bar(what) as count:
            yield count
    else:
        yield _lines(what)


def _lines(what: str) -> Count:
    next_at = time.monotonic() + _LINE_EVERY_S

    def count(done: int, of: int) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at and done < of:
            next_at = time.monotonic() + _LINE_EVERY_S
            say(f"{what}: {done} of {of}")

    return count


@contextmanager
def _bar(what: str) -> Iterator[Count]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task(what, visible=False)
        yield lambda done, of: progress.update(task, completed=done, total=of, visible=of >= _BAR_FROM)
