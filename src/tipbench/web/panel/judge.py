"""Pages for judges: open batches, judging, sheet upload, result of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import MlflowUnavailable, NotEnoughData, SheetRefused, TipbenchError
from tipbench.judge.controls import n_control_tips
from tipbench.judge.drift import limit_sentences
from tipbench.judge.sheet_file import parse_sheet
from tipbench.markup import number, percent
from tipbench.plan.suite import load_suite
from tipbench.record.run import RunKind
from tipbench.record.store import RunStore
from tipbench.text import plural
from tipbench.web.api.judge import SheetPath
from tipbench.web.auth import JUDGES_TOO, Identity, Role
from tipbench.web.batch_items import BatchShape
from tipbench.web.batch_store import Kind
from tipbench.web.batches import DEFAULT_ANSWERS, batch_service_of
from tipbench.web.deps import (
    FIX_RESPONSE_TIME,
    LIMIT_FILLED_SHEETS,
    LIMIT_SHEET_REQUESTS,
    Judge,
    Panel,
    PanelState,
    Store,
    panel_of,
)
from tipbench.web.errors import Invalid, NotFound, refused_sheet
from tipbench.web.forms import MAX_LIMIT, UploadedFile, read_parts
from tipbench.web.judge_service import (
    ApplyOptions,
    Upload,
    apply_sheet,
    get_or_export_sheet,
    parse_sheet_request,
    quota_of,
    sheet_response,
    uploads_of,
)
from tipbench.web.panel.pages import SentForm, form_errors, page
from tipbench.web.queries import get_experiment

_BIAS_DECIMALS = 1  # of the bias that a judge sees


def bias_words(bias: float | None, digits: int = 2) -> str:
    """Return a judge's bias as text, for example "0.40 too high"."""
    if bias is None:
        return "unknown"
    size = f"{abs(bias):.{digits}f}"
    if float(size) == 0:  # rounded
        return "even"
    return f"{size} too {'high' if bias > 0 else 'low'}"


@dataclass(frozen=True)
class BatchResult:
    """The result of a closed batch: the judge's drift and agreement."""

    verdict: str  # fine, beyond the limit, unknown
    summary: str
    scales: Sequence[Mapping[str, Any]]  # the judge's bias and error on each scale
    sentences: tuple[str, ...]  # on exceeded limits, or on duels shown in both orders
    repeat_consistency: str | None  # agreement with the judge's own earlier scores
    unscored: int
    cleared: int  # items cleared in this batch; they keep their earlier scores
    by_file: bool  # scores were uploaded as a file, not entered in the browser


# A result without numbers has the verdict "ok" or "held" instead of "fine" or "beyond the limit".
_VERDICTS = {"ok": "fine", "fine": "fine", "held": "beyond the limit", "beyond the limit": "beyond the limit"}
_SUMMARIES = {
    "fine": "Your scores match the reference scores as closely as an attentive judge's.",
    "beyond the limit": "Your scores differ from the reference scores by more than chance explains.",
    "unknown": "Too few scores to compare them with the reference scores.",
}


def batch_result(batch: BatchShape) -> BatchResult:
    """Return the result of a closed batch."""
    result = batch.outcome or {}
    drift = result.get("drift") or {}
    verdict = _VERDICTS.get(drift.get("verdict", ""), "unknown")
    sentences = list(drift_sentences(drift))
    if batch.kind == "duel" and (in_both_orders := result.get("judged_in_both_orders")):
        shown = f"{plural(in_both_orders, 'duel')} were shown in both orders"
        same = number(result["same_in_both_orders"])
        sentences = [f"{shown}; in {same} of them you chose the same answer both times."]
    repeats, consistency = result.get("self_agreement") or {}, None
    if repeats.get("n"):
        consistency = (
            f"{plural(repeats['n'], 'tip')} you had scored before were repeated: {percent(repeats['exact'])} of these "
            "scores are the same as the first time."
        )
    return BatchResult(
        verdict=verdict,
        summary=_SUMMARIES[verdict],
        scales=[
            {**each, "words": bias_words(each["bias"], _BIAS_DECIMALS)}
            for each in drift.get("scales", ())
            if each["bias"] is not None
        ],
        sentences=tuple(sentences),
        repeat_consistency=consistency,
        unscored=result.get("unfinished", batch.items - batch.done),
        cleared=result.get("blank", 0),
        by_file=bool(result.get("by_file")),
    )


