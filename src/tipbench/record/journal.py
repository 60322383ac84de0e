"""The journal: files that keep results until MLflow has stored them.

The next collect *drains* the journal of a process that died: it stores the results that MLflow does not have yet.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from tipbench.errors import JournalError
from tipbench.files import flock, open_private, sync_folder
from tipbench.record.run import NewRun, RunKind

FORMAT = 1  # version of a line, stored under the key "v"; a line without this key has version 1

_COMPACT_BYTES = 32 * 2**20  # a larger file is truncated once all its results are stored
_LOCK_ERRORS = (BlockingIOError, FileNotFoundError)  # another process has locked or removed the file
_CREATE_ATTEMPTS = 20
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_CHECKSUM = re.compile(rb',"sum":"([0-9a-f]{8})"\}\n\Z')
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "kind": str, "record_id": str, "name": str, "start_ms": int, "end_ms": int, "ok": bool,
    "cell_key": (str, NoneType), "params": dict, "metrics": dict, "tags": dict, "texts": dict, "supersedes": list,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """The position of a result in the file."""

    record_id: str
    offset: int  # in bytes
    length: int  # in bytes
    cell_key: str | None = None  # None if the cell failed or the run is not a cell


@dataclass(frozen=True)
class StoredMark:
    """A line that marks a result as stored in MLflow."""

    record_id: str


@dataclass(frozen=True)
class UnknownLine:
    """A line in another format, written by another version of tipbench."""

    format: str  # what is known of it, for an error message


@dataclass
class Contents:
    """Contents of a journal file."""

    unstored: dict[str, Entry] = field(default_factory=dict)  # by record id, in order
    size: int = 0  # bytes of the complete lines
    first_unknown: UnknownLine | None = None
    n_damaged_lines: int = 0  # invalid, or not matching their checksum


class _FileUnavailable(JournalError):
    """Another process has locked or removed the file."""


def result_line(run: NewRun) -> bytes:
    """Return the line of a result. The kind of run comes first: benchmarks/process.py relies on it."""
    return _with_checksum({"put": vars(run), "v": FORMAT})


def stored_line(record_id: str) -> bytes:
    """Return the line that marks a result as stored in MLflow; its key "kept" means kept by MLflow."""
    return _with_checksum({"kept": record_id})


def _with_checksum(values: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(values).encode()
    return b'%s,"sum":"%08x"}\n' % (text.removesuffix(b"}"), zlib.crc32(text))


def entry_of(run: NewRun, offset: int, length: int) -> Entry:
    """Return the entry of a result with its line at this position."""
    return Entry(run.record_id, offset, length, run.cell_key if run.ok else None)


def read_lines(lines: Iterable[bytes]) -> Contents:
    """Parse a journal from its beginning."""
    contents = Contents()
    for line in lines:
        if not line.endswith(b"\n"):
            break  # incomplete: the process died while it wrote the line
        parsed = parse_line(line)
        if isinstance(parsed, NewRun):
            contents.unstored[parsed.record_id] = entry_of(parsed, contents.size, len(line))
        elif isinstance(parsed, StoredMark):
            contents.unstored.pop(parsed.record_id, None)
        elif isinstance(parsed, UnknownLine):
            contents.first_unknown = contents.first_unknown or parsed
        else:
            contents.n_damaged_lines += 1
        contents.size += len(line)
    return contents


def parse_line(line: bytes) -> NewRun | StoredMark | UnknownLine | None:
    """Parse a line; returns None if it is damaged. Lines written by earlier versions of tipbench have no checksum."""
    checksum = _CHECKSUM.search(line)
    if checksum and zlib.crc32(line[: checksum.start()] + b"}") != int(checksum[1], 16):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    version = value.get("v", FORMAT)
    if version != FORMAT:
        return UnknownLine(f"version {str(version)[:40]}")
    other_keys = value.keys() - {"put", "kept", "v"}
    if other_keys and not checksum:  # the only other key is `sum`, which _CHECKSUM has not found: it is damaged
        return None
    if isinstance(value.get("kept"), str):
        return StoredMark(value["kept"])
    fields = value.get("put")
    if not isinstance(fields, dict):
        return UnknownLine(f"version {FORMAT}, but neither a result nor a mark")
    if unknown := fields.keys() - _FIELD_TYPES.keys():
        return UnknownLine(f"version {FORMAT} with unknown fields: {', '.join(sorted(unknown))[:80]}")
    if missing := _FIELD_TYPES.keys() - fields.keys():
        return UnknownLine(f"version {FORMAT} without the fields {', '.join(sorted(missing))}")
    if mistyped := [name for name, kind in _FIELD_TYPES.items() if not isinstance(fields[name], kind)]:
        return UnknownLine(f"version {FORMAT} with values of other types in {', '.join(mistyped)}")
    if fields["kind"] not in set(RunKind):
        return UnknownLine(f"version {FORMAT} with an unknown kind of run, {fields['kind'][:40]!r}")
    return NewRun(**{**fields, "kind": RunKind(fields["kind"]), "supersedes": tuple(fields["supersedes"])})


def journal_folder(home: Path, server_identity: str, experiment: str) -> Path:
    """Return the folder for results of one experiment on one tracking server."""
    name = hashlib.sha256(f"{server_identity}\n{experiment}".encode()).hexdigest()[:16]
    return home / "journal" / name


class Journal:
    """The journal file of this process. One thread appends; any thread may take, read and mark entries."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Create a journal in the folder, or open the file `path` of a dead process."""
        # Use `with self._lock`, never `with self._changed`: an interrupt in Condition.__enter__ would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._last_line_complete = True
        contents = Contents()
        with _convert_os_errors("opened", path or folder):
            if path is None:
                folder.mkdir(parents=True, exist_ok=True)
                self.path, self._fd = _create(folder)
            else:
                self.path, self._fd = path, _lock_file(path)
                contents = _load(path, self._fd)
        self.n_damaged_lines = contents.n_damaged_lines
        self._unstored = contents.unstored  # both the entries in `_waiting` and those taken from it
        self._waiting = deque(self._unstored.values())

    def append(self, runs: Sequence[NewRun]) -> None:
        """Write results and sync the file. If it raises, none of them is saved."""
        lines = [result_line(run) for run in runs]
        with self._lock, _convert_os_errors("written", self.path):
            end = start = self._end_offset()
            entries = []
            for run, line in zip(runs, lines, strict=True):
                entries.append(entry_of(run, end, len(line)))
                end += len(line)
            try:
                self._last_line_complete = False
                _write_all(self._fd, b"".join(lines))
                os.fsync(self._fd)
                self._unstored.update((entry.record_id, entry) for entry in entries)
                self._waiting.extend(entries)
                self._last_line_complete = True
            except BaseException:  # also for an interrupt: the caller relies on nothing being saved
                for entry in entries:
                    self._unstored.pop(entry.record_id, None)
                self._waiting = deque(entry for entry in self._waiting if entry.offset < start)
                self._truncate_to(start)
                raise
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Entry | None:
        """Return the next entry to be stored; None after the timeout, or earlier after a wake-up or `close`."""
        with self._lock:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_s)
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, entry: Entry) -> None:
        """Put an entry that could not be stored back at the end of the queue."""
        with self._lock:
            self._waiting.append(entry)
            self._changed.notify_all()

    def read(self, entry: Entry) -> NewRun:
        """Read the result of an entry from the file."""
        run = parse_line(self._read_line(entry))
        if not isinstance(run, NewRun):
            raise JournalError(
                f"A result in the journal {self.path} has changed since it was written (at byte {entry.offset}). "
                "Another program has changed the file; move it away to continue without its results."
            )
        return run

    def mark_stored(self, entry: Entry) -> None:
        """Mark an entry as stored. The mark is not synced: if it is lost, the next drain finds the run in MLflow."""
        with self._lock, _convert_os_errors("written", self.path):
            if entry.record_id not in self._unstored:
                return
            start = self._end_offset()
            try:
                self._last_line_complete = False
                _write_all(self._fd, stored_line(entry.record_id))
                del self._unstored[entry.record_id]
                self._last_line_complete = True
            except BaseException:  # also after an interrupt, the file must not end in half a line
                self._unstored[entry.record_id] = entry
                self._truncate_to(start)
                raise
            if not self._unstored and not self.n_damaged_lines and start > _COMPACT_BYTES:  # damaged lines are kept
                with suppress(OSError):  # this only saves space, and the next call tries again
                    os.ftruncate(self._fd, 0)
            self._changed.notify_all()

    def set_aside(self, entry: Entry) -> Path:
        """Move an entry, which MLflow has rejected, to a file that is never drained; return the path of that file."""
        refused_path = self.path.with_name(f"{self.path.name}.refused")
        with self._lock:
            line = self._read_line(entry)
            with _convert_os_errors("written", refused_path):
                _append_synced(refused_path, line)
            self.mark_stored(entry)  # so that it is not tried again
        return refused_path

    @property
    def damaged_path(self) -> Path:
        """The path to which `close` renames a journal with damaged lines."""
        return self.path.with_name(f"{self.path.name}.damaged")

    def n_unstored(self) -> int:
        """Return the number of results that MLflow has not stored yet."""
        with self._lock:
            return len(self._unstored)

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._lock:
            self._changed.notify_all()

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until an entry is appended, stored or put back, or `wake` is called."""
        with self._lock:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Close the journal. If all results are stored, remove its file, or rename it if it has damaged lines."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._unstored:
                with suppress(OSError):  # the next drain removes a file that is left
                    if self.n_damaged_lines:
                        self.path.rename(self.damaged_path)  # so that it is not read again
                    else:
                        self.path.unlink(missing_ok=True)
            fd, self._fd = self._fd, -1  # another file may get the same number
            os.close(fd)
            self._changed.notify_all()

    def _end_offset(self) -> int:
        """Return the offset of the next line; raises JournalError if no line can be added."""
        if self._closed or not self._last_line_complete:
            state = "is closed" if self._closed else "may end in half a line, which could not be removed"
            raise JournalError(
                f"The journal {self.path} {state}, so nothing more is written to it. "
                "Run the same command again: it records the complete lines of the journal."
            )
        return os.fstat(self._fd).st_size

    def _truncate_to(self, offset: int) -> None:
        """Remove lines that may be incomplete. If that fails, no line can be added any more."""
        with suppress(OSError):  # the caller raises the error of the write
            os.ftruncate(self._fd, offset)
            self._last_line_complete = True

    def _read_line(self, entry: Entry) -> bytes:
        with _convert_os_errors("read", self.path):
            return os.pread(self._fd, entry.length, entry.offset)


def orphaned_journals(folder: Path) -> Iterator[Journal]:
    """Yield the journals of dead processes, locked. The caller closes each of them."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            journal = Journal(folder, path)
        except _FileUnavailable:
            continue
        yield journal


