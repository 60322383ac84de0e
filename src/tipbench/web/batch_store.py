"""Batches on disk: what a judge has said so far in the browser, item by item, with every step of it.

An item's version counts its changes; whoever writes says which version they saw, so two tabs never overwrite each
other unseen. A batch's `revision` counts the changes of all its items: what was read at one revision is closed at that
revision or not at all. Everything is on disk when a method returns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from sqlite3 import Connection
from typing import Any

from tipbench.web.batch import Batch, BatchClosed, Cause, ItemMoved, Kept, Kind, NothingBefore, Said, State, Status
from tipbench.web.database import Database

MOST_STEPS = 100  # of one item that are kept
MOST_BYTES = 8_000_000  # of the steps of a whole batch; the oldest give way first
MOST_KEYS = 200  # of one judge that are remembered
_BATCH = (
    "sheet, place, experiment, judge, kind, size, status, revision, opened, updated, closed, note, accepted, outcome"
)
_ITEM = "item, version, parent, cause, state, content, reason, seconds, updated"


class BatchStore:
    """The batches of one home folder. Thread-safe."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    # batches

    def add(self, batch: Batch, content: str) -> Batch:
        """Keep a new batch with the public part of its sheet; one that is there already is opened again."""
        now = self._clock()
        with self._database.change() as db:
            db.execute(
                "INSERT INTO batches (sheet, place, experiment, judge, kind, content, size, status, opened, updated)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, 'open', ?, ?)"
                " ON CONFLICT (sheet) DO UPDATE SET status = 'open', closed = NULL, updated = excluded.updated",
                (batch.sheet, batch.place, batch.experiment, batch.judge, batch.kind, content, batch.size, now, now),
            )
            return _batch(db, batch.sheet) or batch

    def get(self, sheet: str) -> Batch | None:
        """The batch of that sheet."""
        return next(iter(self._batches("sheet = ?", (sheet,))), None)

    def content(self, sheet: str) -> str:
        """The public part of its sheet, as JSON; empty when there is no such batch."""
        rows = self._database.rows("SELECT content FROM batches WHERE sheet = ?", (sheet,))
        return str(rows[0][0]) if rows else ""

    def open_of(self, experiment: str, judge: str, kind: Kind, place: str | None = None) -> Batch | None:
        """The judge's open batch, the one last worked on; with `place`, of that MLflow."""
        found = self._batches(
            "experiment = ? AND judge = ? AND kind = ? AND status = 'open'", (experiment, judge, kind)
        )
        return next((batch for batch in found if place is None or batch.place == place), None)

    def listed(self, experiment: str, judge: str | None = None) -> list[Batch]:
        """The batches of an experiment, of one judge if named; those last worked on first."""
        if judge is None:
            return self._batches("experiment = ?", (experiment,))
        return self._batches("experiment = ? AND judge = ?", (experiment, judge))

    def close(self, batch: Batch, status: Status, outcome: Mapping[str, Any]) -> Batch | None:
        """Note how closing ended. None when anything has changed since `batch` was read."""
        now = self._clock()
        with self._database.change() as db:
            done = db.execute(
                "UPDATE batches SET status = ?, outcome = ?, closed = ?, updated = ?, note = NULL, accepted = ?"
                " WHERE sheet = ? AND status = 'open' AND revision = ?",
                (status, json.dumps(outcome), now, now, outcome.get("drift_accepted"), batch.sheet, batch.revision),
            )
            return _batch(db, batch.sheet) if done.rowcount else None

    def reopen(self, sheet: str, *, note: str | None = None) -> Batch | None:
        """Let the judge go on, with an admin's note if there is one."""
        with self._database.change() as db:
            db.execute(
                "UPDATE batches SET status = 'open', closed = NULL, note = ?, revision = revision + 1, updated = ?"
                " WHERE sheet = ? AND status <> 'open'",
                (note, self._clock(), sheet),
            )
            return _batch(db, sheet)

    def accept(self, sheet: str, reason: str | None, outcome: Mapping[str, Any] | None) -> Batch | None:
        """A held batch counts after all."""
        with self._database.change() as db:
            db.execute(
                "UPDATE batches SET status = 'applied', accepted = ?, outcome = ?, updated = ?"
                " WHERE sheet = ? AND status = 'held'",
                (reason, json.dumps(outcome) if outcome is not None else None, self._clock(), sheet),
            )
            return _batch(db, sheet)

    # items

    def items(self, sheet: str) -> dict[str, Kept]:
        """What is said of each item that was ever touched."""
        rows = self._database.rows(f"SELECT {_ITEM} FROM batch_items WHERE sheet = ?", (sheet,))  # noqa: S608 - fixed
        return {kept.item: kept for kept in map(_kept, rows)}

    def history(self, sheet: str, item: str, most: int) -> list[Kept]:
        """The versions of an item, newest first."""
        rows = self._database.rows(
            f"SELECT {_ITEM} FROM batch_history WHERE sheet = ? AND item = ? ORDER BY version DESC LIMIT ?",  # noqa: S608
            (sheet, item, most),
        )
        return [_kept(row) for row in rows]

    def put(self, sheet: str, item: str, version: int, said: Said, seconds: float) -> Kept:
        """Say something new of an item that was seen at `version`. Sent again after a lost answer, it is kept once.

        ItemMoved when it has another version by now, BatchClosed when nothing may change.
        """
        with self._database.change() as db:
            present = _item(db, sheet, item)
            if _made_by(present, version, Cause.PUT) and present is not None and present.said == said:
                return present
            self._check(db, sheet, present, version)
            at = present.version if present else 0
            parent = present.parent if present is not None and present.said == said else at
            kept = Kept(item, at + 1, parent, Cause.PUT, said, present.seconds if present else 0.0, 0.0)
            return self._write(db, sheet, kept, seconds)

    def undo(self, sheet: str, item: str, version: int, blank: str) -> Kept:
        """Bring back what was said before; again, one step further. `blank` is the content of an untouched item.

        ItemMoved and BatchClosed as above, NothingBefore at the beginning.
        """
        with self._database.change() as db:
            present = _item(db, sheet, item)
            if _made_by(present, version, Cause.UNDO) and present is not None:
                return present
            self._check(db, sheet, present, version)
            before = _before(db, sheet, present, blank)
            if present is None or before is None:
                raise NothingBefore
            kept = replace(before, version=present.version + 1, cause=Cause.UNDO, seconds=present.seconds)
            return self._write(db, sheet, kept, 0.0)

    def seconds(self, experiment: str) -> list[tuple[str, str, float]]:
        """(judge, sheet, seconds) of every submitted item."""
        return [
            (str(judge), str(sheet), float(seconds))
            for judge, sheet, seconds in self._database.rows(
                "SELECT judge, sheet, seconds FROM batch_items JOIN batches USING (sheet)"
                " WHERE experiment = ? AND state = 'submitted' AND seconds > 0",
                (experiment,),
            )
        ]

    # keys

    def remember(self, judge: str, key: str, sheet: str) -> None:
        """That this order of a judge's led to this batch."""
        with self._database.change() as db:
            db.execute("INSERT OR IGNORE INTO batch_keys VALUES (?, ?, ?, ?)", (judge, key, sheet, self._clock()))
            db.execute(
                "DELETE FROM batch_keys WHERE judge = ?1 AND key NOT IN"
                " (SELECT key FROM batch_keys WHERE judge = ?1 ORDER BY used DESC, rowid DESC LIMIT ?2)",
                (judge, MOST_KEYS),
            )

    def of_key(self, judge: str, key: str) -> Batch | None:
        """The batch an earlier order with this key led to."""
        where = "sheet = (SELECT sheet FROM batch_keys WHERE judge = ? AND key = ?)"
        return next(iter(self._batches(where, (judge, key))), None)

    def _batches(self, where: str, values: tuple[object, ...]) -> list[Batch]:
        statement = f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY updated DESC, rowid DESC"  # noqa: S608
        return [_read_batch(row) for row in self._database.rows(statement, values)]

    def _check(self, db: Connection, sheet: str, present: Kept | None, version: int) -> None:
        batch = _batch(db, sheet)
        if batch is None or batch.status is not Status.OPEN:
            raise BatchClosed
        if version != (present.version if present else 0):
            raise ItemMoved(present)

    def _write(self, db: Connection, sheet: str, kept: Kept, spent: float) -> Kept:
        now = self._clock()
        kept = replace(kept, seconds=kept.seconds + min(spent, _unspent(db, sheet, now)), updated=now)
        said = kept.said
        row = (kept.version, kept.parent, kept.cause, said.state, said.content, said.reason, kept.seconds, kept.updated)
        for table in ("batch_items", "batch_history"):
            places = ", ".join("?" * (len(row) + 2))
            db.execute(f"INSERT OR REPLACE INTO {table} (sheet, {_ITEM}) VALUES ({places})", (sheet, kept.item, *row))  # noqa: S608
        db.execute(
            "DELETE FROM batch_history WHERE sheet = ? AND item = ? AND version <= ?",
            (sheet, kept.item, kept.version - MOST_STEPS),
        )
        _shorten(db, sheet)
        db.execute("UPDATE batches SET revision = revision + 1, updated = ? WHERE sheet = ?", (now, sheet))
        return kept


