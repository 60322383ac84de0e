"""Webhook deliveries in the panel's database, and the watcher that creates them."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from tipbench.errors import MlflowUnavailable, TipbenchError
from tipbench.jobs.job import JobKind, JobState
from tipbench.jobs.store import JobStore
from tipbench.plan.config import check_experiment_name
from tipbench.record.mlflow import find_tracking
from tipbench.record.reader import search_cells
from tipbench.record.run import RunState
from tipbench.record.store import Experiment
from tipbench.settings import Settings
from tipbench.sqlite import Connection, Database, Row
from tipbench.text import iso
from tipbench.web.mlflow_connection import MlflowConnection, OpenStore
from tipbench.web.queries import revision

KEPT = 500  # finished deliveries
_DELIVERY = "id, event, experiment, body, state, created, next_try"
_THERE = "receiver = ? AND place = ? AND experiment_id = ?"


class DeliveryState(StrEnum):
    """State of a delivery."""

    QUEUED = "queued"  # waiting for its first or next attempt
    DELIVERED = "delivered"  # the receiver responded with 2xx
    FAILED = "failed"  # no attempts left, or the receiver is no longer configured
    REPLACED = "replaced"  # superseded by a newer delivery of the same experiment


@dataclass(frozen=True)
class WatchedExperiment:
    """An experiment on an MLflow server."""

    place: str
    experiment_id: str


@dataclass(frozen=True)
class Message:
    """A message with its serialised body."""

    id: str
    event: str
    experiment: str | None
    body: str


@dataclass(frozen=True)
class Attempt:
    """An attempt. `status` is None without a response; `reason` is empty on success."""

    number: int
    time: float
    took_s: float
    status: int | None
    reason: str

    @property
    def taken(self) -> bool:
        """Whether the receiver accepted the delivery."""
        return self.status is not None and 200 <= self.status < 300

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the API."""
        return {**vars(self), "time": iso(self.time), "reason": self.reason or None}


