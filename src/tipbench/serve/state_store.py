"""Stores of state documents, in SQLite or in files; export, import and rebuild of state.

Both stores keep the same bytes by (user, name); the name is a policy or `tallies`. An export is a folder in the format
of `FileStore`. The server must be stopped during an import or a rebuild.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from tipbench.errors import StateError, UsageError
from tipbench.files import convert_home_errors, sync_folder, write_atomic
from tipbench.serve.event_log import FOLDER, EventLog, open_database, read_entries, read_resets, read_users, store_lock
from tipbench.serve.policy import POLICIES
from tipbench.serve.prior import Prior
from tipbench.serve.state import DOCUMENT_NAMES, STATE_CHANGES, TALLIES, CorruptDocument, UserState, decode
from tipbench.sqlite import Database

# The end of a file name, by document name: egreedy, egreedy_v2, …, tallies
SUFFIXES = {name: name.removesuffix("/v1").replace("/", "_") for name in DOCUMENT_NAMES}
STORE_KINDS = ("sqlite", "files")
STATE_FOLDER = "state"
_FILE_NAME = re.compile(rf"([0-9a-f]{{32}})_({'|'.join(SUFFIXES.values())})\.json")
_USERS_PER_TRANSACTION = 500
# Documents are made without priors: their sums do not depend on one, and its hash, which they contain, is in the log.
_NO_PRIORS: Mapping[str, Prior] = {}
_logger = logging.getLogger(__name__)
_ConvertErrors = Callable[[Path, str], AbstractContextManager[None]]  # converts an OSError; takes (path, problem)


class StateStore(Protocol):
    """Stores documents by (user, name). Each is replaced atomically, and is on disk when the call returns."""

    def load(self, user: str) -> dict[str, bytes]:
        """Return the user's documents by name."""
        ...

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        """Write documents in the order of the mapping; None deletes a document."""
        ...

    def set_aside(self, user: str, name: str) -> str:
        """Move a corrupt document away, so that it is not loaded again; returns its new location."""
        ...

    def users(self) -> list[str]:
        """Return the users that have documents, sorted."""
        ...


class SqliteStore:
    """Documents as rows of a table; reads and writes may use separate connections, so that commits block no reads."""

    def __init__(self, database: Database, write_database: Database) -> None:
        self._database = database
        self._write_database = write_database

    def load(self, user: str) -> dict[str, bytes]:
        rows = self._database.execute("SELECT name, body FROM state WHERE user = ?", (user,))
        return {name: body for name, body in rows}  # noqa: C416 - mypy: `dict` takes tuples, not rows

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        with self._write_database.transaction() as db:
            for (user, name), document in documents.items():
                if document is None:
                    db.execute("DELETE FROM state WHERE user = ? AND name = ?", (user, name))
                else:
                    db.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (user, name, document))

    def set_aside(self, user: str, name: str) -> str:
        with self._write_database.transaction() as db:
            row_id = db.execute(
                "INSERT INTO corrupt_state (user, name, body) SELECT * FROM state WHERE user = ? AND name = ?",
                (user, name),
            ).lastrowid
            db.execute("DELETE FROM state WHERE user = ? AND name = ?", (user, name))
        return f"row {row_id} of corrupt_state"

    def users(self) -> list[str]:
        return [user for (user,) in self._database.execute("SELECT DISTINCT user FROM state ORDER BY user")]


