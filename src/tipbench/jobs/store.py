"""Job store: a SQLite file that several panel processes share. Each state transition is a compare-and-set."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from tipbench.errors import JobConflict, JobNotFound, UsageError
from tipbench.jobs.job import ENDED, TRANSITIONS, Job, JobKind, JobRequest, JobState
from tipbench.sqlite import Database, Row

MAX_PAGE = 500  # jobs
MAX_KEY = 200  # characters of an idempotency key
_MAX_REASON = 2000  # characters
_BUSY_TIMEOUT_S = 15.0  # of SQLite
# The column `body` is a hash of the request (see `add`), not its text.
_MIGRATIONS = (
    """
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
""",
)
_REMOVABLE = (
    "(ended IS NOT NULL OR state = 'lost') AND NOT EXISTS (SELECT 1 FROM jobs AS later WHERE later.retry_of = jobs.id)"
)


@dataclass(frozen=True)
class JobFilter:
    """Filter for a list of jobs; None matches everything."""

    state: JobState | None = None
    kind: JobKind | None = None
    experiment: str | None = None


@dataclass(frozen=True)
class Page:
    """A page of jobs, newest first; `next` is the cursor of the next page, None at the end."""

    items: tuple[Job, ...]
    next: str | None


class Submitted(NamedTuple):
    """The job for a request; `new` is False if an earlier request created it."""

    job: Job
    new: bool


class JobStore:
    """Jobs in SQLite. Safe to use from several threads and processes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.clock = clock
        # All methods share one connection: those called within a transaction, such as `self.get`, are part of it.
        self._db = Database(path, _MIGRATIONS, "The list of jobs", busy_s=_BUSY_TIMEOUT_S, wal=True)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Requests

    def add(self, request: JobRequest, key: str | None = None) -> Submitted:
        """Queue a request as a new job, or return the existing job that it repeats.

        That is the job with the same idempotency key or, for a retry, an unfinished retry of the same job. Raises
        JobConflict if the job with this key has a different request.
        """
        arguments, private = dict(request.arguments), dict(request.private)
        # Requests with the same key must be equal in these values; the caller and the runner may differ.
        hashed_values = [request.kind.value, request.experiment, arguments, private, request.retry_of]
        request_hash = hashlib.sha256(_dump(hashed_values).encode()).hexdigest()
        check_key(key)
        with self._db.transaction() as db:
            existing = self._find_existing(request, key, request_hash)
            if existing is not None:
                return Submitted(existing, new=False)
            now = self.clock()
            values = {
                "id": f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
                "kind": request.kind.value, "state": JobState.QUEUED.value,
                "experiment": request.experiment,
                "arguments": _dump(arguments), "private": _dump(private),
                "resources": _dump(request.resources), "started_by": request.started_by, "runner": request.runner,
                "retry_of": request.retry_of, "key": key, "body": request_hash, "created": now,
            }  # fmt: skip
            names, placeholders = ", ".join(values), ", ".join("?" * len(values))
            db.execute(f"INSERT INTO jobs ({names}) VALUES ({placeholders})", tuple(values.values()))  # noqa: S608
            return Submitted(self.get(str(values["id"])), new=True)

    def _find_existing(self, request: JobRequest, key: str | None, request_hash: str) -> Job | None:
        if key is not None and (rows := self._db.execute("SELECT * FROM jobs WHERE key = ?", (key,))):
            [row] = rows
            if row["body"] != request_hash:
                raise JobConflict(
                    f"The idempotency key {key[:80]!r} belongs to job {row['id']}, which was requested with other "
                    "options. Send another key with another request."
                )
            return _job(row)
        if request.retry_of is None:
            return None
        ended_or_lost = _sql_list(ENDED | {JobState.LOST})
        query = f"SELECT * FROM jobs WHERE retry_of = ? AND state NOT IN {ended_or_lost}"  # noqa: S608
        rows = self._db.execute(query, (request.retry_of,))
        return _job(rows[0]) if rows else None

    # Reading

    def get(self, job_id: str) -> Job:
        """Return the job. Raises JobNotFound if the id is unknown."""
        rows = self._db.execute("SELECT * FROM jobs WHERE id = ?", (job_id,))
        if not rows:
            raise JobNotFound(f"Unknown job {job_id[:80]!r}; see the list of jobs.")
        return _job(rows[0])

    def page(self, which: JobFilter | None = None, *, limit: int = 50, after: str | None = None) -> Page:
        """Return a page of jobs, newest first; `after` is the `next` of the previous page."""
        if not 1 <= limit <= MAX_PAGE:
            raise UsageError(f"limit is from 1 to {MAX_PAGE} (got {limit}).")
        # Every number of 18 digits fits into an SQLite integer, but not every one of 19.
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= 18):
            raise UsageError(f"after takes the value of `next` of an earlier page (got {after[:40]!r}).")
        comparisons: dict[str, object] = {}  # values by SQL comparison
        for column, value in vars(which or JobFilter()).items():
            if value is not None:
                comparisons[f"{column} = ?"] = str(value)
        if after is not None:
            comparisons["seq < ?"] = int(after)
        where = f"WHERE {' AND '.join(comparisons)}" if comparisons else ""
        query = f"SELECT * FROM jobs {where} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        values = [*comparisons.values(), limit + 1]  # one more shows whether there is a next page
        rows = self._db.execute(query, values)
        items = tuple(_job(row) for row in rows[:limit])
        has_next = len(rows) > limit
        return Page(items, next=str(rows[limit - 1]["seq"]) if has_next else None)

    def in_states(self, states: Collection[JobState], *, limit: int = 1000) -> list[Job]:
        """Return the newest `limit` jobs in any of these states, oldest first."""
        query = f"SELECT * FROM jobs WHERE state IN {_sql_list(states)} ORDER BY seq DESC LIMIT ?"  # noqa: S608
        return [_job(row) for row in reversed(self._db.execute(query, [limit]))]

    def by_key(self, key: str) -> Job | None:
        """Return the job with this idempotency key, or None."""
        rows = self._db.execute("SELECT * FROM jobs WHERE key = ?", [key])
        return _job(rows[0]) if rows else None

    def expired(self, keep_s: float, *, limit: int = 100) -> list[Job]:
        """Return jobs that ended more than `keep_s` seconds ago and have no retry, oldest first.

        A lost job has no end time, so its start time is used.
        """
        query = f"SELECT * FROM jobs WHERE {_REMOVABLE} AND coalesce(ended, started, created) < ? ORDER BY seq LIMIT ?"  # noqa: S608
        return [_job(row) for row in self._db.execute(query, [self.clock() - keep_s, limit])]

    def last_activity(self) -> float | None:
        """Return when a job was last queued, started or ended; None without jobs."""
        of_one_job = "max(created, coalesce(started, 0), coalesce(ended, 0))"
        [(latest,)] = self._db.execute(f"SELECT max({of_one_job}) FROM jobs")  # noqa: S608
        return None if latest is None else float(latest)

    def counts(self) -> dict[JobState, int]:
        """Return the number of jobs in each state."""
        rows = self._db.execute("SELECT state, count(*) AS number FROM jobs GROUP BY state", [])
        return dict.fromkeys(JobState, 0) | {JobState(row["state"]): int(row["number"]) for row in rows}

    # Changes

    def claim(self, job_id: str) -> Job | None:
        """Mark a queued job as starting and return it; None if it has started or its cancel was requested.

        Its state stays `queued` until it has started. Until then it can be claimed again, for example if the runner's
        server was unavailable; `Runner.start` starts it only once. After a claim, `request_cancel` does not end the
        job itself: it only records that it should be cancelled.
        """
        with self._db.transaction() as db:
            cursor = db.execute(
                "UPDATE jobs SET claimed = coalesce(claimed, ?) "
                "WHERE id = ? AND state = 'queued' AND cancel_requested IS NULL",
                (self.clock(), job_id),
            )
            return self.get(job_id) if cursor.rowcount else None

    def move(
        self, job_id: str, old: JobState, new: JobState, *, exit_code: int | None = None, reason: str = ""
    ) -> Job | None:
        """Change a job's state; None if it is no longer `old`. Raises JobConflict for an illegal transition."""
        if new not in TRANSITIONS[old]:
            legal = " or ".join(sorted(TRANSITIONS[old])) or "no other state"
            raise JobConflict(f"A job that is {old} may become {legal}, not {new}. Reload the job.")
        now = self.clock()
        with self._db.transaction() as db:
            cursor = db.execute(
                "UPDATE jobs SET state = :new, exit_code = :exit_code, reason = :reason, ended = :ended, "
                "started = coalesce(started, :started) WHERE id = :id AND state = :old",
                {
                    "id": job_id,
                    "old": old.value,
                    "new": new.value,
                    "exit_code": exit_code,
                    "reason": reason[:_MAX_REASON],
                    "started": now if new is JobState.RUNNING else None,
                    "ended": now if new in ENDED else None,
                },
            )
            return self.get(job_id) if cursor.rowcount else None

    def set_reason(self, job_id: str, reason: str) -> None:
        """Replace a job's reason."""
        with self._db.transaction() as db:
            db.execute("UPDATE jobs SET reason = ? WHERE id = ?", (reason[:_MAX_REASON], job_id))

    def add_links(self, job_id: str, links: Mapping[str, str]) -> None:
        """Add links to those of a job."""
        with self._db.transaction() as db:
            merged = {**self.get(job_id).links, **links}
            db.execute("UPDATE jobs SET links = ? WHERE id = ?", (_dump(merged), job_id))

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a queued job. If it is starting or running, save the request for the supervisor.

        Raises JobConflict if the job has succeeded or failed.
        """
        now = self.clock()
        with self._db.transaction() as db:
            job = self.get(job_id)
            if job.state is JobState.CANCELLED:
                return job
            if job.state in ENDED:
                raise JobConflict(f"Job {job_id} has already {job.state}; it cannot be cancelled.")
            db.execute("UPDATE jobs SET cancel_requested = coalesce(cancel_requested, ?) WHERE id = ?", (now, job_id))
            if job.state is JobState.QUEUED and job.claimed is None:
                db.execute("UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ?", (now, job_id))
            return self.get(job_id)

    def remove(self, job_id: str) -> bool:
        """Delete a job; returns False if it is still in progress or has a retry."""
        with self._db.transaction() as db:
            cursor = db.execute(f"DELETE FROM jobs WHERE id = ? AND {_REMOVABLE}", (job_id,))  # noqa: S608
            return cursor.rowcount > 0


def check_key(key: str | None) -> None:
    """Raise UsageError unless the idempotency key is None or valid."""
    if key is not None and (not key.strip() or len(key) > MAX_KEY or not key.isprintable()):
        raise UsageError(f"An idempotency key has 1 to {MAX_KEY} printable characters (got {len(key)}).")


def _job(row: Row) -> Job:
    values: dict[str, Any] = {key: row[key] for key in row.keys() if key not in ("seq", "body")}  # noqa: SIM118
    for name in ("arguments", "private", "links"):
        values[name] = json.loads(row[name])
    values["resources"] = tuple(json.loads(row["resources"]))
    values["kind"], values["state"] = JobKind(row["kind"]), JobState(row["state"])
    return Job(**values)


def _sql_list(states: Collection[JobState]) -> str:
    """Return states as an SQL list. The values are constants, so they need no escaping."""
    return f"({', '.join(repr(state.value) for state in states)})"


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True)
