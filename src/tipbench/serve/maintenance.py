"""Maintenance of stored state: export to files, import from files, and rebuild from the event log.

An export is a folder in the format of `FileStore`. Import and rebuild change the store, so the server must be stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tipbench.errors import StateError, UsageError
from tipbench.serve.event_log import EventLog, open_store, read_users
from tipbench.serve.policy import POLICIES
from tipbench.serve.service import store_lock
from tipbench.serve.state import NAMES, CorruptDocument, decode
from tipbench.serve.state_store import FileStore, StateStore, load_user, open_state

_USERS_PER_TRANSACTION = 500


def export_state(home: Path, folder: Path, *, state: str = "sqlite") -> int:
    """Write the state of all users to a new or empty folder and return the number of files.

    The server may be running.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"State is exported to a new or empty folder; {folder} has files. Choose another one.")
    target = FileStore(folder)
    files = 0
    with closing(open_store(home)) as database:
        store = open_state(home, state, database, database)
        for user in read_users(database):
            exported = load_user(user, {}, database, store, set_aside=False)
            exported.dirty.update(NAMES)  # `documents` returns those that are dirty
            documents = {key: document for key, document in exported.documents().items() if document is not None}
            target.save(documents)
            files += len(documents)
    return files


def import_state(home: Path, folder: Path, *, state: str = "sqlite") -> int:
    """Replace state by the files of an export and return their number; all are checked before anything is changed.

    Each file becomes an entry of the log, so that a rebuild keeps it. All files of a user are imported together.
    """
    if not folder.is_dir():
        raise UsageError(f"State is imported from a folder; {folder} is not one. `tipbench state export` writes one.")
    source = FileStore(folder)
    with _exclusive(home, state) as (log, store):
        for user in source.users():
            for name, document in source.load(user).items():
                try:
                    decode(document, user, name)
                except CorruptDocument as exc:
                    raise StateError(
                        f"The state {name} of user {user} in {folder} is not valid: {exc}. Nothing was imported."
                    ) from exc
        files = 0
        for user in source.users():
            with log.lock:  # a user is imported as a whole
                for name, document in source.load(user).items():
                    body = {"name": name, "document": decode(document, user, name)}
                    policy = name if name in POLICIES else None
                    _, committed = log.append("import", user, time.time(), body, policy=policy)
                    files += 1
            committed.result()
            imported = load_user(user, {}, log.database, store)
            store.save(imported.documents())
    return files


def rebuild_state(home: Path, *, state: str = "sqlite") -> int:
    """Compute all state again from the log alone and return the number of users with any state.

    Raises StateError before anything is changed if a document has an unknown schema.
    """
    with _exclusive(home, state) as (log, store):
        for user in store.users():
            for name, document in store.load(user).items():
                with suppress(CorruptDocument):  # replaced by this rebuild
                    decode(document, user, name)  # raises StateError for an unknown schema
        count = 0
        documents: dict[tuple[str, str], bytes | None] = {}
        for number, user in enumerate(sorted({*store.users(), *read_users(log.database)}), 1):
            rebuilt = load_user(user, {}, log.database, None)
            rebuilt.dirty.update(NAMES)  # `documents` returns those that are dirty
            documents |= rebuilt.documents()
            if any(rebuilt.has_state(name) for name in NAMES):
                count += 1
            if number % _USERS_PER_TRANSACTION == 0:
                store.save(documents)
                documents = {}
        store.save(documents)
    return count


@contextmanager
def _exclusive(home: Path, state: str) -> Iterator[tuple[EventLog, StateStore]]:
    """Open log and store with the lock that a running server holds. Raises LockHeld if a server is running."""
    lock = store_lock(home, "tipbench state")
    try:
        log = EventLog(home, lock=threading.RLock(), on_failure=lambda: None, capacity=8192)
        with closing(log):
            yield log, open_state(home, state, log.database, log.writing)
    finally:
        lock.release()
