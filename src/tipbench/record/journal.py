"""The write-ahead journal: a result is on disk before MLflow hears of it, and leaves when MLflow has it.

One append-only file per process, locked while its owner lives, in a folder per tracking server and experiment.
A line is a record or the note that one was kept. The journal is also the queue to MLflow: in memory it holds
only where each record stands in the file, so a slow MLflow costs no memory. What a dead process left is found
by its free lock; only who has the lock removes a file. Whatever breaks off a write, an interrupt included, the
file is cut back to where it ended before.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tipbench.errors import JournalError
from tipbench.generate.durable import sync_folder
from tipbench.record.journal_lines import FORMAT, Contents, Entry, entry_of, kept_line, parse_line, put_line, read_lines
from tipbench.record.run import NewRun

__all__ = ["Entry", "Journal", "count_left_behind", "journal_folder", "journalled_keys", "left_behind"]

_COMPACT_BYTES = 32 * 2**20
_GONE = (BlockingIOError, FileNotFoundError)  # another process has the file, or has removed it


def journal_folder(home: Path, tracking: str, experiment: str) -> Path:
    """The folder for results on their way to one experiment of one tracking server."""
    name = hashlib.sha256(f"{tracking}\n{experiment}".encode()).hexdigest()[:16]
    return home / "journal" / name


class Journal:
    """This process's journal file. One thread appends; any thread may take, read and mark entries."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """A new journal; with `path`, the one that a dead process left there."""
        self._lock = threading.RLock()  # entered itself: an interrupt in Condition.__enter__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._whole = True  # the file ends with a whole line that counts
        contents = Contents()
        with _telling("opened", path or folder):
            if path is None:
                folder.mkdir(parents=True, exist_ok=True)
                self.path, self._fd = _create(folder)
            else:
                self.path, self._fd = path, _lock_file(path)
                contents = _load(path, self._fd)
        self._open = contents.open  # every entry MLflow does not have, waiting or taken
        self._waiting = deque(self._open.values())

    def append(self, runs: Sequence[NewRun]) -> None:
        """Write results down and sync once; when this returns they are finished, else none of them is there."""
        lines = [put_line(run) for run in runs]
        with self._lock, _telling("written", self.path):
            end = start = self._end()
            entries = []
            for run, line in zip(runs, lines, strict=True):
                entries.append(entry_of(run, end, len(line)))
                end += len(line)
            try:
                self._whole = False
                _write_all(self._fd, b"".join(lines))
                os.fsync(self._fd)
                self._open.update((entry.record_id, entry) for entry in entries)
                self._waiting.extend(entries)
                self._whole = True
            except BaseException:
                for entry in entries:
                    self._open.pop(entry.record_id, None)
                self._waiting = deque(entry for entry in self._waiting if entry.offset < start)
                self._cut_back(start)
                raise
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Entry | None:
        """The next entry to be kept; None when there is none in time."""
        with self._lock:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_s)
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, entry: Entry, *, last: bool = False) -> None:
        """It could not be kept now; it comes first again, or after all others."""
        with self._lock:
            (self._waiting.append if last else self._waiting.appendleft)(entry)
            self._changed.notify_all()

    def read(self, entry: Entry) -> NewRun:
        """The record itself, from the file."""
        run = parse_line(self._line(entry))
        if not isinstance(run, NewRun):
            raise JournalError(
                f"A result in the journal {self.path} does not read as it was written (at byte {entry.offset}). "
                "Somebody else has changed the file; move it away to go on without its results."
            )
        return run

    def kept(self, entry: Entry) -> None:
        """MLflow has it. Not synced: a lost note only means that MLflow is asked once more."""
        with self._lock, _telling("written", self.path):
            if entry.record_id not in self._open:
                return
            start = self._end()
            try:
                self._whole = False
                _write_all(self._fd, kept_line(entry.record_id))
                del self._open[entry.record_id]
                self._whole = True
            except BaseException:
                self._open[entry.record_id] = entry
                self._cut_back(start)
                raise
            if not self._open and start > _COMPACT_BYTES:
                with suppress(OSError):  # it only saves room, and comes round again
                    os.ftruncate(self._fd, 0)
            self._changed.notify_all()

    def set_aside(self, entry: Entry) -> Path:
        """MLflow will not take it: its line moves to a file beside the journal, which nobody drains."""
        beside = self.path.with_name(f"{self.path.name}.refused")
        with self._lock:
            line = self._line(entry)
            with _telling("written", beside):
                _append_synced(beside, line)
            self.kept(entry)
        return beside

    def outstanding(self) -> int:
        """How many results MLflow does not have yet."""
        with self._lock:
            return len(self._open)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._lock:
            self._changed.notify_all()

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something was appended, kept or put back, or `wake` was called."""
        with self._lock:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Let go; the file stays only if something in it is not kept yet."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._open:
                with suppress(OSError):  # an idle file is removed by the next drain
                    self.path.unlink(missing_ok=True)
            fd, self._fd = self._fd, -1  # the number may soon be another file's
            os.close(fd)
            self._changed.notify_all()

    def _end(self) -> int:
        """Where the next line goes, if there may be one."""
        if self._closed or not self._whole:
            state = "is closed" if self._closed else "may end in half a line, which could not be removed"
            raise JournalError(
                f"The journal {self.path} {state}, so nothing more is written to it. "
                "Run the same command again: whatever is whole in it is recorded then."
            )
        return os.fstat(self._fd).st_size

    def _cut_back(self, start: int) -> None:
        """Half a line would swallow the next one. Where it cannot be cut off, the journal takes no more."""
        with suppress(OSError):  # what came first is the error to tell
            os.ftruncate(self._fd, start)
            self._whole = True

    def _line(self, entry: Entry) -> bytes:
        with _telling("read", self.path):
            return os.pread(self._fd, entry.length, entry.offset)


def left_behind(folder: Path) -> Iterator[Journal]:
    """Journals whose process has died, locked for us, each with what MLflow did not get. Close each after use."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            journal = Journal(folder, path)
        except JournalError as exc:
            if isinstance(exc.__cause__, _GONE):
                continue
            raise
        yield journal


