"""SQLite databases: connections, migrations, transactions and group commits for all stores of tipbench."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from sqlite3 import Connection, Row
from typing import NamedTuple

from tipbench.errors import QueueFull, TipbenchError, UsageError
from tipbench.files import convert_home_errors, make_folder, open_private, sync_folder

__all__ = ["Connection", "Database", "GroupCommit", "Row"]

_MAX_ROWS = 64  # rows per INSERT statement


class Database:
    """One SQLite file, readable by its owner only. A change is on disk when the call that makes it returns.

    Threads share one connection, and several processes may use the file at once.
    """

    def __init__(
        self, path: Path, migrations: Sequence[str], purpose: str, *, busy_s: float = 5.0, wal: bool = False
    ) -> None:
        """Open the file; creates and migrates it as needed.

        `migrations[i]` upgrades a file from `user_version` i to i + 1; its statements are separated by semicolons.
        Error messages begin with `purpose`, such as "The list of jobs". `busy_s` is how long to wait for the lock of
        another process. `wal` enables WAL mode: reads do not wait for writes.
        """
        self.path = path
        self._purpose = purpose
        self._busy_s = busy_s
        self._lock = threading.RLock()
        make_folder(path.parent, private=True)
        with convert_home_errors(path, "cannot be opened"):
            # Created here, not by SQLite, so that the file is private from the start.
            os.close(open_private(path))
            sync_folder(path.parent)
        with self._convert_errors():
            self._db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        try:
            with self._convert_errors():
                self._db.row_factory = Row
                if wal:
                    self._enable_wal()
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA foreign_keys = ON")
                self._migrate(migrations)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def execute(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Execute one statement and return its rows; none if it only writes."""
        with self._lock, self._convert_errors():
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Execute several statements atomically; holds SQLite's write lock from the start."""
        with self._lock, self._convert_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:  # SQLite itself rolls back after some errors, such as a full disk
                    self._db.execute("ROLLBACK")

    def _enable_wal(self) -> None:
        """Enable WAL mode; retries for `busy_s`.

        SQLite's own timeout does not apply while another process enables WAL mode.
        """
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    def _migrate(self, migrations: Sequence[str]) -> None:
        newest = len(migrations)
        if self._version() < newest:
            with self.transaction() as db:
                version = self._version()  # read again: a process, even of a newer tipbench, may have migrated the file
                for migration in migrations[version:]:
                    for statement in filter(str.strip, migration.split(";")):
                        db.execute(statement)
                db.execute(f"PRAGMA user_version = {max(version, newest)}")
        if (version := self._version()) > newest:
            raise UsageError(
                f"{self.path} was written by a newer tipbench (its format is version {version}, this one reads up to "
                f"{newest}). Upgrade tipbench, or set TIPBENCH_HOME to another folder."
            )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise TipbenchError(
                f"{self._purpose} at {self.path} cannot be used: {exc}. Check the free space of its disk and the "
                "permissions, end the program that locks it, or restore it from a backup if it is damaged."
            ) from exc


class _Entry(NamedTuple):
    statement: str | None  # None: insert the values as a row
    values: Sequence[object]


class GroupCommit:
    """Inserts rows into one table in a background thread. Rows that are queued during a commit share the next commit.

    All rows of a commit share one future, which cannot be cancelled. If a commit fails, the rows queued in the meantime
    fail with it, because they may depend on its rows.
    """

    def __init__(
        self,
        database: Database,
        table: str,
        n_columns: int,
        *,
        capacity: int,
        lock: threading.RLock,
        on_failure: Callable[[], None],
    ) -> None:
        """`on_failure` is called after a failed commit with `lock` held, before the futures fail."""
        self._database = database
        self._capacity = capacity
        self._changed = threading.Condition(lock)  # guards the queue
        self._on_failure = on_failure
        self._placeholders = f"({', '.join('?' * n_columns)})"
        self._insert = f"INSERT INTO {table} VALUES "  # noqa: S608
        self._queue: list[_Entry] = []
        self._next_commit = _running_future()  # shared by the queued entries
        self._current_commit: Future[None] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"writer-{table}", daemon=True)
        self._thread.start()

    def insert(self, row: Sequence[object]) -> Future[None]:
        """Queue a row and return the future of its commit. Raises QueueFull if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._capacity:
                reason = "the store is closing" if self._closed else f"{len(self._queue):,} are waiting"
                raise QueueFull(
                    f"At most {self._capacity:,} entries may wait for the disk; {reason}. Retry in a second."
                )
            return self._append(_Entry(None, row))

    def execute(self, statement: str, values: Sequence[object]) -> Future[None]:
        """Queue any statement and return the future of its commit, even if the queue is full.

        Statements and rows are executed in the order in which they were queued.
        """
        return self._append(_Entry(statement, values))

    @property
    def n_waiting(self) -> int:
        """Number of queued entries, without those of the commit in progress."""
        return len(self._queue)

    def pending(self) -> Future[None] | None:
        """Return the future that completes once all current entries are committed, or None if they already are."""
        with self._changed:
            return self._next_commit if self._queue else self._current_commit

    def close(self) -> None:
        """Commit the queued entries and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _append(self, entry: _Entry) -> Future[None]:
        with self._changed:
            if not self._queue:
                self._changed.notify()
            self._queue.append(entry)
            return self._next_commit

    def _run(self) -> None:
        while True:
            with self._changed:
                self._current_commit = None
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                queue, self._queue = self._queue, []
                commit = self._current_commit = self._next_commit
                self._next_commit = _running_future()
            try:
                with self._database.transaction() as db:
                    self._write(db, queue)
            except Exception as exc:  # noqa: BLE001 - the futures pass it on to the callers
                with self._changed:
                    self._queue.clear()
                    next_commit, self._next_commit = self._next_commit, _running_future()
                    self._on_failure()
                commit.set_exception(exc)
                next_commit.set_exception(exc)
            else:
                commit.set_result(None)

    def _write(self, db: Connection, queue: list[_Entry]) -> None:
        # Several rows per statement, because each statement releases the GIL and has to acquire it again.
        for statement, entries in groupby(queue, key=lambda entry: entry.statement):
            if statement is not None:
                for entry in entries:
                    db.execute(statement, entry.values)
                continue
            rows = [entry.values for entry in entries]
            while rows:
                # The largest power of two that fits, so that few different statements have to be prepared.
                n_rows = 1 << (min(len(rows), _MAX_ROWS).bit_length() - 1)
                values = [value for row in rows[:n_rows] for value in row]
                db.execute(self._insert + ", ".join([self._placeholders] * n_rows), values)
                del rows[:n_rows]


def _running_future() -> Future[None]:
    """Return a future that callers cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future
