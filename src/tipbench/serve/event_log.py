"""The event log of the policy server, in one SQLite file.

The state of users is a cache of this log. Entries are numbered (`seq`) in the order in which they take effect. Only the
process that holds `store_lock` writes entries. Other processes may read them, and may write to the tables of
`switches.py`. The log has no user ids: `user` is the keyed hash of the user id, see `Keys`.

| kind | policy | reward | body |
|---|---|---|---|
| score | serving policy | | request (without user and event id), at, chosen, probabilities, scores, x, n, … |
| reward, late, duplicate | serving policy | the reward | action, dwell_ms, score; in kind reward also x, … |
| reset | | | erase |
| import | policy of the state | | name, document |
| signal | shadow | 1 if it chose the served tip | signal, chosen, probabilities, scores, agrees, latency_ms, at |

An entry of the kind score is a decision: the tip chosen for a request. In the body of reward, late and duplicate,
`score` is the number (`seq`) of the event's decision. An import replaces a user's state of one policy. `x` has the
features of the chosen tip, `n` is the number of rewards learned before.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from tipbench.errors import UsageError
from tipbench.files import ResourceLock, convert_home_errors, create_private, make_folder
from tipbench.serve.request import check_user_id
from tipbench.sqlite import Database, GroupCommit, Row

FOLDER = "serve"
FILE = "serve.sqlite"
SECRET_FILE = "serve.secret"  # noqa: S105
MAX_QUEUED = 8192  # entries that wait for their commit
_PAGE_ENTRIES = 1000  # read by one query
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


class Keys:
    """Keyed hashes of user ids and events.

    User ids are hashed so that they are not stored. Hashes of events serve as repeatable random numbers. Without the
    secret, the stored state of a user cannot be found.
    """

    def __init__(self, secret: bytes) -> None:
        self._user_hasher = blake2b(key=secret, digest_size=16, person=b"tipbench-user")
        self._random_hasher = blake2b(key=secret, digest_size=8, person=b"tipbench-draw")

    def hash_user_id(self, user_id: str) -> str:
        """Return the hash of a user id, 32 hex digits; raises UsageError if the id is invalid."""
        hasher = self._user_hasher.copy()
        hasher.update(check_user_id(user_id).encode())
        return hasher.hexdigest()

    def repeatable_random(self, policy: str, user: str, event: str) -> float:
        """Return a random number in [0, 1) that is the same for a repeated request and in a replay."""
        hasher = self._random_hasher.copy()
        hasher.update(f"{policy}\0{user}\0{event}".encode())
        bits = int.from_bytes(hasher.digest())  # 64 bits, of which a float can hold 53
        return (bits >> 11) * 2.0**-53


def load_keys(home: Path) -> Keys:
    """Return the `Keys` with the secret of a home folder; creates the secret if it is missing."""
    path = make_folder(home) / SECRET_FILE
    with convert_home_errors(path, "cannot be read"):
        if not path.exists():
            create_private(path, secrets.token_hex(32).encode() + b"\n")
        text = path.read_text("ascii", "replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise UsageError(
            f"{path} must consist of 64 hex digits, but contains something else ({len(text)} characters). Restore it "
            "from a backup: without it the stored state belongs to unknown users."
        )
    return Keys(bytes.fromhex(text))


class Entry(NamedTuple):
    """One entry of the log; the table in the module docstring describes the fields."""

    seq: int
    kind: str
    user: str  # hash of the user id
    event: str | None  # event id
    policy: str | None
    received: float  # Unix timestamp of the server
    reward: float | None
    body: dict[str, Any]


def open_database(home: Path) -> Database:
    """Open the SQLite file; creates it if it is missing. Any number of processes may read it."""
    path = make_folder(home / FOLDER, private=True) / FILE
    database = Database(path, _MIGRATIONS, "The store of the policy server", wal=True)
    database.execute("PRAGMA secure_delete = ON")  # an erased user's events must not remain in free pages
    return database


def store_exists(home: Path) -> bool:
    """Return whether the SQLite file exists. The policy server creates it, and so do commands that open the store."""
    return (home / FOLDER / FILE).exists()


def store_lock(home: Path, purpose: str) -> ResourceLock:
    """Acquire the lock on the store; raises LockHeld if another process has it."""
    lock = ResourceLock(
        home, f"the store {home / FOLDER}", purpose, advice="Stop it first, or use another TIPBENCH_HOME."
    )
    lock.acquire(wait=False, report=lambda _: None)
    return lock


def read_entries(
    database: Database, *, after: int = 0, user: str | None = None, kinds: tuple[str, ...] = ()
) -> Iterator[Entry]:
    """Yield the entries after number `after`, in order; of all users and all kinds by default."""
    conditions = ["seq > ?"]
    values: list[object] = []
    if user is not None:
        conditions.append("user = ?")
        values.append(user)
    if kinds:
        conditions.append(f"kind IN ({', '.join('?' * len(kinds))})")
        values.extend(kinds)
    query = f"SELECT {_COLUMNS} FROM log WHERE {' AND '.join(conditions)} ORDER BY seq LIMIT {_PAGE_ENTRIES}"  # noqa: S608
    while True:
        rows = database.execute(query, (after, *values))
        for row in rows:
            yield _parse_entry(row)
        if len(rows) < _PAGE_ENTRIES:
            return
        after = rows[-1]["seq"]


def read_entry(database: Database, seq: int) -> Entry | None:
    """Return an entry by its number, or None if it is not committed yet or was erased."""
    rows = database.execute(f"SELECT {_COLUMNS} FROM log WHERE seq = ?", (seq,))  # noqa: S608
    return _parse_entry(rows[0]) if rows else None


def read_users(database: Database) -> list[str]:
    """Return the users with entries, sorted."""
    return [user for (user,) in database.execute("SELECT DISTINCT user FROM log ORDER BY user")]


def read_resets(database: Database, user: str) -> tuple[int, int]:
    """Return the entry numbers of the user's last reset and of the last reset with `erase`; 0 if there is none."""
    last_reset = last_erase = 0
    # Resets have no event id. With `event IS NULL`, the index `log_user` skips scores, rewards and signals.
    for seq, body in database.execute(
        "SELECT seq, body FROM log WHERE user = ? AND event IS NULL AND kind = 'reset' ORDER BY seq", (user,)
    ):
        last_reset = seq
        if from_json(body)["erase"]:
            last_erase = seq
    return last_reset, last_erase