def journalled_keys(folder: Path) -> set[str]:
    """Return the keys of finished cells in the folder's journals, including those of running processes."""
    return {entry.cell_key for entry in _unstored_entries(folder) if entry.cell_key is not None}


def count_unstored(folders: Iterable[Path]) -> int:
    """Count the results that MLflow has not stored yet, including those of running processes."""
    return sum(1 for folder in folders for _ in _unstored_entries(folder))


def _unstored_entries(folder: Path) -> Iterator[Entry]:
    """Yield the entries that MLflow has not stored yet. Takes no lock, so a file may change or disappear."""
    for path in sorted(folder.glob("*.jsonl")):
        with _convert_os_errors("read", path), suppress(FileNotFoundError), path.open("rb") as file:
            yield from read_lines(file).unstored.values()


def _load(path: Path, fd: int) -> Contents:
    """Read a locked file and remove an incomplete last line. Closes the descriptor if it raises."""
    with ExitStack() as on_error:
        on_error.callback(os.close, fd)
        with open(fd, "rb", closefd=False) as file:  # not by path, which may lead to another file now
            contents = read_lines(file)
        if contents.first_unknown is not None:
            raise JournalError(
                f"The journal {path} holds results in another format ({contents.first_unknown.format}); this tipbench "
                f"reads version {FORMAT}. Run the tipbench version that wrote it, or move the file away to continue "
                "without it."
            )
        os.ftruncate(fd, contents.size)
        on_error.pop_all()
    return contents


