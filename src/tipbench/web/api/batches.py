"""Judging in the browser over HTTP: open a batch, say something of its items, close it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, JUDGES_TOO
from tipbench.web.batch_shapes import (
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
from tipbench.web.batches import BatchDesk, Conflict, desk_of
from tipbench.web.deps import Admin, Judge
from tipbench.web.errors import checked, error_json
from tipbench.web.forms import JSON, read_json
from tipbench.web.paging import LIMIT, Limit, Next
from tipbench.web.rendering import Json
from tipbench.web.running import Key
from tipbench.web.shapes import COMMON, DATA
from tipbench.web.turns import IN_TURN

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
    """The schema with its parts in their places: a document has no other place for those of a hand-read body."""
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


def batch_desk(request: Request) -> BatchDesk:
    """Where batches are kept."""
    return desk_of(request.app)


async def read_batch(request: Request, _judge: Judge) -> BatchWish:
    """What is to be judged."""
    return checked(BatchWish, await read_json(request), "body")


async def read_item(request: Request, _judge: Judge) -> ItemWish:
    """What is said of an item."""
    return checked(ItemWish, await read_json(request), "body")


async def read_undo(request: Request, _judge: Judge) -> UndoWish:
    """The version that was seen."""
    return checked(UndoWish, await read_json(request), "body")


async def read_accept(request: Request, _admin: Admin) -> AcceptWish:
    """Why the scores count."""
    return checked(AcceptWish, await read_json(request), "body")


async def read_return(request: Request, _admin: Admin) -> ReturnWish:
    """What to look at again."""
    return checked(ReturnWish, await read_json(request), "body")


Desk = Annotated[BatchDesk, Depends(batch_desk)]
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
    dependencies=[IN_TURN],
)
def open_batch(
    experiment: ExperimentPath, wish: Annotated[BatchWish, Depends(read_batch)], who: Judge, desk: Desk, key: Key = None
) -> Response:
    """The judge's open batch (200), or a new one (201): a blind sheet under the token's name.

    The same Idempotency-Key gives the same batch, also once that is closed.
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
    """One's own, those last worked on first; for an admin also another's, with counts and status alone."""
    items, following = desk.page(who, experiment, judge, limit=limit, after=next)
    return Json({"items": items, "next": following})


@router.get(
    "/{experiment:path}/batches/{sheet}/items/{item}/history",
    summary="The steps of an item",
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
    """What its judge has said of it, newest first."""
    items, following = desk.history(who, sheet, item, experiment, limit=limit, after=next)
    return Json({"items": items, "next": following})


@router.get("/{experiment:path}/batches/{sheet}", summary="One batch", response_model=BatchDetail)
def one(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """Rubric and items in order, with what the judge has said so far. It needs no MLflow."""
    return Json(desk.one(who, sheet, experiment))


@router.put(
    "/{experiment:path}/batches/{sheet}/items/{item}",
    summary="Say something of an item",
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
    """On disk when it answers. If the item has another version by now, nothing is stored and `detail` has it (409)."""
    try:
        return Json(desk.save(who, sheet, item, wish, experiment))
    except Conflict as exc:
        return _conflict(exc)


@router.post(
    "/{experiment:path}/batches/{sheet}/items/{item}/undo",
    summary="Go back one step",
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
    """What was said before is said again, as a new version; once more, one step further back."""
    try:
        return Json(desk.undo(who, sheet, item, wish.version, experiment))
    except Conflict as exc:
        return _conflict(exc)


@router.post(
    "/{experiment:path}/batches/{sheet}/close",
    summary="Close a batch",
    response_model=BatchClosedShape,
    dependencies=[IN_TURN],
)
def close(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """Counts the submitted items, or holds them when they are beyond the drift limit; the others stay pending.

    Closing again answers the same.
    """
    return Json(desk.close(who, sheet, experiment))


@router.post("/{experiment:path}/batches/{sheet}/reopen", summary="Reopen a batch", response_model=BatchAnswer)
def reopen(experiment: ExperimentPath, sheet: SheetPath, who: Judge, desk: Desk) -> Response:
    """To revise it; then it is closed again."""
    return Json(desk.reopen(who, sheet, experiment))


@deciding.post(
    "/{experiment:path}/batches/{sheet}/accept",
    summary="Accept a held batch",
    response_model=BatchClosedShape,
    openapi_extra=_ACCEPT,
    dependencies=[IN_TURN],
)
def accept(
    experiment: ExperimentPath,
    sheet: SheetPath,
    wish: Annotated[AcceptWish, Depends(read_accept)],
    who: Admin,
    desk: Desk,
) -> Response:
    """Its scores count all the same, and the reason is kept."""
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
    """Its judge may revise it, and sees the note."""
    return Json(desk.send_back(who, sheet, wish.note, experiment))


def _conflict(exc: Conflict) -> Response:
    """The one error shape, with the item as it is now beside it."""
    detail = {} if exc.detail is None else {"detail": exc.detail}
    return Json({**error_json(exc.code, str(exc), exc.path), **detail}, exc.status)
