"""Event file of a job: appended by the command, read with a cursor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tipbench.files import open_private
from tipbench.jobs.events import MOST_LINE, Collected, Event, Exit, Failure, Judged, event_line, parse_line

_TAIL_BYTES = 65_536  # enough for the last events of a command


@dataclass(frozen=True)
class RecordedEvent:
    """An event with its time (ISO 8601, UTC); `cursor` is the position after it, for reading further."""

    cursor: int
    at: str
    event: Event


@dataclass(frozen=True)
class CommandResult:
    """Exit code of a command, with its failure message, MLflow URL and refused models if any."""

    code: int
    failure: str = ""
    url: str | None = None
    refused: tuple[str, ...] = ()


class EventWriter:
    """Appends events. Write errors such as a full disk are ignored: reporting never stops the command."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Open the file; raises OSError if that fails."""
        self._fd: int | None = open_private(path, os.O_WRONLY | os.O_APPEND)
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: an interrupt inside it must not block the exit event
        self._torn = False  # the last line is incomplete: the disk was full

    def write(self, event: Event, *, durable: bool = False) -> None:
        """Append an event; `durable` waits until it is on disk. A closed writer writes nothing."""
        with self._lock, suppress(OSError, ValueError):
            if self._fd is None:
                return
            line = event_line(event, self._clock())
            whole = b"\n" + line if self._torn else line
            self._torn = True
            self._torn = os.write(self._fd, whole) != len(whole)
            if durable:
                os.fsync(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def read_events(path: Path, after: int = 0, limit: int = 500) -> list[RecordedEvent]:
    """Return at most `limit` events after the byte `after`; an incomplete last line is left for the next call.

    Invalid lines and unknown events are skipped. A missing file has no events.
    """
    found: list[RecordedEvent] = []
    with suppress(FileNotFoundError):
        for cursor, line in _lines(path, max(0, after)):
            if (parsed := parse_line(line)) is not None:
                found.append(RecordedEvent(cursor, *parsed))
                if len(found) >= limit:
                    break
    return found


def read_result(path: Path) -> CommandResult | None:
    """Return the last exit code and why the command failed; None if there is no exit event."""
    try:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
    except FileNotFoundError:
        return None
    code, failure, url = None, "", None
    refused: tuple[str, ...] = ()
    for each in read_events(path, start, limit=10_000):
        if isinstance(each.event, Exit):
            code = each.event.code
        elif isinstance(each.event, Collected):
            event = each.event
            failure = f"{event.failed} of {event.cells} cells failed; a retry tries them again." if event.failed else ""
            url, refused = event.url, event.refused
        elif isinstance(each.event, Judged):
            failure = _held(each.event)
        elif isinstance(each.event, Failure):
            failure = each.event.text
    return None if code is None else CommandResult(code, failure, url, refused)


def _held(event: Judged) -> str:
    if event.held:
        return f"The scores of {event.judge} are held: their drift is over the limit."
    return f"{event.unscored} items have no score." if event.unscored else ""


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield complete lines with their end offset; a start inside a line skips to the next one."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            if _line(file) is None:
                return
        while (line := _line(file)) is not None:
            yield file.tell(), line


def _line(file: BinaryIO) -> bytes | None:
    """Return the next line; empty if it exceeds MOST_LINE, None if it is incomplete."""
    line = piece = file.readline(MOST_LINE)
    while piece and not piece.endswith(b"\n"):
        line, piece = b"", file.readline(MOST_LINE)
    return line if piece else None