class EventLog:
    """Appends to the log; only for the process that holds `store_lock`. Reads return committed entries only.

    `lock` guards the numbering and the queue. Entries that are appended while a caller holds it are consecutive and are
    committed in one transaction.
    """

    def __init__(
        self, home: Path, *, lock: threading.RLock, on_failure: Callable[[], None], capacity: int = MAX_QUEUED
    ) -> None:
        self.lock = lock
        self.database = open_database(home)  # for reads: commits of `write_database` do not block them
        self.write_database = open_database(home)
        self._writer = GroupCommit(
            self.write_database, "log", n_columns=8, capacity=capacity, lock=lock, on_failure=on_failure
        )
        self._seq: int = self.database.execute("SELECT coalesce(max(seq), 0) FROM log")[0][0]

    def append(
        self,
        kind: str,
        user: str,
        received: float,
        body: dict[str, Any],
        *,
        event: str | None = None,
        policy: str | None = None,
        reward: float | None = None,
    ) -> tuple[Entry, Future[None]]:
        """Queue an entry and return it with the future of its commit; raises QueueFull."""
        encoded = to_json(body)
        with self.lock:
            seq = self._seq + 1
            future = self._writer.insert((seq, kind, user, event, policy, received, reward, encoded))
            self._seq = seq
            return Entry(seq, kind, user, event, policy, received, reward, body), future

    def erase(self, user: str, before: int) -> Future[None]:
        """Queue the deletion of a user's state and of the user's entries with numbers below `before`."""
        self._writer.execute("DELETE FROM state WHERE user = ?", (user,))
        self._writer.execute("DELETE FROM corrupt_state WHERE user = ?", (user,))
        return self._writer.execute("DELETE FROM log WHERE user = ? AND seq < ?", (user, before))

    def truncate_wal(self) -> None:
        """Empty the write-ahead log into the database file. Readers may delay this."""
        self.write_database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def wait(self) -> None:
        """Wait until all appended entries are committed; raises if a commit fails. The caller must not hold `lock`."""
        if (committed := self.pending()) is not None:
            committed.result()

    def pending(self) -> Future[None] | None:
        """Return the future of the commit of all entries appended so far, or None if they are committed."""
        return self._writer.pending()

    def event_entries(self, user: str, event: str) -> list[Entry]:
        """Return the committed entries of an event of the kinds score, reward and late, in order."""
        rows = self.database.execute(
            f"SELECT {_COLUMNS} FROM log WHERE user = ? AND event = ? "  # noqa: S608
            "AND kind IN ('score', 'reward', 'late') ORDER BY seq",
            (user, event),
        )
        return [_parse_entry(row) for row in rows]

    def close(self) -> None:
        """Commit the queued entries and close the file."""
        self._writer.close()
        self.write_database.close()
        self.database.close()


def _parse_entry(row: Row) -> Entry:
    return Entry._make((*row[:-1], from_json(row[-1])))
