"""Batch service: open, save, undo, close, reopen, accept and send back batches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from json import loads
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI

from tipbench.compare.cells import CellFilter, read_board
from tipbench.compare.leaderboard import BoardOptions, make_board
from tipbench.errors import MlflowUnavailable, NotEnoughData, TipbenchError
from tipbench.judge.check import name_problem
from tipbench.judge.duels import DuelRequest, StoredDuelSheet, duel_json, export_duels, find_duel, stored_duel_sheets
from tipbench.judge.sheet import sheet_json
from tipbench.judge.sheet_store import SheetStatus, find_sheet
from tipbench.plan.config import check_experiment_name
from tipbench.record.store import Experiment, RunStore
from tipbench.text import iso
from tipbench.web.auth import EVERYBODY, Identity, Role
from tipbench.web.batch_items import (
    ITEM_TYPES,
    BatchItems,
    ItemRequest,
    RawItem,
    answer_json,
    answer_of,
    canonical,
    filled_file,
    item_of,
    rubric_json,
    rubric_of,
)
from tipbench.web.batch_store import (
    MOST_STEPS,
    Batch,
    BatchClosed,
    BatchStore,
    ItemVersion,
    Kind,
    NothingToUndo,
    State,
    Status,
    VersionConflict,
)
from tipbench.web.errors import Forbidden, Invalid, NotFound, WebError
from tipbench.web.forms import LIMIT, MOST, SortKey, page_of
from tipbench.web.judge_service import (
    ApplyOptions,
    accept_drift,
    apply_sheet,
    judging_lock,
    parse_sheet_request,
    sheet_for,
)
from tipbench.web.options import RunPolicy
from tipbench.web.queries import get_experiment

if TYPE_CHECKING:
    from tipbench.web.deps import Panel

ANSWERS = 30  # per new sheet; about 40 items including hidden controls and repeats
DUELS = 40


@dataclass(frozen=True)
class JudgeWork:
    """A judge's sheet or duel sheet, public part only."""

    sheet: str
    raw: Mapping[str, Any]


def find_or_export_sheet(
    store: RunStore, name: str, judge: Identity, allowed: RunPolicy, kind: Kind, limit: int | None
) -> JudgeWork:
    """Return the judge's open sheet in MLflow, or export a new one. Raises NotEnoughData if nothing is pending."""
    if kind is Kind.DUEL:
        duels = _duels(store, get_experiment(store, name), judge.name, limit or DUELS)
        return JudgeWork(duels.sheet.id, duel_json(duels.sheet))
    judging = sheet_for(store, name, parse_sheet_request({"limit": limit or ANSWERS}, judge, allowed))
    return JudgeWork(judging.sheet.id, sheet_json(judging.sheet))


def recorded_status(store: RunStore, batch: Batch) -> tuple[Status | None, str | None]:
    """Return the sheet's status in MLflow and the reason its drift was accepted; None if nothing was applied yet."""
    experiment = get_experiment(store, batch.experiment)
    find = find_duel if batch.kind is Kind.DUEL else find_sheet
    found = find(store, experiment.experiment_id, experiment.name, batch.sheet)
    if found is None or found.status is SheetStatus.EXPORTED:
        return None, None
    return Status(str(found.status)), getattr(found, "accepted", None)


def _duels(store: RunStore, experiment: Experiment, judge: str, limit: int) -> StoredDuelSheet:
    """Export duels like `judge duel`, but without its error messages, which name the leader."""
    existing = stored_duel_sheets(store, experiment.experiment_id, experiment.name)
    open_ = next((each for each in existing if each.owner == judge and each.status is SheetStatus.EXPORTED), None)
    if open_ is not None:
        return open_
    cells = read_board(store, experiment.experiment_id, CellFilter())
    ranking = None if cells.provisional else make_board(experiment.name, cells, BoardOptions()).ranking
    if ranking is None or ranking.leader is None or not ranking.tied:
        raise NotEnoughData(
            f"There are no duels in {experiment.name[:200]}: no pairs are tied. Judge a batch of tips instead."
        )
    pairs = {ranking.leader, *ranking.tied}
    runs = {
        cell.run.run_id: (cell.pair.model, cell.pair.prompt)
        for cell in cells.cells
        if cell.pair in pairs and not cell.failed
    }
    request = DuelRequest(runs, cells.rubric, judge, limit)
    return export_duels(store, experiment, request).stored


