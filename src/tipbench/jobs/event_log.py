"""The file of a command's events: appended to by the command, read by whoever watches, whenever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tipbench.jobs.events import MOST_LINE, Collected, Event, Exit, Failure, Judged, event_line, parse_line

_TAIL_BYTES = 65_536  # the last events of a command; each is far shorter


@dataclass(frozen=True)
class Recorded:
    """An event with its time (ISO 8601, UTC) and its place: ask for what comes after `cursor`."""

    cursor: int
    at: str
    event: Event


@dataclass(frozen=True)
class Ending:
    """How a command said that it ended."""

    code: int
    failure: str = ""
    url: str | None = None


class EventWriter:
    """Appends events. What cannot be written (a full disk) is left out: reporting never stops the work."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises OSError when the file cannot be opened."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        self._clock = clock
        self._lock = threading.RLock()  # an interrupt on the way into it must not shut out the last event
        self._torn = False  # the last line was cut off by a full disk

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


def read_events(path: Path, after: int = 0, limit: int = 500) -> list[Recorded]:
    """At most `limit` events that stand behind the byte `after`; a line that is still being written waits.

    What is no event, or of another version, is passed over. A file that is not there (yet) holds none.
    """
    found: list[Recorded] = []
    with suppress(FileNotFoundError):
        for cursor, line in _lines(path, max(0, after)):
            if (parsed := parse_line(line)) is not None:
                found.append(Recorded(cursor, *parsed))
                if len(found) >= limit:
                    break
    return found


def read_ending(path: Path) -> Ending | None:
    """The exit that the command wrote last, with why it failed; None when it wrote none."""
    try:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
    except FileNotFoundError:
        return None
    code, failure, url = None, "", None
    for each in read_events(path, start, limit=10_000):
        if isinstance(each.event, Exit):
            code = each.event.code
        elif isinstance(each.event, Collected):
            failure, url = _shortfall(each.event), each.event.url
        elif isinstance(each.event, Judged):
            failure = _held(each.event)
        elif isinstance(each.event, Failure):
            failure = each.event.text
    return None if code is None else Ending(code, failure, url)


def _shortfall(event: Collected) -> str:
    return f"{event.failed} of {event.cells} cells failed; a retry tries them again." if event.failed else ""


def _held(event: Judged) -> str:
    if event.held:
        return f"The scores of {event.judge} are held: they are beyond the drift limit."
    return f"No score came for {event.unscored} items." if event.unscored else ""


def _lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from a byte on, each with the byte after it. A start inside a line begins with the next one."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            if _line(file) is None:
                return
        while (line := _line(file)) is not None:
            yield file.tell(), line


def _line(file: BinaryIO) -> bytes | None:
    """The next line; empty when it is longer than any event, None when it has no end yet."""
    line = piece = file.readline(MOST_LINE)
    while piece and not piece.endswith(b"\n"):
        line, piece = b"", file.readline(MOST_LINE)
    return line if piece else None
