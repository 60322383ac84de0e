"""Batches in the panel's database: sheets judged in the browser, with item versions and history."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tipbench.sqlite import Connection, Database, Row
from tipbench.web.errors import Conflict


class Kind(StrEnum):
    """Kind of a batch."""

    SHEET = "sheet"  # tips to score on the rubric's scales
    DUEL = "duel"  # pairs of answers to choose the better one from


class Status(StrEnum):
    """Status of a batch."""

    OPEN = "open"  # being judged
    APPLIED = "applied"  # closed; the scores count
    HELD = "held"  # closed; the drift exceeds the limit, so the scores do not count


class State(StrEnum):
    """State of an item."""

    EMPTY = "empty"  # untouched, or cleared
    DRAFT = "draft"  # incomplete
    SUBMITTED = "submitted"  # complete; counts when the batch closes
    SKIPPED = "skipped"  # not judged, with a reason


class Cause(StrEnum):
    """Operation that created a version."""

    PUT = "put"
    UNDO = "undo"


@dataclass(frozen=True)
class Batch:
    """A sheet judged in the browser. Times are Unix seconds."""

    sheet: str
    place: str  # identity of the MLflow server that stores the sheet
    experiment: str
    judge: str
    kind: Kind
    size: int  # number of items
    status: Status = Status.OPEN
    revision: int = 0
    opened: float = 0.0
    updated: float = 0.0
    closed: float | None = None
    note: str | None = None  # an admin's reason for sending it back
    accepted: str | None = None  # an admin's reason for accepting its drift
    outcome: Mapping[str, Any] | None = None  # result of the last close


@dataclass(frozen=True)
class ItemAnswer:
    """A judge's answer to an item: its state, the content as canonical JSON, and the reason for a skip."""

    state: State
    content: str
    reason: str = ""


@dataclass(frozen=True)
class ItemVersion:
    """A version of an item. `parent` is the version that undo restores; None if there is none."""

    item: str
    version: int
    parent: int | None
    cause: Cause
    answer: ItemAnswer
    seconds: float
    updated: float

    def made_by(self, cause: Cause, version: int) -> bool:
        """Whether an operation on `version` may have created this version; then the request is a repeat."""
        return (self.cause, self.version) == (cause, version + 1)


class VersionConflict(Exception):
    """The item has changed since the client read it; `present` is its current version, None if untouched."""

    def __init__(self, present: ItemVersion | None) -> None:
        super().__init__("the item has another version")
        self.present = present


MAX_VERSIONS = 100  # stored per item
MAX_HISTORY_BYTES = 8_000_000  # of all versions of a batch; the oldest are deleted first
MAX_KEYS = 200  # idempotency keys per judge
_BATCH = (
    "sheet, place, experiment, judge, kind, size, status, revision, opened, updated, closed, note, accepted, outcome"
)
_ITEM = "item, version, parent, cause, state, content, reason, seconds, updated"


