"""Files: the home folder, atomic writes, private files, and locks that record their holder."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import json
import os
import platform
import pwd
import shlex
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tipbench.errors import LockHeld, TipbenchError, UsageError

_POLL_S = 0.2  # between two attempts to acquire a lock
# Errors that the user can fix by choosing another folder.
_FOLDER_ERRORS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG,
)  # fmt: skip
_CHOOSE_FOLDER = "Set TIPBENCH_HOME to a folder that you may write to."
_NEXT_STEPS = {
    errno.ENOSPC: "Free some space there, or set TIPBENCH_HOME to a folder on another disk.",
    errno.EDQUOT: "Free some space there, or set TIPBENCH_HOME to a folder on another disk.",
    errno.EMFILE: "Allow more open files, as with `ulimit -n 4096`, or lower --concurrency.",
    errno.ENFILE: "Close other programs: the whole machine has too many files open.",
}

# The home folder


@contextmanager
def convert_home_errors(path: Path, problem: str) -> Iterator[None]:
    """Convert an OSError into a TipbenchError about the home folder.

    `problem` is the part of the message after the path, such as "cannot be opened".
    """
    try:
        yield
    except OSError as exc:
        error_class = UsageError if exc.errno in _FOLDER_ERRORS else TipbenchError
        next_step = _NEXT_STEPS.get(exc.errno or 0, _CHOOSE_FOLDER)
        raise error_class(
            f"tipbench stores journals, locks and weights in its home folder, but {path} {problem}: "
            f"{exc.strerror or exc}. {next_step}"
        ) from exc


def make_folder(path: Path, *, private: bool = False) -> Path:
    """Create a missing folder in the home folder, with its parents. With `private`, only its owner has access."""
    with convert_home_errors(path, "cannot be created"):
        path.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
    return path


def writable_home(home: Path) -> Path:
    """Create the home folder if it is missing, and restrict it to its owner. Raises UsageError if not writable."""
    make_folder(home, private=True)
    check_ownership(home, _CHOOSE_FOLDER)
    with convert_home_errors(home, "is not writable"):
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        mode = stat.S_IMODE(home.stat().st_mode)
        if mode & 0o077:  # created by an earlier version, or by hand
            home.chmod(mode & ~0o077)
    return home


def check_ownership(path: Path, next_step: str, fd: int | None = None) -> None:
    """Raise UsageError if another user owns a file or folder, or may write to it. A missing file is accepted.

    With `fd`, checks the open file, because the file at the path may have been replaced.
    """
    try:
        status = path.stat() if fd is None else os.fstat(fd)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}. {next_step}") from exc
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to another user (id {status.st_uid}), who could change settings and tokens. {next_step}"
        )
    others_may_write = status.st_mode & stat.S_IWOTH
    group_may_write = status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    if others_may_write or group_may_write:
        raise UsageError(
            f"{path} may be changed by other users (mode {stat.S_IMODE(status.st_mode):o}). "
            f"Check its content, then run: chmod go-w {shlex.quote(str(path))}"
        )


def _is_private_group(gid: int) -> bool:
    """Return whether the user is the only member of the group. Many systems create such a group for each user."""
    try:
        group = grp.getgrgid(gid)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


# Writing


def open_private(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file and return its descriptor. A missing file is created, for its owner only. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: readers see the old content or the new, never a mix."""
    with _temporary_file(path, content, mode=0o666) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)


