"""Judging batches: open a batch, save its items, close it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from tipbench.web.api.models import COMMON, DATA
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, JUDGES_TOO, require_admin, require_judge
from tipbench.web.batch_items import (
    AcceptRequest,
    BatchAnswer,
    BatchClosedShape,
    BatchDetail,
    BatchList,
    BatchOpened,
    BatchRequest,
    HistoryShape,
    ItemRequest,
    ItemSaved,
    ReturnRequest,
    UndoRequest,
)
from tipbench.web.batches import BatchService, batch_service_of
from tipbench.web.deps import LIMIT_CONCURRENCY, Admin, Judge
from tipbench.web.forms import LIMIT, Limit, Next, body_of, body_schema
from tipbench.web.job_service import Key

_ALL = {**COMMON, **DATA}
router = APIRouter(prefix="/api/bench/judge", tags=["judge"], dependencies=[JUDGES_TOO], responses=_ALL)
deciding = APIRouter(prefix="/api/bench/judge", tags=["judge"], dependencies=[ADMINS_ONLY], responses=_ALL)

_ID = "^[0-9a-f]{1,64}$"
SheetPath = Annotated[str, Path(pattern=_ID, description="The batch's sheet.", examples=["3f9a1c0b7e52"])]
ItemPath = Annotated[str, Path(pattern=_ID, description="The item's id.", examples=["9c1d5d6e8f0a"])]
JudgeName = Annotated[
    str | None, Query(max_length=200, description="For admins: another judge's batches; * for all judges.")
]


_SCORES = {"relevance": 4, "actionability": 5, "tone": 4}
_OPEN = body_schema(BatchRequest, {"kind": "sheet"}, required=False)
_PUT = body_schema(ItemRequest, {"version": 0, "state": "submitted", "tips": [{"scores": _SCORES}], "seconds": 31.5})
_UNDO = body_schema(UndoRequest, {"version": 3})
_ACCEPT = body_schema(AcceptRequest, {"reason": "agreed in the team"})
_RETURN = body_schema(ReturnRequest, {"note": "Please look at tone again."})


def batch_service(request: Request) -> BatchService:
    """Return the application's batch service."""
    return batch_service_of(request.app)


Batches = Annotated[BatchService, Depends(batch_service)]
_CREATED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The open batch, continued.", "model": BatchOpened},
    201: {"description": "A new batch."},
}


@router.post(
    "/{experiment:path}/batches",
    summary="Open a batch",
    status_code=201,
    openapi_extra=_OPEN,
    responses=_CREATED,
    dependencies=[LIMIT_CONCURRENCY],
)
def open_batch(
    experiment: ExperimentPath,
    request: Annotated[BatchRequest, body_of(BatchRequest, require_judge)],
    who: Judge,
    batches: Batches,
    response: Response,
    key: Key = None,
) -> BatchOpened:
    """Return the judge's open batch (200) or creates one (201): a blind sheet under the token's name.

    Requests with the same Idempotency-Key return the same batch, even after it has been closed.
    """
    opened = batches.open(who, experiment, kind=request.kind, limit=request.limit, key=key)
    response.status_code = 201 if opened.new else 200
    return opened


@router.get("/{experiment:path}/batches", summary="List batches")
def batches(
    experiment: ExperimentPath,
    who: Judge,
    batches: Batches,
    judge: JudgeName = None,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> BatchList:
    """Return the caller's batches, most recently used first.

    Admins can list other judges' batches with `judge`; those include only counts and status.
    """
    return batches.page(who, experiment, judge, limit=limit, after=next)


@router.get("/{experiment:path}/batches/{sheet}/items/{item}/history", summary="Get an item's history")
def history(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    who: Judge,
    batches: Batches,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> HistoryShape:
    """Return the saved versions of an item, newest first. Only the batch's judge can read them."""
    return batches.history(who, sheet, item, experiment, limit=limit, after=next)


@router.get("/{experiment:path}/batches/{sheet}", summary="Get a batch", response_model_exclude_unset=True)
def one(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchDetail:
    """Return the rubric and the items in order, with the scores saved so far. Does not require MLflow.

    For another judge's batch, admins get its status and skipped items instead.
    """
    return batches.detail(who, sheet, experiment)


@router.put("/{experiment:path}/batches/{sheet}/items/{item}", summary="Save an item", openapi_extra=_PUT)
def save(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    request: Annotated[ItemRequest, body_of(ItemRequest, require_judge)],
    who: Judge,
    batches: Batches,
) -> ItemSaved:
    """Save an item; it is on disk when the response is sent.

    If the item's version has changed, nothing is saved and the response (409) contains the current item in `detail`.
    """
    return batches.save(who, sheet, item, request, experiment)


@router.post(
    "/{experiment:path}/batches/{sheet}/items/{item}/undo", summary="Undo the last change", openapi_extra=_UNDO
)
def undo(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    request: Annotated[UndoRequest, body_of(UndoRequest, require_judge)],
    who: Judge,
    batches: Batches,
) -> ItemSaved:
    """Restore the item's previous state as a new version; each further call goes back one more step."""
    return batches.undo(who, sheet, item, request.version, experiment)


@router.post("/{experiment:path}/batches/{sheet}/close", summary="Close a batch", dependencies=[LIMIT_CONCURRENCY])
def close(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchClosedShape:
    """Apply the scores of the submitted items, or holds them if the judge exceeds the drift limit.

    Other items stay pending. Closing a closed batch returns the same result.
    """
    return batches.close(who, sheet, experiment)


@router.post("/{experiment:path}/batches/{sheet}/reopen", summary="Reopen a batch")
def reopen(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchAnswer:
    """Reopen a closed batch so that its judge can revise it.

    Scores that already count keep counting until the batch is closed again.
    """
    return batches.reopen(who, sheet, experiment)


@deciding.post(
    "/{experiment:path}/batches/{sheet}/accept",
    summary="Accept a held batch",
    openapi_extra=_ACCEPT,
    dependencies=[LIMIT_CONCURRENCY],
)
def accept(
    experiment: ExperimentPath,
    sheet: SheetPath,
    request: Annotated[AcceptRequest, body_of(AcceptRequest, require_admin)],
    who: Admin,
    batches: Batches,
) -> BatchClosedShape:
    """Accept the scores of a held batch and store the reason. Returns 409 if the batch is not held."""
    return batches.accept(who, sheet, request.reason, experiment)


@deciding.post("/{experiment:path}/batches/{sheet}/return", summary="Return a held batch", openapi_extra=_RETURN)
def send_back(
    experiment: ExperimentPath,
    sheet: SheetPath,
    request: Annotated[ReturnRequest, body_of(ReturnRequest, require_admin)],
    who: Admin,
    batches: Batches,
) -> BatchAnswer:
    """Return a held batch to its judge for revision, with a note. Returns 409 if the batch is not held."""
    return batches.send_back(who, sheet, request.note, experiment)