class BatchStore:
    """Batches of one home folder. Thread-safe."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    # batches

    def add(self, batch: Batch, content: str) -> Batch:
        """Save a new batch with the public part of its sheet; an existing one is reopened."""
        now = self._clock()
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO batches (sheet, place, experiment, judge, kind, content, size, status, opened, updated)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'open', ?, ?)"
                " ON CONFLICT (sheet) DO UPDATE SET status = 'open', closed = NULL, updated = excluded.updated",
                (batch.sheet, batch.place, batch.experiment, batch.judge, batch.kind, content, batch.size, now, now),
            )
            return _batch(db, batch.sheet)

    def get(self, sheet: str) -> Batch | None:
        """Return the batch of a sheet, or None."""
        return next(iter(self._batches("sheet = ?", (sheet,))), None)

    def content(self, sheet: str) -> str:
        """Return the public part of a batch's sheet, as JSON."""
        return str(self._database.rows("SELECT content FROM batches WHERE sheet = ?", (sheet,))[0][0])

    def open_of(self, experiment: str, judge: str, kind: Kind, place: str | None = None) -> Batch | None:
        """Return the judge's most recently updated open batch, or None; `place` limits it to one MLflow server."""
        found = self._batches(
            "experiment = ? AND judge = ? AND kind = ? AND status = 'open'", (experiment, judge, kind)
        )
        return next((batch for batch in found if place is None or batch.place == place), None)

    def listed(self, experiment: str, judge: str | None = None) -> list[Batch]:
        """Return the batches of an experiment, optionally of one judge, most recently updated first."""
        if judge is None:
            return self._batches("experiment = ?", (experiment,))
        return self._batches("experiment = ? AND judge = ?", (experiment, judge))

    def close(self, batch: Batch, status: Status, outcome: Mapping[str, Any]) -> Batch | None:
        """Close a batch with its result. Returns None if anything has changed since `batch` was read."""
        now = self._clock()
        with self._database.transaction() as db:
            done = db.execute(
                "UPDATE batches SET status = ?, outcome = ?, closed = ?, updated = ?, note = NULL, accepted = ?"
                " WHERE sheet = ? AND status = 'open' AND revision = ?",
                (status, json.dumps(outcome), now, now, outcome.get("drift_accepted"), batch.sheet, batch.revision),
            )
            return _batch(db, batch.sheet) if done.rowcount else None

    def reopen(self, sheet: str, *, note: str | None = None) -> Batch:
        """Reopen a batch if it is closed, with an optional note from an admin."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'open', closed = NULL, note = ?, revision = revision + 1, updated = ?"
                " WHERE sheet = ? AND status <> 'open'",
                (note, self._clock(), sheet),
            )
            return _batch(db, sheet)

    def accept(self, sheet: str, reason: str | None, outcome: Mapping[str, Any]) -> Batch:
        """Mark a batch as applied if it is held."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'applied', accepted = ?, outcome = ?, updated = ?"
                " WHERE sheet = ? AND status = 'held'",
                (reason, json.dumps(outcome), self._clock(), sheet),
            )
            return _batch(db, sheet)

    # items

    def items(self, sheet: str) -> dict[str, ItemVersion]:
        """Return the current version of every item that was ever edited, by item id."""
        rows = self._database.rows(f"SELECT {_ITEM} FROM batch_items WHERE sheet = ?", (sheet,))  # noqa: S608 - fixed
        return {saved.item: saved for saved in map(_read_version, rows)}

    def history(self, sheet: str, item: str) -> list[ItemVersion]:
        """Return the last versions of an item, up to MAX_VERSIONS, newest first."""
        statement = f"SELECT {_ITEM} FROM batch_history WHERE sheet = ? AND item = ? ORDER BY version DESC"  # noqa: S608
        return [_read_version(row) for row in self._database.rows(statement, (sheet, item))]

    def put(self, sheet: str, item: str, version: int, answer: ItemAnswer, seconds: float) -> ItemVersion:
        """Save an answer to an item that the client read at `version`; repeating a request has no further effect.

        Raises VersionConflict if the item has another version now, Conflict if the batch is closed.
        """
        with self._database.transaction() as db:
            present = _item(db, sheet, item)
            if present is not None and present.made_by(Cause.PUT, version) and present.answer == answer:
                return present
            self._check(db, sheet, present, version)
            number, seconds_before = (present.version, present.seconds) if present else (0, 0.0)
            parent = present.parent if present is not None and present.answer == answer else number
            saved = ItemVersion(item, number + 1, parent, Cause.PUT, answer, seconds_before, 0.0)
            return self._write(db, sheet, saved, seconds)

    def undo(self, sheet: str, item: str, version: int, blank: str) -> ItemVersion:
        """Restore the previous answer; each further undo goes one step back. `blank` is an untouched item's content.

        Raises VersionConflict and Conflict like `put`, and Conflict if there is no earlier version.
        """
        with self._database.transaction() as db:
            present = _item(db, sheet, item)
            if present is not None and present.made_by(Cause.UNDO, version):
                return present
            self._check(db, sheet, present, version)
            nothing = Conflict("There is no earlier version to restore.", code="nothing_to_undo", path="path.item")
            if present is None or present.parent is None:
                raise nothing
            if present.parent == 0:
                before = ItemVersion(item, 0, None, Cause.UNDO, ItemAnswer(State.EMPTY, blank), 0.0, 0.0)
            else:
                statement = f"SELECT {_ITEM} FROM batch_history WHERE sheet = ? AND item = ? AND version = ?"  # noqa: S608
                row = db.execute(statement, (sheet, item, present.parent)).fetchone()
                if row is None:  # deleted because the history was too long
                    raise nothing
                before = _read_version(row)
            saved = replace(before, version=present.version + 1, cause=Cause.UNDO, seconds=present.seconds)
            return self._write(db, sheet, saved, 0.0)

    def seconds(self, experiment: str) -> dict[str, list[float]]:
        """Return the recorded times of submitted items, by judge."""
        times: dict[str, list[float]] = defaultdict(list)
        statement = (
            "SELECT judge, seconds FROM batch_items JOIN batches USING (sheet)"
            " WHERE experiment = ? AND state = 'submitted' AND seconds > 0"
        )
        for judge, seconds in self._database.rows(statement, (experiment,)):
            times[judge].append(seconds)
        return times

    # idempotency keys

    def remember(self, judge: str, key: str, sheet: str) -> None:
        """Save that requests of a judge with this idempotency key return the batch of `sheet`."""
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO batch_keys VALUES (?, ?, ?, ?)", (judge, key, sheet, self._clock()))
            db.execute(
                "DELETE FROM batch_keys WHERE judge = ?1 AND key NOT IN"
                " (SELECT key FROM batch_keys WHERE judge = ?1 ORDER BY used DESC, rowid DESC LIMIT ?2)",
                (judge, MAX_KEYS),
            )

    def of_key(self, judge: str, key: str) -> Batch | None:
        """Return the batch of an earlier request with this idempotency key, or None."""
        where = "sheet = (SELECT sheet FROM batch_keys WHERE judge = ? AND key = ?)"
        return next(iter(self._batches(where, (judge, key))), None)

    def _batches(self, where: str, values: tuple[object, ...]) -> list[Batch]:
        statement = f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY updated DESC, rowid DESC"  # noqa: S608
        return [_read_batch(row) for row in self._database.rows(statement, values)]

    def _check(self, db: Connection, sheet: str, present: ItemVersion | None, version: int) -> None:
        """Raise Conflict if the batch is closed, VersionConflict unless `present` has this version."""
        if _batch(db, sheet).status is not Status.OPEN:
            message = "This batch is closed. Reopen it to make changes."
            raise Conflict(message, code="batch_closed", path="path.sheet")
        if version != (present.version if present else 0):
            raise VersionConflict(present)

    def _write(self, db: Connection, sheet: str, saved: ItemVersion, spent_s: float) -> ItemVersion:
        """Store a new version of an item, with `spent_s` added to its time, and return it."""
        now = self._clock()
        # Items are judged one at a time: together they take no longer than the batch has been open.
        opened, recorded_s = db.execute(
            "SELECT opened, (SELECT TOTAL(seconds) FROM batch_items WHERE sheet = batches.sheet)"
            " FROM batches WHERE sheet = ?",
            (sheet,),
        ).fetchone()
        seconds = saved.seconds + min(spent_s, max(0.0, now - opened - recorded_s))
        saved = replace(saved, seconds=seconds, updated=now)
        answer = (saved.answer.state, saved.answer.content, saved.answer.reason)
        row = (sheet, saved.item, saved.version, saved.parent, saved.cause, *answer, saved.seconds, saved.updated)
        for table in ("batch_items", "batch_history"):
            db.execute(f"INSERT OR REPLACE INTO {table} (sheet, {_ITEM}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)  # noqa: S608
        db.execute(
            "DELETE FROM batch_history WHERE sheet = ? AND item = ? AND version <= ?",
            (sheet, saved.item, saved.version - MAX_VERSIONS),
        )
        _shorten(db, sheet)
        db.execute("UPDATE batches SET revision = revision + 1, updated = ? WHERE sheet = ?", (now, sheet))
        return saved


def _shorten(db: Connection, sheet: str) -> None:
    """Delete the oldest versions of a batch until MAX_HISTORY_BYTES are left; `batch_items` has the current ones."""
    size = "LENGTH(CAST(content AS BLOB)) + LENGTH(CAST(reason AS BLOB))"
    total = db.execute(f"SELECT TOTAL({size}) FROM batch_history WHERE sheet = ?", (sheet,)).fetchone()[0]  # noqa: S608
    if total > MAX_HISTORY_BYTES:
        running_total = f"SUM({size}) OVER (ORDER BY updated DESC, rowid DESC)"
        db.execute(
            "DELETE FROM batch_history WHERE rowid IN (SELECT id FROM"  # noqa: S608
            f" (SELECT rowid AS id, {running_total} AS size FROM batch_history WHERE sheet = ?) WHERE size > ?)",
            (sheet, MAX_HISTORY_BYTES),
        )


def _batch(db: Connection, sheet: str) -> Batch:
    """Return a stored batch; batches are never deleted."""
    return _read_batch(db.execute(f"SELECT {_BATCH} FROM batches WHERE sheet = ?", (sheet,)).fetchone())  # noqa: S608


def _item(db: Connection, sheet: str, item: str) -> ItemVersion | None:
    where = "sheet = ? AND item = ?"
    row = db.execute(f"SELECT {_ITEM} FROM batch_items WHERE {where}", (sheet, item)).fetchone()  # noqa: S608
    return None if row is None else _read_version(row)


def _read_batch(row: Row) -> Batch:
    *values, outcome = row
    batch = Batch(*values)
    parsed = None if outcome is None else json.loads(outcome)
    return replace(batch, kind=Kind(batch.kind), status=Status(batch.status), outcome=parsed)


def _read_version(row: Row) -> ItemVersion:
    item, version, parent, cause, state, content, reason, seconds, updated = row
    return ItemVersion(item, version, parent, Cause(cause), ItemAnswer(State(state), content, reason), seconds, updated)
