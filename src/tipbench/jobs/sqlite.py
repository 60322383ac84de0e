"""The job list: one SQLite file that several panel processes share. Every change of state is a compare-and-set."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from tipbench.errors import JobConflict, JobMissing, TipbenchError, UsageError
from tipbench.generate.home import in_home
from tipbench.jobs.job import ENDED, Job, JobKind, JobState, Order, check_move

VERSION = 1
MOST_ITEMS = 500
MOST_KEY = 200
_MOST_REASON = 2000
_BUSY_S = 15.0  # how long one process waits while another writes
_SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    experiment TEXT NOT NULL,
    arguments TEXT NOT NULL,
    private TEXT NOT NULL,
    resources TEXT NOT NULL,
    started_by TEXT NOT NULL,
    runner TEXT NOT NULL,
    retry_of TEXT REFERENCES jobs (id),
    key TEXT UNIQUE,
    body TEXT NOT NULL,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    exit_code INTEGER,
    reason TEXT NOT NULL DEFAULT '',
    links TEXT NOT NULL DEFAULT '{}',
    claimed REAL,
    cancel_requested REAL
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state, seq);
CREATE INDEX jobs_by_experiment ON jobs (experiment, seq);
"""
_REMOVABLE = (
    "(ended IS NOT NULL OR state = 'lost') AND NOT EXISTS (SELECT 1 FROM jobs AS later WHERE later.retry_of = jobs.id)"
)


@dataclass(frozen=True)
class Which:
    """Which jobs a list shows; None is no restriction."""

    state: JobState | None = None
    kind: JobKind | None = None
    experiment: str | None = None


@dataclass(frozen=True)
class Page:
    """Some of a list, newest first; `next` asks for what follows, None at the end."""

    items: tuple[Job, ...]
    next: str | None


