"""Event output: with TIPBENCH_EVENTS=FILE a command also writes its events to that file, one JSON object per line.

Without that variable, the functions in this module do nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import tipbench
from tipbench.errors import UsageError

if TYPE_CHECKING:
    from tipbench.jobs.event_file import EventWriter
    from tipbench.jobs.events import Event
    from tipbench.judge.run import JudgeResult
    from tipbench.record import events as record
    from tipbench.record.summary import Summary

VARIABLE = "TIPBENCH_EVENTS"
_INTERRUPTED = 130
_writer: EventWriter | None = None  # one command, one process, one file


@contextmanager
def command_events() -> Iterator[None]:
    """Write the events of a command; the last one is its exit code, on disk before the process ends."""
    global _writer  # noqa: PLW0603 - process-wide, like stdout
    # Removed from the environment, so that a child process that is also tipbench does not write to the same file.
    name = os.environ.pop(VARIABLE, "")
    if not name:
        yield
        return
    from tipbench.jobs.event_file import EventWriter
    from tipbench.jobs.events import Exit, Started

    try:
        _writer = EventWriter(Path(name))
    except OSError as exc:
        raise UsageError(f"{VARIABLE} takes a file; {name} cannot be written: {exc.strerror}.") from exc
    emit(Started(tipbench.__version__))
    code = 1
    try:
        yield
        code = 0
    except SystemExit as exc:
        code = exit_code(exc)
        raise
    except KeyboardInterrupt:
        code = _INTERRUPTED
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a cancel during exit must not lose the exit code
        writer, _writer = _writer, None
        writer.write(Exit(code), durable=True)
        writer.close()


def exit_code(exc: SystemExit) -> int:
    """Return the process exit code: 0 for None, 1 for a message."""
    if exc.code is None:
        return 0
    return exc.code if isinstance(exc.code, int) else 1


def emit(event: Event) -> None:
    """Write an event, if event output is enabled."""
    if _writer is not None:
        _writer.write(event)


def emit_failure(text: str) -> None:
    """Write a failure event."""
    if _writer is not None:
        from tipbench.jobs.events import Failure

        emit(Failure(text))


def observed(view: Callable[[record.Event], None]) -> Callable[[record.Event], None]:
    """Return an observer that calls the view and also writes events."""
    if _writer is None:
        return view
    translate = _Translation()

    def report(event: record.Event) -> None:
        view(event)
        translate(event)

    return report


def tee_events(show: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that calls `show` and also writes a message event."""
    if _writer is None:
        return show
    from tipbench.jobs.events import Message

    def report(text: str) -> None:
        show(text)
        emit(Message(text))

    return report


def counted(judge: str, count: Callable[[int, int], None]) -> Callable[[int, int, int], None]:
    """Return a progress callback (scored, unscored, total) that also writes judging events."""

    def report(scored: int, unscored: int, total: int) -> None:
        count(scored + unscored, total)
        if _writer is not None:
            from tipbench.jobs.events import Judging

            emit(Judging(judge, scored, unscored, total))

    return report


def emit_collected(summary: Summary) -> None:
    """Write the memory evidence and the result of a collect."""
    if _writer is None:
        return
    from tipbench.jobs.events import Collected, Memory

    if (seen := summary.evidence) is not None:
        emit(
            Memory(
                samples=seen.samples,
                most_resident=seen.most_resident,
                largest_gap_s=seen.largest_gap_s,
                handovers=seen.handovers,
                unknown_samples=seen.unknown_samples,
                foreign=seen.foreign,
            )
        )
    emit(
        Collected(
            experiment=summary.experiment,
            cells=summary.cells,
            recorded_before=summary.recorded_before,
            generated=summary.generated,
            failed=summary.failed,
            refused=tuple(summary.refused.values()),
            seconds=summary.seconds,
            url=summary.experiment_url,
        )
    )


def emit_judged(ran: JudgeResult, *, provisional: bool) -> None:
    """Write the result of an automatic judge's run."""
    if _writer is None:
        return
    from tipbench.jobs.events import Judged

    applied = ran.applied
    emit(Judged(applied.sheet, applied.judge, applied.finished, len(ran.unscored), applied.held, provisional))


class _Translation:
    """Translates a collect's events to output events, with running totals so that each event shows the progress."""

    def __init__(self) -> None:
        self._done = self._total = self._failed = 0

    def __call__(self, event: record.Event) -> None:
        from tipbench.jobs import events as wire
        from tipbench.record import events as record

        if isinstance(event, record.BlockStarted):
            self._done, self._total, self._failed = event.done, event.total, 0
        if not isinstance(event, record.CellFinished):
            emit(event)
            return
        self._done += 1
        self._failed += event.failure is not None
        cell = event.cell
        emit(
            wire.CellFinished(
                cell.model,
                cell.prompt,
                cell.scenario,
                done=self._done,
                total=self._total,
                failed=self._failed,
                failure=event.failure,
                output_tokens=event.output_tokens,
                tokens_per_s=event.tokens_per_s,
            )
        )
