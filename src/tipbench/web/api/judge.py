"""Judging endpoints: export and apply blind sheets, and judge batches in the browser.

Judges score under the name of their token, and receive nothing that identifies models, prompts or controls. A judge
has only one open sheet, and a second export returns it: comparing two sheets could reveal the controls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from tipbench.judge.sheet_file import parse_sheet
from tipbench.web.api.models import (
    COMMON_ERRORS,
    EXPERIMENT_ERRORS,
    AppliedShape,
    JudgingShape,
    SheetOptions,
    SheetShape,
)
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
from tipbench.web.deps import DELAY_JUDGE_RESPONSE, LIMIT_SHEET_REQUESTS, Admin, Judge, PanelState, Store, panel_of
from tipbench.web.errors import Invalid
from tipbench.web.forms import DEFAULT_LIMIT, JSON_TYPE, Limit, Next, body_of, body_schema, content_type, read_json
from tipbench.web.job_service import IdempotencyKey
from tipbench.web.judge_service import (
    CSV_TYPE,
    ApplyOptions,
    apply_sheet,
    get_or_export_sheet,
    parse_sheet_request,
    sheet_response,
)
from tipbench.web.queries import get_experiment
from tipbench.workflows.judging import SheetRequest

_RESPONSES = {**COMMON_ERRORS, **EXPERIMENT_ERRORS}
sheet_router = APIRouter(
    prefix="/api/bench/judge", tags=["judge"], dependencies=[LIMIT_SHEET_REQUESTS, JUDGES_TOO], responses=_RESPONSES
)
status_router = APIRouter(prefix="/api/bench/judges", tags=["judge"], dependencies=[ADMINS_ONLY], responses=_RESPONSES)

_TEXT_SCHEMA: dict[str, Any] = {"schema": {"type": "string"}}
_EXPORT_BODY = body_schema(
    SheetOptions, {"judge": "reviewer-1", "limit": 40}, about="Export options; optional.", required=False
)
_FILLED_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The filled sheet, or the filled duels.",
        "content": {JSON_TYPE: {"schema": {"type": "object"}}, CSV_TYPE: _TEXT_SCHEMA},
    }
}


async def read_sheet_request(request: Request, judge: Judge, panel: PanelState) -> SheetRequest:
    """Parse the export options and check them against the token's permissions."""
    return parse_sheet_request(await read_json(request), judge, panel.permissions)


async def read_filled_sheet(request: Request, _judge: Judge) -> AsyncIterator[dict[str, Any]]:
    """Parse the filled sheet (JSON or CSV). The dependency on `Judge` authenticates the client before the body is read.

    Waits if too many sheets are in memory, and raises Busy if the wait is too long. `apply` uses it with the scope
    "function", so that the sheet is freed before DELAY_JUDGE_RESPONSE delays the response.
    """
    if content_type(request) not in (JSON_TYPE, CSV_TYPE):
        raise Invalid(
            f"A sheet is sent as {JSON_TYPE} or {CSV_TYPE} (got {content_type(request)[:80]!r}).", path="body"
        )
    content = await request.body()
    async with panel_of(request).concurrency.filled_sheet():
        filled = await run_in_threadpool(parse_sheet, content)
        try:
            yield filled
        finally:
            filled.clear()


@sheet_router.post(
    "/{experiment:path}/sheets",
    summary="Export a blind sheet",
    status_code=201,
    response_model=SheetShape,
    openapi_extra=_EXPORT_BODY,
    responses={201: {"description": "The sheet, as `judge export` writes it.", "content": {CSV_TYPE: _TEXT_SCHEMA}}},
)
def export(
    experiment: ExperimentPath,
    sheet_request: Annotated[SheetRequest, Depends(read_sheet_request)],
    panel: PanelState,
    store: Store,
) -> Response:
    """Export answers in random order, without model or prompt, together with the rubric.

    The mapping from items to runs stays in MLflow.
    """
    # Two concurrent requests of one judge must not create two sheets. Admins may have several.
    lock = panel.mlflow.judging_lock() if sheet_request.by_judge else nullcontext()
    with lock:
        stored = get_or_export_sheet(store, experiment, sheet_request)
    return sheet_response(stored, sheet_request, status=201)


