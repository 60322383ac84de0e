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
    AcceptWish,
    BatchAnswer,
    BatchClosedShape,
    BatchDetail,
    BatchList,
    BatchOpened,
    BatchWish,
    HistoryShape,
    ItemSaved,
    ItemWish,
    ReturnWish,
    UndoWish,
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
    str | None, Query(max_length=200, description="For admins: another judge's batches; * is everybody's.")
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
_OPEN = _body(BatchWish, {"kind": "sheet"}, required=False)
_PUT = _body(ItemWish, {"version": 0, "state": "submitted", "tips": [{"scores": _SCORES}], "seconds": 31.5})
_UNDO = _body(UndoWish, {"version": 3})
_ACCEPT = _body(AcceptWish, {"reason": "agreed in the team"})
_RETURN = _body(ReturnWish, {"note": "Please look at tone again."})


def batch_desk(request: Request) -> BatchService:
    """Returns the application's batch service."""
    return batch_service_of(request.app)


async def read_batch(request: Request, _judge: Judge) -> BatchWish:
    """Parses and validates the body of a request to open a batch."""
    return checked(BatchWish, await read_json(request), "body")


async def read_item(request: Request, _judge: Judge) -> ItemWish:
    """Parses and validates the body of a request to save an item."""
    return checked(ItemWish, await read_json(request), "body")


async def read_undo(request: Request, _judge: Judge) -> UndoWish:
    """Parses and validates the body of an undo request."""
    return checked(UndoWish, await read_json(request), "body")


async def read_accept(request: Request, _admin: Admin) -> AcceptWish:
    """Parses and validates the body of a request to accept a held batch."""
    return checked(AcceptWish, await read_json(request), "body")


async def read_return(request: Request, _admin: Admin) -> ReturnWish:
    """Parses and validates the body of a request to return a held batch."""
    return checked(ReturnWish, await read_json(request), "body")


Desk = Annotated[BatchService, Depends(batch_desk)]
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
    experiment: ExperimentPath, wish: Annotated[BatchWish, Depends(read_batch)], who: Judge, desk: Desk, key: Key = None
) -> Response:
    """Returns the judge's open batch (200) or creates one (201): a blind sheet under the token's name.

    Requests with the same Idempotency-Key return the same batch, even after it has been closed.
    """
    opened = desk.open(who, experiment, kind=wish.kind, limit=wish.limit, key=key)
    body = {"batch": desk.shown(opened.batch), "new": opened.new}
    return Json(body, 201 if opened.new else 200)


@router.get("/{experiment:path}/batches", summary="List batches", response_model=BatchList)
def batches(
    experiment: ExperimentPath,
    who: Judge,
    desk: Desk,
    judge: JudgeName = None,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Returns the caller's batches, most recently used first.

    Admins can list other judges' batches with `judge`; those include only counts and status.
    """
    items, following = desk.page(who, experiment, judge, limit=limit, after=next)
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
    desk: Desk,
    limit: Limit = LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> Response:
    """Returns the saved versions of an item, newest first. Only the batch's judge can read them."""
    items, following = desk.history(who, sheet, item, experiment, limit=limit, after=next)
    return Json({"items": items, "next": following})


@router.get("/{experiment:path}/batches/{sheet}", summary="Get a batch", response_model=BatchDetail)
def one(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """Returns the rubric and the items in order, with the scores saved so far. Does not require MLflow.

    For another judge's batch, admins get its status and skipped items instead.
    """
    return Json(desk.one(who, sheet, experiment))


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
    wish: Annotated[ItemWish, Depends(read_item)],
    who: Judge,
    desk: Desk,
) -> Response:
    """Saves an item; it is on disk when the response is sent.

    If the item's version has changed, nothing is saved and the response (409) contains the current item in `detail`.
    """
    try:
        return Json(desk.save(who, sheet, item, wish, experiment))
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
    wish: Annotated[UndoWish, Depends(read_undo)],
    who: Judge,
    desk: Desk,
) -> Response:
    """Restores the item's previous state as a new version; each further call goes back one more step."""
    try:
        return Json(desk.undo(who, sheet, item, wish.version, experiment))
    except Conflict as exc:
        return _conflict(exc)


@router.post(
    "/{experiment:path}/batches/{sheet}/close",
    summary="Close a batch",
    response_model=BatchClosedShape,
    dependencies=[LIMIT_CONCURRENCY],
)
def close(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """Applies the scores of the submitted items, or holds them if the judge exceeds the drift limit.

    Other items stay pending. Closing a closed batch returns the same result.
    """
    return Json(desk.close(who, sheet, experiment))


@router.post("/{experiment:path}/batches/{sheet}/reopen", summary="Reopen a batch", response_model=BatchAnswer)
def reopen(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """Reopens a closed batch so that its judge can revise it.

    Scores that already count keep counting until the batch is closed again.
    """
    return Json(desk.reopen(who, sheet, experiment))


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
    wish: Annotated[AcceptWish, Depends(read_accept)],
    who: Admin,
    desk: Desk,
) -> Response:
    """Accepts the scores of a held batch and stores the reason. Returns 409 if the batch is not held."""
    return Json(desk.accept(who, sheet, wish.reason, experiment))


@deciding.post(
    "/{experiment:path}/batches/{sheet}/return",
    summary="Return a held batch",
    response_model=BatchAnswer,
    openapi_extra=_RETURN,
)
def send_back(
    experiment: ExperimentPath,
    sheet: SheetPath,
    wish: Annotated[ReturnWish, Depends(read_return)],
    who: Admin,
    desk: Desk,
) -> Response:
    """Returns a held batch to its judge for revision, with a note. Returns 409 if the batch is not held."""
    return Json(desk.send_back(who, sheet, wish.note, experiment))


def _conflict(exc: Conflict) -> Response:
    """Returns the standard error response, with the current item in `detail`."""
    detail = {} if exc.detail is None else {"detail": exc.detail}
    return Json({**error_json(exc.code, str(exc), exc.path), **detail}, exc.status)