@dataclass(frozen=True)
class Delivery:
    """A message with its delivery state and attempts."""

    message: Message
    state: DeliveryState
    created: float
    next_try: float | None
    attempts: tuple[Attempt, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the API."""
        return {
            "id": self.message.id,
            "event": self.message.event,
            "experiment": self.message.experiment,
            "state": str(self.state),
            "created": iso(self.created),
            "next_try": iso(self.next_try),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "payload": json.loads(self.message.body),
        }


class WebhookStore:
    """Deliveries to one receiver, and the runs reported to it. Thread-safe; only one process may send."""

    def __init__(self, database: Database, receiver: str, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._receiver = receiver
        self._clock = clock

    # reported runs

    def revision(self, watched: WatchedExperiment) -> str | None:
        """Return the experiment's revision at the last check; None if it was never checked."""
        rows = self._database.rows(f"SELECT revision FROM hook_seen WHERE {_THERE}", self._key(watched))  # noqa: S608
        return str(rows[0][0]) if rows else None

    def reported(self, watched: WatchedExperiment) -> frozenset[str]:
        """Return the run ids already reported as pending that were still pending at the last check."""
        rows = self._database.rows(f"SELECT run_id FROM hook_told WHERE {_THERE}", self._key(watched))  # noqa: S608
        return frozenset(str(run_id) for (run_id,) in rows)

    def note(
        self, watched: WatchedExperiment, revision: str, pending: Collection[str], message: Message | None
    ) -> None:
        """Save the result of a check and its message in one transaction.

        Runs that are no longer pending are removed, so they are reported again if reopened.
        """
        key = self._key(watched)
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO hook_seen VALUES (?, ?, ?, ?)", (*key, revision))
            db.execute(f"DELETE FROM hook_told WHERE {_THERE}", key)  # noqa: S608
            db.executemany("INSERT INTO hook_told VALUES (?, ?, ?, ?)", [(*key, run_id) for run_id in pending])
            if message is not None:
                db.execute(
                    f"UPDATE hook_deliveries SET state = ?, next_try = NULL WHERE {_THERE} AND state = ? AND event = ?",  # noqa: S608
                    (DeliveryState.REPLACED, *key, DeliveryState.QUEUED, message.event),
                )
                db.execute(*self._insert(message, watched, DeliveryState.QUEUED, self._clock()))
        if message is not None:
            self._tidy()

    # deliveries

    def due(self) -> Delivery | None:
        """Return the delivery that has been due longest, or None."""
        where = "receiver = ? AND state = ? AND next_try <= ? ORDER BY next_try, created LIMIT 1"
        return next(iter(self._read(where, (self._receiver, DeliveryState.QUEUED, self._clock()))), None)

    def attempted(self, delivery: Delivery, attempt: Attempt, next_try: float | None) -> None:
        """Save an attempt. If it fails with `next_try` None, the delivery fails and its runs will be reported again."""
        queued = not attempt.taken and next_try is not None
        ended = DeliveryState.DELIVERED if attempt.taken else DeliveryState.FAILED
        state = DeliveryState.QUEUED if queued else ended
        with self._database.transaction() as db:
            _keep_attempt(db, delivery.message.id, attempt)
            db.execute(
                "UPDATE hook_deliveries SET state = ?, next_try = ? WHERE id = ?",
                (state, next_try if queued else None, delivery.message.id),
            )
            if state is DeliveryState.FAILED:
                db.execute(
                    "DELETE FROM hook_told WHERE (receiver, place, experiment_id) IN"
                    " (SELECT receiver, place, experiment_id FROM hook_deliveries WHERE id = ?)",
                    (delivery.message.id,),
                )

    def tried_once(self, message: Message, attempt: Attempt) -> Delivery:
        """Save a test message with its only attempt."""
        state = DeliveryState.DELIVERED if attempt.taken else DeliveryState.FAILED
        with self._database.transaction() as db:
            db.execute(*self._insert(message, WatchedExperiment("", ""), state, None))
            _keep_attempt(db, message.id, attempt)
        self._tidy()
        return Delivery(message, state, attempt.time, None, (attempt,))

    def all(self) -> list[Delivery]:
        """Return all stored deliveries, newest first, including those to earlier receivers."""
        return self._read("1 ORDER BY created DESC, id", ())

    def queued(self) -> int:
        """Return the number of queued deliveries."""
        where = "receiver = ? AND state = ?"
        rows = self._database.rows(
            f"SELECT COUNT(*) FROM hook_deliveries WHERE {where}",  # noqa: S608
            (self._receiver, DeliveryState.QUEUED),
        )
        return int(rows[0][0])

    def abandon_others(self) -> None:
        """Mark queued deliveries to other receivers as failed; they are not sent to the new URL."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE hook_deliveries SET state = ?, next_try = NULL WHERE receiver <> ? AND state = ?",
                (DeliveryState.FAILED, self._receiver, DeliveryState.QUEUED),
            )

    def _key(self, watched: WatchedExperiment) -> tuple[str, str, str]:
        return self._receiver, watched.place, watched.experiment_id

    def _insert(
        self, message: Message, watched: WatchedExperiment, state: DeliveryState, next_try: float | None
    ) -> tuple[str, tuple[object, ...]]:
        names = "(id, receiver, event, place, experiment_id, experiment, body, state, created, next_try)"
        values = (message.id, self._receiver, message.event, watched.place, watched.experiment_id)
        more = (message.experiment, message.body, state, self._clock(), next_try)
        return f"INSERT INTO hook_deliveries {names} VALUES ({', '.join('?' * 10)})", (*values, *more)  # noqa: S608

    def _read(self, where: str, values: tuple[object, ...]) -> list[Delivery]:
        found = self._database.rows(f"SELECT {_DELIVERY} FROM hook_deliveries WHERE {where}", values)  # noqa: S608
        attempts: dict[str, list[Attempt]] = {str(row[0]): [] for row in found}
        statement = "SELECT delivery, number, time, took_s, status, reason FROM hook_attempts"
        if len(found) == 1:  # `due`, called every second
            kept = self._database.rows(f"{statement} WHERE delivery = ? ORDER BY number", (found[0][0],))
        else:
            kept = self._database.rows(f"{statement} ORDER BY number") if found else []
        for delivery, *attempt in kept:
            if delivery in attempts:
                attempts[delivery].append(Attempt(*attempt))
        return [_delivery(row, tuple(attempts[str(row[0])])) for row in found]

    def _tidy(self) -> None:
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM hook_deliveries WHERE state <> ?1 AND id NOT IN"
                " (SELECT id FROM hook_deliveries WHERE state <> ?1 ORDER BY created DESC LIMIT ?2)",
                (DeliveryState.QUEUED, KEPT),
            )
            db.execute("DELETE FROM hook_attempts WHERE delivery NOT IN (SELECT id FROM hook_deliveries)")


def _keep_attempt(db: Connection, delivery: str, attempt: Attempt) -> None:
    values = (delivery, attempt.number, attempt.time, attempt.took_s, attempt.status, attempt.reason)
    db.execute("INSERT INTO hook_attempts VALUES (?, ?, ?, ?, ?, ?)", values)


def _delivery(row: Row, attempts: tuple[Attempt, ...]) -> Delivery:
    id_, event, experiment, body, state, created, next_try = row
    return Delivery(Message(id_, event, experiment, body), DeliveryState(state), created, next_try, attempts)


PENDING = "cells.pending"
TEST = "test"
RESTLESS_S = 600.0  # check an experiment that keeps changing after this time
log = logging.getLogger("tipbench.web")


def message_of(event: str, now: float, experiment: str | None, **counts: int) -> Message:
    """Create a message. Links are paths only; the receiver is configured with the panel's address and a token.

    It does not contain models or prompts, because the receiver judges blind.
    """
    id_ = secrets.token_hex(16)
    payload: dict[str, Any] = {
        "event": event,
        "id": id_,
        "time": iso(now),
        "experiment": experiment,
        **counts,
        "links": {} if experiment is None else _links(experiment),
    }
    return Message(id_, event, experiment, json.dumps(payload))


def _links(experiment: str) -> dict[str, str]:
    place = f"/api/bench/judge/{quote(experiment, safe='', errors='backslashreplace')}"
    return {"sheets": f"{place}/sheets", "apply": f"{place}/apply"}


def _ours(name: str) -> bool:
    """Whether the name is a valid tipbench experiment name."""
    try:
        check_experiment_name(name)
    except ValueError:
        return False
    return True


def mlflow_opener(settings: Settings, tracker: MlflowConnection, *, given: bool) -> Callable[[], OpenStore]:
    """Return a function that opens MLflow without starting the local server, which may be stopped on purpose."""

    def opened() -> OpenStore:
        if not given:
            find_tracking(settings.get("mlflow_url"), settings.home, start=False, report=log.debug)
        return tracker.open()

    return opened


class WebhookWatcher:
    """Checks experiments for new pending cells. Not thread-safe."""

    def __init__(
        self,
        store: WebhookStore,
        jobs: JobStore,
        opened: Callable[[], OpenStore],
        *,
        every_s: float,
        clock: Callable[[], float] = time.time,
        away: Callable[[], None] = lambda: None,
    ) -> None:
        """`away` is called when MLflow is unreachable."""
        self._store, self._jobs, self._opened = store, jobs, opened
        self._every_s, self._clock, self._away = every_s, clock, away
        self._next = 0.0
        self._collecting: set[str] = set()  # experiments with a running collect job
        self._ended: set[str] = set()  # experiments whose collect job has just ended
        # last revision seen, and since when it has been changing
        self._restless: dict[WatchedExperiment, tuple[str, float]] = {}
        self.looked: float | None = None
        self.problem: str | None = None

    def due(self) -> bool:
        """Whether to check now: after `every_s`, or when a collect job has ended or waits for the judge."""
        running = self._jobs.in_states({JobState.RUNNING})
        now = {job.experiment for job in running if job.kind is JobKind.COLLECT}
        ended = self._collecting - now
        self._collecting, self._ended = now, (self._ended | ended) - now
        return bool(ended) or self._clock() >= self._next

    def look(self) -> None:
        """Queue a message for every experiment with new pending cells. Errors are stored in `problem`."""
        self._next = self._clock() + self._every_s
        problems: list[TipbenchError] = []
        try:
            opened = self._opened()
            for experiment in opened.store.experiments():
                if _ours(experiment.name):
                    problems += self._safely(opened, experiment)
        except MlflowUnavailable as exc:
            self._away()
            problems.append(exc)
        except TipbenchError as exc:
            problems.append(exc)
        if not problems:
            self._ended.clear()
            self.looked = self._clock()
        self._tell(str(problems[0]) if problems else None)

    def _safely(self, opened: OpenStore, experiment: Experiment) -> list[TipbenchError]:
        """Check one experiment; return its error, but raise MlflowUnavailable."""
        try:
            self._consider(opened, experiment)
        except MlflowUnavailable:
            raise
        except TipbenchError as exc:
            return [exc]
        return []

    def _consider(self, opened: OpenStore, experiment: Experiment) -> None:
        watched, now = WatchedExperiment(opened.identity, experiment.experiment_id), revision(experiment) or ""
        if experiment.name in self._collecting:
            return  # reported once, when the job ends
        if self._store.revision(watched) == now:
            self._restless.pop(watched, None)
            return
        if experiment.name not in self._ended and not self._at_rest(watched, now):
            return
        self._restless.pop(watched, None)
        found = search_cells(opened.store, experiment.experiment_id, {"state": str(RunState.PENDING)})
        pending = {run.run_id for run in found}
        new = pending - self._store.reported(watched)
        counts = {"pending": len(pending), "new": len(new)}
        message = message_of(PENDING, self._clock(), experiment.name, **counts) if new else None
        self._store.note(watched, now, pending, message)

    def _at_rest(self, watched: WatchedExperiment, revision_now: str) -> bool:
        """Whether the revision is unchanged since the last check, so that a collect elsewhere is reported once."""
        before, since = self._restless.get(watched, (None, self._clock()))
        self._restless[watched] = (revision_now, since)
        return before == revision_now or self._clock() - since >= RESTLESS_S

    def _tell(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.warning("webhook: check for pending cells failed: %s", problem)
        self.problem = problem
