"""Judging in the browser: the rules of a batch. A batch is a sheet, with the same export, apply and drift as by file.

What the judge says is kept at once in the panel's own database; only opening a new batch, closing, and an admin's word
on a held one need MLflow. Whoever works here is blind, admins too: they judge under their own name by a judge's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from json import loads
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from tipbench.errors import MlflowAway, NotEnoughData, TipbenchError
from tipbench.judge.checking import name_fault
from tipbench.plan.config import check_experiment_name
from tipbench.record.store import RunStore
from tipbench.web.auth import Identity
from tipbench.web.batch import Batch, BatchClosed, ItemMoved, Kept, Kind, NothingBefore, State, Status
from tipbench.web.batch_opening import find_work, recorded_status
from tipbench.web.batch_papers import PAPERS, Paper, canonical, filled_file, item_of, said_of
from tipbench.web.batch_shapes import ItemWish
from tipbench.web.batch_store import MOST_STEPS, BatchStore
from tipbench.web.batch_telling import batch_json, item_answer, medians, skips_json, whole_json
from tipbench.web.errors import Forbidden, Invalid, NotFound, WebError
from tipbench.web.judge_queries import accept_drift
from tipbench.web.judging import ApplyWish, alone, apply_sheet
from tipbench.web.paging import LIMIT, MOST, Place, page_of
from tipbench.web.tokens import EVERYBODY, Role

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

_CLOSES = 3  # tries, while another tab goes on saving
_PAPERS_KEPT = 32


class Conflict(WebError):
    """Not as things stand. `detail` has the item as it is now, where it is about one."""

    status, code = 409, "conflict"

    def __init__(
        self, message: str, *, code: str | None = None, path: str | None = None, detail: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code=code, path=path)
        self.detail = detail


@dataclass(frozen=True)
class Opened:
    """A judge's batch to work on; `new` when it was made just now."""

    batch: Batch
    new: bool