def drift_sentences(drift: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each exceeded limit over all scales, and one if the result is only a verdict."""
    if drift.keys() == {"verdict"}:
        yield "A sheet finished again, or with few items filled, is shown without numbers."
    yield from limit_sentences(drift)


router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)
limited_router = APIRouter(dependencies=[LIMIT_SHEET_REQUESTS, JUDGES_TOO], include_in_schema=False)


@router.get("/judge/batches/{sheet}")
def batch_page(request: Request, sheet: SheetPath, judge: Judge) -> HTMLResponse:
    """Show an open batch for judging, or the result of a closed batch.

    Admins see only the progress of another judge's batch.
    """
    batches = batch_service_of(request.app)
    result = batches.detail(judge, sheet)
    batch = result.batch
    if result.skips is not None:
        return page(request, "judge_other.html", batch=batch, skips=result.skips, json_url=batch.links.self)
    context: dict[str, Any] = {
        "batch": batch,
        "judge_url": judge_page_url(batch.experiment),
        "here_path": f"/judge/batches/{sheet}",
        "json_url": batch.links.self,
    }
    if batch.status != "open":
        return page(request, "judge_outcome.html", view=batch_result(batch), **context)
    return page(request, "judge_batch.html", recorded=batches.recorded_already(sheet), **context)


@router.post("/judge/batches/{sheet}/reopen")
def reopen(request: Request, sheet: SheetPath, judge: Judge) -> Response:
    """Reopen a batch for its judge."""
    batch_service_of(request.app).reopen(judge, sheet)
    return RedirectResponse(f"/judge/batches/{sheet}", status_code=303)


def judge_page_url(experiment: str) -> str:
    """Return the URL of the judge's page for an experiment."""
    return _experiment_url("/judge", experiment)


_MAX_BATCHES = 20  # listed on the judge's page
_MAX_ERRORS = 200  # listed for a refused sheet
UploadId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Name = Annotated[str, Query(max_length=200)]


@router.get("/judge")
def judge_page(request: Request, judge: Judge, panel: PanelState, experiment: Name = "") -> HTMLResponse:
    """Show a form for the experiment's name. With a name, also show its batches, sheet download and sheet upload."""
    name = experiment.strip()
    try:
        error = _experiment_error(panel.tracker.open().store, name) if name else None
    except MlflowUnavailable:
        panel.tracker.locate_again()
        if not _batches(request, judge, name):
            raise
        return _judge_page(request, judge, name, mlflow_unavailable=True)  # open batches do not require MLflow
    return _judge_page(request, judge, name, error=error)


@limited_router.post("/judge/batches")
def open_batch(request: Request, judge: Judge, panel: PanelState, form: SentForm) -> Response:
    """Redirect to the judge's open batch, or open a new one and redirect to it."""
    name, kind = form.fields.get("experiment", "").strip(), form.fields.get("kind", str(Kind.SHEET))
    if kind not in set(Kind):
        raise Invalid(f"kind is sheet or duel (got {kind[:40]!r}).", path="body.kind")
    try:
        opened = batch_service_of(request.app).open(judge, name, kind=Kind(kind))
    except (Invalid, NotFound):
        return _judge_page(request, judge, name, error=_experiment_error(panel.tracker.open().store, name))
    except NotEnoughData as exc:
        return _judge_page(request, judge, name, errors_by_field={"batch": str(exc)}, status=409)
    return RedirectResponse(f"/judge/batches/{opened.batch.sheet}", status_code=303)


@limited_router.post("/judge/sheet")
def fetch_sheet(request: Request, judge: Judge, panel: PanelState, store: Store, form: SentForm) -> Response:
    """Download a new sheet, or the judge's open one while more than half of it is unscored."""
    fields = form.fields
    name = fields.get("experiment", "").strip()
    if error := _experiment_error(store, name):
        return _judge_page(request, judge, name, error=error)
    options = {"format": "json"}
    for key in ("format", "limit"):
        if text := fields.get(key, "").strip():
            options[key] = text
    try:
        query = parse_sheet_request(options, _as_judge(judge), panel.allowed)
        with panel.tracker.judging_lock():
            stored = get_or_export_sheet(store, name, query)
    except Invalid as exc:
        return _judge_page(request, judge, name, errors_by_field=form_errors(exc), status=422)
    except NotEnoughData as exc:
        return _judge_page(request, judge, name, errors_by_field={"sheet": str(exc)}, status=409)
    return sheet_response(stored, query)


@limited_router.post("/judge/preview")
async def preview(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """Preview an uploaded sheet. The file is kept until it is applied; no score is recorded yet."""
    parts = await read_parts(request)
    name, file = parts.fields.get("experiment", "").strip(), parts.files.get("sheet", UploadedFile("", b""))
    async with panel.concurrency.filled_sheet():  # taken after the upload, which may be slow
        return await run_in_threadpool(_preview_upload, request, panel, store, judge, name, file)


@limited_router.post("/judge/uploads/{upload_id}/apply", dependencies=[FIX_RESPONSE_TIME, LIMIT_FILLED_SHEETS])
def apply(
    request: Request,
    upload_id: UploadId,
    judge: Judge,
    panel: PanelState,
    store: Store,
    experiment: Name,
    final: bool = False,
) -> Response:
    """Apply the previewed file; `final` also finishes its sheet. Repeated requests have no effect."""
    upload = _find_upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=False, final=final)
        try:
            with panel.tracker.judging_lock():
                result = apply_sheet(store, upload.experiment, parse_sheet(upload.content), options)
        except SheetRefused as exc:
            return _refused_page(request, judge, upload.experiment, upload.name, exc)
        uploads_of(request.app).settle(upload, result)
    return RedirectResponse(_experiment_url(f"/judge/uploads/{upload_id}", experiment), status_code=303)


@router.get("/judge/uploads/{upload_id}")
def outcome(request: Request, upload_id: UploadId, judge: Judge, experiment: Name) -> Response:
    """Show the result of applying an upload."""
    upload = _find_upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        return RedirectResponse(judge_page_url(experiment), status_code=303)
    return _sheet_page(request, judge, upload, upload.outcome, dry=False)


def _judge_page(
    request: Request,
    judge: Identity,
    experiment: str,
    *,
    error: str | None = None,
    errors_by_field: Mapping[str, str] | None = None,
    mlflow_unavailable: bool = False,
    status: int = 200,
) -> HTMLResponse:
    exists = bool(experiment) and error is None
    batches = _batches(request, judge, experiment) if exists else []
    return page(
        request,
        "judge.html",
        status=404 if error else status,
        judge=judge.name,
        experiment=experiment,
        exists=exists,
        error=error,
        errors=errors_by_field or {},
        mlflow_unavailable=mlflow_unavailable,
        batch=DEFAULT_ANSWERS,
        scores=_scores_per_batch(request, experiment) if exists and not mlflow_unavailable else None,
        batches=batches[:_MAX_BATCHES],
        open=next((each for each in batches if (each.status, each.kind) == ("open", "sheet")), None),
        held=[each for each in batches if each.status == "held"],
    )


def _scores_per_batch(request: Request, experiment: str) -> str | None:
    """Return a text with the approximate number of scores in a new batch, or None if it is unknown."""
    try:
        store = panel_of(request).tracker.open().store
        experiment_id = get_experiment(store, experiment).experiment_id
        params = next(iter(store.search(experiment_id, where={"kind": str(RunKind.CELL)}, limit=1))).params
        tips, scales = int(params["n_tips"]), len(load_suite(params["suite"]).rubric.scales)
    except (StopIteration, KeyError, ValueError, NotFound, TipbenchError):
        return None
    items = DEFAULT_ANSWERS + ceil(n_control_tips(DEFAULT_ANSWERS, tips) / tips)
    return f"about {round(items * tips * scales, -1)} scores: {items} items of {tips} tips, {scales} scales"


def _batches(request: Request, judge: Identity, experiment: str) -> list[BatchShape]:
    """Return the judge's own batches, most recently used first."""
    return batch_service_of(request.app).page(_as_judge(judge), experiment, limit=MAX_LIMIT).items


def _preview_upload(
    request: Request, panel: Panel, store: RunStore, judge: Identity, name: str, file: UploadedFile
) -> Response:
    if error := _experiment_error(store, name):
        return _judge_page(request, judge, name, error=error)
    if not file.content:
        error = "Choose the filled sheet: the JSON or CSV file you downloaded here."
        return _judge_page(request, judge, name, errors_by_field={"file": error}, status=422)
    options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=True)
    try:
        with panel.tracker.judging_lock():
            result = apply_sheet(store, name, parse_sheet(file.content), options)
    except SheetRefused as exc:
        return _refused_page(request, judge, name, file.name, exc)
    upload = uploads_of(request.app).keep(judge.token_id, name, file.name, file.content, quota=quota_of(judge))
    return _sheet_page(request, judge, upload, result, dry=True)


