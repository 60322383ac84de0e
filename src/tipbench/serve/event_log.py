"""The event log: every decision, reward, reset, import and signal of serving, in one SQLite file.

State is a cache of this log. Entries are numbered in the order in which they take effect (`seq`), by the one process
that holds the store's lock; other processes may read, and use the tables of `switches.py`. A user is always the keyed
hash of the user id.

| kind | policy | reward | body |
|---|---|---|---|
| score | that served | | request without user and event id, at, chosen, probabilities, scores, x, n, prior, … |
| reward, late, duplicate | that served | the reward | action, dwell_ms, score (seq); a reward also x, features, … |
| reset | | | erase |
| import | of the state | | name, document |
| signal | of the shadow | 1 if it agrees | signal, chosen, probabilities, scores, agrees, latency_ms, at |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from tipbench.files import make_folder
from tipbench.sqlite import Database, GroupCommit, Row

FOLDER = "serve"
FILE = "serve.sqlite"
_PURPOSE = "The store of the policy server"
_MIGRATIONS = (
    """
    CREATE TABLE log (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, user TEXT NOT NULL, event TEXT, policy TEXT,
                      received REAL NOT NULL, reward REAL, body BLOB NOT NULL) STRICT;
    CREATE INDEX log_user ON log (user, event);
    CREATE INDEX log_policy ON log (policy, kind, received, reward);
    CREATE TABLE state (user TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL,
                        PRIMARY KEY (user, name)) STRICT, WITHOUT ROWID;
    CREATE TABLE corrupt_state (id INTEGER PRIMARY KEY, user TEXT NOT NULL, name TEXT NOT NULL,
                                body BLOB NOT NULL) STRICT;
    CREATE TABLE switches (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE promotions (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, at REAL NOT NULL, user TEXT NOT NULL,
                             candidate TEXT NOT NULL, baseline TEXT NOT NULL, passed INTEGER,
                             body TEXT NOT NULL) STRICT;
    """,
)
_COLUMNS = "seq, kind, user, event, policy, received, reward, body"


class Entry(NamedTuple):
    """One entry of the log; `received` is the server's clock, a Unix timestamp."""

    seq: int
    kind: str
    user: str
    event: str | None
    policy: str | None
    received: float
    reward: float | None
    body: dict[str, Any]


def open_store(home: Path) -> Database:
    """Open the SQLite file of serving, created if it is missing; many processes may read it."""
    database = Database(make_folder(home / FOLDER, private=True) / FILE, _MIGRATIONS, _PURPOSE, wal=True)
    database.rows("PRAGMA secure_delete = ON")  # an erased user's events must not remain in free pages
    return database


def read_entries(
    database: Database, *, after: int = 0, user: str | None = None, kinds: tuple[str, ...] = (), page: int = 1000
) -> Iterator[Entry]:
    """Yield entries in order, from those committed when each page is read."""
    conditions = ["seq > ?"]
    values: list[object] = []
    if user is not None:
        conditions.append("user = ?")
        values.append(user)
    if kinds:
        conditions.append(f"kind IN ({', '.join('?' * len(kinds))})")
        values.extend(kinds)
    query = f"SELECT {_COLUMNS} FROM log WHERE {' AND '.join(conditions)} ORDER BY seq LIMIT {page}"  # noqa: S608
    while True:
        rows = database.rows(query, (after, *values))
        for row in rows:
            yield _entry(row)
        if len(rows) < page:
            return
        after = rows[-1]["seq"]


def read_entry(database: Database, seq: int) -> Entry | None:
    """Return an entry by its number, or None if it was erased."""
    rows = database.rows(f"SELECT {_COLUMNS} FROM log WHERE seq = ?", (seq,))  # noqa: S608
    return _entry(rows[0]) if rows else None


def read_users(database: Database, table: str = "log") -> Iterator[str]:
    """Yield the users that have entries, in order; `table` may also be `state`."""
    after: str | None = ""
    while after is not None:
        after = database.rows(f"SELECT min(user) FROM {table} WHERE user > ?", (after,))[0][0]  # noqa: S608
        if after is not None:
            yield after


def read_resets(database: Database, user: str) -> tuple[int, int]:
    """Return the numbers of the user's last reset and of the last one that erased; 0 if there is none."""
    reset = erased = 0
    for seq, body in database.rows(
        "SELECT seq, body FROM log WHERE user = ? AND event IS NULL AND kind = 'reset' ORDER BY seq", (user,)
    ):
        reset, erased = seq, seq if from_json(body)["erase"] else erased
    return reset, erased


class EventLog:
    """Appends to the log, for the process that holds the store's lock; reads see what is committed.

    `lock` guards the numbering and the queue: entries appended while it is held are consecutive, and one transaction.
    """

    def __init__(self, home: Path, *, lock: threading.RLock, on_failure: Callable[[], None], capacity: int) -> None:
        self.lock = lock
        self.database = open_store(home)  # for reads; a commit does not block them
        self.writing = open_store(home)
        self._writer = GroupCommit(self.writing, "log", 8, capacity=capacity, lock=lock, on_failure=on_failure)
        self._seq: int = self.database.rows("SELECT coalesce(max(seq), 0) FROM log")[0][0]

    def append(
        self,
        kind: str,
        user: str,
        received: float,
        body: Mapping[str, Any],
        *,
        event: str | None = None,
        policy: str | None = None,
        reward: float | None = None,
    ) -> tuple[int, Future[None]]:
        """Queue an entry and return its number and the future of its commit; raises QueueFull."""
        encoded = to_json(body)
        with self.lock:
            seq = self._seq + 1
            future = self._writer.insert((seq, kind, user, event, policy, received, reward, encoded))
            self._seq = seq
            return seq, future

    def erase(self, user: str, before: int) -> Future[None]:
        """Queue the deletion of a user's entries before an entry, and of the state in this file."""
        self._writer.execute("DELETE FROM state WHERE user = ?", (user,))
        self._writer.execute("DELETE FROM corrupt_state WHERE user = ?", (user,))
        return self._writer.execute("DELETE FROM log WHERE user = ? AND seq < ?", (user, before))

    def truncate_wal(self) -> None:
        """Write the write-ahead log back into the file and empty it; other readers may delay that."""
        self.writing.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    def wait(self) -> None:
        """Wait until all entries appended so far are committed; raises if they cannot be. Not with the lock held."""
        if (committed := self.pending()) is not None:
            committed.result()

    def pending(self) -> Future[None] | None:
        """Return the future of the commit of all entries appended so far, or None if they are committed."""
        return self._writer.pending()

    def event(self, user: str, event: str) -> list[Entry]:
        """Return the committed score and reward entries of an event, in order."""
        return [
            _entry(row)
            for row in self.database.rows(
                f"SELECT {_COLUMNS} FROM log WHERE user = ? AND event = ? "  # noqa: S608
                "AND kind IN ('score', 'reward', 'late') ORDER BY seq",
                (user, event),
            )
        ]

    def close(self) -> None:
        """Commit what is queued and close the file."""
        self._writer.close()
        self.writing.close()
        self.database.close()


def _entry(row: Row) -> Entry:
    seq, kind, user, event, policy, received, reward, body = row
    return Entry(seq, kind, user, event, policy, received, reward, from_json(body))