def _create(folder: Path) -> tuple[Path, int]:
    """Create and lock a file and return its path and descriptor. Retries if a drain locks or removes it first."""
    n_failed = 0
    while True:
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        try:
            return path, _lock_file(path, create=True)
        except _LOCK_ERRORS:
            n_failed += 1
            if n_failed == _CREATE_ATTEMPTS:
                raise


def _lock_file(path: Path, *, create: bool = False) -> int:
    """Open and lock a file and return its descriptor; raises one of `_LOCK_ERRORS`."""
    create_flags = os.O_CREAT | os.O_EXCL if create else 0
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | create_flags, 0o600)
    with ExitStack() as on_error:
        on_error.callback(os.close, fd)
        if not flock(fd):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "removed before it could be locked", str(path))
        if create:
            sync_folder(path.parent)
        on_error.pop_all()
    return fd


def _append_synced(path: Path, line: bytes) -> None:
    """Append a line and sync the file. After an exception the file is unchanged."""
    fd = open_private(path, os.O_RDWR | os.O_APPEND)
    try:
        start = os.fstat(fd).st_size
        # A killed process may have left an incomplete line.
        ends_incomplete = start > 0 and os.pread(fd, 1, start - 1) != b"\n"
        try:
            _write_all(fd, (b"\n" if ends_incomplete else b"") + line)
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
def _convert_os_errors(participle: str, path: Path) -> Iterator[None]:
    """Convert an OSError into a JournalError, with the message "cannot be PARTICIPLE"."""
    try:
        yield
    except OSError as exc:
        error_class = _FileUnavailable if isinstance(exc, _LOCK_ERRORS) else JournalError
        raise error_class(
            f"The journal {path} cannot be {participle}: {exc.strerror or exc}. "
            "Results must be on disk before they count, so the command stops; free some space or move TIPBENCH_HOME."
        ) from exc
