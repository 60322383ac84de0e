"""Stores batches, which are sheets judged in the browser, and the history of their items in the panel's database."""

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
    DUEL = "duel"  # two answers at a time, of which the judge chooses the better one


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
    """Operation that created a version of an item."""

    PUT = "put"
    UNDO = "undo"


@dataclass(frozen=True)
class Batch:
    """A sheet judged in the browser. Times are Unix seconds."""

    sheet: str  # the sheet's id, which is also the id of the batch
    server: str  # identity of the MLflow server that stores the sheet; in the column `place`
    experiment: str
    judge: str
    kind: Kind
    size: int  # number of items
    status: Status = Status.OPEN
    revision: int = 0  # incremented by each save and each `reopen`; `close` fails if it has changed
    opened: float = 0.0
    updated: float = 0.0
    closed: float | None = None
    note: str | None = None  # an admin's reason for sending the batch back
    accepted: str | None = None  # an admin's reason for accepting the judge's drift
    outcome: Mapping[str, Any] | None = None  # result of the last close


@dataclass(frozen=True)
class ItemJudgement:
    """What a judge has entered for an item."""

    state: State
    content: str  # canonical JSON: scores, flags and notes, or the winner of a duel
    reason: str = ""  # why the item is skipped


@dataclass(frozen=True)
class ItemVersion:
    """A version of an item."""

    item: str
    version: int
    parent: int | None  # the version that undo restores: 0 is the untouched item; None if there is nothing to undo
    cause: Cause
    judgement: ItemJudgement
    seconds: float = 0.0  # spent on the item so far
    updated: float = 0.0  # Unix seconds

    def is_result_of(self, cause: Cause, version: int) -> bool:
        """Return whether `cause` created this version from `version`. If so, the same request again is a retry."""
        return self.cause == cause and self.version == version + 1


class VersionConflict(Exception):
    """The item has changed since the client read it. `current` is its current version, or None if it is untouched."""

    def __init__(self, current: ItemVersion | None) -> None:
        super().__init__("the item has another version")
        self.current = current


MAX_VERSIONS = 100  # stored per item
MAX_HISTORY_BYTES = 8_000_000  # of all versions in a batch; the oldest are deleted first
MAX_KEYS = 200  # idempotency keys per judge
_BATCH_COLUMNS = (  # in the order of the fields of Batch
    "sheet, place, experiment, judge, kind, size, status, revision, opened, updated, closed, note, accepted, outcome"
)
_ITEM_COLUMNS = "item, version, parent, cause, state, content, reason, seconds, updated"


