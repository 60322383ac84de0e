"""Batch service: open, save, undo, close, reopen, accept and send back batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from json import loads
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from fastapi import FastAPI

from tipbench.errors import NotEnoughData, TipbenchError
from tipbench.judge.check import unmet_name_requirement
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
    answer_shape,
    canonical_json,
    filled_file,
    item_of,
    parse_judgement,
    rubric_json,
    rubric_of,
)
from tipbench.web.batch_store import Batch, BatchStore, ItemVersion, Kind, State, Status, VersionConflict
from tipbench.web.errors import Conflict, Forbidden, Invalid, NotFound, WebError, convert_option_errors
from tipbench.web.forms import DEFAULT_LIMIT, SortKey, page_of
from tipbench.web.judge_service import ApplyOptions, accept_drift, apply_sheet, get_or_export_sheet, parse_sheet_request
from tipbench.web.queries import check_name, get_experiment
from tipbench.workflows.judging import duel_request, parse_drift_reason

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

DEFAULT_ANSWERS = 30  # in a new sheet; about 40 items with hidden controls and repeats
DEFAULT_DUELS = 40  # in a new sheet
_CLOSE_ATTEMPTS = 3  # closing is retried if another tab saves an item at the same time
_CACHED_SHEETS = 32


class RecordedStatus(NamedTuple):
    """Status of a batch's sheet in MLflow."""

    status: Status | None = None  # None if no scores have been applied yet
    accepted: str | None = None  # why its drift was accepted


