"""SQLite files: connections, migrations, queries and transactions for all stores of tipbench."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection, Row

from tipbench.errors import TipbenchError, UsageError
from tipbench.files import home_errors, make_folder, open_private, sync_folder

__all__ = ["Connection", "Database", "Row"]


class Database:
    """One SQLite file, readable by its owner only; a change is on disk when its call returns.

    Threads share one connection, and several processes may use the file at once.
    """

    def __init__(
        self, path: Path, migrations: Sequence[str], purpose: str, *, busy_s: float = 5.0, wal: bool = False
    ) -> None:
        """Open the file; creates and migrates it as needed.

        `migrations[i]` has the statements, separated by semicolons, that upgrade a file from version i to i + 1; the
        version is SQLite's `user_version`. `purpose` starts error messages, as in "The list of jobs". `busy_s` is the
        timeout while another process writes. `wal` allows reads during writes, at the cost of two more files.
        """
        self.path = path
        self._purpose = purpose
        self._busy_s = busy_s
        self._lock = threading.RLock()
        make_folder(path.parent, private=True)
        with home_errors(path, "cannot be opened"):
            # Created here, not by SQLite, so that the file is private from the start.
            os.close(open_private(path))
            sync_folder(path.parent)
        with self._errors():
            self._db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        try:
            with self._errors():
                self._configure(wal)
                self._migrate(migrations)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Row]:
        """Execute one statement and return its rows."""
        with self._lock, self._errors():
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Execute several statements atomically; holds SQLite's write lock from the start."""
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:  # after an error, unless SQLite has already rolled back, as on a full disk
                    self._db.execute("ROLLBACK")

    def _configure(self, wal: bool) -> None:
        self._db.row_factory = Row
        if wal:
            self._enable_wal()
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")

    def _enable_wal(self) -> None:
        """Enable WAL mode; retries until `busy_s`: SQLite's timeout does not apply while another process enables it."""
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
                found = self._version()  # read again: another process may have migrated the file
                for migration in migrations[found:]:
                    for statement in filter(str.strip, migration.split(";")):
                        db.execute(statement)
                db.execute(f"PRAGMA user_version = {max(found, newest)}")
        if (found := self._version()) > newest:
            raise UsageError(
                f"{self.path} was written by a newer tipbench (its format is version {found}, this one reads up to "
                f"{newest}). Upgrade tipbench, or set TIPBENCH_HOME to another folder."
            )

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise TipbenchError(
                f"{self._purpose} at {self.path} cannot be used: {exc}. Check the free space of its disk and the "
                "permissions, end the program that locks it, or restore it from a backup if it is damaged."
            ) from exc
