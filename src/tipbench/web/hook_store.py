"""What the webhook has told and still has to tell, on disk: a panel that is killed goes on where it stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tipbench.times import iso
from tipbench.web.database import Database

KEPT = 500  # deliveries that have ended
_DELIVERY = "id, event, experiment, body, state, created, next_try"
_THERE = "receiver = ? AND place = ? AND experiment_id = ?"


class DeliveryState(StrEnum):
    """Where a delivery stands."""

    QUEUED = "queued"  # waits for its first or next try
    DELIVERED = "delivered"  # the receiver answered 2xx
    FAILED = "failed"  # no try is left, or its receiver is no longer configured
    REPLACED = "replaced"  # a newer one of the same experiment says all that it would have said


@dataclass(frozen=True)
class Watched:
    """An experiment on an MLflow."""

    place: str
    experiment_id: str


@dataclass(frozen=True)
class Message:
    """What is to be said, as it will travel."""

    id: str
    event: str
    experiment: str | None
    body: str


@dataclass(frozen=True)
class Attempt:
    """One try. `status` is None when nothing was answered; `reason` is empty when it was taken."""

    number: int
    time: float
    took_s: float
    status: int | None
    reason: str

    @property
    def taken(self) -> bool:
        """Whether the receiver has it now."""
        return self.status is not None and 200 <= self.status < 300

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
        return {**vars(self), "time": iso(self.time), "reason": self.reason or None}


@dataclass(frozen=True)
class Delivery:
    """A message on its way, with every try so far."""

    message: Message
    state: DeliveryState
    created: float
    next_try: float | None
    attempts: tuple[Attempt, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As the API shows it."""
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


class HookStore:
    """Deliveries to one receiver, and what it has been told. Thread-safe; one process at a time sends."""

    def __init__(self, database: Database, receiver: str, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._receiver = receiver
        self._clock = clock

    # what was told

    def revision(self, watched: Watched) -> str | None:
        """The experiment's revision when it was last looked into; None when it never was."""
        rows = self._database.rows(f"SELECT revision FROM hook_seen WHERE {_THERE}", self._key(watched))  # noqa: S608
        return str(rows[0][0]) if rows else None

    def told(self, watched: Watched) -> frozenset[str]:
        """The runs that were pending when the receiver was last told, and still were at the last look."""
        rows = self._database.rows(f"SELECT run_id FROM hook_told WHERE {_THERE}", self._key(watched))  # noqa: S608
        return frozenset(str(run_id) for (run_id,) in rows)

    def note(self, watched: Watched, revision: str, pending: Collection[str], message: Message | None) -> None:
        """What a look has found, and the message it gives rise to: kept together or not at all.

        Runs that are no longer pending are forgotten: reopened, they are news again.
        """
        key = self._key(watched)
        with self._database.change() as db:
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
        """The delivery whose turn it is, the one that waits longest first."""
        where = "receiver = ? AND state = ? AND next_try <= ? ORDER BY next_try, created LIMIT 1"
        return next(iter(self._read(where, (self._receiver, DeliveryState.QUEUED, self._clock()))), None)

    def attempted(self, delivery: Delivery, attempt: Attempt, next_try: float | None) -> None:
        """Keep a try. Without a next one, a message that was not taken has failed: its news is news again then."""
        queued = not attempt.taken and next_try is not None
        ended = DeliveryState.DELIVERED if attempt.taken else DeliveryState.FAILED
        state = DeliveryState.QUEUED if queued else ended
        with self._database.change() as db:
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
        """Keep a message that is tried once only: a test."""
        state = DeliveryState.DELIVERED if attempt.taken else DeliveryState.FAILED
        with self._database.change() as db:
            db.execute(*self._insert(message, Watched("", ""), state, None))
            _keep_attempt(db, message.id, attempt)
        self._tidy()
        return Delivery(message, state, attempt.time, None, (attempt,))

    def all(self) -> list[Delivery]:
        """Every delivery that is kept, newest first; those to an earlier address too."""
        return self._read("1 ORDER BY created DESC, id", ())

    def queued(self) -> int:
        """How many wait."""
        where = "receiver = ? AND state = ?"
        rows = self._database.rows(
            f"SELECT COUNT(*) FROM hook_deliveries WHERE {where}",  # noqa: S608
            (self._receiver, DeliveryState.QUEUED),
        )
        return int(rows[0][0])

    def abandon_others(self) -> None:
        """Deliveries to an address that is no longer configured are not sent to the new one."""
        with self._database.change() as db:
            db.execute(
                "UPDATE hook_deliveries SET state = ?, next_try = NULL WHERE receiver <> ? AND state = ?",
                (DeliveryState.FAILED, self._receiver, DeliveryState.QUEUED),
            )

    def _key(self, watched: Watched) -> tuple[str, str, str]:
        return self._receiver, watched.place, watched.experiment_id

    def _insert(
        self, message: Message, watched: Watched, state: DeliveryState, next_try: float | None
    ) -> tuple[str, tuple[object, ...]]:
        names = "(id, receiver, event, place, experiment_id, experiment, body, state, created, next_try)"
        values = (message.id, self._receiver, message.event, watched.place, watched.experiment_id)
        more = (message.experiment, message.body, state, self._clock(), next_try)
        return f"INSERT INTO hook_deliveries {names} VALUES ({', '.join('?' * 10)})", (*values, *more)  # noqa: S608

    def _read(self, where: str, values: tuple[object, ...]) -> list[Delivery]:
        found = self._database.rows(f"SELECT {_DELIVERY} FROM hook_deliveries WHERE {where}", values)  # noqa: S608
        attempts: dict[str, list[Attempt]] = {str(row[0]): [] for row in found}
        statement = "SELECT delivery, number, time, took_s, status, reason FROM hook_attempts"
        if len(found) == 1:  # the sender's question, asked every second
            kept = self._database.rows(f"{statement} WHERE delivery = ? ORDER BY number", (found[0][0],))
        else:
            kept = self._database.rows(f"{statement} ORDER BY number") if found else []
        for delivery, *attempt in kept:
            if delivery in attempts:
                attempts[delivery].append(Attempt(*attempt))
        return [_delivery(row, tuple(attempts[str(row[0])])) for row in found]

    def _tidy(self) -> None:
        with self._database.change() as db:
            db.execute(
                "DELETE FROM hook_deliveries WHERE state <> ?1 AND id NOT IN"
                " (SELECT id FROM hook_deliveries WHERE state <> ?1 ORDER BY created DESC LIMIT ?2)",
                (DeliveryState.QUEUED, KEPT),
            )
            db.execute("DELETE FROM hook_attempts WHERE delivery NOT IN (SELECT id FROM hook_deliveries)")


def _keep_attempt(db: Any, delivery: str, attempt: Attempt) -> None:
    values = (delivery, attempt.number, attempt.time, attempt.took_s, attempt.status, attempt.reason)
    db.execute("INSERT INTO hook_attempts VALUES (?, ?, ?, ?, ?, ?)", values)


def _delivery(row: tuple[Any, ...], attempts: tuple[Attempt, ...]) -> Delivery:
    id_, event, experiment, body, state, created, next_try = row
    return Delivery(Message(id_, event, experiment, body), DeliveryState(state), created, next_try, attempts)