def recorded_status(store: RunStore, batch: Batch) -> RecordedStatus:
    """Return the status of the batch's sheet in MLflow."""
    experiment = get_experiment(store, batch.experiment)
    find = find_duel if batch.kind is Kind.DUEL else find_sheet
    stored = find(store, experiment, batch.sheet)
    if stored is None or stored.status is SheetStatus.EXPORTED:
        return RecordedStatus()
    return RecordedStatus(Status(str(stored.status)), getattr(stored, "accepted", None))  # duels have no drift


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
        idempotency_key: str | None = None,
    ) -> BatchOpened:
        """Return the judge's open batch, or create one. Raises NotEnoughData if no cell is pending.

        Only creating a batch needs MLflow. A repeated request with the same idempotency key returns the same batch,
        even if it is closed.
        """
        if requirement := unmet_name_requirement(who.name):
            raise Forbidden(
                f"A judge has {requirement}; this token is named {who.name[:60]!r}. Judge with another token."
            )
        judge = replace(who, role=Role.JUDGE)  # admins judge blind too
        check_name(experiment)
        earlier = self._store.find_by_key(judge.name, idempotency_key) if idempotency_key is not None else None
        if earlier is not None:
            if (earlier.experiment, earlier.kind) != (experiment, kind):
                raise Conflict(
                    "This Idempotency-Key was used for another batch. Use a new one.",
                    code="key_used",
                    path="header.idempotency-key",
                )
            return BatchOpened(batch=self._shape(earlier, judge), new=False)
        existing = self._find_open(judge, experiment, kind)
        if existing is not None and self._sync(existing).status is not Status.OPEN:
            # The sync has closed this batch; the judge may have another open one.
            existing = self._find_open(judge, experiment, kind)
        if existing is not None:
            batch, new = existing, False
        else:
            batch, new = self._create(judge, experiment, kind, limit)
        if idempotency_key is not None:
            self._store.save_key(judge.name, idempotency_key, batch.sheet)
        return BatchOpened(batch=self._shape(batch, judge), new=new)

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
        # EVERYBODY is refused even to a judge of this name: earlier versions allowed tokens named `*`.
        if who.is_judge and (judge == EVERYBODY or judge not in (None, who.name)):
            raise Forbidden(f"A judge's token can list only its own batches ({who.name}).", path="query.judge")
        if judge == EVERYBODY:
            stored = self._store.find_all(experiment)
        else:
            stored = self._store.find_all(experiment, judge or who.name)
        batches = sorted(stored, key=_sort_key)
        page, next_cursor = page_of(batches, _sort_key, limit=limit, after=after)
        return BatchList(items=[self._shape(self._sync(batch), who) for batch in page], next=next_cursor)

    def detail(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchDetail:
        """Return a batch: all of it for its judge, only the status and the skipped items for an admin."""
        batch = self._sync(self._get_visible(who, sheet, experiment))
        shape = self._shape(batch, who)
        if batch.judge != who.name:
            return BatchDetail(batch=shape, skips=self.skips(sheet))
        batch_items, versions = self._batch_items(sheet), self._store.items(sheet)
        return BatchDetail(
            batch=shape,
            instructions=batch_items.raw["instructions"],
            rubric=rubric_json(rubric_of(batch_items.raw)),
            items=[
                ItemShape(
                    item=item["item"],
                    number=number,
                    answer=answer_shape(batch_items, item, versions.get(item["item"])),
                    **batch_items.item_json(item),
                )
                for number, item in enumerate(batch_items.raw["items"], start=1)
            ],
        )

    def get_own(self, who: Identity, sheet: str, experiment: str | None = None) -> Batch:
        """Return the caller's batch. Raises NotFound, or Forbidden if an admin requests another judge's batch."""
        batch = self._get_visible(who, sheet, experiment)
        if batch.judge != who.name:
            raise Forbidden(f"This batch belongs to {batch.judge}; only its judge can edit it.", path="path.sheet")
        return batch

    def skips(self, sheet: str) -> list[dict[str, Any]]:
        """Return the skipped items with their reasons, in the sheet's order, for admins."""
        versions = self._store.items(sheet)
        item_ids = [item["item"] for item in self._batch_items(sheet).raw["items"]]
        return [
            {"item": item_id, "number": number, "reason": saved.judgement.reason, "updated": iso(saved.updated)}
            for number, item_id in enumerate(item_ids, start=1)
            if (saved := versions.get(item_id)) and saved.judgement.state is State.SKIPPED
        ]

    def save(
        self, who: Identity, sheet: str, item: str, request: ItemRequest, experiment: str | None = None
    ) -> ItemSaved:
        """Save an item. Raises Conflict with the current version if the item has changed since it was read."""
        batch, batch_items = self.get_own(who, sheet, experiment), self._batch_items(sheet)
        judgement = parse_judgement(batch_items, item_of(batch_items, item), request)
        with self._conflict_errors(batch_items, item):
            saved = self._store.put(sheet, item, request.version, judgement, request.seconds)
        return self._item_saved(who, batch, saved)

    def undo(self, who: Identity, sheet: str, item: str, version: int, experiment: str | None = None) -> ItemSaved:
        """Restore the previous judgement. Raises Conflict like `save`, or if there is no previous one."""
        batch, batch_items = self.get_own(who, sheet, experiment), self._batch_items(sheet)
        blank = canonical_json(batch_items.blank_content(item_of(batch_items, item)))
        with self._conflict_errors(batch_items, item):
            saved = self._store.undo(sheet, item, version, blank)
        return self._item_saved(who, batch, saved)

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
        self.get_own(who, sheet, experiment)  # raises NotFound or Forbidden
        batch_items = self._batch_items(sheet)
        sheet_item = item_of(batch_items, item)
        versions = self._store.history(sheet, item)
        page, next_cursor = page_of(versions, lambda saved: SortKey(-saved.version, item), limit=limit, after=after)
        return HistoryShape(items=[answer_shape(batch_items, sheet_item, saved) for saved in page], next=next_cursor)

    def close(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchClosedShape:
        """Apply the scores of the submitted items, or hold them if the drift exceeds the limit.

        Idempotent, even if an earlier call was interrupted.
        """
        batch = self.get_own(who, sheet, experiment)
        if batch.status is Status.OPEN:
            with self._locked_mlflow() as store:
                batch = self._close(store, batch, final=True)
        return BatchClosedShape(batch=self._shape(batch, who), outcome=dict(batch.outcome or {}))

    def reopen(self, who: Identity, sheet: str, experiment: str | None = None) -> BatchAnswer:
        """Reopen the batch for revision. Applied scores count until the batch is closed again."""
        self.get_own(who, sheet, experiment)  # raises NotFound or Forbidden
        return BatchAnswer(batch=self._shape(self._store.reopen(sheet), who))

    def accept(self, admin: Identity, sheet: str, reason: str, experiment: str | None = None) -> BatchClosedShape:
        """Accept the drift of a held batch and save the reason. Raises Conflict if nothing is held.

        The batch's status may also be `applied`, if later scores for its sheet came from a file and are held.
        """
        with convert_option_errors("body"):
            why = parse_drift_reason(reason, key="reason")
        batch = self._sync(self._get_visible(admin, sheet, experiment))
        is_held_by_file = batch.status is Status.APPLIED and self._try_recorded_status(batch).status is Status.HELD
        already_accepted = batch.status is Status.APPLIED and batch.accepted == why and not is_held_by_file
        if not already_accepted:
            if not is_held_by_file:
                self._check_held(batch)
            with self._locked_mlflow() as store:
                result = accept_drift(store, batch.experiment, sheet, why, admin)
            changed = {name: result[name] for name in ("status", "applied", "held")}
            outcome = {**(batch.outcome or {}), **changed, "drift_accepted": why}
            batch = self._store.accept(sheet, why, outcome)
        return BatchClosedShape(batch=self._shape(batch, admin), outcome=dict(batch.outcome or {}))

    def send_back(self, admin: Identity, sheet: str, note: str, experiment: str | None = None) -> BatchAnswer:
        """Reopen a held batch for its judge, with a note. Raises Conflict if the batch is not held."""
        why = note.strip()
        if not why:
            raise Invalid("note must say what to revise.", path="body.note")
        batch = self._sync(self._get_visible(admin, sheet, experiment))
        already_sent_back = batch.status == Status.OPEN and batch.note == why
        if not already_sent_back:
            self._check_held(batch)
            batch = self._store.reopen(sheet, note=why)
        return BatchAnswer(batch=self._shape(batch, admin))

    def status_in_mlflow(self, sheet: str) -> Status | None:
        """Return the status that MLflow has for an open batch. None if the batch is not open, or was reopened.

        MLflow has a status if the sheet was applied from a file, or if a close was interrupted.
        """
        batch = self._store.get(sheet)
        if batch is None or batch.status is not Status.OPEN or batch.outcome is not None:
            return None
        return self._try_recorded_status(batch).status

    def minutes_per_item(self, experiment: str) -> dict[str, float]:
        """Return the median minutes per submitted item, by judge."""
        return {judge: median(seconds) / 60 for judge, seconds in sorted(self._store.seconds(experiment).items())}

    def _find_open(self, judge: Identity, experiment: str, kind: Kind) -> Batch | None:
        server = None  # finds a batch of any server
        with suppress(TipbenchError):  # a batch can be continued without MLflow
            server = self._panel.mlflow.open().identity
        return self._store.find_open(experiment, judge.name, kind, server)

    def _create(self, judge: Identity, experiment: str, kind: Kind, limit: int | None) -> tuple[Batch, bool]:
        """Create a batch from the judge's open sheet in MLflow, or from a new sheet.

        Returns the batch, and whether it is new: another tab may have created one meanwhile.
        """
        with self._locked_mlflow() as store:
            if existing := self._find_open(judge, experiment, kind):
                return existing, False
            if kind is Kind.SHEET:
                request = parse_sheet_request({"limit": limit or DEFAULT_ANSWERS}, judge, self._panel.permissions)
                raw = sheet_json(get_or_export_sheet(store, experiment, request).sheet)
            else:
                mlflow_experiment = get_experiment(store, experiment)
                open_sheets = (
                    duel_sheet
                    for duel_sheet in stored_duel_sheets(store, mlflow_experiment)
                    if duel_sheet.owner == judge.name and duel_sheet.status is SheetStatus.EXPORTED
                )
                stored = next(open_sheets, None)
                if stored is None:
                    duels = duel_request(store, mlflow_experiment, judge=judge.name, limit=limit or DEFAULT_DUELS)
                    stored = export_duels(store, mlflow_experiment, duels).stored
                raw = duel_json(stored.sheet)
            batch = Batch(
                sheet=raw["sheet"],
                server=self._panel.mlflow.open().identity,
                experiment=experiment,
                judge=judge.name,
                kind=kind,
                size=len(raw["items"]),
            )
            return self._store.add(batch, canonical_json(raw)), True

    def _close(self, store: RunStore, batch: Batch, *, final: bool) -> Batch:
        """Apply the submitted items and close the batch; with `final`, finish the sheet, which checks the drift."""
        for _ in range(_CLOSE_ATTEMPTS):
            batch = self._store.get(batch.sheet) or batch
            if batch.status is not Status.OPEN:
                return batch
            versions = self._store.items(batch.sheet)
            has_submitted = any(saved.judgement.state is State.SUBMITTED for saved in versions.values())
            # A sheet without any score cannot be finished. The error below then asks the judge to submit an item.
            is_final = final and (has_submitted or recorded_status(store, batch).status is not None)
            result = apply_sheet(
                store,
                batch.experiment,
                filled_file(self._batch_items(batch.sheet), batch.judge, versions),
                ApplyOptions(Identity(batch.judge, Role.JUDGE, token_id=""), judge=batch.judge, final=is_final),
            )
            if result["applied"] == 0 and result["held"] == 0:
                raise NotEnoughData("No item of this batch is submitted yet. Submit an item, then close the batch.")
            never_scored_in_panel = batch.outcome is None or batch.outcome.get("by_file")
            if never_scored_in_panel and not has_submitted:
                result["by_file"] = True  # all scores come from a file, none from the panel
            closed = self._store.close(batch, Status(result["status"]), result)
            if closed is not None:
                return closed
        raise Conflict("The batch is being changed in another tab. Wait until that is saved, then close again.")

    def _sync(self, batch: Batch) -> Batch:
        """Update a batch whose sheet was applied, or whose drift was accepted, outside the panel.

        An open batch with a draft, submitted or skipped item stays open. Nothing changes if MLflow is unavailable.
        """
        if batch.status is Status.HELD:
            recorded = self._try_recorded_status(batch)
            if recorded.status is not Status.APPLIED:
                return batch
            outcome = {**(batch.outcome or {}), "status": str(recorded.status), "drift_accepted": recorded.accepted}
            return self._store.accept(batch.sheet, recorded.accepted, outcome)
        if batch.status is not Status.OPEN:
            return batch
        versions = self._store.items(batch.sheet).values()
        has_judgements = any(saved.judgement.state is not State.EMPTY for saved in versions)
        if has_judgements or self.status_in_mlflow(batch.sheet) is None:
            return batch
        try:
            with self._locked_mlflow() as store:
                return self._close(store, batch, final=False)
        except (TipbenchError, WebError):
            return batch

    def _try_recorded_status(self, batch: Batch) -> RecordedStatus:
        try:
            return recorded_status(self._panel.mlflow.open().store, batch)
        except (TipbenchError, WebError):
            return RecordedStatus()

    def _get_visible(self, who: Identity, sheet: str, experiment: str | None) -> Batch:
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

    def _shape(self, batch: Batch, who: Identity) -> BatchShape:
        """Return the batch for a response. Only the batch's judge sees the outcome."""
        outcome = batch.outcome if batch.judge == who.name else None
        versions = self._store.items(batch.sheet).values()
        counts = Counter(saved.judgement.state for saved in versions)
        submitted = [saved for saved in versions if saved.judgement.state is State.SUBMITTED]
        submitted_seconds = [saved.seconds for saved in submitted if saved.seconds > 0]
        url = f"/api/bench/judge/{quote(batch.experiment, safe='')}/batches/{batch.sheet}"
        links = {  # a dictionary, because `self` cannot be a keyword argument
            "self": url,
            "items": f"{url}/items",
            "close": f"{url}/close",
            "reopen": f"{url}/reopen",
            "page": f"/judge/batches/{batch.sheet}",
        }
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
            seconds=round(sum(saved.seconds for saved in versions), 1),
            minutes_per_item=median(submitted_seconds) / 60 if submitted_seconds else None,
            note=batch.note,
            accepted=batch.accepted,
            outcome=None if outcome is None else dict(outcome),
            links=BatchLinks.model_validate(links),
        )

    def _item_saved(self, who: Identity, batch: Batch, saved: ItemVersion) -> ItemSaved:
        batch_items = self._batch_items(batch.sheet)
        answer = answer_shape(batch_items, item_of(batch_items, saved.item), saved)
        updated_batch = self._store.get(batch.sheet) or batch
        return ItemSaved(item=saved.item, answer=answer, batch=self._shape(updated_batch, who))

    def _read_items(self, sheet: str) -> BatchItems:
        batch = self._store.get(sheet)
        if batch is None:
            raise NotFound(f"There is no batch {sheet[:64]!r}.", path="path.sheet")
        return ITEM_TYPES[batch.kind](loads(self._store.content(sheet)))

    @contextmanager
    def _conflict_errors(self, batch_items: BatchItems, item: str) -> Iterator[None]:
        try:
            yield
        except VersionConflict as exc:
            answer = answer_shape(batch_items, item_of(batch_items, item), exc.current)
            raise Conflict(
                f"This item was changed elsewhere: it has version {answer.version} now. Nothing was overwritten; "
                "check it and save again.",
                path="body.version",
                detail={"item": item, "answer": answer.model_dump()},
            ) from exc

    @contextmanager
    def _locked_mlflow(self) -> Iterator[RunStore]:
        """Open MLflow, and hold this machine's lock for writing scores."""
        mlflow = self._panel.mlflow
        with mlflow.connected() as opened, mlflow.judging_lock():
            yield opened.store


def batch_service_of(app: FastAPI) -> BatchService:
    """Return the application's batch service."""
    batches: BatchService = app.state.batches
    return batches


def _sort_key(batch: Batch) -> SortKey:
    return SortKey(-int(batch.updated * 1000), batch.sheet)
