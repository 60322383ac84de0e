"""Batch service: open, save, undo, close, reopen, accept and send back batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from json import loads
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI

from tipbench.errors import MlflowUnavailable, NotEnoughData, TipbenchError
from tipbench.judge.check import name_problem
from tipbench.judge.duels import duel_json, export_duels, find_duel, stored_duel_sheets
from tipbench.judge.sheet import sheet_json
from tipbench.judge.sheet_store import SheetStatus, find_sheet
from tipbench.record.store import RunStore
from tipbench.text import iso
from tipbench.web.auth import EVERYBODY, Identity, Role
from tipbench.web.batch_items import (
    ITEM_TYPES,
    BatchAnswer,
    BatchClosedShape,
    BatchDetail,
    BatchItems,
    BatchLinks,
    BatchList,
    BatchOpened,
    BatchShape,
    HistoryShape,
    ItemRequest,
    ItemSaved,
    ItemShape,
    answer_of,
    answer_shape,
    canonical,
    filled_file,
    item_of,
    rubric_json,
    rubric_of,
)
from tipbench.web.batch_store import (
    Batch,
    BatchStore,
    ItemVersion,
    Kind,
    State,
    Status,
    VersionConflict,
)
from tipbench.web.errors import Conflict, Forbidden, Invalid, NotFound, WebError, options_at
from tipbench.web.forms import DEFAULT_LIMIT, SortKey, page_of
from tipbench.web.judge_service import ApplyOptions, accept_drift, apply_sheet, parse_sheet_request, sheet_for
from tipbench.web.queries import check_name, get_experiment
from tipbench.workflows.judging import drift_reason, duel_request

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

ANSWERS = 30  # default number of answers in a new sheet; hidden controls and repeats make it about 40 items
DUELS = 40  # default number of duels in a new sheet
_CLOSE_ATTEMPTS = 3  # a close is repeated if another tab saves an item at the same time
_CACHED_SHEETS = 32


def recorded_status(store: RunStore, batch: Batch) -> tuple[Status | None, str | None]:
    """Return the sheet's status in MLflow, and the reason for which its drift was accepted.

    The status is None if no scores have been applied yet. The reason is None if there is none.
    """
    experiment = get_experiment(store, batch.experiment)
    find = find_duel if batch.kind is Kind.DUEL else find_sheet
    stored = find(store, experiment, batch.sheet)
    if stored is None or stored.status is SheetStatus.EXPORTED:
        return None, None
    return Status(str(stored.status)), getattr(stored, "accepted", None)  # duels have no drift to accept


class BatchService:
    """Batch operations for the API and the pages. Thread-safe."""

    def __init__(self, panel: Panel, store: BatchStore) -> None:
        self._panel = panel
        self._store = store
        self._batch_items = lru_cache(maxsize=_CACHED_SHEETS)(self._read_items)

    def open(
        self,
        who: Identity,
        experiment: str,
        *,
        kind: Kind = Kind.SHEET,
        limit: int | None = None,
        key: str | None = None,
    ) -> BatchOpened:
        """Return the judge's open batch, or create one. Raises NotEnoughData if no cell is pending.

        Only creating a batch needs MLflow. With an idempotency key, a repeated request returns the same batch, even if
        it is closed.
        """
        if requirement := name_problem(who.name):
            raise Forbidden(
                f"A judge has {requirement}; this token is named {who.name[:60]!r}. Judge with another token."
            )
        judge = replace(who, role=Role.JUDGE)  # admins judge blind too
        check_name(experiment)
        earlier = self._store.of_key(judge.name, key) if key is not None else None
        if earlier is not None:
            if (earlier.experiment, earlier.kind) != (experiment, kind):
                raise Conflict(
                    "This Idempotency-Key was used for another batch. Use a new one.",
                    code="key_used",
                    path="header.idempotency-key",
                )
            return BatchOpened(batch=self._shape(earlier), new=False)
        existing = self._open_of(judge, experiment, kind)
        if existing is not None and self._sync(existing).status is not Status.OPEN:
            existing = self._open_of(judge, experiment, kind)
        batch, new = (existing, False) if existing else self._create(judge, experiment, kind, limit)
        if key is not None:
            self._store.remember(judge.name, key, batch.sheet)
        return BatchOpened(batch=self._shape(batch), new=new)

    def page(
        self,
        who: Identity,
        experiment: str,
        judge: str | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        after: str | None = None,
    ) -> BatchList:
        """Return a page of the caller's batches, most recently updated first.

        Admins may request the batches of another judge, or of EVERYBODY, with counts and status only.
        """
        check_name(experiment)
        if who.is_judge and (judge == EVERYBODY or judge not in (None, who.name)):
            raise Forbidden(f"A judge's token can list only its own batches ({who.name}).", path="query.judge")
        only_judge = None if judge == EVERYBODY else judge or who.name
        batches = sorted(self._store.listed(experiment, only_judge), key=_sort_key)
        page, next_cursor = page_of(batches, _sort_key, limit=limit, after=after)
        return BatchList(items=[self._shape_for(self._sync(batch), who) for batch in page], next=next_cursor)

    def detail(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchDetail:
        """Return a batch: all of it for its judge, only the status and the skipped items for an admin."""
        batch = self._sync(self._visible(who, sheet, experiment))
        shape = self._shape_for(batch, who)
        if batch.judge != who.name:
            return BatchDetail(batch=shape, skips=self.skips(sheet))
        batch_items, answers = self._batch_items(sheet), self._store.items(sheet)
        return BatchDetail(
            batch=shape,
            instructions=batch_items.raw["instructions"],
            rubric=rubric_json(rubric_of(batch_items.raw)),
            items=[
                ItemShape(
                    item=item["item"],
                    number=number,
                    answer=answer_shape(batch_items, item, answers.get(item["item"])),
                    **batch_items.shown(item),
                )
                for number, item in enumerate(batch_items.raw["items"], start=1)
            ],
        )

    def own(self, who: Identity, sheet: str, experiment: str | None = None) -> Batch:
        """Return a batch of the client. Raises NotFound, or Forbidden if an admin requests another judge's batch."""
        batch = self._visible(who, sheet, experiment)
        if batch.judge != who.name:
            raise Forbidden(f"This batch belongs to {batch.judge}; only its judge can edit it.", path="path.sheet")
        return batch

    def skips(self, sheet: str) -> list[dict[str, Any]]:
        """Return the skipped items with their reasons, in the sheet's order, for admins."""
        answers = self._store.items(sheet)
        numbered = enumerate((item["item"] for item in self._batch_items(sheet).raw["items"]), start=1)
        return [
            {"item": item, "number": number, "reason": saved.answer.reason, "updated": iso(saved.updated)}
            for number, item in numbered
            if (saved := answers.get(item)) and saved.answer.state is State.SKIPPED
        ]

    def save(
        self, who: Identity, sheet: str, item: str, request: ItemRequest, experiment: str | None = None
    ) -> ItemSaved:
        """Save an item. Raises Conflict with the current version if the item has changed since it was read."""
        batch, batch_items = self.own(who, sheet, experiment), self._batch_items(sheet)
        answer = answer_of(batch_items, item_of(batch_items, item), request)
        with self._conflict_errors(batch_items, item):
            return self._item_saved(batch, self._store.put(sheet, item, request.version, answer, request.seconds))

    def undo(self, who: Identity, sheet: str, item: str, version: int, experiment: str | None = None) -> ItemSaved:
        """Restore the previous answer. Raises Conflict like `save`, or if there is no previous answer."""
        batch, batch_items = self.own(who, sheet, experiment), self._batch_items(sheet)
        blank = canonical(batch_items.blank(item_of(batch_items, item)))
        with self._conflict_errors(batch_items, item):
            return self._item_saved(batch, self._store.undo(sheet, item, version, blank))

    def history(
        self,
        who: Identity,
        sheet: str,
        item: str,
        experiment: str | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        after: str | None = None,
    ) -> HistoryShape:
        """Return a page of an item's saved versions, newest first."""
        self.own(who, sheet, experiment)
        batch_items = self._batch_items(sheet)
        sheet_item = item_of(batch_items, item)

        def sort_key(saved: ItemVersion) -> SortKey:
            return SortKey(-saved.version, saved.item)

        page, next_cursor = page_of(self._store.history(sheet, item), sort_key, limit=limit, after=after)
        return HistoryShape(items=[answer_shape(batch_items, sheet_item, saved) for saved in page], next=next_cursor)

    def close(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchClosedShape:
        """Apply the scores of the submitted items, or hold them if the drift exceeds the limit.

        Idempotent, even if an earlier call was interrupted.
        """
        batch = self.own(who, sheet, experiment)
        if batch.status is Status.OPEN:
            with self._mlflow() as store:
                batch = self._close(store, batch, final=True)
        return BatchClosedShape(batch=self._shape_for(batch, who), outcome=dict(batch.outcome or {}))

    def reopen(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchAnswer:
        """Reopen the batch for revision. Applied scores count until the batch is closed again."""
        self.own(who, sheet, experiment)
        return BatchAnswer(batch=self._shape_for(self._store.reopen(sheet), who))

    def accept(self, admin: Identity, sheet: str, reason: str, experiment: str | None = None) -> BatchClosedShape:
        """Accept the drift of a held batch and save the reason. Raises Conflict if the batch is not held."""
        with options_at("body"):
            why = drift_reason(reason, "reason")
        batch = self._sync(self._visible(admin, sheet, experiment))
        if (batch.status, batch.accepted) != (Status.APPLIED, why):
            self._check_held(batch)
            with self._mlflow() as store:
                result = accept_drift(store, batch.experiment, sheet, why, admin)
            changed = {name: result[name] for name in ("status", "applied", "held")}
            outcome = {**(batch.outcome or {}), **changed, "drift_accepted": why}
            batch = self._store.accept(sheet, why, outcome)
        return BatchClosedShape(batch=self._shape_for(batch, admin), outcome=dict(batch.outcome or {}))

    def send_back(self, admin: Identity, sheet: str, note: str, experiment: str | None = None) -> BatchAnswer:
        """Reopen a held batch for its judge, with a note. Raises Conflict if the batch is not held."""
        why = note.strip()
        if not why:
            raise Invalid("note must say what to revise.", path="body.note")
        batch = self._sync(self._visible(admin, sheet, experiment))
        if (batch.status, batch.note) != (Status.OPEN, why):
            self._check_held(batch)
            batch = self._store.reopen(sheet, note=why)
        return BatchAnswer(batch=self._shape_for(batch, admin))

    def recorded_already(self, sheet: str) -> Status | None:
        """Return the status in MLflow of an open batch that was never closed in the panel.

        Returns None for other batches, and if no scores have been applied, for example from a file.
        """
        batch = self._store.get(sheet)
        if batch is None or batch.status is not Status.OPEN or batch.outcome is not None:
            return None
        return self._try_recorded_status(batch)[0]

    def minutes_per_item(self, experiment: str) -> dict[str, float]:
        """Return the median minutes per submitted item, by judge."""
        return {judge: median(seconds) / 60 for judge, seconds in sorted(self._store.seconds(experiment).items())}

    def _open_of(self, judge: Identity, experiment: str, kind: Kind) -> Batch | None:
        place = None
        with suppress(TipbenchError):  # an open batch can be continued without MLflow
            place = self._panel.tracker.open().identity
        return self._store.open_of(experiment, judge.name, kind, place)

    def _create(self, judge: Identity, experiment: str, kind: Kind, limit: int | None) -> tuple[Batch, bool]:
        """Create a batch with the judge's open sheet in MLflow, or with a new sheet.

        Returns the batch, and whether it is new.
        """
        with self._mlflow() as store:
            if existing := self._open_of(judge, experiment, kind):  # opened by another tab while waiting for the lock
                return existing, False
            if kind is Kind.SHEET:
                request = parse_sheet_request({"limit": limit or ANSWERS}, judge, self._panel.allowed)
                raw = sheet_json(sheet_for(store, experiment, request).sheet)
            else:
                mlflow_experiment = get_experiment(store, experiment)
                open_sheets = (
                    duel_sheet
                    for duel_sheet in stored_duel_sheets(store, mlflow_experiment)
                    if duel_sheet.owner == judge.name and duel_sheet.status is SheetStatus.EXPORTED
                )
                stored = next(open_sheets, None)
                if stored is None:
                    duels = duel_request(store, mlflow_experiment, judge=judge.name, limit=limit or DUELS)
                    stored = export_duels(store, mlflow_experiment, duels).stored
                raw = duel_json(stored.sheet)
            place, size = self._panel.tracker.open().identity, len(raw["items"])
            batch = Batch(raw["sheet"], place, experiment, judge.name, kind, size)
            return self._store.add(batch, canonical(raw)), True

    def _close(self, store: RunStore, batch: Batch, *, final: bool) -> Batch:
        """Apply the submitted answers and close the batch. `final` also finishes the sheet and checks the drift."""
        for _ in range(_CLOSE_ATTEMPTS):
            batch = self._store.get(batch.sheet) or batch
            if batch.status is not Status.OPEN:
                return batch
            answers = self._store.items(batch.sheet)
            submitted = any(saved.answer.state is State.SUBMITTED for saved in answers.values())
            # A sheet without any score cannot be finished. The error below then asks the judge to submit an item.
            final = final and (submitted or recorded_status(store, batch)[0] is not None)
            result = apply_sheet(
                store,
                batch.experiment,
                filled_file(self._batch_items(batch.sheet), batch.judge, answers),
                ApplyOptions(Identity(batch.judge, Role.JUDGE, ""), batch.judge, final=final),
            )
            if not result["applied"] + result["held"]:
                raise NotEnoughData("No item of this batch is submitted yet. Submit an item, then close the batch.")
            if not submitted and (batch.outcome is None or batch.outcome.get("by_file")):
                result["by_file"] = True  # all scores were applied from a file
            closed = self._store.close(batch, Status(result["status"]), result)
            if closed is not None:
                return closed
        raise Conflict("The batch is being changed in another tab. Wait until that is saved, then close again.")

    def _sync(self, batch: Batch) -> Batch:
        """Update a batch whose sheet was applied, or whose drift was accepted, outside the panel.

        An open batch with answers stays open. Nothing changes if MLflow is unavailable.
        """
        if batch.status is Status.HELD:
            status, accepted = self._try_recorded_status(batch)
            if status is not Status.APPLIED:
                return batch
            outcome = {**(batch.outcome or {}), "status": str(status), "drift_accepted": accepted}
            return self._store.accept(batch.sheet, accepted, outcome)
        if batch.status is not Status.OPEN:
            return batch
        has_answers = any(saved.answer.state is not State.EMPTY for saved in self._store.items(batch.sheet).values())
        if has_answers or self.recorded_already(batch.sheet) is None:
            return batch
        try:
            with self._mlflow() as store:
                return self._close(store, batch, final=False)
        except (TipbenchError, WebError):
            return batch

    def _try_recorded_status(self, batch: Batch) -> tuple[Status | None, str | None]:
        """Return `recorded_status`, or (None, None) if MLflow is unavailable."""
        try:
            return recorded_status(self._panel.tracker.open().store, batch)
        except (TipbenchError, WebError):
            return None, None

    def _visible(self, who: Identity, sheet: str, experiment: str | None) -> Batch:
        """Return a batch that the client may see. Raises NotFound."""
        batch = self._store.get(sheet)
        if batch is None or experiment not in (None, batch.experiment) or (who.is_judge and batch.judge != who.name):
            raise NotFound(f"You have no batch {sheet[:64]!r}.", path="path.sheet")
        return batch

    def _check_held(self, batch: Batch) -> None:
        if batch.status is not Status.HELD:
            raise Conflict(
                f"Batch {batch.sheet} is {batch.status}; only a held one is accepted or sent back.",
                code="not_held",
                path="path.sheet",
            )

    def _shape_for(self, batch: Batch, who: Identity) -> BatchShape:
        """Return the batch as a response for this client. Only the batch's judge sees the outcome."""
        return self._shape(batch if batch.judge == who.name else replace(batch, outcome=None))

    def _shape(self, batch: Batch) -> BatchShape:
        answers = self._store.items(batch.sheet).values()
        counts = Counter(saved.answer.state for saved in answers)
        seconds = [saved.seconds for saved in answers if saved.answer.state is State.SUBMITTED and saved.seconds > 0]
        url = f"/api/bench/judge/{quote(batch.experiment, safe='')}/batches/{batch.sheet}"
        links = {"self": url, **{name: f"{url}/{name}" for name in ("items", "close", "reopen")}}
        links["page"] = f"/judge/batches/{batch.sheet}"
        return BatchShape(
            sheet=batch.sheet,
            experiment=batch.experiment,
            judge=batch.judge,
            kind=batch.kind.value,
            status=batch.status.value,
            items=batch.size,
            done=counts[State.SUBMITTED],
            draft=counts[State.DRAFT],
            skipped=counts[State.SKIPPED],
            empty=batch.size - counts[State.SUBMITTED] - counts[State.DRAFT] - counts[State.SKIPPED],
            opened=iso(batch.opened),
            updated=iso(batch.updated),
            closed=iso(batch.closed),
            seconds=round(sum(saved.seconds for saved in answers), 1),
            minutes_per_item=median(seconds) / 60 if seconds else None,
            note=batch.note,
            accepted=batch.accepted,
            outcome=None if batch.outcome is None else dict(batch.outcome),
            links=BatchLinks.model_validate(links),
        )

    def _item_saved(self, batch: Batch, saved: ItemVersion) -> ItemSaved:
        batch_items, updated_batch = self._batch_items(batch.sheet), self._store.get(batch.sheet) or batch
        answer = answer_shape(batch_items, item_of(batch_items, saved.item), saved)
        return ItemSaved(item=saved.item, answer=answer, batch=self._shape(updated_batch))

    def _read_items(self, sheet: str) -> BatchItems:
        batch = self._store.get(sheet)
        if batch is None:
            raise NotFound(f"There is no batch {sheet[:64]!r}.", path="path.sheet")
        return ITEM_TYPES[batch.kind](loads(self._store.content(sheet)))

    @contextmanager
    def _conflict_errors(self, batch_items: BatchItems, item: str) -> Iterator[None]:
        """Convert VersionConflict into Conflict with the current item."""
        try:
            yield
        except VersionConflict as exc:
            answer = answer_shape(batch_items, item_of(batch_items, item), exc.present)
            raise Conflict(
                f"This item was changed elsewhere: it has version {answer.version} now. Nothing was overwritten; "
                "check it and save again.",
                path="body.version",
                detail={"item": item, "answer": answer.model_dump()},
            ) from exc

    @contextmanager
    def _mlflow(self) -> Iterator[RunStore]:
        """Open MLflow, and hold this machine's lock for writing scores."""
        try:
            opened = self._panel.tracker.open()
            with self._panel.tracker.judging_lock():
                yield opened.store
        except MlflowUnavailable:
            self._panel.tracker.locate_again()
            raise


def batch_service_of(app: FastAPI) -> BatchService:
    """Return the application's batch service."""
    batches: BatchService = app.state.batches
    return batches


def _sort_key(batch: Batch) -> SortKey:
    return SortKey(-int(batch.updated * 1000), batch.sheet)
