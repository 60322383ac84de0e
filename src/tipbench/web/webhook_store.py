"""Webhook deliveries in the panel's database, with their attempts and the runs already reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tipbench.sqlite import Connection, Database

KEPT = 500  # finished deliveries
_DELIVERY = "id, event, experiment, body, state, created, next_try"
_THERE = "receiver = ? AND place = ? AND experiment_id = ?"

Event = Literal["cells.pending", "test"]
Watched = tuple[str, str]  # identity of an MLflow server, and an experiment's id there


class DeliveryState(StrEnum):
    """State of a delivery."""

    QUEUED = "queued"  # waiting for its first or next attempt
    DELIVERED = "delivered"  # the receiver responded with 2xx
    FAILED = "failed"  # no attempts left, or the receiver is no longer configured
    REPLACED = "replaced"  # superseded by a newer delivery of the same experiment


@dataclass(frozen=True)
class Message:
    """A message with its serialised body."""

    id: str
    event: Event
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


@dataclass(frozen=True)
class Delivery:
    """A message with its delivery state and attempts."""

    message: Message
    state: DeliveryState
    created: float
    next_try: float | None
    attempts: tuple[Attempt, ...] = ()


class WebhookStore:
    """Deliveries to one receiver, and the runs reported to it. Thread-safe; only one process may send."""

    def __init__(self, database: Database, receiver: str, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._receiver = receiver
        self._clock = clock

    # reported runs

    def revision(self, watched: Watched) -> str | None:
        """Return the experiment's revision at the last check; None if it was never checked."""
        rows = self._database.rows(f"SELECT revision FROM hook_seen WHERE {_THERE}", (self._receiver, *watched))  # noqa: S608
        return str(rows[0][0]) if rows else None

    def reported(self, watched: Watched) -> frozenset[str]:
        """Return the run ids already reported as pending that were still pending at the last check."""
        rows = self._database.rows(f"SELECT run_id FROM hook_told WHERE {_THERE}", (self._receiver, *watched))  # noqa: S608
        return frozenset(str(run_id) for (run_id,) in rows)

    def note(self, watched: Watched, revision: str, pending: Collection[str], message: Message | None) -> None:
        """Save the result of a check and its message in one transaction.

        Runs that are no longer pending are removed, so they are reported again if reopened.
        """
        key = (self._receiver, *watched)
        with self._database.transaction() as db:
            db.execute("INSERT OR REPLACE INTO hook_seen VALUES (?, ?, ?, ?)", (*key, revision))
            db.execute(f"DELETE FROM hook_told WHERE {_THERE}", key)  # noqa: S608
            db.executemany("INSERT INTO hook_told VALUES (?, ?, ?, ?)", [(*key, run_id) for run_id in pending])
            if message is not None:
                db.execute(
                    f"UPDATE hook_deliveries SET state = ?, next_try = NULL WHERE {_THERE} AND state = ? AND event = ?",  # noqa: S608
                    (DeliveryState.REPLACED, *key, DeliveryState.QUEUED, message.event),
                )
                self._insert(db, message, watched, DeliveryState.QUEUED, self._clock())
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
            self._insert(db, message, ("", ""), state, None)
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

    def _insert(
        self, db: Connection, message: Message, watched: Watched, state: DeliveryState, next_try: float | None
    ) -> None:
        values = (message.id, self._receiver, message.event, *watched, message.experiment, message.body)
        db.execute(
            "INSERT INTO hook_deliveries"
            " (id, receiver, event, place, experiment_id, experiment, body, state, created, next_try)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, state, self._clock(), next_try),
        )

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
        return [
            Delivery(Message(*message), DeliveryState(state), created, next_try, tuple(attempts[message[0]]))
            for *message, state, created, next_try in found
        ]

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