def _made_by(present: Kept | None, version: int, cause: Cause) -> bool:
    """Whether a request that saw `version` may have made the present one: then it is a repeat."""
    return present is not None and present.version == version + 1 and present.cause is cause


def _before(db: Connection, sheet: str, present: Kept | None, blank: str) -> Kept | None:
    if present is None or present.parent is None:
        return None
    if present.parent == 0:
        return Kept(present.item, 0, None, Cause.UNDO, Said(State.EMPTY, blank), 0.0, 0.0)
    where = "sheet = ? AND item = ? AND version = ?"
    row = db.execute(
        f"SELECT {_ITEM} FROM batch_history WHERE {where}",  # noqa: S608
        (sheet, present.item, present.parent),
    ).fetchone()
    return None if row is None else _kept(row)


def _shorten(db: Connection, sheet: str) -> None:
    """Forget the oldest steps of a batch that has too much of them. What is said now is kept elsewhere."""
    size = "LENGTH(CAST(content AS BLOB)) + LENGTH(CAST(reason AS BLOB))"
    whole = db.execute(f"SELECT TOTAL({size}) FROM batch_history WHERE sheet = ?", (sheet,)).fetchone()[0]  # noqa: S608
    if whole > MOST_BYTES:
        newer = f"SUM({size}) OVER (ORDER BY updated DESC, rowid DESC)"
        db.execute(
            "DELETE FROM batch_history WHERE rowid IN (SELECT id FROM"  # noqa: S608
            f" (SELECT rowid AS id, {newer} AS size FROM batch_history WHERE sheet = ?) WHERE size > ?)",
            (sheet, MOST_BYTES),
        )