def journalled_keys(folder: Path) -> set[str]:
    """Cells that are finished but wait in a journal of the folder, its process alive or not."""
    return {entry.cell_key for entry in _waiting_in(folder) if entry.cell_key is not None}


def count_left_behind(folders: Iterable[Path]) -> int:
    """How many results wait in journals, alive or not; for messages."""
    return sum(1 for folder in folders for _ in _waiting_in(folder))


def _waiting_in(folder: Path) -> Iterator[Entry]:
    """Without a lock, so a file may change or vanish meanwhile; lines of another format are passed over."""
    for path in sorted(folder.glob("*.jsonl")):
        with _telling("read", path), suppress(FileNotFoundError), path.open("rb") as file:
            yield from read_lines(file).open.values()


def _load(path: Path, fd: int) -> Contents:
    """What a locked file holds; closes it when that cannot be used. A torn end is cut off: notes are to follow."""
    try:
        with open(fd, "rb", closefd=False) as file:  # not by its path, which another file may have by now
            contents = read_lines(file)
        _refuse_foreign(path, contents)
        os.ftruncate(fd, contents.size)
    except BaseException:
        os.close(fd)
        raise
    return contents


def _refuse_foreign(path: Path, contents: Contents) -> None:
    if contents.foreign is not None:
        raise JournalError(
            f"The journal {path} holds results in another format ({contents.foreign}); this tipbench reads "
            f"version {FORMAT}. Run the tipbench version that wrote it, or move the file away to go on without it."
        )


def _create(folder: Path, tries: int = 20) -> tuple[Path, int]:
    """A new file, open and locked. A drainer may lock or remove one before we lock it; then another is made."""
    path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
    try:
        return path, _lock_file(path, os.O_CREAT | os.O_EXCL)
    except _GONE:
        if tries == 1:
            raise
        return _create(folder, tries - 1)


def _lock_file(path: Path, how: int = 0) -> int:
    """The file, open and ours alone; raises one of `_GONE` when it is not to be had."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | how, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_still_there(path, fd)
        if how:
            sync_folder(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_still_there(path: Path, fd: int) -> None:
    if os.fstat(fd).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "removed before it could be locked", str(path))


def _append_synced(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        start = os.fstat(fd).st_size
        torn = start > 0 and os.pread(fd, 1, start - 1) != b"\n"
        try:
            _write_all(fd, b"\n" * torn + line)
            os.fsync(fd)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(fd, start)
            raise
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _telling(what: str, path: Path) -> Iterator[None]:
    """What the system says becomes a sentence; anything else, an interrupt included, passes as it is."""
    try:
        yield
    except OSError as exc:
        raise JournalError(
            f"The journal {path} cannot be {what}: {exc.strerror or exc}. "
            "Results must be on disk before they count, so the run stops; make room or set TIPBENCH_HOME elsewhere."
        ) from exc