def _sheet_page(
    request: Request, judge: Identity, upload: Upload, result: Mapping[str, Any], *, dry: bool
) -> HTMLResponse:
    changes, drift = list(result.get("changes", ())), result.get("drift") or {}
    return page(
        request,
        "judge_sheet.html",
        judge=judge.name,
        upload=upload,
        applied=result,
        dry=dry,
        verdict=_VERDICTS.get(drift.get("verdict", ""), drift.get("verdict")),
        scales=[scale for scale in drift.get("scales", ()) if scale.get("bias") is not None],
        sentences=list(drift_sentences(drift)),
        changes=changes,
        columns=list(dict.fromkeys(name for change in changes for name in change.get("given") or ())),
        duels="judged_in_both_orders" in result,
        judge_url=judge_page_url(upload.experiment),
        apply_url=_experiment_url(f"/judge/uploads/{upload.id}/apply", upload.experiment),
    )


def _refused_page(request: Request, judge: Identity, name: str, file_name: str, exc: SheetRefused) -> HTMLResponse:
    errors = refused_sheet(exc)["errors"]
    return page(
        request,
        "judge_refused.html",
        status=422,
        judge=judge.name,
        file_name=file_name or "The file",
        errors=errors[:_MAX_ERRORS],
        more=max(0, len(errors) - _MAX_ERRORS),
        judge_url=judge_page_url(name),
    )


def _experiment_error(store: RunStore, name: str) -> str | None:
    """Return the message for an invalid or unknown experiment, or None. It does not list the experiments to judges."""
    try:
        get_experiment(store, name)
    except Invalid:
        return "An experiment's name starts with tip-bench-. Ask the person who invited you for the name."
    except NotFound:
        return "There is no experiment with this name. Ask the person who invited you for the name."
    return None


def _find_upload(request: Request, upload_id: str, judge: Identity, experiment: str) -> Upload:
    upload = uploads_of(request.app).find(upload_id, judge.token_id, experiment)
    if upload is None:
        raise NotFound("This upload has expired or belongs to another user. Upload the file again.")
    return upload


def _as_judge(who: Identity) -> Identity:
    """Return the identity with the role of a judge, because admins judge blind, too."""
    return replace(who, role=Role.JUDGE)


def _experiment_url(path: str, experiment: str) -> str:
    return f"{path}?{urlencode({'experiment': experiment}, errors='backslashreplace')}"
