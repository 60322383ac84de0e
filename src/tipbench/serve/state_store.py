"""Where state is stored: in the SQLite file of the event log, or in one file per user and policy.

Both keep the same bytes under (user, name), where the name is a policy's or `tallies`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from tipbench.errors import UsageError
from tipbench.files import home_errors, make_folder, sync_folder, write_atomic
from tipbench.serve.event_log import FOLDER, read_entries, read_resets, read_users
from tipbench.serve.prior import Prior
from tipbench.serve.state import LEARNED, NAMES, UserState
from tipbench.sqlite import Database

SUFFIXES = {name: name.removesuffix("/v1").replace("/", "_") for name in NAMES}  # egreedy, egreedy_v2, …, tallies
STATES = ("sqlite", "files")
STATE_FOLDER = "state"
_FILE = re.compile(rf"([0-9a-f]{{32}})_({'|'.join(SUFFIXES.values())})\.json")


class StateStore(Protocol):
    """Stores documents by (user, name); each is replaced atomically, and is on disk when the call returns."""

    def load(self, user: str) -> dict[str, bytes]:
        """Return the user's documents by name."""
        ...

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        """Write documents in the order given, by (user, name); None deletes."""
        ...

    def set_aside(self, user: str, name: str) -> str:
        """Move a corrupt document away and return where it is now."""
        ...

    def erase(self, user: str) -> None:
        """Delete all documents of a user, also those that were set aside."""
        ...

    def users(self) -> Iterator[str]:
        """Yield the users that have documents, in order."""
        ...


class SqliteStore:
    """Documents as rows of a table; `reads` may be another connection, which a commit does not block."""

    def __init__(self, reads: Database, writes: Database) -> None:
        self._reads = reads
        self._database = writes

    def load(self, user: str) -> dict[str, bytes]:
        rows = self._reads.rows("SELECT name, body FROM state WHERE user = ?", (user,))
        return {name: body for name, body in rows}  # noqa: C416

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        with self._database.transaction() as db:
            for (user, name), document in documents.items():
                if document is None:
                    db.execute("DELETE FROM state WHERE user = ? AND name = ?", (user, name))
                else:
                    db.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (user, name, document))

    def set_aside(self, user: str, name: str) -> str:
        with self._database.transaction() as db:
            place = db.execute(
                "INSERT INTO corrupt_state (user, name, body) SELECT * FROM state WHERE user = ? AND name = ?",
                (user, name),
            ).lastrowid
            db.execute("DELETE FROM state WHERE user = ? AND name = ?", (user, name))
        return f"row {place} of corrupt_state"

    def erase(self, user: str) -> None:
        with self._database.transaction() as db:
            db.execute("DELETE FROM state WHERE user = ?", (user,))
            db.execute("DELETE FROM corrupt_state WHERE user = ?", (user,))

    def users(self) -> Iterator[str]:
        return read_users(self._reads, "state")


class FileStore:
    """Documents as files `<user>_egreedy.json`, `<user>_egreedy_v2.json`, …, `<user>_tallies.json` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_folder(folder, private=True)

    def load(self, user: str) -> dict[str, bytes]:
        documents = {}
        for name in NAMES:
            path = self._path(user, name)
            with home_errors(path, "cannot be read"), suppress(FileNotFoundError):
                documents[name] = path.read_bytes()
        return documents

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        for (user, name), document in documents.items():
            path = self._path(user, name)
            with home_errors(path, "cannot be written"):
                if document is None:
                    path.unlink(missing_ok=True)
                    sync_folder(self.folder)
                else:
                    write_atomic(path, document)

    def set_aside(self, user: str, name: str) -> str:
        path = self._path(user, name)
        aside = path.with_name(f"{path.name}.corrupt-{os.urandom(4).hex()}")
        with home_errors(path, "cannot be renamed"):
            path.rename(aside)
            sync_folder(self.folder)
        return str(aside)

    def erase(self, user: str) -> None:
        with home_errors(self.folder, "cannot be cleaned"):
            for path in (*self.folder.glob(f"{user}_*"), *self.folder.glob(f".{user}_*")):
                path.unlink(missing_ok=True)
            sync_folder(self.folder)

    def remove_leftovers(self) -> None:
        """Remove temporary files of a process that was killed; only while no other process writes here."""
        with home_errors(self.folder, "cannot be cleaned"):
            for path in self.folder.glob(".*.new"):
                path.unlink(missing_ok=True)

    def users(self) -> Iterator[str]:
        with home_errors(self.folder, "cannot be read"):
            names = sorted({match[1] for entry in os.scandir(self.folder) if (match := _FILE.fullmatch(entry.name))})
        yield from names

    def _path(self, user: str, name: str) -> Path:
        return self.folder / f"{user}_{SUFFIXES[name]}.json"


def open_state(home: Path, kind: str, reads: Database, writes: Database) -> StateStore:
    """Return the store of a home folder, "sqlite" or "files"; raises UsageError."""
    if kind not in STATES:
        raise UsageError(f"State is stored in {' or '.join(STATES)}, not in {kind!r}.")
    return FileStore(home / FOLDER / STATE_FOLDER) if kind == "files" else SqliteStore(reads, writes)


def load_user(
    key: str, priors: Mapping[str, Prior], database: Database, store: StateStore | None, *, set_aside: bool = True
) -> UserState:
    """Return a user's state: the documents, with newer entries of the log applied; without a store from the log alone.

    A corrupt document is rebuilt from the log and, with `set_aside`, moved away. An unknown schema raises StateError.
    """
    user = UserState(key, priors)
    documents = store.load(key) if store else {}
    user.load(
        documents,
        read_resets(database, key),
        lambda after: read_entries(database, after=after, user=key, kinds=LEARNED),
        store.set_aside if store and set_aside else None,
    )
    return user
