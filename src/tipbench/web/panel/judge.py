"""Pages for judges: batches, their results, and sheets as files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    DELAY_JUDGE_RESPONSE,
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

_DECIMALS_FOR_JUDGES = 1  # of a bias; admins see more (docs/judging.md)


def bias_words(bias: float | None, decimals: int = 2) -> str:
    """Return a judge's bias as text, for example "0.40 too high"."""
    if bias is None:
        return "unknown"
    size = f"{abs(bias):.{decimals}f}"
    if float(size) == 0:  # after rounding
        return "even"
    return f"{size} too {'high' if bias > 0 else 'low'}"


@dataclass(frozen=True)
class BatchResult:
    """The result of a closed batch."""

    verdict: str  # fine, beyond the limit, unknown
    summary: str
    scales: Sequence[Mapping[str, Any]]  # the judge's bias and error on each scale
    sentences: tuple[str, ...]  # on exceeded limits, or on duels shown in both orders
    repeat_consistency: str | None  # agreement with the judge's own earlier scores
    unscored: int
    cleared: int  # items left blank now, but scored by an earlier apply; their scores are kept
    by_file: bool  # uploaded as a file, not entered in the browser


# A result without numbers has the verdict "ok" or "held" instead of "fine" or "beyond the limit".
_VERDICTS = {"ok": "fine", "fine": "fine", "held": "beyond the limit", "beyond the limit": "beyond the limit"}
_SUMMARIES = {
    "fine": "Your scores match the reference scores as closely as an attentive judge's.",
    "beyond the limit": "Your scores differ from the reference scores by more than chance explains.",
    "unknown": "Too few scores to compare them with the reference scores.",
}


def batch_result(batch: BatchShape) -> BatchResult:
    """Return the result of a closed batch."""
    outcome = batch.outcome or {}
    drift = outcome.get("drift") or {}
    verdict = _VERDICTS.get(drift.get("verdict", ""), "unknown")
    sentences = tuple(drift_sentences(drift))
    n_both_orders = outcome.get("judged_in_both_orders")
    if batch.kind == "duel" and n_both_orders:
        n_same = number(outcome["same_in_both_orders"])
        shown = f"{plural(n_both_orders, 'duel')} {'was' if n_both_orders == 1 else 'were'} shown in both orders"
        sentences = (f"{shown}; you chose the same answer both times in {n_same} of {number(n_both_orders)}.",)
    repeats = outcome.get("self_agreement") or {}
    repeat_consistency = None
    if repeats.get("n"):
        repeat_consistency = (
            f"{plural(repeats['n'], 'tip')} you had scored before {'was' if repeats['n'] == 1 else 'were'} repeated: "
            f"{percent(repeats['exact'])} of these scores are the same as the first time."
        )
    return BatchResult(
        verdict=verdict,
        summary=_SUMMARIES[verdict],
        scales=[
            {**scale, "words": bias_words(scale["bias"], _DECIMALS_FOR_JUDGES)} for scale in _measured_scales(drift)
        ],
        sentences=sentences,
        repeat_consistency=repeat_consistency,
        unscored=outcome.get("unfinished", batch.items - batch.done),
        cleared=outcome.get("blank", 0),
        by_file=bool(outcome.get("by_file")),
    )