class BatchStore:
    """Batches of one home folder. Thread-safe."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    # batches

    def add(self, batch: Batch, content: str) -> Batch:
        """Save a new batch, or reopen it if it exists. `content` is the part of its sheet that judges see, as JSON."""
        now = self._clock()
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO batches (sheet, place, experiment, judge, kind, content, size, status, opened, updated)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'open', ?, ?)"
                " ON CONFLICT (sheet) DO UPDATE SET status = 'open', closed = NULL, updated = excluded.updated",
                (batch.sheet, batch.server, batch.experiment, batch.judge, batch.kind, content, batch.size, now, now),
            )
            return _select_batch(db, batch.sheet)

    def get(self, sheet: str) -> Batch | None:
        """Return the batch of a sheet, or None."""
        return next(iter(self._batches("sheet = ?", (sheet,))), None)

    def content(self, sheet: str) -> str:
        """Return the part of a batch's sheet that judges see, as JSON."""
        [(content,)] = self._database.execute("SELECT content FROM batches WHERE sheet = ?", (sheet,))
        return str(content)

    def find_open(self, experiment: str, judge: str, kind: Kind, server: str | None = None) -> Batch | None:
        """Return the judge's most recently updated open batch, or None; `server` limits it to one MLflow server."""
        open_batches = self._batches(
            "experiment = ? AND judge = ? AND kind = ? AND status = 'open'", (experiment, judge, kind)
        )
        return next((batch for batch in open_batches if server is None or batch.server == server), None)

    def find_all(self, experiment: str, judge: str | None = None) -> list[Batch]:
        """Return the batches of an experiment, optionally of one judge, most recently updated first."""
        if judge is None:
            return self._batches("experiment = ?", (experiment,))
        return self._batches("experiment = ? AND judge = ?", (experiment, judge))

    def close(self, batch: Batch, status: Status, outcome: Mapping[str, Any]) -> Batch | None:
        """Close a batch and save its outcome. Returns None if the batch has changed since it was read."""
        now = self._clock()
        with self._database.transaction() as db:
            cursor = db.execute(
                "UPDATE batches SET status = ?, outcome = ?, closed = ?, updated = ?, note = NULL, accepted = ?"
                " WHERE sheet = ? AND status = 'open' AND revision = ?",
                (status, json.dumps(outcome), now, now, outcome.get("drift_accepted"), batch.sheet, batch.revision),
            )
            return _select_batch(db, batch.sheet) if cursor.rowcount else None

    def reopen(self, sheet: str, *, note: str | None = None) -> Batch:
        """Reopen a batch if it is closed, with an optional note from an admin."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'open', closed = NULL, note = ?, revision = revision + 1, updated = ?"
                " WHERE sheet = ? AND status <> 'open'",
                (note, self._clock(), sheet),
            )
            return _select_batch(db, sheet)

    def accept(self, sheet: str, reason: str | None, outcome: Mapping[str, Any]) -> Batch:
        """Mark a closed batch as applied, with the reason for accepting its drift."""
        with self._database.transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'applied', accepted = ?, outcome = ?, updated = ?"
                " WHERE sheet = ? AND status <> 'open'",
                (reason, json.dumps(outcome), self._clock(), sheet),
            )
            return _select_batch(db, sheet)

    # items

    def items(self, sheet: str) -> dict[str, ItemVersion]:
        """Return the current version of every item that has been edited, by item id."""
        rows = self._database.execute(f"SELECT {_ITEM_COLUMNS} FROM batch_items WHERE sheet = ?", (sheet,))  # noqa: S608
        return {saved.item: saved for saved in map(_read_version, rows)}

    def history(self, sheet: str, item: str) -> list[ItemVersion]:
        """Return the last versions of an item, up to MAX_VERSIONS, newest first."""
        statement = f"SELECT {_ITEM_COLUMNS} FROM batch_history WHERE sheet = ? AND item = ? ORDER BY version DESC"  # noqa: S608
        return [_read_version(row) for row in self._database.execute(statement, (sheet, item))]

    def put(self, sheet: str, item: str, version: int, judgement: ItemJudgement, seconds: float) -> ItemVersion:
        """Save a judgement. `version` is the item's version that the client read. Repeating the request has no effect.

        Raises VersionConflict if the item has another version now, Conflict if the batch is closed.
        """
        with self._database.transaction() as db:
            current = _select_item(db, sheet, item)
            if current is not None and current.is_result_of(Cause.PUT, version) and current.judgement == judgement:
                return current
            self._check_writable(db, sheet, current, version)
            if current is None:
                saved = ItemVersion(item, version=1, parent=0, cause=Cause.PUT, judgement=judgement)
            else:
                # Undo skips versions with the same judgement.
                parent = current.parent if current.judgement == judgement else current.version
                saved = replace(
                    current, version=current.version + 1, parent=parent, cause=Cause.PUT, judgement=judgement
                )
            return self._write(db, sheet, saved, spent_s=seconds)

    def undo(self, sheet: str, item: str, version: int, blank: str) -> ItemVersion:
        """Save the previous judgement as a new version. Each further undo goes one more step back.

        `blank` is the content of an untouched item. Raises like `put`, and Conflict if there is no earlier version.
        """
        with self._database.transaction() as db:
            current = _select_item(db, sheet, item)
            if current is not None and current.is_result_of(Cause.UNDO, version):
                return current
            self._check_writable(db, sheet, current, version)
            nothing_to_undo = Conflict(
                "There is no earlier version to restore.", code="nothing_to_undo", path="path.item"
            )
            if current is None or current.parent is None:
                raise nothing_to_undo
            if current.parent == 0:
                untouched = ItemJudgement(State.EMPTY, blank)
                previous = ItemVersion(item, version=0, parent=None, cause=Cause.UNDO, judgement=untouched)
            else:
                statement = f"SELECT {_ITEM_COLUMNS} FROM batch_history WHERE sheet = ? AND item = ? AND version = ?"  # noqa: S608
                row = db.execute(statement, (sheet, item, current.parent)).fetchone()
                if row is None:  # deleted because the history was too long
                    raise nothing_to_undo
                previous = _read_version(row)
            # The parent is that of `previous`, so the next undo goes one more step back.
            saved = replace(previous, version=current.version + 1, cause=Cause.UNDO, seconds=current.seconds)
            return self._write(db, sheet, saved, spent_s=0.0)

    def seconds(self, experiment: str) -> dict[str, list[float]]:
        """Return the seconds spent on each submitted item, by judge. Omits items without a recorded time."""
        times: dict[str, list[float]] = defaultdict(list)
        statement = (
            "SELECT judge, seconds FROM batch_items JOIN batches USING (sheet)"
            " WHERE experiment = ? AND state = 'submitted' AND seconds > 0"
        )
        for judge, seconds in self._database.execute(statement, (experiment,)):
            times[judge].append(seconds)
        return times

    # idempotency keys

    def save_key(self, judge: str, key: str, sheet: str) -> None:
        """Save which batch was the response to the judge's request with this idempotency key."""
        with self._database.transaction() as db:
            db.execute("INSERT OR IGNORE INTO batch_keys VALUES (?, ?, ?, ?)", (judge, key, sheet, self._clock()))
            db.execute(
                "DELETE FROM batch_keys WHERE judge = ?1 AND key NOT IN"
                " (SELECT key FROM batch_keys WHERE judge = ?1 ORDER BY used DESC, rowid DESC LIMIT ?2)",
                (judge, MAX_KEYS),
            )

    def find_by_key(self, judge: str, key: str) -> Batch | None:
        """Return the batch of an earlier request with this idempotency key, or None."""
        where = "sheet = (SELECT sheet FROM batch_keys WHERE judge = ? AND key = ?)"
        return next(iter(self._batches(where, (judge, key))), None)

    def _batches(self, where: str, values: tuple[object, ...]) -> list[Batch]:
        statement = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE {where} ORDER BY updated DESC, rowid DESC"  # noqa: S608
        return [_read_batch(row) for row in self._database.execute(statement, values)]

    def _check_writable(self, db: Connection, sheet: str, current: ItemVersion | None, version: int) -> None:
        if _select_batch(db, sheet).status is not Status.OPEN:
            message = "This batch is closed. Reopen it to make changes."
            raise Conflict(message, code="batch_closed", path="path.sheet")
        current_version = current.version if current else 0
        if version != current_version:
            raise VersionConflict(current)

    def _write(self, db: Connection, sheet: str, saved: ItemVersion, spent_s: float) -> ItemVersion:
        """Store a new version of an item, with `spent_s` added to its seconds, and return it."""
        now = self._clock()
        # Items are judged one at a time, so their total time cannot exceed the time since the batch was opened.
        opened, recorded_s = db.execute(
            "SELECT opened, (SELECT TOTAL(seconds) FROM batch_items WHERE sheet = batches.sheet)"
            " FROM batches WHERE sheet = ?",
            (sheet,),
        ).fetchone()
        seconds = saved.seconds + min(spent_s, max(0.0, now - opened - recorded_s))
        saved = replace(saved, seconds=seconds, updated=now)
        judgement = (saved.judgement.state, saved.judgement.content, saved.judgement.reason)
        row = (sheet, saved.item, saved.version, saved.parent, saved.cause, *judgement, saved.seconds, saved.updated)
        columns = f"sheet, {_ITEM_COLUMNS}"
        for table in ("batch_items", "batch_history"):
            db.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)  # noqa: S608
        db.execute(
            "DELETE FROM batch_history WHERE sheet = ? AND item = ? AND version <= ?",
            (sheet, saved.item, saved.version - MAX_VERSIONS),
        )
        _trim_history(db, sheet)
        db.execute("UPDATE batches SET revision = revision + 1, updated = ? WHERE sheet = ?", (now, sheet))
        return saved


