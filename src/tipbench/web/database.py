"""The panel's own small database under the home folder: tokens, ended sessions, batches, the webhook.

The command line shares it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tipbench.errors import TipbenchError
from tipbench.generate.durable import sync_folder
from tipbench.generate.home import in_home

FOLDER = "panel"
FILE = "panel.sqlite"
_BUSY_S = 5.0
_TOKENS = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL,
    created INTEGER NOT NULL, expires INTEGER, revoked INTEGER, last_used INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS ended_sessions (id TEXT PRIMARY KEY, expires INTEGER NOT NULL) STRICT;
"""
_BATCHES = """
CREATE TABLE IF NOT EXISTS batches (
    sheet TEXT PRIMARY KEY, place TEXT NOT NULL, experiment TEXT NOT NULL, judge TEXT NOT NULL, kind TEXT NOT NULL,
    content TEXT NOT NULL, size INTEGER NOT NULL, status TEXT NOT NULL, revision INTEGER NOT NULL DEFAULT 0,
    opened REAL NOT NULL, updated REAL NOT NULL, closed REAL, note TEXT, accepted TEXT, outcome TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS batches_by_judge ON batches (experiment, judge, updated);
CREATE TABLE IF NOT EXISTS batch_items (
    sheet TEXT NOT NULL, item TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER, cause TEXT NOT NULL,
    state TEXT NOT NULL, content TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, updated REAL NOT NULL,
    PRIMARY KEY (sheet, item)
) STRICT;
CREATE TABLE IF NOT EXISTS batch_history (
    sheet TEXT NOT NULL, item TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER, cause TEXT NOT NULL,
    state TEXT NOT NULL, content TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, updated REAL NOT NULL,
    PRIMARY KEY (sheet, item, version)
) STRICT;
CREATE TABLE IF NOT EXISTS batch_keys (
    judge TEXT NOT NULL, key TEXT NOT NULL, sheet TEXT NOT NULL, used REAL NOT NULL, PRIMARY KEY (judge, key)
) STRICT;
"""
_HOOK = """
CREATE TABLE IF NOT EXISTS hook_deliveries (
    id TEXT PRIMARY KEY, receiver TEXT NOT NULL, event TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL,
    experiment TEXT, body TEXT NOT NULL, state TEXT NOT NULL, created REAL NOT NULL, next_try REAL
) STRICT;
CREATE TABLE IF NOT EXISTS hook_attempts (
    delivery TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL, took_s REAL NOT NULL, status INTEGER,
    reason TEXT NOT NULL, PRIMARY KEY (delivery, number)
) STRICT;
CREATE TABLE IF NOT EXISTS hook_seen (
    receiver TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL, revision TEXT NOT NULL,
    PRIMARY KEY (receiver, place, experiment_id)
) STRICT;
CREATE TABLE IF NOT EXISTS hook_told (
    receiver TEXT NOT NULL, place TEXT NOT NULL, experiment_id TEXT NOT NULL, run_id TEXT NOT NULL,
    PRIMARY KEY (receiver, place, experiment_id, run_id)
) STRICT, WITHOUT ROWID;
"""
_STEPS = (_TOKENS, _BATCHES, _HOOK)  # element i brings a file of version i to i + 1
VERSION = len(_STEPS)


def panel_folder(home: Path) -> Path:
    """Where the panel keeps its secrets: a folder that only its owner may enter."""
    folder = home / FOLDER
    with in_home(folder, "cannot be made"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class Database:
    """One SQLite file, readable by its owner alone; every statement is on disk when it returns. Thread-safe."""

    def __init__(self, home: Path) -> None:
        self._path = panel_folder(home) / FILE
        self._lock = threading.Lock()
        self._connection = self._open()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """Run one statement and return its rows."""
        with self._lock:
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as exc:
                raise self._failure(exc) from exc

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Several statements that are carried out together or not at all, with nobody else's in between."""
        with self._lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as exc:
                raise self._failure(exc) from exc
            finally:
                if self._connection.in_transaction:
                    self._connection.rollback()

    def _open(self) -> sqlite3.Connection:
        with in_home(self._path, "cannot be opened"):
            # Made by us and not by SQLite, so that nobody else may read it for a single moment.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            sync_folder(self._path.parent)
        try:
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            connection.execute("PRAGMA synchronous = FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found < VERSION:
                steps = "".join(_STEPS[found:])
                connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {VERSION}; COMMIT;")
        except sqlite3.Error as exc:
            raise self._failure(exc) from exc
        if found > VERSION:
            connection.close()
            raise TipbenchError(
                f"{self._path} was written by a newer tipbench (version {found}; this one knows {VERSION}). "
                "Upgrade tipbench, or use another TIPBENCH_HOME."
            )
        return connection

    def _failure(self, exc: sqlite3.Error) -> TipbenchError:
        return TipbenchError(
            f"The panel keeps its tokens and drafts in {self._path}, which cannot be used: {exc}. "
            "Make room on the disk or end the program that locks it; restore it from a backup if it is damaged."
        )