def drift_sentences(drift: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if the drift is only a verdict, and one for each exceeded limit that covers all scales."""
    if drift.keys() == {"verdict"}:
        yield "No numbers are shown: the sheet was finished before, or has few items filled."
    yield from limit_sentences(drift)


def _measured_scales(drift: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the scales that have a bias. A scale without scored controls has none."""
    return [scale for scale in drift.get("scales", ()) if scale["bias"] is not None]


router = APIRouter(dependencies=[JUDGES_TOO], include_in_schema=False)
limited_router = APIRouter(dependencies=[LIMIT_SHEET_REQUESTS, JUDGES_TOO], include_in_schema=False)


@router.get("/judge/batches/{sheet}")
def batch_page(request: Request, sheet: SheetPath, judge: Judge) -> HTMLResponse:
    """Show an open batch, or the result of a closed one. Admins see only the progress of another judge's batch."""
    batches = batch_service_of(request.app)
    detail = batches.detail(judge, sheet)
    batch = detail.batch
    if detail.skips is not None:  # another judge's batch
        return page(request, "judge_other.html", batch=batch, skips=detail.skips, json_url=batch.links.self)
    context: dict[str, Any] = {
        "batch": batch,
        "judge_url": judge_page_url(batch.experiment),
        "here_path": f"/judge/batches/{sheet}",
        "json_url": batch.links.self,
    }
    if batch.status != "open":
        return page(request, "judge_outcome.html", view=batch_result(batch), **context)
    recorded = batches.status_in_mlflow(sheet)
    return page(request, "judge_batch.html", recorded=recorded, **context)


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
    if not name:
        return _render_judge_page(request, judge, name)
    try:
        with panel.mlflow.connected() as mlflow:
            error = _experiment_error(mlflow.store, name)
    except MlflowUnavailable:
        if not _own_batches(request, judge, name):
            raise
        return _render_judge_page(request, judge, name, mlflow_unavailable=True)  # open batches do not require MLflow
    return _render_judge_page(request, judge, name, error=error)


@limited_router.post("/judge/batches")
def open_batch(request: Request, judge: Judge, panel: PanelState, form: SentForm) -> Response:
    """Redirect to the judge's open batch, or open a new one and redirect to it."""
    name = form.fields.get("experiment", "").strip()
    kind = form.fields.get("kind", str(Kind.SHEET))
    if kind not in set(Kind):
        raise Invalid(f"kind is sheet or duel (got {kind[:40]!r}).", path="body.kind")
    try:
        opened = batch_service_of(request.app).open(judge, name, kind=Kind(kind))
    except (Invalid, NotFound):  # only the experiment can be invalid or missing here
        return _render_judge_page(request, judge, name, error=_experiment_error(panel.mlflow.open().store, name))
    except NotEnoughData as exc:
        return _render_judge_page(request, judge, name, errors_by_field={"batch": str(exc)}, status=409)
    return RedirectResponse(f"/judge/batches/{opened.batch.sheet}", status_code=303)


@limited_router.post("/judge/sheet")
def fetch_sheet(request: Request, judge: Judge, panel: PanelState, store: Store, form: SentForm) -> Response:
    """Download a new sheet, or the judge's open one while more than half of it is unscored."""
    fields = form.fields
    name = fields.get("experiment", "").strip()
    if error := _experiment_error(store, name):
        return _render_judge_page(request, judge, name, error=error)
    options = {key: text for key in ("format", "limit") if (text := fields.get(key, "").strip())}
    try:
        sheet_request = parse_sheet_request(options, _as_judge(judge), panel.permissions)
        with panel.mlflow.judging_lock():
            stored = get_or_export_sheet(store, name, sheet_request)
    except Invalid as exc:
        return _render_judge_page(request, judge, name, errors_by_field=form_errors(exc), status=422)
    except NotEnoughData as exc:
        return _render_judge_page(request, judge, name, errors_by_field={"sheet": str(exc)}, status=409)
    return sheet_response(stored, sheet_request)


@limited_router.post("/judge/preview")
async def preview(request: Request, judge: Judge, panel: PanelState, store: Store) -> Response:
    """Preview an uploaded sheet and keep the file. No score is recorded yet."""
    parts = await read_parts(request)
    name = parts.fields.get("experiment", "").strip()
    file = parts.files.get("sheet", UploadedFile("", b""))
    async with panel.concurrency.filled_sheet():  # waits for a slot only after the upload, which may be slow
        return await run_in_threadpool(_preview_upload, request, panel, store, judge, name, file)


# DELAY_JUDGE_RESPONSE delays the response to a judge, so that its time does not reveal which items are controls.
@limited_router.post("/judge/uploads/{upload_id}/apply", dependencies=[DELAY_JUDGE_RESPONSE, LIMIT_FILLED_SHEETS])
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
        # With judge=None, a judge applies under the token's own name.
        options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=False, final=final)
        try:
            with panel.mlflow.judging_lock():
                result = apply_sheet(store, upload.experiment, parse_sheet(upload.content), options)
        except SheetRefused as exc:
            return _refused_page(request, judge, upload.experiment, upload.name, exc)
        uploads_of(request.app).save_outcome(upload, result)
    return RedirectResponse(_experiment_url(f"/judge/uploads/{upload_id}", experiment), status_code=303)


@router.get("/judge/uploads/{upload_id}")
def outcome(request: Request, upload_id: UploadId, judge: Judge, experiment: Name) -> Response:
    """Show the result of applying an upload."""
    upload = _find_upload(request, upload_id, judge, experiment)
    if upload.outcome is None:
        return RedirectResponse(judge_page_url(experiment), status_code=303)
    return _sheet_page(request, judge, upload, upload.outcome, is_preview=False)