def _trim_history(db: Connection, sheet: str) -> None:
    """Delete the oldest versions beyond MAX_HISTORY_BYTES. Current versions remain in `batch_items`."""
    size = "LENGTH(CAST(content AS BLOB)) + LENGTH(CAST(reason AS BLOB))"
    (total,) = db.execute(f"SELECT TOTAL({size}) FROM batch_history WHERE sheet = ?", (sheet,)).fetchone()  # noqa: S608
    if total > MAX_HISTORY_BYTES:
        running_total = f"SUM({size}) OVER (ORDER BY updated DESC, rowid DESC)"
        db.execute(
            "DELETE FROM batch_history WHERE rowid IN (SELECT id FROM"  # noqa: S608
            f" (SELECT rowid AS id, {running_total} AS running_total FROM batch_history WHERE sheet = ?)"
            " WHERE running_total > ?)",
            (sheet, MAX_HISTORY_BYTES),
        )


def _select_batch(db: Connection, sheet: str) -> Batch:
    """Return a batch, which exists because batches are never deleted."""
    return _read_batch(db.execute(f"SELECT {_BATCH_COLUMNS} FROM batches WHERE sheet = ?", (sheet,)).fetchone())  # noqa: S608


def _select_item(db: Connection, sheet: str, item: str) -> ItemVersion | None:
    where = "sheet = ? AND item = ?"
    row = db.execute(f"SELECT {_ITEM_COLUMNS} FROM batch_items WHERE {where}", (sheet, item)).fetchone()  # noqa: S608
    return None if row is None else _read_version(row)


def _read_batch(row: Row) -> Batch:
    *columns, outcome = row
    batch = Batch(*columns)
    parsed_outcome = None if outcome is None else json.loads(outcome)
    return replace(batch, kind=Kind(batch.kind), status=Status(batch.status), outcome=parsed_outcome)


def _read_version(row: Row) -> ItemVersion:
    item, version, parent, cause, state, content, reason, seconds, updated = row
    judgement = ItemJudgement(State(state), content, reason)
    return ItemVersion(item, version, parent, Cause(cause), judgement, seconds, updated)