def batch_json(batch: Batch, given: Mapping[str, ItemVersion]) -> dict[str, Any]:
    """Return the status of a batch as JSON values."""
    count = Counter(saved.answer.state for saved in given.values())
    touched = count[State.SUBMITTED] + count[State.DRAFT] + count[State.SKIPPED]
    times = [saved.seconds for saved in given.values() if saved.answer.state is State.SUBMITTED and saved.seconds > 0]
    return {
        "sheet": batch.sheet,
        "experiment": batch.experiment,
        "judge": batch.judge,
        "kind": str(batch.kind),
        "status": str(batch.status),
        "items": batch.size,
        "done": count[State.SUBMITTED],
        "draft": count[State.DRAFT],
        "skipped": count[State.SKIPPED],
        "empty": batch.size - touched,
        "opened": iso(batch.opened),
        "updated": iso(batch.updated),
        "closed": iso(batch.closed),
        "seconds": round(sum(saved.seconds for saved in given.values()), 1),
        "minutes_per_item": median(times) / 60 if times else None,
        "note": batch.note,
        "accepted": batch.accepted,
        "outcome": batch.outcome,
        "links": _links(batch),
    }


def batch_detail_json(sheet_items: BatchItems, given: Mapping[str, ItemVersion]) -> dict[str, Any]:
    """Return instructions, rubric and items with their current answers."""
    items = [
        {
            "item": item["item"],
            "number": number,
            **sheet_items.shown(item),
            "answer": item_answer(sheet_items, item, given.get(item["item"])),
        }
        for number, item in enumerate(sheet_items.raw["items"], start=1)
    ]
    return {
        "instructions": sheet_items.raw["instructions"],
        "rubric": rubric_json(rubric_of(sheet_items.raw)),
        "items": items,
    }


def item_answer(sheet_items: BatchItems, item: RawItem, saved: ItemVersion | None) -> dict[str, Any]:
    """Return the current answer to an item as JSON values."""
    return answer_json(sheet_items, item, saved, {"updated": iso(saved.updated if saved else None)})


def skips_json(sheet_items: BatchItems, given: Mapping[str, ItemVersion]) -> list[dict[str, Any]]:
    """Return the skipped items with their reasons, in the sheet's order."""
    numbers = {item["item"]: number for number, item in enumerate(sheet_items.raw["items"], start=1)}
    return [
        {"item": item, "number": number, "reason": given[item].answer.reason, "updated": iso(given[item].updated)}
        for item, number in numbers.items()
        if item in given and given[item].answer.state is State.SKIPPED
    ]