@sheet_router.post(
    "/{experiment:path}/apply",
    summary="Apply a filled sheet",
    openapi_extra=_FILLED_BODY,
    dependencies=[DELAY_JUDGE_RESPONSE],
)
def apply(
    experiment: ExperimentPath,
    filled: Annotated[dict[str, Any], Depends(read_filled_sheet, scope="function")],
    who: Judge,
    panel: PanelState,
    store: Store,
    dry_run: Annotated[bool, Query(description="Show what would change; write nothing.")] = False,
    judge: Annotated[str | None, Query(max_length=200, description="The judge's name, if the file has none.")] = None,
    final: Annotated[
        bool, Query(description="Finish the sheet: check the drift now, and return unscored items to the queue.")
    ] = False,
    accept_drift: Annotated[
        str | None, Query(max_length=1000, description="Reason for accepting the drift; admins only.")
    ] = None,
) -> AppliedShape:
    """Validate the sheet, measure the judge's drift and apply the scores.

    A single error rejects the whole sheet (422). `drift` is null until the last item is scored or the sheet is final.
    For a later revision, and for a sheet finished with few items, `drift` has only the verdict: its numbers would
    reveal the controls.

    Returns 409 if the judge has opened duels in this experiment. For a judge's token, the response takes at least 2
    seconds.
    """
    options = ApplyOptions.of(who, judge=judge, accept=accept_drift, dry_run=dry_run, final=final)
    with panel.mlflow.judging_lock():
        return AppliedShape.model_validate(apply_sheet(store, experiment, filled, options))


@status_router.get("/{experiment:path}", summary="Get judging status")
def status(experiment: ExperimentPath, panel: PanelState, store: Store) -> JudgingShape:
    """Return the number of pending, held and judged cells, and each judge's drift and agreement."""
    return JudgingShape.model_validate(panel.queries.judging(store, get_experiment(store, experiment)).to_json())


_BATCHES_PATH = "/api/bench/judge/{experiment:path}/batches"
batch_router = APIRouter(prefix=_BATCHES_PATH, tags=["judge"], dependencies=[JUDGES_TOO], responses=_RESPONSES)
held_batch_router = APIRouter(prefix=_BATCHES_PATH, tags=["judge"], dependencies=[ADMINS_ONLY], responses=_RESPONSES)

_ID_PATTERN = "^[0-9a-f]{1,64}$"
SheetPath = Annotated[str, Path(pattern=_ID_PATTERN, description="The batch's sheet.", examples=["3f9a1c0b7e52"])]
ItemPath = Annotated[str, Path(pattern=_ID_PATTERN, description="The item's id.", examples=["9c1d5d6e8f0a"])]
JudgeName = Annotated[
    str | None, Query(max_length=200, description="For admins: another judge's batches; * for all judges.")
]

_EXAMPLE_SCORES = {"relevance": 4, "actionability": 5, "tone": 4}
_OPEN_BODY = body_schema(BatchRequest, {"kind": "sheet"}, required=False)
_ITEM_BODY = body_schema(
    ItemRequest, {"version": 0, "state": "submitted", "tips": [{"scores": _EXAMPLE_SCORES}], "seconds": 31.5}
)
_UNDO_BODY = body_schema(UndoRequest, {"version": 3})
_ACCEPT_BODY = body_schema(AcceptRequest, {"reason": "agreed in the team"})
_RETURN_BODY = body_schema(ReturnRequest, {"note": "Please look at tone again."})


def _batch_service(request: Request) -> BatchService:
    return batch_service_of(request.app)


Batches = Annotated[BatchService, Depends(_batch_service)]
_OPEN_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The open batch, continued.", "model": BatchOpened},
    201: {"description": "A new batch."},
}


