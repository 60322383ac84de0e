"""Progress of a command: bars or lines on stderr, and an event file for the panel."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import tipbench
from tipbench.cli.console import make_console, print_message
from tipbench.errors import UsageError
from tipbench.jobs.folder import EVENTS_VARIABLE, EventWriter
from tipbench.record.events import (
    BlockFinished,
    BlockStarted,
    CellFinished,
    Event,
    Exit,
    Message,
    Recording,
    Resumed,
    Started,
    Waiting,
)
from tipbench.text import duration, printable

if TYPE_CHECKING:
    from rich.progress import TaskID

INTERRUPTED = 130  # exit code
_LINE_INTERVAL_S = 5.0
_MIN_BAR_TOTAL = 5  # no bar is shown for a smaller total
_writer: EventWriter | None = None  # None if no events are written

ProgressCallback = Callable[[int, int], None]  # called with the number done and the total


@contextmanager
def progress_counter(label: str) -> Iterator[ProgressCallback]:
    """Show progress on stderr; yields a function to call with the number done and the total."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
            bar = progress.add_task(label, visible=False)

            def update_bar(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total, visible=total >= _MIN_BAR_TOTAL)

            yield update_bar
        return
    next_line_at = time.monotonic() + _LINE_INTERVAL_S

    def print_count(done: int, total: int) -> None:
        nonlocal next_line_at
        if time.monotonic() >= next_line_at and done < total:
            next_line_at = time.monotonic() + _LINE_INTERVAL_S
            print_message(f"{label}: {done} of {total}")

    yield print_count


def progress_view() -> BarProgress | LineProgress:
    """Return bars if stderr is a terminal, lines otherwise."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def event_text(event: Message | Waiting | Resumed) -> str:
    """Return the text that `LineProgress` and `BarProgress` show for an event."""
    if isinstance(event, Waiting):
        limit = f", at most {duration(event.limit_s)}" if event.limit_s else ""
        return f"waiting for {event.what}{limit} (Ctrl-C stops; finished results are kept)"
    if isinstance(event, Resumed):
        return f"{event.what} is available again"
    return f"warning: {printable(event.text)}" if event.warning else printable(event.text)


class LineProgress:
    """Shows events as plain lines: models, failures, messages, and the count every few seconds."""

    def __init__(self) -> None:
        self._block = BlockStarted(model="", total=0)  # the current model's; `done` is kept up to date
        self._next_line_at = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, BlockStarted):
                self._block = event
                self._next_line_at = time.monotonic() + _LINE_INTERVAL_S
                before = f"{event.done} of {event.total} recorded before, " if event.done else ""
                print_message(f"{event.model}: {before}{event.total - event.done} to generate")
            elif isinstance(event, CellFinished):
                self._block = replace(self._block, done=event.done)
                if event.failure is not None:
                    print_message(f"failed: {printable(event.failure)}")
                self._print_every_few_seconds(f"{event.model}: {event.done} of {event.total}")
            elif isinstance(event, BlockFinished):
                print_message(f"{event.model}: {self._block.done} of {self._block.total} done, memory freed")
            elif isinstance(event, Recording):
                self._print_every_few_seconds(f"recording: {event.left} left")
            elif isinstance(event, Message | Waiting | Resumed):
                print_message(event_text(event))

    def _print_every_few_seconds(self, text: str) -> None:
        if time.monotonic() >= self._next_line_at:
            print_message(text)
            self._next_line_at = time.monotonic() + _LINE_INTERVAL_S


class BarProgress:
    """Shows events as bars: one per model with tokens/s and time left, and one for recording in MLflow."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(),
            console=make_console(stderr=True),
            refresh_per_second=4,
        )
        self._model_bar: TaskID | None = None
        self._recording_bar: TaskID | None = None
        self._recording_total = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_exc: object) -> None:
        if exc_type is None and self._recording_bar is not None:
            self._show_recording(0)  # no event is sent for 0 left
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        from rich.text import Text

        with self._lock:
            if isinstance(event, BlockStarted):
                self._model_bar = self._progress.add_task(
                    printable(event.model), total=event.total, completed=event.done, speed=""
                )
            elif isinstance(event, CellFinished) and self._model_bar is not None:
                speed = f"{event.tokens_per_s:.0f} tok/s" if event.tokens_per_s else ""
                self._progress.update(self._model_bar, completed=event.done, speed=speed)
                if event.failure is not None:
                    self._progress.console.print(Text(f"failed: {printable(event.failure)}", style="red"))
            elif isinstance(event, Recording):
                self._show_recording(event.left)
            elif isinstance(event, Message | Waiting | Resumed):
                urgent = isinstance(event, Waiting) or (isinstance(event, Message) and event.warning)
                self._progress.console.print(Text(event_text(event), style="yellow" if urgent else ""))

    def _show_recording(self, left: int) -> None:
        if self._recording_bar is None:
            self._recording_bar = self._progress.add_task("recording in MLflow", total=left, speed="")
        # The journals of dead processes are recorded first, one after the other. The next journal may have more results
        # left than the one before, so the total can grow.
        self._recording_total = max(self._recording_total, left)
        n_recorded = self._recording_total - left
        self._progress.update(self._recording_bar, total=self._recording_total, completed=n_recorded)


# Event file


@contextmanager
def event_output() -> Iterator[None]:
    """Write events to the file named by TIPBENCH_EVENTS, if it is set. The last event has the exit code."""
    global _writer  # noqa: PLW0603 - process-wide, like stdout
    # Removed from the environment, so that a child process does not write to the same file.
    path = os.environ.pop(EVENTS_VARIABLE, "")
    if not path:
        yield
        return
    try:
        _writer = EventWriter(Path(path))
    except OSError as exc:
        raise UsageError(f"{EVENTS_VARIABLE} takes a file; {path} cannot be written: {exc.strerror}.") from exc
    write_event(Started(tipbench.__version__))
    code = 1  # of sys.exit("text"), and of any exception that is not handled below
    try:
        yield
        code = 0
    except SystemExit as exc:
        if isinstance(exc.code, int):
            code = exc.code
        elif exc.code is None:
            code = 0
        raise
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a cancelled job must still write its exit code
        writer, _writer = _writer, None
        writer.write(Exit(code), durable=True)
        writer.close()


def write_event(event: Event) -> None:
    """Write an event, if event output is enabled."""
    if _writer is not None:
        _writer.write(event)


def report_message(text: str) -> None:
    """Print a message to stderr, and write it as an event."""
    print_message(text)
    write_event(Message(text))