class FileStore:
    """Documents as files in a folder: `<user>_egreedy.json`, `<user>_egreedy_v2.json`, …, `<user>_tallies.json`."""

    def __init__(self, folder: Path, convert_errors: _ConvertErrors = convert_home_errors) -> None:
        self.folder = folder
        self._convert_errors = convert_errors
        with convert_errors(folder, "cannot be created"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def load(self, user: str) -> dict[str, bytes]:
        documents = {}
        for name in DOCUMENT_NAMES:
            path = self._path(user, name)
            with self._convert_errors(path, "cannot be read"), suppress(FileNotFoundError):
                documents[name] = path.read_bytes()
        return documents

    def save(self, documents: Mapping[tuple[str, str], bytes | None]) -> None:
        for (user, name), document in documents.items():
            path = self._path(user, name)
            with self._convert_errors(path, "cannot be written"):
                if document is None:
                    path.unlink(missing_ok=True)
                    sync_folder(self.folder)
                else:
                    write_atomic(path, document)

    def set_aside(self, user: str, name: str) -> str:
        path = self._path(user, name)
        new_path = path.with_name(f"{path.name}.corrupt-{os.urandom(4).hex()}")
        with self._convert_errors(path, "cannot be renamed"):
            path.rename(new_path)
            sync_folder(self.folder)
        return str(new_path)

    def erase(self, user: str) -> None:
        """Delete all documents of a user, including corrupt ones that were set aside, and temporary files."""
        with self._convert_errors(self.folder, "cannot be cleaned"):
            for path in (*self.folder.glob(f"{user}_*"), *self.folder.glob(f".{user}_*")):
                path.unlink(missing_ok=True)
            sync_folder(self.folder)

    def remove_leftovers(self) -> None:
        """Remove the temporary files of killed processes. No other process may write to the folder meanwhile."""
        with self._convert_errors(self.folder, "cannot be cleaned"):
            for path in self.folder.glob(".*.new"):
                path.unlink(missing_ok=True)

    def users(self) -> list[str]:
        with self._convert_errors(self.folder, "cannot be read"):
            return sorted(
                {match[1] for entry in os.scandir(self.folder) if (match := _FILE_NAME.fullmatch(entry.name))}
            )

    def _path(self, user: str, name: str) -> Path:
        return self.folder / f"{user}_{SUFFIXES[name]}.json"


def open_state(home: Path, store_kind: str, database: Database, write_database: Database) -> StateStore:
    """Return the store of a home folder; raises UsageError if `store_kind` is neither "sqlite" nor "files"."""
    if store_kind not in STORE_KINDS:
        raise UsageError(f"State is stored in {' or '.join(STORE_KINDS)}, not in {store_kind!r}.")
    return FileStore(home / FOLDER / STATE_FOLDER) if store_kind == "files" else SqliteStore(database, write_database)


def load_user(
    key: str,
    priors: Mapping[str, Prior],
    database: Database,
    state_store: StateStore | None,
    *,
    may_set_aside: bool = True,
) -> UserState:
    """Return a user's state: the stored documents, with newer log entries applied.

    Without a store, the state is computed from the log alone. A corrupt document is rebuilt from the log and, with
    `may_set_aside`, moved away. Raises StateError for an unknown schema.
    """
    user = UserState(key, priors)
    user.reset_seq, user.erased_seq = read_resets(database, key)
    documents = state_store.load(key) if state_store else {}
    found_corrupt = False
    for name, document in documents.items():
        try:
            content = decode(document, key, name)
            user.restore(name, content)
            user.seqs[name] = content["seq"]
        except CorruptDocument as exc:
            found_corrupt = True
            location = f"moved to {state_store.set_aside(key, name)}" if state_store and may_set_aside else "not moved"
            _logger.warning("The state %s was corrupt (%s): %s, rebuilt from the log", name, exc, location)
    # The log is read from the tallies' entry number on. The tallies are saved last, so all other documents contain the
    # entries up to there, and a policy without a document has no rewards up to there.
    after = 0 if found_corrupt else user.seqs[TALLIES]
    for name in documents:
        if user.seqs[name] < user.reset_seq:  # saved before the reset
            user.clear(name, user.reset_seq)
    for entry in read_entries(database, after=max(after, user.reset_seq), user=key, kinds=STATE_CHANGES):
        user.apply(entry)  # skips entries that a document already contains
    return user


@contextmanager
def _convert_export_errors(path: Path, problem: str) -> Iterator[None]:
    """Convert an OSError into a UsageError about the folder of an export, which is usually outside the home folder."""
    try:
        yield
    except OSError as exc:
        raise UsageError(
            f"State is exported to a folder, or imported from one, but {path} {problem}: {exc.strerror or exc}. "
            "Choose another folder with --dir."
        ) from exc


def export_state(home: Path, folder: Path, *, store_kind: str = "sqlite") -> int:
    """Write the state of all users to a new or empty folder and return the number of files. A server may be running."""
    with _convert_export_errors(folder, "cannot be read"):
        has_files = folder.exists() and any(folder.iterdir())
    if has_files:
        raise UsageError(f"State is exported to a new or empty folder; {folder} has files. Choose another one.")
    target = FileStore(folder, _convert_export_errors)
    n_files = 0
    with closing(open_database(home)) as database:
        store = open_state(home, store_kind, database, database)
        for user in read_users(database):
            user_state = load_user(user, _NO_PRIORS, database, store, may_set_aside=False)
            all_documents = user_state.all_documents()
            documents = {key: document for key, document in all_documents.items() if document is not None}
            target.save(documents)
            n_files += len(documents)
    return n_files


def import_state(home: Path, folder: Path, *, store_kind: str = "sqlite") -> int:
    """Replace state by the files of an export and return the number of files.

    All files are validated before the first one is imported. Each file becomes a log entry, so that a rebuild keeps it.
    """
    if not folder.is_dir():
        raise UsageError(f"State is imported from a folder; {folder} is not one. `tipbench state export` writes one.")
    source = FileStore(folder, _convert_export_errors)
    with _open_exclusive(home, store_kind) as (log, store):
        for user in source.users():
            for name, document in source.load(user).items():
                try:
                    decode(document, user, name)
                except CorruptDocument as exc:
                    raise StateError(
                        f"The state {name} of user {user} in {folder} is not valid: {exc}. Nothing was imported."
                    ) from exc
        n_files = 0
        for user in source.users():
            with log.lock:  # entries appended under the lock are committed together
                for name, document in source.load(user).items():
                    body = {"name": name, "document": decode(document, user, name)}
                    policy = name if name in POLICIES else None
                    _, committed = log.append("import", user, time.time(), body, policy=policy)
                    n_files += 1
            committed.result()  # waits for the last entry; every user of `source` has at least one
            store.save(load_user(user, _NO_PRIORS, log.database, store).changed_documents())
    return n_files


def rebuild_state(home: Path, *, store_kind: str = "sqlite") -> int:
    """Compute all state from the log alone and return the number of users who have state.

    If a document has an unknown schema, raises StateError and changes nothing.
    """
    with _open_exclusive(home, store_kind) as (log, store):
        for user in store.users():
            for name, document in store.load(user).items():
                with suppress(CorruptDocument):  # the rebuild replaces it
                    decode(document, user, name)  # raises StateError for an unknown schema
        n_users = 0
        documents: dict[tuple[str, str], bytes | None] = {}
        for number, user in enumerate(sorted({*store.users(), *read_users(log.database)}), 1):
            rebuilt = load_user(user, _NO_PRIORS, log.database, state_store=None).all_documents()
            documents |= rebuilt
            if any(document is not None for document in rebuilt.values()):
                n_users += 1
            if number % _USERS_PER_TRANSACTION == 0:
                store.save(documents)
                documents = {}
        store.save(documents)
    return n_users


@contextmanager
def _open_exclusive(home: Path, store_kind: str) -> Iterator[tuple[EventLog, StateStore]]:
    """Open the log and the store while holding the server's lock; raises LockHeld if a server is running."""
    lock = store_lock(home, "tipbench state")
    try:
        log = EventLog(home, lock=threading.RLock(), on_failure=lambda: None)
        with closing(log):
            yield log, open_state(home, store_kind, log.database, log.write_database)
    finally:
        lock.release()
