"""One collect per server: a lock file that dies with its holder and remembers what the holder had loaded."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tipbench.errors import LockHeld
from tipbench.generate.home import in_home

_POLL_S = 0.5


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, and the model it may leave in memory if it dies."""

    resource: str
    pid: int
    host: str
    since: str
    purpose: str
    model: str = ""
    digest: str = ""

    def __str__(self) -> str:
        loaded = f", model {self.model}" if self.model else ""
        return f"{self.purpose} (process {self.pid} on {self.host}, since {self.since}{loaded})"


class ResourceLock:
    """An exclusive lock on a named resource. The kernel frees it when the process ends, however it ends."""

    def __init__(self, home: Path, resource: str, purpose: str) -> None:
        digest = hashlib.sha256(resource.encode()).hexdigest()[:16]
        self._path = home / "locks" / f"{digest}.lock"
        self._fd: int | None = None
        self._loaded = False
        self._me = Holder(
            resource,
            os.getpid(),
            platform.node(),
            datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            purpose,
        )
        self.left_behind: Holder | None = None  # a dead holder's last note, when it had a model loaded

    def acquire(self, *, wait: bool, report: Callable[[str], None], poll_s: float = _POLL_S) -> bool:
        """Take the lock, and whether it had to be waited for; LockHeld when another has it and not to `wait`."""
        with in_home(self._path.parent, "cannot be made"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        with in_home(self._path, "cannot be opened"):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waited = self._queue(fd, wait, report, poll_s)
            with in_home(self._path, "cannot be read"):
                previous = _read(fd)
            self._fd = fd
            self._introduce(previous)
        except BaseException:
            self._fd = None
            os.close(fd)
            raise
        return waited

    def note_loaded(self, model: str, digest: str) -> None:
        """Remember what is about to be in memory, for whoever comes after a crash."""
        self._loaded = True
        self._write(replace(self._me, model=model, digest=digest))

    def note_empty(self) -> None:
        self._loaded = False
        self._write(self._me)

    def release(self) -> None:
        """Let go. A note of something loaded stays: its server may have been out of reach when we left."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                if not self._loaded:
                    os.ftruncate(fd, 0)
            except OSError:
                pass  # the note of somebody who has left says nothing that misleads
            finally:
                os.close(fd)

    def _introduce(self, previous: Holder | None) -> None:
        if previous is not None and previous.digest:
            self.left_behind = previous
            self.note_loaded(previous.model, previous.digest)  # until it has been seen gone, it is ours to remember
        else:
            self._write(self._me)

    def _queue(self, fd: int, wait: bool, report: Callable[[str], None], poll_s: float) -> bool:
        told: str | None = None
        while not try_lock(fd, self._path):
            who = str(_read(fd) or "another tipbench")
            if not wait:
                raise LockHeld(
                    f"{self._me.resource} is in use by {who}. Wait until it has finished, or pass --wait to queue."
                )
            if who != told:
                report(f"waiting for {self._me.resource}: in use by {who}")
                told = who
            time.sleep(poll_s)
        return told is not None

    def _write(self, holder: Holder) -> None:
        if self._fd is None:
            return
        data = json.dumps(asdict(holder)).encode()
        with in_home(self._path, "cannot be written"):
            if os.pwrite(self._fd, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, len(data))
            os.fsync(self._fd)


def try_lock(fd: int, path: Path, how: int = fcntl.LOCK_EX) -> bool:
    """Take the kernel's lock on an open file, exclusive or shared (LOCK_SH); False when another process has it."""
    with in_home(path, "cannot be locked"):
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _read(fd: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(fd, 65536, 0)))
    except (ValueError, TypeError):
        return None  # empty, or written by another version