@batch_router.post(
    "",
    summary="Open a batch",
    status_code=201,
    openapi_extra=_OPEN_BODY,
    responses=_OPEN_RESPONSES,
    dependencies=[LIMIT_SHEET_REQUESTS],
)
def open_batch(
    experiment: ExperimentPath,
    body: Annotated[BatchRequest, body_of(BatchRequest, require_judge)],
    who: Judge,
    batches: Batches,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> BatchOpened:
    """Return the judge's open batch (200), or create one (201). The judge's name is the token's name.

    Requests with the same Idempotency-Key return the same batch, even after it has been closed.
    """
    opened = batches.open(who, experiment, kind=body.kind, limit=body.limit, idempotency_key=idempotency_key)
    response.status_code = 201 if opened.new else 200
    return opened


@batch_router.get("", summary="List batches")
def batches(
    experiment: ExperimentPath,
    who: Judge,
    batches: Batches,
    judge: JudgeName = None,
    limit: Limit = DEFAULT_LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> BatchList:
    """Return the caller's batches, most recently used first.

    Admins can list other judges' batches with `judge`, with counts and status only.
    """
    return batches.page(who, experiment, judge=judge, limit=limit, after=next)


@batch_router.get("/{sheet}/items/{item}/history", summary="Get an item's history")
def history(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    who: Judge,
    batches: Batches,
    limit: Limit = DEFAULT_LIMIT,
    next: Next = None,  # noqa: A002 - its name in the URL
) -> HistoryShape:
    """Return the saved versions of an item, newest first. Only the batch's judge can read them."""
    return batches.history(who, sheet, item, experiment=experiment, limit=limit, after=next)


@batch_router.get("/{sheet}", summary="Get a batch", response_model_exclude_unset=True)
def one(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchDetail:
    """Return the batch with its rubric, its items in order, and the scores saved so far. Does not require MLflow.

    For another judge's batch, admins get only the status and the skipped items.
    """
    return batches.detail(who, sheet, experiment=experiment)


@batch_router.put("/{sheet}/items/{item}", summary="Save an item", openapi_extra=_ITEM_BODY)
def save(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    body: Annotated[ItemRequest, body_of(ItemRequest, require_judge)],
    who: Judge,
    batches: Batches,
) -> ItemSaved:
    """Save a new version of an item; it is on disk when the response is sent.

    If the item has changed since `version`, nothing is saved; the response (409) has the current item in `detail`.
    """
    return batches.save(who, sheet, item, body, experiment=experiment)


@batch_router.post("/{sheet}/items/{item}/undo", summary="Undo the last change", openapi_extra=_UNDO_BODY)
def undo(
    experiment: ExperimentPath,
    sheet: SheetPath,
    item: ItemPath,
    body: Annotated[UndoRequest, body_of(UndoRequest, require_judge)],
    who: Judge,
    batches: Batches,
) -> ItemSaved:
    """Restore the item's previous state as a new version; each further call goes back one more step."""
    return batches.undo(who, sheet, item, body.version, experiment=experiment)


@batch_router.post("/{sheet}/close", summary="Close a batch", dependencies=[LIMIT_SHEET_REQUESTS, DELAY_JUDGE_RESPONSE])
def close(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchClosedShape:
    """Apply the scores of the submitted items, or hold them if the judge exceeds the drift limit.

    Items that are not submitted stay pending. Closing a closed batch returns the same result.
    """
    return batches.close(who, sheet, experiment=experiment)


@batch_router.post("/{sheet}/reopen", summary="Reopen a batch")
def reopen(experiment: ExperimentPath, sheet: SheetPath, who: Judge, batches: Batches) -> BatchAnswer:
    """Reopen a closed batch so that its judge can revise it.

    Scores that already count keep counting until the batch is closed again.
    """
    return batches.reopen(who, sheet, experiment=experiment)


@held_batch_router.post(
    "/{sheet}/accept",
    summary="Accept a held batch",
    openapi_extra=_ACCEPT_BODY,
    dependencies=[LIMIT_SHEET_REQUESTS],
)
def accept(
    experiment: ExperimentPath,
    sheet: SheetPath,
    body: Annotated[AcceptRequest, body_of(AcceptRequest, require_admin)],
    who: Admin,
    batches: Batches,
) -> BatchClosedShape:
    """Accept the scores of a held batch and store the reason. Returns 409 if the batch is not held."""
    return batches.accept(who, sheet, body.reason, experiment=experiment)


@held_batch_router.post("/{sheet}/return", summary="Return a held batch", openapi_extra=_RETURN_BODY)
def send_back(
    experiment: ExperimentPath,
    sheet: SheetPath,
    body: Annotated[ReturnRequest, body_of(ReturnRequest, require_admin)],
    who: Admin,
    batches: Batches,
) -> BatchAnswer:
    """Return a held batch to its judge for revision, with a note. Returns 409 if the batch is not held."""
    return batches.send_back(who, sheet, body.note, experiment=experiment)
