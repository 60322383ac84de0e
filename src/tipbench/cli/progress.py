"""Progress of a collect on stderr: bars on a terminal, periodic lines otherwise."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Protocol, Self

from tipbench.cli.console import err, print_message
from tipbench.record.events import (
    BlockFinished,
    BlockStarted,
    CellFinished,
    Event,
    Message,
    Recording,
    Resumed,
    Waiting,
)
from tipbench.text import duration, printable

_LINE_EVERY_S = 5.0


class ProgressView(Protocol):
    """An observer that is also a context manager."""

    def __call__(self, event: Event) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress_view() -> ProgressView:
    """Return bars if stderr is a terminal, lines otherwise."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def sentence(event: Message | Waiting | Resumed) -> str:
    """Return the text of an event, for both views."""
    if isinstance(event, Waiting):
        limit = f", at most {duration(event.limit_s)}" if event.limit_s else ""
        return f"waiting for {event.what}{limit} (Ctrl-C stops; finished results are kept)"
    if isinstance(event, Resumed):
        return f"{event.what} is available again"
    return f"warning: {printable(event.text)}" if event.warning else printable(event.text)


class LineProgress:
    """Plain lines: models, failures, messages, and progress every few seconds."""

    def __init__(self) -> None:
        self._model = ""
        self._done = 0
        self._total = 0
        self._next = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, BlockStarted):
                self._model, self._done, self._total = event.model, event.done, event.total
                self._next = time.monotonic() + _LINE_EVERY_S
                left = f"{event.total - event.done} to generate"
                before = f"{event.done} of {event.total} recorded before, {left}" if event.done else left
                print_message(f"{event.model}: {before}")
            elif isinstance(event, CellFinished):
                self._cell(event)
            elif isinstance(event, BlockFinished):
                print_message(f"{event.model}: {self._done} of {self._total} done, memory freed")
            elif isinstance(event, Recording):
                self._now_and_then(f"recording: {event.left} left")
            else:
                print_message(sentence(event))

    def _cell(self, event: CellFinished) -> None:
        self._done += 1
        if event.failure is not None:
            print_message(f"failed: {printable(event.failure)}")
        self._now_and_then(f"{self._model}: {self._done} of {self._total}")

    def _now_and_then(self, text: str) -> None:
        if time.monotonic() >= self._next:
            print_message(text)
            self._next = time.monotonic() + _LINE_EVERY_S


class BarProgress:
    """One bar per model with tokens/s and remaining time, and one for results being recorded in MLflow."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(),
            console=err(),
            refresh_per_second=4,
        )
        self._model: int | None = None
        self._recording: int | None = None
        self._left_at_first = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        if kind is None and self._recording is not None:
            self._record(0)
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        from rich.progress import TaskID
        from rich.text import Text

        with self._lock:
            if isinstance(event, BlockStarted):
                self._model = self._progress.add_task(
                    printable(event.model), total=event.total, completed=event.done, speed=""
                )
            elif isinstance(event, CellFinished) and self._model is not None:
                speed = f"{event.tokens_per_s:.0f} tok/s" if event.tokens_per_s else ""
                self._progress.update(TaskID(self._model), advance=1, speed=speed)
                if event.failure is not None:
                    self._progress.console.print(Text(f"failed: {printable(event.failure)}", style="red"))
            elif isinstance(event, Recording):
                self._record(event.left)
            elif isinstance(event, Message | Waiting | Resumed):
                urgent = isinstance(event, Waiting) or (isinstance(event, Message) and event.warning)
                self._progress.console.print(Text(sentence(event), style="yellow" if urgent else ""))

    def _record(self, left: int) -> None:
        from rich.progress import TaskID

        if self._recording is None:
            self._left_at_first = left
            self._recording = self._progress.add_task("recording in MLflow", total=left, speed="")
        self._left_at_first = max(self._left_at_first, left)
        self._progress.update(TaskID(self._recording), total=self._left_at_first, completed=self._left_at_first - left)
