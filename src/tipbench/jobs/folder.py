"""Job folder: process identity, events and log; all that is needed to find a job again after a restart."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tipbench.errors import UsageError
from tipbench.files import file_lock, home_errors, make_folder, write_atomic
from tipbench.jobs.events import strip_logins
from tipbench.jobs.job import LogTail
from tipbench.text import printable

MOST_LOG = 1_000_000
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
        self.events = self.path / "events.jsonl"
        self.log = self.path / "log.txt"
        self._process = self.path / "process.json"
        self._asked = self.path / "cancel"
        self._never = self.path / "never"
        self._lock = self.path / "lock"

    def make(self) -> None:
        """Create the folder, accessible to its owner only."""
        make_folder(self.path, private=True)

    def remove(self) -> None:
        """Remove the folder and its contents; does nothing if it does not exist."""
        with home_errors(self.path, "cannot be removed"), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the job, so that no other process starts it or marks it as never to be started."""
        self.make()
        with file_lock(self._lock, wait=True):  # held briefly, and released when its holder exits
            yield

    @property
    def process(self) -> Process | None:
        """The process that was started, or None."""
        try:
            raw = json.loads(self._process.read_bytes())
            return Process(int(raw["pid"]), str(raw["start"]), str(raw["host"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_process(self, process: Process) -> None:
        """Save the process atomically."""
        write_atomic(self._process, json.dumps(asdict(process)).encode())

    @property
    def cancel_sent_at(self) -> float | None:
        """When a stop was requested (Unix time); None if it was not."""
        try:
            return float(self._asked.read_text("ascii"))
        except (OSError, ValueError):
            return None

    def note_cancel_sent(self, now: float) -> None:
        """Save when a stop was requested."""
        with home_errors(self._asked, "cannot be written"):
            write_atomic(self._asked, str(now).encode())

    @property
    def never(self) -> bool:
        """Whether the job must not be started."""
        return self._never.exists()

    def note_never(self) -> None:
        """Mark the job as never to be started."""
        with home_errors(self._never, "cannot be written"):
            write_atomic(self._never, b"")

    def tail(self, most_bytes: int) -> LogTail:
        """Return the end of the log, from the start of a line, without control characters and credentials."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - min(max(1, most_bytes), MOST_LOG))
                file.seek(start)
                content = file.read(size - start)
        except OSError:
            return LogTail("", 0, cut=False)
        if start:
            content = _from_line_start(content)
        text = printable(content.decode(errors="replace"), keep="\n\t")
        return LogTail(strip_logins(text), size, cut=start > 0)


def _from_line_start(content: bytes) -> bytes:
    """Drop the first partial line, or else word: credentials in a truncated URL would not be recognised."""
    return content.partition(b"\n")[2] or b"".join(re.split(rb"\s", content, maxsplit=1)[1:])
