"""The panel's own small database under the home folder: tokens and ended sessions. Shared by panel and command line."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tipbench.errors import TipbenchError
from tipbench.generate.durable import sync_folder
from tipbench.generate.home import in_home

FOLDER = "panel"
FILE = "panel.sqlite"
VERSION = 1
_BUSY_S = 5.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, sha256 TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL,
    created INTEGER NOT NULL, expires INTEGER, revoked INTEGER, last_used INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS ended_sessions (id TEXT PRIMARY KEY, expires INTEGER NOT NULL) STRICT;
"""


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
            if found == 0:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
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
            f"The panel keeps its tokens in {self._path}, which cannot be used: {exc}. "
            "Make room on the disk or end the program that locks it; restore it from a backup if it is damaged."
        )
