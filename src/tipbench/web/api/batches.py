"""Judging batches: open a batch, save its items, close it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from tipbench.web.api.models import COMMON, DATA
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, JUDGES_TOO
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
from tipbench.web.batches import BatchService, Conflict, batch_service_of
from tipbench.web.deps import LIMIT_CONCURRENCY, Admin, Judge
from tipbench.web.errors import Json, checked, error_json
from tipbench.web.forms import JSON, LIMIT, Limit, Next, read_json
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


def _body(model: type[BaseModel], example: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    schema = model.model_json_schema()
    content = {JSON: {"schema": _inlined(schema, schema.pop("$defs", {})), "example": example}}
    return {"requestBody": {"required": required, "content": content}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """Inlines `$defs`: FastAPI does not collect the definitions of a body it does not parse itself."""
    if isinstance(schema, list):
        return [_inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    whole = {**parts.get(name, {}), **{key: value for key, value in schema.items() if key != "$ref"}}
    return {key: _inlined(value, parts) for key, value in whole.items()}


_SCORES = {"relevance": 4, "actionability": 5, "tone": 4}
_OPEN = _body(BatchRequest, {"kind": "sheet"}, required=False)
_PUT = _body(ItemRequest, {"version": 0, "state": "submitted", "tips": [{"scores": _SCORES}], "seconds": 31.5})
_UNDO = _body(UndoRequest, {"version": 3})
_ACCEPT = _body(AcceptRequest, {"reason": "agreed in the team"})
_RETURN = _body(ReturnRequest, {"note": "Please look at tone again."})


def batch_service(request: Request) -> BatchService:
    """Returns the application's batch service."""
    return batch_service_of(request.app)


async def read_batch(request: Request, _judge: Judge) -> BatchRequest:
    """Parses and validates the body of a request to open a batch."""
    return checked(BatchRequest, await read_json(request), "body")


async def read_item(request: Request, _judge: Judge) -> ItemRequest:
    """Parses and validates the body of a request to save an item."""
    return checked(ItemRequest, await read_json(request), "body")


async def read_undo(request: Request, _judge: Judge) -> UndoRequest:
    """Parses and validates the body of an undo request."""
    return checked(UndoRequest, await read_json(request), "body")


async def read_accept(request: Request, _admin: Admin) -> AcceptRequest:
    """Parses and validates the body of a request to accept a held batch."""
    return checked(AcceptRequest, await read_json(request), "body")


async def read_return(request: Request, _admin: Admin) -> ReturnRequest:
    """Parses and validates the body of a request to return a held batch."""
    return checked(ReturnRequest, await read_json(request), "body")


Batches = Annotated[BatchService, Depends(batch_service)]
_CREATED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The open batch, continued.", "model": BatchOpened},
    201: {"description": "A new batch."},
}


@router.post(
    "/{experiment:path}/batches",
    summary="Open a batch",
    status_code=201,
    response_model=BatchOpened,
    openapi_extra=_OPEN,
    responses=_CREATED,
    dependencies=[LIMIT_CONCURRENCY],
)
def open_batch(
    experiment: ExperimentPath,
    request: Annotated[BatchRequest, Depends(read_batch)],
    who: Judge,
    batches: Batches,
    key: Key = None,
) -> Response:
    """Returns the judge's open batch (200) or creates one (201): a blind sheet under the token's name.

    Requests with the same Idempotency-Key return the same batch, even after it has been closed.
    """
    opened = batches.open(who, experiment, kind=request.kind, limit=request.limit, key=key)
    body = {"batch": batches.shown(opened.batch), "new": opened.new}
    return Json(body, 201 if opened.new else 200)