class JobStore:
    """Jobs on disk. May be used from any thread, and by several processes at once."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        with in_home(path.parent, "cannot be made"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with in_home(path, "cannot be written"):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # it may hold logins
        with self._telling():
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Orders

    def add(self, order: Order, key: str | None = None) -> tuple[Job, bool]:
        """The job of this order, and whether it is new.

        The same key with the same order gives the job that is there; with another order JobConflict. Of one job
        there is at most one retry that has not ended: asking again gives that one.
        """
        body = _body(order)
        check_key(key)
        with self._change() as db:
            known = self._known(db, order, key, body)
            if known is not None:
                return known, False
            now = self._clock()
            values = {
                "id": _new_id(now), "kind": order.kind.value, "state": JobState.QUEUED.value,
                "experiment": order.experiment,
                "arguments": _dump(dict(order.arguments)), "private": _dump(dict(order.private)),
                "resources": _dump(order.resources), "started_by": order.started_by, "runner": order.runner,
                "retry_of": order.retry_of, "key": key, "body": body, "created": now,
            }  # fmt: skip
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            db.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608
            return self._one(db, str(values["id"])), True

    def _known(self, db: sqlite3.Connection, order: Order, key: str | None, body: str) -> Job | None:
        if key is not None:
            row = db.execute("SELECT id, body FROM jobs WHERE key = ?", (key,)).fetchone()
            if row is not None:
                if row["body"] != body:
                    raise JobConflict(
                        f"The idempotency key {key[:80]!r} belongs to job {row['id']}, which was ordered with other "
                        "options. Send a fresh key with a new order."
                    )
                return self._one(db, row["id"])
        if order.retry_of is None:
            return None
        ended = _in(ENDED | {JobState.LOST})
        found = db.execute(
            f"SELECT id FROM jobs WHERE retry_of = ? AND state NOT IN {ended}",  # noqa: S608
            (order.retry_of,),
        ).fetchone()
        return None if found is None else self._one(db, found["id"])

    # Reading

    def get(self, job_id: str) -> Job:
        """The job; JobMissing when there is none of that id."""
        with self._telling(), self._lock:
            return self._one(self._db, job_id)

    def page(self, which: Which | None = None, *, limit: int = 50, after: str | None = None) -> Page:
        """A part of the list, newest first; `after` is the `next` of the part before."""
        if not 1 <= limit <= MOST_ITEMS:
            raise UsageError(f"limit is from 1 to {MOST_ITEMS} (got {limit}).")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise UsageError(f"after is what an earlier page gave as next (got {after[:40]!r}).")
        wanted = {key: value for key, value in vars(which or Which()).items() if value is not None}
        clauses = [f"{key} = ?" for key in wanted] + (["seq < ?"] if after else [])
        where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
        values = [*map(str, wanted.values()), *([int(after)] if after else []), limit + 1]
        rows = self._rows(f"SELECT * FROM jobs {where} ORDER BY seq DESC LIMIT ?", values)  # noqa: S608
        shown = rows[:limit]
        return Page(tuple(map(_job, shown)), str(shown[-1]["seq"]) if len(rows) > limit else None)

    def in_states(self, states: Collection[JobState], *, limit: int = 1000) -> list[Job]:
        """The newest `limit` jobs in any of these states, in the order they were accepted."""
        query = f"SELECT * FROM jobs WHERE state IN {_in(states)} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        return [_job(row) for row in reversed(self._rows(query, [limit]))]

    def by_key(self, key: str) -> Job | None:
        """The job that was ordered with this key."""
        rows = self._rows("SELECT * FROM jobs WHERE key = ?", [key])
        return _job(rows[0]) if rows else None

    def expired(self, keep_s: float, *, limit: int = 100) -> list[Job]:
        """Jobs that ended longer ago, oldest first; not one that another on the list is a retry of.

        A lost job never ends: it goes by its start.
        """
        query = f"SELECT * FROM jobs WHERE {_REMOVABLE} AND coalesce(ended, started, created) < ? ORDER BY seq LIMIT ?"  # noqa: S608
        return [_job(row) for row in self._rows(query, [self._clock() - keep_s, limit])]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        rows = self._rows("SELECT state, count(*) AS number FROM jobs GROUP BY state", [])
        return dict.fromkeys(JobState, 0) | {JobState(row["state"]): int(row["number"]) for row in rows}

    # Changes

    def claim(self, job_id: str) -> Job | None:
        """Note that the job is being started: from now on a cancel goes through its runner. None when it may not."""
        with self._change() as db:
            done = db.execute(
                "UPDATE jobs SET claimed = coalesce(claimed, ?) "
                "WHERE id = ? AND state = 'queued' AND cancel_requested IS NULL",
                (self._clock(), job_id),
            )
            return self._one(db, job_id) if done.rowcount else None

    def move(
        self, job_id: str, old: JobState, new: JobState, *, exit_code: int | None = None, reason: str = ""
    ) -> Job | None:
        """From one state to another; None when the job is no longer in the old one. JobConflict for an illegal move."""
        check_move(old, new)
        now = self._clock()
        with self._change() as db:
            done = db.execute(
                "UPDATE jobs SET state = ?, exit_code = ?, reason = ?, ended = ?, "
                "started = CASE WHEN ? THEN coalesce(started, ?) ELSE started END WHERE id = ? AND state = ?",
                (
                    *(new.value, exit_code, reason[:_MOST_REASON], now if new in ENDED else None),
                    *(new is JobState.RUNNING, now, job_id, old.value),
                ),
            )
            return self._one(db, job_id) if done.rowcount else None

    def note(self, job_id: str, *, reason: str | None = None, links: Mapping[str, str] | None = None) -> None:
        """Keep why a job is as it is, or where its pages are; its state stays."""
        with self._change() as db:
            if reason is not None:
                db.execute("UPDATE jobs SET reason = ? WHERE id = ?", (reason[:_MOST_REASON], job_id))
            if links:
                merged = {**self._one(db, job_id).links, **links}
                db.execute("UPDATE jobs SET links = ? WHERE id = ?", (_dump(merged), job_id))

    def request_cancel(self, job_id: str) -> Job:
        """Cancelled at once when nobody has begun to start it; else the wish is kept for the supervisor to see.

        JobConflict when it has ended otherwise.
        """
        now = self._clock()
        with self._change() as db:
            job = self._one(db, job_id)
            if job.state in ENDED:
                if job.state is not JobState.CANCELLED:
                    raise JobConflict(f"Job {job_id} has {job.state} already; there is nothing to cancel.")
                return job
            db.execute(
                "UPDATE jobs SET cancel_requested = coalesce(cancel_requested, ?) WHERE id = ?",
                (now, job_id),
            )
            if job.state is JobState.QUEUED and job.claimed is None:
                db.execute("UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ?", (now, job_id))
            return self._one(db, job_id)

    def remove(self, job_id: str) -> bool:
        """Take a job off the list; False when it is under way, or another has become a retry of it."""
        with self._change() as db:
            return bool(db.execute(f"DELETE FROM jobs WHERE id = ? AND {_REMOVABLE}", (job_id,)).rowcount)  # noqa: S608

    # SQLite

    def _prepare(self) -> None:
        self._db.row_factory = sqlite3.Row
        with self._telling():
            self._write_ahead()
            self._db.execute("PRAGMA synchronous = FULL")  # a job that was accepted stays accepted
            self._db.execute("PRAGMA foreign_keys = ON")
        with self._change() as db:
            found = int(db.execute("PRAGMA user_version").fetchone()[0])
            if found > VERSION:
                raise UsageError(
                    f"{self.path} was written by a newer tipbench (its format is {found}, ours is {VERSION}). "
                    "Upgrade this one, or set TIPBENCH_HOME to another folder."
                )
            if found == 0:
                for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")

    def _write_ahead(self) -> None:
        """SQLite does not wait, whatever its time-out, when another process is just opening the file the same way."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process writes beside, from its first read on."""
        with self._lock, self._telling():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends it by itself
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, query: str, values: Sequence[object]) -> list[sqlite3.Row]:
        with self._telling(), self._lock:
            return list(self._db.execute(query, tuple(values)))

    def _one(self, db: sqlite3.Connection, job_id: str) -> Job:
        row = db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise JobMissing(f"There is no job {job_id[:80]!r}. The list of jobs shows those there are.")
        return _job(row)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise TipbenchError(
                f"The list of jobs at {self.path} cannot be used: {exc}. Check its disk and permissions."
            ) from exc


def check_key(key: str | None) -> None:
    """UsageError unless it is an idempotency key: some printable characters, not too many."""
    if key is not None and (not key.strip() or len(key) > MOST_KEY or not key.isprintable()):
        raise UsageError(f"An idempotency key has 1 to {MOST_KEY} printable characters (got {len(key)}).")


def _job(row: sqlite3.Row) -> Job:
    values: dict[str, Any] = {key: row[key] for key in row.keys() if key not in ("seq", "body")}  # noqa: SIM118
    for name in ("arguments", "private", "links"):
        values[name] = json.loads(row[name])
    values |= {"kind": JobKind(row["kind"]), "state": JobState(row["state"])}
    return Job(**values | {"resources": tuple(json.loads(row["resources"]))})


def _body(order: Order) -> str:
    """What two orders under one key must share. Not who sent it, nor who would carry it out."""
    parts = [order.kind.value, order.experiment, dict(order.arguments), dict(order.private), order.retry_of]
    return hashlib.sha256(_dump(parts).encode()).hexdigest()


def _new_id(now: float) -> str:
    return f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def _in(states: Collection[JobState]) -> str:
    """A list of states for a query; they are our own words."""
    return f"({', '.join(repr(state.value) for state in states)})"


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True)