def _render_judge_page(
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
    batches = _own_batches(request, judge, experiment) if exists else []
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
        answers_per_batch=DEFAULT_ANSWERS,
        scores_per_batch=_scores_per_batch(request, experiment) if exists and not mlflow_unavailable else None,
        batches=batches[:_MAX_BATCHES],
        open_batch=next((batch for batch in batches if batch.status == "open" and batch.kind == "sheet"), None),
        held=[batch for batch in batches if batch.status == "held"],
    )


def _scores_per_batch(request: Request, experiment: str) -> str | None:
    """Return a text on the number of scores in a new batch; None if it is unknown."""
    try:
        store = panel_of(request).mlflow.open().store
        experiment_id = get_experiment(store, experiment).experiment_id
        cell = next(iter(store.search(experiment_id, where={"kind": str(RunKind.CELL)}, limit=1)), None)
        if cell is None:
            return None
        n_tips = int(cell.params["n_tips"])
        n_scales = len(load_suite(cell.params["suite"]).rubric.scales)
    except (KeyError, ValueError, NotFound, TipbenchError):  # the page is usable without the number
        return None
    n_items = DEFAULT_ANSWERS + ceil(n_control_tips(DEFAULT_ANSWERS, n_tips) / n_tips)
    n_scores = round(n_items * n_tips * n_scales, -1)  # to tens
    return f"about {n_scores} scores: {n_items} items of {n_tips} tips, {n_scales} scales"


def _own_batches(request: Request, judge: Identity, experiment: str) -> list[BatchShape]:
    """Return the judge's batches, most recently used first."""
    return batch_service_of(request.app).page(_as_judge(judge), experiment, limit=MAX_LIMIT).items


def _preview_upload(
    request: Request, panel: Panel, store: RunStore, judge: Identity, name: str, file: UploadedFile
) -> Response:
    if error := _experiment_error(store, name):
        return _render_judge_page(request, judge, name, error=error)
    if not file.content:
        error = "Choose the filled sheet: the JSON or CSV file you downloaded here."
        return _render_judge_page(request, judge, name, errors_by_field={"file": error}, status=422)
    # With judge=None, a judge applies under the token's own name.
    options = ApplyOptions.of(_as_judge(judge), judge=None, accept=None, dry_run=True)
    try:
        with panel.mlflow.judging_lock():
            result = apply_sheet(store, name, parse_sheet(file.content), options)
    except SheetRefused as exc:
        return _refused_page(request, judge, name, file.name, exc)
    upload = uploads_of(request.app).add(judge.token_id, name, file.name, file.content, quota=quota_of(judge))
    return _sheet_page(request, judge, upload, result, is_preview=True)


def _sheet_page(
    request: Request, judge: Identity, upload: Upload, result: Mapping[str, Any], *, is_preview: bool
) -> HTMLResponse:
    changes = list(result.get("changes", ()))
    drift = result.get("drift") or {}
    verdict = drift.get("verdict")  # None until the drift is checked
    return page(
        request,
        "judge_sheet.html",
        judge=judge.name,
        upload=upload,
        applied=result,
        is_preview=is_preview,
        verdict=_VERDICTS.get(verdict, verdict) if verdict else None,
        scales=_measured_scales(drift),
        sentences=list(drift_sentences(drift)),
        changes=changes,
        changed_scales=changed_scales(changes),
        duels="judged_in_both_orders" in result,  # only results of duels have this key
        judge_url=judge_page_url(upload.experiment),
        apply_url=_experiment_url(f"/judge/uploads/{upload.id}/apply", upload.experiment),
    )


def changed_scales(changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the scales of the new scores, and "composite"; none for duels."""
    scales: dict[str, None] = {}  # an ordered set
    for change in changes:
        scales |= dict.fromkeys(change.get("given") or ())
    return list(scales)


def _refused_page(
    request: Request, judge: Identity, experiment: str, file_name: str, exc: SheetRefused
) -> HTMLResponse:
    errors = refused_sheet(exc)["errors"]
    return page(
        request,
        "judge_refused.html",
        status=422,
        judge=judge.name,
        file_name=file_name or "The file",
        errors=errors[:_MAX_ERRORS],
        more=max(0, len(errors) - _MAX_ERRORS),
        judge_url=judge_page_url(experiment),
    )


def _experiment_error(store: RunStore, name: str) -> str | None:
    """Return the message for an invalid or unknown experiment, or None. The message does not list experiments."""
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


def _as_judge(identity: Identity) -> Identity:
    """Return the identity with the role of a judge: admins judge blind, too."""
    return replace(identity, role=Role.JUDGE)


def _experiment_url(path: str, experiment: str) -> str:
    query = urlencode({"experiment": experiment}, errors="backslashreplace")  # UTF-8 cannot encode lone surrogates
    return f"{path}?{query}"
