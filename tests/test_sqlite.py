"""SQLite files: private, migrated, with complete transactions, and errors with a next step."""

from __future__ import annotations

import contextlib
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tipbench.errors import QueueFull, TipbenchError, UsageError
from tipbench.sqlite import Database, GroupCommit

FIRST = "CREATE TABLE colours (name TEXT NOT NULL) STRICT; INSERT INTO colours VALUES ('red');"
SECOND = "INSERT INTO colours SELECT name || 'dish' FROM colours;"


def open_database(path: Path, *migrations: str, wal: bool = False) -> contextlib.closing[Database]:
    return contextlib.closing(Database(path, migrations, "The list of colours", wal=wal))


def colours(database: Database) -> list[str]:
    return [name for (name,) in database.execute("SELECT name FROM colours ORDER BY rowid")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file.sqlite"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with open_database(path, FIRST) as database:
        yield database


@pytest.mark.parametrize("wal", [False, True])
def test_only_the_owner_may_read_the_files(path: Path, wal: bool) -> None:
    with open_database(path, FIRST, wal=wal):
        for each in (path.parent, *path.parent.iterdir()):
            assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0, each


def test_an_older_file_is_migrated_once(path: Path, database: Database) -> None:
    for _ in range(2):
        with open_database(path, FIRST, SECOND) as newer:
            assert colours(newer) == ["red", "reddish"]


@pytest.mark.parametrize("wal", [False, True])
def test_processes_that_open_a_new_file_at_once_migrate_it_once(path: Path, wal: bool) -> None:
    def names(_: int) -> list[str]:
        with open_database(path, FIRST, SECOND, wal=wal) as database:
            return colours(database)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(names, range(16))) == [["red", "reddish"]] * 16


def test_a_migration_that_fails_changes_nothing(path: Path, database: Database) -> None:
    with pytest.raises(TipbenchError, match="no such table: shapes"):
        open_database(path, FIRST, SECOND + "DROP TABLE shapes")
    assert colours(database) == ["red"]


def test_a_file_of_a_newer_version_is_unchanged(path: Path) -> None:
    with (
        open_database(path, FIRST, SECOND),
        pytest.raises(UsageError, match=r"newer tipbench .*version 2.*up to 1.*TIPBENCH_HOME"),
    ):
        open_database(path, FIRST)


def test_a_transaction_that_fails_changes_nothing(database: Database) -> None:
    def fail() -> None:
        with database.transaction() as db:
            db.execute("INSERT INTO colours VALUES ('green')")
            assert colours(database) == ["red", "green"]
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert colours(database) == ["red"]


def test_an_error_names_the_file_and_the_next_step(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database " * 100)
    with pytest.raises(TipbenchError, match=r"^The list of colours at .*file\.sqlite cannot be used: .*restore it"):
        open_database(path, FIRST)


# Group commit


class Writer:
    """A group commit into a table of names, which a test can delay."""

    def __init__(self, database: Database, capacity: int = 100) -> None:
        self.database = database
        self.n_failures = 0
        self.lock = threading.RLock()
        self.commits = GroupCommit(database, "colours", 1, capacity=capacity, lock=self.lock, on_failure=self._failed)

    def _failed(self) -> None:
        self.n_failures += 1

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Delay the commit thread. It has taken a first row, so all rows inserted meanwhile form one batch."""
        with self.database.transaction():
            self.commits.insert(("first",))
            while self.commits.n_waiting:
                time.sleep(0.001)
            yield


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    writer = Writer(database)
    with contextlib.closing(writer.commits):
        yield writer


def test_rows_queued_during_a_commit_are_committed_together_in_order(writer: Writer) -> None:
    names = [f"colour {number}" for number in range(99)]
    with writer.hold():
        futures = {writer.commits.insert((name,)) for name in names}
        assert len(futures) == 1
        assert not next(iter(futures)).done()
    futures.pop().result()
    assert colours(writer.database) == ["red", "first", *names]
    assert not writer.commits.insert(("last",)).cancel()  # a client that disconnects must not cancel it for others


def test_a_full_queue_is_refused_and_statements_are_executed_in_order(database: Database) -> None:
    writer = Writer(database, capacity=2)
    with contextlib.closing(writer.commits):
        with writer.hold():
            writer.commits.insert(("a",))
            writer.commits.insert(("b",))
            with pytest.raises(QueueFull, match="At most 2 entries may wait for the disk; 2 are waiting"):
                writer.commits.insert(("c",))
            writer.commits.execute("DELETE FROM colours WHERE name IN ('a', 'd')", ())
        if (pending := writer.commits.pending()) is not None:
            pending.result()
        writer.commits.insert(("d",)).result()
        assert colours(database) == ["red", "first", "b", "d"]


def test_a_failed_commit_fails_all_that_is_queued_by_then_and_later_rows_succeed(writer: Writer) -> None:
    with writer.hold():
        future = writer.commits.insert(("kept",))
        writer.commits.execute("INSERT INTO shapes VALUES (1)", ())
    with pytest.raises(TipbenchError, match="no such table: shapes"):
        future.result()
    assert writer.n_failures == 1
    writer.commits.insert(("later",)).result()
    assert colours(writer.database) == ["red", "first", "later"]


def test_close_commits_what_is_queued(database: Database) -> None:
    writer = Writer(database)
    for number in range(50):
        writer.commits.insert((str(number),))
    writer.commits.close()
    assert len(colours(database)) == 51
    with pytest.raises(QueueFull, match="closing"):
        writer.commits.insert(("late",))
