"""Sheet endpoints: export a blind sheet, apply the filled one. Same code as `judge export` and `judge apply`.

A judge's token judges under its own name only, receives nothing that unblinds, and gets its open sheet again instead
of a second one: control items repeat across sheets, so a judge with several sheets could identify them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from tipbench.judge.sheet_file import parse_sheet
from tipbench.web.api.models import COMMON, DATA, AppliedShape, JudgingShape, SheetOptions, SheetShape
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, JUDGES_TOO
from tipbench.web.deps import LIMIT_CONCURRENCY, Judge, PanelState, Store, concurrency_limits
from tipbench.web.errors import Invalid, attachment
from tipbench.web.forms import JSON, body_schema, content_type, read_json
from tipbench.web.judge_service import (
    ApplyOptions,
    SheetRequest,
    apply_sheet,
    parse_sheet_request,
    sheet_file,
    sheet_for,
)

_ALL = {**COMMON, **DATA}
router = APIRouter(
    prefix="/api/bench/judge", tags=["judge"], dependencies=[LIMIT_CONCURRENCY, JUDGES_TOO], responses=_ALL
)
watching = APIRouter(prefix="/api/bench/judges", tags=["judge"], dependencies=[ADMINS_ONLY], responses=_ALL)

CSV = "text/csv"
_CSV_SCHEMA = {"schema": {"type": "string"}}
_SHEET_REQUEST = body_schema(
    SheetOptions, {"judge": "reviewer-1", "limit": 40}, about="Export options; optional.", required=False
)
_FILLED: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The filled sheet, or the filled duels.",
        "content": {JSON: {"schema": {"type": "object"}}, CSV: _CSV_SCHEMA},
    }
}


async def read_sheet_request(request: Request, judge: Judge, panel: PanelState) -> SheetRequest:
    """Parse the export options and check them against the token's permissions."""
    return parse_sheet_request(await read_json(request), judge, panel.allowed)


async def read_filled(request: Request, _judge: Judge) -> AsyncIterator[dict[str, Any]]:
    """Parse the filled sheet (JSON or CSV); its memory stays reserved until the request ends."""
    if content_type(request) not in (JSON, CSV):
        raise Invalid(f"A sheet is sent as {JSON} or {CSV} (got {content_type(request)[:80]!r}).", path="body")
    content = await request.body()
    async with concurrency_limits(request).sheet():
        yield await run_in_threadpool(parse_sheet, content)


@router.post(
    "/{experiment:path}/sheets",
    summary="Export a blind sheet",
    status_code=201,
    response_model=SheetShape,
    openapi_extra=_SHEET_REQUEST,
    responses={201: {"description": "The sheet, as `judge export` writes it.", "content": {CSV: _CSV_SCHEMA}}},
)
def export(
    experiment: ExperimentPath,
    query: Annotated[SheetRequest, Depends(read_sheet_request)],
    panel: PanelState,
    store: Store,
) -> Response:
    """Export answers in random order, without model or prompt, together with the rubric.

    The key that maps items to runs stays in MLflow.
    """
    # Two concurrent requests of one judge must not create two sheets.
    with panel.tracker.judging_lock() if query.own else nullcontext():
        judging = sheet_for(store, experiment, query)
    return Response(
        sheet_file(judging, query).encode("utf-8", "backslashreplace"),
        201,
        media_type=CSV if query.format == "csv" else JSON,
        headers=attachment(f"sheet-{judging.sheet.id}", query.format),
    )


@router.post(
    "/{experiment:path}/apply", summary="Apply a filled sheet", response_model=AppliedShape, openapi_extra=_FILLED
)
def apply(
    experiment: ExperimentPath,
    filled: Annotated[dict[str, Any], Depends(read_filled)],
    who: Judge,
    panel: PanelState,
    store: Store,
    dry_run: Annotated[bool, Query(description="Show what would change; write nothing.")] = False,
    judge: Annotated[str | None, Query(max_length=200, description="The judge, if the file has no name.")] = None,
    final: Annotated[
        bool, Query(description="Finish the sheet: check the drift now; open items return to the queue.")
    ] = False,
    accept_drift: Annotated[
        str | None, Query(max_length=1000, description="Accept the drift, with this reason; admins only.")
    ] = None,
) -> dict[str, Any]:
    """Validate the sheet, measure the judge's drift and apply the scores.

    A single error rejects the whole sheet (422). `drift` is null until the last item is scored or the sheet is final;
    a later revision returns its verdict only. 409 if the judge has opened duels in this experiment.
    """
    options = ApplyOptions.of(who, judge=judge, accept=accept_drift, dry_run=dry_run, final=final)
    with panel.tracker.judging_lock():
        return apply_sheet(store, experiment, filled, options)


@watching.get("/{experiment:path}", summary="Get judging status", response_model=JudgingShape)
def status(experiment: ExperimentPath, panel: PanelState, store: Store) -> dict[str, Any]:
    """Return the number of pending, held and judged cells, and each judge's drift and agreement."""
    return panel.queries.judging(store, experiment).to_json()