def medians(spent: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Return the median minutes per item by judge, from (judge, sheet, seconds)."""
    times: dict[str, list[float]] = defaultdict(list)
    for judge, _sheet, seconds in spent:
        times[judge].append(seconds)
    return {judge: median(found) / 60 for judge, found in sorted(times.items())}


def _links(batch: Batch) -> dict[str, str]:
    own = f"/api/bench/judge/{quote(batch.experiment, safe='')}/batches/{batch.sheet}"
    return {
        "self": own,
        "items": f"{own}/items",
        "close": f"{own}/close",
        "reopen": f"{own}/reopen",
        "page": f"/judge/batches/{batch.sheet}",
    }


_CLOSES = 3  # attempts, if another tab saves at the same time
_ITEMS_CACHED = 32


class Conflict(WebError):
    """409: conflicts with the current state. `detail` has the current item, if the conflict is about one."""

    status, code = 409, "conflict"

    def __init__(
        self, message: str, *, code: str | None = None, path: str | None = None, detail: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code=code, path=path)
        self.detail = detail


@dataclass(frozen=True)
class Opened:
    """A judge's open batch; `new` if it was just created."""

    batch: Batch
    new: bool


class BatchService:
    """Batch operations for the API and the pages. Thread-safe."""

    def __init__(self, panel: Panel, store: BatchStore) -> None:
        self._panel = panel
        self._store = store
        self._sheet_items = lru_cache(maxsize=_ITEMS_CACHED)(self._read_items)

    def open(
        self,
        who: Identity,
        experiment: str,
        *,
        kind: Kind = Kind.SHEET,
        limit: int | None = None,
        key: str | None = None,
    ) -> Opened:
        """Return the judge's open batch, without MLflow, or a new one. Raises NotEnoughData if nothing is pending."""
        judge = _blind(who)
        _check_name(experiment)
        if key is not None and (known := self._of_key(judge.name, key, experiment, kind)):
            return Opened(known, new=False)
        opened = self._open_batch(judge, experiment, kind) or self._create(judge, experiment, kind, limit)
        if key is not None:
            self._store.remember(judge.name, key, opened.batch.sheet)
        return opened

    def listed(self, who: Identity, experiment: str, judge: str | None = None) -> list[dict[str, Any]]:
        """Return the first page of batches, at the maximum page size."""
        return self.page(who, experiment, judge, limit=MOST)[0]

    def page(
        self, who: Identity, experiment: str, judge: str | None = None, *, limit: int = LIMIT, after: str | None = None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Return a page of the caller's batches, most recently updated first, and the cursor of the next page.

        Admins may request another judge's batches, or EVERYBODY's; those have counts and status only.
        """
        _check_name(experiment)
        if who.is_judge and (judge == EVERYBODY or judge not in (None, who.name)):
            raise Forbidden(f"A judge's token can list only its own batches ({who.name}).", path="query.judge")
        found = sorted(self._store.listed(experiment, None if judge == EVERYBODY else judge or who.name), key=_place)
        shown, following = page_of(found, _place, limit=limit, after=after)
        return [self._shown_to(self._sync(batch), who) for batch in shown], following

    def one(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Return the full batch to its judge; an admin gets status and skipped items of another judge's batch."""
        batch = self._sync(self._known(who, sheet, experiment))
        if batch.judge != who.name:
            return {"batch": self._shown_to(batch, who), "skips": self.skips(sheet)}
        return {
            "batch": self._shown_to(batch, who),
            **batch_detail_json(self._sheet_items(sheet), self._store.items(sheet)),
        }

    def own(self, who: Identity, sheet: str, experiment: str | None = None) -> Batch:
        """Return the batch to its judge. Raises NotFound for other judges, Forbidden for admins."""
        batch = self._known(who, sheet, experiment)
        if batch.judge != who.name:
            raise Forbidden(f"This batch belongs to {batch.judge}; only its judge can edit it.", path="path.sheet")
        return batch

    def shown(self, batch: Batch) -> dict[str, Any]:
        """Return the status of a batch as its judge sees it."""
        return batch_json(batch, self._store.items(batch.sheet))

    def skips(self, sheet: str) -> list[dict[str, Any]]:
        """Return the skipped items with their reasons, for admins."""
        return skips_json(self._sheet_items(sheet), self._store.items(sheet))

    def save(
        self, who: Identity, sheet: str, item: str, wish: ItemRequest, experiment: str | None = None
    ) -> dict[str, Any]:
        """Save an item. Raises Conflict with the current version if the item has changed since it was read."""
        batch, sheet_items = self.own(who, sheet, experiment), self._sheet_items(sheet)
        answer = answer_of(sheet_items, item_of(sheet_items, item), wish)
        with self._conflict_errors(sheet_items, item):
            return self._saved_json(batch, self._store.put(sheet, item, wish.version, answer, wish.seconds))

    def undo(self, who: Identity, sheet: str, item: str, version: int, experiment: str | None = None) -> dict[str, Any]:
        """Restore the previous answer. Raises Conflict like `save`, or if there is none."""
        batch, sheet_items = self.own(who, sheet, experiment), self._sheet_items(sheet)
        blank = canonical(sheet_items.blank(item_of(sheet_items, item)))
        with self._conflict_errors(sheet_items, item):
            return self._saved_json(batch, self._store.undo(sheet, item, version, blank))

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
        """Return a page of the answers to an item, newest first, and the cursor of the next page."""
        self.own(who, sheet, experiment)
        sheet_items = self._sheet_items(sheet)
        raw = item_of(sheet_items, item)
        steps = self._store.history(sheet, item, MOST_STEPS)
        shown, following = page_of(steps, lambda saved: SortKey(-saved.version, saved.item), limit=limit, after=after)
        return [item_answer(sheet_items, raw, saved) for saved in shown], following

    def close(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Apply the submitted items, or hold them if the drift is too large. Idempotent, also after a crash."""
        batch = self.own(who, sheet, experiment)
        if batch.status is Status.OPEN:
            with self._mlflow() as store:
                batch = self._close(store, batch, final=True)
        return {"batch": self._shown_to(batch, who), "outcome": batch.outcome}

    def reopen(self, who: Identity, sheet: str, experiment: str | None = None) -> dict[str, Any]:
        """Reopen the batch for revision; applied scores keep counting until it is closed again."""
        batch = self.own(who, sheet, experiment)
        return {"batch": self._shown_to(self._store.reopen(sheet) or batch, who)}

    def accept(self, admin: Identity, sheet: str, reason: str, experiment: str | None = None) -> dict[str, Any]:
        """Accept the drift of a held batch and save the reason. Raises Conflict if the batch is not held."""
        why = reason.strip()
        if not (why and why.isprintable()):
            raise Invalid("reason must be one line of text.", path="body.reason")
        batch = self._sync(self._known(admin, sheet, experiment))
        if (batch.status, batch.accepted) != (Status.APPLIED, why):
            self._need_held(batch)
            with self._mlflow() as store:
                result = accept_drift(store, batch.experiment, sheet, why, admin)
            counted = {
                "status": result["status"],
                "applied": result["applied"],
                "held": result["held"],
                "drift_accepted": why,
            }
            batch = self._store.accept(sheet, why, {**(batch.outcome or {}), **counted}) or batch
        return {"batch": self._shown_to(batch, admin), "outcome": batch.outcome}

    def send_back(self, admin: Identity, sheet: str, note: str, experiment: str | None = None) -> dict[str, Any]:
        """Reopen a held batch for its judge, with a note. Raises Conflict if the batch is not held."""
        why = note.strip()
        if not why:
            raise Invalid("note must say what to revise.", path="body.note")
        batch = self._sync(self._known(admin, sheet, experiment))
        if (batch.status, batch.note) != (Status.OPEN, why):
            self._need_held(batch)
            batch = self._store.reopen(sheet, note=why) or batch
        return {"batch": self._shown_to(batch, admin)}

    def recorded_already(self, sheet: str) -> Status | None:
        """Return the status in MLflow of a batch never closed here; None if nothing was applied yet."""
        batch = self._store.get(sheet)
        if batch is None or batch.status is not Status.OPEN or batch.outcome is not None:
            return None
        return self._recorded(batch)[0]

    def minutes_per_item(self, experiment: str) -> dict[str, float]:
        """Return the median minutes per submitted item, by judge."""
        return medians(self._store.seconds(experiment))

    def _of_key(self, judge: str, key: str, experiment: str, kind: Kind) -> Batch | None:
        known = self._store.of_key(judge, key)
        if known is not None and (known.experiment, known.kind) != (experiment, kind):
            raise Conflict(
                "This Idempotency-Key was used for another batch. Use a new one.",
                code="key_used",
                path="header.idempotency-key",
            )
        return known

    def _open_batch(self, judge: Identity, experiment: str, kind: Kind) -> Opened | None:
        found = self._open_of(judge, experiment, kind)
        if found is not None and self._sync(found).status is not Status.OPEN:
            found = self._open_of(judge, experiment, kind)
        return Opened(found, new=False) if found is not None else None

    def _open_of(self, judge: Identity, experiment: str, kind: Kind) -> Batch | None:
        place = None
        with suppress(TipbenchError):  # drafts work without MLflow
            place = self._panel.tracker.open().identity
        return self._store.open_of(experiment, judge.name, kind, place)

    def _create(self, judge: Identity, experiment: str, kind: Kind, limit: int | None) -> Opened:
        with self._mlflow() as store:
            if existing := self._open_of(judge, experiment, kind):  # opened by another tab while waiting for the lock
                return Opened(existing, new=False)
            work = find_or_export_sheet(store, experiment, judge, self._panel.allowed, kind, limit)
            place, size = self._panel.tracker.open().identity, len(work.raw["items"])
            batch = Batch(work.sheet, place, experiment, judge.name, kind, size)
            return Opened(self._store.add(batch, canonical(work.raw)), new=True)

    def _close(self, store: RunStore, batch: Batch, *, final: bool) -> Batch:
        """Apply the submitted answers; if `final`, also finish the sheet, which checks the drift."""
        for _ in range(_CLOSES):
            batch = self._store.get(batch.sheet) or batch
            if batch.status is not Status.OPEN:
                return batch
            given = self._store.items(batch.sheet)
            submitted = any(saved.answer.state is State.SUBMITTED for saved in given.values())
            final = final and (submitted or recorded_status(store, batch)[0] is not None)
            result = apply_sheet(
                store,
                batch.experiment,
                filled_file(self._sheet_items(batch.sheet), batch.judge, given),
                ApplyOptions(Identity(batch.judge, Role.JUDGE, ""), batch.judge, final=final),
            )
            if not result["applied"] + result["held"]:
                raise NotEnoughData("No item of this batch is submitted yet. Submit an item, then close the batch.")
            by_file = {"by_file": True} if _is_by_file(batch, given) else {}
            done = self._store.close(batch, Status(result["status"]), {**result, **by_file})
            if done is not None:
                return done
        raise Conflict("The batch is being changed in another tab. Wait until that is saved, then close again.")

    def _sync(self, batch: Batch) -> Batch:
        """Update the batch from MLflow, if available: its drift may be accepted, or its file applied, elsewhere."""
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
        """Close a batch without answers if its file was applied elsewhere; one with answers stays open."""
        answer = any(saved.answer.state is not State.EMPTY for saved in self._store.items(batch.sheet).values())
        if answer or self.recorded_already(batch.sheet) is None:
            return batch
        try:
            with self._mlflow() as store:
                return self._close(store, batch, final=False)
        except (TipbenchError, WebError):
            return batch

    def _recorded(self, batch: Batch) -> tuple[Status | None, str | None]:
        """Like `recorded_status`, but (None, None) if MLflow is unavailable."""
        try:
            return recorded_status(self._panel.tracker.open().store, batch)
        except (TipbenchError, WebError):
            return None, None

    def _known(self, who: Identity, sheet: str, experiment: str | None) -> Batch:
        batch = self._store.get(sheet)
        wrong = batch is None or (experiment is not None and batch.experiment != experiment)
        if batch is None or wrong or (who.is_judge and batch.judge != who.name):
            raise NotFound(f"You have no batch {sheet[:64]!r}.", path="path.sheet")
        return batch

    def _need_held(self, batch: Batch) -> None:
        if batch.status is not Status.HELD:
            raise Conflict(
                f"Batch {batch.sheet} is {batch.status}; only a held one is accepted or sent back.",
                code="not_held",
                path="path.sheet",
            )

    def _shown_to(self, batch: Batch, who: Identity) -> dict[str, Any]:
        shown = batch if batch.judge == who.name else replace(batch, outcome=None)
        return self.shown(shown)

    def _saved_json(self, batch: Batch, saved: ItemVersion) -> dict[str, Any]:
        sheet_items, now = self._sheet_items(batch.sheet), self._store.get(batch.sheet) or batch
        answer = item_answer(sheet_items, item_of(sheet_items, saved.item), saved)
        return {"item": saved.item, "answer": answer, "batch": self.shown(now)}

    def _read_items(self, sheet: str) -> BatchItems:
        batch = self._store.get(sheet)
        if batch is None:
            raise NotFound(f"There is no batch {sheet[:64]!r}.", path="path.sheet")
        return ITEM_TYPES[batch.kind](loads(self._store.content(sheet)))

    @contextmanager
    def _conflict_errors(self, sheet_items: BatchItems, item: str) -> Iterator[None]:
        try:
            yield
        except VersionConflict as exc:
            answer = item_answer(sheet_items, item_of(sheet_items, item), exc.present)
            raise Conflict(
                f"This item was changed elsewhere: it has version {answer['version']} now. Nothing was overwritten; "
                "check it and save again.",
                path="body.version",
                detail={"item": item, "answer": answer},
            ) from exc
        except BatchClosed as exc:
            message = "This batch is closed. Reopen it to make changes."
            raise Conflict(message, code="batch_closed", path="path.sheet") from exc
        except NothingToUndo as exc:
            raise Conflict("There is no earlier version to restore.", code="nothing_to_undo", path="path.item") from exc

    @contextmanager
    def _mlflow(self) -> Iterator[RunStore]:
        """Open MLflow, holding this machine's lock for writing scores there."""
        try:
            opened = self._panel.tracker.open()
            with judging_lock(self._panel.settings.home, opened.place):
                yield opened.store
        except MlflowUnavailable:
            self._panel.tracker.doubt()
            raise


def batch_service_of(app: FastAPI) -> BatchService:
    """Return the application's batch service."""
    batches: BatchService = app.state.batches
    return batches


def _is_by_file(batch: Batch, given: Mapping[str, ItemVersion]) -> bool:
    """Whether all scores came from a file and none from this batch."""
    before = batch.outcome is None or bool(batch.outcome.get("by_file"))
    return before and not any(saved.answer.state is State.SUBMITTED for saved in given.values())


def _place(batch: Batch) -> SortKey:
    return SortKey(-int(batch.updated * 1000), batch.sheet)


def _blind(who: Identity) -> Identity:
    """Return the identity with the role judge: admins judge blind as well. Raises Forbidden for a reserved name."""
    if fault := name_problem(who.name):
        raise Forbidden(f"A judge has {fault}; this token is named {who.name[:60]!r}. Judge with another token.")
    return replace(who, role=Role.JUDGE)


def _check_name(experiment: str) -> None:
    try:
        check_experiment_name(experiment)
    except ValueError as exc:
        raise Invalid(str(exc), path="path.experiment") from exc