@router.get("/{experiment:path}/batches", summary="List batches", response_model=BatchList)
def batches(
    experiment: ExperimentPath,
    who: Judge,
    batches: Batches,
    judge: JudgeName = None,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Returns the caller's batches, most recently used first.

    Admins can list other judges' batches with `judge`; those include only counts and status.
    """
    items, following = batches.page(who, experiment, judge, limit=limit, after=next)
    return Json({"items": items, "next": following})


@router.get(
    "/{experiment:path}/batches/{sheet}/items/{item}/history",
    summary="Get an item's history",
    response_model=HistoryShape,
)
def history(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    who: Judge,
    batches: Batches,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Returns the saved versions of an item, newest first. Only the batch's judge can read them."""
    items, following = batches.history(who, sheet, item, experiment, limit=limit, after=next)
    return Json({"items": items, "next": following})


@router.get("/{experiment:path}/batches/{sheet}", summary="Get a batch", response_model=BatchDetail)
def one(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> Response:
    """Returns the rubric and the items in order, with the scores saved so far. Does not require MLflow.

    For another judge's batch, admins get its status and skipped items instead.
    """
    return Json(batches.one(who, sheet, experiment))


@router.put(
    "/{experiment:path}/batches/{sheet}/items/{item}",
    summary="Save an item",
    response_model=ItemSaved,
    openapi_extra=_PUT,
)
def save(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    request: Annotated[ItemRequest, Depends(read_item)],
    who: Judge,
    batches: Batches,
) -> Response:
    """Saves an item; it is on disk when the response is sent.

    If the item's version has changed, nothing is saved and the response (409) contains the current item in `detail`.
    """
    try:
        return Json(batches.save(who, sheet, item, request, experiment))
    except Conflict as exc:
        return _conflict(exc)


@router.post(
    "/{experiment:path}/batches/{sheet}/items/{item}/undo",
    summary="Undo the last change",
    response_model=ItemSaved,
    openapi_extra=_UNDO,
)
def undo(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    request: Annotated[UndoRequest, Depends(read_undo)],
    who: Judge,
    batches: Batches,
) -> Response:
    """Restores the item's previous state as a new version; each further call goes back one more step."""
    try:
        return Json(batches.undo(who, sheet, item, request.version, experiment))
    except Conflict as exc:
        return _conflict(exc)


@router.post(
    "/{experiment:path}/batches/{sheet}/close",
    summary="Close a batch",
    response_model=BatchClosedShape,
    dependencies=[LIMIT_CONCURRENCY],
)
def close(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> Response:
    """Applies the scores of the submitted items, or holds them if the judge exceeds the drift limit.

    Other items stay pending. Closing a closed batch returns the same result.
    """
    return Json(batches.close(who, sheet, experiment))


@router.post("/{experiment:path}/batches/{sheet}/reopen", summary="Reopen a batch", response_model=BatchAnswer)
def reopen(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> Response:
    """Reopens a closed batch so that its judge can revise it.

    Scores that already count keep counting until the batch is closed again.
    """
    return Json(batches.reopen(who, sheet, experiment))


@deciding.post(
    "/{experiment:path}/batches/{sheet}/accept",
    summary="Accept a held batch",
    response_model=BatchClosedShape,
    openapi_extra=_ACCEPT,
    dependencies=[LIMIT_CONCURRENCY],
)
def accept(
    experiment: ExperimentPath,
    sheet: SheetPath,
    request: Annotated[AcceptRequest, Depends(read_accept)],
    who: Admin,
    batches: Batches,
) -> Response:
    """Accepts the scores of a held batch and stores the reason. Returns 409 if the batch is not held."""
    return Json(batches.accept(who, sheet, request.reason, experiment))


@deciding.post(
    "/{experiment:path}/batches/{sheet}/return",
    summary="Return a held batch",
    response_model=BatchAnswer,
    openapi_extra=_RETURN,
)
def send_back(
    experiment: ExperimentPath,
    sheet: SheetPath,
    request: Annotated[ReturnRequest, Depends(read_return)],
    who: Admin,
    batches: Batches,
) -> Response:
    """Returns a held batch to its judge for revision, with a note. Returns 409 if the batch is not held."""
    return Json(batches.send_back(who, sheet, request.note, experiment))


def _conflict(exc: Conflict) -> Response:
    """Returns the standard error response, with the current item in `detail`."""
    detail = {} if exc.detail is None else {"detail": exc.detail}
    return Json({**error_json(exc.code, str(exc), exc.path), **detail}, exc.status)