def create_private(path: Path, content: bytes) -> None:
    """Create a file atomically, with access for its owner only. Does nothing if the file already exists."""
    with _temporary_file(path, content, mode=0o600) as temporary, suppress(FileExistsError):
        os.link(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a new or renamed file survives a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_output(path: Path, flag: str) -> None:
    """Raise UsageError if the file given with `flag` cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"{flag} takes a file; {path} {problem}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: no permission. Choose another file.")


def write_output(path: Path, text: str, flag: str, next_step: str = "Choose another file.") -> None:
    """Write the file given with `flag` atomically; raises UsageError with `next_step` on failure."""
    try:
        write_atomic(path, text.encode("utf-8", "backslashreplace"))
    except OSError as exc:
        raise UsageError(f"{flag} {path} could not be written: {exc.strerror}. {next_step}") from exc


@contextmanager
def _temporary_file(path: Path, content: bytes, *, mode: int) -> Iterator[Path]:
    """Yield a temporary file next to `path`, with the content synced to disk. Removes it unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


# Locks


def flock(fd: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file. Without `wait`, returns False if another process holds the lock. Raises OSError."""
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    return True


def try_lock(fd: int, path: Path, *, shared: bool = False) -> bool:
    """Like `flock` without waiting, for a file in the home folder."""
    with convert_home_errors(path, "cannot be locked"):
        return flock(fd, shared=shared)


@contextmanager
def file_lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file in the home folder for the block. Without `wait`, yields False if another process holds the lock."""
    with convert_home_errors(path, "cannot be opened"):
        fd = open_private(path)
    try:
        with convert_home_errors(path, "cannot be locked"):
            locked = flock(fd, wait=wait)
        yield locked
    finally:
        os.close(fd)


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, and the model that stays in memory if the process dies."""

    resource: str
    pid: int
    host: str
    since: str
    purpose: str
    model: str = ""  # empty if no model is loaded
    digest: str = ""  # of the model

    def __str__(self) -> str:
        model = f", model {self.model}" if self.model else ""
        return f"{self.purpose} (process {self.pid} on {self.host}, since {self.since}{model})"


class ResourceLock:
    """An exclusive lock on a named resource, released by the kernel when the process ends."""

    def __init__(
        self,
        home: Path,
        resource: str,
        purpose: str,
        *,
        advice: str = "Wait until it has finished, or pass --wait to queue.",
    ) -> None:
        file_name = hashlib.sha256(resource.encode()).hexdigest()[:16]
        self._path = home / "locks" / f"{file_name}.lock"
        self._fd: int | None = None
        self._has_model = False
        self._advice = advice
        self._holder = LockHolder(
            resource,
            pid=os.getpid(),
            host=platform.node(),
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            purpose=purpose,
        )
        self.dead_holder: LockHolder | None = None  # the previous holder, if it ended without unloading its model

    def acquire(self, *, wait: bool, report: Callable[[str], None], timeout_s: float | None = None) -> bool:
        """Acquire the lock and return whether it had to wait.

        Raises LockHeld if another process holds the lock: at once without `wait`, else after `timeout_s`.
        """
        make_folder(self._path.parent)
        with convert_home_errors(self._path, "cannot be opened"):
            fd = open_private(self._path)
        try:
            waited = self._wait_for_lock(fd, wait=wait, report=report, timeout_s=timeout_s)
            with convert_home_errors(self._path, "cannot be read"):
                previous = _read_holder(fd)
            self._fd = fd
            if previous is not None and previous.digest:
                self.dead_holder = previous
                # The model may still be in memory, so it stays recorded until `note_unloaded`.
                self.note_loaded(previous.model, previous.digest)
            else:
                self._write(self._holder)
        except BaseException:
            self._fd = None
            os.close(fd)
            raise
        return waited

    @contextmanager
    def held(self, *, wait: bool, report: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock for the block; see `acquire`."""
        self.acquire(wait=wait, report=report)
        try:
            yield
        finally:
            self.release()

    def note_loaded(self, model: str, digest: str) -> None:
        """Record the model that is about to be loaded. If this process dies, the next holder reads the record."""
        self._has_model = True
        self._write(replace(self._holder, model=model, digest=digest))

    def note_unloaded(self) -> None:
        self._has_model = False
        self._write(self._holder)

    def release(self) -> None:
        """Release the lock. The record of a loaded model stays: the model may still be in the server's memory."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                if not self._has_model:
                    os.ftruncate(fd, 0)
            except OSError:
                pass  # a stale record without a model is harmless
            finally:
                os.close(fd)

    def _wait_for_lock(self, fd: int, *, wait: bool, report: Callable[[str], None], timeout_s: float | None) -> bool:
        """Lock the file and return whether it had to wait. Reports each new holder."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        reported: str | None = None
        while not try_lock(fd, self._path):
            holder = str(_read_holder(fd) or "another tipbench")
            if not wait or (deadline is not None and time.monotonic() > deadline):
                raise LockHeld(f"{self._holder.resource} is in use by {holder}. {self._advice}")
            if holder != reported:
                report(f"waiting for {self._holder.resource}: in use by {holder}")
                reported = holder
            time.sleep(_POLL_S)
        return reported is not None

    def _write(self, holder: LockHolder) -> None:
        if self._fd is None:
            return
        data = json.dumps(asdict(holder)).encode()
        with convert_home_errors(self._path, "cannot be written"):
            if os.pwrite(self._fd, data, 0) != len(data):  # the disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, len(data))
            os.fsync(self._fd)


def _read_holder(fd: int) -> LockHolder | None:
    try:
        return LockHolder(**json.loads(os.pread(fd, 65536, 0)))
    except (ValueError, TypeError):
        return None  # empty, or written by another version
