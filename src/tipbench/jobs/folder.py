"""A job's folder: who its process is, what it reported and printed. All that is needed to find it again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tipbench.errors import UsageError
from tipbench.generate.durable import write_whole
from tipbench.generate.home import in_home
from tipbench.jobs.events import without_logins
from tipbench.jobs.job import LogTail

MOST_LOG = 1_000_000
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken: its number, when it started as the system tells it, and on which host."""

    pid: int
    start: str
    host: str


class JobFolder:
    """The files of one job. Reading never fails for want of a file: it may not be there yet, or no longer."""

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
        """The folder itself, for its owner only."""
        with in_home(self.path, "cannot be made"):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove(self) -> None:
        """The folder with all that is in it; nothing happens when it is gone already."""
        with in_home(self.path, "cannot be removed"), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it lasts, nobody else starts the job or decides that it never starts."""
        self.make()
        with in_home(self._lock, "cannot be opened"):
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with in_home(self._lock, "cannot be locked"):
                fcntl.flock(fd, fcntl.LOCK_EX)  # held for a moment only, and freed by the end of its holder
            yield
        finally:
            os.close(fd)

    @property
    def process(self) -> Process | None:
        """The process that was started; None when none was."""
        try:
            raw = json.loads(self._process.read_bytes())
            return Process(int(raw["pid"]), str(raw["start"]), str(raw["host"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_process(self, process: Process) -> None:
        """On disk when it returns."""
        write_whole(self._process, json.dumps(asdict(process)).encode())

    @property
    def asked_at(self) -> float | None:
        """When the process was asked to end (seconds since 1970); None when it was not."""
        try:
            return float(self._asked.read_text("ascii"))
        except (OSError, ValueError):
            return None

    def note_asked(self, now: float) -> None:
        """That the process was asked to end."""
        with in_home(self._asked, "cannot be written"):
            write_whole(self._asked, str(now).encode())

    @property
    def never(self) -> bool:
        """Whether the job must not be started any more."""
        return self._never.exists()

    def note_never(self) -> None:
        """That it must not be started any more."""
        with in_home(self._never, "cannot be written"):
            write_whole(self._never, b"")

    def tail(self, most_bytes: int) -> LogTail:
        """The end of the log, from the beginning of a line; nothing in it a terminal would obey, and no login."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - min(max(1, most_bytes), MOST_LOG))
                file.seek(start)
                content = file.read(size - start)
        except OSError:
            return LogTail("", 0, cut=False)
        if start:
            content = _from_a_beginning(content)
        text = "".join(
            char if char.isprintable() or char in "\n\t" else " " for char in content.decode(errors="replace")
        )
        return LogTail(without_logins(text), size, cut=start > 0)


def _from_a_beginning(content: bytes) -> bytes:
    """From the first whole line on, else from the first whole word: half a web address would not show its login."""
    return content.partition(b"\n")[2] or b"".join(re.split(rb"\s", content, maxsplit=1)[1:])
