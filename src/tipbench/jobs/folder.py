"""The files of a job, from which any process can observe it, also after a restart.

The job's command appends events to a file. Readers use its byte offsets as cursors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from tipbench.errors import UsageError
from tipbench.files import convert_home_errors, file_lock, make_folder, open_private, write_atomic
from tipbench.jobs.job import LogTail, RecordedEvent
from tipbench.jobs.progress import Progress
from tipbench.record.events import MAX_LINE_BYTES, Event, event_line, parse_line, strip_logins
from tipbench.text import printable

EVENTS_VARIABLE = "TIPBENCH_EVENTS"  # environment variable with the path of a command's event file
MAX_LOG_BYTES = 1_000_000  # upper limit of `JobFolder.tail`
_RESULT_BYTES = 65_536  # read by `read_result` from the end of the event file; enough for the last events
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


@dataclass(frozen=True)
class Process:
    """Identity of a process: pid, start time as the system reports it, and host."""

    pid: int
    start: str
    host: str


class JobFolder:
    """The files of one job. Reading a missing file never fails."""

    def __init__(self, jobs: Path, job_id: str) -> None:
        if not _ID.fullmatch(job_id):
            raise UsageError(f"A job's id has letters, digits and dashes (got {job_id[:80]!r}).")
        self.path = jobs / job_id
        self.events_file = self.path / "events.jsonl"
        self.log_file = self.path / "log.txt"
        self._process_file = self.path / "process.json"
        self._cancel_file = self.path / "cancel"
        self._forbidden_file = self.path / "never"

    def make(self) -> None:
        """Create the folder, accessible to its owner only."""
        make_folder(self.path, private=True)

    def remove(self) -> None:
        """Remove the folder and its contents; does nothing if it does not exist."""
        with convert_home_errors(self.path, "cannot be removed"), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the job, so that no other process starts it or forbids its start."""
        self.make()
        with file_lock(self.path / "lock", wait=True):  # held briefly, and released when the process exits
            yield

    @property
    def process(self) -> Process | None:
        """The started process; None if there is none or its file cannot be read."""
        try:
            raw = json.loads(self._process_file.read_bytes())
            return Process(int(raw["pid"]), str(raw["start"]), str(raw["host"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save_process(self, process: Process) -> None:
        """Save the process atomically."""
        write_atomic(self._process_file, json.dumps(asdict(process)).encode())

    @property
    def cancel_sent_at(self) -> float | None:
        """When a cancel request was sent, in Unix time, or None."""
        try:
            return float(self._cancel_file.read_text("ascii"))
        except (OSError, ValueError):
            return None

    def save_cancel_sent(self, now: float) -> None:
        """Save when a cancel request was sent."""
        with convert_home_errors(self._cancel_file, "cannot be written"):
            write_atomic(self._cancel_file, str(now).encode())

    @property
    def start_forbidden(self) -> bool:
        """Whether the job must not be started."""
        return self._forbidden_file.exists()

    def forbid_start(self) -> None:
        """Mark the job so that it is never started."""
        with convert_home_errors(self._forbidden_file, "cannot be written"):
            write_atomic(self._forbidden_file, b"")

    def tail(self, max_bytes: int) -> LogTail:
        """Return the last lines of the log, without control characters and credentials."""
        try:
            with self.log_file.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                tail_bytes = min(max(1, max_bytes), MAX_LOG_BYTES)
                start = max(0, size - tail_bytes)
                file.seek(start)
                content = file.read(size - start)
        except OSError:
            return LogTail("", 0, cut=False)
        if start:
            # The content may begin within a URL, in which strip_logins would miss a login. So its first line is left
            # out, or its first word if it has no other line.
            _, _, after_first_line = content.partition(b"\n")
            content = after_first_line or re.sub(rb"\A\S*\s?", b"", content)
        text = printable(content.decode(errors="replace"), keep="\n\t")
        return LogTail(strip_logins(text), size, cut=start > 0)


# Event file


class EventWriter:
    """Appends events to a file. Write errors, such as a full disk, are ignored, so that they never stop the command."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises OSError if that fails."""
        self._fd: int | None = open_private(path, os.O_WRONLY | os.O_APPEND)
        # Reentrant: an interrupt may arrive while this thread holds the lock, and its handler writes the exit event.
        self._lock = threading.RLock()
        self._line_incomplete = False  # the last write failed or was cut short, as on a full disk

    def write(self, event: Event, *, durable: bool = False) -> None:
        """Append an event; `durable` waits until it is on disk. A closed writer writes nothing."""
        with self._lock, suppress(OSError, ValueError):
            if self._fd is None:
                return
            line = event_line(event, time.time())
            content = b"\n" + line if self._line_incomplete else line
            self._line_incomplete = True  # until the write has succeeded
            self._line_incomplete = os.write(self._fd, content) != len(content)
            if durable:
                os.fsync(self._fd)

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def read_events(path: Path, after: int = 0, limit: int = 500) -> list[RecordedEvent]:
    """Return at most `limit` events after the byte offset `after`; none if the file is missing.

    An incomplete last line is left for the next call. Invalid lines and unknown events are skipped.
    """
    recorded: list[RecordedEvent] = []
    with suppress(FileNotFoundError):
        for cursor, line in _complete_lines(path, max(0, after)):
            if (parsed := parse_line(line)) is not None:
                recorded.append(RecordedEvent(cursor, *parsed))
                if len(recorded) >= limit:
                    break
    return recorded


def read_result(path: Path) -> Progress | None:
    """Return the progress of a finished command; None if there is no exit event.

    Only the last _RESULT_BYTES of the events are read, so the progress of a long job is partial.
    """
    try:
        start = max(0, path.stat().st_size - _RESULT_BYTES)
    except FileNotFoundError:
        return None
    progress = Progress()
    for recorded in read_events(path, start, limit=10_000):
        progress = progress.after(recorded.event)
    return None if progress.exit_code is None else progress


def _complete_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield the end offset and the content of each complete line. If `start` is within a line, its rest is skipped."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)  # the byte before, so that a line that begins at `start` is not skipped
            if _read_line(file) is None:
                return
        while (line := _read_line(file)) is not None:
            yield file.tell(), line


def _read_line(file: BinaryIO) -> bytes | None:
    """Return the next line: empty if it is longer than MAX_LINE_BYTES, None if it is incomplete or missing."""
    line = file.readline(MAX_LINE_BYTES)
    if line.endswith(b"\n"):
        return line
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES)
    return b"" if rest else None
