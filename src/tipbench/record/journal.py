"""The write-ahead journal: a result is on disk before MLflow hears of it, and leaves when MLflow has it.

One append-only file per process, locked while its owner lives, in a folder per tracking server and experiment.
A line is a record or the note that one was kept. The journal is also the queue to MLflow: in memory it holds
only where each record stands in the file, so a slow MLflow costs no memory. What a dead process left is found
by its free lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tipbench.errors import JournalError
from tipbench.record.run import NewRun, RunKind

_COMPACT_BYTES = 32 * 2**20
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Entry:
    """Where a record that MLflow does not have yet stands in the file."""

    record_id: str
    offset: int
    length: int


def journal_folder(home: Path, tracking: str, experiment: str) -> Path:
    """The folder for results on their way to one experiment of one tracking server."""
    name = hashlib.sha256(f"{tracking}\n{experiment}".encode()).hexdigest()[:16]
    return home / "journal" / name


class Journal:
    """This process's journal file. One thread appends; any thread may take, read and mark entries."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        self.path = path or folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._waiting: deque[Entry] = deque()
        self._open: dict[str, Entry] = {}  # every entry MLflow does not have, waiting or taken
        self._changed = threading.Condition()
        self._size = 0
        self._closed = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sync_folder(folder)
        except OSError as exc:
            raise JournalError(_cannot("open", self.path, exc)) from exc
        if path is not None:
            self._load()

    def append(self, runs: Sequence[NewRun]) -> None:
        """Write results down and sync once; when this returns they are finished, whatever happens next."""
        lines = [_ENCODER.encode({"put": vars(run)}).encode() + b"\n" for run in runs]
        data = b"".join(lines)
        with self._changed:
            start = self._size
            try:
                _write_all(self._fd, data)
                os.fsync(self._fd)
            except OSError as exc:
                os.ftruncate(self._fd, start)  # half a line would swallow the next one
                raise JournalError(_cannot("write", self.path, exc)) from exc
            self._size += len(data)
            for run, line in zip(runs, lines, strict=True):
                entry = Entry(run.record_id, start, len(line))
                start += len(line)
                self._open[entry.record_id] = entry
                self._waiting.append(entry)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Entry | None:
        """The next entry to be kept; None when there is none in time."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(timeout_s)
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, entry: Entry) -> None:
        """It could not be kept now; it comes first again."""
        with self._changed:
            self._waiting.appendleft(entry)
            self._changed.notify_all()

    def read(self, entry: Entry) -> NewRun:
        return _decode(os.pread(self._fd, entry.length, entry.offset))

    def kept(self, entry: Entry) -> None:
        """MLflow has it. Not synced: a lost note only means that MLflow is asked once more."""
        line = _ENCODER.encode({"kept": entry.record_id}).encode() + b"\n"
        with self._changed:
            self._open.pop(entry.record_id, None)
            try:
                if self._open or self._size < _COMPACT_BYTES:
                    _write_all(self._fd, line)
                    self._size += len(line)
                else:
                    os.ftruncate(self._fd, 0)
                    self._size = 0
            except OSError as exc:
                raise JournalError(_cannot("write", self.path, exc)) from exc
            self._changed.notify_all()

    def outstanding(self) -> int:
        with self._changed:
            return len(self._open)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_change(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Let go; the file stays only if something in it is not kept yet."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            if not self._open:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._changed.notify_all()

    def _load(self) -> None:
        offset = 0
        with self.path.open("rb") as file:
            for line in file:
                op, value = _operation(line)
                if op == "put":
                    self._open[value] = Entry(value, offset, len(line))
                elif op == "kept":
                    self._open.pop(value, None)
                offset += len(line)
        self._size = offset
        self._waiting.extend(self._open.values())


def left_behind(folder: Path) -> Iterator[Journal]:
    """Journals whose process has died, locked for us, each with what MLflow did not get. Close each after use."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            journal = Journal(folder, path)
        except JournalError as exc:
            if isinstance(exc.__cause__, BlockingIOError):
                continue  # its owner lives
            raise
        yield journal


def count_left_behind(folders: Iterable[Path]) -> int:
    """How many results wait in journals, alive or not; for messages."""
    total = 0
    for folder in folders:
        for path in folder.glob("*.jsonl"):
            open_ids: set[str] = set()
            for line in path.read_bytes().splitlines(keepends=True):
                op, value = _operation(line)
                (open_ids.add if op == "put" else open_ids.discard)(value)
            total += len(open_ids)
    return total


def _operation(line: bytes) -> tuple[str, str]:
    """What a line says; a torn one (the process died while writing it) says nothing."""
    if not line.endswith(b"\n"):
        return "torn", ""
    try:
        value = json.loads(line)
        return ("put", value["put"]["record_id"]) if "put" in value else ("kept", value["kept"])
    except (ValueError, KeyError, TypeError):
        return "torn", ""


def _decode(line: bytes) -> NewRun:
    fields = json.loads(line)["put"]
    return NewRun(**{**fields, "kind": RunKind(fields["kind"]), "supersedes": tuple(fields["supersedes"])})


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot(what: str, path: Path, exc: OSError) -> str:
    return (
        f"The journal {path} cannot be {'opened' if what == 'open' else 'written'}: {exc.strerror}. "
        "Results must be on disk before they count, so the run stops; make room or set TIPBENCH_HOME elsewhere."
    )