def _unspent(db: Connection, sheet: str, now: float) -> float:
    """The time since the batch was opened that no item has claimed: nobody judges two items at once."""
    statement = (
        "SELECT opened, (SELECT TOTAL(seconds) FROM batch_items WHERE sheet = batches.sheet)"
        " FROM batches WHERE sheet = ?"
    )
    opened, spent = db.execute(statement, (sheet,)).fetchone()
    return max(0.0, now - float(opened) - float(spent))


def _batch(db: Connection, sheet: str) -> Batch | None:
    row = db.execute(f"SELECT {_BATCH} FROM batches WHERE sheet = ?", (sheet,)).fetchone()  # noqa: S608
    return None if row is None else _read_batch(row)


def _item(db: Connection, sheet: str, item: str) -> Kept | None:
    where = "sheet = ? AND item = ?"
    row = db.execute(f"SELECT {_ITEM} FROM batch_items WHERE {where}", (sheet, item)).fetchone()  # noqa: S608
    return None if row is None else _kept(row)


def _read_batch(row: tuple[Any, ...]) -> Batch:
    *before, outcome = row
    batch = Batch(*before)
    told = None if outcome is None else json.loads(outcome)
    return replace(batch, kind=Kind(batch.kind), status=Status(batch.status), outcome=told)


def _kept(row: tuple[Any, ...]) -> Kept:
    item, version, parent, cause, state, content, reason, seconds, updated = row
    return Kept(item, version, parent, Cause(cause), Said(State(state), content, reason), seconds, updated)