class BatchDesk:
    """One method for each thing that the JSON and the pages do with batches. Thread-safe."""

    def __init__(self, panel: Panel, store: BatchStore) -> None:
        self._panel = panel
        self._store = store
        self._paper = lru_cache(maxsize=_PAPERS_KEPT)(self._read_paper)

    def open(
        self,
        who: Identity,
        experiment: str,
        *,
        kind: Kind = Kind.SHEET,
        limit: int | None = None,
        key: str | None = None,
    ) -> Opened:
        """The judge's open batch, or a new one. NotEnoughData when nothing waits; an open one needs no MLflow."""
        judge = _blind(who)
        _check_name(experiment)
        if key is not None and (known := self._of_key(judge.name, key, experiment, kind)):
            return Opened(known, new=False)
        opened = self._continued(judge, experiment, kind) or self._made(judge, experiment, kind, limit)
        if key is not None:
            self._store.remember(judge.name, key, opened.batch.sheet)
        return opened

    def listed(self, who: Identity, experiment: str, judge: str | None = None) -> list[dict[str, Any]]:
        """The first page of batches, as long as a page may be."""
        return self.page(who, experiment, judge, limit=MOST)[0]

    def page(
        self, who: Identity, experiment: str, judge: str | None = None, *, limit: int = LIMIT, after: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """One's own batches; for an admin those of another judge, or of EVERYBODY, with counts and status alone.

        Those last worked on first; beside them the mark of the next page.
        """
        _check_name(experiment)
        if who.is_judge and (judge == EVERYBODY or judge not in (None, who.name)):
            raise Forbidden(f"A judge's token sees the batches of {who.name} alone.", path="query.judge")
        found = sorted(self._store.listed(experiment, None if judge == EVERYBODY else judge or who.name), key=_place)
        shown, following = page_of(found, _place, limit=limit, after=after)
        return [self._told(self._synced(batch), who) for batch in shown], following

    def one(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Everything its judge works with; of another's batch an admin is told what was skipped, and why."""
        batch = self._synced(self._known(who, sheet, experiment))
        if batch.judge != who.name:
            return {"batch": self._told(batch, who), "skips": self.skips(sheet)}
        return {"batch": self._told(batch, who), **whole_json(self._paper(sheet), self._store.items(sheet))}

    def own(self, who: Identity, sheet: str, experiment: str | None = None) -> Batch:
        """The batch, for its judge alone. NotFound for other judges, Forbidden for admins."""
        batch = self._known(who, sheet, experiment)
        if batch.judge != who.name:
            raise Forbidden(f"This batch is {batch.judge}'s: nobody else writes in it.", path="path.sheet")
        return batch

    def shown(self, batch: Batch) -> dict[str, Any]:
        """Where a batch stands, for its judge."""
        return batch_json(batch, self._store.items(batch.sheet))

    def skips(self, sheet: str) -> list[dict[str, Any]]:
        """The items that were skipped, and why: for admins."""
        return skips_json(self._paper(sheet), self._store.items(sheet))

    def save(
        self, who: Identity, sheet: str, item: str, wish: ItemWish, experiment: str | None = None
    ) -> dict[str, Any]:
        """Keep what the judge says of an item. Conflict, with the present one, if it has changed since it was seen."""
        batch, paper = self.own(who, sheet, experiment), self._paper(sheet)
        said = said_of(paper, item_of(paper, item), wish)
        with self._explained(paper, item):
            return self._saved(batch, self._store.put(sheet, item, wish.version, said, wish.seconds))

    def undo(self, who: Identity, sheet: str, item: str, version: int, experiment: str | None = None) -> dict[str, Any]:
        """Go back one step. Conflict as above, or when there is none."""
        batch, paper = self.own(who, sheet, experiment), self._paper(sheet)
        blank = canonical(paper.blank(item_of(paper, item)))
        with self._explained(paper, item):
            return self._saved(batch, self._store.undo(sheet, item, version, blank))

    def history(
        self,
        who: Identity,
        sheet: str,
        item: str,
        experiment: str | None = None,
        *,
        limit: int = LIMIT,
        after: str | None = None,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """What the judge has said of an item, newest first; beside it the mark of the next page."""
        self.own(who, sheet, experiment)
        paper = self._paper(sheet)
        raw = item_of(paper, item)
        steps = self._store.history(sheet, item, MOST_STEPS)
        shown, following = page_of(steps, lambda kept: Place(-kept.version, kept.item), limit=limit, after=after)
        return [item_answer(paper, raw, kept) for kept in shown], following

    def close(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Count the submitted items, or hold them. Closing again, also after a crash, ends the same."""
        batch = self.own(who, sheet, experiment)
        if batch.status is Status.OPEN:
            with self._mlflow() as store:
                batch = self._closed(store, batch)
        return {"batch": self._told(batch, who), "outcome": batch.outcome}

    def reopen(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Let the judge revise. What counts goes on counting until the batch is closed again."""
        batch = self.own(who, sheet, experiment)
        return {"batch": self._told(self._store.reopen(sheet) or batch, who)}

    def accept(self, admin: Identity, sheet: str, reason: str, experiment: str | None = None) -> dict[str, Any]:
        """Count a held batch all the same, and keep why. Conflict when it is not held."""
        why = reason.strip()
        if not (why and why.isprintable()):
            raise Invalid("reason is said in words on one line.", path="body.reason")
        batch = self._synced(self._known(admin, sheet, experiment))
        if (batch.status, batch.accepted) != (Status.APPLIED, why):
            self._need_held(batch)
            with self._mlflow() as store:
                told = accept_drift(store, batch.experiment, sheet, why, admin)
            counted = {
                "status": told["status"],
                "applied": told["applied"],
                "held": told["held"],
                "drift_accepted": why,
            }
            batch = self._store.accept(sheet, why, {**(batch.outcome or {}), **counted}) or batch
        return {"batch": self._told(batch, admin), "outcome": batch.outcome}

    def send_back(self, admin: Identity, sheet: str, note: str, experiment: str | None = None) -> dict[str, Any]:
        """Give a held batch back to its judge, with a note. Conflict when it is not held."""
        why = note.strip()
        if not why:
            raise Invalid("note says in words what to look at again.", path="body.note")
        batch = self._synced(self._known(admin, sheet, experiment))
        if (batch.status, batch.note) != (Status.OPEN, why):
            self._need_held(batch)
            batch = self._store.reopen(sheet, note=why) or batch
        return {"batch": self._told(batch, admin)}

    def recorded_already(self, sheet: str) -> Status | None:
        """How the sheet of a batch that was never closed here stands in MLflow; None while nothing has come back."""
        batch = self._store.get(sheet)
        if batch is None or batch.status is not Status.OPEN or batch.outcome is not None:
            return None
        return self._recorded(batch)[0]

    def minutes_per_item(self, experiment: str) -> dict[str, float]:
        """By judge: the median time of a submitted item."""
        return medians(self._store.seconds(experiment))

    # inside

    def _of_key(self, judge: str, key: str, experiment: str, kind: Kind) -> Batch | None:
        known = self._store.of_key(judge, key)
        if known is not None and (known.experiment, known.kind) != (experiment, kind):
            raise Conflict(
                "This Idempotency-Key was used for another batch. Make up a new one.",
                code="key_used",
                path="header.idempotency-key",
            )
        return known

    def _continued(self, judge: Identity, experiment: str, kind: Kind) -> Opened | None:
        found = self._open_of(judge, experiment, kind)
        if found is not None and self._synced(found).status is not Status.OPEN:
            found = self._open_of(judge, experiment, kind)
        return Opened(found, new=False) if found is not None else None

    def _open_of(self, judge: Identity, experiment: str, kind: Kind) -> Batch | None:
        place = None
        with suppress(TipbenchError):  # drafts go on without MLflow
            place = self._panel.tracker.open().identity
        return self._store.open_of(experiment, judge.name, kind, place)

    def _made(self, judge: Identity, experiment: str, kind: Kind, limit: int | None) -> Opened:
        with self._mlflow() as store:
            if there := self._open_of(judge, experiment, kind):  # by another tab, while we waited
                return Opened(there, new=False)
            work = find_work(store, experiment, judge, self._panel.allowed, kind, limit)
            place, size = self._panel.tracker.open().identity, len(work.raw["items"])
            batch = Batch(work.sheet, place, experiment, judge.name, kind, size)
            return Opened(self._store.add(batch, canonical(work.raw)), new=True)

    def _closed(self, store: RunStore, batch: Batch) -> Batch:
        for _ in range(_CLOSES):
            batch = self._store.get(batch.sheet) or batch
            if batch.status is not Status.OPEN:
                return batch
            given = self._store.items(batch.sheet)
            told = apply_sheet(
                store,
                batch.experiment,
                filled_file(self._paper(batch.sheet), batch.judge, given),
                ApplyWish(Identity(batch.judge, Role.JUDGE, ""), batch.judge, settled=_settled(batch, given)),
            )
            if not told["applied"] + told["held"]:
                raise NotEnoughData("Nothing of this batch is submitted yet. Submit an item, then close it.")
            by_file = {"by_file": True} if _is_by_file(batch, given) else {}
            done = self._store.close(batch, Status(told["status"]), {**told, **by_file})
            if done is not None:
                return done
        raise Conflict("The batch is being changed in another tab. Let that one save, then close again.")

    def _synced(self, batch: Batch) -> Batch:
        """The batch as its sheet is in MLflow, if that can be asked: elsewhere a drift is accepted, a file applied."""
        if batch.status is Status.HELD:
            return self._accepted_elsewhere(batch)
        return self._applied_elsewhere(batch) if batch.status is Status.OPEN else batch

    def _accepted_elsewhere(self, batch: Batch) -> Batch:
        status, accepted = self._recorded(batch)
        if status is not Status.APPLIED:
            return batch
        outcome = {**(batch.outcome or {}), "status": str(status), "drift_accepted": accepted}
        return self._store.accept(batch.sheet, accepted, outcome) or batch

    def _applied_elsewhere(self, batch: Batch) -> Batch:
        """A batch in which nothing was said ends as the file did; anything said here waits for its judge."""
        said = any(kept.said.state is not State.EMPTY for kept in self._store.items(batch.sheet).values())
        if said or self.recorded_already(batch.sheet) is None:
            return batch
        try:
            with self._mlflow() as store:
                return self._closed(store, batch)
        except (TipbenchError, WebError):
            return batch

    def _recorded(self, batch: Batch) -> tuple[Status | None, str | None]:
        """The sheet's state in MLflow and why its drift was accepted; nothing when that cannot be asked."""
        try:
            return recorded_status(self._panel.tracker.open().store, batch)
        except (TipbenchError, WebError):
            return None, None

    def _known(self, who: Identity, sheet: str, experiment: str | None) -> Batch:
        batch = self._store.get(sheet)
        wrong = batch is None or (experiment is not None and batch.experiment != experiment)
        if batch is None or wrong or (who.is_judge and batch.judge != who.name):
            raise NotFound(f"There is no batch {sheet[:64]!r} of yours here.", path="path.sheet")
        return batch

    def _need_held(self, batch: Batch) -> None:
        if batch.status is not Status.HELD:
            raise Conflict(
                f"Batch {batch.sheet} is {batch.status}; only a held one is accepted or sent back.",
                code="not_held",
                path="path.sheet",
            )

    def _told(self, batch: Batch, who: Identity) -> dict[str, Any]:
        shown = batch if batch.judge == who.name else replace(batch, outcome=None)
        return self.shown(shown)

    def _saved(self, batch: Batch, kept: Kept) -> dict[str, Any]:
        paper, now = self._paper(batch.sheet), self._store.get(batch.sheet) or batch
        answer = item_answer(paper, item_of(paper, kept.item), kept)
        return {"item": kept.item, "answer": answer, "batch": self.shown(now)}

    def _read_paper(self, sheet: str) -> Paper:
        batch = self._store.get(sheet)
        if batch is None:
            raise NotFound(f"There is no batch {sheet[:64]!r}.", path="path.sheet")
        return PAPERS[batch.kind](loads(self._store.content(sheet)))

    @contextmanager
    def _explained(self, paper: Paper, item: str) -> Iterator[None]:
        try:
            yield
        except ItemMoved as exc:
            answer = item_answer(paper, item_of(paper, item), exc.present)
            raise Conflict(
                f"This item was changed elsewhere: it has version {answer['version']} now. Nothing was overwritten; "
                "look at it and save again.",
                path="body.version",
                detail={"item": item, "answer": answer},
            ) from exc
        except BatchClosed as exc:
            message = "This batch is closed. Reopen it to change something."
            raise Conflict(message, code="batch_closed", path="path.sheet") from exc
        except NothingBefore as exc:
            raise Conflict("There is no step before this one.", code="nothing_to_undo", path="path.item") from exc

    @contextmanager
    def _mlflow(self) -> Iterator[RunStore]:
        """MLflow, with nobody else of this machine writing scores there."""
        try:
            opened = self._panel.tracker.open()
            with alone(self._panel.settings.home, opened.place):
                yield opened.store
        except MlflowAway:
            self._panel.tracker.doubt()
            raise


def desk_of(app: FastAPI) -> BatchDesk:
    """The application's own."""
    desk: BatchDesk = app.state.batches
    return desk


def _settled(batch: Batch, given: Mapping[str, Kept]) -> bool:
    """Whether every item is submitted or skipped."""
    return sum(kept.said.state in (State.SUBMITTED, State.SKIPPED) for kept in given.values()) == batch.size


def _is_by_file(batch: Batch, given: Mapping[str, Kept]) -> bool:
    """Whether nothing was ever counted from here: what counts came as a file."""
    before = batch.outcome is None or bool(batch.outcome.get("by_file"))
    return before and not any(kept.said.state is State.SUBMITTED for kept in given.values())


def _place(batch: Batch) -> Place:
    return Place(-int(batch.updated * 1000), batch.sheet)


def _blind(who: Identity) -> Identity:
    """Whoever judges does so as a judge. Forbidden under a name that judges cannot have."""
    if fault := name_fault(who.name):
        raise Forbidden(f"A judge has {fault}; this token is named {who.name[:60]!r}. Judge with another token.")
    return replace(who, role=Role.JUDGE)


def _check_name(experiment: str) -> None:
    try:
        check_experiment_name(experiment)
    except ValueError as exc:
        raise Invalid(str(exc), path="path.experiment") from exc
